"""The state of one epoch of a training loop, and of the loop as a whole.

**Privacy:** everything here is private data. It leaves through ``Rounds.draw`` alone, which charges before it draws.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from opacus_expm._private import PrivateValues
from opacus_expm.gathering import loaders
from opacus_expm.gathering.passes import Pass
from opacus_expm.gathering.randomness import freshly
from opacus_expm.gathering.statistics import Statistics
from opacus_expm.swap.forward import Forward
from opacus_expm.swap.losses import PrivateLoss, Ticket
from opacus_expm.swap.tensors import changed_since, fingerprint, same_records, tensors_of, with_versions

Loss = Callable[[Tensor, Tensor], Tensor]

_AGAIN = "Nothing was released; start the epoch again from its beginning (for ... in data_loader)"
_UNCHANGED = (
    "Tensors must reach the module and the criterion with the values that data_loader gave them; put transformations into "
    "the data set, its collate function, the module or the criterion"
)


class Gathering(Protocol):
    """A round that is ready to begin."""

    def open(self) -> Pass:
        """A pass to which the loop adds a batch at a time."""


class Rounds(Protocol):
    """The rounds of a loop, which the engine has checked and admitted to the budget."""

    @property
    def count(self) -> int:
        """The number of rounds, T."""

    def begin(self, module: nn.Module, number: int) -> Gathering:
        """Begin a round at the weights of ``module``; rounds are numbered from 0."""

    def draw(self, statistics: Statistics, number: int) -> nn.Module:
        """Charge the ledger, then draw the next weights."""

    def end(self) -> None:
        """Release what is reserved of the budget: no further round is going to be drawn."""


@dataclass(frozen=True, eq=False, repr=False)
class _Call(PrivateValues):
    """A call of the module with the present batch: the inputs, their tensors with versions, and the outputs."""

    inputs: Any
    held: list[tuple[Tensor, int]]
    outputs: list[Tensor]


class Epoch(PrivateValues):
    """One iteration of the loader: the batch that the script has now, and the statistics of the batches that were counted.

    Attributes:
        number: how many batches the script was given.
        counted: how many of them were counted.
        last: whether the present batch is the last one.
        drawn: whether the round of this epoch was drawn.
        broken: why the epoch was broken off, None if it was not.
        gathered: the pass over the counted batches, None before the first.
        parameters: a fingerprint of the module's parameters at the first counted batch.
    """

    def __init__(self) -> None:
        self.number = 0
        self.counted = 0
        self.last = False
        self.drawn = False
        self.broken: str | None = None
        self.gathered: Pass | None = None
        self.parameters: list[Any] = []
        self._tensors: list[tuple[Tensor, int]] = []
        self._calls: list[_Call] = []

    def give(self, tensors: list[tuple[Tensor, int]], last: bool) -> None:
        """Note that the script is given its next batch."""
        self.number, self.last = self.number + 1, last
        self._tensors, self._calls = tensors, []

    def forget(self) -> None:
        """Drop the present batch."""
        self._tensors, self._calls = [], []

    def break_off(self, reason: str) -> None:
        """Drop the statistics: the epoch does not count."""
        self.broken, self.gathered = reason, None

    def gave(self, tensor: object) -> bool:
        """Whether a tensor belongs to the present batch, as the same object and not only with the same values."""
        return any(tensor is t for t, _ in self._tensors)

    def unchanged(self, tensors: Iterable[Tensor]) -> bool:
        """Whether all the given tensors have the records of a tensor in the present batch; False if none is given."""
        if changed_since(self._tensors):
            return False
        found = [any(same_records(tensor, t) for t, _ in self._tensors) for tensor in tensors]
        return bool(found) and all(found)

    def remember_call(self, inputs: Any, outputs: list[Tensor]) -> None:
        """Note that the module was called with the present batch."""
        self._calls.append(_Call(inputs, with_versions(inputs), outputs))

    def ticket(self, outputs: Tensor, targets: Tensor) -> Ticket | str:
        """What a loss of these outputs and targets is built from, or the reason why it cannot be counted."""
        if not self._tensors:
            return "backward() without a batch from the returned data_loader."
        if not self._calls:
            return f"backward() for inputs that are not those of the batch from the returned data_loader. {_UNCHANGED}."
        calls = [c for c in self._calls if any(same_records(outputs, t) for t in c.outputs)]
        if not calls:
            return f"backward() for outputs that are not those of the returned module. {_UNCHANGED}."
        if not self.unchanged([targets]):
            return (
                f"backward() for targets that are not those of the batch from the returned data_loader. {_UNCHANGED}."
            )
        held = [*calls[-1].held, *self._tensors, *with_versions(targets)]
        return Ticket(self, self.number, calls[-1].inputs, targets, held)


class Training(PrivateValues):
    """The state of a loop, which its four stand-ins share.

    Args:
        module: the user's own; its ``forward`` is replaced until the last round.
        criterion: the loss.
        loader: private data, every record once.
        rounds: what to gather and draw.
    """

    def __init__(self, module: nn.Module, criterion: Loss, loader: DataLoader[Any], rounds: Rounds):
        self.module, self.rounds = module, rounds
        self._criterion, self._loader = criterion, loader
        self._plain: DataLoader[Any] | None = None  # made of the loader's parts, and iterated in its place
        self._round: Gathering | None = rounds.begin(module, 0)
        self._begun_at = fingerprint(module)
        self._number = 0
        self._epoch: Epoch | None = None
        self._ended: str | None = None
        self._forward = Forward(module, self)

    @staticmethod
    def of(module: nn.Module) -> Training | None:
        """The unfinished loop that a module is in."""
        forward = vars(module).get("forward")
        loop = forward.loop if isinstance(forward, Forward) else None
        return loop if isinstance(loop, Training) else None

    def start(self) -> None:
        """Replace the module's ``forward``, and end an unfinished loop of the same module."""
        earlier = Training.of(self.module)
        if earlier is not None:
            earlier.end(
                "make_private_with_epsilon was called again for this module, which ended this loop; go on with the objects "
                "that it returned"
            )
        self._forward.install()

    def end(self, message: str) -> None:
        """Make the module an ordinary one again; from now on ``backward`` and ``step`` are refused with this message."""
        if self._epoch is not None:
            self._epoch.break_off(message)
        self._ended = message
        self._epoch = self._round = self._plain = None
        self.rounds.end()
        self._forward.remove()

    # What the loader does.

    def batches(self) -> Iterator[Any]:
        """One epoch: every batch of the loader once."""
        if self._epoch is not None:
            self._leave(self._epoch)
        epoch = self._epoch = Epoch()
        self._forward.forget_copy()
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

    def _leave(self, epoch: Epoch) -> None:
        """Break off an epoch of which only a part was counted, and warn."""
        if epoch.broken is not None or epoch.drawn or not epoch.counted:
            return
        epoch.break_off("It was left before its last batch was counted.")
        if not sys.is_finalizing():
            warnings.warn(
                f"an epoch of the private loop was left before its end and does not count. {_AGAIN}; every round needs all "
                "batches",
                UserWarning,
                stacklevel=3,
            )

    def _fail(self, epoch: Epoch | None, message: str) -> NoReturn:
        """Break the epoch off and say why."""
        if epoch is not None:
            epoch.break_off(message)
        raise RuntimeError(f"{message} {_AGAIN}")

    def _open(self) -> Epoch | None:
        """The present epoch; an error if it is over, or the whole loop."""
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

    # What the module and the criterion do.

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Answer a call of the module, and remember it if it was with the present batch."""
        epoch = self._epoch
        private = epoch is not None and epoch.unchanged(tensors_of((args, kwargs)))
        result = self._forward.compute(args, kwargs, private=private)
        if private and epoch is not None:
            outputs = tensors_of((result, getattr(result, "logits", None)))
            epoch.remember_call(self._forward.as_inputs(args, kwargs), outputs)
        return result

    def loss(self, outputs: Tensor, targets: Tensor) -> PrivateLoss | Tensor:
        """A private loss, whose ``backward`` counts the batch; an ordinary one where other data is evaluated."""
        epoch = self._epoch or Epoch()
        ticket = epoch.ticket(outputs, targets)
        evaluated = not (torch.is_grad_enabled() and self.module.training)
        if evaluated and not isinstance(ticket, Ticket) and not epoch.gave(targets):
            return self._criterion(outputs, targets)
        return PrivateLoss(self.count, ticket)

    def count(self, ticket: Ticket | str) -> None:
        """Add the statistics of a batch. It must be the present one, and not yet counted."""
        epoch = self._open()
        if not isinstance(ticket, Ticket):
            self._fail(epoch, ticket)
        if epoch is None or ticket.epoch is not epoch:
            self._fail(epoch, "backward() for a loss of an epoch that is over.")
        if epoch.counted == ticket.number:
            self._fail(epoch, "backward() was called twice for one batch, but every record counts once.")
        if epoch.counted != ticket.number - 1 or ticket.number != epoch.number:
            self._fail(epoch, "A batch was left without loss.backward(), but every record has to be counted.")
        if changed_since(ticket.held):
            self._fail(epoch, f"backward() for a batch that was changed in place. {_UNCHANGED}.")
        try:
            if epoch.gathered is None:
                epoch.gathered = self._begin(epoch)
            epoch.gathered.add(ticket.inputs, ticket.targets)
            epoch.counted += 1
        except BaseException:  # an interrupt, too, must not leave a batch half counted, or hooks half attached
            epoch.break_off("An exception was raised in backward().")
            self._round = None
            raise

    def _begin(self, epoch: Epoch) -> Pass:
        """The pass of an epoch whose first batch is counted: the round starts from the weights that the module has now."""
        now = fingerprint(self.module)
        if self._round is None or now != self._begun_at:
            self._round, self._begun_at = self.rounds.begin(self.module, self._number), now
        epoch.parameters = fingerprint(self.module, buffers=False)
        return self._round.open()

    # What the optimizer does.

    def step(self) -> None:
        """After the epoch's last batch charge, draw and move the weights; before it, do nothing."""
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
        assert epoch.gathered is not None
        if expected is not None and epoch.gathered.records != expected:
            self._fail(
                epoch,
                "data_loader did not yield every record once: its collate function must keep all records of a batch.",
            )
        if fingerprint(self.module, buffers=False) != epoch.parameters:
            self._fail(
                epoch,
                "The module's parameters were changed, moved or frozen during the epoch; do that between epochs, in which "
                "case the next round starts from them.",
            )
        self._draw(epoch)

    def _draw(self, epoch: Epoch) -> None:
        """Charge, draw, and move the weights."""
        assert epoch.gathered is not None
        number, gathered = self._number, epoch.gathered
        own = {name: p for name, p in self.module.named_parameters() if p.requires_grad}
        before = {name: p.detach().clone() for name, p in own.items()}
        try:
            # Over before it is drawn: whatever happens, no round is drawn twice.
            epoch.drawn, epoch.gathered, self._number, self._round = True, None, number + 1, None
            released = dict(self.rounds.draw(gathered.result(), number).named_parameters())
            _copy_into(own, released)
        except BaseException:
            _copy_into(own, before)  # not a part of the release either
            self.end(
                f"The draw of round {number + 1} failed, and with it the run: what was charged stays charged. Call "
                "make_private_with_epsilon again for what is left of the budget"
            )
            raise
        if self._number == self.rounds.count:
            self.end(
                f"All {self._number} rounds of make_private_with_epsilon(epochs={self._number}) are drawn and the module is "
                "final: another epoch would be another release. Call make_private_with_epsilon again, with a budget for it"
            )


def _known_batches(loader: DataLoader[Any]) -> Iterator[tuple[Any, list[tuple[Tensor, int]], bool]]:
    """Every batch, its tensors with their versions, and whether it is the last one."""
    if loaders.dataset_size(loader) is not None:
        total = len(loader)
        for number, batch in enumerate(freshly(loader), start=1):
            yield batch, with_versions(batch), number == total
        return
    # An iterable data set does not say which batch is its last: one batch is taken ahead.
    held: tuple[Any, list[tuple[Tensor, int]]] | None = None
    for batch in freshly(loader):
        if held is not None:
            yield *held, False
        held = batch, with_versions(batch)
    if held is not None:
        yield *held, True


@torch.no_grad()
def _copy_into(parameters: dict[str, nn.Parameter], values: Mapping[str, Tensor]) -> None:
    """Give parameters new values in place."""
    for name, parameter in parameters.items():
        parameter.copy_(values[name])
