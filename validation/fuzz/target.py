"""What the fuzzer asks of the container reader: any directory opens, or is refused by a ColibriError, within memory like its own size."""

from __future__ import annotations

import contextlib
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from colibri_jax.container import format as container_format
from colibri_jax.container import reader
from colibri_jax.container.reader import Container
from colibri_jax.errors import ColibriError

# A parsed JSON text takes up to 40 bytes for each of its own ("[]," becomes an empty list and a pointer to it). The constant covers
# what a refusal costs whatever the size: the message, the exceptions, regular expressions compiled at the first need.
BYTES_PER_FILE_BYTE = 64
CONSTANT_BYTES = 1 << 20

STAGES = ("config parsed", "header parsed", "header explains the file", "opened", "read")


class AllocationError(AssertionError):
    """The reader allocated more than its files account for."""


class Observer:
    """Counts how far inputs come, by watching the functions that the reader goes through."""

    def __init__(self) -> None:
        self.reached: Counter[str] = Counter()
        self.refusals: Counter[str] = Counter()
        self._seen: set[str] = set()

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Hooks in place."""
        before = reader.read_config, container_format._metadata, reader._tags

        def read_config(*arguments: object) -> object:
            result = before[0](*arguments)  # type: ignore[arg-type]
            self._seen.add("config parsed")
            return result

        def metadata(*arguments: object) -> object:
            self._seen.add("header parsed")
            return before[1](*arguments)  # type: ignore[arg-type]

        def tags(*arguments: object) -> object:
            self._seen.add("header explains the file")
            return before[2](*arguments)  # type: ignore[arg-type]

        reader.read_config, container_format._metadata, reader._tags = read_config, metadata, tags  # type: ignore[assignment]
        try:
            yield
        finally:
            reader.read_config, container_format._metadata, reader._tags = before

    def run(self, directory: Path, group_size: int | None, which: int, measured: bool) -> str:
        """Open a directory and read one or two of its tensors; the name of the error that refused it, or an empty string.

        Raises:
            AllocationError: the peak of memory, where `measured`, is above `BYTES_PER_FILE_BYTE` of the files and the constant.
            Exception: whatever the reader raised that is no ColibriError.
        """
        self._seen = set()
        if measured:
            tracemalloc.start(1)
        try:
            refusal = self._open_and_read(directory, group_size, which)
        finally:
            if measured:
                peak = tracemalloc.get_traced_memory()[1]
                tracemalloc.stop()
        self.reached.update(self._seen)
        if measured:
            allowed = CONSTANT_BYTES + BYTES_PER_FILE_BYTE * sum(path.stat().st_size for path in directory.iterdir())
            if peak > allowed:
                raise AllocationError(f"{peak} bytes allocated, {allowed} allowed")
        return refusal

    def _open_and_read(self, directory: Path, group_size: int | None, which: int) -> str:
        try:
            container = Container.open(directory, group_size)
            self._seen.add("opened")
            roles = list(container.entries)
            assert container.runnable_config.n_layers == container.config.n_layers
            for role in {roles[which % len(roles)], roles[(which * 7 + 3) % len(roles)]}:
                container.read(role)
                self._seen.add("read")
            assert isinstance(container.generation_config, dict)
        except ColibriError as error:
            self.refusals[type(error).__name__] += 1
            str(error)  # can be printed
            return type(error).__name__
        return ""


class Directory:
    """A directory that is rewritten for every input; files that did not change stay."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._present: dict[str, bytes] = {}

    def write(self, files: dict[str, bytes]) -> None:
        """Make the directory hold exactly these files."""
        for name in self._present.keys() - files.keys():
            (self.path / name).unlink()
        for name, content in files.items():
            if self._present.get(name) != content:
                (self.path / name).write_bytes(content)
        self._present = files
