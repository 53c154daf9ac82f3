"""Where each trainable parameter lives in the flat vector of all of them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from opacus_expm import _check


@dataclass(frozen=True)
class Layout:
    """Where each trainable parameter lives in the flat vector θ ∈ R^p.

    A parameter shared by several modules counts once, under its first name.
    """

    names: tuple[str, ...]
    shapes: tuple[torch.Size, ...]
    offsets: tuple[int, ...]
    size: int

    @classmethod
    def of(cls, module: nn.Module) -> Layout:
        """The layout of the parameters with ``requires_grad``, in the order of ``named_parameters``."""
        named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        sizes = [p.numel() for _, p in named]
        offsets = tuple(sum(sizes[:i]) for i in range(len(sizes)))
        return cls(tuple(n for n, _ in named), tuple(p.shape for _, p in named), offsets, sum(sizes))

    def slices(self) -> Iterator[tuple[str, torch.Size, slice]]:
        """Name, shape and place of every parameter."""
        for name, shape, start in zip(self.names, self.shapes, self.offsets, strict=True):
            yield name, shape, slice(start, start + math.prod(shape))

    def spread(self, argument: str, values: Mapping[str, float]) -> Tensor:
        """Positive numbers by parameter name, one for each coordinate (p,); 1 where none is given.

        Raises:
            TypeError, ValueError: no such numbers, or names of no trainable parameter.
        """
        if not isinstance(values, Mapping):
            raise TypeError(
                f"{argument} must be a mapping from names of parameters to numbers, got {type(values).__name__}"
            )
        unknown = [name for name in values if name not in self.names]
        if unknown:
            raise ValueError(
                f"{argument} names {unknown[0]!r}, which is no trainable parameter of the model; it has "
                f"{', '.join(self.names)}"
            )
        found = torch.ones(self.size, dtype=torch.float64)
        for name, _, place in self.slices():
            found[place] = _check.positive(f"{argument}[{name!r}]", values.get(name, 1.0))
        return found
