"""Grouped-query attention: its definition in NumPy bit for bit where products are quantised, within rounding where they are not."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import grouped_attention as oracle

from colibri_jax.config import GQAConfig, RopeConfig
from colibri_jax.errors import ConfigError
from colibri_jax.quant import QuantizedMatrix, quantize_int4
from colibri_jax.reference import gqa
from colibri_jax.reference.attention import Rope, rope_table, rotate
from colibri_jax.reference.gqa import GQAWeights
from colibri_jax.reference.quantized import prepare, to_device

WIDTH, ROWS, START, EPS = 37, 5, 19, 1e-5
EPS32 = np.finfo(np.float32).eps

SHAPES = {
    "plain": GQAConfig(n_heads=6, n_kv_heads=2, head_dim=10, rope=RopeConfig(dim=10, theta=1e4, layout="half")),
    "everything": GQAConfig(
        n_heads=6,
        n_kv_heads=3,
        head_dim=19,
        rope=RopeConfig(dim=8, theta=1e3, layout="half"),
        qkv_bias=True,
        qk_norm="head",
        clip=0.9,
    ),
    "one key": GQAConfig(n_heads=5, n_kv_heads=1, head_dim=33, rope=RopeConfig(dim=16, theta=1e4, layout="half"), qkv_bias=True),
    "norm over the width": GQAConfig(
        n_heads=4, n_kv_heads=4, head_dim=9, rope=RopeConfig(dim=4, theta=1e4, layout="half"), qk_norm="width", clip=1.1
    ),
}


def random_weights(shape: GQAConfig, rng: np.random.Generator) -> dict[str, Any]:
    """Matrices int4 in groups of 16, vectors float32 or None."""

    def matrix(rows: int, cols: int) -> QuantizedMatrix:
        return quantize_int4((rng.standard_normal((rows, cols)) / np.sqrt(cols)).astype(np.float32), 16)

    def vector(n: int, mean: float) -> np.ndarray:
        return (mean + 0.2 * rng.standard_normal(n)).astype(np.float32)

    weights: dict[str, Any] = {name: matrix(n, WIDTH) for name, n in (("q", shape.q_width), ("k", shape.kv_width), ("v", shape.kv_width))}
    weights["o"] = matrix(WIDTH, shape.q_width)
    for name, n in (("q_bias", shape.q_width), ("k_bias", shape.kv_width), ("v_bias", shape.kv_width)):
        weights[name] = vector(n, 0.0) if shape.qkv_bias else None
    for name, n in (("q_norm", shape.q_norm_width), ("k_norm", shape.k_norm_width)):
        weights[name] = vector(n, 1.0) if shape.qk_norm != "none" else None
    return weights


def on_device(weights: dict[str, Any], precision: str) -> GQAWeights:
    return GQAWeights(
        **{
            name: None
            if value is None
            else to_device(prepare(value, storage="int4", precision=precision, role=name))
            if isinstance(value, QuantizedMatrix)
            else jnp.asarray(value)
            for name, value in weights.items()
        }
    )


def run(weights: GQAWeights, shape: GQAConfig, x_TD: np.ndarray, earlier_SC: np.ndarray, start: int) -> tuple[np.ndarray, ...]:
    """Queries, new cache rows and the output of a step whose earlier positions are cached."""
    cos, sin = rope_table(64, shape.rope)

    @jax.jit
    def step(x: jax.Array, weights: GQAWeights, cos: jax.Array, sin: jax.Array, earlier: jax.Array) -> tuple[jax.Array, ...]:
        rope = Rope(cos, sin)
        query = gqa.project_queries(x, weights, rope, shape, EPS)
        rows = gqa.project_keys_values(x, weights, rope, shape, EPS)
        cache = jnp.concatenate([earlier, rows])
        visible = jnp.arange(cache.shape[0])[None, :] <= start + jnp.arange(x.shape[0])[:, None]
        return query, rows, gqa.attend(query, cache, visible, weights, shape)

    steps = slice(start, start + len(x_TD))
    return tuple(np.asarray(part) for part in step(jnp.asarray(x_TD), weights, cos[steps], sin[steps], jnp.asarray(earlier_SC[:start])))


def inputs(shape: GQAConfig, seed: int) -> tuple[dict[str, Any], np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    weights = random_weights(shape, rng)
    x_TD = rng.standard_normal((ROWS, WIDTH)).astype(np.float32)
    return weights, x_TD, rng.standard_normal((START, shape.cache_width)).astype(np.float32)


@pytest.mark.parametrize("name", SHAPES)
def test_quantised_attention_has_the_bits_of_its_definition(name: str) -> None:
    shape = SHAPES[name]
    weights, x_TD, earlier_SC = inputs(shape, 1)
    query, rows, out = run(on_device(weights, "w4a8"), shape, x_TD, earlier_SC, START)
    cos, sin = rope_table(64, shape.rope)
    cache = earlier_SC
    for t, x in enumerate(x_TD):
        turn = (cos[START + t], sin[START + t])
        expected_query = oracle.queries(x, weights, shape, EPS, *turn)
        expected_row = oracle.cache_row(x, weights, shape, EPS, *turn)
        cache = np.concatenate([cache, expected_row[None]])
        np.testing.assert_array_equal(query[t], expected_query)
        np.testing.assert_array_equal(rows[t], expected_row)
        np.testing.assert_array_equal(out[t], oracle.attend(expected_query, cache, weights, shape))


def test_quantised_rows_do_not_depend_on_their_step() -> None:
    shape = SHAPES["everything"]
    weights, x_TD, earlier_SC = inputs(shape, 2)
    device = on_device(weights, "w4a8")
    _, rows, together = run(device, shape, x_TD, earlier_SC, START)
    cache = np.concatenate([earlier_SC, rows])
    for t in (0, ROWS - 1):
        _, row, alone = run(device, shape, x_TD[t : t + 1], cache, START + t)
        np.testing.assert_array_equal(row[0], rows[t])
        np.testing.assert_array_equal(alone[0], together[t])


@pytest.mark.parametrize("name", SHAPES)
def test_float_attention_agrees_with_float64(name: str) -> None:
    shape = SHAPES[name]
    weights, x_TD, earlier_SC = inputs(shape, 3)
    _, rows, out = run(on_device(weights, "w4a32"), shape, x_TD, earlier_SC, START)
    expected_rows, expected = attention_in_float64(weights, shape, x_TD, earlier_SC)
    # Sums of up to 114 terms; an error of a score is a relative error of its share.
    tolerance = 200 * EPS32
    assert np.abs(rows - expected_rows).max() < tolerance * np.abs(expected_rows).max()
    assert np.abs(out - expected).max() < tolerance * np.abs(expected).max()
    _, other = attention_in_float64(weights, dataclasses.replace(shape, rope=dataclasses.replace(shape.rope, theta=9e3)), x_TD, earlier_SC)
    assert np.abs(out - other).max() > tolerance * np.abs(expected).max()


def attention_in_float64(
    weights: dict[str, Any], shape: GQAConfig, x_TD: np.ndarray, earlier_SC: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """New cache rows and output: turned pairs as complex numbers, whole matrices at a time."""
    plain = {name: value.dequantize() if isinstance(value, QuantizedMatrix) else value for name, value in weights.items()}
    half = shape.rope.dim // 2

    def heads(name: str, turned: bool) -> np.ndarray:
        y = x_TD.astype(np.float64) @ plain[name].astype(np.float64).T
        if plain.get(f"{name}_bias") is not None:
            y = y + plain[f"{name}_bias"]
        norm = plain.get(f"{name}_norm")
        if norm is not None:
            runs = y.reshape(ROWS, -1, len(norm))
            y = (runs / np.sqrt((runs**2).mean(axis=2, keepdims=True) + EPS) * norm).reshape(ROWS, -1)
        if shape.clip is not None:
            y = np.clip(y, -shape.clip, shape.clip)
        y = y.reshape(ROWS, -1, shape.head_dim)
        if turned:
            angles = (START + np.arange(ROWS))[:, None] * shape.rope.theta ** (-2.0 * np.arange(half) / shape.rope.dim)
            pairs = (y[..., :half] + 1j * y[..., half : 2 * half]) * np.exp(1j * angles)[:, None, :]
            y = np.concatenate([pairs.real, pairs.imag, y[..., 2 * half :]], axis=2)
        return y

    rows = np.concatenate([heads("k", True).reshape(ROWS, -1), heads("v", False).reshape(ROWS, -1)], axis=1)
    cache = np.concatenate([earlier_SC.astype(np.float64), rows])
    keys, values = (
        np.repeat(part.reshape(len(cache), shape.n_kv_heads, -1), shape.n_heads // shape.n_kv_heads, axis=1)
        for part in np.split(cache, 2, axis=1)
    )
    scores = np.einsum("thv,shv->ths", heads("q", True), keys) / np.sqrt(shape.head_dim)
    scores[np.arange(len(cache))[None, None, :].repeat(ROWS, 0).repeat(shape.n_heads, 1) > START + np.arange(ROWS)[:, None, None]] = -np.inf
    shares = np.exp(scores - scores.max(axis=2, keepdims=True))
    shares /= shares.sum(axis=2, keepdims=True)
    return rows, np.einsum("ths,shv->thv", shares, values).reshape(ROWS, -1) @ plain["o"].astype(np.float64).T


def test_rope_layouts_differ_in_which_elements_make_a_pair() -> None:
    rng = np.random.default_rng(4)
    x = jnp.asarray(rng.standard_normal((3, 8)).astype(np.float32))
    cos, sin = (jnp.asarray(part[5:8]) for part in rope_table(8, RopeConfig(dim=8, theta=1e4)))
    halves = jnp.concatenate([x[:, 0::2], x[:, 1::2]], axis=1)
    np.testing.assert_array_equal(rotate(x, cos, sin, layout="interleaved"), rotate(halves, cos, sin, layout="half"))
    assert np.abs(np.asarray(rotate(x, cos, sin, layout="half") - rotate(x, cos, sin))).max() > 0.1


@pytest.mark.parametrize(
    "changes",
    [
        {"n_kv_heads": 4},
        {"n_heads": 0},
        {"head_dim": 8},
        {"rope": RopeConfig(dim=12, theta=1e4)},
        {"clip": 0.0},
        {"clip": float("nan")},
        {"qk_norm": "tail"},
    ],
)
def test_impossible_shapes_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        dataclasses.replace(SHAPES["plain"], **changes)
