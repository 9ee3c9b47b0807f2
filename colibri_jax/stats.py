"""What a language model counted: frozen snapshots whose names carry units. Every number is something that happened.

Counters are kept apart per scope (prefill, decode, verify), because a budget acts per scope, and for the drafts of an MTP block,
which is routed by the options of scope decode.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Literal

from colibri_jax.routing_spec import SCOPES, Scope, Selection

# What is counted apart: the scopes of a budget, and the steps of an MTP block.
StatsScope = Scope | Literal["draft"]
STATS_SCOPES: tuple[StatsScope, ...] = (*SCOPES, "draft")

PHASES = ("disk_wait", "experts", "attention", "head", "other")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScopeStats:
    """Sums over all forward calls of one scope since the last reset of the counters.

    "Layer steps" are (MoE layer, forward call) pairs: the unit in which a union is formed and a budget acts.
    The five phase times are disjoint and cover a call from entry to return.
    """

    steps: int = 0
    positions: int = 0
    wall_seconds: float = 0.0
    disk_wait_seconds: float = 0.0
    experts_seconds: float = 0.0
    attention_seconds: float = 0.0
    head_seconds: float = 0.0
    other_seconds: float = 0.0
    bytes_read: int = 0
    """Bytes of completed reads, alignment included; equal to the kernel's account where reads are direct."""
    useful_bytes: int = 0
    """Bytes of the experts that those reads were for."""
    cache_hits: int = 0
    cache_misses: int = 0
    foreseen_experts: int = 0
    """Experts of layers that were looked ahead to, which the look ahead had named."""
    foreseeable_experts: int = 0
    """All experts of those layers."""
    prefetch_useful_bytes: int = 0
    """Bytes of experts whose reads had begun before their layer asked for them. Part of `useful_bytes`."""
    prefetch_wasted_bytes: int = 0
    """Bytes of experts that were read ahead and not asked for. Not part of `useful_bytes`."""
    layer_steps: int = 0
    budget_acted_layer_steps: int = 0
    """Those in which the budget took an expert from a position."""
    union_experts: int = 0
    """Sum of union sizes before the budget."""
    kept_experts: int = 0
    """Sum of distinct experts after the budget."""
    dropped_experts: int = 0
    dropped_slots: int = 0
    """(Position, expert) pairs that the budget took away, or that policy cache_route exchanged."""
    routed_slots: int = 0
    """(Position, expert) pairs in use after that. Policy cache_route leaves every position as many as it had."""
    emptied_positions: int = 0
    mass_kept_sum: float = 0.0
    """Sum over layer steps of the share of router mass kept; `mass_kept` is its mean."""
    avoided_read_bytes_estimate: int = 0
    """Bytes of dropped experts that were neither cached nor pinned at that moment. An estimate: nothing was read."""

    @property
    def mass_kept(self) -> float:
        """Mean share of router mass that the budget left, 1.0 before any step."""
        return self.mass_kept_sum / self.layer_steps if self.layer_steps else 1.0

    @property
    def swap_share(self) -> float:
        """Of policy cache_route: pairs exchanged over pairs in use; what agrees with the true routing is the rest. 0.0 before any step."""
        return self.dropped_slots / self.routed_slots if self.routed_slots else 0.0

    @property
    def hit_rate(self) -> float:
        """Cache hits over distinct experts after the cut; 0.0 before any step."""
        looked_up = self.cache_hits + self.cache_misses
        return self.cache_hits / looked_up if looked_up else 0.0

    @property
    def prefetch_recall(self) -> float:
        """Share of the experts of layers that were looked ahead to, which the look ahead had named; 0.0 before any."""
        return self.foreseen_experts / self.foreseeable_experts if self.foreseeable_experts else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Positions over wall time; 0.0 before any step."""
        return self.positions / self.wall_seconds if self.wall_seconds else 0.0

    def plus(self, other: ScopeStats) -> ScopeStats:
        """Field by field sum."""
        return ScopeStats(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in dataclasses.fields(self)})

    def with_selections(self, selections: Iterable[Selection]) -> ScopeStats:
        """These statistics with one step's selections counted in."""
        added = ScopeStats()
        for s in selections:
            added = added.plus(
                ScopeStats(
                    layer_steps=1,
                    budget_acted_layer_steps=int(s.dropped_slots > 0),
                    union_experts=s.union_size,
                    kept_experts=s.kept.size,
                    dropped_experts=s.dropped,
                    dropped_slots=s.dropped_slots,
                    routed_slots=int((s.ids >= 0).sum()),
                    emptied_positions=s.emptied_positions,
                    mass_kept_sum=s.mass_kept,
                )
            )
        return self.plus(added)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stats:
    """A snapshot of one language model: what it effectively runs with, and what it did.

    `backend` is "native" or "reference"; the fields after `precision` say what the native engine chose at load
    (ISA, reader, sizes) and are empty in the reference, which has no cache and reads nothing.
    """

    backend: str
    precision: str
    scopes: Mapping[StatsScope, ScopeStats] = dataclasses.field(default_factory=lambda: {scope: ScopeStats() for scope in STATS_SCOPES})
    isa: str = ""
    reader: str = ""
    """How experts are read: "direct" (O_DIRECT) or "buffered", why where the choice was not the first one, and by which reader."""
    threads: int = 0
    cache_experts_per_layer: int = 0
    expert_bytes: int = 0
    dense_bytes: int = 0
    kv_cache_bytes: int = 0
    ram_bytes: int = 0
    """Bound that the engine derived, or was given and found free; 0 where there is none."""
    asked_ram_bytes: int = 0
    """Bound that the engine was given; 0 where there was none."""
    pinned_experts: int = 0
    """Experts of all layers that stay in memory from their first use on, outside the cache."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "scopes", MappingProxyType(dict(self.scopes)))

    @property
    def bytes_read(self) -> int:
        """Bytes of completed reads, of all scopes together."""
        return sum(scope.bytes_read for scope in self.scopes.values())

    @property
    def total(self) -> ScopeStats:
        """All scopes together."""
        summed = ScopeStats()
        for scope in self.scopes.values():
            summed = summed.plus(scope)
        return summed
