"""The source paper's formulas: values by hand, vacuous cases, and the places where its text slips."""

import math

import numpy as np
import pytest
from scipy.integrate import quad

from opacus_expm.paper import (
    LossBounds,
    cross_entropy_bounds,
    mean_squared_bounds,
    projection_dimension,
    radius_rule,
    rejection_bound,
    utility_sensitivity,
    utility_tail_bound,
)

# --- Bounds on one record --------------------------------------------------------------------------------------------


def test_mean_squared_bounds_by_hand():
    assert mean_squared_bounds(2.0, 3.0, 4) == LossBounds(gradient=3.0, curvature=2.0)


def test_cross_entropy_bounds_by_hand():
    found = cross_entropy_bounds(3.0)
    assert found.gradient == pytest.approx(4.242640687119286, rel=1e-14)
    assert found.curvature == 4.5


def _matrix_with_norm(random, rows, columns, norm):
    matrix = random.standard_normal((rows, columns))
    return norm * matrix / np.linalg.norm(matrix, 2)


def _softmax(logits):
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


def test_mean_squared_bounds_hold_and_are_tight():
    random = np.random.default_rng(0)
    m, j, e = 3, 1.7, 0.9
    bounds = mean_squared_bounds(j, e, m)
    for _ in range(200):
        jacobian = _matrix_with_norm(random, m, 5, j)
        residual = random.standard_normal(m)
        residual *= e / np.linalg.norm(residual)
        assert np.linalg.norm(jacobian.T @ (2 * residual / m)) <= bounds.gradient * (1 + 1e-12)
        assert np.linalg.norm(jacobian.T @ (2 / m * np.eye(m)) @ jacobian, 2) <= bounds.curvature * (1 + 1e-12)
    # Reached by a Jacobian with one row along the residual.
    jacobian, residual = j * np.eye(m, 5), e * np.eye(m)[0]
    assert np.linalg.norm(jacobian.T @ (2 * residual / m)) == pytest.approx(bounds.gradient, rel=1e-12)
    assert np.linalg.norm(2 / m * jacobian.T @ jacobian, 2) == pytest.approx(bounds.curvature, rel=1e-12)


def test_cross_entropy_bounds_hold_and_are_tight():
    random = np.random.default_rng(1)
    bounds = cross_entropy_bounds(1.7)
    for _ in range(300):
        m = int(random.integers(2, 6))
        jacobian = _matrix_with_norm(random, m, 5, 1.7)
        sigma, target = _softmax(5 * random.standard_normal(m)), np.eye(m)[random.integers(m)]
        hessian = np.diag(sigma) - np.outer(sigma, sigma)
        assert np.linalg.norm(jacobian.T @ (sigma - target)) <= bounds.gradient * (1 + 1e-12)
        assert np.linalg.norm(jacobian.T @ hessian @ jacobian, 2) <= bounds.curvature * (1 + 1e-12)
    # Reached by the wrong class with certainty, and by two equally likely classes.
    jacobian = 1.7 * np.eye(2)
    assert np.linalg.norm(jacobian.T @ [1.0, -1.0]) == pytest.approx(bounds.gradient, rel=1e-12)
    hessian = np.array([[0.25, -0.25], [-0.25, 0.25]])
    assert np.linalg.norm(jacobian.T @ hessian @ jacobian, 2) == pytest.approx(bounds.curvature, rel=1e-12)


def test_curvature_bound_is_spectral_and_not_frobenius():
    """J = L = I₂: the printed Frobenius inequality would say √2 ≤ 1."""
    jacobian, hessian = np.eye(2), 2 / 2 * np.eye(2)
    bounds = mean_squared_bounds(np.linalg.norm(jacobian, 2), 1.0, 2)
    product = jacobian.T @ hessian @ jacobian
    assert bounds.curvature == 1.0
    assert np.linalg.norm(product, 2) <= bounds.curvature
    assert np.linalg.norm(product, "fro") > 1.4 * bounds.curvature


# --- Sensitivity and radius ------------------------------------------------------------------------------------------


def test_sensitivity_of_mean_squared_error_by_hand():
    """2R/(mN)·(2Ē + RJ̄)·J̄ with R = 0.5, m = 4, N = 10, Ē = 3, J̄ = 2."""
    assert utility_sensitivity(mean_squared_bounds(2.0, 3.0, 4), 0.5, 10) == pytest.approx(0.35, rel=1e-14)


def test_sensitivity_of_cross_entropy_by_hand():
    """2R/N·(√2 + RJ̄/4)·J̄ with R = 0.5, N = 10, J̄ = 3."""
    assert utility_sensitivity(cross_entropy_bounds(3.0), 0.5, 10) == pytest.approx(0.5367640687119285, rel=1e-14)


def test_sensitivity_keeps_its_division_by_the_size():
    bounds = LossBounds(1.0, 2.0)
    assert utility_sensitivity(bounds, 0.3, 1) == pytest.approx(0.78, rel=1e-14)
    assert utility_sensitivity(bounds, 0.3, 1000) == pytest.approx(0.78e-3, rel=1e-14)


def test_sensitivity_bounds_what_replacing_a_record_does():
    """max |u(z) − u(z′)|/N over the ball, for records within the bounds."""
    random = np.random.default_rng(2)
    bounds, radius, size = LossBounds(1.1, 0.8), 0.6, 7
    worst = 0.0
    for attempt in range(4000):
        xi = random.standard_normal(2)
        xi *= radius / np.linalg.norm(xi)
        gradients = random.standard_normal((2, 2))
        gradients *= bounds.gradient / np.linalg.norm(gradients, axis=1, keepdims=True)
        if attempt % 2:  # opposite gradients along ξ
            gradients = np.array([xi, -xi]) * bounds.gradient / radius
        turn = random.standard_normal(2)
        curvature = bounds.curvature * np.outer(turn, turn) / (turn @ turn)
        change = xi @ (gradients[0] - gradients[1]) + 0.5 * xi @ curvature @ xi
        worst = max(worst, abs(change) / size)
    allowed = utility_sensitivity(bounds, radius, size)
    assert worst <= allowed
    # The curvature of one record only has one sign, so half of its term is never used.
    assert worst > 0.99 * (2 * radius * bounds.gradient + 0.5 * radius**2 * bounds.curvature) / size


@pytest.mark.parametrize(
    ("regularization", "smallest", "expected"),
    [(0.5, 1.0, 2.0), (1.5, 0.0, 2.0), (0.0, 3.0, 1.0), (0.0, 0.0, math.inf)],
)
def test_radius_rule_by_hand(regularization, smallest, expected):
    assert radius_rule(LossBounds(3.0, 2.0), regularization, smallest) == expected


def test_radius_rule_holds_the_mean():
    """|(H + λI)⁻¹g| ≤ ḡ/(λ + e_min), singular H included, and reached by the least eigenvector."""
    random = np.random.default_rng(3)
    for _ in range(100):
        factor = random.standard_normal((random.integers(1, 6), 4))
        h, lam = factor.T @ factor, random.uniform(0.1, 2)
        values, vectors = np.linalg.eigh(h)
        smallest = max(values[0], 0.0)
        g = random.standard_normal(4)
        bounds = LossBounds(float(np.linalg.norm(g)), float(values[-1]))
        reach = radius_rule(bounds, lam, smallest)
        assert np.linalg.norm(np.linalg.solve(h + lam * np.eye(4), g)) <= reach * (1 + 1e-9)
        extremal = np.linalg.solve(h + lam * np.eye(4), bounds.gradient * vectors[:, 0])
        assert np.linalg.norm(extremal) == pytest.approx(reach, rel=1e-9)


# --- Rejection -------------------------------------------------------------------------------------------------------


def test_rejection_bound_by_hand():
    """R̄ = 2: 2·2·2/(100·1)·(2/4 + 2/3) + (2/4)²."""
    found = rejection_bound(
        LossBounds(3.0, 2.0), epsilon=1.0, radius=4.0, regularization=1.5, parameters=2, minimum_size=100
    )
    assert found == pytest.approx(0.08 * 7 / 6 + 0.25, rel=1e-14)


def test_rejection_bound_may_be_vacuous_or_infinite():
    options = {"epsilon": 1.0, "radius": 1.0, "parameters": 5, "minimum_size": 10}
    assert rejection_bound(LossBounds(3.0, 2.0), regularization=1.0, **options) > 1
    assert rejection_bound(LossBounds(3.0, 2.0), regularization=0.0, **options) == math.inf
    helped = rejection_bound(LossBounds(0.1, 2.0), regularization=0.0, smallest_eigenvalue=100.0, **options)
    assert 0 < helped < 1


def test_rejection_bound_without_a_gradient():
    """ḡ = 0 (no residual) leaves the noise alone: 2p/(Nε)·H̄/(λ + e_min)."""
    found = rejection_bound(
        mean_squared_bounds(1.0, 0.0, 1), epsilon=2.0, radius=1.0, regularization=4.0, parameters=3, minimum_size=10
    )
    assert found == pytest.approx(2 * 3 / (10 * 2) * 2 / 4, rel=1e-14)


@pytest.mark.parametrize("radius", [0.6, 0.9, 1.5])
def test_rejection_bound_is_above_what_is_rejected(radius):
    """Plain rejection for mean squared error on a small data set, with the paper's temperature ε/(2ΔU)."""
    random = np.random.default_rng(4)
    size, parameters, lam, epsilon = 400, 3, 1.0, 2.0
    rows = random.uniform(-1, 1, (size, parameters))
    residuals = rows @ [0.1, -0.2, 0.1] + random.uniform(-0.1, 0.1, size)
    jacobian_bound = float(np.linalg.norm(rows, axis=1).max())
    bounds = mean_squared_bounds(jacobian_bound, float(np.abs(residuals).max()), 1)
    g, h = 2 * rows.T @ residuals / size, 2 * rows.T @ rows / size
    smallest = float(np.linalg.eigvalsh(h)[0])
    precision = h + lam * np.eye(parameters)
    temperature = 2 * utility_sensitivity(bounds, radius, size) / epsilon
    draws = random.multivariate_normal(-np.linalg.solve(precision, g), temperature * np.linalg.inv(precision), 20000)
    rejected = float(np.mean(np.linalg.norm(draws, axis=1) > radius))
    bound = rejection_bound(
        bounds,
        epsilon=epsilon,
        radius=radius,
        regularization=lam,
        parameters=parameters,
        minimum_size=size,
        smallest_eigenvalue=smallest,
    )
    second_moment = float(np.mean(np.sum(draws**2, axis=1))) / radius**2
    # Not only above the rejections: above the second moment, from which Markov's inequality gets them.
    assert rejected <= second_moment < bound
    assert second_moment > 0.02  # and not because nothing moves


def test_rejection_bound_is_above_what_is_rejected_where_it_is_not_vacuous():
    """A single flat direction, where the bound is within a small factor of the second moment."""
    bounds = LossBounds(0.05, 1e-6)
    options = {"epsilon": 1.0, "radius": 1.0, "regularization": 0.25, "parameters": 2, "minimum_size": 8}
    bound = rejection_bound(bounds, **options)
    assert bound < 1
    temperature = 2 * utility_sensitivity(bounds, 1.0, 8) / 1.0
    random = np.random.default_rng(5)
    mean = np.array([-0.05 / 0.25, 0.0])
    draws = mean + math.sqrt(temperature / 0.25) * random.standard_normal((200000, 2))
    norms = np.linalg.norm(draws, axis=1)
    assert 1e-3 < float(np.mean(norms > 1)) < bound
    assert float(np.mean(norms**2)) == pytest.approx(bound, rel=0.02)


# --- Utility ---------------------------------------------------------------------------------------------------------


def test_utility_tail_by_hand():
    assert utility_tail_bound(2.0, 4.0, 3.0) == pytest.approx(3 * math.exp(-2), rel=1e-14)
    assert utility_tail_bound(0.1, 1.0, 1e3) > 1  # vacuous
    assert utility_tail_bound(1.0, 1.0, 0.0) == 0.0


@pytest.mark.parametrize("epsilon", [1.0, 5.0, 20.0])
@pytest.mark.parametrize("t", [0.5, 2.0, 6.0])
def test_utility_tail_bound_holds_on_a_line(epsilon, t):
    """U(ξ) = −½(ξ − 0.3)² on [−1, 1], density ∝ exp(εU/(2ΔU))."""
    sensitivity = 0.05
    depth = math.sqrt(2 * t * sensitivity)
    good = [max(-1.0, 0.3 - depth), min(1.0, 0.3 + depth)]
    half = math.sqrt(t * sensitivity)
    better = min(1.0, 0.3 + half) - max(-1.0, 0.3 - half)

    def density(x):
        return math.exp(-epsilon * (x - 0.3) ** 2 / (4 * sensitivity))

    total = quad(density, -1, 1)[0]
    tail = 1 - quad(density, *good)[0] / total
    worse = 2 - (good[1] - good[0])
    assert tail <= utility_tail_bound(epsilon, t, worse / better) + 1e-12


# --- Dimension of the subspace ---------------------------------------------------------------------------------------


def _dimension(**changes):
    options = {
        "parameters": 1000,
        "condition_number": 1.0,
        "optimal_utility": 2.0,
        "gap": 1.5,
        "failure_probability": 0.5,
    }
    return projection_dimension(**(options | changes))


def test_projection_dimension_by_hand():
    assert _dimension() == 500  # 2·1·1000·(1 − 0.75)
    assert _dimension(condition_number=1.5) == 750
    assert _dimension(failure_probability=1e-8) == 590  # 32·ln(10⁸) = 589.46
    assert _dimension(parameters=500) == 250


def test_projection_dimension_is_none_where_the_formula_exceeds_the_full_space():
    assert _dimension(condition_number=2.0) == 1000
    assert _dimension(condition_number=2.01) is None
    assert _dimension(condition_number=100.0) is None
    assert _dimension(failure_probability=1e-14) is None  # 32·ln(10¹⁴) = 1031.6
    assert _dimension(gap=0.9) is None


def _quadratic(random, size, condition):
    """H with the given condition number, and g."""
    basis = np.linalg.qr(random.standard_normal((size, size)))[0]
    values = np.concatenate([[1.0, condition], random.uniform(1, condition, size - 2)])
    return basis @ np.diag(values) @ basis.T, random.standard_normal(size)


def _roots(h):
    values, vectors = np.linalg.eigh(h)
    return vectors @ np.diag(values**0.5) @ vectors.T, vectors @ np.diag(values**-0.5) @ vectors.T


def _captured(h, g, a):
    """‖Πz‖² for the projection Π onto the image of H^{1/2}A, z = H^{-1/2}g."""
    root, inverse_root = _roots(h)
    image = np.linalg.qr(root @ a)[0]
    return float(np.sum((image.T @ inverse_root @ g) ** 2))


def test_the_printed_inequality_of_the_gap_is_false():
    h, a, g = np.diag([1.0, 4.0]), np.array([[1.0], [1.0]]) / math.sqrt(2), np.array([1.0, -1.0])
    z = _roots(h)[1] @ g
    assert _captured(h, g, a) == pytest.approx(0.0, abs=1e-15)
    assert float(np.sum((a.T @ z) ** 2)) / 4 == pytest.approx(0.03125, rel=1e-12)


def test_the_repaired_inequality_of_the_gap_holds():
    """‖Πz‖² ≥ (‖z‖²/κ)·‖P_A g‖²/‖g‖² on random instances; the printed one fails on some of the same."""
    random = np.random.default_rng(6)
    printed_fails = 0
    for _ in range(500):
        size = int(random.integers(2, 6))
        condition = float(random.uniform(1, 20))
        h, g = _quadratic(random, size, condition)
        a = np.linalg.qr(random.standard_normal((size, int(random.integers(1, size)))))[0]
        z = _roots(h)[1] @ g
        captured = _captured(h, g, a)
        repaired = (z @ z) / condition * np.sum((a.T @ g) ** 2) / (g @ g)
        assert captured >= repaired * (1 - 1e-9)
        printed_fails += captured < np.sum((a.T @ z) ** 2) / condition * (1 - 1e-9)
    assert printed_fails > 0


def test_projection_dimension_keeps_the_gap():
    """The utility lost by a random subspace of that dimension, with the sign −H⁻¹g at the optimum."""
    random = np.random.default_rng(7)
    size, condition, failure = 150, 1.3, 0.1
    h, g = _quadratic(random, size, condition)
    best = 0.5 * float(g @ np.linalg.solve(h, g))
    optimum = -np.linalg.solve(h, g)
    assert -optimum @ g - 0.5 * optimum @ h @ optimum == pytest.approx(best, rel=1e-12)
    k = projection_dimension(
        parameters=size, condition_number=condition, optimal_utility=best, gap=0.75 * best, failure_probability=failure
    )
    assert k == math.ceil(2 * condition * size * 0.25)
    for _ in range(50):
        a = np.linalg.qr(random.standard_normal((size, k)))[0]
        assert best - 0.5 * _captured(h, g, a) <= 0.75 * best


# --- Bad input -------------------------------------------------------------------------------------------------------

BAD = {
    "jacobian_bound": lambda: mean_squared_bounds(0.0, 1.0, 1),
    "residual_bound": lambda: mean_squared_bounds(1.0, -1.0, 1),
    "outputs": lambda: mean_squared_bounds(1.0, 1.0, 0),
    "jacobian_bound ": lambda: cross_entropy_bounds(math.inf),
    "radius": lambda: utility_sensitivity(LossBounds(1.0, 1.0), -1.0, 5),
    "minimum_size": lambda: utility_sensitivity(LossBounds(1.0, 1.0), 1.0, 0),
    "regularization": lambda: radius_rule(LossBounds(1.0, 1.0), -0.1),
    "smallest_eigenvalue": lambda: radius_rule(LossBounds(1.0, 1.0), 0.1, -0.1),
    "epsilon": lambda: utility_tail_bound(0.0, 1.0, 1.0),
    "t": lambda: utility_tail_bound(1.0, math.nan, 1.0),
    "volume_ratio": lambda: utility_tail_bound(1.0, 1.0, -1.0),
    "parameters": lambda: _dimension(parameters=0),
    "condition_number": lambda: _dimension(condition_number=0.5),
    "gap": lambda: _dimension(gap=2.0),
    "failure_probability": lambda: _dimension(failure_probability=1.0),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_values_are_named(name):
    with pytest.raises(ValueError, match=rf"^{name.strip()} must be .*, got "):
        BAD[name]()
