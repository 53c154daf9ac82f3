"""What every subspace has in common: the recipe that a user chooses, and the map that is made of it.

With A ∈ R^{p×k}, a map's ``add_projected`` is v → Aᵀv and ``lift`` is ξ → Aξ. Projecting works on any run of consecutive
coordinates, so that a layer's gradients can be projected and dropped before the next layer's exist.

**Privacy:** a map is computed from a public seed, the shapes of the parameters and possibly public data, never from the
private data. Gradients and curvature are clipped after it, so the guarantee needs neither orthonormal columns nor an
exact map.

Random streams are those of numpy's Philox generator, produced on the CPU: the same seed gives the same map in every
process and on every device (up to rounding for ``Stiefel``, whose columns come from LAPACK).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from scipy.optimize import brentq
from torch import Tensor

from opacus_expm import _check

LinearRows = Callable[[Tensor, Tensor], None]  # (out (B, width), output gradients (B, positions, out))


@dataclass(frozen=True, eq=False, repr=False)
class Inputs:
    """What a layer that is a matrix gets of each record at its positions; private.

    Attributes:
        positions: how many there are.
        times: the inputs times a matrix (in, r), as (B, positions, r).
    """

    positions: int
    times: Callable[[Tensor], Tensor]


class Projection(Protocol):
    """A linear map A from R^k to R^p and its transpose, applied block by block."""

    @property
    def kind(self) -> str:
        """Name of the construction."""

    @property
    def seed(self) -> int | None:
        """Public seed, or None where nothing is random."""

    @property
    def size(self) -> int:
        """p, the number of coordinates before projection."""

    @property
    def dim(self) -> int:
        """k, the number of coordinates after projection."""

    @property
    def width(self) -> int:
        """Number of columns of ``out`` below: k, or more where the map is finished at the end."""

    @property
    def least_records(self) -> int:
        """From how many records on a block is projected efficiently: more than one where the map is read as a matrix."""

    def add_projected(self, out: Tensor, rows: Tensor, start: int) -> None:
        """Add Aᵀ(rows) to ``out`` (N, width), for rows (N, q) at coordinates start … start+q."""

    def add_looked_up(self, out: Tensor, values: Tensor, index: Tensor, count: int, start: int) -> None:
        """The same for the rows of a table (count, d) at ``start`` in which row ``index[n, t]`` has ``values[n, t]``.

        Equal indices add up; ``values`` is (N, T, d), ``index`` (N, T).
        """

    def linear(self, inputs: Inputs, shape: torch.Size, weight: int, bias: int | None, rows: int) -> LinearRows | None:
        """A faster way to the rows of a linear layer or convolution with this weight, or None where there is none.

        Args:
            inputs: what the layer gets.
            shape: of the weight (out, …).
            weight: place of the weight in R^p.
            bias: place of the bias in R^p, or None.
            rows: how many rows there are going to be for these inputs.

        Returns:
            A function that adds Aᵀ(per-sample gradients) to a row's ``out`` (B, width), for output gradients
            (B, positions, out).
        """

    def finish(self, out: Tensor) -> Tensor:
        """(…, width) → (…, k), once all coordinates were added."""

    def lift(self, coordinates: Tensor) -> Tensor:
        """Aξ ∈ R^p for coordinates ξ ∈ R^k."""


class Subspace(Protocol):
    """A recipe for a map: what a user passes as ``projection=``; frozen and public."""

    @property
    def kind(self) -> str:
        """Name of the recipe."""

    @property
    def seed(self) -> int | None:
        """Public seed of the first round (round t adds t), or None to draw one afresh."""

    def seeded(self, seed: int) -> Subspace:
        """The recipe with this seed."""

    def build(
        self, shapes: Sequence[torch.Size], dim: int | None, device: torch.device, dtype: torch.dtype
    ) -> Projection:
        """The map for parameters of these shapes, in their order, and k = ``dim``; None is the full space. Needs a seed.

        Raises:
            ValueError: k > p.
        """

    def to_dict(self) -> dict[str, Any]:
        """Tensors and plain values, with the kind; public."""


def check_dim(dim: int, size: int) -> None:
    """Raise unless 1 ≤ k ≤ p."""
    _check.positive_int("proj_dim", dim)
    if dim > size:
        raise ValueError(
            f"proj_dim must be at most the number of trainable parameters, {size}, got {dim}; "
            "pass proj_dim=None to work in the full space"
        )


def check_seed(seed: int | None) -> None:
    """Raise unless it is a seed or None."""
    if seed is not None:
        _check.seed("seed", seed)


def table(values: Tensor, index: Tensor, count: int) -> Tensor:
    """The (N, count·d) table whose row ``index[n, t]`` is the sum of its ``values[n, t]``."""
    size, _, width = values.shape
    found = values.new_zeros(size, count, width)
    return found.scatter_add_(1, index[..., None].expand_as(values), values).flatten(1)


def damping_of(values: Tensor, dimensions: float, least: float) -> float:
    """h₀ for which Σ h/(h + h₀), the number of dimensions that take part, is as asked; no less than ``least`` > 0."""

    def excess(logarithm: float) -> float:
        return float((values / (values + math.exp(logarithm))).sum()) - dimensions

    if excess(math.log(least)) <= 0:
        return least
    most = math.log(float(values.sum()) / dimensions)  # where excess is negative: h/(h + h₀) < h/h₀
    return math.exp(float(brentq(excess, math.log(least), most, rtol=1e-9)))
