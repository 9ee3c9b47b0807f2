"""Statistics of a quality comparison against slow definitions; every fault that such statistics have had is planted and found."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable

import numpy as np
import pytest

from colibri_jax.errors import NonFiniteLogitError, ShapeError
from colibri_jax.quality import statistics as quality
from colibri_jax.quality.costs import StepCosts
from colibri_jax.quality.report import share
from colibri_jax.quality.statistics import Estimate, TokenResults, compare_logits, summarise
from colibri_jax.routing_spec import Selection

Compare = Callable[..., TokenResults]
TOLERANCE = 1e-12


def log_probabilities(row: list[float]) -> list[float]:
    largest = max(row)
    log_sum = math.log(math.fsum(math.exp(z - largest) for z in row))
    return [z - largest - log_sum for z in row]


def defined(base: np.ndarray, cut: np.ndarray, targets: np.ndarray) -> list[tuple[float, float, bool, float, float]]:
    """The five figures of every token, one at a time."""
    rows = []
    for b, c, target in zip(base.tolist(), cut.tolist(), targets.tolist(), strict=True):
        p, q = log_probabilities(b), log_probabilities(c)
        kld = math.fsum(math.exp(x) * (x - y) for x, y in zip(p, q, strict=True))
        rows.append((kld, math.exp(q[target]) - math.exp(p[target]), b.index(max(b)) == c.index(max(c)), -p[target], -q[target]))
    return rows


def case(seed: int = 0, rows: int = 9, vocab: int = 13, noise: float = 1.0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    base = (4.0 * rng.standard_normal((rows, vocab))).astype(np.float32)
    return base, (base + noise * rng.standard_normal(base.shape)).astype(np.float32), rng.integers(0, vocab, rows).astype(np.int32)


def check(compare: Compare) -> None:
    """A comparison against its definition."""
    base, cut, targets = case()
    got = compare(base, cut, targets)
    for row, (kld, delta_p, same, nll_base, nll_cut) in enumerate(defined(base, cut, targets)):
        assert math.isclose(got.kld[row], kld, abs_tol=TOLERANCE)
        assert math.isclose(got.delta_p[row], delta_p, abs_tol=TOLERANCE)
        assert bool(got.same_top[row]) == same
        assert math.isclose(got.nll_base[row], nll_base, abs_tol=TOLERANCE)
        assert math.isclose(got.nll_cut[row], nll_cut, abs_tol=TOLERANCE)


def test_every_token_is_compared_as_defined() -> None:
    check(compare_logits)


def in_bits(base: np.ndarray, cut: np.ndarray, targets: np.ndarray) -> TokenResults:
    got = compare_logits(base, cut, targets)
    return TokenResults(got.kld / math.log(2.0), got.delta_p, got.same_top, got.nll_base, got.nll_cut)


def all_zeros(base: np.ndarray, cut: np.ndarray, targets: np.ndarray) -> TokenResults:
    nothing = np.zeros(len(targets))
    return TokenResults(nothing, nothing, np.ones(len(targets), np.bool_), nothing, nothing)


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(lambda b, c, t: compare_logits(c, b, t), id="direction swapped"),
        pytest.param(in_bits, id="bits"),
        pytest.param(lambda b, c, t: compare_logits(b, c, np.roll(t, 1)), id="target off by one"),
        pytest.param(lambda b, c, t: compare_logits(np.roll(b, 1, axis=0), c, t), id="base of another position"),
        pytest.param(lambda b, c, t: compare_logits(b, b, t), id="base against itself"),
        pytest.param(all_zeros, id="zeros"),
    ],
)
def test_a_wrong_comparison_is_found(fault: Compare) -> None:
    with pytest.raises(AssertionError):
        check(fault)


def test_a_model_is_at_no_distance_from_itself() -> None:
    base, _, targets = case(noise=0.0)
    got = compare_logits(base, base.copy(), targets)
    assert not got.kld.any()
    assert not got.delta_p.any()
    assert got.same_top.all()
    summary = summarise([got])
    assert summary.ppl_ratio == Estimate(1.0, 0.0)
    assert summary.log_ppl_correlation == 1.0


def test_blocks_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = compare_logits(*case(rows=20))
    monkeypatch.setattr(quality, "BLOCK_VALUES", 40)
    parts = compare_logits(*case(rows=20))
    assert whole.kld.tobytes() == parts.kld.tobytes()
    assert whole.nll_cut.tobytes() == parts.nll_cut.tobytes()


def test_improbable_tokens_stay_finite() -> None:
    base, cut, targets = np.zeros((1, 3), np.float32), np.array([[0.0, -5000.0, 0.0]], np.float32), np.array([1])
    got = compare_logits(base, cut, targets)
    assert got.nll_cut[0] == pytest.approx(5000.0 + math.log(2.0))
    assert math.isfinite(got.kld[0])


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_logits_that_are_no_numbers_are_refused(value: float) -> None:
    base, cut, targets = case()
    cut[3, 2] = value
    with pytest.raises(NonFiniteLogitError, match="row 3"), np.errstate(invalid="ignore"):
        compare_logits(base, cut, targets)


def test_arrays_that_do_not_belong_together_are_refused() -> None:
    base, cut, targets = case()
    with pytest.raises(ShapeError):
        compare_logits(base, cut, targets[1:])
    with pytest.raises(ShapeError):
        compare_logits(base[1:], cut, targets)


def windows(count: int = 4) -> list[TokenResults]:
    return [compare_logits(*case(seed, rows=6 + seed)) for seed in range(count)]


def test_the_summary_is_what_the_tokens_say() -> None:
    parts = windows()
    got, kld = summarise(parts), [value for part in parts for value in part.kld.tolist()]
    n = len(kld)
    assert (got.tokens, got.windows) == (n, 4)
    assert got.kld.value == pytest.approx(statistics.fmean(kld), rel=1e-12)
    assert got.kld.error == pytest.approx(statistics.stdev(kld) / math.sqrt(n), rel=1e-12)
    assert got.kld_percentiles["max"] == max(kld)
    assert got.kld_percentiles["min"] == min(kld)
    assert got.kld_percentiles["median"] == pytest.approx(statistics.median(kld), rel=1e-12)
    assert list(got.kld_percentiles.values()) == sorted(got.kld_percentiles.values(), reverse=True)
    tokens = TokenResults.joined(parts)
    squares = [value * value for value in tokens.delta_p.tolist()]
    assert got.delta_p_rms.value == pytest.approx(math.sqrt(statistics.fmean(squares)), rel=1e-12)
    share_same = float(np.mean(tokens.same_top))
    assert got.same_top.value == pytest.approx(share_same)
    assert got.same_top.error == pytest.approx(math.sqrt(share_same * (1.0 - share_same) / (n - 1)), rel=1e-12)
    ratio = statistics.fmean(tokens.nll_cut.tolist()) - statistics.fmean(tokens.nll_base.tolist())
    assert got.ppl_ratio.value == pytest.approx(math.exp(ratio), rel=1e-12)
    assert got.ppl_ratio.value == pytest.approx(got.ppl_cut.value / got.ppl_base.value, rel=1e-12)
    assert got.log_ppl_correlation == pytest.approx(statistics.correlation(tokens.nll_base.tolist(), tokens.nll_cut.tolist()), rel=1e-12)


def test_the_error_of_the_rms_is_that_of_resampled_tokens() -> None:
    rng = np.random.default_rng(3)
    values = rng.standard_normal(400)
    drawn = [np.sqrt(np.mean(rng.choice(values, values.size) ** 2)) for _ in range(2000)]
    assert quality.root_mean_square(values).error == pytest.approx(np.std(drawn), rel=0.1)


def repeated(part: TokenResults, times: int) -> TokenResults:
    return TokenResults.joined([part] * times)


def test_tokens_that_repeat_their_neighbours_make_no_window_surer() -> None:
    parts = [compare_logits(*case(seed, rows=1)) for seed in range(12)]
    alone, copied = summarise(parts), summarise([repeated(part, 9) for part in parts])
    assert copied.kld_windows.error == pytest.approx(alone.kld.error, rel=1e-12)
    assert copied.kld.error < alone.kld.error / 2.0  # what independent tokens would have, which these are not


def test_halves_are_every_other_window() -> None:
    parts = windows(5)
    got = summarise(parts)
    assert got.even is not None
    assert got.odd is not None
    assert got.even.kld == pytest.approx(summarise(parts[0::2]).kld.value, rel=1e-12)
    assert got.odd.ppl_ratio == pytest.approx(summarise(parts[1::2]).ppl_ratio.value, rel=1e-12)
    assert got.even.tokens + got.odd.tokens == got.tokens
    assert summarise(parts[:1]).even is None


def test_the_spread_of_halves_is_nothing_where_windows_are_alike() -> None:
    part = windows(1)[0]
    alike, unlike = summarise([part] * 6).half_spread, summarise(windows(6)).half_spread
    assert alike is not None
    assert unlike is not None
    assert alike.kld == pytest.approx(0.0, abs=1e-15)
    assert unlike.kld > 1e-3


def test_estimates_are_apart_in_errors_of_their_difference() -> None:
    assert Estimate(5.0, 3.0).apart(Estimate(10.0, 4.0)) == 1.0
    assert Estimate(1.0, 0.0).apart(Estimate(1.0, 0.0)) == 0.0
    assert Estimate(1.0, 0.0).apart(Estimate(2.0, 0.0)) == math.inf


# ---- bytes ----------------------------------------------------------------------------------------------------------


def selection(ids: list[list[int]], union: int) -> Selection:
    array = np.array(ids, np.int32)
    return Selection(
        ids=array,
        weights=np.ones(array.shape, np.float32),
        kept=np.unique(array[array >= 0]).astype(np.int32),
        union_size=union,
        dropped=union - len(np.unique(array[array >= 0])),
        dropped_slots=int((array < 0).sum()),
        emptied_positions=int((array < 0).all(axis=1).sum()),
        mass_kept=0.5,
    )


# Three rows that share experts: 4 distinct of 6 in one layer, 2 of 2 in the other, 9 + 6 slots less 2.
STEP = [selection([[0, 1, 2], [0, 1, -1], [3, 1, -1]], 6), selection([[4, 5], [4, 5], [5, 4]], 2)]
OFF = [selection([[0, 1, 2], [0, 1, 4], [3, 1, 5]], 6), selection([[4, 5], [4, 5], [5, 4]], 2)]
BYTES_L = np.array([100, 10], np.int64)


def check_share(of_step: Callable[[list[Selection]], StepCosts]) -> None:
    cut, off = StepCosts.total([of_step(STEP)] * 3, 2), StepCosts.total([of_step(OFF)] * 3, 2)
    assert cut.expert_bytes(BYTES_L) == 3 * (4 * 100 + 2 * 10)
    assert share(cut, off, BYTES_L) == pytest.approx(420 / 620)


def test_bytes_are_those_of_distinct_experts() -> None:
    check_share(StepCosts.of_step)
    cost = StepCosts.total([StepCosts.of_step(STEP)] * 3, 2).to_json(BYTES_L)
    assert cost["layers"]["distinct_kept"] == [4.0, 2.0]
    assert cost["layers"]["distinct_before"] == [6.0, 2.0]
    assert (cost["steps"], cost["positions"], cost["dropped_slots"], cost["mass_kept"]) == (3, 9, 6, 0.5)


def test_bytes_of_selected_slots_are_found_out() -> None:
    def slots(step: list[Selection]) -> StepCosts:
        return dataclasses.replace(StepCosts.of_step(step), kept_L=np.array([(one.ids >= 0).sum() for one in step], np.int64))

    with pytest.raises(AssertionError):
        check_share(slots)
