"""Formats, packing and scales: tags, byte counts, round trips, and what a quantiser promises about each weight."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
from expert_files import random_matrix
from hypothesis import given, settings
from hypothesis import strategies as st

from colibri_jax._native import kernels as native
from colibri_jax.errors import ScaleRangeError, ShapeError, UnknownFormatError
from colibri_jax.quant import (
    GROUP_SIZES,
    ROW_BLOCK,
    QuantizedMatrix,
    WeightFormat,
    interleavable,
    pack,
    quantize_int4,
    unpack,
)

f32 = np.float32
SMALLEST, SMALLEST_NORMAL, LARGEST = 2.0**-24, 2.0**-14, 65504.0

FORMATS = [
    WeightFormat(8),
    WeightFormat(8, 0, "rows16"),
    WeightFormat(4),
    *(WeightFormat(4, group) for group in GROUP_SIZES),
    *(WeightFormat(4, group, "rows16") for group in GROUP_SIZES),
    *(WeightFormat(4, group, "rows16", "f16") for group in GROUP_SIZES),
]
formats = st.sampled_from(FORMATS)
shapes = st.tuples(st.integers(1, 50), st.integers(1, 300))


# ---- tags and bytes -------------------------------------------------------------------------------------------------


def test_every_format_has_a_tag_of_its_own_that_gives_it_back() -> None:
    known = [*FORMATS, WeightFormat(32)]
    assert [WeightFormat.from_tag(fmt.tag) for fmt in known] == known
    assert len({fmt.tag for fmt in known}) == len(known)
    assert WeightFormat(4, 64, "rows16", "f16").tag == "int4_g64_rows16_f16"


@pytest.mark.parametrize("tag", ["int4_g64_f16", "int8_rows_rows16_f16", "int8_rows_f16", "int4_rows_rows16_f16", "f32_f16", "f16"])
def test_a_tag_of_float16_scales_that_no_format_has_is_refused(tag: str) -> None:
    with pytest.raises(UnknownFormatError):
        WeightFormat.from_tag(tag)


@given(shape=shapes, group=st.sampled_from(GROUP_SIZES))
def test_float16_scales_take_two_bytes_less_each(shape: tuple[int, int], group: int) -> None:
    wide, narrow = (WeightFormat(4, group, "rows16", scales) for scales in ("f32", "f16"))
    scales = -(-shape[0] // ROW_BLOCK) * ROW_BLOCK * wide.groups(shape[1])
    assert narrow.weight_bytes(*shape) == wide.weight_bytes(*shape) - 2 * scales
    if group == 64:  # 544 bytes of 576: 5.6 % fewer
        assert 18 * narrow.weight_bytes(*shape) == 17 * wide.weight_bytes(*shape)


# ---- round trips ----------------------------------------------------------------------------------------------------


def faults_of_round_trip(matrix: QuantizedMatrix, found: QuantizedMatrix) -> list[str]:
    """What unpacking did not give back."""
    return [name for name in ("q", "scales") if getattr(matrix, name).tobytes() != getattr(found, name).tobytes()]


@settings(deadline=None)
@given(fmt=formats, shape=shapes, seed=st.integers(0, 2**32))
def test_unpacking_undoes_packing(fmt: WeightFormat, shape: tuple[int, int], seed: int) -> None:
    matrix = random_matrix(np.random.default_rng(seed), *shape, fmt)
    data, scales = pack(matrix, fmt.layout, fmt.scales)
    assert data.size == fmt.weight_bytes(*shape)
    assert faults_of_round_trip(matrix, unpack(data, scales, fmt, *shape)) == []


@given(group=st.sampled_from(GROUP_SIZES), shape=shapes, seed=st.integers(0, 2**32))
def test_float16_scales_lie_behind_the_vectors_of_their_record(group: int, shape: tuple[int, int], seed: int) -> None:
    """Bytes by the words of the layout: those of float32 scales, with the scales of each record in half of theirs."""
    rows, cols = shape
    fmt = WeightFormat(4, group, "rows16", "f16")
    matrix = random_matrix(np.random.default_rng(seed), rows, cols, fmt)
    wide = pack(matrix, "rows16")[0].reshape(-1, 8 * group + 64)
    narrow = pack(matrix, "rows16", "f16")[0].reshape(-1, 8 * group + 32)
    assert (narrow[:, : 8 * group] == wide[:, : 8 * group]).all()
    groups = fmt.groups(cols)
    for index, record in enumerate(narrow):
        block, g = divmod(index, groups)
        for r, scale in enumerate(record[8 * group :].view("<f2")):
            row = block * ROW_BLOCK + r
            assert scale == (matrix.scales[row, g] if row < rows else 0)


@pytest.mark.parametrize("fault", ["a neighbour's scale", "scales of the other width"])
def test_a_misread_scale_is_seen(fault: str) -> None:
    fmt, (rows, cols) = WeightFormat(4, 64, "rows16", "f16"), (18, 256)
    matrix = random_matrix(np.random.default_rng(1), rows, cols, fmt)
    data = pack(matrix, "rows16", "f16")[0].copy()
    if fault == "a neighbour's scale":
        halves = data.reshape(-1, 544)[:, 512:]
        halves[...] = np.roll(halves, 2, axis=1)
        assert faults_of_round_trip(matrix, unpack(data, None, fmt, rows, cols)) == ["scales"]
    else:
        other = WeightFormat(4, 64, "rows16")
        with pytest.raises(ShapeError, match="bytes"):
            unpack(data, None, other, rows, cols)
        padded = np.pad(data, (0, other.weight_bytes(rows, cols) - data.size))
        assert faults_of_round_trip(matrix, unpack(padded, None, other, rows, cols)) == ["q", "scales"]


@pytest.mark.parametrize(("layout", "bits"), [("row_major", 4), ("rows16", 8), ("row_major", 8)])
def test_only_interleaved_int4_packs_float16_scales(layout: str, bits: int) -> None:
    matrix = random_matrix(np.random.default_rng(0), 3, 70, WeightFormat(4, 64) if bits == 4 else WeightFormat(8))
    with pytest.raises(UnknownFormatError, match="scales"):
        pack(matrix, layout, "f16")  # type: ignore[arg-type]


@pytest.mark.parametrize("scale", [0.1, 1e-9, 70000.0, float("nan")])
def test_packing_never_rounds_a_scale(scale: float) -> None:
    scales = np.ones((3, 2), f32)
    scales[2, 1] = scale
    matrix = QuantizedMatrix(np.ones((3, 70), np.int8), scales, 64, 4)
    pack(matrix, "rows16")
    with pytest.raises(ScaleRangeError, match="row 2, group 1"):
        pack(matrix, "rows16", "f16")


@pytest.mark.parametrize("cols", [10, 64, 65, 200])
def test_a_scale_per_row_becomes_the_same_one_per_group(cols: int) -> None:
    matrix = random_matrix(np.random.default_rng(cols), 5, cols, WeightFormat(4))
    assert interleavable(matrix).dequantize().tobytes() == matrix.dequantize().tobytes()


# ---- float16 scales of the quantiser --------------------------------------------------------------------------------

Quantiser = Callable[[npt.NDArray[np.float32], int], QuantizedMatrix]


def broken_promises(weights: npt.NDArray[np.float32], group: int, quantiser: Quantiser) -> set[str]:
    """What `quantize_int4` says of float16 scales and does not hold."""
    matrix, ideal = quantiser(weights, group), quantize_int4(weights, group).scales.astype(np.float64)
    scales = matrix.scales.astype(np.float64)
    broken = set()
    if not (scales > 0).all() or (scales.astype(np.float16) != scales).any():
        broken.add("positive float16 values")
    if (scales < ideal).any() or (scales > np.maximum(ideal * (1 + 2.0**-10), ideal + SMALLEST)).any():
        broken.add("the smallest one above")
    if (np.abs(matrix.q) > 7).any():
        broken.add("no clipping")
    step = np.repeat(scales, group, axis=1)[:, : weights.shape[1]]
    # The quotient is rounded to float32 before it is rounded to an integer.
    if (np.abs(weights - matrix.q * step) > step * (0.5 + 2.0**-20)).any():
        broken.add("half a scale")
    return broken


def awkward_weights(seed: int, rows: int, cols: int) -> npt.NDArray[np.float32]:
    """Rows over all magnitudes that float16 scales can have, zeros, and below all of them."""
    rng = np.random.default_rng(seed)
    weights = rng.standard_normal((rows, cols)) * 2.0 ** rng.integers(-30, 14, (rows, 1))
    weights[rng.random((rows, cols)) < 0.1] = 0.0
    weights[:: max(rows // 3, 1), : cols // 2] = 0.0
    return weights.astype(f32)


def nearest(weights: npt.NDArray[np.float32], group: int) -> QuantizedMatrix:
    """A quantiser that rounds scales to the nearest float16, at least the smallest."""
    scales = np.maximum(quantize_int4(weights, group).scales.astype(np.float16), np.float16(SMALLEST)).astype(f32)
    step = np.repeat(scales, group, axis=1)[:, : weights.shape[1]]
    return QuantizedMatrix(np.clip(np.rint(weights / step), -8, 7).astype(np.int8), scales, group, 4)


def made_for_float32(weights: npt.NDArray[np.float32], group: int) -> QuantizedMatrix:
    """A quantiser that stores other scales than it divides by."""
    return QuantizedMatrix(quantize_int4(weights, group).q, quantize_int4(weights, group, "f16").scales, group, 4)


@settings(deadline=None)
@given(seed=st.integers(0, 2**32), shape=shapes, group=st.sampled_from(GROUP_SIZES))
def test_float16_scales_keep_the_promises_of_float32_ones(seed: int, shape: tuple[int, int], group: int) -> None:
    assert broken_promises(awkward_weights(seed, *shape), group, lambda w, g: quantize_int4(w, g, "f16")) == set()


@pytest.mark.parametrize(
    ("fault", "broken"),
    [
        (nearest, {"the smallest one above", "half a scale"}),
        (made_for_float32, {"half a scale"}),
        (quantize_int4, {"positive float16 values"}),
    ],
)
def test_a_wrong_scale_breaks_a_promise(fault: Quantiser, broken: set[str]) -> None:
    assert broken <= broken_promises(awkward_weights(3, 60, 300), 64, fault)


@pytest.mark.parametrize(
    ("largest", "scale"),
    [
        (0.0, SMALLEST),
        (1e-30, SMALLEST),
        (7 * SMALLEST, SMALLEST),
        (7 * 1.25 * SMALLEST, 2 * SMALLEST),
        (7 * 3 * SMALLEST, 3 * SMALLEST),
        (7 * SMALLEST_NORMAL, SMALLEST_NORMAL),
        (7 * (1 + 2.0**-10), 1 + 2.0**-10),
        (7 * (1 + 2.0**-12), 1 + 2.0**-10),
        (7 * LARGEST, LARGEST),
    ],
)
def test_scales_at_the_ends_of_their_range(largest: float, scale: float) -> None:
    weights = np.zeros((1, 16), f32)
    weights[0, 3] = -largest
    matrix = quantize_int4(weights, 16, "f16")
    assert matrix.scales.tolist() == [[scale]]
    assert abs(matrix.dequantize()[0, 3] + largest) <= scale / 2


def test_a_scale_above_the_largest_float16_is_refused_by_row_and_group() -> None:
    weights = np.zeros((4, 100), f32)
    weights[2, 70] = 7 * LARGEST * 1.001
    quantize_int4(weights, 64)
    with pytest.raises(ScaleRangeError, match=r"row 2, group 1; expected: at most 65504"):
        quantize_int4(weights, 64, "f16")


# ---- their values in the kernels ------------------------------------------------------------------------------------


@pytest.mark.parametrize("isa", native.available_isas() + native.emulated_isas())
def test_every_float16_has_its_exact_value_in_every_kernel(isa: str) -> None:
    """All 65536 patterns, 16 a record of q = 1: infinities and NaNs too, which loading refuses."""
    halves = np.arange(1 << 16, dtype=np.uint16).reshape(-1, ROW_BLOCK)
    records = np.full((len(halves), 96), 0x99, np.uint8)
    records[:, 64:] = halves.view(np.uint8)
    got = np.empty((ROW_BLOCK, 8 * len(halves)), f32)
    native.dequantize_int4_f16_block(isa, records.reshape(-1), got.shape[1], 8, got, got.shape[1])
    found = got[:, ::8].T
    sign, exponent, fraction = np.where(halves >> 15, -1.0, 1.0), (halves >> 10 & 31).astype(int), (halves & 1023).astype(int)
    defined = sign * np.where(exponent == 0, fraction * 2.0**-24, (1 + fraction / 1024) * 2.0 ** (exponent - 15))
    finite, infinite = exponent < 31, (exponent == 31) & (fraction == 0)
    assert found[finite].tobytes() == defined[finite].astype(f32).tobytes()  # signs of zeros as well
    assert (found[infinite] == sign[infinite] * np.inf).all()
    assert np.isnan(found[~finite & ~infinite]).all()
    assert np.array_equal(got, np.repeat(got[:, ::8], 8, axis=1), equal_nan=True)
