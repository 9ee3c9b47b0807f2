"""A third reading of the routing rules, in NumPy: which hard cases a block of logits holds. Shares no code with either side.

It counts events for `selection_cases.py`, and states facts that every Selection states too, so that a wrong reading shows.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt

from colibri_jax.routing_spec import RouterSpec, RoutingOptions, Score

# With the share of the cases that each must be in; the later ones can only be in the cases of one policy or a few.
EVENTS = {
    "tie at the K boundary": 0.05,
    "tie at the budget boundary": 0.05,
    "TOPP equality": 0.05,
    "group tie": 0.05,
    "emptied position": 0.05,
    "budget acting": 0.05,
    "floor binding": 0.02,
    "coverage stopping at equality": 0.0025,
    "substitute newcomer": 0.01,
    "per_position acting": 0.02,
    "cache hit kept": 0.01,
    "row votes deciding": 0.01,
    "exchanged for a cached expert": 0.02,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reading:
    """What the third reading found in a block of B cases.

    Attributes:
        events: per event bool [B].
        kept: bool [B, E], experts that any position uses after the cut.
        union_size, dropped_slots, emptied_positions: int64 [B], as every Selection states them.
        running_votes: float64 [B, E + 1], votes of the first j members in the order in which a set grows; `per_position` has none.
    """

    events: dict[str, npt.NDArray[np.bool_]]
    kept: npt.NDArray[np.bool_]
    union_size: npt.NDArray[np.int64]
    dropped_slots: npt.NDArray[np.int64]
    emptied_positions: npt.NDArray[np.int64]
    running_votes: npt.NDArray[np.float64] | None


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


def _rank(values: npt.NDArray[Any], ids: npt.NDArray[np.intp] | None = None) -> npt.NDArray[np.intp]:
    """Each element's place, from 0, along the last axis by descending value, ties to the lowest id (or index)."""
    order = _descending(values) if ids is None else np.lexsort((ids, -values), axis=-1)
    places = np.empty_like(order)
    np.put_along_axis(places, order, np.broadcast_to(np.arange(values.shape[-1]), order.shape), axis=-1)
    return places


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Picks:
    """Every position's picks before the budget: arrays [B, S, c] in router order, but for `choice` [B, S, E]."""

    ids: npt.NDArray[np.intp]
    alive: npt.NDArray[np.bool_]  # not taken away by TOPP
    weights: npt.NDArray[np.float32]
    scores: npt.NDArray[np.float32]
    choice: npt.NDArray[np.float32]  # of all experts; -inf outside the position's groups

    def by_expert(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Values of the picks [B, S, c] at their experts [B, S, E], 0 elsewhere."""
        spread = np.zeros(self.choice.shape, values.dtype)
        np.put_along_axis(spread, self.ids, values, axis=-1)
        return spread


def _cut_alone(picks: _Picks, options: RoutingOptions) -> tuple[npt.NDArray[np.bool_], dict[str, npt.NDArray[np.bool_]]]:
    """`per_position`: experts that each position uses afterwards, bool [B, S, E], and the events."""
    budget = options.scalar_budget
    votes = np.where(picks.alive, _units(picks.scores if options.vote == "all_scores" else picks.weights), -1)
    acting = (picks.alive.sum(axis=-1) > budget) & (budget > 0)
    first = (_rank(votes, picks.ids) < budget) & picks.alive
    stays = np.where(acting[..., None], first, picks.alive)
    tie = (_tie_after(votes, budget) & acting).any(axis=-1) if budget else np.zeros(len(votes), bool)
    return picks.by_expert(stays), {"tie at the budget boundary": tie, "per_position acting": acting.any(axis=-1)}


def _exchange(
    picks: _Picks, options: RoutingOptions, resident: npt.NDArray[np.bool_]
) -> tuple[npt.NDArray[np.bool_], dict[str, npt.NDArray[np.bool_]]]:
    """`cache_route`: experts that each position uses afterwards, bool [B, S, E], and the events."""
    used = picks.by_expert(picks.alive)
    column = np.broadcast_to(np.arange(used.shape[-1]), used.shape)
    place = np.argsort(np.lexsort((column, -picks.choice, ~used), axis=-1), axis=-1)
    preferred = resident & (place < options.route_within) & np.isfinite(picks.choice)
    # Lower goes first; what the groups exclude stands last in any ranking.
    turn = place + place.shape[-1] * np.where(place < options.route_top, 0, np.where(preferred, 1, 2))
    after = np.argsort(np.argsort(turn, axis=-1), axis=-1) < used.sum(axis=-1, keepdims=True)
    return after, {"exchanged for a cached expert": (after & ~used).any(axis=(-2, -1))}


def _cut_union(
    picks: _Picks, options: RoutingOptions, votes: npt.NDArray[np.int64], resident: npt.NDArray[np.bool_]
) -> tuple[npt.NDArray[np.bool_], dict[str, npt.NDArray[np.bool_]], npt.NDArray[np.float64]]:
    """Every other policy: experts that each position uses afterwards, bool [B, S, E], events, running votes. `votes`: int64 [B, E]."""
    used = picks.by_expert(picks.alive)
    member = used.any(axis=1)
    union_size = member.sum(axis=-1)
    budget = options.scalar_budget
    acting = (union_size > budget) & (budget > 0)
    if options.policy == "coverage":
        acting |= options.coverage < 1.0

    secured = np.zeros(member.shape, bool)
    if options.policy in ("floor", "substitute", "coverage"):
        heaviest = _rank(np.where(picks.alive, picks.weights, np.float32(-1)), picks.ids) < options.floor
        secured = picks.by_expert(heaviest & picks.alive).any(axis=1)
    elif options.policy == "resident":
        secured = resident & member

    # Members stand in the order in which a set grows: the secured ones, the others by votes, then those who are no members.
    votes = np.where(member, votes, 0)
    column = np.broadcast_to(np.arange(votes.shape[-1]), votes.shape)
    order = np.lexsort((column, -votes, ~secured, ~member), axis=-1)
    ordered = np.take_along_axis(votes, order, axis=-1)
    n_secured = secured.sum(axis=-1)
    full = np.minimum(union_size, np.maximum(n_secured, budget if budget else union_size))
    size = full
    equality = np.zeros(len(size), bool)
    held = np.pad(np.cumsum(ordered, axis=-1), ((0, 0), (1, 0))).astype(np.float64)  # by the first j members
    if options.policy == "coverage":
        enough = options.coverage * held[:, -1:]
        places = np.arange(held.shape[-1])
        covered = (held >= enough) & (places >= n_secured[:, None])
        size = np.minimum(full, np.where(covered.any(axis=-1), covered.argmax(axis=-1), full))
        at = np.take_along_axis(held, size[:, None], axis=-1)
        equality = acting & ((at == enough) & (enough > 0))[:, 0] & (size > n_secured) & (size < full)
    size = np.where(acting, size, union_size)

    in_order = np.arange(votes.shape[-1]) < size[:, None]
    in_set = np.zeros(member.shape, bool)
    np.put_along_axis(in_set, order, in_order, axis=-1)
    last = np.take_along_axis(ordered, np.maximum(size - 1, 0)[:, None], axis=-1)[:, 0]
    after = np.take_along_axis(ordered, np.minimum(size, votes.shape[-1] - 1)[:, None], axis=-1)[:, 0]
    events = {
        "tie at the budget boundary": acting & (size > n_secured) & (size < union_size) & (last == after),
        "floor binding": acting & (options.policy != "resident") & (n_secured > budget) & (budget > 0),
        "coverage stopping at equality": equality,
        "cache hit kept": acting & (secured & (_rank(np.where(member, votes, -1)) >= budget)).any(axis=-1) & (options.policy == "resident"),
    }

    stays = used & in_set[:, None]
    if options.policy == "substitute":
        lost = (used & ~stays).any(axis=-1)
        allowed = in_set[:, None] & np.isfinite(picks.choice)
        best = _rank(np.where(allowed, picks.choice, np.float32(-np.inf))) < used.sum(axis=-1, keepdims=True)
        stays = np.where(lost[..., None], best & allowed, used)
        events["substitute newcomer"] = (stays & ~used).any(axis=(-2, -1))
    return stays, events, held


def read_block(
    router: RouterSpec,
    options: RoutingOptions,
    logits: npt.NDArray[np.float32],
    resident: npt.NDArray[np.integer] | None = None,
    row_votes: npt.NDArray[np.int64] | None = None,
) -> Reading:
    """Read float32 logits [B, S, E] and say which events decided something in each of the B cases; `resident` are ids, row votes [S].

    The K boundary is where the order is cut: after TOPK where that is lower. A tie there, among groups or at the budget
    counts where an equal rival was left out; TOPP equality where demanding more than the share would have kept more, and so
    coverage's. A floor binds where it holds more than the budget. The budget acts where it takes something away. Row votes decide where
    plain ones would have left a position other experts.
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
    picks = _Picks(ids=ids, alive=alive, weights=weights, scores=picked, choice=choice)
    used = picks.by_expert(alive)
    union_size = used.any(axis=1).sum(axis=-1)
    held = None
    in_cache = np.zeros(n_experts, bool)
    in_cache[[] if resident is None else resident] = True
    if options.policy == "per_position":
        after, events = _cut_alone(picks, options)
    elif options.policy == "cache_route":
        after, events = _exchange(picks, options, in_cache)
    else:
        votes = _units(scores) if options.vote == "all_scores" else picks.by_expert(np.where(alive, _units(weights), 0))
        after, events, held = _cut_union(picks, options, votes.sum(axis=1), in_cache)
        if row_votes is not None:
            plain = after
            after, events, held = _cut_union(picks, options, (votes * row_votes[:, None]).sum(axis=1), in_cache)
            events["row votes deciding"] = (after != plain).any(axis=(-2, -1))

    dropped_slots = (used & ~after).sum(axis=(-2, -1))
    emptied = (~after.any(axis=-1)).sum(axis=-1)
    found = {"tie at the K boundary": k_tie, "TOPP equality": topp_equality, "group tie": group_tie, **events}
    found |= {"emptied position": emptied > 0, "budget acting": dropped_slots > 0}
    return Reading(
        events=dict.fromkeys(EVENTS, np.zeros(cases, bool)) | found,
        kept=after.any(axis=1),
        union_size=union_size,
        dropped_slots=dropped_slots,
        emptied_positions=emptied,
        running_votes=held,
    )
