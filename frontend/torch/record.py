"""Recording of PyTorch's operators: what is called one after the other becomes calls of patterns.

Operators that follow each other belong to one call of a pattern as long as they use what the call
made, and values of calls that it used before. What is recorded walks along a tree of all sequences
so far, one step for an operator, so a known sequence costs a look-up each. A step where a tenth of
the sequences through it ended is the end of a pattern; what follows is another call. So the end of
a cell is found although the last cell of a program is followed by other operators than the rest.

Source: after Liu, Machine learning workflow optimization via automatic discovery of resource reuse
opportunities, 2019, sections 4.2 to 4.7, whose subgraphs (`search/reuse/subgraphs.py`) are looked
for in whole graphs; sequences need no search, but find less where a cell's parts are called apart.
"""

from __future__ import annotations

import gc
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from soapstone.frontend.torch.arguments import frozen, meta, placed, refuse_in_place, spec_of
from soapstone.frontend.torch.operators import RANDOM, RULES, SHARING, VIEWS, NoRule, fill
from soapstone.frontend.torch.patterns import Step, Template
from soapstone.frontend.torch.runs import Runner
from soapstone.frontend.torch.values import Call, Lazy, Spec
from soapstone.ir.errors import GraphError

REUSE = ("off", "batch", "all")
_unrecorded = torch._C.DisableTorchFunction  # modes too
_MOST_STEPS = 20_000  # of the tree; a program that never repeats itself starts it anew
_LONGEST = 64  # operators of a pattern
_SEVERAL = 0.1  # of the sequences through a step end there: it is the end of a pattern
_QUICK = frozenset((int, type(None), torch.nn.Parameter))  # arguments that are keys themselves
_LOOKS = {"item", "backward", "tolist", "numpy", "__bool__", "__float__", "__get__", "__format__"}


class Recorder:
    """What is recorded, and where.

    Args:
        reuse: "all"; "batch", in which each operator is a pattern. frequency: ends that make one.

    Attributes:
        call: that is being recorded. grad: whether gradients were enabled where it began.
        edges, step: of the tree, where it stands. inputs: of the call, and their places.
    """

    def __init__(self, reuse: str, frequency: int) -> None:
        self.reuse = reuse
        self.frequency = frequency
        self.call: Call | None = None
        self.grad = True
        self.inputs: dict[Any, int] = {}
        self.templates: list[Template] = []
        self.key: Any = None  # of the last step
        self.plain: Counter[str] = Counter()
        self.seconds = dict.fromkeys(("recording", "scheduling", "running"), 0.0)
        self.flushes = 0
        self.since = time.perf_counter()
        self._runner = Runner()
        self._steps = 0
        self._pending: list[Call] = []
        self._structure: list[Any] = []
        self._seen: dict[Any, Call] = {}
        self._collecting = False
        self._grow_anew()

    def _grow_anew(self) -> None:
        self._roots = {grad: Step(None, "") for grad in (False, True)}
        self._steps = 0
        self.step = self.last = self._roots[True]
        self.edges = self.step.edges

    def apply(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Record a function of PyTorch, or run it plainly where that is not possible."""
        if func not in RULES:
            return self._plainly(func, args, kwargs, "no rule")
        call = self.call
        quick = None
        if (
            call is not None
            and args
            and type(args[0]) is Lazy
            and args[0].call is call
            and not kwargs
            and _QUICK.issuperset(map(type, args[1:]))
            and torch.is_grad_enabled() is self.grad
        ):
            edges, quick = self.edges, (func, args[0].place, args[1:])
            step = edges.get(quick)
            if step is not None:
                if step.views:
                    args[0].viewed = True
                return self.advance(step)
        leaves: list[Any] = []
        try:
            key = (func, frozen(args, leaves))
            if kwargs:
                key += tuple((name, frozen(kwargs[name], leaves)) for name in sorted(kwargs))
            shared = self._shared(func, args, leaves)
            if shared is None:
                return func(*args, **kwargs)
            made = self._record(func, args, kwargs, key, leaves, shared)
            if quick is not None and self.last is edges.get(self.key):
                edges[quick] = self.last  # the shorter way, from now on
            return made
        except NoRule as reason:
            return self._plainly(func, args, kwargs, str(reason))

    def _shared(self, func: Any, args: Any, leaves: list[Any]) -> list[bool] | None:
        """Return which tensors all calls share; None if no call has one of its own or a parameter.

        Parameters are, and what stands where a function has its weights.
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

    def _record(
        self, func: Any, args: Any, kwargs: Any, key: Any, leaves: list[Any], shared: list[bool]
    ) -> Any:
        grad = torch.is_grad_enabled()
        sources: list[Any] = []
        for leaf, of_all in zip(leaves, shared):
            if of_all:
                sources.append(leaf)
            elif type(leaf) is Lazy:
                maker = leaf.call
                if maker.lost or maker.recorder is not self:
                    raise GraphError(f"{func.__name__}: a value found whose recording was left")
                sources.append((maker.same or maker, leaf.place))
            else:
                sources.append((None, leaf))
        if self.call is not None and (grad is not self.grad or not self._goes_on(sources, shared)):
            self.close(ended=True)
            sources = [  # what was closed may be the same as an earlier call
                source if of_all or source[0] is None else (source[0].same or source[0], source[1])
                for source, of_all in zip(sources, shared)
            ]
        call = self.call
        if call is None:
            if not self._pending and not self._collecting:
                self._collecting = gc.isenabled()
                gc.disable()  # calls are many, and none goes before it is computed
            call = self.call = Call(self)
            self.grad = grad
            self.step = self._roots[grad]
            self.edges = self.step.edges
            self.inputs = {}
        refs: list[Any] = []
        added: list[tuple[Any, tuple[Any, Any], Spec]] = []
        for leaf, source, of_all in zip(leaves, sources, shared):
            if of_all:
                key += (id(leaf),)
                refs.append(leaf)
            elif source[0] is call:
                key += (source[1],)
                refs.append(source[1])
            else:
                known = source if source[0] is not None else (None, id(leaf))
                place = self.inputs.get(known)
                if place is None:
                    place = self.inputs[known] = -1 - len(self.inputs)
                    spec = leaf.spec if source[0] is not None else spec_of(leaf)
                    key += (place, spec)
                    added.append((known, source, spec))
                else:
                    key += (place,)
                refs.append(place)
        self.key = key
        step = self.edges.get(key)
        if step is None:
            try:
                step = self._grown(func, args, kwargs, leaves, shared, refs, added)
            except BaseException:
                for known, _, _ in added:
                    del self.inputs[known]
                if not call.inputs and self.step.before is None:
                    self.call = None
                raise
            self.edges[key] = step
        for _, source, _ in added:
            call.inputs.append(source)
            if source[0] is not None and not source[0].done:
                call.operands[source[0]] = None
        if step.views:
            for leaf in leaves:
                if type(leaf) is Lazy:
                    leaf.viewed = True
        return self.advance(step)

    def _goes_on(self, sources: list[Any], shared: list[bool]) -> bool:
        """Return whether an operator belongs to the call that is being recorded."""
        call, own = self.call, False
        for source, of_all in zip(sources, shared):
            if not of_all and source[0] is not None:
                if source[0] is call:
                    own = True
                elif call is not None and source[0] not in call.operands and not source[0].done:
                    return False
        return own

    def advance(self, step: Step) -> Any:
        """Go along a step, and return the values that it makes."""
        call = self.call
        assert call is not None
        self.step = self.last = step
        self.edges = step.edges
        step.passes += 1
        if step.cut:
            self.close()
        if not step.several:
            made = Lazy(call, step.first, step.specs[0])
            if step.views:
                made.viewed = True
            return made
        parts = [Lazy(call, place, spec) for place, spec in enumerate(step.specs, step.first)]
        if step.views:
            for part in parts:
                part.viewed = True
        return tuple(parts)

    def _grown(
        self,
        func: Any,
        args: Any,
        kwargs: Any,
        leaves: list[Any],
        shared: list[bool],
        refs: list[Any],
        added: list[Any],
    ) -> Step:
        """Return a new step: PyTorch's own shapes, and the rule that agrees with them.

        Raises:
            NoRule: it does not. And PyTorch's own errors.
        """
        refuse_in_place(func, args, kwargs)
        with _unrecorded():
            metas = [meta(spec_of(leaf)) for leaf in leaves]
        order = iter(range(len(leaves)))
        arguments = [placed(each, leaves, shared, order) for each in (args, kwargs)]
        for of_all, ref in zip(shared, refs):
            if not of_all and isinstance(ref, torch.Tensor):
                raise NoRule("a tensor of each value needed")
        with _unrecorded(), torch.no_grad():
            one = func(
                *fill(arguments[0], metas), **{k: fill(v, metas) for k, v in arguments[1].items()}
            )
            results = one if isinstance(one, (list, tuple)) else (one,)
            if not all(isinstance(each, torch.Tensor) for each in results):
                raise NoRule("tensors as results needed")
            if not any(not of_all for of_all in shared):
                raise NoRule("a tensor of each value needed")
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
        step.specs = tuple((tuple(each.shape), each.dtype, device) for each in results)
        step.several = isinstance(one, (list, tuple))
        step.run, step.operands = run, refs
        step.views = func in VIEWS
        step.random = step.random or func in RANDOM
        step.inputs += tuple(spec for _, _, spec in added)
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
        key: list[Any] = [template]
        structure: list[Any] = [template.number]
        for maker, place in call.inputs:
            if maker is None:
                whole = place.numel() == 1 and not place.dtype.is_floating_point
                key.append(place.item() if whole and place.device.type == "cpu" else id(place))
                structure.append(None)
            else:
                key.append((maker, place))
                structure.append(None if maker.done else (maker.index, place))
        call.cell = template
        if not template.random:
            same = self._seen.setdefault(tuple(key), call)
            if same is not call:
                call.same = same
                return
        call.index = len(self._pending)
        self._pending.append(call)
        self._structure.append(tuple(structure))

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
            raise GraphError("a value found whose recording was left, by an error or a change")
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


__all__ = ["REUSE", "Recorder"]
