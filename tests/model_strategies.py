"""Generated models and runs drawn by hypothesis, and the containers that they are tried on; the distribution is `model_shapes`' own."""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
from choosing import Random
from hypothesis import strategies as st
from model_checks import CHECKS, Findings, Subject
from model_runs import Run, Step, make_run
from model_shapes import Shape, make_shape, make_weights, write_model
from strategies import Drawn

from colibri_jax.config import FAMILIES
from colibri_jax.routing_spec import SCOPES, RoutingOptions

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


def faults(name: str, subject: Subject, run: Run) -> list[str]:
    """What a checker of `model_checks` finds."""
    return list(CHECKS[name](subject, run, Findings()))


@functools.cache
def reference_shape(family: str) -> Shape:
    """The one shape of a family that tests hold against the reference: the first generated one on which budget and DSA can act."""
    draws = (np.random.default_rng([FAMILIES.index(family), number]) for number in range(1000))
    return next(shape for shape in (make_shape(Random(rng), family, REFERENCE_ROWS) for rng in draws) if _telling(shape))


def _telling(shape: Shape) -> bool:
    model = shape.model
    shares = model.indexer is None or (model.indexer.topk < 12 and "shared" in model.indexer.kinds)
    top_k, experts = model.moe.router.top_k, model.moe.n_experts
    return shares and 2 <= len(model.moe_layers) < 4 and model.n_layers <= 4 and 2 <= top_k < experts and 6 <= experts <= 16


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


def plain_run(shape: Shape) -> Run:
    """A prompt, a token, a verification after a rewind, and a budget that acts: what planted faults are tried on."""
    vocabulary = shape.config["vocab_size"]
    ids = np.random.default_rng(5).integers(0, vocabulary, 16).tolist()
    roomy = {"cache_experts": shape.model.moe.n_experts, "threads": 1}
    return Run(
        steps=(Step("prefill", tuple(ids[:8])), Step("decode", (ids[8],)), Step("verify", tuple(ids[9:14]), rewind=2)),
        routing=RoutingOptions(budget=2),
        scopes=SCOPES,
        setup=roomy,
        other_setup={"cache_experts": 1, "threads": 2},
        cuts=(1, 5, 6),
        replay=(3, 1),
    )
