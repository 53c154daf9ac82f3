"""Bought bounds: bounded range by enumeration, failure probability, what is charged and what is left for the draw."""

import dataclasses
import math
import warnings

import numpy as np
import pytest
import quick
import torch
from hypothesis import given
from hypothesis import strategies as st
from small_problem import gathered, make_loader, make_model, make_tensors
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from opacus_expm import BudgetExceeded, ExpMQuadEngine, Purchase, Release, Sparse, Stiefel, rounds
from opacus_expm import bounds as bounds_module
from opacus_expm.accounting import composition
from opacus_expm.bounds import QUANTILES, Bounds
from opacus_expm.gathering import passes
from opacus_expm.gathering.clipping import ClippingBounds
from opacus_expm.mechanism import quantiles as bounds
from opacus_expm.mechanism.quantiles import GRID


def quantile_epsilon(epsilon, size, quantile):
    """The price of the bound that is bought at this quantile."""
    (name,) = [name for name, used in QUANTILES.items() if used == quantile]
    return Bounds().prices(epsilon, size)[name]


def test_price():
    needed = 2 * (math.log(401) + 5) / (20_000 * 0.2)
    assert quantile_epsilon(1.0, 20_000, 0.8) == pytest.approx(2 * needed)
    assert quantile_epsilon(0.15, 20_000, 0.8) == pytest.approx(0.05 * 0.15)
    assert quantile_epsilon(0.01, 1000, 0.8) == pytest.approx(0.0005)
    bounds_module._warn_if_unreliable(1.001 * needed, 20_000, 0.8)  # reliable: silent, or the test would fail
    with pytest.warns(UserWarning, match=r"may come out far from its quantile .* pass max_grad_norm="):
        bounds_module._warn_if_unreliable(0.9 * needed, 20_000, 0.8)


# --- as they are asked for ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "missing", "curvature"),
    [
        (Bounds(), ("max_grad_norm", "max_curvature"), True),
        (Bounds(1.0), ("max_curvature",), True),
        (Bounds(None, 2.0), ("max_grad_norm",), True),
        (Bounds(None, 0.0), ("max_grad_norm",), False),
        (Bounds(1.0, 2.0), (), True),
        (Bounds(1.0, 0), (), False),
    ],
)
def test_what_is_missing_is_named_and_priced(asked, missing, curvature):
    assert asked.missing == missing
    assert asked.curvature is curvature
    assert tuple(asked.prices(1.0, 3000)) == missing
    if missing:
        with pytest.raises(ValueError, match=f"{missing[0]} is not given: pass max_grad_norm= and max_curvature="):
            asked.given()
    else:
        assert asked.given() == ClippingBounds(asked.max_grad_norm, asked.max_curvature, "given")


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf, "1", True])
def test_bounds_are_checked_once(value):
    with pytest.raises((TypeError, ValueError), match="max_grad_norm must be"):
        Bounds(value)
    if value != 0.0:
        with pytest.raises((TypeError, ValueError), match="max_curvature must be"):
            Bounds(1.0, value)


@given(st.floats(1e-6, 100.0), st.integers(1, 10**7))
def test_a_price_is_a_twentieth_of_the_budget_at_the_most(epsilon, size):
    """A function of public numbers alone; never more than what twice reliability needs."""
    prices = Bounds().prices(epsilon, size)
    for name, price in prices.items():
        assert 0 < price <= 0.05 * epsilon
        assert price <= 2 * bounds.reliable_epsilon(size, QUANTILES[name]) * (1 + 1e-12)


# --- through the engine ---------------------------------------------------------------------------------------------


def _task(n=3000):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, 3, generator=generator)
    y = x.sum(1, keepdim=True) + 0.1 * torch.randn(n, 1, generator=generator)
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)), TensorDataset(x, y)


def _loader(dataset):
    return DataLoader(dataset, batch_size=500)


@pytest.mark.parametrize("secure", [False, True])
def test_five_arguments_are_enough(secure):
    model, dataset = _task()
    engine = ExpMQuadEngine(secure_mode=secure)
    with pytest.warns(UserWarning, match="criterion=None"):
        private = engine.make_private_expm(model, _loader(dataset), 2.0, 0.3, 5)
    assert type(private) is type(model)
    kinds = [type(event) for event in engine.accountant.releases]
    assert kinds[:2] == [Purchase, Purchase]
    assert len(kinds) == 3
    draw = engine.accountant.releases[2]
    assert draw.max_grad_norm in GRID
    assert draw.max_curvature in GRID
    if secure:
        assert engine.get_epsilon(0.0) == math.inf
        assert 1.9 < engine.get_epsilon(1e-9) <= 2.0
    else:
        assert engine.get_epsilon(0.0) == pytest.approx(2.0, rel=1e-15)


def closed_total(events, delta):
    """The total without numerical composition: slower to compute than it is worth here, and the rest is no less."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(composition, "_prv_epsilon", lambda *_: math.inf)
        return composition.total_epsilon(events, [], delta).epsilon


@given(
    st.floats(1e-3, 50.0),
    st.sampled_from([0.0, 1e-6, 1e-3]),
    st.sampled_from(["add_remove", "replace_one"]),
    st.sampled_from([0.0, 1.0, None]),
)
def test_the_total_is_what_was_asked_for(epsilon, delta, adjacency, regularization):
    model, dataset = _task(40)
    engine = ExpMQuadEngine(adjacency=adjacency)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        engine.make_private_expm(
            model,
            _loader(dataset),
            epsilon,
            0.3,
            3,
            delta=delta,
            regularization=regularization,
            criterion=nn.MSELoss(),
        )
    events = engine.accountant.releases
    pure = math.fsum(event.epsilon_range for event in events)
    if delta == 0:
        assert pure <= epsilon
        assert pure == pytest.approx(epsilon, rel=1e-12)
    assert closed_total(events, delta) <= epsilon * (1 + 1e-12)


@pytest.mark.parametrize("missing", ["max_grad_norm", "max_curvature"])
def test_only_what_is_missing_is_bought(missing):
    model, dataset = _task()
    engine = ExpMQuadEngine()
    given = {"max_grad_norm": 1.0, "max_curvature": 1.0, missing: None}
    engine.make_private_expm(model, _loader(dataset), 1.0, 0.3, 5, criterion=nn.MSELoss(), **given)
    purchase, draw = engine.accountant.releases
    assert purchase.bound == missing
    assert purchase.quantile == QUANTILES[missing]
    assert draw.epsilon == 1.0  # what was asked for; what is left of it is spent on the draw
    assert draw.epsilon_range == pytest.approx(1.0 - purchase.epsilon_range, rel=1e-15)
    assert draw.bounds == "bought"


@pytest.mark.parametrize("rounds", quick.only([1], [1, 2]))
@pytest.mark.parametrize("adjacency", ["add_remove", "replace_one"])
@pytest.mark.parametrize(
    ("calibration", "delta", "regularization"),
    [("range", 0.0, 1.0), ("range", 1e-5, 0.0), ("gaussian", 1e-5, 100.0)],
)
def test_charges_do_not_depend_on_what_was_bought(calibration, delta, regularization, adjacency, rounds):
    """A cost that followed from the bound that happened to come out would bound nothing where another one comes out."""
    model, dataset = _task()
    bought, charged, pure = set(), set(), set()
    for seed in range(4):
        engine = ExpMQuadEngine(adjacency=adjacency, noise_generator=np.random.default_rng(seed))
        engine.make_private_expm(
            *(model, _loader(dataset), 1.0, 0.3, 5),
            delta=delta,
            rounds=rounds,
            regularization=regularization,
            criterion=nn.MSELoss(),
        )
        draws = [event for event in engine.accountant.releases if isinstance(event, Release)]
        assert {draw.calibration for draw in draws} == {calibration}
        bought |= {(draw.max_grad_norm, draw.max_curvature) for draw in draws}
        charged |= {(draw.epsilon_range, draw.mu) for draw in draws}
        pure.add(engine.get_epsilon(0.0))
        assert engine.get_epsilon(delta) <= 1.0
    assert len(bought) > 1
    assert len(charged) == len(pure) == 1
    assert math.isinf(pure.pop()) == (calibration == "gaussian")


def test_gradient_only_needs_one_bound():
    model, dataset = _task()
    engine = ExpMQuadEngine()
    engine.make_private_expm(
        model, _loader(dataset), 1.0, 0.3, 5, criterion=nn.MSELoss(), max_curvature=0.0, regularization=1.0
    )
    assert [type(e) for e in engine.accountant.releases][:1] == [Purchase]
    assert len(engine.accountant.releases) == 2


def test_remembered_rows_and_a_second_pass_give_the_same(monkeypatch):
    model, dataset = _task()
    options = {"criterion": nn.MSELoss(), "projection": Sparse(seed=0), "epsilon": 5.0}
    found = []
    for memory in (2**30, 0):
        monkeypatch.setattr(passes, "CACHE_BYTES", memory)
        engine = ExpMQuadEngine(noise_generator=np.random.default_rng(7))
        found.append(engine.gather(model, _loader(dataset), 5, **options).sums)
    assert found[0].max_grad_norm == found[1].max_grad_norm
    torch.testing.assert_close(found[0].gradient, found[1].gradient, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found[0].curvature, found[1].curvature, rtol=1e-6, atol=1e-6)


def test_the_private_data_is_read_once_while_it_fits(monkeypatch):
    class Counted(TensorDataset):
        reads = 0

        def __getitem__(self, index):
            Counted.reads += 1
            return super().__getitem__(index)

    model, dataset = _task(1000)
    counted = Counted(*dataset.tensors)
    for memory, times in ((2**30, 1), (0, 2)):
        monkeypatch.setattr(passes, "CACHE_BYTES", memory)
        Counted.reads = 0
        ExpMQuadEngine().gather(model, _loader(counted), 5, criterion=nn.MSELoss(), epsilon=10.0)
        assert Counted.reads == times * 1000


def test_a_purchase_is_charged_before_it_is_drawn(monkeypatch):
    model, dataset = _task()

    def crash(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("opacus_expm.bounds.private_quantile", crash)
    engine = ExpMQuadEngine()
    with pytest.raises(KeyboardInterrupt):
        engine.gather(model, _loader(dataset), 5, criterion=nn.MSELoss(), epsilon=1.0)
    assert len(engine.accountant.releases) == 1


def test_gather_without_a_budget_says_what_to_pass():
    model, dataset = _task()
    engine = ExpMQuadEngine()
    for known, name in (
        ({}, "max_grad_norm"),
        ({"max_grad_norm": 1.0}, "max_curvature"),
        ({"max_curvature": 1.0}, "max_grad_norm"),
    ):
        with pytest.raises(ValueError, match=rf"{name} is not given: .* public_loader= .* or epsilon= to buy them"):
            engine.gather(model, _loader(dataset), 5, criterion=nn.MSELoss(), **known)
    assert len(engine.accountant) == 0


def test_purchases_survive_the_ledger(tmp_path):
    model, dataset = _task()
    engine = ExpMQuadEngine(ledger_path=tmp_path / "ledger")
    engine.make_private_expm(model, _loader(dataset), 1.0, 0.3, 5, criterion=nn.MSELoss())
    again = ExpMQuadEngine(ledger_path=tmp_path / "ledger")
    assert again.accountant.releases == engine.accountant.releases
    other = ExpMQuadEngine()
    other.accountant.load_state_dict(engine.accountant.state_dict())
    assert other.get_epsilon() == engine.get_epsilon()
    state = engine.accountant.state_dict()
    state["releases"][0]["bound"] = "something else"
    with pytest.raises(ValueError, match="bound must be one of"):
        other.accountant.load_state_dict(state)


def test_statistics_belong_to_the_ledger_that_paid_for_their_bounds(tmp_path):
    """Released from another one, the purchase would be in no total; equal purchases of others do not count."""
    model, dataset = _task()
    path = tmp_path / "ledger.jsonl"
    engine = ExpMQuadEngine(ledger_path=path)
    options = {"criterion": nn.MSELoss(), "epsilon": 1.0}
    statistics = engine.gather(model, _loader(dataset), 5, **options)
    spent = engine.get_epsilon()
    assert spent > 0
    alike = ExpMQuadEngine()
    alike.gather(model, _loader(dataset), 5, **options)
    facts = [[dataclasses.replace(p, receipt="") for p in e.accountant.releases] for e in (engine, alike)]
    assert facts[0] == facts[1]
    for other in (ExpMQuadEngine(), alike):
        before = list(other.accountant.releases)
        with pytest.raises(
            ValueError, match="bought, and charged to another ledger: release from them with the engine"
        ):
            other.release(statistics, 0.5, 0.3)
        assert other.accountant.releases == before
    loaded = ExpMQuadEngine()
    loaded.accountant.load_state_dict(engine.accountant.state_dict())
    sharing = [ExpMQuadEngine(accountant=engine.accountant), ExpMQuadEngine(ledger_path=path), engine, loaded]
    for number, paid in enumerate(sharing, start=1):
        paid.release(statistics, 0.5, 0.3)
        assert paid.get_epsilon() == pytest.approx(spent + 0.5 * (1 if paid is loaded else number))


def test_every_round_knows_the_ledger_that_paid(monkeypatch):
    model, dataset = _task()
    engine, seen, draw = ExpMQuadEngine(), [], rounds.release
    monkeypatch.setattr(rounds, "release", lambda s, *a, **o: seen.append(s.receipts) or draw(s, *a, **o))
    engine.make_private_expm(model, _loader(dataset), 1.0, 0.3, 5, rounds=2, criterion=nn.MSELoss())
    receipts = {event.receipt for event in engine.accountant.releases if isinstance(event, Purchase)}
    assert len(receipts) == 2
    assert seen == [receipts, receipts]


def test_merged_statistics_need_every_receipt():
    model, dataset = _task()
    engine, other = (ExpMQuadEngine(noise_generator=np.random.default_rng(7)) for _ in range(2))
    options = {"criterion": nn.MSELoss(), "epsilon": 1.0, "projection": Sparse(seed=0), "nominal_size": 3000}
    parts = [used.gather(model, _loader(dataset), 5, **options) for used in (engine, other)]
    merged = parts[0].merge(parts[1])  # the same bounds came out
    for used in (engine, other):
        with pytest.raises(ValueError, match="another ledger"):
            used.release(merged, 0.5, 0.3)


class Untouchable(Dataset):
    """Private records that must not be read."""

    def __len__(self):
        return 3000

    def __getitem__(self, index):
        raise AssertionError("the private data was touched")


@pytest.mark.parametrize("regularization", [0.0, 1.0, 1e3, None])
@pytest.mark.parametrize("delta", [0.0, 1e-5])
def test_bounds_and_draw_fit_a_budget_together(delta, regularization):
    """A budget of what is asked for is enough, by range and by μ; more is refused, also afterwards."""
    model, dataset = _task()
    engine = ExpMQuadEngine(budget=(1.0, delta))
    options = {"criterion": nn.MSELoss(), "delta": delta, "regularization": regularization}
    with pytest.raises(BudgetExceeded, match=r"a pure release of at most epsilon=1(\.\d+)? still fits"):
        engine.make_private_expm(model, _loader(Untouchable()), 1.1, 0.3, 5, **options)
    assert len(engine.accountant) == 0
    engine.make_private_expm(model, _loader(dataset), 1.0, 0.3, 5, **options)
    assert [type(event) for event in engine.accountant.releases] == [Purchase, Purchase, Release]
    assert 0.9 < engine.get_epsilon(delta) <= 1.0
    with pytest.raises(BudgetExceeded, match="still fits"):
        engine.make_private_expm(model, _loader(Untouchable()), 0.1, 0.3, 5, **options)
    if engine.remaining() > 0:  # Rényi composition needs less than was put aside for purchases and draw
        assert delta > 0
        engine.make_private_expm(
            model,
            _loader(dataset),
            engine.remaining(),
            0.3,
            5,
            max_grad_norm=1.0,
            max_curvature=1.0,
            **options | {"delta": 0.0},
        )
        assert engine.get_epsilon(delta) <= 1.0


@pytest.mark.parametrize(("delta", "regularization"), [(0.0, None), (1e-5, 0.0)])
def test_what_follows_from_bought_bounds_lowers_no_total(delta, regularization):
    """μ of a draw by range depends on the bounds, which are an output: it was not fixed in advance, and does not count."""
    model, dataset = _task()
    engine = ExpMQuadEngine()
    options = {"criterion": nn.MSELoss(), "delta": delta, "regularization": regularization}
    engine.make_private_expm(model, _loader(dataset), 1.0, 0.3, 5, **options)
    draw = engine.accountant.releases[-1]
    assert (draw.calibration, draw.mu) == ("range", math.inf)
    engine = ExpMQuadEngine()
    engine.make_private_expm(model, _loader(dataset), 1.0, 0.3, 5, max_grad_norm=1.0, max_curvature=1.0, **options)
    assert math.isfinite(engine.accountant.releases[-1].mu) is (regularization is None)


# --- measured on public data ----------------------------------------------------------------------------------------


def _norms(model, loader, matrix):
    """|Aᵀ∇ℓ_i| and ‖AᵀH_iA‖ of every record, by plain autograd; one output and mean squared error."""
    gradients, curvatures = [], []
    for x, y in loader:
        for record in range(len(x)):
            output = model(x[record : record + 1])
            row = torch.cat([g.flatten() for g in torch.autograd.grad(output.sum(), list(model.parameters()))]) @ matrix
            norm = float(torch.linalg.vector_norm(row))
            gradients.append(abs(2 * float(output.detach() - y[record])) * norm)
            curvatures.append(2 * norm**2)
    return np.array(gradients), np.array(curvatures)


def test_bounds_are_measured_on_public_data():
    model, public = make_model(torch.float64), make_loader(torch.float64, seed=7, records=31)
    options = {"public_loader": public, "max_grad_norm": None, "max_curvature": None, "projection": Stiefel(seed=0)}
    found = [gathered(model, make_loader(torch.float64, seed=seed), **options) for seed in (0, 1)]
    gradients, curvatures = _norms(model, public, found[0].projection.matrix)
    assert found[0].sums.max_grad_norm == pytest.approx(np.quantile(gradients, 0.8), rel=1e-9)
    assert found[0].sums.max_curvature == pytest.approx(np.quantile(curvatures, 0.5), rel=1e-9)
    # Whatever the private data are.
    assert found[0].sums.max_grad_norm == found[1].sums.max_grad_norm
    assert found[0].sums.max_curvature == found[1].sums.max_curvature
    assert not torch.equal(found[0].sums.gradient, found[1].sums.gradient)


def test_given_bounds_are_kept_beside_public_data():
    public = make_loader(torch.float64, seed=7)
    measured = gathered(public_loader=public, max_grad_norm=None, max_curvature=None).sums
    only_gradient = gathered(public_loader=public, max_grad_norm=None, max_curvature=0.25).sums
    assert (only_gradient.max_grad_norm, only_gradient.max_curvature) == (measured.max_grad_norm, 0.25)
    only_curvature = gathered(public_loader=public, max_grad_norm=0.25, max_curvature=None).sums
    assert (only_curvature.max_grad_norm, only_curvature.max_curvature) == (0.25, measured.max_curvature)
    both = gathered(public_loader=public).sums
    assert (both.max_grad_norm, both.max_curvature) == (1.0, 1.0)


def test_public_data_without_curvature():
    found = gathered(public_loader=make_loader(torch.float64, seed=7), max_grad_norm=None, max_curvature=0).sums
    assert found.curvature is None
    assert found.max_curvature == 0.0
    assert found.max_grad_norm > 0


def test_public_data_without_gradient_are_refused():
    model = make_model(torch.float64)
    x, _ = make_tensors(torch.float64)
    public = DataLoader(TensorDataset(x, model(x).detach()), batch_size=16)
    with pytest.raises(ValueError, match=r"public_loader gives a zero bound.*max_grad_norm="):
        gathered(model, public_loader=public, max_grad_norm=None, max_curvature=None)


def test_a_bound_that_is_given_need_not_be_measurable():
    """No gradient on public data matters only if it is needed for a bound."""
    model = make_model(torch.float64)
    x, _ = make_tensors(torch.float64)
    public = DataLoader(TensorDataset(x, model(x).detach()), batch_size=16)
    found = gathered(model, public_loader=public, max_grad_norm=1.0, max_curvature=None).sums
    assert found.max_curvature > 0
