"""Totals against brute force, against other libraries, and against laws that no valid total can undercut."""

import itertools
import math
import warnings

import numpy as np
import pytest
import quick
from hypothesis import given, settings
from hypothesis import strategies as st
from ledger_cases import RELEASES, RUNS, copies
from opacus.accountants import PRVAccountant, RDPAccountant
from scipy.integrate import quad
from scipy.optimize import brentq
from scipy.signal import fftconvolve
from scipy.special import ndtr
from scipy.stats import binom

from opacus_expm.accounting import composition
from opacus_expm.accounting.composition import BoundedRangePRV, GaussianPRV, total_epsilon
from opacus_expm.accounting.events import PlannedEvent as Event
from opacus_expm.accounting.filters import Filter
from opacus_expm.mechanism import curves

# --- Slow, obvious twins ------------------------------------------------------------------------------------------


def irwin_hall(n, x):
    """Density of the sum of n independent uniform variates on [0, 1]."""
    terms = [(-1) ** k * math.comb(n, k) * (x - k) ** (n - 1) for k in range(n + 1) if x > k]
    return max(0.0, math.fsum(terms) / math.factorial(n - 1))


def self_composed_delta(epsilon, n, level):
    """δ of n copies of the dominating pair: a loss uniform on [−ε, ε], tilted by e^{t/2}.

    The sum has density e^{s/2}·IH_n((s+nε)/2ε)/(2ε) · (2ε/Z)ⁿ with Z = ∫e^{t/2}dt = 4 sinh(ε/2).
    """
    scale = (2 * epsilon / (4 * math.sinh(epsilon / 2))) ** n / (2 * epsilon)

    def tail(s):
        return -math.expm1(level - s) * math.exp(s / 2) * irwin_hall(n, (s + n * epsilon) / (2 * epsilon))

    knots = sorted({level, *(x for x in ((2 * k - n) * epsilon for k in range(n + 1)) if x > level)})
    return scale * math.fsum(quad(tail, a, b, epsabs=0, epsrel=1e-10)[0] for a, b in itertools.pairwise(knots))


class Grid:
    """Composition of privacy losses by plain convolution on a fine grid around zero."""

    def __init__(self, reach, step):
        half = math.ceil(reach / step)
        self.step, self.losses = step, step * np.arange(-half, half + 1)

    def masses(self, distribution_function):
        """Each loss moved to the nearest point."""
        edges = np.append(self.losses - self.step / 2, self.losses[-1] + self.step / 2)
        return np.diff(distribution_function(edges))

    def composed(self, *pieces):
        """Masses of the sum; the ends must hold nothing."""
        total = pieces[0]
        for piece in pieces[1:]:
            total = np.maximum(fftconvolve(total, piece, mode="same"), 0.0)
        assert math.isclose(total.sum(), 1.0, abs_tol=1e-11)
        return total

    def power(self, masses, n):
        """Masses of the sum of n."""
        if n == 1:
            return masses
        half = self.power(masses, n // 2)
        return self.composed(half, half, masses) if n % 2 else self.composed(half, half)

    def epsilon(self, masses, delta):
        """Least ε at which the composed loss allows δ."""

        def excess(level):
            above = self.losses > level
            return float(masses[above] @ -np.expm1(level - self.losses[above])) - delta

        return brentq(excess, -self.losses[-1] / 2, self.losses[-1] * 0.999, xtol=1e-12)


def bounded_range_law(epsilon):
    """∫ e^{s/2} ds from −ε to t, normalised: the pair's distribution function in other words than the package's."""
    return lambda t: (
        np.clip((np.exp(np.clip(t, -epsilon, epsilon) / 2) - math.exp(-epsilon / 2)), 0, None)
        / (2 * math.sinh(epsilon / 2))
    )


def gaussian_law(mu):
    return lambda t: ndtr((t - mu**2 / 2) / mu)


def subsampled_law(noise_multiplier, sample_rate, *, added):
    """Loss of one DP-SGD step: of P = (1−q)N(0,σ²) + qN(1,σ²) against Q = N(0,σ²), or, if added, of Q against P.

    At the output x it is ℓ(x) = ln(1 − q + q·e^{(2x−1)/2σ²}), which grows with x, or −ℓ(x).
    """
    sigma, q = noise_multiplier, sample_rate

    def output(level):
        inside = np.maximum(np.expm1(level) + q, 1e-300) / q
        return sigma**2 * np.log(inside) + 0.5

    if added:
        return lambda t: np.where(t < -math.log1p(-q), ndtr(-output(-np.minimum(t, -math.log1p(-q))) / sigma), 1.0)
    return lambda t: np.where(
        t > math.log1p(-q), (1 - q) * ndtr(output(t) / sigma) + q * ndtr((output(t) - 1) / sigma), 0.0
    )


def two_point_delta(epsilon, t, n, level):
    """δ of n copies of the law whose loss is t or t − ε, exactly.

    The likelihood ratio has mean one, so P(loss = t) = (1 − e^{t−ε})/(1 − e^{−ε}). Such a release is ε-bounded-range.
    """
    high = math.expm1(t - epsilon) / math.expm1(-epsilon)
    losses = np.arange(n + 1) * epsilon + n * (t - epsilon)
    return float(binom.pmf(np.arange(n + 1), n, high) @ np.maximum(0.0, -np.expm1(level - losses)))


def worst_two_point_epsilon(epsilon, n, delta):
    """ε that n releases of budget ε really cost at δ, for the worst two-point law: no valid total is below."""
    found = 0.0
    for t in np.linspace(0.01, 0.99, 99) * epsilon:
        if two_point_delta(epsilon, t, n, found) > delta:
            found = brentq(lambda e, t=t: two_point_delta(epsilon, t, n, e) - delta, found, n * epsilon, xtol=1e-13)
    return found


def test_the_twins_agree():
    """Irwin-Hall, the grid and, for one release, the closed curve."""
    for level in (-0.5, 0.0, 0.7):
        assert self_composed_delta(1.3, 1, level) == pytest.approx(curves.bounded_range_delta(1.3, level), rel=1e-9)
    grid = Grid(5.0, 2e-4)
    masses = grid.masses(bounded_range_law(1.3))
    for n, delta in ((2, 1e-5), (3, 1e-2)):
        found = grid.epsilon(grid.composed(*[masses] * n), delta)
        assert self_composed_delta(1.3, n, found) == pytest.approx(delta, rel=1e-4)
    grid = Grid(8.0, 2e-4)
    gaussian = grid.masses(gaussian_law(0.4))
    found = grid.epsilon(grid.composed(gaussian, gaussian), 1e-6)
    assert found == pytest.approx(curves.gaussian_epsilon(0.4 * math.sqrt(2), 1e-6), abs=1e-6)


# --- The pair of laws behind the numerical composition --------------------------------------------------------------

RANGES = [1e-6, 1e-3, 0.1, 1.0, 4.0, 30.0]


def curve_of(law, epsilon, level):
    """δ(ε′) = E(1 − e^{ε′−loss})₊ of a loss on [−ε, ε], from its distribution function alone, by parts."""
    return quad(lambda t: math.exp(level - t) * (1 - float(law.cdf(t))), level, epsilon, epsabs=0, epsrel=1e-9)[0]


@pytest.mark.parametrize("epsilon", RANGES)
def test_pair_has_the_density_that_is_claimed(epsilon):
    whole = quad(lambda t: math.exp(t / 2), -epsilon, epsilon, epsabs=0)[0]
    law = BoundedRangePRV(epsilon)
    for t in np.linspace(-1, 1, 9) * epsilon:
        part = quad(lambda s: math.exp(s / 2), -epsilon, t, epsabs=0)[0] / whole
        assert float(law.cdf(t)) == pytest.approx(part, rel=1e-9)
    beyond = law.cdf(np.array([-2 * epsilon, -epsilon, epsilon, 2 * epsilon]))
    assert beyond == pytest.approx([0, 0, 1, 1], abs=1e-15)


@pytest.mark.parametrize("epsilon", RANGES)
def test_pair_has_the_curve_of_bounded_range(epsilon):
    for share in (-0.95, -0.5, -0.1, 0.0, 0.3, 0.7, 0.95):
        found = curve_of(BoundedRangePRV(epsilon), epsilon, share * epsilon)
        assert found == pytest.approx(curves.bounded_range_delta(epsilon, share * epsilon), rel=1e-6)
    # Below −ε every event is told apart as well as possible.
    assert curve_of(BoundedRangePRV(epsilon), epsilon, -epsilon) == pytest.approx(-math.expm1(-epsilon), rel=1e-6)


def test_a_pair_with_another_density_has_another_curve():
    """The comparison above tells the pair from its neighbours: uniform, untilted, or of half the range."""

    class Uniform:
        def cdf(self, t):
            return (t + 1) / 2

    right = curves.bounded_range_delta(1.0, 0.3)
    assert curve_of(BoundedRangePRV(1.0), 1.0, 0.3) == pytest.approx(right, rel=1e-6)
    assert curve_of(Uniform(), 1.0, 0.3) < 0.9 * right
    assert curve_of(BoundedRangePRV(0.5), 1.0, 0.3) < 0.2 * right


@pytest.mark.parametrize("law", [*map(BoundedRangePRV, RANGES[1:]), *map(GaussianPRV, (0.05, 1.0, 3.0))], ids=repr)
def test_likelihood_ratio_has_mean_one(law):
    """E e^{−loss} = 1: without it the loss is not one of two probability laws."""
    end = law.epsilon if isinstance(law, BoundedRangePRV) else law.mu**2 / 2 + 12 * law.mu
    edges = np.linspace(-end, end, 200_001)
    middle = (edges[1:] + edges[:-1]) / 2
    assert np.diff(law.cdf(edges)) @ np.exp(-middle) == pytest.approx(1.0, abs=1e-5)


@given(
    st.floats(1e-2, 10.0),
    st.lists(st.tuples(st.floats(0, 1), st.floats(1e-6, 1)), min_size=1, max_size=6),
    st.floats(-1.2, 1.2),
)
def test_no_bounded_range_law_is_told_apart_better(epsilon, points, share):
    """Random laws whose loss lives in an interval of length ε, at random levels of either sign."""
    # The extremes are always in, so that the interval is used in full.
    where, weights = np.array([(0.0, 1.0), (1.0, 1.0), *points]).T
    weights = weights / weights.sum()
    losses = epsilon * where + math.log(float(weights @ np.exp(-epsilon * where)))
    assert float(weights @ np.exp(-losses)) == pytest.approx(1.0)
    level = share * epsilon
    told_apart = float(weights @ np.maximum(0.0, -np.expm1(level - losses)))
    allowed = curves.bounded_range_delta(epsilon, level) if level > -epsilon else -math.expm1(level)
    assert told_apart <= allowed * (1 + 1e-9) + 1e-15


@given(st.floats(1e-2, 10.0), st.floats(0.01, 0.99), st.floats(-0.99, 0.99))
def test_no_two_point_law_is_told_apart_better(epsilon, place, share):
    level = share * epsilon
    told_apart = two_point_delta(epsilon, place * epsilon, 1, level)
    assert told_apart <= curve_of(BoundedRangePRV(epsilon), epsilon, level) * (1 + 1e-6) + 1e-15
    # The law that is extremal at this level reaches the curve, so the pair is no larger than it has to be.
    reached = two_point_delta(epsilon, (epsilon + level) / 2, 1, level)
    assert reached == pytest.approx(curves.bounded_range_delta(epsilon, level), rel=1e-9)


# --- One release ----------------------------------------------------------------------------------------------------


@given(st.floats(1e-3, 40.0), st.floats(1e-12, 0.4))
def test_one_release_costs_what_the_closed_curve_says(epsilon, delta):
    exact = curves.bounded_range_epsilon(epsilon, delta)
    found = total_epsilon([Event(epsilon)], [], delta)
    assert found.epsilon <= exact
    assert found.epsilon == pytest.approx(exact, rel=1e-12, abs=1e-12)


@given(st.floats(1e-3, 40.0), st.floats(1e-3, 5.0), st.floats(1e-10, 0.4))
def test_one_release_with_two_curves_costs_the_smaller(epsilon, mu, delta):
    smaller = min(curves.bounded_range_epsilon(epsilon, delta), curves.gaussian_epsilon(mu, delta))
    found = total_epsilon([Event(epsilon, mu)], [], delta)
    assert found.epsilon <= smaller
    assert found.epsilon == pytest.approx(smaller, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("delta", [1e-9, 1e-5, 1e-2])
@pytest.mark.parametrize("epsilon", [500.0, 999.0, 1001.0, 5000.0, 1e5])
def test_a_large_range_is_told_as_it_is(epsilon, delta):
    """No curve may undercut that of the two-point laws, however far out."""
    exact = curves.bounded_range_epsilon(epsilon, delta)
    assert total_epsilon([Event(epsilon)], [], delta).epsilon >= exact * (1 - 1e-12)
    assert total_epsilon(copies(2, epsilon), [], delta).epsilon > 1.5 * epsilon


@pytest.mark.parametrize("mu", [1e-3, 1.0, 62.0, 64.0, 200.0])
def test_without_a_range_the_gaussian_curve_decides(mu):
    """A planned event may have no range; its μ must not be taken for less."""
    for events in ([Event(math.inf, mu)], copies(4, math.inf, mu / 2)):
        found = total_epsilon(events, [], 1e-5)
        assert found.epsilon == pytest.approx(curves.gaussian_epsilon(mu, 1e-5), rel=1e-12)
    assert total_epsilon([Event(math.inf, mu)], [], 0.0).epsilon == math.inf


@settings(max_examples=100)
@given(st.floats(1e-4, 8.0), st.integers(2, 40), st.floats(1e-9, 0.2))
def test_by_mu_totals_cover_the_two_point_laws(epsilon, n, delta):
    """n losses of ±ε/2, the law that the Gaussian curve touches: what they allow at √n·μ(ε) is at most δ."""
    found = curves.gaussian_epsilon(math.sqrt(n) * curves.bounded_range_mu(epsilon), delta)
    assert _symmetric_delta(epsilon, n, found) <= delta * (1 + 1e-9)
    # With a μ that is a hundredth less, a single release would already be told apart too well somewhere.
    low = 0.99 * curves.bounded_range_mu(epsilon)
    levels = np.linspace(0.0, epsilon / 2, 200)[:-1]
    assert any(_symmetric_delta(epsilon, 1, level) > curves.gaussian_delta(low, level) for level in levels)


def _symmetric_delta(epsilon, n, level):
    """δ at a level of n pairs of laws whose loss is ε/2 with probability p = 1/(1 + e^{−ε/2}), else −ε/2."""
    up = np.arange(n + 1)
    losses = (2 * up - n) * epsilon / 2
    masses = binom.pmf(up, n, 1 / (1 + math.exp(-epsilon / 2)))
    return float(masses @ -np.expm1(np.minimum(level - losses, 0.0)))


def test_methods_are_named():
    assert total_epsilon([], [], 0.0) == composition.Total(0.0, "nothing released")
    assert total_epsilon([Event(2.0)], [], 0.0) == composition.Total(2.0, "pure")
    assert total_epsilon([Event(2.0)], [], 1e-5).method == "exact"
    assert total_epsilon([Event(20.0, 0.3)], [], 1e-5).method == "gdp"
    assert total_epsilon(copies(10, 0.5), [], 1e-6).method == "rdp"
    assert total_epsilon([], [(1.0, 0.1, 10)], 1e-5).method == "prv"
    assert total_epsilon([], [(1.0, 0.1, 10)], 0.0).epsilon == math.inf


@given(st.lists(st.floats(1e-4, 20.0), min_size=1, max_size=8))
def test_pure_budgets_add(ranges):
    assert total_epsilon([Event(e) for e in ranges], [], 0.0).epsilon == math.fsum(ranges)


# --- Numerical composition against the twins ------------------------------------------------------------------------

WITHIN = 5e-3  # how far above the truth a numerical composition may be


@pytest.mark.parametrize(("epsilon", "delta"), [(0.1, 1e-6), (0.5, 1e-3), (1.0, 1e-6), (3.0, 1e-2)])
@pytest.mark.parametrize("n", [2, 3])
def test_numerical_composition_of_equal_releases(n, epsilon, delta):
    found = composition._prv_epsilon(copies(n, epsilon), [], delta)
    assert self_composed_delta(epsilon, n, found) < delta
    assert self_composed_delta(epsilon, n, found - WITHIN) > delta


@pytest.mark.parametrize(
    ("epsilon", "n", "delta"), quick.only([(1.0, 100, 1e-2)], [(0.5, 300, 1e-6), (1.0, 300, 1e-6), (1.0, 100, 1e-2)])
)
def test_numerical_composition_of_many_releases(epsilon, n, delta):
    """The pair's tails are longer than those of any one release that it dominates: the domain must hold them."""
    grid = Grid(250.0, 4e-3)
    true = grid.epsilon(grid.power(grid.masses(bounded_range_law(epsilon)), n), delta)
    found = composition._prv_epsilon(copies(n, epsilon), [], delta)
    assert true < found < true + 2e-2


@pytest.mark.parametrize("ranges", [(0.3, 1.0), (0.2, 0.2, 1.5), (0.05, 0.4, 0.8)])
@pytest.mark.parametrize("delta", [1e-7, 1e-3])
def test_numerical_composition_of_unequal_releases(ranges, delta):
    grid = Grid(sum(ranges) + 0.1, 5e-5)
    true = grid.epsilon(grid.composed(*(grid.masses(bounded_range_law(e)) for e in ranges)), delta)
    found = composition._prv_epsilon([Event(e) for e in ranges], [], delta)
    assert true < found < true + WITHIN


@pytest.mark.parametrize(
    ("mu", "n", "delta"),
    quick.only([(0.1, 2, 1e-5), (0.5, 9, 1e-8)], [(0.1, 2, 1e-5), (0.5, 9, 1e-8), (1.0, 30, 1e-3)]),
)
def test_numerical_composition_of_gaussian_releases(mu, n, delta):
    found = composition._prv_epsilon(copies(n, 500.0, mu), [], delta)
    true = curves.gaussian_epsilon(math.sqrt(n) * mu, delta)
    assert true < found < true + WITHIN
    # A full batch makes DP-SGD the Gaussian mechanism.
    assert composition._prv_epsilon([], [(1 / mu, 1.0, n)], delta) == pytest.approx(found, abs=1e-6)


def test_numerical_composition_of_both_kinds():
    grid = Grid(12.0, 2e-4)
    true = grid.epsilon(grid.composed(grid.masses(bounded_range_law(0.8)), grid.masses(gaussian_law(0.9))), 1e-6)
    found = composition._prv_epsilon([Event(0.8), Event(100.0, 0.9)], [], 1e-6)
    assert true < found < true + WITHIN
    assert found < 0.8 + curves.gaussian_epsilon(0.9, 1e-6)


MIXED = [
    ([1.0], (1.0, 0.05, 4), 1e-5),
    ([0.3, 0.6], (0.7, 0.2, 3), 1e-3),
    ([2.0], (1.5, 0.6, 6), 1e-7),
    ([0.5], (0.6, 0.01, 8), 0.02),
]


@pytest.mark.parametrize(("ranges", "run", "delta"), MIXED)
def test_releases_and_steps_against_both_directions(ranges, run, delta):
    """Adding a record and removing one are different pairs for a DP-SGD step; the total covers both."""
    noise_multiplier, sample_rate, steps = run
    grid = Grid(40.0, 5e-4)
    releases = [grid.masses(bounded_range_law(e)) for e in ranges]
    removed, added = (
        grid.epsilon(
            grid.composed(*releases, *[grid.masses(subsampled_law(noise_multiplier, sample_rate, added=a))] * steps),
            delta,
        )
        for a in (False, True)
    )
    assert added < removed
    found = composition._prv_epsilon([Event(e) for e in ranges], [run], delta)
    assert removed < found < removed + WITHIN
    total = total_epsilon([Event(e) for e in ranges], [run], delta)
    assert added < total.epsilon <= found


# --- What no valid total can undercut -------------------------------------------------------------------------------

ALIKE = [(0.1, 10, 1e-6), (0.5, 10, 1e-6), (0.5, 10, 1e-2), (1.0, 3, 1e-3), (3.0, 10, 1e-6)]


@pytest.mark.parametrize(("epsilon", "n", "delta"), ALIKE)
def test_totals_cover_the_worst_two_point_law(epsilon, n, delta):
    least = worst_two_point_epsilon(epsilon, n, delta)
    events = copies(n, epsilon)
    assert composition._rdp_epsilon(events, [], delta) > least
    assert composition._prv_epsilon(events, [], delta) > least
    total = total_epsilon(events, [], delta).epsilon
    assert least < total <= n * epsilon
    assert total < 1.25 * least  # and it is a useful bound


def test_wrong_totals_would_be_noticed(monkeypatch):
    """Half the range in the pair, half the Rényi curve, or the curve of ε²/16 instead of ε²/8: all are caught."""
    events, delta = copies(10, 0.5), 1e-6
    least = worst_two_point_epsilon(0.5, 10, delta)
    right = curves.bounded_range_rdp
    with monkeypatch.context() as patch:
        patch.setattr(composition, "BoundedRangePRV", lambda epsilon: BoundedRangePRV(epsilon / 2))
        assert composition._prv_epsilon(events, [], delta) < least
        assert total_epsilon(events, [], delta).epsilon < least
    for wrong in (lambda e, a: right(e, a) / 2, lambda e, a: a * e * e / 16):
        with monkeypatch.context() as patch:
            patch.setattr(curves, "bounded_range_rdp", wrong)
            assert composition._rdp_epsilon(events, [], delta) < least
            assert total_epsilon(events, [], delta).epsilon < least
    assert total_epsilon(events, [], delta).epsilon > least


@given(st.floats(0.05, 3.0), st.integers(2, 40), st.floats(1e-9, 1e-2))
def test_renyi_total_covers_two_point_laws(epsilon, n, delta):
    total = composition._rdp_epsilon(copies(n, epsilon), [], delta)
    worst = max(two_point_delta(epsilon, place * epsilon, n, total) for place in np.linspace(0.05, 0.95, 37))
    assert worst <= delta


# --- Laws of a total ------------------------------------------------------------------------------------------------

SLOW = settings(max_examples=8)  # each example takes several numerical compositions
ROUNDING = 1e-6  # of two numerical compositions on different grids


@pytest.mark.slow
@SLOW
@given(st.lists(RELEASES, max_size=3), st.lists(RUNS, max_size=2), st.floats(1e-8, 1e-2), st.randoms())
def test_order_does_not_matter(events, steps, delta, random):
    total = total_epsilon(events, steps, delta)
    shuffled, runs = list(events), list(steps)
    random.shuffle(shuffled)
    random.shuffle(runs)
    assert total_epsilon(shuffled, runs, delta).epsilon == pytest.approx(total.epsilon, rel=1e-7, abs=1e-9)


@pytest.mark.slow
@settings(max_examples=4)
@given(RELEASES, RUNS, st.floats(1e-8, 1e-2))
def test_splitting_a_run_does_not_matter(event, run, delta):
    noise_multiplier, sample_rate, steps = run
    whole = total_epsilon([event], [(noise_multiplier, sample_rate, steps + 2)], delta).epsilon
    split = [(noise_multiplier, sample_rate, 2), (noise_multiplier, sample_rate, steps)]
    assert total_epsilon([event], split, delta).epsilon == pytest.approx(whole, rel=ROUNDING)


@pytest.mark.slow
@SLOW
@given(st.lists(RELEASES, max_size=2), st.lists(RUNS, min_size=1, max_size=2), st.floats(1e-8, 1e-2))
def test_an_event_of_steps_costs_what_the_steps_cost(events, steps, delta):
    """Whatever it says about a range or μ of its own, which a run of steps does not have."""
    for run in (Event(math.inf, runs=tuple(steps)), Event(1e-6, 1e-6, runs=tuple(steps))):
        assert total_epsilon([*events, run], [], delta) == total_epsilon(events, steps, delta)
        assert total_epsilon([*events, run], [], 0.0).epsilon == math.inf
    failing = Event(math.inf, failure_probability=delta, runs=tuple(steps))
    assert total_epsilon([failing], [], delta).epsilon == math.inf


@SLOW
@given(st.lists(RELEASES, max_size=3), st.lists(RUNS, max_size=1), st.floats(1e-8, 1e-3), st.floats(1.01, 10.0))
def test_a_larger_delta_costs_no_more(events, steps, delta, factor):
    small, large = (total_epsilon(events, steps, d).epsilon for d in (delta, factor * delta))
    assert large <= small * (1 + ROUNDING)
    assert small <= total_epsilon(events, steps, 0.0).epsilon


@pytest.mark.slow
@SLOW
@given(
    st.lists(st.floats(0.02, 2.0), min_size=1, max_size=3),
    st.lists(RUNS, max_size=1),
    st.floats(1e-8, 1e-2),
    st.floats(1.001, 3.0),
)
def test_a_larger_range_costs_no_less(ranges, steps, delta, factor):
    before, after = (
        total_epsilon([Event(e) for e in some], steps, delta).epsilon
        for some in (ranges, [factor * ranges[0], *ranges[1:]])
    )
    assert after >= before * (1 - ROUNDING)


@pytest.mark.parametrize("delta", [1e-8, 1e-4, 2**-7])
def test_a_larger_range_costs_no_less_beside_a_gaussian_curve(delta):
    """The release has two curves, of which the numerical composition picks one."""
    totals = [total_epsilon([Event(e, 0.25), Event(1.0)], [], delta).epsilon for e in (0.25, 0.4, 0.5, 0.6, 1.0, 2.0)]
    assert all(after >= before * (1 - ROUNDING) for before, after in itertools.pairwise(totals))


@pytest.mark.slow
@SLOW
@given(st.lists(RELEASES, max_size=2), st.lists(RUNS, max_size=1), st.floats(1e-8, 1e-2), st.data())
def test_another_event_costs_no_less(events, steps, delta, data):
    before = total_epsilon(events, steps, delta).epsilon
    another = data.draw(st.one_of(RELEASES, RUNS))
    more = ([*events, another], steps) if isinstance(another, Event) else (events, [*steps, another])
    assert total_epsilon(*more, delta).epsilon >= before * (1 - ROUNDING)


@pytest.mark.parametrize("delta", [1e-3, 1e-5, 1e-8])
def test_one_step_more_costs_no_less(delta):
    """From nothing to one step, two, three, and a small release beside them."""
    runs = [[]] + [[(1.0, 0.05, n)] for n in (1, 2, 3)]
    totals = [total_epsilon([], run, delta).epsilon for run in runs]
    assert totals == sorted(totals)
    assert total_epsilon([Event(0.01)], runs[1], delta).epsilon >= totals[1]


def test_totals_beyond_floating_point_are_quiet():
    """Where e^ε overflows the numerical composition cannot serve; others do, and nobody is warned."""
    for events, steps in ((copies(2, 400.0), []), (copies(2, 1e4, 50.0), []), ([Event(1.0)], [(0.02, 0.5, 2)])):
        total = total_epsilon(events, steps, 1e-6)
        assert 700 < total.epsilon < math.inf
        assert total.method != "prv"


# --- Side by side with other libraries ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ten_releases():
    return total_epsilon(copies(10, 0.5), [], 1e-6).epsilon


def test_ten_releases(ten_releases):
    assert ten_releases == pytest.approx(3.632, abs=5e-4)
    assert worst_two_point_epsilon(0.5, 10, 1e-6) == pytest.approx(3.569, abs=5e-4)


def test_ten_releases_against_autodp(ten_releases):
    pytest.importorskip("autodp")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from autodp.mechanism_zoo import ExponentialMechanism
        from autodp.transformer_zoo import Composition

        theirs = Composition()([ExponentialMechanism(eps=0.5)], [10]).get_approxDP(1e-6)
    assert theirs == pytest.approx(4.010, abs=5e-3)
    assert ten_releases < theirs


def test_ten_releases_against_dp_accounting(ten_releases):
    dp_accounting = pytest.importorskip("dp_accounting")
    rdp = pytest.importorskip("dp_accounting.rdp")
    accountant = rdp.RdpAccountant()
    accountant.compose(dp_accounting.ComposedDpEvent([dp_accounting.ZCDpEvent(0.5**2 / 8)] * 10))
    theirs = accountant.get_epsilon(1e-6)
    assert theirs == pytest.approx(4.010, abs=5e-3)
    assert ten_releases < theirs


def test_one_release_and_a_hundred_steps():
    """Ours against basic composition, Rényi composition and the truth of the dominating pairs."""
    events, steps, delta = [Event(1.0)], [(1.0, 0.05, 100)], 1e-5
    total = total_epsilon(events, steps, delta)
    alone = total_epsilon([], steps, delta)
    assert total.method == alone.method == "prv"
    assert alone.epsilon < total.epsilon <= 4.45
    assert alone.epsilon + 1.0 == pytest.approx(4.51, abs=1e-2)
    assert composition._rdp_epsilon(events, steps, delta) == pytest.approx(4.51, abs=1e-2)
    grid = Grid(30.0, 5e-4)
    hundred = grid.power(grid.masses(subsampled_law(1.0, 0.05, added=False)), 100)
    true = grid.epsilon(grid.composed(hundred, grid.masses(bounded_range_law(1.0))), delta)
    assert true < total.epsilon < true + WITHIN


DP_SGD = quick.only([(2.0, 0.25, 20, 1e-5)], [(1.0, 0.05, 100, 1e-5), (0.8, 0.01, 50, 1e-6), (2.0, 0.25, 20, 1e-5)])


@pytest.mark.parametrize(("noise_multiplier", "sample_rate", "steps", "delta"), DP_SGD)
def test_steps_alone_against_opacus(noise_multiplier, sample_rate, steps, delta):
    ours = total_epsilon([], [(noise_multiplier, sample_rate, steps)], delta).epsilon
    renyi, numerical = RDPAccountant(), PRVAccountant()
    renyi.history = numerical.history = [(noise_multiplier, sample_rate, steps)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the largest order
        theirs = renyi.get_epsilon(delta), numerical.get_epsilon(delta, eps_error=1e-3, delta_error=delta / 1000)
    assert ours <= theirs[0] * (1 + 1e-12)
    assert ours == pytest.approx(theirs[1], abs=1e-4)


@pytest.mark.parametrize(("noise_multiplier", "sample_rate", "steps", "delta"), DP_SGD)
def test_steps_alone_against_dp_accounting(noise_multiplier, sample_rate, steps, delta):
    dp_accounting = pytest.importorskip("dp_accounting")
    pld = pytest.importorskip("dp_accounting.pld")
    accountant = pld.PLDAccountant()
    step = dp_accounting.PoissonSampledDpEvent(sample_rate, dp_accounting.GaussianDpEvent(noise_multiplier))
    accountant.compose(dp_accounting.SelfComposedDpEvent(step, steps))
    ours = total_epsilon([], [(noise_multiplier, sample_rate, steps)], delta).epsilon
    assert ours == pytest.approx(accountant.get_epsilon(delta), abs=WITHIN)


# --- Draws that are only nearly exact -------------------------------------------------------------------------------


def test_failure_probability_by_hand():
    """One release at ε = 1, δ = 0.05, within 0.001 of exact.

    At δ/2 the exact release costs ε₁ = 1 + 2 ln(1 − √(0.025·(1−1/e))) = 0.7314..., so (1+e^{ε₁})·0.001 = 0.003078 of δ
    is set aside, and the total is 1 + 2 ln(1 − √(0.046922·(1−1/e))).
    """
    at_half = 1 + 2 * math.log(1 - math.sqrt(0.025 * (1 - 1 / math.e)))
    aside = (1 + math.exp(at_half)) * 0.001
    by_hand = 1 + 2 * math.log(1 - math.sqrt((0.05 - aside) * (1 - 1 / math.e)))
    assert aside == pytest.approx(0.003078, abs=5e-6)
    found = total_epsilon([Event(1.0, failure_probability=0.001)], [], 0.05)
    assert found.epsilon == pytest.approx(by_hand, rel=1e-12)
    assert found.epsilon > total_epsilon([Event(1.0)], [], 0.05).epsilon + 5e-3


@given(st.floats(0.05, 6.0), st.sampled_from([1e-15, 1e-9, 1e-6, 1e-5]), st.sampled_from([1e-4, 1e-2]))
def test_what_is_set_aside_is_enough(epsilon_range, failure, delta):
    """With f the total variation, the exact mechanism must meet δ − (1+e^ε)f at the ε that is reported."""
    found = total_epsilon([Event(epsilon_range, failure_probability=failure)], [], delta).epsilon
    if math.isinf(found):
        assert (1 + math.exp(epsilon_range)) * failure > delta / 2
        return
    spent = curves.bounded_range_delta(epsilon_range, found)
    assert spent + (1 + math.exp(found)) * failure <= delta * (1 + 1e-9)


def test_failures_add():
    whole = total_epsilon([Event(1.0, failure_probability=4e-4), Event(1.0)], [], 0.05).epsilon
    halves = total_epsilon([Event(1.0, failure_probability=2e-4)] * 2, [], 0.05).epsilon
    assert whole == halves > total_epsilon(copies(2, 1.0), [], 0.05).epsilon


@pytest.mark.parametrize("delta", [0.0, 1e-15, 7e-15])
def test_no_statement_where_failures_exceed_delta(delta):
    """2f < (1+e^ε)f in any case, so a δ of at most 2f allows nothing; here f = 4e-15."""
    found = total_epsilon([Event(1.0, failure_probability=4e-15)], [], delta)
    assert found.epsilon == math.inf
    assert found.method == "no bound at this delta"


def test_a_budget_that_covers_the_failures_is_a_statement():
    """A pure release of ε, within f of exact, is (ε, (1+e^ε)f)-DP: a total at a larger δ is at most ε."""
    for epsilon, failure in ((1.0, 1e-15), (20.5, 1e-15), (0.1, 1e-6)):
        needed = (1 + math.exp(epsilon)) * failure
        event = Event(epsilon, failure_probability=failure)
        assert total_epsilon([event], [], 1.2 * needed).epsilon <= epsilon
        assert Filter(epsilon, 1.2 * needed).admits([event], [])
