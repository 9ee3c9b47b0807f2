"""What a comparison found, for people and for machines."""

from __future__ import annotations

import dataclasses
from typing import Any

from colibri_jax.compare.layers import FEW_ULPS, PartByPart
from colibri_jax.compare.whole import NearTie, WholeModel

# (iii): float32 activations leave only rounding differences between the two: the bound on them, of a row's largest value.
W4A32_RELATIVE_ERROR = 2e-5
# (ii): share of rows that must agree within a few ulp.
ROW_SHARE = 0.999


@dataclasses.dataclass(frozen=True, kw_only=True)
class Greedy:
    """Greedy continuations of one prompt by both. At the first difference: the top-2 margin and the logit difference."""

    tokens: int
    first_difference: int | None
    margin: float = 0.0
    difference: float = 0.0

    @property
    def passed(self) -> bool:
        """Equal, or first different where the logits cannot tell the two tokens apart."""
        return self.first_difference is None or self.margin <= self.difference


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompareReport:
    """The four comparisons of one container under one set of routing options; the first two alone where `layers` names some."""

    model: str
    routing: str
    tokens: int
    steps: str
    parts: PartByPart
    float_activations: WholeModel | None
    shipped: WholeModel | None
    greedy: Greedy | None
    layers: tuple[int, ...] | None = None

    @property
    def verdicts(self) -> dict[str, bool]:
        """Which comparisons hold. (iv) claims nothing beyond its own counts, except for the greedy tokens."""
        parts, floats = self.parts, self.float_activations
        verdicts = {
            "selections": not parts.selection_differences and not parts.attended_differences,
            "layers": parts.rows_within >= ROW_SHARE * parts.rows and all(d.explanation for d in parts.deviations),
        }
        if floats is not None:
            errors = max(floats.worst_logit_error, floats.worst_router_error)
            verdicts["float activations"] = errors <= W4A32_RELATIVE_ERROR and all(tie.explained for tie in floats.differing_rows)
        if self.shipped is not None:
            verdicts["as shipped"] = self.greedy is None or self.greedy.passed
        return verdicts

    @property
    def passed(self) -> bool:
        """Whether all that were done hold."""
        return all(self.verdicts.values())

    def lines(self) -> list[str]:
        """The report as text."""
        parts = self.parts
        only = "" if self.layers is None else f", layers {', '.join(map(str, self.layers))} only"
        return [
            f"{self.model}: {self.tokens} teacher-forced tokens ({self.steps}), {self.routing}{only}",
            f"{_mark(self.verdicts['selections'])} (i) selections on equal router logits: {parts.selections} compared in every field, "
            f"{parts.selections_cut} of them cut by the budget, {len(parts.selection_differences)} differ" + _attended(parts),
            *_listed(parts.selection_differences + parts.attended_differences),
            f"{_mark(self.verdicts['layers'])} (ii) part by part on equal inputs: "
            f"{_share(parts.equal_rows, parts.rows)} of rows equal in every bit, "
            f"{_share(parts.rows_within, parts.rows)} within {FEW_ULPS:g} ulp (worst of these {parts.worst_ulps:.2g})",
            *_listed(f"{d.part}, position {d.position}: {d.ulps:.3g} ulp; {d.explanation or 'not explained'}" for d in parts.deviations),
            *([] if self.float_activations is None else self._float_lines(self.float_activations)),
            *([] if self.shipped is None else self._shipped_lines(self.shipped)),
        ]

    def _float_lines(self, floats: WholeModel) -> list[str]:
        return [
            f"{_mark(self.verdicts['float activations'])} (iii) whole model, float32 activations, on the same choices: "
            f"largest relative error of logits {floats.worst_logit_error:.2e}, of router logits {floats.worst_router_error:.2e} "
            f"(bound {W4A32_RELATIVE_ERROR:.0e}); {len(floats.differing_rows)} rows would choose other experts"
            + (f", {floats.differing_attended} attend to other positions" if floats.differing_attended else ""),
            *_listed(map(_tie, floats.differing_rows)),
        ]

    def _shipped_lines(self, shipped: WholeModel) -> list[str]:
        lines = [
            f"{_mark(self.verdicts['as shipped'])} (iv) whole model as shipped: logits of "
            f"{_share(shipped.equal_positions, shipped.positions)} of positions equal in every bit; "
            f"{len(shipped.differing_rows)} rows chose other experts; "
            f"KLD mean {shipped.kld_sum / max(shipped.positions, 1):.2e}, max {shipped.kld_max:.2e}",
            *_listed(map(_tie, shipped.differing_rows)),
        ]
        if shipped.first_argmax is not None:
            first = shipped.first_argmax
            lines.append(
                f"       first other greedy choice at position {first['position']}: top-2 margin {first['margin']:.3g}, "
                f"largest logit difference {first['difference']:.3g}"
            )
        if self.greedy is not None:
            lines.append(_greedy(self.greedy))
        return lines

    def to_json(self) -> dict[str, Any]:
        """All figures, and the verdicts."""
        return {**dataclasses.asdict(self), "verdicts": self.verdicts, "passed": self.passed}


def _mark(passed: bool) -> str:
    return "  ok  " if passed else "FAILED"


def _share(part: int, whole: int) -> str:
    # Rounded down: 100 % is said of all only.
    return f"{part}/{whole} ({int(10000 * part / whole) / 100 if whole else 100:g} %)"


def _attended(parts: PartByPart) -> str:
    if not parts.attended_rows:
        return ""
    return f"; attended positions: {parts.attended_rows} rows, {len(parts.attended_differences)} differ"


def _listed(items: Any, most: int = 10) -> list[str]:
    listed = [f"       {item}" for item in items]
    return listed if len(listed) <= most else [*listed[:most], f"       … and {len(listed) - most} more"]


def _tie(tie: NearTie) -> str:
    kind = "near-tie" if tie.explained else "not by the router logits alone"
    margin = "none" if tie.margin is None else f"{tie.margin:.2e}"
    return f"layer {tie.layer}, position {tie.position}: {kind}, margin {margin}, values differ by {tie.difference:.2e}"


def _greedy(greedy: Greedy) -> str:
    if greedy.first_difference is None:
        return f"       {greedy.tokens} greedy tokens: equal"
    return (
        f"       {greedy.tokens} greedy tokens: first difference at {greedy.first_difference}, top-2 margin {greedy.margin:.3g}, "
        f"largest logit difference {greedy.difference:.3g}"
    )
