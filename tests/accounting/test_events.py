"""Events: what their facts may be, and that they are read back as they were written, also by later versions."""

import dataclasses
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ledger_cases import FACTS, release

from opacus_expm import BudgetExceeded, ExpMAccountant, NoGuarantee, NotGuaranteed, Purchase, Release
from opacus_expm.accounting import events
from opacus_expm.accounting.events import event_from_dict
from opacus_expm.accounting.ledger import LedgerError, LedgerFile

# --- One release -----------------------------------------------------------------------------------------------------

BAD = {
    "epsilon_range": [0.0, -1.0, math.nan, True, "1", None, 1j, 10**400],
    "mu": [0.0, -1.0, math.nan, True, "1", None, 1j, 10**400],
    "adjacency": ["bounded", "", None, 3],
    "failure_probability": [-1e-9, 1.0, math.nan, "0", None, False],
}


@pytest.mark.parametrize(
    ("field", "value"), [(f, v) for f, values in BAD.items() for v in values], ids=lambda v: str(v)[:9]
)
def test_a_release_has_a_cost(field, value):
    with pytest.raises((TypeError, ValueError), match=field):
        Release(**(FACTS | {field: value}))


def test_one_of_the_two_costs_is_finite():
    with pytest.raises(ValueError, match="epsilon_range or mu must be finite"):
        Release(**FACTS | {"epsilon_range": math.inf, "mu": math.inf})
    with pytest.raises(ValueError, match="epsilon_range or mu must be finite"):
        Release.from_dict(FACTS | {"epsilon_range": None, "mu": None})


IMPOSSIBLE = {
    "epsilon": [0.0, math.nan, "1"],
    "delta": [-0.1, 1.0, None],
    "radius": [0.0, math.inf, "1"],
    "regularization": [-1.0, math.nan],
    "nominal_size": [0, 1.5],
    "max_grad_norm": [0.0, -1.0],
    "max_curvature": [-1.0, math.inf],
    "proj_dim": [0, "5"],
    "calibration": [None, 3],
    "projection": [None, 3],
    "sampler": [None, 3],
    "seed": [-1, "0", 0.5],
    "bounds": ["private", "", None],
    "clipping": ["flat", "", None],
    "round": [0, -1, 1.5, True],
    "rounds": [0, -1, "3", None],
}


@pytest.mark.parametrize(("field", "value"), [(f, v) for f, values in IMPOSSIBLE.items() for v in values])
def test_facts_that_no_release_can_have_are_refused(field, value):
    """A ledger is read by people: what it says about a release must at least be possible."""
    with pytest.raises(ValueError, match=field):
        Release.from_dict(FACTS | {field: value})


def test_a_release_is_immutable():
    with pytest.raises(dataclasses.FrozenInstanceError):
        release().epsilon_range = 0.1


COSTS = st.one_of(st.just(math.inf), st.floats(1e-9, 1e9))


@given(
    st.tuples(COSTS, COSTS).filter(lambda costs: min(costs) < math.inf),
    st.sampled_from(["add_remove", "replace_one"]),
    st.floats(0, 0.99),
    st.one_of(st.none(), st.integers(0, 2**63)),
)
def test_dictionaries_round_trip(costs, adjacency, failure, seed):
    epsilon_range, mu = costs
    changes = {"epsilon_range": epsilon_range, "mu": mu, "adjacency": adjacency, "seed": seed}
    there = release(**changes, failure_probability=failure)
    facts = there.to_dict()
    assert set(facts) == {f.name for f in dataclasses.fields(Release)} == set(FACTS)
    assert Release.from_dict(facts) == there
    assert Release.from_dict(json.loads(json.dumps(facts, allow_nan=False))) == there
    assert (facts["mu"] is None) == math.isinf(mu)
    assert (facts["epsilon_range"] is None) == math.isinf(epsilon_range)


@pytest.mark.parametrize("field", sorted(set(FACTS) - {"noise"}))
def test_dictionaries_with_too_little_are_refused(field):
    with pytest.raises(ValueError, match="exactly the fields"):
        Release.from_dict({name: value for name, value in FACTS.items() if name != field})


@pytest.mark.parametrize(
    "facts", [FACTS | {"gradient": [1.0]}, {}, None, [], "release", 3, [("epsilon", 1.0)]], ids=str
)
def test_dictionaries_with_anything_else_are_refused(facts):
    with pytest.raises(ValueError, match="exactly the fields"):
        Release.from_dict(facts)


@pytest.mark.parametrize("clipping", ["separate", "joint"])
def test_releases_are_read_that_say_how_they_were_clipped(clipping):
    """Earlier versions wrote it down. The cost is in the range and in μ, whichever way it was."""
    assert Release.from_dict(FACTS | {"clipping": clipping}) == Release.from_dict(FACTS)
    assert "clipping" not in Release.from_dict(FACTS | {"clipping": clipping}).to_dict()


# --- Kinds of events -------------------------------------------------------------------------------------------------


def purchase(**changes):
    return Purchase(**{**BOUGHT, **changes})


BOUGHT = {
    "epsilon_range": 0.1,
    "adjacency": "add_remove",
    "bound": "max_curvature",
    "quantile": 0.8,
    "nominal_size": 40,
}


@pytest.mark.parametrize(
    "event", [release(0.5), release(mu=0.5), purchase(), purchase(receipt="a", noise="given")], ids=str
)
def test_events_of_every_kind_are_read_back(event):
    facts = json.loads(json.dumps(event.to_dict(), allow_nan=False))
    assert "kind" not in facts, "readers of earlier versions know no kinds"
    assert event_from_dict(facts) == event
    assert event_from_dict(facts | {"kind": event.kind}) == event
    assert events.KINDS[event.kind] is type(event)


@pytest.mark.parametrize("missing", sorted(BOUGHT))
def test_purchases_with_too_little_are_refused(missing):
    with pytest.raises(ValueError, match="exactly the fields"):
        event_from_dict({name: fact for name, fact in BOUGHT.items() if name != missing})


@pytest.mark.parametrize("kind", ["choice", "", "Release", None, 3, [], {}], ids=str)
def test_a_kind_that_is_not_known_is_refused(kind, tmp_path):
    """A later version may have written it: what is not understood must not be left out of a total."""
    with pytest.raises(ValueError, match=r"kind must be one of .*; a newer version"):
        event_from_dict(FACTS | {"kind": kind})
    file = LedgerFile(tmp_path / "ledger.jsonl")
    assert file.entries() == []
    file.append({"release": {"kind": kind, "epsilon_range": 1.0}})
    with pytest.raises(LedgerError, match="a newer version"):
        ExpMAccountant(ledger_path=file.path)


@pytest.mark.parametrize(("kind", "facts"), [("release", BOUGHT), ("purchase", FACTS)])
def test_facts_of_another_kind_are_refused(kind, facts):
    with pytest.raises(ValueError, match=f"a {kind} has exactly the fields"):
        event_from_dict(facts | {"kind": kind})


@dataclasses.dataclass(frozen=True)
class Choice:
    """A kind of event that the package does not have: one of a few things, chosen by the exponential mechanism."""

    epsilon_range: float
    mu: float = math.inf
    adjacency: str = "add_remove"
    noise: str = "system"

    kind = "choice"
    failure_probability = 0.0
    delta = 0.0
    flaw = None
    runs = ()

    @property
    def epsilon(self):
        return self.epsilon_range

    epsilon_pure = epsilon

    def to_dict(self):
        return {
            "kind": self.kind,
            "epsilon_range": self.epsilon_range,
            "adjacency": self.adjacency,
            "noise": self.noise,
        }

    @classmethod
    def from_dict(cls, facts):
        return cls(**facts)


def test_a_new_kind_needs_nothing_but_its_name(tmp_path, monkeypatch):
    """It is charged, written, read back, saved, counted and refused like the others."""
    with pytest.raises(TypeError, match="must be a Release or a Purchase or a Query, got Choice"):
        ExpMAccountant().record(Choice(0.5))
    monkeypatch.setitem(events.KINDS, "choice", Choice)
    path, budget = tmp_path / "ledger.jsonl", (1.0, 0.0)
    accountant = ExpMAccountant(budget=budget, ledger_path=path)
    accountant.record(release(0.25))
    accountant.record(Choice(0.5))
    loaded = ExpMAccountant()
    loaded.load_state_dict(json.loads(json.dumps(accountant.state_dict(), allow_nan=False)))
    for ledger in (accountant, ExpMAccountant(ledger_path=path), loaded):
        assert ledger.releases == [release(0.25), Choice(0.5)]
        assert (ledger.get_epsilon(), ledger.remaining(), ledger.guaranteed) == (0.75, 0.25, True)
        with pytest.raises(BudgetExceeded):
            ledger.record(Choice(0.26))
        with pytest.raises(ValueError, match="do not compose"):
            ledger.record(Choice(0.25, adjacency="replace_one"))
        with pytest.raises(NoGuarantee, match="noise_generator"):
            ledger.record(Choice(0.25, noise="given"))
        assert len(ledger) == 2
    other = ExpMAccountant()
    other.record(Choice(0.25, noise="given"))
    with pytest.warns(NotGuaranteed):
        other.get_epsilon()
