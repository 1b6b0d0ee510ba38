"""Inference sessions: graphs bound once to constant weights, then run any number of times.

Weights never change here. So what depends on them alone is computed when a graph is bound, batch
norm is folded into them, kernels pack them in layouts of their own, and element-wise steps run in
the launch of the product before them (docs/lowering.md). A session keeps a bound graph for each
shape of inputs.

This file has what users call: options, what is known of the model, and who serves a run. The run
itself is in `serial_session.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from soapstone.frontend.inference.opening import Opening
from soapstone.frontend.inference.snapshots import Keeper, Options, Snapshot, find
from soapstone.frontend.inference.sources import Field, Source
from soapstone.garbage_collection import paused
from soapstone.ir.errors import GraphError
from soapstone.ir.tensor import NOTHING, Array
from soapstone.locks import Lock
from soapstone.system import usable_cores

if TYPE_CHECKING:
    from concurrent.futures import Future

    from soapstone.frontend.generation.decoder import Decoder
    from soapstone.frontend.inference.serial_session import SerialSession
    from soapstone.frontend.inference.snapshot_places import RowsMark
    from soapstone.frontend.inference.thread_pool import ThreadPool
    from soapstone.frontend.model import Model
    from soapstone.frontend.onnx import OnnxModel
    from soapstone.ir.files.layouts import Layouts
    from soapstone.ir.graph import Graph
    from soapstone.ir.plan import MemoryPlan
    from soapstone.ir.strategy import Strategy
    from soapstone.kernels.choices import Tune
    from soapstone.native.files import MappedFile
    from soapstone.runtime import Machine, Profile


def interrupts(kind: type[BaseException] | None) -> bool:
    """Return whether what a `with` is left by is an interrupt or the end of the process."""
    return kind is not None and issubclass(kind, KeyboardInterrupt | SystemExit)


class InferenceSession:
    """A model bound to its weights.

    `run` may be called from several threads: as many runs as `requests` proceed at once, each on
    its own processors, and others wait. A `Batcher` joins many small requests.

    Inputs are arrays, or anything with `__dlpack__`, such as tensors of torch (docs/inference.md).

    Args:
        model: a Model, an OnnxModel or its file, or a Graph.
        weights: the parameters and states of a Graph, by name; those of a Model are by default what
            a compiled model has now.
        threads: of each processor; by default all cores are divided. gpus: 1 to use a GPU instead
            (docs/cuda.md).
        cpus: the number of processors that share a run; by default 1, or as many as the strategy
            was made for. machine: the machine to run on, in place of these numbers.
        strategy: how processors share a run: a Strategy, or its file (docs/strategies.md), for the
            model's graph at some input shapes; it is adapted to other shapes. Without one, samples
            are split, or the dim that moves the fewest bytes (the `data_parallel` mapper).
        requests: how many runs may proceed at once, each on as many processors; they share weights.
        plain: run one kernel for each operator, without folding or fusing, for comparison.
        layouts: axis orders of values, such as `OptimizeResult.layouts`, the others in C order; by
            default those in the model's file, else those of `channels_last`.
        bound_shapes: how many input shapes stay bound; the least recently used one is released. By
            default as many as fit in 256 MB, 128 at most.
        fast_memory: bytes of a memory that the threads work in, backed by the computer's memory
            (docs/memory.md). Weights are then streamed like other values, so none is folded or
            packed, and all shapes share them and that memory.
        tune: how kernels are chosen. True: by measurements that exist on this computer, else by
            expected cost; "now": missing measurements are made before the first answer, and kept
            for later sessions; False: by expected cost alone. A session never changes a choice.
        precision: "float32"; "bfloat16": products and convolutions may round their operands to
            bfloat16 and keep them so (docs/inference.md), while their sums and all other operators
            stay float32; "int4" or "int8": matrix products round their weights to so many bits and
            keep them so; "tf32", on a GPU: products of NVIDIA's libraries may round their operands
            (docs/cuda.md).
        plan: how values are streamed: "dp" (fewest bytes, the default), "lru", "stream", "belady",
            or a plan or its file, for the graph of one shape.

    Raises:
        GraphError: an unknown plan, or one without a fast memory; another `tune`; numbers of
            processors or requests that do not fit; an unknown `precision`, or one that is not
            available: the processor has no instructions for it, or weights are streamed.
        StrategyError: the strategy is for another graph or machine, or not legal. If it does not
            give extents of the model's symbolic dims, `run` raises this.
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

        def opened(
            file: MappedFile | None, keeper: Keeper | None, mark: RowsMark | None
        ) -> tuple[SerialSession, ...]:
            """Read the model, and return what serves its runs. file: see `Source.of`."""
            with paused():
                from soapstone.frontend.inference.binding import Binder, Packed
                from soapstone.frontend.inference.serial_session import SerialSession
                from soapstone.frontend.inference.session_strategy import SessionStrategy
                from soapstone.frontend.precision import check_precision

                source = Source.of(model, weights, file)
            followed = SessionStrategy(strategy, source, machine, cpus, threads, gpus, requests)
            runs_on, plans = followed.machine, None
            streamed = fast_memory is not None or plan is not None
            check_precision(precision, runs_on.processors[0].kind, streamed, plain)
            if streamed:
                if requests > 1:
                    raise GraphError(f"requests: {requests} found with a fast memory; 1 needed")
                from soapstone.frontend.memory_plans import Plans

                plans = Plans("dp" if plan is None else plan, fast_memory)
                plans.step = True  # a plan that is given is of what is bound here
                runs_on = runs_on.bounded(plans.capacity_bytes)
            binder = Binder(
                *(source, Packed(), followed, runs_on, plans), plain, layouts, tune, precision
            )
            others = (SerialSession(binder, bound_shapes) for _ in range(requests - 1))
            return SerialSession(binder, bound_shapes, keeper, mark), *others

        self._snapshot: Snapshot | None = None
        self._serial: tuple[SerialSession, ...] = ()  # none before the model is open
        self._lock = Lock()  # held to open the model, and to choose who serves a run
        self._alone = False  # whether the first alone serves runs, for now
        self._pool: ThreadPool | None = None  # as many threads as requests, for `run_async`
        self.decoder: Decoder | None = None  # what is known of the model as one
        given: tuple[Any, ...] = weights, gpus, cpus, machine, strategy, requests, plain
        given = *given, layouts, fast_memory, plan
        usual = given == (NOTHING, 0, None, None, None, 1, False, None, None, None)
        fits = threads is None or (type(threads) is int and 0 < threads <= usable_cores())
        keeper = None
        if usual and tune != "now" and fits:
            options = Options(threads or usable_cores(), tune, precision)
            with paused():
                self._snapshot, keeper = find(model, options)
        kept = self._snapshot
        file = None if kept is None else kept.file
        told = kept or keeper
        mark = None if told is None else told.mark
        self._opening: Opening | None = Opening(partial(opened, file, keeper, mark))
        if kept is not None:
            self._source = kept.source
        else:
            self._open()

    def _open(self) -> tuple[SerialSession, ...]:
        """Return who serves runs, one at a time each; open the model if it is not.

        Raises:
            StoppedError: the session was closed before.
        """
        with self._lock:
            if not self._serial:
                if self._opening is None:
                    from soapstone.frontend.inference.serial_session import closed

                    raise closed(self.name)
                found = self._opening()
                from soapstone.runtime.forks import tell

                tell(self)
                self._source, self._serial, self._opening = found[0].source, found, None
                kept, self._snapshot = self._snapshot, None
                if kept is not None:
                    kept.close()
            return self._serial

    @property
    def serial(self) -> SerialSession:
        """What serves one run at a time, for those that run a model in steps of their own."""
        return self._open()[0]

    def forked(self) -> None:
        """In a child process no thread of the session runs."""
        self._pool, self._alone = None, False

    @property
    def name(self) -> str:
        """The name of the model."""
        return self._source.name

    @property
    def threads(self) -> int:
        """The number of threads of each processor."""
        if self._snapshot is not None:
            return self._snapshot.options.threads
        return self.serial.binder.machine.processors[0].threads

    @property
    def cpus(self) -> int:
        """The number of processors that share a run."""
        if self._snapshot is not None:
            return 1
        return len(self.serial.binder.machine.workers)

    @property
    def requests(self) -> int:
        """The number of runs that may proceed at once."""
        if self._snapshot is not None:
            return 1
        return len(self._open())

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

        inputs: an array of the declared type for each input, or a tensor of another library with
        `__dlpack__`; a single one for a model with one input. out: arrays or tensors to write
        outputs to, by name, in place of new arrays.

        Raises:
            DataError: a missing or unknown input, or one of another type, rank or extent; or such
                an array to write to.
            GraphError: the model has no graph for these shapes; names the operator.
        """
        kept = self._snapshot
        if kept is not None:
            found: dict[str, Array] | None = kept.run(inputs, out)
            if found is not None:
                opening = self._opening
                if opening is not None and kept.is_asked_again:
                    opening.begin(kept.given, kept.apart, self._open)
                return found
        given = self.checked(inputs)
        while True:
            with self._lock:  # who comes next sees what is chosen
                serving = self._open()[: 1 if self._alone else None]
                chosen = min(serving, key=lambda each: each.load)
                chosen.asked.append(None)
            try:
                with chosen.lock:
                    if chosen is serving[0] or not self._alone:  # else a profile began meanwhile
                        return chosen.run(given, out)
            finally:
                chosen.asked.pop()

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
        """Return the tokens with which a decoder continues prompts (docs/inference.md).

        Args:
            prompts: the tokens of one prompt, or of several, whose lengths may differ. The result
                is a list of tokens for one prompt, and a list of such lists for several.
            max_new_tokens: the largest number of new tokens.
            stop: tokens that end the continuation; the one that occurs is its last token.
            temperature: divides the logits before a token is drawn; at 0, the likeliest token is
                taken, the first of several.
            top_k: tokens are drawn from so many of the likeliest; by default from all.
            top_p: tokens are drawn from the fewest likeliest whose probabilities sum to this.
            seed: of the draws; each prompt has its own random numbers, by its index.
            on_tokens: called with the next token of each prompt as soon as it is known, None for a
                prompt that has ended.

        Raises:
            DataError: the model is no decoder, or a prompt does not fit it.
        """
        from soapstone.frontend.generation.loop import generated

        drawn = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed}
        return generated(self, prompts, max_new_tokens, stop, drawn, on_tokens)

    def stream(
        self, prompt: Sequence[int] | Array, max_new_tokens: int = 128, **options: Any
    ) -> Iterator[int]:
        """Yield the tokens with which a decoder continues one prompt, each as soon as it is known.

        prompt: its tokens. max_new_tokens, options: as of `generate`, without `on_tokens`.

        Raises:
            DataError: as `generate`.
        """
        from soapstone.frontend.generation.loop import streamed

        return streamed(self, prompt, max_new_tokens, **options)

    def run_async(self, inputs: Mapping[str, Any] | Any) -> Future[dict[str, Array]]:
        """Return a future of `run`, which a thread of the session runs, in order of the calls.

        inputs: as of `run`; they must not change until the future is done.

        Raises:
            DataError: as `run`, at once; other errors are the future's.
            StoppedError: the session was closed.
        """
        given = self.checked(inputs)
        with self._lock:
            self.serial.check_open()
            if self._pool is None:
                from soapstone.frontend.inference.thread_pool import ThreadPool

                self._pool = ThreadPool(self.requests, f"run_async of {self.name}")
            return self._pool.submit(self.run, given)

    @contextmanager
    def profile(self, path: str | Path) -> Iterator[Profile]:
        """Time every task that runs inside, and write a timeline to a file (docs/profiles.md).

        Yields the timeline. Meanwhile runs are serial, on the processors of one request. path: of
        the file, in the trace-event format.

        Raises:
            ProfileError: another timeline is being taken.
        """
        first, *others = self._open()
        with first.bounds.session.timed() as timeline:
            try:
                self._alone = True
                for each in others:
                    with each.lock:  # its run has ended
                        pass
                yield timeline
            finally:
                self._alone = False
        timeline.save(path)

    def variants(self, inputs: Mapping[str, Array] | Array) -> Mapping[str, str]:
        """Return which kernel variant serves each launch for inputs of these shapes.

        A model that runs in pieces is run for this, since its shapes depend on computed values.
        """
        given = self.checked(inputs)
        with self.serial.turn() as serial:
            return serial.variants(given)

    def meeting_samples(
        self, inputs: Mapping[str, Any] | Any, numbers: Iterable[int] | None = None
    ) -> str:
        """Return where rows of outputs depend on other rows of the inputs; "" for nowhere.

        Rows are along the first axis of all inputs and outputs, which is one symbolic dim. inputs:
        as of `run`, with two rows or more. numbers: of rows that are in question, by default all.
        """
        from soapstone.frontend.inference.in_rows import rows_apart
        from soapstone.frontend.inference.shape_warmup import shapes_of
        from soapstone.frontend.onnx import UnboundError

        given, binder = self.checked(inputs), self.serial.binder

        def of_rows(number: int) -> dict[str, tuple[int, ...]]:
            return {name: (number, *array.shape[1:]) for name, array in given.items()}

        try:
            known, contents = binder.known(given)
        except UnboundError:
            return "shapes that depend on computed values"
        if contents:
            return f"input {next(iter(contents))!r}, on whose contents shapes depend"
        if binder.source.rows is None:
            return "inputs without a dim in common"
        more = of_rows(len(next(iter(given.values()))) + 1)
        try:
            other, _ = binder.known(shapes_of(given, more))
        except GraphError:
            return "one row more, of which the model has no graph"
        try:
            asked = rows_apart(known, other, binder.source.weights())
            for number in numbers or ():
                asked.check(of_rows(number))
        except GraphError as error:
            return str(error)
        unknown = asked and numbers is None
        return "contents that may depend on the number of rows" if unknown else ""

    def settle(self) -> None:
        """Wait until no thread of the session makes anything ahead, for other shapes of inputs."""
        opening = self._opening
        if opening is not None:
            opening.wait()
        for each in self._serial:
            each.bounds.wait()

    @property
    def peak_bytes(self) -> int:
        """Bytes of inputs, outputs and arenas of all bound shapes, without packed weights."""
        if self._snapshot is not None:
            return self._snapshot.peak_bytes
        found = 0
        for each in self._open():
            with each.lock:
                found += each.bounds.peak_bytes
        return found

    def moved_bytes(self, inputs: Mapping[str, Array] | Array) -> tuple[int, int] | None:
        """Return the bytes that a run copies between the fast memory and its backing memory.

        inputs: of the shapes in question. The two counts are those of the memory plan and of the
        compiled run; None without a plan, and for a model that runs in pieces.
        """
        given = self.checked(inputs)
        with self.serial.turn() as serial:
            return serial.moved_bytes(given)

    def close(self) -> None:
        """Stop the workers and free the memory; later calls of `run` are errors.

        Calls of `run_async` that were made before are completed first. An interrupt meanwhile, or
        one that `with session:` is left by, cancels those that wait. No thread reads the model's
        file from then on, so that it may be written to.
        """
        self._close(cancel=False)

    def _close(self, cancel: bool) -> None:
        with self._lock:
            kept, self._snapshot = self._snapshot, None
            opening, self._opening = self._opening, None
        if kept is not None:
            kept.close()
        if opening is not None:
            opening.close()
        try:
            self._end_pool(cancel)
        finally:
            for each in self._serial:
                each.close()
            self._end_pool(cancel)  # of who asked meanwhile, and is told that it is closed

    def _end_pool(self, cancel: bool) -> None:
        """Complete the calls of `run_async` so far, or cancel those that do not run yet."""
        with self._lock:
            pool, self._pool = self._pool, None
        if pool is None:
            return
        try:
            pool.close(cancel)
        except BaseException:  # an interrupt: what runs is waited for, and nothing else
            pool.close(cancel=True)
            raise

    def __enter__(self) -> InferenceSession:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._close(cancel=interrupts(kind))

    def checked(self, inputs: Mapping[str, Any] | Any) -> dict[str, Array]:
        """Return inputs as `run` takes them: an array for each input, not copied where possible.

        inputs: as of `run`.

        Raises:
            DataError: as `run`.
        """
        return self._source.checked(inputs)
