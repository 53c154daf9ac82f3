"""The exact privacy of learned rounds: the joint law of what two parts release, the second after the first.

Every part of learned rounds (``opacus_expm.learned``) is released after earlier ones and depends on them: a direction is
clipped at the bound that was chosen, and is found at the place to which the direction before it led; losses are clipped at
a bound too, and the last choice is between the start and the end of the way. On a model with one parameter and a few
records, the
joint law of such a sequence can be computed, by enumeration of choices and of samples and by quadrature over normal numbers,
from the code that draws it (``audit.told``). What it reveals of one record is put beside what the ledger states for it.

For histories i with probabilities p_i and q_i under the two data sets, and a last part that is normal with means at a
distance of d_i deviations,

    δ(ε) = Σ_i p_i·G(d_i, ε − ln(p_i/q_i)),    G(d, t) = Φ(−t/d + d/2) − e^t·Φ(−t/d − d/2),

and the same with the data sets exchanged. The data are such that one record changes all it can.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.optimize import brentq
from scipy.special import log_ndtr, logsumexp, ndtr
from torch import nn

from opacus_expm import words
from opacus_expm.audit.findings import Finding, Report
from opacus_expm.audit.told import FewRounds, Side
from opacus_expm.gathering import looks
from opacus_expm.mechanism import curves
from opacus_expm.mechanism.density import Array
from opacus_expm.mechanism.quantiles import GRID

_REACH = 7.0  # deviations beyond the means, where a quadrature ends
_STEP = 0.5  # of a deviation, between two nodes at which the records are looked at
_FINE = 0.1  # of a deviation, between two nodes at which a known density is evaluated
_NEGLIGIBLE = 1e-12  # probability of a history that is left out
_SAME = 1e-9  # up to which numbers are the same
_LARGEST = 700.0  # e^t overflows beyond


@dataclass(frozen=True, eq=False)
class JointLaw:
    """The law of a history and of a normal part after it, under two data sets.

    Attributes:
        first: log probabilities ln p_i of the histories under the one.
        second: the same under the other, ln q_i.
        distances: between the means of the last part, in deviations; 0 where the histories are all there is.
    """

    first: Array
    second: Array
    distances: Array

    def delta(self, epsilon: float) -> float:
        """The least δ at which these two laws are (ε, δ)-indistinguishable."""
        return max(self._one_way(self.first, self.second, epsilon), self._one_way(self.second, self.first, epsilon))

    def epsilon(self, delta: float) -> float:
        """The least ε at δ; infinite where there is none."""
        if not (self.delta(_LARGEST) <= delta):
            return math.inf
        if self.delta(0.0) <= delta:
            return 0.0
        high = 1.0
        while self.delta(high) > delta:
            high *= 2
        return float(brentq(lambda e: self.delta(e) - delta, 0.0, high, xtol=1e-6))

    def _one_way(self, p: Array, q: Array, epsilon: float) -> float:
        here = p > -math.inf
        p, left, d = p[here], epsilon - (p[here] - q[here]), self.distances[here]
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            flat = np.where(left < 0, -np.expm1(np.minimum(left, 0.0)), 0.0)
            curved = ndtr(-left / d + d / 2) - np.exp(left + log_ndtr(-left / d - d / 2))
        each = np.where(d > 0, np.where(np.isneginf(left), 1.0, curved), flat)
        return float(np.exp(p) @ np.maximum(each, 0.0))


class NotHidden(Exception):
    """Something was released that is no choice and has no noise, or whose noise tells of the records."""


@dataclass(frozen=True)
class _Mixture:
    """Normal laws on the line, mean + slope·z with z ~ N(0, 1), of one slope."""

    log_weights: Array
    means: Array
    slope: float

    @property
    def deviation(self) -> float:
        """The same for all of them."""
        return abs(self.slope)

    def normals(self, place: float) -> Array:
        """The z of every one of them that leads to a place."""
        return np.asarray((place - self.means) / self.slope)

    def log_density(self, places: Array) -> Array:
        """At every place."""
        z = (places[:, None] - self.means) / self.deviation
        found: Array = logsumexp(self.log_weights - z**2 / 2, axis=1)
        return found - math.log(self.deviation * math.sqrt(2 * math.pi))


def _nodes(mixtures: Sequence[_Mixture], step: float) -> tuple[Array, float]:
    """Places on the line that hold the laws, and the logarithm of the distance between two of them."""
    deviation = min(m.deviation for m in mixtures)
    if not deviation > 0:
        raise NotHidden
    low = min(float((m.means - _REACH * m.deviation).min()) for m in mixtures)
    high = max(float((m.means + _REACH * m.deviation).max()) for m in mixtures)
    places = np.linspace(low, high, 1 + math.ceil((high - low) / (step * deviation)))
    return places, math.log(places[1] - places[0])


def _direction(side: Side, lead: Callable[[], Any]) -> _Mixture:
    """The law of the place to which a walk's next step leads; ``lead`` makes the walk and its steps until then."""
    samples = list(side.samples())
    means = [side.step(lead(), sample, 0.0) for sample, _ in samples]
    loud = side.step(lead(), samples[-1][0], 1.0)
    return _Mixture(np.log([weight for _, weight in samples]), np.array(means), loud - means[-1])


def _choice(side: Side) -> Array:
    """Log probabilities of the choice that was made last."""
    if len(side.script.logits) != 1:
        raise NotHidden
    logits = side.script.logits[0]
    return np.asarray(logits - logsumexp(logits))


# --- what is audited -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Parts:
    """Parts of learned rounds in their order, and two data sets on which they are audited.

    Attributes:
        subject: a name.
        rule: steps and prices.
        records: pairs (x, y) that both data sets have.
        canary: the pair that one of them has further.
        law: of what is released, from the two sides.
        once: asks for the parts once, so that the ledger has their cost.
        inputs: of the linear model, whose weights are 0.
        size: N.
    """

    subject: str
    rule: FewRounds
    records: Sequence[tuple[Any, float]]
    canary: tuple[Any, float]
    law: Callable[[Side, Side], JointLaw]
    once: Callable[[Side], object]
    inputs: int = 1
    size: int = 10

    def findings(self, deltas: Sequence[float]) -> tuple[Finding, ...]:
        """What is found beside what the ledger states, at every δ."""
        ledger = self._side([*self.records, self.canary], charged=True)
        self.once(ledger)
        try:
            law = self.law(self._side(self.records), self._side([*self.records, self.canary]))
            found = [law.epsilon(delta) for delta in deltas]
        except NotHidden:
            found = [math.inf] * len(deltas)
        return tuple(
            Finding(self.subject, "quadrature", "add_remove", self.rule.epsilon, d, ledger.claimed(d), e)
            for d, e in zip(deltas, found, strict=True)
        )

    def _side(self, records: Sequence[tuple[Any, float]], *, charged: bool = False) -> Side:
        model = nn.Linear(self.inputs, 1, bias=False).double()
        nn.init.zeros_(model.weight)
        return Side(model, records, self.rule, self.size, charged=charged)


def metric(epsilon: float, delta: float) -> Parts:
    """The factors of a layer with two inputs, a symmetric matrix and a number; then its scale.

    What is released is linear in the noise. Its law follows from what is released with every one of the normal numbers 1 and
    the others 0.
    """

    def answer(side: Side, *normals: Any) -> Array:
        side.tell(1.0, *normals, picks=[200])
        side.rounds.geometry(side.bench, side.rule, looks.blocks(side.bench))
        found = side.books.answers["metric"].numpy()
        return np.asarray(found[[0, 1, 3, 4]] * [1.0, math.sqrt(2), 1.0, 1.0])  # isometric

    def law(first: Side, second: Side) -> JointLaw:
        means, noises, laws = [], [], []
        for side in (first, second):
            means.append(answer(side))
            laws.append(_choice(side))
            units = [(np.eye(4)[i].reshape(2, 2), 0.0) for i in range(4)] + [(0.0, 1.0)]
            noises.append(np.array([answer(side, *unit) - means[-1] for unit in units]))
        covariance = noises[0].T @ noises[0]
        if not np.allclose(noises[0], noises[1], rtol=_SAME, atol=_SAME) or np.linalg.matrix_rank(covariance) < 4:
            raise NotHidden
        shift = means[1] - means[0]
        distance = math.sqrt(shift @ np.linalg.solve(covariance, shift))
        return JointLaw(laws[0], laws[1], np.full(len(laws[0]), distance))

    rule = FewRounds(epsilon, delta, 10, 1, bounded=True, kinds=2)
    return Parts("metric, scale", rule, [((1.0, 0.0), 1.0)], ((1e4, 1e4), 1.0), law, answer, inputs=2)


def bound_and_direction(epsilon: float, delta: float) -> Parts:
    """A bound by the exponential mechanism, then a direction that is clipped at it, of a sample."""

    def law(first: Side, second: Side) -> JointLaw:
        sides, laws = (first, second), []
        for side in sides:
            side.tell()
            side.rounds.bound(side.bench, side.rule)
            laws.append(_choice(side))
        histories = []
        for pick in np.flatnonzero(np.maximum(*laws) > math.log(_NEGLIGIBLE)):
            mixtures = []
            for side in sides:
                side.tell(picks=[int(pick)])
                bound = side.rounds.bound(side.bench, side.rule)
                mixtures.append(_direction(side, lambda side=side, bound=bound: side.walk(bound)))  # type: ignore[misc]
            places, width = _nodes(mixtures, _FINE)
            histories.append([v[pick] + m.log_density(places) + width for v, m in zip(laws, mixtures, strict=True)])
        p, q = (np.concatenate(part) for part in zip(*histories, strict=True))
        return JointLaw(p, q, np.zeros(len(p)))

    def once(side: Side) -> None:
        side.walk(side.rounds.bound(side.bench, side.rule))

    rule = FewRounds(epsilon, delta, 10, 1, bounded=True, share=0.5, kinds=2)
    return Parts("bound, direction", rule, [(1.0, 0.1)], (1.0, 50.0), law, once)


def two_directions(epsilon: float, delta: float) -> Parts:
    """Two rounds: a direction of a sample, then another one at the place to which the first has led.

    The record's gradient has the bound's size at nearly every place, and the sign depends on the place.
    """
    bound = 0.01

    def law(first: Side, second: Side) -> JointLaw:
        sides = (first, second)
        earlier = [_direction(side, lambda side=side: side.walk(bound)) for side in sides]  # type: ignore[misc]
        places, width = _nodes(earlier, _STEP)
        histories = []
        for place in places:
            later = [_after(side, law, place, bound) for side, law in zip(sides, earlier, strict=True)]
            nodes, fine = _nodes(later, _FINE)
            histories.append([m.log_density(nodes) + fine + width for m in later])
        p, q = (np.concatenate(part) for part in zip(*histories, strict=True))
        return JointLaw(p, q, np.zeros(len(p)))

    rule = FewRounds(epsilon, delta, 10, 1, bounded=True, count=2, share=0.5)
    return Parts("direction, direction", rule, [(0.0, 0.0)], (1.0, 0.01), law, lambda side: side.walk(bound), size=2)


def _after(side: Side, earlier: _Mixture, place: float, bound: float) -> _Mixture:
    """The law of a second place after the first: its weights sum to the first's density.

    Whatever sample the first direction came from, the noise is what leads to the given place.
    """
    weights, means = [], []
    for (sample, weight), z in zip(side.samples(), earlier.normals(place), strict=True):

        def lead(sample: Any = sample, z: float = z) -> Any:
            walk = side.walk(bound)
            side.step(walk, sample, z)
            return walk

        found = _direction(side, lead)
        here = math.log(weight) - z**2 / 2 - math.log(earlier.deviation * math.sqrt(2 * math.pi))
        weights.append(here + found.log_weights)
        means.append(found.means)
    return _Mixture(np.concatenate(weights), np.concatenate(means), found.slope)


def bound_and_loss(epsilon: float, delta: float) -> Parts:
    """A bound of the losses by the exponential mechanism, then the sum of the losses, which are clipped at it."""

    def answers(side: Side, normal: float) -> Array:
        found = []
        for pick in range(len(GRID)):
            side.tell(normal, picks=[pick])
            side.rounds.losses(side.bench, side.rule, None)
            found.append(float(side.books.answers["loss"]))
        return np.array(found)

    def law(first: Side, second: Side) -> JointLaw:
        means, noises, laws = [], [], []
        for side in (first, second):
            means.append(answers(side, 0.0))
            laws.append(_choice(side))
            noises.append(answers(side, 1.0) - means[-1])
        if not np.allclose(noises[0], noises[1], rtol=_SAME, atol=0) or not (noises[0] > 0).all():
            raise NotHidden
        return JointLaw(laws[0], laws[1], np.abs(means[1] - means[0]) / noises[0])

    def once(side: Side) -> None:
        side.rounds.losses(side.bench, side.rule, None)

    rule = FewRounds(epsilon, delta, 10, 1, bounded=False, kinds=2)
    return Parts("bound, loss", rule, [(1.0, 1.0)] * 3, (1.0, 1e5), law, once)


def direction_and_choice(epsilon: float, delta: float) -> Parts:
    """A direction of all records, then the choice between the start and where it led.

    The record itself is against the way, as are so many of those that both data sets have that the choice is open. Others
    make sure that the way is long.
    """
    bound, guess = 1.0, 0.1

    def choice(side: Side, place: float, mixture: _Mixture) -> Array:
        walk = side.walk(bound, guess)
        side.step(walk, next(side.samples())[0], mixture.normals(place)[0])
        side.tell()
        walk.module()
        return _choice(side)

    def law(first: Side, second: Side) -> JointLaw:
        sides = (first, second)
        earlier = [_direction(side, lambda side=side: side.walk(bound)) for side in sides]  # type: ignore[misc]
        places, width = _nodes(earlier, _FINE)
        found = []
        for side, mixture in zip(sides, earlier, strict=True):
            chosen = np.array([choice(side, place, mixture) for place in places])
            found.append((chosen + mixture.log_density(places)[:, None] + width).ravel())
        return JointLaw(found[0], found[1], np.zeros(len(found[0])))

    def once(side: Side) -> None:
        walk = side.walk(bound, guess)
        side.step(walk, next(side.samples())[0], 0.0)
        walk.module()

    rule = FewRounds(epsilon, delta, 10, 1, bounded=True, kinds=2)
    pull, more = math.ceil(4 * rule.noise_multiplier), math.ceil(5 / curves.bounded_range_within(rule.choice_mu))
    base = [(1.0, 4.0)] * pull + [(1.0, 0.0)] * (pull + more)
    return Parts("direction, choice", rule, base, (1.0, -0.75), law, once, size=pull)


_ALL = (metric, bound_and_direction, two_directions, bound_and_loss, direction_and_choice)


@words.unsaid()
def audit_learned(epsilon: float = 1.0, delta: float = 1e-5) -> Report:
    """Audit the parts of learned rounds, each after an earlier one, at δ and at a thousand times δ.

    **Privacy:** synthetic data only.
    """
    deltas = (delta, min(0.1, 1000 * delta))
    return Report(tuple(f for make in _ALL for f in make(epsilon, delta).findings(deltas)))
