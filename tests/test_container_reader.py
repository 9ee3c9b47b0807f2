"""Opening containers: formats from tags and byte counts, refusals by name, optional parts, agreement with an independent writer."""

from __future__ import annotations

import itertools
import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from oracles.checkpoints import named_shapes, random_tensors, small_config, write_checkpoint
from oracles.colibri_writer import write_container

from colibri_jax import ModelConfig
from colibri_jax.container import checkpoints, convert, inspect
from colibri_jax.container.format import read_index
from colibri_jax.container.formats import FoundBytes, infer_format
from colibri_jax.container.reader import Container
from colibri_jax.errors import (
    AmbiguousFormatError,
    ConfigError,
    ContainerError,
    HeaderError,
    IncompleteContainerError,
    MissingFileError,
    MissingTensorError,
    NonFiniteWeightError,
    OptionError,
    ShapeError,
    TruncatedFileError,
    UnexpectedTensorError,
    UnknownFormatError,
)
from colibri_jax.quant import QuantizedMatrix, WeightFormat

NAMED_ERRORS = tuple(ContainerError.__subclasses__())  # the base class alone would name no cause
EXPERT = "model.layers.1.mlp.experts.2.up_proj.weight"


@pytest.fixture(scope="module")
def tensors() -> dict[str, np.ndarray]:
    return random_tensors(small_config())


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory, tensors: dict[str, np.ndarray]) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("converted")
    source = write_checkpoint(root / "hf", small_config(), tensors)
    for layout in ("rows16", "row_major"):
        convert.run_conversion(convert.plan_conversion(source, root / layout, layout=layout))
    return {"hf": source, "rows16": root / "rows16", "row_major": root / "row_major"}


@pytest.fixture
def ours(tmp_path: Path, converted: dict[str, Path]) -> Path:
    return Path(shutil.copytree(converted["rows16"], tmp_path / "ours"))


def rewrite_header(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change a file's header and nothing else; offsets stay relative to the data."""
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + length :])


def rewrite_tag(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    def change_header(header: dict[str, Any]) -> None:
        tag = json.loads(header["__metadata__"]["colibri_jax"])
        change(tag)
        header["__metadata__"]["colibri_jax"] = json.dumps(tag)

    rewrite_header(path, change_header)


def same(a: Any, b: Any) -> bool:
    if isinstance(a, QuantizedMatrix):
        return isinstance(b, QuantizedMatrix) and np.array_equal(a.q, b.q) and np.array_equal(a.scales, b.scales)
    return isinstance(b, np.ndarray) and a.dtype == b.dtype == np.float32 and np.array_equal(a, b)


def differing_roles(a: Container, b: Container) -> list[str]:
    assert set(a.entries) == set(b.entries)
    return [role for role in a.entries if not same(a.read(role), b.read(role))]


# ---- an independent writer ---------------------------------------------------------------------------------------


def test_independent_writers_container_reads_to_the_same_values(
    tmp_path: Path, tensors: dict[str, np.ndarray], converted: dict[str, Path]
) -> None:
    write_container(tmp_path / "c", small_config(), tensors)
    theirs = Container.open(tmp_path / "c", group_size=64)
    assert not theirs.tagged
    assert theirs.entry("layers.1.experts.2.up").format.tag == "int4_g64"
    for layout in ("rows16", "row_major"):
        assert differing_roles(theirs, Container.open(converted[layout])) == []


def test_a_single_changed_nibble_is_seen_by_that_comparison(tmp_path: Path, ours: Path, converted: dict[str, Path]) -> None:
    entry = Container.open(ours).entry("layers.1.experts.2.up")
    raw = bytearray(entry.path.read_bytes())
    raw[entry.offset + 4 * 3] ^= 1  # byte 0 of row 3 in the first vector
    entry.path.write_bytes(raw)
    assert differing_roles(Container.open(ours), Container.open(converted["rows16"])) == ["layers.1.experts.2.up"]


def test_formats_of_others_are_reported_as_found(tmp_path: Path, tensors: dict[str, np.ndarray]) -> None:
    kinds = {
        EXPERT: ("int4", 16),
        "model.layers.0.self_attn.q_a_proj.weight": "int8",
        "model.embed_tokens.weight": "int4",
        "model.layers.0.self_attn.indexer.weights_proj.weight": "int8",
        "model.layers.3.eh_proj.weight": "int4",
    }
    write_container(tmp_path / "c", small_config(), tensors, kind_of=kinds.get, group_size=0)
    container = Container.open(tmp_path / "c", group_size=0)
    expected_tags = {
        "layers.1.experts.2.up": "int4_g16",
        "layers.0.attn.q_a": "int8_rows",
        "embed": "int4_rows",
        "mtp.eh_proj": "int4_rows",
    }
    assert {role: container.entry(role).format.tag for role in expected_tags} == expected_tags
    projection = container.read("layers.0.indexer.weights_proj")  # float32 in the arithmetic, however it is stored
    expected = tensors["model.layers.0.self_attn.indexer.weights_proj.weight"]
    step = np.abs(expected).max(axis=1, keepdims=True) / 127
    assert isinstance(projection, np.ndarray)
    assert np.all(np.abs(projection - expected) <= step * (0.5 + 127 * 2.0**-23))  # half a step, and two float32 roundings


# ---- byte counts ---------------------------------------------------------------------------------------------------


def infer(rows: int, cols: int, weights: int, scales: int, *, group: int | None = None, storage: Any = "int4") -> str:
    return infer_format(FoundBytes("t", rows, cols, weights, scales), storage, group).tag


@pytest.mark.parametrize(
    ("cols", "weights", "scales", "tag"),
    [
        (6144, 6144, 1, "int8_rows"),
        (6144, 3072, 1, "int4_rows"),
        *((6144, 3072, 6144 // g, f"int4_g{g}") for g in (16, 32, 48, 64, 96, 128, 192, 256)),
        (64, 32, 1, "int4_g64"),  # one scale, one activation group: every reading means the same
        (20, 10, 1, "int4_g64"),
        (72, 36, 2, None),  # groups of 48 and 64 both give two scales
        (100, 50, 1, None),  # rows quantise activations in two groups, groups of 128 in one
        (71, 36, 5, "int4_g16"),
    ],
)
def test_the_format_follows_from_byte_counts_or_is_ambiguous(cols: int, weights: int, scales: int, tag: str | None) -> None:
    for rows in (1, 7):
        if tag is None:
            with pytest.raises(AmbiguousFormatError, match=rf"t \[{rows}, {cols}\]"):
                infer(rows, cols, rows * weights, rows * scales)
        else:
            assert infer(rows, cols, rows * weights, rows * scales) == tag


def test_a_named_group_size_decides_only_among_those_that_fit() -> None:
    assert infer(7, 72, 252, 14, group=48) == "int4_g48"
    assert infer(7, 72, 252, 14, group=64) == "int4_g64"
    assert infer(7, 100, 350, 7, group=0) == "int4_rows"
    assert infer(7, 6144, 7 * 3072, 7 * 96, group=128) == "int4_g64"  # nothing to decide
    with pytest.raises(AmbiguousFormatError, match="not 32"):
        infer(7, 72, 252, 14, group=32)


def test_a_single_column_is_read_as_its_storage_class_says() -> None:
    assert infer(5, 1, 5, 5, storage="int8") == "int8_rows"
    assert infer(5, 1, 5, 5, storage="int4") == "int4_g64"


@pytest.mark.parametrize(("weights", "scales", "name"), [(1536, 1, "int2"), (96 * 24, 96, "int3"), (3073, 1, "byte counts")])
def test_unsupported_formats_are_named(weights: int, scales: int, name: str) -> None:
    with pytest.raises(UnknownFormatError, match=name):
        infer(3, 6144, 3 * weights, 3 * scales)


def test_group_size_option_is_checked(ours: Path) -> None:
    with pytest.raises(OptionError, match="group_size"):
        Container.open(ours, group_size=63)


def test_ambiguous_container_is_refused_until_the_group_size_is_named(tmp_path: Path, tensors: dict[str, np.ndarray]) -> None:
    write_container(tmp_path / "c", small_config(), tensors, group_size=48)
    with pytest.raises(AmbiguousFormatError):
        Container.open(tmp_path / "c")
    assert Container.open(tmp_path / "c", group_size=48).entry("layers.0.attn.q_a").format == WeightFormat(4, 48)


# ---- refusals ------------------------------------------------------------------------------------------------------


def drop(name: str) -> Callable[[Path], None]:
    def apply(path: Path) -> None:
        def rename(header: dict[str, Any]) -> None:
            header["model.layers.1.mlp.shared_experts.extra"] = header.pop(name)

        rewrite_header(path, rename)
        if "colibri_jax" in read_index(path).metadata:
            rewrite_tag(path, lambda tag: tag["formats"].pop(name, None))

    return apply


def retag(name: str, value: str | None) -> Callable[[Path], None]:
    def change(tag: dict[str, Any]) -> None:
        if value is None:
            del tag["formats"][name]
        else:
            tag["formats"][name] = value

    return lambda path: rewrite_tag(path, change)


def reshape(name: str, shape: list[int], dtype: str | None = None) -> Callable[[Path], None]:
    def change(header: dict[str, Any]) -> None:
        header[name]["shape"] = shape
        header[name]["dtype"] = dtype or header[name]["dtype"]

    return lambda path: rewrite_header(path, change)


@pytest.mark.parametrize(
    ("damage", "error", "match"),
    [
        (lambda p: p.write_bytes(p.read_bytes()[:-1]), TruncatedFileError, "out-00000"),
        (lambda p: p.write_bytes(p.read_bytes() + b"\0"), TruncatedFileError, "longer"),
        (drop(EXPERT), MissingTensorError, EXPERT),
        (reshape("model.norm.weight", [8, 9]), ShapeError, "model.norm.weight"),
        (reshape("model.norm.weight", [72], "I32"), ShapeError, "model.norm.weight"),
        (reshape("model.layers.1.mlp.gate.weight", [72, 4]), ShapeError, "mlp.gate.weight"),
        (retag(EXPERT, "int4_g96_rows16"), ShapeError, EXPERT),
        (retag(EXPERT, "int8_rows_rows16"), ShapeError, EXPERT),
        (retag(EXPERT, "int4_g64_rows16_f16"), ShapeError, EXPERT),
        (retag(EXPERT, "int4_g64_f16"), UnknownFormatError, "int4_g64_f16"),
        (retag(EXPERT, "fp4"), UnknownFormatError, "fp4"),
        (retag(EXPERT, None), MissingTensorError, r"up_proj\.weight\.qs"),
        (retag("model.norm.weight", "int8_rows"), ShapeError, "model.norm.weight"),
        (retag("model.embed_tokens.weight", "f32"), (ShapeError, UnknownFormatError), "embed_tokens"),
        (retag("stranger", "f32"), UnexpectedTensorError, "stranger"),
        (lambda p: rewrite_tag(p, lambda t: t.update(version=2)), UnknownFormatError, "version"),
        (lambda p: rewrite_tag(p, lambda t: t.update(more=1)), HeaderError, "malformed format tag"),
        (lambda p: shutil.copy(p, p.with_name("copy.safetensors")), UnexpectedTensorError, "two files"),
        (lambda p: p.with_name("conversion-state.json").write_text("{}"), IncompleteContainerError, "run it again"),
        (lambda p: p.rename(p.with_name(p.name + ".part")), IncompleteContainerError, "out-00000.safetensors.part"),
        (lambda p: p.with_name("config.json").unlink(), MissingFileError, "config.json"),
        (lambda p: p.with_name("config.json").write_text("{"), ConfigError, "config.json"),
    ],
)
def test_damaged_containers_are_refused_by_name(ours: Path, damage: Callable[[Path], Any], error: Any, match: str) -> None:
    Container.open(ours)
    damage(ours / "out-00000.safetensors")
    with pytest.raises(error, match=match):
        Container.open(ours)


def test_tensors_and_files_that_nobody_asked_for_are_refused(ours: Path, tmp_path: Path, tensors: dict[str, np.ndarray]) -> None:
    stranger = {"model.layers.7.x": np.zeros(2, np.float32)}
    write_container(tmp_path / "theirs", small_config(), {**tensors, **stranger})
    with pytest.raises(UnexpectedTensorError, match=r"model\.layers\.7\.x"):
        Container.open(tmp_path / "theirs", group_size=64)
    write_container(tmp_path / "extra", small_config(), stranger, shards=1)
    shutil.copy(tmp_path / "extra" / "out-00000.safetensors", ours / "out-00009.safetensors")
    with pytest.raises(UnknownFormatError, match="out-00009"):
        Container.open(ours)


def test_a_checkpoint_is_not_taken_for_a_container(converted: dict[str, Path]) -> None:
    with pytest.raises(ShapeError, match="BF16"):
        Container.open(converted["hf"])


def test_unquantised_matrices_are_refused_where_nothing_can_compute_with_them(tmp_path: Path, tensors: dict[str, np.ndarray]) -> None:
    for name in (EXPERT, "model.embed_tokens.weight", "model.layers.0.self_attn.kv_b_proj.weight"):
        directory = tmp_path / name
        write_container(directory, small_config(), tensors, kind_of={name: "f32"}.get)
        with pytest.raises(UnknownFormatError, match=name):
            Container.open(directory, group_size=64)


def test_a_quantised_router_is_refused(tmp_path: Path, tensors: dict[str, np.ndarray]) -> None:
    write_container(tmp_path / "c", small_config(), tensors, kind_of={"model.layers.1.mlp.gate.weight": "int8"}.get)
    with pytest.raises(UnknownFormatError, match=r"layers\.1\.router\.weight"):
        Container.open(tmp_path / "c", group_size=64)


def test_values_that_are_not_finite_are_found_when_read(ours: Path) -> None:
    entry = Container.open(ours).entry("final_norm")
    raw = bytearray(entry.path.read_bytes())
    raw[entry.offset + 8 : entry.offset + 12] = struct.pack("<f", float("nan"))
    entry.path.write_bytes(raw)
    with pytest.raises(NonFiniteWeightError, match=r"model\.norm\.weight\[2\]"):
        Container.open(ours).read("final_norm")


@pytest.mark.parametrize(("file", "masks"), [("out-00000.safetensors", (0x01,)), ("out-idx-00000.safetensors", (0x10, 0xFF))])
def test_every_flipped_header_byte_gives_a_named_error_or_the_same_meaning(tmp_path: Path, file: str, masks: tuple[int, ...]) -> None:
    """A model of one dense layer, so that headers are small: each byte of length and header."""
    config = small_config(num_hidden_layers=1, num_nextn_predict_layers=0, indexer_types=["full"])
    source = write_checkpoint(tmp_path / "hf", config, random_tensors(config))
    convert.run_conversion(convert.plan_conversion(source, tmp_path / "c"))
    path = tmp_path / "c" / file
    good = path.read_bytes()
    before = Container.open(path.parent).entries
    (length,) = struct.unpack("<Q", good[:8])
    used = 8 + len(good[8 : 8 + length].rstrip(b" "))
    unnoticed = []
    for position in range(used + 2):
        for mask in masks:
            flipped = bytearray(good)
            flipped[position] ^= mask
            path.write_bytes(flipped)
            try:
                after = Container.open(path.parent).entries
            except NAMED_ERRORS:
                continue
            assert after == before, position
            unnoticed.append(position)
    assert len(unnoticed) <= 4  # padding turned into other white space, letter case of an escape: the check is not vacuous


# ---- optional parts ------------------------------------------------------------------------------------------------


def test_untagged_containers_may_lack_indexers_and_mtp_block(tmp_path: Path, tensors: dict[str, np.ndarray]) -> None:
    trunk = {n: t for n, t in tensors.items() if ".indexer." not in n and not n.startswith("model.layers.3.")}
    write_container(tmp_path / "c", small_config(), trunk)
    container = Container.open(tmp_path / "c", group_size=64)
    assert (container.has_mtp, container.has_indexers) == (False, False)
    assert len(container.missing) == len(tensors) - len(trunk)
    with pytest.raises(MissingTensorError, match=r"mtp\.norm"):
        container.read("mtp.norm")


def test_an_mtp_block_without_its_indexer_opens(tmp_path: Path, tensors: dict[str, np.ndarray]) -> None:
    kept = {n: t for n, t in tensors.items() if not n.startswith("model.layers.3.self_attn.indexer")}
    write_container(tmp_path / "c", small_config(), kept)
    container = Container.open(tmp_path / "c", group_size=64)
    assert (container.has_mtp, container.has_indexers) == (True, True)


@pytest.mark.parametrize("name", ["model.layers.0.self_attn.indexer.wk.weight", "model.layers.3.eh_proj.weight", EXPERT])
def test_a_part_of_a_set_may_not_be_missing(tmp_path: Path, tensors: dict[str, np.ndarray], name: str) -> None:
    write_container(tmp_path / "c", small_config(), {n: t for n, t in tensors.items() if n != name})
    with pytest.raises(MissingTensorError, match=name):
        Container.open(tmp_path / "c", group_size=64)


def test_repeated_embeddings_and_unused_indexers_are_ignored(tmp_path: Path, tensors: dict[str, np.ndarray]) -> None:
    more = {
        "model.layers.3.embed_tokens.weight": tensors["model.embed_tokens.weight"],
        "model.layers.3.shared_head.head.weight": tensors["lm_head.weight"],
        "model.layers.1.self_attn.indexer.wk.weight": tensors["model.layers.0.self_attn.indexer.wk.weight"],
        "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(2, np.float32),
    }
    write_container(tmp_path / "c", small_config(), {**tensors, **more})
    assert not Container.open(tmp_path / "c", group_size=64).missing


# ---- names and sums ------------------------------------------------------------------------------------------------


def test_names_are_those_of_the_shipped_checkpoints() -> None:
    config = small_config(tie_word_embeddings=True)
    model = checkpoints.named_specs(ModelConfig.from_hf(config))
    assert {name: spec.shape for name, spec in model.items()} == named_shapes(config)


@pytest.mark.parametrize("layout", ["rows16", "row_major"])
@pytest.mark.parametrize("shard_bytes", [1, 3 * 4096, 1 << 30])
def test_experts_are_adjacent_and_their_extents_are_theirs(
    tmp_path: Path, converted: dict[str, Path], layout: Any, shard_bytes: int
) -> None:
    convert.run_conversion(convert.plan_conversion(converted["hf"], tmp_path / "c", layout=layout, shard_bytes=shard_bytes))
    container = Container.open(tmp_path / "c")
    for layer in (*container.config.moe_layers, container.config.n_layers):
        for expert in range(container.config.moe.n_experts):
            runs = []
            for part, entry in zip(("gate", "up", "down"), container.expert_extents(layer, expert), strict=True):
                assert entry.name == f"model.layers.{layer}.mlp.experts.{expert}.{part}_proj.weight"
                runs += [entry] if entry.scales is None else [entry, entry.scales]
            assert len({run.path for run in runs}) == 1
            assert all(a.offset + a.nbytes == b.offset for a, b in itertools.pairwise(runs))


def test_summary_adds_up(converted: dict[str, Path]) -> None:
    expected = {}
    for layout in ("rows16", "row_major"):
        summary = inspect.describe(converted[layout], ram_bytes=10**9)
        weights = sum(row.nbytes for row in summary.formats)
        assert weights == 2 * 4 * summary.expert_bytes + summary.dense_bytes + summary.mtp_bytes
        headers = sum(min(t.offset for t in read_index(p).tensors.values()) for p in converted[layout].glob("*.safetensors"))
        assert weights + headers == summary.total_bytes
        assert summary.cold_token_bytes == 2 * 2 * summary.expert_bytes
        assert summary.layer_expert_bytes == 4 * summary.expert_bytes
        assert summary.cache_experts_per_layer == 4
        expected[layout] = summary.expert_bytes
    # gate and up [20, 72], down [72, 20]; groups of 64
    assert expected["row_major"] == 2 * (20 * 36 + 20 * 2 * 4) + 72 * 10 + 72 * 4
    assert expected["rows16"] == 2 * (2 * 2 * 576) + 5 * 576
    tight = inspect.describe(converted["rows16"])
    room = tight.dense_bytes + tight.kv_cache_bytes + 2 * 3 * tight.slot_bytes
    assert inspect.describe(converted["rows16"], room).cache_experts_per_layer == 3
    assert inspect.describe(converted["rows16"], room - 1).cache_experts_per_layer == 2
    assert inspect.describe(converted["rows16"], 0).cache_experts_per_layer == 0
    assert any("one expert" in line for line in tight.lines())
