"""Where a prompt cut does its damage: layer by layer, in the rows that were cut and in the keys and values that they leave behind."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal, Protocol, get_args

import numpy as np
import numpy.typing as npt

from colibri_jax.generate.protocol import LanguageModel
from colibri_jax.quality.costs import StepCosts
from colibri_jax.quality.statistics import Float32, Float64, TokenResults, compare_logits
from colibri_jax.routing_spec import RoutingOptions, Selection

Bool = npt.NDArray[np.bool_]

Mode = Literal["own", "past", "both", "decode", "all"]
MODES: tuple[Mode, ...] = get_args(Mode)
"""What is cut when a step of a text is scored.

- "own": this step, as a prefill step; everything before it is exact.
- "past": everything before it, in prefill steps; the step itself is exact, as tokens decoded without a budget after a cut prompt are.
- "both": all steps, as prefill steps.
- "decode": this step's positions, each as a decode step; everything before it is exact.
- "all": everything before it as prefill steps, and this step's positions as decode steps: a budget in every scope.
"""
EXACT = RoutingOptions()


class TracedModel(LanguageModel, Protocol):
    """A model that shows its inside; `engine.session.NativeModel` does."""

    @property
    def trace(self) -> dict[str, Any]:
        """Of the last step: "hidden", float32 [T, D] before every layer and after the last."""

    def set_trace(self, on: bool, *, inputs: Literal["all", "none"] | int = "all") -> None:
        """Keep what `trace` shows."""

    def kv_cache(self, layer: int) -> Float32:
        """float32 [position, width]."""


def relative_errors(base_TD: Float32, cut_TD: Float32) -> Float64:
    """float64 [T]: ‖cut − base‖ / ‖base‖ of every row; a base of zeros counts as 1 if the cut is not zero too."""
    base, cut = base_TD.astype(np.float64), cut_TD.astype(np.float64)
    error, size = np.linalg.norm(cut - base, axis=1), np.linalg.norm(base, axis=1)
    unscaled: Float64 = (error > 0).astype(np.float64)
    errors: Float64 = np.divide(error, size, out=unscaled, where=size > 0)
    return errors


def emptied_rows(selection: Selection) -> Bool:
    """bool [S]: rows left without a routed expert."""
    return np.asarray((selection.ids < 0).all(axis=1))


def emptied_so_far(selections: Sequence[Selection], moe_layers: Sequence[int], layers: int) -> npt.NDArray[np.int64]:
    """int64 [layers, S]: in how many layers, up to and with this one, a row was left without a routed expert."""
    found: npt.NDArray[np.int64] = np.zeros((layers, len(selections[0].ids)), np.int64)
    for layer, selection in zip(moe_layers, selections, strict=True):
        found[layer:] += emptied_rows(selection)
    return found


@dataclasses.dataclass(eq=False)
class LayerErrors:
    """Sums over rows, per layer (dense ones too).

    Attributes:
        hidden_L2, rows_L2: relative errors of the residual stream after each layer, and how many rows; first of rows that were never
            emptied up to this layer, then of the others.
        kv_L: relative errors of the rows of the KV cache.
        kv_rows: how many rows these are sums of.
        costs: of the steps with the budget.
        miscounted: steps whose emptied rows are not as many as the model said.
    """

    hidden_L2: Float64
    rows_L2: npt.NDArray[np.int64]
    kv_L: Float64
    kv_rows: int
    costs: StepCosts
    miscounted: int = 0

    @classmethod
    def none(cls, layers: int, moe_layers: int) -> LayerErrors:
        """Of no row."""
        return cls(np.zeros((layers, 2)), np.zeros((layers, 2), np.int64), np.zeros(layers), 0, StepCosts.none(moe_layers))

    def add_step(
        self, base: Sequence[Float32], cut: Sequence[Float32], selections: Sequence[Selection], moe_layers: Sequence[int]
    ) -> npt.NDArray[np.int64]:
        """Count a step with the budget.

        Args:
            base, cut: float32 [S, D] after each layer.

        Returns:
            int64 [S], in how many layers each row was emptied.
        """
        emptied_LS = emptied_so_far(selections, moe_layers, len(base))
        for layer, (b, c) in enumerate(zip(base, cut, strict=True)):
            errors = relative_errors(b, c)
            for group, rows in enumerate((emptied_LS[layer] == 0, emptied_LS[layer] > 0)):
                self.hidden_L2[layer, group] += errors[rows].sum()
                self.rows_L2[layer, group] += int(rows.sum())
        costs = StepCosts.of_step(selections)
        self.costs = StepCosts.total([self.costs, costs], len(costs.kept_L))
        self.miscounted += [int(emptied_rows(s).sum()) for s in selections] != costs.emptied_L.tolist()
        last: npt.NDArray[np.int64] = emptied_LS[-1]
        return last

    def add_cache(self, base: Sequence[Float32], cut: Sequence[Float32]) -> None:
        """Count a window's KV cache, float32 [n, X] of each layer."""
        self.kv_L += [relative_errors(b, c).sum() for b, c in zip(base, cut, strict=True)]
        self.kv_rows += len(base[0])

    def to_json(self) -> dict[str, Any]:
        """Means; NaN, as JSON has none, is null."""
        rows = self.rows_L2.astype(np.float64)
        groups = np.divide(self.hidden_L2, rows, out=np.full_like(rows, np.nan), where=rows > 0)
        steps, positions = max(self.costs.steps, 1), max(self.costs.positions, 1)
        return {
            "before": (self.costs.union_L / steps).tolist(),
            "kept": (self.costs.kept_L / steps).tolist(),
            "mass": (self.costs.mass_L / steps).tolist(),
            "emptied_share": (self.costs.emptied_L / positions).tolist(),
            "ever_emptied": (self.rows_L2[:, 1] / positions).tolist(),
            "hidden": (self.hidden_L2.sum(axis=1) / np.maximum(rows.sum(axis=1), 1)).tolist(),
            "hidden_never_emptied": _no_nan(groups[:, 0]),
            "hidden_emptied": _no_nan(groups[:, 1]),
            "kv": (self.kv_L / max(self.kv_rows, 1)).tolist(),
        }


def _no_nan(values: Float64) -> list[float | None]:
    return [None if np.isnan(value) else float(value) for value in values]


@dataclasses.dataclass(frozen=True, eq=False)
class ModeResult:
    """One text's scored tokens in one mode, in order.

    Attributes:
        tokens: against the exact model.
        places: int64 [n], place in the step.
        emptied: int64 [n], layers in which the row was left without a routed expert.
    """

    tokens: TokenResults
    places: npt.NDArray[np.int64]
    emptied: npt.NDArray[np.int64]

    def where(self, rows: Bool) -> ModeResult:
        """These tokens alone."""
        tokens = TokenResults(*(getattr(self.tokens, field.name)[rows] for field in dataclasses.fields(TokenResults)))
        return ModeResult(tokens, self.places[rows], self.emptied[rows])

    @classmethod
    def joined(cls, parts: Sequence[ModeResult]) -> ModeResult:
        """All tokens in order, of one part at least."""
        tokens = TokenResults.joined([part.tokens for part in parts])
        return cls(tokens, np.concatenate([part.places for part in parts]), np.concatenate([part.emptied for part in parts]))


class TextDamage:
    """One text: exact once, then with cuts. Leaves the model's options as those of the last step.

    Args:
        tokens: int32 [n + 1].
        starts: where its steps begin, ascending from 0; there are two at least.
        traced: look at the layers, which costs time and memory.

    All modes score the same positions: those of all steps but the first, which has nothing before it.
    """

    def __init__(self, model: TracedModel, tokens: npt.NDArray[np.int32], starts: Sequence[int], *, traced: bool = True) -> None:
        self._model, self._ids, self._targets = model, tokens[:-1], tokens[1:]
        self._steps = list(zip(starts, [*starts[1:], len(self._ids)], strict=True))
        self._first = starts[1]
        self._layers = range(model.config.n_layers)
        logits: list[Float32] = []
        hidden: list[list[Float32]] = []
        model.set_trace(traced, inputs="none")
        model.reset()
        for start, stop in self._steps:
            logits.append(self._run(start, stop, EXACT, "past"))
            hidden.append(model.trace["hidden"][1:] if traced else [])
        model.set_trace(False)
        self._hidden = [np.concatenate(parts) for parts in zip(*hidden, strict=True)]
        self._cache = [model.kv_cache(layer).copy() for layer in self._layers] if traced else []
        self._logits = np.concatenate(logits)

    def exact_again(self) -> TokenResults:
        """The exact model against itself."""
        self._model.reset()
        again = [self._run(start, stop, EXACT, "past") for start, stop in self._steps]
        return compare_logits(self._logits, np.concatenate(again), self._targets)

    def after_exact(self, routings: Sequence[RoutingOptions], mode: Literal["own", "decode"]) -> dict[RoutingOptions, ModeResult]:
        """Each scored step cut by each of the options, with everything before it exact."""
        found: dict[RoutingOptions, list[ModeResult]] = {routing: [] for routing in routings}
        self._model.reset()
        for start, stop in self._steps:
            if start >= self._first:
                for routing, parts in found.items():
                    parts.append(self._compare(start, self._run(start, stop, routing, mode)))
                    self._model.rewind(stop - start)
            self._run(start, stop, EXACT, "past", logits="last")
        return {routing: ModeResult.joined(parts) for routing, parts in found.items()}

    def after_cut(self, routing: RoutingOptions, modes: Sequence[Mode], errors: LayerErrors | None = None) -> dict[Mode, ModeResult]:
        """All steps cut one after another; each scored step in each of the modes "past", "both" and "all".

        Args:
            errors: counts the layers' errors, of "both".
        """
        found: dict[Mode, list[ModeResult]] = {mode: [] for mode in modes}
        self._model.reset()
        for start, stop in self._steps:
            scored = start >= self._first
            for mode in modes:
                if scored and mode != "both":
                    found[mode].append(self._compare(start, self._run(start, stop, routing, mode)))
                    self._model.rewind(stop - start)
            if stop < len(self._ids) or "both" in modes or errors is not None:
                logits = self._cut(start, stop, routing, errors, "all" if scored and "both" in modes else "last")
                if scored and "both" in modes:
                    found["both"].append(self._compare(start, logits))
        if errors is not None:
            errors.add_cache(self._cache, [self._model.kv_cache(layer) for layer in self._layers])
        return {mode: ModeResult.joined(parts) for mode, parts in found.items()}

    def in_one_step(self, routing: RoutingOptions, errors: LayerErrors) -> ModeResult:
        """The whole text cut as one step, scored at the same positions as the rest."""
        self._model.reset()
        logits = self._cut(0, len(self._ids), routing, errors, "all")
        errors.add_cache(self._cache, [self._model.kv_cache(layer) for layer in self._layers])
        whole = self._compare(0, logits)
        return whole.where(whole.places >= self._first)

    def _cut(self, start: int, stop: int, routing: RoutingOptions, errors: LayerErrors | None, logits: Literal["all", "last"]) -> Float32:
        model = self._model
        model.set_trace(errors is not None, inputs="none")
        scores = self._run(start, stop, routing, "both", logits=logits)
        if errors is not None:
            base = [hidden[start:stop] for hidden in self._hidden]
            errors.add_step(base, model.trace["hidden"][1:], model.selections, model.config.moe_layers)
            model.set_trace(False)
        return scores

    def _run(self, start: int, stop: int, routing: RoutingOptions, mode: Mode, *, logits: Literal["all", "last"] = "all") -> Float32:
        """One step as `mode` says, after whatever the cache holds."""
        ids = self._ids[start:stop]
        if mode in ("decode", "all"):
            # Positions routed alone are bit for bit what decode steps of one position each would give.
            self._model.reroute(routing, ("decode",))
            return self._model.forward(ids, scope="verify", logits=logits, rows="alone")
        self._model.reroute(*((EXACT, ()) if mode == "past" else (routing, ("prefill",))))
        return self._model.forward(ids, scope="prefill", logits=logits)

    def _compare(self, start: int, logits: Float32) -> ModeResult:
        """The step that was just run against the exact one."""
        stop = start + len(logits)
        compared = compare_logits(self._logits[start:stop], logits, self._targets[start:stop])
        emptied = emptied_so_far(self._model.selections, self._model.config.moe_layers, self._model.config.n_layers)[-1]
        return ModeResult(compared, np.arange(len(logits)), emptied)
