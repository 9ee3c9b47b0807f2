"""The quantised product in NumPy, one rounding at a time; its planted faults are what a checker must notice."""

from __future__ import annotations

from typing import Literal

import numpy as np

from colibri_jax.quant import QuantizedMatrix

Fault = Literal["", "fused", "reciprocal", "dropped_group", "swapped_nibbles", "reversed_groups", "scales_apart"]


def quantized_product(x_TX: np.ndarray, matrix: QuantizedMatrix, fault: Fault = "") -> np.ndarray:
    """float32 [T, Y], as the arithmetic contract says, or with one fault."""
    q_YX = matrix.q.astype(np.int64)
    if fault == "swapped_nibbles":
        pairs = q_YX[:, : q_YX.shape[1] // 2 * 2]
        q_YX[:, : pairs.shape[1]] = pairs.reshape(len(q_YX), -1, 2)[:, :, ::-1].reshape(len(q_YX), -1)
    size = matrix.group_size or 64
    starts = list(range(0, q_YX.shape[1], size))
    if fault == "dropped_group":
        starts = starts[:-1]
    if fault == "reversed_groups":
        starts = starts[::-1]
    out_TY = np.zeros((len(x_TX), len(q_YX)), np.float32)
    for row, x_X in enumerate(x_TX):
        for start in starts:
            qx, sx = quantize_group(x_X[start : start + size], fault)
            isum_Y = q_YX[:, start : start + size] @ qx
            sw_Y = matrix.scales[:, start // size if matrix.group_size else 0]
            out_TY[row] = _add(out_TY[row], isum_Y, sw_Y, sx, fault)
    return out_TY


def quantize_group(x_Z: np.ndarray, fault: Fault = "") -> tuple[np.ndarray, np.float32]:
    """int64 values in ±127 and the float32 scale of one group."""
    largest = np.float32(np.abs(x_Z).max())
    if largest < np.float32(1e-30):
        return np.zeros(len(x_Z), np.int64), np.float32(0.0)
    scale = largest * (np.float32(1.0) / np.float32(127.0)) if fault == "reciprocal" else np.float32(largest / np.float32(127.0))
    quotients = np.divide(x_Z.astype(np.float32), scale, dtype=np.float32)
    return np.clip(np.rint(quotients), -127, 127).astype(np.int64), scale


def _add(sum_Y: np.ndarray, isum_Y: np.ndarray, sw_Y: np.ndarray, sx: np.float32, fault: Fault) -> np.ndarray:
    isum_Y = isum_Y.astype(np.float32)
    if fault == "scales_apart":
        return np.add(sum_Y, np.multiply(np.multiply(isum_Y, sw_Y), sx))
    scale_Y = np.multiply(sw_Y, sx)
    if fault == "fused":
        # The product of two float32 is exact in float64; its sum with a third is rounded there, which only rarely shows in float32.
        return (sum_Y.astype(np.float64) + isum_Y.astype(np.float64) * scale_Y.astype(np.float64)).astype(np.float32)
    return np.add(sum_Y, np.multiply(isum_Y, scale_Y))
