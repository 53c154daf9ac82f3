"""The source paper: its formulas by hand and where its text slips; its samplers, calibration and bounds in the ledger."""

import math
import warnings

import numpy as np
import pytest
import reference
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.integrate import quad
from small_problem import Untouchable, flat, gathered
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from opacus_expm import ExpMQuadEngine, NoGuarantee, Purchase, Release, Statistics, paper
from opacus_expm.mechanism.density import BallGaussian
from opacus_expm.mechanism.sampling import Exact
from opacus_expm.mechanism.sensitivity import Sensitivity
from opacus_expm.paper import (
    Gibbs,
    LossBounds,
    PlainRejection,
    bounds_read_off,
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


# --- Its samplers ----------------------------------------------------------------------------------------------------
# Their laws are tested in mechanism/test_sampling.py, by the harness of all samplers.


def test_rejection_gives_up_with_advice():
    density = BallGaussian(np.full(20, 1.0), np.zeros(20), 0.1)
    with pytest.raises(RuntimeError, match=r"gave up after 5000 proposals; use Exact\(\)"):
        PlainRejection(max_proposals=5000).sample(density, np.random.default_rng(0))
    with pytest.raises(ValueError, match="positive definite"):
        PlainRejection().sample(BallGaussian(np.zeros(2), np.zeros(2), 1.0), np.random.default_rng(0))


@pytest.mark.parametrize("options", [{"burn_in": 0}, {"thin": 0}, {"chains": 0}])
def test_gibbs_options(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        Gibbs(**options)


def test_gibbs_chains_give_the_number_of_draws():
    density = BallGaussian(np.ones(3), np.ones(3), 1.0)
    with pytest.warns(UserWarning, match="not covered by epsilon"):
        draws = Gibbs(burn_in=5, thin=2, chains=4).sample(density, np.random.default_rng(0), 10)
    assert draws.shape == (10, 3)
    assert len(np.unique(draws, axis=0)) == 10


class Mine:
    """A sampler of the user's own."""

    def sample(self, density, generator, draws=1):
        return np.zeros((draws, density.dim))


class FromExact(Exact):
    """Whatever it draws, it is not the sampler that was proved exact."""


@pytest.mark.filterwarnings("ignore:Gibbs is only asymptotically exact")
@pytest.mark.parametrize(
    ("sampler", "name"),
    [
        (None, "exact"),
        (Exact(), "exact"),
        (PlainRejection(), "plainrejection"),
        (Gibbs(burn_in=2), "gibbs"),
        (Mine(), "mine"),
        (FromExact(), "fromexact"),
        (type("Exact", (Mine,), {})(), "custom"),
        (type("Secure", (Mine,), {})(), "custom"),
        (type("EXACT", (FromExact,), {})(), "custom"),
    ],
)
def test_only_the_exact_sampler_is_recorded_as_exact(sampler, name):
    used = ExpMQuadEngine()
    paper.release(used.books(), gathered(), 1.0, 0.5, regularization=1e6, sampler=sampler)
    assert used.accountant.releases[0].sampler == name
    if name == "exact":
        assert 0 < used.get_epsilon() <= 0.5
    else:
        with pytest.raises(NoGuarantee, match="is not known to draw exactly"):
            used.get_epsilon()


@pytest.mark.parametrize("sampler", [Gibbs(), PlainRejection(), Mine(), FromExact(), type("Exact", (Mine,), {})()])
def test_a_budget_refuses_samplers_that_epsilon_does_not_cover(sampler):
    used = ExpMQuadEngine(budget=(5.0, 0.0))
    with pytest.raises(NoGuarantee, match="is not known to draw exactly"):
        paper.release(used.books(), gathered(), 1.0, 0.5, sampler=sampler)
    assert len(used.accountant) == 0
    paper.release(used.books(), gathered(), 1.0, 0.5)
    assert used.remaining() >= 4.5


def test_a_budget_refuses_a_generator():
    used = ExpMQuadEngine(budget=(5.0, 0.0), noise_generator=np.random.default_rng(0))
    with pytest.raises(NoGuarantee, match="noise_generator cannot be used with a budget"):
        paper.release(used.books(), gathered(), 1.0, 0.5)
    assert len(used.accountant) == 0


@pytest.mark.parametrize("sampler", [None, Gibbs(), type("Secure", (Mine,), {})()])
def test_secure_mode_draws_exactly_only(sampler):
    """Its ledger says that the noise is the system's, whatever generator was given; so it must be."""
    used = ExpMQuadEngine(secure_mode=True, noise_generator=np.random.default_rng(0))
    with pytest.raises(ValueError, match="secure_mode draws exactly"):
        paper.release(used.books(), gathered(), 1.0, 0.5, sampler=sampler)
    assert len(used.accountant) == 0


def test_only_statistics_are_released():
    used = ExpMQuadEngine()
    with pytest.raises(TypeError, match=r"statistics must come from gather\(\), got NoneType"):
        paper.release(used.books(), None, 1.0, 0.5)
    assert len(used.accountant) == 0


def test_a_release_is_charged_before_it_is_drawn():
    used, seen = ExpMQuadEngine(), []

    class Watching(Mine):
        def sample(self, density, generator, draws=1):
            seen.append(len(used.accountant.releases))
            return super().sample(density, generator, draws)

    paper.release(used.books(), gathered(), 1.0, 0.5, sampler=Watching())
    assert seen == [1]


@pytest.mark.parametrize("sampler", [None, Gibbs(burn_in=20), PlainRejection(), Exact()], ids=str)
def test_simulation_with_the_papers_samplers(sampler):
    """As in the paper's figures: Gibbs unless told otherwise; nothing is charged, and that is said."""
    statistics = gathered()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        values = paper.simulate(
            *(statistics, 5.0, 5.0, lambda module: float(flat(module).sum()), np.random.default_rng(0)),
            draws=7,
            regularization=5.0,
            sampler=sampler,
        )
    assert values.shape == (7,)
    assert len(set(values)) == 7
    assert any("NOT releases" in str(w.message) for w in caught)
    assert any("not covered by epsilon" in str(w.message) for w in caught) == (
        sampler is None or type(sampler) is Gibbs
    )


# --- Its calibration -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("adjacency", ["add_remove", "replace_one"])
def test_calibration_by_hand(adjacency):
    """C_g = 2, C_H = 3, R = 0.5: ΔU = 2·0.5·2 + 0.25·3 = 2.75, c = ε/5.5, and c·W is what it really spends."""
    sensitivity = Sensitivity(2.0, 3.0, False, adjacency)
    found = paper.calibrate(sensitivity, 1.1, 0.5)
    assert found.inverse_temperature == pytest.approx(0.2 * (1 - 1e-6), rel=1e-14)
    assert found.epsilon_range == pytest.approx(0.2 * sensitivity.width(0.5), rel=1e-14)
    assert (found.mu, found.method) == (math.inf, "paper")


@pytest.mark.parametrize("adjacency", ["add_remove", "replace_one"])
@given(st.floats(1e-3, 1e3), st.floats(0, 1e3), st.floats(1e-3, 1e3))
def test_the_calibration_costs_no_more_than_is_planned_whatever_the_bounds(adjacency, c_g, c_h, radius):
    spent = paper.calibrate(Sensitivity(c_g, c_h, False, adjacency), 1.0, radius).epsilon_range
    most = paper.cost_whatever_the_bounds(1.0, adjacency)
    assert most == (0.5 if adjacency == "add_remove" else 1.0)
    assert spent <= most * (1 + 1e-12)
    if c_h == 0:  # reached
        assert spent == pytest.approx(most)


def test_a_release_spends_no_more_than_asked_for():
    used = ExpMQuadEngine()
    paper.release(used.books(), gathered(), 2.0, 0.5)
    (event,) = used.accountant.releases
    assert 0 < used.get_epsilon(0.0) <= 1.0  # half, under add/remove
    assert (event.calibration, event.epsilon, event.delta, event.mu) == ("paper", 2.0, 0.0, math.inf)


@pytest.mark.parametrize("adjacency", ["add_remove", "replace_one"])
def test_charges_do_not_depend_on_what_was_bought(adjacency):
    """c·W follows from the bounds, which are an output here: what is charged is the most that it can be."""
    bought, charged = set(), set()
    for seed in range(4):
        used = ExpMQuadEngine(adjacency=adjacency, noise_generator=np.random.default_rng(seed))
        model, dataset = _outputs_task(1, "mse", 3000)
        statistics = used.gather(model, _loader(dataset), 5, criterion=nn.MSELoss(), epsilon=1.0)
        paper.release(used.books(), statistics, 1.0, 0.3)
        draw = used.accountant.releases[-1]
        assert [type(event) for event in used.accountant.releases] == [Purchase, Purchase, Release]
        bought.add((draw.max_grad_norm, draw.max_curvature))
        charged.add((draw.epsilon_range, draw.mu))
    assert len(bought) > 1
    assert charged == {(0.5 if adjacency == "add_remove" else 1.0, math.inf)}


# --- Its bounds, which are not private -------------------------------------------------------------------------------

NOT_PRIVATE = r"bounds_read_off\(\) reads the clipping bounds off the private data: a release with them is NOT"


def _loader(dataset):
    return DataLoader(dataset, batch_size=500)


def _outputs_task(outputs, loss, n=60):
    """A small network in float64, and its records, one of which is far out."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(n, 3, generator=generator, dtype=torch.float64)
    x[17] *= 6
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, outputs)).double()
    if loss == "ce":
        y = torch.randint(outputs, (n,), generator=generator)
    elif loss == "bce":
        y = torch.randint(2, (n, outputs), generator=generator).double()
    else:
        y = 3 * torch.randn(n, outputs, generator=generator, dtype=torch.float64)
    return model, TensorDataset(x, y)


def _read_off(model, dataset):
    """Largest spectral norm of a record's full Jacobian, and largest residual, one record at a time."""
    x, y = dataset.tensors
    passed = reference.output_and_jacobian_of_each(model, x, len(x))
    jacobian = max(float(torch.linalg.matrix_norm(j, 2)) for _, j in passed)
    residual = max(float((f - t).norm()) for (f, _), t in zip(passed, y, strict=True)) if y.dim() == 2 else None
    return jacobian, residual


class Outside(nn.Module):
    """A parameter outside any layer, which hooks cannot serve."""

    def __init__(self, model):
        super().__init__()
        self.model, self.scale = model, nn.Parameter(torch.ones(1, dtype=torch.float64))

    def forward(self, x):
        return self.model(x) * self.scale


def _statistics(engine, model, dataset, dim=2, criterion=None):
    """The paper's practice: bounds are read off, records clipped by them, and the result is marked."""
    criterion = criterion or nn.MSELoss()
    with pytest.warns(UserWarning, match=NOT_PRIVATE):
        found = bounds_read_off(model, _loader(dataset), criterion)
    given = {"max_grad_norm": found.gradient, "max_curvature": found.curvature}
    return paper.read_off(engine.gather(model, _loader(dataset), dim, criterion=criterion, **given))


@pytest.mark.filterwarnings("ignore:using grad_sample_mode='functorch', because")
@pytest.mark.parametrize("mode", ["hooks", "functorch"])
@pytest.mark.parametrize(("loss", "outputs"), [("mse", 1), ("mse", 3), ("ce", 2), ("ce", 4)])
def test_the_bounds_are_its_formulas(loss, outputs, mode):
    """ḡ and H̄ from the largest Jacobian and residual in the full space, each times 1.1."""
    model, dataset = _outputs_task(outputs, loss)
    model = Outside(model) if mode == "functorch" else model
    jacobian, residual = _read_off(model, dataset)
    j = 1.1 * jacobian
    expected = (
        (math.sqrt(2) * j, j * j / 2) if loss == "ce" else (2 * j * 1.1 * residual / outputs, 2 * j * j / outputs)
    )
    criterion = nn.CrossEntropyLoss() if loss == "ce" else nn.MSELoss()
    found = _statistics(ExpMQuadEngine(), model, dataset, None, criterion)
    assert (found.sums.max_grad_norm, found.sums.max_curvature) == pytest.approx(expected, rel=1e-9)
    assert found.bounds == "paper"
    # They bound every record's projected gradient and curvature, so that nothing is clipped.
    plain = ExpMQuadEngine().gather(
        model, _loader(dataset), None, criterion=criterion, max_grad_norm=1e9, max_curvature=1e9
    )
    torch.testing.assert_close(found.sums.gradient, plain.sums.gradient, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(found.sums.curvature, plain.sums.curvature, rtol=1e-9, atol=1e-9)


def test_the_bounds_follow_a_single_record():
    """Why they are not private: the record that is far out moves them."""
    model, dataset = _outputs_task(1, "mse")
    x, y = dataset.tensors
    kept = torch.arange(len(x)) != 17
    found = []
    for data in (dataset, TensorDataset(x[kept], y[kept])):
        with pytest.warns(UserWarning, match="NOT differentially private") as said:
            found.append(bounds_read_off(model, _loader(data), nn.MSELoss()).curvature)
        assert [w.filename for w in said] == [__file__]
    assert found[0] > 1.1 * found[1]


@pytest.mark.parametrize("own", [True, False], ids=["paper.release", "engine.release"])
def test_the_bounds_give_no_guarantee(own, tmp_path):
    """A release, and no ε from then on: not here, not after a checkpoint, not from the ledger's file."""
    model, dataset = _outputs_task(1, "mse")
    path = tmp_path / "ledger.jsonl"
    engine = ExpMQuadEngine(ledger_path=path)
    statistics = _statistics(engine, model, dataset, 4)
    assert engine.get_epsilon() == 0.0  # nothing was released, and nothing bought
    private = paper.release(engine.books(), statistics, 1.0, 0.3) if own else engine.release(statistics, 1.0, 0.3)
    (event,) = engine.accountant.releases
    assert (type(event), event.bounds) == (Release, "paper")
    assert not torch.equal(private[0].weight, model[0].weight)
    engine.save_checkpoint(path=tmp_path / "checkpoint.pt", module=private)
    loaded = ExpMQuadEngine()
    loaded.load_checkpoint(path=tmp_path / "checkpoint.pt", module=model)
    for used in (engine, loaded, ExpMQuadEngine(ledger_path=path)):
        for delta in (0.0, 1e-5):
            for ask in (used.get_epsilon, used.accountant.get_epsilon):
                with pytest.raises(NoGuarantee, match="no epsilon can be stated for this ledger"):
                    ask(delta)
    # Nor does a private release afterwards make it good.
    loaded.make_private_expm(
        model, _loader(dataset), 1.0, 0.3, 4, criterion=nn.MSELoss(), max_grad_norm=1.0, max_curvature=1.0
    )
    with pytest.raises(NoGuarantee):
        loaded.get_epsilon()


def test_statistics_stay_marked(tmp_path):
    """Merged with others, in either order, or kept in a file, they are those with bounds that were read off."""
    engine = ExpMQuadEngine()
    marked, plain = paper.read_off(gathered()), gathered()
    with pytest.warns(UserWarning, match="PRIVATE"):
        marked.save_private(tmp_path / "part")
    loaded = Statistics.load_private(tmp_path / "part", marked.module)
    for number, statistics in enumerate((marked.merge(plain), plain.merge(marked), loaded), start=1):
        assert statistics.bounds == "paper"
        engine.release(statistics, 1.0, 0.5)
        assert [event.bounds for event in engine.accountant.releases] == ["paper"] * number
    with pytest.raises(NoGuarantee):
        engine.get_epsilon()


def test_simulation_charges_nothing():
    """The paper's figures: statistics may be gathered and draws simulated; the ledger stays empty."""
    model, dataset = _outputs_task(1, "mse")
    engine = ExpMQuadEngine()
    statistics = _statistics(engine, model, dataset)
    for simulate in (
        lambda: engine.simulate(statistics, 1.0, 0.3, lambda module: 1.0, draws=3),
        lambda: paper.simulate(
            statistics, 1.0, 0.3, lambda module: 1.0, np.random.default_rng(0), draws=3, sampler=Exact()
        ),
    ):
        with pytest.warns(UserWarning, match="NOT releases"):
            assert simulate().tolist() == [1.0] * 3
    assert engine.get_epsilon() == 0.0
    engine.release(statistics, 1.0, 0.3)
    with pytest.raises(NoGuarantee):
        engine.get_epsilon()


def test_the_bounds_and_a_budget_exclude_each_other(tmp_path):
    model, dataset = _outputs_task(1, "mse")
    engine = ExpMQuadEngine(budget=(1.0, 0.0), ledger_path=tmp_path / "ledger")
    other = ExpMQuadEngine(ledger_path=tmp_path / "other")
    for statistics in (_statistics(engine, model, dataset, 4), _statistics(other, model, dataset, 4)):
        with pytest.raises(ValueError, match="read off the private data cannot be charged to a budget"):
            paper.release(engine.books(), statistics, 0.5, 0.3)
        with pytest.raises(NoGuarantee):
            engine.release(statistics, 0.5, 0.3)
    assert len(engine.accountant) == 0
    # And once such a release is in the ledger, no budget can be kept.
    paper.release(other.books(), statistics, 0.5, 0.3)
    with pytest.warns(UserWarning, match="holds 1 charges already"):
        engine = ExpMQuadEngine(budget=(1.0, 0.0), ledger_path=tmp_path / "other")
    given = {"criterion": nn.MSELoss(), "max_grad_norm": 1.0, "max_curvature": 1.0}
    with pytest.raises(NoGuarantee):
        engine.make_private_expm(model, DataLoader(Untouchable(), batch_size=8), 0.5, 0.3, 4, **given)
    assert len(engine.accountant) == 1


def test_the_bounds_are_defined_for_two_losses():
    model, dataset = _outputs_task(1, "bce")
    message = "defined for cross-entropy and mean squared error, not for BinaryCrossEntropy"
    with pytest.warns(UserWarning, match=NOT_PRIVATE), pytest.raises(ValueError, match=message):
        bounds_read_off(model, _loader(dataset), nn.BCEWithLogitsLoss())
