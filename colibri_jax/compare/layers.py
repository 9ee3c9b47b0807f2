"""Comparisons (i) and (ii): each part on equal inputs, so that no difference can hide behind an earlier one."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from colibri_jax.compare.step import Float32, Mask, NativeStep, follow_layer
from colibri_jax.reference.model import ReferenceModel
from colibri_jax.reference.quantized import activation_codes, recorded_activations
from colibri_jax.reference.routing import select_experts

# What "a few ulp" means, in units in the last place of a row's largest value. Where the reference keeps the contract's order
# of sums the difference is 0; where a device does not (a fused multiply-add, another square root), each of the about ten
# roundings between two quantisers may differ by one such unit or less.
FEW_ULPS = 16.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Deviation:
    """A row of a part on which the two differ by more than a few ulp, and what explains it ("" if nothing does)."""

    part: str
    position: int
    ulps: float
    explanation: str


@dataclasses.dataclass
class PartByPart:
    """Sums over steps. Parts are the embedding, every layer, and final norm and head together."""

    selections: int = 0
    selections_cut: int = 0
    """Those in which the budget dropped an expert."""
    selection_differences: list[str] = dataclasses.field(default_factory=list)
    """"layer 3, step at position 17: ids, weights" where reference and native disagree on equal logits."""
    rows: int = 0
    """Rows of parts; in a layer a row is its output, what the cache keeps of it, and its router logits."""
    equal_rows: int = 0
    """Rows that are equal in every bit."""
    rows_within: int = 0
    worst_ulps: float = 0.0
    """Of the rows within a few ulp."""
    deviations: list[Deviation] = dataclasses.field(default_factory=list)
    attended_rows: int = 0
    """Rows of layers in which an indexer limited what the row attends to."""
    attended_differences: list[str] = dataclasses.field(default_factory=list)


def compare_parts(step: NativeStep, reference: ReferenceModel, result: PartByPart) -> None:
    """Hold one step of the native engine against the reference, part by part, and count it into `result`.

    Args:
        reference: of the same container and precision; its own state is not touched.
    """
    trace, config, start = step.trace, reference.config, step.start
    _compare_rows("embedding", start, [(reference.embed(step.tokens), trace["hidden"][0])], lambda row: "", result)
    chosen_TS: Mask | None = None
    for layer in range(config.n_layers):
        got, chosen_TS = follow_layer(step, reference, layer, trace["hidden"][layer], step.cache(layer, start), chosen_TS)
        pairs = [(got.hidden_TD, trace["hidden"][layer + 1])]
        for ours, theirs in zip(got.cache, step.cache(layer, step.native.position), strict=True):
            if theirs is not None:
                pairs.append((np.asarray(ours)[start : len(theirs)], np.asarray(theirs)[start:]))
        if got.router_logits_TE is not None:
            logits_TE = trace["router_logits"][config.moe_layers.index(layer)]
            pairs.append((got.router_logits_TE, logits_TE))
            _compare_selection(step, reference, layer, logits_TE, result)
        if chosen_TS is not None:
            _compare_attended(step, layer, chosen_TS, result)
        _compare_rows(f"layer {layer}", start, pairs, functools.partial(explain, step, reference, layer), result)
    logits_TW = reference.score(reference.normed(trace["hidden"][-1]))
    _compare_rows("head", start, [(logits_TW, step.logits_TW)], lambda row: "", result)


def _compare_selection(step: NativeStep, reference: ReferenceModel, layer: int, logits_TE: Float32, result: PartByPart) -> None:
    router, native = reference.router(layer), step.selection(layer)
    assert router is not None
    assert native is not None
    defined = select_experts(logits_TE, router, step.options(reference.config.moe_layers.index(layer)))
    result.selections += 1
    result.selections_cut += defined.dropped > 0
    unequal = defined.differences(native)
    if unequal:
        result.selection_differences.append(f"layer {layer}, step at position {step.start}: {', '.join(unequal)}")


def _compare_attended(step: NativeStep, layer: int, chosen_TS: Mask, result: PartByPart) -> None:
    result.attended_rows += sum(bool(positions) for positions in step.trace["attended"][layer])
    for row in np.flatnonzero((step.attended(layer) != chosen_TS).any(axis=1)):
        result.attended_differences.append(f"layer {layer}, position {step.start + int(row)}")


def _compare_rows(
    part: str, start: int, pairs: Sequence[tuple[Float32, Float32]], explanation: Callable[[int], str], result: PartByPart
) -> None:
    """Count the rows of a part: (reference, native) pairs of [T, …] arrays that belong together."""
    ulps_T = np.max([_ulps(got, expected) for got, expected in pairs], axis=0)
    within_T = ulps_T <= FEW_ULPS
    result.rows += len(ulps_T)
    result.equal_rows += int(np.all([(got == expected).all(axis=1) for got, expected in pairs], axis=0).sum())
    result.rows_within += int(within_T.sum())
    result.worst_ulps = max(result.worst_ulps, float(ulps_T[within_T].max(initial=0.0)))
    for row in np.flatnonzero(~within_T):
        result.deviations.append(
            Deviation(part=part, position=start + int(row), ulps=float(ulps_T[row]), explanation=explanation(int(row)))
        )


def _ulps(got: Float32, expected: Float32) -> npt.NDArray[np.float64]:
    unit_T = np.spacing(np.abs(expected).max(axis=1)).astype(np.float64)
    return np.asarray(np.abs(got.astype(np.float64) - expected).max(axis=1) / unit_T)


def explain(step: NativeStep, reference: ReferenceModel, layer: int, row: int) -> str:
    """Find the quantiser boundary that one row of a layer crossed.

    The reference computes the row alone, operation by operation, and its quantiser inputs are held against the native ones in
    order. The first pair that agrees within a few ulp but rounds to other int8 values is the explanation.

    Returns:
        Which element of which input, or "" where the inputs themselves differ, or nothing does.
    """
    position, selection = step.start + row, step.selection(layer)
    attended_TS = None if reference.config.indexer is None else step.attended(layer)[row : row + 1, : position + 1]
    if selection is not None:
        ids = selection.ids[row : row + 1]
        kept = np.sort(ids[ids >= 0]).astype(np.int32)
        selection = dataclasses.replace(selection, ids=ids, weights=selection.weights[row : row + 1], kept=kept)
    with recorded_activations() as recorded:
        reference.layer_step(
            layer,
            step.trace["hidden"][layer][row : row + 1],
            step.cache(layer, position),
            position,
            scope=step.scope,
            attended_TS=attended_TS,
            selection=selection,
        )
    for name, theirs_X in _inputs_of_row(step.trace, layer, row):
        # Inputs of one width are told apart by their values: only the true counterpart agrees within a few ulp.
        candidates = [(x_TX[0], group) for x_TX, group in recorded if x_TX.shape[1] == theirs_X.size]
        if not candidates:
            return ""
        ours_X, group = min(candidates, key=lambda candidate: float(np.abs(candidate[0] - theirs_X).max()))
        if not np.abs(ours_X - theirs_X).max() <= FEW_ULPS * np.spacing(np.abs(theirs_X).max()):
            return ""
        crossed = np.flatnonzero(activation_codes(ours_X, group) != activation_codes(theirs_X, group))
        if crossed.size:
            at = int(crossed[0])
            return f"{name}[{at}]: {ours_X[at]} and {theirs_X[at]} round to different int8 values"
    return ""


def _inputs_of_row(trace: dict[str, Any], layer: int, row: int) -> list[tuple[str, Float32]]:
    found = []
    for at, name, rows, values in trace["inputs"]:
        if at == layer:
            found += [(name, values[i]) for i in np.flatnonzero(rows == row)]
    return found
