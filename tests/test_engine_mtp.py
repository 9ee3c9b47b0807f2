"""The native engine's MTP block: equal to the reference bit for bit, whatever depth, cache, threads, kernels and rewinds."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import engine_models as models
import family_models
import jax
import jax.numpy as jnp
import mtp_runs
import numpy as np
import pytest
from engine_models import EVEN, ODD, bits, random_tokens
from mtp_runs import Answer, block, differences, forward, play
from readers import USABLE

import colibri_jax
from colibri_jax import RoutingOptions, _native
from colibri_jax.cli.options import SHIPPED_MODEL
from colibri_jax.engine.session import NativeModel
from colibri_jax.errors import (
    ConfigError,
    ContextOverflowError,
    MemoryBudgetError,
    OptionError,
    ReadError,
    RewindError,
    ShapeError,
    TokenError,
    UnknownFormatError,
)
from colibri_jax.reference import mtp
from colibri_jax.reference.model import ReferenceModel
from colibri_jax.routing_spec import SCOPES
from colibri_jax.tokenizer import ChatTokenizer

ISAS: list[str] = _native.kernels.available_isas() + _native.kernels.emulated_isas()
EVEN_MTP = {**EVEN, "num_nextn_predict_layers": 1}
CONFIGS: dict[str, dict[str, Any]] = {"odd": ODD, "even": EVEN_MTP}
ACCEPTED = {1: (0, 1, 0, 1), 2: (0, 2, 1), 3: (3, 0, 1), 4: (2, 4, 0)}


@pytest.fixture(scope="module")
def containers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Small models with an MTP block; "even" has int4 groups of 32 with float16 scales in the trunk, and no shared expert."""
    return {
        "odd": models.converted(tmp_path_factory.mktemp("odd"), ODD),
        "even": models.converted(tmp_path_factory.mktemp("even"), EVEN_MTP, group_size=32, scales="f16"),
    }


def native(path: Path, **options: Any) -> NativeModel:
    model = colibri_jax.load(path, **{"cache_experts": 3, "threads": 2, "mtp": True, **options})
    assert isinstance(model, NativeModel)
    return model


def reference(path: Path, **options: Any) -> ReferenceModel:
    model = colibri_jax.load(path, backend="reference", mtp=True, **options)
    assert isinstance(model, ReferenceModel)
    return model


def prompt_of(name: str) -> list[int]:
    return random_tokens(CONFIGS[name], 26)


# ---- equal to the reference ---------------------------------------------------------------------------------------

ROUTINGS = (
    RoutingOptions(),
    RoutingOptions(expert_topk=2, budget=3),
    RoutingOptions(expert_topp=0.9, budget=2, policy="substitute", denominator="frozen"),
)


@pytest.mark.parametrize("depth", ACCEPTED)
@pytest.mark.parametrize("name", CONFIGS)
def test_native_equals_reference_bit_for_bit(name: str, depth: int, containers: dict[str, Path]) -> None:
    """Chained drafts with rejections; DSA limits attention in "odd", in the block too."""
    for routing in ROUTINGS:
        options: dict[str, Any] = {"routing": routing, "budget_scopes": SCOPES}
        ours, theirs = native(containers[name], **options), reference(containers[name], **options)
        runs = (play(model, prompt_of(name), depth, ACCEPTED[depth]) for model in (ours, theirs))
        assert differences(*runs) == [], routing
        counted, expected = ours.stats.scopes["draft"], theirs.stats.scopes["draft"]
        rounds, drafts = len(ACCEPTED[depth]), len(ACCEPTED[depth]) * (depth - 1)
        assert counted.steps == expected.steps == counted.layer_steps == 1 + rounds + drafts
        assert counted.positions == expected.positions == len(prompt_of(name)) + drafts + sum(ACCEPTED[depth]) + rounds
        assert (counted.union_experts, counted.kept_experts) == (expected.union_experts, expected.kept_experts)
        assert counted.cache_hits + counted.cache_misses == counted.kept_experts
        assert counted.budget_acted_layer_steps == expected.budget_acted_layer_steps
        assert (counted.budget_acted_layer_steps > 0) == (routing.budget == 2)  # TOPK has left the block two experts a row
        assert ours.stats.scopes["verify"].budget_acted_layer_steps > 0 or not routing.budget


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe"])
def test_other_families_blocks_are_equal_too(family: str, tmp_path: Path) -> None:
    config = {**family_models.CONFIGS[family], "num_nextn_predict_layers": 1}
    path, prompt = models.converted(tmp_path, config), random_tokens(config, 8)
    ours, theirs = native(path), reference(path)
    assert differences(play(ours, prompt, 2, (1,)), play(theirs, prompt, 2, (1,))) == []


@pytest.mark.parametrize("layout", ["row_major", "untagged"])
def test_row_major_containers_work_too(layout: str, containers: dict[str, Path], tmp_path: Path) -> None:
    """Experts of trunk and block are then repacked into slots, as they are read; an untagged container is colibri's own."""
    if layout == "row_major":
        path = models.converted(tmp_path, ODD, layout="row_major")
        assert list(path.glob("out-mtp-*.safetensors"))
    else:
        path = models.written(tmp_path / "out", ODD)
    for options in ({"cache_experts": 1}, {"cache_experts": 5, "pilot": True}):
        ours, plain = native(path, group_size=64 if layout == "untagged" else None, **options), native(containers["odd"])
        assert differences(play(ours, prompt_of("odd"), 3, (1, 3)), play(plain, prompt_of("odd"), 3, (1, 3))) == []


def test_float_activations_stay_within_their_bound(containers: dict[str, Path]) -> None:
    ours, theirs = native(containers["odd"], precision="w4a32"), reference(containers["odd"], precision="w4a32")
    prompt = prompt_of("odd")
    for a, b in zip(play(ours, prompt, 3, (1, 3)), play(theirs, prompt, 3, (1, 3)), strict=True):
        assert a.call == b.call
        assert float(np.abs(a.logits_TW - b.logits_TW).max() / np.abs(b.logits_TW).max()) <= 2e-5, a.call


def heldout_tokens(n: int) -> list[int]:
    """Token ids of text that the shipped model has not seen."""
    lines = (Path(__file__).parents[1] / "validation" / "train" / "heldout.jsonl").open(encoding="utf8")
    with lines:
        texts = [json.loads(next(lines))["text"] for _ in range(8)]
    ids = [token for text in texts for token in ChatTokenizer.from_directory(SHIPPED_MODEL).encode_raw(text)]
    return ids[:n]


def test_the_shipped_models_block_is_equal_and_as_good() -> None:
    """Drafts of depth 4, and top-1 accuracy on unseen text, teacher-forced: the same number in both, and no small one."""
    ours, theirs = native(SHIPPED_MODEL), reference(SHIPPED_MODEL)
    ids = heldout_tokens(256)
    assert differences(play(ours, ids[:32], 4, (4, 0, 2)), play(theirs, ids[:32], 4, (4, 0, 2))) == []
    right = []
    for model in (ours, theirs):
        model.reset()
        model.forward(ids, scope="prefill")
        drafted = model.mtp_forward(ids[1:], slice(0, -1)).argmax(axis=1)[:-1]
        right.append(int((drafted == ids[2:]).sum()))
    assert right[0] == right[1]
    assert right[0] / 254 > 0.25


# ---- native alone: what may not change a bit --------------------------------------------------------------------------

SETUPS: dict[str, dict[str, Any]] = {
    "one slot": {"cache_experts": 1},
    "everything cached, one thread": {"cache_experts": 100, "threads": 1},
    "buffered": {"io": "buffered", "io_threads": 5},
    "no pipe": {"pipe": False, "threads": 3},
    "pilot": {"pilot": True, "cache_experts": 2},
    "pinned": {"pinned": ((1, 2), (0,), (3,)), "cache_experts": 1},
    **{reader: {"reader": reader} for reader in USABLE},
    **{isa: {"isa": isa} for isa in ISAS},
}


@pytest.mark.parametrize("setup", SETUPS)
def test_no_setup_changes_a_bit(setup: str, containers: dict[str, Path]) -> None:
    for depth in (1, 3):
        pair = (native(containers["odd"], **SETUPS[setup]), native(containers["odd"]))
        assert differences(*(play(model, prompt_of("odd"), depth, ACCEPTED[depth]) for model in pair)) == []


def teacher_forced(model: Any, ids: Sequence[int]) -> Answer:
    """The block's rows of a whole text in one call, without those that are there."""
    model.mtp_rewind(model.mtp_position)
    return block(model, ids[1:], slice(0, -1))


def test_rows_depend_on_nothing_but_what_was_fed(containers: dict[str, Path]) -> None:
    """One call, calls of all sizes, rewinds and other rows in between: the same rows."""
    model, ids = native(containers["odd"]), random_tokens(ODD, 40)
    forward(model, ids, "prefill")
    whole, hidden_TD = teacher_forced(model, ids), model.hidden
    rng = np.random.default_rng(0)
    for _ in range(8):
        model.mtp_rewind(int(rng.integers(0, model.mtp_position + 1)))
        first = model.mtp_position
        strangers = int(rng.integers(0, 40 - first))
        if strangers:
            model.mtp_forward(rng.integers(0, 89, strangers), rng.normal(size=(strangers, 75)).astype(np.float32))
            model.mtp_rewind(strangers)
        while model.mtp_position < 39 and rng.random() < 0.8:
            begin = model.mtp_position
            end = int(rng.integers(begin + 1, 40))
            rows = slice(begin, end) if rng.random() < 0.5 else hidden_TD[begin:end]
            answer = block(model, ids[begin + 1 : end + 1], rows)
            assert bits(answer.logits_TW) == bits(whole.logits_TW[begin:end])
            assert bits(answer.hidden_TD) == bits(whole.hidden_TD[begin:end])


def test_last_logits_are_the_last_row_of_all(containers: dict[str, Path]) -> None:
    ids = prompt_of("odd")
    for model in (native(containers["odd"]), reference(containers["odd"])):
        model.forward(ids, scope="prefill", logits="last")
        assert model.hidden.shape == (26, 75)
        last = model.mtp_forward(ids[1:], slice(0, -1), logits="last")
        assert bits(last) == bits(teacher_forced(model, ids).logits_TW[-1:])


def test_drafts_change_nothing_in_the_trunk(containers: dict[str, Path]) -> None:
    ids, logits = random_tokens(ODD, 40), []
    for drafting in (False, True):
        model = native(containers["odd"], cache_experts=1, pilot=True)
        rows = [model.forward(ids[:26], scope="prefill")]
        for token in ids[26:]:
            if drafting:
                block(model, [token], model.hidden[-1:])
            rows.append(model.forward([token], scope="decode"))
        logits.append(b"".join(bits(row) for row in rows))
    assert logits[0] == logits[1]


# ---- faults that the checker sees -------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", [mtp_runs.RowBefore, mtp_runs.BeforeTheNorm, mtp_runs.StaleRow, mtp_runs.CarriedOn])
def test_a_planted_fault_is_seen(fault: type[mtp_runs.Doctored], containers: dict[str, Path]) -> None:
    prompt, accepted = prompt_of("odd"), (1, 2, 0)
    sound = native(containers["odd"])
    assert differences(play(mtp_runs.Doctored(native(containers["odd"])), prompt, 3, accepted), play(sound, prompt, 3, accepted)) == []
    sound.reset()
    assert differences(play(fault(native(containers["odd"])), prompt, 3, accepted), play(sound, prompt, 3, accepted)) != []


def test_swapped_halves_are_seen(containers: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    def swapped(weights: Any, embedding_TD: jax.Array, trunk_TD: jax.Array, *, eps: float) -> jax.Array:
        zero = mtp.zero_of(weights.eh_proj)
        halves = [mtp.rms_norm(trunk_TD, weights.hnorm, eps, zero), mtp.rms_norm(embedding_TD, weights.enorm, eps, zero)]
        return mtp.product(jnp.concatenate(halves, axis=1), weights.eh_proj)

    monkeypatch.setattr(mtp, "_join", swapped)
    prompt = prompt_of("odd")
    found = differences(play(native(containers["odd"]), prompt, 1, ()), play(reference(containers["odd"]), prompt, 1, ()))
    assert found[0].startswith("call 1 (block's 26)")


@pytest.mark.parametrize("fault", ["no budget", "rows together"])
def test_another_routing_of_the_block_is_seen(fault: str, containers: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"routing": RoutingOptions(budget=2), "budget_scopes": SCOPES}
    prompt, ours, theirs = prompt_of("odd"), native(containers["odd"], **options), reference(containers["odd"], **options)
    expected = list(play(ours, prompt, 1, ()))
    if fault == "no budget":
        monkeypatch.setattr(RoutingOptions, "of_drafts", lambda self, scopes: self.without_budget())
    else:
        monkeypatch.setattr(RoutingOptions, "rows_of_drafts", "together")
    assert differences(expected, play(theirs, prompt, 1, ()))[0].startswith("call 1 (block's 26)")


@pytest.mark.parametrize("backend", [native, reference])
def test_the_block_has_the_options_of_a_decode_step(backend: Any, containers: dict[str, Path]) -> None:
    """Whether it runs its rows at once or one by one, and whatever the options of other scopes."""
    prompt = prompt_of("odd")
    lm = backend(containers["odd"], routing=RoutingOptions(budget=2), budget_scopes=("verify", "prefill"))
    hidden = np.random.default_rng(3).standard_normal((len(prompt), lm.config.hidden_size)).astype(np.float32)

    def rows(pieces: int) -> bytes:
        parts = [np.arange(i, min(i + pieces, len(prompt))) for i in range(0, len(prompt), pieces)]
        logits_TW = np.concatenate([lm.mtp_forward([prompt[i] for i in part], hidden[part]) for part in parts])
        lm.mtp_rewind(lm.mtp_position)
        return logits_TW.tobytes()

    free = rows(len(prompt))
    # A list's last budget is the block's as well; here no other layer has one.
    for budget in (2, (*(0,) * (len(lm.config.moe_layers) - 1), 2)):
        lm.reroute(RoutingOptions(budget=budget), ("decode",))
        assert rows(len(prompt)) == rows(1) != free
    lm.reroute(RoutingOptions(budget=2), ("verify", "prefill"))
    assert rows(len(prompt)) == free


# ---- loading ----------------------------------------------------------------------------------------------------------


def test_the_block_costs_nothing_unless_it_is_asked_for(containers: dict[str, Path]) -> None:
    without, with_block = native(containers["odd"], mtp=False), native(containers["odd"])
    config, entries = without.config, colibri_jax.container.reader.Container.open(containers["odd"]).entries
    assert with_block.stats.dense_bytes - without.stats.dense_bytes >= sum(
        entry.nbytes for role, entry in entries.items() if role.startswith(("mtp.", "layers.5.")) and ".experts." not in role
    )
    assert with_block.stats.kv_cache_bytes - without.stats.kv_cache_bytes == 128 * 4 * (
        config.attention.cache_width + ODD["index_head_dim"]
    )
    without.forward(prompt_of("odd"), scope="prefill")
    assert (without.mtp_position, without.mtp_selection, without.hidden.shape) == (0, None, (26, 75))
    for call in (lambda: without.mtp_forward([1], slice(-1, None)), lambda: without.mtp_hidden):
        with pytest.raises(ConfigError, match="MTP"):
            call()
    assert without.stats.scopes["draft"].steps == 0


def least_bound(path: Path, **options: Any) -> int:
    with pytest.raises(MemoryBudgetError, match="too small") as refused:
        native(path, cache_experts=None, ram_bytes=1000, **options)
    return int(str(refused.value.expected).split()[1])


def test_the_bound_on_memory_includes_the_block(containers: dict[str, Path]) -> None:
    path = containers["odd"]
    least, without = least_bound(path), least_bound(path, mtp=False)
    assert least - without > native(path).stats.dense_bytes - native(path, mtp=False).stats.dense_bytes
    with pytest.raises(MemoryBudgetError):
        native(path, cache_experts=None, ram_bytes=least - 1)
    model = native(path, cache_experts=None, ram_bytes=least)
    assert model.stats.cache_experts_per_layer == 1
    model.forward(random_tokens(ODD, 50), scope="prefill", logits="last")
    with pytest.raises(MemoryBudgetError, match="tokens"):
        model.mtp_forward([0] * 128, np.zeros((128, 75), np.float32))
    assert model.mtp_position == 0
    bounded = block(model, [1, 2], slice(0, 2))
    free = native(path)
    free.forward(random_tokens(ODD, 50), scope="prefill")
    assert bits(bounded.logits_TW) == bits(block(free, [1, 2], slice(0, 2)).logits_TW)


@pytest.mark.parametrize("part", ["eh_proj", "mlp.experts.3.up_proj", "kv_b_proj"])
@pytest.mark.parametrize("backend", ["native", "reference"])
def test_an_int4_block_is_refused_with_the_reason(part: str, backend: Any, tmp_path: Path) -> None:
    path = models.written(tmp_path / "out", ODD, kind_of=lambda name: ("int4", 64) if "layers.5." in name and part in name else None)
    with pytest.raises(UnknownFormatError, match="0 to 4 %") as refused:
        colibri_jax.load(path, backend=backend, mtp=True, group_size=64)
    assert f"model.layers.5.{'' if part[0] in 'em' else 'self_attn.'}{part}.weight" in str(refused.value.where)
    assert colibri_jax.load(path, group_size=64).config.n_mtp_layers == 1


@pytest.mark.parametrize("backend", ["native", "reference"])
def test_a_model_without_a_block_is_refused(backend: Any, tmp_path: Path) -> None:
    path = models.written(tmp_path / "out", ODD, without=["layers.5."])
    with pytest.raises(OptionError, match="no MTP block"):
        colibri_jax.load(path, backend=backend, mtp=True, group_size=64)
    if backend == "reference":
        with pytest.raises(OptionError, match="memory"):
            colibri_jax.load(path, backend=backend, mtp=True, group_size=64, residency="layer")


# ---- errors of a step ---------------------------------------------------------------------------------------------------


def test_bad_calls_are_named_and_append_nothing(containers: dict[str, Path]) -> None:
    ids = prompt_of("odd")
    for model in (native(containers["odd"]), reference(containers["odd"])):
        model.forward(ids, scope="prefill")
        teacher_forced(model, ids)
        kept, selection = model.mtp_hidden, model.mtp_selection
        row = model.hidden[:1]
        for tokens, hidden, error in (
            ([1, 2], row, ShapeError),
            ([1], slice(0, 2), ShapeError),
            ([1], slice(26, 27), ShapeError),
            ([1], row[0], ShapeError),
            ([89], row, TokenError),
            ([-1], row, TokenError),
            ([0] * 104, np.repeat(row, 104, axis=0), ContextOverflowError),
        ):
            with pytest.raises(error):
                model.mtp_forward(tokens, hidden)
        with pytest.raises(OptionError, match="logits"):
            model.mtp_forward([1], row, logits="none")
        for n in (-1, 26):
            with pytest.raises(RewindError):
                model.mtp_rewind(n)
        assert model.mtp_position == 25
        assert bits(model.mtp_hidden) == bits(kept)
        assert model.mtp_selection is selection
        assert model.stats.scopes["draft"].steps == 1


def test_trunk_rewind_takes_later_rows_along(containers: dict[str, Path]) -> None:
    model, ids = native(containers["odd"]), prompt_of("odd")
    model.forward(ids, scope="prefill")
    teacher_forced(model, ids)
    model.rewind(1)
    assert (model.position, model.mtp_position) == (25, 25)
    model.rewind(3)
    assert (model.position, model.mtp_position) == (22, 22)
    model.mtp_rewind(2)
    model.rewind(1)
    assert (model.position, model.mtp_position) == (21, 20)
    model.reset()
    assert (model.position, model.mtp_position) == (0, 0)


def test_a_row_that_is_no_number_is_an_error_of_the_blocks_layer(containers: dict[str, Path]) -> None:
    model = native(containers["odd"])
    model.forward(prompt_of("odd"), scope="prefill")
    with pytest.raises(colibri_jax.errors.NonFiniteActivationError, match="layer 5"):
        model.mtp_forward([1], np.full((1, 75), np.nan, np.float32))
    assert model.mtp_position == 0
    fresh = native(containers["odd"])
    fresh.forward(prompt_of("odd"), scope="prefill")
    assert bits(model.mtp_forward([1], slice(0, 1))) == bits(fresh.mtp_forward([1], slice(0, 1)))


def test_a_read_that_fails_names_the_blocks_expert_and_leaves_the_engine_usable(containers: dict[str, Path], tmp_path: Path) -> None:
    path = models.converted(tmp_path, ODD)
    ids, model, sound = prompt_of("odd"), native(path, io="buffered", cache_experts=1), native(containers["odd"])
    for each in (model, sound):
        each.forward(ids, scope="prefill")
    shard = next(path.glob("out-mtp-*.safetensors"))
    data = shard.read_bytes()
    with shard.open("r+b") as file:
        file.truncate(len(data) // 4)
    with pytest.raises(ReadError, match=r"layers\.5\.mlp\.experts"):
        model.mtp_forward(ids[1:], slice(0, -1))
    assert (model.mtp_position, model.stats.scopes["draft"].steps) == (0, 0)
    shard.write_bytes(data)
    assert bits(teacher_forced(model, ids).logits_TW) == bits(teacher_forced(sound, ids).logits_TW)


def test_draft_reads_are_the_block_experts_bytes(containers: dict[str, Path]) -> None:
    """Reads of int8 experts are counted with their own bytes, beside a trunk of int4."""
    model, ids = native(containers["odd"], cache_experts=1), prompt_of("odd")
    model.forward(ids, scope="prefill")
    teacher_forced(model, ids)
    entries = colibri_jax.container.reader.Container.open(containers["odd"]).entries
    one = sum(entries[f"layers.5.experts.0.{part}"].total_bytes for part in ("gate", "up", "down"))
    draft, prefill = model.stats.scopes["draft"], model.stats.scopes["prefill"]
    assert one != model.stats.expert_bytes
    assert draft.useful_bytes == draft.cache_misses * one > 0
    assert prefill.useful_bytes == prefill.cache_misses * model.stats.expert_bytes
    assert draft.bytes_read >= draft.useful_bytes
    assert dataclasses.asdict(model.stats.total)["steps"] == 2
