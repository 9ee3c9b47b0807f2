"""One traced step of the native engine, and a layer of the reference on the choices that the engine made in it."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np
import numpy.typing as npt

from colibri_jax.engine.session import NativeModel
from colibri_jax.reference.layer import LayerCache, LayerResult
from colibri_jax.reference.model import ReferenceModel
from colibri_jax.routing_spec import RoutingOptions, Scope, Selection

Float32 = npt.NDArray[np.float32]
Mask = npt.NDArray[np.bool_]


@dataclasses.dataclass(frozen=True, eq=False)
class NativeStep:
    """What a traced native model has just done.

    Attributes:
        native: tracing is on.
        tokens, scope: what the step was given.
        logits_TW: what it answered.
        trace: see `NativeModel.trace`; filled in here, because every look at the engine's copies all of it.
    """

    native: NativeModel
    tokens: npt.NDArray[np.integer]
    scope: Scope
    logits_TW: Float32
    trace: dict[str, Any] = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "trace", self.native.trace)

    @property
    def start(self) -> int:
        """Position of the first row."""
        return self.native.position - len(self.tokens)

    def options(self, moe_index: int) -> RoutingOptions:
        """What an MoE layer (0 is the first) was asked for in this step."""
        return self.native.routing.effective(moe_index, self.scope, self.native.budget_scopes)

    def selection(self, layer: int) -> Selection | None:
        """The experts of a layer; None where it is dense."""
        config = self.native.config
        return self.native.selections[config.moe_layers.index(layer)] if config.sparse[layer] else None

    def cache(self, layer: int, n: int) -> LayerCache:
        """The first n positions of a layer's cache."""
        keys = self.native.index_keys(layer)
        return LayerCache(self.native.kv_cache(layer)[:n], None if keys is None else keys[:n])

    def attended(self, layer: int) -> Mask:
        """bool [T, start + T]: the positions that each row attended to."""
        lists = self.trace["attended"][layer]
        mask = np.tril(np.ones((len(lists), self.start + len(lists)), bool), k=self.start)
        for row, positions in enumerate(lists):
            if positions:
                mask[row] = False
                mask[row, positions] = True
        return mask


def follow_layer(
    step: NativeStep, reference: ReferenceModel, layer: int, hidden_TD: Float32, cache: LayerCache, chosen_TS: Mask | None
) -> tuple[LayerResult, Mask | None]:
    """One layer of the reference with the experts and the attended positions of a native step.

    Args:
        hidden_TD, cache: as in `ReferenceModel.layer_step`.
        chosen_TS: the positions that the reference itself chose in the last layer that has an indexer.

    Returns:
        The result, and the positions that the reference itself would attend to in this layer; None without DSA.
    """
    step_layer = functools.partial(
        reference.layer_step, layer, hidden_TD, cache, step.start, scope=step.scope, selection=step.selection(layer)
    )
    indexer = reference.config.indexer
    if indexer is None:
        return step_layer(), None
    attended_TS = step.attended(layer)
    if indexer.kinds[layer] == "full":
        result = step_layer()
        chosen_TS = result.attended_TS
        assert chosen_TS is not None
        if np.array_equal(chosen_TS, attended_TS):
            return result, chosen_TS
    return step_layer(attended_TS=attended_TS), chosen_TS
