"""Routing and budget once more, loop by loop in Python numbers: an oracle that shares no code with the package's two.

Python floats are IEEE doubles and its integers are exact, so every line below is one rounded operation or none. NumPy
serves for float32 rounding alone. The oracle also names what a case exercised (`events`), so that a test can prove that
its cases are the awkward ones.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import numpy as np

from colibri_jax.routing_spec import RouterSpec, RoutingOptions, Selection

TINY = 2.0**-126


@dataclasses.dataclass
class Verdict:
    """The right Selection, what made the case special, and per position Σ and TOPP's running sums."""

    selection: Selection
    events: frozenset[str]
    topp_sums: list[list[float]]


def float32(x: float) -> float:
    """The nearest float32, as a Python float; infinite beyond its range."""
    with np.errstate(over="ignore", under="ignore"):
        return float(np.float32(x))


def small_is_zero(x: float) -> float:
    y = float32(x)
    return y if y >= TINY else 0.0


@functools.lru_cache(maxsize=1 << 20)
def exp(x: float) -> float:
    """exp of a double <= 0 in 30-bit fixed point; round() of a double is half-even and exact."""
    t = round(max(x, -100.0) * (1.4426950408889634 * 1073741824.0))
    k, f = t // 2**30, t % 2**30
    m = 15
    for c in (219, 2838, 32755, 330788, 2863360, 20654775, 119194166, 515882496, 1488522236, 2147483648):
        m = c + m * f // 2**30
    return math.ldexp(m, k - 31)


def exp_array(x: np.ndarray) -> np.ndarray:
    """`exp` in NumPy's int64, for many values."""
    t = np.rint(np.maximum(x, -100.0) * (1.4426950408889634 * 1073741824.0)).astype(np.int64)
    k, f = t >> 30, t & (2**30 - 1)
    m = np.full_like(t, 15)
    for c in (219, 2838, 32755, 330788, 2863360, 20654775, 119194166, 515882496, 1488522236, 2147483648):
        m = c + ((m * f) >> 30)
    return np.ldexp(m.astype(np.float64), k - 31)


def scores(z: list[float], kind: str) -> list[float]:
    if kind == "sigmoid":
        p = []
        for x in z:
            e = exp(-abs(x))
            p.append(1.0 / (1.0 + e) if x >= 0.0 else e / (1.0 + e))
    else:
        top = max(z)
        es = [exp(x - top) for x in z]
        total = sum(round(e * 2.0**50) for e in es)
        p = [e / (float(total) * 2.0**-50) for e in es]
    return [small_is_zero(x) for x in p]


def units(w: float) -> int:
    return round(w * 4294967296.0)


def total_of(p: list[float], ids: list[int]) -> float:
    total = 0.0
    for e in ids:
        total = total + p[e]
    return total


def weights_of(p: list[float], ids: list[int], total: float, router: RouterSpec) -> list[float]:
    out = []
    for e in ids:
        w = p[e] * router.routed_scaling_factor
        if router.norm_topk_prob:
            w = w / (total + 1e-20)
        out.append(small_is_zero(w))
    return out


def best(values: dict[int, float] | dict[int, int], n: int) -> tuple[list[int], bool]:
    """The n ids of largest value, ties to the lowest id; and whether a tie was decided at the edge."""
    order = sorted(values, key=lambda i: (-values[i], i))
    tie = n < len(order) and values[order[n - 1]] == values[order[n]]
    return order[:n], tie


def choose(p: list[float], router: RouterSpec) -> tuple[list[int], set[str]]:
    """One position's K experts in router order."""
    n_experts = len(p)
    bias = [0.0] * n_experts if router.bias is None else [float(b) for b in router.bias]
    choice = [float32(p[e] + bias[e]) for e in range(n_experts)]
    events = set()
    allowed = list(range(n_experts))
    if router.n_group > 1:
        size = n_experts // router.n_group
        group_score = {}
        for g in range(router.n_group):
            first, second = sorted(choice[g * size : (g + 1) * size], reverse=True)[:2]
            group_score[g] = float32(first + second)
        groups, tie = best(group_score, router.topk_group)
        if tie:
            events.add("group_tie")
        allowed = [e for e in allowed if e // size in groups]
    chosen, tie = best({e: choice[e] for e in allowed}, router.top_k)
    if tie:
        events.add("k_tie")
    return chosen, events


def topp(p: list[float], ids: list[int], share: float) -> tuple[list[int], list[float], bool]:
    """The ids that TOPP keeps, its running sums, and whether the deciding comparison was an equality."""
    order = sorted(ids, key=lambda e: (-p[e], e))
    sums, running = [], 0.0
    for e in order:
        running = running + p[e]
        sums.append(running)
    if share in (0.0, 1.0):
        return ids, sums, False
    threshold = share * sums[-1]
    n = 1
    while sums[n - 1] < threshold:
        n += 1
    kept = set(order[:n])
    return [e for e in ids if e in kept], sums, sums[n - 1] == threshold and threshold > 0.0


def select(logits: np.ndarray, router: RouterSpec, options: RoutingOptions) -> Verdict:
    """The selection of one step by the rules of routing, TOPK, TOPP and policy `aggregate`."""
    assert options.policy == "aggregate"
    n_positions = logits.shape[0]
    events: set[str] = set()
    score, old, topp_sums = [], [], []
    for s in range(n_positions):
        p = scores([float(z) for z in logits[s]], router.score)
        chosen, seen = choose(p, router)
        events |= seen
        if options.expert_topk:
            chosen = chosen[: options.expert_topk]
        chosen, sums, equal = topp(p, chosen, options.expert_topp)
        if equal:
            events.add("topp_equality")
        score.append(p)
        old.append(chosen)
        topp_sums.append(sums)

    old_total = [total_of(score[s], old[s]) for s in range(n_positions)]
    old_weight = [weights_of(score[s], old[s], old_total[s], router) for s in range(n_positions)]
    union = sorted({e for ids in old for e in ids})
    kept = union
    budget = options.scalar_budget
    if 0 < budget < len(union):
        events.add("budget_acts")
        votes = dict.fromkeys(union, 0)
        for s in range(n_positions):
            if options.vote == "weights":
                for e, w in zip(old[s], old_weight[s], strict=True):
                    votes[e] += units(w)
            else:
                for e in union:
                    votes[e] += units(score[s][e])
        winners, tie = best(votes, budget)
        if tie:
            events.add("budget_tie")
        kept = sorted(winners)

    ids_out = np.full((n_positions, router.top_k), -1, np.int32)
    weights_out = np.zeros((n_positions, router.top_k), np.float32)
    lost = emptied = mass_used = mass_before = 0
    for s in range(n_positions):
        new = [e for e in old[s] if e in kept]
        weight = old_weight[s]
        if len(new) < len(old[s]):
            total = old_total[s] if options.denominator == "frozen" else total_of(score[s], new)
            weight = weights_of(score[s], new, total, router)
        ids_out[s, : len(new)] = new
        weights_out[s, : len(new)] = weight
        lost += len(old[s]) - len(new)
        if not new:
            emptied += 1
            events.add("emptied")
        mass_used += sum(units(score[s][e]) for e in new)
        mass_before += sum(units(score[s][e]) for e in old[s])
    selection = Selection(
        ids=ids_out,
        weights=weights_out,
        kept=np.array(kept, np.int32),
        union_size=len(union),
        dropped=len(union) - len(kept),
        dropped_slots=lost,
        emptied_positions=emptied,
        mass_kept=float(mass_used) / float(mass_before) if mass_before else 1.0,
    )
    return Verdict(selection, frozenset(events), topp_sums)
