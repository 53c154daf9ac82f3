"""Nothing to guess, and δ = 0: rounds of a pure draw for the direction and a private choice for the length.

1. **Bounds.** C is a private quantile of the gradients' norms. B, the loss of a model that guesses, is known for losses of
   classes, and is bought in the same way otherwise.
2. **Direction.** G̃ = Σ clip(Aᵀ∇ℓ, C) + (C/ε_d)·z with density of z proportional to e^{−|z|} in k dimensions. This needs no
   radius. In k dimensions the noise has norm kC/ε_d and the signal about nρC with ρ near 0.1, both after clipping in the
   subspace, so that G̃ has cos² = a²/(a² + k²) to the signal there, a = ρnε_d. A random subspace holds k/p of the gradient.
   The product is largest at k = a: that is the dimension, and the full space where a is larger than p.
3. **Length.** Along −G̃ the exponential mechanism chooses from a menu, by the clipped gain in the records' losses: no step,
   or one of (B/C)·2^j. C·t is the most that a step t changes a clipped record's loss by, to first order, so B/C is a unit
   that suits every task. Later rounds choose among a few multiples of the last length.

There are several rounds only where the noise leaves room for them, because pure costs add up. No metric is learned: its
factors have more numbers than a pure budget can pay for. How many rounds there are, in how many dimensions and what each
part may cost is a public formula (``PureRule``), the same for every task.

**Privacy:** all of it together is ε-DP with respect to adding or removing one record. A direction is ε_d-DP
(``mechanism.choices.isotropic_noise``); choices and quantiles are ε₁-bounded-range and hence ε₁-DP. What comes later depends
on the records through what was released earlier alone, and the ε, fixed in advance, add up to the one that was given.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from opacus_expm import _check, _warnings, words
from opacus_expm.accounting.events import PlannedEvent
from opacus_expm.books import Books
from opacus_expm.gathering import looks
from opacus_expm.gathering.clipping import ClippingBounds
from opacus_expm.gathering.measurement import Measurement
from opacus_expm.gathering.passes import Workbench
from opacus_expm.learned import check_learnable
from opacus_expm.mechanism.calibration import ROUNDING_MARGIN
from opacus_expm.mechanism.choices import isotropic_noise
from opacus_expm.mechanism.quantiles import GRID
from opacus_expm.questions import Questions
from opacus_expm.subspaces.sparse import Sparse

_RECORDS_TO_A_BOUND = 100.0  # nε₁ with which a quantile is found
_BOUND_SHARE = 0.1  # of ε, at most, for each bound
_LENGTH_SHARE = 0.25  # of ε, for all lengths
_SIGNAL = 0.1  # ρ: the norm of the mean of clipped gradients, in units of C
_LEAST_RATIO = 0.8  # of signal to noise in a round, where there are several
_MOST_ROUNDS = 4
_QUANTILE, _FACTOR = 0.85, 1.2  # of the norms, for C
_LOSS_QUANTILE, _LOSS_FACTOR = 0.75, 2.0
_OCTAVES = range(-4, 6)  # of B/C, on the first menu
_MULTIPLES = (0.25, 0.5, 1.0, 2.0)  # of the last length, on later ones
_RELUCTANCE, _SLOPE = 1.5, 0.1  # public weights against any step, and against each place further down the menu
_RECORDS_TO_A_LENGTH = 250.0  # nε₁ with which a length is found
_RELIABLE = 500.0  # nε from which a length can be relied on

# Public weights of a bound: too large a one costs more than too small a one.
_UNITS = -np.where(GRID > 1, 1.0, 0.5) * np.abs(np.log2(GRID))


@dataclass(frozen=True)
class PureRule:
    """The plan of pure rounds as a formula of public numbers: dimension, rounds, and what each part may cost.

    Attributes:
        epsilon: ε.
        records: N, the public number of records.
        parameters: p, how many may move.
        bounded: whether the loss of a model that guesses is known, so that no bound of the losses has to be bought.
    """

    epsilon: float
    records: int
    parameters: int
    bounded: bool

    @property
    def bound_epsilon(self) -> float:
        """Of C: 100/n, but no more than a tenth of ε. Of B the same, where it has to be bought."""
        return min(_RECORDS_TO_A_BOUND / self.records, _BOUND_SHARE * self.epsilon)

    @property
    def length_epsilon(self) -> float:
        """Of each length: a quarter of ε together."""
        return _LENGTH_SHARE * self.epsilon / self.rounds

    @property
    def directions_epsilon(self) -> float:
        """Of all directions: what is left."""
        return (1 - _LENGTH_SHARE) * self.epsilon - (1 if self.bounded else 2) * self.bound_epsilon

    @property
    def direction_epsilon(self) -> float:
        """ε_d of each direction."""
        return self.directions_epsilon / self.rounds

    @property
    def signal(self) -> float:
        """The dimension in which one direction has as much signal as noise: ρnε, which is a above."""
        return _SIGNAL * self.records * self.directions_epsilon

    @property
    def dim(self) -> int:
        """The dimension k of the subspace: that of the signal, but no more than p."""
        return max(1, min(self.parameters, round(self.signal)))

    @property
    def rounds(self) -> int:
        """T: as many as leave each direction a ratio of signal to noise of 0.8, and each length nε₁ = 250; from 1 to 4."""
        directions = self.signal / (_LEAST_RATIO * self.parameters)
        lengths = _LENGTH_SHARE * self.epsilon * self.records / _RECORDS_TO_A_LENGTH
        return max(1, min(_MOST_ROUNDS, int(directions), int(lengths)))

    @property
    def passes(self) -> float:
        """How often the records are gone through, in passes of a forward and a backward one, which count a third and two.

        One for C, and a third for B where it is bought; one for each direction; and a third for every step on a menu and for
        the place where it begins.
        """
        places = len(_OCTAVES) + len(_MULTIPLES) * (self.rounds - 1) + self.rounds
        return 1 + (0 if self.bounded else 1 / 3) + self.rounds + places / 3

    def queries(self) -> list[tuple[str, PlannedEvent]]:
        """Everything that is going to be asked of the records, in order."""
        before = [("bound", PlannedEvent(self.bound_epsilon))]
        before += [] if self.bounded else [("loss", PlannedEvent(self.bound_epsilon))]
        each = [
            ("direction", PlannedEvent(2 * self.direction_epsilon, pure=self.direction_epsilon)),
            ("length", PlannedEvent(self.length_epsilon)),
        ]
        return [*before, *each * self.rounds]

    def charges(self) -> list[PlannedEvent]:
        """What is going to be charged, in order."""
        return [event for _, event in self.queries()]


class PureRounds:
    """Pure rounds over one loader: what is asked of the records, in the order of the module docstring.

    Args:
        loader: the private data, with indices.
        measurement: how rows are found; its subspace plays no part.
        epsilon: ε.
        books: that charges are written into.
    """

    def __init__(self, loader: DataLoader[Any], measurement: Measurement, epsilon: float, books: Books):
        _check.positive("epsilon", epsilon)
        check_learnable(loader, measurement, books)
        books.check()
        self._measurement = replace(measurement, subspace=Sparse(seed=0), proj_dim=None)
        self._loader = loader
        self._questions = Questions(books, epsilon, 0.0, measurement.size_of(loader))

    def run(self, model: nn.Module) -> nn.Module:
        """The released model.

        **Privacy:** ε-DP; charged before each of its parts is drawn.
        """
        asked, bench = self._questions, Workbench(model, self._measurement)
        parameters = bench.layout.size
        if asked.books.accountant.budget is not None:  # refuse before any data is touched: every plan costs ε
            asked.admit(PureRule(asked.epsilon, asked.size, parameters, True).charges())
            asked.end()
        outputs = looks.prepare(bench, self._loader)
        guess = bench.prepared[1].guessing(outputs)
        rule = PureRule(asked.epsilon, asked.size, parameters, guess is not None)
        asked.admit(rule.charges())
        words.of_start(asked.books, bench)
        _warn_if_faint(rule)
        try:
            if rule.dim < parameters:
                seed = int(asked.books.noise.ordinary().integers(2**63))
                drawn = replace(self._measurement, subspace=Sparse(seed=seed), proj_dim=rule.dim)
                bench = Workbench(model, drawn, bench.pieces)
            found = bench.module_at(self._walk(bench, rule, guess))
            noise = f"noise of {rule.dim / rule.direction_epsilon:.3g} times the bound"
            what = f"{rule.rounds} direction(s) in {rule.dim} dimensions, with {noise}"
            words.of_walk(asked.books, what, rule.passes, model, found)
            return found
        finally:
            asked.end()

    def _walk(self, bench: Workbench, rule: PureRule, guess: float | None) -> Tensor:
        """Bounds, then directions and lengths; the last place."""
        norms, price = looks.gradient_norms(bench, self._loader), rule.bound_epsilon
        bound = _FACTOR * self._questions.quantile("bound", norms, _QUANTILE, price, _UNITS)
        place, last = torch.zeros(bench.map.dim, dtype=torch.float64), None
        if guess is None:
            values = looks.losses(bench, self._loader, [place])[:, 0].nan_to_num(0.0, 0.0, 0.0)
            guess = _LOSS_FACTOR * self._questions.quantile("loss", values.numpy(), _LOSS_QUANTILE, price, _UNITS)
        for _ in range(rule.rounds):
            bench.move(place)
            direction = self._direction(bench, rule, bound)
            menu = [guess / bound * 2.0**j for j in _OCTAVES] if last is None else [last * f for f in _MULTIPLES]
            number, place = self._length(bench, rule, [place, *(place - t * direction for t in menu)], guess)
            # After no step the next one is short.
            last = menu[number - 1] if number else menu[0] * (1.0 if last is None else 2.0)
        return place

    def _direction(self, bench: Workbench, rule: PureRule, bound: float) -> Tensor:
        """The clipped sum of all records with noise, as a unit vector."""
        limits, asked = ClippingBounds(bound * (1 - ROUNDING_MARGIN), 0.0), self._questions

        def once() -> Tensor:
            one = bench.open(limits, asked.size, asked.books.ranks, bench.pieces.padded(self._loader))
            one.add_pieces(bench.begin(self._loader, "loader"))
            return one.sums().gradient.cpu()

        total, epsilon = bench.in_memory(once, self._loader, "loader"), rule.direction_epsilon

        def noisy() -> Tensor:
            noise = asked.books.noise
            return noise.added(total, isotropic_noise(len(total), noise.source()), bound / epsilon)

        found = asked.ask("direction", noisy, torch.zeros_like(total), epsilon_range=2 * epsilon, pure=epsilon)
        unit: Tensor = found / found.norm()
        return unit

    def _length(self, bench: Workbench, rule: PureRule, places: list[Tensor], guess: float) -> tuple[int, Tensor]:
        """One of the places and its number, by the clipped gain in the records' losses over the first of them.

        A record's share of a score lies in [−B, B], so that it moves the scores by a range of at most 2B.
        """
        gains = looks.gains(bench, self._loader, places, guess)
        rank = np.arange(len(places))
        logits = rule.length_epsilon * gains / (2 * guess) - _RELUCTANCE * (rank > 0) - _SLOPE * rank
        number = self._questions.choice("length", logits, rule.length_epsilon)
        return number, places[number]


def _warn_if_faint(rule: PureRule) -> None:
    """Say from public numbers that a step can hardly be told from noise."""
    power = rule.records * rule.epsilon
    if power < _RELIABLE:
        _warnings.warn(
            f"with {rule.records} records and epsilon={rule.epsilon:g} at delta=0 a good step can hardly be told from noise "
            f"(n·ε = {power:.3g}, reliable from {_RELIABLE:g}): the released model may be no better than the one that came; "
            "spend more, or pass delta=1e-5"
        )
