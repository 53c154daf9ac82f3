"""Kronecker factors against a slow twin, and what one record can do to them."""

import math

import numpy as np
import pytest
import torch
from reference import error, wide
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from opacus_expm.gathering import factors, looks
from opacus_expm.gathering.measurement import Measurement
from opacus_expm.gathering.passes import Workbench
from opacus_expm.mechanism.choices import symmetric_noise
from opacus_expm.subspaces.layout import Layout
from opacus_expm.subspaces.sparse import Sparse


def _seeded(make):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return make().double()


MODELS = {
    "linear": (lambda: nn.Linear(3, 2), (3,)),
    "two layers": (lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2, bias=False)), (3,)),
    "positions": (lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Flatten(), nn.Linear(20, 2)), (5, 3)),
    "convolution": (
        lambda: nn.Sequential(nn.Conv2d(2, 3, 2, stride=2, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(27, 2)),
        (2, 5, 5),
    ),
}


def _data(shape, count=9, seed=1):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, *shape, generator=generator, dtype=torch.float64)
    return x, torch.randn(count, 2, generator=generator, dtype=torch.float64)


def _found(model, x, y, batch_size=4, seed=3):
    """The package's sums, with z of a generator that starts anew."""
    bench = Workbench(model, Measurement(Sparse(seed=0), None, criterion=nn.MSELoss(), progress=False))
    loader = DataLoader(TensorDataset(x, y), batch_size=batch_size)
    looks.prepare(bench, loader)
    return looks.factors(bench, loader, np.random.default_rng(seed)), bench


def _twin(model, x, seed=3):
    """One record at a time, by plain autograd. For the mean squared error of two outputs M = I."""
    layers = [m for m in model.modules() if isinstance(m, nn.Linear | nn.Conv2d)]
    z = torch.from_numpy(np.random.default_rng(seed).spawn(1)[0].standard_normal((len(x), 2)))
    first, second, traces = [0.0] * len(layers), [0.0] * len(layers), torch.zeros(len(x), len(layers))
    for i in range(len(x)):
        caught = {}
        handles = [
            layer.register_forward_hook(lambda m, a, out, kept=caught: kept.__setitem__(m, (a[0].detach(), out)))
            for layer in layers
        ]
        outputs = model(x[i : i + 1])
        for handle in handles:
            handle.remove()
        for j, layer in enumerate(layers):
            a, out = caught[layer]
            (b,) = torch.autograd.grad(outputs, out, z[i : i + 1], retain_graph=True)
            if isinstance(layer, nn.Conv2d):
                a = nn.functional.unfold(a, layer.kernel_size, padding=layer.padding, stride=layer.stride)[0].T
                b = b[0].flatten(1).T
            else:
                a, b = a.reshape(-1, a.shape[-1]), b.reshape(-1, b.shape[-1])
            if layer.bias is not None:
                a = torch.cat([a, torch.ones(len(a), 1, dtype=a.dtype)], dim=1)
            traces[i, j] = (b.T @ a).square().sum()
            first[j] = first[j] + a.T @ a / a.square().sum()
            second[j] = second[j] + b.T @ b / b.square().sum()
    return first, second, traces


@pytest.mark.parametrize("name", MODELS)
def test_against_the_twin(name, monkeypatch):
    monkeypatch.setattr(factors, "_COMBINATIONS", 100)  # every position
    make, shape = MODELS[name]
    model, (x, y) = _seeded(make), _data(shape)
    found, _ = _found(model, x, y)
    first, second, traces = _twin(model, wide(x))
    for fast, slow in zip((*found.inputs, *found.outputs), (*first, *second), strict=True):
        assert error(fast, slow) < 1e-5  # the margin is 2e-6
        assert torch.allclose(fast, fast.T)
    assert error(found.traces, traces) < 1e-6


@pytest.mark.parametrize("name", ["two layers", "convolution"])
def test_a_record_has_the_same_chance_in_batches_of_any_size(name):
    make, shape = MODELS[name]
    model, (x, y) = _seeded(make), _data(shape)
    whole, _ = _found(model, x, y, batch_size=9)
    for size in (1, 4):
        found, _ = _found(model, x, y, batch_size=size)
        for few, all_ in zip((*found.inputs, *found.outputs), (*whole.inputs, *whole.outputs), strict=True):
            assert error(few, all_) < 1e-12
        assert error(found.traces, whole.traces) < 1e-12
    other, _ = _found(model, x, y, batch_size=9, seed=4)
    assert error(other.outputs[0], whole.outputs[0]) > 0.01


def test_sums_with_random_signs_have_the_same_second_moments():
    """Of a record that comes often; sums without signs have others."""
    one = torch.randn(9, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 0.5
    many = one.expand(20_000, -1, -1)
    found, ones = factors._combined(many, len(many), np.random.default_rng(0))
    assert found.shape == (20_000, 4, 3)
    of_ones = factors._combined(torch.ones_like(many), len(many), np.random.default_rng(0))[0]
    assert torch.equal(of_ones[..., :1], ones)
    moments = torch.einsum("bri,brj->ij", found, found) / 80_000
    assert error(moments, one.T @ one) < 0.02
    plain = one.sum(0)
    assert error(torch.outer(plain, plain), one.T @ one) > 0.5


def test_the_mean_of_traces_is_that_of_the_gauss_newton_matrix():
    """For one linear layer and squares, tr JᵀJ = 2·(|x|² + 1) for each of many z."""
    model = _seeded(lambda: nn.Linear(3, 2))
    x = torch.ones(1, 3, dtype=torch.float64).repeat(4000, 1)
    found, _ = _found(model, x, torch.zeros(4000, 2, dtype=torch.float64), batch_size=400)
    assert float(found.traces.mean()) == pytest.approx(2 * 4.0, rel=0.1)


ODD = {
    "inf": math.inf,
    "nan": math.nan,
    "huge": 1e200,
    "largest": 1.7e308,
    "tiny": 5e-324,
    "zero": 0.0,
    "plain": 7.0,
}


def _moved(name, value, both):
    """How far one more record moves each sum, in Frobenius norm, with the same z for the others."""
    make, shape = MODELS[name]
    model, (x, y) = _seeded(make), _data(shape, count=5)
    odd = torch.full((1, *shape), value, dtype=torch.float64)
    target = torch.full((1, 2), value if both else 0.0, dtype=torch.float64)
    without, _ = _found(model, x, y, batch_size=8)
    with_it, _ = _found(model, torch.cat([x, odd]), torch.cat([y, target]), batch_size=8)
    return [
        float((b - a).norm())
        for a, b in zip((*without.inputs, *without.outputs), (*with_it.inputs, *with_it.outputs), strict=True)
    ]


@pytest.mark.parametrize("both", [True, False])
@pytest.mark.parametrize("value", ODD.values(), ids=ODD)
@pytest.mark.parametrize("name", ["two layers", "convolution"])
def test_one_record_moves_each_sum_by_at_most_one(name, value, both):
    moved = _moved(name, value, both)
    assert all(m <= 1.0 for m in moved)
    assert value != 7.0 or min(moved) > 0.1


def test_without_the_normalisation_it_would_be_noticed(monkeypatch):
    monkeypatch.setattr(factors, "_unit", lambda values: values)
    assert max(_moved("two layers", 7.0, both=False)) > 1.0


def test_traces_are_finite_whatever_a_record_holds():
    model, (x, y) = _seeded(MODELS["two layers"][0]), _data((3,))
    x[2], x[4] = math.inf, 1e200
    found, _ = _found(model, x, y)
    assert found.traces.isfinite().all()
    assert float(found.traces[2].sum()) == 0.0


def test_parameters_that_two_layers_share_belong_to_neither():
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    second.weight = first.weight
    model = nn.Sequential(first, second)
    blocks = factors.blocks_of(model, Layout.of(model))
    assert [(b.weight, b.bias is not None, b.width) for b in blocks.values()] == [(None, True, 1), (None, True, 1)]


def test_layers_without_trainable_parameters_have_no_block():
    model = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3), nn.Linear(3, 2), nn.Conv1d(4, 4, 1, groups=2))
    model[0].requires_grad_(False)
    assert list(factors.blocks_of(model, Layout.of(model))) == [model[2]]


def test_private_values_are_not_shown_and_not_pickled():
    found, _ = _found(_seeded(MODELS["linear"][0]), *_data((3,)))
    assert "tensor" not in repr(found)
    with pytest.raises(TypeError, match="holds private data"):
        found.__reduce__()


@pytest.mark.parametrize("dim", [2, 20, 100])
def test_the_edge_is_where_the_noise_ends(dim):
    random = np.random.default_rng(0)
    largest = [np.linalg.eigvalsh(0.3 * symmetric_noise(dim, random))[-1] for _ in range(200)]
    assert np.mean(np.array(largest) <= factors.edge(dim, 0.3)) > 0.98
    assert np.mean(np.array(largest) <= factors.edge(dim, 0.1)) < 0.9
