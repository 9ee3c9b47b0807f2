"""The budget policies other than `aggregate`, native: each sentence of their rules against a case worked out by hand.

Scores that are exact by construction make that possible: a sigmoid logit of 0 scores 0.5, of 40 scores 1, of -110 scores 0.
"""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from oracles.checkpoints import random_tensors, small_config, write_checkpoint

import colibri_jax
from colibri_jax import RouterSpec, RoutingOptions, Selection, _native, native
from colibri_jax.container.convert import plan_conversion, run_conversion
from colibri_jax.engine.session import NativeModel
from colibri_jax.errors import OptionError, ShapeError
from colibri_jax.routing_spec import IRREPRODUCIBLE_POLICIES, POLICIES, Policy, Vote

LOGIT_OF_SCORE = {0.0: -110.0, 0.5: 0.0, 1.0: 40.0}
FLOORED: tuple[Policy, ...] = ("floor", "substitute", "coverage")
BUDGETED = tuple(policy for policy in POLICIES if policy != "cache_route")


def rows(*scores: list[float]) -> npt.NDArray[np.float32]:
    """Sigmoid logits whose scores are the given 0, 0.5 and 1."""
    return np.array([[LOGIT_OF_SCORE[p] for p in row] for row in scores], np.float32)


def router(top_k: int, bias: list[float] | None = None, **fields: object) -> RouterSpec:
    settings: dict[str, object] = {"score": "sigmoid"} | fields
    return RouterSpec(top_k=top_k, bias=None if bias is None else np.array(bias, np.float32), **settings)  # type: ignore[arg-type]


def select(
    logits: npt.ArrayLike, spec: RouterSpec, policy: Policy, *, resident: npt.ArrayLike | None = None, **options: object
) -> Selection:
    given = RoutingOptions(policy=policy, allow_irreproducible=True, **options)  # type: ignore[arg-type]
    return native.select_experts(np.asarray(logits, np.float32), spec, given, resident)


def float32s(*values: float) -> list[float]:
    return np.array(values, np.float32).tolist()  # type: ignore[no-any-return]


# Each position's two picks are its own.
DISJOINT = rows([0.5, 0.5, 0.0, 0.0], [0.0, 0.0, 0.5, 0.5])
# Weights of these are half and a quarter of a vote, which both round to none: the votes tie and the weights do not.
FAINT = router(2, norm_topk_prob=False, routed_scaling_factor=2.0**-33)


# ---- floor ----------------------------------------------------------------------------------------------------------


def test_the_floor_set_may_be_larger_than_the_budget() -> None:
    chosen = select(DISJOINT, router(2), "floor", budget=1)
    assert chosen.ids.tolist() == [[0, -1], [2, -1]], "a tie of weights goes to the lowest id"
    assert chosen.weights.tolist() == [[1.0, 0.0], [1.0, 0.0]]
    assert chosen.kept.tolist() == [0, 2]
    assert (chosen.union_size, chosen.dropped, chosen.dropped_slots, chosen.emptied_positions) == (4, 2, 2, 0)
    assert chosen.mass_kept == 0.5


def test_beyond_the_floor_set_votes_fill_up_to_the_budget() -> None:
    chosen = select(DISJOINT, router(2), "floor", budget=3)
    assert chosen.ids.tolist() == [[0, 1], [2, -1]], "a tie of votes goes to the lowest id"
    assert chosen.weights.tolist() == [[0.5, 0.5], [1.0, 0.0]]
    assert (chosen.kept.tolist(), chosen.mass_kept) == ([0, 1, 2], 0.75)


def test_the_floor_set_comes_before_more_votes() -> None:
    # Expert 3 has 1.5 votes and is nobody's best.
    logits = rows([1.0, 0.0, 0.0, 0.5], [0.0, 1.0, 0.0, 0.5], [0.0, 0.0, 1.0, 0.5])
    spec = router(2, norm_topk_prob=False)
    assert select(logits, spec, "aggregate", budget=3).kept.tolist() == [0, 1, 3]
    assert select(logits, spec, "floor", budget=3).kept.tolist() == [0, 1, 2]


def test_a_floor_of_two_keeps_two_of_every_position() -> None:
    logits = rows([1.0, 0.5, 0.5, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 1.0, 0.5, 0.5])
    assert select(logits, router(3), "floor", budget=1, floor=2).ids.tolist() == [[0, 1, -1], [3, 4, -1]]


@pytest.mark.parametrize("floor", [2, 3, 10**12])
@pytest.mark.parametrize("policy", ["floor", "substitute", "coverage"])
def test_a_floor_of_all_picks_changes_no_bit(policy: Policy, floor: int) -> None:
    off = select(DISJOINT, router(2), policy)
    assert select(DISJOINT, router(2), policy, budget=1, floor=floor, coverage=0.01).differences(off) == []


def test_the_floor_is_ranked_by_float32_weight_and_neither_by_votes_nor_by_choice() -> None:
    assert select(rows([0.5, 1.0]), FAINT, "aggregate", budget=1).kept.tolist() == [0]
    assert select(rows([0.5, 1.0]), FAINT, "floor", budget=1).kept.tolist() == [1]
    biased = router(2, [3.0, 0.0])
    assert select(rows([0.5, 1.0]), biased, "floor").ids.tolist() == [[0, 1]], "the choice is by bias"
    assert select(rows([0.5, 1.0]), biased, "floor", budget=1).kept.tolist() == [1]


def test_weights_that_round_to_one_float32_tie_in_the_floor() -> None:
    # Scores differ, but both weights are flushed to 0.
    nothing = router(2, norm_topk_prob=False, routed_scaling_factor=2.0**-140)
    assert select(rows([0.5, 1.0]), nothing, "floor", budget=1).kept.tolist() == [0]


# ---- coverage -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("share", "budget", "kept"),
    [
        (0.5, 0, 2),  # 0.5 >= 0.5: equality is enough
        (math.nextafter(0.5, 1), 0, 3),
        (0.25, 0, 1),  # the floor set alone holds a quarter; it looks before each addition
        (math.nextafter(0.25, 1), 0, 2),
        (0.01, 0, 1),
        (0.99, 0, 4),
        (0.99, 3, 3),  # the budget caps the additions
        (0.5, 3, 2),
        (0.99, 1, 1),
        (0.5, 4, 2),  # it acts although the union is no larger than the budget
        (0.5, 100, 2),
        (1.0, 2, 2),
        (1.0, 0, 4),  # off
        (1.0, 4, 4),
    ],
)
def test_coverage_adds_until_the_share_is_held_or_the_budget_reached(share: float, budget: int, kept: int) -> None:
    chosen = select(rows([0.5] * 4), router(4), "coverage", coverage=share, budget=budget)
    assert chosen.kept.tolist() == list(range(kept))
    assert (chosen.mass_kept, chosen.dropped, chosen.emptied_positions) == (kept / 4, 4 - kept, 0)


def test_the_budget_of_coverage_never_caps_the_floor_set() -> None:
    assert select(rows([0.5] * 4), router(4), "coverage", coverage=0.1, budget=1, floor=3).kept.tolist() == [0, 1, 2]
    assert select(DISJOINT, router(2), "coverage", coverage=0.9, budget=1).kept.tolist() == [0, 2]


def test_full_coverage_under_a_budget_adds_nobody_without_votes() -> None:
    logits = rows([1.0, 0.0, 0.0])
    assert select(logits, router(3), "coverage", coverage=1.0, budget=2).kept.tolist() == [0]
    assert select(logits, router(3), "floor", budget=2).kept.tolist() == [0, 1]
    for idle in (0, 3):
        assert select(logits, router(3), "coverage", coverage=1.0, budget=idle).kept.tolist() == [0, 1, 2], "it does not act"
    assert select(rows([0.0, 0.0]), router(2), "coverage", coverage=0.5).kept.tolist() == [0], "no votes at all are covered"


def test_the_whole_of_the_votes_is_that_of_the_union() -> None:
    # The union holds 1 and 0.5 votes; experts outside it would add 1.5, of which expert 0 alone were less than 0.6.
    logits = rows([1.0, 0.5, 0.5, 0.5, 0.5])
    assert select(logits, router(2), "coverage", coverage=0.6, vote="all_scores").kept.tolist() == [0]
    assert select(logits, router(2), "coverage", coverage=0.7, vote="all_scores").kept.tolist() == [0, 1]


def test_coverage_is_no_option_of_other_policies() -> None:
    logits = rows([0.5] * 4)
    for policy in POLICIES:
        if policy != "coverage":
            off = select(logits, router(4), policy, resident=[])
            assert select(logits, router(4), policy, coverage=0.3, resident=[]).differences(off) == []


# ---- substitute -----------------------------------------------------------------------------------------------------

# Picks are 0, 1 and 2, 3; the floor set of 0 and 2 is the budget's two.
SWAP = rows([1.0, 1.0, 0.0, 0.5], [0.5, 0.0, 1.0, 1.0])


@pytest.mark.parametrize(
    ("norm", "denominator", "second"),
    [
        (False, "survivors", (1.0, 0.5)),
        (False, "frozen", (1.0, 0.5)),
        (True, "survivors", (1 / 1.5, 0.5 / 1.5)),
        (True, "frozen", (1 / 2, 0.5 / 2)),  # the sum of the old picks
    ],
)
def test_substitute_picks_again_as_many_as_before(norm: bool, denominator: str, second: tuple[float, float]) -> None:
    chosen = select(SWAP, router(2, norm_topk_prob=norm), "substitute", budget=2, denominator=denominator)
    assert chosen.ids.tolist() == [[0, 2], [2, 0]]
    assert chosen.weights[1].tolist() == float32s(*second)
    assert chosen.kept.tolist() == [0, 2]
    assert (chosen.union_size, chosen.dropped, chosen.dropped_slots, chosen.emptied_positions) == (4, 2, 2, 0)
    assert chosen.mass_kept == 2.5 / 4, "a newcomer's score counts as used"


def test_substitute_picks_all_of_a_smaller_set() -> None:
    chosen = select(rows([0.5] * 4), router(4), "substitute", budget=2)
    assert chosen.ids.tolist() == [[0, 1, -1, -1]]
    assert chosen.weights.tolist() == [[0.5, 0.5, 0.0, 0.0]]


def test_substitute_picks_by_choice_with_ties_to_the_lowest_id() -> None:
    # Position 0 loses expert 3; of the set {0, 1, 2} it has 0 already, and the bias of 2 comes before the score of 1.
    logits = rows([1.0, 0.5, 0.0, 1.0], [0.0, 1.0, 0.0, 0.0], [0.0, 0.0, 1.0, 0.0])
    biased = select(logits, router(2, [0.0, 0.0, 0.75, 0.0]), "substitute", budget=3)
    assert biased.kept.tolist() == [0, 1, 2]
    assert biased.ids[0].tolist() == [0, 2]
    assert select(logits, router(2, [0.0, 0.0, 0.5, 0.0]), "substitute", budget=3).ids[0].tolist() == [0, 1]


def test_substitute_keeps_the_group_mask() -> None:
    # Expert 2 would be the second best of the set for position 0, but its group is not the position's.
    logits = rows([0.5, 0.5, 0.5, 0.0], [0.0, 0.0, 0.5, 0.5])
    grouped = select(logits, router(2, n_group=2, topk_group=1), "substitute", budget=2)
    assert grouped.ids.tolist() == [[0, -1], [2, -1]]
    assert grouped.weights.tolist() == [[1.0, 0.0], [1.0, 0.0]]
    unlimited = router(2, [0.0, 0.25, 0.0, 0.0], n_group=2, topk_group=2)
    assert select(logits, unlimited, "substitute", budget=2).ids.tolist() == [[0, 2], [2, 0]]


def test_substitute_leaves_alone_a_position_that_lost_nothing() -> None:
    # Picks after TOPP: 1; 0; 0 and 2. Position 2 loses expert 2. Position 0 would choose 0, for its bias, if it chose again.
    logits = rows([0.0, 1.0, 0.0], [1.0, 0.0, 0.5], [0.5, 0.0, 0.5])
    spec = router(2, [1.5, 0.0, 0.0])
    off = select(logits, spec, "substitute", expert_topp=0.6)
    assert off.ids.tolist() == [[1, -1], [0, -1], [0, 2]]
    chosen = select(logits, spec, "substitute", expert_topp=0.6, budget=2)
    assert chosen.ids.tolist() == [[1, -1], [0, -1], [0, 1]], "as many as after TOPP"
    assert chosen.weights[:2].tobytes() == off.weights[:2].tobytes()
    assert chosen.mass_kept == 2.5 / 3


def test_substitute_counts_what_a_position_had_after_topk() -> None:
    chosen = select(SWAP, router(3), "substitute", expert_topk=2, budget=3)
    # Votes tie at a half: the set is 0, 2 and 1.
    assert chosen.ids.tolist() == [[0, 1, -1], [2, 0, -1]]


def test_a_new_pick_may_take_the_place_of_a_survivor() -> None:
    # Choice is 0, 3, 2, 1 in both positions; TOPP leaves 2, 1 of the first and 0, 3 of the second. The set is 2 and 0 (best) and 3
    # (half a vote against a third). Position 0 had two: now they are 0 and 3, which score nothing, and nobody uses 2.
    logits = rows([0.0, 0.5, 1.0, 0.0], [1.0, 0.0, 0.0, 1.0])
    chosen = select(logits, router(4, [3.0, 0.0, 0.0, 2.0]), "substitute", expert_topp=0.9, budget=3)
    assert chosen.ids.tolist() == [[0, 3, -1, -1], [0, 3, -1, -1]]
    assert chosen.weights.tolist() == [[0.0] * 4, [0.5, 0.5, 0.0, 0.0]]
    assert chosen.kept.tolist() == [0, 3], "kept are the experts used by any position"
    assert (chosen.union_size, chosen.dropped, chosen.dropped_slots, chosen.emptied_positions) == (4, 2, 2, 0)
    assert chosen.mass_kept == 2 / 3.5


def test_newcomers_may_score_more_than_what_was_lost() -> None:
    # Each position loses expert 1, which it chose for its bias and which scores 0.
    logits = rows([0.5, 0.0, 0.5], [0.0, 0.0, 1.0])
    chosen = select(logits, router(2, [0.0, 1.0, 0.0]), "substitute", budget=2)
    assert chosen.ids.tolist() == [[0, 2], [2, 0]]
    assert chosen.mass_kept == 2.0 / 1.5


@pytest.mark.parametrize(
    ("bias", "ids", "sum_is_one"),
    [
        ([0.0, 0.0, 0.0, 0.0], [2, 0, 1, -1], True),  # 1 + t + t = 1: each t vanishes
        ([2.0, 2.0, 0.0, 3.0], [0, 1, 2, -1], False),  # t + t + 1 > 1
    ],
)
def test_new_picks_are_summed_in_descending_order_of_choice(bias: list[float], ids: list[int], sum_is_one: bool) -> None:
    # t is between 2^-54 and 2^-53. The factor is half-way between two float32s, so that the weight of score 1 shows the last bit of
    # the sum. The other positions give experts 0 and 1 more votes than 3, the one that goes.
    logits = rows([0.0, 0.0, 1.0, 0.5], [1.0, 1.0, 1.0, 0.0], [1.0, 1.0, 1.0, 0.0])
    logits[0, :2] = -37.0
    chosen = select(logits, router(4, bias, routed_scaling_factor=1 + 3 * 2.0**-24), "substitute", budget=3)
    assert chosen.ids[0].tolist() == ids
    weight = chosen.weights[0, ids.index(2)]
    assert weight == (1 + 2.0**-22 if sum_is_one else 1 + 2.0**-23)


# ---- per_position ---------------------------------------------------------------------------------------------------


def test_every_position_is_cut_as_a_step_of_its_own() -> None:
    logits = rows([1.0, 0.5, 0.5, 0.0, 0.0], [0.0, 0.0, 0.5, 0.5, 0.5])
    chosen = select(logits, router(3), "per_position", budget=2)
    assert chosen.ids.tolist() == [[0, 1, -1], [2, 3, -1]]
    assert chosen.weights.tolist() == [float32s(1 / 1.5, 0.5 / 1.5, 0), [0.5, 0.5, 0.0]]
    assert chosen.kept.tolist() == [0, 1, 2, 3], "expert 2 is lost by one position and kept by the other"
    assert (chosen.union_size, chosen.dropped, chosen.dropped_slots, chosen.emptied_positions) == (5, 1, 2, 0)
    assert chosen.mass_kept == 2.5 / 3.5
    frozen = select(logits, router(3), "per_position", budget=2, denominator="frozen")
    assert frozen.weights.tolist() == [[0.5, 0.25, 0.0], float32s(0.5 / 1.5, 0.5 / 1.5, 0)]


def test_per_position_acts_only_where_a_position_has_more_than_the_budget() -> None:
    assert select(DISJOINT, router(2), "per_position", budget=2).differences(select(DISJOINT, router(2), "per_position")) == []
    logits = rows([1.0, 0.0, 0.0, 0.0], [0.5] * 4)
    chosen = select(logits, router(4), "per_position", expert_topp=0.9, budget=2)
    assert chosen.ids.tolist() == [[0, -1, -1, -1], [0, 1, -1, -1]]


def test_per_position_ranks_votes_and_follows_the_vote() -> None:
    assert select(rows([0.5, 1.0]), FAINT, "per_position", budget=1).kept.tolist() == [0]
    assert select(rows([0.5, 1.0]), FAINT, "per_position", budget=1, vote="all_scores").kept.tolist() == [1]


@pytest.mark.parametrize("vote", ["weights", "all_scores"])
def test_per_position_does_not_depend_on_who_shares_the_step(vote: Vote) -> None:
    logits = (np.random.default_rng(1).integers(-12, 13, (20, 24)) / 8).astype(np.float32)
    spec = router(6, n_group=4, topk_group=2)
    together = select(logits, spec, "per_position", budget=3, vote=vote)
    for row in range(20):
        alone = select(logits[row : row + 1], spec, "per_position", budget=3, vote=vote)
        assert alone.differences(select(logits[row : row + 1], spec, "aggregate", budget=3, vote=vote)) == []
        assert (alone.ids.tobytes(), alone.weights.tobytes()) == (together.ids[row].tobytes(), together.weights[row].tobytes())


# ---- resident -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("resident", "budget", "kept"),
    [
        ([], 2, [0, 1]),  # as aggregate
        ([3], 2, [0, 3]),  # the hit, then by votes
        ([3, 2], 2, [2, 3]),
        ([3, 2, 1], 2, [1, 2, 3]),  # hits beyond the budget stay
        ([3, 3, 5], 2, [0, 3]),  # an id counts once; expert 5 is nobody's
        ([3], 4, [0, 1, 2, 3]),
        (np.arange(6) == 3, 2, [0, 3]),
        (np.array([], np.int32), 1, [0]),
    ],
)
def test_cache_hits_always_stay(resident: npt.ArrayLike, budget: int, kept: list[int]) -> None:
    logits = rows([0.5, 0.5, 0.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.5, 0.5, 0.0, 0.0])
    chosen = select(logits, router(2), "resident", budget=budget, resident=resident)
    assert chosen.kept.tolist() == kept
    assert chosen.emptied_positions == (not {0, 1} & set(kept)) + (not {2, 3} & set(kept))


def test_no_other_policy_looks_at_the_cache() -> None:
    logits = np.random.default_rng(2).normal(size=(6, 24)).astype(np.float32)
    for policy in POLICIES:
        if policy not in IRREPRODUCIBLE_POLICIES:
            told = select(logits, router(4), policy, budget=6, coverage=0.5, resident=np.arange(20, 24))
            assert told.differences(select(logits, router(4), policy, budget=6, coverage=0.5)) == []


def test_what_is_resident_has_to_be_said_and_to_be_experts() -> None:
    for wrong in ([4], [-1], [[1]], [1.0], np.zeros(5, bool)):
        with pytest.raises(ShapeError, match="resident"):
            select(DISJOINT, router(2), "resident", budget=1, resident=wrong)
    with pytest.raises(OptionError, match="resident"):
        select(DISJOINT, router(2), "resident", budget=1)


# ---- all of them ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", BUDGETED)
def test_votes_of_all_scores_rank_only_members_of_the_union(policy: Policy) -> None:
    # Expert 3 scores 1 everywhere and is chosen nowhere. The votes of the members are 1, 1.5 and 0.5.
    logits = rows([1.0, 0.5, 0.0, 1.0], [0.0, 1.0, 0.5, 1.0])
    spec = router(2, [0.0, 0.0, 0.0, -9.0])
    chosen = select(logits, spec, policy, budget=2, vote="all_scores", resident=[3])
    assert chosen.kept.tolist() == ([0, 1, 2] if policy == "per_position" else [0, 1])
    assert chosen.union_size == 3


def test_a_nonmember_of_many_votes_is_not_added_after_the_floor() -> None:
    logits = rows([1.0, 0.5, 0.5, 1.0])
    spec = router(3, [0.0, 0.0, 0.0, -9.0])
    for policy in FLOORED:
        assert select(logits, spec, policy, budget=2, vote="all_scores").kept.tolist() == [0, 1]


def random_step(seed: int) -> tuple[npt.NDArray[np.float32], RouterSpec]:
    rng = np.random.default_rng(seed)
    coarse = seed % 2
    logits = rng.integers(-16, 17, (9, 24)) / 8 if coarse else rng.normal(size=(9, 24)) + 2 * rng.normal(size=24)
    bias = (rng.integers(-2, 3, 24) / 8).tolist() if seed % 3 else None
    grouped = {"n_group": 4, "topk_group": 2} if seed % 4 == 1 else {}
    return logits.astype(np.float32), router(5, bias, norm_topk_prob=bool(seed % 5), **grouped)


@pytest.mark.parametrize("policy", [policy for policy in BUDGETED if policy != "substitute"])
@pytest.mark.parametrize("seed", range(6))
def test_a_larger_budget_or_share_keeps_more_experts_and_more_mass(policy: Policy, seed: int) -> None:
    logits, spec = random_step(seed)
    off = select(logits, spec, policy, resident=[])
    ladders: list[list[dict[str, object]]] = [[{"budget": n, "coverage": 0.9} for n in range(1, off.union_size + 1)]]
    if policy == "coverage":
        ladders.append([{"coverage": share / 16} for share in range(1, 17)])
    for ladder in ladders:
        steps = [select(logits, spec, policy, resident=[0, 5, 7], **options) for options in ladder]
        for less, more in itertools.pairwise(steps):
            assert set(less.kept.tolist()) <= set(more.kept.tolist())
            assert less.mass_kept <= more.mass_kept
            assert less.dropped_slots >= more.dropped_slots
        assert steps[0].mass_kept < 1.0


@pytest.mark.parametrize("policy", BUDGETED)
@pytest.mark.parametrize("seed", range(6))
def test_what_every_policy_leaves_in_place(policy: Policy, seed: int) -> None:
    logits, spec = random_step(seed)
    off = select(logits, spec, policy, resident=[])
    for budget in (1, 3, 8, off.union_size):
        cut = select(logits, spec, policy, budget=budget, coverage=0.7, resident=[2, 3])
        used = cut.ids[cut.ids >= 0]
        assert cut.kept.tolist() == sorted(set(used.tolist()))
        assert (cut.union_size, cut.dropped) == (off.union_size, off.union_size - cut.kept.size)
        old = [set(row[row >= 0].tolist()) for row in off.ids]
        new = [set(row[row >= 0].tolist()) for row in cut.ids]
        assert cut.dropped_slots == sum(len(a - b) for a, b in zip(old, new, strict=True))
        assert cut.emptied_positions == sum(not b for b in new)
        assert policy in ("aggregate", "resident") or cut.emptied_positions == 0
        for row, (a, b) in enumerate(zip(old, new, strict=True)):
            if a == b:
                assert cut.weights[row].tobytes() == off.weights[row].tobytes()
            if policy != "substitute":
                assert b <= a


@pytest.mark.parametrize("policy", BUDGETED)
@pytest.mark.parametrize("seed", range(4))
def test_the_order_of_positions_decides_nothing(policy: Policy, seed: int) -> None:
    logits, spec = random_step(seed)
    order = np.random.default_rng(seed).permutation(len(logits))
    straight = select(logits, spec, policy, budget=3, coverage=0.6, resident=[1, 2])
    shuffled = select(logits[order], spec, policy, budget=3, coverage=0.6, resident=[2, 1])
    assert straight.dropped_slots > 0
    assert straight.ids[order].tobytes() == shuffled.ids.tobytes()
    assert straight.weights[order].tobytes() == shuffled.weights.tobytes()
    assert (straight.kept.tolist(), straight.mass_kept) == (shuffled.kept.tolist(), shuffled.mass_kept)


def test_an_unknown_policy_is_refused_by_name() -> None:
    with pytest.raises(OptionError, match="aggregate, floor, substitute, coverage, per_position, resident, cache_route"):
        _native.select_experts(
            DISJOINT,
            score="sigmoid",
            top_k=2,
            bias=None,
            n_group=1,
            topk_group=1,
            norm_topk_prob=True,
            routed_scaling_factor=1.0,
            expert_topk=0,
            expert_topp=0.0,
            budget=3,
            policy="random",
            denominator="survivors",
            vote="weights",
        )


# ---- through the engine ---------------------------------------------------------------------------------------------

CONFIG = small_config(n_routed_experts=9, num_experts_per_tok=3, num_nextn_predict_layers=0)


@pytest.fixture(scope="module")
def container(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random model."""
    directory = tmp_path_factory.mktemp("policies")
    write_checkpoint(directory / "hf", CONFIG, random_tensors(CONFIG), dtype="F32")
    run_conversion(plan_conversion(directory / "hf", directory / "out"))
    return directory / "out"


@pytest.mark.parametrize("policy", BUDGETED)
def test_the_engine_selects_as_select_experts_does_on_its_router_logits(container: Path, policy: Policy) -> None:
    def options(cut: int, **more: object) -> RoutingOptions:
        return RoutingOptions(policy=policy, budget=cut, allow_irreproducible=True, **more)  # type: ignore[arg-type]

    cut = options(4 if policy != "per_position" else 2, floor=2, coverage=0.75, vote="all_scores", denominator="frozen")
    # The cache holds all that was used once.
    lm = colibri_jax.load(container, routing=cut, budget_scopes=["verify"], cache_experts=9, threads=1)
    assert isinstance(lm, NativeModel)
    lm.set_trace(True)
    lm.forward([1], scope="prefill")
    cached = [selection.kept for selection in lm.selections]
    assert all(selection.dropped_slots == 0 for selection in lm.selections), "out of its scope the budget is off"
    lm.forward([3, 9, 27, 11], scope="verify")
    assert sum(selection.dropped_slots for selection in lm.selections) > 0
    tensors = random_tensors(CONFIG)
    for moe_layer, layer in enumerate(lm.config.moe_layers):
        bias = tensors[f"model.layers.{layer}.mlp.gate.e_score_correction_bias"].astype(np.float32)
        spec = router(3, bias.tolist(), routed_scaling_factor=lm.config.moe.router.routed_scaling_factor)
        logits = lm.trace["router_logits"][moe_layer]
        alone = native.select_experts(logits, spec, cut, cached[moe_layer])
        assert lm.selections[moe_layer].differences(alone) == []
