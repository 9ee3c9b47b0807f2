"""Properties of the native engine on generated models, and of selections; and that each checker sees a fault planted for it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from typing import Any

import model_cases
import numpy as np
import numpy.typing as npt
import pytest
from click.testing import CliRunner
from doctored_models import (
    CallDependent,
    CountedTwice,
    Doctored,
    Faulty,
    NudgedLogits,
    ReadTwice,
    RowDependent,
    RowsTogether,
    StaleRewind,
    one_too_many,
    renormalised,
    uncounted,
    unequal_weight,
    with_selections,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from model_checks import CHECKS, NATIVE_CHECKS, Findings, Subject
from model_laws import MONOTONE, mass_faults, order_faults, selection_faults
from model_runs import REPRODUCIBLE, Run
from model_shapes import Shape
from model_strategies import Models, faults, models_and_runs, plain_run, reference_shape
from strategies import Case, selection_cases

import colibri_jax
from colibri_jax.config import FAMILIES
from colibri_jax.routing_spec import RouterSpec, RoutingOptions, Selection

Select = Callable[[npt.NDArray[np.float32], RouterSpec, RoutingOptions], Selection]
BACKENDS: dict[str, Select] = {"native": colibri_jax.native.select_experts, "reference": colibri_jax.reference.select_experts}


# ---- native alone ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NATIVE_CHECKS)
@settings(max_examples=60)
@given(case=models_and_runs())
def test_the_engine_alone(name: str, models: Models, case: tuple[Shape, int, Run]) -> None:
    shape, weights, run = case
    assert faults(name, models.subject(shape, weights), run) == []


# ---- selections alone -----------------------------------------------------------------------------------------------


@settings(max_examples=300)
@given(case=selection_cases(max_experts=64, policies=REPRODUCIBLE, max_positions=24))
def test_native_selections_obey_the_laws(case: Case) -> None:
    found = colibri_jax.native.select_experts(case.logits, case.router, case.options)
    assert list(selection_faults(case.logits, case.router, case.options, found)) == []


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_permutation_of_positions_permutes_the_selection(backend: str) -> None:
    # Few sizes for the reference, which compiles one program per padded shape and policy.
    most_experts, most_positions, examples = (64, 24, 200) if backend == "native" else (16, 8, 60)

    @settings(max_examples=examples)
    @given(case=selection_cases(max_experts=most_experts, policies=REPRODUCIBLE, max_positions=most_positions), data=st.data())
    def permute(case: Case, data: st.DataObject) -> None:
        order = np.array(data.draw(st.permutations(range(len(case.logits)))), np.int64)
        select, logits = BACKENDS[backend], np.ascontiguousarray(case.logits[order])
        plain, moved = select(case.logits, case.router, case.options), select(logits, case.router, case.options)
        assert list(order_faults(plain, moved, order)) == []

    permute()


@settings(max_examples=150)
@given(case=selection_cases(max_experts=32, policies=MONOTONE, max_positions=12), more=st.lists(st.integers(1, 33), max_size=4))
def test_kept_mass_grows_with_the_budget(case: Case, more: list[int]) -> None:
    budgets = [dataclasses.replace(case.options, budget=n) for n in sorted([1, 2, 4, *more])]
    assert list(mass_faults([colibri_jax.native.select_experts(case.logits, case.router, options) for options in budgets])) == []


# ---- faults that the checkers see -----------------------------------------------------------------------------------

Condition = Callable[[dict[str, Any]], bool]
ALWAYS: Condition = lambda options: True  # noqa: E731

FAULTS: tuple[tuple[str, type[Doctored], Condition], ...] = (
    ("split", RowDependent, ALWAYS),
    ("split", CallDependent, ALWAYS),
    ("rows alone", RowsTogether, ALWAYS),
    ("rows alone", RowDependent, ALWAYS),
    ("rows alone", with_selections(unequal_weight), ALWAYS),
    ("replay", CallDependent, ALWAYS),
    ("replay", StaleRewind, ALWAYS),
    ("rewound", StaleRewind, ALWAYS),
    ("setup", NudgedLogits, lambda options: "setup" in options),
    ("wide budget", NudgedLogits, lambda options: options["routing"].budget != 0),
    ("selections", with_selections(renormalised), ALWAYS),
    ("selections", with_selections(one_too_many), ALWAYS),
    ("selections", with_selections(uncounted), ALWAYS),
    ("order of positions", with_selections(unequal_weight), ALWAYS),
    ("reads", CountedTwice, ALWAYS),
    ("reads", ReadTwice, ALWAYS),
)


@pytest.mark.parametrize(
    ("name", "fault", "only_if"), FAULTS, ids=[f"{name}, {fault.__name__}-{i}" for i, (name, fault, _) in enumerate(FAULTS)]
)
def test_a_checker_sees_a_planted_fault(name: str, fault: type[Doctored], only_if: Condition, models: Models) -> None:
    sound = models.subject(reference_shape("mixtral"), 0)
    run = plain_run(sound.shape)
    assert faults(name, sound, run) == []
    assert faults(name, Faulty(sound, fault, only_if), run) != []


def test_every_native_checker_has_a_planted_fault() -> None:
    # A mass that falls needs no model: see below.
    assert {name for name, _, _ in FAULTS} | {"mass by budget"} == set(NATIVE_CHECKS)


LOGITS = np.random.default_rng(3).normal(0, 1, (6, 12)).astype(np.float32)
ROUTER = RouterSpec(score="sigmoid", top_k=3)
select = BACKENDS["native"]


def test_a_selection_that_looks_at_the_order_of_positions_is_seen() -> None:
    order, options = np.arange(6)[::-1].copy(), RoutingOptions(budget=4)
    plain, moved = select(LOGITS, ROUTER, options), select(LOGITS[::-1], ROUTER, options)
    assert list(order_faults(plain, moved, order)) == []
    assert list(order_faults(plain, plain, order)) == ["ids depends on the order of positions", "weights depends on the order of positions"]
    assert list(order_faults(plain, unequal_weight(moved), order)) == ["weights depends on the order of positions"]
    assert list(order_faults(plain, uncounted(moved), order)) == ["dropped_slots depends on the order of positions"]


def test_a_mass_that_falls_is_seen() -> None:
    selections = [select(LOGITS, ROUTER, RoutingOptions(budget=n)) for n in (1, 3, 5)]
    assert list(mass_faults(selections)) == []
    assert list(mass_faults(selections[::-1])) != []


@pytest.mark.parametrize("policy", REPRODUCIBLE)
def test_a_policy_in_the_place_of_another_breaks_a_law(policy: Any) -> None:
    """Every law of sizes, on a step in which all policies act and differ."""
    options = RoutingOptions(budget=2, policy=policy, coverage=0.4 if policy == "coverage" else 1.0)
    found = {p: select(LOGITS, ROUTER, dataclasses.replace(options, policy=p)) for p in REPRODUCIBLE}
    assert list(selection_faults(LOGITS, ROUTER, options, found[policy])) == []
    off = select(LOGITS, ROUTER, RoutingOptions())
    for other in (off, found["per_position" if policy == "aggregate" else "aggregate"]):
        assert list(selection_faults(LOGITS, ROUTER, options, other)) != []


# ---- the command ----------------------------------------------------------------------------------------------------


@pytest.fixture
def without_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its comparisons have tests of their own, and each shape would be compiled."""
    for name in set(CHECKS) - set(NATIVE_CHECKS):
        monkeypatch.delitem(CHECKS, name)


ARGUMENTS = ["--shapes", "6", "--jobs", "1", "--json"]


@pytest.mark.usefixtures("without_reference")
def test_the_command_reports_what_it_ran() -> None:
    ran = CliRunner().invoke(model_cases.main, ["--cases", "14", *ARGUMENTS])
    assert ran.exit_code == 0, ran.stderr
    found = json.loads(ran.stdout)
    assert (found["cases"], found["shapes"], found["failures"]) == (14, 6, [])
    assert [family["cases"] for family in found["families"].values()] == [3, 3, 2, 2, 2, 2]
    assert list(found["families"]) == list(FAMILIES)
    assert found["properties"] == {name: {"cases": 14, "failures": 0} for name in NATIVE_CHECKS}


@pytest.mark.usefixtures("without_reference")
def test_the_command_fails_with_a_line_that_runs_the_case_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def check(subject: Subject, run: Run, findings: Findings) -> Iterator[str]:
        if subject.shape.family == "olmoe":
            raise ValueError("planted")
        yield from ()

    monkeypatch.setitem(CHECKS, "replay", check)
    ran = CliRunner().invoke(model_cases.main, ["--cases", "6", *ARGUMENTS])
    assert ran.exit_code == 1
    assert "planted" in ran.stderr
    assert "--shapes 6 --seed 0 --only 4" in ran.stderr
    again = CliRunner().invoke(model_cases.main, ["--only", "4", *ARGUMENTS])
    assert again.exit_code == 1
    assert [failure["case"] for failure in json.loads(again.stdout)["failures"]] == [4]


def test_cases_are_functions_of_seed_and_number() -> None:
    first, again, other = (model_cases.case_of(seed, 17, 6) for seed in (0, 0, 1))
    assert first == again
    assert first.run != other.run
    shapes = {repr(model_cases.shape_of(0, number)) for number in range(64)}
    assert len(shapes) == 64
