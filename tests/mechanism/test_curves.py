"""Closed privacy curves: printed values, inverses, and brute-force two-point laws."""

import math

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from scipy.optimize import minimize_scalar
from scipy.special import log_ndtr, ndtri_exp

from opacus_expm.mechanism import curves

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


@given(st.floats(-8, 0).map(lambda x: 10**x), st.floats(-17, -0.1).map(lambda x: 10**x))
@example(3.9270859910726827e-08, 1.083091145585931e-11)  # a step without an absolute floor does not converge here
def test_gaussian_epsilon_is_found_where_it_is_next_to_zero(mu, short):
    """δ just below δ(0), down to the last bit: the statement still holds, and is still tight."""
    delta = curves.gaussian_delta(mu, 0.0) * (1 - short)
    epsilon = curves.gaussian_epsilon(mu, delta)
    assert curves.gaussian_delta(mu, epsilon) <= delta
    assert epsilon == 0 or curves.gaussian_delta(mu, epsilon * (1 - 1e-6) - 1e-14) > delta


# --- The Gaussian curve below every bounded-range mechanism ---------------------------------------------------------

TINY = [1e-300, 1e-20, 1e-12, 1e-9, 1e-6]
LARGE = [200.0, 999.0, 1001.0, 1e4, 1e6]


def _log_gap(x: float) -> float:
    """The logarithm of 1 − e^{−x}."""
    return math.log(-math.expm1(-x))


def _kink(epsilon: float, t: float) -> tuple[float, float, float]:
    """Of the trade-off curve of the two-point laws: ln p, ln(1−p) and ln β, where α = 1−p and β = p·e^{−t}."""
    log_p = _log_gap(epsilon - t) - _log_gap(epsilon)
    log_rest = t - epsilon + _log_gap(t) - _log_gap(epsilon)
    return log_p, log_rest, log_p - t


def _quantile(log_p: float, log_rest: float) -> float:
    """Φ⁻¹(p), from whichever of p and 1−p is the smaller."""
    return float(ndtri_exp(log_p) if log_p < log_rest else -ndtri_exp(log_rest))


def _above_the_gaussian(epsilon: float, t: float, mu: float) -> float:
    """How far the kink lies above the curve of two unit Gaussians at distance μ: ln β − ln Φ(Φ⁻¹(1−α) − μ)."""
    log_p, log_rest, log_beta = _kink(epsilon, t)
    return log_beta - float(log_ndtr(_quantile(log_p, log_rest) - mu))


def _mu_needed(epsilon: float, t: float) -> float:
    """The μ whose curve goes through the kink."""
    log_p, log_rest, log_beta = _kink(epsilon, t)
    log_alpha_side = math.log1p(-math.exp(log_beta))
    return _quantile(log_p, log_rest) - _quantile(log_beta, log_alpha_side)


def test_the_kink_is_that_of_the_two_point_laws():
    for epsilon, t in ((1.0, 0.3), (4.0, 2.0), (0.1, 0.09)):
        p, q = _two_point_laws(epsilon, t)
        log_p, log_rest, log_beta = _kink(epsilon, t)
        assert [math.exp(log_p), math.exp(log_rest)] == pytest.approx(p, rel=1e-12)
        assert math.exp(log_beta) == pytest.approx(q[0], rel=1e-12)


@given(st.floats(1e-3, 300.0), st.floats(1e-6, 1 - 1e-6))
def test_no_bounded_range_mechanism_is_easier_to_tell_apart_than_its_gaussians(epsilon, share):
    mu = curves.bounded_range_mu(epsilon)
    assert _above_the_gaussian(epsilon, share * epsilon, mu) >= -1e-12 * max(1.0, epsilon)
    assert _mu_needed(epsilon, share * epsilon) <= mu * (1 + 1e-9)


@pytest.mark.parametrize("epsilon", [1e-3, 0.1, 0.999, 1.0, 4.0, 30.0, 300.0])
def test_the_gaussians_are_touched_in_the_middle_and_nearer_ones_are_crossed(epsilon):
    mu = curves.bounded_range_mu(epsilon)
    assert abs(_above_the_gaussian(epsilon, epsilon / 2, mu)) <= 1e-9 * min(1.0, mu)
    assert _mu_needed(epsilon, epsilon / 2) == pytest.approx(mu, rel=1e-9)
    # Nowhere else is as much needed, and a thousandth less is too little.
    others = [_mu_needed(epsilon, share * epsilon) for share in np.linspace(0.001, 0.999, 999)]
    assert int(np.argmax(others)) == 499
    assert _above_the_gaussian(epsilon, epsilon / 2, mu * (1 - 1e-3)) < -1e-4 * mu


@given(st.one_of(st.floats(1e-3, 1e6), st.sampled_from(TINY + LARGE)))
def test_range_and_mu_are_inverse_on_the_private_side(epsilon):
    mu = curves.bounded_range_mu(epsilon)
    assert curves.bounded_range_within(mu) == pytest.approx(epsilon, rel=1e-11)
    # What is allowed for a μ costs no more than it, and barely less.
    for allowed in (mu, 0.5 * mu):
        back = curves.bounded_range_mu(curves.bounded_range_within(allowed))
        assert back <= allowed * (1 + 2e-12)
        assert back == pytest.approx(allowed, rel=1e-11)


@pytest.mark.parametrize("epsilon", TINY)
def test_tiny_ranges_keep_their_digits(epsilon):
    """μ = ε√(2π)/4 to first order, with a relative error of order ε²; a difference of logarithms loses it all."""
    first_order = epsilon * math.sqrt(2 * math.pi) / 4
    assert curves.bounded_range_mu(epsilon) == pytest.approx(first_order, rel=max(3e-12, epsilon))
    assert curves.bounded_range_mu(epsilon) >= first_order * (1 - epsilon**2)
    assert curves.bounded_range_within(first_order) == pytest.approx(epsilon, rel=max(3e-12, epsilon))


@pytest.mark.parametrize("epsilon", LARGE)
def test_large_ranges_are_not_cut_off(epsilon):
    """For large ε, 2 logit Φ(μ/2) is −2 ln Φ(−μ/2)."""
    mu = curves.bounded_range_mu(epsilon)
    assert -2 * float(log_ndtr(-mu / 2)) == pytest.approx(epsilon, rel=1e-11)
    assert curves.bounded_range_mu(2 * epsilon) > 1.3 * mu


def test_no_range_no_mu():
    assert curves.bounded_range_mu(math.inf) == math.inf
    assert curves.bounded_range_within(math.inf) == math.inf


@given(st.floats(1e-3, 5000.0), st.floats(1e-12, 0.3))
def test_by_mu_no_range_costs_less_than_it_does(epsilon, delta):
    """The exact curve of a range is the least that holds for it; what goes through μ may not claim less."""
    assert curves.gaussian_epsilon(curves.bounded_range_mu(epsilon), delta) >= curves.bounded_range_epsilon(
        epsilon, delta
    ) * (1 - 1e-12)


def test_edges():
    assert curves.bounded_range_for(2.0, 0.0) == 2.0
    assert curves.bounded_range_epsilon(2.0, 0.0) == 2.0
    assert curves.bounded_range_delta(2.0, 3.0) == 0.0
    assert curves.bounded_range_epsilon(1.0, 0.3) == 0.0
    assert curves.gaussian_epsilon(1.0, 0.0) == math.inf
    assert curves.gaussian_epsilon(math.inf, 0.1) == math.inf
    assert curves.gaussian_mu(1.0, 0.0) == 0.0
    assert curves.gaussian_epsilon(0.01, 0.5) == 0.0
