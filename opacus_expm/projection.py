"""Linear maps between the parameter space R^p and the subspace R^k in which the mechanism works.

With A ∈ R^{p×k}, ``project`` is v → Aᵀv and ``lift`` is ξ → Aξ; both work on any run of consecutive
coordinates, so that a layer's gradients can be projected and dropped before the next layer's exist.

**Privacy:** a projection is computed from a public seed and the number of parameters alone, never from
the private data. Gradients and curvature are clipped after it, so the guarantee needs neither
orthonormal columns nor an exact map.

The random stream is that of numpy's Philox generator, produced on the CPU: the same seed gives the same
map in every process and on every device (up to rounding for ``stiefel``, whose columns come from LAPACK).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from opacus_expm import _check

KINDS = ("stiefel", "sparse")


class Projection(Protocol):
    """A seeded linear map A from R^k to R^p and its transpose, applied block by block."""

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

    def add_projected(self, out: Tensor, rows: Tensor, start: int) -> None:
        """Add Aᵀ(rows) to ``out`` (N, k), for rows (N, q) at coordinates start … start+q."""

    def add_looked_up(self, out: Tensor, values: Tensor, index: Tensor, count: int, start: int) -> None:
        """The same for the rows of a table (count, d) at ``start`` in which row ``index[n, t]`` has ``values[n, t]``.

        Equal indices add up; ``values`` is (N, T, d), ``index`` (N, T).
        """

    def lift(self, coordinates: Tensor) -> Tensor:
        """Aξ ∈ R^p for coordinates ξ ∈ R^k."""


@dataclass(frozen=True)
class Stiefel:
    """Dense orthonormal columns, uniform on the Stiefel manifold: QR of a Gaussian matrix, O(pk) memory.

    The signs of R's diagonal are moved into the columns; without this the distribution would be that of
    LAPACK's convention instead of the uniform one.
    """

    matrix: Tensor = field(repr=False)
    seed: int
    kind: str = field(default="stiefel", init=False)

    @classmethod
    def generate(cls, size: int, dim: int, seed: int, device: torch.device, dtype: torch.dtype) -> Stiefel:
        """Draw the columns from a seed."""
        normal = np.random.Generator(np.random.Philox(seed)).standard_normal((size, dim))
        q, r = np.linalg.qr(normal)
        q *= np.where(np.diag(r) < 0, -1.0, 1.0)
        return cls(torch.from_numpy(q).to(device, dtype), seed)

    @property
    def size(self) -> int:
        """P."""
        return self.matrix.shape[0]

    @property
    def dim(self) -> int:
        """K."""
        return self.matrix.shape[1]

    def add_projected(self, out: Tensor, rows: Tensor, start: int) -> None:
        """Add rows · A[start : start+q]."""
        torch.addmm(out, rows, self.matrix[start : start + rows.shape[1]], out=out)

    def add_looked_up(self, out: Tensor, values: Tensor, index: Tensor, count: int, start: int) -> None:
        """Through the dense table."""
        self.add_projected(out, _table(values, index, count), start)

    def lift(self, coordinates: Tensor) -> Tensor:
        """Aξ."""
        return self.matrix @ coordinates.to(self.matrix)


@dataclass(frozen=True)
class Sparse:
    """One non-zero per row: a random permutation of the coordinates dealt into k buckets, with random signs.

    Column j is ±1/√n_j on the n_j coordinates of bucket j: exactly orthonormal columns, O(p) memory and
    O(p) work for a vector.
    """

    bucket: Tensor = field(repr=False)
    weight: Tensor = field(repr=False)
    dim: int
    seed: int
    kind: str = field(default="sparse", init=False)

    @classmethod
    def generate(cls, size: int, dim: int, seed: int, device: torch.device, dtype: torch.dtype) -> Sparse:
        """Deal the coordinates from a seed."""
        random = np.random.Generator(np.random.Philox(seed))
        bucket = np.empty(size, dtype=np.int32)
        bucket[random.permutation(size)] = np.arange(size, dtype=np.int64) % dim
        signs = random.integers(0, 2, size=size, dtype=np.int8) * 2.0 - 1.0
        weight = signs / np.sqrt(np.bincount(bucket, minlength=dim))[bucket]
        return cls(torch.from_numpy(bucket).to(device), torch.from_numpy(weight).to(device, dtype), dim, seed)

    @property
    def size(self) -> int:
        """P."""
        return self.bucket.shape[0]

    def add_projected(self, out: Tensor, rows: Tensor, start: int) -> None:
        """Add each signed coordinate to its bucket."""
        place = slice(start, start + rows.shape[1])
        # Four times faster than index_add_, which takes the columns one by one.
        out.scatter_add_(1, self.bucket[place].long().expand_as(rows), rows * self.weight[place])

    def add_looked_up(self, out: Tensor, values: Tensor, index: Tensor, count: int, start: int) -> None:
        """Add each looked-up coordinate to its bucket; the table is never built."""
        place, shape = slice(start, start + count * values.shape[2]), (count, values.shape[2])
        signed = values * self.weight[place].view(shape)[index]
        out.scatter_add_(1, self.bucket[place].view(shape)[index].flatten(1).long(), signed.flatten(1))

    def lift(self, coordinates: Tensor) -> Tensor:
        """Copy each bucket's value to its coordinates, signed and scaled."""
        return self.weight * coordinates.to(self.weight)[self.bucket]


@dataclass(frozen=True)
class FullSpace:
    """The identity: k = p, nothing projected."""

    size: int
    seed: None = field(default=None, init=False)
    kind: str = field(default="full", init=False)

    @property
    def dim(self) -> int:
        """Dimension k = p."""
        return self.size

    def add_projected(self, out: Tensor, rows: Tensor, start: int) -> None:
        """Copy the rows to their place."""
        out[:, start : start + rows.shape[1]] += rows

    def add_looked_up(self, out: Tensor, values: Tensor, index: Tensor, count: int, start: int) -> None:
        """Copy the table to its place."""
        self.add_projected(out, _table(values, index, count), start)

    def lift(self, coordinates: Tensor) -> Tensor:
        """ξ itself."""
        return coordinates


def _table(values: Tensor, index: Tensor, count: int) -> Tensor:
    """The (N, count·d) table whose row ``index[n, t]`` is the sum of its ``values[n, t]``."""
    size, _, width = values.shape
    table = values.new_zeros(size, count, width)
    return table.scatter_add_(1, index[..., None].expand_as(values), values).flatten(1)


def make_projection(
    kind: str, size: int, dim: int | None, seed: int, *, device: torch.device, dtype: torch.dtype
) -> Projection:
    """A projection of the given kind, or the identity where ``dim`` is None.

    Args:
        kind: ``"stiefel"`` (dense, the paper's) or ``"sparse"`` (O(p) memory).
        size: number of trainable parameters p.
        dim: dimension of the subspace k ≤ p, or None for the full space.
        seed: public seed.
        device: where the map is applied.
        dtype: floating type in which it is applied.

    Raises:
        ValueError: an unknown kind, or k > p.
    """
    _check.one_of("projection", kind, KINDS)
    if dim is None:
        return FullSpace(size)
    _check.positive_int("proj_dim", dim)
    if dim > size:
        raise ValueError(
            f"proj_dim must be at most the number of trainable parameters, {size}, got {dim}; "
            "pass proj_dim=None to work in the full space"
        )
    build = Stiefel.generate if kind == "stiefel" else Sparse.generate
    return build(size, dim, seed, device, dtype)
