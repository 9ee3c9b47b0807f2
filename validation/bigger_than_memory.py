"""A container larger than the memory of a process, compared by that process: reference and native, layer by layer.

    python validation/bigger_than_memory.py --work DIR

Writes a random container into DIR, and runs comparisons of it in processes whose address space (RLIMIT_AS) is smaller than the container:

* all four comparisons, the reference one layer at a time: they must hold;
* one layer alone, which must hold too;
* the same layer with one weight of the reference changed: that must be found;
* the first again with all of the reference in memory: that must run out of memory, or the limit would show nothing.
"""

from __future__ import annotations

import dataclasses
import json
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
from bench.make_model import make_config, make_model
from rich.console import Console
from rich.progress import Progress

ROOT = Path(__file__).resolve().parents[1]
HIDDEN, EXPERT_HIDDEN, EXPERTS, TOP_K, VOCAB = 2048, 1024, 64, 4, 2048
LAYER_BYTES = 0.24e9  # about, of such a layer
INDEX_TOPK = 8  # so that the indexer limits the later positions
TOKENS, PREFILL, BUDGET = 12, 8, 12
SECONDS = 3600


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """What one process does.

    `layers` as in `colibri_jax.compare`; `changed`: a matrix of which the reference gets one weight changed.
    """

    path: str
    limit_bytes: int
    ram_bytes: int
    residency: str = "layer"
    layers: tuple[int, ...] | None = None
    changed: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of it: a report as JSON, or how it ended without one. Peaks are of address space and of resident memory."""

    report: dict[str, Any] | None = None
    failure: str = ""
    out_of_memory: bool = False
    seconds: float = 0.0
    peak_address_bytes: int = 0
    peak_resident_bytes: int = 0


# ---- the process under the limit ------------------------------------------------------------------------------------


def child(task: Task) -> None:
    """Limit the address space, compare, and print the outcome as JSON."""
    resource.setrlimit(resource.RLIMIT_AS, (task.limit_bytes, task.limit_bytes))
    begin = time.monotonic()
    try:
        outcome = Outcome(report=_compare(task))
    except Exception as error:  # whatever it is, it is the outcome
        # XLA has a class of its own for every failure, and tells this one apart in its text alone.
        is_memory = isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error) or "Out of memory" in str(error)
        outcome = Outcome(failure=f"{type(error).__name__}: {error}"[:300], out_of_memory=is_memory)
    peaks = {"peak_address_bytes": _status("VmPeak"), "peak_resident_bytes": _status("VmHWM")}
    print(json.dumps(dataclasses.asdict(dataclasses.replace(outcome, seconds=time.monotonic() - begin, **peaks))))


def _compare(task: Task) -> dict[str, Any]:
    import numpy as np

    from colibri_jax.compare import CompareOptions, compare
    from colibri_jax.compare import layers as compare_layers
    from colibri_jax.container.reader import Container
    from colibri_jax.routing_spec import SCOPES, RoutingOptions

    if task.changed is not None:
        honest = Container.read

        def read(self: Container, role: str) -> Any:
            value = honest(self, role)
            if role == task.changed:
                value.q[5, 3] = -3 if value.q[5, 3] >= 0 else 3
            return value

        Container.read = read  # type: ignore[method-assign]  # the native engine reads for itself
        # The search for what explains a deviation runs the layer operation by operation, which takes memory of its own.
        compare_layers.examine_row = lambda *_: (float("inf"), "")

    tokens = np.random.default_rng(3).integers(0, VOCAB, TOKENS).tolist()
    report = compare(
        task.path,
        tokens,
        routing=RoutingOptions(budget=BUDGET),
        budget_scopes=SCOPES,
        options=CompareOptions(tokens=TOKENS, prefill=PREFILL, greedy=0),
        ram_bytes=task.ram_bytes,
        residency=task.residency,  # type: ignore[arg-type]  # "all" or "layer"
        layers=task.layers,
        progress=lambda what, done, total: print(json.dumps([what, done, total]), file=sys.stderr, flush=True),
    )
    return report.to_json()


def _status(key: str) -> int:
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


# ---- the process that judges ----------------------------------------------------------------------------------------


def run(task: Task, name: str, console: Console) -> Outcome:
    """Do a task in a process of its own, under a progress bar."""
    # The native engine brings its threads, XLA its own; each would reserve an allocator arena of 64 MiB of address space.
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "MALLOC_ARENA_MAX": "1"}
    arguments = [sys.executable, __file__, "--child", json.dumps(dataclasses.asdict(task))]
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None
    assert process.stderr is not None
    said: list[str] = []
    with Progress(console=console, transient=True) as bars:
        bar = bars.add_task(name)
        for line in process.stderr:
            if line.startswith("["):
                what, done, total = json.loads(line)
                bars.update(bar, description=f"{name}: {what}", completed=done, total=total)
            else:
                said.append(line.strip())
    answer = process.stdout.read()
    if process.wait() != 0 or not answer:
        text = " | ".join(said[-3:])
        is_memory = any(word in text for word in ("bad_alloc", "MemoryError", "out of memory", "Out of memory", "Cannot allocate"))
        return Outcome(failure=f"exit status {process.returncode}: {text}"[:300], out_of_memory=is_memory)
    return Outcome(**json.loads(answer))


def failures(container_bytes: int, limit_bytes: int, n_layers: int, outcomes: dict[str, Outcome]) -> list[str]:
    """What does not hold of outcomes "whole", "one layer", "changed weight" and "all in memory"; empty when everything does."""
    found = []
    if container_bytes <= limit_bytes:
        found.append(f"the container ({container_bytes} bytes) is not larger than the limit ({limit_bytes})")
    for name, rows in (("whole", TOKENS * (n_layers + 2)), ("one layer", TOKENS)):
        outcome = outcomes[name]
        if outcome.report is None:
            found.append(f"{name}: {outcome.failure}")
            continue
        parts = outcome.report["parts"]
        if not outcome.report["passed"]:
            found.append(f"{name}: the comparison failed: {outcome.report['verdicts']}")
        if parts["rows"] < rows or not parts["selections"] or not parts["selections_cut"]:
            found.append(
                f"{name}: compared {parts['rows']} rows of {rows}, {parts['selections']} selections, {parts['selections_cut']} cut"
            )
        if not 0 < outcome.peak_address_bytes <= limit_bytes:
            found.append(f"{name}: a peak of {outcome.peak_address_bytes} bytes of address space under a limit of {limit_bytes}")
    changed = outcomes["changed weight"].report
    if changed is None or changed["verdicts"]["layers"]:
        found.append(f"changed weight: not found ({outcomes['changed weight'].failure or 'the comparison passed'})")
    if not outcomes["all in memory"].out_of_memory:
        found.append(f"all in memory: did not run out of memory ({outcomes['all in memory'].failure or 'it finished'})")
    return found


@contextmanager
def container(directory: Path, n_layers: int, seed: int) -> Iterator[tuple[Path, int]]:
    """A random container in a directory, and its bytes; it is removed afterwards."""
    path = directory / "container"
    config = make_config(
        layers=n_layers,
        dense_layers=1,
        experts=EXPERTS,
        top_k=TOP_K,
        hidden=HIDDEN,
        expert_hidden=EXPERT_HIDDEN,
        vocab=VOCAB,
        heads=8,
        positions=256,
    )
    size = make_model(path, {**config, "index_topk": INDEX_TOPK}, seed)
    try:
        yield path, size
    finally:
        shutil.rmtree(path)


def _print(result: dict[str, Any], outcomes: dict[str, Outcome]) -> None:
    gb = 1e9
    click.echo(f"container {result['container_bytes'] / gb:.2f} GB, {result['layers']} layers; limit {result['limit_bytes'] / gb:.2f} GB")
    for name, outcome in outcomes.items():
        peaks = f"{outcome.peak_address_bytes / gb:.2f} GB address space, {outcome.peak_resident_bytes / gb:.2f} GB resident"
        found = outcome.failure or ("holds" if outcome.report and outcome.report["passed"] else "does not hold")
        click.echo(f"{name}: {found}; peak {peaks}; {outcome.seconds:.0f} s")
    report = outcomes["whole"].report
    if report is not None:
        parts, floats, shipped = report["parts"], report["float_activations"], report["shipped"]
        click.echo(
            f"whole: {parts['selections']} selections ({parts['selections_cut']} cut), {len(parts['selection_differences'])} differ; "
            f"{parts['equal_rows']} of {parts['rows']} rows equal in every bit; float activations: relative error "
            f"{floats['worst_logit_error']:.2e} of logits, {floats['worst_router_error']:.2e} of router logits; as shipped: "
            f"{shipped['equal_positions']} of {shipped['positions']} positions equal"
        )


@click.command()
@click.option("--work", type=click.Path(file_okay=False, path_type=Path), help="Directory for the container; made if it is not there.")
@click.option("--gigabytes", type=click.FloatRange(min=0.3), default=3.0, show_default=True, help="Size of the container.")
@click.option("--limit-gb", type=click.FloatRange(min=0.1), default=1.5, show_default=True, help="Address space of the processes.")
@click.option("--ram-gb", type=click.FloatRange(min=0.05), default=0.5, show_default=True, help="Of that, for the native engine.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--child", "given", hidden=True)
def main(work: Path | None, gigabytes: float, limit_gb: float, ram_gb: float, seed: int, as_json: bool, given: str | None) -> None:
    """Compare reference and native on a container that is larger than the address space of the process; exit 1 unless all holds."""
    if given is not None:
        child(Task(**json.loads(given)))
        return
    if work is None:
        raise click.UsageError("--work DIR is missing")
    console = Console(stderr=True)
    n_layers = 2 + int(gigabytes * 1e9 / LAYER_BYTES)
    middle = n_layers // 2
    with container(work, n_layers, seed) as (path, size):
        whole = Task(path=str(path), limit_bytes=int(limit_gb * 1e9), ram_bytes=int(ram_gb * 1e9))
        one = dataclasses.replace(whole, layers=(middle,))
        tasks = {
            "whole": whole,
            "one layer": one,
            "changed weight": dataclasses.replace(one, changed=f"layers.{middle}.shared.up"),
            "all in memory": dataclasses.replace(whole, residency="all"),
        }
        outcomes = {name: run(task, name, console) for name, task in tasks.items()}
    failed = failures(size, whole.limit_bytes, n_layers, outcomes)
    result = {"container_bytes": size, "limit_bytes": whole.limit_bytes, "layers": n_layers, "checked_layer": middle, "seed": seed}
    if as_json:
        described = {name: dataclasses.asdict(outcome) for name, outcome in outcomes.items()}
        click.echo(json.dumps({**result, "outcomes": described, "failures": failed}))
    else:
        _print(result, outcomes)
    for failure in failed:
        click.echo(f"FAILED: {failure}", err=True)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
