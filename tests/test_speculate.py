"""Exact speculation changes no token and no bit; faults planted in every part of it are seen. On a model without weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from doctored_models import Doctored
from fakes import FakeModel, as_language_model
from hypothesis import given
from hypothesis import strategies as st
from speculation_checks import Forced, Plain, Repeats, decode_plainly, differences, inconsistencies

from colibri_jax.errors import ConfigError, OptionError, PromptTooLongError, TokenError
from colibri_jax.generate import acceptance
from colibri_jax.generate.drafters import Draft, Drafter, LookupDrafter, MTPDrafter
from colibri_jax.generate.loop import GenerateOptions, generate
from colibri_jax.generate.sampling import SamplingOptions, sample
from colibri_jax.generate.speculate import SpeculationOptions, Speculator
from colibri_jax.generate.speculation_stats import SpeculationStats
from colibri_jax.routing_spec import RoutingOptions

VOCABULARY = 300
SAMPLED = SamplingOptions(temperature=1.0, seed=5)
PROMPT = [1, 2, 3, 4, 5]

MakeDrafter = Callable[[Plain], Drafter]
DRAFTERS: dict[str, MakeDrafter] = {
    "oracle": lambda plain: Forced(plain.answer, 0, VOCABULARY),
    "always wrong": lambda plain: Forced(plain.answer, 0, VOCABULARY, lambda _: True),
    "sometimes right": lambda plain: Forced(plain.answer, 0, VOCABULARY, lambda p: p % 3 == 0, fewer=True),
    "repeats": lambda _: Repeats(),
    "lookup": lambda _: LookupDrafter(),
    "lookup of single tokens": lambda _: LookupDrafter(longest=1, shortest=1),
}


def periodic(n: int) -> dict[int, int]:
    """A script that repeats itself, so that lookups find something."""
    return {position: 20 + position % 7 for position in range(n)}


def compare(
    drafter: str | MakeDrafter,
    options: GenerateOptions,
    speculation: SpeculationOptions,
    *,
    make: Callable[..., FakeModel] = FakeModel,
    doctored: Callable[[FakeModel], Any] = lambda model: model,
) -> tuple[list[str], SpeculationStats]:
    plain = decode_plainly(as_language_model(make()), PROMPT, options)
    chosen = (DRAFTERS[drafter] if isinstance(drafter, str) else drafter)(plain)
    return differences(plain, doctored(make()), chosen, PROMPT, options, speculation)


# ---- nothing changes ------------------------------------------------------------------------------------------------


@given(
    drafter=st.sampled_from(sorted(DRAFTERS)),
    depth=st.integers(1, 8),
    sampling=st.sampled_from([SamplingOptions(), SAMPLED, SamplingOptions(temperature=0.7, top_p=0.6, seed=9)]),
    n=st.integers(1, 40),
    context=st.integers(6, 60),
    stop=st.frozensets(st.integers(0, VOCABULARY - 1), max_size=20),
    scripted=st.booleans(),
    pausing=st.booleans(),
    chunk=st.integers(1, 6),
)
def test_tokens_logits_and_cache_are_those_without_drafts(
    drafter: str,
    depth: int,
    sampling: SamplingOptions,
    n: int,
    context: int,
    stop: frozenset[int],
    scripted: bool,
    pausing: bool,
    chunk: int,
) -> None:
    options = GenerateOptions(max_new_tokens=n, sampling=sampling, stop_ids=stop, prefill_chunk=chunk)
    found, stats = compare(
        drafter,
        options,
        SpeculationOptions(depth=depth, pausing=pausing),
        make=lambda: FakeModel(context_positions=context, script=periodic(100) if scripted else None),
    )
    assert found == []
    assert inconsistencies(stats) == []


def test_every_drafter_does_what_its_name_says() -> None:
    options, speculation = GenerateOptions(max_new_tokens=60), SpeculationOptions(depth=4, pausing=False)

    def stats(drafter: str, script: dict[int, int] | None = None) -> SpeculationStats:
        return compare(drafter, options, speculation, make=lambda: FakeModel(script=script))[1]

    oracle, wrong, some = (stats(name) for name in ("oracle", "always wrong", "sometimes right"))
    assert oracle.accepted == oracle.drafted
    assert oracle.tokens_per_verification == pytest.approx(59 / 12)
    assert (wrong.accepted, wrong.rejected) == ((0, 0, 0, 0), (wrong.verification_steps, 0, 0, 0))
    assert all(0 < a < d for a, d in zip(some.accepted[:2], some.drafted[:2], strict=True))
    assert stats("lookup", periodic(100)).acceptance_rate == 1.0
    assert stats("lookup").verification_steps < 60


# ---- planted faults -------------------------------------------------------------------------------------------------


class KeepsARejectedRow(Doctored):
    """A rewind that leaves one rejected row in the cache."""

    def rewind(self, n: int) -> None:
        self.model.rewind(max(n - 1, 0))


class NeighboursMatter(Doctored):
    """Rows of a verification that are routed together change."""

    def forward(self, tokens: Any, **options: Any) -> Any:
        logits_TW = self.model.forward(tokens, **options)
        if options["scope"] == "verify":
            logits_TW[0] = np.nextafter(logits_TW[0], np.float32(np.inf))
        return logits_TW


def accepts_all(logits_TW: Any, draft: Draft, position: int, sampling: SamplingOptions) -> list[int]:
    """Drafts stay although they are others."""
    return [*draft.tokens, sample(logits_TW[-1], position + len(draft.tokens), sampling)]


def keyed_by_step(logits_TW: Any, draft: Draft, position: int, sampling: SamplingOptions) -> list[int]:
    """All draws of a step have the key of its first position."""
    chosen = []
    for i, logits_W in enumerate(logits_TW):
        chosen.append(sample(logits_W, position, sampling))
        if i < len(draft.tokens) and chosen[-1] != draft.tokens[i]:
            break
    return chosen


def goes_on(logits_TW: Any, draft: Draft, position: int, sampling: SamplingOptions) -> list[int]:
    """What was scored behind a rejected draft stays."""
    return [sample(logits_W, position + i, sampling) for i, logits_W in enumerate(logits_TW)]


@pytest.mark.parametrize("fault", [KeepsARejectedRow, NeighboursMatter])
def test_a_model_that_breaks_its_promise_is_seen(fault: type[Doctored]) -> None:
    options, speculation = GenerateOptions(max_new_tokens=30, sampling=SAMPLED), SpeculationOptions(pausing=False)
    assert compare("sometimes right", options, speculation)[0] == []
    assert compare("sometimes right", options, speculation, doctored=fault)[0] != []


@pytest.mark.parametrize("rule", [accepts_all, keyed_by_step, goes_on])
def test_a_wrong_rule_of_acceptance_is_seen(rule: acceptance.Rule, monkeypatch: pytest.MonkeyPatch) -> None:
    options, speculation = GenerateOptions(max_new_tokens=30, sampling=SAMPLED), SpeculationOptions(pausing=False)
    monkeypatch.setitem(acceptance.RULES, "equal", rule)
    assert compare("sometimes right", options, speculation)[0] != []


def test_a_drafter_that_sees_rejected_tokens_is_seen() -> None:
    class Told(Forced):
        def draft(self, token: int, n: int) -> Draft:
            guessed = super().draft(token, n)
            self.taken(guessed.tokens)
            return guessed

    options = GenerateOptions(max_new_tokens=20)
    found, _ = compare(lambda plain: Told(plain.answer, 0, VOCABULARY, lambda _: True), options, SpeculationOptions(pausing=False))
    assert any("the drafter follows" in difference for difference in found)


# ---- readers that stop ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("read", range(1, 9))
def test_where_the_reader_stops_the_cache_holds_what_the_reader_saw(read: int) -> None:
    options = GenerateOptions(max_new_tokens=30, sampling=SAMPLED)
    plain = decode_plainly(as_language_model(FakeModel()), PROMPT, options)
    model, drafter = FakeModel(), Forced(plain.answer, 0, VOCABULARY)
    speculator = Speculator(as_language_model(model), drafter, SpeculationOptions(depth=4, pausing=False))
    answer = speculator.tokens(as_language_model(model), PROMPT, options)
    seen = [next(answer) for _ in range(read)]
    answer.close()
    assert tuple(seen) == plain.generation.tokens[:read]
    assert model.position == drafter.position == len(PROMPT) + read - 1
    assert drafter.history == [*PROMPT, *seen[:-1]]
    # Going on from there gives the rest of the answer.
    rest = generate(as_language_model(model), seen[-1:], dataclasses.replace(options, max_new_tokens=30 - read), make=speculator.tokens)
    assert (*seen, *rest.tokens) == plain.generation.tokens


@pytest.mark.parametrize("call", range(5))
def test_ctrl_c_in_any_step_leaves_a_cache_that_goes_on(call: int) -> None:
    options = GenerateOptions(max_new_tokens=16)
    plain = decode_plainly(as_language_model(FakeModel()), PROMPT, options)
    model, drafter = FakeModel(interrupt_at=call), Forced(plain.answer, 0, VOCABULARY, lambda p: p % 4 == 0)
    speculator = Speculator(as_language_model(model), drafter, SpeculationOptions(depth=3, pausing=False))
    made = generate(as_language_model(model), PROMPT, options, make=speculator.tokens)
    assert made.stop_reason == "interrupted"
    assert made.tokens == plain.generation.tokens[: len(made.tokens)]
    assert model.position == (len(PROMPT) + len(made.tokens) - 1 if made.tokens else 0)


def test_a_failure_while_accepting_leaves_nothing_of_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> list[int]:
        raise KeyboardInterrupt

    monkeypatch.setitem(acceptance.RULES, "equal", interrupted)
    model = FakeModel()
    speculator = Speculator(as_language_model(model), Repeats(), SpeculationOptions(pausing=False))
    made = generate(as_language_model(model), PROMPT, GenerateOptions(), make=speculator.tokens)
    assert (len(made.tokens), model.position) == (1, len(PROMPT))


# ---- modes, refusals, statistics ------------------------------------------------------------------------------------


def test_verification_takes_rows_alone_or_together() -> None:
    for speculation, rows in (("exact", "alone"), ("union", "together")):
        asked: set[Any] = set()

        class Asked(Doctored):
            def forward(self, tokens: Any, **options: Any) -> Any:
                asked.add((options["scope"], options.get("rows")))  # noqa: B023
                return self.model.forward(tokens, **options)

        options = SpeculationOptions(speculation=speculation, pausing=False)  # type: ignore[arg-type]
        compare("oracle", GenerateOptions(max_new_tokens=9), options, doctored=Asked)
        assert asked == {("prefill", None), ("verify", rows)}


def test_what_cannot_be_is_refused_by_name() -> None:
    for fields in ({"depth": 0}, {"depth": 9}, {"speculation": "both"}, {"acceptance": "all"}):
        with pytest.raises(OptionError, match=next(iter(fields))):
            SpeculationOptions(**fields)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="longest, shortest"):
        LookupDrafter(longest=2, shortest=3)
    with pytest.raises(ConfigError, match="no MTP block"):
        MTPDrafter(as_language_model(FakeModel()), SAMPLED)
    fenced = FakeModel(routing=RoutingOptions(policy="resident", budget=2, allow_irreproducible=True))
    with pytest.raises(OptionError, match="what the cache holds"):
        Speculator(as_language_model(fenced), Repeats())
    Speculator(as_language_model(fenced), Repeats(), SpeculationOptions(speculation="union"))
    model = as_language_model(FakeModel(context_positions=6))
    speculator = Speculator(model, Repeats())
    with pytest.raises(OptionError, match="one model"):
        next(speculator.tokens(as_language_model(FakeModel()), PROMPT, GenerateOptions()))
    with pytest.raises(TokenError):
        next(speculator.tokens(model, [], GenerateOptions()))
    with pytest.raises(PromptTooLongError):
        next(speculator.tokens(model, [1] * 6, GenerateOptions()))


def test_statistics_say_what_happened_in_json_and_in_words() -> None:
    _, stats = compare("oracle", GenerateOptions(max_new_tokens=10), SpeculationOptions(depth=2, pausing=False, speculation="union"))
    data = stats.to_json()
    assert (data["lossy"], data["acceptance_rate"], data["tokens_per_verification"]) == (True, 1.0, 3.0)
    # The fake model reads 80 MB a step, and each of the three steps gave three tokens; the prompt gave the first.
    assert data["bytes_per_token"] == 3 * 80e6 / 10
    text = "\n".join(stats.lines())
    for fragment in (
        "union (lossy, votes uniform)",
        "accepted 100.0% (3/3 3/3 by depth); 3.00 tokens per verification step",
        "24.000 MB read per",
    ):
        assert fragment in text


# ---- prompt lookup --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "sizes", "guesses"),
    [
        ([1, 2, 3, 9, 1, 2, 3], (4, 2), [9, 1, 2, 3]),  # the last three tokens, as two
        ([1, 2, 7, 1, 2, 8, 1, 2], (4, 2), [8, 1, 2, 8]),  # the latest occurrence, going on into itself
        ([0, 1, 2, 7, 5, 1, 2, 8, 0, 1, 2], (3, 2), [7, 5, 1, 2]),  # a longer match before a later one
        ([1, 2, 3], (4, 2), []),
        ([5, 5], (1, 1), [5, 5, 5, 5]),
        ([5], (4, 1), []),
    ],
)
def test_lookup_takes_what_followed_the_latest_longest_match(text: list[int], sizes: tuple[int, int], guesses: Sequence[int]) -> None:
    drafter = LookupDrafter(*sizes)
    drafter.taken(text[:-1])
    assert list(drafter.draft(text[-1], 4).tokens) == list(guesses)
    assert drafter.draft(text[-1], 1).tokens == tuple(guesses[:1])
