"""Circular and hyperbolic functions and their inverses on lanes of float32.

The polynomials are those of Cephes. Circular functions reduce their argument in float64, which is
exact enough up to 1e15.
"""

from __future__ import annotations

from soapstone.kernels.cpu.substrate.mathematics import exp, horner, log, log1p
from soapstone.native.lanes import F32, F64, I64, Lanes, where

_HALF_PI = 1.5707963267948966
_HALF_PI_LOW = 6.123233995736766e-17  # what the above lacks of pi / 2
_LN2 = 0.6931471805599453
_LARGE = 1e9  # from here on x * x + 1 and x * x are the same


def size(x: Lanes) -> Lanes:
    """|x|."""
    return x.call("llvm.fabs")


def signed(x: Lanes, sign: Lanes) -> Lanes:
    """The size of x with the sign of the other."""
    return x.call("llvm.copysign", sign)


def _quadrant(x: Lanes) -> tuple[Lanes, Lanes, Lanes]:
    """The sine and cosine of x less its nearest multiple of pi / 2, and that multiple's number."""
    wide = x.cast(F64)
    shifted = wide * (1.0 / _HALF_PI) + 6755399441055744.0
    n = shifted - 6755399441055744.0
    r = (wide - n * _HALF_PI - n * _HALF_PI_LOW).cast(F32)
    z = r * r
    sine = horner(z, (-1.9515295891e-4, 8.3321608736e-3, -1.6666654611e-1)) * z * r + r
    cosine = horner(z, (2.443315711809948e-5, -1.388731625493765e-3, 4.166664568298827e-2))
    return sine, cosine * z * z - z * 0.5 + 1.0, shifted.bits(I64)


def _turned(sine: Lanes, cosine: Lanes, number: Lanes) -> Lanes:
    """The sine after `number` quarter turns."""
    value = where((number & 1).compare("==", 0), sine, cosine)
    return where((number & 2).compare("==", 0), value, -value)


def sin(x: Lanes) -> Lanes:
    """The sine."""
    sine, cosine, number = _quadrant(x)
    return _turned(sine, cosine, number)


def cos(x: Lanes) -> Lanes:
    """The cosine: the sine a quarter turn on."""
    sine, cosine, number = _quadrant(x)
    return _turned(sine, cosine, number + 1)


def tan(x: Lanes) -> Lanes:
    """The tangent."""
    sine, cosine, number = _quadrant(x)
    even = (number & 1).compare("==", 0)
    return where(even, sine, -cosine) / where(even, cosine, sine)


def _arc(x: Lanes) -> tuple[Lanes, Lanes]:
    """Where |x| > 1/2, and the arc sine of |x| or, there, of sqrt((1 - |x|) / 2)."""
    a = size(x)
    outer = a > 0.5
    z = where(outer, (1.0 - a) * 0.5, a * a)
    t = where(outer, z.call("llvm.sqrt"), a)
    p = horner(
        z,
        (4.2163199048e-2, 2.4181311049e-2, 4.5470025998e-2, 7.4953002686e-2, 1.6666752422e-1),
    )
    return outer, p * z * t + t


def asin(x: Lanes) -> Lanes:
    """The arc sine: NaN outside -1 … 1."""
    outer, arc = _arc(x)
    return signed(where(outer, _HALF_PI - arc * 2.0, arc), x)


def acos(x: Lanes) -> Lanes:
    """The arc cosine: NaN outside -1 … 1."""
    outer, arc = _arc(x)
    far = where(x > 0.0, arc * 2.0, 2.0 * _HALF_PI - arc * 2.0)
    return where(outer, far, _HALF_PI - signed(arc, x))


def atan(x: Lanes) -> Lanes:
    """The arc tangent."""
    a = size(x)
    steep, middle = a > 2.414213562373095, a > 0.4142135623730950
    t = where(steep, -1.0 / a, where(middle, (a - 1.0) / (a + 1.0), a))
    start = where(steep, _HALF_PI, where(middle, a.like(0.5 * _HALF_PI), 0.0))
    z = t * t
    p = horner(z, (8.05374449538e-2, -1.38776856032e-1, 1.99777106478e-1, -3.33329491539e-1))
    return signed(p * z * t + t + start, x)


def sinh(x: Lanes) -> Lanes:
    """The hyperbolic sine."""
    a, z = size(x), x * x
    near = horner(z, (1 / 362880, 1 / 5040, 1 / 120, 1 / 6)) * z * x + x
    half = exp(a * 0.5)  # of its square, the larger part, which may overflow where e^x does not
    far = half * 0.5 * half - 0.5 / (half * half)
    return where(a < 1.0, near, signed(far, x))


def cosh(x: Lanes) -> Lanes:
    """The hyperbolic cosine."""
    half = exp(size(x) * 0.5)
    return half * 0.5 * half + 0.5 / (half * half)


def asinh(x: Lanes) -> Lanes:
    """The inverse hyperbolic sine."""
    a = size(x)
    z = a * a
    near = log1p(a + z / ((z + 1.0).call("llvm.sqrt") + 1.0))
    return signed(where(a > _LARGE, log(a) + _LN2, near), x)


def acosh(x: Lanes) -> Lanes:
    """The inverse hyperbolic cosine: NaN below 1."""
    t = x - 1.0
    near = log1p(t + (t * (t + 2.0)).call("llvm.sqrt"))
    return where(x > _LARGE, log(x) + _LN2, where(x < 1.0, float("nan"), near))


def atanh(x: Lanes) -> Lanes:
    """The inverse hyperbolic tangent: NaN outside -1 … 1."""
    a = size(x)
    return signed(log1p(a * 2.0 / (1.0 - a)) * 0.5, x)
