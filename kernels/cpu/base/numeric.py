"""Define the scalar building blocks of the Numba kernels: exact by IEEE rules, and vectorisable.

No libm call appears in a loop that LLVM may vectorise: a vector math library rounds differently in the
vector body and in the scalar rest. ``exp`` and ``tanh`` are Cephes polynomials written with explicit
fused multiply-adds instead, the same operations for every element; so are those of ``erf``.

bfloat16 travels as its ``uint16`` bits (Numba has no such type): `widen` on the way in, `narrow` out.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from samebit.kernels.cpu.base.part import inlined_part
from samebit.kernels.layout.decays import GONE

LOG2E = np.float32(1.4426950408889634)
LN2_HI = np.float32(0.693359375)
LN2_LO = np.float32(-2.12194440e-4)
ROUND = np.float32(12582912.0)  # 1.5 * 2**23: adding it rounds to the nearest integer
EXP_LOWEST = np.float32(-87.0)
EXP_HIGHEST = np.float32(88.0)
E0 = np.float32(1.9875691500e-4)
E1 = np.float32(1.3981999507e-3)
E2 = np.float32(8.3334519073e-3)
E3 = np.float32(4.1665795894e-2)
E4 = np.float32(1.6666665459e-1)
E5 = np.float32(5.0000001201e-1)
_T0 = np.float32(-5.70498872745e-3)
_T1 = np.float32(2.06390887954e-2)
_T2 = np.float32(-5.37397155531e-2)
_T3 = np.float32(1.33314422036e-1)
_T4 = np.float32(-3.33332819422e-1)
_L3, _L5, _L7 = np.float32(1 / 3), np.float32(1 / 5), np.float32(1 / 7)
_L9, _L11, _L13, _L15 = np.float32(1 / 9), np.float32(1 / 11), np.float32(1 / 13), np.float32(1 / 15)
_N0, _N1, _N2 = np.float32(-5.96761703e-4), np.float32(4.99119423e-3), np.float32(-2.67681349e-2)
_N3, _N4, _N5 = np.float32(1.12819925e-1), np.float32(-3.76125336e-1), np.float32(1.28379166e-1)
_F0, _F1 = np.float32(-1.72853470e-5), np.float32(3.83197126e-4)
_F2, _F3, _F4 = np.float32(-3.88396438e-3), np.float32(2.42546219e-2), np.float32(-1.06777877e-1)
_F5, _F6 = np.float32(-6.34846687e-1), np.float32(-1.28717512e-1)
_ERF_SMALL = np.float32(0.927734375)
_TANH_SMALL = np.float32(0.625)
_ONE = np.float32(1.0)
_TWO = np.float32(2.0)
_ZERO = np.float32(0.0)
_GONE = np.float32(GONE)


@intrinsic
def fma(typingctx: Any, a: Any, b: Any, c: Any) -> Any:
    """Compute ``a * b + c`` in float32 with one rounding, in vector and scalar code alike."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fma(*args)

    return types.float32(types.float32, types.float32, types.float32), generate


@intrinsic
def bits_of(typingctx: Any, x: Any) -> Any:
    """Return the bits of a float32 as an int32."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.IntType(32))

    return types.int32(types.float32), generate


@intrinsic
def float_of(typingctx: Any, x: Any) -> Any:
    """Return the float32 with these int32 bits."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.int32), generate


@intrinsic
def widen(typingctx: Any, x: Any) -> Any:
    """Return an element of a float32 array, or of a bfloat16 one as uint16 bits, as float32."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if signature.args[0] == types.float32:
            return args[0]
        i32 = ir.IntType(32)
        return builder.bitcast(builder.shl(builder.zext(args[0], i32), i32(16)), ir.FloatType())

    return (types.float32(x), generate) if x in (types.float32, types.uint16) else None


@intrinsic
def narrow(typingctx: Any, x: Any, like: Any) -> Any:
    """Return float32 ``x`` as the element type of ``like``: itself, or the bits of the nearest bfloat16.

    Rounds to nearest, ties to even; NaN stays NaN.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if signature.return_type == types.float32:
            return args[0]
        i32 = ir.IntType(32)
        bits = builder.bitcast(args[0], i32)
        odd = builder.and_(builder.lshr(bits, i32(16)), i32(1))
        rounded = builder.lshr(builder.add(builder.add(bits, i32(0x7FFF)), odd), i32(16))
        is_nan = builder.fcmp_unordered("uno", args[0], args[0])
        return builder.trunc(builder.select(is_nan, i32(0x7FC0), rounded), ir.IntType(16))

    return (like(types.float32, like), generate) if like in (types.float32, types.uint16) else None


@inlined_part
def exp(x: Any) -> Any:
    """Compute e**x in float32, relative error below 1e-7; below -87 it stays at exp(-87); NaN stays NaN."""
    clamped = EXP_LOWEST if x < EXP_LOWEST else x
    clamped = EXP_HIGHEST if clamped > EXP_HIGHEST else clamped
    shifted = fma(clamped, LOG2E, ROUND)
    n = shifted - ROUND
    r = fma(n, -LN2_HI, clamped)
    r = fma(n, -LN2_LO, r)
    p = fma(E0, r, E1)
    p = fma(p, r, E2)
    p = fma(p, r, E3)
    p = fma(p, r, E4)
    p = fma(p, r, E5)
    p = fma(p, r * r, r) + _ONE
    return p * float_of((bits_of(shifted) << np.int32(23)) + np.int32(0x3F800000))


@inlined_part
def share_left(decay: Any) -> Any:
    """Return e**x of a decay, or of a log-probability, 0 below `GONE`; NaN stays NaN."""
    return _ZERO if decay < _GONE else exp(decay)


@inlined_part
def tanh(x: Any) -> Any:
    """Compute the hyperbolic tangent in float32: a polynomial near zero, from ``exp`` elsewhere."""
    size = -x if x < _ZERO else x
    square = x * x
    p = fma(_T0, square, _T1)
    p = fma(p, square, _T2)
    p = fma(p, square, _T3)
    p = fma(p, square, _T4)
    near = fma(p * square, x, x)
    far = _ONE - _TWO / (exp(size + size) + _ONE)
    far = -far if x < _ZERO else far
    return near if size < _TANH_SMALL else far


@inlined_part
def erf(x: Any) -> Any:
    """Compute the error function in float32: a polynomial near zero, elsewhere 1 - e**-y with a polynomial y of |x|."""
    size = -x if x < _ZERO else x
    square = x * x
    p = fma(_N0, square, _N1)
    p = fma(p, square, _N2)
    p = fma(p, square, _N3)
    p = fma(p, square, _N4)
    p = fma(p, square, _N5)
    near = fma(p, x, x)
    y = fma(fma(_F0, size, _F1), square, fma(_F2, size, _F3))
    y = fma(y, size, _F4)
    y = fma(y, size, _F5)
    y = fma(y, size, _F6)
    y = fma(y, size, -size)
    far = _ONE - exp(y)
    far = -far if x < _ZERO else far
    return near if size < _ERF_SMALL else far


@inlined_part
def sigmoid(x: Any) -> Any:
    """Compute 1 / (1 + e**-x) in float32."""
    return _ONE / (_ONE + exp(-x))


@inlined_part
def log1p(u: Any) -> Any:
    """Compute log(1 + u) in float32 for 0 <= u <= 1: twice the area tangent of u / (2 + u), an odd polynomial."""
    w = u / (_TWO + u)
    square = w * w
    p = fma(_L15, square, _L13)
    p = fma(p, square, _L11)
    p = fma(p, square, _L9)
    p = fma(p, square, _L7)
    p = fma(p, square, _L5)
    p = fma(p, square, _L3)
    return _TWO * fma(p * square, w, w)


@inlined_part
def softplus(x: Any) -> Any:
    """Compute log(1 + e**x) in float32, relative error below 1e-6."""
    size = -x if x < _ZERO else x
    above = _ZERO if x < _ZERO else x
    return above + log1p(exp(-size))
