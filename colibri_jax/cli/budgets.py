"""Budgets as one writes them on a command line."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import click

AUTO_BUDGET = "auto"
PROFILE_BUDGET = "profile:"


@dataclasses.dataclass(frozen=True)
class ProfileShare:
    """`profile:SHARE` or `profile:SHARE:FILE`: the list that a measured profile gives for a share of the expert bytes.

    Attributes:
        share: above 0, at most 1.
        file: where the profile is; None is beside the container.
    """

    share: float
    file: Path | None = None

    def __str__(self) -> str:
        return f"{PROFILE_BUDGET}{self.share:g}" + ("" if self.file is None else f":{self.file}")


def parse_budget(value: str | int) -> int:
    """A count of experts, or "off", which is 0."""
    text = str(value).strip().lower()
    if text == "off":
        return 0
    if not (text.isascii() and text.isdigit()):
        raise click.BadParameter(f"{value!r} is neither a count of experts nor 'off'")
    return int(text)


def parse_share(text: str) -> ProfileShare:
    """A share of the expert bytes that a profile is asked for, and its file."""
    share, _, file = text.strip().removeprefix(PROFILE_BUDGET).partition(":")
    try:
        found = float(share)
    except ValueError:
        found = 0.0
    if not 0.0 < found <= 1.0:
        raise click.BadParameter(f"{text!r} is not {PROFILE_BUDGET}SHARE with a share above 0, at most 1")
    return ProfileShare(found, Path(file) if file else None)


def parse_budgets(value: str | int | tuple[int, ...] | ProfileShare) -> int | tuple[int, ...] | str | ProfileShare:
    """A budget, or one for each MoE layer, separated by commas, or a profile's; "auto" stays what it is."""
    return AUTO_BUDGET if str(value).strip().lower() == AUTO_BUDGET else _parse(value, ",")


def parse_one_of_several(value: str | int | tuple[int, ...] | ProfileShare) -> int | tuple[int, ...] | ProfileShare:
    """A budget where several can be given: one, or one for each MoE layer, separated by colons, or a profile's."""
    return _parse(value, ":")


def _parse(value: str | int | tuple[int, ...] | ProfileShare, separator: str) -> int | tuple[int, ...] | ProfileShare:
    if isinstance(value, tuple | ProfileShare):
        return value
    text = str(value)
    if text.strip().startswith(PROFILE_BUDGET):
        return parse_share(text)
    parts = tuple(parse_budget(part) for part in text.split(separator))
    return parts[0] if len(parts) == 1 else parts
