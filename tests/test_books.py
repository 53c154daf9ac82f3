"""The books: what a release costs, that it is charged before it is drawn, and what the record says of it."""

import dataclasses

import numpy as np
import pytest
import torch
from small_problem import GOOD, PARAMETERS, RECORDS, Counted, flat, gathered, make_loader, make_model
from torch.utils.data import DataLoader

from opacus_expm import BudgetExceeded, ExpMAccountant, ExpMQuadEngine, Release, Sparse, Statistics


@pytest.mark.parametrize("regularization", [0.0, 2.0])
@pytest.mark.parametrize("epsilon", [1e-3, 0.1, 1 / 3, 1.0, 3.7, 50.0])
def test_pure_budget_is_spent_exactly(epsilon, regularization):
    used = ExpMQuadEngine()
    used.release(gathered(), epsilon, 0.5, regularization=regularization)
    assert used.get_epsilon(0.0) == epsilon
    assert used.get_epsilon() == epsilon


@pytest.mark.parametrize(("regularization", "method"), [(0.0, "range"), (100.0, "gaussian")])
@pytest.mark.parametrize("delta", [1e-8, 1e-5, 1e-2])
@pytest.mark.parametrize("epsilon", [0.1, 1.0, 5.0])
def test_approximate_budget_is_spent_on_the_private_side(epsilon, delta, regularization, method):
    used = ExpMQuadEngine()
    used.release(gathered(), epsilon, 0.5, delta=delta, regularization=regularization)
    assert used.accountant.releases[0].calibration == method
    assert epsilon - 1e-6 <= used.get_epsilon(delta) <= epsilon


def test_delta_allows_more_than_the_pure_budget():
    used = ExpMQuadEngine()
    used.release(gathered(), 1.0, 0.5, delta=1e-5)
    assert used.get_epsilon(0.0) > 1.0


@pytest.mark.parametrize("first", ["add_remove", "replace_one"])
def test_adjacency_is_recorded_and_not_mixed(first):
    other = {"add_remove": "replace_one", "replace_one": "add_remove"}[first]
    ledger, statistics = ExpMAccountant(), gathered()
    ExpMQuadEngine(accountant=ledger, adjacency=first).release(statistics, 1.0, 0.5)
    assert ledger.releases[0].adjacency == first
    used, records = ExpMQuadEngine(accountant=ledger, adjacency=other), Counted()
    loader = DataLoader(records, batch_size=16)
    with pytest.raises(ValueError, match=f"adjacency='{other}' cannot be added to a ledger that counts '{first}'"):
        used.make_private_expm(make_model(torch.float64), loader, 1.0, 0.5, 5, **GOOD)
    with pytest.raises(ValueError, match=f"adjacency='{other}' cannot be added to a ledger that counts '{first}'"):
        used.gather(make_model(torch.float64), loader, 5, criterion=GOOD["criterion"], epsilon=1.0)
    assert records.reads == 0  # refused before the pass
    with pytest.raises(ValueError, match="use a ledger"):
        used.release(statistics, 1.0, 0.5)
    assert used.get_epsilon() == 1.0


def test_replacing_needs_twice_the_budget():
    """The same density, hence the same draw, at 2ε under replace-one as at ε under add/remove."""
    statistics = gathered()
    draws = [
        ExpMQuadEngine(adjacency=adjacency, noise_generator=np.random.default_rng(0)).release(statistics, epsilon, 0.5)
        for epsilon, adjacency in ((1.0, "add_remove"), (2.0, "replace_one"), (1.0, "replace_one"))
    ]
    torch.testing.assert_close(flat(draws[0]), flat(draws[1]), rtol=0, atol=1e-9)
    assert float(torch.linalg.vector_norm(flat(draws[0]) - flat(draws[2]))) > 1e-3


PUBLIC_FIELDS = {
    "noise",
    "epsilon_range",
    "mu",
    "adjacency",
    "epsilon",
    "delta",
    "calibration",
    "radius",
    "regularization",
    "nominal_size",
    "max_grad_norm",
    "max_curvature",
    "projection",
    "proj_dim",
    "seed",
    "sampler",
    "failure_probability",
    "bounds",
    "round",
    "rounds",
}


def test_a_release_record_holds_public_facts_only():
    """The same record for two data sets of one size, and no field beyond those that are known to be public."""
    recorded = []
    for seed in (0, 1):
        used = ExpMQuadEngine()
        statistics = gathered(loader=make_loader(torch.float64, seed=seed), projection=Sparse(seed=9))
        used.release(statistics, 1.0, 0.5, delta=1e-6, regularization=2.0)
        recorded.append(used.accountant.releases[0])
    assert recorded[0] == recorded[1]
    assert set(dataclasses.asdict(recorded[0])) == {f.name for f in dataclasses.fields(Release)} == PUBLIC_FIELDS
    found = recorded[0]
    assert (found.epsilon, found.delta, found.radius, found.regularization) == (1.0, 1e-6, 0.5, 2.0)
    assert (found.nominal_size, found.max_grad_norm, found.max_curvature) == (RECORDS, 1.0, 1.0)
    assert (found.projection, found.proj_dim, found.seed) == ("sparse", 5, 9)
    assert (found.sampler, found.failure_probability, found.noise) == ("exact", 0.0, "system")
    assert (found.bounds, found.round, found.rounds) == ("given", 1, 1)


def test_the_full_space_has_no_seed():
    used = ExpMQuadEngine()
    used.release(gathered(proj_dim=None), 1.0, 0.5)
    found = used.accountant.releases[0]
    assert (found.projection, found.proj_dim, found.seed) == ("full", PARAMETERS, None)


# --- Charged before it is drawn --------------------------------------------------------------------------------------


class Broken(np.random.Generator):
    """A generator that fails in the middle of a draw."""

    def standard_normal(self, *arguments, **options):
        raise KeyboardInterrupt

    random = normal = uniform = standard_normal


def test_ledger_is_charged_before_the_draw():
    used, statistics = ExpMQuadEngine(noise_generator=Broken(np.random.PCG64(0))), gathered()
    with pytest.raises(KeyboardInterrupt):
        used.release(statistics, 1.5, 0.5)
    assert [r.epsilon for r in used.accountant.releases] == [1.5]
    assert used.get_epsilon() == 1.5


def test_ledger_is_charged_before_the_model_is_built(monkeypatch):
    seen, used, statistics = [], ExpMQuadEngine(), gathered()
    build = Statistics.module_at

    def watched(self, coordinates):
        seen.append(len(used.accountant.releases))
        return build(self, coordinates)

    monkeypatch.setattr(Statistics, "module_at", watched)
    used.release(statistics, 1.0, 0.5)
    assert seen == [1]


# --- The object ------------------------------------------------------------------------------------------------------


def event_of(used):
    """A release as the engine records it."""
    other = ExpMQuadEngine()
    other.release(gathered(), 1.0, 0.5)
    return dataclasses.replace(other.accountant.releases[0], adjacency=used.adjacency)


def test_what_is_drawn_is_charged_first():
    used = ExpMQuadEngine()
    books, like = used.books(), torch.zeros(2, dtype=torch.float64)

    def draw():
        assert len(used.accountant.releases) == 1
        return torch.ones(2, dtype=torch.float64)

    assert books.drawn(event_of(used), None, draw, like).tolist() == [1.0, 1.0]
    assert used.get_epsilon() == 1.0


def test_what_the_ledger_refuses_is_not_drawn():
    used = ExpMQuadEngine(budget=(0.5, 0.0))

    def draw():
        raise AssertionError("drawn without a charge")

    with pytest.raises(BudgetExceeded):
        used.books().drawn(event_of(used), None, draw, torch.zeros(1))
    assert len(used.accountant) == 0


@pytest.mark.parametrize(
    ("adjacency", "generator", "error"),
    [("replace_one", None, "cannot be added to a ledger"), ("add_remove", np.random.default_rng(0), "with a budget")],
)
def test_books_refuse_what_the_ledger_cannot_count(adjacency, generator, error):
    ledger = ExpMAccountant(budget=(5.0, 0.0))
    ExpMQuadEngine(accountant=ledger).release(gathered(), 1.0, 0.5)
    used = ExpMQuadEngine(accountant=ledger, adjacency=adjacency, noise_generator=generator)
    with pytest.raises(ValueError, match=error):
        used.books().check()
    ExpMQuadEngine(accountant=ledger).books().check()
