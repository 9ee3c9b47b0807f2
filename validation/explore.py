"""Look for new counterexamples for as long as asked, and say what was looked at.

    python validation/explore.py --minutes 30 [--what selection] [--seed 1]

Rounds of hypothesis with fresh seeds alternate between selections (both implementations and a third reading of the rules) and whole
models. The first failure is shrunk and printed with the command that repeats its round, and ends the search.
"""

from __future__ import annotations

import math
import secrets
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import click
import numpy as np
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

# Strategies are the test suite's.
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from choosing import Random
from model_checks import CHECKS, Findings
from model_runs import Run
from model_shapes import make_shape
from model_strategies import WEIGHTS, Models, runs
from selection_reading import read_block
from strategies import Case, selection_cases

import colibri_jax
from colibri_jax.config import FAMILIES
from colibri_jax.routing_spec import POLICIES

SELECTIONS_PER_ROUND = 400
# A round has one shape, for which the reference takes some 20 seconds to compile.
RUNS_PER_ROUND = 60
BAR_WIDTH = 40

Coverage = dict[str, Counter[str]]
COMMON = settings(
    derandomize=False,
    database=None,
    deadline=None,
    phases=(Phase.generate, Phase.target, Phase.shrink),
    suppress_health_check=list(HealthCheck),
)


def explore_selections(number: int, coverage: Coverage) -> None:
    """One round: equal in every field, and in agreement with the third reading."""

    @seed(number)
    @settings(COMMON, max_examples=SELECTIONS_PER_ROUND)
    @given(selection_cases(policies=POLICIES))
    def check(case: Case) -> None:
        defined, native = colibri_jax.reference.select_experts(*case.args), colibri_jax.native.select_experts(*case.args)
        unequal = defined.differences(native)
        assert not unequal, f"reference and native differ in {', '.join(unequal)}"
        reading = read_block(case.router, case.options, case.logits[None], case.resident, case.row_votes)
        assert reading.union_size[0] == native.union_size, "the third reading has another union"
        coverage["policy"][case.options.policy] += 1
        coverage["positions"][_bucket(case.logits.shape[0])] += 1
        coverage["experts"][_bucket(case.logits.shape[1])] += 1
        coverage["union size"][_bucket(native.union_size)] += 1
        coverage["emptied positions"][_bucket(native.emptied_positions)] += 1
        coverage["budget"][f"{'cut' if native.dropped else 'did not cut'}"] += 1
        coverage["what was met"].update(event for event, found in reading.events.items() if found[0])

    check()


def _bucket(n: int) -> str:
    """0, 1, 2, 3-4, 5-8, 9-16, …"""
    if n <= 2:
        return str(n)
    top = 1 << (n - 1).bit_length()
    return f"{top // 2 + 1}-{top}"


def explore_models(number: int, coverage: Coverage) -> None:
    """One round: a shape, its weights and runs under every check of `model_checks`."""
    shape = make_shape(Random(np.random.default_rng(number)), FAMILIES[number % len(FAMILIES)])
    coverage["family"][shape.family] += 1
    coverage["layers"][_bucket(shape.model.n_layers)] += 1
    coverage["experts"][_bucket(shape.model.moe.n_experts)] += 1
    with tempfile.TemporaryDirectory(prefix="explore-") as directory:
        models = Models(Path(directory))

        @seed(number)
        @settings(COMMON, max_examples=RUNS_PER_ROUND)
        @given(run=runs(shape), weights=st.integers(0, WEIGHTS - 1))
        def check(run: Run, weights: int) -> None:
            subject, findings = models.subject(shape, weights), Findings()
            for name, faults_of in CHECKS.items():
                faults = list(faults_of(subject, run, findings))
                assert not faults, f"{name}: {'; '.join(faults[:3])}"
            coverage["policy"][run.routing.policy] += 1
            coverage["met"].update(findings.events)
            coverage["(iii) beyond the bound, as is the reference from itself"]["cases"] += bool(findings.sensitive)

        check()


WHAT: dict[str, Callable[[int, Coverage], None]] = {"selection": explore_selections, "models": explore_models}


def print_coverage(coverage: Coverage, console: Console) -> None:
    """One histogram for each thing counted."""
    for name, counter in coverage.items():
        if not any(counter.values()):
            continue
        table = Table(title=name, title_justify="left", show_header=False, box=None)
        most = max(counter.values())
        for key in sorted(counter, key=_order):
            table.add_row(key, f"{counter[key]:,}", "█" * math.ceil(BAR_WIDTH * counter[key] / most))
        console.print(table)


def _order(key: str) -> tuple[int, str]:
    first = key.split("-", maxsplit=1)[0]
    return (int(first), key) if first.isdigit() else (-1, key)


@click.command()
@click.option("--minutes", type=click.FloatRange(min=0), default=10.0, show_default=True, help="The round that is running is finished.")
@click.option("--what", type=click.Choice(tuple(WHAT)), multiple=True, help="Only these; default: all, in turn.")
@click.option("--seed", "first_seed", type=click.IntRange(min=0), help="Of the first round; default: a new one.")
@click.option("--rounds", type=click.IntRange(min=1), help="Stop after so many rounds.")
def main(minutes: float, what: tuple[str, ...], first_seed: int | None, rounds: int | None) -> None:
    """Generate cases until the time is over or one fails."""
    names = what or tuple(WHAT)
    number = secrets.randbits(32) if first_seed is None else first_seed
    end, done = time.monotonic() + 60 * minutes, 0
    console, coverage = Console(), {name: _Coverage() for name in names}
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    failed = False
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("exploring", total=60 * minutes)
        while not failed and (rounds is None or done < rounds) and (done == 0 or time.monotonic() < end):
            name = names[done % len(names)]
            progress.update(task, description=f"{name}, seed {number}", completed=60 * minutes - max(0.0, end - time.monotonic()))
            try:
                WHAT[name](number, coverage[name])
            except Exception:  # whatever a case can raise is a finding
                console.print_exception(max_frames=3)
                again = f"python validation/explore.py --what {name} --seed {number} --rounds 1"
                console.print(f"FAILED. The round again: {again}", soft_wrap=True)
                failed = True
            done, number = done + 1, number + 1
    for name in names:
        console.rule(name)
        print_coverage(coverage[name], console)
    console.print(f"{done} rounds, {'stopped at a failure' if failed else 'no failure'}")
    sys.exit(1 if failed else 0)


class _Coverage(dict[str, Counter[str]]):
    """Counters that come into being when first counted into, kept in that order."""

    def __missing__(self, key: str) -> Counter[str]:
        return self.setdefault(key, Counter())


if __name__ == "__main__":
    main()
