"""ReferenceModel: the whole model in pure JAX, behind the protocol that the native engine implements too."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from colibri_jax.config import ModelConfig
from colibri_jax.errors import ContextOverflowError, MissingTensorError, RewindError, ShapeError
from colibri_jax.reference.arguments import check_choice, check_tokens
from colibri_jax.reference.attention import MLAForm, final_norm, rope_table
from colibri_jax.reference.head import load_head, per_row, score_rows
from colibri_jax.reference.layer import (
    ExpertResidency,
    Float32,
    Geometry,
    Layer,
    LayerCache,
    LayerResult,
    Params,
    check_finite,
    empty_cache,
    load_layer,
    run_layer,
)
from colibri_jax.reference.mtp import MTPBlock, in_memory
from colibri_jax.reference.quantized import (
    Matrix,
    Precision,
    StoredArray,
    check_stored,
    look_up_rows,
    prepare,
    to_device,
    zero_of,
)
from colibri_jax.reference.residency import LayerResidency, Residency
from colibri_jax.reference.rows_alone import selector
from colibri_jax.routing_spec import RouterSpec, RoutingOptions, Rows, RowVotes, Scope, Selection, check_row_votes, check_scopes, check_step
from colibri_jax.stats import STATS_SCOPES, ScopeStats, Stats, StatsScope
from colibri_jax.tensors import tensor_specs


class ReferenceModel:
    """A `generate.protocol.LanguageModel` computed in JAX, layer by layer.

    Args:
        config: the model's description.
        params: arrays by role (`colibri_jax.tensors`), float32 or quantised. Any mapping; with `expert_residency="kept"`
            routed experts are read from it in every step that keeps them, with `layer_residency="one"` all the rest too, whenever
            another part is needed.
        precision: "full" (float32 everywhere), "w4a32" (quantised weights, float32 activations) or "w4a8" (the container's own
            arithmetic).
        routing: options for routing; by default nothing is changed.
        budget_scopes: where the budget acts; TOPK and TOPP act everywhere.
        context_positions: most positions; by default the model's own limit, at most 4096.
        mla_form: "absorbed" or "expanded"; nothing else than MLA reads it.
        expert_residency: "all" keeps every routed expert on the device, "kept" only those of the step, a few at a time.
        layer_residency: "all" keeps embedding, every layer and head in memory; "one" only the last of these parts that was used,
            and no MTP block. It changes no result.

    Raises:
        MissingTensorError, ShapeError: `params` does not hold what `config` asks for.
        OptionError: an option is outside its domain, or a quantised precision meets matrices that are not quantised.
    """

    def __init__(
        self,
        config: ModelConfig,
        params: Params,
        *,
        precision: Precision = "full",
        routing: RoutingOptions | None = None,
        budget_scopes: Iterable[Scope] = ("decode",),
        context_positions: int | None = None,
        mla_form: MLAForm = "absorbed",
        expert_residency: ExpertResidency = "all",
        layer_residency: LayerResidency = "all",
    ) -> None:
        check_choice("precision", precision, ("full", "w4a32", "w4a8"))
        check_choice("mla_form", mla_form, ("absorbed", "expanded"))
        check_choice("expert_residency", expert_residency, ("all", "kept"))
        check_choice("layer_residency", layer_residency, ("all", "one"))
        self._config = config
        self._routing = routing if routing is not None else RoutingOptions()
        self._budget_scopes = check_scopes(budget_scopes)
        self._context = config.resolve_context(context_positions)
        self._routing.check_layers(len(config.moe_layers))
        self._precision: Precision = precision
        self._geometry = Geometry(config.attention, config.indexer, config.rms_eps, mla_form)
        self._rope = rope_table(self._context, config.attention.rope)

        self._params, self._expert_residency = params, expert_residency
        self._specs = {spec.role: spec for spec in tensor_specs(config)}
        for role, spec in self._specs.items():
            if role not in params:
                raise MissingTensorError("the configuration asks for this tensor", where=role, expected=list(spec.shape), got="nothing")
        self._parts = Residency(layer_residency)
        norm = prepare(self._stored("final_norm"), storage="f32", precision=precision, role="final_norm")
        self._final_norm = to_device(norm)
        self._mtp = None
        if layer_residency == "all":
            self._embedding()
            self._head()
            for layer in range(config.n_layers):
                self._layer(layer)
            self._mtp = MTPBlock(params, config, precision, expert_residency) if config.n_mtp_layers else None

        self._caches = [empty_cache(config, layer) for layer in range(config.n_layers)]
        self._position = 0
        self._selections: tuple[Selection, ...] = ()
        self._router_logits: tuple[Float32, ...] = ()
        self._hidden_TD: Float32 = np.zeros((0, config.hidden_size), np.float32)
        self._scopes: dict[StatsScope, ScopeStats] = {scope: ScopeStats() for scope in STATS_SCOPES}

    @property
    def config(self) -> ModelConfig:
        """The model's description."""
        return self._config

    @property
    def precision(self) -> Precision:
        """The arithmetic in use."""
        return self._precision

    @property
    def routing(self) -> RoutingOptions:
        """Options in the scopes that the budget applies to."""
        return self._routing

    @property
    def budget_scopes(self) -> frozenset[Scope]:
        """Scopes in which the budget acts; TOPK and TOPP act in every scope."""
        return self._budget_scopes

    @property
    def context_positions(self) -> int:
        """Positions that the KV cache can hold."""
        return self._context

    @property
    def position(self) -> int:
        """Positions in the KV cache, and so the absolute position of the next token."""
        return self._position

    @property
    def mtp_position(self) -> int:
        """Rows in the MTP block's cache."""
        return self._mtp.position if self._mtp is not None else 0

    @property
    def mtp_hidden(self) -> Float32:
        """float32 [n, D]: the last `mtp_forward`'s hidden states after the block's norm."""
        return in_memory(self._mtp).hidden_TD

    @property
    def mtp_selection(self) -> Selection | None:
        """The block's Selection of the last `mtp_forward`."""
        return self._mtp.selection if self._mtp is not None else None

    @property
    def selections(self) -> tuple[Selection, ...]:
        """One Selection per MoE layer of the last forward."""
        return self._selections

    @property
    def router_logits(self) -> tuple[Float32, ...]:
        """Per MoE layer, float32 [n, E] of the last forward."""
        return self._router_logits

    def router(self, layer: int) -> RouterSpec | None:
        """A trunk layer's router with its correction bias; None where the layer is dense."""
        return self._layer(layer).router

    @property
    def hidden(self) -> Float32:
        """float32 [n, D]: the last forward's hidden states after the final norm, which the MTP block reads."""
        return self._hidden_TD

    @property
    def caches(self) -> tuple[LayerCache, ...]:
        """Per trunk layer; rows from `position` on mean nothing."""
        return tuple(self._caches)

    @property
    def stats(self) -> Stats:
        """A frozen snapshot."""
        return Stats(backend="reference", precision=self._precision, scopes=dict(self._scopes))

    def forward(
        self,
        tokens: Sequence[int] | npt.NDArray[np.integer],
        *,
        scope: Scope,
        logits: Literal["all", "last"] = "all",
        rows: Rows = "together",
        row_votes: RowVotes = None,
    ) -> Float32:
        """Run one step, see `LanguageModel.forward`.

        Raises:
            TokenError, ContextOverflowError, OptionError, ShapeError: before anything is computed.
            NonFiniteActivationError, NonFiniteLogitError: naming the layer.
            In every case the model stays as it was.
        """
        begin = time.perf_counter()
        check_step(scope, logits, rows, self._routing, row_votes)
        ids = self._check_tokens(tokens, self._position)
        check_row_votes(row_votes, ids.size, self._config.moe.router, self._routing, self._config.moe.n_experts)
        hidden_TD, caches, selections = self.embed(ids), [], []
        router_logits: list[Float32] = []
        attended_TS: npt.NDArray[np.bool_] | None = None
        for layer, cache in enumerate(self._caches):
            shares = self._config.indexer is not None and self._config.indexer.kinds[layer] == "shared"
            given: Any = {"scope": scope, "rows": rows, "row_votes": row_votes, "attended_TS": attended_TS if shares else None}
            result = self.layer_step(layer, hidden_TD, cache, self._position, **given)
            hidden_TD, attended_TS = result.hidden_TD, result.attended_TS
            caches.append(result.cache)
            if result.selection is not None and result.router_logits_TE is not None:
                selections.append(result.selection)
                router_logits.append(result.router_logits_TE)
        normed_TD = self.normed(hidden_TD)
        logits_TW = self.score(normed_TD if logits == "all" else normed_TD[-1:])

        self._caches, self._selections, self._router_logits, self._hidden_TD = caches, tuple(selections), tuple(router_logits), normed_TD
        self._position += ids.size
        self._count(scope, begin, ids.size, selections)
        return logits_TW

    def reroute(self, routing: RoutingOptions, budget_scopes: Iterable[Scope]) -> None:
        """Route steps from now on by other options, see `LanguageModel.reroute`."""
        scopes = check_scopes(budget_scopes)
        routing.check_layers(len(self._config.moe_layers))
        self._routing, self._budget_scopes = routing, scopes

    def rewind(self, n: int) -> None:
        """Drop the last n positions, and the MTP block's rows from there on.

        Raises:
            RewindError: n is negative or more than `position`.
        """
        if not 0 <= n <= self._position:
            raise RewindError("cannot drop that many positions", where="rewind", expected=f"0 to {self._position}", got=n)
        self._position -= n
        if self._mtp is not None:
            self._mtp.rewind_to(min(self._mtp.position, self._position))

    def reset(self) -> None:
        """Drop all positions; statistics go on."""
        self.rewind(self._position)

    # ---- the pieces, for comparing layer by layer -----------------------------------------------------------------

    def embed(self, tokens: npt.NDArray[np.integer]) -> Float32:
        """float32 [T, D]: the residual stream before the first layer."""
        return look_up_rows(self._embedding(), tokens)

    def layer_step(
        self,
        layer: int,
        hidden_TD: Float32,
        cache: LayerCache,
        start: int,
        *,
        scope: Scope = "prefill",
        rows: Rows = "together",
        row_votes: RowVotes = None,
        attended_TS: npt.NDArray[np.bool_] | None = None,
        selection: Selection | None = None,
    ) -> LayerResult:
        """One trunk layer on a given state, without touching the model's own.

        Args:
            layer: 0-based.
            hidden_TD: float32 [T, D], the layer's input.
            cache: rows 0 … start - 1 of what attention and (full indexer layers) the indexer keep; more rows are ignored.
            start: position of the first row.
            scope, rows, row_votes: for the budget, where no selection is given.
            attended_TS: bool [T, start + T], positions to attend to instead of the indexer's choice (causality applies in
                any case). A layer that shares its choice needs it.
            selection: experts and weights to use instead of the router's.

        Raises:
            ContextOverflowError, ShapeError, NonFiniteActivationError, NonFiniteLogitError.
        """
        if hidden_TD.ndim != 2 or hidden_TD.shape[1] != self._config.hidden_size or hidden_TD.dtype != np.float32:
            expected = f"float32 [T, {self._config.hidden_size}]"
            raise ShapeError("hidden state", where=f"layer {layer}", expected=expected, got=f"{hidden_TD.dtype} {list(hidden_TD.shape)}")
        if cache.kv_SC.shape[0] < start:
            raise ShapeError("cache too short", where=f"layer {layer}", expected=f">= {start} rows", got=cache.kv_SC.shape[0])
        self._check_room(start, hidden_TD.shape[0])
        moe_index = sum(self._config.sparse[:layer])

        def select(logits_TE: Float32, router: RouterSpec) -> Selection:
            options = self._routing.effective(moe_index, "decode" if rows == "alone" else scope, self._budget_scopes)
            return selection or selector(rows, options, row_votes)(logits_TE, router)

        return run_layer(
            self._layer(layer), hidden_TD, cache, start, rope=self._rope, geometry=self._geometry, attended_TS=attended_TS, select=select
        )

    def normed(self, hidden_TD: Float32) -> Float32:
        """float32 [T, D]: the last layer's output through the final norm."""
        return per_row(final_norm, hidden_TD, self._final_norm, zero_of(self._head()[0]), eps=self._config.rms_eps)

    def score(self, normed_TD: Float32) -> Float32:
        """float32 [T, W]: logits of hidden states that went through the final norm (or the MTP block's)."""
        check_finite(normed_TD, "head")
        return score_rows(normed_TD, self._head())

    # ---- MTP ------------------------------------------------------------------------------------------------------

    def mtp_forward(
        self,
        tokens_next: Sequence[int] | npt.NDArray[np.integer],
        trunk_hidden: Float32 | slice,
        *,
        logits: Literal["all", "last"] = "all",
    ) -> Float32:
        """Append rows to the MTP block: row t scores token t + 2.

        The block has its own cache and position (`mtp_position`); rows follow each other without a gap, so `hidden` of every forward is
        fed in turn. To draft on, feed `mtp_hidden` in its place, and drop those rows again. Rows are routed by the options of scope
        `decode`, each by itself (all together where the policy looks at the cache); its steps are counted as "draft".

        Args:
            tokens_next: the token after each row's own.
            trunk_hidden: float32 [n, D], `hidden` at the same rows (or, drafting on, `mtp_hidden`). A slice is rows of `hidden`.
            logits: score every row, or only the last.

        Returns:
            float32 [n, W], or [1, W] with `logits="last"`.

        Raises:
            ConfigError: the model has no MTP block.
            TokenError, ContextOverflowError, ShapeError: nothing was appended.
        """
        begin, block = time.perf_counter(), in_memory(self._mtp)
        check_step("decode", logits, "together", self._routing)
        ids = self._check_tokens(tokens_next, block.position)
        if isinstance(trunk_hidden, slice):
            trunk_hidden = self._hidden_TD[trunk_hidden]
        if trunk_hidden.shape != (expected := (ids.size, self._config.hidden_size)):
            raise ShapeError("trunk hidden state", where="mtp_forward", expected=expected, got=trunk_hidden.shape)
        select = selector(self._routing.rows_of_drafts, self._routing.of_drafts(self._budget_scopes))
        rows = block.forward(self.embed(ids), trunk_hidden, self._rope, self._geometry, select)
        logits_TW = self.score(rows.hidden_TD if logits == "all" else rows.hidden_TD[-1:])
        block.append(rows)
        self._count("draft", begin, ids.size, [rows.selection])
        return logits_TW

    def mtp_rewind(self, n: int) -> None:
        """Drop the MTP block's last n rows.

        Raises:
            RewindError: n is negative or more than `mtp_position`.
        """
        if self._mtp is None or n < 0:
            raise RewindError("cannot drop that many rows", where="mtp_rewind", expected=f"0 to {self.mtp_position}", got=n)
        self._mtp.rewind_to(self._mtp.position - n)

    # ---- parts in memory ------------------------------------------------------------------------------------------

    def _stored(self, role: str) -> StoredArray:
        return check_stored(self._params.get(role), self._specs[role].shape, role)

    def _embedding(self) -> StoredArray:
        return self._parts.get("embed", lambda: self._stored("embed"))

    def _layer(self, layer: int) -> Layer:
        return self._parts.get(layer, lambda: load_layer(self._params, self._config, layer, self._precision, self._expert_residency))

    def _head(self) -> tuple[Matrix, ...]:
        def load() -> tuple[Matrix, ...]:
            # A tied head is the embedding's matrix, but its product is the head's.
            return load_head(self._stored("head" if "head" in self._specs else "embed"), self._precision)

        return self._parts.get("head", load)

    # ---- helpers --------------------------------------------------------------------------------------------------

    def _count(self, scope: StatsScope, begin: float, positions: int, selections: Sequence[Selection]) -> None:
        seconds = time.perf_counter() - begin
        # Phases are not told apart here; the sum of all five is the wall time all the same.
        spent = ScopeStats(steps=1, positions=positions, wall_seconds=seconds, other_seconds=seconds)
        self._scopes[scope] = self._scopes[scope].plus(spent).with_selections(selections)

    def _check_tokens(self, tokens: Sequence[int] | npt.NDArray[np.integer], position: int) -> npt.NDArray[np.int64]:
        ids = check_tokens(tokens, self._config.vocab_size)
        self._check_room(position, ids.size)
        return ids

    def _check_room(self, position: int, n: int) -> None:
        if position + n > self._context:
            got = f"{n} more than {position}"
            raise ContextOverflowError("the step does not fit", where="KV cache", expected=f"at most {self._context} positions", got=got)
