"""Data that are drawn: the source paper's regression."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.utils.data import TensorDataset

from opacus_expm.experiments.task import Task, fit, loss


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
        torch.default_generator.manual_seed(seed)
        while True:
            model = nn.Sequential(nn.Linear(5, 10), nn.ReLU(), nn.Linear(10, 10), nn.ReLU(), nn.Linear(10, 1))
            fit(model, public, criterion, epochs=300, batch_size=500, learning_rate=2e-2)
            if loss(model, public, criterion) < 0.1:
                return Task(model, public, private, test, criterion, name="sine")
