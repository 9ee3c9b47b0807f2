"""The model families: what each one's Hugging Face `config.json` means, as the fields of a `ModelConfig`.

Keys that would change the mathematics in a way that is not implemented are refused by name; keys without influence on it are not
read. Defaults are those of the upstream configuration class of the family.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypedDict

from colibri_jax.errors import ConfigError, UnsupportedFamilyError
from colibri_jax.layer_spec import (
    MOST_LAYERS,
    AttentionConfig,
    GQAConfig,
    IndexerConfig,
    IndexerKind,
    MLAConfig,
    MoEConfig,
    QKNorm,
    RopeConfig,
    RopeLayout,
    YarnConfig,
    positive,
)
from colibri_jax.routing_spec import RouterSpec

# Every whole number up to it is a float64 too, and no dimension comes near.
_LARGEST_INT = 2**53


class ModelFields(TypedDict):
    """The fields of `config.ModelConfig`."""

    family: str
    vocab_size: int
    hidden_size: int
    n_layers: int
    n_mtp_layers: int
    sparse: tuple[bool, ...]
    dense_hidden: int
    attention: AttentionConfig
    indexer: IndexerConfig | None
    moe: MoEConfig
    rms_eps: float
    max_positions: int
    tie_embeddings: bool


def read_config(config: Mapping[str, Any]) -> ModelFields:
    """Read the dictionary of a Hugging Face `config.json`.

    Raises:
        UnsupportedFamilyError: `model_type` is not one of `FAMILIES`.
        ConfigError: a key is missing, mistyped, unsupported or contradicts another.
    """
    family = config.get("model_type")
    if not isinstance(family, str) or family not in _READERS:
        raise UnsupportedFamilyError("unknown model family", where="config.json: model_type", expected=", ".join(FAMILIES), got=family)
    keys = _Keys(config)
    if keys.int("num_hidden_layers") > MOST_LAYERS:
        raise ConfigError("more layers than any model has", where="config.json: num_hidden_layers", expected=f"<= {MOST_LAYERS}")
    keys.only("hidden_act", "silu")
    return _READERS[family](keys)


class _Keys:
    """Typed look-ups that name the key on failure."""

    def __init__(self, config: Mapping[str, Any], inside: str = "") -> None:
        self._config = config
        self._inside = f"config.json: {inside}"

    def int(self, key: str, default: int | None = None) -> int:
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise ConfigError("wrong type", where=self._inside + key, expected="an integer", got=repr(value))
        if abs(value) > _LARGEST_INT:
            raise ConfigError("number out of range", where=self._inside + key, expected=f"at most {_LARGEST_INT}", got="more")
        return value

    def float(self, key: str, default: float | None = None) -> float:
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ConfigError("wrong type", where=self._inside + key, expected="a number", got=repr(value))
        # JSON as Python reads it has Infinity and NaN.
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError("not finite", where=self._inside + key, expected="a finite number", got=value)
        return float(self.int(key, default if isinstance(default, int) else None) if isinstance(value, int) else value)

    def bool(self, key: str, default: bool | None = None) -> bool:
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise ConfigError("wrong type", where=self._inside + key, expected="true or false", got=repr(value))
        return value

    def list(self, key: str) -> Sequence[Any] | None:
        value = self._config.get(key)
        if value is not None and not isinstance(value, list | tuple):
            raise ConfigError("wrong type", where=self._inside + key, expected="a list", got=repr(value))
        return value

    def optional(self, key: str) -> Any:
        return self._config.get(key)

    def only(self, key: str, accepted: object) -> None:
        """Refuse a value that would change the mathematics without our noticing."""
        value = self._config.get(key, accepted)
        if value != accepted:
            raise ConfigError("unsupported value", where=self._inside + key, expected=accepted, got=value)

    def section(self, *names: str) -> _Keys:
        """The first of these dictionaries that is there, else an empty one."""
        for name in names:
            section = self._config.get(name)
            if section:
                if not isinstance(section, Mapping):
                    raise ConfigError("wrong type", where=self._inside + name, expected="an object", got=repr(section))
                return _Keys(section, f"{name}.")
        return _Keys({}, f"{names[0]}.")

    def _get(self, key: str, default: object) -> object:
        value = self._config.get(key, default)
        if value is None:
            raise ConfigError("missing key", where=self._inside + key, expected="a value", got="nothing")
        return value


# ---- the families ---------------------------------------------------------------------------------------------------


def _glm_moe_dsa(keys: _Keys) -> ModelFields:
    n_layers = keys.int("num_hidden_layers")
    indexer = IndexerConfig(
        n_heads=keys.int("index_n_heads"),
        head_dim=keys.int("index_head_dim"),
        topk=keys.int("index_topk"),
        kinds=_indexer_kinds(keys, n_layers),
    )
    rope = _rope(keys, keys.int("qk_rope_head_dim"), "interleaved", kinds=("default",))
    moe = _sigmoid_experts(keys, n_group=1, topk_group=1, scale=1.0)
    return _model(keys, "glm_moe_dsa", _mla(keys, rope), moe, _dense_first(keys, n_layers, 3), rms_eps=1e-5, indexer=indexer)


def _deepseek_v3(keys: _Keys) -> ModelFields:
    layout: RopeLayout = "interleaved" if keys.bool("rope_interleave", True) else "half"
    rope = _rope(keys, keys.int("qk_rope_head_dim"), layout)
    moe = _sigmoid_experts(keys, n_group=8, topk_group=4, scale=2.5)
    return _model(keys, "deepseek_v3", _mla(keys, rope), moe, _dense_first(keys, keys.int("num_hidden_layers"), 3), rms_eps=1e-6)


def _glm4_moe(keys: _Keys) -> ModelFields:
    attention = _gqa(
        keys,
        qk_norm="head" if keys.bool("use_qk_norm", False) else "none",
        qkv_bias=keys.bool("attention_bias", False),
        rotated=_partial_rotary_factor(keys, 0.5),
    )
    moe = _sigmoid_experts(keys, n_group=1, topk_group=1, scale=1.0)
    return _model(keys, "glm4_moe", attention, moe, _dense_first(keys, keys.int("num_hidden_layers"), 1), rms_eps=1e-5)


def _qwen3_moe(keys: _Keys) -> ModelFields:
    keys.only("attention_bias", False)
    keys.only("use_sliding_window", False)
    n_layers, step = keys.int("num_hidden_layers"), keys.int("decoder_sparse_step", 1)
    if step < 1:
        raise ConfigError("not positive", where="config.json: decoder_sparse_step", expected="1 or more", got=step)
    dense = keys.list("mlp_only_layers") or ()
    sparse = tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(n_layers))
    # The configuration class calls the count `num_local_experts` inside and `num_experts` in its published files.
    n_experts = keys.int("num_experts", keys.optional("num_local_experts"))
    moe = _softmax_experts(keys, n_experts, hidden="moe_intermediate_size", normalised=keys.bool("norm_topk_prob", False))
    return _model(keys, "qwen3_moe", _gqa(keys, qk_norm="head"), moe, sparse, rms_eps=1e-6)


def _olmoe(keys: _Keys) -> ModelFields:
    keys.only("attention_bias", False)
    keys.only("sliding_window", None)
    clip = keys.optional("clip_qkv")
    attention = _gqa(keys, qk_norm="width", clip=None if clip is None else keys.float("clip_qkv"))
    width = keys.int("hidden_size")
    if attention.q_width != width:
        raise ConfigError("the norm of queries has the model's width", where="config.json: head_dim", expected=width, got=attention.q_width)
    n_experts = keys.int("num_experts", keys.optional("num_local_experts"))
    moe = _softmax_experts(keys, n_experts, hidden="intermediate_size", normalised=keys.bool("norm_topk_prob", False))
    return _model(keys, "olmoe", attention, moe, (True,) * keys.int("num_hidden_layers"), rms_eps=1e-5)


def _mixtral(keys: _Keys) -> ModelFields:
    keys.only("attention_bias", False)
    keys.only("sliding_window", None)
    moe = _softmax_experts(keys, keys.int("num_local_experts"), hidden="intermediate_size", normalised=True)
    return _model(keys, "mixtral", _gqa(keys, theta=1e6), moe, (True,) * keys.int("num_hidden_layers"), rms_eps=1e-5)


_READERS: dict[str, Callable[[_Keys], ModelFields]] = {
    "glm_moe_dsa": _glm_moe_dsa,
    "deepseek_v3": _deepseek_v3,
    "glm4_moe": _glm4_moe,
    "qwen3_moe": _qwen3_moe,
    "olmoe": _olmoe,
    "mixtral": _mixtral,
}

FAMILIES = tuple(_READERS)


# ---- what they share ------------------------------------------------------------------------------------------------


def _model(
    keys: _Keys,
    family: str,
    attention: AttentionConfig,
    moe: MoEConfig,
    sparse: tuple[bool, ...],
    *,
    rms_eps: float,
    indexer: IndexerConfig | None = None,
) -> ModelFields:
    return ModelFields(
        family=family,
        vocab_size=keys.int("vocab_size"),
        hidden_size=keys.int("hidden_size"),
        n_layers=keys.int("num_hidden_layers"),
        # Of the softmax families none has an MTP block.
        n_mtp_layers=keys.int("num_nextn_predict_layers", 0) if moe.router.score == "sigmoid" else 0,
        sparse=sparse,
        dense_hidden=keys.int("intermediate_size"),
        attention=attention,
        indexer=indexer,
        moe=moe,
        rms_eps=keys.float("rms_norm_eps", rms_eps),
        max_positions=keys.int("max_position_embeddings"),
        tie_embeddings=keys.bool("tie_word_embeddings", False),
    )


def _mla(keys: _Keys, rope: RopeConfig) -> MLAConfig:
    keys.only("attention_bias", False)
    keys.only("mlp_bias", False)
    n_heads = keys.int("num_attention_heads")
    kv_heads = keys.optional("num_key_value_heads")
    if kv_heads not in (None, n_heads):
        raise ConfigError("MLA has one key per query head", where="config.json: num_key_value_heads", expected=n_heads, got=kv_heads)
    return MLAConfig(
        n_heads=n_heads,
        q_lora_rank=keys.int("q_lora_rank"),
        kv_lora_rank=keys.int("kv_lora_rank"),
        nope_dim=keys.int("qk_nope_head_dim"),
        value_dim=keys.int("v_head_dim"),
        rope=rope,
    )


def _gqa(
    keys: _Keys,
    *,
    qk_norm: QKNorm = "none",
    qkv_bias: bool = False,
    clip: float | None = None,
    rotated: float = 1.0,
    theta: float = 10000.0,
) -> GQAConfig:
    keys.only("mlp_bias", False)
    if _partial_rotary_factor(keys, rotated) != rotated:
        raise ConfigError(
            "unsupported value", where="config.json: partial_rotary_factor", expected=rotated, got=_partial_rotary_factor(keys, 1.0)
        )
    n_heads = keys.int("num_attention_heads")
    positive("num_attention_heads", n_heads)
    head_dim = keys.optional("head_dim")
    head_dim = keys.int("hidden_size") // n_heads if head_dim is None else keys.int("head_dim")
    kv_heads = keys.optional("num_key_value_heads")
    return GQAConfig(
        n_heads=n_heads,
        n_kv_heads=n_heads if kv_heads is None else keys.int("num_key_value_heads"),
        head_dim=head_dim,
        rope=_rope(keys, int(head_dim * rotated), "half", theta=theta),
        qkv_bias=qkv_bias,
        qk_norm=qk_norm,
        clip=clip,
    )


def _sigmoid_experts(keys: _Keys, *, n_group: int, topk_group: int, scale: float) -> MoEConfig:
    keys.only("scoring_func", "sigmoid")
    keys.only("topk_method", "noaux_tc")
    return MoEConfig(
        n_experts=keys.int("n_routed_experts"),
        expert_hidden=keys.int("moe_intermediate_size"),
        n_shared=keys.int("n_shared_experts", 0),
        router=RouterSpec(
            score="sigmoid",
            top_k=keys.int("num_experts_per_tok"),
            n_group=keys.int("n_group", n_group),
            topk_group=keys.int("topk_group", topk_group),
            norm_topk_prob=keys.bool("norm_topk_prob", True),
            routed_scaling_factor=keys.float("routed_scaling_factor", scale),
        ),
    )


def _softmax_experts(keys: _Keys, n_experts: int, *, hidden: str, normalised: bool) -> MoEConfig:
    router = RouterSpec(score="softmax", top_k=keys.int("num_experts_per_tok"), norm_topk_prob=normalised)
    return MoEConfig(n_experts=n_experts, expert_hidden=keys.int(hidden), n_shared=0, router=router)


def _dense_first(keys: _Keys, n_layers: int, default: int) -> tuple[bool, ...]:
    kinds = keys.list("mlp_layer_types")
    if kinds is None:
        n_dense = min(keys.int("first_k_dense_replace", default), n_layers)
        return (False,) * n_dense + (True,) * (n_layers - n_dense)
    unknown = [kind for kind in kinds if kind not in ("dense", "sparse")]
    if unknown:
        raise ConfigError("unknown MLP kind", where="config.json: mlp_layer_types", expected="dense or sparse", got=unknown[0])
    return tuple(kind == "sparse" for kind in kinds)


def _indexer_kinds(keys: _Keys, n_layers: int) -> tuple[IndexerKind, ...]:
    names: dict[str, IndexerKind] = {"F": "full", "S": "shared", "full": "full", "shared": "shared"}
    # The pattern is one string with a letter per layer.
    pattern = keys.optional("index_topk_pattern")
    listed = keys.list("indexer_types") or (pattern if isinstance(pattern, str) else keys.list("index_topk_pattern"))
    if listed:
        unknown = [kind for kind in listed if not isinstance(kind, str) or kind not in names]
        if unknown:
            raise ConfigError("unknown indexer kind", where="config.json: indexer_types", expected="full or shared", got=unknown[0])
        return tuple(names[kind] for kind in listed)
    freq = max(keys.int("index_topk_freq", 1), 1)
    offset = keys.int("index_skip_topk_offset", 2)
    return tuple("full" if max(i - offset + 1, 0) % freq == 0 else "shared" for i in range(n_layers))


# ---- rope -----------------------------------------------------------------------------------------------------------


def _rope_section(keys: _Keys) -> tuple[_Keys, str]:
    """The rope parameters and their kind; older files call the section `rope_scaling` and the kind `type`."""
    section = keys.section("rope_parameters", "rope_scaling")
    kind = section.optional("rope_type") or section.optional("type") or "default"
    return section, kind


def _rope(keys: _Keys, dim: int, layout: RopeLayout, *, theta: float = 10000.0, kinds: tuple[str, ...] = ("default", "yarn")) -> RopeConfig:
    section, kind = _rope_section(keys)
    if kind not in kinds:
        raise ConfigError("unsupported rope", where="config.json: rope_parameters.rope_type", expected=" or ".join(kinds), got=kind)
    theta = section.float("rope_theta", keys.float("rope_theta", theta))
    return RopeConfig(dim=dim, theta=theta, layout=layout, yarn=_yarn(keys, section) if kind == "yarn" else None)


def _partial_rotary_factor(keys: _Keys, default: float) -> float:
    section, _ = _rope_section(keys)
    share = section.float("partial_rotary_factor", keys.float("partial_rotary_factor", default))
    if not 0.0 < share <= 1.0:
        raise ConfigError("share out of range", where="config.json: partial_rotary_factor", expected="above 0, at most 1", got=share)
    return share


def _yarn(keys: _Keys, section: _Keys) -> YarnConfig:
    original = section.int("original_max_position_embeddings", keys.optional("original_max_position_embeddings"))
    positive("original_max_position_embeddings", original)
    factor = section.float("factor", keys.int("max_position_embeddings") / original)

    def magnitude(mscale: float) -> float:
        """What a context stretched by `factor` is scaled by, YaRN §3.3."""
        return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1.0 else 1.0

    mscale, all_dim = (section.optional(key) and section.float(key) for key in ("mscale", "mscale_all_dim"))
    # Where both are given, cos and sin carry their quotient and (MLA only) the scores the square of the second.
    if all_dim and not magnitude(all_dim) > 0.0:
        raise ConfigError("not a positive factor", where="config.json: mscale_all_dim", expected="above 0", got=magnitude(all_dim))
    inferred = magnitude(mscale) / magnitude(all_dim) if mscale and all_dim else magnitude(1.0)
    return YarnConfig(
        factor=factor,
        original_positions=original,
        beta_fast=section.float("beta_fast", 32.0),
        beta_slow=section.float("beta_slow", 1.0),
        attention_factor=section.float("attention_factor", inferred),
        softmax_mscale=magnitude(all_dim) if all_dim else 1.0,
        truncate=section.bool("truncate", True),
    )
