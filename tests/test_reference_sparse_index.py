"""The DSA indexer: scores against plain loops, and the choice of positions with its ties."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colibri_jax.config import IndexerConfig, RopeConfig
from colibri_jax.reference.attention import Rope, rope_table
from colibri_jax.reference.sparse_index import IndexerWeights, choose_positions, index_keys, index_scores, layer_norm

INDEXER = IndexerConfig(n_heads=16, head_dim=10, topk=8, kinds=("full",))
WIDTH, LATENT, ROPE = 21, 13, 6
EPS32 = np.finfo(np.float32).eps

choose = jax.jit(choose_positions, static_argnums=2)


def best_by_sorting(scores: np.ndarray, visible: np.ndarray, topk: int) -> np.ndarray:
    """Python's stable sort keeps the lowest position first among equals (and -0.0 equals 0.0)."""
    chosen = np.zeros(scores.shape, bool)
    for t, row in enumerate(scores):
        seen = [s for s in range(len(row)) if visible[t, s]]
        chosen[t, sorted(seen, key=lambda s: -row[s])[:topk]] = True
    return chosen


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(0, 2**32 - 1), st.sampled_from([1, 3, 8, 15, 16]), st.booleans())
def test_choice_is_the_top_k_with_ties_to_the_lowest_position(seed: int, topk: int, coarse: bool) -> None:
    rng = np.random.default_rng(seed)
    scores = rng.standard_normal((6, 16)).astype(np.float32)
    if coarse:
        scores = (np.rint(scores) * rng.choice([-0.0, 0.5], (6, 16))).astype(np.float32)
    visible = np.arange(16) <= rng.integers(0, 16, (6, 1))
    got = np.asarray(choose(scores, visible, topk))
    np.testing.assert_array_equal(got, best_by_sorting(scores, visible, topk))


def test_signed_zeros_tie() -> None:
    scores = np.array([[-0.0, 0.0, -0.0, 0.0, -1.0, 0.0]], np.float32)
    got = np.asarray(choose(scores, np.ones((1, 6), bool), 3))
    assert got.tolist() == [[True, True, True, False, False, False]]


def test_all_visible_positions_are_kept_where_they_are_fewer_than_topk() -> None:
    visible = np.arange(9)[None] <= np.array([[0], [2], [8]])
    got = np.asarray(choose(np.arange(27, dtype=np.float32).reshape(3, 9), visible, 5))
    assert got.sum(axis=1).tolist() == [1, 3, 5]
    np.testing.assert_array_equal(choose(np.zeros((3, 9), np.float32), visible, 9), visible)


def random_indexer(seed: int) -> tuple[IndexerWeights, np.ndarray, np.ndarray, np.ndarray, Rope]:
    rng = np.random.default_rng(seed)

    def draw(*shape: int) -> jax.Array:
        return jnp.asarray((rng.standard_normal(shape) / np.sqrt(shape[-1])).astype(np.float32))

    weights = IndexerWeights(
        draw(INDEXER.n_heads * INDEXER.head_dim, LATENT), draw(INDEXER.head_dim, WIDTH), 1 + draw(10), draw(10), draw(16, WIDTH)
    )
    x, latent, keys = (rng.standard_normal(shape).astype(np.float32) for shape in ((5, WIDTH), (5, LATENT), (12, INDEXER.head_dim)))
    cos, sin = rope_table(20, RopeConfig(dim=ROPE, theta=1e4))
    return weights, x, latent, keys, Rope(jnp.asarray(cos[7:12]), jnp.asarray(sin[7:12]))


def turned(row: np.ndarray, position: int) -> np.ndarray:
    """Rotate the first ROPE elements of a row, in float64 complex numbers."""
    pairs = (row[0:ROPE:2] + 1j * row[1:ROPE:2]) * np.exp(1j * position * 1e4 ** (-np.arange(0, ROPE, 2) / ROPE))
    return np.concatenate([pairs.real, pairs.imag, row[ROPE:]])


def test_scores_equal_the_sum_over_heads() -> None:
    weights, x, latent, keys, rope = random_indexer(1)
    got = np.asarray(index_scores(*map(jnp.asarray, (x, latent, keys)), weights, rope, indexer=INDEXER))
    wq_b, proj = np.asarray(weights.wq_b, np.float64), np.asarray(weights.weights_proj, np.float64)
    expected = np.zeros((5, 12))
    for t in range(5):
        head_weights = proj @ x[t] / np.sqrt(INDEXER.n_heads)
        for h in range(INDEXER.n_heads):
            query = turned(wq_b[10 * h : 10 * h + 10] @ latent[t], 7 + t)
            expected[t] += head_weights[h] * np.maximum(keys @ query / np.sqrt(INDEXER.head_dim), 0)
    tolerance = 4 * (INDEXER.n_heads + INDEXER.head_dim + LATENT) * EPS32 * np.abs(expected).max()
    assert np.abs(got - expected).max() < tolerance
    assert np.abs(got * 1.0001 - expected).max() > tolerance


def test_keys_are_layer_normed_then_rotated_in_their_first_part() -> None:
    weights, x, _, _, rope = random_indexer(2)
    got = np.asarray(index_keys(jnp.asarray(x), weights, rope))
    for t in range(5):
        raw = np.asarray(weights.wk, np.float64) @ x[t]
        raw = (raw - raw.mean()) / np.sqrt(raw.var() + 1e-6) * np.asarray(weights.k_norm_weight) + np.asarray(weights.k_norm_bias)
        np.testing.assert_allclose(got[t], turned(raw, 7 + t), atol=8 * WIDTH * EPS32)


@pytest.mark.parametrize("eps", [1e-6, 1e-2])
def test_layer_norm_uses_its_eps(eps: float) -> None:
    x = np.random.default_rng(3).standard_normal((3, 10)).astype(np.float32) * 0.1
    got = np.asarray(layer_norm(jnp.asarray(x), jnp.ones(10, jnp.float32), jnp.zeros(10, jnp.float32), eps))
    expected = (x - x.mean(axis=1, keepdims=True)) / np.sqrt(x.astype(np.float64).var(axis=1, keepdims=True) + eps)
    np.testing.assert_allclose(got, expected, atol=2e-6)
