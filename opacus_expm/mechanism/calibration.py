"""Budget and sensitivity → inverse temperature c of the density p(ξ) ∝ exp(−c[ξᵀG + ½ξᵀSξ + ½λN|ξ|²]).

Two calibrations, both functions of public numbers only:

``range`` (pure ε). Adding or removing one record changes the log-density by c·u(ξ) plus a constant, where u is that
    record's clipped utility. The privacy loss therefore lives in an interval of length c·W (``Sensitivity.width``);
    the likelihood ratio has mean one, so the interval contains 0, and the loss is at most c·W in absolute value:
    **c = ε/W is ε-DP** (and ε-bounded-range) under the sensitivity's adjacency. For δ > 0, the exact (ε, δ) curve of
    bounded-range mechanisms allows a larger range (``curves.bounded_range_for``).

``gaussian`` (ε, δ > 0). Gopi, Lee, Liu (*Private Convex Optimization via Exponential Mechanism*, COLT 2022):
    if F and F′ are μ_F-strongly convex on a convex set and F − F′ is L-Lipschitz there, the densities ∝ e^{−F}
    and ∝ e^{−F′} are at least as hard to tell apart as two unit Gaussians at distance L/√μ_F. Here F is
    cλN-strongly convex and one record changes it by a function with Lipschitz constant c·ℓ, ℓ = C_g + R·C_H
    (``Sensitivity.lipschitz``), so the release is μ-GDP with **μ = ℓ√(c/(λN))**, that is c = λN(μ/ℓ)².

Several draws from one budget (``allowances``) are fixed in advance: of a pure budget each of T draws gets ε/T; of an (ε, δ)
budget the same μ/√T, where μ is that of (ε, δ), so that √Σμ² is the target exactly.

N is a public constant: the comparison is between D and D∪{z} run with the same N. If N followed the data, the λN
term would change between neighbours and the statements above would be false.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from opacus_expm import _check
from opacus_expm.mechanism import curves
from opacus_expm.mechanism.sensitivity import Sensitivity

CALIBRATIONS = ("auto", "range", "gaussian")

# The draw uses c·(1 − 1e-6): it absorbs the rounding of clipping and of long sums, which is not part of the proof.
ROUNDING_MARGIN = 1e-6
_SPLITTING_MARGIN = 1e-10  # relative, on μ: more than the rounding of a total that is found as a root


@dataclass(frozen=True)
class Calibration:
    """A calibrated temperature and what a release at it costs.

    Attributes:
        inverse_temperature: c, with the rounding margin taken off.
        epsilon_range: length of the interval that contains the privacy loss; a pure ε.
        mu: parameter of Gaussian differential privacy; infinite where λ = 0.
        method: which calibration gave c.
    """

    inverse_temperature: float
    epsilon_range: float
    mu: float
    method: str


@dataclass(frozen=True)
class Allowance:
    """What one draw may cost: a range, or alternatively a μ; either keeps the whole plan within its budget.

    Attributes:
        epsilon: share of a pure budget.
        epsilon_range: largest range.
        mu: largest μ, 0 where none is allowed.
    """

    epsilon: float
    epsilon_range: float
    mu: float


def allowances(
    epsilon: float, delta: float, *, prices: Sequence[float] = (), rounds: int = 1, ridge: bool = True
) -> list[Allowance]:
    """The ways to split a budget over purchases of bounds and ``rounds`` equal draws.

    With purchases of pure ε₁, … the draws together have ε − Σε₁ (basic composition), or, in Gaussian terms, μ with
    μ² = μ(ε, δ)² − Σμ(ε₁)² (``curves.bounded_range_mu``). Which way is taken may depend on public numbers only; bought
    bounds are none. So where bounds are bought there is one way: for one draw, the remaining (ε, δ), by range or by μ; for
    several, the Gaussian split, in which a draw by range is limited to what is as hard to tell apart as μ (for a pure
    budget, or without a ridge, the pure split).

    Args:
        epsilon: ε of the whole.
        delta: δ of the whole.
        prices: ε₁ of each bound that is bought.
        rounds: T.
        ridge: whether λ > 0, so that a draw can be Gaussian.
    """
    left = remainder(epsilon, math.fsum(prices))
    pure = Allowance(left / rounds, left / rounds, 0.0)
    if delta == 0:
        return [pure]
    if rounds == 1:
        return [Allowance(left, curves.bounded_range_for(left, delta), curves.gaussian_mu(left, delta))]
    spent = math.hypot(*map(curves.bounded_range_mu, prices))
    mu = curves.gaussian_mu(epsilon, delta)
    mu = math.sqrt((mu - spent) * (mu + spent) / rounds) * (1 - _SPLITTING_MARGIN) if spent < mu else 0.0
    gaussian = Allowance(left / rounds, curves.bounded_range_within(mu), mu)
    if prices:
        return [gaussian if ridge and mu > 0 else pure]
    return [pure, gaussian]


def cost_whatever_the_bounds(allowance: Allowance, method: str) -> tuple[float, float]:
    """The ε_range and the μ of a draw, whatever bounds were bought; infinite where they depend on what was bought.

    A draw by range costs the range that was allowed, and one by μ that μ. Its other cost follows from c and the bounds
    (c·W, or ℓ√(c/(λN))). If a bound was bought, that is a function of what was bought: the value found in one run bounds
    nothing in a run in which another bound came out, so it may not enter a total.
    """
    return (math.inf, allowance.mu) if method == "gaussian" else (allowance.epsilon_range, math.inf)


def remainder(epsilon: float, spent: float) -> float:
    """ε minus what was spent, rounded so that the two do not add up to more than ε."""
    left = epsilon - spent
    while math.fsum((left, spent)) > epsilon:
        left = math.nextafter(left, 0.0)
    return left


def default_regularization(
    max_grad_norm: float, max_curvature: float, *, radius: float, proj_dim: int, rank: int
) -> float:
    """A ridge λ from public numbers that keeps the quadratic honest.

    Without private curvature (C_H = 0), λ = C_g/R: then |G|/(λN) ≤ C_g/λ = R for at most N records, so that the step cannot
    overshoot the ball. It is the source paper's rule R = ḡ/(λ + e_min) [eq:defRbar] with e_min = 0, solved for λ.

    With private curvature, λ = rank·C_H/k: clipping takes curvature away, most of it from the records that have most. What
    one record at the bound can have is at most rank·C_H in trace; the ridge adds as much for every record, spread over the
    k directions, so that no direction is left flat and the prior is of the size of what was clipped.

    Args:
        max_grad_norm: C_g.
        max_curvature: C_H.
        radius: R.
        proj_dim: k.
        rank: of one record's curvature, at the most.
    """
    return max_grad_norm / radius if max_curvature == 0 else rank * max_curvature / proj_dim


def check_request(
    epsilon: float, delta: float, radius: float, regularization: float | None, calibration: str = "auto"
) -> None:
    """Everything about a request that can be refused before the sensitivity is known.

    Raises:
        TypeError, ValueError: naming the argument, what came and what to do.
    """
    _check.positive("epsilon", epsilon)
    _check.fraction("delta", delta)
    _check.positive("radius", radius)
    if regularization is not None:
        _check.non_negative("regularization", regularization)
    _check.one_of("calibration", calibration, CALIBRATIONS)
    if calibration == "gaussian" and (delta == 0 or regularization == 0):
        raise ValueError(
            f"calibration='gaussian' needs delta > 0 and regularization > 0, got delta={delta!r} and "
            f"regularization={regularization!r}; use calibration='range', or set both"
        )


def calibrate(
    sensitivity: Sensitivity,
    *,
    epsilon: float,
    delta: float,
    radius: float,
    regularization: float,
    nominal_size: int,
    calibration: str = "auto",
) -> Calibration:
    """The largest c whose release is (ε, δ)-DP under the sensitivity's adjacency.

    Args:
        sensitivity: bounds on one record's influence.
        epsilon: ε > 0.
        delta: δ in [0, 1); 0 asks for pure ε-DP.
        radius: R > 0.
        regularization: λ ≥ 0.
        nominal_size: N, public.
        calibration: ``"auto"``, which the engine uses, takes the better of ``"range"`` and, where δ > 0 and λ > 0,
            ``"gaussian"``.

    Raises:
        ValueError: a value out of range, or ``"gaussian"`` without δ > 0 and λ > 0.

    **Privacy:** a function of public numbers; see the module docstring for the proofs.
    """
    check_request(epsilon, delta, radius, regularization, calibration)
    return calibrate_within(
        allowances(epsilon, delta)[0],
        sensitivity,
        radius=radius,
        regularization=regularization,
        nominal_size=nominal_size,
        calibration=calibration,
    )


def calibrate_within(
    allowance: Allowance,
    sensitivity: Sensitivity,
    *,
    radius: float,
    regularization: float,
    nominal_size: int,
    calibration: str = "auto",
) -> Calibration:
    """The largest c of a draw that costs no more than allowed. Arguments as in ``calibrate``."""
    _check.positive_int("nominal_size", nominal_size)
    width, lipschitz = sensitivity.width(radius), sensitivity.lipschitz(radius)
    ridge = regularization * nominal_size
    candidates = {}
    if calibration != "gaussian":
        candidates["range"] = allowance.epsilon_range / width
    if calibration != "range" and allowance.mu > 0 and ridge > 0:
        candidates["gaussian"] = ridge * (allowance.mu / lipschitz) ** 2
    method = max(candidates, key=lambda name: candidates[name])
    c = candidates[method]
    # The target itself where c came from it, so that the ledger shows the round number that was asked for.
    epsilon_range = allowance.epsilon_range if method == "range" else c * width
    mu = lipschitz * math.sqrt(c / ridge) if ridge > 0 else math.inf
    if method == "gaussian":
        mu = allowance.mu
    return Calibration(c * (1 - ROUNDING_MARGIN), epsilon_range, mu, method)
