"""What prefill cuts do: every mode against the steps that it stands for, every figure on values made up, and planted faults."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from click.testing import CliRunner
from quality import prefill_damage

from colibri_jax import load
from colibri_jax.cli.options import SHIPPED_MODEL
from colibri_jax.quality import damage, damage_study
from colibri_jax.quality.damage import LayerErrors, ModeResult, TextDamage, emptied_rows, emptied_so_far, relative_errors
from colibri_jax.quality.damage_study import CHUNK, POLICIES, SMALLEST, WORST, Study, check, measure, name_of, read_answers
from colibri_jax.quality.statistics import TokenResults, compare_logits
from colibri_jax.quality.steps import StepKind, StepShape, run_steps
from colibri_jax.quality.windows import read_windows
from colibri_jax.routing_spec import RoutingOptions, Selection
from colibri_jax.tokenizer import ChatTokenizer

STEP, WINDOW = 8, 16
CUT = RoutingOptions(budget=4)
TOKENIZER = ChatTokenizer.from_directory(SHIPPED_MODEL)


@pytest.fixture(scope="module")
def model() -> Any:
    return load(SHIPPED_MODEL, threads=1, context_positions=4 * CHUNK)


@pytest.fixture(scope="module")
def tokens() -> npt.NDArray[np.int32]:
    window: npt.NDArray[np.int32] = read_windows([prefill_damage.TEXT], TOKENIZER, WINDOW)[3]
    return window


@pytest.fixture(scope="module")
def study(model: Any) -> Study:
    """Two short windows and an answer, all settings."""
    found = Study(model.config, chunk=STEP)
    windows = read_windows([prefill_damage.TEXT], TOKENIZER, WINDOW)[:2]
    done: list[None] = []
    measure(model, windows, read_answers(prefill_damage.TEXT, TOKENIZER, 2), found, lambda: done.append(None))
    assert (len(done), found.failures) == (4, [])
    return found


def selection(*rows: list[int]) -> Selection:
    ids = np.array([[*row, -1, -1][:2] for row in rows], np.int32)
    kept = np.unique(ids[ids >= 0]).astype(np.int32)
    emptied = sum(not row for row in rows)
    return Selection(
        ids=ids,
        weights=(ids >= 0).astype(np.float32),
        kept=kept,
        union_size=5,
        dropped=5 - kept.size,
        dropped_slots=int((ids < 0).sum()),
        emptied_positions=emptied,
        mass_kept=0.5,
    )


# ---- figures --------------------------------------------------------------------------------------------------------


def test_an_error_is_relative_to_the_exact_row() -> None:
    base = np.array([[3.0, 4.0], [1.0, 0.0], [0.0, 0.0], [0.0, 0.0]], np.float32)
    cut = np.array([[3.0, 4.0], [4.0, 4.0], [0.0, 0.0], [0.0, 2.0]], np.float32)
    assert relative_errors(base, cut).tolist() == [0.0, 5.0, 0.0, 1.0]
    assert relative_errors(cut, base).tolist() != relative_errors(base, cut).tolist()


def test_a_row_is_emptied_where_nothing_is_left() -> None:
    first, second = selection([], [1], [2, 3]), selection([], [], [2])
    assert emptied_rows(first).tolist() == [True, False, False]
    # Layer 1 is dense.
    found = emptied_so_far([first, second], (0, 2), 3)
    assert found.tolist() == [[1, 0, 0], [1, 0, 0], [2, 1, 0]]


def made_up() -> LayerErrors:
    """One dense layer, one MoE layer; the emptied row is off by its own length, the others by a quarter."""
    errors = LayerErrors.none(2, 1)
    base = [np.ones((3, 4), np.float32)] * 2
    cut = [base[0], base[1] * np.array([[2.0], [1.25], [0.75]], np.float32)]
    emptied = errors.add_step(base, cut, [selection([], [1], [2, 3])], (1,))
    assert emptied.shape == (3,)
    errors.add_cache(base, [base[0], base[1] * np.float32(1.5)])
    return errors


def test_emptied_rows_are_counted_apart() -> None:
    found = made_up().to_json()
    assert found == {
        "before": [5.0],
        "kept": [3.0],
        "mass": [0.5],
        "emptied_share": [pytest.approx(1 / 3)],
        "ever_emptied": [0.0, pytest.approx(1 / 3)],
        "hidden": [0.0, 0.5],
        "hidden_never_emptied": [0.0, 0.25],
        "hidden_emptied": [None, 1.0],
        "kv": [0.0, 0.5],
    }


@pytest.mark.parametrize("wrong", [lambda rows: rows[::-1], lambda rows: ~rows, lambda rows: rows & False])
def test_wrong_rows_called_emptied_are_seen(monkeypatch: pytest.MonkeyPatch, wrong: Callable[[Any], Any]) -> None:
    right = made_up()
    monkeypatch.setattr(damage, "emptied_rows", lambda selection: wrong(emptied_rows(selection)))
    assert made_up().to_json()["hidden_emptied"] != right.to_json()["hidden_emptied"]


def test_rows_are_chosen_by_place_and_by_layers_emptied() -> None:
    values = np.arange(4.0)
    tokens = TokenResults(values, values, values > 1, values, values)
    result = ModeResult(tokens, np.array([0, 1, 0, 1]), np.array([0, 0, 2, 1]))
    study = Study(load(SHIPPED_MODEL, threads=1, context_positions=8).config)
    study.add("x", {"own": ModeResult.joined([result, result])})
    assert study.chosen("x", "own", "places", 0, 1).kld.tolist() == [0.0, 2.0, 0.0, 2.0]
    assert study.chosen("x", "own", "emptied", 1, 9).kld.tolist() == [2.0, 3.0, 2.0, 3.0]


# ---- modes ----------------------------------------------------------------------------------------------------------


def logits_of(model: Any, tokens: Any, kind: StepKind, routing: RoutingOptions) -> npt.NDArray[np.float32]:
    """Of the last STEP positions, in the steps that a quality measurement would run."""
    shape = StepShape(kind=kind, prefix=WINDOW - STEP, chunk=STEP)
    model.reroute(routing, shape.budget_scopes)
    rows = np.concatenate([result.logits_TW for result in run_steps(model, tokens[:-1], shape)])
    assert len(rows) >= STEP
    return rows[-STEP:]


@pytest.mark.parametrize(("mode", "kind"), [("past", "prefill_then_decode"), ("both", "prefill"), ("decode", "decode"), ("all", "all")])
def test_a_mode_is_the_steps_that_it_stands_for(model: Any, tokens: Any, mode: Any, kind: StepKind) -> None:
    text = TextDamage(model, tokens, (0, STEP))
    found = text.after_exact([CUT], mode)[CUT] if mode == "decode" else text.after_cut(CUT, (mode,))[mode]
    expected = compare_logits(logits_of(model, tokens, kind, RoutingOptions()), logits_of(model, tokens, kind, CUT), tokens[-STEP:])
    for field in dataclasses.fields(TokenResults):
        assert getattr(found.tokens, field.name).tolist() == getattr(expected, field.name).tolist()
    assert found.tokens.kld.mean() > 1e-3
    swapped = compare_logits(logits_of(model, tokens, kind, CUT), logits_of(model, tokens, kind, RoutingOptions()), tokens[-STEP:])
    assert found.tokens.kld.tolist() != swapped.kld.tolist()


def test_own_rows_are_cut_after_exact_ones(model: Any, tokens: Any) -> None:
    other = RoutingOptions(budget=6)
    found = TextDamage(model, tokens, (0, STEP)).after_exact([other, CUT], "own")
    for routing, result in found.items():
        model.reset()
        model.reroute(routing, ())
        model.forward(tokens[:STEP], scope="prefill")
        model.reroute(routing, ("prefill",))
        logits = model.forward(tokens[STEP:-1], scope="prefill")
        emptied = [int(sum((s.ids[row] < 0).all() for s in model.selections)) for row in range(STEP)]
        expected = compare_logits(logits_of(model, tokens, "prefill", RoutingOptions()), logits, tokens[-STEP:])
        assert result.tokens.kld.tolist() == expected.kld.tolist()
        assert (result.places.tolist(), result.emptied.tolist()) == (list(range(STEP)), emptied)
    assert found[CUT].emptied.any()


def test_all_modes_score_the_same_positions(model: Any, tokens: Any) -> None:
    text = TextDamage(model, tokens, (0, STEP))
    whole = text.in_one_step(CUT, LayerErrors.none(model.config.n_layers, len(model.config.moe_layers)))
    chunked = text.after_cut(CUT, ("both",))["both"]
    assert whole.tokens.nll_base.tolist() == chunked.tokens.nll_base.tolist()
    assert whole.places.tolist() == list(range(STEP, WINDOW))
    assert whole.tokens.kld.tolist() != chunked.tokens.kld.tolist()


def test_the_exact_model_equals_itself(model: Any, tokens: Any) -> None:
    text = TextDamage(model, tokens, (0, STEP))
    text.after_cut(CUT, ("both",))
    assert not text.exact_again().kld.any()


def test_a_question_is_apart_from_its_answer(tmp_path: Path) -> None:
    path = tmp_path / "text.jsonl"
    answer = 'n 1: a word that names an action, an event or a state; "to be is a verb" and so on'
    texts = ["no question", "<|user|>\nWhat is x?<|assistant|>\nshort", f"<|user|>\nWhat is a verb?<|assistant|>\n{answer}"]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    ((ids, asked),) = read_answers(path, TOKENIZER, 5)
    assert TOKENIZER.decode(ids[:asked].tolist()).strip() == "What is a verb?"
    assert TOKENIZER.decode(ids[asked:].tolist()) == answer


# ---- what has to hold -----------------------------------------------------------------------------------------------


def early_error(study: Study) -> None:
    next(iter(study.layers.values())).hidden_L2[0, 0] = 1.0


def early_cache(study: Study) -> None:
    next(iter(study.layers.values())).kv_L[study.moe[0]] = 1.0


def miscount(study: Study) -> None:
    next(iter(study.layers.values())).miscounted = 1


def leaky_floor(study: Study) -> None:
    study.layers[name_of("floor frozen", SMALLEST)].costs.emptied_L[0] = 1


def modes_exchanged(study: Study) -> None:
    name = study.single(WORST, len(study.moe) - 1)
    study.modes[name, "past"] = study.modes[name, "both"]


def decode_cut(study: Study) -> None:
    name = damage_study.all_scopes(SMALLEST)
    study.modes[name, "all"] = study.modes[name_of(WORST, SMALLEST), "both"]


def base_and_cut_swapped(study: Study) -> None:
    key = (name_of(WORST, SMALLEST), "own")
    swap = {"nll_base": "nll_cut", "nll_cut": "nll_base"}
    study.modes[key] = [  # type: ignore[index]
        dataclasses.replace(r, tokens=dataclasses.replace(r.tokens, **{to: getattr(r.tokens, of) for to, of in swap.items()}))
        for r in study.modes[key]  # type: ignore[index]
    ]


@pytest.fixture
def copied(study: Study) -> Iterator[Study]:
    """A study that may be damaged."""
    layers = {
        name: dataclasses.replace(
            errors,
            hidden_L2=errors.hidden_L2.copy(),
            kv_L=errors.kv_L.copy(),
            costs=dataclasses.replace(errors.costs, emptied_L=errors.costs.emptied_L.copy()),
        )
        for name, errors in study.layers.items()
    }
    return dataclasses.replace(study, modes=dict(study.modes), layers=layers, failures=[])


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        (early_error, "an error before the first cut"),
        (early_cache, "an error before the first cut"),
        (miscount, "other rows are empty"),
        (leaky_floor, "a floor emptied a row"),
        (modes_exchanged, "last layer alone damaged"),
        (decode_cut, "changed decode steps"),
        (base_and_cut_swapped, "different exact models"),
    ],
)
def test_planted_faults_are_noticed(copied: Study, fault: Callable[[Study], None], says: str) -> None:
    check(copied)
    assert copied.failures == []
    fault(copied)
    check(copied)
    assert [says in failure for failure in copied.failures] == [True]


def test_rows_called_emptied_that_are_not_are_noticed(model: Any, tokens: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(damage, "emptied_rows", lambda selection: ~emptied_rows(selection))
    errors = LayerErrors.none(model.config.n_layers, len(model.config.moe_layers))
    TextDamage(model, tokens, (0, STEP)).after_cut(CUT, (), errors)
    assert errors.miscounted == 2


# ---- the record -----------------------------------------------------------------------------------------------------


def test_the_record_says_what_was_measured(study: Study, tmp_path: Path) -> None:
    text = prefill_damage.report(study, "command")
    assert f"the same {2 * (WINDOW - STEP)} tokens" in text
    worst = name_of(WORST, SMALLEST)
    assert f"| {worst} | {study.summary(worst, 'own').kld_windows.value:.4f}" in text
    assert f"a KLD of {study.kld(worst, 'own'):.2f}, against {study.kld(worst, 'both'):.2f}" in text
    assert all(policy in text for policy in POLICIES)
    assert len(json.dumps(prefill_damage.to_json(study))) > 1000
    prefill_damage.plot(tmp_path / "plot.svg", study)
    assert (tmp_path / "plot.svg").stat().st_size > 1000


def test_the_command_runs_and_fails_where_something_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill_damage, "WINDOW", 2 * CHUNK)
    monkeypatch.setattr(prefill_damage, "EXAMPLE_TOKENS", 4)
    monkeypatch.setattr(damage_study, "BUDGETS", (SMALLEST,))
    monkeypatch.setattr(prefill_damage, "BUDGETS", (SMALLEST,))
    done = CliRunner().invoke(prefill_damage.main, ["--windows", "2", "--answers", "2", "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert (found["windows"], found["answers"], found["failures"]) == (2, 2, [])
    assert found["texts"][0][1][0][0] == "exact"
    monkeypatch.setattr(damage, "emptied_rows", lambda selection: ~emptied_rows(selection))
    assert CliRunner().invoke(prefill_damage.main, ["--windows", "2", "--answers", "2", "--json"]).exit_code == 1
