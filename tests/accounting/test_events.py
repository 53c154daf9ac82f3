"""Events: what their facts may be, and that they are read back as they were written, also by later versions."""

import dataclasses
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ledger_cases import FACTS, release

from opacus_expm import Release

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
