"""The source paper as a reference: its formulas, its samplers, its calibration, and its bounds, which are not private.

Labels in brackets are the paper's. None of this is what the engine computes: the engine's range is narrower
(``mechanism.sensitivity``) and its sampler exact. Where the paper's text slips, the correct form is used and the slip is
named.

    bounds = paper.bounds_read_off(model, loader, criterion)                      # NOT private
    statistics = engine.gather(model, loader, 20, max_grad_norm=bounds.gradient, max_curvature=bounds.curvature)
    statistics = paper.read_off(statistics)
    module = paper.release(engine.books(), statistics, 1.0, 0.1, sampler=paper.Gibbs())  # recorded, without a guarantee

**Privacy:** a release that ``release`` makes is recorded as one without a guarantee, after which ``get_epsilon`` raises
``NoGuarantee``, unless its bounds are clipping bounds that were not read off the private data and its sampler is exact.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from opacus_expm import _check
from opacus_expm._warnings import warn
from opacus_expm.books import Books
from opacus_expm.gathering.criteria import CrossEntropy, MeanSquaredError
from opacus_expm.gathering.measurement import Measurement
from opacus_expm.gathering.passes import full_space
from opacus_expm.gathering.statistics import Statistics
from opacus_expm.mechanism.calibration import ROUNDING_MARGIN, Calibration
from opacus_expm.mechanism.density import Array, BallGaussian
from opacus_expm.mechanism.sampling import Exact, Sampler, truncated_normal
from opacus_expm.mechanism.sensitivity import Sensitivity
from opacus_expm.rounds import Budget, drawn, release_event
from opacus_expm.subspaces import Sparse

INFLATION = 1.1  # of what is read off the private data
_PROPOSAL_ELEMENTS = 2**18  # normals drawn at a time


@dataclass(frozen=True)
class LossBounds:
    """ḡ and H̄: bounds on one record's gradient and Gauss-Newton matrix (spectral norm) in the full space."""

    gradient: float
    curvature: float


def mean_squared_bounds(jacobian_bound: float, residual_bound: float, outputs: int) -> LossBounds:
    """ḡ = J̄·2Ē/m and H̄ = 2J̄²/m for mean squared error [prop:boundls].

    Args:
        jacobian_bound: J̄, bound on the spectral norm of the model's Jacobian.
        residual_bound: Ē, bound on |f − y|.
        outputs: m.
    """
    j = _check.positive("jacobian_bound", jacobian_bound)
    e = _check.non_negative("residual_bound", residual_bound)
    m = _check.positive_int("outputs", outputs)
    return LossBounds(2 * j * e / m, 2 * j * j / m)


def cross_entropy_bounds(jacobian_bound: float) -> LossBounds:
    """ḡ = √2·J̄ and H̄ = J̄²/2 for cross-entropy [prop:boundls].

    The paper's eq:maxH states H̄ for the Frobenius norm; it holds for the spectral norm.
    """
    j = _check.positive("jacobian_bound", jacobian_bound)
    return LossBounds(math.sqrt(2) * j, j * j / 2)


def utility_sensitivity(bounds: LossBounds, radius: float, minimum_size: int) -> float:
    """ΔU = (2Rḡ + R²H̄)/N, for the mean utility of at least N records [eq:DeltaU, eq:sens_MS, eq:sens_CE]."""
    r = _check.positive("radius", radius)
    n = _check.positive_int("minimum_size", minimum_size)
    return (2 * r * bounds.gradient + r * r * bounds.curvature) / n


def radius_rule(bounds: LossBounds, regularization: float, smallest_eigenvalue: float = 0.0) -> float:
    """R̄ = ḡ/(λ + e_min): a ball of this radius holds the untruncated mean [eq:defRbar].

    e_min is 0 whenever there are fewer rows (records times outputs) than parameters; the paper's e_min > 0 is an
    assumption. Infinite for λ = e_min = 0. Compute it from public data or from bounds alone.
    """
    lam = _check.non_negative("regularization", regularization)
    e = _check.non_negative("smallest_eigenvalue", smallest_eigenvalue)
    return bounds.gradient / (lam + e) if lam + e > 0 else math.inf


def rejection_bound(
    bounds: LossBounds,
    *,
    epsilon: float,
    radius: float,
    regularization: float,
    parameters: int,
    minimum_size: int,
    smallest_eigenvalue: float = 0.0,
) -> float:
    """Upper bound on the probability that plain rejection rejects [eq:rejProb]; vacuous from 1 on.

    2pR̄/(Nε)·(2/R + H̄/ḡ) + (R̄/R)², where R̄/ḡ = 1/(λ + e_min); infinite for λ = 0 with a singular H.
    """
    eps, r = _check.positive("epsilon", epsilon), _check.positive("radius", radius)
    p, n = _check.positive_int("parameters", parameters), _check.positive_int("minimum_size", minimum_size)
    reach = radius_rule(bounds, regularization, smallest_eigenvalue)
    stiffness = regularization + smallest_eigenvalue
    if stiffness == 0:
        return math.inf
    return 2 * p / (n * eps) * (2 * reach / r + bounds.curvature / stiffness) + (reach / r) ** 2


def utility_tail_bound(epsilon: float, t: float, volume_ratio: float) -> float:
    """P[U ≤ U_opt − t·ΔU] ≤ |B_t|/|B^c_{t/2}| · e^{−εt/4} [prop:accuracy].

    Args:
        epsilon: ε.
        t: how many sensitivities below the optimum.
        volume_ratio: |B_t|/|B^c_{t/2}|, the volume of points worse than t over that of points better than t/2.
    """
    eps, steps = _check.positive("epsilon", epsilon), _check.positive("t", t)
    return _check.non_negative("volume_ratio", volume_ratio) * math.exp(-eps * steps / 4)


def projection_dimension(
    *,
    parameters: int,
    condition_number: float,
    optimal_utility: float,
    gap: float,
    failure_probability: float,
) -> int | None:
    """Least k for which a random subspace loses at most ``gap`` of the optimal utility [prop:gap], or None.

    k ≥ max(2κp(1 − 2τ/‖z‖²), 32 ln(1/γ)), where ‖z‖²/2 is the optimal utility, τ the gap, γ the probability of failure.
    None where the formula exceeds p, which is usual: then it promises nothing below the full space.

    The printed proof uses ‖Πz‖² ≥ ‖P_A z‖²/κ, which is false; with ‖Πz‖² ≥ (‖z‖²/κ)·‖P_A g‖²/‖g‖² the statement holds.
    """
    p = _check.positive_int("parameters", parameters)
    kappa = _check.positive("condition_number", condition_number)
    best, tau = _check.positive("optimal_utility", optimal_utility), _check.positive("gap", gap)
    gamma = _check.positive("failure_probability", failure_probability)
    if kappa < 1:
        raise ValueError(f"condition_number must be at least 1, got {condition_number!r}")
    if tau >= best:
        raise ValueError(f"gap must be below the optimal utility {best!r}, got {gap!r}")
    if gamma >= 1:
        raise ValueError(f"failure_probability must be below 1, got {failure_probability!r}")
    needed = math.ceil(max(2 * kappa * p * (1 - tau / best), 32 * math.log(1 / gamma)))
    return needed if needed <= p else None


# --- its samplers -----------------------------------------------------------------------------------------------------


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
                "PlainRejection needs a positive definite precision: pass regularization > 0, or use Exact()"
            )
        rows = min(max(1, _PROPOSAL_ELEMENTS // w.size), self.max_proposals)
        kept: list[Array] = []
        missing, left = draws, self.max_proposals
        while missing > 0:
            if left <= 0:
                raise RuntimeError(
                    f"PlainRejection gave up after {self.max_proposals} proposals; use Exact(), a larger radius or more "
                    "regularization"
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
        warn(
            "Gibbs is only asymptotically exact: its error is not covered by epsilon; use Exact() to release",
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


# --- its calibration and its bounds -----------------------------------------------------------------------------------


def calibrate(sensitivity: Sensitivity, epsilon: float, radius: float) -> Calibration:
    """C = ε/(2ΔU) with ΔU = 2RC_g + R²C_H [eq:DeltaU], and what a draw at it really spends: c·W.

    Under add/remove W ≤ ΔU, so that no more than half of ε is spent; under replace-one W ≤ 2ΔU.

    **Privacy:** c·W-DP where the bounds are enforced by clipping.
    """
    delta_u = 2 * radius * sensitivity.max_grad_norm + radius**2 * sensitivity.max_curvature
    c = _check.positive("epsilon", epsilon) / (2 * delta_u)
    return Calibration(c * (1 - ROUNDING_MARGIN), c * sensitivity.width(radius), math.inf, "paper")


def cost_whatever_the_bounds(epsilon: float, adjacency: str) -> float:
    """The most that a draw by ``calibrate`` can spend: c·W for no bound is more than ε/2, or ε under replace-one.

    Where bounds were bought, c·W is a function of what was bought, which bounds nothing in a run in which another bound
    comes out, and may not be what is charged (as in ``mechanism.calibration``).
    """
    return epsilon if adjacency == "replace_one" else epsilon / 2


def bounds_read_off(
    model: nn.Module, loader: DataLoader[Any], criterion: Callable[[Tensor, Tensor], Tensor] | None = None
) -> LossBounds:
    """ḡ and H̄ from the private data's own largest Jacobian and residual, inflated by 1.1: the paper's practice.

    **Privacy:** not private: one record can move a maximum as far as it likes. A warning says so.
    """
    warn(
        "bounds_read_off() reads the clipping bounds off the private data: a release with them is NOT differentially "
        "private",
    )
    bench = full_space(model, Measurement(Sparse(seed=0), None, criterion=criterion, progress=False))

    def once() -> LossBounds:
        jacobian = residual = 0.0
        stream = bench.begin(loader, "loader")
        source, loss = bench.prepared
        if not isinstance(loss, CrossEntropy | MeanSquaredError):
            raise ValueError(
                f"the paper's bounds are defined for cross-entropy and mean squared error, not for {type(loss).__name__}"
            )
        for inputs, targets in stream:
            outputs, pullback = source.outputs_and_pullback(inputs)
            count = outputs.shape[1]
            rows = pullback(torch.eye(count).to(outputs).expand(len(outputs), -1, -1)).double()
            gram = rows @ rows.transpose(1, 2)
            jacobian = max(jacobian, float(torch.linalg.eigvalsh(gram)[:, -1].max()) ** 0.5)
            if isinstance(loss, MeanSquaredError):
                gap = (outputs.double() - targets.reshape(outputs.shape).double()).norm(dim=1)
                residual = max(residual, float(gap.max()))
        if isinstance(loss, CrossEntropy):
            return cross_entropy_bounds(INFLATION * jacobian)
        return mean_squared_bounds(INFLATION * jacobian, INFLATION * residual, count)

    return bench.in_memory(once, loader, "loader")


def read_off(statistics: Statistics) -> Statistics:
    """The same statistics, marked as clipped by bounds that were read off the private data: not private."""
    return replace(statistics, bounds="paper")


def release(
    books: Books,
    statistics: Statistics,
    epsilon: float,
    radius: float,
    *,
    regularization: float | None = None,
    sampler: Sampler | None = None,
) -> nn.Module:
    """Draw one model at the paper's temperature and charge it.

    Args:
        books: of an engine, ``engine.books()``.
        statistics: from its ``gather``; marked by ``read_off`` where their bounds are the paper's.
        epsilon: ε > 0.
        radius: R > 0.
        regularization: λ, as in ``ExpMQuadEngine.release``.
        sampler: ``Exact()`` by default.

    **Privacy:** see the top of the module; the ledger records what the draw really spends, or that nothing covers it.
    """
    budget, sampler = Budget(epsilon, 0.0, (radius,), regularization), sampler or Exact()
    name = "exact" if type(sampler) is Exact else type(sampler).__name__.lower()
    name = "custom" if name in ("exact", "secure") and type(sampler) is not Exact else name
    if books.noise.secure:
        raise ValueError(
            "secure_mode draws exactly, by work that does not depend on the data: release with the engine itself, or use "
            "an engine without secure_mode for the paper's draws"
        )
    if not isinstance(statistics, Statistics):
        raise TypeError(f"statistics must come from gather(), got {type(statistics).__name__}")
    books.accountant.check_adjacency(books.adjacency)
    books.accountant.check_covered(sampler=name, noise=books.noise.origin)
    if statistics.bounds == "paper" and books.accountant.budget is not None:
        raise ValueError("bounds that were read off the private data cannot be charged to a budget")
    calibrated = calibrate(statistics.sums.sensitivity(books.adjacency), epsilon, radius)
    charged = calibrated
    if statistics.bounds == "bought":  # what follows from the bounds was not fixed in advance, and may not count
        charged = replace(calibrated, epsilon_range=cost_whatever_the_bounds(epsilon, books.adjacency))
    event = release_event(statistics, budget, charged, books, sampler=name)

    def sample(density: BallGaussian) -> Array:
        return np.asarray(sampler.sample(density, books.noise.ordinary())[0])

    return statistics.module_at(drawn(statistics, event, books, calibrated.inverse_temperature, sample))


def simulate(
    statistics: Statistics,
    epsilon: float,
    radius: float,
    evaluate: Callable[[nn.Module], float],
    generator: np.random.Generator,
    *,
    draws: int = 500,
    regularization: float | None = None,
    sampler: Sampler | None = None,
) -> Array:
    """Values of ``evaluate`` on many draws at the paper's temperature, as in the paper's figures.

    **Privacy:** not private, and not charged; a warning says so.
    """
    warn("simulate() draws models that are NOT releases: the results are not private")
    budget = Budget(epsilon, 0.0, (radius,), regularization)
    calibrated = calibrate(statistics.sums.sensitivity("add_remove"), epsilon, radius)
    density = statistics.density(calibrated.inverse_temperature, radius, budget.ridge(statistics))
    coordinates = (sampler or Gibbs()).sample(density, generator, draws)
    return np.array([float(evaluate(statistics.module_at(xi))) for xi in coordinates])
