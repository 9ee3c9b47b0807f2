"""The records on the window: figures come from the reports, the right rows into the right lines; a failed control is refused."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

sys.path.insert(0, str(Path(__file__).parents[1] / "validation" / "quality"))
import answers

OFF = {"policy": "aggregate", "vote": "weights", "denominator": "survivors", "budget": 0}
RECORDS = Path(__file__).parents[1] / "validation" / "records" / "window"


def row(name: str, kld: float, share: float, **routing: Any) -> dict[str, Any]:
    estimate = {"value": kld, "error": 0.001}
    layers = {"distinct_kept": [4.0] * 2, "mass_kept": [0.5, 0.25], "emptied_positions": [0, 0]}
    return {
        "name": name,
        "group": "decoded",
        "routing": {**OFF, **routing},
        "quality": {
            "tokens": 100,
            "kld": estimate,
            "kld_windows": {"value": kld, "error": 0.002},
            "kld_percentiles": {"99": 10 * kld},
            "same_top": {"value": 1.0 - kld, "error": 0.0},
            "ppl_ratio": {"value": 1.0 + kld, "error": 0.0},
        },
        "cost": {
            "expert_bytes_share": share,
            "mass_kept": share,
            "distinct_kept": 8 * share,
            "distinct_before": 8.0,
            "emptied_positions": 0,
            "layers": layers,
        },
    }


def report(directory: Path, name: str, rows: list[dict[str, Any]], *, passed: bool = True) -> None:
    (directory / f"{name}.json").write_text(json.dumps({"passed": passed, "rows": rows}))


def test_figures_reach_the_data(tmp_path: Path) -> None:
    report(tmp_path, "decode", [row("decode off", 0.0, 1.0), row("decode aggregate 4 frozen", 0.1, 0.5, budget=4, denominator="frozen")])
    rows = answers.read_rows(tmp_path)
    answers.write_data(rows, tmp_path / "data.csv")
    with (tmp_path / "data.csv").open() as file:
        written = list(csv.DictReader(file))
    assert [(r["name"], r["kld"], r["kld_error"], r["bytes_share"], r["layers_mass"]) for r in written] == [
        ("decode off", "0", "0.002", "1", "0.5 0.25"),
        ("decode aggregate 4 frozen", "0.1", "0.002", "0.5", "0.5 0.25"),
    ]
    assert [r.has("aggregate", "frozen") for r in rows] == [False, True]
    assert not rows[1].has("aggregate", "survivors")
    assert not rows[1].has("aggregate", "frozen", "all_scores")


def test_single_layers_are_told_apart(tmp_path: Path) -> None:
    """The first layer's error is the largest in these figures, so that an order turned around would show."""
    lists = [(n if i == layer else 0) for layer in range(5) for n in (7, 6, 5, 4, 3) for i in range(5)]
    budgets: list[Any] = [lists[i : i + 5] for i in range(0, len(lists), 5)]
    budgets += [[6, 5, 5, 5, 5], [5, 5, 5, 5, 6], [7, 6, 6, 6, 6], [6, 6, 6, 6, 7], 5, 6]
    rows = []
    for i, budget in enumerate(budgets):
        made = row(f"decode aggregate {i} frozen", 0.5 if i < 5 else 0.01, 0.6, budget=budget, denominator="frozen")
        made["cost"]["layers"] = {"distinct_kept": [5.0] * 5, "mass_kept": [0.5] * 5, "emptied_positions": [0] * 5}
        rows.append(made)
    report(tmp_path, "layers", rows)
    early, profile = answers._answers_about_layers(answers.read_rows(tmp_path))
    assert "KLD of 0.5000, the others 0.0100 to 0.0100" in early.says
    assert [name for name, _ in early.lines] == [f"MoE layer {i} alone" for i in range(5)]
    assert profile.slug == "profile"


def test_a_failed_control_is_refused(tmp_path: Path) -> None:
    report(tmp_path, "decode", [row("decode off", 0.0, 1.0)], passed=False)
    result = CliRunner().invoke(answers.main, [str(tmp_path), "--out", str(tmp_path / "out")])
    assert result.exit_code != 0
    assert "did not agree with itself" in result.output


@pytest.mark.parametrize("slug", ["mass", "denominator", "substitution", "union", "votes", "prefill", "early_layers", "profile"])
def test_every_record_is_there(slug: str) -> None:
    text = (RECORDS / f"{slug}.md").read_text(encoding="utf8")
    assert f"({slug}.svg)" in text
    assert "validation/quality/curves.sh" in text
    assert (RECORDS / f"{slug}.svg").is_file()
