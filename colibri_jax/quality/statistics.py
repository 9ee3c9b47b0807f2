"""What a cut did to every token, and the figures that sum it up: KLD, Δp, same top token, perplexities. All in float64, in nats."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from colibri_jax.errors import NonFiniteLogitError, ShapeError
from colibri_jax.logits import log_softmax

Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]

# Values of a block of rows in float64 stay within a processor's cache, and a large vocabulary within memory.
BLOCK_VALUES = 2**18
# Percentiles of KLD, by the names that they are reported under.
PERCENTILES = {"max": 100.0, "99.9": 99.9, "99": 99.0, "95": 95.0, "90": 90.0, "median": 50.0, "10": 10.0, "5": 5.0, "1": 1.0, "min": 0.0}
HALVINGS = 100


@dataclasses.dataclass(frozen=True, eq=False)
class TokenResults:
    """One value per scored token; `base` is the model without the cut, `cut` the one with it.

    Attributes:
        kld: float64 [n], KL(base ‖ cut) over the vocabulary, nats.
        delta_p: float64 [n], probability of the true next token, cut less base.
        same_top: bool [n], whether the most probable token is the same (ties to the lowest id).
        nll_base, nll_cut: float64 [n], −ln p of the true next token.
    """

    kld: Float64
    delta_p: Float64
    same_top: npt.NDArray[np.bool_]
    nll_base: Float64
    nll_cut: Float64

    @property
    def count(self) -> int:
        """n."""
        return self.kld.size

    @classmethod
    def none(cls) -> TokenResults:
        """Of no token."""
        nothing = np.zeros(0)
        return cls(nothing, nothing, np.zeros(0, np.bool_), nothing, nothing)

    @classmethod
    def joined(cls, parts: Sequence[TokenResults]) -> TokenResults:
        """All tokens in order."""
        return cls(*(np.concatenate([getattr(part, field.name) for part in parts]) for field in dataclasses.fields(cls)))


def compare_logits(base_TW: Float32, cut_TW: Float32, targets_T: npt.NDArray[np.integer]) -> TokenResults:
    """Compare two models' logits of the same positions.

    Args:
        base_TW, cut_TW: float32 [T, W].
        targets_T: [T], the token after each position.

    Raises:
        ShapeError: they do not belong together.
        NonFiniteLogitError: a logit is NaN or infinite.
    """
    if base_TW.shape != cut_TW.shape or targets_T.shape != base_TW.shape[:1]:
        got = [list(array.shape) for array in (base_TW, cut_TW, targets_T)]
        raise ShapeError("logits to compare", where="base, cut, targets", expected="[T, W], [T, W], [T]", got=got)
    rows = max(1, BLOCK_VALUES // max(1, base_TW.shape[1]))
    blocks = [slice(start, start + rows) for start in range(0, len(base_TW), rows)]
    parts = [_compare_block(base_TW[block], cut_TW[block], targets_T[block]) for block in blocks]
    return TokenResults.joined(parts) if parts else TokenResults.none()


def _compare_block(base_TW: Float32, cut_TW: Float32, targets_T: npt.NDArray[np.integer]) -> TokenResults:
    base, cut = log_softmax(base_TW), log_softmax(cut_TW)
    rows = np.arange(len(targets_T))
    nll_base, nll_cut = -base[rows, targets_T], -cut[rows, targets_T]
    np.subtract(base, cut, out=cut)  # log of the quotient, in the place of what is no longer needed
    np.exp(base, out=base)
    kld = np.einsum("tw,tw->t", base, cut)
    if not np.isfinite(kld).all():
        row = int(np.argmin(np.isfinite(kld)))
        raise NonFiniteLogitError("logits to compare", where=f"row {row}", expected="finite", got=float(kld[row]))
    same = np.argmax(base_TW, axis=1) == np.argmax(cut_TW, axis=1)
    return TokenResults(kld, np.exp(-nll_cut) - np.exp(-nll_base), same, nll_base, nll_cut)


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A figure and its standard error; 0 where there is but one sample."""

    value: float
    error: float

    def apart(self, other: Estimate) -> float:
        """Distance to another, independent one, in standard errors of the difference; 0 where they are equal."""
        if self.value == other.value:
            return 0.0
        error = math.hypot(self.error, other.error)
        return abs(self.value - other.value) / error if error else math.inf

    def to_json(self) -> dict[str, float]:
        return dataclasses.asdict(self)


def mean(values: npt.NDArray[Any]) -> Estimate:
    """The mean of n >= 1 values and the standard error that it would have if they were independent."""
    n = values.size
    values = values.astype(np.float64)
    return Estimate(float(values.mean()), float(values.std(ddof=1)) / math.sqrt(n) if n > 1 else 0.0)


def root_mean_square(values: Float64) -> Estimate:
    """The root of the mean square; its error follows from the squares' by the derivative of the root."""
    squares = mean(values**2)
    root = math.sqrt(squares.value)
    return Estimate(root, squares.error / (2.0 * root) if root else 0.0)


def exponential(estimate: Estimate) -> Estimate:
    """exp of an estimate, to first order in its error."""
    value = math.exp(estimate.value)
    return Estimate(value, value * estimate.error)


def correlation(a: Float64, b: Float64) -> float:
    """Pearson's; of equal values 1, where one of two different sides is constant 0."""
    if np.array_equal(a, b):
        return 1.0
    a, b = a - a.mean(), b - b.mean()
    scale = math.sqrt(float(a @ a) * float(b @ b))
    return float(a @ b) / scale if scale else 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Half:
    """The three figures that a gate looks at, over some of the windows."""

    tokens: int
    kld: float
    same_top: float
    ppl_ratio: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Summary:
    """What a cut did to n tokens.

    Attributes:
        tokens, windows: how many.
        kld: mean, nats. Its error, as all others, is that of independent tokens.
        kld_windows: the same mean over tokens, with the error of independent windows, which is the honest one where neighbours resemble
            each other.
        kld_percentiles: by name.
        delta_p, delta_p_rms: of the true token's probability.
        same_top: share of tokens.
        ppl_base, ppl_cut, ppl_ratio: perplexities; the ratio's error is that of the mean of paired differences.
        log_ppl_correlation: of the tokens' NLLs.
        even, odd: over every other window; None where there is but one.
        half_spread: standard deviation of the figures over random halves of the windows; None likewise.
    """

    tokens: int
    windows: int
    kld: Estimate
    kld_windows: Estimate
    kld_percentiles: dict[str, float]
    delta_p: Estimate
    delta_p_rms: Estimate
    same_top: Estimate
    ppl_base: Estimate
    ppl_cut: Estimate
    ppl_ratio: Estimate
    log_ppl_correlation: float
    even: Half | None
    odd: Half | None
    half_spread: Half | None

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def summarise(windows: Sequence[TokenResults]) -> Summary:
    """Sum up the results of windows, each with at least one token."""
    tokens = TokenResults.joined(windows)
    kld = mean(tokens.kld)
    even = odd = spread = None
    if len(windows) > 1:
        sums = _window_sums(windows)
        even, odd = _half(sums[0::2]), _half(sums[1::2])
        spread = _half_spread(sums)
    return Summary(
        tokens=tokens.count,
        windows=len(windows),
        kld=kld,
        kld_windows=Estimate(kld.value, _clustered_error([w.kld for w in windows], kld.value)),
        kld_percentiles=dict(zip(PERCENTILES, np.percentile(tokens.kld, list(PERCENTILES.values())).tolist(), strict=True)),
        delta_p=mean(tokens.delta_p),
        delta_p_rms=root_mean_square(tokens.delta_p),
        same_top=mean(tokens.same_top),
        ppl_base=exponential(mean(tokens.nll_base)),
        ppl_cut=exponential(mean(tokens.nll_cut)),
        ppl_ratio=exponential(mean(tokens.nll_cut - tokens.nll_base)),
        log_ppl_correlation=correlation(tokens.nll_base, tokens.nll_cut),
        even=even,
        odd=odd,
        half_spread=spread,
    )


def _clustered_error(windows: Sequence[Float64], centre: float) -> float:
    """Standard error of a mean over tokens, of which those of a window may depend on each other."""
    k, n = len(windows), sum(window.size for window in windows)
    if k < 2:
        return 0.0
    excess = np.array([float((window - centre).sum()) for window in windows])
    return math.sqrt(k / (k - 1) * float(excess @ excess)) / n


def _window_sums(windows: Sequence[TokenResults]) -> Float64:
    """[windows, 4]: tokens, and sums of KLD, same top, log ratio."""
    return np.array([(w.count, w.kld.sum(), w.same_top.sum(), (w.nll_cut - w.nll_base).sum()) for w in windows], np.float64)


def _half(sums_N4: Float64) -> Half:
    tokens, kld, same_top, log_ratio = (float(value) for value in sums_N4.sum(axis=0))
    return Half(tokens=int(tokens), kld=kld / tokens, same_top=same_top / tokens, ppl_ratio=math.exp(log_ratio / tokens))


def _half_spread(sums_N4: Float64) -> Half:
    """The same halvings whatever is measured, so that settings can be compared."""
    rng, size = np.random.default_rng(0), len(sums_N4) // 2
    halves = [_half(sums_N4[np.sort(rng.permutation(len(sums_N4))[:size])]) for _ in range(HALVINGS)]
    spread = {name: float(np.std([getattr(half, name) for half in halves])) for name in ("kld", "same_top", "ppl_ratio")}
    return Half(tokens=halves[0].tokens, **spread)
