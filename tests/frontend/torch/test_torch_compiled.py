"""`torch.compile` by soapstone gives what eager PyTorch gives, and tells what stayed PyTorch's."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="pip install soapstone[torch]")

import soapstone.torch  # noqa: E402
from soapstone.ir.errors import GraphError  # noqa: E402
from soapstone.runtime import MachineError  # noqa: E402

nn = torch.nn
F = nn.functional


@pytest.fixture(autouse=True)
def _anew() -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()


def compiled_as_eager(model: Any, *inputs: Any, compiled: Any = None) -> Any:
    """Compare a model compiled with itself, and return its report."""
    compiled = compiled or soapstone.torch.compile(model, threads=1)
    with torch.no_grad():
        for _ in range(2):
            needed, found = model(*inputs), compiled(*inputs)
            several = needed if isinstance(needed, tuple) else (needed,)
            made = found if isinstance(found, tuple) else (found,)
            for one, other in zip(made, several, strict=True):
                assert one.dtype == other.dtype
                torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    return soapstone.torch.report(compiled)


def perceptron() -> Any:
    return nn.Sequential(
        nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 4)
    )


def network() -> Any:
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(8, 16, 3, stride=2, groups=2, bias=False), nn.GroupNorm(4, 16), nn.SiLU()),
        *(nn.AvgPool2d(2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 5), nn.Softmax(-1)),
    ).eval()


def encoder(**options: Any) -> Any:
    return nn.TransformerEncoderLayer(16, 4, 32, batch_first=True, **options).eval()


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (perceptron, (3, 8)),
        (network, (2, 3, 16, 16)),
        (encoder, (2, 5, 16)),
        (lambda: encoder(norm_first=True, activation="gelu"), (2, 5, 16)),
        (lambda: nn.TransformerEncoder(encoder(), 2, enable_nested_tensor=False), (2, 5, 16)),
    ],
)
def test_models_are_one_session(make: Any, shape: tuple[int, ...]) -> None:
    model = make()
    report = compiled_as_eager(model, torch.randn(shape))
    assert [each.parts for each in report.graphs] == [1]
    read = {name for name in model.state_dict() if "num_batches" not in name}
    assert report.graphs[0].weights == len(read)
    assert report.plain == {} and all(each.left == {} for each in report.graphs)
    assert report.graphs[0].inputs == (f"float32{list(shape)}",), "parameters are no inputs"
    assert "0 left to PyTorch" in str(report)


def test_masks_of_an_encoder_layer() -> None:
    layer, x = encoder(), torch.randn(2, 5, 16)
    later = nn.Transformer.generate_square_subsequent_mask(5)
    padded = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    for masks in ((later, None), (None, padded), (later.isinf(), padded)):
        torch._dynamo.reset()
        report = compiled_as_eager(layer, x, *masks)
        assert [(each.parts, dict(each.left)) for each in report.graphs] == [(1, {})], report


def test_many_models_made_of_layers_alone_are_compiled() -> None:
    """PyTorch keeps eight graphs of one code, and calls all such models by the same."""
    for width in range(1, 11):
        model = torch.nn.Sequential(torch.nn.Linear(width, 3)).eval()
        compiled = soapstone.torch.compile(model)
        with torch.no_grad():
            compiled(torch.ones(2, width))
        assert soapstone.torch.report(compiled).graphs, width


def test_the_backend_has_a_name() -> None:
    if "soapstone" not in torch._dynamo.list_backends():
        pytest.skip("the package was installed before it had this entry point")
    model = perceptron()
    other = perceptron()
    compiled = torch.compile(model, backend="soapstone")
    report = compiled_as_eager(model, torch.randn(2, 8), compiled=compiled)
    assert report.graphs[0].converted["addmm"] == 3
    assert soapstone.torch.report(torch.compile(other, backend="soapstone")).graphs == ()
    assert "nothing ran yet" in str(soapstone.torch.report(soapstone.torch.compile(other)))
    compiled = torch.compile(other, backend="soapstone")
    compiled(torch.randn(2, 8)).sum().backward()
    assert "gradients are recorded" in str(soapstone.torch.report(compiled))


FUNCTIONS = {
    "arithmetic": lambda x: (x * 2 - 1) / 3 + x**2 - torch.maximum(x, -x) + (1 - x),
    "elements": lambda x: torch.exp(-x.abs()).log() + x.sin() + x.erf() + (x * x + 1).rsqrt(),
    "activations": lambda x: F.gelu(x) + F.elu(x) + F.hardswish(x) + F.softplus(x) + F.mish(x),
    "compared": lambda x: ((x > 0) & ~(x < 0.5), x == x, (x != 0) | (x <= 1)),
    "truth": lambda x: ((x > 1).any(), (x > -1).all(-1), x.bool().any(1, keepdim=True)),
    "chosen": lambda x: torch.where(x > 0, x, 0.0).masked_fill(x > 1, float("-inf")).clamp(min=-9),
    "folds": lambda x: (x.sum(), x.mean(-1), x.amax(1, keepdim=True), x.argmax(-1), x.var(-1)),
    "moves": lambda x: (x.permute(1, 0, 2)[1:, 0], x.flatten(1)[:, ::2], x[:, None] + x[:1, None]),
    "repeats": lambda x: x.repeat(2, 1, 1) + x[:1].expand(6, -1, -1),
    "joins": lambda x: torch.cat([x, x.flip(1), F.pad(x, (1, 1))[..., 1:-1]], 1),
    "parts": lambda x: tuple(part * 2 for part in x.split(2, -1)) + x.unbind(1)[:1],
    "products": lambda x: (x @ x.transpose(1, 2)).softmax(-1) @ x,
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True),
    "types": lambda x: (x.double() * 2, (x * 3).to(torch.int64) + 1, x.half() + 1, (x > 0) + 1),
    "triangles": lambda x: x.tril() + x.triu(1) + torch.arange(6.0),
    "filled": lambda x: (lambda y: (y.__setitem__((slice(None), 0), 0.0), y)[1])(x.clone()) * 2,
    "written": lambda x: (lambda y: (y[:, 1:3].mul_(2), y[..., 0].add_(1), y)[2])(x.clone()) - 1,
    "indexed": lambda x: x[:, torch.tensor([0, -1])] + x[torch.tensor([[1]]), torch.arange(2)],
    "apart": lambda x: x[:, :, torch.tensor([3, 1])][torch.tensor([0, 2]), :, torch.tensor([0, 1])],
    "larger": lambda x: F.interpolate(x[None], scale_factor=2, mode="nearest") + 1,
    "instances": lambda x: F.instance_norm(x) + F.max_pool1d(F.avg_pool1d(x, 3, 1, 1), 3, 1, 1),
    "rms": lambda x: F.rms_norm(x, (6,)) + x % 0.7 + x.prod(-1, keepdim=True),
    "places": lambda x: x.gather(2, (x > 0).long()) + x.index_select(1, torch.tensor([2, 0, 1, 1])),
    "twice": lambda x: (x + 1, x + 1, x),
    "empty": lambda x: x[:0] * 2,
    "scalar": lambda x: x[0, 0, 0] * 2,
}  # fmt: skip


@pytest.mark.parametrize("name", FUNCTIONS)
def test_operators(name: str) -> None:
    function = FUNCTIONS[name]
    report = compiled_as_eager(function, torch.randn(3, 4, 6))
    assert report.graphs and report.plain == {}
    assert all(each.left == {} for each in report.graphs), report


@pytest.mark.parametrize("dtype", (torch.bool, torch.uint8, torch.float32))
def test_any_and_all_of_nothing(dtype: Any) -> None:
    def function(x: Any) -> Any:
        return x.any(), x.all(), x.any(1), x.all(1), x.any(0, keepdim=True), x.all(0)

    for shape in ((0, 3), (3, 0), (2, 3)):
        report = compiled_as_eager(function, torch.randint(0, 3, shape).to(dtype))
    assert all(each.left == {} for each in report.graphs), report


def test_what_has_no_rule_stays_and_is_told() -> None:
    model = nn.Sequential(nn.Linear(8, 6), nn.ReLU())

    def function(x: Any) -> Any:
        y = model(x)
        return model(F.pad(torch.sort(y, -1).values, (1, 1)))

    report = compiled_as_eager(function, torch.randn(3, 8))
    (graph,) = report.graphs
    assert graph.left == {"sort: no rule": 1} and graph.parts == 2
    assert graph.converted["addmm"] == 2
    assert "1 x sort: no rule" in str(report)
    left = compiled_as_eager(lambda x: x * 2, torch.randn(3, dtype=torch.complex64))
    assert left.graphs[0].left == {"mul: type complex64": 1} and left.graphs[0].parts == 0


def test_bfloat16_is_computed_in_single_precision_and_rounded() -> None:
    for model, x in (
        (network(), torch.randn(2, 3, 24, 24)),
        (encoder(), torch.randn(2, 5, 16)),
    ):
        exact = model.double()(x.double())
        narrow = model.bfloat16()
        compiled = soapstone.torch.compile(narrow, threads=1)
        with torch.no_grad():
            found = compiled(x.bfloat16())
        report = soapstone.torch.report(compiled)
        assert found.dtype == torch.bfloat16 and not any(g.left for g in report.graphs), report
        torch.testing.assert_close(found.double(), exact, rtol=0.05, atol=0.05)


def test_shapes_come_as_they_come() -> None:
    model = perceptron()
    compiled = soapstone.torch.compile(model, threads=1)
    for size in (2, 3, 5, 2, 1):
        report = compiled_as_eager(model, torch.randn(size, 8), compiled=compiled)
    shapes = {shape for graph in report.graphs for shape in graph.inputs}
    assert {f"float32[{n}, 8]" for n in (1, 2, 3, 5)} <= shapes


def test_weights_that_change_are_seen() -> None:
    model = perceptron()
    compiled = soapstone.torch.compile(model, threads=1)
    x = torch.randn(2, 8)
    for _ in range(6):
        compiled_as_eager(model, x, compiled=compiled)
        with torch.no_grad():
            model[0].weight.add_(0.1)
    model.load_state_dict(perceptron().state_dict())
    compiled_as_eager(model, x, compiled=compiled)
    model[0].weight = nn.Parameter(torch.randn(32, 8))
    compiled_as_eager(model, x, compiled=compiled)


def test_what_is_changed_in_place_is_changed() -> None:
    def function(x: Any) -> Any:
        x.add_(1)
        return x * 2

    compiled = soapstone.torch.compile(function, threads=1)
    x = torch.zeros(3)
    with torch.no_grad():
        np.testing.assert_array_equal(compiled(x), [2, 2, 2])
        np.testing.assert_array_equal(x, [1, 1, 1])

    def later(x: Any) -> Any:
        before = torch.sort(x).values * 3
        x.mul_(2)
        return torch.sort(before + x).values

    one, other = torch.randn(5), torch.randn(5)
    other.copy_(one)
    with torch.no_grad():
        torch.testing.assert_close(soapstone.torch.compile(later)(one), later(other))
    torch.testing.assert_close(one, other)
    norm = nn.BatchNorm1d(4).train()
    twin = nn.BatchNorm1d(4).train()
    compiled = soapstone.torch.compile(norm, threads=1)
    with torch.no_grad():
        for _ in range(5):
            y = torch.randn(6, 4)
            torch.testing.assert_close(compiled(y), twin(y))
    torch.testing.assert_close(norm.running_mean, twin.running_mean)


def test_inputs_that_share_memory_change_together() -> None:
    def function(x: Any, y: Any) -> Any:
        x.add_(1)
        return y * 2, x.sum()

    compiled = soapstone.torch.compile(function, threads=1)
    pairs = (
        lambda of: (of[:4], of[2:]),
        lambda of: (of[2:], of[:4]),
        lambda of: (of[:, :3], of[:, 2:5]),
        lambda of: (of[:3], of[3:]),
        lambda of: (of, of.view(-1)[7:9]),
    )
    for pair in pairs:
        ours, theirs = (torch.arange(30.0).view(6, 5) for _ in range(2))
        with torch.no_grad():
            found, needed = compiled(*pair(ours)), function(*pair(theirs))
        torch.testing.assert_close(found, needed)
        torch.testing.assert_close(ours, theirs)
    report = soapstone.torch.report(compiled)
    assert report.plain == {"an input that is changed shares memory with another": 4}
    assert report.graphs


def test_results_share_memory_as_in_pytorch() -> None:
    """Views of an input, and of another result, stay views; an input that changed is itself."""

    def several(x: Any, y: Any) -> Any:
        made = x * 2
        return x.view(-1), x.t(), x.split(2)[1], made, made[1], made.view(-1), y.add_(1), y[0]

    def written(run: Any) -> list[Any]:
        x, y = torch.arange(12.0).view(4, 3), torch.zeros(2)
        with torch.no_grad():
            found = run(x, y)
        x[2] += 100
        y += 10
        found[3][1] = -1
        return [x, y, *found]

    compiled = soapstone.torch.compile(several, threads=1)
    for _ in range(2):
        for found, needed in zip(written(compiled), written(several), strict=True):
            torch.testing.assert_close(found, needed, rtol=0, atol=0)
    assert sum(graph.parts for graph in soapstone.torch.report(compiled).graphs) > 0


def test_queries_that_see_no_key_and_signs_of_nan() -> None:
    q, k, v = (torch.randn(2, 2, 3, 4) for _ in range(3))
    seen = torch.ones(3, 3, dtype=torch.bool)
    seen[1] = False
    attention = F.scaled_dot_product_attention
    for mask in (seen, torch.where(seen, 0.5, -torch.inf)):
        report = compiled_as_eager(lambda q, k, v, m: attention(q, k, v, m), q, k, v, mask)
        assert not sum(report.graphs[0].left.values())
    q = torch.randn(2, 6, 3, 4)
    for told in ({"is_causal": True}, {"scale": 0.3, "attn_mask": torch.randn(3, 3)}):
        grouped = partial(
            attention, enable_gqa=True, **told
        )  # two heads of keys for six of queries
        report = compiled_as_eager(grouped, q, k, v)
        assert not sum(report.graphs[0].left.values()), report
    compiled_as_eager(torch.sign, torch.tensor([torch.nan, -2, 0, torch.inf]))


def test_threads_may_share_a_compiled_model() -> None:
    model = perceptron()
    compiled = soapstone.torch.compile(model, threads=1, dynamic=True)
    inputs = [torch.randn(n % 5 + 2, 8) for n in range(20)]
    with torch.no_grad():
        needed = [model(x) for x in inputs]
    wrong: list[Any] = []

    def serve() -> None:
        try:
            with torch.no_grad():
                for x, y in zip(inputs, needed):
                    torch.testing.assert_close(compiled(x), y, rtol=1e-5, atol=1e-5)
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=serve) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_number_that_became_an_input_is_told_with_what_to_do() -> None:
    first, second = (nn.LayerNorm(4, eps=eps) for eps in (1e-5, 1e-3))
    compiled_as_eager(first, torch.randn(2, 4))
    report = compiled_as_eager(second, torch.randn(2, 4))  # as PyTorch does, if not here
    if report.graphs:
        pytest.skip("this PyTorch keeps the number")
    assert any("specialize_float = True" in why for why in report.plain)


def test_gradients_are_left_to_pytorch() -> None:
    model = perceptron()
    compiled = soapstone.torch.compile(model, threads=1)
    x = torch.randn(2, 8)
    compiled(x).sum().backward()
    assert model[0].weight.grad.abs().sum() > 0
    report = soapstone.torch.report(compiled)
    assert report.graphs == ()
    assert report.plain == {"gradients are recorded; torch.no_grad() needed": 1}
    with pytest.raises(GraphError, match="report: int found"):
        soapstone.torch.report(3)
    with pytest.raises(MachineError, match="'threads' is 0"):
        soapstone.torch.compile(model, threads=0)
