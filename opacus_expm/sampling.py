"""Exact draws from a Gaussian truncated to a ball.

The mechanism's density on |ξ| ≤ R is exp(−½ξᵀPξ + bᵀξ) with P = c(S + λN·I) ⪰ 0 and b = −cG. The ball is invariant
under rotations, so everything happens in the eigenbasis of P, with precision w ≥ 0, and in units of R.

For any κ ≥ 0 the density is below e^{½κR²} times the density of a Gaussian with precision P + κI, so: draw
ξ ~ Normal((P+κI)⁻¹b, (P+κI)⁻¹), accept if |ξ| ≤ R and then with probability exp(−½κ(R²−|ξ|²)). This is exact for
every κ; the κ that accepts most often is 0 if the untilted Gaussian has E|ξ|² ≤ R², else the one at which the tilted
Gaussian has E|ξ|² = R².

Only algorithms with a proof of exactness are admitted as the default. "Exact" is a statement about real arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import brentq

Array = NDArray[np.float64]

_PROPOSAL_ELEMENTS = 2**20  # normals drawn at a time: 8 MiB


def noise_source(noise_generator: torch.Generator | np.random.Generator | None) -> np.random.Generator:
    """The generator of a draw: fresh entropy of the operating system, unless one is given.

    The global seeds of torch, numpy and random play no part: ``torch.manual_seed(0)`` in a training script must not
    make the noise predictable. A given torch generator is advanced and seeds a numpy one.
    """
    if noise_generator is None:
        return np.random.default_rng()
    if isinstance(noise_generator, np.random.Generator):
        return noise_generator
    if isinstance(noise_generator, torch.Generator):
        words = torch.randint(2**62, (4,), generator=noise_generator, device=noise_generator.device)
        return np.random.default_rng(words.tolist())
    raise TypeError(
        f"noise_generator must be a torch.Generator, a numpy.random.Generator or None, got {noise_generator!r}"
    )


@dataclass(frozen=True, repr=False, eq=False)
class BallGaussian:
    """The density exp(−½Σ w_j z_j² + b·z) on |z| ≤ R, in an orthonormal basis in which the precision is diagonal.

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
        object.__setattr__(self, "precision", np.clip(self.precision, 0.0, None))

    def __repr__(self) -> str:
        return f"BallGaussian(dim={self.precision.size}, radius={self.radius}, private values hidden)"

    def __reduce__(self) -> NoReturn:
        raise TypeError("BallGaussian holds private data and is not pickled; release a model instead")

    def tilt(self) -> float:
        """The κR² that accepts most often.

        Σ_j [1/(w_j+κ) + b_j²/(w_j+κ)²] = 1 in units of R. With all w equal to v the root is s − v,
        s = (k + √(k²+4|b|²))/2, so it lies between s − w_max and s − w_min; both ends are padded because the bracket
        collapses when all w are equal.
        """
        w, b = self.precision * self.radius**2, self.linear * self.radius

        def excess(kappa: float) -> float:
            inverse = 1.0 / np.maximum(w + kappa, 1e-150)
            with np.errstate(over="ignore"):
                second_moment = float(np.sum(inverse + (b * inverse) ** 2))
            return min(second_moment, 1e300) - 1.0

        if excess(0.0) <= 0:
            return 0.0
        size = w.size
        s = 0.5 * size + float(np.hypot(0.5 * size, np.linalg.norm(b)))
        low = max(0.0, (s - float(w.max())) * (1 - 1e-9) - 1e-9)
        high = (s - float(w.min())) * (1 + 1e-9) + 1e-9
        if excess(low) <= 0:  # rounding put the root at the padded end
            return low
        return float(brentq(excess, low, high, xtol=1e-300, rtol=1e-12))

    def sample(self, generator: np.random.Generator, draws: int = 1) -> Array:
        """Independent exact draws ξ, one a row.

        **Privacy:** a draw is what the mechanism releases; each one that leaves must be in the ledger. How many
        proposals a draw took is private, and is not reported.
        """
        w, b, kappa = self.precision * self.radius**2, self.linear * self.radius, self.tilt()
        scale = 1.0 / np.sqrt(w + kappa)
        mean = b * scale**2
        rows = max(1, _PROPOSAL_ELEMENTS // w.size)
        accepted: list[Array] = []
        missing = draws
        while missing > 0:
            z = mean + scale * generator.standard_normal((rows, w.size))
            slack = 1.0 - np.einsum("ij,ij->i", z, z)
            kept = z[(slack >= 0) & (generator.random(rows) < np.exp(-0.5 * kappa * np.maximum(slack, 0.0)))]
            accepted.append(kept[:missing])
            missing -= len(accepted[-1])
        z = np.concatenate(accepted) * self.radius
        return z if self.basis is None else z @ self.basis.T
