"""What steps cost: distinct experts per layer, what the budget took from them, and the bytes of experts, counted without a cache."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from colibri_jax.container.reader import Container
from colibri_jax.routing_spec import Selection
from colibri_jax.tensors import expert_roles

Int64 = npt.NDArray[np.int64]
Float64 = npt.NDArray[np.float64]


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class StepCosts:
    """Sums over steps, per MoE layer where the name ends in _L.

    Attributes:
        steps, positions: how many.
        union_L: distinct experts before the budget.
        kept_L: distinct experts after it.
        dropped_slots_L: (position, expert) pairs that it took away.
        emptied_L: positions that it left without a routed expert.
        mass_L: float64, shares of router mass kept; over `steps` it is a mean.
    """

    steps: int
    positions: int
    union_L: Int64
    kept_L: Int64
    dropped_slots_L: Int64
    emptied_L: Int64
    mass_L: Float64

    @classmethod
    def none(cls, layers: int) -> StepCosts:
        """Of no step."""
        nothing: Int64 = np.zeros(layers, np.int64)
        return cls(
            steps=0, positions=0, union_L=nothing, kept_L=nothing, dropped_slots_L=nothing, emptied_L=nothing, mass_L=np.zeros(layers)
        )

    @classmethod
    def of_step(cls, selections: Sequence[Selection]) -> StepCosts:
        """Of one step, by its selections, one per MoE layer."""
        counts = np.array([(s.union_size, s.kept.size, s.dropped_slots, s.emptied_positions) for s in selections], np.int64)
        union, kept, slots, emptied = counts.reshape(-1, 4).T
        return cls(
            steps=1,
            positions=len(selections[0].ids) if selections else 0,
            union_L=union,
            kept_L=kept,
            dropped_slots_L=slots,
            emptied_L=emptied,
            mass_L=np.array([s.mass_kept for s in selections]),
        )

    @classmethod
    def total(cls, parts: Iterable[StepCosts], layers: int) -> StepCosts:
        """Sums in the order given."""
        done = cls.none(layers)
        for part in parts:
            done = cls(**{field.name: getattr(done, field.name) + getattr(part, field.name) for field in dataclasses.fields(cls)})
        return done

    def expert_bytes(self, bytes_L: Int64) -> int:
        """Σ distinct kept experts × bytes of one: what would be read if nothing were cached.

        Args:
            bytes_L: bytes of one expert, per MoE layer.
        """
        return int(self.kept_L @ bytes_L)

    def to_json(self, bytes_L: Int64) -> dict[str, Any]:
        """Means over steps; emptied positions and dropped slots as counts."""
        steps = max(self.steps, 1)
        return {
            "steps": self.steps,
            "positions": self.positions,
            "expert_bytes": self.expert_bytes(bytes_L),
            "distinct_kept": float(self.kept_L.mean() / steps) if self.kept_L.size else 0.0,
            "distinct_before": float(self.union_L.mean() / steps) if self.kept_L.size else 0.0,
            "mass_kept": float(self.mass_L.mean() / steps) if self.mass_L.size else 1.0,
            "emptied_positions": int(self.emptied_L.sum()),
            "dropped_slots": int(self.dropped_slots_L.sum()),
            "layers": {
                "distinct_kept": (self.kept_L / steps).tolist(),
                "distinct_before": (self.union_L / steps).tolist(),
                "mass_kept": (self.mass_L / steps).tolist(),
                "emptied_positions": self.emptied_L.tolist(),
                "dropped_slots": self.dropped_slots_L.tolist(),
            },
        }


def expert_bytes_per_layer(container: Container) -> Int64:
    """int64 [MoE layers]: bytes of a layer's first expert with its scales; all of a layer's have one format and shape."""
    return np.array(
        [sum(container.entry(role).total_bytes for role in expert_roles(layer, 0)) for layer in container.runnable_config.moe_layers],
        np.int64,
    )
