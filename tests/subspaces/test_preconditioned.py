"""Maps seen through public curvature: the dense map block by block, the eigenpairs, and the recipe."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from reference import CPU, dense, flat, looked_up, normal, orthonormal, projected, random_map
from torch import Tensor

from opacus_expm.subspaces import Preconditioned, Projection
from opacus_expm.subspaces.full import FullSpace
from opacus_expm.subspaces.preconditioned import PreconditionedMap, PublicCurvature

shapes = st.integers(1, 60).flatmap(lambda size: st.tuples(st.just(size), st.integers(1, size)))  # p and k ≤ p

# ------------------------------------------------------------------------------------------------------- the map


@dataclass(frozen=True)
class Seen:
    """A projection P seen through public curvature, and what it is made of."""

    projection: PreconditionedMap
    base: Projection
    vectors: Tensor
    eigenvalues: Tensor
    damping: float

    def dense(self) -> Tensor:
        """(I − V diag(1 − (1 + h/h₀)^{−1/2}) Vᵀ)P, with p × p matrices."""
        shrinkage = 1 - (1 + self.eigenvalues / self.damping) ** -0.5
        identity = torch.eye(self.base.size, dtype=torch.float64)
        return (identity - self.vectors @ torch.diag(shrinkage) @ self.vectors.T) @ dense(self.base)


@st.composite
def preconditioned(draw: st.DrawFn) -> Seen:
    """Any base, any rank, eigenvalues of any order (also 0), any damping."""
    size, dim = draw(shapes)
    base = random_map(draw(st.sampled_from(["stiefel", "sparse", "full"])), size, dim, draw(st.integers(0, 2**63 - 1)))
    rank = draw(st.integers(1, size))
    vectors = orthonormal(size, rank, seed=draw(st.integers(0, 1000)))
    orders = draw(st.lists(st.one_of(st.none(), st.floats(-6, 6)), min_size=rank, max_size=rank))
    eigenvalues = torch.tensor([0.0 if o is None else 10.0**o for o in orders], dtype=torch.float64)
    damping = 10.0 ** draw(st.floats(-3, 3))
    return Seen(PreconditionedMap.through(base, vectors, eigenvalues, damping), base, vectors, eigenvalues, damping)


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
    full = PreconditionedMap.through(FullSpace(size), seen.vectors, seen.eigenvalues, seen.damping)
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
    whole = looked_up(values, index, start, size)
    assert torch.allclose(seen.projection.finish(out), whole @ seen.dense(), rtol=0, atol=1e-12)


def test_preconditioned_finishes_blocks_of_any_shape_and_adds_to_what_is_there() -> None:
    seen_through = PreconditionedMap.through(
        random_map("sparse", 12, 5), orthonormal(12, 3), torch.tensor([4.0, 2.0, 1.0]).double(), 0.5
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
    a = dense(PreconditionedMap.through(FullSpace(6), orthonormal(6, 2), torch.tensor([8.0, 3.0]).double(), 1.0))
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


# ------------------------------------------------------------------------------------------------------ the recipe

CURVATURE = PublicCurvature(torch.tensor([8.0, 4.0, 2.0, 1.0]).double(), orthonormal(20, 4))


def build(
    dim: int | None,
    curvature: PublicCurvature = CURVATURE,
    dtype: torch.dtype = torch.float64,
    seed: int = 5,
) -> Projection:
    return Preconditioned(seed=seed, curvature=curvature).build(flat(20), dim, CPU, dtype)


@pytest.mark.parametrize(
    ("dim", "base"), [(None, "full"), (3, "stiefel"), (4, "stiefel"), (5, "sparse"), (20, "sparse")]
)
def test_preconditioned_subspaces(dim: int | None, base: str) -> None:
    """The full space; the leading eigenvectors; beyond them a sparse subspace. h₀ is 1/160 of the largest eigenvalue."""
    found = build(dim)
    assert isinstance(found, PreconditionedMap)
    assert (found.kind, found.base.kind, found.seed) == ("preconditioned", base, 5 if base == "sparse" else None)
    p = dense(found.base)
    if base == "stiefel":
        assert torch.equal(p, CURVATURE.vectors[:, :dim])
    if base == "sparse":
        assert torch.equal(p, dense(random_map("sparse", 20, dim, 5)))
    shrinkage = torch.diag(1 - (1 + CURVATURE.eigenvalues / (8 / 160)) ** -0.5)
    expected = p - CURVATURE.vectors @ shrinkage @ CURVATURE.vectors.T @ p
    assert torch.allclose(dense(found), expected, rtol=0, atol=1e-12)


def test_maps_are_made_in_the_type_that_is_asked_for() -> None:
    wide, narrow = (build(3, dtype=dtype) for dtype in (torch.float64, torch.float32))
    assert narrow.lift(normal(3)).dtype == torch.float32
    assert torch.allclose(dense(narrow), dense(wide), rtol=0, atol=1e-6)


def test_maps_that_cannot_be_made_are_refused() -> None:
    with pytest.raises(ValueError, match="proj_dim must be at most the number of trainable parameters, 20, got 21"):
        build(21)
    with pytest.raises(ValueError, match="proj_dim must be a positive integer, got 0"):
        build(0)
    with pytest.raises(ValueError, match="needs public curvature: pass public_loader="):
        Preconditioned(seed=0).build(flat(20), 5, CPU, torch.float64)
    level = PublicCurvature(torch.tensor([0.0, 0.0]).double(), orthonormal(20, 2))
    with pytest.raises(ValueError, match="public_loader's records have no curvature: use projection='sparse'"):
        build(5, level)


@pytest.mark.parametrize("size", [19, 21])
@pytest.mark.parametrize("dim", [3, 5, None])
def test_curvature_of_another_model_is_refused(size: int, dim: int | None) -> None:
    """A layer that was frozen after the curvature was measured would shift all that come after it."""
    with pytest.raises(ValueError, match=rf"public curvature of 20 parameters, and the model has {size} that may move"):
        Preconditioned(seed=0, curvature=CURVATURE).build(flat(size), dim, CPU, torch.float64)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rank": 0}, "rank must be a positive integer, got 0"),
        ({"seed": -1}, "seed must be a non-negative integer or None, got -1"),
    ],
)
def test_settings_that_make_no_recipe_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        Preconditioned(**settings)  # type: ignore[arg-type]
