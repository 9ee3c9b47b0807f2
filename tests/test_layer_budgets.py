"""A budget for each MoE layer, from the command line down to the selections and the statistics, in both implementations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
from click.testing import CliRunner
from engine_models import ODD, converted, random_tokens

import colibri_jax
from colibri_jax.cli.budgets import parse_budgets
from colibri_jax.cli.options import OptionValue, routing_from, routing_options, show_value
from colibri_jax.container.directory import read_config
from colibri_jax.engine.options import routing_dict
from colibri_jax.errors import OptionError
from colibri_jax.routing_spec import RoutingOptions

native = colibri_jax.native

# ODD has three MoE layers and, as layer 5, an MTP block, which takes the last one's.
BUDGETS = (3, 0, 6)
ROWS = 6


@pytest.fixture(scope="module")
def container(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return converted(tmp_path_factory.mktemp("model"), ODD)


def load(container: Path, backend: str, budgets: Any, **options: Any) -> Any:
    options |= {"cache_experts": 4} if backend == "native" else {}
    return colibri_jax.load(container, backend, routing=RoutingOptions(budget=budgets, policy="floor"), budget_scopes=["verify"], **options)


@pytest.mark.parametrize("backend", ["native", "reference"])
def test_every_layer_is_cut_by_its_own_budget_and_counted(backend: str, container: Path) -> None:
    lm, routers = load(container, backend, BUDGETS), load(container, "reference", 0)
    if backend == "native":
        lm.set_trace(True)
    tokens = random_tokens(ODD, ROWS)
    lm.forward(tokens, scope="verify")
    logits = lm.trace["router_logits"] if backend == "native" else lm.router_logits
    dropped = []
    for moe_layer, (layer, n) in enumerate(zip(lm.config.moe_layers, BUDGETS, strict=True)):
        found = lm.selections[moe_layer]
        options = RoutingOptions(budget=n, policy="floor")
        assert found.differences(native.select_experts(np.array(logits[moe_layer]), routers.router(layer), options)) == []
        assert found.dropped > 0 if n else found.dropped == 0
        dropped.append(found.dropped)
    stats = lm.stats.scopes["verify"]
    assert (stats.layer_steps, stats.budget_acted_layer_steps, stats.dropped_experts) == (3, 2, sum(dropped))
    assert stats.union_experts - stats.kept_experts == sum(dropped)
    lm.forward(tokens, scope="decode")
    assert lm.stats.scopes["decode"].budget_acted_layer_steps == 0


def test_one_layer_may_be_cut_alone(container: Path) -> None:
    tokens = random_tokens(ODD, ROWS)
    cut = []
    for layer in range(3):
        lm = load(container, "native", tuple(3 * (i == layer) for i in range(3)))
        lm.forward(tokens, scope="verify")
        cut.append([bool(selection.dropped) for selection in lm.selections])
    assert cut == [[i == layer for i in range(3)] for layer in range(3)]


def test_equal_budgets_in_a_list_are_one_budget(container: Path) -> None:
    tokens = random_tokens(ODD, ROWS)
    one, many = (load(container, "native", budgets).forward(tokens, scope="verify").tobytes() for budgets in (4, (4, 4, 4)))
    assert one == many


def test_the_engine_is_told_one_budget_per_layer_of_its_store(container: Path) -> None:
    config = load(container, "native", 0).config
    for mtp, expected in ((False, [3, 0, 6]), (True, [3, 0, 6, 6])):
        assert routing_dict(config, RoutingOptions(budget=BUDGETS), mtp=mtp)["budgets"] == expected
    assert routing_dict(config, RoutingOptions(budget=(3, 0, 10**12)), mtp=False)["budgets"] == [3, 0, config.moe.n_experts]


@pytest.mark.parametrize("backend", ["native", "reference"])
def test_a_list_of_another_length_is_refused(backend: str, container: Path) -> None:
    for budgets in ((3,), (3, 0, 6, 6)):
        with pytest.raises(OptionError, match="one budget per MoE layer"):
            load(container, backend, budgets)


# ---- command line ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "budget"),
    [("off", 0), ("4", 4), ("3,off,6", BUDGETS), (" 3 , 0 , 6 ", BUDGETS), ("OFF,1", (0, 1)), ("5,5", (5, 5))],
)
def test_a_budget_is_a_count_or_a_list_of_counts(text: str, budget: Any) -> None:
    assert parse_budgets(text) == budget
    if budget:
        assert parse_budgets(show_value("budget", budget)) == budget


@pytest.mark.parametrize("text", ["", "3,", ",3", "3,,6", "3;6", "-1,2", "3,1.5", "3,x"])
def test_what_is_no_budget_is_refused(text: str) -> None:
    with pytest.raises(click.BadParameter, match="neither a count of experts nor 'off'"):
        parse_budgets(text)


def test_flag_and_environment_carry_lists() -> None:
    seen: list[dict[str, Any]] = []

    @click.command()
    @routing_options
    def command(**value: Any) -> None:
        seen.append(value)

    for arguments, environment in ((["--budget", "3,off,6"], {}), ([], {"EXPERT_BUDGET": "3,off,6"})):
        result = CliRunner().invoke(command, arguments, env=environment, catch_exceptions=False)
        assert result.exit_code == 0, result.output
        routing, scopes = routing_from({name: OptionValue(value) for name, value in seen.pop().items()})
        assert (routing.budget, scopes) == (BUDGETS, {"decode"})


def test_generate_runs_with_a_list_and_says_so() -> None:
    from colibri_jax.cli import main
    from colibri_jax.cli.options import SHIPPED_MODEL

    layers = len(read_config(SHIPPED_MODEL)[0].moe_layers)
    budgets = ",".join(["4", "off"] + ["5"] * (layers - 2))
    arguments = ["generate", str(SHIPPED_MODEL), "--prompt", "a", "--max-new-tokens", "3", "--budget"]
    result = CliRunner().invoke(main, [*arguments, budgets], catch_exceptions=False)
    assert result.exit_code == 0
    assert f"EXPERT_BUDGET={budgets.replace('off', '0')} (dropped" in result.stderr
    assert CliRunner().invoke(main, [*arguments, "4,5,6,7,8,9,10,11,12,13,14,15,16"]).exit_code != 0
