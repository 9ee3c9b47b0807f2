"""Properties that every generated model case must have: comparisons (i) to (iii), and what may change nothing.

A checker takes a `Subject` (a container and how it is loaded) and a `Run`, and returns what is wrong, in words; nothing when the
property holds. Tests hand it doctored subjects, which it has to notice.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from model_laws import MONOTONE, mass_faults, order_faults, selection_faults
from model_rows import check_rows_alone
from model_runs import Run, Step
from model_shapes import POSITIONS, Shape

from colibri_jax.compare.layers import PartByPart, compare_parts
from colibri_jax.compare.report import W4A32_RELATIVE_ERROR
from colibri_jax.compare.step import NativeStep, follow_layer
from colibri_jax.compare.whole import Follower, NearTie, WholeModel, differing_rows, relative_error
from colibri_jax.config import MLAConfig
from colibri_jax.container.reader import Container
from colibri_jax.engine.session import NativeModel
from colibri_jax.load import load
from colibri_jax.native import select_experts
from colibri_jax.reference.model import ReferenceModel
from colibri_jax.routing_spec import SCOPES, RouterSpec, RoutingOptions, Selection

Float32 = npt.NDArray[np.float32]
# Of one expert's bytes: the smallest aligned range around them is longer by less than two blocks.
BLOCK = 4096
# Last parts of the roles whose last dimension is the residual stream's.
READS_RESIDUAL = ("embed", "head", "final_norm", "attn_norm", "mlp_norm", "q_a", "kv_a", "q", "k", "v", "gate", "up", "wk", "weights_proj")
# Other orders of sums that the reference is held against where it matters, and how many times the largest distance among them an
# error beyond the bound of (iii) may be: a few orders do not hold the worst one.
TWINS = 8
AS_SENSITIVE = 2.0


class Subject:
    """One container under test, loaded by either backend.

    Tests override `native` to plant faults.
    """

    def __init__(self, path: Path, shape: Shape) -> None:
        self.path, self.shape = path, shape

    @functools.cached_property
    def _tensors(self) -> dict[str, Any]:
        container = Container.open(self.path)
        return {role: container.read(role) for role in container.entries}

    def native(self, run: Run, *, setup: dict[str, Any] | None = None, **options: Any) -> NativeModel:
        """The engine with a run's options, or with others instead."""
        given = {"routing": run.routing, "budget_scopes": run.scopes, "context_positions": POSITIONS, **(setup or run.setup), **options}
        model = load(self.path, **given)
        assert isinstance(model, NativeModel)
        return model

    def reference(self, run: Run) -> ReferenceModel:
        """The reference as shipped, with a run's options."""
        return ReferenceModel(
            self.shape.model,
            self._tensors,
            precision="w4a8",
            routing=run.routing,
            budget_scopes=run.scopes,
            context_positions=POSITIONS,
        )

    def router(self, moe_index: int) -> RouterSpec:
        """The router of a MoE layer (0 is the first), with its correction bias."""
        model = self.shape.model
        bias = self._tensors.get(f"layers.{model.moe_layers[moe_index]}.router.bias")
        return dataclasses.replace(model.moe.router, bias=bias)

    @functools.cached_property
    def float_reference(self) -> ReferenceModel:
        """The reference with float32 activations. Whoever follows the engine's choices needs no options of its own."""
        return ReferenceModel(self.shape.model, self._tensors, precision="w4a32", context_positions=POSITIONS)

    @functools.cached_property
    def float_twins(self) -> list[ReferenceModel]:
        """The same model, its residual stream, its heads' values and its experts' hidden values in other orders."""
        return [self._twin(seed) for seed in range(TWINS)]

    def _twin(self, seed: int) -> ReferenceModel:
        model, rng = self.shape.model, np.random.default_rng(seed)
        order_D, attention = rng.permutation(model.hidden_size), model.attention
        is_mla = isinstance(attention, MLAConfig)
        order_V = rng.permutation(attention.value_dim if is_mla else attention.head_dim)
        orders: dict[int, npt.NDArray[np.int64]] = {}

        def reordered(role: str, value: Any) -> Float32:
            values: Float32 = value if isinstance(value, np.ndarray) else value.dequantize()
            name = role.rsplit(".", 1)[-1]
            if name in ("gate", "up", "down"):
                width = values.shape[1] if name == "down" else values.shape[0]
                inner = orders.setdefault(width, rng.permutation(width))
                values = values[:, inner] if name == "down" else values[inner]
            if name in ("v", "v_bias"):
                values = values.reshape(-1, order_V.size, *values.shape[1:])[:, order_V].reshape(values.shape)
            if name == "kv_b":
                heads = values.reshape(attention.n_heads, -1, values.shape[1])
                values = np.concatenate([heads[:, : -order_V.size], heads[:, -order_V.size :][:, order_V]], axis=1).reshape(values.shape)
            if name == "o":
                values = values.reshape(values.shape[0], -1, order_V.size)[:, :, order_V].reshape(values.shape)
            if name in READS_RESIDUAL or role.endswith("router.weight"):
                return np.ascontiguousarray(values[..., order_D])
            return np.ascontiguousarray(values[order_D]) if name in ("o", "down") else values

        tensors = {role: reordered(role, value) for role, value in self._tensors.items()}
        return ReferenceModel(dataclasses.replace(model, n_mtp_layers=0), tensors, precision="full", context_positions=POSITIONS)


@dataclasses.dataclass
class Findings:
    """What the comparisons of one case met."""

    parts: PartByPart = dataclasses.field(default_factory=PartByPart)
    whole: WholeModel = dataclasses.field(default_factory=WholeModel)
    floats: WholeModel = dataclasses.field(default_factory=WholeModel)
    events: Counter[str] = dataclasses.field(default_factory=Counter)
    sensitive: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    """(iii) beyond its bound, but no further than the reference itself moves with its last bits; see `own_movement`."""

    @property
    def near_ties(self) -> list[NearTie]:
        """Rows in which float32 activations would choose other experts."""
        return self.floats.differing_rows


Checker = Callable[[Subject, Run, Findings], Iterator[str]]


def forward(model: NativeModel, step: Step) -> Float32:
    """The logits of a step, float32 [n, W]."""
    model.rewind(step.rewind)
    return model.forward(step.tokens, scope=step.scope)


def traced(model: NativeModel, steps: Sequence[Step]) -> Iterator[NativeStep]:
    """The steps of a run, one after the other, with what the engine kept of each."""
    model.set_trace(True)
    for step in steps:
        yield NativeStep(model, np.asarray(step.tokens), step.scope, forward(model, step))


def answers(model: NativeModel, steps: Sequence[Step]) -> list[bytes]:
    """The logits of every step, for comparison bit for bit."""
    return [forward(model, step).tobytes() for step in steps]


# ---- reference and native -------------------------------------------------------------------------------------------


def check_shipped(subject: Subject, run: Run, findings: Findings) -> Iterator[str]:
    """(i) selections, (ii) part by part on equal inputs, and the whole model as shipped, by its own choices: equal in every bit."""
    reference, parts, whole = subject.reference(run), findings.parts, findings.whole
    for step, given in zip(traced(subject.native(run), run.steps), run.steps, strict=True):
        compare_parts(step, reference, parts)
        reference.rewind(given.rewind)
        logits_TW = reference.forward(step.tokens, scope=step.scope)
        whole.positions += len(logits_TW)
        whole.equal_positions += int((logits_TW == step.logits_TW).all(axis=1).sum())
        whole.differing_rows += differing_rows(step, reference, reference.selections, reference.router_logits)
        _count_events(step, findings.events)
    yield from (f"(i) selection: {difference}" for difference in parts.selection_differences)
    yield from (f"(i) attended positions: {difference}" for difference in parts.attended_differences)
    yield from (f"(ii) {d.part}, position {d.position}: {d.ulps:.3g} ulp, {d.explanation or 'not explained'}" for d in parts.deviations)
    if parts.equal_rows != parts.rows:
        yield f"(ii) {parts.rows - parts.equal_rows} of {parts.rows} rows are not equal in every bit"
    if whole.equal_positions != whole.positions:
        yield f"whole model: {whole.positions - whole.equal_positions} of {whole.positions} positions' logits are not equal in every bit"
    yield from (f"whole model: other experts in layer {tie.layer}, position {tie.position}" for tie in whole.differing_rows)


def check_float_activations(subject: Subject, run: Run, findings: Findings) -> Iterator[str]:
    """(iii) float32 activations: logits within the bound (or as far off as the reference from itself, which is listed), selections equal
    except where router logits alone explain it."""
    floats, follower = findings.floats, Follower(subject.float_reference)
    for step in traced(subject.native(run, precision="w4a32"), run.steps):
        follower.step(step, floats)
    errors = {"logits": floats.worst_logit_error, "router logits": floats.worst_router_error}
    if max(errors.values()) > W4A32_RELATIVE_ERROR:
        moved = own_movement(subject, run)
        for what, error in errors.items():
            if error > max(W4A32_RELATIVE_ERROR, AS_SENSITIVE * moved[what]):
                yield f"(iii) relative error of {what}: {error:.3g}; other orders of sums move the reference's by {moved[what]:.3g}"
            elif error > W4A32_RELATIVE_ERROR:
                findings.sensitive.append({"what": what, "error": error, "own_movement": moved[what]})
    for tie in floats.differing_rows:
        if not tie.explained:
            yield f"(iii) other experts in layer {tie.layer}, position {tie.position}, not by the router logits alone"


def own_movement(subject: Subject, run: Run) -> dict[str, float]:
    """How far the reference's own logits, relative to a row's largest, are from those of its twins: the same model with the residual
    stream, the heads' values and the experts' hidden values in other orders, and so float32 sums in other orders.

    Random weights can cancel (a residual and what is added to it, a sum in front of a norm), and then no two orders of sums agree any
    better than this. Experts and attended positions stay the engine's.
    """
    moved = {"logits": 0.0, "router logits": 0.0}
    models = (subject.float_reference, *subject.float_twins)
    caches = [list(model.caches) for model in models]
    for step in traced(subject.native(run, precision="w4a32"), run.steps):
        ours, *twins = [_followed(step, model, cache) for model, cache in zip(models, caches, strict=True)]
        for theirs in twins:
            for (what, ours_TX), (_, theirs_TX) in zip(ours, theirs, strict=True):
                moved[what] = max(moved[what], relative_error(ours_TX, theirs_TX, least=1.0 if what == "router logits" else 0.0))
    return moved


def _followed(step: NativeStep, model: ReferenceModel, caches: list[Any]) -> list[tuple[str, Float32]]:
    """Router logits and logits of one step by a reference that takes the engine's choices; its caches are brought forward."""
    hidden_TD, chosen_TS, values = model.embed(step.tokens), None, []
    for layer in range(model.config.n_layers):
        done, chosen_TS = follow_layer(step, model, layer, hidden_TD, caches[layer], chosen_TS)
        hidden_TD, caches[layer] = done.hidden_TD, done.cache
        if done.router_logits_TE is not None:
            values.append(("router logits", done.router_logits_TE))
    return [*values, ("logits", model.score(model.normed(hidden_TD)))]


def _count_events(step: NativeStep, events: Counter[str]) -> None:
    for selection in step.selections:
        events["layer steps"] += 1
        events["budget acted"] += selection.dropped > 0
        events["emptied positions"] += selection.emptied_positions
    for logits_TE in step.trace["router_logits"]:
        ordered = np.sort(logits_TE, axis=1)
        events["rows with equal router logits"] += int((ordered[:, 1:] == ordered[:, :-1]).any(axis=1).sum())
    events["rows limited by DSA"] += sum(bool(positions) for layer in step.trace["attended"] for positions in layer)


# ---- what may change nothing ----------------------------------------------------------------------------------------


def check_split(subject: Subject, run: Run, findings: Findings) -> Iterator[str]:
    """The same tokens in one step and in many give the same bits, where no position depends on its neighbours' experts."""
    for routing in (run.routing.without_budget(), dataclasses.replace(run.routing, policy="per_position", coverage=1.0)):
        common: dict[str, Any] = {"routing": routing, "budget_scopes": SCOPES}
        together = subject.native(run, **common).forward(run.history, scope="prefill")
        model, start = subject.native(run, **common), 0
        for number, n in enumerate(run.cuts):
            scope = SCOPES[number % len(SCOPES)]
            part = model.forward(run.history[start : start + n], scope=scope)
            if part.tobytes() != together[start : start + n].tobytes():
                yield f"split {run.cuts}, {routing.policy} {routing.budget}: positions {start} to {start + n - 1} differ"
                return
            start += n


def check_replay(subject: Subject, run: Run, findings: Findings) -> Iterator[str]:
    """Dropping a step, feeding others that are dropped too, and doing the step again gives its bits and its selections."""
    model = subject.native(run)
    for number, step in enumerate(run.steps):
        first, selections = forward(model, step), model.selections
        model.rewind(len(step.tokens))
        if model.position + len(run.replay) <= POSITIONS:
            model.forward(run.replay, scope="verify")
            model.rewind(len(run.replay))
        again = model.forward(step.tokens, scope=step.scope)
        if again.tobytes() != first.tobytes():
            yield f"replay of step {number}: logits differ"
        for layer, (ours, theirs) in enumerate(zip(selections, model.selections, strict=True)):
            yield from (f"replay of step {number}, MoE layer {layer}: {field}" for field in ours.differences(theirs))


def check_rewound(subject: Subject, run: Run, findings: Findings) -> Iterator[str]:
    """After all rewinds the model is where it would be had it only seen the tokens that are left."""
    routing = run.routing.without_budget()
    rewound, plain = subject.native(run, routing=routing), subject.native(run, routing=routing)
    last = [forward(rewound, step) for step in run.steps][-1]
    if plain.forward(run.history, scope="prefill")[-len(last) :].tobytes() != last.tobytes():
        yield "after rewinds: the last step's logits are not those of the tokens that are left"


def check_setup(subject: Subject, run: Run, findings: Findings) -> Iterator[str]:
    """Cache size and policy, threads, instruction set and reader change no bit."""
    if answers(subject.native(run), run.steps) != answers(subject.native(run, setup=run.other_setup), run.steps):
        yield f"logits depend on the setup: {run.setup}, {run.other_setup}"


def check_wide_budget(subject: Subject, run: Run, findings: Findings) -> Iterator[str]:
    """A budget of the largest union that a layer has is no budget, under every policy but `coverage`."""
    if run.routing.policy == "coverage":
        return
    off = subject.native(run, routing=run.routing.without_budget())
    expected, sizes = [], [1] * len(off.config.moe_layers)
    for step in run.steps:
        expected.append(forward(off, step).tobytes())
        sizes = [max(size, s.union_size) for size, s in zip(sizes, off.selections, strict=True)]
    wide = subject.native(run, routing=dataclasses.replace(run.routing, budget=tuple(sizes)), budget_scopes=SCOPES)
    if answers(wide, run.steps) != expected:
        yield f"{run.routing.policy}: budget {sizes} of unions of that size changes logits"


# ---- selections and reads -------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class Routed:
    """What one MoE layer was asked and what it answered in one step."""

    where: str
    logits_TE: Float32
    router: RouterSpec
    options: RoutingOptions
    selection: Selection


def routed(subject: Subject, run: Run) -> Iterator[Routed]:
    """Every selection of a run, by the engine."""
    model = subject.native(run)
    for number, step in enumerate(traced(model, run.steps)):
        for index, logits_TE in enumerate(step.trace["router_logits"]):
            yield Routed(
                where=f"step {number}, MoE layer {index}",
                logits_TE=logits_TE,
                router=subject.router(index),
                options=step.options(index),
                selection=model.selections[index],
            )


def check_selections(subject: Subject, run: Run, findings: Findings) -> Iterator[str]:
    """Every selection of the run obeys the laws of routing and budget."""
    for r in routed(subject, run):
        yield from (f"{r.where}: {fault}" for fault in selection_faults(r.logits_TE, r.router, r.options, r.selection))


def check_order(subject: Subject, run: Run, findings: Findings) -> Iterator[str]:
    """The positions of a step in another order have their selections in that order."""
    for r in routed(subject, run):
        order = np.random.default_rng(len(r.logits_TE)).permutation(len(r.logits_TE))
        moved = select_experts(np.ascontiguousarray(r.logits_TE[order]), r.router, r.options)
        yield from (f"{r.where}: {fault}" for fault in order_faults(r.selection, moved, order))


def check_mass(subject: Subject, run: Run, findings: Findings) -> Iterator[str]:
    """The kept mass does not fall when the budget grows, under the policies whose kept sets are nested."""
    for r in routed(subject, run):
        for policy in MONOTONE:
            options = dataclasses.replace(r.options, policy=policy, coverage=1.0)
            budgets = sorted({1, 2, r.router.top_k, 2 * r.router.top_k, r.selection.union_size})
            selections = [select_experts(r.logits_TE, r.router, dataclasses.replace(options, budget=n)) for n in budgets]
            yield from (f"{r.where}, {policy}: {fault}" for fault in mass_faults(selections))


def check_reads(subject: Subject, run: Run, findings: Findings) -> Iterator[str]:
    """In a step each kept expert is looked up once and read at most once; with room for all, once ever. Bytes say the same."""
    model = subject.native(run)
    seen: set[tuple[int, int]] = set()
    roomy = model.stats.cache_experts_per_layer >= model.config.moe.n_experts
    # What is read ahead in vain: at most as many experts of a layer as a position chooses, and those of a step before.
    vain = (len(model.config.moe_layers) + 1) * model.config.moe.router.top_k if run.setup.get("pilot") else 0
    before = model.stats.total
    for number, step in enumerate(run.steps):
        forward(model, step)
        now = model.stats.total
        hits, misses = now.cache_hits - before.cache_hits, now.cache_misses - before.cache_misses
        useful, transferred = now.useful_bytes - before.useful_bytes, now.bytes_read - before.bytes_read
        before = now
        kept = {(layer, int(e)) for layer, s in enumerate(model.selections) for e in s.kept}
        if hits + misses != len(kept):
            yield f"step {number}: {hits} hits and {misses} misses of {len(kept)} experts"
        if useful != misses * model.stats.expert_bytes:
            yield f"step {number}: {useful} bytes for {misses} experts of {model.stats.expert_bytes}"
        if not useful <= transferred <= useful + misses * 2 * BLOCK + vain * (model.stats.expert_bytes + 2 * BLOCK):
            yield f"step {number}: {transferred} bytes read for {useful}"
        if roomy and misses != len(kept - seen):
            yield f"step {number}: {misses} reads of {len(kept - seen)} new experts, with room for all"
        seen |= kept


CHECKS: dict[str, Checker] = {
    "as shipped (i, ii, w4a8)": check_shipped,
    "float activations (iii)": check_float_activations,
    "split": check_split,
    "rows alone": check_rows_alone,
    "replay": check_replay,
    "rewound": check_rewound,
    "setup": check_setup,
    "wide budget": check_wide_budget,
    "selections": check_selections,
    "order of positions": check_order,
    "mass by budget": check_mass,
    "reads": check_reads,
}
NATIVE_CHECKS = tuple(name for name in CHECKS if "(" not in name)
