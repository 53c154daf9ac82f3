"""The ledger in memory: what it accepts, what it refuses, and that it agrees with calibration and with Opacus."""

import itertools
import json
import math
import warnings

import opacus
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ledger_cases import DELTA, FACTS, GOOD, RECORDS, flat, held, make_loader, make_model, release
from opacus.accountants import RDPAccountant, create_accountant
from opacus.accountants.utils import get_noise_multiplier
from torch import nn
from torch.utils.data import DataLoader, Dataset

from opacus_expm import BudgetExceeded, ExpMAccountant, ExpMQuadEngine, NoGuarantee, NotGuaranteed, Purchase, paper
from opacus_expm.accounting.events import PlannedEvent
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
        held = "releases=1, purchases=1" if event is PURCHASE else "releases=2"
        assert repr(ledger) == f"ExpMAccountant({held}, dp_sgd_steps=0, not_guaranteed=1)"
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
    statistics = engine.gather(make_model(), make_loader(), 4, **GOOD)
    with pytest.raises(BudgetExceeded, match="epsilon=2 still fits"):
        paper.release(engine.books(), statistics, 10.0, 0.5)
    assert len(engine.accountant) == 0
    paper.release(engine.books(), statistics, 4.0, 0.5)
    assert 0 < engine.get_epsilon() <= 2.0


@pytest.mark.parametrize(
    "asked",
    [
        {"epsilon": 1.0},
        {"epsilon": 1.0, "delta": 1e-6},
        {"epsilon": 1.0, "delta": 1e-6, "regularization": 100.0},
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
