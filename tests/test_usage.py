"""Usage files: counts of experts over runs, and the experts that are pinned by them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import colibri_jax
from colibri_jax.cli import main
from colibri_jax.cli.options import SHIPPED_MODEL
from colibri_jax.engine.session import NativeModel
from colibri_jax.engine.usage import ExpertUsage
from colibri_jax.errors import OptionError, UsageFileError


def load(**options: Any) -> NativeModel:
    model = colibri_jax.load(SHIPPED_MODEL, cache_experts=2, context_positions=64, **options)
    assert isinstance(model, NativeModel)
    return model


def run(model: NativeModel) -> list[bytes]:
    return [model.forward([token], scope="decode").tobytes() for token in (5, 9, 200, 5, 31, 9)]


def test_usage_counts_what_was_kept_and_survives_a_file(tmp_path: Path) -> None:
    model = load()
    expected = np.zeros_like(model.usage.counts_LE)
    for token in (5, 9, 200):
        model.forward([token], scope="decode")
        for layer, selection in enumerate(model.selections):
            for expert in selection.kept:
                expected[layer, expert] += 1
    assert np.array_equal(model.usage.counts_LE, expected)
    model.usage.write(tmp_path / "usage.json")
    assert np.array_equal(ExpertUsage.read(tmp_path / "usage.json", model.config).counts_LE, expected)
    assert ExpertUsage.read(tmp_path / "absent.json", model.config).counts_LE.sum() == 0
    assert not (tmp_path / "usage.json.new").exists()


def test_the_most_used_come_first_and_what_was_never_used_is_not_pinned() -> None:
    usage = ExpertUsage(np.array([[0, 3, 3, 9], [0, 0, 1, 0]]))
    assert usage.hottest(2) == ((3, 1), (2,))
    assert usage.hottest(0) == ((), ())
    assert usage.hottest(9) == ((3, 1, 2), (2,))


def test_pinned_experts_stay_and_change_no_bit() -> None:
    plain = load()
    expected = run(plain)
    pinned = load(pinned=plain.usage.hottest(3))
    assert run(pinned) == expected
    assert pinned.stats.total.cache_hits > plain.stats.total.cache_hits
    assert pinned.stats.pinned_experts == 3 * len(plain.config.moe_layers)
    with pytest.raises(OptionError, match="pinned"):
        load(pinned=((0,),))
    with pytest.raises(OptionError, match="pinned"):
        load(pinned=((10**6,),) * len(plain.config.moe_layers))


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("", "cannot be read"),
        ("[]", "not a usage file"),
        ('{"format": "x", "counts": []}', "not a usage file"),
        ('{"format": "colibri_jax expert usage 1"}', "does not fit"),
        ('{"format": "colibri_jax expert usage 1", "counts": [[1]]}', "does not fit"),
    ],
)
def test_another_file_is_refused(text: str, match: str, tmp_path: Path) -> None:
    (tmp_path / "usage.json").write_text(text)
    with pytest.raises(UsageFileError, match=match):
        ExpertUsage.read(tmp_path / "usage.json", load().config)


@pytest.mark.parametrize("count", [-1, 1.5, True, "1", 2**60])
def test_counts_that_are_none_are_refused(count: Any, tmp_path: Path) -> None:
    model = load()
    model.usage.write(tmp_path / "usage.json")
    stored = json.loads((tmp_path / "usage.json").read_text())
    stored["counts"][0][1] = count
    (tmp_path / "usage.json").write_text(json.dumps(stored))
    with pytest.raises(UsageFileError, match="does not fit"):
        ExpertUsage.read(tmp_path / "usage.json", model.config)


def test_generate_counts_over_runs_and_pins(tmp_path: Path) -> None:
    file = tmp_path / "usage.json"
    arguments = ["generate", "--prompt", "What is light?", "--max-new-tokens", "3", "--usage-file", str(file), "--cache-experts", "2"]
    first = CliRunner().invoke(main, arguments)
    counted = np.array(json.loads(file.read_text())["counts"])
    second = CliRunner().invoke(main, [*arguments, "--pin", "2"])
    assert (first.exit_code, second.exit_code, second.stdout) == (0, 0, first.stdout)
    assert np.array_equal(np.array(json.loads(file.read_text())["counts"]), 2 * counted)
    assert "pinned=" in second.stderr
    assert "pinned=" not in first.stderr
    refused = CliRunner().invoke(main, ["generate", "--prompt", "x", "--pin", "2"])
    assert refused.exit_code != 0
    assert "--usage-file" in refused.stderr
