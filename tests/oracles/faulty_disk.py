"""Slow model of reads that go wrong: which system calls bring one expert, what each delivers, and how that ends."""

from __future__ import annotations

import dataclasses
import itertools

BLOCK = 4096
STALL_LIMIT = 8
AGAIN = "Resource temporarily unavailable"

Part = tuple[int, int, int, str]  # file, offset, bytes, tensor


@dataclasses.dataclass
class Fault:
    """As in native/src/io/faults.h."""

    kind: str
    file: int
    offset: int
    bytes: int = 0
    times: int = 1


@dataclasses.dataclass(frozen=True)
class Failure:
    """What the error says."""

    file: int
    tensor: str
    offset: int
    got: str


@dataclasses.dataclass
class Account:
    """What reads of one or more experts added to the counters."""

    bytes_read: int = 0
    retries: int = 0
    useful_bytes: int = 0


@dataclasses.dataclass
class Disk:
    """Files by size, read directly (whole blocks) or not, and faults in the order in which they were added."""

    sizes: list[int]
    direct: bool
    faults: list[Fault] = dataclasses.field(default_factory=list)

    def read_expert(self, parts: list[Part], account: Account) -> list[Failure]:
        """Reads all ranges of one expert; how they failed, nothing where all arrived."""
        failures = [failure for file, begin, end in ranges(parts) if (failure := self._read(parts, file, begin, end, account))]
        if not failures:
            account.useful_bytes += sum(part[2] for part in parts)
        return failures

    def _read(self, parts: list[Part], file: int, begin: int, end: int, account: Account) -> Failure | None:
        start, stop = begin // BLOCK * BLOCK, -(-end // BLOCK) * BLOCK
        arrived = calls = stalled = refused = 0
        while arrived < end - start:
            account.retries += calls > 0
            calls += 1
            at = arrived // BLOCK * BLOCK if self.direct else arrived
            got = self._pread(file, start + at, stop)
            if got == "interrupted":
                continue
            if got == AGAIN and (refused := refused + 1) < STALL_LIMIT:
                continue
            if isinstance(got, str) or got == 0:
                return self._failure(parts, file, start, arrived, got if isinstance(got, str) else "end of file")
            account.bytes_read += got
            refused = 0
            stalled = stalled + 1 if at + got <= arrived else 0
            if stalled == STALL_LIMIT:
                return self._failure(parts, file, start, arrived, "the same part of a block again and again")
            arrived = max(arrived, at + got)
        return None

    def _pread(self, file: int, offset: int, stop: int) -> int | str:
        """Bytes delivered, "interrupted", or the text of an error."""
        available = min(stop, self.sizes[file]) - offset
        for fault in self.faults:
            if fault.times and fault.file == file and offset <= fault.offset < stop:
                fault.times -= 1
                texts = {"interrupted": "interrupted", "again": AGAIN, "io_error": "Input/output error", "invalid": "Invalid argument"}
                if fault.kind in texts:
                    return texts[fault.kind]
                return {"end_of_file": 0, "short": min(available, fault.bytes), "delay": available}[fault.kind]
        return available

    @staticmethod
    def _failure(parts: list[Part], file: int, start: int, arrived: int, got: str) -> Failure:
        there = sorted((part for part in parts if part[0] == file), key=lambda part: part[1])
        tensor = next((part[3] for part in there if start + arrived < part[1] + part[2]), there[-1][3])
        return Failure(file, tensor, start + arrived, f"{got} after {arrived} bytes")


def ranges(parts: list[Part]) -> list[tuple[int, int, int]]:
    """File, begin and end of each read: one per file where that reads at most a quarter more, else one per part."""
    found = []
    for file in sorted({part[0] for part in parts}):
        there = sorted((part[1], part[1] + part[2]) for part in parts if part[0] == file)
        begin, end = there[0][0], max(end for _, end in there)
        if (end - begin) * 4 <= sum(b - a for a, b in there) * 5:
            found.append((file, begin, end))
            continue
        for (_, before), (after, _) in itertools.pairwise(there):
            assert before // BLOCK < after // BLOCK - 1, "parts that share or touch blocks are not modelled"
        found += [(file, a, b) for a, b in there]
    return found
