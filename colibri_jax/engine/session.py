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
from colibri_jax.engine.options import EngineOptions, plan_engine, routing_dict
from colibri_jax.engine.usage import ExpertUsage
from colibri_jax.errors import ConfigError, EngineError, ShapeError, TokenError
from colibri_jax.routing_spec import RoutingOptions, Rows, RowVotes, Scope, Selection, check_row_votes, check_scopes, check_step
from colibri_jax.stats import ScopeStats, Stats, StatsScope


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
        self._hidden_rows = 0
        self._mtp_selection: Selection | None = None
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
    def hidden(self) -> npt.NDArray[np.float32]:
        """float32 [n, D]: the last forward's hidden states after the final norm, which the MTP block reads. A copy."""
        rows: npt.NDArray[np.float32] = self._engine.hidden
        return rows

    @property
    def usage(self) -> ExpertUsage:
        """How often each expert was used since the model was loaded. A copy."""
        return ExpertUsage(self._usage.counts_LE.copy())

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
        row_votes: RowVotes = None,
    ) -> npt.NDArray[np.float32]:
        check_step(scope, logits, rows, self._routing, row_votes)
        ids, alone = _token_array(tokens), rows == "alone"
        votes = check_row_votes(row_votes, ids.size, self._config.moe.router, self._routing, self._config.moe.n_experts)
        budget_acts = ("decode" if alone else scope) in self._budget_scopes
        with self._alone():
            try:
                scores: npt.NDArray[np.float32] = self._engine.forward(ids, budget_acts, logits == "last", alone, votes)
            except BaseException:
                # A step that was abandoned took its time and read what it read.
                self._count(scope, ScopeStats(**self._engine.report))
                raise
            self._selections = tuple(Selection(**fields) for fields in self._engine.selections)
            self._hidden_rows = ids.size
            self._usage.count(self._selections)
            self._count(scope, ScopeStats(steps=1, positions=ids.size, **self._engine.report).with_selections(self._selections))
        return scores

    def reroute(self, routing: RoutingOptions, budget_scopes: Iterable[Scope]) -> None:
        scopes = check_scopes(budget_scopes)
        routing.check_layers(len(self._config.moe_layers))
        with self._alone():
            self._engine.reroute(routing_dict(self._config, routing, mtp=self._options.mtp))
            self._routing, self._budget_scopes = routing, scopes

    def rewind(self, n: int) -> None:
        with self._alone():
            self._engine.rewind(n)

    def reset(self) -> None:
        self.rewind(self.position)

    # ---- MTP ------------------------------------------------------------------------------------------------------

    @property
    def mtp_position(self) -> int:
        """Rows in the MTP block's cache."""
        position: int = self._engine.mtp_position
        return position

    @property
    def mtp_hidden(self) -> npt.NDArray[np.float32]:
        """float32 [n, D]: the last `mtp_forward`'s hidden states after the block's norm. A copy."""
        self._check_mtp()
        rows: npt.NDArray[np.float32] = self._engine.mtp_hidden
        return rows

    @property
    def mtp_selection(self) -> Selection | None:
        """The block's Selection of the last `mtp_forward`."""
        return self._mtp_selection

    def mtp_forward(
        self,
        tokens_next: Sequence[int] | npt.NDArray[np.integer],
        trunk_hidden: npt.NDArray[np.float32] | slice,
        *,
        logits: Literal["all", "last"] = "all",
    ) -> npt.NDArray[np.float32]:
        """Append rows to the MTP block: row t scores token t + 2. The method of `reference.model.ReferenceModel`, bit for bit.

        Args:
            tokens_next: the token after each row's own.
            trunk_hidden: float32 [n, D], `hidden` at the same rows (or, drafting on, `mtp_hidden`). A slice is rows of `hidden`,
                which then are not copied.
            logits: score every row, or only the last.

        Returns:
            float32 [n, W], or [1, W] with `logits="last"`.

        Raises:
            ConfigError: the block was not loaded.
            TokenError, ContextOverflowError, ShapeError, MemoryBudgetError: nothing was appended.
        """
        self._check_mtp()
        check_step("decode", logits, "together", self._routing)
        ids = _token_array(tokens_next)
        rows: int | npt.NDArray[np.float32]
        if isinstance(trunk_hidden, slice):
            first, last, stride = trunk_hidden.indices(self._hidden_rows)
            shape, rows = (len(range(first, last, stride)) if stride == 1 else 0, self._config.hidden_size), first
        else:
            shape, rows = trunk_hidden.shape, np.ascontiguousarray(trunk_hidden, np.float32)
        if shape != (ids.size, self._config.hidden_size):
            expected = [ids.size, self._config.hidden_size]
            raise ShapeError("trunk hidden state", where="mtp_forward", expected=expected, got=list(shape))
        budget_acts, alone = "decode" in self._budget_scopes, self._routing.rows_of_drafts == "alone"
        with self._alone():
            try:
                scores: npt.NDArray[np.float32] = self._engine.mtp_forward(ids, rows, budget_acts, logits == "last", alone)
            except BaseException:
                self._count("draft", ScopeStats(**self._engine.report))
                raise
            self._mtp_selection = Selection(**self._engine.mtp_selection)
            step = ScopeStats(steps=1, positions=ids.size, **self._engine.report)
            self._count("draft", step.with_selections([self._mtp_selection]))
        return scores

    def mtp_rewind(self, n: int) -> None:
        """Drop the MTP block's last n rows.

        Raises:
            RewindError: n is negative or more than `mtp_position`.
        """
        with self._alone():
            self._engine.mtp_rewind(n)

    def _check_mtp(self) -> None:
        if not self._options.mtp:
            raise ConfigError("the model has no MTP block in memory", where="mtp", expected="loaded with mtp=True", got=False)

    # ---- helpers --------------------------------------------------------------------------------------------------

    def _count(self, scope: StatsScope, step: ScopeStats) -> None:
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
