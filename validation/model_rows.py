"""A check of generated models: rows of a verification that are routed alone are what decoding makes of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from model_checks import Findings, Subject
    from model_runs import Run


def check_rows_alone(subject: Subject, run: Run, findings: Findings) -> Iterator[str]:
    """Rows of a verification that are routed alone have the logits and experts that decoding them one by one gives."""
    verifying, decoding, start = subject.native(run), subject.native(run), 0
    for n in run.cuts:
        rows = run.history[start : start + n]
        together_TW, joined = verifying.forward(rows, scope="verify", rows="alone"), verifying.selections
        for row, token in enumerate(rows):
            if decoding.forward([token], scope="decode")[0].tobytes() != together_TW[row].tobytes():
                yield f"rows alone {run.cuts}, {run.routing.policy} {run.routing.budget}: position {start + row} differs from decoding it"
                return
            for layer, (ours, theirs) in enumerate(zip(joined, decoding.selections, strict=True)):
                if ours.ids[row].tobytes() != theirs.ids[0].tobytes() or ours.weights[row].tobytes() != theirs.weights[0].tobytes():
                    yield f"rows alone, MoE layer {layer}: position {start + row} has other experts than when it is decoded"
        start += n
