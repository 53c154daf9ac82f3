"""Three values, as in Opacus's hooks mode: the loop's own loss is recognised, and counted exactly."""

import io

import pytest
import torch
import torch.nn.functional as F
from loops import FEATURES, flat, make_loop, make_model, make_sampled, make_tensors
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from opacus_expm import ExpMQuadEngine
from opacus_expm.gathering.rows import GradSampling
from opacus_expm.swap.losses import PrivateLoss
from opacus_expm.swap.outputs import LossCall, Outputs, known


def plainly(loop, loss):
    """One epoch of a script with a loss of its own."""
    loop.module.train()
    for x, y in loop.loader:
        loop.optimizer.zero_grad()
        loss(loop.module(x), y).backward()
        loop.optimizer.step()


OWN = {
    "a module": lambda o, y: nn.CrossEntropyLoss()(o, y),
    "a function": F.cross_entropy,
    "by keyword": lambda o, y: F.cross_entropy(target=y, input=o, reduction="mean"),
    "scaled": lambda o, y: F.cross_entropy(o, y) / 2,
    "reshaped": lambda o, y: F.cross_entropy(o.squeeze(1)[:, :].view(len(y), -1).contiguous(), y.clone()),
    "converted": lambda o, y: F.cross_entropy(o.double().float().to("cpu"), y.to(torch.int32).long()),
}


@pytest.mark.parametrize("name", OWN)
def test_the_loops_own_loss_is_counted(name, clean):
    loop = make_loop(grad_sample_mode="hooks")
    plainly(loop, OWN[name])
    assert len(loop.engine.accountant.releases) == 1
    assert torch.equal(flat(loop.module), clean)


@pytest.mark.filterwarnings("ignore:with 20 records")
def test_samples_are_counted_in_the_same_way():
    loops = [make_sampled(grad_sample_mode=mode, target_epsilon=20.0) for mode in ("ghost", "hooks")]
    for loop in loops:
        for _ in range(5):
            plainly(loop, loop.criterion)
    ghost, hooks = loops
    assert torch.equal(flat(ghost.module), flat(hooks.module))
    assert not torch.equal(flat(hooks.module), flat(make_model()))
    assert hooks.engine.accountant.releases == ghost.engine.accountant.releases


@pytest.mark.parametrize("mode", ["hooks", "functorch", GradSampling()])
def test_three_values_in_every_mode_but_ghost(mode):
    model = make_model()
    options = {"target_epsilon": 1.0, "target_delta": 0.0, "epochs": 1, "max_grad_norm": 1.0, "radius": 0.3}
    module, optimizer, loader = ExpMQuadEngine().make_private_with_epsilon(
        module=model,
        optimizer=torch.optim.SGD(model.parameters()),
        data_loader=DataLoader(TensorDataset(*make_tensors()), batch_size=8),
        grad_sample_mode=mode,
        **options,
    )
    assert module is model
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert isinstance(loader, DataLoader)


class Focal(nn.Module):
    """A loss that is more than one call of torch's."""

    def forward(self, outputs, targets):
        return F.cross_entropy(outputs * outputs.shape[1], targets) ** 2


CRITERIA = {
    "cross-entropy": (nn.CrossEntropyLoss(), "cross_entropy(reduction='mean')"),
    "smoothed": (nn.CrossEntropyLoss(label_smoothing=0.1), "cross_entropy(reduction='mean', label_smoothing=0.1)"),
    "weighted": (nn.CrossEntropyLoss(torch.ones(3)), "cross_entropy(weight=<tensor>, reduction='mean')"),
    "summed": (nn.MSELoss(reduction="sum"), "mse_loss(reduction='sum')"),
    "logistic": (nn.BCEWithLogitsLoss(), "binary_cross_entropy_with_logits(reduction='mean')"),
    "log-likelihood": (F.nll_loss, "nll_loss(reduction='mean')"),
    "robust": (nn.HuberLoss(delta=2.0), "huber_loss(reduction='mean', delta=2.0)"),
    "in a function": (lambda o, y: F.cross_entropy(o, y), "cross_entropy(reduction='mean')"),
}


@pytest.mark.parametrize("name", CRITERIA)
def test_a_loss_of_torch_is_known_by_its_call(name):
    criterion, words = CRITERIA[name]
    call = known(criterion)
    assert str(call) == words
    assert call.same(known(criterion))
    others = [known(c) for c, w in CRITERIA.values() if w != words]
    assert not any(call.same(other) or other.same(call) for other in others)
    heavier = known(nn.CrossEntropyLoss(torch.full((3,), 2.0)))
    assert not call.same(heavier)


def test_other_criteria_are_not_known():
    assert known(Focal()) is None
    assert known(lambda o, y: F.cross_entropy(o, y) + F.cross_entropy(o, y)) is None
    assert known(lambda o, y: F.cross_entropy(o[:, :1], y)) is None
    assert known(lambda o, y: o["logits"]) is None
    with pytest.raises(ValueError, match=r"criterion is Focal, which is not one call.*grad_sample_mode='ghost'"):
        make_loop(criterion=Focal(), grad_sample_mode="hooks")
    make_loop(criterion=Focal()).epoch()


def test_a_regression_with_its_own_loss():
    def loader():
        x, _ = make_tensors()
        return DataLoader(TensorDataset(x, x[:, 0]), batch_size=8)

    def trained(mode, loss):
        torch.manual_seed(1)
        model = nn.Linear(FEATURES, 1)
        loop = make_loop(model=model, loader=loader(), criterion=nn.MSELoss(), grad_sample_mode=mode)
        loss = loss or loop.criterion
        plainly(loop, lambda o, y: loss(o, y.unsqueeze(1)))
        return flat(model)

    expected = trained("ghost", None)
    assert torch.equal(trained("hooks", nn.MSELoss()), expected)
    assert torch.equal(trained("hooks", lambda o, y: F.mse_loss(o.squeeze(1), y[:, 0])), expected)
    with pytest.raises(RuntimeError, match=r"loss l1_loss\(.*engine knows mse_loss\(.*criterion="):
        trained("hooks", F.l1_loss)
    with pytest.raises(RuntimeError, match="outputs that are not those of the returned module"):
        trained("hooks", lambda o, y: F.mse_loss(y, o))


def test_without_a_criterion_it_is_cross_entropy_and_the_error_says_so():
    loop = make_loop(criterion=None, grad_sample_mode="hooks")
    for x, _ in loop.loader:
        loss = F.mse_loss(loop.module(x), torch.zeros(len(x), 3))
        assert isinstance(loss, PrivateLoss)
        with pytest.raises(
            RuntimeError, match=r"mse_loss\(reduction='mean'\).*cross_entropy.*nn\.CrossEntropyLoss\(\)"
        ):
            loss.backward()
        break


def test_outputs_are_tensors_to_look_at():
    loop = make_loop(grad_sample_mode="hooks")
    x, y = next(iterator := iter(loop.loader))
    outputs = loop.module(x)
    plain = make_model()(x).detach()
    assert isinstance(outputs, Outputs)
    assert outputs.requires_grad
    assert torch.equal(outputs.plain(), plain)
    assert type(outputs.plain()) is torch.Tensor
    assert torch.equal(outputs.argmax(1), plain.argmax(1))
    assert float((outputs.argmax(1) == y).float().mean()) <= 1.0
    assert (outputs.detach().cpu().numpy() == plain.numpy()).all()
    buffer = io.BytesIO()
    torch.save(outputs, buffer)
    buffer.seek(0)
    assert torch.equal(torch.load(buffer), plain)
    assert str(F.l1_loss(outputs, plain)) == str(outputs.mean() + F.cross_entropy(outputs, y)) == "private"
    del iterator


def test_other_data_in_evaluation_mode_has_ordinary_losses():
    loop = make_loop(grad_sample_mode="hooks")
    x, y = make_tensors(seed=7)
    loop.module.eval()
    plain = make_model()(x).detach()
    assert torch.equal(F.cross_entropy(loop.module(x), y), F.cross_entropy(plain, y))
    assert torch.equal(
        F.cross_entropy(loop.module(x), y, reduction="none"), F.cross_entropy(plain, y, reduction="none")
    )
    with torch.no_grad():
        assert type(loop.module(x)) is torch.Tensor


def test_a_call_computes_its_loss():
    outputs, (_, y) = torch.randn(20, 3), make_tensors()
    call = LossCall(F.cross_entropy, dict(known(nn.CrossEntropyLoss(label_smoothing=0.2)).options))
    assert torch.equal(call(outputs, y), F.cross_entropy(outputs, y, label_smoothing=0.2))
