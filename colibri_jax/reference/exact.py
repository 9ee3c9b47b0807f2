"""Arithmetic that has one result on every device: integer exp, scores, explicit float32 rounding, ordered sums, sort keys.

Everything that is compared bit for bit with the native engine goes through these functions, because a compiler may
change what the plain operations mean: XLA's CPU backend flushes float32 subnormals to zero (also in conversions), may
drop a float64 -> float32 -> float64 round trip, fuses a multiply into a following add, divides by a constant or by a
value that many elements share through its reciprocal, and reorders long sums. So a *float32 value* here is a float64
holding a number that float32 can represent; float64 never becomes subnormal in this file's ranges, and the products
that meet an add are by powers of two.

Call these under `jax.enable_x64(True)`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

# round(2^31 · (ln 2)^i / i!), i = 0 … 10: the Taylor series of 2^f in units of 2^-31.
EXP_COEFFICIENTS = (2147483648, 1488522236, 515882496, 119194166, 20654775, 2863360, 330788, 32755, 2838, 219, 15)
EXP_MIN = -100.0
_LOG2_E_UNITS = 1.4426950408889634 * 2.0**30
_FRACTION_BITS = 30

FLOAT32_MIN_NORMAL = 2.0**-126
# Everything from here up rounds to FLOAT32_MIN_NORMAL or more (the tie goes to its even mantissa).
_ROUNDS_TO_NORMAL = 2.0**-126 - 2.0**-150

VOTE_UNIT = 2.0**-32

# A float32 value leaves the low 29 bits of its float64 pattern empty; sort keys put the index there.
_INDEX_BITS = 29
_INDEX_MASK = (1 << _INDEX_BITS) - 1
MAX_INDEX = _INDEX_MASK
_INT64_MIN = -(1 << 63)
_INT64_MAX = (1 << 63) - 1


def exp(x: jax.Array) -> jax.Array:
    """exp(x) for float64 x <= 0 by integer arithmetic alone; x below -100 counts as -100.

    Returns:
        float64 in [exp(-100), 1], relative error below 2^-28.
    """
    t = jnp.rint(jnp.maximum(x, EXP_MIN) * _LOG2_E_UNITS).astype(jnp.int64)
    k = t >> _FRACTION_BITS
    f = t & ((1 << _FRACTION_BITS) - 1)
    m = jnp.full_like(t, EXP_COEFFICIENTS[-1])
    for coefficient in reversed(EXP_COEFFICIENTS[:-1]):
        m = coefficient + ((m * f) >> _FRACTION_BITS)
    # ldexp(m, k - 31): a product with a power of two, whose bit pattern is its biased exponent.
    power = lax.bitcast_convert_type((k - 31 + 1023) << 52, jnp.float64)
    return m.astype(jnp.float64) * power


def round_to_float32(x: jax.Array) -> jax.Array:
    """The float32 nearest to each x (ties to even), as float64; below 2^-126 it is 0. For x >= 0, float64."""
    normal = lax.reduce_precision(jnp.maximum(x, FLOAT32_MIN_NORMAL), exponent_bits=8, mantissa_bits=23)
    return jnp.where(x >= _ROUNDS_TO_NORMAL, normal, 0.0)


def widen(x: jax.Array) -> jax.Array:
    """float32 -> float64, subnormals included (a plain conversion may read them as 0)."""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    mantissa = (bits & 0x7FFFFF).astype(jnp.float64) * 2.0**-149
    subnormal = jnp.where(bits < 0, -mantissa, mantissa)
    return jnp.where((bits & 0x7F800000) == 0, subnormal, x.astype(jnp.float64))


def divide(a: jax.Array, b: jax.Array) -> jax.Array:
    """The rounded quotient a / b of a >= 0 and b > 0, where b may be broadcast.

    The selected divisor is one that no two elements are known to share, so that it stays a division; 0 / 1 is 0 / b.
    """
    return a / jnp.where(a > 0.0, b, 1.0)


def add_float32(a: jax.Array, b: jax.Array) -> jax.Array:
    """The float32 sum a + b of float32 values, subnormals included; infinite where float32 overflows.

    float64 is wide enough that rounding twice gives float32's own result, and a sum in float32's subnormal range is
    exact: it is a multiple of 2^-149.
    """
    total = a + b
    rounded = lax.reduce_precision(total, exponent_bits=8, mantissa_bits=23)
    return jnp.where(jnp.abs(total) < FLOAT32_MIN_NORMAL, total, rounded)


def sigmoid(z: jax.Array) -> jax.Array:
    """float32 sigmoid of float32 logits, any shape, as float64."""
    x = z.astype(jnp.float64)
    e = exp(-jnp.abs(x))
    return round_to_float32(jnp.where(x >= 0, 1.0, e) / (1.0 + e))


def softmax(z_SE: jax.Array, valid_E: jax.Array) -> jax.Array:
    """float32 softmax of float32 logits over the valid experts, as float64; 0 where not valid."""
    x_SE = jnp.where(valid_E, z_SE.astype(jnp.float64), -jnp.inf)
    e_SE = jnp.where(valid_E, exp(x_SE - x_SE.max(axis=-1, keepdims=True)), 0.0)
    total_S1 = jnp.rint(e_SE * 2.0**50).astype(jnp.int64).sum(axis=-1, keepdims=True)
    return round_to_float32(divide(e_SE, total_S1.astype(jnp.float64) * 2.0**-50))


def to_units(w: jax.Array) -> jax.Array:
    """int64 round-half-even(w · 2^32) of float32 values below 2^10; sums of these do not depend on their order."""
    return jnp.rint(w * (1.0 / VOTE_UNIT)).astype(jnp.int64)


def running_sums(x_SK: jax.Array) -> jax.Array:
    """float64 running sums along the last axis, added one by one from the left; the last one is the total."""

    def add(total_S: jax.Array, x_S: jax.Array) -> tuple[jax.Array, jax.Array]:
        total_S = total_S + x_S
        return total_S, total_S

    _, sums_KS = lax.scan(add, jnp.zeros(x_SK.shape[:-1], jnp.float64), jnp.moveaxis(x_SK, -1, 0))
    return jnp.moveaxis(sums_KS, 0, -1)


def sort_keys(value: jax.Array, index: jax.Array, eligible: jax.Array) -> jax.Array:
    """int64 keys whose order is: larger float32 value first, then lower index; what is not eligible comes last.

    Keys are distinct where indices are, so no sort's treatment of ties or signed zeros matters (the two zeros are one
    value here). `descending`, `key_index` and `key_value` read them.

    Args:
        value: float32 values as float64, no NaN.
        index: integers in [0, MAX_INDEX].
        eligible: bool.
    """
    bits = lax.bitcast_convert_type(value, jnp.int64)
    bits = jnp.where(bits == _INT64_MIN, 0, bits)
    ordered = jnp.where(bits < 0, bits ^ _INT64_MAX, bits)
    ordered = jnp.where(eligible, ordered, _INT64_MIN)
    return (ordered & ~_INDEX_MASK) | (_INDEX_MASK - index.astype(jnp.int64))


def descending(keys: jax.Array) -> jax.Array:
    """Keys sorted along the last axis, largest value first."""
    return ~lax.sort(~keys)


def key_index(keys: jax.Array) -> jax.Array:
    """int32 index that each key carries."""
    return (_INDEX_MASK - (keys & _INDEX_MASK)).astype(jnp.int32)


def key_value(keys: jax.Array) -> jax.Array:
    """The value of keys made from eligible values >= 0."""
    return lax.bitcast_convert_type(keys & ~np.int64(_INDEX_MASK), jnp.float64)
