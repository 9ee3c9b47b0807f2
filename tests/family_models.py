"""Small configurations of every family but GLM's, with odd dimensions, and the steps that they are run through."""

from __future__ import annotations

from typing import Any

from engine_models import Step, random_tokens

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


def steps_of(config: dict[str, Any]) -> list[Step]:
    """A prompt, decoding, a verification, another of which a part is dropped, and on from there. Row counts are few: each is compiled."""
    ids = random_tokens(config, 32)
    return [
        Step("prefill", tuple(ids[:16])),
        Step("decode", (ids[16],)),
        Step("decode", (ids[17],)),
        Step("verify", tuple(ids[18:22])),
        Step("verify", tuple(ids[22:26]), rewind=3),
        Step("decode", (ids[26],), rewind=1),
    ]
