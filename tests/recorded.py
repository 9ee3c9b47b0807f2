"""Numbers that tests hand over to `validation/suite_numbers.py` through pytest's `record_property`."""

from __future__ import annotations


def against_transformers(family: str, error: float, bound: float) -> dict[str, object]:
    """The property "error" of a test that holds logits in full precision against transformers'."""
    return {"what": "logits in full precision against transformers, experts equal", "of": family, "value": error, "bound": bound}
