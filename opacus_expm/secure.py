"""Secure mode: a draw whose noise is cryptographic and whose work does not depend on the data.

Outside secure mode the number of proposals a draw takes depends on the private data, and so does its duration. Here

* every random bit comes from the operating system's cryptographic generator;
* the number of proposals is fixed in advance from public numbers, M = ⌈2 ln(1/δ_f)·√(2π(k + cRNC_g))⌉, all of them are
  drawn and weighed, and the first accepted one is picked by arithmetic instead of by branching;
* the draw is rounded to a public grid of spacing R·2⁻²⁶, far coarser than float64's resolution, so that its last bits,
  which betray how it was computed, are gone.

If no proposal is accepted the draw is ξ = 0. The tilted proposal accepts with probability at least
1/√(2π(k + |b|R)) (the infimum over precisions and linear terms, found by numerical optimisation; the tests search
again), and |b|R ≤ cRnC_g for n records, so with the factor 2 in M as a margin the probability of that is below δ_f
whenever n ≤ 3N. A mechanism within total variation δ_f of an ε-DP one is (ε, (1+e^ε)δ_f)-DP: the ledger carries that δ.

**Not covered:** the time of the pass over the data and of the eigendecomposition, memory access patterns, and the
rounding inside floating-point arithmetic beyond what the grid hides.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass

import numpy as np
from scipy.special import ndtri

from opacus_expm.density import Array, BallGaussian

FAILURE_PROBABILITY = 1e-15  # δ_f
GRID = 2.0**-26  # in units of R
_CHUNK_ELEMENTS = 2**18
_BISECTIONS = 128


class SystemNoise:
    """Uniform and normal variates from the operating system's cryptographic generator.

    Each variate consumes exactly eight bytes; normals are the inverse normal distribution function of uniforms with 53
    random bits, at the midpoints of their cells.
    """

    def __init__(self) -> None:
        self.consumed = 0

    def random(self, count: int) -> Array:
        """Uniform on (0, 1)."""
        self.consumed += count
        bits = np.frombuffer(os.urandom(8 * count), dtype=np.uint64) >> np.uint64(11)
        return (bits.astype(np.float64) + 0.5) * 2.0**-53

    def standard_normal(self, rows: int, columns: int) -> Array:
        """Standard normal matrix."""
        normals: Array = ndtri(self.random(rows * columns)).reshape(rows, columns)
        return normals


def proposals_needed(dim: int, linear_bound: float, failure_probability: float = FAILURE_PROBABILITY) -> int:
    """M = ⌈2 ln(1/δ_f)·√(2π(k + B))⌉ for the public bound B on |b|R."""
    return math.ceil(2 * math.log(1 / failure_probability) * math.sqrt(2 * math.pi * (dim + linear_bound)))


@dataclass(frozen=True)
class FixedWork:
    """The tilted sampler with a fixed number of proposals (module docstring).

    Attributes:
        proposals: M.
    """

    proposals: int

    def sample(self, density: BallGaussian, noise: SystemNoise) -> Array:
        """One draw ξ on the public grid; 0 if no proposal was accepted."""
        w, b = density.unit()
        kappa = self._tilt(w, b)
        scale = 1.0 / np.sqrt(w + kappa)
        mean = b * scale**2
        chosen = np.zeros_like(w)
        found = 0.0
        step = max(1, _CHUNK_ELEMENTS // w.size)
        for start in range(0, self.proposals, step):
            rows = min(step, self.proposals - start)
            z = mean + scale * noise.standard_normal(rows, w.size)
            slack = 1.0 - np.einsum("ij,ij->i", z, z)
            accept = (slack >= 0) & (noise.random(rows) < np.exp(-0.5 * kappa * np.maximum(slack, 0.0)))
            first = accept & (np.cumsum(accept) == 1)
            chosen += (1.0 - found) * (first.astype(np.float64) @ z)
            found = max(found, float(accept.any()))
        grid = np.round(density.from_unit(chosen[None])[0] / (density.radius * GRID)) * (density.radius * GRID)
        return np.asarray(grid, dtype=np.float64)

    @staticmethod
    def _tilt(w: Array, b: Array) -> float:
        """``BallGaussian.tilt`` in units of R by a fixed number of bisections; any value gives an exact draw."""
        low = 0.0
        high = 1.0 + 0.5 * w.size + float(np.hypot(0.5 * w.size, np.linalg.norm(b)))
        for _ in range(_BISECTIONS):
            middle = 0.5 * (low + high)
            inverse = 1.0 / np.maximum(w + middle, 1e-150)
            with np.errstate(over="ignore"):
                above = float(np.sum(inverse + (b * inverse) ** 2) > 1.0)
            low, high = above * middle + (1 - above) * low, above * high + (1 - above) * middle
        return high
