"""Writes tests/goldens/glm_moe_dsa.npz: what transformers' GlmMoeDsaForCausalLM computes on the random checkpoints of the tests.

Needs the extra `oracle`. Run from the repository root, PYTHONPATH=.:

    python validation/goldens/make_transformers_goldens.py

Weights come from seeds (tests/oracles/random_glm.py), so the file holds only results: per case the logits, each sparse layer's chosen
experts (ascending) and their weights, and where there is an MTP block its logits, composed of transformers' own decoder layer
and norms in the order of transformers' MtpLayer. The margins printed beside each case (smallest gap at the edge of the experts' and of the
positions' choice) must stay well above the two frameworks' difference, or equality of choices would be luck.
"""

from __future__ import annotations

import argparse
import pathlib
from typing import Any

import numpy as np
import torch
from oracles import random_glm
from torch.overrides import TorchFunctionMode
from transformers import GlmMoeDsaConfig, GlmMoeDsaForCausalLM
from transformers.models.glm_moe_dsa import modeling_glm_moe_dsa as glm

from colibri_jax.config import ModelConfig
from colibri_jax.tensors import EXPERT_PARTS

SMALLEST_MARGIN = 1e-5

LAYER_NAMES = {
    "attn_norm": "input_layernorm.weight",
    "attn.q_a": "self_attn.q_a_proj.weight",
    "attn.q_a_norm": "self_attn.q_a_layernorm.weight",
    "attn.q_b": "self_attn.q_b_proj.weight",
    "attn.kv_a": "self_attn.kv_a_proj_with_mqa.weight",
    "attn.kv_a_norm": "self_attn.kv_a_layernorm.weight",
    "attn.kv_b": "self_attn.kv_b_proj.weight",
    "attn.o": "self_attn.o_proj.weight",
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


def layer_state(params: dict[str, np.ndarray], layer: int, n_experts: int) -> dict[str, torch.Tensor]:
    """One decoder layer's state dict, experts fused as transformers holds them."""
    prefix = f"layers.{layer}."
    state = {name: torch.tensor(params[prefix + role]) for role, name in LAYER_NAMES.items() if prefix + role in params}
    if prefix + "router.weight" in params:
        experts = [[params[f"{prefix}experts.{expert}.{part}"] for part in EXPERT_PARTS] for expert in range(n_experts)]
        state["mlp.experts.gate_up_proj"] = torch.tensor(np.stack([np.concatenate([gate, up]) for gate, up, _ in experts]))
        state["mlp.experts.down_proj"] = torch.tensor(np.stack([down for _, _, down in experts]))
    return state


def load(module: torch.nn.Module, state: dict[str, torch.Tensor]) -> None:
    """Load strictly, but for the empty matrices of a model without shared experts."""
    missing, unexpected = module.load_state_dict(state, strict=False)
    missing = [name for name in missing if module.state_dict()[name].numel()]
    assert not missing, missing
    assert not unexpected, unexpected


class Watch(TorchFunctionMode):
    """Records, while the model runs, what its routers chose and by how much."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.chosen: list[np.ndarray] = []
        self.weights: list[np.ndarray] = []
        self.margin = np.inf
        for module in model.modules():
            if isinstance(module, glm.GlmMoeDsaTopkRouter):
                module.register_forward_hook(self._router)

    def _router(self, module: Any, _: Any, output: Any) -> None:
        logits, weights, ids = output
        order = ids.argsort(dim=-1)
        self.chosen.append(ids.gather(1, order).numpy().astype(np.int16))
        self.weights.append(weights.gather(1, order).numpy())
        choice = (logits.sigmoid() + module.e_score_correction_bias).double().numpy()
        if module.num_group > 1:
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


def mtp_logits(model: Any, params: dict[str, np.ndarray], case: int, tokens: torch.Tensor, hidden: torch.Tensor) -> np.ndarray:
    """Teacher-forced logits of the MTP block for rows 0 … T - 2, float32 [T - 1, W]."""
    raw = random_glm.hf_config(case)
    n_layers = raw["num_hidden_layers"]
    types = {"indexer_types": ["full"] * (n_layers + 1), "mlp_layer_types": ["dense"] * n_layers + ["sparse"]}
    config = GlmMoeDsaConfig(**{**raw, **types, "num_hidden_layers": n_layers + 1})
    config._attn_implementation = config._experts_implementation = "eager"
    layer = glm.GlmMoeDsaDecoderLayer(config, n_layers)
    load(layer, layer_state(params, n_layers, raw["n_routed_experts"]))
    norms = {}
    for name in ("enorm", "hnorm", "norm"):
        norms[name] = glm.GlmMoeDsaRMSNorm(raw["hidden_size"], raw["rms_norm_eps"])
        norms[name].weight.data = torch.tensor(params[f"mtp.{name}"])
    embedded = norms["enorm"](model.model.embed_tokens(tokens[:, 1:]))
    x = torch.nn.functional.linear(torch.cat([embedded, norms["hnorm"](hidden[:, :-1])], dim=-1), torch.tensor(params["mtp.eh_proj"]))
    n_rows = x.shape[1]
    positions = torch.arange(n_rows)[None]
    mask = torch.full((n_rows, n_rows), torch.finfo(torch.float32).min).triu(1)[None, None]
    rotary = model.model.rotary_emb(x, position_ids=positions)
    x, _ = layer(x, attention_mask=mask, position_embeddings=rotary, position_ids=positions)
    return model.lm_head(norms["norm"](x))[0].numpy()


@torch.no_grad()
def run_case(case: int) -> dict[str, np.ndarray]:
    """All goldens of one case."""
    raw = random_glm.hf_config(case)
    config = ModelConfig.from_hf(raw)
    params = random_glm.params_of(case)
    model = GlmMoeDsaForCausalLM._from_config(GlmMoeDsaConfig(**raw), attn_implementation="eager", experts_implementation="eager").eval()
    state = {"model.embed_tokens.weight": torch.tensor(params["embed"]), "model.norm.weight": torch.tensor(params["final_norm"])}
    state["lm_head.weight"] = torch.tensor(params.get("head", params["embed"]))
    for layer in range(config.n_layers):
        own = layer_state(params, layer, config.moe.n_experts)
        state |= {f"model.layers.{layer}.{name}": tensor for name, tensor in own.items()}
    load(model, state)

    watch = Watch(model)
    tokens = torch.tensor(random_glm.tokens_of(case))[None]
    with watch:
        hidden = model.model(tokens, use_cache=False).last_hidden_state
    results = {"logits": model.lm_head(hidden)[0].numpy()}
    results |= {"chosen": np.stack(watch.chosen), "weights": np.stack(watch.weights)}
    print(f"case {case:2d}: {len(tokens[0])} tokens, largest logit {np.abs(results['logits']).max():.2f}, margin {watch.margin:.1e}")
    assert watch.margin > SMALLEST_MARGIN, f"case {case}: choose another seed"
    if config.n_mtp_layers:
        results["mtp_logits"] = mtp_logits(model, params, case, tokens, hidden)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("tests/goldens/glm_moe_dsa.npz"))
    out = parser.parse_args().out
    torch.set_num_threads(1)
    goldens = {f"{case}/{name}": array for case in range(random_glm.N_CASES) for name, array in run_case(case).items()}
    np.savez_compressed(out, **goldens)
    print(f"{out}: {out.stat().st_size} bytes")


if __name__ == "__main__":
    main()
