"""float32 arithmetic between quantised products in the order that the design fixes, one rounding at a time.

An int8 quantiser turns a last bit into a whole step, so where activations are quantised the reference does these sums in
the very order of the contract: 16 partial sums, element i in i mod 16, joined by halving; sums over positions one by one;
one polynomial for exp. A compiler would fuse, reorder or replace all of it; `separate` keeps it from doing so.

Shapes: X is the summed dimension, the last one; the others broadcast.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

PARTIAL_SUMS = 16

# exp(x) = 2^n exp(r), n = rint(x log2 e), r = x - n ln 2 in two parts; exp(r) = 1 + (r + r^2 P(r)), P of degree 4. The same
# constants stand in native/src/kernels/exp_constants.h, where their origin and error are described.
EXP_LOWEST, EXP_HIGHEST = -104.0, 89.0
LOG2_E = float.fromhex("0x1.715476p+0")
LN2_HIGH, LN2_LOW = float.fromhex("0x1.63p-1"), float.fromhex("-0x1.bd0106p-13")
ROUND, ROUND_BITS = 12582912.0, 0x4B400000
EXP_POLYNOMIAL = tuple(float.fromhex(c) for c in ("0x1.fffffcp-2", "0x1.55549p-3", "0x1.5558fap-5", "0x1.123b6ap-7", "0x1.6a21acp-10"))


def separate(x: jax.Array, zero: jax.Array) -> jax.Array:
    """x, rounded by itself: the compiler cannot look through an exclusive-or with an int32 0 that it does not know."""
    return jax.lax.bitcast_convert_type(jax.lax.bitcast_convert_type(x, jnp.int32) ^ zero, jnp.float32)


def dot(a: jax.Array, b: jax.Array, zero: jax.Array) -> jax.Array:
    """Sum over the last dimension of a · b, which broadcast against each other."""
    parts = -(-a.shape[-1] // PARTIAL_SUMS)

    def in_parts(x: jax.Array) -> jax.Array:
        padded = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, parts * PARTIAL_SUMS - x.shape[-1])])
        return jnp.moveaxis(padded.reshape(*x.shape[:-1], parts, PARTIAL_SUMS), -2, 0)

    def add(partial: jax.Array, part: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        return separate(partial + separate(part[0] * part[1], zero), zero), None

    shape = jnp.broadcast_shapes(a.shape[:-1], b.shape[:-1])
    partial, _ = jax.lax.scan(add, jnp.zeros((*shape, PARTIAL_SUMS), jnp.float32), (in_parts(a), in_parts(b)))
    return join(partial, zero)


def join(partial: jax.Array, zero: jax.Array) -> jax.Array:
    """16 partial sums in the last dimension, joined by halving."""
    half = PARTIAL_SUMS // 2
    while half:
        partial = separate(partial[..., :half] + partial[..., half : 2 * half], zero)
        half //= 2
    return partial[..., 0]


def matmul(x_TX: jax.Array, w_YX: jax.Array, zero: jax.Array) -> jax.Array:
    """float32 [T, Y]: x times the transpose of w."""
    return dot(x_TX[:, None, :], w_YX[None, :, :], zero)


def sum_in_order(x: jax.Array, zero: jax.Array) -> jax.Array:
    """Sum over the last dimension, one by one from 0."""
    total, _ = jax.lax.scan(lambda s, e: (separate(s + e, zero), None), jnp.zeros(x.shape[:-1], jnp.float32), jnp.moveaxis(x, -1, 0))
    return total


def divide_by(x: jax.Array, n: int, zero: jax.Array) -> jax.Array:
    """x / n as a true division; a known divisor would become a factor."""
    return x / separate(jnp.asarray(n, jnp.float32), zero)


def inverse_root(x: jax.Array, zero: jax.Array) -> jax.Array:
    """1 / sqrt(x), two roundings."""
    return 1.0 / separate(jnp.sqrt(x), zero)


def rms_norm(x: jax.Array, weight: jax.Array, eps: float, zero: jax.Array) -> jax.Array:
    """x / sqrt(mean x² + eps) over the last dimension, times the weight."""
    mean = separate(divide_by(dot(x, x, zero), x.shape[-1], zero), zero)
    return separate(x * inverse_root(mean + eps, zero)[..., None], zero) * weight


def layer_norm(x: jax.Array, weight: jax.Array, bias: jax.Array, eps: float, zero: jax.Array) -> jax.Array:
    """Mean and variance removed over the last dimension, then weight and bias."""
    mean = divide_by(dot(x, jnp.ones_like(x), zero), x.shape[-1], zero)
    centred = separate(x - mean[..., None], zero)
    variance = separate(divide_by(dot(centred, centred, zero), x.shape[-1], zero), zero)
    scaled = separate(centred * inverse_root(variance + eps, zero)[..., None], zero)
    return separate(scaled * weight, zero) + bias


def exp(x: jax.Array, zero: jax.Array) -> jax.Array:
    """The engine's own exp; subnormal results may be 0 where the device flushes them."""

    def mul(a: jax.Array, b: jax.Array | float) -> jax.Array:
        return separate(a * b, zero)

    x = jnp.clip(x, EXP_LOWEST, EXP_HIGHEST)
    shifted = separate(mul(x, LOG2_E) + ROUND, zero)
    n = shifted - ROUND
    r = separate(separate(x - mul(n, LN2_HIGH), zero) - mul(n, LN2_LOW), zero)
    p0, p1, p2, p3, p4 = EXP_POLYNOMIAL
    tail = mul(jnp.full_like(r, p4), r) + p3
    for coefficient in (p2, p1, p0):
        tail = mul(tail, r) + coefficient
    mantissa = separate(separate(mul(tail, mul(r, r)) + r, zero) + 1.0, zero)
    exponent = jax.lax.bitcast_convert_type(shifted, jnp.int32) - ROUND_BITS
    half = exponent >> 1
    return mul(mul(mantissa, _power_of_two(half)), _power_of_two(exponent - half))


def softmax(x: jax.Array, where: jax.Array, zero: jax.Array) -> jax.Array:
    """exp(x - max) / sum over the last dimension where `where` is true, the sum one by one; 0 elsewhere."""
    largest = jnp.max(jnp.where(where, x, -jnp.inf), axis=-1, keepdims=True)
    e = jnp.where(where, exp(separate(x - largest, zero), zero), 0.0)
    return e / sum_in_order(e, zero)[..., None]


def silu(x: jax.Array, zero: jax.Array) -> jax.Array:
    """x / (1 + exp(-x))."""
    return separate(x / separate(1.0 + exp(-x, zero), zero), zero)


def mix_in_order(shares: jax.Array, rows: jax.Array, zero: jax.Array) -> jax.Array:
    """Σ_s shares[…, s] · rows[s], added one by one from 0: [..., S] and [S, C] give [..., C]."""

    def add(total: jax.Array, term: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        share, row = term
        return separate(total + separate(share[..., None] * row, zero), zero), None

    start = jnp.zeros((*shares.shape[:-1], rows.shape[-1]), jnp.float32)
    total, _ = jax.lax.scan(add, start, (jnp.moveaxis(shares, -1, 0), rows))
    return total


def _power_of_two(exponent: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type((exponent + 127) << 23, jnp.float32)
