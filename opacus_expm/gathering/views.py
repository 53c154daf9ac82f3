"""Several views of each record: its loss is the mean over them, clipped as one.

A digit shifted by a pixel is still that digit. With V views x_i1, …, x_iV of record i,

    ℓ_i(θ) = (1/V) Σ_v ℓ(f(x_iv, θ), y_i),

so that g_i and H_i are means over the views. What is peculiar to one view averages out of g_i, while what all records have
in common stays: the clipped sum has more signal for the same bound, at the price of V times the work. (De, Berrada, Hayes,
Smith, Balle 2022, *Unlocking high-accuracy differentially private image classification through scale*, for DP-SGD.)

To the sums a record with views is a short sequence with the same target at every place.

**Privacy:** that of the record itself: the mean is clipped after it was taken, so one record moves the sums by no more than
without views. It needs that the views of a record depend on that record alone, and on randomness of their own: a function
that draws random numbers is called for one record after the other (``opacus_expm.gathering.randomness``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils import _pytree as pytree

from opacus_expm.gathering.clipping import RowSource
from opacus_expm.gathering.independence import DependentRecords, check_mixing, may_branch, together
from opacus_expm.gathering.model import take
from opacus_expm.gathering.randomness import Generators

Views = Callable[[Any], Sequence[Any]]


def check_views(views: object) -> None:
    """Raise unless ``views`` is None or a function."""
    if views is not None and not callable(views):
        raise TypeError(f"views must be a function from a batch of inputs to a list of them, got {views!r}")


def with_views(views: Views, inputs: Any, targets: Tensor) -> tuple[Any, Tensor]:
    """A batch of records as a batch of their views: tensors (B, …) become (B, V, …), inputs and targets alike.

    Raises:
        ValueError: ``views`` gave none, or not one of each record. The message holds no values.
    """
    found = views(inputs)
    wanted = "a list with at least one batch like the one it got, a row a record"
    if not isinstance(found, list | tuple) or not found:
        raise ValueError(f"views must give {wanted}, got {type(found).__name__}")
    structure = pytree.tree_structure(inputs)
    if any(pytree.tree_structure(view) != structure for view in found):
        raise ValueError(f"views must give {wanted}, got another structure")
    stacked = []
    for original, *seen in zip(pytree.tree_leaves(inputs), *map(pytree.tree_leaves, found), strict=True):
        if not isinstance(original, Tensor):
            stacked.append(original)
            continue
        if any(
            not isinstance(v, Tensor) or v.shape[:1] != original.shape[:1] or v.shape != seen[0].shape for v in seen
        ):
            raise ValueError(f"views must give {wanted}, got tensors of another length or of several shapes")
        stacked.append(torch.stack(seen, dim=1))
    return pytree.tree_unflatten(stacked, structure), torch.stack([targets] * len(found), dim=1)


def with_own_views(views: Views, generators: Generators, inputs: Any, targets: Tensor) -> tuple[Any, Tensor]:
    """``with_views``, for each record by itself where numbers are drawn: records must not share what is drawn for one."""
    before = generators.states()
    whole, repeated = with_views(views, inputs, targets)
    if not generators.drawn_since(before):
        return whole, repeated
    alone = [with_views(views, take(inputs, slice(i, i + 1)), targets[i : i + 1])[0] for i in range(len(targets))]
    shapes = {tuple(leaf.shape for leaf in pytree.tree_leaves(view) if isinstance(leaf, Tensor)) for view in alone}
    if len(shapes) > 1:
        raise ValueError("views must give tensors of one shape for every record, got several; resize them to one")
    return together(alone), repeated


def check_each_alone(views: Views, example: Any) -> None:
    """Raise unless the views of a record are made from that record alone (see ``independence``).

    Args:
        views: the user's function.
        example: inputs of one record, with a batch dimension of one; shapes and types are all that is used.

    Raises:
        ValueError: records see each other, or ``views`` gave something else than views. The message holds no values.
    """

    def run(inputs: Any) -> list[Tensor]:
        count = next(len(t) for t in pytree.tree_leaves(inputs) if isinstance(t, Tensor))
        seen = with_views(views, inputs, torch.zeros(count))[0]
        return [leaf for leaf in pytree.tree_leaves(seen) if isinstance(leaf, Tensor)]

    try:
        check_mixing(run, example, branches=may_branch(run, example))
    except DependentRecords as error:
        raise ValueError(
            f"views must treat every record alone, and do not: {error}; make each view from the record itself and from "
            "random numbers"
        ) from error


def pixel_shifts(images: Tensor) -> list[Tensor]:
    """Images (…, height, width) as they are and shifted by one pixel in four directions; what comes in repeats the edge."""
    height, width = images.shape[-2:]
    flat = images.reshape(-1, 1, height, width)
    wide = functional.pad(flat, (1, 1, 1, 1), mode="replicate").reshape(*images.shape[:-2], height + 2, width + 2)
    places = ((1, 1), (0, 1), (2, 1), (1, 0), (1, 2))
    return [wide[..., y : y + height, x : x + width] for y, x in places]


class EachView:
    """A way to find rows for batches (B, V, …) of views: outputs are (B, V, m), and rows are added up over the views."""

    def __init__(self, source: RowSource):
        self.source = source

    def outputs_and_pullback(self, inputs: Any) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """Outputs (B, V, m) and a function from cotangents (B, r, V, m) to rows (B, r, k)."""
        tensors = [leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor)]
        shape = tensors[0].shape[:2]
        flat = pytree.tree_map(lambda t: t.flatten(0, 1) if isinstance(t, Tensor) else t, inputs)
        outputs, pullback = self.source.outputs_and_pullback(flat)
        if outputs.dim() != 2:
            raise ValueError(
                f"views need a model with outputs (batch, outputs), got {outputs.dim()} dimensions; leave views out"
            )

        def summed(cotangents: Tensor) -> Tensor:
            rows = pullback(cotangents.transpose(1, 2).flatten(0, 1))
            return rows.reshape(*shape, *rows.shape[1:]).sum(1)

        return outputs.reshape(*shape, -1), summed
