"""What a decoder layer is made of: rope, the two kinds of attention, the DSA indexer, the experts. Frozen and validated.

`config.py` puts these together into a model and is the place to import them from.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Literal, get_args

from colibri_jax.errors import ConfigError
from colibri_jax.routing_spec import RouterSpec

IndexerKind = Literal["full", "shared"]
RopeLayout = Literal["interleaved", "half"]
QKNorm = Literal["none", "head", "width"]

# `q_a_layernorm` and `kv_a_layernorm` keep the module default of the upstream implementation, whatever `rms_norm_eps` says.
LATENT_NORM_EPS = 1e-6
INDEXER_NORM_EPS = 1e-6

# Far above every published model. A damaged configuration is refused before anything is listed per layer or expert.
MOST_EXPERTS = 65_536
MOST_LAYERS = 4_096


@dataclasses.dataclass(frozen=True, kw_only=True)
class YarnConfig:
    """Frequencies stretched for contexts longer than those trained on: YaRN (arXiv 2309.00071) §3.

    Attributes:
        factor: how much longer, s.
        original_positions: the context that the frequencies were trained for.
        beta_fast, beta_slow: turns within that context; pairs that turn more than the first stay, fewer than the second are slowed
            down by s, those between get a mixture.
        attention_factor: factor on cos and sin; 1 leaves them alone.
        softmax_mscale: √ of the factor on MLA's attention scores; 1 leaves them alone.
        truncate: the mixture starts and ends at whole pairs.
    """

    factor: float
    original_positions: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    softmax_mscale: float = 1.0
    truncate: bool = True

    def __post_init__(self) -> None:
        positive("original_max_position_embeddings", self.original_positions)
        for field in ("factor", "beta_fast", "beta_slow", "attention_factor", "softmax_mscale"):
            positive_number(f"yarn {field}", getattr(self, field))
        if self.beta_slow >= self.beta_fast:
            raise ConfigError(
                "yarn's range is empty", where="beta_slow, beta_fast", expected="slow < fast", got=(self.beta_slow, self.beta_fast)
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary positions: pair i of a vector turns by position · `frequencies[i]`.

    Attributes:
        dim: elements that rotate, the first ones of a GQA head and all of MLA's rope part; even.
        theta: base of the frequencies.
        layout: pair i is (2i, 2i + 1) in "interleaved", (i, dim / 2 + i) in "half". Rotated pairs lie in halves either way.
        yarn: None for the plain frequencies theta^(-2i / dim).
    """

    dim: int
    theta: float
    layout: RopeLayout = "interleaved"
    yarn: YarnConfig | None = None

    def __post_init__(self) -> None:
        positive("rope dimension", self.dim)
        if self.dim % 2:
            raise ConfigError("rope rotates pairs", where="rope dimension", expected="an even number", got=self.dim)
        if not (math.isfinite(self.theta) and self.theta > 1.0):
            raise ConfigError("base of the frequencies", where="rope_theta", expected="a number above 1", got=self.theta)
        if self.layout not in get_args(RopeLayout):
            raise ConfigError("unknown rope layout", where="rope layout", expected=get_args(RopeLayout), got=self.layout)

    @property
    def frequencies(self) -> tuple[float, ...]:
        """Radians per position of each pair, float64 [dim / 2]. The native engine computes its own from the description."""
        plain = [float(self.theta ** (-(2 * i) / self.dim)) for i in range(self.dim // 2)]
        if self.yarn is None:
            return tuple(plain)
        low, high = self._mixed_pairs(self.yarn)
        slowed = [min(max((i - low) / (high - low), 0.0), 1.0) for i in range(self.dim // 2)]
        return tuple(f / self.yarn.factor * share + f * (1.0 - share) for f, share in zip(plain, slowed, strict=True))

    @property
    def attention_factor(self) -> float:
        """Factor on cos and sin."""
        return 1.0 if self.yarn is None else self.yarn.attention_factor

    def _mixed_pairs(self, yarn: YarnConfig) -> tuple[float, float]:
        """Pairs between which YaRN's mixture goes from all plain to all slowed down."""

        def pair_of(turns: float) -> float:
            return self.dim * math.log(yarn.original_positions / (turns * 2.0 * math.pi)) / (2.0 * math.log(self.theta))

        low, high = pair_of(yarn.beta_fast), pair_of(yarn.beta_slow)
        if yarn.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, self.dim - 1)
        return low, high + 0.001 if low == high else high


@dataclasses.dataclass(frozen=True, kw_only=True)
class MLAConfig:
    """Multi-head latent attention (DeepSeek-V2 §2.1). Dimensions are per head except the two ranks."""

    n_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    nope_dim: int
    value_dim: int
    rope: RopeConfig

    @property
    def rope_dim(self) -> int:
        """Width of the rotated part of queries, and of the one rotated key."""
        return self.rope.dim

    @property
    def qk_dim(self) -> int:
        """Query and key width per head: nope + rope."""
        return self.nope_dim + self.rope_dim

    @property
    def softmax_scale(self) -> float:
        """Factor on the attention scores: (nope + rope)^-1/2, times YaRN's mscale squared."""
        mscale = 1.0 if self.rope.yarn is None else self.rope.yarn.softmax_mscale
        return 1.0 / math.sqrt(self.qk_dim) * mscale * mscale

    @property
    def cache_width(self) -> int:
        """float32 values that the KV cache keeps per position and layer: latent, then rotated key."""
        return self.kv_lora_rank + self.rope_dim

    def __post_init__(self) -> None:
        for field in ("n_heads", "q_lora_rank", "kv_lora_rank", "nope_dim", "value_dim"):
            positive(field, getattr(self, field))


@dataclasses.dataclass(frozen=True, kw_only=True)
class GQAConfig:
    """Grouped-query attention: n_heads queries share n_kv_heads keys and values (equal counts make it plain multi-head attention).

    Of a layer's normed input, in this order:

    1. q, k, v: products; plus the bias where `qkv_bias` says so, after the (quantised) product.
    2. RMSNorm of q and of k with the model's epsilon, where `qk_norm` is not "none": "head" norms every head by itself with one weight
       [head_dim]; "width" norms all heads of a position together, weight [n_heads · head_dim] and [n_kv_heads · head_dim].
    3. q, k and v clipped to ±`clip`, where it is given.
    4. rope on the first `rope.dim` elements of every head of q and k; the others pass.
    5. The cache keeps per position the rotated keys [n_kv_heads][head_dim], then the values [n_kv_heads][head_dim]; float32.
    6. score(h, s) = (q_h · k_g(s)) · `softmax_scale`, g = h // (n_heads / n_kv_heads), for s up to the row's own position; softmax over s;
       the mix Σ_s share · v_g(s) in position order.
    7. o: product of the heads' mixes, head by head; no bias.

    With quantised activations the sums have the contract's fixed order: dots in 16 partials (element i in i mod 16), rotations as
    separately rounded products, softmax sum and mix one by one in position order, exp the engine's polynomial.
    """

    n_heads: int
    n_kv_heads: int
    head_dim: int
    rope: RopeConfig
    qkv_bias: bool = False
    qk_norm: QKNorm = "none"
    clip: float | None = None

    @property
    def softmax_scale(self) -> float:
        """Factor on the attention scores, head_dim^-1/2."""
        return 1.0 / math.sqrt(self.head_dim)

    @property
    def q_width(self) -> int:
        """Width of all queries of a position."""
        return self.n_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Width of all keys of a position, and of all its values."""
        return self.n_kv_heads * self.head_dim

    @property
    def q_norm_width(self) -> int:
        """Elements that one norm of queries covers."""
        return self.head_dim if self.qk_norm == "head" else self.q_width

    @property
    def k_norm_width(self) -> int:
        """Elements that one norm of keys covers."""
        return self.head_dim if self.qk_norm == "head" else self.kv_width

    @property
    def cache_width(self) -> int:
        """float32 values that the KV cache keeps per position and layer: rotated keys, then values."""
        return 2 * self.kv_width

    def __post_init__(self) -> None:
        for field in ("n_heads", "n_kv_heads", "head_dim"):
            positive(field, getattr(self, field))
        if self.n_heads % self.n_kv_heads:
            raise ConfigError(
                "queries share keys evenly", where="num_key_value_heads", expected=f"a divisor of {self.n_heads}", got=self.n_kv_heads
            )
        if self.rope.dim > self.head_dim:
            raise ConfigError("rope is wider than a head", where="rope dimension", expected=f"<= {self.head_dim}", got=self.rope.dim)
        if self.qk_norm not in get_args(QKNorm):
            raise ConfigError("unknown norm of queries and keys", where="qk_norm", expected=get_args(QKNorm), got=self.qk_norm)
        if self.clip is not None:
            positive_number("clip_qkv", self.clip)


AttentionConfig = MLAConfig | GQAConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class IndexerConfig:
    """DSA indexer: which positions a row attends to (DeepSeek-V3.2; GLM-5.2 shares a choice between layers)."""

    n_heads: int
    head_dim: int
    topk: int
    kinds: tuple[IndexerKind, ...]

    def __post_init__(self) -> None:
        for field in ("n_heads", "head_dim", "topk"):
            positive(field, getattr(self, field))
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
        positive("n_routed_experts", self.n_experts)
        if self.n_experts > MOST_EXPERTS:
            raise ConfigError(
                "more experts than any model has", where="n_routed_experts", expected=f"<= {MOST_EXPERTS}", got=self.n_experts
            )
        positive("moe_intermediate_size", self.expert_hidden)
        if self.n_shared < 0:
            raise ConfigError("negative count", where="n_shared_experts", expected="0 or more", got=self.n_shared)
        self.router.check_experts(self.n_experts)


def positive(field: str, value: int) -> None:
    """Refuse a count below 1.

    Raises:
        ConfigError: naming the field.
    """
    if value < 1:
        raise ConfigError("not positive", where=field, expected="1 or more", got=value)


def positive_number(field: str, value: float) -> None:
    """Refuse a number that is not finite and above 0.

    Raises:
        ConfigError: naming the field.
    """
    if not (math.isfinite(value) and value > 0.0):
        raise ConfigError("not a positive number", where=field, expected="finite, above 0", got=value)
