"""From the answers of `proof.py` to Markdown."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

Answer = Mapping[str, Any]

REQUIRED_SELECTION_CASES, REQUIRED_MODEL_CASES, REQUIRED_SHAPES, REQUIRED_FAULTS = 200_000, 5_000, 60, 15
SHOWN_TIES = 12  # those with the widest margins
PACKAGES = ("jax", "jaxlib", "numpy", "safetensors", "hypothesis", "pytest")


def render(answers: Mapping[str, Answer], parts: Sequence[str]) -> str:
    """The whole report. `parts`: all that there should be; what is missing is said."""
    lines = [
        "# The proof",
        "",
        "Written by `make proof`. Reference (JAX), native engine (C++) and transformers are held against each other, and the checks",
        "themselves against faults planted on purpose.",
        "",
        *_table(("part", "command", "minutes", "sources", "outcome"), (_part_row(name, answers.get(name)) for name in parts)),
        "",
    ]
    for name, section in SECTIONS.items():
        if name in answers:
            lines += [f"## {answers[name]['title']}", "", *section(answers[name]["result"]), ""]
    lines += ["## Versions and machine", "", *_machine(), ""]
    return "\n".join(lines)


def _part_row(name: str, answer: Answer | None) -> tuple[str, ...]:
    if answer is None:
        return name, "", "", "", "**not run**"
    outcome = "passed" if answer["status"] == 0 else f"**failed** ({answer['status']})"
    if answer["stale"]:
        outcome += ", **but the sources have changed since**"
    return answer["title"], f"`{answer['command']}`", f"{answer['seconds'] / 60:.1f}", f"`{answer['sources']}`", outcome


def _suite(result: Mapping[str, Any]) -> list[str]:
    files = result.get("files", {})
    total = {outcome: sum(counts.get(outcome, 0) for counts in files.values()) for outcome in ("passed", "skipped", "failure", "error")}
    rows = ((e["what"], e["of"], e["tests"], f"{e['value']:.2g}", f"{e['bound']:.2g}", _share(e)) for e in result.get("errors", ()))
    return [
        f"{total['passed']:,} tests passed in {len(files)} files, {total['skipped']} skipped, {total['failure'] + total['error']} failed.",
        "",
        *_table(("what", "of", "cases", "largest relative error", "bound", "share"), rows),
    ]


def _share(error: Mapping[str, Any]) -> str:
    return f"{error['value'] / error['bound']:.0%}"


def _selection(result: Mapping[str, Any]) -> list[str]:
    lines = [
        f"{result['cases']:,} generated cases ({REQUIRED_SELECTION_CASES:,} asked for), {result['positions']:,} positions: "
        f"**{result['differing_cases']} differences** between reference and native in any field, {result['misread_cases']} against the "
        f"third reading of the rules. Reference on: {result['device']}.",
        "",
    ]
    lines += _table(("policy", "cases"), ((policy, f"{n:,}") for policy, n in sorted(result["by_policy"].items())))
    lines += ["", *_table(("what was met", "cases"), ((event, f"{n:,}") for event, n in result["events"].items()))]
    return lines


def _models(result: Mapping[str, Any]) -> list[str]:
    lines = [
        f"{result['cases']:,} generated models, token streams and options ({REQUIRED_MODEL_CASES:,} asked for) over {result['shapes']} "
        f"distinct shapes ({REQUIRED_SHAPES} asked for), {len(result['failures'])} failures.",
        "",
    ]
    header = (
        "family",
        "cases",
        "shapes",
        "selections",
        "cut",
        "rows compared",
        "equal in every bit",
        "worst ulp",
        "(iii) error",
        "share",
        "near-ties",
    )
    rows = (
        (
            family,
            f"{f['cases']:,}",
            f["shapes"],
            f"{f['selections']:,}",
            f"{f['selections_cut']:,}",
            f"{f['rows']:,}",
            f"{f['equal_rows']:,}",
            f"{f['worst_ulps']:g}",
            f"{f['worst_logit_error']:.2g}",
            f"{f['logit_error_share_of_bound']:.0%}",
            f["near_ties"],
        )
        for family, f in sorted(result["families"].items())
    )
    lines += [*_table(header, rows), ""]
    lines += _table(
        ("property", "cases", "failures"), ((name, f"{p['cases']:,}", p["failures"]) for name, p in result["properties"].items())
    )
    events = ", ".join(f"{name} {n:,}" for name, n in sorted(result["total"]["events"].items()))
    lines += ["", f"Met on the way: {events}.", "", f"Near-ties: {len(result['near_ties'])}.", *_near_ties(result["near_ties"])]
    lines += [
        "",
        f"Cases beyond the bound of (iii), in which other orders of sums move the reference itself as far: {len(result['sensitive'])}.",
        "",
    ]
    return lines + [f"- case {s['case']}, {s['what']}: {s['error']:.2g}, own movement {s['own_movement']:.2g}" for s in result["sensitive"]]


def _near_ties(ties: Sequence[Mapping[str, Any]]) -> list[str]:
    rows = (
        (t["case"], t["layer"], t["position"], "none" if t["margin"] is None else f"{t['margin']:.2g}", f"{t['difference']:.2g}")
        for t in sorted(ties, key=lambda t: -(t["margin"] or 0.0))[:SHOWN_TIES]
    )
    return ["", *_table(("case", "layer", "position", "margin", "difference of values"), rows)] if ties else []


def _faults(result: Mapping[str, Any]) -> list[str]:
    names = {fault["name"] for fault in result["faults"]}
    caught = names - {fault["name"] for fault in result["faults"] if not fault["caught"]}
    rows = (
        (f["name"], f["mutation"], f["file"], "yes" if f["caught"] else "**no**", f"`{_first(f['failed'])}`", f"{f['seconds']:.0f}")
        for f in result["faults"]
    )
    return [
        f"{len(caught)} of {len(names)} faults ({REQUIRED_FAULTS} asked for) caught by the unchanged suite; planted in "
        f"{len(result['faults'])} places.",
        "",
        *_table(("fault", "mutation", "planted in", "caught", "first test that failed", "seconds"), rows),
    ]


def _first(tests: Sequence[str]) -> str:
    return re.sub(r"^tests/", "", tests[0]) if tests else ""


def _memory(result: Mapping[str, Any]) -> list[str]:
    rows = (
        (
            name,
            _ended(outcome),
            *(f"{outcome[key] / 1e9:.2f} GB" for key in ("peak_address_bytes", "peak_resident_bytes")),
            f"{outcome['seconds']:.0f}",
        )
        for name, outcome in result["outcomes"].items()
    )
    return [
        f"A container of {result['container_bytes'] / 1e9:.2f} GB, compared by processes with an address space of "
        f"{result['limit_bytes'] / 1e9:.2f} GB.",
        "",
        *_table(("process", "outcome", "peak address space", "peak resident", "seconds"), rows),
    ]


def _ended(outcome: Mapping[str, Any]) -> str:
    if outcome["report"] is not None:
        return "all comparisons hold" if outcome["report"]["passed"] else "a comparison fails"
    return "out of memory" if outcome["out_of_memory"] else outcome["failure"]


def _sanitizers(result: Mapping[str, Any]) -> list[str]:
    return [f"- {line}" for line in result.get("passed", ())]


SECTIONS = {
    "suite": _suite,
    "selection": _selection,
    "models": _models,
    "faults": _faults,
    "memory": _memory,
    "sanitizers": _sanitizers,
}


def _machine() -> list[str]:
    cpu = next((line.split(":", 1)[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")), platform.machine())
    memory = next((int(line.split()[1]) / 2**20 for line in _lines("/proc/meminfo") if line.startswith("MemTotal")), 0.0)
    compiler = subprocess.run(["c++", "--version"], capture_output=True, text=True, check=False).stdout.splitlines()[:1]
    from colibri_jax import _native

    return [
        f"- {cpu}, {len(os.sched_getaffinity(0))} cores, {memory:.0f} GiB; instruction sets: {', '.join(_native.kernels.available_isas())}",
        f"- Python {platform.python_version()}, {', '.join(f'{name} {importlib.metadata.version(name)}' for name in PACKAGES)}",
        f"- {compiler[0] if compiler else 'no compiler'}",
    ]


def _lines(path: str) -> list[str]:
    return Path(path).read_text(encoding="utf-8").splitlines() if Path(path).exists() else []


def _table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> list[str]:
    return [f"| {' | '.join(str(cell) for cell in row)} |" for row in (header, ["---"] * len(header), *rows)]
