"""The structured map: Kronecker products of orthonormal factors, dealt to the parameters by a public rule."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from reference import dense, looked_up, normal, projected, random_map
from scipy import stats
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from opacus_expm.gathering.hooks import hooks_for
from opacus_expm.gathering.model import working_copy
from opacus_expm.subspaces.base import Inputs
from opacus_expm.subspaces.layout import Layout
from opacus_expm.subspaces.stiefel import orthonormal
from opacus_expm.subspaces.structured import Kronecker, Loose, StructuredMap, dealt, parted

shape = st.lists(st.integers(0, 5), max_size=4).map(torch.Size)
shapes = st.lists(shape, min_size=1, max_size=5).filter(lambda s: sum(one.numel() for one in s) > 0)
SHAPES = [torch.Size(s) for s in ([7, 4], [7], [3, 2, 3, 3], [3], [5, 6], [1, 9], [])]
SIZE = sum(s.numel() for s in SHAPES)


def some_map(of: list[torch.Size], data: st.DataObject) -> StructuredMap:
    found = random_map(
        "structured", of, data.draw(st.integers(1, sum(s.numel() for s in of))), data.draw(st.integers(0, 9))
    )
    assert isinstance(found, StructuredMap)
    return found


def small_map(dim: int = 40, seed: int = 3) -> StructuredMap:
    found = random_map("structured", SHAPES, dim, seed)
    assert isinstance(found, StructuredMap)
    return found


# ------------------------------------------------------------------------------------------------ one linear map


@given(of=shapes, data=st.data())
def test_columns_are_orthonormal_whatever_the_shapes(of: list[torch.Size], data: st.DataObject) -> None:
    projection = some_map(of, data)
    a = dense(projection)
    assert a.shape == (sum(s.numel() for s in of), projection.dim)
    assert float((a.T @ a - torch.eye(projection.dim, dtype=torch.float64)).abs().max()) < 1e-12


@given(of=shapes, data=st.data())
def test_block_by_block_is_the_whole(of: list[torch.Size], data: st.DataObject) -> None:
    projection = some_map(of, data)
    cuts = sorted(data.draw(st.lists(st.integers(0, projection.size), max_size=5)))
    v = normal(4, projection.size)
    assert torch.allclose(projected(projection, v, cuts), v @ dense(projection), rtol=1e-12, atol=1e-12)


def test_a_weight_has_the_first_columns_of_a_kronecker_product() -> None:
    projection = small_map()
    a = dense(projection)
    for part, of in zip(projection.parts, SHAPES, strict=True):
        rows = a[part.start : part.start + of.numel()]
        outside = torch.ones(projection.dim, dtype=torch.bool)
        outside[part.columns] = False
        assert not rows[:, outside].any()
        assert isinstance(part, Kronecker) is (len(of) > 1 and of[0] > 1)
        if isinstance(part, Kronecker):
            count = part.columns.stop - part.columns.start
            assert torch.allclose(rows[:, part.columns], torch.kron(part.outer, part.inner)[:, :count], atol=1e-14)
            assert part.outer.shape[1] <= math.isqrt(count - 1) + 1  # no larger than needed
            assert (part.outer.shape[1] - 1) * part.inner.shape[1] < count + part.inner.shape[1]


def test_parameters_that_are_no_matrices_share_a_sparse_map() -> None:
    projection = small_map()
    loose = [part for part in projection.parts if isinstance(part, Loose)]
    assert len({(part.columns.start, part.columns.stop) for part in loose}) == 1
    rows = torch.cat([dense(projection)[part.start : part.start + part.size] for part in loose])
    assert ((rows != 0).sum(1) == 1).all()


def test_energy_is_kept_evenly() -> None:
    # E AAᵀ is k_l/p_l on a weight: the mean over seeds of the squared length of a fixed vector's projection.
    of, seeds = [torch.Size([6, 5])], 400
    v = normal(1, 30)
    v /= v.norm()
    kept = np.array([float(projected(random_map("structured", of, 12, s), v, []).square().sum()) for s in range(seeds)])
    assert stats.ttest_1samp(kept, 12 / 30).pvalue > 1e-3
    assert stats.ttest_1samp(kept, 13 / 30).pvalue < 1e-3  # what the test must reject


def test_factors_and_buckets_come_from_streams_of_their_own() -> None:
    # The sparse map takes the stream that the seed begins, from which factors would be another's.
    projection = small_map(seed=5)
    random = np.random.Generator(np.random.Philox(5).jumped())
    for part in projection.parts:
        if isinstance(part, Kronecker):
            assert np.array_equal(part.outer.numpy(), orthonormal(random, *part.outer.shape))
            assert np.array_equal(part.inner.numpy(), orthonormal(random, *part.inner.shape))


# ------------------------------------------------------------------------------------------------------ the rule


@given(sizes=st.lists(st.integers(1, 60), min_size=1, max_size=6), data=st.data())
def test_every_dimension_is_dealt_and_every_part_has_one(sizes: list[int], data: st.DataObject) -> None:
    dim = data.draw(st.integers(len(sizes), sum(sizes)))
    found = dealt(sizes, dim)
    assert sum(found) == dim
    assert all(1 <= count <= size for count, size in zip(found, sizes, strict=True))


def test_dimensions_are_dealt_by_the_square_root_of_the_size() -> None:
    assert dealt([10_000, 40_000, 1_000_000], 1303) == [101, 201, 1001]
    assert dealt([4, 40_000], 302) == [4, 298]


def test_the_smallest_matrices_are_in_the_sparse_part_where_dimensions_are_few() -> None:
    of = [torch.Size(s) for s in ([3, 3], [5, 5], [4], [4, 4])]
    assert parted(of, 4) == ([0, 1, 3], [2])
    assert parted(of, 3) == ([1, 3], [0, 2])
    assert parted(of, 1) == ([], [0, 1, 2, 3])
    assert parted([of[0], of[1]], 2) == ([0, 1], [])


# ---------------------------------------------------------------------------------------------- without gradients


@given(data=st.data())
def test_a_table_is_projected_where_it_was_looked_up(data: st.DataObject) -> None:
    start = [s.numel() for s in SHAPES[:4]]
    count, width = SHAPES[4]
    projection = small_map(data.draw(st.integers(1, SIZE)))
    index = torch.randint(count, (3, 4), generator=torch.Generator().manual_seed(5))
    values, out = normal(3, 4, width), torch.ones(3, projection.dim, dtype=torch.float64)
    projection.add_looked_up(out, values, index, count, sum(start))
    expected = 1 + looked_up(values, index, sum(start), SIZE) @ dense(projection)
    assert torch.allclose(out, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("bias", [28, None])
def test_inputs_and_output_gradients_are_projected_apart(bias: int | None) -> None:
    projection, x, d = small_map(), normal(3, 6, 4), normal(3, 6, 7, seed=1)
    quick = projection.linear(Inputs(6, lambda matrix: x @ matrix), SHAPES[0], 0, bias, 1)
    assert quick is not None
    out = torch.ones(3, projection.dim, dtype=torch.float64)
    quick(out, d)
    whole = torch.zeros(3, SIZE, dtype=torch.float64)
    whole[:, :28] = torch.einsum("bto,bti->boi", d, x).flatten(1)
    if bias is not None:
        whole[:, 28:35] = d.sum(1)
    assert torch.allclose(out, 1 + whole @ dense(projection), rtol=1e-12, atol=1e-12)


def test_a_weight_in_the_sparse_part_has_no_faster_way() -> None:
    assert small_map(1).linear(Inputs(1, lambda matrix: matrix), SHAPES[0], 0, None, 1) is None


class Largest(TorchDispatchMode):
    """The number of elements of the largest tensor that is made and is not one of the given."""

    def __init__(self, given: list[Tensor]):
        super().__init__()
        self.given, self.elements = {t.untyped_storage().data_ptr() for t in given}, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            if isinstance(t, Tensor) and t.untyped_storage().data_ptr() not in self.given:
                self.elements = max(self.elements, t.numel())
        return out


class Wide(nn.Module):
    """Layers with many parameters and small outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.convolution = nn.Embedding(400, 60), nn.Conv1d(60, 60, 5, padding=1)
        self.norm, self.linear, self.head = nn.LayerNorm(60), nn.Linear(60, 300), nn.Linear(300, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.convolution(self.table(tokens).transpose(1, 2)).transpose(1, 2).mean(1)
        return self.head(torch.tanh(self.linear(self.norm(x))))


@pytest.mark.parametrize(("kind", "formed"), [("structured", False), ("sparse", True)])
def test_no_gradient_of_a_layer_is_formed(kind: str, formed: bool) -> None:
    torch.manual_seed(0)
    working = working_copy(Wide())
    layout, tokens = Layout.of(working), torch.randint(400, (3, 7))
    hooked = hooks_for(working, layout, random_map(kind, layout.shapes, 50, dtype=torch.float32), tokens[:1])
    weights = list(working.parameters())
    with Largest(weights) as largest:
        outputs, pullback = hooked.outputs_and_pullback(tokens)
        pullback(torch.eye(3).expand(3, 3, 3))
    # A record's gradients of the convolution and the wider linear layer have 18,000 elements each.
    assert (largest.elements >= 18_000) is formed
    assert outputs.shape == (3, 3)


def test_it_says_what_it_is_and_is_small() -> None:
    projection = random_map("structured", [torch.Size([3000, 2000])], 400, 3, torch.float32)
    assert isinstance(projection, StructuredMap)
    assert (projection.kind, projection.seed, projection.size, projection.dim) == ("structured", 3, 6_000_000, 400)
    (part,) = projection.parts
    assert isinstance(part, Kronecker)
    assert (part.outer.shape, part.inner.shape) == ((3000, 20), (2000, 20))
    xi = normal(400)
    back = torch.zeros(1, 400)
    projection.add_projected(back, projection.lift(xi)[None], 0)
    assert projection.lift(xi).dtype == torch.float32
    assert torch.allclose(back[0].double(), xi, rtol=1e-4, atol=1e-4)
    starts = list(itertools.accumulate((s.numel() for s in SHAPES), initial=0))
    assert [p.start for p in small_map().parts] == starts[:-1]
