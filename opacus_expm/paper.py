"""The source paper's formulas as functions (labels in brackets are the paper's).

They are the reference to compare with, not what the engine computes: its own range is narrower (``sums``) and its
sampler is exact without them. Where the paper's text slips, the correct form is used and the slip is named.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from opacus_expm import _check


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
