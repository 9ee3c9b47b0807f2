"""Benchmarks check what they time: a wrong product or a missed read is an error, and shares are those of one run."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from readers import USABLE

from colibri_jax import plots
from colibri_jax.bench import BenchError, Measured, bench_kernels
from colibri_jax.bench import kernels as bench_module
from colibri_jax.bench.report import ratios
from colibri_jax.cli import main
from colibri_jax.cli.options import SHIPPED_MODEL
from colibri_jax.engine.passes import ProductPass, available_isas, read_pass
from colibri_jax.engine.session import NativeModel
from colibri_jax.errors import OptionError

SMALL: dict[str, Any] = {"threads": 2, "positions": (1, 3), "memory_bytes": 30 << 20, "repeats": 2}


def test_kernels_report_every_form_position_and_isa() -> None:
    table = bench_kernels(**SMALL, isas=("scalar",))
    assert [(row.what.split(",")[0], row.figures["positions"]) for row in table.rows] == [
        (kind, n) for kind in ("int4", "int4", "int4 f16", "int8") for n in (1, 3)
    ]
    for row in table.rows:
        share = row.figures["share of raw"]
        assert isinstance(share, Measured)
        assert len(share.values) == 2
        assert all(value > 0 for value in share.values)


def test_a_wrong_product_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = ProductPass.run

    def faulty(self: ProductPass, *, threads: int, isa: str = "") -> Any:
        seconds, y_TR = honest(self, threads=threads, isa=isa)
        return seconds, y_TR if isa == "scalar" else np.nextafter(y_TR, np.float32(np.inf))

    monkeypatch.setattr(ProductPass, "run", faulty)
    with pytest.raises(BenchError, match="differs from the scalar"):
        bench_kernels(**SMALL, isas=(available_isas()[-1] if len(available_isas()) > 1 else "",))


def test_a_pass_that_misses_memory_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_module, "read_pass", lambda data, threads, isa="": read_pass(data[:-64], threads=threads, isa=isa))
    with pytest.raises(BenchError, match="missed"):
        bench_kernels(**SMALL, isas=("scalar",))


@pytest.mark.parametrize("size", [0, 1, 7, 8, 63, 64, 300, 4097, 1 << 20])
@pytest.mark.parametrize("threads", [1, 3])
def test_every_isa_reads_all_of_memory(size: int, threads: int) -> None:
    data = np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)
    expected = int(np.bitwise_xor.reduce(np.concatenate([data, np.zeros(-size % 8, np.uint8)]).view("<u8"), initial=0))
    for isa in available_isas():
        assert read_pass(data, threads=threads, isa=isa)[1] == expected


def test_ratios_pair_measurements_of_the_same_moment() -> None:
    assert ratios([1.0, 4.0, 9.0], [2.0, 4.0, 6.0]).values == (0.5, 1.0, 1.5)
    assert Measured((3.0, 1.0, 2.0), "s").median == 2.0


def test_command_prints_json_and_a_table() -> None:
    arguments = ["bench", "kernels", "--memory-gib", "0.01", "--repeats", "1", "--positions", "1", "--isa", "scalar", "--threads", "1"]
    answer = json.loads(CliRunner().invoke(main, [*arguments, "--json"]).stdout)
    assert answer["conditions"]["threads"] == 1
    assert answer["rows"][0]["share of raw"]["median"] > 0
    text = CliRunner().invoke(main, arguments, env={"COLUMNS": "200"})  # headings break where measured values are long
    assert text.exit_code == 0
    assert "share of raw" in " ".join(text.stdout.split())


def test_a_sweep_draws_a_line_per_scope(tmp_path: Path) -> None:
    picture = tmp_path / "sweep.svg"
    arguments = ["bench", "sweep", str(SHIPPED_MODEL), "--budget", "off", "--budget", "2", "--tokens", "2", "--prompt-tokens", "3"]
    answer = json.loads(CliRunner().invoke(main, [*arguments, "--plot", str(picture), "--json"]).stdout)
    rows = {(row["what"], row["budget"]): row for row in answer["rows"]}
    assert set(rows) == {("scope decode", "off"), ("scope decode", 2), ("scope all", "off"), ("scope all", 2)}
    assert rows["scope all", 2]["read GB"] < rows["scope decode", 2]["read GB"] < rows["scope decode", "off"]["read GB"]
    assert rows["scope decode", "off"]["mass kept"] == 1.0 > rows["scope decode", 2]["mass kept"]
    assert picture.read_text().count('id="legend_') == 3


def test_a_picture_of_no_known_kind_is_refused_before_the_work() -> None:
    refused = CliRunner().invoke(main, ["bench", "sweep", str(SHIPPED_MODEL), "--plot", "sweep.txt"])
    assert refused.exit_code != 0
    assert ".svg" in refused.stderr


def test_without_matplotlib_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(OptionError, match="colibri_jax\\[plot\\]"):
        plots.draw(tmp_path / "x.svg", "", [])


@pytest.mark.parametrize("cache", ["cold", "warm"])
def test_decoding_is_measured_after_its_logits_were_checked(cache: str, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["bench", "decode", str(SHIPPED_MODEL), "--cache", cache, "--tokens", "2", "--repeats", "2", "--threads", "2"]
    done = CliRunner().invoke(main, [*arguments, "--json"])
    (row,) = json.loads(done.stdout)["rows"]
    assert len(row["share of raw"]["values"]) == 2
    assert (max(row["misses"]["values"]) > 0) if cache == "cold" else "misses" not in row
    honest = NativeModel.forward

    def faulty(self: NativeModel, *args: Any, **options: Any) -> Any:
        logits = honest(self, *args, **options)
        return logits if self.stats.isa == "scalar" else np.nextafter(logits, np.float32(np.inf))

    monkeypatch.setattr(NativeModel, "forward", faulty)
    refused = CliRunner().invoke(main, arguments)
    assert refused.exit_code != 0
    assert "depend on" in refused.stderr + str(refused.exception)


def test_prefill_reads_each_expert_of_the_union_once() -> None:
    arguments = ["bench", "prefill", str(SHIPPED_MODEL), "--positions", "5", "--positions", "40", "--repeats", "2", "--json"]
    rows = json.loads(CliRunner().invoke(main, arguments).stdout)["rows"]
    assert [(row["positions"], row["read / (union x expert)"]) for row in rows] == [(5, 1.0), (40, 1.0)]
    assert rows[0]["union"]["median"] < rows[1]["union"]["median"]


def test_io_reads_experts_with_every_reader() -> None:
    rows = json.loads(
        CliRunner().invoke(main, ["bench", "io", str(SHIPPED_MODEL), "--depth", "2", "--experts", "3", "--repeats", "2", "--json"]).stdout
    )["rows"]
    assert [row["what"] for row in rows] == list(dict.fromkeys(USABLE))
    assert all(len(row["rate"]["values"]) == 2 for row in rows)
