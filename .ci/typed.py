"""A small user of the package: one private release, with types. Checked by ``mypy --strict``, and run by ``.ci/pythons``."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from opacus_expm import ExpMQuadEngine

x = torch.randn(400, 3)
loader = DataLoader(TensorDataset(x, (x[:, 0] > 0).long()), batch_size=100)
engine = ExpMQuadEngine(budget=(2.0, 1e-5))
criterion = nn.CrossEntropyLoss()
learned: nn.Module = engine.make_private_expm(nn.Linear(3, 2), loader, 1.0, delta=1e-5, criterion=criterion)
drawn: nn.Module = engine.make_private_expm(
    nn.Linear(3, 2), loader, 0.5, 0.5, 2, criterion=criterion, max_grad_norm=1.0, max_curvature=1.0
)
spent: float = engine.get_epsilon(delta=1e-5)
assert spent <= 2.0
print(f"epsilon = {spent:.4g} of {engine}")
