"""Comparisons (iii) and (iv): two whole models on the same tokens."""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

from colibri_jax.engine.session import NativeModel
from colibri_jax.reference.model import ReferenceModel

Float32 = npt.NDArray[np.float32]


@dataclasses.dataclass(frozen=True, kw_only=True)
class NearTie:
    """A row in which the two chose different experts.

    `margin` is the smallest distance, in the reference's choice values, between an expert that only one side chose and one
    that only the other did; `difference` the largest distance between the two sides' values in that row. A near-tie is
    a margin that the difference can explain.
    """

    layer: int
    position: int
    margin: float
    difference: float

    @property
    def explained(self) -> bool:
        """Both values may have moved by `difference`."""
        return self.margin <= 2 * self.difference


@dataclasses.dataclass
class WholeModel:
    """Sums over steps. KLD is KL(reference ‖ native) per position, in nats."""

    positions: int = 0
    equal_positions: int = 0
    """Positions whose logits are equal in every bit."""
    worst_relative_error: float = 0.0
    """Largest |difference| over largest |logit| of a position, before the first differing selection."""
    differing_rows: list[NearTie] = dataclasses.field(default_factory=list)
    kld_sum: float = 0.0
    kld_max: float = 0.0
    first_argmax: dict[str, float] | None = None
    """First position with another greedy token: its position, the reference's top-2 margin, the largest logit difference."""


def compare_step(native: NativeModel, reference: ReferenceModel, native_TW: Float32, reference_TW: Float32, result: WholeModel) -> None:
    """Count one step that both models have just done on the same tokens, into `result`."""
    start = native.position - native_TW.shape[0]
    result.positions += native_TW.shape[0]
    result.equal_positions += int((native_TW == reference_TW).all(axis=1).sum())
    result.differing_rows += _differing_rows(native, reference, start)
    difference_T = np.abs(native_TW - reference_TW).max(axis=1)
    if not result.differing_rows:
        result.worst_relative_error = max(result.worst_relative_error, float((difference_T / np.abs(reference_TW).max(axis=1)).max()))
    kld_T = _kld(reference_TW, native_TW)
    result.kld_sum += float(kld_T.sum())
    result.kld_max = max(result.kld_max, float(kld_T.max()))
    other = np.flatnonzero(native_TW.argmax(axis=1) != reference_TW.argmax(axis=1))
    if other.size and result.first_argmax is None:
        row = int(other[0])
        result.first_argmax = {
            "position": start + row,
            "margin": top2_margin(reference_TW[row]),
            "difference": float(difference_T[row]),
        }


def top2_margin(logits_W: Float32) -> float:
    """Distance between the two largest logits."""
    second, first = np.partition(logits_W, -2)[-2:]
    return float(first - second)


def _differing_rows(native: NativeModel, reference: ReferenceModel, start: int) -> list[NearTie]:
    found = []
    for index, layer in enumerate(reference.config.moe_layers):
        ours, theirs = reference.selections[index], native.selections[index]
        rows = np.flatnonzero((ours.ids != theirs.ids).any(axis=1))
        if not rows.size:
            continue
        router = reference.router(layer)
        assert router is not None
        bias = 0.0 if router.bias is None else router.bias
        for row in rows:
            choice = _sigmoid_or_softmax(reference.router_logits[index][row], router.score) + bias
            native_choice = _sigmoid_or_softmax(native.trace["router_logits"][index][row], router.score) + bias
            only_ours, only_theirs = set(ours.ids[row]) - set(theirs.ids[row]) - {-1}, set(theirs.ids[row]) - set(ours.ids[row]) - {-1}
            # The same experts in another order, or one side without a counterpart: the closest pair of the row decides.
            pairs = [
                (a, b) for a in only_ours or set(ours.ids[row]) for b in only_theirs or set(ours.ids[row]) if a != b and min(a, b) >= 0
            ]
            margin = min((abs(float(choice[a] - choice[b])) for a, b in pairs), default=0.0)
            difference = float(np.abs(choice - native_choice).max())
            found.append(NearTie(layer=layer, position=start + int(row), margin=margin, difference=difference))
    return found


def _sigmoid_or_softmax(logits_E: Float32, score: str) -> npt.NDArray[np.float64]:
    z = logits_E.astype(np.float64)
    if score == "sigmoid":
        return np.asarray(1.0 / (1.0 + np.exp(-z)))
    e = np.exp(z - z.max())
    return np.asarray(e / e.sum())


def _kld(base_TW: Float32, other_TW: Float32) -> npt.NDArray[np.float64]:
    base, other = _log_softmax(base_TW), _log_softmax(other_TW)
    return np.asarray((np.exp(base) * (base - other)).sum(axis=1))


def _log_softmax(logits_TW: Float32) -> npt.NDArray[np.float64]:
    z = logits_TW.astype(np.float64)
    z = z - z.max(axis=1, keepdims=True)
    return np.asarray(z - np.log(np.exp(z).sum(axis=1, keepdims=True)))
