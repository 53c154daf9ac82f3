"""Draws from a Gaussian truncated to a ball.

``Exact`` is the only sampler that the privacy guarantee covers; only algorithms with a proof of exactness are admitted to
it (the source paper's samplers are in ``opacus_expm.paper``). It works in the eigenbasis and in units of R (see
``density``). "Exact" is a statement about real arithmetic.

**Privacy:** a draw is what the mechanism releases; each one that leaves must be in the ledger. How many proposals it
took is private and is not reported.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from scipy.special import erfcx, ndtr

from opacus_expm.mechanism.density import Array, BallGaussian

_PROPOSAL_ELEMENTS = 2**18  # normals drawn at a time: 2 MiB, which stays in cache
_FIRST_BATCH = 256  # proposals; twice as many in each further batch
_SHARP = 31.0  # v of ``_Conditional`` from which on it is used: β₀s₀ ≥ ⅔v − ½ > 20 then


class Sampler(Protocol):
    """Anything that draws from a ``BallGaussian``."""

    def sample(self, density: BallGaussian, generator: np.random.Generator, draws: int = 1) -> Array:
        """Draws ξ, one a row."""


@dataclass(frozen=True)
class Exact:
    """Independent exact draws by rejection, from one of two proposals.

    *Tilted.* For any κ ≥ 0 the density is below e^{½κR²} times the Gaussian density with precision P + κI, so: draw
    ξ ~ Normal((P+κI)⁻¹b, (P+κI)⁻¹), accept if |ξ| ≤ R and then with probability exp(−½κ(R²−|ξ|²)). ``density.tilt``
    gives the κ that accepts most often: about 1/√(πk) of the proposals where the density is nearly flat, but only about
    1/√(2π|b|R) where it is peaked on the boundary.

    *Conditional* (``_Conditional``): for the second case. It comes first wherever it exists.

    When a batch accepts nothing, the other proposal makes the next one. Every draw ends: the tilted proposal accepts
    with a probability that is positive for every density, at least 1/√(2π(k+|b|R)). And it ends soon, whatever P and b
    are: one of the two accepts about 0.8/√(2k + 124) of its proposals, or more (``_Conditional``).

    Why the draws are exact although the choice of the proposal depends on the data and on what was rejected: let π be
    the law that is asked for. A proposal of either kind has Pr[it is accepted, and ξ ∈ A] = a·π(A) for every set A,
    with a constant a. So, given which proposals were accepted, the accepted ones are independent and have the law π.
    Which kind makes the next batch, and when the loop stops, depends on the density and on how many proposals were
    accepted, never on the values of the accepted ones. So the draws that are returned are independent, have the law π,
    and are independent of how many proposals were made and of which kind; that shows nowhere but in time.
    """

    def sample(self, density: BallGaussian, generator: np.random.Generator, draws: int = 1) -> Array:
        """Draws ξ, one a row, independent and exact."""
        kept: list[Array] = []
        missing = draws
        tilted = _Tilted(density)
        current: _Proposal = _Conditional.of(density) or tilted
        other: _Proposal = tilted
        most = max(1, _PROPOSAL_ELEMENTS // density.dim)
        rows = min(_FIRST_BATCH, most)
        while missing > 0:
            accepted = current.accepted(generator, rows)
            kept.append(accepted[:missing])
            missing -= len(kept[-1])
            if len(accepted) == 0:
                current, other = other, current
            rows = min(2 * rows, most)
        return density.from_unit(np.concatenate(kept))


class _Proposal(Protocol):
    """A law of proposals, each accepted with a constant times the ratio of the two densities as its probability."""

    def accepted(self, generator: np.random.Generator, rows: int) -> Array:
        """The accepted ones among ``rows`` proposals, in the unit ball."""


class _Tilted:
    """The tilted Gaussian proposal of ``Exact``."""

    def __init__(self, density: BallGaussian):
        w, b = density.unit()
        self._kappa = density.tilt()
        self._scale = 1.0 / np.sqrt(w + self._kappa)
        self._mean = b * self._scale**2

    def accepted(self, generator: np.random.Generator, rows: int) -> Array:
        """The accepted ones among ``rows`` proposals, in the unit ball."""
        z = self._mean + self._scale * generator.standard_normal((rows, self._scale.size))
        slack = 1.0 - np.einsum("ij,ij->i", z, z)
        kept: Array = z[(slack >= 0) & (generator.random(rows) < np.exp(-0.5 * self._kappa * np.maximum(slack, 0.0)))]
        return kept


@dataclass(frozen=True)
class _Conditional:
    """A proposal for densities peaked on the boundary: integrate out one direction.

    For any unit vector n write ξ = xn + y, y ⊥ n, ρ = |y|², p = nᵀPn, h = b_x − P_xy·y. The density of y is
    exp(−½yᵀP_yy y + b_y·y + K(ρ, h)) with

        K(ρ, h) = ln ∫_{|x| ≤ √(1−ρ)} exp(−½px² + hx) dx = h²/2p + L(ρ, h).

    L = ln ∫ exp(−½p(x − h/p)²) dx over {x² ≤ 1 − ρ} is jointly concave: the integrand is log-concave in (x, ρ, h) and
    so is its marginal (Prékopa). So L lies below each of its tangent planes, and with the plane at any (ρ₀, h₀)

        K(ρ, h) ≤ K₀ + K_ρ(ρ − ρ₀) + K_h(h − h₀) + (h − h₀)²/2p,

    whose right side is quadratic in y: propose y from that Gaussian, accept with the exponential of the difference,
    then draw x from its one-dimensional truncated normal. The Gaussian has precision P + τ(I − nnᵀ), τ = −2K_ρ,
    marginalised over x; with u = (P+τI)⁻¹Pn its covariance is the part orthogonal to n of (P+τI)⁻¹ + uuᵀ/(τ·nᵀu).

    *Direction and tangent point.* Let m = D⁻¹b and D⁻¹, D = P + κI, be mean and covariance of the tilted Gaussian, for
    which E|ξ|² = 1. It accepts rarely where |ξ|² varies by much more than 2/κ. Near m the largest part of this
    variation is 2m·(ξ−m), and moving along **n ∝ D⁻¹m** changes it while all that is independent of it stays as it is.
    On a line in this direction the ball ends at x = √(1−ρ) whatever that part was; what is left of the variation is
    that of |y|², and about 1/√(1 + tr D⁻²/(2mᵀD⁻¹m)) of the proposals are accepted. The tangent point is where the
    tilted Gaussian has its mean: h₀ = E[h] = (p+κ)n·m, and ρ₀ = E[ρ] = 1 − s₀² with s₀² = (n·m)² + nᵀD⁻¹n. No equation
    is solved for it.

    *A little tilt.* The term (h−h₀)²/2p takes curvature off y: it leaves (P_yy − P_yxP_xy/p) + τI, which can be far
    less than the D_yy − D_yxD_xy/(p+κ) of the tilted Gaussian, above all where P is nearly singular. So the density
    with P + κ₁I in place of P is drawn, 0 ≤ κ₁ ≤ κ/3, and accepted with probability exp(−½κ₁(1−|ξ|²)), about 1 − κ₁/κ;
    D stays the same if κ − κ₁ is written for κ. The determinants differ by the factor (a+κ₁)/(p+κ₁) · (p+κ)/(a+κ), a =
    1/(nᵀD⁻¹n) − κ ≤ p, so that (1−κ₁/κ)√((a+κ₁)/(p+κ₁)) is to be as large as possible. At worst, for a = 0 and p ≫ κ,
    this costs a factor ⅔·√⅓.

    *Where it exists.* With v = κ²mᵀD⁻¹m the tilted proposal accepts about 0.8/√(2κ²tr D⁻² + 4v), and κ²tr D⁻² ≤ k. So where
    v < 31 it accepts about 0.8/√(2k + 124) or more, and this one is not used. Elsewhere this one accepts about
    ⅔√⅓/√(1 + k/2v) or more, which is better, and the edge is sharp, as the closed forms of ``_edge_slopes`` need it: from
    D ⪰ κI follow κ(n·m)² ≥ v and, for the slope β₀ = h₀ − ps₀ of the exponent at the edge, with κ′ = κ − κ₁ ≥ ⅔κ,
    β₀s₀ ≥ κ′(n·m)² − κ(n·m)²/2v ≥ ⅔v − ½ > 20.
    """

    n: Array
    p: float
    coupling: Array  # P_xy
    h: float  # the tangent point h₀
    s: float  # s₀
    beta: float  # β₀
    k_rho: float
    k_h: float
    log_edge: float  # ln I at the tangent point, see _log_edge_integral
    scale: Array  # (P + τI)^{-1/2}
    spike: Array  # u/√(τ·nᵀu), orthogonal to n
    base: Array  # y at the tangent point: the part of m orthogonal to n
    offset: Array  # mean of y minus base
    extra_tilt: float  # κ₁, which w, p and the like already contain

    @classmethod
    def of(cls, density: BallGaussian) -> _Conditional | None:
        """The proposal for a density, or None where the tilted one serves."""
        w, b = density.unit()
        kappa = density.tilt()
        inverse = 1.0 / np.maximum(w + kappa, 1e-300)
        mode = b * inverse
        if not kappa**2 * float(mode @ (mode * inverse)) >= _SHARP:
            return None
        n = mode * inverse
        n = n / np.linalg.norm(n)
        p, along = float(n @ (w * n)), float(n @ mode)
        coupling = w * n - p * n
        variance = float(n @ (n * inverse))
        extra = _extra_tilt(p, kappa, variance)
        w, p, kappa = w + extra, p + extra, kappa - extra
        s = math.sqrt(along**2 + variance)
        h = (p + kappa) * along
        beta = kappa * along - p * variance / (s + along)  # h − ps without a difference of large numbers
        log_edge, k_rho, k_h = _edge_slopes(p, beta, s)
        tau = -2.0 * k_rho
        base = mode - along * n
        inverse = 1.0 / (w + tau)
        u = w * n * inverse
        along_u = float(n @ u)
        spike = (u - along_u * n) / math.sqrt(tau * along_u) if along_u > 0 else np.zeros_like(u)
        # The mean of y solves (P_yy + τI − P_yxP_xy/p)y = b_y − (K_h + (b_x−h₀)/p)P_yx. At y = base the right side is larger
        # than the left one by (κ−τ)·base + (n·m − K_h)P_yx, because (P + κI)m = b.
        rest = (kappa - tau) * base + (along - k_h) * coupling
        offset = rest * inverse
        offset = offset - n * (n @ offset) + spike * float(spike @ rest)
        return cls(n, p, coupling, h, s, beta, k_rho, k_h, log_edge, np.sqrt(inverse), spike, base, offset, extra)

    def accepted(self, generator: np.random.Generator, rows: int) -> Array:
        """The accepted ones among ``rows`` proposals, in the unit ball."""
        y = self.scale * generator.standard_normal((rows, self.scale.size))
        y -= np.outer(y @ self.n, self.n)
        y += self.offset + np.outer(generator.standard_normal(rows), self.spike)
        change_h = -(y @ self.coupling)  # h − h₀
        y += self.base
        rho = np.einsum("ij,ij->i", y, y)
        uniform = generator.random(rows)
        inside = rho < 1.0
        y, s, change_h, uniform = y[inside], np.sqrt(1.0 - rho[inside]), change_h[inside], uniform[inside]
        kept = np.log(uniform) < self.log_acceptance(s, change_h)
        y, h, s = y[kept], self.h + change_h[kept], s[kept]
        x = truncated_normal(generator, np.full_like(h, self.p), h, s)
        within = s * s - x * x  # 1 − |ξ|²
        kept = generator.random(x.size) < np.exp(-0.5 * self.extra_tilt * within)
        draws: Array = y[kept] + np.outer(x[kept], self.n)
        return draws

    def log_acceptance(self, s: Array, change_h: Array) -> Array:
        """K(ρ, h) minus the plane and the quadratic above it, at s = √(1−ρ) and h − h₀: never positive.

        Written without differences of large numbers.
        """
        change_s = s - self.s
        change_rho = -change_s * (s + self.s)
        h = self.h + change_h
        folded = np.abs(h) - h  # K is even in h
        edge = _log_edge_integral(folded + self.beta + change_h - self.p * change_s, self.p, 2 * s)
        slope = self.h / (s + self.s) + self.k_rho - 0.5 * self.p
        change = folded * s + change_h * (s - self.k_h) - change_rho * slope
        quadratic = change_h**2 / (2 * self.p) if self.p > 0 else np.zeros_like(change_h)
        log_ratio: Array = change + edge - self.log_edge - quadratic
        return log_ratio


def _extra_tilt(p: float, kappa: float, variance: float) -> float:
    """κ₁ that maximises (1 − κ₁/κ)·√((a + κ₁)/(p + κ₁)), a = 1/variance − κ: the root of (p−a)(κ−κ₁) = 2(a+κ₁)(p+κ₁)."""
    a = max(1.0 / variance - kappa, 0.0)
    excess = kappa * (p - a) - 2.0 * a * p
    if excess <= 0:
        return 0.0
    return 2.0 * excess / (a + 3.0 * p + math.sqrt((a + 3.0 * p) ** 2 + 8.0 * excess))


def _log_edge_integral(slope: Array, p: float, width: Array) -> Array:
    """The logarithm of I = ∫₀^width exp(−βt − ½pt²) dt, for slopes β of either sign and p ≥ 0."""
    with np.errstate(all="ignore"):  # each formula is evaluated everywhere, used in its case
        if p == 0:
            return np.where(slope * width == 0, np.log(width), np.log(-np.expm1(-slope * width) / slope))
        root = math.sqrt(2 * p)
        outer = slope >= 0
        beta = np.where(outer, slope, 0.0)
        far = erfcx((beta + p * width) / root) * np.exp(-beta * width - 0.5 * p * width**2)
        sharp = np.log(math.sqrt(math.pi / (2 * p)) * (erfcx(beta / root) - far))
        inner = np.where(outer, 0.0, slope)
        mass = ndtr((inner + p * width) / math.sqrt(p)) - ndtr(inner / math.sqrt(p))
        blunt = inner**2 / (2 * p) + 0.5 * math.log(2 * math.pi / p) + np.log(mass)
        log_integral: Array = np.where(outer, sharp, blunt)
    return log_integral


def _edge_slopes(p: float, beta: float, s: float) -> tuple[float, float, float]:
    """The values of ln I, K_ρ and K_h at ρ = 1 − s² and h = β + ps, for a sharp edge.

    K_ρ = −(1 + e^{−2hs})/(2sI), and K_h = E[x] = s − E[t] with E[t] = ((1 − e^{−2hs})/I − β)/p, or (1 − 2p/β²)/β for
    small p. With hs ≥ βs ≥ 20 the exponentials vanish in rounding.
    """
    log_edge = float(_log_edge_integral(np.array([beta]), p, np.array([2 * s]))[0])
    inverse = math.exp(-log_edge)
    mean_t = (inverse - beta) / p if p >= 1e-6 * beta**2 else (1.0 - 2.0 * p / beta**2) / beta
    return log_edge, -inverse / (2 * s), s - mean_t


def truncated_normal(generator: np.random.Generator, p: Array, h: Array, s: Array) -> Array:
    """Exact draws from the densities ∝ exp(−½px² + hx) on |x| ≤ s, elementwise, for p ≥ 0.

    By symmetry h ≥ 0. Where the slope β = h − ps at the edge is positive, x = s − t with t from an exponential with
    rate r = (β + √(β²+4p))/2 truncated to [0, 2s], accepted with probability exp(−½p(t − 1/r)²) ≥ e^{−½} at t = 0
    (Robert, *Simulation of truncated normal variables*, 1995). Else the mode h/p is inside: a normal proposal, or a
    uniform one where s is less than a standard deviation.
    """
    sign, size = np.where(h < 0, -1.0, 1.0), np.abs(h)
    beta = size - p * s
    outer = beta > 0
    rate = 0.5 * (beta + np.sqrt(beta**2 + 4 * p))
    result = np.empty_like(s)
    pending = np.arange(s.size)
    while pending.size:
        edge, count = outer[pending], pending.size
        pp, ss, uniform = p[pending], s[pending], generator.random((2, count))
        with np.errstate(all="ignore"):  # each formula is evaluated everywhere, used in its case
            r = rate[pending]
            t = -np.log1p(uniform[0] * np.expm1(-2 * r * ss)) / r
            from_edge = np.exp(-0.5 * pp * (t - 1 / r) ** 2)
            centre = size[pending] / pp
            wide = pp * ss**2 > 1
            x = np.where(wide, centre + generator.standard_normal(count) / np.sqrt(pp), ss * (2 * uniform[0] - 1))
            from_inside = np.where(wide, np.abs(x) <= ss, np.exp(-0.5 * pp * (x - centre) ** 2))
        flat = (pp == 0) & (size[pending] == 0)
        x = np.where(edge, ss - t, x)
        probability = np.where(flat, 1.0, np.where(edge, from_edge, from_inside))
        done = uniform[1] < probability
        result[pending[done]] = x[done]
        pending = pending[~done]
    return sign * result
