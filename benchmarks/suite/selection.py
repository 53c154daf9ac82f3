"""What it costs to try several private runs and to keep the best one.

Papernot and Steinke, "Hyperparameter tuning with Rényi differential privacy", ICLR 2022 (https://arxiv.org/abs/2110.03620):
the number of runs is random and is not told. ``dp_accounting`` has the same bounds as its RepeatAndSelect event.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from opacus.accountants.analysis import rdp as subsampled
from scipy.optimize import brentq

from opacus_expm import _check

Array = npt.NDArray[np.float64]

# Opacus's sum over integer orders ends where a binomial coefficient is no longer a double, shortly above 1,024.
ORDERS: Array = np.array(
    [1 + x / 10 for x in range(1, 100)]
    + [*range(11, 64), 64, 80, 96, 128, 160, 192, 256, 320, 384, 512, 640, 768, 1024],
    dtype=np.float64,
)


@dataclass(frozen=True)
class Trials:
    """How many runs are tried, at random; the best of them is kept and nothing else is told.

    Attributes:
        mean: of the number of runs, greater than 1.
        shape: η of the truncated negative binomial distribution: 0 is the logarithmic, 1 the geometric distribution. In the
            limit, ``math.inf`` stands for the Poisson distribution, which may also give no run at all.
    """

    mean: float
    shape: float

    def __post_init__(self) -> None:
        _check.positive("mean", self.mean)
        if self.mean <= 1:
            raise ValueError(f"mean must be greater than 1, got {self.mean!r}")
        if math.isnan(self.shape) or self.shape < 0:
            raise ValueError(f"shape must be 0 or greater, or math.inf, got {self.shape!r}")

    @property
    def gamma(self) -> float:
        """γ in (0, 1) of the truncated negative binomial distribution, from its mean.

        E[K] = η(1 − γ)/(γ(1 − γ^η)), and (1/γ − 1)/log(1/γ) at η = 0 (Papernot and Steinke, definition 1).
        """

        def excess(log_gamma: float) -> float:
            shortfall = -math.expm1(log_gamma) / math.exp(log_gamma)  # 1/γ − 1
            if self.shape == 0:
                return shortfall / -log_gamma - self.mean
            return self.shape * shortfall / -math.expm1(self.shape * log_gamma) - self.mean

        low = -1.0
        while excess(low) < 0:
            low *= 2
        return math.exp(brentq(excess, low, -1e-9, xtol=1e-12))

    def draw(self, generator: np.random.Generator) -> int:
        """A number of runs."""
        if self.shape == math.inf:
            return int(generator.poisson(self.mean))
        if self.shape == 0:
            return int(generator.logseries(1 - self.gamma))
        while True:
            number = int(generator.negative_binomial(self.shape, self.gamma))
            if number > 0:
                return number

    def rdp(self, curve: Array) -> Array:
        """Rényi DP of the best run at every order of ``ORDERS``, from that of one run.

        Theorem 2 for the truncated negative binomial distribution, at any λ > 1 and λ̂ ≥ 1: ε(λ) +
        (1 + η)((1 − 1/λ̂)ε(λ̂) + log(1/γ)/λ̂) + log E[K]/(λ − 1); we take the best λ̂. Theorem 6 for the Poisson
        distribution: ε(λ) + E[K]·δ̂ + log E[K]/(λ − 1) where one run is (ε̂, δ̂)-DP with e^ε̂ = 1 + 1/(λ − 1).

        **Privacy:** a valid bound where every run, whatever its settings, has Rényi DP ``curve``, the settings of each are
        drawn at random without looking at the data, and the score by which the best is kept is a part of its run's result.
        """
        spread = math.log(self.mean) / (ORDERS - 1)
        if self.shape == math.inf:
            failures = np.array([_delta(curve, math.log1p(1 / (order - 1))) for order in ORDERS])
            found = curve + self.mean * failures + spread
        else:
            charge = (1 - 1 / ORDERS) * curve - math.log(self.gamma) / ORDERS
            found = curve + (1 + self.shape) * charge.min() + spread
        # The divergence grows with its order, so a bound at a larger order is one here too.
        smallest: Array = np.minimum.accumulate(found[::-1])[::-1]
        return smallest


def dp_sgd_rdp(noise_multiplier: float, steps_per_epoch: int, epochs: int) -> Array:
    """Rényi DP of DP-SGD with Poisson batches at every order of ``ORDERS``, as Opacus computes it."""
    found: Array = np.asarray(
        subsampled.compute_rdp(
            q=1 / steps_per_epoch,
            noise_multiplier=noise_multiplier,
            steps=steps_per_epoch * epochs,
            orders=ORDERS.tolist(),
        )
    )
    return found


def epsilon_of(curve: Array, delta: float) -> float:
    """The least ε at δ that follows from Rényi DP: Canonne, Kamath and Steinke 2020, proposition 12."""
    found = curve + np.log1p(-1 / ORDERS) - (math.log(delta) + np.log(ORDERS)) / (ORDERS - 1)
    return max(0.0, float(found.min()))


def _delta(curve: Array, epsilon: float) -> float:
    """The least δ at ε, by the same proposition."""
    exponent = (ORDERS - 1) * (curve - epsilon + np.log1p(-1 / ORDERS)) - np.log(ORDERS)
    return min(1.0, math.exp(min(0.0, float(exponent.min()))))
