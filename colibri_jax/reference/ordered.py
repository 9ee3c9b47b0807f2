"""float32 arithmetic between quantised products in the order that the design fixes, one rounding at a time.

An int8 quantiser turns a last bit into a whole step, so where activations are quantised the reference does these sums in
the very order of the contract: 16 partial sums, element i in i mod 16, joined by halving; sums over positions one by one;
one polynomial for exp. A compiler would fuse a product into the sum that it feeds, and replace a division by a product with a
reciprocal: `separate` and `divide` keep it from doing so. Sums of sums need no such help. What these functions return may feed a
sum as it is.

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
    return _floats(_bits(x) ^ zero)


def divide(x: jax.Array, divisor: jax.Array, zero: jax.Array) -> jax.Array:
    """x / divisor, each quotient rounded once.

    Given a divisor that is broadcast, XLA multiplies with its reciprocal. Here every element gets a divisor of its own, whose bits
    depend, as far as a compiler can see, on the element.
    """
    return x / _floats(_bits(jnp.broadcast_to(divisor, x.shape)) ^ (_bits(x) & zero))


def dot(a: jax.Array, b: jax.Array, zero: jax.Array) -> jax.Array:
    """Sum over the last dimension of a · b, which broadcast against each other."""

    def add(partial: jax.Array, part: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        return partial + separate(part[0] * part[1], zero), None

    start = _nothing((*jnp.broadcast_shapes(a.shape[:-1], b.shape[:-1]), PARTIAL_SUMS), zero)
    return join(jax.lax.scan(add, start, (_in_parts(a), _in_parts(b)))[0])


def dot_float64(a: jax.Array, b: jax.Array) -> jax.Array:
    """The same in float64, of float32 values in float64: their products are exact, so that fusing changes nothing.

    Call it under `jax.enable_x64(True)`.
    """

    def add(partial: jax.Array, part: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        return partial + part[0] * part[1], None

    start = jnp.zeros((*jnp.broadcast_shapes(a.shape[:-1], b.shape[:-1]), PARTIAL_SUMS), jnp.float64)
    return join(jax.lax.scan(add, start, (_in_parts(a), _in_parts(b)))[0])


def join(partial: jax.Array) -> jax.Array:
    """16 partial sums in the last dimension, joined by halving."""
    half = PARTIAL_SUMS // 2
    while half:
        partial = partial[..., :half] + partial[..., half : 2 * half]
        half //= 2
    return partial[..., 0]


def matmul(x_TX: jax.Array, w_YX: jax.Array, zero: jax.Array) -> jax.Array:
    """float32 [T, Y]: x times the transpose of w."""
    return dot(x_TX[:, None, :], w_YX[None, :, :], zero)


def sum_in_order(x: jax.Array, zero: jax.Array) -> jax.Array:
    """Sum over the last dimension, one by one from 0."""
    total, _ = jax.lax.scan(lambda s, e: (s + e, None), _nothing(x.shape[:-1], zero), jnp.moveaxis(x, -1, 0))
    return total


def inverse_root(x: jax.Array, zero: jax.Array) -> jax.Array:
    """1 / sqrt(x), two roundings."""
    return divide(jnp.ones_like(x), jnp.sqrt(x), zero)


def rms_norm(x: jax.Array, weight: jax.Array, eps: float, zero: jax.Array) -> jax.Array:
    """x / sqrt(mean x² + eps) over the last dimension, times the weight."""
    mean = _mean(dot(x, x, zero), x, zero)
    return separate(separate(x * inverse_root(mean + eps, zero)[..., None], zero) * weight, zero)


def layer_norm(x: jax.Array, weight: jax.Array, bias: jax.Array, eps: float, zero: jax.Array) -> jax.Array:
    """Mean and variance removed over the last dimension, then weight and bias."""
    mean = _mean(dot(x, jnp.ones_like(x), zero), x, zero)
    centred = x - mean[..., None]
    variance = _mean(dot(centred, centred, zero), x, zero)
    scaled = separate(centred * inverse_root(variance + eps, zero)[..., None], zero)
    return separate(scaled * weight, zero) + bias


def exp(x: jax.Array, zero: jax.Array) -> jax.Array:
    """The engine's own exp; subnormal results may be 0 where the device flushes them."""

    def mul(a: jax.Array, b: jax.Array | float) -> jax.Array:
        return separate(a * b, zero)

    x = jnp.clip(x, EXP_LOWEST, EXP_HIGHEST)
    # Apart, or a compiler adds the two constants of (x + ROUND) - ROUND first.
    shifted = separate(mul(x, LOG2_E) + ROUND, zero)
    n = shifted - ROUND
    r = (x - mul(n, LN2_HIGH)) - mul(n, LN2_LOW)
    p0, p1, p2, p3, p4 = EXP_POLYNOMIAL
    tail = mul(jnp.full_like(r, p4), r) + p3
    for coefficient in (p2, p1, p0):
        tail = mul(tail, r) + coefficient
    mantissa = (mul(tail, mul(r, r)) + r) + 1.0
    exponent = _bits(shifted) - ROUND_BITS
    half = exponent >> 1
    return mul(mul(mantissa, _power_of_two(half)), _power_of_two(exponent - half))


def softmax(x: jax.Array, where: jax.Array, zero: jax.Array) -> jax.Array:
    """exp(x - max) / sum over the last dimension where `where` is true, the sum one by one; 0 elsewhere."""
    largest = jnp.max(jnp.where(where, x, -jnp.inf), axis=-1, keepdims=True)
    e = jnp.where(where, exp(x - largest, zero), 0.0)
    return divide(e, sum_in_order(e, zero)[..., None], zero)


def silu(x: jax.Array, zero: jax.Array) -> jax.Array:
    """x / (1 + exp(-x))."""
    return divide(x, 1.0 + exp(-x, zero), zero)


def mix_in_order(shares: jax.Array, rows: jax.Array, zero: jax.Array) -> jax.Array:
    """Σ_s shares[…, s] · rows[s], added one by one from 0: [..., S] and [S, C] give [..., C]."""

    def add(total: jax.Array, term: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        share, row = term
        return total + separate(share[..., None] * row, zero), None

    start = _nothing((*shares.shape[:-1], rows.shape[-1]), zero)
    total, _ = jax.lax.scan(add, start, (jnp.moveaxis(shares, -1, 0), rows))
    return total


def _in_parts(x: jax.Array) -> jax.Array:
    """[..., X] as [parts, ..., 16], filled up with zeros: adding +0 to a sum that began at +0 changes nothing."""
    parts = -(-x.shape[-1] // PARTIAL_SUMS)
    padded = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, parts * PARTIAL_SUMS - x.shape[-1])])
    return jnp.moveaxis(padded.reshape(*x.shape[:-1], parts, PARTIAL_SUMS), -2, 0)


def _nothing(shape: tuple[int, ...], zero: jax.Array) -> jax.Array:
    """The +0 that sums begin at. A compiler that knows it leaves out the first addition, and so the step from -0 to +0."""
    return jnp.broadcast_to(_floats(zero), shape)


def _mean(total: jax.Array, x: jax.Array, zero: jax.Array) -> jax.Array:
    return divide(total, jnp.asarray(x.shape[-1], jnp.float32), zero)


def _power_of_two(exponent: jax.Array) -> jax.Array:
    return _floats((exponent + 127) << 23)


def _bits(x: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(x, jnp.int32)


def _floats(bits: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(bits, jnp.float32)
