"""What was measured, as rows: for programs, for tables and for plots."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from colibri_jax.plots import Panel
from colibri_jax.quality.costs import Int64, StepCosts
from colibri_jax.quality.run import Measured
from colibri_jax.quality.settings import Setting, describe
from colibri_jax.quality.statistics import Summary, TokenResults, summarise
from colibri_jax.quality.store import WindowResult
from colibri_jax.routing_spec import SCOPES, RoutingOptions

# Largest |KLD| of a token of the base against itself that still counts as none.
CONTROL_KLD = 1e-6


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Row:
    """One setting in one group of positions.

    Attributes:
        setting: what was asked for.
        group: which positions.
        run_as: name of the setting whose run this is, where it is another's.
        summary: statistics of the tokens.
        costs, base_costs: of these positions' steps, with the cut and without.
        bytes_L: bytes of one expert per MoE layer.
        acting_share: expert bytes against budget off over all steps in which the budget acts, which may be other steps than these.
    """

    setting: Setting
    group: str
    run_as: str | None
    summary: Summary
    costs: StepCosts
    base_costs: StepCosts
    bytes_L: Int64
    acting_share: float

    @property
    def share(self) -> float:
        """Expert bytes of these positions' steps against budget off."""
        return share(self.costs, self.base_costs, self.bytes_L)

    def to_json(self) -> dict[str, Any]:
        setting = self.setting
        return {
            "name": setting.name,
            "group": self.group,
            "run_as": self.run_as,
            "steps": dataclasses.asdict(setting.shape),
            "routing": dataclasses.asdict(setting.routing),
            "quality": self.summary.to_json(),
            "cost": {
                **self.costs.to_json(self.bytes_L),
                "expert_bytes_off": self.base_costs.expert_bytes(self.bytes_L),
                "expert_bytes_share": self.share,
                "expert_bytes_share_where_the_budget_acts": self.acting_share,
            },
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Control:
    """The base against itself."""

    steps: str
    tokens: int
    largest_kld: float

    @property
    def holds(self) -> bool:
        """Whether the model is the same as itself."""
        return self.tokens > 0 and self.largest_kld < CONTROL_KLD


@dataclasses.dataclass(frozen=True, eq=False)
class QualityReport:
    """All rows, all controls, and what they were measured under."""

    conditions: dict[str, Any]
    rows: tuple[Row, ...]
    controls: tuple[Control, ...]

    @property
    def passed(self) -> bool:
        """Whether every control holds; without it no row means anything."""
        return bool(self.controls) and all(control.holds for control in self.controls)

    def to_json(self) -> dict[str, Any]:
        return {
            "conditions": self.conditions,
            "controls": [{**dataclasses.asdict(control), "holds": control.holds} for control in self.controls],
            "rows": [row.to_json() for row in self.rows],
            "passed": self.passed,
        }


def share(costs: StepCosts, base: StepCosts, bytes_L: Int64) -> float:
    """Expert bytes against those of the base in the same steps; 1 where neither has any."""
    off = base.expert_bytes(bytes_L)
    return costs.expert_bytes(bytes_L) / off if off else 1.0


def make_report(measured: Sequence[Measured], bytes_L: Int64, conditions: dict[str, Any]) -> QualityReport:
    """Sum everything up."""
    rows = tuple(row for one in measured for row in _rows(one, bytes_L))
    return QualityReport(conditions, rows, tuple(_control(one) for one in measured))


def _rows(measured: Measured, bytes_L: Int64) -> Iterable[Row]:
    shape = measured.plan.shape
    first: dict[Any, str] = {}
    for setting in measured.plan.settings:
        windows = measured.cut[setting.run_as]
        name = first.setdefault(setting.run_as, setting.name)
        costs, base = _costs(windows, len(bytes_L)), _costs(measured.base, len(bytes_L))
        # A prompt that was cut is followed by steps that are not.
        acting = ["prompt"] if "prompt" in costs and shape.budget_scopes != frozenset(SCOPES) else list(costs)
        acted = [StepCosts.total([part[group] for group in acting], len(bytes_L)) for part in (costs, base)]
        for group, cost in costs.items():
            yield Row(
                setting=setting,
                group=group,
                run_as=None if name == setting.name else name,
                summary=summarise([window[group].tokens for window in windows]),
                costs=cost,
                base_costs=base[group],
                bytes_L=bytes_L,
                acting_share=share(acted[0], acted[1], bytes_L),
            )


def _costs(windows: Sequence[WindowResult], layers: int) -> dict[str, StepCosts]:
    return {group: StepCosts.total((window[group].costs for window in windows), layers) for group in windows[0]}


def _control(measured: Measured) -> Control:
    results = [both.tokens for window in measured.control for both in window.values()]
    tokens = TokenResults.joined(results) if results else TokenResults.none()
    largest = float(abs(tokens.kld).max()) if tokens.count else 0.0
    return Control(steps=measured.plan.shape.kind, tokens=tokens.count, largest_kld=largest)


def rule(routing: RoutingOptions) -> str:
    """What the settings of one line of a plot have in common: all but how much is kept."""
    if routing.policy == "cache_route":
        return f"{routing.policy} top={routing.route_top} {routing.denominator}"
    if routing.without_budget() != routing:
        everything = dataclasses.replace(routing, budget=1, coverage=1.0)
        return describe(everything).replace(" 1", "", 1)
    return "topp" if routing.expert_topp else "topk"


def panels(report: QualityReport) -> list[Panel]:
    """Quality against bytes: one panel per kind of steps and group, one line per rule, one point per budget."""
    found: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for row in report.rows:
        if row.summary.kld.value > 0.0:  # the axis is logarithmic, and what changes nothing has no place on it
            lines = found.setdefault(f"{row.setting.shape.kind}: {row.group}", {})
            lines.setdefault(rule(row.setting.routing), []).append((row.acting_share, row.summary.kld.value))
    return [
        Panel(
            "expert bytes, share of budget off",
            f"{where}: mean KLD, nats",
            [],
            {name: [kld for _, kld in sorted(points)] for name, points in lines.items()},
            own_x={name: [x for x, _ in sorted(points)] for name, points in lines.items()},
            log_y=True,
        )
        for where, lines in found.items()
    ]
