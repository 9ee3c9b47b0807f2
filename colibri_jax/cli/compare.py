"""`colibri-jax compare`: reference and native on the same container, side by side."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import Progress

from colibri_jax.cli.options import effective_options, model_argument, model_directory, routing_from, routing_options
from colibri_jax.container.directory import read_config
from colibri_jax.errors import OptionError
from colibri_jax.generate.notes import budget_notes
from colibri_jax.tokenizer import ChatTokenizer

EXIT_DIFFERENT = 1

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
Exit status: 0 when all hold, 1 when one does not.
"""


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
    "--cache-experts", type=click.IntRange(min=1), default=8, show_default=True, help="Cache of the native engine; changes no result."
)
@click.option("--group-size", type=click.IntRange(min=1), help="Quantisation group of an untagged container that allows several readings.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_context
def compare(ctx: click.Context, /, **_: Any) -> None:
    """Run reference and native side by side on the container MODEL_DIR (default: SNAP, else the model that ships)."""
    # Needs jax and the extension, which `--help` shall not wait for.
    from colibri_jax.compare import CompareOptions
    from colibri_jax.compare import compare as run

    options = effective_options(ctx)
    value = {name: option.value for name, option in options.items()}
    directory = model_directory(value["model_dir"])
    routing, scopes = routing_from(options)
    if value["text"] and options["prompt"].source == "flag":
        raise OptionError("two sources of tokens", where="--prompt, --text", expected="one of them", got="both")
    for note in budget_notes(read_config(directory)[0], routing, scopes, largest_prefill_step=value["prefill"]):
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
            group_size=value["group_size"],
            progress=progress,
        )
    if value["as_json"]:
        click.echo(json.dumps(report.to_json(), ensure_ascii=False))
    else:
        click.echo("\n".join(report.lines()))
    ctx.exit(0 if report.passed else EXIT_DIFFERENT)


def _text_ids(tokenizer: ChatTokenizer, path: Path, n: int) -> list[int]:
    """The first n tokens of a file, each document with the model's prefix.

    Raises:
        OptionError: the file is not what its name says, or too short.
    """
    ids: list[int] = []
    for document in _documents(path):
        ids += tokenizer.encode_raw(document)
        if len(ids) >= n:
            return ids[:n]
    raise OptionError("text too short", where=str(path), expected=f"{n} tokens", got=len(ids))


def _documents(path: Path) -> Iterator[str]:
    if path.suffix != ".jsonl":
        yield path.read_text(encoding="utf-8")
        return
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            try:
                text = json.loads(line)["text"]
            except (ValueError, KeyError, TypeError) as error:
                expected = '{"text": …}'
                raise OptionError("not a document", where=f"{path}, line {number}", expected=expected, got=line.strip()[:40]) from error
            yield str(text)
