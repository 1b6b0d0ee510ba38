"""Monomials as packed, sorted numbers of unknowns, and sums of them (for `polynomial.py`).

A key holds the numbers of a monomial's unknowns, from 1, in ascending order from its lowest bits,
`bits` for each; 0 is the monomial 1. Unknowns above `unknowns` are maxima, of which `signs` says
whether they are known not to be negative.
"""

from __future__ import annotations

import numpy as np

from soapstone.cache.compiled import linked


@linked(inline="always")
def product(x, y, bits):  # type: ignore[no-untyped-def]
    """Return the key of the product of two monomials: their unknowns, merged in order."""
    if x == 0:
        return y
    if y == 0:
        return x
    mask = (np.int64(1) << bits) - 1
    merged = np.int64(0)
    shift = 0
    while x != 0 and y != 0:
        u, v = x & mask, y & mask
        if u <= v:
            merged |= u << shift
            x >>= bits
        else:
            merged |= v << shift
            y >>= bits
        shift += bits
    rest = x | y
    return merged | (rest << shift) if rest else merged


@linked()
def collect(keys, coefs, count):  # type: ignore[no-untyped-def]
    """Sort monomials by key in place, add up equal ones, drop zeros; return how many remain."""
    gap = 1
    while gap < count // 3:
        gap = 3 * gap + 1
    while gap >= 1:
        for i in range(gap, count):
            key, coef = keys[i], coefs[i]
            j = i
            while j >= gap and keys[j - gap] > key:
                keys[j], coefs[j] = keys[j - gap], coefs[j - gap]
                j -= gap
            keys[j], coefs[j] = key, coef
        gap //= 3
    kept = 0
    i = 0
    while i < count:
        key, total = keys[i], coefs[i]
        i += 1
        while i < count and keys[i] == key:
            total += coefs[i]
            i += 1
        if total != 0:
            keys[kept], coefs[kept] = key, total
            kept += 1
    return kept


@linked()
def divisor(coefs, lo, hi, start):  # type: ignore[no-untyped-def]
    """Return the greatest common divisor of a number and coefficients."""
    found = start
    for i in range(lo, hi):
        other = abs(coefs[i])
        while other:
            found, other = other, found % other
        if found == 1:
            break
    return found


@linked()
def degree(key, bits):  # type: ignore[no-untyped-def]
    """Return how many unknowns a monomial has."""
    count = 0
    while key:
        key >>= bits
        count += 1
    return count


@linked()
def multiplicity(key, unknown, bits):  # type: ignore[no-untyped-def]
    """Return how often an unknown is in a monomial."""
    mask = (np.int64(1) << bits) - 1
    count = 0
    while key:
        count += key & mask == unknown
        key >>= bits
    return count


@linked()
def without(key, unknown, times, bits):  # type: ignore[no-untyped-def]
    """Return a monomial that has an unknown fewer times."""
    mask = (np.int64(1) << bits) - 1
    rest, shift = np.int64(0), 0
    while key:
        if times and key & mask == unknown:
            times -= 1
        else:
            rest |= (key & mask) << shift
            shift += bits
        key >>= bits
    return rest


@linked()
def never_negative(key, bits, unknowns, signs):  # type: ignore[no-untyped-def]
    """Return whether a monomial is of squares and maxima that are known not to be negative."""
    mask = (np.int64(1) << bits) - 1
    while key:
        unknown = key & mask
        key >>= bits
        if unknown > unknowns and signs[unknown - unknowns - 1]:
            continue
        if key & mask != unknown:
            return False
        key >>= bits
    return True
