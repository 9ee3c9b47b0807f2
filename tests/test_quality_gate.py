"""The gate of recommended settings: what is stated for the shipped model can be read, and whatever exceeds it fails."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import click
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "validation" / "quality"))
import gate

from colibri_jax.cli.options import SHIPPED_MODEL
from colibri_jax.container.reader import Container
from colibri_jax.quality.recommended import Costs, Recommended, Stated, fingerprint_of, read_recommended
from colibri_jax.quality.settings import Setting
from colibri_jax.routing_spec import RoutingOptions


@pytest.fixture(scope="module")
def shipped() -> Recommended:
    found = read_recommended(SHIPPED_MODEL, fingerprint_of(Container.open(SHIPPED_MODEL)))
    assert found is not None
    return found


def again(recommended: Recommended, **changed: float) -> list[gate.Found]:
    """A measurement that gives what is stated, but for some figures of the first setting."""
    found = []
    for i, setting in enumerate(recommended.settings):
        costs = setting.costs
        for name, value in changed.items() if i == 0 else ():
            costs = dataclasses.replace(costs, **{name: dataclasses.replace(getattr(costs, name), value=value)})
        shape = gate.shape_of(setting.steps)
        found.append(
            gate.Found(setting=Setting(shape, setting.routing, setting.routing), rows=setting.rows, costs=costs, tokens=setting.tokens)
        )
    return found


def test_the_shipped_model_has_one_setting_of_each_kind_within_the_limits(shipped: Recommended) -> None:
    assert {setting.steps for setting in shipped.settings} == {"decode", "verify"}
    for setting in shipped.settings:
        assert setting.tokens >= 20_000
        assert setting.costs.kld.value <= 0.025
        assert setting.costs.ppl_ratio.value <= 1.015
        assert setting.costs.task_points_lost.value <= setting.costs.task_points_lost.margin
        assert setting.costs.expert_bytes_share.value < 0.8


def test_what_is_stated_passes_and_what_exceeds_it_fails(shipped: Recommended) -> None:
    assert gate.failures(shipped, again(shipped)) == []
    costs = shipped.settings[0].costs
    for field in dataclasses.fields(Costs):
        stated: Stated = getattr(costs, field.name)
        assert gate.failures(shipped, again(shipped, **{field.name: stated.value + 0.9 * stated.margin})) == []
        lines = gate.failures(shipped, again(shipped, **{field.name: stated.value + 1.1 * stated.margin + 0.01}))
        assert any(field.name in line or "task loses" in line for line in lines)
    assert costs.exceeded({}) != []


def test_a_measurement_becomes_a_file(shipped: Recommended) -> None:
    assert gate.stated(SHIPPED_MODEL, again(shipped)) == shipped


def test_settings_are_named_by_their_options() -> None:
    steps, routing = gate.parse_setting("verify=policy=coverage,coverage=0.9,denominator=frozen")
    assert (steps, routing) == ("verify", RoutingOptions(policy="coverage", coverage=0.9, denominator="frozen"))
    assert gate.parse_setting("decode=budget=6:5:5:5:5")[1].budget == (6, 5, 5, 5, 5)
    assert gate.parse_setting("decode=budget=4")[1].budget == 4
    with pytest.raises(click.BadParameter):
        gate.parse_setting("decode=buget=4")
