"""A random subspace of Kronecker products, layer by layer: for models so large that a row of all parameters costs too much.

The gradient of a layer that is a matrix is Σ d aᵀ over the positions of a record, with inputs a and output gradients d. With
P_in and P_out, small random matrices with orthonormal columns, its projection is

    P_outᵀ (Σ d aᵀ) P_in = Σ (P_outᵀ d)(P_inᵀ a)ᵀ,

so that inputs and output gradients are projected apart and the gradient itself never exists (as in LoGra, Choe et al. 2024).
The map is A = ⊕ (P_out ⊗ P_in) over such layers, with one sparse map beside them for all parameters that are no matrices.
The factors need O(Σ(d_in + d_out)·√k) memory.

How the k dimensions are dealt is a public rule: every part has one, and the others are in proportion to the square roots of
the parts' sizes. Where k is less than the number of parts, the smallest matrices are in the sparse part.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from opacus_expm.subspaces.base import Inputs, LinearRows, Projection, check_dim, check_seed, table
from opacus_expm.subspaces.full import FullSpace
from opacus_expm.subspaces.sparse import SparseMap
from opacus_expm.subspaces.stiefel import orthonormal


@dataclass(frozen=True)
class Structured:
    """A random subspace of Kronecker products, or the full space where ``proj_dim`` is None; ``projection="structured"``.

    For large models: beyond the network's own passes a row costs O(k) for each layer instead of O(p).

    Args:
        seed: public seed (round t adds t); drawn afresh by default, and recorded.
    """

    seed: int | None = None
    kind: str = field(default="structured", init=False, repr=False)

    def __post_init__(self) -> None:
        check_seed(self.seed)

    def seeded(self, seed: int) -> Structured:
        """The recipe with this seed."""
        return replace(self, seed=seed)

    def build(
        self, shapes: Sequence[torch.Size], dim: int | None, device: torch.device, dtype: torch.dtype
    ) -> Projection:
        """The map for parameters of these shapes; the full space where ``dim`` is None."""
        size = sum(shape.numel() for shape in shapes)
        if dim is None:
            return FullSpace(size)
        check_dim(dim, size)
        assert self.seed is not None
        return StructuredMap.generate(shapes, dim, self.seed, device, dtype)

    def to_dict(self) -> dict[str, Any]:
        """The settings as plain values, with the kind."""
        return {"kind": self.kind, "seed": self.seed}


def parted(shapes: Sequence[torch.Size], dim: int) -> tuple[list[int], list[int]]:
    """Which parameters have factors, and which are in the sparse part; there are at most so many parts."""
    some = [i for i, shape in enumerate(shapes) if shape.numel() > 0]
    matrices = [i for i in some if len(shapes[i]) > 1 and 1 < shapes[i][0] < shapes[i].numel()]
    if len(matrices) + (len(matrices) < len(some)) > dim:
        matrices = sorted(sorted(matrices, key=lambda i: -shapes[i].numel())[: dim - 1])
    return matrices, [i for i in some if i not in matrices]


def dealt(sizes: Sequence[int], dim: int) -> list[int]:
    """Dimensions dealt to parts of these sizes: one each, the others by √size, and no part has more than its size."""
    share = np.sqrt(sizes)
    share *= (dim - len(sizes)) / share.sum()
    found = 1 + np.minimum(np.floor(share).astype(np.int64), np.array(sizes) - 1)
    while found.sum() < dim:
        found[np.where(found < sizes, share - found, -np.inf).argmax()] += 1
    return [int(count) for count in found]


@dataclass(frozen=True, eq=False)
class Kronecker:
    """The first columns of P_out ⊗ P_in, for a weight (outputs, inputs).

    Attributes:
        start: place of the weight in R^p.
        columns: place of its coordinates in R^k.
        outer: P_out (outputs, r_out).
        inner: P_in (inputs, r_in).
    """

    start: int
    columns: slice
    outer: Tensor = field(repr=False)
    inner: Tensor = field(repr=False)

    @classmethod
    def generate(
        cls, start: int, columns: slice, shape: torch.Size, random: np.random.Generator, like: Tensor
    ) -> Kronecker:
        """Random factors, as square as the weight allows."""
        outputs, inputs, dim = shape[0], shape[1:].numel(), columns.stop - columns.start
        outer = max(min(outputs, math.isqrt(dim - 1) + 1), -(-dim // inputs))
        inner = -(-dim // outer)
        factors = [
            torch.from_numpy(orthonormal(random, *sizes)).to(like) for sizes in ((outputs, outer), (inputs, inner))
        ]
        return cls(start, columns, *factors)

    @property
    def size(self) -> int:
        """The number of coordinates before projection."""
        return len(self.outer) * len(self.inner)

    def add(self, out: Tensor, rows: Tensor, offset: int) -> None:
        """Add the projection of a run of the weight's coordinates."""
        if rows.shape[1] < self.size:
            rows = F.pad(rows, (offset, self.size - offset - rows.shape[1]))
        self._put(out, self.outer.T @ (rows.reshape(len(rows), len(self.outer), len(self.inner)) @ self.inner))

    def add_positions(self, out: Tensor, outputs: Tensor, inputs: Tensor) -> None:
        """Add Σ over positions of projected output gradients (B, positions, r_out) ⊗ projected inputs (…, r_in)."""
        self._put(out, torch.bmm(outputs.transpose(1, 2), inputs))

    def _put(self, out: Tensor, coordinates: Tensor) -> None:
        """Add coordinates (B, r_out, r_in)."""
        out[:, self.columns] += coordinates.flatten(1)[:, : self.columns.stop - self.columns.start]

    def lift(self, coordinates: Tensor) -> Tensor:
        """P_out U P_inᵀ, where U has the coordinates in R^k that are this weight's."""
        ranks = (self.outer.shape[1], self.inner.shape[1])
        own = coordinates[self.columns].to(self.outer)
        return (self.outer @ F.pad(own, (0, math.prod(ranks) - len(own))).view(ranks) @ self.inner.T).flatten()


@dataclass(frozen=True, eq=False)
class Loose:
    """A part of the sparse map: one parameter that is no matrix."""

    start: int
    columns: slice
    map: SparseMap = field(repr=False)

    @property
    def size(self) -> int:
        """The number of coordinates before projection."""
        return self.map.size

    def add(self, out: Tensor, rows: Tensor, offset: int) -> None:
        """Add each signed coordinate to its bucket."""
        self.map.add_projected(out[:, self.columns], rows, offset)

    def lift(self, coordinates: Tensor) -> Tensor:
        """Copy each bucket's value to its coordinates."""
        return self.map.lift(coordinates[self.columns])


@dataclass(frozen=True, eq=False)
class StructuredMap:
    """⊕ (P_out ⊗ P_in) beside a sparse map, with orthonormal columns.

    Attributes:
        parts: one for each parameter that is not empty, in their order.
    """

    parts: tuple[Kronecker | Loose, ...] = field(repr=False)
    size: int
    dim: int
    seed: int
    kind: str = field(default="structured", init=False)
    least_records: int = field(default=1, init=False, repr=False)

    @classmethod
    def generate(
        cls, shapes: Sequence[torch.Size], dim: int, seed: int, device: torch.device, dtype: torch.dtype
    ) -> StructuredMap:
        """Deal the dimensions to the parameters, and draw the factors from a seed."""
        sizes = [shape.numel() for shape in shapes]
        starts = list(itertools.accumulate(sizes, initial=0))
        matrices, rest = parted(shapes, dim)
        loose = [sum(sizes[i] for i in rest)] if rest else []
        dims = dealt([*(sizes[i] for i in matrices), *loose], dim)
        ends = list(itertools.accumulate(dims, initial=0))
        # A stream of their own: the sparse map takes the one that the seed begins.
        random = np.random.Generator(np.random.Philox(seed).jumped())
        like = torch.empty(0, device=device, dtype=dtype)
        parts: dict[int, Kronecker | Loose] = {
            i: Kronecker.generate(starts[i], slice(*ends[at : at + 2]), shapes[i], random, like)
            for at, i in enumerate(matrices)
        }
        if rest:
            sparse, place = SparseMap.generate(loose[0], dims[-1], seed, device, dtype), slice(*ends[-2:])
            offsets = itertools.accumulate((sizes[i] for i in rest), initial=0)
            parts |= {i: Loose(starts[i], place, sparse.part(o, sizes[i])) for i, o in zip(rest, offsets, strict=False)}
        return cls(tuple(parts[i] for i in sorted(parts)), starts[-1], dim, seed)

    @property
    def width(self) -> int:
        """The number of dimensions, k."""
        return self.dim

    def _part(self, start: int) -> int:
        """The number of the part that has this coordinate."""
        return bisect.bisect_right(self.parts, start, key=lambda part: part.start) - 1

    def _matrix(self, start: int, rows: int) -> Kronecker | None:
        """The factors of the weight at this place with so many rows, or None where it has none."""
        part = self.parts[self._part(start)]
        return part if isinstance(part, Kronecker) and (part.start, len(part.outer)) == (start, rows) else None

    def add_projected(self, out: Tensor, rows: Tensor, start: int) -> None:
        """Through the factors or the sparse map of every parameter in the run."""
        stop = start + rows.shape[1]
        for part in self.parts[self._part(start) :]:
            if part.start >= stop:
                break
            first, last = max(start, part.start), min(stop, part.start + part.size)
            part.add(out, rows[:, first - start : last - start], first - part.start)

    def add_looked_up(self, out: Tensor, values: Tensor, index: Tensor, count: int, start: int) -> None:
        """Through the factors: P_out has a row for each that was looked up."""
        part = self._matrix(start, count)
        if part is None:
            self.add_projected(out, table(values, index, count), start)
        else:
            part.add_positions(out, part.outer[index], values @ part.inner)

    def linear(self, inputs: Inputs, shape: torch.Size, weight: int, bias: int | None, rows: int) -> LinearRows | None:
        """Inputs are projected once for all rows, output gradients for each."""
        part = self._matrix(weight, shape[0])
        if part is None:
            return None
        projected = inputs.times(part.inner)

        def add(out: Tensor, backprops: Tensor) -> None:
            part.add_positions(out, backprops @ part.outer, projected)
            if bias is not None:
                self.add_projected(out, backprops.sum(1), bias)

        return add

    def finish(self, out: Tensor) -> Tensor:
        """Nothing is left to do."""
        return out

    def lift(self, coordinates: Tensor) -> Tensor:
        """P_out U P_inᵀ of every weight, and the sparse map's buckets."""
        return torch.cat([part.lift(coordinates) for part in self.parts])
