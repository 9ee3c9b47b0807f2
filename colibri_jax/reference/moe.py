"""MLPs: dense, shared and routed experts, and the router's logits. Which experts a position gets is decided in `routing`."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from colibri_jax.reference import ordered
from colibri_jax.reference.quantized import Matrix, product, zero_of
from colibri_jax.routing_spec import Selection


class MLPWeights(NamedTuple):
    """A gated MLP, or a stack of n of them (every array with a leading dimension n)."""

    gate: Matrix
    up: Matrix
    down: Matrix


class MoEWeights(NamedTuple):
    """The experts of one layer that are on the device.

    Attributes:
        experts: a stack of n routed experts, ascending by id.
        shared: the fused shared experts, or None.
    """

    experts: MLPWeights
    shared: MLPWeights | None


def mlp(x_TD: jax.Array, weights: MLPWeights) -> jax.Array:
    """down(silu(gate x) · up x), float32 [T, D]."""
    zero = zero_of(weights.gate)
    gate_TF = product(x_TD, weights.gate)
    gate_TF = jax.nn.silu(gate_TF) if zero is None else ordered.silu(gate_TF, zero)
    return product(gate_TF * product(x_TD, weights.up), weights.down)


def router_logits(x_TD: jax.Array, weight_ED: jax.Array) -> jax.Array:
    """float32 [T, E]: float32 inputs and weights, summed in float64 (in order: see `ordered`), rounded once."""
    with jax.enable_x64(True):
        logits_TE: jax.Array = _router_logits(x_TD, weight_ED)
    return logits_TE


@jax.jit
def _router_logits(x_TD: jax.Array, weight_ED: jax.Array) -> jax.Array:
    x_TD, weight_ED = x_TD.astype(jnp.float64), weight_ED.astype(jnp.float64)
    return ordered.dot_float64(x_TD[:, None, :], weight_ED[None, :, :]).astype(jnp.float32)


def weights_by_expert(selection: Selection, ids: npt.NDArray[np.integer], n_rows: int) -> npt.NDArray[np.float32]:
    """A selection as a dense float32 [n_rows, len(ids)] matrix: column j is expert ids[j]; rows past the selection are 0.

    Experts whose weight is 0 contribute nothing, so an unused expert and one of weight 0 need no telling apart.
    """
    dense = np.zeros((n_rows, int(max(ids.max(initial=-1), selection.ids.max(initial=-1))) + 2), np.float32)
    positions = np.arange(selection.ids.shape[0])[:, None]
    dense[positions, selection.ids] = selection.weights  # empty slots (-1) land in the last column, which no id names
    return dense[:, ids]


def moe(x_TD: jax.Array, weights: MoEWeights, weights_TE: jax.Array) -> jax.Array:
    """Routed experts in ascending id, each output times its weight, then the shared experts unscaled; float32 [T, D].

    Args:
        x_TD: the layer's normed input.
        weights: n experts on the device.
        weights_TE: as in `add_experts`.
    """
    return with_shared(add_experts(jnp.zeros_like(x_TD), x_TD, weights.experts, weights_TE), x_TD, weights.shared)


def with_shared(routed_TD: jax.Array, x_TD: jax.Array, shared: MLPWeights | None) -> jax.Array:
    """What the routed experts made, plus the shared ones, float32 [T, D]."""
    return routed_TD if shared is None else routed_TD + mlp(x_TD, shared)


def add_experts(sum_TD: jax.Array, x_TD: jax.Array, experts: MLPWeights, weights_TE: jax.Array) -> jax.Array:
    """A sum of experts' outputs with more experts added, one after the other, float32 [T, D].

    The sum goes by ascending id, so that calls with one part of the experts after the other give the bits of a single call.

    Args:
        sum_TD: of the experts before; zeros at first.
        x_TD: the layer's normed input.
        experts: a stack of n, ascending by id.
        weights_TE: float32 [T, n], 0 where a position does not use an expert. Experts that nobody uses are skipped.
    """

    def add_expert(sum_TD: jax.Array, expert: tuple[MLPWeights, jax.Array]) -> tuple[jax.Array, None]:
        matrices, weight_T = expert
        zero = zero_of(matrices.gate)

        def add(sum_TD: jax.Array) -> jax.Array:
            # Not a product with 0: what an expert makes of a row that did not choose it may be infinite.
            term_TD = weight_T[:, None] * mlp(x_TD, matrices)
            if zero is not None:
                term_TD = ordered.separate(term_TD, zero)
            return sum_TD + jnp.where(weight_T[:, None] != 0.0, term_TD, 0.0)

        return jax.lax.cond(jnp.any(weight_T != 0.0), add, lambda sum_TD: sum_TD, sum_TD), None

    total_TD: jax.Array = jax.lax.scan(add_expert, sum_TD, (experts, weights_TE.T))[0]
    return total_TD
