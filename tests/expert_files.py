"""Files of random experts, written part by part, with the description that a store takes and the bytes it must hand out."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Literal

import numpy as np

from colibri_jax import quant
from colibri_jax.quant import QuantizedMatrix, WeightFormat

Arrangement = Literal["adjacent", "scattered", "two_files"]
PARTS = ("gate", "up", "down")
HEADER = 3 * 4096 + 8  # in front of the experts: their offsets are off every block, and the trial read touches none of them


@dataclasses.dataclass
class ExpertFiles:
    """`index` is the store's description [layer][expert]; `oracle[layer][expert]` the rows16 bytes of gate, up and down."""

    files: list[str]
    index: list[list[dict[str, Any]]]
    oracle: list[list[tuple[bytes, bytes, bytes]]]

    @property
    def experts(self) -> int:
        return len(self.index[0])

    def expert_bytes(self) -> int:
        return sum(extent[2] for extent in extents(self.index[0][0]))


def extents(expert: dict[str, Any]) -> list[tuple[int, int, int, str]]:
    """All parts of one expert: file, offset, bytes, tensor."""
    return [expert[part][kind] for part in PARTS for kind in ("weights", "scales") if expert[part][kind] is not None]


def random_matrix(rng: np.random.Generator, rows: int, cols: int, fmt: WeightFormat) -> QuantizedMatrix:
    """Every value of the width occurs, -8 and -128 included."""
    low, high = (-8, 8) if fmt.bits == 4 else (-128, 128)
    groups = fmt.groups(cols) if fmt.group_size else 1
    scales = rng.standard_normal((rows, groups)).astype(fmt.scale_dtype).astype(np.float32)
    return QuantizedMatrix(rng.integers(low, high, (rows, cols), dtype=np.int8), scales, fmt.group_size, 8 if fmt.bits == 8 else 4)


def write_experts(
    folder: Path,
    fmt: WeightFormat,
    *,
    layers: int = 2,
    experts: int = 6,
    hidden: int = 72,
    width: int = 40,
    arrangement: Arrangement = "adjacent",
    gap: int = 40_000,
    seed: int = 0,
) -> ExpertFiles:
    """Writes the files; the last expert ends the file, off a block. `gap` bytes lie before each part when scattered."""
    rng = np.random.default_rng(seed)
    paths = [folder / "experts-0.bin", folder / "experts-1.bin"]
    contents = [bytearray(rng.bytes(HEADER)), bytearray(rng.bytes(HEADER))]
    index: list[list[dict[str, Any]]] = []
    oracle: list[list[tuple[bytes, bytes, bytes]]] = []

    def append(data: bytes, name: str, part: int) -> tuple[int, int, int, str]:
        file = int(arrangement == "two_files" and part >= 3)
        if arrangement == "scattered":
            contents[file] += rng.bytes(gap)
        offset = len(contents[file])
        contents[file] += data
        return (file, offset, len(data), name)

    for layer in range(layers):
        index.append([])
        oracle.append([])
        for expert in range(experts):
            described: dict[str, Any] = {}
            packed = []
            for i, part in enumerate(PARTS):
                rows, cols = (hidden, width) if part == "down" else (width, hidden)
                matrix = random_matrix(rng, rows, cols, fmt)
                name = f"layers.{layer}.experts.{expert}.{part}"
                weights, scales = quant.pack(matrix, fmt.layout, fmt.scales)
                described[part] = {
                    "rows": rows,
                    "cols": cols,
                    "bits": fmt.bits,
                    "group_size": fmt.group_size,
                    "rows16": fmt.layout == "rows16",
                    "scale_bytes": fmt.scale_dtype.itemsize,
                    "weights": append(weights.tobytes(), name, 2 * i),
                    "scales": None if scales is None else append(scales.tobytes(), f"{name}.qs", 2 * i + 1),
                }
                packed.append(quant.pack(quant.interleavable(matrix), "rows16", fmt.scales)[0].tobytes())
            index[-1].append(described)
            oracle[-1].append((packed[0], packed[1], packed[2]))
    for path, content in zip(paths, contents, strict=True):
        path.write_bytes(content)
    return ExpertFiles([str(path) for path in paths], index, oracle)
