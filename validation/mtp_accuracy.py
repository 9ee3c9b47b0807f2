"""The MTP block's teacher-forced accuracy on the held-out text against the model card, and drafts of both backends against each other.

    python validation/mtp_accuracy.py [--windows 0] [--json] [--record]

Teacher-forced: row t of the block, made of the trunk's hidden state t and the text's token t + 1, against the text's token t + 2 and
against what the trunk itself finds most likely there. Windows as in `validation/train/evaluate.py`, from which the card's figures are.
The reference computes the first windows as well, row for row; and both backends decode the same prompts with drafts. This fails
where a figure is more than two points from the card's, or where a choice of both backends differs by more than a near-tie.
"""

from __future__ import annotations

import dataclasses
import json
import re
import sys
import time
from pathlib import Path
from typing import Any

import click
import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.progress import track

import colibri_jax
from colibri_jax.cli.options import SHIPPED_MODEL
from colibri_jax.generate.drafters import MTPDrafter
from colibri_jax.generate.loop import GenerateOptions, generate
from colibri_jax.generate.sampling import SamplingOptions
from colibri_jax.generate.speculate import SpeculationOptions, Speculator
from colibri_jax.quality.windows import read_windows
from colibri_jax.routing_spec import RoutingOptions
from colibri_jax.tokenizer import ChatTokenizer

HERE = Path(__file__).parent
HELDOUT, RECORD = HERE / "train" / "heldout.jsonl", HERE / "records" / "mtp_accuracy.md"
WINDOW = 256
MOST_POINTS = 2.0
# A choice between two tokens whose logits are closer than this in one backend may fall otherwise in the other.
NEAR_TIE = 1e-3
REFERENCE_WINDOWS = 2
PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 3, 24, 40

Logits = npt.NDArray[np.float32]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Forced:
    """Teacher-forced counts over `rows` predictions."""

    rows: int
    text: int
    trunk: int

    def points(self, name: str) -> float:
        """Percent."""
        return 100.0 * float(getattr(self, name)) / self.rows


@dataclasses.dataclass(frozen=True, kw_only=True)
class Drafted:
    """One prompt's drafts by both backends: tokens, and accepted and rejected drafts by depth."""

    budget: int
    sampled: bool
    native: tuple[Any, ...]
    reference: tuple[Any, ...]


def card() -> dict[str, float]:
    """The card's two figures, in percent."""
    text = (SHIPPED_MODEL / "MODEL_CARD.md").read_text(encoding="utf8")
    lines = {"text": "the right token", "trunk": "the trunk's most likely token"}
    return {name: 100.0 * float(re.findall(rf"MTP block, teacher-forced: {what} \| ([0-9.]+)", text)[0]) for name, what in lines.items()}


def rows_of(lm: Any, window: npt.NDArray[np.int32]) -> tuple[Logits, Logits]:
    """Logits of trunk and block over one window: float32 [WINDOW, W] and [WINDOW - 1, W]."""
    lm.reset()
    trunk_TW = lm.forward(window[:-1], scope="prefill")
    block_TW = lm.mtp_forward(window[1:-1], lm.hidden[:-1])
    return trunk_TW, block_TW


def teacher_forced(lm: Any, windows: npt.NDArray[np.int32], console: Console) -> Forced:
    """Counts over all windows."""
    text = trunk = rows = 0
    for window in track(windows, "teacher-forced", console=console):
        trunk_TW, block_TW = rows_of(lm, window)
        choice = block_TW.argmax(axis=1)
        text += int((choice == window[2:]).sum())
        trunk += int((choice == trunk_TW[1:].argmax(axis=1)).sum())
        rows += choice.size
    return Forced(rows=rows, text=text, trunk=trunk)


def differing_rows(windows: npt.NDArray[np.int32], console: Console) -> list[tuple[int, int, float]]:
    """(window, row, margin) of the block's choices that differ between the backends; the margin is the native one's."""
    native = colibri_jax.load(SHIPPED_MODEL, mtp=True, context_positions=WINDOW)
    reference = colibri_jax.load(SHIPPED_MODEL, "reference", mtp=True, context_positions=WINDOW)
    found = []
    for number, window in enumerate(track(windows, "reference", console=console)):
        ours_TW, theirs_TW = rows_of(native, window)[1], rows_of(reference, window)[1]
        for row in np.flatnonzero(ours_TW.argmax(axis=1) != theirs_TW.argmax(axis=1)):
            best = np.sort(ours_TW[row])[-2:]
            found.append((number, int(row), float(best[1] - best[0])))
    return found


def drafts(windows: npt.NDArray[np.int32], console: Console) -> list[Drafted]:
    """Decoding with drafts in both backends, greedy and sampled, budget off and on."""
    found = []
    cases = [(window, budget, sampled) for window in windows[:PROMPTS] for budget, sampled in ((0, False), (4, False), (6, True))]
    models: dict[str, Any] = {
        backend: colibri_jax.load(SHIPPED_MODEL, backend, mtp=True, context_positions=128) for backend in ("native", "reference")
    }
    for window, budget, sampled in track(cases, "drafts", console=console):
        sampling = SamplingOptions(temperature=1.0 if sampled else 0.0, seed=7)
        results = {}
        for backend, lm in models.items():
            lm.reset()
            lm.reroute(RoutingOptions(budget=budget), ("decode",))
            speculator = Speculator(lm, MTPDrafter(lm, sampling), SpeculationOptions(pausing=False))
            options = GenerateOptions(max_new_tokens=NEW_TOKENS, sampling=sampling)
            answer = generate(lm, window[:PROMPT_TOKENS].tolist(), options, make=speculator.tokens)
            results[backend] = (answer.tokens, speculator.stats.accepted, speculator.stats.rejected)
        found.append(Drafted(budget=budget, sampled=sampled, **results))
    return found


def failures(forced: Forced, ties: list[tuple[int, int, float]], drafted: list[Drafted]) -> list[str]:
    """What this must show and does not; empty when it passed."""
    found = [
        f"{name}: {forced.points(name):.1f} %, the card has {figure:.1f} %"
        for name, figure in card().items()
        if abs(forced.points(name) - figure) > MOST_POINTS
    ]
    found += [f"window {w}, row {row}: another choice, with a margin of {margin:.2g}" for w, row, margin in ties if margin > NEAR_TIE]
    return found + [f"drafts of a run differ: {d}" for d in drafted if d.native != d.reference and not ties]


def write_record(forced: Forced, rows: int, ties: list[tuple[int, int, float]], drafted: list[Drafted], seconds: float) -> None:
    """The record, as it stands in the repository."""
    accepted = sum(sum(d.native[1]) for d in drafted)
    rejected = sum(sum(d.native[2]) for d in drafted)
    unequal = sum(d.native != d.reference for d in drafted)
    figures = card()
    text = [
        "# Accuracy of the MTP block",
        "",
        f"`python validation/mtp_accuracy.py --record`, {seconds:.0f} s, on the model that ships: int4 trunk, int8 block, native engine.",
        "",
        f"| teacher-forced over {forced.rows:,} rows of held-out text | here | card (unquantised) |",
        "|---|---|---|",
        f"| the right token | {forced.points('text'):.1f} % | {figures['text']:.1f} % |",
        f"| the trunk's most likely token | {forced.points('trunk'):.1f} % | {figures['trunk']:.1f} % |",
        "",
        f"Reference and native: {len(ties)} of {rows:,} choices of the block differ. Decoding with drafts, {len(drafted)} runs (greedy and "
        f"sampled, budgets off, 4 and 6): {accepted} drafts accepted, {rejected} rejected, {unequal} runs in which a token or a count by "
        "depth differs.",
        "",
    ]
    RECORD.write_text("\n".join(text), encoding="utf8")


@click.command()
@click.option("--windows", "n_windows", default=0, help="Stop after so many windows; 0 is all of them.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
@click.option("--record", is_flag=True, help=f"Write {RECORD.name}.")
def main(*, n_windows: int, as_json: bool, record: bool) -> None:
    """Measure the MTP block's predictions, and compare both backends' drafts."""
    console, begin = Console(stderr=True), time.perf_counter()
    windows = read_windows([HELDOUT], ChatTokenizer.from_directory(SHIPPED_MODEL), WINDOW)[: n_windows or None]
    forced = teacher_forced(colibri_jax.load(SHIPPED_MODEL, mtp=True, context_positions=WINDOW), windows, console)
    compared = windows[:REFERENCE_WINDOWS]
    ties, drafted = differing_rows(compared, console), drafts(windows, console)
    found, seconds = failures(forced, ties, drafted), time.perf_counter() - begin
    result = {
        "rows": forced.rows,
        "text_percent": forced.points("text"),
        "trunk_percent": forced.points("trunk"),
        "card_percent": card(),
        "compared_rows": compared.shape[0] * (WINDOW - 1),
        "differing_choices": ties,
        "drafts": [dataclasses.asdict(d) for d in drafted],
        "failures": found,
        "seconds": seconds,
    }
    click.echo(json.dumps(result, indent=None if as_json else 2))
    for line in found:
        console.print(line, markup=False, highlight=False)
    if record:
        write_record(forced, result["compared_rows"], ties, drafted, seconds)
    sys.exit(int(bool(found)))


if __name__ == "__main__":
    main()
