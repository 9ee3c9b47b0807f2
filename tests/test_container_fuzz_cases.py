"""What fuzzing the container reader found, kept without the fuzzer, and proof that its checks can fail."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fuzz.mutations import CONFIG_FILE, WEIGHTS_FILE, bases, damaged
from fuzz.target import STAGES, AllocationError, Directory, Observer

from colibri_jax.config import ModelConfig
from colibri_jax.container import format as container_format
from colibri_jax.container.reader import Container
from colibri_jax.errors import (
    ColibriError,
    ConfigError,
    HeaderError,
    MissingTensorError,
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
