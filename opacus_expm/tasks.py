"""Experiments as data, model and pretraining: the source paper's sine regression."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset


@dataclass(frozen=True)
class Task:
    """A pretrained model and the data sets around it.

    Attributes:
        model: pretrained on ``public``.
        public: pretraining data, free to use.
        private: data to fine-tune on.
        test: held-out data from the private distribution.
        criterion: the loss.
    """

    model: nn.Module
    public: TensorDataset
    private: TensorDataset
    test: TensorDataset
    criterion: nn.Module


def sine(seed: int = 0, records: int = 5000) -> Task:
    """The paper's sinusoidal regression: a·sin(2πx₁) + b·x₂ + c on R⁵, with a shift between the two data sets.

    Pretraining has (a, b, c) = (1, 0.3, 0.25) and standard normal inputs; fine-tuning has (0.9, 0.35, 0.25) and
    x₁, x₂ ← 1.1(x + 0.1). The model is a 5-10-10-1 perceptron with ReLU, 181 parameters. So small a network often
    fails to find the sine at all, so pretraining starts afresh until its loss, on public data, is below 0.1.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(a: float, b: float, c: float, *, shifted: bool) -> TensorDataset:
        x = torch.randn(records, 5, generator=generator)
        if shifted:
            x[:, :2] = 1.1 * (x[:, :2] + 0.1)
        return TensorDataset(x, a * torch.sin(2 * math.pi * x[:, :1]) + b * x[:, 1:2] + c)

    public = draw(1.0, 0.3, 0.25, shifted=False)
    private = draw(0.9, 0.35, 0.25, shifted=True)
    test = draw(0.9, 0.35, 0.25, shifted=True)
    criterion = nn.MSELoss()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        while True:
            model = nn.Sequential(nn.Linear(5, 10), nn.ReLU(), nn.Linear(10, 10), nn.ReLU(), nn.Linear(10, 1))
            fit(model, public, criterion, epochs=300, batch_size=500, learning_rate=2e-2)
            if loss(model, public, criterion) < 0.1:
                return Task(model, public, private, test, criterion)


def cnn() -> nn.Module:
    """The paper's MNIST network: two 5×5 convolutions (24 and 8 channels), ReLU and max-pooling; 6,722 parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 24, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(24, 8, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(128, 10),
    )


def fit(
    model: nn.Module,
    dataset: TensorDataset,
    criterion: nn.Module,
    *,
    epochs: int,
    batch_size: int,
    learning_rate: float,
) -> None:
    """Adam with a one-cycle learning rate, in place; not private."""
    x, y = dataset.tensors
    optimizer = torch.optim.Adam(model.parameters(), lr=learning_rate)
    steps = epochs * math.ceil(len(x) / batch_size)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=learning_rate, total_steps=steps)
    for _ in range(epochs):
        for index in torch.split(torch.randperm(len(x)), batch_size):
            optimizer.zero_grad()
            criterion(model(x[index]), y[index]).backward()
            optimizer.step()
            schedule.step()


@torch.no_grad()
def loss(model: nn.Module, dataset: TensorDataset, criterion: nn.Module) -> float:
    """The criterion on a whole data set, in evaluation mode."""
    x, y = dataset.tensors
    was_training = model.training
    model.eval()
    value: Tensor = criterion(model(x), y)
    model.train(was_training)
    return float(value)
