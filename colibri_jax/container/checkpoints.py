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


_MLP = ("gate", "up", "down")

GLM_MOE_DSA = Family(
    globals={
        "embed": "model.embed_tokens.weight",
        "final_norm": "model.norm.weight",
        "head": "lm_head.weight",
        "mtp.enorm": "model.layers.{n}.enorm.weight",
        "mtp.hnorm": "model.layers.{n}.hnorm.weight",
        "mtp.eh_proj": "model.layers.{n}.eh_proj.weight",
        "mtp.norm": "model.layers.{n}.shared_head.norm.weight",
    },
    layer={
        "attn_norm": "model.layers.{l}.input_layernorm.weight",
        "attn.q_a": "model.layers.{l}.self_attn.q_a_proj.weight",
        "attn.q_a_norm": "model.layers.{l}.self_attn.q_a_layernorm.weight",
        "attn.q_b": "model.layers.{l}.self_attn.q_b_proj.weight",
        "attn.kv_a": "model.layers.{l}.self_attn.kv_a_proj_with_mqa.weight",
        "attn.kv_a_norm": "model.layers.{l}.self_attn.kv_a_layernorm.weight",
        "attn.kv_b": "model.layers.{l}.self_attn.kv_b_proj.weight",
        "attn.o": "model.layers.{l}.self_attn.o_proj.weight",
        "indexer.wq_b": "model.layers.{l}.self_attn.indexer.wq_b.weight",
        "indexer.wk": "model.layers.{l}.self_attn.indexer.wk.weight",
        "indexer.k_norm_weight": "model.layers.{l}.self_attn.indexer.k_norm.weight",
        "indexer.k_norm_bias": "model.layers.{l}.self_attn.indexer.k_norm.bias",
        "indexer.weights_proj": "model.layers.{l}.self_attn.indexer.weights_proj.weight",
        "mlp_norm": "model.layers.{l}.post_attention_layernorm.weight",
        "router.weight": "model.layers.{l}.mlp.gate.weight",
        "router.bias": "model.layers.{l}.mlp.gate.e_score_correction_bias",
        **{f"mlp.{part}": f"model.layers.{{l}}.mlp.{part}_proj.weight" for part in _MLP},
        **{f"shared.{part}": f"model.layers.{{l}}.mlp.shared_experts.{part}_proj.weight" for part in _MLP},
        **{f"experts.{{e}}.{part}": f"model.layers.{{l}}.mlp.experts.{{e}}.{part}_proj.weight" for part in _MLP},
    },
    ignored=(
        r"(.*\.)?rotary_emb\.inv_freq",
        # Layers that share an earlier layer's choice have no use for an indexer of their own.
        r"model\.layers\.\d+\.self_attn\.indexer\..*",
        # The MTP block shares embedding and head with the trunk; some checkpoints repeat them.
        r"model\.layers\.{n}\.(embed_tokens|shared_head\.head)\.weight",
    ),
)

FAMILIES: dict[str, Family] = {"glm_moe_dsa": GLM_MOE_DSA}

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
