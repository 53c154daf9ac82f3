"""The loss of private records has no number."""

import io
import math
import pickle
import statistics

import numpy as np
import pytest
import torch
from loops import make_loop
from torch.optim import lr_scheduler
from tqdm import tqdm

from opacus_expm.swap.losses import PrivateLoss, PrivateNumber, PrivateTensor


@pytest.fixture
def loss():
    loop = make_loop()
    x, y = next(iterator := iter(loop.loader))
    yield loop.criterion(loop.module(x), y)
    del iterator


def test_a_loss_says_that_it_is_private(loss):
    assert repr(loss) == "PrivateLoss(private)"
    tensors = [loss, loss.detach(), loss.data, loss.clone(), loss + 1, 2 - loss, loss**2, -loss, abs(loss)]
    tensors += [torch.ones(()) + loss, torch.stack([loss, loss]).mean(), torch.cat([loss.view(1)]), loss.detach().cpu()]
    numbers = [loss.item(), loss.tolist(), loss.detach().numpy(), loss.item() * 2, round(loss.item(), 3), round(loss)]
    numbers += [np.float64(1.0) + loss.item(), statistics.mean([loss.item(), loss.item()]), np.mean([loss.item()] * 2)]
    numbers += [sum([loss.item()] * 3) / 3]
    assert {type(t) for t in tensors} == {PrivateTensor, PrivateLoss}
    assert {type(n) for n in numbers} == {PrivateNumber}
    for value in (*tensors, *numbers):
        assert str(value) == f"{value}" == f"{value:.3f}" == "%s" % value == "private"  # noqa: UP031
    assert "loss=private" in str(tqdm([0], disable=False, file=io.StringIO(), postfix={"loss": loss.item()}))


STEERS = [int, bool, lambda v: v < 1, lambda v: v >= 1, lambda v: v == v, lambda v: min(v, 2.0), lambda v: [0, 1][v]]


@pytest.mark.parametrize("use", STEERS)
def test_what_would_steer_the_training_is_refused(use, loss):
    for value in (loss, loss.item(), loss.detach() + 1):
        with pytest.raises(TypeError, match="loss of private records is private data"):
            use(value)


@pytest.mark.parametrize("use", [float, math.exp, lambda v: float("%f" % v), lambda v: np.mean([float(v), 1])])  # noqa: UP031
def test_a_float_is_nan_and_a_warning(use, loss):
    for value in (loss, loss.item()):
        with pytest.warns(UserWarning, match=r"float\(\) of a private loss is nan") as caught:
            assert math.isnan(use(value))
        assert caught[0].filename == __file__


def test_a_plateau_is_never_seen(loss):
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    with pytest.warns(UserWarning, match="nan"):
        lr_scheduler.ReduceLROnPlateau(optimizer).step(loss.item())


def test_checks_of_health_are_answered_without_a_look(loss):
    for value in (loss, loss.detach() * 2):
        assert not torch.isnan(value)
        assert not torch.isinf(value)
        assert torch.isfinite(value)
        assert not value.isnan().any()
    assert not np.isnan(loss.item())
    assert np.isfinite(loss.item())
    with pytest.raises(TypeError, match="private"):
        np.less(loss.item(), 1.0)


def test_a_loss_holds_no_number(loss):
    with torch._C.DisableTorchFunctionSubclass():
        assert torch.Tensor.isnan(loss)
    assert vars(loss.item()) == {}
    with pytest.raises(TypeError, match="not pickled"):
        pickle.dumps(loss)
    assert loss.requires_grad
    with pytest.raises(RuntimeError, match="in a way that is not recognised"):
        torch.autograd.backward(loss)
    with pytest.raises(RuntimeError, match="only a loss as the criterion gives it"):
        (loss + 0.0).backward()


@pytest.mark.parametrize(
    "scaled",
    [lambda v: v / 4, lambda v: 0.5 * v, lambda v: v * torch.tensor(65536.0), lambda v: v.mean().to("cpu").squeeze()],
)
def test_a_positive_factor_leaves_the_loss(scaled, loss):
    assert scaled(loss) is loss


@pytest.mark.parametrize(
    "changed", [lambda v: v * -1, lambda v: 0 * v, lambda v: 1 / v, lambda v: v * v, lambda v: v * torch.ones(2)]
)
def test_other_factors_do_not(changed, loss):
    assert type(changed(loss)) is PrivateTensor


def test_a_counted_loss_keeps_no_batch_alive():
    loop = make_loop()
    loss = None
    for x, y in loop.loader:
        loss = loop.criterion(loop.module(x), y)
        loss.backward()
        loop.optimizer.step()
    assert loss._ticket.inputs is None
    assert loss._ticket.targets.numel() == 0
    assert loss._ticket.held == []
    assert loss._ticket.epoch.gathered is None
