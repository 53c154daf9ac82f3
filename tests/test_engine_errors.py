"""Bad input to the engine is explained, and leaves no trace."""

import math
import re

import pytest
import torch
from opacus.accountants import RDPAccountant
from small_problem import (
    FEATURES,
    GOOD,
    PARAMETERS,
    Squared,
    Stream,
    equal_traces,
    gathered,
    give_gradients,
    make_loader,
    make_model,
    make_tensors,
    trace,
)
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from opacus_expm import ExpMAccountant, ExpMQuadEngine, GradSampling, Sparse, Stiefel, Structured
from opacus_expm.subspaces.sparse import SparseMap

CPU = torch.device("cpu")


class Pairless(Dataset):
    """Records without a target."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.ones(FEATURES)


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
    for argument in ("epsilon", "radius", "max_grad_norm"):
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
    # Without a radius the rounds are learned, and the other arguments of this table have no meaning.
    table["radius none"] = ({"radius": None}, ValueError, ["proj_dim", "no meaning without radius=", "leave it out"])
    for argument in ("proj_dim", "nominal_size", "max_physical_batch_size", "rounds"):
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
        "projection": ("sparse", "structured", "stiefel"),
        "grad_sample_mode": ("hooks", "functorch"),
    }.items():
        for value in ("unknown", 3, "Hooks", "public"):
            error = TypeError if argument == "projection" and value == 3 else ValueError  # may also be an object
            words = [f"{argument} must be one of", *map(repr, known), f"got {value!r}"]
            table[f"{argument} {value!r}"] = ({argument: value}, error, words)
    for name, value in {"a class": Sparse, "a map": SparseMap.generate(21, 5, 0, CPU, torch.float32)}.items():
        words = ["projection must be one of", "or a subspace such as Sparse(seed=0)", repr(value)]
        table[f"projection {name}"] = ({"projection": value}, TypeError, words)
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
        "model scripted": (
            {"model": torch.jit.script(make_model())},
            ValueError,
            ["model comes from torch.jit.script or torch.jit.trace", "pass the module as it was before"],
        ),
        "model scripted in part": (
            {"model": nn.Sequential(nn.Tanh(), torch.jit.script(nn.Linear(FEATURES, 1)))},
            ValueError,
            ["layer '1' of model comes from torch.jit.script", "or freeze"],
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


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_explained_and_leaves_notrace(name):
    changes, error, words = BAD[name]
    call = {"model": make_model(), "loader": make_loader(), "epsilon": 1.0, "radius": 0.5, "proj_dim": 5}
    call |= GOOD | changes
    model = call["model"]
    is_module = isinstance(model, nn.Module)
    if is_module:
        give_gradients(model)
        before = trace(model)
    used = ExpMQuadEngine()
    with pytest.raises(error) as raised:
        used.make_private_expm(**call)
    for word in words:
        assert word in str(raised.value)
    assert used.accountant.releases == []
    assert len(used.accountant) == 0
    assert used.get_epsilon(0.0) == 0.0
    if is_module:
        assert equal_traces(before, trace(model))


OF_A_RELEASE = {"epsilon", "radius", "regularization", "delta"}


SAME = [name for name, (changes, _, _) in BAD.items() if changes.keys() <= OF_A_RELEASE and name != "radius none"]


@pytest.mark.parametrize("name", [*SAME, "no radius"])
def test_release_and_simulate_refuse_the_same(name):
    changes, error, words = BAD.get(name, ({"radius": None}, TypeError, ["radius must be a number"]))
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


def _images(classes):
    """A network for images of 8 × 8 whose last layer has an input size that fits, or does not."""
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(classes, 2))


@pytest.mark.parametrize(
    "call", [{"radius": 0.1, "max_grad_norm": 1.0, "max_curvature": 0.0}, {"delta": 1e-5}], ids=["radius", "learned"]
)
@pytest.mark.parametrize(
    ("model", "inputs", "layer", "words"),
    [
        (
            nn.Sequential(nn.Linear(5, 2)),
            torch.ones(20, 3),
            "'0' (Linear)",
            "mat1 and mat2 shapes cannot be multiplied",
        ),
        (nn.Sequential(nn.Linear(3, 2)), torch.ones(20, 3).long(), "'0' (Linear)", "must have the same dtype"),
        (nn.Sequential(nn.Embedding(3, 2)), torch.ones(20), "'0' (Embedding)", "argument #1 'indices'"),
        (_images(10), torch.ones(20, 1, 8, 8), "'2' (Linear)", "(2x72 and 10x2)"),
    ],
    ids=["size", "dtype", "indices", "inside"],
)
def test_errors_of_the_model_itself_are_told_as_pytorch_tells_them(model, inputs, layer, words, call):
    loader = DataLoader(TensorDataset(inputs, torch.zeros(20).long()), batch_size=10)
    used = ExpMQuadEngine()
    with pytest.raises(ValueError, match=r"^model fails on inputs of the loader's kind, in layer ") as raised:
        used.make_private_expm(model, loader, 1.0, criterion=nn.CrossEntropyLoss(), **call)
    assert words in str(raised.value)
    assert layer in str(raised.value)
    assert "freeze" not in str(raised.value)
    assert isinstance(raised.value.__cause__, RuntimeError)
    assert len(used.accountant) == 0


class _Rounded(torch.autograd.Function):
    """Has a forward pass only."""

    @staticmethod
    def forward(ctx, x):
        return x.round()


class Rounding(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(FEATURES, 1)

    def forward(self, x):
        return _Rounded.apply(self.layer(x))


def test_a_model_that_only_cannot_be_differentiated_is_told_so():
    with pytest.raises(ValueError, match=r"model cannot be differentiated: .*; freeze that layer"):
        gathered(Rounding().double(), proj_dim=2, grad_sample_mode="functorch")


@pytest.mark.parametrize("value", [None, "statistics", torch.ones(3)])
def test_release_wants_statistics(value):
    used = ExpMQuadEngine()
    with pytest.raises(TypeError, match=r"statistics must come from gather\(\), got " + type(value).__name__):
        used.release(value, 1.0, 0.5)
    assert used.accountant.releases == []


@pytest.mark.parametrize("value", ["rdp", RDPAccountant(), ExpMAccountant, 1.0])
def test_engine_wants_its_own_kind_of_ledger(value):
    with pytest.raises(TypeError, match=r"accountant must be 'expm' or an ExpMAccountant, got .*accountant='expm'"):
        ExpMQuadEngine(accountant=value)


@pytest.mark.parametrize("value", ["unknown", 3, "Add_remove", None])
def test_engine_wants_a_known_adjacency(value):
    with pytest.raises(ValueError, match=r"adjacency must be one of 'add_remove', 'replace_one', got ") as raised:
        ExpMQuadEngine(adjacency=value)
    assert repr(value) in str(raised.value)


@pytest.mark.parametrize("option", [{"budget": (1.0, 0.0)}, {"ledger_path": "ledger.jsonl"}], ids=str)
def test_a_given_ledger_has_its_own_budget_and_file(option):
    with pytest.raises(ValueError, match=r"pass budget and ledger_path to ExpMAccountant\(...\) instead"):
        ExpMQuadEngine(accountant=ExpMAccountant(), **option)


def test_a_loop_takes_no_generator_of_its_own():
    """Opacus has the argument; here the noise belongs to the engine, and the ledger says where it came from."""
    model, used = make_model(), ExpMQuadEngine()
    with pytest.raises(ValueError, match=r"noise_generator belongs to the engine: ExpMQuadEngine\(noise_generator="):
        used.make_private_with_epsilon(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            criterion=nn.MSELoss(),
            data_loader=make_loader(),
            target_epsilon=1.0,
            target_delta=0.0,
            epochs=1,
            max_grad_norm=1.0,
            radius=0.5,
            proj_dim=5,
            noise_generator=torch.Generator().manual_seed(0),
        )
    assert len(used.accountant) == 0


def test_hooks_that_cannot_serve_are_refused_if_asked_for():
    with pytest.raises(ValueError, match=r"grad_sample_mode='hooks' cannot serve this model: .*; use 'functorch'"):
        gathered(Squared(), make_loader(), proj_dim=2, grad_sample_mode="hooks")


# --- Settings that are objects ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [-1, 1.5, "x", True])
@pytest.mark.parametrize("recipe", [Sparse, Structured, Stiefel])
def test_a_seed_is_a_number(recipe, value):
    with pytest.raises((TypeError, ValueError), match=f"seed must be a non-negative integer or None, got {value!r}"):
        recipe(seed=value)


@pytest.mark.parametrize("value", [0, -1, 1.5, "x", True, 2.0])
def test_numbers_of_probes_are_positive(value):
    with pytest.raises((TypeError, ValueError), match=f"probes must be a positive integer, got {value!r}"):
        GradSampling(probes=value)


@pytest.mark.parametrize("value", ["unknown", 3, "Hooks"])
def test_a_mode_is_known(value):
    with pytest.raises(ValueError, match=f"grad_sample_mode must be one of 'hooks', 'functorch', got {value!r}"):
        GradSampling(value)
