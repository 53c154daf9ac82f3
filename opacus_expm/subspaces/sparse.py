"""A random subspace with one non-zero entry in each row of its map: the default, in O(p) memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from opacus_expm.subspaces.base import Inputs, Projection, check_dim, check_seed
from opacus_expm.subspaces.full import FullSpace

_AT_A_TIME = (
    2**18
)  # elements of rows: what is made of more of them does not stay in cache, and is asked of the system anew


@dataclass(frozen=True)
class Sparse:
    """A sparse random subspace, or the full space where ``proj_dim`` is None; ``projection="sparse"``.

    Args:
        seed: public seed (round t adds t); drawn afresh by default, and recorded.
    """

    seed: int | None = None
    kind: str = field(default="sparse", init=False, repr=False)

    def __post_init__(self) -> None:
        check_seed(self.seed)

    def seeded(self, seed: int) -> Sparse:
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
        return SparseMap.generate(size, dim, self.seed, device, dtype)

    def to_dict(self) -> dict[str, Any]:
        """The settings as plain values, with the kind."""
        return {"kind": self.kind, "seed": self.seed}


@dataclass(frozen=True)
class SparseMap:
    """A random permutation of the coordinates dealt into k buckets, with random signs.

    Column j is ±1/√n_j on the n_j coordinates of bucket j: exactly orthonormal columns, O(p) memory and O(p) work for a
    vector. 8 bytes a coordinate are held (bucket and weight), 16 while they are generated; from the seed alone the same
    map comes back in any process.
    """

    bucket: Tensor = field(repr=False)
    weight: Tensor = field(repr=False)
    dim: int
    seed: int
    kind: str = field(default="sparse", init=False)
    least_records: int = field(default=1, init=False, repr=False)

    @classmethod
    def generate(cls, size: int, dim: int, seed: int, device: torch.device, dtype: torch.dtype) -> SparseMap:
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
        """The number of parameters, p."""
        return self.bucket.shape[0]

    @property
    def width(self) -> int:
        """The number of buckets, k."""
        return self.dim

    def part(self, start: int, size: int) -> SparseMap:
        """The rows of so many coordinates, which have entries in any of the k columns."""
        place = slice(start, start + size)
        return replace(self, bucket=self.bucket[place], weight=self.weight[place])

    def add_projected(self, out: Tensor, rows: Tensor, start: int) -> None:
        """Add each signed coordinate to its bucket."""
        step = max(1, _AT_A_TIME // max(len(rows), 1))
        for first in range(0, rows.shape[1], step):
            some = rows[:, first : first + step]
            place = slice(start + first, start + first + some.shape[1])
            # Four times faster than index_add_, which takes the columns one by one.
            out.scatter_add_(1, self.bucket[place].long().expand_as(some), some * self.weight[place])

    def add_looked_up(self, out: Tensor, values: Tensor, index: Tensor, count: int, start: int) -> None:
        """Add each looked-up coordinate to its bucket; the table is never built."""
        place, shape = slice(start, start + count * values.shape[2]), (count, values.shape[2])
        signed = values * self.weight[place].view(shape)[index]
        out.scatter_add_(1, self.bucket[place].view(shape)[index].flatten(1).long(), signed.flatten(1))

    def linear(self, inputs: Inputs, shape: torch.Size, weight: int, bias: int | None, rows: int) -> None:
        """There is no faster way."""

    def finish(self, out: Tensor) -> Tensor:
        """Nothing is left to do."""
        return out

    def lift(self, coordinates: Tensor) -> Tensor:
        """Copy each bucket's value to its coordinates, signed and scaled."""
        return self.weight * coordinates.to(self.weight)[self.bucket]
