"""Plans: admitted as a whole, what they reserve, and what passes beside them."""

import contextlib
import gc
import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ledger_cases import DELTA, release

from opacus_expm import BudgetExceeded, ExpMAccountant, Purchase
from opacus_expm.accounting import composition, filters
from opacus_expm.accounting.events import PlannedEvent
from opacus_expm.mechanism import curves

MU = curves.gaussian_mu(1.0, DELTA)  # of the whole budget (1, DELTA)


def by_mu(mu, epsilon_range=50.0, **changes):
    """A release that costs little by its μ alone."""
    return release(1.0, epsilon_range=epsilon_range, mu=mu, delta=DELTA, **changes)


def planned_draws(count):
    """The whole of (1, DELTA), by μ or by ranges that are as hard to tell apart."""
    mu = MU / math.sqrt(count) * (1 - 1e-9)
    return [
        [PlannedEvent(math.inf, mu)] * count,
        [PlannedEvent(curves.bounded_range_within(mu))] * count,
    ]


def purchase(epsilon):
    return Purchase(epsilon, "add_remove", "max_grad_norm", 0.8, 40)


@pytest.fixture
def nothing_to_collect(monkeypatch):
    """Before a plan is in the way of others, abandoned ones are collected, which takes long among all tests' objects."""
    monkeypatch.setattr(gc, "collect", lambda: 0)


def is_running(accountant):
    return accountant._running() is not None


def test_a_plan_admits_what_would_not_pass_one_by_one():
    """The filter has to share δ among its conditions; a plan, fixed before any output, has not."""
    alone = ExpMAccountant(budget=(1.0, DELTA))
    alone.record(by_mu(MU / math.sqrt(3)))
    alone.record(by_mu(MU / math.sqrt(3)))
    with pytest.raises(BudgetExceeded):
        alone.record(by_mu(MU / math.sqrt(3)))
    accountant = ExpMAccountant(budget=(1.0, DELTA))
    admission = accountant.admit(planned_draws(3), 1.0, DELTA)
    assert admission.by_total
    for _ in range(3):
        accountant.record(by_mu(MU / math.sqrt(3) * (1 - 1e-9)), admission=admission)
    assert len(accountant) == 3
    assert accountant.get_epsilon(DELTA) == pytest.approx(1.0, rel=1e-6)
    assert accountant.get_epsilon(DELTA) <= 1.0


def everything_else(accountant):
    """Charges that are no part of a plan; they are small, and each would pass in an empty ledger."""
    return {
        "release": lambda: accountant.record(release(1e-6)),
        "by mu": lambda: accountant.record(by_mu(1e-6)),
        "the next of the plan, without its admission": lambda: accountant.record(by_mu(MU / math.sqrt(3) * 0.99)),
        "purchase": lambda: accountant.record(purchase(1e-6)),
        "plan": lambda: accountant.admit([[PlannedEvent(1e-6)]], 1e-6, 0.0),
        "step": lambda: accountant.step(noise_multiplier=100.0, sample_rate=0.01),
        "check": lambda: accountant.check(release(1e-6)),
    }


@pytest.mark.parametrize("charges", [1, 2, 3])
@pytest.mark.usefixtures("nothing_to_collect")
def test_nothing_else_passes_once_a_plan_by_its_total_has_begun(charges):
    """Neither while it runs nor after it; the plan itself goes on undisturbed by what was refused."""
    accountant = ExpMAccountant(budget=(1.0, DELTA))
    admission = accountant.admit(planned_draws(3), 1.0, DELTA)
    mu = MU / math.sqrt(3) * (1 - 1e-9)
    for name, charge in everything_else(ExpMAccountant(budget=(1.0, DELTA))).items():
        assert charge() is None or name == "plan"  # as long as nothing of the plan is charged
    for _ in range(charges):
        accountant.record(by_mu(mu), admission=admission)
    for charge in everything_else(accountant).values():
        with pytest.raises(BudgetExceeded, match="a plan that has begun" if charges < 3 else "has to be pure|exceed"):
            charge()
    assert accountant.remaining() == 0.0
    assert len(accountant) == charges
    for _ in range(charges, 3):
        accountant.record(by_mu(mu), admission=admission)
    with pytest.raises(BudgetExceeded):  # one more of the same
        accountant.record(by_mu(mu), admission=admission)
    assert accountant.get_epsilon(DELTA) <= 1.0


def ended(accountant, admission):
    admission.end()


def given_up(accountant, admission):
    accountant.give_up()


@pytest.mark.parametrize("how", [ended, given_up, None])
@pytest.mark.parametrize("where", ["memory", "file", "another process", "saved"])
def test_what_a_plan_by_its_total_leaves_is_pure(how, where, tmp_path):
    """Its δ is gone with the first charge, whatever becomes of the rest: given up, forgotten or crashed."""
    path = None if where in ("memory", "saved") else tmp_path / "ledger.jsonl"
    accountant = ExpMAccountant(budget=(1.0, DELTA), ledger_path=path)
    mu = MU / math.sqrt(3) * (1 - 1e-9)
    small = by_mu(mu, epsilon_range=0.25)  # which has a range as well
    admission = accountant.admit(planned_draws(3), 1.0, DELTA)
    accountant.record(small, admission=admission)
    if how is not None:
        how(accountant, admission)
    if how is not None and where == "memory":  # the plan is no longer followed
        with pytest.raises(BudgetExceeded, match="has to be pure"):
            accountant.record(by_mu(mu), admission=admission)
    del admission
    state = json.loads(json.dumps(accountant.state_dict(), allow_nan=False))
    if where == "another process":
        accountant = ExpMAccountant(ledger_path=path)
    elif where == "saved":
        accountant = ExpMAccountant()
        accountant.load_state_dict(state)
    assert not is_running(accountant)
    # Without the plan the ledger's conditions would admit another one by μ, and more than one by range.
    free = filters.Filter(1.0, DELTA)
    assert free.admits([small, by_mu(mu)], [])
    assert free.admits([small, release(0.45), release(0.31)], [])
    for other in (by_mu(mu), release(0.76), release(0.5, failure_probability=1e-15)):
        with pytest.raises(BudgetExceeded, match=r"A plan that needed all of delta has begun: .* has to be pure"):
            accountant.record(other)
    with pytest.raises(BudgetExceeded, match="has to be pure"):
        accountant.step(noise_multiplier=100.0, sample_rate=0.01)
    assert accountant.remaining() == 0.75
    accountant.record(release(0.45))
    with pytest.raises(BudgetExceeded):
        accountant.record(release(0.31))
    accountant.record(release(0.3))
    assert accountant.get_epsilon(0.0) <= 1.0


@pytest.mark.parametrize("where", ["memory", "file"])
def test_an_interrupt_in_the_first_charge_of_a_plan_does_not_free_its_delta(where, tmp_path, monkeypatch):
    accountant = ExpMAccountant(
        budget=(1.0, DELTA), ledger_path=None if where == "memory" else tmp_path / "ledger.jsonl"
    )
    mu = MU / math.sqrt(3) * (1 - 1e-9)
    admission = accountant.admit(planned_draws(3), 1.0, DELTA)

    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(ExpMAccountant, "_keep_up", interrupted)
        with pytest.raises(KeyboardInterrupt):
            accountant.record(by_mu(mu), admission=admission)
    assert len(accountant) == 1
    for more in (admission, None):
        with pytest.raises(BudgetExceeded, match="has to be pure"):
            accountant.record(by_mu(mu), admission=more)


def test_a_plan_that_was_not_begun_reserves_nothing():
    """A loop that is built again and again, as in a notebook, does not lock itself out."""
    accountant = ExpMAccountant(budget=(1.0, DELTA))
    plans = [accountant.admit(planned_draws(3), 1.0, DELTA) for _ in range(3)]
    mu = MU / math.sqrt(3) * (1 - 1e-9)
    accountant.record(by_mu(mu), admission=plans[1])
    # The others were admitted to an empty ledger, which it is no more.
    for late in (plans[0], plans[2]):
        with pytest.raises(BudgetExceeded):
            accountant.record(by_mu(mu), admission=late)
    accountant.record(by_mu(mu), admission=plans[1])
    assert len(accountant) == 2


@pytest.mark.usefixtures("nothing_to_collect")
def test_others_have_to_fit_beside_what_is_reserved():
    """Not by its total alone, but as the filter has it: what is left of a plan is kept for it."""
    accountant = ExpMAccountant(budget=(1.0, 0.0))
    admission = accountant.admit([[PlannedEvent(0.2)] * 4], 0.8, 0.0)
    assert not admission.by_total
    assert accountant.remaining() == 1.0
    accountant.record(release(0.2), admission=admission)
    assert accountant.remaining() == 0.2  # 0.6 of 0.8 are reserved
    with pytest.raises(
        BudgetExceeded, match=r"epsilon=0\.2 still fits beside a plan .* has 3 charges to go: .*give_up\(\)"
    ):
        accountant.record(release(0.3))
    with pytest.raises(BudgetExceeded, match="beside a plan"):
        accountant.admit([[PlannedEvent(0.1)] * 3], 0.3, 0.0)
    accountant.record(release(0.15))
    accountant.record(release(0.2), admission=admission)
    beside = accountant.admit([[PlannedEvent(0.025)] * 2], 0.05, 0.0)
    accountant.record(release(0.025), admission=beside)
    accountant.record(release(0.2), admission=admission)
    accountant.record(release(0.2), admission=admission)
    assert accountant.remaining() == 0.025
    accountant.record(release(0.025), admission=beside)
    assert accountant.get_epsilon() == pytest.approx(1.0, rel=1e-15)


def test_steps_have_to_fit_beside_what_is_reserved():
    accountant = ExpMAccountant(budget=(4.0, DELTA))
    admission = accountant.admit([[PlannedEvent(0.5)] * 4], 2.0, 0.0)
    assert not admission.by_total
    accountant.record(release(0.5), admission=admission)
    alone = max(n for n in range(200) if accountant.budget.admits(accountant.releases, [(1.5, 0.2, n + 1)]))
    taken = 0
    with contextlib.suppress(BudgetExceeded):
        while True:
            accountant.step(noise_multiplier=1.5, sample_rate=0.2)
            taken += 1
    assert 0 < taken < alone
    for _ in range(3):
        accountant.record(release(0.5), admission=admission)
    assert accountant.get_epsilon(DELTA) <= 4.0


@pytest.mark.parametrize("how", [ended, given_up, None])
def test_what_is_given_up_is_free_again(how):
    accountant = ExpMAccountant(budget=(1.0, 0.0))
    admission = accountant.admit([[PlannedEvent(0.2)] * 4], 0.8, 0.0)
    accountant.record(release(0.2), admission=admission)
    if how is not None:
        how(accountant, admission)
    else:
        del admission  # the last that referred to it
    assert not is_running(accountant)
    assert accountant.remaining() == 0.8
    accountant.give_up()  # nothing is left to give up
    accountant.record(release(0.8))


def test_a_plan_may_take_the_place_of_another():
    accountant = ExpMAccountant(budget=(1.0, 0.0))
    first = accountant.admit([[PlannedEvent(0.2)] * 5], 1.0, 0.0)
    accountant.record(release(0.2), admission=first)
    with pytest.raises(BudgetExceeded, match="beside a plan"):
        accountant.admit([[PlannedEvent(0.4)] * 2], 0.8, 0.0)
    second = accountant.admit([[PlannedEvent(0.4)] * 2], 0.8, 0.0, instead_of=first)
    assert accountant.remaining() == 0.0  # until the first is given up, it has what it had
    first.end()
    accountant.record(release(0.4), admission=second)
    accountant.record(release(0.4), admission=second)
    with pytest.raises(BudgetExceeded):
        accountant.admit([[PlannedEvent(0.2)]], 0.2, 0.0, instead_of=second)


def test_a_plan_that_does_not_fit_charges_nothing():
    """Every alternative has to fit."""
    accountant = ExpMAccountant(budget=(1.0, DELTA))
    fits, too_much = planned_draws(3)[0], [PlannedEvent(math.inf, MU / math.sqrt(3) * 1.001)] * 3
    for alternatives in ([too_much], [fits, too_much], [too_much, fits], [[*fits, PlannedEvent(0.01)]]):
        message = "epsilon=1, delta=1e-05 would exceed the budget epsilon=1, delta=1e-05"
        with pytest.raises(BudgetExceeded, match=message):
            accountant.admit(alternatives, 1.0, DELTA)
        assert len(accountant) == 0
        assert not is_running(accountant)
    # What was spent before counts.
    accountant.record(release(0.01))
    with pytest.raises(BudgetExceeded):
        accountant.admit([fits], 1.0, DELTA)
    assert len(accountant) == 1


@pytest.mark.parametrize(
    "beyond",
    [
        by_mu(MU / math.sqrt(3) * 1.01),
        by_mu(math.inf),
        release(0.9),
        by_mu(MU / math.sqrt(3) * 0.99, failure_probability=1e-12),
    ],
    ids=["mu", "no mu", "range", "failure"],
)
def test_what_exceeds_a_plan_is_judged_on_its_own(beyond):
    """Refused if it does not fit, with what came before; charged if it does, and then the rest is judged too."""
    accountant = ExpMAccountant(budget=(1.0, DELTA))
    mu = MU / math.sqrt(3) * (1 - 1e-9)
    admission = accountant.admit(planned_draws(3), 1.0, DELTA)
    accountant.record(by_mu(mu), admission=admission)
    accountant.record(by_mu(mu), admission=admission)
    with pytest.raises(BudgetExceeded):
        accountant.record(beyond, admission=admission)
    assert len(accountant) == 2
    accountant.record(by_mu(mu), admission=admission)  # a refusal leaves the plan where it was
    assert len(accountant) == 3
    fresh = ExpMAccountant(budget=(1.0, 0.0))
    admission = fresh.admit([[PlannedEvent(0.1)] * 2], 0.2, 0.0)
    fresh.record(release(0.9), admission=admission)  # not in the plan, and within the budget
    with pytest.raises(BudgetExceeded):
        fresh.record(release(0.1 + 1e-3), admission=admission)
    fresh.record(release(0.1), admission=admission)  # within the budget by itself
    with pytest.raises(BudgetExceeded):
        fresh.record(release(0.1), admission=admission)


def test_a_planned_release_is_held_to_all_that_was_planned():
    """A plan that counted with a small range and a small μ is not followed by a release that has one of them."""
    both = by_mu(0.2, epsilon_range=5.0)
    accountant = ExpMAccountant(budget=(1.0, DELTA))
    admission = accountant.admit([[both]], 1.0, DELTA)
    for wrong in (by_mu(math.inf, epsilon_range=5.0), by_mu(0.3, epsilon_range=5.0)):
        with pytest.raises(BudgetExceeded):
            accountant.record(wrong, admission=admission)
    accountant.record(both, admission=admission)
    assert accountant.get_epsilon(DELTA) <= 1.0


def test_a_range_may_stand_for_the_mu_that_was_planned():
    """Draws of one plan may be by range or by μ in turn: a range within that of μ is as hard to tell apart."""
    mu = MU / math.sqrt(2) * (1 - 1e-9)
    ranged = release(curves.bounded_range_within(mu))
    for order in ([by_mu(mu), ranged], [ranged, by_mu(mu)]):
        accountant = ExpMAccountant(budget=(1.0, DELTA))
        admission = accountant.admit(planned_draws(2), 1.0, DELTA)
        for event in order:
            accountant.record(event, admission=admission)
        assert accountant.get_epsilon(DELTA) <= 1.0
    accountant = ExpMAccountant(budget=(1.0, DELTA))
    admission = accountant.admit(planned_draws(2), 1.0, DELTA)
    accountant.record(by_mu(mu), admission=admission)
    with pytest.raises(BudgetExceeded):
        accountant.record(release(2 * curves.bounded_range_within(mu)), admission=admission)


def test_steps_that_were_planned_are_the_steps_that_follow():
    planned = PlannedEvent(math.inf, runs=((2.0, 0.05, 10),))
    admission = ExpMAccountant(budget=(2.0, DELTA)).admit([[planned]], 2.0, DELTA)
    assert admission.follows(planned, [], [])
    for other in ((2.0, 0.05, 11), (1.9, 0.05, 10), (2.0, 0.06, 10)):
        assert not admission.follows(PlannedEvent(math.inf, runs=(other,)), [], [])
    assert not admission.follows(PlannedEvent(0.1), [], [])


def test_alternatives_are_not_mixed():
    """What was charged rules out the alternatives that it does not belong to."""
    first = [PlannedEvent(0.2), PlannedEvent(0.8)]
    second = [PlannedEvent(0.8), PlannedEvent(0.2)]
    accountant = ExpMAccountant(budget=(1.0, 0.0))
    admission = accountant.admit([first, second], 1.0, 0.0)
    accountant.record(release(0.8), admission=admission)  # the second
    with pytest.raises(BudgetExceeded):
        accountant.record(release(0.8), admission=admission)
    accountant.record(release(0.2), admission=admission)
    assert accountant.get_epsilon() == 1.0


def test_another_process_in_between_has_the_rest_judged(tmp_path):
    """Two accountants on one ledger: a charge by the other is read in before the next of the plan."""
    path = tmp_path / "ledger.jsonl"
    ours, theirs = (ExpMAccountant(budget=budget, ledger_path=path) for budget in ((1.0, 0.0), None))
    admission = ours.admit([[PlannedEvent(0.5)] * 2], 1.0, 0.0)
    ours.record(release(0.5), admission=admission)
    theirs.record(release(0.1))
    for _ in range(2):  # nor do they pass by the plan later on
        with pytest.raises(BudgetExceeded, match=r"a pure release of at most epsilon=0\.4 still fits$"):
            ours.record(release(0.5), admission=admission)
    assert [r.epsilon_range for r in theirs.releases] == [0.5, 0.1]
    # Of a plan by its total they know that δ is gone, so that they disturb it with something pure at the most.
    mu = MU / math.sqrt(2) * (1 - 1e-9)
    for disturbed in (True, False):
        other = tmp_path / f"other-{disturbed}.jsonl"
        ours, theirs = (ExpMAccountant(budget=budget, ledger_path=other) for budget in ((1.0, DELTA), None))
        admission = ours.admit(planned_draws(2), 1.0, DELTA)
        ours.record(by_mu(mu, epsilon_range=0.75), admission=admission)
        for refused in (by_mu(1e-3), release(0.26)):
            with pytest.raises(BudgetExceeded, match="has to be pure"):
                theirs.record(refused)
        with pytest.raises(BudgetExceeded, match="has to be pure"):
            theirs.step(noise_multiplier=50.0, sample_rate=0.01)
        if disturbed:
            theirs.record(release(0.01))
            with pytest.raises(BudgetExceeded):
                ours.record(by_mu(mu, epsilon_range=0.75), admission=admission)
        else:
            ours.record(by_mu(mu, epsilon_range=0.75), admission=admission)
        assert len(ours) == 2


@settings(max_examples=60)
@given(
    st.sampled_from([0.0, DELTA]),
    st.lists(
        st.sampled_from(["next", "foreign", "range", "mu", "step", "nested", "check", "give up", "crash"]),
        min_size=1,
        max_size=8,
    ),
    st.integers(1, 4),
)
def test_whatever_happens_inside_a_plan_the_budget_is_kept(delta, actions, count):
    """Planned charges, others, steps, further plans and ends in any order: one part of the filter's proof holds."""
    accountant = ExpMAccountant(budget=(1.0, delta))
    share = [PlannedEvent(1.0 / count)] * count
    plans = planned_draws(count) if delta else [share]
    event = by_mu(plans[0][0].mu) if delta else release(1.0 / count)
    admission = accountant.admit(plans, 1.0, delta)
    by_total, begun = admission.by_total, False

    def act(action):
        nonlocal accountant, admission, begun
        if action == "next":
            first = len(accountant) == 0 and admission is not None
            accountant.record(event, admission=admission)
            begun = begun or first
        elif action == "foreign":
            accountant.record(event)
        elif action == "range":
            accountant.record(release(0.3))
        elif action == "mu":
            accountant.record(by_mu(0.5 * MU))
        elif action == "step":
            accountant.step(noise_multiplier=20.0, sample_rate=0.01)
        elif action == "nested":
            accountant.record(event, admission=accountant.admit(plans, 1.0, delta))
        elif action == "check":
            accountant.check(event)
        elif action == "give up":
            accountant.give_up()
        else:
            state, accountant, admission = accountant.state_dict(), ExpMAccountant(), None
            accountant.load_state_dict(state)

    for action in actions:
        with contextlib.suppress(BudgetExceeded):
            act(action)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(composition, "_prv_epsilon", lambda *_: math.inf)  # could only make it less
        assert accountant.get_epsilon(delta) <= 1.0 + 1e-8
    releases, history = accountant.releases, accountant.history
    within_the_plan = begun and not history and releases == ([event] * count)[: len(releases)]
    admits = accountant.budget.admits_pure if begun and by_total else accountant.budget.admits
    assert within_the_plan or admits(releases, history)
