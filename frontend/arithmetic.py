"""Python's operators on values of models: element-wise layers, and cutting with brackets."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, Self

from soapstone.frontend.arguments import integer
from soapstone.ir.errors import GraphError, ShapeError
from soapstone.ir.spec import operators


class Arithmetic:
    """What Python's operators work on: each is an element-wise layer of its `model`.

    The other operand is a value of the same model, or a number. `t[:, 0]`, `t[..., 1:3]` and
    `t[:, None]` cut as NumPy does, along all axes but that of samples, which stays whole.
    """

    __slots__ = ()
    model: Any  # whose methods are layers
    shape: Any  # the extents
    from_array = "model.constant(name, array)"  # what makes such a value of an array

    def __array_ufunc__(self, function: Any, method: str, *operands: Any, **options: Any) -> Any:
        """Return what the layer of a NumPy function's name, or Python's operator, makes.

        Raises:
            GraphError: there is no such layer, or the function is given more than tensors.
        """
        name = function.__name__
        if method == "__call__" and not options:
            values = [x if isinstance(x, Arithmetic) else self._number(name, x) for x in operands]
            if name in _OPERATORS:
                return _OPERATORS[name](*values)
            known = next((each for each in operators() if each.name == name), None)
            if known is not None and known.formula is not None:
                return getattr(self.model, name)(*values)
        raise self._of_numpy(name)

    def __array_function__(self, function: Any, *_: Any) -> Any:
        raise self._of_numpy(function.__name__)

    def _of_numpy(self, name: str) -> GraphError:
        return GraphError(
            f"numpy.{name}: a tensor found, arrays needed; tensors have layers instead, such as"
            " model.exp(t), and methods, such as t.sum(axis=1)"
        )

    def _layer(self, name: str, *operands: Any, **attributes: Any) -> Self:
        made: Self = getattr(self.model, name)(self, *operands, **attributes)
        return made

    def __add__(self, other: Self | float) -> Self:
        if isinstance(other, Arithmetic):
            return self._layer("add", other)
        return self._layer("affine", shift=self._number("+", other))

    def __sub__(self, other: Self | float) -> Self:
        if isinstance(other, Arithmetic):
            return self._layer("sub", other)
        return self._layer("affine", shift=-self._number("-", other))

    def __mul__(self, other: Self | float) -> Self:
        if isinstance(other, Arithmetic):
            return self._layer("mul", other)
        return self._layer("affine", scale=self._number("*", other))

    def __truediv__(self, other: Self | float) -> Self:
        if isinstance(other, Arithmetic):
            return self._layer("div", other)
        divisor = self._number("/", other)
        if divisor == 0:
            raise GraphError("/: 0 found, another number needed")
        return self._layer("affine", scale=1 / divisor)

    def __rsub__(self, other: float) -> Self:
        return self._layer("affine", scale=-1.0, shift=self._number("-", other))

    def __rtruediv__(self, other: float) -> Self:
        return self._layer("reciprocal") * self._number("/", other)

    __radd__ = __add__
    __rmul__ = __mul__

    def __neg__(self) -> Self:
        return self._layer("neg")

    def __abs__(self) -> Self:
        return self._layer("abs")

    def __matmul__(self, other: Self) -> Self:
        return self._layer("matmul", other)

    def __pow__(self, exponent: Self | float) -> Self:
        if isinstance(exponent, Arithmetic):
            return self._layer("pow", exponent)
        return self._layer("power", exponent=self._number("**", exponent))

    def __gt__(self, other: Self | float) -> Self:
        return self._layer("greater", other)

    def __ge__(self, other: Self | float) -> Self:
        return self._layer("greater_equal", other)

    def __lt__(self, other: Self | float) -> Self:
        return self._layer("less", other)

    def __le__(self, other: Self | float) -> Self:
        return self._layer("less_equal", other)

    def __getitem__(self, key: Any) -> Self:
        keys = key if isinstance(key, tuple) else (key,)
        extents = tuple(self.shape)
        made, shape, axis = self, [], 0
        for each in _whole(keys, extents):
            if each is None:
                shape.append(1)
                continue
            extent = extents[axis]
            if isinstance(each, slice):
                start, stop, step = _steps(each, extent)
                kept = len(range(start, stop, step))
            else:
                start, kept = _place(each, axis, extent), 0
                stop, step = start + 1, 1
            if (start, stop, step) != (0, extent, 1):
                if axis == 0:
                    raise GraphError(
                        f"[{_text(each)}]: axis 0 runs over samples and is kept whole;"
                        " [:, …] cuts the others"
                    )
                made = made._layer("slice", axis, start, stop, step)
            if isinstance(each, slice):
                shape.append(kept)
            elif axis == 0:
                raise GraphError(f"[{_text(each)}]: axis 0 runs over samples and is kept")
            axis += 1
        return made if tuple(made.shape) == tuple(shape) else made._layer("reshape", shape)

    def _number(self, symbol: str, value: Any) -> float:
        number = hasattr(value, "__float__") and not isinstance(value, bool)
        if number and not getattr(value, "shape", ()):
            return float(value)
        shape = getattr(value, "shape", None)
        told = type(value).__name__ + (f" of shape {tuple(shape)}" if shape else "")
        raise GraphError(
            f"{symbol}: {told} found beside a tensor; a tensor or a number needed"
            f" ({self.from_array} makes a tensor of an array)"
        )

    def reshape(self, *shape: int | Sequence[int]) -> Self:
        """Return the elements in another shape: (4, -1) or 4, -1, as of `Model.reshape`."""
        return self._layer("reshape", _listed(shape))

    def transpose(self, *permutation: int | Sequence[int]) -> Self:
        """Return the axes in the order of a permutation, as of `Model.transpose`."""
        return self._layer("transpose", _listed(permutation))

    def sum(self, axis: int | Sequence[int] | None = None, keepdims: bool = False) -> Self:
        """Return the sum along an axis or several, all by default.

        axis: counted from the end where negative. keepdims: whether it stays, with extent 1.
        """
        return self._layer("reduce_sum", axis, keepdims)

    def mean(self, axis: int | Sequence[int] | None = None, keepdims: bool = False) -> Self:
        """Return the mean along an axis or several, all by default.

        axis: counted from the end where negative. keepdims: whether it stays, with extent 1.
        """
        return self._layer("reduce_mean", axis, keepdims)

    def max(self, axis: int | Sequence[int] | None = None, keepdims: bool = False) -> Self:
        """Return the maximum along an axis or several, all by default.

        axis: counted from the end where negative. keepdims: whether it stays, with extent 1.
        """
        return self._layer("reduce_max", axis, keepdims)

    def min(self, axis: int | Sequence[int] | None = None, keepdims: bool = False) -> Self:
        """Return the minimum along an axis or several, all by default.

        axis: counted from the end where negative. keepdims: whether it stays, with extent 1.
        """
        return self._layer("reduce_min", axis, keepdims)


# Functions of NumPy that are Python's operators, whose layers are called otherwise.
_OPERATORS: dict[str, Callable[..., Any]] = {
    "add": operator.add,
    "subtract": operator.sub,
    "multiply": operator.mul,
    "divide": operator.truediv,
    "power": operator.pow,
    "matmul": operator.matmul,
    "negative": operator.neg,
    "absolute": operator.abs,
    "less": operator.lt,
    "greater": operator.gt,
}


def _listed(values: tuple[Any, ...]) -> tuple[Any, ...]:
    single = len(values) == 1 and isinstance(values[0], Sequence)
    return tuple(values[0]) if single else values


def _whole(keys: tuple[Any, ...], extents: tuple[int, ...]) -> list[Any]:
    """Return one key for each axis, and None for each new one."""
    given = sum(key is not None and key is not ... for key in keys)
    if given > len(extents) or sum(key is ... for key in keys) > 1:
        raise ShapeError(
            f"[{', '.join(map(_text, keys))}]: {given} axes found, at most {len(extents)} and one"
            f" … needed for shape {extents}"
        )
    rest = [slice(None)] * (len(extents) - given)
    if not any(key is ... for key in keys):
        return [*keys, *rest]
    return [each for key in keys for each in (rest if key is ... else [key])]


def _steps(key: slice, extent: int) -> tuple[int, int, int]:
    try:
        start, stop, step = key.indices(extent)
    except (TypeError, ValueError):
        raise GraphError(
            f"[{_text(key)}]: integers needed around the colons, the last not 0"
        ) from None
    return (start, stop, step) if range(start, stop, step) else (0, 0, 1)


def _place(key: Any, axis: int, extent: int) -> int:
    try:
        place = integer(key)
    except TypeError:
        raise GraphError(
            f"[{_text(key)}]: {type(key).__name__} found; integers, slices, None and … needed"
            " (model.gather takes positions that are data)"
        ) from None
    if not -extent <= place < extent:
        raise ShapeError(f"[{place}]: axis {axis} has {extent} positions; another one needed")
    return place % extent


def _text(key: Any) -> str:
    if isinstance(key, slice):
        parts = [key.start, key.stop, *([] if key.step is None else [key.step])]
        return ":".join("" if part is None else str(part) for part in parts)
    return "…" if key is ... else str(key)
