"""What is learned from public records before private ones are touched.

**Privacy:** a function of public records.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.utils.data import DataLoader

from opacus_expm.gathering import loaders
from opacus_expm.gathering.measurement import Measurement
from opacus_expm.gathering.passes import PublicRecords
from opacus_expm.gathering.ranks import Ranks
from opacus_expm.subspaces import Subspace


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
