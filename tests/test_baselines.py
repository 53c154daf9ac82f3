"""The methods beside ours: DP-SGD spends its budget, clips and learns; training without privacy learns."""

import math

import pytest
import torch
from opacus.validators.errors import UnsupportedModuleError
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from opacus_expm.baselines import calibrated_noise, dp_sgd, noisy_sgd, non_private
from opacus_expm.mechanism import curves

DELTA = 1e-5
SETTINGS = {"epsilon": 2.0, "delta": DELTA, "learning_rate": 0.1, "max_grad_norm": 1.0, "batch_size": 100, "epochs": 3}


def regression(slope, records=100, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(records, 5, generator=generator)
    return TensorDataset(x, slope * x[:, :1] + 0.1 * torch.randn(records, 1, generator=generator))


def linear():
    model = nn.Linear(5, 1)
    with torch.no_grad():
        model.weight.copy_(torch.eye(1, 5))
        model.bias.zero_()
    return model


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.filterwarnings("ignore:Optimal order")  # the accountant's, when asked below
@pytest.mark.parametrize(("epsilon", "batch_size", "epochs"), [(0.1, 10, 2), (1.0, 10, 2), (8.0, 34, 3)])
def test_dp_sgd_spends_the_budget(engines, epsilon, batch_size, epochs):
    options = {**SETTINGS, "epsilon": epsilon, "batch_size": batch_size, "epochs": epochs}
    dp_sgd(linear(), regression(1.6), nn.MSELoss(), **options, seed=0)
    (engine,) = engines
    ((_, rate, steps),) = engine.accountant.history
    assert rate == 1 / math.ceil(100 / batch_size)
    assert steps == epochs * math.ceil(100 / batch_size)
    spent = engine.accountant.get_epsilon(DELTA, eps_error=0.01 * min(epsilon, 1))
    assert 0.995 * epsilon < spent <= epsilon


@pytest.mark.parametrize("batch_size", [100, 1000])
def test_dp_sgd_on_whole_batches_is_a_gaussian_mechanism(engines, batch_size):
    dp_sgd(linear(), regression(1.6), nn.MSELoss(), **{**SETTINGS, "batch_size": batch_size, "epochs": 7}, seed=0)
    ((sigma, rate, steps),) = engines[0].accountant.history
    assert (rate, steps) == (1.0, 7)
    assert curves.gaussian_epsilon(math.sqrt(7) / sigma, DELTA) == pytest.approx(SETTINGS["epsilon"], rel=1e-9)


def test_dp_sgd_noise_has_the_calibrated_size(engines):
    """One step from a zero gradient moves every weight by noise alone."""
    model = nn.Linear(4000, 1, bias=False)
    nn.init.zeros_(model.weight)
    x = torch.randn(50, 4000)
    options = {**SETTINGS, "epochs": 1, "momentum": 0.0, "learning_rate": 0.5, "max_grad_norm": 3.0}
    moved = dp_sgd(model, TensorDataset(x, torch.zeros(50, 1)), nn.MSELoss(), **options, seed=0)
    ((sigma, _, _),) = engines[0].accountant.history
    expected = 0.5 * 3.0 * sigma / 50
    assert weights(moved).std().item() == pytest.approx(expected, rel=0.05)
    assert weights(moved).std().item() != pytest.approx(2 * expected, rel=0.05)


def test_dp_sgd_returns_a_plain_module():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(5, 3), nn.Linear(3, 1)
            self.first.requires_grad_(False)

        def forward(self, x):
            return self.last(torch.relu(self.first(x)))

    model = Net().eval()
    before = weights(model)
    private = dp_sgd(model, regression(1.6), nn.MSELoss(), **SETTINGS, seed=0)
    assert type(private) is Net
    assert not private.training
    assert list(private.state_dict()) == list(model.state_dict())
    assert not any(m._forward_hooks or m._backward_hooks or m._forward_pre_hooks for m in private.modules())
    assert not any(hasattr(p, "grad_sample") for p in [*private.parameters(), *model.parameters()])
    assert torch.equal(weights(model), before)
    assert torch.equal(private.first.weight, model.first.weight)
    assert not private.first.weight.requires_grad
    assert not torch.equal(private.last.weight, model.last.weight)


def test_dp_sgd_is_fixed_by_its_seed():
    first, again, other, fresh = (
        weights(dp_sgd(linear(), regression(1.6), nn.MSELoss(), **SETTINGS, seed=seed)) for seed in (1, 1, 2, None)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert not any(torch.equal(fresh, known) for known in (first, other))


@pytest.mark.parametrize("seed", [0, None])
def test_training_leaves_the_global_generator_alone(seed):
    model, data = linear(), regression(1.6)
    state = torch.get_rng_state()
    dp_sgd(model, data, nn.MSELoss(), **SETTINGS, seed=seed)
    non_private(model, data, nn.MSELoss(), learning_rate=0.1, batch_size=10, epochs=1, seed=seed)
    assert torch.equal(torch.get_rng_state(), state)


def test_dp_sgd_survives_empty_batches(engines):
    data = regression(1.6, 20)
    sizes = []
    model = nn.Sequential(linear(), nn.Identity())
    model[1].register_forward_hook(lambda m, inputs, output: sizes.append(len(output)))
    private = dp_sgd(model, data, nn.MSELoss(), **{**SETTINGS, "batch_size": 1, "epochs": 2}, seed=0)
    assert engines[0].accountant.history[0][2] == 40
    assert len(sizes) < 40  # the others were empty: a third of them in expectation
    assert torch.isfinite(weights(private)).all()


def test_dp_sgd_in_pieces_is_dp_sgd_on_whole_batches():
    whole, pieces = (
        weights(dp_sgd(linear(), regression(1.6), nn.MSELoss(), **SETTINGS, max_physical_batch_size=size, seed=0))
        for size in (100, 7)
    )
    assert torch.allclose(whole, pieces, atol=1e-6)


def test_dp_sgd_is_noisy_sgd_with_its_own_noise():
    options = {name: value for name, value in SETTINGS.items() if name not in ("epsilon", "delta")}
    noise = calibrated_noise(SETTINGS["epsilon"], DELTA, 1, SETTINGS["epochs"])
    whole = weights(dp_sgd(linear(), regression(1.6), nn.MSELoss(), **SETTINGS, seed=0))
    given = {
        scale: weights(noisy_sgd(linear(), regression(1.6), nn.MSELoss(), **options, noise_multiplier=n, seed=0))
        for scale, n in (("own", noise), ("twice", 2 * noise))
    }
    assert torch.equal(given["own"], whole)
    assert not torch.allclose(given["twice"], whole, rtol=0.01)


def test_the_optimizer_of_noisy_sgd_can_be_changed():
    """One that takes no step leaves the model as it was; it was given Opacus's own two."""
    seen = []

    def still(module, optimizer):
        seen.append((type(module).__name__, type(optimizer).__name__))
        optimizer.original_optimizer.param_groups[0]["lr"] = 0.0
        return optimizer

    options = {name: value for name, value in SETTINGS.items() if name not in ("epsilon", "delta")}
    found = noisy_sgd(linear(), regression(1.6), nn.MSELoss(), **options, noise_multiplier=1.0, seed=0, changed=still)
    assert torch.equal(weights(found), weights(linear()))
    assert seen == [("GradSampleModule", "DPOptimizer")]


def test_dp_sgd_learns_and_clips():
    data = regression(1.6, 1000)
    options = {**SETTINGS, "epsilon": 100.0, "batch_size": 1000, "epochs": 40}
    learnt = dp_sgd(linear(), data, nn.MSELoss(), **options, seed=0)
    assert learnt.weight[0, 0].item() == pytest.approx(1.6, abs=0.05)
    held_back = dp_sgd(linear(), data, nn.MSELoss(), **{**options, "max_grad_norm": 1e-3}, seed=0)
    assert held_back.weight[0, 0].item() < 1.1


def test_dp_sgd_takes_any_data_set_of_pairs():
    class Pairs(Dataset):
        def __len__(self):
            return 100

        def __getitem__(self, index):
            return data[index]

    data = regression(1.6)
    results = [weights(dp_sgd(linear(), d, nn.MSELoss(), **SETTINGS, seed=0)) for d in (data, Pairs())]
    assert torch.equal(*results)


def test_layers_that_opacus_refuses_are_refused():
    model = nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    with pytest.raises(UnsupportedModuleError, match="BatchNorm"):
        dp_sgd(model, regression(1.6), nn.MSELoss(), **SETTINGS)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"epsilon": 0.0}, ValueError, "epsilon must be greater than 0"),
        ({"delta": 0.0}, ValueError, "delta must be greater than 0 for DP-SGD"),
        ({"delta": 1.0}, ValueError, "delta must be in"),
        ({"learning_rate": -1.0}, ValueError, "learning_rate must be greater than 0"),
        ({"max_grad_norm": 0}, ValueError, "max_grad_norm must be greater than 0"),
        ({"batch_size": 0.5}, TypeError, "batch_size must be a positive integer"),
        ({"epochs": 0}, ValueError, "epochs must be a positive integer"),
        ({"momentum": 1.0}, ValueError, "momentum must be in"),
        ({"seed": -1}, ValueError, "seed must be a non-negative integer"),
        ({"max_physical_batch_size": 0}, ValueError, "max_physical_batch_size must be a positive integer"),
        ({"criterion": nn.MSELoss(reduction="sum")}, ValueError, "criterion must average over the batch"),
        ({"criterion": "mse"}, TypeError, "criterion must be a loss function"),
        ({"dataset": 3}, TypeError, "dataset must be a data set of pairs"),
        ({"dataset": TensorDataset(torch.ones(3, 5))}, ValueError, "dataset must hold at least one pair"),
        ({"dataset": []}, ValueError, "dataset must hold at least one pair"),
        ({"model": "linear"}, TypeError, "model must be a torch.nn.Module"),
    ],
)
def test_dp_sgd_names_what_is_wrong(change, error, message):
    arguments = {"model": linear(), "dataset": regression(1.6), "criterion": nn.MSELoss(), **SETTINGS, **change}
    with pytest.raises(error, match=message):
        dp_sgd(**arguments)


def test_non_private_training_finds_the_slope():
    model = linear()
    data = regression(1.6, 300)
    first, again = (
        non_private(model, data, nn.MSELoss(), learning_rate=0.1, batch_size=50, epochs=20, seed=0) for _ in range(2)
    )
    assert torch.equal(weights(first), weights(again))
    assert first.weight[0, 0].item() == pytest.approx(1.6, abs=0.05)
    assert model.weight[0, 0].item() == 1.0
    assert type(first) is nn.Linear
