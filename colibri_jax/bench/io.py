"""Reading experts from disk: readers and numbers of reads in flight, without computing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from colibri_jax.bench.model import ExpertBlocks
from colibri_jax.bench.report import GB, Measured, Progress, Row, Table, ratios
from colibri_jax.container.reader import Container
from colibri_jax.engine.reads import uring_refusal

CHECKED_EXPERTS = 4


def bench_io(
    path: Path,
    *,
    depths: Sequence[int] = (1, 2, 4, 8),
    readers: Sequence[str] = ("pread", "uring"),
    experts: int = 24,
    repeats: int = 5,
    progress: Progress = lambda what: None,
) -> Table:
    """Random experts of a container past the page cache, every combination in turn within a round.

    Args:
        depths: reads in flight.
        readers: "uring" is left out, with its reason among the conditions, where the system refuses it.
        experts: per measurement.

    Raises:
        BenchError: a reader delivered other bytes than the file holds.
    """
    blocks = ExpertBlocks(Container.open(path), seed=1)
    refusal = uring_refusal()
    usable = [reader for reader in readers if reader != "uring" or not refusal]
    for reader in usable:
        blocks.check(CHECKED_EXPERTS, reader=reader)
    combinations = [(reader, depth) for reader in usable for depth in depths]
    rates: dict[tuple[str, int], list[float]] = {combination: [] for combination in combinations}
    for repeat in range(repeats):
        for reader, depth in combinations:
            progress(f"{reader}, {depth} in flight, {repeat + 1} of {repeats}")
            rates[reader, depth].append(blocks.read(experts, depth=depth, reader=reader))
    best = [max(rates[combination][repeat] for combination in combinations) for repeat in range(repeats)]
    rows = tuple(
        Row(
            reader,
            {
                "in flight": depth,
                "rate": Measured(tuple(rate / GB for rate in rates[reader, depth]), "GB/s"),
                "share of the best of its round": ratios(rates[reader, depth], best),
            },
        )
        for reader, depth in combinations
    )
    conditions = {"block bytes": blocks.length, "blocks a measurement": experts, "repeats": repeats, "cache state": "O_DIRECT"}
    return Table("random experts from disk", conditions | ({"io_uring": refusal} if refusal else {}), rows)
