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
_HEAD_STEPS = 5, 14  # fewest and most
_LAYER_STEPS = 14  # of one layer; each further one needs twice as many more
_METRIC_SHARE = 0.08  # of μ²
_CHOICE_SHARE = 0.02  # of μ²
_DIMENSIONS = 0.1  # of nμ
_DAMAGE = 0.375  # of ℓ²/B, with ℓ the loss at the start, that noise may undo
_LONGEST = 12.0  # τ


@dataclass(frozen=True)
class Rule:
    """The plan of learned rounds as a formula of public numbers: how many steps, and what each part may cost.

    Attributes:
        epsilon: ε.
        delta: δ > 0.
        records: N, the public number of records.
        layers: L, the number of layers with a metric of their own.
        bounded: whether the loss of a model that guesses is known, so that no bound of the losses has to be bought.
        head: whether only the last layer moves: then the loss is convex and the metric nearly its curvature.
        epochs: how many passes over the data the directions take together; None for what the others leave of ten.
        public: whether public records tell how much the loss of a head curves, so that it is not bought.
    """

    epsilon: float
    delta: float
    records: int
    layers: int
    bounded: bool
    head: bool = False
    epochs: int | None = None
    public: bool = False

    @cached_property
    def mu(self) -> float:
        """What all parts together may cost, in Gaussian terms."""
        return curves.gaussian_mu(self.epsilon, self.delta)

    @property
    def own_steps(self) -> int:
        """T where a loop does not have more epochs: for a head as nμ, records × budget, allows; more for several layers.

        Layers act together in ways that a metric by layers does not know, so that their steps have to be short. Most are
        taken where nothing is known of the layers.
        """
        if self.head:
            fewest, most = _HEAD_STEPS
            return max(fewest, min(most, round(self.records * self.mu / 30)))
        return min(_MOST_STEPS, _LAYER_STEPS * (2 * self.layers - 1)) if self.layers else _MOST_STEPS

    @property
    def steps(self) -> int:
        """T; a loop has at least one in each of its epochs."""
        return max(self.epochs or 1, self.own_steps)

    @property
    def looking(self) -> float:
        """Passes over the data beside the directions, where a forward one counts a third and a backward one two.

        One for the metric and one for C, a third for the losses at the start where they are asked for, and two thirds for
        the choice between two places.
        """
        return 2 + (0 if self.head and self.bounded else 1 / 3) + 2 / 3

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
    def head_time(self) -> float:
        """τ of a head, whose steps are 2 long, beyond which a quadratic loss swings, and shorter in much noise.

        Where a loop has more epochs than the rule has steps, they are shorter, and go as far with as much noise.
        """
        return min(2.0, 0.3 * self.own_steps) * self.own_steps

    def time(self, bound: float, loss: float, guess: float, dimensions: float) -> float:
        """τ of several layers, the sum of all steps' lengths in units in which the loss curves by no more than one.

        With u the place in those units, the directions' noise moves every coordinate of u by a deviation of about τC/(nμ),
        however many steps there are, and so raises the loss by about ½·d·(τC/(nμ))², where d is the number of dimensions
        that take part. It may raise it by 3/8 of ℓ²/B, with ℓ the loss at the start and B that of guessing: who is as bad as
        guessing takes much noise, and who is nearly right takes little.

        Args:
            bound: C.
            loss: ℓ, the mean loss at the start.
            guess: B.
            dimensions: d.
        """
        damage = _DAMAGE * loss**2 / guess
        return min(_LONGEST, self.records * self.mu / bound * math.sqrt(2 * damage / dimensions))

    @property
    def dimensions(self) -> float:
        """d: how many dimensions are paid for, so that their noise together is small beside what is learned in them."""
        return _DIMENSIONS * self.records * self.mu

    @property
    def metric_mu(self) -> float:
        """Of the 2L factors and, where there are several layers, their shares together."""
        return self.mu * math.sqrt(_METRIC_SHARE)

    @property
    def factor_mu(self) -> float:
        """Of each of the 2L factors, and of the shares."""
        return self.metric_mu / math.sqrt(2 * self.layers + (self.layers > 1))

    @property
    def scale_mu(self) -> float:
        """Of the curvature: what a median among a hundred intervals needs, 30/n, but no more than 3 % of μ²."""
        return min(30 / self.records, 0.17 * self.mu)

    @property
    def bound_mu(self) -> float:
        """Of C, on which everything depends: 60/n for a head and 120/n otherwise, but no more than 6 % of μ²."""
        return min((60 if self.head else 120) / self.records, 0.25 * self.mu)

    @property
    def loss_mu(self) -> float:
        """Of the mean loss at the start, and of a bound of the losses where it has to be bought."""
        return min(50 / self.records, 0.15 * self.mu)

    @property
    def choice_mu(self) -> float:
        """Of the choice between the start and the end."""
        return self.mu * math.sqrt(_CHOICE_SHARE)

    def queries(self) -> list[tuple[str, PlannedEvent]]:
        """Everything that is going to be asked of the records, in order, but the directions."""
        metric = [("metric", PlannedEvent(math.inf, self.metric_mu))] if self.layers else []
        before = metric if self.public and self.head else [*metric, ("scale", _choice(self.scale_mu))]
        before += [("bound", _choice(self.bound_mu))]
        before += [] if self.bounded else [("loss bound", _choice(self.loss_mu))]
        before += [] if self.head else [("loss", PlannedEvent(math.inf, self.loss_mu))]
        return [*before, ("choice", _choice(self.choice_mu))]

    @cached_property
    def noise_multiplier(self) -> float:
        """σ of the directions: the least with which everything together costs (ε, δ)."""
        others = gaussian_total([event for _, event in self.queries()])
        return least_noise(self.epsilon, self.delta, others, self.sample_rate, self.steps)

    def charges(self) -> list[PlannedEvent]:
        """What is going to be charged, in order."""
        run = PlannedEvent(math.inf, math.inf, runs=((self.noise_multiplier, self.sample_rate, self.steps),))
        *before, last = [event for _, event in self.queries()]
        return [*before, run, last]


def _choice(mu: float) -> PlannedEvent:
    """A choice by the exponential mechanism that costs as much as μ."""
    return PlannedEvent(curves.bounded_range_within(mu), math.inf)
