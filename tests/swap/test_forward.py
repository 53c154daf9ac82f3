"""The module while rounds run: its outputs, its copies, and no trace of the private data in it."""

import copy
import io
import pickle

import pytest
import torch
import torch.nn.functional as F
from loops import CLASSES, FEATURES, RECORDS, flat, make_loop, make_model, make_tensors
from torch import nn


class Noisy(nn.Module):
    """Everything that private data could slip into: running statistics, counters, attributes, in-place layers."""

    def __init__(self):
        super().__init__()
        self.first = nn.ReLU(inplace=True)
        self.norm = nn.BatchNorm1d(FEATURES)
        self.drop = nn.Dropout(0.5)
        self.out = nn.Linear(FEATURES, CLASSES)
        self.register_buffer("largest", torch.zeros(()))
        self.seen = None

    def forward(self, x):
        x = self.first(x)
        if not torch.is_grad_enabled():
            self.largest.copy_(x.max())
            self.seen = x
        return self.out(self.drop(self.norm(x)))


def test_private_data_leaves_no_trace_in_the_module():
    torch.manual_seed(0)
    model = Noisy()
    before = copy.deepcopy(dict(model.named_buffers()))
    loop = make_loop(model=model, epochs=2)
    assert loop.module is model
    for epoch in range(2):
        loop.module.train(epoch == 0)
        for x, y in loop.loader:
            held = x.clone()
            output = loop.module(x)
            assert torch.equal(output, loop.module(x))  # no dropout, no batch statistics
            loop.criterion(output, y).backward()
            loop.optimizer.step()
            assert torch.equal(x, held)
            assert model.seen is None
            assert model.training is (epoch == 0)
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, before[name])


def test_outputs_are_those_of_the_present_weights():
    loop = make_loop(epochs=2)
    for _ in range(2):
        for x, y in loop.loader:
            expected = copy.deepcopy(loop.module)(x)
            torch.testing.assert_close(loop.module(x), expected, rtol=0, atol=1e-6)
            loop.module.eval()
            with torch.no_grad():
                torch.testing.assert_close(loop.module(x), expected, rtol=0, atol=1e-6)
            loop.module.train()
            loop.batch(x, y)


def test_copies_are_ordinary_modules():
    loop = make_loop()
    x, y = make_tensors(seed=7)
    for middle in (False, True):
        if middle:
            iterator = iter(loop.loader)
            loop.batch(*next(iterator))
        file = io.BytesIO()
        torch.save(loop.module, file)
        file.seek(0)
        for twin in (copy.deepcopy(loop.module), torch.load(file, weights_only=False)):
            assert type(twin) is nn.Sequential
            assert list(twin.state_dict()) == list(make_model().state_dict())
            assert torch.equal(flat(twin), flat(loop.module))
            F.cross_entropy(twin(x), y).backward()
            assert all(p.grad is not None for p in twin.parameters())
            assert pickle.loads(pickle.dumps(copy.deepcopy(twin)))(x).shape == (RECORDS, CLASSES)
            assert all(p.grad is None for p in loop.module.parameters())
        rest = iterator if middle else ()
        for batch in rest:
            loop.batch(*batch)
    assert len(loop.engine.accountant.releases) == 1


def test_another_optimizer_cannot_train_the_module():
    model = make_model()
    loop = make_loop(model=model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = flat(model)
    x, y = make_tensors()
    for mode, words in ((True, "without a batch from the returned data_loader"), (False, "no gradients while")):
        model.train(mode)
        with pytest.raises(RuntimeError, match=words):
            F.cross_entropy(loop.module(x), y).backward()
        optimizer.step()
    assert torch.equal(flat(model), before)


def test_a_module_that_moves_between_epochs_starts_the_next_round_from_there():
    loop = make_loop(epochs=2)
    loop.module.double()
    loop.loader.dataset.tensors = tuple(t.double() if t.is_floating_point() else t for t in loop.loader.dataset.tensors)
    loop.epoch()
    assert loop.module[0].weight.dtype == torch.float64
    with torch.no_grad():
        loop.module[0].weight.add_(10.0)
    loop.epoch()
    assert float(loop.module[0].weight.detach().mean()) > 9.0
    assert len(loop.engine.accountant.releases) == 2


def test_frozen_parameters_stay():
    model = make_model()
    model[0].requires_grad_(False)
    loop = make_loop(model=model)
    before = copy.deepcopy(model)
    loop.epoch()
    assert torch.equal(model[0].weight, before[0].weight)
    assert not torch.equal(model[2].weight, before[2].weight)


def test_a_forward_of_the_instance_comes_back():
    model = make_model()
    calls = []
    inner = model.forward
    model.forward = lambda x: calls.append(1) or inner(x)
    held = model.forward
    loop = make_loop(model=model, grad_sample_mode="functorch")
    loop.epoch()
    assert vars(model)["forward"] is held
    assert calls
