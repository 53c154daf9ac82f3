"""One pass: batch by batch it is the pass over a loader, to the bit; and memory that runs out counts nothing twice."""

import copy
import pickle
import re
import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from opacus_expm import GradSampling, Sparse, Stiefel
from opacus_expm.gathering import loaders, passes
from opacus_expm.gathering.clipping import ClippingBounds
from opacus_expm.gathering.measurement import Measurement
from opacus_expm.gathering.passes import MAX_CURVATURE_DIM, Pass, Workbench, full_space
from opacus_expm.gathering.ranks import Ranks

FEATURES, CLASSES, DIM, BATCH = 4, 3, 5, 16
BOUNDS = ClippingBounds(0.3, 0.2)
ALONE = Ranks.current(False)


class Shared(list):
    """A list that copies of a module have in common."""

    def __deepcopy__(self, memo):
        return self


class Limit(nn.Module):
    """Passes its input on, unless a graph is built for more records than fit; after so many such calls."""

    def __init__(self, limit, after):
        super().__init__()
        self.limit, self.after, self.sizes = limit, after, Shared()

    def forward(self, x):
        if torch.is_grad_enabled() and len(x) > 8:  # fewer are synthetic records
            self.sizes.append(len(x))
            if len(x) > self.limit and len(self.sizes) > self.after:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return x


def make_model(limit=1000, after=0, dtype=torch.float32):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers = nn.Linear(FEATURES, 6), nn.Tanh(), nn.Linear(6, CLASSES)
        return nn.Sequential(Limit(limit, after), *layers).to(dtype)


def make_tensors(count, dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(count, FEATURES, generator=generator, dtype=torch.float64).to(dtype)
    return x, torch.randint(CLASSES, (count,), generator=generator)


def make_loader(count, batch_size=BATCH):
    return DataLoader(TensorDataset(*make_tensors(count)), batch_size=batch_size)


def make_bench(model=None, size=BATCH, **changes):
    options = {"criterion": nn.CrossEntropyLoss(), "progress": False, "max_physical_batch_size": size, **changes}
    return Workbench(make_model() if model is None else model, Measurement(Stiefel(seed=3), DIM, **options))


def opened(bench, bounds=BOUNDS):
    return bench.open(bounds, 100, ALONE, bench.pieces.padded(None))


def equal(first, second):
    """The same sums, to the bit."""
    return torch.equal(first.packed(), second.packed()) and (first.parallel, first.rank) == (
        second.parallel,
        second.rank,
    )


# --- batch by batch --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["hooks", "functorch"])
@pytest.mark.parametrize("bounds", [BOUNDS, ClippingBounds(0.3, 0.0), ClippingBounds(1e6, 1e6)])
@pytest.mark.parametrize(("count", "size"), [(64, BATCH), (50, BATCH), (50, 5), (7, BATCH)])
def test_batches_one_by_one_give_the_sums_of_a_loader_to_the_bit(count, size, bounds, mode):
    """The loader's last batch is short, and its batches are cut into pieces: in both the network sees the same."""
    loader, sampling = make_loader(count), GradSampling(mode)
    whole = make_bench(size=size, grad_sampling=sampling).gather(loader, bounds, 100, ALONE)
    bench = make_bench(size=size, grad_sampling=sampling)
    one = opened(bench, bounds)
    seen = 0
    for inputs, targets in loader:
        one.add(inputs, targets)
        seen += len(targets)
        assert one.records == seen
    assert equal(one.sums(), whole.sums)
    found = one.result()
    assert equal(found.sums, whole.sums)
    assert found.configuration == whole.configuration
    assert found.shards != whole.shards  # another pass
    assert bool(found.sums.gradient.any())
    # One batch twice, or one left out, would be seen.
    inputs, targets = next(iter(loader))
    one.add(inputs, targets)
    assert not equal(one.sums(), whole.sums)


def test_an_empty_batch_adds_nothing_and_a_pass_without_records_is_refused():
    one = opened(make_bench())
    with pytest.raises(ValueError, match="loader is empty"):
        one.sums()
    x, y = make_tensors(12)
    one.add(x, y)
    before = one.sums()
    one.add(x[:0], y[:0])
    assert equal(one.sums(), before)
    assert one.records == 12


def test_views_are_seen_by_a_pass_as_by_a_loader():
    def views(x):
        return [x, -0.5 * x]

    loader = make_loader(20)
    bounds = ClippingBounds(0.3, 0.0)
    whole = make_bench(views=views).gather(loader, bounds, 100, ALONE)
    one = opened(make_bench(views=views), bounds)
    for inputs, targets in loader:
        one.add(inputs, targets)
    assert equal(one.sums(), whole.sums)
    assert not equal(one.sums(), make_bench().gather(loader, bounds, 100, ALONE).sums)


def test_a_pass_is_private():
    one = opened(make_bench())
    one.add(*make_tensors(12))
    for save in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="private data"):
            save(one)
    assert not re.search(r"tensor|\d\.\d{3}", repr(one))


def test_records_on_several_ranks_must_add_up_to_the_data_set():
    """A count that is not the data set's stops the pass; the message does not say it."""

    class Two(Ranks):
        """Two ranks of which the other has seen as much as this one."""

        def __init__(self):
            self.rank, self.count = 0, 2

        def same(self, facts):
            facts()

        def summed(self, numbers):
            return 2 * numbers

        def random_name(self):
            return "name"

    bench = make_bench()
    one = Pass(bench, BOUNDS, 100, Two(), bench.pieces.padded(None))
    one.add(*make_tensors(12))
    with pytest.raises(ValueError, match="every record to exactly one rank; nothing was released") as raised:
        one.result(23)
    assert not re.search(r"\d", str(raised.value))
    torch.testing.assert_close(one.result(24).sums.packed(), 2 * one.sums().packed(), rtol=0, atol=0)


# --- memory that runs out --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("after", [0, 1])
def test_memory_that_runs_out_in_the_first_batch_starts_it_again_and_counts_nothing_twice(after):
    """With ``after`` a piece was added before memory ran out: it is forgotten. The rest goes on in the smaller pieces."""
    model = make_model(limit=20, after=after)
    bench = make_bench(model, size=32)
    x, y = make_tensors(150)
    one = opened(bench)
    with pytest.warns(
        UserWarning, match="ran out of memory with 32 records at a time and starts again with 16"
    ) as said:
        one.add(x[:64], y[:64])
    assert len(said) == 1
    assert one.records == 64
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        one.add(x[64:128], y[64:128])
        one.add(x[128:], y[128:])
    assert one.records == 150
    assert list(model[0].sizes) == [32] * (after + 1) + [16] * 10
    # To the bit those of a pass that had known the size from the start.
    expected = make_bench(size=16).gather(make_loader(150, batch_size=64), BOUNDS, 100, ALONE)
    assert equal(one.sums(), expected.sums)


def test_memory_that_runs_out_later_is_an_error_and_the_next_pass_takes_half():
    bench = make_bench(make_model(limit=20, after=2), size=32)
    x, y = make_tensors(96)
    one = opened(bench)
    one.add(x[:32], y[:32])
    one.add(x[32:64], y[32:64])
    with pytest.raises(RuntimeError, match="with 32 records at a time and cannot start again by itself; pass max_phys"):
        one.add(x[64:], y[64:])
    for use in (lambda: one.add(x[64:], y[64:]), one.sums, one.result):
        with pytest.raises(RuntimeError, match="added in part, and would count twice: begin another pass"):
            use()
    again = opened(bench)
    for start in (0, 32, 64):
        again.add(x[start : start + 32], y[start : start + 32])
    assert equal(again.sums(), make_bench(size=16).gather(make_loader(96, 32), BOUNDS, 100, ALONE).sums)


def test_a_batch_that_was_interrupted_cannot_be_added_again():
    """Pieces of it may be in the sums: added once more, a record would weigh twice what is paid for."""
    model = make_model()
    bench = make_bench(model)
    x, y = make_tensors(64)
    one = opened(bench)
    one.add(x[:BATCH], y[:BATCH])
    calls, quadratics = [], bench.quadratics

    def interrupted(*arguments, **options):
        calls.append(arguments)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return quadratics(*arguments, **options)

    bench.quadratics = interrupted
    with pytest.raises(KeyboardInterrupt):
        one.add(x[BATCH:], y[BATCH:])
    bench.quadratics = quadratics
    for use in (lambda: one.add(x[BATCH:], y[BATCH:]), one.sums, one.result):
        with pytest.raises(RuntimeError, match="begin another pass"):
            use()


@pytest.mark.filterwarnings("ignore:the pass over loader ran out of memory")
def test_too_little_memory_for_single_records_leaves_nothing_behind():
    model = make_model(limit=0)
    model[0].forward = lambda x: (_ for _ in ()).throw(MemoryError()) if torch.is_grad_enabled() else x
    bench = make_bench(model, grad_sampling=GradSampling("functorch"))
    with pytest.raises(RuntimeError, match=r"with the fewest records at a time; .* GradSampling\(probes=...\)"):
        opened(bench).add(*make_tensors(12))


def test_what_was_remembered_gives_the_sums_of_a_second_pass(monkeypatch):
    """Quadratics are kept in the model's type, and agree up to its rounding; or not at all, where they do not fit."""
    loader = make_loader(50)
    expected = make_bench().gather(loader, BOUNDS, 100, ALONE).sums
    for memory, kept in ((2**30, True), (0, False)):
        monkeypatch.setattr(passes, "CACHE_BYTES", memory)
        bench = make_bench()
        remembered = bench.remember(loader, curvature=True, ranks=ALONE)
        assert {name: len(norms) for name, norms in remembered.norms.items()} == dict.fromkeys(remembered.norms, 50)
        assert (remembered.records is not None) is kept
        found = bench.gather(loader, BOUNDS, 100, ALONE, remembered=remembered).sums
        torch.testing.assert_close(found.packed(), expected.packed(), rtol=1e-5, atol=1e-6)
        with pytest.raises(TypeError, match="private data"):
            pickle.dumps(remembered)


# --- what is measured ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"views": 3}, "views must be a function"),
        ({"nominal_size": 0}, "nominal_size must be a positive integer, got 0"),
        ({"max_physical_batch_size": 2.5}, "max_physical_batch_size must be a positive integer, got 2.5"),
        ({"proj_dim": 0}, "proj_dim must be a positive integer, got 0"),
    ],
)
def test_what_cannot_be_measured_is_refused_at_once(changes, message):
    with pytest.raises((TypeError, ValueError), match=message):
        Measurement(Sparse(), **{"proj_dim": 5, **changes})


def test_a_nominal_size_keeps_the_bar_away_and_a_stream_needs_one():
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(())

    plain, named = (Measurement(Sparse(), 5, progress=True, nominal_size=size) for size in (None, 7))
    assert (plain.shows_progress, named.shows_progress) == (True, False)
    assert (plain.size_of(make_loader(12)), named.size_of(make_loader(12))) == (12, 7)
    assert named.size_of(DataLoader(Stream())) == 7
    with pytest.raises(ValueError, match="nominal_size must be given for an iterable data set"):
        plain.size_of(DataLoader(Stream()))


def test_no_matrix_that_cannot_be_held_is_begun():
    bench = Workbench(nn.Linear(400, 300), Measurement(Sparse(seed=0), MAX_CURVATURE_DIM + 1))
    bench.check_curvature(0.0)
    for max_curvature in (1.0, None):
        with pytest.raises(ValueError, match=f"proj_dim must be at most {MAX_CURVATURE_DIM} where private curvature"):
            bench.check_curvature(max_curvature)


def test_rows_over_all_parameters_are_computed_for_few_records_at_a_time():
    wide = full_space(nn.Linear(4000, 1000), Measurement(Stiefel(), 5, views=lambda x: [x]))
    assert wide.map.dim == 4_001_000
    assert wide.pieces.step == 16
    assert wide.measurement.views is None
    assert full_space(nn.Linear(3, 1), Measurement(Stiefel(), 5)).pieces.step == 256


def test_the_model_that_came_is_neither_changed_nor_kept():
    model = make_model()
    before = copy.deepcopy(model.state_dict())
    bench = make_bench(model)
    with torch.no_grad():
        model[1].bias += 1.0
    found = bench.gather(make_loader(20), BOUNDS, 100, ALONE)
    assert all(torch.equal(value, before[name]) for name, value in found.module.state_dict().items())
    assert not any(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def test_pieces_are_shared_by_the_passes_of_a_bench():
    pieces = loaders.Pieces(7)
    bench = Workbench(make_model(), Measurement(Sparse(seed=0), DIM), pieces)
    assert bench.pieces is pieces
