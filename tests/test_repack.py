"""Repacking row-major matrices into rows16: bit-identical to quant.py, for every format and awkward shape."""

from __future__ import annotations

import numpy as np
import pytest
from expert_files import random_matrix
from hypothesis import given, settings
from hypothesis import strategies as st

from colibri_jax import _native, quant
from colibri_jax.errors import ShapeError, UnknownFormatError
from colibri_jax.quant import GROUP_SIZES, QuantizedMatrix, WeightFormat

FORMATS = [WeightFormat(8), WeightFormat(4), *(WeightFormat(4, group) for group in GROUP_SIZES)]


def repack(matrix: QuantizedMatrix, weights: np.ndarray | None = None) -> bytes:
    packed, scales = quant.pack(matrix, "row_major")
    assert scales is not None
    return _native.repack_rows16(
        packed if weights is None else weights,
        scales,
        rows=matrix.q.shape[0],
        cols=matrix.q.shape[1],
        bits=matrix.bits,
        group_size=matrix.group_size,
    )


def oracle(matrix: QuantizedMatrix) -> bytes:
    return quant.pack(quant.interleavable(matrix), "rows16")[0].tobytes()


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.tag)
@settings(deadline=None, max_examples=60, derandomize=True)
@given(rows=st.integers(1, 50), cols=st.integers(1, 300), seed=st.integers(0, 2**32 - 1))
def test_repacked_bytes_are_those_of_quant_pack(fmt: WeightFormat, rows: int, cols: int, seed: int) -> None:
    matrix = random_matrix(np.random.default_rng(seed), rows, cols, fmt)
    assert repack(matrix) == oracle(matrix)


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.tag)
@pytest.mark.parametrize(("rows", "cols"), [(1, 1), (15, 63), (16, 64), (17, 65), (33, 257), (16, 512)])
def test_repacked_bytes_at_the_edges_of_blocks_and_groups(fmt: WeightFormat, rows: int, cols: int) -> None:
    matrix = random_matrix(np.random.default_rng(rows * 1000 + cols), rows, cols, fmt)
    assert repack(matrix) == oracle(matrix)


@pytest.mark.parametrize("nibble", [0, 8, 15])
def test_the_spare_nibble_of_an_odd_row_means_nothing(nibble: int) -> None:
    matrix = random_matrix(np.random.default_rng(nibble), 18, 71, WeightFormat(4, 64))
    weights = quant.pack(matrix, "row_major")[0].reshape(18, 36).copy()
    weights[:, -1] = (weights[:, -1] & 15) | (nibble << 4)
    assert repack(matrix, weights.reshape(-1)) == oracle(matrix)


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.tag)
def test_one_changed_weight_changes_the_bytes(fmt: WeightFormat) -> None:
    """The comparison sees a single element, wherever it lies."""
    matrix = random_matrix(np.random.default_rng(5), 18, 70, fmt)
    for row, col in ((0, 0), (17, 69), (15, 64), (16, 63)):
        q = matrix.q.copy()
        q[row, col] = ~q[row, col]
        assert repack(QuantizedMatrix(q, matrix.scales, matrix.group_size, matrix.bits)) != oracle(matrix)


def test_tensors_of_another_size_are_refused() -> None:
    with pytest.raises(ShapeError, match="weights"):
        _native.repack_rows16(np.zeros(31, np.uint8), np.zeros(1, np.float32), rows=1, cols=64, bits=4, group_size=64)
    with pytest.raises(ShapeError, match="scales"):
        _native.repack_rows16(np.zeros(32, np.uint8), np.zeros(2, np.float32), rows=1, cols=64, bits=4, group_size=64)


@pytest.mark.parametrize(("bits", "group_size"), [(3, 0), (4, 20), (8, 64)])
def test_unknown_formats_are_refused(bits: int, group_size: int) -> None:
    with pytest.raises(UnknownFormatError):
        _native.repack_rows16(np.zeros(64, np.uint8), np.zeros(1, np.float32), rows=1, cols=64, bits=bits, group_size=group_size)
