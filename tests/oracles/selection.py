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
    """The right Selection, what made the case special, per position TOPP's running sums, and what the kept experts'
    aggregate would be after the floor set, then with one more each time, up to the whole union."""

    selection: Selection
    events: frozenset[str]
    topp_sums: list[list[float]]
    held_sums: list[int]


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


def choices_of(p: list[float], router: RouterSpec) -> list[float]:
    bias = [0.0] * len(p) if router.bias is None else [float(b) for b in router.bias]
    return [float32(p[e] + bias[e]) for e in range(len(p))]


def in_groups(choice: list[float], router: RouterSpec) -> tuple[list[int], bool]:
    """Experts that one position's groups allow, and whether a tie between groups was decided."""
    if router.n_group == 1:
        return list(range(len(choice))), False
    size = len(choice) // router.n_group
    group_score = {}
    for g in range(router.n_group):
        first, second = sorted(choice[g * size : (g + 1) * size], reverse=True)[:2]
        group_score[g] = float32(first + second)
    groups, tie = best(group_score, router.topk_group)
    return [e for e in range(len(choice)) if e // size in groups], tie


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


def floor_of(ids: list[int], weights: list[float], m: int) -> list[int]:
    """One position's m experts of largest weight."""
    return best(dict(zip(ids, weights, strict=True)), m)[0]


def row_vote(row_votes: np.ndarray | None, s: int) -> int:
    """What the votes of row s are multiplied by."""
    return 1 if row_votes is None else int(row_votes[s])


def fill(first: list[int], votes: dict[int, int], n: int) -> tuple[list[int], bool]:
    """`first`, then others by votes until n are there; and whether a tie was decided at the edge."""
    rest = {e: v for e, v in votes.items() if e not in first}
    added, tie = best(rest, max(0, n - len(first)))
    return first + added, tie and len(added) > 0


def cover(first: list[int], votes: dict[int, int], share: float, n: int) -> tuple[list[int], set[str]]:
    """`first`, then others by votes until their sum is the share or they are n; and what ended it."""
    kept, held = list(first), sum(votes[e] for e in first)
    goal = share * float(sum(votes.values()))
    for e in best({e: v for e, v in votes.items() if e not in first}, len(votes))[0]:
        if float(held) >= goal:
            return kept, {"coverage_reached"} | ({"coverage_equality"} if float(held) == goal else set())
        if n > 0 and len(kept) >= n:
            return kept, {"coverage_capped"} | ({"first_exceeds"} if len(first) > n else set())
        kept.append(e)
        held += votes[e]
    return kept, set()


def prefer_cached(ranking: list[int], n: int, resident: np.ndarray, top: int, within: int) -> list[int]:
    """n experts of a ranking: its first `top`, then residents among its first `within`, then the others."""
    picks = ranking[: min(top, n)]
    for e in [e for e in ranking[:within] if resident[e]] + ranking:
        if e not in picks and len(picks) < n:
            picks.append(e)
    return picks


def scores_used(p: list[float], new: list[int], old: list[int]) -> list[float]:
    """The scores, by expert, that the picks of a position which exchanged some are weighed with: their own."""
    return p


def select(
    logits: np.ndarray,
    router: RouterSpec,
    options: RoutingOptions,
    resident: np.ndarray | None = None,
    row_votes: np.ndarray | None = None,
) -> Verdict:
    """The selection of one step by the rules of routing, TOPK, TOPP and the options' policy. `resident`: bool [E]; `row_votes`: int [S]."""
    everybody = range(logits.shape[0])
    events: set[str] = set()
    score, choice, allowed, old, topp_sums = [], [], [], [], []
    for s in everybody:
        p = scores([float(z) for z in logits[s]], router.score)
        choice.append(choices_of(p, router))
        in_group, group_tie = in_groups(choice[s], router)
        chosen, k_tie = best({e: choice[s][e] for e in in_group}, router.top_k)
        if options.expert_topk:
            chosen = chosen[: options.expert_topk]
        chosen, sums, equal = topp(p, chosen, options.expert_topp)
        events |= {name for name, seen in (("group_tie", group_tie), ("k_tie", k_tie), ("topp_equality", equal)) if seen}
        score.append(p)
        allowed.append(in_group)
        old.append(chosen)
        topp_sums.append(sums)

    old_total = [total_of(score[s], old[s]) for s in everybody]
    old_weight = [weights_of(score[s], old[s], old_total[s], router) for s in everybody]
    union = sorted({e for ids in old for e in ids})
    vote = []
    for s in everybody:
        by_weight = dict.fromkeys(union, 0) | {e: units(w) for e, w in zip(old[s], old_weight[s], strict=True)}
        vote.append(by_weight if options.vote == "weights" else {e: units(score[s][e]) for e in union})
    total_vote = {e: sum(row_vote(row_votes, s) * vote[s][e] for s in everybody) for e in union}
    floor_set = sorted({e for s in everybody for e in floor_of(old[s], old_weight[s], options.floor)})
    held_sums = [sum(total_vote[e] for e in floor_set)]
    for e in best({e: v for e, v in total_vote.items() if e not in floor_set}, len(union))[0]:
        held_sums.append(held_sums[-1] + total_vote[e])

    # What each position may keep.
    n, policy = options.scalar_budget, options.policy
    over = 0 < n < len(union)
    may_keep = [union for s in everybody]
    if policy == "per_position":
        for s in everybody:
            if 0 < n < len(old[s]):
                may_keep[s], tie = best({e: vote[s][e] for e in old[s]}, n)
                events |= {"budget_acts"} | ({"budget_tie"} if tie else set())
    elif policy == "coverage":
        if over or options.coverage < 1.0:
            everyone, ending = cover(floor_set, total_vote, options.coverage, n)
            may_keep = [everyone for s in everybody]
            events |= {"budget_acts"} | ending
    elif over:
        hits = [e for e in union if resident is not None and resident[e]]
        first: list[int] = {"aggregate": [], "floor": floor_set, "substitute": floor_set, "resident": hits}[policy]
        everyone, tie = fill(first, total_vote, n)
        may_keep = [everyone for s in everybody]
        events |= {"budget_acts"} | ({"budget_tie"} if tie else set()) | ({"first_exceeds"} if len(first) > n else set())

    ids_out = np.full((len(old), router.top_k), -1, np.int32)
    weights_out = np.zeros((len(old), router.top_k), np.float32)
    kept: set[int] = set()
    lost = emptied = mass_used = mass_before = 0
    for s in everybody:
        new = [e for e in old[s] if e in may_keep[s]]
        weight, p = old_weight[s], score[s]
        if policy == "cache_route":
            ranking = old[s] + [e for e in best({e: choice[s][e] for e in allowed[s]}, len(union) + len(p))[0] if e not in old[s]]
            picks = prefer_cached(ranking, len(old[s]), resident, options.route_top, options.route_within)
            if set(picks) != set(old[s]):
                new = best({e: choice[s][e] for e in picks}, len(picks))[0]
                p = scores_used(p, new, old[s])
                weight = weights_of(p, new, old_total[s] if options.denominator == "frozen" else total_of(p, new), router)
                events |= {"budget_acts", "exchanged"}
        if len(new) < len(old[s]):
            if policy == "substitute":
                survivors = new
                inside = {e: choice[s][e] for e in allowed[s] if e in may_keep[s]}
                new, tie = best(inside, len(old[s]))
                events |= {"repick_tie"} if tie else set()
                events |= {"newcomer"} if set(new) - set(old[s]) else set()
                events |= {"survivor_replaced"} if set(survivors) - set(new) else set()
                events |= {"short_set"} if len(new) < len(old[s]) else set()
            total = old_total[s] if options.denominator == "frozen" else total_of(score[s], new)
            weight = weights_of(score[s], new, total, router)
        ids_out[s, : len(new)] = new
        weights_out[s, : len(new)] = weight
        kept |= set(new)
        lost += len(set(old[s]) - set(new))
        if not new:
            emptied += 1
            events.add("emptied")
        mass_used += sum(units(p[e]) for e in new)
        mass_before += sum(units(score[s][e]) for e in old[s])
    selection = Selection(
        ids=ids_out,
        weights=weights_out,
        kept=np.array(sorted(kept), np.int32),
        union_size=len(union),
        dropped=len(set(union) - kept),
        dropped_slots=lost,
        emptied_positions=emptied,
        mass_kept=float(mass_used) / float(mass_before) if mass_before else 1.0,
    )
    return Verdict(selection, frozenset(events), topp_sums, held_sums)
