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
    """Two rules of which resident goes first; what is leased, or promised to the walk that runs, stays; pinned experts stay for good.

    "lru": the least recently *handed out*. "step_lfu": one that the layer's newest walk did not hand out; of equals the one whose use,
    averaged over all walks of the layer, is smallest; of equals the least recently handed out. One that goes before all that may go stays
    outside.
    """

    def __init__(
        self, layers: int, experts: int, cache_experts: int, pinned: Sequence[Collection[int]] | None = None, policy: str = "step_lfu"
    ) -> None:
        self.policy = policy
        self.pinned = [set(ids) for ids in pinned or [()] * layers]
        self.capacity = [min(cache_experts, experts - len(ids)) for ids in self.pinned]
        self.cached: list[list[Copy]] = [[] for _ in range(layers)]
        """Least recent first."""
        self.kept: list[list[Copy]] = [[] for _ in range(layers)]
        self.walks: list[list[set[int]]] = [[] for _ in range(layers)]
        """What every walk of a layer has handed out, the newest last."""
        self.hits = self.pinned_hits = self.misses = 0
        self.promised: list[Copy] = []
        self.uncached: list[Copy] = []
        """Leased, but outside the cache."""

    def resident(self, layer: int) -> set[int]:
        return {copy.expert for copy in self.cached[layer] + self.kept[layer]}

    def by_rank(self, layer: int) -> list[int]:
        """Experts that are not pinned, in the order in which they would go."""
        return [copy.expert for copy in self.in_order(layer)]

    def in_order(self, layer: int) -> list[Copy]:
        copies = self.cached[layer]
        return sorted(copies, key=lambda copy: (*self.rank(layer, copy.expert), copies.index(copy)))

    def rank(self, layer: int, expert: int) -> tuple[int, ...]:
        """Small goes first."""
        if self.policy == "lru":
            return ()
        return int(expert in self.newest(layer)), self.average(layer, expert)

    def newest(self, layer: int) -> set[int]:
        return self.walks[layer][-1] if self.walks[layer] else set()

    def average(self, layer: int, expert: int) -> int:
        """Worked out from the whole history: every walk takes 1/32 away, rounded down, and a use brings 2^25."""
        value = 0
        for used in self.walks[layer]:
            value = value - value // 32 + (2**25 if expert in used else 0)
        return value

    def slots_used(self) -> int:
        """Slots of experts that were handed out."""
        return sum(map(len, self.cached)) + sum(map(len, self.kept)) + len(self.uncached)

    def begin(self, layer: int, experts: Collection[int]) -> None:
        self.walks[layer].append(set())
        self.promised = [copy for copy in self.cached[layer] + self.kept[layer] if copy.expert in experts]
        for copy in self.promised:
            copy.leases += 1

    def is_promised(self, expert: int) -> bool:
        return any(copy.expert == expert for copy in self.promised)

    def hand_out(self, layer: int, expert: int) -> Copy:
        self.walks[layer][-1].add(expert)
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
        """What goes first of what may go."""
        return next((other for other in self.in_order(layer) if other.leases == 0), None)

    def enters(self, copy: Copy, victim: Copy) -> bool:
        return self.rank(copy.layer, copy.expert) >= self.rank(copy.layer, victim.expert)

    def _insert(self, copy: Copy) -> None:
        layer = copy.layer
        if copy.expert in self.resident(layer):
            return
        if copy.expert in self.pinned[layer]:
            self.kept[layer].append(copy)
        else:
            if len(self.cached[layer]) == self.capacity[layer]:
                victim = self.victim(layer)
                if victim is None or not self.enters(copy, victim):
                    return
                self.cached[layer].remove(victim)
            self.cached[layer].append(copy)
        self.uncached.remove(copy)
