"""Connectionist temporal classification: a block has a sample, its threads the states of a step.

Sums are of logarithms in double precision, as the reference's. Each class's share of a step is
added by one thread, in the order of the states; the blank's, of which there is one state in two, by
the block.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from soapstone.kernels.cuda.elementwise.text import Text, Value
from soapstone.kernels.cuda.entry import DeviceEntry, Launch
from soapstone.kernels.cuda.normalization.rowwise import rowwise
from soapstone.kernels.cuda.normalization.softmax import largest, powers
from soapstone.kernels.cuda.substrate.arrays import room, views, zeros
from soapstone.kernels.cuda.substrate.element import parameters, place
from soapstone.kernels.cuda.substrate.folds import MOST, folds
from soapstone.kernels.cuda.substrate.grid import rounded
from soapstone.kernels.cuda.substrate.target import SIMULATED, WARP, Kernel, built, device, exp, log
from soapstone.kernels.entry import Call
from soapstone.kernels.registry import variant

Values = Sequence[Value]
_LABEL = 1  # the status of a label that is no class
_LEAST = float("-inf")


@device
def plus(a: Any, b: Any, c: Any) -> Any:
    """Return the logarithm of exp(a) + exp(b) + exp(c)."""
    top = max(a, b, c)
    if top == _LEAST:
        return top
    return top + log(exp(a - top) + exp(b - top) + exp(c - top))


@cache
def compiled(source: str) -> Kernel:
    """Return the kernel `ctc` of a source text."""
    return built("ctc", source, SCRATCH=MOST if SIMULATED else WARP, plus=plus, **folds(False))


def _of(name: str, *at: str) -> str:
    """Return the text of an element of the block's sample."""
    return f"{name}[{place(name, ['n', *at])}]"


def _states(body: Sequence[str]) -> list[str]:
    """Return the loop of a thread over its states s."""
    loop = ["s = thread", "while s < states:"]
    return [*loop, *("    " + line for line in (*body, "s += cuda.blockDim.x"))]


def _classes(made: str) -> list[str]:
    """Return the loop of a thread over its classes c, whose gradient in step t is `made`."""
    body = [f"{_of('slopes', 't', 'c')} = {made}", "c += cuda.blockDim.x"]
    return ["c = thread", "while c < classes:", *("    " + line for line in body)]


def _logarithm(label: str) -> str:
    """Return the text of the logarithm of a class's probability in step t."""
    return f"float64({_of('x', 't', label)}) - {_of('sums', 't')}"


def _sums(to: str, far: str, sign: str) -> list[str]:
    """Return the statements that make `{to}` of a neighbouring step's sums, of up to three states.

    far: their row. sign: towards lower states, or higher ones.
    """
    one, two = f"s {sign} 1", f"s {sign} 2"
    inside = [f"({each} >= 0 and {each} < states)" for each in (one, two)]
    row = far.split()
    return [
        "near, skipped = -inf, -inf",
        f"if {inside[0]}: near = {_of(*row, one)}",
        f"if s % 2 == 1 and {inside[1]}:",
        f"    if {_of('links', '0', two)} != own: skipped = {_of(*row, two)}",
        f"{to} = plus({_of(*row, 's')}, near, skipped)",
    ]


def _forward() -> list[str]:
    """Return the statements that sum what leads to each step and state, and find `whole`."""
    step = [
        f"own = {_of('links', '0', 's')}",
        "led = 0.0 if s < 2 else -inf",
        "if t > 0:",
        *("    " + line for line in _sums("led", "forward t-1", "-")),
        f"{_of('forward', 't', 's')} = led + ({_logarithm('own')})",
    ]
    ends = [_of("forward", "last - 1", f"states - {n}") for n in (1, 2)]
    return [
        "for t in range(last):",
        *("    " + line for line in (*_states(step), "cuda.syncthreads()")),
        "whole = 0.0 if count == 0 else -inf",
        "if last > 0:",
        f"    whole = {ends[0]}",
        f"    if states > 1: whole = plus(whole, {ends[1]}, -inf)",
    ]


def _backward(slope: str) -> list[str]:
    """Return the statements that sum backward through step t, and write the gradient there."""
    share = [
        f"own = {_of('links', '0', 's')}",
        "left = 0.0 if s >= states - 2 else -inf",
        "if t < last - 1:",
        *("    " + line for line in _sums("left", "back 1-t%2", "+")),
        f"value = {_logarithm('own')}",
        f"{_of('back', 't%2', 's')} = left + value",
        f"part = exp({_of('forward', 't', 's')} + left - whole)",
        f"{_of('back', '2', 's')} = part if value != -inf else 0.0",
    ]
    owned = [
        f"own = {_of('links', '0', 's')}",
        f"if s % 2 == 1 and own != blank and {_of('links', '2', 's')} == 1:",
        "    part, same = 0.0, s",
        "    while same >= 0:",
        f"        part += {_of('back', '2', 'same')}",
        f"        same = {_of('links', '1', 'same')}",
        f"    {_of('slopes', 't', 'own')} = {slope}(exp({_logarithm('own')}) - part)",
    ]
    blanks = [f"if {_of('links', '0', 's')} == blank: part += {_of('back', '2', 's')}"]
    return [
        *_states(share),
        *_classes(f"{slope}(exp({_logarithm('c')}))"),
        "cuda.syncthreads()",
        "part = 0.0",
        *_states(blanks),
        "part = fold_sum(part, scratch)",
        "cuda.syncthreads()",
        "if thread == 0:",
        f"    {_of('slopes', 't', 'blank')} = {slope}(exp({_logarithm('blank')}) - part)",
        *_states(owned),
        "cuda.syncthreads()",
    ]


def _path() -> list[str]:
    """Return the statements that make the states' classes, and link those of one class."""
    named = [
        "own = int64(blank)",
        f"if s % 2 == 1: own = int64({_of('labels', 's // 2')})",
        "if own >= classes:",
        f"    status[0] = {_LABEL}",
        "    own = int64(blank)",
        f"{_of('links', '0', 's')} = own",
    ]
    linked = [
        f"own, after, first = {_of('links', '0', 's')}, -1, 1",
        "for other in range(1, states, 2):",
        f"    if {_of('links', '0', 'other')} == own:",
        "        if other < s: first = 0",
        "        if other > s and after < 0: after = other",
        f"{_of('links', '1', 's')} = after",
        f"{_of('links', '2', 's')} = first",
    ]
    return [*_states(named), "cuda.syncthreads()", *_states(linked), "cuda.syncthreads()"]


@variant("ctc", "numba", processor="cuda")
def ctc(call: Call) -> DeviceEntry:
    """Return the entry of the losses, and of the gradient of the logits of each."""
    (x, labels, *lengths), (loss, slopes) = views(call)
    samples, steps, classes = x.shape
    if samples == 0:
        return DeviceEntry(())
    places, beside = labels.shape[1], call.outputs[0]
    states = 2 * places + 1
    status = zeros(1, "int32", beside)
    sums = room((samples, steps), "float64", beside)
    forward = room((samples, steps, states), "float64", beside)
    back = room((samples, 3, states), "float64", beside)  # of two steps in turn, and shares
    links = room((samples, 3, states), "int64", beside)  # class; next of it; whether first

    def total(text: Text, known: Values, operands: Values, _: Values) -> list[Value]:
        return [text.set(f"{known[0].name} + log({known[1].name})", "float64")]

    phases = [largest("float64"), powers("float64")]
    first = rowwise([x], [2], phases, [], lambda text, v, known: [], [sums], total)
    operands = {"x": x, "labels": labels, "loss": loss, "slopes": slopes}
    operands |= {"lengths": lengths[0]} if lengths else {}
    operands |= {"sums": sums, "forward": forward, "back": back, "links": links}
    names, values = parameters(operands)
    blank, finite = call.attributes["blank"], call.attributes["zero_infinity"]
    endless, lost = ("0.0", "0.0") if finite else ("inf", "nan")
    own = f"min(max(int64({_of('lengths')}), 0), steps)" if lengths else "steps"
    lines = [
        "n, thread = cuda.blockIdx.x, cuda.threadIdx.x",
        "scratch = cuda.shared.array(SCRATCH, float64)",
        f"last = {own}",
        "count = 0",
        f"while count < places and {_of('labels', 'count')} >= 0: count += 1",
        "states = 2 * count + 1",
        *_path(),
        *_forward(),
        "if thread == 0:",
        f"    {_of('loss')} = {loss.dtype}(-whole if whole != -inf else {endless})",
        "for turned in range(steps):",
        "    t = steps - 1 - turned",
        "    if t >= last:",
        *(" " * 8 + line for line in _classes(f"{slopes.dtype}(0.0)")),
        "    elif whole == -inf:",
        *(" " * 8 + line for line in _classes(f"{slopes.dtype}({lost})")),
        "    else:",
        *(" " * 8 + line for line in _backward(slopes.dtype)),
    ]
    text = [f"def ctc(steps, classes, places, blank, {', '.join(names)}, status):"]
    text += ["    " + line for line in lines]
    arguments = (steps, classes, places, blank, *values, status)
    kernel = compiled("\n".join(text))
    second = Launch(kernel, (samples,), (rounded(max(states, classes)),), arguments)
    message = f"ctc: operand 'labels': a label found that is no class, 0 to {classes - 1} needed"
    return DeviceEntry((*first.launches, second), status, {_LABEL: message})
