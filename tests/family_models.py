"""Small random containers of every family, with odd dimensions, and the steps that they are run through."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from oracles.checkpoints import write_checkpoint
from oracles.random_glm import random_params

from colibri_jax.config import ModelConfig
from colibri_jax.container.checkpoints import checkpoint_name
from colibri_jax.container.convert import plan_conversion, run_conversion
from colibri_jax.generate.protocol import LanguageModel
from colibri_jax.routing_spec import Scope

Tensors = dict[str, npt.NDArray[np.float32]]

_COMMON: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 75,
    "intermediate_size": 53,
    "moe_intermediate_size": 37,
    "num_hidden_layers": 3,
    "num_experts_per_tok": 3,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
}
_DEEPSEEK: dict[str, Any] = {
    **_COMMON,
    "model_type": "deepseek_v3",
    "num_attention_heads": 3,
    "q_lora_rank": 41,
    "kv_lora_rank": 21,
    "qk_rope_head_dim": 10,
    "qk_nope_head_dim": 9,
    "v_head_dim": 11,
    "n_routed_experts": 12,
    "n_shared_experts": 2,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 1,
}
CONFIGS: dict[str, dict[str, Any]] = {
    # Pair 0 keeps its frequency, pair 1 gets a mixture, the others are slowed down; both of YaRN's magnitudes differ from 1.
    "deepseek_v3": {
        **_DEEPSEEK,
        "rope_scaling": {
            "type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 64,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 0.7,
        },
    },
    "deepseek_v3 half-split rope": {**_DEEPSEEK, "rope_interleave": False, "n_shared_experts": 1, "norm_topk_prob": False},
    "glm4_moe": {
        **_COMMON,
        "model_type": "glm4_moe",
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 12,
        "partial_rotary_factor": 0.5,
        "attention_bias": True,
        "use_qk_norm": True,
        "n_routed_experts": 10,
        "n_shared_experts": 1,
        "routed_scaling_factor": 1.5,
        "first_k_dense_replace": 1,
    },
    "qwen3_moe": {
        **_COMMON,
        "model_type": "qwen3_moe",
        "num_attention_heads": 5,
        "num_key_value_heads": 1,
        "head_dim": 18,
        "num_experts": 9,
        "norm_topk_prob": True,
        "decoder_sparse_step": 2,
        "num_hidden_layers": 4,
        "rope_theta": 1e6,
        "tie_word_embeddings": True,
    },
    "olmoe": {
        **_COMMON,
        "model_type": "olmoe",
        "hidden_size": 78,
        "intermediate_size": 21,
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "num_experts": 11,
        "norm_topk_prob": False,
        "clip_qkv": 1.25,
    },
    "mixtral": {
        **_COMMON,
        "model_type": "mixtral",
        "hidden_size": 84,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "rope_theta": 1e6,
    },
}


def checkpoint_tensors(config: dict[str, Any], seed: int = 0) -> Tensors:
    """Random float32 weights by checkpoint name, scaled so that no layer explodes."""
    parsed = ModelConfig.from_hf(config)
    return {checkpoint_name(parsed, role): values for role, values in random_params(parsed, seed).items()}


def make_container(
    directory: Path, config: dict[str, Any], *, seed: int = 0, doctor: Callable[[Tensors], None] = lambda tensors: None
) -> Path:
    """A container converted from a random checkpoint, whose tensors `doctor` may change first."""
    tensors = checkpoint_tensors(config, seed)
    doctor(tensors)
    write_checkpoint(directory / "hf", config, tensors, dtype="F32")
    target = directory / "container"
    run_conversion(plan_conversion(directory / "hf", target))
    return target


@dataclasses.dataclass(frozen=True)
class Step:
    """One forward call, after dropping the last `rewind` positions."""

    scope: Scope
    tokens: tuple[int, ...]
    rewind: int = 0


def steps_of(config: dict[str, Any], seed: int = 1) -> list[Step]:
    """A prompt, decoding, a verification of which a part is dropped, and on from there. Row counts are few: each is compiled anew."""
    ids = [int(i) for i in np.random.default_rng(seed).integers(0, config["vocab_size"], 32)]
    return [
        Step("prefill", tuple(ids[:16])),
        Step("decode", (ids[16],)),
        Step("decode", (ids[17],)),
        Step("verify", tuple(ids[18:22])),
        Step("verify", tuple(ids[22:26]), rewind=3),
        Step("decode", (ids[26],), rewind=1),
    ]


def run(model: LanguageModel, steps: Iterable[Step]) -> list[npt.NDArray[np.float32]]:
    """The logits of each step, float32 [n, W]."""
    logits = []
    for step in steps:
        model.rewind(step.rewind)
        logits.append(model.forward(step.tokens, scope=step.scope))
    return logits
