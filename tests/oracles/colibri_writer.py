"""An independent writer of containers in colibri's layout: plain loops, struct and json; shares no code with the package.

It defines what the package's reader has to understand. Slow on purpose; use it for small models.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

# kind → what it means: "f32", "int8", "int4" (one scale per row), or ("int4", group size)
Kind = Any


def default_kind(name: str, shape: tuple[int, ...], mtp_layer: int, group_size: int) -> Kind:
    """The storage that the layout prescribes for a checkpoint tensor."""
    parts = name.split(".")
    if len(shape) == 1 or name.endswith("mlp.gate.weight") or "weights_proj" in name:
        return "f32"
    if "embed_tokens" in name or "lm_head" in name or "indexer" in name:
        return "int8"
    if parts[1] == "layers" and int(parts[2]) >= mtp_layer:
        return "int8"
    return ("int4", group_size) if group_size else "int4"


def write_container(
    directory: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray],
    *,
    group_size: int = 64,
    kind_of: Callable[[str], Kind | None] = lambda name: None,
    shards: int = 2,
) -> None:
    """Write `tensors` (float32, by checkpoint name) as an untagged container.

    Args:
        directory: created.
        config: becomes config.json.
        tensors: float32 arrays by checkpoint name.
        group_size: of int4 matrices; 0 for one scale per row.
        kind_of: overrides the kind of single tensors; None keeps the default.
        shards: number of files; a tensor's scales may lie in another file than its weights.
    """
    directory.mkdir(parents=True)
    blobs: list[tuple[str, str, list[int], bytes]] = []
    for name in sorted(tensors):
        array = tensors[name]
        kind = kind_of(name) or default_kind(name, array.shape, config["num_hidden_layers"], group_size)
        if kind == "f32":
            blobs.append((name, "F32", list(array.shape), b"".join(struct.pack("<f", float(v)) for v in array.reshape(-1))))
            continue
        weights, scales = quantise(array, kind)
        blobs.append((name, "U8", [len(weights)], weights))
        blobs.append((name + ".qs", "F32", [len(scales)], struct.pack(f"<{len(scales)}f", *scales)))
    per_file = math.ceil(len(blobs) / shards)
    for number in range(shards):
        write_file(directory / f"out-{number:05d}.safetensors", blobs[number * per_file : (number + 1) * per_file])
    (directory / "config.json").write_text(json.dumps(dict(config)))


def write_file(path: Path, blobs: list[tuple[str, str, list[int], bytes]]) -> None:
    """One safetensors file without padding or metadata."""
    header: dict[str, Any] = {}
    position = 0
    for name, dtype, shape, data in blobs:
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [position, position + len(data)]}
        position += len(data)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(blob[3] for blob in blobs))


def quantise(matrix: np.ndarray, kind: Kind) -> tuple[bytes, list[float]]:
    """Packed bytes and scales of one [rows, cols] matrix, element by element in float32 arithmetic."""
    rows, cols = matrix.shape
    bits, group = (4, kind[1]) if isinstance(kind, tuple) else (int(kind[3:]), 0)
    group = group or cols
    largest = np.float32(127 if bits == 8 else 7)
    data = bytearray()
    scales: list[float] = []
    for row in range(rows):
        codes: list[int] = []
        for start in range(0, cols, group):
            values = [np.float32(v) for v in matrix[row, start : start + group]]
            top = np.float32(0)
            for value in values:
                top = max(top, abs(value))
            scale = max(np.float32(top / largest), np.float32(1e-8))
            scales.append(float(scale))
            for value in values:
                codes.append(round(float(np.float32(value / scale))))  # Python rounds halves to even
        if bits == 8:
            data += bytes(code & 255 for code in codes)
            continue
        if cols % 2:
            codes.append(0)
        for low, high in zip(codes[0::2], codes[1::2], strict=True):
            data.append((low + 8) | ((high + 8) << 4))
    return bytes(data), scales
