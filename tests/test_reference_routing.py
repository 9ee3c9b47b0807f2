"""The reference's routing and budget: equal to the oracle in every field, and the rules one by one on small cases."""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from oracles import selection as oracle
from strategies import Case, random_case, selection_cases

from colibri_jax.errors import ConfigError, NonFiniteLogitError, OptionError, ShapeError
from colibri_jax.reference import budget, exact, routing, select_experts
from colibri_jax.routing_spec import POLICIES, RouterSpec, RoutingOptions, Selection

EVENTS = ("k_tie", "budget_tie", "topp_equality", "group_tie", "emptied", "budget_acts")


def x64(function: Callable[..., Any], *arrays: Any) -> Any:
    """A jitted function's answer on NumPy arrays, in 64-bit arithmetic."""
    with jax.enable_x64(True):
        return jax.device_get(jax.jit(function)(*arrays))


def logits(*rows: list[float]) -> np.ndarray:
    return np.array(rows, np.float32)


def ids(selection: Selection) -> list[list[int]]:
    return [[int(e) for e in row if e >= 0] for row in selection.ids]


# ---- equality with the oracle ------------------------------------------------------------------------------------


@settings(max_examples=max(150, settings().max_examples))
@given(selection_cases(max_experts=64))
def test_selection_equals_the_oracle_in_every_field(case: Case) -> None:
    assert oracle.select(*case.args).selection.differences(select_experts(*case.args)) == []


@pytest.fixture(scope="module")
def mass() -> list[tuple[Case, Selection]]:
    """Random cases up to 256 experts with the reference's answers."""
    rng = np.random.default_rng(20260)
    cases = [random_case(rng) for _ in range(300)]
    return list(zip(cases, routing.select_many([case.args for case in cases]), strict=True))


def test_batched_selections_equal_the_oracle_and_the_cases_are_awkward(mass: list[tuple[Case, Selection]]) -> None:
    seen: collections.Counter[str] = collections.Counter()
    for case, answer in mass:
        verdict = oracle.select(*case.args)
        seen.update(verdict.events)
        assert verdict.selection.differences(answer) == [], (case.logits.shape, case.router, case.options)
    assert min(seen[event] for event in EVENTS) >= 10, seen


def _ties_to_the_highest(values: dict[int, float], n: int) -> tuple[list[int], bool]:
    return sorted(values, key=lambda i: (-values[i], -i))[:n], False


def _one_more_on_equality(p: list[float], chosen: list[int], share: float) -> tuple[list[int], list[float], bool]:
    return RIGHT_TOPP(p, chosen, float(np.nextafter(share, 1.0)) if 0.0 < share < 1.0 else share)


RIGHT_TOPP, RIGHT_TOTAL = oracle.topp, oracle.total_of


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("best", _ties_to_the_highest),
        ("topp", _one_more_on_equality),
        ("small_is_zero", oracle.float32),
        ("exp", lambda x: math.exp(max(x, -100.0))),
        ("units", lambda w: math.floor(w * 2.0**32)),
    ],
)
def test_each_planted_fault_is_seen(name: str, fault: Any, mass: list[tuple[Case, Selection]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(oracle, name, fault)
    assert any(oracle.select(*case.args).selection.differences(answer) for case, answer in mass)


@pytest.mark.parametrize("seed", range(6))
def test_scores_are_summed_in_router_order_to_the_last_bit(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another order moves Σ by a last bit of float64; a scale that puts a weight on a float32 midpoint makes that visible."""
    # Scores of a narrow range add up exactly in any order; these spread over more than 2^29.
    z = np.random.default_rng(seed).normal(-10, 10, (1, 64)).astype(np.float32)
    p = oracle.scores(z[0].tolist(), "sigmoid")
    order = sorted(range(64), key=lambda e: (-p[e], e))
    right, wrong = RIGHT_TOTAL(p, order), RIGHT_TOTAL(p, order[::-1])
    assert right != wrong
    near = (1 + 2.0**-24) * right / p[order[0]]
    scales = near + np.arange(-16, 17) * np.spacing(near)
    telling = [s for s in scales if oracle.float32(p[order[0]] * s / right) != oracle.float32(p[order[0]] * s / wrong)]
    router = RouterSpec(score="sigmoid", top_k=64, routed_scaling_factor=float(telling[0]))
    answer = select_experts(z, router, RoutingOptions())
    assert oracle.select(z, router, RoutingOptions()).selection.differences(answer) == []
    monkeypatch.setattr(oracle, "total_of", lambda p, chosen: RIGHT_TOTAL(p, chosen[::-1]))
    assert oracle.select(z, router, RoutingOptions()).selection.differences(answer) == ["weights"]


# ---- the core inside other jitted code ---------------------------------------------------------------------------


def test_core_with_static_options_equals_select_experts_and_ignores_padding_rows() -> None:
    rng = np.random.default_rng(3)
    bias = rng.normal(0, 0.2, 24).astype(np.float32)
    router = RouterSpec(score="sigmoid", top_k=5, bias=bias, n_group=4, topk_group=2, routed_scaling_factor=2.5)
    options = RoutingOptions(expert_topk=4, expert_topp=0.8, budget=6)
    z = (rng.integers(-16, 17, (7, 24)) / 8).astype(np.float32)
    expected = select_experts(z, router, options)
    plain = x64(lambda z: routing.select_core(z, router, options), z)
    assert expected.differences(routing.to_selection(plain, positions=7, top_k=5)) == []

    padded, real = np.concatenate([z, np.full((3, 24), 9.0, np.float32)]), np.arange(10) < 7
    without_bias = dataclasses.replace(router, bias=None)
    traced = x64(lambda z, b, r: routing.select_core(z, without_bias, options, bias_E=b, real_S=r), padded, bias, real)
    assert expected.differences(routing.to_selection(traced, positions=7, top_k=5)) == []
    assert (traced.ids_SK[7:] == -1).all()
    assert not traced.weights_SK[7:].any()


@pytest.mark.parametrize("score", ["sigmoid", "softmax"])
def test_static_core_equals_the_oracle_where_constants_could_be_folded(score: Any) -> None:
    rng = np.random.default_rng(5)
    z = rng.normal(0, 3, (64, 48)).astype(np.float32)
    router = RouterSpec(score=score, top_k=9, routed_scaling_factor=2.5)
    options = RoutingOptions(expert_topp=0.7, budget=20, denominator="frozen", vote="all_scores")
    core = x64(lambda z: routing.select_core(z, router, options), z)
    assert oracle.select(z, router, options).selection.differences(routing.to_selection(core, positions=64, top_k=9)) == []


def test_core_reports_a_non_finite_logit_from_inside_jit() -> None:
    router, z = RouterSpec(score="softmax", top_k=2), np.zeros((3, 4), np.float32)
    z[1, 2], z[2, 0] = np.inf, np.nan
    core = x64(lambda z: routing.select_core(z, router, RoutingOptions()), z)
    with pytest.raises(NonFiniteLogitError, match="position 1, expert 2"):
        routing.to_selection(core, positions=3, top_k=2)


def test_core_refuses_32_bit_arithmetic_and_no_process_flag_is_set() -> None:
    select_experts(np.zeros((1, 2), np.float32), RouterSpec(score="sigmoid", top_k=1), RoutingOptions())
    assert jnp.zeros(1).dtype == jnp.float32
    with pytest.raises(OptionError, match="64-bit"):
        routing.select_core(jnp.zeros((1, 2)), RouterSpec(score="sigmoid", top_k=1), RoutingOptions())


# ---- the rules ---------------------------------------------------------------------------------------------------


def test_tie_at_the_k_boundary_goes_to_the_lowest_id() -> None:
    answer = select_experts(logits([0, 1, 0.5, 1, 0.5, 0.5]), RouterSpec(score="sigmoid", top_k=3), RoutingOptions())
    assert ids(answer) == [[1, 3, 2]]


def test_signed_zeros_are_one_value() -> None:
    assert ids(select_experts(logits([-0.0, 0.0, -0.0]), RouterSpec(score="sigmoid", top_k=2), RoutingOptions())) == [[0, 1]]
    keys = x64(lambda v: exact.sort_keys(v, jnp.arange(4), jnp.ones(4, bool)), np.array([-0.0, 0.0, -1e-45, 1e-45]))
    assert np.argsort(-keys).tolist() == [3, 0, 1, 2]


def test_bias_moves_the_choice_and_not_the_weight() -> None:
    router = RouterSpec(score="sigmoid", top_k=1, bias=np.array([0, 1], np.float32), norm_topk_prob=False)
    answer = select_experts(logits([0, -1]), router, RoutingOptions())
    assert ids(answer) == [[1]]
    assert answer.weights[0, 0] == pytest.approx(1 / (1 + math.e), rel=1e-7)


def test_group_tie_goes_to_the_lowest_group_and_outsiders_are_excluded() -> None:
    router = RouterSpec(score="sigmoid", top_k=2, n_group=3, topk_group=1)
    # Groups (1, 0) and (0, 1) tie on the sum of their two; the third has the single best expert.
    assert ids(select_experts(logits([-9, -9, 1, 0, 0, 1]), router, RoutingOptions())) == [[2, 3]]
    negative = dataclasses.replace(router, bias=np.full(6, -2, np.float32))
    assert ids(select_experts(logits([-9, -9, 1, 0, 0, 1]), negative, RoutingOptions())) == [[2, 3]]


def test_topk_keeps_the_first_and_topp_keeps_router_order() -> None:
    router = RouterSpec(score="sigmoid", top_k=4, bias=np.array([0, 0, 0, 3], np.float32))
    z = logits([2, 1, 0, -4])
    assert ids(select_experts(z, router, RoutingOptions(expert_topk=2))) == [[3, 0]]
    assert ids(select_experts(z, router, RoutingOptions(expert_topk=9))) == [[3, 0, 1, 2]]
    # By score the order is 0, 1, 2, 3; all four are needed for 99.9 %, and the answer is in router order again.
    assert ids(select_experts(z, router, RoutingOptions(expert_topp=0.999))) == [[3, 0, 1, 2]]
    assert ids(select_experts(z, router, RoutingOptions(expert_topp=0.5))) == [[0, 1]]


@pytest.mark.parametrize(
    ("share", "kept"), [(0.5, 2), (math.nextafter(0.5, 1), 3), (math.nextafter(0.5, 0), 2), (0.0, 4), (1.0, 4), (1e-9, 1), (5e-324, 1)]
)
def test_topp_keeps_the_shortest_prefix_that_reaches_the_share_exactly(share: float, kept: int) -> None:
    answer = select_experts(logits([0, 0, 0, 0]), RouterSpec(score="sigmoid", top_k=4), RoutingOptions(expert_topp=share))
    assert ids(answer) == [list(range(kept))]
    assert answer.weights[0, :kept].tolist() == [float(np.float32(1 / kept))] * kept
    assert answer.mass_kept == 1.0


def test_tie_at_the_budget_boundary_goes_to_the_lowest_id() -> None:
    answer = select_experts(logits([0, 0, -9, -9], [-9, -9, 0, 0]), RouterSpec(score="sigmoid", top_k=2), RoutingOptions(budget=3))
    assert answer.kept.tolist() == [0, 1, 2]
    assert ids(answer) == [[0, 1], [2]]
    assert (answer.union_size, answer.dropped, answer.dropped_slots, answer.emptied_positions) == (4, 1, 1, 0)
    assert answer.weights.tolist() == [[0.5, 0.5], [1.0, 0.0]]
    assert answer.mass_kept == 0.75


def test_a_position_can_be_emptied_and_is_counted() -> None:
    answer = select_experts(logits([1, -9], [-9, 0]), RouterSpec(score="sigmoid", top_k=1), RoutingOptions(budget=1))
    assert ids(answer) == [[0], []]
    assert answer.weights.tolist() == [[1.0], [0.0]]
    assert (answer.emptied_positions, answer.dropped_slots) == (1, 1)


@pytest.mark.parametrize(
    ("denominator", "normalise", "expected"),
    [("survivors", True, 2.0), ("frozen", True, 1.0), ("survivors", False, 1.0), ("frozen", False, 1.0)],
)
def test_denominator_says_what_survivors_are_divided_by(denominator: Any, normalise: bool, expected: float) -> None:
    router = RouterSpec(score="sigmoid", top_k=2, norm_topk_prob=normalise, routed_scaling_factor=2.0)
    options = RoutingOptions(budget=1, denominator=denominator)
    assert select_experts(logits([0, 0]), router, options).weights.tolist() == [[expected, 0.0]]


def test_scores_of_all_experts_can_vote_but_only_the_union_stands_for_election() -> None:
    # Expert 2 is everybody's second and nobody's first, so it is outside the union.
    z = logits([3, -2, 2.5], [3, -2, 2.5], [-2, 3, 2.5])
    router = RouterSpec(score="softmax", top_k=1)
    answer = select_experts(z, router, RoutingOptions(budget=1, vote="all_scores"))
    assert (answer.kept.tolist(), answer.union_size) == ([0], 2)
    # By weight two positions elect expert 2; by score the first position's vote and the others' second choice elect 0.
    z = logits([1, 0.9, -9], [0.9, -9, 1], [0.9, -9, 1])
    by_weight = select_experts(z, RouterSpec(score="sigmoid", top_k=1), RoutingOptions(budget=1))
    by_score = select_experts(z, RouterSpec(score="sigmoid", top_k=1), RoutingOptions(budget=1, vote="all_scores"))
    assert (by_weight.kept.tolist(), by_score.kept.tolist()) == ([2], [0])


@pytest.mark.parametrize("vote", ["weights", "all_scores"])
def test_a_budget_of_the_union_changes_nothing_bit_for_bit(vote: Any) -> None:
    z = np.random.default_rng(1).normal(size=(9, 30)).astype(np.float32)
    router = RouterSpec(score="softmax", top_k=4, routed_scaling_factor=0.7)
    off = select_experts(z, router, RoutingOptions())
    for n in (off.union_size, off.union_size + 1, 10**30):
        assert off.differences(select_experts(z, router, RoutingOptions(budget=n, vote=vote, denominator="frozen"))) == []
    assert select_experts(z, router, RoutingOptions(budget=off.union_size - 1, vote=vote)).dropped == 1


def test_permuting_positions_permutes_the_selection() -> None:
    rng = np.random.default_rng(2)
    z, order = (rng.integers(-8, 9, (40, 32)) / 8).astype(np.float32), rng.permutation(40)
    router, options = RouterSpec(score="sigmoid", top_k=6), RoutingOptions(budget=9, expert_topp=0.9)
    straight, permuted = select_experts(z, router, options), select_experts(z[order], router, options)
    there_and_back = dataclasses.replace(straight, ids=straight.ids[order], weights=straight.weights[order])
    assert there_and_back.differences(permuted) == []


def test_scores_and_weights_below_the_smallest_normal_are_zero() -> None:
    unscaled = RouterSpec(score="sigmoid", top_k=2, norm_topk_prob=False)
    answer = select_experts(logits([-87.25, -87.5]), unscaled, RoutingOptions())
    assert answer.weights[0, 0] > 0
    assert answer.weights[0, 1] == 0
    assert ids(answer) == [[0, 1]]
    # Both scores are 0: nothing to divide, nothing to keep, and still two experts.
    zero = select_experts(logits([-88, -110]), RouterSpec(score="sigmoid", top_k=2), RoutingOptions(budget=1))
    assert (zero.weights.tolist(), zero.mass_kept, ids(zero)) == ([[0.0, 0.0]], 1.0, [[0]])
    scaled = dataclasses.replace(unscaled, routed_scaling_factor=2.0**-126)
    assert select_experts(logits([0, 100]), scaled, RoutingOptions()).weights.tolist() == [[2.0**-126, 0.0]]


# ---- refusals ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_non_finite_logit_is_named_before_anything_else_is_checked(value: float) -> None:
    z = np.zeros((3, 5), np.float32)
    z[1, 4] = z[2, 0] = value
    with pytest.raises(NonFiniteLogitError, match="position 1, expert 4"):
        select_experts(z, RouterSpec(score="sigmoid", top_k=2), RoutingOptions(budget=(1, 2)))


def test_wrong_shapes_options_and_routers_are_refused() -> None:
    router = RouterSpec(score="sigmoid", top_k=2)
    with pytest.raises(ShapeError):
        select_experts(np.zeros(4, np.float32), router, RoutingOptions())
    with pytest.raises(OptionError, match="single budget"):
        select_experts(np.zeros((1, 4), np.float32), router, RoutingOptions(budget=(1, 2)))
    with pytest.raises(ConfigError):
        select_experts(np.zeros((1, 1), np.float32), router, RoutingOptions())


def test_every_policy_is_registered() -> None:
    assert tuple(budget.POLICIES) == POLICIES


# ---- exact arithmetic --------------------------------------------------------------------------------------------


def test_jitted_exp_equals_integer_exp_in_numpy_and_python() -> None:
    rng = np.random.default_rng(4)
    x = -np.concatenate(
        [rng.uniform(0, 110, 200_000), rng.exponential(1, 200_000), 2.0 ** rng.uniform(-40, 0, 50_000), np.arange(0, 880) / 8]
    )
    got = x64(exact.exp, x)
    assert (got == oracle.exp_array(x)).all()
    assert [oracle.exp(float(v)) for v in x[::500]] == got[::500].tolist()


def test_exp_is_good_to_about_half_a_float32_ulp() -> None:
    x = -np.random.default_rng(6).uniform(0, 87, 100_000)
    truth = np.array([math.exp(v) for v in x])
    got = x64(exact.exp, x)
    assert np.abs(got / truth - 1).max() < 2.0**-28
    # Rounding to float32 alone costs up to half a unit in the last place.
    ulp = np.spacing(truth.astype(np.float32)).astype(np.float64)
    assert (np.abs(got.astype(np.float32).astype(np.float64) - truth) / ulp).max() < 0.5 + 2.0**-4
    assert x64(exact.exp, np.array([0.0, -0.0])).tolist() == [1.0, 1.0]
    assert x64(exact.exp, np.array([-101.0, -np.inf])).tolist() == [oracle.exp(-100.0)] * 2


def test_rounding_to_float32_is_numpys_with_subnormals_zeroed() -> None:
    edge = 2.0**-126 + np.arange(-64, 65) * 2.0**-153
    halfway = (1 + np.arange(64) * 2.0**-24) * 3.0
    x = np.concatenate([edge, halfway, [0.0, 2.0**-149, 1e-300, 1.0, 1023.0], np.random.default_rng(7).uniform(0, 2, 1000)])
    assert x64(exact.round_to_float32, x).tolist() == [oracle.small_is_zero(float(v)) for v in x]


def test_float32_sums_and_widening_keep_subnormals() -> None:
    rng = np.random.default_rng(8)
    bits = rng.integers(0, 2**32, (2, 4000), dtype=np.uint64).astype(np.uint32)
    bits[:, :2000] &= np.uint32(0x80FFFFFF)
    a, b = np.nan_to_num(bits.view(np.float32), posinf=1, neginf=-1)
    got = x64(lambda a, b: exact.add_float32(exact.widen(a), exact.widen(b)), a, b)
    with np.errstate(over="ignore"):
        assert (got == (a + b).astype(np.float64)).all()
    assert (x64(exact.widen, a) == a.astype(np.float64)).all()


@pytest.mark.parametrize(
    ("shape", "shared"),
    [((64, 64), (64, 1)), ((1, 64), (1, 1)), ((64, 64), (1, 64)), ((64,), ()), ((3, 5, 7), (3, 5, 1)), ((9, 9), (9, 9))],
)
def test_a_shared_divisor_divides(shape: tuple[int, ...], shared: tuple[int, ...]) -> None:
    rng = np.random.default_rng(10)
    a, b = rng.uniform(0, 1, shape) * rng.integers(0, 2, shape), rng.uniform(1, 10, shared)
    assert (x64(exact.divide, a, b) == a / b).all()
    assert (x64(jax.vmap(exact.divide), a[None], b[None]) == a / b).all()
    # The same with a divisor that is a constant of the program.
    assert (x64(lambda a: exact.divide(a, jnp.asarray(b)), a) == a / b).all()
    if shape == (64, 64):
        assert (x64(lambda a, b: a / b, a, b) != a / b).any(), "the plain quotient would do as well"


def test_softmax_divides_by_the_sum_to_the_last_bit() -> None:
    """Quotients within a float64 ulp of a float32 midpoint are rare, so they are compared before they are rounded."""
    z = np.random.default_rng(11).normal(0, 3, (200, 64)).astype(np.float32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exact, "round_to_float32", lambda x: x)
        got = x64(lambda z: exact.softmax(z, jnp.ones(64, bool)), z)
        patch.setattr(oracle, "small_is_zero", lambda x: x)
        assert got.tolist() == [oracle.scores(row, "softmax") for row in z.tolist()]


@pytest.mark.parametrize("traced", [True, False])
def test_weights_divide_by_the_positions_sum_to_the_last_bit(traced: bool) -> None:
    """Compared before rounding, as above."""
    rng = np.random.default_rng(12)
    score, total, scale = rng.uniform(0, 1, (64, 32)).astype(np.float32).astype(np.float64), rng.uniform(1, 9, (64, 1)), 2.5
    controls = routing.controls_of(RouterSpec(score="sigmoid", top_k=4, routed_scaling_factor=scale), RoutingOptions(), 64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exact, "round_to_float32", lambda x: x)
        if traced:
            got = x64(routing.weight, score, total, controls)
        else:
            got = x64(lambda score, total: routing.weight(score, total, controls), score, total)
    assert (got == score * scale / (total + 1e-20)).all()


def test_running_sums_are_added_from_the_left() -> None:
    x = np.random.default_rng(9).uniform(0, 1, (3, 200)) * 10.0 ** np.arange(200)[::-1].clip(0, 12)
    assert (x64(exact.running_sums, x) == np.cumsum(x, axis=1)).all()
    assert (x64(functools.partial(jnp.sum, axis=1), x) != np.cumsum(x, axis=1)[:, -1]).any()
