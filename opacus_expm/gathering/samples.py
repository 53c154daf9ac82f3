"""Poisson samples of the records of a loader, which its workers read ahead.

If workers were started for every sample, that would take longer than most samples take to read, and nothing would be read
while a step is computed. So the workers of a loader are started once for all samples, and read the next ones while the
present one is in use, as those of a plain loader read the next batches.

**Privacy:** how many records a sample has, and which, is private. What a record draws in a worker comes from a stream that
nobody knows, whichever sample it is read for (``randomness``).
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, cast

import numpy as np
from torch.utils.data import DataLoader, Sampler, Subset

from opacus_expm._private import PrivateValues
from opacus_expm.gathering import loaders
from opacus_expm.mechanism.choices import Source

Sample = DataLoader[Any]


def sampled(loader: DataLoader[Any], sample_rate: float, random: Source, *, whole: bool = False) -> Sample | None:
    """The records of a Poisson sample: each record of a checked loader by itself, with this probability.

    Args:
        loader: over a data set with indices.
        sample_rate: q in (0, 1].
        random: whose numbers nobody else may know.
        whole: all records of the sample in one batch, instead of batches of the loader's size.

    Returns:
        A loader over the sample, or None where it is empty.

    **Privacy:** how many records there are, and which, is private.
    """
    indices = loaders.visited(loader)
    assert indices is not None
    taken = np.flatnonzero(random.random(len(indices)) < sample_rate) if sample_rate < 1 else np.arange(len(indices))
    if len(taken) == 0:
        return None
    part = Subset(loader.dataset, [indices[int(i)] for i in taken])
    return loaders.like(loader, part, None, collate_fn=loader.collate_fn, batch=len(taken) if whole else 0)


class Samples(PrivateValues):
    """One sample after the other, whose records are collated alone; workers read the next ones ahead.

    Args:
        loader: over all records, checked.
        draw: draws the next sample (``sampled``).
        name: of the loader, for messages.
        size: the largest number of records in a batch; 0 for the samples' own.
    """

    def __init__(self, loader: DataLoader[Any], draw: Callable[[], Sample | None], name: str, size: int = 0):
        self.size, self._loader, self._draw, self._name = size, loader, draw, name
        self._ahead = loader.num_workers * (loader.prefetch_factor or 0)  # batches
        self._drawn: deque[Sample | None] = deque()  # and not yet asked for
        self._queue = _Queue()
        self._stream: Iterator[Any] | None = None  # of the batches of all samples, one after the other
        self._present: Sample | None = None
        self._unread = 0  # batches of it

    def next(self, remaining: int) -> Sample | None:
        """The next sample of so many that will still be asked for; None where it has no records."""
        if not self._ahead:
            return self._cut(self._draw())
        if self._unread:  # of a sample that was left
            self.end()
        try:
            return self._next(remaining)
        except BaseException:  # an interrupt, too, must not leave samples and batches out of step
            self.end()
            raise

    def end(self) -> None:
        """End the workers; what they have read ahead would be read again."""
        self._stream, self._unread = None, 0

    def _next(self, remaining: int) -> Sample | None:
        """The next sample, once the workers have enough batches of those that follow."""
        while not self._drawn or (len(self._drawn) < remaining and self._following() < self._ahead):
            self._drawn.append(self._cut(self._draw()))
            self._queue.add(self._drawn[-1])
        sample = self._drawn.popleft()
        if sample is None:
            return None
        self._present, self._unread = sample, len(sample)
        return _ReadAhead(sample, self._batches(sample))

    def _following(self) -> int:
        """How many batches come after the next sample."""
        return sum(len(sample) for sample in itertools.islice(self._drawn, 1, None) if sample is not None)

    def _cut(self, sample: Sample | None) -> Sample | None:
        """A sample in batches as they are asked for."""
        return None if sample is None else loaders.each_alone(sample, self._name, self.size)

    def _batches(self, sample: Sample) -> Iterator[Any]:
        """The batches of the present sample. Workers start here, where the randomness is fresh."""
        if self._stream is None and self._present is sample:
            self._queue = _Queue()
            for one in (sample, *self._drawn):
                self._queue.add(one)
            plain = loaders.each_alone(self._loader, self._name)
            self._stream = iter(
                loaders.like(self._loader, plain.dataset, None, collate_fn=plain.collate_fn, batches=self._queue)
            )
        while self._unread and self._present is sample:
            try:
                assert self._stream is not None
                batch = next(self._stream)
                self._unread -= 1
            except BaseException:
                self.end()
                raise
            yield batch


class _Queue(Sampler[list[int]]):
    """Batches that no worker was given yet, as indices."""

    def __init__(self) -> None:
        self._batches: deque[list[int]] = deque()

    def add(self, sample: Sample | None) -> None:
        """Put the batches of a sample to the others."""
        if sample is not None:
            indices = cast(Subset[Any], sample.dataset).indices
            self._batches.extend([indices[i] for i in batch] for batch in sample.batch_sampler or ())

    def __iter__(self) -> Iterator[list[int]]:
        while self._batches:
            yield self._batches.popleft()


class _ReadAhead(DataLoader[Any]):
    """A sample whose batches were read ahead; whoever goes through it again has them read again.

    Args:
        sample: the plain loader.
        batches: of the sample.
    """

    def __init__(self, sample: Sample, batches: Iterator[Any]):
        self.__dict__.update(vars(sample))
        self._batches: Iterator[Any] | None = batches

    def __iter__(self) -> Any:
        batches, self._batches = self._batches, None
        return super().__iter__() if batches is None else batches
