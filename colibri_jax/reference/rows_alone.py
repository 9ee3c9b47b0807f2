"""Rows of one step that are each routed as a step of their own: how exact speculation verifies drafts."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from colibri_jax.reference.routing import select_experts
from colibri_jax.routing_spec import RouterSpec, RoutingOptions, Rows, RowVotes, Selection, check_logits, check_rows_alone

Float32 = npt.NDArray[np.float32]


def selector(rows: Rows, options: RoutingOptions, row_votes: RowVotes = None) -> Callable[[Float32, RouterSpec], Selection]:
    """How a step routes its rows, as a function of logits and router; `options` with a single budget."""
    if rows == "alone":
        return lambda logits_SE, router: select_rows_alone(logits_SE, router, options)
    return lambda logits_SE, router: select_experts(logits_SE, router, options, row_votes=row_votes)


def select_rows_alone(logits_SE: npt.ArrayLike, router: RouterSpec, options: RoutingOptions) -> Selection:
    """Experts and weights of a step in which no row knows of the others; see `Selection` for the meaning of each field.

    Args:
        logits_SE: float32 [S, E] router logits.
        router: the model's router.
        options: of scope `decode`, with a single budget.

    Raises:
        OptionError: the policy looks at the cache.
        NonFiniteLogitError, ShapeError, ConfigError: as `reference.routing.select_experts`.
    """
    check_rows_alone(options)
    logits = check_logits(logits_SE, router)
    # Before any budget no row minds the others; this also names the first logit that is not finite.
    together = select_experts(logits, router, options.without_budget())
    if options == options.without_budget():
        return together
    members = together.kept
    rows = [select_experts(logits[position : position + 1], router, options) for position in range(logits.shape[0])]
    kept = np.unique(np.concatenate([row.kept for row in rows])).astype(np.int32)
    mass = 0.0
    for row in rows:  # `sum` of floats would compensate its errors in some Pythons
        mass += row.mass_kept
    return Selection(
        ids=np.concatenate([row.ids for row in rows]),
        weights=np.concatenate([row.weights for row in rows]),
        kept=kept,
        union_size=int(members.size),
        dropped=int(members.size - kept.size),
        dropped_slots=sum(row.dropped_slots for row in rows),
        emptied_positions=sum(row.emptied_positions for row in rows),
        mass_kept=mass / len(rows),
    )
