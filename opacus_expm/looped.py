"""The rounds of a training loop: what it asks for, and learned rounds that it steps, whose directions its epochs become.

A loop of E epochs takes the T directions of the rule (``rule.Rule``), spread over its epochs as evenly as whole numbers
allow. Each direction is a Poisson sample with rate q = min(1, E/T), so that an epoch sees every record about once. A rule
with fewer steps than epochs takes T = E and q = 1. Everything else is measured by the engine itself, in passes of its own
over the loader: the metric, the bounds and the losses before the first sample, the choice after the last one.

**Privacy:** that of ``learned``, whose charges and noise these are. The script only carries each sample's records to a pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.utils.data import DataLoader

from opacus_expm import _check
from opacus_expm.accounting.admission import Admission
from opacus_expm.books import Books
from opacus_expm.bounds import Bounds
from opacus_expm.gathering import loaders
from opacus_expm.gathering.measurement import Measurement
from opacus_expm.gathering.passes import Pass
from opacus_expm.gathering.statistics import Statistics
from opacus_expm.learned import LearnedRounds, Planned, Walk
from opacus_expm.rounds import Budget, Plan, Rounds


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

    def sample(self, size: int) -> DataLoader[Any] | None:
        """All records of the next sample in one batch or in pieces of that size, or None for one without records."""
        return self.started.sample(whole=True, size=size)

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


@dataclass(frozen=True)
class LoopRequest:
    """What a loop asks for; the fields are arguments of ``make_private_with_epsilon``, in whose words they are checked."""

    target_epsilon: float
    target_delta: float
    epochs: int
    radius: float | Sequence[float] | None
    regularization: float | None
    max_grad_norm: float | None
    max_curvature: float | None

    def __post_init__(self) -> None:
        _check.positive("target_epsilon", self.target_epsilon)
        _check.fraction("target_delta", self.target_delta)
        _check.positive_int("epochs", self.epochs)

    def rounds(
        self,
        data_loader: DataLoader[Any],
        measurement: Measurement,
        books: Books,
        public_loader: DataLoader[Any] | None,
        instead_of: Admission | None,
    ) -> Rounds | LoopedRounds:
        """The rounds that the loop steps: one an epoch with a radius, or those that learn their own step.

        Args:
            data_loader: the private data.
            measurement: what is computed of each record.
            books: that charges are written into.
            public_loader: public data for bounds, with a radius only.
            instead_of: what an unfinished loop of the same module has reserved.

        Raises:
            ValueError: what such rounds cannot serve, with the way out.
        """
        # Batches come one by one: the size of a piece cannot be read off the loader they come from.
        pieces = loaders.Pieces(measurement.max_physical_batch_size or loaders.batch_size(data_loader))
        epsilon, delta, epochs = self.target_epsilon, self.target_delta, self.epochs
        if self.radius is not None:
            bounds = self._bounds(data_loader, public_loader)
            budget = Budget.of(epsilon, delta, self.radius, self.regularization, epochs)
            plan = Plan(budget, bounds, measurement, public_loader)
            return Rounds(plan, data_loader, books, pieces=pieces, instead_of=instead_of)
        if delta == 0:
            raise ValueError(
                "target_delta must be greater than 0 where no radius is given: a loop takes samples, which are (epsilon, "
                "delta)-DP; pass target_delta=1e-5, or for a pure guarantee radius=, or call make_private_expm instead"
            )
        learned = LearnedRounds(data_loader, measurement, epsilon, delta, books, epochs=epochs, pieces=pieces)
        return LoopedRounds(learned, epochs, instead_of)

    def _bounds(self, data_loader: DataLoader[Any], public_loader: DataLoader[Any] | None) -> Bounds:
        """The bounds of a loop with a radius: given, or to be measured on public data."""
        if public_loader is not None:
            loaders.check_public(public_loader, data_loader, "data_loader")
        bounds = Bounds(self.max_grad_norm, self.max_curvature)
        if bounds.missing and public_loader is None:
            raise ValueError(
                f"{bounds.missing[0]} must be given, or public_loader= to measure it on public data: a loop with radius= "
                "has no pass over the private data in which it could be bought; make_private_expm has, and a loop without it"
            )
        return bounds


def check_loop(books: Books, noise_generator: object) -> None:
    """Refuse a training loop on several ranks, and noise that is not the engine's."""
    if books.ranks.count > 1:
        raise ValueError(
            "make_private_with_epsilon steers a training loop in one process, and torch.distributed has several: call "
            "make_private_expm(..., rounds=...) on every rank, or use ExpMQuadEngine(distributed=False) in one of them"
        )
    if noise_generator is not None:
        raise ValueError(
            "noise_generator belongs to the engine: ExpMQuadEngine(noise_generator=...), for tests and simulations only"
        )
