"""How far one record can move the sums, and with them the log-density."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

Adjacency = Literal["add_remove", "replace_one"]
ADJACENCIES: tuple[Adjacency, ...] = get_args(Adjacency)


@dataclass(frozen=True)
class Sensitivity:
    """How far one record can move the sums; public.

    Attributes:
        max_grad_norm: C_g.
        max_curvature: C_H; 0 where no private curvature is used.
        parallel: every record's g_i is parallel to the only row of B_i (one output, two classes, or k = 1), which
            narrows the range; a single batch of other records widens it for all.
        adjacency: ``"add_remove"`` or ``"replace_one"``.
        projected: the sum of gradients is projected onto a ball (see ``secure``), after which a record's share of it is no
            longer than it was, but may have turned.
    """

    max_grad_norm: float
    max_curvature: float
    parallel: bool
    adjacency: str
    projected: bool = False

    def width(self, radius: float) -> float:
        """W = sup u − inf u over the ball |ξ| ≤ R, u(ξ) = −ξᵀg − ½ξᵀHξ, over all records within the bounds.

        Let d = ξ−η, s = ξ+η, so u(ξ)−u(η) = −dᵀg − ½dᵀHs. Writing H = ½C_H(I+E) with ‖E‖ ≤ 1, the second term is at
        most ¼C_H(|d||s| − dᵀs), and −dᵀs = |η|²−|ξ|² ≤ 2R² − ½(|d|²+|s|²) because |η| ≤ R. The sum is largest on
        |d|²+|s|² = 4R², where it is C_g|d| + ¼C_H|d||s|; with |s| = 2Rx and r = R·C_H/C_g,

            x = r/(1 + √(1+2r²)),   W* = R·C_g·√(1−x²)·(2 + r·x),

        attained when k and the rank of H may be 2 or more. Where g is parallel to the only row of B, a single
        coordinate t ∈ [−R, R] matters and W₁ = 2RC_g if r ≤ 1, else R·C_g(1+r)²/(2r). Replacing a record is a removal
        and an addition: at most twice that. Once gradients may have turned, W* is due in place of W₁.
        """
        r = radius * self.max_curvature / self.max_grad_norm
        if r > 1e100:  # beyond, r² overflows and the gradient no longer matters
            width = radius**2 * self.max_curvature / 2 + 2 * radius * self.max_grad_norm
        elif self.parallel and not self.projected:
            width = radius * self.max_grad_norm * (2.0 if r <= 1 else (1 + r) ** 2 / (2 * r))
        else:
            x = r / (1 + math.sqrt(1 + 2 * r * r))
            width = radius * self.max_grad_norm * (math.sqrt(1 - x * x) * (2 + r * x))
        return self._records() * width

    def lipschitz(self, radius: float) -> float:
        """Lipschitz constant on the ball of the change in Σu: C_g + R·C_H, or 2C_g + R·C_H for replace-one.

        (Two curvatures within [0, C_H·I] differ by at most C_H in norm; two gradients by 2C_g.)
        """
        return self._records() * self.max_grad_norm + radius * self.max_curvature

    def _records(self) -> int:
        """How many records' worth of gradient a neighbouring data set may change."""
        return 2 if self.adjacency == "replace_one" else 1
