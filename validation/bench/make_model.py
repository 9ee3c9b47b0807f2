"""A container of random weights, written as fast as the disk takes them: for measuring memory and speed, not for reading text.

    python validation/bench/make_model.py OUT --layers 10 --experts 64 --hidden 2048 --expert-hidden 1024
    python validation/bench/make_model.py OUT --glm-layers 4

The second form has GLM-5.2's true layer sizes: one dense layer and as many MoE layers as asked for, 5.4 GB each. It then runs a prompt
and fails unless the routing spreads.

Weights are drawn once per kind of matrix; every matrix is another window of them. int4 values are uniform in -7 … 7, scaled
so that a product keeps the variance of its input; what is added to the residual stream (o_proj, down_proj) is four times
smaller, so that the stream keeps the size that the embedding gave it through many layers.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import numpy as np
import numpy.typing as npt

import colibri_jax
from colibri_jax.config import ModelConfig
from colibri_jax.container.directory import CONFIG_FILE
from colibri_jax.container.format import StreamWriter
from colibri_jax.container.plan import PlannedMatrix, PlannedShard, plan_shards
from colibri_jax.errors import NoSpaceError, OutputExistsError
from colibri_jax.quant import DEFAULT_GROUP_SIZE, ROW_BLOCK, SCALE_DTYPES, ScaleType, WeightFormat

Bytes = npt.NDArray[np.uint8]

SHARD_BYTES = 1 << 30
SPARE_BYTES = 256 << 20  # left free on the disk
INT4_DEVIATION = (sum(q * q for q in range(-7, 8)) / 15) ** 0.5
INT8_DEVIATION = (sum(q * q for q in range(-127, 128)) / 255) ** 0.5
WINDOWS = 4001  # places at which a window of the drawn weights may begin
SMALLER = (".o", ".down")
GAIN_SMALLER = 0.25
NORM_DEVIATION = 0.1
# The scores of the likeliest experts lie close together (0.87 to 0.94 of a sigmoid). A bias that is not small beside their distances
# would choose the same few experts for every token.
BIAS_DEVIATION = 0.01


# GLM-5.2's layers; the vocabulary is small, so that embedding and head weigh as in a model of full depth.
GLM_LAYERS: dict[str, Any] = {
    "hidden_size": 6144,
    "intermediate_size": 12288,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "routed_scaling_factor": 2.5,
    "num_attention_heads": 64,
    "q_lora_rank": 2048,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
    "index_n_heads": 32,
    "index_head_dim": 128,
    "index_topk": 2048,
    "vocab_size": 8192,
}
# Random routing must read from all over the disk: of 256 experts so many in so many tokens.
SPREAD_TOKENS, SPREAD_SHARE = 95, 200 / 256


def make_config(
    *, layers: int, dense_layers: int, experts: int, top_k: int, hidden: int, expert_hidden: int, vocab: int, heads: int, positions: int
) -> dict[str, Any]:
    """A `config.json` of family glm_moe_dsa. Attention is kept small beside the experts, as in the large models."""
    return {
        "model_type": "glm_moe_dsa",
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "moe_intermediate_size": expert_hidden,
        "num_hidden_layers": layers,
        "num_nextn_predict_layers": 0,
        "num_attention_heads": heads,
        "n_shared_experts": 1,
        "n_routed_experts": experts,
        "num_experts_per_tok": top_k,
        "routed_scaling_factor": 1.0,
        "q_lora_rank": hidden // 4,
        "kv_lora_rank": 128,
        "qk_rope_head_dim": 32,
        "qk_nope_head_dim": 64,
        "v_head_dim": 64,
        "index_n_heads": 16,
        "index_head_dim": 64,
        "index_topk": 1024,
        "index_topk_freq": 4,
        "index_skip_topk_offset": 1,
        "first_k_dense_replace": dense_layers,
        "max_position_embeddings": positions,
    }


def glm_config(moe_layers: int, positions: int = 4096) -> dict[str, Any]:
    """A `config.json` of one dense layer and some MoE layers of GLM-5.2's sizes."""
    sizes = {"layers": moe_layers + 1, "dense_layers": 1, "experts": 256, "top_k": 8, "hidden": 6144, "expert_hidden": 2048}
    return make_config(**sizes, vocab=8192, heads=64, positions=positions) | GLM_LAYERS


def experts_used(path: Path, tokens: int = SPREAD_TOKENS) -> list[int]:
    """Distinct experts of each MoE layer over a prompt of random tokens, by the native engine."""
    model = colibri_jax.load(path, cache_experts=1)
    ids = np.random.default_rng(1).integers(0, model.config.vocab_size, tokens)
    model.forward(ids, scope="prefill", logits="last")
    return [selection.union_size for selection in model.selections]


def planned(config: dict[str, Any], scales: ScaleType = "f32") -> tuple[PlannedShard, ...]:
    """The files that `make_model` writes."""
    return plan_shards(ModelConfig.from_hf(config), "rows16", DEFAULT_GROUP_SIZE, SHARD_BYTES, scales=scales)


def make_model(target: Path, config: dict[str, Any], seed: int = 0, scales: ScaleType = "f32") -> int:
    """Write a container of random weights.

    Args:
        target: created; must not exist.
        config: as in `config.json`.
        seed: of the weights.
        scales: of the interleaved int4 matrices.

    Returns:
        Bytes of its files.

    Raises:
        OutputExistsError: there is something at `target`.
        NoSpaceError: the disk would be full afterwards.
    """
    shards = planned(config, scales)
    total = sum(shard.file_bytes for shard in shards)
    if target.exists():
        raise OutputExistsError("output exists", where=str(target), expected="nothing there")
    parent = next(path for path in target.absolute().parents if path.exists())
    free = shutil.disk_usage(parent).free
    if total + SPARE_BYTES > free:
        raise NoSpaceError("not enough space", where=str(parent), expected=f"{total + SPARE_BYTES} bytes", got=free)
    target.mkdir(parents=True)
    weights = _Weights(seed)
    for shard in shards:
        with StreamWriter(target / shard.name, shard.tensors, shard.metadata) as writer:
            for matrix in shard.matrices:
                for tensor, data in zip(matrix.tensors, weights.tensors(matrix), strict=True):
                    writer.write(tensor.name, [data])
    (target / CONFIG_FILE).write_text(json.dumps(config, indent=1))  # last: without it the directory is no container
    return total


class _Weights:
    """Random bytes of matrices, drawn once per kind."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self._pools: dict[tuple[Any, ...], Bytes] = {}
        low, high = np.divmod(np.arange(15 * 15), 15)
        self._nibbles = ((low + 1) | ((high + 1) << 4)).astype(np.uint8)  # q + 8 in 1 … 15

    def tensors(self, matrix: PlannedMatrix) -> Iterator[memoryview]:
        """Bytes of the tensors of one role, in the order of the plan."""
        spec, fmt = matrix.spec, matrix.format
        if fmt.bits == 32:
            yield memoryview(self._floats(spec.role, spec.shape).astype("<f4")).cast("B")
            return
        rows, cols = spec.shape
        scale = self._scale(spec.role, cols, fmt.bits)
        if fmt.layout == "rows16":
            yield self._interleaved(fmt, cols, scale, fmt.weight_bytes(rows, cols))
            return
        yield self._window((fmt,), fmt.weight_bytes(1, cols), rows)
        yield memoryview(np.full(fmt.scale_count(rows, cols), scale, "<f4")).cast("B")

    def _scale(self, role: str, cols: int, bits: int) -> np.float32:
        deviation = INT4_DEVIATION if bits == 4 else INT8_DEVIATION
        gain = GAIN_SMALLER if role.endswith(SMALLER) else 1.0
        return np.float32(gain / deviation / (1.0 if role == "embed" else cols**0.5))

    def _interleaved(self, fmt: WeightFormat, cols: int, scale: np.float32, nbytes: int) -> memoryview:
        """A run of records of a pool, all of one scale."""
        record, scales_at = fmt.rows16_record(cols)
        scales = (scales_at, np.full(ROW_BLOCK, scale, fmt.scale_dtype).view(np.uint8))
        return self._window((fmt, scale), record, nbytes // record, scales)

    def _window(self, kind: tuple[Any, ...], record: int, count: int, scales: tuple[slice, Bytes] | None = None) -> memoryview:
        """`count` records of `record` bytes that follow each other in a pool; `kind` begins with their format."""
        fmt: WeightFormat = kind[0]
        key = (*kind, record)
        if key not in self._pools or self._pools[key].shape[0] < count + WINDOWS:
            shape = (count + WINDOWS, record)
            if fmt.bits == 4:
                pool = self._nibbles[self._rng.integers(0, self._nibbles.size, shape, dtype=np.uint8)]
            else:
                pool = self._rng.integers(1, 256, shape, dtype=np.uint8)  # q + 128, or q itself: -127 … 127 and one -128 less
                if scales is None:
                    pool[pool == 128] = 127
            if scales is not None:
                pool[:, scales[0]] = scales[1]
            self._pools[key] = pool
        start = int(self._rng.integers(0, WINDOWS))
        return memoryview(self._pools[key][start : start + count]).cast("B")

    def _floats(self, role: str, shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
        drawn = self._rng.standard_normal(shape).astype(np.float32)
        if len(shape) == 2:
            return drawn / np.float32(shape[1] ** 0.5)
        if role.endswith("bias"):
            return drawn * np.float32(BIAS_DEVIATION)
        return drawn * np.float32(NORM_DEVIATION) + np.float32(1.0)


@click.command()
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--layers", default=10, show_default=True, help="Layers, dense ones included.")
@click.option("--dense-layers", default=1, show_default=True, help="Leading layers without experts.")
@click.option("--experts", default=64, show_default=True, help="Experts of a layer.")
@click.option("--top-k", default=8, show_default=True, help="Experts of a position.")
@click.option("--hidden", default=2048, show_default=True, help="Width of the model.")
@click.option("--expert-hidden", default=1024, show_default=True, help="Hidden width of an expert.")
@click.option("--vocab", default=4096, show_default=True, help="Tokens.")
@click.option("--heads", default=8, show_default=True, help="Attention heads.")
@click.option("--positions", default=4096, show_default=True, help="Longest context.")
@click.option("--glm-layers", type=click.IntRange(min=1), help="Instead of all sizes above: MoE layers as GLM-5.2 has them, and one dense.")
@click.option("--scales", type=click.Choice(list(SCALE_DTYPES)), default="f32", show_default=True, help="Of int4 matrices.")
@click.option("--seed", default=0, show_default=True)
def main(out: Path, seed: int, glm_layers: int | None, scales: ScaleType, **sizes: int) -> None:
    """Write a container of random weights to OUT."""
    config = make_config(**sizes) if glm_layers is None else glm_config(glm_layers)
    total = sum(shard.file_bytes for shard in planned(config, scales))
    click.echo(f"{out}: {total / 1e9:.2f} GB")
    try:
        make_model(out, config, seed, scales)
    except (NoSpaceError, OutputExistsError) as error:
        raise click.ClickException(str(error)) from error
    if glm_layers is not None:
        used, least = experts_used(out), SPREAD_SHARE * config["n_routed_experts"]
        click.echo(f"experts used by {SPREAD_TOKENS} tokens, per layer: {', '.join(map(str, used))} (at least {least:g})")
        if min(used) < least:
            raise click.ClickException("the routing does not spread; what is measured on this model would flatter a cache")


if __name__ == "__main__":
    main()
