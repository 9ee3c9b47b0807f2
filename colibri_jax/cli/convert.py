"""`colibri-jax convert`: a Hugging Face checkpoint becomes an int4 container."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import click
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

from colibri_jax.cli.options import in_bytes, parse_gigabytes
from colibri_jax.container.convert import plan_conversion, run_conversion
from colibri_jax.quant import SCALE_DTYPES, ScaleType

# The command's names for layouts: "colibri" is what other engines open, the container's word for it says how rows lie.
LAYOUTS: dict[str, Literal["rows16", "row_major"]] = {"rows16": "rows16", "colibri": "row_major"}


@click.command()
@click.argument("source", metavar="HF_DIR", type=click.Path(path_type=Path))
@click.argument("target", metavar="OUT_DIR", type=click.Path(path_type=Path))
@click.option(
    "--layout",
    type=click.Choice(list(LAYOUTS)),
    default="rows16",
    show_default=True,
    help="rows16: 16 rows interleaved, fastest here. colibri: row-major, opens in colibri too.",
)
@click.option("--group-size", type=click.IntRange(min=1), default=64, show_default=True, help="Weights that share one scale.")
@click.option(
    "--scales",
    type=click.Choice(list(SCALE_DTYPES)),
    default="f32",
    show_default=True,
    help="f16: int4 scales in half the bytes (5.6 % less to read with groups of 64), rows16 only.",
)
@click.option("--shard-gb", type=parse_gigabytes, metavar="GB", help="Largest file.")
def convert(source: Path, target: Path, layout: str, group_size: int, scales: ScaleType, shard_gb: float | None) -> None:
    """Quantise the checkpoint in HF_DIR and write a container to OUT_DIR.

    One tensor is in memory at a time. An interrupted conversion goes on with the first unfinished file when the same command is
    given again; a finished container is never overwritten.
    """
    limits: dict[str, Any] = {} if shard_gb is None else {"shard_bytes": in_bytes(shard_gb)}
    plan = plan_conversion(source, target, layout=LAYOUTS[layout], group_size=group_size, scales=scales, **limits)
    for line in plan.lines():
        click.echo(line)
    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("converting", total=None)

        def show(done_bytes: int, total_bytes: int, _name: str) -> None:
            progress.update(task, completed=done_bytes, total=total_bytes)

        run_conversion(plan, show)
    click.echo(f"done: {target}")
