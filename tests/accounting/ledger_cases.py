"""Events and ledgers that the tests of this room share."""

import copy
import math

from opacus_expm import Release

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


def release(epsilon=1.0, **changes):
    """A pure release."""
    return Release(**(FACTS | {"epsilon_range": epsilon, "epsilon": epsilon, "mu": math.inf} | changes))


def held(accountant):
    """Everything a ledger holds, by value."""
    return copy.deepcopy((accountant.releases, accountant.history))
