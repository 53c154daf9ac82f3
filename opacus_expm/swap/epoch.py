"""What one round of a training loop counts, and what the loop asks of its rounds.

**Privacy:** everything here is private data. It leaves through ``Rounds.draw`` alone, which charges before it draws.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn
from torch.utils.data import DataLoader

from opacus_expm._private import PrivateValues
from opacus_expm.accounting.admission import Admission
from opacus_expm.gathering import loaders
from opacus_expm.gathering.passes import Pass
from opacus_expm.gathering.randomness import freshly
from opacus_expm.gathering.statistics import Statistics
from opacus_expm.swap.losses import Ticket
from opacus_expm.swap.outputs import Outputs
from opacus_expm.swap.tensors import changed_since, same_records, with_versions

Loss = Callable[[Tensor, Tensor], Tensor]

UNCHANGED = (
    "Tensors must reach the module and the criterion with the values that data_loader gave them; put transformations into "
    "the data set, its collate function, the module or the criterion"
)


class Gathering(Protocol):
    """A round that is ready to begin."""

    def open(self) -> Pass:
        """A pass to which the loop adds a batch at a time."""


class Rounds(Protocol):
    """The rounds of a loop, which the engine has checked and admitted to the budget."""

    @property
    def count(self) -> int:
        """The number of rounds, T."""

    @property
    def admission(self) -> Admission | None:
        """What of the budget is reserved."""

    def begin(self, module: nn.Module, number: int) -> Gathering:
        """Begin a round at the weights of ``module``; rounds are numbered from 0."""

    def draw(self, statistics: Statistics, number: int) -> nn.Module:
        """Charge the ledger, then draw the next weights."""

    def end(self) -> None:
        """Release what is reserved of the budget: no further round is going to be drawn."""


@runtime_checkable
class Samples(Rounds, Protocol):
    """Rounds over Poisson samples: every sample is a round, and an epoch has several."""

    @property
    def longest(self) -> int:
        """The largest number of samples in an epoch."""

    def until(self, number: int) -> int:
        """The round before which the epoch ends in which round ``number`` is."""

    def sample(self, size: int) -> DataLoader[Any] | None:
        """All records of the next sample in one batch, or in pieces of that size where it is not 0, each collated alone.

        None for a sample without records; what comes first is charged.
        """

    def draw_empty(self, number: int) -> nn.Module:
        """The next weights after a sample without records, or one that the script has lost."""


@dataclass(frozen=True, eq=False, repr=False)
class _Call(PrivateValues):
    """A call of the module with the present batch: the inputs, and the tensors of inputs and outputs with versions."""

    inputs: Any
    held: list[tuple[Tensor, int]]
    outputs: list[tuple[Tensor, int]]

    def gave(self, outputs: Tensor) -> bool:
        """Whether these are the call's outputs, as they were given."""
        return any(same_records(outputs, t) for t, _ in self.outputs) and not changed_since(self.outputs)


class Epoch(PrivateValues):
    """What one round counts: the batch that the script has now, and the statistics of the batches that were counted.

    It is one iteration of the loader, or one sample.

    Attributes:
        number: how many batches the script was given.
        counted: how many of them were counted.
        last: whether the present batch is the last one.
        drawn: whether the round of this epoch was drawn.
        expected: how many records there are; None if that is not known.
        broken: why the epoch was broken off, None if it was not.
        gathered: the pass over the counted batches, None before the first.
        parameters: a fingerprint of the module's parameters at the first counted batch.
    """

    def __init__(self, expected: int | None = None, broken: str | None = None) -> None:
        self.number = 0
        self.counted = 0
        self.last = False
        self.drawn = False
        self.expected, self.broken = expected, broken
        self.gathered: Pass | None = None
        self.parameters: list[Any] = []
        self._tensors: list[tuple[Tensor, int]] = []
        self._calls: list[_Call] = []

    def give(self, tensors: list[tuple[Tensor, int]], last: bool) -> None:
        """Note that the script is given its next batch."""
        self.number, self.last = self.number + 1, last
        self._tensors, self._calls = tensors, []

    def forget(self) -> None:
        """Drop the present batch."""
        self._tensors, self._calls = [], []

    def break_off(self, reason: str) -> None:
        """Drop the statistics: the epoch does not count."""
        self.broken, self.gathered = reason, None

    def gave(self, tensor: object) -> bool:
        """Whether a tensor belongs to the present batch, as the same object and not only with the same values."""
        return any(tensor is t for t, _ in self._tensors)

    def unchanged(self, tensors: Iterable[Tensor]) -> bool:
        """Whether all the given tensors have the records of a tensor in the present batch; False if none is given."""
        if changed_since(self._tensors):
            return False
        found = [any(same_records(tensor, t) for t, _ in self._tensors) for tensor in tensors]
        return bool(found) and all(found)

    def remember_call(self, inputs: Any, outputs: list[Tensor]) -> None:
        """Note that the module was called with the present batch."""
        self._calls.append(_Call(inputs, with_versions(inputs), with_versions(outputs)))

    def ticket(self, outputs: Tensor, targets: Tensor) -> Ticket | str:
        """What a loss of these outputs and targets is built from, or the reason why it cannot be counted."""
        if not self._tensors:
            return "backward() without a batch from the returned data_loader."
        if not self._calls:
            return f"backward() for inputs that are not those of the batch from the returned data_loader. {UNCHANGED}."
        if isinstance(outputs, Outputs) and outputs.through is not None:
            return f"backward() for outputs that went through {outputs.through} before the criterion. {UNCHANGED}."
        calls = [c for c in self._calls if c.gave(outputs)]
        if not calls:
            return f"backward() for outputs that are not those of the returned module. {UNCHANGED}."
        if not self.unchanged([targets]):
            return f"backward() for targets that are not those of the batch from the returned data_loader. {UNCHANGED}."
        held = [*calls[-1].held, *self._tensors, *with_versions(targets)]
        return Ticket(self, self.number, calls[-1].inputs, targets, held)


def known_batches(loader: DataLoader[Any]) -> Iterator[tuple[Any, list[tuple[Tensor, int]], bool]]:
    """Every batch, its tensors with their versions, and whether it is the last one."""
    if loaders.dataset_size(loader) is not None:
        total = len(loader)
        for number, batch in enumerate(freshly(loader), start=1):
            yield batch, with_versions(batch), number == total
        return
    # An iterable data set does not say which batch is its last: one batch is taken ahead.
    held: tuple[Any, list[tuple[Tensor, int]]] | None = None
    for batch in freshly(loader):
        if held is not None:
            yield *held, False
        held = batch, with_versions(batch)
    if held is not None:
        yield *held, True
