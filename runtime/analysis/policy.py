"""The questions to a mapper, and the checks of its answers.

A question that the mapper leaves to the default is not asked, so a mapper costs only what it
decides. The questions of a launch are asked before anything is done for it, so a launch that is
refused has had no effect. Every answer or error of a mapper becomes a legal answer or a
`MapperError`.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from soapstone.records import dataclass
from soapstone.runtime.analysis.instance import Instance
from soapstone.runtime.errors import MapperError
from soapstone.runtime.machines.machine import CUDA, Machine
from soapstone.runtime.machines.world import World
from soapstone.runtime.model.launch import Launch
from soapstone.runtime.model.mapper import DefaultMapper, Held, Layout, Mapper, Order, by_point
from soapstone.runtime.model.region import Region
from soapstone.runtime.model.tiling import Box
from soapstone.runtime.tracing.arena import ALIGNMENT
from soapstone.runtime.tracing.step import Request

if TYPE_CHECKING:
    from soapstone.runtime.agreement import Agreement


def ask(mapper: Mapper, who: str, question: str, *given: Any) -> Any:
    """The unchecked answer of a mapper. who: on whose behalf it is asked, for errors.

    Raises: MapperError for any error that the mapper raises.
    """
    try:
        return getattr(mapper, question)(*given)
    except Exception as error:
        raise _raised(who, question, error) from error


def _raised(who: str, question: str, error: Exception) -> MapperError:
    return MapperError(f"{who}: {question} raised {type(error).__name__}: {error}")


def name_of(mapper: object) -> str:
    """The name of a mapper in errors: its class."""
    return f"mapper {type(mapper).__name__!r}"


def attach(mapper: Mapper, machine: Machine) -> None:
    """Tell a mapper its machine.

    Raises: MapperError for any error that the mapper raises.
    """
    ask(mapper, name_of(mapper), "attach", machine)


@dataclass(frozen=True, slots=True)
class Ordered:
    """The answers of a mapper for a launch, besides where it runs.

    variants: for each point, or None where none is chosen. slices: for each point, or None where
    each point is a slice of its own. stealable: whether idle processors may take points.
    """

    priority: int = 0
    variants: Sequence[str | None] | None = None
    stealable: bool = False
    slices: Sequence[int] | None = None


_UNASKED = Ordered()


class Policy:
    """The checked answers of a mapper on one machine.

    Raises (all questions): MapperError that names the mapper, the task, the question, the answer
    and what was needed.
    """

    def __init__(self, machine: Machine, mapper: Mapper, world: World) -> None:
        self.machine = machine
        self.world = world
        self.mapper = mapper
        self.agreement: Agreement | None = None  # with whom answers are compared
        self._name = name_of(mapper)
        self._memory_index = {memory.name: i for i, memory in enumerate(machine.memories)}
        self.homes = [self._memory_index[p.memory] for p in machine.processors]
        self.one_memory = len(machine.memories) == 1

        def asks(*questions: str) -> bool:
            return any(
                getattr(getattr(mapper, question, None), "__func__", None)
                is not getattr(DefaultMapper, question)
                for question in questions
            )

        self._asks_memory = asks("memory") and not self.one_memory  # else it is known
        self._asks_layout = asks("layout")
        self._asks_order = asks("order")
        self._asks_whole = asks("whole_instances")
        self._asks_slices = asks("slices")
        self._asks_stealable = asks("stealable")
        self._asks_variant = asks("variant")
        self._asks_priority = asks("priority")
        self._asks_source = asks("copy_source")
        self._asks_trace = asks("trace")
        self._asks_arrive = asks("arrive")
        self.asks_leave = asks("leave")
        self.asks_how = asks("priority", "variant", "stealable")
        self._asks_where = self._asks_memory or self._asks_layout
        self._by_point = by_point(mapper)
        # Answers about the arguments of what is launched now, until it has been: its folds keep to
        # them. By launch, argument and processor or memory.
        self._memories: dict[tuple[Launch, int, int], int] = {}
        self._layouts: dict[tuple[Launch, int, int], Layout] = {}
        self.backing = self._backings()
        self.many_instances = not self.one_memory or self._asks_layout or self._asks_whole

    def _who(self, launch: Launch | None) -> str:
        """On whose behalf a question is asked."""
        return self._name if launch is None else f"{self._name}, task {launch.name!r}"

    def _ask(self, launch: Launch | None, question: str, *given: Any) -> Any:
        return self._agreed(launch, question, ask(self.mapper, self._who(launch), question, *given))

    def _agreed(self, launch: Launch | None, question: str, answer: Any) -> Any:
        """Return an answer, after checking that all processes gave the same if that is checked."""
        if self.agreement is not None:
            self.agreement.answer(self._who(launch), question, answer)
        return answer

    def _yes(self, launch: Launch | None, question: str, *given: Any) -> bool:
        answer = self._ask(launch, question, *given)
        if not isinstance(answer, bool | np.bool_):
            raise MapperError(
                f"{self._who(launch)}: {question} is {_shown(answer)}, needed True or False"
            )
        return bool(answer)

    def _numbers(self, launch: Launch, question: str, answer: Any, needed: str) -> list[int]:
        """Check an answer of one integer for each point."""
        try:
            array = np.asarray(answer)
        except Exception:
            array = np.zeros(0, dtype=object)
        if array.shape != (launch.points,) or array.dtype.kind not in "iu":
            what = f"{array.dtype} {array.shape}" if array.dtype.kind != "O" else _shown(answer)
            raise MapperError(f"{self._who(launch)}: {question} returned {what}, needed {needed}")
        numbers: list[int] = array.tolist()
        return numbers

    def _integer(self, launch: Launch, what: str, answer: Any) -> int:
        try:
            return operator.index(answer)
        except TypeError:
            raise MapperError(
                f"{self._who(launch)}: {what} is {_shown(answer)}, needed an integer"
            ) from None

    # -- before a launch

    def ordered(
        self, launch: Launch, processors: Sequence[int], steals: bool, origin: object
    ) -> Ordered:
        """The other answers for a launch; memories and layouts are asked too, and kept.

        steals: whether idle processors can take over operations at all. origin: for a fold, the
        argument that it belongs to, whose answers are known.
        """
        if self._asks_where and origin is None:
            for argument, partition in enumerate(launch.partitions):
                for memory in sorted(set(self.memories(launch, argument, processors))):
                    self.layout(launch, argument, partition.region, memory)
        if not self.asks_how:
            return _UNASKED
        stealable = steals and launch.task.kind == "task" and self.stealable(launch)
        return Ordered(
            self.priority(launch),
            self.variants(launch, processors),
            stealable,
            self.slices(launch, processors) if stealable else None,
        )

    def forget(self) -> None:
        """Forget the answers for a launch, when it has been analysed or another one comes."""
        if self._asks_where:
            self._memories.clear()
            self._layouts.clear()

    # -- where points run

    def processors(self, launch: Launch) -> list[int]:
        """The processor index of every point."""
        count = len(self.machine.workers)
        question, points = "place_all", launch.points
        if self._by_point:
            question = "place"
            placed = self._points(launch)
            self._agreed(launch, question, placed)
        else:
            try:
                answer = self.mapper.place_all(launch)
            except Exception as error:
                raise _raised(self._who(launch), question, error) from error
            placed = self._numbers(launch, question, answer, f"integers ({points},)")
            self._agreed(launch, question, placed)
        if placed and (min(placed) < 0 or max(placed) >= count):
            wrong = next(point for point, where in enumerate(placed) if not 0 <= where < count)
            raise MapperError(
                f"{self._who(launch)}: {question} put point {wrong} on processor "
                f"{placed[wrong]}, needed 0..{count - 1}"
            )
        return placed

    def _points(self, launch: Launch) -> list[int]:
        """The processor of each point, asked point by point."""
        processors = []
        for point in range(launch.points):
            answer = ask(self.mapper, self._who(launch), "place", launch, point)
            processors.append(self._integer(launch, f"place of point {point}", answer))
        return processors

    def slices(self, launch: Launch, processors: Sequence[int]) -> list[int] | None:
        """The slice of every point, or None where each point is a slice of its own."""
        answer = self._ask(launch, "slices", launch) if self._asks_slices else None
        if answer is None:
            return None
        needed = f"integers ({launch.points},) or None"
        labels = self._numbers(launch, "slices", answer, needed)
        owner: dict[int, int] = {}
        for point, (label, processor) in enumerate(zip(labels, processors)):
            if owner.setdefault(label, processor) != processor:
                raise MapperError(
                    f"{self._who(launch)}: slice {label} has point {point} on processor "
                    f"{processor}, needed {owner[label]}, where its other points are"
                )
        return labels

    def stealable(self, launch: Launch) -> bool:
        """Whether idle processors may take points of a launch."""
        return self._asks_stealable and self._yes(launch, "stealable", launch)

    def variants(self, launch: Launch, processors: Sequence[int]) -> list[str | None] | None:
        """The variant of every point; None where none is chosen."""
        if not self._asks_variant:
            return None
        variants: list[str | None] = []
        known = launch.task.variants
        for point, processor in enumerate(processors):
            place = self.machine.processors[processor]
            answer = ask(self.mapper, self._who(launch), "variant", launch, point, place)
            asked = f"{self._who(launch)}: variant of point {point} on processor {place.name!r}"
            if answer is not None and not isinstance(answer, str):
                raise MapperError(f"{asked} is {_shown(answer)}, needed a name or None")
            if answer is not None and known is not None and answer not in known:
                raise MapperError(f"{asked} is {answer!r}, needed one of {sorted(known)} or None")
            variants.append(answer)
        self._agreed(launch, "variant", variants)
        return variants

    def priority(self, launch: Launch) -> int:
        """The priority of a launch."""
        if not self._asks_priority:
            return 0
        return self._integer(launch, "priority", self._ask(launch, "priority", launch))

    # -- where instances live

    def memories(self, launch: Launch, argument: int, processors: Sequence[int]) -> list[int]:
        """The memory index of each point's instance of one argument."""
        if not self._asks_memory:
            if self.one_memory:
                return [0] * len(processors)
            return [self.homes[processor] for processor in processors]
        kept = self._memories
        for processor in sorted(set(processors)):
            if (launch, argument, processor) not in kept:
                kept[launch, argument, processor] = self._memory(launch, argument, processor)
        return [kept[launch, argument, processor] for processor in processors]

    def _memory(self, launch: Launch, argument: int, processor: int) -> int:
        place = self.machine.processors[processor]
        name = self._ask(launch, "memory", launch, argument, place)
        asked = f"{self._who(launch)}: memory of argument {argument} on processor {place.name!r}"
        if not isinstance(name, str) or name not in self._memory_index:
            raise MapperError(
                f"{asked} is {_shown(name)}, needed one of {sorted(self._memory_index)}"
            )
        index = self._memory_index[name]
        if self.world.apart(index, self.homes[processor]):
            raise MapperError(
                f"{asked} is {name!r}, which belongs to another process; one of its own needed"
            )
        if index in self.machine.devices and place.kind != CUDA:
            raise MapperError(f"{asked} is {name!r}, which is a GPU's; one of the host's needed")
        return index

    def layout(self, launch: Launch, argument: int, region: Region, memory: int) -> Layout | None:
        """The layout of a region argument in a memory; None where no launch asks for its own."""
        if not self._asks_layout:
            return None
        key = (launch, argument, memory)
        if key not in self._layouts:
            self._layouts[key] = self._layout(launch, argument, region, memory)
        return self._layouts[key]

    def _layout(self, launch: Launch, argument: int, region: Region, memory: int) -> Layout:
        name = self.machine.memories[memory].name
        answer = self._ask(launch, "layout", launch, argument, name)
        who = f"{self._who(launch)}: layout of argument {argument}"
        if not isinstance(answer, Layout):
            raise MapperError(f"{who} in memory {name!r} is {_shown(answer)}, needed a Layout")
        asked = f"{who} (region {region.name!r})"
        if not isinstance(answer.whole, bool | np.bool_):
            raise MapperError(f"{asked}: whole {_shown(answer.whole)}, needed True or False")
        extent = _extent(answer.extent, region, asked)
        return Layout(_order(answer.order, region.rank, asked), bool(answer.whole), extent)

    def whole(self, region: Region, memory: int, launch: Launch | None) -> bool:
        """Whether a memory holds whole instances of a region."""
        if not self._asks_whole:
            return True
        return self._yes(launch, "whole_instances", region, self.machine.memories[memory].name)

    def order(self, region: Region, launch: Launch | None = None) -> Order:
        """The axis order of a region's instances, None for C order."""
        if not self._asks_order:
            return None
        answer = self._ask(launch, "order", region)
        return _order(answer, region.rank, f"{self._who(launch)}: region {region.name!r}")

    def copy_source(
        self, launch: Launch | None, region: Region, target: Instance, sources: Sequence[Instance]
    ) -> int | None:
        """The index of the instance to copy from, or None for the nearest."""
        if not self._asks_source:
            return None
        seen = tuple(self.held(region, source) for source in sources)
        answer = self._ask(launch, "copy_source", launch, self.held(region, target), seen)
        if answer is None:
            return None
        asked = f"{self._who(launch)}: copy source of region {region.name!r}"
        return _index(answer, seen, asked, "None or an index of")

    def _backings(self) -> list[int | None]:
        """The index of each memory's backing memory, or None."""
        backings: list[int | None] = []
        for memory, place in enumerate(self.machine.memories):
            hosted = memory in self.world.hosts
            answer = None if hosted else self._ask(None, "backing", place.name)
            others = {
                other: index
                for other, index in self._memory_index.items()
                if index != memory and not self.world.apart(index, memory)
            }
            if answer is not None and not (isinstance(answer, str) and answer in others):
                raise MapperError(
                    f"{self._name}: backing of memory {place.name!r} is {_shown(answer)}, needed "
                    f"None or one of {sorted(others)}"
                )
            backings.append(None if answer is None else others[answer])
        for memory, backing in enumerate(backings):
            if backing is not None and backings[backing] is not None:
                raise MapperError(
                    f"{self._name}: backing of memory {self.machine.memories[memory].name!r} is "
                    f"{self.machine.memories[backing].name!r}, needed one whose instances stay"
                )
        return backings

    def evict(self, launch: Launch | None, memory: int, nbytes: int, held: tuple[Held, ...]) -> int:
        """The index of the instance that makes room."""
        name = self.machine.memories[memory].name
        answer = self._ask(launch, "evict", launch, name, nbytes, held)
        asked = f"{self._who(launch)}: evict from memory {name!r}"
        return _index(answer, held, asked, "an index of")

    def arrive(self, launch: Launch | None, region: Region, memory: int, nbytes: int) -> int | None:
        """Where a new instance begins in a memory with a backing one; None: in the first gap."""
        if not self._asks_arrive:
            return None
        name = self.machine.memories[memory].name
        answer = self._ask(launch, "arrive", launch, region, name, nbytes)
        if answer is None:
            return None
        number = isinstance(answer, int | np.integer) and not isinstance(answer, bool)
        if not number or answer < 0 or answer % ALIGNMENT:
            raise MapperError(
                f"{self._who(launch)}: arrive of region {region.name!r} in memory {name!r} is"
                f" {_shown(answer)}, needed None or a multiple of {ALIGNMENT}"
            )
        return int(answer)

    def misplaced(
        self, launch: Launch | None, region: Region, memory: int, nbytes: int, at: int
    ) -> MapperError:
        """The error for an instance whose place is in use, or beyond the end of its memory."""
        place = self.machine.memories[memory]
        return MapperError(
            f"{self._who(launch)}: arrive of region {region.name!r} in memory {place.name!r} is"
            f" {at}, needed {nbytes} free bytes from there, of {place.capacity_bytes} in all"
        )

    def leave(self, launch: Launch, memory: int, held: tuple[Held, ...]) -> list[int]:
        """The indices of the instances that leave a memory after a launch, each once."""
        name = self.machine.memories[memory].name
        answer = self._ask(launch, "leave", launch, name, held)
        asked = f"{self._who(launch)}: leave of memory {name!r}"
        if not isinstance(answer, Sequence | np.ndarray):
            raise MapperError(f"{asked} is {_shown(answer)}, needed a sequence of indices")
        found = [
            _index(number, held, f"{asked}, item {i}", "an index of")
            for i, number in enumerate(answer)
        ]
        return list(dict.fromkeys(found))

    def held(self, region: Region, instance: Instance) -> Held:
        """An instance as a mapper sees it."""
        storage = instance.storage
        name = self.machine.memories[storage.memory].name
        return Held(region, name, storage.box, storage.order, storage.nbytes)

    # -- what is compiled

    def trace(self, sequence: Sequence[Request], seen: int) -> bool:
        """Whether a sequence that repeats becomes a trace."""
        return not self._asks_trace or self._yes(None, "trace", sequence, seen)


def _order(answer: object, rank: int, asked: str) -> Order:
    """A checked axis order; C order is None."""
    if answer is None:
        return None
    try:
        axes = tuple(operator.index(axis) for axis in answer)  # type: ignore[attr-defined]
    except Exception:
        axes = ()
    if not isinstance(answer, Sequence | np.ndarray) or sorted(axes) != list(range(rank)):
        raise MapperError(
            f"{asked}: order {_shown(answer)}, needed a permutation of its {rank} axes or None"
        )
    return None if axes == tuple(range(rank)) else axes


def _extent(answer: object, region: Region, asked: str) -> Box | None:
    """A checked box of a region."""
    if answer is None:
        return None
    try:
        low, high = (tuple(operator.index(at) for at in end) for end in answer)  # type: ignore[attr-defined]
        fits = len(low) == len(high) == region.rank
    except Exception:
        fits = False
    if not fits or not all(0 <= a < b <= n for a, b, n in zip(low, high, region.shape)):
        raise MapperError(
            f"{asked}: extent {_shown(answer)}, needed a box within {list(region.shape)} or None"
        )
    return low, high


def _index(answer: object, held: Sequence[Held], asked: str, needed: str) -> int:
    number = isinstance(answer, int | np.integer) and not isinstance(answer, bool)
    if number and 0 <= int(answer) < len(held):  # type: ignore[call-overload]
        return int(answer)  # type: ignore[call-overload, no-any-return]
    choices = "; ".join(f"{i}: {item}" for i, item in enumerate(held[:8]))
    more = "; ..." if len(held) > 8 else ""
    raise MapperError(f"{asked} is {_shown(answer)}, needed {needed} {choices}{more}")


def _shown(answer: object) -> str:
    """An answer as errors print it, truncated if it is long."""
    try:
        text = repr(answer)
    except Exception:
        text = f"a {type(answer).__name__}"
    return text if len(text) <= 200 else f"{text[:200]}..."
