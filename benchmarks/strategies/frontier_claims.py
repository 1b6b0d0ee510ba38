"""What section 5.1 of TensorOpt says of its frontiers, asked of those of `frontier_figures.py`.

Each claim has what was found here, and `true`, `not`, or why it cannot be compared. Times and bytes
are by sums, as the paper's are; what fits is what a simulated step holds.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Found = Mapping[str, Any]  # a frontier that is kept
Row = dict[str, Any]
NAMES = {"rnn": "RNN", "transformer": "Transformer", "wide_resnet": "WideResNet"}
STABLE = 1.1  # most over least that counts as the same
NEAR = 1.05  # as almost identical
ALIKE = 0.2  # by which shares of two turning points differ at most, if curves have one shape
LESS = 0.85  # of a time, from which on it is hardly shorter


def claims(have: Mapping[str, Found]) -> Iterator[Row]:
    """Yield a row a claim. have: frontiers by name; claims of those that are not there miss."""
    large = {name: have[f"{name} v100 16"] for name in NAMES if f"{name} v100 16" in have}
    for name, found in large.items():
        yield from _alone(name, found)
    if "rnn v100 16 copies" in have:
        yield _copies(have["rnn v100 16 copies"])
    if "wide_resnet" in large:
        yield from _wide(large["wide_resnet"])
    yield from _sizes([f for n, f in have.items() if f["model"] == "transformer" and _usual(f)])
    ways = ("v100@0.5", "v100", "v100@4")
    networks = [have.get(f"transformer 2880 {name} 16") for name in ways]
    if all(networks):
        yield from _networks(networks)
    inside = [have.get(f"transformer {name} 8") for name in ("v100", "v100-pcie")]
    if all(inside):
        yield from _links(*inside)
    for name in ("transformer", "wide_resnet"):
        found = {f["devices"]: f for f in have.values() if f["model"] == name and _plain(f)}
        if {8, 16} <= set(found):
            yield from _devices(name, dict(sorted(found.items())))
        saved = have.get(f"{name} v100 8 recompute")
        if saved:
            best = fitting(saved)
            yield _row(
                *("8", NAMES[name], "as the first, where values may be recomputed"),
                f"on 8 devices {_at(best)}" if best else "on 8 devices nothing fits",
                best is not None,
            )


def _row(figure: str, model: str, claim: str, here: str, true: bool | str) -> Row:
    said = true if isinstance(true, str) else ("true" if true else "not")
    return {"figure": figure, "of": model, "claim": claim, "here": here, "it is": said}


def _plain(found: Found) -> bool:
    return found["machine"] == "v100" and not found["hidden"] and not found.get("saving")


def _usual(found: Found) -> bool:
    return found["machine"] == "v100" and found["devices"] == 16 and not found.get("saving")


def _at(point: Found) -> str:
    return f"{point['memory_bytes'] / 1e9:,.2f} GB and {point['time_us'] / 1e3:,.0f} ms"


def _spread(values: Sequence[float]) -> float:
    return max(values) / min(values)


def _shares(found: Found) -> tuple[float, float]:
    """Return what the turning point has: of the time that can be saved, and of the memory more."""
    points = found["points"]
    turning, (least, shortest) = points[found["turning_point"]], (points[0], points[-1])
    saved = least["time_us"] - shortest["time_us"]
    more = shortest["memory_bytes"] - least["memory_bytes"]
    if not saved or not more:
        return 1.0, 0.0
    time = (least["time_us"] - turning["time_us"]) / saved
    return time, (turning["memory_bytes"] - least["memory_bytes"]) / more


def _within(points: Sequence[Found], memory_bytes: int) -> Found | None:
    """Return the shortest step of those that hold no more."""
    some = [each for each in points if each["memory_bytes"] <= memory_bytes]
    return min(some, key=lambda each: each["time_us"], default=None)


def _alone(name: str, found: Found) -> Iterator[Row]:
    points, mesh, data = found["points"], found["mesh"], found["baselines"]["data"]
    about = ("6", NAMES[name])
    least, shortest, tofu = points[0], points[-1], found["baselines"]["tofu"]
    if name == "rnn":
        yield _row(
            *about,
            "data parallelism is far outside of the figure (109 GB, 39 s)",
            f"{_at(data)}; the frontier ends at {_at(shortest)}",
            all(
                data[what] > 2 * max(p[what] for p in points)
                for what in ("memory_bytes", "time_us")
            ),
        )
    compute = _spread([each["compute_us"] for each in points])
    yield _row(
        *about,
        "computation time remains stable along the frontier",
        f"longest {compute:.3f} of the shortest",
        compute <= STABLE,
    )
    steps = list(itertools.pairwise(points))
    falls = sum(b["network_us"] < a["network_us"] for a, b in steps)
    yield _row(
        *about,
        "network time decreases with more memory, and makes the step shorter",
        f"{least['network_us'] / 1e3:,.0f} to {shortest['network_us'] / 1e3:,.0f} ms, shorter in"
        f" {falls} of {len(steps)} steps; the whole {least['time_us'] / 1e3:,.0f} to"
        f" {shortest['time_us'] / 1e3:,.0f} ms",
        least["network_us"] - shortest["network_us"] > (least["time_us"] - shortest["time_us"]) / 2,
    )
    time, memory = _shares(found)
    turning = points[found["turning_point"]]
    yield _row(
        *about,
        "the step becomes shorter rapidly up to a turning point, and little beyond",
        f"at {_at(turning)} {time:.0%} of the time that can be saved is, for {memory:.0%} of the"
        " memory",
        time >= 2 * memory,
    )
    shorter = [
        best["time_us"] / each["time_us"]
        for each in mesh
        if (best := _within(points, each["memory_bytes"]))
    ]
    if name != "wide_resnet":
        yield _row(
            *about,
            "the frontier is always below Mesh-TensorFlow's",
            f"{min(shorter, default=1):.3f} to {max(shorter, default=1):.3f} of the time in the"
            f" memory of each of its {len(mesh)} points",
            len(shorter) == len(mesh) and max(shorter) < 1,
        )
        more = mesh[0]["memory_bytes"] / least["memory_bytes"]
        yield _row(
            *about,
            "Mesh-TensorFlow's least memory is significantly higher",
            f"{more:.3f} times: {mesh[0]['memory_bytes'] / 1e9:,.2f} GB",
            more >= STABLE,
        )
    yield _row(
        *about,
        "data parallelism takes much memory and a long step",
        f"{_at(data)}; the shortest step {_at(shortest)}, the least memory {_at(least)}",
        data["memory_bytes"] >= STABLE * shortest["memory_bytes"]
        and data["time_us"] >= STABLE * shortest["time_us"],
    )
    if found.get("optcnn_us"):
        yield _row(
            *about,
            "OptCNN finds the frontier's shortest step",
            f"{found['optcnn_us'] / 1e3:,.1f} ms by its own method, which splits no summed dim and"
            f" takes neighbours in order; {shortest['time_us'] / 1e3:,.1f} ms on the frontier",
            found["optcnn_us"] <= NEAR * shortest["time_us"],
        )
    yield _row(
        *about,
        "ToFu takes little memory and a long step",
        _at(tofu),
        tofu["memory_bytes"] <= STABLE * least["memory_bytes"]
        and tofu["time_us"] >= STABLE * shortest["time_us"],
    )


def _copies(found: Found) -> Row:
    points, turning = found["points"], found["turning_point"]
    most, least = points[0]["copied"], points[-1]["copied"]
    return _row(
        "6",
        NAMES["rnn"],
        "in little memory what is re-scheduled keeps one copy, beyond the turning point both",
        f"where one copy may be kept, it is of {most} edges at {_at(points[0])}, of"
        f" {points[turning]['copied']} at the turning point, of {least} at {_at(points[-1])}",
        most > least,
    )


def _wide(found: Found) -> Iterator[Row]:
    about, points = ("6", NAMES["wide_resnet"]), found["points"]
    mesh, data = found["mesh"], found["baselines"]["data"]
    yield _row(
        *about,
        "Mesh-TensorFlow's frontier is one point, data parallelism",
        f"{len(mesh)} points, from {_at(mesh[0])} to {_at(mesh[-1])}; data parallelism {_at(data)}",
        len(mesh) == 1 and mesh[0]["time_us"] == data["time_us"],
    )
    yield _row(
        *about,
        "data parallelism is Mesh-TensorFlow's shortest step",
        f"{_at(mesh[-1])}; data parallelism {_at(data)}",
        mesh[-1]["time_us"] == data["time_us"],
    )
    more = points[0]["compute_us"] / points[-1]["compute_us"]
    yield _row(
        *about,
        "computation time increases in little memory, by redundant computation",
        f"{more:.3f} times that of the shortest step, which is not by redundant computation",
        "not comparable: no configuration here computes anything twice",
    )


def _sizes(found: Sequence[Found]) -> Iterator[Row]:
    if len(found) < 2:
        return
    found = sorted(found, key=lambda each: each["points"][0]["memory_bytes"])
    about = ("7a", "Transformer")
    shares = [_shares(each) for each in found]
    yield _row(*about, "frontiers of all sizes have similar shapes", *_similar(shares))
    turning = [each["points"][each["turning_point"]] for each in found]
    held = [each["memory_bytes"] for each in turning]
    yield _row(
        *about,
        "turning points of larger models are at more memory",
        "; ".join(map(_at, turning)),
        held == sorted(held) and len(set(held)) == len(held),
    )
    yield _differ(about, "sizes", found)


def _similar(shares: Sequence[tuple[float, float]]) -> tuple[str, bool]:
    says = "; ".join(f"{time:.0%} of the time for {memory:.0%}" for time, memory in shares)
    apart = max(max(each) - min(each) for each in zip(*shares))
    return f"turning points at {says} of the memory", apart <= ALIKE


def _differ(about: tuple[str, str], what: str, found: Sequence[Found]) -> Row:
    degrees = [each["degrees"] for each in found]
    same = sum(len({each[op] for each in degrees}) == 1 for op in degrees[0])
    share = 1 - same / len(degrees[0])
    return _row(
        *about,
        f"different {what} have different strategies",
        f"{share:.0%} of the operators are split otherwise at the turning points",
        share > 0,
    )


def _networks(found: Sequence[Any]) -> Iterator[Row]:
    about = ("7b", "Transformer")
    yield _row(*about, "all networks have similar shapes", *_similar([_shares(f) for f in found]))
    turning = [each["points"][each["turning_point"]] for each in found]
    says = "; ".join(map(_at, turning)) + " (no RDMA, RDMA, 4x)"
    yield _row(
        *about,
        "turning points are at almost the same memory",
        says,
        _spread([each["memory_bytes"] for each in turning]) <= NEAR,
    )
    ratio = turning[2]["time_us"] / turning[0]["time_us"]
    yield _row(
        *about,
        "4x RDMA takes half as long as no RDMA at the turning point",
        f"{ratio:.2f} of it",
        0.4 <= ratio <= 0.6,
    )
    yield _differ(about, "networks", found)


def _links(nvlink: Found, pcie: Found) -> Iterator[Row]:
    ratios = [
        best["time_us"] / each["time_us"]
        for each in pcie["points"]
        if (best := _within(nvlink["points"], each["memory_bytes"]))
    ]
    yield _row(
        "7c",
        "Transformer",
        "NVLink takes significantly shorter than PCIe in the same memory",
        f"{min(ratios):.2f} to {max(ratios):.2f} of the time" if ratios else "no common memory",
        bool(ratios) and max(ratios) <= LESS,
    )


def _devices(name: str, found: Mapping[int, Found]) -> Iterator[Row]:
    about = ("8", NAMES[name])
    fits = {
        "found": [n for n, each in found.items() if fitting(each)],
        "data parallelism": [n for n, f in found.items() if _fits(f["baselines"]["data"])],
        "OptCNN": [n for n, f in found.items() if _fits(f["points"][-1])],
        "ToFu": [n for n, f in found.items() if _fits(f["baselines"]["tofu"])],
    }
    says = "; ".join(
        f"{who}: on {', '.join(map(str, where)) or 'none'}" for who, where in fits.items()
    )
    both = (*fits["data parallelism"], *fits["OptCNN"])
    yield _row(
        *about,
        "on 8 devices something is found that fits, data parallelism and OptCNN do not",
        f"fits of {', '.join(map(str, found))} devices: {says}",
        8 in fits["found"] and 8 not in both,
    )
    yield _row(
        *about,
        "data parallelism and OptCNN need 16 devices",
        "as above",
        8 not in both and both.count(16) == 2,
    )
    times = [found[n]["points"][-1]["time_us"] for n in (8, 16)]
    yield _row(
        *about,
        "the step is hardly shorter on 16 devices than on 8",
        f"{times[1] / times[0]:.2f} of it, whatever it holds: {times[0] / 1e3:,.0f} and"
        f" {times[1] / 1e3:,.0f} ms",
        LESS <= times[1] / times[0] <= 1,
    )
    tofu = [found[n]["baselines"]["tofu"] for n in (8, 16)]
    yield _row(
        *about,
        "ToFu fits on 8 devices, but takes longer on 16",
        f"{tofu[0]['time_us'] / 1e3:,.0f} and {tofu[1]['time_us'] / 1e3:,.0f} ms",
        8 in fits["ToFu"] and tofu[1]["time_us"] > tofu[0]["time_us"],
    )
    network = [each["network_us"] / 1e3 for each in tofu]
    yield _row(
        *about,
        "which is by messages between machines",
        f"network {network[0]:,.0f} ms inside of one, {network[1]:,.0f} ms on two",
        network[1] > network[0],
    )
    chosen = {n: best for n, each in found.items() if (best := fitting(each))}
    places = {
        n: sum(point["time_us"] < each["time_us"] for point in found[n]["points"])
        for n, each in chosen.items()
    }
    yield _row(
        *about,
        "few devices: little memory; enough: the shortest step",
        "; ".join(
            f"{n}: {_at(each)}, {places[n]} of {len(found[n]['points'])} points are shorter"
            for n, each in chosen.items()
        )
        or "nothing fits",
        len(places) > 1 and places[max(places)] == 0 and places[min(places)] > 0,
    )


def fitting(found: Found) -> Found | None:
    """Return the shortest step by sums of the points that fit when simulated; None: none does."""
    fits = [each for each in found["points"] if each["missing_bytes"] == 0]
    return min(fits, key=lambda each: each["time_us"], default=None) or found["fastest"]


def _fits(point: Found) -> bool:
    return not point["missing_bytes"]
