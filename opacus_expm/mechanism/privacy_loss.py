"""What a draw reveals of which of two densities it came from: the privacy loss between neighbouring data sets.

With p and q the mechanism's densities on two data sets, both Gaussians truncated to the same ball, the privacy loss is
L(ξ) = ln p(ξ) − ln q(ξ), a quadratic function of ξ. A mechanism is ε-DP if and only if |L| ≤ ε on the ball for all
neighbours, and (ε, δ)-DP if and only if the hockey-stick divergences E_p[(1 − e^{ε−L})₊] and E_q[(1 − e^{ε+L})₊] are at
most δ. Three ways to find out:

* ``largest``: max |L|, exact in every dimension, with the normalisers of ``density``;
* ``Quadrature``: up to three dimensions, the whole trade-off, with normalisers of its own;
* ``Sampled``: in every dimension, at draws; lower bounds.

**Privacy:** all of it is computed from private densities. It is for auditors, on data of their own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy.optimize import brentq
from scipy.special import logsumexp

from opacus_expm import _check
from opacus_expm._private import PrivateValues
from opacus_expm.mechanism.density import Array, BallGaussian
from opacus_expm.mechanism.sampling import Exact

QUADRATURE_DIM = 3  # dimensions in which the ball can be covered with nodes
_ORDERS = {1: 256, 2: 12, 3: 6}  # Gauss-Legendre nodes a panel
_PANELS = np.concatenate([np.arange(0.0, 9.0), 8.0 * 2.0 ** np.arange(1, 22)])  # where panels end, in widths
_GRID = np.geomspace(1e-3, 1e3, 701)  # of ε: steps of 2 %
_RESOLVED = 1e-5  # how far quadrature's normalisers may be from the exact ones, in logarithms


@dataclass(frozen=True, repr=False, eq=False)
class PrivacyLoss(PrivateValues):
    """L = ln p − ln q of two densities on one ball.

    Args:
        before: p.
        after: q.

    **Privacy:** holds private values; ``repr`` shows shapes only, and pickling is refused.
    """

    before: BallGaussian
    after: BallGaussian

    def __post_init__(self) -> None:
        if self.before.dim != self.after.dim:
            raise ValueError(f"the densities have {self.before.dim} and {self.after.dim} dimensions: they must agree")

    def at(self, points: Array) -> Array:
        """The loss L at rows ξ of the ball."""
        return self.before.log_density(points) - self.after.log_density(points)

    def largest(self) -> float:
        """Max |L| over the ball: the least ε for which this pair is ε-indistinguishable; infinite for unequal balls.

        L is a quadratic plus the difference of the normalisers; its extrema over a ball are trust-region problems, whose
        solutions are known in closed form up to one scalar equation (``_highest``).
        """
        if self.before.radius != self.after.radius:
            return math.inf
        (p, b), (p_after, b_after) = _natural(self.before), _natural(self.after)
        constant = self.after.log_normalizer() - self.before.log_normalizer()
        rise = _highest(p_after - p, b - b_after, self.before.radius) + constant
        fall = _highest(p - p_after, b_after - b, self.before.radius) - constant
        return max(rise, fall)

    def __repr__(self) -> str:
        return f"PrivacyLoss(dim={self.before.dim}, private values hidden)"


def _natural(density: BallGaussian) -> tuple[Array, Array]:
    """The precision P and the linear term b in the coordinates of ξ."""
    if density.basis is None:
        return np.diag(density.precision), density.linear
    return (density.basis * density.precision) @ density.basis.T, density.basis @ density.linear


def _highest(matrix: Array, vector: Array, radius: float) -> float:
    """Max of ½ξᵀMξ + vᵀξ over |ξ| ≤ R, for a symmetric M of any signs.

    ξ is a maximiser if and only if (μI − M)ξ = v for a μ ≥ max(0, λ_max) with μ(R − |ξ|) = 0 (Moré and Sorensen,
    *Computing a trust region step*, 1983). |(μI − M)⁻¹v| falls in μ; where it is below R at μ = λ_max already, a multiple
    of the top eigenvector fills the gap. What is returned is the value at a point of the ball, so that rounding cannot
    make it too large.
    """
    values, vectors = np.linalg.eigh(matrix)
    u = vectors.T @ vector
    floor = max(0.0, float(values[-1]))
    below = floor - values  # of which the last is 0, unless M is negative definite
    length = float(np.linalg.norm(u))
    scale = max(float(np.abs(values).max()), length / radius)
    if scale == 0:
        return 0.0

    def reach(gap: float) -> float:  # with μ = floor + gap
        return float(np.linalg.norm(u / (gap + below))) - radius

    least = 1e-14 * scale
    if reach(least) > 0:
        z = u / (brentq(reach, least, least + 1.01 * length / radius, xtol=1e-300, rtol=1e-14) + below)
        z *= radius / np.linalg.norm(z)
    else:
        z = np.where(below > least, u / np.maximum(below, least), 0.0)
        if below[-1] == 0:
            z[-1] = math.copysign(math.sqrt(max(0.0, radius**2 - float(z[:-1] @ z[:-1]))), u[-1])
        z *= min(1.0, radius / max(float(np.linalg.norm(z)), 1e-300))
    return float(0.5 * z**2 @ values + z @ u)


class Quadrature:
    """The loss at nodes that cover the ball, with weights: sums over them are integrals, in up to three dimensions.

    The nodes know nothing of ``BallGaussian.log_normalizer``, to which the normalisers found here are compared.

    Args:
        loss: the pair.

    Raises:
        ValueError: more than three dimensions, or densities so unlike that the nodes of p do not resolve q.
    """

    def __init__(self, loss: PrivacyLoss):
        if loss.before.dim > QUADRATURE_DIM:
            raise ValueError(f"quadrature serves up to {QUADRATURE_DIM} dimensions, got {loss.before.dim}; use Sampled")
        points, log_weights = _nodes(loss.before)
        log_p, log_q = loss.before.exponent(points) + log_weights, loss.after.exponent(points) + log_weights
        p_total, q_total = float(logsumexp(log_p)), float(logsumexp(log_q))
        for density, total in ((loss.before, p_total), (loss.after, q_total)):
            if abs(total - density.log_normalizer()) > _RESOLVED:
                raise ValueError("quadrature does not resolve densities this unlike; use largest() or Sampled")
        self._p, self._q = np.exp(log_p - p_total), np.exp(log_q - q_total)
        self._loss: Array = (log_p - p_total) - (log_q - q_total)

    def largest(self) -> float:
        """Max |L| over the nodes."""
        return float(np.abs(self._loss).max())

    def delta(self, epsilon: float) -> float:
        """The least δ for which this pair is (ε, δ)-indistinguishable, in both directions."""
        with np.errstate(over="ignore"):
            forth = self._p @ np.maximum(-np.expm1(epsilon - self._loss), 0.0)
            back = self._q @ np.maximum(-np.expm1(epsilon + self._loss), 0.0)
        return float(max(forth, back))

    def epsilon(self, delta: float) -> float:
        """The least ε for which this pair is (ε, δ)-indistinguishable."""
        if delta == 0:
            return self.largest()
        if self.delta(0.0) <= delta:
            return 0.0
        return float(brentq(lambda e: self.delta(e) - delta, 0.0, self.largest(), xtol=1e-12, rtol=1e-12))


def _nodes(density: BallGaussian) -> tuple[Array, Array]:
    """Nodes ξ in the ball and the logarithms of their weights, dense where the density is.

    Coordinate after coordinate, x_j = s_j sin θ_j with s_{j+1} = s_j cos θ_j, which maps a box of angles to the ball and
    leaves the integrand smooth at its edge. The tilted Gaussian of the sampler (``density.tilt``), which resembles the
    truncated one, tells for each coordinate given those before where and how wide the density is: panels have that width
    around that place and grow geometrically beyond. The first axis points to the tilted Gaussian's mean.
    """
    w, b = density.unit()
    dim = density.dim
    tilted = w + density.tilt()
    mean = b / tilted
    frame = np.linalg.qr(np.column_stack([mean, np.eye(dim)]) if np.any(mean) else np.eye(dim))[0]
    precision, linear = (frame.T * tilted) @ frame, frame.T @ b
    steps = np.concatenate([-_PANELS[:0:-1], _PANELS])
    knots, gauss = np.polynomial.legendre.leggauss(_ORDERS[dim])
    x, half, log_weights = np.zeros((1, 0)), np.ones(1), np.zeros(1)
    for j in range(dim):
        covariance = np.linalg.inv(precision[j:, j:])
        place = (linear[j:] - x @ precision[j:, :j].T) @ covariance[0]
        centre = np.arcsin(np.clip(place / half, -1.0, 1.0))
        width = np.minimum(math.sqrt(covariance[0, 0]) / half, 0.5)
        edges = np.clip(centre[:, None] + width[:, None] * steps, -math.pi / 2, math.pi / 2)
        edges[:, 0], edges[:, -1] = -math.pi / 2, math.pi / 2
        span = np.diff(edges) / 2
        row, panel = np.nonzero(span > 0)
        angle = (edges[row, panel] + span[row, panel])[:, None] + span[row, panel][:, None] * knots
        row = np.repeat(row, knots.size)
        angle, share = angle.ravel(), (span[span > 0][:, None] * gauss).ravel()
        cosine = np.maximum(np.cos(angle), 1e-300)
        x = np.column_stack([x[row], half[row] * np.sin(angle)])
        log_weights = log_weights[row] + np.log(half[row] * cosine * share)
        half = half[row] * cosine
    return density.from_unit(x @ frame.T), log_weights + dim * math.log(density.radius)


class Sampled:
    """The loss at exact draws from either density: lower bounds, in any dimension.

    Args:
        loss: the pair.
        draws: from each of the two.
        generator: source of randomness.
        confidence: probability with which ``epsilon`` is a lower bound.
    """

    def __init__(self, loss: PrivacyLoss, draws: int, generator: np.random.Generator, confidence: float = 0.95):
        _check.positive_int("draws", draws)
        from_p = loss.at(Exact().sample(loss.before, generator, draws))
        from_q = -loss.at(Exact().sample(loss.after, generator, draws))
        self._samples, self._confidence = (from_p, from_q), confidence

    def largest(self) -> float:
        """Max |L| over the draws."""
        return max(float(np.abs(sample).max()) for sample in self._samples)

    def delta(self, epsilon: float) -> float:
        """An estimate of the least δ at ε, from the draws."""
        return max(float(self._terms(sample, epsilon).mean()) for sample in self._samples)

    def delta_bound(self, epsilon: float) -> float:
        """Lower bound on the least δ at ε: Maurer and Pontil's empirical Bernstein bound (COLT 2009), in each direction."""
        log_term = math.log(2 * len(self._samples) / (1 - self._confidence))
        bounds = []
        for sample in self._samples:
            terms = self._terms(sample, epsilon)
            spread = math.sqrt(2 * float(terms.var(ddof=1)) * log_term / terms.size)
            bounds.append(float(terms.mean()) - spread - 7 * log_term / (3 * (terms.size - 1)))
        return max(0.0, *bounds)

    def epsilon(self, delta: float) -> float:
        """Lower bound on the least ε at δ; at δ = 0 the largest loss seen.

        The last point of a fixed grid up to which every ``delta_bound`` is above δ. The least grid point from the true ε on
        is a fixed number; the result can pass it only if the bound there fails, so the confidence is that of one bound.
        """
        if delta == 0:
            return self.largest()
        found = 0.0
        for epsilon in _GRID[self.largest() > _GRID]:
            if self.delta_bound(float(epsilon)) <= delta:
                break
            found = float(epsilon)
        return found

    @staticmethod
    def _terms(sample: Array, epsilon: float) -> Array:
        """The terms (1 − e^{ε−L})₊, whose mean over draws is δ at ε."""
        terms: Array = np.maximum(-np.expm1(epsilon - sample), 0.0)
        return terms
