"""Model configurations: frozen, validated descriptions read from a checkpoint's `config.json`.

A family is a description (which attention, which router), never a fork of a forward pass; both implementations
read nothing but these dataclasses.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal

from colibri_jax.errors import ConfigError, UnsupportedFamilyError
from colibri_jax.routing_spec import RouterSpec

IndexerKind = Literal["full", "shared"]

# `q_a_layernorm` and `kv_a_layernorm` keep the module default of the upstream implementation, whatever `rms_norm_eps` says.
LATENT_NORM_EPS = 1e-6
INDEXER_NORM_EPS = 1e-6

FAMILIES = ("glm_moe_dsa",)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MLAConfig:
    """Multi-head latent attention (DeepSeek-V2 §2.1). Dimensions are per head except the two ranks."""

    n_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    rope_theta: float

    @property
    def qk_dim(self) -> int:
        """Query and key width per head: nope + rope."""
        return self.nope_dim + self.rope_dim

    @property
    def softmax_scale(self) -> float:
        """Factor on the attention scores, (nope + rope)^-1/2."""
        return 1.0 / math.sqrt(self.qk_dim)

    @property
    def cache_width(self) -> int:
        """float32 values that the KV cache keeps per position and layer: latent, then rotated key."""
        return self.kv_lora_rank + self.rope_dim

    def __post_init__(self) -> None:
        for field in ("n_heads", "q_lora_rank", "kv_lora_rank", "nope_dim", "rope_dim", "value_dim"):
            _positive(field, getattr(self, field))
        if self.rope_dim % 2:
            raise ConfigError("rope rotates pairs", where="qk_rope_head_dim", expected="an even number", got=self.rope_dim)


@dataclasses.dataclass(frozen=True, kw_only=True)
class IndexerConfig:
    """DSA indexer: which positions a row attends to (DeepSeek-V3.2; GLM-5.2 shares a choice between layers)."""

    n_heads: int
    head_dim: int
    topk: int
    kinds: tuple[IndexerKind, ...]

    def __post_init__(self) -> None:
        for field in ("n_heads", "head_dim", "topk"):
            _positive(field, getattr(self, field))
        for layer, kind in enumerate(self.kinds):
            if kind not in ("full", "shared"):
                raise ConfigError("unknown indexer kind", where=f"indexer_types[{layer}]", expected="full or shared", got=kind)
        if self.kinds and self.kinds[0] != "full":
            raise ConfigError("the first layer has no earlier choice to share", where="indexer_types[0]", expected="full", got="shared")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """The routed and shared experts of a sparse layer."""

    n_experts: int
    expert_hidden: int
    n_shared: int
    router: RouterSpec
    """Everything about the router but its weights; `bias` is None here, the correction bias is a tensor."""

    @property
    def shared_hidden(self) -> int:
        """Hidden width of the shared experts, which checkpoints store fused."""
        return self.n_shared * self.expert_hidden

    def __post_init__(self) -> None:
        _positive("n_routed_experts", self.n_experts)
        _positive("moe_intermediate_size", self.expert_hidden)
        if self.n_shared < 0:
            raise ConfigError("negative count", where="n_shared_experts", expected="0 or more", got=self.n_shared)
        self.router.check_experts(self.n_experts)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """One model, independent of where its weights are."""

    family: str
    vocab_size: int
    hidden_size: int
    n_layers: int
    n_mtp_layers: int
    sparse: tuple[bool, ...]
    """Per trunk layer: True where the MLP is a mixture of experts."""
    dense_hidden: int
    attention: MLAConfig
    indexer: IndexerConfig | None
    moe: MoEConfig
    rms_eps: float
    max_positions: int
    tie_embeddings: bool

    def __post_init__(self) -> None:
        for field in ("vocab_size", "hidden_size", "n_layers", "dense_hidden", "max_positions"):
            _positive(field, getattr(self, field))
        if len(self.sparse) != self.n_layers:
            raise ConfigError("one MLP kind per layer", where="mlp_layer_types", expected=self.n_layers, got=len(self.sparse))
        if self.n_mtp_layers not in (0, 1):
            raise ConfigError("unsupported count", where="num_nextn_predict_layers", expected="0 or 1", got=self.n_mtp_layers)
        if self.indexer is not None:
            if len(self.indexer.kinds) != self.n_layers:
                raise ConfigError("one indexer kind per layer", where="indexer_types", expected=self.n_layers, got=len(self.indexer.kinds))
            if self.indexer.head_dim < self.attention.rope_dim:
                raise ConfigError(
                    "the indexer rotates the first rope_dim of its head",
                    where="index_head_dim",
                    expected=f">= {self.attention.rope_dim}",
                    got=self.indexer.head_dim,
                )

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Trunk layers that have a router, ascending."""
        return tuple(i for i, s in enumerate(self.sparse) if s)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> ModelConfig:
        """Read the dictionary of a Hugging Face `config.json`.

        Raises:
            UnsupportedFamilyError: `model_type` is not one of `FAMILIES`.
            ConfigError: a key is missing, mistyped or contradicts another.
        """
        family = config.get("model_type")
        if family not in FAMILIES:
            raise UnsupportedFamilyError("unknown model family", where="config.json: model_type", expected=", ".join(FAMILIES), got=family)
        return _glm_moe_dsa(_Keys(config))


class _Keys:
    """Typed look-ups that name the key on failure."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = config

    def int(self, key: str, default: int | None = None) -> int:
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise ConfigError("wrong type", where=f"config.json: {key}", expected="an integer", got=repr(value))
        return value

    def float(self, key: str, default: float | None = None) -> float:
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ConfigError("wrong type", where=f"config.json: {key}", expected="a number", got=repr(value))
        return float(value)

    def bool(self, key: str, default: bool | None = None) -> bool:
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise ConfigError("wrong type", where=f"config.json: {key}", expected="true or false", got=repr(value))
        return value

    def optional(self, key: str) -> Any:
        return self._config.get(key)

    def only(self, key: str, accepted: object) -> None:
        """Refuse a value that would change the mathematics without our noticing."""
        value = self._config.get(key, accepted)
        if value != accepted:
            raise ConfigError("unsupported value", where=f"config.json: {key}", expected=accepted, got=value)

    def _get(self, key: str, default: object) -> object:
        value = self._config.get(key, default)
        if value is None:
            raise ConfigError("missing key", where=f"config.json: {key}", expected="a value", got="nothing")
        return value


def _glm_moe_dsa(keys: _Keys) -> ModelConfig:
    keys.only("hidden_act", "silu")
    keys.only("attention_bias", False)
    keys.only("mlp_bias", False)
    keys.only("scoring_func", "sigmoid")
    keys.only("topk_method", "noaux_tc")
    n_layers = keys.int("num_hidden_layers")
    n_heads = keys.int("num_attention_heads")
    kv_heads = keys.optional("num_key_value_heads")
    if kv_heads not in (None, n_heads):
        raise ConfigError("MLA has one key per query head", where="config.json: num_key_value_heads", expected=n_heads, got=kv_heads)
    return ModelConfig(
        family="glm_moe_dsa",
        vocab_size=keys.int("vocab_size"),
        hidden_size=keys.int("hidden_size"),
        n_layers=n_layers,
        n_mtp_layers=keys.int("num_nextn_predict_layers", 0),
        sparse=_mlp_kinds(keys, n_layers),
        dense_hidden=keys.int("intermediate_size"),
        attention=MLAConfig(
            n_heads=n_heads,
            q_lora_rank=keys.int("q_lora_rank"),
            kv_lora_rank=keys.int("kv_lora_rank"),
            nope_dim=keys.int("qk_nope_head_dim"),
            rope_dim=keys.int("qk_rope_head_dim"),
            value_dim=keys.int("v_head_dim"),
            rope_theta=_default_rope_theta(keys),
        ),
        indexer=IndexerConfig(
            n_heads=keys.int("index_n_heads"),
            head_dim=keys.int("index_head_dim"),
            topk=keys.int("index_topk"),
            kinds=_indexer_kinds(keys, n_layers),
        ),
        moe=MoEConfig(
            n_experts=keys.int("n_routed_experts"),
            expert_hidden=keys.int("moe_intermediate_size"),
            n_shared=keys.int("n_shared_experts", 0),
            router=RouterSpec(
                score="sigmoid",
                top_k=keys.int("num_experts_per_tok"),
                n_group=keys.int("n_group", 1),
                topk_group=keys.int("topk_group", 1),
                norm_topk_prob=keys.bool("norm_topk_prob", True),
                routed_scaling_factor=keys.float("routed_scaling_factor", 1.0),
            ),
        ),
        rms_eps=keys.float("rms_norm_eps", 1e-5),
        max_positions=keys.int("max_position_embeddings"),
        tie_embeddings=keys.bool("tie_word_embeddings", False),
    )


def _mlp_kinds(keys: _Keys, n_layers: int) -> tuple[bool, ...]:
    kinds = keys.optional("mlp_layer_types")
    if kinds is None:
        n_dense = min(keys.int("first_k_dense_replace", 3), n_layers)
        return (False,) * n_dense + (True,) * (n_layers - n_dense)
    unknown = sorted(set(kinds) - {"dense", "sparse"})
    if unknown:
        raise ConfigError("unknown MLP kind", where="config.json: mlp_layer_types", expected="dense or sparse", got=unknown)
    return tuple(kind == "sparse" for kind in kinds)


def _indexer_kinds(keys: _Keys, n_layers: int) -> tuple[IndexerKind, ...]:
    names: dict[str, IndexerKind] = {"F": "full", "S": "shared", "full": "full", "shared": "shared"}
    listed = keys.optional("indexer_types") or keys.optional("index_topk_pattern")
    if listed is not None:
        unknown = [kind for kind in listed if kind not in names]
        if unknown:
            raise ConfigError("unknown indexer kind", where="config.json: indexer_types", expected="full or shared", got=unknown[0])
        return tuple(names[kind] for kind in listed)
    freq = max(keys.int("index_topk_freq", 1), 1)
    offset = keys.int("index_skip_topk_offset", 2)
    return tuple("full" if max(i - offset + 1, 0) % freq == 0 else "shared" for i in range(n_layers))


def _default_rope_theta(keys: _Keys) -> float:
    parameters = keys.optional("rope_parameters") or keys.optional("rope_scaling") or {}
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind != "default":
        raise ConfigError("unsupported rope", where="config.json: rope_parameters.rope_type", expected="default", got=kind)
    if "rope_theta" in parameters:
        return _Keys(parameters).float("rope_theta")
    return keys.float("rope_theta", 10000.0)


def _positive(field: str, value: int) -> None:
    if value < 1:
        raise ConfigError("not positive", where=field, expected="1 or more", got=value)
