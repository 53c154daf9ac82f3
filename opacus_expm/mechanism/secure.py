"""Secure mode: draws and sums whose noise is cryptographic and whose work does not depend on the data.

Outside secure mode the number of proposals a draw takes depends on the private data, and so does its duration. Here

* every random bit comes from the operating system's cryptographic generator, and normals and acceptances are right far
  into their tails (``SystemNoise``);
* the number of proposals is fixed in advance from public numbers, M = ⌈2 ln(1/δ_f)·√(2π(k + cRNC_g))⌉, all of them are
  drawn and weighed, and the first accepted one is picked by arithmetic instead of by branching;
* the draw is rounded to a public grid of spacing R·2⁻²⁶, far coarser than float64's resolution, so that its last bits,
  which betray how it was computed, are gone.

If no proposal is accepted the draw is ξ = 0. The tilted proposal accepts with probability at least 1/√(2π(k + |b|R))
(the infimum over precisions and linear terms, found by numerical optimisation; the tests search again). So that this
can be relied upon whatever the private number of records is, the gradient sum is projected onto the ball |G| ≤ 3N·C_g
(``within_reach``): |b|R ≤ 3B, B = cRNC_g, and none of the M proposals is accepted with probability at most
exp(−M/√(2π(k + 3B))) ≤ δ_f^{2/√3} < 5·10⁻¹⁸. With what the tails of the noise leave (``SystemNoise``) that is below
δ_f. A mechanism within total variation δ_f of an ε-DP one is (ε, (1+e^ε)δ_f)-DP: the ledger carries that δ.

The projection leaves the sums of up to 3N records as they are, and costs nothing in sensitivity: as a projection onto a
convex set it moves two sums no further apart than they were, so that one record still changes the projected sum by a
vector of at most its own length, and the curvature as before. All bounds on one record's influence hold for every such
vector, with one exception: a gradient that is parallel to the only row of its Jacobian may be parallel no more. Secure
mode therefore calibrates with ``Sensitivity.projected``.

**Sums with noise**, of which rounds without a radius are made, take as many variates as they have numbers. With s the scale
of the noise, they are rounded to a public grid of spacing s·2⁻¹⁰. An answer is the exact one, of which every number was
moved by at most a sixteenth of the spacing before it was rounded. That fails with probability δ_f or less, which the ledger
carries for every such answer as it does for a draw. For sums of at most 2³⁷·s, of which float64's rounding takes at most
half of that sixteenth, it is so because

* normal noise is moved by less than 2⁻³⁰·s unless Ū < 2⁻⁹⁷ for one of its variates (``SystemNoise``), which for 10¹³ numbers
  has a probability below 1.3·10⁻¹⁶;
* isotropic noise is z = r·n/|n| with k normals n and r = −Σ ln U_i of k uniforms. Unless one of these has Ū < 2⁻⁷⁷, which
  for k ≤ 10⁷ has a probability below 3·10⁻¹⁶, normals are moved by less than 2⁻⁵⁰ and logarithms by less than 2⁻⁵⁰. That
  moves n/|n| by at most 2√k·2⁻⁵⁰/|n|, and r, with float64's rounding of it, by less than k·2⁻⁴⁶, so z by less than
  2⁻⁴⁹·√k·r/|n| + k·2⁻⁴⁶ < 2⁻¹⁵ where r/|n| ≤ 2³³/√k.
  For k = 1 the direction is ±1 and is not moved. For k = 2, P(|n| < t) ≤ t²/2 and E r² = 6, so r/|n| is larger with
  probability at most 6·2⁻⁶⁶ < 10⁻¹⁹; for more dimensions it is less.

A choice among finitely many rounds nothing. A candidate's probability is what its weight says up to the rounding of sums, a
factor of 1 ± 10⁻¹², for all that are likelier than 2⁻⁹⁷. What is drawn for the records, such as the random cotangents of a
metric or the numbers of random views, comes from ordinary generators in a state that nobody knows, in secure mode too
(``gathering.randomness``): one record's share is bounded whatever is drawn. Which records are in a Poisson sample is decided
by the numbers of ``SystemNoise``.

**Not covered:** the time of the pass over the data and of the eigendecomposition, memory access patterns, and the
rounding inside floating-point arithmetic beyond what the grid hides.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri

from opacus_expm.mechanism.density import Array, BallGaussian

FAILURE_PROBABILITY = 1e-15  # δ_f
REACH = 3.0  # |b|R, in units of cRNC_g, to which linear terms are cut off
GRID = 2.0**-26  # of draws, in units of R
SUM_GRID = 2.0**-10  # of sums with noise, in units of the noise
Words = NDArray[np.uint64]
_CHUNK_ELEMENTS = 2**18
_BISECTIONS = 128


class SystemNoise:
    """Uniform, normal and gamma variates from the operating system's cryptographic generator, sixteen bytes for each number.

    A draw is rounded to the public grid, which hides steps between possible variates only if they are smaller. Uniforms
    with 53 bits are too coarse for that: at k = 400 their normals are further apart than the grid from 6.4 standard
    deviations on, and outputs with a mass of the order of 10⁻⁸ could come from one data set and not from its neighbour.

    Here a uniform U on (0, 1] is a binary fraction of 128 random bits, and a normal is ±|Φ⁻¹(U)| with a random sign and
    U on (0, ½) of 127 random bits. As floating-point numbers they have a geometric exponent and 53 significant bits:
    let Ū be the real number that begins with the same bits and goes on for ever. Then

        |U − Ū| ≤ 2⁻¹²⁸ + 2⁻⁵²Ū      and      |Φ⁻¹(U) − Φ⁻¹(Ū)| ≤ 1.26·(2⁻¹²⁸/Ū + 2⁻⁵²) to first order,

    because dΦ⁻¹/du = 1/φ and u/φ(Φ⁻¹(u)) ≤ √(π/2) for u ≤ ½. Where Ū ≥ 2⁻⁹⁷ this is less than 2⁻³⁰, and in a draw,
    whose variates are multiplied by at most R, less than a sixteenth of the grid's spacing R·2⁻²⁶. An acceptance, U <
    e^{−x}, has probability e^{−x} up to a factor 1 ± 2⁻³⁰ for all e^{−x} ≥ 2⁻⁹⁷.

    **What is left:** Ū < 2⁻⁹⁷ has probability 2⁻⁹⁷ for a uniform and 2⁻⁹⁶ for a normal. The M(k+1) variates of a draw
    leave at most M(k+1)·2⁻⁹⁶, below 10⁻¹⁶ up to 10¹² variates, which is part of the δ_f that the ledger carries (see
    ``proposals_needed``).
    """

    def __init__(self) -> None:
        self.consumed = 0

    def random(self, count: int) -> Array:
        """So many uniform numbers in (0, 1]."""
        return uniforms(self._words(count))

    def standard_normal(self, size: int | tuple[int, ...]) -> Array:
        """So many standard normal numbers, or an array of them."""
        return normals(self._words(size if isinstance(size, int) else math.prod(size))).reshape(size)

    def standard_gamma(self, shape: int) -> float:
        """A number of the law Gamma(k), k an integer: the sum of k exponential ones, each −ln U."""
        return -float(np.log(self.random(shape)).sum())

    def spawn(self, count: int) -> list[np.random.Generator]:
        """Ordinary generators, each in a state of its own from the system's entropy, for what is drawn for the records."""
        return [np.random.default_rng() for _ in range(count)]

    def _words(self, count: int) -> Words:
        """Two random words for each of ``count`` variates."""
        self.consumed += count
        return np.frombuffer(os.urandom(16 * count), dtype=np.uint64).reshape(count, 2)


def uniforms(words: Words, bits: int = 64) -> Array:
    """(a·2^bits + b + ½)·2^(−2·bits) for rows (a, b) of words of so many bits: uniform if the words are.

    Small values keep their relative precision: the second word counts as much as there is room for beside the first.
    """
    unit = 2.0**-bits
    high, low = words.astype(np.float64).T
    fractions: Array = (high + (low + 0.5) * unit) * unit
    return fractions


def normals(words: Words, bits: int = 64) -> Array:
    """±|Φ⁻¹(U)| for rows of two words: the sign from the last bit of the first word, U on (0, ½] from all the others."""
    high, low = words.T
    size = -ndtri(uniforms(np.stack([high >> np.uint64(1), low], axis=1), bits))
    signed: Array = np.where(high & np.uint64(1), size, -size)
    return signed


def proposals_needed(dim: int, linear_bound: float, failure_probability: float = FAILURE_PROBABILITY) -> int:
    """M = ⌈2 ln(1/δ_f)·√(2π(k + B))⌉ for linear terms with |b|R ≤ 3B; B is public."""
    return math.ceil(2 * math.log(1 / failure_probability) * math.sqrt(2 * math.pi * (dim + linear_bound)))


def within_reach(density: BallGaussian, linear_bound: float) -> BallGaussian:
    """The density with its linear term b projected onto |b|R ≤ 3B, for the public B = cRNC_g.

    **Privacy:** of densities whose b = −cG, it is that of the sum G projected onto |G| ≤ 3N·C_g (module docstring).
    """
    length = float(np.linalg.norm(density.linear)) * density.radius
    share = min(1.0, REACH * linear_bound / length) if length > 0 else 1.0
    return replace(density, linear=share * density.linear)


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
            z = mean + scale * noise.standard_normal((rows, w.size))
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
