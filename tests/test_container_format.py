"""The safetensors file: every damaged header is refused by name, and what is written is what was planned."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from oracles.colibri_writer import write_file
from safetensors import safe_open

from colibri_jax.container import format as fmt
from colibri_jax.container.format import PlannedTensor, StreamWriter, read_bytes, read_index
from colibri_jax.errors import (
    ColibriError,
    EngineError,
    HeaderError,
    HoleError,
    MissingFileError,
    NoSpaceError,
    OverlapError,
    ReadError,
    TruncatedFileError,
)

A = {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}
B = {"dtype": "F32", "shape": [2, 1], "data_offsets": [4, 12]}


def write_raw(path: Path, header: Any, data_bytes: int = 12, *, length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + bytes(range(data_bytes)))
    return path


def test_a_sound_file_is_indexed_with_absolute_offsets(tmp_path: Path) -> None:
    path = write_raw(tmp_path / "f", {"__metadata__": {"k": "v"}, "a": A, "b": B})
    index = read_index(path)
    start = path.stat().st_size - 12
    assert index.metadata == {"k": "v"}
    assert [(t.name, t.dtype, t.shape, t.offset, t.nbytes) for t in index.tensors.values()] == [
        ("a", "U8", (4,), start, 4),
        ("b", "F32", (2, 1), start + 4, 8),
    ]
    assert read_bytes(index.tensors["b"], 2, 5) == bytes([6, 7, 8])


@pytest.mark.parametrize(
    ("header", "data_bytes", "error"),
    [
        ({"a": A, "b": B}, 11, TruncatedFileError),
        ({"a": A, "b": B}, 13, TruncatedFileError),
        ({"a": A, "b": {**B, "data_offsets": [3, 11]}}, 11, OverlapError),
        ({"a": A, "b": {**B, "data_offsets": [0, 8]}}, 8, OverlapError),
        ({"a": A, "b": {**B, "data_offsets": [5, 13]}}, 13, HoleError),
        ({"a": {**A, "data_offsets": [8, 12]}, "b": {**B, "data_offsets": [0, 8]}}, 12, None),
        ({"b": B}, 12, HoleError),
        ({"a": {**A, "dtype": "U7"}}, 4, HeaderError),
        ({"a": {**A, "dtype": ["U8"]}}, 4, HeaderError),
        ({"a": {**A, "shape": [-4]}}, 4, HeaderError),
        ({"a": {**A, "shape": [4.0]}}, 4, HeaderError),
        ({"a": {**A, "shape": [True, 4]}}, 4, HeaderError),
        ({"a": {**A, "shape": [1] * 9 + [4]}}, 4, HeaderError),
        ({"a": {**A, "shape": [5]}}, 4, HeaderError),
        ({"a": {**A, "shape": [2**62, 2**62]}}, 4, HeaderError),
        ({"a": {**A, "data_offsets": [4, 0]}}, 4, HeaderError),
        ({"a": {**A, "data_offsets": [0, 4, 8]}}, 4, HeaderError),
        ({"a": {**A, "data_offsets": [0, 2**70]}}, 4, HeaderError),
        ({"a": {**A, "extra": 1}}, 4, HeaderError),
        ({"a": [1]}, 4, HeaderError),
        ({"__metadata__": {"k": 1}, "a": A}, 4, HeaderError),
        ({"__metadata__": "k", "a": A}, 4, HeaderError),
        (b'{"a":1,"a":2}', 0, HeaderError),
        (b'{"a":{"dtype":"U8","shape":[4],"shape":[4],"data_offsets":[0,4]}}', 4, HeaderError),
        (b"[]", 0, HeaderError),
        (b" {}", 0, HeaderError),
        (b"{\xff}", 0, HeaderError),
        (b'{"a":NaN}', 0, HeaderError),
        (b'{"a":' + b"[" * 100_000, 0, HeaderError),
        (b'{"a":' + b"9" * 5000 + b"}", 0, HeaderError),
    ],
)
def test_damaged_headers_are_refused_by_cause(tmp_path: Path, header: Any, data_bytes: int, error: type[ColibriError] | None) -> None:
    path = write_raw(tmp_path / "f", header, data_bytes)
    if error is None:
        assert set(read_index(path).tensors) == {"a", "b"}
        return
    with pytest.raises(error, match=str(path)):
        read_index(path)


@pytest.mark.parametrize(
    ("length", "error"), [(0, HeaderError), (1, HeaderError), (2**63, HeaderError), (fmt.MAX_HEADER_BYTES, TruncatedFileError)]
)
def test_header_length_is_checked_before_the_header_is_read(tmp_path: Path, length: int, error: type[ColibriError]) -> None:
    with pytest.raises(error):
        read_index(write_raw(tmp_path / "f", {"a": A}, 4, length=length))


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    whole = write_raw(tmp_path / "f", {"a": A, "b": B}).read_bytes()
    for size in range(len(whole)):
        (tmp_path / "f").write_bytes(whole[:size])
        with pytest.raises(TruncatedFileError):
            read_index(tmp_path / "f")


def test_missing_and_unreadable_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(MissingFileError, match="nowhere"):
        read_index(tmp_path / "nowhere")
    with pytest.raises(ReadError):
        read_index(tmp_path)


def test_a_file_cut_after_indexing_gives_a_read_error_with_offset_and_tensor(tmp_path: Path) -> None:
    path = write_raw(tmp_path / "f", {"a": A, "b": B})
    tensor = read_index(path).tensors["b"]
    os.truncate(path, tensor.offset + 3)
    with pytest.raises(ReadError, match=f"offset {tensor.offset}, tensor b.*expected: 8; got: 3"):
        read_bytes(tensor, 0, 8)


PLAN = [PlannedTensor("z", "U8", (5,)), PlannedTensor("a", "F32", (2, 3)), PlannedTensor("m", "U8", (0,))]


def test_writer_keeps_the_given_order_and_aligns_data(tmp_path: Path) -> None:
    path = tmp_path / "f"
    with StreamWriter(path, PLAN, {"k": "v"}) as writer:
        writer.write("z", [b"12", b"345"])
        writer.write("a", [bytes(24)])
        writer.write("m", [])
    index = read_index(path)
    assert list(index.tensors) == ["z", "a", "m"]
    assert index.tensors["z"].offset % fmt.ALIGNMENT == 0
    assert index.tensors["a"].offset == index.tensors["z"].offset + 5
    assert read_bytes(index.tensors["z"], 0, 5) == b"12345"


def test_the_safetensors_library_reads_what_the_writer_writes(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.numpy")
    with StreamWriter(tmp_path / "f", PLAN[1:2], {"k": "v"}) as writer:
        writer.write("a", [struct.pack("<6f", *range(6))])
    assert safetensors.load_file(tmp_path / "f")["a"].tolist() == [[0, 1, 2], [3, 4, 5]]


def test_writer_refuses_what_was_not_planned(tmp_path: Path) -> None:
    for write in (
        lambda w: w.write("z", [b"1234"]),
        lambda w: w.write("a", [b"12345"]),
        lambda w: w.write("z", [b"12345"]),  # and then nothing more
    ):
        with pytest.raises(EngineError), StreamWriter(tmp_path / "f", PLAN, {}) as writer:
            write(writer)


def test_a_full_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, data: memoryview) -> int:
        raise OSError(28, "No space left on device")

    writer = StreamWriter(tmp_path / "f", PLAN, {})
    monkeypatch.setattr(os, "write", full)
    with pytest.raises(NoSpaceError, match=str(tmp_path / "f")), writer:
        writer.write("z", [b"12345"])


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: real(fd, data[:3]))
    with StreamWriter(tmp_path / "f", PLAN[:1], {}) as writer:
        writer.write("z", [b"12345"])
    assert read_bytes(read_index(tmp_path / "f").tensors["z"], 0, 5) == b"12345"


def test_the_oracle_writer_makes_sound_files(tmp_path: Path) -> None:
    write_file(tmp_path / "f", [("x", "U8", [3], b"abc"), ("y", "F32", [1], struct.pack("<f", 1.5))])
    assert set(read_index(tmp_path / "f").tensors) == {"x", "y"}


def test_what_is_written_opens_with_the_library(tmp_path: Path) -> None:
    values = np.arange(6, dtype=np.float32)
    tensors = [PlannedTensor("second", "F32", (6,)), PlannedTensor("first", "U8", (4,))]
    with StreamWriter(tmp_path / "f.safetensors", tensors, {"colibri_jax": "{}"}) as writer:
        writer.write("second", [values.tobytes()])
        writer.write("first", [bytes([1, 2, 3, 4])])
    with safe_open(tmp_path / "f.safetensors", framework="numpy") as file:
        assert file.metadata() == {"colibri_jax": "{}"}
        assert file.get_tensor("second").tobytes() == values.tobytes()
        assert file.get_tensor("first").tolist() == [1, 2, 3, 4]
