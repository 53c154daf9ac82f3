"""Loss functions as seen from the model's outputs: gradient and Gauss-Newton factor of one record.

For a record with outputs f ∈ R^m and target y, a criterion gives

    ∇_f ℓ ∈ R^m    and    M ∈ R^{m×q} with MMᵀ = L = ∇²_f ℓ, its negative eigenvalues set to 0,

so that the record's Gauss-Newton matrix JᵀLJ = (MᵀJ)ᵀ(MᵀJ) is positive semi-definite by construction.
A criterion also names a ``basis``, orthonormal rows that span every ∇_f ℓ and the range of every L:
only the Jacobian's rows along it are needed. Softmax outputs lose one row this way, because adding a
constant to all logits changes nothing.

Whatever a record holds, nothing here raises for it: a target that is not finite or not a class gives
values that are not finite or zero, and such a record contributes nothing (see ``sums``).
"""

from __future__ import annotations

import copy
import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from opacus_expm._warnings import warn


class Criterion(Protocol):
    """What the statistics pass needs of a loss."""

    def basis(self, outputs: int) -> Tensor:
        """Orthonormal rows (r, m), float64, that span all output gradients and output Hessians."""

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        """Raise for targets whose shape or dtype cannot be right; never for their values."""

    def counted(self, targets: Tensor) -> Tensor:
        """Which targets count, for the mean over the positions of a sequence: booleans (B,)."""

    def gradient_and_factor(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """∇_f ℓ of shape (B, m) and M of shape (B, m, q), both float64, for float64 outputs (B, m)."""

    def values(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """ℓ of every record (B,), float64, for float64 outputs (B, m); zero for a record that does not count."""

    def guessing(self, outputs: int) -> float | None:
        """ℓ of a model that knows nothing and says so, for m outputs; None where that depends on the targets."""


def _check_regression_targets(outputs: Tensor, targets: Tensor, loss: str) -> None:
    """Targets must be floating (or integer counts) and match the outputs record by record."""
    if targets.is_complex():
        raise ValueError(f"target dtype {targets.dtype} does not suit {loss}; pass real numbers")
    if targets.shape[0] != outputs.shape[0] or targets[:1].numel() != outputs[:1].numel():
        raise ValueError(
            f"target has shape {tuple(targets.shape)} where {loss} needs {tuple(outputs.shape)}, the shape of the "
            "model's output; reshape the target in the data set or the collate function"
        )


def _all(targets: Tensor) -> Tensor:
    """All targets count: True for each of them."""
    return torch.ones(len(targets), dtype=torch.bool, device=targets.device)


def _diagonal_factor(diagonal: Tensor) -> Tensor:
    """M for a diagonal L, negative entries set to 0 (a NaN stays, so that the record is dropped)."""
    return torch.diag_embed(diagonal.clamp(min=0).sqrt())


@dataclass(frozen=True)
class MeanSquaredError:
    """ℓ = s·Σ_j (f_j − y_j)², with s = 1/m (the default) or 1: ∇ℓ = 2s(f−y), L = 2sI."""

    sum_over_outputs: bool = False

    def basis(self, outputs: int) -> Tensor:
        """The identity: all m coordinates are needed."""
        return torch.eye(outputs, dtype=torch.float64)

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        """Check that there is one real number for each output."""
        _check_regression_targets(outputs, targets, "mean squared error")

    def counted(self, targets: Tensor) -> Tensor:
        """All targets count."""
        return _all(targets)

    def gradient_and_factor(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """The gradient 2s(f−y) and the factor √(2s)·I."""
        scale = 2.0 if self.sum_over_outputs else 2.0 / outputs.shape[1]
        residual = outputs - targets.to(outputs.dtype).reshape(outputs.shape)
        return scale * residual, _diagonal_factor(torch.full_like(outputs, scale))

    def values(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The scaled sum of squares."""
        squares = (outputs - targets.to(outputs.dtype).reshape(outputs.shape)).square()
        return squares.sum(1) if self.sum_over_outputs else squares.mean(1)

    def guessing(self, outputs: int) -> None:
        """It depends on the targets."""


@dataclass(frozen=True)
class CrossEntropy:
    """Softmax cross-entropy, ℓ = −Σ_c t_c ln σ_c(f), with class indices or probabilities as targets.

    t_c = w_c·((1−a)·y_c + a/m) with class weights w and label smoothing a, as in torch; then
    ∇ℓ = τσ − t and L = τ(diag σ − σσᵀ), τ = Σ t_c. The weights scale each record's loss; torch's division
    by the sum of the batch's weights is left out, because it would tie records to one another.
    A record whose class is ``ignore_index``, or no class at all, contributes nothing.
    """

    weight: Tensor | None = None
    label_smoothing: float = 0.0
    ignore_index: int = -100

    def basis(self, outputs: int) -> Tensor:
        """The m − 1 directions orthogonal to (1, …, 1)."""
        if outputs == 1:
            raise ValueError(
                "cross-entropy needs at least 2 outputs, the model has 1; use nn.BCEWithLogitsLoss() as criterion"
            )
        # Helmert rows: deterministic, orthonormal, orthogonal to the constant vector.
        rows = torch.tril(torch.ones(outputs - 1, outputs, dtype=torch.float64))
        index = torch.arange(1, outputs, dtype=torch.float64)
        rows[torch.arange(outputs - 1), torch.arange(1, outputs)] = -index
        return rows / torch.sqrt(index * (index + 1))[:, None]

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        """Check that targets are integer classes of shape (B,), or probabilities in the shape of the outputs."""
        m = outputs.shape[1]
        if targets.is_floating_point():
            if targets.shape != outputs.shape:
                raise ValueError(
                    f"target has shape {tuple(targets.shape)} where cross-entropy with probabilities needs "
                    f"{tuple(outputs.shape)}; pass integer classes of shape {tuple(outputs.shape[:1])} instead?"
                )
        elif targets.is_complex() or targets.shape != outputs.shape[:1]:
            raise ValueError(
                f"target has shape {tuple(targets.shape)} and dtype {targets.dtype} where cross-entropy needs integer "
                f"classes of shape {tuple(outputs.shape[:1])}, or probabilities of shape {tuple(outputs.shape)}"
            )
        if self.weight is not None and self.weight.shape != (m,):
            raise ValueError(f"criterion weight has shape {tuple(self.weight.shape)}, the model has {m} outputs")

    def counted(self, targets: Tensor) -> Tensor:
        """All targets count except those that are ``ignore_index``."""
        return _all(targets) if targets.is_floating_point() else targets.long() != self.ignore_index

    def gradient_and_factor(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """τσ − t and √τ·(diag √σ − σ√σᵀ)."""
        t = self._weights(outputs, targets)
        total = t.sum(1, keepdim=True)
        sigma = F.softmax(outputs, dim=1)
        root = sigma.sqrt()
        factor = torch.diag_embed(root) - sigma[:, :, None] * root[:, None, :]
        return total * sigma - t, total.clamp(min=0).sqrt()[:, :, None] * factor

    def values(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """−Σ t_c ln σ_c."""
        return -(self._weights(outputs, targets) * F.log_softmax(outputs, dim=1)).sum(1)

    def guessing(self, outputs: int) -> float | None:
        """With the largest of the weights: no less than for any class. None where that is no positive number."""
        found = math.log(outputs) * (1.0 if self.weight is None else float(self.weight.max()))
        return found if 0 < found < math.inf else None

    def _weights(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The weight t of every class for every record (B, m)."""
        m = outputs.shape[1]
        if targets.is_floating_point():
            labels, counted = targets.to(outputs.dtype), torch.ones_like(outputs[:, :1])
        else:
            targets = targets.long()  # small integer types would wrap m and ignore_index around
            valid = (targets >= 0) & (targets < m) & (targets != self.ignore_index)
            labels = F.one_hot(torch.where(valid, targets, 0), m).to(outputs.dtype)
            counted = valid[:, None].to(outputs.dtype)
        t = counted * ((1 - self.label_smoothing) * labels + self.label_smoothing / m)
        return t if self.weight is None else t * self.weight.to(t)


@dataclass(frozen=True)
class BinaryCrossEntropy:
    """Binary cross-entropy of each output's logit, ℓ = s·Σ_j w_j[p_j y_j ln(1+e^{−f_j}) + (1−y_j) ln(1+e^{f_j})].

    s = 1/m (the default) or 1, w = ``weight``, p = ``pos_weight``. With a = w(1 − y + py):
    ∇ℓ = s(aσ − wpy) and L = s·diag(aσ(1−σ)).
    """

    weight: Tensor | None = None
    pos_weight: Tensor | None = None
    sum_over_outputs: bool = False

    def basis(self, outputs: int) -> Tensor:
        """The identity: all m coordinates are needed."""
        return torch.eye(outputs, dtype=torch.float64)

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        """Check that there is one number for each output, and that weights are for outputs and not for records."""
        _check_regression_targets(outputs, targets, "binary cross-entropy")
        for name, value in (("weight", self.weight), ("pos_weight", self.pos_weight)):
            if value is not None and value.numel() not in (1, outputs.shape[1]):
                raise ValueError(
                    f"criterion {name} has shape {tuple(value.shape)}; give one value, or one for each of the "
                    f"{outputs.shape[1]} outputs (a weight for each record belongs into the data set)"
                )

    def counted(self, targets: Tensor) -> Tensor:
        """All targets count."""
        return _all(targets)

    def gradient_and_factor(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """s(aσ − wpy) and diag √(s·aσ(1−σ))."""
        positive, negative, scale = self._weights(outputs, targets)
        sigma, a = torch.sigmoid(outputs), positive + negative
        return scale * (a * sigma - positive), _diagonal_factor(scale * a * sigma * (1 - sigma))

    def values(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """s·Σ_j of both parts of the loss."""
        positive, negative, scale = self._weights(outputs, targets)
        return scale * (positive * F.softplus(-outputs) + negative * F.softplus(outputs)).sum(1)

    def guessing(self, outputs: int) -> float:
        """For unit weights."""
        return math.log(2) * (outputs if self.sum_over_outputs else 1)

    def _weights(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, float]:
        """Wpy and w(1 − y) for every output, and s."""
        one = torch.ones(1, dtype=outputs.dtype, device=outputs.device)
        w = one if self.weight is None else self.weight.to(outputs).flatten()
        p = one if self.pos_weight is None else self.pos_weight.to(outputs).flatten()
        y = targets.to(outputs.dtype).reshape(outputs.shape)
        return w * p * y, w * (1 - y), 1.0 if self.sum_over_outputs else 1.0 / outputs.shape[1]


@dataclass(frozen=True)
class AutodiffCriterion:
    """Any other criterion: its value on a batch of one record, differentiated twice with respect to the outputs.

    M is built from the eigendecomposition of the Hessian with negative eigenvalues set to 0.
    """

    function: Callable[[Tensor, Tensor], Tensor]

    def basis(self, outputs: int) -> Tensor:
        """The identity: all m coordinates are needed."""
        return torch.eye(outputs, dtype=torch.float64)

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        """Check that the criterion gives one number for one record."""
        if targets.shape[:1] != outputs.shape[:1]:
            raise ValueError(
                f"target has shape {tuple(targets.shape)} where the model's output has shape {tuple(outputs.shape)}: "
                "they must agree in the first (batch) dimension"
            )
        # On zeros: the answer must not depend on a record.
        zeros = torch.zeros_like(targets[:1])
        zeros = zeros.double() if targets.is_floating_point() else zeros
        value = self.function(torch.zeros_like(outputs[:1]).double(), zeros)
        if not isinstance(value, Tensor) or value.numel() != 1:
            raise ValueError(
                f"criterion must return one number for one record, got {getattr(value, 'shape', type(value))}; "
                "use reduction='mean' or 'sum'"
            )
        self._derivatives(torch.zeros_like(outputs[:1]).double(), zeros)  # what cannot be differentiated raises here

    def counted(self, targets: Tensor) -> Tensor:
        """All targets count."""
        return _all(targets)

    def _derivatives(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Gradient and Hessian of each record, by reverse mode twice: forward mode is missing for some losses."""

        def loss(output: Tensor, target: Tensor) -> Tensor:
            return self.function(output[None], target[None]).reshape(())

        gradient: Tensor = torch.func.vmap(torch.func.grad(loss))(outputs, targets)
        hessian: Tensor = torch.func.vmap(torch.func.jacrev(torch.func.grad(loss)))(outputs, targets)
        return gradient, hessian

    def _alone(self, output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Gradient and Hessian of one record; NaN where the criterion raises, because an exception would reveal a target."""
        try:
            return self._derivatives(output[None], target[None])
        except Exception:
            m = output.shape[0]
            return output.new_full((1, m), math.nan), output.new_full((1, m, m), math.nan)

    def gradient_and_factor(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Gradient and Hessian by automatic differentiation, then M = V diag √max(e, 0)."""
        targets = targets.to(outputs.dtype) if targets.is_floating_point() else targets
        try:
            gradient, hessian = self._derivatives(outputs, targets)
        except Exception:
            each = [self._alone(output, target) for output, target in zip(outputs, targets, strict=True)]
            gradient, hessian = torch.cat([g for g, _ in each]), torch.cat([h for _, h in each])
        finite = hessian.flatten(1).isfinite().all(1)[:, None, None]
        values, vectors = torch.linalg.eigh(torch.where(finite, hessian, 0.0))
        factor = vectors * values.clamp(min=0).sqrt()[:, None, :]
        return gradient, torch.where(finite, factor, math.nan)

    def values(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The criterion on each record alone; NaN where it refuses a target."""
        targets = targets.to(outputs.dtype) if targets.is_floating_point() else targets

        def value(output: Tensor, target: Tensor) -> Tensor:
            try:
                return self.function(output[None], target[None]).reshape(())
            except Exception:  # which would reveal the record
                return output.new_full((), math.nan)

        return torch.stack([value(output, target) for output, target in zip(outputs, targets, strict=True)])

    def guessing(self, outputs: int) -> None:
        """Not known."""


@dataclass(frozen=True)
class Undecided:
    """A criterion at outputs of zero, those of a model that knows nothing, for the metric that public curvature gives.

    Where a model is sure, softmax and logistic losses hardly curve, and on records like those it was trained on it is too
    sure: on others steps in such a metric would be too long. The curvature of a model that knows nothing (for softmax
    (I − 11ᵀ/m)/m) weighs how the outputs themselves move. That of squared errors is the same everywhere.
    """

    criterion: Criterion

    def basis(self, outputs: int) -> Tensor:
        """That of the criterion."""
        return self.criterion.basis(outputs)

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        """That of the criterion."""
        self.criterion.check(outputs, targets)

    def counted(self, targets: Tensor) -> Tensor:
        """That of the criterion."""
        return self.criterion.counted(targets)

    def gradient_and_factor(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """The criterion's gradient and factor at zero."""
        return self.criterion.gradient_and_factor(torch.zeros_like(outputs), targets)

    def values(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The criterion's value at zero."""
        return self.criterion.values(torch.zeros_like(outputs), targets)

    def guessing(self, outputs: int) -> float | None:
        """That of the criterion."""
        return self.criterion.guessing(outputs)


def undecided(criterion: Criterion) -> Criterion:
    """The criterion of a model that knows nothing, where there is such a thing: for a loss of classes."""
    return criterion if criterion.guessing(2) is None else Undecided(criterion)


def make_criterion(criterion: object, targets: Tensor) -> Criterion:
    """The package's view of a torch loss; ``None`` infers it from the targets' dtype and says so.

    Raises:
        TypeError: ``criterion`` cannot be called.
        ValueError: an option that has no meaning for one record at a time.
    """
    if criterion is None:
        integer = not (targets.is_floating_point() or targets.is_complex())
        name = "cross-entropy" if integer else "mean squared error"
        warn(
            f"criterion=None: targets are {targets.dtype}, so {name} is used; pass criterion= to choose",
        )
        return CrossEntropy() if integer else MeanSquaredError()
    if not callable(criterion):
        raise TypeError(f"criterion must be a loss such as nn.CrossEntropyLoss(), got {criterion!r}")
    reduction = getattr(criterion, "reduction", "mean")
    if reduction not in ("mean", "sum"):
        raise ValueError(
            f"criterion has reduction={reduction!r}; use 'mean' or 'sum', which give one number for one record"
        )
    return _known(criterion, sum_over_outputs=reduction == "sum")


def _known(criterion: Any, *, sum_over_outputs: bool) -> Criterion:
    """Closed forms for torch's common losses; automatic differentiation for the rest."""
    if type(criterion) is nn.MSELoss or criterion is F.mse_loss:
        return MeanSquaredError(sum_over_outputs)
    if criterion is F.cross_entropy:
        return CrossEntropy()
    if type(criterion) is nn.CrossEntropyLoss:
        return CrossEntropy(criterion.weight, criterion.label_smoothing, criterion.ignore_index)
    if criterion is F.binary_cross_entropy_with_logits:
        return BinaryCrossEntropy()
    if type(criterion) is nn.BCEWithLogitsLoss:
        return BinaryCrossEntropy(criterion.weight, criterion.pos_weight, sum_over_outputs)
    # Outputs arrive in float64, so a module's own tensors (class weights) must be float64 too.
    return AutodiffCriterion(copy.deepcopy(criterion).double() if isinstance(criterion, nn.Module) else criterion)


def description(criterion: Criterion) -> str:
    """A criterion in words that are the same in every process: its kind and options, tensors by their digest."""
    words = [type(criterion).__name__]
    for option in fields(criterion):  # type: ignore[arg-type]
        value = getattr(criterion, option.name)
        if isinstance(value, Tensor):
            value = hashlib.sha256(repr(value.tolist()).encode()).hexdigest()
        elif callable(value) and not isinstance(value, nn.Module):
            value = getattr(value, "__qualname__", type(value).__qualname__)
        words.append(f"{option.name}={value}")
    return " ".join(words)
