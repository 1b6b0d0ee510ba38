"""One call of an ONNX operator, as its rule sees it: inputs, attributes, and how to emit nodes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from soapstone.frontend.onnx.declared import read_declared
from soapstone.frontend.onnx.errors import OnnxError, UnboundError, UnsupportedError
from soapstone.frontend.onnx.file.messages import TENSOR, as_onnx, attribute_value
from soapstone.frontend.onnx.file.tensors import array_of
from soapstone.frontend.onnx.texts import TEXT
from soapstone.frontend.onnx.values import Scope, Slot, Value, domain_of
from soapstone.ir.spec import OpSpec, operator_of_onnx
from soapstone.ir.tensor import Array

if TYPE_CHECKING:
    import onnx

    from soapstone.frontend.onnx.build import Importer


class Call:
    """A node with its inputs; calling it emits an operator of soapstone."""

    def __init__(
        self,
        importer: Importer,
        node: onnx.NodeProto,
        inputs: tuple[Slot | None, ...],
        scope: Scope,
        version: int,
    ) -> None:
        self.importer = importer
        self.emitter = importer.emitter
        self.node = node
        self.inputs = inputs
        self.scope = scope
        self.version = version
        self.label = self.emitter.label(node)
        self._read: set[str | int] = set()  # names of attributes, and places of inputs

    @property
    def kind(self) -> str:
        return str(self.node.op_type)

    @property
    def key(self) -> tuple[str, str]:
        """The operator's domain and name."""
        return domain_of(self.node.domain), self.kind

    @property
    def spec(self) -> OpSpec:
        """The operator here whose counterpart this is.

        Raises:
            UnsupportedError: there is none.
        """
        found = operator_of_onnx(self.kind, self.key[0])
        if found is None:
            raise UnsupportedError("this operator is not supported")
        return found

    def declared(self, *inputs: Value, **known: Any) -> Any:
        """Return what the operator's declaration makes of the node (`read_declared`)."""
        return read_declared(self, self.spec, inputs, **known)

    # Inputs

    def __len__(self) -> int:
        return len(self.inputs)

    def has(self, position: int) -> bool:
        """Return whether an optional input is given."""
        self._read.add(position)
        return position < len(self.inputs) and self.inputs[position] is not None

    def value(self, position: int = 0) -> Value:
        """Return an input that must be a tensor.

        Raises:
            OnnxError: it is left out.
        """
        self._read.add(position)
        slot = self.inputs[position] if position < len(self.inputs) else None
        if slot is None:
            raise OnnxError(f"input {position} is missing")
        if not isinstance(slot, Value):
            found = "a sequence" if isinstance(slot, tuple) else slot
            raise OnnxError(f"input {position} is {found}; a tensor needed")
        return slot

    def maybe(self, position: int) -> Value | None:
        """Return an optional input, or None where it is left out."""
        return self.value(position) if self.has(position) else None

    def values(self) -> list[Value]:
        """Return all inputs, of which none may be left out."""
        return [self.value(position) for position in range(len(self.inputs))]

    def wants(self, output: int) -> bool:
        """Return whether an optional output has a name."""
        return output < len(self.node.output) and bool(self.node.output[output])

    def refuse(self, *attributes: str, inputs: Iterable[int] = ()) -> None:
        """Refuse attributes that are not 0 or empty, and inputs that are given.

        Raises:
            UnsupportedError: one of them is; names it.
        """
        for name in attributes:
            if self.attribute(name, 0):
                raise UnsupportedError(f"attribute {name!r} is not supported")
        for position in inputs:
            if self.has(position):
                raise UnsupportedError(f"input {position} is not supported")

    def check_read(self) -> None:
        """Check that the rule looked at every input and attribute that the node has.

        Raises:
            UnsupportedError: it did not at one, which would be ignored.
        """
        for name in self.attributes:
            if name not in self._read:
                raise UnsupportedError(f"attribute {name!r} is not supported")
        for position, slot in enumerate(self.inputs):
            if slot is not None and position not in self._read:
                raise UnsupportedError(f"input {position} is not supported")

    def array(self, value: Value | int, *, apart: bool = False) -> Array:
        """Return the contents of a value that must be known while the graph is built.

        apart: whether the operator is one to run between graphs where they are not, since they are
        data rather than a shape.

        Raises:
            UnboundError: they come from the graph's inputs; names those.
        """
        value = self.value(value) if isinstance(value, int) else value
        if value.array is not None:
            if value.lasting is None:
                self.importer.uneven()
            return value.array
        raise self.emitter.unknown(value, apart=apart or value.is_text)

    def generator(self) -> np.random.RandomState:
        """Return the node's random numbers, which a session keeps from run to run.

        Raises:
            UnboundError: a graph is built, whose runs would all have the same ones.
        """
        kept = self.importer.generators
        if kept is None:
            raise UnboundError(
                "random numbers are drawn anew in each run, and no graph does (an InferenceSession"
                " runs such a model in pieces)",
                apart=True,
                value=self.label,
            )
        key = (self.scope.prefix, *self.node.output)
        if key not in kept:
            seed = self.attribute("seed")
            drawn = seed is None or np.isnan(seed)
            kept[key] = np.random.RandomState(None if drawn else int(seed) & 0xFFFF_FFFF)
        return kept[key]

    def ints(self, name: str, position: int | None = None) -> tuple[int, ...] | None:
        """Return integers given as an input (newer opsets) or an attribute (older ones), or None.

        Raises:
            OnnxError: the input is no list of integers.
        """
        if position is not None and self.has(position):
            array = self.array(position)
            if array.ndim > 1 or array.dtype.kind not in "iu":
                raise OnnxError(f"input {position} is {array.dtype}{array.shape}; integers needed")
            return tuple(int(item) for item in array.reshape(-1))
        found = self.attribute(name, None)
        if found is None:
            return None
        return tuple(found) if isinstance(found, list | tuple) else (int(found),)

    def number(self, name: str, position: int, default: float | None = None) -> float | None:
        """Return a number given as an input (newer opsets) or an attribute (older ones)."""
        if self.has(position):
            array = self.array(position)
            if array.size != 1:
                raise OnnxError(f"input {position} has shape {array.shape}; one number needed")
            item = array.reshape(()).item()
            return item if isinstance(item, int) else float(item)
        found = self.attribute(name, default)
        return None if found is None else float(found)

    # Attributes

    @cached_property
    def attributes(self) -> dict[str, onnx.AttributeProto]:
        """The node's attributes, those of the function around it put in their places."""
        result = {}
        for attribute in self.node.attribute:
            if attribute.name in result:
                raise OnnxError(f"attribute {attribute.name!r} exists twice")
            if attribute.ref_attr_name:
                given = self.scope.attributes.get(attribute.ref_attr_name)
                if given is None:
                    continue
                copy = type(given)()
                copy.CopyFrom(given)
                copy.name = attribute.name
                result[attribute.name] = copy
            else:
                result[attribute.name] = attribute
        return result

    def bound(self) -> onnx.NodeProto:
        """Return the node with the attributes of the function around it put in their places."""
        from onnx import AttributeProto, NodeProto

        copy = as_onnx(self.node, NodeProto())
        del copy.attribute[:]
        copy.attribute.extend(as_onnx(a, AttributeProto()) for a in self.attributes.values())
        return copy

    def attribute(self, name: str, default: Any = None) -> Any:
        """Return an attribute as Python data: text, a number, an array, or lists of those."""
        self._read.add(name)
        found = self.attributes.get(name)
        if found is None:
            return default
        try:
            value = attribute_value(found)
            if isinstance(value, bytes):
                return value.decode()
            if found.type == TENSOR:
                return array_of(value)
            if isinstance(value, list) and value and isinstance(value[0], bytes):
                return tuple(item.decode() for item in value)
        except (UnicodeDecodeError, ValueError) as error:
            if isinstance(error, OnnxError):
                raise
            raise OnnxError(f"attribute {name!r} cannot be read") from None
        return tuple(value) if isinstance(value, list) else value

    def text(self, name: str, default: str, choices: Sequence[str]) -> str:
        """Return an attribute that names a choice.

        Raises:
            UnsupportedError: another one.
        """
        found = self.attribute(name, default)
        if found not in choices:
            raise UnsupportedError(
                f"attribute {name!r} is {found!r}; {', '.join(choices)} are supported"
            )
        return str(found)

    def axis(self, rank: int, default: int = 0, *, most: int | None = None) -> int:
        """Return attribute `axis` counted from the front.

        Raises:
            OnnxError: there is no such axis.
        """
        return self.axis_of(self.attribute("axis", default), rank, most)

    def axis_of(self, axis: int, rank: int, most: int | None = None) -> int:
        """Return an axis counted from the front."""
        highest = rank - 1 if most is None else most
        if not -rank <= axis <= highest:
            raise OnnxError(f"axis {axis} found, {-rank} to {highest} needed")
        return int(axis) + rank if axis < 0 else int(axis)

    def axes_of(self, axes: Sequence[int], rank: int) -> tuple[int, ...]:
        """Return axes counted from the front, in order.

        Raises:
            OnnxError: one does not exist, or stands twice.
        """
        result = sorted(self.axis_of(axis, rank) for axis in axes)
        if len(set(result)) != len(result):
            raise OnnxError(f"axes {tuple(axes)} found; each at most once needed")
        return tuple(result)

    # Results

    def __call__(self, operator_name: str, *inputs: Value, **attributes: Any) -> Value:
        """Emit an operator and return its first output."""
        return self.all(operator_name, *inputs, **attributes)[0]

    def all(self, operator_name: str, *inputs: Value, **attributes: Any) -> tuple[Value, ...]:
        """Emit an operator and return all its outputs."""
        return self.emitter.emit(operator_name, inputs, attributes, self.label)

    def kept(self, operator_name: str, *inputs: Value, **attributes: Any) -> Value:
        """Emit an operator that is a node of the graph even where its inputs are known."""
        return self.emitter.emit(operator_name, inputs, attributes, self.label, fold=False)[0]

    def known(self, array: Any, dtype: str | None = None) -> Value:
        """Return a value whose contents are known."""
        return self.emitter.known(array, self.label, dtype)

    def room(self, elements: int) -> int:
        """Return a number of elements of 8 bytes, once they are known to be few enough to fold.

        Raises:
            OnnxError: they are not.
        """
        return self.emitter.room(elements, self.label)

    def once(self, make: Callable[..., Value], *key: Any) -> Value:
        """Return make(self, *key), made once for all nodes with the same key: values and numbers.

        make: a function with a name of its own, which looks at nothing else of the node.
        """
        return self.emitter.once((make, *key), lambda: make(self, *key))

    def like(self, number: float, x: Value) -> Value:
        """Return a known scalar of the type of x."""
        return self.known(np.asarray(number), x.dtype)

    def reshape(self, x: Value, shape: Sequence[int]) -> Value:
        """Return x in another shape, or x itself."""
        return x if x.shape == tuple(shape) else self("reshape", x, shape=tuple(shape))

    def transpose(self, x: Value, permutation: Sequence[int]) -> Value:
        """Return x with its axes in another order, or x itself."""
        if tuple(permutation) == tuple(range(x.rank)):
            return x
        return self("transpose", x, permutation=tuple(permutation))

    def part(self, x: Value, axis: int, start: int, stop: int) -> Value:
        """Return x from `start` to `stop` along an axis, both counted from 0."""
        starts, stops = [0] * x.rank, list(x.shape)
        starts[axis], stops[axis] = start, stop
        return self("slice", x, starts=starts, stops=stops, steps=(1,) * x.rank)

    def row(self, x: Value, axis: int, place: int) -> Value:
        """Return x at a place of an axis, without that axis."""
        made = self.part(x, axis, place, place + 1)
        return self.reshape(made, (*x.shape[:axis], *x.shape[axis + 1 :]))

    def broadcast(self, x: Value, shape: Sequence[int]) -> Value:
        """Return x repeated to a shape, or x itself."""
        return x if x.shape == tuple(shape) else self("broadcast", x, shape=tuple(shape))

    def cast(self, x: Value, dtype: str) -> Value:
        """Return x in another element type, or x itself."""
        if x.is_text != (dtype == TEXT):
            raise OnnxError(f"{x.spec} found, {dtype} needed")
        return x if x.dtype == dtype else self("cast", x, to=dtype)
