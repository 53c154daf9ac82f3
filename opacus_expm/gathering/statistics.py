"""``Statistics``: what one pass over the private data leaves behind."""

from __future__ import annotations

import copy
import hashlib
import os
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor, nn

from opacus_expm import _check, subspaces
from opacus_expm._private import PrivateValues
from opacus_expm._warnings import warn
from opacus_expm.accounting.events import BOUNDS
from opacus_expm.gathering.clipping import ClippedSums
from opacus_expm.gathering.files import read_private, write_private
from opacus_expm.gathering.model import check_module, compute_dtype, digest, moved, tensor_digest
from opacus_expm.mechanism.density import Array, BallGaussian
from opacus_expm.subspaces import Projection, Subspace
from opacus_expm.subspaces.layout import Layout

_KIND = "private statistics"
_FINGERPRINT = 1000  # coordinates, or half as many more


@dataclass(frozen=True, repr=False, eq=False)
class Statistics(PrivateValues):
    """What one pass over the private data left behind: enough to release models at any ε and radius.

    Statistics that were gathered apart, in several hospitals or by several jobs, add up to those of all their records:

        statistics.save_private(path)                                  # where the records are
        Statistics.load_private(path, model).merge(other, third)       # where the release is drawn

    **Privacy:** private data. ``repr`` shows shapes and bounds only, and pickling is refused.
    """

    module: nn.Module
    layout: Layout
    projection: Projection
    subspace: Subspace
    proj_dim: int | None
    sums: ClippedSums
    nominal_size: int
    bounds: str
    criterion: str
    probes: int | None
    views: str | None  # what the function is called
    shards: frozenset[str]  # one random name for each pass that took part
    receipts: frozenset[str] = frozenset()  # of the bounds that were bought, for the ledger that paid (see Purchase)

    @cached_property
    def _spectrum(self) -> tuple[Array, Array | None, Array]:
        """Eigenvalues and eigenvectors of S, and G in that basis; S = 0 needs no rotation."""
        gradient = self.sums.gradient.cpu().numpy()
        if self.sums.curvature is None:
            return np.zeros_like(gradient), None, gradient
        values, vectors = np.linalg.eigh(self.sums.curvature.cpu().numpy())
        return values, vectors, vectors.T @ gradient

    def density(self, inverse_temperature: float, radius: float, regularization: float) -> BallGaussian:
        """The mechanism's density exp(−c[ξᵀG + ½ξᵀSξ + ½λN|ξ|²]) on |ξ| ≤ R; private."""
        values, vectors, gradient = self._spectrum
        precision = inverse_temperature * (np.clip(values, 0.0, None) + regularization * self.nominal_size)
        return BallGaussian(precision, -inverse_temperature * gradient, radius, vectors)

    def module_at(self, coordinates: Array) -> nn.Module:
        """The plain module with parameters θ* + Aξ."""
        return moved(self.module, self.layout, self.projection.lift(torch.from_numpy(coordinates)))

    @cached_property
    def configuration(self) -> dict[str, object]:
        """What has to be the same for statistics to be added up: public facts, by name."""
        sums = self.sums
        return {
            "model": digest(self.module),
            "projection": self.subspace.kind,
            "proj_dim": self.proj_dim,
            # No projection of the full space is drawn.
            "projection's seed": self.subspace.seed if self.projection.seed is not None else None,
            "projection's settings": settings_digest(self.subspace),
            "criterion": self.criterion,
            "probes": self.probes,
            "views": self.views,
            "max_grad_norm": sums.max_grad_norm,
            "max_curvature": sums.max_curvature,
            "kind of curvature": [sums.parallel, sums.rank, sums.curvature is None],
        }

    def merge(self, *others: Statistics) -> Statistics:
        """Statistics of the records of all: sums add up, and so do nominal sizes.

        Whoever passes records to two of the passes counts them twice, which cannot be noticed here: parts must be disjoint.

        Args:
            others: gathered with the same model, projection and seed, criterion and bounds, from other records.

        Raises:
            TypeError: not statistics.
            ValueError: what differs, by name; or a pass that would count twice.

        **Privacy:** the result is private data of the union. Its sensitivity to one record is that of each part.
        """
        merged = self
        for other in others:
            if not isinstance(other, Statistics):
                raise TypeError(f"only Statistics can be merged, got {type(other).__name__}")
            mine, theirs = merged.configuration, other.configuration
            differing = [name for name in mine if mine[name] != theirs[name]]
            if differing:
                raise ValueError(
                    f"statistics with another {', '.join(differing)} cannot be merged: gather every part with the same "
                    "model, projection and seed, criterion and bounds"
                )
            if merged.shards & other.shards:
                raise ValueError("these statistics were merged before: every part may count once")
            merged = replace(
                merged,
                sums=merged.sums.plus(other.sums.to(merged.sums.gradient.device)),
                nominal_size=merged.nominal_size + other.nominal_size,
                bounds=max(merged.bounds, other.bounds, key=BOUNDS.index),
                shards=merged.shards | other.shards,
                receipts=merged.receipts | other.receipts,
            )
        return merged

    def save_private(self, path: str | os.PathLike[str]) -> None:
        """Write the statistics, which are private data, to a new file, to be merged or used elsewhere.

        The file holds the sums without any noise, the configuration, the projection's seed and the pass's random name; no
        weights. Only its owner may read it.

        Raises:
            FileExistsError: the file exists.
            ValueError: the bounds were bought, for which the file's reader would have no entry in a ledger.

        **Privacy:** not private; a warning says so.
        """
        if self.bounds == "bought":
            raise ValueError(
                "statistics with bought bounds stay with the engine whose ledger was charged for them: pass max_grad_norm= "
                "and max_curvature=, or public_loader=, to gather what is saved"
            )
        if os.path.exists(path):
            raise FileExistsError(f"{os.fspath(path)!r} exists; choose another path, or delete the file")
        warn(
            f"save_private() writes PRIVATE data to {os.fspath(path)!r}: sums over the private records, without noise; keep "
            "the file where the data is kept, and delete it when it has served",
        )
        write_private(
            path,
            _KIND,
            {
                "configuration": self.configuration,
                "subspace": self.subspace.to_dict(),
                "proj_dim": self.proj_dim,
                "fingerprint": _fingerprint(self.projection),
                "sums": self.sums.to_dict(),
                "nominal_size": self.nominal_size,
                "bounds": self.bounds,
                "criterion": self.criterion,
                "probes": self.probes,
                "views": self.views,
                "shards": sorted(self.shards),
            },
        )

    @classmethod
    def load_private(cls, path: str | os.PathLike[str], model: nn.Module) -> Statistics:
        """Statistics that ``save_private`` wrote, for the model at which they were gathered. No code in the file is run.

        Args:
            path: the file.
            model: with the same weights, and the same of them trainable.

        Raises:
            ValueError: no such file, another model, or a projection that its seed does not give here.

        **Privacy:** the result is private data.
        """
        content = read_private(path, _KIND)
        module = check_module(model)
        layout = Layout.of(module)
        device, dtype = next(module.parameters()).device, compute_dtype(module)
        try:
            if content["configuration"]["model"] != digest(module):
                raise ValueError(
                    "the model has other weights, or others of them are trainable, than where it was gathered"
                )
            subspace, sums = subspaces.read(content["subspace"]), ClippedSums.from_dict(content["sums"])
            projection = subspace.build(layout.shapes, content["proj_dim"], device, dtype)
            if projection.dim != len(sums.gradient) or not torch.allclose(
                _fingerprint(projection), content["fingerprint"], rtol=0, atol=1e-4
            ):
                raise ValueError("the projection's seed does not give the projection with which it was gathered")
            found = cls(
                copy.deepcopy(module),
                layout,
                projection,
                subspace,
                content["proj_dim"],
                sums.to(device),
                _check.positive_int("nominal_size", content["nominal_size"]),
                _check.one_of("bounds", content["bounds"], BOUNDS),
                content["criterion"],
                content["probes"],
                content["views"],
                frozenset(content["shards"]),
            )
            if found.configuration != content["configuration"]:
                raise ValueError("its parts do not fit together")
        except (KeyError, TypeError, AttributeError, RuntimeError) as error:
            raise ValueError(f"{os.fspath(path)!r} does not hold sound statistics") from error
        except ValueError as error:
            raise ValueError(f"{os.fspath(path)!r} cannot be used: {error}") from error
        return found

    def __repr__(self) -> str:
        return (
            f"Statistics(parameters={self.layout.size}, projection={self.projection.kind!r}, "
            f"nominal_size={self.nominal_size}, sums={self.sums!r})"
        )


def _fingerprint(projection: Projection) -> Tensor:
    """A few coordinates of Aξ at a fixed ξ of norm one: enough to notice another projection."""
    coordinates = torch.cos(torch.arange(1, projection.dim + 1, dtype=torch.float64))
    lifted = projection.lift(coordinates / coordinates.norm()).double().cpu()
    return lifted[:: max(1, len(lifted) // _FINGERPRINT)]


def settings_digest(subspace: Subspace) -> str:
    """A digest of what a recipe was made of besides its seed; public."""
    found = hashlib.sha256()

    def add(name: str, value: object) -> None:
        if isinstance(value, dict):
            for part in sorted(value):
                add(f"{name}.{part}", value[part])
        elif name != ".seed":
            found.update(f"{name} {tensor_digest(value) if isinstance(value, Tensor) else value!r} ".encode())

    add("", subspace.to_dict())
    return found.hexdigest()
