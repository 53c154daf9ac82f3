"""The rounds of a loop in the budget and in the ledger."""

import gc
import json

import pytest
import quick
import torch
from loops import BATCH, RECORDS, flat, make_loader, make_loop, make_model
from torch import nn
from torch.utils.data import DataLoader, Dataset

from opacus_expm import BudgetExceeded, ExpMAccountant, ExpMQuadEngine, Statistics
from opacus_expm.mechanism.sampling import Exact


class Untouchable(Dataset):
    """Private records that must not be read."""

    def __len__(self):
        return RECORDS

    def __getitem__(self, index):
        raise AssertionError("the private data was touched")


def test_the_budget_is_checked_before_anything_is_touched():
    model = make_model()
    engine = ExpMQuadEngine(budget=(0.5, 0.0))
    with pytest.raises(BudgetExceeded):
        make_loop(engine, model, DataLoader(Untouchable(), batch_size=BATCH))
    assert "forward" not in vars(model)
    assert engine.accountant.releases == []
    assert engine.remaining() == 0.5


@pytest.mark.parametrize(("delta", "epochs"), [(0.0, 3), (1e-5, 2)])
def test_all_rounds_together_use_the_budget_up(delta, epochs, tmp_path):
    path = tmp_path / "ledger.jsonl"
    engine = ExpMQuadEngine(budget=(1.0, delta), ledger_path=path)
    loop = make_loop(engine, epochs=epochs, target_delta=delta)
    spent = [engine.get_epsilon(delta)]
    for number in range(epochs):
        loop.epoch()
        spent.append(engine.get_epsilon(delta))
        lines = [json.loads(line) for line in path.read_text().splitlines()][2:]  # after the header and the budget
        assert [line["release"]["round"] for line in lines] == list(range(1, number + 2))
        assert all(line["release"]["rounds"] == epochs for line in lines)
    assert spent[0] == 0
    assert spent == sorted(spent)
    assert spent[-1] == pytest.approx(1.0, rel=1e-9)
    assert engine.remaining() == 0
    with pytest.raises(BudgetExceeded):
        make_loop(engine)


def test_fewer_epochs_cost_less():
    loop = make_loop(epochs=4)
    loop.epoch()
    assert loop.engine.get_epsilon(0.0) == 0.25
    loop.epoch()
    assert loop.engine.get_epsilon(0.0) == 0.5


def test_every_draw_is_charged_before_it_is_made(monkeypatch):
    loop = make_loop(epochs=2)
    plain_sample, charges = Exact.sample, []

    def watched(self, *arguments):
        charges.append(len(loop.engine.accountant.releases))
        return plain_sample(self, *arguments)

    monkeypatch.setattr(Exact, "sample", watched)
    loop.epoch()
    loop.epoch()
    assert charges == [1, 2]


def test_a_release_in_between_leaves_a_loop_its_rounds():
    """What a loop that has begun has before it is reserved, until it is given up; then its rounds are judged one by one."""
    engine = ExpMQuadEngine(budget=(1.0, 0.0))
    loop = make_loop(engine, epochs=2, target_epsilon=0.8)
    statistics = engine.gather(
        make_model(), make_loader(), 4, criterion=nn.CrossEntropyLoss(), max_grad_norm=1.0, max_curvature=0.0
    )
    assert isinstance(statistics, Statistics)
    loop.epoch()
    first = flat(loop.module)
    with pytest.raises(BudgetExceeded, match=r"beside a plan that has begun and has 1 charges to go.*give_up"):
        engine.release(statistics, 0.4, 0.3)
    engine.release(statistics, 0.1, 0.3)
    engine.accountant.give_up()
    engine.release(statistics, 0.4, 0.3)
    with pytest.raises(BudgetExceeded):
        loop.epoch()
    assert torch.equal(flat(loop.module), first)
    assert engine.get_epsilon(0.0) == pytest.approx(0.9)


@pytest.mark.parametrize("abandoned", quick.only(["rebuilt", "finished"], ["rebuilt", "finished", "failed"]))
def test_a_loop_that_is_over_reserves_nothing(abandoned):
    """Not even where nobody says so: one that only its own module holds on to is no longer a loop."""
    engine = ExpMQuadEngine(budget=(1.0, 0.0))
    loop = make_loop(engine, epochs=1 if abandoned == "finished" else 2, target_epsilon=0.8)
    loop.epoch()
    if abandoned == "failed":
        loop.module.register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            loop.epoch()
        with pytest.raises(BudgetExceeded):  # it may still go on
            make_loop(engine, target_epsilon=0.6)
    spent = engine.get_epsilon()
    gc.disable()
    try:
        del loop
        make_loop(engine, target_epsilon=(1.0 - spent) * (1 - 1e-9)).epoch()
    finally:
        gc.enable()
    assert engine.get_epsilon() == pytest.approx(1.0)


def test_a_second_call_starts_anew():
    engine = ExpMQuadEngine(budget=(2.0, 0.0))
    old = make_loop(engine, epochs=2)
    old.epoch()
    with pytest.raises(BudgetExceeded):
        make_loop(engine, old.module, old.loader, old.optimizer, criterion=old.criterion, target_epsilon=1.7)
    old_iterator = iter(old.loader)
    x, y = next(old_iterator)
    loss = old.criterion(old.module(x), y)  # the earlier loop goes on
    new = make_loop(engine, old.module, old.loader, old.optimizer, criterion=old.criterion, target_epsilon=1.5)
    assert new.loader.original_loader is old.loader.original_loader
    assert new.optimizer.original_optimizer is old.optimizer.original_optimizer
    for refused in (loss.backward, old.optimizer.step):
        with pytest.raises(RuntimeError, match="was called again for this module"):
            refused()
    new.epoch()
    assert engine.get_epsilon(0.0) == 2.0
    assert "forward" not in vars(new.module)


@pytest.mark.parametrize("delta", quick.only([0.0], [0.0, 1e-5]))
def test_an_unfinished_loop_costs_nothing_and_is_in_nobodys_way(delta):
    """Its plan and that of another loop do not meet; nor does a call that fails in between end a plan."""
    engine = ExpMQuadEngine(budget=(1.0, delta))
    unfinished = make_loop(engine, epochs=3, target_delta=delta)
    loop = make_loop(engine, epochs=3, target_delta=delta)
    for _ in range(2):
        loop.epoch()
        with pytest.raises(ValueError, match="radius must be greater than 0"):
            make_loop(engine, radius=-1.0, target_epsilon=0.1)
        with pytest.raises(BudgetExceeded, match="beside a plan"):
            make_loop(engine, proj_dim=1000, target_epsilon=0.1)
    del unfinished
    gc.collect()
    loop.epoch()
    assert engine.get_epsilon(delta) == pytest.approx(1.0, rel=1e-9)


def test_two_loops_cannot_spend_more_than_the_budget():
    engine = ExpMQuadEngine(budget=(1.0, 0.0))
    first, second = make_loop(engine, epochs=2), make_loop(engine, epochs=2)
    first.epoch()
    with pytest.raises(BudgetExceeded, match="beside a plan that has begun and has 1 charges to go"):
        second.epoch()
    first.epoch()
    assert engine.get_epsilon(0.0) == 1.0


def test_one_ledger_with_dp_sgd():
    accountant = ExpMAccountant()
    accountant.step(noise_multiplier=2.0, sample_rate=0.5)
    loop = make_loop(ExpMQuadEngine(accountant=accountant), epochs=1)
    loop.epoch()
    assert len(accountant) == 2
    assert accountant.get_epsilon(1e-5) > 1.0


def test_secure_mode():
    loop = make_loop(ExpMQuadEngine(secure_mode=True), proj_dim=2)
    loop.epoch()
    assert loop.engine.accountant.releases[0].sampler == "secure"
