"""MLA pieces: norm, rope, and the two forms of attention."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from colibri_jax.config import MLAConfig, RopeConfig
from colibri_jax.reference.attention import MLAWeights, Rope, attend, project_latent, project_queries, rms_norm, rope_table, rotate

MLA = MLAConfig(n_heads=5, q_lora_rank=23, kv_lora_rank=13, nope_dim=9, value_dim=11, rope=RopeConfig(dim=6, theta=1e4))
WIDTH, ROWS, CACHED = 37, 7, 19
EPS32 = np.finfo(np.float32).eps


def random_weights(rng: np.random.Generator) -> MLAWeights:
    def matrix(*shape: int) -> jnp.ndarray:
        return jnp.asarray((rng.standard_normal(shape) / np.sqrt(shape[-1])).astype(np.float32))

    return MLAWeights(
        q_a=matrix(MLA.q_lora_rank, WIDTH),
        q_a_norm=1 + matrix(MLA.q_lora_rank),
        q_b=matrix(MLA.n_heads * MLA.qk_dim, MLA.q_lora_rank),
        kv_a=matrix(MLA.cache_width, WIDTH),
        kv_a_norm=1 + matrix(MLA.kv_lora_rank),
        key_HNC=matrix(MLA.n_heads, MLA.nope_dim, MLA.kv_lora_rank),
        value_HVC=matrix(MLA.n_heads, MLA.value_dim, MLA.kv_lora_rank),
        o=matrix(WIDTH, MLA.n_heads * MLA.value_dim),
    )


def random_inputs(seed: int) -> tuple[MLAWeights, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    query = 2 * rng.standard_normal((ROWS, MLA.n_heads, MLA.nope_dim))
    rotated = 2 * rng.standard_normal((ROWS, MLA.n_heads, MLA.rope_dim))
    cache = rng.standard_normal((CACHED, MLA.cache_width))
    attended = rng.random((ROWS, CACHED)) < 0.5
    attended[np.arange(ROWS), rng.integers(0, CACHED, ROWS)] = True
    return random_weights(rng), query.astype(np.float32), rotated.astype(np.float32), cache.astype(np.float32), attended


def attention_in_float64(
    weights: MLAWeights, query: np.ndarray, rotated: np.ndarray, cache: np.ndarray, attended: np.ndarray
) -> np.ndarray:
    """Row by row, head by head, keys and values written out."""
    key_HNC, value_HVC, o = (np.asarray(w, np.float64) for w in (weights.key_HNC, weights.value_HVC, weights.o))
    latent, key_rope = cache[:, : MLA.kv_lora_rank].astype(np.float64), cache[:, MLA.kv_lora_rank :].astype(np.float64)
    rows = []
    for t in range(len(query)):
        positions = np.flatnonzero(attended[t])
        heads = []
        for h in range(MLA.n_heads):
            keys = np.concatenate([latent[positions] @ key_HNC[h].T, key_rope[positions]], axis=1)
            scores = keys @ np.concatenate([query[t, h], rotated[t, h]]).astype(np.float64) / np.sqrt(MLA.qk_dim)
            shares = np.exp(scores - scores.max())
            heads.append((shares / shares.sum()) @ (latent[positions] @ value_HVC[h].T))
        rows.append(o @ np.concatenate(heads))
    return np.stack(rows)


@pytest.mark.parametrize("form", ["absorbed", "expanded"])
@pytest.mark.parametrize("seed", range(3))
def test_both_forms_agree_with_float64(form: str, seed: int) -> None:
    weights, *inputs = random_inputs(seed)
    expected = attention_in_float64(weights, *inputs)
    got = np.asarray(attend(*map(jnp.asarray, inputs), weights, mla=MLA, form=form))
    # Scores are sums of up to 13 + 9 + 6 terms of magnitude around 10, and their error is a relative error of the shares.
    tolerance = 4 * (MLA.kv_lora_rank + MLA.qk_dim) * 10 * EPS32 * np.abs(expected).max()
    assert np.abs(got - expected).max() < tolerance
    wrong_scale = attention_in_float64(weights, inputs[0] * 1.001, *inputs[1:])
    assert np.abs(got - wrong_scale).max() > tolerance


def test_positions_that_are_not_attended_change_no_bit() -> None:
    weights, query, rotated, cache, attended = random_inputs(9)
    attended[:, 4] = False
    before = attend(*map(jnp.asarray, (query, rotated, cache, attended)), weights, mla=MLA, form="absorbed")
    cache[4] = 1e4
    after = attend(*map(jnp.asarray, (query, rotated, cache, attended)), weights, mla=MLA, form="absorbed")
    np.testing.assert_array_equal(np.asarray(before), np.asarray(after))


def test_rope_takes_interleaved_pairs_and_gives_halves() -> None:
    rng = np.random.default_rng(1)
    x = rng.standard_normal((4, 6)).astype(np.float32)
    cos, sin = rope_table(10, MLA.rope)
    got = np.asarray(rotate(jnp.asarray(x), jnp.asarray(cos[3:7]), jnp.asarray(sin[3:7])))
    for t in range(4):
        for pair in range(3):
            turned = complex(x[t, 2 * pair], x[t, 2 * pair + 1]) * np.exp(1j * (3 + t) * 1e4 ** (-2 * pair / 6))
            assert abs(got[t, pair] - turned.real) < 4 * EPS32 * abs(turned)
            assert abs(got[t, 3 + pair] - turned.imag) < 4 * EPS32 * abs(turned)


def test_rope_scores_depend_on_distance_only() -> None:
    rng = np.random.default_rng(2)
    query, key = rng.standard_normal((2, 6)).astype(np.float32)
    cos, sin = map(jnp.asarray, rope_table(300, MLA.rope))

    def score(query_position: int, key_position: int) -> float:
        turned = [rotate(jnp.asarray(x), cos[p], sin[p]) for x, p in ((query, query_position), (key, key_position))]
        return float(jnp.dot(*turned, precision="highest"))

    assert score(20, 3) == pytest.approx(score(290, 273), abs=float(32 * EPS32 * np.linalg.norm(query) * np.linalg.norm(key)))
    assert score(20, 3) != pytest.approx(score(290, 274), abs=1e-3)


def test_rope_table_is_float64_rounded_once() -> None:
    cos, sin = rope_table(5000, RopeConfig(dim=8, theta=1e6))
    assert cos.dtype == sin.dtype == np.float32
    angle = 4999 * 1e6 ** (-2 * 3 / 8)
    assert cos[4999, 3] == np.float32(np.cos(angle))
    assert sin[4999, 0] == np.float32(np.sin(4999.0))


def test_rms_norm_adds_eps_inside_the_root() -> None:
    x = np.array([[3e-3, -4e-3]], np.float32)
    got = np.asarray(rms_norm(jnp.asarray(x), jnp.asarray([1.0, 2.0], jnp.float32), 1e-5))
    expected = x / np.sqrt(12.5e-6 + 1e-5) * [1.0, 2.0]
    np.testing.assert_allclose(got, expected, rtol=8 * EPS32)


def test_cache_row_is_normed_latent_then_rotated_key() -> None:
    rng = np.random.default_rng(3)
    weights = random_weights(rng)
    x = rng.standard_normal((2, WIDTH)).astype(np.float32)
    cos, sin = rope_table(8, MLA.rope)
    rope = Rope(jnp.asarray(cos[4:6]), jnp.asarray(sin[4:6]))
    row = np.asarray(project_latent(jnp.asarray(x), weights, rope, MLA))
    raw = x.astype(np.float64) @ np.asarray(weights.kv_a, np.float64).T
    latent = raw[:, : MLA.kv_lora_rank]
    latent = latent / np.sqrt((latent**2).mean(axis=1, keepdims=True) + 1e-6) * np.asarray(weights.kv_a_norm)
    np.testing.assert_allclose(row[:, : MLA.kv_lora_rank], latent, atol=WIDTH * EPS32 * np.abs(latent).max())
    norms = np.linalg.norm(raw[:, MLA.kv_lora_rank :], axis=1)
    np.testing.assert_allclose(np.linalg.norm(row[:, MLA.kv_lora_rank :], axis=1), norms, rtol=WIDTH * EPS32)


def test_query_is_split_into_plain_and_rotated_part() -> None:
    rng = np.random.default_rng(4)
    weights = random_weights(rng)
    x = jnp.asarray(rng.standard_normal((2, WIDTH)).astype(np.float32))
    still = Rope(jnp.ones((2, 3), jnp.float32), jnp.zeros((2, 3), jnp.float32))
    latent, plain, rotated = project_queries(x, weights, still, MLA)
    whole = np.asarray(latent, np.float64) @ np.asarray(weights.q_b, np.float64).T
    whole = whole.reshape(2, MLA.n_heads, MLA.qk_dim)
    np.testing.assert_allclose(plain, whole[..., :9], atol=1e-5)
    np.testing.assert_allclose(rotated, whole[..., [9, 11, 13, 10, 12, 14]], atol=1e-5)
