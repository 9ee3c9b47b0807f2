"""Work as a count that repeats: weights that rows were multiplied with, in routed experts' worth."""

from __future__ import annotations

import math
from collections.abc import Callable

from colibri_jax.config import ModelConfig
from colibri_jax.generate.protocol import LanguageModel
from colibri_jax.tensors import tensor_specs


def row_weights(config: ModelConfig) -> tuple[float, float]:
    """Weights outside routed experts that a row is multiplied with, in routed experts' worth: a trunk's row, and an MTP block's.

    Without routed experts the unit is a row of the trunk.
    """
    trunk = block = expert = 0
    for spec in tensor_specs(config):
        n = math.prod(spec.shape)
        of_block = spec.role.startswith(("mtp.", f"layers.{config.n_layers}."))
        if ".experts." in spec.role:
            expert += n if ".experts.0." in spec.role else 0
        elif spec.role != "embed" or config.tie_embeddings:
            trunk += 0 if of_block else n
            # The block's rows go through the trunk's head.
            block += n if of_block or spec.role in ("head", "embed") else 0
    layers = len(config.moe_layers) + config.n_mtp_layers
    unit = expert / layers if layers else trunk
    return trunk / unit, block / unit if config.n_mtp_layers else 0.0


def work_meter(lm: LanguageModel) -> Callable[[], float]:
    """A reading of what all of a model's steps so far took: distinct experts of every layer step, and `row_weights` of every row.

    A product of few rows takes the time of reading its weights, not of its rows; that every row counts is on the cautious side
    for drafting. Cache, clock and prefetch have no part in it, so that what is decided by it repeats.
    """
    trunk, block = row_weights(lm.config)

    def reading() -> float:
        scopes = lm.stats.scopes
        drafts = scopes["draft"].positions
        rows = sum(scope.positions for scope in scopes.values()) - drafts
        return sum(scope.kept_experts for scope in scopes.values()) + rows * trunk + drafts * block

    return reading
