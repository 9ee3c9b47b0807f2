"""The gate of recommended settings: what they cost the shipped model, measured again and held against what is stated.

    python validation/quality/gate.py [MODEL] [--json]      # exits 1 where a recommended setting costs more than it says
    python validation/quality/gate.py --state decode=policy=coverage,coverage=0.85,denominator=frozen      # recommends it

Costs are KLD and PPL ratio on the held-out text, through the steps that a setting is for, the expert bytes counted without a cache, and the
task score against budget off. Margins are two standard deviations of random halves of the text; the task's is its noise band. The gate is
void, and says so, where the task's exact score is too near to chance.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import colibri_jax
from colibri_jax.cli.options import SHIPPED_MODEL
from colibri_jax.container.reader import Container
from colibri_jax.quality.costs import expert_bytes_per_layer
from colibri_jax.quality.recommended import Costs, Recommended, RecommendedSetting, Stated, fingerprint_of, read_recommended
from colibri_jax.quality.report import make_report
from colibri_jax.quality.run import Plan, measure
from colibri_jax.quality.settings import Setting, describe
from colibri_jax.quality.steps import StepShape
from colibri_jax.quality.task import NOISE_BAND, TaskResult, read_questions, score_questions
from colibri_jax.quality.windows import enough, read_windows
from colibri_jax.routing_spec import RoutingOptions
from colibri_jax.tokenizer import ChatTokenizer

HERE = Path(__file__).parent
TEXT, QUESTIONS = HERE.parent / "train" / "heldout.jsonl", HERE / "questions.jsonl"
WINDOW, TOKENS, ROWS = 256, 20_160, 4
HALVES = 2.0
EXACT = RoutingOptions()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Found:
    """What one setting cost this time."""

    setting: Setting
    rows: int
    costs: Costs
    tokens: int

    def figures(self) -> dict[str, float]:
        """By the names of `Costs`."""
        return {field.name: getattr(self.costs, field.name).value for field in dataclasses.fields(Costs)}


def shape_of(steps: str) -> StepShape:
    """The steps that a recommended setting is for."""
    return StepShape(kind=steps, rows=ROWS)  # type: ignore[arg-type]


def measure_settings(
    model: Any, directory: Path, wanted: Sequence[tuple[str, RoutingOptions]], console: Console
) -> tuple[list[Found], str]:
    """Costs of settings, in their order, and why they mean nothing (empty where they do).

    Args:
        wanted: steps and routing options of each.
    """
    tokenizer, container = ChatTokenizer.from_directory(directory), Container.open(directory)
    bytes_L = expert_bytes_per_layer(container)
    windows = read_windows([TEXT], tokenizer, WINDOW)
    questions = read_questions(QUESTIONS)
    plans = []
    for steps in dict.fromkeys(steps for steps, _ in wanted):
        shape = shape_of(steps)
        settings = [Setting(shape, routing, routing) for kind, routing in wanted if kind == steps]
        plans.append(Plan(shape, enough(windows, shape, TOKENS), settings))
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bars:
        bar = bars.add_task("", total=None)

        def progress(what: str, done: int, total: int) -> None:
            bars.update(bar, description=what, completed=done, total=total)

        report = make_report(measure(model, plans, progress=progress), bytes_L, {})
        rows = {(row.setting.shape, row.setting.routing): row for row in report.rows}
        exact: dict[str, TaskResult] = {}
        found = []
        for steps, routing in wanted:
            shape = shape_of(steps)
            for options in (EXACT, routing) if steps not in exact else (routing,):
                model.reroute(options, shape.budget_scopes)
                name = f"task, {steps} {describe(options)}"
                task = score_questions(model, tokenizer, questions, shape, progress=lambda d, t, name=name: progress(name, d, t))
                exact.setdefault(steps, task)
            found.append(_found(rows[shape, routing], task, exact[steps]))
    void = "" if report.passed else "the model does not agree with itself"
    return found, void or next((task.void for task in exact.values() if task.void), "")


def _found(row: Any, task: TaskResult, exact: TaskResult) -> Found:
    summary, lost = row.summary, task.minus(exact).accuracy
    spread = summary.half_spread
    return Found(
        setting=row.setting,
        rows=row.setting.shape.largest_step,
        costs=Costs(
            expert_bytes_share=Stated(value=row.share, margin=0.005),
            kld=Stated(value=summary.kld.value, margin=HALVES * spread.kld),
            ppl_ratio=Stated(value=summary.ppl_ratio.value, margin=HALVES * spread.ppl_ratio),
            task_points_lost=Stated(value=-100.0 * lost.value, margin=100.0 * NOISE_BAND * lost.error),
        ),
        tokens=summary.tokens,
    )


def failures(recommended: Recommended, found: Sequence[Found]) -> list[str]:
    """Lines for settings that cost more than they say, or lose more of the task than noise."""
    lines = []
    for setting, now in zip(recommended.settings, found, strict=True):
        lines += [f"{setting.name}: {line}" for line in setting.costs.exceeded(now.figures())]
        noise = now.costs.task_points_lost
        if noise.value > noise.margin:
            lines.append(f"{setting.name}: the task loses {noise.value:.1f} points, {noise.margin:.1f} are noise")
    return lines


def stated(directory: Path, found: Sequence[Found]) -> Recommended:
    """What was found, as a file of recommended settings."""
    settings = tuple(
        RecommendedSetting(
            name=f"{now.setting.shape.kind} {describe(now.setting.routing)}",
            steps=now.setting.shape.kind,  # type: ignore[arg-type]
            rows=now.rows,
            routing=now.setting.routing,
            costs=now.costs,
            tokens=now.tokens,
            text=TEXT.name,
        )
        for now in found
    )
    return Recommended(fingerprint_of(Container.open(directory)), settings)


def parse_setting(text: str) -> tuple[str, RoutingOptions]:
    """`STEPS=field=value,…`: routing options by their names in `RoutingOptions`."""
    steps, _, options = text.partition("=")
    values: dict[str, Any] = {}
    for part in options.split(","):
        name, _, value = part.partition("=")
        default = {field.name: field.default for field in dataclasses.fields(RoutingOptions)}.get(name)
        if default is None:
            raise click.BadParameter(f"{name!r} is no routing option")
        if name == "budget" and ":" in value:
            values[name] = tuple(map(int, value.split(":")))
        else:
            values[name] = type(default)(value)
    return steps, RoutingOptions(**values)


@click.command()
@click.argument("model", type=click.Path(exists=True, file_okay=False, path_type=Path), default=SHIPPED_MODEL)
@click.option("--state", "states", multiple=True, metavar="STEPS=OPTION=VALUE,…", help="Recommend this setting instead; repeatable.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def main(*, model: Path, states: tuple[str, ...], as_json: bool) -> None:
    """Measure the recommended settings of MODEL, and fail where one costs more than is stated."""
    console = Console(stderr=True)
    recommended = None if states else read_recommended(model, fingerprint_of(Container.open(model)))
    wanted = (
        [parse_setting(text) for text in states] or [(s.steps, s.routing) for s in recommended.settings] if recommended or states else []
    )
    if not wanted:
        console.print("nothing is recommended for this model")
        sys.exit(0)
    lm = colibri_jax.load(model, cache_experts=64, context_positions=WINDOW)
    found, void = measure_settings(lm, model, wanted, console)
    lines = [f"VOID: {void}"] if void else []
    if recommended is None:
        recommended = stated(model, found)
        if not void:
            recommended.write(model)
    lines += failures(recommended, found)
    if as_json:
        rows = [
            {"name": s.name, "stated": dataclasses.asdict(s.costs), "found": now.figures()}
            for s, now in zip(recommended.settings, found, strict=True)
        ]
        click.echo(json.dumps({"model": model.name, "failures": lines, "settings": rows}))
    else:
        table = Table("setting", *(f"{field.name} (stated, margin)" for field in dataclasses.fields(Costs)))
        for setting, now in zip(recommended.settings, found, strict=True):
            pairs = [(now.figures()[field.name], getattr(setting.costs, field.name)) for field in dataclasses.fields(Costs)]
            table.add_row(setting.name, *(f"{value:.4f} ({told.value:.4f}, {told.margin:.4f})" for value, told in pairs))
        Console().print(table)
    for line in lines:
        console.print(line, markup=False, highlight=False)
    sys.exit(int(bool(lines)))


if __name__ == "__main__":
    main()
