"""What a ledger holds: saved and loaded without losing a charge, and refused where anything in it is impossible."""

import copy
import json
import math
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ledger_cases import GOOD, flat, held, make_loader, make_model, release
from opacus.accountants import create_accountant

from opacus_expm import ExpMAccountant, ExpMQuadEngine, Release


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
    with pytest.warns(UserWarning, match="does not have the weights of a release"):
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
