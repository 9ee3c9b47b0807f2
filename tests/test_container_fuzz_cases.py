"""What fuzzing the container reader found, the fuzzer's own checks, and damaged descriptions given to the native engine."""

from __future__ import annotations

import copy
import json
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from expert_files import PARTS, ExpertFiles, write_experts
from fuzz.mutations import CONFIG_FILE, WEIGHTS_FILE, bases, damaged
from fuzz.target import STAGES, AllocationError, Directory, Observer
from hypothesis import given, settings
from hypothesis import strategies as st

from colibri_jax import _native
from colibri_jax.config import ModelConfig
from colibri_jax.container import format as container_format
from colibri_jax.container.reader import Container
from colibri_jax.errors import (
    ColibriError,
    ConfigError,
    HeaderError,
    MissingTensorError,
    ShapeError,
    UnknownFormatError,
    UnsupportedFamilyError,
)
from colibri_jax.quant import WeightFormat

CORPUS = Path(__file__).parent / "data" / "fuzz_container" / "inputs.txt"
GLM, DEEPSEEK, QWEN, MIXTRAL = 0, 2, 3, 4  # of `bases()`
HUGE = 10**400


def try_input(directory: Directory, data: bytes) -> str:
    """The fuzzer's question, with memory measured."""
    directory.write(damaged(data))
    return Observer().run(directory.path, 64, 0, measured=True)


@pytest.fixture
def directory(tmp_path: Path) -> Directory:
    return Directory(tmp_path)


# ---- replay ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("base", range(5))
def test_containers_without_damage_open(base: int, directory: Directory) -> None:
    assert try_input(directory, bytes([base])) == ""
    assert Container.open(directory.path, 64).entries


def test_inputs_that_the_fuzzer_found_new_are_read_or_refused(directory: Directory) -> None:
    inputs = [bytes.fromhex(line) for line in CORPUS.read_text().split()]
    assert len(inputs) > 100
    refusals = {try_input(directory, data) for data in inputs}
    assert len(refusals) >= 10  # as many causes, or none


def test_random_damage_is_read_or_refused_and_mostly_past_json(directory: Directory) -> None:
    rng, observer = random.Random(3), Observer()
    with observer.installed():
        for number in range(400):
            directory.write(damaged(bytes([number % 5]) + rng.randbytes(rng.randrange(12))))
            observer.run(directory.path, 64, number, measured=number % 8 == 0)
    assert all(observer.reached[stage] > 20 for stage in STAGES)
    assert observer.reached["header parsed"] > 400 // 5


# ---- the checks can fail -----------------------------------------------------------------------------------------------


def test_an_error_of_another_kind_is_a_crash(directory: Directory, monkeypatch: pytest.MonkeyPatch) -> None:
    def careless(entry: Any, *_: object) -> Any:
        raise KeyError(entry)

    monkeypatch.setattr(container_format, "_tensor", careless)
    with pytest.raises(KeyError):
        try_input(directory, bytes([GLM]))


def test_memory_that_the_files_do_not_account_for_is_a_crash(directory: Directory, monkeypatch: pytest.MonkeyPatch) -> None:
    genuine = container_format.read_index

    def wasteful(path: Path) -> Any:
        return genuine(path) if bytearray(20_000_000) else None

    monkeypatch.setattr("colibri_jax.container.directory.read_index", wasteful)
    with pytest.raises(AllocationError):
        try_input(directory, bytes([GLM]))


# ---- what it found: each was another exception, or memory without bound -------------------------------------------------


@pytest.mark.parametrize(
    ("base", "changes"),
    [
        (GLM, {"rms_norm_eps": HUGE}),
        (GLM, {"vocab_size": 2**53 + 1}),
        (GLM, {"indexer_types": 8}),
        (GLM, {"indexer_types": [["full"]]}),
        (GLM, {"indexer_types": None, "index_topk_pattern": 1.5}),
        (DEEPSEEK, {"mlp_layer_types": 64}),
        (DEEPSEEK, {"mlp_layer_types": [["dense"], None]}),
        (DEEPSEEK, {"mlp_layer_types": ["dense", 3]}),
        (DEEPSEEK, {"rope_scaling": {"type": "yarn", "original_max_position_embeddings": 0}}),
        (DEEPSEEK, {"rope_scaling": {"type": "yarn", "original_max_position_embeddings": HUGE}}),
        (DEEPSEEK, {"rope_scaling": {"type": "yarn", "factor": HUGE, "original_max_position_embeddings": 16}}),
        (DEEPSEEK, {"rope_scaling": {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 16, "mscale_all_dim": -100.0}}),
        (QWEN, {"mlp_only_layers": 1}),
        (QWEN, {"mlp_only_layers": "01"}),
        (QWEN, {"head_dim": HUGE}),
        (MIXTRAL, {"num_attention_heads": 0}),
    ],
    ids=str,
)
def test_configurations_of_the_wrong_type_or_size_are_refused(base: int, changes: dict[str, Any]) -> None:
    config = bases()[base].config
    ModelConfig.from_hf(config)
    with pytest.raises(ConfigError):
        ModelConfig.from_hf({**config, **changes})


@pytest.mark.parametrize("family", [[], {}, 7, None, ["mixtral"]])
def test_a_family_that_is_no_name_is_refused(family: Any) -> None:
    with pytest.raises(UnsupportedFamilyError):
        ModelConfig.from_hf({"model_type": family})


def rewrite(directory: Directory, base: int, change: Callable[[dict[str, Any]], None]) -> None:
    """A container with another header."""
    files = damaged(bytes([base]))
    content = files[WEIGHTS_FILE]
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    directory.write({**files, WEIGHTS_FILE: struct.pack("<Q", len(text)) + text + content[8 + length :]})


def test_counts_that_no_file_can_have_are_refused(directory: Directory) -> None:
    """Their product has more digits than Python prints."""
    large = 10**4000
    for field, value in (("shape", [large] * 8), ("shape", [2**64]), ("data_offsets", [0, large])):
        rewrite(directory, MIXTRAL, lambda header, f=field, v=value: header["model.norm.weight"].update({f: v}))  # type: ignore[misc]
        with pytest.raises(HeaderError, match="malformed"):
            Container.open(directory.path, 64)


@pytest.mark.parametrize("tag", ["int4_g" + "9" * 5000, "int4_g٦٤", "int4_g0", "int4_g064"])
def test_group_sizes_are_short_plain_numbers(tag: str) -> None:
    with pytest.raises(UnknownFormatError):
        WeightFormat.from_tag(tag)


def test_a_key_that_comes_twice_is_found_in_one_pass() -> None:
    names = ",".join(f'"{i}":0' for i in range(100_000))
    with pytest.raises(HeaderError, match="duplicate key; where: f; got: 99999"):
        container_format._parse_json(f'{{{names},"99999":0}}'.encode(), Path("f"))


@pytest.mark.parametrize("base", [GLM, 1])
def test_a_small_file_cannot_claim_more_tensors_than_there_is_memory_to_list(base: int, directory: Directory) -> None:
    """The second container is untagged: there the MTP block, with experts of its own, may be missing."""
    files = damaged(bytes([base]))
    config = {**json.loads(files[CONFIG_FILE]), "num_hidden_layers": 4096, "n_routed_experts": 65_536, "num_nextn_predict_layers": 1}
    config["indexer_types"] = ["full"] * 4096
    trunk_is_dense = {**json.loads(files[CONFIG_FILE]), "n_routed_experts": 65_536}
    for claimed in (config, trunk_is_dense) if base else (config,):
        directory.write({**files, CONFIG_FILE: json.dumps(claimed).encode()})
        Observer().run(directory.path, 64, 0, measured=True)
        with pytest.raises(ColibriError):
            Container.open(directory.path, 64)
    if base:

        def drop_block(header: dict[str, Any]) -> None:
            """The MTP block's tensors become one that a checkpoint may repeat."""
            gone = [header.pop(name) for name in list(header) if name.startswith("model.layers.1.")]
            begin, end = gone[0]["data_offsets"][0], gone[-1]["data_offsets"][1]
            header["model.layers.1.embed_tokens.weight"] = {"dtype": "U8", "shape": [end - begin], "data_offsets": [begin, end]}

        rewrite(directory, base, drop_block)
        assert Container.open(directory.path, 64).missing
        (directory.path / CONFIG_FILE).write_text(json.dumps(trunk_is_dense))
        with pytest.raises(MissingTensorError):
            Container.open(directory.path, 64)


# ---- descriptions for native code ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> ExpertFiles:
    return write_experts(tmp_path_factory.mktemp("described"), WeightFormat(4, 64), layers=1, experts=2)


def test_sizes_whose_byte_counts_wrap_around_are_refused(experts: ExpertFiles) -> None:
    """2^62 more rows of 72 columns are 36 · 2^62 more bytes, which is nothing in 64 bits; so are their scales."""
    index = copy.deepcopy(experts.index)
    for expert in index[0]:
        expert["gate"]["rows"] += 2**62
    with pytest.raises(ShapeError, match="larger than any file"):
        _native.ExpertStore(experts.files, index)
    with pytest.raises(ShapeError, match="larger than any file"):
        _native.repack_rows16(b"", b"", rows=2**62, cols=4, bits=8, group_size=0)


numbers = st.one_of(
    st.sampled_from(
        [0, 1, -1, 15, 16, 2**31 - 1, 2**31, 2**32, 2**53, 2**62, 2**63 - 1, 2**63, 2**64 - 1, 2**64, -(2**31), -(2**63), HUGE]
    ),
    st.integers(-(2**40), 2**40),
    st.integers(-100, 5000),
)
values = st.one_of(numbers, st.sampled_from([None, True, 1.5, "64", b"x", [], {}, float("nan")]))
paths = st.tuples(
    st.integers(0, 1),
    st.sampled_from(PARTS),
    st.one_of(
        st.sampled_from(["rows", "cols", "bits", "group_size", "rows16", "weights", "scales"]),
        st.tuples(st.sampled_from(["weights", "scales"]), st.integers(0, 3)),
    ),
)


@settings(max_examples=400)
@given(damage=st.lists(st.tuples(paths, values), min_size=1, max_size=4), both=st.booleans())
def test_damaged_descriptions_are_refused_by_an_exception(damage: list[Any], both: bool, experts: ExpertFiles) -> None:
    """Or mean something: then every byte handed out lies in the files."""
    index = copy.deepcopy(experts.index)
    for (expert, part, where), value in damage:
        for described in index[0] if both else [index[0][expert]]:
            matrix = described[part]
            if isinstance(where, str):
                matrix[where] = value
            else:
                extent = matrix[where[0]]
                matrix[where[0]] = (*extent[: where[1]], value, *extent[where[1] + 1 :]) if isinstance(extent, tuple) else value
    arguments = {"cache_experts": 1, "io_threads": 1}
    try:
        _native.ExpertStore.memory_bytes(experts.files, index, **arguments)
        store = _native.ExpertStore(experts.files, index, **arguments)
        walk = store.walk(0, [0, 1])
        for expert in (0, 1):
            lease = walk.next()
            assert lease.expert == expert
            assert lease.gate() is not None
            lease.release()
        walk.close()
    except (ColibriError, TypeError, ValueError, RuntimeError, OverflowError, KeyError, MemoryError):
        pass
