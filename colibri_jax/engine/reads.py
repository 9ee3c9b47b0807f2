"""Timed reads of blocks of files, for benchmarks: what a disk delivers without an engine that waits for it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from colibri_jax import _native


@dataclasses.dataclass(frozen=True)
class BlockReads:
    """One timed run of reads.

    Attributes:
        seconds: from the first submission to the last completion.
        nbytes: of completed reads.
        reader: what read them.
        checksums: of each block, the sum of (2 i + 1) times its 64-bit word i modulo 2^64; empty where not asked for.
    """

    seconds: float
    nbytes: int
    reader: str
    checksums: tuple[int, ...]

    @property
    def rate(self) -> float:
        """Bytes per second."""
        return self.nbytes / self.seconds


def read_blocks(
    path: Path, offsets: Sequence[int], length: int, *, direct: bool = True, reader: str = "auto", depth: int = 2, checksums: bool = False
) -> BlockReads:
    """Read blocks of `length` bytes at `offsets`, in order, `depth` at a time.

    Raises:
        ReadError, OptionError: the file, the reader or the alignment does not allow it.
    """
    found: dict[str, Any] = _native.read_blocks(
        str(path), list(offsets), length, direct=direct, reader=reader, depth=depth, checksums=checksums
    )
    return BlockReads(found["seconds"], found["bytes"], found["reader"], tuple(found["checksums"]))


def uring_refusal() -> str:
    """Why the kernel refuses io_uring; empty where it does not."""
    return str(_native.uring_refusal())


def checksum(data: bytes) -> int:
    """What `read_blocks` says of a block with these bytes, by NumPy."""
    words = np.frombuffer(data, "<u8")
    # Unsigned arithmetic wraps around, as the definition wants.
    return int((words * (2 * np.arange(words.size, dtype=np.uint64) + np.uint64(1))).sum(dtype=np.uint64))
