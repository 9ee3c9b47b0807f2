"""What must hold of any selection, said in plain sums and sets; a third reading of the rules next to the two implementations."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from colibri_jax.native import select_experts
from colibri_jax.routing_spec import RouterSpec, RoutingOptions, Selection

Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]

# Policies whose kept mass cannot fall when the budget grows: what they keep is nested.
MONOTONE = ("aggregate", "floor", "per_position")
SMALLEST = 2.0**-126
WITH_FLOOR = ("floor", "substitute", "coverage")


def selection_faults(logits_SE: Float32, router: RouterSpec, options: RoutingOptions, found: Selection) -> Iterator[str]:
    """What is wrong with a selection of a step.

    Args:
        logits_SE, router, options: what it was made from.
        found: what is judged. The selection without a budget, from the engine's own routing, serves as the state before the cut.
    """
    before = select_experts(logits_SE, router, options.without_budget())
    yield from _count_faults(before, options, found)
    yield from _size_faults(before, options, found)
    yield from _weight_faults(scores(logits_SE, router), before, router, options, found)


def scores(logits_SE: Float32, router: RouterSpec) -> Float64:
    """The scores p, float64 [S, E] in plain floating point: right up to rounding; those below SMALLEST are 0."""
    z = logits_SE.astype(np.float64)
    if router.score == "sigmoid":
        p = 1.0 / (1.0 + np.exp(-z))
    else:
        e = np.exp(z - z.max(axis=1, keepdims=True))
        p = e / e.sum(axis=1, keepdims=True)
    return np.where(p < SMALLEST, 0.0, p)


def _rows(selection: Selection) -> list[set[int]]:
    return [{int(e) for e in row if e >= 0} for row in selection.ids]


def _count_faults(before: Selection, options: RoutingOptions, found: Selection) -> Iterator[str]:
    """The counters say what the ids say."""
    had, has = _rows(before), _rows(found)
    kept = sorted(set().union(*has))
    counted = {
        "kept": (kept, found.kept.tolist()),
        "union_size": (len(set().union(*had)), found.union_size),
        "dropped": (found.union_size - len(kept), found.dropped),
        "dropped_slots": (sum(len(a - b) for a, b in zip(had, has, strict=True)), found.dropped_slots),
        "emptied_positions": (sum(not row for row in has), found.emptied_positions),
    }
    yield from (f"{name} is {stated}, the ids say {true}" for name, (true, stated) in counted.items() if true != stated)
    for position, (row, ids) in enumerate(zip(has, found.ids, strict=True)):
        if len(row) != (ids >= 0).sum() or (ids[: len(row)] < 0).any():
            yield f"position {position}: ids {ids.tolist()} repeat or are not packed"
        if (found.weights[position][ids < 0] != 0).any():
            yield f"position {position}: an empty slot has a weight"
    if options.policy != "substitute" and any(not b <= a for a, b in zip(had, has, strict=True)):
        yield "a position has an expert that it did not choose"


def _size_faults(before: Selection, options: RoutingOptions, found: Selection) -> Iterator[str]:
    """How many experts each policy may keep."""
    budget, size = options.scalar_budget, found.kept.size
    acting = 0 < budget < before.union_size
    if options.policy == "per_position":
        counts = zip(_rows(before), _rows(found), strict=True)
        if any(len(has) != (min(len(had), budget) if budget else len(had)) for had, has in counts):
            yield f"a position does not keep the smaller of {budget} and what it had"
        return
    if options.policy == "coverage":
        acting = acting or options.coverage < 1.0
    if not acting:
        yield from (f"{field} changes although the budget does not act" for field in before.differences(found))
        return
    most = budget if budget else before.union_size
    if options.policy in WITH_FLOOR:
        floor = _floor_set(before, options.floor)
        most = max(most, len(floor))
        if options.policy != "substitute" and not floor <= set(found.kept.tolist()):
            yield f"experts of the floor are missing: {sorted(floor - set(found.kept.tolist()))}"
        if found.emptied_positions:
            yield "a policy with a floor emptied a position"
    exact = options.policy in ("aggregate", "floor")
    if size > most or (exact and size != most):
        yield f"{size} experts kept, {'exactly' if exact else 'at most'} {most} expected"


def _floor_set(before: Selection, least: int) -> set[int]:
    """Every position's experts of largest weight, ties to the lowest id."""
    members: set[int] = set()
    for ids, weights in zip(before.ids, before.weights, strict=True):
        ranked = sorted((-float(w), int(e)) for e, w in zip(ids, weights, strict=True) if e >= 0)
        members |= {e for _, e in ranked[:least]}
    return members


def _weight_faults(p_SE: Float64, before: Selection, router: RouterSpec, options: RoutingOptions, found: Selection) -> Iterator[str]:
    """Step 5: a position's weights sum to scale · Σ kept p over its denominator, or to scale · Σ kept p where nothing normalises."""
    scale = router.routed_scaling_factor
    for position, (had, has) in enumerate(zip(before.ids, found.ids, strict=True)):
        kept, total = p_SE[position][has[has >= 0]].sum(), float(found.weights[position].astype(np.float64).sum())
        denominator = 1.0
        if router.norm_topk_prob:
            lost = set(had.tolist()) != set(has.tolist())
            denominator = (p_SE[position][had[had >= 0]].sum() if lost and options.denominator == "frozen" else kept) + 1e-20
        expected = scale * kept / denominator
        # Scores and weights are rounded to float32; a score or a weight next to SMALLEST may be 0 or not.
        if not abs(total - expected) <= 1e-6 * expected + has.size * SMALLEST * (1.0 + 4.0 * scale / denominator):
            yield f"position {position}: weights sum to {total}, not to {expected}"


def order_faults(plain: Selection, moved: Selection, order: npt.NDArray[np.int64]) -> Iterator[str]:
    """Positions in another order (row i of `moved` was row order[i]) are selected for in that order, and nothing else changes."""
    expected = dataclasses.replace(plain, ids=np.ascontiguousarray(plain.ids[order]), weights=np.ascontiguousarray(plain.weights[order]))
    yield from (f"{field} depends on the order of positions" for field in expected.differences(moved))


def mass_faults(by_budget: Sequence[Selection]) -> Iterator[str]:
    """The kept mass of one step's selections, by ascending budget, does not fall."""
    masses = [selection.mass_kept for selection in by_budget]
    if masses != sorted(masses):
        yield f"mass kept falls although the budget grows: {masses}"
