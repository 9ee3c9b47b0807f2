"""Slow second texts of the simulated cache policies, and the best hit count by trying every content."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

UNIT = 1 << 30


def walk(state: Any, keys: Sequence[int], leave: Callable[[Any, set[int]], int | None], enter: Any, used: Any) -> int:
    """One step: hits stay until handed out; `leave` names who goes (None: the newcomer stays outside)."""
    later = {key for key in keys if key in state["in"]}
    hits = len(later)
    for key in keys:
        was_in = key in state["in"]
        later.discard(key)
        used(state, key, was_in)
        if was_in:
            continue
        if len(state["in"]) == state["slots"]:
            gone = leave(state, later)
            if gone is None:
                continue
            state["in"].pop(gone)
        enter(state, key)
    return hits


def slru(steps: Sequence[Sequence[int]], slots: int) -> list[int]:
    """Hits per step. Contents are key: (protected, time of last movement)."""
    state: dict[str, Any] = {"in": {}, "slots": slots, "now": 0}

    def now() -> int:
        state["now"] += 1
        return int(state["now"])

    def used(state: Any, key: int, was_in: bool) -> None:
        if not was_in:
            return
        state["in"][key] = (True, now())
        safe = sorted((time, k) for k, (protected, time) in state["in"].items() if protected)
        if len(safe) > slots * 4 // 5:
            state["in"][safe[0][1]] = (False, now())

    def leave(state: Any, later: set[int]) -> int | None:
        return min(((*where, k) for k, where in state["in"].items() if k not in later), default=(0, 0, None))[2]

    def enter(state: Any, key: int) -> None:
        state["in"][key] = (False, now())

    return [walk(state, keys, leave, enter, used) for keys in steps]


def lfu(steps: Sequence[Sequence[int]], slots: int, shifts: Sequence[int]) -> list[int]:
    """Hits per step. A score is worked out from the whole history, each time it is asked for."""
    state: dict[str, Any] = {"in": {}, "slots": slots, "now": 0}
    history: list[list[int]] = []

    def score(key: int) -> int:
        total = 0
        for shift in shifts or (None,):
            value = 0
            for step in history:
                value -= 0 if shift is None else value >> shift
                value += (UNIT >> (shift or 0)) if key in step else 0
            total += value
        return total

    def used(state: Any, key: int, was_in: bool) -> None:
        history[-1].append(key)
        state["now"] += 1
        state["newcomer"] = key
        if was_in:
            state["in"][key] = state["now"]

    def leave(state: Any, later: set[int]) -> int | None:
        least = min(((score(k), time, k) for k, time in state["in"].items() if k not in later), default=None)
        return None if least is None or score(state["newcomer"]) < least[0] else least[2]

    def enter(state: Any, key: int) -> None:
        state["in"][key] = state["now"]

    hits = []
    for keys in steps:
        history.append([])
        hits.append(walk(state, keys, leave, enter, used))
    return hits


def s3fifo(steps: Sequence[Sequence[int]], slots: int) -> list[int]:
    """Hits per step. Queues are lists of [key, hits], oldest first."""
    small: list[list[int]] = []
    main: list[list[int]] = []
    left: list[int] = []

    def free_main(later: set[int]) -> bool:
        while any(entry[0] not in later for entry in main):
            entry = next(entry for entry in main if entry[0] not in later)
            main.remove(entry)
            if entry[1] == 0:
                return True
            main.append([entry[0], entry[1] - 1])
        return False

    def free_small(later: set[int]) -> bool:
        while any(entry[0] not in later for entry in small):
            entry = next(entry for entry in small if entry[0] not in later)
            small.remove(entry)
            if entry[1] < 2:
                left.append(entry[0])
                del left[:-slots]
                return True
            main.append([entry[0], 0])
        return False

    hits = []
    for keys in steps:
        inside = {entry[0] for entry in small + main}
        later = {key for key in keys if key in inside}
        hits.append(len(later))
        for key in keys:
            if key in later:
                later.remove(key)
                entry = next(entry for entry in small + main if entry[0] == key)
                entry[1] = min(3, entry[1] + 1)
                continue
            if len(small) + len(main) == slots:
                order = (free_small, free_main) if len(small) >= max(1, slots // 10) else (free_main, free_small)
                if not (order[0](later) or order[1](later)):
                    continue
            if key in left:
                left.remove(key)
                main.append([key, 0])
            else:
                small.append([key, 0])
    return hits


def most_hits(moments: Sequence[tuple[int, Sequence[int]]], slots: int, warmup: int) -> int:
    """Most hits from step `warmup` on: over every content that may be left after each walk. `moments`: step and keys of each walk."""
    best: dict[frozenset[int], int] = {frozenset(): 0}
    for at, keys in moments:
        after: dict[frozenset[int], int] = {}
        for content, hits in best.items():
            gained = hits + (len(content.intersection(keys)) if at >= warmup else 0)
            available = sorted(content.union(keys))
            for size in range(min(slots, len(available)) + 1):
                for kept in map(frozenset, itertools.combinations(available, size)):
                    after[kept] = max(after.get(kept, 0), gained)
        best = after
    return max(best.values())
