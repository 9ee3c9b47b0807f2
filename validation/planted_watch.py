"""A pytest plugin that notes what a run found and ends it at the first check that failed; `planted_faults.py` loads it.

It changes no test. Hypothesis stops at the first failing example instead of looking for a smaller one, which takes minutes.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from pathlib import Path
from typing import Any

import hypothesis
import pytest

NOTES = "PLANTED_NOTES"

# An exception of these kinds says that the changed code is broken, not that a check saw what it does.
BROKEN = ("ImportError", "ModuleNotFoundError", "SyntaxError", "IndentationError", "NameError", "UnboundLocalError", "AttributeError")


class Watch:
    """Writes one JSON object a line: {"test", "when", "kind"} for what failed, {"passed": n} at the end."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._outcomes: Counter[str] = Counter()

    def _note(self, **note: Any) -> None:
        with self._path.open("a", encoding="utf8") as file:
            file.write(json.dumps(note) + "\n")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._note(test=report.nodeid, when="collect", kind="collection")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call":
            self._outcomes[report.outcome] += 1
        if not report.failed:
            return
        # The report of a process that ended is in no phase.
        kind = kind_of(report) if report.when in ("setup", "call", "teardown") else "the process ended"
        self._note(test=report.nodeid, when=report.when, kind=kind)
        if report.when == "call" and kind not in BROKEN:
            pytest.exit("a check failed", returncode=1)

    def pytest_sessionfinish(self) -> None:
        self._note(passed=self._outcomes["passed"])


def kind_of(report: pytest.TestReport) -> str:
    """The class of the exception that a failed report stands for, without its module."""
    crash = getattr(report.longrepr, "reprcrash", None)
    message = str(crash.message if crash is not None else report.longrepr)
    if message.startswith("assert"):  # pytest leaves "AssertionError: " out before it
        return "AssertionError"
    return re.split("[:\n]", message, maxsplit=1)[0].rpartition(".")[2]


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    default = hypothesis.settings.get_profile(hypothesis.settings.get_current_profile_name())
    phases = (hypothesis.Phase.explicit, hypothesis.Phase.reuse, hypothesis.Phase.generate)
    hypothesis.settings.register_profile("planted", default, phases=phases)
    hypothesis.settings.load_profile("planted")
    # With several processes, the one that hands out the work hears of everything.
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Watch(Path(os.environ[NOTES])), "planted watch")
