"""Exchanging routing options between steps: what a model loaded with them gives, from the same cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from engine_models import ODD, converted, random_tokens

import colibri_jax
from colibri_jax.errors import OptionError
from colibri_jax.routing_spec import RoutingOptions, Scope

LAYERS = 3
SETTINGS: tuple[tuple[RoutingOptions, tuple[Scope, ...]], ...] = (
    (RoutingOptions(budget=2), ("decode",)),
    (RoutingOptions(budget=2), ("prefill",)),
    (RoutingOptions(budget=(1, 0, 2), policy="floor"), ("prefill", "decode")),
    (RoutingOptions(policy="coverage", coverage=0.4, vote="all_scores", denominator="frozen"), ("decode",)),
    (RoutingOptions(expert_topk=1), ("decode",)),
    (RoutingOptions(expert_topp=0.3), ()),
    (RoutingOptions(), ("decode",)),
)


@pytest.fixture(scope="module")
def container(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return converted(tmp_path_factory.mktemp("model"), ODD)


def run(lm: Any, tokens: list[int]) -> list[bytes]:
    lm.reset()
    return [lm.forward(tokens, scope="prefill").tobytes(), *(lm.forward([token], scope="decode").tobytes() for token in tokens[:3])]


@pytest.mark.parametrize("backend", ["native", "reference"])
def test_a_rerouted_model_is_one_loaded_with_these_options(backend: str, container: Path) -> None:
    tokens, arguments = random_tokens(ODD, 6), {"cache_experts": 2} if backend == "native" else {}
    lm: Any = colibri_jax.load(container, backend, **arguments)
    seen = set()
    for routing, scopes in SETTINGS:
        lm.reroute(routing, scopes)
        assert (lm.routing, lm.budget_scopes) == (routing, frozenset(scopes))
        loaded: Any = colibri_jax.load(container, backend, routing=routing, budget_scopes=scopes, **arguments)
        answers = run(loaded, tokens)
        assert run(lm, tokens) == answers
        seen.add(tuple(answers))
    assert len(seen) == len(SETTINGS)


@pytest.mark.parametrize("backend", ["native", "reference"])
def test_what_does_not_fit_changes_nothing(backend: str, container: Path) -> None:
    lm: Any = colibri_jax.load(container, backend, routing=RoutingOptions(budget=2))
    assert len(lm.config.moe_layers) == LAYERS
    before = run(lm, random_tokens(ODD, 4))
    with pytest.raises(OptionError, match="one budget per MoE layer"):
        lm.reroute(RoutingOptions(budget=(1,) * (LAYERS + 1)), ("decode",))
    with pytest.raises(OptionError, match="unknown scope"):
        lm.reroute(RoutingOptions(budget=1), ("draft",))
    assert (lm.routing, lm.budget_scopes) == (RoutingOptions(budget=2), frozenset({"decode"}))
    assert run(lm, random_tokens(ODD, 4)) == before
