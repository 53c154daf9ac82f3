"""Learned rounds over noise that is told: what they release, as a function of the noise.

Normal numbers, choices and samples all come from the noise that a call is given. The audit's own noise keeps what a choice
is made from, and is told what to answer. So the law of a part is read off the code that draws it: that of a choice from its
logits, and that of a normal number from what is released with noise 0 and with noise 1.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from opacus_expm.accounting.composition import least_noise, total_epsilon
from opacus_expm.books import Books
from opacus_expm.engine import ExpMQuadEngine
from opacus_expm.gathering import looks
from opacus_expm.gathering.measurement import Measurement
from opacus_expm.gathering.passes import Workbench
from opacus_expm.gathering.samples import sampled
from opacus_expm.learned import LearnedRounds, Walk
from opacus_expm.mechanism.choices import Source
from opacus_expm.mechanism.density import Array
from opacus_expm.noise import Noise
from opacus_expm.questions import Questions
from opacus_expm.rule import Rule
from opacus_expm.subspaces.sparse import Sparse

Sample = tuple[bool, ...]  # which of the records take part


@dataclass(eq=False)
class Script:
    """What noise answers, and what it was asked.

    Attributes:
        normals: the answers to requests for normal numbers, one for each request; 0 where there are no more.
        picks: the candidates to be chosen; the first one where there are no more.
        uniforms: the answer to every request for uniform numbers.
        logits: of the choices that were made.
    """

    normals: deque[float | Array] = field(default_factory=deque)
    picks: deque[int] = field(default_factory=deque)
    uniforms: Array = field(default_factory=lambda: np.zeros(0))
    logits: list[Array] = field(default_factory=list)

    def standard_normal(self, shape: int | tuple[int, ...]) -> Array:
        """The same number for all of the shape, or a number for each place in it."""
        told = np.asarray(self.normals.popleft() if self.normals else 0.0)
        return np.broadcast_to(told.reshape(shape) if told.ndim else told, shape).copy()

    def random(self, count: int) -> Array:
        """Uniform numbers."""
        return self.uniforms[:count]

    def spawn(self, count: int) -> list[Script]:
        """The script itself, from which all of them read on."""
        return [self] * count


@dataclass(frozen=True)
class _ToldNoise(Noise):
    """Noise that answers by a script."""

    script: Script = field(default_factory=Script, repr=False)

    def source(self) -> Source:
        """The script, which has those methods of a generator that learned rounds use."""
        return cast(Source, self.script)

    def choose(self, logits: Array) -> int:
        """The candidate that was told."""
        self.script.logits.append(logits)
        return self.script.picks.popleft() if self.script.picks else 0


@dataclass(frozen=True, eq=False)
class _KeptBooks(Books):
    """Books that keep what was released last, by name; what is drawn is charged, or not where it is drawn over and over."""

    charged: bool = False
    answers: dict[str, Tensor] = field(default_factory=dict, repr=False)

    def drawn(self, event: Any, admission: Any, draw: Callable[[], Tensor], like: Tensor) -> Tensor:
        """Charge, then draw."""
        self.answers[event.what] = super().drawn(event, admission, draw, like) if self.charged else draw()
        return self.answers[event.what]


class Side:
    """One of two data sets, and learned rounds over it, whose noise is told.

    Args:
        model: that the rounds start from.
        records: pairs (x, y) of one data set, under mean squared error.
        rule: steps and prices.
        size: N, the public number of records.
        charged: whether a ledger is kept.
    """

    def __init__(
        self, model: nn.Module, records: Sequence[tuple[Any, float]], rule: Rule, size: int, *, charged: bool = False
    ):
        x = torch.tensor([r[0] for r in records], dtype=torch.float64).reshape(len(records), -1)
        y = torch.tensor([[r[1]] for r in records], dtype=torch.float64)
        self.rule, self.script = rule, Script()
        self.loader: DataLoader[Any] = DataLoader(TensorDataset(x, y), batch_size=256)
        measurement = Measurement(Sparse(seed=0), None, nn.MSELoss(), nominal_size=size, progress=False)
        books = ExpMQuadEngine(distributed=False).books()
        self.books = _KeptBooks(books.accountant, books.adjacency, _ToldNoise(script=self.script), books.ranks, charged)
        self.rounds = LearnedRounds(self.loader, measurement, rule.epsilon, rule.delta, self.books)
        self.questions = Questions(self.books, rule.epsilon, rule.delta, size)
        self.bench = Workbench(model, measurement)
        looks.prepare(self.bench, self.loader)
        self._count = len(records)

    def claimed(self, delta: float) -> float:
        """The ε that the ledger states at δ for all that was asked of this side."""
        return total_epsilon(self.books.accountant.releases, self.books.accountant.history, delta).epsilon

    def samples(self) -> Iterator[tuple[Sample, float]]:
        """Every sample of the records, and its probability."""
        rate = self.rule.sample_rate
        for taken in itertools.product([True] if rate == 1 else [False, True], repeat=self._count):
            yield taken, rate ** sum(taken) * (1 - rate) ** (self._count - sum(taken))

    def walk(self, bound: float, guess: float = 1.0) -> Walk:
        """A walk at its start."""
        return Walk(self.bench, self.loader, self.questions, self.rule, bound, guess, rate=2.0)

    def step(self, walk: Walk, sample: Sample, normal: float) -> float:
        """Where a step with this sample and this noise leads, in one dimension."""
        rate = self.rule.sample_rate
        self.tell(normal)
        self.script.uniforms = np.where(sample, np.nextafter(rate, 0.0), rate)
        walk.step(sampled(self.loader, rate, cast(Source, self.script)))
        return float(walk.place)

    def tell(self, *normals: float | Array, picks: Sequence[int] = ()) -> None:
        """What the noise is going to answer; what it was asked before is forgotten."""
        self.script.normals, self.script.picks = deque(normals), deque(picks)
        self.script.logits.clear()


@dataclass(frozen=True)
class FewRounds(Rule):
    """A rule of one or two steps, whose parts cost alike.

    Attributes:
        count: T.
        share: q.
        kinds: how many kinds of parts there are; each costs μ/√kinds, and the steps cost what is left.
    """

    count: int = 1
    share: float = 1.0
    kinds: int = 1

    @property
    def steps(self) -> int:
        """T."""
        return self.count

    @property
    def sample_rate(self) -> float:
        """Q."""
        return self.share

    @property
    def part(self) -> float:
        """What each kind of part may cost, in Gaussian terms."""
        return self.mu / math.sqrt(self.kinds)

    @property
    def metric_mu(self) -> float:
        """Of the factors and the shares together."""
        return self.part

    @property
    def scale_mu(self) -> float:
        """Of the curvature of all layers."""
        return self.part

    @property
    def bound_mu(self) -> float:
        """Of C."""
        return self.part

    @property
    def loss_mu(self) -> float:
        """Of a bound of the losses, and of their sum."""
        return self.part

    @property
    def choice_mu(self) -> float:
        """Of the choice."""
        return self.part

    @cached_property
    def noise_multiplier(self) -> float:
        """σ: what is left by the other kinds of parts."""
        others = self.part * math.sqrt(self.kinds - 1)
        return least_noise(self.epsilon, self.delta, others, self.sample_rate, self.steps)
