"""Runs of a model with its MTP block: feeding, drafting on, verification, rejection; the answers, and what differs between two models."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from engine_models import bits

from colibri_jax.routing_spec import Selection

Float32 = npt.NDArray[np.float32]


class Answer(NamedTuple):
    """What one call gave: logits, hidden states, the selection of every layer that it went through, rows of trunk and block after it."""

    call: str
    logits_TW: Float32
    hidden_TD: Float32
    selections: tuple[Selection, ...]
    positions: tuple[int, int]


def forward(model: Any, tokens: Sequence[int], scope: str) -> Answer:
    """One step of the trunk."""
    logits_TW = model.forward(tokens, scope=scope)
    return Answer(f"{scope} of {len(tokens)}", logits_TW, model.hidden, model.selections, (model.position, model.mtp_position))


def block(model: Any, tokens_next: Sequence[int], hidden: Float32 | slice) -> Answer:
    """One step of the block."""
    logits_TW = model.mtp_forward(tokens_next, hidden)
    position = (model.position, model.mtp_position)
    return Answer(f"block's {len(tokens_next)}", logits_TW, model.mtp_hidden, (model.mtp_selection,), position)


def play(model: Any, prompt: Sequence[int], depth: int, accepted: Sequence[int]) -> Iterator[Answer]:
    """A prompt, then one round per entry of `accepted`: `depth` chained drafts, their verification, and so many of them taken as right.

    The block's rows of drafts are dropped after each round, and those of the accepted positions fed again with the trunk's hidden states.
    """
    trunk = forward(model, prompt, "prefill")
    yield trunk
    token = int(trunk.logits_TW[-1].argmax())
    rows = block(model, [*prompt[1:], token], slice(None))
    yield rows
    for kept in accepted:
        drafts, fed = [int(rows.logits_TW[-1].argmax())], model.mtp_position
        while len(drafts) < depth:
            rows = block(model, drafts[-1:], model.mtp_hidden[-1:])
            yield rows
            drafts.append(int(rows.logits_TW[-1].argmax()))
        trunk = forward(model, [token, *drafts], "verify")
        yield trunk
        model.rewind(depth - kept)
        model.mtp_rewind(model.mtp_position - fed)
        token = int(trunk.logits_TW[kept].argmax())
        rows = block(model, [*drafts[:kept], token], slice(0, kept + 1))
        yield rows


def differences(ours: Iterator[Answer], theirs: Iterator[Answer]) -> list[str]:
    """What is not equal, call by call and bit by bit: the checker. It stops at the first call that differs: what follows feeds on it."""
    for number, (a, b) in enumerate(itertools.zip_longest(ours, theirs)):
        if a is None or b is None or a.call != b.call:
            return [f"call {number}: {a and a.call} against {b and b.call}"]
        found = [] if a.positions == b.positions else [f"positions {a.positions} against {b.positions}"]
        if bits(a.logits_TW) != bits(b.logits_TW):
            found.append("logits")
        if bits(np.ascontiguousarray(a.hidden_TD)) != bits(np.ascontiguousarray(b.hidden_TD)):
            found.append("hidden")
        for layer, (mine, other) in enumerate(zip(a.selections, b.selections, strict=True)):
            found += [f"MoE layer {layer}: {field}" for field in mine.differences(other)]
        if found:
            return [f"call {number} ({a.call}): {what}" for what in found]
    return []


class Doctored:
    """A model whose block lies about something; everything else is the model's own."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def mtp_forward(self, tokens_next: Sequence[int], hidden: Float32 | slice, **options: Any) -> Float32:
        rows_TD = self.model.hidden[hidden] if isinstance(hidden, slice) else hidden
        logits_TW: Float32 = self.model.mtp_forward(tokens_next, self.rows(rows_TD), **options)
        return logits_TW

    def rows(self, hidden_TD: Float32) -> Float32:
        """The hidden states that the block is given."""
        return hidden_TD


class RowBefore(Doctored):
    """Every row has the hidden state of the row before it in the call."""

    def rows(self, hidden_TD: Float32) -> Float32:
        return np.concatenate([hidden_TD[:1], hidden_TD[:-1]])


class BeforeTheNorm(Doctored):
    """Hidden states are scaled as if the final norm had been forgotten."""

    def rows(self, hidden_TD: Float32) -> Float32:
        return np.asarray(hidden_TD * np.float32(1.5))


class StaleRow(Doctored):
    """The first row that is appended after a rewind leaves in the cache what was there before."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self._fed: list[tuple[int, Float32]] = []
        self._stale: tuple[int, Float32] | None = None

    def mtp_rewind(self, n: int) -> None:
        self.model.mtp_rewind(n)
        self._stale = self._fed[self.model.mtp_position] if len(self._fed) > self.model.mtp_position else None

    def mtp_forward(self, tokens_next: Sequence[int], hidden: Float32 | slice, **options: Any) -> Float32:
        rows_TD = self.model.hidden[hidden] if isinstance(hidden, slice) else hidden
        stale, self._stale, first = self._stale, None, self.model.mtp_position
        self._fed[first:] = list(zip(tokens_next, rows_TD, strict=True))
        if stale is None:
            return super().mtp_forward(tokens_next, rows_TD, **options)
        head_TW = self.model.mtp_forward(tokens_next[:1], rows_TD[:1], **options)
        if len(tokens_next) > 1:
            self.model.mtp_rewind(1)
            self.model.mtp_forward([stale[0]], stale[1][None])
            head_TW = np.concatenate([head_TW, self.model.mtp_forward(tokens_next[1:], rows_TD[1:], **options)])
        return head_TW


class CarriedOn(Doctored):
    """Rewinding the block drops one row less than it was told."""

    def mtp_rewind(self, n: int) -> None:
        self.model.mtp_rewind(max(n - 1, 0))
