"""Cases that a selection is tested on, one distribution drawn either by hypothesis or by a NumPy generator."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from choosing import Chooser, Random
from hypothesis import strategies as st
from oracles import selection as oracle

from colibri_jax.routing_spec import FULL_VOTE, IRREPRODUCIBLE_POLICIES, Policy, RouterSpec, RoutingOptions, most_voting_rows

T = TypeVar("T")

# (E, n_group) of grouped routers: few, because each compiles its own program.
GROUPED = ((12, 3), (16, 8), (64, 8), (256, 8))


@dataclasses.dataclass(frozen=True, eq=False)
class Case:
    """One step: float32 logits [S, E], router, options and, for a policy that looks at it, what the cache holds: bool [E]; int64 [S]
    row votes or none."""

    logits: npt.NDArray[np.float32]
    router: RouterSpec
    options: RoutingOptions
    resident: npt.NDArray[np.bool_] | None = None
    row_votes: npt.NDArray[np.int64] | None = None

    @property
    def args(
        self,
    ) -> tuple[npt.NDArray[np.float32], RouterSpec, RoutingOptions, npt.NDArray[np.bool_] | None, npt.NDArray[np.int64] | None]:
        return self.logits, self.router, self.options, self.resident, self.row_votes


class Drawn:
    """Decisions by hypothesis, which shrinks towards small integers and first options."""

    def __init__(self, draw: st.DrawFn) -> None:
        self._draw = draw

    def integer(self, low: int, high: int) -> int:
        return self._draw(st.integers(low, high))

    def pick(self, options: Sequence[T]) -> T:
        return self._draw(st.sampled_from(options))


AGGREGATE: tuple[Policy, ...] = ("aggregate",)


@st.composite
def selection_cases(draw: st.DrawFn, max_experts: int = 256, policies: tuple[Policy, ...] = AGGREGATE, max_positions: int = 64) -> Case:
    """S 1…max_positions, E 1…max_experts, every router and option field; about half of the cases on coarse grids."""
    return make_case(Drawn(draw), max_experts, policies, max_positions)


def random_case(
    rng: np.random.Generator, max_experts: int = 256, policies: tuple[Policy, ...] = AGGREGATE, max_positions: int = 64
) -> Case:
    """The same distribution, fast."""
    return make_case(Random(rng), max_experts, policies, max_positions)


def make_case(c: Chooser, max_experts: int, policies: tuple[Policy, ...], max_positions: int) -> Case:
    positions = c.pick((1, 2, c.integer(1, 8), c.integer(1, max_positions)))
    router = _router(c, max_experts)
    experts = 0 if router.bias is None else router.bias.shape[0]
    if not c.integer(0, 1):
        router = dataclasses.replace(router, bias=None)
    logits = _logits(c, positions, experts)
    options = RoutingOptions(
        expert_topk=c.pick((0, 0, c.integer(1, router.top_k + 2))),
        expert_topp=c.pick((0.0, 0.0, 1.0, 0.5, c.integer(1, 1023) / 1024.0, c.integer(1, 999) / 1000.0)),
        denominator=c.pick(("survivors", "frozen")),
        vote=c.pick(("weights", "all_scores")),
    )
    if not c.integer(0, 5):
        options = dataclasses.replace(options, expert_topp=_exact_share(c, Case(logits, router, options)))
    case = Case(logits, router, options)
    if policies != AGGREGATE:
        case = _with_policy(c, case, experts, c.pick(policies))
    case = dataclasses.replace(case, row_votes=_row_votes(c, case))
    case = dataclasses.replace(case, options=dataclasses.replace(case.options, budget=_budget(c, case)))
    if case.options.policy == "coverage" and not c.integer(0, 1):
        case = dataclasses.replace(case, options=dataclasses.replace(case.options, coverage=_exact_coverage(c, case)))
    return case


def _with_policy(c: Chooser, case: Case, experts: int, policy: Policy) -> Case:
    resident = None
    if policy in IRREPRODUCIBLE_POLICIES:
        share = c.pick((0.3, 0.0, 0.7, 1.0) if policy == "resident" else (0.5, 0.3, 0.7, 0.5, 1.0))
        resident = np.random.default_rng(c.integer(0, 2**32 - 1)).random(experts) < share
    floor, share = c.pick((1, 2, 3)), c.pick((1.0, 0.5, 0.75, c.integer(1, 1023) / 1024.0, c.integer(1, 999) / 1000.0, 5e-324))
    topp = case.options.expert_topp
    if policy == "substitute":
        # What TOPP removed can come back, and in the place of a survivor.
        topp = c.pick((topp, 0.5, 0.8))
    options = dataclasses.replace(
        case.options, policy=policy, floor=floor, coverage=share, expert_topp=topp, allow_irreproducible=policy in IRREPRODUCIBLE_POLICIES
    )
    if policy == "cache_route":
        most = case.router.top_k
        within = c.pick((most + 2, most + 1, c.integer(0, experts + 1), 10**12))
        options = dataclasses.replace(options, route_top=c.pick((0, 1, 0, c.integer(0, most + 1))), route_within=within)
    return dataclasses.replace(case, options=options, resident=resident)


def _row_votes(c: Chooser, case: Case) -> npt.NDArray[np.int64] | None:
    """None, or votes as far as the step's rows are few enough: full, falling as drafts survive, any, or some without a vote."""
    positions, experts = case.logits.shape
    kind = c.pick(("none", "none", "full", "falling", "any", "some"))
    if kind == "none" or positions > most_voting_rows(case.router, case.options, experts):
        return None
    rng = np.random.default_rng(c.integer(0, 2**32 - 1))
    values = {
        "full": lambda: np.full(positions, FULL_VOTE),
        "falling": lambda: np.rint(FULL_VOTE * rng.uniform(0.2, 1.0) ** np.arange(positions)),
        "any": lambda: rng.integers(0, FULL_VOTE + 1, positions),
        "some": lambda: rng.choice([0, 1, FULL_VOTE], positions),
    }
    return np.asarray(values[kind](), np.int64)


def _router(c: Chooser, max_experts: int) -> RouterSpec:
    experts, n_group, topk_group = c.integer(1, c.pick((4, 16, 64, max_experts))), 1, 1
    grouped = [pair for pair in GROUPED if pair[0] <= max_experts]
    if grouped and not c.integer(0, 3):
        experts, n_group = c.pick(grouped)
        topk_group = c.integer(1, n_group)
    eligible = topk_group * (experts // n_group)
    return RouterSpec(
        score=c.pick(("sigmoid", "softmax")),
        top_k=c.integer(1, c.pick((min(eligible, 8), eligible))),
        bias=_bias(c, experts),
        n_group=n_group,
        topk_group=topk_group,
        norm_topk_prob=c.pick((True, False)),
        routed_scaling_factor=c.pick((1.0, 2.5, 0.3, 1023.0, 1e-30, 2.0**-140)),
    )


def _bias(c: Chooser, experts: int) -> npt.NDArray[np.float32]:
    rng = np.random.default_rng(c.integer(0, 2**32 - 1))
    values = {
        "eighths": lambda: rng.integers(-8, 9, experts) / 8,
        "normal": lambda: rng.normal(0, 0.3, experts),
        # Cancels the score of a zero logit, so that choices are signed zeros and subnormals.
        "cancels": lambda: rng.choice([-0.5, -0.0, 0.0, 1e-45, -1e-40, 2e-38], experts),
        "huge": lambda: rng.choice([3e38, -3e38, 1.0], experts),
    }
    return np.asarray(values[c.pick(tuple(values))](), np.float32)


def _logits(c: Chooser, positions: int, experts: int) -> npt.NDArray[np.float32]:
    rng = np.random.default_rng(c.integer(0, 2**32 - 1))
    shape = (positions, experts)

    def few_rows() -> npt.NDArray[Any]:
        return (rng.integers(-24, 25, (2, experts)) / 8)[rng.integers(0, 2, positions)]

    values = {
        "eighths": lambda: rng.integers(-16, 17, shape) / 8,
        "two values": lambda: rng.choice([0.0, 1.0], shape),
        "signed zeros": lambda: rng.choice([-0.0, 0.0, 1e-40, -1e-45], shape),
        "few rows": few_rows,
        "normal": lambda: rng.normal(0, 1, shape),
        "wide": lambda: rng.normal(0, 6, shape),
        "to 110": lambda: rng.uniform(-110, 110, shape),
        "coarse to 110": lambda: rng.integers(-880, 881, shape) / 8,
        # Sigmoid and softmax around the smallest normal float32, exp(-87.34).
        "subnormal edge": lambda: rng.choice([-87.25, -87.375, -88.0, -87.33654475, -87.3365446, 0.0], shape),
    }
    return np.asarray(values[c.pick(tuple(values))](), np.float32)


def _exact_share(c: Chooser, case: Case) -> float:
    """A share P with P · c_last == c_j of one position, found from the oracle's running sums; 0.5 where there is none."""
    sums = oracle.select(*case.args).topp_sums
    row = sums[c.integer(0, len(sums) - 1)]
    return _share_of(row[c.integer(0, len(row) - 1)], row[-1])


def _exact_coverage(c: Chooser, case: Case) -> float:
    """A share τ with τ · float64(ΣA) == float64(held A) after the floor set or after one more; 0.5 where there is none."""
    held = oracle.select(*case.args).held_sums
    return _share_of(float(held[c.integer(0, len(held) - 1)]), float(held[-1]))


def _share_of(target: float, total: float) -> float:
    """A share of the total whose product with it is the target; the nearest one if none is; 0.5 outside (0, total)."""
    if not 0.0 < target < total:
        return 0.5
    share = target / total
    for candidate in (share, float(np.nextafter(share, 0.0)), float(np.nextafter(share, 1.0))):
        if candidate * total == target and 0.0 < candidate < 1.0:
            return candidate
    return share


def _budget(c: Chooser, case: Case) -> int:
    """Off, one, any, or around the size of the union; of the largest position under `per_position`."""
    policy = case.options.policy
    if policy == "cache_route":
        return 0
    kind = c.pick(("off", "one", "any", "around", "around") if policy == "aggregate" else ("off", "any", "around", "telling", "telling"))
    if kind == "off":
        return 0
    if kind == "one":
        return 1
    verdict = oracle.select(*case.args)
    size, least = verdict.selection.union_size, 1
    if policy == "per_position":
        size = int((verdict.selection.ids >= 0).sum(axis=1).max())
    elif policy in ("floor", "substitute", "coverage"):
        # One sum for the floor set and one for each further expert.
        least = size - (len(verdict.held_sums) - 1)
    if kind == "telling":
        return c.integer(min(least, size - 1), size - 1) if size > 1 else 1
    return c.integer(1, size) if kind == "any" else max(1, size + c.integer(-2, 1))
