"""Small random checkpoints of every family but glm_moe_dsa, three each: configurations, weights and tokens from a seed, NumPy only.

Dimensions are odd where the format allows it (rope rotates pairs), head counts do not divide each other by accident, and each family's
switches are on in one case and off in another.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from oracles.random_glm import random_params

from colibri_jax.config import ModelConfig

_COMMON: dict[str, Any] = {
    "vocab_size": 53,
    "hidden_size": 37,
    "intermediate_size": 51,
    "num_hidden_layers": 3,
    "max_position_embeddings": 256,
}
_SIGMOID: dict[str, Any] = {
    "moe_intermediate_size": 19,
    "n_routed_experts": 12,
    "num_experts_per_tok": 3,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 0,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "rms_norm_eps": 1e-5,
}
_MLA: dict[str, Any] = {
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "q_lora_rank": 23,
    "kv_lora_rank": 13,
    "qk_rope_head_dim": 6,
    "qk_nope_head_dim": 9,
    "v_head_dim": 11,
}
# As the published DeepSeek-V3 has it.
_PUBLISHED_YARN = {
    "type": "yarn",
    "factor": 40,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096,
}
_UNEVEN_YARN = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 6.0,
    "beta_fast": 4.0,
    "beta_slow": 0.5,
    "mscale": 0.7,
    "mscale_all_dim": 1.3,
    "original_max_position_embeddings": 24,
}
_PLAIN_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}


@dataclasses.dataclass(frozen=True)
class Case:
    """One checkpoint: what its config.json would hold, its seed, how many tokens it is fed."""

    name: str
    config: dict[str, Any]
    seed: int
    n_tokens: int

    @property
    def model(self) -> ModelConfig:
        return ModelConfig.from_hf(self.config)

    @property
    def tokens(self) -> np.ndarray:
        """int64 [n_tokens]."""
        return np.random.default_rng(self.seed + 1000).integers(0, self.config["vocab_size"], self.n_tokens)

    def params(self) -> dict[str, np.ndarray]:
        """float32 weights by role."""
        return random_params(self.model, self.seed)


def _cases() -> dict[str, Case]:
    deepseek = {**_COMMON, **_SIGMOID, **_MLA}
    glm4 = {**_COMMON, **_SIGMOID, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 12, "rope_theta": 1e4}
    qwen3 = {**_COMMON, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 10, "moe_intermediate_size": 19, "num_experts": 12}
    qwen3 |= {"num_experts_per_tok": 3, "rms_norm_eps": 1e-6, "rope_theta": 1e6}
    olmoe = {**_COMMON, "hidden_size": 42, "intermediate_size": 19, "num_attention_heads": 7, "num_experts": 12, "num_experts_per_tok": 3}
    mixtral = {**_COMMON, "intermediate_size": 19, "num_attention_heads": 5, "num_key_value_heads": 1, "head_dim": 8}
    mixtral |= {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None}
    table: tuple[tuple[str, dict[str, Any], int, dict[str, Any]], ...] = (
        (
            "deepseek_v3",
            deepseek,
            48,
            {
                "rope_theta": 10000,
                "rope_scaling": _PUBLISHED_YARN,
                "n_routed_experts": 32,
                "n_group": 8,
                "topk_group": 4,
                "num_experts_per_tok": 6,
                "num_nextn_predict_layers": 1,
            },
        ),
        (
            "deepseek_v3",
            deepseek,
            60,
            {"rope_parameters": _UNEVEN_YARN, "rope_interleave": False, "qk_rope_head_dim": 10, "n_shared_experts": 2},
        ),
        (
            "deepseek_v3",
            deepseek,
            33,
            {"rope_theta": 500.0, "norm_topk_prob": False, "first_k_dense_replace": 0, "tie_word_embeddings": True},
        ),
        (
            "glm4_moe",
            glm4,
            48,
            {
                "attention_bias": True,
                "use_qk_norm": True,
                "partial_rotary_factor": 0.5,
                "num_nextn_predict_layers": 1,
                "routed_scaling_factor": 1.0,
            },
        ),
        (
            "glm4_moe",
            {key: value for key, value in glm4.items() if key != "rope_theta"},
            31,
            {
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e3, "partial_rotary_factor": 0.75},
                "head_dim": 9,
                "num_attention_heads": 5,
                "num_key_value_heads": 1,
                "n_group": 3,
                "topk_group": 2,
            },
        ),
        (
            "glm4_moe",
            glm4,
            40,
            {
                "attention_bias": True,
                "head_dim": 9,
                "num_attention_heads": 3,
                "num_key_value_heads": 3,
                "n_shared_experts": 2,
                "first_k_dense_replace": 2,
            },
        ),
        ("qwen3_moe", qwen3, 48, {"mlp_only_layers": [1], "norm_topk_prob": True}),
        (
            "qwen3_moe",
            {key: value for key, value in qwen3.items() if key != "rope_theta"},
            60,
            {"num_hidden_layers": 5, "decoder_sparse_step": 2, "rope_parameters": _PLAIN_YARN, "num_experts": 17, "num_experts_per_tok": 5},
        ),
        (
            "qwen3_moe",
            qwen3,
            21,
            {"num_attention_heads": 3, "num_key_value_heads": 3, "tie_word_embeddings": True, "num_experts_per_tok": 1},
        ),
        ("olmoe", olmoe, 48, {"norm_topk_prob": False}),
        ("olmoe", olmoe, 35, {"num_key_value_heads": 1, "clip_qkv": 0.8, "norm_topk_prob": True}),
        (
            "olmoe",
            olmoe,
            27,
            {"hidden_size": 30, "num_attention_heads": 3, "clip_qkv": 1.5, "rope_theta": 500.0, "num_experts_per_tok": 12},
        ),
        ("mixtral", mixtral, 48, {"rope_theta": 1e6}),
        (
            "mixtral",
            mixtral,
            35,
            {"hidden_size": 36, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": None, "num_experts_per_tok": 1},
        ),
        ("mixtral", mixtral, 29, {"num_local_experts": 3, "num_key_value_heads": 5, "head_dim": 6, "rope_theta": 100.0}),
    )
    named = {}
    for i, (family, base, n_tokens, changes) in enumerate(table):
        name = f"{family}-{i % 3}"
        named[name] = Case(name, {**base, "model_type": family, **changes}, 500 + i, n_tokens)
    return named


CASES = _cases()
