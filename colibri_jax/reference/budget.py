"""The expert budget: which experts each position may still use, by named policy. Pure functions of a ballot."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from colibri_jax.reference import exact
from colibri_jax.routing_spec import Policy


class Ballot(NamedTuple):
    """What a policy may look at: one step, one layer, before the cut.

    Attributes:
        member_SE: bool, the position uses the expert.
        weight_SE: final weights, float32 values as float64; 0 where not a member.
        vote_SE: int64, each position's votes in units of 2^-32; also for non-members where scores vote.
        row_vote_S: int64, what each position's votes weigh in the aggregate A: 1 for all, or units of 2^-16.
        budget: int64 scalar N; 0 or less is off.
        floor: int32 scalar m >= 1, experts of each position that policies with a floor set always keep.
        coverage: float64 scalar τ in [2^-1000, 1], the share of ΣA that `coverage` keeps.
        resident_E: bool, what the cache holds; only `resident` looks at it.
    """

    member_SE: jax.Array
    weight_SE: jax.Array
    vote_SE: jax.Array
    row_vote_S: jax.Array
    budget: jax.Array
    floor: jax.Array
    coverage: jax.Array
    resident_E: jax.Array


Rule = Callable[[Ballot], jax.Array]
"""Ballot -> bool [S, E], experts that each position may keep. All true where the budget does not act."""


def votes(all_scores: jax.Array, weight_SE: jax.Array, score_SE: jax.Array) -> jax.Array:
    """int64 [S, E]: final weights, or the scores of all experts where `all_scores` (bool scalar) holds."""
    return exact.to_units(jnp.where(all_scores, score_SE, weight_SE))


def aggregate_votes(ballot: Ballot) -> jax.Array:
    """int64 [E]: A, each expert's votes summed over the positions, exactly (`routing_spec.most_voting_rows`).

    With full votes throughout, A is that of plain votes times 2^16, and so is float64 of ΣA, which rounds as before.
    """
    return (ballot.row_vote_S[:, None] * ballot.vote_SE).sum(axis=0)


def denominator(frozen: jax.Array, before_S: jax.Array, after_S: jax.Array) -> jax.Array:
    """The sum that surviving scores are divided by: from before the cut where `frozen` holds, else the survivors'."""
    return jnp.where(frozen, before_S, after_S)


def election_order(vote_E: jax.Array, among_E: jax.Array) -> jax.Array:
    """int [E]: ids of `among_E` by votes (int64 >= 0) descending, ties to the lowest id; the others' ids after them."""
    return jnp.argsort(jnp.where(among_E, -vote_E, np.iinfo(np.int64).max), stable=True)


def largest(vote_E: jax.Array, among_E: jax.Array, n: jax.Array) -> jax.Array:
    """bool [E]: the n members of `among_E` with the largest votes (int64 >= 0), ties to the lowest id; all if fewer."""
    first_n = jnp.arange(vote_E.shape[0]) < n
    return jnp.zeros_like(among_E).at[election_order(vote_E, among_E)].set(first_n) & among_E


def floor_set(ballot: Ballot) -> jax.Array:
    """bool [E]: every position's m experts of largest float32 weight (all of them if it has fewer), ties to the lowest id."""
    E = ballot.member_SE.shape[1]
    key_SE = exact.sort_keys(ballot.weight_SE, jnp.arange(E), ballot.member_SE)
    last_kept_S1 = jnp.take(exact.descending(key_SE), jnp.minimum(ballot.floor, E) - 1, axis=1)[:, None]
    return (ballot.member_SE & (key_SE >= last_kept_S1)).any(axis=0)


def aggregate(ballot: Ballot) -> jax.Array:
    """The N experts with the largest aggregate over the step; every other expert leaves every position."""
    union_E = ballot.member_SE.any(axis=0)
    kept_E = largest(aggregate_votes(ballot), union_E, ballot.budget)
    return _where_acting(_over_budget(ballot), kept_E, ballot)


def floor(ballot: Ballot) -> jax.Array:
    """The floor set, then by A until N are kept; a floor set larger than N is kept whole."""
    return _where_acting(_over_budget(ballot), _filled_up(floor_set(ballot), ballot), ballot)


def coverage(ballot: Ballot) -> jax.Array:
    """The floor set, then by A until the kept hold τ of ΣA, tested before each addition, or are N (N = 0: no cap).

    τ < 1 acts on every step. τ = 1 acts where the other policies do.
    """
    E = ballot.member_SE.shape[1]
    union_E, first_E, vote_E = ballot.member_SE.any(axis=0), floor_set(ballot), aggregate_votes(ballot)
    rest_E = union_E & ~first_E
    order = election_order(vote_E, rest_E)
    ordered_votes = jnp.where(rest_E, vote_E, 0)[order]
    # What is held when each one's turn comes: it only grows, so those that pass both tests are the first ones.
    held = jnp.where(first_E, vote_E, 0).sum() + jnp.cumsum(ordered_votes) - ordered_votes
    short = held.astype(jnp.float64) < ballot.coverage * jnp.where(union_E, vote_E, 0).sum().astype(jnp.float64)
    room = (ballot.budget <= 0) | (first_E.sum() + jnp.arange(E) < ballot.budget)
    kept_E = first_E | (jnp.zeros_like(rest_E).at[order].set(short & room) & rest_E)
    return _where_acting((ballot.coverage < 1.0) | _over_budget(ballot), kept_E, ballot)


def per_position(ballot: Ballot) -> jax.Array:
    """`aggregate` on each position as a step of its own: its N largest votes, where it has more than N experts."""
    acts_S1 = (ballot.budget > 0) & (ballot.member_SE.sum(axis=1, keepdims=True) > ballot.budget)
    kept_SE = jax.vmap(largest, in_axes=(0, 0, None))(ballot.vote_SE, ballot.member_SE, ballot.budget)
    return kept_SE | ~acts_S1


def resident(ballot: Ballot) -> jax.Array:
    """Everything of the union that the cache holds, then by A until N are kept. Without a floor: it can empty a position."""
    hits_E = ballot.member_SE.any(axis=0) & ballot.resident_E
    return _where_acting(_over_budget(ballot), _filled_up(hits_E, ballot), ballot)


def substitute(
    choice_SE: jax.Array, inside_SE: jax.Array, ids_SK: jax.Array, before_SK: jax.Array, after_SK: jax.Array, used_SE: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """New picks for positions that lost an expert: by choice, ties to the lowest id, from what set and groups both allow.

    Args:
        choice_SE: float32 values as float64, score plus bias.
        inside_SE: bool, experts that set and groups allow.
        ids_SK, before_SK, after_SK: experts by slot, and which slots the position used and may still use.
        used_SE: bool, the same as `after_SK` by expert.

    Returns:
        ids_SK, after_SK and used_SE with the picks of those positions, as many as before or everything inside; router
        order is descending choice again.
    """
    slots = ids_SK.shape[1]
    key_SE = exact.sort_keys(choice_SE, jnp.arange(choice_SE.shape[1]), inside_SE)
    key_SK = exact.descending(key_SE)[:, :slots]
    n_S1 = jnp.minimum(before_SK.sum(axis=1, keepdims=True), inside_SE.sum(axis=1, keepdims=True))
    picked_SK = jnp.arange(slots) < n_S1
    picked_SE = inside_SE & (key_SE >= jnp.take_along_axis(key_SK, jnp.maximum(n_S1 - 1, 0), axis=1))
    lost_S1 = (before_SK & ~after_SK).any(axis=1, keepdims=True)
    return (
        jnp.where(lost_S1, exact.key_index(key_SK), ids_SK),
        jnp.where(lost_S1, picked_SK, after_SK),
        jnp.where(lost_S1, picked_SE, used_SE),
    )


def cache_route(
    choice_SE: jax.Array,
    eligible_SE: jax.Array,
    member_SE: jax.Array,
    resident_E: jax.Array,
    top: jax.Array,
    within: jax.Array,
    slots: int,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Picks that prefer what the cache holds, as many as every position had.

    A position's *ranking* is its picks after TOPK and TOPP in router order, then the other experts that its groups allow, by
    choice, ties to the lowest id; without TOPP that is the order of choice. Of n picks it keeps the first min(J, n) of the
    ranking; then come residents among the ranking's first M, in its order; then the others in its order; n in all. So M = 0, a
    cache of nothing and one of everything change nothing. Step 5 is done over the picks in descending order of choice, each
    with its own score; positions do not know of each other.

    Args:
        choice_SE: float32 values as float64, score plus bias.
        eligible_SE: bool, experts that the groups allow.
        member_SE: bool, the picks.
        resident_E: bool, what the cache holds.
        top, within: int scalars J and M.
        slots: places of a position, at least n.

    Returns:
        int32 ids by slot in descending order of choice, bool which slots are used, and bool [S, E] the same by expert.
    """
    S, E = choice_SE.shape
    places_E = jnp.arange(E)
    by_choice_SE = exact.key_index(exact.descending(exact.sort_keys(choice_SE, places_E, eligible_SE)))
    ranking_SE = _at(by_choice_SE, _places_by(jnp.where(_at(member_SE, by_choice_SE), 0, 1)))
    preferred_SE = resident_E[ranking_SE] & (places_E < within)
    turn_SE = jnp.where(places_E < top, 0, jnp.where(preferred_SE, 1, 2))
    ids_SE = _at(ranking_SE, _places_by(jnp.where(_at(eligible_SE, ranking_SE), turn_SE, 3)))
    taken_SE = places_E < member_SE.sum(axis=1, keepdims=True)
    picked_SE = jnp.zeros_like(member_SE).at[jnp.arange(S)[:, None], ids_SE].set(taken_SE)
    key_SK = exact.descending(exact.sort_keys(choice_SE, places_E, picked_SE))[:, :slots]
    return exact.key_index(key_SK), taken_SE[:, :slots], picked_SE


def _at(values_SE: jax.Array, ids_SE: jax.Array) -> jax.Array:
    return jnp.take_along_axis(values_SE, ids_SE, axis=1)


def _places_by(rank_SE: jax.Array) -> jax.Array:
    """int [S, E]: places 0 … E - 1 by ascending rank (small integers), equal ones in ascending order."""
    E = rank_SE.shape[1]
    places_SE: jax.Array = jax.lax.sort(rank_SE * E + jnp.arange(E)) % E
    return places_SE


def _untouched(ballot: Ballot) -> jax.Array:
    """For policies that take nothing from the union: every position may keep everything."""
    return jnp.ones_like(ballot.member_SE)


def _over_budget(ballot: Ballot) -> jax.Array:
    return (ballot.budget > 0) & (ballot.member_SE.any(axis=0).sum() > ballot.budget)


def _filled_up(first_E: jax.Array, ballot: Ballot) -> jax.Array:
    """bool [E]: these members of the union, then by A until N are kept."""
    rest_E = ballot.member_SE.any(axis=0) & ~first_E
    return first_E | largest(aggregate_votes(ballot), rest_E, ballot.budget - first_E.sum())


def _where_acting(acts: jax.Array, kept_E: jax.Array, ballot: Ballot) -> jax.Array:
    return jnp.broadcast_to(kept_E | ~acts, ballot.member_SE.shape)


POLICIES: dict[Policy, Rule] = {
    "aggregate": aggregate,
    "floor": floor,
    "substitute": floor,
    "coverage": coverage,
    "per_position": per_position,
    "resident": resident,
    "cache_route": _untouched,
}

# Where one of these takes an expert from a position, the position chooses anew inside the kept set.
SUBSTITUTING: tuple[Policy, ...] = ("substitute",)
