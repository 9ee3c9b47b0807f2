"""A third reading of the routing rules, in NumPy: which hard cases a block of logits holds. Shares no code with either side.

It counts events for `selection_cases.py`, and states two numbers that every Selection states too, so that a wrong reading shows.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt

from colibri_jax.routing_spec import RouterSpec, RoutingOptions, Score

EVENTS = ("tie at the K boundary", "tie at the budget boundary", "TOPP equality", "group tie", "emptied position", "budget acting")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reading:
    """What the third reading found in a block: per event bool [B], and two counts that every Selection states too."""

    events: dict[str, npt.NDArray[np.bool_]]
    union_size: npt.NDArray[np.int64]
    emptied_positions: npt.NDArray[np.int64]


def _exp(x: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    t = np.rint(np.maximum(x, -100.0) * (1.4426950408889634 * 2.0**30)).astype(np.int64)
    fraction = t & (2**30 - 1)
    m = np.full_like(t, 15)
    for c in (219, 2838, 32755, 330788, 2863360, 20654775, 119194166, 515882496, 1488522236, 2147483648):
        m = c + ((m * fraction) >> 30)
    return np.ldexp(m.astype(np.float64), (t >> 30) - 31)


def _float32(x: npt.NDArray[np.float64]) -> npt.NDArray[np.float32]:
    rounded = x.astype(np.float32)
    return np.where(rounded < 2.0**-126, np.float32(0), rounded)


def _units(x: npt.NDArray[np.float32]) -> npt.NDArray[np.int64]:
    return np.rint(x.astype(np.float64) * 2.0**32).astype(np.int64)


def _scores(score: Score, logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    z = logits.astype(np.float64)
    if score == "sigmoid":
        e = _exp(-np.abs(z))
        return _float32(np.where(z >= 0, 1.0, e) / (1.0 + e))
    e = _exp(z - z.max(axis=-1, keepdims=True))
    total = np.rint(e * 2.0**50).astype(np.int64).sum(axis=-1, keepdims=True).astype(np.float64) * 2.0**-50
    return _float32(e / total)


def _descending(values: npt.NDArray[Any]) -> npt.NDArray[np.intp]:
    """Indices along the last axis by descending value, ties to the lowest index."""
    return np.argsort(-values, axis=-1, kind="stable")


def _tie_after(values: npt.NDArray[Any], count: int) -> npt.NDArray[np.bool_]:
    """Whether the last of the `count` largest values equals the first that is left out."""
    if count >= values.shape[-1]:
        return np.zeros(values.shape[:-1], bool)
    ranked = -np.sort(-values, axis=-1)
    return ranked[..., count - 1] == ranked[..., count]


def read_block(router: RouterSpec, options: RoutingOptions, logits: npt.NDArray[np.float32]) -> Reading:
    """Read float32 logits [B, S, E] and say which events decided something in each of the B cases.

    The K boundary is where the order is cut: after TOPK where that is lower. A tie there, among groups or at the budget
    counts where an equal rival was left out; TOPP equality where demanding more than the share would have kept more.
    """
    cases, positions, n_experts = logits.shape
    scores = _scores(router.score, logits)
    choice = scores if router.bias is None else scores + router.bias

    group_tie = np.zeros(cases, bool)
    eligible = n_experts
    if router.topk_group < router.n_group:
        size = n_experts // router.n_group
        largest = np.sort(choice.reshape(cases, positions, router.n_group, size), axis=-1)[..., -2:]
        group_scores = largest[..., 0] + largest[..., 1]
        group_tie = _tie_after(group_scores, router.topk_group).any(axis=-1)
        stays = np.zeros(group_scores.shape, bool)
        np.put_along_axis(stays, _descending(group_scores)[..., : router.topk_group], True, axis=-1)
        choice = np.where(np.repeat(stays, size, axis=-1), choice, np.float32(-np.inf))
        eligible = router.topk_group * size

    count = min(router.top_k, options.expert_topk or router.top_k)
    k_tie = _tie_after(choice, count).any(axis=-1) & (count < eligible)
    ids = _descending(choice)[..., :count]
    picked = np.take_along_axis(scores, ids, axis=-1)

    alive = np.ones(ids.shape, bool)
    topp_equality = np.zeros(cases, bool)
    if 0.0 < options.expert_topp < 1.0:
        order = np.lexsort((ids, -picked), axis=-1)
        running = np.cumsum(np.take_along_axis(picked, order, axis=-1), axis=-1, dtype=np.float64)
        enough = options.expert_topp * running[..., -1:]
        last = np.argmax(running >= enough, axis=-1)[..., None]
        equal = np.take_along_axis(running, last, axis=-1) == enough
        topp_equality = (equal & (enough > 0) & (last < count - 1)).any(axis=(-2, -1))
        np.put_along_axis(alive, order, np.arange(count) <= last, axis=-1)

    # Adding 0 in the place of what TOPP removed changes no sum.
    total = np.cumsum(np.where(alive, picked, np.float32(0)), axis=-1, dtype=np.float64)[..., -1:]
    weights = picked.astype(np.float64) * router.routed_scaling_factor
    weights = _float32(weights / (total + 1e-20) if router.norm_topk_prob else weights)
    given = np.zeros(logits.shape, np.int64)
    np.put_along_axis(given, ids, np.where(alive, _units(weights), 0), axis=-1)
    used = np.zeros(logits.shape, bool)
    np.put_along_axis(used, ids, alive, axis=-1)
    member = used.any(axis=1)
    union_size = member.sum(axis=-1)
    votes = (_units(scores) if options.vote == "all_scores" else given).sum(axis=1)
    votes = np.where(member, votes, -1)

    budget = options.scalar_budget
    acting = (union_size > budget) & (budget > 0)
    kept = np.ones(votes.shape, bool)
    budget_tie = np.zeros(cases, bool)
    if 0 < budget < n_experts:
        budget_tie = _tie_after(votes, budget) & acting
        kept[:] = False
        np.put_along_axis(kept, _descending(votes)[..., :budget], True, axis=-1)
    survives = alive & np.take_along_axis(np.repeat(kept[:, None], positions, axis=1), ids, axis=-1)
    emptied = np.where(acting, (~survives.any(axis=-1)).sum(axis=-1), 0)
    found = (k_tie, budget_tie, topp_equality, group_tie, emptied > 0, acting)
    return Reading(events=dict(zip(EVENTS, found, strict=True)), union_size=union_size, emptied_positions=emptied)
