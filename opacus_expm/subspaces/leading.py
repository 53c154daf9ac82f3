"""The leading directions of public curvature, each in the unit in which it curves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from opacus_expm.subspaces.base import Projection, PublicRows, damping_of
from opacus_expm.subspaces.preconditioned import DAMPING, PublicCurvature
from opacus_expm.subspaces.stiefel import Columns


@dataclass(frozen=True, eq=False)
class Leading:
    """A = V diag(h + h₀)^{−½}, with leading eigenpairs (h, V) of public curvature: a metric for learned rounds.

    In coordinates of it the loss curves like h/(h + h₀): by at most one, and by little along directions that hardly move the
    outputs, which noise then hardly moves either. The sum of h/(h + h₀) is the number of dimensions that take part.

    Attributes:
        curvature: of public records.
        damping: h₀ > 0.
    """

    curvature: PublicCurvature = field(repr=False)
    damping: float
    seed: int | None = None
    kind: str = field(default="leading", init=False, repr=False)
    needs_public_data: bool = field(default=False, init=False, repr=False)
    private_curvature: bool = field(default=False, init=False, repr=False)

    @classmethod
    def of(cls, curvature: PublicCurvature, dimensions: float) -> Leading:
        """With a damping that leaves so many dimensions, but no less than 1/160 of the largest eigenvalue.

        Raises:
            ValueError: there is no curvature.
        """
        values = curvature.eigenvalues.double().clamp(min=0)
        least = DAMPING * float(values[0])
        if least <= 0:
            raise ValueError("public_loader's records have no curvature: leave public_loader out")
        return cls(curvature, damping_of(values, dimensions, least))

    @property
    def dimensions(self) -> float:
        """Σ h/(h + h₀)."""
        values = self.curvature.eigenvalues.double().clamp(min=0)
        return float((values / (values + self.damping)).sum())

    def learned(self, public: PublicRows) -> Leading:
        """Nothing is left to be learned."""
        return self

    def seeded(self, seed: int) -> Leading:
        """Nothing is random."""
        return self

    def build(
        self, shapes: Sequence[torch.Size], dim: int | None, device: torch.device, dtype: torch.dtype
    ) -> Projection:
        """The map; it has as many dimensions as there are eigenpairs."""
        if dim is not None:
            raise ValueError(f"proj_dim must be None with leading directions, got {dim}")
        units = (self.curvature.eigenvalues.double().clamp(min=0) + self.damping).rsqrt()
        return Columns(
            (self.curvature.vectors.double() * units.to(self.curvature.vectors.device)).to(device, dtype), None
        )

    def to_dict(self) -> dict[str, Any]:
        """Tensors and plain values."""
        return {"kind": self.kind, "damping": self.damping, "curvature": self.curvature.tensors()}
