"""The cost model: the formula by hand and against a simulation, its laws, sizes of GLM-5.2, slots of hosts, what confirming refuses."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from bench import ram_tiers
from bench.make_model import make_config, make_model
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from colibri_jax.bench import Measured, Row, Table
from colibri_jax.bench.cost_model import MEMORY_SHARE, UNIFORM, HitCurve, ModelSizes, Rates, TokenCost, bench_cost_model, token_cost
from colibri_jax.engine.options import EngineOptions, plan_engine
from colibri_jax.errors import MemoryBudgetError, OptionError
from colibri_jax.routing_spec import RoutingOptions

SIZES = ModelSizes(moe_layers=2, experts=16, top_k=4, expert_bytes=10, dense_bytes=100, shared_bytes=5, context_bytes=3)
RATES = Rates(disk=10.0, memory=100.0, memory_share=1.0, waking_share=1.0)
GLM_SIZES = ModelSizes(
    moe_layers=75, experts=256, top_k=8, expert_bytes=21_233_664, dense_bytes=10**10, shared_bytes=21_233_664, context_bytes=0
)
TRAINED = HitCurve(((1 / 64, 0.05), (4 / 64, 0.18), (16 / 64, 0.46), (32 / 64, 0.70)))
SHORT_GLM = {**ram_tiers.GLM, "num_hidden_layers": 5}

Cost = Callable[..., TokenCost]


# ---- the formula


def test_formula_by_hand() -> None:
    """4 of 16 experts cached, all alike: 1 of 4 hits, 3 reads of 10 bytes in each of 2 layers."""
    cost = token_cost(SIZES, RATES, slots=4)
    assert cost.hit_rate == 0.25
    assert cost.disk_bytes == 2 * 3 * 10
    assert cost.memory_bytes == 100 + 3 + 2 * 4 * 10
    assert cost.between_seconds == pytest.approx((100 - 2 * 5 + 3 + 2 * 10) / 100)
    assert cost.seconds == pytest.approx(1.13 + 2 * 3 * 10 / 10)
    assert cost.tokens_per_second == pytest.approx(1 / 7.13)


def test_budget_by_hand() -> None:
    """Two experts instead of four: 1.5 reads a layer, and the same between the reads."""
    cost = token_cost(SIZES, RATES, slots=4, experts=2)
    assert (cost.experts, cost.disk_bytes) == (2.0, 30.0)
    assert cost.seconds == pytest.approx(1.13 + 3.0)
    assert token_cost(SIZES, RATES, slots=4, experts=99) == token_cost(SIZES, RATES, slots=4)


def test_waking_by_hand() -> None:
    """A layer reads for 3 s and computes 0.35 s of them, so that in 2.65 of 3 the processor waits, and is half as fast after that."""
    slow = dataclasses.replace(RATES, waking_share=0.5)
    share = 2.65 / 3
    assert token_cost(SIZES, slow, slots=4).between_seconds == pytest.approx(1.13 * (2 * share + 1 - share))


def test_without_reads_memory_is_all() -> None:
    cost = token_cost(SIZES, Rates(disk=1e-9, memory=100.0, memory_share=0.5, waking_share=0.1), slots=16)
    assert (cost.hit_rate, cost.disk_bytes) == (1.0, 0.0)
    assert cost.seconds == pytest.approx(cost.memory_bytes / 50.0)


def test_a_disk_of_no_end_leaves_the_memory() -> None:
    cost = token_cost(SIZES, dataclasses.replace(RATES, disk=1e30, waking_share=0.1), slots=1)
    assert cost.seconds == pytest.approx(cost.memory_bytes / 100.0)


def simulated(sizes: ModelSizes, rates: Rates, *, slots: int, hits: HitCurve, experts: int) -> float:
    """Seconds of a token, layer by layer and expert by expert: reads back to back, each computed when it is there and the others are done.

    `hits` gives whole reads; waking costs nothing.
    """
    memory = rates.memory * rates.memory_share
    reads = round(experts * (1.0 - hits.at(slots / sizes.experts)))
    clock = (sizes.dense_bytes - sizes.moe_layers * sizes.shared_bytes + sizes.context_bytes) / memory
    for _ in range(sizes.moe_layers):
        begin = clock
        clock += (sizes.shared_bytes + (experts - reads) * sizes.expert_bytes) / memory
        for read in range(reads):
            clock = max(clock, begin + (read + 1) * sizes.expert_bytes / rates.disk) + sizes.expert_bytes / memory
    return clock


def disagreements(cost: Cost) -> list[str]:
    """Where a formula is more than one read a layer from the simulation, or off it at all where the disk is slow."""
    found = []
    for disk in (1e9, 2e9, 7e9, 50e9):
        for memory in (5e9, 35e9):
            for experts in (1, 2, 6, 8):
                for hit in (0.0, 0.5, 1.0):
                    reads = round(experts * (1 - hit))
                    rates = Rates(disk=disk, memory=memory, waking_share=MEMORY_SHARE)
                    curve = HitCurve(((0.5, 1 - reads / experts),))
                    expected = simulated(GLM_SIZES, rates, slots=128, hits=curve, experts=experts)
                    got = cost(GLM_SIZES, rates, slots=128, hits=curve, experts=experts).seconds
                    slow = disk < memory * MEMORY_SHARE / (experts + 1)
                    allowed = 0.0 if slow else GLM_SIZES.moe_layers * GLM_SIZES.expert_bytes / disk
                    if abs(got - expected) > allowed + 1e-9 * expected:
                        found.append(f"{disk=} {memory=} {experts=} {hit=}: {got} for {expected}")
    return found


def test_formula_is_what_a_simulation_of_layers_gives() -> None:
    assert disagreements(token_cost) == []


def with_seconds(change: Callable[[ModelSizes, Rates, TokenCost], float]) -> Cost:
    """A faulty formula."""

    def faulty(sizes: ModelSizes, rates: Rates, **arguments: Any) -> TokenCost:
        cost = token_cost(sizes, rates, **arguments)
        return dataclasses.replace(cost, seconds=change(sizes, rates, cost))

    return faulty


FAULTS: dict[str, Cost] = {
    "everything overlaps": with_seconds(
        lambda sizes, rates, cost: max(cost.disk_bytes / rates.disk, cost.memory_bytes / rates.memory / rates.memory_share)
    ),
    "nothing overlaps": with_seconds(
        lambda sizes, rates, cost: cost.disk_bytes / rates.disk + cost.memory_bytes / rates.memory / rates.memory_share
    ),
    "memory at its raw rate": lambda sizes, rates, **arguments: token_cost(
        sizes, dataclasses.replace(rates, memory_share=1.0), **arguments
    ),
    "hits are read too": lambda sizes, rates, **arguments: token_cost(sizes, rates, **{**arguments, "hits": UNIFORM, "slots": 0}),
    "the budget is ignored": lambda sizes, rates, **arguments: token_cost(sizes, rates, **{**arguments, "experts": None}),
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS.keys())
def test_planted_fault_disagrees_with_the_simulation(fault: Cost) -> None:
    assert disagreements(fault) != []


# ---- laws


def broken_laws(cost: Cost, *, slots: int, experts: int, disk: float, memory: float) -> list[str]:
    """Which of the laws does not hold here: more memory, a faster disk or a smaller budget never cost time or bytes."""
    base = {"slots": slots, "hits": TRAINED, "experts": experts}
    here = cost(GLM_SIZES, Rates(disk=disk, memory=memory), **base)
    others = {
        "slots": cost(GLM_SIZES, Rates(disk=disk, memory=memory), **{**base, "slots": slots + 8}),
        "disk": cost(GLM_SIZES, Rates(disk=2 * disk, memory=memory), **base),
        "memory": cost(GLM_SIZES, Rates(disk=disk, memory=2 * memory), **base),
        "budget": cost(GLM_SIZES, Rates(disk=disk, memory=memory), **{**base, "experts": experts - 1}),
    }
    slack = 1 + 1e-12
    return [name for name, less in others.items() if less.seconds > here.seconds * slack or less.disk_bytes > here.disk_bytes * slack]


@given(slots=st.integers(0, 250), experts=st.integers(2, 8), disk=st.floats(1e8, 5e10, allow_nan=False), memory=st.floats(1e9, 4e11))
def test_more_never_costs_time(slots: int, experts: int, disk: float, memory: float) -> None:
    assert broken_laws(token_cost, slots=slots, experts=experts, disk=disk, memory=memory) == []


def test_a_formula_that_breaks_a_law_is_seen() -> None:
    def faulty(sizes: ModelSizes, rates: Rates, *, slots: int, **arguments: Any) -> TokenCost:
        return token_cost(sizes, rates, slots=256 - slots, **arguments)

    assert broken_laws(faulty, slots=8, experts=4, disk=1e9, memory=3e10) == ["slots"]


def test_curve_goes_through_its_points_and_is_straight_between() -> None:
    curve = HitCurve(((0.25, 0.5), (0.5, 0.6)))
    assert [curve.at(share) for share in (-1.0, 0.0, 0.125, 0.25, 0.375, 0.5, 0.75, 1.0, 2.0)] == pytest.approx(
        [0.0, 0.0, 0.25, 0.5, 0.55, 0.6, 0.8, 1.0, 1.0]
    )
    assert [UNIFORM.at(share) for share in (0.0, 0.3, 1.0)] == [0.0, 0.3, 1.0]


@pytest.mark.parametrize(
    "points", [((0.5, 0.1), (0.5, 0.2)), ((0.5, 0.1), (0.2, 0.2)), ((0.5, 1.1),), ((0.0, 0.0),), ((0.5, float("nan")),)]
)
def test_what_is_no_curve_is_refused(points: Any) -> None:
    with pytest.raises(OptionError, match="not a curve"):
        HitCurve(points)


def test_what_is_out_of_range_is_refused() -> None:
    with pytest.raises(OptionError, match="not a rate"):
        Rates(disk=0.0, memory=1.0)
    for wrong in ({"slots": -1}, {"slots": 1, "experts": 0}):
        with pytest.raises(OptionError, match="out of range"):
            token_cost(SIZES, RATES, **wrong)


# ---- GLM-5.2


@pytest.fixture(scope="module")
def glm() -> Any:
    """Three dense and two MoE layers of GLM-5.2's sizes, planned."""
    return ram_tiers.planned_container(SHORT_GLM)


def int4(*shapes: tuple[int, int]) -> int:
    """Bytes of matrices in groups of 64 with float32 scales."""
    return sum(rows * cols // 2 + rows * cols // 64 * 4 for rows, cols in shapes)


def test_sizes_of_glm_by_hand(glm: Any) -> None:
    width, ff = 6144, 2048
    expert = int4((ff, width), (ff, width), (width, ff))
    assert expert == 18_874_368 + 2_359_296  # the public figures: 18.9 MB and 2.4 MB of scales
    heads = 64 * 256
    attention = int4((2048, width), (heads, 2048), (576, width), (64 * (192 + 256), 512), (width, heads))
    norms = 4 * (2 * width + 2048 + 512)
    router = 4 * (256 * width + 256)
    # Layers 0 and 4 choose positions: their keys are kept from the start, queries are formed only in long contexts.
    indexer = 128 * width + 4 * 128 + 2 * 4 * 128
    dense_mlp = int4((12288, width), (12288, width), (width, 12288))
    head = 154_880 * width + 4 * 154_880
    sizes = ModelSizes.of(glm, 256)
    assert (sizes.moe_layers, sizes.experts, sizes.top_k) == (2, 256, 8)
    assert (sizes.expert_bytes, sizes.shared_bytes) == (expert, expert)
    assert sizes.dense_bytes == 5 * (attention + norms) + 3 * dense_mlp + 2 * (router + expert) + 2 * indexer + 4 * width + head
    assert sizes.context_bytes == 256 * 4 * (5 * 576 + 2 * 128)


def test_slots_are_the_engines_own_plan_and_grow_with_the_host(glm: Any) -> None:
    tiers = [ram_tiers.make_tier(glm, host) for host in (4, 6, 8, 16, 64)]
    slots = [tier.slots or 0 for tier in tiers]
    assert slots[-1] == 256
    assert slots == sorted(slots)
    per_slot, middle = 2 * 21_233_664, tiers[3]
    assert not middle.asked
    weights = ModelSizes.of(glm, 1).dense_bytes + 154_880 * (6144 + 4)  # and the embedding
    assert weights < middle.ram_bytes - slots[3] * per_slot < weights + 10**9  # KV cache and working memory


def test_a_host_that_is_too_small_says_what_it_would_need(glm: Any) -> None:
    tier = ram_tiers.make_tier(glm, 3)
    assert (tier.slots, tier.asked) == (None, True)
    assert tier.least_bytes > tier.ram_bytes
    exact = EngineOptions(ram_bytes=tier.least_bytes, context_positions=ram_tiers.SHORT_CONTEXT, threads=ram_tiers.THREADS)
    assert plan_engine(glm, exact, RoutingOptions(), free_bytes=10**12).cache_experts == 1
    with pytest.raises(MemoryBudgetError):
        plan_engine(glm, dataclasses.replace(exact, ram_bytes=tier.least_bytes - 1), RoutingOptions(), free_bytes=10**12)


def test_a_plan_for_another_machine_does_not_ask_this_one(glm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("colibri_jax.engine.options.free_memory_bytes", lambda: 1)
    assert ram_tiers.make_tier(glm, 64).slots == 256
    with pytest.raises(MemoryBudgetError):  # the planted fault: a plan that does
        plan_engine(glm, EngineOptions(ram_bytes=64 * 10**9), RoutingOptions())


# ---- the script


def quotients(*values: float) -> Table:
    """What confirming gives: a row for each measured over predicted."""
    rows = tuple(Row(f"budget {i}", {"measured / predicted": Measured((value,))}) for i, value in enumerate(values))
    return Table("decoding", {"MoE layers": 1}, rows)


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch, glm: Any) -> None:
    """The script on five layers, without measuring anything."""
    monkeypatch.setattr(ram_tiers, "planned_container", lambda raw: glm)
    monkeypatch.setattr(ram_tiers, "measure_hits", lambda routing, name, say: TRAINED)
    monkeypatch.setattr(ram_tiers, "read_recommended", lambda directory, model: None)


@pytest.mark.parametrize(("values", "status"), [((1.14, 0.86), 0), ((1.0, 1.16), 1), ((0.84, 1.0), 1), ((float("nan"),), 1)])
def test_confirming_fails_beyond_15_percent(
    values: tuple[float, ...], status: int, short: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(ram_tiers, "bench_cost_model", lambda path, **options: quotients(*values))
    result = CliRunner().invoke(ram_tiers.main, ["--confirm", str(tmp_path), "--json"])
    assert result.exit_code == status, result.output
    assert json.loads(result.stdout)["passed"] is not bool(status)


def test_table_has_every_host_twice_and_no_quality_that_nobody_measured(short: None) -> None:
    result = CliRunner().invoke(ram_tiers.main, [])
    assert result.exit_code == 0, result.output
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in result.stdout.splitlines()]
    assert [line[0] for line in lines[2:]] == [f"{host} GB" for host in (16, 24, 32, 64, 128) for _ in range(2)]
    assert {len(line) for line in lines} == {len(lines[0])}
    assert all("not GLM-5.2" in title for title in lines[0][-3:])
    assert all(line[-3:] == ["–"] * 3 for line in lines[3::2])
    assert [line[3] for line in lines[2:4]] == ["off", "6"]


def test_a_given_budget_replaces_the_recommended_one(short: None) -> None:
    answer = json.loads(CliRunner().invoke(ram_tiers.main, ["--budget", "4", "--json"]).stdout)
    assert [row["budget"] for row in answer["tiers"][:2]] == ["off", "4"]
    assert answer["tiers"][1]["by_disk"]["2"]["experts"] == 4.0


# ---- confirming


def test_bytes_are_predicted_on_a_model_of_random_weights(tmp_path: Path) -> None:
    """Time is not looked at here; bytes are counts."""
    config = make_config(layers=3, dense_layers=1, experts=32, top_k=4, hidden=128, expert_hidden=64, vocab=256, heads=4, positions=64)
    make_model(tmp_path / "model", config)
    table = bench_cost_model(tmp_path / "model", threads=1, budgets=(0, 2), tokens=8, repeats=2, memory_bytes=1 << 20)
    assert [row.what for row in table.rows] == ["budget off", "budget 2"]
    for row in table.rows:
        quotient = row.figures["bytes / predicted"]
        assert isinstance(quotient, Measured)
        assert quotient.median == pytest.approx(1.0, abs=0.25)
    assert len(ram_tiers.apart(table)) == 2
