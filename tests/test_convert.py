"""Conversion: what comes out is the quantised source; it resumes byte for byte, never overwrites, and refuses bad sources by name."""

from __future__ import annotations

import json
import os
import shutil
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from oracles.checkpoints import named_shapes, random_tensors, small_config, write_checkpoint
from oracles.colibri_writer import write_file

from colibri_jax.container import convert, source
from colibri_jax.container.checkpoints import checkpoint_name
from colibri_jax.container.format import read_index
from colibri_jax.container.reader import Container
from colibri_jax.container.source import SourceCheckpoint, load_hf
from colibri_jax.errors import (
    ConfigError,
    HeaderError,
    IncompleteContainerError,
    MissingFileError,
    MissingTensorError,
    NonFiniteWeightError,
    NoSpaceError,
    OptionError,
    OutputExistsError,
    ScaleRangeError,
    ShapeError,
    UnexpectedTensorError,
    UnsupportedFamilyError,
)
from colibri_jax.quant import QuantizedMatrix, ScaleType, quantize_int4, quantize_int8
from colibri_jax.tensors import tensor_specs

EXPERT = "model.layers.1.mlp.experts.2.up_proj.weight"


@pytest.fixture(scope="module")
def tensors() -> dict[str, np.ndarray]:
    return random_tensors(small_config())


@pytest.fixture
def hf(tmp_path: Path, tensors: dict[str, np.ndarray]) -> Path:
    return write_checkpoint(tmp_path / "hf", small_config(), tensors)


def run(path: Path, target: Path, **options: Any) -> Container:
    convert.run_conversion(convert.plan_conversion(path, target, **options))
    return Container.open(target)


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def wrong_roles(container: Container, source: dict[str, np.ndarray], group: int = 64, scales: ScaleType = "f32") -> list[str]:
    """Roles that do not read as the quantised source tensor."""
    wrong = []
    for spec in tensor_specs(container.config):
        values, found = source[checkpoint_name(container.config, spec.role)], container.read(spec.role)
        if spec.storage == "f32":
            good = isinstance(found, np.ndarray) and found.shape == spec.shape and np.array_equal(found, values)
        else:
            narrow: ScaleType = "f32" if spec.storage.endswith("_dequant") else scales  # what is dequantised is not interleaved
            expected = quantize_int4(values, group, narrow) if spec.storage.startswith("int4") else quantize_int8(values)
            good = (
                isinstance(found, QuantizedMatrix) and np.array_equal(found.q, expected.q) and np.array_equal(found.scales, expected.scales)
            )
        if not good:
            wrong.append(spec.role)
    return wrong


# ---- round trip ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("layout", "scales"), [("rows16", "f32"), ("rows16", "f16"), ("row_major", "f32")])
@pytest.mark.parametrize("group", [16, 64, 128])
@pytest.mark.parametrize("shard_bytes", [1, 1 << 30])
def test_round_trip_reads_as_the_quantised_source(
    tmp_path: Path, hf: Path, tensors: dict[str, np.ndarray], *, layout: Any, scales: Any, group: int, shard_bytes: int
) -> None:
    container = run(hf, tmp_path / "out", layout=layout, group_size=group, scales=scales, shard_bytes=shard_bytes)
    assert wrong_roles(container, tensors, group, scales) == []
    changed = {**tensors, EXPERT: tensors[EXPERT] * 2}
    assert wrong_roles(container, changed, group, scales) == ["layers.1.experts.2.up"]  # the comparison sees one tensor
    if scales == "f16":  # experts and dense products have them, and it sees the scales
        tags = {role: entry.format.tag for role, entry in container.entries.items()}
        assert tags["layers.1.experts.2.up"] == tags["layers.0.attn.o"] == f"int4_g{group}_rows16_f16"
        assert tags["layers.0.attn.kv_b"] == f"int4_g{group}"
        assert set(wrong_roles(container, tensors, group)) == {role for role, tag in tags.items() if tag.endswith("_f16")}


def test_a_weight_beyond_float16_scales_is_refused_by_file_tensor_row_and_group(tmp_path: Path, tensors: dict[str, np.ndarray]) -> None:
    huge = tensors[EXPERT].copy()
    huge[7, 70] = 7 * 66000.0
    path = write_checkpoint(tmp_path / "hf", small_config(), {**tensors, EXPERT: huge}, dtype="F32")
    run(path, tmp_path / "wide")
    with pytest.raises(ScaleRangeError, match=rf"model\S*\.safetensors: {EXPERT}, from row 0 on: row 7, group 1; expected: at most 65504"):
        run(path, tmp_path / "out", scales="f16")
    with pytest.raises(IncompleteContainerError):
        Container.open(tmp_path / "out")


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16", "F8_E4M3"])
@pytest.mark.parametrize(("shards", "index"), [(1, False), (3, False), (3, True)])
def test_every_source_dtype_and_sharding_gives_its_own_values(
    tmp_path: Path, tensors: dict[str, np.ndarray], *, dtype: str, shards: int, index: bool
) -> None:
    path = write_checkpoint(tmp_path / "hf", small_config(), tensors, dtype=dtype, shards=shards, index=index)
    config, loaded = load_hf(path)
    by_name = {checkpoint_name(config, role): values for role, values in loaded.items()}
    for name, values in tensors.items():
        assert by_name[name].dtype == np.float32
        if dtype != "F8_E4M3":
            assert np.array_equal(by_name[name], values), name
        else:  # three mantissa bits, or half a step of the subnormals at block maximum 448
            bound = np.abs(values) * 2.0**-4 + np.abs(values).max() / 448 * 2.0**-10
            assert np.all(np.abs(by_name[name] - values) <= bound * (1 + 2.0**-20)), name
    assert wrong_roles(run(path, tmp_path / "out"), by_name) == []


def test_block_scales_belong_to_their_blocks(tmp_path: Path) -> None:
    """Matrices over several blocks in both directions, with scales four orders of magnitude apart."""
    config = small_config(vocab_size=300, hidden_size=272, intermediate_size=260)
    tensors = random_tensors(config)
    name = "model.layers.0.mlp.gate_proj.weight"
    tensors[name] = np.ones((260, 272), np.float32)
    tensors[name][:128, 128:256] = 100
    tensors[name][256:, :128] = 0.01
    path = write_checkpoint(tmp_path / "hf", config, tensors, dtype="F8_E4M3")
    assert np.allclose(SourceCheckpoint.open(path).read("layers.0.mlp.gate"), tensors[name], rtol=2.0**-22, atol=0)


@pytest.mark.parametrize("dtype", ["BF16", "F8_E4M3"])
def test_reading_in_blocks_of_rows_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    config = small_config(vocab_size=300, hidden_size=272, intermediate_size=260)
    path = write_checkpoint(tmp_path / "hf", config, random_tensors(config), dtype=dtype)
    run(path, tmp_path / "whole")
    monkeypatch.setattr(source, "ROW_BLOCK_BYTES", 1)
    assert [block.shape[0] for block in SourceCheckpoint.open(path).blocks("embed")] == [128, 128, 44]
    run(path, tmp_path / "blocks")
    assert contents(tmp_path / "whole") == contents(tmp_path / "blocks")


def test_memory_stays_at_a_few_blocks_of_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An embedding of 16 MB in float32, converted in blocks of 512 KiB."""
    config = small_config(vocab_size=15000, hidden_size=272)
    path = write_checkpoint(tmp_path / "hf", config, random_tensors(config))
    monkeypatch.setattr(source, "ROW_BLOCK_BYTES", 1 << 19)
    tracemalloc.start()
    try:
        run(path, tmp_path / "out")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 8 << 20


def test_tied_embeddings_have_no_head(tmp_path: Path) -> None:
    config = small_config(tie_word_embeddings=True)
    tensors = random_tensors(config)
    container = run(write_checkpoint(tmp_path / "hf", config, tensors), tmp_path / "out")
    assert "head" not in container.entries
    assert wrong_roles(container, tensors) == []


def test_config_and_tokenizer_are_carried_along_unchanged(tmp_path: Path, hf: Path) -> None:
    container = run(hf, tmp_path / "out")
    for name in ("config.json", "tokenizer.json", "generation_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (hf / name).read_bytes()
    assert set(container.tokenizer_files) == {"tokenizer.json", "generation_config.json"}
    assert container.generation_config == {"eos_token_id": [0, 4]}
    assert container.raw_config == json.loads((hf / "config.json").read_text())


# ---- the layout of others ------------------------------------------------------------------------------------------


def test_colibri_layout_has_the_names_dtypes_and_byte_counts_of_the_table(tmp_path: Path, hf: Path) -> None:
    run(hf, tmp_path / "out", layout="row_major")
    found = {}
    for path in (tmp_path / "out").glob("*.safetensors"):
        for tensor in read_index(path).tensors.values():
            found[tensor.name] = (path.name, tensor.dtype, tensor.shape)
    expected = {}
    for name, shape in named_shapes(small_config()).items():
        mtp, indexer = name.startswith("model.layers.3."), ".indexer." in name
        file = "out-mtp-00000.safetensors" if mtp else "out-idx-00000.safetensors" if indexer else "out-00000.safetensors"
        if len(shape) == 1 or name.endswith(("mlp.gate.weight", "indexer.weights_proj.weight")):
            expected[name] = (file, "F32", shape)
            continue
        rows, cols = shape
        if mtp or indexer or "embed_tokens" in name or "lm_head" in name:  # int8 rows
            weight_bytes, scales = rows * cols, rows
        else:  # int4 groups of 64
            weight_bytes, scales = rows * ((cols + 1) // 2), rows * ((cols + 63) // 64)
        expected[name] = (file, "U8", (weight_bytes,))
        expected[name + ".qs"] = (file, "F32", (scales,))
    assert found == expected


def test_colibri_layout_needs_no_tag_where_byte_counts_suffice(tmp_path: Path) -> None:
    config = small_config(hidden_size=64, intermediate_size=64, moe_intermediate_size=64, q_lora_rank=64)
    run(write_checkpoint(tmp_path / "hf", config, random_tensors(config)), tmp_path / "out", layout="row_major")
    for path in (tmp_path / "out").glob("*.safetensors"):
        assert json.loads(read_index(path).metadata["colibri_jax"]) == {"version": 1, "formats": {}}


# ---- interruption --------------------------------------------------------------------------------------------------


class Killed(BaseException):
    """Stands for whatever ends a process."""


def test_killed_at_every_tensor_it_resumes_to_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda fd: None)  # durability costs time here and changes no byte
    config = small_config(num_hidden_layers=1, first_k_dense_replace=0, indexer_types=["full"], n_routed_experts=2, num_experts_per_tok=1)
    hf = write_checkpoint(tmp_path / "hf", config, random_tensors(config))
    options: dict[str, Any] = {"shard_bytes": 15000}
    names: list[str] = []
    convert.run_conversion(convert.plan_conversion(hf, tmp_path / "whole", **options), lambda done, total, name: names.append(name))
    whole = contents(tmp_path / "whole")
    resumed_with_files = 0
    for stop in names:

        def killing(done: int, total: int, name: str, stop: str = stop) -> None:
            if name == stop:
                raise Killed

        target = tmp_path / stop
        with pytest.raises(Killed):
            convert.run_conversion(convert.plan_conversion(hf, target, **options), killing)
        with pytest.raises(IncompleteContainerError):
            Container.open(target)
        plan = convert.plan_conversion(hf, target, **options)
        resumed_with_files += bool(plan.finished)
        kept = {name: (target / name).stat().st_ino for name in plan.finished}
        convert.run_conversion(plan)
        assert contents(target) == whole
        assert kept == {name: (target / name).stat().st_ino for name in kept}  # finished files were not written again
        shutil.rmtree(target)
    assert len(names) == len(named_shapes(config))
    assert resumed_with_files > len(names) // 3


def test_killed_while_carrying_files_along_it_is_unfinished(tmp_path: Path, hf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(hf, tmp_path / "whole")
    real = convert._copy
    for name in ("tokenizer.json", "config.json"):

        def dying(origin: Path, target: Path, name: str = name) -> None:
            if target.name == name:
                raise Killed
            real(origin, target)

        monkeypatch.setattr(convert, "_copy", dying)
        with pytest.raises(Killed):
            convert.run_conversion(convert.plan_conversion(hf, tmp_path / name))
        monkeypatch.setattr(convert, "_copy", real)
        with pytest.raises(IncompleteContainerError):
            Container.open(tmp_path / name)
        run(hf, tmp_path / name)
        assert contents(tmp_path / name) == contents(tmp_path / "whole")


def test_progress_counts_bytes_up_to_the_total(tmp_path: Path, hf: Path) -> None:
    seen: list[tuple[int, int]] = []
    plan = convert.plan_conversion(hf, tmp_path / "out")
    convert.run_conversion(plan, lambda done, total, name: seen.append((done, total)))
    assert [total for _, total in seen] == [plan.total_bytes] * len(seen)
    assert sorted({done for done, _ in seen}) == [done for done, _ in seen]
    assert seen[-1][0] == plan.total_bytes
    assert plan.total_bytes < sum(path.stat().st_size for path in (tmp_path / "out").glob("*.safetensors")) == plan.remaining_bytes


def interrupted(hf: Path, target: Path, **options: Any) -> None:
    def killing(done: int, total: int, name: str) -> None:
        if name == "model.norm.weight":
            raise Killed

    with pytest.raises(Killed):
        convert.run_conversion(convert.plan_conversion(hf, target, **options), killing)


def test_another_conversion_does_not_continue_an_unfinished_one(tmp_path: Path, hf: Path) -> None:
    target = tmp_path / "out"
    interrupted(hf, target)
    for options in ({"layout": "row_major"}, {"group_size": 32}, {"scales": "f16"}, {"shard_bytes": 10**6}):
        with pytest.raises(OutputExistsError, match="another conversion"):
            convert.plan_conversion(hf, target, **options)
    convert.plan_conversion(hf, target)
    os.utime(hf / "model.safetensors", ns=(0, 0))
    with pytest.raises(OutputExistsError, match="source has changed"):
        convert.plan_conversion(hf, target)


def test_a_finished_file_of_another_size_stops_the_resumption(tmp_path: Path, hf: Path) -> None:
    target = tmp_path / "out"
    interrupted(hf, target, shard_bytes=9000)
    with (target / "out-00000.safetensors").open("ab") as file:
        file.write(b"x")
    with pytest.raises(OutputExistsError, match="out-00000"):
        convert.plan_conversion(hf, target, shard_bytes=9000)


def test_outputs_are_never_overwritten(tmp_path: Path, hf: Path) -> None:
    run(hf, tmp_path / "out")
    before = contents(tmp_path / "out")
    for target in (tmp_path / "out", hf):
        with pytest.raises(OutputExistsError, match="never overwritten"):
            convert.plan_conversion(hf, target)
    assert contents(tmp_path / "out") == before
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").write_text("mine")
    with pytest.raises(OutputExistsError, match=r"a\.txt"):
        convert.plan_conversion(hf, tmp_path / "notes")
    with pytest.raises(OutputExistsError, match="not a directory"):
        convert.plan_conversion(hf, tmp_path / "notes" / "a.txt")


def test_a_plan_is_void_when_the_output_changed_meanwhile(tmp_path: Path, hf: Path) -> None:
    first, second = (convert.plan_conversion(hf, tmp_path / "out") for _ in range(2))
    convert.run_conversion(first)
    with pytest.raises(OutputExistsError):
        convert.run_conversion(second)


def test_two_conversions_never_write_one_directory(tmp_path: Path, hf: Path) -> None:
    refused = []

    def second(done: int, total: int, name: str) -> None:
        if not refused:
            with pytest.raises(OutputExistsError, match="another conversion is writing") as error:
                convert.run_conversion(convert.plan_conversion(hf, tmp_path / "out"))
            refused.append(error)

    convert.run_conversion(convert.plan_conversion(hf, tmp_path / "out"), second)
    Container.open(tmp_path / "out")
    assert refused


# ---- no space ------------------------------------------------------------------------------------------------------


def test_too_little_space_is_found_before_anything_is_written(tmp_path: Path, hf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = convert.plan_conversion(hf, tmp_path / "out")
    usage = shutil.disk_usage(tmp_path)
    for free, fits in ((plan.remaining_bytes - 1, False), (plan.remaining_bytes, True)):
        monkeypatch.setattr(shutil, "disk_usage", lambda path, free=free: usage._replace(free=free))
        if fits:
            convert.run_conversion(plan)
        else:
            with pytest.raises(NoSpaceError, match=str(plan.remaining_bytes)):
                convert.run_conversion(plan)
            assert list((tmp_path / "out").glob("out*")) == []


@pytest.mark.parametrize("at", [0, 1, 3])
def test_a_disk_that_fills_up_is_named_and_the_rest_follows_later(
    tmp_path: Path, hf: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    real, opened = os.write, []

    def full(fd: int, data: memoryview) -> int:
        name = Path(os.readlink(f"/proc/self/fd/{fd}")).name
        if name.endswith(".part") and name not in opened:
            opened.append(name)
        if len(opened) > at:
            raise OSError(28, "No space left on device")
        return real(fd, data)

    monkeypatch.setattr(os, "write", full)
    plan = convert.plan_conversion(hf, tmp_path / "out", shard_bytes=9000)
    with pytest.raises(NoSpaceError):
        convert.run_conversion(plan)
    monkeypatch.setattr(os, "write", real)
    with pytest.raises(IncompleteContainerError):
        Container.open(tmp_path / "out")
    assert list((tmp_path / "out").glob("*.part")) == []
    plan = convert.plan_conversion(hf, tmp_path / "out", shard_bytes=9000)
    assert len(plan.finished) == at
    convert.run_conversion(plan)
    run(hf, tmp_path / "whole", shard_bytes=9000)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


# ---- sources that are refused --------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(
    "name", [EXPERT, "model.norm.weight", "model.layers.1.mlp.gate.weight", "model.layers.0.self_attn.kv_b_proj.weight"]
)
def test_weights_that_are_not_finite_are_never_quantised(tmp_path: Path, tensors: dict[str, np.ndarray], name: str, value: float) -> None:
    bad = tensors[name].copy()
    bad[(-1,) * bad.ndim] = value
    path = write_checkpoint(tmp_path / "hf", small_config(), {**tensors, name: bad})
    with pytest.raises(NonFiniteWeightError, match=name):
        run(path, tmp_path / "out")
    with pytest.raises(IncompleteContainerError):
        Container.open(tmp_path / "out")
    with pytest.raises(NonFiniteWeightError, match=name):
        load_hf(path)


def test_block_scales_that_overflow_are_found(tmp_path: Path, tensors: dict[str, np.ndarray]) -> None:
    path = write_checkpoint(tmp_path / "hf", small_config(), tensors, dtype="F8_E4M3")
    scale = read_index(path / "model.safetensors").tensors[EXPERT + "_scale_inv"]
    raw = bytearray((path / "model.safetensors").read_bytes())
    raw[scale.offset : scale.offset + 4] = np.float32(3e38).tobytes()
    (path / "model.safetensors").write_bytes(raw)
    with pytest.raises(NonFiniteWeightError, match=EXPERT):
        run(path, tmp_path / "out")


def test_missing_unexpected_and_misshapen_source_tensors_are_named(tmp_path: Path, tensors: dict[str, np.ndarray]) -> None:
    cases: list[tuple[dict[str, np.ndarray], Any, str]] = [
        ({n: t for n, t in tensors.items() if n != EXPERT}, MissingTensorError, EXPERT),
        ({**tensors, "model.layers.0.extra": np.zeros(2, np.float32)}, UnexpectedTensorError, "extra"),
        ({**tensors, EXPERT + "_scale_inv": np.zeros((1, 1), np.float32)}, UnexpectedTensorError, "scale_inv"),
        ({**tensors, EXPERT: tensors[EXPERT].T}, ShapeError, EXPERT),
        ({**tensors, EXPERT: tensors[EXPERT].reshape(-1)}, ShapeError, EXPERT),
    ]
    for number, (changed, error, match) in enumerate(cases):
        path = write_checkpoint(tmp_path / str(number), small_config(), changed)
        with pytest.raises(error, match=match):
            convert.plan_conversion(path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_rotary_buffers_are_tolerated(tmp_path: Path, tensors: dict[str, np.ndarray]) -> None:
    more = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(2, np.float32), "model.rotary_emb.inv_freq": np.ones(2, np.float32)}
    container = run(write_checkpoint(tmp_path / "hf", small_config(), {**tensors, **more}), tmp_path / "out")
    assert len(container.entries) == len(tensors)


def test_fp8_weights_without_or_with_wrong_block_scales_are_refused(tmp_path: Path, tensors: dict[str, np.ndarray]) -> None:
    path = write_checkpoint(tmp_path / "hf", small_config(), tensors, dtype="F8_E4M3")
    file = path / "model.safetensors"
    index, raw = read_index(file), file.read_bytes()
    blobs = {t.name: (t.name, t.dtype, list(t.shape), raw[t.offset : t.offset + t.nbytes]) for t in index.tensors.values()}
    scale = EXPERT + "_scale_inv"
    write_file(file, [blob for name, blob in blobs.items() if name != scale])
    with pytest.raises(MissingTensorError, match=scale):
        SourceCheckpoint.open(path)
    write_file(file, list({**blobs, scale: (scale, "F32", [2, 1], bytes(8))}.values()))
    with pytest.raises(ShapeError, match=scale):
        SourceCheckpoint.open(path)
    write_file(file, list({**blobs, EXPERT: (EXPERT, "I8", *blobs[EXPERT][2:])}.values()))
    with pytest.raises(ShapeError, match="I8"):
        SourceCheckpoint.open(path)


def test_sources_that_are_no_checkpoints_are_refused(tmp_path: Path, hf: Path) -> None:
    with pytest.raises(MissingFileError, match=r"config\.json"):
        convert.plan_conversion(tmp_path / "nowhere", tmp_path / "out")
    (hf / "model.safetensors").rename(hf / "other.bin")
    with pytest.raises(MissingFileError, match="safetensors"):
        convert.plan_conversion(hf, tmp_path / "out")
    (hf / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-9.safetensors"}}')
    with pytest.raises(MissingFileError, match="model-9"):
        convert.plan_conversion(hf, tmp_path / "out")
    (hf / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../x.safetensors"}}')
    with pytest.raises(HeaderError, match="shard index"):
        convert.plan_conversion(hf, tmp_path / "out")
    (hf / "config.json").write_text(json.dumps(small_config(model_type="llama")))
    with pytest.raises(UnsupportedFamilyError, match="llama"):
        convert.plan_conversion(hf, tmp_path / "out")
    (hf / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match=r"config\.json"):
        convert.plan_conversion(hf, tmp_path / "out")


def test_a_container_is_not_taken_for_a_source(tmp_path: Path, hf: Path) -> None:
    run(hf, tmp_path / "out")
    with pytest.raises(ShapeError, match="U8"):
        convert.plan_conversion(tmp_path / "out", tmp_path / "again")


@pytest.mark.parametrize("options", [{"layout": "columns"}, {"group_size": 0}, {"group_size": 65}, {"scales": "bf16"}, {"shard_bytes": 0}])
def test_options_are_checked_first(tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match=next(iter(options))):
        convert.plan_conversion(tmp_path / "nowhere", tmp_path / "out", **options)


def test_row_major_has_float32_scales_only(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="scales; expected: f32, or layout rows16"):
        convert.plan_conversion(tmp_path / "nowhere", tmp_path / "out", layout="row_major", scales="f16")


def test_the_plan_says_what_will_be_written(tmp_path: Path, hf: Path) -> None:
    lines = "\n".join(convert.plan_conversion(hf, tmp_path / "out").lines())
    for part in (str(hf), str(tmp_path / "out"), "glm_moe_dsa", "int4_g64_rows16", "int8_rows", "groups of 64", "f32 scales"):
        assert part in lines
    lines = "\n".join(convert.plan_conversion(hf, tmp_path / "out", scales="f16").lines())
    assert "int4_g64_rows16_f16" in lines
    assert "f16 scales" in lines
    interrupted(hf, tmp_path / "out", shard_bytes=9000)
    assert "from an earlier run" in "\n".join(convert.plan_conversion(hf, tmp_path / "out", shard_bytes=9000).lines())
