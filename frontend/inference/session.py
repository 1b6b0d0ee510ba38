"""Inference: graphs bound once to constant weights, and served from then on.

Weights never change here, so what depends on them alone is computed when they are bound, batch norm
goes into them, kernels pack them in their own layout, and element-wise steps run in the launch of
the product before them (docs/lowering.md). A session keeps what it bound for each shape of inputs.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from soapstone.collection import paused
from soapstone.errors import DataError
from soapstone.frontend.exchange import targets
from soapstone.frontend.inference.snapshots import Keeper, Options, Snapshot, find
from soapstone.frontend.inference.sources import Field, Source
from soapstone.ir.errors import GraphError
from soapstone.ir.tensor import NOTHING, Array
from soapstone.locks import Lock
from soapstone.system import usable_cores

if TYPE_CHECKING:
    from concurrent.futures import Future, ThreadPoolExecutor

    from soapstone.engine.session import Bound
    from soapstone.frontend.generation.decoder import Decoder
    from soapstone.frontend.inference.binding import Binder
    from soapstone.frontend.model import Model
    from soapstone.frontend.onnx import OnnxModel
    from soapstone.frontend.onnx.pieces import Pieces
    from soapstone.ir.files.layouts import Layouts
    from soapstone.ir.graph import Graph
    from soapstone.ir.plan import MemoryPlan
    from soapstone.ir.strategy import Strategy
    from soapstone.kernels.choices import Tune
    from soapstone.native.files import MappedFile
    from soapstone.runtime import Machine, Profile

_OPENED = (  # what a session has once its model is open
    *("_binder", "_machine", "_lock", "_bounds", "_pieces", "_pool", "decoder", "_close"),
    *("_others", "_free"),
)


class InferenceSession:
    """A model bound to its weights.

    `run` may be called from several threads: as many runs as `requests` go on at once, each on
    processors of its own, the others wait. For many small requests at once there is the `Batcher`.

    Inputs are arrays, or anything with `__dlpack__`, such as tensors of torch (docs/inference.md).

    Args:
        model: a Model, an OnnxModel or its file, or a Graph.
        weights: the parameters and states of a Graph, by name; those of a Model default to what a
            compiled model has now.
        threads: of each processor; by default all cores are shared out. gpus: 1 for a GPU instead
            (docs/cuda.md).
        cpus: how many processors a run is split over, 1 by default, or as many as the strategy
            was made for. machine: what to run on, in place of these numbers.
        strategy: how a run is split over them: a Strategy, or its file (docs/strategies.md), of
            the model's graph for some shapes of inputs; for others it is fitted. Without one,
            samples are split, or what touches fewer bytes (the `data_parallel` mapper).
        requests: how many runs may go on at once, each on so many processors; they share weights.
        plain: run one kernel an operator, without folding or fusing, for comparison.
        layouts: axis orders of values, such as `OptimizeResult.layouts`, the rest in C order; by
            default those of the model's file, or where there are none what `channels_last` says.
        bound_shapes: how many shapes of inputs stay bound; the least recently used one goes. By
            default as many as fit in 256 MB, 128 at most.
        fast_memory: bytes of a memory that the threads work in, with the computer's behind it
            (docs/memory.md). Weights are then streamed like any value, so none is folded or packed,
            and all shapes share them and that memory.
        tune: what the choice between kernels of one operator rests on. True: what has been measured
            on this computer, and where nothing has, what is expected of them; "now": they are
            measured where they are not yet, before the first answer, and kept for later sessions;
            False: what is expected alone. A session keeps to its choices.
        precision: "float32", or "bfloat16": products and convolutions may round their
            operands to bfloat16, and those are kept in it (docs/inference.md). Sums within them,
            and all other operators, stay float32. "int4" and "int8": matrix products round their
            weights to so many bits, and keep them so. On a GPU "tf32": those of NVIDIA's libraries
            may round theirs to that (docs/cuda.md).
        plan: how values are streamed: "dp" (fewest bytes, the default), "lru", "stream", "belady",
            or a plan or its file, which is of the graph of one shape.

    Raises:
        GraphError: an unknown plan, or one without a fast memory; another `tune`; numbers of
            processors or requests that do not fit; another `precision`, or one that is not to be
            had: the processor has no instructions for it, or weights are streamed.
        StrategyError: the strategy is for another graph or machine, or not legal; where the model
            has symbolic dims that the strategy does not tell, `run` says so.
        MachineError: no threads, or too many.

    Example:
        >>> session = InferenceSession("resnet50.onnx")
        >>> logits = session.run({"image": image})["logits"]
    """

    def __init__(
        self,
        model: Model | OnnxModel | Graph | str | Path,
        weights: Mapping[str, Array] = NOTHING,
        *,
        threads: int | None = None,
        gpus: int = 0,
        cpus: int | None = None,
        machine: Machine | None = None,
        strategy: Strategy | str | Path | None = None,
        requests: int = 1,
        plain: bool = False,
        layouts: Layouts | None = None,
        bound_shapes: int | None = None,
        fast_memory: int | None = None,
        plan: MemoryPlan | str | Path | None = None,
        tune: Tune = True,
        precision: str = "float32",
    ) -> None:
        if tune not in (True, False, "now"):
            raise GraphError(f"tune: {tune!r} found; True, False or 'now' needed")
        if bound_shapes is not None and bound_shapes < 1:
            raise GraphError(f"bound_shapes: {bound_shapes} found, 1 or more needed")
        if gpus > 1:
            raise GraphError(f"gpus: {gpus} found; a session runs on one GPU, so 1 at most")
        given: tuple[Any, ...] = weights, gpus, cpus, machine, strategy, requests, plain
        given = *given, layouts, fast_memory, plan
        usual = given == (NOTHING, 0, None, None, None, 1, False, None, None, None)
        opening = partial(self._open, model, bound_shapes, tune, precision, threads, *given)
        self._opening: Callable[[], None] | None = None
        self._snapshot: Snapshot | None = None
        self._keeper: Keeper | None = None
        fits = threads is None or (type(threads) is int and 0 < threads <= usable_cores())
        if usual and tune != "now" and fits:
            options = Options(threads or usable_cores(), tune, precision)
            with paused():
                self._snapshot, self._keeper = find(model, options)
            if self._snapshot is not None:
                self._source, self._opened = self._snapshot.source, Lock()
                self._opening = partial(opening, file=self._snapshot.file)
                return
        self._opened = Lock()
        opening()

    def _open(
        self,
        model: Model | OnnxModel | Graph | str | Path,
        bound_shapes: int | None,
        tune: Tune,
        precision: str,
        threads: int | None,
        weights: Mapping[str, Array],
        gpus: int,
        cpus: int | None,
        machine: Machine | None,
        strategy: Strategy | str | Path | None,
        requests: int,
        plain: bool,
        layouts: Layouts | None,
        fast_memory: int | None,
        plan: MemoryPlan | str | Path | None,
        file: MappedFile | None = None,
    ) -> None:
        """Read the model, and make ready to bind graphs of it; file: see `Source.of`."""
        from soapstone.frontend.inference.binding import Binder, Packed
        from soapstone.frontend.inference.session_strategy import SessionStrategy
        from soapstone.frontend.precision import check_precision

        with paused():
            source = Source.of(model, weights, file)
        followed = SessionStrategy(strategy, source, machine, cpus, threads, gpus, requests)
        machine, plans = followed.machine, None
        streamed = fast_memory is not None or plan is not None
        check_precision(precision, machine.processors[0].kind, streamed, plain)
        if streamed:
            if requests > 1:
                raise GraphError(f"requests: {requests} found with a fast memory; 1 needed")
            from soapstone.frontend.planned import Plans

            plans = Plans("dp" if plan is None else plan, fast_memory)
            plans.step = True  # a plan that is given is of what is bound here
            machine = machine.bounded(plans.capacity_bytes)
        binder = Binder(
            *(source, Packed(), followed, machine, plans), plain, layouts, tune, precision
        )
        self._begin(binder, bound_shapes, requests)

    def __getattr__(self, name: str) -> Any:
        """Open the model, where there is only a snapshot of it and something else is asked for."""
        if name not in _OPENED or "_opened" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__!r} has no attribute {name!r}")
        with self._opened:
            self._snapshot, opening, self._opening = None, self._opening, None
            if opening is not None:
                try:
                    opening()
                except BaseException:
                    self._opening = opening
                    raise
        return object.__getattribute__(self, name)

    def _begin(self, binder: Binder, bound_shapes: int | None, requests: int = 1) -> None:
        from soapstone.frontend.inference.bound_graphs import BoundGraphs
        from soapstone.runtime.forks import tell

        self._binder, self._source, self._machine = binder, binder.source, binder.machine
        self._bounds = BoundGraphs(binder, bound_shapes)
        self._pieces: Pieces | None = None  # of a model whose shapes depend on computed values
        self._pool: ThreadPoolExecutor | None = None  # as many threads as requests, for `run_async`
        self.decoder: Decoder | None = None  # what is known of the model as one
        self._keeping: threading.Thread | None = None  # who keeps what answered first
        self._close = weakref.finalize(self, self._bounds.close)
        self._lock = threading.Lock()  # who finds it finds what is above
        tell(self)
        # Each of the others runs one more request at once.
        self._others = [self._another(self._machine) for _ in range(requests - 1)]
        self._free = self._all_free()

    def _another(self, machine: Machine) -> InferenceSession:
        """Return a session of the same model on another machine, which shares weights."""
        other = object.__new__(InferenceSession)
        other._snapshot = other._keeper = None
        other._begin(self._binder.on(machine), self._bounds.asked)
        return other

    def _all_free(self) -> queue.LifoQueue[int]:
        """Return the numbers of those who run nothing: this session's is 0."""
        free: queue.LifoQueue[int] = queue.LifoQueue()
        for number in reversed(range(self.requests)):
            free.put(number)
        return free

    def forked(self) -> None:
        """In a child process nobody holds the lock, and shapes are bound anew, to new workers."""
        self._lock = threading.Lock()
        self._pool = None
        self._free = self._all_free()
        if self._close.alive:
            self._bounds.start()
        else:
            self._bounds.held.clear()

    @property
    def name(self) -> str:
        """The name of the model."""
        return self._source.name

    @property
    def threads(self) -> int:
        """How many threads each processor has."""
        if self._snapshot is not None:
            return self._snapshot.options.threads
        return self._machine.processors[0].threads

    @property
    def cpus(self) -> int:
        """How many processors a run is split over."""
        if self._snapshot is not None:
            return 1
        return len(self._machine.workers)

    @property
    def requests(self) -> int:
        """How many runs may go on at once."""
        if self._snapshot is not None:
            return 1
        return 1 + len(self._others)

    @property
    def inputs(self) -> tuple[Field, ...]:
        """The declared inputs; an axis is a number, the name of a symbolic dim, or None."""
        return self._source.inputs

    def __reduce__(self) -> Any:
        raise TypeError(
            f"session of {self.name!r}: it cannot be pickled or copied: make one in each process"
            " from the model's file"
        )

    @property
    def outputs(self) -> tuple[str, ...]:
        """The names of the outputs."""
        return self._source.outputs

    def run(
        self, inputs: Mapping[str, Any] | Any, *, out: Mapping[str, Any] = NOTHING
    ) -> dict[str, Array]:
        """Return the outputs by name.

        inputs: an array of the declared type for each input, or a tensor of another library that
        has `__dlpack__`; one serves a single input. out: arrays or tensors to write outputs to, by
        name, in place of new arrays.

        Raises:
            DataError: a missing or unknown input, or one of another type, rank or extent; or such
                an array to write to.
            GraphError: the model has no graph for these shapes; names the operator.
        """
        kept = self._snapshot
        if kept is not None:
            found: dict[str, Array] | None = kept.run(inputs, out)
            if found is not None:
                return found
        given = self.checked(inputs)
        number = self._free.get()
        try:
            return (self._others[number - 1] if number else self)._run(given, out)
        finally:
            self._free.put(number)

    def _run(self, given: Mapping[str, Array], out: Mapping[str, Any]) -> dict[str, Array]:
        from soapstone.engine.session import Bound

        with self._lock:
            self._source.check()
            stepped = self._bounds.in_rows(given, out)
            if stepped is not None:
                return stepped
            bound = self._bound_or_pieces(given)
            if not isinstance(bound, Bound):
                found = bound.run(given)
                for name, array in targets(self.name, out, found).items():
                    np.copyto(array, found[name])
                    found[name] = array
                return found
            into = targets(self.name, out, bound.results)
            for name, feed in bound.feeds.items():
                np.copyto(feed, given[name])
            self._bounds.session.run(bound)
            found = {}
            for name, array in bound.results.items():
                if name in into:
                    np.copyto(into[name], array)
                found[name] = into[name] if name in into else array.copy()
            self._bounds.answered()
            keeper, self._keeper = self._keeper, None
            if keeper is not None:
                keeping = threading.Thread(target=self._keep, args=(keeper, bound))
                with suppress(RuntimeError):  # no more threads, or the interpreter ends
                    keeping.start()
                    self._keeping = keeping
            return found

    def _keep(self, keeper: Keeper, bound: Bound) -> None:
        """Keep what answered first for later processes, where shapes alone decide what runs."""
        with self._lock:
            alike = not self._bounds.reads_contents
            keep = keeper.take(self._source, bound) if alike else None
        if keep is not None:
            keep()

    def generate(
        self,
        prompts: Sequence[int] | Sequence[Sequence[int]] | Array,
        max_new_tokens: int = 128,
        *,
        stop: int | Sequence[int] = (),
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float = 1.0,
        seed: int = 0,
        on_tokens: Callable[[tuple[int | None, ...]], object] | None = None,
    ) -> list[Any]:
        """Return the tokens that a decoder continues prompts with (docs/inference.md).

        Args:
            prompts: tokens of one prompt, or of several, whose lengths may differ. For one prompt
                the result is a list of tokens, for several a list of such.
            max_new_tokens: how many are made at most.
            stop: tokens after which no more follow; the one that comes is the last.
            temperature: what logits are divided by before a token is drawn; at 0, the likeliest
                token is taken, the first of several.
            top_k: how many of the likeliest tokens are drawn from; all by default.
            top_p: the least share that tokens which are drawn from have, the likeliest first.
            seed: of the drawing; each prompt has random numbers of its own, by its place.
            on_tokens: is called with the next token of each prompt as soon as it is known, None
                for a prompt that has ended.

        Raises:
            DataError: the model is no decoder, or a prompt does not fit it.
        """
        from soapstone.frontend.generation.loop import generated

        drawn = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed}
        return generated(self, prompts, max_new_tokens, stop, drawn, on_tokens)

    def stream(
        self, prompt: Sequence[int] | Array, max_new_tokens: int = 128, **options: Any
    ) -> Iterator[int]:
        """Yield the tokens that a decoder continues one prompt with, each as soon as it is known.

        prompt: its tokens. max_new_tokens, options: as of `generate`, without `on_tokens`.

        Raises:
            DataError: as `generate`.
        """
        from soapstone.frontend.generation.loop import streamed

        return streamed(self, prompt, max_new_tokens, **options)

    def run_async(self, inputs: Mapping[str, Any] | Any) -> Future[dict[str, Array]]:
        """Return the future of `run`: threads of the session run, as many as `requests`, in order.

        inputs: as of `run`; they must stay as they are until the future is done.

        Raises:
            DataError: as `run`, at once; other errors are the future's.
            StoppedError: the session was closed.
        """
        given = self.checked(inputs)
        with self._lock:
            self._check_open()
            if self._pool is None:
                from concurrent.futures import ThreadPoolExecutor

                self._pool = ThreadPoolExecutor(self.requests, f"run_async of {self.name}")
            return self._pool.submit(self.run, given)

    @contextmanager
    def profile(self, path: str | Path) -> Iterator[Profile]:
        """Time every task run inside, and write a timeline to a file (docs/profiles.md).

        Yields the timeline. Runs follow each other meanwhile, on processors of one request. path:
        of the file, in the trace-event format.

        Raises:
            ProfileError: another timeline is being taken.
        """
        with self._bounds.session.timed() as timeline:
            others = [self._free.get() for _ in range(self.requests)]
            self._free.put(others.pop(others.index(0)))
            try:
                yield timeline
            finally:
                for number in others:
                    self._free.put(number)
        timeline.save(path)

    def variants(self, inputs: Mapping[str, Array] | Array) -> Mapping[str, str]:
        """Return which kernel variant serves each launch for inputs of these shapes.

        A model that is run in pieces is run for that, since its shapes depend on computed values.
        """
        from soapstone.engine.session import Bound

        given = self.checked(inputs)
        with self._lock:
            bound = self._bound_or_pieces(given)
            return dict(bound.variants if isinstance(bound, Bound) else bound.variants(given))

    def meeting_samples(self, inputs: Mapping[str, Any] | Any) -> str:
        """Return where outputs depend on other rows of the inputs than theirs; "" for nowhere.

        Rows are along the first axis of all inputs and outputs. inputs: as of `run`, of two rows or
        more.
        """
        from soapstone.frontend.onnx import UnboundError
        from soapstone.ir.samples import meeting_samples

        try:
            graph, contents = self._source.graph(self.checked(inputs))
        except UnboundError:
            return "shapes that depend on computed values"
        if contents:
            return f"input {next(iter(contents))!r}, on whose contents shapes depend"
        return meeting_samples(graph, self._source.weights())

    @property
    def peak_bytes(self) -> int:
        """Bytes of inputs, outputs and arenas of all bound shapes; packed weights come on top."""
        if self._snapshot is not None:
            return self._snapshot.peak_bytes
        found = 0
        for each in (self, *self._others):
            with each._lock:
                found += each._bounds.peak_bytes
        return found

    def moved_bytes(self, inputs: Mapping[str, Array] | Array) -> tuple[int, int] | None:
        """Return what a run on inputs of these shapes copies between the fast memory and the other.

        Two counts, by its memory plan and as it is compiled; None without a plan, and for a model
        that is run in pieces.
        """
        from soapstone.engine.session import Bound

        given = self.checked(inputs)
        with self._lock:
            bound = self._bound_or_pieces(given)
            return bound.moved_bytes if isinstance(bound, Bound) else None

    def close(self) -> None:
        """Stop the workers and free the memory; a closed session runs no more.

        What was asked of `run_async` before is done first. No thread reads the model's file from
        then on, so that it may be written to.
        """
        with self._opened:
            if self._snapshot is not None:
                self._snapshot, self._opening = None, self._check_open
                return
        with self._lock:
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown()
        for each in (self, *self._others):
            with each._lock:
                each._close()
            each._bounds.wait()
        keeping, self._keeping = self._keeping, None
        if keeping is not None:
            keeping.join()

    def __enter__(self) -> InferenceSession:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def checked(self, inputs: Mapping[str, Any] | Any) -> dict[str, Array]:
        """Return inputs as `run` takes them: an array for each input, in the memory that it had.

        inputs: as of `run`.

        Raises:
            DataError: as `run`.
        """
        return self._source.checked(inputs)

    # For those who run a model in steps of their own (`frontend/generation`), in a turn:

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Let nothing else of this session run inside.

        Raises:
            StoppedError: the session was closed.
        """
        with self._lock:
            self._check_open()
            yield

    @property
    def in_main_memory(self) -> bool:
        """Whether what runs read and write lies in the computer's memory, and nowhere else."""
        from soapstone.runtime.machines.machine import CUDA

        return self._binder.plans is None and self._machine.processors[0].kind != CUDA

    def weights(self) -> Mapping[str, Array]:
        """Return the weights, and the constants of the graphs built so far."""
        return self._source.weights()

    def graph_of(self, inputs: Mapping[str, Array]) -> Graph:
        """Return the graph for inputs of these shapes.

        inputs: an array for each input.

        Raises:
            DataError: it depends on their contents too; names the input.
        """
        graph, contents = self._source.graph(inputs)
        if contents:
            raise DataError(
                f"model {self.name!r}: shapes depend on the contents of input"
                f" {next(iter(contents))!r}; on extents alone needed"
            )
        return graph

    def bound_as(
        self,
        key: tuple[object, ...],
        make: Callable[[], Graph],
        constants: Mapping[str, Array] = NOTHING,
        runs: int = 1,
    ) -> Bound:
        """Return a graph bound under a key of its own, among those of shapes; made if need be.

        Updates of its inputs are carried out where they lie. key: of it. make: returns the graph.
        constants: what it reads besides the model's weights. runs: of how many graphs one run of
        the model consists, each of which stays bound.
        """
        return self._bounds.under(key, make, constants, runs)

    def run_bound(self, bound: Bound) -> None:
        """Run a bound graph once on what its feeds hold. bound: of `bound_as`."""
        self._source.check()
        self._bounds.session.run(bound)

    @property
    def most_bound(self) -> int:
        """How many shapes of inputs stay bound."""
        return self._bounds.most

    def _check_open(self) -> None:
        from soapstone.runtime import StoppedError

        close = self.__dict__.get("_close")  # there is none where a snapshot was closed
        if close is None or not close.alive:
            raise StoppedError(f"session of model {self.name!r}: it was closed")

    def _bound_or_pieces(self, given: Mapping[str, Array]) -> Bound | Pieces:
        """Return the bound graph, or what runs a model whose shapes depend on computed values."""
        self._check_open()
        if self._pieces is None:
            try:
                return self._bounds.of(given)
            except GraphError as error:
                from soapstone.frontend.onnx import UnboundError

                if self._source.onnx is None or not isinstance(error, UnboundError):
                    raise
                from soapstone.frontend.onnx.pieces import Pieces

                self._pieces = Pieces(self._source.onnx, self)
        return self._pieces
