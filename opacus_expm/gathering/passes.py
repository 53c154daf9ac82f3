"""From a model and its data to clipped sums: what is measured, the workbench on which it is done, and one pass.

    DataLoader ─▶ Pass.add(batch) ─▶ rows (hooks | functional) ─▶ subspace ─▶ clipped sums ─▶ Statistics

``Workbench.gather`` is a loop over the batches of a loader; a training loop hands its batches to ``Pass.add`` itself.
"""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from opacus_expm._private import PrivateValues
from opacus_expm._warnings import warn
from opacus_expm.gathering import loaders
from opacus_expm.gathering.clipping import (
    ClippedAdder,
    ClippedSums,
    ClippingBounds,
    RecordQuadratics,
    RowSource,
    record_gradients,
    record_quadratics,
)
from opacus_expm.gathering.criteria import Criterion, description, make_criterion
from opacus_expm.gathering.factors import blocks_of, head_alone
from opacus_expm.gathering.files import PassFile
from opacus_expm.gathering.gradients import RecordGradients
from opacus_expm.gathering.independence import synthetic_outputs
from opacus_expm.gathering.measurement import Measurement
from opacus_expm.gathering.model import (
    check_module,
    compute_dtype,
    exact_arithmetic,
    moved,
    own_copy,
    ran_out_of_memory,
    take,
    working_copy,
)
from opacus_expm.gathering.randomness import Generators
from opacus_expm.gathering.ranks import Ranks, described
from opacus_expm.gathering.statistics import Statistics
from opacus_expm.gathering.threads import Threads, work_of
from opacus_expm.gathering.views import EachView, check_each_alone, with_own_views
from opacus_expm.mechanism.density import Array
from opacus_expm.subspaces import Projection, Sparse, Subspace
from opacus_expm.subspaces.layout import Layout
from opacus_expm.subspaces.metric import Block

CACHE_BYTES = 2**30  # of projected rows that are kept between the norms and the sums
MAX_CURVATURE_DIM = 16_384  # S in float64 takes 2 GiB there
_WIDE_BYTES = 2**28  # of full-space rows at a time
Batches = Iterator[tuple[Any, Tensor]]
T = TypeVar("T")


@dataclass(frozen=True, repr=False, eq=False)
class Remembered(PrivateValues):
    """The norms of all private records, and their quadratics where all of these fit into ``CACHE_BYTES``."""

    norms: dict[str, Array]
    records: list[RecordQuadratics] | None


class Workbench:
    """A checked model with its map and criterion, ready for passes over public and private data.

    Args:
        model: pretrained module; a working copy is made, the original is kept as a copy too. Both share what is frozen
            with it, which must stay as it is as long as passes are made.
        measurement: what is computed; its subspace has a seed.
        pieces: records at a time; halved, with a warning, when a pass runs out of memory.
    """

    def __init__(self, model: nn.Module, measurement: Measurement, pieces: loaders.Pieces | None = None):
        module = check_module(model)
        self.measurement = measurement
        self._module = own_copy(module)
        self._working = working_copy(module)
        self.layout = Layout.of(self._working)
        self.device, self.dtype = next(self._working.parameters()).device, compute_dtype(self._working)
        self.map: Projection = measurement.subspace.build(
            self.layout.shapes, measurement.proj_dim, self.device, self.dtype
        )
        self.pieces = loaders.Pieces(measurement.max_physical_batch_size) if pieces is None else pieces
        self._generators = Generators.of(self._working, measurement.views, measurement.criterion)
        self._ready: tuple[RowSource, Criterion] | None = None
        self._criterion: Criterion | None = None
        self._threads = Threads()

    def within(self, subspace: Subspace) -> Workbench:
        """The same model in another subspace, with the criterion that was chosen here and the pieces that fit."""
        found = Workbench(self._module, replace(self.measurement, subspace=subspace), self.pieces)
        found._criterion = self.prepared[1]
        return found

    def plain(self) -> Workbench:
        """The same workbench, which moves together with this one, where records are seen as they are: without views."""
        if self.measurement.views is None:
            return self
        found = copy.copy(self)
        found.measurement = replace(self.measurement, views=None)
        source, loss = self.prepared
        assert isinstance(source, EachView)
        found._ready = (source.source, loss)
        return found

    def move(self, coordinates: Tensor) -> None:
        """Let the following passes be made at θ* + Aξ: the working copy's weights move, and nothing is checked again."""
        self.shift(self.lifted(coordinates))

    def lifted(self, coordinates: Tensor) -> Tensor:
        """Aξ, which ``shift`` takes."""
        return self.map.lift(coordinates.to(self.device, self.dtype))

    @torch.no_grad()
    def shift(self, update: Tensor) -> None:
        """Let the following passes be made at θ* + Aξ, given Aξ."""
        start, working = dict(self._module.named_parameters()), dict(self._working.named_parameters())
        for name, shape, place in self.layout.slices():
            working[name].copy_(start[name].to(working[name].dtype) + update[place].view(shape))

    def module_at(self, coordinates: Tensor) -> nn.Module:
        """The plain module with parameters θ* + Aξ."""
        return moved(self._module, self.layout, self.map.lift(coordinates.to(self.device, self.dtype)))

    def check_curvature(self, max_curvature: float | None) -> None:
        """Refuse a k × k matrix that cannot be held."""
        if max_curvature != 0 and self.map.dim > MAX_CURVATURE_DIM:
            raise ValueError(
                f"proj_dim must be at most {MAX_CURVATURE_DIM} where private curvature is gathered (a k × k matrix), got "
                f"{self.map.dim}; pass max_curvature=0, or a smaller proj_dim"
            )

    def public_norms(self, public_loader: DataLoader[Any], *, curvature: bool) -> dict[str, Array]:
        """Norms of public records, by the bound they are for."""

        def once() -> list[dict[str, Array]]:
            return [_norms(r) for r in self._records(public_loader, "public_loader", curvature)]

        return _joined(self.in_memory(once, public_loader, "public_loader"))

    def remember(self, loader: DataLoader[Any], *, curvature: bool, ranks: Ranks) -> Remembered:
        """One pass over this rank's private data that keeps every record's norms and, while they fit, quadratics.

        Where they do not fit, the sums need another pass, in which random records have other norms. It clips by its own.

        **Privacy:** the result is private data.
        """
        part = _part(loader, ranks)

        def once() -> Remembered:
            # What was kept may have filled the memory.
            kept: list[RecordQuadratics] | None = None if self.pieces.halved else []
            norms: list[dict[str, Array]] = []
            size = 0
            for records in self._records(part, "loader", curvature):
                norms.append(_norms(records))
                if kept is not None:
                    kept.append(records.to(self.dtype))
                    size += kept[-1].bytes()
                    kept = kept if size <= CACHE_BYTES else None
            return Remembered(_joined(norms), kept)

        return self.in_memory(once, loader, "loader")

    def open(self, bounds: ClippingBounds, nominal_size: int, ranks: Ranks, pad_to: int | None) -> Pass:
        """A pass to which batches are to be added."""
        return Pass(self, bounds, nominal_size, ranks, pad_to)

    def gather(
        self,
        loader: DataLoader[Any],
        bounds: ClippingBounds,
        nominal_size: int,
        ranks: Ranks,
        *,
        remembered: Remembered | None = None,
        kept: PassFile | None = None,
    ) -> Statistics:
        """One pass over the private data, or none where an earlier one is remembered; each rank visits its own part.

        With ``kept``, the pass goes on where its file says, and keeps its state there until it is complete on all ranks.

        Raises:
            ValueError: the ranks together did not visit every record exactly once. The message holds no count.

        **Privacy:** the result is private data.
        """
        size = self.pieces.padded(loader)

        def once() -> Pass:
            # One pass sees its records in pieces of one size: where memory ran out it began anew, and is not kept.
            file = kept if self.pieces.padded(loader) == size else None
            part = _part(loader, ranks, None if kept is None else 0 if file is None else file.records)
            one = self.open(bounds, nominal_size, ranks, self.pieces.padded(part))
            if remembered is not None and remembered.records is not None:
                one.add_quadratics(records.to(torch.float64).with_norms() for records in remembered.records)
                return one
            if file is not None:
                one.go_on(file)
            if loaders.dataset_size(part) == 0:
                # A pass that was complete on this rank, but not on another, has no batch left to begin with.
                self.begin(_part(loader, ranks, 0), "loader")
            else:
                one.add_pieces(self.begin(part, "loader"))
            if file is not None:
                file.write(one.sums())
            return one

        statistics = self.in_memory(once, loader, "loader").result(loaders.dataset_size(loader))
        if kept is not None:
            kept.remove()
        return statistics

    def in_memory(self, once: Callable[[], T], loader: DataLoader[Any] | None, name: str, *, restart: bool = True) -> T:
        """One pass in exact arithmetic and fresh randomness, again in pieces of half the size whenever memory runs out.

        Raises:
            RuntimeError: not even single records fit, or the pass cannot start again; says what needs less.
        """
        generators = Generators.of(loader, self._generators.found)
        while True:
            size = self.pieces.padded(loader)
            try:
                with exact_arithmetic(), generators.refreshed(), self._threads.shared(size):
                    return once()
            except (MemoryError, RuntimeError) as error:
                if not ran_out_of_memory(error):
                    raise
                if not self.pieces.halve(loader):
                    raise RuntimeError(
                        f"the pass over {name} ran out of memory with the fewest records at a time; less is needed with "
                        "projection='sparse', a smaller proj_dim, GradSampling(probes=...) or max_curvature=0"
                    ) from error
                if not restart or (loader is not None and isinstance(loader.dataset, IterableDataset)):
                    raise RuntimeError(
                        f"the pass over {name} ran out of memory with {size} records at a time and cannot start again by "
                        f"itself; pass max_physical_batch_size={self.pieces.padded(loader)}, or start it again"
                    ) from error
            # Here, and not above, where the exception would still hold on to the tensors.
            warn(
                f"the pass over {name} ran out of memory with {size} records at a time and starts again with "
                f"{self.pieces.padded(loader)}; pass max_physical_batch_size= to save the attempt",
            )
            if self.device.type == "cuda":
                torch.cuda.empty_cache()

    def begin(self, loader: DataLoader[Any], name: str) -> Batches:
        """The whole stream of batches, in pieces, once gatherer and criterion are chosen by the first of them."""
        stream = loaders.batches(
            loader,
            device=self.device,
            dtype=self.dtype,
            max_physical_batch_size=self.pieces.step,
            progress=self.measurement.shows_progress,
            name=name,
        )
        first = next(stream)
        self.prepare(*first)
        return self.seen(itertools.chain([first], stream))

    def prepare(self, inputs: Any, targets: Tensor) -> None:
        """Choose gatherer and criterion by the shapes and types of the first records that are seen."""
        if self._ready is not None:
            return
        views = self.measurement.views
        example = take(inputs, slice(0, 1))
        loss = make_criterion(self.measurement.criterion, targets) if self._criterion is None else self._criterion
        if views is not None:
            check_each_alone(views, example)
        source = self.measurement.grad_sampling.source(self._working, self.layout, self.map, example)
        self.on_synthetic = synthetic_outputs(lambda synthetic: source.outputs_and_pullback(synthetic)[0], example)
        work = work_of(self._working, example)
        self._threads.learn(work if self.device.type == "cpu" else replace(work, elements=0))
        self._ready = (source if views is None else EachView(source), loss)

    def few(self, stream: Batches, pad_to: int | None) -> Iterator[tuple[Any, Tensor, int | None]]:
        """The records of a stream, as many at a time as stay in cache, and the public number to fill these up to."""
        for inputs, targets in stream:
            size = self._threads.few(pad_to)
            step = size or len(targets)
            for piece in (slice(start, start + step) for start in range(0, len(targets), step)):
                yield take(inputs, piece), targets[piece], size

    def seen(self, stream: Batches) -> Batches:
        """The batches with each record replaced by its views; unchanged where there are none."""
        views = self.measurement.views
        if views is None:
            return stream
        return itertools.starmap(functools.partial(with_own_views, views, self._generators), stream)

    def quadratics(self, inputs: Any, targets: Tensor, *, curvature: bool, pad_to: int | None) -> RecordQuadratics:
        """The quadratics of the records in a piece of a batch."""
        return record_quadratics(
            *self.prepared,
            inputs,
            targets,
            curvature=curvature,
            probes=self.measurement.grad_sampling.probes,
            pad_to=pad_to,
        )

    def gradients(self, inputs: Any, targets: Tensor, pad_to: int | None) -> RecordGradients:
        """The gradients of such records."""
        return record_gradients(*self.prepared, inputs, targets, pad_to)

    def blocks(self) -> dict[nn.Module, Block]:
        """The layers of the working copy that are matrices, which a metric can have factors for."""
        return blocks_of(self._working, self.layout)

    def moves_head_alone(self) -> bool:
        """Whether the last layer that is a matrix is all that is trainable."""
        return head_alone(self._working, self.layout)

    @property
    def prepared(self) -> tuple[RowSource, Criterion]:
        """The gatherer and the criterion that ``prepare`` chose."""
        assert self._ready is not None
        return self._ready

    def _records(self, loader: DataLoader[Any], name: str, curvature: bool) -> Iterator[RecordQuadratics]:
        """The quadratics of all records, batch after batch."""
        for inputs, targets, size in self.few(self.begin(loader, name), self.pieces.padded(loader)):
            yield self.quadratics(inputs, targets, curvature=curvature, pad_to=size)

    def statistics(self, sums: ClippedSums, bounds: ClippingBounds, nominal_size: int, shard: str) -> Statistics:
        """The ``Statistics`` made of a pass's sums and of what is public about it."""
        measurement = self.measurement
        return Statistics(
            copy.deepcopy(self._module),  # frozen parameters too: the user may train these before a release
            self.layout,
            self.map,
            measurement.subspace,
            measurement.proj_dim,
            sums,
            nominal_size,
            bounds.source,
            description(self.prepared[1]),
            measurement.grad_sampling.probes,
            None if measurement.views is None else str(described(measurement.views)),
            frozenset([shard]),
            bounds.receipts,
        )


class Pass(PrivateValues):
    """One pass over private records: the clipped sums of those that were added so far.

    Args:
        bench: what is computed of each.
        bounds: C_g and C_H.
        nominal_size: N.
        ranks: that share the pass.
        pad_to: public number of records to which every piece is filled up, so that rounding does not tell how many came.

    **Privacy:** holds private values, and so does its result.
    """

    def __init__(self, bench: Workbench, bounds: ClippingBounds, nominal_size: int, ranks: Ranks, pad_to: int | None):
        self._bench, self._bounds, self._nominal_size = bench, bounds, nominal_size
        self._ranks, self._pad_to = ranks, pad_to
        self._total = self._empty()
        self._file: PassFile | None = None
        self._in_part = False
        self.records = 0  # visited so far

    def go_on(self, file: PassFile) -> None:
        """Go on from the state that a file holds, and keep the state in this file from now on."""
        self._file, self.records = file, file.records
        self._total = self._empty(None if file.sums is None else file.sums.to(self._bench.device))

    def _empty(self, start: ClippedSums | None = None) -> ClippedAdder:
        """Sums without any record, or with those that were visited before an interruption."""
        return ClippedAdder(self._bounds.max_grad_norm, self._bounds.max_curvature, start)

    def add(self, inputs: Any, targets: Tensor) -> None:
        """Add one batch of records, each of which must come exactly once in the pass.

        Memory that runs out is an error after the first batch, because the records before were seen in pieces of another
        size; the next pass takes half of it.
        """
        self._check_whole()
        bench, before = self._bench, self.records
        self._in_part = True  # until all of it was added: whoever tries again would count some records twice

        def once() -> None:
            if before == 0:  # whatever an attempt that ran out of memory has added
                self.records, self._total = 0, self._empty()
            self._pad_to = bench.pieces.padded(None)
            stream = loaders.pieces_of(inputs, targets, bench.pieces.step, bench.device, bench.dtype)
            first = next(stream, None)
            if first is None:
                return
            bench.prepare(*first)
            self.add_pieces(bench.seen(itertools.chain([first], stream)))

        bench.in_memory(once, None, "loader", restart=before == 0)
        self._in_part = False

    def _check_whole(self) -> None:
        """Raise where a batch was added in part."""
        if self._in_part:
            raise RuntimeError("a batch of this pass was added in part, and would count twice: begin another pass")

    def add_pieces(self, stream: Iterable[tuple[Any, Tensor]]) -> None:
        """Add pieces of batches that are on the model's device."""
        curvature = self._bounds.max_curvature > 0
        for inputs, targets, size in self._bench.few(iter(stream), self._pad_to):
            if curvature:
                self.add_quadratics([self._bench.quadratics(inputs, targets, curvature=True, pad_to=size)])
            else:
                self._total.add_gradients(self._bench.gradients(inputs, targets, size))
                self._visited(len(targets))

    def add_quadratics(self, found: Iterable[RecordQuadratics]) -> None:
        """Add records whose quadratics were computed before."""
        for records in found:
            self._total.add(records)
            self._visited(len(records.gradients))

    def _visited(self, count: int) -> None:
        """Note that records were added."""
        self.records += count
        if self._file is not None:
            self._file.add(self._total, count)

    def sums(self) -> ClippedSums:
        """The sums so far, of this rank's records."""
        self._check_whole()
        return self._total.result()

    def result(self, expected: int | None = None) -> Statistics:
        """Statistics of all ranks' records, once it is certain that every record was visited on exactly one."""
        sums, ranks = self.sums(), self._ranks
        if ranks.count > 1:
            ranks.same(lambda: {"the kind of curvature": (sums.parallel, sums.rank, sums.curvature is None)})
            numbers = ranks.summed(torch.cat([sums.packed(), torch.tensor([self.records], dtype=torch.float64)]))
            if int(numbers[-1]) != expected:
                raise ValueError("loader did not give every record to exactly one rank; nothing was released")
            sums = sums.with_packed(numbers[:-1])
        return self._bench.statistics(sums, self._bounds, self._nominal_size, ranks.random_name())


def full_space(model: nn.Module, measurement: Measurement) -> Workbench:
    """A workbench for rows of all parameters, on few records at a time."""
    size = sum(p.numel() for p in check_module(model).parameters() if p.requires_grad)
    records = min(256, max(16, _WIDE_BYTES // (16 * 8 * size)))
    wide = replace(measurement, subspace=Sparse(seed=0), proj_dim=None, views=None)
    return Workbench(model, wide, loaders.Pieces(records))


def _joined(norms: list[dict[str, Array]]) -> dict[str, Array]:
    """The norms of all batches in one array for each bound."""
    return {name: np.concatenate([n[name] for n in norms]) for name in norms[0]}


def _norms(records: RecordQuadratics) -> dict[str, Array]:
    """Each record's norms, by the bound they are for; private if the records are."""
    return {
        "max_grad_norm": records.gradient_norms.cpu().numpy(),
        "max_curvature": records.curvature_norms.cpu().numpy(),
    }


def _part(loader: DataLoader[Any], ranks: Ranks, start: int | None = None) -> DataLoader[Any]:
    """A loader of this rank's records, from ``start`` on in the data set's order. One rank alone keeps its loader."""
    if ranks.count == 1 and start is None:
        return loader
    return loaders.part_of(loader, rank=ranks.rank, ranks=ranks.count, start=start or 0)
