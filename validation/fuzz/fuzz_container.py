"""Coverage-guided fuzzing of the container reader with atheris: `make fuzz`, or see --help. Needs the `fuzz` extra.

Every input describes a damaged container (mutations.py), which is written to a directory in memory and opened. A crash is anything
but a ColibriError, an allocation that the files do not account for, or a container without damage that does not open.
Exit status not 0: there was a crash (its input stays in --artifacts, and giving that file as --replay repeats it), or fewer than 20 %
of the inputs were past JSON parsing.
"""

from __future__ import annotations

import atexit
import json
import os
import resource
import shutil
import sys
import tempfile
import time
import zlib
from pathlib import Path
from typing import Any

import atheris
import click

with atheris.instrument_imports(include=["colibri_jax"], enable_loader_override=False):
    import colibri_jax.config
    import colibri_jax.container.reader
    import colibri_jax.families
    import colibri_jax.quant  # noqa: F401

sys.path.insert(0, str(Path(__file__).parents[1]))
from fuzz.containers import bases
from fuzz.mutations import damaged
from fuzz.target import STAGES, Directory, Observer

REQUIRED_SHARE = 0.2
MEASURED_ONE_IN = 8  # measuring allocations takes longer than the rest
ADDRESS_SPACE = 2 << 30  # above what the process has when fuzzing begins: a larger allocation is a MemoryError at once


class Campaign:
    """One run: its counts and its time."""

    def __init__(self, directory: Path, report: Path | None, progress_every: int) -> None:
        self.observer, self.directory = Observer(), Directory(directory)
        self.inputs = self.measured = 0
        self._report, self._every = report, progress_every
        self._begin = time.monotonic()

    def one(self, data: bytes) -> None:
        """Try one input."""
        self.inputs += 1
        checksum = zlib.crc32(data)
        measured = checksum % MEASURED_ONE_IN == 0
        self.measured += measured
        self.directory.write(damaged(data))
        # Groups of 64 decide what would be ambiguous; now and then nobody decides.
        refusal = self.observer.run(self.directory.path, None if checksum % 7 == 0 else 64, checksum >> 8, measured)
        if not data and refusal:
            raise AssertionError(f"a container without damage was refused: {refusal}")
        if self.inputs % self._every == 0:
            self.write_report(sys.stderr)

    def summary(self) -> dict[str, Any]:
        """Counts so far, as JSON."""
        seconds = time.monotonic() - self._begin
        reached = {stage: self.observer.reached[stage] for stage in STAGES}
        return {
            "inputs": self.inputs,
            "seconds": round(seconds, 1),
            "inputs_per_second": round(self.inputs / max(seconds, 1e-9)),
            "reached": reached,
            "share_past_json": round(reached["header parsed"] / max(self.inputs, 1), 4),
            "allocations_measured": self.measured,
            "refusals": dict(self.observer.refusals.most_common()),
        }

    def write_report(self, stream: object) -> None:
        """The summary on one line of a stream, and in the report's file."""
        text = json.dumps(self.summary())
        print(text, file=stream, flush=True)  # type: ignore[call-overload]
        if self._report:
            self._report.write_text(text + "\n")


def _limit_memory() -> None:
    in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (in_use + ADDRESS_SPACE, resource.RLIM_INFINITY))


def seeds() -> list[bytes]:
    """One input per container and operation."""
    return [
        bytes([base, *operations]) for base in range(len(bases())) for operations in ([], *([1, op, op, 0, 0, 0, 0] for op in range(16)))
    ]


@click.command()
@click.option("--inputs", type=click.IntRange(min=1), default=1_000_000, show_default=True)
@click.option("--seed", type=click.IntRange(min=1), default=1, show_default=True)
@click.option("--artifacts", type=click.Path(path_type=Path, file_okay=False), default=Path("build/fuzz"), show_default=True)
@click.option("--report", type=click.Path(path_type=Path, dir_okay=False), help="Also write the summary to this file.")
@click.option("--replay", type=click.Path(path_type=Path, exists=True), multiple=True, help="Only try these inputs.")
@click.option("--json", "as_json", is_flag=True, help="Print the summary on stdout too.")
def main(inputs: int, seed: int, artifacts: Path, report: Path | None, replay: tuple[Path, ...], as_json: bool) -> None:
    """Fuzz Container.open and Container.read."""
    memory = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(prefix="fuzz-container-", dir=memory if memory.is_dir() else None))
    campaign = Campaign(folder, report, progress_every=50_000)

    def finish() -> int:
        """Exit status of a run without a crash."""
        campaign.write_report(sys.stdout if as_json else sys.stderr)
        shutil.rmtree(folder, ignore_errors=True)
        share = campaign.summary()["share_past_json"]
        if share >= REQUIRED_SHARE:
            return 0
        print(f"FAILED: {share:.1%} of the inputs were past JSON parsing, {REQUIRED_SHARE:.0%} required", file=sys.stderr, flush=True)
        return 1

    def one(data: bytes) -> None:
        campaign.one(data)
        if campaign.inputs == inputs:
            os._exit(finish())  # libFuzzer would end the process without a way back here

    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    if replay:
        with campaign.observer.installed():
            for path in replay:
                campaign.one(path.read_bytes())
                print(f"{path}: {', '.join(campaign.observer.refusals.elements()) or 'opened'}")
                campaign.observer.refusals.clear()
        return
    corpus = artifacts / "corpus"
    corpus.mkdir(parents=True, exist_ok=True)
    for number, data in enumerate(seeds()):
        (corpus / f"seed-{number:03d}").write_bytes(data)
    bases()
    _limit_memory()
    limits = ["-runs=-1", "-max_len=160", "-len_control=20", "-timeout=20", "-rss_limit_mb=0"]
    atheris.Setup([sys.argv[0], f"-seed={seed}", *limits, f"-artifact_prefix={artifacts}/", str(corpus)], one)
    with campaign.observer.installed():
        atheris.Fuzz()


if __name__ == "__main__":
    main()
