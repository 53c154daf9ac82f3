"""Projections: orthonormal columns, one linear map seen from three sides, and a public seed that decides it."""

from __future__ import annotations

import json
import subprocess
import sys
import tracemalloc
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from reference import dense
from scipy import stats
from torch import Tensor

from opacus_expm.subspaces.projection import (
    FullSpace,
    Preconditioned,
    Projection,
    PublicCurvature,
    Sparse,
    Stiefel,
    Subspace,
    make_projection,
)

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
    out = torch.zeros(len(rows), projection.width, dtype=rows.dtype)
    edges = [0, *cuts, rows.shape[1]]
    for start, stop in pairwise(edges):
        projection.add_projected(out, rows[:, start:stop], start)
    return projection.finish(out)


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
from opacus_expm.subspaces.projection import make_projection
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


# ----------------------------------------------------------------------------------------------- preconditioned


@dataclass(frozen=True)
class Seen:
    """A projection P seen through public curvature, and what it is made of."""

    projection: Preconditioned
    base: Projection
    vectors: Tensor
    eigenvalues: Tensor
    damping: float

    def dense(self) -> Tensor:
        """(I − V diag(1 − (1 + h/h₀)^{−1/2}) Vᵀ)P, with p × p matrices."""
        shrinkage = 1 - (1 + self.eigenvalues / self.damping) ** -0.5
        identity = torch.eye(self.base.size, dtype=torch.float64)
        return (identity - self.vectors @ torch.diag(shrinkage) @ self.vectors.T) @ dense(self.base)


def orthonormal(size: int, rank: int, seed: int = 0) -> Tensor:
    return torch.linalg.qr(normal(size, rank, seed=seed))[0]


@st.composite
def preconditioned(draw: st.DrawFn) -> Seen:
    """Any base, any rank, eigenvalues of any order (also 0), any damping."""
    size, dim = draw(shapes())
    base = make(draw(kinds), size, dim, draw(seeds))
    rank = draw(st.integers(1, size))
    vectors = orthonormal(size, rank, seed=draw(st.integers(0, 1000)))
    orders = draw(st.lists(st.one_of(st.none(), st.floats(-6, 6)), min_size=rank, max_size=rank))
    eigenvalues = torch.tensor([0.0 if o is None else 10.0**o for o in orders], dtype=torch.float64)
    damping = 10.0 ** draw(st.floats(-3, 3))
    return Seen(Preconditioned.build(base, vectors, eigenvalues, damping), base, vectors, eigenvalues, damping)


@given(seen=preconditioned(), data=st.data())
def test_preconditioned_is_the_dense_map_block_by_block(seen: Seen, data: st.DataObject) -> None:
    projection, a = seen.projection, seen.dense()
    assert (projection.kind, projection.size, projection.dim) == ("preconditioned", seen.base.size, seen.base.dim)
    assert projection.seed == seen.base.seed
    assert projection.width == projection.dim + len(seen.eigenvalues)
    assert torch.allclose(dense(projection), a, rtol=0, atol=1e-12)  # lifting
    cuts = sorted(data.draw(st.lists(st.integers(0, projection.size), max_size=5)))
    v, xi = normal(4, projection.size, seed=1), normal(projection.dim, seed=2)
    down = projected(projection, v, cuts)
    assert torch.allclose(down, v @ a, rtol=0, atol=1e-12)
    assert torch.allclose(down @ xi, v @ projection.lift(xi), rtol=0, atol=1e-11)


@given(seen=preconditioned())
def test_the_ball_is_a_trust_region_in_a_damped_newton_metric(seen: Seen) -> None:
    """MMᵀ = (I + V diag(h) Vᵀ/h₀)⁻¹ in the full space: a step of length R in ξ costs at most R²h₀/2 in curvature."""
    size = seen.base.size
    full = Preconditioned.build(FullSpace(size), seen.vectors, seen.eigenvalues, seen.damping)
    m, identity = dense(full), torch.eye(size, dtype=torch.float64)
    metric = identity + seen.vectors @ torch.diag(seen.eigenvalues / seen.damping) @ seen.vectors.T
    scale = 1 + float(seen.eigenvalues.max()) / seen.damping
    assert torch.allclose(m @ m.T @ metric, identity, rtol=0, atol=1e-13 * scale)
    # Along an eigenvector the map is (1 + h/h₀)^{−1/2}; a wrong exponent would be noticed.
    along = (m @ seen.vectors * seen.vectors).sum(0)
    assert torch.allclose(along, (1 + seen.eigenvalues / seen.damping) ** -0.5, rtol=1e-9, atol=1e-12)


@given(seen=preconditioned(), data=st.data())
def test_preconditioned_rows_of_a_table(seen: Seen, data: st.DataObject) -> None:
    size = seen.base.size
    width = data.draw(st.integers(1, size))
    count = data.draw(st.integers(1, size // width))
    start = data.draw(st.integers(0, size - count * width))
    index = torch.randint(count, (3, 4), generator=torch.Generator().manual_seed(5))
    values = normal(3, 4, width)
    out = torch.zeros(3, seen.projection.width, dtype=torch.float64)
    seen.projection.add_looked_up(out, values, index, count, start)
    whole = torch.zeros(3, size, dtype=torch.float64)
    for n in range(3):
        for t in range(4):
            at = start + int(index[n, t]) * width
            whole[n, at : at + width] += values[n, t]
    assert torch.allclose(seen.projection.finish(out), whole @ seen.dense(), rtol=0, atol=1e-12)


def test_preconditioned_finishes_blocks_of_any_shape_and_adds_to_what_is_there() -> None:
    seen_through = Preconditioned.build(
        make("sparse", 12, 5), orthonormal(12, 3), torch.tensor([4.0, 2.0, 1.0]).double(), 0.5
    )
    first, second = normal(2, 12, seed=1), normal(2, 12, seed=2)
    block = torch.zeros(3, 2, seen_through.width, dtype=torch.float64)
    for rows in (first, second):
        seen_through.add_projected(block[1], rows, 0)
    finished = seen_through.finish(block)
    assert finished.shape == (3, 2, 5)
    assert torch.allclose(finished[1], (first + second) @ dense(seen_through), rtol=0, atol=1e-12)
    assert not finished[[0, 2]].any()


def test_columns_that_are_not_orthonormal_are_meant() -> None:
    a = dense(Preconditioned.build(FullSpace(6), orthonormal(6, 2), torch.tensor([8.0, 3.0]).double(), 1.0))
    lengths = torch.tensor([1, 1, 1, 1, 1 / 2, 1 / 3], dtype=torch.float64)
    assert torch.allclose(torch.linalg.svdvals(a), lengths, rtol=0, atol=1e-12)


# ---------------------------------------------------------------------------------------------- public curvature


def low_rank_with_decay(rows: int, size: int, rank: int, seed: int = 0) -> Tensor:
    """B whose leading singular values are 2⁰, 2⁻¹, … and whose rest is a thousandth of the last of them."""
    singular = torch.cat([2.0 ** -torch.arange(rank), torch.full((min(rows, size) - rank,), 2.0**-rank / 1000)])
    left, right = orthonormal(rows, len(singular), seed), orthonormal(size, len(singular), seed + 1)
    return left @ torch.diag(singular.double()) @ right.T


@pytest.mark.parametrize(("rows", "size"), [(60, 200), (200, 60), (70, 70)])
def test_public_curvature_has_the_leading_eigenpairs(rows: int, size: int) -> None:
    records, rank = 17, 8
    b = low_rank_with_decay(rows, size, rank)
    found = PublicCurvature.of_rows(b, records, rank, seed=0)
    values, vectors = torch.linalg.eigh(b.T @ b / records)
    values, vectors = values.flip(0)[:rank], vectors.flip(1)[:, :rank]
    assert found.eigenvalues.shape == (rank,)
    assert found.vectors.shape == (size, rank)
    assert torch.allclose(found.eigenvalues, values, rtol=1e-8, atol=0)
    assert torch.allclose((found.vectors * vectors).sum(0).abs(), torch.ones(rank).double(), rtol=0, atol=1e-8)
    assert torch.allclose(found.vectors.T @ found.vectors, torch.eye(rank).double(), rtol=0, atol=1e-10)
    # Per record: the same rows of half as many records have twice the curvature.
    assert torch.equal(PublicCurvature.of_rows(b, 34, rank, seed=0).eigenvalues, found.eigenvalues / 2)


def test_public_curvature_of_a_slowly_falling_spectrum() -> None:
    """The leading half is within a part in a thousand where nothing but oversampling helps."""
    b = orthonormal(150, 120) @ torch.diag(1 / torch.arange(1, 121).double()) @ orthonormal(400, 120, 1).T
    found = PublicCurvature.of_rows(b, 1, 40, seed=3)
    exact = 1 / torch.arange(1, 41).double() ** 2
    assert torch.allclose(found.eigenvalues[:20], exact[:20], rtol=1e-3, atol=0)
    assert bool((found.eigenvalues <= exact * (1 + 1e-12)).all())  # never too large: a projection of the matrix


@pytest.mark.parametrize(("rows", "size"), [(3, 50), (50, 3)])
def test_no_more_eigenpairs_than_rows_or_parameters(rows: int, size: int) -> None:
    found = PublicCurvature.of_rows(normal(rows, size), 3, 400, seed=0)
    assert found.vectors.shape == (size, 3)
    dense_matrix = normal(rows, size).T @ normal(rows, size) / 3
    rebuilt = found.vectors @ torch.diag(found.eigenvalues) @ found.vectors.T
    assert torch.allclose(rebuilt, dense_matrix, rtol=0, atol=1e-12)


def test_public_curvature_leaves_the_global_generator_alone() -> None:
    b, states = low_rank_with_decay(60, 90, 8), []
    found = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        found.append(PublicCurvature.of_rows(b, 5, 8, seed=0))
        assert torch.equal(torch.get_rng_state(), before)
        states.append(before)
    assert not torch.equal(*states)
    assert torch.equal(found[0].vectors, found[1].vectors)  # nor does it depend on it


# ------------------------------------------------------------------------------------------------------ subspaces

CURVATURE = PublicCurvature(torch.tensor([8.0, 4.0, 2.0, 1.0]).double(), orthonormal(20, 4))


def build(subspace: Subspace, dtype: torch.dtype = torch.float64) -> Projection:
    return subspace.build(20, CPU, dtype)


@pytest.mark.parametrize("kind", ["stiefel", "sparse"])
@pytest.mark.parametrize("dim", [6, None])
def test_subspaces_without_curvature_are_the_random_ones(kind: str, dim: int | None) -> None:
    found = build(Subspace(kind, dim, 5))
    assert torch.equal(dense(found), dense(make(kind if dim else "full", 20, 6, 5)))


def test_public_subspaces_are_the_leading_eigenvectors() -> None:
    found = build(Subspace("public", 3, 5, CURVATURE))
    assert (found.kind, found.seed, found.size, found.dim) == ("public", None, 20, 3)
    assert torch.equal(dense(found), CURVATURE.vectors[:, :3])


@pytest.mark.parametrize(("dim", "base"), [(None, "full"), (3, "public"), (4, "public"), (5, "sparse"), (20, "sparse")])
def test_preconditioned_subspaces(dim: int | None, base: str) -> None:
    """The full space; the leading eigenvectors; beyond them a sparse subspace. h₀ is the least eigenvalue by default."""
    found = build(Subspace("preconditioned", dim, 5, CURVATURE))
    assert isinstance(found, Preconditioned)
    assert (found.kind, found.base.kind, found.seed) == ("preconditioned", base, 5 if base == "sparse" else None)
    p = dense(found.base)
    if base == "public":
        assert torch.equal(p, CURVATURE.vectors[:, :dim])
    if base == "sparse":
        assert torch.equal(p, dense(make("sparse", 20, dim or 0, 5)))
    for damping, h0 in ((None, 1.0), (0.25, 0.25)):
        found = build(Subspace("preconditioned", dim, 5, CURVATURE, damping))
        shrinkage = torch.diag(1 - (1 + CURVATURE.eigenvalues / h0) ** -0.5)
        expected = p - CURVATURE.vectors @ shrinkage @ CURVATURE.vectors.T @ p
        assert torch.allclose(dense(found), expected, rtol=0, atol=1e-12)


def test_subspaces_are_made_in_the_type_that_is_asked_for() -> None:
    for kind in ("public", "preconditioned"):
        wide, narrow = (build(Subspace(kind, 3, 5, CURVATURE), dtype) for dtype in (torch.float64, torch.float32))
        assert narrow.lift(normal(3)).dtype == torch.float32
        assert torch.allclose(dense(narrow), dense(wide), rtol=0, atol=1e-6)


def test_subspaces_that_cannot_be_made_are_refused() -> None:
    with pytest.raises(ValueError, match="proj_dim must be a number with projection='public'"):
        build(Subspace("public", None, 0, CURVATURE))
    with pytest.raises(ValueError, match=r"proj_dim=5 asks for more eigenvectors than public_loader's records have, 4"):
        build(Subspace("public", 5, 0, CURVATURE))
    with pytest.raises(ValueError, match="proj_dim must be at most the number of trainable parameters, 20, got 21"):
        build(Subspace("preconditioned", 21, 0, CURVATURE))
    flat = PublicCurvature(torch.tensor([0.0, 0.0]).double(), orthonormal(20, 2))
    with pytest.raises(ValueError, match="damping must be given: public_loader's records have no curvature"):
        build(Subspace("preconditioned", 5, 0, flat))
    assert build(Subspace("preconditioned", 5, 0, flat, damping=0.5)).dim == 5


def test_an_eigenvalue_of_rounding_makes_no_metric() -> None:
    """The default damping is at least a millionth of the largest eigenvalue."""
    vectors = orthonormal(20, 2)
    rounded = PublicCurvature(torch.tensor([4.0, 1e-15]).double(), vectors)
    found = build(Subspace("preconditioned", 5, 0, rounded))
    expected = build(Subspace("preconditioned", 5, 0, rounded, damping=4e-6))
    assert torch.equal(dense(found), dense(expected))


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
