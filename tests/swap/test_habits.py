"""Habits of training scripts that are harmless here."""

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from loops import BATCH, FEATURES, RECORDS, flat, make_loader, make_loop, make_model
from opacus.utils.batch_memory_manager import BatchMemoryManager, BatchSplittingSampler
from torch import nn
from torch.optim import lr_scheduler


def plain(loop):
    loop.epoch()


def clips_gradients(loop):
    for x, y in loop.loader:
        loop.optimizer.zero_grad(set_to_none=False)
        loop.criterion(loop.module(x), y).backward()
        assert torch.nn.utils.clip_grad_norm_(loop.module.parameters(), 1.0) == 0
        loop.optimizer.step()


def accumulates(loop):
    for i, (x, y) in enumerate(loop.loader):
        (loop.criterion(loop.module(x), y) / 2).backward()
        if i % 2 == 0:
            loop.optimizer.step()
            loop.optimizer.zero_grad()


def scales_and_averages(loop):
    for x, y in loop.loader:
        (0.5 * loop.criterion(loop.module(x), y).mean()).backward()
        loop.optimizer.step()


def uses_a_closure(loop):
    for x, y in loop.loader:

        def closure(x=x, y=y):
            loop.optimizer.zero_grad()
            loss = loop.criterion(loop.module(x), y)
            loss.backward()
            return loss

        assert str(loop.optimizer.step(closure)) == "private"


def schedules(loop):
    makers = [
        lambda o: lr_scheduler.StepLR(o, 1),
        lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=9),
        lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
        lambda o: lr_scheduler.LambdaLR(o, lambda e: 0.5**e),
        lambda o: lr_scheduler.ReduceLROnPlateau(o),
    ]
    schedulers = [make(loop.optimizer) for make in makers]
    for x, y in loop.loader:
        loop.batch(x, y)
        for scheduler in schedulers:
            scheduler.step(*([0.5] if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau) else []))
    assert loop.optimizer.param_groups[0]["lr"] != 0.1


def saves_and_loads_the_optimizer(loop):
    for x, y in loop.loader:
        loop.optimizer.load_state_dict(copy.deepcopy(loop.optimizer.state_dict()))
        loop.batch(x, y)


def evaluates_in_between(loop):
    for i, (x, y) in enumerate(loop.loader):
        output = loop.module(x)
        loop.module.eval()
        with torch.no_grad():
            value = loop.criterion(loop.module(x[:3] + 1), y[:3])
            assert value.item() == pytest.approx(F.cross_entropy(loop.module(x[:3] + 1), y[:3]).item())
        loop.module.train(i > 1)
        loop.criterion(output, y).backward()
        loop.optimizer.step()


def looks_at_a_batch_and_at_the_accuracy(loop):
    x, _ = next(iter(loop.loader))
    assert len(x) == BATCH
    correct = sum(int((loop.module(x).argmax(1) == y).sum()) for x, y in loop.loader)
    assert 0 <= correct <= RECORDS
    loop.epoch()


def copies_tensors(loop):
    for x, y in loop.loader:
        x, y = x.clone().double().float().view(len(x), FEATURES), y.clone().to(torch.int32).long()
        loop.batch(x, y)


def calls_by_keyword(loop):
    for x, y in loop.loader:
        loop.criterion(target=y, input=loop.module(input=x)).backward()
        loop.optimizer.step()


def adds_losses_up(loop):
    total, losses = 0.0, []
    for x, y in loop.loader:
        loss = loop.criterion(loop.module(x), y)
        loss.backward()
        loop.optimizer.step()
        total += loss.item() * len(x)
        losses += [loss.item(), loss.detach().cpu().numpy()]
    assert f"{total / RECORDS:.3f}" == "private"
    assert f"{sum(losses) / len(losses):8.2f} {np.mean(losses):.1f}" == "private private"


def scales_gradients(loop):
    scaler = torch.amp.GradScaler("cpu")
    for x, y in loop.loader:
        loop.optimizer.zero_grad()
        scaler.scale(loop.criterion(loop.module(x), y)).backward()
        scaler.unscale_(loop.optimizer)
        assert torch.nn.utils.clip_grad_norm_(loop.module.parameters(), 1.0) == 0
        scaler.step(loop.optimizer)
        scaler.update()
    assert all(p.grad is None for p in loop.module.parameters())


def checks_the_loss(loop):
    for x, y in loop.loader:
        loss = loop.criterion(loop.module(x), y)
        if torch.isnan(loss) or not torch.isfinite(loss).all():
            raise ValueError("the loss is not finite")
        loss.backward()
        loop.optimizer.step()


def manages_memory(loop):
    with BatchMemoryManager(
        data_loader=loop.loader, max_physical_batch_size=4, optimizer=loop.optimizer
    ) as memory_safe_loader:
        assert len(memory_safe_loader) == 5
        for x, y in memory_safe_loader:
            assert len(x) <= 4
            loop.batch(x, y)


HABITS = [
    plain,
    scales_gradients,
    checks_the_loss,
    manages_memory,
    clips_gradients,
    accumulates,
    scales_and_averages,
    uses_a_closure,
    schedules,
    saves_and_loads_the_optimizer,
    evaluates_in_between,
    looks_at_a_batch_and_at_the_accuracy,
    copies_tensors,
    calls_by_keyword,
    adds_losses_up,
]


@pytest.mark.parametrize("habit", HABITS, ids=lambda habit: habit.__name__)
def test_habit_is_harmless(habit, clean):
    loop = make_loop(optimizer=None)
    loop.module.train()
    habit(loop)
    assert len(loop.engine.accountant.releases) == 1
    torch.testing.assert_close(flat(loop.module), clean, rtol=0, atol=0)


@pytest.mark.parametrize(
    "make", [torch.optim.Adam, torch.optim.AdamW, lambda p: torch.optim.SGD(p, 0.1, momentum=0.9), torch.optim.LBFGS]
)
def test_any_optimizer_will_do(make, clean):
    model = make_model()
    optimizer = make(model.parameters())
    scheduler = lr_scheduler.StepLR(optimizer, 1)  # made before the call, as scripts do
    loop = make_loop(model=model, optimizer=optimizer)
    loop.epoch()
    scheduler.step()
    assert isinstance(loop.optimizer, torch.optim.Optimizer)
    assert loop.optimizer.param_groups[0] is optimizer.param_groups[0]
    assert loop.optimizer.state_dict()["state"] == {}
    torch.testing.assert_close(flat(loop.module), clean, rtol=0, atol=0)


def test_named_parameter_groups():
    model = make_model()
    groups = [
        {"params": list(model[0].named_parameters()), "lr": 0.1},
        {"params": list(model[2].named_parameters()), "lr": 0.2},
    ]
    loop = make_loop(model=model, optimizer=torch.optim.SGD(groups))
    loop.epoch()
    assert [g["lr"] for g in loop.optimizer.param_groups] == [0.1, 0.2]
    with pytest.raises(ValueError, match="param_group cannot be added"):
        loop.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})


def test_a_memory_manager_gives_whole_batches_where_they_are_smaller():
    loop = make_loop()
    with BatchMemoryManager(data_loader=loop.loader, max_physical_batch_size=100, optimizer=loop.optimizer) as loader:
        assert [len(x) for x, _ in loader] == [BATCH, BATCH, RECORDS - 2 * BATCH]
    with (
        pytest.raises(ValueError, match="max_physical_batch_size must be a positive integer"),
        BatchMemoryManager(data_loader=loop.loader, max_physical_batch_size=0, optimizer=loop.optimizer),
    ):
        pass


def test_other_loaders_are_managed_as_before():
    loop, plain = make_loop(), make_loader()
    with BatchMemoryManager(data_loader=plain, max_physical_batch_size=4, optimizer=None) as loader:
        assert isinstance(loader.batch_sampler, BatchSplittingSampler)
    assert len(loop.loader) == len(plain)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["before", "after", "in place"])
def test_a_compiled_module(how, clean):
    torch.compiler.reset()
    counters = pytest.importorskip("torch._dynamo.utils").counters  # takes seconds to load
    model = make_model()
    loop = make_loop(model=torch.compile(model, backend="eager") if how == "before" else model)
    assert loop.module is model
    if how == "after":
        loop.module = torch.compile(model, backend="eager")
    elif how == "in place":
        model.compile(backend="eager")
    loop.epoch()
    assert torch.equal(flat(model), clean)
    x = torch.ones(2, FEATURES)
    assert torch.equal(loop.module(x), model.forward(x))
    counters["stats"].clear()
    assert torch.equal(torch.compile(model, backend="eager")(x), model.forward(x))
    assert counters["stats"]["unique_graphs"] == 1  # what was not compiled in the loop can be compiled after it
