"""Values and descriptions by ONNX Runtime's names: `OrtValue`, `NodeArg`, `ModelMetadata`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from soapstone.frontend.exchange import as_array
from soapstone.frontend.onnx.errors import UnsupportedError
from soapstone.frontend.onnx.file.tensors import ONNX_OF, TYPE_STRINGS, dtype_of
from soapstone.frontend.onnx.texts import described
from soapstone.frontend.onnxruntime.errors import InvalidArgument
from soapstone.ir.tensor import Array
from soapstone.native.memory import address

if TYPE_CHECKING:
    import onnx


@dataclass(frozen=True)
class NodeArg:
    """An input or output of a model.

    Attributes:
        name: of it. type: such as "tensor(float)".
        shape: an extent, a symbolic dim's name, or None where the file says nothing, for each axis.
    """

    name: str
    type: str
    shape: list[int | str | None]

    @staticmethod
    def of(value: onnx.ValueInfoProto, dims: Mapping[str, int]) -> NodeArg:
        """Return what a file declares.

        value: an input or output of it. dims: extents of symbolic dims, by name.
        """
        shape = [
            int(dim.dim_value)
            if dim.HasField("dim_value")
            else dims.get(dim.dim_param, dim.dim_param) or None
            for dim in value.type.tensor_type.shape.dim
        ]
        return NodeArg(value.name, _type(value.type, f"value {value.name!r}"), shape)


def _type(declared: onnx.TypeProto, where: str) -> str:
    """Return a type as ONNX Runtime writes it."""
    kind = declared.WhichOneof("value")
    if kind == "sequence_type":
        return f"seq({_type(declared.sequence_type.elem_type, where)})"
    if kind == "optional_type":
        return f"optional({_type(declared.optional_type.elem_type, where)})"
    if kind == "map_type":
        key = dtype_of(declared.map_type.key_type, where)
        return f"map({key},{_type(declared.map_type.value_type, where)})"
    return TYPE_STRINGS[dtype_of(declared.tensor_type.elem_type, where)]


def labels_of(graph: onnx.GraphProto) -> dict[str, Sequence[Any]]:
    """Return the labels of each output of a graph that is a list of dictionaries, by its name."""
    found = {}
    for node in graph.node:
        if node.op_type == "ZipMap" and node.domain == "ai.onnx.ml":
            for each in node.attribute:
                texts: list[Any] = [bytes(text).decode() for text in each.strings]
                found[str(node.output[0])] = texts or list(map(int, each.ints))
    return {value.name: found[value.name] for value in graph.output if value.name in found}


@dataclass(frozen=True)
class ModelMetadata:
    """What a file says of itself, and of its producer.

    Attributes:
        producer_name, domain, description, graph_name, graph_description, version: "" or 0 where
            the file says nothing. custom_metadata_map: its own entries.
    """

    producer_name: str
    domain: str
    description: str
    graph_name: str
    graph_description: str
    version: int
    custom_metadata_map: Mapping[str, str]


class OrtValue:
    """A tensor in the CPU's memory.

    Args:
        array: its elements, which it shares.
    """

    def __init__(self, array: Array) -> None:
        self._array = array

    @staticmethod
    def ortvalue_from_numpy(
        numpy_obj: Array, device_type: str = "cpu", device_id: int = 0
    ) -> OrtValue:
        """Return a value with an array's elements, shared.

        numpy_obj: the array, or what has `__dlpack__`. device_type: "cpu". device_id: 0.

        Raises:
            InvalidArgument: another device.
        """
        check_device("ortvalue_from_numpy", device_type, device_id)
        return OrtValue(as_array(numpy_obj, "ortvalue_from_numpy"))

    @staticmethod
    def ortvalue_from_shape_and_type(
        shape: Sequence[int], element_type: Any, device_type: str = "cpu", device_id: int = 0
    ) -> OrtValue:
        """Return a value of zeros.

        shape, element_type: of it; a type of NumPy or a number of ONNX's. device_type: "cpu".
        device_id: 0.

        Raises:
            InvalidArgument: another device, or a type that soapstone does not have.
        """
        label = "ortvalue_from_shape_and_type"
        check_device(label, device_type, device_id)
        return OrtValue(np.zeros(tuple(shape), element(label, element_type)))

    @staticmethod
    def from_dlpack(data: Any, *_: Any) -> OrtValue:
        """Return a value with the elements of a tensor of another library, shared.

        data: what has `__dlpack__`.
        """
        return OrtValue(as_array(data, "from_dlpack"))

    def __dlpack__(self, **given: Any) -> Any:
        return self._array.__dlpack__(**given)

    def __dlpack_device__(self) -> tuple[int, int]:
        device = self._array.__dlpack_device__()
        return int(device[0]), int(device[1])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        return np.array(self._array, dtype, copy=copy)

    def numpy(self) -> Array:
        """Return a copy of the elements."""
        return self._array.copy()

    @property
    def array(self) -> Array:
        """The elements themselves."""
        return self._array

    def update_inplace(self, np_arr: Array) -> None:
        """Replace the elements. np_arr: others of the same type and shape.

        Raises:
            InvalidArgument: another type or shape.
        """
        found = np.asarray(np_arr)
        if (found.dtype, found.shape) != (self._array.dtype, self._array.shape):
            needed = f"{self._array.dtype}{list(self._array.shape)}"
            raise InvalidArgument(
                f"update_inplace: {found.dtype}{list(found.shape)} found, {needed} needed"
            )
        np.copyto(self._array, found)

    def shape(self) -> list[int]:
        """Return the extents."""
        return list(self._array.shape)

    def data_type(self) -> str:
        """Return the type, such as "tensor(float)"."""
        return TYPE_STRINGS[described(self._array).dtype]

    def element_type(self) -> int:
        """Return the number of the element type in ONNX."""
        return int(ONNX_OF[described(self._array).dtype])

    def device_name(self) -> str:
        """Return "cpu"."""
        return "cpu"

    def data_ptr(self) -> int:
        """Return the address of the first element; the value must outlive its use."""
        return int(address(self._array))

    def tensor_size_in_bytes(self) -> int:
        """Return how many bytes the elements take."""
        return self._array.nbytes

    def has_value(self) -> bool:
        """Return True."""
        return True

    def is_tensor(self) -> bool:
        """Return whether it is one tensor, not a sequence of tensors, as outputs may be."""
        return isinstance(self._array, np.ndarray)

    def is_sparse_tensor(self) -> bool:
        """Return False."""
        return False

    def is_tensor_sequence(self) -> bool:
        """Return whether it is a list of arrays."""
        return isinstance(self._array, list)


def element(where: str, kind: Any) -> np.dtype[Any]:
    """Return the element type that a type of NumPy or a number of ONNX says.

    Raises:
        InvalidArgument: soapstone has no such type.
    """
    try:
        dtype = np.dtype(dtype_of(kind, where) if isinstance(kind, int) else kind)
    except UnsupportedError as error:
        raise InvalidArgument(str(error)) from error
    except TypeError as error:
        raise InvalidArgument(f"{where}: element type {kind!r} found: {error}") from error
    if dtype.name not in ONNX_OF:
        raise InvalidArgument(f"{where}: type {dtype.name} is not supported")
    return dtype


def check_device(where: str, device_type: str, device_id: int) -> None:
    """Check that a device is the CPU, in whose memory inputs and outputs are.

    Raises:
        InvalidArgument: it is another.
    """
    if (str(device_type).lower(), device_id) != ("cpu", 0):
        found = f"device {device_type!r}, {device_id}"
        raise InvalidArgument(f"{where}: {found} found; 'cpu', 0 needed")
