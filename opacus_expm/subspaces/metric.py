"""A metric of Kronecker factors: every layer its own units, every direction its own scale.

A layer with weight W (outputs × inputs) and bias b is seen as one matrix [W b]. With symmetric factors K_B (outputs) and
K_A (inputs and the constant), its gradient G is measured as K_B G K_A, and a coordinate U of the layer moves its
parameters by K_B U K_A. Let A and B be second moments of the layer's inputs and of the gradients at its outputs, with trace
1, and h the trace of its curvature, which is about h·A ⊗ B (K-FAC, Martens and Grosse 2015). With K_A = (I + A/δ_A)^{−½} and
K_B = (I + B/δ_B)^{−½}, δ_Aδ_B = h₀/h, a direction that curves by less than h₀ keeps the parameters' own units, and others
are measured in units in which they curve by about h₀. So h₀ says how many dimensions take part: those whose noise matters.
Parameters outside the blocks keep their own units too. O(Σ(d_in² + d_out²)) memory, never p × rank.

**Privacy:** the factors are public, or were released with noise and charged (``opacus_expm.learned``). Clipping comes after
the map, so the guarantee does not depend on them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from opacus_expm.subspaces.base import Inputs, Projection, table


@dataclass(frozen=True)
class Block:
    """The trainable part of one layer as a matrix [W b], and where it is in R^p.

    Attributes:
        outputs: rows of the matrix.
        inputs: columns of W; 0 where the weight is frozen.
        weight: place of W in R^p, or None.
        bias: place of b in R^p, or None.
    """

    outputs: int
    inputs: int
    weight: int | None
    bias: int | None

    @property
    def width(self) -> int:
        """Columns of the matrix: inputs, and one for the bias."""
        return self.inputs + (self.bias is not None)

    @property
    def spans(self) -> list[tuple[int, int]]:
        """Where its weight and its bias start and end in R^p."""
        sizes = ((self.weight, self.outputs * self.inputs), (self.bias, self.outputs))
        return [(start, start + size) for start, size in sizes if start is not None]

    def matrix(self, rows: Tensor) -> Tensor:
        """The layer's part of vectors (…, p) as matrices (…, outputs, width)."""
        parts = []
        if self.weight is not None:
            part = rows[..., self.weight : self.weight + self.outputs * self.inputs]
            parts.append(part.reshape(*rows.shape[:-1], self.outputs, self.inputs))
        if self.bias is not None:
            parts.append(rows[..., self.bias : self.bias + self.outputs, None])
        return torch.cat(parts, dim=-1)

    def add(self, rows: Tensor, matrix: Tensor) -> None:
        """Add matrices to vectors, in place."""
        if self.weight is not None:
            rows[..., self.weight : self.weight + self.outputs * self.inputs] += matrix[..., : self.inputs].flatten(-2)
        if self.bias is not None:
            rows[..., self.bias : self.bias + self.outputs] += matrix[..., -1]

    def put(self, rows: Tensor, matrix: Tensor) -> None:
        """Write matrices back into vectors, in place."""
        if self.weight is not None:
            rows[..., self.weight : self.weight + self.outputs * self.inputs] = matrix[..., : self.inputs].flatten(-2)
        if self.bias is not None:
            rows[..., self.bias : self.bias + self.outputs] = matrix[..., -1]


@dataclass(frozen=True, eq=False, repr=False)
class Root:
    """A symmetric matrix K = LR + κI, where L (d × r) has few columns; for a dense one, L is K and there is no R.

    Only a few directions of a factor can be told from noise, and for all others K is κ: K takes 2dr products then, not d².
    """

    left: Tensor
    right: Tensor | None = None
    rest: float = 0.0

    def __len__(self) -> int:
        return len(self.left)

    def to(self, device: torch.device, dtype: torch.dtype) -> Root:
        """The same matrix on another device, or in another type."""
        right = None if self.right is None else self.right.to(device, dtype)
        return Root(self.left.to(device, dtype), right, self.rest)

    def times(self, rows: Tensor, start: int = 0) -> Tensor:
        """Rows (…, d) times K; or rows (…, q) that are given from the column ``start`` on, and zero elsewhere."""
        place = slice(start, start + rows.shape[-1])
        found = rows @ self.left[place]
        if self.right is not None:
            found = found @ self.right
            found[..., place].add_(rows, alpha=self.rest)
        return found

    def both(self, other: Root, matrices: Tensor) -> Tensor:
        """K U K′ for matrices U (…, d, d′), where K′ is ``other``."""
        return other.times(self.times(matrices.mT).mT)

    def dense(self) -> Tensor:
        """K itself."""
        return self.times(torch.eye(len(self)).to(self.left))


@dataclass(frozen=True, eq=False, repr=False)
class Spectrum:
    """Eigenvalues and eigenvectors of a positive semi-definite matrix; the first ``alike`` eigenvalues are equal."""

    values: Tensor
    vectors: Tensor
    alike: int = 0

    @classmethod
    def of(cls, matrix: Tensor) -> Spectrum:
        """Of a symmetric matrix; eigenvalues below 0 are noise."""
        values, vectors = torch.linalg.eigh(matrix)
        return cls(values.clamp(min=0), vectors)

    def seen(self, edge: float) -> Spectrum:
        """Of a matrix with trace 1: eigenvalues below the edge of its noise are taken to be equal."""
        clear = self.values > edge
        rest = max(0.0, 1 - float(self.values[clear].sum())) / max(1, int((~clear).sum()))
        return Spectrum(torch.where(clear, self.values, rest), self.vectors, int((~clear).sum()))

    def root(self, damping: float) -> Root:
        """(I + M/damping)^{−½}; by the eigenvectors whose eigenvalues differ, where these are few."""
        found = (1 + self.values / damping).rsqrt()
        if 2 * self.alike <= len(found):
            return Root((self.vectors * found) @ self.vectors.T)
        rest, few = float(found[0]), self.vectors[:, self.alike :]
        return Root(few * (found[self.alike :] - rest), few.T, rest)


def shrunk(matrix: Tensor, records: int) -> Tensor:
    """A mean of few records' second moments, drawn towards equal eigenvalues.

    Directions that none of so few records shows would seem to have no curvature. How far it is drawn is the oracle
    approximating shrinkage of Chen, Wiesel, Eldar and Hero (2010, https://arxiv.org/abs/0907.4698), a function of the matrix
    and of the number of records alone.
    """
    dim, trace, square = len(matrix), float(matrix.trace()), float(matrix.square().sum())
    spread = (records + 1 - 2 / dim) * (square - trace**2 / dim)
    excess = (1 - 2 / dim) * square + trace**2
    share = excess / spread if spread > excess else 1.0
    return (1 - share) * matrix + share * trace / dim * torch.eye(dim, dtype=matrix.dtype)


def corrected(known: Tensor, told: Tensor, edge: float) -> Tensor:
    """Second moments of public records, and those of private records where the two clearly differ.

    The noise of a matrix has no eigenvalue beyond its edge, so that what goes beyond it in the difference is of the records.

    Args:
        known: of public records.
        told: of private records, with noise.
        edge: of that noise.
    """
    values, vectors = torch.linalg.eigh(told - known)
    found: Tensor = known + (vectors * torch.where(values.abs() > edge, values, 0.0)) @ vectors.T
    return found


@dataclass(frozen=True, eq=False)
class Metric:
    """A recipe for a metric of known factors, over the full space.

    Attributes:
        blocks: layers with factors; all other parameters are left as they are.
        roots: (K_A, K_B) of each block, symmetric.
    """

    blocks: tuple[Block, ...]
    roots: tuple[tuple[Root, Root], ...] = field(repr=False)
    seed: int | None = None
    kind: str = field(default="metric", init=False, repr=False)

    @classmethod
    def damped(
        cls, blocks: tuple[Block, ...], spectra: Sequence[tuple[Spectrum, Spectrum]], traces: Sequence[float], h0: float
    ) -> Metric:
        """The metric in which directions that curve by less than h₀ keep the parameters' own units.

        The damping is dealt to both factors in proportion to their largest eigenvalues, after Martens and Grosse (2015).

        Args:
            blocks: layers with factors.
            spectra: (A, B) of each block.
            traces: h of each block; one of 0 keeps its own units.
            h0: h₀.
        """
        roots = []
        for (a, b), trace in zip(spectra, traces, strict=True):
            share = math.sqrt(h0 / trace) if trace > 0 else math.inf
            balance = math.sqrt(float(a.values.max() / b.values.max()))
            roots.append((a.root(share * balance), b.root(share / balance)))
        return cls(blocks, tuple(roots))

    def seeded(self, seed: int) -> Metric:
        """Nothing is random."""
        return self

    def build(
        self, shapes: Sequence[torch.Size], dim: int | None, device: torch.device, dtype: torch.dtype
    ) -> Projection:
        """The map; it has as many dimensions as there are parameters."""
        if dim is not None:
            raise ValueError(f"proj_dim must be None with a metric over the full space, got {dim}")
        size = sum(shape.numel() for shape in shapes)
        return MetricMap(size, self.blocks, [(a.to(device, dtype), b.to(device, dtype)) for a, b in self.roots])

    def to_dict(self) -> dict[str, Any]:
        """Tensors and plain values."""
        return {
            "kind": self.kind,
            "roots": {str(i): torch.cat([r.dense().flatten() for r in k]) for i, k in enumerate(self.roots)},
        }


@dataclass(frozen=True, eq=False)
class MetricMap:
    """U → K_B U K_A, layer by layer; its own transpose, because the factors are symmetric."""

    size: int
    blocks: Sequence[Block]
    roots: Sequence[tuple[Root, Root]] = field(repr=False)
    seed: None = field(default=None, init=False)
    kind: str = field(default="metric", init=False)
    least_records: int = field(default=1, init=False, repr=False)

    @property
    def dim(self) -> int:
        """The number of parameters, p."""
        return self.size

    @property
    def width(self) -> int:
        """The number of parameters, p."""
        return self.size

    def add_projected(self, out: Tensor, rows: Tensor, start: int) -> None:
        """Apply the factors to a weight or to a bias alone, because the map is linear in both; or to any other run."""
        for block, (k_a, k_b) in zip(self.blocks, self.roots, strict=True):
            if start == block.weight and rows.shape[1] == block.outputs * block.inputs:
                matrix = k_a.times(rows.reshape(len(rows), block.outputs, block.inputs))
            elif start == block.bias and rows.shape[1] == block.outputs:
                matrix = k_a.times(rows[:, :, None], block.inputs)
            else:
                continue
            block.add(out, k_b.times(matrix.mT).mT)
            return
        end = start + rows.shape[1]
        if all(last <= start or end <= first for block in self.blocks for first, last in block.spans):
            out[:, start:end] += rows  # no layer of the metric
            return
        whole = rows.new_zeros(len(rows), self.size)
        whole[:, start : start + rows.shape[1]] = rows
        out += self.lift(whole)

    def add_looked_up(self, out: Tensor, values: Tensor, index: Tensor, count: int, start: int) -> None:
        """Through the dense table."""
        self.add_projected(out, table(values, index, count), start)

    def linear(self, inputs: Inputs, shape: torch.Size, weight: int, bias: int | None, rows: int) -> None:
        """No faster way to rows."""

    def finish(self, out: Tensor) -> Tensor:
        """Nothing is left to do."""
        return out

    def lift(self, coordinates: Tensor) -> Tensor:
        """Apply the factors, which are their own transposes."""
        found = coordinates.clone()
        for block, (k_a, k_b) in zip(self.blocks, self.roots, strict=True):
            block.put(found, k_b.both(k_a, block.matrix(coordinates)))
        return found
