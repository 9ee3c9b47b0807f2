"""The native engine as a LanguageModel: argument checks, statistics and selections around one native call per step."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from colibri_jax import _native
from colibri_jax.config import ModelConfig
from colibri_jax.container.reader import Container
from colibri_jax.engine.options import EngineOptions, plan_engine
from colibri_jax.engine.usage import ExpertUsage
from colibri_jax.errors import EngineError, TokenError
from colibri_jax.routing_spec import RoutingOptions, Rows, Scope, Selection, check_scopes, check_step
from colibri_jax.stats import ScopeStats, Stats


class NativeModel:
    """A container run by the native engine; see `generate.protocol.LanguageModel` for the methods. One thread at a time calls it.

    Args:
        container: what to run; its dense weights are read now, its experts on demand.
        options: sizes, threads, reader and kernels.
        routing: TOPK and TOPP in every scope, the budget in `budget_scopes`.
        budget_scopes: scopes in which the budget acts.

    Raises:
        MemoryBudgetError: the bound cannot hold what has to be in memory.
        ReadError: a tensor could not be read.
    """

    def __init__(
        self,
        container: Container,
        options: EngineOptions | None = None,
        *,
        routing: RoutingOptions | None = None,
        budget_scopes: Iterable[Scope] = ("decode",),
    ) -> None:
        self._config = container.runnable_config
        self._options = options or EngineOptions()
        self._routing = routing or RoutingOptions()
        self._budget_scopes = check_scopes(budget_scopes)
        self._routing.check_layers(len(self._config.moe_layers))
        plan = plan_engine(container, self._options, self._routing)
        self._context_positions: int = plan.options["context"]
        self._engine = _native.Engine(plan.model, plan.options)
        self._running = threading.Lock()
        self._selections: tuple[Selection, ...] = ()
        self._usage = ExpertUsage.none(self._config)
        self._stats = Stats(
            backend="native",
            precision=self._options.precision,
            isa=self._engine.isa,
            reader=self._engine.reader,
            threads=plan.options["threads"],
            cache_experts_per_layer=plan.cache_experts,
            expert_bytes=self._engine.expert_bytes,
            dense_bytes=plan.dense_bytes,
            kv_cache_bytes=plan.kv_cache_bytes,
            ram_bytes=plan.ram_bytes,
            asked_ram_bytes=self._options.ram_bytes or 0,
            pinned_experts=sum(map(len, self._options.pinned)),
        )

    @property
    def config(self) -> ModelConfig:
        return self._config

    @property
    def routing(self) -> RoutingOptions:
        return self._routing

    @property
    def budget_scopes(self) -> frozenset[Scope]:
        return self._budget_scopes

    @property
    def context_positions(self) -> int:
        return self._context_positions

    @property
    def position(self) -> int:
        position: int = self._engine.position
        return position

    @property
    def selections(self) -> tuple[Selection, ...]:
        return self._selections

    @property
    def usage(self) -> ExpertUsage:
        """How often each expert was used since the model was loaded."""
        return self._usage

    @property
    def stats(self) -> Stats:
        return self._stats

    def forward(
        self,
        tokens: Sequence[int] | npt.NDArray[np.integer],
        *,
        scope: Scope,
        logits: Literal["all", "last"] = "all",
        rows: Rows = "together",
    ) -> npt.NDArray[np.float32]:
        check_step(scope, logits, rows, self._routing)
        ids, alone = _token_array(tokens), rows == "alone"
        budget_acts = ("decode" if alone else scope) in self._budget_scopes
        with self._alone():
            try:
                scores: npt.NDArray[np.float32] = self._engine.forward(ids, budget_acts, logits == "last", alone)
            except BaseException:
                # A step that was abandoned took its time and read what it read.
                self._count(scope, ScopeStats(**self._engine.report))
                raise
            self._selections = tuple(Selection(**fields) for fields in self._engine.selections)
            self._usage = self._usage.with_selections(self._selections)
            self._count(scope, ScopeStats(steps=1, positions=ids.size, **self._engine.report).with_selections(self._selections))
        return scores

    def rewind(self, n: int) -> None:
        with self._alone():
            self._engine.rewind(n)

    def reset(self) -> None:
        self.rewind(self.position)

    def _count(self, scope: Scope, step: ScopeStats) -> None:
        scopes = {**self._stats.scopes, scope: self._stats.scopes[scope].plus(step)}
        self._stats = dataclasses.replace(self._stats, scopes=scopes)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        if not self._running.acquire(blocking=False):
            raise EngineError("two calls at once", where="forward, rewind", expected="one thread at a time", got="a second call")
        try:
            yield
        finally:
            self._running.release()

    def set_trace(self, on: bool, *, inputs: Literal["all", "none"] | int = "all") -> None:
        """Keep every layer's input, router logits and attended positions of the following steps.

        Args:
            inputs: whose quantiser inputs to keep as well: of all layers, of none, or of one. They are many times the rest.
        """
        self._engine.set_trace(on, {"all": -1, "none": None}[inputs] if isinstance(inputs, str) else inputs)

    @property
    def trace(self) -> dict[str, Any]:
        """What the last traced step kept.

        Keys: "hidden" (float32 [T, D] per layer, then the input of the final norm), "router_logits" (float32 [T, E] per
        MoE layer), "attended" (per layer and row, ascending positions; empty where the row attended to all), "inputs" (of
        every quantiser in order: layer, name, int32 [n] rows, float32 [n, X] values).
        """
        trace: dict[str, Any] = self._engine.trace
        return trace

    def kv_cache(self, layer: int) -> npt.NDArray[np.float32]:
        """float32 [position, cache_width]: latents, then rotated keys; with GQA the rotated keys of all heads, then their values."""
        cache: npt.NDArray[np.float32] = self._engine.kv_cache(layer)
        return cache

    def index_keys(self, layer: int) -> npt.NDArray[np.float32] | None:
        """float32 [position, index_head_dim], or None where the layer shares another's choice."""
        keys: npt.NDArray[np.float32] | None = self._engine.index_keys(layer)
        return keys


def _token_array(tokens: Sequence[int] | npt.NDArray[np.integer]) -> npt.NDArray[np.int32]:
    array = np.asarray(tokens)
    if array.ndim != 1 or (array.size and not np.issubdtype(array.dtype, np.integer)):
        raise TokenError(
            "tokens of a step", where="tokens", expected="a flat sequence of integers", got=f"{array.dtype} {list(array.shape)}"
        )
    limits = np.iinfo(np.int32)
    if array.size and (array.max() > limits.max or array.min() < limits.min):
        raise TokenError("token outside the vocabulary", where="tokens", expected="32-bit ids", got=int(np.abs(array).max()))
    return np.ascontiguousarray(array, np.int32)
