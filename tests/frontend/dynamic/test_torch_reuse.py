"""Recursive PyTorch models with reuse: values and gradients as without it."""

import gc
import subprocess
import sys
import threading
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed (pip install soapstone[torch])")

from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402

from soapstone.ir.errors import GraphError  # noqa: E402
from soapstone.torch import reuse  # noqa: E402

H = 4


class Network(nn.Module):
    """Cells of several kinds over a table of words."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.words = nn.Embedding(7, H)
        self.leaf, self.inner = nn.Linear(H, 3 * H), nn.Linear(2 * H, 5 * H)
        self.lstm, self.gru = nn.LSTMCell(H, H), nn.GRUCell(H, H)
        self.scale = nn.Parameter(torch.randn(H))
        self.classes = nn.Linear(H, 3)
        self.norm = nn.LayerNorm(H)

    def leaves(self, word: int) -> Any:
        i, o, u = self.leaf(self.words(torch.tensor([word]))).split(H, 1)
        c = i.sigmoid() * u.tanh()
        return o.sigmoid() * c.tanh(), c

    def both(self, left: Any, right: Any) -> Any:
        x = self.inner(torch.cat([left[0], right[0]], 1))
        i, f, g, o, u = x.chunk(5, dim=-1)
        c = torch.sigmoid(i) * torch.tanh(u) + f.sigmoid() * left[1] + g.sigmoid() * right[1]
        return o.sigmoid() * c.tanh(), c

    def judged(self, state: Any, label: int) -> Any:
        return functional.cross_entropy(self.classes(state[0]), torch.tensor([label]))

    def of(self, tree: Any) -> Any:
        return self.leaves(tree) if isinstance(tree, int) else self.both(*map(self.of, tree))

    def forward(self, trees: Any) -> Any:
        return torch.stack([self.judged(self.of(t), k % 3) for k, t in enumerate(trees)]).mean()

    def program(self, seed: int) -> Any:
        """Return a loss that a random program makes; it looks at values on the way."""
        draw = np.random.default_rng(seed)
        pool = [self.leaves(int(draw.integers(7)))]
        loss: Any = 0
        for _ in range(int(draw.integers(1, 40))):
            one, other = (pool[int(draw.integers(len(pool)))] for _ in range(2))
            h, c = one
            kind = int(draw.integers(14))
            if kind < 3:
                pool.append(self.leaves(int(draw.integers(7))))
            elif kind < 6:
                pool.append(self.both(one, other))
            elif kind == 6:
                pool.append(self.lstm(h, other))
            elif kind == 7:
                pool.append((self.gru(h, other[0]), c))
            elif kind == 8:
                given = torch.tensor(draw.standard_normal((1, H)), dtype=torch.float32)
                pool.append((self.norm(h * self.scale + given) / 2, -c))
            elif kind == 9:
                rows = torch.stack([h, other[0]], 1).sum(1) + torch.cat([h, c]).mean(0, True)
                pool.append((1 - rows.relu(), (0.1 * c).exp()))
            elif kind == 10:
                flat = h.squeeze(0).view(2, -1).reshape(-1)[None]
                pool.append((functional.softmax(flat, 1), torch.log(1 + c * c)))
            elif kind == 11:
                h = h.unsqueeze(1).transpose(1, 2)[:, :, 0] @ torch.eye(H)
                pool.append(
                    (h - self.scale, torch.addmm(self.scale, c, self.leaf.weight.t()[:, :H]))
                )
            elif kind == 12 and h.sum() < 1e9:  # looked at
                pool.append((h.cumsum(1), c))  # has no rule
            else:
                loss += self.judged(one, int(draw.integers(3)))
                log = functional.log_softmax(h, dim=1)
                loss = loss + functional.nll_loss(log, torch.tensor([1])) * 0.5
        return loss + sum(h.square().sum() for h, _ in pool[-3:])


def gradients(network: Network, loss: Any) -> list[Any]:
    network.zero_grad()
    loss.backward()
    return [p.grad.clone() if p.grad is not None else None for p in network.parameters()]


def assert_equal(network: Network, made: Any, plain: Any) -> None:
    assert torch.allclose(made.detach(), plain.detach(), rtol=1e-5, atol=1e-5)
    for one, other in zip(gradients(network, made), gradients(network, plain)):
        if one is None or other is None:  # zeros, of rows that run together with what is used
            assert other is None and (one is None or not one.any())
        else:
            scale = max(1.0, float(other.abs().max()))
            assert float((one - other).abs().max()) <= 1e-5 * scale


TREES = [((0, 1), 2), (3, (1, (2, 0))), 4, (((0, 1), 2), (0, 1)), ((5, 6), (6, 5))]


@pytest.mark.parametrize("how", ["off", "batch", "all"])
def test_trees_are_as_without(how: str) -> None:
    network = Network(0)
    fast = reuse(network, reuse=how, pattern_frequency=2)
    for _ in range(3):
        assert_equal(network, fast(TREES), network(TREES))
    report = fast.report()
    assert sum(cell.runs for cell in report.cells) <= sum(cell.calls for cell in report.cells)
    assert not report.plain
    assert "recording" in str(report) or how == "off"


def test_patterns_run_together() -> None:
    network = Network(0)
    fast = reuse(network, pattern_frequency=2)
    for _ in range(5):
        fast([((0, 1), 2), ((3, 4), 5), ((6, 5), 4)] * 2 + [((1, 2), (3, 4))])
    often = [cell for cell in fast.report().cells if cell.calls > 2 * cell.runs]
    assert max(cell.operators for cell in often) == 15  # both functions of the program
    assert 9 in {cell.operators for cell in often}


@pytest.mark.parametrize("seed", range(50))
def test_random_programs(seed: int) -> None:
    network = Network(seed % 5)
    ways = [reuse(network.program, reuse=how, pattern_frequency=3) for how in ("all", "batch")]
    for program in range(2):
        plain = network.program(100 * seed + program)
        for way in ways:
            assert_equal(network, way(100 * seed + program), network.program(100 * seed + program))
        with ways[0]:
            made = network.program(100 * seed + program)
            made = made + 0.0
        assert torch.allclose(made.tensor(), plain, rtol=1e-5, atol=1e-5)


def test_a_session_of_steps_trains_alike() -> None:
    losses = []
    for how in ("off", "all"):
        network = Network(1)
        optimizer = torch.optim.Adagrad(network.parameters(), 0.05)
        with reuse(network, reuse=how) as session:
            for step in range(6):
                optimizer.zero_grad()
                loss = session(TREES[step % 3 :])
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
    assert losses[6:] == pytest.approx(losses[:6], abs=1e-5)


def test_what_is_recorded_reads_tensors_as_they_were() -> None:
    network = Network(0)
    given = torch.ones(1, H)
    with reuse(network):
        made = network.gru(given, network.leaves(1)[0])
        with torch.no_grad():
            given.zero_()
            network.scale.zero_()
            network.gru.weight_ih.zero_()
        after = network.gru(given, network.leaves(1)[0])
    assert not torch.allclose(made.tensor(), after.tensor())
    assert torch.allclose(after.tensor(), network.gru(given, network.leaves(1)[0]))


def test_modules_that_change_are_not_taken_for_what_they_were() -> None:
    network = Network(0)
    seen: list[Any] = []

    def ends() -> Any:
        x = network.words(torch.tensor([1]))
        h, _ = network.lstm(network.norm(x), (x * 2, x * 3))
        return network.leaf(h)

    fast = reuse(ends)

    def compared() -> None:
        for _ in range(2):
            assert_equal(network, fast().sum(), ends().sum())

    compared()
    network.leaf.weight = nn.Parameter(torch.ones(3 * H, H))
    compared()
    network.leaf.bias = None
    compared()
    network.norm.eps = 0.5
    compared()
    network.words.padding_idx = 1  # whose gradient is zero
    compared()
    network.leaf.register_forward_hook(lambda module, given, made: seen.append(1) or made * 2)
    network.lstm.register_forward_pre_hook(lambda module, given: seen.append(2))
    compared()
    assert seen == [2, 1] * 4
    network.norm.forward = lambda x: x - 1
    compared()
    assert all("__call__" not in vars(kind) for kind in (nn.Linear, nn.Embedding, nn.LSTMCell))


def test_calls_that_somebody_else_replaced_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    network = Network(0)
    plain = network.leaves(1)[0]

    def doubled(module: Any, *args: Any) -> Any:
        return nn.Module.__call__(module, *args) * 2

    monkeypatch.setattr(nn.Linear, "__call__", doubled, raising=False)
    made = reuse(network.leaves)(1)[0]
    assert torch.allclose(made, network.leaves(1)[0])
    assert not torch.allclose(made, plain)
    assert nn.Linear.__call__ is doubled


def test_other_threads_are_not_recorded() -> None:
    network, made = Network(0), []

    def ends() -> Any:
        h, _ = network.leaves(1)
        other = threading.Thread(target=lambda: made.append(network.leaf(torch.ones(1, H))))
        other.start()
        other.join()
        return h

    assert torch.equal(reuse(ends)(), network.leaves(1)[0])
    assert type(made[0]) is torch.Tensor


def test_changes_in_place() -> None:
    network = Network(0)
    with reuse(network):
        h, c = network.leaves(1)
        before = h.tensor().clone()
        total, alias = h * 1.0, None
        alias = total
        used = total * 2
        total += c
        assert alias is total
        assert torch.allclose(used.tensor(), before * 2)
        assert torch.allclose(total.tensor(), before + c.tensor())
        part = h[:, :2]
        gates = network.inner(torch.cat([h, c], 1))
        for other in (network.inner(torch.cat([c, h], 1)), gates):  # by the shorter way too
            other.split(H, 1)
            with pytest.raises(GraphError, match="in place"):
                other += 1
        for wrong in (lambda: h.add_(1), lambda: torch.relu_(h), lambda: part.__iadd__(1)):
            with pytest.raises(GraphError, match="in place"):
                wrong()
        with pytest.raises(GraphError, match="in place"):
            functional.relu(h, True)
        with pytest.raises(GraphError):
            h[0] = 1


def test_without_gradients_and_in_evaluation() -> None:
    network = Network(0).eval()
    fast = reuse(network)
    with torch.no_grad():
        assert torch.allclose(fast(TREES), network(TREES))
        assert not fast(TREES).requires_grad
    assert fast(TREES).requires_grad
    assert next(fast.parameters()) is next(network.parameters())


def test_an_error_leaves_nothing_behind() -> None:
    network = Network(0)

    def wrong(deep: int) -> Any:
        h, _ = network.leaves(deep)
        kept.append(h)
        return network.inner(h)  # of another width

    kept: list[Any] = []
    fast = reuse(wrong)
    for _ in range(2):
        with pytest.raises(RuntimeError):
            fast(1)
    with pytest.raises(GraphError, match="left"):
        kept[0].tensor()
    assert_equal(network, reuse(network)(TREES), network(TREES))
    with pytest.raises(GraphError, match="found"):
        reuse(network, reuse="some")


def test_dropout_is_of_equal_distribution() -> None:
    network = Network(0)

    def dropped(count: int) -> Any:
        words = [network.words(torch.tensor([1])) for _ in range(count)]
        return torch.cat([functional.dropout(word, 0.25, True) for word in words])

    torch.manual_seed(3)
    made = reuse(dropped)(2000) / network.words.weight[1]
    assert float((made == 0).float().mean()) == pytest.approx(0.25, abs=0.03)
    assert torch.allclose(made[made != 0], torch.tensor(4 / 3))
    assert len({tuple(row) for row in (made == 0).tolist()}) == 16


def test_unknown_operators_run_plainly() -> None:
    network = Network(0)
    fast = reuse(lambda: network.leaves(1)[0].cumsum(1))
    assert torch.allclose(fast(), network.leaves(1)[0].cumsum(1))
    assert fast.report().plain == {"cumsum: no rule": 1}


def test_zeros_of_both_signs_are_told_apart() -> None:
    fast = reuse(lambda by: torch.div(torch.ones(2) * weight, by), pattern_frequency=1)
    weight = nn.Parameter(torch.ones(2))
    assert [float(fast(by)[0].detach()) for by in (0.0, -0.0, 0.0)] == [np.inf, -np.inf, np.inf]


def test_slices_by_tensors_run_plainly() -> None:
    words = torch.arange(4.0).requires_grad_()
    fast = reuse(lambda end: (words * torch.ones(4))[: torch.tensor(end)])
    assert [fast(end).tolist() for end in (1, 3)] == [[0.0], [0.0, 1.0, 2.0]]


def test_the_collector_goes_on_where_nothing_is_recorded() -> None:
    weight = nn.Parameter(torch.ones(3))
    reuse(lambda: torch.matmul(torch.ones(3), weight))()  # of vectors: no rule
    assert gc.isenabled()


@pytest.mark.long
@pytest.mark.parametrize(("depth", "ends"), [(10_000, "ok"), (200_000, "RecursionError")])
def test_modules_that_call_themselves_end_no_process(depth: int, ends: str) -> None:
    done = subprocess.run([sys.executable, "-c", DEEP, str(depth)], capture_output=True, text=True)
    assert ends in (done.stdout.split() or [done.stderr[-300:]])[-1], done.returncode
    if sys.platform == "linux":
        assert done.returncode == 0


DEEP = """
import sys, torch, soapstone.torch
class Chain(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(2, 2)
    def forward(self, n):
        return self.linear(self(n - 1)).tanh() if n else torch.ones(1, 2)
try:
    print("ok", soapstone.torch.reuse(Chain())(int(sys.argv[1])).shape == (1, 2) and "ok")
except RecursionError as error:
    print(type(error).__name__)
"""


def test_the_package_needs_no_torch() -> None:
    code = "import soapstone, sys; assert 'torch' not in sys.modules; sys.modules['torch'] = None\n"
    code += "try:\n soapstone.torch\nexcept ImportError as e:\n assert '[torch]' in str(e), e\n"
    code += "else:\n raise AssertionError"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
