"""Forms and laws of two-dimensional pooling (TASO, Table 2.2).

An average divides by the whole window (`all`), or by its positions inside the image (`inside`).
Only the first is a convolution with the kernel of equal weights, `pool_kernel`; where nothing is
padded the two are one. Averages are linear; maxima commute with what never decreases.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from soapstone.ir.attributes import Attributes
from soapstone.ir.law import Constant, Form, Law
from soapstone.ir.ops.elementwise.laws_arithmetic import TABLE
from soapstone.ir.ops.elementwise.laws_pointwise import ranks
from soapstone.ir.ops.forms import PADDINGS, STRIDES, kernel_size, read_window, size_text, window_of
from soapstone.ir.tensor import Array, TensorSpec
from soapstone.ir.term import Value

Readings = list[tuple[Value, ...]]
_SIZES: tuple[Value, ...] = ("3x3", "1x3", "2x2", "1x1")
_DIVISORS = {"all": True, "inside": False}


def _pool(parameters: Sequence[Value], *specs: TensorSpec) -> dict[str, object] | None:
    kernel = kernel_size(parameters[0])
    if kernel is None or specs[0].rank != 4:
        return None
    window = window_of(parameters[1], parameters[2], kernel)
    return None if window is None else {**window, "kernel": kernel, "ceil_mode": False}


def _read_pool(attributes: Attributes) -> Readings:
    kernel = attributes["kernel"]
    if attributes["ceil_mode"]:
        return []
    return [(size_text(kernel), *found) for found in read_window(attributes, kernel)]


def _max_pool(parameters: Sequence[Value], *specs: TensorSpec) -> Attributes | None:
    pool = _pool(parameters, *specs)
    return None if pool is None else {**pool, "indices": False}


def _read_max_pool(attributes: Attributes, *specs: TensorSpec) -> Readings:
    return [] if attributes["indices"] else _read_pool(attributes)


def _avg_pool(parameters: Sequence[Value], *specs: TensorSpec) -> Attributes | None:
    pool, divisor = _pool(parameters[:3], *specs), _DIVISORS.get(str(parameters[3]))
    return None if pool is None or divisor is None else {**pool, "include_pad": divisor}


def _read_avg_pool(attributes: Attributes, *specs: TensorSpec) -> Readings:
    padded = any(attributes["padding"])
    divisors = [
        n for n, whole in _DIVISORS.items() if not padded or whole == attributes["include_pad"]
    ]
    return [(*pool, n) for pool, n in itertools.product(_read_pool(attributes), divisors)]


def _pool_kernel(parameters: Sequence[Value], shape: tuple[int, ...]) -> Array | None:
    size = kernel_size(parameters[0])
    if size is None or len(shape) != 4 or shape[1] != 1 or shape[2:] != size:
        return None
    return np.full(shape, 1 / (size[0] * size[1]))


_WINDOW = {"k": _SIZES, "s": STRIDES, "p": PADDINGS}
MAX_POOL2D_FORMS = (Form("max_pool2d", 1, _WINDOW, _max_pool, _read_max_pool),)
AVG_POOL2D_FORMS = (
    Form("avg_pool2d", 1, {**_WINDOW, "n": tuple(_DIVISORS)}, _avg_pool, _read_avg_pool),
)
POOL_KERNEL = Constant("pool_kernel", 4, {"k": _SIZES}, _pool_kernel)

_X = ranks("x", "4")
_XY = ranks("x y", "44")
_SCALED = ranks("x w", "40")
_POINT = ("dim(y,-2) = 1", "dim(y,-1) = 1")


def _moving(pool: str, parameters: str) -> tuple[Law, ...]:
    """Return the laws that hold for every pooling: what it does not mix stays apart."""
    f = f"{pool}[{parameters}]"
    one = f"{pool}[{parameters.replace('s', '1', 1)}]"

    def concat(axis: int, f: str) -> str:
        return f"concat[{axis}]({f}(x), {f}(y)) = {f}(concat[{axis}](x, y))"

    average = TABLE if pool == "avg_pool2d" else None
    return (
        Law(f"{pool}-channels", concat(-3, f), (), _XY, TABLE),
        Law(
            f"{pool}-batch", concat(-4, f), (), _XY, "images are independent" if average else TABLE
        ),
        Law(f"{pool}-rows", concat(-2, one), ("k.h = 1",), _XY, "windows of one row"),
        Law(
            f"{pool}-columns",
            concat(-1, one),
            ("k.w = 1",),
            _XY,
            "windows of one column",
        ),
        Law(
            f"{pool}-transpose",
            f"transpose({f}(x)) = {f}(transpose(x))",
            ("k.h = k.w",),
            _X,
            "square windows",
        ),
        Law(
            f"{pool}-point",
            f"{pool}[{parameters.replace('k,s', '1x1,1')}](x) = x",
            (),
            _X,
            "windows of one position",
        ),
        Law(
            f"{pool}-point-padding",
            f"{pool}[{parameters.replace('k,s,p', '1x1,s,same')}](x)"
            f" = {pool}[{parameters.replace('k,s,p', '1x1,s,valid')}](x)",
            (),
            _X,
            "a window of one position has no padding",
        ),
    )


AVG_POOL2D_LAWS = (
    Law(
        "avg_pool2d-conv2d",
        "conv2d[depthwise,s,p,none](x, pool_kernel[k]) = avg_pool2d[k,s,p,all](x)",
        ranks=_X,
        source=f"{TABLE}, for averages over the whole window",
    ),
    *_moving("avg_pool2d", "k,s,p,n"),
    Law(
        "avg_pool2d-valid",
        "avg_pool2d[k,s,valid,all](x) = avg_pool2d[k,s,valid,inside](x)",
        ranks=_X,
        source="without padding every position is inside",
    ),
    Law(
        "avg_pool2d-add",
        "avg_pool2d[k,s,p,n](add(x, y)) = add(avg_pool2d[k,s,p,n](x), avg_pool2d[k,s,p,n](y))",
        where=("dim(x,-2) = dim(y,-2)", "dim(x,-1) = dim(y,-1)"),
        ranks=_XY,
        source="linear, for images of one size",
    ),
    Law(
        "avg_pool2d-smul",
        "avg_pool2d[k,s,p,n](smul(x, w)) = smul(avg_pool2d[k,s,p,n](x), w)",
        ranks=_SCALED,
        source="linear",
    ),
    Law(
        "avg_pool2d-conv2d-valid",
        "avg_pool2d[k,s,valid,n](conv2d[g,1,valid,none](x, y))"
        " = conv2d[g,s,valid,none](avg_pool2d[k,1,valid,n](x), y)",
        ranks=_XY,
        source="one filter for all channels commutes with convolution",
    ),
    Law(
        "avg_pool2d-conv2d-point",
        "avg_pool2d[k,s,p,n](conv2d[g,1,q,none](x, y))"
        " = conv2d[g,1,q,none](avg_pool2d[k,s,p,n](x), y)",
        where=_POINT,
        ranks=_XY,
        source="sums over channels commute with averages over positions",
    ),
    Law(
        "avg_pool2d-order",
        "avg_pool2d[k,s,valid,n](avg_pool2d[h,1,valid,n](x))"
        " = avg_pool2d[h,s,valid,n](avg_pool2d[k,1,valid,n](x))",
        ranks=_X,
        source="convolutions of one channel commute where nothing is padded",
    ),
    Law(
        "relu-avg_pool2d",
        "relu(avg_pool2d[k,s,p,n](relu(x))) = avg_pool2d[k,s,p,n](relu(x))",
        ranks=_X,
        source="relu's range",
    ),
    Law(
        "avg_pool2d-ones",
        "avg_pool2d[k,s,p,inside](ones) = ones",
        ranks=ranks("ones", "4"),
        source="an average of ones",
    ),
    Law("relu-pool_kernel", "relu(pool_kernel[k]) = pool_kernel[k]", source="positive"),
    Law("transpose-pool_kernel", "transpose(pool_kernel[k]) = pool_kernel[k]", source="constant"),
)
MAX_POOL2D_LAWS = (
    *_moving("max_pool2d", "k,s,p"),
    Law(
        "max_pool2d-relu",
        "max_pool2d[k,s,p](relu(x)) = relu(max_pool2d[k,s,p](x))",
        ranks=_X,
        source="relu never decreases",
    ),
    Law(
        "max_pool2d-relu-mask",
        "mul(relu(x), max_pool2d[k,1,same](x)) = mul(relu(x), max_pool2d[k,1,same](relu(x)))",
        ranks=_X,
        source="where relu(x) is not 0, neither is the maximum around it",
    ),
    Law(
        "max_pool2d-relu-sum",
        "relu(add(relu(x), max_pool2d[k,1,same](x))) = add(relu(x), max_pool2d[k,1,same](relu(x)))",
        ranks=_X,
        source="where relu(x) is not 0, neither is the maximum around it",
    ),
    Law(
        "max_pool2d-smul",
        "max_pool2d[k,s,p](smul(x, relu(w))) = smul(max_pool2d[k,s,p](x), relu(w))",
        ranks=_SCALED,
        source="scaling by what is not negative never decreases",
    ),
    Law(
        "max_pool2d-double",
        "max_pool2d[k,s,p](add(x, x)) = add(max_pool2d[k,s,p](x), max_pool2d[k,s,p](x))",
        ranks=_X,
        source="doubling never decreases",
    ),
    Law(
        "max_pool2d-triple",
        "max_pool2d[k,s,p](add(x, add(x, x)))"
        " = add(max_pool2d[k,s,p](x), add(max_pool2d[k,s,p](x), max_pool2d[k,s,p](x)))",
        ranks=_X,
        source="a positive multiple never decreases",
    ),
    Law(
        "max_pool2d-self-sum",
        "max_pool2d[k,s,p](add(x, relu(x)))"
        " = add(max_pool2d[k,s,p](x), max_pool2d[k,s,p](relu(x)))",
        ranks=_X,
        source="x and relu(x) are largest together",
    ),
    Law(
        "max_pool2d-order",
        "max_pool2d[k,s,p](max_pool2d[h,1,p](x)) = max_pool2d[h,s,p](max_pool2d[k,1,p](x))",
        ranks=_X,
        source="a maximum over both windows",
    ),
    Law(
        "max_pool2d-ones",
        "max_pool2d[k,s,p](ones) = ones",
        ranks=ranks("ones", "4"),
        source="a maximum of ones",
    ),
)
