"""What all commands share: options, one JSON object on standard output, errors as one line."""

from __future__ import annotations

import inspect
import json
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, NoReturn, TypeVar

import typer

from soapstone.files import reason
from soapstone.limits import size_of

Command = TypeVar("Command", bound=Callable[..., None])
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")]
Cpus = Annotated[int | None, typer.Option(min=1, help="Processors; default all cores.")]
Threads = Annotated[int, typer.Option(min=1, help="Threads of each processor.")]
Precision = Annotated[
    str, typer.Option(help="float32, bfloat16, or int4 or int8 for weights of products.")
]
Devices = Annotated[int | None, typer.Option(min=1, help="Devices of a scalable machine.")]
FastMemory = Annotated[
    str | None, typer.Option(help="Stream values through a memory of that size: 200MB.")
]
Plan = Annotated[
    str | None, typer.Option(help="How: dp (fewest bytes), lru, stream, belady, or a file.")
]
Dims = Annotated[
    list[str] | None, typer.Option("--dim", help="A symbolic dim's extent: NAME=NUMBER; repeat.")
]

_INTERRUPTED = 130  # 128 + SIGINT, as shells report it


def command(app: typer.Typer, name: str | None = None) -> Callable[[Command], Command]:
    """Return a decorator that makes a function a command, whose errors are one line.

    It has `--debug`, which shows tracebacks, and `--quiet`, which shows no progress.

    What is heavy is imported inside of the function, so that `--help` needs none of it.
    """

    def register(function: Command) -> Command:
        @wraps(function)
        def reported(*, debug: bool, quiet: bool, **given: Any) -> None:
            with _reported(debug), _warned(), _hushed() if quiet else nullcontext():
                function(**given)

        known = inspect.signature(function, eval_str=True)
        option = inspect.Parameter("debug", inspect.Parameter.KEYWORD_ONLY, default=False)
        parameters = [
            *known.parameters.values(),
            option.replace(annotation=Debug),
            option.replace(name="quiet", annotation=Quiet),
        ]
        setattr(reported, "__signature__", known.replace(parameters=parameters))  # noqa: B010
        reported.__annotations__ = {each.name: each.annotation for each in parameters}
        app.command(name)(reported)
        return function

    return register


def _hushed() -> AbstractContextManager[None]:
    from soapstone.frontend.progress import hushed

    return hushed()


@contextmanager
def _warned() -> Iterator[None]:
    """Tell a warning in one line where no line of a user's, but a command, has called."""
    usual = warnings.formatwarning
    callers = {os.path.dirname(str(module.__file__)) for module in (typer, threading)}

    def told(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        line: str | None = None,
    ) -> str:
        if os.path.dirname(filename) not in callers:
            return usual(message, category, filename, lineno, line)
        return f"warning: {' '.join(str(message).split())}\n"

    warnings.formatwarning = told
    try:
        yield
    finally:
        warnings.formatwarning = usual


@contextmanager
def _reported(debug: bool) -> Iterator[None]:
    """Turn errors into one line on standard error and an exit code."""
    came: list[int] = []  # interrupts: a library that calls back may lose one, and fail by it
    try:
        with _interrupts_in(came):
            yield
    except KeyboardInterrupt as error:
        _end(f"interrupted{error}", error, _INTERRUPTED)
    except BrokenPipeError:
        raise  # the reader has gone; there is nobody to tell
    except (ValueError, RuntimeError, OSError, MemoryError) as error:
        if debug or isinstance(error, typer.Exit):
            raise
        said = str(error)
        if isinstance(error, OSError) and error.strerror and error.filename is not None:
            said = f"file {str(error.filename)!r}: {reason(error)}"
        text = " ".join(said.split()) or type(error).__name__
        if came:
            _end(f"interrupted; error: {text}", error, _INTERRUPTED)
        _end(f"error: {text}", error, 1)
    except Exception as error:  # of a user's script, or a fault of ours
        if debug:
            raise
        from soapstone.errors import fault

        _end(f"error: {fault(error)}; --debug shows the traceback", error, 1)


@contextmanager
def _interrupts_in(came: list[int]) -> Iterator[None]:
    """Note interrupts of this process in a list, besides raising them as ever."""

    def noted(number: int, frame: FrameType | None) -> None:
        came.append(number)
        signal.default_int_handler(number, frame)

    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    ):
        yield  # somebody else says what an interrupt means
        return
    signal.signal(signal.SIGINT, noted)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _end(text: str, error: BaseException, code: int) -> NoReturn:
    """Say what went wrong, in one process of a run of several, and end with an exit code."""
    mpi = sys.modules.get("soapstone.runtime.executors.mpi.executor")
    if mpi is None or mpi.speaks(error):
        typer.echo(text, err=True)
    if mpi is not None:
        mpi.leave(code)
    raise typer.Exit(code) from None


def tell_written(*paths: object, as_json: bool) -> None:
    """Say which files were written; None is none."""
    for path in paths:
        if path is not None:
            typer.echo(f"wrote {path}", err=as_json)


def print_json(value: dict[str, Any]) -> None:
    """Print a JSON object on standard output."""
    typer.echo(json.dumps(value, allow_nan=False))


def answer(text: object, value: dict[str, Any], as_json: bool) -> None:
    """Print the text, or in its place one JSON object."""
    if as_json:
        print_json(value)
    else:
        typer.echo(str(text))


def tell(text: object, value: dict[str, Any], as_json: bool) -> None:
    """Print the text; with a JSON object on standard output, on standard error."""
    typer.echo(str(text), err=as_json)
    if as_json:
        print_json(value)


def with_output(value: dict[str, Any], output: Path | None) -> dict[str, Any]:
    """Return a JSON object that also says which file was written, if any."""
    return {**value, "output": None if output is None else str(output)}


def bytes_of(option: str, text: str | None) -> int | None:
    """Return the bytes that an option says, if it is given; see `size_of`."""
    return None if text is None else size_of(option, text)


def dims_of(texts: list[str] | None) -> dict[str, int]:
    """Return the extents that `NAME=NUMBER` gives.

    Raises:
        OnnxError: another form.
    """
    from soapstone.frontend.onnx import OnnxError

    dims: dict[str, int] = {}
    for text in texts or []:
        name, _, number = text.rpartition("=")
        if not name or not (number.isascii() and number.isdigit()):
            raise OnnxError(f"--dim {text!r} found; NAME=NUMBER needed")
        if dims.get(name, int(number)) != int(number):
            raise OnnxError(f"--dim {text!r} found beside {name}={dims[name]}; one of them needed")
        dims[name] = int(number)
    return dims
