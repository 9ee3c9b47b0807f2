"""One traced step of the native engine, and a layer of the reference on the choices that the engine made in it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from colibri_jax.engine.session import NativeModel
from colibri_jax.reference.layer import LayerCache, LayerResult
from colibri_jax.reference.model import ReferenceModel
from colibri_jax.routing_spec import RoutingOptions, Scope, Selection

Float32 = npt.NDArray[np.float32]
Mask = npt.NDArray[np.bool_]
TracedInput = tuple[int, str, npt.NDArray[np.int32], Float32]
"""A quantiser's input: layer, name, the rows [n] of the step, float32 [n, X] values."""

Walk = Iterator[None]
"""A comparison of one step that stops before every layer, and before the head.

Walks of all steps can be finished one after the other, or taken through one layer together, so that the layer is in memory only then.
Teacher-forced steps see each other through caches alone, which are of one layer, so that the order makes no difference.
"""


@dataclasses.dataclass(frozen=True, eq=False)
class NativeStep:
    """What a traced native model has just done in one step.

    Attributes:
        native: tracing is on.
        tokens, scope: what the step was given.
        logits_TW: what it answered.
        recording: whose caches, and whose quantiser inputs, stand for the model's once it is gone.
        start: position of the first row.
        selections: one per MoE layer.
        trace: see `NativeModel.trace`; kept here, because every look at the engine's copies all of it.
    """

    native: dataclasses.InitVar[NativeModel]
    tokens: npt.NDArray[np.integer]
    scope: Scope
    logits_TW: Float32
    recording: Recording | None = None
    start: int = dataclasses.field(init=False)
    selections: list[Selection] = dataclasses.field(init=False)
    trace: dict[str, Any] = dataclasses.field(init=False)
    _source: NativeModel | Recording = dataclasses.field(init=False)

    def __post_init__(self, native: NativeModel) -> None:
        for name, value in (
            ("start", native.position - len(self.tokens)),
            ("selections", list(native.selections)),
            ("trace", native.trace),
            ("_source", self.recording or native),
        ):
            object.__setattr__(self, name, value)

    @property
    def stop(self) -> int:
        """The position after its last row."""
        return self.start + len(self.tokens)

    def options(self, moe_index: int) -> RoutingOptions:
        """What an MoE layer (0 is the first) was asked for in this step."""
        return self._source.routing.effective(moe_index, self.scope, self._source.budget_scopes)

    def selection(self, layer: int) -> Selection | None:
        """The experts of a layer; None where it is dense."""
        return self.selections[self.moe_index(layer)] if self._source.config.sparse[layer] else None

    def moe_index(self, layer: int) -> int:
        """A sparse layer's index among these."""
        return self._source.config.moe_layers.index(layer)

    def cache(self, layer: int, n: int) -> LayerCache:
        """The first n positions of a layer's cache."""
        keys = self._source.index_keys(layer)
        return LayerCache(self._source.kv_cache(layer)[:n], None if keys is None else keys[:n])

    def inputs(self, layer: int) -> list[TracedInput]:
        """Quantiser inputs of one layer, in order."""
        return (
            [entry for entry in self.trace["inputs"] if entry[0] == layer]
            if self.recording is None
            else self.recording.inputs(layer, self.start)
        )

    def attended(self, layer: int) -> Mask:
        """bool [T, start + T]: the positions that each row attended to."""
        lists = self.trace["attended"][layer]
        mask = np.tril(np.ones((len(lists), self.start + len(lists)), bool), k=self.start)
        for row, positions in enumerate(lists):
            if positions:
                mask[row] = False
                mask[row, positions] = True
        return mask


def finish(walk: Walk) -> None:
    """Take one walk to its end."""
    for _ in walk:
        pass


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


class Recording:
    """What is left of a traced run of the native engine, which may go and give its memory back.

    Quantiser inputs, many times the rest, are not kept: a layer's are had by another run, and only to explain a difference.

    Args:
        load: makes an engine at position 0, for every layer whose quantiser inputs are asked for.
        tokens: of all steps.
        cuts: token counts and scopes of the steps.
    """

    def __init__(self, load: Callable[[], NativeModel], tokens: npt.NDArray[np.int64], cuts: Sequence[tuple[int, Scope]]) -> None:
        self.tokens = tokens
        self._load, self._cuts = load, cuts
        self._inputs_layer, self._inputs = -1, dict[int, list[TracedInput]]()

    def run(self, native: NativeModel, progress: Callable[[int], None] = lambda done: None) -> list[NativeStep]:
        """Do all steps.

        Args:
            native: at position 0.
            progress: told the tokens done.
        """
        native.set_trace(True, inputs="none")
        steps = []
        for some, scope in self._pieces():
            steps.append(NativeStep(native, some, scope, native.forward(some, scope=scope), self))
            progress(native.position)
        self.config, self.routing, self.budget_scopes = native.config, native.routing, native.budget_scopes
        layers = range(self.config.n_layers)
        self._kv, self._keys = [native.kv_cache(layer) for layer in layers], [native.index_keys(layer) for layer in layers]
        return steps

    def kv_cache(self, layer: int) -> Float32:
        """As `NativeModel.kv_cache` at the end."""
        return self._kv[layer]

    def index_keys(self, layer: int) -> Float32 | None:
        """As `NativeModel.index_keys` at the end."""
        return self._keys[layer]

    def inputs(self, layer: int, start: int) -> list[TracedInput]:
        """Quantiser inputs of one layer in the step that began at `start`, in order."""
        if self._inputs_layer != layer:
            native = self._load()
            native.set_trace(True, inputs=layer)
            self._inputs_layer, self._inputs = layer, {}
            for some, scope in self._pieces():
                begin = native.position
                native.forward(some, scope=scope, logits="last")
                self._inputs[begin] = native.trace["inputs"]
        return self._inputs[start]

    def _pieces(self) -> Iterator[tuple[npt.NDArray[np.int64], Scope]]:
        begin = 0
        for count, scope in self._cuts:
            yield self.tokens[begin : begin + count], scope
            begin += count
