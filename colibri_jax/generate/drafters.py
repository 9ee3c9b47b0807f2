"""Who guesses tokens ahead: the protocol of drafters, the prompt's own n-grams, and the model's MTP block."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal, Protocol, cast

import numpy as np
import numpy.typing as npt

from colibri_jax.config import ModelConfig
from colibri_jax.errors import ConfigError, OptionError
from colibri_jax.generate.protocol import LanguageModel
from colibri_jax.generate.sampling import DRAFT_STREAM, SamplingOptions, probabilities, sample

Float32 = npt.NDArray[np.float32]

# Rows of a prompt that wait for the MTP block at most: it takes them in one step, whose working memory grows with them.
_MOST_WAITING = 128
# Rows that the block starts anew with after a pause. Of a small model's next tokens it foresees no fewer with these than with all.
_AFTER_PAUSE = 32


@dataclasses.dataclass(frozen=True)
class Draft:
    """Guessed tokens, in order.

    Attributes:
        tokens: at most as many as were asked for; none is an answer too.
        probabilities: of each guess the distribution that it was drawn from, float64 [W]; None where guesses are certain, as from
            a table. Only `acceptance="resample"` looks at them.
    """

    tokens: tuple[int, ...] = ()
    probabilities: tuple[npt.NDArray[np.float64], ...] | None = None


class Drafter(Protocol):
    """Follows the tokens that a model has taken and guesses what comes after them. It never sees a rejected token."""

    @property
    def name(self) -> str:
        """For reports."""

    def taken(self, tokens: Sequence[int]) -> None:
        """Learn that the model's last forward began with these tokens, and that they stay in its cache."""

    def draft(self, token: int, n: int) -> Draft:
        """Guess what follows.

        Args:
            token: the one after everything that was taken; the model has chosen it and not yet seen it.
            n: most tokens wanted, at least 1.
        """


class LookupDrafter:
    """Prompt lookup: what followed the latest occurrence of the last few tokens (A. Saxena, 2023). It needs no model.

    Args:
        longest: n-gram that is looked for first, in tokens.
        shortest: n-gram with which the search gives up.

    Raises:
        OptionError: not 1 <= shortest <= longest.
    """

    name = "lookup"

    def __init__(self, longest: int = 4, shortest: int = 2) -> None:
        if not 1 <= shortest <= longest:
            raise OptionError("n-gram sizes", where="longest, shortest", expected="1 <= shortest <= longest", got=(longest, shortest))
        self._sizes = range(longest, shortest - 1, -1)
        self._history: list[int] = []
        self._next: dict[tuple[int, ...], int] = {}  # where the latest occurrence of an n-gram goes on

    def taken(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self._history.append(int(token))
            for size in self._sizes:
                if len(self._history) >= size:
                    self._next[tuple(self._history[-size:])] = len(self._history)

    def draft(self, token: int, n: int) -> Draft:
        text = [*self._history, token]
        for size in self._sizes:
            start = self._next.get(tuple(text[-size:])) if len(text) >= size else None
            if start is not None:
                # A text that repeats itself goes on into its own continuation.
                for i in range(n):
                    text.append(text[start + i])
                return Draft(tuple(text[-n:]))
        return Draft()


class MTPModel(LanguageModel, Protocol):
    """A LanguageModel with an MTP block: an extra layer with its own cache, whose row t scores token t + 2."""

    @property
    def hidden(self) -> Float32:
        """float32 [n, D]: the last forward's hidden states, as the block takes them."""

    @property
    def mtp_hidden(self) -> Float32:
        """float32 [n, D]: the last `mtp_forward`'s own hidden states, which a deeper draft takes in the trunk's place."""

    @property
    def mtp_position(self) -> int:
        """Rows in the block's cache."""

    def mtp_forward(
        self, tokens_next: Sequence[int] | npt.NDArray[np.integer], trunk_hidden: Float32, *, logits: Literal["all", "last"] = "all"
    ) -> Float32:
        """Append rows to the block's cache; float32 [n, W], or [1, W] with `logits="last"`."""

    def mtp_rewind(self, n: int) -> None:
        """Drop the block's last n rows."""


def check_mtp(config: ModelConfig) -> None:
    """Refuse to draft with a block that there is not.

    Raises:
        ConfigError: the model has no MTP block.
    """
    if not config.n_mtp_layers:
        raise ConfigError("no MTP block to draft with", where="num_nextn_predict_layers", expected=1, got=0)


class MTPDrafter:
    """Drafts with the model's MTP block.

    The block's cache holds one row per position that the model has taken, each from the trunk's hidden state and the token that
    followed; rows of guesses, which hang on guessed tokens and on the block's own hidden states, are dropped as soon as the
    guess is made. A guess is drawn as the token at its position would be, so that equal distributions give equal tokens.

    Where more than 32 tokens pass without a guess, the block does not follow, so that a pause costs nothing; it then starts anew
    with the last 32, and so it does, with what comes, where it has not seen all of the model's cache.

    Args:
        lm: the model.
        sampling: how the tokens are chosen that are to be guessed.
        independent: draw guesses by a stream of their own and keep their distributions, as `acceptance="resample"` asks for.

    Raises:
        ConfigError: the model has no MTP block.
        OptionError: the backend does not run it.
    """

    name = "mtp"

    def __init__(self, lm: LanguageModel, sampling: SamplingOptions, *, independent: bool = False) -> None:
        check_mtp(lm.config)
        if not hasattr(lm, "mtp_forward"):
            raise OptionError("no MTP block to draft with", where="backend", expected="one that runs the block", got=lm.stats.backend)
        self._lm, self._sampling, self._independent = cast(MTPModel, lm), sampling, independent
        if self._lm.mtp_position != lm.position:
            self._lm.mtp_rewind(self._lm.mtp_position)
        self._began = False
        self._hidden: list[Float32] = []  # rows that wait, the last one for its next token
        self._next: list[int] = []  # tokens after those rows, as far as they are known

    def taken(self, tokens: Sequence[int]) -> None:
        self._next.extend(int(token) for token in (tokens if self._hidden else tokens[1:]))
        rows_TD = self._lm.hidden
        # Copied, so that a view does not keep the rejected rows alive.
        self._hidden.extend(rows_TD[: len(tokens)].copy() if len(tokens) < len(rows_TD) else rows_TD)
        if self._began and len(self._next) > _AFTER_PAUSE:
            self._lm.mtp_rewind(self._lm.mtp_position)
            del self._hidden[: -_AFTER_PAUSE - 1], self._next[:-_AFTER_PAUSE]
        while len(self._next) >= _MOST_WAITING:
            self._feed(self._next[:_MOST_WAITING])

    def draft(self, token: int, n: int) -> Draft:
        if not self._hidden:
            return Draft()
        self._began, followed = True, self._lm.mtp_position
        guesses: list[int] = []
        distributions: list[npt.NDArray[np.float64]] = []
        try:
            logits_W = self._feed([*self._next, int(token)])
            followed = self._lm.mtp_position
            for depth in range(n):
                if depth:
                    logits_W = self._lm.mtp_forward(guesses[-1:], self._lm.mtp_hidden[-1:])[-1]
                position = self._lm.position + 1 + depth
                if self._independent:
                    distributions.append(probabilities(logits_W, self._sampling))
                    guesses.append(sample(logits_W, position, self._sampling, stream=DRAFT_STREAM))
                else:
                    guesses.append(sample(logits_W, position, self._sampling))
        finally:
            # Ctrl-C may come in between.
            self._lm.mtp_rewind(self._lm.mtp_position - followed)
        return Draft(tuple(guesses), tuple(distributions) if self._independent else None)

    def _feed(self, tokens: list[int]) -> Float32:
        """Append the first waiting rows, one per token after it; the last one's logits, float32 [W]."""
        logits_W: Float32 = self._lm.mtp_forward(tokens, np.stack(self._hidden[: len(tokens)]), logits="last")[-1]
        del self._hidden[: len(tokens)], self._next[: len(tokens)]
        return logits_W
