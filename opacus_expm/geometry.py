"""The units in which learned rounds clip gradients and take steps.

Kronecker factors of the layers over all records (``gathering.factors``) and the layers' shares of the curvature are asked
for with Gaussian noise, and the curvature itself as a private median. Directions that curve by less than h₀ keep the
parameters' own units, others are measured in units in which they curve alike; h₀ is such that as many dimensions take part
as the budget pays for. For the last layer alone the factors are nearly the loss's curvature, and are damped where their
noise ends. A model that hooks cannot serve keeps its own units, and h₀ follows from the private median alone.

Where public records are given, they say what is not seen of the private ones through the noise: a factor is that of the
public records, but for the directions in which the private one clearly differs from it, and a layer's share the same. So
public records help where noise would hide everything, and do little harm where they are unlike the private ones.

**Privacy:** factors and shares are charged together before they are drawn, and so is the median. What public records show
costs nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from opacus_expm.gathering import looks
from opacus_expm.gathering.factors import FactorSums, edge
from opacus_expm.gathering.passes import Workbench
from opacus_expm.mechanism import curves
from opacus_expm.mechanism.choices import symmetric_noise
from opacus_expm.questions import Questions
from opacus_expm.rule import Rule
from opacus_expm.subspaces.base import damping_of
from opacus_expm.subspaces.metric import Block, Metric, Spectrum, corrected, shrunk

_HEAD_DAMPING = 0.6  # of the edge of the noise's spectrum
_LEAST_DAMPING = 1 / 640  # of the largest curvature
_SEEN = 2.0  # deviations of its noise, from which on a layer's share is one, or another one than the public records'


@dataclass(frozen=True, eq=False)
class Geometry:
    """Units for gradients and steps.

    Attributes:
        subspace: the metric; None for the parameters' own units.
        damping: h₀, by which the loss curves at most in these units.
        dimensions: d, how many of them take part; of no meaning for a head.
    """

    subspace: Metric | None
    damping: float
    dimensions: float


@dataclass(frozen=True, eq=False)
class Known:
    """What public records show of a model's layers.

    Attributes:
        factors: A and B of one block after the other, each with trace 1; of equal eigenvalues where no record shows any.
        shares: each block's share of the curvature.
        trace: the median curvature of a record.
    """

    factors: list[Tensor]
    shares: Tensor
    trace: float

    @classmethod
    def of(cls, bench: Workbench, public_loader: DataLoader[Any]) -> Known:
        """Measured on public records.

        Raises:
            ValueError: the model has no layers with a metric of their own, or the records have no curvature.
        """
        if not looks.blocks(bench):
            raise ValueError(
                "public_loader gives a metric by layers, and hooks serve no layer of this model that is a matrix: leave "
                "public_loader out"
            )
        random = np.random.default_rng(0)  # there is nothing to hide
        sums = looks.factors(bench, public_loader, random, public=True)
        count, trace = len(sums.traces), float(sums.traces.sum(1).median())
        if trace <= 0:
            raise ValueError("public_loader's records have no curvature: leave public_loader out")
        factors = [t / t.trace() if t.trace() > 0 else torch.eye(len(t)).to(t) / len(t) for t in sums.factors]
        return cls([shrunk(t, count) for t in factors], sums.shares / sums.shares.sum(), trace)


def measured(
    asked: Questions,
    loader: DataLoader[Any],
    bench: Workbench,
    rule: Rule,
    blocks: tuple[Block, ...],
    known: Known | None = None,
) -> Geometry:
    """Units from what is asked of the private records, and from what public ones show.

    Args:
        asked: the questions of the plan.
        loader: the private data.
        bench: the model where it stands.
        rule: what each question may cost, and how many dimensions take part.
        blocks: layers with a metric of their own.
        known: what public records show, if there are any.

    **Privacy:** charged before it is drawn, factors and shares together, and the curvature.
    """
    random, price = asked.books.noise.source(), curves.bounded_range_within(rule.scale_mu)
    if not blocks:
        trace = asked.quantile("scale", looks.traces(bench, loader, random), 0.5, price)
        return Geometry(None, trace / rule.dimensions, rule.dimensions)
    sums = looks.factors(bench, loader, random)
    factors, shares = _released(asked, sums, rule)
    deviation = 1 / rule.factor_mu / asked.size
    edges = [edge(len(t), deviation) for t in factors]
    if known is not None and rule.head:
        trace = known.trace
    else:
        trace = asked.quantile("scale", sums.traces.sum(1).numpy(), 0.5, price)
    if known is not None:
        spectra = [_informed(*t) for t in zip(known.factors, factors, edges, strict=True)]
    elif rule.head:
        dampings = [_HEAD_DAMPING * e for e in edges]
        roots = tuple(Spectrum.of(t).root(d) for t, d in zip(factors, dampings, strict=True))
        return Geometry(Metric(blocks, ((roots[0], roots[1]),)), trace * math.prod(dampings), rule.dimensions)
    else:
        spectra = [Spectrum.of(t).seen(e) for t, e in zip(factors, edges, strict=True)]
    shares = _seen(shares, deviation, torch.zeros_like(shares) if known is None else known.shares)
    return _whitened(blocks, spectra, (trace * shares).tolist(), rule)


def _released(asked: Questions, sums: FactorSums, rule: Rule) -> tuple[list[Tensor], Tensor]:
    """The means of the factors A and B of one block after the other, and of the shares, with noise; one layer has all."""
    n, deviation, matrices = asked.size, 1 / rule.factor_mu, sums.factors
    shares = sums.shares if rule.layers > 1 else sums.shares[:0]

    def noisy() -> Tensor:
        noise, source = asked.books.noise, asked.books.noise.source()
        parts = [noise.added(t, symmetric_noise(len(t), source), deviation) for t in matrices]
        if len(shares):
            parts.append(noise.added(shares, source.standard_normal(len(shares)), deviation))
        return torch.cat([part.flatten() for part in parts])

    sizes = [*(t.numel() for t in matrices), len(shares)]
    like = torch.zeros(sum(sizes), dtype=torch.float64)
    *parts, told = torch.split(asked.ask("metric", noisy, like, mu=rule.metric_mu) / n, sizes)
    factors = [part.view_as(t) for part, t in zip(parts, matrices, strict=True)]
    return factors, told if len(shares) else torch.ones(1, dtype=torch.float64)


def _informed(known: Tensor, told: Tensor, beyond: float) -> Spectrum:
    """Of a factor that public records show and private ones correct; where these have none, that of the public ones."""
    found = Spectrum.of(corrected(known, told, beyond))
    return found if float(found.values.max()) > beyond else Spectrum.of(known)


def _seen(told: Tensor, deviation: float, known: Tensor) -> Tensor:
    """Shares that are known, or told where they differ by more than noise; all equal where nothing is left."""
    found = torch.where((told - known).abs() > _SEEN * deviation, told, known).clamp(min=0)
    return found / found.sum() if bool(found.any()) else torch.full_like(found, 1 / len(found))


def _whitened(blocks: tuple[Block, ...], spectra: Sequence[Spectrum], traces: Sequence[float], rule: Rule) -> Geometry:
    """Units in which as many dimensions take part as the budget pays for.

    Args:
        blocks: layers.
        spectra: of A and B of one block after the other.
        traces: h of each block.
        rule: says how many dimensions.
    """
    pairs = list(zip(spectra[::2], spectra[1::2], strict=True))
    curving = torch.cat(
        [(h * torch.outer(b.values, a.values)).flatten() for h, (a, b) in zip(traces, pairs, strict=True)]
    )
    damping = damping_of(curving, rule.dimensions, _LEAST_DAMPING * float(curving.max()))
    dimensions = float((curving / (curving + damping)).sum())
    return Geometry(Metric.damped(blocks, pairs, traces, damping), damping, dimensions)
