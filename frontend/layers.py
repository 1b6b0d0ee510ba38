"""The layer API: each method records one layer under a name and returns its tensor."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from soapstone.ir.errors import GraphError, ShapeError
from soapstone.ir.graph import GraphBuilder, Initial
from soapstone.ir.tensor import Role

if TYPE_CHECKING:
    from soapstone.frontend.model import Emit, Tensor

Pair = int | tuple[int, int]
Padding = int | tuple[int, ...] | str
Parameters = dict[str, tuple[tuple[int, ...], Initial]]  # shape and first contents, by name


def pair(name: str, value: Pair) -> tuple[int, int]:
    """Return (height, width) from one number or two.

    Raises:
        GraphError: anything else; names the argument.
    """
    result = (value, value) if isinstance(value, int) else tuple(value)
    if len(result) != 2 or not all(isinstance(v, int) and not isinstance(v, bool) for v in result):
        raise GraphError(f"{name}: {value!r} found, one integer or two needed")
    return result[0], result[1]


def pads(value: Padding, kernel: tuple[int, int], dilation: tuple[int, int]) -> tuple[int, ...]:
    """Return (top, left, bottom, right); `"same"` keeps the extent at stride 1.

    Raises:
        GraphError: not "same", "valid", one, two or four integers.
    """
    if value == "same":
        total = [(k - 1) * d for k, d in zip(kernel, dilation)]
        return (*(t // 2 for t in total), *(t - t // 2 for t in total))
    if value == "valid":
        return (0, 0, 0, 0)
    if isinstance(value, int):
        return (value,) * 4
    if isinstance(value, tuple | list) and len(value) == 2:
        return (*value, *value)
    if isinstance(value, tuple | list) and len(value) == 4:
        return tuple(value)
    raise GraphError(f'padding: {value!r} found; "same", "valid", 1, 2 or 4 integers needed')


class Layers:
    """The layers of a model; `record` and the builder are the model's."""

    _builder: GraphBuilder
    record: Callable[[Emit, Sequence[Tensor]], tuple[Tensor, ...]]

    def _name(self, kind: str, name: str | None) -> str:
        if name is not None:
            if name in {node.name for node in self._builder.nodes}:
                raise GraphError(f"{kind} {name!r}: the name is taken")
            return name
        return self._builder.unique(kind)

    def apply(
        self, operator: str, *inputs: Tensor, name: str | None = None, **attributes: Any
    ) -> Tensor:
        """Record any declared operator of one output (`soapstone ops` lists them)."""
        return self.apply_all(operator, *inputs, name=name, **attributes)[0]

    def apply_all(
        self, operator: str, *inputs: Tensor, name: str | None = None, **attributes: Any
    ) -> tuple[Tensor, ...]:
        """Record any declared operator and return all its outputs."""
        node = self._name(operator, name)

        def emit(builder: GraphBuilder, training: bool, values: tuple[str, ...]) -> tuple[str, ...]:
            return builder.apply(operator, *values, name=node, **attributes)

        return self.record(emit, inputs)

    def _layer(
        self,
        operator: str,
        x: Tensor,
        parameters: Parameters,
        node: str,
        **attributes: Any,
    ) -> Tensor:
        """Record an operator of x and of new parameters named after the layer."""

        def emit(builder: GraphBuilder, training: bool, values: tuple[str, ...]) -> tuple[str, ...]:
            names = [
                builder.input(f"{node}.{name}", shape, "float32", Role.PARAMETER, initial)
                for name, (shape, initial) in parameters.items()
            ]
            return builder.apply(operator, *values, *names, name=node, **attributes)

        return self.record(emit, (x,))[0]

    # Layers with parameters

    def dense(
        self,
        x: Tensor,
        width: int,
        *,
        activation: str | None = None,
        bias: bool = True,
        name: str | None = None,
    ) -> Tensor:
        """Return activation(x w + b). x: (n, …, k); result: (n, …, width)."""
        node = self._name("dense", name)
        if not x.shape or width < 1:
            raise ShapeError(
                f"dense {node!r}: width {width} and x {x.spec} found; 1 or more needed"
            )
        k = x.shape[-1]
        bound = 1 / math.sqrt(max(k, 1))
        parameters: Parameters = {"weight": ((k, width), Initial("uniform", bound))}
        if bias:
            parameters["bias"] = ((width,), Initial("uniform", bound))
        return self._layer("linear", x, parameters, node, bias=bias, activation=activation)

    def conv2d(
        self,
        x: Tensor,
        channels: int,
        *,
        kernel: Pair,
        stride: Pair = 1,
        padding: Padding = 0,
        dilation: Pair = 1,
        groups: int = 1,
        activation: str | None = None,
        bias: bool = True,
        name: str | None = None,
    ) -> Tensor:
        """Return the 2-D convolution. x: (n, c, h, w); result: (n, channels, h', w')."""
        node = self._name("conv2d", name)
        label = f"conv2d {node!r}"
        if len(x.shape) != 4:
            raise ShapeError(
                f"{label}: x has rank {len(x.shape)} (shape {x.shape}); n c h w needed"
            )
        if groups < 1 or x.shape[1] % groups or channels < 1 or channels % groups:
            raise ShapeError(
                f"{label}: {x.shape[1]} input and {channels} output channels found;"
                f" multiples of groups {groups} needed"
            )
        kh, kw = pair("kernel", kernel)
        per_group = x.shape[1] // groups
        bound = 1 / math.sqrt(max(per_group * kh * kw, 1))
        shape = (channels, per_group, kh, kw)
        parameters: Parameters = {"weight": (shape, Initial("uniform", bound))}
        if bias:
            parameters["bias"] = ((channels,), Initial("uniform", bound))
        steps = pair("dilation", dilation)
        return self._layer(
            "conv2d",
            x,
            parameters,
            node,
            stride=pair("stride", stride),
            padding=pads(padding, (kh, kw), steps),
            dilation=steps,
            groups=groups,
            bias=bias,
            activation=activation,
        )

    def batch_norm(
        self, x: Tensor, *, epsilon: float = 1e-5, momentum: float = 0.1, name: str | None = None
    ) -> Tensor:
        """Return x normalised over samples and positions, by channel. x: (n, c, …).

        Training uses batch statistics and updates the running ones; inference uses those.
        """
        node = self._name("batch_norm", name)
        if len(x.shape) < 2:
            raise ShapeError(f"batch_norm {node!r}: x has shape {x.shape}; n c … needed")
        shape = (x.shape[1],)

        def emit(builder: GraphBuilder, training: bool, values: tuple[str, ...]) -> tuple[str, ...]:
            gamma = builder.input(
                f"{node}.gamma", shape, role=Role.PARAMETER, initial=Initial("constant", 1.0)
            )
            beta = builder.input(f"{node}.beta", shape, role=Role.PARAMETER, initial=Initial())
            mean = builder.input(f"{node}.mean", shape, role=Role.STATE, initial=Initial())
            variance = builder.input(
                f"{node}.variance", shape, role=Role.STATE, initial=Initial("constant", 1.0)
            )
            operands = (*values, gamma, beta, mean, variance)
            if not training:
                return builder.apply("batch_norm_inference", *operands, name=node, epsilon=epsilon)
            made = builder.apply(
                "batch_norm", *operands, name=node, epsilon=epsilon, momentum=momentum
            )
            builder.update(mean, made[1])
            builder.update(variance, made[2])
            return made[:1]

        return self.record(emit, (x,))[0]

    def layer_norm(self, x: Tensor, *, epsilon: float = 1e-5, name: str | None = None) -> Tensor:
        """Return x normalised over its last axis. x: (…, c)."""
        node = self._name("layer_norm", name)
        if not x.shape:
            raise ShapeError(f"layer_norm {node!r}: x is a scalar; one axis or more needed")
        shape = (x.shape[-1],)

        def emit(builder: GraphBuilder, training: bool, values: tuple[str, ...]) -> tuple[str, ...]:
            gamma = builder.input(
                f"{node}.gamma", shape, role=Role.PARAMETER, initial=Initial("constant", 1.0)
            )
            beta = builder.input(f"{node}.beta", shape, role=Role.PARAMETER, initial=Initial())
            return builder.apply("layer_norm", *values, gamma, beta, name=node, epsilon=epsilon)[:1]

        return self.record(emit, (x,))[0]

    def embedding(self, ids: Tensor, rows: int, width: int, *, name: str | None = None) -> Tensor:
        """Return rows of a table. ids: (n, …) integers below `rows`; result: (n, …, width)."""
        node = self._name("embedding", name)
        initial = Initial("normal", 1.0)
        if rows < 1 or width < 1:
            raise ShapeError(f"embedding {node!r}: table ({rows}, {width}) found; 1 or more needed")
        return self._layer("embedding", ids, {"table": ((rows, width), initial)}, node)

    # Layers without parameters

    def dropout(self, x: Tensor, rate: float = 0.5, *, name: str | None = None) -> Tensor:
        """Return x with elements dropped when training; x itself otherwise.

        Which elements are dropped depends on the model's seed, the layer's place, the step and the
        element's index, and on nothing else.
        """
        node = self._name("dropout", name)
        if not 0 <= rate < 1:
            raise GraphError(f"dropout {node!r}: rate {rate!r} found, 0 <= rate < 1 needed")
        from soapstone.frontend.optimizers import STEP

        def emit(builder: GraphBuilder, training: bool, values: tuple[str, ...]) -> tuple[str, ...]:
            if not training or rate == 0:
                return values
            step = declare_scalar(builder, STEP, "int64")
            seed = layer_seed(self.seed, node)
            return builder.apply("dropout", *values, step, name=node, rate=rate, seed=seed)

        return self.record(emit, (x,))[0]

    seed: int

    def max_pool2d(
        self,
        x: Tensor,
        kernel: Pair,
        *,
        stride: Pair | None = None,
        padding: Padding = 0,
        name: str | None = None,
    ) -> Tensor:
        """Return the maximum over windows; the stride defaults to the kernel. x: (n, c, h, w)."""
        node = self._name("max_pool2d", name)
        window = pair("kernel", kernel)
        step = window if stride is None else pair("stride", stride)
        border = pads(padding, window, (1, 1))

        def emit(builder: GraphBuilder, training: bool, values: tuple[str, ...]) -> tuple[str, ...]:
            return builder.apply(
                "max_pool2d",
                *values,
                name=node,
                kernel=window,
                stride=step,
                padding=border,
                indices=training,
            )[:1]

        return self.record(emit, (x,))[0]

    def avg_pool2d(
        self,
        x: Tensor,
        kernel: Pair,
        *,
        stride: Pair | None = None,
        padding: Padding = 0,
        include_pad: bool = True,
        name: str | None = None,
    ) -> Tensor:
        """Return the mean over windows; the stride defaults to the kernel. x: (n, c, h, w)."""
        window = pair("kernel", kernel)
        return self.apply(
            "avg_pool2d",
            x,
            name=name,
            kernel=window,
            stride=window if stride is None else pair("stride", stride),
            padding=pads(padding, window, (1, 1)),
            include_pad=include_pad,
        )

    def global_avg_pool(self, x: Tensor, *, name: str | None = None) -> Tensor:
        """Return the mean over positions. x: (n, c, …); result: (n, c)."""
        return self.reduce_mean(x, tuple(range(2, len(x.shape))), name=name)

    def global_max_pool(self, x: Tensor, *, name: str | None = None) -> Tensor:
        """Return the maximum over positions. x: (n, c, …); result: (n, c)."""
        return self.reduce_max(x, tuple(range(2, len(x.shape))), name=name)

    def flatten(self, x: Tensor, *, name: str | None = None) -> Tensor:
        """Return x as (n, everything else)."""
        return self.reshape(x, (-1, math.prod(x.shape[1:])), name=name)

    def reshape(self, x: Tensor, shape: Sequence[int], *, name: str | None = None) -> Tensor:
        """Return x in another shape; one extent may be -1, and is the batch if the first is."""
        node = self._name("reshape", name)
        target = tuple(int(extent) for extent in shape)
        if target.count(-1) > 1:
            raise ShapeError(f"reshape {node!r}: shape {target} has several -1; at most one needed")
        if -1 not in target and target and target[0] == x.shape[0]:
            target = (-1, *target[1:])  # follows the batch size of other bound shapes

        def emit(builder: GraphBuilder, training: bool, values: tuple[str, ...]) -> tuple[str, ...]:
            size = builder.spec(values[0]).size
            rest = math.prod(extent for extent in target if extent != -1)
            known = tuple(size // rest if e == -1 and rest else max(e, 0) for e in target)
            return builder.apply("reshape", *values, name=node, shape=known)

        return self.record(emit, (x,))[0]

    def softmax(self, x: Tensor, *, axis: int = -1, name: str | None = None) -> Tensor:
        """Return exp(x) over its sum along an axis."""
        return self.apply("softmax", x, name=name, axis=self._axis("softmax", x, axis))

    def log_softmax(self, x: Tensor, *, axis: int = -1, name: str | None = None) -> Tensor:
        """Return x less the logarithm of the sum of exp(x) along an axis."""
        return self.apply("log_softmax", x, name=name, axis=self._axis("log_softmax", x, axis))

    def transpose(
        self, x: Tensor, permutation: Sequence[int], *, name: str | None = None
    ) -> Tensor:
        """Return x with its axes permuted."""
        return self.apply("transpose", x, name=name, permutation=tuple(permutation))

    def concat(
        self, tensors: Sequence[Tensor], axis: int = 1, *, name: str | None = None
    ) -> Tensor:
        """Return tensors joined along an axis."""
        if not tensors:
            raise GraphError("concat: no tensors found, 1 or more needed")
        where = self._axis("concat", tensors[0], axis)
        return self.apply("concat", *tensors, name=name, axis=where)

    def split(
        self, x: Tensor, sizes: Sequence[int], axis: int = 1, *, name: str | None = None
    ) -> tuple[Tensor, ...]:
        """Return x cut along an axis into pieces of the given sizes."""
        where = self._axis("split", x, axis)
        return self.apply_all("split", x, name=name, axis=where, sizes=tuple(sizes))

    def slice(
        self,
        x: Tensor,
        axis: int,
        start: int,
        stop: int,
        step: int = 1,
        *,
        name: str | None = None,
    ) -> Tensor:
        """Return x[start:stop:step] along one axis other than the batch."""
        where = self._axis("slice", x, axis)
        if where == 0:
            raise GraphError("slice: axis 0 runs over samples and is not sliced")
        node = self._name("slice", name)

        def emit(builder: GraphBuilder, training: bool, values: tuple[str, ...]) -> tuple[str, ...]:
            shape = builder.spec(values[0]).shape
            starts = tuple(start if i == where else 0 for i in range(len(shape)))
            stops = tuple(stop if i == where else extent for i, extent in enumerate(shape))
            steps = tuple(step if i == where else 1 for i in range(len(shape)))
            return builder.apply(
                "slice", *values, name=node, starts=starts, stops=stops, steps=steps
            )

        return self.record(emit, (x,))[0]

    def pad(
        self,
        x: Tensor,
        low: Sequence[int],
        high: Sequence[int],
        value: float = 0.0,
        *,
        name: str | None = None,
    ) -> Tensor:
        """Return x with a border of `value`: `low` before and `high` after each axis."""
        low, high = tuple(low), tuple(high)
        interior = (0,) * len(low)
        return self.apply("pad", x, name=name, low=low, high=high, interior=interior, value=value)

    def _axis(self, layer: str, x: Tensor, axis: int) -> int:
        rank = len(x.shape)
        if not -rank <= axis < rank:
            raise ShapeError(
                f"{layer}: axis {axis} found, {-rank} to {rank - 1} needed for {x.spec}"
            )
        return axis % rank

    def _reduce(
        self, operator: str, x: Tensor, axes: int | Sequence[int], keepdims: bool, name: str | None
    ) -> Tensor:
        given = (axes,) if isinstance(axes, int) else tuple(axes)
        where = tuple(self._axis(operator, x, axis) for axis in given)
        return self.apply(operator, x, name=name, axes=where, keepdims=keepdims)

    def reduce_sum(
        self,
        x: Tensor,
        axes: int | Sequence[int],
        *,
        keepdims: bool = False,
        name: str | None = None,
    ) -> Tensor:
        """Return the sum over axes."""
        return self._reduce("reduce_sum", x, axes, keepdims, name)

    def reduce_mean(
        self,
        x: Tensor,
        axes: int | Sequence[int],
        *,
        keepdims: bool = False,
        name: str | None = None,
    ) -> Tensor:
        """Return the mean over axes."""
        return self._reduce("reduce_mean", x, axes, keepdims, name)

    def reduce_max(
        self,
        x: Tensor,
        axes: int | Sequence[int],
        *,
        keepdims: bool = False,
        name: str | None = None,
    ) -> Tensor:
        """Return the maximum over axes."""
        return self._reduce("reduce_max", x, axes, keepdims, name)

    # Element-wise

    def add(self, x: Tensor, y: Tensor, *, name: str | None = None) -> Tensor:
        """Return x + y, broadcasting as NumPy does."""
        return self.apply("add", x, y, name=name)

    def sub(self, x: Tensor, y: Tensor, *, name: str | None = None) -> Tensor:
        """Return x - y, broadcasting as NumPy does."""
        return self.apply("sub", x, y, name=name)

    def mul(self, x: Tensor, y: Tensor, *, name: str | None = None) -> Tensor:
        """Return x * y, broadcasting as NumPy does."""
        return self.apply("mul", x, y, name=name)

    def div(self, x: Tensor, y: Tensor, *, name: str | None = None) -> Tensor:
        """Return x / y, broadcasting as NumPy does."""
        return self.apply("div", x, y, name=name)

    def matmul(self, x: Tensor, y: Tensor, *, name: str | None = None) -> Tensor:
        """Return the matrix product over the last two axes. x: (…, m, k), y: (…, k, n)."""
        return self.apply("matmul", x, y, name=name)

    def affine(
        self, x: Tensor, scale: float = 1.0, shift: float = 0.0, *, name: str | None = None
    ) -> Tensor:
        """Return x * scale + shift for two numbers."""
        return self.apply("affine", x, name=name, scale=scale, shift=shift)

    def power(self, x: Tensor, exponent: float, *, name: str | None = None) -> Tensor:
        """Return x to a constant power."""
        return self.apply("power", x, name=name, exponent=exponent)

    def relu(self, x: Tensor, *, name: str | None = None) -> Tensor:
        """Return max(x, 0)."""
        return self.apply("relu", x, name=name)

    def leaky_relu(self, x: Tensor, alpha: float = 0.01, *, name: str | None = None) -> Tensor:
        """Return x where positive, alpha x elsewhere."""
        return self.apply("leaky_relu", x, name=name, alpha=alpha)

    def gelu(self, x: Tensor, approximate: str = "none", *, name: str | None = None) -> Tensor:
        """Return x times the normal distribution function of x."""
        return self.apply("gelu", x, name=name, approximate=approximate)

    def sigmoid(self, x: Tensor, *, name: str | None = None) -> Tensor:
        """Return 1 / (1 + exp(-x))."""
        return self.apply("sigmoid", x, name=name)

    def tanh(self, x: Tensor, *, name: str | None = None) -> Tensor:
        """Return the hyperbolic tangent."""
        return self.apply("tanh", x, name=name)

    def exp(self, x: Tensor, *, name: str | None = None) -> Tensor:
        """Return e to the power x."""
        return self.apply("exp", x, name=name)

    def log(self, x: Tensor, *, name: str | None = None) -> Tensor:
        """Return the natural logarithm."""
        return self.apply("log", x, name=name)

    def sqrt(self, x: Tensor, *, name: str | None = None) -> Tensor:
        """Return the square root."""
        return self.apply("sqrt", x, name=name)

    def neg(self, x: Tensor, *, name: str | None = None) -> Tensor:
        """Return -x."""
        return self.apply("neg", x, name=name)


def declare_scalar(builder: GraphBuilder, name: str, dtype: str) -> str:
    """Return a scalar input of the host, declaring it the first time."""
    if not builder.has(name):
        builder.input(name, (), dtype, Role.SCALAR)
    return name


def layer_seed(seed: int, node: str) -> int:
    """Return a layer's own seed, from the model's seed and the layer's name."""
    import hashlib

    digest = hashlib.sha256(f"{seed}:{node}".encode()).digest()
    return int.from_bytes(digest[:4], "little")
