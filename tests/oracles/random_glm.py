"""Twenty small random glm_moe_dsa checkpoints: configurations and weights from a seed, NumPy only.

Dimensions are odd on purpose. Every case has 16 or more index heads: with few, relu makes scores that tie at exactly zero,
and frameworks differ in which of them they take. In the first ten cases index_topk is below the number of tokens, so that
DSA limits attention.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from colibri_jax.config import ModelConfig
from colibri_jax.tensors import TensorSpec, tensor_specs

_F, _S = "full", "shared"

# Per case: seed, tokens, then what differs from `_BASE`.
_BASE: dict[str, Any] = {
    "model_type": "glm_moe_dsa",
    "vocab_size": 97,
    "hidden_size": 37,
    "intermediate_size": 51,
    "moe_intermediate_size": 19,
    "num_hidden_layers": 3,
    "num_nextn_predict_layers": 0,
    "num_attention_heads": 3,
    "n_shared_experts": 1,
    "n_routed_experts": 12,
    "num_experts_per_tok": 3,
    "routed_scaling_factor": 2.5,
    "q_lora_rank": 23,
    "kv_lora_rank": 13,
    "qk_rope_head_dim": 6,
    "qk_nope_head_dim": 9,
    "v_head_dim": 11,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "index_topk": 8,
    "index_head_dim": 17,
    "index_n_heads": 16,
    "first_k_dense_replace": 1,
}

_CASES: tuple[tuple[int, int, dict[str, Any]], ...] = (
    (100, 40, {"indexer_types": [_F, _S, _F]}),
    (101, 33, {"hidden_size": 45, "n_routed_experts": 16, "n_group": 4, "topk_group": 2, "index_n_heads": 19, "index_topk": 11}),
    (102, 48, {"num_hidden_layers": 5, "first_k_dense_replace": 2, "indexer_types": [_F, _F, _S, _S, _F], "index_topk": 16}),
    (103, 70, {"n_shared_experts": 2, "index_topk": 64, "n_routed_experts": 9, "num_experts_per_tok": 2, "index_n_heads": 32}),
    (104, 40, {"n_shared_experts": 0, "norm_topk_prob": False, "routed_scaling_factor": 1.0, "index_topk": 24}),
    (105, 30, {"num_nextn_predict_layers": 1, "indexer_types": [_F, _S, _S], "qk_rope_head_dim": 2, "index_head_dim": 2}),
    (106, 41, {"mlp_layer_types": ["sparse", "dense", "sparse"], "index_topk": 9, "num_attention_heads": 5}),
    (107, 36, {"n_routed_experts": 24, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 5, "index_topk": 10, "index_n_heads": 24}),
    (108, 64, {"num_hidden_layers": 4, "index_topk_freq": 2, "index_skip_topk_offset": 1, "index_topk": 32, "v_head_dim": 7}),
    (109, 44, {"num_nextn_predict_layers": 1, "first_k_dense_replace": 3, "num_hidden_layers": 5, "index_topk": 12}),
    (110, 24, {"index_topk": 64}),
    (111, 17, {"index_topk": 17, "hidden_size": 64, "moe_intermediate_size": 32, "n_shared_experts": 2}),
    (112, 33, {"index_topk": 40, "n_routed_experts": 20, "n_group": 5, "topk_group": 3, "num_experts_per_tok": 4}),
    (113, 50, {"index_topk": 64, "num_hidden_layers": 6, "first_k_dense_replace": 3, "indexer_types": [_F, _S, _F, _S, _S, _F]}),
    (114, 21, {"index_topk": 32, "n_shared_experts": 0, "num_attention_heads": 1, "vocab_size": 61}),
    (115, 29, {"index_topk": 64, "tie_word_embeddings": True, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}),
    (116, 64, {"index_topk": 64, "n_routed_experts": 8, "num_experts_per_tok": 8, "norm_topk_prob": False}),
    (117, 31, {"index_topk": 48, "num_experts_per_tok": 1, "routed_scaling_factor": 1.0, "rms_norm_eps": 1e-6}),
    (118, 90, {"index_topk": 128, "num_nextn_predict_layers": 1, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    (119, 1, {"index_topk": 8, "n_routed_experts": 32, "n_group": 8, "topk_group": 4, "num_experts_per_tok": 6}),
)

N_CASES = len(_CASES)
DSA_CASES = range(10)


def hf_config(case: int) -> dict[str, Any]:
    """What the case's config.json would hold."""
    config = {**_BASE, **_CASES[case][2]}
    return {**config, "num_key_value_heads": config["num_attention_heads"]}


def tokens_of(case: int) -> np.ndarray:
    """int64 [n] token ids."""
    seed, n_tokens, _ = _CASES[case]
    return np.random.default_rng(seed + 1000).integers(0, hf_config(case)["vocab_size"], n_tokens)


def params_of(case: int) -> dict[str, np.ndarray]:
    """float32 weights by role."""
    return random_params(ModelConfig.from_hf(hf_config(case)), _CASES[case][0])


def random_params(config: ModelConfig, seed: int) -> dict[str, np.ndarray]:
    """float32 weights by role: embeddings and projections keep unit variance, routers spread their logits by 2."""
    rng = np.random.default_rng(seed)
    return {spec.role: _random(spec, rng) for spec in tensor_specs(config)}


def _random(spec: TensorSpec, rng: np.random.Generator) -> np.ndarray:
    drawn = rng.standard_normal(spec.shape)
    if spec.role.endswith(".router.bias"):
        return (0.1 * drawn).astype(np.float32)
    if len(spec.shape) == 1:
        return (0.1 * drawn + (0.0 if spec.role.endswith("_bias") else 1.0)).astype(np.float32)
    if spec.role == "embed":
        return drawn.astype(np.float32)
    gain = 2.0 if spec.role.endswith(".router.weight") else 1.0
    return (gain * drawn / np.sqrt(spec.shape[1])).astype(np.float32)
