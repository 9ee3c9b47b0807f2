"""`colibri-jax inspect`: what a model directory holds, and what of it would fit in memory."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import click

from colibri_jax.cli.options import group_size_option, in_bytes, model_argument, model_directory, ram_option
from colibri_jax.container.inspect import describe


@click.command()
@model_argument
@ram_option("Memory to plan for; this machine's if not given.")
@group_size_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def inspect(model_dir: Path | None, ram_gb: float | None, group_size: int | None, as_json: bool) -> None:
    """Show architecture, formats, bytes per expert, layer and token, and what would fit in memory.

    MODEL_DIR is a container (default: SNAP, else the model that ships). No weights are read.
    """
    ram_bytes = _physical_memory() if ram_gb is None else in_bytes(ram_gb)
    summary = describe(model_directory(model_dir), ram_bytes=ram_bytes, group_size=group_size)
    if as_json:
        click.echo(json.dumps(dataclasses.asdict(summary), ensure_ascii=False, default=str))
        return
    for line in summary.lines():
        click.echo(line)


def _physical_memory() -> int:
    """Bytes of memory that this machine has."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
