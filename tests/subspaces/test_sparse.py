"""The sparse map: one signed entry a row, even buckets, O(p) memory."""

from __future__ import annotations

import tracemalloc

import torch
from hypothesis import given
from hypothesis import strategies as st
from reference import dense, normal, random_map
from scipy import stats

from opacus_expm.subspaces.sparse import SparseMap

shapes = st.integers(1, 60).flatmap(lambda size: st.tuples(st.just(size), st.integers(1, size)))  # p and k ≤ p


@given(shape=shapes, seed=st.integers(0, 2**63 - 1))
def test_sparse_has_one_signed_entry_a_row_in_even_buckets(shape: tuple[int, int], seed: int) -> None:
    size, dim = shape
    a = dense(random_map("sparse", size, dim, seed))
    assert ((a != 0).sum(1) == 1).all()
    filled = (a != 0).sum(0)
    assert int(filled.max() - filled.min()) <= 1
    entries = a.abs().sum(1)
    assert torch.allclose(entries, 1 / filled[a.abs().argmax(1)].double().sqrt(), rtol=1e-12)


def test_sparse_buckets_and_signs_are_uniform() -> None:
    # Bucket and sign of the first coordinate over many seeds.
    count, dim = 2000, 4
    found = torch.stack([dense(random_map("sparse", 12, dim, seed))[0] for seed in range(count)])
    buckets = torch.bincount(found.abs().argmax(1), minlength=dim).numpy()
    assert stats.chisquare(buckets).pvalue > 1e-3
    assert stats.binomtest(int((found.sum(1) > 0).sum()), count).pvalue > 1e-3
    # Without the permutation, coordinate 0 would always be in bucket 0: the same test rejects that.
    assert stats.chisquare([count, 0, 0, 0]).pvalue < 1e-3


def test_sparse_never_holds_p_times_k() -> None:
    size, dim = 2_000_000, 5000
    tracemalloc.start()
    projection = random_map("sparse", size, dim, dtype=torch.float32)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert isinstance(projection, SparseMap)
    assert projection.bucket.numel() == projection.weight.numel() == size
    assert peak < 50 * size  # bytes; a dense map would hold 8·5000 for each coordinate
    # And it maps: columns are orthonormal, so projecting undoes lifting.
    xi = normal(dim)
    back = torch.zeros(1, dim)
    projection.add_projected(back, projection.lift(xi)[None], 0)
    assert torch.allclose(back[0].double(), xi, rtol=1e-4, atol=1e-4)


def test_it_says_what_it_is() -> None:
    projection = random_map("sparse", 9, 4, seed=3)
    assert isinstance(projection, SparseMap)
    assert (projection.kind, projection.seed, projection.size, projection.dim) == ("sparse", 3, 9, 4)
