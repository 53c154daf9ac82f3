"""The plan of learned rounds as a formula of public numbers, the same for every task."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from opacus_expm.accounting.composition import gaussian_total, least_noise
from opacus_expm.accounting.events import PlannedEvent
from opacus_expm.mechanism import curves

_PASSES = 10.0  # over the data, of everything together
_MOST_STEPS = 100
_MARKS = (0.05, 0.15, 0.4)  # of the steps, after which a length is measured
_METRIC_SHARE = 0.08  # of μ²
_DIMENSIONS = 0.1  # of nμ


@dataclass(frozen=True)
class Rule:
    """The plan of learned rounds as a formula of public numbers: how many steps, and what each part may cost.

    Attributes:
        epsilon: ε.
        delta: δ > 0.
        records: N, the public number of records.
        layers: L, the number of layers with a metric of their own.
        bounded: whether the loss of a model that guesses is known, so that no bound of the losses has to be bought.
        epochs: how many passes over the data the directions take together; None for what the others leave of ten.
        last: whether the last layer of the model is among them.
        public: whether public records give the metric, so that none is bought.
    """

    epsilon: float
    delta: float
    records: int
    layers: int
    bounded: bool
    epochs: int | None = None
    last: bool = True
    public: bool = False

    @property
    def head(self) -> bool:
        """Whether only the last layer moves: then the loss is convex and the metric nearly its curvature."""
        return self.layers == 0 or (self.layers == 1 and self.last)

    @cached_property
    def mu(self) -> float:
        """What all parts together may cost, in Gaussian terms."""
        return curves.gaussian_mu(self.epsilon, self.delta)

    @property
    def times(self) -> int:
        """How often a step of Newton's method would be taken: more often where nμ, records × budget, is large."""
        return max(5, min(14, round(self.records * self.mu / 30)))

    @property
    def steps(self) -> int:
        """T: more for several layers, whose steps are shorter; a loop has one in each of its epochs."""
        return max(self.epochs or 1, self.own_steps)

    @property
    def own_steps(self) -> int:
        """T where a loop does not have more epochs."""
        return min(_MOST_STEPS, self.times * max(1, 2 * self.layers - 1))

    @property
    def looking(self) -> float:
        """Passes over the data beside the directions, where a forward one counts a third and a backward one two.

        One for the metric and one for C; two thirds for each length, a forward pass with a tangent, and for the choice
        between two places; a third for a bound of the losses.
        """
        return self.measured + 1 + 2 / 3 * (len(self.marks) + 1) + (0 if self.bounded else 1 / 3)

    @property
    def sample_rate(self) -> float:
        """q: everything together takes no more than ten passes over the data, or the directions as many as epochs."""
        directions = _PASSES - self.looking if self.epochs is None else self.epochs
        return min(1.0, directions / self.steps)

    @property
    def passes(self) -> float:
        """How often the records are gone through, on average."""
        return self.looking + self.steps * self.sample_rate

    @property
    def rate(self) -> float:
        """η of the first steps: for a head 2, beyond which a quadratic loss swings, and less in much noise; else short.

        Where a loop has more epochs than the rule has steps, they are shorter, and go as far with as much noise.
        """
        if self.head:
            return min(2.0, 0.3 * self.times) * self.own_steps / self.steps
        return self.times / (4 * self.steps)

    @property
    def marks(self) -> tuple[int, ...]:
        """After how many steps a length is measured."""
        if self.head:
            return ()
        return tuple(sorted({max(1, round(self.steps * share)) for share in _MARKS}))

    @property
    def measured(self) -> bool:
        """Whether a metric is measured on the records."""
        return self.layers > 0 and not self.public

    @property
    def dimensions(self) -> float:
        """How many dimensions of a public metric are paid for: their noise adds up to a part of the loss that is small."""
        return _DIMENSIONS * self.records * self.mu

    @property
    def metric_mu(self) -> float:
        """Of the 2L factors together."""
        return self.mu * math.sqrt(_METRIC_SHARE)

    @property
    def factor_mu(self) -> float:
        """Of each of the 2L factors."""
        return self.metric_mu / math.sqrt(2 * max(1, self.layers))

    @property
    def scale_mu(self) -> float:
        """Of each layer's scale: what a median among a hundred intervals needs, 30/n, but no more than 3 % of μ² in all."""
        return min(30 / self.records, 0.17 * self.mu / math.sqrt(max(1, self.layers)))

    @property
    def bound_mu(self) -> float:
        """Of C, on which everything depends: 60/n, but no more than 6 % of μ²."""
        return min(60 / self.records, 0.25 * self.mu)

    @property
    def loss_mu(self) -> float:
        """Of the bound of the losses, where it has to be bought."""
        return min(40 / self.records, 0.17 * self.mu)

    @property
    def length_mu(self) -> float:
        """Of each length, and of the choice."""
        share = 0.02 if self.head else 0.06
        return self.mu * math.sqrt(share / (len(self.marks) + 1))

    def queries(self) -> list[tuple[str, PlannedEvent]]:
        """Everything that is going to be asked of the records, in order, but the directions."""
        before = [("metric", PlannedEvent(math.inf, self.metric_mu))] if self.measured else []
        before += [("scale", _choice(self.scale_mu))] * self.layers if self.measured else []
        before += [("bound", _choice(self.bound_mu))]
        before += [] if self.bounded else [("loss", _choice(self.loss_mu))]
        length = [("length bound", _choice(self.length_mu / 2))] * 2
        length += [("length", PlannedEvent(math.inf, self.length_mu / math.sqrt(2)))]
        return [*before, *length * len(self.marks), ("choice", _choice(self.length_mu))]

    @cached_property
    def noise_multiplier(self) -> float:
        """σ of the directions: the least with which everything together costs (ε, δ)."""
        others = gaussian_total([event for _, event in self.queries()])
        return least_noise(self.epsilon, self.delta, others, self.sample_rate, self.steps)

    def charges(self) -> list[PlannedEvent]:
        """What is going to be charged, in order."""
        run = PlannedEvent(math.inf, math.inf, runs=((self.noise_multiplier, self.sample_rate, self.steps),))
        found = self.queries()
        first = next(i for i, (what, _) in enumerate(found) if what.startswith(("length", "choice")))
        return [*(e for _, e in found[:first]), run, *(e for _, e in found[first:])]


def _choice(mu: float) -> PlannedEvent:
    """A choice by the exponential mechanism that costs as much as μ."""
    return PlannedEvent(curves.bounded_range_within(mu), math.inf)
