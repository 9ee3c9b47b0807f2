"""What rows of a union verification weigh: alike, or by how often drafts of their depth have stayed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from engine_models import ODD, converted, random_tokens
from fakes import FakeModel, as_language_model
from speculation_checks import Forced, decode_plainly, inconsistencies

import colibri_jax
from colibri_jax.errors import OptionError
from colibri_jax.generate.loop import GenerateOptions, generate
from colibri_jax.generate.speculate import SpeculationOptions, Speculator, UnionVotes
from colibri_jax.routing_spec import FULL_VOTE, RoutingOptions

PROMPT = [1, 2, 3, 4, 5]
OPTIONS = GenerateOptions(max_new_tokens=60)


class Recording(FakeModel):
    """Keeps what every verification was told of its rows."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.votes: list[tuple[int, Any]] = []

    def forward(self, tokens: Any, **options: Any) -> Any:
        if options["scope"] == "verify":
            self.votes.append((len(tokens), options.get("row_votes")))
        return super().forward(tokens, **options)


def record(votes: UnionVotes, speculation: Any = "union") -> tuple[Recording, Speculator]:
    plain = decode_plainly(as_language_model(FakeModel()), PROMPT, OPTIONS)
    model = Recording()
    drafter = Forced(plain.answer, 0, 300, lambda p: p % 3 == 0)
    how = SpeculationOptions(depth=4, speculation=speculation, union_votes=votes, pausing=False)
    speculator = Speculator(as_language_model(model), drafter, how)
    assert generate(as_language_model(model), PROMPT, OPTIONS, make=speculator.tokens) == plain.generation
    return model, speculator


def test_a_row_weighs_what_the_drafts_of_its_depth_did() -> None:
    model, speculator = record("survival")
    assert inconsistencies(speculator.stats) == []
    assert model.votes[0] == (5, [FULL_VOTE] * 5)
    # Wrong at every third position: a draft's third guess has never stayed, nor has its fourth.
    drafted, accepted = [0] * 4, [0] * 4
    position = len(PROMPT)
    for rows, votes in model.votes:
        assert votes == [FULL_VOTE, *(round(FULL_VOTE * (a + 1) / (d + 1)) for a, d in zip(accepted, drafted, strict=True))][:rows]
        stayed = next(i for i in range(rows) if (position + 1 + i) % 3 == 0 or i == rows - 1)
        for depth in range(rows - 1):
            drafted[depth] += 1
            accepted[depth] += depth < stayed
        position += stayed + 1
    assert (tuple(drafted), tuple(accepted)) == (speculator.stats.drafted, speculator.stats.accepted)
    last = model.votes[-2][1]
    assert FULL_VOTE == last[0] > last[1] > last[3] > 0


def test_uniform_and_exact_weigh_nothing() -> None:
    for votes, speculation in (("uniform", "union"), ("survival", "exact")):
        model, _ = record(votes, speculation)  # type: ignore[arg-type]
        assert model.votes
        assert all(given is None for _, given in model.votes)
    with pytest.raises(OptionError, match="union_votes"):
        SpeculationOptions(union_votes="equal")  # type: ignore[arg-type]


def test_votes_change_what_a_shared_budget_keeps(tmp_path: Path) -> None:
    """On a real model; drafts that have always stayed weigh as much as the token before them."""
    path, prompt = converted(tmp_path, ODD), random_tokens(ODD, 6)
    common: dict[str, Any] = {"routing": RoutingOptions(budget=4), "budget_scopes": ("verify",), "context_positions": 128}
    plain = decode_plainly(colibri_jax.load(path, cache_experts=4, **common), prompt, OPTIONS)
    kept: dict[tuple[bool, str], list[bytes]] = {}
    for wrong in (False, True):
        for votes in ("uniform", "survival"):
            lm: Any = colibri_jax.load(path, cache_experts=4, **common)
            chosen: list[bytes] = []
            how = SpeculationOptions(depth=4, speculation="union", union_votes=votes, pausing=False)  # type: ignore[arg-type]
            drafter = Forced(plain.answer, 0, ODD["vocab_size"], lambda p, wrong=wrong: wrong and p % 2 == 0)
            speculator = Speculator(lm, drafter, how, on_logits=lambda _, row, chosen=chosen: chosen.append(row.tobytes()))
            generate(lm, prompt, OPTIONS, make=speculator.tokens)
            kept[wrong, votes] = chosen
            assert sum(speculator.stats.rejected) > 0
    assert kept[True, "uniform"] != kept[True, "survival"]
    assert kept[True, "uniform"][:2] == kept[True, "survival"][:2]
