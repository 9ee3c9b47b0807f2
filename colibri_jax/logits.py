"""Logits as distributions of the next token, in float64."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]


def log_softmax(logits: npt.ArrayLike) -> Float64:
    """float64 [..., W]: natural logarithms of the probabilities that logits [..., W] stand for."""
    z = np.asarray(logits, np.float64)
    z = z - z.max(axis=-1, keepdims=True)
    return np.asarray(z - np.log(np.exp(z).sum(axis=-1, keepdims=True)))


def kl_divergence(base_TW: Float64, other_TW: Float64) -> Float64:
    """float64 [T]: KL(base ‖ other) of each row in nats, from log probabilities [T, W]."""
    return np.asarray((np.exp(base_TW) * (base_TW - other_TW)).sum(axis=-1))
