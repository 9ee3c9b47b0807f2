"""Faults planted in a copy of the tree, one at a time: does the unchanged test suite see each of them?

    python validation/planted_faults.py --work DIR (--all | --only NAME …) [--json] [--record FILE]

The faults stand in `planted_faults.toml`. Each is written into the sources of a copy in DIR, the extension is built again where it is
native, and the tests run until one fails. A fault is caught when a test's own check fails. Code that does not compile, cannot be
imported, crashes or never ends proves nothing about the tests and counts as invalid. Before that, the suite must pass on the copy as it is.
"""

from __future__ import annotations

import fcntl
import json
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import click
from planted_tree import CannotBuildError, Run, Tree, copy_tree
from planted_verdict import FAULTS, Mutation, Verdict, examine, faults_caught, load_mutations, record, summary
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

ROOT = Path(__file__).parents[1]


def chosen(mutations: Sequence[Mutation], everything: bool, only: Sequence[str]) -> list[Mutation]:
    """The mutations asked for, by their own names or by those of faults."""
    if everything == bool(only):
        raise click.UsageError("either --all or --only")
    known = set(FAULTS) | {mutation.name for mutation in mutations}
    if unknown := sorted(set(only) - known):
        raise click.UsageError(f"no fault or mutation is called {', '.join(unknown)}")
    return [m for m in mutations if everything or m.name in only or m.fault in only]


def check_baseline(tree: Tree, console: Console) -> Run:
    """The whole suite on the copy as it is.

    Raises:
        click.ClickException: it does not pass, so that a failure would say nothing about a fault.
    """
    console.print("the suite on the copy as it is")
    if problem := tree.import_problem():
        raise click.ClickException(f"the copy is not what its tests would import: {problem}")
    run = tree.run_suite()
    if not run.passed:
        raise click.ClickException(f"the suite fails without any fault: {', '.join(run.all_failed) or run.problem}; {run.log}")
    console.print(f"{run.tests} tests passed in {run.seconds:.0f} s")
    return run


def examine_all(tree: Tree, mutations: Sequence[Mutation], console: Console) -> list[Verdict]:
    """Every mutation in turn, under a progress bar; a line for each."""
    verdicts = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=len(mutations))
        for mutation in mutations:
            progress.update(task, description=mutation.name)
            verdict = examine(tree, mutation)
            progress.console.print(
                f"{mutation.name}: {verdict.outcome}, {verdict.seconds:.0f} s, {verdict.told}", markup=False, soft_wrap=True
            )
            verdicts.append(verdict)
            progress.advance(task)
    return verdicts


def run(
    work: Path, mutations: Sequence[Mutation], *, skip_baseline: bool, keep: bool, console: Console
) -> tuple[Run | None, list[Verdict]]:
    """Copy, build, baseline and every mutation; the copy is removed again unless it is to be kept."""
    tree = Tree(work)
    try:
        copy_tree(ROOT, tree.root)
        console.print("building the copy")
        tree.build()
        baseline = None if skip_baseline else check_baseline(tree, console)
        return baseline, examine_all(tree, mutations, console)
    except CannotBuildError as error:
        raise click.ClickException(str(error)) from error
    finally:
        if not keep:
            tree.remove()


def show(verdicts: Sequence[Verdict], console: Console) -> None:
    table = Table("fault", "mutation", "where", "outcome", "failed first", "seconds")
    for verdict in verdicts:
        mutation = verdict.mutation
        table.add_row(mutation.fault, mutation.name, mutation.where, verdict.outcome, verdict.told, f"{verdict.seconds:.0f}")
    console.print(table)


@click.command()
@click.option("--work", type=click.Path(file_okay=False, path_type=Path), required=True, help="Directory for the copy and its build.")
@click.option("--all", "everything", is_flag=True, help="Plant every fault.")
@click.option("--only", multiple=True, metavar="NAME", help="Plant this fault or this mutation; may be repeated.")
@click.option("--skip-baseline", is_flag=True, help="Do not run the suite on the copy as it is first.")
@click.option("--keep", is_flag=True, help="Leave the copy and its build in the directory; the next call is faster.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table.")
@click.option("--record", "record_path", type=click.Path(dir_okay=False, path_type=Path), help="Write the table as Markdown.")
def main(
    work: Path, everything: bool, only: tuple[str, ...], skip_baseline: bool, keep: bool, as_json: bool, record_path: Path | None
) -> None:
    """Plant faults in a copy of the tree and run the unchanged test suite against each; exit 1 unless all are caught."""
    mutations = chosen(load_mutations(ROOT), everything, only)
    console = Console(stderr=True)
    work = work.resolve()
    if work.is_relative_to(ROOT) and not work.is_relative_to(ROOT / "build"):
        raise click.UsageError("--work lies inside the tree that is copied; only build/ is left out")
    work.mkdir(parents=True, exist_ok=True)
    # The tests run in a session of their own: an end of this process must not leave them behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with (work / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise click.UsageError("another run uses the directory of --work") from None
        baseline, verdicts = run(work, mutations, skip_baseline=skip_baseline, keep=keep, console=console)
    caught = faults_caught(verdicts)
    if as_json:
        click.echo(json.dumps(summary(verdicts)))
    else:
        show(verdicts, Console())
        click.echo(f"{sum(caught.values())} of {len(caught)} faults caught, {sum(v.caught for v in verdicts)} of {len(verdicts)} mutations")
    if record_path is not None:
        record_path.write_text(record(verdicts, baseline), encoding="utf8")
    for verdict in verdicts:
        if not verdict.caught:
            click.echo(f"FAILED: {verdict.mutation.name}: {verdict.outcome}, {verdict.told}", err=True)
    sys.exit(0 if all(caught.values()) else 1)


if __name__ == "__main__":
    main()
