"""One pass over the private data: each record's quadratic, clipped in the projected space and added.

With g_i = Aᵀ∇ℓ_i the projected gradient of record i, B_i = MᵢᵀJ_iA its Gauss-Newton factor (r_i × k) and
H_i = B_iᵀB_i ⪰ 0 its projected Gauss-Newton matrix,

    G = Σ_i g_i · min(1, C_g/|g_i|)          S = Σ_i H_i · min(1, C_H/‖H_i‖₂)

Adding or removing one record moves G by at most C_g in norm and S by a positive semi-definite matrix of norm at
most C_H, whatever the record holds: that, and nothing else about the model or the projection, is what the privacy
guarantee rests on. ‖H_i‖₂ is the largest eigenvalue of the small matrix B_iB_iᵀ. A record whose g_i or H_i is not
finite contributes zero to both sums, silently: an exception or a count would reveal it. Clipping and summing are
in float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from opacus_expm import _check
from opacus_expm._private import PrivateValues
from opacus_expm.gathering.criteria import Criterion
from opacus_expm.gathering.gradients import RecordGradients
from opacus_expm.gathering.symmetric import SymmetricSum
from opacus_expm.mechanism.sensitivity import ADJACENCIES, Sensitivity

EXACT_OUTPUTS = 64  # curvature is exact up to this many outputs, unless asked otherwise
DEFAULT_PROBES = 8  # and estimated from this many probes beyond


class RowSource(Protocol):
    """A way to find rows (hooks, or each record alone): outputs of a batch, and rows of its projected Jacobian."""

    def outputs_and_pullback(self, inputs: Any) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """Outputs (B, …) and a function from cotangents (B, r, …) to rows (B, r, k)."""


@runtime_checkable
class GradientSource(Protocol):
    """A way to find gradients without rows."""

    def outputs_and_gradients(self, inputs: Any) -> tuple[Tensor, Callable[[Tensor, int], RecordGradients]]:
        """Outputs (B, …) and a function from a cotangent (B, …) and a number of records to their gradients."""


@dataclass(frozen=True)
class ClippingBounds:
    """The bounds C_g and C_H that a pass clips by, and where they came from; public.

    Attributes:
        max_grad_norm: C_g > 0.
        max_curvature: C_H ≥ 0; 0 uses no private curvature.
        source: one of ``BOUNDS``.
        receipts: names of the purchases, for the ledger that paid (see ``Purchase``).
    """

    max_grad_norm: float
    max_curvature: float
    source: str = "given"
    receipts: frozenset[str] = frozenset()


@dataclass(frozen=True, repr=False, eq=False)
class ClippedSums(PrivateValues):
    """G and S of one pass: private data, to be used by a draw that is charged, and shown to nobody.

    ``rank`` is public: the most that one record's curvature can have.

    **Privacy:** holds private values. ``repr`` shows shapes and bounds only, and pickling is refused.
    """

    gradient: Tensor
    curvature: Tensor | None
    max_grad_norm: float
    max_curvature: float
    parallel: bool
    rank: int = 0

    def sensitivity(self, adjacency: str, *, projected: bool = False) -> Sensitivity:
        """How far one record can move the sums, under the given adjacency."""
        _check.one_of("adjacency", adjacency, ADJACENCIES)
        turns = projected and len(self.gradient) > 1
        return Sensitivity(self.max_grad_norm, self.max_curvature, self.parallel, adjacency, turns)

    def packed(self) -> Tensor:
        """G and the upper triangle of S, row by row: k + k(k+1)/2 numbers in float64 on the CPU; private."""
        gradient = self.gradient.to("cpu", torch.float64)
        if self.curvature is None:
            return gradient.clone()
        upper = torch.triu_indices(len(gradient), len(gradient))
        return torch.cat([gradient, self.curvature.to("cpu", torch.float64)[upper[0], upper[1]]])

    def with_packed(self, numbers: Tensor) -> ClippedSums:
        """A copy with other sums, which are given in the order of ``packed``."""
        k, device = len(self.gradient), self.gradient.device
        if self.curvature is None:
            return replace(self, gradient=numbers.to(device))
        upper = torch.triu_indices(k, k)
        curvature = torch.zeros(k, k, dtype=torch.float64)
        curvature[upper[0], upper[1]] = curvature[upper[1], upper[0]] = numbers[k:]
        return replace(self, gradient=numbers[:k].to(device, copy=True), curvature=curvature.to(device))

    def to(self, device: torch.device) -> ClippedSums:
        """The same sums on another device."""
        curvature = None if self.curvature is None else self.curvature.to(device)
        return replace(self, gradient=self.gradient.to(device), curvature=curvature)

    def to_dict(self) -> dict[str, Any]:
        """Tensors and plain values, for a private file."""
        return {
            "numbers": self.packed(),
            "dim": len(self.gradient),
            "max_grad_norm": self.max_grad_norm,
            "max_curvature": self.max_curvature,
            "parallel": self.parallel,
            "rank": self.rank,
        }

    @classmethod
    def from_dict(cls, content: Any) -> ClippedSums:
        """The inverse of ``to_dict``.

        Raises:
            ValueError: missing entries, or values that no sums can have.
        """
        try:
            k, numbers = _check.positive_int("dim", content["dim"]), content["numbers"]
            with_curvature = len(numbers) != k
            sums = cls(
                torch.zeros(k, dtype=torch.float64),
                torch.zeros(0) if with_curvature else None,
                _check.positive("max_grad_norm", content["max_grad_norm"]),
                _check.non_negative("max_curvature", content["max_curvature"]),
                bool(content["parallel"]),
                int(content["rank"]),
            )
            sound = numbers.dtype == torch.float64 and bool(numbers.isfinite().all())
            if not sound or len(numbers) != (k + k * (k + 1) // 2 if with_curvature else k):
                raise ValueError("these are no sums")
            return sums.with_packed(numbers)
        except (KeyError, TypeError, AttributeError, RuntimeError) as error:
            raise ValueError("these are no sums") from error

    def plus(self, other: ClippedSums) -> ClippedSums:
        """The sums of the records of both, which must have been clipped by the same bounds."""
        both = self.curvature is not None and other.curvature is not None
        return replace(
            self,
            gradient=self.gradient + other.gradient,
            curvature=self.curvature + other.curvature if both else None,  # type: ignore[operator]
            parallel=self.parallel and other.parallel,
            rank=max(self.rank, other.rank),
        )

    def __repr__(self) -> str:
        return (
            f"ClippedSums(dim={self.gradient.shape[0]}, max_grad_norm={self.max_grad_norm}, "
            f"max_curvature={self.max_curvature}, private values hidden)"
        )


@dataclass(frozen=True, repr=False, eq=False)
class RecordQuadratics(PrivateValues):
    """Gradient g (B, k) and factor B (B, q, k) of each record of a batch, float64, with |g| and ‖H‖₂; private.

    ``parallel`` is public: the Jacobian has a single relevant row.
    """

    gradients: Tensor
    factors: Tensor | None
    gradient_norms: Tensor
    curvature_norms: Tensor
    parallel: bool

    def to(self, dtype: torch.dtype) -> RecordQuadratics:
        """Gradients and factors in another floating type."""
        factors = None if self.factors is None else self.factors.to(dtype)
        return replace(self, gradients=self.gradients.to(dtype), factors=factors)

    def with_norms(self) -> RecordQuadratics:
        """Norms computed anew from gradients and factors, which a change of type has rounded."""
        return _finite_only(self.gradients, self.factors, parallel=self.parallel)

    def bytes(self) -> int:
        """The memory in bytes that gradients and factors take."""
        return self.gradients.nbytes + (0 if self.factors is None else self.factors.nbytes)


def record_quadratics(
    source: RowSource,
    criterion: Criterion,
    inputs: Any,
    targets: Tensor,
    *,
    curvature: bool,
    probes: int | None = None,
    pad_to: int | None = None,
) -> RecordQuadratics:
    """Each record's projected gradient and Gauss-Newton factor, records that are not finite set to zero.

    Without ``curvature``, one backward pass gives the gradient alone. With it, the Jacobian's rows along the criterion's
    basis give both exactly; or, with ``probes`` = s, 1 + s backward passes give the gradient and s probes
    B = ZᵀMᵀJ/√s with independent signs Z, for which E[BᵀB] = JᵀLJ (the default beyond 64 outputs, and for
    sequences, with s = 8). A probe's H_i is as positive semi-definite as the
    exact one and clipped alike, so the privacy is the same; the signs are drawn afresh for each record, and the
    neighbouring data sets of the guarantee are compared for any fixed signs of the records that both have.

    With ``pad_to``, a shorter batch is filled up with copies that are dropped again before anything is clipped.
    """
    count = len(targets)
    inputs, targets = padded(inputs, targets, pad_to)
    outputs, pullback = source.outputs_and_pullback(inputs)
    gradient, factor = at_outputs(criterion, outputs, targets)
    dtype, parallel = outputs.dtype, False
    if probes is None and (outputs.dim() > 2 or outputs.shape[1] > EXACT_OUTPUTS):
        probes = DEFAULT_PROBES
    if not curvature:
        g, b = pullback(gradient.to(dtype)[:, None]).double()[:, 0], None
    elif probes is not None:
        signs = _signs((*factor.shape[:-2], factor.shape[-1], probes)).to(factor)
        samples = (factor @ signs).movedim(-1, 1) / math.sqrt(probes)
        rows = pullback(torch.cat([gradient[:, None], samples], dim=1).to(dtype)).double()
        g, b = rows[:, 0], rows[:, 1:]
    else:
        basis = criterion.basis(outputs.shape[1]).to(outputs.device)
        parallel = len(basis) == 1
        rows = pullback(basis.to(dtype).expand(len(outputs), -1, -1)).double()
        # J → g = Jᵀ(∇ℓ),  J → B = MᵀJ, in the basis' coordinates
        g = torch.einsum("br,brk->bk", gradient @ basis.T, rows)
        b = torch.einsum("brq,brk->bqk", basis @ factor, rows)
    return _finite_only(g[:count], None if b is None else b[:count], parallel=parallel)


def record_gradients(
    source: RowSource, criterion: Criterion, inputs: Any, targets: Tensor, pad_to: int | None
) -> RecordGradients:
    """Each record's gradient alone, by one backward pass; without rows where the source can do that."""
    count = len(targets)
    inputs, targets = padded(inputs, targets, pad_to)
    if isinstance(source, GradientSource):
        outputs, gradients = source.outputs_and_gradients(inputs)
        return gradients(at_outputs(criterion, outputs, targets)[0].to(outputs.dtype), count)
    outputs, pullback = source.outputs_and_pullback(inputs)
    rows = pullback(at_outputs(criterion, outputs, targets)[0].to(outputs.dtype)[:, None])[:, 0]
    return RecordGradients(count, len(rows), (), rows, rows.shape[1])


def padded(inputs: Any, targets: Tensor, pad_to: int | None) -> tuple[Any, Tensor]:
    """A batch filled up with copies of its records to a public number of them, so that all are rounded alike."""
    count = len(targets)
    if pad_to is None or not 0 < count < pad_to:
        return inputs, targets
    fill = torch.arange(pad_to, device=targets.device) % count
    inputs = pytree.tree_map(lambda t: t[fill.to(t.device)] if isinstance(t, Tensor) else t, inputs)
    return inputs, targets[fill]


def values_at_outputs(criterion: Criterion, outputs: Tensor, targets: Tensor) -> Tensor:
    """ℓ of every record, float64; a sequence's loss is the mean over its counted positions."""
    if outputs.dim() == 2:
        criterion.check(outputs, targets)
        return criterion.values(outputs.double(), targets)
    batch, positions = outputs.shape[:2]
    _check_positions(outputs, targets)
    flat = targets.flatten(0, 1)
    criterion.check(outputs.flatten(0, 1), flat)
    counted = criterion.counted(flat).view(batch, positions)
    values = criterion.values(outputs.double().flatten(0, 1), flat).view(batch, positions)
    return torch.where(counted, values, 0.0).sum(1) / counted.sum(1).clamp(min=1)


def _check_positions(outputs: Tensor, targets: Tensor) -> None:
    """A sequence has a target for each position."""
    if targets.shape[:2] != outputs.shape[:2]:
        raise ValueError(
            f"target has shape {tuple(targets.shape)} where a model with outputs {tuple(outputs.shape)} needs one target "
            "for each position: the first two dimensions must agree"
        )


def at_outputs(criterion: Criterion, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """∇_f ℓ and M in the shape of the outputs, float64; a sequence's loss is the mean over its counted positions."""
    if outputs.dim() == 2:
        criterion.check(outputs, targets)
        return criterion.gradient_and_factor(outputs.double(), targets)
    _check_positions(outputs, targets)
    flat, flat_targets = outputs.flatten(0, 1), targets.flatten(0, 1)
    criterion.check(flat, flat_targets)
    gradient, factor = criterion.gradient_and_factor(flat.double(), flat_targets)
    batch, positions = outputs.shape[:2]
    counted = criterion.counted(flat_targets).view(batch, positions).sum(1).clamp(min=1).to(gradient)
    return (
        gradient.view(batch, positions, -1) / counted[:, None, None],
        factor.view(batch, positions, *factor.shape[1:]) / counted.sqrt()[:, None, None, None],
    )


def _signs(shape: tuple[int, ...]) -> Tensor:
    """Independent random signs from the operating system's entropy; no seed can fix them."""
    bits = np.random.default_rng().integers(0, 2, size=shape, dtype=np.int8)
    return torch.from_numpy(bits * 2 - 1)


def _finite_only(g: Tensor, b: Tensor | None, *, parallel: bool) -> RecordQuadratics:
    """Each record's quadratic with its norms. Where the gradient or the curvature is not finite, both become zero."""
    norms = torch.linalg.vector_norm(g, dim=1)
    if b is None:
        finite = norms.isfinite()
        g = torch.where(finite[:, None], g, 0.0)
        return RecordQuadratics(g, None, torch.where(finite, norms, 0.0), torch.zeros_like(norms), parallel=parallel)
    # BBᵀ and BᵀB have the same largest eigenvalue: the smaller matrix is taken.
    gram = b @ b.transpose(1, 2) if b.shape[1] <= b.shape[2] else b.transpose(1, 2) @ b
    trace = gram.diagonal(dim1=1, dim2=2).sum(1)
    finite = norms.isfinite() & trace.isfinite()  # |gram| ≤ trace entrywise
    # Scaled to trace 1, so that no record can make the eigenvalue routine overflow or fail.
    unit = torch.where((finite & (trace > 0))[:, None, None], gram / trace[:, None, None], 0.0)
    curvature_norms = trace * torch.linalg.eigvalsh(unit)[:, -1].clamp(min=0)
    return RecordQuadratics(
        torch.where(finite[:, None], g, 0.0),
        torch.where(finite[:, None, None], b, 0.0),
        torch.where(finite, norms, 0.0),
        torch.where(finite, curvature_norms, 0.0),
        parallel=parallel,
    )


class ClippedAdder:
    """Clips records' quadratics, |g_i| ≤ C_g and ‖H_i‖₂ ≤ C_H, and adds them up, batch after batch.

    Args:
        max_grad_norm: C_g > 0.
        max_curvature: C_H ≥ 0; 0 leaves the curvature out.
        start: sums of records that were visited earlier and clipped in the same way, from which these go on.

    **Privacy:** the result is private; its sensitivity is that of the bounds (module docstring).
    """

    def __init__(self, max_grad_norm: float, max_curvature: float, start: ClippedSums | None = None):
        self._bounds = max_grad_norm, max_curvature
        self._g = None if start is None else start.gradient.clone()
        self._s = None if start is None or start.curvature is None else SymmetricSum.starting_at(start.curvature)
        self._parallel = start is None or start.parallel  # until a batch says otherwise
        self._rank = 0 if start is None else start.rank

    def add(self, records: RecordQuadratics) -> None:
        """Add one batch; factors are left out where max_curvature is 0."""
        scale, scale_h = map(_clip, (records.gradient_norms, records.curvature_norms), self._bounds)
        g = (records.gradients * scale[:, None]).sum(0)
        self._g = g if self._g is None else self._g + g
        if records.factors is not None and self._bounds[1] > 0:
            b = (records.factors * scale_h.sqrt()[:, None, None]).flatten(0, 1)
            if self._s is None:
                self._s = SymmetricSum(b.shape[1], b.device)
            self._s.add(b)
            self._rank = max(self._rank, min(records.factors.shape[1:]))
        self._parallel = self._parallel and records.parallel

    def add_gradients(self, records: RecordGradients) -> None:
        """Add one batch of records without curvature."""
        if self._g is None:
            self._g = torch.zeros(records.size, dtype=torch.float64, device=records.norms.device)
        records.add(self._g, lambda norms: _clip(norms, self._bounds[0]))  # in place: it may be as long as the model
        self._parallel = False

    def result(self) -> ClippedSums:
        """The sums G and S of all batches that were added so far."""
        if self._g is None:
            raise ValueError("loader is empty: it yielded no record")
        parallel = self._parallel or self._g.shape[0] == 1
        curvature = None if self._s is None else self._s.result()
        return ClippedSums(self._g, curvature, *self._bounds, parallel, self._rank)


def _clip(norms: Tensor, bound: float) -> Tensor:
    """The factor min(1, bound/norm) by which each record is scaled; it is 1 where the norm is zero."""
    return (bound / norms).clamp(max=1.0)
