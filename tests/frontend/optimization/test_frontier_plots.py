"""Pictures of frontiers: what is drawn is what was found."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest

from soapstone.frontend.strategies.finding import graph_of
from soapstone.frontend.strategies.plot import (
    Curve,
    beside,
    chart,
    frontier_curves,
    memory_chart,
    plot,
    save_plot,
)
from soapstone.frontend.strategies.preferences import Preferred, find_strategy
from soapstone.ir.analysis.footprint import Footprint, Touch, Touches
from soapstone.search.placement.baselines import least_recently_used

SVG = "{http://www.w3.org/2000/svg}"
Place = tuple[float, float]


@pytest.fixture(scope="module")
def found() -> Preferred:
    return find_strategy(graph_of("mlp", 32), "v100", devices=2)


def lines(picture: str) -> list[list[Place]]:
    """Return the places of each line, legends left out; all must be inside of the picture."""
    root = ElementTree.fromstring(picture)
    _, _, width, height = map(float, root.attrib["viewBox"].split())
    read = []
    for line in root.iter(f"{SVG}polyline"):
        places = [tuple(map(float, each.split(","))) for each in line.attrib["points"].split()]
        assert all(0 <= x <= width and 0 <= y <= height for x, y in places)
        read.append([(x, y) for x, y in places])
    for dot in root.iter(f"{SVG}circle"):
        assert 0 <= float(dot.attrib["cx"]) <= width and 0 <= float(dot.attrib["cy"]) <= height
    return read


def texts(picture: str) -> list[str | None]:
    return [each.text for each in ElementTree.fromstring(picture).iter(f"{SVG}text")]


def test_a_frontier_is_drawn_point_by_point(found: Preferred, tmp_path: Path) -> None:
    save_plot(found, "small <one>", tmp_path / "frontier.svg")
    picture = (tmp_path / "frontier.svg").read_text()
    frontier = found.frontiers[2]
    curves = frontier_curves(frontier.as_dict())
    names = texts(picture)
    assert names[0] == "small <one>" and {curve.name for curve in curves} <= set(names)
    drawn = lines(picture)[0]
    assert len(drawn) == len(frontier.points) == len(curves[0].points) > 1
    assert drawn == sorted(drawn)  # to the right, and, as times fall, down
    assert [y for _, y in drawn] == sorted(y for _, y in drawn)
    left = frontier.points[0].memory_bytes / frontier.points[-1].memory_bytes
    assert (drawn[0][0] - 64) / (drawn[-1][0] - 64) == pytest.approx(left, abs=0.01)
    network, compute = (dict(curve.points) for curve in curves[1:3])
    for memory, time in curves[0].points:
        assert network[memory] + compute[memory] == pytest.approx(time)


def test_numbers_of_devices_are_drawn_where_something_fits() -> None:
    found = find_strategy(graph_of("mlp", 32), "v100", "profiling", devices=4)
    picture = plot(found, "profile")
    steps, network, data = lines(picture)[:3]
    assert len(steps) == len(network) == len(data) == 3
    assert [x for x, _ in steps] == [x for x, _ in network]
    assert all(a[1] <= b[1] for a, b in zip(steps, network, strict=True))  # below the whole
    assert network[0][1] == max(y for _, y in network)  # one device sends nothing


def test_what_lies_far_outside_is_named(found: Preferred) -> None:
    frontier = found.frontiers[2].as_dict()
    frontier["baselines"]["data"]["memory_bytes"] = 10**15
    curve = next(c for c in frontier_curves(frontier) if c.name.startswith("data parallelism"))
    assert not curve.points and curve.name.startswith("data parallelism: 1e+06 GB")


def test_charts_stand_beside_each_other() -> None:
    one = chart("one", "x", "y", [Curve("a", "red", [(900.0, 1.0), (1000.0, 2.0)])])
    none = chart("two", "x", "y", [Curve(f"b{n}", "blue", [], "none") for n in range(4)])
    both = ElementTree.fromstring(beside([one, none, one]))
    _, _, width, height = map(float, both.attrib["viewBox"].split())
    heights = [float(ElementTree.fromstring(each).attrib["height"]) for each in (one, none)]
    assert heights[0] < heights[1]
    assert len(list(both.iter(f"{SVG}g"))) == 3 and width == 2 * 560
    assert height == heights[1] + heights[0]
    assert "873" in texts(one)  # the axis begins near the least


def test_a_memory_plan_is_drawn_node_by_node() -> None:
    sizes = {"x": 128, "w": 64, "y": 128, "z": 64}
    nodes = (
        Touches("a", "a", (Touch("x", True), Touch("y", False, 128)), 256),
        Touches("b", "b", (Touch("y", True), Touch("w", True), Touch("z", False, 64))),
    )
    footprint = Footprint(nodes, sizes, frozenset({"x", "w", "z"}), frozenset({"z"}))
    picture = memory_chart(least_recently_used(footprint, 640), footprint, "two nodes")
    given, held, all_bytes, full = lines(picture)[:4]
    zero = 40 + 280  # where the axis across is
    most = 1.05 * 640
    for curve, wanted in (
        (given, (128, 128)),
        (held, (256, 256)),
        (all_bytes, (512, 256)),
        (full, (640, 640)),
    ):
        assert [round((zero - y) / 280 * most) for _, y in curve] == pytest.approx(wanted, abs=1)
    assert {"weights, inputs, results", "capacity", "node", "MB"} <= set(texts(picture))
