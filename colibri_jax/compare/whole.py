"""Comparisons (iii) and (iv): two whole models on the same tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from colibri_jax.compare.step import Float32, Mask, NativeStep, Walk, finish, follow_layer
from colibri_jax.logits import kl_divergence, log_softmax
from colibri_jax.reference.layer import LayerResult
from colibri_jax.reference.model import ReferenceModel
from colibri_jax.reference.routing import select_experts
from colibri_jax.routing_spec import RouterSpec, RoutingOptions, Selection

Float64 = npt.NDArray[np.float64]


@dataclasses.dataclass(frozen=True, kw_only=True)
class NearTie:
    """A row for which the two chose different experts.

    `explained`: given the native router logits, the reference chooses as native did, so that the logits' difference is all there
    is; how large that may be is a question of its own.
    `margin`: the smallest distance, in what decided, between an expert that only one side took and one that only the other did:
    choice values, or the budget's votes. None where no such pair exists (the end of TOPP's prefix).
    `difference`: the largest distance between the two sides' values.
    """

    layer: int
    position: int
    margin: float | None
    difference: float
    explained: bool


@dataclasses.dataclass
class WholeModel:
    """Sums over steps. KLD is KL(reference ‖ native) per position, in nats."""

    positions: int = 0
    equal_positions: int = 0
    """Positions whose logits are equal in every bit."""
    worst_logit_error: float = 0.0
    """Largest |difference| over largest |logit| of a position."""
    worst_router_error: float = 0.0
    """The same of router logits, a row's largest counting as 1 or more: a score moves no further than its logit, and those of few
    experts can all be close to 0. Only where the reference went the native way."""
    differing_rows: list[NearTie] = dataclasses.field(default_factory=list)
    differing_attended: int = 0
    """Rows of layers for which the two would attend to different positions; as `worst_router_error`."""
    kld_sum: float = 0.0
    kld_max: float = 0.0
    first_argmax: dict[str, float] | None = None
    """First position with another greedy token: its position, the reference's top-2 margin, the largest logit difference."""


class OwnChoices:
    """A reference that goes its own way on the native engine's tokens."""

    def __init__(self, reference: ReferenceModel) -> None:
        self._reference = reference
        self._caches = list(reference.caches)

    def step(self, step: NativeStep, result: WholeModel) -> None:
        """Do the step that the native engine has done, and count it into `result`. Steps follow each other from position 0."""
        finish(self.walk(step, result))

    def walk(self, step: NativeStep, result: WholeModel) -> Walk:
        """The same as a walk. Steps follow each other within a layer."""
        reference = self._reference
        hidden_TD, chosen_TS = reference.embed(step.tokens), None
        for layer in range(reference.config.n_layers):
            yield
            done, chosen_TS = self._layer(step, layer, hidden_TD, chosen_TS, result)
            hidden_TD, self._caches[layer] = done.hidden_TD, done.cache
            router = reference.router(layer)
            if router is not None and done.router_logits_TE is not None:
                selection = self._selection(step, layer, router, done)
                result.differing_rows += _differing_rows(step, layer, router, selection, done.router_logits_TE)
        yield
        _count_logits(step, reference.score(reference.normed(hidden_TD)), result)
        yield

    def _layer(
        self, step: NativeStep, layer: int, hidden_TD: Float32, chosen_TS: Mask | None, result: WholeModel
    ) -> tuple[LayerResult, Mask | None]:
        """A layer, and the positions that the reference itself would attend to in it; None without DSA."""
        indexer = self._reference.config.indexer
        attended_TS = chosen_TS if indexer is not None and indexer.kinds[layer] == "shared" else None
        done = self._reference.layer_step(layer, hidden_TD, self._caches[layer], step.start, scope=step.scope, attended_TS=attended_TS)
        return done, done.attended_TS

    def _selection(self, step: NativeStep, layer: int, router: RouterSpec, done: LayerResult) -> Selection:
        """What the reference itself would choose."""
        assert done.selection is not None
        return done.selection


class Follower(OwnChoices):
    """A reference that takes the native engine's experts and attended positions, and says where it would take others.

    So one near-tie does not hide everything that comes after it.
    """

    def _layer(
        self, step: NativeStep, layer: int, hidden_TD: Float32, chosen_TS: Mask | None, result: WholeModel
    ) -> tuple[LayerResult, Mask | None]:
        done, chosen_TS = follow_layer(step, self._reference, layer, hidden_TD, self._caches[layer], chosen_TS)
        if chosen_TS is not None:
            result.differing_attended += int((chosen_TS != step.attended(layer)).any(axis=1).sum())
        if done.router_logits_TE is not None:
            error = relative_error(done.router_logits_TE, step.trace["router_logits"][step.moe_index(layer)], least=1.0)
            result.worst_router_error = max(result.worst_router_error, error)
        return done, chosen_TS

    def _selection(self, step: NativeStep, layer: int, router: RouterSpec, done: LayerResult) -> Selection:
        assert done.router_logits_TE is not None
        return select_experts(done.router_logits_TE, router, step.options(step.moe_index(layer)))


def top2_margin(logits_W: Float32) -> float:
    """Distance between the two largest logits."""
    second, first = np.partition(logits_W, -2)[-2:]
    return float(first - second)


def differing_rows(
    step: NativeStep, reference: ReferenceModel, selections: Sequence[Selection], logits: Sequence[Float32]
) -> list[NearTie]:
    """Rows of a step whose experts differ.

    Args:
        selections, logits: the reference's own, per MoE layer.
    """
    found = []
    for index, layer in enumerate(reference.config.moe_layers):
        router = reference.router(layer)
        assert router is not None
        found += _differing_rows(step, layer, router, selections[index], logits[index])
    return found


def _differing_rows(step: NativeStep, layer: int, router: RouterSpec, ours: Selection, logits_TE: Float32) -> list[NearTie]:
    index, found = step.moe_index(layer), []
    theirs = step.selections[index]
    rows = np.flatnonzero((ours.ids != theirs.ids).any(axis=1))
    if rows.size:
        both_TE, options = (logits_TE, step.trace["router_logits"][index]), step.options(index)
        defined = select_experts(both_TE[1], router, options)
        for row in rows:
            margin, difference = _margin(ours, theirs, int(row), both_TE, router, options)
            explained = np.array_equal(defined.ids[row], theirs.ids[row])
            found.append(NearTie(layer=layer, position=step.start + int(row), margin=margin, difference=difference, explained=explained))
    return found


def _margin(
    ours: Selection, theirs: Selection, row: int, logits: tuple[Float32, Float32], router: RouterSpec, options: RoutingOptions
) -> tuple[float | None, float]:
    if (ours.dropped or theirs.dropped) and not np.array_equal(ours.kept, theirs.kept):
        values_E, other_E = (_votes(logits_TE, router, options) for logits_TE in logits)
        only_ours, only_theirs = set(ours.kept) - set(theirs.kept), set(theirs.kept) - set(ours.kept)
        pairs = [(a, b) for a in only_ours for b in only_theirs]
    else:
        bias_E = 0.0 if router.bias is None else router.bias
        values_E, other_E = (_scores(logits_TE[row], router) + bias_E for logits_TE in logits)
        mine, his = ([int(e) for e in selection.ids[row] if e >= 0] for selection in (ours, theirs))
        pairs = [(a, b) for a in mine if a not in his for b in his if b not in mine]
        if set(mine) == set(his):
            pairs = [(a, b) for i, a in enumerate(mine) for b in mine[i + 1 :] if his.index(a) > his.index(b)]
    difference = float(np.abs(values_E - other_E).max())
    return min((abs(float(values_E[a] - values_E[b])) for a, b in pairs), default=None), difference


def _votes(logits_TE: Float32, router: RouterSpec, options: RoutingOptions) -> Float64:
    if options.vote == "all_scores":
        return np.asarray(_scores(logits_TE, router).sum(axis=0))
    before, votes_E = select_experts(logits_TE, router, options.without_budget()), np.zeros(logits_TE.shape[1])
    np.add.at(votes_E, before.ids[before.ids >= 0], before.weights[before.ids >= 0])
    return votes_E


def _scores(logits: Float32, router: RouterSpec) -> Float64:
    z = logits.astype(np.float64)
    if router.score == "sigmoid":
        return np.asarray(1.0 / (1.0 + np.exp(-z)))
    return np.exp(log_softmax(z))


def relative_error(ours_TX: Float32, theirs_TX: Float32, least: float = 0.0) -> float:
    """The largest |difference| of any row, relative to the row's largest value, which counts as `least` or more."""
    difference_T, largest_T = np.abs(ours_TX - theirs_TX).max(axis=1), np.maximum(np.abs(ours_TX).max(axis=1), np.float32(least))
    # A row of zeros is at no distance from zeros, and infinitely far from anything else.
    with np.errstate(divide="ignore"):
        error_T = np.divide(difference_T, largest_T, out=np.zeros_like(difference_T), where=difference_T != 0.0)
    return float(error_T.max())


def _count_logits(step: NativeStep, reference_TW: Float32, result: WholeModel) -> None:
    native_TW = step.logits_TW
    result.positions += native_TW.shape[0]
    result.equal_positions += int((native_TW == reference_TW).all(axis=1).sum())
    result.worst_logit_error = max(result.worst_logit_error, relative_error(reference_TW, native_TW))
    kld_T = kl_divergence(log_softmax(reference_TW), log_softmax(native_TW))
    result.kld_sum += float(kld_T.sum())
    result.kld_max = max(result.kld_max, float(kld_T.max()))
    other = np.flatnonzero(native_TW.argmax(axis=1) != reference_TW.argmax(axis=1))
    if other.size and result.first_argmax is None:
        row = int(other[0])
        difference = float(np.abs(native_TW[row] - reference_TW[row]).max())
        result.first_argmax = {"position": step.start + row, "margin": top2_margin(reference_TW[row]), "difference": difference}
