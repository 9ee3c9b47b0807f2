"""Small containers, and how bytes from a fuzzer damage them: structurally, so that most inputs get past the JSON parsers.

An input is a list of operations. The first byte chooses a container; after it, one byte chooses an operation, which takes its own
arguments from the bytes that follow. Any input means something, and a mutated input means something close to it.
"""

from __future__ import annotations

import dataclasses
import json
import struct
from collections.abc import Callable
from typing import Any

from colibri_jax.container.formats import SCALE_SUFFIX, TAG_KEY

from .containers import DEEPSEEK, GLM, MIXTRAL, QWEN, Parts, bases

WEIGHTS_FILE = "out-00000.safetensors"
CONFIG_FILE = "config.json"
MOST_OPERATIONS = 6


# ---- values that parsers and arithmetic stumble over ----------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Text:
    """JSON text as it stands; kept apart from values because `json.dumps` would not write it."""

    text: str


_RAW = (
    "[" * 3000 + "]" * 3000,
    '{"a":' * 1500 + "1" + "}" * 1500,
    "1" + "0" * 400,
    "1" + "0" * 5000,
    "1e999",
    "-1e999",
    "NaN",
    "-Infinity",
    '"\\ud800"',
    '"\\u0000"',
    "[" + "0," * 3000 + "0]",
    "-0",
    "1E2",
    "tru",
    "",
    '{"a":1,"a":2}',
    "\ufeff1",
)
_VALUES: tuple[Any, ...] = (
    *(0, 1, 2, 3, 4, 5, 6, 8, 16, 63, 64, 65, 127, 4095, 4096, 4097, 65_535, 65_536, 65_537, 2**31, 2**32, 2**53, 2**63 - 1, 2**63, 2**64),
    *(-1, -2, -64, -(2**63)),
    *(0.0, 0.5, 1.0, 1.5, -1.0, 1e-320, 1e308, 3.4e38),
    *(
        True,
        False,
        None,
        "",
        "F32",
        "U8",
        "I64",
        "BF16",
        "f32",
        "int4_g64",
        "int4_g64_rows16",
        "int4_g64_rows16_f16",
        "int8_rows",
        "int4_g16",
        "int4_g",
        "int4_g99999999",
    ),
    *(
        "dense",
        "sparse",
        "full",
        "shared",
        "yarn",
        "default",
        "sigmoid",
        "softmax",
        "glm_moe_dsa",
        "mixtral",
        "glm4_moe",
        "olmoe",
        "../x",
        "é" * 40,
    ),
    *(
        [],
        [0],
        [1],
        [0, 0],
        [8],
        [2, 4],
        [4, 2],
        [0, 8],
        [8, 0],
        [1] * 8,
        [1] * 9,
        [2**40] * 8,
        [-1, -1],
        [0.5],
        [None],
        [[1]],
        ["full"],
        ["dense"],
    ),
    *(
        {},
        {"a": 1},
        {"version": 1, "formats": {}},
        {"version": 1.0, "formats": {"x": "f32"}},
        {"type": "yarn"},
        {"rope_type": "yarn", "factor": 0},
    ),
)
_CONFIG_KEYS = (
    *sorted({*GLM, *DEEPSEEK, *QWEN, *MIXTRAL}),
    *("rms_norm_eps", "mlp_layer_types", "clip_qkv", "rope_parameters", "rope_theta", "partial_rotary_factor", "norm_topk_prob"),
    *("routed_scaling_factor", "decoder_sparse_step", "index_topk_freq", "index_skip_topk_offset", "attention_bias", "hidden_act"),
    *("rope_interleave", "use_qk_norm", "index_topk_pattern", "sliding_window", "scoring_func", "topk_method", "mlp_bias"),
)
_ROPE_KEYS = ("type", "rope_type", "factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
_ROPE_KEYS += ("attention_factor", "truncate", "rope_theta", "partial_rotary_factor")


class Source:
    """Bytes of an input, taken from the front; zeros after its end."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    @property
    def empty(self) -> bool:
        return self._at >= len(self._data)

    def byte(self) -> int:
        value = self._data[self._at] if self._at < len(self._data) else 0
        self._at += 1
        return value

    def word(self) -> int:
        return self.byte() | self.byte() << 8

    def take(self, most: int) -> bytes:
        count = self.byte() % (most + 1)
        taken = self._data[self._at : self._at + count]
        self._at += count
        return taken

    def pick(self, options: Any) -> Any:
        return options[(self.word() if len(options) > 256 else self.byte()) % len(options)]

    def value(self, old: Any = None) -> Any:
        """A JSON value: one that parsers stumble over, a neighbour of what stood there, or text of the input's own."""
        kind = self.byte() % 16
        if kind < 8:
            return self.pick(_VALUES)
        if kind < 10 and isinstance(old, (int, float)) and not isinstance(old, bool):
            return old + self.pick((1, -1, 2, 8, -8, 64))
        if kind < 12 and isinstance(old, list) and old:
            changed = list(old)
            at = self.byte() % len(changed)
            changed[at] = self.value(changed[at])
            return changed
        if kind < 13:
            return _Text(self.pick(_RAW))
        if kind < 14:
            return _Text(self.take(24).decode("latin-1"))
        return self.word()


# ---- operations -----------------------------------------------------------------------------------------------------


def _change_config(parts: Parts, source: Source) -> None:
    key = source.pick(_CONFIG_KEYS)
    parts.config[key] = source.value(parts.config.get(key))


def _drop_config(parts: Parts, source: Source) -> None:
    parts.config.pop(source.pick(_CONFIG_KEYS), None)


def _change_rope(parts: Parts, source: Source) -> None:
    rope = parts.config.get("rope_scaling", {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32})
    if isinstance(rope, dict):
        key = source.pick(_ROPE_KEYS)
        parts.config["rope_scaling"] = {**rope, key: source.value(rope.get(key))}


def _change_entry(parts: Parts, source: Source) -> None:
    name = source.pick(list(parts.header)) if parts.header else "x"
    entry = parts.header.get(name, {})
    if isinstance(entry, dict):
        field = source.pick(("dtype", "shape", "data_offsets", "data_offsets", "shape", "more"))
        parts.header[name] = {**entry, field: source.value(entry.get(field))}


def _replace_entry(parts: Parts, source: Source) -> None:
    parts.header[source.pick(list(parts.header) or ["x"])] = source.value()


def _drop_entry(parts: Parts, source: Source) -> None:
    if parts.header:
        del parts.header[source.pick(list(parts.header))]


def _rename_entry(parts: Parts, source: Source) -> None:
    """Under another tensor's name, with a suffix, or any other: bytes stay explained."""
    if parts.header:
        names = list(parts.header)
        old = source.pick(names)
        new = source.pick((old + SCALE_SUFFIX, old.removesuffix(SCALE_SUFFIX), old[:-1], "\ud800", "", source.pick(names), "__metadata__"))
        parts.header[new] = parts.header.pop(old)


def _swap_entries(parts: Parts, source: Source) -> None:
    if parts.header:
        names = list(parts.header)
        a, b = source.pick(names), source.pick(names)
        parts.header[a], parts.header[b] = parts.header[b], parts.header[a]


def _add_entry(parts: Parts, source: Source) -> None:
    """A tensor that begins where the data ends, or is empty."""
    count, end = source.byte() % 9, len(parts.data)
    name = source.pick((*parts.header, "stranger", "model.layers.0.self_attn.rotary_emb.inv_freq", "lm_head.weight"))
    parts.header[name + source.pick(("", ".qs", ".x"))] = {
        "dtype": source.pick(("U8", "F32", "F64")),
        "shape": source.pick(([count], [count, 1], [0], [0, 2**62], [1] * 8, [])),
        "data_offsets": [end, end + count],
    }
    parts.data += bytes(count)


def _change_tag(parts: Parts, source: Source) -> None:
    if parts.tags is None or source.byte() % 4 == 0:
        parts.metadata[source.pick((TAG_KEY, "format", ""))] = source.value()
        return
    formats = parts.tags.get("formats")
    if source.byte() % 4 == 0 or not isinstance(formats, dict) or not formats:
        parts.tags[source.pick(("version", "formats", "more"))] = source.value()
    elif source.byte() % 3:
        formats[source.pick(list(formats))] = source.value()
    else:
        formats.pop(source.pick(list(formats)))


def _change_data(parts: Parts, source: Source) -> None:
    """Bytes become part of a NaN, an infinity, or anything."""
    at = source.word() % max(len(parts.data), 1)
    patch = source.pick((b"\0\0\xc0\x7f", b"\0\0\x80\xff", b"\xff\xff\xff\xff", source.take(8)))
    parts.data = parts.data[:at] + patch + parts.data[at + len(patch) :]


def _resize_data(parts: Parts, source: Source) -> None:
    count = source.word() % 600
    parts.data = parts.data[:-count] if source.byte() % 2 and count else parts.data + bytes(count)


_STRUCTURAL: tuple[Callable[[Parts, Source], None], ...] = (
    _change_config,
    _drop_config,
    _change_rope,
    _change_entry,
    _change_entry,
    _replace_entry,
    _drop_entry,
    _rename_entry,
    _swap_entries,
    _add_entry,
    _change_tag,
    _change_data,
    _resize_data,
)


def _patch_bytes(files: dict[str, bytes], source: Source) -> None:
    name = source.pick((WEIGHTS_FILE, CONFIG_FILE))
    content = files[name]
    at = source.word() % max(len(content), 1)
    patch = source.take(8)
    inserted = source.byte() % 2
    files[name] = content[:at] + patch + content[at + (0 if inserted else len(patch)) :]


def _change_length(files: dict[str, bytes], source: Source) -> None:
    content = files[WEIGHTS_FILE]
    (length,) = struct.unpack("<Q", content[:8].ljust(8, b"\0"))
    new = source.pick(
        (0, 1, 2, length - 1, length + 1, len(content) - 8, len(content), 100_000_000, 100_000_001, 2**63, 2**64 - 1, 2**64 - 8)
    )
    files[WEIGHTS_FILE] = struct.pack("<Q", new % 2**64) + content[8:]


def _truncate(files: dict[str, bytes], source: Source) -> None:
    name = source.pick((WEIGHTS_FILE, CONFIG_FILE))
    files[name] = files[name][: source.word() % (len(files[name]) + 1)]


def _add_file(files: dict[str, bytes], source: Source) -> None:
    name = source.pick(("out-00001.safetensors", "a.safetensors", "generation_config.json", "model.safetensors.index.json"))
    header = struct.pack("<Q", 2) + b"{}"
    files[name] = source.pick(
        (b"", header, files[WEIGHTS_FILE], files[WEIGHTS_FILE][:200], b"{}", b"[]", b'{"weight_map": 1}', source.take(40))
    )


_BYTEWISE: tuple[Callable[[dict[str, bytes], Source], None], ...] = (_patch_bytes, _change_length, _truncate, _add_file)


def damaged(data: bytes) -> dict[str, bytes]:
    """The files of a container that this input describes, by name; an empty input describes one that opens."""
    source = Source(data)
    parts = source.pick(bases()).copy()
    bytewise = []
    for _ in range(MOST_OPERATIONS):
        if source.empty:
            break
        choice = source.byte()
        if choice % 8:
            source.pick(_STRUCTURAL)(parts, source)
        else:
            bytewise.append((source.pick(_BYTEWISE), Source(source.take(32))))
    files = _assembled(parts)
    for operation, arguments in bytewise:
        operation(files, arguments)
    return files


def _assembled(parts: Parts) -> dict[str, bytes]:
    texts: list[str] = []

    def marked(value: Any) -> str:
        assert isinstance(value, _Text)
        texts.append(value.text)
        return f"<text {len(texts) - 1}>"

    def dump(value: Any) -> str:
        text = json.dumps(value, default=marked)
        for i, raw in enumerate(texts):
            text = text.replace(f'"<text {i}>"', raw)
        return text

    metadata = dict(parts.metadata)
    if parts.tags is not None and TAG_KEY not in metadata:
        metadata[TAG_KEY] = dump(parts.tags)
    header = {"__metadata__": metadata, **parts.header} if metadata else parts.header
    encoded = dump(header).encode("utf-8", "surrogatepass")
    weights = struct.pack("<Q", len(encoded)) + encoded + parts.data
    return {WEIGHTS_FILE: weights, CONFIG_FILE: dump(parts.config).encode("utf-8", "surrogatepass")}
