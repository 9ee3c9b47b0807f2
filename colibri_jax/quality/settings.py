"""Settings to be measured: the cross product of what was asked for, without what is the same by construction."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Sequence

from colibri_jax.config import ModelConfig
from colibri_jax.quality.steps import StepShape
from colibri_jax.routing_spec import IRREPRODUCIBLE_POLICIES, Denominator, Policy, RoutingOptions, Vote

BudgetOfRule = Callable[[RoutingOptions], int | tuple[int, ...]]
"""A budget that depends on the options beside it, which are given without one."""

# Policies that keep the top experts of every position whatever the others want.
FLOOR_POLICIES: tuple[Policy, ...] = ("floor", "substitute", "coverage")


@dataclasses.dataclass(frozen=True)
class Setting:
    """Routing options in steps of a shape.

    Attributes:
        shape: the steps.
        routing: options, without those that change nothing here.
        run_as: options that give the same in every bit, shared by all settings that are alike; what is run.
    """

    shape: StepShape
    routing: RoutingOptions
    run_as: RoutingOptions

    @property
    def name(self) -> str:
        """Short and stable: kind of steps, policy, budget, then whatever is not the default."""
        return f"{self.shape.kind} {describe(self.routing)}"

    @property
    def reproducible(self) -> bool:
        """Whether a second run gives the same."""
        return self.routing.policy not in IRREPRODUCIBLE_POLICIES


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choices:
    """What to combine; every field is a list of values of the option of that name."""

    budgets: Sequence[int | tuple[int, ...] | BudgetOfRule]
    policies: Sequence[Policy] = ("aggregate",)
    denominators: Sequence[Denominator] = ("survivors",)
    votes: Sequence[Vote] = ("weights",)
    floors: Sequence[int] = (1,)
    coverages: Sequence[float] = (1.0,)
    route_tops: Sequence[int] = (2,)
    route_withins: Sequence[int] = (12,)
    expert_topks: Sequence[int] = (0,)
    expert_topps: Sequence[float] = (0.0,)
    allow_irreproducible: bool = False

    def combined(self) -> Iterable[RoutingOptions]:
        """Every combination, budgets fastest; `cache_route` has none.

        Raises:
            OptionError: a value is outside its domain.
            FencedOptionError: a policy's result depends on the cache, and that was not allowed.
        """
        rules = (self.policies, self.denominators, self.votes, self.floors, self.coverages, self.route_tops, self.route_withins)
        others = (*rules, self.expert_topks, self.expert_topps)
        for policy, denominator, vote, floor, coverage, top, within, topk, topp, budget in itertools.product(*others, self.budgets):
            routing = RoutingOptions(
                expert_topk=topk,
                expert_topp=topp,
                policy=policy,
                denominator=denominator,
                vote=vote,
                floor=floor,
                coverage=coverage,
                route_top=top,
                route_within=within,
                allow_irreproducible=self.allow_irreproducible,
            )
            if policy != "cache_route":
                routing = dataclasses.replace(routing, budget=budget(routing) if callable(budget) else budget)
            yield routing


def describe(routing: RoutingOptions) -> str:
    """A setting's options, as part of its name."""
    budget = routing.budget
    parts = [routing.policy, ":".join(map(str, budget)) if isinstance(budget, tuple) else str(budget or "off")]
    if routing == dataclasses.replace(routing.without_budget(), policy="aggregate"):
        parts = ["off"]
    if routing.policy == "cache_route":
        parts = [routing.policy, f"top={routing.route_top}", f"within={routing.route_within}"]
    parts += [routing.denominator] if routing.denominator != "survivors" else []
    parts += [routing.vote] if routing.vote != "weights" else []
    parts += [f"floor={routing.floor}"] if routing.floor != 1 else []
    parts += [f"coverage={routing.coverage:g}"] if routing.coverage != 1.0 else []
    parts += [f"topk={routing.expert_topk}"] if routing.expert_topk else []
    parts += [f"topp={routing.expert_topp:g}"] if routing.expert_topp else []
    return " ".join(parts)


def make_settings(shape: StepShape, choices: Choices, config: ModelConfig) -> list[Setting]:
    """Settings in the order of the choices, each once.

    Raises:
        OptionError, FencedOptionError: as `Choices.combined`; a list of budgets has another length than the model has MoE layers.
    """
    found: dict[RoutingOptions, Setting] = {}
    for routing in choices.combined():
        routing.check_layers(len(config.moe_layers))
        plain = without_idle_options(routing, shape, config)
        found.setdefault(plain, Setting(shape, plain, _run_as(plain, shape, config)))
    return list(found.values())


def without_idle_options(routing: RoutingOptions, shape: StepShape, config: ModelConfig) -> RoutingOptions:
    """The same options with defaults in the place of what changes no bit for this model in these steps."""
    router, experts = config.moe.router, config.moe.n_experts
    routing = dataclasses.replace(
        routing,
        expert_topk=routing.expert_topk if routing.expert_topk < router.top_k else 0,
        expert_topp=routing.expert_topp if routing.expert_topp < 1.0 else 0.0,
    )
    per_position = routing.expert_topk or router.top_k
    # The largest union that there can be; a budget of as many has nothing to take.
    union = min(experts, per_position * (1 if routing.policy == "per_position" else shape.largest_step))
    budgets = routing.budget if isinstance(routing.budget, tuple) else (routing.budget,) * len(config.moe_layers)
    budgets = tuple(0 if n >= union else n for n in budgets)
    covers = routing.policy == "coverage" and routing.coverage < 1.0
    exchanges = routing.policy == "cache_route" and routing.route_top < min(per_position, routing.route_within)
    if not any(budgets) and not covers and not exchanges:
        return RoutingOptions(
            expert_topk=routing.expert_topk, expert_topp=routing.expert_topp, allow_irreproducible=routing.allow_irreproducible
        )
    return dataclasses.replace(
        routing,
        budget=budgets[0] if len(set(budgets)) == 1 else budgets,
        denominator=routing.denominator if router.norm_topk_prob else "survivors",
        floor=routing.floor if routing.policy in FLOOR_POLICIES else 1,
        coverage=routing.coverage if covers else 1.0,
        route_top=routing.route_top if exchanges else RoutingOptions.route_top,
        route_within=routing.route_within if exchanges else RoutingOptions.route_within,
        vote="weights" if exchanges else routing.vote,
    )


def _run_as(routing: RoutingOptions, shape: StepShape, config: ModelConfig) -> RoutingOptions:
    """In a step of one position the best by weight are what it keeps, whatever the policy calls them."""
    if shape.largest_step > 1:
        return routing
    if routing.policy == "per_position":
        return dataclasses.replace(routing, policy="aggregate")
    if routing.policy in ("floor", "substitute") and routing.vote == "weights":
        budgets = routing.budget if isinstance(routing.budget, tuple) else (routing.budget,)
        least = tuple(max(n, routing.floor) if n else 0 for n in budgets)
        alike = dataclasses.replace(routing, policy="aggregate", floor=1, budget=least if len(least) > 1 else least[0])
        return without_idle_options(alike, shape, config)
    return routing
