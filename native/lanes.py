"""Formulas on short vectors, written as plain arithmetic in Python, emitted as LLVM instructions.

`Lanes` wraps a value of the program being built, so that running a Python function of lanes
*writes* the instructions of its formula. Nothing is left to the loop vectoriser, which gives up on
outputs that alias inputs. LLVM splits sixteen lanes as the machine needs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from llvmlite import ir

from soapstone.cache.deferred import cgutils
from soapstone.cache.environment import features as of_processor
from soapstone.cache.objects import arm as arm, features, held as held

LANES = 16
F16, F32, F64 = ir.HalfType(), ir.FloatType(), ir.DoubleType()
I1, I8, I16, I32, I64 = map(ir.IntType, (1, 8, 16, 32, 64))

# Bytes of a lane.
WIDTH = {"half": 2, "float": 4, "double": 8, "i8": 1, "i16": 2, "i32": 4, "i64": 8}

_FLOATS = (ir.HalfType, ir.FloatType, ir.DoubleType)

# contract: a*b+c may become one fused operation. NaN and infinity stay what they are.
_FLAGS = ("contract",)


@cache
def converts_halves() -> bool:
    """Return whether this processor converts numbers of half precision itself.

    Where it does not LLVM would call functions for it, which need not be there.
    """
    return arm() or "f16c" in features()


@cache
def pairs_at_once() -> bool:
    """Return whether sums of two products of bfloat16 take as long as of one of float32.

    On AMD's processors that have the instruction they do. Intel's do half as many in a given time
    as of float32, but for those of tiles (AMX).
    """
    return {"avx512bf16", "sse4a"} <= of_processor()


class Lanes:
    """A value of the program being built: a vector, a scalar or a pointer, with its operators.

    Integers are signed for `<` and unsigned for `>>`. Comparisons give masks for `where`.
    """

    def __init__(self, builder: Any, value: Any) -> None:
        self.builder, self.value = builder, value

    @property
    def kind(self) -> Any:
        """The LLVM type."""
        return self.value.type

    @property
    def element(self) -> Any:
        """The LLVM type of a lane, or of the scalar."""
        return self.kind.element if isinstance(self.kind, ir.VectorType) else self.kind

    def like(self, value: Any) -> Lanes:
        """The number or scalar, in every lane of a value of this one's type."""
        if isinstance(value, Lanes):
            if value.kind == self.kind or not isinstance(self.kind, ir.VectorType):
                return value
            return value.splat(self.kind.count)
        number = float(value) if isinstance(self.element, (ir.FloatType, ir.DoubleType)) else value
        if isinstance(self.kind, ir.VectorType):
            return Lanes(self.builder, ir.Constant(self.kind, [number] * self.kind.count))
        return Lanes(self.builder, ir.Constant(self.kind, number))

    def splat(self, count: int = LANES) -> Lanes:
        """The scalar in every lane."""
        b, kind = self.builder, ir.VectorType(self.kind, count)
        one = b.insert_element(ir.Constant(kind, ir.Undefined), self.value, I32(0))
        zeros = ir.Constant(ir.VectorType(I32, count), [0] * count)
        return Lanes(b, b.shuffle_vector(one, ir.Constant(kind, ir.Undefined), zeros))

    def _float(self) -> bool:
        return isinstance(self.element, _FLOATS)

    def _binary(self, other: Any, on_float: str, on_integer: str, swap: bool = False) -> Lanes:
        if isinstance(other, Lanes) and isinstance(other.kind, ir.VectorType):
            left, right = other.like(self), other
        else:
            left, right = self, self.like(other)
        if swap:
            left, right = right, left
        if left._float():
            made = getattr(self.builder, on_float)(left.value, right.value, flags=_FLAGS)
        else:
            made = getattr(self.builder, on_integer)(left.value, right.value)
        return Lanes(self.builder, made)

    def __add__(self, other: Any) -> Lanes:
        return self._binary(other, "fadd", "add")

    __radd__ = __add__

    def __sub__(self, other: Any) -> Lanes:
        return self._binary(other, "fsub", "sub")

    def __rsub__(self, other: Any) -> Lanes:
        return self._binary(other, "fsub", "sub", swap=True)

    def __mul__(self, other: Any) -> Lanes:
        return self._binary(other, "fmul", "mul")

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> Lanes:
        return self._binary(other, "fdiv", "sdiv")

    def __rtruediv__(self, other: Any) -> Lanes:
        return self._binary(other, "fdiv", "sdiv", swap=True)

    def __and__(self, other: Any) -> Lanes:
        return self._binary(other, "", "and_")

    def __or__(self, other: Any) -> Lanes:
        return self._binary(other, "", "or_")

    def __xor__(self, other: Any) -> Lanes:
        return self._binary(other, "", "xor")

    def __lshift__(self, other: Any) -> Lanes:
        return self._binary(other, "", "shl")

    def __rshift__(self, other: Any) -> Lanes:
        return self._binary(other, "", "lshr")

    def __neg__(self) -> Lanes:
        if self._float():
            return Lanes(self.builder, self.builder.fneg(self.value))
        return self.like(0) - self

    def compare(self, sign: str, other: Any) -> Lanes:
        """The mask of an ordered comparison; "!=" is true for NaN."""
        other = self.like(other)
        b = self.builder
        if not self._float():
            return Lanes(b, b.icmp_signed(sign, self.value, other.value))
        ordered = b.fcmp_unordered if sign == "!=" else b.fcmp_ordered
        return Lanes(b, ordered(sign, self.value, other.value))

    def __lt__(self, other: Any) -> Lanes:
        return self.compare("<", other)

    def __gt__(self, other: Any) -> Lanes:
        return self.compare(">", other)

    def __le__(self, other: Any) -> Lanes:
        return self.compare("<=", other)

    def __ge__(self, other: Any) -> Lanes:
        return self.compare(">=", other)

    def cast(self, element: Any) -> Lanes:
        """The same numbers as lanes of another type."""
        b, kind = self.builder, element
        if isinstance(self.kind, ir.VectorType):
            kind = ir.VectorType(element, self.kind.count)
        if element == self.element:
            return self
        if self._float():
            widths = [WIDTH.get(str(each), 0) for each in (self.element, element)]
            made = b.fptosi
            if element in (F16, F32, F64):
                made = b.fpext if widths[0] < widths[1] else b.fptrunc
        elif element in (F32, F64):
            made = b.uitofp if self.element in (I1, I8) else b.sitofp
        elif element.width < self.element.width:
            made = b.trunc
        else:
            made = b.zext if self.element in (I1, I8) else b.sext
        return Lanes(b, made(self.value, kind))

    def bits(self, element: Any) -> Lanes:
        """The same bits as lanes of another type of the same width."""
        kind = element
        if isinstance(self.kind, ir.VectorType):
            kind = ir.VectorType(element, self.kind.count)
        return Lanes(self.builder, self.builder.bitcast(self.value, kind))

    def call(self, name: str, *others: Lanes) -> Lanes:
        """An LLVM intrinsic of operands of this type: `x.call("llvm.sqrt")`."""
        suffix = str(self.element).replace("float", "f32").replace("double", "f64")
        if isinstance(self.kind, ir.VectorType):
            suffix = f"v{self.kind.count}{suffix}"
        kind = ir.FunctionType(self.kind, [self.kind] * (1 + len(others)))
        made = cgutils.get_or_insert_function(self.builder.module, kind, f"{name}.{suffix}")
        return Lanes(
            self.builder, self.builder.call(made, [self.value, *(o.value for o in others)])
        )

    def fold(self, combine: Callable[[Lanes, Lanes], Lanes]) -> Lanes:
        """The scalar that combines all lanes, always by the same tree."""
        b, value, count = self.builder, self.value, self.kind.count
        while count > 1:
            count //= 2
            pick = ir.VectorType(I32, count)
            low = b.shuffle_vector(value, value, ir.Constant(pick, list(range(count))))
            high = b.shuffle_vector(value, value, ir.Constant(pick, list(range(count, 2 * count))))
            value = combine(Lanes(b, low), Lanes(b, high)).value
        return Lanes(b, b.extract_element(value, I32(0)))


def where(mask: Lanes, yes: Any, no: Any) -> Lanes:
    """The lanes of `yes` where the mask holds, of `no` elsewhere; one of them may be a number."""
    if not isinstance(yes, Lanes):
        yes = no.like(yes)
    no = yes.like(no)
    b = mask.builder
    return Lanes(b, b.select(mask.value, yes.value, no.value))


def chosen(number: Lanes, forms: Mapping[int, Callable[[], Any]]) -> Any:
    """The result of the form of that number, which is known when the program runs: a switch.

    Every number is one of the forms'; where they have results, these are of one type.
    """
    b = number.builder
    blocks = {case: b.append_basic_block("case") for case in forms}
    done = b.append_basic_block("done")
    table = b.switch(number.value, blocks[min(forms)])
    made = []
    for case, form in forms.items():
        table.add_case(ir.Constant(number.kind, case), blocks[case])
        b.position_at_end(blocks[case])
        made.append((form(), b.block))
        b.branch(done)
    b.position_at_end(done)
    if made[0][0] is None:
        return None
    result = b.phi(made[0][0].kind)
    for value, block in made:
        result.add_incoming(value.value, block)
    return Lanes(b, result)


def stretch(
    builder: Any,
    bounds: tuple[Any, Any],
    step: int,
    sums: list[Lanes],
    body: Callable[[Lanes, list[Lanes]], list[Lanes]],
) -> list[Lanes]:
    """Write a loop over `bounds` and return what `body(i, sums)` made of the sums.

    builder: of the program. step: from one i to the next. sums: what they begin with.
    """
    before = builder.block
    head, run, done = (builder.append_basic_block(name) for name in ("head", "run", "done"))
    builder.branch(head)
    builder.position_at_end(head)
    i = builder.phi(I64)
    i.add_incoming(bounds[0], before)
    phis = [builder.phi(total.kind) for total in sums]
    for phi, total in zip(phis, sums):
        phi.add_incoming(total.value, before)
    builder.cbranch(builder.icmp_signed("<", i, bounds[1]), run, done)
    builder.position_at_end(run)
    made = body(Lanes(builder, i), [Lanes(builder, phi) for phi in phis])
    i.add_incoming(builder.add(i, I64(step)), builder.block)
    for phi, total in zip(phis, made):
        phi.add_incoming(total.value, builder.block)
    builder.branch(head)
    builder.position_at_end(done)
    return [Lanes(builder, phi) for phi in phis]


def of_bfloat16(bits: Lanes) -> Lanes:
    """The numbers whose bits as bfloat16 these int16 are: those of float32, the lower half 0."""
    return (bits.cast(I32) << 16).bits(F32)


def to_bfloat16(value: Lanes) -> Lanes:
    """The bits of float32 rounded to bfloat16, ties to even; of NaN, those of a quiet one."""
    return _rounded(value).cast(I16)


def positive_to_bfloat16(value: Lanes) -> Lanes:
    """As `to_bfloat16` in fewer steps, of what is not negative; ties upwards."""
    return ((value.bits(I32) + 0x8000) >> 16).cast(I16)


def _rounded(value: Lanes) -> Lanes:
    """The same in the lower half of 32 bits, of which the others are 0."""
    bits = value.bits(I32)
    even = bits + ((bits >> 16) & 1) + 0x7FFF
    return where(value.compare("!=", value), (bits >> 16) | 0x40, even >> 16)


def paired_bfloat16(low: Lanes, high: Lanes) -> Lanes:
    """The bits of both, rounded to bfloat16, as the halves of 32 bits."""
    return _rounded(low) | (_rounded(high) << 16)


def maximum(a: Lanes, b: Lanes) -> Lanes:
    """The larger of the two; NaN if either is."""
    return where((a > b) | a.compare("!=", a), a, b)


def minimum(a: Lanes, b: Lanes) -> Lanes:
    """The smaller of the two; NaN if either is."""
    return where((a < b) | a.compare("!=", a), a, b)


# ---------------------------------------------------------------------------------------- memory
def _place(p: Lanes, i: Any, element: Any, count: int) -> Any:
    b = p.builder
    base = p.value
    if not isinstance(base.type, ir.PointerType):
        base = b.inttoptr(base, element.as_pointer())
    else:
        base = b.bitcast(base, element.as_pointer())
    index = i.value if isinstance(i, Lanes) else I64(i)
    return b.bitcast(b.gep(base, [index]), ir.VectorType(element, count).as_pointer())


def load_lanes(p: Lanes, i: Any, element: Any = F32, count: int = LANES) -> Lanes:
    """Lanes i, i+1, … of the array at p (an address or a pointer)."""
    made = p.builder.load(_place(p, i, element, count))
    made.align = WIDTH[str(element)]
    return Lanes(p.builder, made)


def load_one(p: Lanes, element: Any = F32) -> Lanes:
    """The number at an address."""
    made = p.builder.load(p.builder.inttoptr(p.value, element.as_pointer()))
    made.align = WIDTH[str(element)]
    return Lanes(p.builder, made)


def store_lanes(p: Lanes, i: Any, value: Lanes) -> None:
    """Write the lanes at p[i], p[i+1], …"""
    made = p.builder.store(value.value, _place(p, i, value.element, value.kind.count))
    made.align = WIDTH[str(value.element)]


def prefetch(p: Lanes, nearness: int = 3) -> None:
    """Ask for the cache line at an address, which is read later: 3 for the nearest cache."""
    pointer = ir.IntType(8).as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [pointer, I32, I32, I32])
    function = cgutils.get_or_insert_function(p.builder.module, kind, "llvm.prefetch.p0")
    p.builder.call(function, [p.builder.inttoptr(p.value, pointer), I32(0), I32(nearness), I32(1)])


def first(count: Lanes, lanes: int = LANES) -> Lanes:
    """The mask of the first `count` (int64) lanes."""
    b = count.builder
    iota = Lanes(b, ir.Constant(ir.VectorType(I64, lanes), list(range(lanes))))
    return iota < count.splat(lanes)


def _masked(p: Lanes, i: Any, kind: Any, what: str) -> tuple[Any, Any]:
    b = p.builder
    place = _place(p, i, kind.element, kind.count)
    mask = ir.VectorType(I1, kind.count)
    suffix = str(kind.element).replace("float", "f32").replace("double", "f64")
    suffix = suffix.replace("half", "f16")
    name = f"llvm.masked.{what}.v{kind.count}{suffix}.p0"
    if what == "load":
        shape = ir.FunctionType(kind, [place.type, I32, mask, kind])
    else:
        shape = ir.FunctionType(ir.VoidType(), [kind, place.type, I32, mask])
    return place, cgutils.get_or_insert_function(b.module, shape, name)


def load_some(
    p: Lanes, i: Any, mask: Lanes, other: float = 0.0, element: Any = F32, count: int = LANES
) -> Lanes:
    """The lanes of p[i]… where the mask holds, `other` elsewhere; the rest is not read."""
    kind = ir.VectorType(element, count)
    place, made = _masked(p, i, kind, "load")
    rest = ir.Constant(kind, [float(other) if element in (F16, F32, F64) else int(other)] * count)
    align = I32(WIDTH[str(element)])
    return Lanes(p.builder, p.builder.call(made, [place, align, mask.value, rest]))


def store_some(p: Lanes, i: Any, value: Lanes, mask: Lanes) -> None:
    """Write the lanes at p[i]… where the mask holds."""
    place, made = _masked(p, i, value.kind, "store")
    align = I32(WIDTH[str(value.element)])
    p.builder.call(made, [value.value, place, align, mask.value])
