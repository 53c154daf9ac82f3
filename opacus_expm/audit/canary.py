"""A record that stands out as far as its bounds allow, for black-box audits of this engine and of Opacus DP-SGD."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from opacus_expm.audit.attacks import black_box, black_box_dp_sgd
from opacus_expm.audit.findings import Report, synthetic_data


@dataclass(frozen=True)
class Canary:
    """A small model, and two data sets that differ in one record which stands out as far as its bounds allow.

    One parameter θ = 0; the canary's loss is (3/2)(θ + 1/3)², with gradient 1 and curvature 3, and every other record
    has neither. With R = 1, C_g = 1, C_H = 3 and no ridge its utility has the whole range W₁ of the calibration, and its own
    loss is the most powerful score. The other records have no effect. A search over ridge, pull and r = RC_H/C_g found this
    to be the best choice for a test with a few ten thousand releases.

    Attributes:
        silent: the number of records without effect.
    """

    silent: int = 1

    def model(self) -> nn.Module:
        """The pretrained model."""
        model = nn.Linear(1, 1, bias=False).double()
        nn.init.zeros_(model.weight)
        return model

    def datasets(self) -> tuple[TensorDataset, TensorDataset]:
        """Two data sets of one size: with a silent record in the place of the canary, and with the canary."""
        silent, x, y = torch.zeros(self.silent, 1, dtype=torch.float64), math.sqrt(1.5), -1 / math.sqrt(6)
        first, second = (torch.cat([silent, torch.tensor([[v]], dtype=torch.float64)]) for v in (x, y))
        nothing = torch.zeros_like(first)
        return TensorDataset(nothing, nothing), TensorDataset(first, second)

    def loaders(self) -> tuple[DataLoader[Any], DataLoader[Any]]:
        """Two loaders: without the canary, and with it as one more record."""
        without, with_it = self.datasets()
        return (
            DataLoader(TensorDataset(*(t[: self.silent] for t in without.tensors)), batch_size=64),
            DataLoader(with_it, batch_size=64),
        )

    def arguments(self, epsilon: float) -> dict[str, Any]:
        """Arguments of ``make_private_expm``."""
        return {
            "epsilon": epsilon,
            "radius": 1.0,
            "proj_dim": None,
            "criterion": nn.MSELoss(),
            "max_grad_norm": 1.0,
            "max_curvature": 3.0,
            "regularization": 0.0,
            "nominal_size": self.silent,
        }

    def dp_sgd_arguments(self, epsilon: float, delta: float) -> dict[str, Any]:
        """Arguments of ``dp_sgd``: a single step on all records, because that reveals most of one record."""
        return {
            "epsilon": epsilon,
            "delta": delta,
            "learning_rate": 0.01,
            "max_grad_norm": 1.0,
            "batch_size": self.silent + 1,
            "epochs": 1,
            "momentum": 0.0,
        }

    def score(self, module: nn.Module) -> float:
        """The canary's loss."""
        theta = float(next(module.parameters()).detach().sum())
        return 1.5 * (theta + 1 / 3) ** 2


def audit_black_box(
    epsilon: float = 1.0,
    delta: float = 1e-5,
    *,
    releases: int = 1000,
    draws: int = 80_000,
    seed: int | None = None,
) -> Report:
    """Attack this engine and Opacus DP-SGD with the canary: by whole releases of each, and by many draws from one pass.

    **Privacy:** synthetic data only.
    """
    canary = Canary()
    model, loaders, datasets = canary.model(), canary.loaders(), canary.datasets()
    arguments = canary.arguments(epsilon)
    if seed is not None:
        arguments["noise_generator"] = np.random.default_rng(seed)
    with synthetic_data():
        reports = (
            black_box(
                *(model, *loaders, arguments, canary.score),
                releases=releases,
                subject=f"ExpM-Quad, {releases} releases each",
            ),
            black_box(
                *(model, *loaders, arguments, canary.score),
                releases=draws,
                draws_per_pass=draws,
                subject=f"ExpM-Quad, {draws} draws each",
            ),
            black_box_dp_sgd(
                *(model, *datasets, nn.MSELoss(), canary.dp_sgd_arguments(epsilon, delta), canary.score),
                releases=releases,
                seed=seed,
                subject=f"Opacus DP-SGD, {releases} runs each",
            ),
        )
    return Report(tuple(f for report in reports for f in report.findings))
