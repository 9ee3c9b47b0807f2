"""Measuring settings: window by window, first the model without a budget, then with each setting, then without one again."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from colibri_jax.errors import ColibriError
from colibri_jax.generate.protocol import LanguageModel
from colibri_jax.quality.costs import StepCosts
from colibri_jax.quality.settings import Setting
from colibri_jax.quality.statistics import Float32, TokenResults, compare_logits
from colibri_jax.quality.steps import StepShape, run_steps
from colibri_jax.quality.store import GroupResult, ResultStore, WindowResult
from colibri_jax.quality.windows import Windows
from colibri_jax.routing_spec import RoutingOptions, Scope
from colibri_jax.stats import Stats

BASE = RoutingOptions()
CONTROL_WINDOWS = 2
Progress = Callable[[str, int, int], None]
"""What is being run, and how many of how many runs of a window are done."""


class QualityError(ColibriError):
    """A measurement did not go as it was to go; its figures would mean something else."""


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """What to measure in steps of one shape.

    Attributes:
        shape: the steps.
        windows: int32 [windows, n + 1].
        settings: all of this shape.
    """

    shape: StepShape
    windows: Windows
    settings: Sequence[Setting]

    @property
    def runs(self) -> list[RoutingOptions]:
        """Options that have to be run; settings that are the same by construction share one."""
        return list(dict.fromkeys(setting.run_as for setting in self.settings))


@dataclasses.dataclass(frozen=True, eq=False)
class Measured:
    """What came of a plan, in the order of the windows.

    Attributes:
        base: the model without a budget: its costs.
        control: the same compared with itself, after all settings had had their turn; of the first windows alone.
        cut: by the options that were run.
    """

    plan: Plan
    base: list[WindowResult]
    control: list[WindowResult]
    cut: dict[RoutingOptions, list[WindowResult]]


def measure(
    model: LanguageModel,
    plans: Sequence[Plan],
    *,
    store: ResultStore | None = None,
    control_windows: int = CONTROL_WINDOWS,
    progress: Progress = lambda what, done, total: None,
) -> list[Measured]:
    """Run all plans on one model, whose routing options are those of the base afterwards.

    Args:
        store: has results that need not be measured again, and gets the others as they come. Settings whose result depends on the cache
            are always run.
        control_windows: windows of each shape in which the base is compared with itself.

    Raises:
        QualityError: the model's own account of its steps is not what the shape asks for.
    """
    store = store or ResultStore(None)
    total = sum(len(plan.windows) * (1 + len(plan.runs)) + min(control_windows, len(plan.windows)) for plan in plans)
    done = 0
    found = []
    for plan in plans:
        measured = Measured(plan, [], [], {routing: [] for routing in plan.runs})
        for index, tokens in enumerate(plan.windows):
            window = _Window(model, plan.shape, tokens, store)
            turns: list[tuple[str, RoutingOptions, list[WindowResult]]] = [
                (Setting(plan.shape, routing, routing).name, routing, results) for routing, results in measured.cut.items()
            ]
            if index < control_windows:
                turns.append((f"{plan.shape.kind} control", BASE, measured.control))
            for name, routing, results in turns:
                progress(name, done, total)
                results.append(window.cut(routing, kept_as=name))
                done += 1
            progress(f"{plan.shape.kind} base", done, total)
            measured.base.append(window.base())
            done += 1
        found.append(measured)
    model.reroute(BASE, ())
    progress("done", done, total)
    return found


class _Window:
    """One window's runs; the base's logits are computed when the first setting needs them, and live as long as this."""

    def __init__(self, model: LanguageModel, shape: StepShape, tokens: npt.NDArray[np.int32], store: ResultStore) -> None:
        self._model, self._shape, self._tokens, self._store = model, shape, tokens, store
        self._logits: dict[str, Float32] | None = None
        self._costs: dict[str, StepCosts] = {}

    def base(self) -> WindowResult:
        """The costs of the model without a budget."""
        key = self._key("base", BASE)
        kept = self._store.get(key, self._tokens)
        if kept is None:
            self._base_logits()
            kept = {group: GroupResult(TokenResults.none(), costs) for group, costs in self._costs.items()}
            self._store.put(key, self._tokens, kept)
        return kept

    def cut(self, routing: RoutingOptions, kept_as: str) -> WindowResult:
        """The model with these options against the base."""
        key = self._key(kept_as, routing)
        reproducible = Setting(self._shape, routing, routing).reproducible
        kept = self._store.get(key, self._tokens) if reproducible else None
        if kept is None:
            base = self._base_logits()
            logits, costs = self._run(routing)
            targets = self._targets()
            kept = {
                group: GroupResult(compare_logits(base[group], logits[group], targets[group]), costs[group]) for group in sorted(logits)
            }
            if reproducible:
                self._store.put(key, self._tokens, kept)
        return kept

    def _key(self, name: str, routing: RoutingOptions) -> list[Any]:
        return [name, dataclasses.asdict(self._shape), dataclasses.asdict(routing)]

    def _base_logits(self) -> dict[str, Float32]:
        if self._logits is None:
            self._logits, self._costs = self._run(BASE)
        return self._logits

    def _targets(self) -> dict[str, npt.NDArray[np.int32]]:
        """The token after each scored position, by group."""
        found: dict[str, list[npt.NDArray[np.int32]]] = {}
        for step in self._shape.steps(len(self._tokens) - 1):
            if step.scored:
                found.setdefault(step.group, []).append(self._tokens[step.start + 1 : step.stop + 1])
        return {group: np.concatenate(parts) for group, parts in found.items()}

    def _run(self, routing: RoutingOptions) -> tuple[dict[str, Float32], dict[str, StepCosts]]:
        """Logits and costs of all scored steps, by group."""
        model, tokens = self._model, self._tokens[:-1]
        model.reroute(routing, self._shape.budget_scopes)
        before = model.stats
        logits: dict[str, list[Float32]] = {}
        costs: dict[str, list[StepCosts]] = {}
        for result in run_steps(model, tokens, self._shape):
            if result.step.scored:
                logits.setdefault(result.step.group, []).append(result.logits_TW)
                costs.setdefault(result.step.group, []).append(StepCosts.of_step(result.selections))
        check_account(self._shape, len(tokens), before, model.stats)
        layers = len(model.config.moe_layers)
        return (
            {group: np.concatenate(parts) for group, parts in logits.items()},
            {group: StepCosts.total(parts, layers) for group, parts in costs.items()},
        )


def steps_by_scope(shape: StepShape, n: int) -> dict[Scope, tuple[int, int]]:
    """(steps, positions) that a window of n positions takes in each scope, said apart from how the steps are made."""
    prefix = n if shape.kind == "prefill" else min(shape.prefix, n)
    rest, rows = n - prefix, shape.rows if shape.kind == "verify" else 1
    later = (-(-rest // rows), rest)
    none = (0, 0)
    return {
        "prefill": (-(-prefix // shape.chunk), prefix),
        "decode": none if shape.kind == "verify" else later,
        "verify": later if shape.kind == "verify" else none,
    }


def check_account(shape: StepShape, n: int, before: Stats, after: Stats) -> None:
    """See that the model counted the steps that the shape asks for: one big step would be another question.

    Raises:
        QualityError: it did not.
    """
    for scope, expected in steps_by_scope(shape, n).items():
        old, new = before.scopes[scope], after.scopes[scope]
        got = (new.steps - old.steps, new.positions - old.positions)
        if got != expected:
            raise QualityError("other steps than were to be measured", where=f"{shape.kind}, scope {scope}", expected=expected, got=got)
