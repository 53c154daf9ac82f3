"""Losses of private records: they have no value, and their ``backward`` counts a batch.

To a script a loss is a tensor, as everywhere. What it would be is never computed: the number in it is NaN, whatever is
computed of it is NaN too, and text shows the word "private" instead. So there is one rule for what scripts do with a loss:

| what the script does | what it gets |
|---|---|
| ``backward()``, of the loss or of the loss times a positive number | the batch is counted |
| ``backward()`` of anything else that was computed of it | an error |
| prints and formats it, or its ``item()``, a sum or a mean of such | ``private`` |
| ``torch.isnan``, ``isinf``, ``isfinite`` | no, no and yes: nothing is looked at |
| ``float(loss)``, which can only be a number | NaN, and a warning |
| compares it, or asks for its truth or an integer: what would steer the training | an error |

**Privacy:** the number that a loss would be is never computed, so that nothing here can reveal it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from numbers import Number
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from opacus_expm import _warnings
from opacus_expm._private import PrivateValues

_HIDDEN = (
    "the loss of private records is private data and has no value here; judge the module by its loss on data that may be "
    "seen, with module.eval() and torch.no_grad()"
)
_OWN_LOSS = (
    "only a loss as the criterion gives it, perhaps scaled by a positive number, can be counted: a sum with other terms is "
    "not the loss of single records; put the terms into criterion= of make_private_with_epsilon, or use regularization= for "
    "a ridge"
)
_NO_GRADIENTS = (
    "the module has no gradients while make_private_with_epsilon's rounds run, and this loss was computed from its outputs "
    "in a way that is not recognised. Build it with one call of the criterion that the engine was told, as loss = "
    "criterion(module(x), y); to have any other function counted, pass it as criterion= with grad_sample_mode='ghost', and "
    "use the criterion that is returned"
)
_HEALTH = {"isnan": False, "isinf": False, "isposinf": False, "isneginf": False, "isfinite": True, "isreal": True}
_STEERS = {"eq", "ne", "lt", "le", "gt", "ge", "equal", "less", "less_equal", "greater", "greater_equal", "not_equal"}
_STEERS |= {"bool", "int", "index"}
_VALUES = {"item", "tolist", "numpy"}


class PrivateNumber(Number):
    """Stands for a number that is private data and was not computed; ``loss.item()`` gives one.

    Arithmetic with it gives another private number, and text shows the word "private".
    """

    def _absorb(self, *_: object, **__: object) -> PrivateNumber:
        return PrivateNumber()

    def _refuse(self, *_: object) -> NoReturn:
        raise TypeError(_HIDDEN)

    item = _absorb
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _absorb
    __pow__ = __rpow__ = __neg__ = __pos__ = __abs__ = __round__ = _absorb
    __bool__ = __int__ = __index__ = _refuse
    __lt__ = __le__ = __gt__ = __ge__ = __eq__ = __ne__ = _refuse
    __hash__ = object.__hash__

    def __float__(self) -> float:
        _warnings.warn(f"float() of a private loss is nan: {_HIDDEN}")
        return math.nan

    def __array_ufunc__(self, ufunc: np.ufunc, *_: object, **__: object) -> Any:
        if ufunc.__name__ in _STEERS:
            raise TypeError(_HIDDEN)
        return np.bool_(_HEALTH[ufunc.__name__]) if ufunc.__name__ in _HEALTH else PrivateNumber()

    def as_integer_ratio(self) -> NoReturn:
        """Refuse as NaN does, which ``statistics.mean`` then leaves as it is."""
        raise ValueError(_HIDDEN)

    def is_finite(self) -> bool:
        """No, as ``statistics.mean`` asks of what has no ratio."""
        return False

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


Count = Callable[[Ticket | str, bool], None]


class PrivateTensor(PrivateValues, Tensor):
    """A tensor of private losses: NaN, which text calls "private"."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Answer every function of torch that gets such a tensor by the rule above."""
        name = func.__name__.strip("_")
        if name in _STEERS:
            raise TypeError(_HIDDEN)
        if name in _VALUES:
            return PrivateNumber()
        if name in _HEALTH:
            return torch.full(args[0].shape, _HEALTH[name])
        if name == "float" and func.__name__ == "__float__":
            return float(PrivateNumber())
        loss = next((a for a in args if isinstance(a, PrivateLoss)), None)
        if loss is not None and loss.still(name, args):
            return loss
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))

        def hidden(value: Tensor) -> Tensor:
            own = value.is_floating_point() and not any(value is a for a in args)
            return value.as_subclass(PrivateTensor) if own else value

        return pytree.tree_map_only(Tensor, hidden, result)

    def backward(self, *_: Any, **__: Any) -> None:
        """Refuse: this is not a loss that the criterion gave."""
        raise RuntimeError(_OWN_LOSS)

    def _refuse(self, *_: object) -> NoReturn:
        raise TypeError(_HIDDEN)

    # Not by way of torch, which takes a TypeError for an argument that it does not know.
    __lt__ = __le__ = __gt__ = __ge__ = __eq__ = __ne__ = _refuse
    __hash__ = Tensor.__hash__

    def __array__(self, *_: Any, **__: Any) -> np.ndarray[Any, Any]:
        return np.array(float(PrivateNumber()))

    def __round__(self, ndigits: int | None = None) -> PrivateNumber:
        return PrivateNumber()

    def __format__(self, spec: str) -> str:
        return "private"

    def __str__(self) -> str:
        return "private"

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"{type(self).__name__}(private)"

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        self.__reduce__()


class PrivateLoss(PrivateTensor):
    """The loss of a batch of private records, whose ``backward`` counts the batch."""

    _count: Count
    _ticket: Ticket | str
    _scaled: bool  # by a tensor, as gradient scalers do, which then look for gradients

    @staticmethod
    def of(count: Count, ticket: Ticket | str, anchor: Tensor) -> PrivateLoss:
        """A loss.

        Args:
            count: adds a batch to the statistics of its epoch, or raises an error; told whether a scaler wants gradients.
            ticket: what the loss was built from, or the reason why the batch cannot be counted.
            anchor: any tensor that requires a gradient, so that the loss does, as scripts may ask.
        """
        loss: PrivateLoss = guarded(torch.tensor(math.nan), anchor).as_subclass(PrivateLoss)
        loss._count, loss._ticket, loss._scaled = count, ticket, False
        return loss

    def backward(self, *_: Any, **__: Any) -> None:
        """Gather the statistics of the batch.

        Raises:
            RuntimeError: the batch cannot be counted; the message says why and what to do.
        """
        self._count(self._ticket, self._scaled)
        if isinstance(self._ticket, Ticket):  # a list of losses must not keep batches alive
            self._ticket = self._ticket.emptied()

    def still(self, name: str, args: tuple[Any, ...]) -> bool:
        """Whether a function of torch leaves it the loss of its batch: a mean of one number, or a positive factor."""
        if name in ("mul", "multiply") or (name in ("div", "divide", "true_divide") and args[0] is self):
            factors = [a for a in args if a is not self]
            self._scaled = self._scaled or any(isinstance(a, Tensor) for a in factors)
            return len(factors) == 1 and _positive(factors[0])
        return name in ("mean", "sum", "to", "cuda", "cpu", "float", "double", "squeeze") and args[0] is self


def _positive(factor: object) -> bool:
    """Whether a factor is a positive number, or a tensor with one, as gradient scalers have it."""
    if isinstance(factor, Tensor):
        return not isinstance(factor, PrivateTensor) and factor.numel() == 1 and bool(factor > 0)
    return isinstance(factor, int | float) and factor > 0


class _Guard(torch.autograd.Function):
    """The identity, whose backward raises an error that says how to build the loss."""

    @staticmethod
    def forward(ctx: Any, outputs: Tensor, anchor: Tensor) -> Tensor:
        return outputs.clone()

    @staticmethod
    def backward(ctx: Any, *_: Any) -> NoReturn:
        raise RuntimeError(_NO_GRADIENTS)


def guarded(value: Tensor, anchor: Tensor) -> Tensor:
    """A tensor with the same values whose backward is refused.

    Args:
        value: floating.
        anchor: any tensor that requires a gradient, so that the result does.
    """
    found: Tensor = _Guard.apply(value, anchor)  # type: ignore[no-untyped-call]
    return found
