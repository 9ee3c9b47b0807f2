"""Router and options as numbers that may be traced, so that one compiled program serves all their values."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from colibri_jax.errors import OptionError, ShapeError
from colibri_jax.routing_spec import IRREPRODUCIBLE_POLICIES, RouterSpec, RoutingOptions


class Controls(NamedTuple):
    """Router and options of one step."""

    n_experts: npt.ArrayLike
    """Real experts; the ones after them only pad the shape (where there are no groups)."""
    top_k: npt.ArrayLike
    """Experts per position after TOPK."""
    topk_group: npt.ArrayLike
    topp: npt.ArrayLike
    normalise: npt.ArrayLike
    scale: npt.ArrayLike
    budget: npt.ArrayLike
    floor: npt.ArrayLike
    coverage: npt.ArrayLike
    frozen: npt.ArrayLike
    all_scores: npt.ArrayLike
    route_top: npt.ArrayLike
    route_within: npt.ArrayLike


def controls_of(router: RouterSpec, options: RoutingOptions, n_experts: int) -> Controls:
    """Router and options as NumPy numbers.

    Raises:
        OptionError: the budget is a list.
    """
    return Controls(
        n_experts=np.int32(n_experts),
        top_k=np.int32(min(options.expert_topk or router.top_k, router.top_k)),
        topk_group=np.int32(router.topk_group),
        # Decided here: a device that flushes subnormals would take the smallest P for 0, which is off.
        topp=np.float64(options.expert_topp or 1.0),
        normalise=np.bool_(router.norm_topk_prob),
        scale=np.float64(router.routed_scaling_factor),
        # A budget of all experts never acts; the cap keeps any Python integer representable.
        budget=np.int64(min(options.scalar_budget, n_experts)),
        floor=np.int32(min(options.floor, n_experts)),
        # No ΣA exceeds 2^63, so that shares below 2^-1000 all mean "more than nothing", and no product is subnormal.
        coverage=np.float64(max(options.coverage, 2.0**-1000)),
        frozen=np.bool_(options.denominator == "frozen"),
        all_scores=np.bool_(options.vote == "all_scores"),
        route_top=np.int32(min(options.route_top, n_experts)),
        route_within=np.int32(min(options.route_within, n_experts)),
    )


def resident_mask(options: RoutingOptions, resident: npt.ArrayLike | None, n_experts: int) -> npt.NDArray[np.bool_]:
    """bool [E] of residents given as ids or as bool [E]; all False for policies that do not look at the cache.

    Raises:
        OptionError: a policy that looks at the cache and nothing given. An empty cache is said with an empty list.
        ShapeError: neither integers in [0, E) nor bool [E].
    """
    mask = np.zeros(n_experts, bool)
    if options.policy not in IRREPRODUCIBLE_POLICIES:
        return mask
    if resident is None:
        raise OptionError("the policy looks at the cache", where="resident", expected="ids or bool [E]", got=None)
    given = np.asarray(resident)
    if given.dtype == bool and given.shape == mask.shape:
        return given
    if given.size and (given.ndim != 1 or given.dtype.kind not in "iu" or given.min() < 0 or given.max() >= n_experts):
        raise ShapeError("resident experts", where="resident", expected=f"ids below {n_experts}, or bool [{n_experts}]", got=str(resident))
    mask[given.astype(np.int64)] = True
    return mask
