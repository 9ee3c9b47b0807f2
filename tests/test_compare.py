"""The four comparisons hold on a small random container, and each planted fault makes the right one fail."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from fakes import CHAT_TEMPLATE, byte_tokenizer
from oracles.checkpoints import random_tensors, small_config, write_checkpoint

from colibri_jax.cli import main
from colibri_jax.compare import CompareOptions, CompareReport, compare
from colibri_jax.compare import run as running
from colibri_jax.compare.layers import FEW_ULPS, Deviation, PartByPart, compare_parts
from colibri_jax.compare.report import Greedy
from colibri_jax.compare.step import NativeStep
from colibri_jax.compare.whole import NearTie, WholeModel, differing_rows, top2_margin
from colibri_jax.container.convert import plan_conversion, run_conversion
from colibri_jax.container.reader import Container
from colibri_jax.engine.session import NativeModel
from colibri_jax.errors import OptionError
from colibri_jax.load import load
from colibri_jax.quant import QuantizedMatrix
from colibri_jax.reference.model import ReferenceModel
from colibri_jax.reference.routing import select_experts
from colibri_jax.routing_spec import RoutingOptions, Selection

# Three layers: dense and full, sparse and shared, sparse and full; index_topk 8 acts from position 8 on.
CONFIG = small_config(vocab_size=300, n_routed_experts=6, num_experts_per_tok=3, num_nextn_predict_layers=0, index_n_heads=16)
TOKENS = np.random.default_rng(11).integers(0, 300, 24)
OPTIONS = CompareOptions(tokens=24, prefill=16, greedy=5)
N_PARTS = 5

Change = Callable[[Any], Any]


def tensors(seed: int = 0) -> dict[str, np.ndarray]:
    """Weights that keep the residual stream at unit size, norms around 1."""
    scaled = {}
    for name, values in random_tensors(CONFIG, seed).items():
        if values.ndim == 2:
            scaled[name] = values / np.float32(np.sqrt(values.shape[1]))
        else:
            scaled[name] = np.float32(0.1) * values + np.float32("bias" not in name)
    return scaled


def convert(directory: Path, weights: dict[str, np.ndarray]) -> Path:
    source = write_checkpoint(directory / "checkpoint", CONFIG, weights, dtype="F32")
    byte_tokenizer().save(str(source / "tokenizer.json"))
    (source / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>", "chat_template": CHAT_TEMPLATE}))
    run_conversion(plan_conversion(source, directory / "container"))
    return directory / "container"


@pytest.fixture(scope="module")
def container(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return convert(tmp_path_factory.mktemp("compare"), tensors())


def doctored(path: Path, changes: dict[str, Change], **options: Any) -> ReferenceModel:
    """A reference of other weights than the container's."""
    opened = Container.open(path)
    params = {role: opened.read(role) for role in opened.entries}
    for role, change in changes.items():
        params[role] = change(params[role])
    return ReferenceModel(opened.runnable_config, params, **options)


def change_reference(monkeypatch: pytest.MonkeyPatch, changes: dict[str, Change]) -> None:
    """Let `compare` give the reference alone changed weights."""

    def load_changed(source: Path, backend: str = "native", **options: Any) -> Any:
        if backend == "native":
            return load(source, **options)
        known = {name: value for name, value in options.items() if name not in ("group_size", "residency")}
        return doctored(source, changes, **known)

    monkeypatch.setattr(running, "load", load_changed)


def compare_with(monkeypatch: pytest.MonkeyPatch, path: Path, changes: dict[str, Change], **arguments: Any) -> CompareReport:
    """`compare`, in which the reference alone gets changed weights."""
    change_reference(monkeypatch, changes)
    return compare(path, TOKENS.tolist(), **{"options": OPTIONS, **arguments})


def failed(report: CompareReport) -> set[str]:
    return {name for name, holds in report.verdicts.items() if not holds}


def other_integer(matrix: QuantizedMatrix) -> QuantizedMatrix:
    """One weight changed, of those that are not zero."""
    q = matrix.q.copy()
    q[5, 3] = -3 if q[5, 3] >= 0 else 3
    return dataclasses.replace(matrix, q=q)


def native_step(path: Path, scope: Any = "prefill", **options: Any) -> NativeStep:
    native = load(path, cache_experts=2, **options)
    assert isinstance(native, NativeModel)
    native.set_trace(True)
    tokens = TOKENS[:16]
    return NativeStep(native, tokens, scope, native.forward(tokens, scope=scope))


# ---- all four hold


@pytest.mark.parametrize(
    ("routing", "scopes", "options"),
    [
        (RoutingOptions(), ("decode",), OPTIONS),
        (RoutingOptions(budget=2), ("decode",), OPTIONS),
        (RoutingOptions(budget=4, denominator="frozen"), ("verify",), dataclasses.replace(OPTIONS, verify_rows=3)),
        (RoutingOptions(budget=3, expert_topp=0.8, vote="all_scores"), ("prefill", "decode"), OPTIONS),
    ],
)
def test_reference_and_native_agree_in_every_bit(
    container: Path, routing: RoutingOptions, scopes: Collection[Any], options: CompareOptions
) -> None:
    report = compare(container, TOKENS.tolist(), routing=routing, budget_scopes=frozenset(scopes), options=options)
    parts, floats, shipped = report.parts, report.float_activations, report.shipped
    assert report.passed, report.lines()
    assert parts.rows == parts.equal_rows == parts.rows_within == 24 * N_PARTS
    assert parts.worst_ulps == 0
    assert parts.attended_rows == 16 * 3  # positions 8 … 23 in three layers
    steps_after = 8 if options.verify_rows == 1 else 3
    assert parts.selections == 2 * (1 + steps_after)
    assert (parts.selections_cut > 0) == bool(routing.budget)
    assert shipped.equal_positions == shipped.positions == floats.positions == 24
    assert shipped.kld_max == 0
    assert shipped.differing_rows == []
    assert 0 < floats.worst_logit_error < 2e-5
    assert 0 < floats.worst_router_error < 2e-5
    assert report.greedy == Greedy(tokens=5, first_difference=None)


def test_a_short_prompt_is_continued_by_the_native_engine(container: Path) -> None:
    report = compare(container, TOKENS[:3].tolist(), options=CompareOptions(tokens=9, prefill=16, greedy=0))
    assert report.passed
    assert report.tokens == 9
    assert report.steps.startswith("9 in one prefill step")
    assert report.greedy is None


def test_counts_below_their_least_are_refused() -> None:
    for field in ("tokens", "prefill", "verify_rows"):
        with pytest.raises(OptionError, match=field):
            CompareOptions(**{field: 0})
    with pytest.raises(OptionError, match="greedy"):
        CompareOptions(greedy=-1)


# ---- planted faults


@pytest.mark.parametrize(
    ("role", "part"),
    [
        ("layers.1.experts.2.down", "layer 1"),
        ("layers.2.experts.0.gate", "layer 2"),
        ("layers.2.shared.up", "layer 2"),
        ("layers.0.mlp.up", "layer 0"),
        ("layers.1.attn.q_b", "layer 1"),
        ("layers.0.attn.kv_b", "layer 0"),
        ("layers.2.attn.o", "layer 2"),
        ("layers.0.indexer.wk", "layer 0"),
        ("embed", "embedding"),
        ("head", "head"),
    ],
)
def test_one_changed_weight_is_found_in_its_part(container: Path, monkeypatch: pytest.MonkeyPatch, role: str, part: str) -> None:
    # A token whose row of the embedding is changed has to be among those compared.
    change = other_integer if role != "embed" else lambda m: dataclasses.replace(m, q=np.where(m.q == m.q.max(), 0, m.q).astype(np.int8))
    report = compare_with(monkeypatch, container, {role: change})
    parts = report.parts
    assert "layers" in failed(report)
    assert {deviation.part for deviation in parts.deviations} == {part}
    assert not any(deviation.explanation for deviation in parts.deviations)
    assert parts.rows_within + len(parts.deviations) == parts.rows
    # The whole model is off too, but for a key of the indexer, which may change no choice.
    if role != "layers.0.indexer.wk":
        assert "float activations" in failed(report)
    assert not parts.selection_differences


def test_swapped_experts_are_found(container: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = Container.open(container)
    names = [
        (f"layers.1.experts.{a}.{part}", f"layers.1.experts.{b}.{part}") for a, b in ((1, 4), (4, 1)) for part in ("gate", "up", "down")
    ]
    swap: dict[str, Change] = {role: lambda _, other=other: opened.read(other) for role, other in names}
    report = compare_with(monkeypatch, container, swap)
    assert {"layers", "float activations"} <= failed(report)
    assert {deviation.part for deviation in report.parts.deviations} == {"layer 1"}


def test_another_router_weight_is_found_before_it_changes_a_choice(container: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def change(weight: np.ndarray) -> np.ndarray:
        weight = weight.copy()
        weight[1] *= np.float32(1.001)
        return weight

    report = compare_with(monkeypatch, container, {"layers.2.router.weight": change})
    assert {"layers", "float activations"} <= failed(report)
    assert {deviation.part for deviation in report.parts.deviations} == {"layer 2"}
    assert report.float_activations.worst_router_error > 2e-5


def test_another_router_bias_fails_selections_and_is_no_near_tie(container: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def change(bias: np.ndarray) -> np.ndarray:
        return bias + np.float32(0.4) * (np.arange(bias.size) == 2)

    report = compare_with(monkeypatch, container, {"layers.1.router.bias": change})
    # Outputs follow the native choice, so that only the choice itself is at fault.
    assert failed(report) >= {"selections", "float activations"}
    assert "layers" not in failed(report)
    assert report.float_activations.worst_logit_error < 2e-5
    assert all(difference.startswith("layer 1, step at position") for difference in report.parts.selection_differences)
    ties = report.float_activations.differing_rows
    assert ties
    assert all(tie.layer == 1 and not tie.explained for tie in ties)
    assert any("not by the router logits alone" in line for line in report.lines())


def swap_first_ids(selection: Selection) -> Selection:
    ids = selection.ids.copy()
    ids[0, :2] = ids[0, 1::-1]
    return dataclasses.replace(selection, ids=ids)


def one_bit_of_a_weight(selection: Selection) -> Selection:
    weights = selection.weights.copy()
    weights[-1, 0] = np.nextafter(weights[-1, 0], np.float32(9))
    return dataclasses.replace(selection, weights=weights)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (swap_first_ids, "ids"),
        (one_bit_of_a_weight, "weights"),
        (lambda s: dataclasses.replace(s, emptied_positions=1), "emptied_positions"),
        (lambda s: dataclasses.replace(s, mass_kept=0.5), "mass_kept"),
    ],
)
def test_a_doctored_native_selection_is_found(
    container: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Selection], Selection], field: str
) -> None:
    honest = NativeModel.selections.fget
    assert honest is not None
    monkeypatch.setattr(NativeModel, "selections", property(lambda self: (honest(self)[0], change(honest(self)[1]))))
    parts = PartByPart()
    step = native_step(container)
    compare_parts(step, doctored(container, {}, precision="w4a8"), parts)
    assert parts.selection_differences == [f"layer 2, step at position 0: {field}"]


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_doctored_attended_positions_are_found(container: Path, layer: int) -> None:
    """In a full layer and in one that shares its choice."""
    step, parts = native_step(container), PartByPart()
    row = step.trace["attended"][layer][12]
    missing = next(position for position in range(13) if position not in row)
    step.trace["attended"][layer][12] = sorted([*row[1:], missing])
    compare_parts(step, doctored(container, {}, precision="w4a8"), parts)
    assert parts.attended_differences == [f"layer {layer}, position 12"]
    # The output was computed with other positions than the trace says.
    assert [(d.part, d.position, d.explanation) for d in parts.deviations] == [(f"layer {layer}", 12, "")]


@pytest.mark.parametrize("precision", ["w4a8", "w4a32"])
def test_an_engine_that_attends_to_all_where_it_should_not_is_found(container: Path, precision: str) -> None:
    step, parts = native_step(container, precision=precision), PartByPart()
    step.trace["attended"][0] = [[] for _ in range(16)]
    compare_parts(step, doctored(container, {}, precision=precision), parts)
    assert parts.attended_differences == [f"layer 0, position {p}" for p in range(8, 16)]


# ---- explanations


def one_ulp_from_a_boundary(path: Path) -> tuple[int, int, np.ndarray]:
    """A row and an element of layer 0's first quantiser, and norm weights with which one ulp more in that weight crosses a boundary."""
    step = native_step(path)
    inputs = next(values for layer, name, _, values in step.trace["inputs"] if (layer, name) == (0, "attention input"))
    weight = Container.open(path).read("layers.0.attn_norm")
    assert isinstance(weight, np.ndarray)
    for row in range(2, 8):
        scale = np.abs(inputs[row, :64]).max() / np.float32(127)
        for element in range(64):
            unit = inputs[row, element] / weight[element]
            if not 0.5 < abs(inputs[row, element] / scale) < 120:
                continue
            code = np.rint(inputs[row, element] / scale)
            near = np.float32((code + 0.5 * np.sign(unit)) * scale / unit)
            candidates = near + np.spacing(near) * np.arange(-8, 8, dtype=np.float32)
            codes = np.rint(inputs[row, element] / weight[element] * candidates / scale)
            if codes[0] != codes[-1]:
                changed = weight.copy()
                changed[element] = candidates[np.flatnonzero(codes[1:] != codes[:-1])[0]]
                return row, element, changed
    raise AssertionError("no element near a boundary")


def test_one_ulp_that_crosses_a_boundary_is_explained_and_later_rows_are_not_blamed(container: Path, tmp_path: Path) -> None:
    row, element, weight = one_ulp_from_a_boundary(container)
    crafted = convert(tmp_path, {**tensors(), "model.layers.0.input_layernorm.weight": weight})
    step = native_step(crafted)
    found: list[tuple[str, int, str]] = []
    # Rounding of the norm itself moves the boundary by an ulp or two of the weight.
    for ulps in range(-8, 9):

        def moved(w: np.ndarray, ulps: int = ulps) -> np.ndarray:
            w = w.copy()
            w[element] += ulps * np.spacing(w[element])
            return w

        parts = PartByPart()
        compare_parts(step, doctored(crafted, {"layers.0.attn_norm": moved}, precision="w4a8"), parts)
        assert parts.rows_within + len(parts.deviations) == parts.rows == 16 * N_PARTS
        found += [(d.part, d.position, d.explanation) for d in parts.deviations]
        if ulps == 0:
            assert parts.equal_rows == parts.rows
    assert found
    assert {(part, position) for part, position, _ in found} == {("layer 0", row)}
    assert all(text.startswith(f"attention input[{element}]: ") and "different int8" in text for _, _, text in found)


# ---- near-ties, margins, verdicts


def test_a_difference_in_router_logits_alone_is_a_near_tie_with_its_margin(container: Path) -> None:
    step = native_step(container)
    reference = doctored(container, {}, precision="w4a8")
    router = reference.router(1)
    assert router is not None
    reference.forward(step.tokens, scope="prefill")
    assert differing_rows(step, reference, reference.selections, reference.router_logits) == []
    # In one row, native's logit of the best expert that was not chosen passes that of the last chosen one.
    logits = step.trace["router_logits"][0].copy()
    choice_TE = 1 / (1 + np.exp(-logits.astype(np.float64))) + router.bias
    order_TE = np.argsort(-choice_TE, axis=1)
    last, next_best = order_TE[4, 2], order_TE[4, 3]
    margin = choice_TE[4, last] - choice_TE[4, next_best]
    score = choice_TE[4, last] + 1e-3 - router.bias[next_best]
    logits[4, next_best] = np.log(score / (1 - score))
    step.trace["router_logits"][0] = logits
    step.selections[0] = select_experts(logits, router, RoutingOptions())
    (tie,) = differing_rows(step, reference, reference.selections, reference.router_logits)
    assert (tie.layer, tie.position, tie.explained) == (1, 4, True)
    assert tie.margin == pytest.approx(margin)
    assert tie.difference == pytest.approx(margin + 1e-3, rel=1e-4)
    # The same choice with logits that do not lead to it is none.
    step.trace["router_logits"][0] = np.asarray(reference.router_logits[0])
    (fault,) = differing_rows(step, reference, reference.selections, reference.router_logits)
    assert not fault.explained


def test_margin_of_a_budget_is_in_its_votes(container: Path) -> None:
    routing = RoutingOptions(budget=3)
    step = native_step(container, routing=routing, budget_scopes=("prefill",))
    reference = doctored(container, {}, precision="w4a8", routing=routing, budget_scopes=("prefill",))
    reference.forward(step.tokens, scope="prefill")
    router, ours = reference.router(1), reference.selections[0]
    assert router is not None
    before = select_experts(reference.router_logits[0], router, RoutingOptions())
    votes = np.array([before.weights[before.ids == e].sum() for e in range(6)])
    lost = int(max(set(range(6)) - set(ours.kept.tolist()), key=lambda e: votes[e]))
    least = int(min(ours.kept, key=lambda e: votes[e]))
    other = np.where(ours.ids == least, lost, ours.ids)
    kept = np.sort([*(e for e in ours.kept if e != least), lost]).astype(np.int32)
    step.selections[0] = dataclasses.replace(ours, ids=other, kept=kept)
    ties = differing_rows(step, reference, reference.selections, reference.router_logits)
    assert ties
    assert all(tie.margin == pytest.approx(votes[least] - votes[lost], rel=1e-5) and tie.difference == 0 for tie in ties)
    assert not any(tie.explained for tie in ties)


def test_top2_margin() -> None:
    assert top2_margin(np.array([1.0, -3.0, 4.5, 4.0], np.float32)) == 0.5


def report_of(**changes: Any) -> CompareReport:
    whole = {"positions": 4, "equal_positions": 4, "worst_logit_error": 1e-6, "worst_router_error": 1e-6}
    fields: dict[str, Any] = {
        "model": "m",
        "routing": "budget off",
        "tokens": 4,
        "steps": "s",
        "parts": PartByPart(selections=8, rows=1000, equal_rows=1000, rows_within=1000),
        "float_activations": WholeModel(**whole),
        "shipped": WholeModel(**whole),
        "greedy": None,
    }
    return CompareReport(**{**fields, **changes})


EXPLAINED = Deviation(part="layer 1", position=7, ulps=900.0, explanation="query latent[3]: 1 and 2 round to different int8 values")
NEAR_TIE = NearTie(layer=1, position=3, margin=1e-7, difference=3e-7, explained=True)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, set()),
        ({"parts": PartByPart(rows=1000, rows_within=999, deviations=[EXPLAINED])}, set()),
        ({"parts": PartByPart(rows=1000, rows_within=998, deviations=[EXPLAINED, EXPLAINED])}, {"layers"}),
        ({"parts": PartByPart(rows=1000, rows_within=999, deviations=[dataclasses.replace(EXPLAINED, explanation="")])}, {"layers"}),
        ({"parts": PartByPart(selection_differences=["layer 1, step at position 0: ids"])}, {"selections"}),
        ({"parts": PartByPart(attended_differences=["layer 1, position 3"])}, {"selections"}),
        ({"float_activations": WholeModel(worst_logit_error=2.1e-5)}, {"float activations"}),
        ({"float_activations": WholeModel(worst_router_error=2.1e-5)}, {"float activations"}),
        ({"float_activations": WholeModel(worst_logit_error=float("nan"))}, {"float activations"}),
        ({"float_activations": WholeModel(differing_rows=[NEAR_TIE])}, set()),
        ({"float_activations": WholeModel(differing_rows=[dataclasses.replace(NEAR_TIE, explained=False)])}, {"float activations"}),
        ({"greedy": Greedy(tokens=9, first_difference=None)}, set()),
        ({"greedy": Greedy(tokens=9, first_difference=3, margin=0.01, difference=0.02)}, set()),
        ({"greedy": Greedy(tokens=9, first_difference=3, margin=0.03, difference=0.02)}, {"as shipped"}),
    ],
)
def test_verdicts(changes: dict[str, Any], expected: set[str]) -> None:
    report = report_of(**changes)
    assert failed(report) == expected
    assert report.passed == (not expected)
    assert sum(line.startswith("FAILED") for line in report.lines()) == len(expected)


def test_lines_name_what_was_found() -> None:
    shipped = WholeModel(
        positions=4, equal_positions=1, kld_sum=0.4, kld_max=0.3, first_argmax={"position": 2, "margin": 0.5, "difference": 0.25}
    )
    parts = PartByPart(
        selections=8,
        selections_cut=3,
        rows=1000,
        equal_rows=990,
        rows_within=999,
        worst_ulps=2.5,
        deviations=[EXPLAINED],
        attended_rows=6,
        selection_differences=[f"layer 1, step at position {p}: ids" for p in range(14)],
    )
    text = "\n".join(
        report_of(parts=parts, shipped=shipped, greedy=Greedy(tokens=9, first_difference=3, margin=0.01, difference=0.02)).lines()
    )
    for fragment in (
        "8 compared in every field, 3 of them cut by the budget, 14 differ; attended positions: 6 rows, 0 differ",
        "layer 1, step at position 9: ids\n       … and 4 more\n",
        "990/1000 (99 %) of rows equal in every bit, 999/1000 (99.9 %) within 16 ulp (worst of these 2.5)",
        "layer 1, position 7: 900 ulp; query latent[3]: 1 and 2 round to different int8 values",
        "logits of 1/4 (25 %) of positions equal in every bit; 0 rows chose other experts; KLD mean 1.00e-01, max 3.00e-01",
        "first other greedy choice at position 2: top-2 margin 0.5, largest logit difference 0.25",
        "9 greedy tokens: first difference at 3, top-2 margin 0.01, largest logit difference 0.02",
    ):
        assert fragment in text
    assert "99.99 %" in "\n".join(report_of(parts=PartByPart(rows=10**6, equal_rows=10**6 - 1, rows_within=10**6)).lines())


def test_a_reference_that_computes_otherwise_shows_in_the_last_comparison(container: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = compare_with(
        monkeypatch, container, {"head": lambda m: dataclasses.replace(m, q=m.q[::-1].copy(), scales=m.scales[::-1].copy())}
    )
    shipped, greedy = report.shipped, report.greedy
    assert shipped.equal_positions < 24
    assert 0 < shipped.kld_sum / 24 <= shipped.kld_max
    assert shipped.first_argmax is not None
    assert greedy is not None
    assert greedy.first_difference is not None
    assert shipped.first_argmax["margin"] > 0 < greedy.difference


# ---- the command


def call(*arguments: str) -> Result:
    result = CliRunner().invoke(main, ["compare", *arguments], prog_name="colibri-jax")
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


SIZES = ["--tokens", "24", "--prefill", "16", "--greedy", "3"]


def test_command_compares_on_a_prompt(container: Path) -> None:
    result = call(str(container), "--prompt", "hi", *SIZES, "--budget", "2")
    assert result.exit_code == 0
    assert "24 teacher-forced tokens (16 in one prefill step, the rest in decode steps), budget 2, aggregate" in result.stdout
    assert [line[:6] for line in result.stdout.splitlines()[1:]].count("  ok  ") == 4
    assert result.stdout.rstrip().endswith("3 greedy tokens: equal")


@pytest.mark.parametrize("suffix", [".txt", ".jsonl"])
def test_command_compares_on_a_text_and_prints_json(container: Path, tmp_path: Path, suffix: str) -> None:
    text = tmp_path / f"text{suffix}"
    documents = ["what a text this is", "and more"]
    text.write_text("\n".join(json.dumps({"text": d}) for d in documents) if suffix == ".jsonl" else "\n".join(documents))
    result = call(str(container), "--text", str(text), *SIZES, "--verify-rows", "4", "--json")
    assert result.exit_code == 0
    answer = json.loads(result.stdout)
    assert answer["passed"] is True
    assert answer["verdicts"] == dict.fromkeys(("selections", "layers", "float activations", "as shipped"), True)
    assert (answer["tokens"], answer["parts"]["equal_rows"], answer["greedy"]["first_difference"]) == (24, 24 * N_PARTS, None)
    assert answer["steps"].endswith("steps of 4 rows, scope verify")


def test_command_says_by_its_status_that_one_does_not_hold(container: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    change_reference(monkeypatch, {"head": other_integer})
    result = call(str(container), "--prompt", "hi", *SIZES)
    assert result.exit_code == 1
    assert "FAILED (ii)" in result.stdout
    assert "head, position 0: " in result.stdout
    assert json.loads(call(str(container), "--prompt", "hi", *SIZES, "--json").stdout)["passed"] is False


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"text": "short"}\n', "text too short"),
        ('{"text": "short"}\n{"txet": "misspelt"}\n', "line 2"),
        ('{"text": "short"}\nno JSON\n', "line 2"),
    ],
)
def test_command_refuses_a_text_that_will_not_do(container: Path, tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "text.jsonl").write_text(content)
    result = call(str(container), "--text", str(tmp_path / "text.jsonl"), *SIZES)
    assert result.exit_code == 2
    assert message in result.stderr


def test_command_refuses_two_sources_of_tokens(container: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("text")
    result = call(str(container), "--text", str(tmp_path / "text.txt"), "--prompt", "hi")
    assert result.exit_code == 2
    assert "two sources of tokens" in result.stderr


def test_few_ulps_is_what_the_report_says() -> None:
    assert f"within {FEW_ULPS:g} ulp" in "\n".join(report_of().lines())
