"""Products with stored matrices: float32, dequantised, or int4/int8 weights with int8 activations, rounding by rounding.

The quantised product is a contract (its order of roundings is what native kernels reproduce), so nothing here may depend
on what a compiler finds faster. Three rewrites would change bits: x / 127 into x * (1 / 127), the same for a divisor that many
elements share, and a product followed by a sum into one fused operation. All are prevented with a zero that only run time knows, see
`Quantized.zero`.

Shapes: T positions, X inputs, Y outputs, G groups of Z inputs.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from colibri_jax.errors import MissingTensorError, OptionError, ShapeError
from colibri_jax.quant import ACTIVATION_GROUP_SIZE, INT8_MAX, QuantizedMatrix
from colibri_jax.reference.ordered import divide, separate
from colibri_jax.tensors import Storage

Precision = Literal["full", "w4a32", "w4a8"]
StoredArray = npt.NDArray[np.float32] | QuantizedMatrix

# Below this largest magnitude a group of activations counts as zero.
SMALLEST_ACTIVATION = 1e-30

RecordedActivations = list[tuple[npt.NDArray[np.float32], int]]
"""What entered quantisers: float32 [T, X], and the group size."""

_RECORD: contextvars.ContextVar[RecordedActivations | None] = contextvars.ContextVar("quantiser inputs", default=None)


class Quantized(NamedTuple):
    """A quantised matrix on the device, its inputs in whole groups.

    Attributes:
        q_GYZ: int8; missing inputs of the last group are 0.
        scales_GY: float32; a scale per row stands in every group.
        zero: int32 0. It must reach compiled code as an argument, never as a constant: `ordered` needs a 0 that a
            compiler does not know to round one operation at a time.
    """

    q_GYZ: jax.Array
    scales_GY: jax.Array
    zero: jax.Array


Matrix = jax.Array | Quantized
"""float32 [Y, X], or quantised."""

HostQuantized = tuple[npt.NDArray[np.int8], npt.NDArray[np.float32], npt.NDArray[np.int32]]
HostMatrix = npt.NDArray[np.float32] | HostQuantized


def prepare(value: StoredArray, *, storage: Storage, precision: Precision, role: str) -> HostMatrix:
    """One stored tensor in the form that its products take, still on the host.

    Args:
        value: float32 array, or a quantised matrix.
        storage: the role's storage class, which says how a product with it is done.
        precision: "full" and "w4a32" dequantise everything; "w4a8" keeps int4 and int8 products quantised.
        role: named in errors.

    Raises:
        OptionError: a quantised mode was asked for, and this matrix, quantised by its storage class, is not.
    """
    is_product = storage in ("int4", "int8")
    if not isinstance(value, QuantizedMatrix):
        if is_product and precision != "full":
            raise OptionError("the mode needs quantised weights", where=role, expected="a QuantizedMatrix", got=f"{value.dtype} array")
        return np.asarray(value, np.float32)
    return grouped(value) if is_product and precision == "w4a8" else value.dequantize()


def grouped(matrix: QuantizedMatrix) -> HostQuantized:
    """The parts of `Quantized` on the host. Where scales are per row, groups are those of the activations."""
    rows, cols = matrix.q.shape
    size = matrix.group_size or ACTIVATION_GROUP_SIZE
    groups = -(-cols // size)
    padded = np.zeros((rows, groups * size), np.int8)
    padded[:, :cols] = matrix.q
    scales = np.broadcast_to(matrix.scales, (rows, groups)) if not matrix.group_size else matrix.scales
    q_GYZ = np.ascontiguousarray(padded.reshape(rows, groups, size).transpose(1, 0, 2))
    return q_GYZ, np.ascontiguousarray(scales.T), np.asarray(0, np.int32)


def to_device(matrix: HostMatrix) -> Matrix:
    """The matrix on the default device."""
    if isinstance(matrix, tuple):
        return Quantized(*(jnp.asarray(part) for part in matrix))
    return jnp.asarray(matrix)


def stack_to_device(matrices: Sequence[HostMatrix]) -> Matrix:
    """Matrices of one kind and shape as one with a leading dimension, put together on the host."""
    if isinstance(matrices[0], tuple):
        return Quantized(*(jnp.asarray(np.stack(parts)) for parts in zip(*matrices, strict=True)))
    return jnp.asarray(np.stack([matrix for matrix in matrices if isinstance(matrix, np.ndarray)]))


def product(x_TX: jax.Array, matrix: Matrix) -> jax.Array:
    """float32 [T, Y]: x times the transpose of the [Y, X] matrix, quantised where the matrix is."""
    if isinstance(matrix, Quantized):
        return quantized_product(x_TX, matrix)
    return jnp.einsum("tx,yx->ty", x_TX, matrix, precision="highest")


@contextlib.contextmanager
def recorded_activations() -> Iterator[RecordedActivations]:
    """Run the reference operation by operation and list what enters its quantisers, in order.

    For explaining a difference: compiled code keeps its intermediate values to itself.
    """
    seen: RecordedActivations = []
    token = _RECORD.set(seen)
    try:
        with jax.disable_jit():
            yield seen
    finally:
        _RECORD.reset(token)


def quantize_activations(x_TX: jax.Array, group_size: int, zero: jax.Array) -> tuple[jax.Array, jax.Array]:
    """int8 activations per group: s = max|x| / 127, q = clip(rint(x / s), ±127), both true divisions.

    Args:
        x_TX: float32.
        group_size: Z; the last group is filled up with zeros.
        zero: int32 0 that the compiler does not know.

    Returns:
        q_TGZ: float32 holding integers in ±127.
        scales_TG: float32; 0 where max|x| < 1e-30, NaN where the group is not finite, so that its row turns NaN and
            the caller can refuse it.
    """
    seen = _RECORD.get()
    if seen is not None:
        seen.append((np.asarray(x_TX), group_size))
    missing = -x_TX.shape[1] % group_size
    x_TGZ = jnp.pad(x_TX, ((0, 0), (0, missing))).reshape(x_TX.shape[0], -1, group_size)
    largest_TG = jnp.max(jnp.abs(x_TGZ), axis=2)
    used_TG = ~(largest_TG < SMALLEST_ACTIVATION)
    scale_TG = divide(largest_TG, jnp.asarray(INT8_MAX, jnp.float32), zero)
    scales_TG = jnp.where(jnp.isfinite(largest_TG), jnp.where(used_TG, scale_TG, 0.0), jnp.nan)
    quotient_TGZ = divide(x_TGZ, jnp.where(used_TG, scales_TG, 1.0)[:, :, None], zero)
    q_TGZ = jnp.clip(jnp.rint(quotient_TGZ), -INT8_MAX, INT8_MAX)
    return jnp.where(used_TG[:, :, None], q_TGZ, 0.0), scales_TG


def activation_codes(x_X: npt.NDArray[np.float32], group_size: int) -> npt.NDArray[np.int8]:
    """int8 [X]: what one row of activations rounds to."""
    q_TGZ, _ = quantize_activations(jnp.asarray(x_X)[None], group_size, jnp.int32(0))
    return np.asarray(q_TGZ, np.int8).reshape(-1)[: x_X.size]


def quantized_product(x_TX: jax.Array, matrix: Quantized) -> jax.Array:
    """The quantised product: per row the float32 sum, one by one in group order from 0, of isum * (scale_w * scale_x).

    Every multiplication and every addition is rounded by itself. isum, the integer product of a group, is at most
    256 * 127 * 128 < 2^24, so a float32 einsum of the integers is exact in any order.

    Subnormals: XLA's CPU backend reads and writes them as 0. The bits are the contract's as long as every scale_w * scale_x is 0
    or at least 2^-102 (2e-31): then terms, and all sums of them, are multiples of 2^-125, and none but 0 is subnormal. Scales of
    ours are at least 1e-8, so that any group of activations that reaches 3e-21 is safe; with scales of 1e-3 and more, any
    that reaches 3e-26. Groups below 1e-30 are 0 by definition. In between the result is off by at most 2^-101 per group. Nothing
    that computes in float32 on that backend can do better, and float64 would cost more than what it mends.

    Returns:
        float32 [T, Y]; NaN rows where the activations were not finite.
    """
    q_TGZ, scales_TG = quantize_activations(x_TX, matrix.q_GYZ.shape[2], matrix.zero)

    def add_group(sum_TY: jax.Array, group: tuple[jax.Array, jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        qx_TZ, sx_T, qw_YZ, sw_Y = group
        isum_TY = jnp.einsum("tz,yz->ty", qx_TZ, qw_YZ.astype(jnp.float32), precision="highest")
        term_TY = isum_TY * (sw_Y[None, :] * sx_T[:, None])
        return sum_TY + separate(term_TY, matrix.zero), None

    start_TY = jnp.broadcast_to(jax.lax.bitcast_convert_type(matrix.zero, jnp.float32), (x_TX.shape[0], matrix.q_GYZ.shape[1]))
    groups = (q_TGZ.transpose(1, 0, 2), scales_TG.T, matrix.q_GYZ, matrix.scales_GY)
    total_TY: jax.Array = jax.lax.scan(add_group, start_TY, groups)[0]
    return total_TY


def zero_of(matrix: Matrix) -> jax.Array | None:
    """The unknown 0 where a matrix is quantised, and so the arithmetic around it has a fixed order; else None."""
    return matrix.zero if isinstance(matrix, Quantized) else None


def look_up_rows(table: StoredArray, rows: npt.NDArray[np.integer]) -> npt.NDArray[np.float32]:
    """float32 [n, X]: chosen rows of a stored [Y, X] table, dequantised."""
    if not isinstance(table, QuantizedMatrix):
        return np.asarray(table[rows], np.float32)
    return QuantizedMatrix(table.q[rows], table.scales[rows], table.group_size, table.bits).dequantize()


def row_blocks(value: StoredArray, rows: int) -> Iterator[StoredArray]:
    """A stored matrix in blocks of so many rows, the last one perhaps shorter. A row's product does not depend on the others."""
    for begin in range(0, stored_shape(value)[0], rows):
        block = slice(begin, begin + rows)
        if isinstance(value, QuantizedMatrix):
            yield dataclasses.replace(value, q=value.q[block], scales=value.scales[block])
        else:
            yield value[block]


def stored_shape(value: StoredArray) -> tuple[int, ...]:
    """Shape of a stored tensor, quantised or not."""
    return value.q.shape if isinstance(value, QuantizedMatrix) else value.shape


def check_stored(value: StoredArray | None, shape: tuple[int, ...], role: str) -> StoredArray:
    """The tensor itself, if it is there and has the shape its role asks for.

    Raises:
        MissingTensorError: it is None.
        ShapeError: another shape.
    """
    if value is None:
        raise MissingTensorError("the configuration asks for this tensor", where=role, expected=list(shape), got="nothing")
    if stored_shape(value) != shape:
        raise ShapeError("tensor shape", where=role, expected=list(shape), got=list(stored_shape(value)))
    return value
