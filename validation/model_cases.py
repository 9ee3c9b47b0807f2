"""Generated model cases in volume: every property on every case, reference against native and native against itself.

    python validation/model_cases.py --cases 5000 --shapes 64 --jobs 2 [--seed 0] [--json]
    python validation/model_cases.py --cases 5000 --shapes 64 --only 1234

A case is a shape (family and configuration), a draw of weights, a run (tokens in steps, rewinds, options) and two set-ups of the
engine; it is a function of (seed, number, shapes). Cases of one shape run in one process, which compiles the reference for it.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import json
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import click
import jax
import numpy as np
from choosing import Random
from model_checks import CHECKS, Findings, Subject
from model_runs import Run, make_run
from model_shapes import Shape, make_shape, make_weights, write_model
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from colibri_jax.compare.layers import FEW_ULPS
from colibri_jax.compare.report import W4A32_RELATIVE_ERROR
from colibri_jax.config import FAMILIES

WEIGHTS_PER_SHAPE = 6
SHAPES_PER_PROCESS = 8  # then new ones: compiled programs are never freed
SHOWN_FAILURES = 20
SHOWN_TIES = 12


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One case: which shape and which of its weights, and what they are put through."""

    number: int
    shape_number: int
    weights: int
    run: Run


@dataclasses.dataclass
class Tally:
    """Sums over cases of one family, or of all."""

    cases: int = 0
    shapes: int = 0
    selections: int = 0
    selections_cut: int = 0
    rows: int = 0
    equal_rows: int = 0
    positions: int = 0
    equal_positions: int = 0
    worst_ulps: float = 0.0
    worst_logit_error: float = 0.0
    worst_router_error: float = 0.0
    near_ties: int = 0
    attended_ties: int = 0
    """Rows of layers that would attend to other positions with float32 activations."""
    sensitive_cases: int = 0
    """Cases in which float32 activations are beyond the bound of (iii), and the reference as far from itself."""
    compile_seconds: float = 0.0
    seconds: float = 0.0
    events: Counter[str] = dataclasses.field(default_factory=Counter)

    def add_case(self, found: Findings) -> None:
        self.add(
            Tally(
                cases=1,
                selections=found.parts.selections,
                selections_cut=found.parts.selections_cut,
                rows=found.parts.rows,
                equal_rows=found.parts.equal_rows,
                positions=found.whole.positions,
                equal_positions=found.whole.equal_positions,
                worst_ulps=found.parts.worst_ulps,
                # What is beyond the bound is in the list of sensitive cases, with the measure that it is held against.
                worst_logit_error=0.0 if found.sensitive else found.floats.worst_logit_error,
                worst_router_error=0.0 if found.sensitive else found.floats.worst_router_error,
                sensitive_cases=int(bool(found.sensitive)),
                near_ties=len(found.near_ties),
                attended_ties=found.floats.differing_attended,
                events=found.events,
            )
        )

    def add(self, other: Tally) -> None:
        """Sums of counts, the larger of errors."""
        for field in dataclasses.fields(self):
            mine, more = getattr(self, field.name), getattr(other, field.name)
            setattr(self, field.name, max(mine, more) if field.name.startswith("worst") else mine + more)


@dataclasses.dataclass
class ShapeResult:
    """What the cases of one shape gave."""

    shape: Shape
    tally: Tally
    checked: Counter[str]
    failures: list[dict[str, Any]]
    ties: list[dict[str, Any]]
    sensitive: list[dict[str, Any]]


def shape_of(seed: int, number: int) -> Shape:
    """Shape `number` of a run; families take turns."""
    return make_shape(Random(np.random.default_rng([seed, number, 0])), FAMILIES[number % len(FAMILIES)])


def case_of(seed: int, number: int, shapes: int) -> Case:
    """Case `number` of a run."""
    shape_number, weights = number % shapes, number // shapes % WEIGHTS_PER_SHAPE
    run = make_run(Random(np.random.default_rng([seed, number, 1])), shape_of(seed, shape_number))
    return Case(number=number, shape_number=shape_number, weights=weights, run=run)


def run_shape(seed: int, shape_number: int, cases: Sequence[Case]) -> ShapeResult:
    """All properties on the given cases of one shape, in a directory of its own."""
    shape = shape_of(seed, shape_number)
    result = ShapeResult(shape, Tally(shapes=1), Counter(), [], [], [])
    began, compiling = time.perf_counter(), _compile_seconds()
    for weights in sorted({case.weights for case in cases}):
        with tempfile.TemporaryDirectory(prefix="model-case-") as directory:
            values = make_weights(shape.model, [seed, shape_number, weights], plain=weights == 0)
            subject = Subject(write_model(Path(directory) / "model", shape, values), shape)
            for case in cases:
                if case.weights == weights:
                    _run_case(subject, case, result)
    result.tally.seconds = time.perf_counter() - began
    result.tally.compile_seconds = _compile_seconds() - compiling
    return result


def _run_case(subject: Subject, case: Case, result: ShapeResult) -> None:
    found = Findings()
    for name, check in CHECKS.items():
        result.checked[name] += 1
        try:
            faults = list(check(subject, case.run, found))
        except Exception:  # an error of the package is a finding too, and the other cases go on
            faults = [traceback.format_exc(limit=-3)]
        if faults:
            result.failures.append({"case": case.number, "property": name, "shape": str(subject.shape), "faults": faults[:5]})
    result.tally.add_case(found)
    for tie in found.near_ties:
        result.ties.append({"case": case.number, **dataclasses.asdict(tie)})
    result.sensitive += [{"case": case.number, **measured} for measured in found.sensitive]


_compiled: list[float] = []


def _compile_seconds() -> float:
    """Seconds that this process has spent tracing and compiling."""
    if not _compiled:
        _compiled.append(0.0)
        jax.monitoring.register_event_duration_secs_listener(
            lambda event, seconds, **_: _compiled.append(seconds) if "/compile/" in event else None
        )
    return sum(_compiled)


# ---- the whole run --------------------------------------------------------------------------------------------------


def run_cases(cases: Iterable[Case], seed: int, jobs: int, console: Console) -> list[ShapeResult]:
    """Distribute cases over processes, shape by shape."""
    by_shape: dict[int, list[Case]] = {}
    for case in cases:
        by_shape.setdefault(case.shape_number, []).append(case)
    if jobs == 1 or len(by_shape) == 1:
        return [run_shape(seed, number, some) for number, some in by_shape.items()]
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    results = []
    numbers, at_once = list(by_shape), jobs * SHAPES_PER_PROCESS
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("model cases", total=sum(map(len, by_shape.values())))
        for begin in range(0, len(numbers), at_once):
            # Spawned, because JAX has threads.
            with concurrent.futures.ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
                waiting = [pool.submit(run_shape, seed, number, by_shape[number]) for number in numbers[begin : begin + at_once]]
                for done in concurrent.futures.as_completed(waiting):
                    result = done.result()
                    results.append(result)
                    progress.advance(task, result.tally.cases)
                    for failure in result.failures:
                        line = f"case {failure['case']}, {failure['property']}: {failure['faults'][0]}"
                        console.print(line, markup=False, soft_wrap=True)
    return results


def summary(results: Sequence[ShapeResult], seed: int, wall_seconds: float) -> dict[str, Any]:
    """The figures of a run as one object."""
    families: dict[str, Tally] = {}
    total, checked, failed = Tally(), Counter[str](), Counter[str]()
    for result in results:
        families.setdefault(result.shape.family, Tally()).add(result.tally)
        total.add(result.tally)
        checked.update(result.checked)
        failed.update(failure["property"] for failure in result.failures)
    distinct = {json.dumps(dataclasses.asdict(result.shape), sort_keys=True) for result in results}
    return {
        "cases": total.cases,
        "shapes": len(distinct),
        "seed": seed,
        "families": {name: _figures(families[name]) for name in FAMILIES if name in families},
        "total": _figures(total),
        "properties": {name: {"cases": checked[name], "failures": failed[name]} for name in CHECKS},
        "near_ties": [tie for result in results for tie in result.ties],
        "sensitive": [measured for result in results for measured in result.sensitive],
        "failures": [failure for result in results for failure in result.failures],
        "wall_seconds": wall_seconds,
        "compile_seconds_per_shape": total.compile_seconds / max(total.shapes, 1),
        "milliseconds_per_case": 1e3 * (total.seconds - total.compile_seconds) / max(total.cases, 1),
    }


def _figures(tally: Tally) -> dict[str, Any]:
    # Not asdict: it would make a Counter of a Counter's pairs.
    return vars(tally) | {
        "events": dict(tally.events),
        "ulps_share_of_bound": tally.worst_ulps / FEW_ULPS,
        "logit_error_share_of_bound": tally.worst_logit_error / W4A32_RELATIVE_ERROR,
        "router_error_share_of_bound": tally.worst_router_error / W4A32_RELATIVE_ERROR,
    }


def _print(found: dict[str, Any], console: Console) -> None:
    title = f"{found['cases']:,} cases, {found['shapes']} shapes, seed {found['seed']}"
    table = Table(
        "family", "cases", "shapes", "selections (cut)", "rows equal", "logits equal", "(iii) share of bound", "near-ties", title=title
    )
    for name, t in [*found["families"].items(), ("all", found["total"])]:
        worst = max(t["logit_error_share_of_bound"], t["router_error_share_of_bound"])
        equal = f"{t['equal_rows']:,} of {t['rows']:,}"
        logits = f"{t['equal_positions']:,} of {t['positions']:,}"
        cells = (t["cases"], t["shapes"], f"{t['selections']:,} ({t['selections_cut']:,})", equal, logits, f"{worst:.3f}", t["near_ties"])
        table.add_row(name, *map(str, cells))
    console.print(table)
    table = Table("property", "cases", "failures")
    for name, counted in found["properties"].items():
        table.add_row(name, f"{counted['cases']:,}", str(counted["failures"]))
    console.print(table)
    console.print("met: " + ", ".join(f"{name} {n:,}" for name, n in sorted(found["total"]["events"].items())))
    for tie in found["near_ties"][:SHOWN_TIES]:
        margin = "none" if tie["margin"] is None else f"{tie['margin']:.2e}"
        console.print(
            f"near-tie: case {tie['case']}, layer {tie['layer']}, position {tie['position']}, margin {margin}, "
            f"values differ by {tie['difference']:.2e}"
        )
    if len(found["near_ties"]) > SHOWN_TIES:
        console.print(f"… and {len(found['near_ties']) - SHOWN_TIES} more near-ties")
    for measured in found["sensitive"]:
        console.print(
            f"sensitive: case {measured['case']}, {measured['what']} differ by {measured['error']:.2e}; other orders of sums move "
            f"the reference's by {measured['own_movement']:.2e}"
        )
    console.print(
        f"{found['wall_seconds']:.0f} s; compiling {found['compile_seconds_per_shape']:.1f} s a shape, "
        f"then {found['milliseconds_per_case']:.0f} ms a case"
    )


@click.command()
@click.option("--cases", type=click.IntRange(min=1), default=5000, show_default=True)
@click.option("--shapes", type=click.IntRange(min=1), default=64, show_default=True)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
@click.option("--jobs", type=click.IntRange(min=1), default=max(1, len(os.sched_getaffinity(0))), show_default="processors")
@click.option("--only", type=click.IntRange(min=0), default=None, help="Run this one case.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of tables.")
def main(cases: int, shapes: int, seed: int, jobs: int, only: int | None, as_json: bool) -> None:
    """Check every property on generated model cases; exit 1 if one fails, with the command that runs that case alone."""
    console, began = Console(stderr=True), time.perf_counter()
    numbers = range(cases) if only is None else [only]
    results = run_cases((case_of(seed, number, shapes) for number in numbers), seed, jobs, console)
    found = summary(results, seed, time.perf_counter() - began)
    if as_json:
        click.echo(json.dumps(found))
    else:
        _print(found, Console())
    for failure in found["failures"][:SHOWN_FAILURES]:
        click.echo(f"FAILED: {failure['property']}, {failure['shape']}", err=True)
        for fault in failure["faults"]:
            click.echo(f"  {fault}", err=True)
        click.echo(f"  python validation/model_cases.py --shapes {shapes} --seed {seed} --only {failure['case']}", err=True)
    if len(found["failures"]) > SHOWN_FAILURES:
        click.echo(f"… and {len(found['failures']) - SHOWN_FAILURES} more", err=True)
    sys.exit(1 if found["failures"] else 0)


if __name__ == "__main__":
    main()
