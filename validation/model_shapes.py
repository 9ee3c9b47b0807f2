"""Generated models: a configuration of one of the six families, awkward weights, and the container that holds them.

A *shape* is everything that the reference compiles for: a valid configuration, a container format, and the counts of rows that
steps are padded to. Weights are a function of (configuration, seed): normal ones at first, of which some matrices are then spoilt.

The reference's backend reads subnormal float32 as 0, so that its bits are the contract's only where every product of scales is 0
or at least 2^-102. Matrices here have scales of 1e-6 or more (1e-8 where a whole group is 0), and a gate's rows are bounded, so that
SiLU's smallest outputs stay far above what could break that.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from choosing import Chooser

from colibri_jax.config import FAMILIES, ModelConfig
from colibri_jax.container.directory import CONFIG_FILE
from colibri_jax.container.format import StreamWriter
from colibri_jax.container.plan import plan_shards
from colibri_jax.quant import Layout, ScaleType, pack, quantize
from colibri_jax.tensors import TensorSpec, tensor_specs

Float32 = npt.NDArray[np.float32]
Config = dict[str, Any]

POSITIONS = 64
"""Of the KV cache: one shape for the reference, and enough for every attention to be long."""
LARGEST_GATE_ROW = 3.0
SMALL_SHARD_BYTES = 96 << 10
# What a norm scales up again, or what an error is measured against. Equal rows there make one number of all outputs, whose terms may
# cancel: a rounding error of any size, and no bound on whole models with float32 activations.
JUDGED_BY_SIZE = ("embed", "head", ".attn.q", ".attn.k", ".attn.q_a", ".attn.kv_a", ".indexer.wk")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """What a model's programs are compiled for.

    Attributes:
        family: `model_type`.
        config: what its `config.json` holds.
        rows: powers of two, ascending; the reference sees steps of (r / 2, r] rows as r.
        layout, group_size, scales: of the container's int4 matrices.
    """

    family: str
    config: Config
    rows: tuple[int, ...]
    layout: Layout
    group_size: int
    scales: ScaleType

    @property
    def model(self) -> ModelConfig:
        return ModelConfig.from_hf(self.config)

    def __str__(self) -> str:
        model = self.model
        router = model.moe.router
        return (
            f"{self.family}: {model.n_layers} layers ({len(model.moe_layers)} sparse), width {model.hidden_size}, "
            f"{model.moe.n_experts} experts, {router.top_k} a position, {router.n_group} groups, {model.moe.n_shared} shared, "
            f"{self.layout} g{self.group_size} {self.scales}"
        )


# ---- configurations -------------------------------------------------------------------------------------------------


def make_shape(c: Chooser, family: str, rows: tuple[int, ...] | None = None) -> Shape:
    """A shape of a family; `rows`: instead of drawn ones."""
    config = {**_common(c), "model_type": family, **_CONFIGS[family](c)}
    rows = rows or (1, c.pick((2, 4)), c.pick((8, 16)))
    layout: Layout = c.pick(("rows16", "row_major"))
    group_size = c.pick((64, 16, 32, 48))
    scales: ScaleType = c.pick(("f32", "f16")) if layout == "rows16" else "f32"
    return Shape(family=family, config=config, rows=rows, layout=layout, group_size=group_size, scales=scales)


def _common(c: Chooser) -> Config:
    return {
        "vocab_size": c.integer(16, 97),
        "hidden_size": c.integer(24, 99),
        "intermediate_size": c.integer(3, 80),
        "moe_intermediate_size": c.integer(3, 70),
        "num_hidden_layers": c.pick((1, 2, 3, c.integer(1, 4), c.integer(1, 8))),
        "max_position_embeddings": c.pick((POSITIONS, 100, 4096)),
        "rms_norm_eps": c.pick((1e-5, 1e-6)),
        "tie_word_embeddings": c.pick((False, False, True)),
        "norm_topk_prob": c.pick((True, False)),
    }


def _experts(c: Chooser) -> tuple[int, int]:
    """E and K of a router without groups."""
    most = c.pick((4, 8, 16, 32, 64))
    experts = c.pick((most, c.integer(1, most), c.integer(1, most)))
    return experts, c.integer(1, c.pick((min(experts, 4), min(experts, 8), experts)))


def _sigmoid(c: Chooser) -> Config:
    """Router with groups and a correction bias, shared experts, dense layers anywhere. Needs the number of layers, see `_layers`."""
    experts, top_k = _experts(c)
    groups = topk_group = 1
    if c.integer(0, 1):
        groups, each = c.pick(((2, 2), (3, 4), (4, 4), (8, 2), (8, 8), (5, 3)))
        experts, topk_group = groups * each, c.integer(1, groups)
        top_k = c.integer(1, c.pick((min(4, topk_group * each), topk_group * each)))
    return {
        "n_routed_experts": experts,
        "num_experts_per_tok": top_k,
        "n_group": groups,
        "topk_group": topk_group,
        "n_shared_experts": c.integer(0, 2),
        "routed_scaling_factor": c.pick((1.0, 2.5, 0.3, 16.0)),
        "num_nextn_predict_layers": c.pick((0, 0, 0, 1)),
    }


def _mla(c: Chooser) -> Config:
    return {
        "num_attention_heads": c.integer(1, 4),
        "q_lora_rank": c.integer(5, 48),
        "kv_lora_rank": c.integer(5, 40),
        "qk_rope_head_dim": 2 * c.integer(1, 6),
        "qk_nope_head_dim": c.integer(1, 12),
        "v_head_dim": c.integer(1, 12),
    }


def _gqa(c: Chooser, head_dim: int) -> Config:
    kv_heads = c.integer(1, 3)
    return {"num_attention_heads": kv_heads * c.integer(1, 3), "num_key_value_heads": kv_heads, "head_dim": head_dim}


def _dense_anywhere(c: Chooser) -> Config:
    """The number of layers again, and which of them are sparse: as a count of leading dense ones, or one by one."""
    layers = c.pick((1, 2, 3, c.integer(1, 4), c.integer(1, 8)))
    if c.integer(0, 1):
        return {"num_hidden_layers": layers, "first_k_dense_replace": c.integer(0, layers - 1)}
    kinds = [c.pick(("sparse", "sparse", "dense")) for _ in range(layers)]
    if "sparse" not in kinds:
        kinds[c.integer(0, layers - 1)] = "sparse"
    return {"num_hidden_layers": layers, "mlp_layer_types": kinds}


def _rope(c: Chooser, **more: Any) -> Config:
    """Plain frequencies of several bases, or YaRN's in its three published shapes; written the old or the new way."""
    theta = c.pick((1e4, 1e6, 100.0))
    if c.integer(0, 1):
        return c.pick(({"rope_theta": theta, **more}, {"rope_parameters": {"rope_type": "default", "rope_theta": theta, **more}}))
    yarn: Config = {"factor": c.pick((4.0, 40.0)), "original_max_position_embeddings": c.pick((16, 32, 4096)), "rope_theta": theta, **more}
    yarn |= c.pick(({}, {"mscale": 1.0, "mscale_all_dim": c.pick((1.0, 0.7))}, {"beta_fast": 4.0, "beta_slow": 0.5}))
    return c.pick(({"rope_scaling": {"type": "yarn", **yarn}}, {"rope_parameters": {"rope_type": "yarn", **yarn}}))


def _glm_moe_dsa(c: Chooser) -> Config:
    config = {**_sigmoid(c), **_mla(c), **_dense_anywhere(c)}
    return {
        **config,
        "rope_parameters": {"rope_type": "default", "rope_theta": c.pick((1e4, 1e6))},
        # Few heads tie at a score of 0, many hardly do.
        "index_n_heads": c.pick((16, 1, 3, 17)),
        "index_head_dim": config["qk_rope_head_dim"] + c.integer(0, 12),
        "index_topk": c.pick((c.integer(1, 8), c.integer(1, 32), POSITIONS)),
        "indexer_types": ["full", *(c.pick(("full", "shared")) for _ in range(config["num_hidden_layers"] - 1))],
    }


def _deepseek_v3(c: Chooser) -> Config:
    return {**_sigmoid(c), **_mla(c), **_dense_anywhere(c), **_rope(c), "rope_interleave": c.pick((True, False))}


def _glm4_moe(c: Chooser) -> Config:
    head_dim, rotated = c.pick(((12, 0.5), (9, 0.5), (8, 0.75), (4, 0.5), (10, 1.0)))
    return {
        **_sigmoid(c),
        **_gqa(c, head_dim),
        **_dense_anywhere(c),
        **_rope(c, partial_rotary_factor=rotated),
        "attention_bias": c.pick((True, False)),
        "use_qk_norm": c.pick((True, False)),
    }


def _qwen3_moe(c: Chooser) -> Config:
    layers = c.pick((2, 3, c.integer(2, 8)))
    experts, top_k = _experts(c)
    return {
        **_gqa(c, 2 * c.integer(1, 9)),
        **_rope(c),
        "num_hidden_layers": layers,
        "num_experts": experts,
        "num_experts_per_tok": top_k,
        **c.pick(({}, {"decoder_sparse_step": 2}, {"mlp_only_layers": [c.integer(0, layers - 1)]})),
    }


def _olmoe(c: Chooser) -> Config:
    # The norm of queries and of keys has the model's width. Few elements cancel often, and then nothing is small beside them.
    attention = _gqa(c, 2 * c.integer(2, 5))
    if attention["num_attention_heads"] * attention["head_dim"] < 24:
        attention["head_dim"] = 24
    experts, top_k = _experts(c)
    return {
        **attention,
        **_rope(c),
        "hidden_size": attention["num_attention_heads"] * attention["head_dim"],
        "intermediate_size": c.integer(3, 70),
        "num_experts": experts,
        "num_experts_per_tok": top_k,
        **c.pick(({}, {"clip_qkv": c.pick((0.5, 1.5))})),
    }


def _mixtral(c: Chooser) -> Config:
    experts, top_k = _experts(c)
    attention = _gqa(c, 2 * c.integer(1, 9))
    if not c.integer(0, 3):
        attention |= {"head_dim": None, "hidden_size": attention["num_attention_heads"] * 2 * c.integer(6, 9)}
    return {**attention, **_rope(c), "num_local_experts": experts, "num_experts_per_tok": top_k, "intermediate_size": c.integer(3, 70)}


_CONFIGS: dict[str, Callable[[Chooser], Config]] = {
    "glm_moe_dsa": _glm_moe_dsa,
    "deepseek_v3": _deepseek_v3,
    "glm4_moe": _glm4_moe,
    "qwen3_moe": _qwen3_moe,
    "olmoe": _olmoe,
    "mixtral": _mixtral,
}
assert tuple(_CONFIGS) == FAMILIES


# ---- weights --------------------------------------------------------------------------------------------------------


def make_weights(config: ModelConfig, seed: Sequence[int], *, plain: bool = False) -> dict[str, Float32]:
    """float32 weights by role. Which matrices are spoilt, and how, follows from the seed; `plain`: none is."""
    rng = np.random.default_rng(seed)
    spoilt = 0.0 if plain else float(rng.choice([0.15, 0.5]))
    ties = not plain and bool(rng.integers(0, 2))
    return {spec.role: _tensor(spec, rng, spoilt, ties) for spec in tensor_specs(config)}


def _tensor(spec: TensorSpec, rng: np.random.Generator, spoilt: float, ties: bool) -> Float32:
    drawn = rng.standard_normal(spec.shape)
    if spec.role.endswith(".router.bias"):
        return np.asarray(rng.integers(-2, 3, spec.shape) / 8 if ties else 0.1 * drawn, np.float32)
    if len(spec.shape) == 1:
        values = 0.1 * drawn + (0.0 if spec.role.endswith("_bias") else 1.0)
        if rng.random() < spoilt / 4:
            values[rng.random(spec.shape) < 0.2] = 0.0
        return values.astype(np.float32)
    if spec.role.endswith(".router.weight"):
        values = 2.0 * drawn / np.sqrt(spec.shape[1])
        if ties:  # experts with equal rows have equal logits at every position
            values = values[rng.integers(0, max(1, spec.shape[0] // 2), spec.shape[0])]
        return values.astype(np.float32)
    values = drawn if spec.role == "embed" else drawn / np.sqrt(spec.shape[1])
    if rng.random() < spoilt:
        most = len(_SPOILERS) - (_EQUALISERS if spec.role.endswith(JUDGED_BY_SIZE) else 0)
        values = _SPOILERS[int(rng.integers(most))](values, rng)
    if spec.role.endswith(".gate"):
        length = np.linalg.norm(values, axis=1, keepdims=True)
        values = values * np.minimum(1.0, LARGEST_GATE_ROW / np.maximum(length, 1e-30))
    return values.astype(np.float32)


Float64 = npt.NDArray[np.float64]


def _zero_rows(values: Float64, rng: np.random.Generator) -> Float64:
    values[rng.random(values.shape[0]) < 0.3] = 0.0
    return values


def _zero_groups(values: Float64, rng: np.random.Generator) -> Float64:
    """Runs of 16 inputs, one of the group sizes or a part of the others."""
    runs = -(-values.shape[1] // 16)
    off = np.repeat(rng.random((values.shape[0], runs)) < 0.4, 16, axis=1)
    values[off[:, : values.shape[1]]] = 0.0
    return values


def _one_huge(values: Float64, rng: np.random.Generator) -> Float64:
    values[int(rng.integers(values.shape[0])), int(rng.integers(values.shape[1]))] *= 40.0
    return values


def _tiny(values: Float64, rng: np.random.Generator) -> Float64:
    return values * float(rng.choice([1e-2, 1e-4]))


def _uneven_rows(values: Float64, rng: np.random.Generator) -> Float64:
    return values * np.exp(rng.uniform(-6.0, 0.7, (values.shape[0], 1)))


def _constant_rows(values: Float64, rng: np.random.Generator) -> Float64:
    values[:, :] = values[int(rng.integers(values.shape[0])), 0]
    return values


def _equal_rows(values: Float64, rng: np.random.Generator) -> Float64:
    values[:, :] = values[int(rng.integers(values.shape[0]))]
    return values


_SPOILERS: tuple[Callable[[Float64, np.random.Generator], Float64], ...] = (
    _zero_rows,
    _zero_groups,
    _one_huge,
    _tiny,
    _uneven_rows,
    _constant_rows,
    _equal_rows,
)
_EQUALISERS = 2  # the last ones


def write_model(directory: Path, shape: Shape, weights: dict[str, Float32]) -> Path:
    """Write a container into a new directory; returns it."""
    directory.mkdir(parents=True)
    for shard in plan_shards(shape.model, shape.layout, shape.group_size, SMALL_SHARD_BYTES, scales=shape.scales):
        with StreamWriter(directory / shard.name, shard.tensors, shard.metadata) as writer:
            for matrix in shard.matrices:
                values, fmt = weights[matrix.spec.role], matrix.format
                if fmt.bits == 32:
                    parts: tuple[Any, ...] = (values,)
                else:
                    parts = pack(quantize(values, fmt), fmt.layout, fmt.scales)
                for tensor, part in zip(matrix.tensors, parts, strict=False):
                    writer.write(tensor.name, [np.ascontiguousarray(part).tobytes()])
    (directory / CONFIG_FILE).write_text(json.dumps(shape.config))  # last: without it the directory is no container
    return directory
