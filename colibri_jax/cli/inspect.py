"""`colibri-jax inspect`: what a model directory holds, and what of it would fit in memory."""

from __future__ import annotations

import json
from pathlib import Path

import click

from colibri_jax.cli.options import BYTES_PER_GB, model_argument, model_directory


@click.command()
@model_argument
@click.option(
    "--ram-gb",
    type=click.FloatRange(min=0, min_open=True),
    envvar="RAM_GB",
    show_envvar=True,
    help="Memory to plan for, in 10^9 bytes; this machine's if not given.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def inspect(model_dir: Path | None, ram_gb: float | None, as_json: bool) -> None:
    """Show architecture, formats, bytes per expert, layer and token, and what would fit in memory.

    MODEL_DIR is a container or a Hugging Face directory (default: SNAP, else the model that ships).
    """
    from colibri_jax.container.inspect import describe

    summary = describe(model_directory(model_dir), ram_bytes=None if ram_gb is None else round(ram_gb * BYTES_PER_GB))
    if as_json:
        click.echo(json.dumps(summary.to_json(), ensure_ascii=False))
        return
    for line in summary.lines():
        click.echo(line)
