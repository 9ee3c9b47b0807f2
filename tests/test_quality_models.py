"""The command `quality` on the model that ships, and reference against native: each with its own base they see the same loss."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from colibri_jax import load
from colibri_jax.cli import main
from colibri_jax.cli.options import SHIPPED_MODEL
from colibri_jax.container.reader import Container
from colibri_jax.quality.costs import expert_bytes_per_layer
from colibri_jax.quality.report import Row, make_report
from colibri_jax.quality.run import Plan, measure
from colibri_jax.quality.settings import Choices, make_settings
from colibri_jax.quality.statistics import TokenResults, mean
from colibri_jax.quality.steps import StepShape
from colibri_jax.quality.store import ResultStore, model_fingerprint
from colibri_jax.quality.windows import read_windows
from colibri_jax.tokenizer import ChatTokenizer

TEXT = """A budget is a plan for spending. In a household it sets what comes in against what goes out; in an engine it limits how much
may be read from the disk at each step. The river rises in the mountains, runs through three lakes and reaches the sea after two hundred
kilometres. A verb is a word that names an action, an event or a state. Stones that fall from the sky were long held to be a legend."""

# No prefix, so that only steps of one size are compiled.
DECODE, VERIFY = StepShape(kind="decode", prefix=0), StepShape(kind="verify", prefix=0, rows=4)
WINDOW = 24
STANDARD_ERRORS = 3.0


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture(scope="module")
def reference() -> Any:
    """Loaded and compiled once."""
    return load(SHIPPED_MODEL, "reference", context_positions=WINDOW)


def measured(model: Any, text: Path, shape: StepShape) -> tuple[TokenResults, Row]:
    """The tokens of a budget of 3, and their row."""
    container = Container.open(SHIPPED_MODEL)
    windows = read_windows([text], ChatTokenizer.from_directory(SHIPPED_MODEL), WINDOW)[:2]
    settings = make_settings(shape, Choices(budgets=(3,)), container.runnable_config)
    (done,) = measure(model, [Plan(shape, windows, settings)], control_windows=1)
    report = make_report([done], expert_bytes_per_layer(container), {})
    assert report.passed
    return TokenResults.joined([part.tokens for window in done.cut[settings[0].run_as] for part in window.values()]), report.rows[0]


def apart(ours: TokenResults, theirs: TokenResults) -> float:
    """Distance of two mean KLDs over the same tokens, in standard errors of the mean difference: stricter than of independent ones."""
    difference = mean(ours.kld - theirs.kld)
    return abs(difference.value) / difference.error if difference.value else 0.0


@pytest.mark.parametrize("shape", [DECODE, VERIFY], ids=["decode", "verify"])
def test_reference_and_native_lose_the_same(reference: Any, text: Path, shape: StepShape) -> None:
    ours, row = measured(reference, text, shape)
    theirs, other = measured(load(SHIPPED_MODEL, context_positions=WINDOW), text, shape)
    assert row.summary.kld.value > 0.02
    assert apart(ours, theirs) < STANDARD_ERRORS
    assert row.summary.kld.apart(other.summary.kld) < STANDARD_ERRORS
    assert row.costs.kept_L.tolist() == other.costs.kept_L.tolist()
    in_bits = TokenResults(ours.kld / np.log(2.0), ours.delta_p, ours.same_top, ours.nll_base, ours.nll_cut)
    assert apart(in_bits, theirs) > STANDARD_ERRORS


def run(*arguments: str, status: int = 0) -> str:
    done = CliRunner().invoke(main, ["quality", *arguments])
    assert done.exit_code == status, done.output
    return done.stdout


def test_the_command_measures_the_model_that_ships(text: Path, tmp_path: Path) -> None:
    arguments = ["--text", str(text), "--window", "32", "--prefix", "8", "--tokens", "48", "--budgets", "6,2,4:4:4:4:8"]
    arguments += ["--policies", "aggregate,floor", "--scopes", "decode,verify", "--resume", str(tmp_path / "kept"), "--json"]
    first = run(*arguments, "--plot", str(tmp_path / "plot.svg"))
    found = json.loads(first)
    assert found["passed"]
    assert [control["largest_kld"] for control in found["controls"]] == [0.0, 0.0]
    rows = {row["name"]: row for row in found["rows"]}
    assert rows["decode floor 6"]["run_as"] == "decode aggregate 6"
    six, two = rows["decode aggregate 6"], rows["decode aggregate 2"]
    assert six["quality"]["tokens"] == 48
    assert six["quality"]["kld"]["value"] < two["quality"]["kld"]["value"]
    assert six["cost"]["distinct_kept"] == 6.0
    assert six["cost"]["expert_bytes_share"] == 0.75
    assert rows["decode aggregate 4:4:4:4:0"]["cost"]["layers"]["distinct_kept"] == [4.0, 4.0, 4.0, 4.0, 8.0]
    assert rows["verify floor 6"]["cost"]["emptied_positions"] == 0 < rows["verify aggregate 2"]["cost"]["emptied_positions"]
    assert (tmp_path / "plot.svg").is_file()
    assert json.loads(run(*arguments)) == found  # from what was kept


def test_the_command_shows_tables(text: Path) -> None:
    shown = run("--text", str(text), "--window", "32", "--prefix", "8", "--tokens", "24", "--budgets", "4", "--denominators", "frozen")
    assert "decode aggregate 4 frozen" in shown
    assert "4.00 of 8.00" in shown
    assert "50.0%" in shown
    assert "|KLD| at most 0: holds" in shown


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--policies", "best"], "none of aggregate"),
        (["--budgets", "six"], "neither a count"),
        (["--floor", "x"], "not a number"),
        (["--policies", "resident"], "FencedOptionError"),
        (["--budgets", "4:4"], "one budget per MoE layer"),
        (["--tokens", "100000"], "text too short"),
        (["--scopes", "verify", "--rows", "5"], "ends within"),
        (["--window", "1000000"], "no room"),
        (["--plot", "x.gif"], "unknown kind of picture"),
    ],
)
def test_what_cannot_be_measured_is_refused(text: Path, arguments: list[str], reason: str) -> None:
    done = CliRunner().invoke(main, ["quality", "--text", str(text), "--window", "32", "--prefix", "8", *arguments])
    assert done.exit_code == 2
    assert reason in done.stderr


def test_kept_results_belong_to_a_model_and_how_it_is_run() -> None:
    container = Container.open(SHIPPED_MODEL)
    marks = {model_fingerprint(container, *how) for how in (("native", "w4a8"), ("reference", "w4a8"), ("native", "w4a32"))}
    assert len(marks) == 3
    assert model_fingerprint(Container.open(SHIPPED_MODEL), "native", "w4a8") in marks


def test_another_state_of_the_same_model_has_another_mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    container = Container.open(SHIPPED_MODEL)
    before, read = model_fingerprint(container, "native", "w4a8"), Container.read

    def trained(self: Container, role: str) -> object:
        values = read(self, role)
        return values * np.float32(1.001) if role == "final_norm" else values

    monkeypatch.setattr(Container, "read", trained)
    assert model_fingerprint(container, "native", "w4a8") != before
    assert ResultStore(None).get("x", np.zeros(3, np.int32)) is None
