"""All options together, every pair of values at least once: bits equal to the plain run with the same routing options."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from speculation_checks import Plain, decode_plainly, differences, inconsistencies

import colibri_jax
from colibri_jax.cli.options import SHIPPED_MODEL
from colibri_jax.generate.drafters import MTPDrafter
from colibri_jax.generate.loop import GenerateOptions
from colibri_jax.generate.sampling import SamplingOptions
from colibri_jax.generate.speculate import SpeculationOptions
from colibri_jax.routing_spec import RoutingOptions

VALUES: dict[str, Sequence[Any]] = {
    "budget": (0, 6, 3, (8, 2, 0, 6, 4)),
    "expert_topp": (0.0, 0.7),
    "expert_topk": (0, 5),
    "pilot": (False, True),
    "pipe": (True, False),
    "depth": (0, 1, 3, 8),  # of MTP drafts; 0 decodes without
    "cache_experts": (1, 8, 64),
}
Row = dict[str, Any]


def pairs_of(row: Row) -> set[tuple[tuple[str, Any], tuple[str, Any]]]:
    return set(itertools.combinations(row.items(), 2))


def rows() -> Iterator[Row]:
    """Few rows that hold every pair of values: each is the best of some random ones, built around a pair that is missing."""
    names, rng = list(VALUES), np.random.default_rng(0)
    missing = {
        ((a, x), (b, y)) for a, b in itertools.combinations(names, 2) for x, y in itertools.product(VALUES[a], VALUES[b])
    }  # fmt: skip
    while missing:
        wanted = dict(min(missing, key=repr))
        tried = [{n: wanted.get(n, VALUES[n][rng.integers(len(VALUES[n]))]) for n in names} for _ in range(50)]
        row = max(tried, key=lambda row: len(pairs_of(row) & missing))
        missing -= pairs_of(row)
        yield row


ROWS = list(rows())
OPTIONS = GenerateOptions(max_new_tokens=24, sampling=SamplingOptions(temperature=0.8, seed=4))
PROMPT = [1, 2, *range(400, 420)]


def test_every_pair_is_there() -> None:
    expected = sum(len(VALUES[a]) * len(VALUES[b]) for a, b in itertools.combinations(VALUES, 2))
    assert len(set().union(*map(pairs_of, ROWS))) == expected
    assert len(ROWS) < 30


def routing(row: Row) -> RoutingOptions:
    return RoutingOptions(budget=row["budget"], expert_topp=row["expert_topp"], expert_topk=row["expert_topk"])


def load(row: Row) -> Any:
    setup = {name: row[name] for name in ("pilot", "pipe", "cache_experts")}
    return colibri_jax.load(SHIPPED_MODEL, routing=routing(row), context_positions=64, mtp=row["depth"] > 0, **setup)


def faults(row: Row, plain: Plain) -> list[str]:
    """What a run with the row's options changes, against one with its routing options alone."""
    lm = load(row)
    if not row["depth"]:
        again = decode_plainly(lm, PROMPT, OPTIONS)
        return [] if again == plain else ["another answer or other logits"]
    speculation = SpeculationOptions(depth=row["depth"], pausing=False)
    found, stats = differences(plain, lm, MTPDrafter(lm, OPTIONS.sampling), PROMPT, OPTIONS, speculation)
    assert stats.verification_steps > 0
    return found + inconsistencies(stats)


@pytest.fixture(scope="module")
def plain() -> dict[RoutingOptions, Plain]:
    """By routing options: all experts in memory, nothing ahead, no drafts."""
    made: dict[RoutingOptions, Plain] = {}
    for row in ROWS:
        if routing(row) not in made:
            alone = {**row, "pilot": False, "pipe": False, "cache_experts": 64, "depth": 0}
            made[routing(row)] = decode_plainly(load(alone), PROMPT, OPTIONS)
    return made


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_bits_are_those_of_the_routing_options_alone(row: Row, plain: dict[RoutingOptions, Plain]) -> None:
    assert faults(row, plain[routing(row)]) == []


def test_another_budget_is_seen(plain: dict[RoutingOptions, Plain]) -> None:
    assert all(faults({**row, "budget": 2}, plain[routing(row)]) for row in ROWS)
