"""Routing of one step through one layer: scores, choice, groups, top-k, TOPK, TOPP, weights, and the budget's cut.

`select_core` is the definition, a pure function of arrays that other jitted code may call. `select_experts` wraps it
for NumPy, and `select_many` for thousands of cases; both pad shapes, so that few programs are compiled.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from colibri_jax.errors import NonFiniteLogitError, OptionError
from colibri_jax.reference import budget, exact
from colibri_jax.reference.controls import Controls, controls_of, resident_mask
from colibri_jax.routing_spec import Policy, RouterSpec, RoutingOptions, RowVotes, Score, Selection, check_logits, check_row_votes

Step = (
    tuple[npt.ArrayLike, RouterSpec, RoutingOptions]
    | tuple[npt.ArrayLike, RouterSpec, RoutingOptions, npt.ArrayLike | None]
    | tuple[npt.ArrayLike, RouterSpec, RoutingOptions, npt.ArrayLike | None, RowVotes]
)
"""Arguments of `select_experts`."""


class CoreSelection(NamedTuple):
    """A Selection of fixed shape.

    Attributes:
        ids_SK: int32, packed left, -1 where empty.
        weights_SK: float32, 0 where empty.
        union_E, kept_E: bool, experts used by any position before and after the cut.
        dropped_slots, emptied_positions: int64 scalars.
        mass_before, mass_used: int64 scalars, sums of scores in units of 2^-32.
        nonfinite: int64 scalar, flat index into [S, E] of the first logit that is not finite, -1 if there is none.
    """

    ids_SK: jax.Array
    weights_SK: jax.Array
    union_E: jax.Array
    kept_E: jax.Array
    dropped_slots: jax.Array
    emptied_positions: jax.Array
    mass_before: jax.Array
    mass_used: jax.Array
    nonfinite: jax.Array


def select_experts(
    logits_SE: npt.ArrayLike,
    router: RouterSpec,
    options: RoutingOptions,
    resident: npt.ArrayLike | None = None,
    row_votes: RowVotes = None,
) -> Selection:
    """Experts and weights of one step through one layer.

    Args:
        logits_SE: float32 [S, E] router logits.
        router: the model's router.
        options: with a single budget.
        resident: experts in the cache, ids or bool [E]; read by `IRREPRODUCIBLE_POLICIES` alone, which need it.
        row_votes: int [S], what each position's votes are multiplied by where they are summed over positions, so that
            A[e] = Σ_s row_votes[s] · round(w[s,e] · 2^32). Full ones (2^16) throughout give what None gives. Nothing else
            depends on them: every position keeps its floor, and `per_position` never sums.

    Raises:
        NonFiniteLogitError: names the first position and expert.
        ShapeError, ConfigError: logits and router do not fit, or `resident` or `row_votes` do not fit them.
        OptionError: the budget is a list, or what is resident is not said, or row votes are out of range or too many.
    """
    return select_many([(logits_SE, router, options, resident, row_votes)], batch=1)[0]


def select_many(cases: Sequence[Step], *, batch: int = 64) -> list[Selection]:
    """`select_experts` of many independent steps, compiled once per padded shape and run `batch` at a time.

    All cases and answers are held at once; a caller with very many hands them over in portions of some thousands.

    Raises:
        As `select_experts`, before anything is computed.
    """
    queues: dict[tuple[Score, int, int, int, int, Policy], list[int]] = defaultdict(list)
    arrays = []
    for i, (values, router, options, *rest) in enumerate(cases):
        logits = check_logits(values, router)
        _raise_if_nonfinite(logits)
        controls = controls_of(router, options, logits.shape[1])
        resident, row_votes = (*rest, None, None)[:2]
        votes = check_row_votes(row_votes, logits.shape[0], router, options, logits.shape[1])
        arrays.append((logits, controls, resident_mask(options, resident, logits.shape[1]), votes))
        rows, experts = _bucket(logits.shape[0], 8, 8), _expert_bucket(logits.shape[1])
        slots = min(_expert_bucket(router.top_k), experts)
        # Groups divide E, so that only routers without groups can share a padded one before the groups are chosen.
        scored_experts = experts if router.n_group == 1 else logits.shape[1]
        queues[router.score, router.n_group, scored_experts, rows, slots, options.policy].append(i)

    answers: dict[int, Selection] = {}
    for (score, n_group, experts, rows, slots, policy), queue in queues.items():
        score_program, route_program = _score_program(score, n_group), _route_program(slots, policy)
        for start in range(0, len(queue), batch):
            members = queue[start : start + batch]
            filled = members + members[:1] * (batch - len(members))
            logits_BSE, bias_BE = np.zeros((batch, rows, experts), np.float32), np.zeros((batch, experts), np.float32)
            real_BS, resident_BE = np.zeros((batch, rows), bool), np.zeros((batch, _expert_bucket(experts)), bool)
            row_vote_BS = np.ones((batch, rows), np.int64)
            for b, i in enumerate(filled):
                (logits, _, resident_E, row_vote_S), bias = arrays[i], cases[i][1].bias
                logits_BSE[b, : logits.shape[0], : logits.shape[1]] = logits
                real_BS[b, : logits.shape[0]] = True
                resident_BE[b, : resident_E.size] = resident_E
                if row_vote_S is not None:
                    row_vote_BS[b, : row_vote_S.size] = row_vote_S
                if bias is not None:
                    bias_BE[b, : bias.size] = bias
            controls = Controls(*(np.stack(column) for column in zip(*(arrays[i][1] for i in filled), strict=True)))
            with jax.enable_x64(True):
                scored = score_program(logits_BSE, bias_BE, controls, real_BS)
                cores = jax.device_get(route_program(scored, controls, real_BS, resident_BE, row_vote_BS))
            for b, i in enumerate(members):
                core = CoreSelection(*(field[b] for field in cores))
                answers[i] = to_selection(core, positions=arrays[i][0].shape[0], top_k=cases[i][1].top_k)
    return [answers[i] for i in range(len(cases))]


def select_core(
    logits_SE: jax.Array,
    router: RouterSpec,
    options: RoutingOptions,
    *,
    bias_E: jax.Array | None = None,
    real_S: jax.Array | None = None,
    resident_E: jax.Array | None = None,
    row_vote_S: jax.Array | None = None,
) -> CoreSelection:
    """The definition, with router and options static. Call it under `jax.enable_x64(True)`, inside or outside jit.

    Args:
        logits_SE: float32 [S, E].
        router: as loaded; its shape rules are checked here.
        options: with a single budget.
        bias_E: float32 [E], used in place of `router.bias` where the bias is an array of the model.
        real_S: bool [S], False for rows that only pad the shape: they use nothing, vote for nothing, count nowhere.
        resident_E: bool [E], experts in the cache, which `IRREPRODUCIBLE_POLICIES` need.
        row_vote_S: int64 [S], see `select_experts`; taken as checked.

    Raises:
        OptionError: 64-bit arithmetic is off, the budget is a list, or what is resident is not said.
        ConfigError, ShapeError: the router does not fit E.
        A logit that is not finite is reported in `nonfinite`; the other fields then mean nothing.
    """
    router.check_experts(logits_SE.shape[1])
    controls = controls_of(router, options, logits_SE.shape[1])
    if bias_E is None:
        bias_E = jnp.zeros(logits_SE.shape[1], jnp.float32) if router.bias is None else jnp.asarray(router.bias)
    if real_S is None:
        real_S = jnp.ones(logits_SE.shape[0], bool)
    if resident_E is None:
        resident_E = jnp.asarray(resident_mask(options, None, logits_SE.shape[1]))
    scored = score_experts(logits_SE, bias_E, controls, real_S, score=router.score, n_group=router.n_group)
    if row_vote_S is None:
        row_vote_S = jnp.ones(logits_SE.shape[0], jnp.int64)
    return route(scored, controls, real_S, resident_E, row_vote_S, slots=router.top_k, policy=options.policy)


class Scored(NamedTuple):
    """One step's experts before any is chosen: float32 values as float64, and who may be chosen at all, each [S, E]."""

    score_SE: jax.Array
    choice_SE: jax.Array
    eligible_SE: jax.Array
    nonfinite: jax.Array


def score_experts(logits_SE: jax.Array, bias_E: jax.Array, controls: Controls, real_S: jax.Array, *, score: Score, n_group: int) -> Scored:
    """Scores, choices and the group limit. Arguments as in `select_core`; controls may be traced.

    Raises:
        OptionError: 64-bit arithmetic is off.
    """
    if not jax.config.jax_enable_x64:  # type: ignore[attr-defined]
        raise OptionError("routing is defined in 64-bit arithmetic", where="jax.enable_x64", expected=True, got=False)
    valid_E = jnp.arange(logits_SE.shape[1]) < jnp.asarray(controls.n_experts)
    valid_SE = real_S[:, None] & valid_E
    score_SE = exact.sigmoid(logits_SE) if score == "sigmoid" else exact.softmax(logits_SE, valid_E)
    choice_SE = exact.add_float32(score_SE, exact.widen(bias_E))
    eligible_SE = valid_SE & eligible_by_group(choice_SE, n_group, jnp.asarray(controls.topk_group))
    return Scored(score_SE, choice_SE, eligible_SE, first_nonfinite(logits_SE, valid_SE))


def route(
    scored: Scored, controls: Controls, real_S: jax.Array, resident_E: jax.Array, row_vote_S: jax.Array, *, slots: int, policy: Policy
) -> CoreSelection:
    """Everything after the scores. A *slot* is one of a position's places in router order, at least K of them."""
    score_SE, choice_SE, eligible_SE, nonfinite = scored
    experts_E = jnp.arange(score_SE.shape[1])
    key_SE = exact.sort_keys(choice_SE, experts_E, eligible_SE)
    key_SK = exact.descending(key_SE)[:, :slots]
    in_slot_SK = real_S[:, None] & (jnp.arange(slots) < jnp.asarray(controls.top_k))
    ids_SK = exact.key_index(key_SK)
    score_SK = jnp.take_along_axis(score_SE, ids_SK, axis=1)
    member_SE = eligible_SE & (key_SE >= jnp.take(key_SK, jnp.asarray(controls.top_k) - 1, axis=1)[:, None])

    bound_S1 = topp_bound(score_SK, ids_SK, in_slot_SK, jnp.asarray(controls.topp))[:, None]
    before_SK = in_slot_SK & (exact.sort_keys(score_SK, ids_SK, in_slot_SK) >= bound_S1)
    member_SE &= exact.sort_keys(score_SE, experts_E, member_SE) >= bound_S1

    sum_before_S = ordered_sum(score_SK, before_SK)
    weight_SE = jnp.where(member_SE, weight(score_SE, sum_before_S[:, None], controls), 0.0)
    vote_SE = budget.votes(jnp.asarray(controls.all_scores), weight_SE, jnp.where(real_S[:, None], score_SE, 0.0))
    ballot = budget.Ballot(
        member_SE,
        weight_SE,
        vote_SE,
        row_vote_S,
        budget=jnp.asarray(controls.budget),
        floor=jnp.asarray(controls.floor),
        coverage=jnp.asarray(controls.coverage),
        resident_E=resident_E,
    )
    allowed_SE = budget.POLICIES[policy](ballot)
    mass_before = jnp.where(before_SK, exact.to_units(score_SK), 0).sum()
    used_SE, after_SK = member_SE & allowed_SE, before_SK & jnp.take_along_axis(allowed_SE, ids_SK, axis=1)
    if policy in budget.SUBSTITUTING:
        ids_SK, after_SK, used_SE = budget.substitute(choice_SE, eligible_SE & allowed_SE, ids_SK, before_SK, after_SK, used_SE)
        score_SK = jnp.take_along_axis(score_SE, ids_SK, axis=1)
    if policy == "cache_route":
        top, within = jnp.asarray(controls.route_top), jnp.asarray(controls.route_within)
        ids_SK, after_SK, used_SE = budget.cache_route(choice_SE, eligible_SE, member_SE, resident_E, top, within, slots)
        score_SK = jnp.take_along_axis(score_SE, ids_SK, axis=1)

    # Step 5 again for everyone: a position that lost nothing has the same scores in the same order, and so the same weights.
    sum_after_S = budget.denominator(jnp.asarray(controls.frozen), sum_before_S, ordered_sum(score_SK, after_SK))
    weight_SK = jnp.where(after_SK, weight(score_SK, sum_after_S[:, None], controls), 0.0)
    from_SK, filled_SK = pack_left(after_SK)
    return CoreSelection(
        ids_SK=jnp.where(filled_SK, jnp.take_along_axis(ids_SK, from_SK, axis=1), -1),
        weights_SK=jnp.where(filled_SK, jnp.take_along_axis(weight_SK, from_SK, axis=1), 0.0).astype(jnp.float32),
        union_E=member_SE.any(axis=0),
        kept_E=used_SE.any(axis=0),
        dropped_slots=(member_SE & ~used_SE).sum(dtype=jnp.int64),
        emptied_positions=(real_S & ~after_SK.any(axis=1)).sum(dtype=jnp.int64),
        mass_before=mass_before,
        mass_used=jnp.where(after_SK, exact.to_units(score_SK), 0).sum(),
        nonfinite=nonfinite,
    )


def eligible_by_group(choice_SE: jax.Array, n_group: int, topk_group: jax.Array) -> jax.Array:
    """bool [S, E]: experts of the `topk_group` groups whose two largest choices have the largest float32 sum."""
    S, E = choice_SE.shape
    if n_group == 1:
        return jnp.ones((S, E), bool)
    top_two = jax.lax.sort(choice_SE.reshape(S, n_group, E // n_group))[..., -2:]
    group_SG = exact.add_float32(top_two[..., 0], top_two[..., 1])
    key_SG = exact.sort_keys(group_SG, jnp.arange(n_group), jnp.ones_like(group_SG, bool))
    last_kept_S1 = jnp.take(exact.descending(key_SG), topk_group - 1, axis=1)[:, None]
    return jnp.repeat(key_SG >= last_kept_S1, E // n_group, axis=1)


def topp_bound(score_SK: jax.Array, ids_SK: jax.Array, in_slot_SK: jax.Array, topp: jax.Array) -> jax.Array:
    """int64 [S]: the smallest key (score, id) that TOPP keeps; below every key where it is off (P = 1)."""
    key_SK = exact.descending(exact.sort_keys(score_SK, ids_SK, in_slot_SK))
    # The used slots come first in router order, and so do their keys.
    sums_SK = exact.running_sums(jnp.where(in_slot_SK, exact.key_value(key_SK), 0.0))
    short_SK = sums_SK < topp * sums_SK[:, -1:]
    last_kept_S = jnp.take_along_axis(key_SK, short_SK.sum(axis=1)[:, None], axis=1)[:, 0]
    return jnp.where(topp >= 1.0, np.iinfo(np.int64).min, last_kept_S)


def ordered_sum(score_SK: jax.Array, used_SK: jax.Array) -> jax.Array:
    """float64 [S]: sum of the used scores, one by one in router order. Adding 0 for the others changes no bit."""
    return exact.running_sums(jnp.where(used_SK, score_SK, 0.0))[:, -1]


def weight(score: jax.Array, total: jax.Array, controls: Controls) -> jax.Array:
    """Final weights of scores whose position's denominator is `total`."""
    scaled = score * jnp.asarray(controls.scale)
    return exact.round_to_float32(jnp.where(jnp.asarray(controls.normalise), exact.divide(scaled, total + 1e-20), scaled))


def pack_left(used_SK: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Where each slot of the packed answer comes from (int32 [S, K]), and which of its slots are filled (bool)."""
    K = used_SK.shape[1]
    slots_K = jnp.arange(K, dtype=jnp.int32)
    order_SK = jax.lax.sort(jnp.where(used_SK, slots_K, slots_K + K)) % K
    return order_SK, slots_K < used_SK.sum(axis=1, keepdims=True)


def first_nonfinite(logits_SE: jax.Array, valid_SE: jax.Array) -> jax.Array:
    """int64 flat index of the first valid logit that is not finite, -1 if there is none."""
    bad = (valid_SE & ~jnp.isfinite(logits_SE)).reshape(-1)
    return jnp.where(bad.any(), jnp.argmax(bad), -1).astype(jnp.int64)


def to_selection(core: CoreSelection, *, positions: int, top_k: int) -> Selection:
    """A Selection from a core answer on the host (NumPy arrays), cut to the real positions and K.

    Raises:
        NonFiniteLogitError: the core found a logit that is not finite.
    """
    if core.nonfinite >= 0:
        position, expert = divmod(int(core.nonfinite), core.union_E.shape[0])
        raise _nonfinite(position, expert, "NaN or infinity")
    union_size, kept = int(core.union_E.sum()), np.flatnonzero(core.kept_E).astype(np.int32)
    before, used = int(core.mass_before), int(core.mass_used)
    return Selection(
        ids=np.array(core.ids_SK[:positions, :top_k]),
        weights=np.array(core.weights_SK[:positions, :top_k]),
        kept=kept,
        union_size=union_size,
        dropped=int((core.union_E & ~core.kept_E).sum()),
        dropped_slots=int(core.dropped_slots),
        emptied_positions=int(core.emptied_positions),
        mass_kept=float(used) / float(before) if before else 1.0,
    )


def _raise_if_nonfinite(logits_SE: npt.NDArray[np.float32]) -> None:
    finite = np.isfinite(logits_SE)
    if not finite.all():
        position, expert = np.unravel_index(np.argmin(finite), finite.shape)
        raise _nonfinite(int(position), int(expert), logits_SE[position, expert])


def _nonfinite(position: int, expert: int, got: object) -> NonFiniteLogitError:
    return NonFiniteLogitError("router logit is not finite", where=f"position {position}, expert {expert}", expected="finite", got=got)


def _bucket(n: int, smallest: int, step: int) -> int:
    """The shape that n is padded to: the first of smallest · step^i that holds it."""
    size = smallest
    while size < n:
        size *= step
    return size


def _expert_bucket(n: int) -> int:
    return _bucket(n, 16, 4)


@functools.cache
def _score_program(score: Score, n_group: int) -> Any:
    """Batched `score_experts`, its answers padded to the experts that `_route_program` shares between routers."""

    def run(logits_SE: jax.Array, bias_E: jax.Array, controls: Controls, real_S: jax.Array) -> Scored:
        scored = score_experts(logits_SE, bias_E, controls, real_S, score=score, n_group=n_group)
        missing = _expert_bucket(logits_SE.shape[1]) - logits_SE.shape[1]
        pad = functools.partial(jnp.pad, pad_width=((0, 0), (0, missing)))
        return Scored(pad(scored.score_SE), pad(scored.choice_SE), pad(scored.eligible_SE), scored.nonfinite)

    return jax.jit(jax.vmap(run))


@functools.cache
def _route_program(slots: int, policy: Policy) -> Any:
    return jax.jit(jax.vmap(functools.partial(route, slots=slots, policy=policy)))
