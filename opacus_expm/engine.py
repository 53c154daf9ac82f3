"""``ExpMQuadEngine``: what the public sees; every method is a few lines over ``rounds``."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, Literal, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn, optim
from torch.utils.data import DataLoader

from opacus_expm import _check, checkpoints, choosing, subspaces, swap
from opacus_expm._warnings import warn
from opacus_expm.accounting.accountant import ExpMAccountant, NotCopied
from opacus_expm.books import Books
from opacus_expm.bounds import Bounds
from opacus_expm.gathering import loaders
from opacus_expm.gathering.measurement import Measurement
from opacus_expm.gathering.model import check_module, standard
from opacus_expm.gathering.ranks import Ranks
from opacus_expm.gathering.rows import GradSampleMode, GradSampling
from opacus_expm.gathering.statistics import Statistics
from opacus_expm.gathering.views import Views
from opacus_expm.gatherings import gathered
from opacus_expm.learned import LearnedRounds
from opacus_expm.looped import LoopRequest, check_loop
from opacus_expm.mechanism.calibration import allowances
from opacus_expm.mechanism.sampling import Exact
from opacus_expm.mechanism.sensitivity import ADJACENCIES, Adjacency
from opacus_expm.noise import Noise
from opacus_expm.pure import PureRounds
from opacus_expm.rounds import Budget, Plan, Rounds, release
from opacus_expm.subspaces import Subspace, SubspaceName


class ExpMQuadEngine(NotCopied):
    """Private fine-tuning in one draw; parallels ``opacus.PrivacyEngine``.

    Args:
        accountant: a ledger to go on with (for example that of an Opacus ``PrivacyEngine(accountant="expm")`` that
            trained on the same data); ``"expm"``, as with Opacus, for a new one.
        secure_mode: draw with the operating system's cryptographic noise and work that does not depend on the data
            (see ``opacus_expm.mechanism.secure``).
        budget: (ε, δ) that may not be exceeded: a release that would is refused before any data is touched. It belongs to
            the ledger: declare it when the ledger begins, and leave it out to go on with one.
        ledger_path: append-only file in which every charge is on disk before its draw.
        distributed: share the work among the ranks of ``torch.distributed``. None does so where a process group of several
            ranks is initialised, as under ``torchrun``: every rank then makes the same calls with a loader over the whole
            data set, visits its own part of it, and gets the same model; one of them charges and draws (see
            ``opacus_expm.gathering.ranks``). False works in this process alone; True insists on a process group.
        adjacency: which data sets are neighbours: ``"add_remove"`` (as Opacus's accountants) or ``"replace_one"``.
        noise_generator: for tests and simulations only; the operating system's entropy by default. The ledger records
            that one was given, ``get_epsilon`` warns, and a budget refuses it.

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
        accountant: ExpMAccountant | Literal["expm"] = "expm",
        secure_mode: bool = False,
        budget: tuple[float, float] | None = None,
        ledger_path: str | os.PathLike[str] | None = None,
        distributed: bool | None = None,
        adjacency: Adjacency = "add_remove",
        noise_generator: torch.Generator | np.random.Generator | None = None,
    ):
        if distributed is not None and not isinstance(distributed, bool):
            raise TypeError(f"distributed must be True, False or None, got {distributed!r}")
        given = accountant if isinstance(accountant, ExpMAccountant) else None
        if given is None and accountant != "expm":
            raise TypeError(
                f"accountant must be 'expm' or an ExpMAccountant, got {accountant!r}, which counts no releases of this "
                "engine; to share a ledger with Opacus, create its engine with PrivacyEngine(accountant='expm') and pass "
                "privacy_engine.accountant"
            )
        if given is not None and (budget is not None or ledger_path is not None):
            raise ValueError("accountant is given: pass budget and ledger_path to ExpMAccountant(...) instead")
        self.adjacency = _check.one_of("adjacency", adjacency, ADJACENCIES)
        self.noise = Noise(noise_generator, bool(secure_mode))
        self.accountant = ExpMAccountant(budget=budget, ledger_path=ledger_path) if given is None else given
        self._distributed = distributed
        self._given = checkpoints.Given()

    def __repr__(self) -> str:
        secure = ", secure_mode=True" if self.secure_mode else ""
        return f"ExpMQuadEngine(adjacency={self.adjacency!r}{secure}, accountant={self.accountant!r})"

    @property
    def secure_mode(self) -> bool:
        """Whether draws are made with cryptographic noise and fixed work."""
        return self.noise.secure

    def books(self) -> Books:
        """The ledger with what every charge of this engine has in common, for the ranks that are there now."""
        return Books(self.accountant, self.adjacency, self.noise, Ranks.current(self._distributed))

    def make_private_expm(
        self,
        model: nn.Module,
        loader: DataLoader[Any],
        epsilon: float,
        radius: float | Sequence[float] | None = None,
        proj_dim: int | None = None,
        *,
        delta: float = 0.0,
        criterion: Callable[[Tensor, Tensor], Tensor] | None = None,
        rounds: int = 1,
        max_grad_norm: float | None = None,
        max_curvature: float | None = None,
        regularization: float | None = None,
        public_loader: DataLoader[Any] | None = None,
        projection: SubspaceName | Subspace = "sparse",
        nominal_size: int | None = None,
        views: Views | None = None,
        grad_sample_mode: GradSampleMode | GradSampling | None = None,
        max_physical_batch_size: int | None = None,
        progress: bool | None = None,
    ) -> nn.Module:
        """Fine-tune ``model`` privately on ``loader``, with nothing to choose, or in one pass and one draw within a radius.

        Args:
            model: pretrained module; parameters with ``requires_grad`` may move. It is not modified. Of Opacus's
                ``GradSampleModule``, the module inside is taken.
            loader: private data as (input, target) batches, every record once (see ``gathering.loaders``).
            epsilon: ε > 0.
            radius: R > 0, how far the parameters may move, in Euclidean norm; one number, or one for each round. Not to be
                read off the private data. None, the default, finds step and length by itself: with δ > 0 in a metric that it
                learns (``opacus_expm.learned``), with δ = 0 along pure draws (``opacus_expm.pure``). Of the arguments below
                only ``criterion``, ``nominal_size``, ``grad_sample_mode``, ``max_physical_batch_size``, ``progress`` and,
                with δ > 0, ``public_loader`` play a part then.
            proj_dim: dimension k of the random subspace; None works in the full parameter space.
            delta: δ in [0, 1); 0 gives pure ε-DP.
            criterion: the loss; None infers cross-entropy or mean squared error from the target's dtype, and says so.
            rounds: T: each round starts from the last one's release, with statistics gathered there, on a fresh subspace.
                The budget is split in advance: ε/T each, or of an (ε, δ) budget μ/√T each.
            max_grad_norm: C_g, bound on one record's projected gradient.
            max_curvature: C_H, bound on one record's projected curvature; 0 uses no private curvature.
            regularization: λ ≥ 0, ridge per record on |ξ|². The default is rank·C_H/k, or C_g/R without private curvature
                (see ``mechanism.calibration.default_regularization``).
            public_loader: public data on which the bounds that are not given are measured. Without it they are bought:
                private quantiles of the private norms, at most 5 % of ε each, charged and taken out of the draw's ε. Without
                a radius its curvature gives the metric, for which nothing is bought then.
            projection: ``"sparse"``, ``"structured"`` for large models, or ``"stiefel"``, all random; or a recipe with its
                own settings, such as ``Sparse(seed=0)``.
            nominal_size: public N; ``len(dataset)`` by default, which publishes the size, as Opacus does.
            views: a function from a batch of inputs to a list of batches like it, the same records seen differently, such
                as ``gathering.views.pixel_shifts``. A record counts with the mean over its views, which is then clipped:
                more signal for the same noise, and V times the work.
            grad_sample_mode: ``"hooks"``, ``"functorch"``, or None for hooks where they can serve; or a ``GradSampling``
                that also says how many probes of each record's curvature are taken.
            max_physical_batch_size: records processed at a time, to cap memory; halved where memory runs out, and the pass
                starts again (see ``loaders.Pieces``).
            progress: show a bar; None shows it on a terminal and in a notebook. No bar is shown where ``nominal_size`` is
                given, because it would tell the data set's size.

        Returns:
            A plain module of ``model``'s own class.

        Raises:
            TypeError, ValueError: bad input; nothing is charged or changed.

        **Privacy:** the result is (ε, δ)-DP with respect to the loader's records under the engine's adjacency, and the
        ledger is charged before each draw. With several rounds every round's model is covered, not only the last.
        """
        books = self.books()
        with books.together():
            model, subspace = standard(model), subspaces.named(projection)
            sampling = GradSampling.named(grad_sample_mode)
            measurement = Measurement(
                subspace, proj_dim, criterion, sampling, views, nominal_size, max_physical_batch_size, progress
            )
            if radius is None:
                _check.left_out(
                    proj_dim=proj_dim,
                    max_grad_norm=max_grad_norm,
                    max_curvature=max_curvature,
                    regularization=regularization,
                    public_loader=None if delta else public_loader,
                    rounds=None if rounds == 1 else rounds,
                    projection=None if projection == "sparse" else projection,
                )
                if _check.fraction("delta", delta) == 0:
                    pure = PureRounds(loader, measurement, epsilon, books)
                    return self._giving(lambda: pure.run(check_module(model)))
                learned = LearnedRounds(loader, measurement, epsilon, delta, books, public_loader=public_loader)
                return self._giving(lambda: learned.run(check_module(model)))
            bounds = Bounds(max_grad_norm, max_curvature)
            plan = Plan(Budget.of(epsilon, delta, radius, regularization, rounds), bounds, measurement, public_loader)
            books.same(lambda: plan.facts(check_module(model), loader))
            return self._giving(lambda: Rounds(plan, loader, books).run(check_module(model)))

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
        max_grad_norm: float | None = None,
        radius: float | Sequence[float] | None = None,
        proj_dim: int | None = None,
        max_curvature: float | None = 0.0,
        regularization: float | None = None,
        public_loader: DataLoader[Any] | None = None,
        projection: str | Subspace = "sparse",
        nominal_size: int | None = None,
        views: Views | None = None,
        max_physical_batch_size: int | None = None,
        batch_first: bool = True,
        loss_reduction: str = "mean",
        poisson_sampling: bool | None = None,
        clipping: str = "flat",
        noise_generator: None = None,
        grad_sample_mode: str | GradSampling = "hooks",
        wrap_model: bool = True,
        progress: bool | None = None,
    ) -> tuple[Any, ...]:
        """Stand in for ``opacus.PrivacyEngine.make_private_with_epsilon``, without any further argument.

        The user's own loop (``zero_grad``, ``criterion(module(x), y)``, ``backward``, ``step``) runs unchanged. What it may
        and may not do is in the table of ``opacus_expm.swap``. After ``epochs`` epochs the module is final and ordinary.

        **Without a radius** metric, step and length are found as in ``make_private_expm`` (``opacus_expm.learned``). Every
        batch of the returned loader is a Poisson sample, and the ``step`` after it moves the weights by one direction. The
        rule's T directions (5 to 100, a public formula) are spread evenly over the E epochs, with a sample rate of
        min(1, E/T): an epoch goes once through as many records as there are. If the rule has fewer than E directions it
        takes E, which are shorter. The engine makes three or four passes of its own as well: metric, bound and (unless the
        last layer moves alone) the losses at the start when the first batch is asked for, and after the last step the
        choice of the final weights. A batch has about n·min(1, E/T) records; ``max_physical_batch_size`` or the
        loader's batch size limits how many are processed at a time.

        **With a radius** an epoch is a round: ``backward`` gathers statistics, and the ``step`` after an epoch's last batch
        draws the next weights.

        Where there is a budget, the first charge reserves what is left of the plan, so that nothing else can take its place.
        A loop that is not going to be finished is given up by calling this again for its module, by
        ``engine.accountant.give_up()``, or by dropping the module and what was returned.

        Args:
            module: pretrained module; as with Opacus it is the one that is trained, in place. Parameters with
                ``requires_grad`` move, and have to be the optimizer's.
            optimizer: the loop's; its learning rate plays no part.
            criterion: the loss; cross-entropy by default, as with Opacus. In hooks mode the loop's own criterion has to be
                the same one, as in ``nn.CrossEntropyLoss()(output, target)`` or ``F.cross_entropy(output, target)``.
            data_loader: private data, every record once an epoch (see ``gathering.loaders``).
            target_epsilon: ε of all epochs together.
            target_delta: δ of all epochs together; 0 gives pure ε-DP, and needs a radius.
            epochs: E. With a radius fewer may be run, and cost less. Without one the whole run is charged before its first
                step; the weights on the way are released, but final only after the last one.
            max_grad_norm: C_g; None measures it on ``public_loader``. It plays no part without a radius.
            radius: R > 0, how far the parameters may move in a round; one number, or one for each round. None, the default,
                needs none of the next six arguments and refuses them, but for ``nominal_size``.
            proj_dim: dimension k of the random subspace; None works in the full parameter space.
            max_curvature: C_H; by default no private curvature is used. None measures it on ``public_loader``.
            regularization: as in ``make_private_expm``, and so are the next four.
            public_loader: public data for bounds and projections.
            projection: of the subspace.
            nominal_size: public N.
            views: of each record.
            max_physical_batch_size: records at a time; the loader's batch by default.
            batch_first: True; a record is a row of its batch.
            loss_reduction: that of the criterion.
            poisson_sampling: may be left out: batches are Poisson samples without a radius, and only then.
            clipping: ``"flat"``, with one bound for a record's gradient (and one for its curvature).
            noise_generator: None; noise belongs to the engine, ``ExpMQuadEngine(noise_generator=...)``.
            grad_sample_mode: ``"hooks"`` or ``"ghost"``, which differ in what is returned, for hooks where they can serve;
                ``"functorch"`` or a ``GradSampling`` insist.
            wrap_model: True, though nothing is wrapped.
            progress: show a bar for passes over public data.

        Returns:
            What Opacus returns: (module, optimizer, data_loader) for the loop, and with ``grad_sample_mode="ghost"``
            (module, optimizer, criterion, data_loader). ``module`` is the one that came.

        Raises:
            TypeError, ValueError: bad input; nothing is charged or changed.
            BudgetExceeded: the rounds together do not fit the budget.

        **Privacy:** that of ``make_private_expm``, with a radius of ``make_private_expm(..., rounds=epochs)``, with the same
        entries in the ledger: the plan is admitted here, and everything is charged before it is drawn. Losses of the loop
        are private, and have no value.
        """
        books = self.books()
        check_loop(books, noise_generator)
        module, optimizer, loss, data_loader = swap.originals(module, optimizer, criterion, data_loader)
        named = grad_sample_mode if isinstance(grad_sample_mode, str) else None
        protocol = swap.Protocol(batch_first, loss_reduction, poisson_sampling, clipping, named, wrap_model)
        mode = protocol.checked(loss, sampled=radius is None)
        sampling = grad_sample_mode if isinstance(grad_sample_mode, GradSampling) else GradSampling(mode)
        subspace = subspaces.named(projection)
        measurement = Measurement(
            subspace, proj_dim, loss, sampling, views, nominal_size, max_physical_batch_size, progress
        )
        request = LoopRequest(
            target_epsilon, target_delta, epochs, radius, regularization, max_grad_norm, max_curvature
        )
        if radius is None:
            recipe = None if projection == "sparse" else projection
            _check.left_out(
                proj_dim=proj_dim,
                max_curvature=max_curvature or None,
                regularization=regularization,
                projection=recipe,
                public_loader=public_loader,
            )
        rounds = request.rounds(data_loader, measurement, books, public_loader, instead_of=swap.unfinished(module))
        return swap.stand_ins(module, optimizer, loss, data_loader, rounds, ghost=protocol.ghost)

    def make_private(
        self,
        *,
        data_loader: DataLoader[Any],
        noise_multiplier: float,
        max_grad_norm: float | Sequence[float] = 1.0,
        grad_sample_mode: str = "hooks",
        epochs: int | None = None,
        target_delta: float = 1e-5,
        **_: object,
    ) -> NoReturn:
        """Not here: a noise multiplier says how noisy a step is. The error has the call that asks for as much privacy.

        Args:
            data_loader: whose batches give the sample rate.
            noise_multiplier: σ of DP-SGD.
            max_grad_norm: is handed on.
            grad_sample_mode: as in ``make_private_with_epsilon``.
            epochs: of the loop; without them ε is told for several.
            target_delta: δ, at which ε is told.
            **_: the other arguments of Opacus's ``make_private``.

        Raises:
            NotImplementedError: with the call of ``make_private_with_epsilon``, its ε by Opacus's own accountant.
        """
        ghost = "ghost" in grad_sample_mode
        raise NotImplementedError(
            swap.equivalent_call(data_loader, noise_multiplier, max_grad_norm, target_delta, epochs, ghost=ghost)
        )

    @classmethod
    def get_compatible_module(cls, module: nn.Module) -> nn.Module:
        """The module itself: what Opacus has to replace, such as BatchNorm, is served here in evaluation mode.

        Raises:
            TypeError, ValueError: the module cannot be used; with the reason and the way out.
        """
        return check_module(standard(module))

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
        epsilon: float | None = None,
        projection: SubspaceName | Subspace = "sparse",
        nominal_size: int | None = None,
        views: Views | None = None,
        grad_sample_mode: GradSampleMode | GradSampling | None = None,
        max_physical_batch_size: int | None = None,
        progress: bool | None = None,
        private_checkpoint: str | os.PathLike[str] | None = None,
    ) -> Statistics:
        """One pass over the private data. Arguments as in ``make_private_expm``.

        Bounds that are neither given nor measurable on a ``public_loader`` are bought with a part of ``epsilon``, at most
        5 % each, which is charged at once.

        A long pass can be interrupted and resumed: with ``private_checkpoint``, a local file, its state is kept there once
        a minute, and the same call goes on from it; several ranks have a file each. Records are then visited in the data
        set's order, which must not change. The file is **private data**, readable by its owner only, and is removed when
        the pass is complete. It needs a projection with a seed, and bounds that are not bought.

        **Privacy:** the result is private data; apart from bounds, nothing is charged until something is released from it.
        Where bounds were bought, only an engine whose ledger paid for them can release from it.
        """
        books = self.books()
        with books.together():
            model, subspace = standard(model), subspaces.named(projection)
            sampling = GradSampling.named(grad_sample_mode)
            measurement = Measurement(
                subspace, proj_dim, criterion, sampling, views, nominal_size, max_physical_batch_size, progress
            )
            return gathered(
                model,
                loader,
                measurement,
                Bounds(max_grad_norm, max_curvature),
                books,
                public_loader=public_loader,
                epsilon=epsilon,
                private_checkpoint=private_checkpoint,
            )

    def release(
        self,
        statistics: Statistics,
        epsilon: float,
        radius: float,
        *,
        delta: float = 0.0,
        regularization: float | None = None,
    ) -> nn.Module:
        """Draw one model from the statistics and charge it. Arguments as in ``make_private_expm``.

        **Privacy:** (ε, δ)-DP under the engine's adjacency; every call is a release of its own.
        """
        books = self.books()
        with books.together():
            budget = Budget(epsilon, delta, (radius,), regularization)
            books.same(lambda: {**budget.facts(), **_facts(statistics)})
            books.check()
            return self._giving(lambda: release(statistics, budget, allowances(epsilon, delta)[0], books))

    def choose(
        self,
        candidates: Sequence[nn.Module],
        loader: DataLoader[Any],
        epsilon: float,
        *,
        criterion: Callable[[Tensor, Tensor], Tensor] | str | None = None,
        max_loss: float | None = None,
        nominal_size: int | None = None,
    ) -> nn.Module:
        """One of several modules that were released already, chosen privately by how well they do on the records.

        Args:
            candidates: two or more modules that may be published: from this engine, from Opacus, or from anywhere. They have
                the same outputs, and need not have the same architecture.
            loader: private data to judge them by, every record once.
            epsilon: ε of the choice, which is pure.
            criterion: the loss of a record; or ``"error"``, which counts a record 1 where it is given a wrong class; None
                infers a loss from the target's dtype.
            max_loss: B, the loss at which a record is clipped; by default that of guessing among the classes.
            nominal_size: public N, for the ledger.

        Returns:
            The chosen module itself.

        Raises:
            TypeError, ValueError: bad input, or a module that still carries private gradients; nothing is charged.

        **Privacy:** the choice is ε-DP (``opacus_expm.choosing``) and in the ledger. What the candidates themselves cost is
        not covered: it was charged when they were made, or it was not.
        """
        return self._giving(
            lambda: choosing.choose(
                candidates,
                loader,
                epsilon,
                self.books(),
                criterion=criterion,
                max_loss=max_loss,
                nominal_size=nominal_size,
            )
        )

    def _giving(self, make: Callable[[], nn.Module]) -> nn.Module:
        """What ``make`` gives, remembered as this engine's."""
        return self._given.giving(make, self.accountant)

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
    ) -> NDArray[np.float64]:
        """Values of ``evaluate`` on many simulated draws: what a release would be worth, not a release.

        **Privacy:** not private, and not charged: the draws together reveal the data far beyond ε. A warning says so.
        Publish neither the models nor the numbers; ``release`` is for that.
        """
        budget = Budget(epsilon, delta, (radius,), regularization)
        _check.positive_int("draws", draws)
        if not callable(evaluate):
            raise TypeError(f"evaluate must be a function from a module to a number, got {evaluate!r}")
        calibrated = budget.calibrate(statistics, allowances(epsilon, delta)[0], self.books())
        warn(
            "simulate() draws models that are NOT releases: nothing is charged and the results are not private",
        )
        density = statistics.density(calibrated.inverse_temperature, radius, budget.ridge(statistics))
        coordinates = Exact().sample(density, self.noise.ordinary(), draws)
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

        The file is there as a whole or not at all: an interruption leaves an earlier one as it was. A warning says so where
        the module cannot be what the ledger was charged for: all charges are for others that this engine gave out. (Of a
        module that was trained in a loop, or by Opacus with the same ledger, the engine does not know the weights.)

        Args:
            path: file to write.
            module: a private module.
            checkpoint_dict: further entries of the user's own.
        """
        self._given.check(module, self.accountant)
        checkpoints.save(path, module, self.accountant, checkpoint_dict)

    def load_checkpoint(self, *, path: str | os.PathLike[str], module: nn.Module) -> dict[str, Any]:
        """Load weights into ``module`` and the ledger into this engine; no code in the file is run.

        The saved ledger has to begin with what this engine's ledger holds, so that no charge is forgotten: load it with a
        new engine, or with the one that saved it if nothing was charged since.

        Returns:
            The user's own entries.

        Raises:
            ValueError: the file is no such checkpoint, or its ledger lacks charges; module and ledger are unchanged.
        """
        entries = checkpoints.load(path, module, self.accountant)
        self._given.remember(module)
        return entries

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
        check_module(standard(module))
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


def _facts(statistics: object) -> dict[str, object]:
    """What of statistics has to be the same on every rank."""
    if not isinstance(statistics, Statistics):
        raise TypeError(f"statistics must come from gather(), got {type(statistics).__name__}")
    return {"statistics": (statistics.configuration, sorted(statistics.shards), statistics.nominal_size)}


def make_private_expm(
    model: nn.Module,
    loader: DataLoader[Any],
    epsilon: float,
    radius: float | Sequence[float] | None = None,
    proj_dim: int | None = None,
    *,
    delta: float = 0.0,
    criterion: Callable[[Tensor, Tensor], Tensor] | None = None,
    public_loader: DataLoader[Any] | None = None,
) -> nn.Module:
    """Fine-tune ``model`` privately on ``loader``, for a single release: ``ExpMQuadEngine().make_private_expm(...)``.

    The ledger of the engine behind it ends with the call. Use an engine where more than one release is made from the same
    data, and for further options.

    Args:
        model: pretrained module; parameters with ``requires_grad`` may move. It is not modified.
        loader: private data as (input, target) batches, every record once.
        epsilon: ε > 0.
        radius: R > 0, how far the parameters may move, in Euclidean norm. None, the default, finds step and length by
            itself; ``proj_dim`` is left out then.
        proj_dim: dimension k of the random subspace; None works in the full parameter space.
        delta: δ in [0, 1); 0 gives pure ε-DP.
        criterion: the loss; None infers cross-entropy or mean squared error from the target's dtype, and says so.
        public_loader: public data on which clipping bounds are measured, or without a radius (and with δ > 0) the metric;
            without it they are bought for a part of the budget.

    Returns:
        A plain module of ``model``'s own class.

    Raises:
        TypeError, ValueError: bad input; nothing was released.

    **Privacy:** the result is (ε, δ)-DP under adding or removing one record. What earlier calls cost is not counted.
    """
    return ExpMQuadEngine().make_private_expm(
        model, loader, epsilon, radius, proj_dim, delta=delta, criterion=criterion, public_loader=public_loader
    )
