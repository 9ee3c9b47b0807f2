"""Rows routed alone in one step: equal to decoding them one by one, in both implementations, and counted as the Selection says."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from engine_models import EVEN, ODD, converted, random_tokens
from hypothesis import given, settings
from model_runs import REPRODUCIBLE
from strategies import Case, selection_cases

import colibri_jax
from colibri_jax.errors import NonFiniteLogitError, OptionError
from colibri_jax.generate.protocol import LanguageModel
from colibri_jax.routing_spec import POLICIES, RouterSpec, RoutingOptions, Selection

native, reference = colibri_jax.native, colibri_jax.reference

# ---- selections -----------------------------------------------------------------------------------------------------


def joined(rows: Sequence[Selection], members: int) -> Selection:
    """The selection of a step from those of its rows, as the definition says; `members` experts were chosen before the cut."""
    kept = np.array(sorted({int(e) for row in rows for e in row.kept}), np.int32)
    mass = 0.0
    for row in rows:
        mass += row.mass_kept
    return Selection(
        ids=np.vstack([row.ids for row in rows]),
        weights=np.vstack([row.weights for row in rows]),
        kept=kept,
        union_size=members,
        dropped=members - len(kept),
        dropped_slots=sum(row.dropped_slots for row in rows),
        emptied_positions=sum(row.emptied_positions for row in rows),
        mass_kept=mass / len(rows),
    )


def by_single_steps(case: Case) -> Selection:
    rows = [native.select_experts(case.logits[i : i + 1], case.router, case.options) for i in range(len(case.logits))]
    return joined(rows, native.select_experts(case.logits, case.router, case.options.without_budget()).union_size)


@settings(max_examples=400)
@given(case=selection_cases(max_experts=64, policies=REPRODUCIBLE, max_positions=12))
def test_native_rows_are_those_of_single_steps(case: Case) -> None:
    assert native.select_rows_alone(case.logits, case.router, case.options).differences(by_single_steps(case)) == []


@settings(max_examples=40)
@given(case=selection_cases(max_experts=8, policies=REPRODUCIBLE, max_positions=8))
def test_reference_and_native_are_equal_in_every_field(case: Case) -> None:
    ours = reference.select_rows_alone(case.logits, case.router, case.options)
    assert ours.differences(native.select_rows_alone(case.logits, case.router, case.options)) == []


LOGITS = np.random.default_rng(3).normal(0, 1, (5, 12)).astype(np.float32)
ROUTER = RouterSpec(score="sigmoid", top_k=4)


def test_the_comparisons_see_rows_that_share_a_budget() -> None:
    case = Case(LOGITS, ROUTER, RoutingOptions(budget=3))
    together = native.select_experts(*case.args[:3])
    assert {"ids", "weights", "kept"} <= set(together.differences(by_single_steps(case)))


def test_counts_by_hand() -> None:
    """Two rows of two experts, one in common; each row keeps its best."""
    logits = np.array([[2.0, 1.0, -9.0], [-9.0, 1.0, 2.0]], np.float32)
    for select in (native.select_rows_alone, reference.select_rows_alone):
        found = select(logits, RouterSpec(score="sigmoid", top_k=2), RoutingOptions(budget=1))
        assert found.ids.tolist() == [[0, -1], [2, -1]]
        assert (found.kept.tolist(), found.union_size, found.dropped, found.dropped_slots) == ([0, 2], 3, 1, 2)
        # What one row drops and another keeps is not dropped from the step.
        logits_kept = np.array([[2.0, 1.0, -9.0], [-9.0, 2.0, 1.0]], np.float32)
        found = select(logits_kept, RouterSpec(score="sigmoid", top_k=2), RoutingOptions(budget=1))
        assert (found.kept.tolist(), found.union_size, found.dropped, found.dropped_slots) == ([0, 1], 3, 1, 2)


@pytest.mark.parametrize("select", [native.select_rows_alone, reference.select_rows_alone], ids=["native", "reference"])
def test_what_cannot_be_routed_alone_is_named(select: Callable[..., Selection]) -> None:
    with pytest.raises(OptionError, match="what the cache holds"):
        select(LOGITS, ROUTER, RoutingOptions(policy="resident", budget=2, allow_irreproducible=True))
    spoilt = LOGITS.copy()
    spoilt[3, 7] = np.nan
    with pytest.raises(NonFiniteLogitError, match="position 3, expert 7"):
        select(spoilt, ROUTER, RoutingOptions(budget=2))


# ---- models ---------------------------------------------------------------------------------------------------------

ROUTINGS = {
    "plain": RoutingOptions(),
    "aggregate": RoutingOptions(budget=2),
    "frozen, TOPK": RoutingOptions(budget=1, denominator="frozen", expert_topk=3),
    "floor, TOPP": RoutingOptions(budget=1, policy="floor", floor=2, expert_topp=0.9),
    "substitute": RoutingOptions(budget=2, policy="substitute", vote="all_scores"),
    "coverage": RoutingOptions(policy="coverage", coverage=0.6),
    "per_position": RoutingOptions(budget=2, policy="per_position"),
}


@pytest.fixture(scope="module", params=["ODD", "EVEN"])
def container(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    config = {"ODD": ODD, "EVEN": EVEN}[request.param]
    return converted(tmp_path_factory.mktemp(request.param), config), config


def decoded(lm: LanguageModel, prompt: Sequence[int], rows: Sequence[int]) -> list[npt.NDArray[np.float32]]:
    lm.reset()
    lm.forward(prompt, scope="prefill", logits="last")
    return [lm.forward([token], scope="decode")[0] for token in rows]


def verified(lm: LanguageModel, prompt: Sequence[int], following: Sequence[int], **options: Any) -> npt.NDArray[np.float32]:
    lm.reset()
    lm.forward(prompt, scope="prefill", logits="last")
    return lm.forward(following, scope="verify", **options)


@pytest.mark.parametrize("name", ROUTINGS)
@pytest.mark.parametrize("scopes", [("decode",), ("verify",)])
def test_native_logits_are_those_of_decoding(container: tuple[Path, dict[str, Any]], name: str, scopes: tuple[Any, ...]) -> None:
    path, config = container
    tokens = random_tokens(config, 29)
    lm = colibri_jax.load(path, cache_experts=2, routing=ROUTINGS[name], budget_scopes=scopes, context_positions=64)
    expected = np.stack(decoded(lm, tokens[:20], tokens[20:]))
    assert verified(lm, tokens[:20], tokens[20:], rows="alone").tobytes() == expected.tobytes()
    cuts = (ROUTINGS[name].budget or ROUTINGS[name].policy == "coverage") and scopes == ("decode",)
    acted = lm.stats.scopes["verify"].budget_acted_layer_steps
    assert (acted > 0) == bool(cuts)
    if cuts:
        # Rows that share their experts' budget, or have none, answer something else.
        assert verified(lm, tokens[:20], tokens[20:], rows="together").tobytes() != expected.tobytes()


def test_the_reference_decodes_and_verifies_the_same_bits_as_native(tmp_path: Path) -> None:
    # Two layers alike, and steps of 1 and 8 rows: each other kind or count would be compiled for.
    config = {**EVEN, "num_hidden_layers": 2, "indexer_types": ["full", "full"], "mlp_layer_types": ["sparse", "sparse"]}
    path, tokens = converted(tmp_path, config), random_tokens(config, 16)
    for name in ("aggregate", "substitute"):
        options: dict[str, Any] = {"routing": ROUTINGS[name], "context_positions": 32}
        theirs, ours = colibri_jax.load(path, "reference", **options), colibri_jax.load(path, cache_experts=2, **options)
        rows = verified(theirs, tokens[:8], tokens[8:], rows="alone")
        selections = theirs.selections
        assert rows.tobytes() == verified(ours, tokens[:8], tokens[8:], rows="alone").tobytes()
        assert [a.differences(b) for a, b in zip(selections, ours.selections, strict=True)] == [[]] * len(selections)
        assert rows.tobytes() == np.stack(decoded(theirs, tokens[:8], tokens[8:])).tobytes()
        assert theirs.stats.scopes["verify"].budget_acted_layer_steps > 0


def test_only_a_verification_by_a_policy_of_logits_has_rows_alone(container: tuple[Path, dict[str, Any]]) -> None:
    path, config = container
    tokens = random_tokens(config, 4)
    lm = colibri_jax.load(path, cache_experts=2, context_positions=16)
    with pytest.raises(OptionError, match="in verification"):
        lm.forward(tokens, scope="decode", rows="alone")
    with pytest.raises(OptionError, match="unknown rows"):
        lm.forward(tokens, scope="verify", rows="apart")  # type: ignore[arg-type]
    assert "resident" in POLICIES
    fenced = dataclasses.replace(ROUTINGS["aggregate"], policy="resident", allow_irreproducible=True)
    looking = colibri_jax.load(path, cache_experts=2, context_positions=16, routing=fenced)
    with pytest.raises(OptionError, match="what the cache holds"):
        looking.forward(tokens, scope="verify", rows="alone")
    assert (lm.position, looking.position) == (0, 0)


def test_verified_rows_count_as_verification(container: tuple[Path, dict[str, Any]]) -> None:
    path, config = container
    lm = colibri_jax.load(path, cache_experts=2, context_positions=16, routing=ROUTINGS["aggregate"])
    lm.forward(random_tokens(config, 3), scope="verify", rows="alone")
    counted = lm.stats.scopes
    assert (counted["verify"].steps, counted["verify"].positions, counted["decode"].steps) == (1, 3, 0)
    assert counted["verify"].kept_experts == sum(s.kept.size for s in lm.selections)
    # Each expert of the union is looked up once, however many rows use it.
    assert counted["verify"].cache_hits + counted["verify"].cache_misses == counted["verify"].kept_experts
