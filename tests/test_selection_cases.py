"""The mass comparison must see what it claims to see: each event on a case made by hand and beside it one that just misses,
and a difference planted in every field.
"""

from __future__ import annotations

import dataclasses
import io
import json
import math
from typing import Any

import numpy as np
import pytest
import selection_cases as sc
from click.testing import CliRunner
from rich.console import Console
from selection_blocks import BLOCKS_PER_FAMILY, make_block, make_blocks
from selection_reading import read_block

from colibri_jax import RouterSpec, RoutingOptions, Selection
from colibri_jax.routing_spec import POLICIES

LOGIT_OF_SCORE = {0.0: -110.0, 0.5: 0.0, 1.0: 40.0}


def events(
    scores: list[list[float]],
    *,
    bias: list[float] | None = None,
    options: dict[str, Any] | None = None,
    resident: list[int] | None = None,
    row_votes: list[int] | None = None,
    **router: Any,
) -> set[str]:
    """Events of one case whose sigmoid scores are the given 0, 0.5 and 1."""
    logits = np.array([[[LOGIT_OF_SCORE[p] for p in row] for row in scores]], np.float32)
    spec = RouterSpec(score="sigmoid", bias=None if bias is None else np.array(bias, np.float32), **router)
    chosen = RoutingOptions(allow_irreproducible=True, **(options or {}))
    cached, votes = (None if given is None else np.array(given) for given in (resident, row_votes))
    reading = read_block(spec, chosen, logits, cached, votes)
    return {event for event, found in reading.events.items() if found[0]}


def test_tie_at_the_k_boundary() -> None:
    tie = {"tie at the K boundary"}
    assert events([[1.0, 0.5, 0.5]], top_k=2) == tie
    assert events([[1.0, 0.5, 0.0]], top_k=2) == set()
    assert events([[0.5, 0.5, 0.0]], top_k=2) == set(), "a tie above the boundary decides nothing"
    assert events([[0.5, 0.5]], top_k=2) == set(), "nobody is left out"
    assert events([[0.5, 0.5, 0.5]], top_k=1, bias=[0.0, 0.25, 0.0]) == set(), "the bias breaks it"
    assert events([[0.5, 0.5, 0.0]], top_k=2, options={"expert_topk": 1}) == tie, "TOPK moves the boundary"
    assert events([[1.0, 0.5], [0.5, 0.5]], top_k=1) == tie, "one position is enough"


def test_rivals_outside_the_groups_do_not_tie() -> None:
    assert events([[1.0, 1.0, 1.0, 0.5]], top_k=2, n_group=2, topk_group=1) == set()
    assert events([[1.0, 1.0, 1.0, 0.5]], top_k=1, n_group=2, topk_group=1) == {"tie at the K boundary"}


def test_group_tie() -> None:
    assert events([[1.0, 0.5, 0.5, 1.0]], top_k=2, n_group=2, topk_group=1) == {"group tie"}
    assert events([[1.0, 1.0, 0.5, 1.0]], top_k=2, n_group=2, topk_group=1) == set()
    assert "group tie" not in events([[0.5] * 4], top_k=2, n_group=2, topk_group=2), "no group is left out"
    assert events([[0.0, 0.0, 0.0, 0.0]], bias=[2.0**-25, 1.0, 1.0, 0.0], top_k=2, n_group=2, topk_group=1) == {"group tie"}


def test_topp_equality() -> None:
    equal = {"TOPP equality"}
    four = [[0.5] * 4]
    assert events(four, top_k=4, options={"expert_topp": 0.5}) == equal
    assert events(four, top_k=4, options={"expert_topp": math.nextafter(0.5, 1)}) == set()
    assert events(four, top_k=4, options={"expert_topp": 0.6}) == set()
    assert events(four, top_k=4, options={"expert_topp": 1.0}) == set(), "1 is off"
    assert events([[0.0] * 4], top_k=4, options={"expert_topp": 0.5}) == set(), "0 >= 0 is no equality of shares"


def test_budget_acting_tie_and_emptied_position() -> None:
    disjoint = [[0.5, 0.5, 0.0, 0.0], [0.0, 0.0, 0.5, 0.5]]
    assert events(disjoint, top_k=2, options={"budget": 2}) == {"budget acting", "tie at the budget boundary", "emptied position"}
    assert events(disjoint, top_k=2, options={"budget": 3}) == {"budget acting", "tie at the budget boundary"}
    assert events(disjoint, top_k=2, options={"budget": 4}) == set()
    assert events(disjoint, top_k=2) == set()
    assert events([[1.0, 0.5, 0.0]], top_k=2, options={"budget": 1}) == {"budget acting"}
    # All weights are below half a vote, so unequal weights tie.
    faint = {"norm_topk_prob": False, "routed_scaling_factor": 2.0**-33}
    assert events([[1.0, 0.5, 0.0]], top_k=2, options={"budget": 1}, **faint) == {"budget acting", "tie at the budget boundary"}


def test_votes_follow_the_option() -> None:
    scores = [[1.0, 0.5, 0.0], [0.0, 1.0, 0.0]]
    assert "tie at the budget boundary" in events(scores, top_k=1, options={"budget": 1})
    assert "tie at the budget boundary" not in events(scores, top_k=1, options={"budget": 1, "vote": "all_scores"})


DISJOINT = [[0.5, 0.5, 0.0, 0.0], [0.0, 0.0, 0.5, 0.5]]
ACTING = "budget acting"
BUDGET_TIE = "tie at the budget boundary"


def test_floor_binding() -> None:
    assert events(DISJOINT, top_k=2, options={"policy": "floor", "budget": 1}) == {ACTING, "floor binding"}
    assert events(DISJOINT, top_k=2, options={"policy": "floor", "budget": 2}) == {ACTING}, "the floor set is the budget"
    assert events(DISJOINT, top_k=2, options={"policy": "floor", "budget": 3}) == {ACTING, BUDGET_TIE}
    assert events(DISJOINT, top_k=2, options={"policy": "floor", "budget": 1, "floor": 2}) == {"floor binding"}, "nothing is lost"


def test_coverage_stopping_at_equality() -> None:
    def found(share: float, **options: Any) -> set[str]:
        return events([[0.5] * 4], top_k=4, options={"policy": "coverage", "coverage": share, **options})

    assert found(0.5) == {ACTING, BUDGET_TIE, "coverage stopping at equality"}
    assert found(math.nextafter(0.5, 1)) == {ACTING, BUDGET_TIE}
    assert found(0.25) == {ACTING}, "the floor alone holds it"
    assert found(0.5, budget=2) == {ACTING, BUDGET_TIE}, "the budget stops it there too"
    assert found(0.5, budget=1) == {ACTING}
    assert found(1.0) == set()


def test_substitute_newcomer() -> None:
    scores = [[1.0, 1.0, 0.0, 0.5], [0.5, 0.0, 1.0, 1.0]]
    assert "substitute newcomer" in events(scores, top_k=2, options={"policy": "substitute", "budget": 2})
    assert events(scores, top_k=2, options={"policy": "floor", "budget": 2}) == {ACTING}
    grouped = {"n_group": 2, "topk_group": 1}
    assert "substitute newcomer" not in events(scores, top_k=2, options={"policy": "substitute", "budget": 2}, **grouped)


def test_per_position_acting() -> None:
    assert events(DISJOINT, top_k=2, options={"policy": "per_position", "budget": 1}) == {ACTING, BUDGET_TIE, "per_position acting"}
    assert events(DISJOINT, top_k=2, options={"policy": "per_position", "budget": 2}) == set()
    assert events([[1.0, 0.5]], top_k=2, options={"policy": "per_position", "budget": 1}) == {ACTING, "per_position acting"}


def test_cache_hit_kept() -> None:
    resident = {"policy": "resident", "budget": 2}
    assert events(DISJOINT, top_k=2, options=resident, resident=[3]) == {ACTING, BUDGET_TIE, "cache hit kept"}
    assert "cache hit kept" not in events(DISJOINT, top_k=2, options=resident, resident=[0]), "it has the votes anyway"
    assert events(DISJOINT, top_k=2, options=resident, resident=[2, 3]) == {ACTING, "emptied position", "cache hit kept"}


def test_exchanged_for_a_cached_expert() -> None:
    scores, exchanged = [[1.0, 0.5, 0.0, 0.5]], "exchanged for a cached expert"

    def found(resident: list[int], **more: int) -> set[str]:
        options = {"policy": "cache_route", "route_top": 1, "route_within": 3, **more}
        return events(scores, bias=[0, 0.25, 0, 0], top_k=2, options=options, resident=resident)

    assert found([3]) == {ACTING, exchanged}
    assert found([2]) == set(), "it is the fourth"
    assert found([2], route_within=4) == {ACTING, exchanged}
    assert found([3], route_top=2) == set()
    assert found([1, 3]) == set()
    assert found([3], route_within=2) == set()


def test_row_votes_deciding() -> None:
    votes = {"top_k": 2, "options": {"budget": 2}}
    assert "row votes deciding" not in events(DISJOINT, row_votes=[2**16, 2**16], **votes)
    assert "row votes deciding" not in events(DISJOINT, row_votes=[2, 1], **votes), "the first position wins the tie anyway"
    assert "row votes deciding" in events(DISJOINT, row_votes=[1, 2], **votes)
    alone = {"top_k": 2, "options": {"policy": "per_position", "budget": 1}}
    assert "row votes deciding" not in events(DISJOINT, row_votes=[1, 2], **alone)


def test_an_aimed_share_is_met_exactly_in_most_cases_of_its_block() -> None:
    readings = [(b, read_block(b.router, b.options, b.logits, b.resident, b.row_votes)) for b in make_blocks(8000, 5)]
    met = [reading.events["coverage stopping at equality"].mean() for _, reading in readings]
    assert max(met) > 0.9
    assert {block.options.policy for block, share in zip((b for b, _ in readings), met, strict=True) if share} == {"coverage"}


def test_blocks_repeat_and_fill_the_ranges() -> None:
    again, other = make_block(3, 17), make_block(4, 17)
    assert again.logits.tobytes() == make_block(3, 17).logits.tobytes()
    assert again.logits.tobytes() != other.logits.tobytes()
    blocks = [make_block(0, number, 1) for number in range(0, 200 * BLOCKS_PER_FAMILY, BLOCKS_PER_FAMILY)]
    shapes = np.array([block.logits.shape[1:] for block in blocks])
    assert shapes.min(axis=0).tolist() == [1, 1]
    assert shapes[:, 0].max() == 64
    assert 200 < shapes[:, 1].max() <= 256
    assert {block.router.score for block in blocks} == {"sigmoid", "softmax"}
    assert {block.router.norm_topk_prob for block in blocks} == {True, False}
    assert {block.options.denominator for block in blocks} == {"survivors", "frozen"}
    assert {block.options.vote for block in blocks} == {"weights", "all_scores"}
    assert {block.options.policy for block in blocks} == set(POLICIES)
    assert {block.row_votes is None for block in blocks} == {True, False}
    assert {block.resident.size < block.logits.shape[2] for block in blocks} == {True, False}
    assert sum(len(block.logits) for block in make_blocks(60, 0)) == 60


def _shifted(selection: Selection, field: str) -> Selection:
    """The selection with the least change of one field."""
    value = getattr(selection, field)
    if isinstance(value, np.ndarray):
        changed: Any = value.copy()
        changed.view(np.int32).flat[0] += 1  # the last bit, for weights
    else:
        changed = math.nextafter(value, 2) if isinstance(value, float) else value + 1
    return dataclasses.replace(selection, **{field: changed})


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(Selection)])
def test_one_planted_difference_is_found_and_named(field: str) -> None:
    def faulty(cases: list[Any]) -> list[Selection]:
        selections: list[Selection] = sc.by_native(cases)
        selections[2] = _shifted(selections[2], field)
        return selections

    tally = sc.compare(30, 0, {"true": sc.by_native, "faulty": faulty}, Console(file=io.StringIO()))
    assert tally.unequal_fields == {field: 1}
    assert tally.first_differences == [sc.Difference(block=0, case=2, fields=[field])]
    assert any("1 cases differ" in failure for failure in tally.failures())


@pytest.mark.parametrize("field", ["union_size", "dropped_slots", "emptied_positions", "kept"])
def test_equal_sides_that_miscount_contradict_the_third_reading(field: str) -> None:
    def miscounting(cases: list[Any]) -> list[Selection]:
        return [_shifted(selection, field) for selection in sc.by_native(cases)]

    tally = sc.compare(25, 0, {"one": miscounting, "other": miscounting}, Console(file=io.StringIO()))
    assert tally.differing_cases == 0
    assert any("25 cases contradict" in failure for failure in tally.failures())


def test_a_rare_event_fails_the_run() -> None:
    tally = sc.Tally(cases=100_000, coarse_cases=30_000)
    tally.events.update(dict.fromkeys(sc.EVENTS, 5_000))
    assert tally.failures() == []
    tally.events["group tie"] = 4_999
    assert tally.failures() == ["group tie: 4999 cases, 5000 required"]
    tally.coarse_cases = 29_999
    assert len(tally.failures()) == 2


def test_the_command_prints_json_and_fails_where_the_hard_cases_are_missing() -> None:
    result = CliRunner().invoke(sc.main, ["--cases", "25", "--json"])
    assert result.exit_code == 1, "25 cases of one position each hold no group tie"
    found = json.loads(result.stdout)
    assert (found["cases"], found["differing_cases"], found["misread_cases"]) == (25, 0, 0)
    assert set(found["events"]) == set(sc.EVENTS)
    assert any(failure.startswith("group tie") for failure in found["failures"])
