"""Drafts by the MTP block under budgets, on the model that ships: acceptance, experts, bytes, divergence and time in every cell.

    python validation/speculation_table.py [--tokens 512] [--json] [--record]

Cells are budget × mode × depth. Counts come from greedy answers to held-out questions, without pausing. Times come from one long
sampled answer with pausing, turn and turn about with decoding without drafts. Experts are read around the page cache, and the
engine's own cache is as the answers before left it. This fails where drafts cost more time than they may.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

import colibri_jax
from colibri_jax.cli.options import SHIPPED_MODEL
from colibri_jax.errors import OptionError
from colibri_jax.generate.divergence import divergence
from colibri_jax.generate.drafters import MTPDrafter
from colibri_jax.generate.loop import GenerateOptions, generate, prefill
from colibri_jax.generate.sampling import SamplingOptions
from colibri_jax.generate.speculate import Speculation, SpeculationOptions, Speculator
from colibri_jax.plots import Panel, draw
from colibri_jax.routing_spec import RoutingOptions, Scope
from colibri_jax.tokenizer import ChatTokenizer

HERE = Path(__file__).parent
HELDOUT = HERE / "train" / "heldout.jsonl"
RECORD, PLOT = HERE / "records" / "speculation_table.md", HERE / "records" / "speculation_table.svg"
BUDGETS = (0, 16, 12, 8, 6, 4)
MODES: tuple[Speculation, ...] = ("exact", "union")
DEPTHS = (1, 2, 3)
CACHE_EXPERTS = 8
MOST_SLOWER = 1.05

HEADINGS = {
    "budget": "budget",
    "mode": "mode",
    "depth": "depth",
    "acceptance": "accepted",
    "tokens_per_step": "tokens per step",
    "experts": "experts per layer and step (decode)",
    "bytes": "kB per token (no drafts)",
    "kld": "KLD",
    "same_top": "same top",
    "time": "time with pausing ÷ no drafts",
    "timed_bytes": "kB per token of these runs",
    "drafted": "tokens from drafts",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Counts:
    """Sums over the answers of one cell; `experts` per MoE layer and step of `scope`."""

    tokens: int
    bytes_read: int
    experts: float
    acceptance: float = 0.0
    tokens_per_step: float = 1.0
    kld: float = 0.0
    same_top: float = 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Times:
    """One timed answer: its tokens, seconds and bytes after the first of them, and the share that verification steps gave."""

    tokens: int
    seconds: float
    bytes_read: int
    drafted: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cell:
    """One cell, with the same budget without drafts beside it. `ratios`: of times, one per pair of timed answers."""

    budget: int
    mode: Speculation
    depth: int
    counts: Counts
    plain: Counts
    ratios: tuple[float, ...]
    timed: Times

    def figures(self) -> dict[str, str]:
        """By the keys of HEADINGS."""
        kilobytes = self.counts.bytes_read / self.counts.tokens / 1e3
        return {
            "budget": str(self.budget or "off"),
            "mode": self.mode,
            "depth": str(self.depth),
            "acceptance": f"{self.counts.acceptance:.1%}",
            "tokens_per_step": f"{self.counts.tokens_per_step:.2f}",
            "experts": f"{self.counts.experts:.1f} ({self.plain.experts:.1f})",
            "bytes": f"{kilobytes:.0f} ({self.plain.bytes_read / self.plain.tokens / 1e3:.0f})",
            "kld": "0" if self.mode == "exact" else f"{self.counts.kld:.4f}",
            "same_top": "100%" if self.mode == "exact" else f"{self.counts.same_top:.1%}",
            "time": f"{statistics.median(self.ratios):.3f}",
            "timed_bytes": f"{self.timed.bytes_read / self.timed.tokens / 1e3:.0f}",
            "drafted": f"{self.timed.drafted:.0%}",
        }


def questions(tokenizer: ChatTokenizer) -> list[list[int]]:
    """Prompts of held-out questions."""
    texts = [json.loads(line)["text"] for line in HELDOUT.read_text(encoding="utf8").split("\n") if line.strip()]
    asked = [text.partition("<|assistant|>")[0].removeprefix("<|user|>").strip() for text in texts if text.startswith("<|user|>")]
    return [tokenizer.encode_chat([{"role": "user", "content": question}]) for question in asked]


def load(budget: int, mode: Speculation) -> Any:
    """The budget acts on decoding, and in union mode on verification."""
    scopes: tuple[Scope, ...] = ("decode",) if mode == "exact" else ("decode", "verify")
    return colibri_jax.load(
        SHIPPED_MODEL, cache_experts=CACHE_EXPERTS, routing=RoutingOptions(budget=budget), budget_scopes=scopes, mtp=True
    )


def count(budget: int, mode: Speculation, depth: int, prompts: Sequence[list[int]], options: GenerateOptions, tokens: int) -> Counts:
    """Answers without pausing until there are enough tokens; depth 0 decodes without drafts."""
    lm, exact = load(budget, mode), load(budget, mode)
    emitted = bytes_read = accepted = drafted = verified = steps = 0
    strayed: list[tuple[int, float, float]] = []
    for prompt in prompts:
        if emitted >= tokens:
            break
        lm.reset()
        chosen_from: dict[int, Any] = {}
        before, prefilled = lm.stats.bytes_read, lm.stats.scopes["prefill"].bytes_read
        if depth:
            how = SpeculationOptions(depth=depth, speculation=mode, pausing=False)
            speculator = Speculator(lm, MTPDrafter(lm, options.sampling), how, on_logits=chosen_from.__setitem__)
            answer, stats = generate(lm, prompt, options, make=speculator.tokens), speculator.stats
            accepted, drafted = accepted + sum(stats.accepted), drafted + sum(stats.drafted)
            verified, steps = verified + stats.verified_tokens, steps + stats.verification_steps
        else:
            answer = generate(lm, prompt, options)
        emitted += len(answer.all_tokens)
        bytes_read += lm.stats.bytes_read - before - (lm.stats.scopes["prefill"].bytes_read - prefilled)
        if depth and mode == "union":
            exact.reset()
            prefill(exact, prompt, options.prefill_chunk)
            found = divergence(exact, len(prompt), answer.all_tokens, chosen_from, options.sampling)
            strayed += [(found.tokens, found.kld_mean, found.same_top)] if found else []
    if emitted < tokens:
        raise OptionError("too few questions", where=str(HELDOUT), expected=f"answers of {tokens} tokens", got=emitted)
    scope = lm.stats.scopes["verify" if depth else "decode"]
    common = {"tokens": emitted, "bytes_read": bytes_read, "experts": scope.kept_experts / scope.layer_steps}
    if not depth:
        return Counts(**common)
    weights, klds, tops = zip(*strayed, strict=True) if strayed else ((1,), (0.0,), (1.0,))
    return Counts(
        **common,
        acceptance=accepted / drafted,
        tokens_per_step=verified / steps,
        kld=float(np.average(klds, weights=weights)),
        same_top=float(np.average(tops, weights=weights)),
    )


def time_answer(lm: Any, prompt: list[int], options: GenerateOptions, how: SpeculationOptions | None) -> Times:
    """One answer of full length, with drafts and pausing or without drafts."""
    lm.reset()
    speculator = None if how is None else Speculator(lm, MTPDrafter(lm, options.sampling), how)
    begin: list[float] = []
    bytes_at: list[int] = []

    def on_token(_: int) -> None:
        if not begin:
            bytes_at.append(lm.stats.bytes_read)
            begin.append(time.perf_counter())

    answer = generate(lm, prompt, options, on_token=on_token, **({} if speculator is None else {"make": speculator.tokens}))
    seconds = time.perf_counter() - begin[0]
    assert len(answer.tokens) == options.max_new_tokens
    drafted = 0.0 if speculator is None else speculator.stats.verified_tokens / len(answer.tokens)
    return Times(tokens=len(answer.tokens), seconds=seconds, bytes_read=lm.stats.bytes_read - bytes_at[0], drafted=drafted)


def make_cells(tokens: int, pairs: int, console: Console) -> list[Cell]:
    """All cells, under a progress bar."""
    tokenizer = ChatTokenizer.from_directory(SHIPPED_MODEL)
    prompts = questions(tokenizer)
    greedy = GenerateOptions(max_new_tokens=64, stop_ids=tokenizer.stop_ids)
    # Sampled, because a long greedy text of a small model repeats itself, which any drafter guesses.
    long = GenerateOptions(max_new_tokens=tokens, sampling=SamplingOptions(temperature=1.0, seed=1))
    cells = []
    wanted = [(budget, mode, depth) for budget in BUDGETS for mode in MODES for depth in DEPTHS]
    plain = {budget: count(budget, "exact", 0, prompts, greedy, tokens) for budget in BUDGETS}
    for budget, mode, depth in track(wanted, "budget × mode × depth", console=console):
        counts = count(budget, mode, depth, prompts, greedy, tokens)
        how = SpeculationOptions(depth=depth, speculation=mode)
        # One engine for both, because two of them differ in where their memory lies, and in speed.
        lm = load(budget, mode)
        time_answer(lm, prompts[0], long, None)
        timed, ratios = [], []
        for _ in range(pairs):
            timed.append(time_answer(lm, prompts[0], long, how))
            ratios.append(timed[-1].seconds / time_answer(lm, prompts[0], long, None).seconds)
        middle = timed[int(np.argsort(ratios)[len(ratios) // 2])]
        cells.append(Cell(budget=budget, mode=mode, depth=depth, counts=counts, plain=plain[budget], ratios=tuple(ratios), timed=middle))
    return cells


def failures(cells: Sequence[Cell]) -> list[str]:
    """Cells in which drafts cost more time than they may."""
    return [
        f"budget {cell.budget or 'off'}, {cell.mode}, depth {cell.depth}: {statistics.median(cell.ratios):.3f} of the time without drafts, "
        f"{MOST_SLOWER} allowed"
        for cell in cells
        if statistics.median(cell.ratios) > MOST_SLOWER
    ]


def write_record(cells: Sequence[Cell], *, tokens: int, pairs: int, seconds: float) -> None:
    """Table and plot, as they stand in the repository."""
    names = [str(budget or "off") for budget in BUDGETS]

    def line(of: Any, mode: Speculation, depth: int) -> list[float]:
        return [of(cell) for cell in cells if (cell.mode, cell.depth) == (mode, depth)]

    def panel(label: str, of: Any) -> Panel:
        return Panel("budget", label, names, {f"{mode} {depth}": line(of, mode, depth) for mode in MODES for depth in DEPTHS})

    draw(
        PLOT,
        "Drafts by the MTP block under a budget",
        [
            panel("accepted share of drafts", lambda cell: cell.counts.acceptance),
            panel("kB read per emitted token", lambda cell: cell.counts.bytes_read / cell.counts.tokens / 1e3),
            panel("time per token with pausing ÷ without drafts", lambda cell: statistics.median(cell.ratios)),
        ],
    )
    worst = max(statistics.median(cell.ratios) for cell in cells)
    rows = [cell.figures() for cell in cells]
    text = [
        "# Drafts by the MTP block under a budget",
        "",
        f"`python validation/speculation_table.py --tokens {tokens} --pairs {pairs} --record`, {seconds:.0f} s, on the model that ships, "
        f"{CACHE_EXPERTS} of 64 experts per layer in the cache. The budget acts on decoding, and in union mode on verification as well. "
        f"Counts: greedy answers to held-out questions, {tokens} tokens or more per cell, no pausing. Exact cells give the tokens and "
        "logits of decoding under the same budget. Divergence: of union from exact decoding of the same text. Times: "
        f"one sampled answer of {tokens} tokens with pausing, its probes included, against one without drafts, median of {pairs} "
        f"neighbouring pairs. Worst cell: {worst:.3f}.",
        "",
        "| " + " | ".join(HEADINGS.values()) + " |",
        "|" + "---|" * len(HEADINGS),
        *("| " + " | ".join(row[key] for key in HEADINGS) + " |" for row in rows),
        "",
        f"![acceptance, bytes and time by budget]({PLOT.name})",
        "",
    ]
    RECORD.write_text("\n".join(text), encoding="utf8")


@click.command()
@click.option(
    "--tokens", default=512, show_default=True, help="Emitted tokens per cell: of the counts at least, of a timed answer exactly."
)
@click.option("--pairs", default=5, show_default=True, help="Timed answers with drafts and without, per cell.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
@click.option("--record", is_flag=True, help=f"Write {RECORD.name} and {PLOT.name}.")
def main(*, tokens: int, pairs: int, as_json: bool, record: bool) -> None:
    """Count and time drafts in every cell of budget × mode × depth."""
    console, begin = Console(stderr=True), time.perf_counter()
    cells = make_cells(tokens, pairs, console)
    found, seconds = failures(cells), time.perf_counter() - begin
    if as_json:
        click.echo(json.dumps({"cells": [dataclasses.asdict(cell) for cell in cells], "failures": found, "seconds": seconds}))
    else:
        table = Table(*HEADINGS.values())
        for cell in cells:
            table.add_row(*cell.figures().values())
        Console().print(table)
    for line in found:
        console.print(line, markup=False, highlight=False)
    if record:
        write_record(cells, tokens=tokens, pairs=pairs, seconds=seconds)
    sys.exit(int(bool(found)))


if __name__ == "__main__":
    main()
