"""The MTP drafter on a block made of bookkeeping: which rows it is fed, when, and what it forgets."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from fakes import FakeModel
from speculation_checks import decode_plainly, differences, inconsistencies

from colibri_jax.errors import OptionError
from colibri_jax.generate.drafters import MTPDrafter
from colibri_jax.generate.loop import GenerateOptions
from colibri_jax.generate.sampling import SamplingOptions
from colibri_jax.generate.speculate import SpeculationOptions

Float32 = npt.NDArray[np.float32]
D = 2


class WithMTP(FakeModel):
    """Hidden states say (position, token); the block's own say (position, token) of its row, negated. Some rows are wrong."""

    def __init__(self, answer: dict[int, int], **options: Any) -> None:
        super().__init__(**options)
        self.config = dataclasses.replace(self.config, n_mtp_layers=1)
        self._answer = answer
        self.rows: list[tuple[int, tuple[float, ...]]] = []
        self.widths: list[int] = []
        self.hidden = self.mtp_hidden = np.zeros((0, D), np.float32)

    def forward(self, tokens: Any, **options: Any) -> Float32:
        start = self.position
        logits_TW = super().forward(tokens, **options)
        self.hidden = np.array([(start + i, token) for i, token in enumerate(tokens)], np.float32)
        return logits_TW

    @property
    def mtp_position(self) -> int:
        return len(self.rows)

    def mtp_forward(self, tokens_next: Sequence[int], trunk_hidden: Float32, *, logits: str = "all") -> Float32:
        assert len(tokens_next) == len(trunk_hidden)
        self.widths.append(len(tokens_next))
        rows, own = [], []
        for token, hidden in zip(tokens_next, trunk_hidden, strict=True):
            row = len(self.rows)
            self.rows.append((int(token), tuple(hidden.tolist())))
            own.append((-float(row), -float(token)))
            scores = np.zeros(self.config.vocab_size, np.float32)
            scores[self._answer.get(row + 2, 0) if row % 3 and row % 7 else 0] = 50.0
            rows.append(scores)
        self.mtp_hidden = np.array(own, np.float32)
        return np.stack(rows[-1:] if logits == "last" else rows)

    def mtp_rewind(self, n: int) -> None:
        assert 0 <= n <= len(self.rows)
        del self.rows[len(self.rows) - n :]

    def rewind(self, n: int) -> None:
        super().rewind(n)
        del self.rows[max(self.position, 0) :]

    def confirmed(self) -> list[tuple[int, tuple[float, ...]]]:
        """The rows that the tokens in the cache give."""
        tokens = self._tokens
        return [(tokens[t + 1], (float(t), float(tokens[t]))) for t in range(len(tokens) - 1)]


def made(prompt: Sequence[int], n: int, depth: int, *, pausing: bool = False, chunk: int = 512) -> tuple[WithMTP, Any]:
    options = GenerateOptions(max_new_tokens=n, prefill_chunk=chunk)
    context = len(prompt) + n
    plain = decode_plainly(FakeModel(context_positions=context), prompt, options)
    model = WithMTP(plain.answer, context_positions=context)
    speculation = SpeculationOptions(depth=depth, pausing=pausing)
    found, stats = differences(plain, model, MTPDrafter(model, options.sampling), prompt, options, speculation)
    assert found + inconsistencies(stats) == []
    return model, stats


@pytest.mark.parametrize("depth", range(1, 9))
@pytest.mark.parametrize("chunk", [1, 3, 512])
def test_the_block_follows_the_tokens_that_stayed(depth: int, chunk: int) -> None:
    model, stats = made([1, 2, 3, 4, 5], 40, depth, chunk=chunk)
    assert model.rows == model.confirmed()[: len(model.rows)]
    # The rows after the last draft wait for a next one.
    assert len(model.rows) >= model.position - depth - 2
    assert stats.accepted[0] > 0
    assert sum(stats.rejected) > 0


def test_a_long_prompt_goes_to_the_block_in_portions() -> None:
    model, _ = made(list(range(1, 290)), 8, 2)
    assert max(model.widths) <= 128
    assert model.rows == model.confirmed()[: len(model.rows)]


def test_deeper_guesses_hang_on_the_block_itself() -> None:
    seen: list[tuple[float, ...]] = []

    class Watching(WithMTP):
        def mtp_forward(self, tokens_next: Sequence[int], trunk_hidden: Float32, *, logits: str = "all") -> Float32:
            seen.append(tuple(trunk_hidden[-1].tolist()))
            return super().mtp_forward(tokens_next, trunk_hidden, logits=logits)

    model = Watching({})
    drafter = MTPDrafter(model, SamplingOptions())
    model.forward([7, 8], scope="prefill")
    drafter.taken([7, 8])
    assert drafter.draft(9, 3).tokens == (0, 0, 0)
    # The trunk's state of position 1 with token 9; then the block's own of row 1 (token 9) and of row 2 (the first guess, 0).
    assert seen == [(1.0, 8.0), (-1.0, -9.0), (-2.0, -0.0)]
    assert model.rows == [(8, (0.0, 7.0)), (9, (1.0, 8.0))]


def test_an_interrupted_guess_can_be_made_again() -> None:
    class Interrupted(WithMTP):
        asked = 0

        def mtp_forward(self, tokens_next: Sequence[int], trunk_hidden: Float32, *, logits: str = "all") -> Float32:
            self.asked += 1
            if self.asked in (1, 3):
                raise KeyboardInterrupt
            return super().mtp_forward(tokens_next, trunk_hidden, logits=logits)

    model = Interrupted({})
    drafter = MTPDrafter(model, SamplingOptions())
    model.forward([7, 8], scope="prefill")
    drafter.taken([7, 8])
    with pytest.raises(KeyboardInterrupt):
        drafter.draft(9, 3)
    assert model.rows == []
    with pytest.raises(KeyboardInterrupt):  # in the second row of the guess
        drafter.draft(9, 3)
    assert model.rows == [(8, (0.0, 7.0)), (9, (1.0, 8.0))]


def test_the_block_starts_anew_after_a_pause() -> None:
    """It does not follow while nothing is guessed, and then has the last 32 positions: the hidden state and the token after each."""
    model = WithMTP({}, context_positions=256)
    drafter = MTPDrafter(model, SamplingOptions())
    tokens = [7 + i % 90 for i in range(150)]

    def take(first: int, last: int) -> None:
        for token in tokens[first:last]:
            model.forward([token], scope="decode")
            drafter.taken([token])

    take(0, 40)
    drafter.draft(tokens[40], 2)
    assert model.rows == [(tokens[t + 1], (float(t), float(tokens[t]))) for t in range(40)]
    take(40, 72)  # not yet a pause
    drafter.draft(tokens[72], 2)
    assert len(model.rows) == 72
    fed = len(model.widths)
    take(72, 149)
    assert len(model.widths) == fed
    assert model.rows == []
    drafter.draft(tokens[149], 2)
    assert model.rows == [(tokens[t + 1], (float(t), float(tokens[t]))) for t in range(116, 149)]


def test_a_backend_without_the_block_is_refused() -> None:
    plain = FakeModel()
    plain.config = WithMTP({}).config
    with pytest.raises(OptionError, match="one that runs the block"):
        MTPDrafter(plain, SamplingOptions())


def test_a_block_that_has_not_followed_starts_anew() -> None:
    model = WithMTP({}, context_positions=256)
    model.forward([7, 8, 9], scope="prefill")
    model.mtp_forward([8, 9], model.hidden[:2])
    drafter = MTPDrafter(model, SamplingOptions())
    assert model.rows == []
    assert drafter.draft(3, 2).tokens == ()
    model.forward([3, 4], scope="prefill")
    drafter.taken([3, 4])
    drafter.draft(5, 2)
    assert model.rows == [(4, (3.0, 3.0)), (5, (4.0, 4.0))]
