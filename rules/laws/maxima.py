"""Maxima of polynomials as unknowns of their own, numbered by exact content (for `polynomial.py`).

The maximum of c m p and c m q, where c is positive and the monomial m is never negative, is c m
times that of p and q; the maximum of a maximum and others is that of all; of constants only the
largest counts, and none that is not positive beside what is never negative. So relu(p) is p where p
is seen not to be negative.

The stores: polynomial p has monomials `poly_from[p]` to `poly_to[p]` of `mkeys` and `mcoefs`, over
the denominator `poly_den[p]`; maximum m is of the polynomials `set_members[set_from[m]:set_from[m +
1]]`, in a total order, without common factor; `counts` says how many polynomials, monomials and
maxima there are. Functions return -1 where something is too large.
"""

from __future__ import annotations

import numpy as np

from soapstone.cache.compiled import njit
from soapstone.rules.laws.monomial import (
    collect,
    degree,
    divisor,
    multiplicity,
    never_negative,
    product,
    without,
)

MOST = 4096  # polynomials in one set


@njit(nogil=True)
def order(p, q, poly_from, poly_to, poly_den, mkeys, mcoefs):  # type: ignore[no-untyped-def]
    """Return how two stored polynomials compare in some total order: negative, 0, positive."""
    if poly_den[p] != poly_den[q]:
        return -1 if poly_den[p] < poly_den[q] else 1
    n = poly_to[p] - poly_from[p]
    if n != poly_to[q] - poly_from[q]:
        return -1 if n < poly_to[q] - poly_from[q] else 1
    for i in range(n):
        a, b = poly_from[p] + i, poly_from[q] + i
        if mkeys[a] != mkeys[b]:
            return -1 if mkeys[a] < mkeys[b] else 1
        if mcoefs[a] != mcoefs[b]:
            return -1 if mcoefs[a] < mcoefs[b] else 1
    return 0


@njit(nogil=True)
def _maximum_in(key, bits, unknowns, signs):  # type: ignore[no-untyped-def]
    """Return a maximum among a monomial's unknowns of which the rest is never negative, or 0."""
    mask = (np.int64(1) << bits) - 1
    rest = key
    while rest:
        unknown = rest & mask
        rest >>= bits
        if unknown > unknowns and never_negative(
            without(key, unknown, 1, bits), bits, unknowns, signs
        ):
            return unknown
    return np.int64(0)


@njit(nogil=True)
def gather(  # type: ignore[no-untyped-def]
    members, size, keys, coefs, lo, hi, den, unknowns, bits, signs,
    poly_from, poly_to, poly_den, mkeys, mcoefs, set_from, set_members, counts,
):  # fmt: skip
    """Add a polynomial to a set, or the parts that it is the maximum of; return the new size."""
    found = np.int64(0)
    if hi == lo + 1 and coefs[lo] > 0:
        found = _maximum_in(keys[lo], bits, unknowns, signs)
    first, last = 0, 1
    factor = np.int64(0)
    if found:
        first, last = set_from[found - unknowns - 1], set_from[found - unknowns]
        factor = without(keys[lo], found, 1, bits)
    for at in range(first, last):
        polys, top = counts[0], counts[1]
        p = set_members[at] if found else 0
        length = poly_to[p] - poly_from[p] if found else hi - lo
        if size >= MOST or polys >= len(poly_den) or top + length > len(mkeys):
            return -1
        poly_from[polys] = top
        for i in range(length):
            if found:
                key, coef = mkeys[poly_from[p] + i], mcoefs[poly_from[p] + i]
                if (degree(key, bits) + degree(factor, bits)) * bits > 63:
                    return -1
                if abs(float(coef)) * coefs[lo] > 4e18:
                    return -1
                mkeys[top], mcoefs[top] = product(key, factor, bits), coef * coefs[lo]
            else:
                mkeys[top], mcoefs[top] = keys[lo + i], coefs[lo + i]
            top += 1
        if factor:
            collect(mkeys[poly_from[polys] : top], mcoefs[poly_from[polys] : top], length)
        common = divisor(mcoefs, poly_from[polys], top, den)
        for i in range(poly_from[polys], top):
            mcoefs[i] //= common
        poly_to[polys], poly_den[polys] = top, den // common
        members[size] = polys
        size += 1
        counts[0], counts[1] = polys + 1, top
    return size


@njit(nogil=True)
def _not_negative(  # type: ignore[no-untyped-def]
    p, bits, unknowns, signs, poly_from, poly_to, mkeys, mcoefs
):  # fmt: skip
    """Return whether a stored polynomial is seen never to be negative."""
    for at in range(poly_from[p], poly_to[p]):
        if mcoefs[at] < 0 or not never_negative(mkeys[at], bits, unknowns, signs):
            return False
    return True


@njit(nogil=True)
def reduced(  # type: ignore[no-untyped-def]
    members, size, unknowns, bits, signs, poly_from, poly_to, poly_den, mkeys, mcoefs
):  # fmt: skip
    """Sort a set of polynomials, without repetition or constants below; return its size."""
    best = -1
    kept = 0
    positive = False
    for i in range(size):  # insertion, in order
        p = members[i]
        n = poly_to[p] - poly_from[p]
        if n == 0 or (n == 1 and mkeys[poly_from[p]] == 0):
            if best >= 0:
                mine = mcoefs[poly_from[p]] if n else 0
                theirs = mcoefs[poly_from[best]] if poly_to[best] > poly_from[best] else 0
                if abs(float(mine)) * poly_den[best] + abs(float(theirs)) * poly_den[p] > 4e18:
                    return -1
                if mine * poly_den[best] <= theirs * poly_den[p]:
                    continue
            best = p
            continue
        if not positive:
            positive = _not_negative(p, bits, unknowns, signs, poly_from, poly_to, mkeys, mcoefs)
        j = kept
        found = False
        while j > 0:
            sign = order(members[j - 1], p, poly_from, poly_to, poly_den, mkeys, mcoefs)
            if sign == 0:
                found = True
            if sign <= 0:
                break
            j -= 1
        if not found:
            for at in range(kept, j, -1):
                members[at] = members[at - 1]
            members[j] = p
            kept += 1
    if best >= 0:  # the one constant comes last
        zero = poly_to[best] == poly_from[best]
        if not (positive and (zero or mcoefs[poly_from[best]] < 0)):
            members[kept] = best
            kept += 1
    return kept


@njit(nogil=True)
def _common_monomial(  # type: ignore[no-untyped-def]
    members, size, unknowns, bits, signs, poly_from, poly_to, mkeys
):  # fmt: skip
    """Return the largest monomial that is never negative and divides all polynomials of a set."""
    candidate = np.int64(-1)
    for i in range(size):
        if poly_to[members[i]] > poly_from[members[i]]:
            candidate = mkeys[poly_from[members[i]]]
            if candidate == 0:
                return candidate
    if candidate < 0:
        return np.int64(0)
    mask = (np.int64(1) << bits) - 1
    common, shift = np.int64(0), 0
    rest, before = candidate, np.int64(0)
    while rest:
        unknown = rest & mask
        rest >>= bits
        if unknown == before:
            continue
        before = unknown
        times = multiplicity(candidate, unknown, bits)
        for i in range(size):
            for at in range(poly_from[members[i]], poly_to[members[i]]):
                if times:
                    times = min(times, multiplicity(mkeys[at], unknown, bits))
        if not (unknown > unknowns and signs[unknown - unknowns - 1]):
            times -= times % 2
        for _ in range(times):
            common |= unknown << shift
            shift += bits
    return common


@njit(nogil=True)
def _divide(  # type: ignore[no-untyped-def]
    members, size, common, bits, poly_from, poly_to, poly_den, mkeys, mcoefs
):  # fmt: skip
    """Divide a set by its content and a common monomial; return the content's two numbers."""
    over = np.int64(1)
    for i in range(size):
        den = poly_den[members[i]]
        a, b = over, den
        while b:
            a, b = b, a % b
        if float(over) * float(den // a) > 4e18:
            return np.int64(-1), over
        over *= den // a
    content = np.int64(0)
    for i in range(size):
        p = members[i]
        scale = over // poly_den[p]
        for at in range(poly_from[p], poly_to[p]):
            if abs(float(mcoefs[at])) * scale > 4e18:
                return np.int64(-1), over
            mcoefs[at] *= scale
        poly_den[p] = 1
        content = divisor(mcoefs, poly_from[p], poly_to[p], content)
    content = max(content, np.int64(1))
    mask = (np.int64(1) << bits) - 1
    for i in range(size):
        p = members[i]
        for at in range(poly_from[p], poly_to[p]):
            mcoefs[at] //= content
            rest = common
            while rest:
                mkeys[at] = without(mkeys[at], rest & mask, 1, bits)
                rest >>= bits
        if common:
            lo, hi = poly_from[p], poly_to[p]
            collect(mkeys[lo:hi], mcoefs[lo:hi], hi - lo)
    return content, over


@njit(nogil=True)
def _atom(  # type: ignore[no-untyped-def]
    members, size, hashes,
    poly_from, poly_to, poly_den, mkeys, mcoefs, set_from, set_members, counts,
):  # fmt: skip
    """Return the number of the maximum of a reduced set, which may be new."""
    mixed = np.int64(size)
    for i in range(size):
        p = members[i]
        mixed = mixed * 1000003 + poly_den[p]
        for at in range(poly_from[p], poly_to[p]):
            mixed = (mixed ^ mkeys[at]) * 1000003 + mcoefs[at]
            mixed ^= mixed >> 29
    atoms = counts[2]
    for atom in range(atoms):
        if hashes[atom] != mixed or set_from[atom + 1] - set_from[atom] != size:
            continue
        same = True
        for i in range(size):
            p = set_members[set_from[atom] + i]
            if order(p, members[i], poly_from, poly_to, poly_den, mkeys, mcoefs) != 0:
                same = False
                break
        if same:
            return atom
    top = set_from[atoms]
    if atoms + 1 >= len(set_from) or top + size > len(set_members):
        return -1
    for i in range(size):
        set_members[top + i] = members[i]
    hashes[atoms] = mixed
    set_from[atoms + 1] = top + size
    counts[2] = atoms + 1
    return atoms


@njit(nogil=True)
def maximum(  # type: ignore[no-untyped-def]
    members, size, den, unknowns, bits, out_keys, out_coefs, before, signs, hashes,
    poly_from, poly_to, poly_den, mkeys, mcoefs, set_from, set_members, counts,
):  # fmt: skip
    """Write the maximum of gathered polynomials, over a denominator; return how many monomials.

    before: how many polynomials and monomials there were; more are kept only for a new maximum.
    """
    size = reduced(
        members, size, unknowns, bits, signs, poly_from, poly_to, poly_den, mkeys, mcoefs
    )
    content, over, common = np.int64(1), np.int64(1), np.int64(0)
    if size > 1:
        common = _common_monomial(members, size, unknowns, bits, signs, poly_from, poly_to, mkeys)
        content, over = _divide(
            members, size, common, bits, poly_from, poly_to, poly_den, mkeys, mcoefs
        )
        if content < 0:
            return -1
        size = reduced(
            members, size, unknowns, bits, signs, poly_from, poly_to, poly_den, mkeys, mcoefs
        )
    if size < 0:
        return -1
    p = members[0]
    terms = poly_to[p] - poly_from[p]
    if size == 1:
        over *= poly_den[p]
    if den % over or float(content) * float(den // over) > 4e18:
        return -1
    factor = content * (den // over)
    if size == 1:
        for i in range(terms):
            key, coef = mkeys[poly_from[p] + i], mcoefs[poly_from[p] + i]
            if (degree(key, bits) + degree(common, bits)) * bits > 63:
                return -1
            if abs(float(coef)) * float(factor) > 4e18:
                return -1
            out_keys[i], out_coefs[i] = product(key, common, bits), coef * factor
        if common:
            terms = collect(out_keys, out_coefs, terms)
        counts[0], counts[1] = before
        return terms
    atoms = counts[2]
    atom = _atom(
        members, size, hashes,
        poly_from, poly_to, poly_den, mkeys, mcoefs, set_from, set_members, counts,
    )  # fmt: skip
    if atom < 0 or (1 + degree(common, bits)) * bits > 63:
        return -1
    if counts[2] == atoms:  # known: forget its copy
        counts[0], counts[1] = before
    else:
        signs[atom] = 0
        for i in range(size):
            if _not_negative(members[i], bits, unknowns, signs, poly_from, poly_to, mkeys, mcoefs):
                signs[atom] = 1
    out_keys[0], out_coefs[0] = product(unknowns + 1 + atom, common, bits), factor
    return 1
