"""Generated models and runs drawn by hypothesis, and the containers that they are tried on; the distribution is `model_shapes`' own."""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
from choosing import Random
from hypothesis import strategies as st
from model_checks import Subject
from model_runs import Run, make_run
from model_shapes import Shape, make_shape, make_weights, write_model
from strategies import Drawn

from colibri_jax.config import FAMILIES

WEIGHTS = 3
"""Draws of weights per shape; the first is not spoilt."""
REFERENCE_ROWS = (1, 8)
"""Row counts that the reference compiles for in tests: each costs seconds a shape."""


class Models:
    """Containers by shape and weights, written once in a directory of their own."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._made: dict[tuple[str, int], Subject] = {}

    def subject(self, shape: Shape, weights: int) -> Subject:
        """A shape with its draw of weights number `weights`."""
        key = (repr(shape), weights)
        if key not in self._made:
            values = make_weights(shape.model, [weights], plain=weights == 0)
            self._made[key] = Subject(write_model(self._directory / str(len(self._made)), shape, values), shape)
        return self._made[key]


@functools.cache
def reference_shape(family: str) -> Shape:
    """The one shape of a family that tests hold against the reference."""
    return make_shape(Random(np.random.default_rng([20, FAMILIES.index(family)])), family, REFERENCE_ROWS)


@st.composite
def runs(draw: st.DrawFn, shape: Shape) -> Run:
    """Runs whose steps have the row counts that the reference is compiled for."""
    return make_run(Drawn(draw), shape)


@st.composite
def models_and_runs(draw: st.DrawFn) -> tuple[Shape, int, Run]:
    """Any shape, its weights, and a run with steps of any length: for the engine alone."""
    c = Drawn(draw)
    shape = make_shape(c, c.pick(FAMILIES))
    return shape, c.integer(0, WEIGHTS - 1), make_run(c, shape, rows=(c.integer(1, 12), 1, c.integer(1, 20)))
