"""How far each parameter may move: units of the parameters, from public records shifted as private ones might be.

A draw without private curvature moves the parameters by A(−G/(λN) + noise). A few biases that act on every record hold more
of the signal than of the noise, a large matrix the other way round. A ridge loses least, in mean square, where parameters
are measured in standard deviations of what is to be found. With the public sum G of the shifted records, and ζ ~ N(0, I),
the tensor g is given the unit s_g,

    s_g² ∝ |(AG)_g|² / E|(Aζ)_g|²,    Σ_g s_g² E|(Aζ)_g|² = Σ_g E|(Aζ)_g|²:

signal over noise, for the same noise altogether. Which tensors hold the signal depends on what is different about the
records: noise or contrast speak to first layers and biases, turned images to all layers alike. So the units are as good as
the shift that was simulated.

**Privacy:** a function of public records.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from opacus_expm.subspaces.base import Projection
from opacus_expm.subspaces.layout import Layout

_DRAWS = 64  # of ζ
_FURTHEST = 10.0  # a tensor in which nothing was seen still moves


def measured_scales(
    layout: Layout, projection: Projection, first: Tensor, second: Tensor, *, seed: int = 0
) -> dict[str, float]:
    """The ``scales`` of ``Preconditioned`` from gradients summed over two disjoint sets of public records.

    |(AG)_g|² is larger by what records differ among themselves; (AG)_g·(AG')_g with the sums of either set is not.

    Args:
        layout: of the parameters.
        projection: the map A in which the sums were gathered.
        first: G (k,).
        second: G' (k,).
        seed: of ζ.

    Returns:
        s by parameter name, within 1/10 and 10; 1 where there is nothing to compare.
    """
    one, other = (projection.lift(gradient).double().cpu() for gradient in (first, second))
    generator = torch.Generator().manual_seed(seed)
    noise = torch.zeros(layout.size, dtype=torch.float64)
    for _ in range(_DRAWS):
        draw = torch.randn(projection.dim, generator=generator, dtype=torch.float64)
        noise += projection.lift(draw).double().cpu().square()
    signal_of = {name: max(0.0, float(one[place] @ other[place])) for name, _, place in layout.slices()}
    noise_of = {name: float(noise[place].sum()) for name, _, place in layout.slices()}
    typical = sum(signal_of.values()) / sum(noise_of.values())
    return {
        name: _within(math.sqrt(signal / noise_of[name] / typical)) if typical * noise_of[name] > 0 else 1.0
        for name, signal in signal_of.items()
    }


def _within(scale: float) -> float:
    """The scale, brought to within a factor of ten of 1."""
    return min(max(scale, 1 / _FURTHEST), _FURTHEST)
