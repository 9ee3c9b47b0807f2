"""Recommended settings: the file beside a container, and what `--budget auto` makes of it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from colibri_jax.cli import auto_budget, main
from colibri_jax.cli.auto_budget import AutoChoice, choose_budget
from colibri_jax.cli.options import SHIPPED_MODEL, routing_from
from colibri_jax.container.reader import Container
from colibri_jax.errors import OptionError
from colibri_jax.generate.report import OptionValue
from colibri_jax.quality.recommended import (
    RECOMMENDED_FILE,
    Costs,
    OtherModelError,
    Recommended,
    RecommendedFileError,
    RecommendedSetting,
    Stated,
    fingerprint_of,
    read_recommended,
)
from colibri_jax.routing_spec import RoutingOptions

SMALL_RAM, LARGE_RAM = 10**6, 10**12
ROUTING = RoutingOptions(budget=6, policy="per_position", denominator="frozen")


def costs(**changes: float) -> Costs:
    values = {"expert_bytes_share": 0.75, "kld": 0.02, "ppl_ratio": 1.01, "task_points_lost": 0.5, **changes}
    return Costs(**{name: Stated(value=value, margin=0.01) for name, value in values.items()})


def setting(**changes: Any) -> RecommendedSetting:
    fields = {"name": "six frozen", "steps": "decode", "rows": 1, "routing": ROUTING, "costs": costs(), "tokens": 20_000, "text": "heldout"}
    return RecommendedSetting(**{**fields, **changes})


VERIFY = setting(name="sixteen", steps="verify", rows=4, routing=RoutingOptions(budget=16, policy="substitute"))


@pytest.fixture(scope="module")
def own() -> str:
    return fingerprint_of(Container.open(SHIPPED_MODEL))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """The model that ships, without what may be recommended for it."""
    for file in SHIPPED_MODEL.iterdir():
        if file.name != RECOMMENDED_FILE:
            (tmp_path / file.name).symlink_to(file)
    return tmp_path


# ---- the file


def test_what_is_written_is_read(tmp_path: Path) -> None:
    layered = setting(name="layers", routing=RoutingOptions(budget=(4, 0, 6), policy="coverage", coverage=0.9, floor=2))
    written = Recommended("abc", (VERIFY, setting(), layered))
    written.write(tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == [RECOMMENDED_FILE]
    read = read_recommended(tmp_path, "abc")
    assert read == written
    assert read.best("decode") == setting()
    assert read.best("verify") == VERIFY
    assert Recommended("abc", ()).best("decode") is None


def test_no_file_is_no_recommendation(tmp_path: Path) -> None:
    assert read_recommended(tmp_path, "abc") is None


def test_file_of_another_model_is_refused(tmp_path: Path) -> None:
    Recommended("abc", (setting(),)).write(tmp_path)
    with pytest.raises(OtherModelError, match="expected: abd; got: abc"):
        read_recommended(tmp_path, "abd")


def test_older_file_without_a_later_option_is_read(tmp_path: Path) -> None:
    Recommended("abc", (setting(),)).write(tmp_path)
    raw = json.loads((tmp_path / RECOMMENDED_FILE).read_text())
    del raw["settings"][0]["routing"]["route_within"]
    (tmp_path / RECOMMENDED_FILE).write_text(json.dumps(raw))
    assert read_recommended(tmp_path, "abc") == Recommended("abc", (setting(),))


def damage(raw: Any, path: str, value: Any) -> Any:
    """Set, or with `...` remove, what a dotted path names."""
    *parents, last = [int(part) if part.isdigit() else part for part in path.split(".")]
    inside = raw
    for part in parents:
        inside = inside[part]
    if value is ...:
        del inside[last]
    else:
        inside[last] = value
    return raw


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("version", 2),
        ("model", 7),
        ("settings", {}),
        ("settings.0", []),
        ("settings.0.name", ""),
        ("settings.0.name", "sixteen"),
        ("settings.0.steps", "prefill"),
        ("settings.0.steps", []),
        ("settings.0.rows", 4),
        ("settings.1.rows", 1),
        ("settings.0.rows", True),
        ("settings.0.tokens", 0),
        ("settings.0.text", ...),
        ("settings.0.costs.kld", ...),
        ("settings.0.costs.kld.margin", -0.1),
        ("settings.0.costs.kld.value", "0.02"),
        ("settings.0.costs.kld.value", float("nan")),
        ("settings.0.costs.ppl_ratio.value", float("inf")),
        ("settings.0.costs.other", {"value": 0, "margin": 0}),
        ("settings.0.routing.budget", -1),
        ("settings.0.routing.budget", [4, "5"]),
        ("settings.0.routing.policy", "best"),
        ("settings.0.routing.policy", ["best"]),
        ("settings.0.routing.other", 1),
        ("settings.0.routing.expert_topp", None),
    ],
)
def test_damaged_file_is_a_named_error(tmp_path: Path, path: str, value: Any) -> None:
    Recommended("abc", (setting(), VERIFY)).write(tmp_path)
    file = tmp_path / RECOMMENDED_FILE
    file.write_text(json.dumps(damage(json.loads(file.read_text()), path, value)))
    with pytest.raises(RecommendedFileError, match=RECOMMENDED_FILE):
        read_recommended(tmp_path, "abc")


@pytest.mark.parametrize("text", ["", "[]", "{", "[" * 100_000, "null"])
def test_what_is_no_object_is_a_named_error(tmp_path: Path, text: str) -> None:
    (tmp_path / RECOMMENDED_FILE).write_text(text)
    with pytest.raises(RecommendedFileError, match=RECOMMENDED_FILE):
        read_recommended(tmp_path, "abc")


def test_what_depends_on_the_cache_is_never_recommended() -> None:
    with pytest.raises(RecommendedFileError, match="depends on the cache"):
        setting(routing=RoutingOptions(budget=4, policy="resident", allow_irreproducible=True))


@pytest.mark.parametrize("name", ["expert_bytes_share", "kld", "ppl_ratio", "task_points_lost"])
def test_figure_above_its_margin_is_seen(name: str) -> None:
    stated = costs()
    measured = {field: figure["value"] for field, figure in dataclasses.asdict(stated).items()}
    assert stated.exceeded(measured) == []
    assert stated.exceeded({**measured, name: measured[name] + 0.0099}) == []
    assert stated.exceeded({**measured, name: -1.0}) == []
    for wrong in (
        {**measured, name: measured[name] + 0.0101},
        {**measured, name: float("nan")},
        {k: v for k, v in measured.items() if k != name},
    ):
        assert [line.split(":")[0] for line in stated.exceeded(wrong)] == [name]


# ---- the choice

Choose = Callable[[Path, int, int], AutoChoice]
"""From a container, the machine's memory in all and what is free of it."""


def broken_rules(choose: Choose, model: Path, own: str) -> list[str]:
    """Rules of `--budget auto` that a choice breaks."""
    found = []

    def expect(rule: str, total: int, free: int, name: str | None) -> None:
        chosen = choose(model, total, free).setting
        if (None if chosen is None else chosen.name) != name:
            found.append(rule)

    expect("off without a file", SMALL_RAM, SMALL_RAM, None)
    Recommended(own, (VERIFY, setting(), setting(name="second"))).write(model)
    expect("the first decode setting where the model does not fit", SMALL_RAM, SMALL_RAM // 2, "six frozen")
    expect("off where it fits", LARGE_RAM, LARGE_RAM // 2, None)
    expect("the same where little is free", LARGE_RAM, SMALL_RAM, None)
    expect("the same where more is free than there is", SMALL_RAM, LARGE_RAM, "six frozen")
    Recommended(own, (VERIFY,)).write(model)
    expect("off where nothing is recommended for decoding", SMALL_RAM, SMALL_RAM, None)
    Recommended("0" * 16, (setting(),)).write(model)
    expect("off with a file of another model", SMALL_RAM, SMALL_RAM, None)
    return found


def honest(directory: Path, total: int, free: int) -> AutoChoice:
    return choose_budget(directory, total)


def by_free_memory(directory: Path, total: int, free: int) -> AutoChoice:
    return choose_budget(directory, free)


def whatever_fits(directory: Path, total: int, free: int) -> AutoChoice:
    return choose_budget(directory, SMALL_RAM)


def whosever_file(directory: Path, total: int, free: int) -> AutoChoice:
    choice, file = choose_budget(directory, total), directory / RECOMMENDED_FILE
    if "another model" not in choice.reason:
        return choice
    recommended = read_recommended(directory, json.loads(file.read_text())["model"])
    assert recommended is not None
    return AutoChoice(recommended.best("decode"), "")


def test_choice_keeps_the_rules(model: Path, own: str) -> None:
    assert broken_rules(honest, model, own) == []


@pytest.mark.parametrize(
    ("fault", "broken"),
    [
        (by_free_memory, {"the same where little is free", "the same where more is free than there is"}),
        (whatever_fits, {"off where it fits", "the same where little is free"}),
        (whosever_file, {"off with a file of another model"}),
    ],
)
def test_planted_fault_breaks_a_rule(fault: Choose, broken: set[str], model: Path, own: str) -> None:
    assert set(broken_rules(fault, model, own)) == broken


def test_a_model_fits_up_to_the_share_that_the_engine_takes(model: Path, own: str) -> None:
    """The bound itself: dense weights and all experts, in 70 % of memory."""
    Recommended(own, (setting(),)).write(model)
    entries = Container.open(model).entries
    trunk = sum(entry.total_bytes for role, entry in entries.items() if not role.startswith(("mtp.", "layers.6.")))
    assert choose_budget(model, int(trunk / 0.7) + 2).setting is None
    assert choose_budget(model, int(trunk / 0.7) - 2).setting == setting()


def test_memory_is_all_that_the_machine_has() -> None:
    known = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    assert auto_budget.total_ram_bytes() == pytest.approx(int(known["MemTotal"].split()[0]) * 1024, rel=0.001)


def test_a_checkpoint_that_is_no_container_has_nothing_recommended(tmp_path: Path) -> None:
    assert choose_budget(tmp_path, SMALL_RAM) == AutoChoice(None, "a checkpoint, not a container")


def test_a_setting_for_another_number_of_layers_is_an_error(model: Path, own: str) -> None:
    Recommended(own, (setting(routing=RoutingOptions(budget=(4, 4))),)).write(model)
    with pytest.raises(OptionError, match="one budget per MoE layer"):
        choose_budget(model, SMALL_RAM)


# ---- the command


@pytest.fixture
def small_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto_budget, "total_ram_bytes", lambda: SMALL_RAM)
    for name in ("EXPERT_BUDGET", "TOPK", "TOPP", "SNAP"):
        monkeypatch.delenv(name, raising=False)


def generate(model: Path, *flags: str, **environment: str) -> Result:
    arguments = ["generate", str(model), "--prompt", "hi", "--max-new-tokens", "1", "--cache-experts", "8", *flags]
    return CliRunner().invoke(main, arguments, env=environment, prog_name="colibri-jax")


def test_every_option_of_the_setting_is_set_and_printed(model: Path, own: str, small_machine: None) -> None:
    Recommended(own, (setting(),)).write(model)
    result = generate(model, "--budget", "auto", "--json")
    assert result.exit_code == 0, result.output
    for fragment in ("budget=6 (auto)", "policy=per_position (auto)", "denominator=frozen (auto)", "vote=weights  "):
        assert fragment in result.stderr
    assert [line for line in result.stderr.splitlines() if "budget auto" in line] == [
        "budget auto: six frozen (0.013 GB of weights, 70% of 0.001 GB of memory; measured on heldout: 75% of the expert bytes, "
        "KLD 0.02, perplexity × 1.01, 0.5 task points lost)"
    ]
    assert "experimental" not in result.stderr
    assert json.loads(result.stdout)["routing"]["denominator"] == "frozen"


def test_environment_may_ask_for_it_and_off_says_why(model: Path, small_machine: None) -> None:
    result = generate(model, EXPERT_BUDGET="auto")
    assert result.exit_code == 0, result.output
    assert "budget=off (auto)" in result.stderr
    assert "budget auto: off (no recommended.json, so no setting has a measured quality for this model)\n" in result.stderr


def test_the_default_stays_off(model: Path, own: str, small_machine: None) -> None:
    Recommended(own, (setting(),)).write(model)
    result = generate(model)
    assert "budget=off  " in result.stderr
    assert "budget auto" not in result.stderr


@pytest.mark.parametrize(
    ("flags", "environment", "where"),
    [
        (["--policy", "floor"], {}, "--policy"),
        (["--denominator", "survivors"], {}, "--denominator"),
        (["--budget-scope", "all"], {}, "--budget-scope"),
        (["--floor", "2"], {}, "--floor"),
        ([], {"TOPK": "4"}, "TOPK"),
    ],
)
def test_what_contradicts_the_setting_is_an_error(
    flags: list[str], environment: dict[str, str], where: str, model: Path, own: str, small_machine: None
) -> None:
    Recommended(own, (setting(),)).write(model)
    result = generate(model, "--budget", "auto", *flags, **environment)
    assert result.exit_code == 2
    assert f"OptionError: contradicts the setting that --budget auto chose; where: {where};" in result.stderr


def test_what_agrees_with_the_setting_is_none(model: Path, own: str, small_machine: None) -> None:
    Recommended(own, (setting(),)).write(model)
    result = generate(model, "--budget", "auto", "--denominator", "frozen", "--budget-scope", "decode")
    assert result.exit_code == 0, result.output
    assert "denominator=frozen  " in result.stderr


def test_damaged_file_stops_the_run(model: Path, small_machine: None) -> None:
    (model / RECOMMENDED_FILE).write_text("{}")
    result = generate(model, "--budget", "auto")
    assert result.exit_code == 2
    assert "RecommendedFileError" in result.stderr


def test_options_come_out_as_the_setting_has_them(model: Path, own: str, small_machine: None) -> None:
    """Every field of RoutingOptions, none of which is a default."""
    wanted = RoutingOptions(
        expert_topk=7,
        expert_topp=0.9,
        budget=(4, 5, 6, 7, 0),
        policy="coverage",
        denominator="frozen",
        vote="all_scores",
        floor=3,
        coverage=0.8,
    )
    Recommended(own, (setting(routing=wanted),)).write(model)
    defaults = dataclasses.asdict(RoutingOptions()) | {"budget_scope": ("decode",), "model_dir": model, "budget": "auto"}
    options, choice = auto_budget.resolve_auto({name: OptionValue(value) for name, value in defaults.items()})
    assert routing_from(options) == (wanted, {"decode"})
    assert auto_budget.is_recommended(choice, wanted)
    assert not auto_budget.is_recommended(choice, dataclasses.replace(wanted, floor=2))
    assert not auto_budget.is_recommended(None, RoutingOptions())


@pytest.mark.parametrize("command", [["bench", "decode"], ["bench", "sweep"], ["quality", "--budgets"]])
def test_auto_is_no_budget_to_measure(command: list[str], model: Path) -> None:
    flags = [*command, "auto", str(model)] if "--budgets" in command else [*command, "--budget", "auto", str(model)]
    result = CliRunner().invoke(main, flags)
    assert result.exit_code == 2
    assert "neither a count of experts nor 'off'" in result.output
