"""Exact speculation on generated models and options: every token and every logit of decoding without drafts, or this command fails.

    python validation/speculation_cases.py [--seed 0] [--json] [--record]

Each run decodes without drafts and with them, on two engines that are set up differently, pausing off. At every depth runs are added
until enough drafts were accepted and enough turned down: over all runs of that depth, and at that place in a draft. Half of the runs
take a drafter that knows the answer and errs where it is told to. Models are generated, one run in eight takes the one that ships.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np
from choosing import Random
from model_shapes import make_shape, make_weights, write_model
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from speculation_runs import DRAFTERS, Outcome, by_depth, make_speculation, outcome_of

from colibri_jax.cli.options import SHIPPED_MODEL
from colibri_jax.config import FAMILIES, ModelConfig
from colibri_jax.container.directory import read_config
from colibri_jax.generate.speculate import MOST_DRAFTS

RECORD = Path(__file__).parent / "records" / "speculation_exact.md"
DEPTHS = tuple(range(1, MOST_DRAFTS + 1))
SHAPES = 40
SHIPPED_EVERY = 8
LEAST_ACTED_SHARE = 0.3
SHOWN_FAULTS = 10


@dataclasses.dataclass
class Tally:
    """Sums over the runs of one depth, or of all.

    Attributes:
        drafted, accepted, rejected: int64 [MOST_DRAFTS], by place in the draft.
        faults: the first ones, with the run that reproduces them.
    """

    runs: int = 0
    tokens: int = 0
    verification_steps: int = 0
    layer_steps: int = 0
    acted: int = 0
    drafted: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(MOST_DRAFTS, np.int64))
    accepted: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(MOST_DRAFTS, np.int64))
    rejected: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(MOST_DRAFTS, np.int64))
    differing_runs: int = 0
    faults: list[str] = dataclasses.field(default_factory=list)

    def add(self, outcome: Outcome, name: str) -> None:
        """Count one run."""
        stats = outcome.stats
        self.runs += 1
        self.tokens += stats.emitted_tokens
        self.verification_steps += stats.verification_steps
        self.layer_steps += outcome.layer_steps
        self.acted += outcome.acted
        for count in ("drafted", "accepted", "rejected"):
            setattr(self, count, getattr(self, count) + by_depth(stats, count))
        self.differing_runs += bool(outcome.faults)
        self.faults.extend(f"{name}: {fault}" for fault in outcome.faults[: SHOWN_FAULTS - len(self.faults)])

    def plus(self, other: Tally) -> Tally:
        """Sums of both."""
        return Tally(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in dataclasses.fields(self)})

    def enough(self, place: int, drafts: int) -> bool:
        """Whether so many drafts were accepted and rejected, in all and at a place (1 first)."""
        counts = [self.accepted.sum(), self.rejected.sum(), self.accepted[place - 1], self.rejected[place - 1]]
        return min(counts) >= drafts


Model = tuple[Path, ModelConfig]


def make_models(seed: int, directory: Path) -> list[Model]:
    """Generated containers of all families, some with an MTP block; no budget cuts a row of one expert, so that each row has more."""
    models: list[Model] = []
    number = 0
    while len(models) < SHAPES:
        shape = make_shape(Random(np.random.default_rng([seed, number, 0])), FAMILIES[number % len(FAMILIES)])
        if shape.model.moe.router.top_k > 1:
            path = write_model(directory / str(number), shape, make_weights(shape.model, [seed, number], plain=number % 2 == 0))
            models.append((path, shape.model))
        number += 1
    return models


def outcomes(seed: int, depth: int, models: Sequence[Model]) -> Iterator[tuple[str, Outcome]]:
    """Runs of one depth, without end, each with the name that gives it again."""
    shipped = (SHIPPED_MODEL, read_config(SHIPPED_MODEL)[0])
    number = 0
    while True:
        path, config = shipped if number % SHIPPED_EVERY == 0 else models[(number * 7 + depth) % len(models)]
        drafter = "mtp" if number % (2 * SHIPPED_EVERY) == 0 else None
        run = make_speculation(Random(np.random.default_rng([seed, depth, number])), config, depth, drafter=drafter)
        yield f"seed {seed}, depth {depth}, run {number} ({run.drafter}, {config.family})", outcome_of(path, config, run)
        number += 1


def run_depths(seed: int, drafts: int, console: Console) -> dict[int, Tally]:
    """Tallies by depth, under a progress bar."""
    tallies = {depth: Tally() for depth in DEPTHS}
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with tempfile.TemporaryDirectory(prefix="speculation-") as directory, Progress(*columns, console=console) as progress:
        models = make_models(seed, Path(directory))
        for depth, tally in tallies.items():
            task = progress.add_task(f"depth {depth}", total=drafts)
            for name, outcome in outcomes(seed, depth, models):
                tally.add(outcome, name)
                progress.update(task, completed=min(drafts, int(tally.accepted[depth - 1]), int(tally.rejected[depth - 1])))
                if tally.enough(depth, drafts):
                    break
    return tallies


def failures(tallies: dict[int, Tally], total: Tally, *, tokens: int) -> list[str]:
    """What this must show and does not; empty when it passed."""
    found = [f"{total.differing_runs} of {total.runs} runs differ from decoding without drafts"] if total.differing_runs else []
    if total.tokens < tokens:
        found.append(f"{total.tokens} tokens, {tokens} required")
    for depth, tally in tallies.items():
        if tally.acted < LEAST_ACTED_SHARE * tally.layer_steps:
            found.append(f"depth {depth}: the budget acted in {tally.acted} of {tally.layer_steps} layer steps")
    return found


def rows_of(tallies: dict[int, Tally]) -> list[tuple[str, ...]]:
    """A line of figures per depth."""
    return [
        (
            str(depth),
            f"{tally.runs:,}",
            f"{tally.tokens:,}",
            f"{tally.accepted.sum():,}",
            f"{tally.rejected.sum():,}",
            f"{tally.accepted[depth - 1]:,}",
            f"{tally.rejected[depth - 1]:,}",
            f"{tally.acted / tally.layer_steps:.0%}",
            str(tally.differing_runs),
        )
        for depth, tally in tallies.items()
    ]


HEADINGS = ("depth", "runs", "tokens", "accepted", "rejected", "accepted here", "rejected here", "layer steps cut", "runs that differ")


def write_record(tallies: dict[int, Tally], total: Tally, *, seed: int, drafts: int, seconds: float) -> None:
    """The record, as it stands in the repository."""
    lines = [
        "# Exact speculation against decoding without drafts",
        "",
        f"`python validation/speculation_cases.py --seed {seed} --drafts {drafts} --record`, {seconds:.0f} s.",
        "",
        f"{total.tokens:,} emitted tokens in {total.runs:,} runs, {total.verification_steps:,} verification steps, pausing off: "
        f"**{total.differing_runs} runs in which a token or a bit of a logit differs** from decoding without drafts. The budget acted in "
        f"{total.acted / total.layer_steps:.0%} of the {total.layer_steps:,} layer steps of verification. Generated models of "
        f"{len(FAMILIES)} families and the model that ships; drafters {', '.join(DRAFTERS)}; random budgets (also one per layer), "
        "policies, denominators, votes, TOPK, TOPP, scopes, cache sizes, threads, instruction sets, readers, PIPE, PILOT, temperatures "
        'and stop tokens, with the engine set up otherwise in each of the two runs. "Here": at the last place of a draft of full depth.',
        "",
        "| " + " | ".join(HEADINGS) + " |",
        "|" + "---|" * len(HEADINGS),
        *("| " + " | ".join(row) + " |" for row in rows_of(tallies)),
        "",
    ]
    RECORD.write_text("\n".join(lines), encoding="utf8")


@click.command()
@click.option("--seed", default=0, show_default=True)
@click.option("--drafts", default=1000, show_default=True, help="Accepted and rejected drafts at every depth, each at least.")
@click.option("--tokens", default=10_000, show_default=True, help="Emitted tokens at least.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
@click.option("--record", is_flag=True, help=f"Write {RECORD.name}.")
def main(*, seed: int, drafts: int, tokens: int, as_json: bool, record: bool) -> None:
    """Decode with drafts and without on generated models, and compare tokens and logits bit for bit."""
    console, begin = Console(stderr=True), time.perf_counter()
    tallies = run_depths(seed, drafts, console)
    total = functools.reduce(Tally.plus, tallies.values())
    found, seconds = failures(tallies, total, tokens=tokens), time.perf_counter() - begin
    if as_json:
        described: dict[str, Any] = {
            str(depth): {k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in dataclasses.asdict(tally).items()}
            for depth, tally in tallies.items()
        }
        click.echo(json.dumps({"seed": seed, "tokens": total.tokens, "seconds": seconds, "failures": found, "depths": described}))
    else:
        table = Table(*HEADINGS, title=f"{total.tokens:,} tokens in {total.runs:,} runs, {seconds:.0f} s")
        for row in rows_of(tallies):
            table.add_row(*row)
        Console().print(table)
    for line in [*total.faults, *found]:
        console.print(line, markup=False, highlight=False)
    if record:
        write_record(tallies, total, seed=seed, drafts=drafts, seconds=seconds)
    sys.exit(int(bool(found)))


if __name__ == "__main__":
    main()
