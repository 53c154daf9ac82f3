"""A small model, its data, and a training loop under this engine: what the tests of the swap share."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from opacus_expm import ExpMQuadEngine, Sparse
from opacus_expm.noise import Noise

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


def make_loop(engine=None, model=None, loader=None, optimizer=None, seed=0, **changes):
    """A loop with seeded noise, unless a budget refuses it or secure mode has its own."""
    engine = ExpMQuadEngine() if engine is None else engine
    if not engine.accountant.budget:
        generator = seed if isinstance(seed, torch.Generator) else np.random.default_rng(seed)
        engine.noise = Noise(generator, engine.secure_mode)
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
        "projection": Sparse(seed=5),
        "grad_sample_mode": "ghost",
    }
    options |= changes
    module, optimizer, *rest = engine.make_private_with_epsilon(**options)
    *given, loader = rest
    criterion = given[0] if given else options["criterion"]  # in hooks mode the script has its own
    return Loop(engine, module, optimizer, criterion, loader)


def make_sampled(engine=None, model=None, loader=None, seed=0, **changes):
    """A loop without a radius, whose batches are samples."""
    without = {"target_delta": 1e-5, "max_grad_norm": None, "radius": None, "proj_dim": None, "projection": "sparse"}
    return make_loop(engine, model, loader, seed=seed, **(without | {"epochs": 5} | changes))
