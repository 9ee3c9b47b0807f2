"""What a user must be told about an expert budget: that it is experimental, and where it cannot act."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from colibri_jax.config import ModelConfig
from colibri_jax.routing_spec import SCOPES, RoutingOptions, Scope

# Policies whose quality has been measured on the model that ships. A policy outside is experimental everywhere.
POLICIES_WITH_QUALITY_ROW: frozenset[str] = frozenset(["aggregate", "floor", "substitute", "coverage", "per_position"])


def budget_values(routing: RoutingOptions) -> tuple[int, ...]:
    """The budget as a tuple: one value, or one per MoE layer."""
    return routing.budget if isinstance(routing.budget, tuple) else (routing.budget,)


def budget_is_on(routing: RoutingOptions) -> bool:
    """Whether any layer has a budget, or a share of its votes to keep, or experts are exchanged for cached ones."""
    return any(n > 0 for n in budget_values(routing)) or _keeps_a_share(routing) or prefers_cached(routing)


def prefers_cached(routing: RoutingOptions) -> bool:
    """Whether experts are exchanged for cached ones, which no budget bounds."""
    return routing.policy == "cache_route" and routing.route_within > 0


def _keeps_a_share(routing: RoutingOptions) -> bool:
    return routing.policy == "coverage" and routing.coverage < 1.0


class Verification(NamedTuple):
    """How drafts are verified: "exact" or "union", and the most rows of a step."""

    speculation: str
    rows: int


def budget_notes(
    config: ModelConfig,
    routing: RoutingOptions,
    scopes: Iterable[Scope],
    *,
    largest_prefill_step: int,
    verification: Verification | None = None,
    measured: bool = False,
) -> tuple[str, ...]:
    """Lines to print when a budget is used; none when it is off.

    Args:
        config: the model that it is used on.
        routing: options with the budget.
        scopes: scopes that it applies to.
        largest_prefill_step: positions of the longest prefill step, min(prefill chunk, prompt).
        verification: of drafts; None where nothing is drafted.
        measured: whether the quality of these very options on this model is known.
    """
    if not budget_is_on(routing):
        return ()
    lines = []
    if not measured and routing.policy not in POLICIES_WITH_QUALITY_ROW:
        lines.append(f"experimental: quality not measured (policy {routing.policy})")
    elif not measured:
        lines.append(f"policy {routing.policy}: quality measured on the model that ships alone; `colibri-jax quality` measures others")
    wanted = set(scopes)
    for scope in SCOPES:
        if scope in wanted:
            if scope == "verify" and verification is None:
                lines.append("no effect: nothing is drafted, so no step has scope verify")
                continue
            if scope == "verify" and verification is not None and verification.speculation == "exact":
                lines.append("no effect: exact speculation routes the rows of scope verify as scope decode does")
                continue
            rows = {"prefill": largest_prefill_step, "decode": 1, "verify": verification.rows if verification else 1}[scope]
            note = no_effect(config, routing, scope, rows=rows)
            if note is not None:
                lines.append(note)
    return tuple(lines)


def no_effect(config: ModelConfig, routing: RoutingOptions, scope: Scope, *, rows: int) -> str | None:
    """Why the budget cannot drop anything in a scope whose steps have at most `rows` positions; None when it can.

    A step of S positions uses at most min(S * K', E) distinct experts, K' being the experts a position keeps under TOPK.
    """
    if not config.moe_layers:
        return f"no effect: the model has no MoE layer (scope {scope})"
    top_k = config.moe.router.top_k
    name, per_position = "top-k", top_k
    if 0 < routing.expert_topk < top_k:
        name, per_position = "expert-topk", routing.expert_topk
    if _keeps_a_share(routing):
        return None
    if prefers_cached(routing):
        # What a position may exchange are its picks after the first J, for experts of its ranking's first M.
        kept = routing.expert_topk if name == "expert-topk" else top_k
        if routing.route_top >= kept:
            return f"no effect: route-top {routing.route_top} ≥ {name} {kept} in scope {scope}"
        if routing.route_within <= routing.route_top:
            return f"no effect: route-within {routing.route_within} ≤ route-top {routing.route_top} in scope {scope}"
        return None
    # Policy per_position looks at each position alone, however many share the step.
    reach = per_position if routing.policy == "per_position" else min(rows * per_position, config.moe.n_experts)
    budgets = [n for n in budget_values(routing) if n > 0]
    if not budgets or min(budgets) < reach:
        return None
    if reach == per_position:
        what = f"{name} {per_position}"
    elif reach == config.moe.n_experts:
        what = f"all {reach} experts"
    else:
        what = f"{reach} = {rows} positions × {name} {per_position}"
    return f"no effect: {min(budgets)} ≥ {what} in scope {scope}"
