"""The generation loop: chunks, stops, the context's end, Ctrl-C; and the report of a run."""

from __future__ import annotations

import dataclasses
import io
import json

import pytest
from fakes import HF_CONFIG, FakeModel, as_language_model
from rich.console import Console

from colibri_jax.config import ModelConfig
from colibri_jax.errors import OptionError, PromptTooLongError, TokenError
from colibri_jax.generate.loop import GenerateOptions, Generation, generate, tokens
from colibri_jax.generate.notes import budget_notes
from colibri_jax.generate.report import OptionValue, RunReport
from colibri_jax.generate.sampling import SamplingOptions
from colibri_jax.routing_spec import RoutingOptions
from colibri_jax.stats import PHASES, ScopeStats, Stats

SAMPLED = SamplingOptions(temperature=1.0, seed=5)
CONFIG = ModelConfig.from_hf(HF_CONFIG)


def run(model: FakeModel, prompt: list[int], **fields: object) -> Generation:
    return generate(as_language_model(model), prompt, dataclasses.replace(GenerateOptions(), **fields))


# ---- steps


def test_prefill_comes_in_chunks_and_every_later_step_is_one_decode_position() -> None:
    model = FakeModel()
    result = run(model, list(range(10)), prefill_chunk=4, max_new_tokens=3)
    assert [(c.n, c.scope, c.logits) for c in model.calls] == [
        (4, "prefill", "last"),
        (4, "prefill", "last"),
        (2, "prefill", "last"),
        (1, "decode", "last"),
        (1, "decode", "last"),
    ]
    assert (result.prompt_tokens, len(result.tokens), result.stop_reason) == (10, 3, "max_new_tokens")


def test_the_answer_does_not_depend_on_the_chunk_length() -> None:
    answers = {run(FakeModel(), list(range(10)), prefill_chunk=c, sampling=SAMPLED, max_new_tokens=20).tokens for c in (1, 3, 10, 512)}
    assert len(answers) == 1


def test_the_answer_depends_on_the_seed() -> None:
    seeds = [dataclasses.replace(SAMPLED, seed=s) for s in (5, 5, 6)]
    first, again, other = (run(FakeModel(), [1, 2, 3], sampling=s, max_new_tokens=20).tokens for s in seeds)
    assert first == again
    assert first != other


def test_a_token_is_keyed_by_its_absolute_position() -> None:
    """Going on after half of an answer draws the second half as it would have been drawn at once."""
    whole = run(FakeModel(), [1, 2, 3], sampling=SAMPLED, max_new_tokens=12).tokens
    model = FakeModel()
    half = run(model, [1, 2, 3], sampling=SAMPLED, max_new_tokens=6).tokens
    rest = run(model, [half[-1]], sampling=SAMPLED, max_new_tokens=6).tokens
    assert half + rest == whole


def test_an_answer_is_not_computed_ahead_of_its_reader() -> None:
    model = FakeModel()
    answer = tokens(as_language_model(model), [1, 2], GenerateOptions(max_new_tokens=9))
    assert model.calls == []
    next(answer)
    next(answer)
    assert len(model.calls) == 2


def test_tokens_are_handed_over_as_they_come() -> None:
    seen: list[tuple[int, int]] = []
    model = FakeModel()
    result = generate(
        as_language_model(model), [1, 2], GenerateOptions(max_new_tokens=3), on_token=lambda t: seen.append((t, len(model.calls)))
    )
    assert [t for t, _ in seen] == list(result.tokens)
    assert [calls for _, calls in seen] == [1, 2, 3]


# ---- ends


def test_a_stop_token_ends_the_answer_and_is_not_part_of_it() -> None:
    result = run(FakeModel(script={2: 50, 3: 51, 4: 7}), [1, 2], stop_ids=frozenset({7, 8}))
    assert (result.tokens, result.stop_reason, result.stop_token) == ((50, 51), "stop_token", 7)


def test_a_stop_token_may_be_the_first() -> None:
    result = run(FakeModel(script={2: 7}), [1, 2], stop_ids=frozenset({7}))
    assert (result.tokens, result.stop_reason) == ((), "stop_token")


def test_the_context_ends_an_answer_after_its_last_position() -> None:
    model = FakeModel(context_positions=6)
    result = run(model, [1, 2, 3])
    assert (len(result.tokens), result.stop_reason) == (3, "context_end")
    assert model.position == 5


def test_a_limit_that_just_fits_the_context_is_reported_as_the_limit() -> None:
    result = run(FakeModel(context_positions=6), [1, 2, 3], max_new_tokens=3)
    assert (len(result.tokens), result.stop_reason) == (3, "max_new_tokens")


@pytest.mark.parametrize("length", [6, 7, 100])
def test_a_prompt_without_room_for_one_token_is_refused_before_any_step(length: int) -> None:
    model = FakeModel(context_positions=6)
    with pytest.raises(PromptTooLongError, match=f"at most 5 tokens; got: {length}"):
        run(model, [1] * length)
    assert model.calls == []
    assert len(run(model, [1] * 5).tokens) == 1


def test_what_the_cache_holds_already_counts_against_the_context() -> None:
    model = FakeModel(context_positions=6)
    model.forward([1, 2, 3], scope="prefill")
    with pytest.raises(PromptTooLongError, match="at most 2 tokens"):
        run(model, [4, 5, 6])


@pytest.mark.parametrize("prompt", [[], [1, 300], [-1]])
def test_prompts_that_are_none_are_refused_before_any_step(prompt: list[int]) -> None:
    model = FakeModel()
    with pytest.raises(TokenError):
        run(model, prompt, prefill_chunk=1)
    assert model.calls == []


@pytest.mark.parametrize(("call", "n_tokens"), [(0, 0), (1, 0), (2, 1), (4, 3)])
def test_ctrl_c_in_any_step_returns_what_there_is(call: int, n_tokens: int) -> None:
    result = run(FakeModel(interrupt_at=call), [1, 2, 3, 4], prefill_chunk=2, max_new_tokens=9)
    assert (len(result.tokens), result.stop_reason) == (n_tokens, "interrupted")


def test_ctrl_c_while_a_token_is_shown_keeps_the_token() -> None:
    def interrupt(_: int) -> None:
        raise KeyboardInterrupt

    result = generate(as_language_model(FakeModel()), [1, 2], GenerateOptions(), on_token=interrupt)
    assert (len(result.tokens), result.stop_reason) == (1, "interrupted")


@pytest.mark.parametrize("field", ["max_new_tokens", "prefill_chunk"])
def test_lengths_below_one_are_refused(field: str) -> None:
    with pytest.raises(OptionError, match=field):
        GenerateOptions(**{field: 0})


# ---- notes


def notes(rows: int = 5, scopes: str = "decode", **routing: object) -> list[str]:
    return list(budget_notes(CONFIG, RoutingOptions(**routing), scopes.split(), largest_prefill_step=rows))


MEASURED = "policy aggregate: quality measured on the model that ships alone; `colibri-jax quality` measures others"


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (notes(budget=0), []),
        (notes(budget=7), [MEASURED]),
        (notes(budget=8), [MEASURED, "no effect: 8 ≥ top-k 8 in scope decode"]),
        (notes(budget=16), [MEASURED, "no effect: 16 ≥ top-k 8 in scope decode"]),
        (notes(budget=4, expert_topk=4), [MEASURED, "no effect: 4 ≥ expert-topk 4 in scope decode"]),
        (notes(budget=3, expert_topk=4), [MEASURED]),
        (notes(budget=8, expert_topk=9), [MEASURED, "no effect: 8 ≥ top-k 8 in scope decode"]),
        (notes(budget=39, scopes="prefill"), [MEASURED]),
        (notes(budget=40, scopes="prefill"), [MEASURED, "no effect: 40 ≥ 40 = 5 positions × top-k 8 in scope prefill"]),
        (notes(budget=63, rows=500, scopes="prefill"), [MEASURED]),
        (notes(budget=64, rows=500, scopes="prefill"), [MEASURED, "no effect: 64 ≥ all 64 experts in scope prefill"]),
        (notes(budget=4, scopes="verify decode"), [MEASURED, "no effect: nothing is drafted, so no step has scope verify"]),
        (notes(budget=(0, 9)), [MEASURED, "no effect: 9 ≥ top-k 8 in scope decode"]),
        (notes(budget=(9, 4)), [MEASURED]),
    ],
)
def test_a_budget_says_that_it_is_experimental_and_where_it_cannot_act(lines: list[str], expected: list[str]) -> None:
    assert lines == expected


# ---- report


def report(routing: RoutingOptions, scopes: dict[str, ScopeStats]) -> RunReport:
    return RunReport(
        generation=Generation(prompt_tokens=3, tokens=(50, 51), stop_reason="max_new_tokens"),
        text="hi",
        stats=Stats(backend="native", precision="w4a8", scopes=scopes),
        routing=routing,
        budget_scopes=frozenset({"decode"}),
        options={"budget": OptionValue(4, "EXPERT_BUDGET")},
    )


@pytest.mark.parametrize(
    ("dropped", "n_bytes", "line"),
    [
        (13613, 257_300_000_000, "EXPERT_BUDGET=4 (dropped 13613 experts, ~257.3 GB I/O saved)"),
        (0, 0, "EXPERT_BUDGET=4 (dropped 0 experts, ~0.0 GB I/O saved)"),
        (3, 1_049_000_000, "EXPERT_BUDGET=4 (dropped 3 experts, ~1.0 GB I/O saved)"),
        (3, 81_000, "EXPERT_BUDGET=4 (dropped 3 experts, ~0.000081 GB I/O saved)"),
    ],
)
def test_the_budget_line_has_its_exact_form(dropped: int, n_bytes: int, line: str) -> None:
    half = {"dropped_experts": dropped // 2, "avoided_read_bytes_estimate": n_bytes // 2}
    rest = {"dropped_experts": dropped - dropped // 2, "avoided_read_bytes_estimate": n_bytes - n_bytes // 2}
    made = report(RoutingOptions(budget=4), {"prefill": ScopeStats(**half), "decode": ScopeStats(**rest)})
    assert made.budget_line() == line


def test_no_budget_no_budget_line() -> None:
    assert report(RoutingOptions(), {"decode": ScopeStats(steps=1)}).budget_line() is None
    assert report(RoutingOptions(budget=(0, 6)), {"decode": ScopeStats(steps=1)}).budget_line() is not None


def test_the_table_shows_what_happened_per_scope() -> None:
    model = FakeModel(routing=RoutingOptions(budget=4))
    run(model, [1, 2, 3, 4], max_new_tokens=3)
    made = report(RoutingOptions(budget=4), dict(model.stats.scopes))
    out = io.StringIO()
    Console(file=out, width=100).print(made.table())
    rows = {line.split("  ")[0].strip() or line.strip().split("  ")[0]: line for line in out.getvalue().splitlines()}
    text = out.getvalue()
    assert "prefill" in text
    assert "decode (budget)" in text
    assert "verify" not in text
    for fragment in ("4 in 1 steps", "2 in 2 steps", "4.00 tok/s", "2.00 tok/s", "0.500 s   50%", "3.0 GB", "0.2 GB", "25.0%", "0.7500"):
        assert fragment in text, (fragment, rows)
    assert "4.0 of 8.0" in text
    assert max(len(line) for line in text.splitlines()) < 80


def test_json_holds_every_counter_per_scope_and_phases_that_sum() -> None:
    model = FakeModel(routing=RoutingOptions(budget=4))
    run(model, [1, 2, 3, 4], max_new_tokens=3)
    data = json.loads(json.dumps(report(RoutingOptions(budget=4), dict(model.stats.scopes)).to_json()))
    assert set(data["scopes"]) == {"prefill", "decode", "verify", "draft"}
    decode = data["scopes"]["decode"]
    derived = {
        "phase_seconds",
        "phase_seconds_sum",
        "tokens_per_second",
        "hit_rate",
        "prefetch_recall",
        "mass_kept",
        "bytes_read_per_position",
    }
    assert set(decode) == {f.name for f in dataclasses.fields(ScopeStats)} | derived
    assert set(decode["phase_seconds"]) == set(PHASES)
    assert decode["phase_seconds_sum"] == decode["wall_seconds"] == 1.0
    assert (decode["hit_rate"], decode["mass_kept"], decode["emptied_positions"]) == (0.25, 0.75, 2)
    assert data["scopes"]["verify"]["hit_rate"] is None
    assert data["total"]["dropped_experts"] == 16
    assert data["budget_line"] == "EXPERT_BUDGET=4 (dropped 16 experts, ~0.3 GB I/O saved)"
    assert (data["token_ids"], data["prompt_tokens"], data["options"], data["option_sources"]) == (
        [50, 51],
        3,
        {"budget": 4},
        {"budget": "EXPERT_BUDGET"},
    )
