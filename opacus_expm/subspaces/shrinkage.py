"""Taking known noise out of a draw: post-processing, which costs no privacy.

Where no private curvature is gathered (C_H = 0), a draw is ξ ~ N(m, s²I) cut to the ball |ξ| ≤ R, with the private mean
m = −G/(λN) and the *public* variance s² = 1/(cλN). In many dimensions most of |ξ|² is noise. For a group of d ≥ 3
orthonormal coordinates, the positive-part James-Stein estimate

    ξ_g ← max(0, 1 − (d − 2)s²/|ξ_g|²) ξ_g

is nearer to m_g in mean square than ξ_g, whatever m_g is (James and Stein 1961; Baranchik 1964). A group that the data
has moved far is left alone; one with nothing but noise goes back to where it was. The groups are fixed by public facts:

* coordinates along eigenvectors of public curvature, in bands of 4, 8, 16, 32, 64, 64, … by falling eigenvalue;
* of the rest of the full space, the parameters of one output (the first index of a weight), or of one bias;
* a random subspace, whose coordinates all mean the same: one group.

**Privacy:** a function of the released draw and of public numbers only (d, s², R, eigenvectors, shapes).
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from opacus_expm.subspaces.layout import Layout

Array = npt.NDArray[np.float64]

_FIRST_BAND, _LARGEST_BAND = 4, 64


def public_variance(
    inverse_temperature: float, regularization: float, nominal_size: int, radius: float, dim: int
) -> float:
    """An upper bound on the variance of one coordinate of a draw without private curvature, from public numbers.

    1/(cλN) without the ball. A ball around the mean leaves E|ξ|² ≤ R²k/(k + 2), that of the uniform density.
    """
    ridge = inverse_temperature * regularization * nominal_size
    uniform = radius**2 / (dim + 2)
    return min(1 / ridge, uniform) if ridge > 0 else uniform


def in_one_group(coordinates: Array, variance: float) -> Array:
    """A draw whose coordinates all mean the same, with noise of variance s² taken out."""
    return _james_stein(coordinates, len(coordinates), variance)


def by_bands(coordinates: Array, variance: float) -> Array:
    """A draw along eigenvectors by falling eigenvalue, in bands that grow, since eigenvalues crowd."""
    result, start, width = np.empty_like(coordinates), 0, _FIRST_BAND
    while start < len(coordinates):
        band = slice(start, start + width)
        result[band] = _james_stein(coordinates[band], len(coordinates[band]), variance)
        start, width = start + width, min(2 * width, _LARGEST_BAND)
    return result


def by_outputs(coordinates: Array, variance: float, layout: Layout) -> Array:
    """A draw in the full space, in groups of the parameters of one output."""
    return _by_outputs(coordinates, np.zeros_like(coordinates), variance, layout)


def along_and_across(coordinates: Array, variance: float, layout: Layout, vectors: Tensor) -> Array:
    """A draw in the full space: by bands along orthonormal vectors (p, rank), by outputs across them."""
    # p × rank: in their own type, not a second time in double precision
    leading = vectors.T @ torch.from_numpy(coordinates).to(vectors)
    kept = torch.from_numpy(by_bands(_array(leading), variance)).to(vectors)
    lost = np.square(_array(torch.linalg.vector_norm(vectors, dim=1)))  # of each parameter's variance
    across = _by_outputs(coordinates - _array(vectors @ leading), lost, variance, layout)
    return _array(vectors @ kept) + across


def _by_outputs(coordinates: Array, lost: Array, variance: float, layout: Layout) -> Array:
    """Shrink by outputs, where a part of the variance was lost to other groups."""
    result = np.empty_like(coordinates)
    for part in _outputs(layout):
        result[part] = _james_stein(coordinates[part], float((1 - lost[part]).sum()), variance)
    return result


def _array(tensor: Tensor) -> Array:
    """The tensor as an array in double precision on the CPU."""
    return tensor.double().cpu().numpy()


def _outputs(layout: Layout) -> Iterator[slice]:
    """The place of each output's weights; a vector is one group."""
    for _, shape, place in layout.slices():
        count = shape[0] if len(shape) > 1 else 1
        width = math.prod(shape) // max(count, 1)
        for start in range(place.start, place.stop, max(width, 1)):
            yield slice(start, start + width)


def _james_stein(group: Array, freedom: float, variance: float) -> Array:
    """The positive-part estimate of the mean of a group with so many degrees of freedom."""
    energy = float(group @ group)
    if freedom <= 2 or energy == 0:
        return group
    return max(0.0, 1 - (freedom - 2) * variance / energy) * group
