"""Elementary functions on lanes of float32, good to about two units in the last place.

No branch: infinities and NaN go through the arithmetic. The schemes (argument reduction, then a
polynomial or a ratio of two) are those of Cephes and Eigen.
"""

from __future__ import annotations

from collections.abc import Sequence

from soapstone.kernels.cpu.lanes import F32, F64, I32, I64, Lanes, where
from soapstone.kernels.cpu.simd import vectorised

_LOG2E = 1.4426950408889634
_LN2_HIGH, _LN2_LOW = 0.693359375, -2.12194440054690583e-4


def horner(x: Lanes, coefficients: Sequence[float]) -> Lanes:
    """The polynomial in x, highest power first."""
    value = x.like(coefficients[0])
    for c in coefficients[1:]:
        value = value * x + c
    return value


def exp(x: Lanes) -> Lanes:
    """e^x: 0 under -104, infinity over 88.8."""
    x = where(x < -104.0, -104.0, x)
    x = where(x > 89.0, 89.0, x)
    # Adding 1.5 * 2^23 rounds to an integer, which then lies in the low bits.
    shifted = x * _LOG2E + 12582912.0
    n = shifted - 12582912.0
    r = x - n * _LN2_HIGH - n * _LN2_LOW
    p = horner(
        r,
        (
            1.9875691500e-4,
            1.3981999507e-3,
            8.3334519073e-3,
            4.1665795894e-2,
            1.6666665459e-1,
            5.0000001201e-1,
        ),
    )
    y = p * (r * r) + r + 1.0
    # 2^n in two factors, so that subnormal results come out too.
    whole = shifted.bits(I32) - 0x4B400000
    half = Lanes(x.builder, x.builder.ashr(whole.value, whole.like(1).value))
    rest = whole - half
    return y * ((half + 127) << 23).bits(F32) * ((rest + 127) << 23).bits(F32)


def log(x: Lanes) -> Lanes:
    """The natural logarithm: -infinity at 0, NaN below."""
    tiny = x < 1.1754943508222875e-38
    scaled = where(tiny, x * 8388608.0, x)
    bits = scaled.bits(I32)
    exponent = (bits >> 23) - 126
    m = ((bits & 0x7FFFFF) | 0x3F000000).bits(F32)
    low = m < 0.70710678
    e = exponent.cast(F32) - where(tiny, x.like(23.0), 0.0) - where(low, x.like(1.0), 0.0)
    m = where(low, m + m, m) - 1.0
    z = m * m
    p = horner(
        m,
        (
            7.0376836292e-2,
            -1.1514610310e-1,
            1.1676998740e-1,
            -1.2420140846e-1,
            1.4249322787e-1,
            -1.6668057665e-1,
            2.0000714765e-1,
            -2.4999993993e-1,
            3.3333331174e-1,
        ),
    )
    y = m * z * p + e * -2.12194440e-4 - z * 0.5
    y = m + y + e * 0.693359375
    y = where(x.compare("==", 0.0), float("-inf"), y)
    y = where(x < 0.0, float("nan"), y)
    return where(x < float("inf"), y, where(x < 0.0, y, x))


def tanh(x: Lanes) -> Lanes:
    """The hyperbolic tangent, to 3e-7 relative."""
    y = where(x > 7.99881172180175781, 7.99881172180175781, x)
    y = where(y < -7.99881172180175781, -7.99881172180175781, y)
    z = y * y
    top = horner(
        z,
        (
            -2.76076847742355e-16,
            2.00018790482477e-13,
            -8.60467152213735e-11,
            5.12229709037114e-08,
            1.48572235717979e-05,
            6.37261928875436e-04,
            4.89352455891786e-03,
        ),
    )
    bottom = horner(
        z, (1.19825839466702e-06, 1.18534705686654e-04, 2.26843463243900e-03, 4.89352518554385e-03)
    )
    return y * top / bottom


def erf(x: Lanes) -> Lanes:
    """The error function, to 3e-7."""
    y = where(x > 4.0, 4.0, x)
    y = where(y < -4.0, -4.0, y)
    z = y * y
    top = horner(
        z,
        (
            -2.72614225801306e-10,
            2.77068142495902e-08,
            -2.10102402082508e-06,
            -5.69250639462346e-05,
            -7.34990630326855e-04,
            -2.95459980854025e-03,
            -1.60960333262415e-02,
        ),
    )
    bottom = horner(
        z,
        (
            -1.45660718464996e-05,
            -2.13374055278905e-04,
            -1.68282697438203e-03,
            -7.37332916720468e-03,
            -1.42647390514189e-02,
        ),
    )
    value = y * top / bottom
    value = where(value > 1.0, 1.0, value)
    return where(value < -1.0, -1.0, value)


def sigmoid(x: Lanes) -> Lanes:
    """1 / (1 + e^-x)."""
    return 1.0 / (exp(-x) + 1.0)


def log64(x: Lanes) -> Lanes:
    """The logarithm of positive finite float64 lanes, to 1e-12."""
    bits = x.bits(I64)
    m = ((bits & 0xFFFFFFFFFFFFF) | 0x3FE0000000000000).bits(F64)
    e = ((bits >> 52) - 1022).cast(I32).cast(F64)
    low = m < 0.7071067811865476
    m = where(low, m + m, m)
    e = where(low, e - 1.0, e)
    s = (m - 1.0) / (m + 1.0)
    series = horner(s * s, [1.0 / k for k in (15, 13, 11, 9, 7, 5, 3, 1)])
    return s * series * 2.0 + e * 0.6931471805599453


def exp64(x: Lanes) -> Lanes:
    """e^x of float64 lanes, to 1e-12, for -700 < x < 700."""
    shifted = x * _LOG2E + 6755399441055744.0
    r = x - (shifted - 6755399441055744.0) * 0.6931471805599453
    factorials = [1.0]
    for k in range(1, 12):
        factorials.append(factorials[-1] * k)
    p = horner(r, [1.0 / f for f in reversed(factorials)])
    return p * (((shifted.bits(I64) - 0x4338000000000000) + 1023) << 52).bits(F64)


def power(x: Lanes, y: Lanes) -> Lanes:
    """x^y of float32 lanes, as C's powf: NaN for a negative x unless y is an integer."""
    wide = where(x < 0.0, -x, x).cast(F64)
    normal = where(wide < 1e-300, 1.0, wide)
    normal = where(normal < 1e300, normal, 1.0)
    product = log64(normal) * y.cast(F64)
    product = where(product > 700.0, 700.0, product)
    product = where(product < -700.0, -700.0, product)
    size = exp64(product).cast(F32)
    infinity, zero = float("inf"), x.like(0.0)
    up = y > 0.0
    size = where(wide < 1e-300, where(up, zero, infinity), size)
    size = where(wide.compare("==", infinity), where(up, zero + infinity, 0.0), size)
    whole = y.call("llvm.trunc")
    half = whole * 0.5
    odd = half.call("llvm.trunc").compare("!=", half)
    size = where((x < 0.0) & odd, -size, size)
    broken = (x < 0.0) & (x > -infinity) & whole.compare("!=", y)
    size = where(broken, float("nan"), size)
    size = where(x.compare("!=", x), x, size)
    size = where(y.compare("==", 0.0), 1.0, size)
    return where(x.compare("==", 1.0), 1.0, size)


vexp = vectorised(exp)
vlog = vectorised(log)
