"""The records' gradients layer by layer, each in the form that costs least: which one follows from the layer's shapes.

Where the map keeps all of R^p (a metric, or the full space), no record has a row of p numbers. Layers that are matrices
have factors where their positions are few, and matrices where they are many; tables have the rows that were looked up; a
weight that several layers share has the factors of all of them; everything else is as small as the layer.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from opacus.grad_sample import GradSampleModule
from torch import Tensor, nn

from opacus_expm.gathering.gradients import Factored, Formed, LookedUp, Loose, Part, Tied
from opacus_expm.gathering.layers import (
    RULES,
    Convolution,
    MatrixGradients,
    Places,
    Rule,
    is_matrix,
    looked_up,
    positions,
    record_pieces,
)
from opacus_expm.subspaces.base import Projection
from opacus_expm.subspaces.full import FullSpace
from opacus_expm.subspaces.metric import Block, MetricMap, Root

RuleOf = Callable[[nn.Module, list[Tensor], int, Places], Rule]
_Roots = tuple[Root, Root]


@dataclass(frozen=True, eq=False)
class Seen:
    """One layer in a forward and a backward pass; private.

    Attributes:
        layer: of which a parameter is trainable.
        activations: inputs of its calls.
        backprops: the gradients at its outputs; None where an output did not reach the model's.
    """

    layer: nn.Module
    activations: list[Tensor]
    backprops: Sequence[Tensor | None]


@dataclass(frozen=True, eq=False)
class PartMaker:
    """From what layers saw to the parts of the records' gradients.

    Args:
        places: where the trainable parameters start in R^p, and the map.
        rule: a layer's rule, for what has no faster form.
    """

    places: Places
    rule: RuleOf

    def parts(self, seen: Sequence[Seen]) -> tuple[list[Part], Places]:
        """The parts, and the places of what they leave to rows."""
        projection, starts = self.places.projection, self.places.starts
        if not isinstance(projection, MetricMap | FullSpace):
            return [], self.places
        found: list[Part] = []
        users: dict[Tensor, list[Seen]] = {}
        for one in seen:
            found += self._in_a_block(one)
            for p in _parameters(one.layer):
                if p in starts:
                    users.setdefault(p, []).append(one)
        taken = {place for block in _blocks(projection) for place in (block.weight, block.bias)}
        alone = {p: own for p, own in users.items() if starts[p] not in taken}
        groups: dict[tuple[int, ...], list[Tensor]] = {}
        for p, own in alone.items():
            if (part := self._table(p, own)) is not None:
                found.append(part)
            else:
                groups.setdefault(tuple(map(id, own)), []).append(p)
        found += [self._loose(parameters, alone[parameters[0]]) for parameters in groups.values()]
        made = {place for part in found if isinstance(part, Factored | Formed) for place, _ in part.block.spans}
        left = {p: starts[p] for p in users if starts[p] in taken - made}
        return found, Places(left, projection)

    def _in_a_block(self, one: Seen) -> list[Part]:
        """The gradients of a layer of the metric, in the metric."""
        projection, layer = self.places.projection, one.layer
        if not isinstance(projection, MetricMap) or not is_matrix(layer):
            return []
        starts: dict[Any, int] = self.places.starts
        matrix, shift = starts.get(layer.weight), starts.get(layer.bias)
        for block, roots in zip(projection.blocks, projection.roots, strict=True):
            if (block.weight is not None and block.weight == matrix) or (
                block.weight is None and block.bias is not None and block.bias == shift
            ):
                if isinstance(layer, Convolution):
                    return [_formed_patches(layer, one, block, roots)]
                return [_of_positions(block, *positions(one.activations, one.backprops), roots)]
        return []

    def _table(self, p: Tensor, own: Sequence[Seen]) -> Part | None:
        """The gradients of a parameter that is the weight of linear layers, a table, or both; None where it is neither."""
        if any(getattr(one.layer, "weight", None) is not p for one in own):
            return None
        tables = [one for one in own if type(one.layer) is nn.Embedding]
        linear = [one for one in own if isinstance(one.layer, nn.Linear) and is_matrix(one.layer)]
        if len(tables) + len(linear) < len(own):
            return None
        start = self.places.starts[p]
        found = [looked_up(one.layer, one.activations, one.backprops) for one in tables]  # type: ignore[arg-type]
        pairs = [positions(one.activations, one.backprops) for one in linear]
        index, values = (torch.cat(t, dim=1) for t in zip(*found, strict=True)) if found else (None, None)
        a, b = (torch.cat(t, dim=1) for t in zip(*pairs, strict=True)) if pairs else (None, None)
        block = Block(len(p), p.shape[1], start, None)
        if index is None or values is None:
            assert a is not None
            assert b is not None
            return _of_positions(block, a, b)
        if a is None or b is None:
            return LookedUp(start, len(p), index, values)
        return Tied(LookedUp(start, len(p), index, values), Factored(block, a, b))

    def _loose(self, parameters: Sequence[Tensor], own: Sequence[Seen]) -> Loose:
        """The gradients of parameters side by side, which the same layers have."""
        sizes = [p.numel() for p in parameters]
        offsets = itertools.accumulate(sizes, initial=0)
        places = Places(dict(zip(parameters, offsets, strict=False)), FullSpace(sum(sizes)))
        like = own[0].activations[0]
        dtype = next(b.dtype for b in own[0].backprops if b is not None)
        rows = torch.zeros(len(like), sum(sizes), dtype=dtype, device=like.device)
        for one in own:
            self.rule(one.layer, one.activations, 1, places)(rows, one.backprops)
        return Loose([(self.places.starts[p], size) for p, size in zip(parameters, sizes, strict=True)], rows)


def _parameters(layer: nn.Module) -> list[Tensor]:
    """Those that a hook on the layer serves; a layer that nothing is known of is hooked with all that is inside."""
    known = type(layer) in RULES or type(layer) in GradSampleModule.GRAD_SAMPLERS
    return list(layer.parameters(recurse=not known))


def _blocks(projection: Projection) -> Sequence[Block]:
    return projection.blocks if isinstance(projection, MetricMap) else ()


def _of_positions(block: Block, a: Tensor, b: Tensor, roots: _Roots | None = None) -> Factored | Formed:
    """Σ over positions of b ⊗ [a 1], with the metric's roots where there are any.

    Factors where they are fewer numbers than matrices; the metric is applied to whichever of the two it is.
    """
    places = a.shape[1]
    if places > 1 and places * (block.outputs + block.width) > block.outputs * block.width:
        narrow = block.width < block.outputs  # whose transpose is formed sooner
        parts = [torch.bmm(a.mT, b).mT if narrow else torch.bmm(b.mT, a)] if block.inputs else []
        parts += [b.sum(1)[..., None]] if block.bias is not None else []
        matrices = torch.cat(parts, dim=2) if len(parts) > 1 else parts[0]
        return Formed(block, matrices if roots is None else roots[1].both(roots[0], matrices))
    if roots is None:
        return Factored(block, a, b)
    k_a, k_b = roots
    inputs = k_a.times(a) if block.inputs else a.new_zeros(*a.shape[:2], 1)
    if block.bias is not None:
        inputs += k_a.times(a.new_ones(1), block.inputs)
    return Factored(block, inputs, k_b.times(b))


def _formed_patches(layer: Convolution, one: Seen, block: Block, roots: _Roots) -> Formed:
    """The gradients of a convolution as matrices in the metric, a few records at a time."""
    gradients = MatrixGradients(
        layer, one.activations, one.backprops, weight=block.weight is not None, bias=block.bias is not None
    )
    matrices = one.activations[0].new_empty(len(one.activations[0]), block.outputs, block.width)
    for piece in record_pieces(len(matrices), gradients.size):
        matrices[piece] = roots[1].both(roots[0], gradients.of(piece))
    return Formed(block, matrices)
