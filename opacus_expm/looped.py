"""Learned rounds that a training loop steps: how its epochs become directions.

A loop of E epochs takes the T directions of the rule (``rule.Rule``), spread over its epochs as evenly as whole numbers
allow. Each direction is a Poisson sample with rate q = min(1, E/T), so that an epoch sees every record about once. A rule
with fewer steps than epochs takes T = E and q = 1. Everything else is measured by the engine itself, in passes of its own
over the loader: the metric, the bounds and the losses before the first sample, the choice after the last one.

**Privacy:** that of ``learned``, whose charges and noise these are. The script only carries each sample's records to a pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.utils.data import DataLoader

from opacus_expm.accounting.admission import Admission
from opacus_expm.books import Books
from opacus_expm.gathering.loaders import Pieces
from opacus_expm.gathering.measurement import Measurement
from opacus_expm.gathering.passes import Pass
from opacus_expm.gathering.statistics import Statistics
from opacus_expm.learned import LearnedRounds, Planned, Walk


@dataclass(frozen=True, eq=False)
class _Sample:
    """A sample whose records are to be added at the place where the walk is."""

    walk: LoopedRounds

    def open(self) -> Pass:
        """A pass to which the loop adds the sample's records."""
        return self.walk.started.open(None)


class LoopedRounds:
    """The rounds of a loop, as ``swap.Samples`` asks for them.

    Args:
        learned: what is asked of the records.
        epochs: E.
        instead_of: what an unfinished loop of the same module has reserved.
    """

    def __init__(self, learned: LearnedRounds, epochs: int, instead_of: Admission | None = None):
        self._learned, self._epochs, self._instead_of = learned, epochs, instead_of
        self._planned: Planned | None = None
        self._walk: Walk | None = None

    @classmethod
    def of(
        cls,
        loader: DataLoader[Any],
        measurement: Measurement,
        epsilon: float,
        delta: float,
        epochs: int,
        books: Books,
        *,
        pieces: Pieces,
        instead_of: Admission | None,
    ) -> LoopedRounds:
        """The rounds of a loop; the arguments are those of ``LearnedRounds`` and of the class.

        Raises:
            ValueError: what learned rounds cannot serve, with the way out.
        """
        if delta == 0:
            raise ValueError(
                "target_delta must be greater than 0 where no radius is given: a loop takes samples, which are (epsilon, "
                "delta)-DP; pass target_delta=1e-5, or for a pure guarantee radius=, or call make_private_expm instead"
            )
        learned = LearnedRounds(loader, measurement, epsilon, delta, books, epochs=epochs, pieces=pieces)
        return cls(learned, epochs, instead_of)

    @property
    def admission(self) -> Admission | None:
        """What of the budget is reserved."""
        return self._learned.admission

    @property
    def count(self) -> int:
        """The number of directions, T."""
        assert self._planned is not None
        return self._planned.rule.steps

    @property
    def longest(self) -> int:
        """The largest number of samples in an epoch, ⌈T/E⌉."""
        return -(-self.count // self._epochs)

    def until(self, number: int) -> int:
        """Where the epoch of a direction ends: the first of ⌊eT/E⌋, e = 1 … E, that is beyond its number."""
        return next(end for e in range(self._epochs) if (end := (e + 1) * self.count // self._epochs) > number)

    def begin(self, module: nn.Module, number: int) -> _Sample:
        """Make the plan before the first direction, at the weights of ``module``; later ones go on where the walk is."""
        if self._walk is None:
            self._planned = self._learned.plan(module, self._instead_of)
            self._instead_of = self.admission  # a plan for other weights takes this one's place
        return _Sample(self)

    @property
    def started(self) -> Walk:
        """The walk, which begins when it is first asked for.

        **Privacy:** what it measures at its beginning is charged first, and so is the whole run of directions.
        """
        if self._walk is None:
            assert self._planned is not None
            self._walk = self._learned.begin(self._planned)
        return self._walk

    def sample(self) -> DataLoader[Any] | None:
        """All records of the next sample in one batch, or None for one without records."""
        return self.started.sample(whole=True)

    def draw(self, statistics: Statistics, number: int) -> nn.Module:
        """Move by the direction of a sample; after the last one, the model that is chosen."""
        self.started.advance(statistics.sums.gradient.cpu())
        return self._place(number)

    def draw_empty(self, number: int) -> nn.Module:
        """Move by the noise alone, after a sample without records or one that the script has lost."""
        self.started.advance_empty()
        return self._place(number)

    def _place(self, number: int) -> nn.Module:
        """The model where the walk is, or at its end."""
        return self.started.module() if number + 1 == self.count else self.started.here()

    def end(self) -> None:
        """Nothing more is going to be asked."""
        self._learned.end()
