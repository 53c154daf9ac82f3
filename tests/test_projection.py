"""Projections: orthonormal columns, one linear map seen from three sides, and a public seed that decides it."""

from __future__ import annotations

import json
import subprocess
import sys
import tracemalloc
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from reference import dense
from scipy import stats
from torch import Tensor

from opacus_expm.projection import FullSpace, Projection, Sparse, Stiefel, make_projection

CPU = torch.device("cpu")
kinds = st.sampled_from(["stiefel", "sparse", "full"])
seeds = st.integers(0, 2**63 - 1)


@st.composite
def shapes(draw: st.DrawFn) -> tuple[int, int]:
    """p and k ≤ p."""
    size = draw(st.integers(1, 60))
    return size, draw(st.integers(1, size))


def make(kind: str, size: int, dim: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Projection:
    if kind == "full":
        return make_projection("stiefel", size, None, seed, device=CPU, dtype=dtype)
    return make_projection(kind, size, dim, seed, device=CPU, dtype=dtype)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def projected(projection: Projection, rows: Tensor, cuts: list[int]) -> Tensor:
    """Aᵀ(rows), in blocks that end at the given places."""
    out = torch.zeros(len(rows), projection.dim, dtype=rows.dtype)
    edges = [0, *cuts, rows.shape[1]]
    for start, stop in pairwise(edges):
        projection.add_projected(out, rows[:, start:stop], start)
    return out


# ------------------------------------------------------------------------------------------------ one linear map


@given(kind=kinds, shape=shapes(), seed=seeds)
def test_columns_are_orthonormal(kind: str, shape: tuple[int, int], seed: int) -> None:
    projection = make(kind, *shape, seed)
    a = dense(projection)
    assert a.shape == (projection.size, projection.dim)
    assert float((a.T @ a - torch.eye(projection.dim, dtype=torch.float64)).abs().max()) < 1e-12


def test_normalised_gaussian_columns_are_not_orthonormal() -> None:
    # What the test above must reject.
    a = normal(60, 20)
    a = a / a.norm(dim=0)
    assert float((a.T @ a - torch.eye(20, dtype=torch.float64)).abs().max()) > 0.1


@given(kind=kinds, shape=shapes(), seed=seeds)
def test_projecting_is_the_transpose_of_lifting(kind: str, shape: tuple[int, int], seed: int) -> None:
    projection = make(kind, *shape, seed)
    v, xi = normal(3, projection.size, seed=1), normal(projection.dim, seed=2)
    down = projected(projection, v, [])
    assert torch.allclose(down @ xi, v @ projection.lift(xi), rtol=1e-12, atol=1e-12)
    assert torch.allclose(down, v @ dense(projection), rtol=1e-12, atol=1e-12)


@given(kind=kinds, shape=shapes(), data=st.data())
def test_block_by_block_is_the_whole(kind: str, shape: tuple[int, int], data: st.DataObject) -> None:
    projection = make(kind, *shape)
    cuts = sorted(data.draw(st.lists(st.integers(0, shape[0]), max_size=5)))
    v = normal(4, shape[0])
    assert torch.allclose(projected(projection, v, cuts), v @ dense(projection), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", ["stiefel", "sparse", "full"])
def test_rows_are_added_to_what_is_there(kind: str) -> None:
    projection = make(kind, 12, 5)
    out, v = torch.ones(2, projection.dim, dtype=torch.float64), normal(2, 12)
    projection.add_projected(out, v, 0)
    assert torch.allclose(out, 1 + v @ dense(projection), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", ["stiefel", "sparse", "full"])
def test_rows_in_a_view_are_added_in_place(kind: str) -> None:
    # A gatherer hands over a slice of its (r, B, k) block.
    projection = make(kind, 12, 5)
    block, v = torch.zeros(3, 2, projection.dim, dtype=torch.float64), normal(2, 12)
    projection.add_projected(block[1], v, 0)
    assert torch.allclose(block[1], v @ dense(projection), rtol=1e-12, atol=1e-12)
    assert not block[[0, 2]].any()


@given(kind=kinds, data=st.data())
def test_rows_of_a_table_are_projected_where_they_were_looked_up(kind: str, data: st.DataObject) -> None:
    count, width, positions = (data.draw(st.integers(1, 5)) for _ in range(3))
    start, rest = data.draw(st.integers(0, 4)), data.draw(st.integers(0, 4))
    size = start + count * width + rest
    projection = make(kind, size, data.draw(st.integers(1, size)))
    index = torch.randint(count, (3, positions), generator=torch.Generator().manual_seed(5))
    values, out = normal(3, positions, width), torch.ones(3, projection.dim, dtype=torch.float64)
    projection.add_looked_up(out, values, index, count, start)
    whole = torch.zeros(3, size, dtype=torch.float64)
    for n in range(3):
        for t in range(positions):
            at = start + int(index[n, t]) * width
            whole[n, at : at + width] += values[n, t]  # equal indices add up
    assert torch.allclose(out, 1 + whole @ dense(projection), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", ["stiefel", "sparse"])
def test_float32_is_the_same_map_rounded(kind: str) -> None:
    wide, narrow = dense(make(kind, 50, 7)), make(kind, 50, 7, dtype=torch.float32)
    assert narrow.lift(normal(7)).dtype == torch.float32
    assert torch.equal(dense(narrow), wide.float().double())


def test_the_full_space_is_the_identity() -> None:
    projection = make("full", 6, 6)
    assert projection == FullSpace(6)
    assert (projection.kind, projection.seed, projection.size, projection.dim) == ("full", None, 6, 6)
    assert torch.equal(dense(projection), torch.eye(6, dtype=torch.float64))


@pytest.mark.parametrize(("kind", "cls"), [("stiefel", Stiefel), ("sparse", Sparse)])
def test_a_projection_says_what_it_is(kind: str, cls: type) -> None:
    projection = make(kind, 9, 4, seed=3)
    assert isinstance(projection, cls)
    assert (projection.kind, projection.seed, projection.size, projection.dim) == (kind, 3, 9, 4)


# ----------------------------------------------------------------------------------------------------- the seed

_ELSEWHERE = """
import json, numpy, torch
from opacus_expm.projection import make_projection
torch.manual_seed(99)  # global seeds play no part
numpy.random.seed(99)
for kind in ("stiefel", "sparse"):
    a = make_projection(kind, 40, 6, 5, device=torch.device("cpu"), dtype=torch.float64)
    print(json.dumps([a.lift(e).tolist() for e in torch.eye(6, dtype=torch.float64)]))
"""


def test_the_seed_alone_decides_the_map_in_another_process_too() -> None:
    ran = subprocess.run([sys.executable, "-c", _ELSEWHERE], capture_output=True, text=True, check=True, timeout=60)
    stiefel, sparse = (torch.tensor(json.loads(line), dtype=torch.float64).T for line in ran.stdout.splitlines())
    assert torch.equal(sparse, dense(make("sparse", 40, 6, 5)))
    # LAPACK may differ in the last digits.
    assert torch.allclose(stiefel, dense(make("stiefel", 40, 6, 5)), rtol=0, atol=1e-12)


@given(kind=st.sampled_from(["stiefel", "sparse"]), seed=seeds)
def test_same_seed_same_map_other_seed_other_map(kind: str, seed: int) -> None:
    a = dense(make(kind, 40, 6, seed))
    assert torch.equal(a, dense(make(kind, 40, 6, seed)))
    assert not torch.allclose(a, dense(make(kind, 40, 6, seed ^ 1)), atol=1e-3)


# ---------------------------------------------------------------------------------------------------- sparse


@given(shape=shapes(), seed=seeds)
def test_sparse_has_one_signed_entry_a_row_in_even_buckets(shape: tuple[int, int], seed: int) -> None:
    size, dim = shape
    a = dense(make("sparse", size, dim, seed))
    assert ((a != 0).sum(1) == 1).all()
    filled = (a != 0).sum(0)
    assert int(filled.max() - filled.min()) <= 1
    entries = a.abs().sum(1)
    assert torch.allclose(entries, 1 / filled[a.abs().argmax(1)].double().sqrt(), rtol=1e-12)


def test_sparse_buckets_and_signs_are_uniform() -> None:
    # Bucket and sign of the first coordinate over many seeds.
    count, dim = 2000, 4
    found = torch.stack([dense(make("sparse", 12, dim, seed))[0] for seed in range(count)])
    buckets = torch.bincount(found.abs().argmax(1), minlength=dim).numpy()
    assert stats.chisquare(buckets).pvalue > 1e-3
    assert stats.binomtest(int((found.sum(1) > 0).sum()), count).pvalue > 1e-3
    # Without the permutation, coordinate 0 would always be in bucket 0: the same test rejects that.
    assert stats.chisquare([count, 0, 0, 0]).pvalue < 1e-3


def test_sparse_never_holds_p_times_k() -> None:
    size, dim = 2_000_000, 5000
    tracemalloc.start()
    projection = make("sparse", size, dim, dtype=torch.float32)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert isinstance(projection, Sparse)
    assert projection.bucket.numel() == projection.weight.numel() == size
    assert peak < 50 * size  # bytes; a dense map would hold 8·5000 for each coordinate
    # And it maps: columns are orthonormal, so projecting undoes lifting.
    xi = normal(dim)
    back = torch.zeros(1, dim)
    projection.add_projected(back, projection.lift(xi)[None], 0)
    assert torch.allclose(back[0].double(), xi, rtol=1e-4, atol=1e-4)


# ---------------------------------------------------------------------------------------------------- stiefel


def raw_qr(seed: int) -> np.ndarray:
    """What LAPACK returns before the signs are put right."""
    return np.linalg.qr(np.random.Generator(np.random.Philox(seed)).standard_normal((6, 3)))[0]


def test_stiefel_signs_are_balanced() -> None:
    count = 200
    found = np.stack([dense(make("stiefel", 6, 3, seed)).numpy() for seed in range(count)])
    for entry in found.reshape(count, -1).T:
        assert stats.binomtest(int((entry > 0).sum()), count).pvalue > 1e-3
    # LAPACK's own convention fixes the sign of the first entry, so the same test rejects it.
    raw = sum(raw_qr(seed)[0, 0] > 0 for seed in range(count))
    assert stats.binomtest(int(raw), count).pvalue < 1e-3


def test_stiefel_entries_have_the_uniform_law() -> None:
    # Each entry of a uniform frame is a coordinate of a uniform point on the sphere: x² ~ Beta(½, (p−1)/2).
    count, size, dim = 400, 6, 3
    found = np.stack([dense(make("stiefel", size, dim, seed)).numpy() for seed in range(count)])
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
    plain = [dense(make("stiefel", size, 2, seed)).numpy()[0, 1] for seed in range(count)]
    rotated = [(rotation @ dense(make("stiefel", size, 2, seed)).numpy())[0, 1] for seed in range(count, 2 * count)]
    assert stats.ks_2samp(plain, rotated).pvalue > 1e-3


# ---------------------------------------------------------------------------------------------------- refusals


def test_a_subspace_larger_than_the_space_is_refused() -> None:
    with pytest.raises(ValueError, match="proj_dim must be at most the number of trainable parameters, 5, got 6"):
        make("stiefel", 5, 6)


@pytest.mark.parametrize(("dim", "kind"), [(0, ValueError), (-1, ValueError), (2.0, TypeError), (True, TypeError)])
def test_a_dimension_that_is_no_positive_integer_is_refused(dim: int, kind: type[Exception]) -> None:
    with pytest.raises(kind, match="proj_dim must be a positive integer, got"):
        make("sparse", 5, dim)


@pytest.mark.parametrize("kind", ["dense", "Stiefel", "", None, 3])
@pytest.mark.parametrize("dim", [2, None])
def test_unknown_kinds_are_refused(kind: object, dim: int | None) -> None:
    with pytest.raises(ValueError, match="projection must be one of 'stiefel', 'sparse'"):
        make_projection(kind, 5, dim, 0, device=CPU, dtype=torch.float64)  # type: ignore[arg-type]
