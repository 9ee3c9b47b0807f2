"""Hugging Face checkpoints as a source: float weights by role, a block of rows at a time.

Accepted dtypes are F32, BF16, F16, and F8_E4M3 with a `<name>_scale_inv` tensor that holds one factor per block of
128 × 128 weights. Nothing is memory-mapped and nothing is kept.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from colibri_jax.config import ModelConfig
from colibri_jax.container import checkpoints
from colibri_jax.container.directory import index_files, read_config, read_json
from colibri_jax.container.format import StoredTensor, read_bytes
from colibri_jax.errors import HeaderError, MissingFileError, MissingTensorError, NonFiniteWeightError, ShapeError, UnexpectedTensorError
from colibri_jax.quant import Float32Array
from colibri_jax.tensors import TensorSpec

FP8_BLOCK = 128
SCALE_SUFFIX = "_scale_inv"
INDEX_FILE = "model.safetensors.index.json"
ROW_BLOCK_BYTES = 32 << 20  # float32 bytes of one block of rows

_DTYPES: dict[str, Any] = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
}


@dataclasses.dataclass(frozen=True)
class SourceTensor:
    """One role in a checkpoint; `block_scales` only beside F8_E4M3."""

    spec: TensorSpec
    stored: StoredTensor
    block_scales: StoredTensor | None


class SourceCheckpoint:
    """A checkpoint whose tensors are all there, with the right shapes. Nothing is read yet."""

    def __init__(self, directory: Path, config: ModelConfig, raw_config: dict[str, Any], tensors: dict[str, SourceTensor]) -> None:
        self.directory, self.config, self.raw_config, self.tensors = directory, config, raw_config, tensors

    @classmethod
    def open(cls, path: str | Path) -> SourceCheckpoint:
        """Check a checkpoint directory against its `config.json`.

        Raises:
            MissingFileError, HeaderError and their kin: the files are not a checkpoint.
            MissingTensorError, UnexpectedTensorError, ShapeError: the files are not what the configuration asks for.
        """
        directory = Path(path)
        config, raw_config = read_config(directory)
        stored, _ = index_files(checkpoint_files(directory))
        named = checkpoints.named_specs(config)
        missing = [name for name in named if name not in stored]
        if missing:
            raise MissingTensorError(f"{len(missing)} tensors missing", where=str(directory), expected=missing[0], got="nothing")
        tensors: dict[str, SourceTensor] = {}
        for name, spec in named.items():
            tensors[spec.role] = _checked(spec, stored[name], stored.get(name + SCALE_SUFFIX))
        for name in stored.keys() - named.keys():
            scaled = stored.get(name.removesuffix(SCALE_SUFFIX))
            of_fp8 = name.endswith(SCALE_SUFFIX) and scaled is not None and scaled.dtype == "F8_E4M3"
            if not of_fp8 and not checkpoints.is_ignored(config, name):
                raise UnexpectedTensorError("the configuration does not explain this tensor", where=str(stored[name].path), got=name)
        return cls(directory, config, raw_config, tensors)

    def read(self, role: str) -> Float32Array:
        """One tensor as float32, in its own shape.

        Raises:
            NonFiniteWeightError: a value is NaN or infinite.
        """
        tensor = self.tensors[role]
        rows = list(self.blocks(role))
        return (rows[0] if len(rows) == 1 else np.concatenate(rows)).reshape(tensor.spec.shape)

    def blocks(self, role: str) -> Iterator[Float32Array]:
        """A tensor as float32 blocks [rows, cols] of at most 32 MiB (1-D tensors: one row), a multiple of 128 rows each."""
        spec = self.tensors[role].spec
        rows, cols = spec.shape if len(spec.shape) == 2 else (1, spec.shape[0])
        step = max(ROW_BLOCK_BYTES // (4 * cols) // FP8_BLOCK, 1) * FP8_BLOCK
        for begin in range(0, rows, step):
            yield self._rows(role, begin, min(begin + step, rows), cols)

    def _rows(self, role: str, begin: int, end: int, cols: int) -> Float32Array:
        tensor = self.tensors[role]
        values = _floats(tensor.stored, begin * cols, end * cols).reshape(end - begin, cols)
        if tensor.block_scales is not None:
            width = -(-cols // FP8_BLOCK)
            scales = _floats(tensor.block_scales, begin // FP8_BLOCK * width, -(-end // FP8_BLOCK) * width).reshape(-1, width)
            with np.errstate(over="ignore", invalid="ignore"):  # an overflow is found just below, with its place
                values = values * np.repeat(np.repeat(scales, FP8_BLOCK, axis=0)[: end - begin], FP8_BLOCK, axis=1)[:, :cols]
        if not np.isfinite(values).all():
            row, col = np.argwhere(~np.isfinite(values))[0]
            where = f"{tensor.stored.name}[{begin + row}, {col}]"
            raise NonFiniteWeightError("weight is not finite", where=where, expected="a number", got=float(values[row, col]))
        return values


def load_hf(path: str | Path) -> tuple[ModelConfig, dict[str, Float32Array]]:
    """A whole checkpoint in memory: its configuration, and float32 tensors by role, for the full-precision reference."""
    source = SourceCheckpoint.open(path)
    return source.config, {role: source.read(role) for role in source.tensors}


def checkpoint_files(directory: Path) -> list[Path]:
    """The safetensors files of a checkpoint: those its index names, or else all of them, sorted.

    Raises:
        MissingFileError: there is none, or the index names one that is absent.
        HeaderError: the index is malformed.
    """
    index = directory / INDEX_FILE
    if index.is_file():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(v, str) and Path(v).name == v for v in weight_map.values()):
            raise HeaderError("malformed shard index", where=str(index), expected="weight_map: tensor name to file name")
        return [directory / name for name in sorted(set(weight_map.values()))]
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise MissingFileError("no weights", where=str(directory), expected="*.safetensors")
    return files


def _checked(spec: TensorSpec, stored: StoredTensor, scales: StoredTensor | None) -> SourceTensor:
    where = f"{stored.path}: {stored.name}"
    if stored.dtype not in _DTYPES:
        raise ShapeError("unsupported source dtype", where=where, expected=", ".join(_DTYPES), got=stored.dtype)
    if stored.shape != spec.shape:
        raise ShapeError("wrong shape", where=where, expected=list(spec.shape), got=list(stored.shape))
    if stored.dtype != "F8_E4M3":
        return SourceTensor(spec, stored, None)
    if len(spec.shape) != 2 or scales is None:
        raise MissingTensorError("F8_E4M3 weights need block scales", where=where, expected=stored.name + SCALE_SUFFIX, got="nothing")
    expected = tuple(-(-extent // FP8_BLOCK) for extent in spec.shape)
    if scales.dtype not in ("F32", "BF16", "F16") or scales.shape != expected:
        raise ShapeError(
            "wrong block scales",
            where=f"{scales.path}: {scales.name}",
            expected=f"F32 {list(expected)}",
            got=f"{scales.dtype} {list(scales.shape)}",
        )
    return SourceTensor(spec, stored, scales)


def _floats(stored: StoredTensor, begin: int, end: int) -> Float32Array:
    dtype = _DTYPES[stored.dtype]
    data = read_bytes(stored, begin * dtype.itemsize, end * dtype.itemsize)
    return np.frombuffer(data, dtype).astype(np.float32)
