"""What a container holds and costs: formats, bytes per expert, layer and token, and what fits in a given memory."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from colibri_jax.config import ModelConfig
from colibri_jax.container import checkpoints
from colibri_jax.container.reader import Container, TensorEntry, is_container
from colibri_jax.errors import MissingFileError
from colibri_jax.quant import ACTIVATION_GROUP_SIZE, WeightFormat


@dataclasses.dataclass(frozen=True)
class FormatRow:
    """How much of a container has one format."""

    tag: str
    tensors: int
    nbytes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class ContainerSummary:
    """Sizes in bytes, as on disk unless a name says otherwise."""

    path: Path
    config: ModelConfig
    tagged: bool
    formats: tuple[FormatRow, ...]
    missing: tuple[str, ...]
    total_bytes: int
    expert_bytes: int
    """One routed expert: gate, up and down with their scales (the largest, where they differ)."""
    layer_expert_bytes: int
    """All routed experts of one layer (the largest)."""
    cold_token_bytes: int
    """What decoding one token reads with an empty cache: top_k experts in every MoE layer."""
    dense_bytes: int
    """Everything that stays in memory: all tensors but routed experts and the MTP block."""
    mtp_bytes: int
    slot_bytes: int
    """Memory of one cached expert, in the engine's interleaved layout."""
    context: int
    """Positions that `kv_cache_bytes` is for."""
    kv_cache_bytes: int
    ram_bytes: int | None
    cache_experts_per_layer: int | None
    """Expert slots per layer that fit beside dense weights and KV cache, 0 where not even one does; None without `ram_bytes`."""

    def lines(self) -> list[str]:
        """The summary in words, one line each."""
        config = self.config
        moe, layers = config.moe, len(config.moe_layers)
        tag = "tagged" if self.tagged else "formats inferred from byte counts"
        lines = [
            f"{config.family}: {config.n_layers} layers ({layers} with experts), width {config.hidden_size}, "
            f"vocabulary {config.vocab_size}, {config.n_mtp_layers} MTP block",
            f"experts          {moe.n_experts} per layer, top {moe.router.top_k}, {moe.n_shared} shared, hidden {moe.expert_hidden}",
            f"on disk          {_mb(self.total_bytes)} ({tag})",
            *(f"  {row.tag:<20} {row.tensors:>7} tensors {_mb(row.nbytes):>14}" for row in self.formats),
            f"one expert       {_mb(self.expert_bytes)}",
            f"a layer's        {_mb(self.layer_expert_bytes)}",
            f"a cold token     {_mb(self.cold_token_bytes)} ({moe.router.top_k} experts × {layers} layers)",
            f"dense weights    {_mb(self.dense_bytes)}",
            f"MTP block        {_mb(self.mtp_bytes)}",
            f"KV cache         {_mb(self.kv_cache_bytes)} for {self.context} positions",
        ]
        if self.missing:
            lines.append(f"absent           {len(self.missing)} optional tensors, the first is {self.missing[0]}")
        if self.ram_bytes is not None:
            cap = self.cache_experts_per_layer
            fits = (
                f"{cap} experts per layer in the cache (estimate)"
                if cap
                else "too little for dense weights, KV cache and one expert per layer"
            )
            lines.append(f"in {_mb(self.ram_bytes)}: {fits}")
        return lines


def describe(
    path: str | Path, ram_bytes: int | None = None, *, group_size: int | None = None, context: int | None = None
) -> ContainerSummary:
    """Open a container and add up what it holds; no weights are read.

    Args:
        path: the container.
        ram_bytes: memory to fit into, for `cache_experts_per_layer`.
        group_size: as in `Container.open`.
        context: positions of KV cache to count; the model's own, at most 4096, by default.

    Raises:
        ContainerError: as `Container.open`.
    """
    if not is_container(Path(path)):
        raise MissingFileError(
            "not a container", where=str(path), expected="a converted directory (colibri-jax convert)", got="no out-*.safetensors"
        )
    container = Container.open(path, group_size)
    config = container.config
    experts: dict[tuple[int, int], list[TensorEntry]] = {}
    dense = mtp = 0
    rows: dict[str, list[int]] = {}
    for role, entry in container.entries.items():
        row = rows.setdefault(entry.format.tag, [0, 0])
        row[0] += 1
        row[1] += entry.total_bytes
        if checkpoints.is_mtp(config, role):
            mtp += entry.total_bytes
        elif ".experts." in role:
            parts = role.split(".")
            experts.setdefault((int(parts[1]), int(parts[3])), []).append(entry)
        else:
            dense += entry.total_bytes
    sizes = {key: sum(entry.total_bytes for entry in matrices) for key, matrices in experts.items()}
    layer_sizes = [sum(size for (owner, _), size in sizes.items() if owner == layer) for layer in config.moe_layers]
    expert_bytes = max(sizes.values(), default=0)
    slot = max((sum(_slot_bytes(entry) for entry in matrices) for matrices in experts.values()), default=0)
    positions = context if context is not None else config.resolve_context(None)
    kv = positions * kv_bytes_per_position(config)
    cap = None
    if ram_bytes is not None and slot:
        cap = min(max((ram_bytes - dense - kv) // (len(config.moe_layers) * slot), 0), config.moe.n_experts)
    return ContainerSummary(
        path=Path(path),
        config=config,
        tagged=container.tagged,
        formats=tuple(FormatRow(tag, count, nbytes) for tag, (count, nbytes) in sorted(rows.items())),
        missing=container.missing,
        total_bytes=sum(file.stat().st_size for file in Path(path).glob("*.safetensors")),
        expert_bytes=expert_bytes,
        layer_expert_bytes=max(layer_sizes, default=0),
        cold_token_bytes=config.moe.router.top_k * len(config.moe_layers) * expert_bytes,
        dense_bytes=dense,
        mtp_bytes=mtp,
        slot_bytes=slot,
        context=positions,
        kv_cache_bytes=kv,
        ram_bytes=ram_bytes,
        cache_experts_per_layer=cap,
    )


def kv_bytes_per_position(config: ModelConfig) -> int:
    """float32 bytes that one position takes in the cache: what attention keeps per layer, an indexer key per full layer."""
    indexer = 0 if config.indexer is None else config.indexer.head_dim * config.indexer.kinds.count("full")
    return 4 * (config.n_layers * config.attention.cache_width + indexer)


def _slot_bytes(entry: TensorEntry) -> int:
    rows, cols = entry.shape
    group = (entry.format.group_size or ACTIVATION_GROUP_SIZE) if entry.format.bits == 4 else 0
    return WeightFormat(entry.format.bits, group, "rows16", entry.format.scales).weight_bytes(rows, cols)


def _mb(nbytes: float) -> str:
    return f"{nbytes / 1e9:.2f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:.2f} MB"
