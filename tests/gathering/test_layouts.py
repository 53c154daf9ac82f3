"""Convolutions with channels innermost in memory: the same rows, and the user's module as it was."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from reference import error
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from opacus_expm.gathering import looks
from opacus_expm.gathering.hooks import ProjectedGradSampleModule
from opacus_expm.gathering.layers import Patches
from opacus_expm.gathering.measurement import Measurement
from opacus_expm.gathering.passes import Workbench
from opacus_expm.subspaces.sparse import Sparse


class Viewed(nn.Module):
    """As ``x.view`` has it, which refuses channels that are innermost."""

    def forward(self, x: Tensor) -> Tensor:
        return x.view(len(x), -1)


def bench_of(last: nn.Module, *, frozen: bool = False) -> tuple[nn.Module, Workbench]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(2, 3, 2), nn.Tanh(), nn.Conv2d(3, 4, 2), last, nn.Linear(36, 2)).double()
    model[0].requires_grad_(not frozen)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(5, 2, 5, 5, generator=generator, dtype=torch.float64)
    bench = Workbench(model, Measurement(Sparse(seed=0), None, criterion=nn.CrossEntropyLoss(), progress=False))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        looks.prepare(bench, DataLoader(TensorDataset(x, torch.tensor([0, 1, 0, 1, 1])), batch_size=5))
    assert isinstance(bench.prepared[0], ProjectedGradSampleModule)
    return model, bench


def innermost(bench: Workbench) -> list[bool]:
    weights = [layer.weight for layer in bench._working.modules() if isinstance(layer, nn.Conv2d)]
    return [w.is_contiguous(memory_format=torch.channels_last) and not w.is_contiguous() for w in weights]


def test_channels_are_innermost_where_the_model_runs_so():
    assert innermost(bench_of(nn.Flatten())[1]) == [True, True]
    assert innermost(bench_of(Viewed())[1]) == [False, False]


@pytest.mark.parametrize("frozen", [False, True])
def test_the_users_module_keeps_its_order(frozen: bool):
    model, bench = bench_of(nn.Flatten(), frozen=frozen)
    assert all(p.is_contiguous() for p in model.parameters())
    assert innermost(bench) == [not frozen, True]
    assert all(p.is_contiguous() for p in bench.module_at(torch.zeros(bench.map.dim)).parameters())


def test_both_orders_give_the_same_gradients_and_factors():
    x = torch.randn(5, 2, 5, 5, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    targets = torch.tensor([0, 1, 0, 1, 1])
    loader = DataLoader(TensorDataset(x, targets), batch_size=5)
    one, other = bench_of(nn.Flatten())[1], bench_of(Viewed())[1]
    rows = [b.quadratics(x, targets, curvature=True, pad_to=16) for b in (one, other)]
    assert error(rows[0].gradients, rows[1].gradients) < 1e-12
    assert error(rows[0].factors, rows[1].factors) < 1e-12
    sums = [looks.factors(b, loader, np.random.default_rng(0)) for b in (one, other)]
    assert error(sums[0].traces, sums[1].traces) < 1e-12


@pytest.mark.parametrize("mode", ["zeros", "circular"])
@pytest.mark.parametrize(("stride", "dilation"), [(1, 1), ((2, 1), (1, 2))])
def test_patches_in_both_orders(mode: str, stride: int | tuple[int, int], dilation: int | tuple[int, int]):
    layer = nn.Conv2d(3, 4, (2, 3), stride, (1, 2), dilation, padding_mode=mode, dtype=torch.float64)
    x = torch.randn(5, 3, 7, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    outputs = layer(x)
    backprop = torch.randn(outputs.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    (whole,) = torch.autograd.grad(outputs, layer.weight, backprop)
    for inputs in (x, x.contiguous(memory_format=torch.channels_last)):
        (patches,) = Patches.of_calls(layer, [inputs])
        found = patches.product(patches.of(slice(None)), backprop)
        assert patches.positions == outputs[0, 0].numel()
        assert patches.size == patches.of(slice(0, 1)).numel()
        assert error(found.sum(0).view_as(whole), whole) < 1e-12
    assert patches.of(slice(None)).stride(-1) == 1
