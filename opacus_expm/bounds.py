"""Where the clipping bounds C_g and C_H come from.

* **Given** by the user as public constants.
* **Measured on public data**, such as the pretraining set: quantiles of |g_i| and ‖H_i‖₂ there. Public because the data
  is. Never pass private data as public.
* **Bought**: private quantiles of the private records' norms (``mechanism.quantiles``), charged to the ledger and taken
  out of the draw's budget.

The 80 % quantile of |g_i| and the median of ‖H_i‖₂ are taken: clipping a fifth of the gradients costs little; curvature
is clipped harder, because its bound enters the noise together with the radius.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from opacus_expm import _check
from opacus_expm._warnings import warn
from opacus_expm.accounting.admission import Admission
from opacus_expm.accounting.events import Purchase
from opacus_expm.books import Books
from opacus_expm.gathering.clipping import ClippingBounds
from opacus_expm.gathering.passes import Remembered, Workbench
from opacus_expm.mechanism.choices import Source
from opacus_expm.mechanism.density import Array
from opacus_expm.mechanism.quantiles import grid_counts, private_quantile, reliable_epsilon

QUANTILES = {"max_grad_norm": 0.8, "max_curvature": 0.5}
_SHARE = 0.05  # of a budget that one bound may cost at the most


@dataclass(frozen=True)
class Bounds:
    """C_g and C_H as they were asked for, and how those that are missing are settled; public.

    Args:
        max_grad_norm: C_g > 0, or None.
        max_curvature: C_H ≥ 0, or None; 0 uses no private curvature.
    """

    max_grad_norm: float | None = None
    max_curvature: float | None = None

    def __post_init__(self) -> None:
        if self.max_grad_norm is not None:
            _check.positive("max_grad_norm", self.max_grad_norm)
        if self.max_curvature is not None:
            _check.non_negative("max_curvature", self.max_curvature)

    @property
    def missing(self) -> tuple[str, ...]:
        """Names of the bounds that are not given."""
        return tuple(name for name in QUANTILES if getattr(self, name) is None)

    @property
    def curvature(self) -> bool:
        """Whether private curvature is gathered."""
        return self.max_curvature != 0

    def prices(self, epsilon: float, nominal_size: int) -> dict[str, float]:
        """ε₁ of each bound that is missing, from public numbers: twice what reliability needs, at most 5 % of ε."""
        return {
            name: min(_SHARE * epsilon, 2 * reliable_epsilon(nominal_size, QUANTILES[name])) for name in self.missing
        }

    def given(self) -> ClippingBounds:
        """The bounds, all of which are given.

        Raises:
            ValueError: one is missing.
        """
        if self.missing:
            raise ValueError(
                f"{self.missing[0]} is not given: pass max_grad_norm= and max_curvature= as public constants, "
                "public_loader= to measure them on public data, or epsilon= to buy them; they must not be read off the "
                "private data"
            )
        return self._settled({}, "given")

    def measured(self, bench: Workbench, public_loader: DataLoader[Any]) -> ClippingBounds:
        """The bounds, those that are missing measured on public data."""
        if not self.missing:
            return self.given()
        norms = bench.public_norms(public_loader, curvature=self.curvature)
        found = {name: float(np.quantile(norms[name], QUANTILES[name])) for name in self.missing}
        for name, value in found.items():
            if value == 0:
                raise ValueError(
                    f"public_loader gives a zero bound for {name}: gradients or curvatures vanish there at the pretrained "
                    "weights; pass max_grad_norm= and max_curvature="
                )
        return self._settled(found, "public")

    def bought(
        self,
        bench: Workbench,
        loader: DataLoader[Any],
        epsilon: float,
        nominal_size: int,
        books: Books,
        admission: Admission | None,
    ) -> tuple[ClippingBounds, Remembered]:
        """The bounds, those that are missing bought; charged before they are drawn, both by the leading rank."""
        ranks = books.ranks
        purchases = [
            Purchase(
                price, books.adjacency, name, QUANTILES[name], nominal_size, ranks.random_name(), books.noise.origin
            )
            for name, price in self.prices(epsilon, nominal_size).items()
        ]
        for purchase in purchases:
            _warn_if_unreliable(purchase.epsilon_range, nominal_size, purchase.quantile)
        remembered = bench.remember(loader, curvature=self.curvature, ranks=ranks)
        source = books.noise.source() if ranks.leads else None
        found = {}
        for purchase in purchases:
            counts = ranks.summed(torch.from_numpy(grid_counts(remembered.norms[purchase.bound]))).numpy()
            choose = functools.partial(_chosen, purchase, counts, source)
            found[purchase.bound] = float(books.drawn(purchase, admission, choose, _chosen(purchase, None, None)))
        return self._settled(found, "bought", frozenset(p.receipt for p in purchases)), remembered

    def _settled(
        self, found: Mapping[str, float], source: str, receipts: frozenset[str] = frozenset()
    ) -> ClippingBounds:
        """Given bounds, and found ones in the place of those that are missing."""
        c_g, c_h = (found.get(name, getattr(self, name)) for name in QUANTILES)
        assert c_g is not None
        assert c_h is not None
        return ClippingBounds(c_g, c_h, source, receipts)


def _chosen(purchase: Purchase, counts: Array | None, source: Source | None) -> Tensor:
    """The point of the grid that a purchase came to; not a number on a rank that does not lead."""
    bound = math.nan
    if counts is not None and source is not None:
        bound = private_quantile(counts, purchase.quantile, purchase.epsilon_range, purchase.adjacency, source)
    return torch.tensor([bound], dtype=torch.float64)


def _warn_if_unreliable(epsilon: float, nominal_size: int, quantile: float) -> None:
    """Say that a purchase for this ε₁ may miss its quantile."""
    needed = reliable_epsilon(nominal_size, quantile)
    if epsilon < needed:
        warn(
            f"a private bound for epsilon={epsilon:.2g} on {nominal_size} records may come out far from its quantile "
            f"(reliable from {needed:.2g}): pass max_grad_norm= and max_curvature=, or public_loader=",
        )
