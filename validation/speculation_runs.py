"""Generated runs of exact speculation: options, two set-ups of the engine and a drafter; what drafts changed, and what they did."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from choosing import Chooser
from model_runs import make_routing, make_setup
from speculation_checks import Forced, Plain, Repeats, decode_plainly, differences, inconsistencies

import colibri_jax
from colibri_jax.config import ModelConfig
from colibri_jax.generate.drafters import Draft, Drafter, LookupDrafter, MTPDrafter
from colibri_jax.generate.loop import GenerateOptions
from colibri_jax.generate.sampling import SamplingOptions
from colibri_jax.generate.speculate import MOST_DRAFTS, SpeculationOptions
from colibri_jax.generate.speculation_stats import SpeculationStats
from colibri_jax.routing_spec import SCOPES, RoutingOptions, Scope

CONTEXT = 96
DRAFTERS = ("aimed", "some", "wrong", "right", "repeats", "lookup", "mtp")


class Aimed(Forced):
    """Guesses from a known answer, each draft wrong at a chosen depth, or nowhere.

    Args:
        wrong_depths: per draft, the depth (1 first) of the one wrong guess; one beyond the draft's length leaves it all right.
    """

    name = "aimed"

    def __init__(self, answer: dict[int, int], vocabulary: int, wrong_depths: Sequence[int]) -> None:
        self._wrong_depths, self._drafts, self._start = wrong_depths, 0, 0
        super().__init__(answer, 0, vocabulary, lambda position: position - self._start == self._wrong_depth)

    @property
    def _wrong_depth(self) -> int:
        return self._wrong_depths[(self._drafts - 1) % len(self._wrong_depths)]

    def draft(self, token: int, n: int) -> Draft:
        self._drafts += 1
        self._start = self.position
        return super().draft(token, n)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpeculationRun:
    """What a model is put through, once with drafts and once without.

    Attributes:
        prompt: at least one token.
        routing, scopes: as for `load`; exact speculation takes any of them.
        setup, other_setup: of the engine that decodes without drafts, and of the one with drafts; they may change no bit.
        options: of both runs.
        speculation: of the one with drafts.
        drafter: one of DRAFTERS.
        wrong_depths: of drafter "aimed".
        wrong_positions: of drafter "some", modulo their number.
        fewer: whether "some", "wrong" and "right" guess fewer than they were asked for.
    """

    prompt: tuple[int, ...]
    routing: RoutingOptions
    scopes: tuple[Scope, ...]
    setup: dict[str, Any]
    other_setup: dict[str, Any]
    options: GenerateOptions
    speculation: SpeculationOptions
    drafter: str
    wrong_depths: tuple[int, ...]
    wrong_positions: tuple[bool, ...]
    fewer: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one run gave.

    Attributes:
        faults: differences from decoding without drafts, and sums that do not add up.
        stats: of the drafts.
        layer_steps, acted: of verification: (MoE layer, step) pairs, and those in which the budget took an expert from a row.
    """

    faults: list[str]
    stats: SpeculationStats
    layer_steps: int
    acted: int


def make_speculation(c: Chooser, config: ModelConfig, depth: int, *, pausing: bool = False, drafter: str | None = None) -> SpeculationRun:
    """A run on a model; `drafter`: instead of a drawn one ("mtp" only where the model has a block)."""
    kinds = DRAFTERS if config.n_mtp_layers else DRAFTERS[:-1]
    drafter = drafter or c.pick(("aimed", "aimed", "aimed", *kinds))
    longest = min(CONTEXT, config.max_positions)
    n_prompt = c.integer(1, 12)
    # Half of the drafts are wrong at their last guess or nowhere, so that deep ones are accepted and rejected.
    wrong_depths = tuple(c.pick((depth, depth + 1, c.integer(1, depth))) for _ in range(16))
    return SpeculationRun(
        prompt=tuple(c.integer(0, config.vocab_size - 1) for _ in range(n_prompt)),
        routing=_routing(c, config),
        scopes=c.pick((("decode",), ("decode",), ("decode",), SCOPES, ("prefill", "decode"), ("verify",))),
        setup=make_setup(c, config),
        other_setup=make_setup(c, config),
        options=GenerateOptions(
            max_new_tokens=c.integer(10, longest - n_prompt),
            prefill_chunk=c.pick((3, 512)),
            sampling=SamplingOptions(temperature=c.pick((0.0, 0.7, 1.0)), top_p=c.pick((1.0, 0.8)), seed=c.integer(0, 2**31)),
            stop_ids=frozenset(c.integer(0, config.vocab_size - 1) for _ in range(c.pick((0, 0, 0, 1)))),
        ),
        speculation=SpeculationOptions(depth=depth, pausing=pausing),
        drafter=drafter,
        wrong_depths=wrong_depths,
        wrong_positions=tuple(c.pick((False, False, False, True)) for _ in range(64)),
        fewer=c.pick((False, True)),
    )


def _routing(c: Chooser, config: ModelConfig) -> RoutingOptions:
    """As everywhere, but mostly with a budget below what a row uses: more cuts no row that is routed alone."""
    routing, top_k = make_routing(c, config), config.moe.router.top_k
    if top_k < 2 or c.integer(0, 3) == 0:
        return routing
    return dataclasses.replace(routing, budget=c.integer(1, top_k - 1), expert_topk=c.pick((0, 0, 0, routing.expert_topk)))


def outcome_of(container: Path, config: ModelConfig, run: SpeculationRun, doctored: Callable[[Any], Any] = lambda lm: lm) -> Outcome:
    """Run it twice on the native engine; `doctored`: what becomes of the model that drafts are verified with."""
    context = min(CONTEXT, config.max_positions)
    common: dict[str, Any] = {"routing": run.routing, "budget_scopes": run.scopes, "context_positions": context}
    plain = decode_plainly(colibri_jax.load(container, **common, **run.setup), run.prompt, run.options)
    lm = colibri_jax.load(container, **common, **run.other_setup, mtp=run.drafter == "mtp")
    drafter = _drafter(run, plain, lm, config.vocab_size)
    found, stats = differences(plain, doctored(lm), drafter, run.prompt, run.options, run.speculation)
    verified = lm.stats.scopes["verify"]
    return Outcome(
        faults=found + inconsistencies(stats),
        stats=stats,
        layer_steps=verified.layer_steps,
        acted=verified.budget_acted_layer_steps,
    )


def by_depth(stats: SpeculationStats, name: str) -> np.ndarray:
    """int64 [MOST_DRAFTS] of one of its counts per depth."""
    counts: tuple[int, ...] = getattr(stats, name)
    return np.pad(np.asarray(counts, np.int64), (0, MOST_DRAFTS - len(counts)))


def _drafter(run: SpeculationRun, plain: Plain, lm: Any, vocabulary: int) -> Drafter:
    if run.drafter == "aimed":
        return Aimed(plain.answer, vocabulary, run.wrong_depths)
    if run.drafter == "repeats":
        return Repeats()
    if run.drafter == "lookup":
        return LookupDrafter(longest=2, shortest=1)
    if run.drafter == "mtp":
        return MTPDrafter(lm, run.options.sampling)
    wrong = {"right": (False,), "wrong": (True,), "some": run.wrong_positions}[run.drafter]
    return Forced(plain.answer, 0, vocabulary, lambda position: wrong[position % len(wrong)], fewer=run.fewer)
