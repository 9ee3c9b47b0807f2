"""Where the decisions of a generated case come from: hypothesis draws them in tests, a NumPy generator in volume."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

import numpy as np

T = TypeVar("T")


class Chooser(Protocol):
    """Where a case's decisions come from."""

    def integer(self, low: int, high: int) -> int:
        """An integer in [low, high]."""

    def pick(self, options: Sequence[T]) -> T:
        """One of the options."""


class Random:
    """Decisions by a NumPy generator."""

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng

    def integer(self, low: int, high: int) -> int:
        return int(self._rng.integers(low, high + 1))

    def pick(self, options: Sequence[T]) -> T:
        return options[self.integer(0, len(options) - 1)]
