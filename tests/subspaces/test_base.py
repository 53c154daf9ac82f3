"""What every map has in common: one linear map seen from three sides, and a public seed that decides it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from reference import dense, looked_up, normal, projected, random_map

KINDS = ["stiefel", "sparse", "structured", "full"]
kinds = st.sampled_from(KINDS)
seeds = st.integers(0, 2**63 - 1)
shapes = st.integers(1, 60).flatmap(lambda size: st.tuples(st.just(size), st.integers(1, size)))  # p and k ≤ p


# ------------------------------------------------------------------------------------------------ one linear map


@given(kind=kinds, shape=shapes, seed=seeds)
def test_columns_are_orthonormal(kind: str, shape: tuple[int, int], seed: int) -> None:
    projection = random_map(kind, *shape, seed)
    a = dense(projection)
    assert a.shape == (projection.size, projection.dim)
    assert float((a.T @ a - torch.eye(projection.dim, dtype=torch.float64)).abs().max()) < 1e-12


def test_normalised_gaussian_columns_are_not_orthonormal() -> None:
    # What the test above must reject.
    a = normal(60, 20)
    a = a / a.norm(dim=0)
    assert float((a.T @ a - torch.eye(20, dtype=torch.float64)).abs().max()) > 0.1


@given(kind=kinds, shape=shapes, seed=seeds)
def test_projecting_is_the_transpose_of_lifting(kind: str, shape: tuple[int, int], seed: int) -> None:
    projection = random_map(kind, *shape, seed)
    v, xi = normal(3, projection.size, seed=1), normal(projection.dim, seed=2)
    down = projected(projection, v, [])
    assert torch.allclose(down @ xi, v @ projection.lift(xi), rtol=1e-12, atol=1e-12)
    assert torch.allclose(down, v @ dense(projection), rtol=1e-12, atol=1e-12)


@given(kind=kinds, shape=shapes, data=st.data())
def test_block_by_block_is_the_whole(kind: str, shape: tuple[int, int], data: st.DataObject) -> None:
    projection = random_map(kind, *shape)
    cuts = sorted(data.draw(st.lists(st.integers(0, shape[0]), max_size=5)))
    v = normal(4, shape[0])
    assert torch.allclose(projected(projection, v, cuts), v @ dense(projection), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_added_to_what_is_there(kind: str) -> None:
    projection = random_map(kind, 12, 5)
    out, v = torch.ones(2, projection.dim, dtype=torch.float64), normal(2, 12)
    projection.add_projected(out, v, 0)
    assert torch.allclose(out, 1 + v @ dense(projection), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_in_a_view_are_added_in_place(kind: str) -> None:
    # A gatherer hands over a slice of its (r, B, k) block.
    projection = random_map(kind, 12, 5)
    block, v = torch.zeros(3, 2, projection.dim, dtype=torch.float64), normal(2, 12)
    projection.add_projected(block[1], v, 0)
    assert torch.allclose(block[1], v @ dense(projection), rtol=1e-12, atol=1e-12)
    assert not block[[0, 2]].any()


@given(kind=kinds, data=st.data())
def test_rows_of_a_table_are_projected_where_they_were_looked_up(kind: str, data: st.DataObject) -> None:
    count, width, positions = (data.draw(st.integers(1, 5)) for _ in range(3))
    start, rest = data.draw(st.integers(0, 4)), data.draw(st.integers(0, 4))
    size = start + count * width + rest
    projection = random_map(kind, size, data.draw(st.integers(1, size)))
    index = torch.randint(count, (3, positions), generator=torch.Generator().manual_seed(5))
    values, out = normal(3, positions, width), torch.ones(3, projection.dim, dtype=torch.float64)
    projection.add_looked_up(out, values, index, count, start)
    whole = looked_up(values, index, start, size)
    assert torch.allclose(out, 1 + whole @ dense(projection), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", ["stiefel", "sparse"])
def test_float32_is_the_same_map_rounded(kind: str) -> None:
    wide, narrow = dense(random_map(kind, 50, 7)), random_map(kind, 50, 7, dtype=torch.float32)
    assert narrow.lift(normal(7)).dtype == torch.float32
    assert torch.equal(dense(narrow), wide.float().double())


# ----------------------------------------------------------------------------------------------------- the seed

_ELSEWHERE = """
import json, numpy, torch
from opacus_expm.subspaces import Sparse, Stiefel, Structured
torch.manual_seed(99)  # global seeds play no part
numpy.random.seed(99)
for recipe in (Stiefel(5), Structured(5), Sparse(5)):
    a = recipe.build([torch.Size([5, 6]), torch.Size([10])], 6, torch.device("cpu"), torch.float64)
    print(json.dumps([a.lift(e).tolist() for e in torch.eye(6, dtype=torch.float64)]))
"""


@pytest.mark.slow
def test_the_seed_alone_decides_the_map_in_another_process_too() -> None:
    ran = subprocess.run([sys.executable, "-c", _ELSEWHERE], capture_output=True, text=True, check=True, timeout=60)
    stiefel, structured, sparse = (
        torch.tensor(json.loads(line), dtype=torch.float64).T for line in ran.stdout.splitlines()
    )
    assert torch.equal(sparse, dense(random_map("sparse", 40, 6, 5)))
    # LAPACK may differ in the last digits.
    for kind, found in {"stiefel": stiefel, "structured": structured}.items():
        here = dense(random_map(kind, [torch.Size([5, 6]), torch.Size([10])], 6, 5))
        assert torch.allclose(found, here, rtol=0, atol=1e-12)


@given(kind=st.sampled_from(["stiefel", "sparse", "structured"]), seed=seeds)
def test_same_seed_same_map_other_seed_other_map(kind: str, seed: int) -> None:
    shapes = [torch.Size([5, 6]), torch.Size([10])]
    a = dense(random_map(kind, shapes, 6, seed))
    assert torch.equal(a, dense(random_map(kind, shapes, 6, seed)))
    assert not torch.allclose(a, dense(random_map(kind, shapes, 6, seed ^ 1)), atol=1e-3)


# ---------------------------------------------------------------------------------------------------- refusals


def test_a_subspace_larger_than_the_space_is_refused() -> None:
    with pytest.raises(ValueError, match="proj_dim must be at most the number of trainable parameters, 5, got 6"):
        random_map("stiefel", 5, 6)


@pytest.mark.parametrize(("dim", "kind"), [(0, ValueError), (-1, ValueError), (2.0, TypeError), (True, TypeError)])
def test_a_dimension_that_is_no_positive_integer_is_refused(dim: int, kind: type[Exception]) -> None:
    with pytest.raises(kind, match="proj_dim must be a positive integer, got"):
        random_map("sparse", 5, dim)
