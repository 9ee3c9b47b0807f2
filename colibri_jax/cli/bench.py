"""`colibri-jax bench`: how near the engine comes to what memory and disk can do."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.table import Table as RichTable

if TYPE_CHECKING:
    from colibri_jax.bench import Table

BYTES_PER_GIB = 1 << 30

EPILOG = """\b
What the figures mean
  Every benchmark checks its result before it takes a time. A share stands against
  a limit that is measured in the same run, in turn with the thing itself, because
  machines are shared and rates drift: trust shares, not absolute rates. A figure
  is a median, with the smallest and the largest in brackets.
"""


@click.group(epilog=EPILOG)
def bench() -> None:
    """Measure the engine against the limits of this machine."""


@bench.command()
@click.option("--threads", type=click.IntRange(min=1), default=lambda: len(os.sched_getaffinity(0)), show_default="processors")
@click.option("--isa", "isas", multiple=True, help="Instruction set; repeatable. Default: all of this processor but the scalar one.")
@click.option("--positions", type=click.IntRange(min=1), multiple=True, default=(1, 8, 64), show_default=True, help="Repeatable.")
@click.option("--memory-gib", type=click.FloatRange(min=0.001), default=1.5, show_default=True, help="Weights that a pass streams.")
@click.option("--repeats", type=click.IntRange(min=1), default=7, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def kernels(threads: int, isas: tuple[str, ...], positions: tuple[int, ...], memory_gib: float, repeats: int, as_json: bool) -> None:
    """Quantised products with weights from memory, as a share of the raw read rate."""
    from colibri_jax.bench import bench_kernels

    console = Console(stderr=True)
    with console.status("kernels") as status:
        table = bench_kernels(
            threads=threads,
            isas=isas or None,
            positions=positions,
            memory_bytes=int(memory_gib * BYTES_PER_GIB),
            repeats=repeats,
            progress=status.update,
        )
    show(table, as_json)


def show(table: Table, as_json: bool) -> None:
    """Print a benchmark's table, for people or for programs."""
    if as_json:
        click.echo(json.dumps(table.to_json()))
        return
    console = Console()
    names = list(dict.fromkeys(name for row in table.rows for name in row.figures))
    shown = RichTable("", *names, title=table.title)
    for row in table.rows:
        shown.add_row(row.what, *(_cell(row.figures.get(name, "")) for name in names))
    console.print(shown)
    console.print(", ".join(f"{name} {value}" for name, value in table.conditions.items()))


def _cell(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
