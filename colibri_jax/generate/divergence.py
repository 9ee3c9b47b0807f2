"""How far lossy verification strays from exact decoding, measured on the text that it wrote."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from colibri_jax.errors import OptionError
from colibri_jax.generate.protocol import LanguageModel
from colibri_jax.generate.sampling import SamplingOptions, sample
from colibri_jax.logits import kl_divergence, log_softmax

Float32 = npt.NDArray[np.float32]

# Rows of one step of the exact run: it routes each alone, so that their number only bounds the working memory.
_ROWS = 32


@dataclasses.dataclass(frozen=True, kw_only=True)
class Divergence:
    """Exact decoding's logits along a written text, against those that the text was chosen from.

    Attributes:
        tokens: that were compared; the answer's first one, which the prompt decides, is not among them.
        kld_mean, kld_max: KL(exact ‖ written) per token, in nats.
        same_top: share of tokens with the same most probable token.
        other_choices: tokens that exact decoding would have chosen otherwise, with the same draw.
        first_other: which token of the answer was the first of these, 0 being the first of all; None where there is none.
    """

    tokens: int
    kld_mean: float
    kld_max: float
    same_top: float
    other_choices: int
    first_other: int | None

    def to_json(self) -> dict[str, Any]:
        """All of it as plain data."""
        return dataclasses.asdict(self)

    def line(self) -> str:
        """For people."""
        first = "" if self.first_other is None else f", the first is token {self.first_other + 1}"
        return (
            f"divergence from exact decoding over {self.tokens} tokens: KLD mean {self.kld_mean:.4g}, max {self.kld_max:.4g}; "
            f"same top token {self.same_top:.1%}; {self.other_choices} would have been chosen otherwise{first}"
        )


def divergence(
    lm: LanguageModel, first: int, tokens: Sequence[int], chosen_from: Mapping[int, Float32], sampling: SamplingOptions
) -> Divergence | None:
    """Run a written answer again, exactly, and compare. The cache then ends with the exact rows of the answer but its last token.

    Args:
        lm: its cache holds the prompt; what follows it there, as the answer itself, is dropped first.
        first: absolute position of the answer's first token.
        tokens: the answer, a stop token included.
        chosen_from: float32 [W] by absolute position, the logits of every token of the answer.
        sampling: how they were chosen.

    Returns:
        None where the answer has fewer than two tokens.

    Raises:
        OptionError: the policy looks at the cache, so that there is no exact decoding; or the cache ends before the answer.
    """
    if len(tokens) < 2:
        return None
    if lm.position < first:
        raise OptionError("the cache does not hold the prompt", where="position", expected=f"{first} or more", got=lm.position)
    lm.rewind(lm.position - first)
    kld, same, others = [], 0, []
    for start in range(0, len(tokens) - 1, _ROWS):
        fed = tokens[start : min(start + _ROWS, len(tokens) - 1)]
        exact_TW = lm.forward(fed, scope="verify", rows="alone")
        positions = [first + start + 1 + row for row in range(len(fed))]
        written_TW = np.stack([chosen_from[position] for position in positions])
        kld.extend(kl_divergence(log_softmax(exact_TW), log_softmax(written_TW)).tolist())
        same += int((exact_TW.argmax(axis=1) == written_TW.argmax(axis=1)).sum())
        others += [p - first for p, row in zip(positions, exact_TW, strict=True) if sample(row, p, sampling) != tokens[p - first]]
    return Divergence(
        tokens=len(kld),
        kld_mean=float(np.mean(kld)),
        kld_max=max(kld),
        same_top=same / len(kld),
        other_choices=len(others),
        first_other=others[0] if others else None,
    )
