"""Which records a tree of data sets names, against a slow twin that lists them one by one."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import ChainDataset, ConcatDataset, Dataset, IterableDataset, Subset, TensorDataset, random_split

from opacus_expm.gathering import records


class Numbers(Dataset):
    """A data set of which only the length matters."""

    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        raise AssertionError("a record was read")


class Stream(IterableDataset):
    def __iter__(self):
        raise AssertionError("a record was read")


LEAVES = [Numbers(3), Numbers(5), Numbers(1)]


def subset_of(dataset):
    indices = st.lists(st.integers(-len(dataset), len(dataset) - 1), min_size=1, max_size=6)
    return indices.map(lambda chosen: Subset(dataset, chosen))


TREES = st.recursive(
    st.sampled_from(LEAVES),
    lambda inner: st.one_of(st.lists(inner, min_size=1, max_size=3).map(ConcatDataset), inner.flatmap(subset_of)),
    max_leaves=5,
)


def listed(dataset):
    """Pairs of a data set and an index, in order, as ``dataset[i]`` would come to them."""
    if isinstance(dataset, Subset):
        inner = listed(dataset.dataset)
        return [inner[i] for i in dataset.indices]
    if isinstance(dataset, ConcatDataset):
        return [pair for part in dataset.datasets for pair in listed(part)]
    return [(id(dataset), i) for i in range(len(dataset))]


def whole(dataset):
    return range(len(dataset))


@given(TREES)
@settings(max_examples=80, deadline=None)
def test_repeats_are_those_of_a_list_of_all_records(tree):
    pairs = listed(tree)
    assert records.named_twice(tree, whole(tree)) == (len(set(pairs)) < len(pairs))


@given(TREES, st.data())
@settings(max_examples=60, deadline=None)
def test_only_visited_records_count(tree, data):
    visited = data.draw(st.lists(st.integers(0, len(tree) - 1), max_size=6))
    chosen = [listed(tree)[i] for i in visited]
    assert records.named_twice(tree, visited) == (len(set(chosen)) < len(chosen))


@given(TREES, TREES)
@settings(max_examples=80, deadline=None)
def test_common_records_are_those_of_both_lists(one, other):
    expected = bool(set(listed(one)) & set(listed(other)))
    assert records.shared(one, whole(one), other, whole(other)) == expected
    assert records.shared(other, whole(other), one, whole(one)) == expected


D = Numbers(6)
TWICE = {
    "the same data set": lambda: ConcatDataset([D, D]),
    "added to itself": lambda: D + D,
    "nested": lambda: ConcatDataset([Numbers(2), ConcatDataset([D, Subset(D, [5])])]),
    "a subset of it": lambda: Subset(ConcatDataset([D, D]), [0, 6]),
    "counted from the end": lambda: Subset(ConcatDataset([D, D]), [0, -6]),
    "two overlapping subsets": lambda: ConcatDataset([Subset(D, [0, 1]), Subset(D, torch.tensor([1, 2]))]),
    "the same tensors": lambda: ConcatDataset([TensorDataset(*TENSORS), TensorDataset(*TENSORS)]),
    "an index from either end": lambda: Subset(D, [0, -6]),
    "a subclass of Subset": lambda: Own(D, [1, 1]),
}
ONCE = {
    "other data sets": lambda: ConcatDataset([Numbers(3), Numbers(3)]),
    "random_split": lambda: ConcatDataset(random_split(Numbers(10), [7, 3])),
    "disjoint subsets": lambda: ConcatDataset([Subset(D, range(3)), Subset(D, np.arange(3, 6))]),
    "one half of two": lambda: Subset(ConcatDataset([D, D]), range(6)),
    "each record from another half": lambda: Subset(ConcatDataset([D, D]), [0, 7, 2, 9, 4, 11]),
    "equal values": lambda: ConcatDataset([TensorDataset(torch.zeros(3, 1)), TensorDataset(torch.zeros(3, 1))]),
    "an empty part": lambda: ConcatDataset([D, Subset(D, []), Numbers(0)]),
}
TENSORS = torch.zeros(3, 1), torch.zeros(3)


class Own(Subset):
    """A subset of the user's own kind."""


@pytest.mark.parametrize("name", TWICE)
def test_named_twice(name):
    tree = TWICE[name]()
    assert records.named_twice(tree, whole(tree))


@pytest.mark.parametrize("name", ONCE)
def test_named_once(name):
    tree = ONCE[name]()
    assert not records.named_twice(tree, whole(tree))


def test_streams():
    one, other = Stream(), Stream()
    assert records.named_twice(ChainDataset([one, one]), None)
    assert records.named_twice(ChainDataset([ChainDataset([one, other]), one]), None)
    assert not records.named_twice(ChainDataset([one, other]), None)
    assert not records.named_twice(one, None)
    assert records.shared(one, None, ChainDataset([other, one]), None)
    assert not records.shared(one, None, other, None)
    assert not records.shared(one, None, D, whole(D))
    generated = (stream for stream in (one, one))
    assert not records.named_twice(ChainDataset(generated), None)  # cannot be seen
    assert next(generated) is one  # and must not be used up


def test_large_data_sets_are_not_listed():
    """A part of a data set costs as much as the part."""
    huge = Numbers(10**12)
    assert not records.named_twice(huge, range(10**12))
    assert records.named_twice(Subset(huge, [10**12 - 1, -1]), range(2))
    assert not records.named_twice(ConcatDataset([Subset(huge, [5]), Subset(huge, [6])]), range(2))
    assert not records.shared(huge, range(10**12), Numbers(10**12), range(10**12))


def test_many_records_in_parts():
    base = Numbers(100_000)
    parts = ConcatDataset([Subset(base, range(i, 100_000, 100)) for i in range(100)])
    assert not records.named_twice(parts, whole(parts))
    assert records.named_twice(ConcatDataset([parts, Subset(base, [77])]), range(100_001))


def test_indices_that_are_no_integers_are_named_without_their_value():
    with pytest.raises(TypeError, match="a data set has an index of type str; use integers") as raised:
        records.named_twice(Subset(D, ["Jane Doe"]), range(1))
    assert "Jane" not in str(raised.value)
