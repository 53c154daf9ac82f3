"""Projected per-sample Jacobian rows through Opacus's per-sample hooks.

``ProjectedGradSampleModule`` is an Opacus ``GradSampleModule`` with three differences, all of them because
the mechanism needs the m rows of a Jacobian in evaluation mode instead of one gradient in training mode:

* activations are captured in evaluation mode and kept for all backward passes of one forward pass;
* a layer's output gradient is taken at the layer's own edge of the autograd graph instead of in a backward
  hook: in-place activations are harmless there, nothing is added to ``.grad``, and the weights' batch
  gradients, which nobody needs, are never computed;
* each layer's per-sample gradient is projected as soon as it exists and dropped, a few records at a time, so that
  memory holds the activations, one layer's gradients of those few, and the (B, r, k) result instead of (B, r, p).

Every type in Opacus's ``GRAD_SAMPLERS`` is served by its registered function, other layers with one tensor in and out
by Opacus's functorch fallback. Common layers have rules of their own (``gathering.layers``), because their structure
saves work over many rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from opacus.grad_sample import GradSampleModule
from opacus.grad_sample.functorch import ft_compute_per_sample_gradient, prepare_layer
from opacus.layers.dp_rnn import DPGRU, DPLSTM, DPRNN
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils import _pytree as pytree

from opacus_expm.gathering.gradients import RecordGradients
from opacus_expm.gathering.independence import DependentRecords, check_mixing, may_branch, outputs_alone
from opacus_expm.gathering.layers import (
    RULES,
    PerSampleGradients,
    Places,
    PositionPairs,
    RowsTogether,
    Rule,
    is_matrix,
    position_pairs,
)
from opacus_expm.gathering.model import call, outputs_of, ran_out_of_memory, synthetic_batch
from opacus_expm.gathering.parts import PartMaker, Seen
from opacus_expm.gathering.randomness import Generators
from opacus_expm.subspaces.base import Projection
from opacus_expm.subspaces.layout import Layout

_RECURRENT = (DPRNN, DPLSTM, DPGRU)  # Opacus hooks the RNNLinear layers inside them


class HooksCannotServe(Exception):
    """The model needs the functorch path; the message says which layer and why."""


@dataclass(frozen=True, eq=False)
class _Call:
    """One call of one layer: its input, and the node of the autograd graph that made its output."""

    layer: nn.Module
    activation: Tensor
    version: int
    edge: GradientEdge


class ProjectedGradSampleModule(GradSampleModule):
    """Per-sample rows cᵀ(∂f/∂θ)A of a module, for any output cotangents c.

    Args:
        module: a working copy in evaluation mode; hooks are attached to it.
        layout: places of its trainable parameters in R^p.
        projection: the map A.
        restore: puts back what a forward pass changed in the module; called before each of them.
    """

    def __init__(
        self,
        module: nn.Module,
        layout: Layout,
        projection: Projection,
        *,
        restore: Callable[[], None] = lambda: None,
    ):
        super().__init__(module, loss_reduction="sum", strict=False)
        self._restore = restore
        named = dict(module.named_parameters())
        starts: dict[Tensor, int] = {named[n]: start for n, start in zip(layout.names, layout.offsets, strict=True)}
        self._places = Places(starts, projection)
        self._calls: list[_Call] = []
        self._batch = 0

    def add_hooks(self, *, loss_reduction: str, batch_first: bool, force_functorch: bool) -> None:
        """Hook every layer that Opacus would hook, on the way forward only."""
        self.autograd_grad_sample_hooks = self._module.autograd_grad_sample_hooks = []
        # A layer that stands in two places of the tree is hooked once.
        for layer in dict.fromkeys(self.iterate_submodules(self._module)):
            if type(layer) in _RECURRENT:
                continue
            if type(layer) not in self.GRAD_SAMPLERS and type(layer) not in RULES:
                prepare_layer(layer, batch_first=batch_first)
            if type(layer) is nn.Embedding:
                self.autograd_grad_sample_hooks.append(layer.register_forward_pre_hook(self._widen))
            handle = layer.register_forward_hook(self.capture_activations_hook, with_kwargs=True)
            self.autograd_grad_sample_hooks.append(handle)
        self.hooks_enabled = False  # captures only inside outputs_and_pullback

    def _widen(self, layer: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Look position embeddings up for each record, where the model looks them up once and broadcasts them."""
        if self.hooks_enabled and len(args) == 1 and args[0].dim() > 1 and args[0].shape[0] == 1 < self._batch:
            return (args[0].expand(self._batch, *args[0].shape[1:]),)
        return None

    def capture_activations_hook(
        self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> Tensor | None:
        """Remember the layer's input, and the node of the autograd graph that made its output."""
        if not self.hooks_enabled:
            return None
        tensors = [t for t in (*args, *kwargs.values()) if isinstance(t, Tensor)]
        if len(tensors) != 1 or not isinstance(output, Tensor):
            raise HooksCannotServe(
                f"layer {self._name(layer)} takes {len(tensors)} tensors and returns {type(output).__name__}; "
                "hooks serve layers with one tensor in and one tensor out"
            )
        if not output.requires_grad:
            raise HooksCannotServe(f"the output of layer {self._name(layer)} is cut off from the autograd graph")
        if type(layer) is nn.EmbeddingBag:
            raise HooksCannotServe(f"layer {self._name(layer)} is served by Opacus for inputs with offsets only")
        # An in-place change of a view would leave the view's edge behind.
        own: Tensor = output.clone() if output._is_view() else output
        x = tensors[0].detach()
        self._calls.append(_Call(layer, x, x._version, get_gradient_edge(own)))
        return own

    def _name(self, layer: nn.Module) -> str:
        """The layer's name and type, for messages."""
        name = next((n for n, m in self._module.named_modules() if m is layer), "?")
        return f"{name!r} ({type(layer).__name__})"

    def outputs_and_pullback(self, inputs: Any) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """Run the model once on a batch; the pullback then turns output cotangents into projected rows.

        Returns:
            Outputs (B, …), detached, and a function from cotangents (B, r, …) to rows (B, r, k).

        **Privacy:** both hold private values of the batch.
        """
        outputs, calls = self._forward(inputs)
        return outputs.detach(), lambda cotangents: self._pull_back(outputs, calls, cotangents)

    def _forward(self, inputs: Any) -> tuple[Tensor, list[_Call]]:
        """Outputs, with their graph, and every call of a hooked layer."""
        self._calls.clear()
        self._restore()
        self._batch = next(t.shape[0] for t in pytree.tree_leaves(inputs) if isinstance(t, Tensor))
        self.hooks_enabled = True
        try:
            with torch.enable_grad():
                outputs = outputs_of(call(self._module, inputs))
        finally:
            self.hooks_enabled = False
            calls, self._calls = self._calls, []
        return outputs, calls

    def probed_outputs(self, inputs: Any) -> list[Tensor]:
        """The outputs of each record, and each layer's inputs: a last layer of zeros would hide a difference in them."""
        outputs, calls = self._forward(inputs)
        return [outputs.detach(), *(c.activation for c in calls if len(c.activation) == len(outputs))]

    def probed_rows(self, inputs: Any) -> list[Tensor]:
        """One row for each record, with the same cotangent for all of them."""
        outputs, pullback = self.outputs_and_pullback(inputs)
        cotangent = torch.randn(outputs.shape[1:], generator=torch.Generator().manual_seed(2)).to(outputs)
        return [pullback(cotangent.expand_as(outputs)[:, None])]

    def outputs_and_gradients(self, inputs: Any) -> tuple[Tensor, Callable[[Tensor, int], RecordGradients]]:
        """Run the model once on a batch; the function then turns one cotangent (B, …) into the first records' gradients.

        **Privacy:** both hold private values of the batch.
        """
        outputs, calls = self._forward(inputs)
        return outputs.detach(), lambda cotangent, count: self._gradients(outputs, calls, cotangent, count)

    @torch.no_grad()
    def _gradients(self, outputs: Tensor, calls: list[_Call], cotangent: Tensor, count: int) -> RecordGradients:
        """By one backward pass; only what has no cheaper form has rows."""
        projection, batch = self._places.projection, len(outputs)
        backprops = torch.autograd.grad(outputs, [c.edge for c in calls], cotangent, allow_unused=True) if calls else ()
        seen = []
        for layer, at in self._by_layer(calls).items():
            one = Seen(layer, [calls[i].activation for i in at], [backprops[i] for i in at])
            if any(b is not None for b in one.backprops):
                self._check_batch(layer, one.activations, one.backprops, batch)
                seen.append(one)
        parts, left = PartMaker(self._places, self._rule).parts(seen)
        if parts and not left.starts:
            return RecordGradients(count, batch, parts, None, projection.dim)
        rows = outputs.new_zeros(batch, projection.width)
        for one in seen:
            self._rule(one.layer, one.activations, 1, left)(rows, one.backprops)
        return RecordGradients(count, batch, parts, projection.finish(rows), projection.dim)

    def _by_layer(self, calls: list[_Call]) -> dict[nn.Module, list[int]]:
        """The calls of each layer, by number; refuses inputs that were changed."""
        found: dict[nn.Module, list[int]] = {}
        for i, layer_call in enumerate(calls):
            if layer_call.activation._version != layer_call.version:
                raise HooksCannotServe(f"the input of layer {self._name(layer_call.layer)} is changed in place")
            found.setdefault(layer_call.layer, []).append(i)
        return found

    @torch.no_grad()
    def _pull_back(self, outputs: Tensor, calls: list[_Call], cotangents: Tensor) -> Tensor:
        """Rows for every cotangent: one backward pass each, on the one graph."""
        batch, count = cotangents.shape[:2]
        # Row-major in r, so that each row's block is contiguous.
        projection = self._places.projection
        rows = outputs.new_zeros(count, batch, projection.width)
        by_layer = self._by_layer(calls)
        rules = {
            layer: self._rule(layer, [calls[i].activation for i in at], count, self._places)
            for layer, at in by_layer.items()
        }
        edges = [layer_call.edge for layer_call in calls]
        if not calls:  # no layer was called: hooks see nothing
            return projection.finish(rows).transpose(0, 1)
        for row, cotangent in zip(rows, cotangents.unbind(1), strict=True):
            backprops = torch.autograd.grad(outputs, edges, cotangent, retain_graph=True, allow_unused=True)
            for layer, at in by_layer.items():
                found = [backprops[i] for i in at]
                if all(b is None for b in found):  # the layer's output did not reach the model's
                    continue
                self._check_batch(layer, [calls[i].activation for i in at], found, batch)
                rules[layer](row, found)
        for rule in rules.values():
            if isinstance(rule, RowsTogether):
                rule.finish()
        return projection.finish(rows).transpose(0, 1)

    def layer_pairs(
        self, inputs: Any, cotangent: Callable[[Tensor], Tensor]
    ) -> Iterator[tuple[nn.Module, slice, PositionPairs]]:
        """Of each layer that is a matrix: what it gets and the gradients at its outputs, for one cotangent of the outputs.

        A few records at a time, which the slice names.

        Args:
            inputs: a batch.
            cotangent: from the outputs to a cotangent like them.

        **Privacy:** private values of the batch.
        """
        outputs, calls = self._forward(inputs)
        matrices = [c for c in calls if is_matrix(c.layer)]
        if not matrices:
            return
        backprops = torch.autograd.grad(
            outputs, [c.edge for c in matrices], cotangent(outputs.detach()), allow_unused=True
        )
        for layer in dict.fromkeys(c.layer for c in matrices):
            at = [i for i, c in enumerate(matrices) if c.layer is layer]
            found = [backprops[i] for i in at]
            if any(b is not None for b in found):
                yield from (
                    (layer, *pair) for pair in position_pairs(layer, [matrices[i].activation for i in at], found)
                )

    def _check_batch(
        self, layer: nn.Module, activations: Sequence[Tensor], backprops: Sequence[Tensor | None], batch: int
    ) -> None:
        """Refuse a layer whose first dimension is not the batch: its rows would belong to no record."""
        if {t.shape[0] for t in (*activations, *backprops) if t is not None} != {batch}:
            raise HooksCannotServe(f"layer {self._name(layer)} does not have the batch as its first dimension")

    def _rule(self, layer: nn.Module, activations: list[Tensor], rows: int, places: Places) -> Rule:
        """What turns the output gradients of a layer's calls into projected per-sample gradients."""
        if type(layer) in RULES:
            return RULES[type(layer)](layer, activations, places, rows)
        function = self.GRAD_SAMPLERS.get(type(layer), ft_compute_per_sample_gradient)

        def gradients(number: int, piece: slice, backprop: Tensor) -> PerSampleGradients:
            found: PerSampleGradients = function(layer, [activations[number][piece]], backprop)
            return found

        return places.rule(layer, gradients)


def hooks_for(
    module: nn.Module,
    layout: Layout,
    projection: Projection,
    example: Any,
    *,
    restore: Callable[[], None] = lambda: None,
) -> ProjectedGradSampleModule:
    """Attach hooks to a working copy, after checking on synthetic batches that they serve this model.

    Three things that would be silently wrong are checked on batches made from the shape of ``example`` (random bits for
    its integers, noise for its floating values), so that the answer does not depend on a record: every hooked layer
    keeps the batch in its first dimension; the rows add up to what autograd computes, so that no parameter is used behind
    the hooks' back; and a record's outputs and rows do not depend on the other records (see ``independence``).

    Args:
        module: working copy in evaluation mode.
        layout: its trainable parameters.
        projection: the map A.
        example: inputs of one record, with a batch dimension of one.
        restore: puts back what a forward pass changed in the module.

    Raises:
        HooksCannotServe: with the layer and the reason.
    """
    for name, layer in module.named_modules():
        own = [p for p in layer.parameters(recurse=False) if p.requires_grad]
        if own and type(layer) not in RULES and any(True for _ in layer.buffers()):
            raise HooksCannotServe(f"layer {name!r} ({type(layer).__name__}) has buffers, which Opacus's hooks refuse")
    _channels_last(module, example)
    branches = may_branch(outputs_alone(module), example)
    restore()
    hooked = ProjectedGradSampleModule(module, layout, projection, restore=restore)
    try:
        _probe(hooked, module, layout, projection, example)
        check_mixing(hooked.probed_outputs, example, branches=branches, gradients=hooked.probed_rows)
    except DependentRecords as error:
        hooked.cleanup()
        raise HooksCannotServe(str(error)) from error
    except (IndexError, RuntimeError) as error:
        hooked.cleanup()
        if ran_out_of_memory(error):
            raise
        raise HooksCannotServe(f"the model fails on synthetic inputs ({type(error).__name__}: {error})") from error
    except BaseException:
        hooked.cleanup()
        raise
    return hooked


def _channels_last(module: nn.Module, example: Any) -> None:
    """Let trainable convolutions of images keep channels innermost in memory, where the model runs so: it is much faster.

    A model that asks for another order (``x.view(len(x), -1)`` does) keeps its own. Frozen weights are those of the user's
    module, and stay as they are.
    """
    weights = [m.weight for m in module.modules() if isinstance(m, nn.Conv2d) and m.weight.requires_grad]
    before = [w.data for w in weights]
    for weight in weights:
        weight.data = weight.data.clone(memory_format=torch.channels_last)
    try:
        if weights:
            with torch.enable_grad():
                outputs = outputs_of(call(module, synthetic_batch(example, 2, seed=0)))
            torch.autograd.grad(outputs.sum(), weights, allow_unused=True)
    except Exception as error:  # if the model does not run at all, whoever runs it says so
        for weight, data in zip(weights, before, strict=True):
            weight.data = data
        if ran_out_of_memory(error):
            raise


def _probe(
    hooked: ProjectedGradSampleModule, module: nn.Module, layout: Layout, projection: Projection, example: Any
) -> None:
    """Check on synthetic batches that hooks give the right rows for this model, as ``hooks_for`` promises."""
    generators = Generators.of(module)
    for copies, seed in ((2, 0), (3, 1)):  # no sequence length is both 2 and 3
        inputs = synthetic_batch(example, copies, seed)
        with generators.repeated():
            outputs, pullback = hooked.outputs_and_pullback(inputs)
        if outputs.shape[0] != copies:
            raise ValueError(
                f"model returned {outputs.shape[0]} rows for a batch of {copies}; its output must have the batch as "
                "its first dimension"
            )
        cotangents = torch.randn(outputs.shape, generator=torch.Generator().manual_seed(2)).to(outputs)
        rows = pullback(cotangents[:, None]).sum((0, 1))

    if not all(bool(t.isfinite().all()) for t in (outputs, rows)):
        raise HooksCannotServe("the model's outputs or gradients on synthetic inputs are not finite")

    named = dict(module.named_parameters())
    with torch.enable_grad(), generators.repeated():
        summed = (outputs_of(call(module, inputs)) * cotangents).sum()
        whole = torch.autograd.grad(summed, [named[n] for n in layout.names], allow_unused=True)
    expected = rows.new_zeros(1, projection.width)
    for gradient, start in zip(whole, layout.offsets, strict=True):
        if gradient is not None:
            projection.add_projected(expected, gradient.reshape(1, -1), start)
    expected = projection.finish(expected)
    tolerance = 1e-3 * float(expected.abs().max())
    if not torch.allclose(rows, expected[0], rtol=0, atol=tolerance, equal_nan=True):
        raise HooksCannotServe("a parameter takes part outside the hooked layers, so hooks would miss its gradient")
