"""Comparisons (i) and (ii): each part on equal inputs, so that no difference can hide behind an earlier one."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt

from colibri_jax.engine.session import NativeModel
from colibri_jax.reference.layer import LayerCache
from colibri_jax.reference.model import ReferenceModel
from colibri_jax.reference.quantized import recorded_activations
from colibri_jax.reference.routing import select_experts
from colibri_jax.routing_spec import Scope

Float32 = npt.NDArray[np.float32]

# What "a few ulp" means, in units in the last place of a row's largest value. Where the reference keeps the contract's order
# of sums the difference is 0; where a device does not (a fused multiply-add, another cos), each of the about ten roundings
# between two quantisers may differ by one such unit or less.
FEW_ULPS = 16.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Deviation:
    """A layer row on which the two differ by more than a few ulp, and what explains it ("" if nothing does)."""

    layer: int
    position: int
    ulps: float
    explanation: str


@dataclasses.dataclass
class PartByPart:
    """Sums over steps."""

    selections: int = 0
    selection_differences: list[str] = dataclasses.field(default_factory=list)
    """"layer 3, position 17…: ids, weights" where reference and native disagree on equal logits."""
    layer_rows: int = 0
    equal_rows: int = 0
    """Rows that are equal in every bit."""
    rows_within: int = 0
    worst_ulps: float = 0.0
    deviations: list[Deviation] = dataclasses.field(default_factory=list)
    attended_rows: int = 0
    """Rows in which an indexer chose."""
    attended_differences: list[str] = dataclasses.field(default_factory=list)


def compare_parts(native: NativeModel, reference: ReferenceModel, start: int, scope: Scope, result: PartByPart) -> None:
    """Hold the native engine's last traced step against the reference, part by part.

    Args:
        native: traced; its last step began at position `start`.
        reference: of the same container and precision; its own state is not touched.
    """
    trace, config = native.trace, reference.config
    chosen: npt.NDArray[np.bool_] | None = None
    for layer in range(config.n_layers):
        hidden_TD, expected_TD = trace["hidden"][layer], trace["hidden"][layer + 1]
        cache = LayerCache(native.kv_cache(layer)[:start], _rows(native.index_keys(layer), start))
        selection = None
        if config.sparse[layer]:
            index = config.moe_layers.index(layer)
            selection = native.selections[index]
            _compare_selection(native, reference, index, layer, start, scope, trace["router_logits"][index], result)
        if config.indexer is not None:
            attended = _attended_mask(trace["attended"][layer], start)
            if any(trace["attended"][layer]) and config.indexer.kinds[layer] == "full":
                chosen = reference.layer_step(layer, hidden_TD, cache, start, scope=scope, selection=selection).attended_TS
                _compare_attended(attended, chosen, layer, start, result)
        else:
            attended = None
        got_TD = reference.layer_step(layer, hidden_TD, cache, start, scope=scope, attended_TS=attended, selection=selection).hidden_TD
        _compare_rows(native, reference, layer, start, got_TD, expected_TD, attended, scope, result)


def _compare_selection(
    native: NativeModel,
    reference: ReferenceModel,
    index: int,
    layer: int,
    start: int,
    scope: Scope,
    logits_TE: Float32,
    result: PartByPart,
) -> None:
    router = reference.router(layer)
    assert router is not None
    defined = select_experts(logits_TE, router, native.routing.effective(index, scope, native.budget_scopes))
    result.selections += 1
    unequal = defined.differences(native.selections[index])
    if unequal:
        result.selection_differences.append(f"layer {layer}, step at position {start}: {', '.join(unequal)}")


def _compare_attended(
    native_TS: npt.NDArray[np.bool_], reference_TS: npt.NDArray[np.bool_] | None, layer: int, start: int, result: PartByPart
) -> None:
    assert reference_TS is not None
    visible = np.tril(np.ones_like(native_TS), k=start)
    result.attended_rows += native_TS.shape[0]
    for row in np.flatnonzero(((native_TS ^ reference_TS) & visible).any(axis=1)):
        result.attended_differences.append(f"layer {layer}, position {start + int(row)}")


def _compare_rows(
    native: NativeModel,
    reference: ReferenceModel,
    layer: int,
    start: int,
    got_TD: Float32,
    expected_TD: Float32,
    attended: npt.NDArray[np.bool_] | None,
    scope: Scope,
    result: PartByPart,
) -> None:
    unit_T = np.spacing(np.abs(expected_TD).max(axis=1))
    ulps_T = np.abs(got_TD - expected_TD).max(axis=1) / unit_T
    result.layer_rows += len(ulps_T)
    result.equal_rows += int((got_TD == expected_TD).all(axis=1).sum())
    result.rows_within += int((ulps_T <= FEW_ULPS).sum())
    result.worst_ulps = max(result.worst_ulps, float(ulps_T[ulps_T <= FEW_ULPS].max(initial=0.0)))
    for row in np.flatnonzero(~(ulps_T <= FEW_ULPS)):
        text = explain(native, reference, layer, start, int(row), attended, scope)
        result.deviations.append(Deviation(layer=layer, position=start + int(row), ulps=float(ulps_T[row]), explanation=text))


def explain(
    native: NativeModel, reference: ReferenceModel, layer: int, start: int, row: int, attended: npt.NDArray[np.bool_] | None, scope: Scope
) -> str:
    """Find the quantiser boundary that one row of a layer crossed.

    The reference computes the row alone, operation by operation, and its quantiser inputs are held against the native ones in
    order. The first pair that agrees within a few ulp but rounds to other int8 values is the explanation.

    Returns:
        Which element of which input, or "" where the inputs themselves differ, or nothing does.
    """
    trace, position = native.trace, start + row
    cache = LayerCache(native.kv_cache(layer)[:position], _rows(native.index_keys(layer), position))
    selection = None
    if reference.config.sparse[layer]:
        whole = native.selections[reference.config.moe_layers.index(layer)]
        ids = whole.ids[row : row + 1]
        kept = np.sort(ids[ids >= 0]).astype(np.int32)
        selection = dataclasses.replace(whole, ids=ids, weights=whole.weights[row : row + 1], kept=kept)
    with recorded_activations() as recorded:
        reference.layer_step(
            layer,
            trace["hidden"][layer][row : row + 1],
            cache,
            position,
            scope=scope,
            attended_TS=None if attended is None else attended[row : row + 1, : position + 1],
            selection=selection,
        )
    for name, theirs in _inputs_of_row(trace, layer, row):
        candidates = [x[0] for x in recorded if x.shape[1] == theirs.size]
        if not candidates:
            return ""
        ours = min(candidates, key=lambda x: float(np.abs(x - theirs).max()))
        unit = np.spacing(np.abs(theirs).max())
        if np.abs(ours - theirs).max() > FEW_ULPS * unit:
            return ""
        crossed = np.flatnonzero(_codes(ours) != _codes(theirs))
        if crossed.size:
            return f"{name}[{int(crossed[0])}]: {ours[crossed[0]]!r} and {theirs[crossed[0]]!r} round to different int8 values"
    return ""


def _inputs_of_row(trace: dict[str, Any], layer: int, row: int) -> list[tuple[str, Float32]]:
    found = []
    for at, name, rows, values in trace["inputs"]:
        if at == layer:
            found += [(name, values[i]) for i in np.flatnonzero(rows == row)]
    return found


def _codes(x: Float32, group: int = 64) -> npt.NDArray[np.float32]:
    padded = np.pad(x, (0, -x.size % group)).reshape(-1, group)
    scale = np.abs(padded).max(axis=1, keepdims=True) / np.float32(127)
    return np.rint(padded / np.where(scale == 0, np.float32(1), scale)).reshape(-1)[: x.size]


def _attended_mask(lists: list[list[int]], start: int) -> npt.NDArray[np.bool_]:
    mask = np.tril(np.ones((len(lists), start + len(lists)), bool), k=start)
    for row, positions in enumerate(lists):
        if positions:
            mask[row] = False
            mask[row, positions] = True
    return mask


def _rows(keys: Float32 | None, n: int) -> Float32 | None:
    return None if keys is None else keys[:n]
