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
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from opacus_expm import _check
from opacus_expm._private import PrivateValues
from opacus_expm.gathering.criteria import Criterion
from opacus_expm.gathering.symmetric import SymmetricSum
from opacus_expm.mechanism.sensitivity import ADJACENCIES

CLIPPINGS = ("separate", "joint")
EXACT_OUTPUTS = 64  # curvature is exact up to this many outputs, unless asked otherwise
DEFAULT_PROBES = 8  # and estimated from this many probes beyond


class RowSource(Protocol):
    """Either gatherer: outputs of a batch, and rows of its projected Jacobian for any cotangents."""

    def outputs_and_pullback(self, inputs: Any) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """Outputs (B, …) and a function from cotangents (B, r, …) to rows (B, r, k)."""


@dataclass(frozen=True)
class Sensitivity:
    """How far one record can move the sums; public.

    Attributes:
        max_grad_norm: C_g.
        max_curvature: C_H; 0 where no private curvature is used.
        parallel: every record's g_i is parallel to the only row of B_i (one output, two classes, or k = 1), which
            narrows the range; a single batch of other records widens it for all.
        adjacency: ``"add_remove"`` or ``"replace_one"``.
        joint_radius: the radius R for which gradient and curvature were clipped jointly, None for separate bounds.
        projected: the sum of gradients is projected onto a ball (see ``secure``), after which a record's share of it is no
            longer than it was, but may have turned.
    """

    max_grad_norm: float
    max_curvature: float
    parallel: bool
    adjacency: str
    joint_radius: float | None = None
    projected: bool = False

    def width(self, radius: float) -> float:
        """W = sup u − inf u over the ball |ξ| ≤ R, u(ξ) = −ξᵀg − ½ξᵀHξ, over all records within the bounds.

        Let d = ξ−η, s = ξ+η, so u(ξ)−u(η) = −dᵀg − ½dᵀHs. Writing H = ½C_H(I+E) with ‖E‖ ≤ 1, the second term is at
        most ¼C_H(|d||s| − dᵀs), and −dᵀs = |η|²−|ξ|² ≤ 2R² − ½(|d|²+|s|²) because |η| ≤ R. The sum is largest on
        |d|²+|s|² = 4R², where it is C_g|d| + ¼C_H|d||s|; with |s| = 2Rx and r = R·C_H/C_g,

            x = r/(1 + √(1+2r²)),   W* = R·C_g·√(1−x²)·(2 + r·x),

        attained when k and the rank of H may be 2 or more. Where g is parallel to the only row of B, a single
        coordinate t ∈ [−R, R] matters and W₁ = 2RC_g if r ≤ 1, else R·C_g(1+r)²/(2r). Replacing a record is a removal
        and an addition: at most twice that. After joint clipping W is 2RC_g by construction.

        Once gradients may have turned, W* is due in place of W₁, which is at most 2/√3 times as large (at r = 2); so after
        joint clipping by W₁ the width is at most 2/√3 of what it was by construction.
        """
        turned = self.parallel and self.projected
        if self.joint_radius is not None:
            self._check_radius(radius)
            return self._records() * 2 * radius * self.max_grad_norm * (2 / math.sqrt(3) if turned else 1.0)
        g, h = torch.tensor([self.max_grad_norm, self.max_curvature], dtype=torch.float64)
        return self._records() * float(utility_width(g, h, radius, parallel=self.parallel and not turned))

    def _check_radius(self, radius: float) -> None:
        """Joint clipping fixes the radius."""
        if radius != self.joint_radius:
            raise ValueError(
                f"radius={radius!r} is not the {self.joint_radius!r} for which these statistics were clipped jointly; "
                "gather again, or use clipping='separate', which serves every radius"
            )

    def lipschitz(self, radius: float) -> float:
        """Lipschitz constant on the ball of the change in Σu: C_g + R·C_H, or 2C_g + R·C_H for replace-one.

        (Two curvatures within [0, C_H·I] differ by at most C_H in norm; two gradients by 2C_g.) After joint clipping,
        |g| + R‖H‖ is largest for g = 0, where ½R²‖H‖ = 2RC_g: 4C_g, or twice that.
        """
        if self.joint_radius is not None:
            self._check_radius(radius)
            return self._records() * 4 * self.max_grad_norm
        return self._records() * self.max_grad_norm + radius * self.max_curvature

    def _records(self) -> int:
        """How many records' worth of gradient a neighbouring data set may change."""
        return 2 if self.adjacency == "replace_one" else 1


def utility_width(gradient_norm: Tensor, curvature_norm: Tensor, radius: float, *, parallel: bool) -> Tensor:
    """W of a record with |g| and ‖H‖₂ as given (formula and proof in ``Sensitivity.width``); ½R²‖H‖₂ for g = 0."""
    r = radius * curvature_norm / gradient_norm
    if parallel:
        shape = torch.where(r <= 1, 2.0, (1 + r) ** 2 / (2 * r))
    else:
        x = r / (1 + torch.sqrt(1 + 2 * r * r))
        shape = torch.sqrt(1 - x * x) * (2 + r * x)
    # beyond, r² overflows and the gradient no longer matters
    steep = (gradient_norm == 0) | (r > 1e100)
    return torch.where(
        steep, radius**2 * curvature_norm / 2 + 2 * radius * gradient_norm, radius * gradient_norm * shape
    )


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
    joint_radius: float | None = None

    def sensitivity(self, adjacency: str, *, projected: bool = False) -> Sensitivity:
        """What one record can change, under the given adjacency; in one dimension a projection turns nothing."""
        _check.one_of("adjacency", adjacency, ADJACENCIES)
        turns = projected and len(self.gradient) > 1
        return Sensitivity(self.max_grad_norm, self.max_curvature, self.parallel, adjacency, self.joint_radius, turns)

    def packed(self) -> Tensor:
        """G and the upper triangle of S, row by row: k + k(k+1)/2 numbers in float64 on the CPU; private."""
        gradient = self.gradient.to("cpu", torch.float64)
        if self.curvature is None:
            return gradient.clone()
        upper = torch.triu_indices(len(gradient), len(gradient))
        return torch.cat([gradient, self.curvature.to("cpu", torch.float64)[upper[0], upper[1]]])

    def with_packed(self, numbers: Tensor) -> ClippedSums:
        """The same facts with other sums, in the order of ``packed``."""
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
            "joint_radius": self.joint_radius,
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
            joint = content["joint_radius"]
            sums = cls(
                torch.zeros(k, dtype=torch.float64),
                torch.zeros(0) if with_curvature else None,
                _check.positive("max_grad_norm", content["max_grad_norm"]),
                _check.non_negative("max_curvature", content["max_curvature"]),
                bool(content["parallel"]),
                int(content["rank"]),
                None if joint is None else _check.positive("joint_radius", joint),
            )
            sound = numbers.dtype == torch.float64 and bool(numbers.isfinite().all())
            if not sound or len(numbers) != (k + k * (k + 1) // 2 if with_curvature else k):
                raise ValueError("these are no sums")
            return sums.with_packed(numbers)
        except (KeyError, TypeError, AttributeError, RuntimeError) as error:
            raise ValueError("these are no sums") from error

    def plus(self, other: ClippedSums) -> ClippedSums:
        """The sums of the records of both, which were clipped alike; what is public holds for the records of both."""
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

    def joint_norms(self, radius: float) -> Tensor:
        """W/(2R) of each record: the norm of a gradient that alone would move the utility as much."""
        return utility_width(self.gradient_norms, self.curvature_norms, radius, parallel=self.parallel) / (2 * radius)

    def bytes(self) -> int:
        """Memory of gradients and factors."""
        return self.gradients.nbytes + (0 if self.factors is None else self.factors.nbytes)


def record_quadratics(
    source: RowSource,
    criterion: Criterion,
    inputs: Any,
    targets: Tensor,
    *,
    curvature: bool,
    curvature_samples: int | None = None,
    pad_to: int | None = None,
) -> RecordQuadratics:
    """Each record's projected gradient and Gauss-Newton factor, records that are not finite set to zero.

    Without ``curvature``, one backward pass gives the gradient alone. With it, the Jacobian's rows along the criterion's
    basis give both exactly; or, with ``curvature_samples`` = s, 1 + s backward passes give the gradient and s probes
    B = ZᵀMᵀJ/√s with independent signs Z, for which E[BᵀB] = JᵀLJ (the default beyond 64 outputs, and for
    sequences, with s = 8). A probe's H_i is as positive semi-definite as the
    exact one and clipped alike, so the privacy is the same; the signs are drawn afresh for each record, and the
    neighbouring data sets of the guarantee are compared for any fixed signs of the records that both have.

    With ``pad_to``, a shorter batch is filled up with copies that are dropped again before anything is clipped.
    """
    count = len(targets)
    if pad_to is not None and 0 < count < pad_to:
        fill = torch.arange(pad_to, device=targets.device) % count
        inputs = pytree.tree_map(lambda t: t[fill.to(t.device)] if isinstance(t, Tensor) else t, inputs)
        targets = targets[fill]
    outputs, pullback = source.outputs_and_pullback(inputs)
    gradient, factor = _at_outputs(criterion, outputs, targets)
    dtype, parallel = outputs.dtype, False
    if curvature_samples is None and (outputs.dim() > 2 or outputs.shape[1] > EXACT_OUTPUTS):
        curvature_samples = DEFAULT_PROBES
    if not curvature:
        g, b = pullback(gradient.to(dtype)[:, None]).double()[:, 0], None
    elif curvature_samples is not None:
        signs = _signs((*factor.shape[:-2], factor.shape[-1], curvature_samples)).to(factor)
        probes = (factor @ signs).movedim(-1, 1) / math.sqrt(curvature_samples)
        rows = pullback(torch.cat([gradient[:, None], probes], dim=1).to(dtype)).double()
        g, b = rows[:, 0], rows[:, 1:]
    else:
        basis = criterion.basis(outputs.shape[1]).to(outputs.device)
        parallel = len(basis) == 1
        rows = pullback(basis.to(dtype).expand(len(outputs), -1, -1)).double()
        # J → g = Jᵀ(∇ℓ),  J → B = MᵀJ, in the basis' coordinates
        g = torch.einsum("br,brk->bk", gradient @ basis.T, rows)
        b = torch.einsum("brq,brk->bqk", basis @ factor, rows)
    return _finite_only(g[:count], None if b is None else b[:count], parallel=parallel)


def _at_outputs(criterion: Criterion, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """∇_f ℓ and M in the shape of the outputs, float64; a sequence's loss is the mean over its counted positions."""
    if outputs.dim() == 2:
        criterion.check(outputs, targets)
        return criterion.gradient_and_factor(outputs.double(), targets)
    if targets.shape[:2] != outputs.shape[:2]:
        raise ValueError(
            f"target has shape {tuple(targets.shape)} where a model with outputs {tuple(outputs.shape)} needs one target "
            "for each position: the first two dimensions must agree"
        )
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
    """Norms of each record's gradient and curvature; a record with either not finite becomes zero in both."""
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


def clipped_sums(
    source: RowSource,
    criterion: Criterion,
    pass_over: Iterable[tuple[Any, Tensor]],
    *,
    max_grad_norm: float,
    max_curvature: float,
    curvature_samples: int | None = None,
    pad_to: int | None = None,
    joint_radius: float | None = None,
    start: ClippedSums | None = None,
    after_each: Callable[[ClippedAdder, int], None] | None = None,
) -> ClippedSums:
    """Clip every record's quadratic and add, over one pass.

    Args:
        source: gatherer of projected rows.
        criterion: the loss.
        pass_over: (inputs, targets) that visit every record once.
        max_grad_norm: C_g > 0.
        max_curvature: C_H ≥ 0; 0 leaves the curvature out and needs one backward pass instead of m.
        curvature_samples: random probes of the curvature for each record; None computes it exactly.
        pad_to: public number of records that the network always sees at once, so that a record's rounding does not
            depend on how many others share its batch.
        joint_radius: clip gradient and curvature together, for this radius (see ``ClippedAdder``).
        start: sums of records that were visited earlier, clipped alike.
        after_each: called after each batch, with the sums so far and the number of the batch's records.

    **Privacy:** the result is private; its sensitivity is that of the bounds (module docstring).
    """
    total = ClippedAdder(max_grad_norm, max_curvature, joint_radius, start)
    for inputs, targets in pass_over:
        total.add(
            record_quadratics(
                source,
                criterion,
                inputs,
                targets,
                curvature=max_curvature > 0,
                curvature_samples=curvature_samples,
                pad_to=pad_to,
            )
        )
        if after_each is not None:
            after_each(total, len(targets))
    return total.result()


class ClippedAdder:
    """Clips records' quadratics and adds them up, batch after batch.

    Separately: |g_i| ≤ C_g and ‖H_i‖₂ ≤ C_H. Jointly, for one radius R: both are scaled by min(1, 2RC_g/W_i), W_i being
    the width of the record's own utility (``utility_width``), so that no utility is wider than 2RC_g; C_H is then 4C_g/R.
    With ``start``, the sums go on from there.
    """

    def __init__(
        self,
        max_grad_norm: float,
        max_curvature: float,
        joint_radius: float | None = None,
        start: ClippedSums | None = None,
    ):
        self._bounds, self._joint_radius = (max_grad_norm, max_curvature), joint_radius
        self._g = None if start is None else start.gradient.clone()
        self._s = None if start is None or start.curvature is None else SymmetricSum.starting_at(start.curvature)
        self._parallel = start is None or start.parallel  # until a batch says otherwise
        self._rank = 0 if start is None else start.rank

    def add(self, records: RecordQuadratics) -> None:
        """Add one batch; factors are left out where max_curvature is 0."""
        if self._joint_radius is None:
            scale = _clip(records.gradient_norms, self._bounds[0])
            scale_h = _clip(records.curvature_norms, self._bounds[1])
        else:
            scale = scale_h = _clip(records.joint_norms(self._joint_radius), self._bounds[0])
        g = (records.gradients * scale[:, None]).sum(0)
        self._g = g if self._g is None else self._g + g
        if records.factors is not None and self._bounds[1] > 0:
            b = (records.factors * scale_h.sqrt()[:, None, None]).flatten(0, 1)
            if self._s is None:
                self._s = SymmetricSum(b.shape[1], b.device)
            self._s.add(b)
            self._rank = max(self._rank, min(records.factors.shape[1:]))
        self._parallel = self._parallel and records.parallel

    def result(self) -> ClippedSums:
        """G and S so far."""
        if self._g is None:
            raise ValueError("loader is empty: it yielded no record")
        parallel = self._parallel or self._g.shape[0] == 1
        curvature = None if self._s is None else self._s.result()
        return ClippedSums(self._g, curvature, *self._bounds, parallel, self._rank, self._joint_radius)


def _clip(norms: Tensor, bound: float) -> Tensor:
    """min(1, bound/norm), 1 for a norm of zero."""
    return (bound / norms).clamp(max=1.0)
