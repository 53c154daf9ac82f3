"""Budget and sensitivity → inverse temperature c of the density p(ξ) ∝ exp(−c[ξᵀG + ½ξᵀSξ + ½λN|ξ|²]).

Three calibrations, all of them functions of public numbers only:

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

``paper`` (pure, the reference). c = ε/(2(2RC_g + R²C_H)), the source paper's `eq:DeltaU` with its ε/(2ΔU) scaling,
    with the bounds enforced by clipping. It spends less than ε (half of it, under add/remove); the ledger
    records what it really spends.

N is a public constant: the comparison is between D and D∪{z} run with the same N. If N followed the data, the λN
term would change between neighbours and the statements above would be false.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from opacus_expm import _check, curves
from opacus_expm.sums import Sensitivity

CALIBRATIONS = ("auto", "range", "gaussian", "paper")

# The draw uses c·(1 − 1e-6): it absorbs the rounding of clipping and of long sums, which is not part of the proof.
_ROUNDING_MARGIN = 1e-6


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


def check_request(epsilon: float, delta: float, radius: float, regularization: float, calibration: str) -> None:
    """Everything about a request that can be refused before the sensitivity is known.

    Raises:
        TypeError, ValueError: naming the argument, what came and what to do.
    """
    _check.positive("epsilon", epsilon)
    _check.fraction("delta", delta)
    _check.positive("radius", radius)
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
        calibration: ``"auto"`` takes the better of ``"range"`` and, where δ > 0 and λ > 0, ``"gaussian"``;
            ``"paper"`` is the source paper's.

    Raises:
        ValueError: a value out of range, or ``"gaussian"`` without δ > 0 and λ > 0.

    **Privacy:** a function of public numbers; see the module docstring for the proofs.
    """
    check_request(epsilon, delta, radius, regularization, calibration)
    _check.positive_int("nominal_size", nominal_size)
    width, lipschitz = sensitivity.width(radius), sensitivity.lipschitz(radius)
    ridge = regularization * nominal_size
    if calibration == "paper":
        delta_u = 2 * radius * sensitivity.max_grad_norm + radius**2 * sensitivity.max_curvature
        candidates = {"paper": epsilon / (2 * delta_u)}
    else:
        candidates = {}
        if calibration != "gaussian":
            candidates["range"] = curves.bounded_range_for(epsilon, delta) / width
        if calibration != "range" and delta > 0 and ridge > 0:
            candidates["gaussian"] = ridge * (curves.gaussian_mu(epsilon, delta) / lipschitz) ** 2
    method = max(candidates, key=lambda name: candidates[name])
    c = candidates[method]
    # The target itself where c came from it, so that the ledger shows the round number that was asked for.
    epsilon_range = curves.bounded_range_for(epsilon, delta) if method == "range" else c * width
    if method == "gaussian":
        mu = curves.gaussian_mu(epsilon, delta)
    else:
        mu = lipschitz * math.sqrt(c / ridge) if ridge > 0 else math.inf
    return Calibration(c * (1 - _ROUNDING_MARGIN), epsilon_range, mu, method)
