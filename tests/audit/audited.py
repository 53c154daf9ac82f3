"""What tests of the audit share: small data, and the arguments of a release."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from opacus_expm.audit import Finding

NOT_PRIVATE = "report is NOT private"


def by_method(report):
    return {f.method: f for f in report.findings}


def regression(records=12):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(records, 5, generator=generator)
    y = x.sum(1, keepdim=True) + torch.randn(records, 1, generator=generator)
    torch.manual_seed(0)
    return nn.Linear(5, 1), x, y


ARGUMENTS = {
    "epsilon": 2.0,
    "radius": 0.5,
    "proj_dim": 2,
    "criterion": nn.MSELoss(),
    "max_grad_norm": 1.0,
    "max_curvature": 1.0,
}


def loader_of(x, y, **options):
    return DataLoader(TensorDataset(x, y), batch_size=5, **options)


def line_at_zero():
    model = nn.Linear(1, 1, bias=False).double()
    nn.init.zeros_(model.weight)
    return model


SOUND = Finding("sound", "exact", "add_remove", 1.0, 0.0, 1.0, 0.5)
BROKEN = Finding("broken", "exact", "add_remove", 1.0, 0.0, 1.0, 1.5)
