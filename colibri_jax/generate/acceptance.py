"""Which drafted tokens stay: those equal to what decoding would have chosen, or those that the classical rule lets stand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import numpy as np
import numpy.typing as npt

from colibri_jax.generate.drafters import Draft
from colibri_jax.generate.sampling import ACCEPTANCE_STREAM, RESIDUAL_STREAM, SamplingOptions, draw, probabilities, sample, uniform_at

Float32 = npt.NDArray[np.float32]
Acceptance = Literal["equal", "resample"]
Rule = Callable[[Float32, Draft, int, SamplingOptions], list[int]]
"""(logits float32 [1 + n, W] of the token before the drafts and of n drafts, the draft, the first row's next position, sampling)
to the tokens that follow: accepted drafts, then one that is not drafted."""


def accept_equal(logits_TW: Float32, draft: Draft, position: int, sampling: SamplingOptions) -> list[int]:
    """Choose every position's token as decoding does, as long as the drafts before it were right.

    A position's draw depends on seed and position alone, so that the tokens are those of decoding without drafts.
    """
    chosen: list[int] = []
    for i, logits_W in enumerate(logits_TW):
        chosen.append(sample(logits_W, position + i, sampling))
        if i < len(draft.tokens) and chosen[-1] != draft.tokens[i]:
            break
    return chosen


def accept_resampled(logits_TW: Float32, draft: Draft, position: int, sampling: SamplingOptions) -> list[int]:
    """The classical rule (Leviathan et al., ICML 2023, algorithm 1): tokens are distributed as without drafts, but are others.

    With p the model's distribution and q the draft's, a drafted x stays with probability min(1, p(x) / q(x)); in its place comes
    a draw from max(p - q, 0), normalised. A draft without distributions has q(x) = 1. Every draw is keyed by seed,
    position and its purpose.
    """
    chosen: list[int] = []
    for i, guess in enumerate(draft.tokens):
        model_W = probabilities(logits_TW[i], sampling)
        if draft.probabilities is None:
            draft_W = np.zeros_like(model_W)
            draft_W[guess] = 1.0
        else:
            draft_W = draft.probabilities[i]
        if uniform_at(sampling.seed, position + i, ACCEPTANCE_STREAM) * draft_W[guess] < model_W[guess]:
            chosen.append(guess)
            continue
        rest_W = np.maximum(model_W - draft_W, 0.0)
        # Equal distributions leave nothing but rounding, and their drafts stay but for rounding.
        rest_W = rest_W if rest_W.any() else model_W
        return [*chosen, draw(rest_W, uniform_at(sampling.seed, position + i, RESIDUAL_STREAM))]
    return [*chosen, sample(logits_TW[len(draft.tokens)], position + len(draft.tokens), sampling)]


RULES: dict[Acceptance, Rule] = {"equal": accept_equal, "resample": accept_resampled}
