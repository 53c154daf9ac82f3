"""Bought bounds: bounded range by enumeration, failure probability, what is charged and what is left for the draw."""

import dataclasses
import math
import warnings

import numpy as np
import pytest
import reference
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from opacus_expm import BudgetExceeded, ExpMQuadEngine, NoGuarantee, Purchase, Release
from opacus_expm.accounting import composition
from opacus_expm.bounds import (
    GRID,
    QUANTILES,
    quantile_epsilon,
    warn_if_unreliable,
)
from opacus_expm.gathering import statistics as statistics_module
from opacus_expm.gathering.clipping import Sensitivity
from opacus_expm.mechanism.calibration import allowances, calibrate_within, cost_whatever_the_bounds


def test_price():
    needed = 2 * (math.log(401) + 5) / (20_000 * 0.2)
    assert quantile_epsilon(1.0, 20_000, 0.8) == pytest.approx(2 * needed)
    assert quantile_epsilon(0.15, 20_000, 0.8) == pytest.approx(0.05 * 0.15)
    assert quantile_epsilon(0.01, 1000, 0.8) == pytest.approx(0.0005)
    warn_if_unreliable(1.001 * needed, 20_000, 0.8)  # reliable: silent, or the test would fail
    with pytest.warns(UserWarning, match=r"may come out far from its quantile .* pass max_grad_norm="):
        warn_if_unreliable(0.9 * needed, 20_000, 0.8)


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
    st.sampled_from(["separate", "joint"]),
)
def test_the_total_is_what_was_asked_for(epsilon, delta, adjacency, regularization, clipping):
    model, dataset = _task(40)
    engine = ExpMQuadEngine()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        engine.make_private_expm(
            model,
            _loader(dataset),
            epsilon,
            0.3,
            3,
            delta=delta,
            adjacency=adjacency,
            regularization=regularization,
            clipping=clipping,
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


@pytest.mark.parametrize("rounds", [1, 2])
@pytest.mark.parametrize("adjacency", ["add_remove", "replace_one"])
@pytest.mark.parametrize("calibration", ["range", "gaussian", "paper"])
def test_charges_do_not_depend_on_what_was_bought(calibration, adjacency, rounds):
    """A cost that followed from the bound that happened to come out would bound nothing where another one comes out."""
    model, dataset = _task()
    delta = 0.0 if calibration == "paper" else 1e-5
    bought, charged, pure = set(), set(), set()
    for seed in range(4):
        engine = ExpMQuadEngine()
        engine.make_private_expm(
            *(model, _loader(dataset), 1.0, 0.3, 5),
            delta=delta,
            rounds=rounds,
            calibration=calibration,
            adjacency=adjacency,
            regularization=1.0,
            criterion=nn.MSELoss(),
            noise_generator=np.random.default_rng(seed),
        )
        draws = [event for event in engine.accountant.releases if isinstance(event, Release)]
        bought |= {(draw.max_grad_norm, draw.max_curvature) for draw in draws}
        charged |= {(draw.epsilon_range, draw.mu) for draw in draws}
        pure.add(engine.get_epsilon(0.0))
        assert engine.get_epsilon(delta) <= 1.0
    assert len(bought) > 1
    assert len(charged) == len(pure) == 1
    assert math.isinf(pure.pop()) == (calibration == "gaussian")


@pytest.mark.parametrize("adjacency", ["add_remove", "replace_one"])
@given(st.floats(1e-3, 1e3), st.floats(0, 1e3), st.floats(1e-3, 1e3))
def test_the_papers_calibration_costs_no_more_than_is_planned_whatever_the_bounds(adjacency, c_g, c_h, radius):
    (allowance,) = allowances(1.0, 0.0)
    sensitivity = Sensitivity(c_g, c_h, False, adjacency)
    settings = {"radius": radius, "regularization": 1.0, "nominal_size": 10, "calibration": "paper"}
    most, _ = cost_whatever_the_bounds(allowance, "paper", adjacency)
    assert calibrate_within(allowance, sensitivity, **settings).epsilon_range <= most * (1 + 1e-12)
    if c_h == 0:  # reached
        assert calibrate_within(allowance, sensitivity, **settings).epsilon_range == pytest.approx(most)


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
    options = {"criterion": nn.MSELoss(), "projection_seed": 0, "epsilon": 5.0}
    found = []
    for memory in (2**30, 0):
        monkeypatch.setattr(statistics_module, "CACHE_BYTES", memory)
        gathered = ExpMQuadEngine().gather(
            model, _loader(dataset), 5, noise_generator=np.random.default_rng(7), **options
        )
        found.append(gathered.sums)
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
    for memory, passes in ((2**30, 1), (0, 2)):
        monkeypatch.setattr(statistics_module, "CACHE_BYTES", memory)
        Counted.reads = 0
        ExpMQuadEngine().gather(model, _loader(counted), 5, criterion=nn.MSELoss(), epsilon=10.0)
        assert Counted.reads == passes * 1000


def test_a_purchase_is_charged_before_it_is_drawn(monkeypatch):
    model, dataset = _task()

    def crash(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("opacus_expm.engine.private_quantile", crash)
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
    engine, seen, draw = ExpMQuadEngine(), [], ExpMQuadEngine._draw
    monkeypatch.setattr(
        ExpMQuadEngine, "_draw", lambda self, s, *a, **o: seen.append(s.receipts) or draw(self, s, *a, **o)
    )
    engine.make_private_expm(model, _loader(dataset), 1.0, 0.3, 5, rounds=2, criterion=nn.MSELoss())
    receipts = {event.receipt for event in engine.accountant.releases if isinstance(event, Purchase)}
    assert len(receipts) == 2
    assert seen == [receipts, receipts]


def test_merged_statistics_need_every_receipt():
    model, dataset = _task()
    engine, other = ExpMQuadEngine(), ExpMQuadEngine()
    options = {"criterion": nn.MSELoss(), "epsilon": 1.0, "projection_seed": 0, "nominal_size": 3000}
    parts = [
        used.gather(model, _loader(dataset), 5, noise_generator=np.random.default_rng(7), **options)
        for used in (engine, other)
    ]
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


# --- the source paper's bounds, which are not private -----------------------------------------------------------------

NOT_PRIVATE = "bounds='paper' reads the clipping bounds off the private data: the release is NOT differentially private"


def _outputs_task(outputs, loss, n=60):
    """A small network in float64, and its records, one of which is far out."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(n, 3, generator=generator, dtype=torch.float64)
    x[17] *= 6
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, outputs)).double()
    if loss == "ce":
        y = torch.randint(outputs, (n,), generator=generator)
    elif loss == "bce":
        y = torch.randint(2, (n, outputs), generator=generator).double()
    else:
        y = 3 * torch.randn(n, outputs, generator=generator, dtype=torch.float64)
    return model, TensorDataset(x, y)


def _read_off(model, dataset):
    """Largest spectral norm of a record's full Jacobian, and largest residual, one record at a time."""
    x, y = dataset.tensors
    passed = reference.output_and_jacobian_of_each(model, x, len(x))
    jacobian = max(float(torch.linalg.matrix_norm(j, 2)) for _, j in passed)
    residual = max(float((f - t).norm()) for (f, _), t in zip(passed, y, strict=True)) if y.dim() == 2 else None
    return jacobian, residual


@pytest.mark.parametrize("mode", ["hooks", "functorch"])
@pytest.mark.parametrize(("loss", "outputs"), [("mse", 1), ("mse", 3), ("ce", 2), ("ce", 4)])
def test_the_papers_bounds_are_its_formulas(loss, outputs, mode):
    """ḡ and H̄ from the largest Jacobian and residual in the full space, each times 1.1, whatever the subspace."""
    model, dataset = _outputs_task(outputs, loss)
    jacobian, residual = _read_off(model, dataset)
    j = 1.1 * jacobian
    expected = (
        (math.sqrt(2) * j, j * j / 2) if loss == "ce" else (2 * j * 1.1 * residual / outputs, 2 * j * j / outputs)
    )
    criterion = nn.CrossEntropyLoss() if loss == "ce" else nn.MSELoss()
    for dim in (2, None):
        with pytest.warns(UserWarning, match=NOT_PRIVATE):
            found = ExpMQuadEngine().gather(
                model, _loader(dataset), dim, criterion=criterion, bounds="paper", grad_sample_mode=mode
            )
        assert (found.sums.max_grad_norm, found.sums.max_curvature) == pytest.approx(expected, rel=1e-9)
        assert found.bounds == "paper"
    # They bound every record's projected gradient and curvature, so that nothing is clipped.
    plain = ExpMQuadEngine().gather(
        model, _loader(dataset), None, criterion=criterion, max_grad_norm=1e9, max_curvature=1e9
    )
    torch.testing.assert_close(found.sums.gradient, plain.sums.gradient, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(found.sums.curvature, plain.sums.curvature, rtol=1e-9, atol=1e-9)


def test_the_papers_bounds_follow_a_single_record():
    """Why they are not private: the record that is far out moves them."""
    model, dataset = _outputs_task(1, "mse")
    x, y = dataset.tensors
    kept = torch.arange(len(x)) != 17
    found = []
    for data in (dataset, TensorDataset(x[kept], y[kept])):
        with pytest.warns(UserWarning, match="NOT differentially private"):
            statistics = ExpMQuadEngine().gather(model, _loader(data), 2, criterion=nn.MSELoss(), bounds="paper")
        found.append(statistics.sums.max_curvature)
    assert found[0] > 1.1 * found[1]


@pytest.mark.parametrize("rounds", [1, 2])
def test_the_papers_bounds_give_no_guarantee(rounds, tmp_path):
    """A warning, a release, and no ε from then on: not here, not after a checkpoint, not from the ledger's file."""
    model, dataset = _outputs_task(1, "mse")
    path = tmp_path / "ledger.jsonl"
    engine = ExpMQuadEngine(ledger_path=path)
    options = {"criterion": nn.MSELoss(), "bounds": "paper", "rounds": rounds}
    with pytest.warns(UserWarning, match=NOT_PRIVATE) as said:
        private = engine.make_private_expm(model, _loader(dataset), 1.0, 0.3, 4, **options)
    assert len(said) == 1
    assert said[0].filename == __file__
    assert [type(event) for event in engine.accountant.releases] == [Release] * rounds  # nothing was bought
    assert {event.bounds for event in engine.accountant.releases} == {"paper"}
    assert not torch.equal(private[0].weight, model[0].weight)
    engine.save_checkpoint(path=tmp_path / "checkpoint.pt", module=private)
    loaded = ExpMQuadEngine()
    loaded.load_checkpoint(path=tmp_path / "checkpoint.pt", module=model)
    for used in (engine, loaded, ExpMQuadEngine(ledger_path=path)):
        for delta in (0.0, 1e-5):
            for ask in (used.get_epsilon, used.accountant.get_epsilon):
                with pytest.raises(NoGuarantee, match="no epsilon can be stated for this ledger"):
                    ask(delta)
    # Nor does a private release afterwards make it good.
    loaded.make_private_expm(
        model, _loader(dataset), 1.0, 0.3, 4, criterion=nn.MSELoss(), max_grad_norm=1.0, max_curvature=1.0
    )
    with pytest.raises(NoGuarantee):
        loaded.get_epsilon()


def test_simulation_with_the_papers_bounds_charges_nothing():
    """The paper's figures: statistics may be gathered and draws simulated; the ledger stays empty."""
    model, dataset = _outputs_task(1, "mse")
    engine = ExpMQuadEngine()
    with pytest.warns(UserWarning, match=NOT_PRIVATE):
        statistics = engine.gather(model, _loader(dataset), 2, criterion=nn.MSELoss(), bounds="paper")
    with pytest.warns(UserWarning, match="NOT releases"):
        values = engine.simulate(statistics, 1.0, 0.3, lambda module: 1.0, draws=3, calibration="paper")
    assert values.tolist() == [1.0] * 3
    assert engine.get_epsilon() == 0.0
    engine.release(statistics, 1.0, 0.3)
    with pytest.raises(NoGuarantee):
        engine.get_epsilon()


def test_the_papers_bounds_and_a_budget_exclude_each_other(tmp_path):
    model, dataset = _outputs_task(1, "mse")
    options = {"criterion": nn.MSELoss(), "bounds": "paper"}
    engine = ExpMQuadEngine(budget=(1.0, 0.0), ledger_path=tmp_path / "ledger")
    for call in (
        lambda: engine.make_private_expm(model, _loader(Untouchable()), 0.5, 0.3, 4, **options),
        lambda: engine.gather(model, _loader(Untouchable()), 4, **options),
    ):
        with pytest.raises(ValueError, match="bounds='paper' is not private and cannot be charged to a budget"):
            call()
    assert len(engine.accountant) == 0
    # Statistics of an engine without a budget cannot be released by one that has a budget either.
    other = ExpMQuadEngine(ledger_path=tmp_path / "other")
    with pytest.warns(UserWarning, match=NOT_PRIVATE):
        statistics = other.gather(model, _loader(dataset), 4, **options)
    with pytest.raises(NoGuarantee):
        engine.release(statistics, 0.5, 0.3)
    assert len(engine.accountant) == 0
    # And once such a release is in the ledger, no budget can be kept.
    other.release(statistics, 0.5, 0.3)
    with pytest.warns(UserWarning, match="holds 1 charges already"):
        engine = ExpMQuadEngine(budget=(1.0, 0.0), ledger_path=tmp_path / "other")
    given = {"criterion": nn.MSELoss(), "max_grad_norm": 1.0, "max_curvature": 1.0}
    with pytest.raises(NoGuarantee):
        engine.make_private_expm(model, _loader(Untouchable()), 0.5, 0.3, 4, **given)
    assert len(engine.accountant) == 1


def test_the_papers_bounds_are_defined_for_two_losses():
    model, dataset = _outputs_task(1, "bce")
    engine = ExpMQuadEngine()
    message = "bounds='paper' is defined for cross-entropy and mean squared error, not for BinaryCrossEntropy"
    with pytest.warns(UserWarning, match=NOT_PRIVATE), pytest.raises(ValueError, match=message):
        engine.make_private_expm(model, _loader(dataset), 1.0, 0.3, 4, criterion=nn.BCEWithLogitsLoss(), bounds="paper")
    assert len(engine.accountant) == 0
