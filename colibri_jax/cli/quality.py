"""`colibri-jax quality`: what budgets cost in quality, and what they save."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_args

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from colibri_jax.cli.budgets import ProfileShare, parse_one_of_several
from colibri_jax.cli.options import (
    Command,
    apply_all,
    effective_options,
    group_size_option,
    load_arguments,
    model_argument,
    model_directory,
    ram_option,
)
from colibri_jax.cli.sensitivity import sensitivity_option, table_console
from colibri_jax.errors import OptionError
from colibri_jax.routing_spec import POLICIES, Denominator, Vote

if TYPE_CHECKING:
    from colibri_jax.cli.budget_profile import ContainerProfiles
    from colibri_jax.quality.report import QualityReport, Row
    from colibri_jax.quality.settings import Choices
    from colibri_jax.quality.statistics import Estimate
    from colibri_jax.quality.steps import StepShape

T = TypeVar("T")

EXIT_CONTROL = 1
# Named here too, because `--help` shall not wait for the package that defines them; a test compares.
STEP_KINDS = ("decode", "verify", "prefill", "prefill_then_decode", "all")

EPILOG = """\b
Lists are separated by commas; every combination is measured. A budget may be a
list itself, one number per MoE layer: 8:8:6:6:4. "off" is no budget, and
"profile:0.65" the list that costs least by the layers' measured sensitivities
among those that need 65 % of the expert bytes.
\b
Steps (--scopes): the budget acts where it would act in use, and nowhere else
  decode               a prefix without a budget, unscored, then one position a
                       step with it
  verify               the same prefix, then steps of --rows positions that share
                       a budget; every draft is taken to be accepted
  prefill              the window as a prompt, in steps of --chunk positions
  prefill_then_decode  a prompt of --prompt positions with the budget, then one
                       position a step without: what is left of an answer
                       after its prompt was cut ("following")
  all                  the same with the budget everywhere
\b
Figures, per token, against the same engine without a budget
  KLD        KL(off || cut) in nats; the errors are those of independent tokens,
             in brackets those of independent windows
  same top   share of tokens whose most probable successor is the same
  PPL x      perplexity against off; "corr." is that of the tokens' NLLs
  experts    distinct experts per layer and step, against off in the same steps;
             "bytes" are their bytes, as if nothing were cached
  mass       share of router scores kept; "emptied" are positions per layer left
             without any expert
\b
Sensitivity (--sensitivity)
  Every MoE layer is cut alone, with every budget; steps, policy, denominator,
  vote and floor are one each. The result is written to budget_profile.json
  beside the container, or to the file named, and --budget profile:SHARE (or
  profile:SHARE:FILE) of all commands chooses by it.
\b
With --resume DIR, windows that were measured before are not measured again: give
the same command after an interruption. Exit status: 0, or 1 where the model does
not agree with itself (the control, which is always run).
"""


def list_of(one: Callable[[str], T]) -> Callable[[str], tuple[T, ...]]:
    """A parser of values separated by commas."""

    def parse(text: str) -> tuple[T, ...]:
        return tuple(one(part.strip()) for part in text.split(","))

    parse.__name__ = "list"
    return parse


def one_of(known: Sequence[str]) -> Callable[[str], str]:
    """A parser of names."""

    def parse(text: str) -> str:
        if text not in known:
            raise click.BadParameter(f"{text!r} is none of {', '.join(known)}")
        return text

    return parse


def number(kind: type[T]) -> Callable[[str], T]:
    """A parser of numbers."""

    def parse(text: str) -> T:
        try:
            return kind(text)  # type: ignore[call-arg]
        except ValueError:
            raise click.BadParameter(f"{text!r} is not a number") from None

    return parse


def what_to_measure(command: Command) -> Command:
    """Lists whose combinations are measured."""

    def choice(flag: str, name: str, parse: Callable[[str], Any], default: str, text: str) -> Callable[[Command], Command]:
        return click.option(flag, name, type=list_of(parse), default=default, show_default=True, metavar="LIST", help=text)

    return apply_all(
        [
            choice("--budgets", "budgets", parse_one_of_several, "6,4", "Distinct experts per layer and step."),
            choice("--policies", "policies", one_of(POLICIES), "aggregate", "Which experts are kept; see generate --help."),
            choice("--scopes", "scopes", one_of(STEP_KINDS), "decode", "In which steps; see below."),
            choice("--denominators", "denominators", one_of(get_args(Denominator)), "survivors", "What scores are divided by."),
            choice("--votes", "votes", one_of(get_args(Vote)), "weights", "What experts are ranked by."),
            choice("--floor", "floors", number(int), "1", "Experts that every position keeps under floor, substitute and coverage."),
            choice("--coverage", "coverages", number(float), "1", "Share of the votes that coverage keeps."),
            choice("--route-top", "route_tops", number(int), "2", "Experts of every position that cache_route never exchanges."),
            choice("--route-within", "route_withins", number(int), "12", "Places in which cache_route prefers cached experts."),
            choice("--expert-topk", "expert_topks", number(int), "0", "Experts per position, in every step; 0 is off."),
            choice("--expert-topp", "expert_topps", number(float), "0", "Share of a position's score, in every step; 0 is off."),
            click.option("--allow-irreproducible", is_flag=True, help="Permit policies whose result depends on the cache."),
        ],
        command,
    )


def how_to_run(command: Command) -> Command:
    """Text, sizes of steps, and the engine."""
    return apply_all(
        [
            click.option(
                "--text",
                "files",
                type=click.Path(exists=True, dir_okay=False, path_type=Path),
                multiple=True,
                required=True,
                help='Plain text, or (.jsonl) lines of {"text": …}; repeatable.',
            ),
            click.option("--tokens", type=click.IntRange(min=2), help="Scored tokens, in whole windows; all of the text if not given."),
            click.option("--window", type=click.IntRange(min=2), default=256, show_default=True, help="Positions from an empty context."),
            click.option("--prefix", type=click.IntRange(min=0), default=64, show_default=True, help="Of decode and verify."),
            click.option("--prompt", type=click.IntRange(min=1), default=128, show_default=True, help="Of prefill_then_decode and all."),
            click.option("--rows", type=click.IntRange(min=1), default=4, show_default=True, help="Positions of a verification step."),
            click.option("--chunk", type=click.IntRange(min=1), default=64, show_default=True, help="Most prompt positions in one step."),
            click.option("--control-windows", type=click.IntRange(min=1), default=2, show_default=True, help="Where off meets itself."),
            click.option("--resume", type=click.Path(file_okay=False, path_type=Path), help="Keep results of windows here."),
            click.option("--backend", type=click.Choice(["native", "reference"]), default="native", show_default=True),
            click.option("--precision", type=click.Choice(["w4a8", "w4a32"]), default="w4a8", show_default=True, help="Of activations."),
            click.option(
                "--cache-experts",
                type=click.IntRange(min=1),
                help="Experts kept in memory per layer; changes no figure but those of resident and cache_route.",
            ),
            ram_option("Memory that the engine may allocate, instead of a count of experts."),
            click.option("--threads", type=click.IntRange(min=1), help="Threads of the engine."),
            group_size_option,
            sensitivity_option,
            click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), help="Draw KLD against bytes: .svg, .png or .pdf."),
            click.option("--json", "as_json", is_flag=True, help="Print one JSON object."),
        ],
        command,
    )


@click.command(epilog=EPILOG)
@model_argument
@what_to_measure
@how_to_run
@click.pass_context
def quality(ctx: click.Context, /, **_: Any) -> None:
    """Measure what expert budgets cost the container MODEL_DIR (default: SNAP, else the model that ships) in quality."""
    from colibri_jax.cli import sensitivity
    from colibri_jax.cli.budget_profile import ContainerProfiles
    from colibri_jax.container.reader import Container
    from colibri_jax.load import load
    from colibri_jax.plots import check_plot, draw
    from colibri_jax.quality.costs import expert_bytes_per_layer
    from colibri_jax.quality.report import make_report, panels
    from colibri_jax.quality.run import Plan, measure
    from colibri_jax.quality.settings import make_settings
    from colibri_jax.quality.store import ResultStore, model_fingerprint
    from colibri_jax.quality.windows import enough, read_windows, scored_per_window
    from colibri_jax.tokenizer import ChatTokenizer

    options = effective_options(ctx)
    value = {name: option.value for name, option in options.items()}
    if value["plot"] is not None:
        check_plot(value["plot"])
    directory = model_directory(value["model_dir"])
    container = Container.open(directory, group_size=value["group_size"])
    config, window = container.runnable_config, value["window"]
    if window > config.max_positions:
        raise OptionError("the model has no room for a window", where="--window", expected=f"at most {config.max_positions}", got=window)
    shapes = [_shape(kind, value) for kind in dict.fromkeys(value["scopes"])]
    profiles = ContainerProfiles(directory, value["group_size"])
    if value["sensitivity"] is not None:
        file, settings = sensitivity.prepare(value, shapes, profiles, config)
    else:
        settings = {shape: make_settings(shape, _choices(value, shape, profiles), config) for shape in shapes}
    for shape in shapes:
        scored_per_window(shape, window)
    windows = read_windows(value["files"], ChatTokenizer.from_directory(directory), window)
    plans = [Plan(shape, enough(windows, shape, value["tokens"]), settings[shape]) for shape in shapes]
    model = load(directory, **load_arguments(options), context_positions=window)
    store = ResultStore(value["resume"], model_fingerprint(container, value["backend"], value["precision"]))
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task("", total=None)
        measured = measure(
            model,
            plans,
            store=store,
            control_windows=value["control_windows"],
            progress=lambda what, done, total: bars.update(task, description=what, completed=done, total=total),
        )
    text = [file.name for file in value["files"]]
    if value["sensitivity"] is not None:
        ctx.exit(sensitivity.finish(measured[0], container, value, file, profiles.model, text))
    conditions = {
        "model": directory.name,
        "backend": value["backend"],
        "precision": value["precision"],
        "text": text,
        "window": window,
        "windows": {plan.shape.kind: len(plan.windows) for plan in plans},
        "expert_bytes_per_layer": expert_bytes_per_layer(container).tolist(),
    }
    report = make_report(measured, expert_bytes_per_layer(container), conditions)
    if value["as_json"]:
        click.echo(json.dumps(report.to_json(), allow_nan=False))
    else:
        show(report)
    if value["plot"] is not None:
        draw(value["plot"], "Quality against bytes", panels(report))
    ctx.exit(0 if report.passed else EXIT_CONTROL)


def _shape(kind: str, value: dict[str, Any]) -> StepShape:
    from colibri_jax.quality.steps import StepShape

    prefix = value["prompt"] if kind in ("prefill_then_decode", "all") else value["prefix"]
    return StepShape(kind=kind, prefix=prefix, rows=value["rows"], chunk=value["chunk"])  # type: ignore[arg-type]


def _choices(value: dict[str, Any], shape: StepShape, profiles: ContainerProfiles) -> Choices:
    from colibri_jax.quality.settings import Choices

    # What a profile gives depends on the steps and on the rule.
    budgets = [functools.partial(profiles.budgets, one, shape) if isinstance(one, ProfileShare) else one for one in value["budgets"]]
    return Choices(**{field.name: value[field.name] for field in dataclasses.fields(Choices)} | {"budgets": budgets})


def show(report: QualityReport) -> None:
    """Tables for people: the figures that decide, how KLD and Δp are distributed, and the layers."""
    console = table_console()
    runs = [row for row in report.rows if row.run_as is None]
    for table in (_main_table(report.rows), _spread_table(runs), _layer_table(runs)):
        console.print(table)
    for row in report.rows:
        if row.run_as is not None:
            console.print(f"{row.setting.name}: the same as {row.run_as} by construction")
    for control in report.controls:
        verdict = "holds" if control.holds else "FAILS: no figure above means anything"
        console.print(
            f"control, {control.steps}: off against itself, {control.tokens} tokens, |KLD| at most {control.largest_kld:g}: {verdict}"
        )
    console.print(", ".join(f"{name} {value}" for name, value in report.conditions.items()))


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", collapse_padding=True)
    table.add_column("setting", no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right")
    return table


def _name(row: Row) -> str:
    return row.setting.name if row.group in ("decoded", "verified") else f"{row.setting.name} [{row.group}]".replace("[", r"\[")


def _plus_minus(estimate: Estimate, digits: int = 4) -> str:
    return f"{estimate.value:.{digits}f} ±{estimate.error:.{digits}f}"


def _main_table(rows: Sequence[Row]) -> Table:
    table = _table("Quality and cost", "tokens", "KLD", "p99", "same top", "PPL ×", "experts", "bytes", "mass", "emptied")
    for row in rows:
        s, cost = row.summary, row.costs.to_json(row.bytes_L)
        table.add_row(
            _name(row),
            str(s.tokens),
            f"{_plus_minus(s.kld)} ({s.kld_windows.error:.4f})",
            f"{s.kld_percentiles['99']:.3f}",
            _plus_minus(s.same_top, 3),
            _plus_minus(s.ppl_ratio, 3),
            f"{cost['distinct_kept']:.2f} of {row.base_costs.to_json(row.bytes_L)['distinct_kept']:.2f}",
            f"{row.share:.1%}",
            f"{cost['mass_kept']:.3f}",
            str(cost["emptied_positions"]),
        )
    return table


def _spread_table(rows: Sequence[Row]) -> Table:
    from colibri_jax.quality.statistics import PERCENTILES

    table = _table("Percentiles of KLD, and probabilities of the true token", *PERCENTILES, "mean Δp", "RMS Δp", "PPL", "corr.")
    for row in rows:
        s = row.summary
        table.add_row(
            _name(row),
            *(
                f"{s.kld_percentiles[name]:.1e}" if s.kld_percentiles[name] < 1e-3 else f"{s.kld_percentiles[name]:.3f}"
                for name in PERCENTILES
            ),
            f"{s.delta_p.value:+.2%} ±{s.delta_p.error:.2%}",
            f"{s.delta_p_rms.value:.2%} ±{s.delta_p_rms.error:.2%}",
            f"{s.ppl_cut.value:.2f}",
            f"{s.log_ppl_correlation:.4f}",
        )
    return table


def _layer_table(rows: Sequence[Row]) -> Table:
    layers = len(rows[0].bytes_L) if rows else 0
    table = _table("Distinct experts per step, and mass kept, by MoE layer", *map(str, range(layers)))
    for row in rows:
        cost = row.costs.to_json(row.bytes_L)["layers"]
        table.add_row(_name(row), *(f"{k:.1f} {m:.3f}" for k, m in zip(cost["distinct_kept"], cost["mass_kept"], strict=True)))
    return table
