"""A private quantile of norms, by the exponential mechanism over a fixed grid."""

from __future__ import annotations

import math

import numpy as np

from opacus_expm.mechanism.choices import Source, chosen
from opacus_expm.mechanism.density import Array

GRID = np.logspace(-8, 8, 401)  # fixed, public: steps of 9.6 %
GRID.flags.writeable = False


def reliable_epsilon(nominal_size: int, quantile: float) -> float:
    """The ε₁ from which a purchase is reliable: ε₁·N·min(q, 1−q) = 2(ln J + 5).

    The probability that the chosen point is t records or more away from the quantile is at most
    J·exp(−ε₁t/(2 max(q, 1−q))).
    """
    return 2 * (math.log(GRID.size) + 5) / (nominal_size * min(quantile, 1 - quantile))


def private_quantile(
    counts: Array, quantile: float, epsilon: float, adjacency: str, source: Source, base: Array | None = None
) -> float:
    """The upper end of the interval of ``GRID`` in which a quantile of private norms lies, by the exponential mechanism.

    P(j) ∝ exp(ε₁·u(j)/w + b(j)) with u as in ``quantile_scores`` and a public b. Adding a record moves #{norms ≤ t} − q·n by
    1 − q or by −q, so u(j) changes by at most max(q, 1−q) either way, and its change over the grid has range at most
    2 max(q, 1−q) = w (twice that for replace-one): the choice is **ε₁-bounded-range**, hence ε₁-DP.

    Args:
        counts: ``grid_counts`` of the records' norms; private.
        quantile: q in (0, 1).
        epsilon: ε₁.
        adjacency: ``"add_remove"`` or ``"replace_one"``.
        source: of randomness.
        base: b at every point of the grid, public; None for 0.
    """
    return float(GRID[chosen(quantile_logits(counts, quantile, epsilon, adjacency, base), source)])


def quantile_logits(counts: Array, quantile: float, epsilon: float, adjacency: str, base: Array | None = None) -> Array:
    """ε₁·u(j)/w + b(j) at every point of the grid, of which ``private_quantile`` is a choice; private."""
    logits: Array = epsilon * quantile_scores(counts, quantile) / score_width(quantile, adjacency)
    return logits if base is None else logits + base


def grid_counts(norms: Array) -> Array:
    """#{norms ≤ t} at every point t of the grid, and n at the end; private. Counts of parts of the data add up."""
    below = np.searchsorted(np.sort(norms), GRID, side="right")
    return np.append(below, norms.size).astype(np.float64)


def quantile_scores(counts: Array, quantile: float) -> Array:
    """u(j) = −max(0, #{norms ≤ t_{j−1}} − q·n, q·n − #{norms ≤ t_j}) at every point of the grid; private.

    It is 0 for the interval (t_{j−1}, t_j] that holds the quantile. (Scores of points, −|#{norms ≤ t_j} − q·n|, are all the
    same above norms that lie between two points close together, and the choice is then anything.)

    Raises:
        ValueError: something else than ``grid_counts``, such as the norms themselves.
    """
    if counts.shape != (GRID.size + 1,):
        raise ValueError(f"counts must be grid_counts(norms), {GRID.size + 1} numbers, got shape {counts.shape}")
    wanted = quantile * counts[-1]
    before = np.concatenate([[0.0], counts[:-2]])
    scores: Array = -np.maximum(0.0, np.maximum(before - wanted, wanted - counts[:-1]))
    return scores


def score_width(quantile: float, adjacency: str) -> float:
    """The width w: how much the change of the scores by one record can vary over the grid."""
    return 2 * max(quantile, 1 - quantile) * (2 if adjacency == "replace_one" else 1)
