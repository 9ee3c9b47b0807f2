"""Benchmarks: each checks its result first, then reports its share of a limit that it measured in the same run."""

from __future__ import annotations

from colibri_jax.bench.decode import bench_cold_decode, bench_warm_decode
from colibri_jax.bench.io import bench_io
from colibri_jax.bench.kernels import bench_kernels
from colibri_jax.bench.prefill import bench_prefill, bench_sweep, sweep_panels
from colibri_jax.bench.report import BenchError, Measured, Row, Table

__all__ = [
    "BenchError",
    "Measured",
    "Row",
    "Table",
    "bench_cold_decode",
    "bench_io",
    "bench_kernels",
    "bench_prefill",
    "bench_sweep",
    "bench_warm_decode",
    "sweep_panels",
]
