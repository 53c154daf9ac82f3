"""From a model and its data to ``Statistics``: what one pass leaves behind.

``Workbench`` holds everything about a pass that is public and can be checked before the private data is touched.
"""

from __future__ import annotations

import copy
import functools
import itertools
import os
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from opacus_expm import _check, paper
from opacus_expm._private import PrivateValues
from opacus_expm.accounting.events import BOUNDS
from opacus_expm.gathering import loaders
from opacus_expm.gathering.clipping import (
    ClippedAdder,
    ClippedSums,
    RecordQuadratics,
    RowSource,
    clipped_sums,
    record_quadratics,
)
from opacus_expm.gathering.criteria import (
    Criterion,
    CrossEntropy,
    MeanSquaredError,
    Softened,
    description,
    make_criterion,
)
from opacus_expm.gathering.files import PassFile, read_private, write_private
from opacus_expm.gathering.functional import functional_for
from opacus_expm.gathering.hooks import HooksCannotServe, hooks_for
from opacus_expm.gathering.independence import State
from opacus_expm.gathering.model import (
    Layout,
    check_module,
    compute_dtype,
    digest,
    draws_at_random,
    exact_arithmetic,
    moved,
    ran_out_of_memory,
    take,
    tensor_digest,
    working_copy,
)
from opacus_expm.gathering.randomness import Generators
from opacus_expm.gathering.ranks import Ranks, described
from opacus_expm.gathering.views import EachView, Views, check_each_alone, with_own_views
from opacus_expm.mechanism.density import Array, BallGaussian
from opacus_expm.subspaces.projection import Projection, PublicCurvature, Subspace

GRAD_SAMPLE_MODES = ("hooks", "functorch")
CACHE_BYTES = 2**30  # of projected rows that are kept between the norms and the sums
PUBLIC_BYTES = 2**28  # of full-space rows from which public curvature is computed
MAX_CURVATURE_DIM = 16_384  # S in float64 takes 2 GiB there
PAPER_INFLATION = 1.1
_KIND = "private statistics"
_FINGERPRINT = 1000  # coordinates, or half as many more
Batches = Iterator[tuple[Any, Tensor]]
T = TypeVar("T")


@dataclass(frozen=True, repr=False, eq=False)
class Statistics(PrivateValues):
    """What one pass over the private data left behind: enough to release models at any ε and radius.

    Statistics that were gathered apart, in several hospitals or by several jobs, add up to those of all their records:

        statistics.save_private(path)                                  # where the records are
        Statistics.load_private(path, model).merge(other, third)       # where the release is drawn

    **Privacy:** private data. ``repr`` shows shapes and bounds only, and pickling is refused.
    """

    module: nn.Module
    layout: Layout
    projection: Projection
    subspace: Subspace
    sums: ClippedSums
    nominal_size: int
    bounds: str
    criterion: str
    curvature_samples: int | None
    views: str | None  # what the function is called
    shards: frozenset[str]  # one random name for each pass that took part
    receipts: frozenset[str] = frozenset()  # of the bounds that were bought, for the ledger that paid (see Purchase)

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

    @cached_property
    def configuration(self) -> dict[str, object]:
        """What has to be the same for statistics to be added up: public facts, by name."""
        curvature, sums = self.subspace.curvature, self.sums
        return {
            "model": digest(self.module),
            "projection": self.subspace.kind,
            "proj_dim": self.subspace.dim,
            # No projection of the full space is drawn.
            "projection_seed": self.subspace.seed if self.projection.seed is not None else None,
            "damping": self.subspace.damping,
            "public curvature": None if curvature is None else tensor_digest(*curvature.tensors().values()),
            "criterion": self.criterion,
            "curvature_samples": self.curvature_samples,
            "views": self.views,
            "max_grad_norm": sums.max_grad_norm,
            "max_curvature": sums.max_curvature,
            "radius of joint clipping": sums.joint_radius,
            "kind of curvature": [sums.parallel, sums.rank, sums.curvature is None],
        }

    def merge(self, *others: Statistics) -> Statistics:
        """Statistics of the records of all: sums add up, and so do nominal sizes.

        Whoever passes records to two of the passes counts them twice, which cannot be noticed here: parts must be disjoint.

        Args:
            others: gathered with the same model, projection seed, criterion and bounds, from other records.

        Raises:
            TypeError: not statistics.
            ValueError: what differs, by name; or a pass that would count twice.

        **Privacy:** the result is private data of the union. Its sensitivity to one record is that of each part.
        """
        merged = self
        for other in others:
            if not isinstance(other, Statistics):
                raise TypeError(f"only Statistics can be merged, got {type(other).__name__}")
            mine, theirs = merged.configuration, other.configuration
            differing = [name for name in mine if mine[name] != theirs[name]]
            if differing:
                raise ValueError(
                    f"statistics with another {', '.join(differing)} cannot be merged: gather every part with the same "
                    "model, projection_seed, criterion and bounds"
                )
            if merged.shards & other.shards:
                raise ValueError("these statistics were merged before: every part may count once")
            merged = replace(
                merged,
                sums=merged.sums.plus(other.sums.to(merged.sums.gradient.device)),
                nominal_size=merged.nominal_size + other.nominal_size,
                bounds=max(merged.bounds, other.bounds, key=BOUNDS.index),
                shards=merged.shards | other.shards,
                receipts=merged.receipts | other.receipts,
            )
        return merged

    def save_private(self, path: str | os.PathLike[str]) -> None:
        """Write the statistics, which are private data, to a new file, to be merged or used elsewhere.

        The file holds the sums without any noise, the configuration, the projection's seed (with ``"public"`` and
        ``"preconditioned"`` its public eigenvectors) and the pass's random name; no weights. Only its owner may read it.

        Raises:
            FileExistsError: the file exists.
            ValueError: the bounds were bought, for which the file's reader would have no entry in a ledger.

        **Privacy:** not private; a warning says so.
        """
        if self.bounds == "bought":
            raise ValueError(
                "statistics with bought bounds stay with the engine whose ledger was charged for them: pass max_grad_norm= "
                "and max_curvature=, or public_loader=, to gather what is saved"
            )
        if os.path.exists(path):
            raise FileExistsError(f"{os.fspath(path)!r} exists; choose another path, or delete the file")
        warnings.warn(
            f"save_private() writes PRIVATE data to {os.fspath(path)!r}: sums over the private records, without noise; keep "
            "the file where the data is kept, and delete it when it has served",
            UserWarning,
            stacklevel=2,
        )
        write_private(
            path,
            _KIND,
            {
                "configuration": self.configuration,
                "subspace": self.subspace.to_dict(),
                "fingerprint": _fingerprint(self.projection),
                "sums": self.sums.to_dict(),
                "nominal_size": self.nominal_size,
                "bounds": self.bounds,
                "criterion": self.criterion,
                "curvature_samples": self.curvature_samples,
                "views": self.views,
                "shards": sorted(self.shards),
            },
        )

    @classmethod
    def load_private(cls, path: str | os.PathLike[str], model: nn.Module) -> Statistics:
        """Statistics that ``save_private`` wrote, for the model at which they were gathered. No code in the file is run.

        Args:
            path: the file.
            model: with the same weights, and the same of them trainable.

        Raises:
            ValueError: no such file, another model, or a projection that its seed does not give here.

        **Privacy:** the result is private data.
        """
        content = read_private(path, _KIND)
        module = check_module(model)
        layout = Layout.of(module)
        device, dtype = next(module.parameters()).device, compute_dtype(module)
        try:
            if content["configuration"]["model"] != digest(module):
                raise ValueError(
                    "the model has other weights, or others of them are trainable, than where it was gathered"
                )
            subspace, sums = Subspace.from_dict(content["subspace"]), ClippedSums.from_dict(content["sums"])
            projection = subspace.build(layout.size, device, dtype)
            if projection.dim != len(sums.gradient) or not torch.allclose(
                _fingerprint(projection), content["fingerprint"], rtol=0, atol=1e-4
            ):
                raise ValueError("the projection's seed does not give the projection with which it was gathered")
            found = cls(
                copy.deepcopy(module),
                layout,
                projection,
                subspace,
                sums.to(device),
                _check.positive_int("nominal_size", content["nominal_size"]),
                _check.one_of("bounds", content["bounds"], BOUNDS),
                content["criterion"],
                content["curvature_samples"],
                content["views"],
                frozenset(content["shards"]),
            )
            if found.configuration != content["configuration"]:
                raise ValueError("its parts do not fit together")
        except (KeyError, TypeError, AttributeError, RuntimeError) as error:
            raise ValueError(f"{os.fspath(path)!r} does not hold sound statistics") from error
        except ValueError as error:
            raise ValueError(f"{os.fspath(path)!r} cannot be used: {error}") from error
        return found

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
        pieces: records at a time; halved, with a warning, when a pass runs out of memory.
        progress: show a bar.
        views: of each record, whose mean is taken (see ``opacus_expm.gathering.views``).
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        subspace: Subspace,
        criterion: Callable[[Tensor, Tensor], Tensor] | None,
        grad_sample_mode: str | None,
        curvature_samples: int | None,
        pieces: loaders.Pieces,
        progress: bool | None,
        views: Views | None = None,
    ):
        module = check_module(model)
        if grad_sample_mode is not None:
            _check.one_of("grad_sample_mode", grad_sample_mode, GRAD_SAMPLE_MODES)
        if curvature_samples is not None:
            _check.positive_int("curvature_samples", curvature_samples)
        self._module = copy.deepcopy(module)
        self._working = working_copy(module)
        self._layout = Layout.of(self._working)
        self._device, self._dtype = next(self._working.parameters()).device, compute_dtype(self._working)
        self._recipe, self._subspace = subspace, subspace.build(self._layout.size, self._device, self._dtype)
        self._criterion, self._mode, self._samples = criterion, grad_sample_mode, curvature_samples
        self._pieces, self._progress, self._views = pieces, progress, views
        self._generators = Generators.of(self._working, views, criterion)
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

        def once() -> list[dict[str, Array]]:
            return [_norms(r, joint_radius) for r in self._records(public_loader, "public_loader", curvature)]

        norms = self._in_memory(public_loader, "public_loader", once)
        return {name: np.concatenate([n[name] for n in norms]) for name in norms[0]}

    def public_curvature(
        self, public_loader: DataLoader[Any], rank: int, temperature: float, scales: Tensor | None
    ) -> PublicCurvature:
        """Leading eigenpairs of the Gauss-Newton matrix, on as many public records as fit into ``PUBLIC_BYTES``.

        The loss is that of the outputs divided by ``temperature`` (see ``criteria.Softened``), the parameters those in the
        units ``scales``.

        The workbench's own subspace must be the full space.
        """
        units = None if scales is None else scales.to(self._device, self._dtype)

        def once() -> PublicCurvature:
            kept: list[Tensor] = []
            records = size = 0
            for batch in self._records(public_loader, "public_loader", True, temperature):
                assert batch.factors is not None
                rows = batch.factors.flatten(0, 1).to(self._dtype)
                if units is not None:
                    rows = rows * units
                if kept and size + rows.nbytes > PUBLIC_BYTES:
                    break
                kept.append(rows)
                records, size = records + len(batch.gradients), size + rows.nbytes
            return replace(PublicCurvature.of_rows(torch.cat(kept), records, rank, seed=0), scales=units)

        return self._in_memory(public_loader, "public_loader", once)

    def paper_bounds(self, loader: DataLoader[Any]) -> tuple[float, float]:
        """ḡ and H̄ of the source paper from the private data's own largest Jacobian and residual, inflated by 1.1.

        The workbench's own subspace must be the full space.

        **Privacy:** not private: one record can move a maximum as far as it likes.
        """
        return self._in_memory(loader, "loader", lambda: self._paper_bounds(loader))

    def _paper_bounds(self, loader: DataLoader[Any]) -> tuple[float, float]:
        """One attempt at ``paper_bounds``."""
        jacobian = residual = 0.0
        source, loss, stream = self._begin(loader, "loader")
        if not isinstance(loss, CrossEntropy | MeanSquaredError):
            raise ValueError(
                f"bounds='paper' is defined for cross-entropy and mean squared error, not for {type(loss).__name__}; "
                "use bounds=None"
            )
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
            found = paper.cross_entropy_bounds(PAPER_INFLATION * jacobian)
        else:
            found = paper.mean_squared_bounds(PAPER_INFLATION * jacobian, PAPER_INFLATION * residual, outputs_count)
        return found.gradient, found.curvature

    def remember(
        self, loader: DataLoader[Any], *, curvature: bool, joint_radius: float | None, ranks: Ranks
    ) -> Remembered:
        """One pass over this rank's private data that keeps every record's norms and, while they fit, quadratics.

        Where they do not fit, the sums need another pass, in which random records have other norms. It clips by its own.

        **Privacy:** the result is private data.
        """
        part = _part(loader, ranks)

        def once() -> Remembered:
            kept: list[RecordQuadratics] | None = (
                None if self._pieces.halved else []
            )  # what was kept may have filled it
            norms: list[dict[str, Array]] = []
            size = 0
            for records in self._records(part, "loader", curvature):
                norms.append(_norms(records, joint_radius))
                if kept is not None:
                    kept.append(records.to(self._dtype))
                    size += kept[-1].bytes()
                    kept = kept if size <= CACHE_BYTES else None
            return Remembered({name: np.concatenate([n[name] for n in norms]) for name in norms[0]}, kept)

        return self._in_memory(loader, "loader", once)

    def _records(
        self, loader: DataLoader[Any], name: str, curvature: bool, temperature: float = 1.0
    ) -> Iterator[RecordQuadratics]:
        """Every record's quadratic, batch after batch."""
        source, loss, stream = self._begin(loader, name)
        loss = loss if temperature == 1 else Softened(loss, temperature)
        for inputs, targets in stream:
            yield record_quadratics(
                source,
                loss,
                inputs,
                targets,
                curvature=curvature,
                curvature_samples=self._samples,
                pad_to=self._pieces.padded(loader),
            )

    def gather(
        self,
        loader: DataLoader[Any],
        *,
        max_grad_norm: float,
        max_curvature: float,
        nominal_size: int,
        bounds: str,
        receipts: frozenset[str],
        joint_radius: float | None,
        remembered: Remembered | None,
        ranks: Ranks,
        kept: PassFile | None = None,
        begun: bool = False,
    ) -> Statistics:
        """One pass over the private data, or none where an earlier one is remembered; each rank visits its own part.

        With ``kept``, the pass goes on where its file says, and keeps its state there until it is complete on all ranks.

        With ``begun``, the pass goes on with further batches: memory that runs out is then an error, because the records
        before would have been seen in pieces of another size; the next pass takes half of it.

        Raises:
            ValueError: the ranks together did not visit every record exactly once. The message holds no count.

        **Privacy:** the result is private data.
        """
        size, visited = self._pieces.padded(loader), 0

        def once() -> ClippedSums:
            nonlocal visited
            # One pass sees its records in pieces of one size: where memory ran out it began anew, and is not kept.
            file = kept if self._pieces.padded(loader) == size else None
            visited = 0 if file is None else file.records

            def count(total: ClippedAdder, records: int) -> None:
                nonlocal visited
                visited += records
                if file is not None:
                    file.add(total, records)

            if remembered is not None and remembered.records is not None:
                total = ClippedAdder(max_grad_norm, max_curvature, joint_radius)
                for records in remembered.records:
                    total.add(records.to(torch.float64).with_norms())
                    count(total, len(records.gradients))
                return total.result()
            part = _part(loader, ranks, None if kept is None else visited)
            # A pass that was complete on this rank, but not on another, has no batch left to begin with.
            complete = loaders.dataset_size(part) == 0
            source, loss, stream = self._begin(_part(loader, ranks, 0) if complete else part, "loader")
            sums = clipped_sums(
                source,
                loss,
                () if complete else stream,
                max_grad_norm=max_grad_norm,
                max_curvature=max_curvature,
                curvature_samples=self._samples,
                pad_to=self._pieces.padded(part),
                joint_radius=joint_radius,
                start=None if file is None or file.sums is None else file.sums.to(self._device),
                after_each=count,
            )
            if file is not None:
                file.write(sums)
            return sums

        sums = _over_ranks(self._in_memory(loader, "loader", once, restart=not begun), visited, loader, ranks)
        if kept is not None:
            kept.remove()
        assert self._ready is not None
        return Statistics(
            self._module,
            self._layout,
            self._subspace,
            self._recipe,
            sums,
            nominal_size,
            bounds,
            description(self._ready[1]),
            self._samples,
            None if self._views is None else str(described(self._views)),
            frozenset([ranks.random_name()]),
            receipts,
        )

    def _in_memory(self, loader: DataLoader[Any], name: str, once: Callable[[], T], *, restart: bool = True) -> T:
        """One pass in exact arithmetic and fresh randomness, again in pieces of half the size whenever memory runs out.

        Raises:
            RuntimeError: not even single records fit, or the pass cannot start again; says what needs less.
        """
        generators = Generators.of(loader, self._generators.found)
        while True:
            size = self._pieces.padded(loader)
            try:
                with exact_arithmetic(), generators.refreshed():
                    return once()
            except (MemoryError, RuntimeError) as error:
                if not ran_out_of_memory(error):
                    raise
                if not self._pieces.halve(loader):
                    raise RuntimeError(
                        f"the pass over {name} ran out of memory with the fewest records at a time; less is needed with "
                        "projection='sparse', a smaller proj_dim, curvature_samples= or max_curvature=0"
                    ) from error
                if not restart or isinstance(loader.dataset, IterableDataset):
                    raise RuntimeError(
                        f"the pass over {name} ran out of memory with {size} records at a time and cannot start again by "
                        f"itself; pass max_physical_batch_size={self._pieces.padded(loader)}, or start it again"
                    ) from error
            # Here, and not above, where the exception would still hold on to the tensors.
            warnings.warn(
                f"the pass over {name} ran out of memory with {size} records at a time and starts again with "
                f"{self._pieces.padded(loader)}; pass max_physical_batch_size= to save the attempt",
                UserWarning,
                stacklevel=2,
            )
            if self._device.type == "cuda":
                torch.cuda.empty_cache()

    def _begin(self, loader: DataLoader[Any], name: str) -> tuple[RowSource, Criterion, Batches]:
        """Gatherer and criterion, chosen on the first batch that is seen, and the whole stream of batches."""
        stream = loaders.batches(
            loader,
            device=self._device,
            dtype=self._dtype,
            max_physical_batch_size=self._pieces.step,
            progress=self._progress,
            name=name,
        )
        first = next(stream)
        if self._ready is None:
            example = take(first[0], slice(0, 1))
            loss = make_criterion(self._criterion, first[1])
            if self._views is not None:
                check_each_alone(self._views, example)
            source = _row_source(self._working, self._layout, self._subspace, example, self._mode)
            self._ready = (source if self._views is None else EachView(source), loss)
        whole: Batches = itertools.chain([first], stream)
        if self._views is not None:
            whole = itertools.starmap(functools.partial(with_own_views, self._views, self._generators), whole)
        return (*self._ready, whole)


def _part(loader: DataLoader[Any], ranks: Ranks, start: int | None = None) -> DataLoader[Any]:
    """This rank's records, from ``start`` on in the data set's order; the loader itself for one rank in any order."""
    if ranks.count == 1 and start is None:
        return loader
    return loaders.part_of(loader, rank=ranks.rank, ranks=ranks.count, start=start or 0)


def _over_ranks(sums: ClippedSums, visited: int, loader: DataLoader[Any], ranks: Ranks) -> ClippedSums:
    """The sums of all ranks' records, once it is certain that every record was visited on exactly one."""
    if ranks.count == 1:
        return sums
    ranks.same(lambda: {"the kind of curvature": (sums.parallel, sums.rank, sums.curvature is None)})
    numbers = ranks.summed(torch.cat([sums.packed(), torch.tensor([visited], dtype=torch.float64)]))
    if int(numbers[-1]) != loaders.dataset_size(loader):
        raise ValueError("loader did not give every record to exactly one rank; nothing was released")
    return sums.with_packed(numbers[:-1])


def _fingerprint(projection: Projection) -> Tensor:
    """A few coordinates of Aξ at a fixed ξ of norm one: enough to notice another projection."""
    coordinates = torch.cos(torch.arange(1, projection.dim + 1, dtype=torch.float64))
    lifted = projection.lift(coordinates / coordinates.norm()).double().cpu()
    return lifted[:: max(1, len(lifted) // _FINGERPRINT)]


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
    size = loaders.dataset_size(loader)
    if size is None:
        raise ValueError("nominal_size must be given for an iterable data set: a public, rounded number of records")
    return size


def _row_source(
    module: nn.Module, layout: Layout, projection: Projection, example: Any, grad_sample_mode: str | None
) -> RowSource:
    """Hooks where they can serve, else functorch; a fallback is said, and so is state that is put back."""
    state = State(module, example)
    if state.changed:
        warnings.warn(
            f"model changes {', '.join(state.changed)} in its forward pass, also in evaluation mode; this is put back "
            "before every piece of the pass, so that no record sees another one's traces",
            UserWarning,
            stacklevel=2,
        )
    if grad_sample_mode == "functorch":
        return functional_for(module, layout, projection, example, restore=state.restore)
    try:
        if draws_at_random(module, example):
            raise HooksCannotServe("the model draws random numbers, and every record needs numbers of its own")
        return hooks_for(module, layout, projection, example, restore=state.restore)
    except HooksCannotServe as reason:
        if grad_sample_mode == "hooks":
            raise ValueError(f"grad_sample_mode='hooks' cannot serve this model: {reason}; use 'functorch'") from reason
        warnings.warn(f"using grad_sample_mode='functorch', because {reason}", UserWarning, stacklevel=2)
        return functional_for(module, layout, projection, example, restore=state.restore)
