"""What Opacus's users do before they come: wrapped modules, accountants by name, orders of Rényi."""

import opacus
import pytest
import torch
from opacus import GradSampleModule
from opacus.grad_sample import GradSampleModuleFastGradientClipping
from small_problem import GOOD, flat, gathered, make_loader, make_model, make_tensors
from torch import nn

from opacus_expm import ExpMAccountant, ExpMQuadEngine
from opacus_expm.gathering.model import check_module, standard

pytestmark = [
    pytest.mark.filterwarnings("ignore:Secure RNG turned off"),  # Opacus's own
    pytest.mark.filterwarnings("ignore:Full backward hook is firing"),
]


@pytest.fixture(params=["hooks", "ghost"])
def wrapped(request):
    """A module that Opacus has prepared, with a batch's traces in it."""
    kinds = {"hooks": GradSampleModule, "ghost": lambda m: GradSampleModuleFastGradientClipping(m, max_grad_norm=1.0)}
    module = kinds[request.param](make_model(torch.float64))
    x, y = make_tensors(torch.float64)
    nn.functional.mse_loss(module(x), y).backward()
    module(x)  # whose activations stay, as no backward pass takes them
    return module


def test_the_module_inside_is_released_and_the_wrapped_one_is_as_it_was(wrapped):
    before, traces = flat(wrapped).clone(), [p.grad_sample for p in wrapped.parameters()]
    engine = ExpMQuadEngine()
    assert engine.is_compatible(module=wrapped)
    private = engine.make_private_expm(wrapped, make_loader(torch.float64), 1.0, 0.5, 2, **GOOD)
    assert type(private) is nn.Sequential
    assert not torch.equal(flat(private), before)
    assert torch.equal(flat(wrapped), before)
    assert all(p.grad_sample is trace for p, trace in zip(wrapped.parameters(), traces, strict=True))
    for layer in private.modules():
        assert not layer._forward_hooks
        assert not layer._backward_hooks
        assert "activations" not in vars(layer)
    assert all(not hasattr(p, "grad_sample") and p.grad is None for p in private.parameters())


def test_statistics_of_a_wrapped_module_are_those_of_the_module_inside(wrapped):
    statistics, plain = gathered(wrapped), gathered(make_model(torch.float64))
    assert torch.equal(statistics.sums.gradient, plain.sums.gradient)
    assert torch.equal(statistics.sums.curvature, plain.sums.curvature)


def test_what_trains_in_place_is_not_given_a_copy(wrapped):
    for module in (wrapped, wrapped._module):
        with pytest.raises(ValueError, match=r"prepared by Opacus.*to_standard_module"):
            check_module(module)
    assert not ExpMQuadEngine().is_compatible(module=wrapped._module)
    model = make_model()
    assert standard(model) is model


def test_the_accountant_is_known_by_its_name():
    engine = ExpMQuadEngine(accountant="expm", budget=(1.0, 1e-5))
    assert type(engine.accountant) is ExpMAccountant
    assert engine.accountant.budget.epsilon == 1.0
    assert type(opacus.PrivacyEngine(accountant="expm").accountant) is ExpMAccountant
    empty = ExpMAccountant()
    assert ExpMQuadEngine(accountant=empty).accountant is empty


def test_orders_of_renyi_play_no_part():
    accountant = ExpMAccountant()
    accountant.step(noise_multiplier=1.0, sample_rate=0.1)
    assert accountant.get_epsilon(1e-5, alphas=[2, 4]) == accountant.get_epsilon(delta=1e-5)
    assert accountant.get_epsilon(1e-5, [2, 4]) == accountant.get_epsilon(1e-5)
