"""A throwaway copy of the tree: its build, its test runs, and proof that the tests import the copy and nothing else."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import planted_watch

PACKAGE = "colibri_jax"
# Imported before every run, from the copy; the second loads the extension.
MODULES = (PACKAGE, f"{PACKAGE}.native", f"{PACKAGE}.reference")
# It compares the table of faults with sources that have none.
LEFT_OUT = "test_planted_faults.py"
NOT_COPIED = shutil.ignore_patterns(".git", ".venv", "build", "dist", "work-models", "__pycache__", "*.so", ".hypothesis", ".*_cache")
LONGEST_SECONDS = 3600

# Finders of editable installations come before PYTHONPATH and would bring the tree that they were installed from.
SITE = '''"""Loaded by every Python process of the run."""
import sys

sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in getattr(finder, "__module__", "")]
'''


class CannotBuildError(Exception):
    """The sources do not compile."""


@dataclasses.dataclass(frozen=True)
class Run:
    """What a run of tests found.

    Attributes:
        failed: tests whose own check failed.
        broken: tests that failed otherwise: at import, before their own code, or in a process that ended.
        tests: how many passed.
        problem: why the run means nothing, or "".
        log: pytest's output.
    """

    failed: tuple[str, ...]
    broken: tuple[str, ...]
    tests: int
    seconds: float
    problem: str
    log: Path

    @property
    def all_failed(self) -> tuple[str, ...]:
        """Everything that failed, in whatever way."""
        return self.failed + self.broken

    @property
    def passed(self) -> bool:
        """Every test ran and none failed."""
        return not (self.all_failed or self.problem)


def copy_tree(source: Path, target: Path) -> None:
    """Make `target` a copy of the sources. Files that are equal already keep their times, so that nothing is compiled in vain."""
    for path in list(target.rglob("*")):
        if path.is_file() and path.suffix != ".so" and not (source / path.relative_to(target)).exists():
            path.unlink()

    def copy(old: str, new: str) -> None:
        if not (os.path.exists(new) and Path(old).read_bytes() == Path(new).read_bytes()):
            shutil.copy(old, new)

    shutil.copytree(source, target, ignore=NOT_COPIED, copy_function=copy, dirs_exist_ok=True)


class Tree:
    """The copy at `work / "tree"`, beside its build and the log of the last run.

    Args:
        work: a directory of its own.
        modules: what must come from the copy.
        jobs: processes of the compiler and of the whole suite.
    """

    def __init__(self, work: Path, *, modules: Sequence[str] = MODULES, jobs: int = 2) -> None:
        self.root = work / "tree"
        self._work = work
        self._build = work / "build"
        self._modules = modules
        self._jobs = jobs
        site = work / "site"
        site.mkdir(parents=True, exist_ok=True)
        (site / "sitecustomize.py").write_text(SITE, encoding="utf8")
        shutil.copy(planted_watch.__file__, site)
        paths = [str(site), str(self.root), *filter(None, [os.environ.get("PYTHONPATH")])]
        self._environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONDONTWRITEBYTECODE": "1"}
        self._environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])

    def build(self) -> None:
        """Build the extension into the copy; only what changed is compiled.

        Raises:
            CannotBuildError: with the end of the compiler's output.
        """
        if not (self.root / "native").exists():
            return
        if not (self._build / "build.ninja").exists():
            cmakedir = self._output([sys.executable, "-m", "pybind11", "--cmakedir"]).strip()
            options = {
                "CMAKE_BUILD_TYPE": "Release",
                "COLIBRI_INPLACE": "ON",
                "Python_EXECUTABLE": sys.executable,
                "pybind11_DIR": cmakedir,
            }
            defined = [f"-D{name}={value}" for name, value in options.items()]
            self._output(["cmake", "-S", str(self.root / "native"), "-B", str(self._build), "-G", "Ninja", *defined])
        self._output(["ninja", "-C", str(self._build), f"-j{self._jobs}"])

    def extension(self) -> str:
        """A digest of the compiled extension; empty where there is none."""
        found = sorted((self.root / PACKAGE).glob("_native*.so"))
        return hashlib.sha256(b"".join(path.read_bytes() for path in found)).hexdigest() if found else ""

    @contextlib.contextmanager
    def changed(self, edits: Sequence[tuple[str, str, str]]) -> Iterator[None]:
        """Replace texts (file, old, new) for a while.

        Raises:
            ValueError: an old text does not occur exactly once.
        """
        before = {file: (self.root / file).read_text(encoding="utf8") for file, _, _ in edits}
        after = dict(before)
        for file, old, new in edits:
            if after[file].count(old) != 1:
                raise ValueError(f"{file}: {after[file].count(old)} times: {old}")
            after[file] = after[file].replace(old, new)
        try:
            for file, text in after.items():
                (self.root / file).write_text(text, encoding="utf8")
            yield
        finally:
            for file, text in before.items():
                (self.root / file).write_text(text, encoding="utf8")

    def import_problem(self) -> str:
        """Why the package cannot be imported from the copy; empty if it can."""
        code = "import importlib, sys\nfor name in sys.argv[1:]: print(importlib.import_module(name).__file__)"
        done = subprocess.run(
            [sys.executable, "-c", code, *self._modules], cwd=self.root, env=self._environment, capture_output=True, text=True, check=False
        )
        if done.returncode:
            return f"import fails: {done.stderr.strip().splitlines()[-1]}"
        elsewhere = [file for file in done.stdout.splitlines() if not Path(file).resolve().is_relative_to(self.root.resolve())]
        return f"imported from elsewhere: {', '.join(elsewhere)}" if elsewhere else ""

    def run_suite(self, files: Sequence[str] = ()) -> Run:
        """Run these test files, or all as `make test` does, until a check fails."""
        notes, log = self._work / "notes.jsonl", self._work / "pytest.log"
        notes.unlink(missing_ok=True)
        options = ["-q", "-p", "planted_watch", f"--ignore=tests/{LEFT_OUT}"]
        options += [f"tests/{file}" for file in files]
        if self._jobs > 1 and not files:
            options += ["-n", str(self._jobs), "--dist", "loadfile", "--max-worker-restart", "0"]
        environment = {**self._environment, planted_watch.NOTES: str(notes)}
        begin, problem = time.monotonic(), ""
        with log.open("w", encoding="utf8") as out:
            process = subprocess.Popen(
                [sys.executable, "-m", "pytest", *options], cwd=self.root, env=environment, stdout=out, stderr=out, start_new_session=True
            )
            try:
                status = process.wait(LONGEST_SECONDS)
            except BaseException as error:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                if not isinstance(error, subprocess.TimeoutExpired):
                    raise
                status, problem = -1, f"no end within {LONGEST_SECONDS} s"
        seconds = time.monotonic() - begin
        noted = [json.loads(line) for line in notes.read_text(encoding="utf8").splitlines()] if notes.exists() else []
        reports = [note for note in noted if "test" in note]
        failed = [note["test"] for note in reports if note["when"] == "call" and note["kind"] not in planted_watch.BROKEN]
        broken = [f"{note['test']} ({note['when']}: {note['kind']})" for note in reports if note["test"] not in failed]
        tests = sum(note.get("passed", 0) for note in noted)
        if not (problem or failed or broken) and (status != 0 or not tests):
            problem = f"pytest ended with status {status} after {tests} tests"
        return Run(tuple(dict.fromkeys(failed)), tuple(dict.fromkeys(broken)), tests, seconds, problem, log)

    def remove(self) -> None:
        """Delete copy and build; the log of the last run stays."""
        for directory in (self.root, self._build, self._work / "site"):
            shutil.rmtree(directory, ignore_errors=True)

    def _output(self, command: Sequence[str]) -> str:
        done = subprocess.run(command, env=self._environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise CannotBuildError("\n".join([" ".join(command), *(done.stdout + done.stderr).strip().splitlines()[-20:]]))
        return done.stdout
