"""Cells: functions of rows, recorded once for types of operands and built for any number of rows.

What a call of a function computes for one sample is a graph whose values have a first axis of
extent 1. The same graph with extent n computes n calls at once, provided that no operator mixes
rows. The graph with its gradients is divided into three parts: the forward pass, which runs call by
call or batch by batch; the gradients of operands, which run in the opposite order; and the sums of
parameters' gradients, which run once at the end, over the rows of all calls.

Source: Neubig, Goldberg and Dyer, On-the-fly operation batching in dynamic computation graphs,
NeurIPS 2017, for batches; Liu, Machine learning workflow optimization via automatic discovery of
resource reuse opportunities, 2019, chapter 4, for the reuse of one compiled graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from soapstone.frontend.recording import Call, Recording, Tensor
from soapstone.ir.builder import GraphBuilder
from soapstone.ir.dims import Affine, Kind, Operand, Product
from soapstone.ir.errors import GraphError
from soapstone.ir.graph import Graph, Node
from soapstone.ir.tensor import Role, TensorSpec
from soapstone.ir.training.autodiff import pulled_back

DRAW = TensorSpec((), "int64")  # what tells a call's random numbers from all others
_SHARED = (Role.PARAMETER, Role.SCALAR)  # inputs that several calls of layers declare alike


class RowRecording(Recording):
    """Records the layers of one cell; `prefix` begins the names of its nodes and parameters.

    Attributes:
        drawing: whether a layer draws random numbers.
        draw: the operand from which a call's random numbers follow, if the cell draws any.
    """

    def __init__(self, prefix: str, seed: int) -> None:
        self.prefix = prefix
        self.drawing = False
        self.draw: Tensor | None = None
        super().__init__(prefix, seed)

    def _new_builder(self) -> GraphBuilder:
        builder = GraphBuilder(self.name)
        builder.shared = _SHARED
        return builder

    def draws(self) -> tuple[Tensor, ...]:
        self.drawing = True
        return () if self.draw is None else (self.draw,)

    def _name(self, kind: str, name: str | None) -> str:
        inside = f"{self.prefix}." if self.prefix else ""
        return super()._name(inside + kind, None if name is None else inside + name)


@dataclass(frozen=True)
class Parts:
    """The three graphs of a cell for a number of rows.

    Attributes:
        forward: computes the outputs, then the `kept` values, from the operands.
        backward: computes the gradients of operands that have one, then the `passed` values, from
            `kept` values and seeds; None if no operand has a gradient.
        weights: computes the gradients of parameters, in the order of `trained`; None if the cell
            has no parameters.
        operands: the operands that have a gradient.
        seeds: the names of the outputs' gradients, each with its output.
        passed: the values that `backward` computes for `weights`.
    """

    forward: Graph
    backward: Graph | None
    weights: Graph | None
    kept: tuple[str, ...]
    operands: tuple[int, ...]
    seeds: tuple[tuple[str, int], ...]
    passed: tuple[str, ...]
    trained: tuple[str, ...]


class Cell:
    """A function of rows, recorded for operands of certain types.

    Args:
        recording: the layers that it consists of; the operands are its inputs `x0`, `x1`, ….
        number: the cell's number, unique in a session.

    Raises:
        GraphError: an operator mixes rows, or an output has none.
    """

    def __init__(self, recording: RowRecording, number: int) -> None:
        self.recording = recording
        self.name = recording.name
        self.number = number
        graph = self.build(2, training=True)
        check_rows(graph)
        self.inputs = _rows(graph, graph.inputs(Role.INPUT))
        self.outputs = _rows(graph, graph.outputs)
        self.parameters = graph.inputs(Role.PARAMETER)
        self.operators = len(graph.nodes)
        # Dropout of nothing, for one, records no operator.
        self.kind = graph.nodes[-1].operator if graph.nodes else "identity"
        self.drawing = recording.draw is not None  # by its last operand

    def build(self, rows: int, *, training: bool) -> Graph:
        """Return the forward graph for a number of rows."""
        return self.recording.build(rows, training=training)

    def parts(self, rows: int) -> Parts:
        """Return the parts of a training step for a number of rows."""
        return parts(self.build(rows, training=True))

    @cached_property
    def layout(self) -> Parts:
        """The parts, for what holds of any number of rows."""
        return self.parts(2)

    def replay(self, recording: RowRecording, operands: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Record the cell's layers in another recording, and return its outputs there."""
        known = dict(enumerate(operands))
        for call in self.recording.calls[len(operands) :]:
            results = recording.record(call.emit, [known[index] for index in call.inputs])
            known.update(zip(call.outputs, results))
        return tuple(known[index] for index in self.recording.output_indices)

    @cached_property
    def steps(self) -> tuple[tuple[Call, ...], ...]:
        """The calls of layers, each with those before it that see no rows, such as parameters."""
        seen = set(range(len(self.inputs)))
        apart: dict[int, Call] = {}
        made: list[tuple[Call, ...]] = []
        for call in self.recording.calls[len(seen) :]:
            if seen.intersection(call.inputs):
                seen.update(call.outputs)
                made.append((*_needed(call, apart), call))
            else:
                apart.update(dict.fromkeys(call.outputs, call))
        return tuple(made)

    def __repr__(self) -> str:
        return f"Cell({self.name}: {len(self.inputs)} operands, {self.operators} operators)"


def _needed(call: Call, apart: dict[int, Call]) -> Iterable[Call]:
    """Yield the calls of those given that a call depends on, each once, in order."""
    found: dict[int, Call] = {}
    pending = [apart[index] for index in call.inputs if index in apart]
    while pending:
        each = pending.pop()
        found[each.outputs[0]] = each
        pending += [apart[index] for index in each.inputs if index in apart]
    return (found[index] for index in sorted(found))


def _rows(graph: Graph, names: Iterable[str]) -> tuple[TensorSpec, ...]:
    """Return the type of one row of each value."""
    specs = (graph.tensors[name] for name in names)
    return tuple(replace(spec, shape=spec.shape[1:]) for spec in specs)


def recorded(
    name: str,
    seed: int,
    operands: Sequence[TensorSpec],
    function: Callable[..., Any],
    drawing: bool = False,
) -> RowRecording:
    """Return the layers that a function calls for operands of the given types, one row each.

    If it draws random numbers, the recording has one more operand: a number unique to each call.

    Args:
        name: begins the names of nodes and parameters. seed: of initial values.
        operands: the type of each operand's row.
        function: takes the recording and a tensor for each operand; returns one or more tensors.
        drawing: whether it draws random numbers.

    Raises:
        GraphError: the function returns anything else.
    """
    recording = RowRecording(name, seed)
    tensors = [
        recording.input(f"x{i}", (1, *spec.shape), spec.dtype) for i, spec in enumerate(operands)
    ]
    if drawing:
        recording.draw = recording.input(f"x{len(operands)}", (1,), DRAW.dtype)
    made = function(recording, *tensors)
    if recording.drawing and not drawing:
        return recorded(name, seed, operands, function, drawing=True)
    outputs = made if isinstance(made, tuple | list) else (made,)
    for output in outputs:
        if not isinstance(output, Tensor) or output.model is not recording:
            raise GraphError(
                f"cell {name!r}: {type(output).__name__} returned, tensors that it made needed"
            )
    recording.output(*outputs)
    return recording


def check_rows(graph: Graph) -> None:
    """Check that each row of the outputs depends only on the same row of the inputs.

    Raises:
        GraphError: names the node that mixes rows, or the output that has none.
    """
    seen = set(graph.inputs(Role.INPUT))
    for node in graph.nodes:
        if not seen.intersection(node.inputs):
            continue
        signature, dim = graph.signature(node), graph.sample_dims.get(node.name)
        read = [one for one, name in zip(signature.inputs, node.inputs) if name in seen]
        apart = dim is not None and signature.by_name[dim].kind is Kind.FREE
        if not apart or not all(_led(one, dim) for one in (*read, *signature.outputs)):
            raise GraphError(
                f"{node.label}: it mixes rows of the first axis, which are calls of cell"
                f" {graph.name!r}; each row must follow from the same row of the operands"
            )
        seen.update(node.outputs)
    for role in (Role.STATE, Role.SCALAR):
        for name in graph.inputs(role):
            raise GraphError(f"cell {graph.name!r}: {role} {name!r} found; a cell has none")
    for name in graph.outputs:
        if name not in seen:
            raise GraphError(f"cell {graph.name!r}: output {name!r} does not depend on an operand")


def _led(operand: Operand, dim: str | None) -> bool:
    """Return whether an operand's first axis runs over a dim, an element for each."""
    axis = operand.axes[0] if operand.axes else None
    if isinstance(axis, Affine):
        return axis.dims == (dim,) and axis.stride == 1 and not axis.overlaps
    return isinstance(axis, Product) and axis.dims[:1] == (dim,)


def parts(forward: Graph) -> Parts:
    """Return the parts of a cell and its gradients; see `Parts`."""
    base = replace(forward, outputs=())
    builder = GraphBuilder(base=base)
    given = forward.inputs(Role.INPUT)
    operands = tuple(i for i, name in enumerate(given) if base.tensors[name].is_float)
    trained = forward.inputs(Role.PARAMETER)
    seeds: dict[str, str] = {}
    for number, output in enumerate(dict.fromkeys(forward.outputs)):
        spec = builder.spec(output)
        if spec.is_float:
            seeds[output] = builder.input(f"seed{number}", spec.shape, spec.dtype)
    wanted = [*(given[i] for i in operands), *trained]
    grads = pulled_back(builder, seeds, wanted)
    whole = builder.build()
    operands = tuple(i for i in operands if given[i] in grads)
    trained = tuple(name for name in trained if name in grads)

    seen, late = set(given), set(seeds.values())  # values of rows; those after the seeds
    for node in whole.nodes:
        if late.intersection(node.inputs):
            late.update(node.outputs)
        if late.intersection(node.inputs) or seen.intersection(node.inputs):
            seen.update(node.outputs)
    towards = [grads[given[i]] for i in operands]
    back = tuple(dict.fromkeys(towards))
    sums = tuple(dict.fromkeys(grads[name] for name in trained))
    first = [node for node in whole.nodes if seen.intersection(node.outputs) - late]
    second = _up_to(whole, back, late)
    third = [node for node in _up_to(whole, sums, late) if node not in second]
    here = {*seeds.values(), *(output for node in second for output in node.outputs)}
    passed = _read(third, sums, here)
    early = (seen - late) | set(given)
    kept = tuple(dict.fromkeys((*_read(second, back, early), *_read(third, sums, early))))
    rows = {name for name in kept + passed if name not in base.roles}
    return Parts(
        _part(whole, first, (*forward.outputs, *(name for name in kept if name in rows))),
        _part(whole, second, (*(grads[given[i]] for i in operands), *passed))
        if back or passed
        else None,
        _part(whole, third, tuple(grads[name] for name in trained)) if sums else None,
        kept,
        operands,
        tuple((seed, forward.outputs.index(output)) for output, seed in seeds.items()),
        passed,
        trained,
    )


def _up_to(graph: Graph, values: Iterable[str], late: set[str]) -> list[Node]:
    """Return the nodes after the seeds that values depend on."""
    wanted, found = set(values), []
    for node in reversed(graph.nodes):
        if wanted.intersection(node.outputs) and late.intersection(node.outputs):
            found.append(node)
            wanted.update(node.inputs)
    return found[::-1]


def _read(nodes: Iterable[Node], results: Iterable[str], of: set[str]) -> tuple[str, ...]:
    """Return which values of some the nodes read, or are results themselves."""
    read = [name for node in nodes for name in node.inputs]
    return tuple(dict.fromkeys(name for name in (*read, *results) if name in of))


def _part(whole: Graph, nodes: Sequence[Node], outputs: tuple[str, ...]) -> Graph:
    """Return a graph of some nodes; what they read and do not make are its inputs.

    What depends on no rows, such as constants, is made anew.
    """
    made = {output for node in nodes for output in node.outputs}
    chosen = {node.name for node in nodes}
    rowless = {}
    seen = set(whole.inputs(Role.INPUT))
    for node in whole.nodes:
        if seen.intersection(node.inputs):
            seen.update(node.outputs)
        else:
            rowless.update(dict.fromkeys(node.outputs, node))
    pending = [name for node in nodes for name in node.inputs] + list(outputs)
    while pending:
        maker = rowless.get(pending.pop())
        if maker is not None and maker.name not in chosen:
            chosen.add(maker.name)
            made.update(maker.outputs)
            pending += maker.inputs
    kept = [node for node in whole.nodes if node.name in chosen]
    read = dict.fromkeys(name for node in kept for name in node.inputs if name not in made)
    read.update(dict.fromkeys(name for name in outputs if name not in made))
    roles = {name: whole.roles.get(name, Role.INPUT) for name in read}
    names = {*read, *(output for node in kept for output in node.outputs)}
    return replace(
        whole,
        nodes=tuple(kept),
        roles=roles,
        tensors={name: spec for name, spec in whole.tensors.items() if name in names},
        outputs=outputs,
        updates={},
        initials={name: first for name, first in whole.initials.items() if name in roles},
    )
