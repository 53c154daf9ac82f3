"""The private data on its way in: which loaders give every record exactly one visit, and how batches are cut.

The guarantee compares two data sets that differ in one record. It holds only if that record moves the sums by
one record's worth, so a loader that may repeat, drop or duplicate records is refused:

| loader | verdict | because |
|---|---|---|
| sequential, or shuffled without replacement | accepted | every record once |
| ``SubsetRandomSampler``, ``Subset`` with distinct indices | accepted | every chosen record once |
| ``drop_last=True`` (when a batch could be dropped) | refused | without one record, a dropped one comes back |
| with replacement, ``num_samples``, ``WeightedRandomSampler`` | refused | a record may count twice |
| Opacus's Poisson sampling (``DPDataLoader``) | refused | a record may be missing or come back |
| ``DistributedSampler`` with two or more replicas | refused | it pads by repeating or drops; ``part_of`` does neither |
| any other sampler | refused | what it visits is not known |
| iterable data set with two or more workers | refused | each worker may yield every record |
| ``batch_size=None`` | refused | what one record is would not be known |

Records may be augmented at random. Every pass draws this randomness afresh from the operating system, in the process and in
the loader's workers, so that it is no function of the script's seeds (``opacus_expm.randomness`` says why, what is
refreshed, and what remains with the user: a data set that seeds generators while it is read).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from opacus.utils.uniform_sampler import (
    DistributedUniformWithReplacementSampler,
    UniformWithReplacementSampler,
)
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler
from tqdm.auto import tqdm

from opacus_expm import _check
from opacus_expm.model import cast_inputs, take
from opacus_expm.randomness import FreshWorker, Generators

_KERNEL_ROWS = 16  # pieces are whole numbers of the blocks in which matrix kernels work
_WAY_OUT = "pass DataLoader(dataset, batch_size=...) with shuffle on or off"


def check_loader(loader: object, name: str = "loader") -> DataLoader[Any]:
    """A loader that visits every record exactly once, or an error that says why it may not.

    Raises:
        TypeError: not a ``DataLoader``.
        ValueError: a loader of the refused kinds in this module's table, or an empty one.
    """
    if not isinstance(loader, DataLoader):
        raise TypeError(f"{name} must be a torch.utils.data.DataLoader, got {type(loader).__name__}; {_WAY_OUT}")
    if loader.batch_size is None and loader.batch_sampler is None:
        raise ValueError(f"{name} has batch_size=None, so what one record is would not be known; {_WAY_OUT}")
    if isinstance(loader.dataset, IterableDataset):
        if loader.num_workers > 1:
            raise ValueError(
                f"{name} has an iterable data set and num_workers={loader.num_workers}: each worker may yield every "
                "record; use num_workers=0 or 1"
            )
        if loader.drop_last:
            raise ValueError(f"{name} has drop_last=True: removing a record would re-admit a dropped one; {_WAY_OUT}")
        return loader
    if len(loader.dataset) == 0:  # type: ignore[arg-type]
        raise ValueError(f"{name} is empty: its data set has no record")
    _check_distinct(loader.dataset, name)
    batches = loader.batch_sampler
    if isinstance(batches, UniformWithReplacementSampler | DistributedUniformWithReplacementSampler):
        raise ValueError(
            f"{name} uses Poisson sampling, which may skip or repeat records; pass the loader as it was before "
            "PrivacyEngine.make_private, or make_private(..., poisson_sampling=False)"
        )
    if type(batches) is not BatchSampler:
        raise ValueError(
            f"{name} has a batch_sampler of type {type(batches).__name__}, not known to visit "
            f"every record once; {_WAY_OUT}"
        )
    _check_sampler(batches.sampler, len(loader.dataset), name)  # type: ignore[arg-type]
    visited = len(batches.sampler)  # type: ignore[arg-type]
    if batches.drop_last and visited % batches.batch_size:
        raise ValueError(
            f"{name} has drop_last=True: removing one record would re-admit a dropped one, so that neighbouring data "
            f"sets differ in two; {_WAY_OUT} and drop_last=False"
        )
    return loader


def _check_distinct(dataset: Any, name: str) -> None:
    """Refuse a ``Subset`` that lists a record twice, at any depth."""
    while isinstance(dataset, Subset):
        if _repeats(dataset.indices, len(dataset.dataset)):  # type: ignore[arg-type]
            raise ValueError(f"{name} has a Subset with repeated indices: a record would count twice; drop repeats")
        dataset = dataset.dataset


def _repeats(indices: Any, size: int) -> bool:
    """Whether an index occurs twice, counted from either end."""
    places = [int(i) % size for i in indices]
    return len(set(places)) != len(places)


def _check_sampler(sampler: Any, size: int, name: str) -> None:
    """Refuse a sampler that may repeat or leave out a record of a data set of the given size."""
    if isinstance(sampler, WeightedRandomSampler):
        raise ValueError(f"{name} uses WeightedRandomSampler: a record may count twice or not at all; {_WAY_OUT}")
    if type(sampler) is RandomSampler and (sampler.replacement or sampler._num_samples is not None):
        raise ValueError(
            f"{name} uses RandomSampler with replacement or num_samples: a record may count twice or not at all; "
            f"{_WAY_OUT}"
        )
    if type(sampler) in (RandomSampler, SequentialSampler):
        if len(sampler) != size:
            raise ValueError(
                f"{name} has a sampler over something of another length than its data set, so it may not visit every record "
                f"once; {_WAY_OUT}"
            )
    elif type(sampler) is SubsetRandomSampler:
        if _repeats(sampler.indices, size):
            raise ValueError(
                f"{name} uses SubsetRandomSampler with repeated indices: a record would count twice; drop repeats"
            )
    elif type(sampler) is DistributedSampler:
        if sampler.num_replicas > 1:
            raise ValueError(
                f"{name} uses DistributedSampler with {sampler.num_replicas} replicas: this process would see a part of "
                "the data only, padded by repeated records or with some dropped; pass a loader over the whole data set, of "
                "which every rank then takes its own part"
            )
    else:
        raise ValueError(
            f"{name} uses a sampler of type {type(sampler).__name__}, which is not known to visit every record once; "
            f"{_WAY_OUT}"
        )


def dataset_size(loader: DataLoader[Any]) -> int | None:
    """Number of records that one pass visits, or None for an iterable data set."""
    if isinstance(loader.dataset, IterableDataset) or not isinstance(loader.batch_sampler, BatchSampler):
        return None
    return len(loader.batch_sampler.sampler)  # type: ignore[arg-type]


def part_of(
    loader: DataLoader[Any], *, rank: int = 0, ranks: int = 1, start: int = 0, name: str = "loader"
) -> DataLoader[Any]:
    """One rank's records of a checked loader: every record is on exactly one rank, none twice, none left out.

    Record i of the data set (or of a ``SubsetRandomSampler``'s indices) is on rank i mod ``ranks``: parts differ in size by
    one record at the most, nothing is padded or dropped, and a record that is appended moves no other. Records come in this
    order, shuffled or not before, because the order of a sum plays no part.

    Args:
        loader: over the whole data set, the same on every rank.
        rank: which part.
        ranks: how many parts.
        start: how many of the part's first records to leave out, because they were visited earlier.
        name: the argument's name, for messages.

    Raises:
        ValueError: an iterable data set, which cannot be divided, or fewer records than ranks.
    """
    indices = visited(loader)
    if indices is None:
        raise ValueError(
            f"{name} has an iterable data set, which cannot be divided between ranks or resumed: pass a data set with "
            "indices; or gather each part in a process of its own and merge the statistics (Statistics.merge)"
        )
    if len(indices) < ranks:
        raise ValueError(f"{name} has fewer records than there are ranks ({ranks}); use fewer ranks")
    batches = loader.batch_sampler
    assert isinstance(batches, BatchSampler)
    return DataLoader(
        Subset(loader.dataset, indices[rank::ranks][start:]),
        batch_size=batches.batch_size,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        generator=loader.generator,
        prefetch_factor=loader.prefetch_factor,
        persistent_workers=loader.persistent_workers,
    )


def visited(loader: DataLoader[Any]) -> Sequence[int] | None:
    """The indices that one pass visits, in the data set's order, or None for an iterable data set."""
    if dataset_size(loader) is None:
        return None
    sampler = loader.batch_sampler.sampler  # type: ignore[union-attr]
    if isinstance(sampler, SubsetRandomSampler):
        return [int(i) for i in sampler.indices]
    return range(len(loader.dataset))  # type: ignore[arg-type]


def with_fresh_workers(loader: DataLoader[Any]) -> DataLoader[Any]:
    """The same loader, whose workers draw fresh randomness; workers that it has started before are not among them.

    Nothing is changed in the loader itself, which goes on with its own workers.
    """
    if loader.num_workers == 0:
        return loader
    twin: DataLoader[Any] = object.__new__(type(loader))
    fresh = {"worker_init_fn": FreshWorker(loader.worker_init_fn, loader.collate_fn), "_iterator": None}
    twin.__dict__.update(vars(loader) | fresh)
    return twin


def freshly(loader: DataLoader[Any]) -> Iterator[Any]:
    """The loader's batches, each drawn with fresh randomness; what is done between them is none of it."""
    generators = Generators.of(loader)
    with generators.refreshed():
        stream = iter(loader)
    while True:
        with generators.refreshed():
            try:
                batch = next(stream)
            except StopIteration:
                return
        yield batch


def batch_size(loader: DataLoader[Any]) -> int | None:
    """Number of records in a full batch, or None where the loader does not say."""
    if loader.batch_size is None and isinstance(loader.batch_sampler, BatchSampler):
        return loader.batch_sampler.batch_size
    return loader.batch_size


class Pieces:
    """How many records the network sees at once: one public number, the same for every piece of a pass.

    Matrix kernels round differently for different batch sizes; were a record to fall into a batch of another size
    because another record left, its own rows could change (a ReLU on its kink even flips). So pieces are filled up to one
    size, a whole number of the blocks in which matrix kernels work.

    **Out of memory.** All pieces have one shape, so whether they fit is a fact about the machine, the model and the shape
    of a record, not about the values of the records. When they do not, the size is halved, from 16 to single records, and
    the pass starts again from its first record: no record is seen in two sizes, and the sums are those of a pass that had
    the smaller size from the beginning. Where the shape of a batch depends on its records (sequences padded to the longest
    one), so may the size, and with it the rounding of the other records: pad to a public length.

    Args:
        max_physical_batch_size: records at a time; None takes the loader's batches.
    """

    def __init__(self, max_physical_batch_size: int | None = None):
        if max_physical_batch_size is not None:
            _check.positive_int("max_physical_batch_size", max_physical_batch_size)
        self._largest = max_physical_batch_size
        self._smaller: int | None = None

    @property
    def halved(self) -> bool:
        """Whether memory ran out before."""
        return self._smaller is not None

    @property
    def step(self) -> int | None:
        """Records of a piece at the most; None leaves batches whole."""
        return self._smaller or self._largest

    def padded(self, loader: DataLoader[Any]) -> int | None:
        """Records, with copies, of every piece; None where the loader does not say how large its batches are."""
        size = self._largest or batch_size(loader)
        return self._smaller or (None if size is None else -(-size // _KERNEL_ROWS) * _KERNEL_ROWS)

    def halve(self, loader: DataLoader[Any]) -> bool:
        """Take half as many records at a time from now on; False where a single one was too large."""
        size = self.padded(loader)
        if size is None or size == 1:
            return False
        self._smaller = max(1, size // (2 * _KERNEL_ROWS) * _KERNEL_ROWS)
        return True


def split_batch(batch: Any, name: str = "loader") -> tuple[Any, Tensor]:
    """A batch as (inputs, targets): a pair, or a mapping with the targets under ``"labels"``, as Hugging Face has it.

    Raises:
        ValueError: the batch is not a pair with a target tensor whose first dimension is the batch.
    """
    if isinstance(batch, Mapping) and "labels" in batch:
        inputs, targets = {key: value for key, value in batch.items() if key != "labels"}, batch["labels"]
    elif isinstance(batch, Sequence) and len(batch) == 2:
        inputs, targets = batch
    else:
        found = f"{len(batch)} items" if isinstance(batch, Sequence) else type(batch).__name__
        raise ValueError(
            f"{name} must yield pairs (input, target), or mappings with 'labels', got {found}; adapt the data set or the "
            "collate function"
        )
    tensors = [t for t in pytree.tree_leaves(inputs) if isinstance(t, Tensor)]
    if not isinstance(targets, Tensor) or targets.dim() == 0 or not tensors:
        raise ValueError(
            f"{name} must yield pairs of tensors (input, target), got {type(inputs).__name__} and "
            f"{type(targets).__name__}; adapt the data set or the collate function"
        )
    if any(t.dim() == 0 or t.shape[0] != targets.shape[0] for t in tensors):
        raise ValueError(
            f"{name} yields inputs and targets whose first dimensions differ: they must be one row per record"
        )
    return inputs, targets


def batches(
    loader: DataLoader[Any],
    *,
    device: torch.device,
    dtype: torch.dtype,
    max_physical_batch_size: int | None,
    progress: bool | None,
    name: str = "loader",
) -> Iterator[tuple[Any, Tensor]]:
    """One pass over the loader as (inputs, targets) on the model's device, in pieces of limited size.

    Whoever goes through it does so in fresh randomness (``Generators.refreshed``); the loader's workers have their own.

    Args:
        loader: the data.
        device: the model's device.
        dtype: the statistics' floating type.
        max_physical_batch_size: largest number of records at a time; None leaves batches whole.
        progress: True or False shows or hides a bar, with records per second and the time left; None shows it on a terminal
            only.
        name: the argument's name, for messages.

    Raises:
        ValueError: a batch that is not a pair, an empty loader, or a number of records other than the sampler's
            (a collate function must not drop or repeat records). The message holds no count.
    """
    if max_physical_batch_size is not None:
        _check.positive_int("max_physical_batch_size", max_physical_batch_size)
    expected = dataset_size(loader)
    disable = None if progress is None else not progress
    seen = 0
    # The bar counts whole batches' worth of records: public where len(dataset) is, and no bar is shown for unsized data.
    full = batch_size(loader) or 1
    total = None if expected is None else len(loader) * full
    hidden = True if expected is None else disable
    with tqdm(desc=name, total=total, unit="record", unit_scale=True, disable=hidden, leave=False) as bar:
        for batch in with_fresh_workers(loader):
            inputs, targets = split_batch(batch, name)
            seen += targets.shape[0]
            step = max_physical_batch_size or max(targets.shape[0], 1)
            for start in range(0, targets.shape[0], step):
                piece = slice(start, start + step)
                yield cast_inputs(take(inputs, piece), device, dtype), targets[piece].to(device)
            bar.update(full)
    if seen == 0:
        raise ValueError(f"{name} is empty: it yielded no record")
    if expected is not None and seen != expected:
        raise ValueError(
            f"{name} did not yield every record exactly once: its collate function must keep all records of a batch"
        )
