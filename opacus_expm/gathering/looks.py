"""What a private loader shows of a workbench's model beside its gradients: losses, and quadratics in a small span.

**Privacy:** everything here is private, one number or a few for every record; see who calls it for what is released.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from opacus_expm._private import PrivateValues
from opacus_expm.gathering.clipping import at_outputs, padded, values_at_outputs
from opacus_expm.gathering.factors import FactorSums, factor_sums
from opacus_expm.gathering.hooks import ProjectedGradSampleModule
from opacus_expm.gathering.model import ran_out_of_memory
from opacus_expm.gathering.passes import Workbench
from opacus_expm.mechanism.density import Array
from opacus_expm.subspaces.metric import Block

Few = Iterator[tuple[Any, Tensor, int | None]]


@dataclass(frozen=True, eq=False, repr=False)
class SpanQuadratics(PrivateValues):
    """g′ (n, s) and H′ (n, s, s) of every record in the span of s directions; private."""

    gradients: Tensor
    curvatures: Tensor


def _few(bench: Workbench, loader: DataLoader[Any]) -> Few:
    """All records, a few at a time, and to how many these are filled up."""
    return bench.few(bench.begin(loader, "loader"), bench.pieces.padded(loader))


def prepare(bench: Workbench, loader: DataLoader[Any], number: Callable[[Tensor, Tensor], Tensor] | None = None) -> int:
    """Choose gatherer and criterion by the loader's first batch; the number of outputs m.

    What cannot be right raises here, before anything is charged: by the criterion, or by ``number`` of outputs and targets.
    """

    def once() -> int:
        inputs, targets = next(iter(bench.begin(loader, "loader")))
        source, loss = bench.prepared
        with torch.no_grad():
            outputs, _ = source.outputs_and_pullback(padded(inputs, targets, bench.pieces.padded(loader))[0])
        if number is not None:
            number(outputs[: len(targets)], targets)
            return outputs.shape[-1]
        at_outputs(loss, outputs[: len(targets)], targets)
        loss.basis(outputs.shape[-1])
        return outputs.shape[-1]

    return bench.in_memory(once, loader, "loader")


def blocks(bench: Workbench) -> tuple[Block, ...]:
    """The layers that are matrices, where hooks serve the model; none otherwise."""
    hooked = isinstance(bench.prepared[0], ProjectedGradSampleModule)
    return tuple(bench.blocks().values()) if hooked else ()


def factors(bench: Workbench, loader: DataLoader[Any], random: np.random.Generator) -> FactorSums:
    """Kronecker factors of the layers, over all records; ``random`` draws a cotangent for each."""

    def once() -> FactorSums:
        stream = _few(bench, loader)
        return factor_sums(_hooked(bench), bench.blocks(), bench.prepared[1], stream, random)

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


def span_quadratics(bench: Workbench, loader: DataLoader[Any], place: Tensor, directions: Tensor) -> SpanQuadratics:
    """Gradient and Gauss-Newton matrix of every record at ξ along directions (k, s).

    Where hooks serve the model: by a backward pass where one combination of the outputs says all (two classes, one number),
    else by s forward-mode products in one pass where every operation has them. Otherwise by the rows of the Jacobian. A
    record whose gradient or matrix is not finite has zeros in both.
    """
    columns = directions.to(bench.device, bench.dtype)

    def once() -> SpanQuadratics:
        bench.move(place)
        gradients, curvatures = [], []
        stream = bench.begin(loader, "loader")
        basis, lifted = _one_row(bench), torch.stack([bench.map.lift(column) for column in columns.unbind(1)])
        times = 1 if basis is not None else len(lifted)
        for inputs, targets, size in bench.few(stream, bench.pieces.padded(loader), times):
            filled, repeated = padded(inputs, targets, size)
            if basis is None:
                outputs, rows = _products(bench, filled, lifted, columns)
                gradient, factor = at_outputs(bench.prepared[1], outputs, repeated)
            else:
                outputs, rows = _hooked(bench).outputs_and_row(filled, basis[0], lifted)
                gradient, factor = at_outputs(bench.prepared[1], outputs, repeated)
                gradient, factor, rows = gradient @ basis.T, basis @ factor, rows[:, None]  # in the basis' coordinate
            rows = rows.double()  # J along the directions (B, …, m, s)
            g = (gradient[..., None] * rows).flatten(1, -2).sum(1)
            b = (factor.transpose(-1, -2) @ rows).flatten(1, -2)  # J → B = MᵀJ, whose square is H′
            g, h = g[: len(targets)], (b.transpose(1, 2) @ b)[: len(targets)]
            sound = g.isfinite().all(1) & h.isfinite().flatten(1).all(1)
            gradients.append(torch.where(sound[:, None], g, 0.0).cpu())
            curvatures.append(torch.where(sound[:, None, None], h, 0.0).cpu())
        return SpanQuadratics(torch.cat(gradients), torch.cat(curvatures))

    return bench.in_memory(once, loader, "loader")


def _hooked(bench: Workbench) -> ProjectedGradSampleModule:
    """The bench's gatherer, which is known to be hooks."""
    source = bench.prepared[0]
    assert isinstance(source, ProjectedGradSampleModule)
    return source


def _one_row(bench: Workbench) -> Tensor | None:
    """The one combination of the outputs (1, m) that spans their gradients, where there is one and hooks serve."""
    outputs = bench.on_synthetic
    if outputs is None or outputs.dim() != 2 or not isinstance(bench.prepared[0], ProjectedGradSampleModule):
        return None
    basis = bench.prepared[1].basis(outputs.shape[1]).to(outputs.device)
    return basis if len(basis) == 1 else None


def _products(bench: Workbench, inputs: Any, lifted: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs (B, …) and their derivatives along each direction (B, …, s); these are (s, p) or, before the map, (k, s)."""
    source = bench.prepared[0]
    if isinstance(source, ProjectedGradSampleModule):
        tangents = {name: lifted[:, place].view(-1, *shape) for name, shape, place in bench.layout.slices()}
        try:
            return source.outputs_and_products(inputs, tangents)
        except (NotImplementedError, RuntimeError) as error:
            if ran_out_of_memory(error):
                raise  # otherwise an operation of the model has no forward mode: its rows serve as well
    outputs, pullback = source.outputs_and_pullback(inputs)
    count = outputs[0].numel()
    every = torch.eye(count, dtype=outputs.dtype, device=outputs.device).view(count, *outputs.shape[1:])
    rows = pullback(every.expand(len(outputs), *every.shape)) @ columns
    return outputs, rows.view(*outputs.shape, -1)
