"""Grouped-query attention: projections with bias, norms and clip, rope on part of a head, a cache of rotated keys and values.

`GQAConfig` states the order of operations. Shapes, beside the package's key: L key/value heads, M query heads that share one of
them (H = L · M, head h belongs to l = h // M), V head width, equal for queries, keys and values; U = L · V.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from colibri_jax.config import GQAConfig
from colibri_jax.reference import ordered
from colibri_jax.reference.attention import ROWS_AT_A_TIME, Rope, rms_norm, rotate
from colibri_jax.reference.quantized import Matrix, product, zero_of


class GQAWeights(NamedTuple):
    """One layer's attention. Biases and norms are None where the configuration has none."""

    q: Matrix
    k: Matrix
    v: Matrix
    o: Matrix
    q_bias: jax.Array | None
    k_bias: jax.Array | None
    v_bias: jax.Array | None
    q_norm: jax.Array | None
    k_norm: jax.Array | None


def load_gqa(get: Callable[[str], Matrix], optional: Callable[[str], jax.Array | None]) -> GQAWeights:
    """One layer's attention from its tensors: `get` gives a matrix by its role inside the layer, `optional` a float32 array or None."""
    return GQAWeights(
        q=get("attn.q"),
        k=get("attn.k"),
        v=get("attn.v"),
        o=get("attn.o"),
        q_bias=optional("attn.q_bias"),
        k_bias=optional("attn.k_bias"),
        v_bias=optional("attn.v_bias"),
        q_norm=optional("attn.q_norm"),
        k_norm=optional("attn.k_norm"),
    )


def project_queries(x_TD: jax.Array, weights: GQAWeights, rope: Rope, gqa: GQAConfig, eps: float) -> jax.Array:
    """Rotated queries of the new positions, float32 [T, H, V]. `eps`: of the norm of queries."""
    zero = zero_of(weights.q)
    query = _clip(_norm(_project(x_TD, weights.q, weights.q_bias), weights.q_norm, eps, zero), gqa)
    return _rotate_heads(query.reshape(x_TD.shape[0], gqa.n_heads, gqa.head_dim), rope, gqa, zero)


def project_keys_values(x_TD: jax.Array, weights: GQAWeights, rope: Rope, gqa: GQAConfig, eps: float) -> jax.Array:
    """What the KV cache keeps of the new positions: rotated keys [L, V], then values [L, V], float32 [T, 2U]."""
    zero, n_rows = zero_of(weights.k), x_TD.shape[0]
    key = _clip(_norm(_project(x_TD, weights.k, weights.k_bias), weights.k_norm, eps, zero), gqa)
    key = _rotate_heads(key.reshape(n_rows, gqa.n_kv_heads, gqa.head_dim), rope, gqa, zero)
    value_TU = _clip(_project(x_TD, weights.v, weights.v_bias), gqa)
    return jnp.concatenate([key.reshape(n_rows, -1), value_TU], axis=1)


def attend(query_THV: jax.Array, cache_SC: jax.Array, attended_TS: jax.Array, weights: GQAWeights, gqa: GQAConfig) -> jax.Array:
    """Attention of T queries over S cached positions, then the output projection.

    Args:
        query_THV: from `project_queries`.
        cache_SC: float32 [S, 2U], rows as `project_keys_values` makes them.
        attended_TS: bool, True where a query may look; at least one per row.

    Returns:
        float32 [T, D]; summed in the contract's order where weights are quantised.
    """
    zero, n_rows = zero_of(weights.o), query_THV.shape[0]
    query_TLMV = query_THV.reshape(n_rows, gqa.n_kv_heads, -1, gqa.head_dim)
    key_SLV, value_SLV = (part.reshape(-1, gqa.n_kv_heads, gqa.head_dim) for part in jnp.split(cache_SC, 2, axis=1))
    if zero is not None:
        mixed_TLMV = _attend_in_order(query_TLMV, key_SLV, value_SLV, attended_TS, gqa.softmax_scale, zero)
    else:
        scores_TLMS = jnp.einsum("tlmv,slv->tlms", query_TLMV, key_SLV, precision="highest") * gqa.softmax_scale
        shares_TLMS = jax.nn.softmax(jnp.where(attended_TS[:, None, None, :], scores_TLMS, -jnp.inf), axis=-1)
        mixed_TLMV = jnp.einsum("tlms,slv->tlmv", shares_TLMS, value_SLV, precision="highest")
    return product(mixed_TLMV.reshape(n_rows, -1), weights.o)


def _attend_in_order(
    query_TLMV: jax.Array, key_SLV: jax.Array, value_SLV: jax.Array, attended_TS: jax.Array, scale: float, zero: jax.Array
) -> jax.Array:
    """Every sum in its order, some rows at a time; float32 [T, L, M, V]."""
    key_L1SV = key_SLV.transpose(1, 0, 2)[:, None]

    def attend_row(row: tuple[jax.Array, jax.Array]) -> jax.Array:
        query_LMV, attended_S = row
        scores_LMS = ordered.separate(ordered.dot(query_LMV[:, :, None, :], key_L1SV, zero) * scale, zero)
        shares_LMS = ordered.softmax(scores_LMS, attended_S, zero)
        return ordered.mix_in_order(shares_LMS, value_SLV[:, :, None, :], zero)

    mixed_TLMV: jax.Array = jax.lax.map(attend_row, (query_TLMV, attended_TS), batch_size=ROWS_AT_A_TIME)
    return mixed_TLMV


def _project(x_TD: jax.Array, matrix: Matrix, bias: jax.Array | None) -> jax.Array:
    projected = product(x_TD, matrix)
    return projected if bias is None else projected + bias


def _norm(x_TX: jax.Array, weight: jax.Array | None, eps: float, zero: jax.Array | None) -> jax.Array:
    """RMSNorm of every run of elements as long as the weight: one head, or all of them."""
    if weight is None:
        return x_TX
    runs = x_TX.reshape(x_TX.shape[0], -1, weight.shape[0])
    return rms_norm(runs, weight, eps, zero).reshape(x_TX.shape)


def _clip(x: jax.Array, gqa: GQAConfig) -> jax.Array:
    return x if gqa.clip is None else jnp.clip(x, -gqa.clip, gqa.clip)


def _rotate_heads(x: jax.Array, rope: Rope, gqa: GQAConfig, zero: jax.Array | None) -> jax.Array:
    turned = rotate(x[..., : gqa.rope.dim], rope.cos_TP[:, None, :], rope.sin_TP[:, None, :], zero, gqa.rope.layout)
    return jnp.concatenate([turned, x[..., gqa.rope.dim :]], axis=-1)
