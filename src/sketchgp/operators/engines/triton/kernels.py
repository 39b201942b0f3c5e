"""Pieces that every Triton kernel of this package is put together from (see ``source``).

A tile holds ``BM`` rows (points x) and ``BN`` columns (points z) of the kernel matrix.  A profile gives value and slope
of a function of ``d``, the squared Euclidean or l1 distance in the units of ``launch.unit``: in base 2, so that an
exponential is one instruction of the device's special function unit.

This module needs Triton, and TRITON_INTERPRET is read when it is imported.
"""

from __future__ import annotations

import triton
import triton.language as tl

LN2 = tl.constexpr(0.6931471805599453)
LN2_SQUARED = tl.constexpr(0.4804530139182014)
LOG2E = tl.constexpr(1.4426950408889634)


# --- blocks of memory -------------------------------------------------------------------------------------------


@triton.jit
def block(pointer, start, stride, first, HEIGHT: tl.constexpr, WIDTH: tl.constexpr):
    """``(HEIGHT, WIDTH)``: rows ``start ...`` and columns ``first ...`` of a matrix with ``stride`` columns.

    Columns past the last are 0.
    """
    rows = tl.arange(0, HEIGHT)
    columns = tl.arange(0, WIDTH)
    corner = pointer + start * stride + first  # offsets within a block fit into 32 bits
    return tl.load(corner + (rows[:, None] * stride + columns[None, :]), (first + columns < stride)[None, :], 0.0)


@triton.jit
def load_parts(x, x_low, start, stride, first, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr):
    """Return :func:`block` of the high and of the low parts; a single part is returned twice."""
    high = block(x, start, stride, first, HEIGHT, WIDTH)
    low = high
    if PARTS == 2:
        low = block(x_low, start, stride, first, HEIGHT, WIDTH)
    return high, low


@triton.jit
def vector(pointer, start, LENGTH: tl.constexpr):
    """``(LENGTH,)``: entries ``start ...``."""
    return tl.load(pointer + start + tl.arange(0, LENGTH))


@triton.jit
def put_block(pointer, start, stride, first, values, HEIGHT: tl.constexpr, WIDTH: tl.constexpr):
    """Store what :func:`block` would load."""
    rows = tl.arange(0, HEIGHT)
    columns = tl.arange(0, WIDTH)
    tl.store(pointer + start * stride + first + (rows[:, None] * stride + columns[None, :]), values)


@triton.jit
def put_vector(pointer, start, values, LENGTH: tl.constexpr):
    """Store what :func:`vector` would load."""
    tl.store(pointer + start + tl.arange(0, LENGTH), values)


# --- products of tiles ------------------------------------------------------------------------------------------


@triton.jit
def multiply(a, a_low, b, b_low, PARTS: tl.constexpr):
    """``a @ b``.  With two parts, a value is the sum of a high and a low part, and low times low is left out.

    The small products come first, in an accumulator of their own: tensor cores round towards zero when they add.
    """
    if PARTS == 2:
        small = tl.dot(a_low, b, input_precision="tf32")
        small = tl.dot(a, b_low, small, input_precision="tf32")
        result = tl.dot(a, b, small, input_precision="tf32")
    else:
        result = tl.dot(a, b, input_precision="tf32")
    return result


@triton.jit
def split_parts(x, PARTS: tl.constexpr):
    """Return the high and the low part of a tile in registers; a single part is returned twice."""
    if PARTS == 2:  # what is cut off goes to the low part; NaN stays NaN
        high = (x.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)
        low = x - high
    else:  # round to 11 bits (Veltkamp); the device would round towards zero, with a bias
        shifted = x * 8193.0
        high = shifted - (shifted - x)
        low = high
    return high, low


@triton.jit
def cross(
    x, x_low, x_start, z, z_low, z_start, chunks,
    BM: tl.constexpr, BN: tl.constexpr, K: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Inner products ``(BM, BN)`` of rows that are ``chunks`` times K wide, by chunks that are each rounded once."""
    total = tl.zeros((BM, BN), tl.float32)
    for c in range(chunks):
        x_high, x_rest = load_parts(x, x_low, x_start, chunks * K, c * K, BM, K, PARTS)
        z_high, z_rest = load_parts(z, z_low, z_start, chunks * K, c * K, BN, K, PARTS)
        total += multiply(x_high, x_rest, tl.trans(z_high), tl.trans(z_rest), PARTS)
    return total


@triton.jit
def difference(x, z, x_start, z_start, BM: tl.constexpr, BN: tl.constexpr):
    """``x_i - z_j`` of one feature."""
    return vector(x, x_start, BM)[:, None] - vector(z, z_start, BN)[None, :]


@triton.jit
def differences(
    x, x_start, x_stride, z, z_start, z_stride, count,
    BM: tl.constexpr, BN: tl.constexpr, K: tl.constexpr, L1: tl.constexpr,
):  # fmt: skip
    """Sum absolute or squared differences over ``count`` times K features, each a vector in memory."""
    total = tl.zeros((BM, BN), tl.float32)
    for c in range(count):
        for k in tl.static_range(K):
            f = c * K + k
            step = difference(x, z, x_start + f * x_stride, z_start + f * z_stride, BM, BN)
            if L1:
                total += tl.abs(step)
            else:
                total += step * step
    return total


@triton.jit
def difference_gradients(
    acc, h, x, x_start, x_stride, z, z_start, z_stride, first, last,
    BM: tl.constexpr, BN: tl.constexpr, WIDTH: tl.constexpr, L1: tl.constexpr,
):  # fmt: skip
    """Add ``sum_j h_ij sign(x_i - z_j)``, or ``sum_j 2 h_ij (x_i - z_j)``, for features ``first <= f < last``.

    The features are columns of ``acc`` (BM, WIDTH); adding to one column costs WIDTH operations a row, less than the
    sum over BN columns that is added.
    """
    columns = tl.arange(0, WIDTH)
    for f in range(first, last):
        step = difference(x, z, x_start + f * x_stride, z_start + f * z_stride, BM, BN)
        if L1:
            sign = tl.where(step > 0, h, tl.where(step < 0, -h, 0.0))
            total = tl.sum(sign, 1)
        else:
            total = tl.sum(2.0 * h * step, 1)
        acc += tl.where(columns[None, :] == f - first, total[:, None], 0.0)
    return acc


# --- profiles ---------------------------------------------------------------------------------------------------


@triton.jit
def log1p(t):
    """``log(1 + t)`` to float32 accuracy for small t too."""
    u = 1.0 + t
    return tl.where(u == 1.0, t, tl.log(u) * (t / (u - 1.0 + 1e-30)))


@triton.jit
def root(d):
    """``sqrt(d)`` of a distance that rounding may have made negative; NaN stays NaN."""
    return tl.sqrt(tl.maximum(d, 0.0, propagate_nan=tl.PropagateNan.ALL))


@triton.jit
def gauss(d, alpha):
    value = tl.exp2(-d)
    return value, value * -LN2


laplace = gauss  # of an l1 distance


@triton.jit
def matern12(d, alpha):
    u = root(d)
    value = tl.exp2(-u)
    return value, value / tl.where(u > 0.0, u, float("inf")) * (-0.5 * LN2)  # a kink at 0: no slope there


@triton.jit
def matern32(d, alpha):
    u = root(d)
    decay = tl.exp2(-u)
    return (1.0 + LN2 * u) * decay, decay * (-0.5 * LN2_SQUARED)


@triton.jit
def matern52(d, alpha):
    u = root(d)
    decay = tl.exp2(-u)
    linear = 1.0 + LN2 * u
    return (linear + (LN2_SQUARED / 3.0) * u * u) * decay, linear * decay * (-LN2_SQUARED / 6.0)


@triton.jit
def rational_quadratic(d, alpha):
    t = d / alpha
    logarithm = log1p(t)
    value = tl.exp2(logarithm * (alpha * -LOG2E))
    inverse = 1.0 / (1.0 + t)
    return value, -value * inverse, value * (t * inverse - logarithm)
