"""The metric of Kronecker factors against a dense product in float64."""

import pytest
import torch
from reference import dense, error
from torch import nn

from opacus_expm.gathering.factors import blocks_of
from opacus_expm.subspaces.layout import Layout
from opacus_expm.subspaces.metric import Block, Metric, Root, Spectrum, corrected, shrunk


def _model():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Conv2d(2, 3, 2), nn.GroupNorm(1, 3), nn.Flatten(), nn.Linear(12, 4)).double()


def _roots(blocks, columns=None, seed=1):
    generator = torch.Generator().manual_seed(seed)

    def root(size):
        m = torch.randn(size, columns or size, generator=generator, dtype=torch.float64)
        return Root(m, m.T, 0.7) if columns else Root(m @ m.T / size + torch.eye(size, dtype=torch.float64))

    return tuple((root(b.width), root(b.outputs)) for b in blocks)


def _built(model, columns=None):
    layout = Layout.of(model)
    blocks = tuple(blocks_of(model, layout).values())
    roots = _roots(blocks, columns)
    return layout, blocks, roots, Metric(blocks, roots).build(layout.shapes, None, torch.device("cpu"), torch.float64)


def _kronecker(layout, blocks, roots):
    """K as a dense (p, p) matrix: K_B ⊗ K_A in the order of [W b], row by row, and the identity elsewhere."""
    found = torch.eye(layout.size, dtype=torch.float64)
    for block, (k_a, k_b) in zip(blocks, roots, strict=True):
        places = []
        for row in range(block.outputs):
            if block.weight is not None:
                places += [block.weight + row * block.inputs + i for i in range(block.inputs)]
            if block.bias is not None:
                places.append(block.bias + row)
        index = torch.tensor(places)
        found[index[:, None], index] = torch.kron(k_b.dense(), k_a.dense())
    return found


FROZEN = ([], ["3.weight"], ["3.bias"], ["0.weight", "3.bias"], ["0.weight", "0.bias"])


@pytest.mark.parametrize("columns", [None, 2])
@pytest.mark.parametrize("frozen", FROZEN, ids=lambda names: "+".join(names) or "none")
def test_the_map_is_a_kronecker_product(frozen, columns):
    model = _model()
    for name, p in model.named_parameters():
        p.requires_grad_(name not in frozen)
    layout, blocks, roots, built = _built(model, columns)
    expected = _kronecker(layout, blocks, roots)
    assert error(dense(built), expected) < 1e-12
    assert built.dim == layout.size
    swapped = _kronecker(layout, blocks, tuple((Root(torch.eye(len(a)).double()), b) for a, b in roots))
    assert error(dense(built), swapped) > 1e-2


@pytest.mark.parametrize(("edge", "columns"), [(0.1, 2), (0.03, 5)])
def test_a_root_takes_the_directions_that_differ(edge, columns):
    vectors = torch.linalg.qr(torch.randn(5, 5, generator=torch.Generator().manual_seed(3), dtype=torch.float64))[0]
    matrix = (vectors * torch.tensor([0.02, 0.04, 0.04, 0.3, 0.6], dtype=torch.float64)) @ vectors.T
    seen = Spectrum.of(matrix).seen(edge)
    root = seen.root(0.5)
    assert root.left.shape == (5, columns)
    again = torch.linalg.inv(root.dense() @ root.dense())
    assert error(again, torch.eye(5) + 2 * (seen.vectors * seen.values) @ seen.vectors.T) < 1e-12
    assert error(again, torch.eye(5) + 2 * matrix) > 1e-3 or edge < 0.1


def test_lifting_is_the_transpose_of_projecting():
    layout, _, _, built = _built(_model())
    u, v = torch.randn(2, layout.size, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    out = torch.zeros(1, built.width, dtype=torch.float64)
    for start in range(0, layout.size, 7):  # rows come in pieces
        built.add_projected(out, v[None, start : start + 7], start)
    projected = built.finish(out)[0]
    assert float(projected @ u) == pytest.approx(float(v @ built.lift(u)), rel=1e-12)


def test_finishing_leaves_what_came_alone():
    layout, _, _, built = _built(_model())
    rows = torch.ones(2, 3, layout.size, dtype=torch.float64)
    assert built.finish(rows).shape == rows.shape
    assert torch.equal(rows, torch.ones_like(rows))


def test_a_matrix_and_back():
    block = Block(outputs=2, inputs=3, weight=1, bias=8)
    rows = torch.arange(11.0)
    matrix = block.matrix(rows)
    assert matrix.tolist() == [[1, 2, 3, 8], [4, 5, 6, 9]]
    empty = torch.zeros(11)
    block.put(empty, matrix)
    assert empty.tolist() == [0, 1, 2, 3, 4, 5, 6, 0, 8, 9, 0]


def test_a_dimension_has_no_meaning():
    with pytest.raises(ValueError, match="proj_dim must be None with a metric"):
        Metric((), ()).build((torch.Size([5]),), 3, torch.device("cpu"), torch.float64)


def test_the_factors_are_not_shown():
    _, blocks, roots, built = _built(_model())
    assert "tensor" not in repr(Metric(blocks, roots)) + repr(built)


# --- means of few records ----------------------------------------------------------------------------------------------


def test_a_mean_of_few_records_is_drawn_towards_equal_eigenvalues_by_the_published_share():
    """In two dimensions with ten records the share is 1/(10·(5/8 − 1/2)) = 0.8, by hand."""
    found = shrunk(torch.diag(torch.tensor([0.75, 0.25], dtype=torch.float64)), 10)
    torch.testing.assert_close(found, torch.diag(torch.tensor([0.55, 0.45], dtype=torch.float64)))


def test_shrinking_keeps_the_trace_and_a_single_dimension_and_leaves_many_records_alone():
    matrix = torch.diag(torch.tensor([0.6, 0.3, 0.1, 0.0], dtype=torch.float64))
    for records in (2, 30, 1000):
        found = shrunk(matrix, records)
        assert float(found.trace()) == pytest.approx(1.0)
        assert float(torch.linalg.eigvalsh(found).min()) > 0
    torch.testing.assert_close(shrunk(matrix, 10**9), matrix, rtol=0, atol=1e-8)
    one = torch.ones(1, 1, dtype=torch.float64)
    torch.testing.assert_close(shrunk(one, 5), one)
    torch.testing.assert_close(shrunk(torch.eye(3).double() / 3, 5), torch.eye(3).double() / 3)


def test_shrinking_is_nearer_to_the_truth_than_the_mean_of_few_records_and_than_no_metric():
    generator = torch.Generator().manual_seed(0)
    scales = torch.logspace(0, -2, 60, dtype=torch.float64)
    truth = torch.diag(scales / scales.sum())
    far = {"shrunk": 0.0, "mean": 0.0, "equal": 0.0}
    for _ in range(20):
        rows = torch.randn(20, 60, generator=generator, dtype=torch.float64) * truth.diagonal().sqrt()
        mean = rows.T @ rows / 20
        far["shrunk"] += float((shrunk(mean, 20) - truth).square().sum())
        far["mean"] += float((mean - truth).square().sum())
        far["equal"] += float((torch.eye(60) / 60 - truth).square().sum())
    assert far["shrunk"] < 0.9 * min(far["mean"], far["equal"])


@pytest.mark.parametrize("seed", range(5))
def test_what_differs_by_more_than_noise_is_told_and_the_rest_is_known(seed):
    """Between the two: beside the edge of what is told, and what is known wherever the difference is within the edge."""
    generator = torch.Generator().manual_seed(seed)
    known = torch.diag(torch.rand(6, generator=generator, dtype=torch.float64))
    axes = torch.linalg.qr(torch.randn(6, 6, generator=generator, dtype=torch.float64)).Q
    differs = torch.tensor([2.0, -1.5, 0.9, 0.5, -0.3, 0.1], dtype=torch.float64)
    found = corrected(known, known + (axes * differs) @ axes.T, 1.0)
    expected = known + (axes[:, :2] * differs[:2]) @ axes[:, :2].T
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    assert torch.equal(corrected(known, known, 1e-9), known)
