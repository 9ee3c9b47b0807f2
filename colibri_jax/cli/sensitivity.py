"""`colibri-jax quality --sensitivity`: every MoE layer cut alone, as a profile that lists of budgets are chosen by."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.table import Table

from colibri_jax.errors import OptionError

if TYPE_CHECKING:
    from colibri_jax.cli.budget_profile import ContainerProfiles
    from colibri_jax.config import ModelConfig
    from colibri_jax.container.reader import Container
    from colibri_jax.quality.profile import Chosen, Sensitivity
    from colibri_jax.quality.run import Measured
    from colibri_jax.quality.settings import Setting
    from colibri_jax.quality.steps import StepShape

BESIDE = "beside the container"
# Shares that the table gives the lists of, as far as there are any.
SHOWN_SHARES = (0.9, 0.75, 0.65, 0.5)
ONE_EACH = {"scopes": "--scopes", "policies": "--policies", "denominators": "--denominators", "votes": "--votes", "floors": "--floor"}
TABLE_WIDTH = 220

sensitivity_option = click.option(
    "--sensitivity",
    is_flag=False,
    flag_value=BESIDE,
    metavar="[FILE]",
    help="Cut every layer alone with every budget, and keep the result in FILE or, as the last flag, beside the container.",
)


def table_console() -> Console:
    """Where tables are printed: a pipe has no width of its own, and 80 columns would cut the figures."""
    console = Console()
    return console if console.is_terminal else Console(width=TABLE_WIDTH)


def prepare(
    value: dict[str, Any], shapes: Sequence[StepShape], profiles: ContainerProfiles, config: ModelConfig
) -> tuple[Path, dict[StepShape, list[Setting]]]:
    """Where the profile goes, and what is to be measured; everything that can be refused is, before hours of measuring.

    Raises:
        OptionError: steps or rules are not one each, or none that a profile can be measured of; the file's directory does not exist.
        ProfileFileError, ProfileModelError: the file is something else already.
    """
    from colibri_jax.quality.profile import layer_settings
    from colibri_jax.quality.profile_file import read_profiles

    for name, flag in ONE_EACH.items():
        if len(value[name]) != 1:
            raise OptionError("a profile is of one rule", where=flag, expected="one value", got=", ".join(map(str, value[name])))
    if value["plot"] is not None:
        raise OptionError("a profile has no curve", where="--plot", expected="not together with --sensitivity", got="both")
    counts = [budget for budget in value["budgets"] if isinstance(budget, int)]
    if len(counts) < len(value["budgets"]):
        raise OptionError("a single layer has a single budget", where="--budgets", expected="counts of experts", got="a list or a profile")
    file = profiles.file(None if value["sensitivity"] == BESIDE else Path(value["sensitivity"]))
    if not file.parent.is_dir():
        raise OptionError("no place for the profile", where="--sensitivity", expected="a file in an existing directory", got=file)
    read_profiles(file, profiles.model)
    (shape,) = shapes
    return file, {shape: layer_settings(shape, _rule(value), counts, config)}


def finish(measured: Measured, container: Container, value: dict[str, Any], file: Path, model: str, text: Sequence[str]) -> int:
    """Write and show the profile, unless the model did not agree with itself.

    Returns:
        The exit status.
    """
    from colibri_jax.quality.costs import expert_bytes_per_layer
    from colibri_jax.quality.profile import best, sensitivity_of
    from colibri_jax.quality.profile_file import write_profile
    from colibri_jax.quality.report import make_report

    bytes_L = expert_bytes_per_layer(container)
    passed = make_report([measured], bytes_L, {}).passed
    how = {name: value[name] for name in ("backend", "precision")}
    profile = sensitivity_of(measured, _rule(value), bytes_L, container.runnable_config, model=model, text=text, **how)
    if passed:
        write_profile(file, profile)
    chosen: dict[float, Chosen | None] = {}
    for share in SHOWN_SHARES:
        try:
            chosen[share] = best(profile, share)
        except OptionError:
            chosen[share] = None
    if value["as_json"]:
        shown = {f"{share:g}": None if one is None else vars(one) for share, one in chosen.items()}
        click.echo(json.dumps({"passed": passed, "file": str(file), "profile": profile.to_json(), "chosen": shown}, allow_nan=False))
    else:
        _show(profile, chosen)
        click.echo(f"written to {file}" if passed else "the model differs from itself; nothing was written")
    return 0 if passed else 1


def _rule(value: dict[str, Any]) -> Any:
    from colibri_jax.quality.settings import Choices

    rules = ("policies", "denominators", "votes", "floors", "coverages", "expert_topks", "expert_topps", "allow_irreproducible")
    found = list(Choices(budgets=(0,), **{name: value[name] for name in rules}).combined())
    if len(found) != 1:
        raise OptionError("a profile is of one rule", where="--coverage, --expert-topk, --expert-topp", expected="one value each")
    return found[0]


def _show(profile: Sensitivity, chosen: dict[float, Chosen | None]) -> None:
    console = table_console()
    title = f"KLD ±, in brackets distinct experts a step, where one layer alone is cut to N: {profile.describe()}, {profile.tokens} tokens"
    table = Table(title=title, title_justify="left")
    table.add_column("layer")
    for heading in ("off", *(f"N = {cut.budget}" for cut in profile.layers[0].cuts)):
        table.add_column(heading, justify="right")
    for layer in profile.layers:
        cells = [f"{cut.kld:.4f} ±{cut.kld_error:.4f} ({cut.kept / profile.steps:.2f})" for cut in layer.cuts]
        table.add_row(str(layer.layer), f"({layer.distinct / profile.steps:.2f})", *cells)
    console.print(table)
    for share, one in chosen.items():
        if one is None:
            console.print(f"profile:{share:g}: no list of these budgets reads so little", highlight=False)
        else:
            budgets = ",".join(str(n or "off") for n in one.budgets)
            console.print(f"profile:{share:g}: {budgets}, {one.share:.1%} of the expert bytes, KLD {one.kld:.4f}", highlight=False)
