"""What benchmarks of whole models share: steps and their counters, the bytes that a step touches, and the disk's own rate."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from colibri_jax.bench.report import BenchError
from colibri_jax.container.reader import Container
from colibri_jax.engine.reads import BlockReads, checksum, read_blocks
from colibri_jax.engine.session import NativeModel
from colibri_jax.load import load
from colibri_jax.routing_spec import Scope
from colibri_jax.stats import ScopeStats
from colibri_jax.tensors import expert_roles

BLOCK = 4096
COLD_CACHE = 2  # experts per layer: as good as none


@dataclasses.dataclass(frozen=True)
class StepCost:
    """What some steps cost: the difference of two snapshots of the statistics."""

    wall_seconds: float
    useful_bytes: int
    bytes_read: int
    hits: int
    misses: int
    stats: ScopeStats


def open_model(path: Path, **options: Any) -> NativeModel:
    """The native engine on a container."""
    model = load(path, **options)
    assert isinstance(model, NativeModel)
    return model


def run(model: NativeModel, tokens: Sequence[int], scope: Scope) -> StepCost:
    """Prefill `tokens` in one step, or decode them one by one."""
    before = model.stats.scopes[scope]
    for step in [tokens] if scope == "prefill" else [[token] for token in tokens]:
        model.forward(step, scope=scope, logits="last")
    after = model.stats.scopes[scope]
    fields = {field.name: getattr(after, field.name) - getattr(before, field.name) for field in dataclasses.fields(ScopeStats)}
    spent = ScopeStats(**fields)
    return StepCost(spent.wall_seconds, spent.useful_bytes, spent.bytes_read, spent.cache_hits, spent.cache_misses, spent)


def random_tokens(model: NativeModel, n: int, seed: int) -> list[int]:
    """n token ids."""
    drawn: list[int] = np.random.default_rng(seed).integers(0, model.config.vocab_size, n).tolist()
    return drawn


def dense_bytes_touched(container: Container, positions: int) -> int:
    """Bytes of weights that every step of one position reads from memory: all but experts, the embedding and the MTP block.

    The indexer's queries are formed only where more positions than `index_topk` could be attended to.
    """
    config, total = container.runnable_config, 0
    limited = config.indexer is not None and positions > config.indexer.topk
    for role, entry in container.entries.items():
        layer = int(role.split(".")[1]) if role.startswith("layers.") else -1
        idle = not limited and role.endswith((".indexer.wq_b", ".indexer.weights_proj"))
        tied = role == "embed" and not config.tie_embeddings
        if ".experts." in role or role.startswith("mtp.") or layer >= config.n_layers or idle or tied:
            continue
        total += entry.total_bytes
    return total


class ExpertBlocks:
    """The aligned ranges of a container's experts, to be read without an engine."""

    def __init__(self, container: Container, seed: int) -> None:
        config = container.config
        self._ranges: list[tuple[Path, int]] = []
        self.length = 0
        for layer in config.moe_layers:
            for expert in range(config.moe.n_experts):
                entries = [container.entry(role) for role in expert_roles(layer, expert)]
                begin = min(entry.offset for entry in entries) // BLOCK * BLOCK
                end = max(entry.offset + entry.nbytes for entry in entries)
                self._ranges.append((entries[0].path, begin))
                self.length = max(self.length, -(-(end - begin) // BLOCK) * BLOCK)
        sizes = {path: path.stat().st_size for path in {path for path, _ in self._ranges}}
        self._ranges = [(path, begin) for path, begin in self._ranges if begin + self.length <= sizes[path]]
        self._rng = np.random.default_rng(seed)

    def check(self, count: int, *, reader: str) -> None:
        """Read experts through a reader, and again with plain reads.

        Raises:
            BenchError: the bytes differ.
        """
        for i in self._rng.integers(0, len(self._ranges), count):
            path, begin = self._ranges[int(i)]
            got = read_blocks(path, [begin], self.length, reader=reader, checksums=True).checksums[0]
            with path.open("rb") as file:
                file.seek(begin)
                expected = checksum(file.read(self.length))
            if got != expected:
                where = f"{reader}, {path}, offset {begin}"
                raise BenchError("a reader delivered other bytes than the file holds", where=where, expected=expected, got=got)

    def read(self, count: int, *, depth: int, reader: str = "auto") -> float:
        """Read as many experts at random places, past the page cache; bytes per second."""
        chosen: npt.NDArray[np.int64] = self._rng.integers(0, len(self._ranges), count)
        by_file: dict[Path, list[int]] = {}
        for i in chosen:
            path, begin = self._ranges[int(i)]
            by_file.setdefault(path, []).append(begin)
        done: list[BlockReads] = [read_blocks(path, begins, self.length, depth=depth, reader=reader) for path, begins in by_file.items()]
        return sum(reads.nbytes for reads in done) / sum(reads.seconds for reads in done)
