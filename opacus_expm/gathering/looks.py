"""What a loader shows of a workbench's model beside its gradients: curvature, norms, losses and errors.

With views, the gradients' norms are those of the means over a record's views, which are what is clipped. Everything else is
of the records as they are, which is what the model is going to be used on and takes a pass of one view.

**Privacy:** everything here is private where the loader is, one number or a few for every record; see who calls it for what
is released.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from opacus_expm.gathering.clipping import at_outputs, padded, values_at_outputs
from opacus_expm.gathering.criteria import undecided
from opacus_expm.gathering.factors import FactorSums, factor_sums, random_cotangent
from opacus_expm.gathering.hooks import ProjectedGradSampleModule
from opacus_expm.gathering.passes import Workbench
from opacus_expm.mechanism.choices import Source
from opacus_expm.mechanism.density import Array
from opacus_expm.subspaces.metric import Block

Few = Iterator[tuple[Any, Tensor, int | None]]


def _few(bench: Workbench, loader: DataLoader[Any], name: str = "loader") -> Few:
    """All records, a few at a time, and to how many these are filled up."""
    return bench.few(bench.begin(loader, name), bench.pieces.padded(loader))


def prepare(bench: Workbench, loader: DataLoader[Any], number: Callable[[Tensor, Tensor], Tensor] | None = None) -> int:
    """Choose gatherer and criterion by the loader's first batch; the number of outputs m.

    What cannot be right raises here, before anything is charged: by the criterion, or by ``number`` of outputs and targets.
    """

    def once() -> int:
        size, first = 0, next(iter(bench.begin(loader, "loader")))
        source, loss = bench.prepared
        for inputs, targets, count in bench.few(iter([first]), bench.pieces.padded(loader)):
            outputs = source.outputs_and_pullback(padded(inputs, targets, count)[0])[0]  # and without the graph
            size = outputs.shape[-1]
            if number is not None:
                number(outputs[: len(targets)], targets)
                continue
            at_outputs(loss, outputs[: len(targets)], targets)
            loss.basis(size)
        return size

    return bench.in_memory(once, loader, "loader")


def blocks(bench: Workbench) -> tuple[Block, ...]:
    """The layers that are matrices, where hooks serve the model; none otherwise."""
    hooked = isinstance(bench.plain().prepared[0], ProjectedGradSampleModule)
    return tuple(bench.blocks().values()) if hooked else ()


def factors(bench: Workbench, loader: DataLoader[Any], random: Source, *, public: bool = False) -> FactorSums:
    """Kronecker factors of the layers, over all records; ``random`` draws a cotangent for each.

    A model is too sure of public records that it was trained on: a loss of classes hardly curves there, and steps on other
    records would be too long. So the curvature of ``public`` records is that of a model that knows nothing.
    """
    name, bench = "public_loader" if public else "loader", bench.plain()

    def once() -> FactorSums:
        stream = _few(bench, loader, name)
        source, loss = bench.prepared
        assert isinstance(source, ProjectedGradSampleModule)
        return factor_sums(source, bench.blocks(), undecided(loss) if public else loss, stream, random)

    return bench.in_memory(once, loader, name)


def traces(bench: Workbench, loader: DataLoader[Any], random: Source) -> Array:
    """|JᵀMz|² of every record, z ~ N(0, I) from ``random``: in the mean the trace of its Gauss-Newton matrix JᵀMMᵀJ."""
    bench = bench.plain()

    def once() -> Array:
        found = []
        for inputs, targets, size in _few(bench, loader):
            filled, repeated = padded(inputs, targets, size)
            outputs, pullback = bench.prepared[0].outputs_and_pullback(filled)
            cotangent = random_cotangent(bench.prepared[1], outputs, repeated, len(targets), random)
            rows = pullback(cotangent[:, None])
            found.append(rows[: len(targets), 0].double().square().sum(1).cpu())
        return torch.cat(found).nan_to_num(0.0, 0.0, 0.0).numpy()

    return bench.in_memory(once, loader, "loader")


def gradient_norms(bench: Workbench, loader: DataLoader[Any]) -> Array:
    """|g| of every record; 0 for one that is not finite."""

    def once() -> Array:
        found = [bench.gradients(inputs, targets, size).norms for inputs, targets, size in _few(bench, loader)]
        return torch.cat(found).cpu().numpy()

    return bench.in_memory(once, loader, "loader")


def losses_here(bench: Workbench, loader: DataLoader[Any]) -> Tensor:
    """ℓ of every record (n,) where the bench is."""
    return _of_outputs(bench, loader, lambda outputs, targets: values_at_outputs(bench.prepared[1], outputs, targets))


def errors(bench: Workbench, loader: DataLoader[Any]) -> Tensor:
    """1 for every record (n,) that is given another class than its own, else 0 (see ``wrong``)."""
    return _of_outputs(bench, loader, wrong)


def wrong(outputs: Tensor, targets: Tensor) -> Tensor:
    """1 for every record of a batch that is given another class than its own, else 0; for a sequence, how many of them.

    The class is the largest of several outputs, or the sign of a single one; targets are numbers of classes or one-hot.

    Raises:
        ValueError: targets of another shape, of which it would not be known what belongs to which record.
    """
    single = outputs.shape[-1] == 1 and targets.shape in (outputs.shape, outputs.shape[:-1])
    if single:
        found = (outputs > 0) != (targets.reshape(outputs.shape) > 0.5)
    elif targets.shape == outputs.shape:
        found = outputs.argmax(-1) != targets.argmax(-1)
    elif targets.shape == outputs.shape[:-1]:
        found = outputs.argmax(-1) != targets
    else:
        raise ValueError(
            f"target has shape {tuple(targets.shape)} where errors of outputs {tuple(outputs.shape)} need classes of shape "
            f"{tuple(outputs.shape[:-1])}, or one-hot rows in the shape of the outputs"
        )
    return found.double().reshape(len(outputs), -1).mean(1)


def _of_outputs(bench: Workbench, loader: DataLoader[Any], number: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """A number for every record, from its outputs and its target."""

    def once() -> Tensor:
        found = []
        for inputs, targets, size in _few(bench, loader):
            filled, repeated = padded(inputs, targets, size)
            outputs, _ = bench.prepared[0].outputs_and_pullback(filled)
            found.append(number(outputs, repeated)[: len(targets)].double().cpu())
        return torch.cat(found)

    return bench.in_memory(once, loader, "loader")


def losses(bench: Workbench, loader: DataLoader[Any], places: Sequence[Tensor]) -> Tensor:
    """ℓ of every record at several places ξ (n, places), not finite where it is not; the bench stays at the last."""
    bench = bench.plain()
    updates = [bench.lifted(place) for place in places]

    # In one pass: a loader that shuffles has another order in the next, and a row would be of several records.
    def once() -> Tensor:
        found = []
        for inputs, targets, size in _few(bench, loader):
            filled, repeated = padded(inputs, targets, size)
            columns = []
            for update in updates:
                bench.shift(update)
                outputs, _ = bench.prepared[0].outputs_and_pullback(filled)
                columns.append(values_at_outputs(bench.prepared[1], outputs, repeated)[: len(targets)].double().cpu())
            found.append(torch.stack(columns, dim=1))
        return torch.cat(found)

    return bench.in_memory(once, loader, "loader")


def gains(bench: Workbench, loader: DataLoader[Any], places: Sequence[Tensor], most: float) -> Array:
    """Σ_i clip(ℓ_i(first place) − ℓ_i(place), ±B) for every place; what cannot be compared counts as the worst."""
    values = losses(bench, loader, places)
    found: Array = (values[:, :1] - values).nan_to_num(-most, most, -most).clamp(-most, most).sum(0).numpy()
    return found
