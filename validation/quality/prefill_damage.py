"""Why prefill cuts destroy text: what a cut takes from each layer, how the error grows, and where it does its damage.

    python validation/quality/prefill_damage.py [--windows N] [--record] [--json]

Runs the model that ships over held-out text, exactly and with cuts, and looks inside. Exit status 1 where a figure contradicts what is
known without measuring: an error before the first cut, damaged keys after a cut of the last layer alone, a floor that emptied a row.
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
from colibri_jax.generate.loop import GenerateOptions, generate
from colibri_jax.plots import Panel, check_plot, draw
from colibri_jax.quality.damage import EXACT, MODES, Mode, TracedModel
from colibri_jax.quality.damage_study import (
    ANSWER,
    BUDGETS,
    CHUNK,
    DECODE_BUDGET,
    ONE_STEP,
    POLICIES,
    SMALLEST,
    WORST,
    Study,
    all_scopes,
    cuts,
    measure,
    name_of,
    read_answers,
)
from colibri_jax.quality.statistics import Summary, TokenResults, mean
from colibri_jax.quality.task import prompt_ids, read_questions
from colibri_jax.quality.windows import read_windows
from colibri_jax.routing_spec import SCOPES, RoutingOptions
from colibri_jax.tokenizer import ChatTokenizer

ROOT = Path(__file__).resolve().parents[2]
TEXT = ROOT / "validation" / "train" / "heldout.jsonl"
QUESTIONS = ROOT / "validation" / "quality" / "questions.jsonl"
RECORD = ROOT / "validation" / "records" / "prefill_damage.md"
WINDOW = 256
# Rows of the step, by place, and rows by the number of layers in which they were emptied; the last bin is open.
PLACES = ((0, 1), (1, 4), (4, 16), (16, 64))
EMPTIED = (0, 1, 2)
EXAMPLES, EXAMPLE_TOKENS = 2, 48


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
            answers.append((name, " ".join(tokenizer.decode(found.tokens).split()).replace("`", "'") or "(nothing)"))
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
    worst = name_of(WORST, SMALLEST)
    layers, one = study.layers[worst].to_json(), study.summary(name_of(worst, ONE_STEP), "both")
    kept_one, own, both = by_emptied(study, worst)[0], study.kld(worst, "own"), study.summary(worst, "both")
    rows = study.summary(worst, "own").tokens
    first, last = study.moe[0], study.moe[-1]
    return (
        f"A cut to {SMALLEST} experts a step destroys the rows that it cuts, far more than what later rows read of them: a layer keeps "
        f"{min(layers['mass']):.0%} to {max(layers['mass']):.0%} of their router mass, the residual stream is {layers['hidden'][last]:.0%} "
        f"off after the last layer, and with everything before the step exact its rows already have a KLD of {own:.2f}, against "
        f"{both.kld.value:.2f} (PPL × {both.ppl_ratio.value:.1f}) where all steps are cut; of the {own:.2f} the "
        f"{1 - kept_one.count / rows:.0%} that get no expert at all in some layer make {1 - kept_one.kld.sum() / rows / own:.0%}, and the "
        f"others still have {kept_one.kld.mean():.2f}. Exact rows after a cut prompt, though its keys and values are "
        f"{layers['kv'][first + 1]:.0%} to {max(layers['kv']):.0%} off, have a KLD of {study.kld(worst, 'past'):.3f} in running text and "
        f"{study.kld(f'{worst} {ANSWER}', 'past'):.3f} in answers, so that scoring whole sequences as one cut step "
        f"(PPL × {one.ppl_ratio.value:.1f} here), as a public engine's users did, says how the rows of a prompt fare, not how decoded text "
        "does."
    )


def findings(study: Study) -> list[str]:
    """What else the tables say."""
    worst, frozen, floor = (name_of(policy, SMALLEST) for policy in POLICIES)
    at, last = study.moe[0], study.moe[-1]
    layers = {name: study.layers[name].to_json() for name in (worst, frozen, floor)}
    emptied, kept = (layers[worst][f"hidden_{group}"][at] for group in ("emptied", "never_emptied"))
    singles = {mode: single_klds(study, WORST, mode) for mode in ("both", "past")}
    past = sum(singles["past"])
    places = {mode: [_by_place(study, worst, mode, *place) for place in PLACES] for mode in MODES[:2]}
    scopes = {n: [study.kld(all_scopes(n), mode) for mode in ("past", "decode", "all")] for n in (DECODE_BUDGET, SMALLEST)}
    top_k, one = study.config.moe.router.top_k, study.summary(name_of(worst, ONE_STEP), "both")
    return [
        f"**It is the row's own loss.** The first row of a step reads nothing damaged and has a KLD of {places['own'][0]}; later ones, "
        f"which also read their cut neighbours, have {places['own'][-1]}. Of exact rows after a cut the first has {places['past'][0]}, and "
        f"those from the {PLACES[-1][0] + 1}th on, with exact neighbours, {places['past'][-1]}.",
        f"**Emptied rows end worst, but an expert alone does not save a row.** After the first MoE layer they are {emptied:.0%} off, and "
        f"rows that kept an expert {kept:.0%}, because survivors get the weight of all that were dropped; with a frozen denominator it is "
        f"{layers[frozen]['hidden_never_emptied'][at]:.0%}, and the KLD where all steps are cut {study.kld(frozen, 'both'):.2f} in "
        f"the place of {study.kld(worst, 'both'):.2f}.",
        f"**A floor helps by keeping more.** It empties no row, at a KLD of {study.kld(floor, 'both'):.2f}, but asked for {SMALLEST} it "
        f"keeps {min(layers[floor]['kept']):.0f} to {max(layers[floor]['kept']):.0f} experts.",
        f"**Early layers cost more.** Layer {at} alone, cut to {SMALLEST}, has a KLD of {singles['both'][0]:.2f}, layer {last} "
        f"{singles['both'][-1]:.2f}; of the damage by keys and values, layer by layer, it makes {_ratio(singles['past'][0], past)}, "
        f"layer {last} none.",
        f"**The collapse in scope `all`** is that of prompts. No decode step has more than {top_k} experts, so that after the "
        f"prompt a budget of {SMALLEST} cuts nothing: KLD {scopes[SMALLEST][2]:.3f}, all of it from keys and values. At "
        f"{DECODE_BUDGET} it is {scopes[DECODE_BUDGET][2]:.3f}, where the prompt alone makes {scopes[DECODE_BUDGET][0]:.3f} and the decode "
        f"steps alone {scopes[DECODE_BUDGET][1]:.3f}. The budget of {SMALLEST} on a whole window as one step leaves "
        f"{one.same_top.value:.0%} of the top tokens the same.",
        "**Limits.** The first token of an answer is scored by the prompt's last row, which is a cut one. This model is small and uses "
        "little of its context, as its exact answers below show, and the windows are short documents; one that leans on its prompt more "
        "has more to lose by damaged keys and values.",
    ]


def _ratio(part: float, whole: float) -> str:
    return f"{part / whole:.0%}" if whole else "–"


def _cuts_table(study: Study, suffix: str = "") -> list[str]:
    rows = [(name, name + suffix) for name in cuts()]
    return _table(
        ("setting", "own: KLD", "PPL ×", "same top", "past: KLD", "PPL ×", "same top", "both: KLD", "PPL ×", "same top", "own, past"),
        [
            (
                shown,
                *(_quality(study.summary(name, mode)) for mode in ("own", "past", "both")),
                ", ".join(_ratio(study.kld(name, mode), study.kld(name, "both")) for mode in ("own", "past")),
            )
            for shown, name in rows
        ],
    )


def _layer_tables(study: Study) -> list[str]:
    first = study.moe[0]
    shown = {name: errors.to_json() for name, errors in study.layers.items()}
    return [
        "## What a cut leaves of a layer",
        "",
        "Distinct experts before and after, router mass kept, and rows left with the shared expert alone: of every layer, and in any.",
        "",
        *_table(
            ("setting", "before", "kept", "mass", "emptied, %", "in any, %"),
            [
                (
                    name,
                    _list(s["before"], ".1f"),
                    _list(s["kept"], ".1f"),
                    _list(s["mass"]),
                    _list([100 * share for share in s["emptied_share"]], ".1f"),
                    f"{100 * s['ever_emptied'][-1]:.1f}",
                )
                for name, s in shown.items()
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
                (name, _list(s["hidden_never_emptied"][first:]), _list(s["hidden_emptied"][first:]), _list(s["kv"][first:]))
                for name, s in shown.items()
            ],
        ),
    ]


def _row_tables(study: Study) -> list[str]:
    smallest = [name_of(policy, SMALLEST) for policy in POLICIES]
    total = study.summary(smallest[0], "own").tokens
    return [
        "## Emptied rows, and the others",
        "",
        "KLD of a step's own rows by the number of layers that left them no expert, with their share of all rows.",
        "",
        *_table(
            ("setting", "none", "one", "two or more"),
            [
                (name, *(f"{t.kld.mean():.3f} ({t.count / total:.1%})" if t.count else "–" for t in by_emptied(study, name)))
                for name in cuts()
                if study.layers[name].costs.emptied_L.any()
            ],
        ),
        "## By place in the step",
        "",
        "KLD by a row's place, with the error of independent rows. *Own*: the first row has nothing damaged before it; later ones also "
        "read keys and values of cut rows. *Past*: the first row reads nothing but damage; later ones also their exact neighbours.",
        "",
        *_table(
            ("setting", *(f"{low}" if high == low + 1 else f"{low}–{high - 1}" for low, high in PLACES)),
            [
                (f"{name}{suffix}, {mode}", *(_by_place(study, name + suffix, mode, *place) for place in PLACES))
                for suffix in ("", f" {ANSWER}")
                for name in smallest
                for mode in ("own", "past")
            ],
        ),
    ]


def _by_place(study: Study, name: str, mode: Mode, low: int, high: int) -> str:
    klds = study.chosen(name, mode, "places", low, high).kld
    if not klds.size:
        return "–"
    found = mean(klds)
    return f"{found.value:.3f} ± {found.error:.3f}"


def report(study: Study, command: str) -> str:
    """The record, in Markdown."""
    tokens, answered = (study.summary(name_of(WORST, SMALLEST) + suffix, "both").tokens for suffix in ("", f" {ANSWER}"))
    top_k = study.config.moe.router.top_k
    scopes = [
        (f"{text} {n}", all_scopes(n) + s) for text, s in (("windows", ""), (ANSWER, f" {ANSWER}")) for n in (DECODE_BUDGET, SMALLEST)
    ]
    lines = [
        "# Why prefill cuts destroy text",
        "",
        sentences(study),
        "",
        *(f"* {finding}" for finding in findings(study)),
        "",
        f"`{command}`; held-out text, shipped model, native engine. {study.windows} windows of {WINDOW} positions in prefill steps of "
        f"{study.chunk}, or in one of {WINDOW}, all scored at the same {tokens:,} tokens, those after the first {study.chunk} of a window; "
        f"and {study.answers} documents as question and answer, each a step, scored at the {answered:,} tokens of the answers. Errors of "
        "KLD are those of independent windows. Lists have one value per MoE layer, "
        f"{' / '.join(map(str, study.moe))}.",
        "",
        "![Errors by layer, KLD by budget and KLD of single layers](prefill_damage.svg)",
        "",
        *_layer_tables(study),
        "## Rows that are cut, and rows that read what they left",
        "",
        "*Own*: a step's rows are cut, everything before it is exact. *Past*: everything before is cut, and the rows themselves are exact; "
        "that is what decode steps without a budget are after a cut prompt. *Both*: all steps are cut. Shares are of the KLD of both; they "
        "need not add up to 100%.",
        "",
        *_cuts_table(study),
        "The windows are many short documents, which need little of what came before them. An answer needs its question:",
        "",
        *_cuts_table(study, f" {ANSWER}"),
        "The whole window as one step:",
        "",
        *_table(
            ("setting", "KLD", "PPL ×", "same top"),
            [(name, _quality(study.summary(name, "both"))) for name in study.layers if name.endswith(ONE_STEP)],
        ),
        *_row_tables(study),
        f"## One layer cut, to {SMALLEST}",
        "",
        "KLD where this layer alone has a budget. *Past* of the last layer is 0: no later step reads anything that comes after it.",
        "",
        *_table(
            ("policy", *(f"layer {layer}" for layer in study.moe), "sum", "all layers"),
            [
                (f"{policy}, {mode}", *(f"{k:.4f}" for k in klds), f"{sum(klds):.4f}", f"{study.kld(name_of(policy, SMALLEST), mode):.4f}")
                for policy in POLICIES
                for mode in ("both", "past")
                for klds in [single_klds(study, policy, mode)]
            ],
        ),
        f"## A budget in every scope, {WORST}",
        "",
        f"After a cut prompt, decode steps with the same budget. A position has {top_k} experts, so that a budget of {top_k} or more takes "
        "nothing from a decode step.",
        "",
        *_table(
            ("budget", "prompt alone: KLD", "PPL ×", "same top", "decode alone: KLD", "PPL ×", "same top", "all: KLD", "PPL ×", "same top"),
            [(shown, *(_quality(study.summary(name, mode)) for mode in ("past", "decode", "all"))) for shown, name in scopes],
        ),
        f"Greedy answers to the first questions of `questions.jsonl`, at most {EXAMPLE_TOKENS} tokens:",
        "",
    ]
    for question, answers in study.texts:
        lines += [f"**{question}**", "", *(f"* *{name}*: `{text}`" for name, text in answers), ""]
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
        errors[f"{policy}, residual"] = study.layers[name_of(policy, SMALLEST)].to_json()["hidden"]
    errors[f"{WORST}, KV"] = study.layers[name_of(WORST, SMALLEST)].to_json()["kv"]
    klds = {mode: [study.kld(name_of(WORST, n), mode) for n in BUDGETS] for mode in ("both", "own", "past")}
    klds[f"past, {ANSWER}"] = [study.kld(f"{name_of(WORST, n)} {ANSWER}", "past") for n in BUDGETS]
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
        "answers": study.answers,
        "quality": {f"{name}, {mode}": study.summary(name, mode).to_json() for name, mode in study.modes},
        "layers": {name: errors.to_json() for name, errors in study.layers.items()},
        "texts": study.texts,
        "failures": study.failures,
    }


@click.command()
@click.option("--windows", type=click.IntRange(min=2), default=60, show_default=True, help=f"Windows of {WINDOW} positions.")
@click.option("--answers", "answers_count", type=click.IntRange(min=2), default=120, show_default=True, help="Documents.")
@click.option("--record", "write", is_flag=True, help="Write validation/records/prefill_damage.md and its plot.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def main(*, windows: int, answers_count: int, write: bool, as_json: bool) -> None:
    """Measure what prefill cuts do, layer by layer; exit 1 where a figure contradicts what has to hold."""
    if write:
        check_plot(RECORD.with_suffix(".svg"))
    tokenizer = ChatTokenizer.from_directory(SHIPPED_MODEL)
    found, answers = read_windows([TEXT], tokenizer, WINDOW)[:windows], read_answers(TEXT, tokenizer, answers_count)
    model = colibri_jax.load(SHIPPED_MODEL, threads=1, context_positions=WINDOW)
    study = Study(model.config)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("texts", total=len(found) + len(answers))
        measure(model, found, answers, study, lambda: progress.advance(task))
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
