"""The four objects of a loop, and the arguments that are refused."""

import copy
import pickle

import opacus
import pytest
import torch
from loops import BATCH, RECORDS, flat, make_loader, make_loop, make_model, make_sampled
from torch import nn
from torch.utils.data import DataLoader

from opacus_expm import ExpMQuadEngine


@pytest.mark.parametrize("what", ["optimizer", "criterion", "loader"])
def test_stand_ins_are_not_pickled(what):
    with pytest.raises(TypeError, match="not pickled"):
        pickle.dumps(getattr(make_loop(), what))


def test_the_loader_is_a_data_loader():
    loop = make_loop()
    assert isinstance(loop.loader, DataLoader)
    assert len(loop.loader) == 3
    assert len(loop.loader.dataset) == RECORDS
    assert loop.loader.batch_size == BATCH


REFUSED = [
    ({"batch_first": False}, ValueError, "a record is a row of its batch"),
    ({"poisson_sampling": True}, ValueError, "every record counts exactly once an epoch"),
    ({"wrap_model": False}, ValueError, "never wrapped"),
    ({"loss_reduction": "sum"}, ValueError, "is not the criterion's 'mean'"),
    ({"loss_reduction": "none"}, ValueError, "loss_reduction must be one of"),
    ({"clipping": "per_layer"}, ValueError, "use 'flat' with max_grad_norm="),
    ({"clipping": "adaptive"}, ValueError, "public_loader="),
    ({"clipping": "separate"}, ValueError, "clipping must be one of"),
    ({"grad_sample_mode": "ew"}, ValueError, "grad_sample_mode must be one of"),
    ({"max_grad_norm": None}, ValueError, "max_grad_norm must be given, or public_loader="),
    ({"max_curvature": None}, ValueError, "max_curvature must be given, or public_loader="),
    ({"max_grad_norm": [1.0, 1.0]}, TypeError, "max_grad_norm must be a number"),
    ({"target_epsilon": 0.0}, ValueError, "target_epsilon must be greater than 0"),
    ({"target_delta": 1.0}, ValueError, "target_delta must be in"),
    ({"epochs": 0}, ValueError, "epochs must be a positive integer"),
    ({"epochs": 2, "radius": [0.1]}, ValueError, "radius must be one number, or one for each"),
    ({"radius": -1.0}, ValueError, "radius must be greater than 0"),
    ({"proj_dim": 1000}, ValueError, "proj_dim must be at most"),
    ({"criterion": nn.CrossEntropyLoss(reduction="none")}, ValueError, "criterion has reduction='none'"),
    ({"criterion": 3}, TypeError, "criterion must be a loss"),
    ({"optimizer": 3}, TypeError, "optimizer must be a torch.optim.Optimizer"),
    ({"loader": [1]}, TypeError, "data_loader must be a torch.utils.data.DataLoader"),
    ({"loader": make_loader(drop_last=True)}, ValueError, "data_loader has drop_last=True"),
    ({"model": make_model().requires_grad_(False)}, ValueError, "no trainable parameter"),
    ({"optimizer": torch.optim.SGD(make_model().parameters())}, ValueError, "parameters that are not the module's"),
    ({"noise_generator": 3}, ValueError, "noise_generator belongs to the engine"),
    ({"noise_multiplier": 1.0}, TypeError, "noise_multiplier"),
]


@pytest.mark.parametrize(
    ("changes", "error", "words"), REFUSED, ids=lambda v: "-".join(v) if isinstance(v, dict) else ""
)
def test_bad_arguments_leave_no_trace(changes, error, words):
    engine, model = ExpMQuadEngine(), changes.get("model", make_model())
    with pytest.raises(error, match=words):
        make_loop(engine, **({"model": model} | changes))
    assert engine.accountant.releases == []
    assert "forward" not in vars(model)
    assert engine.accountant._running() is None


def test_an_optimizer_for_some_parameters_only():
    model = make_model()
    optimizer = torch.optim.SGD(model[2].parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"does not hold the parameter '0\.weight'"):
        make_loop(model=model, optimizer=optimizer)
    model[0].requires_grad_(False)
    make_loop(model=model, optimizer=optimizer).epoch()


def test_a_module_that_opacus_has_prepared():
    model = opacus.GradSampleModule(make_model())
    for prepared in (model, model._module):  # Opacus's hooks are in both
        with pytest.raises(ValueError, match=r"prepared by Opacus.*to_standard_module"):
            make_loop(model=prepared)
    make_loop(model=model.to_standard_module()).epoch()


def test_scripts_that_reach_through_opacus_wrapper_find_the_module(clean):
    """``module._module`` during the loop and after it, with names as before, in copies and pickles too."""
    loop, names = make_loop(), list(make_model().state_dict())
    assert loop.module._module is loop.module
    loop.epoch()
    assert torch.equal(flat(loop.module._module), clean)
    for module in (loop.module, copy.deepcopy(loop.module), pickle.loads(pickle.dumps(loop.module))):
        assert module._module is module
        assert list(module.state_dict()) == names
        assert [name for name, _ in module.named_modules()] == ["", "0", "1", "2"]


def test_a_module_of_the_users_own_by_that_name_stays():
    wrapped = Wrapping()
    own = wrapped._module
    assert make_loop(model=wrapped).module._module is own


class Wrapping(nn.Module):
    def __init__(self):
        super().__init__()
        self._module = make_model()

    def forward(self, x):
        return self._module(x)


def test_the_criterion_is_cross_entropy_by_default(clean):
    loop = make_loop(criterion=None)
    loop.epoch()
    assert torch.equal(flat(loop.module), clean)
    assert loop.criterion.to("cpu") is loop.criterion


def test_methods_without_meaning_name_what_to_use():
    model = make_model()
    assert ExpMQuadEngine.get_compatible_module(model) is model
    loop = make_loop()
    for name, words in (("noise_multiplier", "accountant.releases"), ("signal_skip_step", "max_physical_batch_size=")):
        with pytest.raises(AttributeError, match=words):
            getattr(loop.optimizer, name)
    assert not hasattr(loop.optimizer, "unheard_of")


@pytest.mark.filterwarnings("ignore:with 20 records")
def test_representations_say_what_is_public():
    loop = make_loop()
    before = repr(loop.module)
    assert repr(loop.criterion) == "StandInCriterion(CrossEntropyLoss, Training(0 of 1 rounds drawn))"
    assert repr(loop.optimizer) == "StandInOptimizer(SGD in the loop, no gradient steps, Training(0 of 1 rounds drawn))"
    assert repr(loop.loader) == (
        "StandInLoader(every record once, at most 3 batches an epoch, Training(0 of 1 rounds drawn))"
    )
    loop.epoch()
    assert "1 of 1 rounds drawn, ended" in repr(loop.optimizer)
    assert repr(loop.module) == before == repr(make_model())
    sampled = make_sampled().loader
    sampled._training.module.train()
    assert repr(sampled.in_pieces(2)) == (
        "StandInLoader(Poisson samples, at most 10 batches an epoch, at most 2 records at once, "
        "Training(0 of 42 rounds drawn))"
    )
