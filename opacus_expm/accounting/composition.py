"""What a list of events costs together: the least of several valid totals.

An event, which is called a release here whatever its kind, is given by (ε_range, μ), one of which may be infinite. A run of
DP-SGD steps is given by Opacus's (noise_multiplier, sample_rate, steps). Valid totals at δ:

* ``pure``: Σ of the pure ε, which is ε_range, or half of it for a draw whose loss lies in [−ε, ε]; DP-SGD steps add
  Opacus's own ε(δ) (basic composition).
* ``exact``: for a single release, the closed (ε, δ) curve of bounded-range mechanisms.
* ``basic``: one release at δ by its own curve, the others pure.
* ``gdp``: Gaussian composition √Σμ² of releases, μ being the release's own or that of its range
  (``curves.bounded_range_mu``), whichever is less.
* ``rdp``: Rényi curves added and converted; a release's is the smaller of its bounded-range and its Gaussian curve.
* ``prv``: numerical composition with Opacus's machinery, on the upper side of its error. A release is represented by a
  pair of laws that dominates it. For the bounded-range side: the (ε′, δ) curve h(γ) = (1 − √γ·e^{−ε/2})²/(1 − e^{−ε}),
  γ = e^{ε′} ∈ [e^{−ε}, e^ε], is convex in γ, so it is the curve of a dominating pair (Zhu, Dong, Wang, *Optimal
  Accounting of Differential Privacy via Characteristic Function*, AISTATS 2022), whose likelihood ratio has density
  h″(γ) under the second law: **its privacy loss has density proportional to e^{ℓ/2} on [−ε, ε]**. Dominating pairs
  compose.

These totals hold for events whose budgets were fixed in advance. Where a later budget is chosen after looking at
earlier releases, only a ``filters.Filter`` declared first gives a guarantee.
"""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from opacus.accountants.analysis.prv import (
    Domain,
    PoissonSubsampledGaussianPRV,
    TruncatedPrivacyRandomVariable,
    compose_heterogeneous,
    discretize,
)
from opacus.accountants.analysis.rdp import compute_rdp, get_privacy_spent
from scipy.optimize import brentq
from scipy.special import ndtr

from opacus_expm.accounting.events import Cost, Steps
from opacus_expm.mechanism import curves
from opacus_expm.mechanism.density import Array

ORDERS = tuple([1 + x / 10 for x in range(1, 100)] + list(range(11, 64)) + [64, 80, 96, 128, 192, 256, 384, 512, 1024])
_MAX_REACH = 700.0  # e^t overflows beyond
_MAX_PAIRS = 32  # different ones; each takes time, and a Rényi total is as good for many
_PRECISION = 1e-3  # of ε in the numerical composition, where the points allow it
_MAX_POINTS = 2**21  # of the numerical composition
_MAX_NOISE = 100.0  # of a run, in units of what it would need alone
_FFT_SLACK = 1e-13  # rounding of the fast Fourier transform, left out of δ


@dataclass(frozen=True)
class Total:
    """ε at the δ that was asked for, and the bound that gave it."""

    epsilon: float
    method: str


_NO_BOUND = Total(math.inf, "no bound at this delta")


def total_epsilon(events: Sequence[Cost], steps: Sequence[Steps], delta: float) -> Total:
    """The least valid ε at δ of releases and DP-SGD steps on the same data.

    Draws made in secure mode are within a total variation of the exact mechanism; with Σ the sum of these, an (ε, δ)
    statement about the exact mechanisms is an (ε, δ + (1+e^ε)Σ) statement about the draws.
    """
    if not events and not steps:
        return Total(0.0, "nothing released")
    failure = math.fsum(e.failure_probability for e in events)
    events, steps = with_runs(events, steps)
    if failure > 0:
        pure = math.fsum(e.epsilon_pure for e in events)
        candidates = [Total(pure, "pure")] if not steps and failure_delta(pure, failure) <= delta else []
        extra = failure_delta(exact_total(events, steps, delta / 2).epsilon, failure)
        if extra <= delta / 2:  # ε at δ − extra is at most ε at δ/2, which extra was computed for
            candidates.append(exact_total(events, steps, delta - extra))
        return min(candidates, key=lambda t: t.epsilon, default=_NO_BOUND)
    return exact_total(events, steps, delta)


def with_runs(events: Sequence[Cost], steps: Sequence[Steps]) -> tuple[list[Cost], list[Steps]]:
    """The same charges, where events that consist of DP-SGD steps are counted among the steps."""
    return [e for e in events if not e.runs], [*steps, *(run for e in events for run in e.runs)]


@lru_cache(maxsize=64)
def least_noise(epsilon: float, delta: float, mu: float, sample_rate: float, steps: int) -> float:
    """The noise multiplier of a run of Poisson-sampled sums that costs (ε, δ) together with events that are μ-GDP together.

    By numerical composition, on the upper side of its error; the search ends on the private side of the root.

    Raises:
        ValueError: the other events alone cost more, or as much.
    """
    precision = max(_PRECISION, 2e-3 * epsilon)

    def excess(log_noise: float) -> float:
        run = (math.exp(log_noise), sample_rate, steps)
        return _composed_epsilon([GaussianPRV(mu)] if mu > 0 else [], [run], delta, precision) - epsilon

    whole = curves.gaussian_mu(epsilon, delta)
    if mu >= whole:
        raise ValueError("the other events cost more than (epsilon, delta), or as much")
    left = math.sqrt(whole**2 - mu**2)
    start = high = math.log(max(0.4, 1.1 * sample_rate * math.sqrt(steps) / left))
    while not excess(high) <= 0:
        high += 0.2
        if high > start + math.log(_MAX_NOISE):
            raise ValueError("the other events leave nothing of (epsilon, delta) for a run")
    low = high - 0.3
    while excess(low) <= 0:
        high, low = low, low - 0.3
    if not math.isfinite(excess(low)):  # beyond what can be composed; the high end is valid
        return math.exp(high)
    root = float(brentq(excess, low, high, xtol=5e-4, rtol=1e-6))
    while excess(root) > 0:
        root += 5e-4
    return math.exp(root)


def failure_delta(epsilon: float, failure: float) -> float:
    """What draws that are not exact add to δ: (1+e^ε)·failure, where ``failure`` is the sum of their total variations."""
    return (1 + math.exp(min(epsilon, 700.0))) * failure


def delta_beside_failures(epsilon: float, delta: float, failure: float) -> float:
    """The δ at which exact draws have to cost ε, so that draws within ``failure`` of them are (ε, δ)-DP together.

    A little less, so that ``total_epsilon``, which counts failures at a somewhat larger ε, says so too.

    Raises:
        ValueError: failures alone take δ.
    """
    left = delta - (failure_delta(epsilon + 1, failure) if failure > 0 else 0.0)
    if left <= delta / 2:
        raise ValueError(
            f"delta must be greater than {2 * failure_delta(epsilon + 1, failure):.2g} at epsilon={epsilon:g} in "
            f"secure_mode, whose draws are within {failure:.2g} of exact ones, got {delta!r}; ask for a smaller epsilon or "
            "a larger delta"
        )
    return left


def exact_total(events: Sequence[Cost], steps: Sequence[Steps], delta: float) -> Total:
    """The least valid ε at δ if every draw were exact."""
    events, steps = with_runs(events, steps)
    pure = math.fsum(e.epsilon_pure for e in events)
    candidates = [Total(pure, "pure")] if not steps and pure < math.inf else []
    if delta > 0:
        candidates.append(Total(_rdp_epsilon(events, steps, delta), "rdp"))
        if steps and events:
            candidates.append(Total(pure + _steps_epsilon(steps, delta), "pure"))
        if len(events) == 1 and not steps:
            candidates.append(Total(curves.bounded_range_epsilon(events[0].epsilon_range, delta), "exact"))
        if len(events) > 1 and not steps:
            candidates.append(Total(_basic_epsilon(events, delta), "basic"))
        if events and not steps:
            candidates.append(Total(curves.gaussian_epsilon(gaussian_total(events), delta), "gdp"))
        if steps or len(events) > 1:
            candidates.append(Total(_prv_epsilon(events, steps, delta), "prv"))
    return min(candidates, key=lambda t: t.epsilon, default=_NO_BOUND)


def _basic_epsilon(events: Sequence[Cost], delta: float) -> float:
    """Basic composition: the event that gains most from δ counts by its own curve, and the others by their pure ε."""
    gains = [(e.epsilon_pure - _single_epsilon(e, delta), i) for i, e in enumerate(events)]
    chosen = max(gains)[1]
    others = math.fsum(e.epsilon_pure for i, e in enumerate(events) if i != chosen)
    return others + _single_epsilon(events[chosen], delta)


def gaussian_total(events: Sequence[Cost]) -> float:
    """The μ of all events together, √Σμ², where each counts with its own μ or that of its range, whichever is less."""
    return math.hypot(*(min(e.mu, curves.bounded_range_mu(e.epsilon_range)) for e in events))


def _single_epsilon(event: Cost, delta: float) -> float:
    """ε at δ of one release by its own two curves."""
    gaussian = curves.gaussian_epsilon(event.mu, delta)
    return min(curves.bounded_range_epsilon(event.epsilon_range, delta), gaussian)


def release_rdp(epsilon_range: float, mu: float, order: float) -> float:
    """Rényi divergence of a release: the smaller of its two curves."""
    return min(curves.bounded_range_rdp(epsilon_range, order), order * mu**2 / 2)


def steps_rdp(steps: Steps, orders: tuple[float, ...]) -> Array:
    """Rényi divergences of a run of DP-SGD steps, by Opacus."""
    noise_multiplier, sample_rate, count = steps
    return count * _step_rdp(noise_multiplier, sample_rate, orders)


@lru_cache(maxsize=64)
def _step_rdp(noise_multiplier: float, sample_rate: float, orders: tuple[float, ...]) -> Array:
    """Rényi divergences of one DP-SGD step."""
    return np.atleast_1d(compute_rdp(q=sample_rate, noise_multiplier=noise_multiplier, steps=1, orders=orders))


def _rdp_epsilon(events: Sequence[Cost], steps: Sequence[Steps], delta: float) -> float:
    """Rényi composition, converted by Opacus."""
    numbers = Counter((e.epsilon_range, e.mu) for e in events)
    return _convert(
        np.array([math.fsum(n * release_rdp(*e, a) for e, n in numbers.items()) for a in ORDERS]), steps, delta
    )


def _convert(rdp: Array, steps: Sequence[Steps], delta: float) -> float:
    """ε at δ of Rényi divergences over ``ORDERS``, to which those of DP-SGD steps are added."""
    for run in steps:
        rdp = rdp + steps_rdp(run, ORDERS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "optimal order is the largest alpha": the bound is valid all the same
        epsilon, _ = get_privacy_spent(orders=list(ORDERS), rdp=rdp, delta=delta)
    return max(0.0, float(epsilon))


def _steps_epsilon(steps: Sequence[Steps], delta: float) -> float:
    """ε of DP-SGD steps alone, the better of Opacus's two tight accountants."""
    return min(_rdp_epsilon([], steps, delta), _prv_epsilon([], steps, delta))


# --- numerical composition ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BoundedRangePRV:
    """Privacy loss of the pair that dominates an ε-bounded-range release: density ∝ e^{t/2} on [−ε, ε]."""

    epsilon: float

    def cdf(self, t: Any) -> Any:
        """The distribution function, (e^{t/2} − e^{−ε/2})/(e^{ε/2} − e^{−ε/2}) on [−ε, ε]."""
        inside = np.clip(t, -self.epsilon, self.epsilon)
        return np.exp((inside - self.epsilon) / 2) * np.expm1(-(inside + self.epsilon) / 2) / np.expm1(-self.epsilon)

    def rdp(self, order: float) -> float:
        """The Rényi divergence of order α, ln[sinh((α−½)ε)/((2α−1) sinh(ε/2))]/(α−1).

        It lies above ``curves.bounded_range_rdp``, because the pair dominates the release.
        """

        def log_sinh(x: float) -> float:
            return x + math.log(-math.expm1(-2 * x) / 2)

        high, low = log_sinh((order - 0.5) * self.epsilon), log_sinh(self.epsilon / 2)
        return min(self.epsilon, (high - low - math.log(2 * order - 1)) / (order - 1) + 1e-13)


@dataclass(frozen=True)
class GaussianPRV:
    """Privacy loss of two unit Gaussians at distance μ: normal with mean μ²/2 and standard deviation μ."""

    mu: float

    def cdf(self, t: Any) -> Any:
        """The distribution function, Φ((t − μ²/2)/μ)."""
        return ndtr((t - self.mu**2 / 2) / self.mu)

    def rdp(self, order: float) -> float:
        """The Rényi divergence of order α, αμ²/2."""
        return order * self.mu**2 / 2


Pair = BoundedRangePRV | GaussianPRV


def _prv_epsilon(events: Sequence[Cost], steps: Sequence[Steps], delta: float) -> float:
    """Numerical composition by the ranges, or by every μ that is finite, whichever is less."""
    ranges: list[Pair] = [BoundedRangePRV(e.epsilon_range) for e in events]
    mus = [GaussianPRV(e.mu) if math.isfinite(e.mu) else BoundedRangePRV(e.epsilon_range) for e in events]
    choices = [ranges] if ranges == mus else [ranges, mus]
    together = gaussian_total(events) if events else 0.0
    if steps and 0 < together < math.inf:  # one pair in the place of many, which costs less time
        choices.append([GaussianPRV(together)])
    finite = [pairs for pairs in choices if BoundedRangePRV(math.inf) not in pairs]
    return min((_composed_epsilon(pairs, steps, delta) for pairs in finite), default=math.inf)


def _composed_epsilon(
    pairs: Sequence[Pair], steps: Sequence[Steps], delta: float, precision: float = _PRECISION
) -> float:
    """The upper end of the numerical composition's error interval; infinite where no such composition can be made."""
    counts: dict[Any, int] = dict(Counter(pairs))
    if len(counts) > _MAX_PAIRS:
        return math.inf
    prvs, numbers = list(counts), list(counts.values())
    for noise_multiplier, sample_rate, count in steps:
        if sample_rate < 1:
            prvs.append(PoissonSubsampledGaussianPRV(sample_rate, noise_multiplier))
        else:
            prvs.append(GaussianPRV(1 / noise_multiplier))
        numbers.append(count)
    compositions = sum(numbers)
    # The domain must hold the total, and each single loss, up to a small part of δ (Gopi, Lee, Wutschitz, 2021).
    delta_error = delta / 1000
    # The tails are those of the pairs: a release's own Rényi curve is smaller than that of a pair that dominates it.
    rdp = np.array([math.fsum(n * pair.rdp(a) for pair, n in counts.items()) for a in ORDERS])
    reach = _convert(rdp, steps, delta_error / 4)
    for pair in counts:
        reach = max(reach, _convert(np.array([pair.rdp(a) for a in ORDERS]), [], delta_error / (8 * compositions)))
    for noise_multiplier, sample_rate, _ in steps:
        one = [(noise_multiplier, sample_rate, 1)]
        reach = max(reach, _convert(np.zeros(len(ORDERS)), one, delta_error / (8 * compositions)))
    if not reach < _MAX_REACH:
        return math.inf
    root = math.sqrt(compositions * math.log(12 / delta_error) / 2)
    half_width = reach + 3
    eps_error = max(precision, 2 * half_width * root / _MAX_POINTS)
    domain = Domain.create_aligned(-half_width, half_width, eps_error / root)
    try:
        pieces = [discretize(TruncatedPrivacyRandomVariable(p, domain.t_min, domain.t_max), domain) for p in prvs]
        composed = compose_heterogeneous(dprvs=pieces, num_self_compositions=numbers)
        upper = composed.compute_epsilon(delta - _FFT_SLACK, delta_error, eps_error)[2]
    except (RuntimeError, ValueError, IndexError):  # δ too small for floating point, or beyond the domain
        return math.inf
    return max(0.0, float(upper)) if math.isfinite(upper) else math.inf
