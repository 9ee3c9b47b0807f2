"""How often each expert was used, over runs: a file beside the user's other files, from which experts are pinned."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from colibri_jax.config import ModelConfig
from colibri_jax.errors import UsageFileError
from colibri_jax.files import write_whole
from colibri_jax.routing_spec import Selection

FORMAT = "colibri_jax expert usage 1"
LARGEST_COUNT = 2**53  # a JSON number that every reader keeps

Pins = tuple[tuple[int, ...], ...]


@dataclasses.dataclass(frozen=True, eq=False)
class ExpertUsage:
    """Counts of layer steps in which an expert was kept.

    Attributes:
        counts_LE: int64 [MoE layers, experts].
    """

    counts_LE: npt.NDArray[np.int64]

    @classmethod
    def none(cls, config: ModelConfig) -> ExpertUsage:
        """Nothing used yet."""
        return cls(np.zeros((len(config.moe_layers), config.moe.n_experts), np.int64))

    @classmethod
    def read(cls, path: Path, config: ModelConfig) -> ExpertUsage:
        """The counts of a file; zeros where there is none yet.

        Raises:
            UsageFileError: it is another kind of file, or of a model with other layers or experts.
        """
        nothing = cls.none(config)
        if not path.exists():
            return nothing
        try:
            found: Any = json.loads(path.read_bytes())
        except (OSError, ValueError) as error:
            raise UsageFileError("usage file cannot be read", where=str(path), expected="JSON", got=str(error)) from error
        if not isinstance(found, dict) or found.get("format") != FORMAT:
            raise UsageFileError("not a usage file", where=str(path), expected=f'"format": "{FORMAT}"', got="another")
        layers, experts = nothing.counts_LE.shape
        rows: Any = found.get("counts")
        good = isinstance(rows, list) and len(rows) == layers and all(isinstance(row, list) and len(row) == experts for row in rows)
        if not good or not all(type(count) is int and 0 <= count <= LARGEST_COUNT for row in rows for count in row):
            raise UsageFileError(
                "usage file does not fit the model",
                where=str(path),
                expected=f"counts of {layers} layers x {experts} experts",
                got="others",
            )
        return cls(np.array(rows, np.int64).reshape(layers, experts))

    def plus(self, other: ExpertUsage) -> ExpertUsage:
        """The sums of both counts."""
        return ExpertUsage(self.counts_LE + other.counts_LE)

    def count(self, selections: Iterable[Selection]) -> None:
        """Count one step's kept experts in, a selection per MoE layer."""
        for layer, selection in enumerate(selections):
            self.counts_LE[layer, selection.kept] += 1

    def hottest(self, n: int) -> Pins:
        """Of every layer at most n experts that were used, most used first, ties to the lowest id."""
        order_LE = np.argsort(-self.counts_LE, axis=1, kind="stable")[:, :n]
        return tuple(tuple(int(e) for e in row if self.counts_LE[layer, e]) for layer, row in enumerate(order_LE))

    def write(self, path: Path) -> None:
        """Replace a file in one go, so that a run that dies leaves the old one."""
        write_whole(path, json.dumps({"format": FORMAT, "counts": np.minimum(self.counts_LE, LARGEST_COUNT).tolist()}))
