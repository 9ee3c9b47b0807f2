"""The proof in one command: every check that is too long for the test suite, and a report that a person can read.

    python validation/proof.py --work DIR [--only PART …] [--quick]

Runs the parts below one after the other, keeps each one's answer in DIR, and writes `validation/records/proof.md`. An answer is
used again while the sources that it was made from are the same, so that an interrupted proof goes on where it was. Exit status 1
if any part failed.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
from proof_report import render
from rich.console import Console

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "validation" / "records" / "proof.md"
PRODUCT, SCRIPTS, TESTS = ("colibri_jax", "native", "pyproject.toml"), ("validation",), ("tests",)
SOURCE_SUFFIXES = {".py", ".cpp", ".h", ".cmake", ".txt", ".toml", ".npz", ".sh"}
REPORTERS = {"proof.py", "proof_report.py"}  # no answer depends on them

Answer = dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """One check.

    Attributes:
        title: what it is called in the report.
        command: to be run in the repository; `{work}` is a directory of its own that is removed afterwards.
        sources: files and directories that its answer depends on.
        quick: replacements for arguments under `--quick`.
        read: from the command's output to its answer; by default the output is one JSON object.
    """

    title: str
    command: Sequence[str]
    sources: Sequence[str]
    quick: dict[str, str] = dataclasses.field(default_factory=dict)
    read: Callable[[str], Answer] = json.loads


PYTHON = sys.executable
PARTS: dict[str, Part] = {
    "suite": Part(
        title="The test suite",
        command=(PYTHON, "validation/suite_numbers.py", "--json"),
        sources=(*PRODUCT, *SCRIPTS, *TESTS),
    ),
    "selection": Part(
        title="Selection",
        sources=(*PRODUCT, *(f"validation/selection_{part}.py" for part in ("cases", "blocks", "reading"))),
        command=(PYTHON, "validation/selection_cases.py", "--cases", "200000", "--json"),
        quick={"200000": "4000"},
    ),
    "models": Part(
        title="Models",
        sources=(
            *PRODUCT,
            "validation/choosing.py",
            *(f"validation/model_{part}.py" for part in ("cases", "checks", "laws", "runs", "shapes")),
        ),
        command=(PYTHON, "validation/model_cases.py", "--cases", "5120", "--shapes", "64", "--json"),
        quick={"5120": "60", "64": "6"},
    ),
    "faults": Part(
        title="Planted faults",
        command=(PYTHON, "validation/planted_faults.py", "--all", "--skip-baseline", "--work", "{work}", "--json"),
        sources=(*PRODUCT, *SCRIPTS, *TESTS),
    ),
    "memory": Part(
        title="Bigger than memory",
        sources=(*PRODUCT, "validation/bigger_than_memory.py", "validation/bench/make_model.py"),
        command=(PYTHON, "validation/bigger_than_memory.py", "--work", "{work}", "--json"),
    ),
    "sanitizers": Part(
        title="Sanitizers",
        command=("make", "--no-print-directory", "sanitize"),
        sources=("native", "Makefile"),
        read=lambda output: {"passed": [line.strip() for line in output.splitlines() if "tests passed" in line]},
    ),
}


def source_hash(names: Sequence[str]) -> str:
    """Of files and directories in the repository; generated files, records and those who report are not part of it."""
    total = hashlib.sha256()
    files = [path for name in names if not (ROOT / name).is_file() for path in (ROOT / name).rglob("*") if path.suffix in SOURCE_SUFFIXES]
    files = [path for path in files if "records" not in path.parts and path.name not in REPORTERS]
    for path in sorted([*files, *(ROOT / name for name in names if (ROOT / name).is_file())]):
        total.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes())
    return total.hexdigest()[:16]


def run_part(part: Part, work: Path, quick: bool) -> Answer:
    """Run one part and read its answer. A part that fails has one too: what it printed."""
    with tempfile.TemporaryDirectory(dir=work) as scratch:
        command = [part.quick.get(word, word) if quick else word for word in part.command]
        command = [word.replace("{work}", scratch) for word in command]
        begin = time.perf_counter()
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    shown = " ".join(["python" if word == PYTHON else "DIR" if word == scratch else word for word in command])
    answer: Answer = {"command": shown, "seconds": time.perf_counter() - begin, "status": done.returncode}
    try:
        return answer | {"result": part.read(done.stdout)}
    except ValueError:
        return answer | {"status": done.returncode or 1, "result": {}, "output": done.stdout[-2000:]}


@click.command()
@click.option("--work", type=click.Path(file_okay=False, path_type=Path), required=True, help="For answers and whatever the parts write.")
@click.option("--only", type=click.Choice(tuple(PARTS)), multiple=True, help="Run these parts; the others keep the answers they have.")
@click.option("--quick", is_flag=True, help="Few cases: shows that the parts run; writes its report to DIR instead of the records.")
def main(work: Path, only: tuple[str, ...], quick: bool) -> None:
    """Run every long check and write the report."""
    work.mkdir(parents=True, exist_ok=True)
    console, answers = Console(stderr=True), {}
    for name, part in PARTS.items():
        sources = source_hash(part.sources)
        kept = work / f"{name}{'-quick' if quick else ''}.json"
        answer = json.loads(kept.read_text(encoding="utf-8")) if kept.exists() else None
        fresh = answer is not None and answer["sources"] == sources and answer["status"] == 0
        if (not only and not fresh) or name in only:
            console.rule(part.title)
            answer = run_part(part, work, quick) | {"sources": sources}
            kept.write_text(json.dumps(answer), encoding="utf-8")
        if answer is not None:
            answers[name] = answer | {"title": part.title, "stale": answer["sources"] != sources}
            console.print(f"{part.title}: {'passed' if answer['status'] == 0 else 'FAILED'}, {answer['seconds']:.0f} s")
    target = work / RECORD.name if quick else RECORD
    target.write_text(render(answers, tuple(PARTS)), encoding="utf-8")
    console.print(f"report: {target}")
    sys.exit(0 if len(answers) == len(PARTS) and all(a["status"] == 0 and not a["stale"] for a in answers.values()) else 1)


if __name__ == "__main__":
    main()
