"""Native routing against cases worked out by hand from the rules, then against the reference and the slow oracle on random ones.

No expected value is recorded, each is derived.

Scores that are exact by construction make that possible: a sigmoid logit of 0 scores 0.5, of 40 scores 1, of -110 scores 0.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracles import selection as oracle
from strategies import Case, selection_cases

from colibri_jax import RouterSpec, RoutingOptions, Selection, _native, native, reference
from colibri_jax.errors import ConfigError, NonFiniteLogitError, OptionError, ShapeError

LOGIT_OF_SCORE = {0.0: -110.0, 0.5: 0.0, 1.0: 40.0}
SMALLEST_NORMAL = 2.0**-126


def rows(*scores: list[float]) -> npt.NDArray[np.float32]:
    """Sigmoid logits whose scores are the given 0, 0.5 and 1."""
    return np.array([[LOGIT_OF_SCORE[p] for p in row] for row in scores], np.float32)


def router(top_k: int, bias: list[float] | None = None, **fields: object) -> RouterSpec:
    settings: dict[str, object] = {"score": "sigmoid"} | fields
    return RouterSpec(top_k=top_k, bias=None if bias is None else np.array(bias, np.float32), **settings)  # type: ignore[arg-type]


def select(logits: npt.ArrayLike, spec: RouterSpec, **options: object) -> Selection:
    return native.select_experts(np.asarray(logits, np.float32), spec, RoutingOptions(**options))  # type: ignore[arg-type]


def scores_of(logits: list[float], score: str) -> npt.NDArray[np.float32]:
    """Native scores of all experts by id: with K = E, no normalisation and factor 1 a weight is the score."""
    chosen = select([logits], router(len(logits), score=score, norm_topk_prob=False))
    by_id = np.empty(len(logits), np.float32)
    by_id[chosen.ids[0]] = chosen.weights[0]
    return by_id


def exp_by_integers(x: float) -> float:
    """The rule's exponential in Python's unbounded integers."""
    t = round(max(x, -100.0) * (1.4426950408889634 * 2**30))
    whole, fraction = divmod(t, 2**30)
    m = 15
    for c in (219, 2838, 32755, 330788, 2863360, 20654775, 119194166, 515882496, 1488522236, 2147483648):
        m = c + m * fraction // 2**30
    return math.ldexp(m, whole - 31)


def flushed(value: float) -> np.float32:
    rounded = np.float32(value)
    return np.float32(0) if rounded < SMALLEST_NORMAL else rounded


# ---- scores ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["fine", "eighths", "tiny", "huge"])
def test_sigmoid_scores_are_the_integer_rule_bit_for_bit(kind: str) -> None:
    rng = np.random.default_rng(7)
    logits = {
        "fine": rng.normal(size=4000) * 4,
        "eighths": rng.integers(-880, 881, 200) / 8,
        "tiny": rng.normal(size=200) * 1e-30,
        "huge": rng.normal(size=200) * 1e38,
    }[kind].astype(np.float32)
    expected = []
    for z in logits.tolist():
        e = exp_by_integers(-abs(z))
        expected.append(flushed(1.0 / (1.0 + e) if z >= 0 else e / (1.0 + e)))
    assert scores_of(logits.tolist(), "sigmoid").tobytes() == np.array(expected, np.float32).tobytes()


@pytest.mark.parametrize("spread", [1e-6, 1.0, 40.0, 3e38])
def test_softmax_scores_are_the_integer_rule_bit_for_bit(spread: float) -> None:
    logits = (np.random.default_rng(8).uniform(-1, 1, 100) * spread).astype(np.float32).tolist()
    exponentials = [exp_by_integers(z - max(logits)) for z in logits]
    total = float(sum(round(e * 2**50) for e in exponentials)) * 2.0**-50
    expected = np.array([flushed(e / total) for e in exponentials], np.float32)
    assert scores_of(logits, "softmax").tobytes() == expected.tobytes()


def test_the_exponential_is_near_the_true_one() -> None:
    for x in np.linspace(-87, 0, 50).tolist():
        assert exp_by_integers(x) == pytest.approx(math.exp(x), rel=2.0**-26)


@pytest.mark.parametrize(("logit", "is_zero"), [(-87.0, False), (-88.0, True), (-99.0, True), (-3e38, True)])
def test_scores_below_the_smallest_normal_are_zero(logit: float, is_zero: bool) -> None:
    score = scores_of([logit, 0.0], "sigmoid")[0]
    assert (score == 0.0) == is_zero
    assert is_zero or score >= SMALLEST_NORMAL


@pytest.mark.parametrize(("factor", "expected"), [(2.0**-125 * (1 - 2.0**-30), SMALLEST_NORMAL), (2.0**-125 * (1 - 2.0**-20), 0.0)])
def test_weights_are_rounded_before_they_are_compared_with_the_smallest_normal(factor: float, expected: float) -> None:
    chosen = select(rows([0.5]), router(1, norm_topk_prob=False, routed_scaling_factor=factor))
    assert chosen.weights.tolist() == [[expected]]


# ---- choice ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("logits", "top_k", "ids"),
    [
        ([0.0, 0.0, 0.0, 0.0], 2, [0, 1]),
        ([0.0, 40.0, 40.0, 40.0, 0.0], 2, [1, 2]),
        ([0.0, 40.0, 90.0], 1, [1]),  # both score exactly 1: scores are compared, not logits
        ([-0.0, 0.0, -0.0], 2, [0, 1]),
        ([0.0, -0.0, 0.0], 2, [0, 1]),
        ([-110.0, -100.0, -109.0], 2, [0, 1]),  # all score 0
        ([1.0, 3.0, 2.0], 3, [1, 2, 0]),
    ],
)
def test_ties_at_the_boundary_go_to_the_lowest_id(logits: list[float], top_k: int, ids: list[int]) -> None:
    assert select([logits], router(top_k)).ids.tolist() == [ids]


@pytest.mark.parametrize(
    ("logits", "top_k", "ids"),
    [
        ([2.0, 2.0, 2.0], 2, [0, 1]),
        ([-110.0, 0.0, -105.0, -101.0], 3, [1, 0, 2]),  # all but the largest score 0
        ([0.0, 1.0, 1.0, 1.0], 2, [1, 2]),
    ],
)
def test_softmax_ties_go_to_the_lowest_id(logits: list[float], top_k: int, ids: list[int]) -> None:
    assert select([logits], router(top_k, score="softmax")).ids.tolist() == [ids]


def test_bias_moves_the_choice_and_not_the_weight() -> None:
    chosen = select(rows([1.0, 0.5, 0.5]), router(2, [-1.0, 0.0, 0.25], norm_topk_prob=False))
    assert chosen.ids.tolist() == [[2, 1]]
    assert chosen.weights.tolist() == [[0.5, 0.5]]


def test_choice_is_a_float32_sum() -> None:
    # 1 + 2^-25 rounds to 1 in float32, so the two choices tie; in float64 expert 1 would win.
    assert select(rows([1.0, 1.0]), router(1, [0.0, 2.0**-25])).ids.tolist() == [[0]]
    assert select(rows([1.0, 1.0]), router(1, [0.0, 2.0**-23])).ids.tolist() == [[1]]


def test_zero_choices_of_either_sign_are_equal() -> None:
    assert select(rows([0.0, 0.0, 0.0]), router(1, [-0.0, 0.0, -0.0])).ids.tolist() == [[0]]


def test_weights_are_normalised_only_as_the_model_says() -> None:
    logits = rows([1.0, 0.5, 0.5, 0.0])
    assert select(logits, router(3, routed_scaling_factor=2.5)).weights.tolist() == [[1.25, 0.625, 0.625]]
    assert select(logits, router(3, norm_topk_prob=False, routed_scaling_factor=2.5)).weights.tolist() == [[2.5, 1.25, 1.25]]
    assert select(rows([0.0, 0.0]), router(2)).weights.tolist() == [[0.0, 0.0]]


def test_weights_are_float64_arithmetic_rounded_once() -> None:
    logits = np.random.default_rng(9).normal(size=(50, 6)).astype(np.float32)
    chosen = select(logits, router(6, routed_scaling_factor=1.7))
    bare = select(logits, router(6, norm_topk_prob=False))
    for weights, scores in zip(chosen.weights, bare.weights.astype(float).tolist(), strict=True):
        total = 0.0
        for score in scores:
            total += score
        assert weights.tolist() == [float(np.float32(score * 1.7 / (total + 1e-20))) for score in scores]


# ---- groups ---------------------------------------------------------------------------------------------------------


def test_group_ties_go_to_the_lowest_group() -> None:
    assert select(rows([0.5] * 8), router(4, n_group=4, topk_group=2)).ids.tolist() == [[0, 1, 2, 3]]
    assert select(rows([0.5] * 4 + [1.0] * 4), router(2, n_group=4, topk_group=1)).ids.tolist() == [[4, 5]]


def test_a_group_is_judged_by_its_two_largest_choices() -> None:
    assert select(rows([0.5, 0.5, 0.5, 1.0, 0.5, 0.0]), router(3, n_group=2, topk_group=1)).ids.tolist() == [[3, 4, 5]]


def test_group_scores_are_float32_sums() -> None:
    tie = router(1, [1.0, 0.0, 1.0, 2.0**-25], n_group=2, topk_group=1)
    assert select(rows([0.0] * 4), tie).ids.tolist() == [[0]]


def test_experts_outside_the_groups_are_excluded_and_not_zero() -> None:
    spec = router(2, [-1.0, -1.0, -2.0, -2.0], n_group=2, topk_group=1)
    assert select(rows([0.5] * 4), spec).ids.tolist() == [[0, 1]]


def test_keeping_every_group_limits_nothing() -> None:
    logits = np.random.default_rng(1).integers(-4, 5, (6, 12)) / 8
    assert select(logits, router(5, n_group=3, topk_group=3)).differences(select(logits, router(5))) == []


# ---- TOPK and TOPP --------------------------------------------------------------------------------------------------


def test_topk_keeps_the_first_and_normalises_over_them() -> None:
    chosen = select(rows([0.5, 1.0, 0.5, 0.5]), router(3), expert_topk=2)
    assert chosen.ids.tolist() == [[1, 0, -1]]
    np.testing.assert_array_equal(chosen.weights[0], np.array([2 / 3, 1 / 3, 0], np.float32))
    assert chosen.kept.tolist() == [0, 1]


def test_topk_above_k_changes_nothing() -> None:
    logits = rows([0.5, 1.0, 0.5, 0.5])
    assert select(logits, router(3), expert_topk=10**12).differences(select(logits, router(3))) == []


@pytest.mark.parametrize(
    ("share", "ids"),
    [
        (0.5, [0, 1, -1, -1]),  # 1.0 >= 0.5 · 2.0: equality is enough
        (math.nextafter(0.5, 1), [0, 1, 2, -1]),
        (math.nextafter(0.5, 0), [0, 1, -1, -1]),
        (0.25, [0, -1, -1, -1]),
        (1e-9, [0, -1, -1, -1]),
        (math.nextafter(1, 0), [0, 1, 2, 3]),
        (0.0, [0, 1, 2, 3]),
        (1.0, [0, 1, 2, 3]),
    ],
)
def test_topp_keeps_the_shortest_prefix_that_reaches_the_share(share: float, ids: list[int]) -> None:
    assert select(rows([0.5] * 4), router(4), expert_topp=share).ids.tolist() == [ids]


def test_topp_goes_by_score_and_leaves_router_order() -> None:
    # Router order by choice is 2, 1, 0; the scores are equal, so TOPP's order is 0, 1, 2 and it keeps the first two of that.
    chosen = select(rows([0.5, 0.5, 0.5]), router(3, [0.0, 1.0, 2.0]), expert_topp=0.5)
    assert chosen.ids.tolist() == [[1, 0, -1]]
    # Expert 0 is chosen first for its bias, but expert 1 alone has two thirds of the score.
    assert select(rows([0.5, 1.0]), router(2, [3.0, 0.0]), expert_topp=0.6).ids.tolist() == [[1, -1]]


def test_topp_keeps_one_where_every_score_is_zero() -> None:
    assert select(rows([0.0, 0.0]), router(2), expert_topp=0.9).ids.tolist() == [[0, -1]]


def test_topk_comes_before_topp() -> None:
    # Of three halves TOPK leaves two, of which one has the half; of all three it would take two.
    assert select(rows([0.5] * 3), router(3), expert_topk=2, expert_topp=0.5).ids.tolist() == [[0, -1, -1]]


# ---- budget ---------------------------------------------------------------------------------------------------------

TWO_DISJOINT = ([0.5, 0.5, 0.0, 0.0], [0.0, 0.0, 0.5, 0.5])


def test_a_tie_at_the_budget_goes_to_the_lowest_id_and_can_empty_a_position() -> None:
    chosen = select(rows(*TWO_DISJOINT), router(2), budget=2)
    assert chosen.ids.tolist() == [[0, 1], [-1, -1]]
    assert chosen.weights.tolist() == [[0.5, 0.5], [0.0, 0.0]]
    assert chosen.kept.tolist() == [0, 1]
    assert (chosen.union_size, chosen.dropped, chosen.dropped_slots, chosen.emptied_positions) == (4, 2, 2, 1)
    assert chosen.mass_kept == 0.5


@pytest.mark.parametrize(
    ("norm", "denominator", "weight"), [(True, "survivors", 1.0), (True, "frozen", 0.5), (False, "survivors", 0.5), (False, "frozen", 0.5)]
)
def test_survivors_carry_the_scale_that_norm_and_denominator_say(norm: bool, denominator: str, weight: float) -> None:
    chosen = select(rows(*TWO_DISJOINT), router(2, norm_topk_prob=norm), budget=3, denominator=denominator)
    assert chosen.ids.tolist() == [[0, 1], [2, -1]]
    assert chosen.weights.tolist() == [[0.5, 0.5], [weight, 0.0]]
    assert (chosen.dropped, chosen.dropped_slots, chosen.emptied_positions, chosen.mass_kept) == (1, 1, 0, 0.75)


def test_frozen_divides_by_the_sum_after_topk_and_topp() -> None:
    # TOPK leaves 1 and 0.5 of three; the budget then takes the half away; frozen still divides by 1.5.
    logits = rows([1.0, 0.5, 0.5], [1.0, 0.0, 0.0])
    chosen = select(logits, router(3), expert_topk=2, budget=1, denominator="frozen")
    np.testing.assert_array_equal(chosen.weights[:, 0], np.array([1 / 1.5, 1.0], np.float32))
    assert chosen.ids.tolist() == [[0, -1, -1], [0, -1, -1]]


def test_removal_keeps_router_order_and_packs_left() -> None:
    chosen = select(rows([0.5, 1.0, 0.5], [0.5, 0.0, 0.5]), router(3, [0.1, 0.0, 0.7]), budget=2)
    # Position 0 chose 2, 1, 0 and position 1 chose 2, 0, 1: votes are 0.75, 0.5, 0.75, so expert 1 goes.
    assert chosen.ids.tolist() == [[2, 0, -1], [2, 0, -1]]


@pytest.mark.parametrize("score", ["sigmoid", "softmax"])
@pytest.mark.parametrize("extra", [0, 1, 10**12])
def test_a_budget_that_holds_the_union_changes_no_bit(score: str, extra: int) -> None:
    logits = np.random.default_rng(2).normal(size=(5, 40)).astype(np.float32)
    off = select(logits, router(6, score=score))
    assert select(logits, router(6, score=score), budget=off.union_size + extra).differences(off) == []
    assert select(logits, router(6, score=score), budget=off.union_size - 1).differences(off) != []
    assert off.kept.tolist() == sorted(set(off.ids.ravel().tolist()))


def test_a_position_that_lost_nothing_keeps_its_weights() -> None:
    logits = np.random.default_rng(3).normal(size=(16, 64)).astype(np.float32)
    off, cut = select(logits, router(4)), select(logits, router(4), budget=20)
    same = (off.ids == cut.ids).all(axis=1)
    assert 0 < same.sum() < 16
    np.testing.assert_array_equal(off.weights[same], cut.weights[same])
    assert cut.dropped_slots == int((off.ids >= 0).sum() - (cut.ids >= 0).sum())


def test_votes_are_integers_rounded_half_to_even() -> None:
    # Weights of 0.5 and 0.25 units of 2^-32 both round to no vote: the lower id stays, though its weight is smaller.
    tie = router(2, norm_topk_prob=False, routed_scaling_factor=2.0**-33)
    assert select(rows([0.5, 1.0]), tie, budget=1).kept.tolist() == [0]
    # 1.5 and 0.75 units round to 2 and 1.
    clear = router(2, norm_topk_prob=False, routed_scaling_factor=3 * 2.0**-33)
    assert select(rows([0.5, 1.0]), clear, budget=1).kept.tolist() == [1]


def test_mass_is_one_where_there_is_none() -> None:
    chosen = select(rows([0.0, 0.0], [0.0, 0.0]), router(2), budget=1)
    assert (chosen.kept.tolist(), chosen.mass_kept, chosen.dropped_slots) == ([0], 1.0, 2)


def test_votes_of_all_scores_count_experts_that_were_not_chosen() -> None:
    # Final weights tie at 1; the scores of all experts sum to 1 and 1.5.
    logits = rows([1.0, 0.5, 0.0], [0.0, 1.0, 0.0])
    assert select(logits, router(1), budget=1).kept.tolist() == [0]
    assert select(logits, router(1), budget=1, vote="all_scores").kept.tolist() == [1]


def test_votes_of_all_scores_count_experts_outside_the_groups() -> None:
    logits = rows([1.0, 1.0, 0.5, 1.0], [0.0, 0.0, 0.5, 1.0])
    spec = router(1, n_group=2, topk_group=1)
    assert select(logits, spec, budget=1).kept.tolist() == [0]
    assert select(logits, spec, budget=1, vote="all_scores").kept.tolist() == [3]


def test_only_members_of_the_union_are_kept() -> None:
    # Expert 0 has the highest score everywhere, but its bias keeps it out of every choice.
    chosen = select(rows([1.0, 0.5, 0.0], [1.0, 0.0, 0.5]), router(1, [-9.0, 0.0, 0.0]), budget=1, vote="all_scores")
    assert chosen.kept.tolist() == [1]


@pytest.mark.parametrize("vote", ["weights", "all_scores"])
def test_the_order_of_positions_decides_nothing(vote: str) -> None:
    rng = np.random.default_rng(4)
    logits = (rng.normal(size=(48, 64)) * 3).astype(np.float32)
    spec = router(6, (rng.normal(size=64) / 20).tolist(), n_group=8, topk_group=4)
    straight = select(logits, spec, budget=20, vote=vote)
    assert straight.dropped > 0
    for _ in range(5):
        order = rng.permutation(48)
        shuffled = select(logits[order], spec, budget=20, vote=vote)
        restored = Selection(**(vars(shuffled) | {"ids": shuffled.ids[np.argsort(order)], "weights": shuffled.weights[np.argsort(order)]}))
        assert straight.differences(restored) == []


def test_native_names_the_experts_that_the_budget_removed() -> None:
    fields = _native.select_experts(
        rows(*TWO_DISJOINT),
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
        policy="aggregate",
        denominator="survivors",
        vote="weights",
    )
    assert fields["removed"].tolist() == [3]


# ---- the whole, on cases nobody thought of ---------------------------------------------------------------------------


@st.composite
def few_shapes(draw: st.DrawFn) -> tuple[npt.NDArray[np.float32], RouterSpec, RoutingOptions]:
    """Cases in shapes that the reference compiles four programs for: S 2 to 8, E up to 16, with and without groups."""
    grouped = draw(st.booleans())
    n_experts = 16 if grouped else draw(st.integers(1, 16))
    grid = st.integers(-880, 880).map(lambda n: n / 8)
    value = draw(st.sampled_from([st.sampled_from([0.0, -0.0, 0.125, 40.0, -110.0]), grid, st.floats(-9, 9, width=32)]))
    drawn = [draw(st.lists(value, min_size=n_experts, max_size=n_experts)) for _ in range(draw(st.integers(2, 8)))]
    spec = router(
        draw(st.integers(1, 8 if grouped else n_experts)),
        draw(st.none() | st.lists(value, min_size=n_experts, max_size=n_experts)),
        score=draw(st.sampled_from(["sigmoid", "softmax"])),
        n_group=4 if grouped else 1,
        topk_group=draw(st.integers(2, 4)) if grouped else 1,
        norm_topk_prob=draw(st.booleans()),
        routed_scaling_factor=draw(st.sampled_from([1.0, 2.5, 2.0**-33])),
    )
    options = RoutingOptions(
        expert_topk=draw(st.integers(0, 5)),
        expert_topp=draw(st.sampled_from([0.0, 0.25, 1 / 3, 0.5, 0.9])),
        budget=draw(st.integers(0, 12)),
        denominator=draw(st.sampled_from(["survivors", "frozen"])),
        vote=draw(st.sampled_from(["weights", "all_scores"])),
    )
    return np.array(drawn, np.float32), spec, options


@given(few_shapes())
def test_native_and_reference_are_equal_in_every_field(case: tuple[npt.NDArray[np.float32], RouterSpec, RoutingOptions]) -> None:
    assert native.select_experts(*case).differences(reference.select_experts(*case)) == []


@given(selection_cases(max_experts=64))
def test_native_is_the_slow_oracle(case: Case) -> None:
    assert native.select_experts(*case.args).differences(oracle.select(*case.args).selection) == []


# ---- edges and errors -----------------------------------------------------------------------------------------------


def test_one_expert_is_chosen() -> None:
    chosen = select([[-200.0]], router(1, score="softmax"), budget=1)
    assert (chosen.ids.tolist(), chosen.weights.tolist(), chosen.kept.tolist()) == ([[0]], [[1.0]], [0])


def test_dtypes_are_the_contract() -> None:
    chosen = select(rows([0.5, 1.0]), router(2), budget=1)
    assert [chosen.ids.dtype, chosen.weights.dtype, chosen.kept.dtype] == [np.int32, np.float32, np.int32]
    assert [type(chosen.union_size), type(chosen.mass_kept)] == [int, float]


def test_strided_logits_are_read_as_they_are_indexed() -> None:
    wide = np.random.default_rng(5).normal(size=(20, 8)).astype(np.float32)
    view = wide.T[::2, ::-1]
    assert select(view, router(3), budget=4).differences(select(view.copy(), router(3), budget=4)) == []


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("score", ["sigmoid", "softmax"])
def test_a_non_finite_logit_is_an_error_that_names_position_and_expert(value: float, score: str) -> None:
    logits = np.zeros((3, 5), np.float32)
    logits[1, 3] = logits[2, 0] = value
    with pytest.raises(NonFiniteLogitError, match=r"position 1, expert 3") as caught:
        select(logits, router(2, score=score))
    assert caught.value.got == str(value)


def test_arguments_are_checked_before_the_extension_sees_them() -> None:
    with pytest.raises(ShapeError):
        native.select_experts(np.zeros((2, 4)), router(2), RoutingOptions())
    with pytest.raises(ShapeError):
        select(np.zeros(4), router(2))
    with pytest.raises(ShapeError):
        select(np.zeros((1, 4)), router(2, [0.0] * 3))
    with pytest.raises(ConfigError):
        select(np.zeros((1, 4)), router(5))
    with pytest.raises(ConfigError):
        select(np.zeros((1, 6)), router(2, n_group=4, topk_group=2))
    with pytest.raises(OptionError):
        select(np.zeros((1, 4)), router(2), budget=(1, 2))


def test_more_experts_than_the_integer_softmax_can_sum_are_refused() -> None:
    assert select(np.zeros((1, 8191)), router(1, score="softmax")).ids.tolist() == [[0]]
    with pytest.raises(ConfigError, match="softmax"):
        select(np.zeros((1, 8192)), router(1, score="softmax"))
