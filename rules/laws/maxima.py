"""Maxima of polynomials as unknowns of their own, numbered by exact content (for `polynomial.py`).

The maximum of c m p and c m q, where c is positive and the monomial m is never negative, is c m
times that of p and q; the maximum of a maximum and others is that of all; of constants only the
largest counts, and none that is not positive beside what is never negative. So relu(p) is p where p
is seen not to be negative.

Functions return -1 where something is too large.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from soapstone.cache.compiled import linked
from soapstone.ir.tensor import Array
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


class Store(NamedTuple):
    """The polynomials of which there are maxima, and the maxima.

    Polynomial p has monomials `start[p]` to `stop[p]` of `keys` and `coefs`, over the denominator
    `den[p]`; maximum m is of the polynomials `members[first[m]:first[m + 1]]`, in a total order,
    without common factor; `hashes` and `signs` are of maxima. `counts` says how many polynomials,
    monomials and maxima there are.
    """

    keys: Array
    coefs: Array
    start: Array
    stop: Array
    den: Array
    members: Array
    first: Array
    hashes: Array
    signs: Array
    counts: Array


@linked()
def order(p, q, store):  # type: ignore[no-untyped-def]
    """Return how two stored polynomials compare in some total order: negative, 0, positive."""
    if store.den[p] != store.den[q]:
        return -1 if store.den[p] < store.den[q] else 1
    n = store.stop[p] - store.start[p]
    if n != store.stop[q] - store.start[q]:
        return -1 if n < store.stop[q] - store.start[q] else 1
    for i in range(n):
        a, b = store.start[p] + i, store.start[q] + i
        if store.keys[a] != store.keys[b]:
            return -1 if store.keys[a] < store.keys[b] else 1
        if store.coefs[a] != store.coefs[b]:
            return -1 if store.coefs[a] < store.coefs[b] else 1
    return 0


@linked()
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


@linked()
def gather(members, size, keys, coefs, lo, hi, den, unknowns, bits, store):  # type: ignore[no-untyped-def]
    """Add a polynomial to a set, or the parts that it is the maximum of; return the new size."""
    found = np.int64(0)
    if hi == lo + 1 and coefs[lo] > 0:
        found = _maximum_in(keys[lo], bits, unknowns, store.signs)
    first, last = 0, 1
    factor = np.int64(0)
    if found:
        first, last = store.first[found - unknowns - 1], store.first[found - unknowns]
        factor = without(keys[lo], found, 1, bits)
    for at in range(first, last):
        polys, top = store.counts[0], store.counts[1]
        p = store.members[at] if found else 0
        length = store.stop[p] - store.start[p] if found else hi - lo
        if size >= MOST or polys >= len(store.den) or top + length > len(store.keys):
            return -1
        store.start[polys] = top
        for i in range(length):
            if found:
                key, coef = store.keys[store.start[p] + i], store.coefs[store.start[p] + i]
                if (degree(key, bits) + degree(factor, bits)) * bits > 63:
                    return -1
                if abs(float(coef)) * coefs[lo] > 4e18:
                    return -1
                store.keys[top], store.coefs[top] = product(key, factor, bits), coef * coefs[lo]
            else:
                store.keys[top], store.coefs[top] = keys[lo + i], coefs[lo + i]
            top += 1
        if factor:
            collect(
                store.keys[store.start[polys] : top], store.coefs[store.start[polys] : top], length
            )
        common = divisor(store.coefs, store.start[polys], top, den)
        for i in range(store.start[polys], top):
            store.coefs[i] //= common
        store.stop[polys], store.den[polys] = top, den // common
        members[size] = polys
        size += 1
        store.counts[0], store.counts[1] = polys + 1, top
    return size


@linked()
def _not_negative(p, bits, unknowns, store):  # type: ignore[no-untyped-def]
    """Return whether a stored polynomial is seen never to be negative."""
    for at in range(store.start[p], store.stop[p]):
        if store.coefs[at] < 0 or not never_negative(store.keys[at], bits, unknowns, store.signs):
            return False
    return True


@linked()
def reduced(members, size, unknowns, bits, store):  # type: ignore[no-untyped-def]
    """Sort a set of polynomials, without repetition or constants below; return its size."""
    best = -1
    kept = 0
    positive = False
    for i in range(size):  # insertion, in order
        p = members[i]
        n = store.stop[p] - store.start[p]
        if n == 0 or (n == 1 and store.keys[store.start[p]] == 0):
            if best >= 0:
                mine = store.coefs[store.start[p]] if n else 0
                theirs = (
                    store.coefs[store.start[best]] if store.stop[best] > store.start[best] else 0
                )
                if abs(float(mine)) * store.den[best] + abs(float(theirs)) * store.den[p] > 4e18:
                    return -1
                if mine * store.den[best] <= theirs * store.den[p]:
                    continue
            best = p
            continue
        if not positive:
            positive = _not_negative(p, bits, unknowns, store)
        j = kept
        found = False
        while j > 0:
            sign = order(members[j - 1], p, store)
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
        zero = store.stop[best] == store.start[best]
        if not (positive and (zero or store.coefs[store.start[best]] < 0)):
            members[kept] = best
            kept += 1
    return kept


@linked()
def _common_monomial(members, size, unknowns, bits, store):  # type: ignore[no-untyped-def]
    """Return the largest monomial that is never negative and divides all polynomials of a set."""
    candidate = np.int64(-1)
    for i in range(size):
        if store.stop[members[i]] > store.start[members[i]]:
            candidate = store.keys[store.start[members[i]]]
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
            for at in range(store.start[members[i]], store.stop[members[i]]):
                if times:
                    times = min(times, multiplicity(store.keys[at], unknown, bits))
        if not (unknown > unknowns and store.signs[unknown - unknowns - 1]):
            times -= times % 2
        for _ in range(times):
            common |= unknown << shift
            shift += bits
    return common


@linked()
def _divide(members, size, common, bits, store):  # type: ignore[no-untyped-def]
    """Divide a set by its content and a common monomial; return the content's two numbers."""
    over = np.int64(1)
    for i in range(size):
        den = store.den[members[i]]
        a, b = over, den
        while b:
            a, b = b, a % b
        if float(over) * float(den // a) > 4e18:
            return np.int64(-1), over
        over *= den // a
    content = np.int64(0)
    for i in range(size):
        p = members[i]
        scale = over // store.den[p]
        for at in range(store.start[p], store.stop[p]):
            if abs(float(store.coefs[at])) * scale > 4e18:
                return np.int64(-1), over
            store.coefs[at] *= scale
        store.den[p] = 1
        content = divisor(store.coefs, store.start[p], store.stop[p], content)
    content = max(content, np.int64(1))
    mask = (np.int64(1) << bits) - 1
    for i in range(size):
        p = members[i]
        for at in range(store.start[p], store.stop[p]):
            store.coefs[at] //= content
            rest = common
            while rest:
                store.keys[at] = without(store.keys[at], rest & mask, 1, bits)
                rest >>= bits
        if common:
            lo, hi = store.start[p], store.stop[p]
            collect(store.keys[lo:hi], store.coefs[lo:hi], hi - lo)
    return content, over


@linked()
def _atom(members, size, store):  # type: ignore[no-untyped-def]
    """Return the number of the maximum of a reduced set, which may be new."""
    mixed = np.int64(size)
    for i in range(size):
        p = members[i]
        mixed = mixed * 1000003 + store.den[p]
        for at in range(store.start[p], store.stop[p]):
            mixed = (mixed ^ store.keys[at]) * 1000003 + store.coefs[at]
            mixed ^= mixed >> 29
    atoms = store.counts[2]
    for atom in range(atoms):
        if store.hashes[atom] != mixed or store.first[atom + 1] - store.first[atom] != size:
            continue
        same = True
        for i in range(size):
            p = store.members[store.first[atom] + i]
            if order(p, members[i], store) != 0:
                same = False
                break
        if same:
            return atom
    top = store.first[atoms]
    if atoms + 1 >= len(store.first) or top + size > len(store.members):
        return -1
    for i in range(size):
        store.members[top + i] = members[i]
    store.hashes[atoms] = mixed
    store.first[atoms + 1] = top + size
    store.counts[2] = atoms + 1
    return atoms


@linked()
def maximum(members, size, den, unknowns, bits, out_keys, out_coefs, before, store):  # type: ignore[no-untyped-def]
    """Write the maximum of gathered polynomials, over a denominator; return how many monomials.

    before: how many polynomials and monomials there were; more are kept only for a new maximum.
    """
    size = reduced(members, size, unknowns, bits, store)
    content, over, common = np.int64(1), np.int64(1), np.int64(0)
    if size > 1:
        common = _common_monomial(members, size, unknowns, bits, store)
        content, over = _divide(members, size, common, bits, store)
        if content < 0:
            return -1
        size = reduced(members, size, unknowns, bits, store)
    if size < 0:
        return -1
    p = members[0]
    terms = store.stop[p] - store.start[p]
    if size == 1:
        over *= store.den[p]
    if den % over or float(content) * float(den // over) > 4e18:
        return -1
    factor = content * (den // over)
    if size == 1:
        for i in range(terms):
            key, coef = store.keys[store.start[p] + i], store.coefs[store.start[p] + i]
            if (degree(key, bits) + degree(common, bits)) * bits > 63:
                return -1
            if abs(float(coef)) * float(factor) > 4e18:
                return -1
            out_keys[i], out_coefs[i] = product(key, common, bits), coef * factor
        if common:
            terms = collect(out_keys, out_coefs, terms)
        store.counts[0], store.counts[1] = before
        return terms
    atoms = store.counts[2]
    atom = _atom(members, size, store)
    if atom < 0 or (1 + degree(common, bits)) * bits > 63:
        return -1
    if store.counts[2] == atoms:  # known: forget its copy
        store.counts[0], store.counts[1] = before
    else:
        store.signs[atom] = 0
        for i in range(size):
            if _not_negative(members[i], bits, unknowns, store):
                store.signs[atom] = 1
    out_keys[0], out_coefs[0] = product(unknowns + 1 + atom, common, bits), factor
    return 1
