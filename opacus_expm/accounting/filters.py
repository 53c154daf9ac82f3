"""What judges whether an event still fits a budget: filters, and the room that is left beside what was promised.

The totals of ``composition`` hold for events whose budgets were fixed in advance. Where a later budget is chosen after
looking at earlier releases, only a filter that was declared first gives a guarantee.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from opacus_expm import _check
from opacus_expm.accounting.composition import (
    exact_total,
    failure_delta,
    gaussian_total,
    release_rdp,
    steps_rdp,
    total_epsilon,
    with_runs,
)
from opacus_expm.accounting.events import Cost, PlannedEvent, Steps
from opacus_expm.mechanism import curves

_ORDERS = (1.5, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128, 256, 1024)
_FAILURE_SHARE = 0.01  # of a filter's δ
_SHARE = (1 - _FAILURE_SHARE) / (len(_ORDERS) + 1)  # of its δ, for each order and for Gaussian composition


class BudgetExceeded(ValueError):
    """An event would exceed the declared budget; nothing was charged or released."""


@dataclass(frozen=True)
class Filter:
    """A budget (ε, δ), declared before the first event, that adaptively chosen events may use up.

    An event passes if afterwards at least one of these conditions holds: the pure ε add up to at most ε; for one of a fixed
    set of Rényi orders, the composed divergence converts to at most ε; or √Σμ² converts to at most ε. Each alone is a valid
    filter (for pure budgets: Rogers, Roth, Ullman, Vadhan 2016; Rényi: Feldman, Zrnic 2021; Gaussian: Smith, Thakurta 2022).

    **Their union** is valid when δ is shared among those that need one. Let P and Q be the laws of all outputs on two
    neighbouring data sets, for someone who chooses each event after seeing the outputs before it. Which conditions hold at
    the end is a function of the outputs. Let B_j be the outputs after which condition j is the first that holds. Conditions
    only get harder, so condition j held at every moment before. Someone who chooses in the same way, but stops where
    condition j would fail, is held by filter j, and does the same on B_j. So P(S ∩ B_j) ≤ e^ε Q(S ∩ B_j) + δ_j for every set
    S of outputs, and the sum over j is P(S) ≤ e^ε Q(S) + Σδ_j, where Σδ_j ≤ δ.

    **Failures.** Draws made in secure mode are within a total variation of the exact mechanism. The sum Σ of these adds
    (1+e^ε)Σ to δ (``total_epsilon``), for the largest Σ that the outputs can lead to. So failures have a share of δ of their
    own, which is the same whatever comes. (Were they taken off δ as they come, parts with few of them would keep too much.)

    **A plan** is a list of events that is fixed before any output exists. If it comes first, and its total
    (``total_epsilon``, which may need all of δ) is within the budget, it may be charged even where no condition holds
    for the whole of it. That adds a part A to the parts B_j: the outputs after which the charges are those of the plan,
    or its first ones, and no others. Whoever stops early looks at some of the plan's outputs, so P(S ∩ A) ≤ e^ε Q(S ∩
    A) + δ. All of δ is gone with that, and of the other parts only the pure one may exist, whose δ_j is zero. **From
    the first charge of such a plan on, nothing passes but the rest of the plan, and what the pure condition admits**,
    also after the plan was given up. (Else one could look at its first outputs, and then either complete it or use the
    shares of the other conditions, for which together the proof needs 2δ.) A first event that passes by its own total
    is a plan of one charge. That need not be remembered: where no condition holds for it, none holds for it and others
    together.
    """

    epsilon: float
    delta: float

    def admits(self, events: Sequence[Cost], steps: Sequence[Steps]) -> bool:
        """Whether these events together are within the budget."""
        slack = self.epsilon * (1 + 1e-12)  # a budget spent to the last bit must not fail by rounding
        failure = failure_delta(self.epsilon, math.fsum(e.failure_probability for e in events))
        events, steps = with_runs(events, steps)
        first = len(events) == 1 and not steps and failure <= self.delta
        if first and exact_total(events, [], self.delta - failure).epsilon <= slack:
            return True
        if failure > self.delta * _FAILURE_SHARE:
            return False
        if not steps and math.fsum(e.epsilon_pure for e in events) <= slack:
            return True
        if self.delta == 0:
            return False
        share = self.delta * _SHARE
        for i, order in enumerate(_ORDERS):
            rdp = math.fsum(release_rdp(e.epsilon_range, e.mu, order) for e in events)
            rdp += math.fsum(float(steps_rdp(run, _ORDERS)[i]) for run in steps)
            # The conversion of Canonne, Kamath, Steinke (2020), as in Opacus
            if rdp - (math.log(share) + math.log(order)) / (order - 1) + math.log1p(-1 / order) <= self.epsilon:
                return True
        if steps:
            return False
        mu = gaussian_total(events)
        return math.isfinite(mu) and curves.gaussian_delta(mu, self.epsilon) <= share

    def admits_pure(self, events: Sequence[Cost], steps: Sequence[Steps]) -> bool:
        """Whether these events together are within the budget by their pure ε, without any part of δ."""
        if steps or any(e.runs or e.failure_probability for e in events):
            return False
        return math.fsum(e.epsilon_pure for e in events) <= self.epsilon * (1 + 1e-12)

    def admits_total(self, plan: Sequence[Cost]) -> bool:
        """Whether a plan that comes first is within the budget by its total."""
        return total_epsilon(plan, [], self.delta).epsilon <= self.epsilon * (1 + 1e-12)


def checked_budget(budget: tuple[float, float]) -> Filter:
    """(ε, δ) as a filter.

    Raises:
        TypeError: it is no pair of numbers.
        ValueError: no budget has these numbers.
    """
    if not isinstance(budget, tuple) or len(budget) != 2:
        raise TypeError(f"budget must be a pair (epsilon, delta), got {budget!r}")
    return Filter(_check.positive("budget epsilon", budget[0]), _check.fraction("budget delta", budget[1]))


@dataclass(frozen=True)
class Room:
    """What still fits a budget, beside what was charged and what a plan that has begun has reserved.

    Attributes:
        budget: the budget, None where there is none and everything fits.
        events: what was charged.
        claimed: whether a plan has begun that was admitted by its total alone. It has all of δ, also after it was given up.
        reserved: the charges that are left of each list that the plan under way may follow; empty where none is under way.
        whole: whether the plan under way was admitted by its total alone, so that nothing fits beside it.
    """

    budget: Filter | None
    events: Sequence[Cost]
    claimed: bool = False
    reserved: Sequence[Sequence[Cost]] = ()
    whole: bool = False

    def fits(self, more: Sequence[Cost], steps: Sequence[Steps]) -> bool:
        """Whether more events fit, where ``steps`` are all the steps of DP-SGD, charged before and now."""
        if self.budget is None:
            return True
        if self.whole:
            return False
        admits = self.budget.admits_pure if self.claimed else self.budget.admits
        return all(admits([*self.events, *more, *rest], steps) for rest in self.reserved or [[]])

    def remaining(self, steps: Sequence[Steps]) -> float:
        """The largest ε of one more pure event that fits, rounded down to six significant digits."""
        if self.budget is None:
            return math.inf
        low, high = 0.0, curves.bounded_range_for(self.budget.epsilon, self.budget.delta) * (1 + 1e-9)
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if self.fits([PlannedEvent(middle)], steps) else (low, middle)
        if low < 1e-10 * self.budget.epsilon:  # the filter's slack for rounding is not to be spent
            return 0.0
        digits = 10.0 ** (5 - math.floor(math.log10(low)))
        return math.floor(low * digits) / digits

    def why_less(self) -> str:
        """Why less may fit than the charges let one expect, as the end of a message; empty where nothing is reserved."""
        if self.reserved:
            return (
                f" beside a plan that has begun and has {max(map(len, self.reserved))} charges to go: let it come to its "
                "end, or give it up with accountant.give_up()"
            )
        if self.claimed:
            return ". A plan that needed all of delta has begun: what is charged besides has to be pure"
        return ""
