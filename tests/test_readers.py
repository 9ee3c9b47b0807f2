"""The readers by themselves: blocks of a file, what is counted, which one is chosen, and a kernel that refuses io_uring."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from expert_files import write_experts
from readers import NAMES, READERS, REFUSAL
from threads import TASKS, readable, settled

from colibri_jax import _native
from colibri_jax.engine.options import EngineOptions
from colibri_jax.errors import MissingFileError, OptionError, ReadError
from colibri_jax.quant import WeightFormat

BLOCK = 4096
LENGTH = 5 * BLOCK


@pytest.fixture(scope="module")
def blocks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """64 runs of five blocks, on disk: the kernel counts what comes from there."""
    path = tmp_path_factory.mktemp("blocks") / "blocks.bin"
    with path.open("wb") as out:
        out.write(np.random.default_rng(5).bytes(64 * LENGTH))
        out.flush()
        os.fsync(out.fileno())
    return path


def offsets() -> list[int]:
    """Every run once, in disorder, and some again; runs overlap by blocks."""
    rng = np.random.default_rng(6)
    return [*(LENGTH * rng.permutation(64)).tolist(), *(BLOCK * rng.integers(0, 5 * 63, 40)).tolist()]


def checksum(path: Path, offset: int) -> int:
    words = np.frombuffer(path.read_bytes()[offset : offset + LENGTH], np.uint64)
    return int(((2 * np.arange(words.size, dtype=np.uint64) + 1) * words).sum(dtype=np.uint64))


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("depth", [1, 3, 16])
def test_blocks_are_the_files_and_counts_are_true(depth: int, direct: bool, reader: str, blocks: Path) -> None:
    wanted = offsets()
    begin = time.perf_counter()
    done = _native.read_blocks(str(blocks), wanted, LENGTH, direct=direct, reader=reader, depth=depth, checksums=True)
    assert done["checksums"] == [checksum(blocks, offset) for offset in wanted]
    assert (done["bytes"], done["retries"]) == (len(wanted) * LENGTH, 0)
    assert 0 < done["seconds"] < time.perf_counter() - begin
    assert done["reader"].endswith(f", {NAMES[reader]}")
    assert done["reader"].startswith("buffered (direct reads switched off)" if not direct else ("direct", "buffered ("))
    timed = _native.read_blocks(str(blocks), wanted, LENGTH, direct=direct, reader=reader, depth=depth)
    assert (timed["bytes"], timed["checksums"]) == (done["bytes"], [])


def test_the_checksum_sees_two_words_that_changed_places(blocks: Path, tmp_path: Path) -> None:
    words = np.frombuffer(blocks.read_bytes()[:LENGTH], np.uint64).copy()
    words[[10, 500]] = words[[500, 10]]
    doctored = tmp_path / "doctored.bin"
    doctored.write_bytes(words.tobytes())
    done = _native.read_blocks(str(doctored), [0], LENGTH, direct=False, reader="pread", depth=1, checksums=True)
    assert done["checksums"] != [checksum(blocks, 0)]


@pytest.mark.parametrize("reader", READERS)
def test_direct_blocks_come_from_the_disk_once(reader: str, blocks: Path) -> None:
    def from_disk() -> int:
        return next(int(line.split()[1]) for line in Path("/proc/self/io").read_text().splitlines() if line.startswith("read_bytes"))

    before = from_disk()
    done = _native.read_blocks(str(blocks), offsets(), LENGTH, direct=True, reader=reader, depth=2)
    if not done["reader"].startswith("direct"):
        pytest.skip(f"the file system refuses O_DIRECT: {done['reader']}")
    assert from_disk() - before == done["bytes"] + BLOCK  # and the trial read


@pytest.mark.parametrize("reader", READERS)
def test_a_block_past_the_end_is_an_error_and_what_was_begun_ends(reader: str, blocks: Path) -> None:
    for offset in (64 * LENGTH - BLOCK, 64 * LENGTH, 2**40):
        with pytest.raises(ReadError, match="end of file"):
            _native.read_blocks(str(blocks), [0, LENGTH, offset, 2 * LENGTH], LENGTH, direct=True, reader=reader, depth=2)


def test_blocks_that_cannot_be_asked_for_are_refused(blocks: Path) -> None:
    good: dict[str, Any] = {"offsets": [0], "length": LENGTH, "direct": True, "reader": "pread", "depth": 2}
    for change in ({"offsets": [1]}, {"length": 100}, {"length": 0}, {"depth": 0}, {"depth": -1}, {"depth": 257}, {"reader": "mmap"}):
        with pytest.raises(OptionError, match=next(iter(change))):
            _native.read_blocks(str(blocks), **{**good, **change})
    with pytest.raises(MissingFileError):
        _native.read_blocks("/absent/file", **good)
    assert _native.read_blocks(str(blocks), **{**good, "offsets": []})["bytes"] == 0


def test_auto_takes_the_pool(blocks: Path) -> None:
    assert _native.read_blocks(str(blocks), [0], BLOCK, direct=False, reader="auto", depth=1)["reader"].endswith("pread pool")
    assert EngineOptions().reader == "auto"
    with pytest.raises(OptionError, match="reader"):
        EngineOptions(reader="telepathy")  # type: ignore[arg-type]


@pytest.mark.skipif(bool(REFUSAL), reason=f"io_uring: {REFUSAL}")
def test_the_thread_of_an_idle_ring_sleeps_until_something_comes(tmp_path: Path) -> None:
    files = write_experts(tmp_path, WeightFormat(4, 64, "rows16"))
    before = set(TASKS.iterdir())
    store = _native.ExpertStore(files.files, files.index, cache_experts=1, io_threads=2, reader="uring")
    mine = set(TASKS.iterdir()) - before
    assert len(mine) == 1
    if not readable(thread := mine.pop() / "syscall"):
        pytest.skip(f"the kernel does not tell what {thread} waits for")
    for _ in range(3):
        walk = store.walk(0, [0, 1, 2])
        for _ in range(3):
            walk.next().release()
        walk.close()
        assert settled(thread)[:6] == ["426", settled(thread)[1], "0x0", "0x1", "0x1", "0x0"]  # io_uring_enter: wait for one, no time limit


# ---- a kernel that refuses ---------------------------------------------------------------------------------------------

# A filter on system calls, as sandboxes install it: the one named fails with an errno, all others pass.
FILTER = """
import ctypes, errno, struct, sys
LOAD_NUMBER, EQUAL, RETURN = 0x20, 0x15, 0x06
ALLOW, ERRNO = 0x7FFF0000, 0x00050000
program = b"".join(struct.pack("HBBI", *step) for step in (
    (LOAD_NUMBER, 0, 0, 0), (EQUAL, 0, 1, {number}), (RETURN, 0, 0, ERRNO | errno.{error}), (RETURN, 0, 0, ALLOW)))
class Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("steps", ctypes.c_char_p)]
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(38, 1, 0, 0, 0) == 0
assert libc.prctl(22, 2, ctypes.byref(Program(4, program)), 0, 0) == 0, ctypes.get_errno()
"""
ASK = """
from colibri_jax import _native, errors
refusal = _native.uring_refusal()
assert refusal == {refusal!r}, refusal
ask = dict(direct=False, depth=2)
assert _native.read_blocks({path!r}, [0], 4096, reader="auto", **ask)["bytes"] == 4096
try:
    _native.read_blocks({path!r}, [0], 4096, reader="uring", **ask)
except errors.OptionError as error:
    assert error.where == "reader" and error.got == refusal, error
else:
    raise SystemExit("io_uring was taken all the same")
"""


@pytest.mark.skipif(bool(REFUSAL), reason=f"io_uring is refused already: {REFUSAL}")
@pytest.mark.parametrize(
    ("number", "error", "refusal"),
    [
        (425, "EPERM", "io_uring_setup: Operation not permitted"),
        (425, "ENOSYS", "io_uring_setup: Function not implemented"),
        (426, "EPERM", "io_uring_enter: Operation not permitted"),
    ],
)
def test_a_kernel_that_refuses_io_uring_is_named_and_auto_reads_all_the_same(number: int, error: str, refusal: str, blocks: Path) -> None:
    program = FILTER.format(number=number, error=error) + ASK.format(refusal=refusal, path=str(blocks))
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


# The same filter on every thread, put up while the ring's thread sleeps in the call that will be refused.
REVOKE = """
from pathlib import Path
import numpy as np
from colibri_jax import _native, errors
from colibri_jax.quant import WeightFormat
from expert_files import write_experts
files = write_experts(Path({path!r}), WeightFormat(4, 64, "rows16"))
store = _native.ExpertStore(files.files, files.index, cache_experts=2, io_threads=2, reader="uring")
walk = store.walk(0, [0])
walk.next().release()
walk.close()
{filter}
for experts in ([1, 2, 3], [2, 1]):
    walk = store.walk(0, experts)
    try:
        walk.next()
    except errors.ReadError as error:
        assert "Operation not permitted" in str(error), error
    else:
        raise SystemExit("an expert that nobody read")
    walk.close()
store.walk(0, [0]).next().release()  # is in the cache
"""


@pytest.mark.skipif(bool(REFUSAL), reason=f"io_uring: {REFUSAL}")
def test_a_kernel_that_refuses_in_the_middle_fails_the_reads_and_not_the_process(tmp_path: Path) -> None:
    program = REVOKE.format(path=str(tmp_path), filter=FILTER.format(number=426, error="EPERM"))
    all_threads = "libc.syscall(317, 1, 1, ctypes.byref("
    program = program.replace("libc.prctl(22, 2, ctypes.byref(", all_threads)
    assert all_threads in program
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)})
