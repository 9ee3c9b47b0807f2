"""Exact speculation on real models: native with any options and drafters, the reference with its MTP block."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pytest
from doctored_models import RowsTogether
from engine_models import EVEN, ODD, converted, random_tokens
from model_runs import REPRODUCIBLE
from speculation_checks import Forced, Plain, Repeats, decode_plainly, differences, inconsistencies

import colibri_jax
from colibri_jax import _native
from colibri_jax.cli.options import SHIPPED_MODEL
from colibri_jax.config import ModelConfig
from colibri_jax.errors import OptionError
from colibri_jax.generate.drafters import Draft, Drafter, LookupDrafter, MTPDrafter
from colibri_jax.generate.loop import GenerateOptions, generate
from colibri_jax.generate.sampling import SamplingOptions
from colibri_jax.generate.speculate import SpeculationOptions, Speculator
from colibri_jax.routing_spec import SCOPES, RoutingOptions, Scope

Rng = np.random.Generator


@pytest.fixture(scope="module", params=["ODD", "EVEN"])
def container(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    config = {"ODD": ODD, "EVEN": EVEN}[request.param]
    return converted(tmp_path_factory.mktemp(request.param), config), config


def routing_of(rng: Rng, experts: int, top_k: int) -> tuple[RoutingOptions, tuple[Scope, ...]]:
    policy = rng.choice(REPRODUCIBLE)
    routing = RoutingOptions(
        expert_topk=int(rng.choice([0, 0, 0, top_k - 1])),
        expert_topp=float(rng.choice([0.0, 0.0, 0.7])),
        budget=int(rng.choice([0, 1, 2, top_k - 1, top_k, experts])),
        policy=policy,
        denominator=rng.choice(["survivors", "frozen"]),
        vote=rng.choice(["weights", "all_scores"]),
        floor=int(rng.choice([1, 2])),
        coverage=float(rng.choice([0.5, 0.8])) if policy == "coverage" else 1.0,
    )
    scopes: list[tuple[Scope, ...]] = [("decode",), ("decode",), SCOPES, ("verify",)]
    return routing, scopes[rng.integers(len(scopes))]


def setup_of(rng: Rng, experts: int) -> dict[str, Any]:
    return {
        "cache_experts": int(rng.choice([1, 2, experts])),
        "threads": int(rng.choice([1, 2])),
        "isa": str(rng.choice(_native.kernels.available_isas())),
        "pipe": bool(rng.integers(2)),
        "pilot": bool(rng.integers(2)),
    }


KINDS = ("oracle", "some", "wrong", "repeats", "lookup", "some")


def drafter_of(rng: Rng, kind: str, plain: Plain, vocabulary: int) -> Drafter:
    if kind == "repeats":
        return Repeats()
    if kind == "lookup":
        return LookupDrafter(longest=2, shortest=1)
    wrong = {"oracle": 0.0, "wrong": 1.0, "some": 0.25}[kind]
    spoilt: npt.NDArray[np.bool_] = rng.random(256) < wrong
    return Forced(plain.answer, 0, vocabulary, lambda position: bool(spoilt[position]), fewer=bool(rng.integers(2)))


def trial(
    container: tuple[Path, dict[str, Any]], seed: int, doctored: Callable[[Any], Any] = lambda lm: lm, **fixed: Any
) -> tuple[list[str], Counter[str]]:
    """One run with drafts against one without, each with an engine set-up of its own."""
    (path, config), rng = container, np.random.default_rng(seed)
    routing, scopes = routing_of(rng, config["n_routed_experts"], config["num_experts_per_tok"])
    common: dict[str, Any] = {"routing": routing, "budget_scopes": scopes, "context_positions": 64, **fixed}
    sampling = SamplingOptions(temperature=float(rng.choice([0.0, 1.0])), top_p=float(rng.choice([1.0, 0.8])), seed=seed)
    options = GenerateOptions(max_new_tokens=int(rng.integers(20, 50)), prefill_chunk=int(rng.choice([3, 512])), sampling=sampling)
    prompt = random_tokens(config, int(rng.integers(1, 12)), seed)
    plain = decode_plainly(colibri_jax.load(path, **common, **setup_of(rng, config["n_routed_experts"])), prompt, options)
    lm = colibri_jax.load(path, **common, **setup_of(rng, config["n_routed_experts"]))
    speculation = SpeculationOptions(depth=1 + seed % 8, pausing=bool(rng.integers(3) == 0))
    drafter = drafter_of(rng, KINDS[seed // 8 % len(KINDS)], plain, config["vocab_size"])
    found, stats = differences(plain, doctored(lm), drafter, prompt, options, speculation)
    verified = lm.stats.scopes["verify"]
    counts = Counter(
        tokens=stats.emitted_tokens,
        accepted=sum(stats.accepted),
        rejected=sum(stats.rejected),
        deepest_accepted=stats.accepted[-1] if stats.depth == 8 else 0,
        layer_steps=verified.layer_steps,
        acted=verified.budget_acted_layer_steps,
    )
    return [f"seed {seed}: {fault}" for fault in found + inconsistencies(stats)], counts


def test_tokens_and_logits_are_those_without_drafts(container: tuple[Path, dict[str, Any]]) -> None:
    total: Counter[str] = Counter()
    for seed in range(48):  # every depth with every kind of drafter
        found, counts = trial(container, seed)
        assert found == []
        total.update(counts)
    # The runs are told apart from runs in which nothing happens.
    assert total["tokens"] > 1200
    assert min(total["accepted"], total["rejected"]) > 100
    assert total["deepest_accepted"] > 0
    assert total["acted"] > 0.3 * total["layer_steps"]


def test_rows_routed_with_their_neighbours_are_seen(container: tuple[Path, dict[str, Any]]) -> None:
    fixed: dict[str, Any] = {"routing": RoutingOptions(budget=2), "budget_scopes": SCOPES}
    seeds = range(3, 60, 5)
    assert [trial(container, seed, **fixed)[0] for seed in seeds] == [[]] * len(seeds)
    seen = [seed for seed in seeds if trial(container, seed, RowsTogether, **fixed)[0]]
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
    assert "experts per token with drafts" in made[0][1][0].reason


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
    lm.mtp_rewind(lm.mtp_position)
    with pytest.raises(OptionError, match="has not followed the cache"):
        MTPDrafter(lm, sampling)


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
