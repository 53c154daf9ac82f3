"""Randomness of the records, fixed for an audit.

Where records are random themselves (augmentation, views, dropout in a functional call), the claim is about any fixed
randomness of the records that two neighbouring data sets share. Here both get the same randomness for these records.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from random import Random
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, Dataset

from opacus_expm.gathering import loaders
from opacus_expm.gathering.model import call, check_module, compute_dtype, outputs_of, tensor_digest, working_copy
from opacus_expm.gathering.randomness import Generators
from opacus_expm.gathering.views import Views


def is_random(model: nn.Module, loader: DataLoader[Any], views: Views | None) -> bool:
    """Whether the inputs, the outputs or a gradient of the same records differ between two passes."""
    module, part = working_copy(check_module(model)), loaders.part_of(loader)
    device, dtype = next(module.parameters()).device, compute_dtype(module)
    parameters = [p for p in module.parameters() if p.requires_grad]

    def seen() -> Iterator[str]:
        for inputs, targets in loaders.batches(
            part, device=device, dtype=dtype, max_physical_batch_size=None, progress=False
        ):
            for view in [inputs] if views is None else views(inputs):
                outputs = outputs_of(call(module, view))
                # Weights that no two records share, so that what is drawn for them does not cancel.
                weights = torch.linspace(1, 2, outputs.numel()).to(outputs).sqrt().view_as(outputs)
                gradient = torch.autograd.grad((weights * outputs).sum(), parameters, allow_unused=True)
                yield tensor_digest(*_tensors((view, targets, outputs, gradient)))

    with Generators.of(part, module, views).refreshed():
        return list(seen()) != list(seen())


def _tensors(tree: Any) -> list[Tensor]:
    """The tensors of a batch."""
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


class _OwnStreams(Dataset[Any]):
    """Records, each with randomness of its own.

    Whatever is drawn between reading a record and reading the next one follows from a key and the place of the record.

    Args:
        loader: the records.
        holders: objects beside the loader that may hold generators.
        key: from which the randomness follows.
    """

    def __init__(self, loader: DataLoader[Any], holders: Sequence[object], key: str):
        self._loader, self._generators, self._key = loader, Generators.of(loader, *holders), key
        self.order = list(loaders.visited(loader) or ())

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, place: int) -> Any:
        self._generators.reseed(Random(f"{self._key} {place}").randbytes)
        return self._loader.dataset[self.order[place]]

    def contents(self) -> Iterator[str]:
        """A digest of every record, read with the randomness of its place."""
        for place in range(len(self)):
            with self._generators.refreshed():
                found = tensor_digest(*_tensors(self._loader.collate_fn([self[place]])))
            yield found


def with_own_streams(
    loader: DataLoader[Any], neighbour: DataLoader[Any], *holders: object
) -> tuple[DataLoader[Any], DataLoader[Any]]:
    """Both loaders, with the same randomness for the records that they have in common.

    Records come one at a time, and those that both loaders have come first.
    """
    key = secrets.token_hex()
    both = [_OwnStreams(records, holders, key) for records in (loader, neighbour)]
    contents = zip(both[0].contents(), both[1].contents(), strict=False)
    first = next((place for place, (one, other) in enumerate(contents) if one != other), -1)
    longest = max(map(len, both))
    for records in both:
        if len(records) == longest:  # it has the record that makes the difference, or both have one
            records.order.append(records.order.pop(first))
    first_loader, second_loader = (
        DataLoader(records, batch_size=1, collate_fn=original.collate_fn)
        for records, original in zip(both, (loader, neighbour), strict=True)
    )
    return first_loader, second_loader
