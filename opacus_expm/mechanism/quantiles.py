"""A private quantile of norms, by the exponential mechanism over a fixed grid."""

from __future__ import annotations

import math
from typing import Protocol

import numpy as np

from opacus_expm.mechanism.density import Array

GRID = np.logspace(-8, 8, 401)  # fixed, public: steps of 9.6 %
GRID.flags.writeable = False


class Uniforms(Protocol):
    """A source of uniform numbers: a numpy generator, or the secure mode's."""

    def random(self, count: int) -> Array:
        """So many uniform numbers in [0, 1]."""


def reliable_epsilon(nominal_size: int, quantile: float) -> float:
    """The ε₁ from which a purchase is reliable: ε₁·N·min(q, 1−q) = 2(ln J + 5).

    The probability that the chosen point is t records or more away from the quantile is at most
    J·exp(−ε₁t/(2 max(q, 1−q))).
    """
    return 2 * (math.log(GRID.size) + 5) / (nominal_size * min(quantile, 1 - quantile))


def private_quantile(counts: Array, quantile: float, epsilon: float, adjacency: str, uniforms: Uniforms) -> float:
    """A point of ``GRID`` near a quantile of private norms, by the exponential mechanism.

    P(t) ∝ exp(ε₁·u(t)/w) with u(t) = −|#{norms ≤ t} − q·n| and n the actual, private number of records. Adding a record
    moves #{norms ≤ t} − q·n by 1 − q or by −q, so the change of u over the grid has range at most 2 max(q, 1−q) = w (twice
    that for replace-one): the choice is **ε₁-bounded-range**, hence ε₁-DP.

    Args:
        counts: ``grid_counts`` of the records' norms; private.
        quantile: q in (0, 1).
        epsilon: ε₁.
        adjacency: ``"add_remove"`` or ``"replace_one"``.
        uniforms: source of randomness.
    """
    logits = epsilon * quantile_scores(counts, quantile) / score_width(quantile, adjacency)
    # The least likely points come first, where sums and secure mode's uniforms are precise relative to their size; at the
    # other end a point with a probability below 2⁻⁵³ could never be chosen.
    order = np.argsort(logits, kind="stable")
    cumulative = np.cumsum(np.exp(logits[order] - logits[order[-1]]))
    place = np.searchsorted(cumulative, uniforms.random(1)[0] * cumulative[-1], side="right")
    return float(GRID[order[min(place, GRID.size - 1)]])


def grid_counts(norms: Array) -> Array:
    """#{norms ≤ t} at every point t of the grid, and n at the end; private. Counts of parts of the data add up."""
    below = np.searchsorted(np.sort(norms), GRID, side="right")
    return np.append(below, norms.size).astype(np.float64)


def quantile_scores(counts: Array, quantile: float) -> Array:
    """The score u(t) at every point t of the grid; private.

    Raises:
        ValueError: something else than ``grid_counts``, such as the norms themselves.
    """
    if counts.shape != (GRID.size + 1,):
        raise ValueError(f"counts must be grid_counts(norms), {GRID.size + 1} numbers, got shape {counts.shape}")
    scores: Array = -np.abs(counts[:-1] - quantile * counts[-1])
    return scores


def score_width(quantile: float, adjacency: str) -> float:
    """The width w: how much the change of the scores by one record can vary over the grid."""
    return 2 * max(quantile, 1 - quantile) * (2 if adjacency == "replace_one" else 1)
