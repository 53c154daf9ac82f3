"""The loss of private records has no number."""

import math
import pickle

import numpy as np
import pytest
import torch
from loops import make_loop
from torch.optim import lr_scheduler

from opacus_expm.swap.losses import PrivateNumber


def test_a_loss_says_that_it_is_private():
    loop = make_loop()
    x, y = next(iterator := iter(loop.loader))
    loss = loop.criterion(loop.module(x), y)
    assert repr(loss) == "PrivateLoss(private)"
    for value in (
        loss,
        loss.item(),
        loss.detach(),
        loss.data,
        loss.clone(),
        loss + 1,
        2 - loss,
        loss**2,
        -loss,
        abs(loss),
    ):
        assert isinstance(value, PrivateNumber)
        assert str(value) == f"{value}" == f"{value:.3f}" == "%s" % value == "private"  # noqa: UP031
    assert (
        str(round(loss.item(), 3))
        == str(np.float64(1.0) + loss.item())
        == str(torch.ones(()) + loss.item())
        == "private"
    )
    for use in (
        float,
        int,
        math.isnan,
        math.exp,
        lambda v: v < 1,
        lambda v: v >= 1,
        lambda v: min(v, 2.0),
        lambda v: "%.3f" % v,  # noqa: UP031
    ):
        for value in (loss, loss.item()):
            with pytest.raises(TypeError, match="loss of private records is private data"):
                use(value)
    with pytest.raises(TypeError, match="private"):
        lr_scheduler.ReduceLROnPlateau(loop.optimizer).step(loss.item())
    with pytest.raises(TypeError, match="not pickled"):
        pickle.dumps(loss)
    assert not any(isinstance(v, torch.Tensor | float) for v in vars(loss.item()).values())
    del iterator


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
