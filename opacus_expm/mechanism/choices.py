"""The exponential mechanism over finitely many candidates, and the noise of sums."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from opacus_expm.mechanism.density import Array


class Source(Protocol):
    """Where random numbers come from: a numpy generator, or secure mode's."""

    def random(self, size: int, /) -> Array:
        """Uniform on [0, 1]."""

    def standard_normal(self, size: int | tuple[int, ...], /) -> Array:
        """Standard normal."""

    def standard_gamma(self, shape: int, /) -> float:
        """Of the law Gamma(shape)."""

    def spawn(self, count: int, /) -> Sequence[np.random.Generator]:
        """Independent ordinary generators, for what is drawn for the records."""


def chosen(logits: Array, source: Source) -> int:
    """Draw a candidate j with probability proportional to exp(logits[j]).

    Where one record changes the logits by amounts that lie in an interval of length ε₁, the choice is ε₁-bounded-range.
    Public terms in the logits do not change that.

    The least likely candidates come first, where sums and secure mode's uniforms are precise relative to their size; at
    the other end a candidate with a probability below 2⁻⁵³ could never be chosen.
    """
    order = np.argsort(logits, kind="stable")
    cumulative = np.cumsum(np.exp(logits[order] - logits[order[-1]]))
    place = np.searchsorted(cumulative, source.random(1)[0] * cumulative[-1], side="right")
    return int(order[min(place, logits.size - 1)])


def isotropic_noise(dim: int, source: Source) -> Array:
    """A vector z in k dimensions with density proportional to e^{−|z|}: a uniform direction, and |z| of the law Gamma(k).

    In polar coordinates the density of r = |z| is proportional to r^{k−1}e^{−r}. Added with factor C/ε to a sum in which a
    record's share has norm at most C, it makes the sum ε-DP: the log density at x, −(ε/C)|x − G| up to a constant, moves by
    at most ε where G moves by C, by the triangle inequality. (The K-norm mechanism of Hardt and Talwar, STOC 2010, for the
    Euclidean ball.) Both ends of [−ε, ε] are reached, so its range is 2ε.
    """
    normal = source.standard_normal(dim)
    return np.asarray(normal * (source.standard_gamma(dim) / np.linalg.norm(normal)))


def symmetric_noise(dim: int, source: Source) -> Array:
    """A symmetric matrix with N(0, 1) on the diagonal and N(0, ½) off it.

    That is standard normal noise in the isometric coordinates of symmetric matrices, in which the Euclidean norm is the
    Frobenius norm: added with factor c/μ to a sum of matrices of Frobenius norm at most c, it makes the sum μ-GDP.
    """
    normal = source.standard_normal((dim, dim))
    upper = np.triu(normal, 1) / np.sqrt(2)
    return np.asarray(upper + upper.T + np.diag(np.diag(normal)))
