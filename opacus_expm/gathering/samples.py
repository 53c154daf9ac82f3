"""Poisson samples of the records of a loader."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch.utils.data import DataLoader, Subset

from opacus_expm.gathering import loaders
from opacus_expm.mechanism.choices import Source


def sampled(
    loader: DataLoader[Any], sample_rate: float, random: Source, *, whole: bool = False
) -> DataLoader[Any] | None:
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
