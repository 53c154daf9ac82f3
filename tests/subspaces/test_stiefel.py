"""The paper's map: columns that are uniform on the Stiefel manifold."""

from __future__ import annotations

import numpy as np
from reference import dense, normal, random_map
from scipy import stats

from opacus_expm.subspaces.stiefel import Columns


def raw_qr(seed: int) -> np.ndarray:
    """What LAPACK returns before the signs are put right."""
    return np.linalg.qr(np.random.Generator(np.random.Philox(seed)).standard_normal((6, 3)))[0]


def test_stiefel_signs_are_balanced() -> None:
    count = 200
    found = np.stack([dense(random_map("stiefel", 6, 3, seed)).numpy() for seed in range(count)])
    for entry in found.reshape(count, -1).T:
        assert stats.binomtest(int((entry > 0).sum()), count).pvalue > 1e-3
    # LAPACK's own convention fixes the sign of the first entry, so the same test rejects it.
    raw = sum(raw_qr(seed)[0, 0] > 0 for seed in range(count))
    assert stats.binomtest(int(raw), count).pvalue < 1e-3


def test_stiefel_entries_have_the_uniform_law() -> None:
    # Each entry of a uniform frame is a coordinate of a uniform point on the sphere: x² ~ Beta(½, (p−1)/2).
    count, size, dim = 400, 6, 3
    found = np.stack([dense(random_map("stiefel", size, dim, seed)).numpy() for seed in range(count)])
    law = stats.beta(0.5, (size - 1) / 2)
    for entry in found.reshape(count, -1).T:
        assert stats.kstest(entry**2, law.cdf).pvalue > 1e-3
        assert abs(entry.mean()) < 3.5 * np.sqrt(1 / size / count)
    # A frame that is not uniform is rejected: the first columns of a permutation matrix.
    assert stats.kstest((found[:, 0, 0].round() ** 2), law.cdf).pvalue < 1e-3


def test_stiefel_is_invariant_under_rotation() -> None:
    # The law of QA is that of A; compare two independent samples along a direction that mixes all coordinates.
    count, size = 400, 6
    rotation = np.linalg.qr(normal(size, size).numpy())[0]
    plain = [dense(random_map("stiefel", size, 2, seed)).numpy()[0, 1] for seed in range(count)]
    rotated = [
        (rotation @ dense(random_map("stiefel", size, 2, seed)).numpy())[0, 1] for seed in range(count, 2 * count)
    ]
    assert stats.ks_2samp(plain, rotated).pvalue > 1e-3


def test_it_says_what_it_is() -> None:
    projection = random_map("stiefel", 9, 4, seed=3)
    assert isinstance(projection, Columns)
    assert (projection.kind, projection.seed, projection.size, projection.dim) == ("stiefel", 3, 9, 4)
