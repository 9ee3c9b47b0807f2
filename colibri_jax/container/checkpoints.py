"""Which tensor is what: per model family, the checkpoint names of this package's roles. Descriptions, no code per family."""

from __future__ import annotations

import dataclasses
import re
from typing import Literal

from colibri_jax.config import ModelConfig
from colibri_jax.errors import UnsupportedFamilyError
from colibri_jax.tensors import TensorSpec, tensor_specs

ShardKind = Literal["main", "mtp", "idx"]


@dataclasses.dataclass(frozen=True)
class Family:
    """Names of one family. In a name, {l} is the layer, {e} the expert, {n} the MTP block's layer index."""

    globals: dict[str, str]
    """Roles outside the layers."""
    layer: dict[str, str]
    """Role after `layers.{l}.`, expert index written {e}."""
    ignored: tuple[str, ...]
    """Patterns of tensors that checkpoints may hold and no computation needs."""


_PARTS = ("gate", "up", "down")
_LAYER = "model.layers.{l}."

_GLOBALS = {
    "embed": "model.embed_tokens.weight",
    "final_norm": "model.norm.weight",
    "head": "lm_head.weight",
}
_MTP_GLOBALS = {
    "mtp.enorm": "model.layers.{n}.enorm.weight",
    "mtp.hnorm": "model.layers.{n}.hnorm.weight",
    "mtp.eh_proj": "model.layers.{n}.eh_proj.weight",
    "mtp.norm": "model.layers.{n}.shared_head.norm.weight",
}
_NORMS = {
    "attn_norm": _LAYER + "input_layernorm.weight",
    "mlp_norm": _LAYER + "post_attention_layernorm.weight",
}
_MLA = {
    "attn.q_a": _LAYER + "self_attn.q_a_proj.weight",
    "attn.q_a_norm": _LAYER + "self_attn.q_a_layernorm.weight",
    "attn.q_b": _LAYER + "self_attn.q_b_proj.weight",
    "attn.kv_a": _LAYER + "self_attn.kv_a_proj_with_mqa.weight",
    "attn.kv_a_norm": _LAYER + "self_attn.kv_a_layernorm.weight",
    "attn.kv_b": _LAYER + "self_attn.kv_b_proj.weight",
    "attn.o": _LAYER + "self_attn.o_proj.weight",
}
_GQA = {
    **{f"attn.{name}": f"{_LAYER}self_attn.{name}_proj.weight" for name in "qkvo"},
    **{f"attn.{name}_bias": f"{_LAYER}self_attn.{name}_proj.bias" for name in "qkv"},
    **{f"attn.{name}_norm": f"{_LAYER}self_attn.{name}_norm.weight" for name in "qk"},
}
_INDEXER = {
    "indexer.wq_b": _LAYER + "self_attn.indexer.wq_b.weight",
    "indexer.wk": _LAYER + "self_attn.indexer.wk.weight",
    "indexer.k_norm_weight": _LAYER + "self_attn.indexer.k_norm.weight",
    "indexer.k_norm_bias": _LAYER + "self_attn.indexer.k_norm.bias",
    "indexer.weights_proj": _LAYER + "self_attn.indexer.weights_proj.weight",
}
_EXPERTS = {
    "router.weight": _LAYER + "mlp.gate.weight",
    **{f"mlp.{part}": f"{_LAYER}mlp.{part}_proj.weight" for part in _PARTS},
    **{f"experts.{{e}}.{part}": f"{_LAYER}mlp.experts.{{e}}.{part}_proj.weight" for part in _PARTS},
}
_SHARED_EXPERTS = {
    "router.bias": _LAYER + "mlp.gate.e_score_correction_bias",
    **{f"shared.{part}": f"{_LAYER}mlp.shared_experts.{part}_proj.weight" for part in _PARTS},
}
_BLOCK_SPARSE_EXPERTS = {
    "router.weight": _LAYER + "block_sparse_moe.gate.weight",
    **{
        f"experts.{{e}}.{part}": f"{_LAYER}block_sparse_moe.experts.{{e}}.{w}.weight"
        for part, w in zip(_PARTS, ("w1", "w3", "w2"), strict=True)
    },
}

_NO_FREQUENCIES = r"(.*\.)?rotary_emb\.inv_freq"
# The MTP block shares embedding and head with the trunk; some checkpoints repeat them.
_REPEATED_BY_MTP = r"model\.layers\.{n}\.(embed_tokens|shared_head\.head)\.weight"
# Layers that share an earlier layer's choice have no use for an indexer of their own.
_UNUSED_INDEXERS = r"model\.layers\.\d+\.self_attn\.indexer\..*"

GLM_MOE_DSA = Family(
    globals=_GLOBALS | _MTP_GLOBALS,
    layer=_NORMS | _MLA | _INDEXER | _EXPERTS | _SHARED_EXPERTS,
    ignored=(_NO_FREQUENCIES, _UNUSED_INDEXERS, _REPEATED_BY_MTP),
)
DEEPSEEK_V3 = Family(
    globals=_GLOBALS | _MTP_GLOBALS,
    layer=_NORMS | _MLA | _EXPERTS | _SHARED_EXPERTS,
    ignored=(_NO_FREQUENCIES, _REPEATED_BY_MTP),
)
GLM4_MOE = Family(
    globals=_GLOBALS | _MTP_GLOBALS,
    layer=_NORMS | _GQA | _EXPERTS | _SHARED_EXPERTS,
    ignored=(_NO_FREQUENCIES, _REPEATED_BY_MTP),
)
# Qwen3-MoE and OLMoE name their tensors alike.
QWEN3_MOE = OLMOE = Family(globals=_GLOBALS, layer=_NORMS | _GQA | _EXPERTS, ignored=(_NO_FREQUENCIES,))
MIXTRAL = Family(globals=_GLOBALS, layer=_NORMS | _GQA | _BLOCK_SPARSE_EXPERTS, ignored=(_NO_FREQUENCIES,))

FAMILIES: dict[str, Family] = {
    "glm_moe_dsa": GLM_MOE_DSA,
    "deepseek_v3": DEEPSEEK_V3,
    "glm4_moe": GLM4_MOE,
    "qwen3_moe": QWEN3_MOE,
    "olmoe": OLMOE,
    "mixtral": MIXTRAL,
}

_LAYER_ROLE = re.compile(r"layers\.(\d+)\.(.*)")
_EXPERT_ROLE = re.compile(r"experts\.(\d+)\.(.*)")


def family_of(config: ModelConfig) -> Family:
    """The description of a configuration's family.

    Raises:
        UnsupportedFamilyError: there is none.
    """
    try:
        return FAMILIES[config.family]
    except KeyError:
        raise UnsupportedFamilyError(
            "no tensor names for this family", where=config.family, expected=", ".join(FAMILIES), got=config.family
        ) from None


def checkpoint_name(config: ModelConfig, role: str) -> str:
    """The checkpoint's name of a role, e.g. `layers.3.attn.o` → `model.layers.3.self_attn.o_proj.weight`."""
    family = family_of(config)
    match = _LAYER_ROLE.fullmatch(role)
    if match is None:
        return family.globals[role].format(n=config.n_layers)
    expert = _EXPERT_ROLE.fullmatch(match[2])
    if expert is None:
        return family.layer[match[2]].format(l=match[1])
    return family.layer[f"experts.{{e}}.{expert[2]}"].format(l=match[1], e=expert[1])


def named_specs(config: ModelConfig) -> dict[str, TensorSpec]:
    """Checkpoint name → spec of every tensor that a configuration asks for, in the order of use."""
    return {checkpoint_name(config, spec.role): spec for spec in tensor_specs(config)}


def is_ignored(config: ModelConfig, name: str) -> bool:
    """Whether a tensor may be in a checkpoint although nothing needs it."""
    patterns = (pattern.replace("{n}", str(config.n_layers)) for pattern in family_of(config).ignored)
    return any(re.fullmatch(pattern, name) for pattern in patterns)


def is_mtp(config: ModelConfig, role: str) -> bool:
    """Whether a role belongs to the MTP block."""
    return role.startswith(("mtp.", f"layers.{config.n_layers}."))


def shard_kind(config: ModelConfig, role: str) -> ShardKind:
    """Which series of output files a role goes to: the trunk, the MTP block, or the trunk's indexers."""
    if is_mtp(config, role):
        return "mtp"
    return "idx" if ".indexer." in role else "main"
