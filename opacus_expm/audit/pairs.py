"""Data as bad as the clipping bounds allow: records at the bounds, and pairs of neighbouring data sets made of them."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from opacus_expm import _check
from opacus_expm.mechanism.density import Array, BallGaussian
from opacus_expm.mechanism.privacy_loss import PrivacyLoss
from opacus_expm.mechanism.sensitivity import ADJACENCIES, Sensitivity

_OVERSHOOT = 10.0  # records are made this many times larger than their bounds, so that clipping has to work
_FAINT = 1e-6  # size of a Jacobian row that carries a gradient and (nearly) no curvature


@dataclass(frozen=True)
class Setting:
    """The public numbers of one release, for audits that make their own data; as for an engine and its call."""

    epsilon: float = 1.0
    delta: float = 0.0
    adjacency: str = "add_remove"
    radius: float = 0.7
    max_grad_norm: float = 1.3
    max_curvature: float = 4.0
    regularization: float = 0.0
    nominal_size: int = 100
    proj_dim: int = 2

    def __post_init__(self) -> None:
        _check.one_of("adjacency", self.adjacency, ADJACENCIES)
        _check.positive("max_grad_norm", self.max_grad_norm)
        _check.non_negative("max_curvature", self.max_curvature)
        _check.positive_int("proj_dim", self.proj_dim)

    def arguments(self) -> dict[str, Any]:
        """Arguments of the engine and its call, for the full space of a model with ``proj_dim`` parameters."""
        return {**dataclasses.asdict(self), "proj_dim": None, "criterion": nn.MSELoss(), "progress": False}

    def sensitivity(self) -> Sensitivity:
        """The sensitivity to a record that has more outputs than the model has parameters."""
        return Sensitivity(self.max_grad_norm, self.max_curvature, self.proj_dim == 1, self.adjacency)


@dataclass(frozen=True)
class Record:
    """A record's place within the clipping bounds, in the plane of the first two coordinates.

    Attributes:
        gradient: 1 for a gradient at the bound C_g, 0 for none.
        angle: the direction of the gradient.
        curvature: ``"none"``, ``"line"`` (rank one, at the bound C_H) or ``"full"`` (C_H·I).
        line: the angle of the line.
    """

    gradient: float
    angle: float
    curvature: str
    line: float = 0.0

    def quadratic(self, setting: Setting) -> tuple[Array, Array]:
        """The gradient g and the curvature H of the record."""
        k = setting.proj_dim
        g = self.gradient * setting.max_grad_norm * _direction(self.angle, k)
        if self.curvature == "none":
            return g, np.zeros((k, k))
        if self.curvature == "full":
            return g, setting.max_curvature * np.eye(k)
        v = _direction(self.line, k)
        return g, setting.max_curvature * np.outer(v, v)


@dataclass(frozen=True)
class Pair:
    """Two neighbouring data sets: a base with one more record, and the same base without it or with another in its place.

    Attributes:
        setting: the public numbers for which they were made.
        pull: records of the base with a gradient at the bound, all in one direction, and no curvature.
        pull_angle: that direction.
        stiff: records of the base with curvature C_H·I and no gradient.
        record: the one that makes the difference.
        replaced: what stands in its place in the neighbour, None for nothing.
    """

    setting: Setting
    pull: int
    pull_angle: float
    stiff: int
    record: Record
    replaced: Record | None = None

    def loss(self, inverse_temperature: float) -> PrivacyLoss:
        """The privacy loss at the given temperature, straight from the formulas."""
        densities = []
        for last in (self.replaced, self.record):
            gradient = self.pull * self.setting.max_grad_norm * _direction(self.pull_angle, self.setting.proj_dim)
            curvature = self.stiff * self.setting.max_curvature * np.eye(self.setting.proj_dim)
            if last is not None:
                g, h = last.quadratic(self.setting)
                gradient, curvature = gradient + g, curvature + h
            values, vectors = np.linalg.eigh(curvature)
            precision = inverse_temperature * (values + self.setting.regularization * self.setting.nominal_size)
            linear = -inverse_temperature * (vectors.T @ gradient)
            densities.append(BallGaussian(precision, linear, self.setting.radius, vectors))
        return PrivacyLoss(densities[0], densities[1])

    def data(self) -> tuple[nn.Module, DataLoader[Any], DataLoader[Any]]:
        """A model and two loaders that have this pair's quadratics, for an audit of the whole engine.

        The model is linear, f(x) = xθ at θ = 0 with x ∈ R^{m×k} and m = k + 1 outputs: under mean squared error a record
        (x, y) has g = −(2/m)xᵀy and H = (2/m)xᵀx, which can be anything. Gradients and curvatures are made ten times
        larger than their bounds, so that clipping has to work. The base has one more record, which has no effect.
        """
        k = self.setting.proj_dim
        linear = nn.Linear(k, 1, bias=False).double()
        nn.init.zeros_(linear.weight)
        idle = Record(0.0, 0.0, "none")
        base = [idle, *[Record(1.0, self.pull_angle, "none")] * self.pull, *[Record(0.0, 0.0, "full")] * self.stiff]
        loaders = []
        for last in (self.replaced, self.record):
            records = base if last is None else [*base, last]
            rows = {r: self._row(r) for r in set(records)}
            x, y = (torch.stack([rows[r][i] for r in records]) for i in (0, 1))
            loaders.append(DataLoader(TensorDataset(x, y), batch_size=256))
        return nn.Sequential(linear, nn.Flatten()), loaders[0], loaders[1]

    def _row(self, record: Record) -> tuple[Tensor, Tensor]:
        """The input and the target of one record."""
        g, h = (_OVERSHOOT * part for part in record.quadratic(self.setting))
        m = self.setting.proj_dim + 1
        values, vectors = np.linalg.eigh(h)
        x = np.vstack([_FAINT * g, np.sqrt(np.clip(values, 0, None) * m / 2)[:, None] * vectors.T])
        y = np.zeros(m)
        y[0] = -m / (2 * _FAINT)
        return torch.from_numpy(x), torch.from_numpy(y)


def _direction(angle: float, dim: int) -> Array:
    """A unit vector in the plane of the first two coordinates; in one dimension, its sign."""
    if dim == 1:
        return np.array([math.copysign(1.0, math.cos(angle))])
    return np.concatenate([[math.cos(angle), math.sin(angle)], np.zeros(dim - 2)])
