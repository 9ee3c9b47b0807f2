"""Small containers that open: what the fuzzer's operations damage."""

from __future__ import annotations

import dataclasses
import functools
import json
from typing import Any

import numpy as np

from colibri_jax.config import ModelConfig
from colibri_jax.container import checkpoints
from colibri_jax.container.formats import SCALE_SUFFIX, TAG_KEY, tag_metadata
from colibri_jax.container.plan import target_format
from colibri_jax.quant import DEFAULT_GROUP_SIZE, WeightFormat

_COMMON = {"vocab_size": 6, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 64}
GLM = {
    **_COMMON,
    "model_type": "glm_moe_dsa",
    "intermediate_size": 6,
    "moe_intermediate_size": 4,
    "n_routed_experts": 1,
    "num_experts_per_tok": 1,
    "n_shared_experts": 1,
    "num_nextn_predict_layers": 0,
    "first_k_dense_replace": 0,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 2,
    "qk_nope_head_dim": 4,
    "v_head_dim": 4,
    "index_n_heads": 1,
    "index_head_dim": 4,
    "index_topk": 8,
    "indexer_types": ["full"],
}
GLM_MTP = {**GLM, "num_nextn_predict_layers": 1, "first_k_dense_replace": 1}
DEEPSEEK = {
    **{key: value for key, value in GLM.items() if not key.startswith("index")},
    "model_type": "deepseek_v3",
    "num_hidden_layers": 2,
    "first_k_dense_replace": 1,
    "n_shared_experts": 0,
    "n_routed_experts": 4,
    "n_group": 2,
    "topk_group": 1,
    "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "mscale": 1.0, "mscale_all_dim": 1.0},
}
QWEN = {
    **_COMMON,
    "model_type": "qwen3_moe",
    "head_dim": 4,
    "num_key_value_heads": 1,
    "num_experts": 2,
    "num_experts_per_tok": 1,
    "intermediate_size": 6,
    "moe_intermediate_size": 4,
    "mlp_only_layers": [],
    "tie_word_embeddings": True,
}
MIXTRAL = {**_COMMON, "model_type": "mixtral", "num_local_experts": 2, "num_experts_per_tok": 1, "intermediate_size": 4}


@dataclasses.dataclass
class Parts:
    """A container taken apart: what operations change."""

    config: dict[str, Any]
    header: dict[str, Any]
    data: bytes
    metadata: dict[str, Any]
    tags: dict[str, Any] | None
    """The format tag as JSON; None where there is none."""

    def copy(self) -> Parts:
        """Another that operations may change; what lies below the maps of names is replaced, never changed in place."""
        tags = self.tags and {**self.tags, "formats": dict(self.tags["formats"])}
        return Parts(dict(self.config), dict(self.header), self.data, dict(self.metadata), tags)


@functools.cache
def bases() -> tuple[Parts, ...]:
    """Containers that open: tagged ones in both layouts and with both types of scales, untagged ones, four families."""
    return (
        _container(GLM, "rows16"),
        _container(GLM_MTP, None),
        _container(DEEPSEEK, "row_major"),
        _container(QWEN, "rows16", "f16"),
        _container(MIXTRAL, None),
    )


def _container(config: dict[str, Any], layout: Any, scales: Any = "f32") -> Parts:
    rng = np.random.default_rng(1)
    header: dict[str, Any] = {}
    formats: dict[str, WeightFormat] = {}
    data = bytearray()

    def add(name: str, dtype: str, shape: list[int], content: bytes) -> None:
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(content)]}
        data.extend(content)

    def floats(count: int) -> bytes:
        return rng.normal(size=count).astype("<f4").tobytes()

    for name, spec in checkpoints.named_specs(ModelConfig.from_hf(config)).items():
        if spec.storage == "f32":
            add(name, "F32", list(spec.shape), floats(int(np.prod(spec.shape))))
            continue
        rows, cols = spec.shape
        fmt = target_format(spec.storage, layout or "row_major", DEFAULT_GROUP_SIZE, scales)
        count, separate = fmt.weight_bytes(rows, cols), fmt.layout == "row_major"
        # rows16 holds its scales: zeros are finite everywhere.
        add(name, "U8", [count], rng.bytes(count) if separate else bytes(count))
        if separate:
            add(name + SCALE_SUFFIX, "F32", [fmt.scale_count(rows, cols)], floats(fmt.scale_count(rows, cols)))
        formats[name] = fmt
    tags = None if layout is None else json.loads(tag_metadata(formats)[TAG_KEY])
    return Parts(config, header, bytes(data), {}, tags)
