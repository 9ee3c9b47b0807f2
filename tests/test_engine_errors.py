"""What goes wrong has a name, names its place, and leaves the engine usable with the same results."""

from __future__ import annotations

import ctypes
import json
import operator
import shutil
import signal
import struct
import sys
import threading
from collections.abc import Iterator
from itertools import starmap
from pathlib import Path
from typing import Any

import engine_models as models
import numpy as np
import pytest
from engine_models import ODD, bits, random_tokens
from readers import READERS

import colibri_jax
from colibri_jax import RoutingOptions, _native, errors
from colibri_jax.container.format import read_index
from colibri_jax.container.reader import Container, TensorEntry
from colibri_jax.engine.options import EngineOptions, plan_engine
from colibri_jax.engine.session import NativeModel

IDS = random_tokens(ODD, 12)


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.converted(tmp_path_factory.mktemp("sound"), ODD)


@pytest.fixture
def broken(sound: Path, tmp_path: Path) -> Path:
    """A copy to break."""
    shutil.copytree(sound, tmp_path / "broken")
    return tmp_path / "broken"


def load(path: Path, **options: Any) -> NativeModel:
    model = colibri_jax.load(path, **{"cache_experts": 2, "threads": 2, **options})
    assert isinstance(model, NativeModel)
    return model


@pytest.fixture(scope="module")
def expected(sound: Path) -> bytes:
    return bits(load(sound).forward(IDS, scope="prefill"))


def overwrite(entry: TensorEntry, at: int, data: bytes) -> None:
    with entry.path.open("r+b") as file:
        file.seek(entry.offset + at)
        file.write(data)


# ---- a container that is not what it should be --------------------------------------------------------------------


def rewrite_header(path: Path, change: Any) -> None:
    """Replaces the header by a changed one of the same length."""
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    change(header)
    text = json.dumps(header, separators=(",", ":")).encode().ljust(length)
    assert len(text) == length
    path.write_bytes(content[:8] + text + content[8 + length :])


def test_a_truncated_shard_is_refused(broken: Path) -> None:
    shard = broken / "out-00000.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(errors.TruncatedFileError, match=r"out-00000\.safetensors"):
        load(broken)


@pytest.mark.parametrize("at", [0, 3, 7, 8, 9, 20, 60, 200])
def test_a_flipped_header_byte_is_refused(at: int, broken: Path) -> None:
    shard = broken / "out-00000.safetensors"
    content = bytearray(shard.read_bytes())
    content[at] ^= 0x80
    shard.write_bytes(content)
    with pytest.raises(errors.ContainerError, match=r"out-00000\.safetensors"):
        load(broken)


def test_a_missing_tensor_is_named(broken: Path) -> None:
    name = "model.layers.3.mlp.experts.5.up_proj.weight"
    shard = next(path for path in broken.glob("*.safetensors") if name in read_index(path).tensors)

    def rename(header: dict[str, Any]) -> None:
        header[name.replace(".5.", ".X.")] = header.pop(name)
        tag = json.loads(header["__metadata__"]["colibri_jax"])
        tag["formats"][name.replace(".5.", ".X.")] = tag["formats"].pop(name)
        header["__metadata__"]["colibri_jax"] = json.dumps(tag, separators=(",", ":"))

    rewrite_header(shard, rename)
    with pytest.raises(errors.MissingTensorError, match=name):
        load(broken)


@pytest.mark.parametrize(
    ("key", "value", "error", "name"),
    [
        ("n_routed_experts", 12, errors.ShapeError, r"layers\.2\.mlp\.gate\.weight"),
        ("vocab_size", 90, errors.UnknownFormatError, "embed_tokens"),
    ],
)
def test_a_wrong_shape_is_named(key: str, value: int, error: type[Exception], name: str, broken: Path) -> None:
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps({**config, key: value}))
    with pytest.raises(error, match=name):
        load(broken)


@pytest.mark.parametrize("change", ["weights", "scales", "inner scales", "inner float16 scales", "inner int8 scales"])
def test_a_weight_that_is_no_number_is_refused_at_load(change: str, broken: Path, tmp_path: Path) -> None:
    if change == "inner float16 scales":
        broken = models.converted(tmp_path, ODD, scales="f16")
        load(broken)
    entries = Container.open(broken).entries
    nan = np.float32(np.nan).tobytes()
    if change == "weights":
        entry = entries["layers.1.mlp_norm"]
        overwrite(entry, entry.nbytes - 4, np.float32(np.inf).tobytes())
    elif change == "scales":
        entry = entries["layers.2.attn.kv_b"].scales  # type: ignore[assignment]
        overwrite(entry, 8, nan)
    elif change != "inner int8 scales":
        entry = entries["layers.4.shared.down"]
        record, scales = entry.format.rows16_record(entry.shape[1])
        bad = np.full(1, np.nan, entry.format.scale_dtype).tobytes()
        overwrite(entry, 3 * record + scales.start + 5 * len(bad), bad)
    else:
        entry = entries["head"]
        overwrite(entry, 64 + 2 * 1024 + 60, nan)  # the second block of 16 rows begins with its scales
    with pytest.raises(errors.NonFiniteWeightError, match=entry.name.replace(".", r"\.")):
        load(broken)


def test_an_expert_that_is_no_number_is_an_error_of_the_step(broken: Path) -> None:
    """Experts are read on demand: what they make of the stream is refused where it would be quantised, and names the layer."""
    entries = Container.open(broken).entries
    for expert in range(ODD["n_routed_experts"]):
        overwrite(entries[f"layers.2.experts.{expert}.gate"], 16 * 64 // 2, np.float32(np.nan).tobytes())
    model = load(broken)
    with pytest.raises(errors.NonFiniteActivationError, match=r"layer 2, MLP hidden state, position \d+ of the step") as raised:
        model.forward(IDS, scope="prefill")
    assert raised.value.got == "nan"
    assert model.position == 0


def test_logits_that_are_no_numbers_are_an_error(broken: Path) -> None:
    """The last product has no quantiser behind it. The largest scale is finite and overflows."""
    entry = Container.open(broken).entries["head"]
    overwrite(entry, 4 * 5, np.finfo(np.float32).max.tobytes())
    model = load(broken)
    with pytest.raises(errors.NonFiniteLogitError, match="token 5"):
        model.forward(IDS, scope="prefill")
    assert model.position == 0
    assert model.stats.total.positions == 0


# ---- reads that fail ----------------------------------------------------------------------------------------------


def first_expert(path: Path) -> TensorEntry:
    """An expert's gate matrix that the first step reads."""
    model = load(path)
    model.forward(IDS, scope="prefill")
    return Container.open(path).entries[f"layers.3.experts.{model.selections[1].kept[1]}.gate"]


@pytest.mark.parametrize("io", ["direct", "buffered"])
@pytest.mark.parametrize("reader", READERS)
def test_an_io_error_names_its_place_and_the_engine_goes_on(reader: Any, io: Any, sound: Path, expected: bytes) -> None:
    entry = first_expert(sound)
    plan = plan_engine(Container.open(sound), EngineOptions(cache_experts=2, threads=2, io=io, reader=reader), RoutingOptions())
    # In the expert's midst: the blocks at its ends are its neighbours' as well.
    fault = {"kind": "io_error", "file": plan.options["files"].index(str(entry.path)), "offset": entry.offset + 5000, "times": 2}
    model = load(sound, io=io)
    model._engine = _native.Engine(plan.model, {**plan.options, "faults": [fault]})
    for _ in range(2):
        with pytest.raises(errors.ReadError, match="Input/output error") as raised:
            model.forward(IDS, scope="prefill")
        assert str(entry.path) in raised.value.where
        assert entry.name in raised.value.where
        assert "offset" in raised.value.where
        assert model.position == 0
    counted = model.stats.scopes["prefill"]
    assert (counted.steps, counted.positions) == (0, 0)
    assert counted.bytes_read > 0  # what the abandoned steps read was read
    assert bits(model.forward(IDS, scope="prefill")) == expected
    assert model.stats.scopes["prefill"].steps == 1


@pytest.mark.parametrize("io", ["direct", "buffered"])
def test_a_file_that_is_cut_while_in_use_is_a_read_error(io: Any, broken: Path, expected: bytes) -> None:
    entry = first_expert(broken)
    content = entry.path.read_bytes()
    model = load(broken, io=io, cache_experts=1)
    with entry.path.open("r+b") as file:
        file.truncate(entry.offset + 100)
    with pytest.raises(errors.ReadError, match="end of file") as raised:
        model.forward(IDS, scope="prefill")
    assert str(entry.path) in raised.value.where
    with entry.path.open("r+b") as file:
        file.write(content)
    assert bits(model.forward(IDS, scope="prefill")) == expected


def test_a_file_that_is_cut_before_the_dense_weights_are_read_is_a_read_error(broken: Path) -> None:
    container = Container.open(broken)
    entry = container.entries["final_norm"]
    with entry.path.open("r+b") as file:
        file.truncate(entry.offset + 10)
    with pytest.raises(errors.ReadError, match=rf"model\.norm\.weight, offset {entry.offset + 10}") as raised:
        NativeModel(container, EngineOptions(cache_experts=1))
    assert raised.value.got == "end of file"


# ---- steps that are refused ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "error", "where"),
    [
        ([], errors.TokenError, "tokens"),
        ([0, 89], errors.TokenError, r"tokens\[1\]"),
        ([-1], errors.TokenError, r"tokens\[0\]"),
        ([2**40], errors.TokenError, "tokens"),
        ([0.5], errors.TokenError, "tokens"),
        ([[1, 2]], errors.TokenError, "tokens"),
        ([1] * 129, errors.ContextOverflowError, "position 0"),
    ],
)
def test_a_refused_step_appends_nothing(tokens: Any, error: type[Exception], where: str, sound: Path, expected: bytes) -> None:
    model = load(sound)
    with pytest.raises(error, match=where):
        model.forward(tokens, scope="prefill")
    assert model.position == 0
    assert model.stats.total.steps == 0
    assert bits(model.forward(IDS, scope="prefill")) == expected


def test_the_context_ends_where_it_was_said(sound: Path) -> None:
    model = load(sound, context_positions=20)
    assert model.context_positions == 20
    first = model.forward(IDS, scope="prefill")
    with pytest.raises(errors.ContextOverflowError, match="at most 8 tokens"):
        model.forward([1] * 9, scope="verify")
    assert model.position == 12
    model.forward([1] * 8, scope="verify")
    with pytest.raises(errors.ContextOverflowError):
        model.forward([1], scope="decode")
    model.rewind(20)
    assert bits(model.forward(IDS, scope="prefill")) == bits(first)


def test_rewinding_too_far_is_an_error(sound: Path) -> None:
    model = load(sound)
    model.forward(IDS, scope="prefill")
    for n in (-1, 13):
        with pytest.raises(errors.RewindError, match="0 … 12"):
            model.rewind(n)
    assert model.position == 12


@pytest.mark.parametrize(
    ("options", "where"),
    [
        ({"isa": "mmx"}, "isa"),
        ({"precision": "w2a2"}, "precision"),
        ({"precision": "full"}, "precision"),
        ({"io": "telepathy"}, "io"),
        ({"reader": "telepathy"}, "reader"),
        ({"cache_policy": "fifo"}, "cache_policy"),
        ({"cache_experts": 2, "ram_bytes": 10**9}, "cache_experts, ram_bytes"),
        ({"cache_experts": 0}, "cache_experts"),
        ({"threads": 0}, "threads"),
        ({"threads": 10**9}, "threads"),
        ({"context_positions": 129}, "context_positions"),
        ({"budget_scopes": ("train",)}, "budget_scopes"),
        ({"routing": RoutingOptions(budget=(1, 2))}, "budget"),
        ({"routing": RoutingOptions(budget=(1, 2, 3, 4))}, "budget"),
    ],
)
def test_options_outside_their_domain_are_refused(options: dict[str, Any], where: str, sound: Path) -> None:
    with pytest.raises(errors.OptionError) as raised:
        colibri_jax.load(sound, **{"threads": 1, **options})
    assert where in raised.value.where


def test_unknown_arguments_of_a_step_are_refused(sound: Path) -> None:
    model = load(sound)
    with pytest.raises(errors.OptionError, match="scope"):
        model.forward(IDS, scope="train")  # type: ignore[arg-type]
    with pytest.raises(errors.OptionError, match="logits"):
        model.forward(IDS, scope="prefill", logits="some")  # type: ignore[arg-type]


def test_counts_beyond_every_integer_mean_no_limit(sound: Path, expected: bytes) -> None:
    routing = RoutingOptions(expert_topk=2**70, budget=2**70)
    model = load(sound, cache_experts=2**70, routing=routing, budget_scopes=("prefill",))
    assert bits(model.forward(IDS, scope="prefill")) == expected


# ---- interrupts and threads ---------------------------------------------------------------------------------------


@pytest.fixture
def sigint_interrupts() -> Iterator[None]:
    """Python's own handler, which is not there where the tests were started in the background of a script."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("sigint_interrupts")
def test_an_interrupt_leaves_the_engine_as_it_was(sound: Path, expected: bytes) -> None:
    """The signal is raised by C code that C code calls right before the step, so it is pending when the step begins."""
    model = load(sound)
    model.forward(IDS[:5], scope="prefill")
    step = (model._engine.forward, np.asarray(IDS[5:], np.int32), False, False)
    pending = (ctypes.CDLL(None)["raise"], int(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt) as raised:
        list(starmap(operator.call, [pending, step]))
    assert raised.traceback[-1].frame.code.name == "test_an_interrupt_leaves_the_engine_as_it_was"
    assert model.position == 5
    rest = model.forward(IDS[5:], scope="prefill")
    assert bits(rest) == expected[5 * 4 * ODD["vocab_size"] :]


def progress_during(call: Any) -> bool:
    """Whether another thread gets to run while `call` is under way. Threads are not switched unless one gives way."""
    started, progressed = threading.Event(), threading.Event()

    def other() -> None:
        started.wait()
        progressed.set()

    thread = threading.Thread(target=other)
    thread.start()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e6)
    try:
        started.set()
        for _ in range(300):
            call()
            if progressed.is_set():
                break
        seen = progressed.is_set()
    finally:
        sys.setswitchinterval(interval)
    thread.join()
    return seen


def test_other_threads_run_during_a_step(sound: Path) -> None:
    model = load(sound, cache_experts=1)
    tokens = np.asarray(IDS, np.int32)

    def step() -> None:
        model._engine.forward(tokens, False, True)
        model._engine.rewind(12)

    assert progress_during(step)
    assert not progress_during(lambda: model._engine.position)  # which does not give way


def test_two_calls_at_once_are_refused(sound: Path, expected: bytes) -> None:
    model = load(sound)
    with model._alone():
        for call in (lambda: model.forward(IDS, scope="prefill"), lambda: model.rewind(0)):
            with pytest.raises(errors.EngineError, match="two calls at once"):
                call()
    assert bits(model.forward(IDS, scope="prefill")) == expected
