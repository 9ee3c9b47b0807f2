"""The readers of the expert store as parameters of tests; io_uring is skipped, with the reason, where the kernel refuses it."""

from __future__ import annotations

import pytest

from colibri_jax import _native

REFUSAL = _native.uring_refusal()
USABLE = ["pread"] if REFUSAL else ["pread", "uring"]
READERS = [
    "pread",
    pytest.param("uring", marks=pytest.mark.skipif(bool(REFUSAL), reason=f"io_uring: {REFUSAL}")),
]
NAMES = {"pread": "pread pool", "uring": "io_uring"}
