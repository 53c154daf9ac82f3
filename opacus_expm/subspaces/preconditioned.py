"""A subspace seen through the curvature of public records, so that one radius and one bound suit all directions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from opacus_expm import _check
from opacus_expm.subspaces.base import Inputs, Projection, PublicRows, check_dim, check_seed, table
from opacus_expm.subspaces.sparse import Sparse
from opacus_expm.subspaces.stiefel import Columns

PUBLIC_RANK = 400  # eigenpairs of the public curvature
PUBLIC_BYTES = 2**28  # of full-space rows from which public curvature is computed
_OVERSAMPLING = 20  # vectors beyond the rank in the randomised decomposition
DAMPING = 1 / 160  # of the largest eigenvalue


@dataclass(frozen=True, eq=False)
class PublicCurvature:
    """Leading eigenpairs of the Gauss-Newton matrix on public data, per record; public.

    Attributes:
        eigenvalues: h, descending (rank,).
        vectors: V, orthonormal columns (p, rank).
    """

    eigenvalues: Tensor = field(repr=False)
    vectors: Tensor = field(repr=False)

    def tensors(self) -> dict[str, Tensor]:
        """All its tensors, by name."""
        return {"eigenvalues": self.eigenvalues, "vectors": self.vectors}

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
class Preconditioned:
    """The metric of public curvature; ``projection="preconditioned"``. Needs ``public_loader=``.

    Where ``proj_dim`` is None it works in the full space, up to ``rank`` dimensions along the leading eigenvectors, and
    beyond in a sparse random subspace, always seen through the metric (``PreconditionedMap``). Unless ``max_curvature`` is
    given, no private curvature is gathered.

    Args:
        rank: eigenpairs of the public curvature.
        seed: as in ``Sparse``.
        curvature: what was measured on public data, by ``learned``.
    """

    rank: int = PUBLIC_RANK
    seed: int | None = None
    curvature: PublicCurvature | None = field(default=None, repr=False)
    kind: str = field(default="preconditioned", init=False, repr=False)
    private_curvature: bool = field(default=False, init=False, repr=False)

    def __post_init__(self) -> None:
        check_seed(self.seed)
        _check.positive_int("rank", self.rank)

    @property
    def needs_public_data(self) -> bool:
        """True until the curvature has been measured."""
        return self.curvature is None

    def learned(self, public: PublicRows) -> Preconditioned:
        """The recipe with the leading eigenpairs of public curvature. At most 256 MiB of public rows take part."""
        kept: list[Tensor] = []
        records = size = 0
        for rows, count in public.curvature_rows():
            if kept and size + rows.nbytes > PUBLIC_BYTES:
                break
            kept.append(rows)
            records, size = records + count, size + rows.nbytes
        return replace(self, curvature=PublicCurvature.of_rows(torch.cat(kept), records, self.rank, seed=0))

    def seeded(self, seed: int) -> Preconditioned:
        """The recipe with this seed."""
        return replace(self, seed=seed)

    def build(
        self, shapes: Sequence[torch.Size], dim: int | None, device: torch.device, dtype: torch.dtype
    ) -> Projection:
        """The map for so many parameters and dimensions."""
        if self.curvature is None:
            raise ValueError("projection='preconditioned' needs public curvature: pass public_loader=")
        size = sum(shape.numel() for shape in shapes)
        if dim is not None:
            check_dim(dim, size)
        vectors = self.curvature.vectors.to(device, dtype)
        if len(vectors) != size:
            raise ValueError(
                f"projection has learned the public curvature of {len(vectors)} parameters, and the model has {size} that "
                "may move: let it learn again, with this model"
            )
        base: Projection
        if dim is not None and dim <= vectors.shape[1]:
            base = Columns(vectors[:, :dim].contiguous(), None)
        else:
            base = Sparse(self.seed).build(shapes, dim, device, dtype)
        values = self.curvature.eigenvalues.clamp(min=0)
        damping = DAMPING * float(values[0])
        if damping <= 0:
            raise ValueError("public_loader's records have no curvature: use projection='sparse'")
        return PreconditionedMap.through(base, vectors, values.to(device, dtype), damping)

    def to_dict(self) -> dict[str, Any]:
        """Tensors and plain values."""
        tensors = {} if self.curvature is None else self.curvature.tensors()
        curvature = {name: tensor.cpu() for name, tensor in tensors.items()}
        return {"kind": self.kind, "rank": self.rank, "seed": self.seed, "curvature": curvature}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Preconditioned:
        """The inverse of ``to_dict``."""
        facts = {name: value for name, value in content.items() if name != "kind"}
        return cls(**{**facts, "curvature": PublicCurvature(**facts["curvature"])})


@dataclass(frozen=True)
class PreconditionedMap:
    """A = M·P: a projection P seen through public curvature.

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
    def through(cls, base: Projection, vectors: Tensor, eigenvalues: Tensor, damping: float) -> PreconditionedMap:
        """Make the map from eigenvectors (p, rank) and eigenvalues (rank,)."""
        shrinkage = 1 - (1 + eigenvalues / damping).rsqrt()
        projected = vectors.new_zeros(vectors.shape[1], base.width)
        base.add_projected(projected, vectors.T.contiguous(), 0)
        return cls(base, vectors, shrinkage.to(vectors), base.finish(projected))

    @property
    def seed(self) -> int | None:
        """The same as that of the projection P."""
        return self.base.seed

    @property
    def size(self) -> int:
        """The number of parameters, p."""
        return self.base.size

    @property
    def dim(self) -> int:
        """The same as that of the projection P."""
        return self.base.dim

    @property
    def width(self) -> int:
        """The number of columns for Pᵀv and Vᵀv side by side."""
        return self.base.dim + self.vectors.shape[1]

    @property
    def least_records(self) -> int:
        """The same as for dense columns, since the eigenvectors are read as a matrix."""
        return Columns.least_records

    def add_projected(self, out: Tensor, rows: Tensor, start: int) -> None:
        """Add Pᵀv and Vᵀv."""
        self.base.add_projected(out[:, : self.dim], rows, start)
        out[:, self.dim :] += rows @ self.vectors[start : start + rows.shape[1]]

    def add_looked_up(self, out: Tensor, values: Tensor, index: Tensor, count: int, start: int) -> None:
        """Build the dense table, and project it."""
        self.add_projected(out, table(values, index, count), start)

    def linear(self, inputs: Inputs, shape: torch.Size, weight: int, bias: int | None, rows: int) -> None:
        """There is no faster way."""

    def finish(self, out: Tensor) -> Tensor:
        """Pᵀv − (PᵀV) diag(…) (Vᵀv)."""
        along = out[..., self.dim :] * self.shrinkage
        return out[..., : self.dim] - along @ self.projected_vectors

    def lift(self, coordinates: Tensor) -> Tensor:
        """The product M(Pξ)."""
        plain = self.base.lift(coordinates).to(self.vectors)
        return plain - self.vectors @ (self.shrinkage * (self.vectors.T @ plain))
