"""Operators of PyTorch on rows: one rule for each, which says how it runs on many values at once.

The values of many calls are stacked along a new first dim. A rule is given an operator's arguments,
with an `Arg` for each tensor, and returns a function of the stacked tensors; it raises `NoRule`
where rows cannot be told apart. What it says is compared with PyTorch's own shapes before use.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

Batched = Callable[[list[Any]], Any]
# Methods of Python's arithmetic, without underscores, and the functions that they call.
ARITHMETIC = {"add": "add", "sub": "sub", "mul": "mul", "truediv": "div", "pow": "pow"}


class NoRule(Exception):
    """An operator, or one with these arguments, runs plainly; the text says why."""


@dataclass(frozen=True)
class Arg:
    """A tensor among arguments. place: among them. rows: whether each call has its own."""

    place: int
    shape: tuple[int, ...]
    rows: bool


def needs(*args: Any, rows: bool) -> None:
    """Raise where tensors are of rows, or are not, against what is needed."""
    for arg in args:
        if arg is not None and (not isinstance(arg, Arg) or arg.rows is not rows):
            raise NoRule("a tensor of each value needed" if rows else "a shared tensor needed")


def fill(given: Any, tensors: list[Any]) -> Any:
    """Return arguments with tensors in their places."""
    if isinstance(given, Arg):
        return tensors[given.place]
    if isinstance(given, (list, tuple)):
        return type(given)(fill(each, tensors) for each in given)
    return given


def _rank(args: Any) -> int:
    return max((len(a.shape) for a in args if isinstance(a, Arg)), default=0)


def _aligned(arg: Arg, rank: int) -> Batched:
    """Return what brings a tensor to a rank, for broadcasting."""
    place = arg.place
    if not arg.rows or len(arg.shape) == rank:
        return lambda t: t[place]
    shape = (-1, *(1,) * (rank - len(arg.shape)), *arg.shape)
    return lambda t: t[place].reshape(shape)


def pointwise(func: Any) -> Callable[..., Batched]:
    """Return the rule of an element-wise function of any number of tensors, with broadcasting."""

    def rule(*args: Any, **kwargs: Any) -> Batched:
        tensors = [a for a in args if isinstance(a, Arg)]
        if any(isinstance(value, Arg) for value in kwargs.values()):
            raise NoRule("a tensor by name")
        rank = _rank(tensors)
        if all(not a.rows or len(a.shape) == rank for a in tensors):
            if len(args) == 1 and not kwargs:
                return lambda t: func(t[0])
            if len(args) == 2 and len(tensors) == 2 and not kwargs:
                return lambda t: func(t[0], t[1])
        parts = [_aligned(a, rank) if isinstance(a, Arg) else None for a in args]
        return lambda t: func(*[p(t) if p else a for p, a in zip(parts, args)], **kwargs)

    return rule


def along(func: Any, *, new: int = 0) -> Callable[..., Batched]:
    """Return the rule of a function of one tensor along `dim`. new: how many dims it adds."""

    def rule(x: Arg, *args: Any, dim: Any = None, **kwargs: Any) -> Batched:
        given, rest = (args[0], args[1:]) if dim is None and args else (dim, args)
        if not isinstance(given, int) or any(isinstance(a, Arg) for a in (*rest, *kwargs.values())):
            raise NoRule("one dim needed")
        needs(x, rows=True)
        at = _dim(given, len(x.shape) + new)
        return lambda t: func(t[0], at, *rest, **kwargs)

    return rule


def _dim(dim: int, rank: int) -> int:
    return (dim if dim >= 0 else dim + rank) + 1


def parts(func: Any) -> Callable[..., Batched]:
    """Return the rule of a function that splits a tensor along a dim."""

    def rule(x: Arg, size: Any, dim: int = 0) -> Batched:
        needs(x, rows=True)
        at = _dim(dim, len(x.shape))
        size = list(size) if isinstance(size, (list, tuple)) else size
        return lambda t: func(t[0], size, at)

    return rule


def _split(x: Arg, split_size: Any, dim: int = 0) -> Batched:
    return parts(torch.split)(x, split_size, dim)


def _unbind(x: Arg, dim: int = 0) -> Batched:
    needs(x, rows=True)
    at = _dim(dim, len(x.shape))
    return lambda t: t[0].unbind(at)


def joined(func: Any, new: int) -> Callable[..., Batched]:
    """Return the rule of a function that joins tensors along a dim. new: how many dims it adds."""

    def rule(tensors: Any, dim: int = 0) -> Batched:
        needs(*tensors, rows=True)
        at, places = _dim(dim, len(tensors[0].shape) + new), [a.place for a in tensors]
        return lambda t: func([t[p] for p in places], at)

    return rule


def reduction(func: Any) -> Callable[..., Batched]:
    """Return the rule of a reduction over some dims, or over all but that of the calls."""

    def rule(x: Arg, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Batched:
        needs(x, rows=True)
        if dim is None:
            return lambda t: func(t[0].reshape(t[0].shape[0], -1), 1, dtype=dtype)
        dims = [_dim(d, len(x.shape)) for d in ([dim] if isinstance(dim, int) else dim)]
        if not dims:
            raise NoRule("dims needed")
        return lambda t: func(t[0], dims, keepdim, dtype=dtype)

    return rule


def softmax(func: Any) -> Callable[..., Batched]:
    """Return the rule of softmax or its logarithm along a dim."""

    def rule(x: Arg, dim: Any = None, _stacklevel: int = 3, dtype: Any = None) -> Batched:
        needs(x, rows=True)
        if dim is None:
            raise NoRule("a dim needed")
        at = _dim(dim, len(x.shape))
        return lambda t: func(t[0], at, dtype=dtype)

    return rule


def _linear(input: Arg, weight: Arg, bias: Any = None) -> Batched:
    needs(input, rows=True)
    needs(weight, bias, rows=False)
    places = (input.place, weight.place)
    if bias is None:
        return lambda t: functional.linear(t[places[0]], t[places[1]])
    return lambda t: functional.linear(t[places[0]], t[places[1]], t[bias.place])


def _matmul(x: Any, y: Any) -> Batched:
    if not isinstance(x, Arg) or not isinstance(y, Arg):
        raise NoRule("two tensors needed")
    a, b = len(x.shape), len(y.shape)
    if x.rows and not y.rows and b == 2:
        return lambda t: t[0] @ t[1]
    if not x.rows and y.rows and a == 2:
        if b == 1:
            return lambda t: functional.linear(t[1], t[0])
        return lambda t: t[0] @ t[1]
    if not x.rows or not y.rows or a > 2 or b > 2:
        raise NoRule("matrices or vectors needed")

    def run(t: list[Any]) -> Any:
        left = t[0] if a == 2 else t[0].unsqueeze(1)
        right = t[1] if b == 2 else t[1].unsqueeze(2)
        made = left @ right
        made = made if b == 2 else made.squeeze(2)
        return made if a == 2 else made.squeeze(1)

    return run


def _addmm(bias: Arg, x: Arg, y: Arg, *, beta: Any = 1, alpha: Any = 1) -> Batched:
    if (beta, alpha) != (1, 1):
        raise NoRule("alpha and beta of 1 needed")
    product, rank = _matmul(Arg(0, x.shape, x.rows), Arg(1, y.shape, y.rows)), 2
    added = _aligned(bias, rank)
    return lambda t: product([t[x.place], t[y.place]]) + added(t)


def _shape(x: Arg, shape: Any) -> list[int]:
    given = list(shape[0]) if len(shape) == 1 and isinstance(shape[0], (list, tuple)) else [*shape]
    rest = math.prod(n for n in given if n != -1)
    return [n if n != -1 else math.prod(x.shape) // max(rest, 1) for n in given]


def _reshape(x: Arg, *shape: Any) -> Batched:
    needs(x, rows=True)
    wanted = (-1, *_shape(x, shape))
    return lambda t: t[0].reshape(t[0].shape[0], *wanted[1:])


def _flatten(x: Arg, start_dim: int = 0, end_dim: int = -1) -> Batched:
    needs(x, rows=True)
    rank = len(x.shape)
    if not rank:
        raise NoRule("a dim needed")
    return lambda t: torch.flatten(t[0], _dim(start_dim, rank), _dim(end_dim, rank))


def _expand(x: Arg, *shape: Any) -> Batched:
    needs(x, rows=True)
    given = list(shape[0]) if len(shape) == 1 and isinstance(shape[0], (list, tuple)) else [*shape]
    lead = _aligned(x, len(given))
    return lambda t: lead(t).expand(-1, *given)


def _squeeze(x: Arg, dim: Any = None) -> Batched:
    needs(x, rows=True)
    if dim is None:
        shape = [n for n in x.shape if n != 1]
        return lambda t: t[0].reshape(t[0].shape[0], *shape)
    dims = [_dim(d, len(x.shape)) for d in ([dim] if isinstance(dim, int) else dim)]
    return lambda t: t[0].squeeze(dims)


def _transpose(x: Arg, dim0: int, dim1: int) -> Batched:
    needs(x, rows=True)
    a, b = _dim(dim0, len(x.shape)), _dim(dim1, len(x.shape))
    return lambda t: t[0].transpose(a, b)


def _t(x: Arg) -> Batched:
    needs(x, rows=True)
    return (lambda t: t[0]) if len(x.shape) < 2 else (lambda t: t[0].transpose(1, 2))


def _getitem(x: Arg, at: Any) -> Batched:
    if not x.rows:  # rows of a shared table
        if isinstance(at, Arg) and at.rows:
            return lambda t: functional.embedding(t[at.place], t[x.place])
        raise NoRule("one index needed")
    index = (slice(None), *(at if isinstance(at, tuple) else (at,)))
    if any(isinstance(each, (Arg, list)) for each in index):
        raise NoRule("numbers and slices needed")
    return lambda t: t[0][index]


def _embedding(input: Arg, weight: Arg, *rest: Any, **kwargs: Any) -> Batched:
    needs(input, rows=True)
    needs(weight, rows=False)
    names = ("padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse")
    given = dict(zip(names, rest)) | kwargs
    if given.get("max_norm") is not None or given.get("scale_grad_by_freq"):
        raise NoRule("no max_norm and scale_grad_by_freq needed: they depend on the batch")
    return lambda t: functional.embedding(t[input.place], t[weight.place], **given)


def _per_row_loss(func: Any) -> Callable[..., Batched]:
    def rule(input: Arg, target: Arg, *rest: Any, **kwargs: Any) -> Batched:
        names = ("weight", "size_average", "ignore_index", "reduce", "reduction")
        given = dict(zip((*names, "label_smoothing"), rest)) | kwargs
        how, ignored = given.pop("reduction", "mean"), given.pop("ignore_index", -100)
        if any(given.pop(name, None) is not None for name in ("weight", "size_average", "reduce")):
            raise NoRule("no weight, size_average or reduce needed")
        needs(input, target, rows=True)
        if len(input.shape) not in (1, 2) or len(target.shape) != len(input.shape) - 1:
            raise NoRule("classes by number, in at most one batch dim, needed")
        if how not in ("none", "mean", "sum"):
            raise NoRule("reduction none, mean or sum needed")

        def run(t: list[Any]) -> Any:
            x, y = t[input.place], t[target.place]
            each = func(
                x.reshape(-1, x.shape[-1]),
                y.reshape(-1),
                ignore_index=ignored,
                reduction="none",
                **given,
            )
            each = each.reshape(y.shape)
            if how == "none" or y.dim() == 1:
                return each if how != "mean" else each / (y != ignored)
            total = each.sum(1)
            return total if how == "sum" else total / (y != ignored).sum(1)

        return run

    return rule


def _mean_loss(func: Any) -> Callable[..., Batched]:
    def rule(x: Arg, y: Arg, *, reduction: str = "mean") -> Batched:
        needs(x, y, rows=True)
        if x.shape != y.shape:
            raise NoRule("equal shapes needed")

        def run(t: list[Any]) -> Any:
            each = func(t[x.place], t[y.place], reduction="none")
            if reduction == "none":
                return each
            flat = each.reshape(each.shape[0], -1)
            return flat.mean(1) if reduction == "mean" else flat.sum(1)

        return run

    return rule


def _recurrent(func: Any) -> Callable[..., Batched]:
    def rule(x: Arg, state: Any, *weights: Any) -> Batched:
        states = list(state) if isinstance(state, (list, tuple)) else [state]
        needs(x, *states, rows=True)
        needs(*weights, rows=False)
        lead, width = x.shape[:-1], states[0].shape[-1]

        def run(t: list[Any]) -> Any:
            count = t[x.place].shape[0]
            flat = [t[a.place].reshape(-1, a.shape[-1]) for a in (x, *states)]
            given = flat[1:] if isinstance(state, (list, tuple)) else flat[1]
            made = func(flat[0], given, *fill(weights, t))
            shape = (count, *lead, width)
            if isinstance(made, tuple):
                return tuple(each.reshape(shape) for each in made)
            return made.reshape(shape)

        return run

    return rule


def _layer_norm(
    x: Arg, shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5
) -> Batched:
    needs(x, rows=True)
    needs(weight, bias, rows=False)
    return lambda t: functional.layer_norm(
        t[x.place], list(shape), fill(weight, t), fill(bias, t), eps
    )


def _table() -> dict[Any, Callable[..., Batched]]:
    """Return the rule of each function and method of PyTorch that has one."""
    unary = "sigmoid tanh relu exp log neg sqrt rsqrt square abs sin cos log1p expm1 softplus elu"
    unary += " leaky_relu silu gelu logsigmoid softsign clone detach dropout clamp"
    unary += " erf sign reciprocal float double contiguous"
    binary = "add sub mul div true_divide pow maximum minimum lt le gt ge eq ne"
    rules: dict[str, Callable[..., Batched]] = {
        **{name: along(getattr(torch, name), new=1) for name in ("unsqueeze",)},
        **{name: along(getattr(torch, name)) for name in ("select", "narrow")},
        **{name: softmax(getattr(functional, name)) for name in ("softmax", "log_softmax")},
        **{name: reduction(getattr(torch, name)) for name in ("sum", "mean")},
        "chunk": parts(torch.chunk),
        "split": _split,
        "unbind": _unbind,
        "cat": joined(torch.cat, 0),
        "concat": joined(torch.cat, 0),
        "stack": joined(torch.stack, 1),
        **dict.fromkeys(("matmul", "mm", "mv", "bmm", "__matmul__"), _matmul),
        "addmm": _addmm,
        "linear": _linear,
        **dict.fromkeys(("view", "reshape"), _reshape),
        "flatten": _flatten,
        "expand": _expand,
        "squeeze": _squeeze,
        "transpose": _transpose,
        "t": _t,
        "__getitem__": _getitem,
        "embedding": _embedding,
        "cross_entropy": _per_row_loss(functional.cross_entropy),
        "nll_loss": _per_row_loss(functional.nll_loss),
        "mse_loss": _mean_loss(functional.mse_loss),
        "binary_cross_entropy_with_logits": _mean_loss(functional.binary_cross_entropy_with_logits),
        **{name: _recurrent(getattr(torch, name)) for name in ("lstm_cell", "gru_cell")},
        **{name: _recurrent(getattr(torch, name)) for name in ("rnn_tanh_cell", "rnn_relu_cell")},
        "layer_norm": _layer_norm,
    }
    del rules["bmm"]  # its first dim is no row's
    found: dict[Any, Callable[..., Batched]] = {}
    for home in (torch, torch.Tensor, functional, torch._C._nn):
        for name, rule in rules.items():
            if hasattr(home, name):
                found[getattr(home, name)] = rule
        for name in (unary + " " + binary).split():
            if callable(getattr(home, name, None)):  # torch.float is a type of elements
                found[getattr(home, name)] = pointwise(getattr(home, name))
    for name, function in ARITHMETIC.items():
        of = getattr(torch, function)
        found[getattr(torch.Tensor, f"__{name}__")] = pointwise(of)

        def turned(x: Any, y: Any, of: Any = of) -> Any:
            return of(y, x)

        found[getattr(torch.Tensor, f"__r{name}__")] = pointwise(turned)
    found[torch.Tensor.__neg__] = pointwise(torch.neg)
    return found


RULES = _table()
_VIEWING = (
    "split chunk unbind select narrow view reshape flatten expand squeeze unsqueeze transpose"
)
VIEWS = {
    getattr(home, name)
    for home in (torch, torch.Tensor)
    for name in (*_VIEWING.split(), "t", "detach", "__getitem__", "contiguous")
    if hasattr(home, name)
}
RANDOM = {functional.dropout, torch.dropout}
SHARING = {  # which arguments are shared by all calls, where these functions are given tensors
    functional.linear: (1, 2),
    functional.embedding: (1,),
    torch.matmul: (1,),
    torch.mm: (1,),
    torch.Tensor.matmul: (1,),
    torch.Tensor.mm: (1,),
    torch.Tensor.__matmul__: (1,),
    **{getattr(torch, f"{name}_cell"): (2, 3, 4, 5) for name in ("lstm", "gru", "rnn_tanh")},
}
