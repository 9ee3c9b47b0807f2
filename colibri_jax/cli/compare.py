"""`colibri-jax compare`: reference and native on the same container, side by side."""

from __future__ import annotations

import json
import math
import resource
from pathlib import Path
from typing import Any, Literal

import click
from rich.console import Console
from rich.progress import Progress

from colibri_jax.cli.auto_budget import is_recommended, resolve_auto
from colibri_jax.cli.budget_profile import resolve_profile
from colibri_jax.cli.options import (
    BYTES_PER_GB,
    effective_options,
    group_size_option,
    in_bytes,
    model_argument,
    model_directory,
    ram_option,
    routing_from,
    routing_options,
)
from colibri_jax.config import ModelConfig
from colibri_jax.container.directory import read_config
from colibri_jax.errors import OptionError
from colibri_jax.generate.notes import budget_notes
from colibri_jax.generate.texts import read_documents
from colibri_jax.tensors import tensor_specs
from colibri_jax.tokenizer import ChatTokenizer

EXIT_DIFFERENT = 1

MOST_LAYERS = 10_000
# Share of the free memory that the reference may take before "auto" loads it layer by layer; the rest is for what it computes.
MEMORY_SHARE = 0.7

EPILOG = """\b
The four comparisons
  (i)   The reference's expert selection on the native router logits: equal in
        every field, no tolerance.
  (ii)  Part by part (embedding, layers, head), the reference fed the native
        input, cache and selection: within a few ulp on 99.9 % of rows, every
        other row explained by the quantiser boundary that it crossed.
  (iii) The whole model with float32 activations: relative error of logits and
        router logits at most 2e-5, selections equal except near-ties, which are
        listed with their margins.
  (iv)  The whole model as shipped: differing selections, KLD and the first
        differing greedy token, with margins.
\b
Models larger than memory
  The native engine runs first and is let go. The reference then takes all steps
  through one layer after the other. "--residency all" holds all of its layers
  in memory, float32 in (iii): 4 bytes a parameter. "--residency layer" holds one
  at a time (embedding and head count as one each), and of its experts the kept
  ones, 8 at a time, read from disk as they are needed: slow, but then memory
  need only hold the engine ("--ram-gb") or the largest layer. "auto" takes
  "layer" where the parameters would not fit, and says so; the greedy tokens,
  for which every token would load all layers anew, are then left out unless
  "--greedy" asks for them.
  To check a few layers of a very large model, name them:
      colibri-jax compare DIR --layers 3,40-42 --ram-gb 16 --tokens 16
\b
Exit status: 0 when all that were done hold, 1 when one does not.
"""


def parse_layers(text: str) -> tuple[int, ...]:
    """Numbers and ranges, both ends included, separated by commas."""
    found: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        bounds = (first, last if dash else first)
        if not all(bound.isascii() and bound.isdigit() for bound in bounds) or int(bounds[0]) > int(bounds[1]):
            raise click.BadParameter(f"{text!r} is not a list such as 3,40-42")
        if int(bounds[1]) >= MOST_LAYERS:
            raise click.BadParameter(f"no model has a layer {bounds[1]}")
        found.update(range(int(bounds[0]), int(bounds[1]) + 1))
    return tuple(sorted(found))


@click.command(epilog=EPILOG)
@model_argument
@click.option(
    "--prompt", envvar="PROMPT", show_envvar=True, default="Explain recursion in programming.", show_default=True, help="Put to the model."
)
@click.option(
    "--text",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help='Take the tokens from this file instead of the prompt: plain text, or (.jsonl) lines of {"text": …}.',
)
@click.option("--tokens", type=click.IntRange(min=1), default=128, show_default=True, help="Teacher-forced tokens.")
@click.option("--prefill", type=click.IntRange(min=1), default=64, show_default=True, help="How many of them go through one prefill step.")
@click.option(
    "--verify-rows",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Rows of the steps after it; above 1 their scope is verify.",
)
@click.option(
    "--greedy",
    type=click.IntRange(min=0),
    default=32,
    show_default=True,
    help="Tokens that both generate from the prompt (with --text: from the tokens of the prefill step); 0 leaves it out.",
)
@routing_options
@click.option(
    "--layers",
    type=parse_layers,
    metavar="A,B-C",
    help="Do (i) and (ii) on these layers alone, say 3,40-42. One that shares another's choice of positions brings that one along.",
)
@click.option(
    "--residency",
    type=click.Choice(["auto", "all", "layer"]),
    default="auto",
    show_default=True,
    help="How much of the reference to hold in memory; see below. Changes no result.",
)
@click.option(
    "--cache-experts", type=click.IntRange(min=1), help="Experts per layer that the native engine keeps; changes no result.  [default: 8]"
)
@ram_option("Memory the native engine may allocate, instead of a count of experts.")
@group_size_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_context
def compare(ctx: click.Context, /, **_: Any) -> None:
    """Run reference and native side by side on the container MODEL_DIR (default: SNAP, else the model that ships)."""
    # Needs jax and the extension, which `--help` shall not wait for.
    from colibri_jax.compare import CompareOptions
    from colibri_jax.compare import compare as run

    options, auto = resolve_auto(effective_options(ctx))
    options = resolve_profile(options, rows=options["verify_rows"].value, chunk=options["prefill"].value)
    value = {name: option.value for name, option in options.items()}
    directory = model_directory(value["model_dir"])
    routing, scopes = routing_from(options)
    if value["text"] and options["prompt"].source == "flag":
        raise OptionError("two sources of tokens", where="--prompt, --text", expected="one of them", got="both")
    config = read_config(directory)[0]
    residency, notes = _residency(value["residency"], config, value["layers"])
    if residency == "layer" and options["greedy"].source == "default" and value["layers"] is None:
        value["greedy"] = 0
        notes.append("no greedy tokens, for which every token would load all layers anew: --greedy N asks for them")
    for note in notes:
        click.echo(note, err=True)
    if auto is not None:
        click.echo(auto.line(), err=True)
    for note in budget_notes(config, routing, scopes, largest_prefill_step=value["prefill"], measured=is_recommended(auto, routing)):
        click.echo(note, err=True)
    tokenizer = ChatTokenizer.from_directory(directory)
    prompt_ids = (
        _text_ids(tokenizer, value["text"], value["tokens"])
        if value["text"]
        else tokenizer.encode_chat([{"role": "user", "content": value["prompt"]}])
    )
    with Progress(transient=True, console=Console(stderr=True)) as bars:
        tasks: dict[str, Any] = {}

        def progress(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=total)
            bars.update(tasks[what], completed=done)

        report = run(
            directory,
            prompt_ids,
            routing=routing,
            budget_scopes=scopes,
            options=CompareOptions(
                tokens=value["tokens"], prefill=value["prefill"], verify_rows=value["verify_rows"], greedy=value["greedy"]
            ),
            cache_experts=value["cache_experts"],
            ram_bytes=None if value["ram_gb"] is None else in_bytes(value["ram_gb"]),
            residency=residency,
            layers=value["layers"],
            group_size=value["group_size"],
            progress=progress,
        )
    if value["as_json"]:
        click.echo(json.dumps(report.to_json(), ensure_ascii=False))
    else:
        click.echo("\n".join(report.lines()))
    ctx.exit(0 if report.passed else EXIT_DIFFERENT)


def _residency(asked: str, config: ModelConfig, layers: tuple[int, ...] | None) -> tuple[Literal["all", "layer"], list[str]]:
    """How the reference is held in memory, and what to say about it."""
    from colibri_jax.engine.options import free_memory_bytes

    if asked != "auto":
        return ("all" if asked == "all" else "layer"), []
    if layers is not None:
        return "layer", []
    needed, free = 4 * sum(math.prod(spec.shape) for spec in tensor_specs(config)), free_memory_bytes()
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit != resource.RLIM_INFINITY:
        free = min(free, limit)
    if needed <= MEMORY_SHARE * free:
        return "all", []
    sizes = f"{needed / BYTES_PER_GB:.1f} GB in float32, {free / BYTES_PER_GB:.1f} GB free"
    return "layer", [f"the reference is held one layer at a time ({sizes}); --residency all holds all of it"]


def _text_ids(tokenizer: ChatTokenizer, path: Path, n: int) -> list[int]:
    """The first n tokens of a file, each document with the model's prefix.

    Raises:
        OptionError: the file is not what its name says, or too short.
    """
    ids: list[int] = []
    for document in read_documents(path):
        ids += tokenizer.encode_raw(document)
        if len(ids) >= n:
            return ids[:n]
    raise OptionError("text too short", where=str(path), expected=f"{n} tokens", got=len(ids))
