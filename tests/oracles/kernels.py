"""The kernels' definitions in NumPy, one rounding at a time: float32 arrays, one operation per step, sums in loops.

Written from the engine's arithmetic rules, not from its code. The only borrowed numbers are the coefficients of exp, which
are part of its definition.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Float32 = npt.NDArray[np.float32]
f32 = np.float32

PARTIAL_SUMS = 16
EXP_COEFFICIENTS = [float.fromhex(text) for text in ("0x1.6a21acp-10", "0x1.123b6ap-7", "0x1.5558fap-5", "0x1.55549p-3", "0x1.fffffcp-2")]
EXP_LOWEST, EXP_HIGHEST = f32(-104), f32(89)
LN2_HIGH, LN2_LOW = f32(0.693359375), f32(float.fromhex("-0x1.bd0106p-13"))


def quantize(x: Float32, group: int) -> tuple[npt.NDArray[np.int8], Float32, npt.NDArray[np.int32]]:
    """int8 [groups * group], float32 scales [groups], int32 sums [groups] of one row; the last group padded with zeros."""
    padded = np.pad(x, (0, -x.size % group)).reshape(-1, group)
    largest = np.abs(padded).max(axis=1, initial=f32(0))
    scales = np.where(largest < f32(1e-30), f32(0), largest / f32(127)).astype(np.float32)
    divisors = np.where(scales == 0, f32(1), scales)
    q = np.where(scales[:, None] == 0, f32(0), np.clip(np.rint(padded / divisors[:, None]), -127, 127)).astype(np.int8)
    return q.reshape(-1), scales, q.sum(axis=1, dtype=np.int32)


def product(q_w: npt.NDArray[np.int8], scales_w: Float32, q_x: npt.NDArray[np.int8], scales_x: Float32, group: int) -> Float32:
    """Rows of one quantised matrix-vector product.

    Args:
        q_w: int8 [rows, cols].
        scales_w: float32 [rows, groups].
        q_x: int8 [groups * group].
        scales_x: float32 [groups].
        group: inputs per activation group.
    """
    rows, cols = q_w.shape
    padded = np.pad(q_w, ((0, 0), (0, -cols % group))).astype(np.int64).reshape(rows, -1, group)
    isums = (padded * q_x.astype(np.int64).reshape(1, -1, group)).sum(axis=2)
    assert np.abs(isums).max(initial=0) < 2**31
    y = np.zeros(rows, np.float32)
    for g in range(isums.shape[1]):
        y = y + isums[:, g].astype(np.int32).astype(np.float32) * (scales_w[:, g] * scales_x[g])
    return y


def join(partial: npt.NDArray[np.floating]) -> npt.NDArray[np.floating]:
    """Sixteen partial sums along the first axis, halved until one is left."""
    while partial.shape[0] > 1:
        half = partial.shape[0] // 2
        partial = partial[:half] + partial[half:]
    return partial[0]


def partial_sums(terms: npt.NDArray[np.floating]) -> npt.NDArray[np.floating]:
    """Sums along the first axis in the engine's order."""
    partial = np.zeros((PARTIAL_SUMS, *terms.shape[1:]), terms.dtype)
    for i, term in enumerate(terms):
        partial[i % PARTIAL_SUMS] = partial[i % PARTIAL_SUMS] + term
    return join(partial)


def dot(a: Float32, b: Float32) -> np.float32:
    """float32 products and sums."""
    return f32(partial_sums(a * b))


def dot_f64(a: Float32, b: Float32) -> np.float64:
    """float64 products and sums of float32 vectors."""
    return np.float64(partial_sums(a.astype(np.float64) * b.astype(np.float64)))


def dot_columns(w: Float32, x: Float32) -> Float32:
    """x [rows] times w [rows, cols]."""
    return partial_sums(w * x[:, None]).astype(np.float32)


def exp(x: Float32) -> Float32:
    """The engine's exp: range reduction by ln 2 in two parts, then a polynomial of degree 6."""
    with np.errstate(invalid="ignore", over="ignore", under="ignore"):
        x = np.where(x < EXP_LOWEST, EXP_LOWEST, np.where(x > EXP_HIGHEST, EXP_HIGHEST, x)).astype(np.float32)
        n = np.rint(x * f32(1.44269504088896341))
        r = (x - n * LN2_HIGH) - n * LN2_LOW
        tail = np.full_like(r, f32(EXP_COEFFICIENTS[0]))
        for coefficient in EXP_COEFFICIENTS[1:]:
            tail = tail * r + f32(coefficient)
        mantissa = (tail * (r * r) + r) + f32(1)
        result = np.ldexp(mantissa, np.where(np.isnan(n), f32(0), n).astype(np.int32))
    return np.asarray(result, np.float32)


def softmax(x: Float32) -> Float32:
    """exp(x - max) over their sum, added in index order."""
    e = exp(x - x.max())
    total = f32(0)
    for value in e:
        total = total + value
    return e / total


def silu_mul(gate: Float32, up: Float32) -> Float32:
    """gate / (1 + exp(-gate)) * up."""
    return gate / (f32(1) + exp(-gate)) * up


def rms_norm(x: Float32, w: Float32, eps: float) -> Float32:
    """x * (1 / sqrt(mean(x^2) + eps)) * w."""
    return (x * (f32(1) / np.sqrt(dot(x, x) / f32(x.size) + f32(eps)))) * w


def layer_norm(x: Float32, w: Float32, b: Float32, eps: float) -> Float32:
    """(x - mean) * (1 / sqrt(variance + eps)) * w + b."""
    centred = x - f32(partial_sums(x)) / f32(x.size)
    return (centred * (f32(1) / np.sqrt(dot(centred, centred) / f32(x.size) + f32(eps)))) * w + b
