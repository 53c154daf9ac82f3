"""An Opacus training loop under this engine: the same release and charges as one call, and no misuse that goes unnoticed."""

import copy
import gc
import io
import json
import math
import pickle
import warnings
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import opacus
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from opacus_expm import BudgetExceeded, ExpMAccountant, ExpMQuadEngine, Statistics
from opacus_expm.gathering.clipping import ClippedSums
from opacus_expm.gathering.collating import Alone
from opacus_expm.mechanism.sampling import Exact
from opacus_expm.swap.losses import PrivateNumber

RECORDS, BATCH, FEATURES, CLASSES = 20, 8, 5, 3  # three batches, the last one short


def make_model(seed=3):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(FEATURES, 4), nn.Tanh(), nn.Linear(4, CLASSES))


def make_tensors(records=RECORDS, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(records, FEATURES, generator=generator)
    return x, torch.randint(CLASSES, (records,), generator=generator)


def make_loader(seed=0, **options):
    return DataLoader(TensorDataset(*make_tensors(seed=seed)), **({"batch_size": BATCH} | options))


def flat(module):
    return torch.cat([t.detach().flatten().double() for t in module.state_dict().values()])


@dataclass
class Loop:
    """What a script holds after the call."""

    engine: ExpMQuadEngine
    module: nn.Module
    optimizer: Any
    criterion: Any
    loader: Any

    def batch(self, x, y):
        self.optimizer.zero_grad()
        loss = self.criterion(self.module(x), y)
        loss.backward()
        self.optimizer.step()

    def epoch(self):
        self.module.train()
        for x, y in self.loader:
            self.batch(x, y)


def make_loop(engine=None, model=None, loader=None, optimizer=None, **changes):
    engine = ExpMQuadEngine() if engine is None else engine
    model = make_model() if model is None else model
    options = {
        "module": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1) if optimizer is None else optimizer,
        "criterion": nn.CrossEntropyLoss(),
        "data_loader": make_loader() if loader is None else loader,
        "target_epsilon": 1.0,
        "target_delta": 0.0,
        "epochs": 1,
        "max_grad_norm": 1.0,
        "radius": 0.3,
        "proj_dim": 4,
        "projection_seed": 5,
        "noise_generator": None if engine.accountant.budget else np.random.default_rng(0),
    }
    return Loop(engine, *engine.make_private_with_epsilon(**(options | changes)))


@pytest.fixture(scope="module")
def clean():
    """Weights after one undisturbed epoch of ``make_loop()``."""
    loop = make_loop()
    loop.epoch()
    return flat(loop.module)


# --- one script, two engines ----------------------------------------------------------------------------------------


class SampleConvNet(nn.Module):
    """In the manner of Opacus's MNIST example."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 4, 4, 2)
        self.conv2 = nn.Conv2d(4, 4, 2, 1)
        self.fc1 = nn.Linear(16, 8)
        self.fc2 = nn.Linear(8, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv1(x)), 2, 1)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2, 1)
        return self.fc2(F.relu(self.fc1(x.view(-1, 16))))


def train(model, criterion, train_loader, optimizer, privacy_engine, epoch, delta):
    model.train()
    losses = []
    for data, target in train_loader:
        optimizer.zero_grad()
        output = model(data)
        loss = criterion(output, target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    epsilon = privacy_engine.accountant.get_epsilon(delta=delta)
    return f"Train Epoch: {epoch} \tLoss: {np.mean(losses):.6f} (ε = {epsilon:.2f}, δ = {delta})"


def test(model, test_loader):
    model.eval()
    criterion = nn.CrossEntropyLoss()
    test_loss = correct = 0
    with torch.no_grad():
        for data, target in test_loader:
            output = model(data)
            test_loss += criterion(output, target).item()
            pred = output.argmax(dim=1, keepdim=True)
            correct += pred.eq(target.view_as(pred)).sum().item()
    return test_loss / len(test_loader), correct / len(test_loader.dataset)


test.__test__ = False  # the script's function, not a test


def mnist_script(privacy_engine, **more):
    """The script; ``privacy_engine`` and ``more`` are all that differs."""
    torch.manual_seed(0)
    x = torch.randn(48, 1, 12, 12)
    train_loader = DataLoader(TensorDataset(x, torch.randint(10, (48,))), batch_size=16, shuffle=True)
    test_loader = DataLoader(TensorDataset(x[:16], torch.randint(10, (16,))), batch_size=8)
    model = SampleConvNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0)
    model, optimizer, criterion, train_loader = privacy_engine.make_private_with_epsilon(
        module=model,
        optimizer=optimizer,
        criterion=nn.CrossEntropyLoss(),
        data_loader=train_loader,
        target_epsilon=3.0,
        target_delta=1e-5,
        epochs=2,
        max_grad_norm=1.0,
        grad_sample_mode="ghost",
        **more,
    )
    lines = []
    for epoch in range(2):
        lines.append(train(model, criterion, train_loader, optimizer, privacy_engine, epoch, 1e-5))
        lines.append(test(model, test_loader))
    return model, lines


ENGINES = {
    "opacus": (lambda: opacus.PrivacyEngine(accountant="rdp"), {}),
    "expm": (ExpMQuadEngine, {"radius": 0.3, "proj_dim": 20}),
}


@pytest.mark.parametrize("name", ENGINES)
def test_opacus_script_runs_under_both_engines(name):
    make_engine, more = ENGINES[name]
    with warnings.catch_warnings():
        if name == "opacus":
            warnings.simplefilter("ignore")  # Opacus's own
        privacy_engine = make_engine()
        model, lines = mnist_script(privacy_engine, **more)
    trained, fresh = model.state_dict(), SampleConvNet().state_dict()
    assert [t.shape for t in trained.values()] == [t.shape for t in fresh.values()]
    assert all(bool(t.isfinite().all()) for t in trained.values())
    assert 2.5 < privacy_engine.get_epsilon(1e-5) <= 3.0 + 1e-9
    assert all(
        math.isfinite(loss) and 0 <= accuracy <= 1 for loss, accuracy in lines[1::2]
    )  # the test set's are numbers
    if name == "expm":
        assert type(model) is SampleConvNet
        fresh_model = SampleConvNet()
        fresh_model.load_state_dict(trained)  # the keys are the original's
        assert torch.equal(flat(fresh_model), flat(model))
        assert all("Loss: private" in line for line in lines[::2])
        assert "ε = 3.00" in lines[2]


# --- the same release as one call -----------------------------------------------------------------------------------


def public_loader():
    return DataLoader(TensorDataset(*make_tensors(40, seed=9)), batch_size=BATCH)


AGREEMENTS = {
    "pure": {},
    "shuffled": {"epochs": 2},
    "two rounds": {"epochs": 2, "radius": [0.3, 0.2]},
    "with delta": {"epochs": 2, "target_delta": 1e-5},
    "private curvature": {"epochs": 2, "max_curvature": 0.5},
    "small pieces": {"max_physical_batch_size": 3},
    "joint": {"clipping": "joint", "max_curvature": None},
    "functorch": {"grad_sample_mode": "functorch"},
    "replace-one": {"adjacency": "replace_one", "calibration": "paper", "regularization": 1.0},
    "public bounds": {"max_grad_norm": None, "max_curvature": None, "public_loader": True},
    "preconditioned": {"epochs": 2, "proj_dim": None, "projection": "preconditioned", "public_loader": True},
}


@pytest.mark.parametrize("name", AGREEMENTS)
def test_a_loop_releases_what_one_call_does(name):
    changes, shuffle = dict(AGREEMENTS[name]), name == "shuffled"
    if "public_loader" in changes:
        changes["public_loader"] = public_loader()
        changes["public_rank"] = 5
    torch.manual_seed(1)
    loop = make_loop(loader=make_loader(shuffle=shuffle), **changes)
    for _ in range(changes.get("epochs", 1)):
        loop.epoch()
    delta = changes.pop("target_delta", 0.0)
    changes.pop("grad_sample_mode", None)
    options = {"max_grad_norm": 1.0, "max_curvature": 0.0, "radius": 0.3, "proj_dim": 4, "projection_seed": 5} | changes
    engine, model = ExpMQuadEngine(), make_model()
    torch.manual_seed(1)
    expected = engine.make_private_expm(
        model,
        make_loader(shuffle=shuffle),
        1.0,
        delta=delta,
        criterion=nn.CrossEntropyLoss(),
        rounds=options.pop("epochs", 1),
        noise_generator=np.random.default_rng(0),
        **options,
    )
    torch.testing.assert_close(flat(loop.module), flat(expected), rtol=0, atol=1e-6)
    assert not torch.allclose(flat(expected), flat(model), rtol=0, atol=1e-3)
    if name != "public bounds":  # their measured bounds differ by rounding
        assert loop.engine.accountant.releases == engine.accountant.releases
    assert len(loop.engine.accountant.releases) == loop.engine.accountant.releases[0].rounds


def test_another_seed_gives_another_release(clean):
    loop = make_loop(noise_generator=np.random.default_rng(1))
    loop.epoch()
    assert not torch.allclose(flat(loop.module), clean, rtol=0, atol=1e-3)


# --- misuse ---------------------------------------------------------------------------------------------------------
# Each function goes wrong in one way; "error" or "warning" and the words that are expected stand beside it.


def skips_a_batch(loop):
    for i, (x, y) in enumerate(loop.loader):
        if i != 1:
            loop.batch(x, y)


def skips_the_first_batch(loop):
    for i, (x, y) in enumerate(loop.loader):
        if i != 0:
            loop.batch(x, y)


def skips_the_last_batch(loop):
    for i, (x, y) in enumerate(loop.loader):
        if i != 2:
            loop.batch(x, y)


def steps_without_backward(loop):
    for x, y in loop.loader:
        loop.criterion(loop.module(x), y)
        loop.optimizer.step()


def steps_without_a_batch(loop):
    loop.optimizer.step()


def forgets_the_last_step(loop):
    for i, (x, y) in enumerate(loop.loader):
        loop.criterion(loop.module(x), y).backward()
        if i < 2:
            loop.optimizer.step()


def counts_a_loss_twice(loop):
    for x, y in loop.loader:
        loss = loop.criterion(loop.module(x), y)
        loss.backward(retain_graph=True)
        loss.backward()


def counts_a_batch_twice(loop):
    for x, y in loop.loader:
        loop.batch(x, y)
        loop.batch(x, y)


def counts_an_earlier_batch(loop):
    losses = [loop.criterion(loop.module(x), y) for x, y in loop.loader]
    losses[0].backward()


def goes_on_after_an_error(loop):
    for x, y in loop.loader:
        with pytest.raises(RuntimeError, match="not those of the returned module"):
            loop.criterion(loop.module(x).softmax(1), y).backward()
        loop.criterion(loop.module(x), y).backward()


def leaves_the_epoch(loop):
    for x, y in loop.loader:
        loop.batch(x, y)
        break


def raises_in_the_epoch(loop):
    try:
        for x, y in loop.loader:
            loop.batch(x, y)
            raise KeyError("of the script")
    except KeyError:
        pass


def keeps_the_iterator(loop):
    iterator = iter(loop.loader)
    loop.batch(*next(iterator))
    other = iter(loop.loader)
    next(other)
    assert iterator is not other


def uses_another_loader(loop):
    for x, y in make_loader():
        loop.batch(x, y)


def mixes_in_another_batch(loop):
    others = iter(make_loader(seed=1))
    for i, (x, y) in enumerate(loop.loader):
        loop.batch(*(next(others) if i == 1 else (x, y)))


def shifts_inputs(loop):
    for x, y in loop.loader:
        loop.batch(x + 1, y)


def scales_inputs_in_place(loop):
    for x, y in loop.loader:
        x.mul_(2)
        loop.batch(x, y)


def scales_inputs_after_the_forward_pass(loop):
    for x, y in loop.loader:
        loss = loop.criterion(loop.module(x), y)
        x.mul_(2)
        loss.backward()


def permutes_records(loop):
    for x, y in loop.loader:
        loop.batch(x.flip(0), y.flip(0))


def takes_a_part(loop):
    for x, y in loop.loader:
        loop.batch(x[:4], y[:4])


def repeats_records(loop):
    for x, y in loop.loader:
        loop.batch(torch.cat([x, x]), torch.cat([y, y]))


def changes_targets(loop):
    for x, y in loop.loader:
        loop.batch(x, (y + 1) % CLASSES)


def changes_targets_in_place(loop):
    for x, y in loop.loader:
        loss = loop.criterion(loop.module(x), y)
        y.zero_()
        loss.backward()


def changes_outputs(loop):
    for x, y in loop.loader:
        loop.criterion(loop.module(x) / 2, y).backward()


def adds_a_penalty(loop):
    for x, y in loop.loader:
        (loop.criterion(loop.module(x), y) + 0.1 * loop.module[0].weight.square().sum()).backward()


def adds_to_a_penalty(loop):
    for x, y in loop.loader:
        (0.1 * loop.module[0].weight.square().sum() + loop.criterion(loop.module(x), y)).backward()


def climbs(loop):
    for x, y in loop.loader:
        (-loop.criterion(loop.module(x), y)).backward()


def builds_its_own_loss(loop):
    for x, y in loop.loader:
        F.cross_entropy(loop.module(x), y).backward()


def builds_its_own_loss_in_evaluation_mode(loop):
    loop.module.eval()
    for x, y in make_loader():
        F.cross_entropy(loop.module(x), y).backward()


def changes_weights(loop):
    for x, y in loop.loader:
        loop.batch(x, y)
        with torch.no_grad():
            loop.module[0].weight.mul_(1.0)


MISUSES = [
    (skips_a_batch, "error", "left without loss.backward"),
    (skips_the_first_batch, "error", "left without loss.backward"),
    (skips_the_last_batch, "error", "left without loss.backward"),
    (steps_without_backward, "error", r"step\(\) without loss.backward"),
    (steps_without_a_batch, "error", r"step\(\) without a batch"),
    (forgets_the_last_step, "error", r"ended without optimizer.step"),
    (counts_a_loss_twice, "error", "twice for one batch"),
    (counts_a_batch_twice, "error", "twice for one batch"),
    (counts_an_earlier_batch, "error", "left without loss.backward"),
    (goes_on_after_an_error, "error", "was broken off"),
    (leaves_the_epoch, "warning", "left before its end"),
    (raises_in_the_epoch, "warning", "left before its end"),
    (keeps_the_iterator, "warning", "left before its end"),
    (uses_another_loader, "error", "without a batch from the returned data_loader"),
    (mixes_in_another_batch, "error", "inputs that are not those of the batch"),
    (shifts_inputs, "error", "inputs that are not those of the batch"),
    (scales_inputs_in_place, "error", "inputs that are not those of the batch"),
    (scales_inputs_after_the_forward_pass, "error", "changed in place"),
    (permutes_records, "error", "inputs that are not those of the batch"),
    (takes_a_part, "error", "inputs that are not those of the batch"),
    (repeats_records, "error", "inputs that are not those of the batch"),
    (changes_targets, "error", "targets that are not those of the batch"),
    (changes_targets_in_place, "error", "changed in place"),
    (changes_outputs, "error", "outputs that are not those of the returned module"),
    (adds_a_penalty, "error", "regularization="),
    (adds_to_a_penalty, "error", "regularization="),
    (climbs, "error", "only a loss as the returned criterion gives it"),
    (builds_its_own_loss, "error", "with the criterion that it returned"),
    (builds_its_own_loss_in_evaluation_mode, "error", "with the criterion that it returned"),
    (changes_weights, "error", "changed, moved or frozen during the epoch"),
]


@pytest.mark.parametrize(("misuse", "kind", "words"), MISUSES, ids=lambda value: getattr(value, "__name__", None))
def test_misuse_is_noticed_releases_nothing_and_can_be_made_good(misuse, kind, words, clean):
    loop = make_loop()
    before = flat(loop.module)
    loop.module.train()
    context = pytest.raises(RuntimeError, match=words) if kind == "error" else pytest.warns(UserWarning, match=words)
    with context as caught:
        misuse(loop)
    message = str(caught.value if kind == "error" else caught[0].message)
    advised = ("start the epoch again", "use regularization=", "loss = criterion(module(x), y)")
    assert any(advice in message for advice in advised)  # what to do
    assert loop.engine.accountant.releases == []
    assert torch.equal(flat(loop.module), before)
    assert all(p.grad is None for p in loop.module.parameters())
    loop.epoch()
    assert len(loop.engine.accountant.releases) == 1
    assert loop.engine.get_epsilon(0.0) == 1.0
    torch.testing.assert_close(flat(loop.module), clean, rtol=0, atol=0)


def test_freezing_between_batches_is_noticed():
    loop = make_loop()
    iterator = iter(loop.loader)
    loop.batch(*next(iterator))
    loop.module[0].requires_grad_(False)
    loop.batch(*next(iterator))
    with pytest.raises(RuntimeError, match="changed, moved or frozen"):
        loop.batch(*next(iterator))
    assert loop.engine.accountant.releases == []


def test_a_loss_of_an_earlier_epoch_is_not_counted():
    loop = make_loop(epochs=2)
    for x, y in loop.loader:
        loss = loop.criterion(loop.module(x), y)
        loop.batch(x, y)
    with pytest.raises(RuntimeError, match="Round 1 is drawn"):
        loss.backward()
    with pytest.raises(RuntimeError, match="Round 1 is drawn"):
        loop.optimizer.step()
    for _ in loop.loader:
        with pytest.raises(RuntimeError, match="an epoch that is over"):
            loss.backward()
        break
    loop.epoch()
    assert len(loop.engine.accountant.releases) == 2


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
    add = ClippedSums.plus

    def interrupted(total, more):
        if when == "after":
            add(total, more)
        raise KeyboardInterrupt

    iterator = iter(loop.loader)
    loop.batch(*next(iterator))
    x, y = next(iterator)
    with monkeypatch.context() as patched:
        patched.setattr(ClippedSums, "plus", interrupted)
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


# --- habits that are harmless ---------------------------------------------------------------------------------------


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
        losses += [loss, loss.detach().cpu().numpy()]
    assert f"{total / RECORDS:.3f}" == "private"
    assert f"{sum(losses) / len(losses):8.2f} {np.mean(losses):.1f}" == "private private"


HABITS = [
    plain,
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


# --- the loss has no number -----------------------------------------------------------------------------------------


def test_a_loss_says_that_it_is_private():
    loop = make_loop()
    x, y = next(iterator := iter(loop.loader))
    loss = loop.criterion(loop.module(x), y)
    assert repr(loss) == "PrivateLoss(private)"
    for value in (
        loss,
        loss.item(),
        loss.detach(),
        loss.data,
        loss.clone(),
        loss + 1,
        2 - loss,
        loss**2,
        -loss,
        abs(loss),
    ):
        assert isinstance(value, PrivateNumber)
        assert str(value) == f"{value}" == f"{value:.3f}" == "%s" % value == "private"  # noqa: UP031
    assert (
        str(round(loss.item(), 3))
        == str(np.float64(1.0) + loss.item())
        == str(torch.ones(()) + loss.item())
        == "private"
    )
    for use in (
        float,
        int,
        math.isnan,
        math.exp,
        lambda v: v < 1,
        lambda v: v >= 1,
        lambda v: min(v, 2.0),
        lambda v: "%.3f" % v,  # noqa: UP031
    ):
        for value in (loss, loss.item()):
            with pytest.raises(TypeError, match="loss of private records is private data"):
                use(value)
    with pytest.raises(TypeError, match="private"):
        lr_scheduler.ReduceLROnPlateau(loop.optimizer).step(loss.item())
    with pytest.raises(TypeError, match="not pickled"):
        pickle.dumps(loss)
    assert not any(isinstance(v, torch.Tensor | float) for v in vars(loss.item()).values())
    del iterator


def test_a_counted_loss_keeps_no_batch_alive():
    loop = make_loop()
    loss = None
    for x, y in loop.loader:
        loss = loop.criterion(loop.module(x), y)
        loss.backward()
        loop.optimizer.step()
    assert loss._ticket.inputs is None
    assert loss._ticket.targets.numel() == 0
    assert loss._ticket.held == []
    assert loss._ticket.epoch.gathered is None


@pytest.mark.parametrize("what", ["optimizer", "criterion", "loader"])
def test_stand_ins_are_not_pickled(what):
    with pytest.raises(TypeError, match="not pickled"):
        pickle.dumps(getattr(make_loop(), what))


# --- the module -----------------------------------------------------------------------------------------------------


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
    for mode in (True, False):
        model.train(mode)
        with pytest.raises(RuntimeError, match="no gradients while"):
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


# --- data of other kinds --------------------------------------------------------------------------------------------


def test_the_loader_is_a_data_loader():
    loop = make_loop()
    assert isinstance(loop.loader, DataLoader)
    assert len(loop.loader) == 3
    assert len(loop.loader.dataset) == RECORDS
    assert loop.loader.batch_size == BATCH


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


# --- budget and ledger ----------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("abandoned", ["rebuilt", "finished", "failed"])
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


@pytest.mark.parametrize("delta", [0.0, 1e-5])
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
    loop = make_loop(ExpMQuadEngine(secure_mode=True), proj_dim=2, noise_generator=None)
    loop.epoch()
    assert loop.engine.accountant.releases[0].sampler == "secure"


# --- arguments ------------------------------------------------------------------------------------------------------


REFUSED = [
    ({"batch_first": False}, ValueError, "a record is a row of its batch"),
    ({"poisson_sampling": True}, ValueError, "every record counts exactly once an epoch"),
    ({"wrap_model": False}, ValueError, "never wrapped"),
    ({"loss_reduction": "sum"}, ValueError, "is not the criterion's 'mean'"),
    ({"loss_reduction": "none"}, ValueError, "loss_reduction must be one of"),
    ({"clipping": "per_layer"}, ValueError, "use 'flat' with max_grad_norm="),
    ({"clipping": "adaptive"}, ValueError, "public_loader="),
    ({"clipping": "separate"}, ValueError, "clipping must be one of"),
    ({"grad_sample_mode": "ew"}, ValueError, "grad_sample_mode must be one of"),
    ({"max_grad_norm": None}, ValueError, "max_grad_norm must be given, or public_loader="),
    ({"max_curvature": None}, ValueError, "max_curvature must be given, or public_loader="),
    ({"max_grad_norm": [1.0, 1.0]}, TypeError, "max_grad_norm must be a number"),
    ({"target_epsilon": 0.0}, ValueError, "target_epsilon must be greater than 0"),
    ({"target_delta": 1.0}, ValueError, "target_delta must be in"),
    ({"epochs": 0}, ValueError, "epochs must be a positive integer"),
    ({"epochs": 2, "radius": [0.1]}, ValueError, "radius must be one number, or one for each"),
    ({"radius": -1.0}, ValueError, "radius must be greater than 0"),
    ({"proj_dim": 1000}, ValueError, "proj_dim must be at most"),
    ({"criterion": nn.CrossEntropyLoss(reduction="none")}, ValueError, "criterion has reduction='none'"),
    ({"criterion": 3}, TypeError, "criterion must be a loss"),
    ({"optimizer": 3}, TypeError, "optimizer must be a torch.optim.Optimizer"),
    ({"loader": [1]}, TypeError, "data_loader must be a torch.utils.data.DataLoader"),
    ({"loader": make_loader(drop_last=True)}, ValueError, "data_loader has drop_last=True"),
    ({"model": make_model().requires_grad_(False)}, ValueError, "no trainable parameter"),
    ({"optimizer": torch.optim.SGD(make_model().parameters())}, ValueError, "parameters that are not the module's"),
    ({"noise_generator": 3}, TypeError, "noise_generator must be"),
    ({"noise_multiplier": 1.0}, TypeError, "noise_multiplier"),
]


@pytest.mark.parametrize(
    ("changes", "error", "words"), REFUSED, ids=lambda v: "-".join(v) if isinstance(v, dict) else ""
)
def test_bad_arguments_leave_no_trace(changes, error, words):
    engine, model = ExpMQuadEngine(), changes.get("model", make_model())
    with pytest.raises(error, match=words):
        make_loop(engine, **({"model": model} | changes))
    assert engine.accountant.releases == []
    assert "forward" not in vars(model)
    assert engine.accountant._running() is None


def test_an_optimizer_for_some_parameters_only():
    model = make_model()
    optimizer = torch.optim.SGD(model[2].parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"does not hold the parameter '0\.weight'"):
        make_loop(model=model, optimizer=optimizer)
    model[0].requires_grad_(False)
    make_loop(model=model, optimizer=optimizer).epoch()


def test_a_module_that_opacus_has_prepared():
    model = opacus.GradSampleModule(make_model())
    with pytest.raises(ValueError, match=r"module\._module"):
        make_loop(model=model)


def test_the_criterion_is_cross_entropy_by_default(clean):
    loop = make_loop(criterion=None)
    loop.epoch()
    assert torch.equal(flat(loop.module), clean)
    assert loop.criterion.to("cpu") is loop.criterion


def test_methods_without_meaning_name_what_to_use():
    engine = ExpMQuadEngine()
    with pytest.raises(NotImplementedError, match="make_private_with_epsilon"):
        engine.make_private(module=make_model(), noise_multiplier=1.0, max_grad_norm=1.0)
    model = make_model()
    assert ExpMQuadEngine.get_compatible_module(model) is model
    loop = make_loop()
    for name, words in (("noise_multiplier", "accountant.releases"), ("signal_skip_step", "max_physical_batch_size=")):
        with pytest.raises(AttributeError, match=words):
            getattr(loop.optimizer, name)
    assert not hasattr(loop.optimizer, "unheard_of")
