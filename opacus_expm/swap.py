"""What an unchanged Opacus training loop needs: stand-ins for which one epoch is one round.

    for epoch in range(T):
        for x, y in data_loader:            # every record once
            optimizer.zero_grad()           # nothing to do: no parameter has a gradient
            loss = criterion(module(x), y)  # outputs at the present weights; a loss without a number
            loss.backward()                 # the batch's clipped statistics are gathered
            optimizer.step()                # after the epoch's last batch: charge, draw, move the weights

The loader's own batches are counted, each exactly once. What the script makes of a batch on its way to the module and the
criterion is compared with it, record by record: another device, type or shape is accepted, other values are not. Whatever
goes wrong breaks the epoch off: its statistics are dropped, nothing is charged or released, and the epoch can be started
again from its beginning.

| what the loop does | what happens |
|---|---|
| several ``backward()`` for one ``step()``, loss divided by a number | accepted: records are added up all the same |
| learning rates, schedulers, ``clip_grad_norm_``, optimizer state | harmless: no gradient step is taken |
| evaluation with ``module.eval()`` and ``torch.no_grad()`` | as ever; not counted |
| a batch without ``backward()``, or with two | the epoch is broken off, an error says so |
| tensors that are not the batch's, or whose values were changed | likewise |
| an epoch left early, or an exception in the loop | the epoch is broken off, a warning says so |
| an epoch without a ``step()`` after its last batch | an error at its end |
| ``backward()`` or ``step()`` after the last round | an error |
| a loss that the returned criterion did not build | an error in its ``backward()`` |

The module is the user's own object, as in Opacus the trained parameters are: whatever the script has bound to it sees the
private model, its class and the keys of its ``state_dict`` are what they were, and its weights move in place. Until the last
round only its ``forward`` is replaced, and computes without a graph, so that no other optimizer can train it on the private
data. Private batches run through a copy in evaluation mode that shares the parameters: no buffer or attribute of the module
ever depends on them. Copies and pickles of the module are ordinary modules at all times.

Batches are read, and private ones run through the module, with fresh randomness (``gathering.randomness``). The rest of
the script draws from its own generators, which no record moves.

**Privacy:** the loop releases what ``make_private_expm(..., rounds=T)`` does, and nothing else. Losses of private records
are not even computed. Outputs are, for the script's own use and at the price of one more forward pass: like the records
themselves they must not leave.
"""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, NoReturn, Protocol

import torch
from opacus.grad_sample import AbstractGradSampleModule
from opacus.optimizers import DPOptimizer
from torch import Tensor, nn, optim
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader

from opacus_expm import _check
from opacus_expm._private import PrivateValues
from opacus_expm.gathering import loaders
from opacus_expm.gathering.criteria import make_criterion
from opacus_expm.gathering.model import check_module
from opacus_expm.gathering.passes import Pass
from opacus_expm.gathering.randomness import Generators, freshly
from opacus_expm.gathering.statistics import Statistics

Loss = Callable[[Tensor, Tensor], Tensor]

_AGAIN = "Nothing was released; start the epoch again from its beginning (for ... in data_loader)"
_HIDDEN = (
    "the loss of private records is private data and has no value here; judge the module by its loss on data that may be "
    "seen, with module.eval() and torch.no_grad()"
)
_OWN_LOSS = (
    "only a loss as the returned criterion gives it, perhaps scaled by a positive number, can be counted: a sum with other "
    "terms is not the loss of single records; put the terms into the criterion, or use regularization= for a ridge"
)
_UNCHANGED = (
    "Tensors must reach the module and the criterion with the values that data_loader gave them; put transformations into "
    "the data set, its collate function, the module or the criterion"
)
_NO_GRADIENTS = (
    "the module has no gradients while make_private_with_epsilon's rounds run: build the loss with the criterion that it "
    "returned, as loss = criterion(module(x), y)"
)
_WITHOUT_MEANING = {
    "noise_multiplier": "no noise is added to gradients; engine.accountant.releases says what each draw was",
    "signal_skip_step": "batches are cut by max_physical_batch_size= of make_private_with_epsilon",
    "attach_step_hook": "the engine charges its own draws",
}


class Gathering(Protocol):
    """A round that is ready to begin."""

    def open(self) -> Pass:
        """A pass to which the batches are added one by one."""


class Rounds(Protocol):
    """T rounds as the engine has checked them and admitted them to the budget."""

    @property
    def count(self) -> int:
        """T."""

    def begin(self, module: nn.Module, number: int) -> Gathering:
        """A round that starts from ``module``."""

    def draw(self, statistics: Statistics, number: int) -> nn.Module:
        """Charge, then draw."""

    def end(self) -> None:
        """No further round is going to be drawn."""


# --- losses ---------------------------------------------------------------------------------------------------------


class PrivateNumber:
    """A number that is private data, and is not here: arithmetic keeps it private, and formatting says so."""

    def _absorb(self, *_: object, **__: object) -> PrivateNumber:
        return PrivateNumber()

    def _refuse(self, *_: object) -> NoReturn:
        raise TypeError(_HIDDEN)

    item = detach = clone = cpu = numpy = tolist = _absorb
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _absorb
    __pow__ = __rpow__ = __neg__ = __pos__ = __abs__ = __round__ = _absorb
    __float__ = __int__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse

    @property
    def data(self) -> PrivateNumber:
        """As of a tensor."""
        return PrivateNumber()

    def backward(self, retain_graph: bool | None = None) -> None:
        """Refused: this is not a loss that the criterion gave."""
        raise RuntimeError(_OWN_LOSS)

    def __format__(self, spec: str) -> str:
        return "private"

    def __str__(self) -> str:
        return "private"

    def __repr__(self) -> str:
        return f"{type(self).__name__}(private)"


@dataclass(frozen=True, eq=False, repr=False)
class _Call(PrivateValues):
    """The module was called with the batch: its inputs, with their versions, and what it gave."""

    inputs: Any
    held: list[tuple[Tensor, int]]
    outputs: list[Tensor]


@dataclass(frozen=True, eq=False, repr=False)
class _Ticket(PrivateValues):
    """What a loss was built from: the place of its batch, and the tensors as module and criterion received them."""

    epoch: _Epoch
    number: int
    inputs: Any
    targets: Tensor
    held: list[tuple[Tensor, int]]


class PrivateLoss(PrivateValues, PrivateNumber):
    """The loss of a batch of private records: ``backward`` counts the batch, and there is no value."""

    def __init__(self, training: Training, ticket: _Ticket | str):
        self._training = training
        self._ticket = ticket

    def backward(self, retain_graph: bool | None = None) -> None:
        """Gather the statistics of the batch.

        Raises:
            RuntimeError: the batch cannot be counted; the message says why and what to do.
        """
        self._training.count(self._ticket)
        if isinstance(self._ticket, _Ticket):  # a list of losses must not keep batches alive
            self._ticket = replace(self._ticket, inputs=None, targets=torch.empty(0), held=[])

    def _itself(self, *_: object, **__: object) -> PrivateLoss:
        return self

    mean = sum = to = cuda = _itself

    def _scaled(self, *factors: object, **_: object) -> PrivateNumber:
        return self if all(isinstance(f, int | float) and f > 0 for f in factors) else PrivateNumber()

    __mul__ = __rmul__ = __truediv__ = _scaled


class _Guard(torch.autograd.Function):
    """The identity, with a backward that says where gradients are."""

    @staticmethod
    def forward(ctx: Any, outputs: Tensor, anchor: Tensor) -> Tensor:
        return outputs.clone()

    @staticmethod
    def backward(ctx: Any, *_: Any) -> NoReturn:
        raise RuntimeError(_NO_GRADIENTS)


# --- the state of a loop --------------------------------------------------------------------------------------------


class _Epoch(PrivateValues):
    """One iteration of the loader: the batch that is out, and the statistics of those that were counted."""

    def __init__(self) -> None:
        self.number = 0  # batches given
        self.counted = 0
        self.last = False
        self.drawn = False
        self.broken: str | None = None
        self.gathered: Pass | None = None
        self.parameters: list[Any] = []
        self._tensors: list[tuple[Tensor, int]] = []
        self._calls: list[_Call] = []

    def give(self, tensors: list[tuple[Tensor, int]], last: bool) -> None:
        """A batch goes out."""
        self.number, self.last = self.number + 1, last
        self._tensors, self._calls = tensors, []

    def forget(self) -> None:
        """The last batch is over."""
        self._tensors, self._calls = [], []

    def gave(self, tensor: object) -> bool:
        """Whether this very tensor is of the batch that is out."""
        return any(tensor is t for t, _ in self._tensors)

    def unchanged(self, tensors: Iterable[Tensor]) -> bool:
        """Whether all are tensors of the batch that is out, up to device, type and shape of a record; at least one."""
        if any(_version(t) != version for t, version in self._tensors):
            return False
        found = [any(_same_records(tensor, t) for t, _ in self._tensors) for tensor in tensors]
        return bool(found) and all(found)

    def remember_call(self, inputs: Any, outputs: list[Tensor]) -> None:
        """The module was called with the batch."""
        self._calls.append(_Call(inputs, _with_versions(inputs), outputs))

    def ticket(self, outputs: Tensor, targets: Tensor) -> _Ticket | str:
        """What the loss of these outputs is made of, or why it cannot be counted."""
        if not self._tensors:
            return "backward() without a batch from the returned data_loader."
        if not self._calls:
            return f"backward() for inputs that are not those of the batch from the returned data_loader. {_UNCHANGED}."
        calls = [c for c in self._calls if any(_same_records(outputs, t) for t in c.outputs)]
        if not calls:
            return f"backward() for outputs that are not those of the returned module. {_UNCHANGED}."
        if not self.unchanged([targets]):
            return (
                f"backward() for targets that are not those of the batch from the returned data_loader. {_UNCHANGED}."
            )
        held = [*calls[-1].held, *self._tensors, *_with_versions(targets)]
        return _Ticket(self, self.number, calls[-1].inputs, targets, held)


class Training(PrivateValues):
    """The state that the four stand-ins share.

    Args:
        module: the user's own; its ``forward`` is replaced until the last round.
        criterion: the loss.
        loader: private data, every record once.
        rounds: what to gather and draw.
    """

    def __init__(self, module: nn.Module, criterion: Loss, loader: DataLoader[Any], rounds: Rounds):
        self.module, self._criterion, self._loader, self._rounds = module, criterion, loader, rounds
        self._plain: DataLoader[Any] | None = None  # made of the loader's parts, and iterated in its place
        self._gathering: Gathering | None = rounds.begin(module, 0)
        self._begun_at = _fingerprint(module)
        self._number = 0
        self._epoch: _Epoch | None = None
        self._copy: tuple[nn.Module, Generators] | None = None
        self._ended: str | None = None
        self._anchor = torch.zeros((), requires_grad=True)
        self._forward = _Forward(self)

    def start(self) -> None:
        """From here on the module's ``forward`` is this loop's; an unfinished loop of the same module is over."""
        earlier = vars(self.module).get("forward")
        if isinstance(earlier, _Forward):
            earlier.training.end(
                "make_private_with_epsilon was called again for this module, which ended this loop; go on with the objects "
                "that it returned"
            )
        self._forward.install()

    def end(self, message: str) -> None:
        """No further round: the module is an ordinary one again, and what comes is refused with this message."""
        if self._epoch is not None:
            self._epoch.broken, self._epoch.gathered = message, None
        self._ended = message
        self._epoch = self._gathering = self._copy = self._plain = None
        self._rounds.end()
        self._forward.remove()

    def batches(self) -> Iterator[Any]:
        """One iteration of the loader."""
        if self._epoch is not None:
            self._leave(self._epoch)
        epoch = self._epoch = _Epoch()
        self._copy = None
        if self._plain is None or not self._loader.persistent_workers:
            self._plain = loaders.each_alone(self._loader, "data_loader")
        try:
            for batch, tensors, last in _known_batches(self._plain):
                epoch.give(tensors, last)
                yield batch
                if epoch.broken is None and 0 < epoch.counted < epoch.number:
                    self._fail(epoch, "A batch was left without loss.backward(), but every record has to be counted.")
            if epoch.broken is None and epoch.counted and not epoch.drawn:
                self._fail(
                    epoch, "The epoch ended without optimizer.step() after its last batch, so nothing was drawn."
                )
        finally:
            epoch.forget()
            self._leave(epoch)

    def _leave(self, epoch: _Epoch) -> None:
        """Break an epoch off that is not complete, aloud if it had begun."""
        if epoch.broken is not None or epoch.drawn or not epoch.counted:
            return
        epoch.broken, epoch.gathered = "It was left before its last batch was counted.", None
        if not sys.is_finalizing():
            warnings.warn(
                f"an epoch of the private loop was left before its end and does not count. {_AGAIN}; every round needs all "
                "batches",
                UserWarning,
                stacklevel=3,
            )

    def _fail(self, epoch: _Epoch | None, message: str) -> NoReturn:
        """Break the epoch off and say why."""
        if epoch is not None:
            epoch.broken, epoch.gathered = message, None
        raise RuntimeError(f"{message} {_AGAIN}")

    def _open(self) -> _Epoch | None:
        """The current epoch, unless it or the whole run is over."""
        epoch = self._epoch
        if self._ended is not None:
            raise RuntimeError(self._ended)
        if epoch is not None and epoch.drawn:
            raise RuntimeError(
                f"Round {self._number} is drawn and its epoch over; the next needs another one (for ... in data_loader)"
            )
        if epoch is not None and epoch.broken is not None:
            raise RuntimeError(f"This epoch was broken off: {epoch.broken} {_AGAIN}")
        return epoch

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Outputs at the present weights, without a graph; private batches leave no trace in the module."""
        epoch = self._epoch
        private = epoch is not None and epoch.unchanged(_tensors((args, kwargs)))
        with torch.no_grad():
            if private or self.module.training:
                if self._copy is None:
                    shared: dict[int, Any] = {id(p): p for p in self.module.parameters()}
                    duplicate = copy.deepcopy(self.module, shared).eval()
                    self._copy = duplicate, Generators.of(duplicate)
                duplicate, generators = self._copy
                # A layer that works in place must not change the batch.
                own_args, own_kwargs = pytree.tree_map_only(Tensor, torch.clone, (args, kwargs))
                with generators.refreshed() if private else nullcontext():
                    result = duplicate.forward(*own_args, **own_kwargs)
            else:
                result = self._forward.plain(*args, **kwargs)
        if torch.is_grad_enabled():
            result = pytree.tree_map(self._guarded, result)
        if private and epoch is not None:
            outputs = _tensors((result, getattr(result, "logits", None)))
            epoch.remember_call(self._forward.as_inputs(args, kwargs), outputs)
        return result

    def _guarded(self, value: Any) -> Any:
        """A tensor whose backward is refused with words."""
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        return _Guard.apply(value, self._anchor)  # type: ignore[no-untyped-call]

    def loss(self, outputs: Tensor, targets: Tensor) -> PrivateLoss | Tensor:
        """A loss to be counted by its ``backward``, or an ordinary value where other data is evaluated."""
        epoch = self._epoch or _Epoch()
        ticket = epoch.ticket(outputs, targets)
        evaluated = not (torch.is_grad_enabled() and self.module.training)
        if evaluated and not isinstance(ticket, _Ticket) and not epoch.gave(targets):
            return self._criterion(outputs, targets)
        return PrivateLoss(self, ticket)

    def count(self, ticket: _Ticket | str) -> None:
        """Add the statistics of a batch, which must be the one that is out and not yet counted."""
        epoch = self._open()
        if not isinstance(ticket, _Ticket):
            self._fail(epoch, ticket)
        if ticket.epoch is not epoch:
            self._fail(epoch, "backward() for a loss of an epoch that is over.")
        if epoch.counted == ticket.number:
            self._fail(epoch, "backward() was called twice for one batch, but every record counts once.")
        if epoch.counted != ticket.number - 1 or ticket.number != epoch.number:
            self._fail(epoch, "A batch was left without loss.backward(), but every record has to be counted.")
        if any(_version(t) != version for t, version in ticket.held):
            self._fail(epoch, f"backward() for a batch that was changed in place. {_UNCHANGED}.")
        try:
            if epoch.gathered is None:
                self._begin(epoch)
            assert epoch.gathered is not None
            epoch.gathered.add(ticket.inputs, ticket.targets)
            epoch.counted += 1
        except BaseException:  # an interrupt, too, must not leave a batch half counted, or hooks half attached
            epoch.broken, epoch.gathered, self._gathering = "An exception was raised in backward().", None, None
            raise

    def _begin(self, epoch: _Epoch) -> None:
        """The first batch of an epoch: the round starts from the weights that the module has now."""
        now = _fingerprint(self.module)
        if self._gathering is None or now != self._begun_at:
            self._gathering, self._begun_at = self._rounds.begin(self.module, self._number), now
        epoch.gathered = self._gathering.open()
        epoch.parameters = _fingerprint(self.module, buffers=False)

    def step(self) -> None:
        """After the epoch's last batch, the draw; before, nothing."""
        epoch = self._open()
        if epoch is None or epoch.number == 0:
            self._fail(None, "optimizer.step() without a batch from the returned data_loader.")
        if epoch.counted != epoch.number:
            self._fail(
                epoch, "optimizer.step() without loss.backward() for the batch, but every record has to be counted."
            )
        if not epoch.last:
            return
        expected = loaders.dataset_size(self._loader)
        if expected is not None and epoch.gathered is not None and epoch.gathered.records != expected:
            self._fail(
                epoch,
                "data_loader did not yield every record once: its collate function must keep all records of a batch.",
            )
        if _fingerprint(self.module, buffers=False) != epoch.parameters:
            self._fail(
                epoch,
                "The module's parameters were changed, moved or frozen during the epoch; do that between epochs, in which "
                "case the next round starts from them.",
            )
        self._draw(epoch)

    def _draw(self, epoch: _Epoch) -> None:
        """Charge, draw, and move the weights."""
        number, gathered = self._number, epoch.gathered
        assert gathered is not None
        own = {name: p for name, p in self.module.named_parameters() if p.requires_grad}
        before = {name: p.detach().clone() for name, p in own.items()}
        try:
            # Over before it is drawn: whatever happens, no round is drawn twice.
            epoch.drawn, epoch.gathered, self._number, self._gathering = True, None, number + 1, None
            released = dict(self._rounds.draw(gathered.result(), number).named_parameters())
            _copy_into(own, released)
        except BaseException:
            _copy_into(own, before)  # not a part of the release either
            self.end(
                f"The draw of round {number + 1} failed, and with it the run: what was charged stays charged. Call "
                "make_private_with_epsilon again for what is left of the budget"
            )
            raise
        if self._number == self._rounds.count:
            self.end(
                f"All {self._number} rounds of make_private_with_epsilon(epochs={self._number}) are drawn and the module is "
                "final: another epoch would be another release. Call make_private_with_epsilon again, with a budget for it"
            )


# --- the stand-ins --------------------------------------------------------------------------------------------------


class _Forward:
    """In the place of a module's ``forward`` while rounds run; copies and pickles of the module get the plain one."""

    def __init__(self, training: Training):
        earlier = vars(training.module).get("forward")
        self.training, self.plain, self._held = training, training.module.forward, earlier
        if isinstance(earlier, _Forward):
            self.plain, self._held = earlier.plain, earlier._held
        functools.update_wrapper(self, self.plain)

    def install(self) -> None:
        object.__setattr__(self.training.module, "forward", self)

    def remove(self) -> None:
        module = self.training.module
        if vars(module).get("forward") is not self:
            return
        if self._held is None:
            object.__delattr__(module, "forward")
        else:
            object.__setattr__(module, "forward", self._held)

    def as_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call as ``model.call`` understands it: a tensor, a tuple, or a mapping of names."""
        if not kwargs:
            return args[0] if len(args) == 1 and isinstance(args[0], Tensor) else args
        parameters = inspect.signature(self.plain).parameters.values()
        names = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
        if len(args) > len(names):
            raise TypeError("module must be called with positional arguments alone or with arguments that have a name")
        return {**dict(zip(names, args, strict=False)), **kwargs}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.training.forward(args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.plain, memo)

    def __reduce__(self) -> Any:
        return self.plain.__reduce__()


class StandInCriterion(PrivateValues):
    """The user's criterion on the outputs of the private loop; an ordinary criterion for data that is evaluated.

    Args:
        criterion: the user's own.
        training: the loop's state.
    """

    def __init__(self, criterion: Loss, training: Training):
        self.criterion, self._training = criterion, training
        self.reduction = getattr(criterion, "reduction", "mean")

    def __call__(
        self, input: Tensor, target: Tensor, *, shape: tuple[int, ...] | torch.Size | None = None
    ) -> PrivateLoss | Tensor:
        """As Opacus's: ``shape`` is that of outputs (batch, positions, classes) which were flattened for the criterion."""
        if shape is not None:
            input, target = input.reshape(shape), target.reshape(shape[:-1])
        return self._training.loss(input, target)

    def to(self, *args: Any, **kwargs: Any) -> StandInCriterion:
        """Move the user's criterion, if it is a module."""
        if isinstance(self.criterion, nn.Module):
            self.criterion.to(*args, **kwargs)
        return self


class StandInOptimizer(PrivateValues, optim.Optimizer):
    """An optimizer that takes no gradient step: after an epoch's last batch, ``step`` draws the next weights.

    Parameter groups and state are those of the user's optimizer, for the sake of learning rate schedulers and checkpoints.

    Args:
        optimizer: the user's own.
        training: the loop's state.
    """

    def __init__(self, optimizer: optim.Optimizer, training: Training):
        self._training: Training | None = None
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self.state, self.original_optimizer, self._training = optimizer.state, optimizer, training

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Nothing but after the epoch's last batch; then charge, draw, and move the weights.

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

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused: all parameters with ``requires_grad`` move, and no others."""
        if getattr(self, "_training", None) is not None:
            raise ValueError("param_group cannot be added: all parameters of the module with requires_grad=True move")
        super().add_param_group(param_group)

    def __getattr__(self, name: str) -> Any:
        if name in _WITHOUT_MEANING:
            raise AttributeError(f"{name} has no meaning here: {_WITHOUT_MEANING[name]}")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")


class StandInLoader(PrivateValues, DataLoader[Any]):
    """The user's loader, whose batches are known when they come back.

    Args:
        loader: the user's own.
        training: the loop's state.
    """

    def __init__(self, loader: DataLoader[Any], training: Training):
        self.__dict__.update(vars(loader))
        self.original_loader, self._training = loader, training

    def __iter__(self) -> Any:
        return self._training.batches()

    def __len__(self) -> int:
        return len(self.original_loader)

    def __getattr__(self, name: str) -> Any:
        if name == "original_loader":
            raise AttributeError(name)
        return getattr(self.original_loader, name)


StandIns = tuple[nn.Module, StandInOptimizer, StandInCriterion, StandInLoader]


def originals(
    module: nn.Module, optimizer: optim.Optimizer, criterion: Loss | None, data_loader: DataLoader[Any]
) -> tuple[nn.Module, optim.Optimizer, Loss, DataLoader[Any]]:
    """The user's own objects, checked; out of the stand-ins of an earlier call, if that is what came.

    Raises:
        TypeError, ValueError: naming the argument, what came and what to do; nothing is changed.
    """
    if isinstance(module, AbstractGradSampleModule):
        raise ValueError(
            f"module is a {type(module).__name__}, already prepared by Opacus; pass the module inside it, module._module"
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


def check_protocol(
    criterion: Loss,
    *,
    batch_first: bool,
    loss_reduction: str,
    poisson_sampling: bool,
    clipping: str,
    grad_sample_mode: str | None,
    wrap_model: bool,
) -> str | None:
    """Refuse options of Opacus's that have no meaning here; the gradient mode in this engine's words.

    Raises:
        ValueError: an option that has no meaning here, with what to use instead.
    """
    if not batch_first:
        raise ValueError("batch_first=False is not supported: a record is a row of its batch; transpose in the module")
    if poisson_sampling:
        raise ValueError(
            "poisson_sampling=True has no meaning here: every record counts exactly once an epoch; leave it out"
        )
    if not wrap_model:
        raise ValueError("wrap_model=False has no meaning here: the module is never wrapped; leave it out")
    reduction = getattr(criterion, "reduction", loss_reduction)
    if _check.one_of("loss_reduction", loss_reduction, ("mean", "sum")) != reduction:
        raise ValueError(f"loss_reduction={loss_reduction!r} is not the criterion's {reduction!r}; make them agree")
    if clipping in ("per_layer", "adaptive"):
        raise ValueError(
            f"clipping={clipping!r} has no meaning here: a record's projected gradient has one bound; use 'flat' with "
            "max_grad_norm= or, to have it measured, public_loader="
        )
    _check.one_of("clipping", clipping, ("flat",))
    if grad_sample_mode is not None:
        _check.one_of("grad_sample_mode", grad_sample_mode, ("ghost", "hooks", "functorch"))
    return None if grad_sample_mode == "ghost" else grad_sample_mode


def unfinished(module: nn.Module) -> Rounds | None:
    """The rounds of an unfinished loop of this module, which the next one puts an end to."""
    earlier = vars(module).get("forward")
    return earlier.training._rounds if isinstance(earlier, _Forward) else None


def stand_ins(
    module: nn.Module, optimizer: optim.Optimizer, criterion: Loss, data_loader: DataLoader[Any], rounds: Rounds
) -> StandIns:
    """What an Opacus training loop is given instead of the four that ``originals`` checked.

    A loop that is never finished costs what it has drawn. A module that comes again starts anew.
    """
    training = Training(module, criterion, data_loader, rounds)
    result = (
        module,
        StandInOptimizer(optimizer, training),
        StandInCriterion(criterion, training),
        StandInLoader(data_loader, training),
    )
    training.start()
    return result


# --- helpers --------------------------------------------------------------------------------------------------------


def _tensors(tree: Any) -> list[Tensor]:
    """The tensors of a batch, of arguments or of a result."""
    plain = dict(tree) if isinstance(tree, Mapping) else tree
    return [t for t in pytree.tree_leaves(plain) if isinstance(t, Tensor)]


def _with_versions(tree: Any) -> list[tuple[Tensor, int]]:
    """Tensors, and how often each was changed in place so far."""
    return [(t, _version(t)) for t in _tensors(tree)]


def _version(tensor: Tensor) -> int:
    """Counts changes in place; tensors of inference mode do not count, and cannot be changed either."""
    return 0 if tensor.is_inference() else tensor._version


def _same_records(found: Tensor, given: Tensor) -> bool:
    """Whether the rows of a tensor are those that were given, up to device, type and the shape of a row."""
    if found is given:
        return True
    if found.shape[:1] != given.shape[:1] or found.numel() != given.numel():
        return False
    found = found.detach()
    same = given.detach().to(found.device, found.dtype).reshape(found.shape)
    return bool(((found == same) | ((found != found) & (same != same))).all())


def _fingerprint(module: nn.Module, *, buffers: bool = True) -> list[Any]:
    """Tells whether parameters (and buffers) were replaced, moved, frozen or changed in place; holds no values."""
    named = itertools.chain(module.named_parameters(), module.named_buffers() if buffers else ())
    return [(n, t.shape, t.device, t.dtype, t.requires_grad, t.data_ptr(), _version(t)) for n, t in named]


def _known_batches(loader: DataLoader[Any]) -> Iterator[tuple[Any, list[tuple[Tensor, int]], bool]]:
    """Every batch, its tensors with their versions, and whether it is the last one."""
    if loaders.dataset_size(loader) is not None:
        total = len(loader)
        for number, batch in enumerate(freshly(loader), start=1):
            yield batch, _with_versions(batch), number == total
        return
    # Iterable data sets do not tell: one batch is taken ahead.
    held: tuple[Any, list[tuple[Tensor, int]]] | None = None
    for batch in freshly(loader):
        if held is not None:
            yield *held, False
        held = batch, _with_versions(batch)
    if held is not None:
        yield *held, True


@torch.no_grad()
def _copy_into(parameters: dict[str, nn.Parameter], values: Mapping[str, Tensor]) -> None:
    """Move parameters in place."""
    for name, parameter in parameters.items():
        parameter.copy_(values[name])
