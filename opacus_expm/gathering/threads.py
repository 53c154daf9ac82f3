"""Small work runs on one thread, and as few records at a time as stay in cache.

An operation on several threads ends when the last of them does. Where it takes microseconds and another process has one of
the cores, it waits there for milliseconds, until the system lets its thread run again: thousands of small operations then
take ten times as long. On one thread they lose nothing, because there is nothing to share out.

**Privacy:** how many threads and how many records at a time there are decides how sums are rounded, so both follow from
shapes and public sizes of batches.
"""

from __future__ import annotations

import copy
import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from opacus_expm.gathering.model import call, synthetic_batch

KERNEL_ROWS = 16  # records come in whole numbers of the blocks in which matrix kernels work
CACHE = 2**21  # elements that a core keeps at hand
_READ = 4  # times the parameters are the least elements to read them for
ENOUGH = 2**26  # products of a forward pass from which on several threads share it: a few milliseconds of one


@dataclass(frozen=True)
class Work:
    """What a forward pass takes, roughly; it follows from shapes.

    Attributes:
        products: for one record. A layer with a matrix has its numbers of parameters times positions, and others none.
        elements: what all layers together put out for one record.
        parameters: of these layers, which are read for any number of records.
    """

    products: float
    elements: int
    parameters: int

    def few(self, threads: int) -> int | None:
        """How many records at a time stay in the caches of so many cores; None is any number.

        What layers put out is written and read several times in a pass. Where it leaves the cache, or is new memory each
        time, a pass takes twice as long. Fewer records than are worth reading the parameters for would not pay, either.
        """
        if not self.elements:
            return None
        most = max(CACHE * threads, _READ * self.parameters)
        return max(1, most // self.elements // KERNEL_ROWS) * KERNEL_ROWS


def evenly(size: int, most: int) -> int:
    """The size of equal pieces of about ``most`` records, in whole blocks of matrix kernels; ``size`` for one piece."""
    count = math.ceil(size / most)
    return size if count == 1 else math.ceil(size / count / KERNEL_ROWS) * KERNEL_ROWS


@torch.no_grad()
def work_of(module: nn.Module, example: Any) -> Work:
    """The work of one record; of the example, a batch of one, only the shape is used.

    Infinite where the model does not run on a synthetic record.
    """
    products, elements, parameters = [0.0], [0], [0]

    def count(layer: nn.Module, args: Any, output: Any) -> None:
        weights = [p for p in layer.parameters(recurse=False) if p.dim() > 1]
        if weights and isinstance(output, Tensor) and not isinstance(layer, nn.Embedding):
            products.append(output.numel() * max(w[0].numel() for w in weights))
            parameters.append(sum(w.numel() for w in weights))
        if isinstance(output, Tensor) and not any(True for _ in layer.children()):
            elements.append(output.numel())

    handles = []
    try:
        for layer in module.modules():
            handles.append(layer.register_forward_hook(count))
        call(module, synthetic_batch(example, 1, seed=0))
    except Exception:  # whatever is wrong with the model is said by whoever runs it on records
        return Work(math.inf, 0, 0)
    finally:
        for handle in handles:
            handle.remove()
    return Work(sum(products), sum(elements), sum(parameters))


class Threads:
    """As many threads as one model's work is worth.

    Args:
        work: of a forward pass on one record; None as long as it is not known.
    """

    def __init__(self, work: Work | None = None):
        self._work = work
        self._records: int | None = 1

    @classmethod
    def of(cls, model: nn.Module, example: Any) -> Threads:
        """For a model that is going to be trained, which stays as it is; of the example only the shape is used."""
        return cls(replace(work_of(copy.deepcopy(model).eval(), example), elements=0))

    @contextmanager
    def shared(self, records: int | None) -> Iterator[None]:
        """The threads for so many records at a time inside, and afterwards, also after an error, those of before.

        None, for a number that is not public, is as many as there are.
        """
        self._records = records
        with _KEPT.entered():
            self._choose()
            yield

    def learn(self, work: Work) -> None:
        """Inside ``shared``: go on with the threads for a record that takes so much."""
        self._work = work
        self._choose()

    def few(self, records: int | None) -> int | None:
        """How many of so many records to take at a time, with the threads that there are; None is all of them."""
        most = None if self._work is None else self._work.few(_KEPT.most)
        return records if most is None or records is None else evenly(records, most)

    def _choose(self) -> None:
        """Set the number of threads."""
        records = self.few(self._records)
        work = 0.0 if self._work is None else math.inf if records is None else self._work.products * records
        wanted = 1 if work < ENOUGH else _KEPT.most
        if torch.get_num_threads() != wanted:
            torch.set_num_threads(wanted)


class _Kept:
    """The number of threads outside of everything that changes it, for whichever threads of Python are inside."""

    def __init__(self) -> None:
        self.most, self._inside, self._lock = 1, 0, threading.Lock()

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Whatever is set inside, the number is afterwards what it was."""
        with self._lock:
            before = torch.get_num_threads()
            if self._inside == 0:
                self.most = before
            self._inside += 1
        try:
            yield
        finally:
            with self._lock:
                self._inside -= 1
                torch.set_num_threads(before if self._inside else self.most)


_KEPT = _Kept()
