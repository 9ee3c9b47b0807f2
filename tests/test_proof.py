"""The long checks' own machinery: exploring stops at a failure and says how to repeat it, and a proof with a failed part is none."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import explore
import proof
import pytest
import suite_numbers
from click.testing import CliRunner
from proof_report import render

import colibri_jax
from colibri_jax.routing_spec import Selection


def test_exploring_says_what_was_covered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(explore, "SELECTIONS_PER_ROUND", 5)
    result = CliRunner().invoke(explore.main, ["--what", "selection", "--rounds", "1", "--seed", "1"])
    assert result.exit_code == 0, result.output
    assert "union size" in result.output
    assert "1 rounds, no failure" in result.output


def test_exploring_stops_at_a_planted_fault_and_says_how_to_repeat_it(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = colibri_jax.native.select_experts

    def off_by_one(*args: Any) -> Selection:
        selection = honest(*args)
        return dataclasses.replace(selection, union_size=selection.union_size + 1)

    monkeypatch.setattr(explore, "SELECTIONS_PER_ROUND", 5)
    monkeypatch.setattr(colibri_jax.native, "select_experts", off_by_one)
    result = CliRunner().invoke(explore.main, ["--what", "selection", "--rounds", "9", "--seed", "7"])
    assert result.exit_code == 1
    assert "union_size" in result.output
    assert "--what selection --seed 7 --rounds 1" in result.output
    assert "1 rounds, stopped at a failure" in result.output


def parts(code: str) -> dict[str, proof.Part]:
    return {"suite": proof.Part(title="The suite", command=(sys.executable, "-c", code), sources=())}


GOOD = 'print(\'{"files": {"a": {"passed": 2}}, "errors": []}\')'


@pytest.mark.parametrize(
    ("code", "status", "said"),
    [(GOOD, 0, "| passed |"), (GOOD + "; raise SystemExit(3)", 1, "**failed** (3)"), ("print('no JSON')", 1, "**failed** (1)")],
)
def test_a_proof_passes_only_with_all_its_parts(code: str, status: int, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proof, "PARTS", parts(code))
    monkeypatch.setattr(proof, "RECORD", tmp_path / "proof.md")
    result = CliRunner().invoke(proof.main, ["--work", str(tmp_path / "work")])
    assert result.exit_code == status, result.output
    assert said in (tmp_path / "proof.md").read_text(encoding="utf-8")


def test_an_answer_is_used_again_until_the_sources_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proof, "RECORD", tmp_path / "proof.md")
    for code, sources, ran in ((GOOD, "one", True), ("raise SystemExit(1)", "one", False), ("raise SystemExit(1)", "two", True)):
        monkeypatch.setattr(proof, "PARTS", parts(code))
        monkeypatch.setattr(proof, "source_hash", lambda names, sources=sources: sources)
        result = CliRunner().invoke(proof.main, ["--work", str(tmp_path / "work")])
        assert result.exit_code == (1 if ran and code != GOOD else 0)


def test_a_report_says_what_did_not_run_and_what_is_out_of_date() -> None:
    answer = {
        "title": "The suite",
        "command": "c",
        "seconds": 60.0,
        "status": 0,
        "sources": "s",
        "stale": True,
        "result": json.loads(GOOD[7:-2]),
    }
    text = render({"suite": answer}, ("suite", "models"))
    assert "the sources have changed since" in text
    assert "| models |  |  |  | **not run** |" in text
    assert "2 tests passed in 1 files" in text


def test_recorded_errors_are_read_from_pytest(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    one = "{'what': 'w', 'of': 'o', 'value': %s, 'bound': 2e-05}"
    cases = "".join(
        f'<testcase classname="tests.test_a"><properties><property name="error" value="{one % value}"/></properties></testcase>'
        for value in ("1e-06", "3e-06", "2e-06")
    )
    report.write_text(f'<testsuites><testsuite>{cases}<testcase classname="tests.test_b"><failure/></testcase></testsuite></testsuites>')
    assert suite_numbers.read_report(report) == {
        "files": {"test_a": {"passed": 3}, "test_b": {"failure": 1}},
        "errors": [{"what": "w", "of": "o", "value": 3e-6, "bound": 2e-5, "tests": 3}],
    }
