"""Per-sample gradients of common layers, projected, for many rows of one forward pass.

A rule is built once for a layer and the inputs of all its calls in a forward pass, and then turns the calls' output
gradients, row after row, into Σ (per-sample parameter gradient)·A, added to a (B, k) block. What does not depend on
the row is computed when the rule is built: a convolution's patches, a normalisation's standardised input, the
product of a linear layer's input with a dense projection.

The gradient of a linear layer or a convolution is the product of output gradient and input, that of an embedding
touches only the rows that were looked up, that of a normalisation (BatchNorm in evaluation mode) is that of a diagonal
map. Everything else goes through Opacus's own samplers (``grad_sample``).

A layer's per-sample gradients exist for a few records at a time (``Places.pieces``), projected and dropped before the
next few: memory does not grow with batch × parameters, and what is written is read again while it is still in cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from opacus.layers.dp_rnn import RNNLinear
from torch import Tensor, nn

from opacus_expm.subspaces.base import LinearRows, Projection

PerSampleGradients = dict[Tensor, Tensor]  # by parameter, with a leading batch dimension
BatchNorm = nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d
Rule = Callable[[Tensor, Sequence[Tensor | None]], None]  # (row (B, k) to add to, output gradients of the calls)
_PIECE_ELEMENTS = 2**20  # of per-sample gradients at a time: 4 MiB in float32, within reach of a cache


@dataclass(frozen=True, eq=False)
class Places:
    """Where each trainable parameter starts in R^p, and the map A."""

    starts: dict[Tensor, int]
    projection: Projection

    def add(self, row: Tensor, gradients: PerSampleGradients) -> None:
        """Project per-sample gradients and add them to ``row``."""
        for parameter, gradient in gradients.items():
            if parameter in self.starts:
                self.projection.add_projected(row, gradient.flatten(1), self.starts[parameter])

    def pieces(self, batch: int, layer: nn.Module) -> Iterator[slice]:
        """The records of a batch, a few at a time: as many as keep the layer's per-sample gradients small."""
        size = max((p.numel() for p in layer.parameters(recurse=False) if p in self.starts), default=1)
        step = max(self.projection.least_records, _PIECE_ELEMENTS // max(size, 1))
        for start in range(0, batch, step):
            yield slice(start, start + step)

    def rule(self, layer: nn.Module, gradients: Callable[[int, slice, Tensor], PerSampleGradients]) -> Rule:
        """The rule that adds up a layer's calls before projecting once.

        ``gradients`` takes a call's number, some of its records and their output gradients.
        """

        def apply(row: Tensor, backprops: Sequence[Tensor | None]) -> None:
            for piece in self.pieces(len(row), layer):
                total: PerSampleGradients = {}
                for number, backprop in enumerate(backprops):
                    if backprop is None:
                        continue
                    for parameter, gradient in gradients(number, piece, backprop.detach()[piece]).items():
                        total[parameter] = total[parameter] + gradient if parameter in total else gradient
                self.add(row[piece], total)

        return apply


def _linear(layer: nn.Linear, activations: list[Tensor], places: Places, rows: int) -> Rule:
    """Weight gradient: Σ over positions of output gradient ⊗ input; bias gradient: Σ of output gradients.

    All calls of the layer (the time steps of a recurrent one) become positions of one product. Some maps have a faster
    way (``Projection.linear``).
    """
    x = _positions(activations)
    weight, bias = layer.weight, layer.bias
    place = None if bias is None else places.starts.get(bias)
    quick: LinearRows | None = None
    if weight in places.starts:
        quick = places.projection.linear(x, weight.shape, places.starts[weight], place, rows)

    def apply(row: Tensor, backprops: Sequence[Tensor | None]) -> None:
        d = _positions(_filled(backprops, [x.shape[:-1] for x in activations]))
        if quick is not None:
            quick(row, d)
            return
        if weight in places.starts:
            for piece in places.pieces(len(row), layer):
                places.add(row[piece], {weight: torch.bmm(d[piece].transpose(1, 2), x[piece])})
        if bias is not None and bias in places.starts:
            places.add(row, {bias: d.sum(1)})

    return apply


def _positions(tensors: list[Tensor]) -> Tensor:
    """(B, …, features) of every call → (B, positions, features)."""
    flat = [t.flatten(1, -2) if t.dim() > 2 else t[:, None] for t in tensors]
    return flat[0] if len(flat) == 1 else torch.cat(flat, dim=1)


def _filled(backprops: Sequence[Tensor | None], shapes: Sequence[torch.Size]) -> list[Tensor]:
    """Output gradients of all calls, zero (of the call's own shape) where the output did not reach the model's."""
    known = next(b for b in backprops if b is not None)
    return [
        known.new_zeros(*shape, known.shape[-1]) if b is None else b.detach()
        for b, shape in zip(backprops, shapes, strict=True)
    ]


def _convolution(
    layer: nn.Conv1d | nn.Conv2d | nn.Conv3d, activations: list[Tensor], places: Places, rows: int
) -> Rule:
    """Weight gradient: output gradient (channels × positions) times the input patches, unfolded once."""
    windows = [_unfolded(layer, x) for x in activations]

    def gradients(number: int, piece: slice, backprop: Tensor) -> PerSampleGradients:
        window = windows[number][piece]
        batch, groups, positions, patch = window.shape
        d = backprop.reshape(batch * groups, layer.out_channels // groups, positions)
        found: PerSampleGradients = {}
        if layer.weight in places.starts:
            product = torch.bmm(d, window.reshape(batch * groups, positions, patch))
            found[layer.weight] = product.reshape(batch, *layer.weight.shape)
        if layer.bias is not None and layer.bias in places.starts:
            found[layer.bias] = d.sum(2).reshape(batch, layer.out_channels)
        return found

    return places.rule(layer, gradients)


def _unfolded(layer: nn.Conv1d | nn.Conv2d | nn.Conv3d, x: Tensor) -> Tensor:
    """The input patch of every output position: (B, groups, positions, C/groups · kernel)."""
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    x = F.pad(x, layer._reversed_padding_repeated_twice, mode=mode)
    dims = len(layer.kernel_size)
    for i, (size, stride, dilation) in enumerate(
        zip(layer.kernel_size, layer.stride, layer.dilation, strict=True), start=2
    ):
        x = x.unfold(i, dilation * (size - 1) + 1, stride)[..., ::dilation]
    # (B, groups, C/groups, positions…, kernel…) → (B, groups, positions…, C/groups, kernel…)
    x = x.reshape(len(x), layer.groups, -1, *x.shape[2:]).movedim(2, 2 + dims)
    return x.flatten(2 + dims).flatten(2, 1 + dims)


def _embedding(layer: nn.Embedding, activations: list[Tensor], places: Places, rows: int) -> Rule:
    """The gradient of a table: only rows that were looked up have one, and ``padding_idx`` has none."""
    index = torch.cat([x.reshape(len(x), -1) for x in activations], dim=1)  # (B, positions)
    counted = None if layer.padding_idx is None else (index != layer.padding_idx)[..., None]

    def apply(row: Tensor, backprops: Sequence[Tensor | None]) -> None:
        if layer.weight not in places.starts:
            return
        filled = _filled(backprops, [x.shape for x in activations])
        d = torch.cat([b.reshape(len(b), -1, b.shape[-1]) for b in filled], dim=1)
        d = d if counted is None else d * counted
        places.projection.add_looked_up(row, d, index, layer.num_embeddings, places.starts[layer.weight])

    return apply


def _batch_norm(layer: BatchNorm, activations: list[Tensor], places: Places, rows: int) -> Rule:
    """In evaluation mode the layer is x̂γ + β with x̂ standardised by the running statistics, which do not move."""
    assert layer.running_mean is not None
    assert layer.running_var is not None
    shape = (1, -1) + (1,) * (activations[0].dim() - 2)
    scale = (layer.running_var + layer.eps).rsqrt().view(shape)
    standardised = [(x - layer.running_mean.view(shape)) * scale for x in activations]
    return _affine(layer, standardised, places, lambda t: t.flatten(2).sum(2) if t.dim() > 2 else t)


def _group_norm(layer: nn.GroupNorm, activations: list[Tensor], places: Places, rows: int) -> Rule:
    """The layer is x̂γ + β with x̂ standardised within each group of channels of each record."""
    standardised = [F.group_norm(x, layer.num_groups, eps=layer.eps) for x in activations]
    return _affine(layer, standardised, places, lambda t: t.flatten(2).sum(2) if t.dim() > 2 else t)


def _layer_norm(layer: nn.LayerNorm, activations: list[Tensor], places: Places, rows: int) -> Rule:
    """The layer is x̂γ + β with x̂ standardised over the last dimensions; positions are summed over."""
    standardised = [F.layer_norm(x, layer.normalized_shape, eps=layer.eps) for x in activations]
    dims = len(layer.normalized_shape)

    def per_record(t: Tensor) -> Tensor:
        return t.flatten(1, -dims - 1).sum(1) if t.dim() > dims + 1 else t

    return _affine(layer, standardised, places, per_record)


def _affine(
    layer: BatchNorm | nn.GroupNorm | nn.LayerNorm,
    standardised: list[Tensor],
    places: Places,
    per_record: Callable[[Tensor], Tensor],
) -> Rule:
    """Weight and bias gradients of x̂γ + β: output gradient times x̂, and output gradient, summed for each record."""

    def gradients(number: int, piece: slice, backprop: Tensor) -> PerSampleGradients:
        found: PerSampleGradients = {}
        if layer.weight in places.starts:
            found[layer.weight] = per_record(backprop * standardised[number][piece])
        if layer.bias is not None and layer.bias in places.starts:
            found[layer.bias] = per_record(backprop)
        return found

    return places.rule(layer, gradients)


def is_matrix(layer: nn.Module) -> bool:
    """Whether a layer is a matrix that acts on its inputs at every position: what a Kronecker factor is for."""
    if isinstance(layer, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        return layer.groups == 1 and type(layer) in RULES
    return type(layer) in (nn.Linear, RNNLinear)


def positions(layer: nn.Module, activations: list[Tensor], backprops: Sequence[Tensor | None]) -> tuple[Tensor, Tensor]:
    """What such a layer gets, and the gradients at its outputs: (B, positions, inputs) and (B, positions, outputs)."""
    if isinstance(layer, nn.Linear):
        return _positions(activations), _positions(_filled(backprops, [x.shape[:-1] for x in activations]))
    assert isinstance(layer, nn.Conv1d | nn.Conv2d | nn.Conv3d)
    windows = [_unfolded(layer, x)[:, 0] for x in activations]
    found = []
    for window, backprop in zip(windows, backprops, strict=True):
        shape = (window.shape[0], layer.out_channels, window.shape[1])
        d = window.new_zeros(shape) if backprop is None else backprop.detach().reshape(shape)
        found.append(d.transpose(1, 2))
    return torch.cat(windows, dim=1), torch.cat(found, dim=1)


RULES: dict[type[nn.Module], Callable[..., Rule]] = {
    nn.Linear: _linear,
    RNNLinear: _linear,
    nn.Conv1d: _convolution,
    nn.Conv2d: _convolution,
    nn.Conv3d: _convolution,
    nn.Embedding: _embedding,
    nn.BatchNorm1d: _batch_norm,
    nn.BatchNorm2d: _batch_norm,
    nn.BatchNorm3d: _batch_norm,
    nn.GroupNorm: _group_norm,
    nn.LayerNorm: _layer_norm,
}
