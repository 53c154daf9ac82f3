"""The source paper's practice of reading the bounds off the private data, and two data sets that break its claim."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from opacus_expm import _check, paper
from opacus_expm.audit.findings import Finding, Report, synthetic_data
from opacus_expm.engine import ExpMQuadEngine
from opacus_expm.mechanism.privacy_loss import PrivacyLoss


def paper_practice(epsilon: float = 1.0, *, records: int = 100, factor: float = 10.0) -> Report:
    """Bounds read off the private data and inflated, as in the source paper: a pair of data sets that breaks the claim.

    D holds ``records`` pairs x = 1, y = −½ for the model f(x) = θx at θ = 0, under mean squared error. D′ holds one more
    record, with x and y ``factor`` times as large. That one record raises J̄ and Ē ``factor``-fold and both bounds
    factor²-fold, and lowers c as much. On D the density falls by c times n utilities across the ball, and on D′ it is nearly
    flat. The loss grows with n and has no bound, while the claimed ε stays the same.

    Args:
        epsilon: ε that is claimed.
        records: n, the number of records in D.
        factor: how much larger the record is that D′ has and D lacks.

    **Privacy:** synthetic data only.
    """
    _check.positive("factor", factor)
    x = torch.ones(_check.positive_int("records", records) + 1, 1, dtype=torch.float64)
    x[-1] = factor
    model = nn.Linear(1, 1, bias=False).double()
    nn.init.zeros_(model.weight)
    without, with_it = (DataLoader(TensorDataset(part, -part / 2), batch_size=256) for part in (x[:-1], x))
    densities = []
    with synthetic_data():
        for loader in (without, with_it):
            bounds = paper.bounds_read_off(model, loader, nn.MSELoss())
            statistics = ExpMQuadEngine(distributed=False).gather(
                model,
                loader,
                None,
                criterion=nn.MSELoss(),
                max_grad_norm=bounds.gradient,
                max_curvature=bounds.curvature,
                nominal_size=records,
            )
            calibrated = paper.calibrate(statistics.sums.sensitivity("add_remove"), epsilon, 1.0)
            densities.append(statistics.density(calibrated.inverse_temperature, 1.0, 0.0))
    found = PrivacyLoss(densities[0], densities[1]).largest()
    return Report((Finding("bounds read off the data", "exact", "add_remove", epsilon, 0.0, epsilon, found),))
