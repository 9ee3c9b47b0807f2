"""Sampling: the right distribution, the same draw at the same place, exact ties."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colibri_jax.errors import NonFiniteLogitError, OptionError, ShapeError
from colibri_jax.generate import sampling
from colibri_jax.generate.sampling import MAX_SEED, SamplingOptions, probabilities, sample, uniform_at

N_DRAWS = 20_000
# The chance that a right sampler exceeds the threshold below; draws are seeded, so this is settled once and for all.
FALSE_ALARM = 1e-6

LOGITS = np.log(np.array([0.4, 0.05, 0.25, 0.1, 0.15, 0.05], np.float64)).astype(np.float32)


def philox_4x64_10(counter: list[int], key: list[int]) -> list[int]:
    """Philox as its paper writes it (Salmon et al., SC 2011), in plain integers."""
    mask = 2**64 - 1
    c, k = list(counter), list(key)
    for _ in range(10):
        low, high = 0xD2E7470EE14C6C93 * c[0], 0xCA5A826395121157 * c[2]
        c = [(high >> 64) ^ c[1] ^ k[0], high & mask, (low >> 64) ^ c[3] ^ k[1], low & mask]
        k = [(k[0] + 0x9E3779B97F4A7C15) & mask, (k[1] + 0xBB67AE8584CAA73B) & mask]
    return c


def chi_square(counts: npt.NDArray[np.int64], expected: npt.NDArray[np.float64]) -> tuple[float, float]:
    """Pearson's statistic over the possible outcomes, and the value that it exceeds with a chance below FALSE_ALARM.

    Threshold: P(X >= d + 2 sqrt(d t) + 2 t) <= exp(-t) for chi-square with d degrees (Laurent and Massart, 2000).
    """
    possible = expected > 0
    assert counts[~possible].sum() == 0
    scale = expected[possible] * counts.sum()
    statistic = float((((counts[possible] - scale) ** 2) / scale).sum())
    degrees, t = int(possible.sum()) - 1, -math.log(FALSE_ALARM)
    return statistic, degrees + 2 * math.sqrt(degrees * t) + 2 * t


def draw(logits: npt.NDArray[np.float32], options: SamplingOptions) -> npt.NDArray[np.int64]:
    return np.bincount([sample(logits, position, options) for position in range(N_DRAWS)], minlength=logits.size)


def exact(temperature: float, kept: list[int]) -> npt.NDArray[np.float64]:
    p = np.zeros(LOGITS.size)
    for i in kept:
        p[i] = math.exp(float(LOGITS[i]) / temperature)
    return p / p.sum()


CASES = [
    (SamplingOptions(temperature=1.0, seed=1), exact(1.0, [0, 1, 2, 3, 4, 5])),
    (SamplingOptions(temperature=0.5, seed=2), exact(0.5, [0, 1, 2, 3, 4, 5])),
    (SamplingOptions(temperature=2.0, seed=3), exact(2.0, [0, 1, 2, 3, 4, 5])),
    (SamplingOptions(temperature=1.0, top_p=0.7, seed=4), exact(1.0, [0, 2, 4])),
    (SamplingOptions(temperature=1.0, top_p=0.6, seed=5), exact(1.0, [0, 2])),
]


@pytest.mark.parametrize(("options", "expected"), CASES)
def test_draws_follow_the_exact_probabilities(options: SamplingOptions, expected: npt.NDArray[np.float64]) -> None:
    statistic, threshold = chi_square(draw(LOGITS, options), expected)
    assert statistic < threshold
    np.testing.assert_allclose(probabilities(LOGITS, options), expected, rtol=1e-12)


def test_the_distribution_check_notices_a_wrong_temperature() -> None:
    statistic, threshold = chi_square(draw(LOGITS, SamplingOptions(temperature=0.93, seed=1)), exact(1.0, [0, 1, 2, 3, 4, 5]))
    assert statistic > threshold


def test_draws_are_philox_keyed_by_seed_and_counted_by_position() -> None:
    for seed, position in [(0, 0), (0, 1), (7, 0), (12345, 678), (MAX_SEED, 2**40)]:
        assert uniform_at(seed, position) == (philox_4x64_10([1, position, 0, 0], [seed, 0])[0] >> 11) / 2**53


@settings(max_examples=100, derandomize=True, deadline=None)
@given(st.integers(0, MAX_SEED), st.integers(0, 2**31))
def test_a_draw_depends_on_seed_and_position_alone(seed: int, position: int) -> None:
    before = uniform_at(seed, position)
    uniform_at(seed, position + 1), uniform_at((seed + 1) % MAX_SEED, position)
    assert 0.0 <= before < 1.0
    assert uniform_at(seed, position) == before
    assert uniform_at(seed, position + 1) != before
    assert uniform_at((seed + 1) % MAX_SEED, position) != before


def test_greedy_takes_the_lowest_of_equal_ids() -> None:
    assert sample(np.array([1, 3, 3, 2], np.float32), 5, SamplingOptions()) == 1
    assert probabilities(np.array([1, 3, 3, 2], np.float32), SamplingOptions()).tolist() == [0, 1, 0, 0]


def test_top_p_ties_go_to_the_lowest_id_and_equality_is_enough() -> None:
    equal = np.zeros(4, np.float32)
    for share, kept in [(0.25, 1), (0.2500001, 2), (0.5, 2), (0.75, 3), (0.7500001, 4), (1e-9, 1)]:
        p = probabilities(equal, SamplingOptions(temperature=1.0, top_p=share))
        assert p.tolist() == [1 / kept] * kept + [0.0] * (4 - kept), share


def test_top_p_ties_go_to_the_lowest_id_in_a_long_vocabulary_too() -> None:
    """Long enough for an unstable sort to show."""
    logits = np.tile(np.array([0.0, 1.0], np.float32), 1000)
    p = probabilities(logits, SamplingOptions(temperature=1.0, top_p=0.1))
    kept = np.flatnonzero(p)
    assert kept.tolist() == list(range(1, 2 * kept.size, 2))


@pytest.mark.parametrize(("draw_at", "token"), [(0.0, 1), (0.5 - 2**-53, 1), (0.5, 3), (1.0 - 2**-53, 3)])
def test_a_draw_at_the_edge_of_a_token_belongs_to_the_next_and_never_to_one_left_out(
    monkeypatch: pytest.MonkeyPatch, draw_at: float, token: int
) -> None:
    monkeypatch.setattr(sampling, "uniform_at", lambda seed, position, stream: draw_at)
    logits = np.array([-5.0, 2.0, -5.0, 2.0, -5.0], np.float32)
    assert sample(logits, 0, SamplingOptions(temperature=1.0, top_p=0.9)) == token


def test_a_near_tie_does_not_change_where_a_draw_falls() -> None:
    """Order by id: swapping two almost equal probabilities moves no boundary by more than their difference."""
    options = SamplingOptions(temperature=1.0, seed=9)
    a = np.array([0.0, 1.0, 1.0, 0.5], np.float32)
    b = a.copy()
    b[2] = np.nextafter(np.float32(1.0), np.float32(2.0))
    assert [sample(a, i, options) for i in range(500)] == [sample(b, i, options) for i in range(500)]


@settings(max_examples=200, derandomize=True, deadline=None)
@given(
    st.lists(st.floats(-1e4, 1e4, width=32), min_size=1, max_size=50),
    st.floats(1e-6, 1e6),
    st.floats(1e-9, 1.0, exclude_min=True),
    st.integers(0, 1000),
)
def test_only_tokens_that_top_p_kept_are_drawn(logits: list[float], temperature: float, top_p: float, position: int) -> None:
    options = SamplingOptions(temperature=temperature, top_p=top_p, seed=3)
    array = np.array(logits, np.float32)
    p = probabilities(array, options)
    assert p[sample(array, position, options)] > 0
    assert abs(p.sum() - 1.0) < 1e-12 * array.size


def test_a_tiny_temperature_is_greedy_without_overflow() -> None:
    options = SamplingOptions(temperature=1e-300, seed=1)
    assert {sample(LOGITS, i, options) for i in range(20)} == {0}


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_logit_that_is_no_number_is_an_error_naming_the_token(bad: float, temperature: float) -> None:
    logits = LOGITS.copy()
    logits[3] = bad
    with pytest.raises(NonFiniteLogitError, match="token 3"):
        sample(logits, 0, SamplingOptions(temperature=temperature))


@pytest.mark.parametrize("bad", [np.zeros((1, 3), np.float32), np.zeros(3), np.zeros(0, np.float32)])
def test_logits_of_another_kind_are_refused(bad: npt.NDArray[np.float32]) -> None:
    with pytest.raises(ShapeError):
        sample(bad, 0, SamplingOptions())


@pytest.mark.parametrize(
    "fields", [{"temperature": -0.1}, {"temperature": math.nan}, {"top_p": 0.0}, {"top_p": 1.1}, {"seed": -1}, {"seed": MAX_SEED + 1}]
)
def test_options_outside_their_domain_are_refused(fields: dict[str, float]) -> None:
    with pytest.raises(OptionError):
        SamplingOptions(**fields)
