"""From logits to one token: greedy, temperature, top-p. A draw depends on seed and absolute position, on nothing else."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import numpy.typing as npt

from colibri_jax.errors import NonFiniteLogitError, OptionError, ShapeError

MAX_SEED = 2**64 - 1

# A position has several draws where drafts are accepted by the classical rule: its own, and three that serve the rule.
TOKEN_STREAM, DRAFT_STREAM, ACCEPTANCE_STREAM, RESIDUAL_STREAM = range(4)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """How a token is chosen.

    Attributes:
        temperature: divides the logits; 0 is greedy: the largest logit, ties to the lowest id.
        top_p: only the shortest set of most probable tokens that holds this share is drawn from; 1 is off.
        seed: key of the generator.

    Raises:
        OptionError: a field is outside its domain.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0.0):
            raise OptionError("temperature out of range", where="temperature", expected="0 (greedy) or more", got=self.temperature)
        if not 0.0 < self.top_p <= 1.0:
            raise OptionError("share out of range", where="top_p", expected="above 0, at most 1 (off)", got=self.top_p)
        if not 0 <= self.seed <= MAX_SEED:
            raise OptionError("seed out of range", where="seed", expected=f"0 to {MAX_SEED}", got=self.seed)


def uniform_at(seed: int, position: int, stream: int = TOKEN_STREAM) -> float:
    """The one draw of a stream that belongs to an absolute position: a multiple of 2^-53 in [0, 1).

    Counter-based (Philox-4x64-10; Salmon et al., SC 2011): key (seed, 0), counter (1, position, stream, 0), first word, upper
    53 bits. There is no state, so the draw is the same whatever steps, chunks or rejected drafts led to the position.
    """
    # The bit generator increments before its first block, hence the 0 that becomes counter word 1.
    counter = np.array([0, position, stream, 0], dtype=np.uint64)
    key = np.array([seed, 0], dtype=np.uint64)
    word = int(np.random.Philox(counter=counter, key=key).random_raw())
    return float(word >> 11) * 2.0**-53


def probabilities(logits_W: npt.NDArray[np.float32], options: SamplingOptions) -> npt.NDArray[np.float64]:
    """Probability of every token after temperature and top-p, float64 [W], summing to 1.

    Top-p orders by probability, descending, ties to the lowest id; with c the running sum in that order, the shortest
    prefix with c_j >= top_p * c_last stays (at least one token), and what stays is normalised again. Greedy is 1 at one id.
    """
    _check(logits_W)
    if options.temperature == 0.0:
        one_hot = np.zeros(logits_W.size)
        one_hot[np.argmax(logits_W)] = 1.0
        return one_hot
    kept = _weights(logits_W, options)
    normalised: npt.NDArray[np.float64] = kept / np.cumsum(kept)[-1]
    return normalised


def sample(logits_W: npt.NDArray[np.float32], position: int, options: SamplingOptions, *, stream: int = TOKEN_STREAM) -> int:
    """The token at an absolute position.

    The draw u of `uniform_at` falls into the running sum of the kept probabilities, tokens in ascending id: that order
    does not change when a last bit of a logit does, unlike the order by probability.

    Args:
        logits_W: float32 [W], scores of the token at `position`.
        position: absolute position that the token will have.
        stream: which of the position's draws.

    Returns:
        A token id in [0, W).

    Raises:
        ShapeError: not float32 [W >= 1].
        NonFiniteLogitError: a logit is NaN or infinite.
    """
    _check(logits_W)
    if options.temperature == 0.0:
        return int(np.argmax(logits_W))
    return draw(_weights(logits_W, options), uniform_at(options.seed, position, stream))


def draw(weights_W: npt.NDArray[np.float64], u: float) -> int:
    """The token at which the running sum of weights (float64 [W] >= 0, not all 0) exceeds the share u in [0, 1) of their total."""
    running = np.cumsum(weights_W)
    target = u * running[-1]
    # u < 1, but its product with the sum may round up to the sum: the first id that reaches the sum is then the last kept one.
    last_kept = int(np.searchsorted(running, running[-1], side="left"))
    return min(int(np.searchsorted(running, target, side="right")), last_kept)


def _check(logits_W: npt.NDArray[np.float32]) -> None:
    if logits_W.dtype != np.float32 or logits_W.ndim != 1 or logits_W.size == 0:
        raise ShapeError(
            "logits of one position", where="logits", expected="float32 [W >= 1]", got=f"{logits_W.dtype} {list(logits_W.shape)}"
        )
    finite = np.isfinite(logits_W)
    if not finite.all():
        token = int(np.argmin(finite))
        raise NonFiniteLogitError("the model scored a token with no number", where=f"token {token}", expected="finite", got=logits_W[token])


def _weights(logits_W: npt.NDArray[np.float32], options: SamplingOptions) -> npt.NDArray[np.float64]:
    """exp((z - max z) / temperature), 0 for tokens that top-p left out; not normalised, the largest is 1."""
    z = logits_W.astype(np.float64)
    with np.errstate(over="ignore", under="ignore"):  # a tiny temperature sends all but the largest to exp(-inf) = 0
        weights: npt.NDArray[np.float64] = np.exp((z - z.max()) / options.temperature)
    if options.top_p < 1.0:
        order = np.argsort(-weights, kind="stable")
        running = np.cumsum(weights[order])
        n_kept = int(np.searchsorted(running, options.top_p * running[-1], side="left")) + 1
        weights[order[n_kept:]] = 0.0
    return weights
