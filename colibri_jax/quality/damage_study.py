"""A study of prefill cuts: which texts and settings are run, what comes of them, and what has to hold whatever the model."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from colibri_jax.config import ModelConfig
from colibri_jax.generate.texts import read_documents
from colibri_jax.quality.damage import LayerErrors, Mode, ModeResult, TextDamage, TracedModel
from colibri_jax.quality.statistics import Summary, TokenResults, summarise
from colibri_jax.quality.windows import Windows
from colibri_jax.routing_spec import RoutingOptions
from colibri_jax.tokenizer import ChatTokenizer

CHUNK = 64
BUDGETS, SMALLEST, DECODE_BUDGET = (8, 16, 32, 48), 8, 4
POLICIES = {
    "aggregate survivors": RoutingOptions(),
    "aggregate frozen": RoutingOptions(denominator="frozen"),
    "floor frozen": RoutingOptions(policy="floor", denominator="frozen"),
}
WORST = "aggregate survivors"
ONE_STEP, ANSWER = "in one step", "answers"
ASSISTANT = "<|assistant|>\n"
LEAST_ANSWER, MOST_ANSWER = 12, 64

Answer = tuple[npt.NDArray[np.int32], int]
"""Tokens of a document [n + 1], and how many of them are the question's."""


def name_of(policy: str, budget: object) -> str:
    """A setting's name."""
    return f"{policy} {budget}"


def cuts() -> dict[str, RoutingOptions]:
    """All policies at all budgets, by name."""
    return {name_of(policy, n): dataclasses.replace(options, budget=n) for policy, options in POLICIES.items() for n in BUDGETS}


@dataclasses.dataclass
class Study:
    """Results so far: by setting and mode one result per window, and by setting the layers' errors."""

    config: ModelConfig
    chunk: int = CHUNK
    windows: int = 0
    answers: int = 0
    modes: dict[tuple[str, Mode], list[ModeResult]] = dataclasses.field(default_factory=dict)
    layers: dict[str, LayerErrors] = dataclasses.field(default_factory=dict)
    texts: list[tuple[str, list[tuple[str, str]]]] = dataclasses.field(default_factory=list)
    failures: list[str] = dataclasses.field(default_factory=list)

    @property
    def moe(self) -> tuple[int, ...]:
        return self.config.moe_layers

    def add(self, name: str, found: dict[Mode, ModeResult]) -> None:
        for mode, result in found.items():
            self.modes.setdefault((name, mode), []).append(result)

    def errors(self, name: str) -> LayerErrors:
        return self.layers.setdefault(name, LayerErrors.none(self.config.n_layers, len(self.moe)))

    def summary(self, name: str, mode: Mode) -> Summary:
        return summarise([result.tokens for result in self.modes[name, mode]])

    def kld(self, name: str, mode: Mode) -> float:
        return self.summary(name, mode).kld.value

    def chosen(self, name: str, mode: Mode, by: str, low: int, high: int) -> TokenResults:
        """Tokens whose place, or number of layers emptied, is at least `low` and below `high`."""
        values = [(result, getattr(result, by)) for result in self.modes[name, mode]]
        return TokenResults.joined([result.where((low <= value) & (value < high)).tokens for result, value in values])

    def single(self, policy: str, index: int) -> str:
        """Name of the cut of one MoE layer alone."""
        return name_of(policy, f"{SMALLEST}, layer {self.moe[index]} alone")


def read_answers(path: Path, tokenizer: ChatTokenizer, count: int) -> list[Answer]:
    """The first documents that are a question and an answer of LEAST_ANSWER tokens or more, cut off after MOST_ANSWER."""
    return list(itertools.islice(_answers(path, tokenizer), count))


def _answers(path: Path, tokenizer: ChatTokenizer) -> Iterator[Answer]:
    for document in read_documents(path):
        question, marker, answer = document.partition(ASSISTANT)
        asked, ids = tokenizer.encode_raw(question + marker), tokenizer.encode_raw(document)
        if answer and ids[: len(asked)] == asked and len(ids) - len(asked) > LEAST_ANSWER:
            yield np.array(ids[: len(asked) + MOST_ANSWER + 1], np.int32), len(asked)


def measure(model: TracedModel, windows: Windows, answers: Sequence[Answer], study: Study, progress: Callable[[], None]) -> None:
    """All settings on every window and every answer; `progress` is called after each."""
    for index, tokens in enumerate(windows):
        window = TextDamage(model, tokens, range(0, len(tokens) - 1, study.chunk))
        _measure_cuts(window, study, "", layers=True)
        _measure_all_scopes(window, study, "")
        for policy, options in POLICIES.items():
            name = name_of(name_of(policy, SMALLEST), ONE_STEP)
            study.add(name, {"both": window.in_one_step(dataclasses.replace(options, budget=SMALLEST), study.errors(name))})
            for at in range(len(study.moe)):
                budget = tuple(SMALLEST if at == other else 0 for other in range(len(study.moe)))
                study.add(study.single(policy, at), window.after_cut(dataclasses.replace(options, budget=budget), ("past", "both")))
        if index in (0, len(windows) - 1) and window.exact_again().kld.any():
            study.failures.append(f"window {index}: the exact model differs from itself")
        study.windows += 1
        progress()
    for tokens, asked in answers:
        text = TextDamage(model, tokens, (0, asked), traced=False)
        _measure_cuts(text, study, f" {ANSWER}", layers=False)
        _measure_all_scopes(text, study, f" {ANSWER}")
        study.answers += 1
        progress()
    check(study)


def _measure_cuts(text: TextDamage, study: Study, suffix: str, *, layers: bool) -> None:
    """Modes "own", "past" and "both" of all policies and budgets."""
    own = text.after_exact(list(cuts().values()), "own")
    for name, routing in cuts().items():
        study.add(name + suffix, {"own": own[routing]})
        study.add(name + suffix, text.after_cut(routing, ("past", "both"), study.errors(name) if layers else None))


def _measure_all_scopes(text: TextDamage, study: Study, suffix: str) -> None:
    """Modes "past", "decode" and "all" of one policy at small budgets, by names of their own."""
    small = {n: dataclasses.replace(POLICIES[WORST], budget=n) for n in (DECODE_BUDGET, SMALLEST)}
    decoded = text.after_exact(list(small.values()), "decode")
    for n, routing in small.items():
        found: dict[Mode, ModeResult] = {"decode": decoded[routing], **text.after_cut(routing, ("past", "all"))}
        study.add(all_scopes(n) + suffix, found)


def all_scopes(budget: int) -> str:
    """Name of a budget that is also run in every scope."""
    return name_of(WORST, f"{budget}, by scope")


def check(study: Study) -> None:
    """What has to hold whatever the model."""
    first = study.moe[0]
    for name, errors in study.layers.items():
        if errors.hidden_L2[:first].any() or errors.kv_L[: first + 1].any():
            study.failures.append(f"{name}: an error before the first cut")
        if errors.miscounted:
            study.failures.append(f"{name}: in {errors.miscounted} steps other rows are empty than were counted")
        if name.startswith("floor") and errors.costs.emptied_L.any():
            study.failures.append(f"{name}: a floor emptied a row")
    for policy in POLICIES:
        if study.kld(study.single(policy, len(study.moe) - 1), "past"):
            study.failures.append(f"{policy}: a cut of the last layer alone damaged what later steps read")
    if study.config.moe.router.top_k <= SMALLEST:
        past, everything = (study.modes[all_scopes(SMALLEST), mode] for mode in ("past", "all"))
        if any((a.tokens.kld != b.tokens.kld).any() for a, b in zip(past, everything, strict=True)):
            study.failures.append("a budget that no single position exceeds changed decode steps")
    for suffix in ("", f" {ANSWER}"):
        parts = {key: results for key, results in study.modes.items() if key[0].endswith(ANSWER) == bool(suffix)}
        exact = [np.concatenate([result.tokens.nll_base for result in results]) for results in parts.values()]
        if any(not np.array_equal(exact[0], other) for other in exact):
            study.failures.append(f"{'answers' if suffix else 'windows'}: settings were compared with different exact models")
