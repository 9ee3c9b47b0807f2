"""Grouped-query attention of one position in NumPy, operation by operation, with quantised products: the definition in loops.

Written from the description of `GQAConfig`; sums, exp and products are those of `oracles.kernels`.
"""

from __future__ import annotations

import numpy as np
from oracles import kernels
from oracles.kernels import Float32, f32

from colibri_jax.config import GQAConfig
from colibri_jax.quant import QuantizedMatrix

Weights = dict[str, QuantizedMatrix | Float32 | None]


def product(x: Float32, matrix: QuantizedMatrix) -> Float32:
    """One quantised matrix-vector product."""
    q_x, scales_x, _ = kernels.quantize(x, matrix.group_size)
    return kernels.product(matrix.q, matrix.scales, q_x, scales_x, matrix.group_size)


def turn(head: Float32, cos: Float32, sin: Float32) -> Float32:
    """Rope in half-split layout on the first 2 · len(cos) elements."""
    out, half = head.copy(), len(cos)
    for i in range(half):
        first, second = head[i], head[half + i]
        out[i] = first * cos[i] - second * sin[i]
        out[half + i] = second * cos[i] + first * sin[i]
    return out


def heads_of(x: Float32, name: str, weights: Weights, gqa: GQAConfig, eps: float) -> list[Float32]:
    """Queries, keys or values of one position, head by head, before rope."""
    projected = product(x, weights[name])
    bias, norm = weights.get(f"{name}_bias"), weights.get(f"{name}_norm")
    if bias is not None:
        projected = projected + bias
    if norm is not None:
        runs = projected.reshape(-1, len(norm))
        projected = np.concatenate([kernels.rms_norm(run, norm, eps) for run in runs])
    if gqa.clip is not None:
        projected = np.clip(projected, f32(-gqa.clip), f32(gqa.clip))
    return list(projected.reshape(-1, gqa.head_dim))


def queries(x: Float32, weights: Weights, gqa: GQAConfig, eps: float, cos: Float32, sin: Float32) -> Float32:
    """float32 [H, V]."""
    return np.stack([turn(head, cos, sin) for head in heads_of(x, "q", weights, gqa, eps)])


def cache_row(x: Float32, weights: Weights, gqa: GQAConfig, eps: float, cos: Float32, sin: Float32) -> Float32:
    """float32 [2U]: rotated keys, then values."""
    keys = [turn(head, cos, sin) for head in heads_of(x, "k", weights, gqa, eps)]
    return np.concatenate(keys + heads_of(x, "v", weights, gqa, eps))


def attend(query_HV: Float32, cache_SC: Float32, weights: Weights, gqa: GQAConfig) -> Float32:
    """float32 [D], looking at every row of the cache."""
    key_SLV, value_SLV = (part.reshape(-1, gqa.n_kv_heads, gqa.head_dim) for part in np.split(cache_SC, 2, axis=1))
    mixes = []
    for h, query in enumerate(query_HV):
        shared = h // (gqa.n_heads // gqa.n_kv_heads)
        scores = np.array([kernels.dot(query, key) * f32(gqa.softmax_scale) for key in key_SLV[:, shared]], np.float32)
        mix = np.zeros(gqa.head_dim, np.float32)
        for share, value in zip(kernels.softmax(scores), value_SLV[:, shared], strict=True):
            mix = mix + share * value
        mixes.append(mix)
    return product(np.concatenate(mixes), weights["o"])
