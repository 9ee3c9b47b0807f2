"""The loop from a prompt to an answer: prefill in chunks, then one decode step per token. Every backend runs through it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Generator, Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

from colibri_jax.errors import OptionError, PromptTooLongError, TokenError
from colibri_jax.generate.protocol import LanguageModel
from colibri_jax.generate.sampling import SamplingOptions, sample

DEFAULT_PREFILL_CHUNK = 512

StopReason = Literal["stop_token", "max_new_tokens", "context_end", "interrupted"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerateOptions:
    """How long and how to generate.

    Attributes:
        max_new_tokens: most tokens of the answer.
        prefill_chunk: most positions of one prefill step. Part of the result where a budget acts on prefill, else only of speed.
        sampling: how each token is chosen.
        stop_ids: tokens that end the answer and do not belong to it.

    Raises:
        OptionError: a field is outside its domain.
    """

    max_new_tokens: int = 64
    prefill_chunk: int = DEFAULT_PREFILL_CHUNK
    sampling: SamplingOptions = dataclasses.field(default_factory=SamplingOptions)
    stop_ids: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        for field in ("max_new_tokens", "prefill_chunk"):
            if getattr(self, field) < 1:
                raise OptionError("not positive", where=field, expected="1 or more", got=getattr(self, field))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Generation:
    """An answer: its tokens (without the stop token) and why it ended."""

    prompt_tokens: int
    tokens: tuple[int, ...]
    stop_reason: StopReason
    stop_token: int | None = None

    @property
    def all_tokens(self) -> tuple[int, ...]:
        """The tokens that were chosen: the answer's, then the stop token."""
        return self.tokens if self.stop_token is None else (*self.tokens, self.stop_token)


@dataclasses.dataclass(frozen=True, kw_only=True)
class End:
    """What a generator of tokens returns when it is exhausted."""

    reason: StopReason
    token: int | None = None


def check_prompt(prompt_ids: Sequence[int], *, vocab_size: int, free_positions: int) -> None:
    """Refuse a prompt before any work is done for it; it is never cut.

    Raises:
        TokenError: no tokens, or one outside the vocabulary.
        PromptTooLongError: the free part of the context does not hold the prompt and one more token.
    """
    if len(prompt_ids) == 0:
        raise TokenError("empty prompt", where="prompt", expected="1 token or more", got=0)
    for i, token in enumerate(prompt_ids):
        if not 0 <= token < vocab_size:
            raise TokenError("token outside the vocabulary", where=f"prompt position {i}", expected=f"0 to {vocab_size - 1}", got=token)
    if len(prompt_ids) + 1 > free_positions:
        raise PromptTooLongError(
            "the prompt leaves no room in the context",
            where="prompt",
            expected=f"at most {max(free_positions - 1, 0)} tokens",
            got=len(prompt_ids),
        )


def tokens(lm: LanguageModel, prompt_ids: Sequence[int], options: GenerateOptions) -> Generator[int, None, End]:
    """Yield the answer's tokens one by one; nothing runs ahead of the reader.

    The prompt continues whatever the model's KV cache holds. A token is chosen from the logits before it and the absolute
    position that it will have, so the answer depends neither on chunking nor on who asks for the steps.

    Raises:
        TokenError, PromptTooLongError: see `check_prompt`; raised at the first `next`, before any step.
    """
    free = lm.context_positions - lm.position
    check_prompt(prompt_ids, vocab_size=lm.config.vocab_size, free_positions=free)
    logits_W = prefill(lm, prompt_ids, options.prefill_chunk)
    n_tokens = 0
    while True:
        token = sample(logits_W, lm.position, options.sampling)
        if token in options.stop_ids:
            return End(reason="stop_token", token=token)
        n_tokens += 1
        yield token
        if n_tokens >= options.max_new_tokens:
            return End(reason="max_new_tokens")
        if lm.position + 1 >= lm.context_positions:
            return End(reason="context_end")
        logits_W = lm.forward([token], scope="decode", logits="last")[-1]


def prefill(
    lm: LanguageModel, prompt_ids: Sequence[int], chunk: int, taken: Callable[[Sequence[int]], None] | None = None
) -> npt.NDArray[np.float32]:
    """Append a prompt to the KV cache, `chunk` positions a step, and return the last position's logits, float32 [W].

    `taken` is called with the tokens of each step, right after it.
    """
    logits_W: npt.NDArray[np.float32] | None = None
    for start in range(0, len(prompt_ids), chunk):
        logits_W = lm.forward(prompt_ids[start : start + chunk], scope="prefill", logits="last")[-1]
        if taken is not None:
            taken(prompt_ids[start : start + chunk])
    if logits_W is None:
        raise TokenError("empty prompt", where="prompt", expected="1 token or more", got=0)
    return logits_W


Steps = Callable[[LanguageModel, Sequence[int], GenerateOptions], Generator[int, None, End]]
"""Makes the tokens of an answer: `tokens`, or a speculator's."""


def generate(
    lm: LanguageModel,
    prompt_ids: Sequence[int],
    options: GenerateOptions,
    on_token: Callable[[int], None] | None = None,
    *,
    make: Steps = tokens,
) -> Generation:
    """Generate until a stop token, the limit, the context's end or Ctrl-C.

    Args:
        lm: the model; the prompt continues what it holds.
        prompt_ids: at least one token.
        options: lengths, sampling, stop ids.
        on_token: called with each token of the answer as soon as it is known.
        make: how the tokens are made; `speculate.Speculator.tokens` makes them with drafts.

    Returns:
        The answer. After KeyboardInterrupt it is what there was by then, with `stop_reason="interrupted"`.

    Raises:
        TokenError, PromptTooLongError: before any step.
    """
    answer: list[int] = []
    end = End(reason="interrupted")
    steps = make(lm, prompt_ids, options)
    try:
        while True:
            token = next(steps)
            answer.append(token)
            if on_token is not None:
                on_token(token)
    except StopIteration as stop:
        end = stop.value
    except KeyboardInterrupt:
        steps.close()
    return Generation(prompt_tokens=len(prompt_ids), tokens=tuple(answer), stop_reason=end.reason, stop_token=end.token)
