"""A Hugging Face checkpoint becomes a container: planned first, then written file by file, resumable, never overwriting.

Each file is written under a temporary name, made durable and then renamed. `config.json` comes last, and the state file
goes after it: a directory with a state file, a temporary file or no `config.json` is not a container.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from colibri_jax.container.directory import CONFIG_FILE, carried_files
from colibri_jax.container.format import StreamWriter
from colibri_jax.container.plan import (
    DEFAULT_SHARD_BYTES,
    ConversionPlan,
    PlannedMatrix,
    PlannedShard,
    check_options,
    fingerprint,
    plan_shards,
)
from colibri_jax.container.reader import PART_SUFFIX, STATE_FILE
from colibri_jax.container.source import SourceCheckpoint
from colibri_jax.errors import ContainerError, NoSpaceError, OutputExistsError, ScaleRangeError
from colibri_jax.quant import DEFAULT_GROUP_SIZE, Layout, ScaleType, pack, quantize

Progress = Callable[[int, int, str], None]


def plan_conversion(
    source: str | Path,
    target: str | Path,
    *,
    layout: Layout = "rows16",
    group_size: int = DEFAULT_GROUP_SIZE,
    scales: ScaleType = "f32",
    shard_bytes: int = DEFAULT_SHARD_BYTES,
) -> ConversionPlan:
    """Check source and target and say what would be written. Nothing is created and no weights are read.

    Args:
        source: Hugging Face checkpoint directory.
        target: output directory: absent, empty, or the unfinished output of the same conversion.
        layout: "rows16" for this package; "row_major" is colibri's layout.
        group_size: weights per scale of int4 matrices.
        scales: "f16" stores the scales of interleaved int4 in half the bytes (layout "rows16" only).
        shard_bytes: most bytes of tensors in one file (more only where one expert alone is larger).

    Raises:
        OutputExistsError: the target is a finished container, another conversion's output, or holds other files.
        ConfigError, ContainerError: the source is not a complete checkpoint of a known family.
    """
    check_options(layout, group_size, scales, shard_bytes)
    checkpoint = SourceCheckpoint.open(source)
    directory = Path(target)
    identity = fingerprint(checkpoint, layout, group_size, scales, shard_bytes)
    shards = plan_shards(checkpoint.config, layout, group_size, shard_bytes, scales=scales)
    finished = _finished_files(directory, shards, identity)
    return ConversionPlan(checkpoint, directory, layout, group_size, scales, shard_bytes, shards, finished, identity)


def run_conversion(plan: ConversionPlan, progress: Progress | None = None) -> None:
    """Carry out a plan; on return the target is a finished container.

    An interrupted run leaves an unfinished one, which a new plan of the same conversion continues.

    Args:
        plan: of `plan_conversion`.
        progress: called after every tensor with (tensor bytes done, all tensor bytes, tensor name).

    Raises:
        NoSpaceError: the file system cannot hold the rest, found before or while writing.
        OutputExistsError: another process is writing this output, or it changed since the plan was made.
        NonFiniteWeightError: a source weight is NaN or infinite; it is never quantised silently.
        ScaleRangeError: a group needs a scale that float16 cannot hold.
    """
    report = progress or (lambda done, total, name: None)
    with _system_errors(plan.target), _claimed(plan):
        _check_space(plan)
        done = 0
        for shard in plan.shards:
            if shard.name in plan.finished:
                done += shard.data_bytes
                report(done, plan.total_bytes, shard.name)
            else:
                done = _write_shard(plan, shard, done, report)
        for name, path in carried_files(plan.source.directory).items():
            _copy(path, plan.target / name)
        _copy(plan.source.directory / CONFIG_FILE, plan.target / CONFIG_FILE)
        (plan.target / STATE_FILE).unlink()
        _sync_directory(plan.target)


def _write_shard(plan: ConversionPlan, shard: PlannedShard, done: int, report: Progress) -> int:
    part = plan.target / (shard.name + PART_SUFFIX)
    try:
        with StreamWriter(part, shard.tensors, shard.metadata) as writer:
            for matrix in shard.matrices:
                _write_matrix(plan.source, matrix, writer)
                done += matrix.nbytes
                report(done, plan.total_bytes, matrix.tensors[0].name)
    except NoSpaceError:
        part.unlink()  # it would be written anew anyway, and a full disk helps nobody
        raise
    part.rename(plan.target / shard.name)
    _sync_directory(plan.target)
    return done


def _write_matrix(source: SourceCheckpoint, matrix: PlannedMatrix, writer: StreamWriter) -> None:
    """Stream one matrix, a block of rows at a time: rows are quantised independently, and blocks are multiples of 16 rows."""
    role, fmt = matrix.spec.role, matrix.format
    if fmt.bits == 32:
        writer.write(matrix.tensors[0].name, (block.astype("<f4").tobytes() for block in source.blocks(role)))
        return
    scales: list[bytes] = []

    def packed() -> Iterator[memoryview]:
        first = 0
        for block in source.blocks(role):
            try:
                quantised = quantize(block, fmt)
            except ScaleRangeError as error:
                where = f"{source.tensors[role].stored.path}: {matrix.tensors[0].name}, from row {first} on: {error.where}"
                raise ScaleRangeError(error.what, where=where, expected=error.expected, got=error.got) from error
            first += len(block)
            data, separate = pack(quantised, fmt.layout, fmt.scales)
            if separate is not None:
                scales.append(separate.astype("<f4").tobytes())
            yield np.ascontiguousarray(data).data

    writer.write(matrix.tensors[0].name, packed())
    if len(matrix.tensors) == 2:
        writer.write(matrix.tensors[1].name, scales)


def _finished_files(target: Path, shards: tuple[PlannedShard, ...], identity: dict[str, Any]) -> frozenset[str]:
    """Files of the plan that an earlier run of the same conversion completed; refuses any other content of the target."""
    if target.exists() and not target.is_dir():
        raise OutputExistsError("output is not a directory", where=str(target))
    present = {path.name for path in target.iterdir()} if target.exists() else set()
    present.discard(STATE_FILE + PART_SUFFIX)  # a run that was stopped before it wrote anything else
    if STATE_FILE not in present:
        if present:
            what = "a finished container is never overwritten" if CONFIG_FILE in present else "output directory is not empty"
            raise OutputExistsError(what, where=str(target), expected="an absent or empty directory", got=", ".join(sorted(present)[:5]))
        return frozenset()
    try:
        state = json.loads((target / STATE_FILE).read_text(encoding="utf-8"))
    except ValueError:
        state = None
    if state != identity:
        raise OutputExistsError(
            "unfinished output of another conversion (other options, or the source has changed)",
            where=str(target),
            expected=_brief(identity),
            got=_brief(state),
        )
    finished = set()
    for shard in shards:
        if shard.name in present:
            size = (target / shard.name).stat().st_size
            if size != shard.file_bytes:
                where = str(target / shard.name)
                raise OutputExistsError("finished file has changed", where=where, expected=f"{shard.file_bytes} bytes", got=size)
            finished.add(shard.name)
    return frozenset(finished)


@contextlib.contextmanager
def _claimed(plan: ConversionPlan) -> Iterator[None]:
    """Create or take over the state file, and hold its lock: two conversions never write one directory."""
    path = plan.target / STATE_FILE
    plan.target.mkdir(parents=True, exist_ok=True)
    if _finished_files(plan.target, plan.shards, plan.fingerprint) != plan.finished:
        raise OutputExistsError("output has changed since the plan was made", where=str(plan.target))
    if not path.exists():
        _replace(path, json.dumps(plan.fingerprint, indent=1).encode())
    with path.open("rb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise OutputExistsError("another conversion is writing this directory", where=str(plan.target)) from error
        yield


def _check_space(plan: ConversionPlan) -> None:
    reusable = sum(path.stat().st_size for path in plan.target.glob(f"*{PART_SUFFIX}"))
    free = shutil.disk_usage(plan.target).free + reusable
    if plan.remaining_bytes > free:
        raise NoSpaceError("not enough space for the output", where=str(plan.target), expected=f"{plan.remaining_bytes} bytes", got=free)


def _copy(source: Path, target: Path) -> None:
    _replace(target, source.read_bytes())


def _replace(path: Path, data: bytes) -> None:
    """Put a small file in place in one step, durably."""
    part = path.with_name(path.name + PART_SUFFIX)
    with part.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    part.rename(path)
    _sync_directory(path.parent)


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _system_errors(target: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise NoSpaceError("no space left while writing", where=str(target)) from error
        raise ContainerError("cannot write the output", where=str(target), got=error.strerror) from error


def _brief(state: Any) -> str:
    if not isinstance(state, dict):
        return "an unreadable state file"
    return ", ".join(f"{key}={value}" for key, value in state.items() if key != "files") + f", {len(state.get('files', {}))} files"
