"""DSA: the indexer that picks which cached positions a row attends to.

Source: DeepSeek-V3.2 (DeepSeek sparse attention); GLM-5 rotates the indexer's pairs interleaved, and its "shared" layers reuse
the choice of the last "full" layer before them, which is the caller's business.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from colibri_jax.config import INDEXER_NORM_EPS, IndexerConfig
from colibri_jax.reference import ordered
from colibri_jax.reference.attention import ROWS_AT_A_TIME, Rope, rotate
from colibri_jax.reference.quantized import Matrix, product


class IndexerWeights(NamedTuple):
    """One full layer's indexer: I heads of width J."""

    wq_b: Matrix
    wk: Matrix
    k_norm_weight: jax.Array
    k_norm_bias: jax.Array
    weights_proj: Matrix


def layer_norm(x: jax.Array, weight: jax.Array, bias: jax.Array, eps: float, zero: jax.Array | None = None) -> jax.Array:
    """Mean and variance removed over the last dimension, then weight and bias; in the fixed order where `zero` is given."""
    if zero is not None:
        return ordered.layer_norm(x, weight, bias, eps, zero)
    centred = x - jnp.mean(x, axis=-1, keepdims=True)
    return centred * jax.lax.rsqrt(jnp.mean(centred * centred, axis=-1, keepdims=True) + eps) * weight + bias


def index_keys(x_TD: jax.Array, weights: IndexerWeights, rope: Rope, zero: jax.Array | None = None) -> jax.Array:
    """What the indexer caches of the new positions, float32 [T, J]: one key, its first rope_dim elements rotated."""
    key_TJ = layer_norm(_product(x_TD, weights.wk, zero), weights.k_norm_weight, weights.k_norm_bias, INDEXER_NORM_EPS, zero)
    return _rotate_first(key_TJ, rope.cos_TP, rope.sin_TP, zero)


def index_scores(
    x_TD: jax.Array,
    latent_TQ: jax.Array,
    keys_SJ: jax.Array,
    weights: IndexerWeights,
    rope: Rope,
    *,
    indexer: IndexerConfig,
    zero: jax.Array | None = None,
) -> jax.Array:
    """How much each new row wants each cached position: Σ_i weight_i · relu(q_i · k · J^-1/2), float32 [T, S].

    The weights are a projection of the layer's normed input, times I^-1/2. `zero`: as in `layer_norm`.
    """
    query = _product(latent_TQ, weights.wq_b, zero).reshape(x_TD.shape[0], indexer.n_heads, indexer.head_dim)
    query_TIJ = _rotate_first(query, rope.cos_TP[:, None, :], rope.sin_TP[:, None, :], zero)
    weight_TI = _product(x_TD, weights.weights_proj, zero) * indexer.n_heads**-0.5
    if zero is None:
        match_TIS = jnp.einsum("tij,sj->tis", query_TIJ, keys_SJ, precision="highest") * indexer.head_dim**-0.5
        return jnp.einsum("ti,tis->ts", weight_TI, jax.nn.relu(match_TIS), precision="highest")

    def score_row(row: tuple[jax.Array, jax.Array]) -> jax.Array:
        query_IJ, weight_I = row
        match_SI = ordered.matmul(keys_SJ, query_IJ, zero) * indexer.head_dim**-0.5
        return ordered.dot(jax.nn.relu(match_SI), weight_I, zero)

    scores_TS: jax.Array = jax.lax.map(score_row, (query_TIJ, ordered.separate(weight_TI, zero)), batch_size=ROWS_AT_A_TIME)
    return scores_TS


def choose_positions(scores_TS: jax.Array, visible_TS: jax.Array, topk: int) -> jax.Array:
    """The `topk` best visible positions of each row, ties to the lowest position; all visible ones where they are fewer.

    Returns:
        bool [T, S].
    """
    n_cached = scores_TS.shape[1]
    if n_cached <= topk:
        return visible_TS
    # Scores compare by value: a zero that a negative weight has signed ties with other zeros, which `top_k` would not see.
    by_value_TS = jnp.where(scores_TS == 0.0, 0.0, scores_TS)
    _, best_TK = jax.lax.top_k(jnp.where(visible_TS, by_value_TS, -jnp.inf), topk)
    rows_T1 = jnp.arange(scores_TS.shape[0])[:, None]
    return jnp.zeros(scores_TS.shape, bool).at[rows_T1, best_TK].set(True) & visible_TS


def _product(x_TX: jax.Array, matrix: Matrix, zero: jax.Array | None) -> jax.Array:
    if zero is None or not isinstance(matrix, jax.Array):
        return product(x_TX, matrix)
    return ordered.matmul(x_TX, matrix, zero)


def _rotate_first(x: jax.Array, cos: jax.Array, sin: jax.Array, zero: jax.Array | None) -> jax.Array:
    width = 2 * cos.shape[-1]
    return jnp.concatenate([rotate(x[..., :width], cos, sin, zero), x[..., width:]], axis=-1)
