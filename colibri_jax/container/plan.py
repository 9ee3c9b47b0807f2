"""What a conversion will write: every tensor's format, every file's contents and size, before anything is read."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from colibri_jax.config import ModelConfig
from colibri_jax.container import checkpoints
from colibri_jax.container.directory import CONFIG_FILE, carried_files
from colibri_jax.container.format import PlannedTensor, header_bytes
from colibri_jax.container.formats import SCALE_SUFFIX, FoundBytes, infer_format, tag_metadata
from colibri_jax.container.source import INDEX_FILE, SourceCheckpoint, checkpoint_files
from colibri_jax.errors import AmbiguousFormatError, OptionError
from colibri_jax.quant import GROUP_SIZES, SCALE_DTYPES, Layout, ScaleType, WeightFormat
from colibri_jax.tensors import Storage, TensorSpec, tensor_specs

DEFAULT_SHARD_BYTES = 4 << 30
_FILE_STEM: dict[checkpoints.ShardKind, str] = {"main": "out", "mtp": "out-mtp", "idx": "out-idx"}


@dataclasses.dataclass(frozen=True)
class PlannedMatrix:
    """One role: its format, and the one or two tensors of the file that hold it."""

    spec: TensorSpec
    format: WeightFormat
    tensors: tuple[PlannedTensor, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of weights and scales."""
        return sum(tensor.nbytes for tensor in self.tensors)


@dataclasses.dataclass(frozen=True)
class PlannedShard:
    """One output file."""

    name: str
    matrices: tuple[PlannedMatrix, ...]

    @property
    def tensors(self) -> tuple[PlannedTensor, ...]:
        """In file order."""
        return tuple(tensor for matrix in self.matrices for tensor in matrix.tensors)

    @property
    def metadata(self) -> dict[str, str]:
        """The format tag."""
        return tag_metadata({m.tensors[0].name: m.format for m in self.matrices if _needs_tag(m)})

    @property
    def data_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(matrix.nbytes for matrix in self.matrices)

    @property
    def file_bytes(self) -> int:
        """Size of the file."""
        return len(header_bytes(self.tensors, self.metadata)) + self.data_bytes


@dataclasses.dataclass(frozen=True)
class ConversionPlan:
    """A conversion that has been checked and may run. `finished` are the files that an earlier run completed."""

    source: SourceCheckpoint
    target: Path
    layout: Layout
    group_size: int
    scales: ScaleType
    shard_bytes: int
    shards: tuple[PlannedShard, ...]
    finished: frozenset[str]
    fingerprint: dict[str, Any]
    """Options and source files: what has to be the same for a later run to continue this one."""

    @property
    def total_bytes(self) -> int:
        """Bytes of tensors in the whole output."""
        return sum(shard.data_bytes for shard in self.shards)

    @property
    def remaining_bytes(self) -> int:
        """Size of the files that are still to be written."""
        return sum(shard.file_bytes for shard in self.shards if shard.name not in self.finished)

    def lines(self) -> list[str]:
        """The plan in words, one line each."""
        source_bytes = sum(tensor.stored.nbytes for tensor in self.source.tensors.values())
        formats: dict[str, list[int]] = {}
        for shard in self.shards:
            for matrix in shard.matrices:
                row = formats.setdefault(matrix.format.tag, [0, 0])
                row[0] += 1
                row[1] += matrix.nbytes
        opens = "colibri and colibri_jax" if self.layout == "row_major" else "colibri_jax only (rows interleaved)"
        return [
            f"source   {self.source.directory} ({self.source.config.family}, {_size(source_bytes)} of weights)",
            f"target   {self.target} ({_size(self.total_bytes)} in {len(self.shards)} files)",
            f"layout   {self.layout}, int4 groups of {self.group_size}, {self.scales} scales; opens in {opens}",
            *(f"         {tag:<20} {count:>7} tensors {_size(nbytes):>12}" for tag, (count, nbytes) in sorted(formats.items())),
            f"to write {_size(self.remaining_bytes)}"
            + (f"; {len(self.finished)} of {len(self.shards)} files are there from an earlier run" if self.finished else ""),
        ]


def check_options(layout: str, group_size: int, scales: str, shard_bytes: int) -> None:
    """Refuse options outside their domains, and float16 scales where the layout has none.

    Raises:
        OptionError: an option is.
    """
    if layout not in ("rows16", "row_major"):
        raise OptionError("unknown layout", where="layout", expected="rows16 or row_major", got=layout)
    if group_size not in GROUP_SIZES:
        raise OptionError("unknown group size", where="group_size", expected=f"one of {GROUP_SIZES}", got=group_size)
    if scales not in SCALE_DTYPES:
        raise OptionError("unknown type of scales", where="scales", expected=" or ".join(SCALE_DTYPES), got=scales)
    if scales != "f32" and layout != "rows16":
        raise OptionError("this layout has float32 scales only", where="scales", expected="f32, or layout rows16", got=scales)
    if shard_bytes < 1:
        raise OptionError("not positive", where="shard_bytes", expected="1 or more", got=shard_bytes)


def plan_shards(
    config: ModelConfig, layout: Layout, group_size: int, shard_bytes: int, *, scales: ScaleType = "f32"
) -> tuple[PlannedShard, ...]:
    """Distribute a model's tensors over files of at most `shard_bytes` each; an expert is never split between files."""
    units: dict[checkpoints.ShardKind, list[list[PlannedMatrix]]] = {"main": [], "mtp": [], "idx": []}
    previous = ""
    for spec in tensor_specs(config):
        kind = checkpoints.shard_kind(config, spec.role)
        matrix = _plan_matrix(config, spec, layout, group_size, scales)
        expert = spec.role.rpartition(".")[0] if ".experts." in spec.role else ""
        if expert and expert == previous:
            units[kind][-1].append(matrix)
        else:
            units[kind].append([matrix])
        previous = expert
    return tuple(shard for kind in units for shard in _fill(_FILE_STEM[kind], units[kind], shard_bytes))


def fingerprint(source: SourceCheckpoint, layout: Layout, group_size: int, scales: ScaleType, shard_bytes: int) -> dict[str, Any]:
    """Names, sizes and modification times of everything that a conversion reads, and its options."""
    directory = source.directory
    paths = [directory / CONFIG_FILE, *carried_files(directory).values(), *checkpoint_files(directory)]
    if (directory / INDEX_FILE).is_file():
        paths.append(directory / INDEX_FILE)
    files = {path.name: [path.stat().st_size, path.stat().st_mtime_ns] for path in sorted(paths)}
    options = {"layout": layout, "group_size": group_size, "scales": scales, "shard_bytes": shard_bytes}
    return {"version": 2, **options, "files": files}


def target_format(storage: Storage, layout: Layout, group_size: int, scales: ScaleType = "f32") -> WeightFormat:
    """The format in which a storage class is written. What is dequantised is never interleaved: it is read row by row.

    `scales` is for int4 that is interleaved; everything else has float32 ones.
    """
    if storage == "f32":
        return WeightFormat(32)
    placed: Layout = "row_major" if storage.endswith("_dequant") else layout
    if storage.startswith("int4"):
        return WeightFormat(4, group_size, placed, scales if placed == "rows16" else "f32")
    return WeightFormat(8, 0, placed)


def _plan_matrix(config: ModelConfig, spec: TensorSpec, layout: Layout, group_size: int, scales: ScaleType) -> PlannedMatrix:
    name = checkpoints.checkpoint_name(config, spec.role)
    fmt = target_format(spec.storage, layout, group_size, scales)
    if fmt.bits == 32:
        return PlannedMatrix(spec, fmt, (PlannedTensor(name, "F32", spec.shape),))
    rows, cols = spec.shape
    tensors = [PlannedTensor(name, "U8", (fmt.weight_bytes(rows, cols),))]
    if fmt.scale_count(rows, cols):
        tensors.append(PlannedTensor(name + SCALE_SUFFIX, "F32", (fmt.scale_count(rows, cols),)))
    return PlannedMatrix(spec, fmt, tuple(tensors))


def _needs_tag(matrix: PlannedMatrix) -> bool:
    """Whether byte counts alone would not give a reader this format."""
    if matrix.format.bits == 32:
        return False
    if matrix.format.layout != "row_major":
        return True
    rows, cols = matrix.spec.shape
    found = FoundBytes(matrix.tensors[0].name, rows, cols, matrix.format.weight_bytes(rows, cols), matrix.format.scale_count(rows, cols))
    try:
        return infer_format(found, matrix.spec.storage, None) != matrix.format
    except AmbiguousFormatError:
        return True


def _fill(stem: str, units: list[list[PlannedMatrix]], shard_bytes: int) -> Iterator[PlannedShard]:
    pending: list[PlannedMatrix] = []
    size = number = 0
    for unit in units:
        unit_bytes = sum(matrix.nbytes for matrix in unit)
        if pending and size + unit_bytes > shard_bytes:
            yield PlannedShard(f"{stem}-{number:05d}.safetensors", tuple(pending))
            pending, size, number = [], 0, number + 1
        pending += unit
        size += unit_bytes
    if pending:
        yield PlannedShard(f"{stem}-{number:05d}.safetensors", tuple(pending))


def _size(nbytes: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.2f} GiB"
