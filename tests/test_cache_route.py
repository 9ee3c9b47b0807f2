"""Policy cache_route: cached experts in the place of others, in both implementations, through the engine and in its statistics."""

from __future__ import annotations

import dataclasses
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from click.testing import CliRunner
from engine_models import EVEN, converted, random_tokens
from hypothesis import given, settings
from oracles import selection as oracle
from rich.console import Console
from strategies import Case, random_case, selection_cases

import colibri_jax
from colibri_jax.cli import main
from colibri_jax.cli.options import SHIPPED_MODEL
from colibri_jax.container.directory import read_config
from colibri_jax.errors import FencedOptionError, OptionError
from colibri_jax.generate.loop import Generation
from colibri_jax.generate.notes import budget_notes
from colibri_jax.generate.report import RunReport
from colibri_jax.quality.report import rule
from colibri_jax.quality.settings import Choices, describe, make_settings
from colibri_jax.quality.steps import StepShape
from colibri_jax.reference.routing import select_many
from colibri_jax.routing_spec import Policy, RouterSpec, RoutingOptions, Scope, Selection, check_rows_alone
from colibri_jax.stats import ScopeStats, Stats

native, reference = colibri_jax.native, colibri_jax.reference
Select = Callable[..., Selection]
both = pytest.mark.parametrize("select", [native.select_experts, reference.select_experts], ids=["native", "reference"])

CACHE_ROUTE: tuple[Policy, ...] = ("cache_route",)
# Sigmoid scores 1/2; the bias makes the ranking 0, 1, … 7. An expert's score is told apart by where it is not 1/2.
BIAS = -np.arange(8, dtype=np.float32) / 8
FLAT = np.zeros((1, 8), np.float32)


def routed(top: int = 2, within: int = 12, **fields: Any) -> RoutingOptions:
    return RoutingOptions(policy="cache_route", route_top=top, route_within=within, allow_irreproducible=True, **fields)


def router(top_k: int, **fields: Any) -> RouterSpec:
    return RouterSpec(**{"score": "sigmoid", "top_k": top_k, "bias": BIAS} | fields)


# ---- rules ----------------------------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize(
    ("resident", "top", "within", "picks"),
    [
        ([], 2, 12, [0, 1, 2, 3]),
        (range(8), 2, 12, [0, 1, 2, 3]),
        ([6], 2, 12, [0, 1, 2, 6]),
        ([4, 5, 6], 2, 12, [0, 1, 4, 5]),  # in rank order, and the first two always stay
        ([4, 5, 6], 3, 12, [0, 1, 2, 4]),
        ([4, 5, 6], 4, 12, [0, 1, 2, 3]),
        ([4, 5, 6], 9, 12, [0, 1, 2, 3]),
        ([4, 5, 6, 7], 0, 12, [4, 5, 6, 7]),
        ([3, 7], 2, 12, [0, 1, 3, 7]),  # a cached pick goes before an uncached one of more choice
        ([2, 7], 2, 12, [0, 1, 2, 7]),
        ([2, 3, 7], 2, 12, [0, 1, 2, 3]),
        ([6], 2, 6, [0, 1, 2, 3]),  # it is the seventh
        ([6], 2, 7, [0, 1, 2, 6]),
        ([4], 2, 4, [0, 1, 2, 3]),
        ([5, 6], 2, 0, [0, 1, 2, 3]),  # off
        (np.arange(8) == 6, 2, 12, [0, 1, 2, 6]),
    ],
)
def test_what_comes_in_and_what_stays(select: Select, resident: Any, top: int, within: int, picks: list[int]) -> None:
    chosen = select(FLAT, router(4), routed(top, within), list(resident) if isinstance(resident, range) else resident)
    assert chosen.ids.tolist() == [picks], "in descending order of choice"
    assert chosen.weights.tolist() == [[0.25] * 4]
    swapped = len(set(picks) - {0, 1, 2, 3})
    assert (chosen.kept.tolist(), chosen.union_size, chosen.dropped) == (picks, 4, swapped)
    assert (chosen.dropped_slots, chosen.emptied_positions, chosen.mass_kept) == (swapped, 0, 1.0)


@both
def test_a_substitute_uses_its_own_score(select: Select) -> None:
    # Expert 0 scores 1 and expert 2, which comes in for 1, scores 1/2 as 1 did not: 1 scores 1 too.
    logits, spec = np.array([[40, 40, 0, 0]], np.float32), router(2, bias=np.array([0, 0, 0.25, 0], np.float32), routed_scaling_factor=3.0)
    survivors = select(logits, spec, routed(1), [2])
    assert (survivors.ids.tolist(), survivors.weights.tolist(), survivors.mass_kept) == ([[0, 2]], [[2.0, 1.0]], 0.75)
    frozen = select(logits, spec, routed(1, denominator="frozen"), [2])
    assert frozen.weights.tolist() == [[1.5, 0.75]], "of the sum 2 from before"
    plain = select(logits, dataclasses.replace(spec, norm_topk_prob=False), routed(1), [2])
    assert plain.weights.tolist() == [[3.0, 1.5]]


@both
def test_picks_come_from_the_positions_groups(select: Select) -> None:
    grouped = router(2, n_group=2, topk_group=1)
    assert select(FLAT, grouped, routed(1), [2, 4]).ids.tolist() == [[0, 2]]
    assert select(FLAT, grouped, routed(1), [4]).ids.tolist() == [[0, 1]]


@both
def test_a_position_has_as_many_as_after_topk_and_topp(select: Select) -> None:
    assert select(FLAT, router(4), routed(1, expert_topk=2), [5, 6]).ids.tolist() == [[0, 5, -1, -1]]
    # The third is chosen for its bias and scores nothing: TOPP takes it, and without a cache it does not come back.
    logits = np.array([[0, 0, -110, 0, 0, 0, 0, 0]], np.float32)
    bias = np.array([3, 2, 1.5, 1, 0, 0, 0, 0], np.float32)
    spec, topp = router(4, bias=bias), {"expert_topp": 0.99}
    off = select(logits, spec, RoutingOptions(**topp))
    assert off.ids.tolist() == [[0, 1, 3, -1]]
    assert off.differences(select(logits, spec, routed(**topp), [])) == []
    assert off.differences(select(logits, spec, routed(**topp), list(range(8)))) == []
    # Its ranking goes on after its picks: 0, 1, 3, then 2, 4.
    assert select(logits, spec, routed(2, 4, **topp), [2, 4]).ids.tolist() == [[0, 1, 2, -1]]
    assert select(logits, spec, routed(2, 5, **topp), [4]).ids.tolist() == [[0, 1, 4, -1]]


@both
def test_positions_do_not_know_of_each_other(select: Select) -> None:
    logits = np.random.default_rng(1).normal(size=(6, 16)).astype(np.float32)
    spec, options, cache = router(4, bias=None), routed(1, 8), [1, 3, 5, 7, 9]
    together = select(logits, spec, options, cache)
    off = select(logits, spec, RoutingOptions())
    swapped = 0
    for row in range(6):
        alone = select(logits[row : row + 1], spec, options, cache)
        assert (alone.ids.tobytes(), alone.weights.tobytes()) == (together.ids[row].tobytes(), together.weights[row].tobytes())
        swapped += alone.dropped_slots
        if not alone.dropped_slots:
            assert alone.weights[0].tobytes() == off.weights[row].tobytes()
    assert together.dropped_slots == swapped > 0
    assert together.union_size == off.union_size
    assert together.dropped == len(set(off.kept.tolist()) - set(together.kept.tolist()))


# ---- options --------------------------------------------------------------------------------------------------------


def test_it_is_fenced_takes_no_budget_and_can_be_turned_off() -> None:
    with pytest.raises(FencedOptionError, match="what the cache holds"):
        RoutingOptions(policy="cache_route")
    for budget in (4, (0, 4)):
        with pytest.raises(OptionError, match="has no budget"):
            routed(budget=budget)
    assert routed(budget=(0, 0)).for_layer(1).budget == 0
    for field in ("route_top", "route_within"):
        with pytest.raises(OptionError, match=field):
            RoutingOptions(**{field: -1})
    with pytest.raises(OptionError, match="routed alone"):
        check_rows_alone(routed())
    assert (routed().rows_of_drafts, RoutingOptions().rows_of_drafts) == ("together", "alone")
    assert RoutingOptions().without_budget() == RoutingOptions()


@both
def test_without_budget_it_is_off_and_what_is_resident_has_to_be_said(select: Select) -> None:
    off = select(FLAT, router(4), RoutingOptions())
    assert off.differences(select(FLAT, router(4), routed().without_budget(), [5, 6])) == []
    assert off.differences(select(FLAT, router(4), routed(), [5, 6])) != []
    with pytest.raises(OptionError, match="resident"):
        select(FLAT, router(4), routed())


# ---- equality -------------------------------------------------------------------------------------------------------


@settings(max_examples=500)
@given(case=selection_cases(max_experts=64, policies=CACHE_ROUTE, max_positions=8))
def test_native_is_the_slow_oracle(case: Case) -> None:
    assert native.select_experts(*case.args).differences(oracle.select(*case.args).selection) == []


@pytest.fixture(scope="module")
def mass() -> list[tuple[Case, Selection]]:
    """Random cases and the reference's answers. Few shapes, so few programs."""
    rng = np.random.default_rng(11)
    cases = [random_case(rng, 16, CACHE_ROUTE, max_positions=8) for _ in range(1000)]
    return list(zip(cases, select_many([case.args for case in cases]), strict=True))


def test_the_reference_is_the_slow_oracle(mass: list[tuple[Case, Selection]]) -> None:
    exchanged = 0
    for case, answer in mass:
        verdict = oracle.select(*case.args)
        assert verdict.selection.differences(answer) == [], (case.router, case.options, case.resident)
        exchanged += "exchanged" in verdict.events
    assert exchanged >= 100


RIGHT = oracle.prefer_cached


def _score_of_the_displaced(p: list[float], new: list[int], old: list[int]) -> list[float]:
    changed = list(p)
    for came, left in zip((e for e in new if e not in old), (e for e in old if e not in new), strict=True):
        changed[came] = p[left]
    return changed


FAULTS: dict[str, tuple[str, Any]] = {
    "one more stays": ("prefer_cached", lambda ranking, n, resident, top, within: RIGHT(ranking, n, resident, top + 1, within)),
    "one less stays": ("prefer_cached", lambda ranking, n, resident, top, within: RIGHT(ranking, n, resident, max(top - 1, 0), within)),
    "one place more": ("prefer_cached", lambda ranking, n, resident, top, within: RIGHT(ranking, n, resident, top, within + 1)),
    "one place less": ("prefer_cached", lambda ranking, n, resident, top, within: RIGHT(ranking, n, resident, top, max(within - 1, 0))),
    "residents ignored": ("prefer_cached", lambda ranking, n, resident, top, within: ranking[:n]),
    "the score of what left": ("scores_used", _score_of_the_displaced),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_planted_fault_is_seen(fault: str, mass: list[tuple[Case, Selection]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(oracle, *FAULTS[fault])
    assert any(oracle.select(*case.args).selection.differences(answer) for case, answer in mass)


# ---- through the engine ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def container(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return converted(tmp_path_factory.mktemp("model"), EVEN)


def traced(container: Path, scopes: tuple[Scope, ...], **options: Any) -> Any:
    """A model whose cache holds whatever was used once."""
    lm: Any = colibri_jax.load(container, routing=routed(1, 16), budget_scopes=scopes, cache_experts=16, threads=1, **options)
    lm.set_trace(True)
    return lm


def selected(lm: Any, layer: int, spec: RouterSpec, options: RoutingOptions, cached: npt.ArrayLike) -> Selection:
    return native.select_experts(lm.trace["router_logits"][layer], spec, options, cached)


@pytest.mark.parametrize("pilot", [False, True])
def test_the_engine_tells_the_policy_what_its_cache_holds(container: Path, pilot: bool) -> None:
    tokens = random_tokens(EVEN, 8)
    lm = traced(container, ("decode",), pilot=pilot)
    routers: Any = colibri_jax.load(container, "reference")
    specs = [routers.router(layer) for layer in lm.config.moe_layers]
    lm.forward(tokens[:2], scope="prefill")
    held = [set(selection.kept.tolist()) for selection in lm.selections]
    swapped = 0
    for token in tokens[2:]:
        lm.forward([token], scope="decode")
        for layer, selection in enumerate(lm.selections):
            if not pilot:  # what was read ahead and not used is in the cache too
                assert selection.differences(selected(lm, layer, specs[layer], routed(1, 16), sorted(held[layer]))) == []
            assert selection.kept.size == lm.config.moe.router.top_k
            held[layer] |= set(selection.kept.tolist())
            swapped += selection.dropped_slots
    stats = lm.stats.scopes["decode"]
    assert stats.dropped_slots == swapped > 0
    assert stats.routed_slots == 6 * len(specs) * lm.config.moe.router.top_k
    assert stats.swap_share == swapped / stats.routed_slots
    with pytest.raises(OptionError, match="what the cache holds"):
        lm.forward(tokens[:2], scope="verify", rows="alone")
    more = random_tokens(EVEN, 32, seed=2)
    lm.forward(more, scope="prefill")
    assert all(s.dropped_slots == 0 for s in lm.selections), "out of its scope it is off, whatever the cache holds"
    selections = [selected(lm, layer, specs[layer], routed(1, 16), sorted(cached)) for layer, cached in enumerate(held)]
    assert all(selection.dropped_slots > 0 for selection in selections), "these would have been exchanged"


def test_it_reads_less_and_says_something_else_than_the_plain_routing(container: Path) -> None:
    tokens = random_tokens(EVEN, 24)

    def run(routing: RoutingOptions) -> tuple[list[bytes], int]:
        lm = colibri_jax.load(container, routing=routing, cache_experts=6)
        return [lm.forward([token], scope="decode").tobytes() for token in tokens], lm.stats.total.cache_misses

    (plain, misses), (preferring, fewer) = run(RoutingOptions()), run(routed(1, 16))
    assert fewer < misses
    assert plain != preferring
    assert run(routed(1, 0))[0] == plain


def test_the_reference_has_no_cache_to_look_at(container: Path) -> None:
    lm = colibri_jax.load(container, "reference", routing=routed())
    with pytest.raises(OptionError, match="looks at the cache"):
        lm.forward([1], scope="decode")


# ---- what a run says ------------------------------------------------------------------------------------------------


def made(routing: RoutingOptions) -> RunReport:
    decode = ScopeStats(steps=2, positions=2, wall_seconds=1.0, layer_steps=4, dropped_slots=3, routed_slots=32, mass_kept_sum=4.0)
    stats = dataclasses.replace(Stats(backend="native", precision="w4a8"), scopes={"decode": decode})
    generation = Generation(tokens=(1, 2), prompt_tokens=1, stop_reason="length", stop_token=None)
    return RunReport(generation=generation, text="", stats=stats, routing=routing, budget_scopes=frozenset({"decode"}))


def test_the_report_says_how_many_were_swapped() -> None:
    out = io.StringIO()
    Console(file=out, width=100).print(made(routed()).table())
    assert "decode (cache_route)" in out.getvalue()
    assert "9.4% of slots, 90.6% agree" in out.getvalue()
    assert made(routed()).budget_line() is None
    data = json.loads(json.dumps(made(routed()).to_json()))
    assert data["swap_share"] == {"decode": 3 / 32}
    assert data["routing"]["route_within"] == 12
    for other in (RoutingOptions(), RoutingOptions(budget=4)):
        out = io.StringIO()
        Console(file=out, width=100).print(made(other).table())
        assert "swapped" not in out.getvalue()
        assert made(other).to_json()["swap_share"] is None


def test_notes_say_where_it_cannot_act() -> None:
    from fakes import HF_CONFIG

    config = colibri_jax.ModelConfig.from_hf(HF_CONFIG)

    def notes(options: RoutingOptions) -> tuple[str, ...]:
        return budget_notes(config, options, ("decode",), largest_prefill_step=4)

    top_k = config.moe.router.top_k
    experimental = "experimental: quality not measured (policy cache_route)"
    assert notes(routed()) == (experimental,)
    assert notes(routed(top_k)) == (experimental, f"no effect: route-top {top_k} ≥ top-k {top_k} in scope decode")
    assert notes(routed(1, expert_topk=1)) == (experimental, "no effect: route-top 1 ≥ expert-topk 1 in scope decode")
    assert notes(routed(2, 2)) == (experimental, "no effect: route-within 2 ≤ route-top 2 in scope decode")
    assert notes(routed(2, 0)) == ()


# ---- command line ---------------------------------------------------------------------------------------------------


def generated(*arguments: str) -> Any:
    return CliRunner().invoke(main, ["generate", str(SHIPPED_MODEL), "--prompt", "a", "--max-new-tokens", "8", *arguments])


def test_generate_runs_it_where_it_is_permitted_and_says_what_it_did() -> None:
    fenced = ["--policy", "cache_route", "--allow-irreproducible"]
    result = generated(*fenced, "--route-top", "1", "--route-within", "24", "--cache-experts", "16")
    assert result.exit_code == 0, result.stderr
    assert "experimental: quality not measured (policy cache_route)" in result.stderr
    assert "decode (cache_route)" in result.stderr
    (line,) = (line for line in result.stderr.splitlines() if line.startswith("swapped for cached"))
    assert line.count(" of slots, ") == 2, "prefill and decode"
    assert "0.0% of slots, 100.0% agree" in line, "prefill, where it is off"
    assert line.count("0.0% of slots, 100.0% agree") == 1
    assert "EXPERT_BUDGET=" not in result.stderr
    assert "no effect" not in result.stderr
    data = json.loads(generated(*fenced, "--json").stdout)
    assert (data["routing"]["route_top"], data["routing"]["route_within"]) == (2, 12)
    assert set(data["swap_share"]) == set(data["scopes"])


def test_generate_refuses_it_unasked_with_a_budget_and_for_exact_drafts() -> None:
    for arguments, what in (
        ([], "what the cache holds"),
        (["--allow-irreproducible", "--budget", "4"], "has no budget"),
        (["--allow-irreproducible", "--draft", "lookup"], "what the cache holds"),
        (["--allow-irreproducible", "--route-top", "-1"], "route-top"),
    ):
        result = generated("--policy", "cache_route", *arguments)
        assert result.exit_code != 0
        assert what in result.stderr + str(result.exception)
    assert "no effect: --route-top without --policy cache_route" in generated("--route-top", "1").stderr


def test_the_quality_harness_knows_its_settings() -> None:
    config = read_config(SHIPPED_MODEL)[0]
    choices = Choices(
        budgets=(4, 6), policies=("cache_route", "aggregate"), route_tops=(1, 8), route_withins=(12, 16), allow_irreproducible=True
    )
    settings = make_settings(StepShape(kind="decode"), choices, config)
    assert [describe(setting.routing) for setting in settings] == [
        *("cache_route top=1 within=12", "cache_route top=1 within=16", "off"),
        *("aggregate 4", "aggregate 6"),
    ]
    assert [setting.reproducible for setting in settings] == [False, False, True, True, True]
    assert len({rule(setting.routing) for setting in settings[:2]}) == 1
