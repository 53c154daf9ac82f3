"""Projected per-sample Jacobian rows through ``torch.func``, for models that hooks cannot serve.

Each record is run alone, as a batch of one, under ``vmap``: tied weights, in-place activations, evaluation-mode
BatchNorm, ``nn.LSTM``, ``nn.MultiheadAttention`` and parameters used outside any layer are all served, and a
record's rows cannot depend on another's by construction. The price is memory for (records, r, p) at a time, kept
below a fixed number of elements by working on a few records at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.func import functional_call, vjp, vmap
from torch.utils import _pytree as pytree

from opacus_expm.model import Layout, call, outputs_of
from opacus_expm.projection import Projection

_MAX_ELEMENTS = 2**25  # of the (records, r, p) block: 128 MiB in float32


class FunctionalRows:
    """Per-sample rows cᵀ(∂f/∂θ)A of a module, for any output cotangents c.

    Args:
        module: a working copy in evaluation mode.
        layout: places of its trainable parameters in R^p.
        projection: the map A.
    """

    def __init__(self, module: nn.Module, layout: Layout, projection: Projection):
        self._module = module
        self._layout = layout
        self._projection = projection
        state = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        self._trainable = {n: state.pop(n).detach() for n in layout.names}
        self._constant = {n: t.detach() for n, t in state.items()}

    def _record(self, trainable: dict[str, Tensor], inputs: Any) -> Tensor:
        """Outputs (m,) of one record, given without its batch dimension."""
        alone = pytree.tree_map(lambda t: t[None] if isinstance(t, Tensor) else t, inputs)
        wrapped = _Called(self._module)
        state = {f"module.{n}": t for n, t in {**self._constant, **trainable}.items()}
        outputs: Tensor = functional_call(wrapped, state, (alone,))
        return outputs[0]

    def outputs_and_pullback(self, inputs: Any) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """Outputs (B, m), and the function from cotangents (B, r, m) to rows (B, r, k).

        **Privacy:** both hold private values of the batch.
        """
        axes = pytree.tree_map(lambda t: 0 if isinstance(t, Tensor) else None, inputs)
        outputs = vmap(self._record, in_dims=(None, axes))(self._trainable, inputs)
        return outputs.detach(), lambda cotangents: self._pull_back(inputs, axes, cotangents)

    def _pull_back(self, inputs: Any, axes: Any, cotangents: Tensor) -> Tensor:
        """Rows of a few records at a time."""
        batch, count, _ = cotangents.shape

        def gradients(record: Any, record_cotangents: Tensor) -> dict[str, Tensor]:
            pull = vjp(lambda trainable: self._record(trainable, record), self._trainable)[1]
            per_row: dict[str, Tensor] = vmap(pull)(record_cotangents)[0]
            return per_row

        rows = cotangents.new_zeros(batch, count, self._projection.dim)
        step = max(1, _MAX_ELEMENTS // (count * self._layout.size))
        for start in range(0, batch, step):
            piece = slice(start, start + step)
            part = pytree.tree_map(lambda t: t[piece] if isinstance(t, Tensor) else t, inputs)  # noqa: B023
            found = vmap(gradients, in_dims=(axes, 0))(part, cotangents[piece])
            out = rows[piece].flatten(0, 1)
            for name, offset in zip(self._layout.names, self._layout.offsets, strict=True):
                self._projection.add_projected(out, found[name].detach().reshape(out.shape[0], -1), offset)
        return rows


class _Called(nn.Module):
    """The module with its calling convention and output extraction inside, for ``functional_call``."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module

    def forward(self, inputs: Any) -> Tensor:
        return outputs_of(call(self.module, inputs))
