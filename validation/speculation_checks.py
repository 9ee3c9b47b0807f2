"""What speculation may not change, as a function from models and drafters to a list of differences; and drafters made for tests."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from colibri_jax.generate.drafters import Draft, Drafter
from colibri_jax.generate.loop import GenerateOptions, Generation, generate, prefill
from colibri_jax.generate.protocol import LanguageModel
from colibri_jax.generate.sampling import sample
from colibri_jax.generate.speculate import SpeculationOptions, Speculator
from colibri_jax.generate.speculation_stats import SpeculationStats

Logits = dict[int, bytes]


class Forced:
    """Guesses from a known answer, spoilt as a schedule says.

    Args:
        answer: tokens by absolute position.
        position: of the first token after what was taken so far.
        wrong: whether the guess for a position is to be another token.
        vocabulary: tokens that there are.
        fewer: guesses as many as asked for, or a changing number of them.
    """

    name = "forced"

    def __init__(
        self, answer: dict[int, int], position: int, vocabulary: int, wrong: Callable[[int], bool] = lambda _: False, fewer: bool = False
    ) -> None:
        self.position, self.history = position, []
        self._answer, self._wrong, self._vocabulary, self._fewer = answer, wrong, vocabulary, fewer
        self.history: list[int]

    def taken(self, tokens: Sequence[int]) -> None:
        self.history.extend(tokens)
        self.position += len(tokens)

    def draft(self, token: int, n: int) -> Draft:
        n = 1 + self.position % n if self._fewer else n
        guesses = []
        for position in range(self.position + 1, self.position + 1 + n):
            right = self._answer.get(position, 0)
            guesses.append((right + 1 + position % (self._vocabulary - 1)) % self._vocabulary if self._wrong(position) else right)
        return Draft(tuple(guesses))


class Repeats:
    """Guesses that the last token goes on for ever."""

    name = "repeats"

    def taken(self, tokens: Sequence[int]) -> None:
        pass

    def draft(self, token: int, n: int) -> Draft:
        return Draft((token,) * n)


@dataclasses.dataclass(frozen=True)
class Plain:
    """Decoding without drafts: the answer, the logits of each of its tokens, and where the cache ended."""

    generation: Generation
    logits: Logits
    position: int

    @property
    def answer(self) -> dict[int, int]:
        """Tokens by absolute position, the stop token included."""
        return dict(zip(sorted(self.logits), self.generation.all_tokens, strict=True))


def decode_plainly(lm: LanguageModel, prompt: Sequence[int], options: GenerateOptions) -> Plain:
    """The definition: one decode step per token, and each token by `sample`. Then the product's own loop has to agree."""
    start, logits, tokens = lm.position, {}, []
    logits_W = prefill(lm, prompt, options.prefill_chunk)
    reason, stop = "", None
    while not reason:
        logits[lm.position] = logits_W.tobytes()
        token = sample(logits_W, lm.position, options.sampling)
        if token in options.stop_ids:
            reason, stop = "stop_token", token
            break
        tokens.append(token)
        if len(tokens) == options.max_new_tokens:
            reason = "max_new_tokens"
        elif lm.position + 1 >= lm.context_positions:
            reason = "context_end"
        else:
            logits_W = lm.forward([token], scope="decode")[-1]
    made = Generation(prompt_tokens=len(prompt), tokens=tuple(tokens), stop_reason=reason, stop_token=stop)  # type: ignore[arg-type]
    end = lm.position
    lm.rewind(end - start)
    assert generate(lm, prompt, options) == made
    return Plain(made, logits, end)


def differences(
    plain: Plain,
    lm: LanguageModel,
    drafter: Drafter,
    prompt: Sequence[int],
    options: GenerateOptions,
    speculation: SpeculationOptions,
) -> tuple[list[str], SpeculationStats]:
    """What decoding with drafts changes, compared with decoding without; and what the drafts did."""
    seen: Logits = {}
    shapes: set[tuple[int, ...]] = set()

    def note(position: int, logits_W: npt.NDArray[np.float32]) -> None:
        seen[position] = logits_W.tobytes()
        shapes.add(logits_W.shape)

    speculator = Speculator(lm, drafter, speculation, on_logits=note)
    made = generate(lm, prompt, options, make=speculator.tokens)
    found = []
    if made.tokens != plain.generation.tokens:
        first = next(
            (i for i, (a, b) in enumerate(zip(made.tokens, plain.generation.tokens, strict=False)) if a != b), len(plain.generation.tokens)
        )
        found.append(f"token {first} of {len(plain.generation.tokens)}")
    if (made.stop_reason, made.stop_token) != (plain.generation.stop_reason, plain.generation.stop_token):
        found.append(f"ended by {made.stop_reason}, not {plain.generation.stop_reason}")
    found.extend(f"logits of position {p}" for p in sorted(set(seen) | set(plain.logits)) if seen.get(p) != plain.logits.get(p))
    if lm.position != plain.position:
        found.append(f"the cache ends at {lm.position}, not {plain.position}")
    if isinstance(drafter, Forced) and drafter.position != plain.position:
        found.append(f"the drafter follows to {drafter.position}, not {plain.position}")
    return found, speculator.stats


def inconsistencies(stats: SpeculationStats) -> list[str]:
    """Sums that do not add up."""
    laws: dict[str, Any] = {
        # A first token comes from the prompt.
        "emitted": stats.emitted_tokens == 1 + stats.verified_tokens + stats.plain_steps,
        "steps": stats.drafted[0] == stats.verification_steps,
        "plain": stats.measuring_steps + stats.paused_steps <= stats.plain_steps,
        "depths": list(stats.drafted) == sorted(stats.drafted, reverse=True)
        and list(stats.accepted) == sorted(stats.accepted, reverse=True),
        "compared": all(a + r <= d for a, r, d in zip(stats.accepted, stats.rejected, stats.drafted, strict=True)),
        "rejections": sum(stats.rejected) <= stats.verification_steps,
        # A step gives its accepted drafts and one token more, but for an answer that ends with an accepted one.
        "verified": 0 <= stats.verification_steps + sum(stats.accepted) - stats.verified_tokens <= 1,
        "experts": 0 <= stats.verify_experts_used <= stats.verify_experts,
        "slots": 0 <= stats.verify_slots_used <= stats.verify_slots,
    }
    return [law for law, holds in laws.items() if not holds]
