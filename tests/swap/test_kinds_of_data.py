"""Loops over data of other kinds: streams, several inputs, keywords, sequences, regression."""

import math
from types import SimpleNamespace

import torch
from loops import BATCH, CLASSES, FEATURES, RECORDS, flat, make_loop, make_model, make_tensors
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset


class Stream(IterableDataset):
    def __iter__(self):
        return iter(zip(*make_tensors(), strict=True))


def test_an_iterable_data_set(clean):
    loop = make_loop(loader=DataLoader(Stream(), batch_size=BATCH), nominal_size=RECORDS)
    loop.epoch()
    torch.testing.assert_close(flat(loop.module), clean, rtol=0, atol=0)


def test_more_than_pairs(clean):
    """Batches with an index of the records, which the script does not use."""
    loop = make_loop(loader=DataLoader(TensorDataset(*make_tensors(), torch.arange(RECORDS)), batch_size=BATCH))
    for x, y, _ in loop.loader:
        loop.batch(x, y)
    torch.testing.assert_close(flat(loop.module), clean, rtol=0, atol=0)


class Two(nn.Module):
    """Two inputs, the second by name."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(FEATURES, CLASSES)
        self.second = nn.Linear(FEATURES, CLASSES)

    def forward(self, x, scale=1.0, other=None):
        return self.first(x) + scale * self.second(x if other is None else other)


def test_several_inputs_and_keywords():
    x, y = make_tensors()
    records = [{"x": x[i], "other": x[i] ** 2, "labels": y[i]} for i in range(RECORDS)]
    results = []
    for call in (
        lambda m, b: m(b["x"], 2.0, b["other"]),
        lambda m, b: m(b["x"], other=b["other"], scale=2.0),
        lambda m, b: m(other=b["other"], x=b["x"], scale=2.0),
    ):
        torch.manual_seed(0)
        loop = make_loop(model=Two(), loader=DataLoader(records, batch_size=BATCH))
        for batch in loop.loader:
            loop.criterion(call(loop.module, batch), batch["labels"]).backward()
            loop.optimizer.step()
        results.append(flat(loop.module))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


class WithLogits(nn.Module):
    """Returns its outputs as Hugging Face does."""

    def __init__(self):
        super().__init__()
        self.inner = make_model()

    def forward(self, x):
        return SimpleNamespace(logits=self.inner(x))


def test_results_with_logits(clean):
    loop = make_loop(model=WithLogits())
    for x, y in loop.loader:
        loop.criterion(loop.module(x).logits, y).backward()
        loop.optimizer.step()
    torch.testing.assert_close(flat(loop.module), clean, rtol=0, atol=0)


def test_regression_targets_of_another_shape_and_type():
    x, _ = make_tensors()
    y = torch.arange(RECORDS)
    torch.manual_seed(0)
    model = nn.Linear(FEATURES, 1)
    loop = make_loop(
        model=model, criterion=nn.MSELoss(), loader=DataLoader(TensorDataset(x[:, None], y), batch_size=BATCH)
    )
    before = flat(model)
    for inputs, targets in loop.loader:
        output = loop.module(inputs.view(len(inputs), -1))
        loop.criterion(output.squeeze(1), targets.float()).backward()
        loop.optimizer.step()
    assert not torch.equal(flat(model), before)


def test_sequences_flattened_with_their_shape():
    """As with Opacus: criterion(outputs (B·T, m), targets (B·T,), shape=(B, T, m))."""
    torch.manual_seed(0)
    x, y = torch.randn(6, 4, FEATURES), torch.randint(CLASSES, (6, 4))
    results = []
    for flatten in (False, True):
        model = nn.Linear(FEATURES, CLASSES)
        nn.init.ones_(model.weight)
        nn.init.zeros_(model.bias)
        loop = make_loop(model=model, loader=DataLoader(TensorDataset(x, y), batch_size=3))
        for inputs, targets in loop.loader:
            output = loop.module(inputs)
            if flatten:
                loss = loop.criterion(output.view(-1, CLASSES), targets.view(-1), shape=output.shape)
            else:
                loss = loop.criterion(output, targets)
            loss.backward()
            loop.optimizer.step()
        results.append(flat(model))
    assert torch.equal(*results)


def test_a_record_that_is_not_finite_raises_nothing():
    x, y = make_tensors()
    x[3] = math.nan
    loop = make_loop(loader=DataLoader(TensorDataset(x, y), batch_size=BATCH))
    for inputs, targets in loop.loader:
        loop.batch(inputs.clone(), targets.clone())
    assert bool(flat(loop.module).isfinite().all())
