"""Which experts to keep: hit rates of cache policies on traces of routing, against the best that any policy could do.

    python validation/cache_policies.py [--text FILE]... [--save DIR] [--record] [--json]
    python validation/cache_policies.py --trace FILE.npz...

Records what the model that ships routes while it decodes (its own answers, and the texts given, token by token), draws traces of a
larger model, and simulates every policy on each at several sizes; the engine's two also on steps of several positions. Exit status 1 where
a simulation contradicts itself: a policy with more hits than the optimum, or one of the engine's with other hits than the engine counted
while the trace was recorded.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import click
import numpy as np
from cache_simulation import DEFAULT, POLICIES, Cache, belady, grouped, hits_of_steps, simulate
from cache_traces import DRAWN, Trace, answers, documents, record, texts
from rich.console import Console
from rich.markdown import Markdown
from rich.progress import Progress

import colibri_jax
from colibri_jax.plots import Panel, check_plot, draw
from colibri_jax.tokenizer import ChatTokenizer

ROOT = Path(__file__).resolve().parents[1]
MODEL = ROOT / "colibri_jax" / "models" / "tiny-glm-moe-dsa"
RECORD = ROOT / "validation" / "records" / "cache_policies.md"
SLOTS = (1, 2, 4, 8, 16, 32)
WARMUP = 4  # a quarter of each trace
RECORDING_SLOTS = 4
# Steps of so many positions, by turns; of which of them hits are counted.
SEVERAL: dict[str, tuple[tuple[int, ...], Callable[[int], bool]]] = {
    "verification of 4": ((4,), lambda positions: True),
    "prefill of 64, 192 decoded": ((64, *[1] * 192), lambda positions: True),
    "of that, the 192 decoded": ((64, *[1] * 192), lambda positions: positions == 1),
}
SEVERAL_SLOTS = (2, 8, 32)
OPTIMUM, POOL = "optimum (Belady)", "one pool: "
# A policy replaces LRU as the default if it gains this many points in most cells and loses more than the other in none.
GAIN, LOSS = 2.0, 1.0

Rates = dict[str, list[float]]
"""Hit rate in percent per policy, one for each of SLOTS."""


@dataclasses.dataclass
class Study:
    """Results so far, by trace."""

    traces: list[Trace] = dataclasses.field(default_factory=list)
    rates: dict[str, Rates] = dataclasses.field(default_factory=dict)
    several: dict[tuple[str, str], Rates] = dataclasses.field(default_factory=dict)
    """By trace and name in SEVERAL; rates of LRU and DEFAULT, one for each of SEVERAL_SLOTS."""
    failures: list[str] = dataclasses.field(default_factory=list)

    def gains(self, policy: str, over: str = "LRU") -> list[float]:
        """Points of hit rate gained in every cell: trace and slots."""
        return [a - b for rates in self.rates.values() for a, b in zip(rates[policy], rates[over], strict=True)]

    def mean_gain(self, policy: str) -> float:
        gains = self.gains(policy)
        return sum(gains) / len(gains)

    def part(self, kind: str) -> Study:
        """The traces whose source begins so: "recorded" or "drawn"."""
        traces = [trace for trace in self.traces if trace.source.startswith(kind)]
        return Study(traces, {trace.name: self.rates[trace.name] for trace in traces})

    @property
    def best(self) -> str:
        """LRU itself apart, the one that gains most on average; of those that lose more than LOSS nowhere, if there are any."""
        return max((name for name in POLICIES if name != "LRU"), key=lambda name: (min(self.gains(name)) >= -LOSS, self.mean_gain(name)))

    @property
    def replaces_lru(self) -> bool:
        """Whether the best policy is clearly better than LRU."""
        gains = self.gains(self.best)
        return 2 * sum(gain >= GAIN for gain in gains) > len(gains) and min(gains) >= -LOSS


# ---- traces --------------------------------------------------------------------------------------------------------


def recorded(model: Path, files: Sequence[Path], steps: int, study: Study, progress: Progress) -> Iterator[Trace]:
    """Traces of the model: its answers, and the texts if there are any. The engine must count what its policy gives in simulation."""
    tokenizer = ChatTokenizer.from_directory(model)
    kinds = {"answers": f"recorded: {model.name} decoding its own answers, sampled"}
    if files:
        kinds["text"] = f"recorded: {model.name} decoding {', '.join(file.name for file in files)}"
    for name, source in kinds.items():
        task = progress.add_task(f"recording {name}", total=steps)
        engines, simulated = ("step_lfu", DEFAULT) if name == "answers" else ("lru", "LRU")
        lm = colibri_jax.load(model, backend="native", cache_experts=RECORDING_SLOTS, cache_policy=engines, threads=1)
        pieces = answers(lm, tokenizer) if name == "answers" else texts(lm, documents(files, tokenizer))
        trace = record(name, source, lm, steps, pieces, functools.partial(progress.advance, task))
        counted = lm.stats.scopes["decode"].cache_hits
        hits = simulate(POLICIES[simulated], trace.used.tolist(), trace.experts, RECORDING_SLOTS, 0)
        if counted != hits:
            study.failures.append(f"{name}: the engine counted {counted} hits with {engines}, {simulated} has {hits} in simulation")
        yield trace


# ---- simulation ----------------------------------------------------------------------------------------------------


def measure(trace: Trace, study: Study, policies: dict[str, type[Cache]], progress: Progress, *, shared: bool = False) -> None:
    """These policies and the optimum at every size, the slots per layer, or as many for all layers in one pool."""
    steps: list[list[list[int]]] = trace.used.tolist()
    warmup = len(steps) // WARMUP
    handed_out = trace.used[warmup:].size
    prefix = POOL if shared else ""
    task = progress.add_task(prefix + trace.name, total=(len(policies) + 1) * len(SLOTS))

    def rate(hits: int) -> float:
        progress.advance(task)
        return 100 * hits / handed_out

    rates = study.rates.setdefault(trace.name, {})
    for name, policy in policies.items():
        rates[prefix + name] = [rate(simulate(policy, steps, trace.experts, slots, warmup, shared=shared)) for slots in SLOTS]
    optimum = [rate(belady(steps, trace.experts, slots, warmup, shared=shared)) for slots in SLOTS]
    for name in policies:
        above = [slots for slots, got, most in zip(SLOTS, rates[prefix + name], optimum, strict=True) if got > most + 1e-9]
        if above:
            study.failures.append(f"{trace.name}: {prefix}{name} has more hits than the optimum at slots {above}")
    rates[prefix + OPTIMUM] = optimum


def measure_several(trace: Trace, study: Study) -> None:
    """The engine's policies where several of the trace's positions make a step."""
    for name, (pattern, counts) in SEVERAL.items():
        steps, positions = grouped(trace.used.tolist(), pattern)
        counted = [at for at, n in enumerate(positions) if counts(n) and sum(positions[: at + 1]) > len(trace.used) // WARMUP]
        handed_out = sum(len(experts) for at in counted for experts in steps[at])
        rates = study.several.setdefault((trace.name, name), {})
        for policy in ("LRU", DEFAULT):
            by_slots = [hits_of_steps(POLICIES[policy], steps, trace.experts, slots, positions) for slots in SEVERAL_SLOTS]
            rates[policy] = [100 * sum(hits[at] for at in counted) / handed_out for hits in by_slots]


def run(traces: Sequence[Trace], study: Study, progress: Progress) -> None:
    """All policies per layer; then LRU and the best other one in one pool; then steps of several positions on what was recorded."""
    study.traces = list(traces)
    for trace in traces:
        measure(trace, study, POLICIES, progress)
    pooled = {name: POLICIES[name] for name in ("LRU", study.best)}
    for trace in traces:
        measure(trace, study, pooled, progress, shared=True)
    for trace in study.part("recorded").traces:
        measure_several(trace, study)


# ---- what it says --------------------------------------------------------------------------------------------------


def _list(values: Sequence[float]) -> str:
    return " / ".join(f"{value:.1f}" for value in values)


def _per_slots(study: Study, policy: str, over: str) -> list[float]:
    gains = study.gains(policy, over)
    return [sum(gains[i :: len(SLOTS)]) / len(study.rates) for i in range(len(SLOTS))]


def findings(study: Study) -> list[str]:
    """Sentences on what was measured."""
    best, slots = study.best, "/".join(map(str, SLOTS))
    gains, cells = study.gains(best), len(study.rates) * len(SLOTS)
    shares = [lru / most for rates in study.rates.values() for lru, most in zip(rates["LRU"], rates[OPTIMUM], strict=True) if most]
    few = sum(gain >= GAIN for gain in gains)
    verdict = "It meets" if study.replaces_lru else "It does not meet"
    return [
        f"**LRU** reaches {min(shares):.0%} to {max(shares):.0%} of the hits that were possible. At {slots} slots a layer the optimum is "
        f"{_list(_per_slots(study, OPTIMUM, 'LRU'))} points above it, mean over the traces.",
        f"**Best policy: {best}**, {study.mean_gain(best):+.1f} points over LRU on average, {_list(_per_slots(study, best, 'LRU'))} at "
        f"{slots} slots; at least {GAIN:g} points better in {few} of {cells} cells, at worst {min(gains):+.1f}. {verdict} the rule for "
        f"a new default: {GAIN:g} points in most cells, nowhere more than {LOSS:g} lost.",
        *(
            f"Of that, on the {kind} traces alone: {part.mean_gain(best):+.1f} points, {_list(_per_slots(part, best, 'LRU'))}; "
            f"at least {GAIN:g} in {sum(gain >= GAIN for gain in part.gains(best))} of {len(part.rates) * len(SLOTS)} cells."
            for kind, part in ((kind, study.part(kind)) for kind in ("recorded", "drawn"))
            if part.rates
        ),
        f"The engine's default is {DEFAULT} (`--cache-policy step_lfu`), in slots per layer; `lru` is LRU.",
        f"**One pool for all layers** changes LRU by {_list(_per_slots(study, POOL + 'LRU', 'LRU'))} points at as many slots in all, and "
        f"{best} by {_list(_per_slots(study, POOL + best, best))}.",
    ]


def report(study: Study, command: str) -> str:
    """The record, in Markdown."""
    head = f"| {{}} | {' | '.join(map(str, SLOTS))} |\n|---|{'---|' * len(SLOTS)}"
    best = study.best
    lines = [
        "# Which experts to keep",
        "",
        f"`{command}`; Python {platform.python_version()}. Hit rates are counts, so the machine does not matter.",
        "",
        "Hits in percent of experts handed out, each once per step and layer, one token a step, the first quarter of each trace left out. "
        "Of a step's experts those in memory are handed out first, as the engine does. Slots are per layer; one pool has as many in all. "
        "*LFU*: least used goes first, a use counting half after so many steps. *Step, then LFU*: experts of the newest step stay before "
        "all others; with as many slots as a step uses that is LRU. With both, an expert that would be the first to go does not enter. "
        "*Step, then LFU* was devised after a first look at such traces, so what it gains here was not predicted. *Optimum*: knows the "
        "future; of residents and newcomers the next used stay, and none of them has to.",
        "",
        *(f"* {sentence}" for sentence in findings(study)),
        "",
        "![Hit rate over slots](cache_policies.svg)",
        "",
        *several(study),
        "## Points over LRU, all traces",
        "",
        f"| policy | mean | worst | cells of {len(study.rates) * len(SLOTS)} with {GAIN:g} or more | with {LOSS:g} or more lost |",
        "|---|---|---|---|---|",
    ]
    for name in sorted(POLICIES, key=study.mean_gain, reverse=True):
        gains = study.gains(name)
        won, lost = sum(gain >= GAIN for gain in gains), sum(gain <= -LOSS for gain in gains)
        lines.append(f"| {name} | {study.mean_gain(name):+.1f} | {min(gains):+.1f} | {won} | {lost} |")
    for trace in study.traces:
        steps, layers, top_k = trace.used.shape
        lines += [
            "",
            f"## {trace.name}",
            "",
            f"{trace.source[0].upper()}{trace.source[1:]}. {steps:,} steps, {layers} layers, {trace.experts} experts top {top_k}. "
            f"{trace.repeats:.0%} of a step's experts were in the last; a layer's {top_k} most used take {trace.top_share:.0%}.",
            "",
            head.format("slots per layer"),
        ]
        for name, rates in study.rates[trace.name].items():
            shown = f"**{name}**" if name in ("LRU", best, OPTIMUM) else name
            lines.append(f"| {shown} | {' | '.join(f'{rate:.1f}' for rate in rates)} |")
    return "\n".join([*lines, ""])


def several(study: Study) -> list[str]:
    """A table of steps of several positions, and where the default is worst."""
    if not study.several:
        return []
    worst = min(a - b for rates in study.several.values() for a, b in zip(rates[DEFAULT], rates["LRU"], strict=True))
    lines = [
        "## Steps of several positions",
        "",
        f"Consecutive positions of the recorded traces taken together: each of a step's experts once. LRU → {DEFAULT}, which is at worst "
        f"{worst:+.1f} points from LRU here.",
        "",
        f"| steps | trace | {' | '.join(f'{slots} slots' for slots in SEVERAL_SLOTS)} |",
        f"|---|---|{'---|' * len(SEVERAL_SLOTS)}",
    ]
    for (trace, name), rates in sorted(study.several.items(), key=lambda item: list(SEVERAL).index(item[0][1])):
        cells = (f"{lru:.1f} → {default:.1f}" for lru, default in zip(rates["LRU"], rates[DEFAULT], strict=True))
        lines.append(f"| {name} | {trace} | {' | '.join(cells)} |")
    return [*lines, ""]


def plot(path: Path, study: Study) -> None:
    """LRU, the best policy and the optimum over slots, mean over the traces of either kind."""
    parts = {kind: study.part(kind).rates.values() for kind in ("recorded", "drawn")}
    panels = [
        Panel(
            f"slots per layer ({kind} traces)",
            "hits, percent of experts handed out",
            list(map(str, SLOTS)),
            {name: np.mean([rates[name] for rates in part], axis=0).tolist() for name in ("LRU", study.best, OPTIMUM)},
        )
        for kind, part in parts.items()
        if part
    ]
    draw(path, "Which experts to keep", panels)


@click.command()
@click.option("--model", type=click.Path(exists=True, file_okay=False, path_type=Path), default=MODEL, help="Container to record from.")
@click.option(
    "--text", "files", multiple=True, type=click.Path(exists=True, dir_okay=False, path_type=Path), help="Text to decode as well."
)
@click.option("--trace", "given", multiple=True, type=click.Path(exists=True, dir_okay=False, path_type=Path), help="Saved traces instead.")
@click.option("--steps", type=click.IntRange(min=8), default=2048, show_default=True, help="Steps of a recorded trace.")
@click.option("--drawn-steps", type=click.IntRange(min=8), default=1000, show_default=True, help="Steps of a drawn trace.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of the drawn traces.")
@click.option("--save", type=click.Path(file_okay=False, path_type=Path), help="Directory for the traces.")
@click.option("--record", "write", is_flag=True, help="Write validation/records/cache_policies.md and its plot.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def main(
    *,
    model: Path,
    files: tuple[Path, ...],
    given: tuple[Path, ...],
    steps: int,
    drawn_steps: int,
    seed: int,
    save: Path | None,
    write: bool,
    as_json: bool,
) -> None:
    """Simulate cache policies on recorded and drawn routing; exit 1 where a simulation contradicts itself or the engine."""
    study = Study()
    if write:
        check_plot(RECORD.with_suffix(".svg"))
    with Progress(console=Console(stderr=True)) as progress:
        if given:
            traces = [Trace.open(path) for path in given]
        else:
            traces = [*recorded(model, files, steps, study, progress), *(drawn.draw(drawn_steps, seed=seed) for drawn in DRAWN)]
        if save is not None:
            for trace in traces:
                trace.save(save)
        run(traces, study, progress)
    text = report(study, " ".join(["python validation/cache_policies.py", *sys.argv[1:]]))
    if write:
        RECORD.write_text(text, encoding="utf8")
        plot(RECORD.with_suffix(".svg"), study)
    if as_json:
        described = [{"name": t.name, "source": t.source, "repeats": t.repeats, "top_share": t.top_share} for t in study.traces]
        best = {"best": study.best, "replaces_lru": study.replaces_lru}
        click.echo(json.dumps({"slots": SLOTS, "traces": described, "hit_percent": study.rates, **best, "failures": study.failures}))
    else:
        Console().print(Markdown(text))
    for failure in study.failures:
        click.echo(f"FAILED: {failure}", err=True)
    sys.exit(1 if study.failures else 0)


if __name__ == "__main__":
    main()
