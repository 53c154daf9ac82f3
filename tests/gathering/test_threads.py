"""Small work runs on one thread, large work on all of them, and afterwards there are as many as before."""

from __future__ import annotations

import math
import threading

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from opacus_expm.baselines import dp_sgd, non_private
from opacus_expm.experiments.task import fit, outputs
from opacus_expm.gathering import looks, threads
from opacus_expm.gathering.measurement import Measurement
from opacus_expm.gathering.passes import Workbench
from opacus_expm.gathering.threads import CACHE, ENOUGH, Threads, Work, evenly, work_of
from opacus_expm.subspaces import Sparse


@pytest.fixture(autouse=True)
def three_threads():
    """Three threads, whatever the machine has, and afterwards those of before."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    assert torch.get_num_threads() == 3
    torch.set_num_threads(before)


SEEN: list[tuple[int, int]] = []


class Spy(nn.Module):
    """Notes how many records and how many threads there are when it is called."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        SEEN.append((len(x), torch.get_num_threads()))
        return x


def model() -> nn.Module:
    """Four products for a record."""
    return nn.Sequential(Spy(), nn.Linear(4, 1))


def seen_in_a_pass(count: int) -> set[tuple[int, int]]:
    """Records and threads of the second pass over so many records, 16 at a time."""
    bench = Workbench(model(), Measurement(Sparse(seed=0), None, nn.MSELoss(), progress=False))
    loader = DataLoader(records(count), batch_size=16)
    looks.prepare(bench, loader)
    SEEN.clear()
    looks.losses_here(bench, loader)
    return set(SEEN)


def records(count: int) -> TensorDataset:
    return TensorDataset(torch.randn(count, 4), torch.randn(count, 1))


def test_operations_are_products_of_parameters_and_positions():
    perceptron = nn.Sequential(nn.Linear(5, 10), nn.ReLU(), nn.Linear(10, 1))
    assert work_of(perceptron, torch.zeros(1, 5)).products == 5 * 10 + 10
    assert work_of(nn.Conv2d(2, 3, 5), torch.zeros(1, 2, 8, 8)).products == 3 * 2 * 25 * 16
    assert work_of(nn.Linear(4, 6), torch.zeros(1, 7, 4)).products == 7 * 24
    assert work_of(nn.Linear(4, 6), torch.zeros(1, 5)).products == math.inf  # does not run


def test_few_records_stay_in_cache():
    assert work_of(nn.Sequential(nn.Linear(5, 10), nn.ReLU()), torch.zeros(1, 5)) == Work(50.0, 20, 50)
    assert Work(1.0, CACHE // 40, 0).few(1) == 32  # 40, in whole numbers of 16
    assert Work(1.0, CACHE // 40, 0).few(3) == 112
    assert Work(1.0, CACHE, 0).few(1) == 16
    assert Work(1.0, CACHE, 25 * CACHE).few(1) == 96  # parameters are worth reading for a hundred
    assert Work(math.inf, 0, 0).few(1) is None
    with Threads(Work(ENOUGH / 32, CACHE // 20, 0)).shared(512):  # 48 at a time on three cores
        assert torch.get_num_threads() == 3
    with Threads(Work(ENOUGH / 64, CACHE // 20, 0)).shared(512):
        assert torch.get_num_threads() == 1


@pytest.mark.parametrize(("size", "most", "expected"), [(512, 64, 64), (96, 64, 48), (512, 512, 512), (8, 16, 8)])
def test_pieces_are_equal_and_whole_blocks(size, most, expected):
    assert evenly(size, most) == expected


def test_a_pass_in_small_pieces_finds_the_same(monkeypatch):
    loader = DataLoader(records(50), batch_size=50)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = model()
    found = []
    for cache, sizes in ((CACHE, {64}), (16, {16})):
        monkeypatch.setattr(threads, "CACHE", cache)
        bench = Workbench(network, Measurement(Sparse(seed=0), None, nn.MSELoss(), progress=False))
        SEEN.clear()
        looks.prepare(bench, loader)
        assert max(size for size, _ in SEEN) == max(sizes)  # the first look, too
        SEEN.clear()
        quadratic = bench.public_norms(loader, curvature=True)
        found.append((looks.gradient_norms(bench, loader), *quadratic.values()))
        assert {size for size, _ in SEEN} == sizes
    for one, other in zip(*found, strict=True):
        assert len(one) == 50
        assert abs(one - other).max() < 1e-6 * one.max()


def test_counting_leaves_no_hook_behind():
    layer = nn.Linear(4, 6)
    work_of(layer, torch.zeros(1, 4))
    work_of(layer, torch.zeros(1, 5))
    assert not layer._forward_hooks


def test_work_decides():
    with Threads(Work(ENOUGH / 8, 0, 0)).shared(7):
        assert torch.get_num_threads() == 1
        with Threads(Work(ENOUGH / 8, 0, 0)).shared(8):  # by its own work, not by that of what is around
            assert torch.get_num_threads() == 3
        assert torch.get_num_threads() == 1
    with Threads(Work(ENOUGH, 0, 0)).shared(None):
        assert torch.get_num_threads() == 3


def test_what_is_learned_inside_counts_from_then_on():
    own = Threads()
    with own.shared(16):
        assert torch.get_num_threads() == 1
        own.learn(Work(ENOUGH, 0, 0))
        assert torch.get_num_threads() == 3


def test_restored_after_an_error():
    with pytest.raises(KeyError), Threads(Work(1.0, 0, 0)).shared(1):
        raise KeyError


def test_restored_when_threads_of_python_overlap():
    inside, leave = threading.Event(), threading.Event()

    def other() -> None:
        with Threads(Work(1.0, 0, 0)).shared(1):
            inside.set()
            leave.wait(10)

    one = threading.Thread(target=other)
    with Threads(Work(1.0, 0, 0)).shared(1):
        one.start()
        assert inside.wait(10)
    leave.set()
    one.join()
    found: list[int] = []
    late = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
    late.start()
    late.join()
    assert found == [3]


@pytest.mark.parametrize(("enough", "found"), [(4 * 16 + 1, 1), (4 * 16, 3)])
def test_a_pass_has_the_threads_of_its_work(enough: int, found: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(threads, "ENOUGH", enough)
    for count in (1, 15, 16):  # of which they say nothing
        assert seen_in_a_pass(count) == {(16, found)}


def test_baselines_training_and_evaluation_are_narrowed_too():
    SEEN.clear()
    data, options = records(40), {"learning_rate": 0.1, "batch_size": 20, "epochs": 1}
    non_private(model(), data, nn.MSELoss(), **options)
    fit(model(), data, nn.MSELoss(), **options)
    assert [found for found in SEEN if found[0] > 1] == [(20, 1)] * 4
    outputs(model(), data)
    assert SEEN[-1] == (40, 1)
    dp_sgd(model(), data, nn.MSELoss(), **options | {"batch_size": 40}, epsilon=1.0, delta=1e-5, max_grad_norm=1.0)
    assert SEEN[-1] == (40, 1)
