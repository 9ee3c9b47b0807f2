"""The native engine: equal to the reference bit for bit, whatever cache, reader, threads, kernels and split into steps."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import engine_models as models
import numpy as np
import numpy.typing as npt
import pytest
from engine_models import EVEN, ODD, Step, bits, random_tokens, run, usual_steps
from readers import NAMES, USABLE

import colibri_jax
from colibri_jax import RoutingOptions, _native
from colibri_jax.container.reader import Container
from colibri_jax.engine.session import NativeModel
from colibri_jax.errors import ContextOverflowError, OptionError
from colibri_jax.native import select_experts
from colibri_jax.reference.model import ReferenceModel
from colibri_jax.routing_spec import SCOPES, Scope

CONFIGS = {"odd": ODD, "even": EVEN}
ISAS: list[str] = _native.kernels.available_isas() + _native.kernels.emulated_isas()
MOE_LAYERS = {"odd": 3, "even": 2}


@pytest.fixture(scope="module")
def containers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The two small models as containers of ours; "even" has int4 groups of 32 with float16 scales."""
    return {
        "odd": models.converted(tmp_path_factory.mktemp("odd"), ODD),
        "even": models.converted(tmp_path_factory.mktemp("even"), EVEN, group_size=32, scales="f16"),
    }


def native(path: Path, **options: Any) -> NativeModel:
    model = colibri_jax.load(path, **{"cache_experts": 3, "threads": 2, **options})
    assert isinstance(model, NativeModel)
    return model


def reference(path: Path, **options: Any) -> ReferenceModel:
    model = colibri_jax.load(path, backend="reference", **options)
    assert isinstance(model, ReferenceModel)
    return model


def differences(ours: NativeModel, theirs: ReferenceModel, steps: Iterator[Step]) -> list[str]:
    """What is not equal, step by step: the checker. Logits and selections are compared without tolerance."""
    found = []
    for number, step in enumerate(steps):
        native_logits, reference_logits = (next(run(model, iter([step]))) for model in (ours, theirs))
        if bits(native_logits) != bits(reference_logits):
            found.append(f"step {number}: logits, {np.abs(native_logits - reference_logits).max()}")
        assert len(ours.selections) == len(theirs.selections)
        for layer, (a, b) in enumerate(zip(ours.selections, theirs.selections, strict=True)):
            found += [f"step {number}, MoE layer {layer}: {field}" for field in a.differences(b)]
    return found


# ---- equal to the reference ---------------------------------------------------------------------------------------

ROUTINGS: list[tuple[RoutingOptions, tuple[str, ...]]] = [
    (RoutingOptions(), ("decode",)),
    (RoutingOptions(expert_topk=2), ("decode",)),
    (RoutingOptions(expert_topp=0.6), ("decode",)),
    (RoutingOptions(budget=2), ("decode",)),
    (RoutingOptions(budget=2), ("verify",)),
    (RoutingOptions(budget=4), ("prefill",)),
    (RoutingOptions(budget=5, denominator="frozen"), SCOPES),
    (RoutingOptions(budget=4, vote="all_scores"), SCOPES),
    (RoutingOptions(budget=3, denominator="frozen", vote="all_scores", expert_topk=3, expert_topp=0.8), SCOPES),
    (RoutingOptions(budget=1), SCOPES),
]


def can_act(routing: RoutingOptions, scope: str, scopes: tuple[str, ...], config: dict[str, Any]) -> bool:
    """Whether the usual steps hold more experts than the budget in this scope; decode steps are single tokens."""
    budgets = routing.budget if isinstance(routing.budget, tuple) else (routing.budget,)
    smallest = min((budget for budget in budgets if budget), default=1000)
    in_one_row = min(config["num_experts_per_tok"], routing.expert_topk or 1000)
    return scope in scopes and smallest < (in_one_row if scope == "decode" else 6)


@pytest.mark.parametrize("name", CONFIGS)
def test_native_equals_reference_bit_for_bit(name: str, containers: dict[str, Path]) -> None:
    """Prompt, single tokens, drafts and rewinds; DSA limits attention in "odd". Routing changes no compiled shape of the reference."""
    per_layer = (RoutingOptions(budget=(0, 3, 2)[-MOE_LAYERS[name] :]), SCOPES)
    for routing, scopes in [*ROUTINGS, per_layer]:
        options: dict[str, Any] = {"routing": routing, "budget_scopes": scopes}
        ours, theirs = native(containers[name], **options), reference(containers[name], **options)
        assert differences(ours, theirs, usual_steps(CONFIGS[name])) == [], (routing, scopes)
        for scope, counted in ours.stats.scopes.items():
            assert (counted.dropped_experts > 0) == can_act(routing, scope, scopes, CONFIGS[name]), (routing, scopes, scope)
            assert counted.steps == sum(step.scope == scope for step in usual_steps(CONFIGS[name]))
        if routing.budget == 1:
            assert ours.stats.total.emptied_positions > 0


def test_dsa_limits_attention_in_the_odd_model(containers: dict[str, Path]) -> None:
    """What the test above relies on: rows attend to index_topk positions, shared layers to those of the layer before."""
    model = native(containers["odd"])
    model.set_trace(True)
    model.forward(random_tokens(ODD, 26), scope="prefill")
    attended = model.trace["attended"]
    for layer, kind in enumerate(ODD["indexer_types"]):
        assert [len(row) for row in attended[layer]] == [0] * 10 + [10] * 16
        assert kind == "full" or attended[layer] == attended[layer - 1]
    assert attended[1] != attended[0]
    assert attended[0][25] != list(range(16, 26))


@pytest.mark.parametrize("fault", ["two experts swapped", "one nibble", "one scale", "norm", "router"])
def test_the_comparison_finds_a_planted_fault(fault: str, containers: dict[str, Path], tmp_path: Path) -> None:
    """The reference on the sound container, the engine on one that differs by as little as one nibble."""
    faulty = tmp_path / "faulty"
    shutil.copytree(containers["odd"], faulty)
    entries = Container.open(faulty).entries
    # The expert that the first position weighs most: it is used for certain.
    model = native(faulty)
    model.forward(random_tokens(ODD, 64)[:1], scope="prefill")
    expert = int(model.selections[0].ids[0, 0])
    first, second = (entries[f"layers.2.experts.{e}.down"] for e in (expert, (expert + 1) % 16))
    with first.path.open("r+b") as file:
        content = bytearray(file.read())
        if fault == "two experts swapped":
            assert first.path == second.path
            a, b = (slice(e.offset, e.offset + e.nbytes) for e in (first, second))
            content[a], content[b] = content[b], content[a]
        elif fault == "one nibble":
            content[first.offset] ^= 0x08
        elif fault == "one scale":
            content[first.offset + 16 * 32 + 2] ^= 0x10  # the first row's first scale, in the middle of its mantissa
        else:
            entry = entries["layers.2.mlp_norm" if fault == "norm" else "layers.2.router.weight"]
            assert entry.path == first.path
            content[entry.offset + 2] ^= 0x40
        file.seek(0)
        file.write(content)
    found = differences(native(faulty), reference(containers["odd"]), usual_steps(ODD))
    assert any("logits" in line for line in found)


def test_float_activations_agree_within_rounding(containers: dict[str, Path]) -> None:
    """Precision w4a32, design §4 (iii): relative logit error at most 2e-5, equal selections."""
    ours, theirs = (load(containers["even"], precision="w4a32") for load in (native, reference))
    step = Step("prefill", tuple(random_tokens(EVEN, 26)))
    a, b = (next(run(model, iter([step]))) for model in (ours, theirs))
    assert np.abs(a - b).max() <= 2e-5 * np.abs(b).max()
    assert not any(np.any(x.ids != y.ids) for x, y in zip(ours.selections, theirs.selections, strict=True))
    assert ours.stats.precision == "w4a32"
    exact = next(run(native(containers["even"]), iter([step])))
    assert np.abs(a - exact).max() > 1e-4 * np.abs(b).max()  # the bound tells the precisions apart


# ---- what may change nothing --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def expected(containers: dict[str, Path]) -> dict[str, list[bytes]]:
    """Logits of the usual steps by the scalar kernels, one thread, all experts in memory."""
    plain: dict[str, Any] = {"isa": "scalar", "threads": 1, "cache_experts": 1000, "io": "buffered"}
    return {name: [bits(x) for x in run(native(path, **plain), usual_steps(CONFIGS[name]))] for name, path in containers.items()}


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("isa", ISAS)
def test_cache_reader_threads_and_kernels_change_no_bit(
    isa: str, name: str, containers: dict[str, Path], expected: dict[str, list[bytes]]
) -> None:
    for cache in (1, 8, 1000):
        for io in ("direct", "buffered"):
            for threads in (1, 2):
                reader = USABLE[-threads]  # each with either way of opening files
                ahead = {"pipe": cache > 1 or threads > 1, "pilot": (cache > 1) != (threads > 1)}
                policy = "lru" if (cache == 8) != (io == "direct") else "step_lfu"
                options = {"cache_policy": policy, "io": io, "reader": reader, "threads": threads, "isa": isa, **ahead}
                model = native(containers[name], cache_experts=cache, **options)
                assert [bits(x) for x in run(model, usual_steps(CONFIGS[name]))] == expected[name], (cache, options)
                assert (model.stats.total.foreseeable_experts > 0) == ahead["pilot"]
                assert model.stats.isa == isa
                assert model.stats.threads == threads
                assert model.stats.cache_experts_per_layer == min(cache, CONFIGS[name]["n_routed_experts"])
                assert model.stats.reader.startswith("buffered (" if io == "buffered" else ("direct", "buffered ("))
                assert model.stats.reader.endswith(f", {NAMES[reader]}")


@pytest.mark.parametrize("isa", ISAS)
def test_a_position_is_the_same_alone_and_among_64(isa: str, containers: dict[str, Path]) -> None:
    """Batch invariance: any split of the tokens into steps, with the budget off."""
    ids = random_tokens(ODD, 64)
    together = native(containers["odd"], isa=isa).forward(ids, scope="prefill")
    alone = native(containers["odd"], isa=isa, threads=1)
    rows = [alone.forward([token], scope="decode") for token in ids]
    assert bits(np.concatenate(rows)) == bits(together)
    rng = np.random.default_rng(5)
    for _ in range(4):
        model = native(containers["odd"], isa=isa)
        cuts = [0, *sorted(rng.choice(63, 5, replace=False) + 1), 64]
        parts = [model.forward(ids[a:b], scope="verify") for a, b in itertools.pairwise(cuts)]
        assert bits(np.concatenate(parts)) == bits(together), cuts


def test_rewind_and_replay_give_the_same_bits(containers: dict[str, Path]) -> None:
    ids = random_tokens(ODD, 50)
    model = native(containers["odd"])
    first = model.forward(ids, scope="prefill")
    for kept in (49, 31, 9, 0):
        model.rewind(model.position - kept)
        assert model.position == kept
        model.forward(random_tokens(ODD, 5, seed=9), scope="verify")  # drafts that are dropped again
        model.rewind(5)
        assert bits(model.forward(ids[kept:], scope="prefill")) == bits(first[kept:])
    model.reset()
    assert model.position == 0
    assert bits(model.forward(ids, scope="prefill", logits="last")) == bits(first[-1:])


def test_a_budget_in_prefill_makes_the_split_part_of_the_result(containers: dict[str, Path]) -> None:
    """That equality above is not for want of sensitivity."""
    ids = random_tokens(ODD, 20)
    options: dict[str, Any] = {"routing": RoutingOptions(budget=4), "budget_scopes": ("prefill",)}
    one, two = native(containers["odd"], **options), native(containers["odd"], **options)
    together = one.forward(ids, scope="prefill")
    parts = [two.forward(ids[:10], scope="prefill"), two.forward(ids[10:], scope="prefill")]
    assert bits(np.concatenate(parts)) != bits(together)


# ---- containers of others -----------------------------------------------------------------------------------------


def test_a_container_of_an_independent_writer_gives_the_same_bits(tmp_path: Path, containers: dict[str, Path]) -> None:
    """Row-major groups, untagged, repacked as they are read; then the same without the MTP block and the indexers."""
    theirs = native(models.written(tmp_path / "whole", ODD), group_size=64)
    ours = native(containers["odd"])
    steps = list(usual_steps(ODD))
    assert [bits(x) for x in run(theirs, iter(steps))] == [bits(x) for x in run(ours, iter(steps))]
    ours.reset()

    bare = native(models.written(tmp_path / "bare", ODD, without=("indexer", "layers.5.")), group_size=64)
    topk = ODD["index_topk"]
    assert bare.config.indexer is None
    assert bare.context_positions == topk
    ids = random_tokens(ODD, topk)
    assert bits(bare.forward(ids, scope="prefill")) == bits(ours.forward(ids, scope="prefill"))
    with pytest.raises(ContextOverflowError):
        bare.forward([0], scope="decode")
    with pytest.raises(OptionError, match="context_positions"):
        native(tmp_path / "bare", context_positions=topk + 1, group_size=64)


@pytest.mark.parametrize("kind", ["int4", "int8"])
def test_per_row_scales_equal_the_reference(kind: str, tmp_path: Path) -> None:
    """int4 with one scale per row, and int8 wherever the layout has int4."""

    def kind_of(name: str) -> str | None:
        products = ("_proj.weight", "_with_mqa.weight")
        return kind if name.endswith(products) and "indexer" not in name else None

    path = models.written(tmp_path / "rows", ODD, kind_of=kind_of, without=("layers.5.",))
    assert Container.open(path, group_size=0).entries["layers.3.experts.1.up"].format.tag == f"{kind}_rows"
    options: dict[str, Any] = {"group_size": 0, "routing": RoutingOptions(budget=6), "budget_scopes": SCOPES}
    ours, theirs = native(path, **options), reference(path, **options)
    assert differences(ours, theirs, usual_steps(ODD)) == []


def test_gate_and_up_may_differ_in_format(tmp_path: Path) -> None:
    """One quantised form of the input does not serve both then; a position alone takes another way than one among many."""
    path = models.written(tmp_path / "mixed", ODD, kind_of=lambda name: ("int4", 32) if "up_proj" in name else None, without=("layers.5.",))
    ids = random_tokens(ODD, 12)
    for precision in ("w4a8", "w4a32"):
        model = native(path, precision=precision, group_size=64)
        together = model.forward(ids, scope="prefill")
        model.reset()
        assert bits(np.concatenate([model.forward([token], scope="decode") for token in ids])) == bits(together)


# ---- statistics ---------------------------------------------------------------------------------------------------


def test_statistics_count_what_happened(containers: dict[str, Path]) -> None:
    """Hits and misses are the distinct experts after the cut; reads that the cut avoided are those of experts not in memory."""
    routing = RoutingOptions(budget=5)
    model = native(containers["odd"], cache_experts=1, cache_policy="lru", routing=routing, budget_scopes=("verify",))
    defining = reference(containers["odd"])
    routers = [defining.router(layer) for layer in model.config.moe_layers]
    model.set_trace(True)
    resident = [-1] * 3  # with one slot, the expert used last
    avoided = useful = hits = 0
    ids = random_tokens(ODD, 60)
    for begin in range(0, 60, 6):
        scope: Scope = "verify" if begin % 4 == 0 else "decode"
        model.forward(ids[begin : begin + 6], scope=scope)
        for layer, selection in enumerate(model.selections):
            union = select_experts(model.trace["router_logits"][layer], routers[layer], routing.without_budget()).kept
            removed = set(union.tolist()) - set(selection.kept.tolist())
            assert len(removed) == selection.dropped
            avoided += len(removed - {resident[layer]})
            hits += resident[layer] in selection.kept
            useful += len(set(selection.kept.tolist()) - {resident[layer]})
            resident[layer] = int(selection.kept[-1])
    total = model.stats.total
    assert total.dropped_experts > avoided > 0
    assert total.avoided_read_bytes_estimate == avoided * model.stats.expert_bytes
    assert (total.cache_hits, total.cache_misses) == (hits, useful)
    assert hits > 0
    assert total.cache_hits + total.cache_misses == total.kept_experts
    assert total.useful_bytes == useful * model.stats.expert_bytes
    assert total.bytes_read >= total.useful_bytes
    assert model.stats.scopes["decode"].avoided_read_bytes_estimate == 0
    assert total.positions == 60
    assert total.layer_steps == 30


def test_resident_experts_that_are_dropped_avoid_no_read(containers: dict[str, Path]) -> None:
    model = native(containers["odd"], cache_experts=16, routing=RoutingOptions(budget=2))
    model.forward(random_tokens(ODD, 64), scope="prefill")
    assert all(s.kept.size == 16 for s in model.selections)
    model.forward([1], scope="decode")
    decode = model.stats.scopes["decode"]
    assert decode.dropped_experts == 6
    assert (decode.avoided_read_bytes_estimate, decode.bytes_read, decode.hit_rate) == (0, 0, 1.0)


def test_phases_sum_to_the_wall_time(containers: dict[str, Path]) -> None:
    model = native(containers["odd"], cache_experts=1)
    for scope in SCOPES:
        model.forward(random_tokens(ODD, 40), scope=scope)
        counted = model.stats.scopes[scope]
        phases = [getattr(counted, f"{phase}_seconds") for phase in ("disk_wait", "experts", "attention", "head", "other")]
        assert sum(phases) == pytest.approx(counted.wall_seconds, rel=0.02)
        assert min(phases) > 0


def test_what_was_loaded_is_stated(containers: dict[str, Path]) -> None:
    model = native(containers["odd"])
    stats = model.stats
    entries = Container.open(containers["odd"]).entries
    assert stats.expert_bytes == sum(entries[f"layers.2.experts.0.{part}"].total_bytes for part in ("gate", "up", "down"))
    trunk = [e for role, e in entries.items() if ".experts." not in role and not role.startswith(("mtp.", "layers.5."))]
    assert stats.dense_bytes == sum(entry.total_bytes for entry in trunk)
    rows = ODD["max_position_embeddings"] * 4
    assert stats.kv_cache_bytes == rows * (5 * (21 + 6) + 3 * 19)
    assert (stats.backend, stats.precision, stats.ram_bytes) == ("native", "w4a8", 0)
    assert model.context_positions == 128


def cache_rows(model: NativeModel) -> npt.NDArray[np.float32]:
    return np.concatenate([model.kv_cache(layer) for layer in range(ODD["num_hidden_layers"])])


def test_caches_can_be_looked_at(containers: dict[str, Path]) -> None:
    """float32 rows of the positions there are, equal to the reference's."""
    ours, theirs = native(containers["odd"]), reference(containers["odd"])
    for model in (ours, theirs):
        list(run(model, usual_steps(ODD)))
    assert cache_rows(ours).shape == (5 * ours.position, 27)
    for layer, cache in enumerate(theirs.caches):
        assert bits(ours.kv_cache(layer)) == bits(np.asarray(cache.kv_SC)[: ours.position])
        keys = ours.index_keys(layer)
        assert (keys is None) == (cache.index_SJ is None)
        if keys is not None:
            assert bits(keys) == bits(np.asarray(cache.index_SJ)[: ours.position])
