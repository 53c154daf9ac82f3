"""A pass over private data that is ready to begin: its workbench, its bounds, and the file that may keep its state."""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from opacus_expm import _check, _warnings
from opacus_expm.accounting.admission import Admission
from opacus_expm.books import Books
from opacus_expm.bounds import Bounds
from opacus_expm.gathering import loaders
from opacus_expm.gathering.clipping import ClippingBounds
from opacus_expm.gathering.files import PassFile
from opacus_expm.gathering.measurement import Measurement
from opacus_expm.gathering.model import check_module
from opacus_expm.gathering.passes import Pass, Remembered, Workbench
from opacus_expm.gathering.ranks import Ranks, described
from opacus_expm.gathering.statistics import Statistics


@dataclass(frozen=True, eq=False)
class Gathering:
    """A pass over the private data that is ready to begin: its workbench and its bounds."""

    bench: Workbench
    bounds: ClippingBounds
    nominal_size: int
    ranks: Ranks
    remembered: Remembered | None = None

    def over(self, loader: DataLoader[Any], kept: PassFile | None = None) -> Statistics:
        """One pass over a loader, whose state may be kept in a file."""
        return self.bench.gather(
            loader, self.bounds, self.nominal_size, self.ranks, remembered=self.remembered, kept=kept
        )

    def file(self, path: str | os.PathLike[str], loader: DataLoader[Any], facts: dict[str, object]) -> PassFile:
        """The file in which this rank keeps the state of its part of the pass, which warns that it is private."""
        if self.bounds.source == "bought":
            raise ValueError(
                "private_checkpoint cannot keep a pass that buys its bounds: pass max_grad_norm= and max_curvature=, or "
                "public_loader="
            )
        ranks = self.ranks
        if ranks.count > 1:
            path = f"{os.fspath(path)}.rank{ranks.rank}of{ranks.count}"
        _warnings.warn(
            f"gather(private_checkpoint=...) keeps PRIVATE data in {os.fspath(path)!r} until the pass is complete: sums "
            "over private records, without noise; delete the file if the pass is given up"
        )
        bounds = {name: getattr(self.bounds, name) for name in ("max_grad_norm", "max_curvature")}
        where = {"loader": (described(loader), loaders.batch_size(loader)), "ranks": (ranks.rank, ranks.count)}
        return PassFile(path, {**facts, **bounds, **where, "max_physical_batch_size": self.bench.pieces.padded(loader)})

    def open(self) -> Pass:
        """A pass whose batches come one by one, from a training loop."""
        return self.bench.open(self.bounds, self.nominal_size, self.ranks, self.bench.pieces.padded(None))


def ready(
    model: nn.Module,
    loader: DataLoader[Any],
    measurement: Measurement,
    bounds: Bounds | ClippingBounds,
    books: Books,
    *,
    public_loader: DataLoader[Any] | None,
    epsilon: float | None,
    admission: Admission | None = None,
    pieces: loaders.Pieces | None = None,
    number: int = 0,
) -> Gathering:
    """Everything that comes before a pass: the map of this round, and bounds, which may be measured or bought.

    Args:
        model: where the pass is made.
        loader: the private data.
        measurement: what is computed.
        bounds: as asked for; or as an earlier round settled them.
        books: that purchases are written into.
        public_loader: public data, or None.
        epsilon: ε of which a part may buy bounds, or None.
        admission: of the plan that purchases belong to.
        pieces: records at a time.
        number: of the round, from 0.
    """
    subspace = measurement.subspace
    seed = (
        int(books.ranks.from_leader(torch.tensor([secrets.randbits(63)])))
        if subspace.seed is None
        else subspace.seed + number
    )
    quiet = measurement if books.ranks.leads else replace(measurement, progress=False)
    bench = Workbench(model, replace(quiet, subspace=subspace.seeded(seed)), pieces)
    bench.check_curvature(bounds.max_curvature)
    size = measurement.size_of(loaders.check_loader(loader))
    remembered = None
    if isinstance(bounds, ClippingBounds):
        settled = bounds
    elif bounds.missing and public_loader is not None:
        settled = bounds.measured(bench, public_loader)
        numbers = torch.tensor([settled.max_grad_norm, settled.max_curvature], dtype=torch.float64)
        c_g, c_h = books.ranks.from_leader(numbers).tolist()  # ranks may round differently
        settled = replace(settled, max_grad_norm=c_g, max_curvature=c_h)
    elif bounds.missing and epsilon is not None:
        books.check()
        settled, remembered = bounds.bought(bench, loader, _check.positive("epsilon", epsilon), size, books, admission)
    else:
        settled = bounds.given()
    return Gathering(bench, settled, size, books.ranks, remembered)


def gathered(
    model: nn.Module,
    loader: DataLoader[Any],
    measurement: Measurement,
    bounds: Bounds,
    books: Books,
    *,
    public_loader: DataLoader[Any] | None,
    epsilon: float | None,
    private_checkpoint: str | os.PathLike[str] | None,
) -> Statistics:
    """One pass by itself; the arguments are those of ``ready``, and the file in which the pass keeps its state.

    **Privacy:** the result is private data; bounds that are bought are charged.
    """
    if private_checkpoint is not None and measurement.subspace.seed is None:
        raise ValueError(
            "projection must have a seed with private_checkpoint, such as Sparse(seed=0): a pass goes on in one subspace"
        )

    def facts(measured: Measurement) -> dict[str, object]:
        known = {"model": described(check_module(model)), "epsilon": epsilon, **vars(bounds)}
        return {**known, **measured.facts(), "public_loader": described(public_loader)}

    books.same(lambda: {"loader": described(loader), **facts(measurement)})
    if public_loader is not None:  # before anything is measured on it
        loaders.check_public(public_loader, loaders.check_loader(loader))
    gathering = ready(model, loader, measurement, bounds, books, public_loader=public_loader, epsilon=epsilon)
    if private_checkpoint is None:
        return gathering.over(loader)
    kept = gathering.file(private_checkpoint, loader, facts(gathering.bench.measurement))
    return gathering.over(loader, kept=kept)
