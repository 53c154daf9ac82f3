"""Where each trainable parameter lives in the flat vector of all of them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn


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
