"""Cache policies for experts, simulated on traces of what was routed: which step would have found how many experts in memory.

A simulated cache is walked as the engine walks the expert store: the experts of one layer in one step, each once, residents first where the
step has few positions. Those that are in memory when the walk begins are its hits and stay until they are handed out; a policy says what
happens to the others. Every expert that is handed out passes through memory, so keeping none of a step's experts is always possible (paging
with bypass).
"""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence

import numpy as np

Steps = Sequence[Sequence[Sequence[int]]]
"""[step][layer]: experts used there, ascending."""

MOST_OUT_OF_ORDER = 16  # positions of a step whose experts the engine may take in another order than ascending

UNIT = 1 << 30  # a running mean of 1; sums of a few fit in 64 bits anywhere
MOST_USES = 3  # S3-FIFO counts in two bits


class Cache(ABC):
    """Experts that are in memory. Keys are `layer * experts + expert`, so that one cache can serve one layer or all of them."""

    def __init__(self, capacity: int, layers: int, experts: int) -> None:
        """Args: slots; how many layers share them; experts of a layer."""
        self.capacity, self.layers, self.experts = capacity, layers, experts

    def step(self, layer: int, keys: Sequence[int], positions: int = 1) -> int:
        """One layer's part of one step, in the engine's order; the number of hits. `keys` ascend."""
        return self.walk(layer, keys if positions > MOST_OUT_OF_ORDER else sorted(keys, key=lambda key: not self.holds(key)))

    def walk(self, layer: int, keys: Sequence[int]) -> int:
        """Hand out keys in this order; the number of hits."""
        self.tick(layer)
        promised = {key for key in keys if self.holds(key)}
        hits = len(promised)
        for key in keys:
            if key in promised:
                promised.remove(key)
                self.hit(key)
            else:
                self.miss(key, promised)
        return hits

    def tick(self, layer: int) -> None:  # noqa: B027 - most policies have no clock
        """A walk over `layer` begins."""

    @abstractmethod
    def residents(self) -> Collection[int]:
        """Keys in memory."""

    def holds(self, key: int) -> bool:
        return key in self.residents()

    @abstractmethod
    def hit(self, key: int) -> None:
        """A resident is handed out."""

    @abstractmethod
    def miss(self, key: int, promised: Collection[int]) -> None:
        """Another one is handed out; it may take the place of a resident that is not promised to this walk."""


class LRU(Cache):
    """Least recently handed out goes first: the engine's `lru`."""

    def __init__(self, capacity: int, layers: int, experts: int) -> None:
        super().__init__(capacity, layers, experts)
        self.order: OrderedDict[int, None] = OrderedDict()  # least recent first

    def residents(self) -> Collection[int]:
        return self.order

    def by_rank(self) -> list[int]:
        """Residents in the order in which they would go."""
        return list(self.order)

    def hit(self, key: int) -> None:
        self.order.move_to_end(key)

    def victim(self, promised: Collection[int]) -> int | None:
        return next((key for key in self.order if key not in promised), None)

    def miss(self, key: int, promised: Collection[int]) -> None:
        if len(self.order) == self.capacity:
            victim = self.victim(promised)
            if victim is None or not self.admits(key, victim):
                return
            del self.order[victim]
        self.order[key] = None

    def admits(self, key: int, victim: int) -> bool:
        return True


class DecayedLFU(LRU):
    """Least score goes first, ties to the least recent. A score says how often an expert was used in its layer's steps, of late above all.

    A running mean moves towards 1 (used) or 0 (not) by the share 2^-shift a step, in integers; a score is the sum of one such mean per
    shift. Shift 0 is the step itself: its experts stay before all others. Without shifts a score is a count. Scores outlive residence, and
    an expert whose score is below every resident's stays outside.
    """

    shifts: tuple[int, ...] = ()

    def __init__(self, capacity: int, layers: int, experts: int) -> None:
        super().__init__(capacity, layers, experts)
        self.means = np.zeros((layers, max(1, len(self.shifts)), experts), np.int64)
        self.gain = sum(UNIT >> shift for shift in self.shifts or (0,))
        self.scores = [0] * (layers * experts)

    def tick(self, layer: int) -> None:
        means = self.means[layer]
        for at, shift in enumerate(self.shifts):
            means[at] -= means[at] >> shift
        start = layer * self.experts
        self.scores[start : start + self.experts] = means.sum(axis=0).tolist()

    def walk(self, layer: int, keys: Sequence[int]) -> int:
        hits = super().walk(layer, keys)
        used = [key - layer * self.experts for key in keys]
        for mean, shift in zip(self.means[layer], self.shifts or (0,), strict=True):
            mean[used] += UNIT >> shift
        return hits

    def by_rank(self) -> list[int]:
        return sorted(self.order, key=self.scores.__getitem__)

    def hit(self, key: int) -> None:
        self.scores[key] += self.gain
        super().hit(key)

    def victim(self, promised: Collection[int]) -> int | None:
        return min((key for key in self.order if key not in promised), key=self.scores.__getitem__, default=None)

    def admits(self, key: int, victim: int) -> bool:
        return self.scores[key] >= self.scores[victim]

    def miss(self, key: int, promised: Collection[int]) -> None:
        self.scores[key] += self.gain
        super().miss(key, promised)


class SLRU(Cache):
    """Two LRU lists: new experts enter the first, a hit moves to the second, whose overflow returns to the first. The first is evicted."""

    def __init__(self, capacity: int, layers: int, experts: int) -> None:
        super().__init__(capacity, layers, experts)
        self.probation: OrderedDict[int, None] = OrderedDict()
        self.protected: OrderedDict[int, None] = OrderedDict()
        self.most_protected = capacity * 4 // 5

    def residents(self) -> Collection[int]:
        return [*self.probation, *self.protected]

    def holds(self, key: int) -> bool:
        return key in self.probation or key in self.protected

    def hit(self, key: int) -> None:
        if key in self.protected:
            self.protected.move_to_end(key)
            return
        del self.probation[key]
        self.protected[key] = None
        if len(self.protected) > self.most_protected:
            self.probation[self.protected.popitem(last=False)[0]] = None

    def miss(self, key: int, promised: Collection[int]) -> None:
        if len(self.probation) + len(self.protected) == self.capacity:
            found = ((queue, k) for queue in (self.probation, self.protected) for k in queue if k not in promised)
            queue, victim = next(found, (None, -1))
            if queue is None:
                return
            del queue[victim]
        self.probation[key] = None


class S3FIFO(Cache):
    """A small queue for the new, a main queue for what was used again, a list of what lately left the small one; no order by use.

    A tenth of the slots is the small queue's. What leaves it goes to the main queue if it was hit twice or more; the main queue gives an
    expert another round per hit. An expert on the list of those that left enters the main queue at once.
    """

    def __init__(self, capacity: int, layers: int, experts: int) -> None:
        super().__init__(capacity, layers, experts)
        self.small: OrderedDict[int, int] = OrderedDict()  # hits since they came, oldest first
        self.main: OrderedDict[int, int] = OrderedDict()
        self.left: OrderedDict[int, None] = OrderedDict()
        self.small_size = max(1, capacity // 10)

    def residents(self) -> Collection[int]:
        return [*self.small, *self.main]

    def holds(self, key: int) -> bool:
        return key in self.small or key in self.main

    def hit(self, key: int) -> None:
        queue = self.small if key in self.small else self.main
        queue[key] = min(queue[key] + 1, MOST_USES)

    def miss(self, key: int, promised: Collection[int]) -> None:
        if len(self.small) + len(self.main) == self.capacity and not self.evict(promised):
            return
        if key in self.left:
            del self.left[key]
            self.main[key] = 0
        else:
            self.small[key] = 0

    def evict(self, promised: Collection[int]) -> bool:
        """Free one slot; False where all are promised."""
        if len(self.small) >= self.small_size:
            return self.evict_small(promised) or self.evict_main(promised)
        return self.evict_main(promised) or self.evict_small(promised)

    def evict_small(self, promised: Collection[int]) -> bool:
        for key in [k for k in self.small if k not in promised]:
            uses = self.small.pop(key)
            if uses > 1:
                self.main[key] = 0
                continue
            self.left[key] = None
            if len(self.left) > self.capacity:
                self.left.popitem(last=False)
            return True
        return False

    def evict_main(self, promised: Collection[int]) -> bool:
        for _ in range(MOST_USES + 1):
            for key in [k for k in self.main if k not in promised]:
                uses = self.main.pop(key)
                if not uses:
                    return True
                self.main[key] = uses - 1
        return False


def decayed(*shifts: int) -> type[DecayedLFU]:
    """The policy with these shifts."""
    return type("DecayedLFU" + "_".join(map(str, shifts)), (DecayedLFU,), {"shifts": shifts})


def half_life(shift: int) -> float:
    """Steps after which a use counts half."""
    return math.log(0.5) / math.log1p(-(2.0**-shift))


POLICIES: dict[str, type[Cache]] = {
    "LRU": LRU,
    **{f"LFU, half-life {half_life(shift):.0f}": decayed(shift) for shift in (3, 5, 7, 9)},
    "LFU, no decay": DecayedLFU,
    **{f"step, then LFU {half_life(shift):.0f}": decayed(0, shift) for shift in (3, 5, 7)},
    "SLRU": SLRU,
    "S3-FIFO": S3FIFO,
}
DEFAULT = "step, then LFU 22"
"""The engine's `step_lfu`."""


def grouped(steps: Steps, pattern: Sequence[int]) -> tuple[Steps, list[int]]:
    """Consecutive steps of one position taken together, so many at a time by turns: what each uses, and its positions."""
    taken: list[list[list[int]]] = []
    positions: list[int] = []
    at = 0
    for size in itertools.cycle(pattern):
        if at + size > len(steps):
            return taken, positions
        together = steps[at : at + size]
        taken.append([sorted({expert for step in together for expert in step[layer]}) for layer in range(len(steps[0]))])
        positions.append(size)
        at += size
    raise AssertionError("a cycle ends")


def walks(steps: Steps, experts: int) -> Iterable[tuple[int, int, list[int]]]:
    """Step, layer and keys of every walk, in the order of a model's run."""
    for at, step in enumerate(steps):
        for layer, chosen in enumerate(step):
            yield at, layer, [layer * experts + expert for expert in chosen]


def simulate(policy: Callable[[int, int, int], Cache], steps: Steps, experts: int, slots: int, warmup: int, *, shared: bool = False) -> int:
    """Hits of all layers in the steps of one position from `warmup` on. `slots` per layer: each its own, or all of them in one pool."""
    if shared:
        pool = policy(slots * len(steps[0]), len(steps[0]), experts)
        return sum(hits for at, hits in ((at, pool.step(layer, keys)) for at, layer, keys in walks(steps, experts)) if at >= warmup)
    return sum(hits_of_steps(policy, steps, experts, slots, [1] * len(steps))[warmup:])


def hits_of_steps(policy: Callable[[int, int, int], Cache], steps: Steps, experts: int, slots: int, positions: Sequence[int]) -> list[int]:
    """Hits of all layers in every step, of so many positions; each layer has slots of its own."""
    caches = [policy(slots, 1, experts) for _ in steps[0]]
    return [sum(own.step(0, keys, n) for own, keys in zip(caches, step, strict=True)) for step, n in zip(steps, positions, strict=True)]


def belady(steps: Steps, experts: int, slots: int, warmup: int, *, shared: bool = False) -> int:
    """Most hits that any policy can have in the steps from `warmup` on, knowing the future.

    Between two uses an expert holds a slot or does not; a hit is a gap through which it did. So the question is how many gaps can be
    chosen such that no more than the slots overlap, and dropping the gap that ends last wherever there are too many answers it. That is
    Belady's rule with bypass: of residents and newcomers the next used stay. Gaps that end in the warm-up count nothing and are dropped.
    """
    layers = len(steps[0])
    if not shared:
        return sum(belady([[step[layer]] for step in steps], experts, slots, warmup, shared=True) for layer in range(layers))
    capacity = slots * layers
    moments = list(walks(steps, experts))
    next_use: list[list[int | None]] = []
    seen: dict[int, int] = {}
    for moment in range(len(moments) - 1, -1, -1):
        at, _, keys = moments[moment]
        next_use.append([seen.get(key) for key in keys])
        for key in keys:
            if at >= warmup:
                seen[key] = moment
            else:
                seen.pop(key, None)
    next_use.reverse()
    held: dict[int, int] = {}  # key: moment of its next use
    hits = 0
    for (_, _, keys), following in zip(moments, next_use, strict=True):
        for key, use in zip(keys, following, strict=True):
            hits += held.pop(key, None) is not None
            if use is not None:
                held[key] = use
        while len(held) > capacity:
            del held[max(held, key=held.__getitem__)]
    return hits
