"""The head: from normed hidden states to the vocabulary's logits."""

from __future__ import annotations

import jax
import numpy as np

from colibri_jax.reference.layer import Float32, bucket
from colibri_jax.reference.quantized import Matrix, Precision, StoredArray, prepare, product, row_blocks, to_device

# The head goes to the device in blocks of rows: in float32 a large vocabulary's takes gigabytes, and as much again on the way.
_HEAD_ROWS = 1 << 14


def load_head(stored: StoredArray, precision: Precision) -> tuple[Matrix, ...]:
    """The head's matrix [W, D] on the device, in blocks of rows."""
    blocks = row_blocks(stored, _HEAD_ROWS)
    return tuple(to_device(prepare(rows, storage="int8", precision=precision, role="head")) for rows in blocks)


def score_rows(normed_TD: Float32, head: tuple[Matrix, ...]) -> Float32:
    """float32 [T, W]: logits of normed rows [T, D]."""
    return np.concatenate([per_row(_score, normed_TD, rows) for rows in head], axis=1)


def per_row(function: jax.stages.Wrapped, rows_TD: Float32, *args: object, **static: object) -> Float32:
    """Call a compiled function on rows filled up to a power of two."""
    n_rows = rows_TD.shape[0]
    padded = np.pad(rows_TD, ((0, bucket(n_rows) - n_rows), (0, 0)))
    return np.asarray(function(padded, *args, **static))[:n_rows]


@jax.jit
def _score(normed_TD: jax.Array, head: Matrix) -> jax.Array:
    return product(normed_TD, head)
