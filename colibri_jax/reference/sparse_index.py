"""DSA: the indexer that picks which cached positions a row attends to.

Source: DeepSeek-V3.2 (DeepSeek sparse attention); GLM-5 rotates the indexer's pairs interleaved, and its "shared" layers reuse
the choice of the last "full" layer before them, which is the caller's business.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from colibri_jax.config import INDEXER_NORM_EPS, IndexerConfig
from colibri_jax.reference.attention import Rope, rotate
from colibri_jax.reference.quantized import Matrix, product


class IndexerWeights(NamedTuple):
    """One full layer's indexer: I heads of width J."""

    wq_b: Matrix
    wk: Matrix
    k_norm_weight: jax.Array
    k_norm_bias: jax.Array
    weights_proj: Matrix


def layer_norm(x: jax.Array, weight: jax.Array, bias: jax.Array, eps: float) -> jax.Array:
    """Mean and variance removed over the last dimension, then weight and bias."""
    centred = x - jnp.mean(x, axis=-1, keepdims=True)
    return centred * jax.lax.rsqrt(jnp.mean(centred * centred, axis=-1, keepdims=True) + eps) * weight + bias


def index_keys(x_TD: jax.Array, weights: IndexerWeights, rope: Rope) -> jax.Array:
    """What the indexer caches of the new positions, float32 [T, J]: one key, its first rope_dim elements rotated."""
    key_TJ = layer_norm(product(x_TD, weights.wk), weights.k_norm_weight, weights.k_norm_bias, INDEXER_NORM_EPS)
    return _rotate_first(key_TJ, rope.cos_TP, rope.sin_TP)


def index_scores(
    x_TD: jax.Array, latent_TQ: jax.Array, keys_SJ: jax.Array, weights: IndexerWeights, rope: Rope, *, indexer: IndexerConfig
) -> jax.Array:
    """How much each new row wants each cached position: Σ_i weight_i · relu(q_i · k · J^-1/2), float32 [T, S].

    The weights are a projection of the layer's normed input, times I^-1/2.
    """
    query = product(latent_TQ, weights.wq_b).reshape(x_TD.shape[0], indexer.n_heads, indexer.head_dim)
    query_TIJ = _rotate_first(query, rope.cos_TP[:, None, :], rope.sin_TP[:, None, :])
    match_TIS = jnp.einsum("tij,sj->tis", query_TIJ, keys_SJ, precision="highest") * indexer.head_dim**-0.5
    weight_TI = product(x_TD, weights.weights_proj) * indexer.n_heads**-0.5
    return jnp.einsum("ti,tis->ts", weight_TI, jax.nn.relu(match_TIS), precision="highest")


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


def _rotate_first(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    width = 2 * cos.shape[-1]
    return jnp.concatenate([rotate(x[..., :width], cos, sin), x[..., width:]], axis=-1)
