"""The classical rule of acceptance: tokens are distributed as without drafts, whatever is drafted; a biased rule is seen."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest

from colibri_jax.generate.acceptance import Rule, accept_resampled
from colibri_jax.generate.drafters import Draft
from colibri_jax.generate.sampling import (
    ACCEPTANCE_STREAM,
    DRAFT_STREAM,
    SamplingOptions,
    draw,
    probabilities,
    sample,
    uniform_at,
)

W = 6
N = 3000
LOGITS = np.log(np.array([[0.4, 0.25, 0.15, 0.1, 0.06, 0.04], [0.1, 0.1, 0.2, 0.2, 0.2, 0.2], [0.5, 0.1, 0.1, 0.1, 0.1, 0.1]])).astype(
    np.float32
)
GUESSED = np.log(np.array([[0.1, 0.1, 0.5, 0.1, 0.1, 0.1], [0.05, 0.3, 0.3, 0.05, 0.15, 0.15]])).astype(np.float32)
SAMPLING = SamplingOptions(temperature=1.0)

Float64 = npt.NDArray[np.float64]


def by_distribution(options: SamplingOptions, position: int) -> Draft:
    """Two guesses drawn from a distribution that is not the model's."""
    tokens = tuple(sample(row, position + i, options, stream=DRAFT_STREAM) for i, row in enumerate(GUESSED))
    return Draft(tokens, tuple(probabilities(row, options) for row in GUESSED))


def certain(options: SamplingOptions, position: int) -> Draft:
    return Draft((1, 2))


DRAFTS: dict[str, Callable[[SamplingOptions, int], Draft]] = {"drawn": by_distribution, "certain": certain}


def counts(rule: Rule, draft: Callable[[SamplingOptions, int], Draft], sampling: SamplingOptions) -> tuple[list[Float64], float]:
    """How often each token came out at each position that was reached, over seeds; and the share of first guesses that stood."""
    found, stood = [np.zeros(W) for _ in range(3)], 0
    for seed in range(N):
        options = dataclasses.replace(sampling, seed=seed)
        guesses = draft(options, 7)
        chosen = rule(LOGITS, guesses, 7, options)
        for i, token in enumerate(chosen):
            found[i][token] += 1
        stood += chosen[0] == guesses.tokens[0]
    return found, stood / N


def chi_square(observed: Float64, expected: Float64) -> float:
    """Pearson's statistic over the tokens that are possible at all."""
    assert observed[expected == 0].sum() == 0
    possible = expected > 0
    scaled = expected[possible] * observed.sum()
    assert scaled.min() > 5, "the statistic's distribution is known for counts that are not tiny"
    return float(((observed[possible] - scaled) ** 2 / scaled).sum())


def threshold(degrees: int, tail: float = 1e-6) -> float:
    """The value that a chi-square variable exceeds with probability `tail` (Wilson and Hilferty's approximation)."""
    # z of the normal distribution's upper tail, by bisection.
    low, high = 0.0, 10.0
    for _ in range(80):
        z = (low + high) / 2
        low, high = (z, high) if math.erfc(z / math.sqrt(2)) / 2 > tail else (low, z)
    spread = 2 / (9 * degrees)
    return float(degrees * (1 - spread + z * math.sqrt(spread)) ** 3)


def worst_excess(rule: Rule, draft: Callable[[SamplingOptions, int], Draft], sampling: SamplingOptions = SAMPLING) -> float:
    """Largest statistic of a position over its threshold: above 1 is another distribution."""
    found, _ = counts(rule, draft, sampling)
    excess = []
    for i, observed in enumerate(found):
        expected = probabilities(LOGITS[i], sampling)
        excess.append(chi_square(observed, expected) / threshold(int((expected > 0).sum()) - 1))
    return max(excess)


def test_the_threshold_is_that_of_the_tables() -> None:
    # Quantiles of 0.001 that every table has.
    for degrees, value in ((5, 20.515), (9, 27.877)):
        assert threshold(degrees, 1e-3) == pytest.approx(value, rel=0.02)


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("sampling", [SAMPLING, SamplingOptions(temperature=0.7, top_p=0.9)], ids=["plain", "top-p"])
def test_tokens_are_distributed_as_without_drafts(draft: str, sampling: SamplingOptions) -> None:
    assert worst_excess(accept_resampled, DRAFTS[draft], sampling) < 1.0


def test_as_many_guesses_stand_as_distributions_overlap() -> None:
    model, guessed = probabilities(LOGITS[0], SAMPLING), probabilities(GUESSED[0], SAMPLING)
    for draft, overlap in ((by_distribution, np.minimum(model, guessed).sum()), (certain, model[1])):
        _, stood = counts(accept_resampled, draft, SAMPLING)
        assert abs(stood - overlap) < 5 * math.sqrt(overlap * (1 - overlap) / N)


def from_the_model_again(logits_TW: npt.NDArray[np.float32], draft: Draft, position: int, sampling: SamplingOptions) -> list[int]:
    """Biased: a rejected guess is replaced by a draw from the model's whole distribution."""
    chosen: list[int] = []
    for i, guess in enumerate(draft.tokens):
        model_W = probabilities(logits_TW[i], sampling)
        q = 1.0 if draft.probabilities is None else draft.probabilities[i][guess]
        if uniform_at(sampling.seed, position + i, ACCEPTANCE_STREAM) * q >= model_W[guess]:
            return [*chosen, draw(model_W, uniform_at(sampling.seed, position + i))]
        chosen.append(guess)
    return [*chosen, sample(logits_TW[2], position + 2, sampling)]


def one_draw_for_two(logits_TW: npt.NDArray[np.float32], draft: Draft, position: int, sampling: SamplingOptions) -> list[int]:
    """Biased: the draw that turned a guess down also chooses what comes in its place."""
    model_W = probabilities(logits_TW[0], sampling)
    draft_W = np.eye(W)[draft.tokens[0]] if draft.probabilities is None else draft.probabilities[0]
    u = uniform_at(sampling.seed, position, ACCEPTANCE_STREAM)
    if u * draft_W[draft.tokens[0]] < model_W[draft.tokens[0]]:
        return [draft.tokens[0]]
    return [draw(np.maximum(model_W - draft_W, 0), u)]


def never_refuses(logits_TW: npt.NDArray[np.float32], draft: Draft, position: int, sampling: SamplingOptions) -> list[int]:
    return [*draft.tokens, sample(logits_TW[2], position + 2, sampling)]


@pytest.mark.parametrize("rule", [from_the_model_again, one_draw_for_two, never_refuses])
def test_a_biased_rule_is_seen(rule: Rule) -> None:
    found, _ = counts(rule, by_distribution, SAMPLING)
    expected = probabilities(LOGITS[0], SAMPLING)
    assert chi_square(found[0], expected) > 2 * threshold(W - 1)


def test_greedy_keeps_the_largest_logit_and_nothing_else() -> None:
    greedy = SamplingOptions()
    assert accept_resampled(LOGITS, Draft((0, 2)), 7, greedy) == [0, 2, 0]
    assert accept_resampled(LOGITS, Draft((0, 3)), 7, greedy) == [0, 2]
    assert accept_resampled(LOGITS, Draft((1, 2)), 7, greedy) == [0]


def test_streams_of_one_position_are_draws_of_their_own() -> None:
    draws = [[uniform_at(seed, 7, stream) for seed in range(2000)] for stream in range(4)]
    assert len({u for stream in draws for u in stream}) == 8000
    correlations = np.corrcoef(draws)[np.triu_indices(4, 1)]
    assert np.abs(correlations).max() < 5 / math.sqrt(2000)
