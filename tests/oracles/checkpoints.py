"""Small random glm_moe_dsa checkpoints in Hugging Face form, and a plain writer for them in every source dtype."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from oracles.colibri_writer import write_file

NUMPY_DTYPES = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype(ml_dtypes.bfloat16)}


def small_config(**changes: Any) -> dict[str, Any]:
    """A model with every kind of tensor and no dimension that is a multiple of another by accident."""
    config = {
        "model_type": "glm_moe_dsa",
        "vocab_size": 40,
        "hidden_size": 72,
        "intermediate_size": 52,
        "moe_intermediate_size": 20,
        "num_hidden_layers": 3,
        "num_nextn_predict_layers": 1,
        "num_attention_heads": 2,
        "n_shared_experts": 1,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "kv_lora_rank": 24,
        "q_lora_rank": 36,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 8,
        "v_head_dim": 10,
        "index_n_heads": 2,
        "index_head_dim": 12,
        "index_topk": 8,
        "indexer_types": ["full", "shared", "full"],
        "first_k_dense_replace": 1,
        "max_position_embeddings": 64,
    }
    return {**config, **changes}


def named_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes that such a checkpoint holds, written out independently of the package's own table."""
    c = config
    width, heads, q_rank, kv_rank = c["hidden_size"], c["num_attention_heads"], c["q_lora_rank"], c["kv_lora_rank"]
    nope, rope, value = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"]
    layers = c["num_hidden_layers"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (c["vocab_size"], width), "model.norm.weight": (width,)}
    if not c.get("tie_word_embeddings"):
        shapes["lm_head.weight"] = (c["vocab_size"], width)
    for layer in range(layers + c["num_nextn_predict_layers"]):
        p = f"model.layers.{layer}."
        shapes[p + "input_layernorm.weight"] = (width,)
        shapes[p + "post_attention_layernorm.weight"] = (width,)
        shapes[p + "self_attn.q_a_proj.weight"] = (q_rank, width)
        shapes[p + "self_attn.q_a_layernorm.weight"] = (q_rank,)
        shapes[p + "self_attn.q_b_proj.weight"] = (heads * (nope + rope), q_rank)
        shapes[p + "self_attn.kv_a_proj_with_mqa.weight"] = (kv_rank + rope, width)
        shapes[p + "self_attn.kv_a_layernorm.weight"] = (kv_rank,)
        shapes[p + "self_attn.kv_b_proj.weight"] = (heads * (nope + value), kv_rank)
        shapes[p + "self_attn.o_proj.weight"] = (width, heads * value)
        if layer == layers or c["indexer_types"][layer] == "full":
            i_heads, i_dim = c["index_n_heads"], c["index_head_dim"]
            shapes[p + "self_attn.indexer.wq_b.weight"] = (i_heads * i_dim, q_rank)
            shapes[p + "self_attn.indexer.wk.weight"] = (i_dim, width)
            shapes[p + "self_attn.indexer.k_norm.weight"] = (i_dim,)
            shapes[p + "self_attn.indexer.k_norm.bias"] = (i_dim,)
            shapes[p + "self_attn.indexer.weights_proj.weight"] = (i_heads, width)
        if layer < c["first_k_dense_replace"]:
            mlps = [("mlp.", c["intermediate_size"])]
        else:
            shapes[p + "mlp.gate.weight"] = (c["n_routed_experts"], width)
            shapes[p + "mlp.gate.e_score_correction_bias"] = (c["n_routed_experts"],)
            hidden = c["moe_intermediate_size"]
            mlps = [("mlp.shared_experts.", hidden * c["n_shared_experts"])]
            mlps += [(f"mlp.experts.{e}.", hidden) for e in range(c["n_routed_experts"])]
        for name, hidden in mlps:
            shapes[p + name + "gate_proj.weight"] = (hidden, width)
            shapes[p + name + "up_proj.weight"] = (hidden, width)
            shapes[p + name + "down_proj.weight"] = (width, hidden)
        if layer == layers:
            shapes[p + "enorm.weight"] = shapes[p + "hnorm.weight"] = shapes[p + "shared_head.norm.weight"] = (width,)
            shapes[p + "eh_proj.weight"] = (width, 2 * width)
    return shapes


def random_tensors(config: dict[str, Any], seed: int = 0) -> dict[str, np.ndarray]:
    """float32 tensors whose values bfloat16 holds exactly, among them exact zeros and one all-zero row."""
    rng = np.random.default_rng(seed)
    tensors = {}
    for name, shape in named_shapes(config).items():
        values = rng.normal(size=shape).astype(ml_dtypes.bfloat16).astype(np.float32)
        if len(shape) == 2:
            values[0] = 0
        tensors[name] = values
    return tensors


def encode(name: str, values: np.ndarray, dtype: str) -> list[tuple[str, str, list[int], bytes]]:
    """One tensor as the blobs of a file; F8_E4M3 brings its block scales."""
    if dtype != "F8_E4M3":
        return [(name, dtype, list(values.shape), values.astype(NUMPY_DTYPES[dtype]).tobytes())]
    rows, cols = values.shape
    scales = np.ones((-(-rows // 128), -(-cols // 128)), np.float32)
    codes = np.empty((rows, cols), ml_dtypes.float8_e4m3fn)
    for r in range(scales.shape[0]):
        for c in range(scales.shape[1]):
            block = values[128 * r : 128 * r + 128, 128 * c : 128 * c + 128]
            scales[r, c] = max(float(np.abs(block).max()), 1e-4) / 448
            codes[128 * r : 128 * r + 128, 128 * c : 128 * c + 128] = (block / scales[r, c]).astype(ml_dtypes.float8_e4m3fn)
    return [(name, dtype, [rows, cols], codes.tobytes()), (name + "_scale_inv", "F32", list(scales.shape), scales.tobytes())]


def write_checkpoint(
    directory: Path, config: dict[str, Any], tensors: dict[str, np.ndarray], *, dtype: str = "BF16", shards: int = 1, index: bool = False
) -> Path:
    """Write a checkpoint directory. `dtype` is for matrices; with F8_E4M3 the rest is BF16. The router is always F32."""
    directory.mkdir(parents=True)
    blobs = []
    for name, values in tensors.items():
        kept = "mlp.gate." in name
        plain = values.ndim == 1 or "embed" in name or "lm_head" in name or "weights_proj" in name
        chosen = "F32" if kept else "BF16" if dtype == "F8_E4M3" and plain else dtype
        blobs += encode(name, values, chosen)
    weight_map = {}
    for number in range(shards):
        file = "model.safetensors" if shards == 1 else f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        part = blobs[number::shards]
        write_file(directory / file, part)
        weight_map.update({blob[0]: file for blob in part})
    if index:
        (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (directory / "config.json").write_text(json.dumps(config, indent=1))
    (directory / "tokenizer.json").write_text('{"version": "1.0"}')
    (directory / "generation_config.json").write_text('{"eos_token_id": [0, 4]}')
    return directory
