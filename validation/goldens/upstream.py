"""What transformers computes on a configuration and weights by role: logits, chosen experts, MTP logits, checkpoint names.

Needs the extra `oracle`. Nothing here reads the package's own checkpoint names: state dicts are put together from the names that
transformers' modules have in memory, so that the names it writes are evidence.
"""

from __future__ import annotations

import json
import pathlib
import tempfile
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig

from colibri_jax.tensors import EXPERT_PARTS

LAYER_NAMES = {
    "attn_norm": "input_layernorm.weight",
    "attn.q_a": "self_attn.q_a_proj.weight",
    "attn.q_a_norm": "self_attn.q_a_layernorm.weight",
    "attn.q_b": "self_attn.q_b_proj.weight",
    "attn.kv_a": "self_attn.kv_a_proj_with_mqa.weight",
    "attn.kv_a_norm": "self_attn.kv_a_layernorm.weight",
    "attn.kv_b": "self_attn.kv_b_proj.weight",
    **{f"attn.{name}": f"self_attn.{name}_proj.weight" for name in "qkvo"},
    **{f"attn.{name}_bias": f"self_attn.{name}_proj.bias" for name in "qkv"},
    **{f"attn.{name}_norm": f"self_attn.{name}_norm.weight" for name in "qk"},
    "indexer.wq_b": "self_attn.indexer.wq_b.weight",
    "indexer.wk": "self_attn.indexer.wk.weight",
    "indexer.k_norm_weight": "self_attn.indexer.k_norm.weight",
    "indexer.k_norm_bias": "self_attn.indexer.k_norm.bias",
    "indexer.weights_proj": "self_attn.indexer.weights_proj.weight",
    "mlp_norm": "post_attention_layernorm.weight",
    "router.weight": "mlp.gate.weight",
    "router.bias": "mlp.gate.e_score_correction_bias",
    **{f"mlp.{part}": f"mlp.{part}_proj.weight" for part in EXPERT_PARTS},
    **{f"shared.{part}": f"mlp.shared_experts.{part}_proj.weight" for part in EXPERT_PARTS},
}

Arrays = dict[str, np.ndarray]


@torch.no_grad()
def run(raw: dict[str, Any], params: Arrays, tokens: np.ndarray) -> tuple[Arrays, float]:
    """One forward call in eager attention and eager experts.

    Args:
        raw: what config.json holds.
        params: float32 weights by role.
        tokens: integers [T].

    Returns:
        logits [T, W]; chosen, weights: per sparse layer [T, K], ascending by expert; mtp_logits [T - 1, W] where there is an MTP block.
        And the smallest gap at the edge of any choice.
    """
    model = build(raw, params)
    watch = Watch(model)
    batch = torch.tensor(tokens)[None]
    with watch:
        hidden = model.model(batch, use_cache=False).last_hidden_state
    results = {"logits": model.lm_head(hidden)[0].numpy(), "chosen": np.stack(watch.chosen), "weights": np.stack(watch.weights)}
    if raw.get("num_nextn_predict_layers"):
        results["mtp_logits"] = _mtp_logits(model, raw, params, batch, hidden)
    return results, watch.margin


def build(raw: dict[str, Any], params: Arrays) -> Any:
    """transformers' model of a configuration, with these weights."""
    config = _config(raw)
    model = (
        MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]._from_config(config, attn_implementation="eager", experts_implementation="eager").eval()
    )
    state = {"model.embed_tokens.weight": torch.tensor(params["embed"]), "model.norm.weight": torch.tensor(params["final_norm"])}
    state["lm_head.weight"] = torch.tensor(params.get("head", params["embed"]))
    for layer in range(raw["num_hidden_layers"]):
        state |= {f"model.layers.{layer}.{name}": tensor for name, tensor in _layer_state(params, layer).items()}
    _load(model, state)
    return model


def saved_shapes(raw: dict[str, Any], params: Arrays) -> dict[str, list[int]]:
    """Name → shape of every tensor in the checkpoint that transformers writes, ascending by name."""
    with tempfile.TemporaryDirectory() as folder:
        build(raw, params).save_pretrained(folder)
        shapes: dict[str, list[int]] = {}
        for file in pathlib.Path(folder).glob("*.safetensors"):
            data = file.read_bytes()
            header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
            shapes |= {name: entry["shape"] for name, entry in header.items() if name != "__metadata__"}
    return dict(sorted(shapes.items()))


class Watch(TorchFunctionMode):
    """Records, while the model runs, what its routers chose and by how much."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.chosen: list[np.ndarray] = []
        self.weights: list[np.ndarray] = []
        self.margin = np.inf
        for module in model.modules():
            if type(module).__name__.lower().endswith("topkrouter"):
                module.register_forward_hook(self._router)

    def _router(self, module: Any, _: Any, output: Any) -> None:
        logits, weights, ids = output
        order = ids.argsort(dim=-1)
        self.chosen.append(ids.gather(1, order).numpy().astype(np.int16))
        self.weights.append(weights.gather(1, order).numpy())
        if hasattr(module, "e_score_correction_bias"):
            choice = (logits.sigmoid() + module.e_score_correction_bias).double().numpy()
        else:
            choice = logits.softmax(dim=-1).double().numpy()
        if getattr(module, "num_group", 1) > 1:
            grouped = np.sort(choice.reshape(len(choice), module.num_group, -1), axis=2)[:, :, -2:].sum(axis=2)
            self._gap(grouped, module.topk_group)
            limit = np.sort(grouped, axis=1)[:, -module.topk_group, None]
            choice = np.where(np.repeat(grouped >= limit, choice.shape[1] // module.num_group, axis=1), choice, -1e3)
        self._gap(choice, module.top_k)

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # The indexer's is the only top-k over [1, T, S] with k of 8 or more.
        if function is torch.Tensor.topk and args[0].dim() == 3 and args[1] >= 8:
            scores = args[0][0].double().numpy()
            self._gap(scores[args[1] :], args[1])  # earlier rows see fewer positions than k
        return function(*args, **(kwargs or {}))

    def _gap(self, values: np.ndarray, kept: int) -> None:
        if kept < values.shape[1] and len(values):
            ordered = -np.sort(-values, axis=1)
            self.margin = min(self.margin, float((ordered[:, kept - 1] - ordered[:, kept]).min()))


def _config(raw: dict[str, Any]) -> Any:
    # A copy: configuration classes rewrite the rope dictionaries that they are given.
    fields = json.loads(json.dumps(raw))
    return AutoConfig.for_model(fields.pop("model_type"), **fields)


def _layer_state(params: Arrays, layer: int) -> dict[str, torch.Tensor]:
    """One decoder layer's state dict, experts fused as transformers holds them."""
    prefix = f"layers.{layer}."
    state = {name: torch.tensor(params[prefix + role]) for role, name in LAYER_NAMES.items() if prefix + role in params}
    if prefix + "router.weight" in params:
        n_experts = len(params[prefix + "router.weight"])
        experts = [[params[f"{prefix}experts.{expert}.{part}"] for part in EXPERT_PARTS] for expert in range(n_experts)]
        state["mlp.experts.gate_up_proj"] = torch.tensor(np.stack([np.concatenate([gate, up]) for gate, up, _ in experts]))
        state["mlp.experts.down_proj"] = torch.tensor(np.stack([down for _, _, down in experts]))
    return state


def _load(module: torch.nn.Module, state: dict[str, torch.Tensor]) -> None:
    """Load strictly, but for the empty matrices of a model without shared experts."""
    missing, unexpected = module.load_state_dict(state, strict=False)
    missing = [name for name in missing if module.state_dict()[name].numel()]
    assert not missing, missing
    assert not unexpected, unexpected


def _mtp_logits(model: Any, raw: dict[str, Any], params: Arrays, tokens: torch.Tensor, hidden: torch.Tensor) -> np.ndarray:
    """Teacher-forced logits of the MTP block for rows 0 … T - 2, float32 [T - 1, W]: transformers' own decoder layer and norms, in
    the order of transformers' MtpLayer."""
    n_layers = raw["num_hidden_layers"]
    # Families that list the kinds of their layers need one more.
    types: dict[str, Any] = {}
    if raw["model_type"] == "glm_moe_dsa":
        types = {"indexer_types": ["full"] * (n_layers + 1), "mlp_layer_types": ["dense"] * n_layers + ["sparse"]}
    config = _config({**raw, **types, "num_hidden_layers": n_layers + 1})
    config._attn_implementation = config._experts_implementation = "eager"
    layer = type(model.model.layers[0])(config, n_layers)
    _load(layer, _layer_state(params, n_layers))
    norms = {}
    for name in ("enorm", "hnorm", "norm"):
        norms[name] = type(model.model.norm)(raw["hidden_size"], raw["rms_norm_eps"])
        norms[name].weight.data = torch.tensor(params[f"mtp.{name}"])
    embedded = norms["enorm"](model.model.embed_tokens(tokens[:, 1:]))
    x = torch.nn.functional.linear(torch.cat([embedded, norms["hnorm"](hidden[:, :-1])], dim=-1), torch.tensor(params["mtp.eh_proj"]))
    n_rows = x.shape[1]
    positions = torch.arange(n_rows)[None]
    mask = torch.full((n_rows, n_rows), torch.finfo(torch.float32).min).triu(1)[None, None]
    rotary = model.model.rotary_emb(x, position_ids=positions)
    x = layer(x, attention_mask=mask, position_embeddings=rotary, position_ids=positions)
    x = x[0] if isinstance(x, tuple) else x
    return model.lm_head(norms["norm"](x))[0].numpy()
