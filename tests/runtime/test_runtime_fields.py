"""Regions with several fields: storage, partitions, privileges field by field, and bad input."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from soapstone.runtime import (
    BoundsError,
    FieldRegion,
    Fields,
    FieldViews,
    LaunchError,
    Machine,
    Partition,
    PrivilegeError,
    Read,
    ReadWrite,
    Reduce,
    Region,
    Runtime,
    Task,
    Write,
    task,
)


@task
def move(p: Fields(x=ReadWrite, v=Read), dt: float) -> None:
    p.x += dt * p["v"]


@task
def energy(p: Fields(v=Read, m=Read), out: Reduce("sum")) -> None:
    out[0] = (0.5 * p.m * p.v**2).sum()


@task
def double(p: ReadWrite) -> None:
    for name in p:
        p[name][...] *= 2


def _particles(n: int = 10) -> FieldRegion:
    return FieldRegion((n,), {"x": "f8", "v": "f4", "m": "i4"}, "p")


def _contents(n: int = 10) -> dict[str, np.ndarray]:
    return {
        "x": np.zeros(n),
        "v": np.arange(n, dtype="f4"),
        "m": np.arange(n, dtype="i4")[::-1].copy(),
    }


@pytest.mark.parametrize("memories", [1, 2])
@pytest.mark.parametrize("traced", [False, True])
def test_fields_are_used_each_with_its_privilege(memories: int, traced: bool) -> None:
    particles, total = _particles(), Region((1,), "f8", "total")
    tiles = Partition.tiled(particles, 3)
    contents = _contents()
    with Runtime(Machine.local(2, memories=memories)) as runtime:
        runtime.write(particles, contents)

        def step() -> None:
            runtime.launch(move, tiles, 0.5)
            runtime.launch(energy, tiles, Partition.whole(total, (3,)), initialise=True)

        if traced:
            trace = runtime.capture(step)
            trace.replay()
            trace.replay()
        else:
            step()
            step()
        found = runtime.read(particles)
        np.testing.assert_array_equal(found["x"], contents["v"].astype("f8"))
        np.testing.assert_array_equal(found["v"], contents["v"])
        want = (0.5 * contents["m"] * contents["v"] ** 2).sum()
        assert runtime.read(total)[0] == pytest.approx(want)


def test_fields_not_named_are_not_touched_and_do_not_order() -> None:
    particles = _particles()
    with Runtime(Machine.local(2)) as runtime:
        runtime.write(particles, _contents())
        set_x = Task("set_x", (Write,), lambda x: x.fill(1))
        set_v = Task("set_v", (Write,), lambda v: v.fill(2))
        before = runtime.statistics.edges
        tiles = Partition.tiled(particles, 2)
        runtime.launch(set_x, tiles["x"])
        runtime.launch(set_v, tiles["v"])
        runtime.wait()
        assert runtime.statistics.edges == before
        runtime.launch(double, particles.only("m"))
        found = runtime.read(particles)
        assert (found["x"] == 1).all() and (found["v"] == 2).all()
        np.testing.assert_array_equal(found["m"], 2 * _contents()["m"])


def test_one_privilege_serves_all_fields_and_fill_sets_them_all() -> None:
    particles = _particles()
    with Runtime(Machine.local(2)) as runtime:
        runtime.fill(particles, 3)
        runtime.launch(double, Partition.tiled(particles, 2))
        found = runtime.read(particles)
        assert found.dtype.names == ("x", "v", "m")
        assert all((found[name] == 6).all() for name in found.dtype.names)


def test_a_native_entry_gets_one_array_a_field() -> None:
    from soapstone.runtime.analysis.transfer import copy_entry

    seen = []

    def bind(context: Any, arrays: Any) -> Any:
        seen.append([array.dtype.str[1:] for array in arrays])
        return copy_entry(arrays[0], arrays[1])

    pair = Fields(x=Write, y=Read)
    native = Task("native", (Write, Read), bind=bind, parameters=(pair,))
    region = FieldRegion((6,), {"y": "f4", "x": "f4"}, "r")
    with Runtime(Machine.local(1)) as runtime:
        runtime.write(region, {"y": np.arange(6, dtype="f4"), "x": np.zeros(6, "f4")})
        trace = runtime.capture(lambda: runtime.launch(native, Partition.tiled(region, 2)))
        trace.replay()
        np.testing.assert_array_equal(runtime.read(region)["x"], np.arange(6))
        assert seen == [["f4", "f4"]] * 2 and trace.describe()["python_entries"] == 0


def test_bad_fields_are_refused() -> None:
    with pytest.raises(BoundsError, match="no fields"):
        FieldRegion((2,), {}, "p")
    with pytest.raises(BoundsError, match="identifier"):
        FieldRegion((2,), {"a b": "f4"}, "p")
    with pytest.raises(LaunchError, match="needed Read"):
        Fields(x=float)
    particles = _particles()
    with pytest.raises(BoundsError, match="'q' found, one of x, v, m"):
        particles["q"]
    with pytest.raises(BoundsError, match="no named fields"):
        Partition.tiled(Region((2,), "f4", "r"), 1)["x"]
    with pytest.raises(BoundsError, match="cannot be one of"):
        Partition.tiled(particles, 1).on(Region((3,), "f4", "r"))
    views = FieldViews({"x": np.zeros(2)})
    with pytest.raises(AttributeError, match="cannot be replaced"):
        views.x = 3
    with pytest.raises(AttributeError, match="one of x needed"):
        views.y  # noqa: B018
    with Runtime(Machine.local(1)) as runtime:
        with pytest.raises(LaunchError, match="has fields a; needed x, v"):
            runtime.launch(move, FieldRegion((2,), {"a": "f4"}, "r"), 1.0)
        with pytest.raises(LaunchError, match="needed a region with fields"):
            runtime.launch(move, Region((2,), "f4", "r"), 1.0)
        with pytest.raises(LaunchError, match="several fields"):
            runtime.array(particles)
        with pytest.raises(BoundsError, match="fields x found, x, v, m needed"):
            runtime.write(particles, {"x": np.zeros(10)})
        twice = Task("twice", (ReadWrite, Read), lambda a, b: None)
        with pytest.raises(PrivilegeError, match=r"p\.x"):
            runtime.launch(twice, particles, particles.only("x"))
