"""The MTP block: one extra decoder layer that scores the token after next from the trunk's hidden state and the next token.

Source: DeepSeek-V3 (arXiv 2412.19437) §2.2. Row t joins the embedding of token t + 1 with the trunk's hidden state of position t
(taken after the trunk's final norm), and keeps rope position t. Embedding and head are the trunk's. The decoder layer is
the trunk's own code, router included; its indexer is always a full one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from colibri_jax.config import ModelConfig
from colibri_jax.errors import ConfigError, RewindError
from colibri_jax.reference.attention import final_norm, rms_norm
from colibri_jax.reference.layer import (
    ExpertResidency,
    Float32,
    Geometry,
    Layer,
    LayerCache,
    Params,
    bucket,
    empty_cache,
    load_layer,
    run_layer,
)
from colibri_jax.reference.quantized import Matrix, Precision, check_stored, prepare, product, to_device, zero_of
from colibri_jax.routing_spec import RouterSpec, Selection
from colibri_jax.tensors import mtp_specs


class _Joint(NamedTuple):
    enorm: jax.Array
    hnorm: jax.Array
    eh_proj: Matrix
    norm: jax.Array


class MTPRows(NamedTuple):
    """What a call of the block made: float32 [T, D] for the shared head, normed; the layer's selection; the cache after it."""

    hidden_TD: Float32
    selection: Selection
    cache: LayerCache


class MTPBlock:
    """The block's weights and its own KV cache, which follows the trunk's at its own pace.

    `position` is the number of its rows; `hidden_TD` (float32 [T, D], normed) and `selection` are of the last call that was appended.
    """

    def __init__(self, params: Params, config: ModelConfig, precision: Precision, residency: ExpertResidency) -> None:
        specs = {spec.role: spec for spec in mtp_specs(config) if spec.role.startswith("mtp.")}

        def get(name: str) -> Matrix:
            spec = specs[f"mtp.{name}"]
            value = check_stored(params.get(spec.role), spec.shape, spec.role)
            return to_device(prepare(value, storage=spec.storage, precision=precision, role=spec.role))

        enorm, hnorm, norm = (get(name) for name in ("enorm", "hnorm", "norm"))
        assert isinstance(enorm, jax.Array)
        assert isinstance(hnorm, jax.Array)
        assert isinstance(norm, jax.Array)
        self._joint = _Joint(enorm, hnorm, get("eh_proj"), norm)
        self._config = config
        self._layer: Layer = load_layer(params, config, config.n_layers, precision, residency)
        self._cache: LayerCache = empty_cache(config, config.n_layers)
        self.position = 0
        self.hidden_TD: Float32 = np.zeros((0, config.hidden_size), np.float32)
        self.selection: Selection | None = None

    def forward(
        self,
        embedding_TD: Float32,
        trunk_TD: Float32,
        rope: tuple[Float32, Float32],
        geometry: Geometry,
        select: Callable[[Float32, RouterSpec], Selection],
    ) -> MTPRows:
        """Compute T rows; `append` makes them the block's.

        Args:
            embedding_TD: float32, embeddings of tokens position + 1 … position + T.
            trunk_TD: float32, the trunk's hidden state of positions position … position + T - 1, after its final norm.
            rope, geometry, select: as in `run_layer`.
        """
        n_rows = embedding_TD.shape[0]
        missing = ((0, bucket(n_rows) - n_rows), (0, 0))
        joined_TD = _join(self._joint, jnp.asarray(np.pad(embedding_TD, missing)), jnp.asarray(np.pad(trunk_TD, missing)), eps=geometry.eps)
        result = run_layer(
            self._layer,
            np.asarray(joined_TD)[:n_rows],
            self._cache,
            self.position,
            rope=rope,
            geometry=geometry,
            attended_TS=None,
            select=select,
        )
        normed_TD = final_norm(
            jnp.asarray(np.pad(result.hidden_TD, missing)), self._joint.norm, zero_of(self._joint.eh_proj), eps=geometry.eps
        )
        assert result.selection is not None  # the block's layer is never dense
        return MTPRows(np.asarray(normed_TD)[:n_rows], result.selection, result.cache)

    def append(self, rows: MTPRows) -> None:
        """Keep what `forward` computed at the present position."""
        self.hidden_TD, self.selection, self._cache = rows
        self.position += rows.hidden_TD.shape[0]

    def rewind_to(self, position: int) -> None:
        """Forget the rows from `position` on.

        Raises:
            RewindError: there are fewer rows than that.
        """
        if not 0 <= position <= self.position:
            raise RewindError("no such row", where="MTP block", expected=f"0 to {self.position}", got=position)
        self.position = position


def in_memory(block: MTPBlock | None) -> MTPBlock:
    """The block.

    Raises:
        ConfigError: there is none.
    """
    if block is None:
        where, expected = "num_nextn_predict_layers, layer_residency", "1, all"
        raise ConfigError("the model has no MTP block in memory", where=where, expected=expected, got="none")
    return block


@functools.partial(jax.jit, static_argnames="eps")
def _join(weights: _Joint, embedding_TD: jax.Array, trunk_TD: jax.Array, *, eps: float) -> jax.Array:
    zero = zero_of(weights.eh_proj)
    halves = [rms_norm(embedding_TD, weights.enorm, eps, zero), rms_norm(trunk_TD, weights.hnorm, eps, zero)]
    return product(jnp.concatenate(halves, axis=1), weights.eh_proj)
