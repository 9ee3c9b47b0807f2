"""The native engine's routing and budget, seen from Python: checks arguments, calls the extension, names the results."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from colibri_jax._native import select_experts as _select_natively
from colibri_jax.errors import OptionError, ShapeError
from colibri_jax.routing_spec import (
    IRREPRODUCIBLE_POLICIES,
    RouterSpec,
    RoutingOptions,
    RowVotes,
    Selection,
    check_logits,
    check_row_votes,
    check_rows_alone,
)


def select_experts(
    logits_SE: npt.ArrayLike,
    router: RouterSpec,
    options: RoutingOptions,
    resident: npt.ArrayLike | None = None,
    row_votes: RowVotes = None,
) -> Selection:
    """The experts and gate weights of one layer in one step, computed natively. A pure function of its arguments.

    Args:
        logits_SE: float32 [S, E] router logits of the step's positions.
        router: the model's router.
        options: TOPK, TOPP and the budget of this layer (a scalar; see `RoutingOptions.for_layer`).
        resident: what the cache holds, ids [n] in any order or bool [E]. Only `IRREPRODUCIBLE_POLICIES` look at it, and need it;
            every other policy is a pure function of logits and options.
        row_votes: int [S], what each position's votes are multiplied by in the sum over positions, 0 to 2^16; None: all alike.

    Returns:
        The Selection, equal in every field to that of `colibri_jax.reference.select_experts`.

    Raises:
        ShapeError: logits, bias, resident ids or row votes of another dtype or shape, or such an id is no expert.
        ConfigError: the router does not fit E.
        OptionError: the budget is a list, or the policy needs to know what is resident and is not told, or row votes are out of
            range or of more rows than can be summed exactly.
        NonFiniteLogitError: a logit is NaN or infinite; names the first such position and expert.
    """
    return _select(logits_SE, router, options, resident, row_votes)


def select_rows_alone(logits_SE: npt.ArrayLike, router: RouterSpec, options: RoutingOptions) -> Selection:
    """The selection of a step whose rows are each routed as a step of one, computed natively; see `Selection` for its fields.

    Arguments and errors as in `select_experts`; moreover

    Raises:
        OptionError: the policy looks at the cache.
    """
    check_rows_alone(options)
    return _select(logits_SE, router, options, (), rows_alone=True)


def _select(
    logits_SE: npt.ArrayLike,
    router: RouterSpec,
    options: RoutingOptions,
    resident: npt.ArrayLike | None,
    row_votes: RowVotes = None,
    *,
    rows_alone: bool = False,
) -> Selection:
    logits = np.require(check_logits(logits_SE, router), requirements=("C", "A"))
    votes = check_row_votes(row_votes, logits.shape[0], router, options, logits.shape[1])
    fields = _select_natively(
        logits,
        score=router.score,
        top_k=router.top_k,
        bias=router.bias,
        n_group=router.n_group,
        topk_group=router.topk_group,
        norm_topk_prob=router.norm_topk_prob,
        routed_scaling_factor=router.routed_scaling_factor,
        **option_fields(options, router.top_k, logits.shape[1]),
        budget=min(options.scalar_budget, logits.shape[1]),
        rows_alone=rows_alone,
        row_votes=np.empty(0, np.int64) if votes is None else votes,
        resident=_resident_ids(resident if options.policy in IRREPRODUCIBLE_POLICIES else (), logits.shape[1]),
    )
    del fields["removed"]  # the engine's, for its estimate of avoided reads
    return Selection(**fields)


def option_fields(options: RoutingOptions, top_k: int, n_experts: int) -> dict[str, Any]:
    """Options as the extension takes them, without the budget, for a router of K of E experts."""
    return {
        # Larger counts mean the same as these bounds and would not fit a C++ integer.
        "expert_topk": min(options.expert_topk, top_k),
        "expert_topp": options.expert_topp,
        "policy": options.policy,
        "denominator": options.denominator,
        "vote": options.vote,
        "floor": min(options.floor, top_k),
        "coverage": options.coverage,
        "route_top": min(options.route_top, top_k),
        "route_within": min(options.route_within, n_experts),
    }


def _resident_ids(resident: npt.ArrayLike | None, n_experts: int) -> npt.NDArray[np.int32]:
    if resident is None:
        raise OptionError("the policy looks at the cache", where="resident", expected="ids or bool [E]", got=None)
    given = np.asarray(resident)
    if given.size == 0:
        return np.empty(0, np.int32)  # an empty list has no dtype to check
    if given.dtype == np.bool_ and given.shape == (n_experts,):
        return np.flatnonzero(given).astype(np.int32)
    if given.ndim != 1 or not np.issubdtype(given.dtype, np.integer) or given.min() < 0 or given.max() >= n_experts:
        raise ShapeError(
            "resident experts",
            where="resident",
            expected=f"ids below {n_experts}, or bool [{n_experts}]",
            got=f"{given.dtype} {given.tolist()}",
        )
    return given.astype(np.int32)
