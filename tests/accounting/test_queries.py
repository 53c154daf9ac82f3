"""Queries in a ledger, the noise of a run beside them, and plans that hold a run."""

import dataclasses
import json
import math

import pytest
from ledger_cases import DELTA, held

from opacus_expm import BudgetExceeded, ExpMAccountant
from opacus_expm.accounting.composition import exact_total, gaussian_total, least_noise, total_epsilon
from opacus_expm.accounting.events import PlannedEvent, Query, event_from_dict
from opacus_expm.mechanism import curves
from opacus_expm.rule import Rule

FACTS = {"what": "length", "epsilon": 1.0, "delta": DELTA, "nominal_size": 40}
QUERIES = (
    Query(**FACTS, mu=0.1),
    Query(**FACTS, epsilon_range=0.2, number=3),
    Query(**FACTS, epsilon_range=0.2, mu=0.05, adjacency="replace_one"),
    Query(**FACTS, run=(2.0, 0.25, 7), noise="given"),
)


@pytest.mark.parametrize("query", QUERIES)
def test_facts_and_back(query):
    assert event_from_dict(json.loads(json.dumps(query.to_dict()))) == query
    assert query.to_dict()["kind"] == "query"


def test_through_a_file(tmp_path):
    path = tmp_path / "ledger"
    first = ExpMAccountant(ledger_path=path)
    for query in QUERIES[:2] + QUERIES[3:]:
        first.record(query)
    second = ExpMAccountant(ledger_path=path)
    assert held(second) == held(first)
    assert second.releases[2].run == (2.0, 0.25, 7)
    with pytest.warns(UserWarning, match="took their noise from a given"):
        total = second.get_epsilon(DELTA)
    events = [PlannedEvent(math.inf, 0.1), PlannedEvent(0.2)]
    assert total == total_epsilon(events, [(2.0, 0.25, 7)], DELTA).epsilon


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({}, "epsilon_range, mu or run must be given"),
        ({"mu": 0.0}, "mu must be greater than 0"),
        ({"mu": math.nan}, "mu must be"),
        ({"epsilon_range": -1.0}, "epsilon_range must be greater than 0"),
        ({"mu": 0.1, "delta": 1.0}, r"delta must be in \[0, 1\)"),
        ({"mu": 0.1, "number": 0}, "number must be a positive integer"),
        ({"mu": 0.1, "nominal_size": 0}, "nominal_size must be a positive integer"),
        ({"mu": 0.1, "noise": "none"}, "noise must be one of"),
        ({"mu": 0.1, "adjacency": "both"}, "adjacency must be one of"),
        ({"run": (1.0, 1.5, 3)}, "sample_rate must be at most 1"),
        ({"run": (1.0, 0.5)}, "a run of DP-SGD steps is"),
        ({"run": (0.0, 0.5, 3)}, "noise_multiplier must be greater than 0"),
        ({"run": (1.0, 0.5, 3), "mu": 0.1}, "by its steps alone"),
        ({"run": (1.0, 0.5, 3), "epsilon_range": 0.1}, "by its steps alone"),
        ({"run": (1.0, 0.5, 3), "adjacency": "replace_one"}, "counted under add_remove"),
    ],
)
def test_facts_that_no_query_can_have(change, message):
    with pytest.raises(ValueError, match=message):
        Query(**(FACTS | change))


def test_a_query_has_a_name():
    with pytest.raises(TypeError, match="what must be a name"):
        Query(**(FACTS | {"what": ""}), mu=0.1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"secret": 1}, "exactly the fields"),
        ({"what": None}, "must be a name"),
        ({"run": "all"}, "a run of DP-SGD steps"),
    ],
)
def test_other_facts_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        event_from_dict({**QUERIES[0].to_dict(), **change})
    with pytest.raises(ValueError, match="exactly the fields"):
        event_from_dict({name: fact for name, fact in QUERIES[0].to_dict().items() if name != "number"})


def test_a_run_does_not_share_a_ledger_with_replace_one():
    accountant = ExpMAccountant()
    accountant.record(QUERIES[2])
    with pytest.raises(ValueError, match="adjacency"):
        accountant.record(dataclasses.replace(QUERIES[3], noise="system"))
    assert len(accountant.releases) == 1


# --- the noise of a run ----------------------------------------------------------------------------------------------

OTHERS = (PlannedEvent(math.inf, 0.08), PlannedEvent(0.1), PlannedEvent(0.1))


@pytest.mark.parametrize("others", [(), OTHERS])
@pytest.mark.parametrize("run", [(0.2, 20), (1.0, 5)])
def test_the_least_noise_is_on_the_private_side(others, run):
    epsilon, (rate, steps) = 1.0, run
    noise = least_noise(epsilon, DELTA, gaussian_total(others), rate, steps)
    assert exact_total(others, [(noise, rate, steps)], DELTA).epsilon <= epsilon
    assert exact_total(others, [(noise * 0.985, rate, steps)], DELTA).epsilon > epsilon


def test_other_events_need_more_noise():
    assert least_noise(1.0, DELTA, gaussian_total(OTHERS), 0.2, 20) > 1.01 * least_noise(1.0, DELTA, 0.0, 0.2, 20)


def test_a_full_run_is_that_of_gaussian_sums():
    """With q = 1 the closed form is known: σ = √T/μ."""
    noise = least_noise(1.0, DELTA, 0.0, 1.0, 4)
    assert noise == pytest.approx(2 / curves.gaussian_mu(1.0, DELTA), rel=1e-2)
    assert noise >= 2 / curves.gaussian_mu(1.0, DELTA)


def test_nothing_is_left_for_a_run():
    with pytest.raises(ValueError, match="cost more"):
        least_noise(0.1, DELTA, gaussian_total([PlannedEvent(0.5)]), 0.2, 20)
    full = curves.gaussian_mu(0.1, DELTA)
    with pytest.raises(ValueError, match="the other events"):
        least_noise(0.1, DELTA, full, 0.2, 20)


# --- plans -----------------------------------------------------------------------------------------------------------

RULE = Rule(1.0, DELTA, 1000, 1, bounded=True)


def _events(rule):
    """What a run of this rule charges."""
    return [
        Query("part", rule.epsilon, rule.delta, rule.records, c.epsilon_range, c.mu, c.runs[0] if c.runs else None)
        for c in rule.charges()
    ]


def test_a_plan_with_a_run_takes_the_whole_budget():
    accountant = ExpMAccountant(budget=(1.0, DELTA))
    admission = accountant.admit([RULE.charges()], 1.0, DELTA)
    for event in _events(RULE):
        with pytest.raises(BudgetExceeded):
            accountant.record(dataclasses.replace(QUERIES[0], mu=0.3))
        accountant.record(event, admission=admission)
    assert 0.95 < accountant.get_epsilon(DELTA) <= 1.0
    with pytest.raises(BudgetExceeded):
        accountant.admit([RULE.charges()], 1.0, DELTA)


def test_other_steps_than_those_planned_do_not_follow_the_plan():
    accountant = ExpMAccountant(budget=(1.0, DELTA))
    admission = accountant.admit([RULE.charges()], 1.0, DELTA)
    events = _events(RULE)
    run = next(i for i, e in enumerate(events) if e.run)
    for event in events[:run]:
        accountant.record(event, admission=admission)
    noise, rate, steps = events[run].run
    for other in ((noise * 0.9, rate, steps), (noise, rate, steps + 1), (noise, min(1.0, rate * 1.1), steps)):
        if other != events[run].run:
            with pytest.raises(BudgetExceeded):
                accountant.record(dataclasses.replace(events[run], run=other), admission=admission)
    accountant.record(events[run], admission=admission)


@pytest.mark.parametrize("budget", [(0.9, DELTA), (1.0, DELTA / 2), (1.0, 0.0)])
def test_a_plan_that_does_not_fit_is_refused_as_a_whole(budget):
    accountant = ExpMAccountant(budget=budget)
    with pytest.raises(BudgetExceeded):
        accountant.admit([RULE.charges()], 1.0, DELTA)
    assert len(accountant.releases) == 0


# --- draws whose pure ε is half of their range -----------------------------------------------------------------------

DRAW = Query(**{**FACTS, "what": "direction"}, epsilon_range=0.2, pure=0.1)


def test_pure_counts_at_delta_zero_and_the_range_at_others():
    assert total_epsilon([DRAW] * 3, [], 0.0).epsilon == pytest.approx(0.3, rel=1e-15)
    assert total_epsilon([DRAW], [], DELTA).epsilon <= 0.1
    found = total_epsilon([DRAW] * 400, [], DELTA)
    assert found.method != "pure"
    assert found.epsilon == total_epsilon([PlannedEvent(0.2)] * 400, [], DELTA).epsilon


def test_the_total_of_laplace_noise_is_no_less_than_its_exact_curve():
    """Noise of scale 1/ε: δ(ε′) = 1 − e^{(ε′−ε)/2} for one draw. The curve of a range ε would be below it."""
    one = Query(**FACTS, epsilon_range=2.0, pure=1.0)
    for delta in (1e-3, 0.05, 0.2):
        exact = 1 + 2 * math.log1p(-delta)
        assert total_epsilon([one], [], delta).epsilon >= exact
        assert total_epsilon([PlannedEvent(1.0)], [], delta).epsilon < exact


def test_a_pure_draw_through_facts_and_from_before():
    facts = json.loads(json.dumps(DRAW.to_dict()))
    assert event_from_dict(facts) == DRAW
    old = {name: fact for name, fact in QUERIES[1].to_dict().items() if name != "pure"}
    assert event_from_dict(old) == QUERIES[1]
    assert QUERIES[1].epsilon_pure == QUERIES[1].epsilon_range


@pytest.mark.parametrize("change", [{"epsilon_range": 0.15}, {"epsilon_range": math.inf, "mu": 1.0}, {"pure": -0.1}])
def test_a_pure_epsilon_is_half_of_the_range(change):
    with pytest.raises(ValueError, match=r"2·pure|pure must be"):
        dataclasses.replace(DRAW, **change)


def test_budgets_and_plans_count_the_pure_epsilon():
    accountant = ExpMAccountant(budget=(0.3, 0.0))
    for _ in range(3):
        accountant.record(DRAW)
    with pytest.raises(BudgetExceeded):
        accountant.record(DRAW)
    planned = PlannedEvent(0.2, pure=0.1)
    accountant = ExpMAccountant(budget=(0.3, 0.0))
    admission = accountant.admit([[planned, planned]], 0.2, 0.0)
    with pytest.raises(BudgetExceeded):  # as much in range, and more in pure ε
        accountant.record(Query(**FACTS, epsilon_range=0.35), admission=admission)
    accountant.record(DRAW, admission=admission)
    accountant.record(DRAW, admission=admission)
    assert accountant.get_epsilon(0.0) == pytest.approx(0.2, rel=1e-15)
