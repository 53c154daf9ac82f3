"""The ledger in memory: what it accepts, what it refuses, and that it agrees with calibration and with Opacus."""

import contextlib
import copy
import gc
import io
import itertools
import json
import math
import os
import pickle
import threading
import warnings

import opacus
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ledger_cases import FACTS, held, release
from opacus.accountants import RDPAccountant, create_accountant
from opacus.accountants.utils import get_noise_multiplier
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from opacus_expm import BudgetExceeded, ExpMAccountant, ExpMQuadEngine, NoGuarantee, NotGuaranteed, Purchase, Release
from opacus_expm.accounting import composition, filters
from opacus_expm.accounting.events import PlannedEvent
from opacus_expm.accounting.ledger import LedgerError, LedgerFile
from opacus_expm.gathering.clipping import Sensitivity
from opacus_expm.mechanism import curves
from opacus_expm.mechanism.calibration import calibrate

# --- Charging --------------------------------------------------------------------------------------------------------


def test_recording_and_counting():
    accountant = ExpMAccountant()
    assert (len(accountant), accountant.get_epsilon()) == (0, 0.0)
    accountant.record(release(0.25))
    accountant.record(release(0.5))
    accountant.step(noise_multiplier=1.0, sample_rate=0.1)
    assert len(accountant) == 3
    assert repr(accountant) == "ExpMAccountant(releases=2, dp_sgd_steps=1)"
    assert accountant.releases == [release(0.25), release(0.5)]


def test_checking_changes_nothing():
    accountant = ExpMAccountant(budget=(1.0, 0.0))
    accountant.check(release(1.0))
    with pytest.raises(BudgetExceeded):
        accountant.check(release(2.0))
    assert len(accountant) == 0


@pytest.mark.parametrize("value", [None, 1.0, FACTS, PlannedEvent(1.0)], ids=["none", "number", "dictionary", "plan"])
def test_only_releases_are_recorded(value):
    accountant = ExpMAccountant()
    with pytest.raises(TypeError, match="must be a Release"):
        accountant.record(value)
    assert len(accountant) == 0


@pytest.mark.parametrize("first", ["add_remove", "replace_one"])
def test_adjacencies_are_not_mixed(first):
    other = {"add_remove": "replace_one", "replace_one": "add_remove"}[first]
    accountant = ExpMAccountant()
    accountant.record(release(adjacency=first))
    accountant.record(release(adjacency=first))
    for refused in (accountant.record, accountant.check):
        with pytest.raises(ValueError, match=f"'{other}' cannot be added to a ledger that counts '{first}'"):
            refused(release(adjacency=other))
    assert len(accountant) == 2


def test_steps_count_added_and_removed_records():
    accountant = ExpMAccountant()
    accountant.record(release(adjacency="replace_one"))
    with pytest.raises(ValueError, match="do not compose"):
        accountant.step(noise_multiplier=1.0, sample_rate=0.1)
    assert accountant.history == []
    accountant = ExpMAccountant()
    accountant.step(noise_multiplier=1.0, sample_rate=0.1)
    with pytest.raises(ValueError, match="do not compose"):
        accountant.record(release(adjacency="replace_one"))
    assert accountant.releases == []


def test_equal_steps_are_merged_and_unequal_ones_kept():
    accountant, theirs = ExpMAccountant(), RDPAccountant()
    for noise_multiplier, sample_rate in [(1.0, 0.1)] * 3 + [(2.0, 0.1)] * 2 + [(2.0, 0.2), (1.0, 0.1)]:
        for one in (accountant, theirs):
            one.step(noise_multiplier=noise_multiplier, sample_rate=sample_rate)
    assert accountant.history == theirs.history == [(1.0, 0.1, 3), (2.0, 0.1, 2), (2.0, 0.2, 1), (1.0, 0.1, 1)]
    assert len(accountant) == 7


@pytest.mark.parametrize("delta", [-1e-9, 1.0, math.nan, "0", None, True])
def test_delta_is_checked(delta):
    with pytest.raises((TypeError, ValueError), match="delta"):
        ExpMAccountant().get_epsilon(delta)


def test_a_range_that_is_not_known_counts_as_infinite(tmp_path):
    """Drawn by μ with bought bounds: no pure ε is stated, by the ledger, its file or what was saved of it."""
    accountant = ExpMAccountant(ledger_path=tmp_path / "ledger.jsonl")
    accountant.record(release(0.05))
    assert accountant.get_epsilon() == 0.05
    accountant.record(release(epsilon_range=math.inf, mu=0.25, delta=1e-5))
    loaded = ExpMAccountant()
    loaded.load_state_dict(json.loads(json.dumps(accountant.state_dict(), allow_nan=False)))
    for ledger in (accountant, loaded, ExpMAccountant(ledger_path=tmp_path / "ledger.jsonl")):
        assert ledger.get_epsilon(0.0, return_method=True) == (math.inf, "no bound at this delta")
        mu = math.hypot(0.25, curves.bounded_range_mu(0.05))
        basic = 0.05 + curves.gaussian_epsilon(0.25, 1e-5)
        assert 0.9 * basic < ledger.get_epsilon(1e-5) <= min(basic, curves.gaussian_epsilon(mu, 1e-5))


def test_a_budget_counts_with_an_infinite_range():
    pure, approximate = ExpMAccountant(budget=(50.0, 0.0)), ExpMAccountant(budget=(1.0, 1e-5))
    drawn = release(epsilon_range=math.inf, mu=0.1, delta=1e-5)
    with pytest.raises(BudgetExceeded):
        pure.record(drawn)
    assert pure.remaining() == 50.0
    approximate.record(drawn)
    left = approximate.remaining()
    assert 0 < left < 1.0
    approximate.record(release(left))
    assert approximate.get_epsilon(1e-5) <= 1.0


def test_the_method_is_told_on_request():
    accountant = ExpMAccountant()
    assert accountant.get_epsilon(1e-5, return_method=True) == (0.0, "nothing released")
    accountant.record(release(2.0))
    assert accountant.get_epsilon(0.0, return_method=True) == (2.0, "pure")
    assert accountant.get_epsilon(1e-5, return_method=True) == (curves.bounded_range_epsilon(2.0, 1e-5), "exact")
    assert accountant.get_epsilon(1e-5) == curves.bounded_range_epsilon(2.0, 1e-5)
    accountant.step(noise_multiplier=1.0, sample_rate=0.1)
    assert accountant.get_epsilon(0.0, return_method=True)[0] == math.inf


# --- Calibrate, then account -----------------------------------------------------------------------------------------


@settings(max_examples=150)
@given(
    st.floats(0.01, 20.0),
    st.one_of(st.just(0.0), st.floats(1e-10, 1e-2)),
    st.floats(1e-3, 1e3),
    st.floats(0.0, 1e3),
    st.booleans(),
    st.sampled_from(["add_remove", "replace_one"]),
    st.floats(1e-3, 10.0),
    st.one_of(st.just(0.0), st.floats(1e-4, 10.0)),
    st.integers(1, 10**6),
)
def test_what_was_asked_for_is_what_is_spent(
    epsilon, delta, gradient, curvature, parallel, adjacency, radius, ridge, size
):
    sensitivity = Sensitivity(gradient, curvature, parallel, adjacency)
    calibrated = calibrate(
        sensitivity, epsilon=epsilon, delta=delta, radius=radius, regularization=ridge, nominal_size=size
    )
    accountant = ExpMAccountant(budget=(epsilon, delta))
    accountant.record(
        release(
            epsilon,
            epsilon_range=calibrated.epsilon_range,
            mu=calibrated.mu,
            adjacency=adjacency,
            delta=delta,
            calibration=calibrated.method,
            radius=radius,
            regularization=ridge,
            nominal_size=size,
            max_grad_norm=gradient,
            max_curvature=curvature,
        )
    )
    spent = accountant.get_epsilon(delta)
    assert spent <= epsilon
    assert spent == pytest.approx(epsilon, rel=1e-9)


# --- Opacus's contract -----------------------------------------------------------------------------------------------


def test_opacus_creates_it():
    accountant = create_accountant("expm")
    assert isinstance(accountant, ExpMAccountant)
    assert ExpMAccountant.mechanism() == accountant.mechanism() == "expm"


@pytest.mark.parametrize(("target", "delta", "rate", "steps"), [(2.0, 1e-5, 0.1, 20), (0.5, 1e-6, 1.0, 5)])
def test_noise_multiplier_reaches_the_target_on_the_private_side(target, delta, rate, steps):
    options = {"target_epsilon": target, "target_delta": delta, "sample_rate": rate, "steps": steps}
    noise_multiplier = get_noise_multiplier(accountant="expm", epsilon_tolerance=0.02, **options)
    accountant = ExpMAccountant()
    accountant.history = [(noise_multiplier, rate, steps)]
    assert target - 0.02 <= accountant.get_epsilon(delta) <= target
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the largest order
        theirs = get_noise_multiplier(accountant="rdp", epsilon_tolerance=0.02, **options)
    # The least of the bounds needs no more noise than one of them.
    assert noise_multiplier <= theirs * 1.01


def test_the_hook_charges_a_step():
    class Optimizer:
        noise_multiplier = 1.5
        accumulated_iterations = 2

    accountant = ExpMAccountant()
    hook = accountant.get_optimizer_hook_fn(sample_rate=0.125)
    hook(Optimizer)
    hook(Optimizer)
    assert accountant.history == [(1.5, 0.25, 2)]


# --- Saved states ----------------------------------------------------------------------------------------------------


@pytest.fixture
def busy():
    """A ledger with both kinds of events."""
    accountant = ExpMAccountant()
    accountant.record(release(0.5))
    accountant.record(release(3.0, mu=0.2, delta=1e-6))
    for _ in range(3):
        accountant.step(noise_multiplier=1.0, sample_rate=0.1)
    return accountant


def test_states_round_trip(busy):
    state = busy.state_dict()
    assert set(state) == {"history", "mechanism", "releases", "budget"}
    assert state["mechanism"] == "expm"
    assert state["budget"] is None
    there = ExpMAccountant()
    there.load_state_dict(state)
    assert held(there) == held(busy)
    assert there.get_epsilon(1e-5) == busy.get_epsilon(1e-5)
    # As plain text too, where tuples become lists.
    again = ExpMAccountant()
    again.load_state_dict(json.loads(json.dumps(state, allow_nan=False)))
    assert held(again) == held(busy)


def test_states_are_copies(busy):
    before = held(busy)
    state = busy.state_dict()
    there = ExpMAccountant()
    there.load_state_dict(state)
    state["history"].clear()
    state["releases"][0]["epsilon_range"] = 1e-9
    state["releases"].clear()
    assert held(busy) == held(there) == before


def test_states_fill_what_is_given(busy):
    destination = {"mine": 1}
    assert busy.state_dict(destination) is destination
    assert set(destination) == {"mine", "history", "mechanism", "releases", "budget"}


def test_loading_goes_on_with_what_is_there(busy):
    """Into an empty ledger, an earlier state of the same one, or the very same."""
    early = busy.state_dict()
    busy.step(noise_multiplier=1.0, sample_rate=0.1)
    middle = busy.state_dict()
    busy.step(noise_multiplier=2.0, sample_rate=0.1)
    busy.record(release(7.0))
    late = busy.state_dict()
    for states in ([late], [early, late], [early, middle, late, late]):
        there = ExpMAccountant()
        for state in states:
            there.load_state_dict(state)
        assert held(there) == held(busy)
    # Runs of one kind may be told in several.
    there = ExpMAccountant()
    there.load_state_dict(early)
    there.load_state_dict(late | {"history": [(1.0, 0.1, 2), (1.0, 0.1, 2), (2.0, 0.1, 1)]})
    assert len(there) == len(busy)


def _without(state, key, count):
    return state | {key: state[key][:count]}


LOSSES = {
    "nothing": lambda state: state | {"releases": [], "history": []},
    "no releases": lambda state: _without(state, "releases", 0),
    "one release less": lambda state: _without(state, "releases", 1),
    "another release": lambda state: state | {"releases": [state["releases"][0], release(9.0).to_dict()]},
    "another order": lambda state: state | {"releases": state["releases"][::-1]},
    "no steps": lambda state: _without(state, "history", 0),
    "one step less": lambda state: state | {"history": [(1.0, 0.1, 2)]},
    "quieter steps": lambda state: state | {"history": [(2.0, 0.1, 3)]},
    "steps of two kinds": lambda state: state | {"history": [(1.0, 0.1, 2), (9.0, 0.1, 1)]},
}


@pytest.mark.parametrize("loss", LOSSES)
def test_loading_never_makes_charges_disappear(busy, loss):
    """However much the saved ledger holds besides."""
    before, lost = held(busy), LOSSES[loss](dict(busy.state_dict()))
    more = {"releases": [*lost["releases"], release(7.0).to_dict()], "history": [*lost["history"], (9.0, 0.1, 5)]}
    for saved in (lost, lost | more):
        with pytest.raises(
            ValueError, match=r"make spent budget disappear\. Load it with a new engine or accountant; or"
        ):
            busy.load_state_dict(saved)
        assert held(busy) == before


def test_a_checkpoint_does_not_give_a_budget_back(tmp_path):
    """Neither an early checkpoint after a later release, nor one of another engine; the module stays as it is."""
    path, engine, model = tmp_path / "model.pt", ExpMQuadEngine(budget=(1.0, 0.0)), make_model()
    engine.save_checkpoint(path=path, module=model)
    private = engine.make_private_expm(model, make_loader(), 1.0, 0.5, 4, **GOOD)
    before = flat(private)
    other = ExpMQuadEngine()
    other.accountant.record(release(0.5))
    for saved in (engine, other):
        if saved is other:
            saved.save_checkpoint(path=path, module=model)
        with pytest.raises(ValueError, match=r"does not fit this module or ledger: .* make spent budget disappear"):
            engine.load_checkpoint(path=path, module=private)
        assert engine.remaining() == 0.0
        assert torch.equal(flat(private), before)
    engine.save_checkpoint(path=path, module=private)
    engine.load_checkpoint(path=path, module=model)
    assert torch.equal(flat(model), before)
    assert engine.remaining() == 0.0


@pytest.mark.parametrize("mechanism", ["rdp", "gdp", "prv"])
def test_states_of_others_are_refused(busy, mechanism):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the Gaussian accountant advises against itself
        other = create_accountant(mechanism)
    other.step(noise_multiplier=1.0, sample_rate=0.1)
    before = held(busy)
    with pytest.raises(ValueError, match=mechanism):
        busy.load_state_dict(other.state_dict())
    with pytest.raises(ValueError, match="expm"):
        other.load_state_dict(busy.state_dict())
    assert held(busy) == before


GOOD_STATE = {
    "mechanism": "expm",
    "history": [[1.0, 0.1, 3], [2.0, 0.5, 1]],
    "releases": [release(0.5).to_dict(), release(2.0, mu=0.5).to_dict()],
}


@pytest.mark.parametrize("missing", GOOD_STATE)
def test_states_with_a_part_missing_are_refused(busy, missing):
    """Without its releases a state would load as a ledger that spent less."""
    before = held(busy)
    with pytest.raises(ValueError, match=missing):
        busy.load_state_dict({key: value for key, value in GOOD_STATE.items() if key != missing})
    assert held(busy) == before


def test_states_that_mix_adjacencies_are_refused(busy):
    before = held(busy)
    replaced = release(adjacency="replace_one").to_dict()
    for mixed in (
        {**GOOD_STATE, "releases": [replaced]},
        {**GOOD_STATE, "history": [], "releases": [release().to_dict(), replaced]},
    ):
        with pytest.raises(ValueError, match="replace_one"):
            busy.load_state_dict(mixed)
        assert held(busy) == before
    empty = ExpMAccountant()
    empty.load_state_dict({**GOOD_STATE, "history": [], "releases": [replaced]})
    assert [r.adjacency for r in empty.releases] == ["replace_one"]


JUNK = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.sampled_from([10**400, -(10**400), 2**1024]),
        st.floats(),
        st.text(max_size=3),
        st.binary(max_size=3),
        st.complex_numbers(),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.tuples(inner, inner, inner),
        st.dictionaries(st.one_of(st.text(max_size=3), st.integers()), inner, max_size=3),
    ),
    max_leaves=6,
)


def places(value, path=()):
    """Paths to everything inside a state."""
    yield path
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield from places(value[key], (*path, key))


def replaced(state, path, junk):
    """A copy of the state with junk at the path."""
    if not path:
        return junk
    changed = copy.deepcopy(state)
    inner = changed
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = junk
    return changed


PLACES = list(places(GOOD_STATE))


@settings(max_examples=400)
@given(st.sampled_from(PLACES), JUNK)
def test_malformed_states_are_refused_and_change_nothing(path, junk):
    """Junk anywhere in a state: a ValueError and the old ledger, or, if the junk happens to be possible, a sound one."""
    accountant = ExpMAccountant()
    before = held(accountant)
    try:
        accountant.load_state_dict(replaced(GOOD_STATE, path, junk))
    except ValueError:
        assert held(accountant) == before
        return
    assert all(isinstance(r, Release) and 0 < min(r.epsilon_range, r.mu) < math.inf for r in accountant.releases)
    assert all(s > 0 and 0 < q <= 1 and n >= 1 and type(n) is int for s, q, n in accountant.history)
    again = ExpMAccountant()
    again.load_state_dict(accountant.state_dict())
    assert held(again) == held(accountant)


@pytest.mark.parametrize("path", PLACES, ids=lambda path: "/".join(map(str, path)) or "all")
def test_a_hole_anywhere_in_a_state_is_refused(path):
    """Nothing, where something was; only a μ or a range beside the other, and a seed (nothing random) may be absent."""
    accountant = ExpMAccountant()
    if path and (path[-1] in ("mu", "seed") or path == ("releases", 1, "epsilon_range")):
        accountant.load_state_dict(replaced(GOOD_STATE, path, None))
        assert len(accountant.releases) == 2
        return
    with pytest.raises(ValueError, match=r"\w"):
        accountant.load_state_dict(replaced(GOOD_STATE, path, None))
    assert len(accountant) == 0


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


# --- Plans -----------------------------------------------------------------------------------------------------------

DELTA = 1e-5
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


# --- Releases without a guarantee ------------------------------------------------------------------------------------


def test_a_release_without_a_guarantee_has_no_epsilon():
    accountant = ExpMAccountant()
    accountant.record(release(0.5))
    assert accountant.get_epsilon() == 0.5
    accountant.record(release(0.5, bounds="paper"))
    for delta in (0.0, 1e-5):
        with pytest.raises(NoGuarantee, match="not differentially private, and no epsilon can be stated"):
            accountant.get_epsilon(delta)
        with pytest.raises(NoGuarantee):
            accountant.get_epsilon(delta, return_method=True)
    # Nor after it was saved, and nor when more is charged.
    again = ExpMAccountant()
    again.load_state_dict(json.loads(json.dumps(accountant.state_dict())))
    again.record(release(0.5))
    with pytest.raises(NoGuarantee):
        again.get_epsilon()
    for bounds in ("given", "public", "bought"):
        fine = ExpMAccountant()
        fine.record(release(0.5, bounds=bounds))
        assert fine.get_epsilon() == 0.5


def test_a_budget_is_not_kept_without_a_guarantee(tmp_path):
    """Neither a release with the private data's own bounds, nor anything after one, can be within a budget."""
    accountant = ExpMAccountant(budget=(5.0, DELTA), ledger_path=tmp_path / "ledger")
    for refused in (accountant.record, accountant.check):
        with pytest.raises(NoGuarantee):
            refused(release(0.5, bounds="paper"))
    admission = accountant.admit([[PlannedEvent(0.5)]], 0.5, 0.0)
    with pytest.raises(NoGuarantee):
        accountant.record(release(0.5, bounds="paper"), admission=admission)
    assert len(accountant) == 0
    ExpMAccountant(ledger_path=tmp_path / "other").record(release(0.5, bounds="paper"))
    with pytest.warns(UserWarning, match="holds 1 charges already"):
        accountant = ExpMAccountant(budget=(5.0, DELTA), ledger_path=tmp_path / "other")
    for refused in (accountant.record, accountant.check):
        with pytest.raises(NoGuarantee):
            refused(release(0.5))
    with pytest.raises(NoGuarantee):
        accountant.step(noise_multiplier=10.0, sample_rate=0.01)
    with pytest.raises(NoGuarantee):
        accountant.remaining()
    with pytest.raises(NoGuarantee):
        accountant.admit([[PlannedEvent(0.5)]], 0.5, 0.0)
    assert len(accountant) == 1


PURCHASE = Purchase(0.1, "add_remove", "max_grad_norm", 0.8, 40, noise="given")


@pytest.mark.parametrize("event", [release(0.5, noise="given"), PURCHASE], ids=["release", "purchase"])
def test_given_noise_is_recorded_and_said(event, tmp_path):
    """ε is stated, with a warning every time; the file and a saved ledger say it too."""
    path = tmp_path / "ledger"
    accountant = ExpMAccountant(ledger_path=path)
    accountant.record(release(0.25))
    assert accountant.guaranteed
    assert accountant.get_epsilon() == 0.25
    accountant.record(event)
    saved = ExpMAccountant()
    saved.load_state_dict(json.loads(json.dumps(accountant.state_dict())))
    for ledger in (accountant, ExpMAccountant(ledger_path=path), saved):
        assert not ledger.guaranteed
        assert repr(ledger) == "ExpMAccountant(releases=2, dp_sgd_steps=0, not_guaranteed=1)"
        for _ in range(2):
            with pytest.warns(NotGuaranteed, match=r"^1 of 2 draws .* which is NOT guaranteed"):
                assert ledger.get_epsilon() == pytest.approx(0.25 + event.epsilon_range)
            with pytest.warns(NotGuaranteed):
                assert ledger.get_epsilon(1e-5, return_method=True)[0] > 0


def test_the_systems_noise_is_stated_without_a_warning():
    accountant = ExpMAccountant()
    accountant.record(release(0.25))
    accountant.record(release(0.25, sampler="secure"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert accountant.get_epsilon() == 0.5
    assert repr(accountant) == "ExpMAccountant(releases=2, dp_sgd_steps=0)"


@pytest.mark.parametrize("sampler", ["gibbs", "plainrejection", "custom", "Exact"])
def test_samplers_that_are_not_exact_have_no_epsilon(sampler):
    accountant = ExpMAccountant()
    accountant.record(release(0.5, sampler=sampler))
    assert not accountant.guaranteed
    with pytest.raises(NoGuarantee, match=rf"sampler='{sampler}' is not known to draw exactly"):
        accountant.get_epsilon()


@pytest.mark.parametrize(
    "event",
    [release(0.5, noise="given"), release(0.5, sampler="gibbs"), PURCHASE],
    ids=["noise", "sampler", "purchase"],
)
def test_a_budget_takes_no_draw_that_epsilon_does_not_cover(event, tmp_path):
    accountant = ExpMAccountant(budget=(5.0, DELTA), ledger_path=tmp_path / "ledger")
    for refused in (accountant.record, accountant.check):
        with pytest.raises(NoGuarantee):
            refused(event)
    assert len(accountant) == 0
    ExpMAccountant(ledger_path=tmp_path / "other").record(event)
    with pytest.warns(UserWarning, match="holds 1 charges already"):
        accountant = ExpMAccountant(budget=(5.0, DELTA), ledger_path=tmp_path / "other")
    with pytest.raises(NoGuarantee):
        accountant.record(release(0.5))
    with pytest.raises(NoGuarantee):
        accountant.remaining()
    assert len(accountant) == 1


@pytest.mark.parametrize("noise", ["seeded", "", None, 0])
def test_noise_of_any_other_kind_is_refused(noise):
    with pytest.raises(ValueError, match="noise must be one of"):
        release(0.5, noise=noise)
    with pytest.raises(ValueError, match="noise must be one of"):
        Purchase(0.1, "add_remove", "max_grad_norm", 0.8, 40, noise=noise)


# --- One ledger for Opacus and ExpM ----------------------------------------------------------------------------------

FEATURES, RECORDS = 3, 40


def make_model():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(FEATURES, 4), nn.Tanh(), nn.Linear(4, 1))


def make_loader():
    x = torch.randn(RECORDS, FEATURES, generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8)


def flat(module):
    return torch.cat([p.detach().flatten() for p in module.parameters()])


GOOD = {"criterion": nn.MSELoss(), "max_grad_norm": 1.0, "max_curvature": 1.0, "projection_seed": 0}


def train(accountant, noise_multiplier, epochs):
    """Opacus's training on a given ledger; yields the parameters after each step."""
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")  # Opacus's own
        torch.manual_seed(0)
        privacy = opacus.PrivacyEngine(accountant="expm")
        privacy.accountant = accountant
        model = make_model()
        module, optimizer, loader = privacy.make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data_loader=make_loader(),
            noise_multiplier=noise_multiplier,
            max_grad_norm=1.0,
        )
        for _ in range(epochs):
            for x, y in loader:
                optimizer.zero_grad()
                nn.functional.mse_loss(module(x), y).backward()
                try:
                    optimizer.step()
                finally:
                    yield flat(module)


def test_training_and_a_release_share_one_total():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Opacus's own
        accountant = opacus.PrivacyEngine(accountant="expm").accountant
    assert isinstance(accountant, ExpMAccountant)
    steps = len(list(train(accountant, noise_multiplier=1.0, epochs=1)))
    assert accountant.history == [(1.0, 1 / 5, steps)]
    trained = accountant.get_epsilon(1e-5)
    engine = ExpMQuadEngine(accountant=accountant)
    engine.make_private_expm(make_model(), make_loader(), 1.0, 0.5, 4, **GOOD)
    alone = curves.bounded_range_epsilon(1.0, 1e-5)
    together = accountant.get_epsilon(1e-5)
    assert engine.get_epsilon(1e-5) == together
    assert max(trained, alone) < together <= trained + 1.0
    assert len(accountant) == steps + 1


def test_a_budget_stops_training_before_the_parameters_move():
    accountant, seen = ExpMAccountant(budget=(4.0, 1e-5)), [flat(make_model())]
    with pytest.raises(BudgetExceeded, match="DP-SGD step"):
        seen.extend(train(accountant, noise_multiplier=2.0, epochs=40))
    taken = accountant.history[0][2]
    assert taken > 1
    assert accountant.history == [(2.0, 1 / 5, taken)]
    assert len(seen) == taken + 2  # the start, every step, and the one that was refused
    moved = [not torch.equal(a, b) for a, b in itertools.pairwise(seen)]
    assert moved == [True] * taken + [False]
    assert accountant.get_epsilon(1e-5) <= 4.0


class Untouchable(Dataset):
    """Private records that must not be read."""

    def __len__(self):
        return RECORDS

    def __getitem__(self, index):
        raise AssertionError("the private data was touched")


REFUSED = {
    "pure": ((2.0, 0.0), 1.0, {"epsilon": 1.5}),
    "alone": ((2.0, 0.0), None, {"epsilon": 2.1}),
    "delta": ((2.0, 1e-6), 1.0, {"epsilon": 1.9, "delta": 1e-6}),
    "gaussian": ((1.0, 1e-6), 0.5, {"epsilon": 1.0, "delta": 1e-6, "regularization": 100.0}),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_budget_is_refused_before_the_data_is_touched(name):
    budget, spent, asked = REFUSED[name]
    engine = ExpMQuadEngine(budget=budget)
    if spent is not None:
        engine.accountant.record(release(spent))
    before, remains = held(engine.accountant), engine.remaining()
    with pytest.raises(BudgetExceeded, match=f"epsilon={remains:g} still fits"):
        engine.make_private_expm(
            make_model(), DataLoader(Untouchable(), batch_size=8), radius=0.5, proj_dim=4, **asked, **GOOD
        )
    assert held(engine.accountant) == before


def test_the_papers_calibration_is_charged_what_it_costs():
    """Half of what it asks for, or less; a budget below that refuses it, and nothing is charged."""
    engine = ExpMQuadEngine(budget=(2.0, 0.0))
    asked = {"radius": 0.5, "proj_dim": 4, "calibration": "paper", **GOOD}
    with pytest.raises(BudgetExceeded, match="epsilon=2 still fits"):
        engine.make_private_expm(make_model(), make_loader(), 10.0, **asked)
    assert len(engine.accountant) == 0
    engine.make_private_expm(make_model(), make_loader(), 4.0, **asked)
    assert 0 < engine.get_epsilon() <= 2.0


@pytest.mark.parametrize(
    "asked",
    [
        {"epsilon": 1.0},
        {"epsilon": 1.0, "delta": 1e-6},
        {"epsilon": 1.0, "delta": 1e-6, "regularization": 100.0},
        {"epsilon": 2.0, "calibration": "paper"},
    ],
    ids=str,
)
def test_a_budget_of_what_is_asked_for_is_enough(asked):
    engine = ExpMQuadEngine(budget=(1.0, asked.get("delta", 0.0)))
    engine.make_private_expm(make_model(), make_loader(), radius=0.5, proj_dim=4, **asked, **GOOD)
    assert len(engine.accountant) == 1
    with pytest.raises(BudgetExceeded):
        engine.make_private_expm(
            make_model(), DataLoader(Untouchable(), batch_size=8), radius=0.5, proj_dim=4, epsilon=1.0, **GOOD
        )
    assert len(engine.accountant) == 1


# --- Checkpoints -----------------------------------------------------------------------------------------------------


@pytest.fixture
def engine():
    used = ExpMQuadEngine()
    used.private = used.make_private_expm(make_model(), make_loader(), 1.0, 0.5, 4, **GOOD)
    return used


@pytest.fixture
def path(tmp_path):
    return tmp_path / "checkpoint.pt"


def refused(path, match=None):
    """Loading fails with a ValueError, and neither the module nor the ledger has changed, which is empty and takes any."""
    other, module = ExpMQuadEngine(), make_model()
    before, ledger = flat(module), held(other.accountant)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch, about protocols
        with pytest.raises(ValueError, match=match):
            other.load_checkpoint(path=path, module=module)
    assert torch.equal(flat(module), before)
    assert held(other.accountant) == ledger


def test_checkpoints_round_trip(engine, path):
    engine.save_checkpoint(path=path, module=engine.private, checkpoint_dict={"epoch": 3})
    there, module = ExpMQuadEngine(), make_model()
    assert not torch.equal(flat(module), flat(engine.private))
    assert there.load_checkpoint(path=path, module=module) == {"epoch": 3}
    assert torch.equal(flat(module), flat(engine.private))
    assert held(there.accountant) == held(engine.accountant)
    assert there.get_epsilon() == 1.0


def test_checkpoints_hold_no_statistics(engine, path):
    """Weights under the module's own names, and the ledger's public facts; nothing else."""
    engine.save_checkpoint(path=path, module=engine.private)
    content = torch.load(path, weights_only=True)
    assert set(content) == {"module_state_dict", "privacy_accountant_state_dict"}
    assert set(content["module_state_dict"]) == set(make_model().state_dict())
    assert {k: v.shape for k, v in content["module_state_dict"].items()} == {
        k: v.shape for k, v in make_model().state_dict().items()
    }
    ledger = content["privacy_accountant_state_dict"]
    assert set(ledger) == {"history", "mechanism", "releases", "budget"}
    assert [set(facts) for facts in ledger["releases"]] == [set(FACTS)]
    assert all(value is None or isinstance(value, int | float | str) for value in ledger["releases"][0].values())


def test_statistics_are_not_saved_even_on_request(engine, path):
    statistics = engine.gather(make_model(), make_loader(), 4, **GOOD)
    with pytest.raises(TypeError, match="not pickled"):
        engine.save_checkpoint(path=path, module=engine.private, checkpoint_dict={"statistics": statistics})


def test_the_users_entries_cannot_replace_the_ledger(engine, path):
    forged = {"privacy_accountant_state_dict": ExpMAccountant().state_dict()}
    engine.save_checkpoint(path=path, module=engine.private, checkpoint_dict=forged)
    there = ExpMQuadEngine()
    there.load_checkpoint(path=path, module=make_model())
    assert there.get_epsilon() == 1.0


@pytest.mark.parametrize("module", [None, {}, "model"])
def test_checkpoints_are_of_modules(engine, path, module):
    for call in (engine.save_checkpoint, engine.load_checkpoint):
        with pytest.raises(TypeError, match=r"module must be a torch\.nn\.Module"):
            call(path=path, module=module)
    assert not path.exists()


class Payload:
    """Code that runs when it is unpickled: makes a directory."""

    def __init__(self, marker):
        self.marker = str(marker)

    def __reduce__(self):
        return os.mkdir, (self.marker,)


def test_code_in_a_file_is_not_run(engine, path, tmp_path):
    marker = tmp_path / "ran"
    good = {
        "module_state_dict": engine.private.state_dict(),
        "privacy_accountant_state_dict": engine.accountant.state_dict(),
    }
    for content in (good | {"extra": Payload(marker)}, good | {"module_state_dict": Payload(marker)}, Payload(marker)):
        torch.save(content, path)
        refused(path, "cannot be loaded safely|not a checkpoint")
        assert not marker.exists()
        path.write_bytes(pickle.dumps(content, protocol=2))
        refused(path)
        assert not marker.exists()
    # The payload is a live one.
    pickle.loads(path.read_bytes())
    assert marker.exists()


def test_truncated_files_are_refused(engine, path):
    engine.save_checkpoint(path=path, module=engine.private)
    whole = path.read_bytes()
    for cut in [*range(0, len(whole), 97), len(whole) - 1]:
        path.write_bytes(whole[:cut])
        refused(path)


FOREIGN = {
    "text": b"dear diary\n",
    "json": b'{"module_state_dict": {}}',
    "zeros": bytes(100),
    "zip": b"PK\x03\x04" + bytes(100),
    "pickle of a list": pickle.dumps([1, 2], protocol=2),
    "pickle, newest": pickle.dumps({"a": 1}, protocol=5),
    "opcodes": b"\x80\x02}q\x00(X\x01\x00",
    "unknown opcode": b"\x80\x02\xff.",
    "not unicode": b"\x80\x02X\x02\x00\x00\x00\xff\xfe.",
    "stack underflow": b"\x80\x02R.",
}


@pytest.mark.parametrize("name", FOREIGN)
def test_foreign_bytes_are_refused(path, name):
    path.write_bytes(FOREIGN[name])
    refused(path)


@settings(max_examples=100)
@given(st.binary(max_size=40), st.sampled_from([b"", b"\x80\x02", b"\x80\x02}(", b"PK\x03\x04"]))
def test_any_bytes_are_refused(tmp_path_factory, content, start):
    path = tmp_path_factory.getbasetemp() / "any.pt"
    path.write_bytes(start + content)
    refused(path)


def test_other_checkpoints_are_refused(engine, path):
    state, ledger = engine.private.state_dict(), engine.accountant.state_dict()
    elsewhere = RDPAccountant()
    elsewhere.step(noise_multiplier=1.0, sample_rate=0.1)
    for content in (
        state,
        torch.ones(3),
        [state, ledger],
        {"module_state_dict": state},
        {"privacy_accountant_state_dict": ledger},
        {"module_state_dict": None, "privacy_accountant_state_dict": ledger},
        {"module_state_dict": state, "privacy_accountant_state_dict": []},
    ):
        torch.save(content, path)
        refused(path, "needs module_state_dict and privacy_accountant_state_dict")
    torch.save({"module_state_dict": state, "privacy_accountant_state_dict": elsewhere.state_dict()}, path)
    refused(path, "rdp")


BROKEN_LEDGERS = {
    "nothing": {},
    "no releases": {"mechanism": "expm", "history": []},
    "number": {"mechanism": "expm", "history": [], "releases": 5},
    "history of text": {"mechanism": "expm", "history": [("a", "b", "c")], "releases": []},
    "history of nothing": {"mechanism": "expm", "history": None, "releases": []},
    "free release": {"mechanism": "expm", "history": [], "releases": [FACTS | {"epsilon_range": 0.0}]},
    "huge release": {"mechanism": "expm", "history": [], "releases": [FACTS | {"epsilon_range": 10**400}]},
    "huge noise": {"mechanism": "expm", "history": [(10**400, 0.1, 1)], "releases": []},
}


@pytest.mark.parametrize("name", BROKEN_LEDGERS)
def test_a_broken_ledger_leaves_the_module_alone(engine, path, name):
    torch.save(
        {"module_state_dict": engine.private.state_dict(), "privacy_accountant_state_dict": BROKEN_LEDGERS[name]}, path
    )
    refused(path)


def _changed(change):
    state = make_model().double().state_dict()
    change(state)
    return dict(state)


BROKEN_WEIGHTS = {
    "nothing": {},
    "one missing": _changed(lambda s: s.pop("2.bias")),
    "one more": _changed(lambda s: s.update(surprise=torch.ones(1))),
    "wrong shape": _changed(lambda s: s.update({"2.bias": torch.ones(7)})),
    "no tensor": _changed(lambda s: s.update({"2.bias": "weights"})),
    "number for a name": _changed(lambda s: s.update({3: torch.ones(1)})),
    "wrong last": _changed(lambda s: s.update({"0.weight": torch.zeros(4, FEATURES), "2.bias": None})),
}


@pytest.mark.parametrize("name", BROKEN_WEIGHTS)
def test_broken_weights_leave_everything_alone(engine, path, name):
    torch.save(
        {
            "module_state_dict": BROKEN_WEIGHTS[name],
            "privacy_accountant_state_dict": engine.accountant.state_dict(),
        },
        path,
    )
    refused(path)


def test_a_missing_file_is_missing(path):
    with pytest.raises(FileNotFoundError):
        ExpMQuadEngine().load_checkpoint(path=path, module=make_model())
