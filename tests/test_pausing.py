"""Drafting that loses pauses and costs little; drafting that wins goes on. The clock is made up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from doctored_models import Doctored
from fakes import FakeModel, as_language_model
from speculation_checks import Forced, decode_plainly

from colibri_jax.generate.loop import GenerateOptions, generate
from colibri_jax.generate.pausing import Pacer
from colibri_jax.generate.speculate import SpeculationOptions, Speculator
from colibri_jax.generate.speculation_stats import SpeculationStats

PROMPT = [1, 2, 3]
N = 600


class Timed(Doctored):
    """Every forward takes its time, which a clock of its own shows: `cost(rows, tokens so far)` seconds."""

    def __init__(self, model: FakeModel, cost: Callable[[int, int], float]) -> None:
        super().__init__(model)
        self.now, self._cost = 0.0, cost

    def forward(self, tokens: Any, **options: Any) -> Any:
        if options["scope"] != "prefill":
            self.now += self._cost(len(tokens), self.model.position)
        return self.model.forward(tokens, **options)


def run(cost: Callable[[int, int], float], wrong: Callable[[int], bool], n: int = N, **fields: Any) -> tuple[float, SpeculationStats]:
    """Seconds of an answer of n tokens over seconds without drafts, and what drafting did."""
    script = dict(enumerate(np.random.default_rng(0).integers(0, 300, n + 20).tolist()))

    def fresh() -> FakeModel:
        return FakeModel(context_positions=n + 20, script=script)

    options = GenerateOptions(max_new_tokens=n)
    plain = decode_plainly(as_language_model(fresh()), PROMPT, options)
    model = Timed(fresh(), cost)
    drafter = Forced(plain.answer, 0, 300, wrong)
    speculator = Speculator(model, drafter, SpeculationOptions(depth=3, **fields), clock=lambda: model.now)  # type: ignore[arg-type]
    made = generate(model, PROMPT, options, make=speculator.tokens)  # type: ignore[arg-type]
    assert made == plain.generation
    alone = sum(cost(1, len(PROMPT) + i) for i in range(n - 1))
    return model.now / alone, speculator.stats


def per_row(rows: int, _: int) -> float:
    """Every row costs as much as a step of its own: drafts can only lose."""
    return 1.0 * rows


def per_step(rows: int, _: int) -> float:
    """Rows are nearly free: right drafts win."""
    return 1.0 + 0.1 * (rows - 1)


@pytest.mark.parametrize("n", [512, 600, 2000])
@pytest.mark.parametrize(
    "wrong", [lambda p: True, lambda p: p % 2 == 0, lambda p: p % 5 == 0], ids=["always", "every second", "every fifth"]
)
def test_drafting_that_loses_costs_at_most_five_percent(wrong: Callable[[int], bool], n: int) -> None:
    slowdown, stats = run(per_row, wrong, n)
    assert 1.0 < slowdown <= 1.05
    assert stats.paused_steps > 0.7 * n
    assert sum(p.tokens for p in stats.pauses) == pytest.approx(stats.paused_steps, abs=8)
    assert "s per token with drafts, 1 without" in stats.pauses[0].reason
    # It tried again, as soon as there were tokens enough to lose some.
    assert len(stats.pauses) > (n == 2000)


def test_without_pausing_the_same_drafts_lose_much() -> None:
    slowdown, stats = run(per_row, lambda p: True, pausing=False)
    assert slowdown > 3
    assert (stats.plain_steps, stats.pauses) == (1, ())


def test_drafting_that_wins_goes_on() -> None:
    speedup, stats = run(per_step, lambda p: p % 10 == 0)
    assert speedup < 0.5
    assert stats.pauses == ()
    assert stats.paused_steps == 0
    # The price of a plain step is looked at from time to time.
    assert 4 < stats.measuring_steps < 0.05 * N


def test_drafting_comes_back_when_it_pays() -> None:
    def dear_at_first(rows: int, position: int) -> float:
        return per_row(rows, 0) if position < 200 else per_step(rows, 0)

    slowdown, stats = run(dear_at_first, lambda p: p % 10 == 0, 2000)
    assert stats.pauses
    assert stats.verified_tokens > 1200
    assert slowdown < 0.6


def test_drafting_that_stops_to_pay_stops() -> None:
    def dear_in_the_end(rows: int, position: int) -> float:
        return per_step(rows, 0) if position < 1000 else per_row(rows, 0)

    _, stats = run(dear_in_the_end, lambda p: p % 10 == 0, 2000)
    assert stats.pauses
    assert stats.pauses[0].at_token < 1040
    assert stats.paused_steps > 700


def test_one_step_that_hung_is_no_verdict() -> None:
    def hangs_once(rows: int, position: int) -> float:
        return 1e6 if rows > 1 and 300 <= position < 304 else per_step(rows, 0)

    _, stats = run(hangs_once, lambda p: p % 10 == 0, 4000)
    assert stats.verified_tokens > 2400


def test_a_pacer_without_plain_steps_judges_nothing() -> None:
    pacer = Pacer("s", enabled=False)
    assert pacer.wants_draft()
    for _ in range(100):
        pacer.drafted_step(1e9, 1)
    assert pacer.wants_draft()
    assert pacer.pauses == ()


@pytest.mark.parametrize("wrong", [False, True])
def test_costs_of_union_are_counts(wrong: bool) -> None:
    """The fake model keeps 8 experts in a step of any kind; a verification of four rows loses by their other weights, unless they stay."""

    def broken() -> float:
        raise AssertionError("union mode looked at a clock")

    plain = decode_plainly(as_language_model(FakeModel()), PROMPT, GenerateOptions(max_new_tokens=100))
    model, drafter = as_language_model(FakeModel()), Forced(plain.answer, 0, 300, lambda _: wrong)
    speculator = Speculator(model, drafter, SpeculationOptions(speculation="union"), clock=broken)
    assert generate(model, PROMPT, GenerateOptions(max_new_tokens=100), make=speculator.tokens) == plain.generation
    assert [pause.at_token < 20 for pause in speculator.stats.pauses] == [True] * wrong
    assert (speculator.stats.verification_steps > 20) == (not wrong)
