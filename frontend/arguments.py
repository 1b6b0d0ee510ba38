"""Arguments of the public functions, checked against their annotations before anything is done.

What an annotation says is the one declaration: `int` takes integers (of NumPy too, and a float that
is one), `float` takes numbers, `Tensor` takes tensors of a model. Errors name the function, the
argument, what was found and what was needed.
"""

from __future__ import annotations

import inspect
import math
import operator
import sys
from collections.abc import Callable, Iterable
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar

from soapstone.errors import DataError, hint
from soapstone.ir.errors import GraphError

DType = Any  # an element type: a name such as "float32", or NumPy's type
OnnxFile = Any  # an ONNX model: the path of a file, its bytes, or what was taken in
T = TypeVar("T", bound=type)
F = TypeVar("F", bound=Callable[..., Any])


def unmasked(where: str, value: Any) -> Any:
    """Return a value that NumPy makes an array of, which forgets what a masked one masks.

    Raises:
        DataError: an array with masked elements; `where` is what it calls it.
    """
    masked = sys.modules.get("numpy.ma")  # without it there are none
    if masked is not None and masked.is_masked(value):
        count = masked.count_masked(value)
        what = f"{count:,} masked elements found; an array without needed (filled)"
        raise DataError(f"{where}: {what}")
    return value


def integer(value: Any) -> int:
    """Return an integer; a float that is one counts.

    Raises:
        TypeError: anything else, a bool included.
    """
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, bool):
        raise TypeError
    return operator.index(value)


def count(where: str, value: Any, least: int = 1, error: type[ValueError] = GraphError) -> int:
    """Return an integer of at least `least`.

    Raises:
        error: another value; `where` is what it calls it.
    """
    try:
        whole = integer(value)
    except TypeError:
        whole = None
    if whole is None or whole < least:
        raise error(f"{where}: {value!r} found, an integer of {least} or more needed")
    return whole


def integers(where: str, value: Any) -> tuple[int, ...]:
    """Return several integers.

    Raises:
        GraphError: another value; `where` is what it calls it.
    """
    try:
        return tuple(integer(each) for each in value)
    except TypeError:
        raise GraphError(f"{where} {value!r} found, integers needed") from None


def number(
    where: str, value: Any, error: type[ValueError] = GraphError, *, finite: bool = True
) -> float:
    """Return a number, which is finite unless that is not asked for.

    Raises:
        error: another value; `where` is what it calls it.
    """
    if isinstance(value, bool | str | bytes) or not hasattr(value, "__float__"):
        raise error(f"{where}: {value!r} found, a number needed")
    real = float(value)
    if finite and not math.isfinite(real):
        raise error(f"{where}: {value!r} found, a finite number needed")
    return real


def _integer(where: str, value: Any) -> Any:
    try:
        return integer(value)
    except TypeError:
        raise GraphError(f"{where}: {_shown(value)} found, an integer needed") from None


def _number(where: str, value: Any) -> Any:
    if isinstance(value, bool | str | bytes) or not hasattr(value, "__float__"):
        raise GraphError(f"{where}: {_shown(value)} found, a number needed")
    return value


def _text(where: str, value: Any) -> Any:
    if not isinstance(value, str):
        raise GraphError(f"{where}: {_shown(value)} found, a string needed")
    return value


def _tensor(where: str, value: Any) -> Any:
    from soapstone.frontend.recording import Tensor

    if not isinstance(value, Tensor):
        raise GraphError(f"{where}: {_shown(value)} found, a tensor of the model needed")
    return value


def _dtype(where: str, value: Any) -> Any:
    if isinstance(value, str):
        return value
    import numpy as np

    try:
        return np.dtype(value).name
    except TypeError:
        raise GraphError(
            f'{where}: {_shown(value)} found, a type such as "float32" needed'
        ) from None


def _onnx(where: str, value: Any) -> Any:
    from soapstone.frontend.onnx.trained import taken_in

    return taken_in(where, value)


def _operand(where: str, value: Any) -> Any:
    from soapstone.frontend.recording import Tensor

    if isinstance(value, Tensor):
        return value
    number = hasattr(value, "__float__") and not getattr(value, "shape", ())
    if number and not isinstance(value, bool | str):
        return float(value)
    raise GraphError(f"{where}: {_shown(value)} found, a tensor of the model or a number needed")


def _path(where: str, value: Any) -> Any:
    if not isinstance(value, str | Path):
        raise GraphError(f"{where}: {_shown(value)} found, the path of a file needed")
    return value


def _bool(where: str, value: Any) -> Any:
    if not isinstance(value, bool) and type(value).__name__ not in ("bool_", "bool"):
        raise GraphError(f"{where}: {_shown(value)} found, True or False needed")
    return bool(value)


def shown_value(value: object) -> str:
    """Return a value as errors show it: a class as one whose instance is needed."""
    if isinstance(value, type):
        return f"class {value.__name__} in place of an instance, {value.__name__}(…),"
    return f"function {value.__name__!r}" if inspect.isroutine(value) else repr(value)


def takes(function: Callable[..., Any], *arguments: object) -> bool:
    """Return whether a function can be called with such arguments; true where nobody can say."""
    try:
        inspect.signature(function).bind(*arguments)
    except ValueError:  # no signature is known, as of some functions in C
        return True
    except TypeError:
        return False
    return True


def named_arguments(kind: T) -> T:
    """Return a class whose errors of unknown arguments name those that there are."""
    made = kind.__init__  # type: ignore[misc]
    signature = inspect.signature(kind)
    names = list(signature.parameters)

    @wraps(made)
    def begin(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            signature.bind(*args, **kwargs)
        except TypeError as error:
            unknown = next((name for name in kwargs if name not in names), None)
            what = str(error) if unknown is None else f"unknown argument {unknown!r}"
            raise TypeError(
                f"{kind.__name__}: {what}; {kind.__name__}({', '.join(names)}) needed"
                f"{meant(unknown, names)}"
            ) from None
        made(self, *args, **kwargs)

    kind.__init__ = begin  # type: ignore[misc]
    return kind


def _shown(value: Any) -> str:
    shape = getattr(value, "shape", None)
    if isinstance(shape, tuple):
        return f"{type(value).__name__} of shape {shape}"
    if isinstance(value, type):
        return f"class {value.__name__}"
    if inspect.isroutine(value):
        return f"function {value.__name__!r}"
    if isinstance(value, tuple) and value and hasattr(value[0], "shape"):
        return f"tuple of {len(value)} values, such as a layer of several outputs returns,"
    return f"{type(value).__name__} {value!r}"


_RULES: dict[str, Callable[[str, Any], Any]] = {
    "int": _integer,
    "float": _number,
    "str": _text,
    "bool": _bool,
    "str | Path": _path,
    "DType": _dtype,
    "OnnxFile": _onnx,
    "Tensor": _tensor,
    "Tensor | float": _operand,
}


# What layers and arguments are called in Keras and PyTorch, where that is not nearly the same.
_ELSEWHERE = {
    "units": "width",
    "outfeatures": "width",
    "hiddensize": "width",
    "outputdim": "width",
    "embeddingdim": "width",
    "filters": "channels",
    "outchannels": "channels",
    "kernelsize": "kernel",
    "poolsize": "kernel",
    "strides": "stride",
    "p": "rate",
    "dilationrate": "dilation",
    "numlayers": "layers",
    "usebias": "bias",
    "eps": "epsilon",
    "inputdim": "rows",
    "numembeddings": "rows",
    "kernelinitializer": "initial",
    "dim": "axis",
    "keepdim": "keepdims",
    "lr": "learning_rate",
    "validationfraction": "validation_split",
    "verbose": "progress",
    "linear": "dense",
    "cat": "concat",
    "concatenate": "concat",
    "permute": "transpose",
    "view": "reshape",
    "bmm": "matmul",
    "multiply": "mul",
    "subtract": "sub",
    "sum": "reduce_sum",
    "mean": "reduce_mean",
    "batchnormalization": "batch_norm",
    "layernormalization": "layer_norm",
    "maxpooling2d": "max_pool2d",
    "averagepooling2d": "avg_pool2d",
    "globalmaxpooling2d": "global_max_pool",
    "globalaveragepooling2d": "global_avg_pool",
    "multiheadattention": "multi_head_attention",
    "statedict": "weights",
    "loadstatedict": "load_weights",
    "train": "fit",
    "eval": "evaluate",
    "forward": "predict",
    "backward": "gradients",
    "getweights": "weights",
    "saveweights": "save",
    "loadstate": "load_weights",
    "loadmodel": "load",
    "size": "shape",
    "numpy": "predict",
    "to": "compile",
    "cuda": "compile",
    "gpu": "compile",
    "unsqueeze": "reshape",
    "squeeze": "reshape",
    "expanddims": "reshape",
    "repeat": "tile",
    "crossentropyloss": "cross_entropy",
    "sparsecategoricalcrossentropy": "cross_entropy",
    "categoricalcrossentropy": "cross_entropy_dense",
    "binarycrossentropy": "bce",
    "bceloss": "bce",
    "bcewithlogitsloss": "bce_with_logits",
    "mseloss": "mse",
    "meansquarederror": "mse",
    "meanabsoluteerror": "mae",
    "l1loss": "mae",
    "l1": "mae",
    "smoothl1loss": "smooth_l1",
    "kldivloss": "kl_divergence",
    "kldivergence": "kl_divergence",
    "poissonnllloss": "poisson",
    "cosineembeddingloss": "cosine_similarity",
    "pinball": "quantile",
    "meansquaredlogarithmicerror": "msle",
    "meanabsolutepercentageerror": "mape",
    "acc": "accuracy",
    "nllloss": "cross_entropy",
    "categoricalaccuracy": "accuracy",
    "sparsecategoricalaccuracy": "accuracy",
    "valloss": "validation_loss",
    "valaccuracy": "validation_accuracy",
}


def meant(word: object, known: Iterable[str]) -> str:
    """Return "; did you mean 'width'?" of a word of Keras, of PyTorch, or nearly a known one."""
    if not isinstance(word, str):
        return ""
    names = list(known)
    other = _ELSEWHERE.get(word.lower().replace("_", ""))
    return f"; did you mean {other!r}?" if other in names else hint(word, names)


def checked(function: F) -> F:
    """Return a method whose arguments are checked against its annotations."""
    signature = inspect.signature(function)
    rules = {}
    for name, parameter in signature.parameters.items():
        kind = str(parameter.annotation).removesuffix(" | None")
        if kind in _RULES and parameter.kind is not parameter.VAR_KEYWORD:
            rules[name] = (_RULES[kind], kind != str(parameter.annotation), parameter.kind)
    label = function.__name__
    parameters = list(signature.parameters.values())[1:]
    needed = ", ".join(map(_plain, parameters))
    any_name = any(item.kind is item.VAR_KEYWORD for item in parameters)

    @wraps(function)
    def call(self: Any = None, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(self, Checked):
            found = "nothing" if self is None else _shown(self)
            raise TypeError(
                f"{label}: {found} found in place of a model; it is called of one that was made:"
                f" model = Model(…), model.{label}(…)"
            )
        try:
            bound = signature.bind(self, *args, **kwargs)
        except TypeError as error:
            unknown = [] if any_name else sorted(kwargs.keys() - signature.parameters.keys())
            what = f"unknown argument {unknown[0]!r}" if unknown else str(error)
            near = meant(unknown[0], signature.parameters) if unknown else ""
            raise TypeError(f"{label}: {what}; {label}({needed}) needed{near}") from None
        given = bound.arguments
        for name in rules.keys() & given.keys():
            rule, optional, kind = rules[name]
            where = f"{label}: {name}"
            if kind is inspect.Parameter.VAR_POSITIONAL:
                given[name] = tuple(rule(where, item) for item in given[name])
            elif not (optional and given[name] is None):
                given[name] = rule(where, given[name])
        script = getattr(self, "script", None)  # of a recording, which keeps what was called
        if script is None:
            return function(*bound.args, **bound.kwargs)
        return script.run(self, function, bound.args, bound.kwargs)

    return call  # type: ignore[return-value]


def _plain(parameter: inspect.Parameter) -> str:
    """A parameter as an error shows it: its name, `=` before what may be left out."""
    stars = "*" if parameter.kind is parameter.VAR_POSITIONAL else ""
    stars = "**" if parameter.kind is parameter.VAR_KEYWORD else stars
    by_name = parameter.kind is parameter.KEYWORD_ONLY
    return f"{stars}{parameter.name}{'=…' if by_name else ''}"


class Checked:
    """A class whose public methods have their arguments checked; see `checked`."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        for name, value in list(vars(cls).items()):
            if inspect.isfunction(value) and not name.startswith("_"):
                setattr(cls, name, checked(value))
