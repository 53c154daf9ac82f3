"""The source paper's random subspace: dense orthonormal columns, uniform on the Stiefel manifold, in O(pk) memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from opacus_expm.subspaces.base import Inputs, LinearRows, Projection, check_dim, check_seed, table
from opacus_expm.subspaces.full import FullSpace

_DENSE_RECORDS = 32  # the least number of records in a product with a dense map, which is read once for each piece


@dataclass(frozen=True)
class Stiefel:
    """The source paper's subspace, or the full space where ``proj_dim`` is None; ``projection="stiefel"``.

    ``Sparse`` is faster, needs O(p) memory instead of O(pk), and is within 0.2 points of accuracy on the digits.

    Args:
        seed: public seed (round t adds t); drawn afresh by default, and recorded.
    """

    seed: int | None = None
    kind: str = field(default="stiefel", init=False, repr=False)

    def __post_init__(self) -> None:
        check_seed(self.seed)

    def seeded(self, seed: int) -> Stiefel:
        """The recipe with this seed."""
        return replace(self, seed=seed)

    def build(
        self, shapes: Sequence[torch.Size], dim: int | None, device: torch.device, dtype: torch.dtype
    ) -> Projection:
        """The map for so many parameters and dimensions; the full space where ``dim`` is None."""
        size = sum(shape.numel() for shape in shapes)
        if dim is None:
            return FullSpace(size)
        check_dim(dim, size)
        assert self.seed is not None
        return Columns.uniform(size, dim, self.seed, device, dtype)

    def to_dict(self) -> dict[str, Any]:
        """The settings as plain values, with the kind."""
        return {"kind": self.kind, "seed": self.seed}


def orthonormal(random: np.random.Generator, size: int, dim: int) -> NDArray[np.float64]:
    """Columns (size, dim) that are uniform on the Stiefel manifold: the QR factor of a Gaussian matrix.

    The signs of R's diagonal are moved into the columns; without this the distribution would be that of LAPACK's
    convention instead of the uniform one.
    """
    q, r = np.linalg.qr(random.standard_normal((size, dim)))
    q *= np.where(np.diag(r) < 0, -1.0, 1.0)
    return q


@dataclass(frozen=True)
class Columns:
    """Dense orthonormal columns: random, or given, such as leading eigenvectors of the curvature on public data.

    Attributes:
        matrix: A (p, k).
        seed: public seed of random columns, None for given ones.
    """

    matrix: Tensor = field(repr=False)
    seed: int | None
    kind: str = field(default="stiefel", init=False)
    least_records: int = field(default=_DENSE_RECORDS, init=False, repr=False)

    @classmethod
    def uniform(cls, size: int, dim: int, seed: int, device: torch.device, dtype: torch.dtype) -> Columns:
        """Random columns from a seed."""
        random = np.random.Generator(np.random.Philox(seed))
        return cls(torch.from_numpy(orthonormal(random, size, dim)).to(device, dtype), seed)

    @property
    def size(self) -> int:
        """The number of parameters, p."""
        return self.matrix.shape[0]

    @property
    def dim(self) -> int:
        """The number of columns, k."""
        return self.matrix.shape[1]

    @property
    def width(self) -> int:
        """The number of columns, k."""
        return self.dim

    def add_projected(self, out: Tensor, rows: Tensor, start: int) -> None:
        """Add rows · A[start : start+q]."""
        torch.addmm(out, rows, self.matrix[start : start + rows.shape[1]], out=out)

    def add_looked_up(self, out: Tensor, values: Tensor, index: Tensor, count: int, start: int) -> None:
        """Build the dense table, and project it."""
        self.add_projected(out, table(values, index, count), start)

    def linear(self, inputs: Inputs, shape: torch.Size, weight: int, bias: int | None, rows: int) -> LinearRows | None:
        """For one position and several rows the input is contracted with the columns first.

        That takes (in + rows) instead of in·rows products for each output and column.
        """
        if inputs.positions != 1 or rows == 1:
            return None
        a = self.matrix[weight : weight + shape.numel()].view(shape[0], -1, self.dim)  # (out, in, k)
        contracted = inputs.times(a.transpose(0, 1).flatten(1)).view(-1, shape[0], self.dim)

        def add(out: Tensor, backprops: Tensor) -> None:
            out += torch.einsum("bo,bok->bk", backprops[:, 0], contracted)
            if bias is not None:
                self.add_projected(out, backprops.sum(1), bias)

        return add

    def finish(self, out: Tensor) -> Tensor:
        """Nothing is left to do."""
        return out

    def lift(self, coordinates: Tensor) -> Tensor:
        """The product Aξ."""
        return self.matrix @ coordinates.to(self.matrix)
