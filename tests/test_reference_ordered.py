"""float32 arithmetic in the contract's order: bit-equal to the NumPy oracle and to the native kernels, wherever it is compiled into.

Every function is compiled between a doubling of its input (exact) and an addition to its result, which a compiler would like to
fuse with it, and inside loops as the model has them.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import kernels as oracle

from colibri_jax._native import kernels as native
from colibri_jax.reference import ordered

Arrays = tuple[np.ndarray, ...]
EPS = 1e-5
ROWS = 8
LENGTHS = (1, 2, 15, 16, 17, 33, 97, 255, 300)
LOOP_LENGTHS = (17, 97)
EXP_CONSTANTS = Path(__file__).parent.parent / "native" / "src" / "kernels" / "exp_constants.h"


def floats(rng: np.random.Generator, *shape: int, spread: int = 6) -> np.ndarray:
    """Normal values over several binades, with zeros of both signs."""
    values = (rng.standard_normal(shape) * 2.0 ** rng.integers(-spread, spread + 1, shape)).astype(np.float32)
    values.reshape(-1)[5::11] = -0.0
    values.reshape(-1)[7::13] = 0.0
    return values


def in_place(kernel: Callable[..., None], x: np.ndarray, *arguments: Any) -> np.ndarray:
    """What a native kernel with an output writes."""
    y = np.zeros(x.size, np.float32)
    kernel("scalar", np.ascontiguousarray(x), *arguments, y)
    return y


def native_softmax(x: np.ndarray) -> np.ndarray:
    y = x.copy()
    native.softmax("scalar", y)
    return y


def native_mix(shares: np.ndarray, rows: np.ndarray) -> np.ndarray:
    total = np.zeros(rows.shape[1], np.float32)
    for share, row in zip(shares, rows, strict=True):
        native.axpy("scalar", float(share), row.copy(), total)
    return total


def oracle_mix(shares: np.ndarray, rows: np.ndarray) -> np.ndarray:
    total = np.zeros(rows.shape[1], np.float32)
    for share, row in zip(shares, rows, strict=True):
        total = total + share * row
    return total


def oracle_sum(x: np.ndarray) -> np.float32:
    total = np.float32(0)
    for value in x:
        total = total + value
    return total


def ones(n: int) -> np.ndarray:
    return np.ones(n, np.float32)


@dataclasses.dataclass(frozen=True)
class Function:
    """One function of `ordered`, on one row: its first argument varies by row, the others are shared.

    `native` is None where no kernel does only this.
    """

    compiled: Callable[..., jax.Array]
    inputs: Callable[[np.random.Generator, int], Arrays]
    oracle: Callable[..., Any]
    native: Callable[..., Any] | None


FUNCTIONS = {
    "dot": Function(
        ordered.dot, lambda rng, n: (floats(rng, ROWS, n), floats(rng, n)), oracle.dot, lambda x, w: native.dot("scalar", x, w)
    ),
    "join": Function(
        lambda x, zero: ordered.join(x),
        lambda rng, n: (floats(rng, ROWS, 16),),
        oracle.join,
        lambda x: native.dot("scalar", x, ones(16)),
    ),
    "sum_in_order": Function(ordered.sum_in_order, lambda rng, n: (floats(rng, ROWS, n),), oracle_sum, None),
    "softmax": Function(
        lambda x, zero: ordered.softmax(x, jnp.ones(x.shape, bool), zero),
        lambda rng, n: (floats(rng, ROWS, n, spread=3),),
        oracle.softmax,
        native_softmax,
    ),
    "exp": Function(ordered.exp, lambda rng, n: (rng.uniform(-43, 44, (ROWS, n)).astype(np.float32),), oracle.exp, None),
    "silu": Function(
        ordered.silu,
        lambda rng, n: (rng.uniform(-60, 60, (ROWS, n)).astype(np.float32),),
        lambda x: oracle.silu_mul(x, ones(x.size)),
        lambda x: in_place(native.silu_mul, x, ones(x.size)),
    ),
    "rms_norm": Function(
        lambda x, w, zero: ordered.rms_norm(x, w, EPS, zero),
        lambda rng, n: (floats(rng, ROWS, n), floats(rng, n)),
        lambda x, w: oracle.rms_norm(x, w, EPS),
        lambda x, w: in_place(native.rms_norm, x, w, EPS),
    ),
    "layer_norm": Function(
        lambda x, w, b, zero: ordered.layer_norm(x, w, b, EPS, zero),
        lambda rng, n: (floats(rng, ROWS, n), floats(rng, n), floats(rng, n)),
        lambda x, w, b: oracle.layer_norm(x, w, b, EPS),
        lambda x, w, b: in_place(native.layer_norm, x, w, b, EPS),
    ),
    "mix_in_order": Function(ordered.mix_in_order, lambda rng, n: (floats(rng, ROWS, n), floats(rng, n, 5)), oracle_mix, native_mix),
}


def compile_row(function: Function, loop: str) -> Callable[..., jax.Array]:
    """The function on all rows, doubled input: result, and result plus `bias`.

    Freshly compiled, so that a fault planted now is in it.
    """

    def row(x: jax.Array, others: tuple[jax.Array, ...], bias: jax.Array, zero: jax.Array) -> jax.Array:
        result = function.compiled(x + x, *others, zero)
        return jnp.stack([result, result + bias])

    def run(x_rows: jax.Array, others: tuple[jax.Array, ...], bias: jax.Array, zero: jax.Array) -> jax.Array:
        if loop == "scan":
            result: jax.Array = jax.lax.scan(lambda carry, x: (carry, row(x, others, bias, zero)), None, x_rows)[1]
            return result
        if loop == "map":
            mapped: jax.Array = jax.lax.map(lambda x: row(x, others, bias, zero), x_rows, batch_size=4)
            return mapped
        return jax.vmap(lambda x: row(x, others, bias, zero))(x_rows)

    return jax.jit(run)


def differing_values(function: Function, n: int, loop: str = "", seed: int = 0) -> dict[str, int]:
    """How many values differ in a bit from the oracle, and from the native kernel."""
    rng = np.random.default_rng([seed, n])
    x_rows, *others = function.inputs(rng, n)
    bias = np.float32(0.7)
    got = np.asarray(compile_row(function, loop)(x_rows, tuple(others), bias, np.int32(0)))
    counts = {}
    for name, definition in (("oracle", function.oracle), ("native", function.native)):
        if definition is not None:
            rows = [np.asarray(definition(x + x, *others), np.float32) for x in x_rows]
            expected = np.stack([[row, row + bias] for row in rows])
            counts[name] = int((_bits(got) != _bits(expected)).sum())
    return counts


def _bits(array: Any) -> np.ndarray:
    return np.asarray(array, np.float32).view(np.uint32)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_length_is_bit_equal_to_oracle_and_native(name: str) -> None:
    for n in LENGTHS if name not in ("join", "exp", "silu") else (300,):
        assert not any(differing_values(FUNCTIONS[name], n).values()), n


@pytest.mark.parametrize("loop", ["scan", "map"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_compiled_loops_change_no_bit(name: str, loop: str) -> None:
    for n in LOOP_LENGTHS:
        assert not any(differing_values(FUNCTIONS[name], n, loop).values()), n


def test_a_mask_leaves_the_softmax_of_what_it_shows() -> None:
    """All lengths 1 … 300 with one compiled program: what is hidden adds 0."""
    x = floats(np.random.default_rng(3), 300, spread=3)
    compiled = jax.jit(ordered.softmax)
    for n in range(1, 301):
        got = np.asarray(compiled(x, np.arange(300) < n, np.int32(0)))
        np.testing.assert_array_equal(_bits(got[:n]), _bits(native_softmax(x[:n])))
        assert not got[n:].any()


def test_positions_without_a_share_change_no_bit() -> None:
    """As attention has it: hidden positions stand in the cache, with a share of 0."""
    rng = np.random.default_rng(4)
    shares, rows, hidden = floats(rng, 60), floats(rng, 60, 7), rng.random(60) < 0.5
    got = jax.jit(ordered.mix_in_order)(np.where(hidden, np.float32(0), shares), rows, np.int32(0))
    np.testing.assert_array_equal(np.asarray(got), native_mix(shares[~hidden], rows[~hidden]))


def test_float64_sums_have_the_same_order() -> None:
    rng = np.random.default_rng(5)
    for n in (1, 16, 37, 256, 300):
        # Magnitudes over 60 binades: another order shows in the last bit of a float64.
        a, b = floats(rng, 32, n, spread=15), floats(rng, 32, n, spread=15)
        with jax.enable_x64(True):
            got = np.asarray(jax.jit(ordered.dot_float64)(a.astype(np.float64), b.astype(np.float64)))
        assert got.dtype == np.float64
        np.testing.assert_array_equal(got, [oracle.dot_f64(x, y) for x, y in zip(a, b, strict=True)])
        np.testing.assert_array_equal(got, [native.dot_f64("scalar", x, y) for x, y in zip(a, b, strict=True)])
    assert (got != (a.astype(np.float64) * b).cumsum(axis=1)[:, -1]).any()


def test_exp_agrees_over_its_range_and_beyond() -> None:
    """Where the result is normal, overflows or is 0; a subnormal one may be flushed."""
    rng = np.random.default_rng(6)
    x = np.concatenate([rng.uniform(-104, 89, 20000), [0.0, -0.0, 88.7, 88.8, 1000, -1000, np.inf, -np.inf]]).astype(np.float32)
    got, expected = np.asarray(jax.jit(ordered.exp)(x, np.int32(0))), oracle.exp(x)
    subnormal = expected < np.finfo(np.float32).tiny
    np.testing.assert_array_equal(_bits(got[~subnormal]), _bits(expected[~subnormal]))
    assert ((got[subnormal] == expected[subnormal]) | (got[subnormal] == 0)).all()
    assert subnormal.sum() > 100
    assert np.isnan(np.asarray(ordered.exp(jnp.float32(np.nan), jnp.int32(0))))


def test_constants_of_exp_are_those_of_the_engine() -> None:
    found = dict(re.findall(r"constexpr (?:float|int) k(\w+) = ([^;]+?)f?;", EXP_CONSTANTS.read_text()))
    values = {
        name: int(text, 16) if name == "RoundBits" else float.fromhex(text) if "0x" in text else float(text) for name, text in found.items()
    }
    assert values == {
        "Lowest": ordered.EXP_LOWEST,
        "Highest": ordered.EXP_HIGHEST,
        "Log2E": ordered.LOG2_E,
        "Ln2High": ordered.LN2_HIGH,
        "Ln2Low": ordered.LN2_LOW,
        "Round": ordered.ROUND,
        "RoundBits": ordered.ROUND_BITS,
        **{f"P{i}": coefficient for i, coefficient in enumerate(ordered.EXP_POLYNOMIAL)},
    }


# ---- planted faults ---------------------------------------------------------------------------------------------


def _rounded_with_the_next(x: jax.Array, zero: jax.Array) -> jax.Array:
    return x


def _reciprocal(x: jax.Array, divisor: jax.Array, zero: jax.Array) -> jax.Array:
    return x * (1.0 / divisor)


def _neighbours(partial: jax.Array) -> jax.Array:
    while partial.shape[-1] > 1:
        partial = partial[..., 0::2] + partial[..., 1::2]
    return partial[..., 0]


FAULTS = [
    ("separate", _rounded_with_the_next, ("dot", "rms_norm", "layer_norm", "exp", "softmax", "silu", "mix_in_order")),
    ("divide", _reciprocal, ("rms_norm", "layer_norm", "softmax", "silu")),
    ("join", _neighbours, ("dot", "join", "rms_norm", "layer_norm")),
]


@pytest.mark.parametrize(("attribute", "fault", "name"), [(a, f, name) for a, f, names in FAULTS for name in names])
def test_bit_comparison_notices_a_planted_fault(
    attribute: str, fault: Callable[..., jax.Array], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ordered, attribute, fault)
    assert all(differing_values(FUNCTIONS[name], 97).values())


def test_a_sum_in_another_order_is_noticed() -> None:
    backwards = dataclasses.replace(FUNCTIONS["sum_in_order"], compiled=lambda x, zero: ordered.sum_in_order(x[::-1], zero))
    assert all(differing_values(backwards, 97).values())
    mixed = dataclasses.replace(FUNCTIONS["mix_in_order"], compiled=lambda x, rows, zero: ordered.mix_in_order(x[::-1], rows[::-1], zero))
    assert all(differing_values(mixed, 97).values())
