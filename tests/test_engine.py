"""The engine: a release is plain and leaves the original alone, one pass serves many, and fine-tuning helps."""

import copy
import dataclasses
import importlib
import inspect
import io
import math
import pickle
import re
import warnings

import numpy as np
import opacus
import pytest
import torch
from opacus.accountants import RDPAccountant, create_accountant
from small_problem import (
    FEATURES,
    GOOD,
    HIDDEN,
    PARAMETERS,
    RECORDS,
    Counted,
    Squared,
    Stream,
    equal_traces,
    flat,
    gathered,
    give_gradients,
    make_loader,
    make_model,
    make_tensors,
    same,
    trace,
)
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import opacus_expm
from opacus_expm import (
    ExpMAccountant,
    ExpMQuadEngine,
    Sparse,
    Statistics,
    Stiefel,
    engine,
    make_private_expm,
    tasks,
)
from opacus_expm.noise import Noise

# --- The result ------------------------------------------------------------------------------------------------------


class Named(nn.Module):
    """A class of the user's own, with a buffer, a frozen layer and a mode."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(FEATURES, HIDDEN)
        self.head = nn.Linear(HIDDEN, 1)
        self.register_buffer("scale", torch.tensor(2.0))
        self.body.requires_grad_(False)

    def forward(self, x):
        return self.head(torch.tanh(self.body(x)) * self.scale)


def test_five_positional_arguments():
    used = ExpMQuadEngine()
    result = used.make_private_expm(
        make_model(), make_loader(), 1.0, 0.5, 5, criterion=nn.MSELoss(), max_grad_norm=1.0, max_curvature=1.0
    )
    assert type(result) is nn.Sequential
    assert used.get_epsilon() == 1.0


def test_without_a_criterion_the_choice_is_said():
    with pytest.warns(UserWarning, match="criterion=None: targets are torch.float32, so mean squared error is used"):
        result = ExpMQuadEngine().make_private_expm(
            make_model(), make_loader(), 1.0, 0.5, 5, max_grad_norm=1.0, max_curvature=1.0
        )
    assert not same(result, make_model())


@pytest.mark.parametrize("mode", ["hooks", "functorch"])
@pytest.mark.parametrize("training", [True, False])
def test_result_is_plain_and_the_original_untouched(training, mode):
    torch.manual_seed(0)
    model = Named().train(training)
    model.head.eval()
    give_gradients(model)
    before = trace(model)
    result = ExpMQuadEngine().make_private_expm(
        model, make_loader(), 5.0, 0.5, 3, grad_sample_mode=mode, **GOOD | {"max_curvature": 0.1}
    )
    assert equal_traces(before, trace(model))
    assert type(result) is Named
    assert result is not model
    assert list(result.state_dict()) == list(model.state_dict())
    # No hooks, no attributes of anybody's, no gradients, the same modes and flags.
    after = trace(result)
    assert after[2:] == before[2:]
    assert after[5] == 0
    assert all(grad is None for grad in after[1].values())
    assert not any(hasattr(p, "grad_sample") for p in result.parameters())
    # Nothing is shared, and the result can be loaded into the original.
    assert not {p.data_ptr() for p in result.parameters()} & {p.data_ptr() for p in model.parameters()}
    model.load_state_dict(result.state_dict())
    x = make_tensors()[0]
    assert torch.equal(model.eval()(x), result.eval()(x))


@pytest.mark.parametrize("mode", ["hooks", "functorch"])
def test_frozen_parameters_and_buffers_do_not_move(mode):
    torch.manual_seed(0)
    model = Named()
    result = ExpMQuadEngine().make_private_expm(model, make_loader(), 5.0, 0.5, 3, grad_sample_mode=mode, **GOOD)
    for name, value in model.state_dict().items():
        assert torch.equal(result.state_dict()[name], value) is not name.startswith("head")
    assert [p.requires_grad for p in result.parameters()] == [p.requires_grad for p in model.parameters()]


@pytest.mark.parametrize("epsilon", [0.01, 1.0, 1000.0])
@pytest.mark.parametrize(
    ("projection", "proj_dim"), [(Stiefel(seed=0), 5), (Sparse(seed=0), 5), (Sparse(seed=0), None), (Sparse(seed=0), 1)]
)
def test_parameters_stay_in_the_ball_and_in_the_subspace(projection, proj_dim, epsilon):
    model, radius = make_model(torch.float64), 0.3
    statistics = gathered(model, proj_dim=proj_dim, projection=projection)
    dim = PARAMETERS if proj_dim is None else proj_dim
    columns = torch.stack([statistics.projection.lift(e) for e in torch.eye(dim, dtype=torch.float64)], dim=1)
    torch.testing.assert_close(columns.T @ columns, torch.eye(dim, dtype=torch.float64), rtol=0, atol=1e-12)
    for seed in range(5):
        used = ExpMQuadEngine(noise_generator=np.random.default_rng(seed))
        result = used.release(statistics, epsilon, radius)
        update = flat(result) - flat(model)
        assert 0 < float(torch.linalg.vector_norm(update)) <= radius * (1 + 1e-6)
        outside = update - columns @ (columns.T @ update)
        assert float(torch.linalg.vector_norm(outside)) <= 1e-12


def test_float32_parameters_stay_in_the_ball():
    model = make_model()
    statistics = gathered(model, make_loader(), max_grad_norm=10.0)
    for seed in range(10):
        result = ExpMQuadEngine(noise_generator=np.random.default_rng(seed)).release(statistics, 1e4, 3.0)
        assert {p.dtype for p in result.parameters()} == {torch.float32}
        norm = float(torch.linalg.vector_norm(flat(result).double() - flat(model).double()))
        assert norm <= 3.0 * (1 + 1e-6)


def test_bfloat16_parameters_keep_their_type():
    model = make_model(torch.bfloat16)
    used = ExpMQuadEngine()
    result = used.make_private_expm(model, make_loader(torch.bfloat16), 1.0, 1.0, 5, **GOOD)
    assert {p.dtype for p in result.parameters()} == {torch.bfloat16}
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert not same(result, model)
    assert used.get_epsilon() == 1.0


def test_a_layer_that_hooks_cannot_serve_falls_back_and_says_so():
    model = Squared()
    with pytest.warns(UserWarning, match=r"using grad_sample_mode='functorch', because layer 'form' \(Weighted\)"):
        result = ExpMQuadEngine().make_private_expm(model, make_loader(), 1.0, 0.5, 3, **GOOD)
    assert not same(result, model)


def test_both_ways_of_gathering_agree():
    first, second = (gathered(grad_sample_mode=mode).sums for mode in ("hooks", "functorch"))
    torch.testing.assert_close(first.gradient, second.gradient, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(first.curvature, second.curvature, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("curvature", [1.0, 0.0])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e300])
def test_records_that_are_not_finite_are_passed_over_in_silence(bad, curvature, capsys):
    """Neither an error nor a warning nor a word: any of them would reveal the record."""
    x, y = make_tensors(torch.float64)
    x[3], y[20] = bad, bad
    loader = DataLoader(TensorDataset(x, y), batch_size=16)
    used = ExpMQuadEngine()
    result = used.make_private_expm(
        make_model(torch.float64), loader, 1.0, 0.5, 5, **GOOD | {"max_curvature": curvature}
    )
    assert bool(flat(result).isfinite().all())
    assert used.accountant.releases[0].nominal_size == RECORDS
    captured = capsys.readouterr()
    assert captured.out == captured.err == ""


@pytest.mark.parametrize("mode", ["hooks", "functorch"])
def test_statistics_are_those_of_evaluation_mode(mode):
    """With dropout at work, a record's gradient would depend on chance, and the mode must come back."""
    model = nn.Sequential(nn.Linear(FEATURES, 8), nn.Dropout(0.5), nn.Linear(8, 1)).double()
    first, again = (gathered(model.train(), grad_sample_mode=mode).sums for _ in range(2))
    assert model.training
    evaluated = gathered(model.eval(), grad_sample_mode=mode).sums
    assert torch.equal(first.gradient, again.gradient)
    assert torch.equal(first.gradient, evaluated.gradient)
    assert torch.equal(first.curvature, evaluated.curvature)


@pytest.mark.parametrize("mode", ["hooks", "functorch"])
def test_running_statistics_are_used_and_not_updated(mode):
    model = nn.Sequential(nn.Linear(FEATURES, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).double().train()
    with torch.no_grad():
        model[1].running_mean.fill_(0.3)
    before = trace(model)
    whole = gathered(model, make_loader(torch.float64, batch_size=40), grad_sample_mode=mode)
    single = gathered(model, make_loader(torch.float64, batch_size=1), grad_sample_mode=mode)
    torch.testing.assert_close(whole.sums.gradient, single.sums.gradient, rtol=1e-10, atol=1e-12)
    assert equal_traces(before, trace(model))
    assert torch.equal(ExpMQuadEngine().release(whole, 1.0, 0.5)[1].running_mean, model[1].running_mean)


@pytest.mark.parametrize("physical", [1, 7, 100])
def test_physical_batches_change_nothing(physical):
    whole, cut = gathered().sums, gathered(max_physical_batch_size=physical).sums
    torch.testing.assert_close(cut.gradient, whole.gradient, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(cut.curvature, whole.curvature, rtol=1e-10, atol=1e-12)


def test_order_of_the_records_does_not_matter():
    shuffled = DataLoader(TensorDataset(*make_tensors(torch.float64)), batch_size=7, shuffle=True)
    torch.testing.assert_close(
        gathered(loader=shuffled).sums.gradient, gathered().sums.gradient, rtol=1e-10, atol=1e-12
    )


# --- One pass, many releases -----------------------------------------------------------------------------------------


def test_one_pass_serves_every_budget_and_radius():
    records, used = Counted(), ExpMQuadEngine()
    statistics = used.gather(make_model(torch.float64), DataLoader(records, batch_size=16), 5, **GOOD)
    assert isinstance(statistics, Statistics)
    assert records.reads == RECORDS
    assert used.get_epsilon() == 0.0  # gathering is not a release
    budgets = [(0.1, 0.2), (1.0, 0.2), (1.0, 2.0), (4.0, 0.01)]
    results = [used.release(statistics, epsilon, radius) for epsilon, radius in budgets]
    assert records.reads == RECORDS
    for result, (_, radius) in zip(results, budgets, strict=True):
        norm = float(torch.linalg.vector_norm(flat(result) - flat(make_model(torch.float64))))
        assert norm <= radius * (1 + 1e-6)
    assert [(r.epsilon, r.radius) for r in used.accountant.releases] == budgets
    assert used.get_epsilon() == pytest.approx(6.1, rel=1e-15)


def test_changing_the_original_does_not_change_the_statistics():
    model = make_model(torch.float64)
    statistics = gathered(model)
    first = ExpMQuadEngine(noise_generator=np.random.default_rng(0)).release(statistics, 1.0, 0.5)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    second = ExpMQuadEngine(noise_generator=np.random.default_rng(0)).release(statistics, 1.0, 0.5)
    assert same(first, second)


def test_simulation_warns_and_charges_nothing():
    used, statistics = ExpMQuadEngine(noise_generator=np.random.default_rng(0)), gathered()
    start = flat(statistics.module)

    def distance(module):
        return float(torch.linalg.vector_norm(flat(module) - start))

    with pytest.warns(UserWarning, match="NOT releases: nothing is charged"):
        values = used.simulate(statistics, 1.0, 0.5, distance, draws=25)
    assert values.shape == (25,)
    assert len(set(values.tolist())) == 25
    assert 0 < values.min() <= values.max() <= 0.5 * (1 + 1e-6)
    assert used.accountant.releases == []
    assert used.get_epsilon() == 0.0


def test_simulation_has_the_law_of_a_release():
    """Along the gradient: means of 100 simulated draws and of 100 releases."""
    statistics, used = gathered(), ExpMQuadEngine(noise_generator=np.random.default_rng(1))
    start, direction = flat(statistics.module), statistics.projection.lift(statistics.sums.gradient)

    def along(module):
        return float((flat(module) - start) @ direction / torch.linalg.vector_norm(direction))

    with pytest.warns(UserWarning, match="NOT releases"):
        simulated = used.simulate(statistics, 0.3, 0.5, along, draws=100)
    other = ExpMQuadEngine(noise_generator=np.random.default_rng(2))
    released = np.array([along(other.release(statistics, 0.3, 0.5)) for _ in range(100)])
    spread = math.hypot(simulated.std(), released.std()) / math.sqrt(100)
    assert abs(simulated.mean() - released.mean()) < 4 * spread
    assert simulated.mean() < -5 * spread  # downhill


# --- Statistics are not shown ----------------------------------------------------------------------------------------


def test_statistics_show_shapes_only():
    shown = [repr(gathered(loader=make_loader(torch.float64, seed=seed))) for seed in (0, 1)]
    assert (
        shown[0]
        == shown[1]
        == (
            f"Statistics(parameters={PARAMETERS}, projection='sparse', nominal_size={RECORDS}, "
            "sums=ClippedSums(dim=5, max_grad_norm=1.0, max_curvature=1.0, private values hidden))"
        )
    )


@pytest.mark.parametrize(
    "save", [pickle.dumps, copy.copy, copy.deepcopy, lambda s: torch.save(s, io.BytesIO())], ids=lambda f: f.__name__
)
def test_statistics_are_not_pickled_or_copied(save):
    with pytest.raises(TypeError, match="private data"):
        save(gathered())


def test_the_density_is_not_shown():
    statistics = gathered()
    density = statistics.density(1.0, 0.5, 0.0)
    assert "private values hidden" in repr(density)
    assert not re.search(r"\d\.\d{3}", repr(density))
    with pytest.raises(TypeError, match="private data"):
        pickle.dumps(density)


# --- The size --------------------------------------------------------------------------------------------------------


def test_nominal_size_is_used_and_recorded():
    """λN enters as a product: (λ, N) = (2, 50) and (0.5, 200) give the same draw, (2, 200) another."""
    draws = []
    for regularization, size in ((2.0, 50), (0.5, 200), (2.0, 200)):
        used = ExpMQuadEngine(noise_generator=np.random.default_rng(0))
        draws.append(
            used.make_private_expm(
                make_model(torch.float64),
                make_loader(torch.float64),
                1.0,
                0.5,
                5,
                nominal_size=size,
                regularization=regularization,
                **GOOD,
            )
        )
        assert used.accountant.releases[0].nominal_size == size
    assert same(draws[0], draws[1])
    assert not same(draws[0], draws[2])


def test_nominal_size_is_the_number_of_records_by_default():
    assert gathered().nominal_size == RECORDS
    assert gathered(loader=make_loader(torch.float64, records=33)).nominal_size == 33


def test_iterable_data_work_with_a_nominal_size():
    used = ExpMQuadEngine()
    loader = DataLoader(Stream(), batch_size=16)
    statistics = used.gather(make_model(torch.float64), loader, 5, nominal_size=50, **GOOD)
    torch.testing.assert_close(statistics.sums.gradient, gathered().sums.gradient, rtol=1e-10, atol=1e-12)
    assert statistics.nominal_size == 50
    used.release(statistics, 1.0, 0.5)
    assert used.accountant.releases[0].nominal_size == 50


# --- Compatibility and the module-level function ---------------------------------------------------------------------


def test_validate_accepts_what_can_be_used():
    used = ExpMQuadEngine()
    optimizer = torch.optim.SGD(make_model().parameters(), lr=0.1)
    assert used.validate(module=make_model(), optimizer=optimizer, data_loader=make_loader()) is None
    assert used.is_compatible(module=make_model()) is True
    assert used.is_compatible(module=make_model(), optimizer=optimizer, data_loader=make_loader()) is True


@pytest.mark.parametrize(
    ("module", "loader", "error", "reason"),
    [
        (make_model().requires_grad_(False), None, ValueError, "no trainable parameter"),
        ("model", None, TypeError, "model must be a torch.nn.Module"),
        (make_model(), [1], TypeError, "data_loader must be a torch.utils.data.DataLoader"),
        (make_model(), make_loader(records=0), ValueError, "data_loader is empty"),
    ],
)
def test_validate_says_what_cannot_be_used(module, loader, error, reason):
    used = ExpMQuadEngine()
    with pytest.raises(error, match=reason):
        used.validate(module=module, data_loader=loader)
    assert used.is_compatible(module=module, data_loader=loader) is False


def test_module_level_function_is_the_method(monkeypatch):
    function, method = (inspect.signature(f).parameters for f in (make_private_expm, ExpMQuadEngine.make_private_expm))
    assert [str(method[name]) for name in function] == [str(function[name]) for name in function]
    monkeypatch.setattr(Noise, "ordinary", lambda self: np.random.default_rng(1))
    call = (make_model(torch.float64), make_loader(torch.float64), 2.0, 0.4, None)
    options = {"delta": 1e-6, "criterion": nn.MSELoss(), "public_loader": make_loader(torch.float64, seed=7)}
    assert function.keys() == dict.fromkeys(["model", "loader", "epsilon", "radius", "proj_dim", *options]).keys()
    assert same(make_private_expm(*call, **options), ExpMQuadEngine().make_private_expm(*call, **options))
    assert opacus_expm.make_private_expm is engine.make_private_expm


# --- Progress --------------------------------------------------------------------------------------------------------


def test_progress_shows_whole_batches_of_records_and_nothing_else(capsys):
    """The bar's text, times taken out, is the same for two data sets of one size."""
    shown = []
    for seed in (0, 1):
        loader, public = make_loader(torch.float64, seed=seed), make_loader(torch.float64, seed=5)
        options = {"max_grad_norm": None, "public_loader": public, "progress": True}
        ExpMQuadEngine().make_private_expm(make_model(torch.float64), loader, 1.0, 0.5, 5, **GOOD | options)
        captured = capsys.readouterr()
        assert captured.out == ""
        bars = [line for line in re.split(r"[\r\n]+", captured.err) if line.strip()]
        rate = r"(\?|[\d.]+k?)(record/s|s/record)"
        bar = re.compile(
            r"(public_loader|loader): +\d+%\|[^|]*\| (0.00|16.0|32.0|48.0)/48.0 "
            rf"\[\d\d:\d\d<(\?|\d\d:\d\d), +{rate}\]"
        )
        assert bars
        assert all(bar.fullmatch(line.strip()) for line in bars), bars
        shown.append({line.split(":")[0] for line in bars})
    assert shown[0] == shown[1] == {"loader", "public_loader"}


@pytest.mark.parametrize(("nominal_size", "shown"), [(None, True), (1000, False)])
def test_no_bar_where_a_nominal_size_hides_the_real_one(capsys, nominal_size, shown):
    options = GOOD | {"nominal_size": nominal_size, "progress": True}
    ExpMQuadEngine().make_private_expm(make_model(), make_loader(), 1.0, 0.5, 5, **options)
    assert ("loader" in capsys.readouterr().err) is shown


def test_nothing_is_printed_by_default(capsys):
    ExpMQuadEngine().make_private_expm(make_model(), make_loader(), 1.0, 0.5, 5, **GOOD)
    captured = capsys.readouterr()
    assert captured.out == captured.err == ""


# --- Living with Opacus ----------------------------------------------------------------------------------------------


def test_opacus_knows_the_accountant():
    assert isinstance(create_accountant("expm"), ExpMAccountant)


def test_importing_the_accountant_again_is_harmless():
    module = importlib.import_module("opacus_expm.accounting.accountant")
    held = dict(vars(module))
    try:
        importlib.reload(module)
        assert isinstance(create_accountant("expm"), ExpMAccountant)
    finally:
        vars(module).clear()
        vars(module).update(held)


def _dp_sgd_step(accountant="expm"):
    """One epoch of Opacus's own training; its engine."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Opacus's own
        privacy = opacus.PrivacyEngine(accountant=accountant)
        model = make_model()
        module, optimizer, loader = privacy.make_private_with_epsilon(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data_loader=make_loader(),
            target_epsilon=3.0,
            target_delta=1e-5,
            epochs=1,
            max_grad_norm=1.0,
        )
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(module(x), y).backward()
            optimizer.step()
    return privacy, loader


@pytest.mark.slow
def test_opacus_trains_on_the_same_ledger():
    privacy, poisson = _dp_sgd_step()
    spent = privacy.get_epsilon(1e-5)
    assert isinstance(privacy.accountant, ExpMAccountant)
    assert 0 < spent <= 3.0
    used = ExpMQuadEngine(accountant=privacy.accountant)
    assert used.accountant is privacy.accountant
    assert used.get_epsilon(1e-5) == spent
    used.release(gathered(), 0.5, 0.5)
    assert spent < used.get_epsilon(1e-5) <= spent + 0.5  # at most the sum
    assert privacy.get_epsilon(1e-5) == used.get_epsilon(1e-5)
    assert used.get_epsilon(0.0) == math.inf
    # The loader of the other engine samples at random, and its adjacency is add/remove.
    with pytest.raises(ValueError, match="Poisson sampling"):
        used.gather(make_model(), poisson, 5, **GOOD)
    with pytest.raises(ValueError, match="adjacency='replace_one' cannot be added"):
        ExpMQuadEngine(accountant=privacy.accountant, adjacency="replace_one").release(gathered(), 0.5, 0.5)


def test_ledger_asks_no_more_of_dp_sgd_than_opacus_does():
    """Without releases, the shared ledger's ε of DP-SGD is at most that of Opacus's Rényi accountant, and near it."""
    privacy, _ = _dp_sgd_step()
    own = RDPAccountant()
    own.history = list(privacy.accountant.history)
    renyi = own.get_epsilon(1e-5)
    assert 0.7 * renyi < privacy.get_epsilon(1e-5) <= renyi * (1 + 1e-12)


# --- It helps --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sine():
    """The paper's regression, pretrained."""
    return tasks.sine()


def _mean_losses(task, change=lambda statistics: statistics):
    """Mean test loss of 20 simulated draws, for three subspaces."""
    found = []
    for seed in range(3):
        used = ExpMQuadEngine(noise_generator=np.random.default_rng(seed))
        statistics = used.gather(
            task.model,
            DataLoader(task.private, batch_size=500),
            20,
            criterion=task.criterion,
            public_loader=DataLoader(task.public, batch_size=500),
            projection=Stiefel(seed=seed),
        )
        with pytest.warns(UserWarning, match="NOT releases"):
            losses = used.simulate(
                change(statistics),
                1.0,
                0.1,
                lambda module: tasks.loss(module, task.test, task.criterion),
                draws=20,
            )
        found.append(float(losses.mean()))
    return found


@pytest.mark.slow
def test_sine_regression_improves(sine):
    zero_shot = tasks.loss(sine.model, sine.test, sine.criterion)
    assert zero_shot < 0.1
    assert max(_mean_losses(sine)) < zero_shot


@pytest.mark.slow
def test_sine_regression_does_not_improve_uphill(sine):
    zero_shot = tasks.loss(sine.model, sine.test, sine.criterion)

    def uphill(statistics):
        return dataclasses.replace(
            statistics, sums=dataclasses.replace(statistics.sums, gradient=-statistics.sums.gradient)
        )

    assert min(_mean_losses(sine, uphill)) > zero_shot
