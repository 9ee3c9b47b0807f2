"""Benchmarks: each checks its result first, then reports its share of a limit that it measured in the same run."""

from __future__ import annotations

from colibri_jax.bench.kernels import bench_kernels
from colibri_jax.bench.report import BenchError, Measured, Row, Table

__all__ = ["BenchError", "Measured", "Row", "Table", "bench_kernels"]
