"""The tensors of a model by role: one table of names, shapes and storage that every reader and backend follows.

A role is this package's own name of a tensor ("layers.3.experts.17.gate"); checkpoints have other names, which
`container/checkpoints.py` maps. Weight matrices are [out, in], as in the checkpoints.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Literal

from colibri_jax.config import GQAConfig, MLAConfig, ModelConfig

# How a tensor is stored in a container, and how a product with it is done (design table, "stored" and "product").
#   int4          groups along the input, activations quantised to int8
#   int4_dequant  groups along the input, dequantised to float32 before the product
#   int8          one scale per row, activations quantised to int8
#   int8_dequant  one scale per row, dequantised to float32 before the product
#   f32           as it is
Storage = Literal["int4", "int4_dequant", "int8", "int8_dequant", "f32"]

EXPERT_PARTS = ("gate", "up", "down")


@dataclasses.dataclass(frozen=True)
class TensorSpec:
    """Shape and storage of one role."""

    role: str
    shape: tuple[int, ...]
    storage: Storage


def tensor_specs(config: ModelConfig) -> Iterator[TensorSpec]:
    """All tensors of a model, in the order in which a step uses them; experts come last within their layer."""
    yield TensorSpec("embed", (config.vocab_size, config.hidden_size), "int8_dequant")
    for layer in range(config.n_layers):
        yield from layer_specs(config, layer)
    yield TensorSpec("final_norm", (config.hidden_size,), "f32")
    if not config.tie_embeddings:
        yield TensorSpec("head", (config.vocab_size, config.hidden_size), "int8")
    if config.n_mtp_layers:
        yield from mtp_specs(config)


def layer_specs(config: ModelConfig, layer: int) -> Iterator[TensorSpec]:
    """The tensors of one trunk layer, or of the MTP block's decoder layer (`layer == n_layers`)."""
    width, indexer, moe = config.hidden_size, config.indexer, config.moe
    is_mtp = layer == config.n_layers
    matrix: Storage = "int8" if is_mtp else "int4"
    prefix = f"layers.{layer}"

    yield TensorSpec(f"{prefix}.attn_norm", (width,), "f32")
    if isinstance(config.attention, MLAConfig):
        yield from _mla(f"{prefix}.attn", width, config.attention, matrix, "int8_dequant" if is_mtp else "int4_dequant")
    else:
        yield from _gqa(f"{prefix}.attn", width, config.attention, matrix)
    if indexer is not None and isinstance(config.attention, MLAConfig) and (is_mtp or indexer.kinds[layer] == "full"):
        yield TensorSpec(f"{prefix}.indexer.wq_b", (indexer.n_heads * indexer.head_dim, config.attention.q_lora_rank), "int8_dequant")
        yield TensorSpec(f"{prefix}.indexer.wk", (indexer.head_dim, width), "int8_dequant")
        yield TensorSpec(f"{prefix}.indexer.k_norm_weight", (indexer.head_dim,), "f32")
        yield TensorSpec(f"{prefix}.indexer.k_norm_bias", (indexer.head_dim,), "f32")
        yield TensorSpec(f"{prefix}.indexer.weights_proj", (indexer.n_heads, width), "f32")

    yield TensorSpec(f"{prefix}.mlp_norm", (width,), "f32")
    if not is_mtp and not config.sparse[layer]:
        yield from _mlp(f"{prefix}.mlp", width, config.dense_hidden, matrix)
        return
    yield TensorSpec(f"{prefix}.router.weight", (moe.n_experts, width), "f32")
    if moe.router.score == "sigmoid":
        yield TensorSpec(f"{prefix}.router.bias", (moe.n_experts,), "f32")
    if moe.n_shared:
        yield from _mlp(f"{prefix}.shared", width, moe.shared_hidden, matrix)
    for expert in range(moe.n_experts):
        yield from _mlp(f"{prefix}.experts.{expert}", width, moe.expert_hidden, matrix)


def mtp_specs(config: ModelConfig) -> Iterator[TensorSpec]:
    """The MTP block: two norms and a projection in front of one decoder layer, one norm after it."""
    width = config.hidden_size
    yield TensorSpec("mtp.enorm", (width,), "f32")
    yield TensorSpec("mtp.hnorm", (width,), "f32")
    yield TensorSpec("mtp.eh_proj", (width, 2 * width), "int8")
    yield from layer_specs(config, config.n_layers)
    yield TensorSpec("mtp.norm", (width,), "f32")


def expert_roles(layer: int, expert: int) -> tuple[str, str, str]:
    """Roles of one routed expert's matrices: gate, up, down."""
    prefix = f"layers.{layer}.experts.{expert}"
    return (f"{prefix}.gate", f"{prefix}.up", f"{prefix}.down")


def _mla(prefix: str, width: int, mla: MLAConfig, matrix: Storage, dequantised: Storage) -> Iterator[TensorSpec]:
    yield TensorSpec(f"{prefix}.q_a", (mla.q_lora_rank, width), matrix)
    yield TensorSpec(f"{prefix}.q_a_norm", (mla.q_lora_rank,), "f32")
    yield TensorSpec(f"{prefix}.q_b", (mla.n_heads * mla.qk_dim, mla.q_lora_rank), matrix)
    yield TensorSpec(f"{prefix}.kv_a", (mla.cache_width, width), matrix)
    yield TensorSpec(f"{prefix}.kv_a_norm", (mla.kv_lora_rank,), "f32")
    yield TensorSpec(f"{prefix}.kv_b", (mla.n_heads * (mla.nope_dim + mla.value_dim), mla.kv_lora_rank), dequantised)
    yield TensorSpec(f"{prefix}.o", (width, mla.n_heads * mla.value_dim), matrix)


def _gqa(prefix: str, width: int, gqa: GQAConfig, matrix: Storage) -> Iterator[TensorSpec]:
    for name, out in (("q", gqa.q_width), ("k", gqa.kv_width), ("v", gqa.kv_width)):
        yield TensorSpec(f"{prefix}.{name}", (out, width), matrix)
        if gqa.qkv_bias:
            yield TensorSpec(f"{prefix}.{name}_bias", (out,), "f32")
    if gqa.qk_norm != "none":
        yield TensorSpec(f"{prefix}.q_norm", (gqa.q_norm_width,), "f32")
        yield TensorSpec(f"{prefix}.k_norm", (gqa.k_norm_width,), "f32")
    yield TensorSpec(f"{prefix}.o", (width, gqa.q_width), matrix)


def _mlp(prefix: str, width: int, hidden: int, storage: Storage) -> Iterator[TensorSpec]:
    yield TensorSpec(f"{prefix}.gate", (hidden, width), storage)
    yield TensorSpec(f"{prefix}.up", (hidden, width), storage)
    yield TensorSpec(f"{prefix}.down", (width, hidden), storage)
