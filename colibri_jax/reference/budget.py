"""The expert budget: which experts each position may still use, by named policy. Pure functions of votes and weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from colibri_jax.reference import exact


class Ballot(NamedTuple):
    """What a policy may look at: one step, one layer, before the cut.

    Attributes:
        member_SE: bool, the position uses the expert.
        weight_SE: final weights, float32 values as float64; 0 where not a member.
        vote_SE: int64, what each position adds to the expert's aggregate A, in units of 2^-32; also for non-members
            where scores vote.
        budget: int64 scalar N; 0 or less is off.
    """

    member_SE: jax.Array
    weight_SE: jax.Array
    vote_SE: jax.Array
    budget: jax.Array


Rule = Callable[[Ballot], jax.Array]
"""Ballot -> bool [S, E], experts that each position may keep. All true where the budget does not act."""


def votes(all_scores: jax.Array, weight_SE: jax.Array, score_SE: jax.Array) -> jax.Array:
    """int64 [S, E]: final weights, or the scores of all experts where `all_scores` (bool scalar) holds."""
    return exact.to_units(jnp.where(all_scores, score_SE, weight_SE))


def denominator(frozen: jax.Array, before_S: jax.Array, after_S: jax.Array) -> jax.Array:
    """The sum that surviving scores are divided by: from before the cut where `frozen` holds, else the survivors'."""
    return jnp.where(frozen, before_S, after_S)


def largest(vote_E: jax.Array, among_E: jax.Array, n: jax.Array) -> jax.Array:
    """bool [E]: the n members of `among_E` with the largest votes (int64 >= 0), ties to the lowest id; all if fewer."""
    lowest = np.iinfo(np.int64).max
    order = jnp.argsort(jnp.where(among_E, -vote_E, lowest), stable=True)
    first_n = jnp.arange(vote_E.shape[0]) < n
    return jnp.zeros_like(among_E).at[order].set(first_n) & among_E


def aggregate(ballot: Ballot) -> jax.Array:
    """The N experts with the largest aggregate over the step; every other expert leaves every position."""
    union_E = ballot.member_SE.any(axis=0)
    acts = (ballot.budget > 0) & (union_E.sum() > ballot.budget)
    kept_E = largest(ballot.vote_SE.sum(axis=0), union_E, ballot.budget)
    return jnp.broadcast_to(kept_E | ~acts, ballot.member_SE.shape)


POLICIES: dict[str, Rule] = {"aggregate": aggregate}
