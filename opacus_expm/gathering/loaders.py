"""Which loaders visit every private record exactly once, and how their batches are cut into pieces.

One record may move the sums by one record's worth only, so a loader that may repeat or drop records is refused:

| loader | verdict | because |
|---|---|---|
| sequential, or shuffled without replacement | accepted | every record once |
| ``SubsetRandomSampler``, ``Subset``, ``ConcatDataset`` that name a record once | accepted | every chosen record once |
| a ``Subset``, ``ConcatDataset`` or ``ChainDataset`` that names a record twice | refused | it would count twice |
| ``drop_last=True`` (when a batch could be dropped) | refused | without one record, a dropped one comes back |
| with replacement, ``num_samples``, ``WeightedRandomSampler`` | refused | a record may count twice |
| Opacus's Poisson sampling (``DPDataLoader``) | refused | a record may be missing or come back |
| ``DistributedSampler`` with two or more replicas | refused | it pads by repeating or drops; ``part_of`` does neither |
| any other sampler | refused | what it visits is not known |
| a ``DataLoader`` subclass that iterates in its own way | refused | what it yields is not known |
| iterable data set with two or more workers | refused | each worker may yield every record |
| ``batch_size=None`` | refused | what one record is would not be known |
| a collate function that works on whole batches | refused | a record's row depends on others (see ``collating``) |
| ``public_loader`` with a record of the private loader | refused | what is learnt there is not charged |

What is accepted is not iterated itself: ``each_alone`` makes a plain loader of its parts, which fetches and collates one
record at a time. So neither a ``__getitems__`` nor a collate function is ever shown two private records at once, and a data
set whose length changes while it is read has no record twice.

Records may be augmented at random, with randomness that is fresh in every pass (``opacus_expm.gathering.randomness``).

**What cannot be seen.** Two data set objects that read one file or hold equal records, each of which counts. A data set
whose records depend on what was read before, or on each other. What a wrapper of the user's own names (see ``records``).
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
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    StackDataset,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from opacus_expm import _check
from opacus_expm._bars import bar
from opacus_expm.gathering import records
from opacus_expm.gathering.collating import PLAIN, Alone
from opacus_expm.gathering.model import cast_inputs, take
from opacus_expm.gathering.randomness import FreshWorker
from opacus_expm.gathering.threads import KERNEL_ROWS

_WAY_OUT = "pass DataLoader(dataset, batch_size=...) with shuffle on or off"
_OPTIONS = (
    "num_workers", "pin_memory", "timeout", "multiprocessing_context", "generator", "prefetch_factor", "persistent_workers",
)  # fmt: skip
_MAGIC = {"__iter__", "__getattr__", "__getattribute__"}  # of a loader; how it is made or printed plays no part


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
    batches = loader.batch_sampler
    if isinstance(batches, UniformWithReplacementSampler | DistributedUniformWithReplacementSampler):
        raise ValueError(
            f"{name} uses Poisson sampling, which may skip or repeat records; pass the loader as it was before "
            "PrivacyEngine.make_private, or make_private(..., poisson_sampling=False)"
        )
    own = _own_iteration(loader)
    if own:
        raise ValueError(
            f"{name} is a {type(loader).__name__} with its own {', '.join(own)}, so it is not known to yield every record "
            f"once; {_WAY_OUT}, and put what it does to a record into the data set"
        )
    if isinstance(loader.dataset, IterableDataset):
        if loader.num_workers > 1:
            raise ValueError(
                f"{name} has an iterable data set and num_workers={loader.num_workers}: each worker may yield every "
                "record; use num_workers=0 or 1"
            )
        if loader.drop_last:
            raise ValueError(f"{name} has drop_last=True: removing a record would re-admit a dropped one; {_WAY_OUT}")
        _check_distinct(loader, name)
        return loader
    if len(loader.dataset) == 0:  # type: ignore[arg-type]
        raise ValueError(f"{name} is empty: its data set has no record")
    if type(batches) is not BatchSampler:
        raise ValueError(
            f"{name} has a batch_sampler of type {type(batches).__name__}, not known to visit "
            f"every record once; {_WAY_OUT}"
        )
    _check_sampler(batches.sampler, len(loader.dataset), name)  # type: ignore[arg-type]
    _check_distinct(loader, name)
    if batches.drop_last and len(batches.sampler) % batches.batch_size:  # type: ignore[arg-type]
        raise ValueError(
            f"{name} has drop_last=True: removing one record would re-admit a dropped one, so that neighbouring data "
            f"sets differ in two; {_WAY_OUT} and drop_last=False"
        )
    return loader


def check_public(public_loader: object, loader: DataLoader[Any], name: str = "loader") -> DataLoader[Any]:
    """A loader that ``check_loader`` accepts and that has no record in common with the private one, or an error.

    Raises:
        TypeError, ValueError: as ``check_loader``, or because a record is in both.
    """
    public = check_loader(public_loader, "public_loader")
    if records.shared(public.dataset, visited(public), loader.dataset, visited(loader)):
        raise ValueError(
            f"public_loader names records of {name}: what is measured on public data is neither clipped nor charged, so no "
            "private record may be in it; pass other data, or leave public_loader out"
        )
    return public


def _own_iteration(loader: DataLoader[Any]) -> list[str]:
    """What a subclass of torch's loader, or an attribute of this one, puts in the place of torch's own."""
    plain: Any = DataLoader([0])  # type: ignore[arg-type]
    torchs = {name for name in {*vars(DataLoader), *vars(plain)} if not name.startswith("__")} | _MAGIC
    subclasses = [c for c in type(loader).__mro__ if c not in DataLoader.__mro__]
    defined = {name for c in subclasses for name in vars(c)} & torchs
    shadowed = {name for name in vars(loader) if callable(vars(DataLoader).get(name))}
    return sorted(defined | shadowed)


def _check_distinct(loader: DataLoader[Any], name: str) -> None:
    """Refuse a data set that names a record twice, at any depth."""
    if records.named_twice(loader.dataset, visited(loader)):
        raise ValueError(
            f"{name} names a record twice, by repeated indices of a Subset or by a data set that comes twice in a "
            "ConcatDataset or ChainDataset: it would count twice; name every record once"
        )


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
        if records.repeat(sampler.indices, size):
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
    return like(loader, Subset(loader.dataset, indices[rank::ranks][start:]), None, collate_fn=loader.collate_fn)


def each_alone(loader: DataLoader[Any], name: str = "loader", batch: int = 0) -> DataLoader[Any]:
    """A plain loader over the records of a checked one, whose rows depend on their own record alone.

    It is torch's own, whatever the loader's class; it visits a fixed range of indices, even if the data set's length grows;
    it fetches and collates one record at a time (``collating.Alone``). Its workers end with it; ``batch`` is as in ``like``.
    """
    # A loader of one whole batch is that of a training loop, and its batch came out of a loader like the one made here.
    if loader.batch_sampler is None or _whole_batches(loader) or isinstance(loader.collate_fn, Alone):
        return loader
    collate = Alone(loader.collate_fn, name, several=batch_size(loader) != 1)
    if isinstance(loader.dataset, IterableDataset):
        return like(loader, loader.dataset, None, collate_fn=collate, batch=batch)
    assert isinstance(loader.batch_sampler, BatchSampler)
    sampler = loader.batch_sampler.sampler
    size = len(loader.dataset)  # type: ignore[arg-type]
    order: Sampler[int] = SequentialSampler(range(size))
    if type(sampler) is RandomSampler:
        order = RandomSampler(range(size), generator=sampler.generator)
    elif type(sampler) is SubsetRandomSampler:
        order = SubsetRandomSampler([int(i) for i in sampler.indices], generator=sampler.generator)
    dataset = _OneAtATime(loader.dataset) if _fetches_batches(loader.dataset) else loader.dataset
    return like(loader, dataset, order, collate_fn=collate, batch=batch)


def like(
    loader: DataLoader[Any],
    dataset: Dataset[Any],
    order: Sampler[int] | None,
    collate_fn: Any,
    batch: int = 0,
    batches: Sampler[list[int]] | None = None,
) -> DataLoader[Any]:
    """A plain loader with the options of another, and workers with fresh randomness; ``batches`` replaces order and size."""
    cut: dict[str, Any] = {"sampler": order, "batch_size": batch or batch_size(loader), "in_order": loader.in_order}
    return DataLoader(
        dataset,
        collate_fn=collate_fn,
        worker_init_fn=FreshWorker(loader.worker_init_fn, collate_fn) if loader.num_workers else None,
        **(cut if batches is None else {"batch_sampler": batches}),
        **{name: getattr(loader, name) for name in _OPTIONS},
    )


class _OneAtATime(Dataset[Any]):
    """A data set that could fetch several records together, but is asked for one at a time."""

    def __init__(self, dataset: Any):
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:
        found = self._dataset.__getitems__([index])
        if not isinstance(found, list) or len(found) != 1:
            raise ValueError(
                f"{type(self._dataset).__name__}.__getitems__ must give a list with one record for each index; or leave it "
                "out, and give single records by __getitem__"
            )
        return found[0]


def _fetches_batches(dataset: Any) -> bool:
    """Whether code that is not torch's is given the indices of several records at once."""
    if type(dataset) is Subset:
        return _fetches_batches(dataset.dataset)
    if type(dataset) is StackDataset:
        parts = dataset.datasets.values() if isinstance(dataset.datasets, dict) else dataset.datasets
        return any(map(_fetches_batches, parts))
    return callable(getattr(dataset, "__getitems__", None))


class Rows(Dataset[Any]):
    """Two tensors, from which ``rows_loader`` takes a batch at once by its indices: empty ones included."""

    def __init__(self, x: Tensor, y: Tensor):
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index], self.y[index]

    def __getitems__(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        index = torch.tensor(indices, dtype=torch.long)
        return self.x[index], self.y[index]


def as_it_is(batch: Any) -> Any:
    """A collate function that changes nothing, for data sets that give whole batches."""
    return batch


def rows_loader(x: Tensor, y: Tensor, batch_size: int) -> DataLoader[Any]:
    """Batches in order, without the cost of putting them together record by record."""
    return DataLoader(Rows(x, y), batch_size=batch_size, collate_fn=as_it_is)


def _whole_batches(loader: DataLoader[Any]) -> bool:
    """Whether batches are rows of tensors, cut by indices and nothing else."""
    dataset: Any = loader.dataset
    while type(dataset) is Subset:
        dataset = dataset.dataset
    return type(dataset) is Rows and loader.collate_fn is as_it_is


def visited(loader: DataLoader[Any]) -> Sequence[int] | None:
    """The indices that one pass visits, in the data set's order, or None for an iterable data set."""
    if dataset_size(loader) is None:
        return None
    sampler = loader.batch_sampler.sampler  # type: ignore[union-attr]
    if isinstance(sampler, SubsetRandomSampler):
        return [int(i) for i in sampler.indices]
    return range(len(loader.dataset))  # type: ignore[arg-type]


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
    the smaller size from the beginning. Where records of several shapes come in batches of
    one, the size may depend on the largest of them, and with it the rounding of the others: pad to a public length.

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
        """Whether the size was halved because memory ran out."""
        return self._smaller is not None

    @property
    def step(self) -> int | None:
        """The largest number of records in a piece; None leaves batches whole."""
        return self._smaller or self._largest

    def padded(self, loader: DataLoader[Any] | None) -> int | None:
        """To how many records every piece is filled up; None where the loader does not say how large its batches are."""
        size = self._largest or (None if loader is None else batch_size(loader))
        return self._smaller or (None if size is None else -(-size // KERNEL_ROWS) * KERNEL_ROWS)

    def halve(self, loader: DataLoader[Any] | None) -> bool:
        """Take half as many records at a time from now on; False where a single one was too large."""
        size = self.padded(loader)
        if size is None or size == 1:
            return False
        self._smaller = max(1, size // (2 * KERNEL_ROWS) * KERNEL_ROWS)
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


def _check_constants(inputs: Any, name: str) -> None:
    """Refuse what is no tensor and not the same for all records: the model would be given it whole, beside single rows."""

    def without_tensors(part: Any) -> bool:
        return isinstance(part, list | tuple) and not any(isinstance(t, Tensor) for t in pytree.tree_leaves(part))

    for leaf in pytree.tree_leaves(inputs, is_leaf=without_tensors):
        if not isinstance(leaf, (Tensor, *PLAIN)):
            raise ValueError(
                f"{name} gives the model a {type(leaf).__name__} beside the tensors, of which it is not known what belongs "
                "to which record; leave it out, or make it a tensor with one row for each record"
            )


def pieces_of(
    inputs: Any, targets: Tensor, step: int | None, device: torch.device, dtype: torch.dtype
) -> Iterator[tuple[Any, Tensor]]:
    """A batch on the model's device, in pieces of at most ``step`` records; None leaves it whole."""
    step = step or max(targets.shape[0], 1)
    for start in range(0, targets.shape[0], step):
        piece = slice(start, start + step)
        yield cast_inputs(take(inputs, piece), device, dtype), targets[piece].to(device)


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
            and in a notebook.
        name: the argument's name, for messages.

    Raises:
        ValueError: a collate function that works on whole batches, a batch that is not a pair of tensors and constants, an
            empty loader, or a number of records other than the sampler's. The message holds no count.
    """
    if max_physical_batch_size is not None:
        _check.positive_int("max_physical_batch_size", max_physical_batch_size)
    plain = each_alone(loader, name)
    expected = dataset_size(plain)
    seen = 0
    # The bar counts whole batches' worth of records: public where len(dataset) is, and no bar is shown for unsized data.
    full = batch_size(loader) or 1
    total = None if expected is None else len(plain) * full
    shown = False if expected is None else progress
    with bar(shown, desc=name, total=total, unit="record", unit_scale=True, leave=False) as counted:
        for batch in plain:
            inputs, targets = split_batch(batch, name)
            if isinstance(plain.collate_fn, Alone):
                _check_constants(inputs, name)
            seen += targets.shape[0]
            yield from pieces_of(inputs, targets, max_physical_batch_size, device, dtype)
            counted.update(full)
    if seen == 0:
        raise ValueError(f"{name} is empty: it yielded no record")
    if expected is not None and seen != expected:
        raise ValueError(
            f"{name} did not yield every record exactly once: its data set and collate function must keep all records"
        )
