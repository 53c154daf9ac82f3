"""What is learned from public records before private ones are touched.

**Privacy:** a function of public records.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from opacus_expm.bounds import Bounds
from opacus_expm.gathering import loaders
from opacus_expm.gathering.measurement import Measurement
from opacus_expm.gathering.passes import PublicRecords, Workbench
from opacus_expm.gathering.ranks import Ranks
from opacus_expm.subspaces import Preconditioned, Subspace


def taught(model: nn.Module, measurement: Measurement, public_loader: DataLoader[Any] | None, ranks: Ranks) -> Subspace:
    """The subspace's recipe with what it learns from public data, the same on every rank."""
    subspace = measurement.subspace
    if not subspace.needs_public_data:
        return subspace
    assert public_loader is not None
    loaders.check_loader(public_loader, "public_loader")
    found = PublicRecords.of(model, measurement, public_loader).teach(subspace)
    ranks.adopt([t for t in found.to_dict().get("curvature", {}).values() if isinstance(t, Tensor)])
    return found


def public_metric(
    model: nn.Module,
    public_loader: DataLoader[Any],
    measurement: Measurement,
    damping_share: float,
    quantile: float,
    ranks: Ranks,
) -> dict[str, Any]:
    """Arguments of ``make_private_expm`` for a metric and a bound; see ``ExpMQuadEngine.public_metric``."""
    learned = taught(model, measurement, public_loader, ranks)
    assert isinstance(learned, Preconditioned)
    assert learned.curvature is not None
    learned = replace(learned, damping=damping_share * float(learned.curvature.eigenvalues[0]))
    bench = Workbench(model, replace(measurement, subspace=learned.seeded(0)))
    bounds = Bounds(None, 0.0).measured(bench, public_loader, {"max_grad_norm": quantile})
    bound = torch.tensor([bounds.max_grad_norm], dtype=torch.float64)
    return {
        "projection": learned,
        "max_grad_norm": float(ranks.from_leader(bound)),  # ranks may round differently
        "max_curvature": 0.0,
    }
