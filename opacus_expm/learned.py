"""Nothing to guess: rounds that learn their own subspace, metric and step, all of it charged.

The model moves in the span of directions that were released before, where a few numbers say how far. With K the metric
(``subspaces.metric``) and u the place in it, θ = θ* + KuK,

1. **Metric.** Kronecker factors of the layers over all records (``gathering.factors``), with Gaussian noise; a layer's
   scale is a private median. Eigenvalues below the edge of the noise's own spectrum are noise: the damping is there. Where
   public records are given, their curvature is the metric instead (``subspaces.leading``), and costs nothing.
2. **Bound.** C is a part of a private quantile of the gradients' norms in the metric.
3. **Directions.** T sums of clipped gradients over Poisson samples with Gaussian noise, as in DP-SGD, each followed by a
   step of length η; in the metric no learning rate has to be found for the last layer alone.
4. **Length.** For other layers the metric, which leaves out how layers act together, says the direction but not how
   far. So after a few steps the loss's own quadratic is measured along what was moved since the last time, in one
   dimension, where noise is small: gradient and curvature of all records, clipped, with noise. Newton's length along
   it corrects the place, and η with it.
5. **Choice.** The mean of the last places, or the start: the exponential mechanism chooses by the clipped gain in the
   records' losses.

How many steps there are and what each part may cost is a public formula (``Rule``), the same for every task.

**Privacy:** all of it together is (ε, δ)-DP with respect to adding or removing one record. Every number that is taken from
the records is one of three: a sum in which a record's share has norm at most c, with normal noise of deviation c/μ, which
is μ-GDP; a choice by the exponential mechanism from scores that one record moves by no more than a known range; or a run of
sums over Poisson samples, which Opacus's accounting knows. What comes later depends on the records through what was
released earlier alone, so the costs compose (adaptively, with parameters that were fixed in advance); the noise of the
run is solved for so that the total, as the ledger computes it, is ε at δ.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from opacus_expm import _check, _warnings, words
from opacus_expm._bars import bar
from opacus_expm._private import PrivateValues
from opacus_expm.accounting.admission import Admission
from opacus_expm.books import Books
from opacus_expm.gathering import loaders, looks
from opacus_expm.gathering.clipping import ClippingBounds
from opacus_expm.gathering.criteria import make_criterion
from opacus_expm.gathering.factors import edge
from opacus_expm.gathering.measurement import Measurement
from opacus_expm.gathering.passes import Pass, Workbench
from opacus_expm.gathering.samples import sampled
from opacus_expm.mechanism import curves
from opacus_expm.mechanism.choices import symmetric_noise
from opacus_expm.mechanism.quantiles import GRID
from opacus_expm.public import taught
from opacus_expm.questions import Questions
from opacus_expm.rule import Rule
from opacus_expm.subspaces.leading import Leading
from opacus_expm.subspaces.metric import Block, Metric
from opacus_expm.subspaces.preconditioned import Preconditioned
from opacus_expm.subspaces.sparse import Sparse

_AVERAGED = 0.4  # of the steps, at the end
_DAMPING = 0.6  # of the edge of the noise's spectrum
_BOUND_QUANTILE, _BOUND_FACTOR = 0.85, 0.5  # high: rare classes have the largest gradients
_LENGTH_QUANTILE, _LENGTH_FACTOR = 0.75, 2.0
_SHORTEST, _LONGEST, _FIRST_LONGEST = 0.125, 2.0, 8.0  # what a length may be corrected by
_CHOICES = (0.0, 1.0)  # of the mean of the last places
_RELUCTANCE = np.array([-8.0, 0.0])  # public weights of the choices
_LEADING = 800  # directions of public curvature
_LEAST_SCALE = 0.01  # of the largest among the layers
_MARGIN = 1 - 1e-6  # for the rounding of clipped sums


@dataclass(frozen=True, eq=False)
class Planned:
    """Learned rounds of one model, admitted to the budget; nothing was charged.

    Attributes:
        bench: the model where it stands.
        rule: how many steps, how long, and what each part may cost.
        blocks: the layers with a metric of their own.
        guess: the loss of a model that guesses; None where it is not known.
        metric: from public data; None where it is to be measured.
    """

    bench: Workbench
    rule: Rule
    blocks: tuple[Block, ...]
    guess: float | None
    metric: Leading | None = None


class LearnedRounds:
    """Learned rounds over one loader: what is asked of the records, in the order of the module docstring.

    Args:
        loader: the private data, with indices.
        measurement: how rows are found; its subspace plays no part.
        epsilon: ε.
        delta: δ > 0.
        books: that charges are written into.
        epochs: how many passes over the data the directions take, with a step in each; None for the rule's own.
        pieces: records at a time; None takes those of the measurement.
        public_loader: public data, whose curvature is the metric; None measures one on the private data.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        measurement: Measurement,
        epsilon: float,
        delta: float,
        books: Books,
        *,
        epochs: int | None = None,
        pieces: loaders.Pieces | None = None,
        public_loader: DataLoader[Any] | None = None,
    ):
        _check.positive("epsilon", epsilon)
        if _check.fraction("delta", delta) == 0:
            raise ValueError(
                "delta must be greater than 0 for learned rounds, which are (epsilon, delta)-DP; pass delta=1e-5, or call "
                "make_private_expm, which has pure rounds for delta=0"
            )
        check_learnable(loader, measurement, books)
        if public_loader is not None:
            loaders.check_public(public_loader, loader)
        books.check()
        # Bars of single passes would tell how many records a sample has.
        self._measurement = replace(measurement, subspace=Sparse(seed=0), proj_dim=None, progress=False)
        self._shows = measurement.shows_progress
        self._loader, self._epochs, self._pieces, self._public = loader, epochs, pieces, public_loader
        self._questions = Questions(books, epsilon, delta, measurement.size_of(loader))

    @property
    def admission(self) -> Admission | None:
        """Of the plan that was made last."""
        return self._questions.admission

    def end(self) -> None:
        """Nothing more is going to be asked: nothing of the budget stays reserved."""
        self._questions.end()

    def run(self, model: nn.Module) -> nn.Module:
        """The released model.

        **Privacy:** (ε, δ)-DP; charged before each of its parts is drawn.
        """
        try:
            walk = self.begin(self.plan(model))
            for _ in bar(self._shows, range(walk.rule.steps), desc="rounds", unit="step", leave=False):
                walk.step(walk.sample())
            return walk.module()
        finally:
            self.end()

    def plan(self, model: nn.Module, instead_of: Admission | None = None) -> Planned:
        """The rule for a model, by shapes and types alone, and its admission to the budget.

        Args:
            model: where the rounds start.
            instead_of: a plan that will be given up for this one.

        Raises:
            BudgetExceeded: it does not fit; nothing was charged.
        """
        asked, bench = self._questions, Workbench(model, self._measurement, self._pieces)
        if asked.books.accountant.budget is not None:  # refuse before any data is touched
            asked.admit(self._likely(bench).charges(), instead_of)
            asked.end()
        outputs = looks.prepare(bench, self._loader)
        blocks = looks.blocks(bench)
        guess = bench.prepared[1].guessing(outputs)
        rule = self._rule(bench, len(blocks), guess is not None)
        asked.admit(rule.charges(), instead_of)
        words.of_start(asked.books, bench)
        _warn_if_faint(rule, bench.layout.size)
        return Planned(bench, rule, blocks, guess, self._public_metric(model, rule))

    def _public_metric(self, model: nn.Module, rule: Rule) -> Leading | None:
        """The leading directions of public curvature, as many as the budget pays for."""
        if self._public is None:
            return None
        recipe = replace(self._measurement, subspace=Preconditioned(rank=_LEADING))
        found = taught(model, recipe, self._public, self._questions.books.ranks)
        assert isinstance(found, Preconditioned)
        assert found.curvature is not None
        return Leading.of(found.curvature, rule.dimensions)

    def begin(self, planned: Planned) -> Walk:
        """Metric, bounds, and the charge for all directions: the walk stands at the start.

        **Privacy:** what it asks of the records is charged before it is drawn.
        """
        asked, bench, rule, guess = self._questions, planned.bench, planned.rule, planned.guess
        if planned.metric is not None:
            bench = bench.within(planned.metric)
        elif planned.blocks:
            bench = bench.within(self.metric(bench, rule, planned.blocks))
        bound = self.bound(bench, rule)
        if guess is None:
            start = torch.zeros(bench.map.dim, dtype=torch.float64)
            values = looks.losses(bench, self._loader, [start])[:, 0].nan_to_num(0.0, 0.0, 0.0)
            guess = 2 * asked.quantile("loss", values.numpy(), 0.75, curves.bounded_range_within(rule.loss_mu))
        return Walk(bench, self._loader, asked, rule, bound, guess)

    def _rule(self, bench: Workbench, layers: int, bounded: bool) -> Rule:
        """The rule for a model with so many layers."""
        asked = self._questions
        known = (asked.epsilon, asked.delta, asked.size, layers, bounded)
        return Rule(*known, epochs=self._epochs, last=bench.last_moves(), public=self._public is not None)

    def _likely(self, bench: Workbench) -> Rule:
        """The rule as far as it is known without data: as if hooks served the model wherever they are allowed."""
        measurement = self._measurement
        layers = 0 if measurement.grad_sampling.mode == "functorch" else len(bench.blocks())
        loss = None if measurement.criterion is None else make_criterion(measurement.criterion, torch.zeros(0))
        return self._rule(bench, layers, loss is not None and loss.guessing(2) is not None)

    def metric(self, bench: Workbench, rule: Rule, blocks: tuple[Block, ...]) -> Metric:
        """Factors with noise, their roots, and each layer's scale.

        **Privacy:** charged before it is drawn, the factors together and each scale.
        """
        asked, n = self._questions, self._questions.size
        sums = looks.factors(bench, self._loader, asked.books.noise.source())
        totals = [t for pair in zip(sums.inputs, sums.outputs, strict=True) for t in pair]
        deviation = 1 / rule.factor_mu

        def noisy() -> Tensor:
            random = asked.books.noise.source()
            parts = [t + deviation * torch.from_numpy(symmetric_noise(len(t), random)) for t in totals]
            return torch.cat([part.flatten() for part in parts])

        like = torch.zeros(sum(t.numel() for t in totals), dtype=torch.float64)
        released = asked.ask("metric", noisy, like, mu=rule.metric_mu)
        price = curves.bounded_range_within(rule.scale_mu)
        scales = [asked.quantile("scale", h.numpy(), 0.5, price) for h in sums.traces.unbind(1)]
        scales = [max(scale, _LEAST_SCALE * max(scales)) for scale in scales]
        parts = [
            p.view_as(t) / n for p, t in zip(torch.split(released, [t.numel() for t in totals]), totals, strict=True)
        ]
        roots = [_root(part, _DAMPING * edge(len(part), deviation / n)) for part in parts]
        found = tuple((roots[2 * i] / scale**0.25, roots[2 * i + 1] / scale**0.25) for i, scale in enumerate(scales))
        return Metric(blocks, found)

    def bound(self, bench: Workbench, rule: Rule) -> float:
        """C, at which gradients are clipped.

        **Privacy:** charged before it is drawn.
        """
        norms = looks.gradient_norms(bench, self._loader)
        price = curves.bounded_range_within(rule.bound_mu)
        return _BOUND_FACTOR * self._questions.quantile("bound", norms, _BOUND_QUANTILE, price, _UNITS)


class Walk(PrivateValues):
    """Directions and lengths: where the rounds are, and the mean of the last places.

    Args:
        bench: the model in its metric.
        loader: the private data.
        asked: the questions of the plan.
        rule: how many steps, how long, and what each part may cost.
        bound: C.
        guess: B, the loss by which gains are clipped.

    **Privacy:** the whole run of directions is charged at once, before the first of them.
    """

    def __init__(
        self,
        bench: Workbench,
        loader: DataLoader[Any],
        asked: Questions,
        rule: Rule,
        bound: float,
        guess: float,
    ):
        self.rule = rule
        self._bench, self._loader, self._asked = bench, loader, asked
        self._limits, self._guess = ClippingBounds(bound, 0.0), guess
        self._place = torch.zeros(bench.map.dim, dtype=torch.float64)
        self._marked, self._total, self._count = self._place, self._place, 0
        self._rate, self._steps = rule.rate, 0
        self._random = asked.books.noise.source()
        self._chance: np.random.Generator | None = None
        plan = (rule.noise_multiplier, rule.sample_rate, rule.steps)
        asked.ask("directions", lambda: self._place, self._place, run=plan)

    @property
    def place(self) -> Tensor:
        """ξ, where the rounds are; it follows from what was released."""
        return self._place

    def sample(self, *, whole: bool = False) -> DataLoader[Any] | None:
        """The next Poisson sample, None where it is empty; ``whole`` has all of its records in one batch."""
        if self._chance is None:
            self._chance = self._asked.books.noise.source()
        return sampled(self._loader, self.rule.sample_rate, self._chance, whole=whole)

    def step(self, sample: DataLoader[Any] | None) -> None:
        """Move by the direction that a Poisson sample shows; None is one without records."""
        if sample is None:
            self.advance_empty()
            return
        given, bench = sample, self._bench

        def once() -> Tensor:
            one = self.open(bench.pieces.padded(given))
            one.add_pieces(bench.begin(given, "loader"))
            return one.sums().gradient.cpu()

        self.advance(bench.in_memory(once, given, "loader"))

    def open(self, pad_to: int | None) -> Pass:
        """A pass over a Poisson sample at the present place, to which its records are to be added."""
        self._bench.move(self._place)
        limits = replace(self._limits, max_grad_norm=self._limits.max_grad_norm * _MARGIN)
        return self._bench.open(limits, self._asked.size, self._asked.books.ranks, pad_to)

    def advance(self, total: Tensor) -> None:
        """Move by a sample's clipped sum with noise; a part of the run that was charged."""
        if self._steps == self.rule.steps:
            raise RuntimeError(f"all {self._steps} directions that were charged are drawn")
        rule, bound = self.rule, self._limits.max_grad_norm
        noise = torch.from_numpy(self._random.standard_normal(len(total)))
        direction = (total + bound * rule.noise_multiplier * noise) / (rule.sample_rate * self._asked.size)
        self._steps += 1
        self._place = self._place - self._rate * direction
        if self._steps in rule.marks:
            moved = self._place - self._marked
            factor = self._length(moved, _FIRST_LONGEST if self._steps == rule.marks[0] else _LONGEST)
            self._place = self._marked = self._marked + factor * moved
            self._rate *= factor
        if self._steps > rule.steps * (1 - _AVERAGED):
            self._total, self._count = self._total + self._place, self._count + 1

    def advance_empty(self) -> None:
        """Move by the noise alone: the sample has no records, or they were lost."""
        self.advance(torch.zeros_like(self._place))

    def here(self) -> nn.Module:
        """The model at the present place, which was released."""
        return self._bench.module_at(self._place)

    def _length(self, moved: Tensor, longest: float) -> float:
        """By what factor the last displacement is corrected: Newton's length along it, from a noisy pair.

        With g′ and H′ the sums along the displacement's direction, both with noise, the move is −g′/H′; g′ is shrunk by its
        known noise (positive-part James-Stein), H′ is no less than its noise's deviation.
        """
        reach = float(moved.norm())
        if reach == 0:
            return 1.0
        pairs = looks.span_quadratics(self._bench, self._loader, self._place, (moved / reach)[:, None])
        numbers = [pairs.gradients[:, 0], pairs.curvatures[:, 0, 0]]
        sums, deviations = self._asked.clipped_sums(
            "length", numbers, _LENGTH_QUANTILE, _LENGTH_FACTOR, self.rule.length_mu
        )
        g, h = sums.tolist()
        g *= max(0.0, 1 - (float(deviations[0]) / g) ** 2) if g else 0.0
        along = -g / max(h, float(deviations[1])) / reach
        return float(min(longest, max(_SHORTEST, 1 + along)))

    def module(self) -> nn.Module:
        """The model at the mean of the last places or at the start, by the clipped gain in the records' losses.

        The start's gain is 0 and a record's share of the other lies in [−B, B], so that it moves the scores by a range of at
        most B.
        """
        places = [share * self._total / self._count for share in _CHOICES]
        gains = looks.gains(self._bench, self._loader, places, self._guess)
        epsilon = curves.bounded_range_within(self.rule.length_mu)
        number = self._asked.choice("choice", epsilon * gains / self._guess + _RELUCTANCE, epsilon)
        rule, found = self.rule, self._bench.module_at(places[number])
        sample = f"samples of {rule.sample_rate:.2g} of the records"
        what = f"{rule.steps} steps on {sample}, with noise of {rule.noise_multiplier:.3g} times the bound"
        words.of_walk(self._asked.books, what, rule.passes, self._bench.module_at(places[0]), found)
        return found


# Public weights of a bound: in the metric, norms are of the order of one.
_UNITS = -np.abs(np.log2(GRID))


def check_learnable(loader: DataLoader[Any], measurement: Measurement, books: Books) -> None:
    """Raise for what learned rounds cannot serve, naming the way out.

    Raises:
        ValueError: with the reason.
    """
    way_out = "pass radius= and proj_dim= for the source paper's one draw"
    if books.ranks.count > 1:
        raise ValueError(f"learned rounds run in one process, and torch.distributed has several; {way_out}")
    if books.adjacency != "add_remove":
        raise ValueError(f"learned rounds are counted under adjacency='add_remove', got {books.adjacency!r}; {way_out}")
    if books.noise.secure:
        raise ValueError(f"secure_mode has no learned rounds yet; {way_out}")
    if measurement.views is not None:
        raise ValueError(f"views have no part in learned rounds yet; {way_out}")
    if loaders.dataset_size(loaders.check_loader(loader)) is None:
        raise ValueError(
            f"learned rounds go through the records again and again, and loader has an iterable data set; {way_out}"
        )


def _warn_if_faint(rule: Rule, parameters: int) -> None:
    """Say from public numbers that a direction can hardly be told from noise."""
    signal = rule.records * rule.mu / math.sqrt(parameters)
    if signal < 3:
        _warnings.warn(
            f"with {rule.records} records, {parameters} parameters and epsilon={rule.epsilon:g} a gradient can hardly be "
            f"told from noise (n·μ/√p = {signal:.2g}, reliable from 3): the released model may be no better than the one "
            "that came; freeze parameters, or spend more"
        )


def _root(matrix: Tensor, damping: float) -> Tensor:
    """(M⁺ + damping·I)^{−½}, with negative eigenvalues set to 0."""
    values, vectors = torch.linalg.eigh(matrix)
    found: Tensor = (vectors * (values.clamp(min=0) + damping).rsqrt()) @ vectors.T
    return found
