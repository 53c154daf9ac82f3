"""Outputs of the module in a loop: a loss of torch's that the script computes from them is the loop's own.

A script in Opacus's hooks mode has a criterion of its own, which the engine never sees. But a loss of torch is one call of a
function in ``torch.nn.functional``, with the outputs and the targets as its first two arguments, and a tensor can answer the
functions that it is given to. So outputs answer that call themselves, and if it is the one that the engine was told of, by
function and options, it gives the same private loss as the criterion that ghost mode returns.

Any other loss is told apart by its call, and other functions of the outputs are computed as always, without a gradient.

**Privacy:** outputs of private records are private data, which the script may use and not give away. What is counted is the
criterion that the engine knows, one record at a time, whatever the script has computed.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils import _pytree as pytree

from opacus_expm.swap.losses import PrivateTensor


@functools.cache
def _losses() -> dict[Any, inspect.Signature]:
    """The losses of ``torch.nn.functional``: functions whose first two arguments are ``input`` and ``target``."""
    functions = [f for name, f in vars(F).items() if inspect.isfunction(f) and not name.startswith("_")]
    found = {f: inspect.signature(f) for f in functions}
    return {f: s for f, s in found.items() if list(s.parameters)[:2] == ["input", "target"]}


@dataclass(frozen=True, eq=False)
class LossCall:
    """One call of a loss of ``torch.nn.functional``: the function and its options, without outputs and targets."""

    function: Callable[..., Tensor]
    options: dict[str, Any]

    def same(self, other: LossCall) -> bool:
        """Whether another call is of the same loss."""
        return self.function is other.function and all(_equal(v, other.options[k]) for k, v in self.options.items())

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The loss of plain tensors."""
        return self.function(outputs, targets, **self.options)

    def __str__(self) -> str:
        defaults = _losses()[self.function].parameters
        shown = {k: v for k, v in self.options.items() if k == "reduction" or not _equal(v, defaults[k].default)}
        words = [f"{k}=<tensor>" if isinstance(v, Tensor) else f"{k}={v!r}" for k, v in shown.items()]
        return f"{self.function.__name__}({', '.join(words)})"


def _equal(first: object, second: object) -> bool:
    """Whether two options are equal; tensors by their values."""
    if isinstance(first, Tensor) or isinstance(second, Tensor):
        both = isinstance(first, Tensor) and isinstance(second, Tensor)
        return both and first.shape == second.shape and torch.equal(first.cpu(), second.to(first).cpu())  # type: ignore
    return first == second


Answer = Callable[[LossCall, Tensor, Tensor], Tensor]
# Functions that leave the values as they are, or other values, which is noticed; all others change gradients.
_KEPT = {
    "view",
    "view_as",
    "reshape",
    "reshape_as",
    "squeeze",
    "unsqueeze",
    "flatten",
    "contiguous",
    "clone",
    "getitem",
}
_KEPT |= {"select", "narrow", "to", "type", "type_as", "float", "double", "cpu", "cuda", "requires_grad"}


class Outputs(Tensor):
    """A tensor with a module's outputs, or something computed from them.

    Attributes:
        through: the function that made something else of the outputs, None if they are still themselves.
    """

    _answer: Answer
    through: str | None

    @staticmethod
    def of(value: Tensor, answer: Answer, through: str | None = None) -> Outputs:
        """Outputs.

        Args:
            value: a floating tensor.
            answer: what gives the loss for a call, outputs and targets.
            through: as the attribute.
        """
        found: Outputs = value if isinstance(value, Outputs) else value.as_subclass(Outputs)
        found._answer, found.through = answer, through
        return found

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Answer a loss, and compute anything else as always."""
        if any(issubclass(t, PrivateTensor) for t in types):
            return NotImplemented
        kwargs = kwargs or {}
        first = next(a for a in pytree.tree_leaves((args, kwargs)) if isinstance(a, Outputs))
        answer, name = first._answer, func.__name__
        if func in _losses():
            bound = _losses()[func].bind(*args, **kwargs)
            bound.apply_defaults()
            options = dict(bound.arguments)
            return answer(LossCall(func, options), options.pop("input"), options.pop("target"))
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
        through = first.through or (None if name.strip("_") in _KEPT else name)
        through = "an attribute" if through == "__get__" else through

        def given(value: Tensor) -> Tensor:
            return Outputs.of(value, answer, through) if value.is_floating_point() else value

        return pytree.tree_map_only(Tensor, given, result)

    def plain(self) -> Tensor:
        """An ordinary tensor with the same values."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(Tensor)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.plain().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


def known(criterion: Callable[[Tensor, Tensor], Tensor]) -> LossCall | None:
    """The one call of a loss of torch that a criterion consists of, None if it is anything else."""
    found: list[LossCall] = []
    marker, target = torch.zeros(()), torch.zeros(1, dtype=torch.long)

    def note(call: LossCall, outputs: Tensor, targets: Tensor) -> Tensor:
        if outputs is probe and targets is target:
            found.append(call)
        return marker

    probe = Outputs.of(torch.zeros(1, 2), note)
    try:
        value = criterion(probe, target)
    except Exception:  # it asks for more than outputs and targets that nothing is known of
        return None
    return found[0] if len(found) == 1 and value is marker else None
