"""Every kernel of every instruction set gives the bits of the scalar one, and the scalar one those of the NumPy oracle.

Inputs lie off the vector alignment with NaN (or large integers) on both sides, so that a read past an end shows; outputs
have sentinels on both sides, so that a write past an end shows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import kernels as oracle

from colibri_jax import quant
from colibri_jax._native import kernels as native
from colibri_jax.errors import NonFiniteActivationError, OptionError, ShapeError

Array = npt.NDArray[Any]
f32 = np.float32
ISAS: list[str] = native.available_isas() + native.emulated_isas()
U = 2.0**-24  # unit roundoff of float32
MARGIN = 37
LENGTHS = (0, 1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 47, 63, 64, 65, 100, 127, 129, 255, 300)
FORMS = ("int4", "int4_f16", "int8")
every_isa = pytest.mark.parametrize("isa", ISAS)
every_form = pytest.mark.parametrize("form", FORMS)


def surrounding(dtype: np.dtype[Any]) -> Any:
    return np.nan if dtype.kind == "f" else 77


def placed(values: Array) -> Array:
    """A copy between NaNs, one element off the vector alignment."""
    values = np.ascontiguousarray(values)
    buffer = np.full(values.size + 2 * MARGIN, surrounding(values.dtype), values.dtype)
    view = buffer[MARGIN : MARGIN + values.size].reshape(values.shape)
    view[...] = values
    return view


@contextmanager
def output(shape: int | tuple[int, ...], dtype: Any) -> Iterator[Array]:
    """An array to write into; afterwards nothing around it may have changed."""
    size, dtype = int(np.prod(shape)), np.dtype(dtype)
    sentinel = dtype.type(-77)
    buffer = np.full(size + 2 * MARGIN, sentinel, dtype)
    yield buffer[MARGIN : MARGIN + size].reshape(shape)
    assert (buffer[:MARGIN] == sentinel).all(), "written before the output"
    assert (buffer[MARGIN + size :] == sentinel).all(), "written past the output"


def assert_same_bits(got: Any, expected: Any) -> None:
    """Equal bit for bit; a NaN equals any NaN."""
    got, expected = np.asarray(got), np.asarray(expected)
    assert got.dtype == expected.dtype
    assert got.shape == expected.shape
    different = np.frombuffer(got.tobytes(), np.uint8) != np.frombuffer(expected.tobytes(), np.uint8)
    different = different.reshape(*got.shape, got.itemsize).any(axis=-1)
    if got.dtype.kind == "f":
        different &= ~(np.isnan(got) & np.isnan(expected))
    assert not different.any(), (
        f"{different.sum()} of {different.size}, first {np.argwhere(different)[0]}: {got[different]} {expected[different]}"
    )


def floats(rng: np.random.Generator, shape: Any, scale: float = 1.0) -> Array:
    """Normal values over several binades, with zeros of both signs and an exact repeat."""
    values = (rng.standard_normal(shape) * 2.0 ** rng.integers(-6, 6, shape) * scale).astype(np.float32)
    flat = values.reshape(-1)
    flat[5::11] = -0.0
    flat[7::13] = 0.0
    return values


def quantize(isa: str, x: Array, group: int) -> tuple[Array, Array, Array]:
    groups = -(-x.size // group)
    with output(groups * group, np.int8) as q, output(groups, np.float32) as scales, output(groups, np.int32) as sums:
        native.quantize(isa, placed(x), x.size, group, q, scales, sums)
    return q, scales, sums


# float16 scales at both ends of their range, and of both signs: subnormal, smallest normal, largest.
EDGE_SCALES = np.array([2.0**-24, 1023 * 2.0**-24, 2.0**-14, 65504, -(2.0**-24), -3 * 2.0**-24, -65504, -0.1], np.float16).astype(f32)


class Product:
    """A random matrix, packed, with quantised activations of n positions."""

    def __init__(self, form: str, rows: int, cols: int, group: int, n: int, *, seed: int = 3) -> None:
        rng = np.random.default_rng(seed)
        self.rows, self.cols, self.group, self.n = rows, cols, group, n
        weights = floats(rng, (rows, cols))
        self.form, self.scale_type = form, "f16" if form == "int4_f16" else "f32"
        self.matrix = quant.quantize_int8(weights) if form == "int8" else quant.quantize_int4(weights, group, self.scale_type)
        self.matrix.q.reshape(-1)[::5] = -128 if form == "int8" else -8  # values that the quantiser makes rarely or never
        if form == "int4_f16":
            some = self.matrix.scales.reshape(-1)[seed % 3 :: 3]
            some[...] = np.resize(EDGE_SCALES, some.size)
        self.groups, self.blocks = -(-cols // group), -(-rows // quant.ROW_BLOCK)
        packed = self.packed()
        buffer = np.full(packed.size + 2 * MARGIN, 255, np.uint8)
        self.w = buffer[MARGIN : MARGIN + packed.size]  # an odd address: weights have no alignment
        self.w[:] = packed
        x = floats(rng, (n, cols), 3.0)
        x[1::4] *= f32(1e-36)  # rows that quantise to zero
        parts = [oracle.quantize(row, group) for row in x]
        self.q, self.scales, self.sums = (placed(np.stack([part[i] for part in parts])) for i in range(3))

    def packed(self) -> Array:
        return quant.pack(self.matrix, "rows16", self.scale_type)[0]

    @functools.cached_property
    def expected(self) -> Array:
        scales = np.repeat(self.matrix.scales, self.groups, axis=1) if self.form == "int8" else self.matrix.scales
        pairs = zip(self.q, self.scales, strict=True)
        return np.stack([oracle.product(self.matrix.q, scales, q, s, self.group) for q, s in pairs])

    def arguments(self, first: int, last: int) -> tuple[Any, ...]:
        return (self.group, self.q[first:last], self.scales[first:last], self.sums[first:last])

    def run(self, isa: str, blocks: tuple[int, int] | None = None) -> Array:
        kernel = getattr(native, f"matmul_{self.form}")
        begin, end = blocks or (0, self.blocks)
        stride = self.rows + 3
        with output((self.n - 1) * stride + self.rows, np.float32) as y:
            y[:] = -5
            kernel(isa, self.w, self.rows, begin, end, *self.arguments(0, self.n), y, stride)
        rows = np.stack([y[p * stride : p * stride + self.rows] for p in range(self.n)])
        gaps = [y[p * stride + self.rows : (p + 1) * stride] for p in range(self.n - 1)]
        assert all((gap == -5).all() for gap in gaps), "written between positions"
        return rows


def check_product(product: Product, run: Callable[[], Array]) -> None:
    """The checker that the planted faults below must not pass."""
    assert_same_bits(run(), product.expected)


shapes = st.tuples(st.integers(1, 50), st.integers(1, 300), st.sampled_from((8, *quant.GROUP_SIZES)), st.integers(1, 9))


@every_isa
@pytest.mark.parametrize("form", ["int4", "int4_f16"])
@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(seed=st.integers(0, 2**32), shape=shapes)
def test_int4_product_equals_the_oracle(isa: str, form: str, seed: int, shape: tuple[int, int, int, int]) -> None:
    product = Product(form, *shape, seed=seed)
    check_product(product, lambda: product.run(isa))


@every_isa
@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(seed=st.integers(0, 2**32), shape=shapes)
def test_int8_product_equals_the_oracle(isa: str, seed: int, shape: tuple[int, int, int, int]) -> None:
    rows, cols, _, n = shape
    product = Product("int8", rows, cols, quant.ACTIVATION_GROUP_SIZE, n, seed=seed)
    check_product(product, lambda: product.run(isa))


@every_isa
@every_form
@pytest.mark.parametrize(
    ("rows", "cols", "group", "n"),
    [
        (16, 64, 64, 8),
        (33, 1100, 64, 16),
        (50, 2100, 64, 37),
        (20, 17000, 64, 50),  # more activations than one pass over the weights takes
        (17, 1030, 32, 23),
        (31, 900, 48, 17),
        (16, 500, 96, 31),
        (33, 1700, 128, 45),
        (17, 800, 192, 9),
        (20, 1500, 256, 12),
        (18, 1000, 136, 20),  # does not divide into few tile products
    ],
)
def test_product_of_many_positions_equals_the_oracle(isa: str, form: str, rows: int, cols: int, group: int, n: int) -> None:
    """Where there are tiles of 16 positions: whole ones and a last one, and matrices wider than a run of unpacked weights."""
    product = Product(form, rows, cols, quant.ACTIVATION_GROUP_SIZE if form == "int8" else group, n, seed=n)
    check_product(product, lambda: product.run(isa))


def test_emulated_kernels_are_for_tests_only() -> None:
    assert not set(native.available_isas()) & set(native.emulated_isas())
    with pytest.raises(OptionError, match="not available"):
        native.dot("amx-swapped", np.zeros(1, np.float32), np.zeros(1, np.float32))


def test_amx_is_available_or_says_why() -> None:
    assert ("amx" in native.available_isas()) == (native.amx_refusal() == "")
    if native.amx_refusal():
        with pytest.raises(OptionError, match=native.amx_refusal()):
            native.dot("amx", np.zeros(1, np.float32), np.zeros(1, np.float32))


@every_isa
@every_form
def test_product_at_the_extremes_does_not_saturate(isa: str, form: str) -> None:
    product = Product(form, 17, 512, 64 if form == "int8" else 256, 9)
    lowest, highest = (-128, 127) if form == "int8" else (-8, 7)
    for weight, activation in ((lowest, 127), (highest, -127), (highest, 127)):
        product.matrix.q[...] = weight
        product.w[:] = product.packed()
        product.q[...] = activation
        product.sums[...] = activation * product.group
        product.__dict__.pop("expected", None)
        check_product(product, lambda: product.run(isa))


@every_isa
@every_form
@pytest.mark.parametrize("n", [1, 2, 3, 5, 8, 9, 17])
def test_a_position_alone_equals_it_among_others(isa: str, form: str, n: int) -> None:
    product = Product(form, 33, 200, 64, n)
    together = product.run(isa)
    for p in range(n):
        with output(33, np.float32) as alone:
            kernel = getattr(native, f"matmul_{form}")
            kernel(isa, product.w, 33, 0, 3, *product.arguments(p, p + 1), alone, 33)
        assert_same_bits(alone, together[p])


@every_isa
@every_form
@pytest.mark.parametrize("blocks", [(0, 1), (1, 3), (2, 3), (1, 1)])
@pytest.mark.parametrize("n", [3, 19])
def test_only_the_rows_of_the_named_blocks_are_written(isa: str, form: str, blocks: tuple[int, int], n: int) -> None:
    product = Product(form, 41, 100, 64, n)
    got = product.run(isa, blocks)
    first, last = 16 * blocks[0], min(16 * blocks[1], 41)
    assert_same_bits(got[:, first:last], product.expected[:, first:last])
    assert (np.delete(got, np.s_[first:last], axis=1) == -5).all()


def planted_faults(product: Product) -> dict[str, Callable[[], Array]]:
    """Wrong products: of the kernel on spoiled operands, or of a wrong definition."""

    def swapped_nibbles() -> Array:
        spoiled = Product("int4", 20, 100, 32, 2)
        records = spoiled.w.reshape(spoiled.blocks, spoiled.groups, -1)
        weights = records[:, :, : 8 * spoiled.group]
        weights[...] = (weights >> 4) | (weights << 4)
        return spoiled.run("scalar")

    def dropped_last_group() -> Array:
        spoiled = Product("int4", 20, 100, 32, 2)
        spoiled.scales[:, -1] = 0
        return spoiled.run("scalar")

    def forgotten_offset() -> Array:
        spoiled = Product("int4", 20, 100, 32, 2)
        spoiled.sums[...] = 0
        return spoiled.run("scalar")

    def neighbours_scale() -> Array:
        spoiled = Product("int4_f16", 20, 100, 32, 2)
        halves = spoiled.w.reshape(spoiled.blocks, spoiled.groups, -1)[:, :, 8 * spoiled.group :]
        halves[...] = np.roll(halves, 2, axis=2)  # of the row beside it
        return spoiled.run("scalar")

    def other_width() -> Array:
        """float16 scales where the kernel takes float32 ones: records are shorter than it believes."""
        spoiled = Product("int4_f16", 20, 100, 32, 2)
        spoiled.form, missing = "int4", spoiled.blocks * spoiled.groups * 2 * quant.ROW_BLOCK
        spoiled.w = np.concatenate([spoiled.w, np.zeros(missing, np.uint8)])
        return spoiled.run("scalar")

    def fused() -> Array:
        rows = []
        for q_x, s_x in zip(product.q, product.scales, strict=True):
            padded = np.pad(product.matrix.q, ((0, 0), (0, -product.cols % product.group))).reshape(product.rows, -1, product.group)
            isums = (padded.astype(np.int64) * q_x.astype(np.int64).reshape(1, -1, product.group)).sum(axis=2)
            y = np.zeros(product.rows, np.float32)
            for g in range(product.groups):
                y = (y.astype(np.float64) + isums[:, g] * np.float64(product.matrix.scales[:, g] * s_x[g])).astype(np.float32)
            rows.append(y)
        return np.stack(rows)

    return {
        "swapped nibbles": swapped_nibbles,
        "dropped last group": dropped_last_group,
        "forgotten offset": forgotten_offset,
        "scale of the neighbour": neighbours_scale,
        "float32 read where float16 lies": other_width,
        "fused multiply-add": fused,
        "zero output": lambda: np.zeros_like(product.expected),
        "last bit": lambda: np.nextafter(product.expected, f32(np.inf)),
    }


@pytest.mark.parametrize(
    ("form", "fault"),
    [
        *(
            ("int4", f)
            for f in ("swapped nibbles", "dropped last group", "forgotten offset", "fused multiply-add", "zero output", "last bit")
        ),
        *(("int4_f16", f) for f in ("scale of the neighbour", "float32 read where float16 lies", "zero output", "last bit")),
    ],
)
def test_the_checker_catches(form: str, fault: str) -> None:
    product = Product(form, 20, 100, 32, 2)
    check_product(product, lambda: product.run("scalar"))
    with pytest.raises(AssertionError):
        check_product(product, planted_faults(product)[fault])


def test_the_guards_catch_writes_outside() -> None:
    def write(index: int) -> None:
        with output(8, np.float32) as y:
            assert y.base is not None
            y.base[MARGIN + index] = 0

    write(7)
    for index in (-1, 8):
        with pytest.raises(AssertionError, match="written"):
            write(index)


# ---- quantiser ----------------------------------------------------------------------------------------------------
@every_isa
@pytest.mark.parametrize("group", [8, *quant.GROUP_SIZES])
@pytest.mark.parametrize("cols", [0, 1, 7, 15, 16, 17, 63, 64, 65, 100, 255, 300])
def test_quantiser_equals_the_oracle(isa: str, group: int, cols: int) -> None:
    rng = np.random.default_rng(cols * 1000 + group)
    for scale in (1.0, 3e35, 1e-29, 1e-30, 1e-38, 1e-42, 0.0):
        x = floats(rng, cols, scale)
        for got, expected in zip(quantize(isa, x, group), oracle.quantize(x, group), strict=True):
            assert_same_bits(got, expected)


@every_isa
def test_quantiser_rounds_halves_to_even_and_stays_in_range(isa: str) -> None:
    x = np.array([127, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 126.5, -126.5, -127, 0, -0.0, 3.4999998, 1e-40], np.float32)
    q, scales, sums = quantize(isa, x, 16)
    assert q.tolist() == [127, 0, 2, 2, 0, -2, -2, 126, -126, -127, 0, 0, 3, 0, 0, 0]
    assert scales.tolist() == [1.0]
    assert sums.tolist() == [int(q.sum())]


@every_isa
@pytest.mark.parametrize("largest", [1e-30, float(np.nextafter(f32(1e-30), f32(0)))])
def test_quantiser_zeroes_groups_below_its_floor(isa: str, largest: float) -> None:
    q, scales, _ = quantize(isa, np.array([largest, -largest / 2], np.float32), 8)
    alive = f32(largest) >= f32(1e-30)
    assert (scales[0] > 0) == alive
    assert q[0] == (127 if alive else 0)


@every_isa
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("position", [0, 7, 8, 16, 63, 64, 99])
def test_quantiser_names_the_first_value_that_is_not_finite(isa: str, bad: float, position: int) -> None:
    x = np.full(100, 3e38, np.float32)
    x[position:] = bad
    with pytest.raises(NonFiniteActivationError, match=rf"element {position};"):
        quantize(isa, x, 64)


# ---- dequantised weights ------------------------------------------------------------------------------------------
@every_isa
@pytest.mark.parametrize("form", ["int4", "int4_f16"])
@pytest.mark.parametrize("group", [8, *quant.GROUP_SIZES])
@pytest.mark.parametrize("cols", [1, 8, 17, 64, 100, 129, 300])
def test_dequantised_int4_equals_the_matrix(isa: str, form: str, group: int, cols: int) -> None:
    product = Product(form, 16, cols, group, 1)
    expected = product.matrix.dequantize()
    with output(15 * (cols + 2) + cols, np.float32) as out:
        getattr(native, f"dequantize_{form}_block")(isa, product.w, cols, group, out, cols + 2)
    assert_same_bits(np.stack([out[r * (cols + 2) : r * (cols + 2) + cols] for r in range(16)]), expected)
    packed, scales = quant.pack(product.matrix, "row_major")
    assert scales is not None
    for r, row in enumerate(packed.reshape(16, -1)):
        with output(cols, np.float32) as out:
            native.dequantize_int4_row(isa, placed(row), placed(scales.reshape(16, -1)[r]), cols, group, out)
        assert_same_bits(out, expected[r])


@every_isa
@pytest.mark.parametrize("cols", [1, 8, 17, 64, 100, 129, 300])
def test_dequantised_int8_equals_the_matrix(isa: str, cols: int) -> None:
    product = Product("int8", 16, cols, 64, 1)
    expected = product.matrix.dequantize()
    with output(15 * (cols + 2) + cols, np.float32) as out:
        native.dequantize_int8_block(isa, product.w, cols, out, cols + 2)
    assert_same_bits(np.stack([out[r * (cols + 2) : r * (cols + 2) + cols] for r in range(16)]), expected)
    for r in range(16):
        with output(cols, np.float32) as out:
            native.dequantize_int8_row(isa, placed(product.matrix.q[r]), float(product.matrix.scales[r, 0]), cols, out)
        assert_same_bits(out, expected[r])


@every_isa
@pytest.mark.parametrize(("cols", "group"), [(33, 0), (33, 5), (33, 7), (1, 0), (100, 6), (100, 200)])
def test_dequantised_row_with_one_scale_or_odd_groups(isa: str, cols: int, group: int) -> None:
    rng = np.random.default_rng(cols)
    q = rng.integers(-8, 8, cols).astype(np.int8)
    scales = floats(rng, -(-cols // group) if group else 1)
    nibbles = np.pad((q + 8).astype(np.uint8), (0, cols % 2))
    with output(cols, np.float32) as out:
        native.dequantize_int4_row(isa, placed(nibbles[0::2] | nibbles[1::2] << 4), placed(scales), cols, group, out)
    assert_same_bits(out, q.astype(np.float32) * (np.repeat(scales, group)[:cols] if group else scales[0]))


# ---- float32 ------------------------------------------------------------------------------------------------------
@every_isa
@pytest.mark.parametrize("n", LENGTHS)
def test_float_kernels_equal_the_oracle(isa: str, n: int) -> None:
    rng = np.random.default_rng(n)
    a, b, c = floats(rng, n), floats(rng, n), floats(rng, n, 4.0)
    assert_same_bits(f32(native.dot(isa, placed(a), placed(b))), oracle.dot(a, b))
    assert_same_bits(np.float64(native.dot_f64(isa, placed(a), placed(b))), oracle.dot_f64(a, b))
    with output(n, np.float32) as y:
        y[:] = b
        native.axpy(isa, 0.3, placed(a), y)
    assert_same_bits(y, b + f32(0.3) * a)
    with output(n, np.float32) as y:
        native.silu_mul(isa, placed(c), placed(a), y)
    assert_same_bits(y, oracle.silu_mul(c, a))
    if n:
        with output(n, np.float32) as y:
            y[:] = c
            native.softmax(isa, y)
        assert_same_bits(y, oracle.softmax(c))
        with output(n, np.float32) as y:
            native.rms_norm(isa, placed(a), placed(b), 1e-5, y)
        assert_same_bits(y, oracle.rms_norm(a, b, 1e-5))
        with output(n, np.float32) as y:
            native.layer_norm(isa, placed(a), placed(b), placed(c), 1e-5, y)
        assert_same_bits(y, oracle.layer_norm(a, b, c, 1e-5))


@every_isa
@pytest.mark.parametrize("rows", [0, 1, 2, 15, 16, 17, 32, 50])
@pytest.mark.parametrize("cols", [1, 7, 8, 15, 16, 17, 31, 32, 33, 65, 100])
def test_dot_columns_equals_the_oracle(isa: str, rows: int, cols: int) -> None:
    rng = np.random.default_rng(rows * 1000 + cols)
    w, x, stride = floats(rng, (rows, cols)), floats(rng, rows), cols + 3
    padded = np.full((rows, stride), np.nan, np.float32)  # what lies between the rows is not read
    padded[:, :cols] = w
    with output(cols, np.float32) as y:
        native.dot_columns(isa, placed(padded), stride, rows, cols, placed(x), y)
    assert_same_bits(y, oracle.dot_columns(w, x))


def test_dot_depends_on_its_order() -> None:
    """The comparison above could not see a wrong order if sums in other orders were equal."""
    rng = np.random.default_rng(0)
    a, b = floats(rng, 300), floats(rng, 300)
    assert oracle.dot(a, b) != np.add.reduce(a * b)
    assert oracle.dot(a, b) != f32(sum((a * b).astype(np.float64)))


@every_isa
@pytest.mark.parametrize("n", [1, 3, 16, 17, 31])
def test_sums_of_negative_zeros_are_positive(isa: str, n: int) -> None:
    """Partial sums begin at +0: whether an element is absent or -0 cannot be seen."""
    minus = np.full(n, -0.0, np.float32)
    ones = np.ones(n, np.float32)
    assert_same_bits(f32(native.dot(isa, placed(minus), placed(ones))), f32(0))
    assert_same_bits(np.float64(native.dot_f64(isa, placed(minus), placed(ones))), np.float64(0))
    with output(1, np.float32) as y:
        native.dot_columns(isa, placed(minus), 1, n, 1, placed(ones), y)
    assert_same_bits(y, np.zeros(1, np.float32))


# ---- exp, softmax, SiLU against float64 -----------------------------------------------------------------------------
def ulps(got: Array, exact: Array) -> float:
    return float(np.max(np.abs(got.astype(np.float64) - exact) / np.spacing(exact.astype(np.float32)).astype(np.float64)))


def test_exp_is_within_one_ulp_of_float64() -> None:
    """float64's own error is 2^-29 of a float32 ulp. The kernels have the oracle's bits (tests above)."""
    x = np.concatenate([np.linspace(-103, 88.7, 400_001), np.linspace(-1, 1, 100_001), np.arange(-87, 88) * np.log(2) / 2]).astype(
        np.float32
    )
    assert ulps(oracle.exp(x), np.exp(x.astype(np.float64))) <= 1
    special = oracle.exp(np.array([-np.inf, -104, 0, -0.0, 89, np.inf, np.nan], np.float32))
    assert_same_bits(special, np.array([0, 0, 1, 1, np.inf, np.inf, np.nan], np.float32))


@every_isa
def test_exp_of_the_kernels_reaches_the_subnormals(isa: str) -> None:
    """Beside a 0 the sum of a small value and 1 is 1, so softmax shows exp itself."""
    for x in np.linspace(-104.5, -17.5, 997).astype(np.float32):
        y = np.array([0, x], np.float32)
        native.softmax(isa, y)
        assert y[0] == 1
        assert abs(float(y[1]) - np.exp(np.float64(x))) <= np.spacing(f32(np.exp(np.float64(x))))


@every_isa
@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(seed=st.integers(0, 2**32), n=st.integers(1, 400), spread=st.sampled_from((0.0, 0.1, 3.0, 40.0)))
def test_softmax_is_within_its_rounding_bound_of_float64(isa: str, seed: int, n: int, spread: float) -> None:
    x = (np.random.default_rng(seed).standard_normal(n) * spread + 5).astype(np.float32)
    y = x.copy()
    native.softmax(isa, y)
    distance = x.astype(np.float64) - x.max()
    exact = np.exp(distance) / np.exp(distance).sum()
    # The difference rounds by |d| U in the exponent and exp by 2 U, in value and sum; n additions; a division.
    bound = (2 * np.abs(distance).max() + n + 6) * U
    assert (np.abs(y - exact) <= bound * exact + 2.0**-149).all()
    assert not (np.abs(np.zeros(n) - exact) <= bound * exact + 2.0**-149).any() or exact.min() < 1e-38


@every_isa
def test_softmax_of_masked_scores(isa: str) -> None:
    y = np.array([-np.inf, 2, -np.inf, 2, -1e30], np.float32)
    native.softmax(isa, y)
    assert y.tolist() == [0, 0.5, 0, 0.5, 0]
    for bad in ([np.nan, 1, 2], [1, np.nan, 2], [1] * 20 + [np.nan], [-np.inf, -np.inf], [1, np.inf]):
        y = np.array(bad, np.float32)
        native.softmax(isa, y)
        assert np.isnan(y).all()


@every_isa
def test_silu_is_within_its_rounding_bound_of_float64(isa: str) -> None:
    rng = np.random.default_rng(7)
    gate, up = rng.uniform(-80, 80, 2000).astype(np.float32), floats(rng, 2000)
    y = np.empty(2000, np.float32)
    native.silu_mul(isa, gate, up, y)
    exact = gate.astype(np.float64) / (1 + np.exp(-gate.astype(np.float64))) * up
    # exp by 2 U, then an addition, a division, a product.
    assert (np.abs(y - exact) <= 6 * U * np.abs(exact) + 2.0**-149).all()
    native.silu_mul(isa, np.array([-89, -500, -0.0, 0, 500, np.inf, np.nan], np.float32), np.full(7, 2, np.float32), y[:7])
    assert_same_bits(y[:7], np.array([-0.0, -0.0, -0.0, 0, 1000, np.inf, np.nan], np.float32))


# ---- choice of the table and checks of the binding ------------------------------------------------------------------
def test_instruction_sets_are_named_slowest_first() -> None:
    available = native.available_isas()
    assert tuple(available) == ("scalar", "avx2", "avx512vnni", "amx")[: len(available)]
    assert native.dot("", np.ones(3, np.float32), np.ones(3, np.float32)) == 3


def test_an_unknown_instruction_set_is_refused() -> None:
    with pytest.raises(OptionError, match=r"isa; expected: scalar.*got: avx1024"):
        native.dot("avx1024", np.ones(3, np.float32), np.ones(3, np.float32))


ones = np.ones(64, np.float32)
frozen = np.ones(64, np.float32)
frozen.flags.writeable = False


@pytest.mark.parametrize(
    "call",
    [
        lambda: native.dot("", ones.astype(np.float64), ones),
        lambda: native.dot("", ones, ones[:63]),
        lambda: native.dot("", ones, np.ones(128, np.float32)[::2]),
        lambda: native.softmax("", frozen),
        lambda: native.quantize("", ones, 64, 12, np.zeros(72, np.int8), np.zeros(6, np.float32), np.zeros(6, np.int32)),
        lambda: native.quantize("", ones, 65, 64, np.zeros(128, np.int8), np.zeros(2, np.float32), np.zeros(2, np.int32)),
        lambda: native.quantize("", ones, 64, 64, np.zeros(63, np.int8), np.zeros(1, np.float32), np.zeros(1, np.int32)),
        lambda: native.dot_columns("", ones, 8, 8, 9, ones, np.zeros(9, np.float32)),
        lambda: native.dot_columns("", ones, 9, 8, 8, ones, np.zeros(8, np.float32)),
        lambda: native.dequantize_int8_block("", np.zeros(1087, np.uint8), 64, np.zeros(1024, np.float32), 64),
    ],
)
def test_wrong_arrays_are_refused(call: Callable[[], object]) -> None:
    with pytest.raises(ShapeError, match="kernel"):
        call()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"w": np.zeros(3, np.uint8)}, "bytes of the whole matrix"),
        ({"block_end": 3}, "begin <= end <= blocks"),
        ({"block_begin": -1}, "begin <= end <= blocks"),
        ({"y_stride": 19}, "at least rows"),
        ({"group": 20}, "multiple of 8"),
        ({"q": np.zeros((2, 100), np.int8)}, "whole groups"),
        ({"scales": np.zeros(3, np.float32)}, "8 elements"),
        ({"y": np.zeros(39, np.float32)}, "40 elements"),
    ],
)
def test_a_wrong_product_is_refused(change: dict[str, Any], message: str) -> None:
    product = Product("int4", 20, 100, 32, 2)
    arguments = {"w": product.w, "rows": 20, "block_begin": 0, "block_end": 2, "group": 32, "q": product.q, "scales": product.scales}
    arguments |= {"sums": product.sums, "y": np.zeros(40, np.float32), "y_stride": 20}
    native.matmul_int4("scalar", **arguments)
    with pytest.raises(ShapeError, match=message):
        native.matmul_int4("scalar", **(arguments | change))
