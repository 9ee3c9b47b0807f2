"""How a window of tokens becomes steps, and running them: a budget is only as good as in the steps that it is used in."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from colibri_jax.errors import OptionError
from colibri_jax.generate.protocol import LanguageModel
from colibri_jax.routing_spec import SCOPES, Scope, Selection, whole_number

StepKind = Literal["decode", "verify", "prefill", "prefill_then_decode", "all"]
STEP_KINDS: tuple[StepKind, ...] = get_args(StepKind)

Group = Literal["context", "decoded", "verified", "prompt", "following"]
"""What the positions of a step are to the comparison. "context" is not scored: no budget has touched it."""

CONTEXT: Group = "context"
DEFAULT_PREFIX, DEFAULT_ROWS, DEFAULT_CHUNK = 64, 4, 64


@dataclasses.dataclass(frozen=True)
class Step:
    """One forward call: positions `start` to `stop` of a window."""

    start: int
    stop: int
    scope: Scope
    group: Group

    @property
    def scored(self) -> bool:
        """Whether a comparison looks at its positions."""
        return self.group != CONTEXT


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepShape:
    """How a window is run, and where the budget acts in it.

    `kind` is one of

    - "decode": `prefix` positions in chunks of a prompt, without a budget and unscored; the rest one position a step, with it.
    - "verify": the same prefix; the rest in verification steps of `rows` positions that share a union. Every row is taken to be
      text that is accepted, so this is the best case of a draft.
    - "prefill": the whole window in chunks of a prompt, with the budget: what a chunk's own positions lose.
    - "prefill_then_decode": `prefix` positions in chunks with the budget ("prompt"), the rest one position a step without
      ("following"): what a user sees of a prompt whose keys and values were damaged.
    - "all": as before, but with the budget in both.

    Attributes:
        kind: see above.
        prefix: positions before the first step of another scope; ignored by "prefill".
        rows: positions of a verification step, D drafts and the token before them.
        chunk: largest prefill step.

    Raises:
        OptionError: an unknown kind, or a size that is no size.
    """

    kind: StepKind
    prefix: int = DEFAULT_PREFIX
    rows: int = DEFAULT_ROWS
    chunk: int = DEFAULT_CHUNK

    def __post_init__(self) -> None:
        if self.kind not in STEP_KINDS:
            raise OptionError("unknown kind of steps", where="kind", expected=", ".join(STEP_KINDS), got=self.kind)
        damaged = self.kind in ("prefill_then_decode", "all")
        for field, least in (("prefix", int(damaged)), ("rows", 1), ("chunk", 1)):
            value = whole_number(getattr(self, field), field)
            if value < least:
                raise OptionError("steps of no size", where=field, expected=f"{least} or more", got=value)

    @property
    def budget_scopes(self) -> frozenset[Scope]:
        """The scopes in which the budget acts."""
        if self.kind == "all":
            return frozenset(SCOPES)
        return frozenset[Scope](["prefill" if self.kind == "prefill_then_decode" else self.kind])

    @property
    def largest_step(self) -> int:
        """Most positions of a step in which the budget acts."""
        if self.kind == "decode":
            return 1
        return self.rows if self.kind == "verify" else self.chunk

    def steps(self, n: int) -> Iterator[Step]:
        """The steps of a window of n positions, ascending, without holes."""
        prefix = n if self.kind == "prefill" else min(self.prefix, n)
        untouched = self.kind in ("decode", "verify")
        for start in range(0, prefix, self.chunk):
            yield Step(start, min(start + self.chunk, prefix), "prefill", CONTEXT if untouched else "prompt")
        scope: Scope = "verify" if self.kind == "verify" else "decode"
        group: Group = {"decode": "decoded", "verify": "verified"}.get(self.kind, "following")  # type: ignore[assignment]
        size = self.rows if self.kind == "verify" else 1
        for start in range(prefix, n, size):
            yield Step(start, min(start + size, n), scope, group)


@dataclasses.dataclass(frozen=True, eq=False)
class StepResult:
    """A step that was run.

    Attributes:
        step: what it was.
        logits_TW: float32 [T, W] of every position; of a step of the context, which is not scored, of its last one alone (T = 1).
        selections: one per MoE layer.
    """

    step: Step
    logits_TW: npt.NDArray[np.float32]
    selections: tuple[Selection, ...]

    @property
    def start(self) -> int:
        """Position of the window that the first row of `logits_TW` belongs to; it scores the token after it."""
        return self.step.stop - len(self.logits_TW)


def run_steps(model: LanguageModel, tokens: Sequence[int] | npt.NDArray[np.integer], shape: StepShape) -> Iterator[StepResult]:
    """Run a window from an empty context, teacher-forced.

    Routing options and budget scopes are the model's: `reroute(options, shape.budget_scopes)` comes first.

    Args:
        tokens: n >= 1 ids, all of which are run.

    Raises:
        OptionError: the budget would act elsewhere than the shape says.
        ContextOverflowError: the window is longer than the model's context.
    """
    if model.budget_scopes != shape.budget_scopes:
        expected, got = sorted(shape.budget_scopes), sorted(model.budget_scopes)
        raise OptionError("the budget acts in other steps", where=f"budget_scopes, {shape.kind}", expected=expected, got=got)
    window = np.asarray(tokens)
    model.reset()
    for step in shape.steps(len(window)):
        logits_TW = model.forward(window[step.start : step.stop], scope=step.scope, logits="all" if step.scored else "last")
        yield StepResult(step, logits_TW, model.selections)
