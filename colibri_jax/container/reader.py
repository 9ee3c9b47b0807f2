"""A container opened and checked: every tensor's place, format and shape is known before any buffer exists.

Containers of this package carry a format tag; those of colibri have none and are inferred. Of the latter, the indexers
and the MTP block may be absent (they are optional downloads there); of a tagged container nothing may.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

from colibri_jax.config import ModelConfig
from colibri_jax.container import checkpoints
from colibri_jax.container.directory import CONFIG_FILE, carried_files, generation_config, index_files, read_config
from colibri_jax.container.format import FileIndex, StoredTensor, read_bytes
from colibri_jax.container.formats import SCALE_SUFFIX, FoundBytes, infer_format, read_tags
from colibri_jax.errors import (
    IncompleteContainerError,
    MissingFileError,
    MissingTensorError,
    NonFiniteWeightError,
    OptionError,
    ShapeError,
    UnexpectedTensorError,
    UnknownFormatError,
)
from colibri_jax.quant import GROUP_SIZES, ByteArray, Float32Array, QuantizedMatrix, WeightFormat, unpack
from colibri_jax.tensors import TensorSpec, expert_roles, tensor_specs

STATE_FILE = "conversion-state.json"
PART_SUFFIX = ".part"


@dataclasses.dataclass(frozen=True)
class TensorEntry:
    """One tensor of a container.

    `shape` is the matrix's own, whatever the shape in the file; `scales` is set where the format keeps them apart.
    `offset` counts from the start of the file.
    """

    name: str
    path: Path
    offset: int
    nbytes: int
    format: WeightFormat
    shape: tuple[int, ...]
    scales: TensorEntry | None = None

    @property
    def total_bytes(self) -> int:
        """Bytes in the file, scales included."""
        return self.nbytes + (self.scales.nbytes if self.scales else 0)


@dataclasses.dataclass(frozen=True, eq=False)
class Container:
    """A container on disk. Open with `Container.open`.

    Attributes:
        path: the directory.
        config, raw_config: `config.json`, understood and as it is.
        entries: by role, in the order of use.
        missing: roles of optional tensors that an untagged container lacks.
        tagged: whether the files carry this package's format tag.
    """

    path: Path
    config: ModelConfig
    raw_config: dict[str, Any]
    entries: dict[str, TensorEntry]
    missing: tuple[str, ...]
    tagged: bool

    @classmethod
    def open(cls, path: str | Path, group_size: int | None = None) -> Container:
        """Check a directory against its `config.json` and index it.

        Args:
            path: the container.
            group_size: decides where byte counts of untagged int4 tensors fit several group sizes; 0 means one scale per row.

        Raises:
            IncompleteContainerError: a conversion into this directory has not finished.
            ContainerError: one of its other subclasses, by cause.
        """
        if group_size is not None and group_size not in (0, *GROUP_SIZES):
            raise OptionError("unknown group size", where="group_size", expected=f"0 or one of {GROUP_SIZES}", got=group_size)
        directory = Path(path)
        refuse_unfinished(directory)
        config, raw_config = read_config(directory)
        paths = sorted(directory.glob("*.safetensors"))
        if not paths:
            raise MissingFileError("no weights", where=str(directory), expected="*.safetensors")
        stored, files = index_files(paths)
        tags, tagged = _tags(files)
        entries: dict[str, TensorEntry] = {}
        missing: list[str] = []
        # One by one: a small file may claim more tensors than there is memory to list.
        named: dict[str, TensorSpec] = {}
        for spec in tensor_specs(config):
            name = checkpoints.checkpoint_name(config, spec.role)
            named[name] = spec
            if name in stored:
                entries[spec.role] = _entry(spec, stored[name], stored.get(name + SCALE_SUFFIX), tags.get(name), group_size)
            elif not tagged and len(missing) <= len(stored) and (checkpoints.is_mtp(config, spec.role) or ".indexer." in spec.role):
                missing.append(spec.role)
            else:
                raise MissingTensorError("tensor missing", where=str(directory), expected=name, got="nothing")
        _refuse_partial(config, named.values(), missing, directory)
        _refuse_strangers(config, stored, named, entries)
        return cls(directory, config, raw_config, entries, tuple(missing), tagged)

    @property
    def has_mtp(self) -> bool:
        """Whether the MTP block is there, its indexer aside."""
        return "mtp.norm" in self.entries

    def require_mtp(self) -> None:
        """Refuse to draft where that cannot work.

        Raises:
            OptionError: there is no MTP block, or not all of it.
            UnknownFormatError: a matrix of the block has fewer than 8 bits; names it.
        """
        if not self.runnable_config.n_mtp_layers:
            raise OptionError("the container has no MTP block", where=f"mtp, {self.path}", expected="a container with one", got="none")
        for role, entry in self.entries.items():
            if checkpoints.is_mtp(self.config, role) and entry.format.bits < 8:
                raise UnknownFormatError(
                    "an MTP block like this drafts in vain: of an int4 one's tokens 0 to 4 % are accepted, of an int8 one's 39 to 59 %",
                    where=f"mtp, {entry.path}: {entry.name}",
                    expected="int8",
                    got=entry.format.tag,
                )

    @property
    def has_indexers(self) -> bool:
        """Whether the trunk's indexers are there. Without them only contexts up to `index_topk` positions are computable."""
        return self.config.indexer is not None and "layers.0.indexer.wk" in self.entries

    @property
    def runnable_config(self) -> ModelConfig:
        """The configuration without what this container lacks.

        Without indexers attention is dense and the context ends at `index_topk`: up to there an indexer takes every position.
        """
        config = self.config
        mtp_indexer = f"layers.{config.n_layers}.indexer.wk"
        if config.n_mtp_layers and (not self.has_mtp or (self.has_indexers and mtp_indexer not in self.entries)):
            config = dataclasses.replace(config, n_mtp_layers=0)
        if config.indexer is not None and not self.has_indexers:
            config = dataclasses.replace(config, indexer=None, max_positions=min(config.max_positions, config.indexer.topk))
        return config

    @property
    def tokenizer_files(self) -> dict[str, Path]:
        """Tokenizer, chat template and generation files beside the weights, by file name."""
        return carried_files(self.path)

    @property
    def generation_config(self) -> dict[str, Any]:
        """`generation_config.json`, empty where there is none."""
        return generation_config(self.path)

    def entry(self, role: str) -> TensorEntry:
        """Where a role lies.

        Raises:
            MissingTensorError: the container does not have it.
        """
        if role not in self.entries:
            raise MissingTensorError("tensor missing", where=str(self.path), expected=role, got="nothing")
        return self.entries[role]

    def read(self, role: str) -> Float32Array | QuantizedMatrix:
        """One tensor: float32 in its own shape where the role's storage is float32, else the quantised matrix.

        Raises:
            MissingTensorError: the container does not have it.
            ReadError: the file did not deliver it.
            NonFiniteWeightError: a float32 value or a scale is NaN or infinite.
        """
        entry = self.entry(role)
        if entry.format.bits == 32:
            values = np.frombuffer(self.read_raw(entry), "<f4").reshape(entry.shape).astype(np.float32)
            return _finite(values, entry)
        rows, cols = entry.shape
        scales = None if entry.scales is None else np.frombuffer(self.read_raw(entry.scales), "<f4").astype(np.float32)
        matrix = unpack(self.read_raw(entry), scales, entry.format, rows, cols)
        _finite(matrix.scales, entry)
        # Containers of colibri quantise a projection that is float32 in the arithmetic here.
        return matrix.dequantize() if _is_float_matrix(role) else matrix

    def read_raw(self, entry: TensorEntry) -> ByteArray:
        """An entry's bytes as they lie in the file, uint8 [nbytes]."""
        stored = StoredTensor(entry.name, entry.path, "U8", (entry.nbytes,), entry.offset, entry.nbytes)
        return np.frombuffer(read_bytes(stored, 0, entry.nbytes), np.uint8)

    def expert_extents(self, layer: int, expert: int) -> tuple[TensorEntry, TensorEntry, TensorEntry]:
        """Where one routed expert's gate, up and down matrices lie."""
        gate, up, down = (self.entry(role) for role in expert_roles(layer, expert))
        return gate, up, down


def is_container(path: Path) -> bool:
    """Whether a directory holds a container (shards named `out-…`), finished or not, rather than a checkpoint.

    Raises:
        MissingFileError: there is no such directory.
    """
    if not path.is_dir():
        raise MissingFileError("no such directory", where=str(path))
    return any(path.glob("out-*.safetensors*")) or (path / STATE_FILE).exists()


def refuse_unfinished(directory: Path) -> None:
    if not directory.is_dir():
        raise MissingFileError("no such directory", where=str(directory))
    parts = sorted(directory.glob(f"*{PART_SUFFIX}"))
    if parts or (directory / STATE_FILE).exists():
        raise IncompleteContainerError(
            "a conversion into this directory has not finished; run it again to continue",
            where=str(directory),
            expected=f"{CONFIG_FILE} and no {STATE_FILE}",
            got=parts[0].name if parts else STATE_FILE,
        )


def _tags(files: list[FileIndex]) -> tuple[dict[str, WeightFormat], bool]:
    found = {file.path: read_tags(file) for file in files}
    untagged = [path for path, formats in found.items() if formats is None]
    if untagged and len(untagged) < len(found):
        raise UnknownFormatError("file without a format tag among tagged ones", where=str(untagged[0]))
    return {name: fmt for formats in found.values() for name, fmt in (formats or {}).items()}, not untagged


def _entry(spec: TensorSpec, stored: StoredTensor, scales: StoredTensor | None, tag: WeightFormat | None, group: int | None) -> TensorEntry:
    where = f"{stored.path}: {stored.name}"
    if stored.dtype == "F32" and (tag is None or tag.bits == 32):
        if stored.shape != spec.shape:
            raise ShapeError("wrong shape", where=where, expected=list(spec.shape), got=list(stored.shape))
        fmt = WeightFormat(32)
    elif stored.dtype != "U8" or len(spec.shape) != 2:
        raise ShapeError("wrong dtype", where=where, expected="F32" if spec.storage == "f32" else "U8 (quantised)", got=stored.dtype)
    else:
        fmt = _quantised_format(spec, stored, scales, tag, group)
    _refuse_unusable(spec, fmt, where)
    beside = None
    if fmt.bits != 32 and fmt.layout == "row_major":
        assert scales is not None
        rows, cols = spec.shape
        scale_shape = (rows, fmt.scale_count(rows, cols) // rows)
        beside = TensorEntry(scales.name, scales.path, scales.offset, scales.nbytes, WeightFormat(32), scale_shape)
    return TensorEntry(stored.name, stored.path, stored.offset, stored.nbytes, fmt, spec.shape, beside)


def _quantised_format(
    spec: TensorSpec, stored: StoredTensor, scales: StoredTensor | None, tag: WeightFormat | None, group: int | None
) -> WeightFormat:
    rows, cols = spec.shape
    where = f"{stored.path}: {stored.name}"
    if tag is None or tag.layout == "row_major":
        if scales is None:
            raise MissingTensorError("quantised weights without scales", where=where, expected=stored.name + SCALE_SUFFIX, got="nothing")
        if scales.dtype != "F32":
            raise ShapeError("wrong dtype", where=f"{scales.path}: {scales.name}", expected="F32", got=scales.dtype)
    count = 0 if scales is None else scales.nbytes // 4
    if tag is None:
        found = FoundBytes(stored.name, rows, cols, stored.nbytes, count)
        return infer_format(found, spec.storage, group)
    expected = (tag.weight_bytes(rows, cols), tag.scale_count(rows, cols))
    if expected != (stored.nbytes, count):
        raise ShapeError(
            f"byte counts do not fit {tag.tag} [{rows}, {cols}]",
            where=where,
            expected=f"{expected[0]} bytes, {expected[1]} scales",
            got=f"{stored.nbytes} bytes, {count} scales",
        )
    return tag


def _is_float_matrix(role: str) -> bool:
    return role.endswith(".indexer.weights_proj")


def _refuse_unusable(spec: TensorSpec, fmt: WeightFormat, where: str) -> None:
    """What no backend can compute with is refused here, by name, and not in the middle of a run."""
    if spec.storage == "f32":
        usable = fmt.bits == 32 or (_is_float_matrix(spec.role) and fmt.layout == "row_major")
        expected = "f32"
    elif spec.storage in ("int4_dequant", "int8_dequant"):
        usable, expected = fmt.bits != 32 and fmt.layout == "row_major", "int4 or int8, row-major"
    else:
        usable, expected = fmt.bits != 32, "int4 or int8"
    if not usable:
        raise UnknownFormatError(f"{spec.role} cannot be used in this format", where=where, expected=expected, got=fmt.tag)


def _refuse_partial(config: ModelConfig, specs: Any, missing: list[str], directory: Path) -> None:
    """Optional tensors come in sets: the trunk's indexers, the MTP block, the MTP block's indexer."""

    def group(role: str) -> str | None:
        is_indexer, is_mtp = ".indexer." in role, checkpoints.is_mtp(config, role)
        return ("MTP indexer" if is_indexer else "MTP block") if is_mtp else ("indexers" if is_indexer else None)

    absent = {group(role) for role in missing}
    lost = set(missing)
    for spec in specs:
        if group(spec.role) in absent and spec.role not in lost:
            first = next(role for role in missing if group(role) == group(spec.role))
            raise MissingTensorError(
                f"a part of the {group(spec.role)} is missing",
                where=str(directory),
                expected=checkpoints.checkpoint_name(config, first),
                got="nothing",
            )


def _refuse_strangers(
    config: ModelConfig, stored: dict[str, StoredTensor], named: dict[str, TensorSpec], entries: dict[str, TensorEntry]
) -> None:
    explained = {entry.scales.name for entry in entries.values() if entry.scales is not None}
    for name in stored.keys() - named.keys() - explained:
        if not checkpoints.is_ignored(config, name.removesuffix(SCALE_SUFFIX)):
            raise UnexpectedTensorError("the configuration does not explain this tensor", where=str(stored[name].path), got=name)


def _finite(values: Float32Array, entry: TensorEntry) -> Float32Array:
    if not np.isfinite(values).all():
        index = np.argwhere(~np.isfinite(values))[0].tolist()
        raise NonFiniteWeightError("value is not finite", where=f"{entry.path}: {entry.name}{index}", expected="a number", got="NaN or Inf")
    return values
