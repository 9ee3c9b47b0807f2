"""Options that commands share, the one place where the environment is read, and what they become."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_args

import click
from click.core import ParameterSource

from colibri_jax.cli.budgets import parse_budgets
from colibri_jax.container.reader import refuse_unfinished
from colibri_jax.errors import MissingFileError, OptionError
from colibri_jax.generate.report import OptionValue
from colibri_jax.routing_spec import POLICIES, SCOPES, Denominator, RoutingOptions, Scope, Vote

if TYPE_CHECKING:
    from colibri_jax.config import ModelConfig
    from colibri_jax.engine.usage import ExpertUsage

Command = TypeVar("Command", bound=Callable[..., Any])

BYTES_PER_GB = 1e9
READER_CHOICE = click.Choice(["auto", "pread", "uring"])

# A checkout or an installation that ships no model has no such directory; the error then says what to give.
SHIPPED_MODEL = Path(__file__).parent.parent / "models" / "tiny-glm-moe-dsa"


def parse_gigabytes(value: str | float) -> float:
    """An amount in 10^9 bytes: finite, at least one byte, and few enough for 63 bits to count."""
    try:
        gigabytes = float(value)
    except ValueError:
        raise click.BadParameter(f"{value!r} is not a number") from None
    if not 1 / BYTES_PER_GB <= gigabytes < 2**63 / BYTES_PER_GB:
        raise click.BadParameter(f"{value!r} is not an amount of bytes")
    return gigabytes


def in_bytes(gigabytes: float) -> int:
    """An amount in 10^9 bytes as a whole number of bytes."""
    return round(gigabytes * BYTES_PER_GB)


def ram_option(purpose: str) -> Callable[[Command], Command]:
    """--ram-gb, which means memory of one thing or another."""
    return click.option("--ram-gb", type=parse_gigabytes, metavar="GB", envvar="RAM_GB", show_envvar=True, help=purpose)


def group_size_option(command: Command) -> Command:
    """--group-size of a container."""
    return click.option(
        "--group-size", type=click.IntRange(min=1), help="Quantisation group of an untagged container that allows several readings."
    )(command)


def apply_all(decorators: Iterable[Callable[[Command], Command]], command: Command) -> Command:
    for decorator in reversed(list(decorators)):
        command = decorator(command)
    return command


def model_argument(command: Command) -> Command:
    """MODEL_DIR: the argument, else SNAP, else the model that ships."""
    return click.argument("model_dir", required=False, envvar="SNAP", type=click.Path(path_type=Path))(command)


def routing_options(command: Command) -> Command:
    """The budget and the two per-position cuts."""
    return apply_all(
        [
            click.option(
                "--budget",
                type=parse_budgets,
                metavar="N|off|auto|N,N,…|profile:SHARE",
                default="off",
                envvar="EXPERT_BUDGET",
                show_envvar=True,
                show_default=True,
                help="Most distinct experts a layer may use in one step; a list names one for each MoE layer. auto: the setting that "
                "recommended.json beside the model names, if the model is larger than this machine's memory, else off. profile:0.65: the "
                "list for 65 % of the expert bytes by the model's budget_profile.json (quality --sensitivity).",
            ),
            click.option(
                "--budget-scope",
                "budget_scope",
                type=click.Choice([*SCOPES, "all"]),
                multiple=True,
                default=("decode",),
                show_default=True,
                help="Kind of step that the budget applies to; repeatable.",
            ),
            click.option(
                "--policy", type=click.Choice(POLICIES), default="aggregate", show_default=True, help="Which experts it keeps; see below."
            ),
            click.option(
                "--floor",
                type=click.IntRange(min=1),
                default=1,
                show_default=True,
                help="Experts of every position that policies floor, substitute and coverage always keep.",
            ),
            click.option(
                "--coverage",
                type=float,
                default=1.0,
                show_default=True,
                help="Share of a layer's votes that policy coverage keeps; below 1 it acts without a budget too.",
            ),
            click.option(
                "--route-top",
                type=click.IntRange(min=0),
                default=2,
                show_default=True,
                help="Experts of every position that policy cache_route never exchanges: its best.",
            ),
            click.option(
                "--route-within",
                type=click.IntRange(min=0),
                default=12,
                show_default=True,
                help="Policy cache_route prefers cached experts among so many of a position's best; 0 is off.",
            ),
            click.option(
                "--allow-irreproducible",
                is_flag=True,
                help="Permit policies resident and cache_route, whose text depends on the cache.",
            ),
            click.option(
                "--denominator",
                type=click.Choice(get_args(Denominator)),
                default="survivors",
                show_default=True,
                help="What a cut position's scores are divided by, where the model normalises: the sum of what is left, or of before.",
            ),
            click.option(
                "--vote",
                type=click.Choice(get_args(Vote)),
                default="weights",
                show_default=True,
                help="What experts are ranked by: the weights they got, or the scores of all experts.",
            ),
            click.option(
                "--expert-topk",
                type=click.IntRange(min=0),
                default=0,
                envvar="TOPK",
                show_envvar=True,
                help="At most this many experts per position, in every scope; 0 is off.",
            ),
            click.option(
                "--expert-topp",
                type=float,
                default=0.0,
                envvar="TOPP",
                show_envvar=True,
                help="Per position the fewest experts that hold this share of its score, in every scope; 0 and 1 are off.",
            ),
        ],
        command,
    )


def engine_options(command: Command) -> Command:
    """How the model is loaded and run; nothing here but --backend and --precision may change a bit of the output."""
    return apply_all(
        [
            click.option(
                "--cache-experts",
                type=click.IntRange(min=1),
                envvar="CAP",
                show_envvar=True,
                help="Experts kept in memory per layer. Not together with --ram-gb.",
            ),
            ram_option("Memory the engine may allocate (the interpreter comes on top); the cache takes what the dense weights leave."),
            click.option(
                "--cache-policy",
                type=click.Choice(["step_lfu", "lru"]),
                help="Which experts a full cache keeps: those of the newest step, then the most used of late (step_lfu, the default), "
                "or the most recently used.",
            ),
            click.option("--threads", type=click.IntRange(min=1), help="Threads of the engine; its own choice if not given."),
            click.option("--io-threads", type=click.IntRange(min=1), help="Experts being read at a time; 2 if not given."),
            click.option("--io", type=click.Choice(["direct", "buffered"]), help="Read experts past the page cache, or through it."),
            click.option(
                "--reader",
                type=READER_CHOICE,
                envvar="READER",
                show_envvar=True,
                help="Read with threads that call pread, or through the kernel's io_uring; auto, the default, takes pread.",
            ),
            click.option(
                "--pipe/--no-pipe",
                default=None,
                envvar="PIPE",
                show_envvar=True,
                help="Read a layer's experts ahead of its products (the default), or each when its turn has come.",
            ),
            click.option(
                "--pilot/--no-pilot",
                default=None,
                envvar="PILOT",
                show_envvar=True,
                help="Read the next layer's likely experts while a layer works. Off by default.",
            ),
            click.option(
                "--usage-file",
                type=click.Path(dir_okay=False, path_type=Path),
                help="Count here which experts are used, over all runs that name the file. It is made where there is none.",
            ),
            click.option(
                "--pin",
                type=click.IntRange(min=0),
                default=0,
                help="Keep this many of a layer's most used experts in memory, by the usage file, beside the cache.",
            ),
            click.option("--isa", help="Instruction set of the kernels; the best of this CPU if not given."),
            click.option(
                "--precision",
                type=click.Choice(["full", "w4a8", "w4a32"]),
                help="Arithmetic: int4 weights with int8 or float32 activations, or (reference, unconverted checkpoint) as stored.",
            ),
            group_size_option,
        ],
        command,
    )


def model_directory(given: Path | None) -> Path:
    """The directory to load.

    Raises:
        MissingFileError: it does not exist.
    """
    if given is None:
        if not SHIPPED_MODEL.is_dir():
            raise MissingFileError(
                "no model given, and none ships with this installation", where="MODEL_DIR", expected="a directory, or SNAP", got="nothing"
            )
        return SHIPPED_MODEL
    if not given.is_dir():
        raise MissingFileError(
            "no such model directory", where=str(given), expected="a directory", got="a file" if given.exists() else "nothing"
        )
    refuse_unfinished(given)
    return given


def effective_options(ctx: click.Context) -> dict[str, OptionValue]:
    """Every option of a command, with where its value came from.

    Raises:
        OptionError: both cache sizes were given in the same way; a flag sets the other one's environment variable aside.
    """
    found: dict[str, OptionValue] = {}
    for param in ctx.command.params:
        name = param.name
        if name is None or name not in ctx.params:
            continue
        source = ctx.get_parameter_source(name)
        if source is ParameterSource.ENVIRONMENT:
            where = str(param.envvar)
        else:
            where = "flag" if source is ParameterSource.COMMANDLINE else "default"
        found[name] = OptionValue(ctx.params[name], where)
    _one_cache_size(found)
    return found


def _one_cache_size(options: dict[str, OptionValue]) -> None:
    pair = [name for name in ("cache_experts", "ram_gb") if name in options and options[name].value is not None]
    if len(pair) < 2:
        return
    flags = [name for name in pair if options[name].source == "flag"]
    if len(flags) != 1:
        sources = ["--" + n.replace("_", "-") if options[n].source == "flag" else options[n].source for n in pair]
        raise OptionError("two sizes for one cache", where=" and ".join(sources), expected="one of them", got="both")
    other = next(name for name in pair if name not in flags)
    options[other] = OptionValue(None, f"{options[other].source} set aside by --{flags[0].replace('_', '-')}")


def routing_from(options: Mapping[str, OptionValue]) -> tuple[RoutingOptions, frozenset[Scope]]:
    """Routing options and the scopes of the budget.

    Raises:
        OptionError: a value is outside its domain.
    """
    value = {name: option.value for name, option in options.items()}
    chosen: set[Scope] = set()
    for scope in value["budget_scope"]:
        chosen.update(SCOPES if scope == "all" else (scope,))
    routing = RoutingOptions(
        expert_topk=value["expert_topk"],
        expert_topp=value["expert_topp"],
        budget=value["budget"],
        policy=value["policy"],
        denominator=value["denominator"],
        vote=value["vote"],
        floor=value["floor"],
        coverage=value["coverage"],
        route_top=value["route_top"],
        route_within=value["route_within"],
        allow_irreproducible=value["allow_irreproducible"],
    )
    return routing, frozenset(chosen)


def load_arguments(options: Mapping[str, OptionValue]) -> dict[str, Any]:
    """Keyword arguments of `colibri_jax.load` for what was asked for; the rest keeps the loader's own defaults."""
    value = {name: option.value for name, option in options.items()}
    arguments = {
        name: value.get(name)
        for name in (
            *("backend", "precision", "threads", "io_threads", "io", "reader", "pipe", "pilot", "isa", "group_size"),
            *("cache_experts", "cache_policy"),
        )
    }
    if value.get("ram_gb") is not None:
        arguments["ram_bytes"] = in_bytes(value["ram_gb"])
    return {name: argument for name, argument in arguments.items() if argument is not None}


def usage_from(options: Mapping[str, OptionValue], config: ModelConfig) -> ExpertUsage | None:
    """The counts of the usage file; None where none is named.

    Raises:
        OptionError: experts are to be pinned without a usage file, or by the reference.
        UsageFileError: the file is of another model, or of another kind.
    """
    file, pin, backend = (options[name].value for name in ("usage_file", "pin", "backend"))
    if file is None:
        if pin:
            raise OptionError("experts are pinned by how often they were used", where="--pin", expected="--usage-file too", got="none")
        return None
    if backend != "native":
        raise OptionError("an option of the native engine", where="--usage-file", expected="--backend native", got=backend)
    from colibri_jax.engine.usage import ExpertUsage

    return ExpertUsage.read(file, config)


def describe_options(options: Mapping[str, OptionValue]) -> str:
    """One line of effective values; those from the environment say so. What was left open is left out."""
    parts = []
    for name, option in options.items():
        from_environment = option.source not in ("flag", "default")
        if option.value is None and not from_environment:
            continue
        text = f"{name.replace('_', '-')}={show_value(name, option.value)}"
        parts.append(f"{text} ({option.source})" if from_environment else text)
    return "  ".join(parts)


def show_value(name: str, value: Any) -> str:
    """An option's value as one would write it on the command line."""
    if value is None or (value == 0 and name in ("budget", "expert_topk", "expert_topp")):
        return "off"
    if isinstance(value, tuple):
        return ",".join(str(v) for v in value)
    return f"{value:g}" if isinstance(value, float) else str(value)
