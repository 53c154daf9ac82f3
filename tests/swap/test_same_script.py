"""One script under both engines, and a loop that releases what one call does."""

import math
import warnings

import numpy as np
import opacus
import pytest
import quick
import torch
import torch.nn.functional as F
from loops import BATCH, flat, make_loader, make_loop, make_model, make_tensors
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from opacus_expm import ExpMQuadEngine, Sparse


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
    """The script; ``privacy_engine`` and ``more`` are all that differs. In hooks mode it has its own criterion."""
    torch.manual_seed(0)
    x = torch.randn(48, 1, 12, 12)
    train_loader = DataLoader(TensorDataset(x, torch.randint(10, (48,))), batch_size=16, shuffle=True)
    test_loader = DataLoader(TensorDataset(x[:16], torch.randint(10, (16,))), batch_size=8)
    model = SampleConvNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0)
    model, optimizer, *criteria, train_loader = privacy_engine.make_private_with_epsilon(
        module=model,
        optimizer=optimizer,
        data_loader=train_loader,
        target_epsilon=3.0,
        target_delta=1e-5,
        epochs=2,
        max_grad_norm=1.0,
        **more,
    )
    (criterion,) = criteria or [nn.CrossEntropyLoss()]
    lines = []
    for epoch in range(2):
        lines.append(train(model, criterion, train_loader, optimizer, privacy_engine, epoch, 1e-5))
        lines.append(test(model, test_loader))
    return model, lines


ENGINES = {
    "opacus": (lambda: opacus.PrivacyEngine(accountant="rdp"), {}),
    "expm": (ExpMQuadEngine, {"radius": 0.3, "proj_dim": 20}),
}


@pytest.mark.parametrize("mode", [{}, {"grad_sample_mode": "ghost"}], ids=["hooks", "ghost"])
@pytest.mark.parametrize("name", quick.only(["expm"], ENGINES))
def test_opacus_script_runs_under_both_engines(name, mode):
    make_engine, more = ENGINES[name]
    with warnings.catch_warnings():
        if name == "opacus":
            warnings.simplefilter("ignore")  # Opacus's own
        privacy_engine = make_engine()
        model, lines = mnist_script(privacy_engine, **more, **mode)
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


def public_loader():
    return DataLoader(TensorDataset(*make_tensors(40, seed=9)), batch_size=BATCH)


AGREEMENTS = {
    "pure": {},
    "shuffled": {"epochs": 2},
    "two rounds": {"epochs": 2, "radius": [0.3, 0.2]},
    "with delta": {"epochs": 2, "target_delta": 1e-5},
    "private curvature": {"epochs": 2, "max_curvature": 0.5},
    "small pieces": {"max_physical_batch_size": 3},
    "functorch": {"grad_sample_mode": "functorch"},
    "replace-one": {"regularization": 1.0},
    "public bounds": {"max_grad_norm": None, "max_curvature": None, "public_loader": True},
}


@pytest.mark.parametrize("name", AGREEMENTS)
def test_a_loop_releases_what_one_call_does(name):
    changes, shuffle = dict(AGREEMENTS[name]), name == "shuffled"
    if "public_loader" in changes:
        changes["public_loader"] = public_loader()
    torch.manual_seed(1)
    adjacency = "replace_one" if name == "replace-one" else "add_remove"
    loop = make_loop(ExpMQuadEngine(adjacency=adjacency), loader=make_loader(shuffle=shuffle), **changes)
    for _ in range(changes.get("epochs", 1)):
        loop.epoch()
    delta = changes.pop("target_delta", 0.0)
    changes.pop("grad_sample_mode", None)
    options = {"max_grad_norm": 1.0, "max_curvature": 0.0, "radius": 0.3, "proj_dim": 4, "projection": Sparse(seed=5)}
    options |= changes
    engine = ExpMQuadEngine(adjacency=adjacency, noise_generator=np.random.default_rng(0))
    model = make_model()
    torch.manual_seed(1)
    expected = engine.make_private_expm(
        model,
        make_loader(shuffle=shuffle),
        1.0,
        delta=delta,
        criterion=nn.CrossEntropyLoss(),
        rounds=options.pop("epochs", 1),
        **options,
    )
    torch.testing.assert_close(flat(loop.module), flat(expected), rtol=0, atol=1e-6)
    assert not torch.allclose(flat(expected), flat(model), rtol=0, atol=1e-3)
    if name != "public bounds":  # their measured bounds differ by rounding
        assert loop.engine.accountant.releases == engine.accountant.releases
    assert len(loop.engine.accountant.releases) == loop.engine.accountant.releases[0].rounds


def test_another_seed_gives_another_release(clean):
    loop = make_loop(seed=1)
    loop.epoch()
    assert not torch.allclose(flat(loop.module), clean, rtol=0, atol=1e-3)
