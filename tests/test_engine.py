"""The engine: bad input leaves no trace, a release is plain and charged, and fine-tuning helps."""

import copy
import dataclasses
import importlib
import inspect
import io
import math
import pickle
import random
import re
import warnings

import numpy as np
import opacus
import pytest
import torch
from opacus.accountants import RDPAccountant, create_accountant
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import opacus_expm
from opacus_expm import (
    ExpMAccountant,
    ExpMQuadEngine,
    NoGuarantee,
    NotGuaranteed,
    Release,
    Statistics,
    engine,
    make_private_expm,
    tasks,
)
from opacus_expm.mechanism.sampling import Exact

FEATURES, HIDDEN, RECORDS = 3, 4, 40
PARAMETERS = (FEATURES + 1) * HIDDEN + HIDDEN + 1


def make_model(dtype=torch.float32):
    """A pretrained network with one output, 21 parameters."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, 1))
    return model.to(dtype)


def make_tensors(dtype=torch.float32, seed=0, records=RECORDS):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(records, FEATURES, generator=generator, dtype=torch.float64)
    y = x.sum(1, keepdim=True) + 0.1 * torch.randn(records, 1, generator=generator, dtype=torch.float64)
    return x.to(dtype), y.to(dtype)


def make_loader(dtype=torch.float32, seed=0, records=RECORDS, batch_size=16):
    return DataLoader(TensorDataset(*make_tensors(dtype, seed, records)), batch_size=batch_size)


GOOD = {"criterion": nn.MSELoss(), "max_grad_norm": 1.0, "max_curvature": 1.0, "projection_seed": 0}


def gathered(model=None, loader=None, proj_dim=5, dtype=torch.float64, **changes):
    """Statistics of the usual problem, in float64 unless told otherwise."""
    model = make_model(dtype) if model is None else model
    loader = make_loader(dtype) if loader is None else loader
    return ExpMQuadEngine().gather(model, loader, proj_dim, **(GOOD | changes))


def flat(module):
    return torch.cat([p.detach().flatten() for p in module.parameters()])


def same(first, second):
    """Whether two modules have the same parameters, bit by bit."""
    return torch.equal(flat(first), flat(second))


# --- Bad input -------------------------------------------------------------------------------------------------------


class Pairless(Dataset):
    """Records without a target."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.ones(FEATURES)


class Stream(IterableDataset):
    """The usual records without a length."""

    def __iter__(self):
        return iter(zip(*make_tensors(torch.float64), strict=True))


class Weighted(nn.Module):
    """A layer with two inputs, which hooks cannot serve."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(FEATURES))

    def forward(self, first, second):
        return (first * second * self.weight).sum(1, keepdim=True)


class Squared(nn.Module):
    """A weighted sum of squares."""

    def __init__(self):
        super().__init__()
        self.form = Weighted()

    def forward(self, x):
        return self.form(x, x)


class Wrapped(nn.Module):
    """Returns something else than a tensor."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(FEATURES, 1)

    def forward(self, x):
        return {"out": self.layer(x)}


def _with_nan(value):
    model = make_model()
    with torch.no_grad():
        model[2].weight[0, 1] = value
    return model


def _frozen():
    return make_model().requires_grad_(False)


def _targets(make):
    x, y = make_tensors()
    return DataLoader(TensorDataset(x, make(y)), batch_size=16)


NUMBERS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf, "zero": 0.0, "negative": -0.5}
NOT_NUMBERS = {"bool": True, "text": "1", "none": None, "complex": 1j, "tensor": torch.tensor(1.0)}


def _table():
    """Name → (arguments to change, error, what the message must contain)."""
    table = {}
    for argument in ("epsilon", "radius", "max_grad_norm", "damping"):
        for name, value in NUMBERS.items():
            table[f"{argument} {name}"] = ({argument: value}, ValueError, [argument, "greater than 0", repr(value)])
    for argument in ("regularization", "max_curvature"):
        for name in ("nan", "inf", "-inf", "negative"):
            value = NUMBERS[name]
            table[f"{argument} {name}"] = ({argument: value}, ValueError, [argument, "0 or greater", repr(value)])
    for value in (math.nan, math.inf, -0.1, 1.0, 1.5):
        table[f"delta {value}"] = ({"delta": value}, ValueError, ["delta", "[0, 1)", repr(value)])
    for argument in ("epsilon", "radius", "max_grad_norm", "regularization", "max_curvature", "delta"):
        for name, value in NOT_NUMBERS.items():
            if value is None and argument in ("max_grad_norm", "max_curvature", "regularization"):
                continue  # means "not given"
            words = [argument, "number", repr(value), type(value).__name__]
            table[f"{argument} {name}"] = ({argument: value}, TypeError, words)
    for argument in (
        "proj_dim",
        "nominal_size",
        "max_physical_batch_size",
        "curvature_samples",
        "rounds",
        "public_rank",
    ):
        for value in (0, -1):
            words = [argument, "positive integer", repr(value)]
            table[f"{argument} {value}"] = ({argument: value}, ValueError, words)
        for value in (1.5, "x", True, 2.0):
            words = [argument, "positive integer", repr(value), type(value).__name__]
            table[f"{argument} {value!r}"] = ({argument: value}, TypeError, words)
    table["proj_dim too large"] = (
        {"proj_dim": PARAMETERS + 1},
        ValueError,
        ["proj_dim", str(PARAMETERS + 1), f"at most the number of trainable parameters, {PARAMETERS}", "proj_dim=None"],
    )
    for argument, known in {
        "projection": ("stiefel", "sparse", "public", "preconditioned"),
        "calibration": ("auto", "range", "gaussian", "paper"),
        "adjacency": ("add_remove", "replace_one"),
        "grad_sample_mode": ("hooks", "functorch"),
        "sampler": ("exact", "gibbs", "rejection"),
        "clipping": ("separate", "joint"),
        "bounds": ("paper",),
    }.items():
        for value in ("unknown", 3, "Hooks"):
            if argument == "sampler" and value == 3:
                continue  # may also be an object
            words = [f"{argument} must be one of", *map(repr, known), f"got {value!r}"]
            table[f"{argument} {value!r}"] = ({argument: value}, ValueError, words)
    table["sampler 3"] = ({"sampler": 3}, TypeError, ["sampler must be one of", "an object with .sample", "got 3"])
    for value in (-1, 1.5, "x", True):
        words = ["projection_seed", "non-negative integer", repr(value)]
        table[f"projection_seed {value!r}"] = ({"projection_seed": value}, ValueError, words)
    for name, value in {
        "number": 0,
        "text": "seed",
        "random.Random": random.Random(0),
        "RandomState": np.random.RandomState(0),
    }.items():
        words = ["noise_generator", "torch.Generator", "numpy.random.Generator", repr(value)]
        table[f"noise_generator {name}"] = ({"noise_generator": value}, TypeError, words)
    for name, value in {"none": None, "function": abs, "class": nn.Linear, "weights": {"a": torch.ones(1)}}.items():
        words = ["model must be a torch.nn.Module", repr(value)]
        table[f"model {name}"] = ({"model": value}, TypeError, words)
    table |= {
        "model frozen": ({"model": _frozen()}, ValueError, ["no trainable parameter", "requires_grad_(True)"]),
        "model NaN": ({"model": _with_nan(math.nan)}, ValueError, ["'2.weight'", "NaN or infinity", "load sound"]),
        "model inf": ({"model": _with_nan(-math.inf)}, ValueError, ["'2.weight'", "NaN or infinity", "load sound"]),
        "model complex": (
            {"model": nn.Linear(FEATURES, 1, dtype=torch.complex64)},
            ValueError,
            ["'weight'", "torch.complex64", "real floating"],
        ),
        "model with batch statistics": (
            {"model": nn.Sequential(nn.Linear(FEATURES, 4), nn.BatchNorm1d(4, track_running_stats=False))},
            ValueError,
            ["'1'", "BatchNorm1d", "track_running_stats=False", "use GroupNorm"],
        ),
        "model 1-D": (
            {"model": nn.Sequential(nn.Linear(FEATURES, 1), nn.Flatten(0)), "proj_dim": 2},
            ValueError,
            ["model must return a 2-D output", "unsqueeze(-1)"],
        ),
        "model 4-D": (
            {"model": nn.Sequential(nn.Linear(FEATURES, 4), nn.Unflatten(1, (2, 2, 1)))},
            ValueError,
            ["model must return a 2-D output", "2, 2, 1)", "flatten it"],
        ),
        "model 3-D without a target for each position": (
            {"model": nn.Sequential(nn.Linear(FEATURES, 4), nn.Unflatten(1, (2, 2)))},
            ValueError,
            ["target has shape (16, 1)", "outputs (16, 2, 2)", "one target for each position"],
        ),
        "model returns a dict": (
            {"model": Wrapped(), "proj_dim": 2},
            TypeError,
            ["model must return a tensor", "dict", "wrap it"],
        ),
        "loader none": ({"loader": None}, TypeError, ["loader must be a torch.utils.data.DataLoader", "NoneType"]),
        "loader list": (
            {"loader": [make_tensors()]},
            TypeError,
            ["loader must be a torch.utils.data.DataLoader", "list", "pass DataLoader(dataset"],
        ),
        "loader empty": (
            {"loader": make_loader(records=0)},
            ValueError,
            ["loader is empty"],
        ),
        "loader drop_last": (
            {"loader": DataLoader(TensorDataset(*make_tensors()), batch_size=16, drop_last=True)},
            ValueError,
            ["loader has drop_last=True", "drop_last=False"],
        ),
        "loader without pairs": (
            {"loader": DataLoader(Pairless(), batch_size=4)},
            ValueError,
            ["loader must yield pairs (input, target)", "adapt the data set or the collate function"],
        ),
        "loader with triples": (
            {"loader": DataLoader(TensorDataset(*make_tensors(), make_tensors()[1]), batch_size=4)},
            ValueError,
            ["loader must yield pairs (input, target)", "got 3 items", "adapt the data set or the collate function"],
        ),
        "public_loader list": (
            {"public_loader": [1], "max_grad_norm": None},
            TypeError,
            ["public_loader must be a torch.utils.data.DataLoader", "list"],
        ),
        "public_loader drop_last": (
            {"public_loader": DataLoader(TensorDataset(*make_tensors()), batch_size=16, drop_last=True)},
            ValueError,
            ["public_loader has drop_last=True"],
        ),
        "public_loader empty": ({"public_loader": make_loader(records=0)}, ValueError, ["public_loader is empty"]),
        "target too wide": (
            {"loader": _targets(lambda y: y.expand(-1, 2))},
            ValueError,
            ["target has shape (16, 2)", "needs (16, 1)", "reshape the target"],
        ),
        "target complex": (
            {"loader": _targets(lambda y: y.to(torch.complex64))},
            ValueError,
            ["target dtype torch.complex64", "pass real numbers"],
        ),
        "target of classes for one output": (
            {"loader": _targets(lambda y: (y[:, 0] > 0).long()), "criterion": nn.CrossEntropyLoss()},
            ValueError,
            ["cross-entropy needs at least 2 outputs, the model has 1", "nn.BCEWithLogitsLoss()"],
        ),
        "target of classes too wide": (
            {
                "loader": _targets(lambda y: (y > 0).long()),
                "criterion": nn.CrossEntropyLoss(),
                "model": nn.Linear(FEATURES, 2),
            },
            ValueError,
            ["target has shape (16, 1)", "integer classes of shape (16,)"],
        ),
        "target of probabilities too narrow": (
            {"loader": _targets(lambda y: y), "criterion": nn.CrossEntropyLoss(), "model": nn.Linear(FEATURES, 2)},
            ValueError,
            ["target has shape (16, 1)", "(16, 2)"],
        ),
        "criterion text": ({"criterion": "mse"}, TypeError, ["criterion", "nn.CrossEntropyLoss()", "'mse'"]),
        "criterion without reduction": (
            {"criterion": nn.MSELoss(reduction="none")},
            ValueError,
            ["criterion has reduction='none'", "use 'mean' or 'sum'"],
        ),
        "gaussian without delta": (
            {"calibration": "gaussian", "regularization": 1.0},
            ValueError,
            ["calibration='gaussian' needs delta > 0", "delta=0.0", "use calibration='range'"],
        ),
        "gaussian without regularization": (
            {"calibration": "gaussian", "delta": 1e-5, "regularization": 0.0},
            ValueError,
            ["regularization > 0", "regularization=0.0", "use calibration='range'"],
        ),
        "iterable without nominal_size": (
            {"loader": DataLoader(Stream(), batch_size=16), "model": make_model(torch.float64)},
            ValueError,
            ["nominal_size must be given for an iterable data set"],
        ),
        "radius below the resolution": (
            {"model": _constant(torch.bfloat16), "radius": 1e-4},
            ValueError,
            ["radius=0.0001", "torch.bfloat16", "pass model.float(), or a larger radius"],
        ),
    }
    return table


def _constant(dtype):
    """A model whose parameters are all 1."""
    model = make_model(dtype)
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(1.0)
    return model


BAD = _table()


def _trace(module):
    """Everything about a module that a failed call must leave alone."""
    return (
        {name: value.clone() for name, value in module.state_dict().items()},
        {name: None if p.grad is None else p.grad.clone() for name, p in module.named_parameters()},
        {name: p.requires_grad for name, p in module.named_parameters()},
        {name: m.training for name, m in module.named_modules()},
        {name: sorted(vars(m)) for name, m in module.named_modules()},
        sum(len(m._forward_hooks) + len(m._backward_hooks) + len(m._forward_pre_hooks) for m in module.modules()),
    )


def _equal_traces(first, second):
    same_state = all(torch.equal(v.nan_to_num(), second[0][k].nan_to_num()) for k, v in first[0].items())
    same_grads = all((g is None) == (second[1][k] is None) for k, g in first[1].items()) and all(
        torch.equal(g, second[1][k]) for k, g in first[1].items() if g is not None
    )
    return same_state and same_grads and first[0].keys() == second[0].keys() and first[2:] == second[2:]


def _give_gradients(module):
    for p in module.parameters():
        p.grad = torch.full_like(p, 0.5)


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_explained_and_leaves_no_trace(name):
    changes, error, words = BAD[name]
    call = {"model": make_model(), "loader": make_loader(), "epsilon": 1.0, "radius": 0.5, "proj_dim": 5}
    call |= GOOD | changes
    model = call["model"]
    is_module = isinstance(model, nn.Module)
    if is_module:
        _give_gradients(model)
        before = _trace(model)
    used = ExpMQuadEngine()
    with pytest.raises(error) as raised:
        used.make_private_expm(**call)
    for word in words:
        assert word in str(raised.value)
    assert used.accountant.releases == []
    assert len(used.accountant) == 0
    assert used.get_epsilon(0.0) == 0.0
    if is_module:
        assert _equal_traces(before, _trace(model))


OF_A_RELEASE = {"epsilon", "radius", "regularization", "delta"}


@pytest.mark.parametrize("name", [name for name, (changes, _, _) in BAD.items() if changes.keys() <= OF_A_RELEASE])
def test_release_and_simulate_refuse_the_same(name):
    changes, error, words = BAD[name]
    statistics, used = gathered(), ExpMQuadEngine()
    call = {"epsilon": 1.0, "radius": 0.5} | changes
    with pytest.raises(error, match=re.escape(words[0])):
        used.release(statistics, **call)
    with pytest.raises(error, match=re.escape(words[0])):
        used.simulate(statistics, evaluate=lambda module: 0.0, **call)
    assert used.accountant.releases == []


@pytest.mark.parametrize("draws", [0, -1, 1.5, True])
def test_simulate_wants_a_number_of_draws(draws):
    with pytest.raises((TypeError, ValueError), match=rf"draws must be a positive integer, got {draws!r}"):
        ExpMQuadEngine().simulate(gathered(), 1.0, 0.5, lambda module: 0.0, draws=draws)


def test_simulate_wants_a_function():
    with pytest.raises(TypeError, match="evaluate must be a function from a module to a number, got 3"):
        ExpMQuadEngine().simulate(gathered(), 1.0, 0.5, 3)


@pytest.mark.parametrize("value", [None, "statistics", torch.ones(3)])
def test_release_wants_statistics(value):
    used = ExpMQuadEngine()
    with pytest.raises(TypeError, match=r"statistics must come from gather\(\), got " + type(value).__name__):
        used.release(value, 1.0, 0.5)
    assert used.accountant.releases == []


@pytest.mark.parametrize("value", ["expm", RDPAccountant(), ExpMAccountant, 1.0])
def test_engine_wants_its_own_kind_of_ledger(value):
    with pytest.raises(TypeError, match=r"accountant must be an ExpMAccountant, got .*accountant='expm'"):
        ExpMQuadEngine(accountant=value)


def test_hooks_that_cannot_serve_are_refused_if_asked_for():
    with pytest.raises(ValueError, match=r"grad_sample_mode='hooks' cannot serve this model: .*; use 'functorch'"):
        gathered(Squared(), make_loader(), proj_dim=2, grad_sample_mode="hooks")


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
        result = make_private_expm(make_model(), make_loader(), 1.0, 0.5, 5, max_grad_norm=1.0, max_curvature=1.0)
    assert not same(result, make_model())


@pytest.mark.parametrize("mode", ["hooks", "functorch"])
@pytest.mark.parametrize("training", [True, False])
def test_result_is_plain_and_the_original_untouched(training, mode):
    torch.manual_seed(0)
    model = Named().train(training)
    model.head.eval()
    _give_gradients(model)
    before = _trace(model)
    result = ExpMQuadEngine().make_private_expm(
        model, make_loader(), 5.0, 0.5, 3, grad_sample_mode=mode, **GOOD | {"max_curvature": 0.1}
    )
    assert _equal_traces(before, _trace(model))
    assert type(result) is Named
    assert result is not model
    assert list(result.state_dict()) == list(model.state_dict())
    # No hooks, no attributes of anybody's, no gradients, the same modes and flags.
    after = _trace(result)
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
@pytest.mark.parametrize(("projection", "proj_dim"), [("stiefel", 5), ("sparse", 5), ("stiefel", None), ("stiefel", 1)])
def test_parameters_stay_in_the_ball_and_in_the_subspace(projection, proj_dim, epsilon):
    model, radius = make_model(torch.float64), 0.3
    statistics = gathered(model, proj_dim=proj_dim, projection=projection)
    dim = PARAMETERS if proj_dim is None else proj_dim
    columns = torch.stack([statistics.projection.lift(e) for e in torch.eye(dim, dtype=torch.float64)], dim=1)
    torch.testing.assert_close(columns.T @ columns, torch.eye(dim, dtype=torch.float64), rtol=0, atol=1e-12)
    for seed in range(5):
        generator = np.random.default_rng(seed)
        result = ExpMQuadEngine().release(statistics, epsilon, radius, noise_generator=generator)
        update = flat(result) - flat(model)
        assert 0 < float(torch.linalg.vector_norm(update)) <= radius * (1 + 1e-6)
        outside = update - columns @ (columns.T @ update)
        assert float(torch.linalg.vector_norm(outside)) <= 1e-12


def test_float32_parameters_stay_in_the_ball():
    model = make_model()
    statistics = gathered(model, make_loader(), max_grad_norm=10.0)
    for seed in range(10):
        result = ExpMQuadEngine().release(statistics, 1e4, 3.0, noise_generator=np.random.default_rng(seed))
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
    before = _trace(model)
    whole = gathered(model, make_loader(torch.float64, batch_size=40), grad_sample_mode=mode)
    single = gathered(model, make_loader(torch.float64, batch_size=1), grad_sample_mode=mode)
    torch.testing.assert_close(whole.sums.gradient, single.sums.gradient, rtol=1e-10, atol=1e-12)
    assert _equal_traces(before, _trace(model))
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


# --- Randomness ------------------------------------------------------------------------------------------------------


def _seed_everything():
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)


def test_global_seeds_do_not_fix_the_noise():
    statistics = gathered()
    results = []
    for _ in range(2):
        _seed_everything()
        results.append(ExpMQuadEngine().release(statistics, 1.0, 0.5))
    assert not same(*results)


def test_global_seeds_fix_neither_noise_nor_subspace_of_a_whole_call():
    engines = [ExpMQuadEngine(), ExpMQuadEngine()]
    results = []
    for used in engines:
        _seed_everything()
        options = GOOD | {"projection_seed": None}
        results.append(used.make_private_expm(make_model(), make_loader(), 1.0, 0.5, 5, **options))
    assert not same(*results)
    first, second = (used.accountant.releases[0].seed for used in engines)
    assert first != second


def test_noise_does_not_advance_the_global_generators():
    statistics = gathered()
    _seed_everything()
    before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    ExpMQuadEngine().release(statistics, 1.0, 0.5)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.random.get_state()[1].tolist() == before[1]
    assert random.getstate() == before[2]


@pytest.mark.parametrize("make", [lambda: torch.Generator().manual_seed(5), lambda: np.random.default_rng(5)])
def test_an_explicit_generator_fixes_the_noise(make):
    statistics, used = gathered(), ExpMQuadEngine()
    generator = make()
    first = used.release(statistics, 1.0, 0.5, noise_generator=generator)
    second = used.release(statistics, 1.0, 0.5, noise_generator=generator)
    again = used.release(statistics, 1.0, 0.5, noise_generator=make())
    assert not same(first, second)
    assert same(first, again)
    assert used.get_epsilon() == 3.0


class Mine:
    """A sampler of the user's own."""

    def sample(self, density, generator, draws=1):
        return np.zeros((draws, density.dim))


class FromExact(Exact):
    """Whatever it draws, it is not the sampler that was proved exact."""


@pytest.mark.parametrize(
    ("sampler", "name"),
    [
        ("exact", "exact"),
        (Exact(), "exact"),
        ("rejection", "plainrejection"),
        (Mine(), "mine"),
        (FromExact(), "fromexact"),
        (type("Exact", (Mine,), {})(), "custom"),
        (type("Secure", (Mine,), {})(), "custom"),
        (type("EXACT", (FromExact,), {})(), "custom"),
    ],
)
def test_only_the_exact_sampler_is_recorded_as_exact(sampler, name):
    used = ExpMQuadEngine()
    used.release(gathered(), 1.0, 0.5, regularization=1e6, sampler=sampler)
    assert used.accountant.releases[0].sampler == name
    if name == "exact":
        assert used.get_epsilon() == 1.0
    else:
        with pytest.raises(NoGuarantee, match="is not known to draw exactly"):
            used.get_epsilon()


def test_a_given_generator_is_recorded_and_said():
    used = ExpMQuadEngine()
    options = {name: value for name, value in GOOD.items() if name != "max_grad_norm"}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="a private bound for epsilon")
        used.make_private_expm(
            make_model(), make_loader(), 1.0, 0.5, 5, noise_generator=np.random.default_rng(0), **options
        )
    assert [(type(e).__name__, e.noise) for e in used.accountant.releases] == [
        ("Purchase", "given"),
        ("Release", "given"),
    ]
    with pytest.warns(NotGuaranteed, match=r"^2 of 2 draws in this ledger took their noise from a given") as said:
        used.get_epsilon()
    assert said[0].filename == __file__
    other = ExpMQuadEngine()
    other.make_private_expm(make_model(), make_loader(), 1.0, 0.5, 5, **GOOD)
    assert [e.noise for e in other.accountant.releases] == ["system"]


def test_secure_mode_has_no_use_for_a_generator():
    used = ExpMQuadEngine(secure_mode=True)
    drawn = [
        used.release(gathered(projection_seed=1), 1.0, 0.5, noise_generator=np.random.default_rng(0)) for _ in "12"
    ]
    assert [e.noise for e in used.accountant.releases] == ["system", "system"]
    assert not same(*drawn)


@pytest.mark.parametrize(
    "uncovered", [{"noise_generator": np.random.default_rng(0)}, {"sampler": "gibbs"}, {"sampler": Mine()}], ids=str
)
def test_a_budget_refuses_what_epsilon_does_not_cover_before_any_data_is_touched(uncovered):
    class Untouched(Dataset):
        def __len__(self):
            return RECORDS

        def __getitem__(self, _):
            raise AssertionError("the data was touched")

    used, loader = ExpMQuadEngine(budget=(5.0, 0.0)), DataLoader(Untouched(), batch_size=8)
    with pytest.raises(NoGuarantee):
        used.make_private_expm(make_model(), loader, 1.0, 0.5, 5, **GOOD, **uncovered)
    with pytest.raises(NoGuarantee):
        used.release(gathered(), 1.0, 0.5, **uncovered)
    if "noise_generator" in uncovered:
        with pytest.raises(NoGuarantee, match="noise_generator cannot be used with a budget"):
            used.gather(make_model(), loader, 5, criterion=GOOD["criterion"], epsilon=1.0, **uncovered)
    assert len(used.accountant) == 0
    used.release(gathered(), 1.0, 0.5)
    assert used.remaining() == 4.0


@pytest.mark.parametrize("make", [lambda: torch.Generator().manual_seed(5), lambda: np.random.default_rng(5)])
def test_one_call_and_two_steps_draw_the_same(make):
    model, loader = make_model(torch.float64), make_loader(torch.float64)
    whole = ExpMQuadEngine().make_private_expm(model, loader, 1.0, 0.5, 5, noise_generator=make(), **GOOD)
    steps = ExpMQuadEngine().release(gathered(model, loader), 1.0, 0.5, noise_generator=make())
    assert same(whole, steps)


def test_projection_seed_fixes_the_subspace():
    first, again, other = (gathered(projection_seed=seed).projection.matrix for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.allclose(first, other)


# --- One pass, many releases -----------------------------------------------------------------------------------------


class Counted(Dataset):
    """Counts how often records are read."""

    def __init__(self):
        self.tensors, self.reads = make_tensors(torch.float64), 0

    def __len__(self):
        return RECORDS

    def __getitem__(self, index):
        self.reads += 1
        return tuple(t[index] for t in self.tensors)


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
    first = ExpMQuadEngine().release(statistics, 1.0, 0.5, noise_generator=np.random.default_rng(0))
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    second = ExpMQuadEngine().release(statistics, 1.0, 0.5, noise_generator=np.random.default_rng(0))
    assert same(first, second)


class Broken(np.random.Generator):
    """A generator that fails in the middle of a draw."""

    def standard_normal(self, *arguments, **options):
        raise KeyboardInterrupt

    random = normal = uniform = standard_normal


def test_ledger_is_charged_before_the_draw():
    used, statistics = ExpMQuadEngine(), gathered()
    with pytest.raises(KeyboardInterrupt):
        used.release(statistics, 1.5, 0.5, noise_generator=Broken(np.random.PCG64(0)))
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


def test_simulation_warns_and_charges_nothing():
    used, statistics = ExpMQuadEngine(), gathered()
    start = flat(statistics.module)

    def distance(module):
        return float(torch.linalg.vector_norm(flat(module) - start))

    with pytest.warns(UserWarning, match="NOT releases: nothing is charged"):
        values = used.simulate(statistics, 1.0, 0.5, distance, draws=25, noise_generator=np.random.default_rng(0))
    assert values.shape == (25,)
    assert len(set(values.tolist())) == 25
    assert 0 < values.min() <= values.max() <= 0.5 * (1 + 1e-6)
    assert used.accountant.releases == []
    assert used.get_epsilon() == 0.0


def test_simulation_has_the_law_of_a_release():
    """Along the gradient: means of 100 simulated draws and of 100 releases."""
    statistics, used = gathered(), ExpMQuadEngine()
    start, direction = flat(statistics.module), statistics.projection.lift(statistics.sums.gradient)

    def along(module):
        return float((flat(module) - start) @ direction / torch.linalg.vector_norm(direction))

    with pytest.warns(UserWarning, match="NOT releases"):
        simulated = used.simulate(statistics, 0.3, 0.5, along, draws=100, noise_generator=np.random.default_rng(1))
    generator = np.random.default_rng(2)
    released = np.array([along(used.release(statistics, 0.3, 0.5, noise_generator=generator)) for _ in range(100)])
    spread = math.hypot(simulated.std(), released.std()) / math.sqrt(100)
    assert abs(simulated.mean() - released.mean()) < 4 * spread
    assert simulated.mean() < -5 * spread  # downhill


# --- What a release costs --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("calibration", ["auto", "range"])
@pytest.mark.parametrize("regularization", [0.0, 2.0])
@pytest.mark.parametrize("epsilon", [1e-3, 0.1, 1 / 3, 1.0, 3.7, 50.0])
def test_pure_budget_is_spent_exactly(epsilon, regularization, calibration):
    used = ExpMQuadEngine()
    used.release(gathered(), epsilon, 0.5, regularization=regularization, calibration=calibration)
    assert used.get_epsilon(0.0) == epsilon
    assert used.get_epsilon() == epsilon


def test_paper_calibration_spends_no_more_than_asked_for():
    used = ExpMQuadEngine()
    used.release(gathered(), 2.0, 0.5, calibration="paper")
    assert 0 < used.get_epsilon(0.0) <= 1.0  # half, under add/remove
    assert used.accountant.releases[0].calibration == "paper"


@pytest.mark.parametrize(
    ("calibration", "regularization", "method"),
    [("range", 0.0, "range"), ("auto", 0.0, "range"), ("gaussian", 100.0, "gaussian"), ("auto", 100.0, "gaussian")],
)
@pytest.mark.parametrize("delta", [1e-8, 1e-5, 1e-2])
@pytest.mark.parametrize("epsilon", [0.1, 1.0, 5.0])
def test_approximate_budget_is_spent_on_the_private_side(epsilon, delta, calibration, regularization, method):
    used = ExpMQuadEngine()
    used.release(gathered(), epsilon, 0.5, delta=delta, regularization=regularization, calibration=calibration)
    assert used.accountant.releases[0].calibration == method
    assert epsilon - 1e-6 <= used.get_epsilon(delta) <= epsilon


def test_delta_allows_more_than_the_pure_budget():
    used = ExpMQuadEngine()
    used.release(gathered(), 1.0, 0.5, delta=1e-5)
    assert used.get_epsilon(0.0) > 1.0


@pytest.mark.parametrize("first", ["add_remove", "replace_one"])
def test_adjacency_is_recorded_and_not_mixed(first):
    other = {"add_remove": "replace_one", "replace_one": "add_remove"}[first]
    used, statistics = ExpMQuadEngine(), gathered()
    used.release(statistics, 1.0, 0.5, adjacency=first)
    assert used.accountant.releases[0].adjacency == first
    records = Counted()
    with pytest.raises(ValueError, match=f"adjacency='{other}' cannot be added to a ledger that counts '{first}'"):
        used.make_private_expm(
            make_model(torch.float64), DataLoader(records, batch_size=16), 1.0, 0.5, 5, adjacency=other, **GOOD
        )
    assert records.reads == 0  # refused before the pass
    with pytest.raises(ValueError, match="use a ledger"):
        used.release(statistics, 1.0, 0.5, adjacency=other)
    assert used.get_epsilon() == 1.0


def test_replacing_needs_twice_the_budget():
    """The same density, hence the same draw, at 2ε under replace-one as at ε under add/remove."""
    statistics = gathered()
    options = {"radius": 0.5, "calibration": "range"}
    draws = [
        ExpMQuadEngine().release(statistics, e, adjacency=a, noise_generator=np.random.default_rng(0), **options)
        for e, a in ((1.0, "add_remove"), (2.0, "replace_one"), (1.0, "replace_one"))
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
        statistics = gathered(loader=make_loader(torch.float64, seed=seed), projection_seed=9)
        used.release(statistics, 1.0, 0.5, delta=1e-6, regularization=2.0)
        recorded.append(used.accountant.releases[0])
    assert recorded[0] == recorded[1]
    assert set(dataclasses.asdict(recorded[0])) == {f.name for f in dataclasses.fields(Release)} == PUBLIC_FIELDS
    found = recorded[0]
    assert (found.epsilon, found.delta, found.radius, found.regularization) == (1.0, 1e-6, 0.5, 2.0)
    assert (found.nominal_size, found.max_grad_norm, found.max_curvature) == (RECORDS, 1.0, 1.0)
    assert (found.projection, found.proj_dim, found.seed) == ("stiefel", 5, 9)
    assert (found.sampler, found.failure_probability, found.noise) == ("exact", 0.0, "system")
    assert (found.bounds, found.round, found.rounds) == ("given", 1, 1)


def test_the_full_space_has_no_seed():
    used = ExpMQuadEngine()
    used.release(gathered(proj_dim=None), 1.0, 0.5)
    found = used.accountant.releases[0]
    assert (found.projection, found.proj_dim, found.seed) == ("full", PARAMETERS, None)


# --- Statistics are not shown ----------------------------------------------------------------------------------------


def test_statistics_show_shapes_only():
    shown = [repr(gathered(loader=make_loader(torch.float64, seed=seed))) for seed in (0, 1)]
    assert (
        shown[0]
        == shown[1]
        == (
            f"Statistics(parameters={PARAMETERS}, projection='stiefel', nominal_size={RECORDS}, "
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


# --- Size and bounds -------------------------------------------------------------------------------------------------


def test_nominal_size_is_used_and_recorded():
    """λN enters as a product: (λ, N) = (2, 50) and (0.5, 200) give the same draw, (2, 200) another."""
    draws = []
    for regularization, size in ((2.0, 50), (0.5, 200), (2.0, 200)):
        used = ExpMQuadEngine()
        draws.append(
            used.make_private_expm(
                make_model(torch.float64),
                make_loader(torch.float64),
                1.0,
                0.5,
                5,
                nominal_size=size,
                regularization=regularization,
                noise_generator=np.random.default_rng(0),
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
    options = {"public_loader": public, "max_grad_norm": None, "max_curvature": None}
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
        (_frozen(), None, ValueError, "no trainable parameter"),
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


def test_module_level_function_is_the_method():
    function, method = inspect.signature(make_private_expm), inspect.signature(ExpMQuadEngine.make_private_expm)
    assert list(function.parameters.values()) == list(method.parameters.values())[1:]
    options = GOOD | {"delta": 1e-6, "regularization": 3.0, "nominal_size": 100, "projection": "sparse"}
    call = (make_model(torch.float64), make_loader(torch.float64), 2.0, 0.4, 6)
    first = make_private_expm(*call, noise_generator=np.random.default_rng(1), **options)
    second = ExpMQuadEngine().make_private_expm(*call, noise_generator=np.random.default_rng(1), **options)
    assert same(first, second)
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
        used.release(gathered(), 0.5, 0.5, adjacency="replace_one")


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
        used = ExpMQuadEngine()
        statistics = used.gather(
            task.model,
            DataLoader(task.private, batch_size=500),
            20,
            criterion=task.criterion,
            public_loader=DataLoader(task.public, batch_size=500),
            projection_seed=seed,
        )
        with pytest.warns(UserWarning, match="NOT releases"):
            losses = used.simulate(
                change(statistics),
                1.0,
                0.1,
                lambda module: tasks.loss(module, task.test, task.criterion),
                draws=20,
                noise_generator=np.random.default_rng(seed),
            )
        found.append(float(losses.mean()))
    return found


def test_sine_regression_improves(sine):
    zero_shot = tasks.loss(sine.model, sine.test, sine.criterion)
    assert zero_shot < 0.1
    assert max(_mean_losses(sine)) < zero_shot


def test_sine_regression_does_not_improve_uphill(sine):
    zero_shot = tasks.loss(sine.model, sine.test, sine.criterion)

    def uphill(statistics):
        return dataclasses.replace(
            statistics, sums=dataclasses.replace(statistics.sums, gradient=-statistics.sums.gradient)
        )

    assert min(_mean_losses(sine, uphill)) > zero_shot
