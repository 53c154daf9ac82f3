"""Projected per-sample Jacobian rows without hooks, each record run alone.

Every record is a batch of one, under ``vmap`` where torch has rules for the model's operations, else one after the
other: tied weights, in-place activations, ``nn.LSTM``, ``nn.MultiheadAttention`` and parameters used outside any layer
are all served, and a record's rows cannot depend on another's by construction. The price is time and, under ``vmap``,
memory for (records, r, p) at a time, kept below a fixed number of elements by working on a few records at once.

A model that draws random numbers is run without ``vmap``, under which all records would share what is drawn outside torch
(torch's own random operations refuse to run).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vjp, vmap
from torch.utils import _pytree as pytree

from opacus_expm.gathering.model import (
    call,
    outputs_of,
    plain_attention,
    ran_out_of_memory,
    synthetic_batch,
    take,
)
from opacus_expm.gathering.randomness import Generators
from opacus_expm.subspaces.base import Projection
from opacus_expm.subspaces.layout import Layout

_MAX_ELEMENTS = 2**25  # of the (records, r, p) block: 128 MiB in float32


class FunctionalRows:
    """Per-sample rows cᵀ(∂f/∂θ)A of a module, for any output cotangents c.

    Args:
        module: a working copy in evaluation mode.
        layout: places of its trainable parameters in R^p.
        projection: the map A.
        restore: puts back what a forward pass changed in the module; called before each of them.
        one_by_one: without ``vmap``; None decides by whether the model has torch's recurrent layers, for which ``vmap``
            has no rule.
    """

    def __init__(
        self,
        module: nn.Module,
        layout: Layout,
        projection: Projection,
        *,
        restore: Callable[[], None] = lambda: None,
        one_by_one: bool | None = None,
    ):
        self._module, self._layout, self._projection, self._restore = module, layout, projection, restore
        recurrent = any(isinstance(m, nn.RNNBase) for m in module.modules())
        self._one_by_one = recurrent if one_by_one is None else one_by_one
        self._trainable = {n: p.detach() for n, p in module.named_parameters() if n in layout.names}
        self._generators = Generators.of(module)

    def outputs_and_pullback(self, inputs: Any) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """Outputs (B, …), and the function from cotangents (B, r, …) to rows (B, r, k).

        **Privacy:** both hold private values of the batch.
        """
        if self._one_by_one:
            return self._separate_graphs(inputs)
        before = self._generators.states()
        axes = pytree.tree_map(lambda t: 0 if isinstance(t, Tensor) else None, inputs)
        with plain_attention():
            outputs = vmap(self._record, in_dims=(None, axes))(self._trainable, inputs)
        if self._generators.drawn_since(before):
            self._one_by_one = True
            return self._separate_graphs(inputs)
        return outputs.detach(), lambda cotangents: self._pull_back(inputs, axes, cotangents)

    def _record(self, trainable: dict[str, Tensor], inputs: Any) -> Tensor:
        """The outputs of one record, which is given without its batch dimension."""
        alone = pytree.tree_map(lambda t: t[None] if isinstance(t, Tensor) else t, inputs)
        self._restore()
        held = itertools.chain(self._module.named_parameters(), self._module.named_buffers())
        tensors = {**{n: t.detach() for n, t in held}, **trainable}
        outputs: Tensor = functional_call(
            _Called(self._module), {f"module.{n}": t for n, t in tensors.items()}, (alone,)
        )
        return outputs[0]

    def _pull_back(self, inputs: Any, axes: Any, cotangents: Tensor) -> Tensor:
        """The rows of all records, computed for a few of them at a time."""
        batch, count = cotangents.shape[:2]

        def gradients(record: Any, record_cotangents: Tensor) -> dict[str, Tensor]:
            pull = vjp(lambda trainable: self._record(trainable, record), self._trainable)[1]
            per_row: dict[str, Tensor] = vmap(pull)(record_cotangents)[0]
            return per_row

        rows = cotangents.new_zeros(batch, count, self._projection.width)
        step = max(1, _MAX_ELEMENTS // (count * self._layout.size))
        for start in range(0, batch, step):
            piece = slice(start, start + step)
            with plain_attention():
                found = vmap(gradients, in_dims=(axes, 0))(take(inputs, piece), cotangents[piece])
            out = rows[piece].flatten(0, 1)
            for name, offset in zip(self._layout.names, self._layout.offsets, strict=True):
                self._projection.add_projected(out, found[name].detach().reshape(out.shape[0], -1), offset)
        return self._projection.finish(rows)

    def _separate_graphs(self, inputs: Any) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """The same rows by plain autograd, with one graph for each record."""
        count = next(len(t) for t in pytree.tree_leaves(inputs) if isinstance(t, Tensor))
        named = dict(self._module.named_parameters())
        parameters = [named[n] for n in self._layout.names]
        outputs = []
        for i in range(count):
            self._restore()
            with torch.enable_grad():
                outputs.append(outputs_of(call(self._module, take(inputs, slice(i, i + 1))))[0])

        def pull_back(cotangents: Tensor) -> Tensor:
            rows = cotangents.new_zeros(*cotangents.shape[:2], self._projection.width)
            for output, record_cotangents, out in zip(outputs, cotangents, rows, strict=True):
                for cotangent, row in zip(record_cotangents, torch.split(out, 1), strict=True):
                    found = torch.autograd.grad(output, parameters, cotangent, retain_graph=True, allow_unused=True)
                    for gradient, offset in zip(found, self._layout.offsets, strict=True):
                        if gradient is not None:
                            self._projection.add_projected(row, gradient.reshape(1, -1), offset)
            return self._projection.finish(rows)

        return torch.stack(outputs).detach(), pull_back


class _Called(nn.Module):
    """The module with its calling convention and output extraction inside, for ``functional_call``."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module

    def forward(self, inputs: Any) -> Tensor:
        return outputs_of(call(self.module, inputs))


def functional_for(
    module: nn.Module,
    layout: Layout,
    projection: Projection,
    example: Any,
    *,
    restore: Callable[[], None] = lambda: None,
) -> FunctionalRows:
    """The gatherer that serves this model, tried on synthetic records: under ``vmap``, else one by one.

    Args:
        module: working copy in evaluation mode.
        layout: its trainable parameters.
        projection: the map A.
        example: inputs of one record, with a batch dimension of one; only its shape is used.
        restore: puts back what a forward pass changed in the module.

    Raises:
        ValueError: naming the layer that cannot be differentiated, and the way out; or, where the model fails without
            that too, with PyTorch's own words.
    """
    rows = FunctionalRows(module, layout, projection, restore=restore)
    if _failure(module, lambda: _differentiate(rows, example)) is None:
        return rows
    alone = FunctionalRows(module, layout, projection, restore=restore, one_by_one=True)
    failure = _failure(module, lambda: _differentiate(alone, example))
    if failure is not None:
        check_forward(module, example)
        where, error = failure
        raise ValueError(
            f"model cannot be differentiated: {where} fails with {type(error).__name__}; freeze that layer "
            "(requires_grad_(False)), or replace it by one that is differentiable"
        ) from error
    return alone


@torch.no_grad()
def check_forward(module: nn.Module, example: Any) -> None:
    """Raise where the model fails on two synthetic records by itself, so that differentiating it is not to blame.

    Raises:
        ValueError: with PyTorch's words. They are about made-up records, of which the shapes and types alone are real.
    """
    failure = _failure(module, lambda: call(module, synthetic_batch(example, 2, seed=0)))
    if failure is not None:
        where, error = failure
        raise ValueError(
            f"model fails on inputs of the loader's kind, in {where}: {type(error).__name__}: {error}"
        ) from error


def _differentiate(rows: FunctionalRows, example: Any) -> None:
    """Find the rows of two synthetic records."""
    outputs, pullback = rows.outputs_and_pullback(synthetic_batch(example, 2, seed=0))
    pullback(torch.ones_like(outputs)[:, None])


def _failure(module: nn.Module, attempt: Callable[[], object]) -> tuple[str, Exception] | None:
    """The layer in which an attempt with synthetic records fails, and its error; None if no layer fails."""
    inside: list[str] = []

    def leave(*_: object) -> None:
        inside.pop()

    handles = []
    for name, layer in module.named_modules():
        label = f"layer {name!r} ({type(layer).__name__})" if name else f"the model ({type(layer).__name__})"
        handles.append(layer.register_forward_pre_hook(lambda *_, at=label: inside.append(at)))
        handles.append(layer.register_forward_hook(leave))
    try:
        attempt()
    except (RuntimeError, NotImplementedError) as error:
        if ran_out_of_memory(error):
            raise
        return (inside[-1] if inside else "the backward pass"), error
    except IndexError:  # synthetic integers may not be valid here; the real data decides
        return None
    finally:
        for handle in handles:
            handle.remove()
    return None
