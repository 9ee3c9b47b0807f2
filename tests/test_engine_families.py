"""The native engine against the reference on every family: bit for bit as shipped, within the bound with float32 activations."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from engine_models import bits, checkpoint_tensors, converted, run
from family_models import CONFIGS, steps_of
from oracles.checkpoints import write_checkpoint

from colibri_jax import _native
from colibri_jax.compare.layers import PartByPart, compare_parts
from colibri_jax.compare.step import NativeStep
from colibri_jax.compare.whole import Follower, WholeModel
from colibri_jax.config import GQAConfig
from colibri_jax.container.inspect import kv_bytes_per_position
from colibri_jax.container.reader import Container
from colibri_jax.engine import options as engine_options
from colibri_jax.engine.options import EngineOptions, plan_engine
from colibri_jax.engine.session import NativeModel
from colibri_jax.errors import ContextOverflowError, MemoryBudgetError
from colibri_jax.load import load
from colibri_jax.reference.model import ReferenceModel
from colibri_jax.routing_spec import SCOPES, RoutingOptions

Logits = list[npt.NDArray[np.float32]]

# Acts in prefill and verification of every configuration: unions are larger there.
BUDGET = RoutingOptions(budget=4)
POSITIONS_MIXED_TOGETHER, MOST_OUT_OF_ORDER = 32, 16  # of native/src/model/attention.h and moe.cpp
FLOAT_BOUND = 2e-5

families = pytest.mark.parametrize("family", CONFIGS)


@pytest.fixture(scope="module")
def container_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The container of a family, converted once."""

    @functools.cache
    def make(family: str) -> Path:
        return converted(tmp_path_factory.mktemp("family"), CONFIGS[family])

    return make


@pytest.fixture(scope="module")
def reference_logits(container_of: Callable[[str], Path]) -> Callable[[str], Logits]:
    """The reference's answers to the usual steps under the budget, computed once."""

    @functools.cache
    def compute(family: str) -> Logits:
        return list(run(reference(container_of(family)), steps_of(CONFIGS[family])))

    return compute


def native(path: Path, *, budget: RoutingOptions = BUDGET, **options: Any) -> NativeModel:
    model = load(path, routing=budget, budget_scopes=SCOPES, **{"cache_experts": 2, "threads": 2, **options})
    assert isinstance(model, NativeModel)
    return model


def reference(path: Path, **options: Any) -> ReferenceModel:
    model = load(path, backend="reference", routing=BUDGET, budget_scopes=SCOPES, **options)
    assert isinstance(model, ReferenceModel)
    return model


def unequal_steps(ours: Logits, theirs: Logits) -> list[int]:
    """Steps whose logits differ in any bit; signed zeros do."""
    return [i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if bits(a) != bits(b)]


# ---- equal to the reference ----------------------------------------------------------------------------------------


@families
def test_native_logits_are_the_references(
    family: str, container_of: Callable[[str], Path], reference_logits: Callable[[str], Logits]
) -> None:
    model, dropped, ours = native(container_of(family)), [], []
    for logits in run(model, steps_of(CONFIGS[family])):
        ours.append(logits)
        dropped.append(sum(s.dropped for s in model.selections))
    assert dropped[0] > 0, "the budget acts"
    assert unequal_steps(ours, reference_logits(family)) == []


@families
def test_parts_are_equal_on_equal_inputs(family: str, container_of: Callable[[str], Path]) -> None:
    """Selection, and every layer fed the native engine's own input and cache: the trace and the cache have the reference's layout."""
    model, other = native(container_of(family)), reference(container_of(family))
    model.set_trace(True)
    result = PartByPart()
    for step in steps_of(CONFIGS[family])[:4]:
        logits = model.forward(step.tokens, scope=step.scope)
        compare_parts(NativeStep(model, np.asarray(step.tokens), step.scope, logits), other, result)
    assert result.selections == 4 * len(model.config.moe_layers)
    assert result.rows == 22 * (model.config.n_layers + 2)
    assert result.equal_rows == result.rows
    assert (result.selection_differences, result.attended_differences, result.deviations) == ([], [], [])


@families
def test_float_activations_agree_within_the_bound(family: str, container_of: Callable[[str], Path]) -> None:
    model = native(container_of(family), precision="w4a32")
    model.set_trace(True)
    follower, result = Follower(reference(container_of(family), precision="w4a32")), WholeModel()
    for step in steps_of(CONFIGS[family])[:4]:
        logits = model.forward(step.tokens, scope=step.scope)
        follower.step(NativeStep(model, np.asarray(step.tokens), step.scope, logits), result)
    assert result.positions == 22
    assert all(tie.explained for tie in result.differing_rows)
    assert 0 < result.worst_logit_error <= FLOAT_BOUND
    assert result.worst_router_error <= FLOAT_BOUND


# ---- one function, however it is computed --------------------------------------------------------------------------


@families
def test_steps_instruction_sets_and_threads_change_no_bit(family: str, container_of: Callable[[str], Path]) -> None:
    tokens = [token for step in steps_of(CONFIGS[family])[:4] for token in step.tokens]
    off = RoutingOptions()
    whole = native(container_of(family), budget=off).forward(tokens, scope="prefill")
    for isa in _native.kernels.available_isas():
        model = native(container_of(family), budget=off, isa=isa, threads=3)
        assert model.forward(tokens, scope="prefill").tobytes() == whole.tobytes(), isa
    model = native(container_of(family), budget=off, threads=1)
    for cuts in ([1] * len(tokens), [7, 1, 3, len(tokens) - 11]):
        model.reset()
        parts, start = [], 0
        for n in cuts:
            parts.append(model.forward(tokens[start : start + n], scope="prefill"))
            start += n
        assert np.concatenate(parts).tobytes() == whole.tobytes(), cuts


@families
def test_cache_and_plan_have_the_sizes_that_are_told(family: str, container_of: Callable[[str], Path]) -> None:
    container = Container.open(container_of(family))
    config, context = container.config, 40
    plans = {n: plan_engine(container, EngineOptions(context_positions=context, cache_experts=1, threads=n), BUDGET) for n in (1, 2)}
    assert plans[1].kv_cache_bytes == context * kv_bytes_per_position(config)
    sizes = {n: _native.memory_plan(plan.model, plan.options) for n, plan in plans.items()}
    attention = config.attention
    if isinstance(attention, GQAConfig):
        per_thread = attention.n_heads // attention.n_kv_heads * context
    else:
        rows = attention.nope_dim + 1 + POSITIONS_MIXED_TOGETHER  # of the latent's width
        per_thread = rows * attention.kv_lora_rank + attention.cache_width + context
    out_of_order = MOST_OUT_OF_ORDER * config.moe.router.top_k * config.hidden_size
    for threads, size in sizes.items():
        assert size["fixed_bytes"] == 4 * (context * attention.rope.dim + threads * per_thread + out_of_order)

    model = NativeModel(container, EngineOptions(context_positions=context, cache_experts=1, threads=1))
    model.forward(list(range(context)), scope="prefill")
    assert model.kv_cache(0).shape == (context, attention.cache_width)
    with pytest.raises(ContextOverflowError):
        model.forward([0], scope="decode")
    with pytest.raises(MemoryBudgetError):
        load(container_of(family), ram_bytes=plans[1].dense_bytes + plans[1].kv_cache_bytes, context_positions=context)


# ---- faults that the comparison sees -------------------------------------------------------------------------------

Fault = Callable[[dict[str, Any]], None]


def _set(**changes: Any) -> Fault:
    return lambda attention: attention.update(changes)


def _set_rope(**changes: Any) -> Fault:
    return lambda attention: attention["rope"].update(changes)


def _scale_by_head_dim(attention: dict[str, Any]) -> None:
    """Without YaRN's magnitude."""
    attention["scale"] = (attention["nope"] + attention["rope"]["dim"]) ** -0.5


FAULTS: tuple[tuple[str, str, Fault], ...] = (
    ("deepseek_v3", "half-split rope", _set_rope(interleaved=False)),
    ("deepseek_v3", "plain frequencies", _set_rope(yarn=None)),
    ("deepseek_v3", "cos and sin without magnitude", _set_rope(attention_factor=1.0)),
    ("deepseek_v3", "scores without magnitude", _scale_by_head_dim),
    ("deepseek_v3 half-split rope", "interleaved rope", _set_rope(interleaved=True)),
    ("glm4_moe", "interleaved rope", _set_rope(interleaved=True)),
    ("glm4_moe", "whole heads rotated", _set_rope(dim=12)),
    ("glm4_moe", "no qk-norm", _set(qk_norm="none")),
    ("glm4_moe", "no bias", _set(qkv_bias=False)),
    ("qwen3_moe", "no qk-norm", _set(qk_norm="none")),
    ("qwen3_moe", "another base", _set_rope(theta=10000.0)),
    ("olmoe", "qk-norm by head", _set(qk_norm="head")),
    ("olmoe", "no clip", _set(clip=0.0)),
    ("mixtral", "interleaved rope", _set_rope(interleaved=True)),
)


@pytest.mark.parametrize(("family", "fault", "doctor"), FAULTS, ids=[f"{family}: {fault}" for family, fault, _ in FAULTS])
def test_a_fault_in_attention_is_seen(
    family: str,
    fault: str,
    doctor: Fault,
    container_of: Callable[[str], Path],
    reference_logits: Callable[[str], Logits],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    described = engine_options._attention_dict

    def doctored(attention: Any) -> dict[str, Any]:
        description = described(attention)
        doctor(description)
        return description

    monkeypatch.setattr(engine_options, "_attention_dict", doctored)
    ours = list(run(native(container_of(family)), steps_of(CONFIGS[family])))
    assert unequal_steps(ours, reference_logits(family)) == list(range(len(ours))), fault


def test_a_wrong_mapping_of_heads_is_seen(tmp_path: Path, reference_logits: Callable[[str], Logits]) -> None:
    """Keys and values in another order of heads are what reading head h mod L instead of h // M would be."""

    config = CONFIGS["mixtral"]
    tensors = checkpoint_tensors(config)
    for name, values in tensors.items():
        if name.endswith(("k_proj.weight", "v_proj.weight")):
            tensors[name] = np.roll(values.reshape(config["num_key_value_heads"], -1, values.shape[1]), 1, axis=0).reshape(values.shape)
    write_checkpoint(tmp_path / "hf", config, tensors, dtype="F32")
    ours = list(run(native(converted(tmp_path, config)), steps_of(config)))
    assert unequal_steps(ours, reference_logits("mixtral")) == list(range(len(ours)))
