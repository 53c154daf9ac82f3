"""The objects that an Opacus training loop is given in place of its own, and the checks of what came.

The module is the user's own object; the optimizer, the criterion and the loader are stand-ins.

**Privacy:** a stand-in shows no private value. All of them act on the one ``Training`` that they share.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from opacus.optimizers import DPOptimizer
from torch import Tensor, nn, optim
from torch.utils.data import DataLoader

from opacus_expm import _check
from opacus_expm._private import PrivateValues
from opacus_expm.accounting.admission import Admission
from opacus_expm.gathering import loaders
from opacus_expm.gathering.criteria import make_criterion
from opacus_expm.gathering.model import check_module
from opacus_expm.swap.epoch import Loss, Rounds
from opacus_expm.swap.memory import serve_memory_manager
from opacus_expm.swap.outputs import known
from opacus_expm.swap.training import Training

_WITHOUT_MEANING = {
    "noise_multiplier": "no noise is added to gradients; engine.accountant.releases says what each draw was",
    "signal_skip_step": "the loop knows which step is a batch's last; cut batches with Opacus's BatchMemoryManager, or by "
    "max_physical_batch_size= of make_private_with_epsilon",
    "attach_step_hook": "the engine charges its own draws",
}


class StandInCriterion(PrivateValues):
    """The user's criterion: it gives private losses in the loop, and ordinary ones where other data is evaluated.

    Args:
        criterion: the user's own.
        training: the loop's state.
    """

    def __init__(self, criterion: Loss, training: Training):
        self.criterion, self._training = criterion, training
        self.reduction = getattr(criterion, "reduction", "mean")

    def __call__(self, input: Tensor, target: Tensor, *, shape: tuple[int, ...] | torch.Size | None = None) -> Tensor:
        """The loss of a batch.

        Args:
            input: outputs of the module.
            target: what they should be.
            shape: of the outputs (batch, positions, classes) before the script flattened them, as in Opacus.
        """
        if shape is not None:
            input, target = input.reshape(shape), target.reshape(shape[:-1])
        return self._training.loss(input, target)

    def __repr__(self) -> str:
        return f"StandInCriterion({_named(self.criterion)}, {self._training!r})"

    def to(self, *args: Any, **kwargs: Any) -> StandInCriterion:
        """Move the user's criterion, if it is a module."""
        if isinstance(self.criterion, nn.Module):
            self.criterion.to(*args, **kwargs)
        return self


class StandInOptimizer(PrivateValues, optim.Optimizer):
    """An optimizer that takes no gradient step: after an epoch's last batch, ``step`` draws the next weights.

    Parameter groups and state are those of the user's optimizer, so that learning rate schedulers and checkpoints work.

    Args:
        optimizer: the user's own.
        training: the loop's state.
    """

    def __init__(self, optimizer: optim.Optimizer, training: Training):
        self._training: Training | None = None
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self.state, self.original_optimizer, self._training = optimizer.state, optimizer, training

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """After the epoch's last batch charge, draw and move the weights; before it, do nothing.

        Raises:
            RuntimeError: the epoch or the whole run is over, or the batch was not counted.
        """
        assert self._training is not None
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        setattr(self.original_optimizer, "_opt_called", True)  # noqa: B010  # a scheduler may have been made on it
        self._training.step()
        return result

    def __repr__(self) -> str:
        own = type(self.original_optimizer).__name__
        return f"StandInOptimizer({own} in the loop, no gradient steps, {self._training!r})"

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse: all parameters with ``requires_grad`` move, and no others."""
        if getattr(self, "_training", None) is not None:
            raise ValueError("param_group cannot be added: all parameters of the module with requires_grad=True move")
        super().add_param_group(param_group)

    def __getattr__(self, name: str) -> Any:
        if name in _WITHOUT_MEANING:
            raise AttributeError(f"{name} has no meaning here: {_WITHOUT_MEANING[name]}")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")


class StandInLoader(PrivateValues, DataLoader[Any]):
    """The user's loader; the loop's state knows every batch that it gives.

    Args:
        loader: the user's own.
        training: the loop's state.
        size: the largest number of records that it gives at once; 0 for whole batches.
    """

    def __init__(self, loader: DataLoader[Any], training: Training, size: int = 0):
        self.__dict__.update(vars(loader))
        self.original_loader, self._training, self._size = loader, training, size

    def in_pieces(self, size: int) -> StandInLoader:
        """The same batches, with at most ``size`` records at once; the step after a batch's last piece is the batch's."""
        return StandInLoader(self.original_loader, self._training, _check.positive_int("max_physical_batch_size", size))

    def __repr__(self) -> str:
        cut = f", at most {self._size} records at once" if self._size else ""
        return f"StandInLoader({self._training.kind}, at most {len(self)} batches an epoch{cut}, {self._training!r})"

    def __iter__(self) -> Any:
        return self._training.batches(self._size)

    def __len__(self) -> int:
        return self._training.length(self._size)

    def __getattr__(self, name: str) -> Any:
        if name == "original_loader":
            raise AttributeError(name)
        return getattr(self.original_loader, name)


def originals(
    module: nn.Module, optimizer: optim.Optimizer, criterion: Loss | None, data_loader: DataLoader[Any]
) -> tuple[nn.Module, optim.Optimizer, Loss, DataLoader[Any]]:
    """Check the user's objects, and take them out of the stand-ins of an earlier call where such were passed.

    Raises:
        TypeError, ValueError: naming the argument, what came and what to do; nothing is changed.
    """
    if any(kind.__name__ == "LightningModule" for kind in type(module).__mro__):
        raise ValueError(
            "module is a LightningModule, which is tied to its trainer and cannot be copied; keep the network in an "
            "attribute of it, and pass that"
        )
    module = check_module(module)
    if isinstance(optimizer, StandInOptimizer | DPOptimizer):
        optimizer = optimizer.original_optimizer
    if not isinstance(optimizer, optim.Optimizer):
        raise TypeError(f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}")
    _check_parameters(module, optimizer)
    if isinstance(criterion, StandInCriterion):
        criterion = criterion.criterion
    loss = nn.CrossEntropyLoss() if criterion is None else criterion
    make_criterion(loss, torch.zeros(1))
    if isinstance(data_loader, StandInLoader):
        data_loader = data_loader.original_loader
    return module, optimizer, loss, loaders.check_loader(data_loader, "data_loader")


def _check_parameters(module: nn.Module, optimizer: optim.Optimizer) -> None:
    """Refuse an optimizer that would train other parameters than those that move here."""
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if held - {id(p) for p in module.parameters()}:
        raise ValueError("optimizer holds parameters that are not the module's; make it from module.parameters()")
    missing = [name for name, p in module.named_parameters() if p.requires_grad and id(p) not in held]
    if missing:
        raise ValueError(
            f"optimizer does not hold the parameter {missing[0]!r}, but all that have requires_grad=True move; call "
            "requires_grad_(False) on those that should stay, or give them to the optimizer"
        )


@dataclass(frozen=True)
class Protocol:
    """Options of Opacus's that a loop may bring along; the fields are Opacus's own words."""

    batch_first: bool
    loss_reduction: str
    poisson_sampling: bool | None
    clipping: str
    grad_sample_mode: str | None
    wrap_model: bool

    @property
    def ghost(self) -> bool:
        """Whether the loop is given a criterion, as with Opacus in ghost mode alone."""
        return self.grad_sample_mode == "ghost"

    def checked(self, criterion: Loss, *, sampled: bool) -> str | None:
        """Refuse what has no meaning here, and translate the gradient mode; None is hooks where they can serve.

        Args:
            criterion: the loop's.
            sampled: whether the rounds are over Poisson samples.

        Raises:
            ValueError: an option that has no meaning here, with what to use instead.
        """
        if not self.batch_first:
            raise ValueError(
                "batch_first=False is not supported: a record is a row of its batch; transpose in the module"
            )
        if self.poisson_sampling and not sampled:
            raise ValueError(
                "poisson_sampling=True has no meaning with radius=: every record counts exactly once an epoch; leave it out"
            )
        if self.poisson_sampling is False and sampled:
            raise ValueError(
                "poisson_sampling=False needs radius=: without it every batch is a Poisson sample; leave it out, or pass "
                "radius="
            )
        if not self.wrap_model:
            raise ValueError("wrap_model=False has no meaning here: the module is never wrapped; leave it out")
        reduction = getattr(criterion, "reduction", self.loss_reduction)
        if _check.one_of("loss_reduction", self.loss_reduction, ("mean", "sum")) != reduction:
            raise ValueError(
                f"loss_reduction={self.loss_reduction!r} is not the criterion's {reduction!r}; make them agree"
            )
        if self.clipping in ("per_layer", "adaptive"):
            raise ValueError(
                f"clipping={self.clipping!r} has no meaning here: a record's projected gradient has one bound; use 'flat' "
                "with max_grad_norm= or, to have it measured, public_loader="
            )
        _check.one_of("clipping", self.clipping, ("flat",))
        if self.grad_sample_mode is not None:
            _check.one_of("grad_sample_mode", self.grad_sample_mode, ("ghost", "hooks", "functorch"))
        if not self.ghost and known(criterion) is None:
            raise ValueError(
                f"criterion is {_named(criterion)}, which is not one call of a loss of torch.nn.functional, so that the "
                "loop's own loss could not be recognised; pass grad_sample_mode='ghost', and in the loop use the criterion "
                "that is then returned: module, optimizer, criterion, data_loader = ..."
            )
        return "functorch" if self.grad_sample_mode == "functorch" else None


def _named(criterion: Loss) -> str:
    """A criterion by its name."""
    return getattr(criterion, "__qualname__", None) or type(criterion).__qualname__


def unfinished(module: nn.Module) -> Admission | None:
    """What an unfinished loop of this module has reserved, None if there is no such loop. The next loop ends it."""
    training = Training.of(module)
    return None if training is None else training.rounds.admission


def stand_ins(
    module: nn.Module,
    optimizer: optim.Optimizer,
    criterion: Loss,
    data_loader: DataLoader[Any],
    rounds: Rounds,
    *,
    ghost: bool,
) -> tuple[Any, ...]:
    """What an Opacus training loop is given in place of the objects that ``originals`` checked.

    (module, optimizer, loader), and where ``ghost`` asks for it (module, optimizer, criterion, loader). A loop that is never
    finished costs what it has drawn. A module that is passed again starts a new loop.
    """
    serve_memory_manager()
    training = Training(module, criterion, data_loader, rounds)
    own_optimizer, own_loader = StandInOptimizer(optimizer, training), StandInLoader(data_loader, training)
    training.start()
    if ghost:
        return module, own_optimizer, StandInCriterion(criterion, training), own_loader
    return module, own_optimizer, own_loader
