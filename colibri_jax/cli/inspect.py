"""`colibri-jax inspect`: what a model directory holds, and what of it would fit in memory."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import click

from colibri_jax.cli.options import BYTES_PER_GB, model_argument, model_directory, parse_gigabytes
from colibri_jax.container.inspect import describe


@click.command()
@model_argument
@click.option(
    "--ram-gb",
    type=parse_gigabytes,
    metavar="GB",
    envvar="RAM_GB",
    show_envvar=True,
    help="Memory to plan for; this machine's if not given.",
)
@click.option("--group-size", type=click.IntRange(min=1), help="Quantisation group of an untagged container that allows several readings.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def inspect(model_dir: Path | None, ram_gb: float | None, group_size: int | None, as_json: bool) -> None:
    """Show architecture, formats, bytes per expert, layer and token, and what would fit in memory.

    MODEL_DIR is a container (default: SNAP, else the model that ships). No weights are read.
    """
    ram_bytes = _physical_memory() if ram_gb is None else round(ram_gb * BYTES_PER_GB)
    summary = describe(model_directory(model_dir), ram_bytes=ram_bytes, group_size=group_size)
    if as_json:
        click.echo(json.dumps(dataclasses.asdict(summary), ensure_ascii=False, default=str))
        return
    for line in summary.lines():
        click.echo(line)


def _physical_memory() -> int:
    """Bytes of memory that this machine has."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
