"""Steps of a quality comparison, its settings, and measuring with a model whose budget does something simple."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from fakes import HF_CONFIG, FakeModel, byte_tokenizer

from colibri_jax import native
from colibri_jax.config import ModelConfig
from colibri_jax.errors import FencedOptionError, OptionError
from colibri_jax.generate.protocol import LanguageModel
from colibri_jax.plots import draw
from colibri_jax.quality.report import QualityReport, make_report, panels
from colibri_jax.quality.run import Plan, QualityError, measure
from colibri_jax.quality.settings import Choices, Setting, make_settings
from colibri_jax.quality.steps import STEP_KINDS, Step, StepShape, run_steps
from colibri_jax.quality.store import ResultStore, StoredResultError
from colibri_jax.quality.windows import enough, read_windows, scored_per_window
from colibri_jax.routing_spec import RouterSpec, RoutingOptions, Scope, Selection
from colibri_jax.tokenizer import ChatTokenizer

CONFIG = ModelConfig.from_hf(HF_CONFIG)
BYTES_L = np.array([100, 10], np.int64)


class BudgetModel(FakeModel):
    """Noise on the logits where a budget acts, the more the smaller it is; as many experts as it allows. Records where it acted."""

    def __init__(self) -> None:
        super().__init__()
        self.acted: list[tuple[Scope, int]] = []

    def forward(self, tokens: Sequence[int] | npt.NDArray[np.integer], **how: Any) -> npt.NDArray[np.float32]:
        logits = super().forward(tokens, **how)
        budget = self.routing.scalar_budget if how["scope"] in self.budget_scopes else 0
        union = min(64, 8 * len(tokens))
        kept = min(budget or union, union)
        ids = np.resize(np.arange(kept, dtype=np.int32), (len(tokens), min(8, kept)))
        self.selections = (
            Selection(
                ids=ids,
                weights=np.ones(ids.shape, np.float32),
                kept=np.arange(kept, dtype=np.int32),
                union_size=union,
                dropped=union - kept,
                dropped_slots=union - kept,
                emptied_positions=0,
                mass_kept=kept / union,
            ),
        ) * 2
        if budget:
            self.acted.append((how["scope"], len(tokens)))
            noise = np.random.default_rng([self.position, budget]).standard_normal(logits.shape)
            logits = logits + (noise / budget).astype(np.float32)
        return logits


def as_language_model(model: BudgetModel) -> LanguageModel:
    """The same object, for a type checker to compare with the protocol."""
    return model


def windows(count: int = 3, length: int = 16) -> npt.NDArray[np.int32]:
    return np.random.default_rng(1).integers(7, 260, (count, length + 1)).astype(np.int32)


def plan(kind: Any = "decode", budgets: Sequence[int] = (2, 6), count: int = 3, **sizes: int) -> Plan:
    shape = StepShape(kind=kind, **{"prefix": 4, "rows": 4, "chunk": 6, **sizes})
    return Plan(shape, windows(count), make_settings(shape, Choices(budgets=budgets), CONFIG))


def report(model: Any, *plans: Plan, **how: Any) -> QualityReport:
    return make_report(measure(model, plans or (plan(),), **how), BYTES_L, {})


# ---- steps ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("decode", [("prefill", 6, 0), ("prefill", 1, 0), *[("decode", 1, 1)] * 8]),
        ("verify", [("prefill", 6, 0), ("prefill", 1, 0), ("verify", 4, 1), ("verify", 4, 1)]),
        ("prefill", [("prefill", 6, 1), ("prefill", 6, 1), ("prefill", 3, 1)]),
        ("prefill_then_decode", [("prefill", 6, 1), ("prefill", 1, 1), *[("decode", 1, 1)] * 8]),
        ("all", [("prefill", 6, 1), ("prefill", 1, 1), *[("decode", 1, 1)] * 8]),
    ],
)
def test_windows_are_run_as_a_user_would(kind: Any, expected: list[tuple[str, int, int]]) -> None:
    shape = StepShape(kind=kind, prefix=7, chunk=6, rows=4)
    steps = list(shape.steps(15))
    assert [(step.scope, step.stop - step.start, int(step.scored)) for step in steps] == expected
    assert [step.start for step in steps] == [0, *[step.stop for step in steps[:-1]]]
    assert steps[-1].stop == 15


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("decode", {("decode", 1)}),
        ("verify", {("verify", 4)}),
        ("prefill", {("prefill", 6), ("prefill", 4)}),
        ("prefill_then_decode", {("prefill", 4)}),
        ("all", {("prefill", 4), ("decode", 1)}),
    ],
)
def test_a_budget_acts_in_its_own_steps_alone(kind: Any, expected: set[tuple[str, int]]) -> None:
    model = BudgetModel()
    report(model, plan(kind))
    assert set(model.acted) == expected


def test_rows_of_logits_know_their_positions() -> None:
    model = BudgetModel()
    model.reroute(RoutingOptions(), ("decode",))
    results = list(run_steps(model, windows()[0, :9], StepShape(kind="decode", prefix=7, chunk=6)))
    assert [(result.start, len(result.logits_TW)) for result in results] == [(5, 1), (6, 1), (7, 1), (8, 1)]


def test_a_budget_in_other_steps_is_refused() -> None:
    model = BudgetModel()
    model.reroute(RoutingOptions(budget=2), ("decode", "prefill"))
    with pytest.raises(OptionError, match="acts in other steps"):
        next(run_steps(model, [1, 2], StepShape(kind="decode")))


def test_one_big_step_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def one_step(self: StepShape, n: int) -> Iterator[Step]:
        yield Step(0, 4, "prefill", "context")
        yield Step(4, n, "decode", "decoded")

    monkeypatch.setattr(StepShape, "steps", one_step)
    with pytest.raises(QualityError, match=r"other steps.*decode"):
        report(BudgetModel())


def test_a_model_that_counts_other_steps_is_found_out() -> None:
    class Uncounted(BudgetModel):
        def forward(self, tokens: Any, **how: Any) -> npt.NDArray[np.float32]:
            logits, stats = super().forward(tokens, **{**how, "scope": "prefill"}), self._stats
            assert stats.scopes["prefill"].steps
            return logits

    with pytest.raises(QualityError, match="scope prefill"):
        report(Uncounted())


@pytest.mark.parametrize("wrong", [{"kind": "sideways"}, {"kind": "verify", "rows": 0}, {"kind": "all", "prefix": 0}])
def test_steps_of_no_size_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(OptionError):
        StepShape(**wrong)


# ---- settings -------------------------------------------------------------------------------------------------------


def names(kind: Any, **choices: Any) -> list[str]:
    return [setting.name for setting in make_settings(StepShape(kind=kind), Choices(**choices), CONFIG)]


def test_settings_have_short_names() -> None:
    assert names("decode", budgets=(6, (4, 6)), denominators=("survivors", "frozen")) == [
        "decode aggregate 6",
        "decode aggregate 4:6",
        "decode aggregate 6 frozen",
        "decode aggregate 4:6 frozen",
    ]
    assert names("verify", budgets=(0, 12), policies=("coverage",), coverages=(0.9,), floors=(2,), votes=("all_scores",)) == [
        "verify coverage off all_scores floor=2 coverage=0.9",
        "verify coverage 12 all_scores floor=2 coverage=0.9",
    ]


def test_what_changes_nothing_makes_no_setting() -> None:
    assert names("verify", budgets=(12, (12, 12)), floors=(1, 2), coverages=(1.0, 0.5)) == ["verify aggregate 12"]
    assert names("decode", budgets=(0, 8, 64), policies=("aggregate", "floor"), expert_topks=(0, 9)) == ["decode off"]
    assert names("verify", budgets=(8,), policies=("per_position", "aggregate")) == ["verify off", "verify aggregate 8"]
    assert names("decode", budgets=(8,), expert_topks=(4,)) == ["decode off topk=4"]


def test_policies_that_need_the_flag_need_it() -> None:
    with pytest.raises(FencedOptionError):
        names("decode", budgets=(4,), policies=("resident",))
    (setting,) = make_settings(StepShape(kind="decode"), Choices(budgets=(4,), policies=("resident",), allow_irreproducible=True), CONFIG)
    assert not setting.reproducible


def test_a_list_of_budgets_has_one_per_layer() -> None:
    with pytest.raises(OptionError, match="one budget per MoE layer"):
        names("decode", budgets=((4, 4, 4),))


@pytest.mark.parametrize("denominator", ["survivors", "frozen"])
@pytest.mark.parametrize("floor", [1, 3])
def test_settings_that_share_a_run_are_the_same_bit_for_bit(denominator: Any, floor: int) -> None:
    policies = ("aggregate", "floor", "substitute", "per_position")
    choices = Choices(budgets=(2, 4), policies=policies, denominators=(denominator,), floors=(floor,), expert_topps=(0.0, 0.7))
    settings = make_settings(StepShape(kind="decode"), choices, CONFIG)
    shared = [setting for setting in settings if setting.run_as != setting.routing]
    assert len(shared) == 3 * 2 * 2
    rng = np.random.default_rng(2)
    bias = rng.standard_normal(64).astype(np.float32)
    router = RouterSpec(score="sigmoid", top_k=8, bias=bias, n_group=4, topk_group=2, routed_scaling_factor=2.5)
    for logits in np.round(rng.standard_normal((20, 1, 64)), 1).astype(np.float32):  # rounded, so that there are ties
        for setting in shared:
            mine, its = (native.select_experts(logits, router, routing) for routing in (setting.routing, setting.run_as))
            assert mine.differences(its) == [], setting.name


def test_settings_that_share_a_run_are_run_once() -> None:
    model, shape = BudgetModel(), StepShape(kind="decode", prefix=4, chunk=6)
    one = Plan(shape, windows(1), make_settings(shape, Choices(budgets=(3,), policies=("aggregate", "floor")), CONFIG))
    rows = report(model, one, control_windows=1).rows
    assert [(row.setting.name, row.run_as) for row in rows] == [
        ("decode aggregate 3", None),
        ("decode floor 3", "decode aggregate 3"),
    ]
    assert rows[0].summary == rows[1].summary
    assert len(model.calls) == 3 * (1 + 12)  # base, cut, control


# ---- measuring ------------------------------------------------------------------------------------------------------


def test_every_figure_is_of_the_cut_against_the_base() -> None:
    rows = report(BudgetModel()).rows
    two, six = rows
    assert [row.setting.name for row in rows] == ["decode aggregate 2", "decode aggregate 6"]
    assert two.summary.tokens == 3 * 12
    assert two.summary.kld.value > 4.0 * six.summary.kld.value > 0.0
    assert (two.share, six.share) == (0.25, 0.75)
    assert two.costs.expert_bytes(BYTES_L) == 36 * 2 * 110
    assert two.base_costs.expert_bytes(BYTES_L) == 36 * 8 * 110


def test_a_cut_prompt_is_reported_apart_from_what_follows() -> None:
    prompt, following = sorted(report(BudgetModel(), plan("prefill_then_decode", budgets=(12,))).rows, key=lambda row: row.group)[::-1]
    assert (prompt.group, prompt.summary.tokens, prompt.share) == ("prompt", 3 * 4, 12 / 32)
    assert (following.group, following.summary.tokens, following.share) == ("following", 3 * 12, 1.0)
    assert following.acting_share == prompt.share
    assert following.summary.kld.value == 0.0  # this model's cache takes no harm
    assert prompt.summary.kld.value > 0.0


def test_the_model_agrees_with_itself() -> None:
    found = report(BudgetModel(), plan(), plan("verify"))
    assert [(control.steps, control.tokens, control.largest_kld) for control in found.controls] == [
        ("decode", 24, 0.0),
        ("verify", 24, 0.0),
    ]
    assert found.passed


class CallDependent(BudgetModel):
    """Answers otherwise after so many calls."""

    def forward(self, tokens: Any, **how: Any) -> npt.NDArray[np.float32]:
        logits = super().forward(tokens, **how)
        logits[:, 0] += 0.01 * len(self.calls)
        return logits


class StuckRouting(BudgetModel):
    """Keeps a budget that it once had."""

    def reroute(self, routing: RoutingOptions, budget_scopes: Any) -> None:
        super().reroute(routing if routing.budget or not self.routing.budget else self.routing, budget_scopes)


@pytest.mark.parametrize("fault", [CallDependent, StuckRouting])
def test_a_model_that_differs_from_itself_fails_the_control(fault: type[BudgetModel]) -> None:
    found = report(fault(), plan(count=1))
    assert found.controls[0].largest_kld > 1e-6
    assert not found.passed


def test_the_options_afterwards_are_those_of_the_base() -> None:
    model = BudgetModel()
    report(model)
    assert (model.routing, model.budget_scopes) == (RoutingOptions(), frozenset())


# ---- going on -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("after", [1, 4, 9])
def test_an_interrupted_measurement_goes_on_and_ends_the_same(tmp_path: Path, after: int) -> None:
    plans = (plan(), plan("prefill_then_decode", budgets=(12,)))
    whole = report(BudgetModel(), *plans).to_json()

    def interrupt(what: str, done: int, total: int) -> None:
        if done == after:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        report(BudgetModel(), *plans, store=ResultStore(tmp_path), progress=interrupt)
    second, third = BudgetModel(), BudgetModel()
    assert report(second, *plans, store=ResultStore(tmp_path)).to_json() == whole
    assert report(third, *plans, store=ResultStore(tmp_path)).to_json() == whole
    uninterrupted = BudgetModel()
    report(uninterrupted, *plans)
    assert len(second.calls) < len(uninterrupted.calls)
    assert not third.calls


@pytest.mark.parametrize("change", ["model", "text", "steps", "budget"])
def test_results_of_something_else_are_not_taken(tmp_path: Path, change: str) -> None:
    def measured(model: BudgetModel, one: Plan, name: str = "a") -> None:
        measure(model, [one], store=ResultStore(tmp_path, name))

    one = plan(budgets=(2,))
    measured(BudgetModel(), one)
    other = {
        "model": one,
        "text": dataclasses.replace(one, windows=one.windows[:, ::-1]),
        "steps": plan(budgets=(2,), chunk=5),
        "budget": plan(budgets=(3,)),
    }[change]
    again = BudgetModel()
    measured(again, other, "b" if change == "model" else "a")
    assert again.calls


def test_results_that_depend_on_the_cache_are_not_kept(tmp_path: Path) -> None:
    shape = StepShape(kind="decode", prefix=4, chunk=6)
    routing = RoutingOptions(budget=2, policy="resident", allow_irreproducible=True)
    one, again = Plan(shape, windows(1), [Setting(shape, routing, routing)]), BudgetModel()
    measure(BudgetModel(), [one], store=ResultStore(tmp_path))
    measure(again, [one], store=ResultStore(tmp_path))
    assert len(again.acted) == 12


def test_a_damaged_result_is_named(tmp_path: Path) -> None:
    report(BudgetModel(), store=ResultStore(tmp_path))
    for file in tmp_path.rglob("*.npz"):
        file.write_bytes(file.read_bytes()[:-40])
    with pytest.raises(StoredResultError, match="npz"):
        report(BudgetModel(), store=ResultStore(tmp_path))


# ---- windows --------------------------------------------------------------------------------------------------------


def test_windows_join_documents_as_they_were_trained_on(tmp_path: Path) -> None:
    tokenizer = ChatTokenizer(byte_tokenizer())
    lines, plain = tmp_path / "a.jsonl", tmp_path / "b.txt"
    lines.write_text('{"text": "ab"}\n{"text": "c"}\n')
    plain.write_text("defg")
    found = read_windows([lines, plain], tokenizer, 5)
    ids = [1, 2, *tokenizer.encode_raw("ab")[2:], 0, 1, 2, *tokenizer.encode_raw("c")[2:], 0, 1, 2, *tokenizer.encode_raw("defg")[2:], 0]
    assert found.tolist() == [ids[0:6], ids[5:11], ids[10:16]]
    assert found.dtype == np.int32
    with pytest.raises(OptionError, match="too short"):
        read_windows([plain], tokenizer, 7)


def test_enough_windows_for_every_group() -> None:
    shape = StepShape(kind="prefill_then_decode", prefix=4)
    assert scored_per_window(shape, 16) == 4
    assert len(enough(windows(3), shape, 9)) == 3
    assert len(enough(windows(3), StepShape(kind="decode", prefix=4), 12)) == 1
    with pytest.raises(OptionError, match="too short"):
        enough(windows(3), shape, 13)
    with pytest.raises(OptionError, match="nothing left"):
        scored_per_window(StepShape(kind="all", prefix=16), 16)
    with pytest.raises(OptionError, match="ends within"):
        scored_per_window(StepShape(kind="verify", prefix=4, rows=5), 16)


# ---- what people see ------------------------------------------------------------------------------------------------


def test_the_report_is_json_and_a_plot(tmp_path: Path) -> None:
    found = report(BudgetModel(), plan(), plan("prefill_then_decode", budgets=(12, 20)))
    assert json.loads(json.dumps(found.to_json(), allow_nan=False))["passed"] is True
    drawn = panels(found)
    assert [panel.y_label.split(":")[0] for panel in drawn] == ["decode", "prefill_then_decode"]
    assert drawn[0].own_x == {"aggregate": [0.25, 0.75]}
    assert list(drawn[0].lines["aggregate"]) == [row.summary.kld.value for row in found.rows[:2]]
    draw(tmp_path / "plot.svg", "Quality", drawn)
    assert (tmp_path / "plot.svg").stat().st_size > 1000


def test_the_command_knows_all_kinds_of_steps() -> None:
    from colibri_jax.cli import quality as command

    assert command.STEP_KINDS == STEP_KINDS
