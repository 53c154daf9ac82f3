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

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from opacus.layers.dp_rnn import RNNLinear
from torch import Tensor, nn

from opacus_expm.subspaces.base import Inputs, LinearRows, Projection

PerSampleGradients = dict[Tensor, Tensor]  # by parameter, with a leading batch dimension
Convolution = nn.Conv1d | nn.Conv2d | nn.Conv3d
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

    def pieces(self, batch: int, layer: nn.Module, least: int = 1) -> Iterator[slice]:
        """The records of a batch, a few at a time: as many as keep the layer's per-sample gradients small.

        What else a record needs at the same time has ``least`` elements.
        """
        size = max((p.numel() for p in layer.parameters(recurse=False) if p in self.starts), default=1)
        return record_pieces(batch, max(size, least), self.projection.least_records)

    def rule(
        self, layer: nn.Module, gradients: Callable[[int, slice, Tensor], PerSampleGradients], least: int = 1
    ) -> Rule:
        """The rule that adds up a layer's calls before projecting once.

        ``gradients`` takes a call's number, some of its records and their output gradients; for ``least`` see ``pieces``.
        """

        def apply(row: Tensor, backprops: Sequence[Tensor | None]) -> None:
            for piece in self.pieces(len(row), layer, least):
                total: PerSampleGradients = {}
                for number, backprop in enumerate(backprops):
                    if backprop is None:
                        continue
                    for parameter, gradient in gradients(number, piece, backprop.detach()[piece]).items():
                        total[parameter] = total[parameter] + gradient if parameter in total else gradient
                self.add(row[piece], total)

        return apply


def record_pieces(batch: int, size: int, least: int = 1) -> Iterator[slice]:
    """The records of a batch, a few at a time, as many as stay in cache where each has this size; ``least`` at the least."""
    step = max(least, _PIECE_ELEMENTS // max(size, 1))
    for start in range(0, batch, step):
        yield slice(start, start + step)


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
        inputs = Inputs(x.shape[1], lambda matrix: x @ matrix)
        quick = places.projection.linear(inputs, weight.shape, places.starts[weight], place, rows)

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


def _convolution(layer: Convolution, activations: list[Tensor], places: Places, rows: int) -> Rule:
    """Weight gradient: output gradient (channels × positions) times the input patches, unfolded once for several rows.

    Some maps have a faster way (``Projection.linear``), to which a product with patches is a convolution.
    """
    patches = Patches.of_calls(layer, activations)
    if (quick := _quick_convolution(layer, patches, places, rows)) is not None:
        return quick
    kept = [one.ordered(one.of(slice(None))) for one in patches] if rows > 1 else None
    if kept is not None and RowsTogether.pays(layer, places):
        return RowsTogether(layer, [one[:, 0] for one in kept], places)

    def gradients(number: int, piece: slice, backprop: Tensor) -> PerSampleGradients:
        found: PerSampleGradients = {}
        if layer.weight in places.starts:
            if kept is None:
                found[layer.weight] = patches[number].product(patches[number].of(piece), backprop)
            else:
                found[layer.weight] = _product(kept[number][piece], backprop)
        if layer.bias is not None and layer.bias in places.starts:
            found[layer.bias] = backprop.flatten(2).sum(2)
        return found

    return places.rule(layer, gradients, max(one.size for one in patches) if rows == 1 else 1)


def _quick_convolution(layer: Convolution, patches: list[Patches], places: Places, rows: int) -> Rule | None:
    """The map's own way to a convolution's rows, call by call; None where there is none."""
    if layer.weight not in places.starts or layer.groups > 1:
        return None
    place = None if layer.bias is None else places.starts.get(layer.bias)
    shape, start = layer.weight.shape, places.starts[layer.weight]
    quick: list[LinearRows] = []
    for one in patches:
        found = places.projection.linear(Inputs(one.positions, one.times), shape, start, place, rows)
        if found is None:
            return None
        quick.append(found)

    def apply(row: Tensor, backprops: Sequence[Tensor | None]) -> None:
        for add, backprop in zip(quick, backprops, strict=True):
            if backprop is not None:
                add(row, backprop.detach().movedim(1, -1).flatten(1, -2))

    return apply


class Patches:
    """The input patches of a convolution, one for every output position.

    Where the channels are innermost in memory (and there are no groups), they are so in a patch, too: whole runs of it are
    copied at once then.

    Args:
        layer: the convolution.
        inputs: what it gets (B, C, …).
        channels_last: whether to put the channels innermost in a patch.
    """

    def __init__(self, layer: Convolution, inputs: Tensor, *, channels_last: bool):
        self._layer, self._given, self._channels_last = layer, inputs, channels_last
        ends = layer._reversed_padding_repeated_twice[::-1]
        added = [sum(ends[i : i + 2]) for i in range(0, len(ends), 2)]
        self.positions = math.prod(
            (size + around - dilation * (kernel - 1) - 1) // stride + 1
            for size, around, kernel, stride, dilation in zip(
                inputs.shape[2:], added, layer.kernel_size, layer.stride, layer.dilation, strict=True
            )
        )

    @functools.cached_property
    def _inputs(self) -> Tensor:
        """The inputs with what the layer adds around them."""
        layer = self._layer
        mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
        padding = layer._reversed_padding_repeated_twice
        return (
            F.pad(self._given, padding, mode=mode) if any(padding) else self._given
        )  # where nothing is added, it copies

    @classmethod
    def of_calls(cls, layer: Convolution, activations: Sequence[Tensor]) -> list[Patches]:
        """Those of all calls of a layer, in one order."""
        innermost = layer.groups == 1 and all(x.stride(1) == 1 for x in activations)
        return [cls(layer, x, channels_last=innermost) for x in activations]

    @property
    def size(self) -> int:
        """The number of elements of one record's patches."""
        return self.positions * self._given.shape[1] * math.prod(self._layer.kernel_size)

    def of(self, piece: slice) -> Tensor:
        """(records, groups, positions, patch), for some of the records."""
        layer, x = self._layer, self._inputs[piece]
        dims = len(layer.kernel_size)
        for i, (size, stride, dilation) in enumerate(
            zip(layer.kernel_size, layer.stride, layer.dilation, strict=True), start=2
        ):
            x = x.unfold(i, dilation * (size - 1) + 1, stride)[..., ::dilation]
        if self._channels_last:  # (B, C, positions…, kernel…) → (B, positions, kernel… C)
            return x.movedim(1, -1).flatten(1 + dims).flatten(1, dims)[:, None]
        # (B, groups, C/groups, positions…, kernel…) → (B, groups, positions…, C/groups, kernel…)
        x = x.reshape(len(x), layer.groups, -1, *x.shape[2:]).movedim(2, 2 + dims)
        return x.flatten(2 + dims).flatten(2, 1 + dims)

    def times(self, matrix: Tensor) -> Tensor:
        """The patches times a matrix (patch, r), as (B, positions, r): a convolution, for which no patches are needed."""
        weight = matrix.T.reshape(-1, *self._layer.weight.shape[1:])
        found: Tensor = self._layer._conv_forward(self._given, weight, None)
        return found.movedim(1, -1).flatten(1, -2)

    def product(self, patches: Tensor, backprop: Tensor) -> Tensor:
        """Output gradients (records, outputs, …) times patches: the weight's gradients (records, outputs, patch)."""
        return self.ordered(_product(patches, backprop))

    def ordered(self, patches: Tensor) -> Tensor:
        """Patches (…, patch) with the channels outermost, as the weight has them."""
        if not self._channels_last:
            return patches
        kernel = self._layer.kernel_size
        apart = patches.reshape(*patches.shape[:-1], *kernel, -1)
        return apart.movedim(-1, -1 - len(kernel)).flatten(-1 - len(kernel))


def _product(patches: Tensor, backprop: Tensor) -> Tensor:
    """Output gradients (records, outputs, …) times patches (records, groups, positions, patch), in the patches' order."""
    batch, groups, positions, patch = patches.shape
    d = backprop.reshape(batch * groups, -1, positions)
    return torch.bmm(d, patches.reshape(batch * groups, positions, patch)).reshape(batch, -1, patch)


class RowsTogether:
    """The rule of a convolution with long patches and few outputs: its patches are read once for all rows.

    Output gradients are kept until ``finish``, which has to be called after the last row.

    Args:
        layer: a convolution without groups.
        patches: of its calls, (B, positions, patch) in the order of the weight.
        places: of the parameters.
    """

    def __init__(self, layer: Convolution, patches: list[Tensor], places: Places):
        self._layer, self._patches, self._places = layer, patches, places
        self._rows: list[Tensor] = []
        self._backprops: list[list[Tensor | None]] = []

    @staticmethod
    def pays(layer: Convolution, places: Places) -> bool:
        """Whether the output gradients of a few rows are smaller than the patches."""
        shape = layer.weight.shape
        return layer.weight in places.starts and layer.groups == 1 and shape[1:].numel() >= 4 * shape[0]

    def __call__(self, row: Tensor, backprops: Sequence[Tensor | None]) -> None:
        """Keep what a row needs, and add the bias' part."""
        found = [None if b is None else b.detach().flatten(2) for b in backprops]
        self._rows.append(row)
        self._backprops.append(found)
        bias = self._layer.bias
        if bias is not None and bias in self._places.starts:
            self._places.add(row, {bias: torch.stack([b.sum(2) for b in found if b is not None]).sum(0)})

    def finish(self) -> None:
        """Add the weight's part to all rows."""
        weight, count = self._layer.weight, len(self._rows)
        if count == 0:  # the layer's output did not reach the model's
            return
        by_call = list(zip(*self._backprops, strict=True))
        reached = [(x, d) for x, d in zip(self._patches, by_call, strict=True) if d[0] is not None]
        for piece in record_pieces(len(self._rows[0]), count * weight.numel(), self._places.projection.least_records):
            products = [torch.bmm(torch.cat([d[piece] for d in ds], dim=1), x[piece]) for x, ds in reached]
            total = products[0] if len(products) == 1 else torch.stack(products).sum(0)
            rows = torch.zeros_like(self._rows[0][piece]).repeat_interleave(count, dim=0)
            self._places.add(rows, {weight: total.reshape(len(rows), -1)})
            for row, own in zip(self._rows, rows.view(-1, count, rows.shape[1]).unbind(1), strict=True):
                row[piece] += own


class MatrixGradients:
    """Per-sample gradients of a convolution as matrices [W b], for some of the records at a time.

    Args:
        layer: a convolution without groups.
        activations: inputs of its calls.
        backprops: the gradients at its outputs; None where an output did not reach the model's.
        weight: whether the first columns are those of the weight.
        bias: whether the last column is that of the bias.
    """

    def __init__(
        self,
        layer: Convolution,
        activations: list[Tensor],
        backprops: Sequence[Tensor | None],
        *,
        weight: bool,
        bias: bool,
    ):
        pairs = zip(Patches.of_calls(layer, activations), backprops, strict=True)
        self._calls = [(patches, b.detach()) for patches, b in pairs if b is not None]
        self._weight, self._bias = weight, bias

    @property
    def size(self) -> int:
        """Elements of what a record needs."""
        return max(patches.size for patches, _ in self._calls)

    def of(self, piece: slice) -> Tensor:
        """(records, outputs, width)."""
        total: Tensor | None = None
        for patches, backprop in self._calls:
            d = backprop[piece]
            columns = [patches.product(patches.of(piece), d)] if self._weight else []
            columns += [d.flatten(2).sum(2)[..., None]] if self._bias else []
            g = torch.cat(columns, dim=2)
            total = g if total is None else total + g
        assert total is not None
        return total


def _embedding(layer: nn.Embedding, activations: list[Tensor], places: Places, rows: int) -> Rule:
    """The gradient of a table: only rows that were looked up have one."""

    def apply(row: Tensor, backprops: Sequence[Tensor | None]) -> None:
        if layer.weight not in places.starts:
            return
        index, d = looked_up(layer, activations, backprops)
        places.projection.add_looked_up(row, d, index, layer.num_embeddings, places.starts[layer.weight])

    return apply


def looked_up(
    layer: nn.Embedding, activations: list[Tensor], backprops: Sequence[Tensor | None]
) -> tuple[Tensor, Tensor]:
    """Which rows of a table were looked up (B, positions), and their gradients; ``padding_idx`` has none."""
    index = torch.cat([x.reshape(len(x), -1) for x in activations], dim=1)
    filled = _filled(backprops, [x.shape for x in activations])
    d = torch.cat([b.reshape(len(b), -1, b.shape[-1]) for b in filled], dim=1)
    return index, d if layer.padding_idx is None else d * (index != layer.padding_idx)[..., None]


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
    if isinstance(layer, Convolution):
        return layer.groups == 1 and type(layer) in RULES
    return type(layer) in (nn.Linear, RNNLinear)


def positions(activations: list[Tensor], backprops: Sequence[Tensor | None]) -> tuple[Tensor, Tensor]:
    """What a linear layer gets, and the gradients at its outputs: (B, positions, inputs) and (B, positions, outputs)."""
    return _positions(activations), _positions(_filled(backprops, [x.shape[:-1] for x in activations]))


@dataclass(frozen=True, eq=False, repr=False)
class PositionPairs:
    """What a layer that is a matrix gets of some records, and the gradients at its outputs; private.

    Attributes:
        inputs: (B, positions, inputs), in an order of their own.
        outputs: (B, positions, outputs).
        ordered: puts the last dimension of ``inputs``, or of sums of them, in the order of the weight.
    """

    inputs: Tensor
    outputs: Tensor
    ordered: Callable[[Tensor], Tensor]


def position_pairs(
    layer: nn.Module, activations: list[Tensor], backprops: Sequence[Tensor | None]
) -> Iterator[tuple[slice, PositionPairs]]:
    """What such a layer gets, and the gradients at its outputs, for a few records at a time where it is a convolution."""
    if not isinstance(layer, Convolution):
        yield slice(None), PositionPairs(*positions(activations, backprops), lambda values: values)
        return
    patches = Patches.of_calls(layer, activations)
    shapes = [(len(x), layer.out_channels, one.positions) for x, one in zip(activations, patches, strict=True)]
    d = [
        activations[0].new_zeros(shape) if b is None else b.detach().reshape(shape)
        for b, shape in zip(backprops, shapes, strict=True)
    ]
    for piece in record_pieces(len(activations[0]), max(one.size for one in patches)):
        inputs = torch.cat([one.of(piece)[:, 0] for one in patches], dim=1)
        yield piece, PositionPairs(inputs, torch.cat([b[piece] for b in d], dim=2).transpose(1, 2), patches[0].ordered)


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
