"""Linear maps between the parameter space R^p and the subspace R^k in which the mechanism works.

With A ∈ R^{p×k}, ``project`` is v → Aᵀv and ``lift`` is ξ → Aξ; both work on any run of consecutive
coordinates, so that a layer's gradients can be projected and dropped before the next layer's exist.

**Privacy:** a projection is computed from a public seed, the number of parameters and possibly public data
(``public_curvature``), never from the private data. Gradients and curvature are clipped after it, so the guarantee
needs neither orthonormal columns nor an exact map.

The random stream is that of numpy's Philox generator, produced on the CPU: the same seed gives the same
map in every process and on every device (up to rounding for ``stiefel``, whose columns come from LAPACK).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from opacus_expm import _check

KINDS = ("stiefel", "sparse", "public", "preconditioned")
PUBLIC_KINDS = ("public", "preconditioned")
_OVERSAMPLING = 20  # vectors beyond the rank in the randomised decomposition
_LEAST_DAMPING = 1e-6  # of the largest eigenvalue


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

    @property
    def width(self) -> int:
        """Number of columns of ``out`` below: k, or more where the map is finished at the end."""

    def add_projected(self, out: Tensor, rows: Tensor, start: int) -> None:
        """Add Aᵀ(rows) to ``out`` (N, width), for rows (N, q) at coordinates start … start+q."""

    def add_looked_up(self, out: Tensor, values: Tensor, index: Tensor, count: int, start: int) -> None:
        """The same for the rows of a table (count, d) at ``start`` in which row ``index[n, t]`` has ``values[n, t]``.

        Equal indices add up; ``values`` is (N, T, d), ``index`` (N, T).
        """

    def finish(self, out: Tensor) -> Tensor:
        """(…, width) → (…, k), once all coordinates were added."""

    def lift(self, coordinates: Tensor) -> Tensor:
        """Aξ ∈ R^p for coordinates ξ ∈ R^k."""


@dataclass(frozen=True)
class Stiefel:
    """Dense orthonormal columns, O(pk) memory: random, or leading eigenvectors of the curvature on public data.

    ``generate`` draws them uniformly on the Stiefel manifold, as the QR factor of a Gaussian matrix. The signs of R's
    diagonal are moved into the columns; without this the distribution would be that of LAPACK's convention instead of
    the uniform one.
    """

    matrix: Tensor = field(repr=False)
    seed: int | None
    kind: str = "stiefel"

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

    @property
    def width(self) -> int:
        """K."""
        return self.dim

    def add_projected(self, out: Tensor, rows: Tensor, start: int) -> None:
        """Add rows · A[start : start+q]."""
        torch.addmm(out, rows, self.matrix[start : start + rows.shape[1]], out=out)

    def add_looked_up(self, out: Tensor, values: Tensor, index: Tensor, count: int, start: int) -> None:
        """Through the dense table."""
        self.add_projected(out, _table(values, index, count), start)

    def finish(self, out: Tensor) -> Tensor:
        """Nothing is left to do."""
        return out

    def lift(self, coordinates: Tensor) -> Tensor:
        """Aξ."""
        return self.matrix @ coordinates.to(self.matrix)


@dataclass(frozen=True)
class Sparse:
    """One non-zero per row: a random permutation of the coordinates dealt into k buckets, with random signs.

    Column j is ±1/√n_j on the n_j coordinates of bucket j: exactly orthonormal columns, O(p) memory and
    O(p) work for a vector. 8 bytes a coordinate are held (bucket and weight), 16 while they are generated; from the
    seed alone the same map comes back in any process.
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
        bucket[random.permutation(size)] = np.resize(np.arange(dim, dtype=np.int32), size)
        signs = torch.from_numpy(random.integers(0, 2, size=size, dtype=np.int8)).mul_(2).sub_(1)
        # In the target's type from the start: a float64 copy would be the largest array of all.
        magnitude = torch.from_numpy(1 / np.sqrt(np.bincount(bucket, minlength=dim))).to(dtype)
        weight = magnitude[torch.from_numpy(bucket)].mul_(signs)
        return cls(torch.from_numpy(bucket).to(device), weight.to(device), dim, seed)

    @property
    def size(self) -> int:
        """P."""
        return self.bucket.shape[0]

    @property
    def width(self) -> int:
        """K."""
        return self.dim

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

    def finish(self, out: Tensor) -> Tensor:
        """Nothing is left to do."""
        return out

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

    @property
    def width(self) -> int:
        """K."""
        return self.dim

    def add_projected(self, out: Tensor, rows: Tensor, start: int) -> None:
        """Copy the rows to their place."""
        out[:, start : start + rows.shape[1]] += rows

    def add_looked_up(self, out: Tensor, values: Tensor, index: Tensor, count: int, start: int) -> None:
        """Copy the table to its place."""
        self.add_projected(out, _table(values, index, count), start)

    def finish(self, out: Tensor) -> Tensor:
        """Nothing is left to do."""
        return out

    def lift(self, coordinates: Tensor) -> Tensor:
        """ξ itself."""
        return coordinates


@dataclass(frozen=True)
class Preconditioned:
    """A = M·P: a projection P seen through public curvature, so that one radius and one bound suit all directions.

    With leading eigenpairs (h, V) of the Gauss-Newton matrix on public data and a damping h₀ > 0,

        M = I − V diag(1 − (1 + h/h₀)^{−1/2}) Vᵀ,

    so that MMᵀ = (I + V diag(h) Vᵀ/h₀)^{−1}: the ball |ξ| ≤ R is a trust region in a damped Newton metric. The columns
    are not orthonormal and need not be. O(p·rank) memory. Block by block, Pᵀv and Vᵀv are added up side by side, and
    Aᵀv = Pᵀv − (PᵀV) diag(…) (Vᵀv) is finished at the end.
    """

    base: Projection
    vectors: Tensor = field(repr=False)
    shrinkage: Tensor = field(repr=False)
    projected_vectors: Tensor = field(repr=False)
    kind: str = field(default="preconditioned", init=False)

    @classmethod
    def build(cls, base: Projection, vectors: Tensor, eigenvalues: Tensor, damping: float) -> Preconditioned:
        """From eigenvectors (p, rank) and eigenvalues (rank,)."""
        shrinkage = 1 - (1 + eigenvalues / damping).rsqrt()
        projected = vectors.new_zeros(vectors.shape[1], base.width)
        base.add_projected(projected, vectors.T.contiguous(), 0)
        return cls(base, vectors, shrinkage.to(vectors), base.finish(projected))

    @property
    def seed(self) -> int | None:
        """Of the projection P."""
        return self.base.seed

    @property
    def size(self) -> int:
        """P."""
        return self.base.size

    @property
    def dim(self) -> int:
        """K."""
        return self.base.dim

    @property
    def width(self) -> int:
        """Both parts side by side."""
        return self.base.dim + self.vectors.shape[1]

    def add_projected(self, out: Tensor, rows: Tensor, start: int) -> None:
        """Add Pᵀv and Vᵀv."""
        self.base.add_projected(out[:, : self.dim], rows, start)
        out[:, self.dim :] += rows @ self.vectors[start : start + rows.shape[1]]

    def add_looked_up(self, out: Tensor, values: Tensor, index: Tensor, count: int, start: int) -> None:
        """Through the dense table."""
        self.add_projected(out, _table(values, index, count), start)

    def finish(self, out: Tensor) -> Tensor:
        """Pᵀv − (PᵀV) diag(…) (Vᵀv)."""
        along = out[..., self.dim :] * self.shrinkage
        return out[..., : self.dim] - along @ self.projected_vectors

    def lift(self, coordinates: Tensor) -> Tensor:
        """M(Pξ)."""
        plain = self.base.lift(coordinates).to(self.vectors)
        return plain - self.vectors @ (self.shrinkage * (self.vectors.T @ plain))


@dataclass(frozen=True)
class Scaled:
    """A = D·B: a projection B of parameters measured in units of their own, D = diag(scales) > 0.

    Where one unit of a bias counts for as much as three of a weight, three times as large a step is taken along it, for
    the same radius and the same bound.
    """

    inner: Projection
    scales: Tensor = field(repr=False)

    @property
    def kind(self) -> str:
        """Of the projection B."""
        return self.inner.kind

    @property
    def seed(self) -> int | None:
        """Of the projection B."""
        return self.inner.seed

    @property
    def size(self) -> int:
        """P."""
        return self.inner.size

    @property
    def dim(self) -> int:
        """K."""
        return self.inner.dim

    @property
    def width(self) -> int:
        """Of the projection B."""
        return self.inner.width

    def add_projected(self, out: Tensor, rows: Tensor, start: int) -> None:
        """Add Bᵀ(D·rows)."""
        self.inner.add_projected(out, rows * self.scales[start : start + rows.shape[1]], start)

    def add_looked_up(self, out: Tensor, values: Tensor, index: Tensor, count: int, start: int) -> None:
        """The same for looked-up rows."""
        table = self.scales[start : start + count * values.shape[2]].view(count, -1)
        self.inner.add_looked_up(out, values * table[index], index, count, start)

    def finish(self, out: Tensor) -> Tensor:
        """As the projection B does."""
        return self.inner.finish(out)

    def lift(self, coordinates: Tensor) -> Tensor:
        """D(Bξ)."""
        return self.scales * self.inner.lift(coordinates).to(self.scales)


def _table(values: Tensor, index: Tensor, count: int) -> Tensor:
    """The (N, count·d) table whose row ``index[n, t]`` is the sum of its ``values[n, t]``."""
    size, _, width = values.shape
    table = values.new_zeros(size, count, width)
    return table.scatter_add_(1, index[..., None].expand_as(values), values).flatten(1)


@dataclass(frozen=True, eq=False)
class PublicCurvature:
    """Leading eigenpairs of the Gauss-Newton matrix on public data, per record; public.

    Attributes:
        eigenvalues: h, descending (rank,).
        vectors: V, orthonormal columns (p, rank).
        scales: D, units of the parameters (p,) in which the matrix is taken, which is then DHD; None for H itself.
    """

    eigenvalues: Tensor = field(repr=False)
    vectors: Tensor = field(repr=False)
    scales: Tensor | None = field(default=None, repr=False)

    def tensors(self) -> dict[str, Tensor]:
        """All that it is made of, by name."""
        found = {"eigenvalues": self.eigenvalues, "vectors": self.vectors}
        return found if self.scales is None else {**found, "scales": self.scales}

    @classmethod
    def of_rows(cls, rows: Tensor, records: int, rank: int, seed: int) -> PublicCurvature:
        """From the rows B of BᵀB = Σ_i H_i, by a randomised singular value decomposition: no p × p matrix is built.

        (Halko, Martinsson, Tropp 2011, with two power iterations, as in ``torch.svd_lowrank``.)
        """
        rank = min(rank, *rows.shape)
        with torch.random.fork_rng(devices=[rows.device] if rows.is_cuda else []):
            torch.manual_seed(seed)
            _, singular, vectors = torch.svd_lowrank(rows, q=min(rank + _OVERSAMPLING, *rows.shape), niter=2)
        return cls(singular[:rank].double().cpu() ** 2 / records, vectors[:, :rank].contiguous())


@dataclass(frozen=True, eq=False)
class Subspace:
    """How the map A is to be made, as soon as the number of parameters is known.

    Args:
        kind: ``"stiefel"`` (dense, the paper's), ``"sparse"`` (O(p) memory), ``"public"`` (leading eigenvectors of public
            curvature) or ``"preconditioned"`` (the full space, the leading eigenvectors, or where k exceeds their number a
            sparse subspace, seen through public curvature).
        dim: k, or None for the full space.
        seed: public seed.
        curvature: of public data, for the last two kinds.
        damping: h₀ of ``Preconditioned``; None takes the least of the computed eigenvalues, so that beyond them and
            along them the curvature is the same, but no less than 10⁻⁶ of the largest.
    """

    kind: str
    dim: int | None
    seed: int
    curvature: PublicCurvature | None = None
    damping: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Tensors and plain values; public."""
        found: dict[str, Any] = {"kind": self.kind, "dim": self.dim, "seed": self.seed, "damping": self.damping}
        if self.curvature is not None:
            found |= {name: tensor.cpu() for name, tensor in self.curvature.tensors().items()}
        return found

    @classmethod
    def from_dict(cls, content: Any) -> Subspace:
        """The inverse of ``to_dict``.

        Raises:
            ValueError: missing entries.
        """
        try:
            kind, dim, seed, damping = (content[name] for name in ("kind", "dim", "seed", "damping"))
            public = kind in PUBLIC_KINDS
            curvature = None
            if public:
                curvature = PublicCurvature(content["eigenvalues"], content["vectors"], content.get("scales"))
        except (KeyError, TypeError) as error:
            raise ValueError("this is no projection") from error
        return cls(kind, dim, seed, curvature, damping)

    def build(self, size: int, device: torch.device, dtype: torch.dtype) -> Projection:
        """The map for p = ``size`` parameters.

        Raises:
            ValueError: an unknown kind, k > p, or fewer eigenvectors than k.
        """
        if self.curvature is None:
            return make_projection(self.kind, size, self.dim, self.seed, device=device, dtype=dtype)
        built = self._by_curvature(self.curvature, size, device, dtype)
        scales = self.curvature.scales
        return built if scales is None else Scaled(built, scales.to(device, dtype))

    def _by_curvature(
        self, curvature: PublicCurvature, size: int, device: torch.device, dtype: torch.dtype
    ) -> Projection:
        """The map for the last two kinds, of parameters in the units of the curvature."""
        vectors = curvature.vectors.to(device, dtype)
        if self.kind == "public":
            if self.dim is None:
                raise ValueError("proj_dim must be a number with projection='public': the number of eigenvectors")
            check_dim(self.dim, size)
            if self.dim > vectors.shape[1]:
                raise ValueError(
                    f"proj_dim={self.dim} asks for more eigenvectors than public_loader's records have, {vectors.shape[1]}"
                )
            return Stiefel(vectors[:, : self.dim].contiguous(), None, kind="public")
        base: Projection
        if self.dim is not None and self.dim <= vectors.shape[1]:
            base = Stiefel(vectors[:, : self.dim].contiguous(), None, kind="public")
        else:
            base = make_projection("sparse", size, self.dim, self.seed, device=device, dtype=dtype)
        values = curvature.eigenvalues.clamp(min=0)
        # An eigenvalue that is nothing but rounding would make a metric of nothing but rounding.
        damping = max(float(values[-1]), _LEAST_DAMPING * float(values[0])) if self.damping is None else self.damping
        if damping <= 0:
            raise ValueError("damping must be given: public_loader's records have no curvature")
        return Preconditioned.build(base, vectors, values.to(device, dtype), damping)


def make_projection(
    kind: str, size: int, dim: int | None, seed: int, *, device: torch.device, dtype: torch.dtype
) -> Projection:
    """A random projection, or the identity where ``dim`` is None.

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
    _check.one_of("projection", kind, ("stiefel", "sparse"))
    if dim is None:
        return FullSpace(size)
    check_dim(dim, size)
    build = Stiefel.generate if kind == "stiefel" else Sparse.generate
    return build(size, dim, seed, device, dtype)


def check_dim(dim: int, size: int) -> None:
    """Raise unless 1 ≤ k ≤ p."""
    _check.positive_int("proj_dim", dim)
    if dim > size:
        raise ValueError(
            f"proj_dim must be at most the number of trainable parameters, {size}, got {dim}; "
            "pass proj_dim=None to work in the full space"
        )
