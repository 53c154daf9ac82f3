"""Second moments of what a model's layers get and give back: the Kronecker factors of a metric.

For a record and a layer, let a be the layer's inputs (positions × inputs, with a constant 1 for the bias) and b the
gradients at its outputs for a random cotangent Mz of the model's outputs, MMᵀ = ∇²_f ℓ and z ~ N(0, I). Where there are more
than four positions, four sums of all of them with random signs take their place: aᵀa is the same in the mean, and costs no
more than that of a layer with four positions. Both are divided by their Frobenius norms, so that the record's

    A_i = aᵀa / |a|²    and    B_i = bᵀb / |b|²

are positive semi-definite with trace 1, and the sums over records need no bound: one record more or less moves the sum
of A_i by a matrix of Frobenius norm at most 1, whatever the record holds, and the same for B_i. What the division takes away
is measured apart: h_i = |bᵀa|², before it, has the trace of the layer's Gauss-Newton matrix as its mean. What part of a
record's curvature is whose layer's is a vector of norm at most 1 as well, and its sum needs no bound either.

**Privacy:** sums and traces are private where the records are.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from opacus_expm._private import PrivateValues
from opacus_expm.gathering.clipping import at_outputs, padded
from opacus_expm.gathering.criteria import Criterion
from opacus_expm.gathering.hooks import ProjectedGradSampleModule
from opacus_expm.gathering.layers import PositionPairs, is_matrix
from opacus_expm.mechanism.choices import Source
from opacus_expm.subspaces.layout import Layout
from opacus_expm.subspaces.metric import Block

_COMBINATIONS = 4  # of a record's positions
_MARGIN = 1 - 1e-6  # for the rounding of a norm


@dataclass(frozen=True, eq=False, repr=False)
class FactorSums(PrivateValues):
    """Σ_i A_i and Σ_i B_i of every block, and h_i of every record and block; private where the records are."""

    inputs: list[Tensor]
    outputs: list[Tensor]
    traces: Tensor

    @property
    def factors(self) -> list[Tensor]:
        """Both sums of one block after the other."""
        return [t for pair in zip(self.inputs, self.outputs, strict=True) for t in pair]

    @property
    def shares(self) -> Tensor:
        """Σ_i h_i/|h_i|₁, by blocks: a record's part in it has a norm of at most 1, and of 0 where it has no curvature."""
        scaled = self.traces / self.traces.amax(1, keepdim=True)  # so that no sum overflows
        return (scaled / scaled.sum(1, keepdim=True) * _MARGIN).nan_to_num(0.0).sum(0)


def blocks_of(module: nn.Module, layout: Layout) -> dict[nn.Module, Block]:
    """The layers of a module that are matrices and of which something is trainable, in the order of the module.

    A parameter that two layers share belongs to neither.
    """
    starts = dict(zip(layout.names, layout.offsets, strict=True))
    named = {id(p): name for name, p in module.named_parameters()}
    users: dict[int, int] = {}
    for layer in module.modules():
        below = {id(p) for inner in layer.modules() if inner is not layer for p in inner.parameters(recurse=False)}
        for p in layer.parameters(recurse=False):
            if id(p) not in below:  # Opacus's LSTM names its layers' parameters as its own
                users[id(p)] = users.get(id(p), 0) + 1

    def place(p: Tensor | None) -> int | None:
        return None if p is None or users.get(id(p)) != 1 else starts.get(named.get(id(p), ""))

    found: dict[nn.Module, Block] = {}
    for layer in module.modules():
        if not is_matrix(layer):
            continue
        matrix: Any = layer.weight
        weight, bias = place(matrix), place(layer.bias)  # type: ignore[arg-type]
        if weight is not None or bias is not None:
            inputs = 0 if weight is None else matrix[0].numel()
            found[layer] = Block(matrix.shape[0], inputs, weight, bias)
    return found


def head_alone(module: nn.Module, layout: Layout) -> bool:
    """Whether what is trainable is the last of the layers that are matrices, in the order of the module, alone."""
    layers = [layer for layer in module.modules() if is_matrix(layer)]
    blocks = blocks_of(module, layout)
    if not layers or list(blocks) != layers[-1:]:
        return False
    [block] = blocks.values()
    return block.outputs * block.width == layout.size


def random_cotangent(criterion: Criterion, outputs: Tensor, targets: Tensor, count: int, random: Source) -> Tensor:
    """Mz of the first ``count`` records, MMᵀ = ∇²_f ℓ and z ~ N(0, I); 0 for those that fill the batch up."""
    _, factor = at_outputs(criterion, outputs, targets)
    z = factor.new_zeros((*factor.shape[:-2], factor.shape[-1], 1))
    z[:count] = torch.from_numpy(random.standard_normal((count, *z.shape[1:])))
    return (factor @ z)[..., 0].to(outputs.dtype)


def factor_sums(
    source: ProjectedGradSampleModule,
    blocks: dict[nn.Module, Block],
    criterion: Criterion,
    stream: Iterable[tuple[Any, Tensor, int | None]],
    random: Source,
) -> FactorSums:
    """The factors of one pass over records, which come with a number to fill them up to; ``random`` gives z and signs.

    The z, and the signs of each layer's inputs and outputs, are streams of their own in the order of the records, so that
    what a record is given does not depend on how many are seen at a time.

    **Privacy:** the result is private where the records are; its sensitivity is in the module docstring.
    """
    first = [torch.zeros(b.width, b.width, dtype=torch.float64) for b in blocks.values()]
    second = [torch.zeros(b.outputs, b.outputs, dtype=torch.float64) for b in blocks.values()]
    traces: list[Tensor] = []
    order = {layer: i for i, layer in enumerate(blocks)}
    chance, *signs = random.spawn(1 + 2 * len(blocks))
    for inputs, targets, pad_to in stream:
        count = len(targets)
        found = torch.zeros(count, len(blocks), dtype=torch.float64)
        inputs, targets = padded(inputs, targets, pad_to)

        def probe(outputs: Tensor, targets: Tensor = targets, count: int = count) -> Tensor:
            return random_cotangent(criterion, outputs, targets, count, chance)

        for layer, piece, pairs in source.layer_pairs(inputs, probe):
            if layer not in order:
                continue
            i, block = order[layer], blocks[layer]
            real = max(0, min(len(pairs.inputs), count - (piece.start or 0)))
            traces_of = _squares(block, pairs.inputs, pairs.outputs)[:real]
            found[piece, i] = traces_of.nan_to_num(0.0, 0.0, 0.0).cpu()
            for total, values in (
                (first[i], _inputs(block, pairs, real, signs[2 * i])),
                (second[i], _combined(pairs.outputs, real, signs[2 * i + 1])[0]),
            ):
                unit = _unit(values[:real].double()).flatten(0, 1)
                total += (unit.T @ unit).cpu()
        traces.append(found)
    return FactorSums(first, second, torch.cat(traces))


def _squares(block: Block, a: Tensor, b: Tensor) -> Tensor:
    """|bᵀ[a 1]|² of every record, or of the parts of it that are trainable."""
    found = torch.zeros(len(a), dtype=torch.float64, device=a.device)
    places, outputs, inputs = a.shape[1], b.shape[2], a.shape[2]
    if block.inputs and places * (outputs + inputs) < outputs * inputs:
        x, d = a.double(), b.double()
        found += (torch.bmm(x, x.transpose(1, 2)) * torch.bmm(d, d.transpose(1, 2))).sum((1, 2)).clamp(min=0)
    elif block.inputs:
        found += torch.linalg.vector_norm(torch.bmm(b.transpose(1, 2), a), dim=(1, 2), dtype=torch.float64).square()
    if block.bias is not None:
        found += b.sum(1).double().square().sum(1)
    return found


def _inputs(block: Block, pairs: PositionPairs, count: int, random: np.random.Generator) -> Tensor:
    """What a layer gets, with a constant 1 for the bias, as a few combinations of positions in the order of the weight."""
    a, ones = _combined(pairs.inputs, count, random)
    a = pairs.ordered(a) if block.inputs else a[..., :0]
    return a if block.bias is None else torch.cat([a, ones], dim=-1)


def _combined(values: Tensor, count: int, random: np.random.Generator) -> tuple[Tensor, Tensor]:
    """Many positions as a few sums of all of them with random signs, whose second moments are the same in the mean.

    Signs are drawn for the first ``count`` records; those after them fill the batch up, and have zeros.

    Returns:
        The sums, and what the same sums make of a constant 1 at every position.
    """
    records, places, _ = values.shape
    if places <= _COMBINATIONS:
        return values, values.new_ones(records, places, 1)
    signs = random.integers(0, 2, (count, _COMBINATIONS, places), dtype=np.int8) * 2 - 1
    combinations = values.new_zeros(records, _COMBINATIONS, places)
    combinations[:count] = torch.from_numpy(signs)
    return torch.bmm(combinations, values), combinations.sum(2, keepdim=True)


def _unit(values: Tensor) -> Tensor:
    """Each record's (positions × d) divided by its Frobenius norm; zero where that is zero or not finite."""
    largest = values.abs().amax((1, 2), keepdim=True)
    scaled = values / largest  # so that no square overflows
    norms = torch.linalg.vector_norm(scaled, dim=(1, 2), keepdim=True)
    sound = norms.isfinite() & (norms > 0) & largest.isfinite()
    return torch.where(sound, scaled / norms * _MARGIN, 0.0)


def edge(dim: int, deviation: float) -> float:
    """Where the eigenvalues of ``symmetric_noise`` times ``deviation`` end: the semicircle's edge, and a tail for few."""
    return (math.sqrt(2 * dim) + 3) * deviation
