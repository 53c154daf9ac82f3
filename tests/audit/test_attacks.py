"""Lower bounds from scores: valid, close, and refused where they would not be valid."""

import math

import numpy as np
import pytest
from audited import ARGUMENTS, NOT_PRIVATE, loader_of, regression
from torch import nn
from torch.utils.data import TensorDataset

from opacus_expm import audit
from opacus_expm.audit import Canary


def test_an_audit_warns_that_its_report_is_not_private():
    model, x, y = regression()
    pair = (model, loader_of(x, y), loader_of(x[:-1], y[:-1]))
    with pytest.warns(UserWarning, match=r"audit_pair\(\).*" + NOT_PRIVATE):
        audit.audit_pair(*pair, ARGUMENTS, draws=10)
    with pytest.warns(UserWarning, match=r"black_box\(\).*" + NOT_PRIVATE):
        audit.black_box(*pair, ARGUMENTS, lambda m: 0.0, releases=4)
    datasets = (TensorDataset(x, y), TensorDataset(x, y + 1))
    with pytest.warns(UserWarning, match=r"black_box_dp_sgd\(\).*" + NOT_PRIVATE):
        audit.black_box_dp_sgd(
            model, *datasets, nn.MSELoss(), Canary(silent=11).dp_sgd_arguments(1.0, 1e-5), lambda m: 0.0, releases=4
        )


def _randomized_response(epsilon, count, seed):
    """Answers of two worlds, truth kept with probability e^ε/(1 + e^ε)."""
    random = np.random.default_rng(seed)
    truth = 1 / (1 + math.exp(-epsilon))
    return (random.random(count) < truth).astype(float), (random.random(count) > truth).astype(float)


def test_randomized_response_is_bounded_from_below_and_closely():
    bounds = [audit.lower_bound(*_randomized_response(1.0, 20_000, seed)) for seed in range(40)]
    assert min(bounds) > 0.9
    assert sum(b > 1.0 for b in bounds) <= 4  # 2 expected at the most; P(more than 6) < 1e-2
    # a mechanism with a little more than it claims is found out
    assert min(audit.lower_bound(*_randomized_response(1.2, 20_000, seed)) for seed in range(10)) > 1.0


def test_equal_worlds_are_not_told_apart():
    random = np.random.default_rng(0)
    bounds = [audit.lower_bound(random.random(2000), random.random(2000)) for _ in range(40)]
    assert sum(b > 0 for b in bounds) <= 5


def test_delta_is_taken_off_the_event():
    """A mechanism that names its data set with probability 0.05, and says nothing else."""
    random = np.random.default_rng(0)
    first, second = random.random(8000), random.random(8000)
    first[random.random(8000) < 0.05] = 2.0
    assert audit.lower_bound(first, second) > 3
    assert audit.lower_bound(first, second, delta=0.06) < 0.2


@pytest.mark.parametrize(
    ("first", "second", "reason"),
    [
        (np.zeros(3), np.zeros(9), "at least 4 scores"),
        (np.zeros((9, 2)), np.zeros(9), "one dimension"),
        (np.full(9, np.nan), np.zeros(9), "finite scores"),
    ],
)
def test_scores_that_cannot_be_used(first, second, reason):
    with pytest.raises(ValueError, match=reason):
        audit.lower_bound(first, second)


def test_many_draws_need_passes_without_randomness():
    model, x, y = regression()
    pair = (model, loader_of(x, y), loader_of(x[:-1], y[:-1]))
    with pytest.raises(ValueError, match="draws_per_pass=1"), pytest.warns(UserWarning, match=NOT_PRIVATE):
        audit.black_box(*pair, ARGUMENTS, lambda m: 0.0, releases=10, draws_per_pass=5)
