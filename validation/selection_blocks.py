"""Blocks of random cases for `selection_cases.py`: steps that share a router and options, many of them on the edges of the rules.

Blocks come in families that share every shape. A block is a function of (seed, number) alone: `make_block` gives it again.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any, cast

import numpy as np
import numpy.typing as npt
from selection_reading import read_block

from colibri_jax.routing_spec import FULL_VOTE, POLICIES, Denominator, Policy, RouterSpec, RoutingOptions, Score, Vote, most_voting_rows

CASES_PER_BLOCK = 25
BLOCKS_PER_FAMILY = 4

Case = tuple[npt.NDArray[np.float32], RouterSpec, RoutingOptions, npt.NDArray[np.int32], npt.NDArray[np.int64] | None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Block:
    """Cases that share router, options, cache and row votes. `logits` is float32 [B, S, E]; `coarse`: they lie on a coarse grid."""

    number: int
    router: RouterSpec
    options: RoutingOptions
    logits: npt.NDArray[np.float32]
    resident: npt.NDArray[np.int32]
    row_votes: npt.NDArray[np.int64] | None
    coarse: bool

    @property
    def cases(self) -> list[Case]:
        """Arguments of `select_experts`, one tuple a case."""
        return [(logits, self.router, self.options, self.resident, self.row_votes) for logits in self.logits]


def _log_uniform(rng: np.random.Generator, low: int, high: int) -> int:
    return min(high, int(math.exp(rng.uniform(math.log(low), math.log(high + 1)))))


def _one_of(rng: np.random.Generator, *values: Any) -> Any:
    return values[int(rng.integers(len(values)))]


@dataclasses.dataclass(frozen=True)
class Program:
    """Ranges of S, E and K in which the reference pads to the same shapes, so that it compiles once. Other ranges would only be slower."""

    score: Score
    n_group: int
    positions: tuple[int, int]
    experts: tuple[int, int]
    top_k: tuple[int, int] = (1, 16)


PROGRAMS = (
    Program("sigmoid", 1, (1, 1), (1, 16)),
    Program("softmax", 1, (1, 1), (1, 16)),
    Program("sigmoid", 8, (2, 8), (64, 64)),
    Program("sigmoid", 1, (2, 8), (1, 16)),
    Program("softmax", 1, (2, 8), (1, 16)),
    Program("softmax", 4, (2, 8), (12, 12)),
    Program("sigmoid", 1, (9, 32), (17, 64)),
    Program("softmax", 1, (9, 32), (17, 64)),
    Program("sigmoid", 8, (1, 1), (256, 256)),
    Program("sigmoid", 1, (1, 1), (65, 256)),
    Program("softmax", 1, (1, 1), (65, 256)),
    Program("softmax", 16, (2, 8), (64, 64)),
    Program("sigmoid", 1, (2, 8), (65, 256)),
    Program("softmax", 1, (2, 8), (65, 256)),
    Program("sigmoid", 3, (9, 32), (33, 33)),
    Program("sigmoid", 1, (33, 64), (17, 64)),
    Program("softmax", 1, (33, 64), (65, 256)),
    Program("softmax", 4, (33, 64), (128, 128)),
    Program("sigmoid", 1, (2, 8), (17, 64), (17, 64)),
    Program("softmax", 1, (1, 1), (65, 256), (65, 256)),
    Program("softmax", 2, (1, 1), (6, 6)),
    Program("sigmoid", 1, (9, 32), (1, 16)),
    Program("softmax", 1, (9, 32), (1, 16)),
    Program("sigmoid", 2, (2, 8), (4, 4)),
)


def _family(seed: int, number: int) -> dict[str, Any]:
    """What all blocks of a family share. Programs take turns."""
    rng = np.random.default_rng([seed, number, 0])
    program = PROGRAMS[number % len(PROGRAMS)]
    n_experts = _one_of(rng, program.experts[1], *(_log_uniform(rng, *program.experts) for _ in range(8)))
    topk_group = 1
    if program.n_group > 1:
        topk_group = int(rng.integers(1, program.n_group + 1)) if rng.random() < 0.3 else max(1, program.n_group // 2)
    most = min(program.top_k[1], topk_group * n_experts // program.n_group)
    policy: Policy = _one_of(rng, *2 * ["aggregate"], *POLICIES)
    # Two picks leave the other policies little to differ in.
    least = min(program.top_k[0] if policy == "aggregate" or rng.random() < 0.2 else max(program.top_k[0], 3), most)
    top_k = _log_uniform(rng, least, max(least, min(most, _one_of(rng, 2, 8, most)) if program.top_k[0] == 1 else most))
    off = [0] * {"aggregate": 2, "coverage": 12}.get(policy, 6)
    return {
        "positions": _one_of(rng, program.positions[1], *(_log_uniform(rng, *program.positions) for _ in range(8))),
        "n_experts": n_experts,
        "score": program.score,
        "top_k": top_k,
        "n_group": program.n_group,
        "topk_group": topk_group,
        "norm_topk_prob": bool(rng.random() < 0.5),
        "has_bias": bool(rng.random() < 0.5),
        "expert_topk": _one_of(rng, *off, 1, int(rng.integers(1, top_k + 2))),
        "denominator": cast(Denominator, _one_of(rng, "survivors", "frozen")),
        "vote": cast(Vote, _one_of(rng, "weights", "weights", "all_scores")),
        "policy": policy,
        "floor": _one_of(rng, *(6 if policy == "coverage" else 3) * [1], 2, int(rng.integers(1, top_k + 2))),
    }


def _fine_logits(rng: np.random.Generator, shape: tuple[int, ...]) -> npt.NDArray[np.float64]:
    kind = int(rng.integers(4))
    if kind == 0:  # neighbours in float32, whose scores often round to one value
        return rng.normal() * (1.0 + rng.integers(-4, 5, shape) * 2.0**-23)
    if kind == 1:  # popular experts, as in a real layer
        return rng.normal(size=shape) + 2.0 * rng.normal(size=shape[-1])
    return rng.normal(size=shape) * _one_of(rng, 0.01, 1.0, 4.0, 40.0)


def _coarse_logits(rng: np.random.Generator, shape: tuple[int, ...]) -> npt.NDArray[np.float64]:
    kind = int(rng.integers(5))
    if kind == 0:  # multiples of 1/8
        return rng.integers(-16, 17, shape) / 8
    if kind == 1:  # the same over the whole range in which scores saturate and vanish
        return rng.integers(-880, 881, shape) / 8
    if kind == 2:  # duplicates of a few arbitrary values
        values = rng.normal(size=int(rng.integers(1, 5)))
        return values[rng.integers(0, values.size, shape)]
    if kind == 3:  # scores of exactly 0, 1/2 and 1
        return np.array([-110.0, 0.0, 110.0])[rng.integers(0, 3, shape)]
    return np.full(shape, rng.integers(-4, 5) / 8)  # all equal


def make_block(seed: int, number: int, cases: int = CASES_PER_BLOCK) -> Block:
    """Block `number` of the run with this seed: the same in every run."""
    family = _family(seed, number // BLOCKS_PER_FAMILY)
    rng = np.random.default_rng([seed, number, 1])
    positions, n_experts, top_k = family["positions"], family["n_experts"], family["top_k"]
    policy = family["policy"]
    coarse = bool(rng.random() < 0.6)
    shape = (cases, positions, n_experts)
    logits = (_coarse_logits if coarse else _fine_logits)(rng, shape).astype(np.float32)
    aimed = policy == "coverage" and rng.random() < 0.7
    if aimed:  # one step with its experts renamed: the share that is met exactly in one case is so in all, bias and groups aside
        logits = np.stack([logits[0][:, rng.permutation(n_experts)] for _ in range(cases)])
    bias = None
    if family["has_bias"]:
        # On a coarse grid the bias is coarse too, or no two choices would tie.
        bias = (rng.integers(-2, 3, n_experts) / 8 if coarse else rng.normal(size=n_experts) / 10).astype(np.float32)
    # `per_position` cuts every position to the budget, the others cut the union.
    picks = top_k if policy == "per_position" else min(n_experts, positions * top_k)
    # A whole number of K-ths is where equal scores meet the share exactly, or miss it by the rounding of the product.
    shares = [0.0, 1.0, 0.25, 0.5, 0.5, 0.75, float(rng.uniform(0.01, 0.99)), *4 * [rng.integers(top_k) / top_k]]
    shares += [0.0] * {"aggregate": 0, "cache_route": 4, "coverage": 20}.get(policy, 10)
    router = RouterSpec(
        score=family["score"],
        top_k=top_k,
        bias=bias,
        n_group=family["n_group"],
        topk_group=family["topk_group"],
        norm_topk_prob=family["norm_topk_prob"],
        routed_scaling_factor=_one_of(rng, 1.0, 1.0, 2.5, float(rng.uniform(0.1, 20)), 1023.0, 2.0**-33),
    )
    budget = _one_of(rng, 0, n_experts, *(16 * [0] if policy == "coverage" else []), *(_log_uniform(rng, 1, picks) for _ in range(8)))
    options = RoutingOptions(
        expert_topk=family["expert_topk"],
        expert_topp=_one_of(rng, *shares),
        budget=0 if policy == "cache_route" else budget,
        policy=policy,
        denominator=family["denominator"],
        vote=family["vote"],
        floor=family["floor"],
        coverage=_one_of(rng, 1.0, 0.5, float(rng.uniform(0.01, 0.99))),
        route_top=_one_of(rng, 0, 1, 2, int(rng.integers(top_k + 2))),
        route_within=_one_of(rng, 12, top_k + 1, top_k + int(rng.integers(1, 5)), int(rng.integers(n_experts + 2))),
        allow_irreproducible=True,
    )
    row_votes = _row_votes(rng, positions) if positions <= most_voting_rows(router, options, n_experts) else None
    if aimed:
        options = dataclasses.replace(options, coverage=_exact_share(rng, router, options, logits[:1], row_votes))
    resident = rng.permutation(n_experts)[: int(rng.integers(n_experts + 1))].astype(np.int32)
    return Block(number=number, router=router, options=options, logits=logits, resident=resident, row_votes=row_votes, coarse=coarse)


def _row_votes(rng: np.random.Generator, positions: int) -> npt.NDArray[np.int64] | None:
    kind = int(rng.integers(8))
    if kind == 0:
        return np.full(positions, FULL_VOTE)
    if kind == 1:  # as drafts survive, position by position
        return np.rint(FULL_VOTE * rng.uniform(0.2, 1.0) ** np.arange(positions)).astype(np.int64)
    if kind == 2:
        return rng.integers(0, FULL_VOTE + 1, positions)
    if kind == 3:  # rows without a vote, and ties between the others
        return np.array([0, 1, FULL_VOTE])[rng.integers(0, 3, positions)]
    return None


def _exact_share(
    rng: np.random.Generator,
    router: RouterSpec,
    options: RoutingOptions,
    logits: npt.NDArray[np.float32],
    row_votes: npt.NDArray[np.int64] | None,
) -> float:
    """A share of coverage that some number of members of the one case given holds exactly, if a float64 says so; below 1."""
    reading = read_block(router, options, logits, None, row_votes)
    assert reading.running_votes is not None
    held = reading.running_votes[0]
    below = held[(held > 0) & (held < held[-1])]
    if not below.size:
        return 0.5
    target = float(rng.choice(below[len(below) // 2 :]))  # not what the floor holds anyway
    share = target / float(held[-1])
    near = (share, math.nextafter(share, 0.0), math.nextafter(share, 1.0))
    return next((candidate for candidate in near if candidate * float(held[-1]) == target and candidate < 1.0), 0.5)


def make_blocks(cases: int, seed: int) -> Iterator[Block]:
    """Blocks of one run, `cases` cases in all."""
    for number in range(-(-cases // CASES_PER_BLOCK)):
        yield make_block(seed, number, min(CASES_PER_BLOCK, cases - number * CASES_PER_BLOCK))
