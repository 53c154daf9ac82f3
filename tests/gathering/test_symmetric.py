"""The blocked symmetric sum against the plain one, and S of a pass at a dimension of several blocks."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from opacus_expm import ExpMQuadEngine
from opacus_expm.gathering import symmetric
from opacus_expm.gathering.symmetric import SymmetricSum

CPU = torch.device("cpu")


@given(st.data())
def test_integers_add_up_exactly(data):
    """Products and sums of small integers have no rounding: the two sums must be the same bits."""
    dim = data.draw(st.integers(1, 9))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(symmetric, "_BLOCK", data.draw(st.integers(1, 10)))
        total, plain = SymmetricSum(dim, CPU), torch.zeros(dim, dim, dtype=torch.float64)
        generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
        for _ in range(data.draw(st.integers(1, 4))):
            rows = torch.randint(-9, 10, (data.draw(st.integers(0, 5)), dim), generator=generator).double()
            total.add(rows)
            plain += rows.T @ rows
            if data.draw(st.booleans()):  # reading in between changes nothing
                assert torch.equal(total.result(), plain)
        assert torch.equal(total.result(), plain)


@pytest.mark.parametrize("dim", [1, symmetric._BLOCK, symmetric._BLOCK + 1, 2 * symmetric._BLOCK + 77])
def test_exactly_symmetric_and_the_plain_sum_up_to_rounding(dim):
    generator = torch.Generator().manual_seed(0)
    total, plain = SymmetricSum(dim, CPU), torch.zeros(dim, dim, dtype=torch.float64)
    for count in (33, 1, 64):
        rows = torch.randn(count, dim, dtype=torch.float64, generator=generator)
        total.add(rows)
        plain += rows.T @ rows
    found = total.result()
    assert torch.equal(found, found.T)
    assert (found - plain).abs().max() <= 1e-13 * plain.abs().max()


def test_a_large_curvature_of_a_pass_is_exactly_symmetric_and_the_plain_sum():
    """k = 600, three blocks, against a float64 sum of each record's own clipped matrix."""
    torch.manual_seed(0)
    model = nn.Linear(60, 10, dtype=torch.float64)  # p = 610; the full space is k = p
    x, y = 3 * torch.randn(20, 60, dtype=torch.float64), torch.randint(10, (20,))
    bound = 0.5
    sums = ExpMQuadEngine().gather(
        model, DataLoader(TensorDataset(x, y), batch_size=16), None, criterion=nn.CrossEntropyLoss(),
        max_grad_norm=1.0, max_curvature=bound,
    ).sums  # fmt: skip
    expected = torch.zeros(610, 610, dtype=torch.float64)
    for record in x:
        sigma = torch.softmax(model(record).detach(), 0)
        jacobian = torch.cat([torch.kron(torch.eye(10), record), torch.eye(10)], dim=1).double()
        h = jacobian.T @ (torch.diag(sigma) - torch.outer(sigma, sigma)) @ jacobian
        expected += h * min(1.0, bound / float(torch.linalg.matrix_norm(h, 2)))
    assert torch.equal(sums.curvature, sums.curvature.T)
    assert (sums.curvature - expected).abs().max() <= 1e-11 * expected.abs().max()
