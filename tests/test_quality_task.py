"""The task score: what is scored and in which steps, the questions' balance, the gate that is void, and that planted faults are seen."""

from __future__ import annotations

import dataclasses
import json
import math
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from engine_models import ODD, converted
from fakes import CHAT_TEMPLATE, HF_CONFIG, FakeModel, as_language_model, byte_tokenizer
from quality import make_questions

import colibri_jax
from colibri_jax.cli.options import SHIPPED_MODEL
from colibri_jax.config import ModelConfig
from colibri_jax.errors import NonFiniteLogitError, OptionError
from colibri_jax.quality import task
from colibri_jax.quality.run import QualityError
from colibri_jax.quality.steps import StepKind, StepShape
from colibri_jax.quality.task import Question, TaskResult, choice_ids, prompt_ids, read_questions, score_questions
from colibri_jax.routing_spec import RoutingOptions
from colibri_jax.tokenizer import ChatTokenizer

DECODE = StepShape(kind="decode")
KINDS: tuple[StepKind, ...] = ("decode", "verify", "prefill", "prefill_then_decode", "all")
TOKENIZER = ChatTokenizer(byte_tokenizer(), chat_template=CHAT_TEMPLATE)
QUESTIONS = tuple(
    Question(term=term, question=f"What is {term}?", choices=choices, answer=answer)
    for term, choices, answer in (
        ("ash", ("A tree", "A sort of number", "To sleep", "x"), 0),
        ("bit", ("A bird of the sea", "A digit", "Slowly", "Old"), 1),
        ("cow", ("Red", "A law", "An animal", "A digit"), 2),
        ("day", ("To run", "Blue", "A tree", "Some hours"), 3),
    )
)


class Knowing(FakeModel):
    """After each question it expects the right answer, after any other text nothing in particular.

    Args:
        lean: how much likelier, as a logit, the right answer's next token is.
    """

    def __init__(self, lean: float = 2.0, **arguments: Any) -> None:
        super().__init__(config=dataclasses.replace(ModelConfig.from_hf(HF_CONFIG), max_positions=512), context_positions=512, **arguments)
        self.lean = lean

    def _score(self) -> npt.NDArray[np.float32]:
        row = super()._score()
        for question in QUESTIONS:
            prompt = prompt_ids(TOKENIZER, question.question)
            text = prompt + choice_ids(TOKENIZER, question.choices[question.answer])
            if len(prompt) <= self.position < len(text) and text[: self.position] == self._tokens:
                row[text[self.position]] += self.lean
        return row


def scored(model: FakeModel | None = None, shape: StepShape = DECODE) -> TaskResult:
    model = model or Knowing()
    model.reroute(RoutingOptions(), shape.budget_scopes)
    return score_questions(as_language_model(model), TOKENIZER, QUESTIONS, shape)


def by_hand(lean: float = 2.0) -> npt.NDArray[np.float64]:
    """[2, Q, C]: log p after the question and after the neutral one, each choice in one step from an empty context."""

    def log_p(question: str, choice: str) -> float:
        prompt = list(TOKENIZER.encode_raw(f"<|user|>\n{question}<|assistant|>\n{choice}"))
        n = len(choice.encode())
        logits = Knowing(lean).forward(prompt, scope="prefill").astype(np.float64)
        terms = [logits[t - 1, prompt[t]] - math.log(np.exp(logits[t - 1]).sum()) for t in range(len(prompt) - n, len(prompt))]
        return math.fsum(terms)

    return np.array([[[log_p(asked or q.question, choice) for choice in q.choices] for q in QUESTIONS] for asked in ("", "What is it?")])


EXPECTED = by_hand()


def agrees(result: TaskResult) -> bool:
    return bool(np.allclose([result.log_likelihoods, result.baselines], EXPECTED, rtol=0, atol=1e-9))


# ---- what is scored -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_choice_gets_its_own_tokens_log_likelihood_whatever_the_steps(kind: StepKind) -> None:
    result = scored(shape=StepShape(kind=kind, rows=3, chunk=7))
    assert agrees(result)
    assert result.tokens.tolist() == [[len(choice) for choice in question.choices] for question in QUESTIONS]
    assert result.scores == pytest.approx(EXPECTED[0] - EXPECTED[1])


def test_the_known_answers_are_chosen() -> None:
    result = scored(Knowing(lean=20.0))
    assert result.chosen.tolist() == [0, 1, 2, 3]
    assert result.accuracy.value == 1.0
    assert result.void == ""


def test_a_choice_of_one_token_takes_no_step() -> None:
    assert [len(choice) for choice in QUESTIONS[0].choices][3] == 1
    assert agrees(scored())


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        (StepShape(kind="decode", chunk=20), [("prefill", 20), ("prefill", 10), *[("decode", 1)] * 9]),
        (StepShape(kind="verify", rows=4), [("prefill", 30), ("verify", 4), ("verify", 4), ("verify", 1)]),
        (StepShape(kind="prefill", chunk=8), [*[("prefill", 8)] * 3, ("prefill", 6), ("prefill", 8), ("prefill", 1)]),
        (StepShape(kind="all", chunk=20), [("prefill", 20), ("prefill", 10), *[("decode", 1)] * 9]),
    ],
)
def test_choices_run_in_the_steps_of_the_shape(shape: StepShape, expected: list[tuple[str, int]]) -> None:
    question = Question(term="a", question="What is this?", choices=("0123456789", "x"), answer=0)
    assert len(prompt_ids(TOKENIZER, question.question)) == 2 + 1 + 1 + 13 + 1 + 1  # markers and bytes
    model = FakeModel(budget_scopes=shape.budget_scopes)
    score_questions(as_language_model(model), TOKENIZER, [dataclasses.replace(question, question="What is this?" + "?" * 11)], shape)
    calls = [(call.scope, call.n) for call in model.calls]
    assert calls[len(calls) - len(expected) :] == expected


def test_the_budget_must_act_where_the_shape_says() -> None:
    model = Knowing(budget_scopes=frozenset({"prefill"}))
    with pytest.raises(OptionError, match="other steps"):
        score_questions(as_language_model(model), TOKENIZER, QUESTIONS, DECODE)


def test_progress_reaches_the_end() -> None:
    seen: list[tuple[int, int]] = []
    score_questions(as_language_model(Knowing()), TOKENIZER, QUESTIONS, DECODE, progress=lambda *counts: seen.append(counts))
    assert seen == [(0, 5), (1, 5), (2, 5), (3, 5), (4, 5), (5, 5)]


# ---- planted faults -------------------------------------------------------------------------------------------------


class KeepsAll(Knowing):
    """Does not rewind at all."""

    def rewind(self, n: int) -> None:
        pass


class SaysItRewound(Knowing):
    """Believes that it rewound, and still sees the tokens of the choice before."""

    _behind = 0

    @property
    def position(self) -> int:
        return len(self._tokens) - self._behind

    def rewind(self, n: int) -> None:
        self._behind += n

    def reset(self) -> None:
        super().reset()
        self._behind = 0


def test_a_choice_that_was_not_taken_back_is_an_error() -> None:
    with pytest.raises(QualityError, match="not taken back"):
        scored(KeepsAll())


def test_a_cache_that_still_holds_the_choice_before_is_seen() -> None:
    assert not agrees(scored(SaysItRewound()))


def plant_shift(original: Callable[..., float]) -> Callable[..., float]:
    return lambda logits, ids: original(logits[1:], ids[:-1])


def plant_no_prefix(original: Callable[..., list[int]]) -> Callable[..., list[int]]:
    return lambda tokenizer, question: original(tokenizer, question)[2:]


def plant_empty_prompt(original: Callable[..., list[int]]) -> Callable[..., list[int]]:
    return lambda tokenizer, question: original(tokenizer, question)[-1:]


def plant_question_too(original: Callable[..., list[float]]) -> Callable[..., list[float]]:
    def faulty(model: FakeModel, prompt: list[int], choices: Sequence[list[int]], shape: StepShape) -> list[float]:
        model.reset()
        scores = task._log_likelihood(model.forward(prompt, scope="prefill")[:-1], prompt[1:])
        return [scores + value for value in original(model, prompt, choices, shape)]

    return faulty


def plant_prefixed_choice(original: Callable[..., list[int]]) -> Callable[..., list[int]]:
    return lambda tokenizer, choice: tokenizer.encode_raw(choice)


@pytest.mark.parametrize(
    ("name", "plant"),
    [
        ("_log_likelihood", plant_shift),
        ("prompt_ids", plant_no_prefix),
        ("prompt_ids", plant_empty_prompt),
        ("_score_choices", plant_question_too),
        ("choice_ids", plant_prefixed_choice),
    ],
)
def test_a_planted_fault_is_seen(name: str, plant: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task, name, plant(getattr(task, name)))
    assert not agrees(scored())


def test_a_logit_that_is_no_number_is_an_error() -> None:
    class Broken(Knowing):
        def _score(self) -> npt.NDArray[np.float32]:
            row = super()._score()
            row[0] = np.nan if self.position > 20 else 0.0
            return row

    with pytest.raises(NonFiniteLogitError):
        scored(Broken())


# ---- results --------------------------------------------------------------------------------------------------------


def result_of(rights: Sequence[bool], terms: str = "t") -> TaskResult:
    """A result that is right where it should be, on questions whose answers go around."""
    questions = tuple(Question(term=f"{terms}{i}", question="?", choices=("a", "b", "c", "d"), answer=i % 4) for i in range(len(rights)))
    scores = np.zeros((len(rights), 4))
    for i, right in enumerate(rights):
        scores[i, (i + (0 if right else 1)) % 4] = 1.0
    return TaskResult(questions=questions, log_likelihoods=scores, baselines=np.zeros_like(scores), tokens=np.ones(scores.shape, np.int64))


@pytest.mark.parametrize(("rights", "void"), [(44, True), (45, False), (25, True), (100, False)])
def test_the_gate_is_void_below_45_per_cent_and_says_the_figure(rights: int, void: bool) -> None:
    result = result_of([i < rights for i in range(100)])
    assert bool(result.void) == void
    assert not void or f"{rights}.0 %" in result.void


def test_accuracy_has_the_binomial_error() -> None:
    accuracy = result_of([i < 60 for i in range(100)]).accuracy
    assert (accuracy.value, accuracy.error) == (0.6, pytest.approx(math.sqrt(0.6 * 0.4 / 100)))


def test_the_paired_error_counts_only_the_questions_that_turned() -> None:
    exact = result_of([i < 60 for i in range(100)])
    cut = result_of([4 <= i < 61 for i in range(100)])  # four lost, one gained
    difference = cut.minus(exact)
    assert (difference.gained, difference.lost) == (1, 4)
    assert difference.accuracy.value == pytest.approx(-0.03)
    assert difference.accuracy.error == pytest.approx(math.sqrt((5 - 9 / 100) / (100 * 99)))
    assert difference.within_noise
    assert difference.accuracy.error < math.hypot(exact.accuracy.error, cut.accuracy.error) / 2


@pytest.mark.parametrize(("lost", "within"), [(0, True), (3, True), (5, False), (40, False)])
def test_a_loss_beyond_the_noise_band_is_told(lost: int, within: bool) -> None:
    exact, cut = result_of([True] * 100), result_of([i >= lost for i in range(100)])
    assert cut.minus(exact).within_noise == within
    assert exact.minus(cut).within_noise  # better is never too much worse


def test_results_of_different_questions_do_not_compare() -> None:
    with pytest.raises(OptionError, match="different questions"):
        result_of([True] * 4).minus(result_of([True] * 4, terms="u"))


def test_the_right_choices_probability_moves_before_an_answer_turns() -> None:
    exact = result_of([True] * 8)
    weaker = dataclasses.replace(exact, log_likelihoods=exact.log_likelihoods / 2)
    difference = weaker.minus(exact)
    assert exact.right_probability.value == pytest.approx(math.e / (math.e + 3))
    assert difference.accuracy.value == 0.0
    assert difference.right_probability.value == pytest.approx(math.exp(0.5) / (math.exp(0.5) + 3) - math.e / (math.e + 3))


def test_a_result_becomes_json() -> None:
    found = json.loads(json.dumps(result_of([True, False]).to_json() | result_of([True]).minus(result_of([False])).to_json()))
    assert found["questions"] == 2
    assert found["within_noise"] is True


# ---- the questions --------------------------------------------------------------------------------------------------


def share_of_first(questions: Sequence[Question]) -> float:
    """What someone reaches who always takes the first choice; a model without opinions does, too."""
    zeros = np.zeros((len(questions), 4))
    result = TaskResult(questions=tuple(questions), log_likelihoods=zeros, baselines=zeros, tokens=zeros.astype(np.int64))
    assert not result.chosen.any()
    return result.accuracy.value


def test_there_are_enough_questions_and_their_answers_are_balanced() -> None:
    questions = read_questions(make_questions.QUESTIONS)
    assert len(questions) >= 400
    counts = Counter(question.answer for question in questions)
    assert set(counts) == {0, 1, 2, 3}
    assert max(counts.values()) - min(counts.values()) <= 1
    assert share_of_first(questions) == pytest.approx(0.25, abs=1 / len(questions))
    assert share_of_first([dataclasses.replace(question, answer=0) for question in questions]) == 1.0  # what a fixed place would give


def test_the_file_is_what_its_rules_make() -> None:
    definitions = list(make_questions.read_definitions(make_questions.HELDOUT, make_questions.HEADWORDS))
    made = make_questions.make_questions(definitions, make_questions.SEED)
    lines = make_questions.QUESTIONS.read_text(encoding="utf8").splitlines()
    assert [json.loads(line) for line in lines] == made
    assert made != make_questions.make_questions(definitions, make_questions.SEED + 1)


def test_distractors_keep_the_rules() -> None:
    definitions = {(d.term, d.text): d for d in make_questions.read_definitions(make_questions.HELDOUT, make_questions.HEADWORDS)}
    by_text: dict[str, list[make_questions.Definition]] = {}
    for definition in definitions.values():
        by_text.setdefault(definition.text, []).append(definition)
    for question in read_questions(make_questions.QUESTIONS):
        right = definitions[question.term, question.choices[question.answer]]
        for i, choice in enumerate(question.choices):
            assert (by_text[choice][0].general == right.general) == (i == question.answer)
            assert i == question.answer or not any(other.stems & right.stems for other in by_text[choice])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<networking> (FDSE) A Switched link. It carries data.\n(1996-06-20)", "A Switched link."),
        ("/bif/, vt.\n[now rare] To notify someone, e.g. by Mr. Brown. From BSD", "To notify someone, e.g. by Mr. Brown."),
        ("1. <job> /op/ 1. A common abbreviation.\n2. The general term", "A common abbreviation."),
        ("to behave as though it had memory and other", ""),
        ("n.,adj.\n[very common; odd] Often used.", "Often used."),
    ],
)
def test_a_computing_entry_becomes_its_first_sentence(text: str, expected: str) -> None:
    assert make_questions.computing_definition(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('n 1: a group; "a bastion" 2: a stronghold', "a group"),
        ("adj 1: trendy and fashionable n 1: someone", "trendy and fashionable"),
        ("n : (law) a security; on failure it is lost ", "a security; on failure it is lost"),
    ],
)
def test_a_wordnet_entry_becomes_its_first_sense(text: str, expected: str) -> None:
    assert make_questions.general_definition(text) == expected


@pytest.mark.parametrize(
    "line",
    [
        "not json",
        '{"term": "a", "question": "?", "choices": ["a", "b"]}',
        '{"term": "a", "question": "?", "choices": ["a", "b"], "answer": 2}',
        '{"term": "a", "question": "?", "choices": ["a", "a"], "answer": 0}',
        '{"term": "a", "question": "?", "choices": ["a", "b", "c"], "answer": 0}\n'
        '{"term": "b", "question": "?", "choices": ["a", "b"], "answer": 0}',
        "",
    ],
)
def test_a_file_that_is_no_questions_is_refused(line: str, tmp_path: Path) -> None:
    file = tmp_path / "questions.jsonl"
    file.write_text(line)
    with pytest.raises(OptionError):
        read_questions(file)


# ---- real models ----------------------------------------------------------------------------------------------------


def test_the_shipped_models_prompt_is_its_own_form() -> None:
    tokenizer = ChatTokenizer.from_directory(SHIPPED_MODEL)
    ids = prompt_ids(tokenizer, "What is Zork?")
    assert ids == tokenizer.encode_raw("[gMASK]<sop><|user|>\nWhat is Zork?<|assistant|>\n")
    assert tuple(ids[:2]) == tokenizer.prefix_ids != ()
    # Prompt and choice meet where the tokenizer cuts anyway, so that the model reads what it was trained on.
    for question in read_questions(make_questions.QUESTIONS)[:40]:
        for choice in question.choices:
            joined = tokenizer.encode_raw(f"[gMASK]<sop><|user|>\nWhat is Zork?<|assistant|>\n{choice}")
            assert ids + choice_ids(tokenizer, choice) == joined


def test_the_shipped_model_scores_the_same_in_all_steps_and_less_when_cut() -> None:
    lm: Any = colibri_jax.load(SHIPPED_MODEL, cache_experts=64, threads=1)
    tokenizer, questions = ChatTokenizer.from_directory(SHIPPED_MODEL), read_questions(make_questions.QUESTIONS)[:20]

    def result(kind: StepKind, budget: int, n: int) -> TaskResult:
        shape = StepShape(kind=kind)
        lm.reroute(RoutingOptions(budget=budget), shape.budget_scopes)
        return score_questions(lm, tokenizer, questions[:n], shape)

    exact = result("prefill", 0, 20)
    assert exact.void == ""
    for kind in ("decode", "verify"):  # a position does not depend on who shares its step
        assert result(kind, 0, 5).log_likelihoods.tobytes() == exact.log_likelihoods[:5].tobytes()
    assert result("decode", 2, 5).log_likelihoods.sum() < exact.log_likelihoods[:5].sum()


def test_both_backends_score_alike(tmp_path: Path) -> None:
    small = {**ODD, "vocab_size": 263, "num_hidden_layers": 2, "first_k_dense_replace": 1, "indexer_types": ["full", "full"]}
    container = converted(tmp_path, small)
    found = []
    for backend, arguments in (("native", {"cache_experts": 4}), ("reference", {})):
        lm: Any = colibri_jax.load(container, backend, "w4a32", **arguments)
        lm.reroute(RoutingOptions(budget=2), DECODE.budget_scopes)
        found.append(score_questions(lm, TOKENIZER, QUESTIONS[3:], DECODE, neutral="What is dew?"))
    native, reference = found
    assert native.chosen.tolist() == reference.chosen.tolist()
    assert native.log_likelihoods == pytest.approx(reference.log_likelihoods, rel=1e-4)
    assert native.scores == pytest.approx(reference.scores, abs=1e-3)
