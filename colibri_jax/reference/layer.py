"""One decoder layer, of the trunk or of the MTP block: its weights on the device, and one step through it.

A step is a Python sequence of compiled pieces, so that a layer can be computed alone, with an outside hidden state, cache,
choice of positions or selection of experts, and with only the experts it keeps on the device. Compiled pieces see row and cache
counts rounded up to powers of two; rows added that way are causally last and are cut off again.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from colibri_jax.config import AttentionConfig, GQAConfig, IndexerConfig, MLAConfig, ModelConfig
from colibri_jax.errors import NonFiniteActivationError, NonFiniteLogitError, ShapeError
from colibri_jax.reference import attention, gqa
from colibri_jax.reference.attention import MLAForm, MLAWeights, Rope, load_mla, rms_norm
from colibri_jax.reference.gqa import GQAWeights, load_gqa
from colibri_jax.reference.moe import MLPWeights, MoEWeights, add_experts, mlp, moe, router_logits, weights_by_expert, with_shared
from colibri_jax.reference.quantized import (
    HostMatrix,
    Matrix,
    Precision,
    StoredArray,
    check_stored,
    prepare,
    stack_to_device,
    to_device,
    zero_of,
)
from colibri_jax.reference.sparse_index import IndexerWeights, choose_positions, index_keys, index_scores
from colibri_jax.routing_spec import RouterSpec, Selection
from colibri_jax.tensors import EXPERT_PARTS, TensorSpec, expert_roles, layer_specs

Params = Mapping[str, StoredArray]
Float32 = npt.NDArray[np.float32]
ExpertResidency = Literal["all", "kept"]

_SMALLEST_CACHE_BUCKET = 64
# With residency "kept": a step that keeps hundreds of experts has this many of them on the device at a time.
_EXPERTS_AT_ONCE = 8


class LayerCache(NamedTuple):
    """What a layer remembers of earlier positions, float32: [S, C], C as `cache_width` of the attention's configuration says, and [S, J]
    where it has an indexer of its own."""

    kv_SC: jax.Array | Float32
    index_SJ: jax.Array | Float32 | None


class LayerResult(NamedTuple):
    """What one step through one layer gives; T rows, S = start + T positions.

    `attended_TS` (bool) is the positions each row looked at, None without DSA. `router_logits_TE` and `selection` are
    None in a dense layer.
    """

    hidden_TD: Float32
    cache: LayerCache
    attended_TS: npt.NDArray[np.bool_] | None
    router_logits_TE: Float32 | None
    selection: Selection | None


class _AttentionBlock(NamedTuple):
    norm: jax.Array
    heads: MLAWeights | GQAWeights
    indexer: IndexerWeights | None
    mlp_norm: jax.Array


@dataclasses.dataclass(frozen=True, eq=False)
class Layer:
    """One layer's weights on the device (those of its routed experts perhaps not), and how to load more.

    `router` carries the correction bias; it is None in a dense layer, as `dense` is in a sparse one.
    """

    name: str
    attention: _AttentionBlock
    dense: MLPWeights | None
    router: RouterSpec | None
    router_weight: jax.Array | None
    shared: MLPWeights | None
    experts: MLPWeights | None
    load_experts: Callable[[Sequence[int]], MLPWeights]


@dataclasses.dataclass(frozen=True)
class Geometry:
    """What compiled pieces need to know besides arrays."""

    attention: AttentionConfig
    indexer: IndexerConfig | None
    eps: float
    form: MLAForm


def load_layer(params: Params, config: ModelConfig, layer: int, precision: Precision, residency: ExpertResidency = "all") -> Layer:
    """Put one trunk layer on the device, or the MTP block's (`layer == n_layers`).

    Args:
        params: by role; read when called, experts only when they are put on the device.
        residency: "all" loads every routed expert now, "kept" loads those that a step keeps, in that step.

    Raises:
        MissingTensorError, ShapeError, OptionError: as `check_stored` and `prepare` say.
    """
    specs = {spec.role: spec for spec in layer_specs(config, layer)}
    prefix = f"layers.{layer}"

    def get(name: str) -> Matrix:
        return to_device(_load(params, specs[f"{prefix}.{name}"], precision))

    def vector(name: str) -> jax.Array:
        array = get(name)
        assert isinstance(array, jax.Array)
        return array

    def optional(name: str) -> jax.Array | None:
        return vector(name) if f"{prefix}.{name}" in specs else None

    block = _AttentionBlock(
        norm=vector("attn_norm"),
        heads=load_mla(get, vector, config.attention) if isinstance(config.attention, MLAConfig) else load_gqa(get, optional),
        indexer=(
            IndexerWeights(
                wq_b=get("indexer.wq_b"),
                wk=get("indexer.wk"),
                k_norm_weight=vector("indexer.k_norm_weight"),
                k_norm_bias=vector("indexer.k_norm_bias"),
                weights_proj=get("indexer.weights_proj"),
            )
            if f"{prefix}.indexer.wk" in specs
            else None
        ),
        mlp_norm=vector("mlp_norm"),
    )

    def load_mlp(name: str) -> MLPWeights | None:
        return MLPWeights(*(get(f"{name}.{part}") for part in EXPERT_PARTS)) if f"{prefix}.{name}.gate" in specs else None

    def load_experts(ids: Sequence[int]) -> MLPWeights:
        return _load_experts(params, specs, layer, ids, precision)

    sparse = f"{prefix}.router.weight" in specs
    router = config.moe.router if sparse else None
    if router is not None and f"{prefix}.router.bias" in specs:
        router = dataclasses.replace(router, bias=np.asarray(vector("router.bias")))
    return Layer(
        name=f"layer {layer}",
        attention=block,
        dense=load_mlp("mlp"),
        router=router,
        router_weight=vector("router.weight") if sparse else None,
        shared=load_mlp("shared"),
        experts=load_experts(range(config.moe.n_experts)) if sparse and residency == "all" else None,
        load_experts=load_experts,
    )


def run_layer(
    layer: Layer,
    hidden_TD: Float32,
    cache: LayerCache,
    start: int,
    *,
    rope: tuple[Float32, Float32],
    geometry: Geometry,
    attended_TS: npt.NDArray[np.bool_] | None,
    select: Callable[[Float32, RouterSpec], Selection],
) -> LayerResult:
    """Take T rows at positions start … start + T - 1 through one layer.

    Args:
        hidden_TD: float32 residual stream.
        cache: at least `start` valid rows; it is not modified.
        rope: cos and sin tables over all positions.
        attended_TS: the choice of positions to use instead of the layer's own; layers that share one need it.
        select: from float32 [T, E] router logits and the router to the selection of experts.

    Raises:
        NonFiniteActivationError: attention or the experts made a value that is not finite.
        NonFiniteLogitError: from `select`, naming the layer as well.
        ShapeError: `attended_TS` or the selection does not fit the step.
    """
    n_rows, n_total = hidden_TD.shape[0], start + hidden_TD.shape[0]
    rows, cached = bucket(n_rows), max(bucket(max(n_total, cache.kv_SC.shape[0])), _SMALLEST_CACHE_BUCKET)
    if geometry.indexer is not None and layer.attention.indexer is None and attended_TS is None:
        raise ShapeError("a layer that shares its choice of positions needs one", where=layer.name, expected="attended_TS", got="nothing")
    if attended_TS is not None and attended_TS.shape != (n_rows, n_total):
        raise ShapeError("attended_TS", where=layer.name, expected=[n_rows, n_total], got=list(attended_TS.shape))
    given = None if attended_TS is None else jnp.asarray(_fit(_fit(np.asarray(attended_TS, bool), rows, 0), cached, 1))
    steps = np.minimum(np.arange(start, start + rows), rope[0].shape[0] - 1)
    hidden, mlp_input, new_cache, attended = _attention_block(
        layer.attention,
        jnp.asarray(_fit(hidden_TD, rows, 0)),
        _grown(cache, cached),
        np.int32(start),
        np.int32(n_rows),
        rope=Rope(jnp.asarray(rope[0][steps]), jnp.asarray(rope[1][steps])),
        attended_TS=given,
        geometry=geometry,
    )
    check_finite(np.asarray(hidden)[:n_rows], f"{layer.name}, attention")

    logits_TE, selection = None, None
    if layer.dense is not None:
        hidden = _dense_block(hidden, mlp_input, layer.dense)
    else:
        assert layer.router is not None
        assert layer.router_weight is not None
        logits_TE = np.asarray(router_logits(mlp_input, layer.router_weight))[:n_rows]
        try:
            selection = select(logits_TE, layer.router)
        except NonFiniteLogitError as error:
            where = f"{layer.name}, {error.where}"
            raise NonFiniteLogitError(error.what, where=where, expected=error.expected, got=error.got) from error
        if selection.ids.shape[0] != n_rows or selection.ids.max() >= logits_TE.shape[1]:
            expected = f"{n_rows} rows of ids below {logits_TE.shape[1]}"
            raise ShapeError(
                "selection", where=layer.name, expected=expected, got=f"{selection.ids.shape[0]} rows up to {selection.ids.max()}"
            )
        if layer.experts is None:
            hidden = _moe_by_parts(layer, hidden, mlp_input, selection, rows)
        else:
            weights_TE = weights_by_expert(selection, np.arange(logits_TE.shape[1]), rows)
            hidden = _moe_block(hidden, mlp_input, MoEWeights(layer.experts, layer.shared), weights_TE)
    result_TD = np.asarray(hidden)[:n_rows]
    check_finite(result_TD, f"{layer.name}, MLP")
    attended_out = None if attended is None else np.asarray(attended)[:n_rows, :n_total]
    return LayerResult(result_TD, new_cache, attended_out, logits_TE, selection)


def empty_cache(config: ModelConfig, layer: int) -> LayerCache:
    """The cache of no positions, of a trunk layer or the MTP block's (`layer == n_layers`). Caches grow by powers of two."""
    index = None
    if config.indexer is not None and (layer == config.n_layers or config.indexer.kinds[layer] == "full"):
        index = np.zeros((_SMALLEST_CACHE_BUCKET, config.indexer.head_dim), np.float32)
    return LayerCache(np.zeros((_SMALLEST_CACHE_BUCKET, config.attention.cache_width), np.float32), index)


def bucket(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << max(n - 1, 0).bit_length()


# ---- compiled pieces --------------------------------------------------------------------------------------------


@functools.partial(jax.jit, static_argnames="geometry")
def _attention_block(
    weights: _AttentionBlock,
    hidden_TD: jax.Array,
    cache: LayerCache,
    start: jax.Array,
    n_rows: jax.Array,
    *,
    rope: Rope,
    attended_TS: jax.Array | None,
    geometry: Geometry,
) -> tuple[jax.Array, jax.Array, LayerCache, jax.Array | None]:
    """Attention with its residual; returns the new residual, its norm (the MLP's input), the cache and the choice."""
    zero = zero_of(weights.heads.o)
    x_TD = rms_norm(hidden_TD, weights.norm, geometry.eps, zero)
    latent_TQ, queries, new_TC = _project(weights.heads, x_TD, rope, geometry)

    rows_T = jnp.arange(hidden_TD.shape[0], dtype=jnp.int32)
    n_cached = cache.kv_SC.shape[0]
    # Rows past n_rows get a position outside the cache, where a scatter drops them.
    target_T = jnp.where(rows_T < n_rows, start + rows_T, n_cached)
    kv_SC = jnp.asarray(cache.kv_SC).at[target_T].set(new_TC, mode="drop")
    visible_TS = jnp.arange(n_cached, dtype=jnp.int32)[None, :] <= (start + rows_T)[:, None]

    index_SJ = cache.index_SJ
    if weights.indexer is not None and geometry.indexer is not None:
        assert index_SJ is not None
        assert latent_TQ is not None
        index_SJ = jnp.asarray(index_SJ).at[target_T].set(index_keys(x_TD, weights.indexer, rope, zero), mode="drop")
        if attended_TS is None:
            scores_TS = index_scores(x_TD, latent_TQ, index_SJ, weights.indexer, rope, indexer=geometry.indexer, zero=zero)
            attended_TS = choose_positions(scores_TS, visible_TS, geometry.indexer.topk)
    looked_at_TS = visible_TS if attended_TS is None else (visible_TS & attended_TS) | (rows_T >= n_rows)[:, None]
    hidden_TD = hidden_TD + _attend(weights.heads, queries, kv_SC, looked_at_TS, geometry)
    return hidden_TD, rms_norm(hidden_TD, weights.mlp_norm, geometry.eps, zero), LayerCache(kv_SC, index_SJ), attended_TS


def _project(
    heads: MLAWeights | GQAWeights, x_TD: jax.Array, rope: Rope, geometry: Geometry
) -> tuple[jax.Array | None, tuple[jax.Array, ...], jax.Array]:
    """Of the new positions: the query latent (MLA only), queries as `_attend` takes them, rows for the cache."""
    shape = geometry.attention
    if isinstance(heads, MLAWeights):
        assert isinstance(shape, MLAConfig)
        latent_TQ, *queries = attention.project_queries(x_TD, heads, rope, shape)
        return latent_TQ, tuple(queries), attention.project_latent(x_TD, heads, rope, shape)
    assert isinstance(shape, GQAConfig)
    query_THV = gqa.project_queries(x_TD, heads, rope, shape, geometry.eps)
    return None, (query_THV,), gqa.project_keys_values(x_TD, heads, rope, shape, geometry.eps)


def _attend(
    heads: MLAWeights | GQAWeights, queries: tuple[jax.Array, ...], kv_SC: jax.Array, attended_TS: jax.Array, geometry: Geometry
) -> jax.Array:
    """Attention and its output projection, float32 [T, D]."""
    shape = geometry.attention
    if isinstance(heads, MLAWeights):
        assert isinstance(shape, MLAConfig)
        query_THN, rotated_THR = queries
        return attention.attend(query_THN, rotated_THR, kv_SC, attended_TS, heads, mla=shape, form=geometry.form)
    assert isinstance(shape, GQAConfig)
    return gqa.attend(queries[0], kv_SC, attended_TS, heads, shape)


@jax.jit
def _dense_block(hidden_TD: jax.Array, x_TD: jax.Array, weights: MLPWeights) -> jax.Array:
    return hidden_TD + mlp(x_TD, weights)


@jax.jit
def _moe_block(hidden_TD: jax.Array, x_TD: jax.Array, weights: MoEWeights, weights_TE: jax.Array) -> jax.Array:
    return hidden_TD + moe(x_TD, weights, weights_TE)


_add_experts = jax.jit(add_experts)


@jax.jit
def _end_of_moe(hidden_TD: jax.Array, routed_TD: jax.Array, x_TD: jax.Array, shared: MLPWeights | None) -> jax.Array:
    return hidden_TD + with_shared(routed_TD, x_TD, shared)


# ---- helpers ----------------------------------------------------------------------------------------------------


def _moe_by_parts(layer: Layer, hidden_TD: jax.Array, x_TD: jax.Array, selection: Selection, rows: int) -> jax.Array:
    """As `_moe_block`, with the kept experts loaded and dropped a few at a time."""
    kept, routed_TD = [int(expert) for expert in selection.kept], jnp.zeros_like(x_TD)
    for begin in range(0, len(kept), _EXPERTS_AT_ONCE):
        some = kept[begin : begin + _EXPERTS_AT_ONCE]
        # Filled up with an expert that has no weight, so that the number of kept experts is not part of compiled shapes.
        ids = some + some[-1:] * (bucket(len(some)) - len(some))
        weights_TE = weights_by_expert(selection, np.asarray(ids), rows)
        weights_TE[:, len(some) :] = 0.0
        routed_TD = _add_experts(routed_TD, x_TD, layer.load_experts(ids), weights_TE)
        routed_TD.block_until_ready()  # before the next ones are loaded: what is still computing keeps its experts
    end_TD: jax.Array = _end_of_moe(hidden_TD, routed_TD, x_TD, layer.shared)
    return end_TD


def _load(params: Params, spec: TensorSpec, precision: Precision) -> HostMatrix:
    value = check_stored(params.get(spec.role), spec.shape, spec.role)
    return prepare(value, storage=spec.storage, precision=precision, role=spec.role)


def _load_experts(params: Params, specs: Mapping[str, TensorSpec], layer: int, ids: Sequence[int], precision: Precision) -> MLPWeights:
    def stack(part: int) -> Matrix:
        loaded = {expert: _load(params, specs[expert_roles(layer, expert)[part]], precision) for expert in dict.fromkeys(ids)}
        return stack_to_device([loaded[expert] for expert in ids])

    return MLPWeights(*map(stack, range(len(EXPERT_PARTS))))


def _grown(cache: LayerCache, size: int) -> LayerCache:
    """The cache with room for `size` positions; left where it is if it has that already."""

    def grow(part: jax.Array | Float32) -> jax.Array | Float32:
        return part if part.shape[0] == size else _fit(np.asarray(part), size, 0)

    return LayerCache(grow(cache.kv_SC), None if cache.index_SJ is None else grow(cache.index_SJ))


def _fit(array: npt.NDArray[Any], size: int, axis: int) -> npt.NDArray[Any]:
    """Cut, or filled up with zeros, to `size` along one axis."""
    cut = np.take(array, np.arange(min(size, array.shape[axis])), axis=axis) if array.shape[axis] > size else array
    missing = [(0, size - cut.shape[axis]) if i == axis else (0, 0) for i in range(array.ndim)]
    return np.pad(cut, missing) if cut.shape[axis] < size else cut


def check_finite(rows_TD: Float32, where: str) -> None:
    finite_T = np.isfinite(rows_TD).all(axis=1)
    if not finite_T.all():
        raise NonFiniteActivationError(
            "non-finite activation", where=f"{where}, row {int(np.argmin(finite_T))} of the step", expected="finite", got="NaN or infinity"
        )
