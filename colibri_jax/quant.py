"""Packing and scales: what the bytes of a quantised matrix mean (NumPy only; both backends and the container rely on it).

Two layouts exist:

* `row_major`: the layout of colibri's containers. int4 holds q + 8 in a nibble, even element low, rows padded to whole
  bytes; int8 is signed. Scales are a tensor of their own.
* `rows16`: 16 rows interleaved, scales inside. A row block is 16 rows (missing rows are zero weights with scale 0), a
  group is `group_size` inputs (missing inputs are zero weights).
  int4: per row block, per group: group_size / 8 vectors of 64 bytes, then 16 scales, float32 or float16. In a vector, bytes
  4r … 4r + 3 belong to row r; byte k holds input 8t + k in its low nibble and 8t + 4 + k in its high one (t = vector), as q + 8.
  int8: per row block: 16 float32 scales, then per group of 64 inputs 16 vectors of 64 bytes; byte k of row r is input
  4t + k as q + 128.
  So the lanes of a vector register are rows: a row's groups are summed in order and nothing is summed across lanes.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from colibri_jax.errors import ScaleRangeError, ShapeError, UnknownFormatError

Int8Array = npt.NDArray[np.int8]
Float32Array = npt.NDArray[np.float32]
ByteArray = npt.NDArray[np.uint8]

DEFAULT_GROUP_SIZE = 64
ACTIVATION_GROUP_SIZE = 64  # where weight scales are per row
GROUP_SIZES = (16, 32, 48, 64, 96, 128, 192, 256)
ROW_BLOCK = 16
INT4_MAX = 7
INT8_MAX = 127
SCALE_FLOOR = 1e-8

Layout = Literal["row_major", "rows16"]
ScaleType = Literal["f32", "f16"]
SCALE_DTYPES: dict[ScaleType, np.dtype[Any]] = {"f32": np.dtype("<f4"), "f16": np.dtype("<f2")}


@dataclasses.dataclass(frozen=True)
class WeightFormat:
    """How a matrix lies in a file. `group_size` 0 means one scale per row; `scales` "f16" exists for interleaved int4 only."""

    bits: Literal[4, 8, 32]
    group_size: int = 0
    layout: Layout = "row_major"
    scales: ScaleType = "f32"

    def __post_init__(self) -> None:
        if self.bits not in (4, 8, 32):
            raise UnknownFormatError("unknown weight width", where="bits", expected="4, 8 or 32", got=self.bits)
        if self.group_size and (self.bits != 4 or self.group_size not in GROUP_SIZES):
            raise UnknownFormatError(
                "unknown group size", where=f"int{self.bits}", expected=f"one of {GROUP_SIZES} with int4", got=self.group_size
            )
        if self.layout not in ("row_major", "rows16"):
            raise UnknownFormatError("unknown layout", where="layout", expected="row_major or rows16", got=self.layout)
        if self.layout == "rows16" and (self.bits == 32 or (self.bits == 4 and not self.group_size)):
            raise UnknownFormatError(
                "format has no interleaved layout", where=self.tag, expected="int4 groups or int8 rows", got=self.layout
            )
        if self.scales != "f32" and (self.scales != "f16" or self.bits != 4 or self.layout != "rows16"):
            expected = "f32, or f16 with int4 in rows16"
            raise UnknownFormatError("format has no such scales", where=self.tag, expected=expected, got=self.scales)

    @property
    def tag(self) -> str:
        """The name in a container's metadata, e.g. `int4_g64_rows16` or `int4_g64_rows16_f16`."""
        if self.bits == 32:
            return "f32"
        scales = f"g{self.group_size}" if self.group_size else "rows"
        layout = "_rows16" if self.layout == "rows16" else ""
        return f"int{self.bits}_{scales}{layout}" + ("" if self.scales == "f32" else f"_{self.scales}")

    @classmethod
    def from_tag(cls, tag: str) -> WeightFormat:
        """The inverse of `tag`.

        Raises:
            UnknownFormatError: no known format has this tag.
        """
        if tag == "f32":
            return cls(32)
        match = re.fullmatch(r"int([48])_(?:rows|g([1-9][0-9]{0,3}))(_rows16)?(_f16)?", tag)
        if match is None:
            raise UnknownFormatError(
                "unknown format tag",
                where="container metadata",
                expected="f32, int8_rows, int4_rows or int4_g<N>, perhaps _rows16, and then perhaps _f16",
                got=tag,
            )
        layout: Layout = "rows16" if match[3] else "row_major"
        return cls(8 if match[1] == "8" else 4, int(match[2] or 0), layout, "f16" if match[4] else "f32")

    @property
    def scale_dtype(self) -> np.dtype[Any]:
        """Of a scale in the file."""
        return SCALE_DTYPES[self.scales]

    def groups(self, cols: int) -> int:
        """Activation groups along an input of `cols` elements."""
        return -(-cols // (self.group_size or ACTIVATION_GROUP_SIZE))

    def weight_bytes(self, rows: int, cols: int) -> int:
        """Bytes of the weight tensor of a [rows, cols] matrix (rows16: its scales included)."""
        if self.bits == 32:
            return 4 * rows * cols
        if self.layout == "row_major":
            return rows * (cols if self.bits == 8 else -(-cols // 2))
        record, _ = self.rows16_record(cols)
        return -(-rows // ROW_BLOCK) * (self.groups(cols) if self.bits == 4 else 1) * record

    def rows16_record(self, cols: int) -> tuple[int, slice]:
        """Bytes of a rows16 record, the part of a matrix that holds 16 scales, and where in it they lie.

        int4: one row block's part of a group, its scales last. int8: a whole row block of `cols` inputs, its scales first.
        """
        scales = ROW_BLOCK * self.scale_dtype.itemsize
        if self.bits == 8:
            return scales + self.groups(cols) * ROW_BLOCK * ACTIVATION_GROUP_SIZE, slice(0, scales)
        weights = ROW_BLOCK * self.group_size // 2
        return weights + scales, slice(weights, weights + scales)

    def scale_count(self, rows: int, cols: int) -> int:
        """float32 values in the scale tensor beside the weights; 0 where there is none."""
        if self.bits == 32 or self.layout == "rows16":
            return 0
        return rows * (self.groups(cols) if self.group_size else 1)


@dataclasses.dataclass(frozen=True, eq=False)
class QuantizedMatrix:
    """A symmetric quantised matrix: w[o, i] = q[o, i] * scales[o, i // group_size].

    Attributes:
        q: int8 [rows, cols]; int4 values lie in -8 … 7.
        scales: float32 [rows, groups], or [rows, 1] with `group_size` 0.
        group_size: inputs per scale; 0 means the whole row.
        bits: 4 or 8.
    """

    q: Int8Array
    scales: Float32Array
    group_size: int
    bits: Literal[4, 8]

    def __post_init__(self) -> None:
        rows, cols = self.q.shape
        groups = -(-cols // self.group_size) if self.group_size else 1
        if self.q.dtype != np.int8 or self.scales.dtype != np.float32 or self.scales.shape != (rows, groups):
            raise ShapeError(
                "quantised matrix",
                where="q, scales",
                expected=f"int8 [{rows}, {cols}], float32 [{rows}, {groups}]",
                got=f"{self.q.dtype} {list(self.q.shape)}, {self.scales.dtype} {list(self.scales.shape)}",
            )

    def dequantize(self) -> Float32Array:
        """float32 [rows, cols]; one rounding per element."""
        if not self.group_size:
            return self.q.astype(np.float32) * self.scales
        return self.q.astype(np.float32) * np.repeat(self.scales, self.group_size, axis=1)[:, : self.q.shape[1]]


def quantize_int4(weights: Float32Array, group_size: int = DEFAULT_GROUP_SIZE, scales: ScaleType = "f32") -> QuantizedMatrix:
    """Symmetric int4 with one scale per group (0: per row): scale = max|w| / 7, at least 1e-8; ties to even.

    With "f16" scales are the smallest positive float16 values that are no smaller than that, and q is made with them. Rounded up,
    because then no |w| exceeds seven of them: q lies in -7 … 7 without clipping, and no weight is off by more than half a scale, which
    is what float32 scales promise. The scale grows by at most a factor 1 + 2^-10, or, where it is subnormal (groups
    without a weight above 7 · 2^-14), by at most 2^-24: no weight loses more than 2^-25 to it. Rounded to the nearest, a
    subnormal scale could be a third too small, and the largest weights of its group would be clipped; raised to the smallest
    normal value instead, 2^-14, it would cost every small group up to 2^-15. Kernels convert subnormals exactly too.

    Raises:
        ScaleRangeError: a scale is above 65504, the largest float16; `where` names row and group.
    """
    return _quantize(weights, group_size, 4, INT4_MAX, -INT4_MAX - 1, scales)


def quantize_int8(weights: Float32Array) -> QuantizedMatrix:
    """Symmetric int8 with one scale per row: scale = max|w| / 127, at least 1e-8; ties to even."""
    return _quantize(weights, 0, 8, INT8_MAX, -INT8_MAX)


def quantize(weights: Float32Array, fmt: WeightFormat) -> QuantizedMatrix:
    """int4 or int8 with the scales that a format has; `fmt.bits` is not 32."""
    return quantize_int4(weights, fmt.group_size, fmt.scales) if fmt.bits == 4 else quantize_int8(weights)


def pack(matrix: QuantizedMatrix, layout: Layout, scales: ScaleType = "f32") -> tuple[ByteArray, Float32Array | None]:
    """Bytes of a matrix in a layout, and the separate scale tensor where the layout has one (flat, row-major).

    Raises:
        ScaleRangeError: `scales` is "f16" and one of them is not a float16 value; nothing is rounded here.
        UnknownFormatError: there is no such format.
    """
    if scales == "f16" and (layout != "rows16" or matrix.bits != 4):
        raise UnknownFormatError("format has no such scales", where=f"int{matrix.bits}, {layout}", expected="f32", got=scales)
    if layout == "rows16":
        return (_pack_rows16_int4(matrix, scales) if matrix.bits == 4 else _pack_rows16_int8(matrix)), None
    if matrix.bits == 8:
        return matrix.q.view(np.uint8).reshape(-1), matrix.scales.reshape(-1)
    nibbles = _pad_cols((matrix.q + 8).astype(np.uint8), 2, 8)
    return (nibbles[:, 0::2] | (nibbles[:, 1::2] << 4)).reshape(-1), matrix.scales.reshape(-1)


def unpack(data: ByteArray, scales: Float32Array | None, fmt: WeightFormat, rows: int, cols: int) -> QuantizedMatrix:
    """The inverse of `pack`.

    Raises:
        ShapeError: a byte or scale count does not fit format and shape.
    """
    expected = (fmt.weight_bytes(rows, cols), fmt.scale_count(rows, cols))
    found = (data.size, 0 if scales is None else scales.size)
    if expected != found or fmt.bits == 32:
        raise ShapeError(
            "packed matrix",
            where=f"{fmt.tag} [{rows}, {cols}]",
            expected=f"{expected[0]} bytes, {expected[1]} scales",
            got=f"{found[0]} bytes, {found[1]} scales",
        )
    bits: Literal[4, 8] = 8 if fmt.bits == 8 else 4
    if fmt.layout == "rows16":
        q, unpacked_scales = (_unpack_rows16_int8 if bits == 8 else _unpack_rows16_int4)(data, fmt, rows, cols)
        return QuantizedMatrix(q, unpacked_scales, fmt.group_size, bits)
    assert scales is not None
    if bits == 8:
        q = data.view(np.int8).reshape(rows, cols)
    else:
        packed = data.reshape(rows, -1)
        q = np.empty((rows, 2 * packed.shape[1]), np.int8)
        q[:, 0::2] = (packed & 15).astype(np.int8) - 8
        q[:, 1::2] = (packed >> 4).astype(np.int8) - 8
        q = q[:, :cols]
    return QuantizedMatrix(np.ascontiguousarray(q), np.ascontiguousarray(scales.reshape(rows, -1)), fmt.group_size, bits)


def interleavable(matrix: QuantizedMatrix) -> QuantizedMatrix:
    """The same values in a form that `rows16` can hold: int4 with a scale per row gets it once per activation group.

    The arithmetic is unchanged: activations are quantised in the same groups, and every group's scale is the row's.
    """
    if matrix.bits == 8 or matrix.group_size:
        return matrix
    groups = -(-matrix.q.shape[1] // ACTIVATION_GROUP_SIZE)
    return QuantizedMatrix(matrix.q, np.repeat(matrix.scales, groups, axis=1), ACTIVATION_GROUP_SIZE, 4)


def _quantize(
    weights: Float32Array, group_size: int, bits: Literal[4, 8], largest: int, smallest: int, scale_type: ScaleType = "f32"
) -> QuantizedMatrix:
    rows, cols = weights.shape
    size = group_size or cols
    grouped = _pad_cols(weights.astype(np.float32), size, 0).reshape(rows, -1, size)
    scales = np.maximum(np.abs(grouped).max(axis=2) / np.float32(largest), np.float32(SCALE_FLOOR)).astype(np.float32)
    if scale_type == "f16":
        scales = _up_to_float16(scales)
    q = np.clip(np.rint(grouped / scales[:, :, None]), smallest, largest).astype(np.int8)
    return QuantizedMatrix(np.ascontiguousarray(q.reshape(rows, -1)[:, :cols]), scales, group_size, bits)


def _up_to_float16(scales: Float32Array) -> Float32Array:
    """The smallest float16 values that are no smaller; scales are positive."""
    largest = np.finfo(np.float16).max
    if (scales > largest).any():
        row, group = np.argwhere(scales > largest)[0].tolist()
        raise ScaleRangeError(
            "scale is too large for float16",
            where=f"row {row}, group {group}",
            expected=f"at most {largest}",
            got=scales[row, group],
        )
    nearest = scales.astype(np.float16)
    # Patterns of positive floats follow each other in the order of their values.
    return (nearest.view(np.uint16) + (nearest < scales)).view(np.float16).astype(np.float32)


def _stored_scales(scales: Float32Array, scale_type: ScaleType) -> npt.NDArray[Any]:
    if scale_type == "f32":
        return scales
    with np.errstate(over="ignore"):
        stored = scales.astype(SCALE_DTYPES[scale_type])
    lossy = stored != scales
    if lossy.any():
        row, group = np.argwhere(lossy)[0].tolist()
        raise ScaleRangeError(
            "scale is not a float16 value", where=f"row {row}, group {group}", expected=stored[row, group], got=scales[row, group]
        )
    return stored


def _pad_cols(array: npt.NDArray[Any], multiple: int, value: int) -> npt.NDArray[Any]:
    missing = -array.shape[1] % multiple
    return np.pad(array, ((0, 0), (0, missing)), constant_values=value) if missing else array


def _pad_rows(array: npt.NDArray[Any], value: int) -> npt.NDArray[Any]:
    missing = -array.shape[0] % ROW_BLOCK
    return np.pad(array, ((0, missing), (0, 0)), constant_values=value) if missing else array


def _pack_rows16_int4(matrix: QuantizedMatrix, scale_type: ScaleType) -> ByteArray:
    group = matrix.group_size
    nibbles = _pad_rows(_pad_cols((matrix.q + 8).astype(np.uint8), group, 8), 8)
    blocks, groups = nibbles.shape[0] // ROW_BLOCK, nibbles.shape[1] // group
    # [block, row, group, vector, low/high, byte] -> [block, group, vector, row, byte]
    split = nibbles.reshape(blocks, ROW_BLOCK, groups, group // 8, 2, 4)
    vectors = (split[..., 0, :] | (split[..., 1, :] << 4)).transpose(0, 2, 3, 1, 4).reshape(blocks, groups, -1)
    scales = _pad_rows(_stored_scales(matrix.scales, scale_type), 0).reshape(blocks, ROW_BLOCK, groups).transpose(0, 2, 1)
    return np.concatenate([vectors, np.ascontiguousarray(scales).view(np.uint8)], axis=2).reshape(-1)


def _unpack_rows16_int4(data: ByteArray, fmt: WeightFormat, rows: int, cols: int) -> tuple[Int8Array, Float32Array]:
    group, groups, blocks = fmt.group_size, fmt.groups(cols), -(-rows // ROW_BLOCK)
    record, scales_at = fmt.rows16_record(cols)
    records = data.reshape(blocks, groups, record)
    vectors = records[:, :, : scales_at.start].reshape(blocks, groups, group // 8, ROW_BLOCK, 4).transpose(0, 3, 1, 2, 4)
    nibbles = np.stack([vectors & 15, vectors >> 4], axis=4)
    q = (nibbles.astype(np.int8) - 8).reshape(blocks * ROW_BLOCK, groups * group)[:rows, :cols]
    scales = np.ascontiguousarray(records[:, :, scales_at]).view(fmt.scale_dtype).transpose(0, 2, 1)
    return np.ascontiguousarray(q), np.ascontiguousarray(scales.reshape(blocks * ROW_BLOCK, groups)[:rows], np.float32)


def _pack_rows16_int8(matrix: QuantizedMatrix) -> ByteArray:
    shifted = (matrix.q.astype(np.int16) + 128).astype(np.uint8)
    padded = _pad_rows(_pad_cols(shifted, ACTIVATION_GROUP_SIZE, 128), 128)
    blocks = padded.shape[0] // ROW_BLOCK
    vectors = padded.reshape(blocks, ROW_BLOCK, -1, 4).transpose(0, 2, 1, 3).reshape(blocks, -1)
    scales = np.ascontiguousarray(_pad_rows(matrix.scales, 0).reshape(blocks, ROW_BLOCK)).view(np.uint8)
    return np.concatenate([scales, vectors], axis=1).reshape(-1)


def _unpack_rows16_int8(data: ByteArray, fmt: WeightFormat, rows: int, cols: int) -> tuple[Int8Array, Float32Array]:
    blocks = -(-rows // ROW_BLOCK)
    record, scales_at = fmt.rows16_record(cols)
    records = data.reshape(blocks, record)
    scales = np.ascontiguousarray(records[:, scales_at]).view(np.float32).reshape(-1, 1)[:rows]
    vectors = records[:, scales_at.stop :].reshape(blocks, -1, ROW_BLOCK, 4).transpose(0, 2, 1, 3).reshape(blocks * ROW_BLOCK, -1)
    return np.ascontiguousarray((vectors[:rows, :cols].astype(np.int16) - 128).astype(np.int8)), np.ascontiguousarray(scales)
