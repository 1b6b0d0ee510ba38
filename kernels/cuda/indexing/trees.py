"""Decision trees: a thread takes a sample down a tree."""

from __future__ import annotations

from soapstone.ir.ops.indexing.trees import COMPARISONS, MISSING
from soapstone.kernels.cuda.elementwise.text import wide
from soapstone.kernels.cuda.entry import DeviceEntry
from soapstone.kernels.cuda.indexing.rows import OUTSIDE
from soapstone.kernels.cuda.substrate.arrays import views, zeros
from soapstone.kernels.cuda.substrate.element import each_element, place
from soapstone.kernels.entry import Call
from soapstone.kernels.registry import variant


@variant("tree_leaves", "numba", processor="cuda")
def tree_leaves(call: Call) -> DeviceEntry:
    """Return the entry of the leaf of each tree that each sample comes to."""
    (x, threshold, feature, yes, no, comparison, roots), (y,) = views(call)
    nodes, features, kind = threshold.size, x.shape[1], wide(x.dtype)
    status = zeros(1, "int32", call.outputs[0])
    lines = [f"holds = value != value and way >= {MISSING}"]
    lines += [
        f"if way % {MISSING} == {n}: holds = holds or value {sign} limit"
        for n, sign in enumerate(COMPARISONS[1:], 1)
    ]
    body = [
        f"node = int64(roots[{place('roots', ['at_1'])}])",
        "steps = 0",
        f"while steps <= {nodes}:",
        f"    if node < 0 or node >= {nodes}:",
        f"        status[0] = {OUTSIDE}",
        "        break",
        f"    way = comparison[{place('comparison', ['node'])}]",
        f"    if way % {MISSING} == 0: break",
        f"    column = int64(feature[{place('feature', ['node'])}])",
        f"    if column < 0 or column >= {features}:",
        f"        status[0] = {OUTSIDE}",
        "        break",
        f"    if steps == {nodes}: break",
        f"    value = {kind}(x[{place('x', ['at_0', 'column'])}])",
        f"    limit = {wide(threshold.dtype)}(threshold[{place('threshold', ['node'])}])",
        *("    " + line for line in lines),
        f"    if holds: node = int64(yes[{place('yes', ['node'])}])",
        f"    else: node = int64(no[{place('no', ['node'])}])",
        "    steps += 1",
        f"y[{place('y', ['at_0', 'at_1'])}] = int32(node)",
    ]
    operands = {"x": x, "threshold": threshold, "feature": feature, "yes": yes, "no": no}
    operands |= {"comparison": comparison, "roots": roots, "y": y}
    made = each_element(body, y.shape, operands, status)
    needed = f"nodes 0 to {nodes - 1} and features 0 to {features - 1} needed"
    text = f"tree_leaves: a node or a feature outside found, {needed}"
    return DeviceEntry(made.launches, status, {OUTSIDE: text})
