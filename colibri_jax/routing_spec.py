"""What routing is asked for and what it answers: RouterSpec, RoutingOptions, Selection.

Only types and their validation. The rules themselves stand in `reference/` (definition) and `native/src/routing/`
(execution), which share nothing but these.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Collection, Iterable, Sequence
from typing import Literal, cast, get_args

import numpy as np
import numpy.typing as npt

from colibri_jax.errors import ConfigError, FencedOptionError, OptionError, ShapeError

Score = Literal["sigmoid", "softmax"]
Scope = Literal["prefill", "decode", "verify"]
Policy = Literal["aggregate", "floor", "substitute", "coverage", "per_position", "resident", "cache_route"]
Denominator = Literal["survivors", "frozen"]
Vote = Literal["weights", "all_scores"]
Rows = Literal["together", "alone"]
"""Whether the rows of a step share its budget, or each is routed as a step of one row under the options of scope `decode`."""
RowVotes = Sequence[int] | npt.NDArray[np.integer] | None
"""What each row of a step weighs in its votes, in units of 2^-16, 0 to `FULL_VOTE`; None gives every row a full vote."""

SCOPES: tuple[Scope, ...] = get_args(Scope)
POLICIES: tuple[Policy, ...] = get_args(Policy)

# What they keep is no function of logits and options alone; they exist for comparison.
IRREPRODUCIBLE_POLICIES: tuple[Policy, ...] = ("resident", "cache_route")

# Weights are voted in units of 2^-32 as int64; a scaling factor below 2^10 keeps every sum of a step exact.
MAX_SCALING_FACTOR = 2.0**10
FULL_VOTE = 2**16
# A weight is at most 2^42 of those units and a score 2^32, so that a row adds at most 2^58 to an expert's weighed votes: int64 holds 31.
MOST_VOTING_ROWS = 31
# A softmax sums exponentials in units of 2^-50 as int64, which holds fewer than 2^13 ones.
MAX_SOFTMAX_EXPERTS = 2**13 - 1


@dataclasses.dataclass(frozen=True, eq=False)
class RouterSpec:
    """A model's router, apart from its weight matrix.

    Attributes:
        score: how logits become scores `p`.
        top_k: experts per position, K.
        bias: float32 [E] correction added to the score for the choice only, or None.
        n_group: groups that the experts are divided into; 1 means none.
        topk_group: groups that stay eligible per position.
        norm_topk_prob: divide the kept scores by their sum.
        routed_scaling_factor: factor on every weight, below 2^10.

    Raises:
        ConfigError: a field is outside its domain.
    """

    score: Score
    top_k: int
    bias: npt.NDArray[np.float32] | None = None
    n_group: int = 1
    topk_group: int = 1
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.0

    def __post_init__(self) -> None:
        if self.score not in get_args(Score):
            raise ConfigError("unknown router score", where="score", expected=get_args(Score), got=self.score)
        if self.top_k < 1:
            raise ConfigError("a position needs an expert", where="top_k", expected="1 or more", got=self.top_k)
        if self.n_group < 1 or not 1 <= self.topk_group <= self.n_group:
            raise ConfigError(
                "groups out of range",
                where="n_group, topk_group",
                expected="1 <= topk_group <= n_group",
                got=(self.n_group, self.topk_group),
            )
        if not 0.0 < self.routed_scaling_factor < MAX_SCALING_FACTOR:
            raise ConfigError(
                "scaling factor out of range",
                where="routed_scaling_factor",
                expected=f"above 0, below {MAX_SCALING_FACTOR:g}",
                got=self.routed_scaling_factor,
            )
        if self.bias is not None:
            bias = np.asarray(self.bias)
            if bias.dtype != np.float32 or bias.ndim != 1:
                raise ShapeError("router bias", where="bias", expected="float32 [E]", got=f"{bias.dtype} {list(bias.shape)}")
            if not np.isfinite(bias).all():
                raise ConfigError(
                    "non-finite bias", where=f"bias[{int(np.argmin(np.isfinite(bias)))}]", expected="finite", got="NaN or infinity"
                )
            frozen = bias.copy()
            frozen.setflags(write=False)
            object.__setattr__(self, "bias", frozen)

    def check_experts(self, n_experts: int) -> None:
        """Check this router against the number of experts, E.

        Raises:
            ConfigError: K > E, or the groups do not divide E as design rules ask.
            ShapeError: the bias has another length than E.
        """
        if self.bias is not None and self.bias.shape != (n_experts,):
            raise ShapeError("router bias", where="bias", expected=[n_experts], got=list(self.bias.shape))
        if self.top_k > n_experts:
            raise ConfigError("more experts per position than experts", where="top_k", expected=f"<= {n_experts}", got=self.top_k)
        if self.score == "softmax" and n_experts > MAX_SOFTMAX_EXPERTS:
            raise ConfigError("too many experts for an exact softmax", where="experts", expected=f"<= {MAX_SOFTMAX_EXPERTS}", got=n_experts)
        if self.n_group == 1:
            return
        if n_experts % self.n_group or n_experts // self.n_group < 2:
            raise ConfigError(
                "groups must divide the experts, two or more each",
                where="n_group",
                expected=f"a divisor of {n_experts}, at most half",
                got=self.n_group,
            )
        eligible = self.topk_group * (n_experts // self.n_group)
        if self.top_k > eligible:
            raise ConfigError("kept groups hold too few experts", where="top_k", expected=f"<= {eligible}", got=self.top_k)


@dataclasses.dataclass(frozen=True)
class RoutingOptions:
    """What the caller changes about a model's routing. All defaults together change nothing.

    Attributes:
        expert_topk: keep at most this many of a position's K experts; 0 is off.
        expert_topp: keep the shortest prefix of a position's experts that holds this share of its score; 0 and 1 are off.
        budget: most distinct experts a layer may use in one step, N; 0 is off. A tuple gives one N per MoE layer.
        policy: which experts the budget keeps; `cache_route` has no budget, it exchanges experts for cached ones.
        denominator: what surviving scores are divided by where the router normalises.
        vote: what an expert's aggregate sums: final weights, or the scores of all experts.
        floor: experts of every position that `floor`-type policies always keep.
        coverage: share of the aggregate that `coverage` keeps.
        route_top: experts of every position that `cache_route` never exchanges, J: its best by choice.
        route_within: places of a position's ranking among which `cache_route` prefers cached experts, M; 0 is off.
        allow_irreproducible: permits policies whose result depends on the cache.

    Raises:
        OptionError: a field is outside its domain, or a policy without a budget is given one.
        FencedOptionError: the policy is irreproducible and that was not allowed.
    """

    expert_topk: int = 0
    expert_topp: float = 0.0
    budget: int | tuple[int, ...] = 0
    policy: Policy = "aggregate"
    denominator: Denominator = "survivors"
    vote: Vote = "weights"
    floor: int = 1
    coverage: float = 1.0
    route_top: int = 2
    route_within: int = 12
    allow_irreproducible: bool = False

    def __post_init__(self) -> None:
        for field in ("expert_topk", "floor", "route_top", "route_within"):
            object.__setattr__(self, field, whole_number(getattr(self, field), field))
        for field in ("expert_topk", "route_top", "route_within"):
            if getattr(self, field) < 0:
                raise OptionError("negative count", where=field, expected="0 (off) or more", got=getattr(self, field))
        if not (math.isfinite(self.expert_topp) and 0.0 <= self.expert_topp <= 1.0):
            raise OptionError("share out of range", where="expert_topp", expected="0 to 1 (0 and 1 are off)", got=self.expert_topp)
        many = isinstance(self.budget, Collection) and not isinstance(self.budget, str)
        budget = tuple(whole_number(n, "budget") for n in self.budget) if many else whole_number(self.budget, "budget")  # type: ignore[union-attr]
        object.__setattr__(self, "budget", budget)
        for n in self.budget if isinstance(self.budget, tuple) else (self.budget,):
            if n < 0:
                raise OptionError("negative budget", where="budget", expected="0 (off) or more", got=n)
        for field, known in (("policy", POLICIES), ("denominator", get_args(Denominator)), ("vote", get_args(Vote))):
            if getattr(self, field) not in known:
                raise OptionError(f"unknown {field}", where=field, expected=", ".join(known), got=getattr(self, field))
        if self.policy in IRREPRODUCIBLE_POLICIES and not self.allow_irreproducible:
            what = "the output of this policy depends on what the cache holds"
            raise FencedOptionError(what, where="policy", expected="allow_irreproducible=True", got=self.policy)
        if self.policy == "cache_route" and any(self.budget if isinstance(self.budget, tuple) else (self.budget,)):
            raise OptionError("the policy has no budget", where="budget, policy", expected="0 (off) with cache_route", got=self.budget)
        if self.floor < 1:
            raise OptionError("floor out of range", where="floor", expected="1 or more", got=self.floor)
        if not 0.0 < self.coverage <= 1.0:
            raise OptionError("coverage out of range", where="coverage", expected="above 0, at most 1", got=self.coverage)

    def without_budget(self) -> RoutingOptions:
        """The same options with the budget off; TOPK and TOPP stay, they act in every scope."""
        within = 0 if self.policy == "cache_route" else self.route_within
        return dataclasses.replace(self, budget=0, coverage=1.0, route_within=within)

    def for_layer(self, moe_index: int) -> RoutingOptions:
        """These options with the scalar budget of one MoE layer (0 is the first layer that has a router)."""
        if isinstance(self.budget, int):
            return self
        if moe_index >= len(self.budget):
            raise OptionError("one budget per MoE layer", where="budget", expected=f"more than {moe_index} values", got=len(self.budget))
        return dataclasses.replace(self, budget=self.budget[moe_index])

    def check_layers(self, moe_layers: int) -> None:
        """Check a list of budgets against the model's number of MoE layers.

        Raises:
            OptionError: it has another length.
        """
        if isinstance(self.budget, tuple) and len(self.budget) != moe_layers:
            raise OptionError("one budget per MoE layer", where="budget", expected=f"{moe_layers} values", got=len(self.budget))

    def effective(self, moe_index: int, scope: Scope, budget_scopes: Collection[Scope]) -> RoutingOptions:
        """These options as one MoE layer has them in a step of this scope."""
        options = self.for_layer(moe_index)
        return options if scope in budget_scopes else options.without_budget()

    def of_drafts(self, budget_scopes: Collection[Scope]) -> RoutingOptions:
        """These options as an MTP block has them: those of a decode step, and of a list of budgets the last MoE layer's."""
        last = self if isinstance(self.budget, int) else dataclasses.replace(self, budget=self.budget[-1] if self.budget else 0)
        return last.effective(0, "decode", budget_scopes)

    @property
    def rows_of_drafts(self) -> Rows:
        """How a step of an MTP block routes its rows: each by itself, as far as the policy can."""
        return "together" if self.policy in IRREPRODUCIBLE_POLICIES else "alone"

    @property
    def scalar_budget(self) -> int:
        """The budget of one layer.

        Raises:
            OptionError: the budget is still a list; `for_layer` chooses from it.
        """
        if not isinstance(self.budget, int):
            raise OptionError("a single selection takes a single budget", where="budget", expected="an int", got=self.budget)
        return self.budget


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Selection:
    """The experts of one layer in one step, S positions of at most K experts each.

    Attributes:
        ids: int32 [S, K] in router order (choice descending), packed left, -1 where empty.
        weights: float32 [S, K], final gate weights, 0 where empty.
        kept: int32, ascending: experts used by any position.
        union_size: distinct experts before the budget.
        dropped: distinct experts that were in the union and are not kept.
        dropped_slots: (position, expert) pairs that the budget took away, or that were exchanged.
        emptied_positions: positions left without a routed expert.
        mass_kept: sum of the scores used over the sum of the scores after TOPP; 1 where both are 0.

    Where rows are routed alone, each position's ids and weights are those of a step of that position by itself. `kept`,
    `union_size` and `dropped` are of the whole step: what any position keeps, what any chose before its budget, and how many
    of these no position keeps, so that an expert counts as dropped only if nothing in the step uses it. `dropped_slots` and
    `emptied_positions` are sums over the positions; `mass_kept` is the positions' mean: a float64 sum in their order, one by
    one, divided by S.
    """

    ids: npt.NDArray[np.int32]
    weights: npt.NDArray[np.float32]
    kept: npt.NDArray[np.int32]
    union_size: int
    dropped: int
    dropped_slots: int
    emptied_positions: int
    mass_kept: float

    def differences(self, other: Selection) -> list[str]:
        """Names of the fields that are not equal, bit for bit; empty when the two are the same."""
        unequal = []
        for field in dataclasses.fields(self):
            mine, theirs = getattr(self, field.name), getattr(other, field.name)
            if isinstance(mine, np.ndarray):
                same = mine.dtype == theirs.dtype and mine.shape == theirs.shape and mine.tobytes() == theirs.tobytes()
            else:
                same = mine == theirs
            if not same:
                unequal.append(field.name)
        return unequal


def check_scopes(scopes: Iterable[str]) -> frozenset[Scope]:
    """Scopes that a budget acts in; one name alone stands for itself.

    Raises:
        OptionError: there is no such scope.
    """
    chosen = frozenset([scopes] if isinstance(scopes, str) else scopes)
    for scope in chosen - frozenset(SCOPES):
        raise OptionError("unknown scope", where="budget_scopes", expected=", ".join(SCOPES), got=scope)
    return cast(frozenset[Scope], chosen)


def check_step(scope: str, logits: str, rows: str, options: RoutingOptions, row_votes: RowVotes = None) -> None:
    """Check the choices that every forward call makes.

    Raises:
        OptionError: one is unknown, or rows are to be routed alone in another scope than `verify` or by a policy that looks at
            the cache, or votes are weighed where rows are not verified together.
    """
    for where, value, known in (("scope", scope, SCOPES), ("logits", logits, ("all", "last")), ("rows", rows, get_args(Rows))):
        if value not in known:
            raise OptionError(f"unknown {where}", where=where, expected=", ".join(known), got=value)
    if rows == "alone" and scope != "verify":
        raise OptionError("rows are routed alone in verification", where="rows, scope", expected="alone, verify", got=(rows, scope))
    if rows == "alone":
        check_rows_alone(options)
    if row_votes is not None and (scope, rows) != ("verify", "together"):
        what = "votes are weighed where rows are verified together"
        raise OptionError(what, where="row_votes, scope, rows", expected=("verify", "together"), got=(scope, rows))


def most_voting_rows(router: RouterSpec, options: RoutingOptions, n_experts: int) -> int:
    """Rows of a step whose weighed votes int64 adds up exactly, whatever the logits."""
    if options.policy != "coverage":
        return MOST_VOTING_ROWS
    # ΣA runs over experts too. What the scores or weights of one row can sum to:
    if options.vote == "all_scores":
        mass = 1.0 if router.score == "softmax" else float(n_experts)
    else:
        mass = router.routed_scaling_factor * (1 if router.norm_topk_prob or router.score == "softmax" else router.top_k)
    # The 32nd row that int64 has room for is left to the roundings.
    return min(MOST_VOTING_ROWS, math.floor(MOST_VOTING_ROWS * MAX_SCALING_FACTOR / mass))


def check_row_votes(
    row_votes: RowVotes, positions: int, router: RouterSpec, options: RoutingOptions, n_experts: int
) -> npt.NDArray[np.int64] | None:
    """Row votes as int64 [S]; None stays None.

    Raises:
        ShapeError: not one whole number per position.
        OptionError: one is out of range, or there are more rows than votes are exact for.
    """
    if row_votes is None:
        return None
    votes = np.asarray(row_votes)
    if votes.shape != (positions,) or votes.dtype.kind not in "iu":
        raise ShapeError("row votes", where="row_votes", expected=f"integers [{positions}]", got=f"{votes.dtype} {list(votes.shape)}")
    if votes.min() < 0 or votes.max() > FULL_VOTE:
        raise OptionError("vote of a row out of range", where="row_votes", expected=f"0 to {FULL_VOTE}", got=votes.tolist())
    most = most_voting_rows(router, options, n_experts)
    if positions > most:
        raise OptionError("weighed votes of so many rows are not exact", where="row_votes", expected=f"at most {most} rows", got=positions)
    return votes.astype(np.int64)


def check_rows_alone(options: RoutingOptions) -> None:
    """Refuse a policy for which a row of a step is not what it would be in a step of its own.

    Raises:
        OptionError: the policy looks at the cache, which the steps in between would have changed.
    """
    if options.policy in IRREPRODUCIBLE_POLICIES:
        known = ", ".join(policy for policy in POLICIES if policy not in IRREPRODUCIBLE_POLICIES)
        raise OptionError("rows routed alone cannot follow what the cache holds", where="policy", expected=known, got=options.policy)


def whole_number(value: object, where: str) -> int:
    """A Python int of any integer type but bool, which nobody means as a count.

    Raises:
        OptionError: it is something else.
    """
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise OptionError("not a whole number", where=where, expected="an integer", got=repr(value))
    return operator.index(value)


def check_logits(logits: npt.ArrayLike, router: RouterSpec) -> npt.NDArray[np.float32]:
    """Router logits as float32 [S, E], checked against the router.

    Raises:
        ShapeError: not float32 [S, E] with S >= 1.
        ConfigError: the router does not fit E.
    """
    array = np.asarray(logits)
    if array.dtype != np.float32 or array.ndim != 2 or array.shape[0] < 1 or array.shape[1] < 1:
        raise ShapeError("router logits", where="logits", expected="float32 [S >= 1, E >= 1]", got=f"{array.dtype} {list(array.shape)}")
    router.check_experts(array.shape[1])
    return array
