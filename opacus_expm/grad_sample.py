"""Projected per-sample Jacobian rows through Opacus's per-sample hooks.

``ProjectedGradSampleModule`` is an Opacus ``GradSampleModule`` with three differences, all of them because
the mechanism needs the m rows of a Jacobian in evaluation mode instead of one gradient in training mode:

* activations are captured in evaluation mode and kept for all backward passes of one forward pass;
* a layer's output gradient is taken at the layer's own edge of the autograd graph instead of in a backward
  hook: in-place activations are harmless there, nothing is added to ``.grad``, and the weights' batch
  gradients, which nobody needs, are never computed;
* each layer's per-sample gradient is projected as soon as it exists and dropped, so that memory holds one
  layer's (B, p_layer) block and the (B, r, k) result instead of (B, r, p).

The per-sample gradients themselves are Opacus's: every type in its ``GRAD_SAMPLERS`` is served by the
registered function, other layers with one tensor in and out by Opacus's functorch fallback. Convolutions
are the exception: their unfolded input is built once per forward pass and shared by all rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from opacus.grad_sample import GradSampleModule
from opacus.grad_sample.functorch import ft_compute_per_sample_gradient, prepare_layer
from opacus.layers.dp_rnn import DPGRU, DPLSTM, DPRNN
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils import _pytree as pytree

from opacus_expm.model import Layout, call, outputs_of
from opacus_expm.projection import Projection

PerSampleGradients = dict[Tensor, Tensor]  # by parameter
_RECURRENT = (DPRNN, DPLSTM, DPGRU)  # Opacus hooks the RNNLinear layers inside them


class HooksCannotServe(Exception):
    """The model needs the functorch path; the message says which layer and why."""


@dataclass(frozen=True, eq=False)
class _Call:
    """One call of one layer: its input, and the place in the autograd graph where its output was born."""

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
    """

    def __init__(self, module: nn.Module, layout: Layout, projection: Projection):
        super().__init__(module, loss_reduction="sum", strict=True)
        named = dict(module.named_parameters())
        self._starts: dict[Tensor, int] = {
            named[n]: start for n, start in zip(layout.names, layout.offsets, strict=True)
        }
        self._projection = projection
        self._calls: list[_Call] = []

    def add_hooks(self, *, loss_reduction: str, batch_first: bool, force_functorch: bool) -> None:
        """Hook every layer that Opacus would hook, on the way forward only."""
        self.autograd_grad_sample_hooks = self._module.autograd_grad_sample_hooks = []
        for layer in self.iterate_submodules(self._module):
            if type(layer) in _RECURRENT:
                continue
            if type(layer) not in self.GRAD_SAMPLERS:
                prepare_layer(layer, batch_first=batch_first)
            handle = layer.register_forward_hook(self.capture_activations_hook, with_kwargs=True)
            self.autograd_grad_sample_hooks.append(handle)
        self.hooks_enabled = False  # captures only inside outputs_and_pullback

    def capture_activations_hook(
        self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        """Remember the layer's input and the birthplace of its output."""
        if not self.hooks_enabled:
            return
        tensors = [t for t in (*args, *kwargs.values()) if isinstance(t, Tensor)]
        if len(tensors) != 1 or not isinstance(output, Tensor):
            raise HooksCannotServe(
                f"layer {self._name(layer)} takes {len(tensors)} tensors and returns {type(output).__name__}; "
                "hooks serve layers with one tensor in and one tensor out"
            )
        if not output.requires_grad:
            raise HooksCannotServe(f"the output of layer {self._name(layer)} is cut off from the autograd graph")
        x = tensors[0].detach()
        self._calls.append(_Call(layer, x, x._version, get_gradient_edge(output)))

    def _name(self, layer: nn.Module) -> str:
        """The layer's name and type, for messages."""
        name = next((n for n, m in self._module.named_modules() if m is layer), "?")
        return f"{name!r} ({type(layer).__name__})"

    def outputs_and_pullback(self, inputs: Any) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """Run the model once on a batch; the pullback then turns output cotangents into projected rows.

        Returns:
            Outputs (B, m), detached, and a function from cotangents (B, r, m) to rows (B, r, k).

        **Privacy:** both hold private values of the batch.
        """
        self._calls.clear()
        self.hooks_enabled = True
        try:
            with torch.enable_grad():
                outputs = outputs_of(call(self._module, inputs))
        finally:
            self.hooks_enabled = False
            calls, self._calls = self._calls, []
        return outputs.detach(), lambda cotangents: self._pull_back(outputs, calls, cotangents)

    def _pull_back(self, outputs: Tensor, calls: list[_Call], cotangents: Tensor) -> Tensor:
        """Rows for every cotangent: one backward pass each, on the one graph."""
        batch, count, _ = cotangents.shape
        # Row-major in r, so that each row's block is contiguous.
        rows = outputs.new_zeros(count, batch, self._projection.dim)
        for layer_call in calls:
            if layer_call.activation._version != layer_call.version:
                raise HooksCannotServe(f"the input of layer {self._name(layer_call.layer)} is changed in place")
        edges = [layer_call.edge for layer_call in calls]
        samplers = [self._sampler(c.layer, c.activation) for c in calls]
        for row, cotangent in zip(rows, cotangents.unbind(1), strict=True):
            backprops = torch.autograd.grad(outputs, edges, cotangent, retain_graph=True, allow_unused=True)
            self._project(row, calls, samplers, backprops)
        return rows.transpose(0, 1)

    def _project(
        self,
        row: Tensor,
        calls: list[_Call],
        samplers: list[Callable[[Tensor], PerSampleGradients]],
        backprops: tuple[Tensor | None, ...],
    ) -> None:
        """Add every call's per-sample gradient, projected, to ``row`` (B, k)."""
        for layer_call, sampler, backprop in zip(calls, samplers, backprops, strict=True):
            if backprop is None:  # the layer's output did not reach the model's
                continue
            if {backprop.shape[0], layer_call.activation.shape[0]} != {row.shape[0]}:
                raise HooksCannotServe(
                    f"layer {self._name(layer_call.layer)} does not have the batch as its first dimension"
                )
            for parameter, gradient in sampler(backprop.detach()).items():
                if parameter in self._starts:
                    self._projection.add_projected(row, gradient.flatten(1), self._starts[parameter])

    def _sampler(self, layer: nn.Module, activation: Tensor) -> Callable[[Tensor], PerSampleGradients]:
        """Output gradients → per-sample parameter gradients, for one call of a layer."""
        if isinstance(layer, nn.Conv1d | nn.Conv2d | nn.Conv3d) and type(layer) in self.GRAD_SAMPLERS:
            windows = _unfolded(layer, activation)
            return lambda backprop: _convolution_gradients(layer, windows, backprop)
        function = self.GRAD_SAMPLERS.get(type(layer), ft_compute_per_sample_gradient)
        return lambda backprop: function(layer, [activation], backprop)


def _unfolded(layer: nn.Conv1d | nn.Conv2d | nn.Conv3d, x: Tensor) -> Tensor:
    """The input patch of every output position: (B, groups, C/groups · kernel, positions)."""
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    x = F.pad(x, layer._reversed_padding_repeated_twice, mode=mode)
    dims = len(layer.kernel_size)
    for i, (size, stride, dilation) in enumerate(
        zip(layer.kernel_size, layer.stride, layer.dilation, strict=True), start=2
    ):
        x = x.unfold(i, dilation * (size - 1) + 1, stride)[..., ::dilation]
    # (B, C, positions…, kernel…) → (B, C, kernel…, positions…)
    x = x.permute(0, 1, *range(2 + dims, 2 + 2 * dims), *range(2, 2 + dims))
    patch = layer.in_channels // layer.groups * x[0, 0].flatten(0, dims - 1).shape[0]
    return x.reshape(x.shape[0], layer.groups, patch, -1)


def _convolution_gradients(
    layer: nn.Conv1d | nn.Conv2d | nn.Conv3d, windows: Tensor, backprop: Tensor
) -> PerSampleGradients:
    """∂/∂W of sample i is the product of its output gradient (channels × positions) and its patches."""
    batch, groups, patch, positions = windows.shape
    d = backprop.reshape(batch * groups, layer.out_channels // groups, positions)
    gradients: PerSampleGradients = {}
    if layer.weight.requires_grad:
        product = torch.bmm(d, windows.reshape(batch * groups, patch, positions).transpose(1, 2))
        gradients[layer.weight] = product.reshape(batch, *layer.weight.shape)
    if layer.bias is not None and layer.bias.requires_grad:
        gradients[layer.bias] = d.sum(2).reshape(batch, layer.out_channels)
    return gradients


def hooks_for(module: nn.Module, layout: Layout, projection: Projection, example: Any) -> ProjectedGradSampleModule:
    """Attach hooks to a working copy, after checking on a synthetic batch that they serve this model.

    Three things that would be silently wrong are checked on batches made from the shape of ``example`` (its
    integers, and noise in place of its floating values), so that the answer does not depend on a record's
    real-valued content: every hooked layer keeps the batch in its first dimension; a record's outputs do not
    depend on the other records; and the rows add up to what autograd computes, so that no parameter is used
    behind the hooks' back.

    Args:
        module: working copy in evaluation mode.
        layout: its trainable parameters.
        projection: the map A.
        example: inputs of one record, with a batch dimension of one.

    Raises:
        HooksCannotServe: with the layer and the reason.
    """
    for name, layer in module.named_modules():
        own = [p for p in layer.parameters(recurse=False) if p.requires_grad]
        if own and any(True for _ in layer.buffers()):
            raise HooksCannotServe(f"layer {name!r} ({type(layer).__name__}) has buffers, which Opacus's hooks refuse")
    hooked = ProjectedGradSampleModule(module, layout, projection)
    try:
        _probe(hooked, module, layout, projection, example)
    except BaseException:
        hooked.cleanup()
        raise
    return hooked


def _synthetic(example: Any, copies: int, seed: int) -> Any:
    """``copies`` records of the example's shape: the first the same for every seed, noise in the rest."""
    generator = torch.Generator().manual_seed(0)
    others = torch.Generator().manual_seed(seed)

    def fake(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        repeated = torch.cat([value] * copies)
        if not value.is_floating_point():
            return torch.cat([value, *[value.flip(-1) if seed and value.dim() > 1 else value] * (copies - 1)])
        first = torch.randn(value.shape, generator=generator)
        rest = torch.randn(repeated[1:].shape, generator=others)
        return torch.cat([first, rest]).to(value)

    return pytree.tree_map(fake, example)


def _probe(
    hooked: ProjectedGradSampleModule, module: nn.Module, layout: Layout, projection: Projection, example: Any
) -> None:
    """The checks of ``hooks_for``."""
    firsts = []
    for copies, seed in ((2, 0), (3, 1)):  # no sequence length is both 2 and 3
        inputs = _synthetic(example, copies, seed)
        outputs, pullback = hooked.outputs_and_pullback(inputs)
        if outputs.shape[0] != copies:
            raise ValueError(
                f"model returned {outputs.shape[0]} rows for a batch of {copies}; its output must have the batch as "
                "its first dimension"
            )
        firsts.append(outputs[0])
        cotangents = torch.randn(outputs.shape, generator=torch.Generator().manual_seed(2)).to(outputs)
        rows = pullback(cotangents[:, None]).sum((0, 1))

    tolerance = 1e-3 * float(firsts[0].abs().max())
    if not torch.allclose(firsts[0], firsts[1], rtol=0, atol=tolerance, equal_nan=True):
        raise HooksCannotServe("a record's outputs depend on the other records of the batch")

    named = dict(module.named_parameters())
    with torch.enable_grad():
        summed = (outputs_of(call(module, inputs)) * cotangents).sum()
        whole = torch.autograd.grad(summed, [named[n] for n in layout.names], allow_unused=True)
    expected = torch.zeros_like(rows)[None]
    for gradient, start in zip(whole, layout.offsets, strict=True):
        if gradient is not None:
            projection.add_projected(expected, gradient.reshape(1, -1), start)
    tolerance = 1e-3 * float(expected.abs().max())
    if not torch.allclose(rows, expected[0], rtol=0, atol=tolerance, equal_nan=True):
        raise HooksCannotServe("a parameter takes part outside the hooked layers, so hooks would miss its gradient")
