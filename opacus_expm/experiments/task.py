"""What a task is, how a model is judged on it, and how it is pretrained; what was computed once is kept in the cache."""

from __future__ import annotations

import copy
import hashlib
import io
import json
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset, TensorDataset

from opacus_expm import _files
from opacus_expm.baselines import tensors
from opacus_expm.experiments import downloads
from opacus_expm.gathering import loaders
from opacus_expm.gathering.model import evaluation_mode
from opacus_expm.gathering.threads import Threads

_ROWS = 250  # records at a time: what stays in cache


@dataclass(frozen=True)
class Task:
    """A pretrained model and the data sets around it.

    The data are held in memory as two tensors, inputs and targets. Loaders and other data sets of pairs are read once, in
    the data set's order; what a transform draws at random is then drawn once.

    Attributes:
        model: pretrained on ``public``.
        public: pretraining data, free to use; None where there are none to show. ``compare`` does not need them.
        private: data to fine-tune on.
        test: held-out data from the private distribution.
        criterion: the loss.
        name: what the task is called.
        metric: how a model is judged: ``"accuracy"``, in percent, or ``"loss"``, the criterion.
    """

    model: nn.Module
    public: TensorDataset | None
    private: TensorDataset
    test: TensorDataset
    criterion: nn.Module
    name: str = ""
    metric: Literal["accuracy", "loss"] = "loss"

    def __post_init__(self) -> None:
        for name in ("private", "test") if self.public is None else ("public", "private", "test"):
            object.__setattr__(self, name, in_memory(name, getattr(self, name)))

    def score(self, model: nn.Module) -> float:
        """The metric of a model on the test data, in evaluation mode."""
        return loss(model, self.test, self.criterion) if self.metric == "loss" else accuracy(model, self.test)


def in_memory(name: str, data: object) -> TensorDataset:
    """A data set of pairs, or the records of a loader of pairs, as a ``TensorDataset``; one that is given is kept.

    Raises:
        TypeError, ValueError: something else, or an input that is no single tensor.
    """
    if isinstance(data, TensorDataset):
        return data
    if not isinstance(data, DataLoader):
        return TensorDataset(*tensors(name, data))
    chosen = loaders.visited(data)
    dataset = data.dataset if chosen is None else Subset(data.dataset, sorted(chosen))
    workers = 0 if chosen is None else data.num_workers
    read = DataLoader(dataset, batch_size=_ROWS, collate_fn=data.collate_fn, num_workers=workers)
    pairs = [loaders.split_batch(batch, name) for batch in read]
    if not pairs or not all(isinstance(x, Tensor) for x, _ in pairs):
        raise ValueError(f"{name} must yield at least one pair of tensors (input, target)")
    return TensorDataset(torch.cat([x for x, _ in pairs]), torch.cat([y for _, y in pairs]))


def fit(
    model: nn.Module,
    dataset: TensorDataset,
    criterion: nn.Module,
    *,
    epochs: int,
    batch_size: int,
    learning_rate: float,
    weight_decay: float = 0.0,
) -> None:
    """Adam with a one-cycle learning rate, in place; not private.

    ``weight_decay`` λ adds λ‖θ‖²/2 to the loss. The order of records is drawn from PyTorch's global generator.
    """
    x, y = dataset.tensors
    optimizer = torch.optim.Adam(model.parameters(), lr=learning_rate, weight_decay=weight_decay)
    steps = epochs * math.ceil(len(x) / batch_size)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=learning_rate, total_steps=steps)
    threads = Threads.of(model, x[:1])
    with threads.shared(batch_size):
        for _ in range(epochs):
            for index in torch.split(torch.randperm(len(x)), batch_size):
                optimizer.zero_grad()
                criterion(model(x[index]), y[index]).backward()
                optimizer.step()
                schedule.step()


def train_once(model: nn.Module, train: Callable[[], None], dataset: TensorDataset, facts: dict[str, Any]) -> None:
    """Train a model in place, or take the weights found earlier with the same data and facts from the cache."""
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode())
    for tensor in dataset.tensors:
        digest.update(tensor.numpy().tobytes())
    kept = downloads.cache_dir() / "weights" / f"{facts['task']}-{digest.hexdigest()[:16]}.pt"
    start = copy.deepcopy(model.state_dict())
    try:
        model.load_state_dict(_files.load_tensors(kept))
        return
    except Exception:  # absent, or damaged in one of many ways
        model.load_state_dict(start)
    train()
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    downloads.remember(kept, buffer.getvalue())


def computed_once(
    compute: Callable[[], Tensor], records: int, content: Iterable[bytes], facts: dict[str, Any]
) -> Tensor:
    """One row for each record, such as the features of a frozen network: computed, or taken from the cache.

    Args:
        compute: gives the rows.
        records: how many there must be.
        content: what they are computed from.
        facts: what else they depend on; ``facts["task"]`` is a part of the file's name.
    """
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode())
    for part in content:
        digest.update(hashlib.sha256(part).digest())
    kept = downloads.cache_dir() / "features" / f"{facts['task']}-{digest.hexdigest()[:16]}.npy"
    try:
        rows = torch.from_numpy(np.load(io.BytesIO(kept.read_bytes()), allow_pickle=False))
        if rows.dim() == 2 and len(rows) == records and rows.is_floating_point():
            return rows
    except Exception:  # absent, or damaged in one of many ways
        pass
    rows = compute()
    buffer = io.BytesIO()
    np.save(buffer, rows.numpy())
    downloads.remember(kept, buffer.getvalue())
    return rows


def zero_head(features: int, classes: int) -> nn.Linear:
    """A linear layer that starts from zero weights, and so gives every class the same probability."""
    with torch.random.fork_rng(devices=[]):
        head = nn.Linear(features, classes)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    return head


def loss(model: nn.Module, dataset: TensorDataset, criterion: nn.Module) -> float:
    """The criterion on a whole data set, in evaluation mode."""
    return float(criterion(outputs(model, dataset), dataset.tensors[1]))


def accuracy(model: nn.Module, dataset: TensorDataset) -> float:
    """How many records in a hundred are given their class, in evaluation mode.

    The class is the largest of several outputs, or the sign of a single one. Targets are numbers of classes or one-hot.
    """
    found, targets = outputs(model, dataset), dataset.tensors[1]
    if found.shape[1] == 1:
        right = (found[:, 0] > 0) == (targets.reshape(-1) > 0.5)
    else:
        right = found.argmax(1) == (targets.argmax(1) if targets.dim() > 1 else targets)
    return 100 * float(right.double().mean())


@torch.no_grad()
def outputs(model: nn.Module, dataset: TensorDataset) -> Tensor:
    """What a model says of all records, a few hundred at a time (what stays in cache), in evaluation mode."""
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    rows = dataset.tensors[0]
    with evaluation_mode(model), Threads.of(model, rows[:1].to(device)).shared(_ROWS):
        return torch.cat([model(x.to(device)).cpu() for x in torch.split(rows, _ROWS)])
