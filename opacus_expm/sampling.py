"""Draws from a Gaussian truncated to a ball.

``Exact`` is the default and the only sampler that the privacy guarantee covers; only algorithms with a proof of
exactness are admitted to it. ``PlainRejection`` and ``Gibbs`` are the source paper's, kept for comparison. All work in
the eigenbasis and in units of R (see ``density``). "Exact" is a statement about real arithmetic.

**Privacy:** a draw is what the mechanism releases; each one that leaves must be in the ledger. How many proposals it
took is private and is not reported.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from scipy.optimize import brentq
from scipy.special import erfcx, ndtr

from opacus_expm import _check
from opacus_expm.density import Array, BallGaussian

_PROPOSAL_ELEMENTS = 2**18  # normals drawn at a time: 2 MiB, which stays in cache
_PILOT = 256  # tilted proposals after which the conditional proposal may take over
_PILOT_ACCEPTANCE = 0.05


def noise_source(noise_generator: torch.Generator | np.random.Generator | None) -> np.random.Generator:
    """The generator of a draw: fresh entropy of the operating system, unless one is given.

    The global seeds of torch, numpy and random play no part: ``torch.manual_seed(0)`` in a training script must not
    make the noise predictable. A given torch generator is advanced and seeds a numpy one.
    """
    check_noise_generator(noise_generator)
    if isinstance(noise_generator, torch.Generator):
        words = torch.randint(2**62, (4,), generator=noise_generator, device=noise_generator.device)
        return np.random.default_rng(words.tolist())
    return np.random.default_rng() if noise_generator is None else noise_generator


def check_noise_generator(noise_generator: object) -> None:
    """Raise for anything that ``noise_source`` cannot use."""
    if noise_generator is not None and not isinstance(noise_generator, torch.Generator | np.random.Generator):
        raise TypeError(
            f"noise_generator must be a torch.Generator, a numpy.random.Generator or None, got {noise_generator!r}"
        )


class Sampler(Protocol):
    """Anything that draws from a ``BallGaussian``."""

    def sample(self, density: BallGaussian, generator: np.random.Generator, draws: int = 1) -> Array:
        """Draws ξ, one a row."""


@dataclass(frozen=True)
class Exact:
    """Independent exact draws by rejection, from the better of two proposals.

    *Tilted.* For any κ ≥ 0 the density is below e^{½κR²} times the Gaussian density with precision P + κI, so: draw
    ξ ~ Normal((P+κI)⁻¹b, (P+κI)⁻¹), accept if |ξ| ≤ R and then with probability exp(−½κ(R²−|ξ|²)). ``density.tilt``
    gives the κ that accepts most often: about 1/√(πk) of the proposals where the density is nearly flat, about
    1/√(2π|b|R) where it is peaked on the boundary.

    *Conditional* (``_Conditional``): for the second case, where the tilted proposal accepts less than 5 %.

    Which one was used shows nowhere but in time: accepted proposals are independent of how many were rejected.
    """

    def sample(self, density: BallGaussian, generator: np.random.Generator, draws: int = 1) -> Array:
        """Draws ξ, one a row, independent and exact."""
        kept: list[Array] = []
        missing = draws
        proposal: _Tilted | _Conditional = _Tilted(density)
        rows = _PILOT
        while missing > 0:
            accepted = proposal.accepted(generator, rows)
            kept.append(accepted[:missing])
            missing -= len(kept[-1])
            if rows == _PILOT and len(accepted) < _PILOT_ACCEPTANCE * _PILOT and missing > 0:
                proposal = _Conditional.of(density) or proposal
            rows = max(1, _PROPOSAL_ELEMENTS // density.dim)
        return density.from_unit(np.concatenate(kept))


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
    """A proposal for densities peaked on the boundary: integrate out the direction of the mode.

    With n the direction of the mode, ξ = xn + y, y ⊥ n, ρ = |y|², p = nᵀPn, h = b_x − P_xy·y, the density of y is
    exp(−½yᵀP_yy y + b_y·y + K(ρ, h)) with

        K(ρ, h) = ln ∫_{|x| ≤ √(1−ρ)} exp(−½px² + hx) dx = h²/2p + L(ρ, h).

    L = ln ∫ exp(−½p(x − h/p)²) dx over {x² ≤ 1 − ρ} is jointly concave: the integrand is log-concave in (x, ρ, h) and
    so is its marginal (Prékopa). So L lies below each of its tangent planes, and with the plane at (ρ₀, h₀ = b_x)

        K(ρ, h) ≤ K₀ + K_ρ(ρ − ρ₀) + K_h(h − h₀) + (h − h₀)²/2p,

    whose right side is quadratic in y: propose y from that Gaussian, accept with the exponential of the difference,
    then draw x from its one-dimensional truncated normal. The Gaussian has precision P + τ(I − nnᵀ), τ = −2K_ρ,
    marginalised over x; with D = diag(w) + τ, q = D⁻¹n and a = τ/(nᵀD⁻¹Pn), its covariance is the part orthogonal to n
    of D⁻¹ + a·qqᵀ.
    """

    n: Array
    p: float
    coupling: Array  # P_xy
    b_x: float
    rho: float  # the tangent point ρ₀
    k_rho: float
    k_h: float
    log_edge: float  # ln I at the tangent point, see _log_edge_integral
    scale: Array  # D^{-1/2}
    spike: Array  # √a·q, orthogonal to n
    mean: Array

    @classmethod
    def of(cls, density: BallGaussian) -> _Conditional | None:
        """The proposal for a density, or None where it is not peaked in one direction."""
        w, b = density.unit()
        mode = b / (w + density.tilt()) if density.tilt() > 0 else np.zeros_like(b)
        length = float(np.linalg.norm(mode))
        if length == 0 or w.size == 1:
            return None
        n = mode / length
        p, b_x = float(n @ (w * n)), float(n @ b)
        coupling = w * n - p * n
        b_y = b - b_x * n

        def at(rho: float) -> tuple[float, _Conditional]:
            s = math.sqrt(1.0 - rho)
            log_edge, k_rho, k_h = _edge_slopes(p, b_x, s)
            tau = -2.0 * k_rho
            inverse = 1.0 / (w + tau)
            q = n * inverse
            q = q - n * (n @ q)
            denominator = float(np.sum(n**2 * w * inverse))
            spike = q * math.sqrt(tau / denominator) if denominator > 0 else np.zeros_like(q)
            linear = b_y - k_h * coupling
            mean = linear * inverse
            mean = mean - n * (n @ mean) + spike * float(spike @ linear)
            trace = float(np.sum((1.0 - n**2) * inverse) + spike @ spike)
            found = cls(n, p, coupling, b_x, rho, k_rho, k_h, log_edge, np.sqrt(inverse), spike, mean)
            return trace + float(mean @ mean), found

        if b_x <= p or b_x < 20:  # the mode along n is inside the ball, or the edge is not sharp
            return None
        low, high = 1e-12, 1.0 - 1e-9
        if at(low)[0] <= low or at(high)[0] >= high:
            return None
        rho = float(brentq(lambda r: at(r)[0] - r, low, high, xtol=1e-14, rtol=1e-6))
        # Sharp at the tangent point too: the closed form of K_h relies on it.
        return at(rho)[1] if (b_x - p * math.sqrt(1 - rho)) * math.sqrt(1 - rho) > 10 else None

    def accepted(self, generator: np.random.Generator, rows: int) -> Array:
        """The accepted ones among ``rows`` proposals, in the unit ball."""
        y = self.scale * generator.standard_normal((rows, self.scale.size))
        y -= np.outer(y @ self.n, self.n)
        y += self.mean + np.outer(generator.standard_normal(rows), self.spike)
        rho = np.einsum("ij,ij->i", y, y)
        uniform = generator.random(rows)
        inside = rho < 1.0
        y, rho, uniform = y[inside], rho[inside], uniform[inside]
        # ln of the acceptance probability, written without differences of large numbers
        s, s0 = np.sqrt(1.0 - rho), math.sqrt(1.0 - self.rho)
        shift, drop = -(y @ self.coupling), rho - self.rho  # h − h₀, ρ − ρ₀
        h = self.b_x + shift
        size = np.abs(h)
        edge = _log_edge_integral(size - self.p * s, self.p, 2 * s)
        change = (size - h) * s + shift * (s - self.k_h) - drop * (self.b_x / (s + s0) + self.k_rho - 0.5 * self.p)
        quadratic = shift**2 / (2 * self.p) if self.p > 0 else np.zeros_like(shift)
        kept = np.log(uniform) < change + edge - self.log_edge - quadratic
        y, h, s = y[kept], h[kept], s[kept]
        draws: Array = y + np.outer(truncated_normal(generator, np.full_like(h, self.p), h, s), self.n)
        return draws


def _log_edge_integral(slope: Array, p: float, width: Array) -> Array:
    """The logarithm of I = ∫₀^width exp(−βt − ½pt²) dt, for slopes β of either sign and p ≥ 0."""
    if p == 0:
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.where(slope * width == 0, np.log(width), np.log(-np.expm1(-slope * width) / slope))
    root = math.sqrt(2 * p)
    outer = slope >= 0
    beta = np.where(outer, slope, 0.0)
    far = erfcx((beta + p * width) / root) * np.exp(-beta * width - 0.5 * p * width**2)
    sharp = np.log(math.sqrt(math.pi / (2 * p)) * (erfcx(beta / root) - far))
    inner = np.where(outer, 0.0, slope)
    mass = ndtr((inner + p * width) / math.sqrt(p)) - ndtr(inner / math.sqrt(p))
    log_integral: Array = np.where(outer, sharp, inner**2 / (2 * p) + 0.5 * math.log(2 * math.pi / p) + np.log(mass))
    return log_integral


def _edge_slopes(p: float, h: float, s: float) -> tuple[float, float, float]:
    """The values of ln I, K_ρ and K_h at (1 − s², h), for a sharp edge: (h − ps)s ≫ 1, so that t < 2s almost surely.

    K_ρ = −(1 + e^{−2hs})/(2sI), and K_h = E[x] = s − E[t] with E[t] = (1/I − β)/p, or (1 − 2p/β²)/β for small p.
    """
    beta = h - p * s
    log_edge = float(_log_edge_integral(np.array([beta]), p, np.array([2 * s]))[0])
    inverse = math.exp(-log_edge)
    if beta <= 0 or p < 1e-6 * beta**2:
        mean_t = (1.0 - 2.0 * p / beta**2) / beta if beta > 0 else 0.0
    else:
        mean_t = (inverse - beta) / p
    return log_edge, -(1.0 + math.exp(-2 * h * s)) * inverse / (2 * s), s - mean_t


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
        with np.errstate(divide="ignore", invalid="ignore"):  # each formula is evaluated everywhere, used in its case
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


@dataclass(frozen=True)
class PlainRejection:
    """The paper's rejection: draw from the untilted Gaussian until the draw falls into the ball; hopeless for small R.

    **Privacy:** exact where it succeeds. Giving up is an observation that ε does not cover; ``Exact`` never gives up.
    """

    max_proposals: int = 1_000_000

    def sample(self, density: BallGaussian, generator: np.random.Generator, draws: int = 1) -> Array:
        """Draws ξ, one a row.

        Raises:
            ValueError: the precision is singular, so that there is no untilted Gaussian.
            RuntimeError: ``max_proposals`` were not enough.
        """
        w, b = density.unit()
        if not np.all(w > 0):
            raise ValueError(
                "sampler='rejection' needs a positive definite precision: pass regularization > 0, or sampler='exact'"
            )
        rows = min(max(1, _PROPOSAL_ELEMENTS // w.size), self.max_proposals)
        kept: list[Array] = []
        missing, left = draws, self.max_proposals
        while missing > 0:
            if left <= 0:
                raise RuntimeError(
                    f"sampler='rejection' gave up after {self.max_proposals} proposals; use sampler='exact', a larger "
                    "radius or more regularization"
                )
            z = b / w + generator.standard_normal((rows, w.size)) / np.sqrt(w)
            kept.append(z[np.einsum("ij,ij->i", z, z) <= 1.0][:missing])
            missing, left = missing - len(kept[-1]), left - rows
        return density.from_unit(np.concatenate(kept))


@dataclass(frozen=True)
class Gibbs:
    """The paper's Gibbs sampler, in the eigenbasis: each coordinate is a normal truncated to what the ball leaves.

    All chains start at ξ = 0 and run side by side; a chain gives one draw for every ``thin`` sweeps after ``burn_in``.

    **Privacy:** only asymptotically exact. What it loses in total variation is not covered by ε; it warns.

    Attributes:
        burn_in: sweeps before the first draw.
        thin: sweeps between two draws of a chain.
        chains: number of chains; None runs one for each draw, so that draws are independent.
    """

    burn_in: int = 200
    thin: int = 10
    chains: int | None = None

    def __post_init__(self) -> None:
        _check.positive_int("burn_in", self.burn_in)
        _check.positive_int("thin", self.thin)
        if self.chains is not None:
            _check.positive_int("chains", self.chains)

    def sample(self, density: BallGaussian, generator: np.random.Generator, draws: int = 1) -> Array:
        """Draws ξ, one a row, chain after chain."""
        warnings.warn(
            "sampler='gibbs' is only asymptotically exact: its error is not covered by epsilon; use sampler='exact' to "
            "release",
            UserWarning,
            stacklevel=2,
        )
        w, b = density.unit()
        chains = min(self.chains or draws, draws)
        z = np.zeros((w.size, chains))
        kept: list[Array] = []
        per_chain = math.ceil(draws / chains)
        for sweep in range(self.burn_in + (per_chain - 1) * self.thin):
            squares = np.einsum("ij,ij->j", z, z)
            for j in range(w.size):
                rest = np.maximum(squares - z[j] ** 2, 0.0)
                limit = np.sqrt(np.maximum(1.0 - rest, 1e-300))
                z[j] = truncated_normal(generator, np.full(chains, w[j]), np.full(chains, b[j]), limit)
                squares = rest + z[j] ** 2
            if sweep >= self.burn_in - 1 and (sweep - self.burn_in + 1) % self.thin == 0:
                kept.append(z.T.copy())
        return density.from_unit(np.stack(kept, axis=1).reshape(-1, w.size)[:draws])
