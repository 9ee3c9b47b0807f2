"""The safetensors file: a header checked against its file before any buffer exists, and a writer that streams.

A file is an 8-byte little-endian header length, a JSON header, and the tensors' bytes without gaps. The package's own
writer keeps the order of tensors that it is given (an expert's matrices stay adjacent) and pads the header with spaces
so that data starts at a multiple of 4096.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
import struct
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from colibri_jax.errors import (
    ContainerError,
    EngineError,
    HeaderError,
    HoleError,
    MissingFileError,
    NoSpaceError,
    OverlapError,
    ReadError,
    TruncatedFileError,
)

ALIGNMENT = 4096
MAX_HEADER_BYTES = 100_000_000  # the format's own limit
MAX_RANK = 8
LARGEST_COUNT = 2**64  # what the format can hold; also keeps products printable
METADATA_KEY = "__metadata__"

DTYPE_BYTES = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
    "U16": 2,
    "I16": 2,
    "F16": 2,
    "BF16": 2,
    "U32": 4,
    "I32": 4,
    "F32": 4,
    "U64": 8,
    "I64": 8,
    "F64": 8,
}


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """Where one tensor lies. `offset` counts bytes from the start of the file."""

    name: str
    path: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclasses.dataclass(frozen=True)
class FileIndex:
    """A file whose header was found to explain every byte of it."""

    path: Path
    tensors: dict[str, StoredTensor]
    metadata: dict[str, str]


def read_index(path: Path) -> FileIndex:
    """Read and check one file's header; no tensor data is touched.

    Raises:
        MissingFileError: there is no such file.
        TruncatedFileError: the file is shorter or longer than its header says.
        HeaderError: the header is not what the format allows.
        OverlapError, HoleError: two tensors share bytes, or bytes belong to no tensor.
    """
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size < 8:
                raise TruncatedFileError("no room for a header length", where=str(path), expected="8 bytes or more", got=size)
            (length,) = struct.unpack("<Q", file.read(8))
            if not 2 <= length <= MAX_HEADER_BYTES:
                raise HeaderError("header length out of range", where=str(path), expected=f"2 … {MAX_HEADER_BYTES}", got=length)
            if 8 + length > size:
                raise TruncatedFileError("file ends inside its header", where=str(path), expected=f"{8 + length} bytes or more", got=size)
            raw = file.read(length)
    except FileNotFoundError as error:
        raise MissingFileError("no such file", where=str(path)) from error
    except OSError as error:
        raise ReadError("cannot read a header", where=str(path), got=error.strerror) from error
    header = _parse_json(raw, path)
    metadata = _metadata(header.pop(METADATA_KEY, {}), path)
    tensors = [_tensor(name, entry, 8 + length, path) for name, entry in header.items()]
    _check_coverage(sorted(tensors, key=lambda t: (t.offset, t.nbytes)), 8 + length, size, path)
    return FileIndex(path, {t.name: t for t in tensors}, metadata)


def read_bytes(tensor: StoredTensor, begin: int, end: int) -> bytearray:
    """Bytes [begin, end) of a tensor, counted from its own start.

    Raises:
        ReadError: the system reported an error, or the file ended early.
    """
    buffer = bytearray(end - begin)
    where = f"{tensor.path}, offset {tensor.offset + begin}, tensor {tensor.name}"
    try:
        with tensor.path.open("rb", buffering=0) as file:
            file.seek(tensor.offset + begin)
            view, done = memoryview(buffer), 0
            while done < len(buffer):
                count = file.readinto(view[done : done + (1 << 30)])
                if not count:
                    raise ReadError("file ended early", where=where, expected=len(buffer), got=done)
                done += count
    except OSError as error:
        raise ReadError("cannot read a tensor", where=where, got=error.strerror) from error
    return buffer


@dataclasses.dataclass(frozen=True)
class PlannedTensor:
    """A tensor to be written."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size in the file."""
        return _product(self.shape) * DTYPE_BYTES[self.dtype]


def header_bytes(tensors: Sequence[PlannedTensor], metadata: Mapping[str, str]) -> bytes:
    """Length and header of a file of these tensors, padded so that data starts 4096-aligned."""
    header: dict[str, Any] = {METADATA_KEY: dict(metadata)} if metadata else {}
    offset = 0
    for tensor in tensors:
        header[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [offset, offset + tensor.nbytes]}
        offset += tensor.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    if len(text) > MAX_HEADER_BYTES:
        raise HeaderError("too many tensors for one file", where="header", expected=f"{MAX_HEADER_BYTES} bytes at most", got=len(text))
    return struct.pack("<Q", len(text)) + text


class StreamWriter:
    """Writes one file tensor after tensor, in the order of the plan; only what is handed over is ever in memory.

    Use as a context manager: leaving it normally checks that every planned byte was written and makes the file durable.
    """

    def __init__(self, path: Path, tensors: Sequence[PlannedTensor], metadata: Mapping[str, str]) -> None:
        self._path, self._pending, self._written = path, list(tensors), 0
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        try:
            self._write(header_bytes(tensors, metadata))
        except BaseException:
            os.close(self._fd)
            raise

    def __enter__(self) -> StreamWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                if self._pending:
                    raise EngineError("file closed before its plan was fulfilled", where=str(self._path), expected=self._pending[0].name)
                with _named_errors(self._path):
                    os.fsync(self._fd)
        finally:
            os.close(self._fd)

    def write(self, name: str, chunks: Iterable[bytes | bytearray | memoryview]) -> None:
        """The bytes of the next tensor of the plan.

        Raises:
            NoSpaceError: the file system is full.
            EngineError: another tensor is next, or the chunks have another size than planned.
        """
        planned = self._pending.pop(0)
        count = 0
        for chunk in chunks:
            self._write(chunk)
            count += len(chunk)
        if name != planned.name or count != planned.nbytes:
            raise EngineError("not as planned", where=str(self._path), expected=f"{planned.name}: {planned.nbytes}", got=f"{name}: {count}")

    def _write(self, data: bytes | bytearray | memoryview) -> None:
        view = memoryview(data)
        while view:
            with _named_errors(self._path):
                view = view[os.write(self._fd, view[: 1 << 30]) :]


@contextlib.contextmanager
def _named_errors(path: Path) -> Any:
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise NoSpaceError("no space left while writing", where=str(path)) from error
        raise ContainerError("cannot write", where=str(path), got=error.strerror) from error


def _parse_json(raw: bytes, path: Path) -> dict[str, Any]:
    if raw[:1] != b"{":
        raise HeaderError("header is not a JSON object", where=str(path), expected="{", got=repr(raw[:1]))

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            seen: set[str] = set()
            twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
            raise HeaderError("duplicate key", where=str(path), got=twice)
        return found

    try:
        header = json.loads(raw.decode("utf-8"), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise HeaderError("header is not valid JSON", where=str(path), got=error) from error
    assert isinstance(header, dict)  # it began with a brace
    return header


def _metadata(metadata: Any, path: Path) -> dict[str, str]:
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise HeaderError("metadata is not a map of strings", where=f"{path}: {METADATA_KEY}")
    return metadata


def _tensor(name: str, entry: Any, data_start: int, path: Path) -> StoredTensor:
    where = f"{path}: {name}"
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise HeaderError("malformed tensor entry", where=where, expected="dtype, shape, data_offsets", got=entry)
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        raise HeaderError("unknown dtype", where=where, expected=", ".join(DTYPE_BYTES), got=dtype)
    if not _counts(shape) or len(shape) > MAX_RANK:
        raise HeaderError("malformed shape", where=where, expected=f"at most {MAX_RANK} counts", got=shape)
    if not _counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise HeaderError("malformed offsets", where=where, expected="[begin, end]", got=offsets)
    nbytes = offsets[1] - offsets[0]
    if nbytes != _product(shape) * DTYPE_BYTES[dtype]:
        raise HeaderError("offsets disagree with shape and dtype", where=where, expected=_product(shape) * DTYPE_BYTES[dtype], got=nbytes)
    return StoredTensor(name, path, dtype, tuple(shape), data_start + offsets[0], nbytes)


def _check_coverage(tensors: Sequence[StoredTensor], data_start: int, size: int, path: Path) -> None:
    position, previous = data_start, "the header"
    for tensor in tensors:
        where = f"{path}: {tensor.name}"
        if tensor.offset < position:
            raise OverlapError(f"shares bytes with {previous}", where=where, expected=position, got=tensor.offset)
        if tensor.offset > position:
            raise HoleError(f"bytes after {previous} belong to no tensor", where=where, expected=position, got=tensor.offset)
        position, previous = tensor.offset + tensor.nbytes, tensor.name
    if position != size:
        short = position > size
        what = "file ends inside its tensors" if short else "file is longer than its tensors"
        raise TruncatedFileError(what, where=str(path), expected=f"{position} bytes", got=size)


def _counts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(v, int) and not isinstance(v, bool) and 0 <= v < LARGEST_COUNT for v in value)


def _product(shape: Iterable[int]) -> int:
    product = 1
    for extent in shape:
        product *= extent
    return product
