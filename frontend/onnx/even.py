"""Whether extents of inputs matter to a graph as extents alone: what importing two graphs tells.

Numbers that are made of extents (`Shape` and sums, parts and multiples of it) are linear in each
extent. They may say shapes. Where anything else is done with one, its contents are noted: that two
graphs for different extents have noted the same shows that these were constants in both, hence for
all extents. Operators whose translation may go by other thresholds of extents make a graph uneven.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from soapstone.frontend.onnx.values import Slot, Value

if TYPE_CHECKING:
    import onnx

Note = tuple[str, ...]  # what was noted of a node
UNEVEN: Note = ("uneven",)

# Of a first operand that is made of extents these make the same numbers, in another order or shape.
_MOVES = {"Gather", "Slice", "Squeeze", "Unsqueeze", "Reshape", "Identity", "Transpose", "Flatten"}
_SUMS = {"Concat", "Add", "Sub"}
# The operand that may be made of extents, since it is a shape or where a constant is cut.
_SHAPES = {"Reshape": 1, "Expand": 1, "ConstantOfShape": 0, "Range": 1, "Slice": 2}
# Whose translation depends on extents in no way but by shapes, given what `_even` asks.
_UNIFORM = """
Abs Acos Acosh Add And Asin Asinh Atan Atanh Cast CastLike Ceil Celu Clip Cos Cosh Div Elu Equal
Erf Exp Floor Gelu Greater GreaterOrEqual HardSigmoid HardSwish IsInf IsNaN LeakyRelu Less
LessOrEqual Log Max Mean Min Mish Mod Mul Neg Not Or PRelu Pow Reciprocal Relu Round Selu Sigmoid
Sign Sin Sinh Softplus Softsign Sqrt Sub Sum Tan Tanh ThresholdedRelu Where Xor MatMul Gemm Conv
ConvTranspose MatMulInteger QLinearMatMul QLinearConv ConvInteger QuantizeLinear DequantizeLinear
DynamicQuantizeLinear MaxPool AveragePool GlobalAveragePool GlobalMaxPool BatchNormalization
InstanceNormalization LayerNormalization GroupNormalization RMSNormalization Softmax LogSoftmax
Dropout ReduceMean ReduceSum ReduceMax ReduceMin ReduceL1 ReduceL2 ReduceSumSquare ReduceLogSumExp
ArgMax ArgMin LSTM GRU RNN Reshape Transpose Flatten Squeeze Unsqueeze Concat Split Slice Gather
GatherElements Expand Pad Identity Shape Constant ConstantOfShape Range
"""
_EVEN = frozenset(_UNIFORM.split())


def followed(
    node: onnx.NodeProto, inputs: Sequence[Slot | None], results: Sequence[Slot | None]
) -> tuple[Sequence[Slot | None], Note | None]:
    """Return a node's results, those made of extents marked so, and what is to be noted, if any.

    node: of the standard operators.
    """
    kind = node.op_type
    if kind == "Shape":
        return [replace(each, told=True) for each in results if isinstance(each, Value)], None
    told = [
        at for at, each in enumerate(inputs) if each is not None and getattr(each, "told", False)
    ]
    made = [each for each in results if not isinstance(each, Value) or each.array is None]
    if not told:
        return results, None if not made else _even(node, inputs)
    known = all(each is None or _number(each) for each in inputs)
    linear = (
        (kind in _MOVES and told == [0])
        or kind in _SUMS
        or (kind == "Mul" and len(told) == 1)
        or (kind == "Cast" and told == [0])
    )
    if linear and known and not made and all(map(_number, results)):
        return [replace(each, told=True) for each in results if isinstance(each, Value)], None
    if told == [_SHAPES.get(kind)] and (kind != "Slice" or _constant(inputs[0])):
        return results, None if not made else _even(node, inputs)
    if made and _even(node, inputs) is not None:
        return results, UNEVEN
    contents = [inputs[at] for at in told]
    arrays = [each.array for each in contents if isinstance(each, Value)]
    return results, (kind, *(array.tobytes().hex() for array in arrays if array is not None))


def _number(slot: Slot | None) -> bool:
    """Return whether a value is known integers."""
    return isinstance(slot, Value) and slot.array is not None and slot.array.dtype.kind in "iu"


def _constant(slot: Slot | None) -> bool:
    return isinstance(slot, Value) and slot.array is not None


def _even(node: onnx.NodeProto, inputs: Sequence[Slot | None]) -> Note | None:
    """Return None where a node's translation depends on extents by shapes alone, else a note."""
    kind = node.op_type
    if kind not in _EVEN or node.domain not in ("", "ai.onnx"):
        return UNEVEN
    data = inputs[0] if inputs else None
    for each in node.attribute:
        padded = each.name == "auto_pad" and each.s not in (b"NOTSET", b"VALID", b"")
        if padded or (each.name == "ceil_mode" and each.i) or each.name == "output_shape":
            # what is padded goes by the extents of what windows move over
            return (kind, *map(str, data.shape[2:])) if isinstance(data, Value) else UNEVEN
    if kind == "MaxPool" and len([name for name in node.output if name]) > 1:
        return UNEVEN
    if kind == "Slice" and isinstance(data, Value) and data.array is None:
        axes = inputs[3] if len(inputs) > 3 else None
        if not isinstance(axes, Value) or axes.array is None:
            return UNEVEN
        return (kind, *(str(data.shape[axis]) for axis in axes.array.tolist()))
    return None


__all__ = ["UNEVEN", "Note", "followed"]
