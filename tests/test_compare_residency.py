"""One layer of the reference at a time gives the same report as all of it, and holds no more than that layer."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import bigger_than_memory as script
import jax
import numpy as np
import pytest
from click.testing import CliRunner
from engine_models import converted
from family_models import CONFIGS
from oracles import random_glm
from oracles.checkpoints import small_config

import colibri_jax.compare
from colibri_jax.cli import main
from colibri_jax.cli.compare import parse_layers
from colibri_jax.compare import CompareOptions, CompareReport, compare
from colibri_jax.compare import run as running
from colibri_jax.compare.layers import PartByPart
from colibri_jax.compare.step import NativeStep, Recording
from colibri_jax.compare.whole import Follower, OwnChoices, WholeModel
from colibri_jax.config import ModelConfig
from colibri_jax.container.reader import Container
from colibri_jax.engine import options as engine_options
from colibri_jax.engine.session import NativeModel
from colibri_jax.errors import ConfigError, MissingTensorError, OptionError
from colibri_jax.load import load
from colibri_jax.reference import head as reference_head
from colibri_jax.reference import layer as reference_layer
from colibri_jax.reference.model import ReferenceModel
from colibri_jax.routing_spec import SCOPES, RoutingOptions
from colibri_jax.tokenizer import ChatTokenizer

# Dense and full, sparse and shared, sparse and full; the indexer acts from position 8 on. Experts are most of it, as in large models.
GLM = small_config(
    vocab_size=90, n_routed_experts=12, num_experts_per_tok=3, num_nextn_predict_layers=1, index_n_heads=16, moe_intermediate_size=150
)
FAMILIES = {"glm_moe_dsa": GLM, "mixtral": CONFIGS["mixtral"]}
TOKENS = np.random.default_rng(11).integers(0, 60, 20).tolist()
# 16 in one prefill step, then a verification of 4 rows, so that few shapes are compiled.
OPTIONS = CompareOptions(tokens=20, prefill=16, verify_rows=4, greedy=0)
BUDGET = RoutingOptions(budget=5)


@pytest.fixture(scope="module")
def container_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made = {family: converted(tmp_path_factory.mktemp("model"), config) for family, config in FAMILIES.items()}
    return made.__getitem__


class Watched(Mapping[str, Any]):
    """A container's tensors, with what was asked for, and how many bytes were on the device at that moment."""

    def __init__(self, path: Path) -> None:
        self.container = Container.open(path)
        self.asked: list[str] = []
        self.most_bytes = 0

    def __getitem__(self, role: str) -> Any:
        self.asked.append(role)
        self.most_bytes = max(self.most_bytes, sum(array.nbytes for array in jax.live_arrays()))
        return self.container.read(role)

    def __contains__(self, role: object) -> bool:
        return role in self.container.entries

    def __iter__(self) -> Iterator[str]:
        return iter(self.container.entries)

    def __len__(self) -> int:
        return len(self.container.entries)

    def times_loaded(self) -> Counter[int]:
        """How often each layer was."""
        return Counter(int(role.split(".")[1]) for role in self.asked if role.endswith(".attn_norm"))

    def reference(self, **options: Any) -> ReferenceModel:
        options = {"expert_residency": "kept", "layer_residency": "one", "routing": BUDGET, "budget_scopes": SCOPES, **options}
        return ReferenceModel(self.container.runnable_config, self, **options)


def recorded(path: Path, **options: Any) -> list[NativeStep]:
    def native() -> NativeModel:
        model = load(path, cache_experts=2, routing=BUDGET, budget_scopes=SCOPES, **options)
        assert isinstance(model, NativeModel)
        return model

    return Recording(native, np.asarray(TOKENS), [(16, "prefill"), (4, "verify")]).run(native())


def reports(path: Path, **arguments: Any) -> list[CompareReport]:
    common = {"routing": BUDGET, "budget_scopes": SCOPES, "options": OPTIONS, **arguments}
    return [compare(path, TOKENS, residency=residency, **common) for residency in ("all", "layer")]


# ---- the same report


@pytest.mark.parametrize("family", FAMILIES)
def test_reports_are_equal(family: str, container_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """With a budget in every scope, experts in several parts, and greedy tokens where the layers are loaded for each."""
    monkeypatch.setattr(reference_layer, "_EXPERTS_AT_ONCE", 4)
    options = dataclasses.replace(OPTIONS, greedy=2) if family == "mixtral" else OPTIONS
    everything, layerwise = reports(container_of(family), options=options)
    assert layerwise == everything
    assert layerwise.passed, layerwise.lines()
    assert layerwise.parts.selections_cut > 0
    assert layerwise.parts.equal_rows == layerwise.parts.rows == 20 * (3 + 2)
    assert (layerwise.parts.attended_rows > 0) == (family == "glm_moe_dsa")
    assert layerwise.shipped is not None
    assert layerwise.shipped.equal_positions == 20
    assert (layerwise.greedy is None) == (family != "mixtral")


def test_chosen_layers_are_compared_and_no_other_is_loaded(container_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    path, watched = container_of("glm_moe_dsa"), Watched(container_of("glm_moe_dsa"))

    def load_watched(source: Path, backend: str = "native", **options: Any) -> Any:
        return load(source, **options) if backend == "native" else watched.reference(precision="w4a8")

    monkeypatch.setattr(running, "load", load_watched)
    arguments: dict[str, Any] = {"routing": BUDGET, "budget_scopes": SCOPES, "options": OPTIONS, "residency": "layer"}
    report = compare(path, TOKENS, layers=[2], **arguments)
    assert (report.layers, report.parts.rows, report.parts.equal_rows, report.parts.selections) == ((2,), 20, 20, 2)
    assert report.float_activations is report.shipped is report.greedy is None
    assert set(report.verdicts) == {"selections", "layers"}
    assert report.passed
    assert "layers 2 only" in report.lines()[0]
    assert report.to_json()["passed"]
    assert watched.times_loaded() == {2: 1}
    assert not {"embed", "head"} & set(watched.asked)
    # Layer 1 attends where the indexer of layer 0 says.
    report = compare(path, TOKENS, layers=[1], **arguments)
    assert report.layers == (0, 1)
    assert report.parts.attended_rows == 2 * 12
    for layers in ([3], [-1, 2], []):
        with pytest.raises(OptionError, match="layer"):
            compare(path, TOKENS, layers=layers, **arguments)


def test_a_difference_is_explained_although_the_engine_is_gone(container_of: Callable[[str], Path]) -> None:
    """Quantiser inputs come from another run of the engine, and are those of the first."""
    path = container_of("glm_moe_dsa")
    live = load(path, cache_experts=2, routing=BUDGET, budget_scopes=SCOPES)
    assert isinstance(live, NativeModel)
    live.set_trace(True)
    for step in recorded(path):
        assert step.trace["inputs"] == []
        expected = NativeStep(live, step.tokens, step.scope, live.forward(step.tokens, scope=step.scope))
        assert expected.trace["inputs"]
        for layer in (2, 0, 2):
            ours, theirs = step.inputs(layer), expected.inputs(layer)
            assert theirs
            assert len(ours) == len(theirs)
            for (at, name, rows, values), (their_layer, their_name, their_rows, their_values) in zip(ours, theirs, strict=True):
                assert (at, name) == (their_layer, their_name) == (layer, name)
                np.testing.assert_array_equal(rows, their_rows)
                np.testing.assert_array_equal(values, their_values)


# ---- what is in memory


def test_every_layer_is_loaded_once_and_held_alone(container_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference_layer, "_EXPERTS_AT_ONCE", 2)
    path = container_of("glm_moe_dsa")
    steps = recorded(path, precision="w4a32")
    before = sum(array.nbytes for array in jax.live_arrays())
    watched, result = Watched(path), WholeModel()
    follower = Follower(watched.reference(precision="w4a32"))
    for _ in zip(*[follower.walk(step, result) for step in steps], strict=True):
        pass
    assert result.positions == 20
    assert watched.times_loaded() == {0: 1, 1: 1, 2: 1}
    assert (watched.asked.count("embed"), watched.asked.count("head")) == (1, 1)
    expert_bytes = 3 * 4 * 72 * 150
    # Two experts, the next one's matrices, one layer's other weights, and the caches of all.
    assert watched.most_bytes - before < 5 * expert_bytes
    everything = Watched(path)
    everything.reference(precision="w4a32", expert_residency="all", layer_residency="all")
    assert everything.most_bytes - before > 20 * expert_bytes


def test_step_after_step_loads_every_layer_for_each(container_of: Callable[[str], Path]) -> None:
    """The planted fault of the count above; the result is the same."""
    steps = recorded(container_of("mixtral"))
    watched, by_step, by_layer = Watched(container_of("mixtral")), WholeModel(), WholeModel()
    own = OwnChoices(watched.reference(precision="w4a8"))
    for step in steps:
        own.step(step, by_step)
    assert watched.times_loaded() == {0: 2, 1: 2, 2: 2}
    own = OwnChoices(watched.reference(precision="w4a8"))
    for _ in zip(*[own.walk(step, by_layer) for step in steps], strict=True):
        pass
    assert watched.times_loaded() == {0: 3, 1: 3, 2: 3}
    assert by_layer == by_step
    assert by_step.equal_positions == by_step.positions == 20


def test_one_layer_at_a_time_has_no_draft_block_and_refuses_what_is_missing(container_of: Callable[[str], Path]) -> None:
    watched = Watched(container_of("glm_moe_dsa"))
    assert watched.container.runnable_config.n_mtp_layers == 1
    model = watched.reference(precision="w4a8")
    assert watched.asked == ["final_norm"]
    with pytest.raises(ConfigError, match="in memory"):
        model.mtp_forward([1], np.zeros((1, 72), np.float32))
    del watched.container.entries["layers.2.experts.11.down"]
    with pytest.raises(MissingTensorError, match=r"layers\.2\.experts\.11\.down"):
        watched.reference(precision="w4a8")


def test_the_head_in_blocks_gives_the_same_logits(container_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    hidden_TD = np.random.default_rng(2).standard_normal((4, 84)).astype(np.float32)
    whole, watched = (Watched(container_of("mixtral")).reference(precision="w4a8") for _ in range(2))
    expected = whole.score(hidden_TD)
    monkeypatch.setattr(reference_head, "_HEAD_ROWS", 25)
    np.testing.assert_array_equal(watched.score(hidden_TD), expected)
    assert expected.shape == (4, 61)


def test_an_unknown_residency_is_refused(container_of: Callable[[str], Path]) -> None:
    for backend, residency in (("reference", "some"), ("native", "layer")):
        with pytest.raises(OptionError, match="residency"):
            load(container_of("mixtral"), backend=backend, residency=residency)  # type: ignore[arg-type]
    config = ModelConfig.from_hf(random_glm.hf_config(0))
    with pytest.raises(OptionError, match="layer_residency"):
        ReferenceModel(config, {}, layer_residency="some")  # type: ignore[arg-type]


# ---- the command and the script


@pytest.mark.parametrize(("text", "layers"), [("3", (3,)), ("40-42,3", (3, 40, 41, 42)), (" 1 , 1-2", (1, 2))])
def test_layers_are_numbers_and_ranges(text: str, layers: tuple[int, ...]) -> None:
    assert parse_layers(text) == layers


@pytest.mark.parametrize("text", ["", "a", "3-", "-3", "5-4", "1,,2", "0-99999999999"])
def test_other_layers_are_refused(text: str) -> None:
    with pytest.raises(Exception, match=r"layer|list"):
        parse_layers(text)


@pytest.mark.parametrize(
    ("flags", "free", "expected", "said"),
    [
        ([], 10**12, {"residency": "all", "greedy": 32}, ""),
        ([], 10**5, {"residency": "layer", "greedy": 0}, "held one layer at a time (0.0 GB in float32, 0.0 GB free)"),
        (["--greedy", "3"], 10**5, {"residency": "layer", "greedy": 3}, "held one layer at a time"),
        (["--residency", "all"], 10**5, {"residency": "all", "greedy": 32}, ""),
        (["--residency", "layer"], 10**12, {"residency": "layer", "greedy": 0}, "no greedy tokens"),
        (["--layers", "1-2"], 10**12, {"residency": "layer", "layers": (1, 2)}, ""),
        (["--ram-gb", "0.5"], 10**12, {"ram_bytes": 500_000_000, "cache_experts": None}, ""),
        (["--cache-experts", "3"], 10**12, {"ram_bytes": None, "cache_experts": 3, "layers": None}, ""),
    ],
)
def test_command_takes_layer_by_layer_what_would_not_fit(
    flags: list[str], free: int, expected: dict[str, Any], said: str, container_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, Any] = {}

    class Report:
        passed = True

        def lines(self) -> list[str]:
            return ["the report"]

    def compared(path: Path, prompt_ids: list[int], *, options: CompareOptions, **arguments: Any) -> Report:
        seen.update(arguments, **dataclasses.asdict(options))
        return Report()

    monkeypatch.setattr(colibri_jax.compare, "compare", compared)
    monkeypatch.setattr(engine_options, "free_memory_bytes", lambda: free)
    monkeypatch.setattr(ChatTokenizer, "from_directory", lambda path: FakeTokenizer())
    result = CliRunner().invoke(main, ["compare", str(container_of("glm_moe_dsa")), *flags], prog_name="colibri-jax")
    assert (result.exit_code, result.stdout) == (0, "the report\n")
    assert {name: seen[name] for name in expected} == expected
    assert said in result.stderr
    assert bool(said) == bool(result.stderr.strip())


class FakeTokenizer:
    def encode_chat(self, messages: list[dict[str, str]]) -> list[int]:
        return [1, 2, 3]


def outcomes(**changes: script.Outcome) -> dict[str, script.Outcome]:
    parts = dataclasses.asdict(PartByPart(rows=12 * 5, selections=9, selections_cut=3))
    good = script.Outcome(report={"passed": True, "verdicts": {"layers": True}, "parts": parts}, peak_address_bytes=90)
    found = script.Outcome(report={"passed": False, "verdicts": {"layers": False}, "parts": parts}, peak_address_bytes=90)
    memory = script.Outcome(failure="MemoryError", out_of_memory=True)
    named = {"whole": good, "one_layer": good, "changed_weight": found, "all_in_memory": memory, **changes}
    return {name.replace("_", " "): outcome for name, outcome in named.items()}


def test_the_script_passes_only_what_it_should() -> None:
    good = outcomes()
    assert script.failures(200, 100, 3, good) == []
    assert "not larger" in script.failures(100, 100, 3, good)[0]
    assert "rows of 72" in script.failures(200, 100, 4, good)[0]
    for name in good:
        failed = outcomes(**{name.replace(" ", "_"): script.Outcome(failure="exit status 1")})
        assert [failure.split(":")[0] for failure in script.failures(200, 100, 3, failed)] == [name]
    for name, other in (("whole", "changed weight"), ("changed weight", "whole"), ("all in memory", "whole")):
        assert len(script.failures(200, 100, 3, {**good, name: good[other]})) >= 1
    beyond = outcomes(whole=dataclasses.replace(good["whole"], peak_address_bytes=101))
    assert "under a limit of 100" in script.failures(200, 100, 3, beyond)[0]
