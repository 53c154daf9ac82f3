"""Gradients by their factors against rows, and records that try to look smaller than they are."""

import math

import pytest
import torch
from reference import error
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from opacus_expm.gathering import gradients as gradients_module
from opacus_expm.gathering import looks
from opacus_expm.gathering.clipping import ClippedAdder
from opacus_expm.gathering.gradients import Factored, RecordGradients
from opacus_expm.gathering.measurement import Measurement
from opacus_expm.gathering.passes import Workbench
from opacus_expm.subspaces.metric import Block, Metric, Root
from opacus_expm.subspaces.sparse import Sparse


def summed(records, scales):
    """Σ_i w_i g_i, with weights from the norms."""
    total = torch.zeros(records.size, dtype=torch.float64)
    records.add(total, scales)
    return total


class Positions(nn.Module):
    """A layer that acts at three positions, then one at a single position."""

    def __init__(self):
        super().__init__()
        self.each, self.head = nn.Linear(9, 8), nn.Linear(8, 2)

    def forward(self, x):
        return self.head(torch.tanh(self.each(x)).mean(1))


class Shared(nn.Module):
    """Two layers with one bias, which belongs to neither."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 2), nn.Linear(4, 2)
        self.second.bias = self.first.bias

    def forward(self, x):
        return self.first(x) + self.second(x.square())


class Table(nn.Module):
    """Words that come several times in a record, and a norm; the head may be the table itself."""

    def __init__(self, tied: bool = False):
        super().__init__()
        self.words, self.norm = nn.Embedding(2, 4, padding_idx=None), nn.LayerNorm(4)
        self.head = nn.Linear(4, 2, bias=False)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, x):
        return self.head(self.norm(self.words((x > 0).long()).sum(1)))


def _turned() -> nn.Module:
    """A convolution with everything that a patch can have, and no bias."""
    return nn.Conv2d(2, 4, (2, 3), stride=(2, 1), padding=(1, 0), dilation=(1, 1), padding_mode="circular", bias=False)


class Twice(nn.Module):
    """Two linear layers with one weight and biases of their own."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 2), nn.Linear(4, 2)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.first(x) + self.second(x.square())


class Tongue(nn.Module):
    """A table that is looked up at every position, and that is the weight of the last layer at every position."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(3, 4)
        self.head = nn.Linear(4, 3, bias=False)
        self.head.weight = self.words.weight

    def forward(self, x):
        return self.head(torch.tanh(self.words((x > 0).long() + (x > 1).long()))).square().mean(1)[:, :2]


class Unknown(nn.Module):
    """A layer that Opacus knows nothing of, with a linear layer inside that is served with it."""

    def __init__(self):
        super().__init__()
        self.scale, self.inside = nn.Parameter(torch.ones(4)), nn.Linear(4, 2)

    def forward(self, x):
        return self.inside(x * self.scale)


class Stepwise(nn.Module):
    """More positions than a small matrix is worth, and a linear layer whose weight is frozen."""

    def __init__(self):
        super().__init__()
        self.each, self.head = nn.Linear(2, 3), nn.Linear(3, 2)
        self.head.weight.requires_grad_(False)

    def forward(self, x):
        return self.head(torch.tanh(self.each(x))).square().mean(1)


def _frozen_convolution() -> nn.Module:
    """A convolution of which the bias alone is trainable, called twice in a row."""
    layer = nn.Conv1d(2, 2, 3, padding=1)
    layer.weight.requires_grad_(False)
    return nn.Sequential(layer, nn.Tanh(), layer, nn.Flatten(), nn.Linear(8, 2))


MODELS = {
    "one layer": (lambda: nn.Linear(4, 2), (4,), "Factored"),
    "two layers": (
        lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2, bias=False)),
        (4,),
        "Factored Factored",
    ),
    "positions": (Positions, (3, 9), "Factored Factored"),
    "many positions": (Stepwise, (7, 2), "Formed Formed"),
    "convolution": (
        lambda: nn.Sequential(nn.Conv1d(1, 2, 2), nn.Flatten(), nn.Linear(6, 2)),
        (1, 4),
        "Formed Factored",
    ),
    "a convolution's bias": (_frozen_convolution, (2, 4), "Formed Factored"),
    "images": (
        lambda: nn.Sequential(nn.Conv2d(1, 2, 2), nn.Tanh(), _turned(), nn.Flatten(), nn.Linear(24, 2)),
        (1, 5, 5),
        "Formed Formed Factored",
    ),
    "a shared bias": (Shared, (4,), "Factored Factored Loose"),
    "a shared weight": (Twice, (4,), "Factored Factored Formed"),
    "a norm between": (
        lambda: nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2)),
        (4,),
        "Factored Factored Loose",
    ),
    "a table": (Table, (5,), "Factored LookedUp Loose"),
    "a tied table": (lambda: Table(tied=True), (5,), "Tied Loose"),
    "a tied table at every position": (Tongue, (6,), "Tied"),
    "an unknown layer": (Unknown, (4,), "Loose rows"),
}


def _bench(model):
    generator = torch.Generator().manual_seed(1)
    start = Workbench(model, Measurement(Sparse(seed=0), None, criterion=nn.MSELoss(), progress=False))

    def root(size):
        found = torch.randn(size, size, generator=generator, dtype=torch.float64)
        few = found[:, :1]  # in every other layer or so
        return Root(few, few.T, 0.5) if size % 2 else Root(found + found.T)

    blocks = tuple(start.blocks().values())
    metric = Metric(blocks, tuple((root(b.width), root(b.outputs)) for b in blocks))
    return Workbench(model, Measurement(metric, None, criterion=nn.MSELoss(), progress=False))


def _prepared(name, count=6):
    make, shape, forms = MODELS[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = make().double()
    x = torch.randn(count, *shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    y = torch.randn(count, 2, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    bench = _bench(model)
    looks.prepare(bench, DataLoader(TensorDataset(x, y), batch_size=4))
    return bench, x, y, forms


@pytest.mark.parametrize("name", MODELS)
def test_factors_and_rows_agree(name):
    bench, x, y, expected = _prepared(name)
    found = bench.gradients(x, y, pad_to=8)
    rows = bench.quadratics(x, y, curvature=False, pad_to=8)
    forms = [type(part).__name__ for part in found.factored] + ["rows"] * (found.rows is not None)
    assert " ".join(forms) == expected
    assert error(found.norms, rows.gradient_norms) < 1e-11
    for bound in (1e9, float(rows.gradient_norms.median())):
        fast, slow = ClippedAdder(bound, 0.0), ClippedAdder(bound, 0.0)
        fast.add_gradients(found)
        slow.add(rows)
        assert error(fast.result().gradient, slow.result().gradient) < 1e-10


@pytest.mark.parametrize("value", [math.inf, math.nan, 1e200, -1e308])
@pytest.mark.parametrize("name", ["one layer", "positions", "convolution"])
def test_a_record_that_is_not_finite_counts_nothing(name, value):
    bench, x, y, _ = _prepared(name)
    x[2] = value
    rest = [i for i in range(len(x)) if i != 2]
    found, without = bench.gradients(x, y, pad_to=8), bench.gradients(x[rest], y[rest], pad_to=8)
    assert float(found.norms[2]) == 0.0
    assert error(summed(found, torch.ones_like), summed(without, torch.ones_like)) < 1e-12


def _cancelling(size):
    """Two positions whose large terms cancel, all but a part in 10⁸ (the square root of float64's precision)."""
    generator = torch.Generator().manual_seed(4)
    a, b = (torch.randn(200, 1, d, generator=generator, dtype=torch.float64) for d in (5, 3))
    gap = torch.logspace(-9, -7, 200, dtype=torch.float64)[:, None, None]
    inputs = torch.cat([a, a * (1 + gap)], dim=1) * size
    return Factored(Block(3, 4, 0, 12), inputs, torch.cat([b, -b], dim=1))


def _largest(part):
    """The largest norm of a clipped gradient as it is added, for a bound of 1."""
    found = []
    for i in range(len(part.inputs)):
        one = RecordGradients(1, 1, [Factored(part.block, part.inputs[i : i + 1], part.outputs[i : i + 1])], None, 15)
        found.append(float(summed(one, lambda norms: (1 / norms).clamp(max=1.0)).norm()))
    return max(found)


@pytest.mark.parametrize("size", [1e3, 1e9, 1e12, 1e30])
def test_terms_that_cancel_hide_nothing(size):
    assert _largest(_cancelling(size)) <= 1.0


def test_without_the_rounding_they_would(monkeypatch):
    monkeypatch.setattr(gradients_module, "_ROUNDING", 0.0)
    assert _largest(_cancelling(1e12)) > 2.0


def test_private_values_are_not_shown():
    bench, x, y, _ = _prepared("one layer")
    found = bench.gradients(x, y, pad_to=8)
    assert "tensor" not in repr(found) + repr(found.factored[0])
