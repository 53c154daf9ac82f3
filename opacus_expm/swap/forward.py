"""What takes the place of a module's ``forward`` while rounds run.

**Privacy:** private batches run through a copy of the module that shares its parameters and nothing else, so that no buffer
or attribute of the module depends on them. The outputs themselves are private data.
"""

from __future__ import annotations

import copy
import functools
import inspect
import sys
from contextlib import nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from opacus_expm.gathering.randomness import Generators
from opacus_expm.swap.losses import guarded
from opacus_expm.swap.outputs import LossCall, Outputs


class Loop(Protocol):
    """The loop to which a module belongs while its rounds run."""

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Answer a call of the module."""

    def loss(self, outputs: Tensor, targets: Tensor, call: LossCall) -> Tensor:
        """The loss that the script computes from outputs by itself."""


class Forward:
    """A ``forward`` without a graph, which tells the loop of every call.

    Copies and pickles of the module get the module's own ``forward``, and are ordinary modules.

    Args:
        module: the user's own.
        loop: what answers the calls, usually by ``compute``.
    """

    def __init__(self, module: nn.Module, loop: Loop):
        self.loop, self._module = loop, module
        earlier = vars(module).get("forward")
        self.plain, self._held = module.forward, earlier
        if isinstance(earlier, Forward):
            self.plain, self._held = earlier.plain, earlier._held
        self._copy: tuple[nn.Module, Generators] | None = None
        self.anchor = torch.zeros((), requires_grad=True)
        functools.update_wrapper(self, self.plain)

    def install(self) -> None:
        """Take the place of the module's own ``forward``."""
        object.__setattr__(self._module, "forward", self)

    def remove(self) -> None:
        """Give the module its own ``forward`` back, unless another one has taken this one's place."""
        self.forget_copy()
        if vars(self._module).get("forward") is not self:
            return
        if self._held is None:
            object.__delattr__(self._module, "forward")
        else:
            object.__setattr__(self._module, "forward", self._held)

    def forget_copy(self) -> None:
        """Make a new copy of the module for the next private batch."""
        self._copy = None

    def compute(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, private: bool) -> Any:
        """Outputs at the present weights, without a graph; their ``backward`` is refused, and losses are the loop's.

        Args:
            args: of the call.
            kwargs: of the call.
            private: whether these are private records, which must leave no trace in the module.
        """
        with torch.no_grad():
            if private or self._module.training:
                if self._copy is None:
                    shared: dict[int, Any] = {id(p): p for p in self._module.parameters()}
                    duplicate = copy.deepcopy(self._module, shared).eval()
                    self._copy = duplicate, Generators.of(duplicate)
                duplicate, generators = self._copy
                # A layer that works in place must not change the batch.
                own_args, own_kwargs = pytree.tree_map_only(Tensor, torch.clone, (args, kwargs))
                with generators.refreshed() if private else nullcontext():
                    result = duplicate.forward(*own_args, **own_kwargs)
            else:
                result = self.plain(*args, **kwargs)
        if torch.is_grad_enabled():
            result = pytree.tree_map_only(Tensor, self._given, result)
        return result

    def _given(self, value: Tensor) -> Tensor:
        """An output as the script is given it."""
        if not value.is_floating_point():
            return value
        return Outputs.of(guarded(value, self.anchor), lambda call, o, t: self.loop.loss(o, t, call))

    def as_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The arguments of a call as ``gathering.model.call`` takes them: a tensor, a tuple, or a mapping of names."""
        if not kwargs:
            return args[0] if len(args) == 1 and isinstance(args[0], Tensor) else args
        parameters = inspect.signature(self.plain).parameters.values()
        names = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
        if len(args) > len(names):
            raise TypeError("module must be called with positional arguments alone or with arguments that have a name")
        return {**dict(zip(names, args, strict=False)), **kwargs}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Let the loop answer a call of the module, as it is: what was compiled afterwards would trace into the loop."""
        answer = self.loop.forward
        if "torch._dynamo" in sys.modules:  # which takes seconds to load, and is there where something was compiled
            answer = torch.compiler.disable(answer)  # type: ignore[no-untyped-call]
        return answer(args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.plain, memo)

    def __reduce__(self) -> Any:
        return self.plain.__reduce__()
