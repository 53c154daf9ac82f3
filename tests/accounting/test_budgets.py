"""Budgets: refused before anything is charged, never given twice, and part of their ledger."""

import contextlib
import copy
import io
import json
import math
import os
import pickle
import threading
import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ledger_cases import GOOD, flat, make_loader, make_model, release

from opacus_expm import BudgetExceeded, ExpMAccountant, ExpMQuadEngine
from opacus_expm.accounting import filters
from opacus_expm.accounting.ledger import LedgerError, LedgerFile
from opacus_expm.mechanism import curves

# --- Budgets ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [1.0, (1.0,), (1.0, 0.0, 0.0), [1.0, 0.0], "12"])
def test_a_budget_is_a_pair(budget):
    with pytest.raises(TypeError, match="budget must be a pair"):
        ExpMAccountant(budget=budget)


@pytest.mark.parametrize(
    "budget", [(0.0, 0.0), (-1.0, 0.0), (math.inf, 0.0), (1.0, 1.0), (1.0, -0.1), (math.nan, 0.0), ("1", 0)]
)
def test_a_budget_is_possible(budget):
    with pytest.raises((TypeError, ValueError), match="budget"):
        ExpMAccountant(budget=budget)


def test_no_budget_no_limit():
    accountant = ExpMAccountant()
    accountant.record(release(1e6))
    assert accountant.remaining() == math.inf


def test_a_release_beyond_the_budget_is_refused_before_it_is_charged():
    accountant = ExpMAccountant(budget=(2.0, 0.0))
    accountant.record(release(1.5))
    assert accountant.remaining() == 0.5
    with pytest.raises(BudgetExceeded, match=r"epsilon=1\b.*epsilon=2\b.*epsilon=0\.5 still fits") as refused:
        accountant.record(release(1.0))
    assert isinstance(refused.value, ValueError)
    assert accountant.releases == [release(1.5)]
    accountant.record(release(0.5))
    assert accountant.remaining() == 0.0
    assert accountant.get_epsilon() == 2.0
    with pytest.raises(BudgetExceeded, match="epsilon=0 still fits"):
        accountant.record(release(1e-6))


def test_steps_beyond_the_budget_are_refused_before_they_are_charged():
    accountant = ExpMAccountant(budget=(4.0, 1e-5))
    taken = max(n for n in range(1, 50) if accountant.budget.admits([], [(1.0, 0.2, n)]))
    for _ in range(taken):
        accountant.step(noise_multiplier=1.0, sample_rate=0.2)
    with pytest.raises(BudgetExceeded, match=r"DP-SGD step would exceed the budget .*epsilon=4\b.*1e-05"):
        accountant.step(noise_multiplier=1.0, sample_rate=0.2)
    assert accountant.history == [(1.0, 0.2, taken)]
    assert accountant.get_epsilon(1e-5) <= 4.0
    # A quieter step still fits.
    accountant.step(noise_multiplier=50.0, sample_rate=0.2)
    assert accountant.history == [(1.0, 0.2, taken), (50.0, 0.2, 1)]


def test_steps_have_no_pure_budget():
    accountant = ExpMAccountant(budget=(100.0, 0.0))
    with pytest.raises(BudgetExceeded):
        accountant.step(noise_multiplier=100.0, sample_rate=0.01)
    assert len(accountant) == 0


@pytest.mark.parametrize("where", ["memory", "file"])
@pytest.mark.parametrize("kind", ["release", "step"])
def test_two_threads_do_not_both_get_the_last_of_a_budget(tmp_path, monkeypatch, where, kind):
    """The first waits inside its judgement for the second; were there no lock, both would find room."""
    path = None if where == "memory" else tmp_path / "ledger.jsonl"
    accountant, together, refused = ExpMAccountant(budget=(1.0, 1e-5), ledger_path=path), threading.Barrier(2), []
    admits = filters.Filter.admits
    noise = next(float(s) for s in range(1, 99) if accountant.budget.admits([], [(float(s), 1.0, 1)]))
    assert not accountant.budget.admits([], [(noise, 1.0, 2)])

    def slow(self, *arguments):
        with contextlib.suppress(threading.BrokenBarrierError):
            together.wait(0.2)
        return admits(self, *arguments)

    def charge():
        try:
            if kind == "release":
                accountant.record(release(0.6))
            else:
                accountant.step(noise_multiplier=noise, sample_rate=1.0)
        except BudgetExceeded:
            refused.append(kind)

    monkeypatch.setattr(filters.Filter, "admits", slow)
    monkeypatch.setattr(filters.Room, "remaining", lambda *_: 0.0)  # for the message, sixty judgements more
    threads = [threading.Thread(target=charge) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(refused) == 1
    assert accountant.get_epsilon(1e-5) <= 1.0


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("where", ["memory", "file"])
def test_a_forked_process_has_no_budget_of_its_own(tmp_path, where):
    path = None if where == "memory" else tmp_path / "ledger.jsonl"
    accountant = ExpMAccountant(budget=(1.0, 0.0), ledger_path=path)
    child = os.fork()
    if child == 0:
        refusals = 0
        for call in (
            lambda: accountant.record(release(1.0)),
            lambda: accountant.step(noise_multiplier=9.0, sample_rate=0.1),
            accountant.remaining,
        ):
            try:
                call()
            except RuntimeError as error:
                refusals += "belongs to the process that made it" in str(error)
        os._exit(refusals)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
    accountant.record(release(1.0))
    assert accountant.remaining() == 0.0


@pytest.mark.parametrize(
    "duplicate", [copy.copy, copy.deepcopy, pickle.dumps, lambda thing: torch.save(thing, io.BytesIO())]
)
@pytest.mark.parametrize("make", [ExpMAccountant, ExpMQuadEngine])
def test_a_budget_is_not_duplicated(make, duplicate):
    with pytest.raises(
        TypeError, match=rf"{make.__name__} is neither copied nor pickled.* second budget.*ledger_path="
    ):
        duplicate(make(budget=(1.0, 0.0)))


# --- A budget belongs to its ledger ----------------------------------------------------------------------------------

LATE = r"declared for a ledger that holds 1 charges already\. They count against it, but it covers them only if"


def test_a_budget_cannot_be_changed():
    accountant = ExpMAccountant(budget=(1.0, 0.0))
    with pytest.raises(AttributeError):
        accountant.budget = filters.Filter(9.0, 0.0)
    assert accountant.budget == filters.Filter(1.0, 0.0)


def test_a_budget_is_written_into_its_file(tmp_path):
    """Whoever opens the file keeps it, also if they did not name it."""
    path = tmp_path / "ledger.jsonl"
    first = ExpMAccountant(budget=(1.0, 1e-6), ledger_path=path)
    kinds = [json.loads(line) for line in path.read_text().splitlines()]
    assert kinds[1]["budget"] == {"epsilon": 1.0, "delta": 1e-6}  # right after the header, before any charge
    first.record(release(0.75))
    content = path.read_bytes()
    for again in (ExpMAccountant(ledger_path=path), ExpMAccountant(ledger_path=path, budget=(1.0, 1e-6))):
        assert again.budget == first.budget
        assert again.remaining() == first.remaining()
        with pytest.raises(BudgetExceeded):
            again.record(release(0.5))
    assert path.read_bytes() == content  # declared once


@pytest.mark.parametrize("other", [(2.0, 1e-6), (0.5, 1e-6), (1.0, 1e-5), (1.0, 0.0)])
def test_another_budget_is_refused(tmp_path, other):
    path = tmp_path / "ledger.jsonl"
    ExpMAccountant(budget=(1.0, 1e-6), ledger_path=path)
    content = path.read_bytes()
    with pytest.raises(ValueError, match=r"is not the ledger's, which is \(1, 1e-06\): .* Leave budget out"):
        ExpMAccountant(budget=other, ledger_path=path)
    with pytest.raises(ValueError, match="is not the ledger's"):
        ExpMQuadEngine(budget=other, ledger_path=path)
    assert path.read_bytes() == content


def test_a_budget_that_another_process_declares_is_kept_by_all(tmp_path):
    path = tmp_path / "ledger.jsonl"
    before = ExpMAccountant(ledger_path=path)
    assert before.remaining() == math.inf
    ExpMAccountant(budget=(1.0, 0.0), ledger_path=path)
    with pytest.raises(BudgetExceeded):
        before.record(release(1.5))
    before.record(release(0.5))
    assert before.remaining() == 0.5


def test_a_late_budget_counts_what_was_charged_and_says_what_it_covers(tmp_path):
    path = tmp_path / "ledger.jsonl"
    ExpMAccountant(ledger_path=path).record(release(0.75))
    with pytest.warns(UserWarning, match=LATE) as said:
        accountant = ExpMAccountant(budget=(1.0, 0.0), ledger_path=path)
    assert said[0].filename == __file__
    assert accountant.remaining() == 0.25
    entries = [json.loads(line) for line in path.read_text().splitlines()]
    assert ["budget" in entry for entry in entries] == [False, False, True]  # the file tells what came before
    # It is declared by then: no second word.
    assert ExpMAccountant(ledger_path=path, budget=(1.0, 0.0)).remaining() == 0.25
    # A warning that is made an error leaves the file as it was.
    ExpMAccountant(ledger_path=tmp_path / "other").record(release(0.75))
    content = (tmp_path / "other").read_bytes()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="already"):
            ExpMAccountant(budget=(1.0, 0.0), ledger_path=tmp_path / "other")
    assert (tmp_path / "other").read_bytes() == content


@pytest.mark.parametrize(
    "entry",
    [
        {"budget": {"epsilon": 1.0, "delta": 0.0}},  # a second one
        {"budget": {"epsilon": 0.0, "delta": 0.0}},
        {"budget": {"epsilon": "1", "delta": 0.0}},
        {"budget": {"epsilon": 1.0}},
        {"budget": [1.0, 0.0]},
        {"budget": None},
    ],
)
def test_a_budget_that_nobody_declared_is_refused(tmp_path, entry):
    path = tmp_path / "ledger.jsonl"
    ExpMAccountant(budget=(1.0, 0.0), ledger_path=path)
    LedgerFile(path).append(entry)
    with pytest.raises(LedgerError, match="holds an entry that is no charge or budget"):
        ExpMAccountant(ledger_path=path)
    state = ExpMAccountant().state_dict() | entry
    if entry["budget"] not in (None, {"epsilon": 1.0, "delta": 0.0}):
        with pytest.raises(ValueError, match="budget"):
            ExpMAccountant().load_state_dict(state)


def test_budgets_are_saved_and_loaded(tmp_path):
    """A checkpoint carries the budget; what is loaded may leave less of a budget than there was, never more."""
    engine, path = ExpMQuadEngine(budget=(1.0, 0.0)), tmp_path / "model.pt"
    private = engine.make_private_expm(make_model(), make_loader(), 0.75, 0.5, 4, **GOOD)
    engine.save_checkpoint(path=path, module=private)
    for there in (ExpMQuadEngine(), ExpMQuadEngine(budget=(1.0, 0.0))):
        there.load_checkpoint(path=path, module=make_model())
        assert there.remaining() == 0.25
        with pytest.raises(BudgetExceeded):
            there.make_private_expm(make_model(), make_loader(), 0.5, 0.5, 4, **GOOD)
    for other in ((9.0, 0.0), (0.5, 0.0)):
        there, module = ExpMQuadEngine(budget=other), make_model()
        with pytest.raises(ValueError, match="is not the ledger's"):
            there.load_checkpoint(path=path, module=module)
        assert len(there.accountant) == 0
        assert torch.equal(flat(module), flat(make_model()))


def test_a_ledger_saved_without_a_budget_counts_against_one():
    free = ExpMAccountant()
    free.record(release(0.75))
    state = free.state_dict()
    old = {key: value for key, value in state.items() if key != "budget"}  # as earlier versions saved it
    for saved, budget, remains in ((state, 1.0, 0.25), (old, 1.0, 0.25), (state, 0.5, 0.0)):
        there = ExpMAccountant(budget=(budget, 0.0))
        with pytest.warns(UserWarning, match=LATE):
            there.load_state_dict(saved)
        assert there.remaining() == remains
        there.load_state_dict(there.state_dict())
        there.load_state_dict(saved)  # nothing new, and nothing to say
        assert there.budget == filters.Filter(budget, 0.0)


SPENT = st.lists(st.tuples(st.floats(0.01, 0.5), st.one_of(st.just(math.inf), st.floats(0.02, 0.5))), max_size=12)


@given(st.floats(0.3, 5.0), st.sampled_from([0.0, 1e-8, 1e-5, 1e-3]), SPENT, st.integers(0, 5))
def test_what_remains_can_be_spent_and_no_more(epsilon, delta, spent, steps):
    accountant = ExpMAccountant(budget=(epsilon, delta))
    for epsilon_range, mu in spent:
        with_release = release(epsilon_range, mu=mu)
        if accountant.budget.admits([*accountant.releases, with_release], accountant.history):
            accountant.record(with_release)
    if delta > 0 and accountant.budget.admits(accountant.releases, [(2.0, 0.1, steps + 1)]):
        accountant.history = [(2.0, 0.1, steps + 1)]
    remains = accountant.remaining()
    assert remains == float(f"{remains:.6g}")
    with pytest.raises(BudgetExceeded):
        accountant.record(release(max(remains * 1.001, 1e-9 * epsilon)))
    if remains > 0:
        accountant.record(release(remains))
        assert accountant.get_epsilon(0.0) == math.inf or accountant.releases[-1].epsilon == remains
        assert filters.total_epsilon(accountant.releases, accountant.history, 0.0).epsilon > 0


def test_what_remains_is_rounded_down():
    """A budget under which 0.25·(1 − 5e-10) passes, by a Rényi order, and 0.25 does not."""
    delta, most = 1e-6, 0.25 * (1 - 5e-10)
    events = [release(0.25)] * 40
    share = delta * filters._SHARE

    def converted(last):
        return min(
            40 * curves.bounded_range_rdp(0.25, a)
            + curves.bounded_range_rdp(last, a)
            + math.log(1 / (a * share)) / (a - 1)
            + math.log1p(-1 / a)
            for a in filters._ORDERS
        )

    accountant = ExpMAccountant(budget=(converted(most) * (1 + 1e-14), delta))
    accountant.releases = list(events)
    assert accountant.budget.admits([*events, release(most)], [])
    assert not accountant.budget.admits([*events, release(0.25)], [])
    assert accountant.remaining() == 0.249999
    accountant.record(release(accountant.remaining()))


@pytest.mark.parametrize("delta", [1e-6, 1e-2])
def test_a_first_release_may_use_delta(delta):
    """Its own curve decides, so that a single release calibrated to the budget passes; nothing passes after it."""
    accountant = ExpMAccountant(budget=(1.0, delta))
    wide = curves.bounded_range_for(1.0, delta)
    accountant.check(release(wide))
    with pytest.raises(BudgetExceeded):
        accountant.check(release(wide * (1 + 1e-6)))
    assert accountant.remaining() == pytest.approx(wide, rel=1e-5)
    accountant.record(release(wide))
    assert accountant.get_epsilon(delta) <= 1.0
    assert accountant.remaining() == 0.0
