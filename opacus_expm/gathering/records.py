"""Which records a data set names: pairs of a data set and an index, under any tree of torch's wrappers.

A record that is reached by two paths is one record: ``ConcatDataset([d, d])`` names each record of d twice, and a
``Subset`` of it with the indices 0 and len(d) names the first one twice. ``Subset``, ``ConcatDataset`` and ``ChainDataset``
are followed down to the data sets that they are made of. Everything else names its own records. Two ``TensorDataset``
objects with the same tensor objects are one data set.

Equal values do not make two records one, because two people may have the same. That two objects read one file cannot be
seen.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from torch.utils.data import ChainDataset, ConcatDataset, Subset, TensorDataset

Places = npt.NDArray[np.int64]


def places(indices: Any, size: int) -> Places:
    """Indices into a data set of this size, counted from its beginning.

    Raises:
        TypeError: an index that is not an integer.
    """
    is_range = isinstance(indices, range)
    found = np.arange(indices.start, indices.stop, indices.step) if is_range else np.asarray(indices)
    if found.dtype.kind not in "iu":
        found = np.array([_integer(i) for i in indices], dtype=np.int64)
    return found.astype(np.int64) % max(size, 1)


def _integer(index: Any) -> int:
    """The index as an integer; an error does not quote its value."""
    try:
        return int(index)
    except (TypeError, ValueError):
        raise TypeError(f"a data set has an index of type {type(index).__name__}; use integers") from None


def repeat(indices: Any, size: int) -> bool:
    """Whether an index occurs twice, counted from either end."""
    return _any_twice(places(indices, size))


def named_twice(dataset: Any, visited: Sequence[int] | None) -> bool:
    """Whether a data set names a record twice.

    Args:
        dataset: any.
        visited: the indices that a pass visits; None for an iterable data set.
    """
    if visited is None:
        parts = _parts(dataset)
        return len(set(parts)) != len(parts)
    if isinstance(visited, range) and not isinstance(dataset, Subset | ConcatDataset):
        return False
    return _any_twice(_numbers(dataset, places(visited, len(dataset)), {}))


def shared(dataset: Any, visited: Sequence[int] | None, other: Any, other_visited: Sequence[int] | None) -> bool:
    """Whether two data sets name a record in common; arguments as in ``named_twice``."""
    if not set(_parts(dataset)) & set(_parts(other)):
        return False
    if visited is None or other_visited is None:
        return True
    starts: dict[Hashable, int] = {}
    mine = _numbers(dataset, places(visited, len(dataset)), starts)
    theirs = _numbers(other, places(other_visited, len(other)), starts)
    return len(np.intersect1d(mine, theirs)) > 0


def _any_twice(numbers: Places) -> bool:
    return len(np.unique(numbers)) != len(numbers)


def _key(dataset: Any) -> Hashable:
    """A key that is equal for data sets with the same records."""
    return tuple(map(id, dataset.tensors)) if type(dataset) is TensorDataset else id(dataset)


def _parts(dataset: Any) -> list[Hashable]:
    """The keys of the data sets that a tree is made of, repeated where one comes several times."""
    if isinstance(dataset, Subset):
        return _parts(dataset.dataset)
    if isinstance(dataset, ConcatDataset) or (
        isinstance(dataset, ChainDataset) and isinstance(dataset.datasets, list | tuple)  # not a generator, read once
    ):
        return [key for part in dataset.datasets for key in _parts(part)]
    return [_key(dataset)]


def _numbers(dataset: Any, at: Places, starts: dict[Hashable, int]) -> Places:
    """A number for each record at these places, in any order: the same for the same record. ``starts`` are the parts'."""
    if isinstance(dataset, Subset):
        inside: Any = dataset.dataset
        return _numbers(inside, places(dataset.indices, len(inside))[at], starts)
    if isinstance(dataset, ConcatDataset):
        at, begins = np.sort(at), [0, *dataset.cumulative_sizes[:-1]]
        pieces = np.split(at, np.searchsorted(at, begins[1:]))
        found = zip(dataset.datasets, pieces, begins, strict=True)
        return np.concatenate([_numbers(part, piece - begin, starts) for part, piece, begin in found])
    return at + starts.setdefault(_key(dataset), len(starts) << 40)
