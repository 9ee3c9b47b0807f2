"""The test suite once, and the numbers that its tests recorded: how many tests of which file passed, errors against their bounds.

    python validation/suite_numbers.py [--json] [PYTEST_ARGUMENT …]

A test hands over a number with pytest's `record_property("error", {"what": …, "of": …, "value": …, "bound": …})`.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import click
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[1]


def read_report(path: Path) -> dict[str, Any]:
    """Counts by test file, and the recorded errors: the largest for each (what, of)."""
    counts: dict[str, Counter[str]] = {}
    largest: dict[tuple[str, str], dict[str, Any]] = {}
    for case in ElementTree.parse(path).iter("testcase"):
        outcome = next((child.tag for child in case if child.tag in ("failure", "error", "skipped")), "passed")
        name = case.get("classname", "")  # directory.file, and a class where there is one
        counts.setdefault(name.split(".")[1] if "." in name else name, Counter())[outcome] += 1
        for item in case.iter("property"):
            if item.get("name") == "error":
                error = ast.literal_eval(item.get("value", ""))
                found = largest.setdefault((error["what"], error["of"]), error | {"tests": 0})
                found.update(tests=found["tests"] + 1, value=max(found["value"], error["value"]))
    return {"files": {file: dict(counter) for file, counter in sorted(counts.items())}, "errors": list(largest.values())}


@click.command(context_settings={"ignore_unknown_options": True})
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of tables.")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def main(as_json: bool, arguments: tuple[str, ...]) -> None:
    """Run the test suite as `make test` does, and print its numbers; exit with pytest's status."""
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "suite.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "--dist", "loadfile", f"--junitxml={report}", *arguments]
        status = subprocess.run(command, cwd=ROOT, stdout=sys.stderr, check=False).returncode
        numbers = read_report(report)
    if as_json:
        click.echo(json.dumps(numbers))
        sys.exit(status)
    table = Table("what", "of", "tests", "largest", "bound")
    for error in numbers["errors"]:
        table.add_row(error["what"], error["of"], str(error["tests"]), f"{error['value']:.2g}", f"{error['bound']:.2g}")
    Console().print(table)
    sys.exit(status)


if __name__ == "__main__":
    main()
