"""Nothing to guess: rounds that learn their own metric, bound and step, all of it charged.

1. **Metric.** Kronecker factors of the layers over all records (``gathering.factors``) and the layers' shares of the
   curvature, with Gaussian noise, and a private median of the curvature itself. Directions that curve by less than h₀ keep
   the parameters' own units, others are measured in units in which they curve alike; h₀ is such that as many dimensions take
   part as the budget pays for. Public records, where they are given, show what is hidden in the noise (``geometry``).
2. **Bound.** C is a part of a private quantile of the gradients' norms in the metric.
3. **Time.** The mean loss at the start, with noise, says how much there is to gain. Together with C and the number of
   dimensions it says how far the steps may go until their noise undoes a part of that gain (``Rule.time``). For the last
   layer alone the metric says it already (``Rule.head_time``). So no learning rate has to be found.
4. **Directions.** T sums of clipped gradients over Poisson samples with Gaussian noise, as in DP-SGD, each followed by a
   step of length τ/T.
5. **Choice.** The mean of the last places, or the start: the exponential mechanism chooses by the clipped gain in the
   records' losses.

How many steps there are and what each part may cost is a public formula (``Rule``), the same for every task.

With views, a record's gradient is the mean over its views, which is then clipped, and C is bought from the norms of these
means. Metric and losses are those of the records as they are (``gathering.looks``).

**Privacy:** all of it together is (ε, δ)-DP with respect to adding or removing one record. Every number that is taken from
the records is one of three: a sum in which a record's share has norm at most c, with normal noise of deviation c/μ, which
is μ-GDP; a choice by the exponential mechanism from scores that one record moves by no more than a known range; or a run of
sums over Poisson samples, which Opacus's accounting knows. What comes later depends on the records through what was
released earlier alone, so the costs compose (adaptively, with parameters that were fixed in advance); the noise of the
run is solved for so that the total, as the ledger computes it, is ε at δ.
"""

from __future__ import annotations

import functools
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
from opacus_expm.accounting.composition import delta_beside_failures
from opacus_expm.books import Books
from opacus_expm.gathering import loaders, looks
from opacus_expm.gathering.clipping import ClippingBounds
from opacus_expm.gathering.criteria import make_criterion
from opacus_expm.gathering.measurement import Measurement
from opacus_expm.gathering.passes import Pass, Workbench
from opacus_expm.gathering.samples import Samples, sampled
from opacus_expm.geometry import Geometry, Known, measured
from opacus_expm.mechanism import curves
from opacus_expm.mechanism.quantiles import GRID
from opacus_expm.questions import Questions
from opacus_expm.rule import Rule
from opacus_expm.subspaces.metric import Block
from opacus_expm.subspaces.sparse import Sparse

_AVERAGED = 0.4  # of the steps, at the end
_BOUND_QUANTILE, _BOUND_FACTOR = 0.85, 0.5  # high: rare classes have the largest gradients
_LOSS_QUANTILE, _LOSS_FACTOR = 0.75, 2.0  # a bound of losses that has to be bought
_RELUCTANCE = np.array(
    [-8.0, 0.0]
)  # public weights of the choices, and the other way round where there is little signal
_FAINT, _LOST = 3.0, 1.0  # nμ/√p, below which a direction can hardly be told from noise, and below which it is noise
_MARGIN = 1 - 1e-6  # for the rounding of clipped sums


@dataclass(frozen=True, eq=False)
class Planned:
    """Learned rounds of one model, admitted to the budget; nothing was charged.

    Attributes:
        bench: the model where it stands.
        rule: how many steps, how long, and what each part may cost.
        blocks: the layers with a metric of their own.
        guess: the loss of a model that guesses; None where it is not known.
        known: what public records show of them; None where there are none.
    """

    bench: Workbench
    rule: Rule
    blocks: tuple[Block, ...]
    guess: float | None
    known: Known | None = None


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
        public_loader: public data, whose curvature gives the metric; None measures it on the private data.
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
        known = None if self._public is None else Known.of(bench, self._public)
        return Planned(bench, rule, blocks, guess, known)

    def begin(self, planned: Planned) -> Walk:
        """Metric, bounds, time, and the charge for all directions: the walk stands at the start.

        **Privacy:** what it asks of the records is charged before it is drawn.
        """
        bench, rule = planned.bench, planned.rule
        geometry = self.geometry(bench, rule, planned.blocks, planned.known)
        if geometry.subspace is not None:
            bench = bench.within(geometry.subspace)
        unit = math.sqrt(geometry.damping)
        bound = self.bound(bench, rule, unit)
        guess, loss = self.losses(bench, rule, planned.guess)
        time = rule.head_time if loss is None else rule.time(bound / unit, loss, guess, geometry.dimensions)
        return Walk(bench, self._loader, self._questions, rule, bound, guess, time / geometry.damping / rule.steps)

    def _rule(self, bench: Workbench, layers: int, bounded: bool) -> Rule:
        """The rule for a model with so many layers, at the δ that is left beside what secure mode's answers may fail by."""
        asked = self._questions
        known = (asked.epsilon, asked.delta, asked.size, layers, bounded)
        head = layers == 1 and bench.moves_head_alone()
        rule = Rule(*known, head, epochs=self._epochs, public=self._public is not None)
        failure = (len(rule.queries()) + 1) * asked.books.noise.failure_probability
        return replace(rule, delta=delta_beside_failures(asked.epsilon, asked.delta, failure))

    def _likely(self, bench: Workbench) -> Rule:
        """The rule as far as it is known without data: as if hooks served the model wherever they are allowed."""
        measurement = self._measurement
        layers = 0 if measurement.grad_sampling.mode == "functorch" else len(bench.blocks())
        loss = None if measurement.criterion is None else make_criterion(measurement.criterion, torch.zeros(0))
        return self._rule(bench, layers, loss is not None and loss.guessing(2) is not None)

    def geometry(self, bench: Workbench, rule: Rule, blocks: tuple[Block, ...], known: Known | None = None) -> Geometry:
        """Units from what is asked of the records, and from what public ones show.

        **Privacy:** charged before it is drawn.
        """
        return measured(self._questions, self._loader, bench, rule, blocks, known)

    def bound(self, bench: Workbench, rule: Rule, unit: float = 1.0) -> float:
        """C, at which gradients are clipped; they are expected to be of the order of ``unit``.

        **Privacy:** charged before it is drawn.
        """
        norms, base = looks.gradient_norms(bench, self._loader), -np.abs(np.log2(GRID / unit))
        return _BOUND_FACTOR * self._questions.quantile("bound", norms, _BOUND_QUANTILE, _price(rule.bound_mu), base)

    def losses(self, bench: Workbench, rule: Rule, guess: float | None) -> tuple[float, float | None]:
        """B, by which losses are clipped, and the mean loss at the start, no less than its noise; None for a head.

        **Privacy:** charged before it is drawn, both where B is not known.
        """
        if rule.head and guess is not None:
            return guess, None
        asked, start = self._questions, torch.zeros(bench.map.dim, dtype=torch.float64)
        values = looks.losses(bench, self._loader, [start])[:, 0]
        if guess is None:
            known = values.nan_to_num(0.0, 0.0, 0.0).numpy()
            guess = _LOSS_FACTOR * asked.quantile("loss bound", known, _LOSS_QUANTILE, _price(rule.loss_mu))
        if rule.head:
            return guess, None
        total, deviation = asked.clipped_sum("loss", values, guess, rule.loss_mu)
        return guess, min(guess, max(total, deviation) / asked.size)


class Walk(PrivateValues):
    """Directions: where the rounds are, and the mean of the last places.

    Args:
        bench: the model in its metric.
        loader: the private data.
        asked: the questions of the plan.
        rule: how many steps, how long, and what each part may cost.
        bound: C.
        guess: B, the loss by which gains are clipped.
        rate: η, the length of a step.

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
        rate: float,
    ):
        self.rule = rule
        self._bench, self._loader, self._asked = bench, loader, asked
        self._limits, self._guess = ClippingBounds(bound, 0.0), guess
        self._place = torch.zeros(bench.map.dim, dtype=torch.float64)
        self._total, self._count = self._place, 0
        self._rate, self._steps = rate, 0
        self._random = asked.books.noise.source()
        self._samples: Samples | None = None
        plan = (rule.noise_multiplier, rule.sample_rate, rule.steps)
        asked.ask("directions", lambda: self._place, self._place, run=plan)

    @property
    def place(self) -> Tensor:
        """ξ, where the rounds are; it follows from what was released."""
        return self._place

    def sample(self, *, whole: bool = False, size: int = 0) -> DataLoader[Any] | None:
        """The next Poisson sample, None where it is empty.

        Args:
            whole: all of its records in one batch, for a loop.
            size: the largest number of records in a batch; 0 is any.
        """
        if self._samples is None or size != self._samples.size:
            noise, loader = self._asked.books.noise, self._loader
            chance = noise.apart() if loader.num_workers else noise.source()
            draw = functools.partial(sampled, loader, self.rule.sample_rate, chance, whole=whole)
            self._samples = Samples(loader, draw, "data_loader" if whole else "loader", size)
        return self._samples.next(self.rule.steps - self._steps)

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
        noise = self._random.standard_normal(len(total))
        noisy = self._asked.books.noise.added(total, noise, bound * rule.noise_multiplier)
        direction = noisy / (rule.sample_rate * self._asked.size)
        self._steps += 1
        self._place = self._place - self._rate * direction
        if self._steps > rule.steps * (1 - _AVERAGED):
            self._total, self._count = self._total + self._place, self._count + 1

    def advance_empty(self) -> None:
        """Move by the noise alone: the sample has no records, or they were lost."""
        self.advance(torch.zeros_like(self._place))

    def here(self) -> nn.Module:
        """The model at the present place, which was released."""
        return self._bench.module_at(self._place)

    def module(self) -> nn.Module:
        """The model at the mean of the last places or at the start, by the clipped gain in the records' losses.

        The start's gain is 0 and a record's share of the other lies in [−B, B], so that it moves the scores by a range of at
        most B. What is to be kept where the gains cannot tell is a matter of public numbers.
        """
        places = [torch.zeros_like(self._place), self._total / self._count]
        gains = looks.gains(self._bench, self._loader, places, self._guess)
        epsilon = _price(self.rule.choice_mu)
        weights = _RELUCTANCE if _signal(self.rule, self._bench.layout.size) >= _LOST else -_RELUCTANCE
        number = self._asked.choice("choice", epsilon * gains / self._guess + weights, epsilon)
        rule, found = self.rule, self._bench.module_at(places[number])
        sample = f"samples of {rule.sample_rate:.2g} of the records"
        what = f"{rule.steps} steps on {sample}, with noise of {rule.noise_multiplier:.3g} times the bound"
        words.of_walk(self._asked.books, what, rule.passes, self._bench.module_at(places[0]), found)
        return found


def check_learnable(loader: DataLoader[Any], measurement: Measurement, books: Books) -> None:
    """Raise for what learned rounds cannot serve, naming the way out.

    Raises:
        ValueError: with the reason.
    """
    way_out = "or pass radius= and proj_dim= for the source paper's one draw"
    if books.ranks.count > 1:
        raise ValueError(
            "without radius= the rounds run in one process, which draws all samples and noise, and torch.distributed has "
            f"several: use ExpMQuadEngine(distributed=False) in one of them, {way_out}"
        )
    if books.adjacency != "add_remove":
        raise ValueError(
            "without radius= costs are counted for adding or removing a record, as those of Poisson samples are, and the "
            f"engine has adjacency={books.adjacency!r}: use adjacency='add_remove', {way_out}"
        )
    if loaders.dataset_size(loaders.check_loader(loader)) is None:
        raise ValueError(
            "without radius= records are read again and again by their index, and loader has an iterable data set: pass "
            f"a data set with __getitem__ and __len__, {way_out}"
        )


def _warn_if_faint(rule: Rule, parameters: int) -> None:
    """Say from public numbers that a direction can hardly be told from noise."""
    signal = _signal(rule, parameters)
    if signal < _FAINT:
        _warnings.warn(
            f"with {rule.records} records, {parameters} parameters and epsilon={rule.epsilon:g} a gradient can hardly be "
            f"told from noise (n·μ/√p = {signal:.2g}, reliable from 3): the released model may be no better than the one "
            "that came; freeze parameters, or spend more"
        )


def _signal(rule: Rule, parameters: int) -> float:
    """nμ/√p: a mean gradient of the bound's length, over the length of the noise."""
    return rule.records * rule.mu / math.sqrt(parameters)


def _price(mu: float) -> float:
    """The range of a choice by the exponential mechanism that costs as much as μ."""
    return curves.bounded_range_within(mu)
