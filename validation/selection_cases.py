"""Reference and native `select_experts` on masses of random cases: equal in every field, or this command fails.

    python validation/selection_cases.py --cases 100000 [--seed 0] [--json]

Cases come in blocks that share a router and options and differ in their logits; blocks come in families that share every shape.
A block is a function of (seed, number) alone: `make_block` gives it again. The reference answers in batches (`select_many`), and
the first case of every block also alone, through `select_experts`.

That the hard cases were among them is counted by a third reading of the rules, in NumPy, which shares no code with either side
(`read_block`), and asserted: each event in at least 5 % of the cases.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import click
import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

import colibri_jax
from colibri_jax.reference.routing import select_many
from colibri_jax.routing_spec import Denominator, RouterSpec, RoutingOptions, Score, Selection, Vote

EVENTS = ("tie at the K boundary", "tie at the budget boundary", "TOPP equality", "group tie", "emptied position", "budget acting")
REQUIRED_SHARE = 0.05
REQUIRED_COARSE_SHARE = 0.30
CASES_PER_BLOCK = 25
BLOCKS_PER_FAMILY = 4
BLOCKS_AT_ONCE = 60
SHOWN_DIFFERENCES = 10

Case = tuple[npt.NDArray[np.float32], RouterSpec, RoutingOptions]
Select = Callable[[Sequence[Case]], list[Selection]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Block:
    """Cases that share router and options. `logits` is float32 [B, S, E]; `coarse` says that they lie on a coarse grid."""

    number: int
    router: RouterSpec
    options: RoutingOptions
    logits: npt.NDArray[np.float32]
    coarse: bool

    @property
    def cases(self) -> list[Case]:
        """Arguments of `select_experts`, one tuple a case."""
        return [(logits, self.router, self.options) for logits in self.logits]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reading:
    """What the third reading found in a block: per event bool [B], and two counts that every Selection states too."""

    events: dict[str, npt.NDArray[np.bool_]]
    union_size: npt.NDArray[np.int64]
    emptied_positions: npt.NDArray[np.int64]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Difference:
    """A case in which the two sides are not equal: block number, place in the block, and the unequal fields."""

    block: int
    case: int
    fields: list[str]


# ---- cases ----------------------------------------------------------------------------------------------------------


def _log_uniform(rng: np.random.Generator, low: int, high: int) -> int:
    return min(high, int(math.exp(rng.uniform(math.log(low), math.log(high + 1)))))


def _one_of(rng: np.random.Generator, *values: Any) -> Any:
    return values[int(rng.integers(len(values)))]


def _family_shape(rng: np.random.Generator) -> dict[str, Any]:
    """What all blocks of a family share: everything that decides an array's shape or a compiled branch."""
    n_group, topk_group = 1, 1
    n_experts = _log_uniform(rng, 1, 256)
    if rng.random() < 0.5:
        n_group = _one_of(rng, 2, 3, 4, 8, 16)
        topk_group = int(rng.integers(1, n_group + 1)) if rng.random() < 0.2 else max(1, n_group // 2)
        n_experts = n_group * _log_uniform(rng, 2, 256 // n_group)
    most = topk_group * n_experts // n_group
    top_k = _log_uniform(rng, 1, min(most, _one_of(rng, 2, 8, 16, most)))
    return {
        "positions": _one_of(rng, 1, 64, *(_log_uniform(rng, 1, 64) for _ in range(8))),
        "n_experts": n_experts,
        "score": cast(Score, _one_of(rng, "sigmoid", "softmax")),
        "top_k": top_k,
        "n_group": n_group,
        "topk_group": topk_group,
        "norm_topk_prob": bool(rng.random() < 0.5),
        "has_bias": bool(rng.random() < 0.5),
        "expert_topk": _one_of(rng, 0, 0, 1, int(rng.integers(1, top_k + 2))),
        "denominator": cast(Denominator, _one_of(rng, "survivors", "frozen")),
        "vote": cast(Vote, _one_of(rng, "weights", "weights", "all_scores")),
    }


def _fine_logits(rng: np.random.Generator, shape: tuple[int, ...]) -> npt.NDArray[np.float64]:
    kind = int(rng.integers(4))
    if kind == 0:  # neighbours in float32, whose scores often round to one value
        return rng.normal() * (1.0 + rng.integers(-4, 5, shape) * 2.0**-23)
    if kind == 1:  # popular experts, as in a real layer
        return rng.normal(size=shape) + 2.0 * rng.normal(size=shape[-1])
    return rng.normal(size=shape) * _one_of(rng, 0.01, 1.0, 4.0, 40.0)


def _coarse_logits(rng: np.random.Generator, shape: tuple[int, ...]) -> npt.NDArray[np.float64]:
    kind = int(rng.integers(5))
    if kind == 0:  # multiples of 1/8
        return rng.integers(-16, 17, shape) / 8
    if kind == 1:  # the same over the whole range in which scores saturate and vanish
        return rng.integers(-880, 881, shape) / 8
    if kind == 2:  # duplicates of a few arbitrary values
        values = rng.normal(size=int(rng.integers(1, 5)))
        return values[rng.integers(0, values.size, shape)]
    if kind == 3:  # scores of exactly 0, 1/2 and 1
        return np.array([-110.0, 0.0, 110.0])[rng.integers(0, 3, shape)]
    return np.full(shape, rng.integers(-4, 5) / 8)  # all equal


def make_block(seed: int, number: int, cases: int = CASES_PER_BLOCK) -> Block:
    """Block `number` of the run with this seed: the same in every run."""
    family = _family_shape(np.random.default_rng([seed, number // BLOCKS_PER_FAMILY, 0]))
    rng = np.random.default_rng([seed, number, 1])
    positions, n_experts, top_k = family["positions"], family["n_experts"], family["top_k"]
    coarse = bool(rng.random() < 0.6)
    logits = (_coarse_logits if coarse else _fine_logits)(rng, (cases, positions, n_experts))
    bias = None
    if family["has_bias"]:
        # On a coarse grid the bias is coarse too, or no two choices would tie.
        bias = (rng.integers(-2, 3, n_experts) / 8 if coarse else rng.normal(size=n_experts) / 10).astype(np.float32)
    picks = min(n_experts, positions * top_k)
    return Block(
        number=number,
        router=RouterSpec(
            score=family["score"],
            top_k=top_k,
            bias=bias,
            n_group=family["n_group"],
            topk_group=family["topk_group"],
            norm_topk_prob=family["norm_topk_prob"],
            routed_scaling_factor=_one_of(rng, 1.0, 1.0, 2.5, float(rng.uniform(0.1, 20)), 1023.0, 2.0**-33),
        ),
        options=RoutingOptions(
            expert_topk=family["expert_topk"],
            expert_topp=_one_of(rng, 0.0, 1.0, 0.25, 0.5, 0.5, 0.75, float(rng.uniform(0.01, 0.99))),
            budget=_one_of(rng, 0, n_experts, *(_log_uniform(rng, 1, picks) for _ in range(8))),
            denominator=family["denominator"],
            vote=family["vote"],
        ),
        logits=logits.astype(np.float32),
        coarse=coarse,
    )


def make_blocks(cases: int, seed: int) -> Iterator[Block]:
    """Blocks of one run, `cases` cases in all."""
    for number in range(-(-cases // CASES_PER_BLOCK)):
        yield make_block(seed, number, min(CASES_PER_BLOCK, cases - number * CASES_PER_BLOCK))


# ---- the third reading ----------------------------------------------------------------------------------------------


def _exp(x: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    t = np.rint(np.maximum(x, -100.0) * (1.4426950408889634 * 2.0**30)).astype(np.int64)
    fraction = t & (2**30 - 1)
    m = np.full_like(t, 15)
    for c in (219, 2838, 32755, 330788, 2863360, 20654775, 119194166, 515882496, 1488522236, 2147483648):
        m = c + ((m * fraction) >> 30)
    return np.ldexp(m.astype(np.float64), (t >> 30) - 31)


def _float32(x: npt.NDArray[np.float64]) -> npt.NDArray[np.float32]:
    rounded = x.astype(np.float32)
    return np.where(rounded < 2.0**-126, np.float32(0), rounded)


def _units(x: npt.NDArray[np.float32]) -> npt.NDArray[np.int64]:
    return np.rint(x.astype(np.float64) * 2.0**32).astype(np.int64)


def _scores(score: Score, logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    z = logits.astype(np.float64)
    if score == "sigmoid":
        e = _exp(-np.abs(z))
        return _float32(np.where(z >= 0, 1.0, e) / (1.0 + e))
    e = _exp(z - z.max(axis=-1, keepdims=True))
    total = np.rint(e * 2.0**50).astype(np.int64).sum(axis=-1, keepdims=True).astype(np.float64) * 2.0**-50
    return _float32(e / total)


def _descending(values: npt.NDArray[Any]) -> npt.NDArray[np.intp]:
    """Indices along the last axis by descending value, ties to the lowest index."""
    return np.argsort(-values, axis=-1, kind="stable")


def _tie_after(values: npt.NDArray[Any], count: int) -> npt.NDArray[np.bool_]:
    """Whether the last of the `count` largest values equals the first that is left out."""
    if count >= values.shape[-1]:
        return np.zeros(values.shape[:-1], bool)
    ranked = -np.sort(-values, axis=-1)
    return ranked[..., count - 1] == ranked[..., count]


def read_block(router: RouterSpec, options: RoutingOptions, logits: npt.NDArray[np.float32]) -> Reading:
    """Read float32 logits [B, S, E] and say which events decided something in each of the B cases.

    The K boundary is where the order is cut: after TOPK where that is lower. A tie there, among groups or at the budget
    counts where an equal rival was left out; TOPP equality where demanding more than the share would have kept more.
    """
    cases, positions, n_experts = logits.shape
    scores = _scores(router.score, logits)
    choice = scores if router.bias is None else scores + router.bias

    group_tie = np.zeros(cases, bool)
    eligible = n_experts
    if router.topk_group < router.n_group:
        size = n_experts // router.n_group
        largest = np.sort(choice.reshape(cases, positions, router.n_group, size), axis=-1)[..., -2:]
        group_scores = largest[..., 0] + largest[..., 1]
        group_tie = _tie_after(group_scores, router.topk_group).any(axis=-1)
        stays = np.zeros(group_scores.shape, bool)
        np.put_along_axis(stays, _descending(group_scores)[..., : router.topk_group], True, axis=-1)
        choice = np.where(np.repeat(stays, size, axis=-1), choice, np.float32(-np.inf))
        eligible = router.topk_group * size

    count = min(router.top_k, options.expert_topk or router.top_k)
    k_tie = _tie_after(choice, count).any(axis=-1) & (count < eligible)
    ids = _descending(choice)[..., :count]
    picked = np.take_along_axis(scores, ids, axis=-1)

    alive = np.ones(ids.shape, bool)
    topp_equality = np.zeros(cases, bool)
    if 0.0 < options.expert_topp < 1.0:
        order = np.lexsort((ids, -picked), axis=-1)
        running = np.cumsum(np.take_along_axis(picked, order, axis=-1), axis=-1, dtype=np.float64)
        enough = options.expert_topp * running[..., -1:]
        last = np.argmax(running >= enough, axis=-1)[..., None]
        equal = np.take_along_axis(running, last, axis=-1) == enough
        topp_equality = (equal & (enough > 0) & (last < count - 1)).any(axis=(-2, -1))
        np.put_along_axis(alive, order, np.arange(count) <= last, axis=-1)

    # Adding 0 in the place of what TOPP removed changes no sum.
    total = np.cumsum(np.where(alive, picked, np.float32(0)), axis=-1, dtype=np.float64)[..., -1:]
    weights = picked.astype(np.float64) * router.routed_scaling_factor
    weights = _float32(weights / (total + 1e-20) if router.norm_topk_prob else weights)
    given = np.zeros(logits.shape, np.int64)
    np.put_along_axis(given, ids, np.where(alive, _units(weights), 0), axis=-1)
    used = np.zeros(logits.shape, bool)
    np.put_along_axis(used, ids, alive, axis=-1)
    member = used.any(axis=1)
    union_size = member.sum(axis=-1)
    votes = (_units(scores) if options.vote == "all_scores" else given).sum(axis=1)
    votes = np.where(member, votes, -1)

    budget = options.scalar_budget
    acting = (union_size > budget) & (budget > 0)
    kept = np.ones(votes.shape, bool)
    budget_tie = np.zeros(cases, bool)
    if 0 < budget < n_experts:
        budget_tie = _tie_after(votes, budget) & acting
        kept[:] = False
        np.put_along_axis(kept, _descending(votes)[..., :budget], True, axis=-1)
    survives = alive & np.take_along_axis(np.repeat(kept[:, None], positions, axis=1), ids, axis=-1)
    emptied = np.where(acting, (~survives.any(axis=-1)).sum(axis=-1), 0)
    found = (k_tie, budget_tie, topp_equality, group_tie, emptied > 0, acting)
    return Reading(events=dict(zip(EVENTS, found, strict=True)), union_size=union_size, emptied_positions=emptied)


# ---- the comparison -------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Tally:
    """Sums over the blocks compared so far."""

    cases: int = 0
    coarse_cases: int = 0
    positions: int = 0
    unequal_fields: Counter[str] = dataclasses.field(default_factory=Counter)
    events: Counter[str] = dataclasses.field(default_factory=Counter)
    seconds: Counter[str] = dataclasses.field(default_factory=Counter)
    differing_cases: int = 0
    first_differences: list[Difference] = dataclasses.field(default_factory=list)
    misread_cases: int = 0

    def add_blocks(self, blocks: Sequence[Block], sides: dict[str, Select]) -> None:
        """Run the two sides on some blocks, compare them with each other and with the third reading, and count."""
        cases = [case for block in blocks for case in block.cases]
        answers: list[list[Selection]] = []
        for name, select in sides.items():
            started = time.perf_counter()
            answers.append(select(cases))
            self.seconds[name] += time.perf_counter() - started
        in_order = zip(*answers, strict=True)
        for block in blocks:
            started = time.perf_counter()
            reading = read_block(block.router, block.options, block.logits)
            self.seconds["third reading"] += time.perf_counter() - started
            for case in range(len(block.logits)):
                self._compare_case(block, case, reading, *next(in_order))
            self.cases += len(block.logits)
            self.coarse_cases += len(block.logits) * block.coarse
            self.positions += len(block.logits) * block.logits.shape[1]
            for event, found in reading.events.items():
                self.events[event] += int(found.sum())

    def _compare_case(self, block: Block, case: int, reading: Reading, first: Selection, second: Selection) -> None:
        fields = first.differences(second)
        self.unequal_fields.update(fields)
        self.differing_cases += bool(fields)
        if fields and len(self.first_differences) < SHOWN_DIFFERENCES:
            self.first_differences.append(Difference(block=block.number, case=case, fields=fields))
        stated = (first.union_size, first.emptied_positions)
        self.misread_cases += stated != (reading.union_size[case], reading.emptied_positions[case])

    def failures(self) -> list[str]:
        """What this run must show and does not; empty when it passed."""
        required = math.ceil(REQUIRED_SHARE * self.cases)
        found = [f"{e}: {self.events[e]} cases, {required} required" for e in EVENTS if self.events[e] < required]
        if self.coarse_cases < REQUIRED_COARSE_SHARE * self.cases:
            found.append(f"coarse grids: {self.coarse_cases} of {self.cases} cases, {REQUIRED_COARSE_SHARE:.0%} required")
        if self.differing_cases:
            found.append(f"{self.differing_cases} cases differ between the two sides")
        if self.misread_cases:
            found.append(f"{self.misread_cases} cases contradict the third reading in union_size or emptied_positions")
        return found


def compare(cases: int, seed: int, sides: dict[str, Select], console: Console) -> Tally:
    """Run `cases` cases through both sides under a progress bar."""
    tally = Tally()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("select_experts", total=cases)
        blocks = make_blocks(cases, seed)
        while some := list(itertools.islice(blocks, BLOCKS_AT_ONCE)):
            tally.add_blocks(some, sides)
            progress.update(task, completed=tally.cases)
    return tally


def by_native(cases: Sequence[Case]) -> list[Selection]:
    """The native side."""
    return [colibri_jax.native.select_experts(*case) for case in cases]


def by_reference(cases: Sequence[Case]) -> list[Selection]:
    """The reference side: in batches; one case of every block alone too, which must not matter."""
    selections = select_many(cases)
    for i in range(0, len(cases), CASES_PER_BLOCK):
        unequal = selections[i].differences(colibri_jax.reference.select_experts(*cases[i]))
        if unequal:
            raise AssertionError(f"the reference answers otherwise in a batch: {', '.join(unequal)}")
    return selections


def _print(tally: Tally, console: Console) -> None:
    table = Table("event", "cases", "required", title=f"{tally.cases:,} cases, {tally.positions:,} positions")
    for event in EVENTS:
        table.add_row(event, f"{tally.events[event]:,}", f"{math.ceil(REQUIRED_SHARE * tally.cases):,}")
    table.add_row("coarse grid", f"{tally.coarse_cases:,}", f"{math.ceil(REQUIRED_COARSE_SHARE * tally.cases):,}")
    console.print(table)
    table = Table("field", "cases that differ")
    for field in dataclasses.fields(Selection):
        table.add_row(field.name, f"{tally.unequal_fields[field.name]:,}")
    console.print(table)
    console.print(", ".join(f"{name} {seconds:.1f} s" for name, seconds in tally.seconds.items()))
    for difference in tally.first_differences:
        console.print(f"differs: block {difference.block}, case {difference.case}: {', '.join(difference.fields)}")


@click.command()
@click.option("--cases", type=click.IntRange(min=1), default=100_000, show_default=True)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of tables.")
def main(cases: int, seed: int, as_json: bool) -> None:
    """Compare reference and native select_experts on random cases; exit 1 unless equal and every event was frequent."""
    tally = compare(cases, seed, {"reference": by_reference, "native": by_native}, Console(stderr=True))
    failures = tally.failures()
    if as_json:
        click.echo(json.dumps(dataclasses.asdict(tally) | {"seed": seed, "failures": failures}))
    else:
        _print(tally, Console())
    for failure in failures:
        click.echo(f"FAILED: {failure}", err=True)
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
