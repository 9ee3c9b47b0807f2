"""`colibri-jax bench`: how near the engine comes to what memory and disk can do."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.table import Table as RichTable

from colibri_jax.cli.budget_profile import ContainerProfiles
from colibri_jax.cli.budgets import ProfileShare, parse_one_of_several
from colibri_jax.cli.options import READER_CHOICE

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

BUDGET_METAVAR = "N|off|N:N:…|profile:SHARE"

threads_option = click.option(
    "--threads", type=click.IntRange(min=1), default=lambda: len(os.sched_getaffinity(0)), show_default="processors", help="That compute."
)
repeats_option = click.option("--repeats", type=click.IntRange(min=1), default=7, show_default=True, help="Measurements of each figure.")
container_argument = click.argument("model_dir", type=click.Path(exists=True, file_okay=False, path_type=Path))
json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")


@click.group(epilog=EPILOG)
def bench() -> None:
    """Measure the engine against the limits of this machine."""


@bench.command()
@threads_option
@click.option("--isa", "isas", multiple=True, help="Instruction set; repeatable. Default: all of this processor but the scalar one.")
@click.option("--positions", type=click.IntRange(min=1), multiple=True, default=(1, 8, 64), show_default=True, help="Repeatable.")
@click.option("--memory-gib", type=click.FloatRange(min=0.001), default=1.5, show_default=True, help="Weights that a pass streams.")
@repeats_option
@json_option
def kernels(threads: int, isas: tuple[str, ...], positions: tuple[int, ...], memory_gib: float, repeats: int, as_json: bool) -> None:
    """Quantised products with weights from memory, as a share of the raw read rate."""
    from colibri_jax.bench import bench_kernels

    with _status() as update:
        table = bench_kernels(
            threads=threads,
            isas=isas or None,
            positions=positions,
            memory_bytes=int(memory_gib * BYTES_PER_GIB),
            repeats=repeats,
            progress=update,
        )
    show(table, as_json)


@bench.command()
@container_argument
@click.option("--depth", "depths", type=click.IntRange(min=1), multiple=True, default=(1, 2, 4, 8), show_default=True, help="Repeatable.")
@click.option("--experts", type=click.IntRange(min=1), default=24, show_default=True, help="Read in one measurement.")
@repeats_option
@json_option
def io(model_dir: Path, depths: tuple[int, ...], experts: int, repeats: int, as_json: bool) -> None:
    """Random experts of a container from disk, by reader and reads in flight."""
    from colibri_jax.bench import bench_io

    with _status() as update:
        table = bench_io(model_dir, depths=depths, experts=experts, repeats=repeats, progress=update)
    show(table, as_json)


@bench.command()
@container_argument
@click.option("--cache", type=click.Choice(["cold", "warm"]), default="cold", show_default=True, help="Two experts a layer, or all.")
@click.option("--tokens", type=click.IntRange(min=1), default=6, show_default=True, help="Decoded in one measurement.")
@click.option(
    "--budget",
    type=parse_one_of_several,
    metavar=BUDGET_METAVAR,
    default="off",
    show_default=True,
    help="Cold: the same tokens under this budget as well.",
)
@click.option("--reader", type=READER_CHOICE, default="auto", show_default=True)
@click.option("--depth", type=click.IntRange(min=1), default=2, show_default=True, help="Cold: reads in flight.")
@click.option("--pipe/--no-pipe", default=True, show_default=True, help="Reads run ahead of the products.")
@click.option("--pilot/--no-pilot", default=False, show_default=True, help="The next layer's likely experts are read as well.")
@threads_option
@repeats_option
@json_option
def decode(
    *,
    model_dir: Path,
    cache: str,
    tokens: int,
    budget: int | tuple[int, ...] | ProfileShare,
    reader: str,
    depth: int,
    pipe: bool,
    pilot: bool,
    threads: int,
    repeats: int,
    as_json: bool,
) -> None:
    """Tokens one by one: cold, as a share of the disk's rate; warm, of the memory's."""
    from colibri_jax.bench import bench_cold_decode, bench_warm_decode

    cut = _decode_budget(model_dir, budget)
    with _status() as update:
        common: dict[str, Any] = {"threads": threads, "tokens": tokens, "repeats": repeats, "progress": update, "reader": reader}
        if cache == "warm":
            table = bench_warm_decode(model_dir, **common)
        else:
            table = bench_cold_decode(model_dir, **common, depth=depth, budget=cut, pipe=pipe, pilot=pilot)
    show(table, as_json)


@bench.command()
@container_argument
@click.option("--positions", type=click.IntRange(min=1), multiple=True, default=(14, 512), show_default=True, help="Repeatable.")
@threads_option
@repeats_option
@json_option
def prefill(model_dir: Path, positions: tuple[int, ...], threads: int, repeats: int, as_json: bool) -> None:
    """Prompts in one step: every expert of the union is read once."""
    from colibri_jax.bench import bench_prefill

    with _status() as update:
        table = bench_prefill(model_dir, threads=threads, positions=positions, repeats=repeats, progress=update)
    show(table, as_json)


@bench.command()
@container_argument
@click.option(
    "--budget",
    "budgets",
    type=parse_one_of_several,
    metavar=BUDGET_METAVAR,
    multiple=True,
    default=("off", "12", "6", "4"),
    show_default=True,
    help="Repeatable.",
)
@click.option("--tokens", type=click.IntRange(min=1), default=32, show_default=True, help="Decoded under each budget.")
@click.option("--prompt-tokens", type=click.IntRange(min=1), default=14, show_default=True)
@click.option("--cache-experts", type=click.IntRange(min=1), default=2, show_default=True, help="Per layer.")
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), help="Draw it too: a file that ends in .svg, .png or .pdf.")
@threads_option
@json_option
def sweep(
    *,
    model_dir: Path,
    budgets: tuple[int | tuple[int, ...] | ProfileShare, ...],
    tokens: int,
    prompt_tokens: int,
    cache_experts: int,
    plot: Path | None,
    threads: int,
    as_json: bool,
) -> None:
    """The same run under several budgets, in decoding only and in all scopes: seconds, bytes, what was dropped."""
    from colibri_jax.bench import bench_sweep, sweep_panels
    from colibri_jax.plots import check_plot, draw

    if plot is not None:
        check_plot(plot)
    chosen = [_decode_budget(model_dir, budget) for budget in budgets]
    with _status() as update:
        table = bench_sweep(
            model_dir,
            threads=threads,
            budgets=chosen,
            tokens=tokens,
            prompt=prompt_tokens,
            cache_experts=cache_experts,
            progress=update,
        )
    show(table, as_json)
    if plot is not None:
        draw(plot, table.title, sweep_panels(table))


def _decode_budget(model_dir: Path, budget: int | tuple[int, ...] | ProfileShare) -> int | tuple[int, ...]:
    """A budget for decode steps; what a list costs in time does not depend on the rule of its profile, so the newest one serves."""
    from colibri_jax.quality.steps import StepShape

    return ContainerProfiles(model_dir).budgets(budget, StepShape(kind="decode"), None) if isinstance(budget, ProfileShare) else budget


@contextlib.contextmanager
def _status() -> Iterator[Callable[[str], None]]:
    """What is running, on stderr."""
    with Console(stderr=True).status("") as status:
        yield status.update


def show(table: Table, as_json: bool) -> None:
    """Print a benchmark's table, for people or for programs."""
    if as_json:
        click.echo(json.dumps(table.to_json()))
        return
    console = Console()
    shown = RichTable("", *table.figure_names, title=table.title)
    for row in table.rows:
        shown.add_row(row.what, *(row.cell(name) for name in table.figure_names))
    console.print(shown)
    console.print(", ".join(f"{name} {value}" for name, value in table.conditions.items()))
