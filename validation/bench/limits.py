"""How near the engine comes to what memory and disk can do, on models of GLM-5.2's layer sizes.

    python validation/bench/make_model.py DIR/one --glm-layers 1
    python validation/bench/make_model.py DIR/four --glm-layers 4
    python validation/bench/limits.py DIR/one DIR/four --record

Every figure is a ratio whose two sides were measured in turn in one run. The machine should have nothing else to do.
"""

from __future__ import annotations

import dataclasses
import json
import operator
import os
import platform
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from colibri_jax.bench import (
    Measured,
    Row,
    Table,
    bench_cold_decode,
    bench_io,
    bench_kernels,
    bench_prefill,
    bench_sweep,
    bench_warm_decode,
    sweep_panels,
)
from colibri_jax.bench.decode import PROMPT
from colibri_jax.bench.model import dense_bytes_touched
from colibri_jax.bench.report import GB
from colibri_jax.container.reader import Container
from colibri_jax.engine.passes import available_isas
from colibri_jax.plots import draw
from colibri_jax.tensors import expert_roles

RECORD = Path(__file__).parents[1] / "records" / "limits.md"
PICTURE = RECORD.with_name("sweep.svg")
SWEPT_TOKENS = 16
COMPARE: dict[str, Callable[[float, float], bool]] = {">=": operator.ge, "<=": operator.le}
SHOWN = {">=": "at least", "<=": "at most"}


@dataclasses.dataclass(frozen=True)
class Goal:
    """One line of the record: what is held against what."""

    what: str
    figure: Measured
    relation: str
    bound: float

    @property
    def reached(self) -> bool:
        """Whether the median is on the right side."""
        return COMPARE[self.relation](self.figure.median, self.bound)


def _figure(row: Row, name: str) -> Measured:
    figure = row.figures[name]
    assert isinstance(figure, Measured)
    return figure


def measure(one: Path, four: Path, *, repeats: int, say: Callable[[str], None]) -> Iterator[tuple[Table, list[Goal]]]:
    """Every table, with the goals that are read off it."""
    threads = len(os.sched_getaffinity(0))
    common: dict[str, Any] = {"threads": threads, "repeats": repeats, "progress": say}
    best = available_isas()[-1]

    table = bench_kernels(**common, isas=(best,), positions=(1,))
    yield (
        table,
        [Goal(f"{row.what}, {best}: share of the raw read of memory", _figure(row, "share of raw"), ">=", 0.93) for row in table.rows],
    )

    table = bench_warm_decode(one, **common)
    yield table, [Goal("warm decoding, 1 + 1 layers: share of the raw read of memory", _figure(table.rows[0], "share of raw"), ">=", 0.80)]

    yield bench_io(four, repeats=repeats, progress=say), []

    table = bench_cold_decode(four, **common, budget=4)
    row = table.rows[0]
    yield (
        table,
        [
            Goal("cold decoding, 1 + 4 layers, nothing ahead: share of the raw read of the disk", _figure(row, "share of raw"), ">=", 0.92),
            Goal("the same: wall / max(disk alone, computing alone)", _figure(row, "wall / max(disk, computing)"), "<=", 1.08),
            Goal("the same under budget 4: times as fast as without", _figure(row, "budget 4: times as fast"), ">=", 1.85),
            Goal("the same: share of the bytes read", _figure(row, "budget 4: share of bytes read"), "<=", 0.52),
            Goal("the same: share of the bytes read", _figure(row, "budget 4: share of bytes read"), ">=", 0.48),
        ],
    )
    yield bench_cold_decode(four, **common, pilot=True), []

    for pilot in (False, True):
        table = bench_cold_decode(one, **common, pilot=pilot)
        row = table.rows[0]
        wall = Measured(tuple(1 / share for share in _figure(row, "share of raw").values))
        yield table, [Goal(f"cold decoding, 1 + 1 layers, {'look' if pilot else 'nothing'} ahead: wall / disk", wall, "<=", 1.20)]

    yield bench_prefill(one, **common | {"repeats": min(repeats, 5)}), []
    yield bench_sweep(four, threads=threads, tokens=SWEPT_TOKENS, progress=say), []


def between_reads(four: Path) -> int:
    """Bytes of weights that a token touches while no read can be under way: a layer's last expert, and all dense weights but those of
    shared experts, which are computed while the first expert is read."""
    container = Container.open(four)
    expert = sum(container.entry(role).total_bytes for role in expert_roles(container.config.moe_layers[0], 0))
    shared = sum(entry.total_bytes for role, entry in container.entries.items() if ".shared." in role and not role.startswith("mtp."))
    return dense_bytes_touched(container, PROMPT) - shared + len(container.config.moe_layers) * expert


def _floor(tables: list[Table], between_bytes: int) -> Iterator[str]:
    """What stands between cold decoding and the disk's rate, from figures of this run."""
    memory = next(_figure(t.rows[0], "raw read").median for t in tables if t.title.startswith("warm"))
    cold = next(t for t in tables if t.title.startswith("cold"))
    row, layers, expert_bytes = cold.rows[0], cold.conditions["MoE layers"], cold.conditions["expert bytes"]
    disk = _figure(row, "misses").median / cold.conditions["tokens a measurement"] * expert_bytes / GB / _figure(row, "raw O_DIRECT").median
    least = between_bytes / GB / memory
    text = f"""A token of the {layers} MoE layers reads for {disk * 1e3:.0f} ms at the raw rate. Without look ahead nothing can be read
    while attention, the routers, the dense layer, the head and the last expert of each layer are computed: which experts come next is not
    known before. Those touch {between_bytes / 1e6:.0f} MB of weights, which takes {least * 1e3:.0f} ms at the raw rate of memory in this
    run. So the share of the raw read of the disk can be {disk / (disk + least):.3f} at most here, and wall / disk
    {1 + least / disk:.3f} at least; and half the experts make it {(disk + least) / (disk / 2 + least):.2f} times as fast at most.
    A slower disk or a faster memory would move all three. The processor also comes out of its wait for the disk slower than it went in:
    with a spinning process of idle priority on each processor, attention of a token took 20 ms instead of 26 ms. With look ahead the
    same work is done beside the reads of the next layer: see the second table of cold decoding."""
    yield "## What stands between cold decoding and the disk"
    yield ""
    yield from textwrap.wrap(" ".join(text.split()), 120)
    yield ""
    yield "AMX is built and tested in emulation only; no processor that has it was at hand, so its ratio to VNNI is not measured."


def _lines(tables: list[Table], goals: list[Goal], between_bytes: int) -> Iterator[str]:
    yield "# At the limits of memory and disk"
    yield ""
    yield "Written by `python validation/bench/limits.py ONE FOUR --record` on models of GLM-5.2's layer sizes, random weights (one dense"
    yield "layer and 1 or 4 MoE layers of 256 experts). Ratios of things measured in turn; median (smallest – largest)."
    yield ""
    yield f"Machine: {_processor()}, {len(os.sched_getaffinity(0))} processors, Python {platform.python_version()}."
    yield ""
    yield "| what | goal | measured | reached |"
    yield "| --- | --- | --- | --- |"
    for goal in goals:
        yield f"| {goal.what} | {SHOWN[goal.relation]} {goal.bound:g} | {goal.figure} | {'yes' if goal.reached else 'no'} |"
    yield ""
    yield from _floor(tables, between_bytes)
    for table in tables:
        yield ""
        yield f"## {table.title}"
        yield ""
        yield ", ".join(f"{name}: {value}" for name, value in table.conditions.items())
        yield ""
        yield f"| what | {' | '.join(row.what for row in table.rows)} |"
        yield f"| --- |{' --- |' * len(table.rows)}"
        for name in table.figure_names:
            yield f"| {name} | {' | '.join(row.cell(name) for row in table.rows)} |"
    yield ""
    yield f"![the sweep]({PICTURE.name})"


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


@click.command()
@click.argument("one", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("four", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--repeats", type=click.IntRange(min=1), default=7, show_default=True)
@click.option("--record", is_flag=True, help=f"Write validation/records/{RECORD.name}.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def main(one: Path, four: Path, repeats: int, record: bool, as_json: bool) -> None:
    """Measure every ratio on ONE (1 + 1 layers) and FOUR (1 + 4 layers). Exit status 1 where a goal is missed."""
    tables, goals = [], []
    console = Console(stderr=True)
    with console.status("") as status:
        for table, found in measure(one, four, repeats=repeats, say=status.update):
            tables.append(table)
            goals += found
            for goal in found:
                console.print(f"{goal.what}: {goal.figure}, {SHOWN[goal.relation]} {goal.bound:g}")
    if record:
        RECORD.write_text("\n".join(_lines(tables, goals, between_reads(four))) + "\n")
        draw(PICTURE, tables[-1].title, sweep_panels(tables[-1]))
    if as_json:
        shown = [{"what": g.what, "values": g.figure.values, "relation": g.relation, "bound": g.bound, "reached": g.reached} for g in goals]
        click.echo(json.dumps({"goals": shown, "tables": [table.to_json() for table in tables]}))
    sys.exit(not all(goal.reached for goal in goals))


if __name__ == "__main__":
    main()
