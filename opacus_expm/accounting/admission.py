"""Charges that are fixed in advance and admitted to a budget together: what they may cost, and how far they have come.

``ExpMAccountant.admit`` judges a plan as a whole and gives an ``Admission``, which the plan's charges name. From the first
charge until the plan is complete or given up, the charges that are left are reserved: others have to fit beside them.
"""

from __future__ import annotations

from collections.abc import Sequence

from opacus_expm.accounting.events import Cost, Steps
from opacus_expm.mechanism import curves


class Admission:
    """A plan that was admitted, and what is left of it. It is given up by ``end``, or when nothing refers to it any more.

    Args:
        alternatives: what will be charged is one of these lists.
        releases: the ledger's when the plan was admitted.
        history: the ledger's steps of DP-SGD.
        by_total: whether the plan passed by its total alone, which takes all of the budget's δ (see ``Filter``).
    """

    def __init__(
        self,
        alternatives: Sequence[Sequence[Cost]],
        releases: Sequence[Cost],
        history: Sequence[Steps],
        *,
        by_total: bool,
    ):
        self.by_total = by_total
        self._open = [list(plan) for plan in alternatives]
        self._begun = False
        self.keep_up(releases, history)

    @property
    def rest(self) -> list[list[Cost]]:
        """What is reserved: the charges that are left of each list that can still come; none before the first charge."""
        return [plan for plan in self._open if plan] if self._begun else []

    def undisturbed(self, releases: Sequence[Cost], history: Sequence[Steps]) -> bool:
        """Whether nothing was charged but by this plan, or beside what it has reserved."""
        return (list(releases), list(history)) == self._ledger

    def follows(self, event: Cost, releases: Sequence[Cost], history: Sequence[Steps]) -> bool:
        """Whether the event is the next of one of the lists."""
        return self.undisturbed(releases, history) and any(plan and _within(event, plan[0]) for plan in self._open)

    def charged(self, event: Cost) -> None:
        """Cross off an event that follows the plan."""
        self._open = [plan[1:] for plan in self._open if plan and _within(event, plan[0])]
        self._begun = True

    def keep_up(self, releases: Sequence[Cost], history: Sequence[Steps]) -> None:
        """Take note of the ledger as the plan goes on from it."""
        self._ledger = list(releases), list(history)

    def end(self) -> None:
        """Give up what is left: it is no longer reserved, and such charges are judged like all others."""
        self._open = []


def _within(event: Cost, planned: Cost) -> bool:
    """Whether an event costs no more than was planned: not in range, nor in pure ε, nor in μ, its own or that of its range.

    An event that consists of DP-SGD steps has to consist of those that were planned.
    """
    if list(event.runs) != list(planned.runs):
        return False
    slack = 1 + 1e-9
    mu = min(event.mu, curves.bounded_range_mu(event.epsilon_range))
    cheap = event.epsilon_range <= planned.epsilon_range * slack and mu <= planned.mu * slack
    cheap = cheap and event.epsilon_pure <= planned.epsilon_pure * slack
    return cheap and event.failure_probability <= planned.failure_probability
