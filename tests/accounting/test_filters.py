"""Filters: what they admit, what they refuse, and that whatever is admitted is within the budget."""

import math

import pytest
import quick
from hypothesis import given, settings
from hypothesis import strategies as st
from ledger_cases import RELEASES, RUNS, copies

from opacus_expm.accounting import composition, filters
from opacus_expm.accounting.composition import total_epsilon
from opacus_expm.accounting.events import PlannedEvent as Event
from opacus_expm.accounting.filters import Filter, Room
from opacus_expm.mechanism import curves


@given(st.lists(st.floats(1e-3, 3.0), min_size=1, max_size=8))
def test_a_budget_may_be_spent_to_the_last_bit(ranges):
    budget = math.fsum(ranges)
    events = [Event(e) for e in ranges]
    for delta in (0.0, 1e-6):
        assert Filter(budget, delta).admits(events, [])
    assert not Filter(budget, 0.0).admits([*events, Event(1e-6 * budget)], [])
    assert not Filter(budget * (1 - 1e-9), 0.0).admits(events, [])


def test_nothing_is_always_admitted():
    assert Filter(1e-3, 0.0).admits([], [])
    assert Filter(1e-3, 1e-6).admits([], [])


def test_each_branch_admits_what_the_others_do_not(monkeypatch):
    """Pure, Rényi and Gaussian; with a branch shut, its case is refused."""
    pure = (Filter(1.0, 1e-6), copies(2, 0.5))
    renyi = (Filter(4.0, 1e-6), copies(40, 0.2))
    share = 1e-5 * filters._SHARE
    mu = curves.gaussian_mu(1.0, share)
    gaussian = (Filter(1.0, 1e-5), copies(4, 50.0, 0.499 * mu))
    # A range without μ counts as the μ of its range.
    ranged = (Filter(1.0, 1e-5), [Event(50.0, 0.99 * mu), Event(0.05)])
    assert curves.bounded_range_mu(0.05) ** 2 + (0.99 * mu) ** 2 < mu**2
    for budget, events in (pure, renyi, gaussian, ranged):
        assert budget.admits(events, [])
    assert not ranged[0].admits([ranged[1][0], Event(0.06)], [])
    # Pure: at δ = 0 the others say nothing.
    assert Filter(1.0, 0.0).admits(pure[1], [])
    for budget, events in (renyi, gaussian, ranged):
        assert not Filter(budget.epsilon, 0.0).admits(events, [])
        assert sum(e.epsilon_range for e in events) > budget.epsilon
    # Rényi: more than ε in sum. Gaussian: refused once the Gaussian curve is out of reach.
    with monkeypatch.context() as patch:
        patch.setattr(curves, "gaussian_delta", lambda mu, epsilon: 1.0)
        assert pure[0].admits(pure[1], [])
        assert renyi[0].admits(renyi[1], [])
        assert not gaussian[0].admits(gaussian[1], [])
        assert not ranged[0].admits(ranged[1], [])
    with monkeypatch.context() as patch:
        patch.setattr(filters, "release_rdp", lambda *arguments: math.inf)
        assert pure[0].admits(pure[1], [])
        assert not renyi[0].admits(renyi[1], [])
        assert gaussian[0].admits(gaussian[1], [])
        assert ranged[0].admits(ranged[1], [])


def test_a_plan_is_judged_by_its_total():
    budget, delta = Filter(1.0, 1e-5), 1e-5
    whole = copies(3, math.inf, curves.gaussian_mu(1.0, delta) / math.sqrt(3) * (1 - 1e-12))
    assert not budget.admits(whole, [])  # one by one δ is shared among the conditions
    assert budget.admits_total(whole)
    assert not budget.admits_total([*whole, Event(1e-3)])


def test_the_pure_condition_needs_no_delta():
    budget = Filter(1.0, 1e-5)
    assert budget.admits_pure(copies(4, 0.25, 0.1), [])
    assert not budget.admits_pure([*copies(4, 0.25), Event(1e-6)], [])
    assert not budget.admits_pure([Event(math.inf, 0.01)], [])
    assert not budget.admits_pure([Event(0.5, failure_probability=1e-15)], [])
    assert not budget.admits_pure([Event(0.5)], [(50.0, 0.01, 1)])


@settings(max_examples=60)
@given(
    st.floats(0.3, 4.0),
    st.sampled_from([0.0, 1e-8, 1e-5, 1e-3]),
    st.lists(st.tuples(st.floats(0.01, 2.0), st.floats(0.01, 1.0)), min_size=1, max_size=5),
    st.floats(1e-4, 0.5),
)
def test_a_plan_that_passes_is_within_the_budget_and_so_is_what_follows(epsilon, delta, planned, more):
    budget, plan = Filter(epsilon, delta), [Event(*event) for event in planned]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(composition, "_prv_epsilon", lambda *_: math.inf)  # takes long, and is not needed
        if not budget.admits_total(plan):
            assert total_epsilon(plan, [], delta).epsilon > epsilon
            return
        assert total_epsilon(plan, [], delta).epsilon <= epsilon * (1 + 1e-12)
        plan = next((p for n in range(20, 0, -1) if budget.admits(p := [*plan, *copies(n, more)], [])), plan)
        assert total_epsilon(plan, [], delta).epsilon <= epsilon * (1 + 1e-12)


def test_filter_limits_by_hand():
    """The last number of releases that passes is the one that the formula gives, for one order at a time."""
    budget, delta = 2.0, 1e-5
    share = delta * filters._SHARE

    def fits(n):
        return any(
            n * curves.bounded_range_rdp(0.1, a) + math.log(1 / (a * share)) / (a - 1) + math.log((a - 1) / a) <= budget
            for a in filters._ORDERS
        )

    most = max(n for n in range(1, 400) if fits(n))
    assert most > budget / 0.1  # more than pure composition allows
    assert Filter(budget, delta).admits(copies(most, 0.1), [])
    assert not Filter(budget, delta).admits(copies(most + 1, 0.1), [])


def test_filter_counts_steps():
    budget = Filter(3.0, 1e-5)
    admitted = [n for n in range(1, 200, 10) if budget.admits([], [(1.0, 0.05, n)])]
    assert admitted == list(range(1, 1 + 10 * len(admitted), 10))
    assert 0 < len(admitted) < 20
    most = [(1.0, 0.05, admitted[-1])]
    assert total_epsilon([], most, 1e-5).epsilon <= 3.0
    assert not budget.admits(copies(1, 2.9), most)
    # Steps have no pure ε, so δ = 0 admits none.
    assert not Filter(100.0, 0.0).admits([], [(1.0, 0.05, 1)])


@pytest.mark.parametrize("count", quick.only([10], [1, 10, 100, 1000]))
def test_filter_counts_events_of_steps_as_steps(count):
    steps = (2.0, 0.05, count)
    for run in (Event(math.inf, runs=(steps,)), Event(1e-6, 1e-6, runs=(steps,))):
        for more in ([], [Event(0.3)]):
            budget = Filter(2.0, 1e-5)
            assert budget.admits([*more, run], []) == budget.admits(more, [steps])
            assert budget.admits_total([*more, run]) == (total_epsilon(more, [steps], 1e-5).epsilon <= 2.0)
        assert not Filter(2.0, 1e-5).admits_pure([run], [])
        assert not Filter(2.0, 0.0).admits([run], [])


def test_filter_admits_few_steps_of_an_event_and_refuses_many():
    assert Filter(2.0, 1e-5).admits([Event(math.inf, runs=((2.0, 0.05, 10),))], [])
    assert not Filter(2.0, 1e-5).admits([Event(math.inf, runs=((2.0, 0.05, 1000),))], [])


def test_filter_leaves_room_for_failures():
    epsilon, failure = 1.0, 1e-9
    needed = (1 + math.exp(epsilon)) * failure
    event = Event(epsilon, failure_probability=failure)
    assert Filter(epsilon, needed * (1 + 1e-9)).admits([event], [])
    assert not Filter(epsilon, needed * (1 - 1e-9)).admits([event], [])
    assert not Filter(epsilon, 0.0).admits([event], [])
    assert not Filter(2 * epsilon, 1.5 * needed).admits([event, event], [])


def test_failures_have_a_share_of_delta_of_their_own():
    """However many there are, the other shares are the same: their sum is δ for whoever chooses by looking."""
    epsilon, delta = 1.0, 1e-5
    failure = delta * filters._FAILURE_SHARE / (1 + math.exp(epsilon))  # of all draws together
    for failures in (0.0, 0.5, 1 - 1e-9):
        events = [Event(0.25, failure_probability=failures * failure / 4)] * 4
        assert Filter(epsilon, delta).admits(events, [])
        mu = curves.gaussian_mu(epsilon, delta * filters._SHARE) / math.sqrt(2)
        for factor, admitted in ((1 - 1e-9, True), (1 + 1e-6, False)):
            pair = [Event(math.inf, mu * factor, failure_probability=failures * failure / 2)] * 2
            assert Filter(epsilon, delta).admits(pair, []) == admitted
    assert not Filter(epsilon, delta).admits([Event(0.25, failure_probability=1.001 * failure / 4)] * 4, [])


@settings(max_examples=15)
@given(
    st.floats(0.3, 4.0),
    st.sampled_from([0.0, 1e-8, 1e-5, 1e-3]),
    st.lists(st.one_of(RELEASES, RUNS), min_size=2, max_size=8),
)
def test_whatever_is_admitted_is_within_the_budget(epsilon, delta, offers):
    """Events are offered one after the other and taken if they pass, as an adaptive user would."""
    budget, events, steps = Filter(epsilon, delta), [], []
    for offer in offers:
        more = ([*events, offer], steps) if isinstance(offer, Event) else (events, [*steps, offer])
        if budget.admits(*more):
            events, steps = more
    assert total_epsilon(events, steps, delta).epsilon <= epsilon * (1 + 1e-12)


@settings(max_examples=25)
@given(st.floats(0.5, 3.0), st.floats(1e-8, 1e-3), st.floats(0.1, 0.5), st.floats(0.05, 0.3))
def test_filters_stop_in_time(epsilon, delta, epsilon_range, mu):
    """As many releases of one kind as pass: one of the closed totals confirms them, and one more may pass none."""
    budget = Filter(epsilon, delta)
    n = next(n for n in range(1000) if not budget.admits(copies(n + 1, epsilon_range, mu), []))
    assert n >= math.floor(epsilon / epsilon_range)
    if n > 0:
        cheapest = min(
            n * epsilon_range,
            composition._rdp_epsilon(copies(n, epsilon_range, mu), [], delta),
            curves.gaussian_epsilon(math.sqrt(n) * mu, delta),
            curves.bounded_range_epsilon(epsilon_range, delta) if n == 1 else math.inf,
        )
        assert cheapest <= epsilon * (1 + 1e-12)


# --- Room ------------------------------------------------------------------------------------------------------------


def test_without_a_budget_everything_fits():
    room = Room(None, copies(9, 100.0), claimed=True)
    assert room.fits([Event(math.inf, 100.0)], [(0.1, 1.0, 5)])
    assert room.remaining([]) == math.inf


def test_more_fits_until_the_budget_is_spent():
    room = Room(Filter(1.0, 0.0), copies(2, 0.25))
    assert room.fits([Event(0.5)], [])
    assert not room.fits([Event(0.501)], [])
    assert not room.fits([], [(2.0, 0.1, 1)])
    assert (room.remaining([]), room.why_less()) == (0.5, "")


def test_what_is_reserved_is_not_free():
    """Whichever list the plan follows, so that the dearest of them counts."""
    room = Room(Filter(1.0, 0.0), copies(1, 0.25), reserved=[copies(1, 0.25), copies(2, 0.25)])
    assert room.fits([Event(0.25)], [])
    assert not room.fits([Event(0.26)], [])
    assert room.remaining([]) == 0.25
    assert "has 2 charges to go" in room.why_less()


def test_beside_a_plan_that_has_all_of_delta_what_fits_is_pure():
    budget, charged = Filter(1.0, 1e-5), [Event(0.25, 0.05)]
    assert Room(budget, charged).fits([Event(math.inf, 0.05)], [])
    claimed = Room(budget, charged, claimed=True)
    assert claimed.fits([Event(0.75)], [])
    assert not claimed.fits([Event(math.inf, 0.05)], [])
    assert "has to be pure" in claimed.why_less()
    under_way = Room(budget, charged, claimed=True, reserved=[copies(1, 0.25)], whole=True)
    assert not under_way.fits([Event(0.1)], [])
    assert under_way.remaining([]) == 0.0
