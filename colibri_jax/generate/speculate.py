"""Decoding with drafts: a drafter guesses tokens, one verification step scores them all, and those that stand stay.

`speculation="exact"` routes every verified row as a decode step of one row, so that tokens and logits are those of decoding
without drafts, bit for bit. `speculation="union"` lets the rows share the budget of scope `verify` (MoE-Spec,
arXiv 2602.16052), which changes what is computed.
"""

from __future__ import annotations

import collections
import dataclasses
import time
from collections.abc import Callable, Generator, Sequence
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from colibri_jax.errors import OptionError
from colibri_jax.generate.acceptance import RULES, Acceptance
from colibri_jax.generate.drafters import Draft, Drafter
from colibri_jax.generate.loop import End, GenerateOptions, check_prompt, prefill
from colibri_jax.generate.pausing import Pacer
from colibri_jax.generate.protocol import LanguageModel
from colibri_jax.generate.sampling import sample
from colibri_jax.generate.speculation_stats import SpeculationStats
from colibri_jax.generate.work import work_meter
from colibri_jax.routing_spec import FULL_VOTE, check_rows_alone

Speculation = Literal["exact", "union"]
UnionVotes = Literal["uniform", "survival"]
MOST_DRAFTS = 8
DEFAULT_DEPTH = 3

Float32 = npt.NDArray[np.float32]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpeculationOptions:
    """How drafts are verified.

    Attributes:
        depth: most drafts per verification step, 1 to 8.
        speculation: "exact" or "union" (lossy).
        acceptance: "equal" keeps a draft that is the token that would have been chosen; "resample" is the classical rule, whose
            tokens are distributed alike and are others.
        union_votes: what the rows of a verification weigh in union mode: "uniform", or "survival", the rate at which drafts of
            that depth have stayed so far.
        pausing: stop drafting while it loses: by time in exact mode, by counts in union mode (`work_meter`).

    Raises:
        OptionError: a field is outside its domain.
    """

    depth: int = DEFAULT_DEPTH
    speculation: Speculation = "exact"
    acceptance: Acceptance = "equal"
    union_votes: UnionVotes = "uniform"
    pausing: bool = True

    def __post_init__(self) -> None:
        if not 1 <= self.depth <= MOST_DRAFTS:
            raise OptionError("depth of drafts out of range", where="depth", expected=f"1 to {MOST_DRAFTS}", got=self.depth)
        kinds = (("speculation", get_args(Speculation)), ("acceptance", get_args(Acceptance)), ("union_votes", get_args(UnionVotes)))
        for where, known in kinds:
            if getattr(self, where) not in known:
                raise OptionError(f"unknown {where}", where=where, expected=", ".join(known), got=getattr(self, where))


class Speculator:
    """Runs one model with one drafter; both go on where an earlier run ended.

    Args:
        lm: the model.
        drafter: has followed everything in the model's cache, as far as it needs to.
        options: depth, mode, acceptance, pausing.
        clock: reading of the costs that pausing compares, in exact mode; seconds.
        on_logits: called with each emitted token's position and the logits (float32 [W]) that it was chosen from.

    Raises:
        OptionError: exact mode with a policy that looks at the cache.
    """

    def __init__(
        self,
        lm: LanguageModel,
        drafter: Drafter,
        options: SpeculationOptions | None = None,
        *,
        clock: Callable[[], float] = time.perf_counter,
        on_logits: Callable[[int, Float32], None] | None = None,
    ) -> None:
        self._lm, self._drafter, self._options = lm, drafter, options or SpeculationOptions()
        exact = self._options.speculation == "exact"
        if exact:
            check_rows_alone(lm.routing)
        self._meter = clock if exact else work_meter(lm)
        self._pacer = Pacer("s" if exact else "experts' worth", enabled=self._options.pausing)
        self._on_logits = on_logits
        self._added: collections.Counter[str] = collections.Counter()  # to the stats: a plain step has no time for a new record
        none = (0,) * self._options.depth
        self._stats = SpeculationStats(
            drafter=drafter.name,
            speculation=self._options.speculation,
            acceptance=self._options.acceptance,
            union_votes=self._options.union_votes,
            depth=self._options.depth,
            drafted=none,
            accepted=none,
            rejected=none,
        )

    @property
    def stats(self) -> SpeculationStats:
        """A frozen snapshot."""
        added = {name: getattr(self._stats, name) + n for name, n in self._added.items()}
        return dataclasses.replace(self._stats, pauses=self._pacer.pauses, **added)

    def tokens(self, lm: LanguageModel, prompt_ids: Sequence[int], options: GenerateOptions) -> Generator[int, None, End]:
        """As `loop.tokens`, with drafts. Where the reader stops, the model's cache holds what the reader saw, without the last token.

        Raises:
            OptionError: another model than the drafter follows.
            TokenError, PromptTooLongError: before any step.
        """
        if lm is not self._lm:
            raise OptionError("a speculator belongs to one model", where="lm", expected="the model that it was made for", got="another one")
        check_prompt(prompt_ids, vocab_size=lm.config.vocab_size, free_positions=lm.context_positions - lm.position)
        logits_W = prefill(lm, prompt_ids, options.prefill_chunk, self._drafter.taken)
        chosen = [sample(logits_W, lm.position, options.sampling)]
        self._note(lm.position, logits_W[np.newaxis], 1)
        self._count(emitted_tokens=1)
        fed: list[int] = []  # by the last step, and in the cache; the drafter does not know of them yet
        n_emitted = 0
        while True:
            # All of `chosen` but the last is in the cache as well.
            for i, token in enumerate(chosen):
                if token in options.stop_ids:
                    self._drafter.taken(fed)
                    return End(reason="stop_token", token=token)
                n_emitted += 1
                try:
                    yield token
                except GeneratorExit:
                    lm.rewind(len(chosen) - 1 - i)
                    self._drafter.taken(fed[: 1 + i])
                    raise
            last = n_emitted >= options.max_new_tokens
            if last or lm.position + 1 >= lm.context_positions:
                self._drafter.taken(fed)
                return End(reason="max_new_tokens" if last else "context_end")
            most = min(self._options.depth, options.max_new_tokens - n_emitted - 1, lm.context_positions - 2 - lm.position)
            token = chosen[-1]
            chosen = self._step(fed, token, most, options)
            fed = [token, *chosen[:-1]]

    def _step(self, fed: list[int], token: int, most: int, options: GenerateOptions) -> list[int]:
        """Feed a token and up to `most` drafts; the tokens that follow, after which the cache holds all of them but the last."""
        bytes_before, begin = self._lm.stats.bytes_read, self._meter()
        self._drafter.taken(fed)
        wanted = most > 0 and self._pacer.wants_draft()
        draft = self._drafter.draft(token, most) if wanted else Draft()
        if draft.tokens:
            chosen = self._verify(token, draft, options)
            self._pacer.drafted_step(self._meter() - begin, len(chosen))
        else:
            measuring, paused = self._pacer.measuring, self._pacer.paused
            logits_TW = self._lm.forward([token], scope="decode", logits="last")
            chosen = [sample(logits_TW[-1], self._lm.position, options.sampling)]
            self._pacer.plain_step(self._meter() - begin)
            self._note(self._lm.position, logits_TW, 1)
            self._count(
                emitted_tokens=1,
                plain_steps=1,
                measuring_steps=int(measuring),
                paused_steps=int(paused),
                plain_experts=sum(s.kept.size for s in self._lm.selections),
            )
        self._count(bytes_read=self._lm.stats.bytes_read - bytes_before)
        return chosen

    def _verify(self, token: int, draft: Draft, options: GenerateOptions) -> list[int]:
        """One verification step; rejected rows have left the cache when it returns, and all have if it does not."""
        lm, start, n_drafts = self._lm, self._lm.position, len(draft.tokens)
        try:
            rows = [token, *draft.tokens]
            if self._options.speculation == "exact":
                logits_TW = lm.forward(rows, scope="verify", rows="alone")
            else:
                logits_TW = lm.forward(rows, scope="verify", rows="together", row_votes=self._row_votes(len(rows)))
            chosen = RULES[self._options.acceptance](logits_TW, draft, start + 1, options.sampling)
            # A stop token ends the answer, also where it was drafted.
            ends = [i for i, chosen_token in enumerate(chosen) if chosen_token in options.stop_ids]
            del chosen[ends[0] + 1 if ends else len(chosen) :]
            lm.rewind(lm.position - start - len(chosen))
        except BaseException:
            lm.rewind(lm.position - start)
            raise
        n_accepted = len(chosen) - (len(chosen) > n_drafts or chosen[-1] != draft.tokens[len(chosen) - 1])
        self._note(start + 1, logits_TW, len(chosen))
        self._stats = self._stats.with_verification(n_drafts, n_accepted, len(chosen), lm.selections)
        return chosen

    def _row_votes(self, n: int) -> list[int] | None:
        """Of a token and n - 1 drafts: the token's is a full vote, a draft's the rate at which its depth has stayed, before any step 1."""
        if self._options.union_votes == "uniform":
            return None
        stayed = zip(self._stats.accepted, self._stats.drafted, strict=True)
        return [FULL_VOTE, *(round(FULL_VOTE * (a + 1) / (d + 1)) for a, d in stayed)][:n]

    def _note(self, position: int, logits_TW: Float32, n: int) -> None:
        if self._on_logits is not None:
            for i in range(n):
                self._on_logits(position + i, logits_TW[i])

    def _count(self, **more: int) -> None:
        self._added.update(more)
