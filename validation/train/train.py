"""Train the small model on CPU: trunk and MTP block together, AdamW, one cosine over the time it is given.

Products run in bfloat16 (fast where the processor has AMX or AVX-512 BF16), weights and optimiser in float32. Experts
are balanced without a loss term: after every step the correction bias of an expert moves up if it had less than the
mean load and down if it had more (the update of DeepSeek-V3).
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable
from pathlib import Path

import click
import numpy as np
import torch
import torch.nn.functional as F
from checkpoint import load_model
from model import Model, Shape
from torch import Tensor

Tokens = np.ndarray
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Everything that a run chooses but its data, start and time."""

    batch: int = 16
    window: int = 256
    learning_rate: float = 2e-3
    final_share: float = 0.05  # of the learning rate, at the end of the cosine
    warmup_steps: int = 100
    weight_decay: float = 0.05  # matrices only
    betas: tuple[float, float] = (0.9, 0.95)
    clip_norm: float = 1.0
    mtp_loss_weight: float = 0.3
    balance_step: float = 0.001  # of the correction bias, per training step
    first_balance_step: float = 0.005  # in the first `first_balance_steps` steps, when loads are far from even
    first_balance_steps: int = 50
    log_every: int = 50
    evaluate_every: int = 250
    evaluation_batches: int = 10


def sample(tokens: Tokens, recipe: Recipe, rng: np.random.Generator) -> Tensor:
    """int64 [batch, window + 1], windows at random places of a token sequence."""
    starts = rng.integers(0, len(tokens) - recipe.window - 2, recipe.batch)
    return torch.from_numpy(np.stack([tokens[start : start + recipe.window + 1] for start in starts]).astype(np.int64))


def head_loss(hidden: Tensor, head: Tensor, target: Tensor) -> Tensor:
    """Mean cross-entropy of hidden [n, D] through the head [W, D]; the softmax in float32."""
    return F.cross_entropy(F.linear(hidden, head.to(torch.bfloat16)).float(), target)


def losses(model: Model, batch: Tensor, loss: Loss) -> tuple[Tensor, Tensor]:
    """Loss of the trunk and of the MTP block on int64 [B, T + 1]."""
    with torch.autocast("cpu", torch.bfloat16):
        trunk, drafted = model(batch[:, :-1])
        trunk_loss = loss(trunk.flatten(0, 1), model.head.weight, batch[:, 1:].flatten())
        return trunk_loss, loss(drafted.flatten(0, 1), model.head.weight, batch[:, 2:].flatten())


def balance(model: Model, step: int, recipe: Recipe) -> None:
    """Move the correction biases one step towards even load."""
    size = recipe.first_balance_step if step < recipe.first_balance_steps else recipe.balance_step
    for block in model.sparse_blocks:
        load = block.load.float()
        block.bias += size * torch.sign(load.mean() - load)


def learning_rate(step: int, share_done: float, recipe: Recipe) -> float:
    """Warm-up by steps, then a cosine over the share of the time that has passed."""
    cosine = 0.5 * (1 + math.cos(math.pi * min(share_done, 1.0)))
    decay = recipe.final_share + (1 - recipe.final_share) * cosine
    return recipe.learning_rate * min(1.0, (step + 1) / recipe.warmup_steps) * decay


def held_out_losses(model: Model, tokens: Tokens, recipe: Recipe, loss: Loss) -> tuple[float, float]:
    """Mean losses over the same random windows at every call: a trend, not the figure of the model card."""
    rng = np.random.default_rng(1)
    sums = [0.0, 0.0]
    with torch.no_grad():
        for _ in range(recipe.evaluation_batches):
            for index, value in enumerate(losses(model, sample(tokens, recipe, rng), loss)):
                sums[index] += value.item() / recipe.evaluation_batches
    return sums[0], sums[1]


def optimiser(model: Model, recipe: Recipe) -> torch.optim.AdamW:
    """AdamW that decays matrices and leaves norms alone."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    groups = [{"params": matrices, "weight_decay": recipe.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=recipe.learning_rate, betas=recipe.betas, fused=True)


def train(model: Model, data: Path, minutes: float, recipe: Recipe, loss: Loss) -> None:
    """Run until the time is over; writes data/checkpoint.pt now and then, and data/final.pt at the end."""
    train_tokens, held_tokens = (np.fromfile(data / f"{name}.bin", np.uint16) for name in ("train", "heldout"))
    adam, rng = optimiser(model, recipe), np.random.default_rng(0)
    started, step = time.monotonic(), 0

    def report() -> None:
        trunk, mtp = held_out_losses(model, held_tokens, recipe, loss)
        click.echo(f"step {step}: held-out loss {trunk:.3f}, MTP {mtp:.3f}")

    while (elapsed := time.monotonic() - started) < 60 * minutes:
        for group in adam.param_groups:
            group["lr"] = learning_rate(step, elapsed / (60 * minutes), recipe)
        trunk_loss, mtp_loss = losses(model, sample(train_tokens, recipe, rng), loss)
        (trunk_loss + recipe.mtp_loss_weight * mtp_loss).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.clip_norm)
        adam.step()
        adam.zero_grad(set_to_none=True)
        balance(model, step, recipe)
        step += 1
        if step % recipe.log_every == 0 or step in (1, 5, 20):
            speed = step * recipe.batch * recipe.window / (time.monotonic() - started)
            peak = max(float(block.load.max() / block.load.float().mean()) for block in model.sparse_blocks)
            click.echo(
                f"step {step}, {elapsed / 60:.1f} min: loss {trunk_loss.item():.3f}, MTP {mtp_loss.item():.3f}, "
                f"{speed:.0f} tokens/s, largest expert load {peak:.2f} × mean"
            )
        if step % recipe.evaluate_every == 0:
            report()
            torch.save(model.state_dict(), data / "checkpoint.pt")
    torch.save(model.state_dict(), data / "final.pt")
    report()


@click.command()
@click.argument("data", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--minutes", type=float, required=True, help="length of the run; the learning rate follows one cosine over it")
@click.option("--start", type=click.Path(exists=True, path_type=Path), help="continue from an exported directory or a .pt file")
@click.option("--threads", default=2, show_default=True)
@click.option("--seed", default=0, show_default=True, help="of the initial weights")
@click.option("--compile/--no-compile", "compiled", default=True, show_default=True, help="compile the layers (needs a C++ compiler)")
def main(*, data: Path, minutes: float, start: Path | None, threads: int, seed: int, compiled: bool) -> None:
    """Train on DATA (a directory written by prepare_corpus.py); writes DATA/checkpoint.pt and DATA/final.pt."""
    torch.set_num_threads(threads)
    torch.manual_seed(seed)
    model = load_model(start, torch.bfloat16) if start else Model(Shape(), torch.bfloat16)
    loss: Loss = head_loss
    if compiled:
        for layer in (*model.layers, model.mtp):
            layer.compile()
        loss = torch.compile(head_loss)
    click.echo(f"{sum(parameter.numel() for parameter in model.parameters()) / 1e6:.1f} million parameters")
    train(model.train(), data, minutes, Recipe(), loss)


if __name__ == "__main__":
    main()
