"""The task score of the shipped model, or another one: exact, and under budgets, each against exact question by question.

    python validation/quality/task_score.py [MODEL] --steps decode --budgets 2,3,4,6 --denominators survivors,frozen [--json]

Exits with 1 if exact does not reach what makes the task a gate.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any, cast

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

import colibri_jax
from colibri_jax.cli.options import SHIPPED_MODEL
from colibri_jax.quality.settings import Choices, Setting, make_settings
from colibri_jax.quality.statistics import Estimate
from colibri_jax.quality.steps import DEFAULT_CHUNK, DEFAULT_ROWS, STEP_KINDS, StepKind, StepShape
from colibri_jax.quality.task import read_questions, score_questions
from colibri_jax.routing_spec import RoutingOptions
from colibri_jax.tokenizer import ChatTokenizer

QUESTIONS = Path(__file__).with_name("questions.jsonl")
EXACT = RoutingOptions()


def split(_context: click.Context, _parameter: click.Parameter, value: str) -> list[str]:
    """Values of an option, separated by commas."""
    return [part.strip() for part in value.split(",") if part.strip()]


def per_cent(estimate: Estimate) -> str:
    return f"{100 * estimate.value:.1f} ± {100 * estimate.error:.1f}"


@click.command()
@click.argument("model", type=click.Path(exists=True, file_okay=False, path_type=Path), default=SHIPPED_MODEL)
@click.option("--questions", "file", type=click.Path(exists=True, dir_okay=False, path_type=Path), default=QUESTIONS)
@click.option("--limit", type=click.IntRange(min=1), help="Ask the first so many questions only.")
@click.option("--steps", "kind", type=click.Choice(STEP_KINDS), default="decode", show_default=True, help="How the choices are run.")
@click.option("--rows", type=click.IntRange(min=1), default=DEFAULT_ROWS, show_default=True, help="Positions of a verification step.")
@click.option("--chunk", type=click.IntRange(min=1), default=DEFAULT_CHUNK, show_default=True, help="Largest prefill step.")
@click.option("--budgets", callback=split, default="2,3,4,6", show_default=True)
@click.option("--policies", callback=split, default="aggregate", show_default=True)
@click.option("--denominators", callback=split, default="survivors,frozen", show_default=True)
@click.option("--votes", callback=split, default="weights", show_default=True)
@click.option("--backend", type=click.Choice(["native", "reference"]), default="native", show_default=True)
@click.option("--cache-experts", type=click.IntRange(min=1), default=64, show_default=True, help="Of the native engine, per layer.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table.")
def main(model: Path, file: Path, limit: int | None, kind: str, rows: int, chunk: int, backend: str, as_json: bool, **options: Any) -> None:
    """Score MODEL exact and under every combination of the options given."""
    shape = StepShape(kind=cast(StepKind, kind), rows=rows, chunk=chunk)
    asked = read_questions(file)[:limit]
    tokenizer = ChatTokenizer.from_directory(model)
    native = {"cache_experts": options["cache_experts"]} if backend == "native" else {}
    lm = colibri_jax.load(model, cast(Any, backend), **native)
    choices = Choices(
        budgets=[int(budget) for budget in options["budgets"]],
        policies=options["policies"],
        denominators=options["denominators"],
        votes=options["votes"],
    )
    settings = [setting for setting in make_settings(shape, choices, lm.config) if setting.routing != EXACT]
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    found, exact = [], None
    with Progress(*columns, console=Console(stderr=True)) as bar:
        for setting in [Setting(shape, EXACT, EXACT), *settings]:
            lm.reroute(setting.run_as, shape.budget_scopes)
            task = bar.add_task(setting.name, total=None)
            started = time.perf_counter()
            result = score_questions(
                lm, tokenizer, asked, shape, progress=lambda done, total, task=task: bar.update(task, completed=done, total=total)
            )
            seconds = time.perf_counter() - started
            exact = exact or result
            found.append((setting.name, result, result.minus(exact), seconds))
    void = found[0][1].void
    if as_json:
        rows_json = [
            {"name": name, **result.to_json(), "against_exact": against.to_json(), "seconds": seconds}
            for name, result, against, seconds in found
        ]
        click.echo(json.dumps({"model": model.name, "file": file.name, "void": void, "results": rows_json}))
    else:
        table = Table("setting", "right %", "against exact", "gained, lost", "p(right) %", "against exact", "in noise", "s")
        for name, result, against, seconds in found:
            difference, probability = per_cent(against.accuracy), per_cent(against.right_probability)
            turned, noise = f"{against.gained}, {against.lost}", "yes" if against.within_noise else "no"
            right, sure = per_cent(result.accuracy), per_cent(result.right_probability)
            table.add_row(name, right, difference, turned, sure, probability, noise, f"{seconds:.1f}")
        Console().print(table)
    if void:
        click.echo(f"FAILED: {void}", err=True)
    sys.exit(1 if void else 0)


if __name__ == "__main__":
    main()
