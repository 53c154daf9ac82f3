"""From a model and its data to ``Statistics``: what one pass leaves behind.

``Workbench`` holds everything about a pass that is public and can be checked before the private data is touched.
"""

from __future__ import annotations

import copy
import itertools
import secrets
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from opacus_expm import _check, data
from opacus_expm._private import PrivateValues
from opacus_expm.bounds import quantile_bounds
from opacus_expm.criteria import Criterion, make_criterion
from opacus_expm.density import Array, BallGaussian
from opacus_expm.functional import functional_for
from opacus_expm.grad_sample import HooksCannotServe, hooks_for
from opacus_expm.model import Layout, check_module, compute_dtype, exact_arithmetic, moved, take, working_copy
from opacus_expm.projection import KINDS, Projection, make_projection
from opacus_expm.sums import (
    ClippedAdder,
    ClippedSums,
    RecordQuadratics,
    RowSource,
    clipped_sums,
    record_quadratics,
)

GRAD_SAMPLE_MODES = ("hooks", "functorch")
CACHE_BYTES = 2**30  # of projected rows that are kept between the norms and the sums
_KERNEL_ROWS = 16  # pieces are whole numbers of the blocks in which matrix kernels work
Batches = Iterator[tuple[Any, Tensor]]


@dataclass(frozen=True, repr=False, eq=False)
class Statistics(PrivateValues):
    """What one pass over the private data left behind: enough to release models at any ε and radius.

    **Privacy:** private data. ``repr`` shows shapes and bounds only, and pickling is refused.
    """

    module: nn.Module
    layout: Layout
    projection: Projection
    sums: ClippedSums
    nominal_size: int

    @cached_property
    def _spectrum(self) -> tuple[Array, Array | None, Array]:
        """Eigenvalues and eigenvectors of S, and G in that basis; S = 0 needs no rotation."""
        gradient = self.sums.gradient.cpu().numpy()
        if self.sums.curvature is None:
            return np.zeros_like(gradient), None, gradient
        values, vectors = np.linalg.eigh(self.sums.curvature.cpu().numpy())
        return values, vectors, vectors.T @ gradient

    def density(self, inverse_temperature: float, radius: float, regularization: float) -> BallGaussian:
        """The mechanism's density exp(−c[ξᵀG + ½ξᵀSξ + ½λN|ξ|²]) on |ξ| ≤ R; private."""
        values, vectors, gradient = self._spectrum
        precision = inverse_temperature * (np.clip(values, 0.0, None) + regularization * self.nominal_size)
        return BallGaussian(precision, -inverse_temperature * gradient, radius, vectors)

    def module_at(self, coordinates: Array) -> nn.Module:
        """The plain module with parameters θ* + Aξ."""
        return moved(self.module, self.layout, self.projection.lift(torch.from_numpy(coordinates)))

    def __repr__(self) -> str:
        return (
            f"Statistics(parameters={self.layout.size}, projection={self.projection.kind!r}, "
            f"nominal_size={self.nominal_size}, sums={self.sums!r})"
        )


@dataclass(frozen=True, repr=False, eq=False)
class Remembered(PrivateValues):
    """Norms of every private record and, where they fit into ``CACHE_BYTES``, their quadratics; private data."""

    gradient_norms: Array
    curvature_norms: Array
    records: list[RecordQuadratics] | None


class Workbench:
    """A checked model with its subspace and criterion, ready for passes over public and private data.

    Args:
        model: pretrained module; a working copy is made, the original is kept as a copy too.
        proj_dim: dimension of the subspace, None for the full space.
        criterion: the loss, or None to infer it.
        projection: kind of projection.
        projection_seed: public seed, drawn afresh if None.
        grad_sample_mode: ``"hooks"``, ``"functorch"`` or None.
        curvature_samples: probes of the curvature, None for exact rows.
        max_physical_batch_size: records at a time.
        progress: show a bar.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        proj_dim: int | None,
        criterion: Callable[[Tensor, Tensor], Tensor] | None,
        projection: str,
        projection_seed: int | None,
        grad_sample_mode: str | None,
        curvature_samples: int | None,
        max_physical_batch_size: int | None,
        progress: bool | None,
    ):
        module = check_module(model)
        _check.one_of("projection", projection, KINDS)
        if grad_sample_mode is not None:
            _check.one_of("grad_sample_mode", grad_sample_mode, GRAD_SAMPLE_MODES)
        for name, value in (
            ("curvature_samples", curvature_samples),
            ("max_physical_batch_size", max_physical_batch_size),
        ):
            if value is not None:
                _check.positive_int(name, value)
        seed = secrets.randbits(63) if projection_seed is None else _check.seed("projection_seed", projection_seed)
        self._module = copy.deepcopy(module)
        self._working = working_copy(module)
        self._layout = Layout.of(self._working)
        self._device, self._dtype = next(self._working.parameters()).device, compute_dtype(self._working)
        self._subspace = make_projection(
            projection, self._layout.size, proj_dim, seed, device=self._device, dtype=self._dtype
        )
        self._criterion, self._mode, self._samples = criterion, grad_sample_mode, curvature_samples
        self._max_physical_batch_size, self._progress = max_physical_batch_size, progress
        self._ready: tuple[RowSource, Criterion] | None = None

    def public_bounds(self, public_loader: DataLoader[Any], *, curvature: bool) -> tuple[float, float]:
        """C_g and C_H measured on public data (see ``bounds``)."""
        with exact_arithmetic():
            records = self._records(public_loader, "public_loader", curvature)
            norms = [(r.gradient_norms, r.curvature_norms) for r in records]
        return quantile_bounds(*(torch.cat(n).cpu().numpy() for n in zip(*norms, strict=True)))

    def remember(self, loader: DataLoader[Any], *, curvature: bool) -> Remembered:
        """One pass over the private data that keeps every record's norms and, while they fit, quadratics.

        **Privacy:** the result is private data.
        """
        kept: list[RecordQuadratics] | None = []
        norms, size = [], 0
        with exact_arithmetic():
            for records in self._records(loader, "loader", curvature):
                norms.append((records.gradient_norms.cpu().numpy(), records.curvature_norms.cpu().numpy()))
                if kept is not None:
                    kept.append(records.to(self._dtype))
                    size += kept[-1].bytes()
                    kept = kept if size <= CACHE_BYTES else None
        gradient_norms, curvature_norms = (np.concatenate(n) for n in zip(*norms, strict=True))
        return Remembered(gradient_norms, curvature_norms, kept)

    def _records(self, loader: DataLoader[Any], name: str, curvature: bool) -> Iterator[RecordQuadratics]:
        """Every record's quadratic, batch after batch."""
        source, loss, stream = self._begin(loader, name)
        for inputs, targets in stream:
            yield record_quadratics(
                source,
                loss,
                inputs,
                targets,
                curvature=curvature,
                curvature_samples=self._samples,
                pad_to=self._piece(loader),
            )

    def gather(
        self,
        loader: DataLoader[Any],
        *,
        max_grad_norm: float,
        max_curvature: float,
        nominal_size: int,
        remembered: Remembered | None = None,
    ) -> Statistics:
        """One pass over the private data, or none where an earlier one is remembered.

        **Privacy:** the result is private data.
        """
        with exact_arithmetic():
            if remembered is not None and remembered.records is not None:
                total = ClippedAdder(max_grad_norm, max_curvature)
                for records in remembered.records:
                    total.add(records.to(torch.float64).with_norms())
                sums = total.result()
            else:
                source, loss, stream = self._begin(loader, "loader")
                sums = clipped_sums(
                    source,
                    loss,
                    stream,
                    max_grad_norm=max_grad_norm,
                    max_curvature=max_curvature,
                    curvature_samples=self._samples,
                    pad_to=self._piece(loader),
                )
        return Statistics(self._module, self._layout, self._subspace, sums, nominal_size)

    def _piece(self, loader: DataLoader[Any]) -> int | None:
        """Number of records, public and the same for every piece of a pass, that the network always sees at once.

        Matrix kernels round differently for different batch sizes; were a record to fall into a batch of another size
        because another record left, its own rows could change.
        """
        size = self._max_physical_batch_size or loader.batch_size
        return None if size is None else -(-size // _KERNEL_ROWS) * _KERNEL_ROWS

    def _begin(self, loader: DataLoader[Any], name: str) -> tuple[RowSource, Criterion, Batches]:
        """Gatherer and criterion, chosen on the first batch that is seen, and the whole stream of batches."""
        stream = data.batches(
            loader,
            device=self._device,
            dtype=self._dtype,
            max_physical_batch_size=self._max_physical_batch_size,
            progress=self._progress,
            name=name,
        )
        first = next(stream)
        if self._ready is None:
            example = take(first[0], slice(0, 1))
            loss = make_criterion(self._criterion, first[1])
            self._ready = (_row_source(self._working, self._layout, self._subspace, example, self._mode), loss)
        return (*self._ready, itertools.chain([first], stream))


def nominal_size_of(loader: DataLoader[Any], nominal_size: int | None) -> int:
    """The public N."""
    if nominal_size is not None:
        return _check.positive_int("nominal_size", nominal_size)
    size = data.dataset_size(loader)
    if size is None:
        raise ValueError("nominal_size must be given for an iterable data set: a public, rounded number of records")
    return size


def _row_source(
    module: nn.Module, layout: Layout, projection: Projection, example: Any, grad_sample_mode: str | None
) -> RowSource:
    """Hooks where they can serve, else functorch; a fallback is said."""
    if grad_sample_mode == "functorch":
        return functional_for(module, layout, projection, example)
    try:
        return hooks_for(module, layout, projection, example)
    except HooksCannotServe as reason:
        if grad_sample_mode == "hooks":
            raise ValueError(f"grad_sample_mode='hooks' cannot serve this model: {reason}; use 'functorch'") from reason
        warnings.warn(f"using grad_sample_mode='functorch', because {reason}", UserWarning, stacklevel=2)
        return functional_for(module, layout, projection, example)
