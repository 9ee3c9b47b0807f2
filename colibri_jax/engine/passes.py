"""Timed passes over memory, for benchmarks: raw reads, and products with rows16 matrices as the engine makes them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from colibri_jax import _native
from colibri_jax.quant import ACTIVATION_GROUP_SIZE, ByteArray, WeightFormat

Float32 = npt.NDArray[np.float32]


def available_isas() -> tuple[str, ...]:
    """Instruction sets of this build and processor, slowest first."""
    return tuple(_native.kernels.available_isas())


def read_pass(data: ByteArray, *, threads: int, isa: str = "") -> tuple[float, int]:
    """Read memory once with the widest loads, every thread one stretch of it.

    Returns:
        Seconds, and the exclusive or of all little-endian 64-bit words, by which a caller sees that all was read.
    """
    seconds, word = _native.bench.read_memory(isa, threads, data)
    return float(seconds), int(word)


class ProductPass:
    """`count` matrices of one form and format that lie in a row, and activations of n positions that they are multiplied with.

    Args:
        weights: rows16 bytes of all matrices.
        fmt: int4 or int8, layout rows16.
        activations: float32 [n, cols].
    """

    def __init__(self, weights: ByteArray, fmt: WeightFormat, rows: int, activations: Float32) -> None:
        self._weights, self._fmt, self._rows = weights, fmt, rows
        self._n, self._cols = activations.shape
        self._group = fmt.group_size or ACTIVATION_GROUP_SIZE
        self._count = weights.size // fmt.weight_bytes(rows, self._cols)
        groups = -(-self._cols // self._group)
        self._q = np.zeros((self._n, groups * self._group), np.int8)
        self._scales, self._sums = np.zeros((self._n, groups), np.float32), np.zeros((self._n, groups), np.int32)
        for row in range(self._n):
            _native.kernels.quantize("", activations[row], self._cols, self._group, self._q[row], self._scales[row], self._sums[row])

    @property
    def weight_bytes(self) -> int:
        """Bytes that one pass reads."""
        return self._weights.size

    def run(self, *, threads: int, isa: str = "") -> tuple[float, Float32]:
        """Multiply all matrices once.

        Returns:
            Seconds, and float32 [n, rows] of the last matrix.
        """
        y_TR = np.zeros((self._n, self._rows), np.float32)
        form = (self._fmt.bits, self._fmt.scale_dtype.itemsize, self._rows, self._cols, self._group, self._count)
        seconds = _native.bench.products(isa, threads, *form, self._weights, self._q, self._scales, self._sums, y_TR)
        return float(seconds), y_TR
