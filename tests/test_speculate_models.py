"""Exact speculation on real models: native with any options and drafters, the reference with its MTP block."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from choosing import Random
from doctored_models import RowsTogether
from engine_models import EVEN, ODD, converted, random_tokens
from speculation_checks import Forced, Plain, decode_plainly, differences, inconsistencies
from speculation_runs import DRAFTERS, Outcome, by_depth, make_speculation, outcome_of

import colibri_jax
from colibri_jax.cli.options import SHIPPED_MODEL
from colibri_jax.config import ModelConfig
from colibri_jax.generate.drafters import Draft, MTPDrafter
from colibri_jax.generate.loop import GenerateOptions, generate
from colibri_jax.generate.sampling import SamplingOptions
from colibri_jax.generate.speculate import SpeculationOptions, Speculator
from colibri_jax.routing_spec import SCOPES, RoutingOptions

Rng = np.random.Generator


@pytest.fixture(scope="module", params=["ODD", "EVEN"])
def container(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    config = {"ODD": ODD, "EVEN": EVEN}[request.param]
    return converted(tmp_path_factory.mktemp(request.param), config), config


def outcome(
    container: tuple[Path, dict[str, Any]], seed: int, doctored: Callable[[Any], Any] = lambda lm: lm, **fixed: Any
) -> tuple[list[str], Outcome]:
    """One run with drafts against one without, each with an engine set-up of its own; every depth and drafter in turn."""
    path, config = container[0], ModelConfig.from_hf(container[1])
    kinds = DRAFTERS if config.n_mtp_layers else DRAFTERS[:-1]
    run = make_speculation(
        Random(np.random.default_rng(seed)), config, 1 + seed % 8, pausing=seed % 3 == 0, drafter=kinds[seed // 8 % len(kinds)]
    )
    run = dataclasses.replace(run, **fixed)
    found = outcome_of(path, config, run, doctored)
    return [f"seed {seed}, {run.drafter}: {fault}" for fault in found.faults], found


def test_tokens_and_logits_are_those_without_drafts(container: tuple[Path, dict[str, Any]]) -> None:
    total: Counter[str] = Counter()
    for seed in range(8 * len(DRAFTERS)):
        faults, found = outcome(container, seed)
        assert faults == []
        stats = found.stats
        total.update(tokens=stats.emitted_tokens, accepted=sum(stats.accepted), rejected=sum(stats.rejected))
        total.update(deepest=int(by_depth(stats, "accepted")[-1]), layer_steps=found.layer_steps, acted=found.acted)
    # The runs are told apart from runs in which nothing happens.
    assert total["tokens"] > 1200
    assert min(total["accepted"], total["rejected"]) > 100
    assert total["deepest"] > 0
    assert total["acted"] > 0.3 * total["layer_steps"]


def test_rows_routed_with_their_neighbours_are_seen(container: tuple[Path, dict[str, Any]]) -> None:
    fixed: dict[str, Any] = {"routing": RoutingOptions(budget=2), "scopes": SCOPES}
    seeds = range(3, 60, 5)
    assert [outcome(container, seed, **fixed)[0] for seed in seeds] == [[]] * len(seeds)
    seen = [seed for seed in seeds if outcome(container, seed, RowsTogether, **fixed)[0]]
    assert len(seen) > len(seeds) / 3


def test_union_without_a_budget_is_exact_and_with_one_is_counted(container: tuple[Path, dict[str, Any]]) -> None:
    path, config = container
    prompt, options = random_tokens(config, 6), GenerateOptions(max_new_tokens=30)
    speculation = SpeculationOptions(depth=4, speculation="union", pausing=False)
    for budget in (0, 2):
        # Decoding is not cut here: what differs is the verification's own doing.
        common: dict[str, Any] = {"routing": RoutingOptions(budget=budget), "budget_scopes": ("verify",), "context_positions": 64}
        plain = decode_plainly(colibri_jax.load(path, cache_experts=2, **common), prompt, options)
        lm = colibri_jax.load(path, cache_experts=2, **common)
        found, stats = differences(plain, lm, Forced(plain.answer, 0, config["vocab_size"]), prompt, options, speculation)
        assert (found == []) == (budget == 0)
        assert stats.lossy
        assert inconsistencies(stats) == []
        assert (lm.stats.scopes["verify"].dropped_experts > 0) == (budget > 0)


class Counts:
    """Guesses that tokens count on: hardly ever right."""

    name = "counts"

    def taken(self, tokens: Sequence[int]) -> None:
        pass

    def draft(self, token: int, n: int) -> Draft:
        return Draft(tuple((token + 1 + i) % ODD["vocab_size"] for i in range(n)))


def test_union_repeats_with_pausing(container: tuple[Path, dict[str, Any]]) -> None:
    """It judges by counts, so that neither the clock nor the cache has a say."""
    path, config = container
    made = []
    for cache in (1, 8):
        lm = colibri_jax.load(path, cache_experts=cache, routing=RoutingOptions(budget=2), context_positions=128)
        speculator = Speculator(lm, Counts(), SpeculationOptions(depth=6, speculation="union"), clock=lambda: 1 / 0)
        answer = generate(lm, random_tokens(config, 6), GenerateOptions(max_new_tokens=100), make=speculator.tokens)
        made.append((answer, speculator.stats.pauses, speculator.stats.verification_steps))
    assert made[0] == made[1]
    assert "experts' worth per token with drafts" in made[0][1][0].reason


# ---- MTP ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("acceptance", ["equal", "resample"])
def test_the_reference_drafts_with_its_mtp_block(acceptance: Literal["equal", "resample"]) -> None:
    """On the model that ships, whose block has learnt something; the native engine decodes the same bits without drafts."""
    prompt = random_tokens({"vocab_size": ModelConfig.from_hf(_config()).vocab_size}, 4)
    common: dict[str, Any] = {"routing": RoutingOptions(budget=6), "context_positions": 64}
    sampling = SamplingOptions(temperature=0.0 if acceptance == "equal" else 1.0, seed=3)
    options = GenerateOptions(max_new_tokens=24, sampling=sampling)
    lm = colibri_jax.load(SHIPPED_MODEL, "reference", **common)
    assert isinstance(lm, colibri_jax.reference.ReferenceModel)
    drafter = MTPDrafter(lm, sampling, independent=acceptance == "resample")
    plain = decode_plainly(colibri_jax.load(SHIPPED_MODEL, cache_experts=8, **common), prompt, options)
    found, stats = differences(plain, lm, drafter, prompt, options, SpeculationOptions(acceptance=acceptance, pausing=False))
    assert (found == []) == (acceptance == "equal")
    assert inconsistencies(stats) == []
    assert stats.accepted[0] > 0
    assert lm.mtp_position <= lm.position
    if acceptance == "equal":
        assert_rows_are_teacher_forced(lm, colibri_jax.load(SHIPPED_MODEL, "reference", **common), prompt, plain)


def assert_rows_are_teacher_forced(lm: Any, again: Any, prompt: list[int], plain: Plain) -> None:
    """The block's cache holds the rows that the answer's own tokens give, and none of a guess: the next row says so."""
    rows, taken = lm.mtp_position, [*prompt, *plain.generation.tokens]
    hidden = []
    for position in range(rows + 1):
        again.forward(taken[position : position + 1], scope="prefill" if position < len(prompt) else "decode")
        hidden.append(again.hidden[0])
    again.mtp_forward(taken[1 : rows + 1], np.stack(hidden[:-1]))
    lm.rewind(lm.position - rows)
    next_row = (taken[rows + 1 : rows + 2], hidden[-1][np.newaxis])
    assert lm.mtp_forward(*next_row).tobytes() == again.mtp_forward(*next_row).tobytes()


def _config() -> dict[str, Any]:
    config: dict[str, Any] = json.loads((SHIPPED_MODEL / "config.json").read_text())
    return config
