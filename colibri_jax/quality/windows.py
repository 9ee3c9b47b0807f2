"""Text as windows of tokens, each of which is run from an empty context."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from colibri_jax.errors import OptionError
from colibri_jax.generate.texts import read_documents
from colibri_jax.quality.steps import StepShape
from colibri_jax.tokenizer import ChatTokenizer

Windows = npt.NDArray[np.int32]


def read_windows(files: Iterable[Path], tokenizer: ChatTokenizer, window: int) -> Windows:
    """All documents of all files, joined and cut.

    Args:
        window: positions of a window; what is left at the end is dropped.

    Returns:
        int32 [windows, window + 1]: a window's tokens, then the one that its last position shall score.

    Raises:
        OptionError: the text is shorter than one window, or a file is not what its name says.
    """
    files = list(files)
    tokens = [token for file in files for document in read_documents(file) for token in tokenizer.encode_document(document)]
    count = (len(tokens) - 1) // window
    if count < 1:
        raise OptionError("text too short", where=", ".join(map(str, files)), expected=f"more than {window} tokens", got=len(tokens))
    ids = np.array(tokens[: count * window + 1], np.int32)
    return np.concatenate([ids[:-1].reshape(count, window), ids[window::window, None]], axis=1)


def scored_per_window(shape: StepShape, window: int) -> int:
    """Scored positions of a window; of several groups the smallest one's.

    Raises:
        OptionError: the window has no room for them, or ends within a verification step, whose union would be a smaller one.
    """
    sizes: dict[str, int] = {}
    for step in shape.steps(window):
        if step.scored:
            sizes[step.group] = sizes.get(step.group, 0) + step.stop - step.start
    groups = 2 if shape.kind in ("prefill_then_decode", "all") else 1
    if len(sizes) < groups:
        raise OptionError("nothing left to score", where="window", expected=f"more than {shape.prefix} positions", got=window)
    if shape.kind == "verify" and (window - shape.prefix) % shape.rows:
        expected = f"a multiple of {shape.rows} after the prefix of {shape.prefix}"
        raise OptionError("a window ends within a verification step", where="window", expected=expected, got=window)
    return min(sizes.values())


def enough(windows: Windows, shape: StepShape, tokens: int | None) -> Windows:
    """The first windows, as many as score so many tokens in every group; all of them for None.

    Raises:
        OptionError: there are not so many.
    """
    if tokens is None:
        return windows
    each = scored_per_window(shape, windows.shape[1] - 1)
    needed = -(-tokens // each)
    if needed > len(windows):
        raise OptionError("text too short", where=f"tokens, {shape.kind}", expected=f"at most {each * len(windows)}", got=tokens)
    return windows[:needed]
