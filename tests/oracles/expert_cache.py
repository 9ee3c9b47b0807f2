"""Slow model of the native expert cache: which experts are in memory after which calls. Lists and counters, no buffers."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence


@dataclasses.dataclass(eq=False)
class Copy:
    """One expert in memory."""

    layer: int
    expert: int
    leases: int = 0


class CacheModel:
    """Least recently *handed out* goes first; what is leased, or promised to the walk that runs, stays; pinned experts stay for good."""

    def __init__(self, layers: int, experts: int, cache_experts: int, pinned: Sequence[Collection[int]] | None = None) -> None:
        self.pinned = [set(ids) for ids in pinned or [()] * layers]
        self.capacity = [min(cache_experts, experts - len(ids)) for ids in self.pinned]
        self.cached: list[list[Copy]] = [[] for _ in range(layers)]
        self.kept: list[list[Copy]] = [[] for _ in range(layers)]
        self.hits = self.pinned_hits = self.misses = 0
        self.promised: list[Copy] = []
        self.uncached: list[Copy] = []
        """Leased, but outside the cache."""

    def resident(self, layer: int) -> set[int]:
        return {copy.expert for copy in self.cached[layer] + self.kept[layer]}

    def by_recency(self, layer: int) -> list[int]:
        return [copy.expert for copy in self.cached[layer]]

    def slots_used(self) -> int:
        """Slots of experts that were handed out."""
        return sum(map(len, self.cached)) + sum(map(len, self.kept)) + len(self.uncached)

    def begin(self, layer: int, experts: Collection[int]) -> None:
        self.promised = [copy for copy in self.cached[layer] + self.kept[layer] if copy.expert in experts]
        for copy in self.promised:
            copy.leases += 1

    def is_promised(self, expert: int) -> bool:
        return any(copy.expert == expert for copy in self.promised)

    def hand_out(self, layer: int, expert: int) -> Copy:
        for copy in self.promised:
            if copy.expert == expert:
                self.hits += 1
                self.promised.remove(copy)
                if copy in self.kept[layer]:
                    self.pinned_hits += 1
                else:
                    self.cached[layer].remove(copy)
                    self.cached[layer].append(copy)
                return copy
        self.misses += 1
        copy = Copy(layer, expert, leases=1)
        self.uncached.append(copy)
        self._insert(copy)
        return copy

    def release(self, copy: Copy) -> None:
        copy.leases -= 1
        if copy.leases == 0 and copy in self.uncached:
            self._insert(copy)
            if copy in self.uncached:
                self.uncached.remove(copy)

    def end(self) -> None:
        for copy in self.promised:
            copy.leases -= 1
        self.promised = []

    def victim(self, layer: int) -> Copy | None:
        """What a full cache gives up."""
        return next((other for other in self.cached[layer] if other.leases == 0), None)

    def _insert(self, copy: Copy) -> None:
        layer = copy.layer
        if copy.expert in self.resident(layer):
            return
        if copy.expert in self.pinned[layer]:
            self.kept[layer].append(copy)
        else:
            if len(self.cached[layer]) == self.capacity[layer]:
                victim = self.victim(layer)
                if victim is None:
                    return
                self.cached[layer].remove(victim)
            self.cached[layer].append(copy)
        self.uncached.remove(copy)
