"""What benchmarks report: measurements with their spread, and tables of them."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from colibri_jax.errors import ColibriError

GB = 1e9

Progress = Callable[[str], None]
"""Told what is being measured."""


class BenchError(ColibriError):
    """What was to be measured computed something wrong, so that its time means nothing."""


@dataclasses.dataclass(frozen=True)
class Measured:
    """Repeated measurements of one quantity.

    Attributes:
        values: in the order in which they were taken.
        unit: "s", "GB/s", or "" for a ratio.
    """

    values: tuple[float, ...]
    unit: str = ""

    @property
    def median(self) -> float:
        """The middle value."""
        return statistics.median(self.values)

    def __str__(self) -> str:
        spread = f"{min(self.values):.3g} – {max(self.values):.3g}" if len(self.values) > 1 else "once"
        return f"{self.median:.3g}{' ' if self.unit else ''}{self.unit} ({spread})"


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of a table: what was measured, and figures by name."""

    what: str
    figures: dict[str, Measured | float | int | str]

    def cell(self, name: str) -> str:
        """A figure as people read it; empty where the row has none of that name."""
        value = self.figures.get(name, "")
        return f"{value:.3g}" if isinstance(value, float) else str(value)


@dataclasses.dataclass(frozen=True)
class Table:
    """Rows that share their figures' names.

    Attributes:
        title: what the table is of, with what it stands against.
        conditions: threads, cache state, sizes: what a reader needs to judge it.
    """

    title: str
    conditions: dict[str, Any]
    rows: tuple[Row, ...]

    @property
    def figure_names(self) -> tuple[str, ...]:
        """Names of all rows' figures, in the order in which they first come."""
        return tuple(dict.fromkeys(name for row in self.rows for name in row.figures))

    def to_json(self) -> dict[str, Any]:
        """Medians, and all values beside them."""
        return {
            "title": self.title,
            "conditions": self.conditions,
            "rows": [{"what": row.what, **{name: _plain(value) for name, value in row.figures.items()}} for row in self.rows],
        }


def _plain(value: Measured | float | int | str) -> Any:
    if not isinstance(value, Measured):
        return value
    return {"median": value.median, "unit": value.unit, "values": list(value.values)}


def budget_name(budget: int | tuple[int, ...]) -> str:
    """A budget, or one per MoE layer, as bench's command line takes it."""
    return ":".join(map(str, budget)) if isinstance(budget, tuple) else str(budget or "off")


def ratios(parts: Sequence[float], wholes: Sequence[float]) -> Measured:
    """Quotients of measurements that were taken in turn, pair by pair, so that a slow moment hits both."""
    return Measured(tuple(part / whole for part, whole in zip(parts, wholes, strict=True)))
