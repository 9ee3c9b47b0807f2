"""Subjects of the model checks with a fault planted between the engine and whoever looks at it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from model_checks import Subject
from model_runs import Run

from colibri_jax.routing_spec import Selection

Float32 = npt.NDArray[np.float32]


class Doctored:
    """A native model that lies about something; everything else is the model's own."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)


def nudged(logits_TW: Float32) -> Float32:
    """One logit of the last row, one bit away: the smallest difference that there is."""
    changed = logits_TW.copy()
    changed[-1, 0] = np.nextafter(changed[-1, 0], np.float32(np.inf), dtype=np.float32)
    return changed


class RouterLogits(Doctored):
    """Says that the first MoE layer saw other router logits than it did."""

    @property
    def trace(self) -> dict[str, Any]:
        trace = self.model.trace
        trace["router_logits"][0] = trace["router_logits"][0] * np.float32(1.5)
        return dict(trace)


class ShiftedRows(Doctored):
    """Gives every row of a layer's output to the next position."""

    @property
    def trace(self) -> dict[str, Any]:
        trace = self.model.trace
        trace["hidden"][1] = np.roll(trace["hidden"][1], 1, axis=0)
        return dict(trace)


class NudgedLogits(Doctored):
    """Answers one bit beside the truth."""

    def forward(self, tokens: Any, **options: Any) -> Float32:
        return nudged(self.model.forward(tokens, **options))


class LooseLogits(Doctored):
    """Answers with a relative error of 1e-4."""

    def forward(self, tokens: Any, **options: Any) -> Float32:
        return np.asarray(self.model.forward(tokens, **options) * np.float32(1.0001))


class RowDependent(Doctored):
    """A result that depends on how many positions share the step."""

    def forward(self, tokens: Any, **options: Any) -> Float32:
        logits_TW: Float32 = self.model.forward(tokens, **options)
        return nudged(logits_TW) if len(tokens) > 2 else logits_TW


class CallDependent(Doctored):
    """A result that depends on what was computed before."""

    calls = 0

    def forward(self, tokens: Any, **options: Any) -> Float32:
        self.calls += 1
        logits_TW: Float32 = self.model.forward(tokens, **options)
        return nudged(logits_TW) if self.calls > 1 else logits_TW


class RowsTogether(Doctored):
    """Routes rows that it should route alone with their neighbours."""

    def forward(self, tokens: Any, **options: Any) -> Float32:
        logits_TW: Float32 = self.model.forward(tokens, **{**options, "rows": "together"})
        return logits_TW


class StaleRewind(Doctored):
    """Drops one position less than it was told, by feeding one again."""

    def rewind(self, n: int) -> None:
        self.model.rewind(n)
        if n and self.model.position:
            self.model.rewind(1)
            self.model.forward([0], scope="decode")


class CountedTwice(Doctored):
    """Every miss is counted twice."""

    @property
    def stats(self) -> Any:
        stats = self.model.stats
        scopes = {scope: dataclasses.replace(s, cache_misses=2 * s.cache_misses) for scope, s in stats.scopes.items()}
        return dataclasses.replace(stats, scopes=scopes)


class ReadTwice(Doctored):
    """Every read was made twice."""

    @property
    def stats(self) -> Any:
        stats = self.model.stats
        twice = {s: dataclasses.replace(v, useful_bytes=2 * v.useful_bytes, bytes_read=2 * v.bytes_read) for s, v in stats.scopes.items()}
        return dataclasses.replace(stats, scopes=twice)


def renormalised(selection: Selection) -> Selection:
    """Weights that sum to something else than they must."""
    return dataclasses.replace(selection, weights=selection.weights * np.float32(1.01))


def one_too_many(selection: Selection) -> Selection:
    """Keeps an expert that no position uses."""
    missing = next(e for e in range(len(selection.kept) + 1) if e not in selection.kept)
    kept = np.sort(np.append(selection.kept, np.int32(missing)))
    return dataclasses.replace(selection, kept=kept, dropped=selection.dropped - 1)


def uncounted(selection: Selection) -> Selection:
    """Says that no slot was dropped."""
    return dataclasses.replace(selection, dropped_slots=0)


def unequal_weight(selection: Selection) -> Selection:
    """The first position's first weight, one bit away."""
    weights = selection.weights.copy()
    weights[0, 0] = np.nextafter(weights[0, 0], np.float32(np.inf), dtype=np.float32)
    return dataclasses.replace(selection, weights=weights)


def with_selections(change: Callable[[Selection], Selection]) -> type[Doctored]:
    """A model whose selections are all changed."""

    class Changed(Doctored):
        @property
        def selections(self) -> tuple[Selection, ...]:
            return tuple(change(selection) for selection in self.model.selections)

    Changed.__name__ = change.__name__
    return Changed


class Faulty(Subject):
    """A subject whose native models are doctored; `only_if` looks at the options that a model is loaded with."""

    def __init__(self, sound: Subject, fault: type[Doctored], only_if: Callable[[dict[str, Any]], bool] = lambda options: True) -> None:
        super().__init__(sound.path, sound.shape)
        self._fault, self._only_if = fault, only_if

    def native(self, run: Run, **options: Any) -> Any:
        model = super().native(run, **options)
        return self._fault(model) if self._only_if(options) else model
