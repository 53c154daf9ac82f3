"""``ExpMQuadEngine``: the order of the steps, from a model and its private data to a private model.

    DataLoader → projected per-sample rows → clipped sums → calibrated temperature
      ════ everything above holds private data; only a draw, already in the ledger, crosses this line ════
      → ξ from the truncated Gaussian → θ* + Aξ → a plain nn.Module

One pass over the data serves every ε and, the bounds being fixed, every radius.
"""

from __future__ import annotations

import copy
import functools
import inspect
import math
import os
import secrets
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Real
from typing import Any, Concatenate, NoReturn, ParamSpec

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn, optim
from torch.utils.data import DataLoader

from opacus_expm import _check, _files, swap
from opacus_expm.accounting.accountant import ExpMAccountant, NotCopied
from opacus_expm.accounting.admission import Admission
from opacus_expm.accounting.events import PlannedEvent, Purchase, Release
from opacus_expm.bounds import (
    QUANTILES,
    Bounds,
    Uniforms,
    checked_bounds,
    grid_counts,
    private_quantile,
    quantile_epsilon,
    warn_if_unreliable,
)
from opacus_expm.gathering import loaders
from opacus_expm.gathering.files import PassFile
from opacus_expm.gathering.model import Layout, check_module, check_resolution, digest, tensor_digest
from opacus_expm.gathering.ranks import Ranks, described
from opacus_expm.gathering.statistics import Remembered, Statistics, Workbench, nominal_size_of
from opacus_expm.gathering.views import Views, check_views
from opacus_expm.mechanism.calibration import (
    Allowance,
    Calibration,
    allowances,
    calibrate_within,
    check_request,
    cost_whatever_the_bounds,
    default_regularization,
)
from opacus_expm.mechanism.sampling import Exact, Gibbs, PlainRejection, Sampler, check_noise_generator, noise_source
from opacus_expm.mechanism.secure import FAILURE_PROBABILITY, FixedWork, SystemNoise, proposals_needed, within_reach
from opacus_expm.mechanism.sensitivity import ADJACENCIES
from opacus_expm.subspaces.projection import KINDS, PUBLIC_KINDS, PublicCurvature, Subspace
from opacus_expm.subspaces.shrinkage import public_variance, shrunk

PUBLIC_RANK = 400  # eigenpairs of the public curvature
_WIDE_BYTES = 2**28  # of full-space rows at a time
_OWN = {"noise_generator", "progress", "pieces"}  # of a rank: the sums do not depend on them
P = ParamSpec("P")
SAMPLERS: dict[str, Sampler] = {"exact": Exact(), "gibbs": Gibbs(), "rejection": PlainRejection()}


class ExpMQuadEngine(NotCopied):
    """Private fine-tuning in one draw; parallels ``opacus.PrivacyEngine``.

    Args:
        accountant: a ledger to go on with (for example that of an Opacus ``PrivacyEngine(accountant="expm")`` that
            trained on the same data); a new one by default.
        secure_mode: draw with the operating system's cryptographic noise and work that does not depend on the data
            (see ``opacus_expm.mechanism.secure``).
        budget: (ε, δ) that may not be exceeded: a release that would is refused before any data is touched. It belongs to
            the ledger: declare it when the ledger begins, and leave it out to go on with one.
        ledger_path: append-only file in which every charge is on disk before its draw.
        distributed: share the work among the ranks of ``torch.distributed``. None does so where a process group of several
            ranks is initialised, as under ``torchrun``: every rank then makes the same calls with a loader over the whole
            data set, visits its own part of it, and gets the same model; one of them charges and draws (see
            ``opacus_expm.gathering.ranks``). False works in this process alone; True insists on a process group.

    Examples:
        >>> import torch
        >>> from torch.utils.data import DataLoader, TensorDataset
        >>> from opacus_expm import ExpMQuadEngine
        >>> model = torch.nn.Linear(3, 1)
        >>> x = torch.randn(64, 3)
        >>> loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=16)
        >>> engine = ExpMQuadEngine()
        >>> private = engine.make_private_expm(model, loader, epsilon=1.0, radius=0.5, proj_dim=2,
        ...     criterion=torch.nn.MSELoss(), max_grad_norm=1.0, max_curvature=1.0)
        >>> engine.get_epsilon(delta=0.0)
        1.0
    """

    def __init__(
        self,
        *,
        accountant: ExpMAccountant | None = None,
        secure_mode: bool = False,
        budget: tuple[float, float] | None = None,
        ledger_path: str | os.PathLike[str] | None = None,
        distributed: bool | None = None,
    ):
        if distributed is not None and not isinstance(distributed, bool):
            raise TypeError(f"distributed must be True, False or None, got {distributed!r}")
        if accountant is not None and not isinstance(accountant, ExpMAccountant):
            raise TypeError(
                f"accountant must be an ExpMAccountant, got {type(accountant).__name__}; to share a ledger with "
                "Opacus, create its engine with PrivacyEngine(accountant='expm') and pass privacy_engine.accountant"
            )
        if accountant is not None and (budget is not None or ledger_path is not None):
            raise ValueError("accountant is given: pass budget and ledger_path to ExpMAccountant(...) instead")
        self.accountant = ExpMAccountant(budget=budget, ledger_path=ledger_path) if accountant is None else accountant
        self.secure_mode = bool(secure_mode)
        self._distributed, self._ranks = distributed, Ranks()
        self._curvatures: dict[tuple[Any, ...], tuple[object, PublicCurvature]] = {}

    def make_private_expm(
        self,
        model: nn.Module,
        loader: DataLoader[Any],
        epsilon: float,
        radius: float | Sequence[float],
        proj_dim: int | None,
        *,
        delta: float = 0.0,
        criterion: Callable[[Tensor, Tensor], Tensor] | None = None,
        rounds: int = 1,
        max_grad_norm: float | None = None,
        max_curvature: float | None = None,
        public_loader: DataLoader[Any] | None = None,
        bounds: str | None = None,
        clipping: str = "separate",
        regularization: float | None = None,
        denoise: bool = False,
        adjacency: str = "add_remove",
        calibration: str = "auto",
        sampler: str | Sampler = "exact",
        projection: str = "stiefel",
        projection_seed: int | None = None,
        public_rank: int = PUBLIC_RANK,
        damping: float | None = None,
        public_temperature: float = 1.0,
        parameter_scales: Mapping[str, float] | None = None,
        nominal_size: int | None = None,
        grad_sample_mode: str | None = None,
        curvature_samples: int | None = None,
        views: Views | None = None,
        max_physical_batch_size: int | None = None,
        noise_generator: torch.Generator | np.random.Generator | None = None,
        progress: bool | None = None,
    ) -> nn.Module:
        """Fine-tune ``model`` privately on ``loader``: one pass, one draw, one charge (or one of each a round).

        Args:
            model: pretrained module; parameters with ``requires_grad`` may move. It is not modified.
            loader: private data as (input, target) batches, every record once (see ``opacus_expm.gathering.loaders``).
            epsilon: ε > 0.
            radius: R > 0, how far the parameters may move, in Euclidean norm; one number, or one for each round. Not to be
                read off the private data.
            proj_dim: dimension k of the random subspace; None works in the full parameter space.
            delta: δ in [0, 1); 0 gives pure ε-DP.
            criterion: the loss; None infers cross-entropy or mean squared error from the target's dtype, and says so.
            rounds: T: each round starts from the last one's release, with statistics gathered there, on a fresh subspace.
                The budget is split in advance: ε/T each, or of an (ε, δ) budget μ/√T each.
            max_grad_norm: C_g, bound on one record's projected gradient.
            max_curvature: C_H, bound on one record's projected curvature; 0 uses no private curvature, the default with
                ``projection="preconditioned"``.
            public_loader: public data on which the bounds that are not given are measured. Without it they are bought:
                private quantiles of the private norms, at most 5 % of ε each, charged and taken out of the draw's ε.
            bounds: None, or ``"paper"``: the source paper's practice of reading them off the private data. That is **not
                private**; a warning says so and ``get_epsilon`` then refuses to state a guarantee.
            clipping: ``"separate"`` bounds for gradient and curvature, or ``"joint"``: a record's gradient and curvature are
                scaled together, so that its utility is no wider over the ball than that of a gradient of ``max_grad_norm``.
            regularization: λ ≥ 0, ridge per record on |ξ|². The default is rank·C_H/k, or C_g/R without private curvature
                (see ``calibration.default_regularization``).
            denoise: take the known part of the noise out of every draw, group by group of parameters: post-processing, at no
                cost in privacy (see ``opacus_expm.subspaces.shrinkage``). Needs ``max_curvature=0``.
            adjacency: ``"add_remove"`` (as Opacus's accountants) or ``"replace_one"``.
            calibration: ``"auto"``, ``"range"``, ``"gaussian"`` or ``"paper"`` (see ``opacus_expm.mechanism.calibration``).
            sampler: ``"exact"``; or the source paper's ``"gibbs"`` and ``"rejection"``, or a configured sampler of
                ``mechanism.sampling``, which ε does not fully cover and which warn or may give up. After a release with
                anything but ``"exact"``, ``get_epsilon`` refuses to state a guarantee; a budget refuses the release.
            projection: ``"stiefel"`` or ``"sparse"``, random; ``"public"``, the leading eigenvectors of the curvature on
                ``public_loader``; ``"preconditioned"``, where that curvature gives the metric of the ball.
            projection_seed: public seed of the subspace (round t adds t); drawn afresh by default, and recorded.
            public_rank: eigenpairs of the public curvature for ``"preconditioned"``.
            damping: h₀ of ``"preconditioned"`` (see ``opacus_expm.subspaces.projection``).
            public_temperature: τ ≥ 1, by which outputs are divided where public curvature is computed. A model is surer of
                public records than it will be of private ones, so that their curvature is too small; ``math.inf`` measures
                how the outputs move, whatever the model is sure of. Squared errors do not depend on it.
            parameter_scales: public positive numbers by parameter name, 1 where none is given: units in which parameters are
                measured by ``"public"`` and ``"preconditioned"``, so that those with a larger one move further (see
                ``opacus_expm.subspaces.scales``).
            nominal_size: public N; ``len(dataset)`` by default, which publishes the size, as Opacus does.
            grad_sample_mode: ``"hooks"``, ``"functorch"``, or None for hooks where they can serve.
            curvature_samples: random probes s of each record's curvature instead of its m exact rows: 1 + s backward
                passes. None is exact up to 64 outputs, and takes 8 probes beyond, for sequences and with ``views``.
            views: a function from a batch of inputs to a list of batches like it, the same records seen differently, such as
                ``gathering.views.pixel_shifts``. A record counts with the mean over its views, which is then clipped: more
                signal for the same noise, and V times the work.
            max_physical_batch_size: records processed at a time, to cap memory; halved where memory runs out, and the pass
                starts again (see ``loaders.Pieces``).
            noise_generator: for tests and simulations only; the operating system's entropy by default. The ledger records
                that one was given, ``get_epsilon`` warns, and a budget refuses it.
            progress: show a bar; None shows it on a terminal. None is shown where ``nominal_size`` is given, because it
                would tell the data set's size.

        Returns:
            A plain module of ``model``'s own class with parameters θ* + Aξ.

        Raises:
            TypeError, ValueError: bad input; nothing is charged or changed.

        **Privacy:** the result is (ε, δ)-DP with respect to the loader's records under the given adjacency, and the
        ledger is charged before each draw. With several rounds every round's model is covered, not only the last.
        """
        arguments: dict[str, Any] = {
            "epsilon": epsilon,
            "delta": delta,
            "radius": radius,
            "rounds": rounds,
            "max_grad_norm": max_grad_norm,
            "max_curvature": max_curvature,
            "projection_seed": projection_seed,
            "regularization": regularization,
            "denoise": denoise,
            "adjacency": adjacency,
            "calibration": calibration,
            "sampler": sampler,
            "criterion": criterion,
            "public_loader": public_loader,
            "bounds": bounds,
            "clipping": clipping,
            "projection": projection,
            "public_rank": public_rank,
            "damping": damping,
            "public_temperature": public_temperature,
            "parameter_scales": parameter_scales,
            "nominal_size": nominal_size,
            "grad_sample_mode": grad_sample_mode,
            "curvature_samples": curvature_samples,
            "views": views,
            "noise_generator": noise_generator,
            "progress": progress,
        }
        with self._on_all_ranks(model=model, loader=loader, proj_dim=proj_dim, **arguments):
            plan = self._rounds(loader, proj_dim, pieces=loaders.Pieces(max_physical_batch_size), **arguments)
            module = model
            try:
                for number in range(plan.count):
                    module = plan.draw(plan.begin(module, number)(loader), number)
            finally:
                plan.end()
        return module

    @contextmanager
    def _on_all_ranks(self, **arguments: Any) -> Iterator[None]:
        """A call that every rank makes with the same arguments, and that succeeds or fails on all of them."""
        self._ranks = ranks = Ranks.current(self._distributed)
        try:
            with ranks.together():
                ranks.same(lambda: self._facts(**arguments))
                yield
        finally:
            self._ranks = Ranks()

    def _facts(self, **arguments: Any) -> dict[str, object]:
        """What has to be the same on every rank before private data is touched."""
        if "model" in arguments:
            check_module(arguments["model"])
        facts = {name: described(value) for name, value in arguments.items() if name not in _OWN}
        statistics = arguments.get("statistics")
        if isinstance(statistics, Statistics):
            facts["statistics"] = (statistics.configuration, sorted(statistics.shards), statistics.nominal_size)
        return {**facts, "secure_mode": self.secure_mode, "the ledger": self.accountant.identity()}

    def make_private_with_epsilon(
        self,
        *,
        module: nn.Module,
        optimizer: optim.Optimizer,
        criterion: Callable[[Tensor, Tensor], Tensor] | None = None,
        data_loader: DataLoader[Any],
        target_epsilon: float,
        target_delta: float,
        epochs: int,
        max_grad_norm: float | None,
        radius: float | Sequence[float],
        proj_dim: int | None,
        max_curvature: float | None = 0.0,
        public_loader: DataLoader[Any] | None = None,
        regularization: float | None = None,
        denoise: bool = False,
        adjacency: str = "add_remove",
        calibration: str = "auto",
        sampler: str | Sampler = "exact",
        projection: str = "stiefel",
        projection_seed: int | None = None,
        public_rank: int = PUBLIC_RANK,
        damping: float | None = None,
        public_temperature: float = 1.0,
        parameter_scales: Mapping[str, float] | None = None,
        nominal_size: int | None = None,
        curvature_samples: int | None = None,
        views: Views | None = None,
        max_physical_batch_size: int | None = None,
        noise_generator: torch.Generator | np.random.Generator | None = None,
        batch_first: bool = True,
        loss_reduction: str = "mean",
        poisson_sampling: bool = False,
        clipping: str = "flat",
        grad_sample_mode: str | None = "ghost",
        wrap_model: bool = True,
        progress: bool | None = None,
    ) -> swap.StandIns:
        """Stand in for ``opacus.PrivacyEngine.make_private_with_epsilon`` in ghost mode: an epoch of the loop is a round.

        The user's own loop (``zero_grad``, ``criterion(module(x), y)``, ``backward``, ``step``) runs unchanged: statistics
        are gathered in ``backward``, and the ``step`` after an epoch's last batch draws the next weights. What the loop may
        and may not do is in the table of ``opacus_expm.swap``. After ``epochs`` epochs the module is final and ordinary.

        Where there is a budget, the first draw reserves the rounds that are left, so that nothing else can take their place.
        A loop that is not going to be finished is given up by calling this again for its module, by
        ``engine.accountant.give_up()``, or by dropping the module and what was returned.

        Args:
            module: pretrained module; as with Opacus it is the one that is trained, in place. Parameters with
                ``requires_grad`` move, and have to be the optimizer's.
            optimizer: the loop's; its learning rate plays no part.
            criterion: the loss; cross-entropy by default, as with Opacus.
            data_loader: private data, every record once an epoch (see ``opacus_expm.gathering.loaders``).
            target_epsilon: ε of all epochs together.
            target_delta: δ of all epochs together; 0 gives pure ε-DP.
            epochs: T, the number of rounds. Fewer may be run, and cost less.
            max_grad_norm: C_g; None measures it on ``public_loader``.
            radius: R > 0, how far the parameters may move in a round; one number, or one for each round.
            proj_dim: dimension k of the random subspace; None works in the full parameter space.
            max_curvature: C_H; by default no private curvature is used. None measures it on ``public_loader``.
            public_loader: public data for bounds and projections, as in ``make_private_expm``.
            regularization: as in ``make_private_expm``, like all that is not named here.
            denoise: likewise.
            adjacency: likewise.
            calibration: likewise.
            sampler: likewise.
            projection: likewise.
            projection_seed: likewise.
            public_rank: likewise.
            damping: likewise.
            public_temperature: likewise.
            parameter_scales: likewise.
            nominal_size: likewise.
            curvature_samples: likewise.
            views: likewise.
            max_physical_batch_size: likewise; the loader's batch by default.
            noise_generator: likewise.
            batch_first: True; a record is a row of its batch.
            loss_reduction: that of the criterion.
            poisson_sampling: False; every record counts exactly once an epoch.
            clipping: ``"flat"``, with one bound for a record's gradient (and one for its curvature), or ``"joint"``.
            grad_sample_mode: ``"ghost"`` for hooks where they can serve; ``"hooks"`` or ``"functorch"`` insist.
            wrap_model: True, though nothing is wrapped.
            progress: show a bar for passes over public data.

        Returns:
            (module, optimizer, criterion, data_loader) for the loop. ``module`` is the one that came.

        Raises:
            TypeError, ValueError: bad input; nothing is charged or changed.
            BudgetExceeded: the rounds together do not fit the budget.

        **Privacy:** that of ``make_private_expm(..., rounds=epochs)``, with the same entries in the ledger: the plan is
        admitted here, and every draw is charged before it is made. Losses of the loop are private, and have no value.
        """
        if Ranks.current(self._distributed).count > 1:
            raise ValueError(
                "make_private_with_epsilon steers a training loop in one process, and torch.distributed has several: call "
                "make_private_expm(..., rounds=...) on every rank, or use ExpMQuadEngine(distributed=False) in one of them"
            )
        module, optimizer, loss, data_loader = swap.originals(module, optimizer, criterion, data_loader)
        if public_loader is not None:
            loaders.check_public(public_loader, data_loader, "data_loader")
        clipping, grad_sample_mode = swap.check_protocol(
            loss,
            batch_first=batch_first,
            loss_reduction=loss_reduction,
            poisson_sampling=poisson_sampling,
            clipping=clipping,
            grad_sample_mode=grad_sample_mode,
            wrap_model=wrap_model,
        )
        given = checked_bounds(max_grad_norm, max_curvature, projection, clipping)
        missing = [name for name, value in given.items() if value is None]
        if missing and public_loader is None:
            raise ValueError(
                f"{missing[0]} must be given, or public_loader= to measure it on public data: a loop has no pass over the "
                "private data in which it could be bought; make_private_expm has"
            )
        rounds = self._rounds(
            data_loader,
            proj_dim,
            epsilon=_check.positive("target_epsilon", target_epsilon),
            delta=_check.fraction("target_delta", target_delta),
            radius=radius,
            rounds=_check.positive_int("epochs", epochs),
            max_grad_norm=max_grad_norm,
            max_curvature=max_curvature,
            projection_seed=projection_seed,
            regularization=regularization,
            denoise=denoise,
            adjacency=adjacency,
            calibration=calibration,
            sampler=sampler,
            criterion=loss,
            public_loader=public_loader,
            bounds=None,
            clipping=clipping,
            projection=projection,
            public_rank=public_rank,
            damping=damping,
            public_temperature=public_temperature,
            parameter_scales=parameter_scales,
            nominal_size=nominal_size,
            grad_sample_mode=grad_sample_mode,
            curvature_samples=curvature_samples,
            views=views,
            # Batches come one by one: the size of a piece cannot be read off the loader they come from.
            pieces=loaders.Pieces(max_physical_batch_size or loaders.batch_size(data_loader)),
            noise_generator=noise_generator,
            progress=progress,
            instead_of=swap.unfinished(module),
        )
        return swap.stand_ins(module, optimizer, loss, data_loader, rounds)

    def make_private(self, **_: object) -> NoReturn:
        """Not here: a noise multiplier has no meaning for the exponential mechanism.

        Raises:
            NotImplementedError: naming what to use instead.
        """
        raise NotImplementedError(
            "make_private(noise_multiplier=...) has no meaning here, where no noise is added to gradients: use "
            "make_private_with_epsilon(target_epsilon=..., radius=..., proj_dim=...) for a training loop, or "
            "make_private_expm(model, loader, epsilon, radius, proj_dim) without one"
        )

    @classmethod
    def get_compatible_module(cls, module: nn.Module) -> nn.Module:
        """The module itself: what Opacus has to replace, such as BatchNorm, is served here in evaluation mode.

        Raises:
            TypeError, ValueError: the module cannot be used; with the reason and the way out.
        """
        return check_module(module)

    def gather(
        self,
        model: nn.Module,
        loader: DataLoader[Any],
        proj_dim: int | None,
        *,
        criterion: Callable[[Tensor, Tensor], Tensor] | None = None,
        max_grad_norm: float | None = None,
        max_curvature: float | None = None,
        public_loader: DataLoader[Any] | None = None,
        bounds: str | None = None,
        epsilon: float | None = None,
        clipping: str = "separate",
        radius: float | None = None,
        adjacency: str = "add_remove",
        projection: str = "stiefel",
        projection_seed: int | None = None,
        public_rank: int = PUBLIC_RANK,
        damping: float | None = None,
        public_temperature: float = 1.0,
        parameter_scales: Mapping[str, float] | None = None,
        nominal_size: int | None = None,
        grad_sample_mode: str | None = None,
        curvature_samples: int | None = None,
        views: Views | None = None,
        max_physical_batch_size: int | None = None,
        noise_generator: torch.Generator | np.random.Generator | None = None,
        progress: bool | None = None,
        private_checkpoint: str | os.PathLike[str] | None = None,
    ) -> Statistics:
        """One pass over the private data. Arguments as in ``make_private_expm``.

        Bounds that are neither given nor measurable on a ``public_loader`` are bought with a part of ``epsilon``, at most
        5 % each, which is charged at once; ``adjacency`` and ``noise_generator`` matter for that only. ``radius`` is needed
        for ``clipping="joint"`` only, and then fixed.

        A long pass can be interrupted and resumed: with ``private_checkpoint``, a local file, its state is kept there once
        a minute, and the same call goes on from it; several ranks have a file each. Records are then visited in the data
        set's order, which must not change. The file is **private data**, readable by its owner only, and is removed when
        the pass is complete. It needs a ``projection_seed``, and bounds that are not bought.

        **Privacy:** the result is private data; apart from bounds, nothing is charged until something is released from it.
        Where bounds were bought, only an engine whose ledger paid for them can release from it.
        """
        options: dict[str, Any] = {
            "criterion": criterion,
            "public_loader": public_loader,
            "bounds": bounds,
            "clipping": clipping,
            "adjacency": adjacency,
            "projection": projection,
            "public_rank": public_rank,
            "damping": damping,
            "public_temperature": public_temperature,
            "parameter_scales": parameter_scales,
            "nominal_size": nominal_size,
            "grad_sample_mode": grad_sample_mode,
            "curvature_samples": curvature_samples,
            "views": views,
            "pieces": loaders.Pieces(max_physical_batch_size),
            "noise_generator": noise_generator,
            "progress": progress,
        }
        settings: dict[str, Any] = {"epsilon": epsilon, "radius": radius, "projection_seed": projection_seed}
        asked = {"max_grad_norm": max_grad_norm, "max_curvature": max_curvature}
        with self._on_all_ranks(model=model, loader=loader, proj_dim=proj_dim, **settings, **asked, **options):
            given = checked_bounds(max_grad_norm, max_curvature, projection, clipping)
            if projection_seed is not None:
                _check.seed("projection_seed", projection_seed)
            elif private_checkpoint is not None:
                raise ValueError(
                    "projection_seed must be given with private_checkpoint: a pass goes on in one subspace"
                )
            if public_loader is not None:  # before anything is measured on it
                loaders.check_public(public_loader, loaders.check_loader(loader))
            curvature = self._public_curvature(model, proj_dim, **options)
            bench, settled = self._settle(
                model,
                loader,
                proj_dim,
                given=given,
                curvature=curvature,
                known=None,
                admission=None,
                **settings,
                **options,
            )
            kept = None
            if private_checkpoint is not None:
                kept = self._pass_file(
                    private_checkpoint, settled, model=model, loader=loader, proj_dim=proj_dim, **settings, **options
                )
            return bench.gather(loader, kept=kept, **settled)

    def _pass_file(
        self, path: str | os.PathLike[str], settled: dict[str, Any], *, loader: DataLoader[Any], **arguments: Any
    ) -> PassFile:
        """The file of this rank's part of a pass."""
        if settled["bounds"] == "bought":
            raise ValueError(
                "private_checkpoint cannot keep a pass that buys its bounds: pass max_grad_norm= and max_curvature=, or "
                "public_loader="
            )
        ranks = self._ranks
        if ranks.count > 1:
            path = f"{os.fspath(path)}.rank{ranks.rank}of{ranks.count}"
        warnings.warn(
            f"gather(private_checkpoint=...) keeps PRIVATE data in {os.fspath(path)!r} until the pass is complete: sums "
            "over private records, without noise; delete the file if the pass is given up",
            UserWarning,
            stacklevel=3,
        )
        facts = {name: described(value) for name, value in arguments.items() if name not in _OWN}
        facts |= {name: settled[name] for name in ("max_grad_norm", "max_curvature", "joint_radius")}
        facts |= {"loader": (described(loader), loaders.batch_size(loader)), "ranks": (ranks.rank, ranks.count)}
        return PassFile(path, {**facts, "max_physical_batch_size": arguments["pieces"].padded(loader)})

    def _settle(
        self,
        model: nn.Module,
        loader: DataLoader[Any],
        proj_dim: int | None,
        *,
        criterion: Callable[[Tensor, Tensor], Tensor] | None,
        public_loader: DataLoader[Any] | None,
        bounds: str | None,
        epsilon: float | None,
        clipping: str,
        radius: float | None,
        adjacency: str,
        projection: str,
        projection_seed: int | None,
        public_rank: int,
        damping: float | None,
        public_temperature: float,
        parameter_scales: Mapping[str, float] | None,
        nominal_size: int | None,
        grad_sample_mode: str | None,
        curvature_samples: int | None,
        views: Views | None,
        pieces: loaders.Pieces,
        noise_generator: torch.Generator | np.random.Generator | None,
        progress: bool | None,
        given: Bounds,
        curvature: PublicCurvature | None,
        known: tuple[Bounds, str, frozenset[str]] | None,
        admission: Admission | None,
    ) -> tuple[Workbench, dict[str, Any]]:
        """What ``gather`` needs before its pass: a workbench, and the bounds, after the first round those of that."""
        ranks = self._ranks
        seed = projection_seed
        if seed is None:
            seed = int(ranks.from_leader(torch.tensor([secrets.randbits(63)])))
        settings: dict[str, Any] = {
            "criterion": criterion,
            "grad_sample_mode": grad_sample_mode,
            "curvature_samples": curvature_samples,
            # The bar tells how many batches there are, which whoever gives a nominal size keeps to themselves.
            "progress": progress if ranks.leads and nominal_size is None else False,
        }
        bench = Workbench(
            model,
            subspace=Subspace(projection, proj_dim, seed, curvature, damping),
            pieces=pieces,
            views=views,
            **settings,
        )
        bench.check_curvature(given["max_curvature"])
        loaders.check_loader(loader)
        size = nominal_size_of(loader, nominal_size)
        if public_loader is not None:
            loaders.check_public(public_loader, loader)
        joint_radius: float | None = None
        if clipping == "joint":
            if radius is None:
                raise ValueError("radius must be given with clipping='joint': what is clipped depends on it")
            joint_radius = _check.positive("radius", radius)
        remembered: Remembered | None = None
        missing = [name for name, value in given.items() if value is None]
        source, receipts = "given", frozenset[str]()
        if known is not None:
            given, source, receipts = known
        elif bounds == "paper":
            given, source = self._paper_bounds(model, loader, settings), "paper"
        elif missing and public_loader is not None:
            given, source = _public_bounds(bench, public_loader, given, joint_radius), "public"
        elif missing and epsilon is not None:
            _check.positive("epsilon", epsilon)
            _check.one_of("adjacency", adjacency, ADJACENCIES)
            self._check_covered("exact", noise_generator)
            given, receipts, remembered = self._buy_bounds(
                bench, loader, given, epsilon, size, adjacency, noise_generator, joint_radius, admission
            )
            source = "bought"
        elif missing:
            raise ValueError(
                f"{missing[0]} is not given: pass max_grad_norm= and max_curvature= as public constants, public_loader= to "
                "measure them on public data, or epsilon= to buy them; they must not be read off the private data"
            )
        c_g, c_h = given["max_grad_norm"], given["max_curvature"]
        assert c_g is not None
        assert c_h is not None
        if source == "public":
            c_g, c_h = ranks.from_leader(torch.tensor([c_g, c_h], dtype=torch.float64)).tolist()
        if joint_radius is not None and c_h > 0:
            c_h = 4 * c_g / joint_radius
        return bench, {
            "max_grad_norm": c_g,
            "max_curvature": c_h,
            "nominal_size": size,
            "bounds": source,
            "receipts": receipts,
            "joint_radius": joint_radius,
            "remembered": remembered,
            "ranks": ranks,
        }

    def _public_curvature(
        self,
        model: nn.Module,
        proj_dim: int | None,
        *,
        projection: str,
        public_loader: DataLoader[Any] | None,
        public_rank: int,
        damping: float | None,
        public_temperature: float,
        parameter_scales: Mapping[str, float] | None,
        criterion: Callable[[Tensor, Tensor], Tensor] | None,
        grad_sample_mode: str | None,
        curvature_samples: int | None,
        progress: bool | None,
        bounds: str | None,
        views: Views | None,
        **_: object,
    ) -> PublicCurvature | None:
        """Eigenpairs on public data where the projection needs them; computed once for a model and a loader."""
        _check.one_of("projection", projection, KINDS)
        _check.positive_int("public_rank", public_rank)
        if damping is not None:
            _check.positive("damping", damping)
        _check.temperature("public_temperature", public_temperature)
        module = check_module(model)
        scales = None if parameter_scales is None else Layout.of(module).spread("parameter_scales", parameter_scales)
        if bounds is not None:
            _check.one_of("bounds", bounds, ("paper",))
        check_views(views)
        if views is not None and bounds == "paper":
            raise ValueError("views have no part in the source paper's practice: leave views or bounds='paper' out")
        if projection not in PUBLIC_KINDS:
            if scales is not None:
                raise ValueError(
                    f"parameter_scales have no meaning with projection={projection!r}: leave them out, or use "
                    "projection='preconditioned' or 'public'"
                )
            return None
        if public_loader is None:
            raise ValueError(
                f"public_loader must be given with projection={projection!r}: its curvature comes from public data; or use "
                "projection='stiefel' or 'sparse'"
            )
        loaders.check_loader(public_loader, "public_loader")
        rank = public_rank if projection == "preconditioned" else _check.positive_int("proj_dim", proj_dim)
        key = (
            id(public_loader),
            rank,
            id(criterion),
            curvature_samples,
            public_temperature,
            None if scales is None else tensor_digest(scales),
            digest(module),
        )
        if key not in self._curvatures:
            bench = _full_space(
                model,
                criterion=criterion,
                grad_sample_mode=grad_sample_mode,
                curvature_samples=curvature_samples,
                progress=progress,
            )
            # Loader and criterion are kept with the result, so that their ids stay their own.
            self._curvatures[key] = (
                (public_loader, criterion),
                bench.public_curvature(public_loader, rank, public_temperature, scales),
            )
        found = self._curvatures[key][1]
        self._ranks.adopt(list(found.tensors().values()))
        return found

    def public_metric(
        self,
        model: nn.Module,
        public_loader: DataLoader[Any],
        proj_dim: int | None = None,
        *,
        damping_share: float,
        quantile: float = QUANTILES["max_grad_norm"],
        public_temperature: float = 1.0,
        parameter_scales: Mapping[str, float] | None = None,
        public_rank: int = PUBLIC_RANK,
        criterion: Callable[[Tensor, Tensor], Tensor] | None = None,
        views: Views | None = None,
    ) -> dict[str, Any]:
        """Arguments of ``make_private_expm`` for ``"preconditioned"`` rounds without private curvature, from public data.

        Args:
            model: as in ``make_private_expm``, like all that is not named here.
            public_loader: likewise.
            proj_dim: likewise.
            damping_share: h₀ as a share of the largest eigenvalue of the public curvature.
            quantile: of the public records' gradient norms in this metric, for C_g. A large one clips less.
            public_temperature: likewise.
            parameter_scales: likewise.
            public_rank: likewise.
            criterion: likewise.
            views: likewise; of the norms, not of the curvature.

        Returns:
            ``damping``, ``public_temperature``, ``max_grad_norm``, ``max_curvature`` = 0, and ``parameter_scales`` if given.

        **Privacy:** uses no private data.
        """
        _check.positive("damping_share", damping_share)
        _check.fraction("quantile", quantile)
        settings: dict[str, Any] = {
            "criterion": criterion,
            "grad_sample_mode": None,
            "curvature_samples": None,
            "progress": False,
        }
        measured = {
            "projection": "preconditioned",
            "public_loader": public_loader,
            "public_rank": public_rank,
            "public_temperature": public_temperature,
            "parameter_scales": parameter_scales,
            **settings,
        }
        shares = {"damping_share": damping_share, "quantile": quantile}
        with self._on_all_ranks(model=model, proj_dim=proj_dim, views=views, **shares, **measured):
            curvature = self._public_curvature(model, proj_dim, damping=None, bounds=None, views=views, **measured)
            assert curvature is not None
            damping = damping_share * float(curvature.eigenvalues[0])
            subspace = Subspace("preconditioned", proj_dim, 0, curvature, damping)
            bench = Workbench(model, subspace=subspace, pieces=loaders.Pieces(None), views=views, **settings)
            missing: Bounds = {"max_grad_norm": None, "max_curvature": 0.0}
            bounds = _public_bounds(bench, public_loader, missing, None, {"max_grad_norm": quantile})
            bound = torch.tensor([bounds["max_grad_norm"]], dtype=torch.float64)
            return {
                "damping": damping,
                "public_temperature": public_temperature,
                "max_grad_norm": float(self._ranks.from_leader(bound)),  # ranks may round differently
                "max_curvature": 0.0,
                **({} if parameter_scales is None else {"parameter_scales": parameter_scales}),
            }

    def _paper_bounds(self, model: nn.Module, loader: DataLoader[Any], settings: dict[str, Any]) -> Bounds:
        """The source paper's bounds, from the private data itself."""
        if self._ranks.count > 1:
            raise ValueError(
                "bounds='paper' reads a maximum off the data of one process; use bounds=None on several ranks"
            )
        if self.accountant.budget is not None:
            raise ValueError("bounds='paper' is not private and cannot be charged to a budget; use bounds=None")
        warnings.warn(
            "bounds='paper' reads the clipping bounds off the private data: the release is NOT differentially private",
            UserWarning,
            stacklevel=5,
        )
        gradient, curvature = _full_space(model, **settings).paper_bounds(loader)
        return {"max_grad_norm": gradient, "max_curvature": curvature}

    def _buy_bounds(
        self,
        bench: Workbench,
        loader: DataLoader[Any],
        given: Bounds,
        epsilon: float,
        nominal_size: int,
        adjacency: str,
        noise_generator: torch.Generator | np.random.Generator | None,
        joint_radius: float | None,
        admission: Admission | None,
    ) -> tuple[Bounds, frozenset[str], Remembered]:
        """Private quantiles for the bounds that are missing, charged before they are drawn, both by the leading rank."""
        ranks = self._ranks
        purchases = [
            Purchase(
                price, adjacency, name, QUANTILES[name], nominal_size, ranks.random_name(), self._noise(noise_generator)
            )
            for name, price in _prices(given, epsilon, nominal_size).items()
        ]
        for purchase in purchases:
            warn_if_unreliable(purchase.epsilon_range, nominal_size, purchase.quantile)
        remembered = bench.remember(
            loader, curvature=given["max_curvature"] != 0, joint_radius=joint_radius, ranks=ranks
        )
        noise: Uniforms | None = None
        if ranks.leads:
            noise = SystemNoise() if self.secure_mode else noise_source(noise_generator)
        found = dict(given)
        for purchase in purchases:
            counts = ranks.summed(torch.from_numpy(grid_counts(remembered.norms[purchase.bound]))).numpy()
            bound = math.nan
            if noise is not None:
                self.accountant.record(purchase, admission=admission)
                bound = private_quantile(counts, purchase.quantile, purchase.epsilon_range, adjacency, noise)
            found[purchase.bound] = float(ranks.from_leader(torch.tensor([bound], dtype=torch.float64)))
            if not ranks.leads:
                self.accountant.note(purchase, admission=admission)
        return found, frozenset(purchase.receipt for purchase in purchases), remembered

    def release(
        self,
        statistics: Statistics,
        epsilon: float,
        radius: float,
        *,
        delta: float = 0.0,
        regularization: float | None = None,
        denoise: bool = False,
        adjacency: str = "add_remove",
        calibration: str = "auto",
        sampler: str | Sampler = "exact",
        noise_generator: torch.Generator | np.random.Generator | None = None,
    ) -> nn.Module:
        """Draw one model from the statistics and charge it. Arguments as in ``make_private_expm``.

        **Privacy:** (ε, δ)-DP under the given adjacency; every call is a release of its own.
        """
        arguments: dict[str, Any] = {
            "epsilon": epsilon,
            "delta": delta,
            "regularization": regularization,
            "denoise": denoise,
            "adjacency": adjacency,
            "calibration": calibration,
            "sampler": sampler,
            "noise_generator": noise_generator,
        }
        with self._on_all_ranks(statistics=statistics, radius=radius, **arguments):
            self._check_release(epsilon, delta, radius, regularization, adjacency, calibration)
            self._check_covered(sampler, noise_generator)
            allowance = allowances(epsilon, delta)[0]
            return self._draw(statistics, allowance, radius, place=(1, 1), admission=None, **arguments)

    def _draw(
        self,
        statistics: Statistics,
        allowance: Allowance,
        radius: float,
        *,
        epsilon: float,
        delta: float,
        regularization: float | None,
        denoise: bool,
        adjacency: str,
        calibration: str,
        sampler: str | Sampler,
        noise_generator: torch.Generator | np.random.Generator | None,
        place: tuple[int, int],
        admission: Admission | None,
    ) -> nn.Module:
        """Charge, then draw, both on the leading rank; the model on every rank."""
        calibrated = self._calibrate(
            statistics,
            allowance,
            radius,
            regularization=regularization,
            adjacency=adjacency,
            calibration=calibration,
        )
        self.accountant.check_paid(statistics.receipts)
        check_resolution(statistics.module, radius, statistics.layout.size)
        draw = self._sampler(sampler)
        ridge = _ridge(statistics, radius, regularization)
        sums, subspace, ranks = statistics.sums, statistics.projection, self._ranks
        _check_denoise(denoise, sums.max_curvature)
        epsilon_range, mu = calibrated.epsilon_range, calibrated.mu
        if statistics.bounds == "bought":  # what follows from the bounds was not fixed in advance, and may not count
            epsilon_range, mu = cost_whatever_the_bounds(allowance, calibrated.method, adjacency)
        release = Release(
            epsilon_range=epsilon_range,
            mu=mu,
            adjacency=adjacency,
            epsilon=float(epsilon),
            delta=float(delta),
            calibration=calibrated.method,
            radius=float(radius),
            regularization=ridge,
            nominal_size=statistics.nominal_size,
            max_grad_norm=sums.max_grad_norm,
            max_curvature=sums.max_curvature,
            projection=subspace.kind,
            proj_dim=subspace.dim,
            seed=subspace.seed,
            sampler=self._sampler_name(draw),
            failure_probability=FAILURE_PROBABILITY if self.secure_mode else 0.0,
            bounds=statistics.bounds,
            round=place[0],
            rounds=place[1],
            noise=self._noise(noise_generator),
        )
        density = statistics.density(calibrated.inverse_temperature, radius, ridge) if ranks.leads else None
        ranks.ready()  # every rank got this far: only now is it charged
        coordinates = np.zeros(subspace.dim)
        if density is not None:
            generator = noise_source(noise_generator)
            self.accountant.record(release, admission=admission)
            if self.secure_mode:
                reach = calibrated.inverse_temperature * radius * statistics.nominal_size * sums.max_grad_norm
                fixed = FixedWork(proposals_needed(density.dim, reach))
                coordinates = fixed.sample(within_reach(density, reach), SystemNoise())
            else:
                coordinates = draw.sample(density, generator)[0]
        coordinates = ranks.from_leader(torch.from_numpy(coordinates)).numpy()
        if not ranks.leads:
            self.accountant.note(release, admission=admission)
        if denoise:
            variance = public_variance(
                calibrated.inverse_temperature, ridge, statistics.nominal_size, radius, subspace.dim
            )
            coordinates = shrunk(coordinates, variance, subspace, statistics.layout)
        module = statistics.module_at(coordinates)
        ranks.adopt([p for p in module.parameters() if p.requires_grad])
        return module

    def simulate(
        self,
        statistics: Statistics,
        epsilon: float,
        radius: float,
        evaluate: Callable[[nn.Module], float],
        *,
        draws: int = 500,
        delta: float = 0.0,
        regularization: float | None = None,
        adjacency: str = "add_remove",
        calibration: str = "auto",
        sampler: str | Sampler = "exact",
        noise_generator: torch.Generator | np.random.Generator | None = None,
    ) -> NDArray[np.float64]:
        """Values of ``evaluate`` on many simulated draws: what a release would be worth, not a release.

        **Privacy:** not private, and not charged: the draws together reveal the data far beyond ε. A warning says so.
        Publish neither the models nor the numbers; ``release`` is for that.
        """
        self._check_release(epsilon, delta, radius, regularization, adjacency, calibration)
        _check.positive_int("draws", draws)
        if not callable(evaluate):
            raise TypeError(f"evaluate must be a function from a module to a number, got {evaluate!r}")
        calibrated = self._calibrate(
            statistics,
            allowances(epsilon, delta)[0],
            radius,
            regularization=regularization,
            adjacency=adjacency,
            calibration=calibration,
        )
        warnings.warn(
            "simulate() draws models that are NOT releases: nothing is charged and the results are not private",
            UserWarning,
            stacklevel=2,
        )
        density = statistics.density(calibrated.inverse_temperature, radius, _ridge(statistics, radius, regularization))
        coordinates = self._sampler(sampler, simulated=True).sample(density, noise_source(noise_generator), draws)
        return np.array([float(evaluate(statistics.module_at(xi))) for xi in coordinates])

    def get_epsilon(self, delta: float = 0.0) -> float:
        """ε spent so far at the given δ (0 for the pure guarantee), over everything in the ledger."""
        return self.accountant.get_epsilon(delta)

    def remaining(self) -> float:
        """The largest ε of one more pure release within the budget; infinite without a budget."""
        return self.accountant.remaining()

    def save_checkpoint(
        self, *, path: str | os.PathLike[str], module: nn.Module, checkpoint_dict: dict[str, Any] | None = None
    ) -> None:
        """Save a released module's weights and the ledger, as ``opacus.PrivacyEngine`` does; never statistics.

        The file is there as a whole or not at all: an interruption leaves an earlier one as it was.

        Args:
            path: file to write.
            module: a private module.
            checkpoint_dict: further entries of the user's own.
        """
        if not isinstance(module, nn.Module):
            raise TypeError(f"module must be a torch.nn.Module, got {type(module).__name__}")
        content = dict(checkpoint_dict or {})
        content["module_state_dict"] = module.state_dict()
        content["privacy_accountant_state_dict"] = self.accountant.state_dict()
        with _files.replacing(path) as file:
            torch.save(content, file)

    def load_checkpoint(self, *, path: str | os.PathLike[str], module: nn.Module) -> dict[str, Any]:
        """Load weights into ``module`` and the ledger into this engine; no code in the file is run.

        The saved ledger has to begin with what this engine's ledger holds, so that no charge is forgotten: load it with a
        new engine, or with the one that saved it if nothing was charged since.

        Returns:
            The user's own entries.

        Raises:
            ValueError: the file is no such checkpoint, or its ledger lacks charges; module and ledger are unchanged.
        """
        if not isinstance(module, nn.Module):
            raise TypeError(f"module must be a torch.nn.Module, got {type(module).__name__}")
        content = _files.load_tensors(path)
        needed = ("module_state_dict", "privacy_accountant_state_dict")
        if not isinstance(content, dict) or any(not isinstance(content.get(key), dict) for key in needed):
            raise ValueError(
                f"{os.fspath(path)!r} is not a checkpoint of ExpMQuadEngine: it needs {' and '.join(needed)}"
            )
        before = copy.deepcopy(module.state_dict())
        try:
            module.load_state_dict(content.pop("module_state_dict"))
            self.accountant.load_state_dict(content.pop("privacy_accountant_state_dict"))
        except BaseException as error:  # an interrupt, too, must not leave new weights with an old ledger
            module.load_state_dict(before)
            if not isinstance(error, Exception):
                raise
            # torch fails in many ways on weights that are none
            raise ValueError(f"{os.fspath(path)!r} does not fit this module or ledger: {error}") from error
        return content

    def validate(
        self,
        *,
        module: nn.Module,
        optimizer: optim.Optimizer | None = None,
        data_loader: DataLoader[Any] | None = None,
    ) -> None:
        """Raise if the module or the loader cannot be used; an optimizer plays no part here.

        Raises:
            TypeError, ValueError: with the reason and the way out.
        """
        check_module(module)
        if data_loader is not None:
            loaders.check_loader(data_loader, "data_loader")

    def is_compatible(
        self,
        *,
        module: nn.Module,
        optimizer: optim.Optimizer | None = None,
        data_loader: DataLoader[Any] | None = None,
    ) -> bool:
        """Whether ``validate`` passes."""
        try:
            self.validate(module=module, optimizer=optimizer, data_loader=data_loader)
        except (TypeError, ValueError):
            return False
        return True

    def _rounds(
        self,
        loader: DataLoader[Any],
        proj_dim: int | None,
        *,
        epsilon: float,
        delta: float,
        radius: float | Sequence[float],
        rounds: int,
        max_grad_norm: float | None,
        max_curvature: float | None,
        projection_seed: int | None,
        regularization: float | None,
        denoise: bool,
        calibration: str,
        sampler: str | Sampler,
        instead_of: swap.Rounds | None = None,
        **options: Any,
    ) -> _Rounds:
        """Several rounds, with everything checked that can be refused before any data is touched, and admitted."""
        radii = _radii(radius, rounds)
        for r in radii:
            self._check_release(epsilon, delta, r, regularization, options["adjacency"], calibration)
        self._check_covered(sampler, options["noise_generator"])  # a wrong type must not cost a pass
        given = checked_bounds(max_grad_norm, max_curvature, options["projection"], options["clipping"])
        _check_denoise(denoise, given["max_curvature"])
        size = nominal_size_of(loaders.check_loader(loader), options["nominal_size"])
        if options["public_loader"] is not None:
            loaders.check_public(options["public_loader"], loader)
        seed = None if projection_seed is None else _check.seed("projection_seed", projection_seed)
        buys = options["public_loader"] is None and options["bounds"] is None
        prices = _prices(given, epsilon, size) if buys else {}
        ridge = regularization != 0
        ways = allowances(epsilon, delta, prices=list(prices.values()), rounds=rounds, ridge=ridge)
        if calibration == "gaussian":
            ways = [way for way in ways if way.mu > 0]
        if not ways:
            raise ValueError(
                f"calibration='gaussian' leaves nothing for the draws at delta={delta!r}: the bounds alone would cost it "
                "all; pass max_grad_norm= and max_curvature=, or calibration='auto'"
            )
        if calibration == "paper":
            ways = ways[:1]
        return _Rounds(
            self,
            ways,
            self._plans(ways, prices, rounds, ridge, calibration, options["adjacency"]),
            radii,
            seed,
            instead_of,
            gathering={"loader": loader, "proj_dim": proj_dim, "epsilon": epsilon, "given": given, **options},
            calibrating={
                "regularization": regularization,
                "adjacency": options["adjacency"],
                "calibration": calibration,
            },
            drawing={
                "epsilon": epsilon,
                "delta": delta,
                "denoise": denoise,
                "sampler": sampler,
                "noise_generator": options["noise_generator"],
            },
        )

    def _check_release(
        self,
        epsilon: float,
        delta: float,
        radius: float,
        regularization: float | None,
        adjacency: str,
        calibration: str,
    ) -> None:
        """Everything about a release that can be refused before any data is touched."""
        check_request(epsilon, delta, radius, regularization, calibration)
        _check.one_of("adjacency", adjacency, ADJACENCIES)
        self.accountant.check_adjacency(adjacency)

    def _plans(
        self,
        ways: Sequence[Allowance],
        prices: dict[str, float],
        rounds: int,
        ridge: bool,
        calibration: str,
        adjacency: str,
    ) -> list[list[PlannedEvent]]:
        """What may come to be charged: by range or by μ, for every way to split the budget."""
        failure = FAILURE_PROBABILITY if self.secure_mode else 0.0
        draws = []
        for way in ways:
            for method in ("range", "gaussian") if calibration == "auto" else (calibration,):
                if method != "gaussian" or (way.mu > 0 and ridge):
                    draws.append(PlannedEvent(*cost_whatever_the_bounds(way, method, adjacency), failure))
        return [[*map(PlannedEvent, prices.values()), *[draw] * rounds] for draw in draws]

    def _sampler(self, sampler: str | Sampler, *, simulated: bool = False) -> Sampler:
        """A sampler by name, or as configured by the user."""
        if isinstance(sampler, str):
            sampler = SAMPLERS[_check.one_of("sampler", sampler, tuple(SAMPLERS))]
        if not callable(getattr(sampler, "sample", None)):
            raise TypeError(f"sampler must be one of {tuple(SAMPLERS)} or an object with .sample, got {sampler!r}")
        if self.secure_mode and not simulated and not isinstance(sampler, Exact):
            raise ValueError("secure_mode draws exactly, with fixed work; leave sampler='exact'")
        return sampler

    def _sampler_name(self, sampler: Sampler) -> str:
        """How the ledger calls it: only the one exact sampler, and secure mode's, may have their names."""
        if self.secure_mode:
            return "secure"
        name = type(sampler).__name__.lower()
        return name if (name == "exact") == (type(sampler) is Exact) and name != "secure" else "custom"

    def _noise(self, noise_generator: object) -> str:
        """Where the noise of a draw comes from; secure mode has no use for a generator."""
        return "system" if noise_generator is None or self.secure_mode else "given"

    def _check_covered(
        self, sampler: str | Sampler, noise_generator: torch.Generator | np.random.Generator | None
    ) -> None:
        """Refuse samplers and generators of wrong types, and with a budget those that ε does not cover."""
        check_noise_generator(noise_generator)
        name = self._sampler_name(self._sampler(sampler))
        self.accountant.check_covered(sampler=name, noise=self._noise(noise_generator))

    def _calibrate(
        self,
        statistics: Statistics,
        allowance: Allowance,
        radius: float,
        *,
        regularization: float | None,
        adjacency: str,
        calibration: str,
    ) -> Calibration:
        """The temperature for these statistics."""
        if not isinstance(statistics, Statistics):
            raise TypeError(f"statistics must come from gather(), got {type(statistics).__name__}")
        return calibrate_within(
            allowance,
            statistics.sums.sensitivity(adjacency, projected=self.secure_mode),
            radius=radius,
            regularization=_ridge(statistics, radius, regularization),
            nominal_size=statistics.nominal_size,
            calibration=calibration,
        )


class _Rounds:
    """T rounds that were checked and admitted to the budget: what each gathers, from which weights, and what it draws.

    Whatever later rounds take over from the first (public curvature, bounds, the way to split the budget) is kept here.
    """

    def __init__(
        self,
        engine: ExpMQuadEngine,
        ways: list[Allowance],
        plans: list[list[PlannedEvent]],
        radii: list[float],
        seed: int | None,
        instead_of: swap.Rounds | None,
        *,
        gathering: dict[str, Any],
        calibrating: dict[str, Any],
        drawing: dict[str, Any],
    ):
        self._engine, self._ways = engine, ways
        self._radii, self._seed = radii, seed
        self._gathering, self._calibrating, self._drawing = gathering, calibrating, drawing
        self._way: Allowance | None = None
        self._curvature: PublicCurvature | None = None
        self._known: tuple[Bounds, str, frozenset[str]] | None = None
        # Admitted here, and named wherever a round charges: a training loop's rounds outlive the call.
        earlier: Admission | None = instead_of._admission if isinstance(instead_of, _Rounds) else None
        self._admission: Admission = engine.accountant.admit(
            plans, drawing["epsilon"], drawing["delta"], instead_of=earlier
        )

    def end(self) -> None:
        """No further round is going to be drawn: nothing of the budget stays reserved."""
        self._admission.end()

    @property
    def count(self) -> int:
        """T."""
        return len(self._radii)

    def begin(self, module: nn.Module, number: int) -> swap.Gather:
        """A round that starts from ``module``: the function from a loader to the statistics of its records."""
        if number == 0:
            self._curvature = self._engine._public_curvature(module, **self._gathering)
        bench, settled = self._engine._settle(
            module,
            radius=self._radii[number],
            projection_seed=None if self._seed is None else self._seed + number,
            curvature=self._curvature,
            known=self._known,
            admission=self._admission,  # bounds may be bought
            **self._gathering,
        )
        return functools.partial(bench.gather, **settled)

    def draw(self, statistics: Statistics, number: int) -> nn.Module:
        """Charge, then draw."""
        if self._way is None or self._known is None:
            self._way = max(
                self._ways,
                key=lambda way: (
                    self._engine._calibrate(statistics, way, self._radii[0], **self._calibrating).inverse_temperature
                ),
            )
            sums = statistics.sums
            self._known = (
                {"max_grad_norm": sums.max_grad_norm, "max_curvature": sums.max_curvature},
                statistics.bounds,
                statistics.receipts,
            )
        return self._engine._draw(
            statistics,
            self._way,
            self._radii[number],
            place=(number + 1, self.count),
            admission=self._admission,
            **self._calibrating,
            **self._drawing,
        )


def _radii(radius: float | Sequence[float], rounds: int) -> list[float]:
    """One radius for each round."""
    _check.positive_int("rounds", rounds)
    if isinstance(radius, Real) or not isinstance(radius, Sequence) or isinstance(radius, str):
        return [radius] * rounds  # type: ignore[list-item]  # what is no number is refused by the release's check
    if len(radius) != rounds:
        raise ValueError(f"radius must be one number, or one for each of rounds={rounds}, got {len(radius)} of them")
    return list(radius)


def _ridge(statistics: Statistics, radius: float, regularization: float | None) -> float:
    """λ as given, or the default."""
    if regularization is not None:
        return float(regularization)
    sums = statistics.sums
    return default_regularization(
        sums.max_grad_norm, sums.max_curvature, radius=radius, proj_dim=statistics.projection.dim, rank=sums.rank
    )


def _full_space(model: nn.Module, **settings: Any) -> Workbench:
    """A workbench for statistics of all parameters, on few records at a time."""
    size = sum(p.numel() for p in check_module(model).parameters() if p.requires_grad)
    records = min(256, max(16, _WIDE_BYTES // (16 * 8 * size)))
    return Workbench(model, subspace=Subspace("sparse", None, 0), pieces=loaders.Pieces(records), **settings)


def _check_denoise(denoise: bool, max_curvature: float | None) -> None:
    """Raise where the variance of the noise would be private: it is public only without private curvature."""
    if not isinstance(denoise, bool):
        raise TypeError(f"denoise must be True or False, got {denoise!r}")
    if denoise and max_curvature != 0:
        raise ValueError(
            "denoise=True needs a draw whose noise is public, without private curvature: pass max_curvature=0 too, or "
            "projection='preconditioned', or leave denoise out"
        )


def _prices(given: Bounds, epsilon: float, nominal_size: int) -> dict[str, float]:
    """ε₁ of each bound that is missing."""
    return {
        name: quantile_epsilon(epsilon, nominal_size, QUANTILES[name]) for name, value in given.items() if value is None
    }


def _public_bounds(
    bench: Workbench,
    public_loader: DataLoader[Any],
    given: Bounds,
    joint_radius: float | None,
    quantiles: dict[str, float] = QUANTILES,
) -> Bounds:
    """The bounds, those that are missing measured on public data."""
    norms = bench.public_norms(public_loader, curvature=given["max_curvature"] != 0, joint_radius=joint_radius)
    found = dict(given)
    for name, value in given.items():
        if value is not None:
            continue
        found[name] = quantile = float(np.quantile(norms[name], quantiles[name]))
        if quantile == 0:
            raise ValueError(
                f"public_loader gives a zero bound for {name}: gradients or curvatures vanish there at the pretrained "
                "weights; pass max_grad_norm= and max_curvature="
            )
    return found


def _on_a_new_engine(
    method: Callable[Concatenate[ExpMQuadEngine, P], nn.Module],
) -> Callable[P, nn.Module]:
    """The method as a function, for a single release."""

    @functools.wraps(method)
    def make_private_expm(*args: P.args, **kwargs: P.kwargs) -> nn.Module:
        return method(ExpMQuadEngine(), *args, **kwargs)

    signature = inspect.signature(method)
    parameters = [p for name, p in signature.parameters.items() if name != "self"]
    make_private_expm.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    make_private_expm.__qualname__ = "make_private_expm"
    make_private_expm.__doc__ = (
        "Fine-tune ``model`` privately in one call, for a single release.\n\n"
        "    Arguments, result and guarantee are those of ``ExpMQuadEngine.make_private_expm``; the ledger of the engine\n"
        "    behind it ends with the call, so use an engine where more than one release is made from the same data.\n    "
    )
    return make_private_expm


make_private_expm = _on_a_new_engine(ExpMQuadEngine.make_private_expm)
