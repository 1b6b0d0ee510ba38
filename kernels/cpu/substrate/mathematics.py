"""Elementary functions on lanes of float32, good to about two units in the last place.

No branch: infinities and NaN go through the arithmetic. The schemes (argument reduction, then a
polynomial or a ratio of two) are those of Cephes and Eigen.
"""

from __future__ import annotations

from collections.abc import Sequence

from soapstone.native.lanes import F32, F64, I32, I64, Lanes, where
from soapstone.native.simd import vectorised

_LOG2E = 1.4426950408889634
_LN2_HIGH, _LN2_LOW = 0.693359375, -2.12194440054690583e-4
_EXP2 = (1.32647e-3, 9.67151e-3, 5.550734e-2, 2.4022242e-1, 6.9314698e-1, 1.0)


def horner(x: Lanes, coefficients: Sequence[float]) -> Lanes:
    """The polynomial in x, highest power first."""
    return horner_on(x.like(coefficients[0]), x, coefficients[1:])


def horner_on(value: Lanes, x: Lanes, coefficients: Sequence[float]) -> Lanes:
    """The polynomial in x whose highest powers add up to `value` already."""
    for c in coefficients:
        value = value * x + c
    return value


def _exp_parts(x: Lanes) -> tuple[Lanes, Lanes]:
    """e^r - 1 and the integer n, with x = n ln 2 + r."""
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
    return p * (r * r) + r, shifted.bits(I32) - 0x4B400000


def _power_of_two(n: Lanes) -> Lanes:
    """2^n for -126 <= n <= 127; 0 at -127, infinity at 128."""
    return ((n + 127) << 23).bits(F32)


def exp(x: Lanes) -> Lanes:
    """e^x: 0 under -104, infinity over 88.8."""
    x = where(x < -104.0, -104.0, x)
    x = where(x > 89.0, 89.0, x)
    less, n = _exp_parts(x)
    # 2^n in two factors, so that subnormal results come out too.
    half = Lanes(x.builder, x.builder.ashr(n.value, n.like(1).value))
    return (less + 1.0) * _power_of_two(half) * _power_of_two(n - half)


def short_exp(x: Lanes) -> Lanes:
    """e^x: 0 already under -87.7, infinity over 88.3; for sums in which that is the same."""
    x = where(x < -88.0, -88.0, x)
    less, n = _exp_parts(where(x > 89.0, 89.0, x))
    return (less + 1.0) * _power_of_two(n)


def _falling_exp2(x: Lanes, coefficients: Sequence[float]) -> Lanes:
    """2^x of x under 128, by a polynomial for |f| at most 1/2; 0 already under -126.5."""
    x = where(x < -127.0, -127.0, x)
    # The integer, and 127, lie in the low bits.
    shifted = x + 12583039.0
    p = horner(x - (shifted - 12583039.0), coefficients)
    return p * (shifted.bits(I32) << 23).bits(F32)


def falling_exp(x: Lanes) -> Lanes:
    """e^x of x at most 0, to 2e-7 and |x| 2e-8 relative; for sums in which what is tiny is 0."""
    return _falling_exp2(x * _LOG2E, _EXP2)


def brief_exp(x: Lanes) -> Lanes:
    """e^x of x at most 0, to 6e-6 relative; for what is rounded further."""
    brief = (9.5701003e-3, 5.59178628e-2, 2.40247443e-1, 6.93121791e-1, 9.99999285e-1)
    return _falling_exp2(x * _LOG2E, brief)


def expm1_negative(x: Lanes) -> Lanes:
    """e^x - 1 for x at most 0, without cancellation near 0."""
    less, n = _exp_parts(where(x < -88.0, -88.0, x))
    scale = _power_of_two(n)
    return less * scale + (scale - 1.0)


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


def log1p(x: Lanes) -> Lanes:
    """The logarithm of 1 + x, without cancellation near 0."""
    whole = x + 1.0
    # What rounding took from 1 + x is put back by the ratio.
    made = log(whole) * (x / (whole - 1.0))
    made = where(whole.compare("==", 1.0), x, made)
    return where(x.compare("==", float("inf")), x, made)


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
    """The error function.

    Source: N. Juffa's single-precision erf.
    """
    t = x.call("llvm.fabs")
    s = t * t
    near = horner(
        s,
        (
            -5.96761703e-4,
            4.99119423e-3,
            -2.67681349e-2,
            1.12819925e-1,
            -3.76125336e-1,
            1.28379166e-1,
        ),
    )
    far = (t * -1.72853470e-5 + 3.83197126e-4) * s + (t * -3.88396438e-3 + 2.42546219e-2)
    far = horner_on(far, t, (-1.06777877e-1, -6.34846687e-1, -1.28717512e-1)) * t - t
    less, n = _exp_parts(where(far < -88.0, -88.0, far))
    rest = (less + 1.0) * _power_of_two(n)
    return where(t > 0.927734375, (1.0 - rest).call("llvm.copysign", x), near * x + x)


# log2 of the normal distribution at -t, for 0 <= t <= 13: least in the error of t times it, and
# relative to 2e-5 up to 5.5.
_LOG2_TAIL = (
    -4.65083656e-9,
    2.07668679e-7,
    -3.70505852e-6,
    3.29705041e-5,
    -1.27899424e-4,
    -3.14394604e-4,
    7.3253389e-3,
    -5.26896086e-2,
    -4.59143408e-1,
    -1.15111232,
    -1.0,
)


def normal_cdf(x: Lanes) -> Lanes:
    """(1 + erf(x / sqrt 2)) / 2, the normal distribution, without cancellation in the left tail."""
    tail = _falling_exp2(horner(x.call("llvm.fabs"), _LOG2_TAIL), _EXP2)
    return where(x < 0.0, tail, 1.0 - tail)


def sigmoid(x: Lanes) -> Lanes:
    """1 / (1 + e^-x)."""
    return 1.0 / (short_exp(-x) + 1.0)


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
    product = where(normal.compare("==", 1.0), 0.0, log64(normal) * y.cast(F64))
    product = where(product > 700.0, 700.0, product)
    product = where(product < -700.0, -700.0, product)
    size = exp64(product).cast(F32)
    infinity, zero = float("inf"), x.like(0.0)
    up = y > 0.0
    size = where(wide < 1e-300, where(up, zero, infinity), size)
    size = where(wide.compare("==", infinity), where(up, zero + infinity, 0.0), size)
    whole = y.call("llvm.trunc")
    half = whole * 0.5
    odd = half.call("llvm.trunc").compare("!=", half) & whole.compare("==", y)
    size = where((x.bits(I32) < 0) & odd, -size, size)  # of -0.0 too
    broken = (x < 0.0) & (x > -infinity) & whole.compare("!=", y)
    size = where(broken, float("nan"), size)
    size = where(x.compare("!=", x), x, size)
    size = where(y.compare("!=", y), y, size)
    size = where(y.compare("==", 0.0), 1.0, size)
    return where(x.compare("==", 1.0), 1.0, size)


# Of what is at most 0, as scores less their largest: subnormal weights would be lost in a sum, and
# processors that make them by microcode take some times as long over rows with hidden keys.
vexp = vectorised(falling_exp)
vlog = vectorised(log)
