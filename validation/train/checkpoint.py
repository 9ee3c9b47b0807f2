"""The two forms of a trained model: this training code's state dict (.pt), and a Hugging Face directory."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from model import Model, Shape
from safetensors.torch import load_file
from torch import Tensor

State = dict[str, Tensor]

# Names outside the layers: Hugging Face's, and ours.
PLAIN = {"model.embed_tokens.weight": "embed.weight", "lm_head.weight": "head.weight", "model.norm.weight": "norm.weight"}
# Names inside the MTP layer that are no part of a decoder layer.
MTP = {
    "enorm.weight": "enorm.weight",
    "hnorm.weight": "hnorm.weight",
    "eh_proj.weight": "eh_proj.weight",
    "shared_head.norm.weight": "mtp_norm.weight",
}
ROUTER = {"mlp.gate.weight": "mlp.gate", "mlp.gate.e_score_correction_bias": "mlp.bias"}
SHARED = ("mlp.shared_experts.", "mlp.shared.")
PARTS = ("gate_proj", "up_proj", "down_proj")


def load_shape(path: Path) -> Shape:
    """Shape of an exported directory; a .pt file has the default shape, and loading its state checks that."""
    return Shape.from_config(json.loads((path / "config.json").read_text())) if path.is_dir() else Shape()


def load_model(path: Path, compute: torch.dtype) -> Model:
    """A model with the weights of a .pt file or of an exported directory (all kept in float32).

    Raises:
        RuntimeError: a tensor is missing, unknown, or of another shape; the message names it.
    """
    shape = load_shape(path)
    model = Model(shape, compute)
    model.load_state_dict(from_hf(load_file(path / "model.safetensors"), shape) if path.is_dir() else load_state(path))
    return model


def load_state(path: Path) -> State:
    """State dict of a .pt file; executes nothing that the file contains."""
    state: State = torch.load(path, map_location="cpu", weights_only=True)
    return state


def layer_names(shape: Shape) -> dict[str, str]:
    """Prefix of every layer in a Hugging Face checkpoint -> its prefix here. The MTP layer follows the trunk."""
    names = {f"model.layers.{index}.": f"layers.{index}." for index in range(shape.layers)}
    return names | {f"model.layers.{shape.layers}.": "mtp."}


def from_hf(tensors: State, shape: Shape) -> State:
    """State dict of Hugging Face tensors, float32. The indexer is dropped: training has none."""
    source = {name: tensor.float() for name, tensor in tensors.items()}
    state = {ours: source[theirs] for theirs, ours in PLAIN.items()}
    for theirs, ours in layer_names(shape).items():
        for name, tensor in source.items():
            inner = name.removeprefix(theirs)
            if inner == name or ".indexer." in inner or ".experts." in inner:
                continue
            if inner in MTP:
                state[MTP[inner]] = tensor
            else:
                state[ours + ROUTER.get(inner, inner.replace(*SHARED))] = tensor
        if f"{theirs}mlp.gate.weight" in source:
            gate, up, down = (
                torch.stack([source[f"{theirs}mlp.experts.{expert}.{part}.weight"].t() for expert in range(shape.experts)])
                for part in PARTS
            )
            state[f"{ours}mlp.gu"], state[f"{ours}mlp.dn"] = torch.cat([gate, up], 2), down
    return state


def to_hf(state: State, shape: Shape, indexer: State) -> State:
    """Hugging Face tensors of a state dict: router float32, everything else bfloat16.

    Args:
        state: what `Model.state_dict` gives.
        shape: dimensions.
        indexer: tensors of `indexer_tensors`, carried along as they are.
    """
    half = torch.bfloat16
    tensors = {theirs: state[ours].to(half) for theirs, ours in PLAIN.items()}
    to_router = {ours: theirs for theirs, ours in ROUTER.items()}
    for theirs, ours in layer_names(shape).items():
        for name, tensor in state.items():
            inner = name.removeprefix(ours)
            if inner == name:
                continue
            if inner in to_router:
                tensors[theirs + to_router[inner]] = tensor.float()
            elif inner == "mlp.gu":
                for expert, both in enumerate(tensor):
                    gate, up = both.t().to(half).chunk(2)
                    tensors[f"{theirs}mlp.experts.{expert}.gate_proj.weight"] = gate
                    tensors[f"{theirs}mlp.experts.{expert}.up_proj.weight"] = up
            elif inner == "mlp.dn":
                for expert, down in enumerate(tensor):
                    tensors[f"{theirs}mlp.experts.{expert}.down_proj.weight"] = down.t().to(half)
            else:
                tensors[theirs + inner.replace(*reversed(SHARED))] = tensor.to(half)
    mtp_prefix = f"model.layers.{shape.layers}."
    tensors |= {mtp_prefix + theirs: state[ours].to(half) for theirs, ours in MTP.items()}
    return {name: tensor.contiguous() for name, tensor in (tensors | indexer).items()}


def indexer_tensors(shape: Shape, start: Path | None) -> State:
    """The indexer of every layer: that of the start directory where there is one, else random with a fixed seed."""
    if start is not None:
        kept = {name: tensor for name, tensor in load_file(start / "model.safetensors").items() if ".indexer." in name}
        if kept:
            return kept
    generator = torch.Generator().manual_seed(1)

    def matrix(rows: int, cols: int) -> Tensor:
        return (torch.randn(rows, cols, generator=generator) * cols**-0.5).to(torch.bfloat16)

    tensors: State = {}
    for prefix in layer_names(shape):
        name = f"{prefix}self_attn.indexer."
        tensors[f"{name}wq_b.weight"] = matrix(shape.index_heads * shape.index_dim, shape.q_rank)
        tensors[f"{name}wk.weight"] = matrix(shape.index_dim, shape.width)
        tensors[f"{name}weights_proj.weight"] = matrix(shape.index_heads, shape.width)
        tensors[f"{name}k_norm.weight"] = torch.ones(shape.index_dim, dtype=torch.bfloat16)
        tensors[f"{name}k_norm.bias"] = torch.zeros(shape.index_dim, dtype=torch.bfloat16)
    return tensors
