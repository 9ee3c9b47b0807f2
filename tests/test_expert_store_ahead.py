"""Experts that are read before a walk asks for them, and reads that wait for their turn: nothing of it may show but in counters."""

from __future__ import annotations

from typing import Any

import pytest
from expert_files import ExpertFiles, write_experts
from hypothesis import Phase
from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule
from readers import READERS
from test_expert_store_machine import EXPERTS, LAYERS, StoreMachine, experts_strategy, run_machine

from colibri_jax import _native
from colibri_jax.errors import EngineError, OptionError
from colibri_jax.quant import WeightFormat


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> ExpertFiles:
    return write_experts(tmp_path_factory.mktemp("ahead"), WeightFormat(4, 64, "rows16"), hidden=96, width=72)


@pytest.fixture(scope="module")
def arrangements(files: ExpertFiles, tmp_path_factory: pytest.TempPathFactory) -> dict[str, ExpertFiles]:
    """As used in place, and repacked from row-major bytes."""
    where = tmp_path_factory.mktemp("scattered")
    scattered = write_experts(where, WeightFormat(4, 64), arrangement="scattered", gap=13_000, hidden=96, width=72)
    return {"adjacent": files, "scattered": scattered}


class AnnouncingMachine(StoreMachine):
    """Announcements between all other calls. Bytes, caches and hand-outs follow the same model as without them."""

    prefetch_experts = 3

    def disturb(self) -> None:
        self.announced: tuple[int, list[int]] | None = None
        self.foreseen = self.foreseeable = self.most_useful = self.most_read_ahead = 0
        self.slots += self.prefetch_experts

    @rule(layer=st.integers(0, LAYERS - 1), experts=experts_strategy)
    def announce(self, layer: int, experts: list[int]) -> None:
        self.store.announce(layer, experts)
        self.announced = layer, experts
        self.most_read_ahead += len(set(experts) - self.cache.resident(layer))

    def foresee(self, layer: int, experts: list[int]) -> None:
        if self.announced is not None and self.announced[0] == layer:
            named = set(self.announced[1]) & set(experts)
            self.foreseeable += len(experts)
            self.foreseen += len(named)
            self.most_useful += len(named - self.cache.resident(layer))
        self.announced = None

    # Which reads had begun before a walk is a matter of timing, and so is which of them a fault hits: only what mends itself.
    def may_happen(self, fault: dict[str, Any]) -> bool:
        return fault["kind"] in ("delay", "interrupted")

    def take_one(self, keep: bool) -> None:
        super().take_one(keep and not self.held)  # with few leases no slot is ever missing

    def settle(self) -> None:
        self.to_come = []
        self.disk.faults.clear()

    @invariant()
    def counters_are_the_models(self) -> None:
        counters = self.store.counters()
        for name in ("hits", "pinned_hits", "misses"):
            assert counters[name] == getattr(self.cache, name), name
        assert (counters["foreseen"], counters["foreseeable"]) == (self.foreseen, self.foreseeable)
        one = self.store.expert_file_bytes
        assert counters["prefetch_useful_bytes"] in range(0, self.most_useful * one + 1, one)
        assert counters["prefetch_wasted_bytes"] in range(0, self.most_read_ahead * one + 1, one)
        assert counters["useful_bytes"] >= counters["misses"] * one
        assert counters["useful_bytes"] + counters["prefetch_wasted_bytes"] <= counters["bytes_read"] or counters["retries"]

    @invariant()
    def slots_are_accounted_for(self) -> None:
        free = self.slots - self.cache.slots_used()
        assert max(0, free - self.prefetch_experts if self.walk is None else 0) <= self.store.free_slots <= free


def test_the_store_follows_its_model_whatever_is_announced(arrangements: dict[str, ExpertFiles]) -> None:
    run_machine(AnnouncingMachine, arrangements, max_examples=150)


class StaleReadsAhead(AnnouncingMachine):
    """A read for an announcement claims success and leaves the slot's old bytes."""

    def disturb(self) -> None:
        super().disturb()
        for layer in self.files.index:
            part = layer[3]["up"]["weights"]
            self.store.add_fault({"kind": "stale", "file": part[0], "offset": part[1] + part[2] // 2, "bytes": 4096, "times": 99})


class ForeseenForAnyLayer(AnnouncingMachine):
    """A model in which an announcement counts for whatever layer is walked next."""

    def foresee(self, layer: int, experts: list[int]) -> None:
        if self.announced is not None:
            self.announced = layer, self.announced[1]
        super().foresee(layer, experts)


@pytest.mark.parametrize("machine", [StaleReadsAhead, ForeseenForAnyLayer])
def test_the_machine_sees_wrong_bytes_and_wrong_counts(machine: type[AnnouncingMachine], arrangements: dict[str, ExpertFiles]) -> None:
    with pytest.raises(AssertionError):
        run_machine(machine, arrangements, phases=[Phase.generate], report_multiple_bugs=False)


# ---- one by one ---------------------------------------------------------------------------------------------------------


def open_store(files: ExpertFiles, reader: str, **options: Any) -> Any:
    return _native.ExpertStore(files.files, files.index, io_threads=2, reader=reader, faults=[], **options)


def hand_out(store: Any, files: ExpertFiles, layer: int, experts: list[int]) -> None:
    walk = store.walk(layer, experts)
    for expert in experts:
        lease = walk.next()
        assert (lease.gate(), lease.up(), lease.down()) == files.oracle[layer][expert]
        lease.release()
    walk.close()


@pytest.mark.parametrize("reader", READERS)
def test_an_announced_expert_is_read_once_and_its_walk_takes_it(reader: str, files: ExpertFiles) -> None:
    store = open_store(files, reader, prefetch_experts=2)
    store.announce(1, [4, 2, 0])  # two have slots; both reads have begun when the call returns
    hand_out(store, files, 1, [2, 5, 4])
    counters, one = store.counters(), store.expert_file_bytes
    assert (counters["foreseen"], counters["foreseeable"]) == (2, 3)
    assert (counters["prefetch_useful_bytes"], counters["prefetch_wasted_bytes"]) == (2 * one, 0)
    assert (counters["misses"], counters["useful_bytes"]) == (3, 3 * one)


@pytest.mark.parametrize("reader", READERS)
def test_what_no_walk_asks_for_is_wasted_and_stays_nowhere(reader: str, files: ExpertFiles) -> None:
    store = open_store(files, reader, prefetch_experts=2)
    free = store.free_slots
    store.announce(0, [1, 3])
    hand_out(store, files, 0, [0])
    store.announce(0, [2])
    hand_out(store, files, 1, [2])  # another layer
    while store.counters()["prefetch_wasted_bytes"] < 3 * store.expert_file_bytes:
        pass  # reads that nobody waits for
    assert not any(store.resident(0, expert) for expert in (1, 2, 3))
    assert store.free_slots == free - 2  # the two that were handed out
    assert store.counters()["useful_bytes"] == 2 * store.expert_file_bytes


@pytest.mark.parametrize("reader", READERS)
def test_a_failed_read_ahead_is_made_again_by_the_walk(reader: str, files: ExpertFiles) -> None:
    part = files.index[0][3]["up"]["weights"]
    fault = {"kind": "io_error", "file": part[0], "offset": part[1] + part[2] // 2}
    store = open_store(files, reader, prefetch_experts=2)
    store.add_fault({**fault, "times": 1})
    free = store.free_slots
    store.announce(0, [3])
    while store.free_slots < free:
        pass  # a failed read gives its slot back, and nobody waits for it
    hand_out(store, files, 0, [3])
    assert (store.counters()["prefetch_useful_bytes"], store.counters()["prefetch_wasted_bytes"]) == (0, 0)
    assert store.resident(0, 3)


@pytest.mark.parametrize("reader", READERS)
def test_without_pipe_no_read_begins_before_its_turn(reader: str, files: ExpertFiles) -> None:
    store = open_store(files, reader, pipe=False)
    free = store.free_slots
    walk = store.walk(0, [5, 1])
    assert store.free_slots == free
    walk.next().release()
    assert (store.free_slots, store.counters()["useful_bytes"]) == (free - 1, store.expert_file_bytes)
    walk.close()
    assert store.counters()["useful_bytes"] == store.expert_file_bytes
    piped = open_store(files, reader)
    walk = piped.walk(0, [5, 1])
    assert piped.free_slots == free - 2
    walk.close()


def test_announcements_outside_the_store_are_refused(files: ExpertFiles) -> None:
    store = open_store(files, "pread", prefetch_experts=1)
    for layer, experts in ((LAYERS, []), (-1, []), (0, [EXPERTS]), (0, [0, -1])):
        with pytest.raises(EngineError, match="what it does not have"):
            store.announce(layer, experts)
    with pytest.raises(OptionError, match="prefetch_experts"):
        open_store(files, "pread", prefetch_experts=-1)


def test_slots_for_announced_experts_are_part_of_the_memory(files: ExpertFiles) -> None:
    plain, ahead = (open_store(files, "pread", prefetch_experts=n) for n in (0, 3))
    assert ahead.free_slots - plain.free_slots == 3
