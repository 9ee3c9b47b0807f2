"""Generated runs of a model: tokens cut into steps, what is asked of routing, and how the engine is set up."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from choosing import Chooser
from model_shapes import POSITIONS, Shape

from colibri_jax import _native
from colibri_jax.config import ModelConfig
from colibri_jax.routing_spec import SCOPES, Policy, RoutingOptions, Scope

REPRODUCIBLE: tuple[Policy, ...] = ("aggregate", "floor", "substitute", "coverage", "per_position")


@dataclasses.dataclass(frozen=True)
class Step:
    """One forward call, after dropping the last `rewind` positions."""

    scope: Scope
    tokens: tuple[int, ...]
    rewind: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """What one model is put through.

    Attributes:
        steps: at least one; they fit into POSITIONS.
        routing, scopes: as for `load`.
        setup, other_setup: two sets of the native engine's own options, which may change no bit.
        cuts: sizes of the steps that `history` is cut into, for the comparison of splits.
        replay: tokens that are fed and dropped again in between.
    """

    steps: tuple[Step, ...]
    routing: RoutingOptions
    scopes: tuple[Scope, ...]
    setup: dict[str, Any]
    other_setup: dict[str, Any]
    cuts: tuple[int, ...]
    replay: tuple[int, ...]

    @property
    def history(self) -> tuple[int, ...]:
        """The tokens in the cache after the last step."""
        return _left_after(self.steps)


def make_run(c: Chooser, shape: Shape, rows: tuple[int, ...] | None = None) -> Run:
    """A run on a shape.

    Args:
        rows: counts of rows that steps may have; by default those that the reference has compiled for the shape.
    """
    steps = _steps(c, shape, rows)
    cuts, left = [], len(_left_after(steps))
    while left:
        cuts.append(c.pick((1, c.integer(1, min(4, left)), c.integer(1, left))))
        left -= cuts[-1]
    return Run(
        steps=steps,
        routing=make_routing(c, shape.model),
        scopes=c.pick((SCOPES, SCOPES, ("decode",), ("prefill", "verify"), ("verify",))),
        setup=make_setup(c, shape.model),
        other_setup=make_setup(c, shape.model),
        cuts=tuple(cuts),
        replay=_tokens(c, shape, c.integer(1, 3)),
    )


def _steps(c: Chooser, shape: Shape, rows: tuple[int, ...] | None) -> tuple[Step, ...]:
    steps: list[Step] = []
    position = 0
    for number in range(c.integer(2, 5)):
        if rows is None:
            bucket = c.pick((shape.rows[-1], *shape.rows)) if number else shape.rows[-1]
            n = c.integer(bucket // 2 + 1, bucket)
        else:
            n = c.pick(rows)
        rewind = c.pick((0, 0, c.integer(0, min(position, 3)), c.integer(0, position)))
        rewind = max(rewind, position + n - POSITIONS)
        steps.append(Step(c.pick(SCOPES) if number else c.pick(("prefill", "prefill", "verify")), _tokens(c, shape, n), rewind))
        position += n - rewind
    return tuple(steps)


def _left_after(steps: Sequence[Step]) -> tuple[int, ...]:
    kept: list[int] = []
    for step in steps:
        kept = [*kept[: len(kept) - step.rewind], *step.tokens]
    return tuple(kept)


def _tokens(c: Chooser, shape: Shape, n: int) -> tuple[int, ...]:
    """n tokens of the whole vocabulary, or of few, so that positions are alike."""
    vocabulary = c.pick((shape.config["vocab_size"], shape.config["vocab_size"], 3, 1))
    # A multiplicative walk: two decisions instead of n, so that a shrinking search does not get lost in tokens.
    first, stride = c.integer(0, vocabulary - 1), c.integer(1, 96)
    return tuple((first + stride * i * (i + 3)) % vocabulary for i in range(n))


def make_routing(c: Chooser, model: ModelConfig) -> RoutingOptions:
    """Budgets off, small, around what a step uses, or one per layer; TOPK and TOPP mostly off."""
    experts, top_k, layers = model.moe.n_experts, model.moe.router.top_k, len(model.moe_layers)

    def budget() -> int:
        return c.pick((c.integer(1, experts), c.integer(1, min(experts, top_k + 2)), 1, experts, experts + 3))

    policy: Policy = c.pick(("aggregate", *REPRODUCIBLE))
    return RoutingOptions(
        expert_topk=c.pick((0, 0, 0, c.integer(1, top_k + 1))),
        expert_topp=c.pick((0.0, 0.0, 0.0, 0.5, c.integer(1, 999) / 1000.0)),
        budget=c.pick((0, budget(), budget(), budget(), tuple(c.pick((0, budget(), budget())) for _ in range(layers)))),
        policy=policy,
        denominator=c.pick(("survivors", "frozen")),
        vote=c.pick(("weights", "weights", "all_scores")),
        floor=c.pick((1, 1, 2, top_k + 1)),
        coverage=c.pick((1.0, 0.5, c.integer(1, 999) / 1000.0)) if policy == "coverage" else 1.0,
    )


def make_setup(c: Chooser, model: ModelConfig) -> dict[str, Any]:
    """Options of the native engine, which may change no bit."""
    experts = model.moe.n_experts
    return {
        "cache_experts": c.pick((1, c.integer(1, experts), experts)),
        "threads": c.pick((1, 2, 3)),
        "isa": c.pick(tuple(_native.kernels.available_isas())),
        "io": c.pick(("direct", "buffered")),
        "reader": c.pick(("pread",) if _native.uring_refusal() else ("pread", "uring")),
        "pipe": c.pick((True, True, False)),
        "pilot": c.pick((False, True)),
        "cache_policy": c.pick(("step_lfu", "lru")),
    }
