"""The truncated Gaussian's normaliser and tilt, against closed forms, quadrature and Monte Carlo."""

import itertools
import math
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import integrate, stats

from opacus_expm.mechanism.density import BallGaussian


def _density(w, b, radius=1.0, basis=None):
    return BallGaussian(np.asarray(w, dtype=float), np.asarray(b, dtype=float), radius, basis)


@pytest.mark.parametrize(
    ("w", "b", "radius"), [(0, 3, 1), (4, 1e5, 0.01), (100, 0, 10), (0, 0, 1e-6), (1, 0.3, 2), (7, -40, 0.5)]
)
def test_log_normalizer_in_one_dimension(w, b, radius):
    top = abs(b) * radius
    # Split where the integrand is steep, so that the reference is trustworthy.
    edges = radius * np.concatenate([-1 + np.logspace(-12, 0, 40), 1 - np.logspace(0, -12, 40), [-1, 1, 0]])
    value, _ = integrate.quad(
        lambda x: math.exp(-0.5 * w * x * x + b * x - top), -radius, radius, points=np.unique(edges)[1:-1], limit=2000
    )
    assert _density([w], [b], radius).log_normalizer() == pytest.approx(math.log(value) + top, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize(
    ("k", "w", "b", "radius"), [(2, 1.0, 0.5, 1.0), (5, 3.0, 4.0, 2.0), (50, 30.0, 20.0, 1.0), (400, 500.0, 100.0, 1.0)]
)
def test_log_normalizer_of_isotropic_densities(k, w, b, radius):
    """Isotropic: |z|² w is a non-central χ²."""
    linear = np.zeros(k)
    linear[0] = b
    mass = stats.ncx2.logcdf(w * radius**2, k, b * b / w)
    expected = 0.5 * k * math.log(2 * math.pi / w) + 0.5 * b * b / w + mass
    assert _density(np.full(k, w), linear, radius).log_normalizer() == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize("k", [1, 2, 3, 20, 400, 2000])
def test_log_normalizer_of_the_flat_density_is_the_volume(k):
    volume = 0.5 * k * math.log(math.pi) - math.lgamma(k / 2 + 1) + k * math.log(2.0)
    assert _density(np.zeros(k), np.zeros(k), 2.0).log_normalizer() == pytest.approx(volume, rel=1e-10)


@pytest.mark.parametrize(("w", "b"), [((100, 1), (3, -2)), ((0, 50), (30, 5)), ((0, 0), (2, 0)), ((1e4, 3), (1e4, 9))])
def test_log_normalizer_in_two_dimensions(w, b):
    def slice_integral(x):
        height = math.sqrt(max(1 - x * x, 0.0))
        inner = _density([w[1]], [b[1]], height).log_normalizer() if height > 0 else -math.inf
        return math.exp(inner - 0.5 * w[0] * x * x + b[0] * x - top)

    top = sum(min(abs(c), 0.5 * c * c / v if v else math.inf) for v, c in zip(w, b, strict=True))
    nodes = np.linspace(-1, 1, 101)
    value = sum(integrate.quad(slice_integral, lo, hi)[0] for lo, hi in itertools.pairwise(nodes))
    assert _density(w, b).log_normalizer() == pytest.approx(math.log(value) + top, rel=1e-7)


def test_log_normalizer_of_mixed_scales_agrees_with_the_samplers_acceptance():
    """Precisions over ten orders of magnitude: the acceptance of the tilted proposal is an independent estimate."""
    random = np.random.default_rng(0)
    w = np.concatenate([np.zeros(3), 10 ** random.uniform(-2, 8, 100)])
    b = random.standard_normal(103) * np.sqrt(w + 1) * 2
    density = _density(w, b)
    kappa = density.tilt()
    z = b / (w + kappa) + random.standard_normal((200_000, 103)) / np.sqrt(w + kappa)
    slack = 1 - (z**2).sum(1)
    weights = np.where(slack >= 0, np.exp(-0.5 * kappa * np.maximum(slack, 0)), 0)
    envelope = 0.5 * kappa + 0.5 * np.sum(b**2 / (w + kappa) + np.log(2 * math.pi / (w + kappa)))
    error = weights.std() / weights.mean() / math.sqrt(len(weights))
    assert density.log_normalizer() == pytest.approx(math.log(weights.mean()) + envelope, abs=4 * error)
    assert error < 0.01


def test_log_density_integrates_to_one_and_follows_the_basis():
    angle = 0.3
    basis = np.array([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]])
    density = _density([5.0, 0.5], [3.0, -1.0], 0.8, basis)
    axis = np.linspace(-0.8, 0.8, 1601)
    grid = np.stack(np.meshgrid(axis, axis), -1).reshape(-1, 2)
    values = density.log_density(grid)
    assert np.exp(values).sum() * (axis[1] - axis[0]) ** 2 == pytest.approx(1.0, abs=2e-3)
    precision = basis @ np.diag([5.0, 0.5]) @ basis.T
    inside = (grid**2).sum(1) < 0.6
    exponent = grid @ (basis @ np.array([3.0, -1.0])) - 0.5 * np.einsum("ij,jk,ik->i", grid, precision, grid)
    assert np.ptp((values - exponent)[inside]) < 1e-10
    assert np.all(np.isneginf(values[(grid**2).sum(1) > 0.65]))


def test_tilt_is_zero_where_the_gaussian_fits():
    assert _density([100.0, 1.0], [0.0, 0.0], 10.0).tilt() == 0.0


@given(
    st.lists(st.tuples(st.floats(0, 1e8), st.floats(-1e6, 1e6)), min_size=1, max_size=8),
    st.sampled_from([1e-8, 1e-3, 1.0, 1e4]),
)
def test_tilt_solves_its_equation(pairs, radius):
    w, b = np.array(pairs).T
    density = _density(w / radius**2, b / radius, radius)
    kappa = density.tilt()
    assert kappa >= 0
    w, b = density.unit()
    if kappa > 0:
        second_moment = np.sum(1 / (w + kappa) + (b / (w + kappa)) ** 2)
        assert second_moment == pytest.approx(1.0, rel=1e-6)
    else:
        assert np.sum(1 / w + (b / w) ** 2) <= 1 + 1e-9


@pytest.mark.parametrize("size", [1e8, 1e12, 1e15])
def test_tilt_is_found_where_its_bracket_is_below_rounding(size):
    """A mode on the edge of the ball of a very stiff density: any κ ≥ 0 will do, but one has to be found."""
    assert 0 <= _density([size], [size]).tilt() <= 1e-6 * size
    assert 0 <= _density([size, size], [0.6 * size, 0.8 * size]).tilt() <= 1e-6 * size


def test_values_stay_hidden():
    density = _density([1.2345], [6.789])
    assert "1.2345" not in repr(density)
    assert "6.789" not in repr(density)
    with pytest.raises(TypeError, match="private data"):
        pickle.dumps(density)
