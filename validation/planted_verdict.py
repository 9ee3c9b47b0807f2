"""What is planted, and what the test suite made of it: the table of faults, verdicts, and the record of a run."""

from __future__ import annotations

import dataclasses
import platform
import time
import tomllib
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

from planted_tree import CannotBuildError, Run, Tree

TABLE = Path(__file__).with_name("planted_faults.toml")

FAULTS = (
    "swapped nibble",
    "scale off by one group",
    "dropped last group",
    "expert off by one",
    "stale slot",
    "bias used as weight",
    "ties to the highest id",
    "renormalising when it must not",
    "forgetting routed_scaling_factor",
    "A summed from scores before step 5",
    "budget in the wrong scope",
    "half-split rope",
    "swapped MTP halves",
    "zero output",
    "NaN",
)


@dataclasses.dataclass(frozen=True)
class Mutation:
    """A fault at one place.

    Attributes:
        fault: its name in `FAULTS`.
        name: unique.
        what: what the changed code does.
        likely: test files that are run before the rest of the suite.
        edits: (file, text that occurs there exactly once, what takes its place); all of them together make the fault.
    """

    fault: str
    name: str
    what: str
    likely: tuple[str, ...]
    edits: tuple[tuple[str, str, str], ...]

    @property
    def native(self) -> bool:
        """Whether the extension has to be built again."""
        return any(file.startswith("native/") for file, _, _ in self.edits)

    @property
    def where(self) -> str:
        """The files that it changes."""
        return ", ".join(dict.fromkeys(file for file, _, _ in self.edits))


@dataclasses.dataclass(frozen=True)
class Verdict:
    """`told` is the tests whose check failed, or why there is none; `seconds` are those of the tests, without the build."""

    mutation: Mutation
    outcome: Literal["caught", "survived", "invalid"]
    failed: tuple[str, ...]
    told: str
    seconds: float

    @property
    def caught(self) -> bool:
        return self.outcome == "caught"


def load_mutations(root: Path, table: Path = TABLE) -> list[Mutation]:
    """The table, checked against the sources at `root`.

    Raises:
        ValueError: an unknown fault, a name used twice, or an old text that does not occur exactly once.
    """
    entries: list[dict[str, Any]] = tomllib.loads(table.read_text(encoding="utf8"))["mutation"]
    mutations = []
    for entry in entries:
        edits = tuple((file, old, new) for file, old, new in entry.pop("edits"))
        mutations.append(Mutation(**{**entry, "likely": tuple(entry["likely"])}, edits=edits))
    names = [mutation.name for mutation in mutations]
    if len(set(names)) < len(names):
        raise ValueError(f"names used twice: {sorted({name for name in names if names.count(name) > 1})}")
    for mutation in mutations:
        if mutation.fault not in FAULTS:
            raise ValueError(f"{mutation.name}: no fault is called {mutation.fault!r}")
        for file, old, new in mutation.edits:
            found = (root / file).read_text(encoding="utf8").count(old)
            if found != 1 or old == new:
                raise ValueError(f"{mutation.name}: occurs {found} times in {file}, or nothing is changed: {old}")
    return mutations


def examine(tree: Tree, mutation: Mutation) -> Verdict:
    """Plant one fault in the copy, see what the suite says, and take it out again."""
    begin = time.monotonic()

    def verdict(outcome: Literal["caught", "survived", "invalid"], told: str, failed: tuple[str, ...] = ()) -> Verdict:
        return Verdict(mutation, outcome, failed, told, time.monotonic() - begin)

    tree.build()  # the fault before this one may have been native
    sound = tree.extension()
    with tree.changed(mutation.edits):
        if mutation.native:
            try:
                tree.build()
            except CannotBuildError as error:
                return verdict("invalid", f"does not compile: {error}")
            if tree.extension() == sound:
                return verdict("invalid", "the extension is the same")
        if problem := tree.import_problem():
            return verdict("invalid", problem)
        begin = time.monotonic()
        run = tree.run_suite(mutation.likely)
        if mutation.likely and not run.failed:
            run = tree.run_suite()
    if run.failed:
        return verdict("caught", ", ".join(run.failed), run.failed)
    if run.passed:
        return verdict("survived", f"{run.tests} tests passed")
    return verdict("invalid", run.problem or "; ".join(run.broken))


def faults_caught(verdicts: Sequence[Verdict]) -> dict[str, bool]:
    """By fault: whether every one of its mutations was caught."""
    return {f: all(v.caught for v in verdicts if v.mutation.fault == f) for f in FAULTS if any(v.mutation.fault == f for v in verdicts)}


def summary(verdicts: Sequence[Verdict]) -> dict[str, Any]:
    """What `--json` prints: `planted` and `caught` count faults, as `faults_caught` does."""
    caught = faults_caught(verdicts)
    entries = [
        {
            "name": verdict.mutation.fault,
            "mutation": verdict.mutation.name,
            "file": verdict.mutation.where,
            "outcome": verdict.outcome,
            "caught": verdict.caught,
            "failed": list(verdict.failed),
            "told": verdict.told,
            "seconds": round(verdict.seconds, 1),
        }
        for verdict in verdicts
    ]
    return {"faults": entries, "planted": len(caught), "caught": sum(caught.values())}


def record(verdicts: Sequence[Verdict], baseline: Run | None) -> str:
    """The table of a run as Markdown, with what it depends on."""
    caught = faults_caught(verdicts)
    packages = ", ".join(f"{name} {version(name)}" for name in ("jax", "numpy", "pytest", "hypothesis"))
    lines = [
        "# Planted faults, and the tests that saw them",
        "",
        "`python validation/planted_faults.py --all` plants each fault in a copy of the tree, builds it and runs the unchanged suite",
        "until a test's own check fails. Code that does not compile, cannot be imported or crashes would not count as caught. Tests that",
        "are likely to see a fault run first, all the others where those pass.",
        "",
        f"**{sum(caught.values())} of {len(caught)} faults caught**, planted at {len(verdicts)} places, of which",
        f"{sum(v.caught for v in verdicts)} were seen. Without a fault "
        + (f"all {baseline.tests} tests of the suite passed." if baseline else "the suite was not run."),
        "",
        f"{platform.machine()}, Python {platform.python_version()}, {packages}. Seconds are from the start of the tests to the failure.",
        "",
        "| fault | what the changed code does | where | test that failed first | seconds |",
        "|---|---|---|---|---|",
    ]
    for verdict in verdicts:
        mutation = verdict.mutation
        told = f"`{verdict.failed[0]}`" if verdict.caught else f"**{verdict.outcome}**: {verdict.told}"
        cells = [mutation.fault, f"{mutation.what} ({mutation.name})", f"`{mutation.where}`", told, f"{verdict.seconds:.0f}"]
        lines.append("| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"
