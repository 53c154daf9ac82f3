"""Large layers in small memory: gradients of a few records at a time, and tables that are never built."""

import tracemalloc

import pytest
import torch
from reference import CPU, random_map
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from opacus_expm.gathering import layers
from opacus_expm.gathering.hooks import hooks_for
from opacus_expm.gathering.model import working_copy
from opacus_expm.subspaces.layout import Layout
from opacus_expm.subspaces.sparse import SparseMap
from opacus_expm.subspaces.stiefel import Columns


class Encoder(nn.Module):
    """Token and position embeddings, attention made of linear layers, normalisation, a convolution over positions."""

    def __init__(self, vocabulary, width, dtype=torch.float32):
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(6, width)
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.norm, self.wide, self.back = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.mix, self.group = nn.Conv1d(width, width, 3, padding=1), nn.GroupNorm(2, width)
        self.head = nn.Linear(width, 3)
        self.to(dtype)

    def forward(self, ids):
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1])[None])
        weights = torch.softmax(self.query(x) @ self.key(x).transpose(1, 2), dim=2)
        x = self.norm(x + weights @ self.value(x))
        x = x + self.back(torch.tanh(self.wide(x)))
        x = self.group(self.mix(x.transpose(1, 2)))
        return self.head(x.mean(2))


class Largest(TorchDispatchMode):
    """The number of elements of the largest tensor that any operation returned."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        # An expanded view has no memory of its own.
        sizes = [
            t.untyped_storage().nbytes() // t.element_size() for t in tree_leaves(result) if isinstance(t, torch.Tensor)
        ]
        self.elements = max(self.elements, *sizes, 0) if sizes else self.elements
        return result


def rows_of(model, ids, cotangents, dim, kind="sparse"):
    """Projected rows through the hooks, and the largest tensor made on the way."""
    module = working_copy(model)
    layout = Layout.of(module)
    dtype = next(module.parameters()).dtype
    projection = random_map(kind, layout.size, dim, 0, dtype)
    source = hooks_for(module, layout, projection, ids[:1])
    with Largest() as largest:
        rows = source.outputs_and_pullback(ids)[1](cotangents)
    return rows, largest.elements, projection


@pytest.mark.parametrize("kind", ["sparse", "stiefel"])
@pytest.mark.parametrize("elements", [1, 700])
def test_pieces_give_the_rows_of_the_whole_batch(kind, elements, monkeypatch):
    torch.manual_seed(0)
    model = Encoder(11, 8, torch.float64)
    ids, cotangents = torch.randint(11, (7, 6)), torch.randn(7, 2, 3, dtype=torch.float64)
    whole, _, _ = rows_of(model, ids, cotangents, 9, kind)
    monkeypatch.setattr(layers, "_PIECE_ELEMENTS", elements)
    monkeypatch.setattr(Columns, "least_records", 2)
    pieces, _, _ = rows_of(model, ids, cotangents, 9, kind)
    assert (pieces - whole).abs().max() <= 1e-13 * whole.abs().max()
    alone = torch.cat([rows_of(model, ids[[i]], cotangents[[i]], 9, kind)[0] for i in (0, 6)])
    assert (pieces[[0, 6]] - alone).abs().max() <= 1e-13 * whole.abs().max()


def test_no_tensor_of_a_pass_has_the_size_of_batch_times_parameters(monkeypatch):
    """A vocabulary of 30,000 and a batch of 24: only the map A itself has p elements."""
    torch.manual_seed(0)
    model = Encoder(30_000, 16)
    ids, cotangents = torch.randint(30_000, (24, 6)), torch.randn(24, 1, 3)
    monkeypatch.setattr(layers, "_PIECE_ELEMENTS", 4096)
    rows, streamed, projection = rows_of(model, ids, cotangents, 50)
    parameters = projection.size
    assert parameters > 480_000
    assert streamed <= parameters  # views of A's buckets; everything else is smaller by far
    monkeypatch.setattr(SparseMap, "add_looked_up", dense_table)
    built, tables, _ = rows_of(model, ids, cotangents, 50)
    assert tables >= 24 * 480_000  # the measure sees a table that is built
    assert (rows - built).abs().max() <= 1e-5 * rows.abs().max()


def dense_table(self, out, values, index, count, start):
    table = torch.zeros(len(values), count, values.shape[2])
    table.scatter_add_(1, index[..., None].expand_as(values), values)
    self.add_projected(out, table.flatten(1), start)


def test_the_map_comes_back_from_its_seed_and_is_made_in_16_bytes_a_coordinate():
    size = 300_001
    tracemalloc.start()  # which sees numpy's arrays; torch's own, 4 bytes a coordinate, come after the largest are gone
    try:
        first = SparseMap.generate(size, 700, 3, CPU, torch.float32)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak <= 16.5 * size
    assert first.bucket.nbytes + first.weight.nbytes == 8 * size
    again = SparseMap.generate(size, 700, 3, CPU, torch.float32)
    assert torch.equal(first.bucket, again.bucket)
    assert torch.equal(first.weight, again.weight)
    assert not torch.equal(first.bucket, SparseMap.generate(size, 700, 4, CPU, torch.float32).bucket)
    counts = torch.bincount(first.bucket, minlength=700)
    assert counts.max() - counts.min() <= 1
    assert torch.allclose(first.weight.abs(), counts[first.bucket].float().rsqrt(), rtol=1e-6, atol=0)
