"""Experts: order, weights, skipping, shared experts; and router logits in float64."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from oracles import kernels as oracle
from oracles.quantized_product import quantized_product

from colibri_jax.quant import quantize_int4
from colibri_jax.reference.moe import MLPWeights, MoEWeights, mlp, moe, router_logits, weights_by_expert
from colibri_jax.reference.quantized import grouped, stack_to_device
from colibri_jax.routing_spec import Selection

WIDTH, HIDDEN, EXPERTS, ROWS = 11, 7, 6, 5
EPS32 = np.finfo(np.float32).eps

compiled_moe = jax.jit(moe)


def random_stack(rng: np.random.Generator, n: int) -> MLPWeights:
    shapes = ((n, HIDDEN, WIDTH), (n, HIDDEN, WIDTH), (n, WIDTH, HIDDEN))
    return MLPWeights(*(jnp.asarray(rng.standard_normal(shape).astype(np.float32)) for shape in shapes))


def one_of(stack: MLPWeights, index: int) -> MLPWeights:
    return MLPWeights(*(matrix[index] for matrix in stack))


def mlp_in_float64(x: np.ndarray, weights: MLPWeights) -> np.ndarray:
    gate, up, down = (np.asarray(matrix, np.float64) for matrix in weights)
    activated = x.astype(np.float64) @ gate.T
    return (activated / (1 + np.exp(-activated)) * (x @ up.T)) @ down.T


def random_case(seed: int) -> tuple[MLPWeights, MLPWeights, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    weights = rng.random((ROWS, EXPERTS)).astype(np.float32) * (rng.random((ROWS, EXPERTS)) < 0.5)
    return (
        random_stack(rng, EXPERTS),
        one_of(random_stack(rng, 1), 0),
        rng.standard_normal((ROWS, WIDTH)).astype(np.float32),
        weights.astype(np.float32),
    )


def test_output_is_the_weighted_sum_plus_unscaled_shared_experts() -> None:
    experts, shared, x, weights = random_case(1)
    routed = sum(weights[:, e, None] * mlp_in_float64(x, one_of(experts, e)) for e in range(EXPERTS))
    expected = routed + mlp_in_float64(x, shared)
    tolerance = 8 * (WIDTH + HIDDEN + EXPERTS) * EPS32 * np.abs(expected).max()
    assert np.abs(np.asarray(compiled_moe(x, MoEWeights(experts, shared), weights)) - expected).max() < tolerance
    assert np.abs(np.asarray(compiled_moe(x, MoEWeights(experts, None), weights)) - routed).max() < tolerance
    assert np.abs(routed - expected).max() > tolerance


def test_experts_add_up_in_ascending_id() -> None:
    """Outputs of 2^24, 1, 1 and -2^24 give different sums in different orders; ascending gives 0."""
    values = np.array([2.0**24, 1.0, 1.0, -(2.0**24)], np.float32)
    # One input that is 1; silu(128) is 128 in float32, and up is 1 / 128, so that down is the output.
    ones = np.ones((4, 1, 1), np.float32)
    stack = MLPWeights(jnp.asarray(128 * ones), jnp.asarray(ones / 128), jnp.asarray(values[:, None, None]))
    out = compiled_moe(np.ones((1, 1), np.float32), MoEWeights(stack, None), np.ones((1, 4), np.float32))
    total = np.float32(0)
    for value in values:
        total = np.float32(total + value)
    assert float(np.asarray(out)[0, 0]) == total == 0.0
    reverse = np.float32(np.float32(np.float32(values[1] + values[2]) + values[0]) + values[3])
    assert reverse != total


def test_experts_that_a_row_did_not_choose_cannot_reach_it() -> None:
    experts, shared, x, weights = random_case(2)
    weights[:, 3] = 0.0
    weights[:, 4] = [1, 0, 0, 0, 0]
    before = np.asarray(compiled_moe(x, MoEWeights(experts, shared), weights))
    poisoned = MLPWeights(experts.gate, experts.up, experts.down.at[3].set(jnp.nan).at[4].set(jnp.inf))
    after = np.asarray(compiled_moe(x, MoEWeights(poisoned, shared), weights))
    np.testing.assert_array_equal(before[1:], after[1:])
    assert not np.isfinite(after[0]).all()


def test_a_stack_of_kept_experts_gives_the_same_sum() -> None:
    experts, shared, x, weights = random_case(3)
    kept = [0, 2, 5]
    weights[:, [1, 3, 4]] = 0.0
    all_there = np.asarray(compiled_moe(x, MoEWeights(experts, shared), weights))
    few = MLPWeights(*(matrix[jnp.asarray(kept)] for matrix in experts))
    only_kept = np.asarray(compiled_moe(x, MoEWeights(few, shared), weights[:, kept]))
    np.testing.assert_allclose(all_there, only_kept, atol=8 * EPS32 * np.abs(all_there).max())


def test_selection_becomes_a_dense_matrix_by_expert_id() -> None:
    ids = np.array([[4, 1, -1], [0, 4, 2], [-1, -1, -1]], np.int32)
    weights = np.array([[0.5, 0.25, 0.0], [1.0, 2.0, 3.0], [0, 0, 0]], np.float32)
    selection = Selection(
        ids=ids,
        weights=weights,
        kept=np.array([0, 1, 2, 4], np.int32),
        union_size=4,
        dropped=0,
        dropped_slots=0,
        emptied_positions=1,
        mass_kept=1.0,
    )
    dense = weights_by_expert(selection, np.arange(6), 4)
    expected = np.zeros((4, 6), np.float32)
    expected[0, [4, 1]] = 0.5, 0.25
    expected[1, [0, 4, 2]] = 1, 2, 3
    np.testing.assert_array_equal(dense, expected)
    np.testing.assert_array_equal(weights_by_expert(selection, np.array([2, 4]), 3), expected[:3, [2, 4]])


def test_router_logits_sum_in_float64_and_round_once() -> None:
    x = np.array([[2.0**24, 1.0, 1.0, -(2.0**24)], [1.0, 2.0**-30, 2.0**-50, 0.0]], np.float32)
    logits = np.asarray(router_logits(x, np.ones((3, 4), np.float32)))
    assert logits.dtype == np.float32
    np.testing.assert_array_equal(logits, [[2.0] * 3, [1.0] * 3])
    rng = np.random.default_rng(4)
    x, weight = rng.standard_normal((9, 200)).astype(np.float32), rng.standard_normal((13, 200)).astype(np.float32)
    exact = (x.astype(np.float64) @ weight.astype(np.float64).T).astype(np.float32)
    # Two float64 orders can fall on both sides of a float32 midpoint only with odds of about 200 * 2^-29 per value.
    np.testing.assert_array_equal(np.asarray(router_logits(x, weight)), exact)


def test_products_of_a_compiled_expert_are_bit_equal_to_the_oracle() -> None:
    """Inside the loop over experts, with everything around them, quantised products keep their roundings."""
    rng = np.random.default_rng(6)
    matrices = [
        [quantize_int4(rng.standard_normal(shape).astype(np.float32), 16) for shape in ((40, 50), (40, 50), (50, 40))] for _ in range(3)
    ]
    stack = MLPWeights(*(stack_to_device([grouped(expert[part]) for expert in matrices]) for part in range(3)))
    x = rng.standard_normal((4, 50)).astype(np.float32)
    for index, (gate, up, down) in enumerate(matrices):
        hidden = oracle.silu_mul(quantized_product(x, gate), quantized_product(x, up))
        expected = quantized_product(hidden, down)
        weights = np.zeros((4, 3), np.float32)
        weights[:, index] = 1.0
        np.testing.assert_array_equal(np.asarray(compiled_moe(x, MoEWeights(stack, None), weights)), expected)


def test_mlp_is_gated_by_silu() -> None:
    _, shared, x, _ = random_case(5)
    expected = mlp_in_float64(x, shared)
    np.testing.assert_allclose(
        np.asarray(mlp(jnp.asarray(x), shared)), expected, atol=8 * (WIDTH + HIDDEN) * EPS32 * np.abs(expected).max()
    )
