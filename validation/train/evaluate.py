"""Measure a trained model on held-out text, in float32: loss, perplexity, top-1, and what the MTP block predicts.

The documents are joined and cut into windows; every window is scored from an empty context, so the figures are those
of a reader who sees at most a window. All experts of every position run: the capacity of training does not apply.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import click
import torch
import torch.nn.functional as F
from checkpoint import load_model
from model import Model
from tokenizers import Tokenizer

DOCUMENT_START = [1, 2]  # [gMASK]<sop>
DOCUMENT_END = [0]  # <|endoftext|>
BATCH = 16


def read_tokens(heldout: Path, tokenizer: Path) -> torch.Tensor:
    """int64 token ids of all documents of a JSON-lines file, joined."""
    texts = [json.loads(line)["text"] for line in heldout.read_text(encoding="utf8").split("\n") if line.strip()]
    encoded = Tokenizer.from_file(str(tokenizer)).encode_batch(texts)
    return torch.tensor([token for document in encoded for token in (*DOCUMENT_START, *document.ids, *DOCUMENT_END)])


def evaluate(model: Model, tokens: torch.Tensor, window: int) -> dict[str, float]:
    """Figures over all whole windows of a token sequence.

    Args:
        model: in evaluation mode, computing in float32.
        tokens: int64 [n], n > window.
        window: positions that are scored together.

    Returns:
        `nll` in nats per token, `perplexity`, `top1`; `mtp_top1_text` against the text and `mtp_top1_trunk` against the
        trunk's own argmax for the same token; `tokens`, the number of trunk predictions.
    """
    count = (len(tokens) - 1) // window
    nll = 0.0
    trunk_hits = text_hits = agreements = drafts = 0
    with torch.inference_mode():
        for first in range(0, count, BATCH):
            rows = [tokens[index * window : (index + 1) * window + 1] for index in range(first, min(first + BATCH, count))]
            batch = torch.stack(rows)
            trunk, drafted = model(batch[:, :-1])
            logits, target = model.head(trunk).flatten(0, 1), batch[:, 1:]
            nll += F.cross_entropy(logits, target.flatten(), reduction="sum").item()
            choice = logits.argmax(-1).view(target.shape)
            trunk_hits += int((choice == target).sum())
            draft = model.head(drafted).argmax(-1)  # row t predicts token t + 2, as the trunk's row t + 1 does
            text_hits += int((draft == target[:, 1:]).sum())
            agreements += int((draft == choice[:, 1:]).sum())
            drafts += draft.numel()
    total = count * window
    return {
        "tokens": total,
        "nll": nll / total,
        "perplexity": math.exp(nll / total),
        "top1": trunk_hits / total,
        "mtp_top1_text": text_hits / drafts,
        "mtp_top1_trunk": agreements / drafts,
    }


@click.command()
@click.argument("model_path", metavar="MODEL", type=click.Path(exists=True, path_type=Path))
@click.argument("heldout", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--tokenizer", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="tokenizer.json, if MODEL is a .pt file")
@click.option("--window", default=256, show_default=True, help="positions scored together")
@click.option("--windows", default=0, help="stop after so many windows; 0 is all of them")
@click.option("--threads", default=2, show_default=True)
def main(*, model_path: Path, heldout: Path, tokenizer: Path | None, window: int, windows: int, threads: int) -> None:
    """Score MODEL (an exported directory or a .pt file) on HELDOUT, lines of {"text": …}; prints one JSON object."""
    torch.set_num_threads(threads)
    if tokenizer is None:
        if not model_path.is_dir():
            raise click.UsageError("a .pt file has no tokenizer: name one with --tokenizer")
        tokenizer = model_path / "tokenizer.json"
    tokens = read_tokens(heldout, tokenizer)
    if windows:
        tokens = tokens[: windows * window + 1]
    if len(tokens) <= window:
        raise click.UsageError(f"held-out text is shorter than one window: expected more than {window} tokens, got {len(tokens)}")
    click.echo(json.dumps(evaluate(load_model(model_path, torch.float32).eval(), tokens, window)))


if __name__ == "__main__":
    main()
