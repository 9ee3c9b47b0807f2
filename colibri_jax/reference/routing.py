"""Routing of one step through one layer: scores, choice, groups, top-k, TOPK, TOPP, weights, and the budget's cut.

`select_core` is the definition, a pure function of arrays that other jitted code may call. `select_experts` wraps it
for NumPy, and `select_many` for thousands of cases; both pad shapes, so that few programs are compiled.
"""

from __future__ import annotations

import dataclasses
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
from colibri_jax.routing_spec import RouterSpec, RoutingOptions, Score, Selection, check_logits


@dataclasses.dataclass(frozen=True)
class Structure:
    """What a compiled program depends on, beside the shapes of its arrays.

    Attributes:
        score: sigmoid or softmax.
        n_group: groups that E is divided into.
        slots: width of the answer, at least K.
        policy: a key of `budget.POLICIES`.
    """

    score: Score
    n_group: int
    slots: int
    policy: str


class Controls(NamedTuple):
    """Router and options as numbers, which may be traced: a compiled program serves all their values."""

    bias_E: jax.Array | npt.NDArray[np.float32]
    n_experts: npt.ArrayLike
    """Real experts; the ones after them are padding (only where there are no groups)."""
    top_k: npt.ArrayLike
    """Experts per position after TOPK."""
    topk_group: npt.ArrayLike
    topp: npt.ArrayLike
    normalise: npt.ArrayLike
    scale: npt.ArrayLike
    budget: npt.ArrayLike
    frozen: npt.ArrayLike
    all_scores: npt.ArrayLike


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
    logits_SE: npt.ArrayLike, router: RouterSpec, options: RoutingOptions, resident: npt.ArrayLike | None = None
) -> Selection:
    """Experts and weights of one step through one layer.

    Args:
        logits_SE: float32 [S, E] router logits.
        router: the model's router.
        options: with a single budget.
        resident: experts in the cache; no policy known here looks at them.

    Raises:
        NonFiniteLogitError: names the first position and expert.
        ShapeError, ConfigError: logits and router do not fit.
        OptionError: the budget is a list.
    """
    return select_many([(logits_SE, router, options)], batch=1)[0]


def select_many(cases: Sequence[tuple[npt.ArrayLike, RouterSpec, RoutingOptions]], *, batch: int = 64) -> list[Selection]:
    """`select_experts` of many independent steps, compiled once per padded shape and run `batch` at a time.

    Raises:
        As `select_experts`, before anything is computed.
    """
    queues: dict[tuple[Structure, int, int], list[int]] = defaultdict(list)
    prepared = []
    for i, (values, router, options) in enumerate(cases):
        logits = check_logits(values, router)
        _raise_if_nonfinite(logits)
        structure, rows, experts = _padded(logits.shape, router, options)
        prepared.append((logits, controls_of(router, options, logits.shape[1], padded=experts)))
        queues[structure, rows, experts].append(i)

    answers: dict[int, Selection] = {}
    for (structure, rows, experts), queue in queues.items():
        for start in range(0, len(queue), batch):
            members = queue[start : start + batch]
            filled = members + members[:1] * (batch - len(members))
            logits_BSE = np.zeros((batch, rows, experts), np.float32)
            real_BS = np.zeros((batch, rows), bool)
            for b, i in enumerate(filled):
                s, e = prepared[i][0].shape
                logits_BSE[b, :s, :e] = prepared[i][0]
                real_BS[b, :s] = True
            stacked = Controls(*(np.stack(column) for column in zip(*(prepared[i][1] for i in filled), strict=True)))
            with jax.enable_x64(True):
                cores = jax.device_get(_compiled(structure)(logits_BSE, stacked, real_BS))
            for b, i in enumerate(members):
                core = CoreSelection(*(field[b] for field in cores))
                answers[i] = to_selection(core, positions=prepared[i][0].shape[0], top_k=cases[i][1].top_k)
    return [answers[i] for i in range(len(cases))]


def select_core(
    logits_SE: jax.Array,
    router: RouterSpec,
    options: RoutingOptions,
    *,
    bias_E: jax.Array | None = None,
    real_S: jax.Array | None = None,
) -> CoreSelection:
    """The definition, with router and options static. Call it under `jax.enable_x64(True)`, inside or outside jit.

    Args:
        logits_SE: float32 [S, E].
        router: as loaded; its shape rules are checked here.
        options: with a single budget.
        bias_E: float32 [E], used in place of `router.bias` where the bias is an array of the model.
        real_S: bool [S], False for rows that only pad the shape: they use nothing, vote for nothing, count nowhere.

    Raises:
        OptionError: 64-bit arithmetic is off, or the budget is a list.
        ConfigError, ShapeError: the router does not fit E.
        A logit that is not finite is reported in `nonfinite`; the other fields then mean nothing.
    """
    n_experts = logits_SE.shape[1]
    router.check_experts(n_experts)
    structure = Structure(score=router.score, n_group=router.n_group, slots=router.top_k, policy=options.policy)
    controls = controls_of(router, options, n_experts, padded=n_experts)
    if bias_E is not None:
        controls = controls._replace(bias_E=bias_E)
    return route(structure, logits_SE, controls, jnp.ones(logits_SE.shape[0], bool) if real_S is None else real_S)


def controls_of(router: RouterSpec, options: RoutingOptions, n_experts: int, *, padded: int) -> Controls:
    """Router and options as NumPy numbers, the bias padded to `padded` experts."""
    bias_E = np.zeros(padded, np.float32)
    if router.bias is not None:
        bias_E[:n_experts] = router.bias
    return Controls(
        bias_E=bias_E,
        n_experts=np.int32(n_experts),
        top_k=np.int32(min(options.expert_topk or router.top_k, router.top_k)),
        topk_group=np.int32(router.topk_group),
        topp=np.float64(options.expert_topp),
        normalise=np.bool_(router.norm_topk_prob),
        scale=np.float64(router.routed_scaling_factor),
        # A budget of all experts never acts; the cap keeps any Python integer representable.
        budget=np.int64(min(options.scalar_budget, n_experts)),
        frozen=np.bool_(options.denominator == "frozen"),
        all_scores=np.bool_(options.vote == "all_scores"),
    )


def route(structure: Structure, logits_SE: jax.Array, controls: Controls, real_S: jax.Array) -> CoreSelection:
    """`select_core` with numbers that may be traced. All scores, choices and weights are float32 values in float64."""
    if not jax.config.jax_enable_x64:
        raise OptionError("routing is defined in 64-bit arithmetic", where="jax.enable_x64", expected=True, got=False)
    S, E = logits_SE.shape
    experts_E = jnp.arange(E)
    valid_E = experts_E < jnp.asarray(controls.n_experts)
    valid_SE = real_S[:, None] & valid_E
    score_SE = exact.sigmoid(logits_SE) if structure.score == "sigmoid" else exact.softmax(logits_SE, valid_E)
    choice_SE = exact.add_float32(score_SE, exact.widen(jnp.asarray(controls.bias_E)))

    # Router order: the first top_k keys, descending. A slot is one of a position's K places in that order.
    eligible_SE = valid_SE & eligible_by_group(choice_SE, structure.n_group, jnp.asarray(controls.topk_group))
    key_SE = exact.sort_keys(choice_SE, experts_E, eligible_SE)
    key_SK = exact.descending(key_SE)[:, : structure.slots]
    in_slot_SK = real_S[:, None] & (jnp.arange(structure.slots) < jnp.asarray(controls.top_k))
    ids_SK = exact.key_index(key_SK)
    score_SK = jnp.take_along_axis(score_SE, ids_SK, axis=1)
    member_SE = eligible_SE & (key_SE >= jnp.take(key_SK, jnp.asarray(controls.top_k) - 1, axis=1)[:, None])

    bound_S = topp_bound(score_SK, ids_SK, in_slot_SK, jnp.asarray(controls.topp))[:, None]
    before_SK = in_slot_SK & (exact.sort_keys(score_SK, ids_SK, in_slot_SK) >= bound_S)
    member_SE &= exact.sort_keys(score_SE, experts_E, member_SE) >= bound_S

    sum_before_S = ordered_sum(score_SK, before_SK)
    weight_SE = jnp.where(member_SE, weight(score_SE, sum_before_S[:, None], controls), 0.0)
    vote_SE = budget.votes(jnp.asarray(controls.all_scores), weight_SE, jnp.where(real_S[:, None], score_SE, 0.0))
    ballot = budget.Ballot(member_SE, weight_SE, vote_SE, jnp.asarray(controls.budget))
    allowed_SE = budget.POLICIES[structure.policy](ballot)

    # Step 5 again for everyone: a position that lost nothing has the same sum, and so the same weights, as before.
    after_SK = before_SK & jnp.take_along_axis(allowed_SE, ids_SK, axis=1)
    sum_after_S = budget.denominator(jnp.asarray(controls.frozen), sum_before_S, ordered_sum(score_SK, after_SK))
    weight_SK = jnp.where(after_SK, weight(score_SK, sum_after_S[:, None], controls), 0.0)
    from_SK, filled_SK = pack_left(after_SK)
    units_SK = exact.to_units(score_SK)
    return CoreSelection(
        ids_SK=jnp.where(filled_SK, jnp.take_along_axis(ids_SK, from_SK, axis=1), -1),
        weights_SK=jnp.where(filled_SK, jnp.take_along_axis(weight_SK, from_SK, axis=1), 0.0).astype(jnp.float32),
        union_E=member_SE.any(axis=0),
        kept_E=(member_SE & allowed_SE).any(axis=0),
        dropped_slots=(before_SK & ~after_SK).sum(dtype=jnp.int64),
        emptied_positions=(real_S & ~after_SK.any(axis=1)).sum(dtype=jnp.int64),
        mass_before=jnp.where(before_SK, units_SK, 0).sum(),
        mass_used=jnp.where(after_SK, units_SK, 0).sum(),
        nonfinite=first_nonfinite(logits_SE, valid_SE),
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
    """int64 [S]: the smallest key (score, id) that TOPP keeps; below every key where it is off."""
    key_SK = exact.descending(exact.sort_keys(score_SK, ids_SK, in_slot_SK))
    # The used slots come first in router order, and so do their keys.
    sums_SK = exact.running_sums(jnp.where(in_slot_SK, exact.key_value(key_SK), 0.0))
    short_SK = sums_SK < topp * sums_SK[:, -1:]
    last_kept_S = jnp.take_along_axis(key_SK, short_SK.sum(axis=1)[:, None], axis=1)[:, 0]
    off = (topp <= 0.0) | (topp >= 1.0)
    return jnp.where(off, jnp.iinfo(jnp.int64).min, last_kept_S)


def ordered_sum(score_SK: jax.Array, used_SK: jax.Array) -> jax.Array:
    """float64 [S]: sum of the used scores, one by one in router order. Adding 0 for the others changes no bit."""
    return exact.running_sums(jnp.where(used_SK, score_SK, 0.0))[:, -1]


def weight(score: jax.Array, total: jax.Array, controls: Controls) -> jax.Array:
    """Final weights of scores whose position's denominator is `total`."""
    scaled = score * jnp.asarray(controls.scale)
    return exact.round_to_float32(jnp.where(jnp.asarray(controls.normalise), scaled / (total + 1e-20), scaled))


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
        dropped=union_size - kept.size,
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


def _padded(shape: tuple[int, ...], router: RouterSpec, options: RoutingOptions) -> tuple[Structure, int, int]:
    """Program and padded (S, E) of one case. Groups fix E, because they divide it."""
    experts = shape[1] if router.n_group > 1 else _bucket(shape[1], 16)
    slots = min(_bucket(router.top_k, 16), experts)
    return Structure(router.score, router.n_group, slots, options.policy), _bucket(shape[0], 1, 8), experts


def _bucket(n: int, *sizes: int) -> int:
    """The first of `sizes` that holds n, or else the last of them times the power of four that does."""
    for size in sizes:
        if n <= size:
            return size
    size = sizes[-1]
    while size < n:
        size *= 4
    return size


@functools.cache
def _compiled(structure: Structure) -> Any:
    return jax.jit(jax.vmap(functools.partial(route, structure)))
