"""The mechanism's density: a Gaussian truncated to a ball.

On |ξ| ≤ R the density is exp(−½ξᵀPξ + bᵀξ) with P = c(S + λN·I) ⪰ 0 and b = −cG. The ball is invariant under
rotations, so everything is written in the eigenbasis of P, with precision w ≥ 0, and in units of R.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq

from opacus_expm._private import PrivateValues

Array = NDArray[np.float64]


@dataclass(frozen=True, repr=False, eq=False)
class BallGaussian(PrivateValues):
    """The density ∝ exp(−½Σ w_j z_j² + b·z) on |z| ≤ R, in an orthonormal basis where the precision is diagonal.

    Args:
        precision: w ≥ 0; small negative values from rounding are set to 0.
        linear: b.
        radius: R > 0.
        basis: orthonormal columns that map z to ξ, or None for z = ξ.

    **Privacy:** holds private values; ``repr`` shows shapes only, and pickling is refused.
    """

    precision: Array
    linear: Array
    radius: float
    basis: Array | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "precision", np.clip(np.asarray(self.precision, dtype=np.float64), 0.0, None))
        object.__setattr__(self, "linear", np.asarray(self.linear, dtype=np.float64))

    @property
    def dim(self) -> int:
        """The dimension k of the ball."""
        return self.precision.size

    def unit(self) -> tuple[Array, Array]:
        """The precision wR² and the linear term bR in the coordinates z/R, in which the ball has radius one."""
        return self.precision * self.radius**2, self.linear * self.radius

    def from_unit(self, z: Array) -> Array:
        """Turn rows of the unit ball, in the eigenbasis, into rows ξ."""
        scaled = z * self.radius
        return scaled if self.basis is None else scaled @ self.basis.T

    def tilt(self) -> float:
        """κR² ≥ 0 at which the Gaussian with precision P + κI has E|ξ|² = R², or 0 if P's own has less.

        Σ_j [1/(w_j+κ) + b_j²/(w_j+κ)²] = 1 in units of R. With all w equal to v the root is s − v,
        s = (k + √(k²+4|b|²))/2, so it lies between s − w_max and s − w_min; both ends are padded because the bracket
        collapses when all w are equal.
        """
        w, b = self.unit()

        def excess(kappa: float) -> float:
            inverse = 1.0 / np.maximum(w + kappa, 1e-150)
            with np.errstate(over="ignore"):
                second_moment = float(np.sum(inverse + (b * inverse) ** 2))
            return min(second_moment, 1e300) - 1.0

        if excess(0.0) <= 0:
            return 0.0
        s = 0.5 * w.size + float(np.hypot(0.5 * w.size, np.linalg.norm(b)))
        low = max(0.0, s * (1 - 1e-9) - float(w.max()))
        high = s * (1 + 1e-9) - float(w.min())
        for end, sign in ((low, 1), (high, -1)):  # rounding may have put the root at a padded end
            if sign * excess(end) <= 0:
                return end
        return float(brentq(excess, low, high, xtol=1e-300, rtol=1e-12))

    def log_normalizer(self) -> float:
        """The logarithm of ∫_{|z| ≤ R} exp(−½Σ w_j z_j² + b·z) dz, by a contour integral.

        |z|² is a weighted sum of non-central χ² variables; with the ball's indicator as an inverse Laplace transform,

            Z = (1/2πi) ∫ exp(ψ(s)) ds/s,   ψ(s) = ½s + ½k ln 2π + ½Σ_j [b_j²/(w_j+s) − ln(w_j+s)]   (units of R),

        along any path from −i∞ to i∞ to the right of 0. The path is a hyperbola through the minimum κ of
        ψ(s) − ln s on the positive axis, along which the integrand is smooth and decays fast at both ends, so that the
        trapezoidal rule converges geometrically.
        """
        w, b = self.unit()

        def slope(s: float) -> float:  # of ψ(s) − ln s
            inverse = 1.0 / (w + s)
            return 0.5 - 0.5 * float(np.sum(inverse + (b * inverse) ** 2)) - 1.0 / s

        high = 4.0 + w.size + float(np.linalg.norm(b))
        while slope(high) < 0:
            high *= 2
        kappa = float(brentq(slope, 1.0, high, xtol=1e-300, rtol=1e-12)) if slope(1.0) < 0 else 1.0
        inverse = 1.0 / (w + kappa)
        curvature = 0.5 * float(np.sum(inverse**2 + 2 * b**2 * inverse**3)) + 1.0 / kappa**2
        step = min(0.02, 0.1 / (2 * kappa * math.sqrt(curvature)))
        v = np.arange(0.0, math.acosh(1.0 + 160.0 / kappa), step)
        s = kappa * (2.0 - np.cosh(v)) + 2j * kappa * np.sinh(v)
        velocity = -kappa * np.sinh(v) + 2j * kappa * np.cosh(v)
        # ψ(s) − ψ(κ), with the differences formed before they are summed
        shifted = w + s[:, None]
        change = 0.5 * (s - kappa) + 0.5 * np.sum(
            b**2 * (kappa - s[:, None]) * inverse / shifted - np.log(shifted * inverse), axis=1
        )
        values = np.imag(np.exp(change) * velocity / s)
        integral = step * (values.sum() - 0.5 * values[0]) / math.pi
        at_kappa = 0.5 * kappa + 0.5 * float(np.sum(b**2 * inverse + np.log(2 * math.pi * inverse)))
        return at_kappa + math.log(integral) + w.size * math.log(self.radius)

    def exponent(self, points: Array) -> Array:
        """−½ξᵀPξ + bᵀξ at rows ξ, in the ball or not: the log density without its normaliser."""
        z = points if self.basis is None else points @ self.basis
        exponent: Array = z @ self.linear - 0.5 * z**2 @ self.precision
        return exponent

    def log_density(self, points: Array) -> Array:
        """Normalised log density at rows ξ; −∞ outside the ball."""
        # ξ may have been rounded outwards
        inside = np.sum(points**2, axis=1) <= self.radius**2 * (1 + 1e-12)
        return np.where(inside, self.exponent(points) - self.log_normalizer(), -np.inf)

    def __repr__(self) -> str:
        return f"BallGaussian(dim={self.dim}, radius={self.radius}, private values hidden)"
