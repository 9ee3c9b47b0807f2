"""Why prefill cuts destroy text: what a cut takes from each layer, how the error grows, and where it does its damage.

    python validation/quality/prefill_damage.py [--windows N] [--record] [--json]

Runs the model that ships over windows of held-out text, exactly and with cuts, and looks inside. Exit status 1 where a figure contradicts
what is known without measuring: an error before the first cut, damaged keys after a cut of the last layer alone, a floor that emptied a row.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.markdown import Markdown
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

import colibri_jax
from colibri_jax.cli.options import SHIPPED_MODEL
from colibri_jax.config import ModelConfig
from colibri_jax.generate.loop import GenerateOptions, generate
from colibri_jax.plots import Panel, check_plot, draw
from colibri_jax.quality.damage import EXACT, LayerErrors, Mode, ModeResult, TracedModel, WindowDamage
from colibri_jax.quality.settings import describe
from colibri_jax.quality.statistics import Summary, TokenResults, summarise
from colibri_jax.quality.task import prompt_ids, read_questions
from colibri_jax.quality.windows import Windows, read_windows
from colibri_jax.routing_spec import SCOPES, RoutingOptions
from colibri_jax.tokenizer import ChatTokenizer

ROOT = Path(__file__).resolve().parents[2]
TEXT = ROOT / "validation" / "train" / "heldout.jsonl"
QUESTIONS = ROOT / "validation" / "quality" / "questions.jsonl"
RECORD = ROOT / "validation" / "records" / "prefill_damage.md"
WINDOW, CHUNK = 256, 64
BUDGETS, SMALLEST, DECODE_BUDGET = (8, 16, 32, 48), 8, 4
POLICIES = {
    "aggregate survivors": RoutingOptions(),
    "aggregate frozen": RoutingOptions(denominator="frozen"),
    "floor frozen": RoutingOptions(policy="floor", denominator="frozen"),
}
WORST = "aggregate survivors"
ONE_STEP = "in one step"
# Rows of the chunk, by place, and rows by the number of layers in which they were emptied; the last bin is open.
PLACES = ((0, 1), (1, 4), (4, 16), (16, 64))
EMPTIED = (0, 1, 2)
EXAMPLES, EXAMPLE_TOKENS = 2, 48


def name_of(policy: str, budget: object) -> str:
    return f"{policy} {budget}"


@dataclasses.dataclass
class Study:
    """Results so far: by setting and mode one result per window, and by setting the layers' errors."""

    config: ModelConfig
    chunk: int = CHUNK
    windows: int = 0
    modes: dict[tuple[str, Mode], list[ModeResult]] = dataclasses.field(default_factory=dict)
    layers: dict[str, LayerErrors] = dataclasses.field(default_factory=dict)
    texts: list[tuple[str, list[tuple[str, str]]]] = dataclasses.field(default_factory=list)
    failures: list[str] = dataclasses.field(default_factory=list)

    @property
    def moe(self) -> tuple[int, ...]:
        return self.config.moe_layers

    def add(self, name: str, found: dict[Mode, ModeResult]) -> None:
        for mode, result in found.items():
            self.modes.setdefault((name, mode), []).append(result)

    def errors(self, name: str) -> LayerErrors:
        return self.layers.setdefault(name, LayerErrors.none(self.config.n_layers, len(self.moe)))

    def summary(self, name: str, mode: Mode) -> Summary:
        return summarise([result.tokens for result in self.modes[name, mode]])

    def kld(self, name: str, mode: Mode) -> float:
        return self.summary(name, mode).kld.value

    def chosen(self, name: str, mode: Mode, by: str, low: int, high: int) -> TokenResults:
        """Tokens whose place, or number of layers emptied, is at least `low` and below `high`."""
        values = [(result, getattr(result, by)) for result in self.modes[name, mode]]
        return TokenResults.joined([result.where((low <= value) & (value < high)) for result, value in values])

    def single(self, policy: str, index: int) -> str:
        """Name of the cut of one MoE layer alone."""
        return name_of(policy, f"{SMALLEST}, layer {self.moe[index]} alone")


# ---- measuring -----------------------------------------------------------------------------------------------------


def measure(model: TracedModel, windows: Windows, study: Study, progress: Progress) -> None:
    """All settings on every window."""
    task = progress.add_task("windows", total=len(windows))
    cuts = {name_of(p, n): dataclasses.replace(options, budget=n) for p, options in POLICIES.items() for n in BUDGETS}
    small = {name_of(WORST, n): dataclasses.replace(POLICIES[WORST], budget=n) for n in (DECODE_BUDGET, SMALLEST)}
    for index, tokens in enumerate(windows):
        window = WindowDamage(model, tokens, study.chunk, study.chunk)
        own = window.after_exact(list(cuts.values()), "own")
        for name, routing in cuts.items():
            found: dict[Mode, ModeResult] = {"own": own[routing], **window.after_cut(routing, ("past", "both"), study.errors(name))}
            study.add(name, found)
        decoded = window.after_exact(list(small.values()), "decode")
        for name, routing in small.items():
            # The following rows of the larger budget's "past" are there already; "all" has to equal them, which `check` sees.
            modes: tuple[Mode, ...] = ("all",) if (name, "past") in study.modes and name in cuts else ("past", "all")
            study.add(name, {"decode": decoded[routing], **window.after_cut(routing, modes)})
        for policy, options in POLICIES.items():
            name = name_of(name_of(policy, SMALLEST), ONE_STEP)
            study.add(name, {"both": window.in_one_step(dataclasses.replace(options, budget=SMALLEST), study.errors(name))})
            for at in range(len(study.moe)):
                budget = tuple(SMALLEST if at == other else 0 for other in range(len(study.moe)))
                study.add(study.single(policy, at), window.after_cut(dataclasses.replace(options, budget=budget), ("past", "both")))
        if index in (0, len(windows) - 1) and window.exact_again().kld.any():
            study.failures.append(f"window {index}: the exact model differs from itself")
        study.windows += 1
        progress.advance(task)
    check(study)


def check(study: Study) -> None:
    """What has to hold whatever the model."""
    first = study.moe[0]
    for name, errors in study.layers.items():
        if errors.hidden_L2[:first].any() or errors.kv_L[: first + 1].any():
            study.failures.append(f"{name}: an error before the first cut")
        if errors.miscounted:
            study.failures.append(f"{name}: in {errors.miscounted} steps other rows are empty than were counted")
        if name.startswith("floor") and errors.costs.emptied_L.any():
            study.failures.append(f"{name}: a floor emptied a row")
    for policy in POLICIES:
        if study.kld(study.single(policy, len(study.moe) - 1), "past"):
            study.failures.append(f"{policy}: a cut of the last layer alone damaged what later steps read")
    if SMALLEST >= study.config.moe.router.top_k:
        past, everything = (study.modes[name_of(WORST, SMALLEST), mode] for mode in ("past", "all"))
        if any((a.tokens.kld != b.tokens.kld).any() for a, b in zip(past, everything, strict=True)):
            study.failures.append("a budget that no single position exceeds changed decode steps")


def write_texts(model: TracedModel, tokenizer: ChatTokenizer, study: Study, *, new_tokens: int = EXAMPLE_TOKENS) -> None:
    """Greedy answers to held-out questions, exact and with the budget in every scope or in one."""
    options = GenerateOptions(max_new_tokens=new_tokens, prefill_chunk=CHUNK, stop_ids=frozenset(tokenizer.stop_ids))
    worst = POLICIES[WORST]
    runs: list[tuple[str, RoutingOptions, Sequence[Any]]] = [
        ("exact", EXACT, ()),
        (f"{SMALLEST}, all scopes", dataclasses.replace(worst, budget=SMALLEST), SCOPES),
        (f"{DECODE_BUDGET}, all scopes", dataclasses.replace(worst, budget=DECODE_BUDGET), SCOPES),
        (f"{DECODE_BUDGET}, decode alone", dataclasses.replace(worst, budget=DECODE_BUDGET), ("decode",)),
    ]
    for question in read_questions(QUESTIONS)[:EXAMPLES]:
        answers = []
        for name, routing, scopes in runs:
            model.reset()
            model.reroute(routing, scopes)
            found = generate(model, prompt_ids(tokenizer, question.question), options)
            answers.append((name, " ".join(tokenizer.decode(found.tokens).split()) or "(nothing)"))
        study.texts.append((question.question, answers))


# ---- what it says --------------------------------------------------------------------------------------------------


def _list(values: Sequence[float | None], form: str = ".2f") -> str:
    return " / ".join("–" if value is None else format(value, form) for value in values)


def _quality(summary: Summary) -> str:
    kld = summary.kld_windows
    return f"{kld.value:.4f} ± {kld.error:.4f} | {summary.ppl_ratio.value:.3f} | {summary.same_top.value:.1%}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(head)} |", "|---" * len(head) + "|", *(f"| {' | '.join(row)} |" for row in rows), ""]


def sentences(study: Study) -> str:
    """The answer."""
    return ""


def report(study: Study, command: str) -> str:
    """The record, in Markdown."""
    first, cuts = study.moe[0], [name_of(policy, n) for policy in POLICIES for n in BUDGETS]
    shown = {name: study.layers[name].to_json() for name in [*cuts, *(n for n in study.layers if n.endswith(ONE_STEP))]}
    tokens = study.summary(cuts[0], "both").tokens
    layers = " / ".join(map(str, study.moe))
    lines = [
        "# Why prefill cuts destroy text",
        "",
        sentences(study),
        "",
        f"`{command}`; {study.windows} windows of {WINDOW} positions of held-out text in prefill steps of {study.chunk}, or of one of "
        f"{WINDOW}, shipped model, native engine. All qualities are of the same {tokens:,} tokens, those after the first {study.chunk} of a "
        "window. Errors of KLD are those of independent windows. In lists there is one value per MoE layer, "
        f"{layers}.",
        "",
        "![Errors by layer, KLD by budget and KLD of single layers](prefill_damage.svg)",
        "",
        "## What a cut leaves of a layer",
        "",
        "Distinct experts before and after, router mass kept, and rows left with the shared expert alone: of every layer, and in any layer.",
        "",
        *_table(
            ("setting", "before", "kept", "mass", "emptied, %", "in any, %"),
            [
                (n, _list(s["before"], ".1f"), _list(s["kept"], ".1f"), _list(s["mass"]), _list([100 * v for v in s["emptied_share"]], ".1f"),
                 f"{100 * s['ever_emptied'][-1]:.1f}")
                for n, s in shown.items()
            ],
        ),
        "## How the error grows",
        "",
        "Relative error of the residual stream after each MoE layer, ‖cut − exact‖ / ‖exact‖, mean over rows: of those that kept an expert "
        "in every layer so far, and of those that were emptied in one; then of the rows of the KV cache. The cache of the first MoE layer "
        "is made before anything is cut.",
        "",
        *_table(
            ("setting", "never emptied", "emptied", "keys and values"),
            [
                (n, _list(s["hidden_never_emptied"][first:]), _list(s["hidden_emptied"][first:]), _list(s["kv"][first:]))
                for n, s in shown.items()
            ],
        ),
        "## Rows that are cut, and rows that read what they left",
        "",
        "*Own*: a step's rows are cut, everything before it is exact. *Past*: everything before is cut, and the rows themselves are exact; "
        "that is what decode steps without a budget are after a cut prompt. *Both*: all steps are cut. Shares are of the KLD of both; they "
        "need not add up to 100%.",
        "",
        *_table(
            ("setting", "own: KLD", "PPL ×", "same top", "past: KLD", "PPL ×", "same top", "both: KLD", "PPL ×", "same top", "own, past"),
            [
                (n, *(_quality(study.summary(n, mode)) for mode in ("own", "past", "both")),
                 ", ".join(f"{study.kld(n, mode) / study.kld(n, 'both'):.0%}" for mode in ("own", "past")))
                for n in cuts
            ],
        ),
        *_table(
            ("whole window as one step", "KLD", "PPL ×", "same top"),
            [(n, _quality(study.summary(n, "both"))) for n in shown if n.endswith(ONE_STEP)],
        ),
        "## Emptied rows, and the others",
        "",
        "KLD of a step's own rows by the number of layers that left them no expert, with their share of all rows.",
        "",
        *_table(
            ("setting", "none", "one", "two or more"),
            [
                (n, *(f"{t.kld.mean():.3f} ({t.count / tokens:.1%})" if t.count else "–" for t in by_emptied(study, n)))
                for n in cuts
                if study.layers[n].costs.emptied_L.any()
            ],
        ),
        "## By place in the step",
        "",
        "KLD by a row's place. *Own*: the first row has nothing damaged before it; later ones also read keys and values of cut rows. "
        "*Past*: the first row reads nothing but damage; later ones also their exact neighbours.",
        "",
        *_table(
            ("setting", *(f"{low}" if high == low + 1 else f"{low}–{high - 1}" for low, high in PLACES)),
            [
                (f"{n}, {mode}", *(f"{study.chosen(n, mode, 'places', low, high).kld.mean():.3f}" for low, high in PLACES))
                for n in (name_of(policy, SMALLEST) for policy in POLICIES)
                for mode in ("own", "past")
            ],
        ),
        f"## One layer cut, to {SMALLEST}",
        "",
        *_table(
            ("policy", *(f"layer {layer}" for layer in study.moe), "sum", "all layers"),
            [
                (f"{policy}, {mode}", *(f"{kld:.4f}" for kld in klds), f"{sum(klds):.4f}", f"{study.kld(name_of(policy, SMALLEST), mode):.4f}")
                for policy in POLICIES
                for mode in ("both", "past")
                for klds in [single_klds(study, policy, mode)]
            ],
        ),
        f"## A budget in every scope, {WORST}",
        "",
        f"After a cut prompt, decode steps with the same budget. A position has {study.config.moe.router.top_k} experts, so that {SMALLEST} "
        "takes nothing from a decode step.",
        "",
        *_table(
            ("budget", "prompt alone: KLD", "PPL ×", "same top", "decode alone: KLD", "PPL ×", "same top", "all: KLD", "PPL ×", "same top"),
            [
                (str(n), *(_quality(study.summary(name_of(WORST, n), mode)) for mode in ("past", "decode", "all")))
                for n in (DECODE_BUDGET, SMALLEST)
            ],
        ),
        f"Greedy answers to the first questions of `questions.jsonl`, at most {EXAMPLE_TOKENS} tokens:",
        "",
    ]  # fmt: skip
    for question, answers in study.texts:
        lines += [f"**{question}**", "", *(f"* *{name}*: {text}" for name, text in answers), ""]
    return "\n".join(lines)


def by_emptied(study: Study, name: str) -> list[TokenResults]:
    """A step's own rows by the number of layers that left them no expert, as in EMPTIED."""
    ends = (*EMPTIED[1:], study.config.n_layers + 1)
    return [study.chosen(name, "own", "emptied", low, high) for low, high in zip(EMPTIED, ends, strict=True)]


def single_klds(study: Study, policy: str, mode: Mode) -> list[float]:
    return [study.kld(study.single(policy, at), mode) for at in range(len(study.moe))]


def plot(path: Path, study: Study) -> None:
    """Errors by layer at the smallest budget, KLD by budget, KLD of single layers."""
    errors: dict[str, list[float]] = {}
    for policy in POLICIES:
        found = study.layers[name_of(policy, SMALLEST)].to_json()
        errors[f"{policy}, residual"] = found["hidden"]
        errors[f"{policy}, KV"] = found["kv"]
    klds = {mode: [study.kld(name_of(WORST, n), mode) for n in BUDGETS] for mode in ("both", "own", "past")}
    singles = {f"{p}, {mode}": single_klds(study, p, mode) for p in list(POLICIES)[:2] for mode in ("both", "past")}
    panels = [
        Panel(f"layer (budget {SMALLEST})", "relative error, mean over rows", list(map(str, range(study.config.n_layers))), errors),
        Panel(f"budget ({WORST})", "KLD, nats", list(map(str, BUDGETS)), klds, log_y=True),
        Panel(f"the one layer cut to {SMALLEST}", "KLD, nats", list(map(str, study.moe)), singles),
    ]
    draw(path, "Why prefill cuts destroy text", panels)


def to_json(study: Study) -> dict[str, Any]:
    """Everything measured."""
    return {
        "windows": study.windows,
        "quality": {f"{name}, {mode}": study.summary(name, mode).to_json() for name, mode in study.modes},
        "layers": {name: errors.to_json() for name, errors in study.layers.items()},
        "texts": study.texts,
        "failures": study.failures,
    }


@click.command()
@click.option("--windows", type=click.IntRange(min=2), default=60, show_default=True, help=f"Windows of {WINDOW} positions.")
@click.option("--record", "write", is_flag=True, help="Write validation/records/prefill_damage.md and its plot.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def main(*, windows: int, write: bool, as_json: bool) -> None:
    """Measure what prefill cuts do, layer by layer; exit 1 where a figure contradicts what has to hold."""
    if write:
        check_plot(RECORD.with_suffix(".svg"))
    tokenizer = ChatTokenizer.from_directory(SHIPPED_MODEL)
    found = read_windows([TEXT], tokenizer, WINDOW)[:windows]
    model = colibri_jax.load(SHIPPED_MODEL, threads=1, context_positions=WINDOW)
    study = Study(model.config)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        measure(model, found, study, progress)
    write_texts(model, tokenizer, study)
    text = report(study, " ".join(["python validation/quality/prefill_damage.py", *sys.argv[1:]]))
    if write:
        RECORD.write_text(text, encoding="utf8")
        plot(RECORD.with_suffix(".svg"), study)
    if as_json:
        click.echo(json.dumps(to_json(study)))
    else:
        Console().print(Markdown(text))
    for failure in study.failures:
        click.echo(f"FAILED: {failure}", err=True)
    sys.exit(1 if study.failures else 0)


if __name__ == "__main__":
    main()
