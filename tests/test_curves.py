"""Closed privacy curves: printed values, inverses, and brute-force two-point laws."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import minimize_scalar

from opacus_expm import curves

EPSILONS = st.floats(1e-3, 40.0)
DELTAS = st.floats(1e-12, 0.5)


@pytest.mark.parametrize(("epsilon", "order", "expected"), [(1, 2, 0.240229), (1, 8, 0.635459), (5, 2, 3.627136)])
def test_bounded_range_rdp_values(epsilon, order, expected):
    assert curves.bounded_range_rdp(epsilon, order) == pytest.approx(expected, abs=5e-7)


def test_bounded_range_rdp_at_small_and_large_epsilon():
    assert curves.bounded_range_rdp(0.1, 64) == pytest.approx(0.055722, abs=5e-7)
    assert math.isfinite(curves.bounded_range_rdp(50, 63))
    assert curves.bounded_range_rdp(50, 63) <= 50


@pytest.mark.parametrize(
    ("epsilon_range", "epsilon", "expected"), [(1, 0, 0.244919), (1, 0.5, 0.077405), (5, 2, 0.607621)]
)
def test_bounded_range_delta_values(epsilon_range, epsilon, expected):
    assert curves.bounded_range_delta(epsilon_range, epsilon) == pytest.approx(expected, abs=5e-7)


@pytest.mark.parametrize(("epsilon", "expected"), [(0.1, 0.032521), (1, 0.268051), (5, 1.121242)])
def test_gaussian_mu_values(epsilon, expected):
    assert curves.gaussian_mu(epsilon, 1e-5) == pytest.approx(expected, abs=5e-7)


def _two_point_laws(epsilon: float, t: float) -> tuple[np.ndarray, np.ndarray]:
    """The pair of laws whose log ratio takes the values t and t − ε: P = (p, 1−p), Q = (p e^{−t}, (1−p) e^{ε−t})."""
    p = (1 - math.exp(epsilon - t)) / (math.exp(-t) - math.exp(epsilon - t))
    return np.array([p, 1 - p]), np.array([p * math.exp(-t), (1 - p) * math.exp(epsilon - t)])


@pytest.mark.parametrize("epsilon", [0.1, 1.0, 4.0])
def test_curves_are_the_supremum_over_two_point_laws(epsilon):
    """The closed forms equal a numerical supremum, so they are neither too small (unsafe) nor loose."""

    def renyi(t, order):
        p, q = _two_point_laws(epsilon, t)
        return math.log(np.sum(p**order * q ** (1 - order))) / (order - 1)

    def hockey_stick(t, level):
        p, q = _two_point_laws(epsilon, t)
        return np.sum(np.maximum(p - math.exp(level) * q, 0))

    inside = (1e-9, epsilon - 1e-9)
    for order in (1.5, 2, 8, 40):
        best = -minimize_scalar(
            lambda t, a=order: -renyi(t, a), bounds=inside, options={"xatol": 1e-12}, method="bounded"
        ).fun
        assert curves.bounded_range_rdp(epsilon, order) == pytest.approx(best, rel=1e-6)
    for level in (0.0, 0.3 * epsilon, 0.9 * epsilon):
        best = max(hockey_stick(t, level) for t in np.linspace(*inside, 20_001))
        assert curves.bounded_range_delta(epsilon, level) == pytest.approx(best, rel=1e-5)


@given(EPSILONS, st.floats(1.01, 300.0))
def test_rdp_is_within_the_simple_bounds_and_grows_with_order(epsilon, order):
    value = curves.bounded_range_rdp(epsilon, order)
    assert 0 < value <= min(epsilon, order * epsilon**2 / 8) * (1 + 1e-12)
    assert curves.bounded_range_rdp(epsilon, order * 1.1) >= value * (1 - 1e-9) - 1e-12


@given(EPSILONS, DELTAS)
def test_bounded_range_inverses(epsilon, delta):
    wide = curves.bounded_range_for(epsilon, delta)
    assert wide >= epsilon * (1 - 1e-11)
    # On the private side of the target, and within rounding of it.
    back = curves.bounded_range_epsilon(wide, delta)
    assert back <= epsilon * (1 + 1e-12)
    assert back == pytest.approx(epsilon, rel=1e-9, abs=1e-9)
    assert curves.bounded_range_delta(wide, epsilon) <= delta * (1 + 1e-9)


@given(st.floats(1e-2, 40.0), DELTAS)
def test_gaussian_inverses(epsilon, delta):
    mu = curves.gaussian_mu(epsilon, delta)
    assert curves.gaussian_epsilon(mu, delta) <= epsilon
    assert curves.gaussian_epsilon(mu, delta) == pytest.approx(epsilon, rel=1e-7, abs=1e-7)
    assert curves.gaussian_delta(mu * 1.001, epsilon) > delta


def test_edges():
    assert curves.bounded_range_for(2.0, 0.0) == 2.0
    assert curves.bounded_range_epsilon(2.0, 0.0) == 2.0
    assert curves.bounded_range_delta(2.0, 3.0) == 0.0
    assert curves.bounded_range_epsilon(1.0, 0.3) == 0.0
    assert curves.gaussian_epsilon(1.0, 0.0) == math.inf
    assert curves.gaussian_epsilon(math.inf, 0.1) == math.inf
    assert curves.gaussian_mu(1.0, 0.0) == 0.0
    assert curves.gaussian_epsilon(0.01, 0.5) == 0.0
