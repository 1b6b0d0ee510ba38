"""Division, remainder and powers of integers as NumPy has them: by zero they are zero."""

from __future__ import annotations

from typing import Any

from soapstone.kernels.cuda.substrate.target import device


def div_unsigned(a: Any, b: Any) -> Any:
    """The quotient, without its fraction."""
    return a // b if b != 0 else a - a


def div_signed(a: Any, b: Any) -> Any:
    """The quotient, truncated toward zero."""
    if b == 0:
        return a - a
    q = a // b
    if (a < 0) != (b < 0) and q * b != a:
        q = q + 1
    return q


def mod_unsigned(a: Any, b: Any) -> Any:
    """The remainder."""
    return a % b if b != 0 else a - a


def mod_signed(a: Any, b: Any) -> Any:
    """The remainder, with the sign of b."""
    return a % b if b != 0 else a - a


def fmod_signed(a: Any, b: Any) -> Any:
    """The remainder, with the sign of a."""
    if b == 0:
        return a - a
    r = a % b
    if r != 0 and (a < 0) != (b < 0):
        r = r - b
    return r


def pow_signed(a: Any, b: Any) -> Any:
    """The power; of a negative exponent, the truncated reciprocal's."""
    if b < 0:
        if a == 1:
            return a
        if a == -1:
            return a if b % 2 != 0 else -a
        return a - a
    made = a - a + 1
    square, rest = a, b
    while rest > 0:
        if rest % 2 != 0:
            made = made * square
        square = square * square
        rest = rest // 2
    return made


INTEGERS = {
    **{f.__name__: device(f) for f in (div_unsigned, div_signed, mod_unsigned, mod_signed)},
    **{f.__name__: device(f) for f in (fmod_signed, pow_signed)},
}
INTEGERS["fmod_unsigned"] = INTEGERS["mod_unsigned"]
INTEGERS["pow_unsigned"] = INTEGERS["pow_signed"]
