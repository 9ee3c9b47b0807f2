"""The small glm_moe_dsa model in PyTorch, for training and for measuring: not for generation, no KV cache, no indexer.

The indexer is left out because the model that ships never reaches its limit (`index_topk` equals the context), so it
never masks a position and has no gradient. Shapes in comments: B batch, T positions, D width, H heads, N flat positions,
E experts, K experts per position, F expert hidden.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LATENT_NORM_EPS = 1e-6  # the two latent norms keep their own epsilon in this architecture
TRAINING_CAPACITY = 1.5  # slots per expert in training, in units of the mean load


@dataclasses.dataclass(frozen=True)
class Shape:
    """Dimensions of the model; the defaults are those of the model that ships."""

    vocab: int = 4096
    width: int = 256
    layers: int = 6
    dense_layers: int = 1
    heads: int = 8
    q_rank: int = 128
    kv_rank: int = 64
    nope: int = 32
    rope: int = 16
    value: int = 32
    dense_hidden: int = 768
    expert_hidden: int = 64
    experts: int = 64
    top_k: int = 8
    routed_scale: float = 2.5
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5
    context: int = 2048
    index_heads: int = 16
    index_dim: int = 32

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Shape:
        """Read a Hugging Face `config.json` of family glm_moe_dsa.

        Raises:
            ValueError: the configuration asks for something that this training code does not have.
        """
        fixed = {"model_type": "glm_moe_dsa", "n_group": 1, "n_shared_experts": 1, "num_nextn_predict_layers": 1, "norm_topk_prob": True}
        for key, value in fixed.items():
            if config.get(key) != value:
                raise ValueError(f"config.json: {key}: expected {value!r}, got {config.get(key)!r}")
        values = {field: config[key] for field, key in CONFIG_KEYS.items()}
        return cls(**values, rope_theta=config["rope_parameters"]["rope_theta"])

    def to_config(self) -> dict[str, Any]:
        """The Hugging Face `config.json` of a model of this shape."""
        return {
            "architectures": ["GlmMoeDsaForCausalLM"],
            "model_type": "glm_moe_dsa",
            **{key: getattr(self, field) for field, key in CONFIG_KEYS.items()},
            "num_nextn_predict_layers": 1,
            "num_key_value_heads": self.heads,
            "n_shared_experts": 1,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": True,
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            "attention_bias": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_theta},
            "index_topk": self.context,
            "bos_token_id": 1,
            "eos_token_id": 0,
            "pad_token_id": 0,
            "dtype": "bfloat16",
        }


CONFIG_KEYS = {
    "vocab": "vocab_size",
    "width": "hidden_size",
    "layers": "num_hidden_layers",
    "dense_layers": "first_k_dense_replace",
    "heads": "num_attention_heads",
    "q_rank": "q_lora_rank",
    "kv_rank": "kv_lora_rank",
    "nope": "qk_nope_head_dim",
    "rope": "qk_rope_head_dim",
    "value": "v_head_dim",
    "dense_hidden": "intermediate_size",
    "expert_hidden": "moe_intermediate_size",
    "experts": "n_routed_experts",
    "top_k": "num_experts_per_tok",
    "routed_scale": "routed_scaling_factor",
    "norm_eps": "rms_norm_eps",
    "context": "max_position_embeddings",
    "index_heads": "index_n_heads",
    "index_dim": "index_head_dim",
}


class RMSNorm(nn.Module):
    """Root mean square norm, computed in float32, returned in the compute dtype."""

    def __init__(self, width: int, eps: float, compute: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps, self.compute = eps, compute

    def forward(self, x: Tensor) -> Tensor:
        x = x.float()
        return (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight).to(self.compute)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding that takes interleaved pairs and returns halves, as the architecture has it. x: [..., T, rope]."""
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.cat([even * cos - odd * sin, odd * cos + even * sin], -1)


class Attention(nn.Module):
    """Multi-head latent attention in its expanded form, causal over the whole window."""

    def __init__(self, shape: Shape, compute: torch.dtype) -> None:
        super().__init__()
        self.shape = shape
        self.q_a_proj = _linear(shape.width, shape.q_rank)
        self.q_a_layernorm = RMSNorm(shape.q_rank, LATENT_NORM_EPS, compute)
        self.q_b_proj = _linear(shape.q_rank, shape.heads * (shape.nope + shape.rope))
        self.kv_a_proj_with_mqa = _linear(shape.width, shape.kv_rank + shape.rope)
        self.kv_a_layernorm = RMSNorm(shape.kv_rank, LATENT_NORM_EPS, compute)
        self.kv_b_proj = _linear(shape.kv_rank, shape.heads * (shape.nope + shape.value))
        self.o_proj = _linear(shape.heads * shape.value, shape.width)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        shape = self.shape
        batch, length, _ = x.shape

        def per_head(y: Tensor) -> Tensor:
            return y.view(batch, length, shape.heads, -1).transpose(1, 2)  # [B, H, T, ·]

        q_nope, q_rope = per_head(self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))).split([shape.nope, shape.rope], -1)
        latent, k_rope = self.kv_a_proj_with_mqa(x).split([shape.kv_rank, shape.rope], -1)
        k_nope, value = per_head(self.kv_b_proj(self.kv_a_layernorm(latent))).split([shape.nope, shape.value], -1)
        # One rotated key serves all heads.
        k_rope = rotate(k_rope.view(batch, 1, length, -1), cos, sin).expand(-1, shape.heads, -1, -1)
        query = torch.cat([q_nope, rotate(q_rope, cos, sin)], -1)
        attended = F.scaled_dot_product_attention(query, torch.cat([k_nope, k_rope], -1), value, is_causal=True)
        return self.o_proj(attended.transpose(1, 2).reshape(batch, length, -1))


class MLP(nn.Module):
    """Gated MLP: down(silu(gate x) * up x)."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = _linear(width, hidden), _linear(width, hidden), _linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class MoE(nn.Module):
    """Sigmoid router with correction bias over E experts, and one shared expert.

    `gu` holds gate and up of every expert side by side [E, D, 2F], `dn` the way down [E, F, D]. In training an expert has
    a fixed number of slots, so that all experts run as one batched product; what does not fit is dropped for that step.
    Otherwise every position gets all of its experts.
    """

    def __init__(self, shape: Shape, compute: torch.dtype) -> None:
        super().__init__()
        self.shape, self.compute = shape, compute
        self.gate = nn.Parameter(torch.randn(shape.experts, shape.width) * 0.02)
        self.register_buffer("bias", torch.zeros(shape.experts))
        self.gu = nn.Parameter(torch.randn(shape.experts, shape.width, 2 * shape.expert_hidden) * 0.032)
        self.dn = nn.Parameter(torch.randn(shape.experts, shape.expert_hidden, shape.width) * 0.02)
        self.shared = MLP(shape.width, shape.expert_hidden)
        self.load = torch.zeros(shape.experts)  # positions per expert in the last forward, for the balance update

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Chosen experts [N, K] and their weights [N, K]: choice by score plus bias, weight by score alone."""
        with torch.autocast("cpu", enabled=False):
            scores = torch.sigmoid(x.float() @ self.gate.t())
        chosen = torch.topk(scores + self.bias, self.shape.top_k, -1).indices
        weights = scores.gather(1, chosen)
        return chosen, weights / (weights.sum(-1, keepdim=True) + 1e-20) * self.shape.routed_scale

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        chosen, weights = self.route(flat)
        routed = self._with_capacity(flat, chosen, weights) if self.training else self._complete(flat, chosen, weights)
        return routed.view(x.shape).to(x.dtype) + self.shared(x)

    def _complete(self, flat: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(flat)
        for expert in range(self.shape.experts):
            rows, slot = (chosen == expert).nonzero(as_tuple=True)
            gate, up = (flat[rows] @ self.gu[expert].to(flat.dtype)).chunk(2, -1)
            hidden = (F.silu(gate) * up) @ self.dn[expert].to(flat.dtype)
            out.index_add_(0, rows, hidden * weights[rows, slot, None].to(flat.dtype))
        return out

    def _with_capacity(self, flat: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        count, experts, top_k = flat.shape[0], self.shape.experts, self.shape.top_k
        capacity = int(TRAINING_CAPACITY * count * top_k / experts)
        # Sort the (position, expert) pairs by expert; a pair's rank among its expert's pairs is its slot there.
        pair_expert = chosen.reshape(-1)
        order = pair_expert.argsort()
        load = (pair_expert[:, None] == torch.arange(experts)).sum(0)
        self.load = load.detach()
        sorted_expert = pair_expert[order]
        rank = torch.arange(count * top_k) - (torch.cumsum(load, 0) - load)[sorted_expert]
        fits = rank < capacity
        overflow = experts * capacity  # one slot past the end takes everything that does not fit
        slot = torch.where(fits, sorted_expert * capacity + rank, overflow)
        # Gather: empty slots read a row of zeros behind the last position.
        source = torch.full((overflow + 1,), count, dtype=torch.long).scatter(0, slot, order // top_k)[:overflow]
        padded = torch.cat([flat, flat.new_zeros(1, flat.shape[1])]).to(self.compute)
        gate, up = torch.bmm(padded[source].view(experts, capacity, -1), self.gu.to(self.compute)).chunk(2, -1)
        hidden = torch.bmm(F.silu(gate) * up, self.dn.to(self.compute)).view(overflow, -1)
        # Scatter back: every pair reads its slot's row; pairs without a slot read any row, with weight zero.
        row = torch.empty_like(order).scatter(0, order, torch.where(fits, slot, 0))
        kept = torch.zeros_like(weights).view(-1).scatter(0, order, torch.where(fits, weights.reshape(-1)[order], 0.0))
        return (hidden[row].view(count, top_k, -1) * kept.view(count, top_k, 1).to(hidden.dtype)).sum(1)


class Layer(nn.Module):
    """A decoder layer: attention and MLP, each normed before and added to the residual."""

    def __init__(self, shape: Shape, sparse: bool, compute: torch.dtype) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.width, shape.norm_eps, compute)
        self.post_attention_layernorm = RMSNorm(shape.width, shape.norm_eps, compute)
        self.self_attn = Attention(shape, compute)
        self.mlp = MoE(shape, compute) if sparse else MLP(shape.width, shape.dense_hidden)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Model(nn.Module):
    """Trunk and MTP block.

    Args:
        shape: dimensions.
        compute: what norms return and experts multiply in; bfloat16 in training (under autocast), float32 to measure.
    """

    def __init__(self, shape: Shape, compute: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.shape = shape
        self.embed = nn.Embedding(shape.vocab, shape.width)
        self.layers = nn.ModuleList(Layer(shape, index >= shape.dense_layers, compute) for index in range(shape.layers))
        self.norm = RMSNorm(shape.width, shape.norm_eps, compute)
        self.head = _linear(shape.width, shape.vocab)
        self.enorm = RMSNorm(shape.width, shape.norm_eps, compute)
        self.hnorm = RMSNorm(shape.width, shape.norm_eps, compute)
        self.eh_proj = _linear(2 * shape.width, shape.width)
        self.mtp = Layer(shape, True, compute)
        self.mtp_norm = RMSNorm(shape.width, shape.norm_eps, compute)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                small = "embed" in name or name.endswith(".gate")
                nn.init.normal_(parameter, 0.0, 0.02 if small else 0.7 / math.sqrt(parameter.shape[1]))

    @property
    def sparse_blocks(self) -> list[MoE]:
        """Every mixture of experts, the MTP block's last."""
        return [layer.mlp for layer in (*self.layers, self.mtp) if isinstance(layer.mlp, MoE)]

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Hidden states in front of the head.

        Args:
            tokens: int64 [B, T].

        Returns:
            The trunk's [B, T, D], after the final norm; row t predicts token t + 1.
            The MTP block's [B, T - 1, D]; row t joins the trunk's row t with token t + 1 and predicts token t + 2.
        """
        length = tokens.shape[1]
        frequency = self.shape.rope_theta ** -(torch.arange(0, self.shape.rope, 2).float() / self.shape.rope)
        angle = torch.arange(length).float()[:, None] * frequency
        cos, sin = angle.cos(), angle.sin()
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, cos, sin)
        trunk = self.norm(x)
        joined = torch.cat([self.enorm(self.embed(tokens[:, 1:])), self.hnorm(trunk[:, :-1])], -1)
        drafted = self.mtp(self.eh_proj(joined), cos[: length - 1], sin[: length - 1])
        return trunk, self.mtp_norm(drafted)


def _linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)
