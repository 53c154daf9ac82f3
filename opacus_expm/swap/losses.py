"""Losses of private records: they have no value, and their ``backward`` counts a batch.

**Privacy:** the number that a loss would be is never computed, so that nothing here can reveal it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
from torch import Tensor

from opacus_expm._private import PrivateValues

_HIDDEN = (
    "the loss of private records is private data and has no value here; judge the module by its loss on data that may be "
    "seen, with module.eval() and torch.no_grad()"
)
_OWN_LOSS = (
    "only a loss as the returned criterion gives it, perhaps scaled by a positive number, can be counted: a sum with other "
    "terms is not the loss of single records; put the terms into the criterion, or use regularization= for a ridge"
)
_NO_GRADIENTS = (
    "the module has no gradients while make_private_with_epsilon's rounds run: build the loss with the criterion that it "
    "returned, as loss = criterion(module(x), y)"
)


class PrivateNumber:
    """Stands for a number that is private data and was not computed.

    Arithmetic with it gives another private number, text shows the word "private", and whatever needs a value is refused.
    """

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
        """A private number again, because scripts read ``loss.data`` of a tensor."""
        return PrivateNumber()

    def backward(self, retain_graph: bool | None = None) -> None:
        """Refuse: this is not a loss that the criterion gave."""
        raise RuntimeError(_OWN_LOSS)

    def __format__(self, spec: str) -> str:
        return "private"

    def __str__(self) -> str:
        return "private"

    def __repr__(self) -> str:
        return f"{type(self).__name__}(private)"


@dataclass(frozen=True, eq=False, repr=False)
class Ticket(PrivateValues):
    """What a loss was built from.

    Attributes:
        epoch: the epoch to which the batch belongs.
        number: the place of the batch in its epoch; the first is 1.
        inputs: what the module received.
        targets: what the criterion received.
        held: the tensors that must not be changed before the batch is counted, each with its version.
    """

    epoch: object
    number: int
    inputs: Any
    targets: Tensor
    held: list[tuple[Tensor, int]]

    def emptied(self) -> Ticket:
        """The same place, without the tensors."""
        return replace(self, inputs=None, targets=torch.empty(0), held=[])


class PrivateLoss(PrivateValues, PrivateNumber):
    """The loss of a batch of private records. It has no value, and its ``backward`` counts the batch.

    Args:
        count: adds a batch to the statistics of its epoch, or raises an error.
        ticket: what the loss was built from, or the reason why the batch cannot be counted.
    """

    def __init__(self, count: Callable[[Ticket | str], None], ticket: Ticket | str):
        self._count = count
        self._ticket = ticket

    def backward(self, retain_graph: bool | None = None) -> None:
        """Gather the statistics of the batch.

        Raises:
            RuntimeError: the batch cannot be counted; the message says why and what to do.
        """
        self._count(self._ticket)
        if isinstance(self._ticket, Ticket):  # a list of losses must not keep batches alive
            self._ticket = self._ticket.emptied()

    def _itself(self, *_: object, **__: object) -> PrivateLoss:
        return self

    mean = sum = to = cuda = _itself

    def _scaled(self, *factors: object, **_: object) -> PrivateNumber:
        return self if all(isinstance(f, int | float) and f > 0 for f in factors) else PrivateNumber()

    __mul__ = __rmul__ = __truediv__ = _scaled


class _Guard(torch.autograd.Function):
    """The identity, whose backward raises an error that says how to build the loss."""

    @staticmethod
    def forward(ctx: Any, outputs: Tensor, anchor: Tensor) -> Tensor:
        return outputs.clone()

    @staticmethod
    def backward(ctx: Any, *_: Any) -> NoReturn:
        raise RuntimeError(_NO_GRADIENTS)


def guarded(value: Any, anchor: Tensor) -> Any:
    """A tensor with the same values whose backward is refused; anything else as it is.

    Args:
        value: an output of the module.
        anchor: any tensor that requires a gradient, so that the result does.
    """
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return value
    return _Guard.apply(value, anchor)  # type: ignore[no-untyped-call]
