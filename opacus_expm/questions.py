"""What rounds ask of the records, one answer at a time: admitted together in advance, each charged before it is drawn."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import torch
from torch import Tensor

from opacus_expm.accounting.admission import Admission
from opacus_expm.accounting.events import PlannedEvent, Query
from opacus_expm.books import Books
from opacus_expm.mechanism.density import Array
from opacus_expm.mechanism.quantiles import GRID, grid_counts, quantile_logits

_Asked = TypeVar("_Asked", PlannedEvent, Query)


@dataclass(eq=False)
class Questions:
    """The questions of one plan.

    Attributes:
        books: that charges are written into.
        epsilon: ε of all of them together.
        delta: δ of all of them together.
        size: N, the public number of records.
    """

    books: Books
    epsilon: float
    delta: float
    size: int
    _asked: Counter[str] = field(default_factory=Counter, init=False, repr=False)
    _admission: Admission | None = field(default=None, init=False, repr=False)

    @property
    def admission(self) -> Admission | None:
        """Of the plan that was admitted last; None before the first."""
        return self._admission

    def admit(self, charges: Sequence[PlannedEvent], instead_of: Admission | None = None) -> None:
        """Reserve what is going to be charged, in its order.

        Args:
            charges: what is going to be charged.
            instead_of: a plan that will be given up for this one.

        Raises:
            BudgetExceeded: it does not fit; nothing was charged.
        """
        plan = [self._with_failure(event) for event in charges]
        self._admission = self.books.accountant.admit([plan], self.epsilon, self.delta, instead_of=instead_of)

    def end(self) -> None:
        """Release what is still reserved: nothing more is going to be asked."""
        if self._admission is not None:
            self._admission.end()

    def ask(
        self,
        what: str,
        draw: Callable[[], Tensor],
        like: Tensor,
        *,
        mu: float = math.inf,
        epsilon_range: float = math.inf,
        run: tuple[float, float, int] | None = None,
        pure: float | None = None,
    ) -> Tensor:
        """Charge, then draw.

        Args:
            what: is asked, for the ledger.
            draw: what is released; a function that has the privacy that is charged.
            like: a tensor of the same shape and type.
            mu: Gaussian price.
            epsilon_range: price as a bounded range.
            run: noise multiplier, sample rate and steps of a run of sums over Poisson samples.
            pure: price as pure ε, where that is half of the range.
        """
        self._asked[what] += 1
        event = Query(
            what,
            self.epsilon,
            self.delta,
            self.size,
            epsilon_range,
            mu,
            run,
            self._asked[what],
            self.books.adjacency,
            self.books.noise.origin,
            pure,
        )
        return self.books.drawn(self._with_failure(event), self._admission, draw, like)

    def _with_failure(self, event: _Asked) -> _Asked:
        """The event with the probability by which secure mode may fail: of sums with noise; a choice rounds nothing."""
        noisy = event.mu < math.inf or event.runs or event.epsilon_pure < event.epsilon_range
        failure = self.books.noise.failure_probability if noisy else 0.0
        return replace(event, failure_probability=failure)

    def quantile(self, what: str, norms: Array, quantile: float, epsilon: float, base: Array | None = None) -> float:
        """A private quantile, over the intervals of the grid; its range is ε."""
        logits = quantile_logits(grid_counts(norms), quantile, epsilon, self.books.adjacency, base)

        def draw() -> Tensor:
            return torch.tensor([GRID[self.books.noise.choose(logits)]], dtype=torch.float64)

        return float(self.ask(what, draw, torch.zeros(1, dtype=torch.float64), epsilon_range=epsilon))

    def choice(self, what: str, logits: Array, epsilon: float) -> int:
        """The number of one candidate, by the exponential mechanism; one record moves the logits by a range of at most ε."""
        like = torch.zeros(1, dtype=torch.long)
        return int(self.ask(what, lambda: torch.tensor([self.books.noise.choose(logits)]), like, epsilon_range=epsilon))

    def clipped_sum(self, what: str, numbers: Tensor, most: float, mu: float) -> tuple[float, float]:
        """The sum over the records of a number of each, clipped to [0, most], with noise; and its deviation."""
        clipped = numbers.nan_to_num(0.0, most, 0.0).clamp(0.0, most).sum()[None]
        deviation = most / mu

        def noisy() -> Tensor:
            noise = self.books.noise
            return noise.added(clipped, noise.source().standard_normal(1), deviation)

        return float(self.ask(what, noisy, torch.zeros_like(clipped), mu=mu)), deviation
