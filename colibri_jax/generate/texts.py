"""Documents of text files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from colibri_jax.errors import OptionError


def read_documents(path: Path) -> Iterator[str]:
    """The documents of a file: one of plain text, or (.jsonl) as many as it has lines of {"text": …}.

    Raises:
        OptionError: a line is something else.
    """
    if path.suffix != ".jsonl":
        yield path.read_text(encoding="utf-8")
        return
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            try:
                text = json.loads(line)["text"]
            except (ValueError, KeyError, TypeError) as error:
                expected = '{"text": …}'
                raise OptionError("not a document", where=f"{path}, line {number}", expected=expected, got=line.strip()[:40]) from error
            yield str(text)
