"""The long run of exact speculation: its drafter errs where it is told to, its tally counts, and it fails where it must."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import speculation_cases
import speculation_runs
from click.testing import CliRunner
from doctored_models import RowsTogether
from speculation_cases import Tally, failures
from speculation_runs import Aimed, Outcome

from colibri_jax.generate.speculation_stats import SpeculationStats


def test_an_aimed_drafter_errs_once_per_draft() -> None:
    answer = {position: 10 + position for position in range(60)}
    drafter = Aimed(answer, 300, (2, 4, 1))
    drafter.taken(range(5))
    wrong = []
    for _ in range(4):
        draft = drafter.draft(99, 3).tokens
        start = drafter.position + 1
        wrong.append([i + 1 for i, token in enumerate(draft) if token != answer[start + i]])
        drafter.taken([0])
    assert wrong == [[2], [], [1], [2]]


def outcome(accepted: Sequence[int], rejected: Sequence[int], *, acted: int = 5, faults: Sequence[str] = ()) -> Outcome:
    drafted = tuple(a + r for a, r in zip(accepted, rejected, strict=True))
    stats = SpeculationStats(depth=len(drafted), emitted_tokens=50, drafted=drafted, accepted=tuple(accepted), rejected=tuple(rejected))
    return Outcome(faults=list(faults), stats=stats, layer_steps=10, acted=acted)


def test_a_tally_wants_both_kinds_in_all_and_at_its_place() -> None:
    tally = Tally()
    tally.add(outcome((5, 4), (1, 1)), "a")
    assert not tally.enough(2, 2)
    tally.add(outcome((3, 1), (3, 2)), "b")
    assert tally.enough(2, 3)
    assert not tally.enough(2, 4)
    assert (tally.runs, tally.tokens, tally.layer_steps, tally.acted) == (2, 100, 20, 10)
    assert tally.plus(tally).accepted.tolist()[:2] == [16, 10]


@pytest.mark.parametrize(
    ("changed", "expected"),
    [({}, ""), ({"faults": ["token 3"]}, "1 of 1 runs differ"), ({"acted": 1}, "the budget acted in 1"), ({"tokens": 51}, "50 tokens, 51")],
)
def test_what_is_missing_is_a_failure(changed: dict[str, Any], expected: str) -> None:
    tokens = changed.pop("tokens", 50)
    tally = Tally()
    tally.add(outcome((9,), (9,), **changed), "a run")
    found = failures({1: tally}, tally, tokens=tokens)
    assert [expected in line for line in found] == [True] * bool(expected)
    assert tally.faults == [f"a run: {fault}" for fault in changed.get("faults", [])]


def run(monkeypatch: pytest.MonkeyPatch, doctored: Callable[[Any], Any]) -> Any:
    monkeypatch.setattr(speculation_cases, "SHAPES", 3)
    monkeypatch.setattr(speculation_cases, "DEPTHS", (1, 2, 3))
    monkeypatch.setattr(speculation_cases, "LEAST_ACTED_SHARE", 0.0)

    def outcome_of(path: Path, config: Any, case: Any) -> Outcome:
        return speculation_runs.outcome_of(path, config, case, doctored)

    monkeypatch.setattr(speculation_cases, "outcome_of", outcome_of)
    return CliRunner().invoke(speculation_cases.main, ["--drafts", "8", "--tokens", "100", "--json"])


def test_the_command_passes_and_sees_rows_that_share_their_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    result = run(monkeypatch, lambda lm: lm)
    assert result.exit_code == 0, result.stderr
    printed = json.loads(result.stdout)
    assert printed["failures"] == []
    assert printed["depths"]["3"]["accepted"][2] > 7 < printed["depths"]["3"]["rejected"][2]
    broken = run(monkeypatch, RowsTogether)
    assert broken.exit_code == 1
    assert "differ from decoding without drafts" in broken.stderr
