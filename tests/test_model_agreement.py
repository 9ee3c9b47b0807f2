"""Reference and native on generated models of every family, by hypothesis; and that the comparison sees a fault planted for it."""

from __future__ import annotations

import numpy as np
import pytest
from doctored_models import (
    Doctored,
    Faulty,
    LooseLogits,
    NudgedLogits,
    RouterLogits,
    ShiftedRows,
    StaleRewind,
    unequal_weight,
    with_selections,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from model_checks import CHECKS, Findings
from model_runs import Run
from model_strategies import WEIGHTS, Models, faults, plain_run, reference_shape, runs

from colibri_jax.compare import layers, whole
from colibri_jax.config import FAMILIES

SHIPPED, FLOATS = "as shipped (i, ii, w4a8)", "float activations (iii)"


@pytest.mark.parametrize("family", FAMILIES)
def test_reference_and_native_agree(family: str, models: Models) -> None:
    """(i), (ii) and the whole model as shipped, equal in every bit; (iii) with float32 activations, within its bound."""
    shape = reference_shape(family)

    @settings(max_examples=20)
    @given(run=runs(shape), weights=st.integers(0, WEIGHTS - 1))
    def agree(run: Run, weights: int) -> None:
        subject = models.subject(shape, weights)
        assert faults(SHIPPED, subject, run) == []
        findings = Findings()
        assert list(CHECKS[FLOATS](subject, run, findings)) == []
        assert findings.sensitive == []

    agree()


FAULTS: tuple[tuple[str, type[Doctored], str], ...] = (
    (SHIPPED, RouterLogits, "(i) selection"),
    (SHIPPED, with_selections(unequal_weight), "(i) selection"),
    (SHIPPED, ShiftedRows, "(ii)"),
    (SHIPPED, NudgedLogits, "whole model"),
    (SHIPPED, StaleRewind, "whole model"),
    (FLOATS, LooseLogits, "(iii)"),
    (FLOATS, StaleRewind, "(iii)"),
)


@pytest.mark.parametrize(("name", "fault", "said"), FAULTS, ids=[f"{name}, {fault.__name__}" for name, fault, _ in FAULTS])
def test_the_comparison_sees_a_planted_fault(
    name: str, fault: type[Doctored], said: str, models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The search for a quantiser boundary that would explain a deviation takes half a minute the first time; here nothing explains one.
    monkeypatch.setattr(layers, "examine_row", lambda step, reference, layer, row: (1e9, ""))
    sound = models.subject(reference_shape("mixtral"), 0)
    run = plain_run(sound.shape)
    assert faults(name, sound, run) == []
    found = faults(name, Faulty(sound, fault), run)
    assert any(line.startswith(said) for line in found), found


def test_a_row_of_zeros_hides_no_other_row() -> None:
    """Spoilt weights make such rows; 0/0 would be the largest error of its step, and then be dropped."""
    zeros, other = np.zeros((2, 3), np.float32), np.array([[0, 0, 0], [0, 2, 1]], np.float32)
    assert whole.relative_error(zeros, zeros) == 0.0
    assert whole.relative_error(other, other + np.float32([[0], [0.5]])) == 0.25
    assert whole.relative_error(zeros, other) == np.inf
    assert whole.relative_error(zeros, other, least=1.0) == 2.0
