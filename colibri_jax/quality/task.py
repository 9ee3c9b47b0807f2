"""The task score: multiple choice by log-likelihood, in the steps that a budget is used in, and what a budget costs there.

A choice's score is log p(choice | its question) − log p(choice | a question that asks nothing), each a sum over the choice's tokens:
how much likelier the question makes it. Long, rare or oddly spelled choices are unlikely after any question, and without
the second term the score would mostly tell that. Both terms are the same model's, under the same options.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from colibri_jax.errors import NonFiniteLogitError, OptionError
from colibri_jax.generate.protocol import LanguageModel
from colibri_jax.quality.run import QualityError
from colibri_jax.quality.statistics import Estimate, Float32, Float64, mean
from colibri_jax.quality.steps import StepShape
from colibri_jax.routing_spec import Scope
from colibri_jax.tokenizer import ChatTokenizer

NEUTRAL_QUESTION = "What is it?"
# Exact must reach this: below it, a cut that costs much could not be told from one that costs nothing.
LEAST_EXACT_ACCURACY = 0.45
# Standard errors of a paired difference that count as noise.
NOISE_BAND = 2.0

Progress = Callable[[int, int], None]
"""How many of how many prompts are done: the questions, and the neutral one."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Question:
    """A multiple-choice question.

    Attributes:
        term: what it is about.
        question: as the user asks it.
        choices: what the assistant might answer; two or more, all different.
        answer: index of the right one.

    Raises:
        OptionError: it is no such question.
    """

    term: str
    question: str
    choices: tuple[str, ...]
    answer: int

    def __post_init__(self) -> None:
        if len(self.choices) < 2 or len(set(self.choices)) < len(self.choices) or not all(self.choices):
            raise OptionError("no choice between these", where=f"choices, {self.term}", expected="2 or more, different", got=self.choices)
        if not 0 <= self.answer < len(self.choices):
            raise OptionError("no such choice", where=f"answer, {self.term}", expected=f"0 to {len(self.choices) - 1}", got=self.answer)


def read_questions(path: Path) -> list[Question]:
    """Questions of a file with one JSON object a line: term, question, choices, answer.

    Raises:
        OptionError: a line is something else, there is none, or questions differ in the number of choices.
    """
    questions = []
    with path.open(encoding="utf8") as lines:
        for number, line in enumerate(lines, 1):
            try:
                fields = json.loads(line)
                term, question, choices, answer = (fields[name] for name in ("term", "question", "choices", "answer"))
                questions.append(Question(term=str(term), question=str(question), choices=tuple(map(str, choices)), answer=int(answer)))
            except (ValueError, KeyError, TypeError) as error:
                expected = '{"term", "question", "choices", "answer"}'
                raise OptionError("not a question", where=f"{path}, line {number}", expected=expected, got=line.strip()[:40]) from error
    if len({len(question.choices) for question in questions}) != 1:
        got = sorted({len(question.choices) for question in questions})
        raise OptionError("questions of different kinds", where=str(path), expected="one number of choices", got=got)
    return questions


@dataclasses.dataclass(frozen=True)
class PairedDifference:
    """The same questions, answered by two: how much more of them the first got right than the second.

    Attributes:
        accuracy: difference of the accuracies, with the standard error of the mean of the questions' differences: questions on which both
            are right, or both wrong, add nothing to it (as in McNemar's test).
        right_probability: likewise of `TaskResult.right_probability`, which notices smaller changes.
        gained, lost: questions that only the first, and only the second, got right.
    """

    accuracy: Estimate
    right_probability: Estimate
    gained: int
    lost: int

    @property
    def within_noise(self) -> bool:
        """Whether the first is no worse than the second by more than the noise band."""
        return self.accuracy.value >= -NOISE_BAND * self.accuracy.error

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self) | {"within_noise": self.within_noise}


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class TaskResult:
    """Answers to Q questions of C choices each.

    Attributes:
        questions: as they were asked.
        log_likelihoods: float64 [Q, C], log p of each choice after its question, nats, summed over its tokens.
        baselines: float64 [Q, C], the same after the neutral question.
        tokens: int64 [Q, C], tokens of each choice.
    """

    questions: tuple[Question, ...]
    log_likelihoods: Float64
    baselines: Float64
    tokens: npt.NDArray[np.int64]

    @property
    def scores(self) -> Float64:
        """float64 [Q, C]: what the choice is taken by."""
        return self.log_likelihoods - self.baselines

    @property
    def chosen(self) -> npt.NDArray[np.int64]:
        """int64 [Q]: the choice with the highest score, ties to the lowest index."""
        return np.asarray(np.argmax(self.scores, axis=1), np.int64)

    @property
    def answers(self) -> npt.NDArray[np.int64]:
        """int64 [Q]: the right choices."""
        return np.array([question.answer for question in self.questions], np.int64)

    @property
    def right(self) -> npt.NDArray[np.bool_]:
        """bool [Q]."""
        return np.asarray(self.chosen == self.answers, np.bool_)

    @property
    def accuracy(self) -> Estimate:
        """Share of questions answered rightly, with its binomial standard error."""
        share, n = float(self.right.mean()), len(self.questions)
        return Estimate(share, math.sqrt(share * (1.0 - share) / n))

    @property
    def right_probabilities(self) -> Float64:
        """float64 [Q]: the right choice's share of exp(scores)."""
        excess = np.exp(self.scores - self.scores.max(axis=1, keepdims=True))
        return np.asarray(excess[np.arange(len(excess)), self.answers] / excess.sum(axis=1))

    @property
    def right_probability(self) -> Estimate:
        """Mean of the above: it moves before the first answer turns."""
        return mean(self.right_probabilities)

    @property
    def chance(self) -> float:
        """What guessing reaches."""
        return 1.0 / len(self.questions[0].choices)

    @property
    def void(self) -> str:
        """Of the model without a cut: why no other result can be judged by this one; empty where it can."""
        accuracy = self.accuracy
        if accuracy.value >= LEAST_EXACT_ACCURACY:
            return ""
        reached = f"exact answers {100 * accuracy.value:.1f} % (± {100 * accuracy.error:.1f}) of {len(self.questions)} questions rightly"
        return f"the task gate is void: {reached}, below {100 * LEAST_EXACT_ACCURACY:.0f} %; chance is {100 * self.chance:.0f} %"

    def minus(self, other: TaskResult) -> PairedDifference:
        """This result against another one on the same questions, question by question.

        Raises:
            OptionError: the questions are others.
        """
        if self.questions != other.questions:
            expected, got = f"the same {len(self.questions)}", f"{len(other.questions)} others"
            raise OptionError("results of different questions", where="questions", expected=expected, got=got)
        return PairedDifference(
            accuracy=mean(self.right.astype(np.float64) - other.right),
            right_probability=mean(self.right_probabilities - other.right_probabilities),
            gained=int((self.right & ~other.right).sum()),
            lost=int((other.right & ~self.right).sum()),
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "questions": len(self.questions),
            "accuracy": self.accuracy.to_json(),
            "right_probability": self.right_probability.to_json(),
            "chance": self.chance,
            "chosen": self.chosen.tolist(),
        }


def score_questions(
    model: LanguageModel,
    tokenizer: ChatTokenizer,
    questions: Sequence[Question],
    shape: StepShape,
    *,
    neutral: str = NEUTRAL_QUESTION,
    progress: Progress = lambda done, total: None,
) -> TaskResult:
    """Let a model choose.

    A prompt is prefilled once, in chunks of `shape.chunk`; every choice is scored after it and then taken back. Its tokens but the last
    one, which predicts nothing, run in the steps of the shape: one position a step, `rows` in a verification step, or (kind "prefill")
    chunks of their own. Its first token is scored by the prompt's last position. `shape.prefix` does not matter.

    Routing options are the model's: `reroute(options, shape.budget_scopes)` comes first.

    Args:
        questions: one or more, all with the same number of choices.
        neutral: a question that fits any answer.

    Raises:
        OptionError: no questions, questions that differ in their number of choices, or a budget that acts elsewhere than the shape says.
        QualityError: the cache did not come back to the end of the prompt.
        NonFiniteLogitError: a logit is NaN or infinite.
        ContextOverflowError: a question with its longest choice does not fit in the model's context.
    """
    counts = sorted({len(question.choices) for question in questions})
    if len(counts) != 1:
        raise OptionError("questions of one kind", where="questions", expected="one number of choices", got=counts)
    if model.budget_scopes != shape.budget_scopes:
        expected, got = sorted(shape.budget_scopes), sorted(model.budget_scopes)
        raise OptionError("the budget acts in other steps", where=f"budget_scopes, {shape.kind}", expected=expected, got=got)
    ids = {choice: choice_ids(tokenizer, choice) for question in questions for choice in question.choices}
    total = 1 + len(questions)
    progress(0, total)
    neutral_scores = dict(zip(ids, _score_choices(model, prompt_ids(tokenizer, neutral), list(ids.values()), shape), strict=True))
    found = []
    for done, question in enumerate(questions, 1):
        progress(done, total)
        found.append(_score_choices(model, prompt_ids(tokenizer, question.question), [ids[choice] for choice in question.choices], shape))
    progress(total, total)
    return TaskResult(
        questions=tuple(questions),
        log_likelihoods=np.array(found, np.float64),
        baselines=np.array([[neutral_scores[choice] for choice in question.choices] for question in questions], np.float64),
        tokens=np.array([[len(ids[choice]) for choice in question.choices] for question in questions], np.int64),
    )


def prompt_ids(tokenizer: ChatTokenizer, question: str) -> list[int]:
    """Everything before an answer: the model's prefix, the question as its chat template writes it, the assistant's marker."""
    if tokenizer.has_chat_template:
        return tokenizer.encode_chat([{"role": "user", "content": question}])
    return tokenizer.encode_raw(f"<|user|>\n{question}<|assistant|>\n")


def choice_ids(tokenizer: ChatTokenizer, choice: str) -> list[int]:
    """A choice's own tokens, without what the tokenizer puts before every text."""
    return tokenizer.encode_raw(choice)[len(tokenizer.encode_raw("")) :]


def choice_steps(shape: StepShape, prompt: int, positions: int) -> Iterator[tuple[int, int, Scope]]:
    """The steps of so many positions that follow a prompt: start and end, counted from the end of the prompt, and scope."""
    if shape.kind == "prefill":
        for start in range(0, positions, shape.chunk):
            yield start, min(start + shape.chunk, positions), "prefill"
        return
    for step in dataclasses.replace(shape, prefix=prompt).steps(prompt + positions):
        if step.start >= prompt:
            yield step.start - prompt, step.stop - prompt, step.scope


def _score_choices(model: LanguageModel, prompt: list[int], choices: Sequence[list[int]], shape: StepShape) -> list[float]:
    """log p of every choice after a prompt."""
    model.reset()
    for start in range(0, len(prompt), shape.chunk):
        last_W = model.forward(prompt[start : start + shape.chunk], scope="prefill", logits="last")
    found = []
    for ids in choices:
        rows = [last_W]
        for start, stop, scope in choice_steps(shape, len(prompt), len(ids) - 1):
            rows.append(model.forward(ids[start:stop], scope=scope))
        found.append(_log_likelihood(np.concatenate(rows), ids))
        model.rewind(len(ids) - 1)
        if model.position != len(prompt):
            raise QualityError("a choice was not taken back", where="position", expected=len(prompt), got=model.position)
    return found


def _log_likelihood(logits_TW: Float32, ids: list[int]) -> float:
    """Sum over t of log p(ids[t]) by row t."""
    if not np.isfinite(logits_TW).all():
        row = int(np.argmin(np.isfinite(logits_TW).all(axis=1)))
        raise NonFiniteLogitError("logits of a choice", where=f"row {row}", expected="finite", got="NaN or infinite")
    z_TW = logits_TW.astype(np.float64)
    z_TW -= z_TW.max(axis=1, keepdims=True)
    log_p_T = z_TW[np.arange(len(ids)), ids] - np.log(np.exp(z_TW).sum(axis=1))
    return float(log_p_T.sum())
