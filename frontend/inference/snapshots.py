"""Snapshots: what the first session of a model's file bound, kept on disk for later processes.

A process that opens the file again, with the same options and in the same environment, restores the
bound entries from a snapshot (`native.snapshot`): it builds no graph, chooses no kernels, binds no
call, packs no weights, and imports almost nothing that these need. A snapshot is of one shape of
each input, the first that was run. It is valid as long as the model's bytes, the options, the
environment, the sources of soapstone that the process which made it had imported, the library of
products, and the measurements are unchanged. It is written only after it has given the same answer
as the session that it was taken of, and if the file did not change meanwhile.
"""

from __future__ import annotations

import contextlib
import hashlib
import marshal
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from soapstone.cache import objects
from soapstone.cache.answers import late
from soapstone.cache.changes import changed, default_path
from soapstone.errors import DataError
from soapstone.frontend.exchange import targets
from soapstone.frontend.inference.snapshot_places import (
    MOST_BYTES,
    Options,
    Place,
    RowsMark,
    Shapes,
    place_of,
)
from soapstone.frontend.inference.sources import Field, Source
from soapstone.frontend.inference.steps import Rows, run_in_steps, steps_of
from soapstone.frontend.onnx.errors import OnnxError
from soapstone.frontend.onnx.texts import TEXT
from soapstone.kernels.cpu.onednn import library as onednn
from soapstone.locks import Lock
from soapstone.native import snapshot
from soapstone.native.arrays import mapping
from soapstone.native.entries import Native, sequence
from soapstone.native.files import MappedFile
from soapstone.native.memory import CHECKED, Array, aligned, call
from soapstone.native.threads import openmp, teams

if TYPE_CHECKING:
    from soapstone.engine.session import Bound

PAGE = 4096
HASH, LENGTH = 32, 8  # bytes before the header: its hash, and how long it is
_REGISTRY = "soapstone.kernels.registry"
_AGAIN = 4  # answers of a process that is likely to live on


class _FailedError(Exception):
    """A kernel failed."""


class Snapshot:
    """A bound model from disk, which answers inputs of one shape, and rows of it in steps.

    Attributes:
        source: what the model declares. options: of the session. file: its bytes.
        mark: whether rows are known to be apart; else it answers nothing but that shape.
    """

    def __init__(
        self, path: Path, file: MappedFile, header: Mapping[str, Any], options: Options
    ) -> None:
        name, fields, outputs = header["model"]
        inputs = tuple(Field(*field) for field in fields)
        self.source = Source(name, inputs, outputs, _unknown, _unknown)
        self.options = options
        self.file = file
        self.mark = RowsMark(lambda: path, True)
        self._path, self._header = path, header
        self._restored: snapshot.Restored | None = None
        self._lock, self._process = Lock(), os.getpid()
        self._closed = False
        self._answers = 0  # so far

    def close(self) -> None:
        """Answer nothing from now on, once what is being answered is."""
        with self._lock:
            self._closed = True

    def run(self, inputs: Mapping[str, Any] | Any, out: Mapping[str, Any]) -> Any:
        """Return the outputs by name; None for other inputs than it is for, and once it is closed.

        inputs, out: as of `InferenceSession.run`, and so are errors.
        """
        given = self.source.checked(inputs)
        shapes = tuple(array.shape for array in given.values())
        steps = () if shapes == self._shapes else self._steps(shapes)
        if steps is None or os.getpid() != self._process:  # a child has none of the threads
            return None
        with self._lock:
            if self._closed:
                return None
            if self._restored is None:
                try:
                    self._restored = restored(
                        *(self._header, self._contents(), np.frombuffer(self.file, np.uint8)),
                        self.options.threads,
                    )
                except (OSError, LookupError, ValueError, onednn.OneDnnError):
                    with contextlib.suppress(OSError):  # it may be another user's
                        self._path.unlink()  # damaged, or of kernels that are gone
                    return None
            if self._header["data"]["there"]:
                self.file.check(OnnxError)
            if steps:
                results = self._in_steps(self._restored, given, steps)
            else:
                results = answered(self._restored, given, self.options.threads)
            if results is None:
                return None
            into = targets(self.source.name, out, results)
            for name, array in into.items():
                np.copyto(array, results[name])
            self._answers += _AGAIN if steps else 1
            return {
                name: into[name] if name in into else array if steps else array.copy()
                for name, array in results.items()
            }

    def _steps(self, shapes: Shapes) -> Sequence[tuple[int, int]] | None:
        """Return the steps in which inputs of these shapes are answered; None if they are not."""
        rows = {shape[0] for shape in shapes if shape}
        like = [shape[1:] for shape in shapes] == [shape[1:] for shape in self._shapes]
        if not like or len(rows) != 1 or not self.apart:
            return None
        return steps_of(rows.pop(), {self._shapes[0][0]}) or None

    def _in_steps(
        self,
        made: snapshot.Restored,
        given: Mapping[str, Array],
        steps: Sequence[tuple[int, int]],
    ) -> dict[str, Array] | None:
        """Return the outputs for other rows than it is for; None: a kernel failed."""
        ends: dict[str, dict[str, Array]] = {"input": {}, "output": {}}
        for (end, name), array in made.ends.items():
            ends[end][name] = array

        def run() -> None:
            if not _called(made, self.options.threads):
                raise _FailedError

        of = {self._shapes[0][0]: Rows(ends["input"], ends["output"], run)}
        with contextlib.suppress(_FailedError):
            return run_in_steps(self.source.name, given, steps, of)
        return None

    @cached_property
    def _shapes(self) -> Shapes:
        """The shapes of the inputs that it is for."""
        return tuple(array.shape for array in self.given.values())

    @cached_property
    def apart(self) -> bool:
        """Whether it answers other numbers of rows in steps, as far as is known."""
        return bool(self.source.rows) and self.mark.says(self._shapes)

    @property
    def given(self) -> dict[str, Array]:
        """Inputs of the shapes that it answers, without contents."""
        ends = self._header["data"]["ends"]
        return {
            each.name: np.broadcast_to(np.zeros((), each.dtype), ends["input", each.name][3])
            for each in self.source.inputs
        }

    @property
    def is_asked_again(self) -> bool:
        """Whether it has answered so often that other shapes may come too, if the model has any."""
        varies = any(
            not each.ranked or any(type(dim) is not int for dim in each.shape)
            for each in self.source.inputs
        )
        return varies and self._answers >= _AGAIN

    @property
    def peak_bytes(self) -> int:
        """Bytes of inputs, outputs and intermediate values, including workspaces of kernels."""
        data = self._header["data"]
        if self._restored is None:
            return 0
        return sum(high - low for low, high in data["segments"][data["held"] :])

    def _contents(self) -> Array:
        """Read the contents that are kept.

        Raises:
            OSError: they are incomplete.
        """
        contents = aligned(snapshot.held_bytes(self._header["data"]))
        with open(self._path, "rb") as file:
            file.seek(self._header["begin"])
            if (
                file.readinto(contents.data) != contents.size
                or sum_of(contents) != self._header["sum"]
            ):
                raise OSError(f"{self._path}: cut short, or changed")
        return contents


def find(model: object, options: Options) -> tuple[Snapshot | None, Keeper | None]:
    """Return the snapshot of a model's file, or else what keeps one once it is bound, or neither.

    A process in which other kernels may be registered binds its models itself.
    """
    binds = _REGISTRY in sys.modules
    if not isinstance(model, str | Path) or (binds and Keeper.kept) or not _supported():
        return None, None
    place = place_of(model, options)
    if place is None:
        return None, None
    found = None if binds else _found(place, options)
    return found, Keeper.of(model, options, place) if found is None else None


def _found(place: Place, options: Options) -> Snapshot | None:
    """Return the snapshot of the file at a place; None if there is no valid one."""
    noted = place.noted()
    if noted is not None:
        return _read(noted, place.file, options)
    if not place.occupied:
        return None
    found = _read(place.path, place.file, options)
    if found is not None:
        place.note()
    return found


def _read(path: Path, model: MappedFile, options: Options) -> Snapshot | None:
    """Return the snapshot in a file; None if there is no valid one. model: what it is of."""
    try:
        with open(path, "rb") as file:
            mark, length = file.read(HASH), int.from_bytes(file.read(LENGTH), "little")
            told = file.read(min(length, MOST_BYTES))
        if mark != hashlib.sha256(told).digest():
            return None
        header = marshal.loads(told)
        if header["states"] != _states(header["states"], options):
            return None
        with contextlib.suppress(OSError):  # it may be another user's
            os.utime(path)
        return Snapshot(path, model, header, options)
    except (OSError, ValueError, EOFError, TypeError):
        return None


class Keeper:
    """Keeps the first graph that a session binds of a model's file, if possible.

    model: its path. options: of the session. place: of the file before the session opens it.

    Attributes:
        mark: of what is kept.
    """

    kept = False  # whether a session of this process has been

    def __init__(self, model: str | Path, options: Options, place: Place) -> None:
        self._model, self._options, self._place = model, options, place
        self.mark = RowsMark(lambda: place.path, False)
        if not place.settled:  # it may have other bytes later, and this state
            _ = place.path

    @staticmethod
    def of(model: str | Path, options: Options, place: Place) -> Keeper | None:
        """Return a keeper, or None: only the first model of a process is kept."""
        if Keeper.kept:
            return None
        Keeper.kept = True
        return Keeper(model, options, place)

    def take(self, source: Source, bound: Bound) -> Callable[[], None] | None:
        """Return a function that writes the snapshot of a graph that has run; None if impossible.

        source: of the model. Nothing runs meanwhile; the function may be called at any time.
        """
        from soapstone.kernels.registry import foreign

        self._place.begin_to_hash()
        entries = bound.trace.in_order
        constant = set(bound.prepared.graph.outputs) & bound.prepared.constants
        plain = not any(each.holds or each.dtype == TEXT for each in source.inputs)
        outside = source.onnx is not None and source.onnx.files.opened
        if entries is None or constant or not plain or foreign() or outside:
            return None
        ends: dict[Any, Array] = {("input", n): array for n, array in bound.feeds.items()}
        ends |= {("output", n): array for n, array in bound.results.items()}
        whole, lying = sequence(entries), _mapped(source)
        loaded = objects.LOADED.copy()  # others may load more meanwhile
        functions: dict[int, Any] = {each: ("", *told) for each, told in loaded.items()}
        functions |= {each: (name,) for each, name in onednn.functions().items()}
        try:
            told, nbytes = snapshot.taken(
                whole, ends, bound.trace.transient, lying, functions, onednn.recipe
            )
            natives = [
                (module.__name__, name, *loaded[each.address])
                for module in (teams, openmp)
                for name, each in vars(module).items()
                if isinstance(each, Native) and each.placed
            ]
        except (snapshot.UnknownError, KeyError):  # code that is in no file
            return None
        if nbytes > MOST_BYTES:
            return None
        given = {name: array.copy() for name, array in bound.feeds.items()}
        answer = {name: array.copy() for name, array in bound.results.items()}
        fields = [(e.name, e.dtype, e.shape, e.holds, e.ranked) for e in source.inputs]
        model = source.name, tuple(fields), tuple(bound.results)

        def keep() -> None:
            from soapstone.frontend.inference.snapshot_writing import write

            try:
                states = _states(dict.fromkeys(_files()), self._options)
                data, pieces = told()
                header = {"model": model, "states": states, "natives": tuple(natives), "data": data}
            except (snapshot.UnknownError, OSError):  # sources that are in no file
                return
            bound, now = self._place, place_of(self._model, self._options)
            if now is None or (now.base, now.state) != (bound.base, bound.state):
                return  # another file was bound
            path = bound.path  # hashed by now; only then is the file looked at again
            if (bound.settled or now.path == path) and now.unchanged:
                write(path, header, pieces, lying, given, answer, self._options.threads)
                self.mark.keep()
                bound.note()

        return keep


def _unknown(*_: object) -> Any:
    """Raise: nothing else is kept."""
    raise DataError("a graph was asked of what has none")


def _supported() -> bool:
    there = sys.platform == "linux" and not CHECKED and teams.supported() and onednn.available()
    return there and os.path.isabs(onednn.path())


def _mapped(source: Source) -> Array | None:
    """Return the bytes of a model's file in which its weights are, or None."""
    for array in source.weights().values():
        base = mapping(array)
        if base is not None:
            return np.frombuffer(base, np.uint8)
    return None


def _files() -> list[str]:
    """Return the files of soapstone's modules that this process has imported, and of oneDNN."""
    loaded = sys.modules.copy()  # others may import meanwhile
    modules = [m for name, m in loaded.items() if name.partition(".")[0] == "soapstone"]
    files = {getattr(module, "__file__", None) for module in modules}
    return sorted({*filter(None, files), onednn.path()})


def _states(files: Mapping[str, Any], options: Options) -> dict[str, Any]:
    """Return the state of each file, and of the measurements if they matter.

    A file that was written after this process began has a state that no other has.
    """
    found: dict[str, Any] = {}
    for file in files:
        if file:
            status = os.stat(file)
            found[file] = status.st_mtime_ns, status.st_size
            if late(status):
                found[file] = os.urandom(16)
    if options.tune:
        found[""] = changed(default_path())
    return found


def restored(
    header: Mapping[str, Any],
    contents: Array,
    lying: Array | None,
    threads: int,
    ready: Callable[[], object] = lambda: None,
) -> snapshot.Restored:
    """Return the entry that a header describes; see `native.snapshot.restored`."""
    for module, name, path, symbol in header["natives"]:
        native: Native = getattr(sys.modules[module], name)
        if not native.placed:
            native.place(objects.again(path, symbol))
    names = {name: address for address, name in onednn.functions().items()}
    known = {told: address for address, told in objects.LOADED.copy().items()}

    def function(told: tuple[str, ...]) -> int:
        if len(told) == 1:
            return names[told[0]]
        path, symbol = told[1:]
        return known.get((path, symbol), 0) or objects.again(path, symbol)

    before = openmp.set_threads(threads)
    try:
        return snapshot.restored(header["data"], contents, lying, function, onednn.remade, ready)
    finally:
        openmp.set_threads(before)


def answered(
    made: snapshot.Restored, given: Mapping[str, Array], threads: int
) -> dict[str, Array] | None:
    """Return the outputs for inputs in memory that will be overwritten; None: a kernel failed."""
    for name, array in given.items():
        np.copyto(made.ends["input", name], array)
    if not _called(made, threads):
        return None
    return {name: array for (end, name), array in made.ends.items() if end == "output"}


def _called(made: snapshot.Restored, threads: int) -> bool:
    """Run a snapshot; return whether all kernels succeeded."""
    before = openmp.set_threads(threads)
    try:
        return not call(made.address, made.block)
    finally:
        openmp.set_threads(before)


def sum_of(data: Array) -> bytes:
    """Return a checksum that detects truncated or damaged contents, faster than a hash."""
    whole = data[: data.size // PAGE * PAGE].view(np.uint64).reshape(-1, PAGE // 8)
    sums = whole.sum(axis=1, dtype=np.uint64).tobytes() + data[whole.nbytes :].tobytes()
    return hashlib.sha256(sums + len(data).to_bytes(8, "little")).digest()


__all__ = ["HASH", "LENGTH", "PAGE", "Keeper", "Options", "Snapshot"]
__all__ += ["answered", "find", "restored", "sum_of"]
