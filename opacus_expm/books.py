"""What every charge of an engine has in common: the ledger, the adjacency, the noise, and the ranks that share the work."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from torch import Tensor

from opacus_expm.accounting.accountant import ExpMAccountant
from opacus_expm.accounting.admission import Admission
from opacus_expm.accounting.events import Event
from opacus_expm.gathering.ranks import Ranks
from opacus_expm.noise import Noise


@dataclass(frozen=True, eq=False)
class Books:
    """Where charges are written, and by whom.

    Attributes:
        accountant: the ledger.
        adjacency: ``"add_remove"`` or ``"replace_one"``.
        noise: of draws and purchases.
        ranks: that take part in this call; the leading one charges and draws.
    """

    accountant: ExpMAccountant
    adjacency: str
    noise: Noise
    ranks: Ranks

    def check(self) -> None:
        """Refuse what the ledger cannot count, before any data is touched."""
        self.accountant.check_adjacency(self.adjacency)
        self.accountant.check_covered(sampler=self.noise.sampler, noise=self.noise.origin)

    def drawn(self, event: Event, admission: Admission | None, draw: Callable[[], Tensor], like: Tensor) -> Tensor:
        """Charge, then draw, both on the leading rank; what was drawn is on every rank.

        Args:
            event: what is charged, before anything is drawn.
            admission: of the plan that it belongs to.
            draw: called on the leading rank only.
            like: a tensor of the same shape and type.
        """
        found = like
        if self.ranks.leads:
            self.accountant.record(event, admission=admission)
            found = draw()
        found = self.ranks.from_leader(found)
        if not self.ranks.leads:  # after the leading rank's own entry
            self.accountant.note(event, admission=admission)
        return found

    def together(self) -> AbstractContextManager[None]:
        """A call that every rank makes, and that succeeds or fails on all of them; what is checked is checked inside.

        A rank that raised before would leave the others waiting for its next call.
        """
        return self.ranks.together()

    def same(self, facts: Callable[[], dict[str, object]]) -> None:
        """Refuse arguments that differ between ranks, by name."""
        self.ranks.same(
            lambda: {
                **facts(),
                "adjacency": self.adjacency,
                "secure_mode": self.noise.secure,
                "the ledger": self.accountant.identity(),
            }
        )
