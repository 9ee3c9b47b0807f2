"""The expert store: the bytes it hands out, which experts it keeps, what it counts, and how it fails."""

from __future__ import annotations

import copy
import gc
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from expert_files import HEADER, ExpertFiles, extents, write_experts
from readers import NAMES, READERS, USABLE

from colibri_jax import _native
from colibri_jax.errors import EngineError, MissingFileError, OptionError, ReadError, ShapeError, TruncatedFileError, UnknownFormatError
from colibri_jax.quant import WeightFormat

BLOCK = 4096
FORMATS = [
    WeightFormat(4, 64, "rows16"),
    WeightFormat(4, 32, "rows16"),
    WeightFormat(8, 0, "rows16"),
    WeightFormat(4, 64),
    WeightFormat(4, 48),
    WeightFormat(4),
    WeightFormat(8),
    WeightFormat(4, 64, "rows16", "f16"),
]
ROWS16 = FORMATS[0]
ROW_MAJOR = FORMATS[3]


def open_store(files: ExpertFiles, **options: Any) -> Any:
    return _native.ExpertStore(files.files, files.index, **options)


def check_lease(files: ExpertFiles, layer: int, expert: int, lease: Any) -> None:
    """The checker that every test relies on: this expert and no other, every byte."""
    assert lease.expert == expert
    gate, up, down = files.oracle[layer][expert]
    assert lease.gate() == gate
    assert lease.up() == up
    assert lease.down() == down


def walk(store: Any, files: ExpertFiles, layer: int, experts: list[int]) -> None:
    """Hands out, checks and releases each expert."""
    w = store.walk(layer, experts)
    for expert in experts:
        lease = w.next()
        check_lease(files, layer, expert, lease)
        lease.release()
    w.close()


def residents(store: Any, files: ExpertFiles, layer: int) -> set[int]:
    return {expert for expert in range(files.experts) if store.resident(layer, expert)}


@pytest.fixture(params=READERS)
def reader(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> ExpertFiles:
    return write_experts(tmp_path_factory.mktemp("small"), ROWS16)


@pytest.fixture(scope="module")
def small_row_major(tmp_path_factory: pytest.TempPathFactory) -> ExpertFiles:
    return write_experts(tmp_path_factory.mktemp("small_row_major"), ROW_MAJOR, arrangement="two_files")


# ---- bytes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arrangement", ["adjacent", "scattered", "two_files"])
@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.tag)
def test_bytes_do_not_depend_on_cache_reader_or_threads(fmt: WeightFormat, arrangement: Any, tmp_path: Path) -> None:
    files = write_experts(tmp_path, fmt, arrangement=arrangement, seed=len(fmt.tag))
    rng = np.random.default_rng(1)
    walks = [(int(rng.integers(2)), rng.permutation(6)[: rng.integers(1, 7)].tolist()) for _ in range(8)]
    for cache_experts in (1, 2, 5, 6):
        for direct in (True, False):
            for io_threads, reader in ((1, USABLE[-1]), (2, "pread"), (3, USABLE[-1])):
                store = open_store(files, cache_experts=cache_experts, direct=direct, io_threads=io_threads, reader=reader)
                for layer, experts in walks:
                    walk(store, files, layer, experts)


@pytest.mark.parametrize("fmt", [ROWS16, ROW_MAJOR], ids=lambda fmt: fmt.tag)
def test_completions_in_reverse_order_change_nothing(fmt: WeightFormat, reader: str, tmp_path: Path) -> None:
    files = write_experts(tmp_path, fmt, arrangement="scattered")
    store = open_store(files, cache_experts=2, io_threads=3, reverse_completions=True, reader=reader)
    for experts in ([0, 1, 2, 3, 4, 5], [5, 0, 3], [1, 2, 4, 0]):
        walk(store, files, 1, experts)


def test_the_checker_sees_a_slot_that_kept_its_old_bytes(reader: str, small: ExpertFiles) -> None:
    offset = small.index[0][3]["up"]["weights"][1]
    store = open_store(small, cache_experts=1, io_threads=1, faults=[{"kind": "stale", "offset": offset}], reader=reader)
    with pytest.raises(AssertionError):
        walk(store, small, 0, [0, 1, 2, 4, 5, 3])


def test_the_checker_sees_bytes_of_a_neighbouring_block(reader: str, small: ExpertFiles) -> None:
    offset = small.index[0][3]["up"]["weights"][1]
    store = open_store(small, faults=[{"kind": "shifted", "offset": offset, "bytes": BLOCK}], reader=reader)
    with pytest.raises(AssertionError):
        walk(store, small, 0, [3])


@pytest.mark.parametrize("part", ["gate", "up", "down"])
def test_the_checker_sees_an_index_that_is_off_by_one_expert(small: ExpertFiles, part: str) -> None:
    doctored = copy.deepcopy(small.index)
    doctored[1][2][part] = doctored[1][3][part]
    store = _native.ExpertStore(small.files, doctored)
    walk(store, small, 1, [3])
    with pytest.raises(AssertionError):
        walk(store, small, 1, [2])


# ---- cache -------------------------------------------------------------------------------------------------------


def test_an_expert_is_read_once_per_walk_and_a_resident_one_not_at_all(small: ExpertFiles) -> None:
    store = open_store(small, cache_experts=6)
    walk(store, small, 0, [0, 1, 2])
    walk(store, small, 0, [2, 1, 0])
    walk(store, small, 0, [3, 0])
    counters = store.counters()
    assert (counters["hits"], counters["misses"]) == (4, 4)
    assert counters["useful_bytes"] == 4 * small.expert_bytes()


@pytest.mark.parametrize("cache_experts", [1, 2, 3])
def test_a_leased_expert_is_never_evicted(small: ExpertFiles, cache_experts: int) -> None:
    store = open_store(small, cache_experts=cache_experts, io_threads=2)
    w = store.walk(0, [4, 5])
    held = [w.next(), w.next()]
    w.close()
    for _ in range(3):
        walk(store, small, 0, [0, 1, 2, 3])
        walk(store, small, 1, [0, 1, 2, 3])
        for expert, lease in zip((4, 5), held, strict=True):
            check_lease(small, 0, expert, lease)
    assert residents(store, small, 0) >= {4, 5} if cache_experts > 1 else {4}
    for lease in held:
        lease.release()
    walk(store, small, 0, [0, 1, 2, 3])
    assert residents(store, small, 0).isdisjoint({4, 5})


def test_a_resident_is_not_evicted_by_the_walk_that_asks_for_it(small: ExpertFiles) -> None:
    store = open_store(small, cache_experts=1)
    walk(store, small, 0, [5])
    walk(store, small, 0, [0, 1, 2, 3, 4, 5])
    assert store.counters()["hits"] == 1
    assert residents(store, small, 0) == {5}


def test_a_walk_that_ends_early_caches_only_what_was_handed_out(reader: str, small: ExpertFiles) -> None:
    for taken in range(4):
        store = open_store(small, cache_experts=6, io_threads=2, reader=reader)
        w = store.walk(0, [3, 1, 4, 0, 5])
        for _ in range(taken):
            w.next().release()
        w.close()
        assert residents(store, small, 0) == set([3, 1, 4, 0, 5][:taken])
        walk(store, small, 0, [0, 1, 2, 3, 4, 5])


def test_pinned_experts_stay_from_their_first_use_in_slots_of_their_own(small: ExpertFiles) -> None:
    store = open_store(small, cache_experts=1, pinned=[[4, 1], []])
    assert residents(store, small, 0) == set()
    for _ in range(2):
        walk(store, small, 0, [0, 1, 2, 3, 4, 5])
    assert residents(store, small, 0) == {1, 4, 5}
    assert store.by_rank(0) == [5]
    counters = store.counters()
    assert (counters["hits"], counters["pinned_hits"], counters["misses"]) == (3, 2, 9)
    everything = open_store(small, cache_experts=3, pinned=[list(range(6)), []])
    walk(everything, small, 0, [0, 1, 2, 3, 4, 5])
    assert (residents(everything, small, 0), everything.by_rank(0)) == (set(range(6)), [])


def test_pins_that_make_no_sense_are_refused(small: ExpertFiles) -> None:
    for pinned in ([[0]], [[0], [6]], [[-1], []], [[2, 2], []]):
        with pytest.raises(OptionError, match="pinned"):
            open_store(small, pinned=pinned)


def test_a_store_dropped_with_walk_and_lease_ends_in_order(reader: str, small: ExpertFiles) -> None:
    store = open_store(small, cache_experts=1, reader=reader)
    w = store.walk(0, [0, 1, 2])
    lease = w.next()
    del store, w
    gc.collect()
    check_lease(small, 0, 0, lease)


# ---- counters and memory -----------------------------------------------------------------------------------------


def block_range(parts: list[tuple[int, int, int, str]]) -> int:
    """Bytes of the blocks that hold these parts of one file."""
    first, last = min(p[1] for p in parts), max(p[1] + p[2] for p in parts)
    return -(-last // BLOCK) * BLOCK - first // BLOCK * BLOCK


def test_adjacent_parts_come_with_one_read_of_the_smallest_range(small: ExpertFiles) -> None:
    store = open_store(small, cache_experts=6)
    walk(store, small, 0, [0, 2, 5])
    assert store.counters()["bytes_read"] == sum(block_range(extents(small.index[0][expert])) for expert in (0, 2, 5))
    assert store.expert_file_bytes == small.expert_bytes()


def test_parts_far_apart_are_read_apart(tmp_path: Path) -> None:
    files = write_experts(tmp_path, ROW_MAJOR, arrangement="scattered", hidden=256, width=256)
    store = open_store(files)
    walk(store, files, 1, [4])
    assert store.counters()["bytes_read"] == sum(block_range([part]) for part in extents(files.index[1][4]))


@pytest.mark.parametrize(("gap", "together"), [(5300, True), (5700, False)])
def test_parts_with_gaps_come_together_up_to_a_quarter_more(gap: int, together: bool, tmp_path: Path) -> None:
    files = write_experts(tmp_path, ROW_MAJOR, arrangement="scattered", gap=gap, hidden=256, width=256)
    parts = extents(files.index[0][3])
    enclosing = parts[-1][1] + parts[-1][2] - parts[0][1]
    assert (enclosing <= 1.25 * files.expert_bytes()) == together
    store = open_store(files)
    walk(store, files, 0, [3])
    assert (store.counters()["bytes_read"] == block_range(parts)) == together


def test_the_end_of_the_file_may_lie_inside_a_block(reader: str, small: ExpertFiles) -> None:
    store = open_store(small, reader=reader)
    walk(store, small, 1, [5])
    size, parts = os.path.getsize(small.files[0]), extents(small.index[1][5])
    assert size % BLOCK
    assert store.counters()["bytes_read"] == size - parts[0][1] // BLOCK * BLOCK


@pytest.mark.parametrize("fmt", [ROWS16, ROW_MAJOR], ids=lambda fmt: fmt.tag)
def test_memory_is_slots_and_staging_buffers(fmt: WeightFormat, tmp_path: Path) -> None:
    files = write_experts(tmp_path, fmt)
    store = open_store(files, cache_experts=4, io_threads=3)
    slots = 2 * 4 + 3 + 2
    ranges = [block_range(extents(expert)) for layer in files.index for expert in layer]
    staging = 0 if fmt.layout == "rows16" else 3 * max(ranges)
    if fmt.layout == "rows16":
        assert store.slot_bytes == max(ranges)
    assert _native.ExpertStore.memory_bytes(files.files, files.index, cache_experts=4, io_threads=3) == slots * store.slot_bytes + staging
    pinned = [[0, 5], [2]]
    with_pins = _native.ExpertStore.memory_bytes(files.files, files.index, cache_experts=4, io_threads=3, pinned=pinned)
    assert with_pins == (slots + 3) * store.slot_bytes + staging
    assert _native.ExpertStore.memory_bytes(files.files, files.index, cache_experts=5, io_threads=3, pinned=pinned) == (
        (2 + 4 + 1 + 5 + 3 + 2) * store.slot_bytes + staging  # of six experts the first layer pins two
    )
    assert _native.ExpertStore.memory_bytes(files.files, files.index, cache_experts=99, io_threads=1) == (
        (2 * 6 + 3) * store.slot_bytes + staging // 3
    )


def resident_kib() -> int:
    return int(next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS")).split()[1])


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> ExpertFiles:
    """40 experts of 2.25 MiB with arbitrary bytes: rows16 is not interpreted by the store."""
    path = tmp_path_factory.mktemp("large") / "experts.bin"
    rng = np.random.default_rng(9)
    rows, cols, size = 1024, 1280, 1024 // 16 * 20 * 576
    index, oracle, offset = [], [], HEADER
    with path.open("wb") as out:
        out.write(rng.bytes(HEADER))
        for expert in range(40):
            described, blobs = {}, []
            for part in ("gate", "up", "down"):
                blobs.append(rng.bytes(size))
                out.write(blobs[-1])
                extent = (0, offset, size, f"layers.0.experts.{expert}.{part}")
                described[part] = {
                    "rows": rows,
                    "cols": cols,
                    "bits": 4,
                    "group_size": 64,
                    "rows16": True,
                    "scale_bytes": 4,
                    "weights": extent,
                    "scales": None,
                }
                offset += size
            index.append(described)
            oracle.append((blobs[0], blobs[1], blobs[2]))
        out.flush()
        os.fsync(out.fileno())
    return ExpertFiles([str(path)], [index], [oracle])


def test_bytes_read_agree_with_the_kernel(reader: str, large: ExpertFiles) -> None:
    store = open_store(large, cache_experts=2, io_threads=2, reader=reader)
    if not store.reader.startswith("direct"):
        pytest.skip(f"the file system of {large.files[0]} refuses O_DIRECT: {store.reader}")

    def account() -> dict[str, int]:
        lines = Path("/proc/self/io").read_text().splitlines()
        return {key: int(value) for key, value in (line.split(": ") for line in lines)}

    before, counted = account(), store.counters()["bytes_read"]
    rounds = -(-256 * 2**20 // (40 * large.expert_bytes()))
    for _ in range(rounds):
        w = store.walk(0, list(range(40)))
        for _ in range(40):
            w.next().release()
        w.close()
    after, counters = account(), store.counters()
    counted = counters["bytes_read"] - counted
    assert counted >= 256 * 2**20
    if reader == "pread":  # the kernel counts what passes read(), and io_uring does not
        assert abs(after["rchar"] - before["rchar"] - counted) <= 0.01 * counted
    assert abs(after["read_bytes"] - before["read_bytes"] - counted) <= 0.01 * counted
    assert counters["useful_bytes"] == counters["misses"] * large.expert_bytes()
    assert counters["useful_bytes"] <= counted <= 1.01 * counters["useful_bytes"]
    assert counters["wait_seconds"] == store.wait_seconds() > 0


@pytest.mark.parametrize("direct", [True, False])
def test_resident_memory_stays_within_the_stated_bytes(large: ExpertFiles, direct: bool, reader: str) -> None:
    bound = _native.ExpertStore.memory_bytes(large.files, large.index, cache_experts=3, io_threads=2)
    assert bound == 7 * (4096 * -(-(large.expert_bytes() + HEADER % BLOCK) // BLOCK))
    before = resident_kib()
    store = open_store(large, cache_experts=3, io_threads=2, direct=direct, reader=reader)
    for _ in range(2):
        w = store.walk(0, list(range(40)))
        for _ in range(40):
            w.next().release()
        w.close()
        assert resident_kib() - before <= bound // 1024 + 2048


def test_the_reader_says_what_it_is_and_why_it_is_buffered(reader: str, small: ExpertFiles) -> None:
    name = NAMES[reader]
    assert open_store(small, direct=False, reader=reader).reader == f"buffered (direct reads switched off), {name}"
    refused = open_store(small, faults=[{"kind": "invalid", "offset": 0}], reader=reader)
    assert refused.reader == f"buffered ({small.files[0]}: O_DIRECT: Invalid argument), {name}"
    walk(refused, small, 0, [0, 5])


# ---- faults ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("fmt", [ROWS16, ROW_MAJOR], ids=lambda fmt: fmt.tag)
@pytest.mark.parametrize(
    "fault",
    [
        {"kind": "interrupted", "times": 5},
        {"kind": "short", "bytes": BLOCK, "times": 1},
        {"kind": "short", "bytes": BLOCK + 100, "times": 3},
        {"kind": "short", "bytes": 100, "times": 4},
        {"kind": "short", "bytes": 1, "times": 1},
        {"kind": "again", "times": 7},
    ],
    ids=str,
)
def test_short_and_interrupted_reads_go_on(fault: dict[str, Any], fmt: WeightFormat, direct: bool, tmp_path: Path) -> None:
    files = write_experts(tmp_path, fmt, hidden=256, width=128)
    offset = files.index[0][2]["up"]["weights"][1]
    for reader in USABLE:
        store = open_store(files, direct=direct, faults=[{**fault, "offset": offset}], reader=reader)
        walk(store, files, 0, [1, 2, 3])
        walk(store, files, 0, [2])


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("reverse", [True, False])
@pytest.mark.parametrize("arrangement", ["adjacent", "scattered", "two_files"])
@pytest.mark.parametrize(("kind", "got"), [("io_error", "Input/output error after 0 bytes"), ("end_of_file", "end of file after 0 bytes")])
def test_a_failed_read_is_named_and_the_store_goes_on(
    *, kind: str, got: str, arrangement: Any, reverse: bool, direct: bool, tmp_path: Path
) -> None:
    files = write_experts(tmp_path, ROW_MAJOR, arrangement=arrangement, hidden=256, width=256)
    file, offset, nbytes, tensor = files.index[0][2]["down"]["weights"]
    # In the middle of the part: its first block may serve another expert too.
    faults = [{"kind": kind, "file": file, "offset": offset + nbytes // 2, "times": 3}]
    stores = [
        open_store(files, cache_experts=2, direct=direct, reverse_completions=reverse, faults=faults, reader=reader) for reader in USABLE
    ]
    for store in 3 * stores:  # more often than there are slots to lose
        w = store.walk(0, [1, 2, 3])
        check_lease(files, 0, 1, w.next())
        with pytest.raises(ReadError) as failure:
            w.next()
        assert failure.value.where.startswith(files.files[file] + ", layers.0.experts.2.")
        if arrangement == "scattered":
            assert f", {tensor}, offset {offset // BLOCK * BLOCK}" in failure.value.where
        assert failure.value.got == got
        assert not store.resident(0, 2)
        check_lease(files, 0, 3, w.next())
        w.close()
    for store in stores:
        walk(store, files, 0, [0, 1, 2, 3, 4, 5])


def test_faults_come_only_where_the_store_was_opened_with_hooks(small: ExpertFiles) -> None:
    fault = {"kind": "io_error", "offset": small.index[0][2]["up"]["weights"][1]}
    with pytest.raises(EngineError, match="without hooks"):
        open_store(small).add_fault(fault)
    store = open_store(small, faults=[])
    walk(store, small, 0, [2])
    store.add_fault(fault)
    w = store.walk(0, [3, 2])
    for _ in range(2):
        w.next().release()  # 2 is a hit: nothing is read
    w.close()
    store.add_fault({**fault, "offset": small.index[0][4]["up"]["weights"][1]})
    with pytest.raises(ReadError):
        walk(store, small, 0, [4])
    store.clear_faults()
    walk(store, small, 0, [0, 1, 5, 4, 3, 2])


def test_a_delayed_read_is_overtaken_and_delivers_its_bytes(reader: str, small: ExpertFiles) -> None:
    """In some of the tries: what the system does with threads is its own business."""
    store = open_store(small, cache_experts=1, io_threads=2, faults=[], reader=reader)
    overtaken = 0
    for _ in range(200):
        offset = small.index[0][1]["up"]["weights"][1]
        store.add_fault({"kind": "delay", "offset": offset, "bytes": 10**9})  # 2 ms are the most
        before = store.counters()["useful_bytes"]
        w = store.walk(0, [1, 3])
        lease = w.next()
        overtaken += store.counters()["useful_bytes"] - before == 2 * small.expert_bytes()
        check_lease(small, 0, 1, lease)
        lease.release()
        w.next().release()
        w.close()
        if overtaken:
            break
        walk(store, small, 0, [0])
    assert overtaken


def test_failed_reads_lose_no_slot(reader: str, small: ExpertFiles) -> None:
    offset = small.index[0][2]["gate"]["weights"][1]
    store = open_store(small, cache_experts=1, io_threads=1, faults=[{"kind": "io_error", "offset": offset, "times": 50}], reader=reader)
    for _ in range(50):
        w = store.walk(0, [2])
        with pytest.raises(ReadError):
            w.next()
        w.close()
    walk(store, small, 0, [0, 1, 2, 3, 4, 5])


def test_a_walk_in_which_every_read_fails_reaches_its_end(reader: str, small: ExpertFiles) -> None:
    offsets = [expert["gate"]["weights"][1] for expert in small.index[0]]
    faults = [{"kind": "io_error", "offset": offset, "times": 100} for offset in offsets]
    store = open_store(small, io_threads=1, faults=faults, reader=reader)
    w = store.walk(0, list(range(6)))
    for expert in range(6):
        with pytest.raises(ReadError, match=rf"layers\.0\.experts\.{expert}\."):
            w.next()
    w.close()
    assert (store.counters()["misses"], store.counters()["useful_bytes"]) == (0, 0)
    walk(store, small, 1, [5, 4])


def test_reads_without_progress_end_in_an_error(reader: str, small: ExpertFiles) -> None:
    offset = small.index[0][2]["up"]["weights"][1]
    store = open_store(small, faults=[{"kind": "short", "bytes": 100, "offset": offset, "times": 1000}], reader=reader)
    if not store.reader.startswith("direct"):
        pytest.skip(f"only direct reads must repeat a block: {store.reader}")
    w = store.walk(0, [2])
    with pytest.raises(ReadError, match="again and again after 100 bytes"):
        w.next()
    store = open_store(small, faults=[{"kind": "again", "offset": offset, "times": 1000}], reader=reader)
    w = store.walk(0, [2])
    with pytest.raises(ReadError, match="temporarily unavailable after 0 bytes"):
        w.next()
    assert store.counters()["retries"] == 7


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("cut", [1, 100, BLOCK, 6000])
def test_a_file_cut_while_open_is_an_error(cut: int, direct: bool, reader: str, tmp_path: Path) -> None:
    files = write_experts(tmp_path, ROWS16)
    store = open_store(files, direct=direct, reader=reader)
    size = os.path.getsize(files.files[0])
    os.truncate(files.files[0], size - cut)
    w = store.walk(1, [0, 5])
    w.next().release()
    with pytest.raises(ReadError, match="end of file") as failure:
        w.next()
    expected = "down" if cut <= 3456 else "up"
    assert f"layers.1.experts.5.{expected}, offset {size - cut}" in failure.value.where
    w.close()
    walk(store, files, 1, [4, 3])


def test_a_file_shorter_than_its_index_is_refused_at_once(tmp_path: Path) -> None:
    files = write_experts(tmp_path, ROWS16)
    os.truncate(files.files[0], os.path.getsize(files.files[0]) - 1)
    with pytest.raises(TruncatedFileError, match=r"layers\.1\.experts\.5\.down"):
        open_store(files)


def test_options_and_descriptions_are_checked(small: ExpertFiles) -> None:
    with pytest.raises(MissingFileError, match="absent"):
        _native.ExpertStore([small.files[0], "/absent/file"], small.index)
    for options in ({"cache_experts": 0}, {"io_threads": 0}, {"reader": "telepathy"}, {"cache_policy": "fifo"}):
        with pytest.raises(OptionError):
            open_store(small, **options)
    faulty: list[tuple[str, Any, type[Exception], str]] = [
        ("rows", 56, ShapeError, "expected: 4608; got: 3456"),
        ("rows", 41, ShapeError, "one shape and format"),  # the same bytes, rows being padded to 48
        ("group_size", 32, ShapeError, "bytes of an expert tensor"),
        ("bits", 8, UnknownFormatError, "group size"),
        ("weights", (2, HEADER, 3456, "w"), OptionError, "file index"),
        ("scales", (0, HEADER, 4, "w.qs"), ShapeError, "expected: 0; got: 4"),
    ]
    for key, value, error, message in faulty:
        doctored = copy.deepcopy(small.index)
        doctored[1][4]["up"][key] = value
        with pytest.raises(error, match=message):
            _native.ExpertStore(small.files, doctored)
    for index in ([], [[]]):
        with pytest.raises(OptionError):
            _native.ExpertStore(small.files, index)


def test_misuse_is_an_error_and_not_a_hang(small: ExpertFiles) -> None:
    store = open_store(small, cache_experts=1, io_threads=1)
    for layer, experts in ((2, [0]), (-1, []), (0, [6]), (0, [-1]), (0, [1, 2, 1])):
        with pytest.raises(EngineError):
            store.walk(layer, experts)
    w = store.walk(0, [0])
    with pytest.raises(EngineError, match="two walks"):
        store.walk(1, [0])
    w.next().release()
    with pytest.raises(EngineError, match="over"):
        w.next()
    w.close()

    walk(store, small, 1, [0])
    w = store.walk(0, [0, 1, 2, 3, 4])
    held = [w.next() for _ in range(4)]  # one slot of the layer, three spare ones
    with pytest.raises(EngineError, match="every slot is leased"):
        w.next()
    held.pop().release()
    check_lease(small, 0, 4, w.next())
    for expert, lease in enumerate(held):
        check_lease(small, 0, expert, lease)


def test_the_store_works_in_a_process_without_jax(small: ExpertFiles) -> None:
    program = f"""
import sys
from colibri_jax import _native
store = _native.ExpertStore({small.files!r}, {small.index!r})
w = store.walk(0, [1])
assert w.next().gate()[:8] == {small.oracle[0][1][0][:8]!r}
assert "jax" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
