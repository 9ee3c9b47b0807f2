"""Checks of what a ReferenceModel is given."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from colibri_jax.errors import OptionError, TokenError


def check_choice(where: str, value: str, known: tuple[str, ...]) -> None:
    """Refuse a choice that there is not.

    Raises:
        OptionError: `value` is not among `known`.
    """
    if value not in known:
        raise OptionError(f"unknown {where}", where=where, expected=", ".join(known), got=value)


def check_tokens(tokens: Sequence[int] | npt.NDArray[np.integer], vocab_size: int) -> npt.NDArray[np.int64]:
    """Tokens of a step as int64 [n].

    Raises:
        TokenError: no flat sequence of integers, empty, or one outside the vocabulary.
    """
    ids = np.asarray(tokens)
    if ids.ndim != 1 or ids.size == 0 or not np.issubdtype(ids.dtype, np.integer):
        raise TokenError("a step needs tokens", where="tokens", expected="integers [n >= 1]", got=f"{ids.dtype} {list(ids.shape)}")
    outside = np.flatnonzero((ids < 0) | (ids >= vocab_size))
    if outside.size:
        where = f"tokens[{outside[0]}]"
        raise TokenError("token outside the vocabulary", where=where, expected=f"0 to {vocab_size - 1}", got=int(ids[outside[0]]))
    return ids.astype(np.int64)
