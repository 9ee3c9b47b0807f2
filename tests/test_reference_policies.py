"""The budget's policies in the reference: each rule on cases worked out by hand, then equality with the slow oracle.

Steps have up to 8 positions and 16 experts, which the reference pads to one shape: few programs are compiled.
Hand-made scores are exact: a sigmoid logit of 0 scores 0.5, of 40 scores 1, of -110 scores 0.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from typing import Any

import jax
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from oracles import selection as oracle
from strategies import Case, random_case, selection_cases

from colibri_jax.errors import FencedOptionError, OptionError, ShapeError
from colibri_jax.reference import routing, select_experts
from colibri_jax.routing_spec import IRREPRODUCIBLE_POLICIES, POLICIES, Policy, RouterSpec, RoutingOptions, Selection

UNIQUE = tuple(policy for policy in POLICIES if policy != "aggregate")
BUDGETED = tuple(policy for policy in POLICIES if policy != "cache_route")
FLOORED: tuple[Policy, ...] = ("floor", "substitute", "coverage", "per_position")
EVENTS = (
    *("budget_acts", "budget_tie", "emptied", "first_exceeds", "group_tie", "topp_equality"),
    *("coverage_reached", "coverage_equality", "coverage_capped"),
    *("newcomer", "short_set", "survivor_replaced", "repick_tie", "exchanged"),
)
LOGIT_OF_SCORE = {0.0: -110.0, 0.5: 0.0, 1.0: 40.0}
UNSCALED = {"norm_topk_prob": False}


def rows(*scores: list[float]) -> npt.NDArray[np.float32]:
    """Sigmoid logits of scores 0, 0.5 and 1; of any other score in (0, 1) to float32's precision."""
    return np.array([[LOGIT_OF_SCORE[p] if p in LOGIT_OF_SCORE else math.log(p / (1 - p)) for p in row] for row in scores], np.float32)


def select(z: npt.NDArray[np.float32], policy: Policy, *, router: dict[str, Any], resident: Any = None, **options: Any) -> Selection:
    """An answer of the reference which the oracle confirms."""
    spec = RouterSpec(**{"score": "sigmoid"} | router)
    chosen = RoutingOptions(policy=policy, allow_irreproducible=policy in IRREPRODUCIBLE_POLICIES, **options)
    answer = select_experts(z, spec, chosen, resident)
    mask = None if resident is None else np.isin(np.arange(z.shape[1]), resident)
    assert oracle.select(z, spec, chosen, mask).selection.differences(answer) == []
    return answer


def ids(selection: Selection) -> list[list[int]]:
    return [[int(e) for e in row if e >= 0] for row in selection.ids]


# ---- floor -------------------------------------------------------------------------------------------------------


def test_floor_keeps_each_positions_best_then_fills_up_by_aggregate() -> None:
    z = rows([0.9, 0.3, 0, 0, 0], [0.8, 0.4, 0, 0, 0], [0, 0, 0.2, 0.1, 0])
    # A without normalisation: 1.7, 0.7, 0.2, 0.1. The aggregate alone would take 0 and 1.
    answer = select(z, "floor", router={"top_k": 2, **UNSCALED}, budget=2)
    assert ids(answer) == [[0], [0], [2]]
    assert (answer.union_size, answer.kept.tolist(), answer.dropped, answer.dropped_slots, answer.emptied_positions) == (4, [0, 2], 2, 3, 0)
    assert ids(select(z, "floor", router={"top_k": 2, **UNSCALED}, budget=3)) == [[0, 1], [0, 1], [2]]


def test_a_floor_set_larger_than_the_budget_is_kept_whole() -> None:
    z = rows([1, 0.5, 0, 0, 0, 0], [0, 0, 1, 0.5, 0, 0], [0, 0, 0, 0, 1, 0.5])
    answer = select(z, "floor", router={"top_k": 2}, budget=1)
    assert (ids(answer), answer.kept.tolist()) == ([[0], [2], [4]], [0, 2, 4])
    off = select(z, "aggregate", router={"top_k": 2})
    # Two of two, or three of two: nothing is lost, bit for bit.
    for m in (2, 3, 10**30):
        assert off.differences(select(z, "floor", router={"top_k": 2}, budget=1, floor=m)) == []


def test_floor_ranks_float32_weights_with_ties_to_the_lowest_id() -> None:
    # Both weights are below the smallest normal float32, hence 0; by score expert 1 would be first.
    answer = select(rows([0.5, 1]), "floor", router={"top_k": 2, "routed_scaling_factor": 2.0**-140, **UNSCALED}, budget=1)
    assert ids(answer) == [[0]]
    # The bias moves the choice only: expert 1 is chosen first and weighs less.
    answer = select(rows([1, 0.5]), "floor", router={"top_k": 2, "bias": np.array([0, 2], np.float32)}, budget=1)
    assert ids(answer) == [[0]]


# ---- coverage ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("coverage", "budget", "floor", "kept"),
    [
        (0.5, 0, 1, 2),
        (math.nextafter(0.5, 1), 0, 1, 3),
        (math.nextafter(0.5, 0), 0, 1, 2),
        (0.25, 0, 1, 1),
        (5e-324, 0, 1, 1),
        (math.nextafter(1, 0), 0, 1, 4),
        (0.75, 2, 1, 2),
        (0.5, 3, 1, 2),
        (0.75, 1, 1, 1),
        (0.5, 1, 3, 3),
        (0.5, 4, 1, 2),
        (0.5, 10**30, 1, 2),
        (1.0, 0, 1, 4),
        (1.0, 3, 1, 3),
        (1.0, 4, 1, 4),
        (1.0, 1, 2, 2),
    ],
)
def test_coverage_adds_until_the_share_is_held_or_the_cap_is_reached(coverage: float, budget: int, floor: int, kept: int) -> None:
    """Four experts of equal vote: the test comes before each addition, the cap binds additions and not the floor set."""
    answer = select(rows([0.5] * 4), "coverage", router={"top_k": 4}, coverage=coverage, budget=budget, floor=floor)
    assert ids(answer) == [list(range(kept))]
    assert answer.weights[0, :kept].tolist() == [float(np.float32(1 / kept))] * kept


def test_a_share_of_one_stops_at_experts_without_votes() -> None:
    """With τ = 1 the rule acts where |U| > N; expert 2 weighs nothing, so that 0 and 1 already hold everything."""
    z = rows([1, 0.5, 0, 0])
    assert ids(select(z, "coverage", router={"top_k": 4}, budget=3)) == [[0, 1]]
    assert ids(select(z, "coverage", router={"top_k": 4}, budget=4)) == [[0, 1, 2, 3]]
    assert ids(select(z, "coverage", router={"top_k": 4}, coverage=math.nextafter(1, 0))) == [[0, 1]]


def test_the_smallest_share_still_asks_for_more_than_nothing() -> None:
    """The floor expert's vote rounds to 0 in its unit; the second one's does not, thanks to another position's score."""
    z = rows([1, 0.5, 0], [0, 0.5, 0])
    answer = select(z, "coverage", router={"top_k": 1, "routed_scaling_factor": 2.0**-33, **UNSCALED}, coverage=5e-324)
    assert ids(answer) == [[0], [1]]
    z = rows([0, 0.5])
    spec = {"top_k": 2, "bias": np.array([2, 0], np.float32), "routed_scaling_factor": 2.0**-140, **UNSCALED}
    # Weights are 0, so that the lowest id is the floor set; scores vote 0 for it and 0.5 for the other.
    assert ids(select(z, "coverage", router=spec, coverage=5e-324, vote="all_scores")) == [[0, 1]]
    assert ids(select(z, "coverage", router=spec, coverage=5e-324)) == [[0]]


def test_coverage_is_a_share_of_the_unions_votes() -> None:
    # Experts 2 to 9 have scores and are in no position: the union holds 1.5, everybody 5.5.
    z = rows([1, 0.5] + [0.5] * 8)
    assert ids(select(z, "coverage", router={"top_k": 2}, coverage=0.66, vote="all_scores")) == [[0]]
    assert ids(select(z, "coverage", router={"top_k": 2}, coverage=0.67, vote="all_scores")) == [[0, 1]]


# ---- substitute --------------------------------------------------------------------------------------------------

DISPLACED = rows([0.9, 0.8, 0.3, 0], [0, 0.4, 0.9, 0.45])


@pytest.mark.parametrize("denominator", ["survivors", "frozen"])
def test_who_lost_an_expert_picks_anew_inside_the_set(denominator: Any) -> None:
    """Floor set {0, 2}, and 1 has more votes than 3: position 1 lost expert 3 and takes 1, its next by choice."""
    off = select(DISPLACED, "aggregate", router={"top_k": 2, "routed_scaling_factor": 2.5})
    answer = select(DISPLACED, "substitute", router={"top_k": 2, "routed_scaling_factor": 2.5}, budget=3, denominator=denominator)
    assert (ids(off), ids(answer)) == ([[0, 1], [2, 3]], [[0, 1], [2, 1]])
    assert answer.weights[0].tobytes() == off.weights[0].tobytes(), "a position that lost nothing is unchanged"
    total = 0.9 + 0.4 if denominator == "survivors" else 0.9 + 0.45
    assert answer.weights[1] == pytest.approx([2.5 * 0.9 / total, 2.5 * 0.4 / total], rel=1e-6)
    assert (answer.kept.tolist(), answer.dropped, answer.dropped_slots, answer.emptied_positions) == ([0, 1, 2], 1, 1, 0)
    assert answer.mass_kept == pytest.approx((0.9 + 0.8 + 0.9 + 0.4) / (0.9 + 0.8 + 0.9 + 0.45), rel=1e-7), "newcomers count as used"
    # The other policies with this set leave the place empty.
    assert ids(select(DISPLACED, "floor", router={"top_k": 2}, budget=3)) == [[0, 1], [2]]


def test_substitutes_come_from_the_positions_own_groups() -> None:
    z = rows([0.9, 0.8, 0, 0], [0.1, 0.3, 0.9, 0.45])
    grouped = {"top_k": 2, "n_group": 2, "topk_group": 1}
    answer = select(z, "substitute", router=grouped, budget=3)
    assert ids(answer) == [[0, 1], [2]], "all of the set that its groups allow is one expert"
    assert answer.weights[1].tolist() == [1.0, 0.0]
    assert ids(select(z, "substitute", router=grouped | {"topk_group": 2}, budget=3)) == [[0, 1], [2, 1]]


def test_as_many_are_picked_as_before_and_by_choice_with_ties_to_the_lowest_id() -> None:
    # TOPK left one place of two: one is picked, and the set {0, 1, 2} offers three.
    z = rows([1, 0.5, 0, 0], [0, 1, 0.5, 0], [0, 0, 1, 0.5], [0.5, 0.5, 0.5, 1])
    assert ids(select(z, "substitute", router={"top_k": 2}, expert_topk=1, budget=3)) == [[0], [1], [2], [3]]
    z = rows([1, 0.5, 0.5, 0.9, 0.6, 0], [0.4, 0.9, 0.9, 0, 0, 0], [0.4, 0.9, 0.9, 0, 0, 0])
    # Set {0, 1, 2}: position 0 had 0, 3, 4 and takes 1 and 2, which tie in score; with a place less only 1.
    assert ids(select(z, "substitute", router={"top_k": 3}, budget=3))[0] == [0, 1, 2]
    assert ids(select(z, "substitute", router={"top_k": 3}, budget=3, expert_topk=2))[0] == [0, 1]
    bias = np.array([0, 0, 0.25, 0, 0, 0], np.float32)
    assert ids(select(z, "substitute", router={"top_k": 3, "bias": bias}, budget=3, expert_topk=2))[0] == [0, 2]


def test_a_survivor_can_be_replaced_by_a_better_choice() -> None:
    """TOPP chose by score, the second pick goes by choice: expert 1 is in the set, used by nobody, so not kept."""
    z, bias = rows([0.5, 1, 0, 0], [0, 0, 1, 1]), np.array([0, 0, 2, 2], np.float32)
    off = select(z, "aggregate", router={"top_k": 4, "bias": bias}, expert_topp=0.9)
    assert ids(off) == [[1, 0], [2, 3]]
    answer = select(z, "substitute", router={"top_k": 4, "bias": bias}, expert_topp=0.9, budget=3)
    assert ids(answer) == [[2, 3], [2, 3]]
    assert (answer.kept.tolist(), answer.dropped, answer.dropped_slots) == ([2, 3], 2, 2)
    assert answer.mass_kept == 2 / 3.5


def test_new_picks_are_summed_in_descending_order_of_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another order moves Σ by a last bit of float64; a scale that puts a weight on a float32 midpoint makes that visible."""
    right_total, told = oracle.total_of, False
    for seed in range(40):
        z = np.random.default_rng(seed).normal(-10, 10, (2, 64)).astype(np.float32)
        # Expert 63 is only in position 0, with a vote of 0; it goes, and 62 of position 1 comes.
        z[:, 62:] = [[-60, -50], [30, -60]]
        options = RoutingOptions(policy="substitute", budget=63)
        spec = RouterSpec(score="sigmoid", top_k=63)
        picks = oracle.select(z, spec, options).selection.ids[0].tolist()
        assert picks[-1] == 62
        p = oracle.scores(z[0].tolist(), "sigmoid")
        right, wrong = right_total(p, picks), right_total(p, picks[::-1])
        if right == wrong:
            continue
        near = (1 + 2.0**-24) * right / p[picks[0]]
        scales = near + np.arange(-16, 17) * np.spacing(near)
        telling = [s for s in scales if oracle.float32(p[picks[0]] * s / right) != oracle.float32(p[picks[0]] * s / wrong)]
        if telling and telling[0] < 1000:
            spec = dataclasses.replace(spec, routed_scaling_factor=float(telling[0]))
            answer = select_experts(z, spec, options)
            assert oracle.select(z, spec, options).selection.differences(answer) == []
            monkeypatch.setattr(oracle, "total_of", lambda p, chosen: right_total(p, chosen[::-1]))
            told |= oracle.select(z, spec, options).selection.differences(answer) == ["weights"]
            monkeypatch.setattr(oracle, "total_of", right_total)
    assert told


# ---- per_position ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vote", ["weights", "all_scores"])
def test_per_position_cuts_each_position_alone(vote: Any) -> None:
    z = rows([0.9, 0.8, 0.7, 0, 0, 0], [0, 0, 0.5, 0.5, 0.5, 0], [0, 0, 0, 0, 0, 1])
    answer = select(z, "per_position", router={"top_k": 3}, budget=2, vote=vote, expert_topp=0.9)
    # Position 2 has one expert after TOPP and keeps it; ties go to the lowest id; four are kept though N is 2.
    assert ids(answer) == [[0, 1], [2, 3], [5]]
    assert (answer.kept.tolist(), answer.union_size, answer.dropped, answer.dropped_slots) == ([0, 1, 2, 3, 5], 6, 1, 2)
    assert answer.weights[1:].tolist() == [[0.5, 0.5, 0], [1, 0, 0]]


def test_per_position_acts_where_a_position_has_more_than_the_budget() -> None:
    z = rows([1, 0.5, 0, 0], [0, 0, 1, 0.5])
    off = select(z, "aggregate", router={"top_k": 2})
    assert off.differences(select(z, "per_position", router={"top_k": 2}, budget=2)) == [], "a union of four, positions of two"


def test_per_position_is_the_aggregate_of_single_rows() -> None:
    z = (np.random.default_rng(3).integers(-16, 17, (8, 16)) / 8).astype(np.float32)
    spec = RouterSpec(score="softmax", top_k=5)
    for vote in ("weights", "all_scores"):
        options = RoutingOptions(policy="per_position", budget=3, vote=vote)
        alone = routing.select_many([(row[None], spec, dataclasses.replace(options, policy="aggregate")) for row in z])
        together = select_experts(z, spec, options)
        assert together.ids.tobytes() == b"".join(row.ids.tobytes() for row in alone)
        assert together.weights.tobytes() == b"".join(row.weights.tobytes() for row in alone)


# ---- resident ----------------------------------------------------------------------------------------------------

FOUR = rows([1, 0.9, 0, 0, 0], [0, 0, 0.8, 0.7, 0])


@pytest.mark.parametrize(
    ("resident", "budget", "kept"),
    [
        ([], 2, [0, 1]),
        ([3], 2, [0, 3]),
        ([3, 4], 2, [0, 3]),
        ([1, 3], 2, [1, 3]),
        ([1, 2, 3], 2, [1, 2, 3]),
        ([3], 1, [3]),
        ([3], 3, [0, 1, 3]),
        ([3], 4, [0, 1, 2, 3]),
        ([0], 0, [0, 1, 2, 3]),
    ],
)
def test_hits_stay_and_the_rest_goes_by_aggregate(resident: list[int], budget: int, kept: list[int]) -> None:
    """A of experts 0 to 3: 1, 0.9, 0.8, 0.7. A hit outside the union (4) takes no place."""
    by_ids = select(FOUR, "resident", router={"top_k": 2, **UNSCALED}, budget=budget, resident=resident)
    assert by_ids.kept.tolist() == kept
    spec, options = (
        RouterSpec(score="sigmoid", top_k=2, **UNSCALED),
        RoutingOptions(policy="resident", budget=budget, allow_irreproducible=True),
    )
    assert by_ids.differences(select_experts(FOUR, spec, options, np.isin(np.arange(5), resident))) == []


def test_resident_has_no_floor() -> None:
    answer = select(FOUR, "resident", router={"top_k": 2}, budget=1, resident=[1])
    assert (ids(answer), answer.emptied_positions) == ([[1], []], 1)


def test_resident_is_fenced_and_must_be_told_what_the_cache_holds() -> None:
    with pytest.raises(FencedOptionError, match="allow_irreproducible"):
        RoutingOptions(policy="resident")
    spec, options = RouterSpec(score="sigmoid", top_k=2), RoutingOptions(policy="resident", budget=1, allow_irreproducible=True)
    with pytest.raises(OptionError, match="resident"):
        select_experts(FOUR, spec, options)
    for wrong in ([5], [-1], [0.5], [[1]], np.zeros(4, bool), np.zeros((1, 5), bool)):
        with pytest.raises(ShapeError, match="resident"):
            select_experts(FOUR, spec, options, wrong)


@pytest.mark.parametrize("policy", [policy for policy in POLICIES if policy not in IRREPRODUCIBLE_POLICIES])
def test_only_the_fenced_policies_look_at_the_cache(policy: Policy) -> None:
    spec, options = RouterSpec(score="sigmoid", top_k=2), RoutingOptions(policy=policy, budget=1, coverage=0.5)
    assert select_experts(FOUR, spec, options).differences(select_experts(FOUR, spec, options, [0, 3])) == []


# ---- what holds for several --------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["aggregate", "floor", "substitute", "coverage", "resident"])
def test_scores_of_all_experts_vote_and_only_the_union_stands_for_election(policy: Policy) -> None:
    # Expert 2 is everybody's second, so it leads by score and is in no position. A by score: 0 has 1.3, 1 has 1, 3 has 1.2.
    z = rows([1, 0, 0.8, 0.1], [0.2, 0, 0.9, 1], [0.1, 1, 0.9, 0.1])
    options = {"budget": 1, "vote": "all_scores", "coverage": 1.0}
    answer = select(z, policy, router={"top_k": 1}, resident=[] if policy == "resident" else None, **options)
    assert answer.kept.tolist() == ([0] if policy in ("aggregate", "resident") else [0, 1, 3])
    # One position of three experts: the floor set is the first, and the place left goes by score among the two others.
    z = rows([0.9, 0.6, 0.7, 0.1], [0.8, 0.65, 0.1, 0.75])
    answer = select(z, policy, router={"top_k": 2}, resident=[] if policy == "resident" else None, **options | {"budget": 2})
    # A by weight: 0 leads, then 3; by score: 0 has 1.7, 3 has 0.85, 2 has 0.8; expert 1 with 1.25 is outside.
    assert (answer.union_size, answer.kept.tolist()) == (3, [0, 3])


@pytest.mark.parametrize("policy", FLOORED)
@pytest.mark.parametrize(("denominator", "normalise"), [("survivors", True), ("frozen", True), ("survivors", False), ("frozen", False)])
def test_denominator_says_what_is_divided_by(policy: Policy, denominator: Any, normalise: bool) -> None:
    router = {"top_k": 2, "norm_topk_prob": normalise, "routed_scaling_factor": 2.0}
    answer = select(rows([0.5, 0.5]), policy, router=router, budget=1, denominator=denominator)
    assert answer.weights.tolist() == [[2.0 if (denominator, normalise) == ("survivors", True) else 1.0, 0.0]]


@pytest.mark.parametrize("policy", BUDGETED)
def test_a_budget_of_the_union_changes_nothing_bit_for_bit(policy: Policy) -> None:
    z = np.random.default_rng(1).normal(size=(8, 16)).astype(np.float32)
    resident = [1, 2] if policy == "resident" else None
    router = {"score": "softmax", "top_k": 4, "routed_scaling_factor": 0.7}
    off = select(z, "aggregate", router=router)
    for n in (0, off.union_size, off.union_size + 1, 10**30):
        assert off.differences(select(z, policy, router=router, budget=n, denominator="frozen", floor=2, resident=resident)) == []
    assert off.differences(select(z, policy, router=router, budget=3, floor=2, resident=resident)) != []


@pytest.mark.parametrize("policy", ["aggregate", "floor", "per_position"])
def test_kept_mass_is_monotone_in_the_budget(policy: Policy) -> None:
    rng = np.random.default_rng(8)
    for grid in (1.0, 8.0):
        z = (np.rint(rng.normal(0, 2, (8, 16)) * grid) / grid).astype(np.float32)
        for vote in ("weights", "all_scores"):
            options = RoutingOptions(policy=policy, vote=vote)
            spec = RouterSpec(score="sigmoid", top_k=6)
            answers = routing.select_many([(z, spec, dataclasses.replace(options, budget=n)) for n in range(1, 17)])
            kept = [answer.mass_kept for answer in answers]
            assert kept == sorted(kept)
            assert kept[0] < kept[-1] == 1.0


@pytest.mark.parametrize("policy", POLICIES)
def test_permuting_positions_permutes_the_selection(policy: Policy) -> None:
    rng = np.random.default_rng(2)
    z, order = (rng.integers(-8, 9, (8, 16)) / 8).astype(np.float32), rng.permutation(8)
    resident = [3, 5] if policy in IRREPRODUCIBLE_POLICIES else None
    options = {"budget": 0 if policy == "cache_route" else 7, "expert_topp": 0.9, "resident": resident}
    router = {"top_k": 5}
    straight, permuted = select(z, policy, router=router, **options), select(z[order], policy, router=router, **options)
    there_and_back = dataclasses.replace(straight, ids=straight.ids[order], weights=straight.weights[order])
    assert there_and_back.differences(permuted) == []


@pytest.mark.parametrize("policy", POLICIES)
def test_the_core_inside_jit_is_the_same_function_and_ignores_padding_rows(policy: Policy) -> None:
    rng = np.random.default_rng(3)
    z = (rng.integers(-16, 17, (7, 24)) / 8).astype(np.float32)
    spec = RouterSpec(score="sigmoid", top_k=5, bias=rng.normal(0, 0.2, 24).astype(np.float32), n_group=4, topk_group=2)
    fenced: Any = {"policy": policy, "allow_irreproducible": policy in IRREPRODUCIBLE_POLICIES}
    options = RoutingOptions(expert_topp=0.8, budget=0 if policy == "cache_route" else 6, floor=2, coverage=0.7, **fenced)
    resident = rng.random(24) < 0.3
    padded, real = np.concatenate([z, np.full((3, 24), 9.0, np.float32)]), np.arange(10) < 7
    with jax.enable_x64(True):
        core = jax.jit(lambda z, real, resident: routing.select_core(z, spec, options, real_S=real, resident_E=resident))
        traced = jax.device_get(core(padded, real, resident))
    answer = routing.to_selection(traced, positions=7, top_k=5)
    assert oracle.select(z, spec, options, resident).selection.differences(answer) == []
    assert (traced.ids_SK[7:] == -1).all()
    assert not traced.weights_SK[7:].any()


def test_budget_floor_and_coverage_share_one_program() -> None:
    z, spec = rows([1, 0.9, 0.5, 0.2], [0.2, 0.5, 0.9, 1]), RouterSpec(score="sigmoid", top_k=2)
    for policy in UNIQUE:
        programs = []
        for n, m, share in ((0, 1, 1.0), (1, 1, 0.5), (3, 2, 0.75)):
            budget, routes = (0, {"route_top": m, "route_within": n}) if policy == "cache_route" else (n, {})
            options = RoutingOptions(policy=policy, budget=budget, floor=m, coverage=share, allow_irreproducible=True, **routes)
            select_experts(z, spec, options, [0])
            programs.append(routing._route_program(16, policy)._cache_size())
        assert programs[0] == programs[-1] > 0


# ---- equality with the oracle ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def mass() -> list[tuple[Case, Selection]]:
    """Random cases of all policies but `aggregate`, with the reference's answers. Few shapes, so few programs."""
    rng = np.random.default_rng(20261)
    cases = [random_case(rng, 16, (*UNIQUE, "substitute", "substitute"), max_positions=8) for _ in range(2000)]
    return list(zip(cases, routing.select_many([case.args for case in cases]), strict=True))


def test_batched_selections_equal_the_oracle_and_the_cases_are_awkward(mass: list[tuple[Case, Selection]]) -> None:
    seen: collections.Counter[str] = collections.Counter()
    acting: collections.Counter[str] = collections.Counter()
    for case, answer in mass:
        verdict = oracle.select(*case.args)
        seen.update(verdict.events)
        acting[case.options.policy] += "budget_acts" in verdict.events
        assert verdict.selection.differences(answer) == [], (case.logits.shape, case.router, case.options)
    assert min(seen[event] for event in EVENTS) >= 5, seen
    assert min(acting[policy] for policy in UNIQUE) >= 50, acting


def test_only_aggregate_and_resident_empty_a_position(mass: list[tuple[Case, Selection]]) -> None:
    emptied = {case.options.policy for case, answer in mass if answer.emptied_positions}
    assert emptied == {"resident"}


@settings(max_examples=max(100, settings().max_examples))
@given(selection_cases(max_experts=16, policies=POLICIES, max_positions=8))
def test_every_policy_equals_the_oracle_in_every_field(case: Case) -> None:
    # Batched, because the programs of the mass serve here too.
    assert oracle.select(*case.args).selection.differences(routing.select_many([case.args])[0]) == []


RIGHT_BEST, RIGHT_FILL, RIGHT_COVER, RIGHT_FLOOR = oracle.best, oracle.fill, oracle.cover, oracle.floor_of


def _floor_of_highest(chosen: list[int], weights: list[float], m: int) -> list[int]:
    return sorted(chosen, key=lambda e: (-weights[chosen.index(e)], -e))[:m]


def _fill_capped(first: list[int], votes: dict[int, int], n: int) -> tuple[list[int], bool]:
    return RIGHT_FILL(first[:n], votes, n)


def _fill_beyond(first: list[int], votes: dict[int, int], n: int) -> tuple[list[int], bool]:
    return RIGHT_FILL(first, votes, n + len(first))


def _cover_late(first: list[int], votes: dict[int, int], share: float, n: int) -> tuple[list[int], set[str]]:
    """Tests after each addition."""
    start = first + RIGHT_BEST({e: v for e, v in votes.items() if e not in first}, 1)[0] if not 0 < n <= len(first) else first
    return RIGHT_COVER(start, votes, share, n)


def _cover_more_on_equality(first: list[int], votes: dict[int, int], share: float, n: int) -> tuple[list[int], set[str]]:
    return RIGHT_COVER(first, votes, math.nextafter(share, 2), n)


def _cover_capped(first: list[int], votes: dict[int, int], share: float, n: int) -> tuple[list[int], set[str]]:
    return RIGHT_COVER(first[:n] if n else first, votes, share, n)


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("floor_of", _floor_of_highest),
        ("floor_of", lambda chosen, weights, m: chosen[:m]),
        ("fill", _fill_capped),
        ("fill", _fill_beyond),
        ("cover", _cover_late),
        ("cover", _cover_more_on_equality),
        ("cover", _cover_capped),
    ],
)
def test_each_planted_fault_is_seen(name: str, fault: Any, mass: list[tuple[Case, Selection]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(oracle, name, fault)
    assert any(oracle.select(*case.args).selection.differences(answer) for case, answer in mass)
