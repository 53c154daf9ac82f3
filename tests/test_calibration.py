"""Calibration: closed forms, the better of the valid ones, and the density ratio itself by quadrature."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from opacus_expm import curves
from opacus_expm.calibration import calibrate
from opacus_expm.sums import Sensitivity

MARGIN = 1 - 1e-6


def _calibrate(sensitivity, **changes):
    options = {"epsilon": 1.0, "delta": 0.0, "radius": 0.7, "regularization": 0.0, "nominal_size": 1000}
    return calibrate(sensitivity, **{**options, **changes})


def test_range_is_epsilon_over_width():
    sensitivity = Sensitivity(1.3, 2.0, False, "add_remove")
    found = _calibrate(sensitivity, epsilon=2.5)
    assert found.inverse_temperature == pytest.approx(2.5 / sensitivity.width(0.7) * MARGIN, rel=1e-12)
    assert (found.epsilon_range, found.mu, found.method) == (2.5, math.inf, "range")


def test_replace_one_halves_the_temperature():
    add = _calibrate(Sensitivity(1.3, 2.0, False, "add_remove"))
    replace = _calibrate(Sensitivity(1.3, 2.0, False, "replace_one"))
    assert add.inverse_temperature == pytest.approx(2 * replace.inverse_temperature, rel=1e-12)


def test_gaussian_formula():
    sensitivity = Sensitivity(1.3, 2.0, False, "add_remove")
    found = _calibrate(sensitivity, delta=1e-5, regularization=3.0, calibration="gaussian")
    mu = curves.gaussian_mu(1.0, 1e-5)
    assert found.inverse_temperature == pytest.approx(3000 * (mu / (1.3 + 0.7 * 2.0)) ** 2 * MARGIN, rel=1e-9)
    assert found.mu == mu


def test_paper_formula_and_what_it_really_spends():
    sensitivity = Sensitivity(1.3, 2.0, False, "add_remove")
    found = _calibrate(sensitivity, calibration="paper")
    c = 1.0 / (2 * (2 * 0.7 * 1.3 + 0.7**2 * 2.0))
    assert found.inverse_temperature == pytest.approx(c * MARGIN, rel=1e-12)
    assert found.epsilon_range == pytest.approx(c * sensitivity.width(0.7), rel=1e-12)
    assert found.epsilon_range < 0.5


@given(st.floats(0.01, 20), st.floats(1e-9, 0.1), st.floats(0.0, 10.0), st.floats(0.01, 3.0), st.floats(0.0, 5.0))
def test_auto_takes_the_larger_valid_temperature(epsilon, delta, ridge, radius, curvature):
    sensitivity = Sensitivity(1.0, curvature, False, "add_remove")
    options = {"epsilon": epsilon, "delta": delta, "regularization": ridge, "radius": radius}
    auto = _calibrate(sensitivity, **options)
    others = [_calibrate(sensitivity, **options, calibration="range")]
    if ridge > 0:
        others.append(_calibrate(sensitivity, **options, calibration="gaussian"))
    assert auto.inverse_temperature == max(o.inverse_temperature for o in others)
    # Whatever was chosen is (ε, δ)-DP by one of the two curves.
    spent = min(curves.bounded_range_epsilon(auto.epsilon_range, delta), curves.gaussian_epsilon(auto.mu, delta))
    assert spent <= epsilon * (1 + 1e-12)
    assert spent == pytest.approx(epsilon, rel=1e-6, abs=1e-6)


@pytest.mark.parametrize(("delta", "ridge"), [(0.0, 1.0), (1e-5, 0.0)])
def test_gaussian_needs_delta_and_ridge(delta, ridge):
    with pytest.raises(ValueError, match="calibration='gaussian' needs delta > 0 and regularization > 0"):
        _calibrate(Sensitivity(1, 1, False, "add_remove"), delta=delta, regularization=ridge, calibration="gaussian")


# --- the density ratio itself ---------------------------------------------------------------------------------------


def _log_density(c, gradient, curvature, ridge, grid, radius):
    """Normalised log density on the points of a square grid that lie in the ball, and the mask."""
    inside = (grid**2).sum(-1) <= radius**2
    quadratic = grid @ gradient + 0.5 * np.einsum("...i,ij,...j", grid, curvature + ridge * np.eye(2), grid)
    log_p = np.where(inside, -c * quadratic, -np.inf)
    top = log_p.max()
    return log_p - top - np.log(np.exp(log_p - top).sum()), inside


def _largest_loss(sensitivity, *, epsilon, radius, base_g, base_s, g, h, c_factor=1.0, points=801):
    """max |ln p_D − ln p_D′| over the ball, D′ = D plus one record (g, h)."""
    c = c_factor * _calibrate(sensitivity, epsilon=epsilon, radius=radius).inverse_temperature
    axis = np.linspace(-radius, radius, points)
    grid = np.stack(np.meshgrid(axis, axis, indexing="ij"), -1)
    before, inside = _log_density(c, base_g, base_s, 0.0, grid, radius)
    after, _ = _log_density(c, base_g + g, base_s + h, 0.0, grid, radius)
    return np.abs(after[inside] - before[inside]).max()


@pytest.mark.parametrize("epsilon", [0.5, 2.0])
@pytest.mark.parametrize("seed", range(4))
def test_privacy_loss_never_exceeds_epsilon(epsilon, seed):
    random = np.random.default_rng(seed)
    sensitivity = Sensitivity(1.3, 2.0, False, "add_remove")
    direction = random.standard_normal(2)
    root = random.standard_normal((2, 2))
    h = root @ root.T
    loss = _largest_loss(
        sensitivity,
        epsilon=epsilon,
        radius=0.7,
        base_g=random.standard_normal(2) * 20,
        base_s=np.diag(random.uniform(0, 30, 2)),
        g=1.3 * direction / np.linalg.norm(direction),
        h=2.0 * h / np.linalg.norm(h, 2),
    )
    assert loss <= epsilon


def _extremal_pair(radius, c_g, c_h):
    """Gradient, curvature, and the two points of the ball between which the utility changes by W*."""
    r = radius * c_h / c_g
    x = r / (1 + math.sqrt(1 + 2 * r * r))
    d = 2 * radius * math.sqrt(1 - x * x) * np.array([1.0, 0.0])
    s = 2 * radius * x * np.array([0.0, 1.0])
    # −½dᵀHs is largest, ¼C_H|d||s|, for the projector on d − s in the plane of unit vectors.
    v = np.array([1.0, -1.0]) / math.sqrt(2)
    return -c_g * np.array([1.0, 0.0]), c_h * np.outer(v, v), (s + d) / 2, (s - d) / 2


@pytest.mark.parametrize("epsilon", [0.5, 2.0])
def test_extremal_pair_almost_reaches_epsilon_and_a_larger_temperature_breaks_it(epsilon):
    """Under a strongly tilted base the normalising constants stop helping, and the loss comes close to ε."""
    radius, c_g, c_h = 0.7, 1.3, 4.0
    sensitivity = Sensitivity(c_g, c_h, False, "add_remove")
    g, h, best, worst = _extremal_pair(radius, c_g, c_h)
    reached = (-best @ g - 0.5 * best @ h @ best) - (-worst @ g - 0.5 * worst @ h @ worst)
    assert reached == pytest.approx(sensitivity.width(radius), rel=1e-9)
    tilted = {"epsilon": epsilon, "radius": radius, "base_s": np.zeros((2, 2)), "g": g, "h": h}
    # All the mass of the base at one of the two points: the other one then shows the whole range.
    loss = _largest_loss(sensitivity, **tilted, base_g=-4000.0 * worst)
    assert 0.99 * epsilon < loss <= epsilon
    assert _largest_loss(sensitivity, **tilted, base_g=-4000.0 * worst, c_factor=1.02) > epsilon


def test_size_that_follows_the_data_breaks_the_claim():
    """With λN tracking n, one record also changes the ridge: the true width at R=C_g=C_H=1, λ=3 is 3.125 > 2.5."""
    simple_bound = 2 * 1 * 1 + 0.5 * 1 * 1
    points = np.linspace(-1, 1, 200_001)
    utility = -points - 0.5 * points**2 - 0.5 * 3 * points**2
    assert Sensitivity(1.0, 1.0, False, "add_remove").width(1.0) <= simple_bound
    assert utility.max() - utility.min() == pytest.approx(3.125, abs=1e-6)
