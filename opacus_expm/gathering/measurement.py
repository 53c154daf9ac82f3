"""What a pass computes of each record, and how."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader

from opacus_expm import _check
from opacus_expm.gathering import loaders
from opacus_expm.gathering.ranks import described
from opacus_expm.gathering.rows import GradSampling
from opacus_expm.gathering.statistics import settings_digest
from opacus_expm.gathering.views import Views, check_views
from opacus_expm.subspaces import Subspace


@dataclass(frozen=True, eq=False)
class Measurement:
    """What a pass computes of each record, and how; public, and checked once.

    Attributes:
        subspace: recipe of the map A.
        proj_dim: k, or None for the full space.
        criterion: the loss, or None to infer it.
        grad_sampling: how rows are found.
        views: of each record, whose mean is taken (see ``gathering.views``).
        nominal_size: N, or None for the data set's size.
        max_physical_batch_size: records at a time; None takes the loader's batches.
        progress: show a bar; None shows it on a terminal and in a notebook.
    """

    subspace: Subspace
    proj_dim: int | None
    criterion: Callable[[Tensor, Tensor], Tensor] | None = None
    grad_sampling: GradSampling = field(default_factory=GradSampling)
    views: Views | None = None
    nominal_size: int | None = None
    max_physical_batch_size: int | None = None
    progress: bool | None = None

    def __post_init__(self) -> None:
        check_views(self.views)
        if self.nominal_size is not None:
            _check.positive_int("nominal_size", self.nominal_size)
        if self.proj_dim is not None:
            _check.positive_int("proj_dim", self.proj_dim)
        if self.max_physical_batch_size is not None:
            _check.positive_int("max_physical_batch_size", self.max_physical_batch_size)

    @property
    def shows_progress(self) -> bool | None:
        """Whether to show a bar. It would tell the data set's size, so none is shown where a nominal size is given."""
        return self.progress if self.nominal_size is None else False

    def size_of(self, loader: DataLoader[Any]) -> int:
        """The public number of records, N."""
        if self.nominal_size is not None:
            return self.nominal_size
        size = loaders.dataset_size(loader)
        if size is None:
            raise ValueError("nominal_size must be given for an iterable data set: a public, rounded number of records")
        return size

    def facts(self) -> dict[str, object]:
        """What has to be the same on every rank, and for a pass that goes on; by the name of the argument."""
        return {
            "projection": (repr(self.subspace), settings_digest(self.subspace)),  # and what it has learned
            "proj_dim": self.proj_dim,
            "criterion": described(self.criterion),
            "grad_sample_mode": self.grad_sampling,
            "views": described(self.views),
            "nominal_size": self.nominal_size,
        }
