"""Properties of whole generated models, by hypothesis; and that each checker sees a fault planted for it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from model_checks import CHECKS, NATIVE_CHECKS, Findings, Subject
from model_laws import MONOTONE, mass_faults, order_faults, selection_faults
from model_runs import REPRODUCIBLE, Run, Step
from model_shapes import Shape
from model_strategies import Models, models_and_runs, reference_shape, runs
from strategies import Case, selection_cases

import colibri_jax
from colibri_jax.config import FAMILIES
from colibri_jax.engine.session import NativeModel
from colibri_jax.routing_spec import SCOPES, RouterSpec, RoutingOptions, Selection

Select = Callable[[npt.NDArray[np.float32], RouterSpec, RoutingOptions], Selection]
BACKENDS: dict[str, Select] = {"native": colibri_jax.native.select_experts, "reference": colibri_jax.reference.select_experts}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("models"))


def faults(name: str, subject: Subject, run: Run) -> list[str]:
    """What a checker finds."""
    return list(CHECKS[name](subject, run, Findings()))


# ---- reference and native -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_reference_and_native_agree(family: str, models: Models) -> None:
    """(i), (ii) and the whole model as shipped, equal in every bit; (iii) with float32 activations, within its bound."""
    shape = reference_shape(family)

    @settings(max_examples=20)
    @given(run=runs(shape), weights=st.integers(0, 2))
    def agree(run: Run, weights: int) -> None:
        subject = models.subject(shape, weights)
        for name in ("as shipped (i, ii, w4a8)", "float activations (iii)"):
            assert faults(name, subject, run) == [], name

    agree()


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
        assert list(order_faults(case.logits, case.router, case.options, order, BACKENDS[backend])) == []

    permute()


@settings(max_examples=150)
@given(case=selection_cases(max_experts=32, policies=MONOTONE, max_positions=12), more=st.lists(st.integers(1, 33), max_size=4))
def test_kept_mass_grows_with_the_budget(case: Case, more: list[int]) -> None:
    assert list(mass_faults(case.logits, case.router, case.options, [1, 2, 4, *more], BACKENDS["native"])) == []
