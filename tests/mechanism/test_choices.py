"""A choice among finitely many: its law, its bounded range; and the noise of symmetric matrices."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from opacus_expm.mechanism.choices import chosen, isotropic_noise, symmetric_noise


class Fixed:
    """The same uniform number for ever."""

    def __init__(self, value):
        self.value = value

    def random(self, count):
        return np.full(count, self.value)


LOGITS = np.array([0.3, -2.0, 1.1, 0.3, -7.0])


def _law(logits):
    return np.exp(logits - np.logaddexp.reduce(logits))


@given(st.lists(st.floats(-30, 30), min_size=1, max_size=6).map(np.array))
def test_the_law_by_enumeration_of_the_uniform_numbers(logits):
    """Each candidate has an interval of the uniform numbers, as long as its probability."""
    law = _law(logits)
    order = np.argsort(logits, kind="stable")
    ends = np.concatenate([[0.0], np.cumsum(law[order])])
    for number, (low, high) in zip(order, itertools.pairwise(ends), strict=True):
        if high - low > 1e-12:
            assert chosen(logits, Fixed((low + high) / 2)) == number


def test_draws_follow_the_law():
    random = np.random.default_rng(0)
    observed = np.bincount([chosen(LOGITS, random) for _ in range(5000)], minlength=5)[:4]
    for logits, fits in ((LOGITS, True), (2 * LOGITS, False)):  # twice the ε
        expected = _law(logits)[:4] / _law(logits)[:4].sum() * observed.sum()
        pvalue = stats.chisquare(observed, expected).pvalue
        assert pvalue > 1e-3 if fits else pvalue < 1e-6


@pytest.mark.parametrize("uniform", [0.0, 0.5, 1 - 1e-16, 1.0])
def test_every_uniform_number_gives_a_candidate(uniform):
    assert chosen(LOGITS, Fixed(uniform)) in range(5)


def test_a_rare_candidate_can_be_chosen():
    """Below 2⁻⁵³, next to zero."""
    assert chosen(np.array([0.0, -60.0]), Fixed(math.exp(-61))) == 1
    assert chosen(np.array([-60.0, 0.0]), Fixed(math.exp(-61))) == 0


SHARES = st.lists(st.floats(-1, 1), min_size=3, max_size=3).map(np.array)


@given(st.lists(st.floats(-50, 50), min_size=3, max_size=3).map(np.array), SHARES, st.floats(0.01, 4.0))
def test_bounded_range_by_enumeration(scores, share, epsilon):
    """A record whose share of each score is in [−1, 1] changes the log probabilities within an interval of length ε."""
    public = np.array([-8.0, 3.0, 0.0])
    before, after = (np.log(_law(epsilon * s / 2 + public)) for s in (scores, scores + share))
    loss = after - before
    assert np.ptp(loss) <= epsilon * (1 + 1e-9) + 1e-12
    assert np.abs(loss).max() <= epsilon * (1 + 1e-9) + 1e-12


def test_the_range_is_reached_so_half_of_the_width_would_be_wrong():
    before, after = (np.log(_law(np.array(s))) for s in ([0.0, 0.0], [0.5, -0.5]))  # ε = 1, shares 1 and −1
    assert np.ptp(after - before) == pytest.approx(1.0)
    before, after = (np.log(_law(2 * np.array(s))) for s in ([0.0, 0.0], [0.5, -0.5]))
    assert np.ptp(after - before) > 1.5


# --- symmetric noise -------------------------------------------------------------------------------------------------


def _isometric(matrices):
    """Symmetric matrices (…, d, d) as vectors of which the Euclidean norm is the Frobenius norm."""
    d = matrices.shape[-1]
    rows, columns = np.triu_indices(d, 1)
    diagonal = matrices[..., np.arange(d), np.arange(d)]
    return np.concatenate([diagonal, math.sqrt(2) * matrices[..., rows, columns]], axis=-1)


def test_the_coordinates_are_an_isometry():
    a, b = (m + m.T for m in np.random.default_rng(0).standard_normal((2, 4, 4)))
    assert np.linalg.norm(_isometric(a) - _isometric(b)) == pytest.approx(np.linalg.norm(a - b))


def _pvalue(matrices):
    """That of a Kolmogorov-Smirnov test of all coordinates against the standard normal law."""
    return stats.kstest(_isometric(matrices).ravel(), "norm").pvalue


def test_symmetric_noise_is_standard_normal_in_these_coordinates():
    random = np.random.default_rng(1)
    noise = np.stack([symmetric_noise(4, random) for _ in range(4000)])
    assert np.array_equal(noise, noise.swapaxes(1, 2))
    assert _pvalue(noise) > 1e-3
    covariance = np.cov(_isometric(noise).T)
    assert np.abs(covariance - np.eye(10)).max() < 0.1
    assert noise[:, 0, 1].var() == pytest.approx(0.5, rel=0.1)
    assert noise[:, 2, 2].var() == pytest.approx(1.0, rel=0.1)


def test_another_variance_off_the_diagonal_is_rejected():
    noise = np.random.default_rng(1).standard_normal((4000, 4, 4))
    whole = np.triu(noise) + np.triu(noise, 1).swapaxes(1, 2)  # N(0, 1) off the diagonal
    mean = (noise + noise.swapaxes(1, 2)) / 2  # N(0, ½) there, and N(0, 1) on it: right
    assert _pvalue(whole) < 1e-6
    assert _pvalue(mean) > 1e-3
    assert _pvalue(mean / 2) < 1e-6


# --- isotropic noise ------------------------------------------------------------------------------------------------


def _radial(noise, shape, scale=1.0):
    return stats.kstest(np.linalg.norm(noise, axis=1), stats.gamma(shape, scale=scale).cdf).pvalue


@pytest.mark.parametrize("dim", [1, 2, 7])
def test_isotropic_noise_has_a_radius_of_the_gamma_law_and_a_uniform_direction(dim):
    random = np.random.default_rng(1)
    noise = np.stack([isotropic_noise(dim, random) for _ in range(20_000)])
    assert _radial(noise, dim) > 1e-3
    for wrong in (dim - 1, dim + 1):  # the density of the radius without, or with another factor r
        assert wrong == 0 or _radial(noise, wrong) < 1e-6
    assert _radial(noise, dim, scale=0.5) < 1e-6
    assert _radial(noise, dim, scale=0.95) < 1e-6
    units = noise / np.linalg.norm(noise, axis=1, keepdims=True)
    if dim == 1:
        assert abs(units.mean()) < 0.03
    else:  # a coordinate of a uniform direction: (1 + u)/2 has a beta law
        law = stats.beta((dim - 1) / 2, (dim - 1) / 2)
        assert all(stats.kstest((1 + u) / 2, law.cdf).pvalue > 1e-3 for u in units.T)
        assert stats.kstest((1 + units[:, 0]) / 2, stats.beta(dim / 2, dim / 2).cdf).pvalue < 1e-6
    assert abs(stats.spearmanr(np.linalg.norm(noise, axis=1), units[:, 0]).statistic) < 0.03


def test_isotropic_noise_in_one_dimension_is_that_of_laplace():
    random = np.random.default_rng(2)
    noise = np.concatenate([isotropic_noise(1, random) for _ in range(20_000)])
    assert stats.kstest(noise, "laplace").pvalue > 1e-3
    assert stats.kstest(noise, "norm").pvalue < 1e-6
