"""Recording of PyTorch's operators: sequences of them become calls of patterns.

Consecutive operators belong to one call of a pattern as long as they read only what that call made,
and values of calls that it has read before. Recording walks along a tree of all sequences met so
far, one step an operator, so that an operator of a known sequence costs one look-up. A step at
which a tenth of the sequences through it ended is the end of a pattern, and the next operator
begins another call. So the end of a cell is found, although other operators follow a program's last
cell than follow the rest.

Source: after Liu, Machine learning workflow optimization via automatic discovery of resource reuse
opportunities, 2019, sections 4.2 to 4.7, whose subgraphs (`search/reuse/subgraphs.py`) are looked
for in whole graphs; sequences need no search, but find less where a cell's parts are called apart.
"""

from __future__ import annotations

import gc
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from soapstone.frontend.torch.arguments import frozen, meta, placed, refuse_in_place, spec_of
from soapstone.frontend.torch.operators import RANDOM, RULES, SHARING, VIEWS, NoRule, fill
from soapstone.frontend.torch.patterns import Step, Template
from soapstone.frontend.torch.runs import Runner
from soapstone.frontend.torch.values import QUICK, Call, Lazy, Spec, spec
from soapstone.ir.errors import GraphError

REUSE = ("off", "batch", "all")
_unrecorded = torch._C.DisableTorchFunction  # modes too
_MOST_STEPS = 20_000  # of the tree; a program that never repeats itself starts it anew
_LONGEST = 64  # operators of a pattern
_SEVERAL = 0.1  # of the sequences through a step end there: it is the end of a pattern
_LAZY = frozenset((Lazy,))
_LOOKS = {"item", "backward", "tolist", "numpy", "__bool__", "__float__", "__get__", "__format__"}


class Recorder:
    """Records calls of PyTorch's operators, and runs what was recorded when it is asked for.

    Args:
        reuse: "all", or "batch", in which each operator is a pattern of its own.
        frequency: how many sequences have to end at a step to make it the end of a pattern.

    Attributes:
        call: the call that is being recorded.
        grad: whether gradients were enabled when it began.
        step: the step of the tree that it has come to.
        inputs: the inputs of the call, with their places.
    """

    def __init__(self, reuse: str, frequency: int) -> None:
        self.reuse = reuse
        self.frequency = frequency
        self.call: Call | None = None
        self.grad = True
        self.inputs: dict[Any, int] = {}
        self.templates: list[Template] = []
        self.plain: Counter[str] = Counter()
        self.seconds = dict.fromkeys(("recording", "scheduling", "running"), 0.0)
        self.flushes = 0
        self.since = time.perf_counter()
        self._runner = Runner()
        self._steps = 0
        self._pending: list[Call] = []
        self._structure: list[Any] = []
        self._seen: dict[Any, Call] = {}
        self._reads: list[Any] = []  # what tells a call's inputs from those of other calls
        self._collecting = False
        self._grow_anew()

    def _grow_anew(self) -> None:
        self._roots = {grad: Step(None, "") for grad in (False, True)}
        self._steps = 0
        self.step = self._roots[True]

    def apply(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Record a function of PyTorch, or run it plainly where that is not possible."""
        if func not in RULES:
            return self._plainly(func, args, kwargs, "no rule")
        if args and not kwargs:  # what most are: a value, two of them, or a list
            first, rest = args[0], args[1:]
            if type(first) is Lazy:
                if QUICK.issuperset(map(type, rest)):
                    return self.record(func, rest, (first,), args, kwargs)
                if len(rest) == 1 and type(rest[0]) is Lazy:
                    return self.record(func, None, args, args, kwargs)
            elif (
                (type(first) is list or type(first) is tuple)
                and first
                and _LAZY.issuperset(map(type, first))
                and QUICK.issuperset(map(type, rest))
            ):
                return self.record(func, (len(first), rest), first, args, kwargs)
        leaves: list[Any] = []
        try:
            static = frozen((args, *sorted(kwargs.items())), leaves)
            shared = self._shared(func, args, leaves)
        except NoRule as reason:
            return self._plainly(func, args, kwargs, str(reason))
        if shared is None:
            return func(*args, **kwargs)
        if True in shared:
            static = static, *[id(leaf) if all_ else None for leaf, all_ in zip(leaves, shared)]
            leaves = [leaf for leaf, of_all in zip(leaves, shared) if not of_all]
        return self.record(func, static, leaves, args, kwargs)

    def _shared(self, func: Any, args: Any, leaves: list[Any]) -> list[bool] | None:
        """Return which tensors all calls share; None if no tensor is a call's own or a parameter.

        Parameters are shared, and so are the tensors that a function takes as its weights.
        """
        weights: tuple[int, ...] = ()
        if func in SHARING:
            weights = tuple([id(args[place]) for place in SHARING[func] if place < len(args)])
        recorded = trained = own = False
        shared = []
        for leaf in leaves:
            of_all = False
            if type(leaf) is Lazy:
                recorded = True
            elif (
                type(leaf) is torch.nn.Parameter
                or id(leaf) in weights
                or (leaf.requires_grad and leaf.is_leaf)
            ):
                of_all = trained = True
            else:
                own = True
            shared.append(of_all)
        return shared if recorded or (trained and own) else None

    def record(self, func: Any, static: Any, leaves: Sequence[Any], args: Any, kwargs: Any) -> Any:
        """Record a function that has a rule, or run it plainly where the rule does not hold.

        static: all that decides what it computes but for its tensors of each value, the leaves.
        """
        key, before = self._keyed(func, static, leaves)
        step = self.step.edges.get(key)
        if step is None:
            try:
                step = self._grown(func, args, kwargs, key)
            except NoRule as reason:
                self._forget_inputs(before)
                return self._plainly(func, args, kwargs, str(reason))
            except BaseException:
                self._forget_inputs(before)
                raise
            self.step.edges[key] = step
        return self.advance(step, leaves)

    def module(self, module: Any, static: Any, leaves: Sequence[Any], args: Any) -> Any:
        """Record a module that was seen to be one operator of the leaves, or call it."""
        key, before = self._keyed(module, static, leaves)
        at = self.step
        step = at.edges.get(key)
        if step is not None:
            return self.advance(step, leaves)
        reads = self.call.inputs[before:] if self.call is not None else []
        self._forget_inputs(before)
        made = torch.nn.Module.__call__(module, *args)
        step = self.step
        results = made if type(made) is tuple else (made,)
        if step.before is at and _LAZY.issuperset(map(type, results)):
            found = results[0].call.inputs[before:]
            alike = [one[0] is two[0] and one[1] is two[1] for one, two in zip(found, reads)]
            places = range(step.first, step.first + len(step.specs))
            if (
                len(found) == len(reads)
                and all(alike)
                and [each.place for each in results] == [*places]
                and step.several == (type(made) is tuple)
            ):
                at.edges[key] = step
        return made

    def _keyed(self, func: Any, static: Any, leaves: Sequence[Any]) -> tuple[tuple[Any, ...], int]:
        """Return what says which step comes next, and how many inputs the call had before.

        The call that goes on, or begins, has the inputs that the leaves are.
        """
        grad = torch.is_grad_enabled()
        call = self.call
        if len(leaves) == 1 and grad is self.grad and call is not None:
            leaf = leaves[0]
            if type(leaf) is Lazy and leaf.call is call:  # what most are
                return (func, static, leaf.place), len(self.inputs)
        if call is not None and (grad is not self.grad or not self._goes_on(call, leaves)):
            self.close(ended=True)
            call = None
        if call is None:
            call = self._begin(grad)
        inputs = self.inputs
        before = len(inputs)
        key = [func, static]
        for leaf in leaves:
            if type(leaf) is not Lazy:
                known: Any = (None, id(leaf))
            elif leaf.call is call:
                key.append(leaf.place)
                continue
            else:
                maker = leaf.call.same or leaf.call
                if maker.lost or maker.recorder is not self:
                    self._forget_inputs(before)
                    name = getattr(func, "__name__", type(func).__name__)
                    raise GraphError(f"{name}: a value found whose recording was left")
                known = (maker, leaf.place)
            place = inputs.get(known)
            if place is not None:
                key.append(place)
            else:
                inputs[known] = -1 - len(inputs)
                key.append(self._read(call, leaf, known))
        return tuple(key), before

    def _begin(self, grad: bool) -> Call:
        """Return a new call, which is recorded from now on."""
        if not self._pending and not self._collecting:
            self._collecting = gc.isenabled()
            gc.disable()  # calls are many, and none goes before it is computed
        call = self.call = Call(self)
        self.grad = grad
        self.step = self._roots[grad]
        self.inputs = {}
        self._reads = []
        return call

    def _read(self, call: Call, leaf: Any, known: Any) -> Spec:
        """Add an input to a call, and return its type."""
        maker, place = known
        if maker is not None:
            call.inputs.append(known)
            self._reads.append(known)
            if not maker.done:
                call.operands[maker] = None
            of: Spec = leaf.spec
            return of
        with _unrecorded():
            of = spec_of(leaf)
            self._reads.append(leaf.item() if of.counted else place)
        call.inputs.append((None, leaf))
        return of

    def _forget_inputs(self, count: int) -> None:
        """Leave the inputs of an operator that is not recorded; count: of those before."""
        call = self.call
        assert call is not None
        for known in list(self.inputs)[count:]:
            del self.inputs[known]
        del call.inputs[count:], self._reads[count:]
        call.operands = {maker: None for maker, _ in call.inputs if maker and not maker.done}
        if self.step.before is None:
            self.call = None

    def _goes_on(self, call: Call, leaves: Sequence[Any]) -> bool:
        """Return whether an operator belongs to the call that is being recorded."""
        own = False
        for leaf in leaves:
            if type(leaf) is Lazy:
                maker = leaf.call
                if maker is call:
                    own = True
                else:
                    maker = maker.same or maker
                    if maker not in call.operands and not maker.done:
                        return False
        return own

    def _place(self, leaf: Any) -> int:
        """Return where the current call has a tensor that it makes or reads."""
        if type(leaf) is not Lazy:
            return self.inputs[None, id(leaf)]
        own: int = leaf.place
        return own if leaf.call is self.call else self.inputs[leaf.call.same or leaf.call, own]

    def advance(self, step: Step, leaves: Sequence[Any]) -> Any:
        """Go along a step, and return the values that it makes."""
        call = self.call
        assert call is not None
        self.step = step
        step.passes += 1
        if step.cut:
            self.close()
        if not step.views and not step.several:
            return Lazy(call, step.first, step.spec)
        made = [Lazy(call, place, of) for place, of in enumerate(step.specs, step.first)]
        if step.views:
            for value in (*leaves, *made):
                if type(value) is Lazy:
                    value.viewed = True
        return tuple(made) if step.several else made[0]

    def _grown(self, func: Any, args: Any, kwargs: Any, key: tuple[Any, ...]) -> Step:
        """Return a new step: PyTorch's own shapes, and the rule that agrees with them.

        Raises:
            NoRule: it does not. And PyTorch's own errors.
        """
        leaves: list[Any] = []
        refuse_in_place(func, args, kwargs)
        frozen((args, *sorted(kwargs.items())), leaves)
        shared = self._shared(func, args, leaves) or []
        with _unrecorded():
            metas = [meta(spec_of(leaf)) for leaf in leaves]
        order = iter(range(len(leaves)))
        arguments = [placed(each, leaves, shared, order) for each in (args, kwargs)]
        with _unrecorded(), torch.no_grad():
            one = func(
                *fill(arguments[0], metas), **{k: fill(v, metas) for k, v in arguments[1].items()}
            )
            results = one if isinstance(one, (list, tuple)) else (one,)
            if not all(isinstance(each, torch.Tensor) for each in results):
                raise NoRule("tensors as results needed")
            rows = [
                one if of_all else torch.empty((2, *one.shape), dtype=one.dtype, device="meta")
                for one, of_all in zip(metas, shared)
            ]
            try:
                run = RULES[func](*arguments[0], **arguments[1])
                several = run(rows)
            except (RuntimeError, TypeError, IndexError, ValueError) as error:
                raise NoRule(f"its rule fails: {error}") from error
        many = several if isinstance(several, (list, tuple)) else (several,)
        wanted = [((2, *each.shape), each.dtype) for each in results]
        if [(tuple(each.shape), each.dtype) for each in many] != wanted:
            raise NoRule("its rule would give other shapes")
        step = Step(self.step, func.__name__)
        self._steps += 1
        device = next(leaf.device for leaf, of_all in zip(leaves, shared) if not of_all)
        step.specs = tuple(spec(each.shape, each.dtype, device) for each in results)
        step.spec = step.specs[0]
        step.several = isinstance(one, (list, tuple))
        step.run = run
        step.operands = [
            leaf if of_all else self._place(leaf) for leaf, of_all in zip(leaves, shared)
        ]
        step.views = func in VIEWS
        step.random = step.random or func in RANDOM
        step.inputs += tuple([each for each in key[2:] if type(each) is Spec])
        indexed = func is torch.Tensor.__getitem__ and leaves[0].shape[:1] != (1,)
        step.cut = self.reuse == "batch" or step.depth >= _LONGEST or indexed
        return step

    def close(self, ended: bool = False) -> None:
        """End the call that is being recorded. ended: by an operator of another call."""
        call, step = self.call, self.step
        if call is None:
            return
        self.call = None
        if step.before is None:
            return
        if ended:
            step.ends += 1
            often = step.ends >= self.frequency and step.ends >= _SEVERAL * step.passes
            step.cut = step.cut or often
        template = step.template
        if template is None:
            template = step.template = Template(len(self.templates), step, self.grad)
            self.templates.append(template)
        template.calls += 1
        call.cell = template
        if not template.random:
            same = self._seen.setdefault((template, *self._reads), call)
            if same is not call:
                call.same = same
                return
        call.index = len(self._pending)
        self._pending.append(call)
        operands = [
            None if maker is None or maker.done else (maker.index, place)
            for maker, place in call.inputs
        ]
        self._structure.append((template.number, *operands))

    def flush(self) -> None:
        """Compute all that is recorded."""
        self.close()
        if not self._pending:
            self._collect()
            return
        began = time.perf_counter()
        pending, structure = self._pending, tuple(self._structure)
        self.seconds["recording"] += began - self.since
        self._pending, self._structure, self._seen = [], [], {}
        try:
            with _unrecorded():
                plan = self._runner.plan(structure, pending)
            planned = time.perf_counter()
            with _unrecorded():
                self._runner.run(plan, pending)
        except BaseException:
            for call in pending:
                call.lost = not call.done
            raise
        finally:
            self._collect()
        self.flushes += 1
        self.since = time.perf_counter()
        self.seconds["scheduling"] += planned - began
        self.seconds["running"] += self.since - planned
        if self._steps > _MOST_STEPS:
            self._grow_anew()

    def forget(self) -> None:
        """Leave what is recorded and not computed, after an error."""
        for call in (*self._pending, *([self.call] if self.call else ())):
            call.lost = True
        self._pending, self._structure, self._seen, self.call = [], [], {}, None
        self._collect()

    def _collect(self) -> None:
        """Let Python collect again, if it did where recording began."""
        if self._collecting:
            gc.enable()
            self._collecting = False

    def tensor(self, value: Lazy) -> Any:
        """Return the tensor that a value is; all that is recorded is computed first."""
        self.flush()
        call = value.call.same or value.call
        if call.lost or call.run is None:
            raise GraphError(
                "a value found whose recording was left, by an error or a change; record it again"
            )
        with _unrecorded():
            return call.run.values[value.place][call.row]

    def forced(self, given: Any) -> Any:
        """Return tuples, lists and dicts with tensors in place of values."""
        if type(given) is Lazy:
            return self.tensor(given)
        if isinstance(given, tuple):
            made = [self.forced(each) for each in given]
            return type(given)(*made) if hasattr(given, "_fields") else tuple(made)
        if isinstance(given, list):
            return [self.forced(each) for each in given]
        if isinstance(given, dict):
            return {key: self.forced(each) for key, each in given.items()}
        return given

    def _plainly(self, func: Any, args: Any, kwargs: Any, reason: str) -> Any:
        """Run a function of PyTorch on tensors themselves."""
        name = getattr(func, "__name__", str(func))
        if name not in _LOOKS:
            self.plain[f"{name}: {reason}"] += 1
        refuse_in_place(func, args, kwargs)
        with _unrecorded():
            return func(*self.forced(args), **self.forced(kwargs))

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Count the time inside, but for what is computed, as recording; on an error, forget."""
        self.since = time.perf_counter()
        try:
            yield
            self.flush()
        except BaseException:
            self.forget()
            raise
