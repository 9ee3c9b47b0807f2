"""`load`: which directories and options go to which backend, and what both then agree on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import engine_models as models
import numpy as np
import pytest
from engine_models import EVEN, bits, random_tokens

import colibri_jax
from colibri_jax import RouterSpec, RoutingOptions, errors
from colibri_jax.container.inspect import describe
from colibri_jax.container.reader import is_container
from colibri_jax.engine.session import NativeModel
from colibri_jax.reference.model import ReferenceModel
from colibri_jax.stats import STATS_SCOPES

IDS = random_tokens(EVEN, 4)


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A container, and the checkpoint that it was made from."""
    directory = tmp_path_factory.mktemp("even")
    return models.converted(directory, EVEN), directory / "hf"


def test_importing_loads_neither_backend() -> None:
    script = "import sys, colibri_jax.load; print([m for m in ('jax', 'colibri_jax._native', 'colibri_jax.engine') if m in sys.modules])"
    root = str(Path(colibri_jax.__file__).parents[1])
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, env={"PYTHONPATH": root})
    assert done.stdout.strip() == "[]"


def test_both_backends_describe_the_same_model(directories: tuple[Path, Path]) -> None:
    routing, scopes = RoutingOptions(expert_topk=2, budget=3), ("prefill", "verify")
    options: dict[str, Any] = {"routing": routing, "budget_scopes": scopes, "context_positions": 33}
    ours = colibri_jax.load(directories[0], cache_experts=2, **options)
    theirs = colibri_jax.load(directories[0], backend="reference", **options)
    assert isinstance(ours, NativeModel)
    assert isinstance(theirs, ReferenceModel)
    assert repr(ours.config) == repr(theirs.config)
    for name in ("routing", "budget_scopes", "context_positions", "position", "selections"):
        assert getattr(ours, name) == getattr(theirs, name), name
    assert ours.budget_scopes == frozenset(scopes)
    assert ours.stats.scopes.keys() == theirs.stats.scopes.keys() == set(STATS_SCOPES)
    assert (ours.stats.backend, theirs.stats.backend) == ("native", "reference")
    assert ours.stats.precision == theirs.stats.precision == "w4a8"


def test_a_checkpoint_quantised_on_the_way_equals_its_container(directories: tuple[Path, Path]) -> None:
    """w4a8 of a checkpoint means what conversion would have made of it."""
    container, checkpoint = directories
    theirs = colibri_jax.load(checkpoint, backend="reference", precision="w4a8")
    ours = colibri_jax.load(container, cache_experts=2)
    assert bits(theirs.forward(IDS, scope="prefill")) == bits(ours.forward(IDS, scope="prefill"))


def test_a_checkpoint_is_computed_in_full_precision_by_default(directories: tuple[Path, Path]) -> None:
    container, checkpoint = directories
    full = colibri_jax.load(checkpoint, backend="reference")
    assert full.stats.precision == "full"
    logits = full.forward(IDS, scope="prefill")
    shipped = colibri_jax.load(container, cache_experts=2).forward(IDS, scope="prefill")
    error = np.abs(logits - shipped).max() / np.abs(logits).max()
    assert 1e-3 < error < 1.0  # int4 is not full precision, and no noise either


@pytest.mark.parametrize("option", ["cache_experts", "ram_bytes", "threads", "io", "reader", "cache_policy", "isa"])
def test_options_of_the_engine_are_refused_by_the_reference(option: str, directories: tuple[Path, Path]) -> None:
    value = {"io": "direct", "reader": "pread", "cache_policy": "lru", "isa": "scalar"}.get(option, 4)
    with pytest.raises(errors.OptionError, match=option):
        colibri_jax.load(directories[0], backend="reference", **{option: value})


@pytest.mark.parametrize("backend", ["native", "reference"])
def test_options_of_both_are_checked_by_both(backend: Any, directories: tuple[Path, Path]) -> None:
    for options, where in (
        ({"budget_scopes": ("decode", "train")}, "budget_scopes"),
        ({"context_positions": 0}, "context_positions"),
        ({"context_positions": 10**9}, "context_positions"),
        ({"routing": RoutingOptions(budget=(1, 2, 3))}, "budget"),
        ({"precision": "w8a8"}, "precision"),
        ({"group_size": 7}, "group_size"),
    ):
        with pytest.raises(errors.OptionError, match=where):
            colibri_jax.load(directories[0], backend=backend, **options)


def test_what_is_no_model_is_refused_by_name(directories: tuple[Path, Path], tmp_path: Path) -> None:
    container, checkpoint = directories
    with pytest.raises(errors.OptionError, match="backend"):
        colibri_jax.load(container, backend="abacus")  # type: ignore[arg-type]
    with pytest.raises(errors.OptionError, match="colibri-jax convert"):
        colibri_jax.load(checkpoint)
    with pytest.raises(errors.MissingFileError):
        colibri_jax.load(tmp_path / "absent")
    for backend in ("native", "reference"):
        (tmp_path / backend).mkdir()
        (tmp_path / backend / "conversion-state.json").write_text("{}")
        with pytest.raises(errors.IncompleteContainerError):
            colibri_jax.load(tmp_path / backend, backend=backend)  # type: ignore[arg-type]


def test_containers_and_checkpoints_are_told_apart(directories: tuple[Path, Path], tmp_path: Path) -> None:
    container, checkpoint = directories
    assert is_container(container)
    assert not is_container(checkpoint)
    assert not is_container(tmp_path)
    (tmp_path / "out-00000.safetensors.part").touch()
    assert is_container(tmp_path)


@pytest.mark.parametrize("budget", ["4", 4.0, True, None, (2, True)])
def test_a_budget_is_a_whole_number(budget: Any) -> None:
    with pytest.raises(errors.OptionError, match="whole number"):
        RoutingOptions(budget=budget)


def test_counts_of_any_integer_type_become_python_ints() -> None:
    options = RoutingOptions(budget=np.array([3, 4]), expert_topk=np.int64(2))  # type: ignore[arg-type]
    assert (options.budget, options.expert_topk) == ((3, 4), 2)
    assert all(type(n) is int for n in (*options.budget, options.expert_topk))  # type: ignore[misc]


@pytest.mark.parametrize("field", ["cache_experts", "ram_bytes", "threads", "context_positions"])
def test_sizes_of_the_engine_are_whole_numbers(field: str, directories: tuple[Path, Path]) -> None:
    with pytest.raises(errors.OptionError, match=field):
        colibri_jax.load(directories[0], **{field: 1.5e9})  # type: ignore[arg-type]


def test_statistics_cannot_be_changed_from_outside(directories: tuple[Path, Path]) -> None:
    model = colibri_jax.load(directories[0], cache_experts=2, budget_scopes="decode")  # type: ignore[arg-type]
    with pytest.raises(AttributeError):
        model.stats.scopes.clear()  # type: ignore[attr-defined]
    assert model.budget_scopes == {"decode"}


def test_a_checkpoint_is_not_described_as_a_container(directories: tuple[Path, Path]) -> None:
    with pytest.raises(errors.MissingFileError, match="colibri-jax convert"):
        describe(directories[1])


def test_router_and_options_take_their_first_fields_by_position() -> None:
    router, options = RouterSpec("softmax", 2), RoutingOptions(1, 0.5, 3)
    assert (router.score, router.top_k) == ("softmax", 2)
    assert (options.expert_topk, options.expert_topp, options.budget) == (1, 0.5, 3)
