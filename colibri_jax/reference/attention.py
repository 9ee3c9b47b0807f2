"""Multi-head latent attention: RMSNorm, rope, the latent KV cache, and attention in absorbed and expanded form.

Source: DeepSeek-V2 (arXiv 2405.04434) §2.1, as GLM-5 uses it. Both forms are one function of the latent: the absorbed one
takes the key matrix to the query's side, the expanded one makes keys and values per head as training does.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from colibri_jax.config import LATENT_NORM_EPS, MLAConfig, RopeConfig, RopeLayout
from colibri_jax.reference import ordered
from colibri_jax.reference.quantized import Matrix, product, zero_of

MLAForm = Literal["absorbed", "expanded"]

# Rows that the ordered form takes together: enough to fill vectors, few enough to keep [rows, H, S, 16] in the cache.
ROWS_AT_A_TIME = 8


class MLAWeights(NamedTuple):
    """One layer's attention. `key_HNC` and `value_HVC` are the two halves of kv_b, dequantised in every mode."""

    q_a: Matrix
    q_a_norm: jax.Array
    q_b: Matrix
    kv_a: Matrix
    kv_a_norm: jax.Array
    key_HNC: jax.Array
    value_HVC: jax.Array
    o: Matrix


def load_mla(get: Callable[[str], Matrix], vector: Callable[[str], jax.Array], mla: MLAConfig) -> MLAWeights:
    """One layer's attention from its tensors: `get` gives a matrix by its role inside the layer, `vector` a float32 array."""
    kv_b_HJC = vector("attn.kv_b").reshape(mla.n_heads, mla.nope_dim + mla.value_dim, mla.kv_lora_rank)
    return MLAWeights(
        q_a=get("attn.q_a"),
        q_a_norm=vector("attn.q_a_norm"),
        q_b=get("attn.q_b"),
        kv_a=get("attn.kv_a"),
        kv_a_norm=vector("attn.kv_a_norm"),
        key_HNC=kv_b_HJC[:, : mla.nope_dim],
        value_HVC=kv_b_HJC[:, mla.nope_dim :],
        o=get("attn.o"),
    )


class Rope(NamedTuple):
    """cos and sin of the T new positions, float32 [T, R / 2]."""

    cos_TP: jax.Array
    sin_TP: jax.Array


def rms_norm(x: jax.Array, weight: jax.Array, eps: float, zero: jax.Array | None = None) -> jax.Array:
    """x / sqrt(mean x² + eps) over the last dimension, times the weight; in the fixed order where `zero` is given."""
    if zero is not None:
        return ordered.rms_norm(x, weight, eps, zero)
    return weight * (x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps))


@functools.partial(jax.jit, static_argnames="eps")
def final_norm(x: jax.Array, weight: jax.Array, zero: jax.Array | None, *, eps: float) -> jax.Array:
    """`rms_norm`, compiled by itself."""
    return rms_norm(x, weight, eps, zero)


def rope_table(n_positions: int, rope: RopeConfig) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """cos and sin, float32 [n_positions, rope.dim / 2].

    Angles, their cos and sin, and the product with the attention factor are float64, rounded to float32 once at the end: this, not
    any library's float32 evaluation, is the definition that native follows.
    """
    angles = np.arange(n_positions, dtype=np.float64)[:, None] * np.asarray(rope.frequencies)
    factor = rope.attention_factor
    return (np.cos(angles) * factor).astype(np.float32), (np.sin(angles) * factor).astype(np.float32)


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array, zero: jax.Array | None = None, layout: RopeLayout = "interleaved") -> jax.Array:
    """Rotate pair i of the last dimension by angle i; results lie in halves: first parts, then second parts.

    Args:
        x: float32 [..., R].
        cos, sin: broadcastable to [..., R / 2].
        zero: as in `rms_norm`; every product is then rounded by itself.
        layout: pair i is (2i, 2i + 1), or (i, R / 2 + i) in "half".
    """
    first, second = (x[..., 0::2], x[..., 1::2]) if layout == "interleaved" else jnp.split(x, 2, axis=-1)
    terms = [first * cos, second * sin, second * cos, first * sin]
    if zero is not None:
        terms = [ordered.separate(term, zero) for term in terms]
    return jnp.concatenate([terms[0] - terms[1], terms[2] + terms[3]], axis=-1)


def project_queries(x_TD: jax.Array, weights: MLAWeights, rope: Rope, mla: MLAConfig) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Queries of the new positions.

    Returns:
        latent_TQ: the normed query latent, which the indexer uses too.
        query_THN: the part without rope.
        rotated_THR: the part with rope, rotated.
    """
    zero = zero_of(weights.q_a)
    latent_TQ = rms_norm(product(x_TD, weights.q_a), weights.q_a_norm, LATENT_NORM_EPS, zero)
    query = product(latent_TQ, weights.q_b).reshape(x_TD.shape[0], mla.n_heads, mla.qk_dim)
    rotated_THR = rotate(query[..., mla.nope_dim :], rope.cos_TP[:, None, :], rope.sin_TP[:, None, :], zero, mla.rope.layout)
    return latent_TQ, query[..., : mla.nope_dim], rotated_THR


def project_latent(x_TD: jax.Array, weights: MLAWeights, rope: Rope, mla: MLAConfig) -> jax.Array:
    """What the KV cache keeps of the new positions: normed latent, then rotated key, float32 [T, C + R]."""
    zero = zero_of(weights.kv_a)
    projected = product(x_TD, weights.kv_a)
    latent_TC = rms_norm(projected[:, : mla.kv_lora_rank], weights.kv_a_norm, LATENT_NORM_EPS, zero)
    key_TR = rotate(projected[:, mla.kv_lora_rank :], rope.cos_TP, rope.sin_TP, zero, mla.rope.layout)
    return jnp.concatenate([latent_TC, key_TR], axis=1)


def attend(
    query_THN: jax.Array,
    rotated_THR: jax.Array,
    cache_SC: jax.Array,
    attended_TS: jax.Array,
    weights: MLAWeights,
    *,
    mla: MLAConfig,
    form: MLAForm,
) -> jax.Array:
    """Attention of T queries over S cached positions, then the output projection.

    Args:
        query_THN, rotated_THR: from `project_queries`.
        cache_SC: float32 [S, C + R], rows as `project_latent` makes them.
        attended_TS: bool, True where a query may look; at least one per row.
        form: "absorbed" or "expanded"; the same function, summed in another order. Where weights are quantised, the
            absorbed form follows the fixed order of the contract.

    Returns:
        float32 [T, D].
    """
    zero = zero_of(weights.o)
    if zero is not None and form == "absorbed":
        value_THV = _attend_in_order(query_THN, rotated_THR, cache_SC, attended_TS, weights, mla, zero)
        return product(value_THV.reshape(value_THV.shape[0], -1), weights.o)
    latent_SC, key_SR = cache_SC[:, : mla.kv_lora_rank], cache_SC[:, mla.kv_lora_rank :]
    scores_THS = jnp.einsum("thr,sr->ths", rotated_THR, key_SR, precision="highest")
    if form == "absorbed":
        query_THC = jnp.einsum("thn,hnc->thc", query_THN, weights.key_HNC, precision="highest")
        scores_THS += jnp.einsum("thc,sc->ths", query_THC, latent_SC, precision="highest")
    else:
        key_SHN = jnp.einsum("sc,hnc->shn", latent_SC, weights.key_HNC, precision="highest")
        scores_THS += jnp.einsum("thn,shn->ths", query_THN, key_SHN, precision="highest")
    scores_THS = jnp.where(attended_TS[:, None, :], scores_THS * mla.softmax_scale, -jnp.inf)
    shares_THS = jax.nn.softmax(scores_THS, axis=-1)
    if form == "absorbed":
        mixed_THC = jnp.einsum("ths,sc->thc", shares_THS, latent_SC, precision="highest")
        value_THV = jnp.einsum("thc,hvc->thv", mixed_THC, weights.value_HVC, precision="highest")
    else:
        value_SHV = jnp.einsum("sc,hvc->shv", latent_SC, weights.value_HVC, precision="highest")
        value_THV = jnp.einsum("ths,shv->thv", shares_THS, value_SHV, precision="highest")
    return product(value_THV.reshape(value_THV.shape[0], -1), weights.o)


def _attend_in_order(
    query_THN: jax.Array,
    rotated_THR: jax.Array,
    cache_SC: jax.Array,
    attended_TS: jax.Array,
    weights: MLAWeights,
    mla: MLAConfig,
    zero: jax.Array,
) -> jax.Array:
    """The absorbed form with every sum in its order, some rows at a time; float32 [T, H, V]."""
    key_HCN = weights.key_HNC.transpose(0, 2, 1)

    def attend_row(row: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        query_HN, rotated_HR, attended_S = row
        query_HC = ordered.dot(query_HN[:, None, :], key_HCN, zero)
        joined_HC = jnp.concatenate([query_HC, rotated_HR], axis=1)
        scores_HS = ordered.separate(ordered.matmul(joined_HC, cache_SC, zero) * mla.softmax_scale, zero)
        shares_HS = ordered.softmax(scores_HS, attended_S[None, :], zero)
        mixed_HC = ordered.mix_in_order(shares_HS, cache_SC[:, : mla.kv_lora_rank], zero)
        return ordered.dot(mixed_HC[:, None, :], weights.value_HVC, zero)

    value_THV: jax.Array = jax.lax.map(attend_row, (query_THN, rotated_THR, attended_TS), batch_size=ROWS_AT_A_TIME)
    return value_THV
