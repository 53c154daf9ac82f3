"""The privacy loss between two truncated Gaussians, against dense grids, closed forms and one another."""

import math
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from opacus_expm.mechanism import curves
from opacus_expm.mechanism.density import BallGaussian
from opacus_expm.mechanism.privacy_loss import PrivacyLoss, Quadrature, Sampled, _highest


def _density(precision, linear, radius):
    values, vectors = np.linalg.eigh(np.atleast_2d(precision))
    return BallGaussian(values, vectors.T @ np.atleast_1d(linear), radius, vectors)


def _pair(dim, seed, *, stiffness=1.0, pull=1.0, radius=0.7):
    """A random density and its neighbour with one more record."""
    random = np.random.default_rng(seed)
    root = random.standard_normal((dim, dim))
    precision, linear = stiffness * root @ root.T, pull * random.standard_normal(dim)
    direction = random.standard_normal(dim)
    direction /= np.linalg.norm(direction)
    return PrivacyLoss(
        _density(precision, linear, radius),
        _density(precision + 2.0 * np.outer(direction, direction), linear + direction[::-1], radius),
    )


def _ball(dim, radius, points=10_000):
    """Points of the ball, half of them on its surface."""
    random = np.random.default_rng(0)
    x = random.standard_normal((points, dim))
    x *= radius / np.linalg.norm(x, axis=1, keepdims=True)
    x[::2] *= random.random((len(x[::2]), 1)) ** (1 / dim)
    return x


# --- the largest loss -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dim", [1, 2, 3])
@pytest.mark.parametrize(("stiffness", "pull"), [(0.0, 0.0), (1.0, 1.0), (0.0, 30.0), (300.0, 30.0)])
def test_largest_loss_is_that_of_a_dense_grid(dim, stiffness, pull):
    loss = _pair(dim, seed=dim, stiffness=stiffness, pull=pull)
    seen = np.abs(loss.at(_ball(dim, 0.7))).max()
    assert seen <= loss.largest() + 1e-9
    assert seen > 0.97 * loss.largest()


def test_largest_loss_counts_the_normalisers():
    """In one dimension, linear: ln of a ratio of sinhs, by hand."""
    loss = PrivacyLoss(_density([[0.0]], [1.0], 1.0), _density([[0.0]], [2.0], 1.0))
    normalisers = math.log(math.sinh(2.0) / 2) - math.log(math.sinh(1.0))
    assert loss.largest() == pytest.approx(1.0 + normalisers, rel=1e-9)
    assert abs(loss.largest() - 1.0) > 0.1  # what the exponents alone would give


@given(
    st.lists(st.sampled_from([-3.0, -1.0, 0.0, 0.5, 2.0]), min_size=1, max_size=3),
    st.lists(st.sampled_from([-2.0, 0.0, 1e-9, 0.3, 40.0]), min_size=3, max_size=3),
)
def test_quadratics_over_a_ball_have_their_maximum_found(values, linear):
    """Degenerate cases among them: nothing along the top direction, maxima inside, constants."""
    m, v = np.diag(values), np.array(linear[: len(values)])
    points = _ball(len(values), 1.3)
    seen = (0.5 * np.einsum("ij,jk,ik->i", points, m, points) + points @ v).max()
    found = _highest(m, v, 1.3)
    assert found >= seen - 1e-9
    assert found <= seen + 0.03 * (abs(seen) + 1)


def test_balls_of_different_size_are_told_apart_at_once():
    assert PrivacyLoss(_density([[1.0]], [0.0], 1.0), _density([[1.0]], [0.0], 1.1)).largest() == math.inf


def test_dimensions_must_agree():
    with pytest.raises(ValueError, match="2 and 1 dimensions"):
        PrivacyLoss(_density(np.eye(2), [0.0, 0.0], 1.0), _density([[1.0]], [0.0], 1.0))


# --- quadrature -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dim", [1, 2, 3])
def test_gaussians_have_the_curve_of_gaussians(dim):
    """Far from the edge of the ball: μ is the distance of the means in standard deviations."""
    mu, w = 0.268051, 4.0
    shift = np.array([[1.0], [0.6, 0.8], [0.6, 0.0, 0.8]][dim - 1], dtype=float)
    tradeoff = Quadrature(
        PrivacyLoss(_density(w * np.eye(dim), np.zeros(dim), 6.0), _density(w * np.eye(dim), mu * 2 * shift, 6.0))
    )
    accuracy = (1e-4, 1e-3, 1e-2)[dim - 1]
    assert tradeoff.delta(1.0) == pytest.approx(curves.gaussian_delta(mu, 1.0), rel=accuracy)
    if dim < 3:
        assert tradeoff.epsilon(1e-5) == pytest.approx(1.0, rel=accuracy / 10)
    assert tradeoff.delta(1.0) != pytest.approx(curves.gaussian_delta(1.02 * mu, 1.0), rel=5 * accuracy)


@pytest.mark.parametrize("dim", [1, 2, 3])
@pytest.mark.parametrize(("stiffness", "pull"), [(0.0, 0.0), (1.0, 3.0), (0.0, 1000.0), (1000.0, 30.0)])
def test_quadrature_agrees_with_the_exact_largest_loss(dim, stiffness, pull):
    loss = _pair(dim, seed=5, stiffness=stiffness, pull=pull)
    seen = Quadrature(loss).largest()
    assert seen <= loss.largest() + 1e-5
    assert seen > 0.98 * loss.largest()


def test_the_two_sides_of_the_tradeoff_invert_each_other():
    tradeoff = Quadrature(_pair(2, seed=1))
    for delta in (1e-6, 1e-3, 0.02):
        assert tradeoff.delta(tradeoff.epsilon(delta)) == pytest.approx(delta, rel=1e-6)
    assert tradeoff.epsilon(0.0) == tradeoff.largest()
    assert tradeoff.epsilon(0.99) == 0.0
    assert tradeoff.delta(tradeoff.largest()) == 0.0


def test_both_directions_count():
    """One of them alone would be smaller."""
    loss = _pair(1, seed=3)
    other = PrivacyLoss(loss.after, loss.before)
    assert Quadrature(loss).delta(0.3) == pytest.approx(Quadrature(other).delta(0.3), rel=1e-4)


def test_what_quadrature_cannot_do_is_refused():
    with pytest.raises(ValueError, match="up to 3 dimensions, got 4"):
        Quadrature(_pair(4, seed=0))
    far = PrivacyLoss(_density([[1e8]], [1e8], 1.0), _density([[1e8]], [-1e8], 1.0))
    with pytest.raises(ValueError, match="does not resolve"):
        Quadrature(far)


# --- draws ------------------------------------------------------------------------------------------------------------


def test_draws_give_lower_bounds_that_come_close():
    loss = _pair(2, seed=1)
    sampled, tradeoff = Sampled(loss, 20_000, np.random.default_rng(0)), Quadrature(loss)
    assert 0.95 * loss.largest() < sampled.largest() <= loss.largest()
    assert sampled.epsilon(0.0) == sampled.largest()
    for epsilon in (0.05, 0.2):
        true = tradeoff.delta(epsilon)
        assert sampled.delta(epsilon) == pytest.approx(true, rel=0.05)
        assert 0.8 * true < sampled.delta_bound(epsilon) <= true
    assert 0.8 * tradeoff.epsilon(0.02) < sampled.epsilon(0.02) <= tradeoff.epsilon(0.02)
    assert sampled.epsilon(0.5) == 0.0


def test_draws_serve_any_dimension():
    loss = _pair(40, seed=2, stiffness=0.1)
    seen = Sampled(loss, 4000, np.random.default_rng(0)).largest()
    assert 0.2 * loss.largest() < seen <= loss.largest()


def test_values_stay_hidden():
    loss = _pair(2, seed=1)
    assert repr(loss) == "PrivacyLoss(dim=2, private values hidden)"
    with pytest.raises(TypeError, match="private data"):
        pickle.dumps(loss)
