"""Settings for a private run, found on public data alone.

``suggest`` rehearses private fine-tuning: public records, shifted as the private ones might be, stand in for them, every
candidate setting is run on a part of these with as much noise as the real run would have, and judged on the rest. Nothing
private is touched, so the choice costs no privacy, however many candidates are tried.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset, TensorDataset

from opacus_expm import _check
from opacus_expm.bounds import QUANTILES
from opacus_expm.engine import ExpMQuadEngine
from opacus_expm.gathering import loaders
from opacus_expm.gathering.criteria import make_criterion
from opacus_expm.gathering.model import check_module, evaluation_mode
from opacus_expm.gathering.views import Views
from opacus_expm.mechanism import curves
from opacus_expm.subspaces import Preconditioned, Sparse, Stiefel, Subspace
from opacus_expm.subspaces.preconditioned import PUBLIC_RANK
from opacus_expm.subspaces.scales import measured_scales

RECORDS = 14_336  # public records that take part
_HELD_OUT = 0.25  # of them at least
_STAND_INS = 6144  # at the most; the others judge
_PUBLIC_ROLE = 2048  # of the stand-ins, for bounds and public curvature
_FINALISTS = 3
_LEADING = 800  # directions of the public metric
_BATCH = 256
_NOISE = 2.0  # of the default shift, in standard deviations of the inputs


@dataclass(frozen=True)
class Candidate:
    """A setting to try: arguments of ``make_private_expm``.

    Attributes:
        projection: kind of subspace.
        proj_dim: k.
        rounds: T.
        radius: R.
        damping_share: of ``"preconditioned"``, the damping as a share of the largest public eigenvalue; None takes the
            engine's default, also for the two that follow.
        quantile: with ``damping_share``, of the public gradient norms, for C_g.
        public_temperature: with ``damping_share``, of the public curvature.
        denoise: whether known noise is taken out of the draws.
        shifted: whether bounds and public curvature come from the shifted public records, or from those as they are. With
            private curvature the bounds should be in proportion to what is there; without it the radius sets the length of a
            step, and small bounds mean less noise.
        public_rank: eigenpairs of the public curvature.
        seen: whether records count with the mean over their views, which ``suggest`` is then given.
        scaled: with ``damping_share``, whether parameters are measured in units that suit the shift
            (see ``opacus_expm.subspaces.scales``).
    """

    projection: str
    proj_dim: int | None
    rounds: int
    radius: float
    damping_share: float | None = None
    quantile: float = QUANTILES["max_grad_norm"]
    public_temperature: float = 1.0
    denoise: bool = False
    shifted: bool = True
    public_rank: int = PUBLIC_RANK
    seen: bool = False
    scaled: bool = False

    def recipe(self) -> Subspace:
        """The subspace, before anything was learned from public data."""
        if self.projection == "preconditioned":
            return Preconditioned(self.public_rank, temperature=self.public_temperature, denoise=self.denoise)
        recipe = Sparse if _check.one_of("projection", self.projection, ("sparse", "stiefel")) == "sparse" else Stiefel
        return recipe(denoise=self.denoise)

    def __str__(self) -> str:
        space = "the full space" if self.proj_dim is None else f"{self.proj_dim} dimensions"
        text = f"radius {self.radius:g}, {self.projection} projection, {space}, {self.rounds} round(s)"
        if self.damping_share is not None:
            text += (
                f", damping {self.damping_share:g} of the largest eigenvalue at temperature {self.public_temperature:g}"
            )
            text += f", bound at {self.quantile:g} of the norms"
        text += ", denoised" if self.denoise else ""
        text += ", views" if self.seen else ""
        text += ", scaled" if self.scaled else ""
        return text + ("" if self.shifted else ", bounds from records as they are")


@dataclass(frozen=True, eq=False)
class Suggestion:
    """Settings for ``make_private_expm``, and how they were found; all public.

    Attributes:
        candidate: the setting.
        regularization: λ.
        max_grad_norm: C_g.
        max_curvature: C_H.
        projection: the subspace, with its settings.
        public_loader: public records, shifted or as they are, which public projections need.
        views: of each record, or None.
        tried: every candidate with what it was worth in the rehearsal, on average, best first, finalists before others: the
            share of held-out records that were classified wrongly, or where targets are no classes the held-out loss.
        zero_shot: the same of the model as it is.
        judged_by: ``"error"`` or ``"loss"``.
    """

    candidate: Candidate
    regularization: float
    max_grad_norm: float
    max_curvature: float
    projection: Subspace
    public_loader: DataLoader[Any]
    views: Views | None
    tried: tuple[tuple[Candidate, float], ...]
    zero_shot: float
    judged_by: str

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of ``make_private_expm``, after model, loader and budget."""
        return {
            "radius": self.candidate.radius,
            "proj_dim": self.candidate.proj_dim,
            "projection": self.projection,
            "rounds": self.candidate.rounds,
            "regularization": self.regularization,
            "max_grad_norm": self.max_grad_norm,
            "max_curvature": self.max_curvature,
            "views": self.views,
            "public_loader": self.public_loader,
        }

    def __str__(self) -> str:
        lines = [
            f"{self.candidate}: the best of {len(self.tried)} settings rehearsed on shifted public records",
            f"max_grad_norm {self.max_grad_norm:.4g}, max_curvature {self.max_curvature:.4g}: quantiles of the norms on "
            f"public records{', shifted' if self.candidate.shifted else ' as they are'}",
            f"regularization {self.regularization:.4g}: the default for these bounds",
            f"held-out {self.judged_by} in the rehearsal: {self.zero_shot:.4g} before, {self.tried[0][1]:.4g} after",
        ]
        lines += [f"  {value:10.4g}  {candidate}" for candidate, value in self.tried]
        return "\n".join(lines)


@dataclass(eq=False)
class _Trial:
    """A candidate with what its rehearsals came to."""

    candidate: Candidate
    metric: dict[str, Any] = field(default_factory=dict)
    values: list[float] = field(default_factory=list)
    release: Any = None

    def mean(self) -> float:
        """The mean over the rehearsals so far."""
        return float(np.mean(self.values))

    def worth(self) -> tuple[bool, float]:
        """A key to sort by, in which what is not a number comes last."""
        return math.isnan(self.mean()), self.mean()


def suggest(
    model: nn.Module,
    public_loader: DataLoader[Any],
    epsilon: float,
    delta: float,
    n: int,
    *,
    criterion: Callable[[Tensor, Tensor], Tensor] | None = None,
    shift: Callable[[Tensor], Tensor] | None = None,
    views: Views | None = None,
    candidates: Sequence[Candidate] | None = None,
    repeats: int = 2,
    finals: int = 0,
    seed: int = 0,
) -> Suggestion:
    """Propose radius, dimension, projection, rounds, ridge and bounds for a private run, from public data alone.

    Up to 14,336 public records are shifted and split; three quarters, but no more than 6,144, stand in for the private data,
    and the others judge. Classes are judged by the share of errors, since a few records with a large loss would decide
    otherwise.

    A rehearsal on n₀ records has the same noise, relative to the sums, as the real run on n if ε and μ are larger by n/n₀:
    the density depends on the data through c·G and c·S only, which grow with the number of records.

    Args:
        model: pretrained module.
        public_loader: public data as (input, target) batches; inputs are one floating tensor.
        epsilon: ε of the private run.
        delta: δ of the private run.
        n: number of private records, rounded, public.
        criterion: the loss; None infers it.
        shift: what may be different about the private inputs; by default noise of two standard deviations of the public
            inputs is added, a shift that is worth fine-tuning for. A user who knows more about it passes a function.
        views: other views of the same records, as in ``make_private_expm``, to be tried as well: they are worth their work
            where noise decides.
        candidates: settings to try, ``default_candidates`` if None.
        repeats: rehearsals of each candidate, with fresh noise.
        finals: further rehearsals of the three best, which noise may have put into the wrong order.
        seed: of the split, the shift and the rehearsals' noise, so that a suggestion can be found again.

    Raises:
        ValueError: inputs that cannot be shifted (pass ``shift``), or too few records.

    **Privacy:** uses no private data, so nothing is charged.
    """
    _check.positive("epsilon", epsilon)
    _check.fraction("delta", delta)
    _check.positive_int("n", n)
    _check.positive_int("repeats", repeats)
    _check.count("finals", finals)
    _check.seed("seed", seed)
    public = _Public.of(public_loader, shift, seed)
    module = check_module(model)
    value, judged_by = _judge(criterion, *public.held_out)
    size = sum(p.numel() for p in module.parameters() if p.requires_grad)
    candidates = default_candidates(size, delta, views=views is not None) if candidates is None else candidates
    _check_candidates(candidates, views)
    rehearsal = _Rehearsal(module, public, criterion, views, delta, seed)
    budget = rehearsal.budget(epsilon, n)
    trials = [_Trial(candidate) for candidate in candidates]
    for trial, repeat in itertools.product(trials, range(repeats)):
        rehearsal.run(trial, repeat, budget, value)
    trials.sort(key=_Trial.worth)
    finalists = trials[:_FINALISTS]
    for trial, repeat in itertools.product(finalists, range(repeats, repeats + finals)):
        rehearsal.run(trial, repeat, budget, value)
    # Among themselves: whoever was behind after few rehearsals stays behind.
    tried = sorted(finalists, key=_Trial.worth) + trials[_FINALISTS:]
    best, release = tried[0].candidate, tried[0].release
    return Suggestion(
        best,
        release.regularization,
        release.max_grad_norm,
        release.max_curvature,
        tried[0].metric.get("projection", best.recipe()),
        public.loaders[best.shifted],
        views if best.seen else None,
        tuple((trial.candidate, trial.mean()) for trial in tried),
        value(module),
        judged_by,
    )


def _check_candidates(candidates: Sequence[Candidate], views: Views | None) -> None:
    """Refuse an empty list, and candidates that lack what they need."""
    if not candidates:
        raise ValueError("candidates must not be empty: pass settings to try, or None for the default ones")
    if views is None and any(candidate.seen for candidate in candidates):
        raise ValueError("views must be given for candidates with seen=True: a function from inputs to a list of them")
    if any(candidate.scaled and candidate.damping_share is None for candidate in candidates):
        raise ValueError(
            "damping_share must be given for candidates with scaled=True: units are measured in its metric"
        )


@dataclass(frozen=True, eq=False)
class _Public:
    """Public records in their roles.

    Attributes:
        stand_ins: shifted, in the place of private ones.
        held_out: inputs and targets of those that judge, shifted too.
        loaders: of some that give bounds and public curvature, shifted (True) or as they are (False).
    """

    stand_ins: TensorDataset
    held_out: tuple[Tensor, Tensor]
    loaders: dict[bool, DataLoader[Any]]

    @classmethod
    def of(cls, public_loader: DataLoader[Any], shift: Callable[[Tensor], Tensor] | None, seed: int) -> _Public:
        """Shifted and split at random."""
        plain, y = _records(public_loader)
        x = _shifted(plain, shift, seed)
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed + 1))
        kept = min(len(x) - max(1, int(_HELD_OUT * len(x))), _STAND_INS)
        own = order[:kept][:_PUBLIC_ROLE]
        return cls(
            TensorDataset(x[order[:kept]], y[order[:kept]]),
            (x[order[kept:]], y[order[kept:]]),
            {
                shifted: DataLoader(TensorDataset(inputs[own], y[own]), batch_size=_BATCH)
                for shifted, inputs in ((True, x), (False, plain))
            },
        )


@dataclass(frozen=True, eq=False)
class _Rehearsal:
    """What all rehearsals of one suggestion have in common."""

    module: nn.Module
    public: _Public
    criterion: Callable[[Tensor, Tensor], Tensor] | None
    views: Views | None
    delta: float
    seed: int

    def budget(self, epsilon: float, n: int) -> float:
        """The ε with which so few stand-ins have the noise, relative to the sums, that n records have with ε."""
        more = n / len(self.public.stand_ins)
        if self.delta == 0:
            return more * epsilon
        # the (ε, δ) whose μ is larger by n/n₀
        return curves.gaussian_epsilon(more * curves.gaussian_mu(epsilon, self.delta), self.delta)

    def run(self, trial: _Trial, repeat: int, budget: float, value: Callable[[nn.Module], float]) -> None:
        """One release of a candidate on the stand-ins, and what it is worth."""
        candidate = trial.candidate
        if candidate.damping_share is not None and not trial.metric:
            trial.metric = self._measured(candidate)
            if candidate.scaled:
                trial.metric = self._measured(candidate, self._units(trial))
        settings = self._settings(trial)
        settings["projection"] = settings["projection"].seeded(self.seed + 1000 * repeat)
        engine = ExpMQuadEngine(distributed=False, noise_generator=np.random.default_rng([self.seed, repeat]))
        loader = DataLoader(self.public.stand_ins, batch_size=_BATCH)
        private = engine.make_private_expm(
            self.module, loader, budget, candidate.radius, delta=self.delta, rounds=candidate.rounds, **settings
        )
        trial.values.append(value(private))
        trial.release = engine.accountant.releases[-1]

    def _settings(self, trial: _Trial) -> dict[str, Any]:
        """What a pass and a release have in common."""
        candidate = trial.candidate
        return {
            "proj_dim": candidate.proj_dim,
            "public_loader": self.public.loaders[candidate.shifted],
            "views": self.views if candidate.seen else None,
            "criterion": self.criterion,
            "progress": False,
            "projection": candidate.recipe(),
            **trial.metric,
        }

    def _measured(self, candidate: Candidate, scales: dict[str, float] | None = None) -> dict[str, Any]:
        """The public metric of a candidate."""
        recipe = candidate.recipe()
        assert isinstance(recipe, Preconditioned)
        assert candidate.damping_share is not None
        return ExpMQuadEngine(distributed=False).public_metric(
            self.module,
            self.public.loaders[candidate.shifted],
            candidate.proj_dim,
            damping_share=candidate.damping_share,
            quantile=candidate.quantile,
            projection=replace(recipe, scales=scales),
            criterion=self.criterion,
            views=self.views if candidate.seen else None,
        )

    def _units(self, trial: _Trial) -> dict[str, float]:
        """The units of the parameters, from the two halves of the stand-ins."""
        settings, records = self._settings(trial), self.public.stand_ins
        settings["projection"] = settings["projection"].seeded(self.seed)
        middle = len(records) // 2
        halves = [
            ExpMQuadEngine(distributed=False).gather(self.module, DataLoader(half, batch_size=_BATCH), **settings)
            for half in (Subset(records, range(middle)), Subset(records, range(middle, len(records))))
        ]
        gradients = [statistics.sums.gradient for statistics in halves]
        return measured_scales(halves[0].layout, halves[0].projection, *gradients, seed=self.seed)


def default_candidates(size: int, delta: float, *, views: bool = False) -> list[Candidate]:
    """Settings that ``suggest`` tries for p = ``size`` parameters.

    At δ > 0 rounds are cheap (μ/√T each): few of them, clipped harder, where noise decides, and more where there is little
    of it. The metric is that of the outputs on public records (infinite temperature), damped at 1/160 of its largest
    eigenvalue. They work in the full space, or where that is larger in the 800 leading directions of this metric: a gradient
    is made of what moves the outputs, so beyond them is more noise than signal. There, where noise decides, ``views`` are
    tried, and parameters in units that suit the shift. A pure budget is split as ε/T, so one draw in a subspace is tried,
    random or chosen by public curvature.
    """
    if delta > 0:
        tried: list[tuple[int | None, int, float, float, bool, bool]] = [
            (None, 2, 4.0, 0.9, False, False),
            (None, 4, 2.0, 0.9, False, False),
            (None, 4, 3.0, 0.95, False, False),
            (None, 8, 3.0, 0.95, False, False),
            (None, 16, 3.0, 0.95, False, False),
            (None, 16, 4.0, 0.95, False, False),
        ]
        if size > _LEADING:
            tried += [(_LEADING, 4, 3.0, 0.8, False, False), (_LEADING, 4, 3.0, 0.8, views, True)]
        if views:
            tried.append((_LEADING if size > _LEADING else None, 4, 3.0, 0.8, True, False))
        return [
            Candidate(
                "preconditioned",
                dim,
                rounds,
                radius,
                damping_share=1 / 160,
                quantile=quantile,
                public_temperature=math.inf,
                shifted=False,
                public_rank=PUBLIC_RANK if dim is None else dim,
                seen=seen,
                scaled=scaled,
            )
            for dim, rounds, radius, quantile, seen, scaled in tried
        ]
    dims = [k for k in (100, PUBLIC_RANK) if k < size] or [size]
    return [
        Candidate(projection, dim, 1, radius)
        for projection, dim, radius in itertools.product(("preconditioned", "sparse"), dims, (0.1, 0.3, 1.0))
    ]


def shifted_records(
    public_loader: DataLoader[Any], *, shift: Callable[[Tensor], Tensor] | None = None, seed: int = 0
) -> TensorDataset:
    """Up to 14,336 public records, shifted as the private ones might be. Arguments as in ``suggest``."""
    x, y = _records(public_loader)
    return TensorDataset(_shifted(x, shift, seed), y)


def _records(public_loader: DataLoader[Any]) -> tuple[Tensor, Tensor]:
    """Inputs and targets of up to 14,336 public records."""
    loaders.check_loader(public_loader, "public_loader")
    inputs, targets, count = [], [], 0
    for batch in public_loader:
        x, y = loaders.split_batch(batch)
        if not isinstance(x, Tensor) or not x.is_floating_point():
            raise ValueError(
                f"public_loader's inputs must be one floating tensor for a rehearsal, got {type(x).__name__}; choose the "
                "settings by paper.radius_rule, or rehearse by hand"
            )
        inputs.append(x)
        targets.append(y)
        count += len(x)
        if count >= RECORDS:
            break
    x, y = torch.cat(inputs)[:RECORDS], torch.cat(targets)[:RECORDS]
    if len(x) < 8:
        raise ValueError(f"public_loader must have at least 8 records for a rehearsal, got {len(x)}")
    return x, y


def _shifted(x: Tensor, shift: Callable[[Tensor], Tensor] | None, seed: int) -> Tensor:
    """Inputs as the private ones might be."""
    if shift is not None:
        return shift(x)
    noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(seed))
    return x + _NOISE * x.std() * noise.to(x)


def _judge(
    criterion: Callable[[Tensor, Tensor], Tensor] | None, x: Tensor, y: Tensor
) -> tuple[Callable[[nn.Module], float], str]:
    """What a module is worth on held-out public records, the less the better: its share of errors, or its mean loss."""
    classes = not y.is_floating_point()
    loss = criterion
    if loss is None:
        make_criterion(None, y)  # says what is inferred
        loss = nn.CrossEntropyLoss() if classes else nn.MSELoss()

    def total(outputs: Tensor, targets: Tensor) -> float:
        if classes:
            return float((outputs.argmax(-1) != targets).double().mean()) * len(targets)
        return float(loss(outputs, targets)) * len(targets)

    @torch.no_grad()
    def evaluate(module: nn.Module) -> float:
        device = next(module.parameters()).device
        with evaluation_mode(module):
            parts = [
                total(module(x[i : i + _BATCH].to(device)), y[i : i + _BATCH].to(device))
                for i in range(0, len(x), _BATCH)
            ]
        return math.fsum(parts) / len(x)

    return evaluate, "error" if classes else "loss"
