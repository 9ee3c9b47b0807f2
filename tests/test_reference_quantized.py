"""The quantised product: bit-equal to its one-rounding-at-a-time oracle, alone and inside compiled code that invites rewrites."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import quantized_product as oracle

from colibri_jax.errors import MissingTensorError, OptionError, ShapeError
from colibri_jax.quant import QuantizedMatrix, quantize_int4, quantize_int8
from colibri_jax.reference import quantized
from colibri_jax.reference.quantized import Quantized, grouped, prepare, product, to_device

# rows, inputs, weight group (0: scale per row), bits
SHAPES = [
    (33, 256, 64, 4),
    (17, 250, 64, 4),
    (5, 640, 16, 4),
    (7, 100, 48, 4),
    (9, 130, 0, 4),
    (31, 320, 0, 8),
    (1, 1, 64, 4),
    (4, 512, 256, 4),
]


def random_matrix(rng: np.random.Generator, rows: int, cols: int, group: int, bits: int) -> QuantizedMatrix:
    """Any integers and scales of many magnitudes, as no quantiser would make them."""
    low, high = (-8, 8) if bits == 4 else (-127, 128)
    groups = -(-cols // group) if group else 1
    scales = np.exp(rng.uniform(-12, 3, (rows, groups))).astype(np.float32)
    return QuantizedMatrix(rng.integers(low, high, (rows, cols)).astype(np.int8), scales, group, 4 if bits == 4 else 8)


def random_activations(rng: np.random.Generator, rows: int, cols: int) -> np.ndarray:
    """Magnitudes over many octaves, halves that round to even, whole groups of zeros, values below the floor."""
    x = rng.standard_normal((rows, cols)) * np.exp(rng.uniform(-8, 8, (rows, 1)))
    x[rng.random((rows, cols)) < 0.1] = 0.0
    x[0] = np.rint(127 * rng.uniform(-1, 1, cols)) + 0.5
    x[1, : cols // 2] = 0.0
    if rows > 2:
        x[2] = 9e-31 * rng.uniform(-1, 1, cols)
    return x.astype(np.float32)


@jax.jit
def surrounded(x_TX: jax.Array, matrix: Quantized) -> jax.Array:
    """The product between operations that a compiler would like to fuse with it; doubling is exact."""
    return 2.0 * product(x_TX + x_TX, matrix)


@pytest.mark.parametrize("shape", SHAPES)
def test_product_is_bit_equal_to_the_oracle(shape: tuple[int, int, int, int]) -> None:
    rng = np.random.default_rng(sum(shape))
    compiled = jax.jit(product)
    for trial in range(6):
        matrix, x = random_matrix(rng, *shape), random_activations(rng, 8, shape[1])
        expected = oracle.quantized_product(x, matrix)
        on_device = to_device(grouped(matrix))
        np.testing.assert_array_equal(_bits(compiled(x, on_device)), _bits(expected))
        if trial == 0:
            np.testing.assert_array_equal(_bits(product(jnp.asarray(x), on_device)), _bits(expected))
        doubled = 2.0 * oracle.quantized_product(x + x, matrix)
        np.testing.assert_array_equal(_bits(surrounded(x, on_device)), _bits(doubled))


@pytest.mark.parametrize("fault", ["fused", "reciprocal", "dropped_group", "swapped_nibbles", "reversed_groups", "scales_apart"])
def test_bit_comparison_notices_every_planted_fault(fault: oracle.Fault) -> None:
    rng = np.random.default_rng(7)
    matrix, x = random_matrix(rng, 64, 256, 64, 4), random_activations(rng, 16, 256)
    right, wrong = oracle.quantized_product(x, matrix), oracle.quantized_product(x, matrix, fault)
    assert (_bits(right) != _bits(wrong)).any()
    np.testing.assert_array_equal(_bits(jax.jit(product)(x, to_device(grouped(matrix)))), _bits(right))


def test_scales_and_quotients_are_true_divisions() -> None:
    """A compiler that multiplies with reciprocals instead gets some of these wrong, which the last line shows."""
    rng = np.random.default_rng(3)
    x = (rng.uniform(1, 2, (512, 64)) * np.exp2(rng.integers(-60, 60, (512, 1)))).astype(np.float32)
    q_TGZ, scales_TG = jax.jit(quantized.quantize_activations, static_argnums=1)(x, 64, np.int32(0))
    scales = x.max(axis=1) / np.float32(127)
    np.testing.assert_array_equal(_bits(scales_TG)[:, 0], _bits(scales))
    np.testing.assert_array_equal(np.asarray(q_TGZ)[:, 0], np.rint(x / scales[:, None]))
    assert (x.max(axis=1) * (np.float32(1) / np.float32(127)) != scales).any()


def test_activations_are_quantised_as_the_oracle_does() -> None:
    x = random_activations(np.random.default_rng(5), 9, 150)
    q_TGZ, scales_TG = jax.jit(quantized.quantize_activations, static_argnums=1)(x, 64, np.int32(0))
    for row in range(9):
        for group in range(3):
            q, scale = oracle.quantize_group(x[row, 64 * group : 64 * group + 64])
            assert np.asarray(scales_TG)[row, group] == scale
            np.testing.assert_array_equal(np.asarray(q_TGZ)[row, group, : len(q)], q)
    assert not np.asarray(q_TGZ)[:, 2, 150 - 128 :].any()


def test_products_of_scales_down_to_the_documented_one_stay_exact() -> None:
    """CPUs flush subnormals under XLA; here every product of scales is in 2^-102 … 2^-99, and sums cancel."""
    rng = np.random.default_rng(12)
    q = rng.integers(-8, 8, (64, 256)).astype(np.int8)
    matrix = QuantizedMatrix(q, rng.uniform(1, 2, (64, 4)).astype(np.float32) * np.float32(2.0**-26), 64, 4)
    x = (127 * rng.uniform(-1, 1, (8, 256)) * 2.0**-76).astype(np.float32)
    x[:, ::64] = 127 * 2.0**-76
    expected = oracle.quantized_product(x, matrix)
    assert np.abs(expected).min() < 2.0**-96
    on_device = to_device(grouped(matrix))
    np.testing.assert_array_equal(_bits(jax.jit(product)(x, on_device)), _bits(expected))
    # 2^-24 below that, products of scales are subnormal, and what is lost stays below the documented bound.
    far = jax.jit(product)(x * np.float32(2.0**-24), on_device)
    assert np.abs(np.asarray(far) - oracle.quantized_product(x * np.float32(2.0**-24), matrix)).max() <= 4 * 2.0**-101


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_non_finite_activation_turns_its_whole_row_nan(bad: float) -> None:
    rng = np.random.default_rng(1)
    matrix, x = random_matrix(rng, 6, 130, 64, 4), random_activations(rng, 5, 130)
    x[3, 129] = bad
    out = np.asarray(jax.jit(product)(x, to_device(grouped(matrix))))
    assert np.isnan(out[3]).all()
    np.testing.assert_array_equal(_bits(out[:3]), _bits(oracle.quantized_product(x[:3], matrix)))


def test_each_precision_and_storage_chooses_its_product() -> None:
    weights = np.random.default_rng(2).standard_normal((4, 70)).astype(np.float32)
    int4, int8 = quantize_int4(weights), quantize_int8(weights)
    assert isinstance(prepare(int4, storage="int4", precision="w4a8", role="r"), tuple)
    assert isinstance(prepare(int8, storage="int8", precision="w4a8", role="r"), tuple)
    for matrix, storage, precision in (
        (int4, "int4", "w4a32"),
        (int4, "int4_dequant", "w4a8"),
        (int8, "int8_dequant", "w4a8"),
        (int8, "int8", "full"),
    ):
        np.testing.assert_array_equal(prepare(matrix, storage=storage, precision=precision, role="r"), matrix.dequantize())
    np.testing.assert_array_equal(prepare(weights, storage="f32", precision="w4a8", role="r"), weights)
    with pytest.raises(OptionError, match=r"layers\.0\.attn\.o"):
        prepare(weights, storage="int4", precision="w4a8", role="layers.0.attn.o")


def test_missing_and_misshapen_tensors_are_named() -> None:
    with pytest.raises(MissingTensorError, match="embed"):
        quantized.check_stored(None, (3, 4), "embed")
    with pytest.raises(ShapeError, match="embed"):
        quantized.check_stored(np.zeros((4, 3), np.float32), (3, 4), "embed")


def test_rows_are_looked_up_dequantised() -> None:
    table = np.random.default_rng(4).standard_normal((9, 70)).astype(np.float32)
    rows = np.array([8, 0, 8])
    for matrix in (quantize_int8(table), quantize_int4(table)):
        np.testing.assert_array_equal(quantized.look_up_rows(matrix, rows), matrix.dequantize()[rows])
    np.testing.assert_array_equal(quantized.look_up_rows(table, rows), table[rows])


def _bits(array: object) -> np.ndarray:
    return np.asarray(array, np.float32).view(np.uint32)
