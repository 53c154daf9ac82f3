"""Opacus's ``BatchMemoryManager``: loaders of a loop cut their own batches, because only they know the samples.

The manager makes a new loader of the old one's parts, which would read other records than the loop's. It does so in a
function of its module, which is replaced once a loop is made: a loader that can give its batches in pieces is asked for
them, and every other one is wrapped as before.

**Privacy:** nothing here sees a record.
"""

from __future__ import annotations

import functools
from typing import Any

from opacus.utils import batch_memory_manager
from torch.utils.data import DataLoader


def serve_memory_manager() -> None:
    """Have loaders with a method ``in_pieces`` asked for their pieces, from the first call on."""
    wrap = batch_memory_manager.wrap_data_loader
    if getattr(wrap, "asks_for_pieces", False):
        return

    @functools.wraps(wrap)
    def wrap_data_loader(*, data_loader: DataLoader[Any], max_batch_size: int, optimizer: Any) -> Any:
        if hasattr(data_loader, "in_pieces"):
            return data_loader.in_pieces(max_batch_size)
        return wrap(data_loader=data_loader, max_batch_size=max_batch_size, optimizer=optimizer)

    vars(wrap_data_loader)["asks_for_pieces"] = True
    batch_memory_manager.wrap_data_loader = wrap_data_loader
