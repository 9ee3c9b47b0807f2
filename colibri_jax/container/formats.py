"""Which weight format a stored tensor has: from its tag, or from byte counts where old files have no tag.

The tag is one JSON text per file, under "colibri_jax" in the safetensors metadata:
`{"version": 1, "formats": {tensor name: tag}}`. It names the tensors whose byte counts alone do not give their format.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from colibri_jax.container.format import FileIndex
from colibri_jax.errors import AmbiguousFormatError, HeaderError, UnexpectedTensorError, UnknownFormatError
from colibri_jax.quant import ACTIVATION_GROUP_SIZE, DEFAULT_GROUP_SIZE, GROUP_SIZES, WeightFormat
from colibri_jax.tensors import Storage

TAG_KEY = "colibri_jax"
TAG_VERSION = 1
SCALE_SUFFIX = ".qs"

_INT2_PER_BYTE = 4
_INT3_GROUP, _INT3_GROUP_BYTES = 64, 24


def tag_metadata(formats: dict[str, WeightFormat]) -> dict[str, str]:
    """Metadata of a file in which these tensors need a tag."""
    tags = {name: fmt.tag for name, fmt in formats.items()}
    return {TAG_KEY: json.dumps({"version": TAG_VERSION, "formats": tags}, separators=(",", ":"))}


def read_tags(file: FileIndex) -> dict[str, WeightFormat] | None:
    """Formats that a file states, by tensor name; None where the file has no tag of ours.

    Raises:
        HeaderError, UnknownFormatError: the tag is malformed, of another version, or names an unknown format.
        UnexpectedTensorError: the tag speaks of a tensor that the file does not hold.
    """
    text = file.metadata.get(TAG_KEY)
    if text is None:
        return None
    where = f"{file.path}: {TAG_KEY}"
    try:
        tag: Any = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise HeaderError("format tag is not valid JSON", where=where, got=error) from error
    if not isinstance(tag, dict) or set(tag) != {"version", "formats"}:
        raise HeaderError("malformed format tag", where=where, expected="version and formats", got=text[:80])
    if tag["version"] != TAG_VERSION or isinstance(tag["version"], bool):
        raise UnknownFormatError("unknown container version", where=where, expected=TAG_VERSION, got=tag["version"])
    formats = tag["formats"]
    if not isinstance(formats, dict) or not all(isinstance(value, str) for value in formats.values()):
        raise HeaderError("malformed format tag", where=where, expected="a map of names to tags", got=text[:80])
    strangers = [name for name in formats if name not in file.tensors]
    if strangers:
        raise UnexpectedTensorError("format tag of a tensor that the file does not hold", where=where, got=strangers[0])
    return {name: WeightFormat.from_tag(value) for name, value in formats.items()}


@dataclasses.dataclass(frozen=True)
class FoundBytes:
    """What a file says about a [rows, cols] matrix without a tag: bytes of weights, number of scales."""

    name: str
    rows: int
    cols: int
    weight_bytes: int
    scale_count: int


def infer_format(found: FoundBytes, storage: Storage, group_size: int | None) -> WeightFormat:
    """The row-major format of a matrix from the bytes of its weights and the number of its scales.

    Several int4 group sizes may fit one count. Where they all mean the same arithmetic (one scale per row, one activation
    group) any of them is the answer; otherwise `group_size` (0: one scale per row) must name one of them.

    Raises:
        AmbiguousFormatError: several formats fit, and none or another one was named.
        UnknownFormatError: no supported format fits.
    """
    rows, cols = found.rows, found.cols
    where = f"{found.name} [{rows}, {cols}]"
    counts = (found.weight_bytes, found.scale_count)
    known = [WeightFormat(8), WeightFormat(4), *(WeightFormat(4, size) for size in GROUP_SIZES)]
    fitting = [f for f in known if (f.weight_bytes(rows, cols), f.scale_count(rows, cols)) == counts]
    if not fitting:
        raise UnknownFormatError(
            _unsupported_name(rows, cols, counts) or "byte counts match no weight format",
            where=where,
            expected="int8 rows, int4 rows or int4 groups",
            got=f"{counts[0]} bytes, {counts[1]} scales",
        )
    int8 = [f for f in fitting if f.bits == 8]
    if int8 and (len(fitting) == 1 or storage.startswith("int8")):  # both widths fit only where cols is 1
        return int8[0]
    fitting = [f for f in fitting if f.bits == 4]
    named = [f for f in fitting if f.group_size == group_size]
    if named:
        return named[0]
    if len({_arithmetic(f, cols) for f in fitting}) > 1:
        raise AmbiguousFormatError(
            "several formats fit the byte counts",
            where=where,
            expected="a group size named by the user" if group_size is None else f"not {group_size}, but one of those that fit",
            got=", ".join(f.tag for f in fitting),
        )
    return next((f for f in fitting if f.group_size == DEFAULT_GROUP_SIZE), fitting[0])


def _arithmetic(fmt: WeightFormat, cols: int) -> tuple[int, int]:
    """Inputs per scale and inputs per activation group, as far as the columns reach."""
    return min(fmt.group_size or cols, cols), min(fmt.group_size or ACTIVATION_GROUP_SIZE, cols)


def _unsupported_name(rows: int, cols: int, counts: tuple[int, int]) -> str | None:
    if counts == (rows * -(-cols // _INT2_PER_BYTE), rows):
        return "int2 weights are not supported"
    groups = rows * -(-cols // _INT3_GROUP)
    if counts == (groups * _INT3_GROUP_BYTES, groups):
        return "int3 weights are not supported"
    return None
