"""Small work runs on one thread.

An operation on several threads ends when the last of them does. Where it takes microseconds and another process has one of
the cores, it waits there for milliseconds, until the system lets its thread run again: thousands of small operations then
take ten times as long. On one thread they lose nothing, because there is nothing to share out.

**Privacy:** how many threads there are decides how sums are rounded, so it follows from shapes and public sizes of batches.
"""

from __future__ import annotations

import copy
import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from opacus_expm.gathering.model import call, synthetic_batch

ENOUGH = 2**26  # products of a forward pass from which on several threads share it: a few milliseconds of one


@torch.no_grad()
def operations(module: nn.Module, example: Any) -> float:
    """Products in a forward pass on one record, roughly; of the example, a batch of one, only the shape is used.

    A layer with a matrix has its numbers of parameters times positions, and other layers nothing. Infinite where the model
    does not run on a synthetic record.
    """
    found = [0.0]

    def count(layer: nn.Module, args: Any, output: Any) -> None:
        weights = [p for p in layer.parameters(recurse=False) if p.dim() > 1]
        if weights and isinstance(output, Tensor) and not isinstance(layer, nn.Embedding):
            found.append(output.numel() * max(w[0].numel() for w in weights))

    handles = []
    try:
        for layer in module.modules():
            handles.append(layer.register_forward_hook(count))
        call(module, synthetic_batch(example, 1, seed=0))
    except Exception:  # whatever is wrong with the model is said by whoever runs it on records
        return math.inf
    finally:
        for handle in handles:
            handle.remove()
    return sum(found)


class Threads:
    """As many threads as one model's work is worth.

    Args:
        operations: of a forward pass on one record; none as long as they are not known.
    """

    def __init__(self, operations: float = 0.0):
        self._operations = operations
        self._records: int | None = 1

    @classmethod
    def of(cls, model: nn.Module, example: Any) -> Threads:
        """For a model that is going to be trained, which stays as it is; of the example only the shape is used."""
        return cls(operations(copy.deepcopy(model).eval(), example))

    @contextmanager
    def shared(self, records: int | None) -> Iterator[None]:
        """The threads for so many records at a time inside, and afterwards, also after an error, those of before.

        None, for a number that is not public, is as many as there are.
        """
        self._records = records
        with _KEPT.entered():
            self._choose()
            yield

    def learn(self, operations: float) -> None:
        """Inside ``shared``: go on with the threads for a record that takes so many."""
        self._operations = operations
        self._choose()

    def _choose(self) -> None:
        """Set the number of threads."""
        work = math.inf if self._records is None else self._operations * self._records
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
