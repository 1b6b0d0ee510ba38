"""Maxima of polynomials as unknowns of their own, numbered by exact content (for `polynomial.py`).

The stores: polynomial p has monomials `poly_from[p]` to `poly_to[p]` of `mkeys` and `mcoefs`, over
the denominator `poly_den[p]`; maximum m is of the polynomials `set_members[set_from[m]:set_from[m +
1]]`, in a total order; `counts` says how many polynomials, monomials and maxima there are.
"""

from __future__ import annotations

import numpy as np
from numba import njit


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
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


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
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


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def gather(members, size, keys, coefs, lo, hi, den, unknowns, *stores):  # type: ignore[no-untyped-def]
    """Add a polynomial to a set, or what it is the maximum of; return the new size, -1 if full."""
    poly_from, poly_to, poly_den, mkeys, mcoefs, set_from, set_members, counts = stores
    if size >= 4096:
        return -1
    if hi == lo + 1 and coefs[lo] == den and unknowns < keys[lo] <= unknowns + counts[2]:
        atom = keys[lo] - unknowns - 1
        for at in range(set_from[atom], set_from[atom + 1]):
            if size >= 4096:
                return -1
            members[size] = set_members[at]
            size += 1
        return size
    polys, top = counts[0], counts[1]
    if polys >= len(poly_den) or top + hi - lo > len(mkeys):
        return -1
    common = divisor(coefs, lo, hi, den)
    poly_from[polys] = top
    for i in range(lo, hi):
        mkeys[top], mcoefs[top] = keys[i], coefs[i] // common
        top += 1
    poly_to[polys], poly_den[polys] = top, den // common
    members[size] = polys
    counts[0], counts[1] = polys + 1, top
    return size + 1


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def reduced(members, size, *stores):  # type: ignore[no-untyped-def]
    """Sort a set of polynomials without repetition or constants below another; return its size.

    It is -1 if the constants are too large to compare.
    """
    poly_from, poly_to, poly_den, mkeys, mcoefs = stores
    best = -1
    kept = 0
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
        members[kept] = best
        kept += 1
    return kept


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def atom(members, size, hashes, *stores):  # type: ignore[no-untyped-def]
    """Return the number of the maximum of a reduced set; -1 if there is no room for a new one."""
    poly_from, poly_to, poly_den, mkeys, mcoefs, set_from, set_members, counts = stores
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
