"""Statistics gathered apart add up to those of the union; files are marked, safe to load and checked; passes resume."""

import os
import pickle
import stat
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from opacus_expm import ExpMQuadEngine, GradSampling, Sparse, Statistics, Stiefel, paper
from opacus_expm.gathering import files
from opacus_expm.gathering.criteria import CrossEntropy, description, make_criterion
from opacus_expm.gathering.files import MARK, PassFile, read_private, write_private

RECORDS, FEATURES, DIM, BATCH = 23, 3, 4, 4
GOOD = {"criterion": nn.MSELoss(), "max_grad_norm": 1.0, "max_curvature": 1.0, "projection": Stiefel(seed=0)}


def make_model(shift=0.0):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(FEATURES, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    with torch.no_grad():
        model[0].bias[0] += shift
    return model


def tensors():
    x = torch.randn(RECORDS, FEATURES, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return x, torch.stack([x.sum(1), x.prod(1)], dim=1)


def loader(indices=range(RECORDS)):
    return DataLoader(Subset(TensorDataset(*tensors()), indices), batch_size=BATCH)


def gather(indices=range(RECORDS), model=None, proj_dim=DIM, **changes):
    model = make_model() if model is None else model
    return ExpMQuadEngine().gather(model, loader(indices), proj_dim, **GOOD | changes)


def saved(statistics, path):
    with pytest.warns(UserWarning, match=r"save_private\(\) writes PRIVATE data"):
        statistics.save_private(path)
    return path


def close(first, second):
    return all(
        torch.allclose(getattr(first, name), getattr(second, name), rtol=1e-13, atol=1e-13)
        for name in ("gradient", "curvature")
    )


# --- Merging ---------------------------------------------------------------------------------------------------------


@settings(max_examples=8)
@given(st.lists(st.integers(0, 3), min_size=RECORDS, max_size=RECORDS))
def test_parts_add_up_to_the_whole(places):
    parts = [gather([i for i, place in enumerate(places) if place == n]) for n in sorted(set(places))]
    merged, whole = parts[0].merge(*parts[1:]), gather()
    assert close(merged.sums, whole.sums)
    assert merged.nominal_size == RECORDS
    assert merged.configuration == whole.configuration
    assert len(merged.shards) == len(parts)


def test_a_wrong_union_is_seen():
    first, second, whole = gather(range(10)), gather(range(9, RECORDS)), gather()
    assert not close(first.merge(second).sums, whole.sums)  # record 9 twice


def test_files_of_three_parts_serve_a_release(tmp_path):
    parts = [range(8), range(8, 9), range(9, RECORDS)]
    paths = [saved(gather(part), tmp_path / str(n)) for n, part in enumerate(parts)]
    first, *others = [Statistics.load_private(path, make_model()) for path in paths]
    engine, other = (ExpMQuadEngine(noise_generator=torch.Generator().manual_seed(1)) for _ in range(2))
    found = engine.release(first.merge(*others), 1.0, 0.3)
    whole = other.release(gather(), 1.0, 0.3)
    assert engine.get_epsilon() == 1.0
    assert engine.accountant.releases[0].nominal_size == RECORDS
    for a, b in zip(found.parameters(), whole.parameters(), strict=True):
        assert torch.allclose(a, b, rtol=0, atol=1e-10)


MISMATCHES = {
    "model": {"model": make_model(1e-9)},
    "projection's seed": {"projection": Stiefel(seed=1)},
    "projection": {"projection": Sparse(seed=0)},
    "proj_dim": {"proj_dim": DIM - 1},
    "max_grad_norm": {"max_grad_norm": 1.5},
    "max_curvature": {"max_curvature": 0.0},
    "criterion": {"criterion": nn.MSELoss(reduction="sum")},
    "probes": {"grad_sample_mode": GradSampling(probes=2)},
}


@pytest.mark.parametrize("name", MISMATCHES)
def test_a_mismatch_is_refused_by_name(name):
    with pytest.raises(ValueError, match=rf"statistics with another .*\b{name}\b.* cannot be merged"):
        gather(range(10)).merge(gather(range(10, RECORDS), **MISMATCHES[name]))


def test_no_pass_counts_twice(tmp_path):
    first, second = gather(range(10)), gather(range(10, RECORDS))
    merged = first.merge(second)
    loaded = Statistics.load_private(saved(first, tmp_path / "first"), make_model())
    again = Statistics.load_private(saved(merged, tmp_path / "merged"), make_model())
    for one, other in ((first, first), (merged, first), (first, loaded), (second, again), (again, merged)):
        with pytest.raises(ValueError, match="every part may count once"):
            one.merge(other)
    with pytest.raises(TypeError, match="only Statistics can be merged, got int"):
        first.merge(3)


def test_where_bounds_came_from_is_kept():
    """One part without a guarantee leaves the union without one."""
    marked, other = paper.read_off(gather(range(10))), gather(range(10, RECORDS))
    assert other.bounds == "given"
    assert marked.merge(other).bounds == other.merge(marked).bounds == "paper"


# --- Files -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "proj_dim"),
    [
        ({}, DIM),
        ({"projection": "sparse"}, DIM),
        ({}, None),
        ({"max_curvature": 0.0}, DIM),
        ({"projection": Stiefel(), "max_curvature": 0.0}, DIM),
        ({"max_curvature": 0.0}, None),
    ],
)
def test_a_file_gives_back_what_was_saved(tmp_path, options, proj_dim):
    kept = gather(proj_dim=proj_dim, **options)
    found = Statistics.load_private(saved(kept, tmp_path / "file"), make_model())
    assert torch.equal(found.sums.packed(), kept.sums.packed())
    assert found.configuration == kept.configuration
    assert (found.shards, found.nominal_size, found.bounds) == (kept.shards, kept.nominal_size, kept.bounds)
    coordinates = torch.linspace(0, 1, kept.projection.dim, dtype=torch.float64).numpy()
    for a, b in zip(found.module_at(coordinates).parameters(), kept.module_at(coordinates).parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_file_is_marked_and_for_its_owner_only(tmp_path):
    path = saved(gather(), tmp_path / "file")
    assert MARK.encode() in path.read_bytes()
    assert MARK.startswith("PRIVATE DATA")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_a_failed_write_leaves_nothing(tmp_path):
    with pytest.raises((TypeError, AttributeError, pickle.PicklingError)):
        write_private(tmp_path / "file", "kind", {"value": lambda: None})
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_overwritten_and_bought_bounds_stay(tmp_path):
    path = saved(gather(), tmp_path / "file")
    before = path.read_bytes()
    with pytest.raises(FileExistsError, match="choose another path"):
        gather().save_private(path)
    assert path.read_bytes() == before
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "a private bound")
        bought = gather(max_grad_norm=None, max_curvature=None, epsilon=1.0)
    with pytest.raises(ValueError, match="bought bounds stay with the engine whose ledger was charged"):
        bought.save_private(tmp_path / "other")
    assert not (tmp_path / "other").exists()


def rewritten(path, **changes):
    """The file with parts of its content changed, as name or part.name."""
    content = torch.load(path, weights_only=True)
    for name, value in changes.items():
        *outer, last = name.split("__")
        place = content
        for key in outer:
            place = place[key]
        place[last] = value
    torch.save(content, path)
    return path


DAMAGES = {
    "other seed": ({"subspace__seed": 1, "configuration__projection's seed": 1}, "seed does not give the projection"),
    "another seed than said": ({"configuration__projection's seed": 1}, "do not fit together"),
    "other kind": ({"subspace__kind": "sparse"}, "seed does not give the projection"),
    "unknown kind": ({"subspace__kind": "magic"}, "this is no projection"),
    "looser bound than said": ({"sums__max_grad_norm": 0.5}, "do not fit together"),
    "no bound": ({"sums__max_grad_norm": 0.0}, "max_grad_norm must be greater than 0"),
    "short": ({"sums__numbers": torch.zeros(DIM + 3, dtype=torch.float64)}, "these are no sums"),
    "not finite": ({"sums__numbers": torch.full((14,), torch.nan, dtype=torch.float64)}, "these are no sums"),
    "float32": ({"sums__numbers": torch.zeros(14)}, "these are no sums"),
    "no sums": ({"sums": 3}, "these are no sums"),
    "no subspace": ({"subspace": {}}, "this is no projection"),
    "no size": ({"nominal_size": 0}, "nominal_size must be a positive integer"),
    "no origin": ({"bounds": "luck"}, "bounds must be one of"),
    "no shards": ({"shards": None}, "does not hold sound statistics"),
    "no fingerprint": ({"fingerprint": torch.zeros(2)}, "does not hold sound statistics"),
    "other version": ({"version": 2}, "does not hold private statistics of opacus-expm, version 1"),
    "no mark": ({"mark": "public"}, "does not hold private statistics"),
    "other kind of file": ({"kind": PassFile.KIND}, "does not hold private statistics"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_file_that_does_not_fit_is_refused(tmp_path, name):
    changes, words = DAMAGES[name]
    path = rewritten(saved(gather(), tmp_path / "file"), **changes)
    with pytest.raises(ValueError, match=words) as raised:
        Statistics.load_private(path, make_model())
    assert str(path) in str(raised.value)


def test_another_model_is_refused(tmp_path):
    path = saved(gather(), tmp_path / "file")
    frozen = make_model()
    frozen[0].bias.requires_grad_(False)
    for model in (make_model(1e-9), frozen):
        with pytest.raises(ValueError, match="the model has other weights"):
            Statistics.load_private(path, model)
    with pytest.raises(FileNotFoundError):
        Statistics.load_private(tmp_path / "none", make_model())


class Harmful:
    """Runs code when it is unpickled."""

    def __reduce__(self):
        return (os.mkdir, ("harm",))


def test_no_code_in_a_file_is_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, content in {"torch": Harmful(), "nested": {"mark": MARK, "kind": Harmful()}}.items():
        torch.save(content, name)
    (tmp_path / "pickle").write_bytes(pickle.dumps(Harmful()))
    (tmp_path / "text").write_text("hello")
    for name in ("torch", "nested", "pickle", "text"):
        with pytest.raises(ValueError, match="cannot be loaded safely"):
            read_private(tmp_path / name, "private statistics")
    assert not (tmp_path / "harm").exists()


def test_a_criterion_is_described_alike_in_every_process():
    weight = torch.tensor([1.0, 2.0])
    assert description(CrossEntropy(weight)) == description(CrossEntropy(weight.clone()))
    assert description(CrossEntropy(weight)) != description(CrossEntropy(weight + 1e-6))

    def custom(outputs, targets):
        return ((outputs - targets) ** 4).mean()

    words = description(make_criterion(custom, torch.zeros(1)))
    assert "custom" in words
    assert " at 0x" not in words


# --- An unfinished pass ----------------------------------------------------------------------------------------------


class Interrupted(Dataset):
    """The usual records; the user interrupts before one of them."""

    def __init__(self, at=None):
        self.tensors, self.at, self.visited = tensors(), at, []

    def __len__(self):
        return RECORDS

    def __getitem__(self, index):
        if index == self.at:
            raise KeyboardInterrupt
        self.visited.append(index)
        return self.tensors[0][index], self.tensors[1][index]


class Stream(IterableDataset):
    def __iter__(self):
        return iter(zip(*tensors(), strict=True))


def begun(dataset, path, shuffle=True, **changes):
    options = {"private_checkpoint": path, **GOOD, **changes}
    with pytest.warns(UserWarning, match=r"private_checkpoint=...\) keeps PRIVATE data in .*file"):
        return ExpMQuadEngine().gather(
            make_model(), DataLoader(dataset, batch_size=BATCH, shuffle=shuffle), DIM, **options
        )


@pytest.fixture
def at_once(monkeypatch):
    """The state is kept after every batch."""
    monkeypatch.setattr(files, "SECONDS", 0.0)


@pytest.mark.usefixtures("at_once")
def test_an_interrupted_pass_is_resumed(tmp_path):
    path, first, second = tmp_path / "file", Interrupted(at=17), Interrupted(at=5)
    with pytest.raises(KeyboardInterrupt):
        begun(first, path)
    assert first.visited == list(range(17))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert MARK.encode() in path.read_bytes()
    found = begun(second, path)
    assert second.visited == list(range(16, RECORDS))  # whole batches were kept
    assert not path.exists()
    whole = gather().sums
    assert torch.equal(found.sums.gradient, whole.gradient)
    assert torch.allclose(found.sums.curvature, whole.curvature, rtol=1e-14, atol=1e-14)


@pytest.mark.usefixtures("at_once")
def test_a_complete_pass_whose_file_is_left_is_not_made_again(tmp_path, monkeypatch):
    path, again = tmp_path / "file", Interrupted(at=BATCH)
    with monkeypatch.context() as patch:
        patch.setattr(PassFile, "remove", lambda self: None)
        whole = begun(Interrupted(), path)
    found = begun(again, path)
    assert again.visited == list(range(BATCH))  # one batch to see the shape of a record
    assert torch.equal(found.sums.packed(), whole.sums.packed())
    assert not path.exists()


def test_the_state_is_kept_once_in_a_while(tmp_path):
    path = tmp_path / "file"
    with pytest.raises(KeyboardInterrupt):
        begun(Interrupted(at=17), path)
    assert not path.exists()  # no minute was over


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("projection", {"projection": Stiefel(seed=1)}),
        ("max_grad_norm", {"max_grad_norm": 2.0}),
        ("criterion", {"criterion": nn.MSELoss(reduction="sum")}),
        ("grad_sample_mode", {"grad_sample_mode": GradSampling(probes=2)}),
    ],
)
def test_the_state_of_another_pass_is_refused_and_kept(tmp_path, name, changes):
    path = tmp_path / "file"
    with pytest.raises(KeyboardInterrupt):
        begun(Interrupted(at=9), path)
    before = path.read_bytes()
    with pytest.raises(ValueError, match=rf"belongs to another pass: .*{name}.* differs"):
        begun(Interrupted(), path, **changes)
    shorter = Subset(Interrupted(), range(RECORDS - 1))
    with pytest.raises(ValueError, match=r"belongs to another pass: .*loader.* differs"):
        begun(shorter, path)
    assert path.read_bytes() == before
    assert close(begun(Interrupted(), path).sums, gather().sums)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"projection": Stiefel()}, "projection must have a seed with private_checkpoint"),
        ({"max_grad_norm": None, "epsilon": 1.0}, "cannot keep a pass that buys its bounds"),
        ({"loader": DataLoader(Stream(), batch_size=BATCH), "nominal_size": 20}, "cannot be divided .* or resumed"),
    ],
)
def test_what_cannot_be_resumed_is_refused(tmp_path, changes, words):
    options = {"loader": loader(), **GOOD, "private_checkpoint": tmp_path / "file", **changes}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(ValueError, match=words):
            ExpMQuadEngine().gather(make_model(), proj_dim=DIM, **options)
    assert not (tmp_path / "file").exists()
