"""Comparisons (i) and (ii): each part on equal inputs, so that no difference can hide behind an earlier one."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection

import numpy as np
import numpy.typing as npt

from colibri_jax.compare.step import Float32, Mask, NativeStep, Walk, finish, follow_layer
from colibri_jax.reference.layer import LayerResult
from colibri_jax.reference.model import ReferenceModel
from colibri_jax.reference.quantized import RecordedActivations, activation_codes, recorded_activations
from colibri_jax.reference.routing import select_experts

Pairs = list[tuple[Float32, Float32]]
"""Reference and native arrays that belong together, a row of a part in each row."""

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
    finish(walk_parts(step, reference, result))


def walk_parts(step: NativeStep, reference: ReferenceModel, result: PartByPart, layers: Collection[int] | None = None) -> Walk:
    """The same as a walk; of some layers only, without embedding and head, if `layers` says so.

    Where a layer shares another's choice of positions, `layers` holds that one too.
    """
    trace, config = step.trace, reference.config
    if layers is None:
        _count("embedding", step, [(reference.embed(step.tokens), trace["hidden"][0])], None, result)
    chosen_TS: Mask | None = None
    for layer in range(config.n_layers):
        yield
        if layers is not None and layer not in layers:
            continue
        got, chosen_TS = follow_layer(step, reference, layer, trace["hidden"][layer], step.cache(layer, step.start), chosen_TS)
        if config.sparse[layer]:
            _compare_selection(step, reference, layer, result)
        if chosen_TS is not None:
            _compare_attended(step, layer, chosen_TS, result)
        pairs = _layer_pairs(step, layer, got, slice(0, len(step.tokens)))
        _count(f"layer {layer}", step, pairs, functools.partial(examine_row, step, reference, layer), result)
    yield
    if layers is None:
        logits_TW = reference.score(reference.normed(trace["hidden"][-1]))
        _count("head", step, [(logits_TW, step.logits_TW)], None, result)
    yield


def _compare_selection(step: NativeStep, reference: ReferenceModel, layer: int, result: PartByPart) -> None:
    router, native, index = reference.router(layer), step.selection(layer), reference.config.moe_layers.index(layer)
    assert router is not None
    assert native is not None
    defined = select_experts(step.trace["router_logits"][index], router, step.options(index))
    result.selections += 1
    result.selections_cut += defined.dropped > 0
    unequal = defined.differences(native)
    if unequal:
        result.selection_differences.append(f"layer {layer}, step at position {step.start}: {', '.join(unequal)}")


def _compare_attended(step: NativeStep, layer: int, chosen_TS: Mask, result: PartByPart) -> None:
    result.attended_rows += sum(bool(positions) for positions in step.trace["attended"][layer])
    for row in np.flatnonzero((step.attended(layer) != chosen_TS).any(axis=1)):
        result.attended_differences.append(f"layer {layer}, position {step.start + int(row)}")


def _layer_pairs(step: NativeStep, layer: int, got: LayerResult, rows: slice) -> Pairs:
    """What a layer made of some rows of a step, the reference's and the native: output, cache rows, router logits."""
    pairs = [(got.hidden_TD, step.trace["hidden"][layer + 1][rows])]
    new = slice(step.start + rows.start, step.start + rows.stop)
    for ours, theirs in zip(got.cache, step.cache(layer, step.stop), strict=True):
        if ours is not None and theirs is not None:
            pairs.append((np.asarray(ours)[new], np.asarray(theirs)[new]))
    if got.router_logits_TE is not None:
        logits_TE = step.trace["router_logits"][step.moe_index(layer)]
        pairs.append((got.router_logits_TE, logits_TE[rows]))
    return pairs


def _count(part: str, step: NativeStep, pairs: Pairs, examine: Callable[[int], tuple[float, str]] | None, result: PartByPart) -> None:
    """Count the rows of a part. `examine` has another look at a row that deviates."""
    ulps_T = _ulps(pairs)
    result.rows += len(ulps_T)
    result.equal_rows += int(np.all([(got == expected).all(axis=1) for got, expected in pairs], axis=0).sum())
    for row in range(len(ulps_T)):
        ulps, explanation = float(ulps_T[row]), ""
        # One that nothing explains settles the verdict; the search takes seconds a row.
        if not ulps <= FEW_ULPS and examine is not None and all(d.explanation for d in result.deviations):
            ulps, explanation = examine(row)
        if ulps <= FEW_ULPS:
            result.rows_within += 1
            result.worst_ulps = max(result.worst_ulps, ulps)
        else:
            result.deviations.append(Deviation(part=part, position=step.start + row, ulps=ulps, explanation=explanation))


def _ulps(pairs: Pairs) -> npt.NDArray[np.float64]:
    """float64 [T]: the largest difference of each row, in units in the last place of its largest value."""
    worst = [np.abs(got.astype(np.float64) - expected).max(axis=1) / np.spacing(np.abs(expected).max(axis=1)) for got, expected in pairs]
    return np.asarray(np.max(worst, axis=0))


def examine_row(step: NativeStep, reference: ReferenceModel, layer: int, row: int) -> tuple[float, str]:
    """Compute one row of a layer alone, and find the quantiser boundary that it crossed.

    Alone, because the rows of a step see each other through the cache: what an earlier row crossed would show in the later ones,
    whose inputs would no longer be equal. Here the earlier rows' cache is the native one.

    The reference goes operation by operation, and its quantiser inputs are held against the native ones in order. The first
    pair that agrees within a few ulp but rounds to other int8 values is the explanation.

    Returns:
        By how many ulp the row deviates now; and which element of which input crossed a boundary, or "" where the
        inputs themselves differ, or nothing crosses.
    """
    position, selection, only = step.start + row, step.selection(layer), slice(row, row + 1)
    attended_TS = None if reference.config.indexer is None else step.attended(layer)[only, : position + 1]
    if selection is not None:
        ids = selection.ids[only]
        selection = dataclasses.replace(selection, ids=ids, weights=selection.weights[only], kept=np.sort(ids[ids >= 0]))
    with recorded_activations() as recorded:
        got = reference.layer_step(
            layer,
            step.trace["hidden"][layer][only],
            step.cache(layer, position),
            position,
            scope=step.scope,
            attended_TS=attended_TS,
            selection=selection,
        )
    return float(_ulps(_layer_pairs(step, layer, got, only))[0]), _crossed(step, layer, row, recorded)


def _crossed(step: NativeStep, layer: int, row: int, recorded: RecordedActivations) -> str:
    for name, theirs_X in _inputs_of_row(step, layer, row):
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


def _inputs_of_row(step: NativeStep, layer: int, row: int) -> list[tuple[str, Float32]]:
    found = []
    for _, name, rows, values in step.inputs(layer):
        found += [(name, values[i]) for i in np.flatnonzero(rows == row)]
    return found
