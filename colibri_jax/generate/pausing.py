"""Whether drafting pays: it pauses when it costs more per emitted token than decoding without, and probes again later.

Costs are numbers in one unit that only a difference of two readings gives: seconds, where no token hangs on the decision, or
counts of experts, where a run has to repeat.
"""

from __future__ import annotations

import collections
import dataclasses
import statistics

# What drafting may lose before it stops, in tokens' worth of plain decoding: a start, and a share of all tokens so far.
_GRACE_TOKENS = 4.0
_SHARE = 0.01
_BASELINE_STEPS = 4
# While drafting wins, this many tokens lie between two looks at what a plain step costs by now.
_REFRESH_TOKENS = 96
_REFRESH_STEPS = 2
_WINDOW_STEPS = 8
_SHORTEST_PAUSE, _LONGEST_PAUSE = 16, 1024
# One step may count at most as much as this many plain ones: a machine that was stopped says nothing about drafting.
_MOST_STEPS = 8.0


@dataclasses.dataclass(frozen=True)
class Pause:
    """A stretch without drafts: emitted tokens before it, tokens emitted in it, and why."""

    at_token: int
    tokens: int
    reason: str


class Pacer:
    """Decides step by step whether to draft.

    What drafting lost is kept as a debt: the cost of every drafting step above the emitted tokens' plain cost, gains
    deducted, never below 0. The debt may not exceed 4 tokens' plain cost and 1 % of all tokens' so far, so that a long run
    with drafts that never pay takes hardly longer than one without. It also pauses where the last 8 drafting steps together
    lost. Pauses double, from 16 tokens up to 1,024; eight steps that win end that.

    Args:
        unit: of the costs, for the reasons given.
        enabled: False never pauses and measures nothing.
    """

    def __init__(self, unit: str, *, enabled: bool = True) -> None:
        self._unit, self._enabled = unit, enabled
        self._plain: collections.deque[float] = collections.deque(maxlen=16)
        self._window: collections.deque[tuple[float, int]] = collections.deque(maxlen=_WINDOW_STEPS)
        self._debt = 0.0
        self._tokens = 0
        self._measuring = _BASELINE_STEPS if enabled else 0
        self._since_refresh = 0
        self._pause_length = _SHORTEST_PAUSE
        self._paused_at: int | None = None
        self._reason = ""
        self._pauses: list[Pause] = []

    @property
    def paused(self) -> bool:
        """Whether drafting is off because it lost."""
        return self._paused_at is not None

    @property
    def measuring(self) -> bool:
        """Whether the next step goes without drafts to learn what that costs."""
        return self._measuring > 0

    @property
    def pauses(self) -> tuple[Pause, ...]:
        """All pauses, the one at hand included."""
        if self._paused_at is None:
            return tuple(self._pauses)
        return (*self._pauses, Pause(self._paused_at, self._tokens - self._paused_at, self._reason))

    def wants_draft(self) -> bool:
        """Whether the next step should have drafts."""
        if self._measuring:
            return False
        if self._paused_at is None:
            return True
        # Half of what may be lost is left for a probe.
        if self._tokens - self._paused_at < self._pause_length or self._debt > self._allowance() / 2:
            return False
        self._pauses = list(self.pauses)
        self._paused_at = None
        self._pause_length = min(2 * self._pause_length, _LONGEST_PAUSE)
        return True

    def plain_step(self, cost: float) -> None:
        """Count a step without drafts, which emitted one token."""
        self._tokens += 1
        self._plain.append(cost)
        self._measuring = max(self._measuring - 1, 0)

    def drafted_step(self, cost: float, emitted: int) -> None:
        """Count a step with drafts, drafting included, which emitted `emitted` >= 1 tokens."""
        self._tokens += emitted
        if not self._enabled or not self._plain:
            return
        plain = self._plain_cost()
        cost = min(cost, _MOST_STEPS * plain)
        self._debt = max(self._debt + cost - emitted * plain, 0.0)
        self._window.append((cost, emitted))
        spent, tokens = sum(c for c, _ in self._window), sum(n for _, n in self._window)
        full = len(self._window) == _WINDOW_STEPS
        if self._debt > self._allowance() or (full and spent > tokens * plain):
            self._paused_at = self._tokens
            steps = len(self._window)
            self._reason = f"{spent / tokens:.4g} {self._unit} per token with drafts, {plain:.4g} without (last {steps} steps)"
            self._window.clear()
            self._since_refresh = 0
            return
        if full:
            self._pause_length = _SHORTEST_PAUSE
        self._since_refresh += emitted
        if self._since_refresh >= _REFRESH_TOKENS:
            self._since_refresh, self._measuring = 0, _REFRESH_STEPS

    def _plain_cost(self) -> float:
        return statistics.median(self._plain)

    def _allowance(self) -> float:
        return self._plain_cost() * (_GRACE_TOKENS + _SHARE * self._tokens)
