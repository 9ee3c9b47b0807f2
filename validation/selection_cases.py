"""Reference and native `select_experts` on masses of random cases: equal in every field, or this command fails.

    python validation/selection_cases.py --cases 100000 [--seed 0] [--json]
    python validation/selection_cases.py --platform gpu --seconds 150

Cases come in blocks that share a router and options and differ in their logits (`selection_blocks.py`). The reference answers in
batches (`select_many`); a sample of the cases goes through its `select_experts` too.

That the hard cases were among them is counted by a third reading of the rules (`selection_reading.py`), and asserted: each event in
its share of the cases. Both sides must also agree with the third reading in the experts kept and in three counts.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence

import click
import jax
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from selection_blocks import Block, Case, make_blocks
from selection_reading import EVENTS, Reading, read_block

import colibri_jax
from colibri_jax.reference.routing import select_many
from colibri_jax.routing_spec import Selection

REQUIRED_COARSE_SHARE = 0.30
BLOCKS_AT_ONCE = 60
SHOWN_DIFFERENCES = 10

Select = Callable[[Sequence[Case]], list[Selection]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Difference:
    """A case in which the two sides are not equal: block number, place in the block, and the unequal fields."""

    block: int
    case: int
    fields: list[str]


# ---- the comparison -------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Tally:
    """Sums over the blocks compared so far."""

    cases: int = 0
    coarse_cases: int = 0
    positions: int = 0
    by_policy: Counter[str] = dataclasses.field(default_factory=Counter)
    unequal_fields: Counter[str] = dataclasses.field(default_factory=Counter)
    events: Counter[str] = dataclasses.field(default_factory=Counter)
    seconds: Counter[str] = dataclasses.field(default_factory=Counter)
    differing_cases: int = 0
    first_differences: list[Difference] = dataclasses.field(default_factory=list)
    misread_cases: int = 0

    def add_blocks(self, blocks: Sequence[Block], sides: dict[str, Select]) -> None:
        """Run the two sides on some blocks, compare them with each other and with the third reading, and count."""
        cases = [case for block in blocks for case in block.cases]
        answers: list[list[Selection]] = []
        for name, select in sides.items():
            started = time.perf_counter()
            answers.append(select(cases))
            self.seconds[name] += time.perf_counter() - started
        in_order = zip(*answers, strict=True)
        for block in blocks:
            started = time.perf_counter()
            reading = read_block(block.router, block.options, block.logits, block.resident, block.row_votes)
            self.seconds["third reading"] += time.perf_counter() - started
            for case in range(len(block.logits)):
                self._compare_case(block, case, reading, *next(in_order))
            self.cases += len(block.logits)
            self.coarse_cases += len(block.logits) * block.coarse
            self.positions += len(block.logits) * block.logits.shape[1]
            self.by_policy[block.options.policy] += len(block.logits)
            for event, found in reading.events.items():
                self.events[event] += int(found.sum())

    def _compare_case(self, block: Block, case: int, reading: Reading, first: Selection, second: Selection) -> None:
        fields = first.differences(second)
        self.unequal_fields.update(fields)
        self.differing_cases += bool(fields)
        if fields and len(self.first_differences) < SHOWN_DIFFERENCES:
            self.first_differences.append(Difference(block=block.number, case=case, fields=fields))
        stated = (first.union_size, first.dropped_slots, first.emptied_positions, first.kept.tolist())
        read = (reading.union_size[case], reading.dropped_slots[case], reading.emptied_positions[case])
        self.misread_cases += stated != (*read, np.flatnonzero(reading.kept[case]).tolist())

    def required(self, event: str) -> int:
        """In how many of this run's cases an event must be."""
        return math.ceil(EVENTS[event] * self.cases)

    def failures(self) -> list[str]:
        """What this run must show and does not; empty when it passed."""
        found = [f"{e}: {self.events[e]} cases, {self.required(e)} required" for e in EVENTS if self.events[e] < self.required(e)]
        if self.coarse_cases < REQUIRED_COARSE_SHARE * self.cases:
            found.append(f"coarse grids: {self.coarse_cases} of {self.cases} cases, {REQUIRED_COARSE_SHARE:.0%} required")
        if self.differing_cases:
            found.append(f"{self.differing_cases} cases differ between the two sides")
        if self.misread_cases:
            found.append(f"{self.misread_cases} cases contradict the third reading")
        return found


def compare(cases: int, seed: int, sides: dict[str, Select], console: Console, seconds: float | None = None) -> Tally:
    """Run `cases` cases, or fewer if that takes longer than `seconds`, through both sides under a progress bar."""
    tally, begin = Tally(), time.perf_counter()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("select_experts", total=cases)
        blocks = make_blocks(cases, seed)
        while some := list(itertools.islice(blocks, BLOCKS_AT_ONCE)):
            tally.add_blocks(some, sides)
            progress.update(task, completed=tally.cases)
            if seconds is not None and time.perf_counter() - begin >= seconds:
                break
    return tally


def by_native(cases: Sequence[Case]) -> list[Selection]:
    """The native side."""
    return [colibri_jax.native.select_experts(*case) for case in cases]


def by_reference(cases: Sequence[Case]) -> list[Selection]:
    """The reference side: in batches, and the first case alone too, which must not matter."""
    selections = select_many(cases)
    unequal = selections[0].differences(colibri_jax.reference.select_experts(*cases[0]))
    if unequal:
        raise AssertionError(f"the reference answers otherwise in a batch: {', '.join(unequal)}")
    return selections


def _print(tally: Tally, console: Console) -> None:
    table = Table("event", "cases", "required", title=f"{tally.cases:,} cases, {tally.positions:,} positions")
    for event in EVENTS:
        table.add_row(event, f"{tally.events[event]:,}", f"{tally.required(event):,}")
    table.add_row("coarse grid", f"{tally.coarse_cases:,}", f"{math.ceil(REQUIRED_COARSE_SHARE * tally.cases):,}")
    console.print(table)
    console.print(", ".join(f"{policy} {cases:,} cases" for policy, cases in tally.by_policy.most_common()))
    table = Table("field", "cases that differ")
    for field in dataclasses.fields(Selection):
        table.add_row(field.name, f"{tally.unequal_fields[field.name]:,}")
    console.print(table)
    console.print(", ".join(f"{name} {seconds:.1f} s" for name, seconds in tally.seconds.items()))
    for difference in tally.first_differences:
        console.print(f"differs: block {difference.block}, case {difference.case}: {', '.join(difference.fields)}")


@click.command()
@click.option("--cases", type=click.IntRange(min=1), default=100_000, show_default=True)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
@click.option("--seconds", type=click.FloatRange(min=0), help="Stop after this time, at the end of a portion of cases.")
@click.option("--platform", help="Where the reference runs, as JAX names it: cpu, gpu, tpu. Default: JAX's own choice.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of tables.")
def main(cases: int, seed: int, seconds: float | None, platform: str | None, as_json: bool) -> None:
    """Compare reference and native select_experts on random cases; exit 1 unless equal and every event was frequent."""
    try:
        device = jax.devices(platform)[0]
    except RuntimeError as error:
        raise click.ClickException(f"no such device: {error}") from error
    with jax.default_device(device):
        tally = compare(cases, seed, {"reference": by_reference, "native": by_native}, Console(stderr=True), seconds)
    failures = tally.failures()
    if as_json:
        # Not asdict: it would make a Counter of a Counter's pairs.
        found = vars(tally) | {"first_differences": [vars(difference) for difference in tally.first_differences]}
        click.echo(json.dumps(found | {"seed": seed, "device": device.device_kind, "failures": failures}))
    else:
        click.echo(f"reference on {device.device_kind}")
        _print(tally, Console())
    for failure in failures:
        click.echo(f"FAILED: {failure}", err=True)
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
