"""Damaged descriptions given to native code: exceptions, never a crash. Python checks what they mean; sizes are checked here too."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import pytest
from expert_files import PARTS, ExpertFiles, write_experts
from fuzz.mutations import damaged
from fuzz.target import Directory
from hypothesis import given, settings
from hypothesis import strategies as st

from colibri_jax import _native
from colibri_jax.container.reader import Container
from colibri_jax.engine.options import EngineOptions, EnginePlan, plan_engine
from colibri_jax.errors import ColibriError, OptionError, ShapeError
from colibri_jax.quant import WeightFormat
from colibri_jax.routing_spec import RoutingOptions

HUGE = 10**400
REFUSALS = (ColibriError, TypeError, ValueError, RuntimeError, OverflowError, KeyError, IndexError, MemoryError)


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> ExpertFiles:
    return write_experts(tmp_path_factory.mktemp("described"), WeightFormat(4, 64), layers=1, experts=2)


def test_sizes_whose_byte_counts_wrap_around_are_refused(experts: ExpertFiles) -> None:
    """2^62 more rows of 72 columns are 36 · 2^62 more bytes, which is nothing in 64 bits; so are their scales."""
    index = copy.deepcopy(experts.index)
    for expert in index[0]:
        expert["gate"]["rows"] += 2**62
    with pytest.raises(ShapeError, match="larger than any file"):
        _native.ExpertStore(experts.files, index)
    with pytest.raises(ShapeError, match="larger than any file"):
        _native.repack_rows16(b"", b"", rows=2**62, cols=4, bits=8, group_size=0)


numbers = st.one_of(
    st.sampled_from(
        [0, 1, -1, 15, 16, 2**31 - 1, 2**31, 2**32, 2**53, 2**62, 2**63 - 1, 2**63, 2**64 - 1, 2**64, -(2**31), -(2**63), HUGE]
    ),
    st.integers(-(2**40), 2**40),
    st.integers(-100, 5000),
)
values = st.one_of(numbers, st.sampled_from([None, True, 1.5, "64", b"x", [], {}, float("nan")]))
paths = st.tuples(
    st.integers(0, 1),
    st.sampled_from(PARTS),
    st.one_of(
        st.sampled_from(["rows", "cols", "bits", "group_size", "rows16", "scale_bytes", "weights", "scales"]),
        st.tuples(st.sampled_from(["weights", "scales"]), st.integers(0, 3)),
    ),
)


@settings(max_examples=400)
@given(damage=st.lists(st.tuples(paths, values), min_size=1, max_size=4), both=st.booleans())
def test_damaged_descriptions_are_refused_by_an_exception(damage: list[Any], both: bool, experts: ExpertFiles) -> None:
    """Or mean something: then every byte handed out lies in the files."""
    index = copy.deepcopy(experts.index)
    for (expert, part, where), value in damage:
        for described in index[0] if both else [index[0][expert]]:
            matrix = described[part]
            if isinstance(where, str):
                matrix[where] = value
            else:
                extent = matrix[where[0]]
                matrix[where[0]] = (*extent[: where[1]], value, *extent[where[1] + 1 :]) if isinstance(extent, tuple) else value
    arguments = {"cache_experts": 1, "io_threads": 1}
    try:
        _native.ExpertStore.memory_bytes(experts.files, index, **arguments)
        store = _native.ExpertStore(experts.files, index, **arguments)
        walk = store.walk(0, [0, 1])
        for expert in (0, 1):
            lease = walk.next()
            assert lease.expert == expert
            assert lease.gate() is not None
            lease.release()
        walk.close()
    except REFUSALS:
        pass


# ---- the engine ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=[0, 4], ids=["MLA with an indexer", "GQA"])
def plan(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> EnginePlan:
    directory = Directory(tmp_path_factory.mktemp("container"))
    directory.write(damaged(bytes([request.param])))
    options = EngineOptions(cache_experts=1, threads=1, context_positions=8)
    return plan_engine(Container.open(directory.path, 64), options, RoutingOptions())


def paths_in(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where numbers, strings and lists of a description stand."""
    if not isinstance(value, dict):
        yield path
    if isinstance(value, dict | list | tuple):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from paths_in(inner, (*path, key))


def replaced(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    """A copy with another value at a path."""
    if not path:
        return new
    items = dict(value) if isinstance(value, dict) else list(value)
    items[path[0]] = replaced(items[path[0]], path[1:], new)
    return tuple(items) if isinstance(value, tuple) else items


@settings(max_examples=300)
@given(data=st.data())
def test_damaged_models_and_options_are_refused_by_an_exception(data: st.DataObject, plan: EnginePlan) -> None:
    described = {"model": plan.model, "options": plan.options}
    _native.Engine(*described.values())
    # A huge context or many threads are granted where the machine has them.
    places = [path for path in paths_in(described) if path[1:] not in ((), ("context",), ("threads",), ("io_threads",))]
    for path in data.draw(st.lists(st.sampled_from(places), min_size=1, max_size=2, unique=True)):
        if path in set(paths_in(described)):
            described = replaced(described, path, data.draw(values))
    with contextlib.suppress(*REFUSALS):
        _native.Engine(*described.values())


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("sparse",), []),
        (("layers",), 2**40),
        (("width",), -1),
        (("vocab",), 2**31),
        (("experts",), 3),
        (("attention", "heads"), 0),
        (("attention", "rope", "dim"), 3),
        (("attention", "rope", "dim"), 2**62),
        (("router", "top_k"), 9),
    ],
    ids=str,
)
def test_sizes_outside_their_domain_are_refused_by_name(path: tuple[str, ...], value: Any, plan: EnginePlan) -> None:
    with pytest.raises(OptionError):
        _native.Engine(replaced(plan.model, path, value), plan.options)
