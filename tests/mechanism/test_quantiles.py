"""Private quantiles: bounded range by enumeration of the grid, the law of the draws, and when a purchase is reliable."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from opacus_expm.mechanism.quantiles import (
    GRID,
    grid_counts,
    private_quantile,
    quantile_scores,
    reliable_epsilon,
    score_width,
)


class Fixed:
    """The same uniform number for ever."""

    def __init__(self, value):
        self.value = value

    def random(self, count):
        return np.full(count, self.value)


def _log_probabilities(norms, quantile, epsilon, adjacency):
    logits = epsilon * quantile_scores(grid_counts(norms), quantile) / score_width(quantile, adjacency)
    return logits - np.logaddexp.reduce(logits)


NORMS = st.lists(st.floats(1e-9, 1e9), max_size=30).map(np.array)


@given(NORMS, st.floats(1e-10, 1e10), st.floats(0.05, 0.95), st.floats(0.01, 5.0))
def test_one_record_more_keeps_the_loss_in_an_interval_of_length_epsilon(norms, record, quantile, epsilon):
    """By enumeration of all grid points: bounded range, hence pure ε-DP."""
    before = _log_probabilities(norms, quantile, epsilon, "add_remove")
    after = _log_probabilities(np.append(norms, record), quantile, epsilon, "add_remove")
    loss = after - before
    assert np.ptp(loss) <= epsilon * (1 + 1e-9)
    assert np.abs(loss).max() <= epsilon * (1 + 1e-9)


@given(NORMS, st.floats(1e-10, 1e10), st.floats(0.05, 0.95), st.floats(0.01, 5.0), st.floats(-3.0, 3.0))
def test_public_weights_do_not_change_the_range(norms, record, quantile, epsilon, slope):
    base = slope * np.abs(np.log2(GRID))
    width = score_width(quantile, "add_remove")
    laws = []
    for records in (norms, np.append(norms, record)):
        logits = epsilon * quantile_scores(grid_counts(records), quantile) / width + base
        laws.append(logits - np.logaddexp.reduce(logits))
    loss = laws[1] - laws[0]
    assert np.ptp(loss) <= epsilon * (1 + 1e-9) + 1e-9
    assert np.abs(loss).max() <= epsilon * (1 + 1e-9) + 1e-9


def test_public_weights_take_part_in_the_draw():
    counts, random = grid_counts(np.ones(0)), np.random.default_rng(0)
    base = -500.0 * np.abs(np.log(GRID / GRID[7]))
    assert {private_quantile(counts, 0.5, 1.0, "add_remove", random, base) for _ in range(20)} == {GRID[7]}


def _of_points(counts, quantile):
    """The scores as they were, of points of the grid."""
    return -np.abs(counts[:-1] - quantile * counts[-1])


@pytest.mark.parametrize("value", [1.03, 3e-5, 0.7])
def test_equal_norms_between_two_points_are_found(value):
    """Every norm is the same: the interval that holds it has score 0, all others are worse by tens of records."""
    counts, random = grid_counts(np.full(200, value)), np.random.default_rng(0)
    end = GRID[np.searchsorted(GRID, value)]
    found = [private_quantile(counts, 0.75, 0.5, "add_remove", random) for _ in range(200)]
    assert np.mean(np.array(found) == end) > 0.99
    logits = 0.5 * _of_points(counts, 0.75) / score_width(0.75, "add_remove")
    law = np.exp(logits - np.logaddexp.reduce(logits))
    assert law[end == GRID] < 0.02  # scores of points choose anything above


def test_the_interval_of_the_quantile_has_the_best_score():
    norms = np.random.default_rng(0).lognormal(size=999)
    scores = quantile_scores(grid_counts(norms), 0.8)
    best = np.flatnonzero(scores == scores.max())
    assert GRID[best[0] - 1] < np.quantile(norms, 0.8) <= GRID[best[-1]]
    assert scores.max() == 0


@given(NORMS.filter(lambda n: n.size), st.floats(1e-10, 1e10), st.floats(0.05, 0.95), st.floats(0.01, 5.0))
def test_replacing_a_record(norms, record, quantile, epsilon):
    before = _log_probabilities(norms, quantile, epsilon, "replace_one")
    after = _log_probabilities(np.append(norms[1:], record), quantile, epsilon, "replace_one")
    assert np.ptp(after - before) <= epsilon * (1 + 1e-9)


def test_the_width_is_reached_so_a_smaller_one_would_be_wrong():
    """q = 0.8: a record above the quantile makes points below it worse by 0.8 and points above it better by 0.8."""
    norms, record = np.full(10, 1e3), 1e6
    change = quantile_scores(grid_counts(np.append(norms, record)), 0.8) - quantile_scores(grid_counts(norms), 0.8)
    assert np.ptp(change) == pytest.approx(score_width(0.8, "add_remove"))


def test_draws_follow_the_stated_law():
    norms = np.random.default_rng(0).lognormal(size=200)
    expected = np.exp(_log_probabilities(norms, 0.8, 0.3, "add_remove"))
    random, counts = np.random.default_rng(1), grid_counts(norms)
    draws = np.array([private_quantile(counts, 0.8, 0.3, "add_remove", random) for _ in range(4000)])
    counts = np.array([(draws == t).sum() for t in GRID])
    likely = expected * len(draws) >= 5
    observed = np.append(counts[likely], counts[~likely].sum())
    expectation = np.append(expected[likely], expected[~likely].sum()) * len(draws)
    assert stats.chisquare(observed, expectation).pvalue > 1e-3
    wrong = np.exp(_log_probabilities(norms, 0.8, 0.6, "add_remove"))  # twice the ε
    expectation = np.append(wrong[likely], wrong[~likely].sum()) * len(draws)
    assert stats.chisquare(observed, expectation).pvalue < 1e-6


@pytest.mark.parametrize("uniform", [0.0, 0.5, 1 - 1e-16, 1.0])
def test_every_uniform_number_gives_a_grid_point(uniform):
    assert private_quantile(grid_counts(np.ones(5)), 0.5, 1.0, "add_remove", Fixed(uniform)) in GRID


def test_points_of_any_probability_can_be_chosen():
    """On both sides of the quantile, down to 2⁻⁹⁰: each has its part of the uniform numbers, next to zero."""
    norms = np.random.default_rng(0).lognormal(sigma=3.0, size=200)
    logs = _log_probabilities(norms, 0.5, 1.0, "add_remove")
    rare = np.flatnonzero((logs > math.log(2.0**-90)) & (logs < math.log(2.0**-54)))
    assert {bool(t < np.median(norms)) for t in GRID[rare]} == {True, False}
    for point in rare:
        others = np.exp(logs[logs < logs[point]]).sum()
        chosen = private_quantile(
            grid_counts(norms), 0.5, 1.0, "add_remove", Fixed(others + 0.5 * math.exp(logs[point]))
        )
        assert logs[np.flatnonzero(chosen == GRID)[0]] == logs[point]


def test_norms_are_not_mistaken_for_counts():
    with pytest.raises(ValueError, match="counts must be grid_counts"):
        private_quantile(np.ones(5), 0.5, 1.0, "add_remove", Fixed(0.5))


def test_reliable_purchases_are_near_the_quantile():
    """At twice what reliability needs, a thousand purchases stay within a few percentiles of the quantile."""
    size = 20_000
    norms = np.sort(np.random.default_rng(2).lognormal(size=size))
    epsilon = 2 * reliable_epsilon(size, 0.8)
    random, counts = np.random.default_rng(3), grid_counts(norms)
    found = [private_quantile(counts, 0.8, epsilon, "add_remove", random) for _ in range(1000)]
    reached = np.searchsorted(norms, found) / size
    assert np.abs(reached - 0.8).max() < 0.1


def test_a_poor_purchase_fails_often():
    """With N = 20,000, q = 0.9 and ε₁ = 0.0025 most purchases miss; so the warning is not for nothing."""
    norms = np.sort(np.random.default_rng(4).lognormal(size=20_000))
    random, counts = np.random.default_rng(5), grid_counts(norms)
    found = [private_quantile(counts, 0.9, 0.0025, "add_remove", random) for _ in range(300)]
    reached = np.searchsorted(norms, found) / 20_000
    assert np.mean(np.abs(reached - 0.9) > 0.09) > 0.5


def test_the_grid_cannot_be_changed():
    with pytest.raises(ValueError, match="read-only"):
        GRID[0] = 1.0
