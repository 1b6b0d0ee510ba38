"""Matrix products: `matmul` (transposes, broadcast batches), `linear` (bias, activation).

Of oneDNN's two fast implementations, "brg" crawls through a wide row-major right operand (64 x 4096
x 4096: 65 ms against 38 for "gemm") and is faster on smaller ones (64 x 784 x 1024: 0.96 ms against
1.5), so each is a variant of its own. Constant weights are packed once, when the
entry is made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache, partial

import numpy as np

from soapstone.dtypes import name_of
from soapstone.kernels.cpu.onednn.descriptors import (
    ACTIVATIONS,
    ARG_BIAS,
    ARG_DST,
    ARG_SRC,
    ARG_WEIGHTS,
    WEIGHTS,
    Activation,
    Binary,
    Integers,
    Kept,
    Layout,
    Post,
    Primitive,
    Step,
    attributes,
    compile_primitive,
    describe,
    implementation,
    next_implementation,
    on_operands,
    post_argument,
)
from soapstone.kernels.cpu.onednn.execute import Program, empty, served
from soapstone.kernels.cpu.onednn.library import Handle, UnsupportedError, engine, threads
from soapstone.kernels.cpu.onednn.scaling import Scaling
from soapstone.kernels.cpu.substrate.layout import merged, rows
from soapstone.kernels.entry import BFLOAT16, Array, Call, Entry
from soapstone.kernels.registry import variant
from soapstone.records import dataclass

_FAST = "brg"  # what the name of the implementation has that is fast on many matrices
FORMS = {"onednn": "first", "onednn_gemm": "gemm", "onednn_packed": "packed"}  # by variant


def product_variants(
    operator: str,
) -> Callable[[Callable[..., Entry | None]], Callable[..., Entry | None]]:
    """Return a decorator that registers `bind(call, form)` as one variant for each form.

    Which form is fastest depends on shapes and strides; measured cost decides.
    """

    def register(bind: Callable[..., Entry | None]) -> Callable[..., Entry | None]:
        for name, form in FORMS.items():
            variant(operator, name, promises=True)(partial(bind, form=form))
        return bind

    return register


@dataclass(frozen=True)
class Product:
    """Layouts of y = a @ b + bias, then steps, all of one rank; `b` may be left to oneDNN."""

    a: Layout
    b: Layout
    y: Layout
    bias: bool
    posts: tuple[Post, ...]
    threads: int
    form: str  # first, or gemm
    any_gemm: bool = False  # whether "gemm" may be oneDNN's first choice
    integers: Integers | None = None

    def __str__(self) -> str:
        return f"matmul {self!r}"


def _description(product: Product) -> Handle:
    columns = product.b.shape[-1]
    shape = (1,) * (len(product.y.shape) - 1) + (columns,)
    bias = Layout.dense(shape).descriptor if product.bias else None
    attribute = attributes(*product.posts, integers=product.integers)
    return describe(
        "matmul",
        *(engine(), product.a.descriptor, product.b.descriptor, bias),
        *(product.y.descriptor, attribute),
        what=product,
    )


@Kept
def matmul_primitive(product: Product) -> Primitive | None:
    """Return the primitive, or None where oneDNN has none but plain loops."""
    with threads(product.threads):
        try:
            found = _description(product)
        except UnsupportedError:
            return None
        if product.form == "gemm":
            if "gemm" in implementation(found) and not product.any_gemm:
                return None  # the first form already
            while "gemm" not in implementation(found) and next_implementation(found):
                pass
            if "gemm" not in implementation(found):
                return None
        if "ref" in implementation(found):
            return None
        return compile_primitive("matmul", found)


def _matrix(array: Array) -> Layout | None:
    """Return the layout of the array's matrices, or None unless rows or columns are contiguous."""
    return _matrix_of(array.shape, array.strides, array.itemsize, name_of(array.dtype))


@lru_cache(maxsize=1024)
def _matrix_of(
    shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int, dtype: str
) -> Layout | None:
    rank = len(shape)
    rows, columns = (stride // itemsize for stride in strides[-2:])
    row_major = columns == 1 or shape[-1] == 1
    if not row_major and rows != 1 and shape[-2] != 1:
        return None
    order = (*range(rank - 2), *((rank - 2, rank - 1) if row_major else (rank - 1, rank - 2)))
    layout = Layout.laid(shape, strides, itemsize, dtype, order)
    if layout.strides is None:
        return None
    # A leading dimension shorter than the row is an overlapping window: not a matrix to BLAS.
    inner, outer = (rank - 1, rank - 2) if row_major else (rank - 2, rank - 1)
    short = layout.strides[outer] < layout.shape[inner] and layout.shape[outer] > 1
    return None if short or layout.strides[inner] != 1 else layout


def product(
    program: Program,
    operands: tuple[Array, Array, Array],
    bias: Array | None,
    steps: Sequence[Step],
    form: str,
    constant: bool = False,
    scaling: Scaling | None = None,
) -> Entry | None:
    """Return the entry of y = a @ b + bias, then the steps, on views of equal rank, or None.

    Form "first" is oneDNN's own choice, "gemm" its classic product where that is not the first, and
    "packed" reorders b into oneDNN's format on every run. Form "first" packs constant weights once,
    so they have no form "packed"; "gemm" reads them as they are, which is best for single rows, and
    so does "first" for these, unless they are bytes: those would take five times as long.
    "bfloat16" packs them too, and rounds a and b where they are not of that type.
    Operands with neither rows nor columns contiguous, or in layouts that oneDNN would serve by
    plain loops, or many matrices by its classic product, are staged through dense copies.
    """
    a, b, y = operands
    layouts = [_matrix(array) for array in operands]
    dense = _dense(a), _dense(b), Layout.dense(y.shape, dtype=name_of(y.dtype))
    integers = scaling.integers(a, y, 1 << y.ndim - 1) if scaling else None
    if form == "packed" and (constant or a.shape[-2] == 1):
        return None
    posts = tuple(
        step
        if isinstance(step, Activation)
        else Binary(step[0], Layout.dense(step[1].shape, dtype=name_of(step[1].dtype)))
        for step in steps
    )
    several = form == "first" and (a.shape[-2] > 1 or scaling is not None)
    packed = form == "packed" or (constant and (several or form == BFLOAT16))
    if _misread(posts, y):
        layouts[2] = None
    own = tuple(layout or flat for layout, flat in zip(layouts, dense))
    found = _chosen(own, dense, bias is not None, posts, program.threads, form, packed, integers)
    primitive = None if found is None else matmul_primitive(found)
    if found is None or primitive is None:
        return None
    left, right, out = found.a, found.b, found.y
    wanted = primitive.descriptor(WEIGHTS) if packed else right.descriptor
    there = [layout or Layout.of(array) for layout, array in zip(layouts, operands)]
    arguments = {
        ARG_SRC: program.source(a, there[0], left.descriptor),
        ARG_WEIGHTS: program.source(b, there[1], wanted, constant=constant),
        ARG_DST: program.target(y, there[2], out.descriptor),
    }
    if bias is not None:
        row = bias.reshape((1,) * (y.ndim - 1) + bias.shape)
        flat = Layout.dense(row.shape).descriptor
        arguments[ARG_BIAS] = program.source(row, Layout.of(row), flat)
    for index, step in enumerate(steps):
        if not isinstance(step, Activation):
            flat = Layout.dense(step[1].shape, dtype=name_of(step[1].dtype)).descriptor
            arguments[post_argument(index)] = program.source(step[1], Layout.of(step[1]), flat)
    if scaling is not None:
        arguments |= scaling.arguments(program)
    program.step(primitive, arguments)
    return program.entry()


def _dense(array: Array) -> Layout:
    """Return the layout of a copy, matrix by matrix, in rows or columns as those of the array."""
    order = list(range(array.ndim))
    if array.ndim > 2 and array.strides[-2] == array.itemsize < array.strides[-1]:
        order[-2:] = order[:-3:-1]
    return Layout.dense(array.shape, order, name_of(array.dtype))


Three = tuple[Layout, ...]  # of a, b and y


@lru_cache(maxsize=512)
def _chosen(
    own: Three,
    dense: Three,
    bias: bool,
    posts: tuple[Post, ...],
    threads: int,
    form: str,
    packed: bool,
    integers: Integers | None,
) -> Product | None:
    """Return a product that there is a primitive of, in the layouts that suit it, or None.

    own, dense: layouts of the operands where they are, and of dense copies; see `product`.
    """
    rounds, found = form == BFLOAT16, None
    for left, right, out in (own,) if form == "gemm" else (own, dense):
        if rounds and left.dtype == "float32":  # it is copied in any case
            left = replace(dense[0], dtype=form)
        if out.strides is not None and out.strides[-1] != 1:
            out = dense[2]  # no implementation writes columns
        if packed:
            right = Layout.any(right.shape, form if rounds else right.dtype)
        form_of = "gemm" if form == "gemm" else "first"
        made = Product(left, right, out, bias, posts, threads, form_of, integers=integers)
        primitive = matmul_primitive(made)
        if primitive is None:
            continue
        fast = len(out.shape) == 2 or not rounds or _FAST in primitive.implementation
        if found is None or fast:
            found = made
        if fast:
            break
    return found


def _misread(posts: Sequence[Post], y: Array) -> bool:
    """Return whether oneDNN's products might read a step's operand at wrong places for y's strides.

    They find the place in an operand that is repeated over batches from the offset in y as if y
    were dense, and crash where rows of several matrices lie between each other (3.x, AVX-512).
    """
    operands = [post for post in posts if isinstance(post, Binary)]
    if y.ndim == 2 or not operands:
        return False
    interleaved = y.shape[-3] > 1 and y.strides[-3] < y.strides[-2]
    return interleaved or any(post.operand.shape != y.shape for post in operands)


def read_as(form: str) -> str:
    """Return the other type that operands of a product may have."""
    return BFLOAT16 if form == BFLOAT16 else "float32"


def _batched(array: Array, rank: int) -> Array:
    """Return the array with axes of size 1 put before it up to the rank."""
    return array[(None,) * (rank - array.ndim)]


def _shared_batch(arrays: list[Array]) -> list[Array]:
    """Return the arrays with batch axes that all of them share merged, so far as strides allow."""
    while arrays[0].ndim > 3:
        views = [merged(array, 0) for array in arrays]
        same = all(array.shape[:2] == arrays[-1].shape[:2] for array in arrays)
        ones = all(
            array.shape[:2] == (1, 1) or array.shape[:2] == arrays[-1].shape[:2] for array in arrays
        )
        if not (same or ones) or any(view is None for view in views):
            return arrays
        arrays = [view for view in views if view is not None]
    return arrays


@product_variants("matmul")
def matmul(call: Call, steps: Sequence[Step] = (), form: str = "first") -> Entry | None:
    """Return the entry of y = a @ b with the attributes' transposes, then the steps.

    A constant right operand is packed once, here.
    """
    a, b = call.inputs
    (y,) = call.outputs
    if not served(call, "float32", read_as(form)) or min(a.ndim, b.ndim, y.ndim) < 2:
        return None
    if y.size == 0:
        return empty()
    if a.size == 0 or b.size == 0:
        return None
    a = a.swapaxes(-1, -2) if call.attributes.get("transpose_a", False) else a
    b = b.swapaxes(-1, -2) if call.attributes.get("transpose_b", False) else b
    batch = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    if a.shape[-1] != b.shape[-2] or y.shape != (*batch, a.shape[-2], b.shape[-1]):
        return None
    rank = y.ndim
    a, b = _batched(a, rank), _batched(b, rank)
    constant = 1 in call.constants
    program = Program(call.threads)
    if b.shape[:-2] == (1,) * (rank - 2) and a.shape[:-2] == y.shape[:-2]:
        flat_a, flat_y, flat_steps = rows(a), rows(y), row_steps(steps, y)
        if flat_a is not None and flat_y is not None and flat_steps is not None:
            flat = b.reshape(b.shape[-2:])  # only axes of size 1 go: always a view
            return product(program, (flat_a, flat, flat_y), None, flat_steps, form, constant)
    operands = [_batched(step[1], rank) for step in steps if not isinstance(step, Activation)]
    a, b, *operands, y = _shared_batch([a, b, *operands, y])
    rest = iter(operands)
    steps = [step if isinstance(step, Activation) else (step[0], next(rest)) for step in steps]
    return product(program, (a, b, y), None, steps, form, constant)


def row_steps(steps: Sequence[Step], y: Array) -> list[Step] | None:
    """Return the steps with operands as matrices of y's rows, or None where they are no such."""

    def flat(operand: Array) -> Array | None:
        if operand.shape == y.shape:
            return rows(operand) if operand.ndim > 1 else operand[None]
        one = operand.size == max(operand.shape[-1:], default=1)
        return operand.reshape(1, operand.size) if one else None

    return on_operands(steps, flat)


@product_variants("linear")
def linear(call: Call, steps: Sequence[Step] = (), form: str = "first") -> Entry | None:
    """Return the entry of y = activation(x @ w + b) over x's last axis, then the steps.

    Constant weights are packed once, here.
    """
    x, w, *rest = call.inputs
    (y,) = call.outputs
    activation = call.attributes.get("activation")
    if (
        not served(call, "float32", read_as(form))
        or activation not in ACTIVATIONS
        or w.ndim != 2
        or x.ndim < 1
    ):
        return None
    if y.size == 0:
        return empty()
    if x.size == 0 or x.shape[-1] != w.shape[0] or y.shape != (*x.shape[:-1], w.shape[1]):
        return None
    bias = rest[0] if rest else None
    if (bias is None) == bool(call.attributes.get("bias", False)):
        return None
    own = ACTIVATIONS[activation]
    after = row_steps(steps, y)
    if after is None:
        return None
    if x.ndim == 1:
        x, y = x[None], y[None]
    program = Program(call.threads)
    rows_x, rows_y = rows(x), rows(y)
    if rows_x is None:
        rows_x = program.dense_source(x).reshape(-1, x.shape[-1])
    if rows_y is None:
        rows_y = program.dense_target(y).reshape(-1, y.shape[-1])
    constant = 1 in call.constants
    chain = [own, *after] if own else after
    return product(program, (rows_x, w, rows_y), bias, chain, form, constant)
