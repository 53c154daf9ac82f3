"""Where the clipping bounds C_g and C_H come from without looking at the private data.

They may be given, or measured on public data, such as the pretraining set: quantiles of |g_i| and ‖H_i‖₂ there.
**Privacy:** a bound measured here is public because the data is. Never pass private data as public.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from opacus_expm.criteria import Criterion
from opacus_expm.sums import RowSource, record_quadratics

GRADIENT_QUANTILE = 0.8
CURVATURE_QUANTILE = 0.5


def public_bounds(
    source: RowSource,
    criterion: Criterion,
    pass_over: Iterable[tuple[Any, Tensor]],
    *,
    curvature: bool,
    curvature_samples: int | None = None,
    pad_to: int | None = None,
) -> tuple[float, float]:
    """The 80 % quantile of |g_i| and the median of ‖H_i‖₂ (0 without curvature) over public data.

    Clipping a fifth of the gradients costs little; curvature is clipped harder, because its bound enters the noise
    together with the radius while an underestimate is made good by the ridge.
    """
    gradient_norms, curvature_norms = [], []
    for inputs, targets in pass_over:
        records = record_quadratics(
            source,
            criterion,
            inputs,
            targets,
            curvature=curvature,
            curvature_samples=curvature_samples,
            pad_to=pad_to,
        )
        gradient_norms.append(records.gradient_norms)
        curvature_norms.append(records.curvature_norms)
    gradient = float(np.quantile(torch.cat(gradient_norms).cpu().numpy(), GRADIENT_QUANTILE))
    bound = float(np.quantile(torch.cat(curvature_norms).cpu().numpy(), CURVATURE_QUANTILE))
    return gradient, bound
