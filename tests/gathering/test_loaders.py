"""Which loaders are let in, and how their batches are cut."""

import re

import numpy as np
import pytest
import torch
from opacus.data_loader import DPDataLoader
from records_of_all_kinds import Listed
from torch.utils.data import (
    BatchSampler,
    ChainDataset,
    ConcatDataset,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    StackDataset,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
    random_split,
)

from opacus_expm.gathering import loaders

CPU = torch.device("cpu")


def records(n=10):
    """Records that can be told apart: the input is the record's number."""
    x = torch.arange(n, dtype=torch.float32)[:, None]
    return TensorDataset(x, 10 * x)


class Stream(IterableDataset):
    """Records without a length."""

    def __init__(self, n=10, start=0):
        self.n, self.start = n, start

    def __iter__(self):
        return ((torch.tensor([float(i)]), torch.tensor([10.0 * i])) for i in range(self.start, self.n))


class Backwards(Sampler):
    """A sampler nobody knows."""

    def __iter__(self):
        return iter(range(9, -1, -1))

    def __len__(self):
        return 10


class MyBatches(BatchSampler):
    """A batch sampler nobody knows."""


class Again(DataLoader):
    """The first batch comes again in the place of the others: as many records as there should be."""

    def __iter__(self):
        batches = list(super().__iter__())
        return iter([batches[0]] * len(batches))


class OwnIterator(DataLoader):
    """The same one step below."""

    def _get_iterator(self):
        return iter([])


class Mixin:
    """Not a loader by itself."""

    dataset = property(lambda self: records(), lambda self, value: None)


class OtherData(Mixin, DataLoader):
    """Another data set each time it is asked for."""


class OwnName(DataLoader):
    """A loader that is made in its own way, and has a method of its own."""

    def __init__(self, dataset, size):
        super().__init__(dataset, batch_size=size)

    def __len__(self):
        return 1000

    def __repr__(self):
        return "OwnName()"

    def records(self):
        return len(self.dataset)


def with_attribute(loader, **attributes):
    vars(loader).update(attributes)
    return loader


def distributed(n, replicas, **options):
    return DistributedSampler(records(n), num_replicas=replicas, rank=0, **options)


def passed(loader, *, physical=None, progress=False, dtype=torch.float32):
    """All pieces of one pass."""
    return list(loaders.batches(loader, device=CPU, dtype=dtype, max_physical_batch_size=physical, progress=progress))


TEN, STREAM = records(), Stream()

# --- The table in the module's docstring -----------------------------------------------------------------------------

ACCEPTED = {
    "sequential": lambda: DataLoader(records(), batch_size=3),
    "shuffled": lambda: DataLoader(records(), batch_size=3, shuffle=True),
    "one record at a time": lambda: DataLoader(records()),
    "batch sampler of torch": lambda: DataLoader(
        records(), batch_sampler=BatchSampler(SequentialSampler(records()), 3, drop_last=False)
    ),
    "subset sampler": lambda: DataLoader(records(12), batch_size=3, sampler=SubsetRandomSampler([*range(1, 11)])),
    "subset": lambda: DataLoader(Subset(records(20), list(range(0, 20, 2))), batch_size=4),
    "subset with an array": lambda: DataLoader(Subset(records(20), np.arange(10)), batch_size=4),
    "subset with a tensor": lambda: DataLoader(Subset(records(20), torch.arange(10)), batch_size=4),
    "subset of a subset": lambda: DataLoader(Subset(Subset(records(20), range(12)), range(2, 12)), batch_size=4),
    "random_split, whole again": lambda: DataLoader(ConcatDataset(random_split(records(10), [7, 3])), batch_size=4),
    "two data sets": lambda: DataLoader(ConcatDataset([records(4), Subset(records(10), range(4, 10))]), batch_size=4),
    "one half of two": lambda: DataLoader(Subset(ConcatDataset([TEN, TEN]), range(10)), batch_size=4),
    "a sampler of one half of two": lambda: DataLoader(
        ConcatDataset([TEN, TEN]), batch_size=4, sampler=SubsetRandomSampler(range(10, 20))
    ),
    "two in parallel": lambda: DataLoader(StackDataset(*(Listed(list(t)) for t in records().tensors)), batch_size=4),
    "a subclass that is made in its own way": lambda: OwnName(records(), 3),
    "two streams": lambda: DataLoader(ChainDataset([Stream(4), Stream(10, 4)]), batch_size=3),
    "distributed over one": lambda: DataLoader(records(), batch_size=3, sampler=distributed(10, 1)),
    "drop_last with nothing to drop": lambda: DataLoader(records(), batch_size=5, drop_last=True),
    "iterable": lambda: DataLoader(Stream(), batch_size=3),
    "iterable, one worker": lambda: DataLoader(Stream(), batch_size=3, num_workers=1),
}

REFUSED = {
    "drop_last": (
        lambda: DataLoader(records(), batch_size=3, drop_last=True),
        "drop_last=True: removing one record would re-admit a dropped one",
    ),
    "drop_last, shuffled": (
        lambda: DataLoader(records(), batch_size=4, drop_last=True, shuffle=True),
        "drop_last=True: removing one record would re-admit a dropped one",
    ),
    "drop_last, iterable": (
        lambda: DataLoader(Stream(), batch_size=3, drop_last=True),
        "drop_last=True: removing a record would re-admit a dropped one",
    ),
    "with replacement": (
        lambda: DataLoader(records(), batch_size=3, sampler=RandomSampler(records(), replacement=True)),
        "RandomSampler with replacement or num_samples: a record may count twice or not at all",
    ),
    "num_samples": (
        lambda: DataLoader(records(), batch_size=3, sampler=RandomSampler(records(), num_samples=7)),
        "RandomSampler with replacement or num_samples: a record may count twice or not at all",
    ),
    "num_samples, as many as records": (
        lambda: DataLoader(records(), batch_size=3, sampler=RandomSampler(records(), num_samples=10)),
        "RandomSampler with replacement or num_samples: a record may count twice or not at all",
    ),
    "weighted": (
        lambda: DataLoader(records(), batch_size=3, sampler=WeightedRandomSampler([0.1] * 10, 10)),
        "WeightedRandomSampler: a record may count twice or not at all",
    ),
    "Poisson": (
        lambda: DPDataLoader(records(), sample_rate=0.3),
        "Poisson sampling, which may skip or repeat records",
    ),
    "Poisson, made from a loader": (
        lambda: DPDataLoader.from_data_loader(DataLoader(records(), batch_size=3)),
        "pass the loader as it was before PrivacyEngine.make_private",
    ),
    "distributed, pads": (
        lambda: DataLoader(records(), batch_size=3, sampler=distributed(10, 3)),
        "padded by repeated records or with some dropped",
    ),
    "distributed, drops": (
        lambda: DataLoader(records(), batch_size=3, sampler=distributed(10, 4, drop_last=True)),
        "padded by repeated records or with some dropped",
    ),
    "unknown sampler": (
        lambda: DataLoader(records(), batch_size=3, sampler=Backwards()),
        "sampler of type Backwards, which is not known to visit every record once",
    ),
    "a list as sampler": (
        lambda: DataLoader(records(), batch_size=3, sampler=[0, 1, 1]),
        "sampler of type list, which is not known to visit every record once",
    ),
    "sequential over something shorter": (
        lambda: DataLoader(records(), batch_size=3, sampler=SequentialSampler(range(7))),
        "every record once",
    ),
    "shuffled over something shorter": (
        lambda: DataLoader(records(), batch_size=3, sampler=RandomSampler(range(7))),
        "every record once",
    ),
    "unknown batch sampler": (
        lambda: DataLoader(records(), batch_sampler=MyBatches(SequentialSampler(records()), 3, drop_last=False)),
        "batch_sampler of type MyBatches, not known to visit every record once",
    ),
    "a list as batch sampler": (
        lambda: DataLoader(records(), batch_sampler=[[0, 1], [1, 2]]),
        "batch_sampler of type list, not known to visit every record once",
    ),
    "subset sampler, repeats": (
        lambda: DataLoader(records(), batch_size=3, sampler=SubsetRandomSampler([0, 1, 1])),
        "SubsetRandomSampler with repeated indices: a record would count twice",
    ),
    "subset sampler, repeats in a tensor": (
        lambda: DataLoader(records(), batch_size=3, sampler=SubsetRandomSampler(torch.tensor([0, 1, 1]))),
        "SubsetRandomSampler with repeated indices: a record would count twice",
    ),
    "subset, repeats": (
        lambda: DataLoader(Subset(records(), [0, 1, 1]), batch_size=3),
        "names a record twice, by repeated indices of a Subset or",
    ),
    "subset, repeats in an array": (
        lambda: DataLoader(Subset(records(), np.array([0, 1, 1])), batch_size=3),
        "names a record twice, by repeated indices of a Subset or",
    ),
    "subset, repeats in a tensor": (
        lambda: DataLoader(Subset(records(), torch.tensor([0, 1, 1])), batch_size=3),
        "names a record twice, by repeated indices of a Subset or",
    ),
    "subset, the same record counted from both ends": (
        lambda: DataLoader(Subset(records(), [0, -10]), batch_size=3),
        "names a record twice, by repeated indices of a Subset or",
    ),
    "subset of a subset with repeats": (
        lambda: DataLoader(Subset(Subset(records(), [0, 1, 1]), [0, 1, 2]), batch_size=3),
        "names a record twice, by repeated indices of a Subset or",
    ),
    "a data set twice": (
        lambda: DataLoader(ConcatDataset([TEN, TEN]), batch_size=3),
        "by a data set that comes twice in a ConcatDataset or ChainDataset: it would count twice",
    ),
    "a record by two paths": (
        lambda: DataLoader(ConcatDataset([records(), ConcatDataset([TEN, Subset(TEN, [3])])]), batch_size=3),
        "names a record twice",
    ),
    "a subset of a data set twice": (
        lambda: DataLoader(Subset(ConcatDataset([TEN, TEN]), [0, 10]), batch_size=3),
        "names a record twice",
    ),
    "a sampler of a data set twice": (
        lambda: DataLoader(ConcatDataset([TEN, TEN]), batch_size=3, sampler=SubsetRandomSampler([0, 10])),
        "names a record twice",
    ),
    "a stream twice": (lambda: DataLoader(ChainDataset([STREAM, STREAM]), batch_size=3), "names a record twice"),
    "a subclass that repeats a batch": (
        lambda: Again(records(), batch_size=5),
        "is a Again with its own __iter__, so it is not known to yield every record once",
    ),
    "a subclass with its own iterator": (
        lambda: OwnIterator(records(), batch_size=5),
        "is a OwnIterator with its own _get_iterator, so",
    ),
    "a subclass with another data set": (
        lambda: OtherData(records(), batch_size=5),
        "is a OtherData with its own dataset, so",
    ),
    "a loader with an attribute for a method": (
        lambda: with_attribute(DataLoader(records(), batch_size=5), _get_iterator=lambda: iter([])),
        "is a DataLoader with its own _get_iterator, so",
    ),
    "iterable, two workers": (
        lambda: DataLoader(Stream(), batch_size=3, num_workers=2),
        "num_workers=2: each worker may yield every record",
    ),
    "batch_size=None": (
        lambda: DataLoader(records(), batch_size=None),
        "batch_size=None, so what one record is would not be known",
    ),
    "batch_size=None, iterable": (
        lambda: DataLoader(Stream(), batch_size=None),
        "batch_size=None, so what one record is would not be known",
    ),
    "no record": (lambda: DataLoader(records(0), batch_size=3), "is empty: its data set has no record"),
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_accepted_loaders_show_every_record_once(name):
    loader = ACCEPTED[name]()
    assert loaders.check_loader(loader) is loader
    if loader.num_workers:
        return
    inputs = torch.cat([x for x, _ in passed(loader)])[:, 0].tolist()
    assert len(inputs) == len(set(inputs)) == 10


@pytest.mark.parametrize("name", REFUSED)
def test_refused_loaders_say_why(name):
    make, reason = REFUSED[name]
    with pytest.raises(ValueError, match=re.escape(reason)) as raised:
        loaders.check_loader(make(), "private_loader")
    assert str(raised.value).startswith("private_loader ")


@pytest.mark.parametrize("value", [None, [(torch.zeros(1), torch.zeros(1))], records(), "loader"])
def test_something_else_than_a_loader_is_refused(value):
    with pytest.raises(TypeError, match=rf"loader must be a torch.utils.data.DataLoader, got {type(value).__name__}; "):
        loaders.check_loader(value)


REMEDIES = {
    "drop_last": "drop_last=False",
    "num_samples": "pass DataLoader(dataset, batch_size=...)",
    "weighted": "pass DataLoader(dataset, batch_size=...)",
    "Poisson": "poisson_sampling=False",
    "distributed, pads": "pass a loader over the whole data set",
    "unknown sampler": "pass DataLoader(dataset, batch_size=...)",
    "unknown batch sampler": "pass DataLoader(dataset, batch_size=...)",
    "iterable, two workers": "use num_workers=0 or 1",
    "batch_size=None": "pass DataLoader(dataset, batch_size=...)",
    "subset, repeats": "name every record once",
    "a subclass that repeats a batch": "put what it does to a record into the data set",
}


@pytest.mark.parametrize("name", REMEDIES)
def test_refusals_name_a_way_out(name):
    with pytest.raises(ValueError, match=re.escape(REMEDIES[name])):
        loaders.check_loader(REFUSED[name][0]())


@pytest.mark.parametrize(
    ("loader", "size"),
    [
        (DataLoader(records(11), batch_size=3), 11),
        (DataLoader(records(11), batch_size=3, shuffle=True), 11),
        (DataLoader(records(11), batch_size=3, sampler=SubsetRandomSampler([1, 5, 7])), 3),
        (DataLoader(Subset(records(11), [1, 2]), batch_size=3), 2),
        (DataLoader(Stream(), batch_size=3), None),
    ],
)
def test_size_of_the_data(loader, size):
    assert loaders.dataset_size(loader) == size


# --- Batches ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("batch_size", "physical", "sizes"),
    [
        (4, None, [4, 4, 2]),
        (4, 4, [4, 4, 2]),
        (4, 100, [4, 4, 2]),
        (4, 3, [3, 1, 3, 1, 2]),
        (10, 4, [4, 4, 2]),
        (3, 1, [1] * 10),
    ],
)
def test_batches_are_cut_and_nothing_is_lost(batch_size, physical, sizes):
    pieces = passed(DataLoader(records(), batch_size=batch_size), physical=physical)
    assert [len(y) for _, y in pieces] == sizes
    assert torch.equal(torch.cat([x for x, _ in pieces]), records().tensors[0])
    assert torch.equal(torch.cat([y for _, y in pieces]), records().tensors[1])


@pytest.mark.parametrize("physical", [None, 2, 3])
def test_tuple_inputs_are_cut_together(physical):
    x = torch.arange(10.0)
    items = Listed([((x[i], -x[i]), 10 * x[i]) for i in range(10)])
    pieces = passed(DataLoader(items, batch_size=4), physical=physical)
    assert all(isinstance(inputs, tuple | list) for inputs, _ in pieces)
    assert torch.equal(torch.cat([inputs[0] for inputs, _ in pieces]), x)
    assert torch.equal(torch.cat([inputs[1] for inputs, _ in pieces]), -x)
    assert torch.equal(torch.cat([y for _, y in pieces]), 10 * x)


@pytest.mark.parametrize("physical", [None, 2, 3])
def test_named_inputs_are_cut_together(physical):
    x = torch.arange(10.0)
    items = Listed([({"ids": torch.tensor(i), "mask": x[i]}, 10 * x[i]) for i in range(10)])
    pieces = passed(DataLoader(items, batch_size=4), physical=physical)
    assert all(inputs.keys() == {"ids", "mask"} for inputs, _ in pieces)
    assert torch.equal(torch.cat([inputs["ids"] for inputs, _ in pieces]), torch.arange(10))
    assert torch.equal(torch.cat([inputs["mask"] for inputs, _ in pieces]), x)
    assert torch.equal(torch.cat([y for _, y in pieces]), 10 * x)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_low_precision_inputs_are_widened(dtype):
    items = TensorDataset(torch.ones(4, 2, dtype=dtype), torch.ones(4))
    ((inputs, _),) = passed(DataLoader(items, batch_size=4), dtype=torch.float32)
    assert inputs.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.float64, torch.bool])
def test_other_inputs_keep_their_type(dtype):
    items = TensorDataset(torch.ones(4, 2, dtype=dtype), torch.ones(4))
    ((inputs, _),) = passed(DataLoader(items, batch_size=4), dtype=torch.float32)
    assert inputs.dtype == dtype


@pytest.mark.parametrize(
    ("value", "error"), [(0, ValueError), (-1, ValueError), (1.5, TypeError), (True, TypeError), ("4", TypeError)]
)
def test_bad_physical_batch_size(value, error):
    with pytest.raises(error, match=rf"max_physical_batch_size must be a positive integer, got {value!r}"):
        passed(DataLoader(records(), batch_size=4), physical=value)


def drop_first(items):
    return default_collate(items[1:])


def drop_one_value(items):
    return default_collate([item for item in items if float(item[0]) != 5.0])


def repeat_first(items):
    return default_collate([*items, items[0]])


@pytest.mark.parametrize("collate", [drop_first, drop_one_value, repeat_first])
def test_collate_functions_must_keep_every_record(collate):
    """The message must not say how many are missing: a filter's count is private."""
    loader = DataLoader(records(), batch_size=4, collate_fn=collate)
    with pytest.raises(
        ValueError, match=r"loader's collate function (fails on a record alone|does not give one)"
    ) as raised:
        passed(loader)
    assert not re.search(r"\d", str(raised.value))


@pytest.mark.parametrize("changed", [lambda items: items[1:], lambda items: [*items, items[0]]])
def test_a_pass_that_loses_or_repeats_a_record_is_noticed(changed, monkeypatch):
    """Whatever the reason."""
    monkeypatch.setattr(loaders.Alone, "__call__", lambda self, items: default_collate(changed(items)))
    with pytest.raises(ValueError, match="loader did not yield every record exactly once") as raised:
        passed(DataLoader(records(), batch_size=4))
    assert not re.search(r"\d", str(raised.value))


def test_an_empty_stream_is_refused():
    with pytest.raises(ValueError, match="loader is empty: it yielded no record"):
        passed(DataLoader(Stream(0), batch_size=4))


BAD_BATCHES = {
    "a tensor": (lambda items: torch.zeros(len(items), 2), "got Tensor; adapt the data set or the collate function"),
    "three items": (
        lambda items: [torch.zeros(len(items))] * 3,
        "got 3 items; adapt the data set or the collate function",
    ),
    "one item": (lambda items: (torch.zeros(len(items)),), "got 1 items; adapt the data set or the collate function"),
    "named, without labels": (
        lambda items: {"x": torch.zeros(len(items)), "y": torch.zeros(len(items))},
        "got dict; adapt the data set or the collate function",
    ),
    "a number": (lambda items: 3, "got int; adapt the data set or the collate function"),
    "target is a list": (
        lambda items: (torch.zeros(len(items)), [0] * len(items)),
        "pairs of tensors (input, target), got Tensor and list",
    ),
    "no tensor among the inputs": (
        lambda items: (["a"] * len(items), torch.zeros(len(items))),
        "pairs of tensors (input, target), got list and Tensor",
    ),
}


@pytest.mark.parametrize("name", BAD_BATCHES)
def test_batches_that_are_not_pairs(name):
    collate, reason = BAD_BATCHES[name]
    with pytest.raises(ValueError, match=re.escape(reason)) as raised:
        passed(DataLoader(records(), batch_size=4, collate_fn=collate))
    assert re.match(r"loader (must yield pairs|yields inputs and targets)", str(raised.value))


@pytest.mark.parametrize(
    ("inputs", "targets", "reason"),
    [
        (torch.zeros(3), torch.tensor(0.0), "pairs of tensors (input, target), got Tensor and Tensor"),
        (torch.zeros(4), torch.zeros(3), "inputs and targets whose first dimensions differ"),
        (torch.tensor(0.0), torch.zeros(3), "inputs and targets whose first dimensions differ"),
    ],
)
def test_pairs_whose_rows_are_no_records(inputs, targets, reason):
    with pytest.raises(ValueError, match=re.escape(reason)):
        loaders.split_batch((inputs, targets))


NOT_TENSORS = {
    "names": lambda items: ({"x": torch.zeros(len(items)), "names": ["a"] * len(items)}, torch.zeros(len(items))),
    "lengths": lambda items: ((torch.zeros(len(items)), [3] * len(items)), torch.zeros(len(items))),
}


@pytest.mark.parametrize("name", NOT_TENSORS)
def test_what_is_no_tensor_does_not_reach_the_model(name):
    """It would be given the whole list with every row: what it makes of it could depend on other records."""
    with pytest.raises(ValueError, match="loader gives the model a list beside the tensors, of which it is not known"):
        passed(DataLoader(records(), batch_size=4, collate_fn=NOT_TENSORS[name]))


def test_a_constant_beside_the_tensors_is_passed_on():
    def collate(items):
        return {"x": default_collate(items)[0], "scale": 2.0, "mode": "a", "extra": None}, default_collate(items)[1]

    pieces = passed(DataLoader(records(), batch_size=4, collate_fn=collate))
    assert all((x["scale"], x["mode"], x["extra"]) == (2.0, "a", None) for x, _ in pieces)


# --- A plain loader of the parts of another --------------------------------------------------------------------------


def first_column(loader):
    return torch.cat([batch[0] for batch in loader])[:, 0].tolist()


def test_options_are_kept_and_torchs_own_loader_iterates():
    generator = torch.Generator().manual_seed(3)
    loader = DataLoader(
        records(), batch_size=3, shuffle=True, generator=generator, num_workers=1, prefetch_factor=4, timeout=30,
        multiprocessing_context="fork", persistent_workers=True, worker_init_fn=abs, in_order=False,
    )  # fmt: skip
    plain = loaders.each_alone(loader)
    assert type(plain) is DataLoader
    for name in (
        *("batch_size", "generator", "num_workers", "prefetch_factor", "timeout", "in_order"),
        *("persistent_workers", "dataset"),
    ):
        assert getattr(plain, name) == getattr(loader, name), name
    assert plain.worker_init_fn.own is abs
    assert type(loaders.each_alone(OwnName(records(), 3))) is DataLoader


def test_the_order_is_the_loaders_own():
    def shuffled():
        return DataLoader(records(), batch_size=3, shuffle=True, generator=torch.Generator().manual_seed(3))

    assert first_column(loaders.each_alone(shuffled())) == first_column(shuffled()) != sorted(first_column(shuffled()))
    chosen = DataLoader(records(), batch_size=3, sampler=SubsetRandomSampler([7, 2, 5]))
    assert sorted(first_column(loaders.each_alone(chosen))) == [2, 5, 7]


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_data_set_that_grows_has_no_record_twice(shuffle):
    """torch's own shuffling asks for the length several times, and begins again where it has grown in between."""

    class Growing(Dataset):
        length = 10

        def __len__(self):
            self.length += 1
            return self.length - 1

        def __getitem__(self, index):
            return torch.tensor([float(index)]), torch.tensor([0.0])

    found = first_column(loaders.each_alone(DataLoader(Growing(), batch_size=3, shuffle=shuffle)))
    assert len(found) == len(set(found)) >= 10
    if shuffle:
        visited = list(RandomSampler(Growing()))
        assert len(visited) > len(set(visited))


def test_rows_of_tensors_are_cut_at_once():
    x, y = records().tensors
    loader = loaders.rows_loader(x, y, 4)
    assert loaders.each_alone(loader) is loader
    assert first_column(loader) == first_column(DataLoader(records(), batch_size=4))
    part = loaders.part_of(loader, rank=1, ranks=3)
    assert loaders.each_alone(part) is part
    assert first_column(part) == [1, 4, 7]


# --- Public data is not private --------------------------------------------------------------------------------------

OVERLAPPING = {
    "the same loader": lambda loader: loader,
    "the same data set": lambda loader: DataLoader(loader.dataset, batch_size=2),
    "a record of it": lambda loader: DataLoader(ConcatDataset([records(), Subset(loader.dataset, [3])]), batch_size=2),
    "the same tensors": lambda loader: DataLoader(TensorDataset(*loader.dataset.tensors), batch_size=2),
    "a sampler of it": lambda loader: DataLoader(loader.dataset, batch_size=2, sampler=SubsetRandomSampler([9])),
}


@pytest.mark.parametrize("name", OVERLAPPING)
def test_public_records_that_are_private_are_refused(name):
    loader = DataLoader(records(), batch_size=3)
    with pytest.raises(
        ValueError, match=r"public_loader names records of data_loader: .* no private record may be in it"
    ):
        loaders.check_public(OVERLAPPING[name](loader), loader, "data_loader")


def test_public_streams_that_are_private_are_refused():
    loader = DataLoader(STREAM, batch_size=3)
    with pytest.raises(ValueError, match="public_loader names records of loader"):
        loaders.check_public(DataLoader(ChainDataset([Stream(), STREAM]), batch_size=3), loader)
    loaders.check_public(DataLoader(Stream(), batch_size=3), loader)


def test_other_records_are_public():
    base = records()
    private, public = random_split(base, [7, 3])
    loader = DataLoader(private, batch_size=3)
    for other in (
        DataLoader(public, batch_size=3),
        DataLoader(base, batch_size=3, sampler=SubsetRandomSampler(list(public.indices))),
        DataLoader(records(), batch_size=3),
    ):
        assert loaders.check_public(other, loader) is other
    with pytest.raises(ValueError, match="public_loader has batch_size=None"):
        loaders.check_public(DataLoader(records(), batch_size=None), loader)


@pytest.mark.parametrize("pair", [tuple, list])
def test_pairs_of_either_kind(pair):
    x, y = torch.ones(3, 2), torch.zeros(3)
    inputs, targets = loaders.split_batch(pair([x, y]))
    assert inputs is x
    assert targets is y


def test_mappings_with_labels():
    """As Hugging Face's collators give them; the labels do not go to the model."""
    items = {"ids": torch.arange(6).view(3, 2), "mask": torch.ones(3, 2), "labels": torch.arange(3)}
    inputs, targets = loaders.split_batch(items)
    assert inputs.keys() == {"ids", "mask"}
    assert inputs["ids"] is items["ids"]
    assert targets is items["labels"]
    assert items.keys() == {"ids", "mask", "labels"}  # the user's batch is not changed


# --- Progress --------------------------------------------------------------------------------------------------------


def test_bar_counts_whole_batches_of_sized_data(capsys):
    """Records per second and the time left, for three batches of four where there are ten records."""
    passed(DataLoader(records(), batch_size=4), progress=True)
    shown = capsys.readouterr().err
    assert "loader:" in shown
    assert "/12.0 [" in shown
    assert "record/s" in shown
    assert "<" in shown


@pytest.mark.parametrize("progress", [None, False])
def test_no_bar_where_it_is_not_wanted(progress, capsys):
    passed(DataLoader(records(), batch_size=4), progress=progress)
    captured = capsys.readouterr()
    assert captured.err == captured.out == ""


def test_no_bar_for_data_without_a_size(capsys):
    """A bar would count private records."""
    passed(DataLoader(Stream(), batch_size=4), progress=True)
    assert capsys.readouterr().err == ""
