"""`recommended.json` beside a container: the settings recommended for that model, and what they were measured to cost it."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args

from colibri_jax.container.reader import Container
from colibri_jax.errors import ColibriError
from colibri_jax.files import write_whole
from colibri_jax.quality.store import model_fingerprint
from colibri_jax.routing_spec import IRREPRODUCIBLE_POLICIES, RoutingOptions

RECOMMENDED_FILE = "recommended.json"
VERSION = 1

Steps = Literal["decode", "verify"]


class RecommendedFileError(ColibriError):
    """A file of recommended settings is not what this package writes."""


class OtherModelError(RecommendedFileError):
    """A file of recommended settings was measured on another model, or by another version of this package."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stated:
    """A figure, and how far a repeated measurement may be above it: from repeated halves of the text."""

    value: float
    margin: float

    def __post_init__(self) -> None:
        for name, figure in (("value", self.value), ("margin", self.margin)):
            if isinstance(figure, bool) or not isinstance(figure, int | float) or not math.isfinite(figure):
                raise RecommendedFileError("not a finite number", where=name, expected="a number", got=repr(figure))
        if self.margin < 0:
            raise RecommendedFileError("negative margin", where="margin", expected="0 or more", got=self.margin)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Costs:
    """What a setting costs against budget off; of all four, less is better.

    Attributes:
        expert_bytes_share: expert bytes, as a share of those without a budget.
        kld: mean, in nats.
        ppl_ratio: perplexity against that without a budget.
        task_points_lost: correct answers of the task without a budget minus those with it, in points of a hundred.
    """

    expert_bytes_share: Stated
    kld: Stated
    ppl_ratio: Stated
    task_points_lost: Stated

    def exceeded(self, measured: Mapping[str, float]) -> list[str]:
        """A line for every figure that is above what is stated and its margin, or that was not measured.

        Args:
            measured: by the names of the attributes; all four.
        """
        lines = []
        for field in dataclasses.fields(self):
            stated: Stated = getattr(self, field.name)
            figure = measured.get(field.name, math.nan)
            if not figure <= stated.value + stated.margin:
                lines.append(f"{field.name}: {figure:.5g} exceeds {stated.value:.5g} + {stated.margin:.2g}")
        return lines


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecommendedSetting:
    """One setting.

    Attributes:
        name: short; no two of a file are alike.
        steps: the steps it is for, and in which alone its budget acts.
        rows: positions of such a step; 1 for "decode".
        routing: all of its options.
        costs: stated ones.
        tokens: scored for them.
        text: what they were scored on.

    Raises:
        RecommendedFileError: fields do not fit each other, or the policy is one that nobody can repeat.
    """

    name: str
    steps: Steps
    rows: int
    routing: RoutingOptions
    costs: Costs
    tokens: int
    text: str

    def __post_init__(self) -> None:
        for field in ("name", "text"):
            if not isinstance(getattr(self, field), str) or not getattr(self, field):
                raise RecommendedFileError("not a text", where=field, expected="a text", got=repr(getattr(self, field)))
        for field in ("rows", "tokens"):
            if type(getattr(self, field)) is not int or getattr(self, field) < 1:
                raise RecommendedFileError("not a count", where=field, expected="1 or more", got=repr(getattr(self, field)))
        if self.steps not in get_args(Steps):
            raise RecommendedFileError("unknown steps", where="steps", expected=", ".join(get_args(Steps)), got=repr(self.steps))
        if (self.steps == "decode") != (self.rows == 1):
            expected = "1 for decode, more for verify"
            raise RecommendedFileError("steps of another size", where="rows", expected=expected, got=f"{self.rows} for {self.steps}")
        if self.routing.policy in IRREPRODUCIBLE_POLICIES:
            what = "a setting whose text depends on the cache is never recommended"
            raise RecommendedFileError(what, where="routing: policy", got=self.routing.policy)


@dataclasses.dataclass(frozen=True)
class Recommended:
    """A file's contents.

    Attributes:
        model: `fingerprint_of` the container.
        settings: best first, of each kind of steps.
    """

    model: str
    settings: tuple[RecommendedSetting, ...]

    def __post_init__(self) -> None:
        names = [setting.name for setting in self.settings]
        if len(set(names)) < len(names):
            raise RecommendedFileError("two settings of one name", where="settings", expected="names that differ", got=", ".join(names))

    def best(self, steps: Steps) -> RecommendedSetting | None:
        """The first setting for such steps."""
        return next((setting for setting in self.settings if setting.steps == steps), None)

    def write(self, directory: Path) -> None:
        """Put it beside a container: a whole file, or none."""
        write_whole(directory / RECOMMENDED_FILE, json.dumps({"version": VERSION, **dataclasses.asdict(self)}, indent=1) + "\n")


def fingerprint_of(container: Container) -> str:
    """The model that settings are recommended for: a container as the native engine runs it by default."""
    return model_fingerprint(container, "native", "w4a8")


def read_recommended(directory: Path, fingerprint: str) -> Recommended | None:
    """The settings recommended for a model; None where the directory has no such file.

    Args:
        directory: the container's.
        fingerprint: `fingerprint_of` the container.

    Raises:
        OtherModelError: the file was measured on another model.
        RecommendedFileError: it is not what this package writes.
    """
    file = directory / RECOMMENDED_FILE
    if not file.is_file():
        return None
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
        found = _recommended(raw)
    except (OSError, ValueError, RecursionError) as error:
        raise RecommendedFileError("cannot be read", where=str(file), expected="JSON", got=error) from error
    except ColibriError as error:
        raise RecommendedFileError("not a file of recommended settings", where=str(file), got=error) from error
    if found.model != fingerprint:
        raise OtherModelError("settings recommended for another model", where=str(file), expected=fingerprint, got=found.model)
    return found


def _recommended(raw: Any) -> Recommended:
    fields = _fields(raw, "file", {"version", "model", "settings"})
    if fields["version"] != VERSION:
        raise RecommendedFileError("unknown version", where="version", expected=VERSION, got=fields["version"])
    if not isinstance(fields["model"], str) or not isinstance(fields["settings"], list):
        raise RecommendedFileError("wrong type", where="model, settings", expected="a text, a list", got="something else")
    return Recommended(fields["model"], tuple(_setting(one) for one in fields["settings"]))


def _setting(raw: Any) -> RecommendedSetting:
    fields = _fields(raw, "setting", _names(RecommendedSetting))
    costs = {
        name: Stated(**_fields(stated, name, _names(Stated))) for name, stated in _fields(fields["costs"], "costs", _names(Costs)).items()
    }
    # An option that came later has its default in older files, which changes nothing.
    routing = _fields(fields["routing"], "routing", _names(RoutingOptions), all_of_them=False)
    try:
        options = RoutingOptions(**routing)
    except TypeError as error:
        raise RecommendedFileError("wrong type", where="routing", got=error) from error
    return RecommendedSetting(**{**fields, "routing": options, "costs": Costs(**costs)})


def _names(kind: Any) -> set[str]:
    return {field.name for field in dataclasses.fields(kind)}


def _fields(raw: Any, where: str, names: set[str], *, all_of_them: bool = True) -> dict[str, Any]:
    if not isinstance(raw, dict):
        raise RecommendedFileError("not an object", where=where, expected=", ".join(sorted(names)), got=type(raw).__name__)
    wrong = set(raw) - names | (names - set(raw) if all_of_them else set())
    if wrong:
        raise RecommendedFileError("fields missing or unknown", where=where, expected=sorted(names), got=sorted(raw))
    return raw
