"""Weighed votes of rows: what they decide and what they must leave alone, in both implementations and through the models."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from engine_models import EVEN, converted, random_tokens
from hypothesis import given, settings
from oracles import selection as oracle
from strategies import Case, random_case, selection_cases

import colibri_jax
from colibri_jax import _native
from colibri_jax.errors import OptionError, ShapeError
from colibri_jax.reference.routing import select_many
from colibri_jax.routing_spec import FULL_VOTE, POLICIES, Policy, RouterSpec, RoutingOptions, Selection, most_voting_rows

native, reference = colibri_jax.native, colibri_jax.reference
Select = Callable[..., Selection]
both = pytest.mark.parametrize("select", [native.select_experts, reference.select_experts], ids=["native", "reference"])

# A sigmoid logit of 0 scores 0.5, of -110 scores 0. Each position's two picks are its own.
DISJOINT = np.array([[0, 0, -110, -110], [-110, -110, 0, 0]], np.float32)
TWO = RouterSpec(score="sigmoid", top_k=2)


def full(case: Case) -> npt.NDArray[np.int64] | None:
    """Full votes of all rows of a case, if they are few enough."""
    positions, experts = case.logits.shape
    return np.full(positions, FULL_VOTE) if positions <= most_voting_rows(case.router, case.options, experts) else None


# ---- rules ----------------------------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize(
    ("votes", "kept"),
    [
        (None, [0, 1]),
        ([FULL_VOTE, FULL_VOTE], [0, 1]),
        ([1, 2], [2, 3]),
        ([0, 1], [2, 3]),
        ([FULL_VOTE, FULL_VOTE - 1], [0, 1]),
        ([0, 0], [0, 1]),  # all are tied
        (np.array([1, 2], np.uint16), [2, 3]),
    ],
)
def test_votes_are_multiplied_and_ties_go_to_the_lowest_id(select: Select, votes: Any, kept: list[int]) -> None:
    chosen = select(DISJOINT, TWO, RoutingOptions(budget=2), row_votes=votes)
    assert chosen.kept.tolist() == kept
    assert (chosen.union_size, chosen.dropped_slots, chosen.emptied_positions, chosen.mass_kept) == (4, 2, 1, 0.5)


@both
def test_scores_of_all_experts_are_weighed_too(select: Select) -> None:
    # Expert 2 is the first of the second position and scores in the first one as well.
    logits = np.array([[40, -110, 0], [-110, 0, 40]], np.float32)
    one, options = RouterSpec(score="sigmoid", top_k=1), RoutingOptions(budget=1, vote="all_scores")
    assert select(logits, one, options).kept.tolist() == [2]
    assert select(logits, one, options, row_votes=[3, 1]).kept.tolist() == [0], "3 against 1.5 + 1"
    assert select(logits, one, options, row_votes=[2, 1]).kept.tolist() == [0], "2 against 2: the lowest id"


@both
@pytest.mark.parametrize("policy", ["floor", "substitute", "coverage"])
def test_a_row_without_a_vote_keeps_its_floor(select: Select, policy: Policy) -> None:
    chosen = select(DISJOINT, TWO, RoutingOptions(policy=policy, budget=3, coverage=0.99), row_votes=[0, FULL_VOTE])
    assert chosen.kept.tolist() == [0, 2, 3]
    assert chosen.emptied_positions == 0


@both
def test_resident_experts_stay_and_votes_fill_up(select: Select) -> None:
    options = RoutingOptions(policy="resident", budget=2, allow_irreproducible=True)
    assert select(DISJOINT, TWO, options, [1]).kept.tolist() == [0, 1]
    assert select(DISJOINT, TWO, options, [1], [1, 2]).kept.tolist() == [1, 2]


@both
def test_coverage_is_a_share_of_the_weighed_votes(select: Select) -> None:
    options = RoutingOptions(policy="coverage", coverage=0.75)
    assert select(DISJOINT, TWO, options).kept.tolist() == [0, 1, 2]
    # Of 4 · 1/2: expert 2 holds 3/8 and expert 0 1/8; with 3 that is 7/8.
    assert select(DISJOINT, TWO, options, row_votes=[1, 3]).kept.tolist() == [0, 2, 3]
    assert select(DISJOINT, TWO, RoutingOptions(policy="coverage", coverage=0.5), row_votes=[1, 3]).kept.tolist() == [0, 2]


@both
def test_per_position_does_not_count_them(select: Select) -> None:
    logits = np.random.default_rng(0).normal(size=(4, 12)).astype(np.float32)
    options = RoutingOptions(policy="per_position", budget=1)
    assert select(logits, TWO, options).differences(select(logits, TWO, options, row_votes=[0, 9, FULL_VOTE, 1])) == []


# ---- full votes are plain ones --------------------------------------------------------------------------------------


@settings(max_examples=300)
@given(case=selection_cases(max_experts=64, policies=("coverage", *POLICIES), max_positions=31))
def test_full_votes_change_nothing_native(case: Case) -> None:
    plain = native.select_experts(case.logits, case.router, case.options, case.resident)
    assert plain.differences(native.select_experts(case.logits, case.router, case.options, case.resident, full(case))) == []


@pytest.fixture(scope="module")
def mass() -> list[tuple[Case, Selection]]:
    """Random cases of all policies, most with votes, and the reference's answers. Few shapes, so few programs."""
    rng = np.random.default_rng(7)
    cases = [random_case(rng, 16, POLICIES, max_positions=8) for _ in range(1500)]
    return list(zip(cases, select_many([case.args for case in cases]), strict=True))


def test_full_votes_change_nothing_in_the_reference(mass: list[tuple[Case, Selection]]) -> None:
    plain = select_many([case.args[:4] for case, _ in mass])
    weighed = select_many([(*case.args[:4], full(case)) for case, _ in mass])
    assert [a.differences(b) for a, b in zip(plain, weighed, strict=True)] == [[]] * len(mass)


# ---- equality -------------------------------------------------------------------------------------------------------


def test_both_are_the_slow_oracle(mass: list[tuple[Case, Selection]]) -> None:
    decided = 0
    for case, answer in mass:
        assert oracle.select(*case.args).selection.differences(answer) == [], (case.router, case.options, case.row_votes)
        assert native.select_experts(*case.args).differences(answer) == []
        decided += bool(native.select_experts(*case.args[:4]).differences(answer))
    assert decided >= 20


@settings(max_examples=300)
@given(case=selection_cases(max_experts=64, policies=POLICIES, max_positions=12))
def test_native_is_the_slow_oracle(case: Case) -> None:
    assert native.select_experts(*case.args).differences(oracle.select(*case.args).selection) == []


def _of_the_row_before(row_votes: npt.NDArray[np.int64] | None, s: int) -> int:
    return 1 if row_votes is None else int(row_votes[s - 1])


@pytest.mark.parametrize("fault", [_of_the_row_before, lambda row_votes, s: 1], ids=["the row before's", "ignored"])
def test_each_planted_fault_is_seen(fault: Any, mass: list[tuple[Case, Selection]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(oracle, "row_vote", fault)
    assert any(oracle.select(*case.args).selection.differences(answer) for case, answer in mass)


# ---- how many rows are exact ----------------------------------------------------------------------------------------


@both
def test_sums_of_the_largest_votes_do_not_wrap(select: Select) -> None:
    # Weights are 2^10 after rounding. The last row alone has expert 1, with a vote less than all others together.
    logits = np.array([[40, -110, -110]] * 30 + [[-110, 40, -110]], np.float32)
    router = RouterSpec(score="sigmoid", top_k=1, routed_scaling_factor=float(np.nextafter(2.0**10, 0)))
    votes = [FULL_VOTE] * 31
    assert select(logits, router, RoutingOptions(budget=1), row_votes=votes).kept.tolist() == [0]
    assert select(logits[:30], router, RoutingOptions(policy="coverage", coverage=0.5), row_votes=votes[:30]).kept.tolist() == [0]
    same = select(logits, router, RoutingOptions(policy="coverage", coverage=1e-9), row_votes=votes)
    assert same.differences(oracle.select(logits, router, RoutingOptions(policy="coverage", coverage=1e-9), None, votes).selection) == []


@pytest.mark.parametrize(
    ("policy", "vote", "router", "experts", "rows"),
    [
        ("aggregate", "weights", {"routed_scaling_factor": 1023.0, "norm_topk_prob": False}, 256, 31),
        ("coverage", "weights", {"routed_scaling_factor": 1023.0}, 256, 31),
        ("coverage", "weights", {"routed_scaling_factor": 1023.0, "norm_topk_prob": False}, 256, 3),
        ("coverage", "weights", {"score": "softmax", "routed_scaling_factor": 1023.0, "norm_topk_prob": False}, 256, 31),
        ("coverage", "weights", {"routed_scaling_factor": 2.5, "norm_topk_prob": False}, 256, 31),
        ("coverage", "all_scores", {}, 256, 31),
        ("coverage", "all_scores", {}, 1024, 31),
        ("coverage", "all_scores", {}, 8192, 3),
        ("coverage", "all_scores", {}, 10**5, 0),
        ("coverage", "all_scores", {"score": "softmax"}, 8000, 31),
    ],
)
def test_the_bound_holds_for_the_largest_votes_there_are(policy: Policy, vote: Any, router: Any, experts: int, rows: int) -> None:
    spec = RouterSpec(**{"score": "sigmoid", "top_k": 8} | router)
    assert most_voting_rows(spec, RoutingOptions(policy=policy, vote=vote), experts) == rows
    largest = 2**32 if vote == "all_scores" else round(spec.routed_scaling_factor * 2**32)
    one_in_all = spec.score == "softmax" or (vote == "weights" and spec.norm_topk_prob)
    most = 1 if one_in_all or policy != "coverage" else 8 if vote == "weights" else experts
    assert rows * most * largest * FULL_VOTE < 2**63


@both
def test_what_is_no_vote_is_refused(select: Select) -> None:
    for wrong in ([1], [1, 2, 3], [[1, 2]], [1.0, 2.0], [True, False], []):
        with pytest.raises(ShapeError, match="row votes"):
            select(DISJOINT, TWO, RoutingOptions(), row_votes=wrong)
    for wrong in ([-1, 0], [0, FULL_VOTE + 1]):
        with pytest.raises(OptionError, match="out of range"):
            select(DISJOINT, TWO, RoutingOptions(), row_votes=wrong)
    with pytest.raises(OptionError, match="at most 31 rows"):
        select(np.zeros((32, 4), np.float32), TWO, RoutingOptions(), row_votes=[1] * 32)
    coverage = RoutingOptions(policy="coverage", coverage=0.5)
    heavy = RouterSpec(score="sigmoid", top_k=2, norm_topk_prob=False, routed_scaling_factor=1023.0)
    with pytest.raises(OptionError, match="at most 15 rows"):
        select(np.zeros((16, 4), np.float32), heavy, coverage, row_votes=[1] * 16)


def test_the_extension_refuses_what_would_wrap() -> None:
    common: dict[str, Any] = {"score": "sigmoid", "top_k": 2, "bias": None, "n_group": 1, "topk_group": 1, "norm_topk_prob": True}
    common |= {"routed_scaling_factor": 1.0, "expert_topk": 0, "expert_topp": 0.0, "budget": 1, "policy": "aggregate"}
    common |= {"denominator": "survivors", "vote": "weights"}

    def select(rows: int, votes: list[int], **more: Any) -> None:
        _native.select_experts(np.zeros((rows, 4), np.float32), row_votes=np.array(votes, np.int64), **common, **more)

    refused = ((32, [1] * 32, "not exact"), (2, [1], "other rows"), (1, [-1], "out of range"), (1, [1 << 17], "out of range"))
    for rows, votes, what in refused:
        with pytest.raises(OptionError, match=what):
            select(rows, votes)
    with pytest.raises(OptionError, match="routed alone"):
        select(2, [1, 1], rows_alone=True)


# ---- models ---------------------------------------------------------------------------------------------------------

VOTES = [FULL_VOTE, 40000, 9, 0]


@pytest.fixture(scope="module")
def container(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # Two layers alike: each other kind would be compiled for.
    config = {**EVEN, "num_hidden_layers": 2, "indexer_types": ["full", "full"], "mlp_layer_types": ["sparse", "sparse"]}
    return converted(tmp_path_factory.mktemp("model"), config)


@pytest.mark.parametrize("backend", ["native", "reference"])
def test_a_verified_step_weighs_its_rows(backend: str, container: Path) -> None:
    routing = RoutingOptions(budget=3)
    lm: Any = colibri_jax.load(container, backend, routing=routing, budget_scopes=["verify"], context_positions=32)
    tokens = random_tokens(EVEN, 4)
    seen = []
    for votes in (None, [FULL_VOTE] * 4, VOTES):
        if backend == "native":
            lm.set_trace(True)
        logits = lm.forward(tokens, scope="verify", row_votes=votes)
        router_logits = lm.trace["router_logits"] if backend == "native" else lm.router_logits
        moe = lm.config.moe_layers[0]
        router = reference_router(container, moe)
        expected = native.select_experts(np.array(router_logits[0]), router, routing, row_votes=votes)
        assert lm.selections[0].differences(expected) == []
        lm.rewind(4)
        seen.append((logits.tobytes(), [s.kept.tolist() for s in lm.selections]))
    assert seen[0] == seen[1]
    assert seen[0][1] != seen[2][1]


def reference_router(container: Path, layer: int) -> RouterSpec:
    lm: Any = colibri_jax.load(container, "reference", context_positions=32)
    router: RouterSpec = lm.router(layer)
    return router


@pytest.mark.parametrize("backend", ["native", "reference"])
def test_only_rows_that_are_verified_together_are_weighed(backend: str, container: Path) -> None:
    lm: Any = colibri_jax.load(container, backend, routing=RoutingOptions(budget=3), context_positions=32)
    tokens = random_tokens(EVEN, 4)
    for scope, rows in (("decode", "together"), ("prefill", "together"), ("verify", "alone")):
        with pytest.raises(OptionError, match="verified together"):
            lm.forward(tokens, scope=scope, rows=rows, row_votes=VOTES)
    with pytest.raises(ShapeError, match="row votes"):
        lm.forward(tokens, scope="verify", row_votes=VOTES[:3])
    with pytest.raises(OptionError, match="out of range"):
        lm.forward(tokens, scope="verify", row_votes=[*VOTES[:3], FULL_VOTE + 1])
    assert lm.position == 0
