"""From a model and its data to ``Statistics``: what one pass leaves behind.

``Workbench`` holds everything about a pass that is public and can be checked before the private data is touched.
"""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from opacus_expm import _check, data, theory
from opacus_expm._private import PrivateValues
from opacus_expm.criteria import Criterion, CrossEntropy, MeanSquaredError, make_criterion
from opacus_expm.density import Array, BallGaussian
from opacus_expm.functional import functional_for
from opacus_expm.grad_sample import HooksCannotServe, hooks_for
from opacus_expm.model import Layout, check_module, compute_dtype, exact_arithmetic, moved, take, working_copy
from opacus_expm.projection import Projection, PublicCurvature, Subspace
from opacus_expm.ranks import Ranks
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
PUBLIC_BYTES = 2**28  # of full-space rows from which public curvature is computed
MAX_CURVATURE_DIM = 16_384  # S in float64 takes 2 GiB there
PAPER_INFLATION = 1.1
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
    bounds: str

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
    """Norms of every private record, by the bound they are for, and its quadratic where all fit into ``CACHE_BYTES``."""

    norms: dict[str, Array]
    records: list[RecordQuadratics] | None


class Workbench:
    """A checked model with its subspace and criterion, ready for passes over public and private data.

    Args:
        model: pretrained module; a working copy is made, the original is kept as a copy too.
        subspace: how the projection is made.
        criterion: the loss, or None to infer it.
        grad_sample_mode: ``"hooks"``, ``"functorch"`` or None.
        curvature_samples: probes of the curvature, None for exact rows.
        max_physical_batch_size: records at a time.
        progress: show a bar.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        subspace: Subspace,
        criterion: Callable[[Tensor, Tensor], Tensor] | None,
        grad_sample_mode: str | None,
        curvature_samples: int | None,
        max_physical_batch_size: int | None,
        progress: bool | None,
    ):
        module = check_module(model)
        if grad_sample_mode is not None:
            _check.one_of("grad_sample_mode", grad_sample_mode, GRAD_SAMPLE_MODES)
        for name, value in (
            ("curvature_samples", curvature_samples),
            ("max_physical_batch_size", max_physical_batch_size),
        ):
            if value is not None:
                _check.positive_int(name, value)
        self._module = copy.deepcopy(module)
        self._working = working_copy(module)
        self._layout = Layout.of(self._working)
        self._device, self._dtype = next(self._working.parameters()).device, compute_dtype(self._working)
        self._subspace = subspace.build(self._layout.size, self._device, self._dtype)
        self._criterion, self._mode, self._samples = criterion, grad_sample_mode, curvature_samples
        self._max_physical_batch_size, self._progress = max_physical_batch_size, progress
        self._ready: tuple[RowSource, Criterion] | None = None

    def check_curvature(self, max_curvature: float | None) -> None:
        """Refuse a k × k matrix that cannot be held."""
        if max_curvature != 0 and self._subspace.dim > MAX_CURVATURE_DIM:
            raise ValueError(
                f"proj_dim must be at most {MAX_CURVATURE_DIM} where private curvature is gathered (a k × k matrix), got "
                f"{self._subspace.dim}; pass max_curvature=0, or a smaller proj_dim"
            )

    def public_norms(
        self, public_loader: DataLoader[Any], *, curvature: bool, joint_radius: float | None
    ) -> dict[str, Array]:
        """Norms of public records, by the bound they are for."""
        with exact_arithmetic():
            records = self._records(public_loader, "public_loader", curvature)
            norms = [_norms(r, joint_radius) for r in records]
        return {name: np.concatenate([n[name] for n in norms]) for name in norms[0]}

    def public_curvature(self, public_loader: DataLoader[Any], rank: int) -> PublicCurvature:
        """Leading eigenpairs of the Gauss-Newton matrix, on as many public records as fit into ``PUBLIC_BYTES``.

        The workbench's own subspace must be the full space.
        """
        kept: list[Tensor] = []
        records = size = 0
        with exact_arithmetic():
            for batch in self._records(public_loader, "public_loader", curvature=True):
                assert batch.factors is not None
                rows = batch.factors.flatten(0, 1).to(self._dtype)
                if kept and size + rows.nbytes > PUBLIC_BYTES:
                    break
                kept.append(rows)
                records, size = records + len(batch.gradients), size + rows.nbytes
            return PublicCurvature.of_rows(torch.cat(kept), records, rank, seed=0)

    def paper_bounds(self, loader: DataLoader[Any]) -> tuple[float, float]:
        """ḡ and H̄ of the source paper from the private data's own largest Jacobian and residual, inflated by 1.1.

        The workbench's own subspace must be the full space.

        **Privacy:** not private: one record can move a maximum as far as it likes.
        """
        jacobian = residual = 0.0
        source, loss, stream = self._begin(loader, "loader")
        if not isinstance(loss, CrossEntropy | MeanSquaredError):
            raise ValueError(
                f"bounds='paper' is defined for cross-entropy and mean squared error, not for {type(loss).__name__}; "
                "use bounds=None"
            )
        with exact_arithmetic():
            for inputs, targets in stream:
                outputs, pullback = source.outputs_and_pullback(inputs)
                outputs_count = outputs.shape[1]
                rows = pullback(torch.eye(outputs_count).to(outputs).expand(len(outputs), -1, -1)).double()
                gram = rows @ rows.transpose(1, 2)
                jacobian = max(jacobian, float(torch.linalg.eigvalsh(gram)[:, -1].max()) ** 0.5)
                if isinstance(loss, MeanSquaredError):
                    gap = (outputs.double() - targets.reshape(outputs.shape).double()).norm(dim=1)
                    residual = max(residual, float(gap.max()))
        if isinstance(loss, CrossEntropy):
            found = theory.cross_entropy_bounds(PAPER_INFLATION * jacobian)
        else:
            found = theory.mean_squared_bounds(PAPER_INFLATION * jacobian, PAPER_INFLATION * residual, outputs_count)
        return found.gradient, found.curvature

    def remember(
        self, loader: DataLoader[Any], *, curvature: bool, joint_radius: float | None, ranks: Ranks
    ) -> Remembered:
        """One pass over this rank's private data that keeps every record's norms and, while they fit, quadratics.

        **Privacy:** the result is private data.
        """
        kept: list[RecordQuadratics] | None = []
        norms: list[dict[str, Array]] = []
        size = 0
        with exact_arithmetic():
            for records in self._records(_part(loader, ranks), "loader", curvature):
                norms.append(_norms(records, joint_radius))
                if kept is not None:
                    kept.append(records.to(self._dtype))
                    size += kept[-1].bytes()
                    kept = kept if size <= CACHE_BYTES else None
        return Remembered({name: np.concatenate([n[name] for n in norms]) for name in norms[0]}, kept)

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
        bounds: str,
        joint_radius: float | None,
        remembered: Remembered | None,
        ranks: Ranks,
    ) -> Statistics:
        """One pass over the private data, or none where an earlier one is remembered; each rank visits its own part.

        Raises:
            ValueError: the ranks together did not visit every record exactly once. The message holds no count.

        **Privacy:** the result is private data.
        """
        visited = 0

        def count(_: ClippedAdder, records: int) -> None:
            nonlocal visited
            visited += records

        with exact_arithmetic():
            if remembered is not None and remembered.records is not None:
                total = ClippedAdder(max_grad_norm, max_curvature, joint_radius)
                for records in remembered.records:
                    total.add(records.to(torch.float64).with_norms())
                    count(total, len(records.gradients))
                sums = total.result()
            else:
                part = _part(loader, ranks)
                source, loss, stream = self._begin(part, "loader")
                sums = clipped_sums(
                    source,
                    loss,
                    stream,
                    max_grad_norm=max_grad_norm,
                    max_curvature=max_curvature,
                    curvature_samples=self._samples,
                    pad_to=self._piece(part),
                    joint_radius=joint_radius,
                    after_each=count,
                )
        sums = _over_ranks(sums, visited, loader, ranks)
        return Statistics(self._module, self._layout, self._subspace, sums, nominal_size, bounds)

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


def _part(loader: DataLoader[Any], ranks: Ranks) -> DataLoader[Any]:
    """This rank's records; the loader itself where there is one rank."""
    return loader if ranks.count == 1 else data.part_of(loader, rank=ranks.rank, ranks=ranks.count)


def _over_ranks(sums: ClippedSums, visited: int, loader: DataLoader[Any], ranks: Ranks) -> ClippedSums:
    """The sums of all ranks' records, once it is certain that every record was visited on exactly one."""
    if ranks.count == 1:
        return sums
    ranks.same(lambda: {"the kind of curvature": (sums.parallel, sums.rank, sums.curvature is None)})
    numbers = ranks.summed(torch.cat([sums.packed(), torch.tensor([visited], dtype=torch.float64)]))
    if int(numbers[-1]) != data.dataset_size(loader):
        raise ValueError("loader did not give every record to exactly one rank; nothing was released")
    return sums.with_packed(numbers[:-1])


def _norms(records: RecordQuadratics, joint_radius: float | None) -> dict[str, Array]:
    """Each record's norms, by the bound they are for; private if the records are."""
    curvature = records.curvature_norms.cpu().numpy()
    if joint_radius is not None:
        return {"max_grad_norm": records.joint_norms(joint_radius).cpu().numpy(), "max_curvature": curvature}
    return {"max_grad_norm": records.gradient_norms.cpu().numpy(), "max_curvature": curvature}


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
