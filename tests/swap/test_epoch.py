"""An epoch counts every record once or not at all; a failed draw ends the loop."""

import pytest
import torch
import torch.nn.functional as F
from loops import BATCH, RECORDS, flat, make_loader, make_loop, make_tensors
from torch.utils.data import DataLoader, TensorDataset

from opacus_expm.gathering.clipping import ClippedAdder
from opacus_expm.gathering.collating import Alone
from opacus_expm.mechanism.sampling import Exact


def test_an_exception_of_the_pass_breaks_the_epoch_off(clean):
    """A loader whose targets have the wrong shape."""
    bad = [True]

    def collate(records):
        x, y = torch.utils.data.default_collate(records)
        return (x, y[:, None].expand(-1, 2)) if bad else (x, y)

    loop = make_loop(loader=make_loader(collate_fn=collate))
    with pytest.raises(ValueError, match="target has shape"):
        loop.epoch()
    assert loop.engine.accountant.releases == []
    bad.clear()
    loop.epoch()
    torch.testing.assert_close(flat(loop.module), clean, rtol=0, atol=0)


COLLATE = {
    "drops records": (lambda r: torch.utils.data.default_collate(r[:3]), "does not give one row for each record"),
    "centres a batch": (
        lambda r: (lambda x, y: (x - x.mean(0), y))(*torch.utils.data.default_collate(r)),
        "gives a record other values beside other records",
    ),
}


@pytest.mark.parametrize("name", COLLATE)
def test_a_collate_function_of_whole_batches_is_refused_in_the_first_epoch(name):
    collate, reason = COLLATE[name]
    loop = make_loop(loader=make_loader(collate_fn=collate))
    with pytest.raises(ValueError, match=f"data_loader's collate function {reason}"):
        loop.epoch()
    assert loop.engine.accountant.releases == []


def test_a_collate_function_is_shown_one_record_at_a_time(clean):
    """The batches are the same, and so is the release."""
    shown = []

    def collate(records):
        shown.append(len(records))
        return torch.utils.data.default_collate(records)

    loop = make_loop(loader=make_loader(collate_fn=collate))
    loop.epoch()
    assert shown[-RECORDS:] == [1] * RECORDS
    torch.testing.assert_close(flat(loop.module), clean, rtol=0, atol=0)


@pytest.mark.parametrize("persistent", [False, True])
def test_workers_persist_if_they_are_asked_to(persistent, monkeypatch):
    started = []
    original = DataLoader._get_iterator

    def counted(self):
        if self.num_workers:
            started.append(type(self))
        return original(self)

    monkeypatch.setattr(DataLoader, "_get_iterator", counted)
    loop = make_loop(loader=make_loader(num_workers=1, persistent_workers=persistent), epochs=2)
    loop.epoch()
    loop.epoch()
    assert started == [DataLoader] * (1 if persistent else 2)
    assert len(loop.engine.accountant.releases) == 2


def test_an_epoch_that_loses_a_record_is_noticed(monkeypatch):
    """Whatever the reason."""
    monkeypatch.setattr(Alone, "__call__", lambda self, records: torch.utils.data.default_collate(records[:7]))
    loop = make_loop()
    with pytest.raises(RuntimeError, match="did not yield every record once"):
        loop.epoch()
    assert loop.engine.accountant.releases == []


class Twice(DataLoader):
    """Every batch comes twice."""

    def __iter__(self):
        for batch in super().__iter__():
            yield from (batch, batch)


def test_loaders_that_repeat_are_refused_before_the_loop():
    x, y = make_tensors()
    dataset = TensorDataset(x, y)
    with pytest.raises(ValueError, match="data_loader is a Twice with its own __iter__"):
        make_loop(loader=Twice(dataset, batch_size=BATCH))
    with pytest.raises(ValueError, match="data_loader names a record twice"):
        make_loop(loader=DataLoader(dataset + dataset, batch_size=BATCH))
    with pytest.raises(ValueError, match="public_loader names records of data_loader"):
        make_loop(loader=DataLoader(dataset, batch_size=BATCH), public_loader=DataLoader(dataset, batch_size=4))


def test_after_the_last_round_everything_is_refused_and_the_module_ordinary(clean):
    loop = make_loop()
    loop.epoch()
    for x, y in loop.loader:
        loss = loop.criterion(loop.module(x), y)
        assert str(loss) == "private"
        with pytest.raises(RuntimeError, match=r"All 1 rounds of make_private_with_epsilon\(epochs=1\) are drawn"):
            loss.backward()
        with pytest.raises(RuntimeError, match="with a budget for it"):
            loop.optimizer.step()
        loop.module.eval()
        with torch.no_grad():
            assert str(loop.criterion(loop.module(x), y)) == "private"
            assert loop.criterion(loop.module(x + 1), y + 0).item() > 0
        loop.module.train()
    assert torch.equal(flat(loop.module), clean)
    assert len(loop.engine.accountant.releases) == 1
    assert "forward" not in vars(loop.module)
    x, y = make_tensors(seed=7)
    F.cross_entropy(loop.module(x), y).backward()  # on data of the script's own
    assert all(p.grad is not None for p in loop.module.parameters())


@pytest.mark.parametrize("when", ["before", "after"])
def test_an_interrupt_leaves_no_batch_half_counted(when, monkeypatch, clean):
    loop = make_loop()
    add = ClippedAdder.add_gradients

    def interrupted(total, more):
        if when == "after":
            add(total, more)
        raise KeyboardInterrupt

    iterator = iter(loop.loader)
    loop.batch(*next(iterator))
    x, y = next(iterator)
    with monkeypatch.context() as patched:
        patched.setattr(ClippedAdder, "add_gradients", interrupted)
        with pytest.raises(KeyboardInterrupt):
            loop.batch(x, y)
    with pytest.raises(RuntimeError, match="was broken off: An exception was raised in backward"):
        loop.batch(x, y)
    loop.epoch()
    torch.testing.assert_close(flat(loop.module), clean, rtol=0, atol=0)


def test_a_failed_draw_ends_the_run(monkeypatch):
    loop = make_loop(epochs=2)
    loop.epoch()
    first = flat(loop.module)
    with monkeypatch.context() as patched:
        patched.setattr(Exact, "sample", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            loop.epoch()
    assert len(loop.engine.accountant.releases) == 2  # charged before it was drawn
    assert torch.equal(flat(loop.module), first)
    with pytest.raises(RuntimeError, match="The draw of round 2 failed"):
        loop.epoch()
    assert len(loop.engine.accountant.releases) == 2
