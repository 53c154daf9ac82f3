"""Seeded configurations and what they released when they were written down: restructuring must not change a number.

``python tests/test_golden.py`` writes ``golden.json`` anew. Do so only where a change of behaviour is meant, and say in the
commit which. Models are in float64, so that another processor's kernels change the last digits alone.
"""

import copy
import itertools
import json
import math
import random
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from opacus_expm import ExpMQuadEngine, Sparse, Stiefel
from opacus_expm.mechanism import secure

FILE = Path(__file__).with_name("golden.json")


def problem(seed=0, records=48):
    """A small classifier and records for it."""
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    x = torch.randn(records, 4, generator=generator, dtype=torch.float64)
    y = torch.randint(3, (records,), generator=generator)
    return model, DataLoader(TensorDataset(x, y), batch_size=16)


def noise():
    return np.random.default_rng(11)


def call(engine, epsilon=1.0, radius=0.3, proj_dim=5, **options):
    """``make_private_expm`` with a seeded subspace and seeded noise."""
    model, loader = problem()
    settings = {"criterion": nn.CrossEntropyLoss(), "projection": Sparse(seed=3), **options}
    return engine.make_private_expm(model, loader, epsilon, radius, proj_dim, **settings)


GIVEN = {"max_grad_norm": 0.4, "max_curvature": 0.3}


def in_a_loop(engine):
    """An Opacus training loop of two epochs."""
    model, loader = problem()
    module, optimizer, criterion, batches = engine.make_private_with_epsilon(
        grad_sample_mode="ghost",
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), criterion=nn.CrossEntropyLoss(),
        data_loader=loader, target_epsilon=2.0, target_delta=1e-5, epochs=2, max_grad_norm=0.4, radius=0.3, proj_dim=None,
    )  # fmt: skip
    for _ in range(2):
        for inputs, targets in batches:
            optimizer.zero_grad()
            criterion(module(inputs), targets).backward()
            optimizer.step()
    return module


def merged(engine):
    """Two parts gathered apart."""
    parts = []
    for seed in (0, 1):
        model, loader = problem(seed)
        options = {"criterion": nn.CrossEntropyLoss(), "projection": Sparse(seed=3), **GIVEN}
        parts.append(engine.gather(model, loader, 5, **options))
    return engine.release(parts[0].merge(parts[1]), 1.0, 0.3)


def securely(_):
    """Secure mode, with the operating system's noise replaced by a seeded one."""
    stream = random.Random(4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(secure.os, "urandom", stream.randbytes)
        engine = ExpMQuadEngine(secure_mode=True)
        return call(engine, **GIVEN), engine


CASES = {
    "range, dense": lambda e: call(e, projection=Stiefel(seed=3), **GIVEN),
    "range, sparse, ridge": lambda e: call(e, regularization=0.5, **GIVEN),
    "gaussian": lambda e: call(e, delta=1e-5, regularization=2.0, **GIVEN),
    "bought, pure": lambda e: call(e, epsilon=3.0),
    "bought, with delta": lambda e: call(e, epsilon=3.0, delta=1e-5),
    "public bounds": lambda e: call(e, public_loader=problem(7)[1]),
    "three rounds, pure": lambda e: call(e, rounds=3, **GIVEN),
    "full space, gradients alone": lambda e: call(
        e, delta=1e-5, proj_dim=None, max_grad_norm=0.4, max_curvature=0.0, projection=Sparse(seed=3)
    ),
    "views": lambda e: call(
        e, views=lambda x: [x, -x], max_grad_norm=0.4, max_curvature=0.0
    ),
    "a training loop": in_a_loop,
    "merged parts": merged,
    "secure mode": securely,
}  # fmt: skip


def found(name):
    """How far the parameters moved, and the ledger's entries."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of purchases on so few records
        engine = ExpMQuadEngine(noise_generator=noise())
        module = CASES[name](engine)
        module, engine = module if isinstance(module, tuple) else (module, engine)
    start = problem()[0]
    step = torch.cat([(b - a).detach().flatten() for a, b in zip(start.parameters(), module.parameters(), strict=True)])
    ledger = [
        {k: v for k, v in r.to_dict().items() if k != "receipt"} for r in engine.accountant.releases
    ]  # a random name
    return {"step": step.tolist(), "ledger": ledger}


def agree(a, b):
    """Equal, numbers up to the last digits."""
    if isinstance(a, float) and isinstance(b, float):
        return math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-12)
    if isinstance(a, list):
        return isinstance(b, list) and len(a) == len(b) and all(itertools.starmap(agree, zip(a, b, strict=True)))
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(agree(a[k], b[k]) for k in a)
    return a == b


@pytest.mark.parametrize("name", CASES)
def test_the_same_numbers_as_ever(name):
    expected = json.loads(FILE.read_text())[name]
    assert agree(json.loads(json.dumps(found(name))), expected)


def test_another_number_is_noticed():
    expected = json.loads(FILE.read_text())["range, dense"]
    other = copy.deepcopy(expected)
    other["step"][3] *= 1 + 1e-6
    assert agree(expected, expected)
    assert not agree(expected, other)


if __name__ == "__main__":
    FILE.write_text(json.dumps({name: found(name) for name in CASES}, indent=1) + "\n")
