"""How far one record can move the utility: closed forms, and searches that come close to them and never beyond."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize

from opacus_expm.mechanism.sensitivity import Sensitivity

R, G = 0.7, 1.3
GENERAL = {0.3: 1.83993, 1.0: 2.00367, 2.0: 2.36425, 5.0: 3.64162}
PARALLEL = {0.3: 1.82, 1.0: 1.82, 2.0: 2.0475, 5.0: 3.276}


def sensitivity(ratio, *, parallel=False, adjacency="add_remove"):
    """Bounds with R·C_H/C_g equal to ``ratio``."""
    return Sensitivity(G, ratio * G / R, parallel, adjacency)


@pytest.mark.parametrize("ratio", GENERAL)
def test_width_in_closed_form(ratio):
    assert sensitivity(ratio).width(R) == pytest.approx(GENERAL[ratio], abs=5.1e-6)
    assert sensitivity(ratio, parallel=True).width(R) == pytest.approx(PARALLEL[ratio], abs=1e-12)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    radius=st.floats(1e-3, 1e3),
    max_grad_norm=st.floats(1e-3, 1e3),
    max_curvature=st.floats(0, 1e3),
)
def test_widths_are_in_order(radius, max_grad_norm, max_curvature):
    """2RC_g ≤ W₁ ≤ W* ≤ 2RC_g + ½R²C_H."""
    floor = 2 * radius * max_grad_norm
    ceiling = floor + 0.5 * radius**2 * max_curvature
    narrow, wide = (Sensitivity(max_grad_norm, max_curvature, p, "add_remove").width(radius) for p in (True, False))
    assert floor * (1 - 1e-12) <= narrow <= wide * (1 + 1e-12)
    assert wide <= ceiling * (1 + 1e-12)


def test_width_without_curvature_is_that_of_the_gradient():
    for parallel in (True, False):
        assert Sensitivity(G, 0.0, parallel, "add_remove").width(R) == pytest.approx(2 * R * G, rel=1e-15)


def _unit(v):
    return v / max(np.linalg.norm(v), 1e-12)


def _inside(v, radius):
    return radius * v / max(1.0, np.linalg.norm(v))


def _gain_general(v, k, max_curvature):
    """u(ξ) − u(η) for g, H, ξ, η read off a vector of free numbers, all within the bounds."""
    g = _inside(v[:k], G)
    factor = v[k : k + k * k].reshape(k, k)
    h = factor @ factor.T
    h = h * max_curvature / max(np.linalg.norm(h, 2), 1.0)
    xi, eta = _inside(v[-2 * k : -k], R), _inside(v[-k:], R)
    return (-xi @ g - 0.5 * xi @ h @ xi) - (-eta @ g - 0.5 * eta @ h @ eta)


def _gain_parallel(v, k, max_curvature):
    """The same where g is parallel to the only row of B."""
    direction = _unit(v[:k])
    g = G * math.tanh(v[k]) * direction
    h = max_curvature * math.tanh(v[k + 1]) ** 2 * np.outer(direction, direction)
    xi, eta = _inside(v[-2 * k : -k], R), _inside(v[-k:], R)
    return (-xi @ g - 0.5 * xi @ h @ xi) - (-eta @ g - 0.5 * eta @ h @ eta)


def _greatest(gain, size, k, max_curvature, seed):
    """Greatest gain over random points and local searches."""
    random = np.random.default_rng(seed)
    starts = 2.0 * random.standard_normal((4000, size))
    values = np.array([gain(v, k, max_curvature) for v in starts])
    best = values.max()
    for start in starts[np.argsort(values)[-6:]]:
        found = minimize(lambda v: -gain(v, k, max_curvature), start, method="Powell", options={"maxiter": 200})
        best = max(best, -found.fun)
    return best


@pytest.mark.parametrize("k", [2, 3])
@pytest.mark.parametrize("ratio", GENERAL)
def test_width_is_the_least_upper_bound(ratio, k):
    bounds = sensitivity(ratio)
    best = _greatest(_gain_general, 3 * k + k * k, k, bounds.max_curvature, seed=k)
    assert 0.999 * bounds.width(R) < best <= bounds.width(R) * (1 + 1e-9)


@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("ratio", PARALLEL)
def test_parallel_width_is_the_least_upper_bound(ratio, k):
    bounds = sensitivity(ratio, parallel=True)
    best = _greatest(_gain_parallel, 3 * k + 2, k, bounds.max_curvature, seed=k)
    assert 0.999 * bounds.width(R) < best <= bounds.width(R) * (1 + 1e-9)


def test_the_parallel_width_would_be_too_small_in_general():
    """The search must be able to tell the two widths apart."""
    best = _greatest(_gain_general, 10, 2, sensitivity(2.0).max_curvature, seed=0)
    assert best > 1.1 * sensitivity(2.0, parallel=True).width(R)


@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize("ratio", GENERAL)
def test_replacing_a_record_costs_twice(ratio, parallel):
    once = sensitivity(ratio, parallel=parallel).width(R)
    assert sensitivity(ratio, parallel=parallel, adjacency="replace_one").width(R) == pytest.approx(2 * once, rel=1e-15)


def test_lipschitz_constants():
    assert sensitivity(2.0).lipschitz(R) == pytest.approx(G + 2.0 * G, rel=1e-14)
    assert sensitivity(2.0, adjacency="replace_one").lipschitz(R) == pytest.approx(2 * G + 2.0 * G, rel=1e-14)
    assert Sensitivity(G, 0.0, False, "add_remove").lipschitz(R) == G


@pytest.mark.parametrize("adjacency", ["add_remove", "replace_one"])
def test_lipschitz_constant_bounds_every_slope(adjacency):
    """|∇(change of Σu)| = |g + Hξ| on the ball, for one record or for the difference of two."""
    random = np.random.default_rng(0)
    bounds = sensitivity(2.0, adjacency=adjacency)
    worst = 0.0
    for _ in range(3000):
        slope = np.zeros(3)
        xi = _inside(random.standard_normal(3) * 3, R)
        for sign in (1, -1) if adjacency == "replace_one" else (1,):
            factor = random.standard_normal((3, random.integers(1, 4)))
            h = factor @ factor.T
            # Half of the time the record that pushes hardest along ξ.
            g = G * sign * _unit(xi) if random.random() < 0.5 else _inside(random.standard_normal(3) * 3, G)
            h = np.outer(xi, xi) if sign > 0 and random.random() < 0.5 else h
            slope += sign * (g + bounds.max_curvature * h / np.linalg.norm(h, 2) @ xi * (sign > 0))
        worst = max(worst, float(np.linalg.norm(slope)))
    assert 0.99 * bounds.lipschitz(R) < worst <= bounds.lipschitz(R) * (1 + 1e-12)


def test_a_projection_widens_parallel_records_by_no_more_than_a_known_factor():
    """W*, at most 2/√3 of W₁; nothing changes where gradients were not parallel, and the slope has the same bound."""
    ratios = []
    for r in np.geomspace(0.01, 100, 2001):
        narrow, turned, general = (
            Sensitivity(1.0, r, *facts)
            for facts in ((True, "add_remove"), (True, "add_remove", True), (False, "add_remove"))
        )
        assert turned.width(1.0) == general.width(1.0)
        assert turned.lipschitz(1.0) == narrow.lipschitz(1.0)
        ratios.append(turned.width(1.0) / narrow.width(1.0))
    assert min(ratios) >= 1.0
    assert max(ratios) == pytest.approx(2 / math.sqrt(3), rel=1e-5)
