"""The full space: nothing is projected."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from opacus_expm.subspaces.base import Inputs, table


@dataclass(frozen=True)
class FullSpace:
    """The identity, k = p."""

    size: int
    seed: None = field(default=None, init=False)
    kind: str = field(default="full", init=False)
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
        """Copy the rows to their place."""
        out[:, start : start + rows.shape[1]] += rows

    def add_looked_up(self, out: Tensor, values: Tensor, index: Tensor, count: int, start: int) -> None:
        """Copy the table to its place."""
        self.add_projected(out, table(values, index, count), start)

    def linear(self, inputs: Inputs, shape: torch.Size, weight: int, bias: int | None, rows: int) -> None:
        """There is no faster way."""

    def finish(self, out: Tensor) -> Tensor:
        """Nothing is left to do."""
        return out

    def lift(self, coordinates: Tensor) -> Tensor:
        """The coordinates themselves."""
        return coordinates
