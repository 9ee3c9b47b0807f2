"""Slow model of the native expert cache: which experts are in memory after which calls. Lists and counters, no buffers."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(eq=False)
class Copy:
    """One expert in memory."""

    layer: int
    expert: int
    leases: int = 0


class CacheModel:
    """Least recently *handed out* goes first; what is leased, or promised to the walk that runs, stays."""

    def __init__(self, layers: int, experts: int, cache_experts: int) -> None:
        self.capacity = min(cache_experts, experts)
        self.cached: list[list[Copy]] = [[] for _ in range(layers)]
        self.hits = self.misses = 0
        self.promised: list[Copy] = []

    def resident(self, layer: int) -> set[int]:
        return {copy.expert for copy in self.cached[layer]}

    def begin(self, layer: int, experts: list[int]) -> None:
        self.promised = [copy for copy in self.cached[layer] if copy.expert in experts]
        for copy in self.promised:
            copy.leases += 1

    def hand_out(self, layer: int, expert: int) -> Copy:
        for copy in self.promised:
            if copy.expert == expert:
                self.hits += 1
                self.promised.remove(copy)
                self.cached[layer].remove(copy)
                self.cached[layer].append(copy)
                return copy
        self.misses += 1
        copy = Copy(layer, expert, leases=1)
        self._insert(copy)
        return copy

    def release(self, copy: Copy) -> None:
        copy.leases -= 1
        if copy.leases == 0 and copy not in self.cached[copy.layer]:
            self._insert(copy)

    def end(self) -> None:
        for copy in self.promised:
            copy.leases -= 1
        self.promised = []

    def _insert(self, copy: Copy) -> None:
        cached = self.cached[copy.layer]
        if copy.expert in self.resident(copy.layer):
            return
        if len(cached) == self.capacity:
            victim = next((other for other in cached if other.leases == 0), None)
            if victim is None:
                return
            cached.remove(victim)
        cached.append(copy)
