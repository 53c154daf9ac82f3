"""Events and ledgers that the tests of this room share."""

import copy
import math

import torch
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from opacus_expm import Release, Sparse
from opacus_expm.accounting.events import PlannedEvent

FACTS = {
    "epsilon_range": 1.0,
    "mu": 0.25,
    "adjacency": "add_remove",
    "epsilon": 1.0,
    "delta": 0.0,
    "calibration": "range",
    "radius": 0.5,
    "regularization": 2.0,
    "nominal_size": 40,
    "max_grad_norm": 1.0,
    "max_curvature": 1.5,
    "projection": "stiefel",
    "proj_dim": 5,
    "seed": 11,
    "sampler": "exact",
    "failure_probability": 0.0,
    "bounds": "given",
    "round": 2,
    "rounds": 3,
    "noise": "system",
}

DELTA = 1e-5

# What events cost, and runs of DP-SGD steps.
RELEASES = st.one_of(
    st.builds(PlannedEvent, st.floats(0.02, 2.0), st.one_of(st.just(math.inf), st.floats(0.05, 1.0))),
    st.builds(PlannedEvent, st.just(math.inf), st.floats(0.05, 1.0)),
)
RUNS = st.tuples(st.floats(0.7, 4.0), st.sampled_from([0.01, 0.1, 0.4, 1.0]), st.integers(1, 5))


def release(epsilon=1.0, **changes):
    """A pure release."""
    return Release(**(FACTS | {"epsilon_range": epsilon, "epsilon": epsilon, "mu": math.inf} | changes))


def copies(number, epsilon_range, mu=math.inf):
    """Equal events, as far as their cost goes."""
    return [PlannedEvent(epsilon_range, mu)] * number


def held(accountant):
    """Everything a ledger holds, by value."""
    return copy.deepcopy((accountant.releases, accountant.history))


# --- a small engine's arguments ------------------------------------------------------------------------------------

FEATURES, RECORDS = 3, 40


def make_model():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(FEATURES, 4), nn.Tanh(), nn.Linear(4, 1))


def make_loader():
    x = torch.randn(RECORDS, FEATURES, generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8)


def flat(module):
    return torch.cat([p.detach().flatten() for p in module.parameters()])


GOOD = {"criterion": nn.MSELoss(), "max_grad_norm": 1.0, "max_curvature": 1.0, "projection": Sparse(seed=0)}
