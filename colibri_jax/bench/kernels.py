"""The quantised products against the rate at which memory can be read, and against each other."""

from __future__ import annotations

import dataclasses

import numpy as np

from colibri_jax.bench.report import GB, BenchError, Measured, Progress, Row, Table, ratios
from colibri_jax.engine.passes import ProductPass, available_isas, read_pass
from colibri_jax.quant import ROW_BLOCK, ByteArray, WeightFormat

# More than any cache, so that every pass comes from memory.
DEFAULT_BYTES = 3 << 29


@dataclasses.dataclass(frozen=True)
class Form:
    """A matrix to multiply with, of the sizes that GLM-5.2 has."""

    name: str
    format: WeightFormat
    rows: int
    cols: int


FORMS = (
    Form("int4, expert gate/up", WeightFormat(4, 64, "rows16"), 2048, 6144),
    Form("int4, expert down", WeightFormat(4, 64, "rows16"), 6144, 2048),
    Form("int4 f16, gate/up", WeightFormat(4, 64, "rows16", "f16"), 2048, 6144),
    Form("int8, head", WeightFormat(8, 0, "rows16"), 8192, 6144),
)


def bench_kernels(
    *,
    threads: int,
    isas: tuple[str, ...] | None = None,
    positions: tuple[int, ...] = (1, 8, 64),
    memory_bytes: int = DEFAULT_BYTES,
    repeats: int = 7,
    progress: Progress = lambda what: None,
) -> Table:
    """Stream matrices from memory through the products, in turn with plain reads of the same bytes.

    Args:
        threads: of both.
        isas: instruction sets to measure; by default all but the scalar one.
        positions: columns of activations.
        memory_bytes: of weights per pass, rounded down to whole matrices.
        repeats: measurements of each.

    Raises:
        BenchError: a product is not that of the scalar kernel, or a read missed a byte.
    """
    isas = isas or tuple(isa for isa in available_isas() if isa != "scalar")
    rows = []
    for form in FORMS:
        weights = _weights(form, memory_bytes)
        check_read(weights, threads)
        for n in positions:
            product = ProductPass(weights, form.format, form.rows, _activations(n, form.cols))
            _check_product(form, weights, n, isas)
            for isa in isas:
                progress(f"{form.name}, {n} positions, {isa}")
                raw, spent = [], []
                for _ in range(repeats):
                    raw.append(weights.size / read_pass(weights, threads=threads)[0])
                    spent.append(product.run(threads=threads, isa=isa)[0])
                rates = [weights.size / seconds for seconds in spent]
                operations = [
                    2 * n * weights.size / form.format.weight_bytes(form.rows, form.cols) * form.rows * form.cols / s for s in spent
                ]
                rows.append(
                    Row(
                        f"{form.name}, {form.rows} x {form.cols}",
                        {
                            "positions": n,
                            "isa": isa,
                            "weights": Measured(tuple(rate / GB for rate in rates), "GB/s"),
                            "raw read": Measured(tuple(rate / GB for rate in raw), "GB/s"),
                            "share of raw": ratios(rates, raw),
                            "arithmetic": Measured(tuple(rate / GB for rate in operations), "Gop/s"),
                        },
                    )
                )
    conditions = {"threads": threads, "bytes per pass": memory_bytes, "repeats": repeats, "cache state": "weights from memory"}
    return Table("quantised products, as a share of the raw memory read rate", conditions, tuple(rows))


def _weights(form: Form, memory_bytes: int) -> ByteArray:
    """Random bytes with scales of 1, as many whole matrices as fit."""
    one = form.format.weight_bytes(form.rows, form.cols)
    count = max(memory_bytes // one, 1)
    rng = np.random.default_rng(0)
    matrix = rng.integers(0, 256, one, dtype=np.uint8)
    record, scales_at = form.format.rows16_record(form.cols)
    matrix.reshape(-1, record)[:, scales_at] = np.ones(ROW_BLOCK, form.format.scale_dtype).view(np.uint8)
    weights = np.empty((count, one), np.uint8)
    weights[:] = matrix
    return weights.reshape(-1)


def _activations(n: int, cols: int) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
    return np.random.default_rng(1).standard_normal((n, cols)).astype(np.float32)


def random_memory(nbytes: int) -> ByteArray:
    """Bytes that lie in memory of their own, none of them shared with a page of zeros."""
    return np.resize(np.random.default_rng(0).integers(0, 256, 1 << 20, dtype=np.uint8), nbytes // 64 * 64)


def check_read(weights: ByteArray, threads: int) -> None:
    """See that a pass reads every byte.

    Raises:
        BenchError: it does not.
    """
    expected = int(np.bitwise_xor.reduce(weights.view("<u8")))
    got = read_pass(weights, threads=threads)[1]
    if got != expected:
        raise BenchError("a pass over memory missed some of it", where="read_pass", expected=expected, got=got)


def _check_product(form: Form, weights: ByteArray, n: int, isas: tuple[str, ...]) -> None:
    """Every instruction set on one matrix, bit for bit against the scalar kernel."""
    one = ProductPass(weights[: form.format.weight_bytes(form.rows, form.cols)], form.format, form.rows, _activations(n, form.cols))
    expected = one.run(threads=1, isa="scalar")[1]
    for isa in isas:
        if one.run(threads=1, isa=isa)[1].tobytes() != expected.tobytes():
            raise BenchError("a product differs from the scalar kernel's", where=f"{form.name}, {isa}", expected="equal bits", got="others")
