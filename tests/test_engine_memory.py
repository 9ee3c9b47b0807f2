"""Memory stays within the stated bound, and reads are what the kernel says they were. Each measurement has its own process."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import engine_models as models
import pytest
from bench.make_model import make_config, make_model
from engine_models import ODD, bits, random_tokens

import colibri_jax
from colibri_jax.engine.session import NativeModel
from colibri_jax.errors import MemoryBudgetError, NoSpaceError

MiB = 1 << 20
SLACK = 64 * MiB
# Loads a model in a fresh process and runs steps; prints memory before, its peak since then, and reads, by the kernel's account.
MEASURE = """
import json, mmap, os, sys
import numpy as np
import colibri_jax, colibri_jax.engine.session

def status(key):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(key))

def read_bytes():
    return next(int(line.split()[1]) for line in open("/proc/self/io") if line.startswith("read_bytes"))

path, options, steps = sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3])
open("/proc/self/clear_refs", "w").write("5")  # the peak counts from now on
before = status("VmRSS")
model = colibri_jax.load(path, **options)
loaded, read_before = status("VmHWM"), read_bytes()
tokens = np.arange(4096) % model.config.vocab_size
for n, logits in steps:
    model.forward(tokens[:n], scope="prefill", logits=logits)
read = read_bytes() - read_before
total = model.stats.total
print(json.dumps({
    "before": before, "loaded": loaded - before, "peak": status("VmHWM") - before, "read": read, "counted": total.bytes_read,
    "useful": total.useful_bytes, "reader": model.stats.reader, "cap": model.stats.cache_experts_per_layer,
    "dense": model.stats.dense_bytes,
}))
"""


def measure(path: Path, steps: list[tuple[int, str]], **options: Any) -> dict[str, Any]:
    arguments = [sys.executable, "-c", MEASURE, str(path), json.dumps(options), json.dumps(steps)]
    root = Path(colibri_jax.__file__).parents[1]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    done = subprocess.run(arguments, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.converted(tmp_path_factory.mktemp("small"), ODD)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """2 GB of random experts; removed at once, since old test directories are kept."""
    path = tmp_path_factory.mktemp("large") / "model"
    sizes = {"layers": 10, "dense_layers": 1, "experts": 64, "top_k": 8, "hidden": 2048, "expert_hidden": 1024}
    try:
        size = make_model(path, make_config(**sizes, vocab=4096, heads=8, positions=4096))
    except NoSpaceError as error:
        pytest.skip(f"no room for a model of 2 GB: {error}")
    assert size > 2_000_000_000
    yield path
    shutil.rmtree(path)


def test_peak_memory_of_a_small_model_stays_within_the_bound(small: Path) -> None:
    """The least bound that is accepted, with the longest step that it allows."""
    least = least_bound(small)
    model = load(small, ram_bytes=least)
    longest = longest_step(model)
    model.forward(random_tokens(ODD, longest), scope="prefill")
    measured = measure(small, [(longest, "all"), (1, "last")], ram_bytes=least)
    assert measured["peak"] <= least + SLACK


def test_peak_memory_of_a_large_model_stays_within_the_bound(large: Path) -> None:
    for bound, cap in ((400 * MiB, 6), (900 * MiB, 20)):
        measured = measure(large, [(200, "last"), (64, "all"), *[(1, "last")] * 3], ram_bytes=bound, threads=2)
        assert measured["cap"] >= cap
        assert measured["loaded"] <= measured["dense"] + SLACK
        assert measured["peak"] <= bound + SLACK
        # The bound is used, too: a checker that saw no memory at all would not notice a leak.
        assert measured["peak"] >= measured["dense"] + 9 * measured["cap"] * 3 * MiB


def test_memory_beyond_the_bound_is_seen(large: Path) -> None:
    """The planted fault: the cache of a larger bound, held against a smaller one."""
    assert measure(large, [(64, "last")], ram_bytes=900 * MiB, threads=2)["peak"] > 400 * MiB + SLACK


def test_bytes_read_equal_the_kernels_account(large: Path) -> None:
    refusal = direct_reads_are_accounted(large)
    if refusal:
        pytest.skip(refusal)
    measured = measure(large, [(1, "last")] * 3, cache_experts=1, threads=2)
    assert measured["reader"].startswith("direct, ")
    assert measured["counted"] >= 256 * 10**6
    assert measured["counted"] == pytest.approx(measured["read"], rel=0.01)
    assert measured["counted"] <= 1.01 * measured["useful"]  # one read brings one expert, without gaps


def direct_reads_are_accounted(path: Path) -> str:
    """Why the kernel's account cannot be compared here, or "": one direct read of our own must appear in it in full."""
    script = """
import mmap, os, sys
def read_bytes():
    return next(int(line.split()[1]) for line in open("/proc/self/io") if line.startswith("read_bytes"))
buffer = mmap.mmap(-1, 1 << 20)
fd = os.open(sys.argv[1], os.O_RDONLY | os.O_DIRECT)
before = read_bytes()
os.preadv(fd, [buffer], 1 << 24)
print(read_bytes() - before)
"""
    shard = sorted(path.glob("*.safetensors"))[0]
    done = subprocess.run([sys.executable, "-c", script, str(shard)], capture_output=True, text=True, check=False)
    if done.returncode:
        return f"the file system of {path} refuses O_DIRECT: {done.stderr.strip().splitlines()[-1]}"
    return (
        "" if int(done.stdout) == 1 << 20 else f"/proc/self/io does not account direct reads here: {done.stdout.strip()} of {1 << 20} bytes"
    )


# ---- the bound, and what follows from it ----------------------------------------------------------------------------


def load(path: Path, **options: Any) -> NativeModel:
    model = colibri_jax.load(path, **{"threads": 2, **options})
    assert isinstance(model, NativeModel)
    return model


def least_bound(path: Path) -> int:
    """The bytes that the refusal of a tiny bound asks for."""
    with pytest.raises(MemoryBudgetError) as refused:
        load(path, ram_bytes=1000)
    needed = re.match(
        r">= (\d+) \(dense weights (\d+), KV cache (\d+), .* staging (\d+), working memory (\d+)\)", str(refused.value.expected)
    )
    assert needed
    assert refused.value.where == "ram_bytes"
    assert int(needed[1]) == sum(int(part) for part in needed.groups()[1:])
    return int(needed[1])


def longest_step(model: NativeModel, logits: Any = "all") -> int:
    with pytest.raises(MemoryBudgetError, match="at most") as refused:
        model.forward([0] * 120, scope="prefill", logits=logits)
    found = re.match(r"at most (\d+) in one step", str(refused.value.expected))
    assert found
    return int(found[1])


def test_the_least_bound_is_the_one_that_is_named(small: Path) -> None:
    least = least_bound(small)
    with pytest.raises(MemoryBudgetError, match="too small"):
        load(small, ram_bytes=least - 1)
    stats = load(small, ram_bytes=least).stats
    assert (stats.cache_experts_per_layer, stats.ram_bytes) == (1, least)


def test_a_bound_below_the_whole_model_lowers_the_cap_visibly(small: Path) -> None:
    caps = [load(small, ram_bytes=least_bound(small) + extra).stats.cache_experts_per_layer for extra in range(0, 4 * MiB, MiB // 4)]
    assert caps[0] == 1
    assert caps == sorted(caps)
    assert caps[-1] == ODD["n_routed_experts"]
    assert len(set(caps)) > 3


def test_a_step_longer_than_the_bound_allows_is_refused_and_changes_nothing(small: Path) -> None:
    model = load(small, ram_bytes=least_bound(small))
    free = load(small, cache_experts=1)
    for logits in ("all", "last"):
        longest = longest_step(model, logits)
        assert longest >= 50
        ids = random_tokens(ODD, longest + 1)
        with pytest.raises(MemoryBudgetError, match="tokens"):
            model.forward(ids, scope="prefill", logits=logits)
        assert model.position == 0
        assert bits(model.forward(ids[:-1], scope="prefill", logits=logits)) == bits(free.forward(ids[:-1], scope="prefill", logits=logits))
        model.reset()
        free.reset()
    assert longest_step(model, "last") >= longest_step(model, "all")


def test_without_a_size_the_cache_takes_what_is_free(small: Path) -> None:
    stats = load(small).stats
    assert stats.cache_experts_per_layer == ODD["n_routed_experts"]
    assert stats.ram_bytes > 0
    assert load(small, cache_experts=5).stats.ram_bytes == 0


def test_the_generator_refuses_a_full_disk_and_an_existing_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config(layers=2, dense_layers=1, experts=4, top_k=2, hidden=128, expert_hidden=64, vocab=96, heads=2, positions=64)
    assert make_model(tmp_path / "a", config) == sum(file.stat().st_size for file in (tmp_path / "a").glob("*.safetensors"))
    logits = load(tmp_path / "a", cache_experts=2).forward([1, 2, 3], scope="prefill")
    assert 0.3 < logits.std() < 3.0
    with pytest.raises(colibri_jax.errors.OutputExistsError):
        make_model(tmp_path / "a", config)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 10, 0))
    with pytest.raises(NoSpaceError):
        make_model(tmp_path / "b", config)
    assert not (tmp_path / "b").exists()
