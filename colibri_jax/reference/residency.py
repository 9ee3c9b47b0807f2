"""Which parts of the reference are in memory: every part from the start, or the one that was used last."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, Literal, TypeVar

LayerResidency = Literal["all", "one"]

Part = TypeVar("Part")


class Residency:
    """Parts of a model (embedding, layers, head), loaded when they are first asked for.

    Args:
        mode: "all" keeps every part; "one" lets go of a part before it loads another.
    """

    def __init__(self, mode: LayerResidency) -> None:
        self._one = mode == "one"
        self._parts: dict[Hashable, Any] = {}

    def get(self, name: Hashable, load: Callable[[], Part]) -> Part:
        """A part by name. A caller that holds on to it beyond its use holds its memory too."""
        if name not in self._parts:
            if self._one:
                self._parts.clear()
            self._parts[name] = load()
        part: Part = self._parts[name]
        return part
