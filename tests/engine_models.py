"""Small random containers for the engine's tests, made by the package's own converter or by the independent writer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from model_runs import Step
from oracles.checkpoints import write_checkpoint
from oracles.colibri_writer import write_container
from oracles.random_glm import random_params

from colibri_jax.config import ModelConfig
from colibri_jax.container.checkpoints import checkpoint_name
from colibri_jax.container.convert import plan_conversion, run_conversion
from colibri_jax.generate.protocol import LanguageModel
from colibri_jax.quant import Layout, ScaleType

F, S = "full", "shared"

# Every kind of tensor, no width a multiple of 16, several dense layers, expert groups, two shared experts, 17 index heads,
# layers that share the indexer's choice, and an index_topk that 40 positions exceed by far.
ODD: dict[str, Any] = {
    "model_type": "glm_moe_dsa",
    "vocab_size": 89,
    "hidden_size": 75,
    "intermediate_size": 83,
    "moe_intermediate_size": 37,
    "num_hidden_layers": 5,
    "num_nextn_predict_layers": 1,
    "num_attention_heads": 3,
    "n_shared_experts": 2,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
    "q_lora_rank": 41,
    "kv_lora_rank": 21,
    "qk_rope_head_dim": 6,
    "qk_nope_head_dim": 9,
    "v_head_dim": 11,
    "index_n_heads": 17,
    "index_head_dim": 19,
    "index_topk": 10,
    "indexer_types": [F, F, S, S, F],
    "first_k_dense_replace": 2,
    "max_position_embeddings": 128,
}
# Widths that fill registers and groups exactly, tied embeddings, no shared expert, dense layers in between, no DSA at 40 positions.
EVEN: dict[str, Any] = {
    **ODD,
    "vocab_size": 96,
    "hidden_size": 128,
    "intermediate_size": 64,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_nextn_predict_layers": 0,
    "num_attention_heads": 2,
    "n_shared_experts": 0,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.0,
    "q_lora_rank": 64,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "index_n_heads": 16,
    "index_head_dim": 16,
    "index_topk": 64,
    "indexer_types": [F, F, F],
    "mlp_layer_types": ["sparse", "dense", "sparse"],
    "tie_word_embeddings": True,
}


def checkpoint_tensors(config: dict[str, Any], seed: int = 0) -> dict[str, npt.NDArray[np.float32]]:
    """Random float32 weights by checkpoint name, scaled so that no layer explodes."""
    parsed = ModelConfig.from_hf(config)
    return {checkpoint_name(parsed, role): values for role, values in random_params(parsed, seed).items()}


def converted(
    directory: Path,
    config: dict[str, Any],
    *,
    seed: int = 0,
    layout: Layout = "rows16",
    group_size: int = 64,
    scales: ScaleType = "f32",
    shard_bytes: int = 1 << 20,
) -> Path:
    """A container in `directory / "out"`, from a checkpoint in `directory / "hf"` (kept)."""
    if not (directory / "hf").exists():
        write_checkpoint(directory / "hf", config, checkpoint_tensors(config, seed), dtype="F32")
    target = directory / f"out-{layout}-{group_size}-{scales}"
    options: dict[str, Any] = {"layout": layout, "group_size": group_size, "scales": scales, "shard_bytes": shard_bytes}
    run_conversion(plan_conversion(directory / "hf", target, **options))
    return target


def written(
    directory: Path,
    config: dict[str, Any],
    *,
    seed: int = 0,
    group_size: int = 64,
    kind_of: Callable[[str], Any] = lambda name: None,
    without: Iterable[str] = (),
) -> Path:
    """An untagged container by the independent writer; `without`: parts of tensor names to leave out."""
    left_out = tuple(without)
    tensors = {name: v for name, v in checkpoint_tensors(config, seed).items() if not any(part in name for part in left_out)}
    write_container(directory, config, tensors, group_size=group_size, kind_of=kind_of)
    return directory


def random_tokens(config: dict[str, Any], n: int, seed: int = 1) -> list[int]:
    """n token ids."""
    drawn: list[int] = np.random.default_rng(seed).integers(0, config["vocab_size"], n).tolist()
    return drawn


# A prompt, single tokens, drafts of which some are dropped, a rewind into the prompt, and on from there.
def usual_steps(config: dict[str, Any], prompt: int = 26) -> Iterator[Step]:
    """About 40 positions in every scope. Row counts are few: each costs the reference a compilation."""
    ids = random_tokens(config, 64)
    yield Step("prefill", tuple(ids[:prompt]))
    for i in range(3):
        yield Step("decode", (ids[30 + i],))
    yield Step("verify", tuple(ids[33:37]))
    yield Step("verify", tuple(ids[37:41]), rewind=3)
    yield Step("decode", (ids[41],), rewind=1)
    yield Step("prefill", tuple(ids[20 : 20 + prompt - 6]), rewind=prompt - 10)
    yield Step("decode", (ids[50],))


def run(model: LanguageModel, steps: Iterable[Step]) -> Iterator[npt.NDArray[np.float32]]:
    """The logits of each step, float32 [n, W]."""
    for step in steps:
        model.rewind(step.rewind)
        yield model.forward(step.tokens, scope=step.scope)


def bits(logits: npt.NDArray[np.float32]) -> bytes:
    """For comparison bit for bit; signed zeros differ."""
    assert logits.dtype == np.float32
    return logits.tobytes()
