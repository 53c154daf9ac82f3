"""The methods that ours stands beside: Opacus DP-SGD at a given budget, and training without privacy.

They are no part of an experiment alone: the audit attacks DP-SGD in the same way as it attacks this engine.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from opacus import PrivacyEngine
from opacus.accountants import PRVAccountant
from opacus.grad_sample import GradSampleModule
from opacus.optimizers import DPOptimizer
from scipy.optimize import brentq
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset, default_collate

from opacus_expm import _check
from opacus_expm.gathering.loaders import rows_loader
from opacus_expm.gathering.model import check_module
from opacus_expm.gathering.threads import Threads
from opacus_expm.mechanism import curves

_TOLERANCE = 1e-3  # relative: how far above the least the noise of DP-SGD may end


def dp_sgd(
    model: nn.Module,
    dataset: Dataset[Any],
    criterion: nn.Module,
    *,
    epsilon: float,
    delta: float,
    learning_rate: float,
    max_grad_norm: float,
    batch_size: int,
    epochs: int,
    momentum: float = 0.9,
    max_physical_batch_size: int = 1024,
    seed: int | None = None,
) -> nn.Module:
    """Fine-tune with Opacus DP-SGD: Poisson sampling, per-sample clipping through hooks, noise for exactly (ε, δ).

    The noise is calibrated with Opacus's numerical (PRV) accountant, to within 0.1 % below ε; where a batch is the whole
    data set, by the Gaussian mechanism's exact curve.

    Args:
        model: pretrained module without BatchNorm in training mode; it is not modified.
        dataset: private records, pairs (input, target).
        criterion: a loss that averages over the batch.
        epsilon: ε > 0.
        delta: δ in (0, 1): DP-SGD has no pure guarantee.
        learning_rate: of SGD.
        max_grad_norm: clipping norm of one record's gradient.
        batch_size: expected size of a Poisson batch; at the data set's size or above, every step uses all of it.
        epochs: passes over the data, in expectation.
        momentum: of SGD.
        max_physical_batch_size: records processed at a time, to cap memory; the result is that of the whole batch.
        seed: of sampling, noise and dropout, for experiments; None takes fresh entropy. The caller's global generators
            are left as they were.

    Returns:
        A plain module of ``model``'s own class, in ``model``'s training or evaluation mode.

    Raises:
        TypeError, ValueError: bad input.
        opacus.validators.errors.UnsupportedModuleError: a layer that Opacus cannot serve.

    **Privacy:** (ε, δ)-DP under adding or removing one record, as Opacus accounts for it (without its secure mode).
    """
    _check.positive_int("batch_size", batch_size)
    _check.positive_int("epochs", epochs)
    x, y = tensors("dataset", dataset)
    return noisy_sgd(
        model,
        TensorDataset(x, y),
        criterion,
        noise_multiplier=calibrated_noise(epsilon, delta, math.ceil(len(x) / batch_size), epochs),
        learning_rate=learning_rate,
        max_grad_norm=max_grad_norm,
        batch_size=batch_size,
        epochs=epochs,
        momentum=momentum,
        max_physical_batch_size=max_physical_batch_size,
        seed=seed,
    )


def noisy_sgd(
    model: nn.Module,
    dataset: Dataset[Any],
    criterion: nn.Module,
    *,
    noise_multiplier: float,
    learning_rate: float,
    max_grad_norm: float,
    batch_size: int,
    epochs: int,
    momentum: float = 0.9,
    max_physical_batch_size: int = 1024,
    seed: int | None = None,
    changed: Callable[[GradSampleModule, DPOptimizer], DPOptimizer] | None = None,
) -> nn.Module:
    """The steps of ``dp_sgd``, with noise that is given: its deviation in units of the clipping norm.

    ``changed`` makes the optimizer that takes the steps from Opacus's module and optimizer; None takes Opacus's own. Other
    arguments as in ``dp_sgd``.

    **Privacy:** that of DP-SGD with this noise, if what is changed clips and adds noise as Opacus's optimizer does.
    """
    x, y, threads = _checked(model, dataset, criterion, learning_rate, batch_size, epochs)
    _check.positive("max_grad_norm", max_grad_norm)
    _check.fraction("momentum", momentum)
    _check.positive_int("max_physical_batch_size", max_physical_batch_size)
    trained = copy.deepcopy(model).train()
    with _own_generators(seed), _quiet_opacus(), threads.shared(min(batch_size, max_physical_batch_size)):
        module, optimizer, sampled = PrivacyEngine(accountant="prv").make_private(
            module=trained,
            optimizer=torch.optim.SGD(
                [p for p in trained.parameters() if p.requires_grad], lr=learning_rate, momentum=momentum
            ),
            data_loader=rows_loader(x, y, batch_size),
            noise_multiplier=noise_multiplier,
            max_grad_norm=max_grad_norm,
        )
        optimizer = optimizer if changed is None else changed(module, optimizer)
        device = next(trained.parameters()).device
        for _ in range(epochs):
            for x, y in sampled:
                pieces = range(0, max(len(x), 1), max_physical_batch_size)
                for start in pieces:
                    piece = slice(start, start + max_physical_batch_size)
                    optimizer.zero_grad(set_to_none=True)
                    if len(x):
                        criterion(module(x[piece].to(device)), y[piece].to(device)).backward()
                    else:  # an empty Poisson batch: noise alone
                        for p in optimizer.params:
                            p.grad_sample = p.new_zeros(0, *p.shape)
                    optimizer.signal_skip_step(do_skip=start != pieces[-1])
                    optimizer.step()
    return _with_weights_of(model, trained)


def _checked(
    model: nn.Module, dataset: Dataset[Any], criterion: nn.Module, learning_rate: float, batch_size: int, epochs: int
) -> tuple[Tensor, Tensor, Threads]:
    """What both ways of training are given, checked: inputs and targets, and threads that suit them."""
    check_module(model)
    _check.positive("learning_rate", learning_rate)
    _check.positive_int("batch_size", batch_size)
    _check.positive_int("epochs", epochs)
    check_criterion(criterion)
    x, y = tensors("dataset", dataset)
    return x, y, Threads.of(model, x[:1])


def non_private(
    model: nn.Module,
    dataset: Dataset[Any],
    criterion: nn.Module,
    *,
    learning_rate: float,
    batch_size: int,
    epochs: int,
    seed: int | None = None,
) -> nn.Module:
    """Fine-tune with Adam and a one-cycle learning rate, without privacy. Arguments as in ``dp_sgd``.

    **Privacy:** none.
    """
    x, y, threads = _checked(model, dataset, criterion, learning_rate, batch_size, epochs)
    trained = copy.deepcopy(model).train()
    device = next(trained.parameters()).device
    with _own_generators(seed), threads.shared(batch_size):
        optimizer = torch.optim.Adam([p for p in trained.parameters() if p.requires_grad], lr=learning_rate)
        steps = epochs * math.ceil(len(x) / batch_size)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=learning_rate, total_steps=max(steps, 2))
        for _ in range(epochs):
            for index in torch.split(torch.randperm(len(x)), batch_size):
                optimizer.zero_grad()
                criterion(trained(x[index].to(device)), y[index].to(device)).backward()
                optimizer.step()
                schedule.step()
    return _with_weights_of(model, trained)


def tensors(name: str, dataset: object) -> tuple[Tensor, Tensor]:
    """A data set of pairs as (inputs, targets), in memory."""
    if isinstance(dataset, TensorDataset):
        pair: Any = dataset.tensors
    elif hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__"):
        pair = default_collate([dataset[i] for i in range(len(dataset))]) if len(dataset) else ()
    else:
        raise TypeError(f"{name} must be a data set of pairs (input, target), got {type(dataset).__name__}")
    if len(pair) != 2 or not all(isinstance(t, Tensor) and t.dim() and len(t) for t in pair):
        raise ValueError(f"{name} must hold at least one pair of tensors (input, target)")
    return pair[0], pair[1]


def check_criterion(criterion: object) -> None:
    """A loss that averages: Opacus scales gradients by what it is told, and is told the mean."""
    if not callable(criterion):
        raise TypeError(f"criterion must be a loss function, got {criterion!r}")
    if getattr(criterion, "reduction", "mean") != "mean":
        raise ValueError(f"criterion must average over the batch, got reduction={criterion.reduction!r}")  # type: ignore[attr-defined]


@cache
def calibrated_noise(epsilon: float, delta: float, steps_per_epoch: int, epochs: int) -> float:
    """The least noise, to within the tolerance, at which the steps together are (ε, δ)-DP."""
    epsilon = _check.positive("epsilon", epsilon)
    if _check.fraction("delta", delta) == 0:
        raise ValueError("delta must be greater than 0 for DP-SGD, got 0: its Gaussian noise has no pure guarantee")
    steps = steps_per_epoch * epochs
    if steps_per_epoch == 1:  # no sampling, so that the composition is one Gaussian mechanism
        return math.sqrt(steps) / curves.gaussian_mu(epsilon, delta)
    rate = 1 / steps_per_epoch
    accountant = PRVAccountant()

    @cache
    def excess(log_sigma: float) -> float:
        accountant.history = [(math.exp(log_sigma), rate, steps)]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the Rényi bound that the accountant starts from
            return math.log(accountant.get_epsilon(delta, eps_error=min(0.01, 0.01 * epsilon)) / epsilon)

    # The central limit theorem of Gaussian DP, μ = q√(T(e^{1/σ²} − 1)), is close: a narrow bracket around it.
    mu = curves.gaussian_mu(epsilon, delta)
    low = high = -0.5 * math.log(math.log1p((mu / rate) ** 2 / steps))
    while excess(high) > 0:
        low, high = high, high + 0.1
    while excess(low) <= 0:
        low, high = low - 0.1, low
    root = float(brentq(excess, low, high, xtol=_TOLERANCE / 4))
    while excess(root) > 0:
        root += _TOLERANCE / 4
    return math.exp(root)


@contextmanager
def _own_generators(seed: int | None) -> Iterator[None]:
    """Seeded global generators inside, the caller's again afterwards."""
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        if seed is None:
            torch.seed()
        else:
            torch.manual_seed(_check.seed("seed", seed))
        yield


@contextmanager
def _quiet_opacus() -> Iterator[None]:
    """Without the warnings that every run of Opacus gives."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Secure RNG turned off")
        warnings.filterwarnings("ignore", message="Full backward hook is firing when gradients are computed")
        yield


def _with_weights_of(model: nn.Module, trained: nn.Module) -> nn.Module:
    """A copy of the model, never touched by hooks, with the trained weights."""
    result = copy.deepcopy(model)
    result.load_state_dict(trained.state_dict())
    return result
