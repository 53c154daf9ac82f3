"""Gradients of records in a metric, without a row for each where their factors say enough.

The gradient of a layer that is a matrix is Σ over positions of b ⊗ a, and in a metric it is Σ (K_B b) ⊗ (K_A a). Its norm
follows from products of positions with each other, |G|² = Σ_pq (a_p·a_q)(b_p·b_q), and a weighted sum over records is one
product of two matrices. So clipped sums need one backward pass, and no (records × parameters) block for such a layer.
Goodfellow (2015, https://arxiv.org/abs/1510.01799) has the norms, Bu et al. (2023, https://arxiv.org/abs/2210.00038) the
sums.

**Privacy:** the norm must be no less than that of what is added, whatever a record holds. Large terms of several positions
may cancel, and products of positions then know their sum only up to the rounding of the terms. With M = Σ_p |a_p||b_p|,
which is no less than |G|, float64 finds |G|² to within 1e-14·M² and adds G to within 1e-13·M (sums of up to a thousand
terms), so that √(|G|² + 1e-12·M²) is a norm that is large enough. It is too large by at most 1e-6·M.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from opacus_expm._private import PrivateValues
from opacus_expm.subspaces.metric import Block

_ROUNDING = 1e-12  # of a squared norm whose terms may cancel
_ELEMENTS = 2**18  # in float64 at a time, which stay in cache


@dataclass(frozen=True, eq=False, repr=False)
class Factored(PrivateValues):
    """Gradients of one layer, Σ over positions of outputs ⊗ inputs, both in the metric: (B, positions, …); private."""

    block: Block
    inputs: Tensor
    outputs: Tensor

    def squared_norms(self) -> Tensor:
        """|G|² of every record, rounded up."""
        found, most = self.terms()
        return found if self.inputs.shape[1] == 1 else rounded_up(found, most)

    def terms(self) -> tuple[Tensor, Tensor]:
        """|G|² of every record as it is found, and M."""
        a, b = self.inputs.double(), self.outputs.double()
        sizes = a.square().sum(2) * b.square().sum(2)
        if a.shape[1] == 1:
            return sizes[:, 0], sizes[:, 0].sqrt()
        found = (torch.bmm(a, a.transpose(1, 2)) * torch.bmm(b, b.transpose(1, 2))).sum((1, 2))
        return found, sizes.sqrt().sum(1)

    def add(self, total: Tensor, weights: Tensor) -> None:
        """Add Σ_i w_i G_i to a vector; a record without weight may hold anything."""
        kept = weights[:, None, None] != 0
        b = torch.where(kept, self.outputs.double() * weights[:, None, None], 0.0).flatten(0, 1)
        self.block.add(total, b.T @ torch.where(kept, self.inputs.double(), 0.0).flatten(0, 1))


@dataclass(frozen=True, eq=False, repr=False)
class Formed(PrivateValues):
    """Gradients of one layer in the metric, as matrices (B, outputs, width); private.

    They take the place of factors where a layer has more positions than its matrix is wide, as convolutions do.
    """

    block: Block
    matrices: Tensor

    def squared_norms(self) -> Tensor:
        """|G|² of every record."""
        norms: Tensor = torch.linalg.vector_norm(self.matrices, dim=(1, 2), dtype=torch.float64)
        return norms.square()

    def add(self, total: Tensor, weights: Tensor) -> None:
        """Add Σ_i w_i G_i to a vector; a record without weight may hold anything."""
        self.block.add(total, weighted(self.matrices.flatten(1), weights).view(self.matrices.shape[1:]))


@dataclass(frozen=True, eq=False, repr=False)
class LookedUp(PrivateValues):
    """Gradients of a table (count, d) in which row ``index[i, t]`` has ``values[i, t]``, equal indices added up; private.

    The table, which may be most of a model, is made for no record: |G|² = Σ v_t·v_s over pairs with equal indices.

    Attributes:
        start: its place in R^p, where the map is the identity.
        count: its rows.
        index: (B, positions).
        values: (B, positions, d).
    """

    start: int
    count: int
    index: Tensor
    values: Tensor

    def squared_norms(self) -> Tensor:
        """|G|² of every record, rounded up."""
        return rounded_up(*self.terms())

    def terms(self) -> tuple[Tensor, Tensor]:
        """|G|² of every record as it is found, and M."""
        v = self.values.double()
        same = self.index[:, :, None] == self.index[:, None, :]
        found = (torch.bmm(v, v.transpose(1, 2)) * same).sum((1, 2))
        sizes: Tensor = torch.linalg.vector_norm(v, dim=2)
        return found, sizes.sum(1)

    def add(self, total: Tensor, weights: Tensor) -> None:
        """Add Σ_i w_i G_i to a vector; a record without weight may hold anything."""
        kept = torch.where(weights[:, None, None] != 0, self.values.double() * weights[:, None, None], 0.0)
        width = kept.shape[2]
        table = total[self.start : self.start + self.count * width].view(self.count, width)
        table.index_add_(0, self.index.flatten(), kept.flatten(0, 1))


@dataclass(frozen=True, eq=False, repr=False)
class Tied(PrivateValues):
    """Gradients of a table that is also the weight of linear layers, where the map is the identity; private.

    |G|² has a term for each of the two and twice their product, Σ_tp b_p[index_t]·(v_t·a_p); M is the sum of both.
    """

    table: LookedUp
    layers: Factored

    def squared_norms(self) -> Tensor:
        """|G|² of every record, rounded up."""
        (found, most), (other, more) = self.table.terms(), self.layers.terms()
        a, b = self.layers.inputs.double(), self.layers.outputs
        index = self.table.index[:, None, :].expand(-1, b.shape[1], -1)
        both = (torch.bmm(a, self.table.values.double().transpose(1, 2)) * b.gather(2, index).double()).sum((1, 2))
        return rounded_up(found + other + 2 * both, most + more)

    def add(self, total: Tensor, weights: Tensor) -> None:
        """Add Σ_i w_i G_i to a vector; a record without weight may hold anything."""
        self.table.add(total, weights)
        self.layers.add(total, weights)


@dataclass(frozen=True, eq=False, repr=False)
class Loose(PrivateValues):
    """Gradients of one layer's parameters side by side (B, …), where the map is the identity; private.

    Attributes:
        spans: place in R^p and size of each parameter, in the order of the columns.
        rows: (B, Σ sizes).
    """

    spans: Sequence[tuple[int, int]]
    rows: Tensor

    def squared_norms(self) -> Tensor:
        """|G|² of every record."""
        norms: Tensor = torch.linalg.vector_norm(self.rows, dim=1, dtype=torch.float64)
        return norms.square()

    def add(self, total: Tensor, weights: Tensor) -> None:
        """Add Σ_i w_i G_i to a vector; a record without weight may hold anything."""
        parts = torch.split(weighted(self.rows, weights), [size for _, size in self.spans])
        for (start, size), part in zip(self.spans, parts, strict=True):
            total[start : start + size] += part


Part = Factored | Formed | LookedUp | Tied | Loose


def rounded_up(found: Tensor, most: Tensor) -> Tensor:
    """|G|² as it was found from products of terms that may cancel, plus what rounding may have taken from it, given M."""
    return found.clamp(min=0) + _ROUNDING * most.square()


def weighted(rows: Tensor, weights: Tensor) -> Tensor:
    """Σ_i w_i rows_i in float64; a row without weight may hold anything."""
    total = torch.zeros(rows.shape[1], dtype=torch.float64, device=rows.device)
    step = max(1, _ELEMENTS // max(1, rows.shape[1]))
    for some, own in zip(torch.split(rows, step), torch.split(weights, step), strict=True):
        total += own @ torch.where(own[:, None] != 0, some, 0.0).double()
    return total


@dataclass(frozen=True, eq=False, repr=False)
class RecordGradients(PrivateValues):
    """The gradients of a batch's records; private.

    Attributes:
        count: of the records that are there; what follows them fills the batch up.
        batch: of all of them.
        factored: layers that have no part in ``rows``.
        rows: (B, k) all others; None where there are none.
        size: k.
    """

    count: int
    batch: int
    factored: Sequence[Part]
    rows: Tensor | None
    size: int

    @cached_property
    def norms(self) -> Tensor:
        """|g| of every record, float64; 0 for one that is not finite."""
        parts = [part.squared_norms().sqrt() for part in self.factored]
        if self.rows is not None:
            parts.append(torch.linalg.vector_norm(self.rows, dim=1, dtype=torch.float64))
        norms = parts[0] if len(parts) == 1 else torch.linalg.vector_norm(torch.stack(parts), dim=0)
        norms = norms[: self.count]
        return torch.where(norms.isfinite(), norms, 0.0)

    def add(self, total: Tensor, scales: Callable[[Tensor], Tensor]) -> None:
        """Add Σ_i w_i g_i to a vector in float64, with weights w from the norms; a record whose norm is 0 counts nothing."""
        weights = torch.where(self.norms > 0, scales(self.norms), 0.0)
        weights = torch.cat([weights, weights.new_zeros(self.batch - self.count)])
        if self.rows is not None:
            total += weighted(self.rows, weights)
        for part in self.factored:
            part.add(total, weights)
