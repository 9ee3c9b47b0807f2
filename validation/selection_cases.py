"""Reference and native `select_experts` on masses of random cases: equal in every field, or this command fails.

    python validation/selection_cases.py --cases 100000 [--seed 0] [--json]
    python validation/selection_cases.py --platform gpu --seconds 150

Cases come in blocks that share a router and options and differ in their logits; blocks come in families that share every shape.
A block is a function of (seed, number) alone: `make_block` gives it again. The reference answers in batches (`select_many`); a
sample of the cases goes through its `select_experts` too.

That the hard cases were among them is counted by a third reading of the rules (`selection_reading.py`), and asserted: each event in
its share of the cases. Both sides must also agree with the third reading in the experts kept and in three counts.
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
import jax
import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from selection_reading import EVENTS, Reading, read_block

import colibri_jax
from colibri_jax.reference.routing import select_many
from colibri_jax.routing_spec import (
    FULL_VOTE,
    POLICIES,
    Denominator,
    Policy,
    RouterSpec,
    RoutingOptions,
    Score,
    Selection,
    Vote,
    most_voting_rows,
)

REQUIRED_COARSE_SHARE = 0.30
CASES_PER_BLOCK = 25
BLOCKS_PER_FAMILY = 4
BLOCKS_AT_ONCE = 60
SHOWN_DIFFERENCES = 10

Case = tuple[npt.NDArray[np.float32], RouterSpec, RoutingOptions, npt.NDArray[np.int32], npt.NDArray[np.int64] | None]
Select = Callable[[Sequence[Case]], list[Selection]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Block:
    """Cases that share router, options, cache and row votes. `logits` is float32 [B, S, E]; `coarse`: they lie on a coarse grid."""

    number: int
    router: RouterSpec
    options: RoutingOptions
    logits: npt.NDArray[np.float32]
    resident: npt.NDArray[np.int32]
    row_votes: npt.NDArray[np.int64] | None
    coarse: bool

    @property
    def cases(self) -> list[Case]:
        """Arguments of `select_experts`, one tuple a case."""
        return [(logits, self.router, self.options, self.resident, self.row_votes) for logits in self.logits]


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


@dataclasses.dataclass(frozen=True)
class Program:
    """Ranges of S, E and K in which the reference pads to the same shapes, so that it compiles once. Other ranges would only be slower."""

    score: Score
    n_group: int
    positions: tuple[int, int]
    experts: tuple[int, int]
    top_k: tuple[int, int] = (1, 16)


PROGRAMS = (
    Program("sigmoid", 1, (1, 1), (1, 16)),
    Program("softmax", 1, (1, 1), (1, 16)),
    Program("sigmoid", 8, (2, 8), (64, 64)),
    Program("sigmoid", 1, (2, 8), (1, 16)),
    Program("softmax", 1, (2, 8), (1, 16)),
    Program("softmax", 4, (2, 8), (12, 12)),
    Program("sigmoid", 1, (9, 32), (17, 64)),
    Program("softmax", 1, (9, 32), (17, 64)),
    Program("sigmoid", 8, (1, 1), (256, 256)),
    Program("sigmoid", 1, (1, 1), (65, 256)),
    Program("softmax", 1, (1, 1), (65, 256)),
    Program("softmax", 16, (2, 8), (64, 64)),
    Program("sigmoid", 1, (2, 8), (65, 256)),
    Program("softmax", 1, (2, 8), (65, 256)),
    Program("sigmoid", 3, (9, 32), (33, 33)),
    Program("sigmoid", 1, (33, 64), (17, 64)),
    Program("softmax", 1, (33, 64), (65, 256)),
    Program("softmax", 4, (33, 64), (128, 128)),
    Program("sigmoid", 1, (2, 8), (17, 64), (17, 64)),
    Program("softmax", 1, (1, 1), (65, 256), (65, 256)),
    Program("softmax", 2, (1, 1), (6, 6)),
    Program("sigmoid", 1, (9, 32), (1, 16)),
    Program("softmax", 1, (9, 32), (1, 16)),
    Program("sigmoid", 2, (2, 8), (4, 4)),
)


def _family(seed: int, number: int) -> dict[str, Any]:
    """What all blocks of a family share. Programs take turns."""
    rng = np.random.default_rng([seed, number, 0])
    program = PROGRAMS[number % len(PROGRAMS)]
    n_experts = _one_of(rng, program.experts[1], *(_log_uniform(rng, *program.experts) for _ in range(8)))
    topk_group = 1
    if program.n_group > 1:
        topk_group = int(rng.integers(1, program.n_group + 1)) if rng.random() < 0.3 else max(1, program.n_group // 2)
    most = min(program.top_k[1], topk_group * n_experts // program.n_group)
    policy: Policy = _one_of(rng, *2 * ["aggregate"], *POLICIES)
    # Two picks leave the other policies little to differ in.
    least = min(program.top_k[0] if policy == "aggregate" or rng.random() < 0.2 else max(program.top_k[0], 3), most)
    top_k = _log_uniform(rng, least, max(least, min(most, _one_of(rng, 2, 8, most)) if program.top_k[0] == 1 else most))
    off = [0] * {"aggregate": 2, "coverage": 12}.get(policy, 6)
    return {
        "positions": _one_of(rng, program.positions[1], *(_log_uniform(rng, *program.positions) for _ in range(8))),
        "n_experts": n_experts,
        "score": program.score,
        "top_k": top_k,
        "n_group": program.n_group,
        "topk_group": topk_group,
        "norm_topk_prob": bool(rng.random() < 0.5),
        "has_bias": bool(rng.random() < 0.5),
        "expert_topk": _one_of(rng, *off, 1, int(rng.integers(1, top_k + 2))),
        "denominator": cast(Denominator, _one_of(rng, "survivors", "frozen")),
        "vote": cast(Vote, _one_of(rng, "weights", "weights", "all_scores")),
        "policy": policy,
        "floor": _one_of(rng, *(6 if policy == "coverage" else 3) * [1], 2, int(rng.integers(1, top_k + 2))),
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
    family = _family(seed, number // BLOCKS_PER_FAMILY)
    rng = np.random.default_rng([seed, number, 1])
    positions, n_experts, top_k = family["positions"], family["n_experts"], family["top_k"]
    policy = family["policy"]
    coarse = bool(rng.random() < 0.6)
    shape = (cases, positions, n_experts)
    logits = (_coarse_logits if coarse else _fine_logits)(rng, shape).astype(np.float32)
    aimed = policy == "coverage" and rng.random() < 0.7
    if aimed:  # one step with its experts renamed: the share that is met exactly in one case is so in all, bias and groups aside
        logits = np.stack([logits[0][:, rng.permutation(n_experts)] for _ in range(cases)])
    bias = None
    if family["has_bias"]:
        # On a coarse grid the bias is coarse too, or no two choices would tie.
        bias = (rng.integers(-2, 3, n_experts) / 8 if coarse else rng.normal(size=n_experts) / 10).astype(np.float32)
    # `per_position` cuts every position to the budget, the others cut the union.
    picks = top_k if policy == "per_position" else min(n_experts, positions * top_k)
    # A whole number of K-ths is where equal scores meet the share exactly, or miss it by the rounding of the product.
    shares = [0.0, 1.0, 0.25, 0.5, 0.5, 0.75, float(rng.uniform(0.01, 0.99)), *4 * [rng.integers(top_k) / top_k]]
    shares += [0.0] * {"aggregate": 0, "coverage": 20}.get(policy, 10)
    router = RouterSpec(
        score=family["score"],
        top_k=top_k,
        bias=bias,
        n_group=family["n_group"],
        topk_group=family["topk_group"],
        norm_topk_prob=family["norm_topk_prob"],
        routed_scaling_factor=_one_of(rng, 1.0, 1.0, 2.5, float(rng.uniform(0.1, 20)), 1023.0, 2.0**-33),
    )
    budget = _one_of(rng, 0, n_experts, *(16 * [0] if policy == "coverage" else []), *(_log_uniform(rng, 1, picks) for _ in range(8)))
    options = RoutingOptions(
        expert_topk=family["expert_topk"],
        expert_topp=_one_of(rng, *shares),
        budget=0 if policy == "cache_route" else budget,
        policy=policy,
        denominator=family["denominator"],
        vote=family["vote"],
        floor=family["floor"],
        coverage=_one_of(rng, 1.0, 0.5, float(rng.uniform(0.01, 0.99))),
        route_top=_one_of(rng, 0, 1, 2, int(rng.integers(top_k + 2))),
        route_within=_one_of(rng, 12, top_k + 1, top_k + int(rng.integers(1, 5)), int(rng.integers(n_experts + 2))),
        allow_irreproducible=True,
    )
    row_votes = _row_votes(rng, positions) if positions <= most_voting_rows(router, options, n_experts) else None
    if aimed:
        options = dataclasses.replace(options, coverage=_exact_share(rng, router, options, logits[:1], row_votes))
    resident = rng.permutation(n_experts)[: int(rng.integers(n_experts + 1))].astype(np.int32)
    return Block(number=number, router=router, options=options, logits=logits, resident=resident, row_votes=row_votes, coarse=coarse)


def _row_votes(rng: np.random.Generator, positions: int) -> npt.NDArray[np.int64] | None:
    kind = int(rng.integers(8))
    if kind == 0:
        return np.full(positions, FULL_VOTE)
    if kind == 1:  # as drafts survive, position by position
        return np.rint(FULL_VOTE * rng.uniform(0.2, 1.0) ** np.arange(positions)).astype(np.int64)
    if kind == 2:
        return rng.integers(0, FULL_VOTE + 1, positions)
    if kind == 3:  # rows without a vote, and ties between the others
        return np.array([0, 1, FULL_VOTE])[rng.integers(0, 3, positions)]
    return None


def _exact_share(
    rng: np.random.Generator,
    router: RouterSpec,
    options: RoutingOptions,
    logits: npt.NDArray[np.float32],
    row_votes: npt.NDArray[np.int64] | None,
) -> float:
    """A share of coverage that some number of members of the one case given holds exactly, if a float64 says so; below 1."""
    reading = read_block(router, options, logits, None, row_votes)
    assert reading.running_votes is not None
    held = reading.running_votes[0]
    below = held[(held > 0) & (held < held[-1])]
    if not below.size:
        return 0.5
    target = float(rng.choice(below[len(below) // 2 :]))  # not what the floor holds anyway
    share = target / float(held[-1])
    near = (share, math.nextafter(share, 0.0), math.nextafter(share, 1.0))
    return next((candidate for candidate in near if candidate * float(held[-1]) == target and candidate < 1.0), 0.5)


def make_blocks(cases: int, seed: int) -> Iterator[Block]:
    """Blocks of one run, `cases` cases in all."""
    for number in range(-(-cases // CASES_PER_BLOCK)):
        yield make_block(seed, number, min(CASES_PER_BLOCK, cases - number * CASES_PER_BLOCK))


# ---- the comparison -------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Tally:
    """Sums over the blocks compared so far."""

    cases: int = 0
    coarse_cases: int = 0
    positions: int = 0
    by_policy: Counter[str] = dataclasses.field(default_factory=Counter)
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
            reading = read_block(block.router, block.options, block.logits, block.resident, block.row_votes)
            self.seconds["third reading"] += time.perf_counter() - started
            for case in range(len(block.logits)):
                self._compare_case(block, case, reading, *next(in_order))
            self.cases += len(block.logits)
            self.coarse_cases += len(block.logits) * block.coarse
            self.positions += len(block.logits) * block.logits.shape[1]
            self.by_policy[block.options.policy] += len(block.logits)
            for event, found in reading.events.items():
                self.events[event] += int(found.sum())

    def _compare_case(self, block: Block, case: int, reading: Reading, first: Selection, second: Selection) -> None:
        fields = first.differences(second)
        self.unequal_fields.update(fields)
        self.differing_cases += bool(fields)
        if fields and len(self.first_differences) < SHOWN_DIFFERENCES:
            self.first_differences.append(Difference(block=block.number, case=case, fields=fields))
        stated = (first.union_size, first.dropped_slots, first.emptied_positions, first.kept.tolist())
        read = (reading.union_size[case], reading.dropped_slots[case], reading.emptied_positions[case])
        self.misread_cases += stated != (*read, np.flatnonzero(reading.kept[case]).tolist())

    def required(self, event: str) -> int:
        """In how many of this run's cases an event must be."""
        return math.ceil(EVENTS[event] * self.cases)

    def failures(self) -> list[str]:
        """What this run must show and does not; empty when it passed."""
        found = [f"{e}: {self.events[e]} cases, {self.required(e)} required" for e in EVENTS if self.events[e] < self.required(e)]
        if self.coarse_cases < REQUIRED_COARSE_SHARE * self.cases:
            found.append(f"coarse grids: {self.coarse_cases} of {self.cases} cases, {REQUIRED_COARSE_SHARE:.0%} required")
        if self.differing_cases:
            found.append(f"{self.differing_cases} cases differ between the two sides")
        if self.misread_cases:
            found.append(f"{self.misread_cases} cases contradict the third reading")
        return found


def compare(cases: int, seed: int, sides: dict[str, Select], console: Console, seconds: float | None = None) -> Tally:
    """Run `cases` cases, or fewer if that takes longer than `seconds`, through both sides under a progress bar."""
    tally, begin = Tally(), time.perf_counter()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("select_experts", total=cases)
        blocks = make_blocks(cases, seed)
        while some := list(itertools.islice(blocks, BLOCKS_AT_ONCE)):
            tally.add_blocks(some, sides)
            progress.update(task, completed=tally.cases)
            if seconds is not None and time.perf_counter() - begin >= seconds:
                break
    return tally


def by_native(cases: Sequence[Case]) -> list[Selection]:
    """The native side."""
    return [colibri_jax.native.select_experts(*case) for case in cases]


def by_reference(cases: Sequence[Case]) -> list[Selection]:
    """The reference side: in batches, and the first case alone too, which must not matter."""
    selections = select_many(cases)
    unequal = selections[0].differences(colibri_jax.reference.select_experts(*cases[0]))
    if unequal:
        raise AssertionError(f"the reference answers otherwise in a batch: {', '.join(unequal)}")
    return selections


def _print(tally: Tally, console: Console) -> None:
    table = Table("event", "cases", "required", title=f"{tally.cases:,} cases, {tally.positions:,} positions")
    for event in EVENTS:
        table.add_row(event, f"{tally.events[event]:,}", f"{tally.required(event):,}")
    table.add_row("coarse grid", f"{tally.coarse_cases:,}", f"{math.ceil(REQUIRED_COARSE_SHARE * tally.cases):,}")
    console.print(table)
    console.print(", ".join(f"{policy} {cases:,} cases" for policy, cases in tally.by_policy.most_common()))
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
@click.option("--seconds", type=click.FloatRange(min=0), help="Stop after this time, at the end of a portion of cases.")
@click.option("--platform", help="Where the reference runs, as JAX names it: cpu, gpu, tpu. Default: JAX's own choice.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of tables.")
def main(cases: int, seed: int, seconds: float | None, platform: str | None, as_json: bool) -> None:
    """Compare reference and native select_experts on random cases; exit 1 unless equal and every event was frequent."""
    try:
        device = jax.devices(platform)[0]
    except RuntimeError as error:
        raise click.ClickException(f"no such device: {error}") from error
    with jax.default_device(device):
        tally = compare(cases, seed, {"reference": by_reference, "native": by_native}, Console(stderr=True), seconds)
    failures = tally.failures()
    if as_json:
        # Not asdict: it would make a Counter of a Counter's pairs.
        found = vars(tally) | {"first_differences": [vars(difference) for difference in tally.first_differences]}
        click.echo(json.dumps(found | {"seed": seed, "device": device.device_kind, "failures": failures}))
    else:
        click.echo(f"reference on {device.device_kind}")
        _print(tally, Console())
    for failure in failures:
        click.echo(f"FAILED: {failure}", err=True)
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
