"""Model families: what a config.json means, tensor names, and every family's logits and experts against transformers."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from oracles.checkpoints import write_checkpoint
from oracles.random_families import CASES, Case
from recorded import against_transformers

from colibri_jax.config import FAMILIES, GQAConfig, MLAConfig, ModelConfig, RopeConfig, YarnConfig
from colibri_jax.container import checkpoints, convert
from colibri_jax.container.plan import target_format
from colibri_jax.container.reader import Container
from colibri_jax.errors import ConfigError, UnsupportedFamilyError
from colibri_jax.quant import DEFAULT_GROUP_SIZE, QuantizedMatrix, quantize
from colibri_jax.reference import ReferenceModel
from colibri_jax.tensors import tensor_specs

GOLDENS = pathlib.Path(__file__).parent / "goldens" / "families.npz"

# Of the largest logit, derived in test_reference_model.py.
TOLERANCE = 2e-5


def relative_error(got: np.ndarray, expected: np.ndarray) -> float:
    return float(np.abs(got - expected).max() / np.abs(expected).max())


def golden(case: Case, result: str) -> np.ndarray:
    with np.load(GOLDENS) as goldens:
        return goldens[f"{case.name}/{result}"]


def run(case: Case, config: ModelConfig | None = None, params: dict[str, np.ndarray] | None = None) -> tuple[ReferenceModel, np.ndarray]:
    lm = ReferenceModel(config or case.model, params or case.params(), context_positions=64)
    return lm, lm.forward(case.tokens, scope="prefill")


# ---- against transformers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_logits_experts_and_weights_equal_transformers(name: str, record_property: Callable[[str, object], None]) -> None:
    case = CASES[name]
    lm, logits = run(case)
    error = relative_error(logits, golden(case, "logits"))
    record_property("error", against_transformers(case.config["model_type"], error, TOLERANCE))
    assert error < TOLERANCE
    chosen, weights = golden(case, "chosen"), golden(case, "weights")
    assert len(lm.selections) == len(chosen) > 0
    for selection, ids, gate in zip(lm.selections, chosen, weights, strict=True):
        order = np.argsort(selection.ids, axis=1)
        np.testing.assert_array_equal(np.take_along_axis(selection.ids, order, axis=1), ids)
        np.testing.assert_allclose(np.take_along_axis(selection.weights, order, axis=1), gate, atol=TOLERANCE)
    if case.model.n_mtp_layers:
        drafts = lm.mtp_forward(case.tokens[1:], lm.hidden[:-1])
        assert relative_error(drafts, golden(case, "mtp_logits")) < TOLERANCE


def _attention(**changes: Any) -> Callable[[ModelConfig], ModelConfig]:
    return lambda config: dataclasses.replace(config, attention=dataclasses.replace(config.attention, **changes))


def _rope(**changes: Any) -> Callable[[ModelConfig], ModelConfig]:
    return lambda config: _attention(rope=dataclasses.replace(config.attention.rope, **changes))(config)


def _yarn(**changes: Any) -> Callable[[ModelConfig], ModelConfig]:
    return lambda config: _rope(yarn=dataclasses.replace(config.attention.rope.yarn, **changes))(config)


def _router(**changes: Any) -> Callable[[ModelConfig], ModelConfig]:
    def change(config: ModelConfig) -> ModelConfig:
        router = dataclasses.replace(config.moe.router, **changes)
        return dataclasses.replace(config, moe=dataclasses.replace(config.moe, router=router))

    return change


CONFIG_FAULTS = {
    "half-split rope read as interleaved": ("qwen3_moe-0", _rope(layout="interleaved")),
    "interleaved rope read as half-split": ("deepseek_v3-0", _rope(layout="half")),
    "whole heads rotate": ("glm4_moe-0", _rope(dim=12)),
    "no yarn": ("deepseek_v3-0", _rope(yarn=None)),
    "no yarn factor on the scores": ("deepseek_v3-1", _yarn(softmax_mscale=1.0)),
    "no yarn factor on cos and sin": ("deepseek_v3-1", _yarn(attention_factor=1.0)),
    "yarn between pairs, not at whole ones": ("deepseek_v3-1", _yarn(truncate=False)),
    "no clip": ("olmoe-1", _attention(clip=None)),
    "norm of every head": ("olmoe-0", None),
    "not normalised": ("mixtral-0", _router(norm_topk_prob=False)),
    "normalised": ("olmoe-0", _router(norm_topk_prob=True)),
    "no groups": ("deepseek_v3-0", _router(n_group=1, topk_group=1)),
}


@pytest.mark.parametrize("fault", CONFIG_FAULTS)
def test_golden_comparison_notices_a_wrong_description(fault: str) -> None:
    name, change = CONFIG_FAULTS[fault]
    case, params = CASES[name], None
    if change is None:  # a norm per head needs weights of a head's width
        change, params = _attention(qk_norm="head"), case.params()
        attention = case.model.attention
        assert isinstance(attention, GQAConfig)
        params |= {role: value[: attention.head_dim] for role, value in params.items() if role.endswith(("attn.q_norm", "attn.k_norm"))}
    _, logits = run(case, change(case.model), params)
    assert relative_error(logits, golden(case, "logits")) > 10 * TOLERANCE


@pytest.mark.parametrize(
    ("name", "role"),
    [("glm4_moe-2", "layers.1.attn.k_bias"), ("glm4_moe-2", "layers.2.attn.v_bias"), ("qwen3_moe-2", "layers.2.attn.k_norm")],
)
def test_golden_comparison_notices_a_wrong_tensor(name: str, role: str) -> None:
    case = CASES[name]
    params = case.params()
    params[role] = np.roll(params[role], 1)
    _, logits = run(case, params=params)
    assert relative_error(logits, golden(case, "logits")) > 10 * TOLERANCE


@pytest.mark.parametrize("name", CASES)
def test_checkpoint_names_and_shapes_are_those_that_transformers_writes(name: str) -> None:
    case = CASES[name]
    expected = json.loads(golden(case, "shapes").tobytes())
    specs = checkpoints.named_specs(case.model)
    assert {key: list(spec.shape) for key, spec in specs.items() if not checkpoints.is_mtp(case.model, spec.role)} == expected


# ---- steps, precisions, containers ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["qwen3_moe-0", "deepseek_v3-0"])
def test_split_steps_agree_with_one_prefill(name: str) -> None:
    case = CASES[name]
    lm, whole = run(case)
    lm.rewind(case.n_tokens - 21)
    assert lm.position == 21
    parts = [lm.forward(case.tokens[21:37], scope="verify")] + [lm.forward([token], scope="decode") for token in case.tokens[37:41]]
    assert relative_error(np.concatenate(parts), whole[21:41]) < TOLERANCE


@pytest.mark.parametrize("name", [f"{family}-0" for family in FAMILIES if family != "glm_moe_dsa"])
def test_a_checkpoint_survives_conversion(name: str, tmp_path: pathlib.Path) -> None:
    case, params = CASES[name], CASES[name].params()
    tensors = {checkpoints.checkpoint_name(case.model, role): value for role, value in params.items()}
    source = write_checkpoint(tmp_path / "hf", case.config, tensors)
    convert.run_conversion(convert.plan_conversion(source, tmp_path / "container"))
    container = Container.open(tmp_path / "container")
    assert dataclasses.asdict(container.config) == dataclasses.asdict(case.model)
    for spec in tensor_specs(case.model):
        stored, expected = container.read(spec.role), params[spec.role]
        assert isinstance(stored, QuantizedMatrix) == (spec.storage != "f32"), spec.role
        values = stored.dequantize() if isinstance(stored, QuantizedMatrix) else stored
        # bfloat16 on the way in, then half a step of 1/7 of a row's largest value at most.
        bound = np.abs(expected).max() * (2**-8 + (0.0 if spec.storage == "f32" else 0.5 / 7 * 1.01))
        assert np.abs(values - expected).max() <= bound, spec.role


@pytest.mark.parametrize("name", ["glm4_moe-0", "olmoe-1"])
def test_quantised_activations_change_logits_a_little(name: str) -> None:
    case, params = CASES[name], CASES[name].params()
    stored: dict[str, Any] = {}
    for spec in tensor_specs(case.model):
        fmt = target_format(spec.storage, "row_major", DEFAULT_GROUP_SIZE)
        stored[spec.role] = params[spec.role] if fmt.bits == 32 else quantize(params[spec.role], fmt)
    logits = {}
    for precision in ("w4a32", "w4a8"):
        lm = ReferenceModel(case.model, stored, precision=precision, context_positions=64)
        logits[precision] = lm.forward(case.tokens[:8], scope="prefill")
    # int8 activations are off by up to half of 1/127 of a group's largest value.
    off = np.linalg.norm(logits["w4a8"] - logits["w4a32"]) / np.linalg.norm(logits["w4a32"])
    assert 1e-4 < off < 0.15


def test_attention_matrices_have_the_storage_of_the_table() -> None:
    storage = {spec.role: spec.storage for spec in tensor_specs(CASES["glm4_moe-0"].model)}
    for name in "qkvo":
        assert storage[f"layers.1.attn.{name}"] == "int4"
        assert storage[f"layers.3.attn.{name}"] == "int8"  # the MTP block
    for name in ("q_bias", "k_bias", "v_bias", "q_norm", "k_norm"):
        assert storage[f"layers.1.attn.{name}"] == "f32"
    assert "layers.1.router.bias" in storage
    assert not any(spec.role.endswith("router.bias") for spec in tensor_specs(CASES["olmoe-0"].model))


# ---- configurations ---------------------------------------------------------------------------------------------


def test_yarn_frequencies_of_the_published_deepseek_v3() -> None:
    config = CASES["deepseek_v3-0"].config | {"qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "max_position_embeddings": 163840}
    attention = ModelConfig.from_hf(config).attention
    assert isinstance(attention, MLAConfig)
    # 32 turns in 4096 positions: pair 10.47; one turn: pair 22.51.
    for pair, share in ((0, 0.0), (10, 0.0), (16, 6 / 13), (22, 12 / 13), (23, 1.0), (31, 1.0)):
        plain = 10000.0 ** (-pair / 32)
        assert attention.rope.frequencies[pair] == pytest.approx(plain * (1 - share) + plain / 40 * share, rel=1e-14)
    assert attention.rope.attention_factor == 1.0
    assert attention.softmax_scale == pytest.approx(192**-0.5 * (0.1 * np.log(40) + 1) ** 2, rel=1e-14)


def test_yarn_without_magnitudes_scales_cos_and_sin() -> None:
    attention = CASES["qwen3_moe-1"].model.attention
    assert attention.rope.attention_factor == pytest.approx(0.1 * np.log(4) + 1)
    assert attention.softmax_scale == 10**-0.5


def test_defaults_are_those_of_the_configuration_classes() -> None:
    glm4 = ModelConfig.from_hf({key: value for key, value in CASES["glm4_moe-0"].config.items() if key != "partial_rotary_factor"})
    assert glm4.attention.rope.dim == 6
    mixtral = ModelConfig.from_hf(CASES["mixtral-1"].config)
    assert mixtral.attention.rope.theta == 1e6
    assert mixtral.attention.head_dim == 6
    assert mixtral.moe.router.norm_topk_prob
    olmoe = CASES["olmoe-0"].model
    assert olmoe.attention.n_kv_heads == olmoe.attention.n_heads
    assert not olmoe.moe.router.norm_topk_prob
    assert not CASES["qwen3_moe-1"].model.moe.router.norm_topk_prob


def test_sparse_layers_follow_step_and_exceptions() -> None:
    assert CASES["qwen3_moe-0"].model.sparse == (True, False, True)
    assert CASES["qwen3_moe-1"].model.sparse == (False, True, False, True, False)
    assert CASES["deepseek_v3-2"].model.sparse == (True, True, True)


@pytest.mark.parametrize(
    ("name", "changes", "where"),
    [
        ("mixtral-0", {"sliding_window": 4096}, "sliding_window"),
        ("mixtral-0", {"hidden_act": "gelu"}, "hidden_act"),
        ("mixtral-0", {"num_key_value_heads": 2}, "num_key_value_heads"),
        ("mixtral-0", {"head_dim": 7}, "rope"),
        ("mixtral-0", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ("mixtral-0", {"num_local_experts": None}, "num_local_experts"),
        ("qwen3_moe-0", {"use_sliding_window": True}, "use_sliding_window"),
        ("qwen3_moe-0", {"attention_bias": True}, "attention_bias"),
        ("qwen3_moe-0", {"decoder_sparse_step": 0}, "decoder_sparse_step"),
        ("qwen3_moe-0", {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope_type"),
        ("qwen3_moe-0", {"rope_scaling": "yarn"}, "rope_scaling"),
        ("qwen3_moe-0", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "original_max_position_embeddings"),
        ("olmoe-0", {"clip_qkv": -1.0}, "clip_qkv"),
        ("olmoe-0", {"head_dim": 8}, "head_dim"),
        ("deepseek_v3-0", {"q_lora_rank": None}, "q_lora_rank"),
        ("deepseek_v3-0", {"attention_bias": True}, "attention_bias"),
        ("deepseek_v3-0", {"scoring_func": "softmax"}, "scoring_func"),
        ("deepseek_v3-0", {"n_group": 5}, "n_group"),
        ("deepseek_v3-0", {"routed_scaling_factor": float("nan")}, "routed_scaling_factor"),
        ("glm4_moe-0", {"partial_rotary_factor": float("inf")}, "partial_rotary_factor"),
        ("glm4_moe-0", {"partial_rotary_factor": 1e308}, "partial_rotary_factor"),
        ("glm4_moe-0", {"partial_rotary_factor": 0.0}, "partial_rotary_factor"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(name: str, changes: dict[str, Any], where: str) -> None:
    with pytest.raises(ConfigError, match=where):
        ModelConfig.from_hf({**CASES[name].config, **changes})


def test_unknown_families_are_refused() -> None:
    with pytest.raises(UnsupportedFamilyError, match="llama"):
        ModelConfig.from_hf({**CASES["mixtral-0"].config, "model_type": "llama"})


def test_ropes_outside_their_domain_are_refused() -> None:
    for change in ({"dim": 5}, {"dim": 0}, {"theta": 1.0}, {"theta": float("inf")}, {"layout": "thirds"}):
        with pytest.raises(ConfigError):
            RopeConfig(**{"dim": 6, "theta": 1e4, **change})
    for change in ({"factor": 0.0}, {"original_positions": 0}, {"beta_fast": 1.0}, {"attention_factor": float("nan")}):
        with pytest.raises(ConfigError):
            YarnConfig(**{"factor": 4.0, "original_positions": 32, **change})
