"""``ExpMQuadEngine``: the order of the steps, from a model and its private data to a private model.

    DataLoader → projected per-sample rows → clipped sums → calibrated temperature
      ════ everything above holds private data; only a draw, already in the ledger, crosses this line ════
      → ξ from the truncated Gaussian → θ* + Aξ → a plain nn.Module

One pass over the data serves every ε and, the bounds being fixed, every radius.
"""

from __future__ import annotations

import copy
import math
import os
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn, optim
from torch.utils.data import DataLoader

from opacus_expm import _check, curves, data
from opacus_expm.accountant import ExpMAccountant, PlannedEvent, Purchase, Release
from opacus_expm.bounds import QUANTILES, Uniforms, private_quantile, quantile_epsilon, warn_if_unreliable
from opacus_expm.calibration import Calibration, calibrate, check_request
from opacus_expm.model import check_module, check_resolution
from opacus_expm.sampling import Exact, Gibbs, PlainRejection, Sampler, check_noise_generator, noise_source
from opacus_expm.secure import FAILURE_PROBABILITY, FixedWork, SystemNoise, proposals_needed
from opacus_expm.statistics import Remembered, Statistics, Workbench, nominal_size_of
from opacus_expm.sums import ADJACENCIES

Bounds = dict[str, float | None]  # max_grad_norm and max_curvature, None where not known yet
SAMPLERS: dict[str, Sampler] = {"exact": Exact(), "gibbs": Gibbs(), "rejection": PlainRejection()}


class ExpMQuadEngine:
    """Private fine-tuning in one draw; parallels ``opacus.PrivacyEngine``.

    Args:
        accountant: a ledger to go on with (for example that of an Opacus ``PrivacyEngine(accountant="expm")`` that
            trained on the same data); a new one by default.
        secure_mode: draw with the operating system's cryptographic noise and work that does not depend on the data
            (see ``opacus_expm.secure``).
        budget: (ε, δ) that may not be exceeded: a release that would is refused before any data is touched.
        ledger_path: append-only file in which every charge is on disk before its draw.

    Example:
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
    ):
        if accountant is not None and not isinstance(accountant, ExpMAccountant):
            raise TypeError(
                f"accountant must be an ExpMAccountant, got {type(accountant).__name__}; to share a ledger with "
                "Opacus, create its engine with PrivacyEngine(accountant='expm') and pass privacy_engine.accountant"
            )
        if accountant is not None and (budget is not None or ledger_path is not None):
            raise ValueError("accountant is given: pass budget and ledger_path to ExpMAccountant(...) instead")
        self.accountant = ExpMAccountant(budget=budget, ledger_path=ledger_path) if accountant is None else accountant
        self.secure_mode = bool(secure_mode)

    def make_private_expm(
        self,
        model: nn.Module,
        loader: DataLoader[Any],
        epsilon: float,
        radius: float,
        proj_dim: int | None,
        *,
        delta: float = 0.0,
        criterion: Callable[[Tensor, Tensor], Tensor] | None = None,
        max_grad_norm: float | None = None,
        max_curvature: float | None = None,
        public_loader: DataLoader[Any] | None = None,
        regularization: float = 0.0,
        adjacency: str = "add_remove",
        calibration: str = "auto",
        sampler: str | Sampler = "exact",
        projection: str = "stiefel",
        projection_seed: int | None = None,
        nominal_size: int | None = None,
        grad_sample_mode: str | None = None,
        curvature_samples: int | None = None,
        max_physical_batch_size: int | None = None,
        noise_generator: torch.Generator | np.random.Generator | None = None,
        progress: bool | None = None,
    ) -> nn.Module:
        """Fine-tune ``model`` privately on ``loader``: one pass, one draw, one charge.

        Args:
            model: pretrained module; parameters with ``requires_grad`` may move. It is not modified.
            loader: private data as (input, target) batches, every record once (see ``opacus_expm.data``).
            epsilon: ε > 0.
            radius: R > 0, how far the parameters may move, in Euclidean norm. Not to be read off the private data.
            proj_dim: dimension k of the random subspace; None works in the full parameter space.
            delta: δ in [0, 1); 0 gives pure ε-DP.
            criterion: the loss; None infers cross-entropy or mean squared error from the target's dtype, and says so.
            max_grad_norm: C_g, bound on one record's projected gradient.
            max_curvature: C_H, bound on one record's projected curvature; 0 uses no private curvature.
            public_loader: public data on which the bounds that are not given are measured. Without it they are bought:
                private quantiles of the private norms, at most 5 % of ε each, charged and taken out of the draw's ε.
            regularization: λ ≥ 0, ridge per record on |ξ|².
            adjacency: ``"add_remove"`` (as Opacus's accountants) or ``"replace_one"``.
            calibration: ``"auto"``, ``"range"``, ``"gaussian"`` or ``"paper"`` (see ``opacus_expm.calibration``).
            sampler: ``"exact"``; or the source paper's ``"gibbs"`` and ``"rejection"``, or a configured sampler of
                ``opacus_expm.sampling``, which ε does not fully cover and which warn or may give up.
            projection: ``"stiefel"`` or ``"sparse"``.
            projection_seed: public seed of the subspace; drawn afresh by default, and recorded.
            nominal_size: public N; ``len(dataset)`` by default, which publishes the size, as Opacus does.
            grad_sample_mode: ``"hooks"``, ``"functorch"``, or None for hooks where they can serve.
            curvature_samples: random probes s of each record's curvature instead of its m exact rows: 1 + s backward
                passes. None is exact up to 64 outputs, and takes 8 probes beyond and for sequences.
            max_physical_batch_size: records processed at a time, to cap memory.
            noise_generator: for tests and simulations only; the operating system's entropy by default.
            progress: show a bar; None shows it on a terminal.

        Returns:
            A plain module of ``model``'s own class with parameters θ* + Aξ.

        Raises:
            TypeError, ValueError: bad input; nothing is charged or changed.

        **Privacy:** the result is (ε, δ)-DP with respect to the loader's records under the given adjacency, and the
        ledger is charged before the draw.
        """
        self._check_release(epsilon, delta, radius, regularization, adjacency, calibration)
        check_noise_generator(noise_generator)  # a wrong type must not cost a pass
        charged = len(self.accountant.releases)
        self._sampler(sampler)
        given = _checked_bounds(max_grad_norm, max_curvature)
        size = nominal_size_of(data.check_loader(loader), nominal_size)
        prices = list(_prices(given, epsilon, size).values()) if public_loader is None else []
        self._check_budget(epsilon, delta, regularization, calibration, prices)
        statistics = self.gather(
            model,
            loader,
            proj_dim,
            criterion=criterion,
            max_grad_norm=max_grad_norm,
            max_curvature=max_curvature,
            public_loader=public_loader,
            epsilon=epsilon,
            adjacency=adjacency,
            projection=projection,
            projection_seed=projection_seed,
            nominal_size=nominal_size,
            grad_sample_mode=grad_sample_mode,
            curvature_samples=curvature_samples,
            max_physical_batch_size=max_physical_batch_size,
            noise_generator=noise_generator,
            progress=progress,
        )
        bought = math.fsum(event.epsilon_range for event in self.accountant.releases[charged:])
        return self.release(
            statistics,
            _left_of(epsilon, bought),
            radius,
            delta=delta,
            regularization=regularization,
            adjacency=adjacency,
            calibration=calibration,
            sampler=sampler,
            noise_generator=noise_generator,
        )

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
        adjacency: str = "add_remove",
        projection: str = "stiefel",
        projection_seed: int | None = None,
        nominal_size: int | None = None,
        grad_sample_mode: str | None = None,
        curvature_samples: int | None = None,
        max_physical_batch_size: int | None = None,
        noise_generator: torch.Generator | np.random.Generator | None = None,
        progress: bool | None = None,
    ) -> Statistics:
        """One pass over the private data. Arguments as in ``make_private_expm``.

        Bounds that are neither given nor measurable on a ``public_loader`` are bought with a part of ``epsilon``, at most
        5 % each, which is charged at once; ``adjacency`` and ``noise_generator`` matter for that only.

        **Privacy:** the result is private data; apart from bounds, nothing is charged until something is released from it.
        """
        bench = Workbench(
            model,
            proj_dim=proj_dim,
            criterion=criterion,
            projection=projection,
            projection_seed=projection_seed,
            grad_sample_mode=grad_sample_mode,
            curvature_samples=curvature_samples,
            max_physical_batch_size=max_physical_batch_size,
            progress=progress,
        )
        data.check_loader(loader)
        size = nominal_size_of(loader, nominal_size)
        given = _checked_bounds(max_grad_norm, max_curvature)
        if public_loader is not None:
            data.check_loader(public_loader, "public_loader")
        remembered: Remembered | None = None
        if public_loader is not None and None in given.values():
            given = _public_bounds(bench, public_loader, given)
        elif epsilon is not None and None in given.values():
            _check.positive("epsilon", epsilon)
            _check.one_of("adjacency", adjacency, ADJACENCIES)
            noise = SystemNoise() if self.secure_mode else noise_source(noise_generator)
            given, remembered = self._buy_bounds(bench, loader, given, epsilon, size, adjacency, noise)
        bounds = {name: value for name, value in given.items() if value is not None}
        if len(bounds) < len(given):
            missing = next(name for name in given if name not in bounds)
            raise ValueError(
                f"{missing} is not given: pass max_grad_norm= and max_curvature= as public constants, public_loader= to "
                "measure them on public data, or epsilon= to buy them; they must not be read off the private data"
            )
        return bench.gather(loader, **bounds, nominal_size=size, remembered=remembered)

    def _buy_bounds(
        self,
        bench: Workbench,
        loader: DataLoader[Any],
        given: Bounds,
        epsilon: float,
        nominal_size: int,
        adjacency: str,
        noise: Uniforms,
    ) -> tuple[Bounds, Remembered]:
        """Private quantiles for the bounds that are missing, charged before they are drawn."""
        purchases = [
            Purchase(price, adjacency, name, QUANTILES[name], nominal_size)
            for name, price in _prices(given, epsilon, nominal_size).items()
        ]
        for purchase in purchases:
            warn_if_unreliable(purchase.epsilon_range, nominal_size, purchase.quantile)
        remembered = bench.remember(loader, curvature=given["max_curvature"] != 0)
        norms = {"max_grad_norm": remembered.gradient_norms, "max_curvature": remembered.curvature_norms}
        bounds = dict(given)
        for purchase in purchases:
            self.accountant.record(purchase)
            bounds[purchase.bound] = private_quantile(
                norms[purchase.bound], purchase.quantile, purchase.epsilon_range, adjacency, noise
            )
        return bounds, remembered

    def release(
        self,
        statistics: Statistics,
        epsilon: float,
        radius: float,
        *,
        delta: float = 0.0,
        regularization: float = 0.0,
        adjacency: str = "add_remove",
        calibration: str = "auto",
        sampler: str | Sampler = "exact",
        noise_generator: torch.Generator | np.random.Generator | None = None,
    ) -> nn.Module:
        """Draw one model from the statistics and charge it. Arguments as in ``make_private_expm``.

        **Privacy:** (ε, δ)-DP under the given adjacency; every call is a release of its own.
        """
        self._check_release(epsilon, delta, radius, regularization, adjacency, calibration)
        calibrated = self._calibrate(statistics, epsilon, delta, radius, regularization, adjacency, calibration)
        check_resolution(statistics.module, radius, statistics.layout.size)
        draw = self._sampler(sampler)
        generator = noise_source(noise_generator)
        density = statistics.density(calibrated.inverse_temperature, radius, regularization)
        sums, subspace = statistics.sums, statistics.projection
        self.accountant.record(
            Release(
                epsilon_range=calibrated.epsilon_range,
                mu=calibrated.mu,
                adjacency=adjacency,
                epsilon=float(epsilon),
                delta=float(delta),
                calibration=calibrated.method,
                radius=float(radius),
                regularization=float(regularization),
                nominal_size=statistics.nominal_size,
                max_grad_norm=sums.max_grad_norm,
                max_curvature=sums.max_curvature,
                projection=subspace.kind,
                proj_dim=subspace.dim,
                seed=subspace.seed,
                sampler="secure" if self.secure_mode else type(draw).__name__.lower(),
                failure_probability=FAILURE_PROBABILITY if self.secure_mode else 0.0,
            )
        )
        if self.secure_mode:
            reach = calibrated.inverse_temperature * radius * statistics.nominal_size * sums.max_grad_norm
            fixed = FixedWork(proposals_needed(density.dim, reach))
            return statistics.module_at(fixed.sample(density, SystemNoise()))
        return statistics.module_at(draw.sample(density, generator)[0])

    def simulate(
        self,
        statistics: Statistics,
        epsilon: float,
        radius: float,
        evaluate: Callable[[nn.Module], float],
        *,
        draws: int = 500,
        delta: float = 0.0,
        regularization: float = 0.0,
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
        calibrated = self._calibrate(statistics, epsilon, delta, radius, regularization, adjacency, calibration)
        warnings.warn(
            "simulate() draws models that are NOT releases: nothing is charged and the results are not private",
            UserWarning,
            stacklevel=2,
        )
        density = statistics.density(calibrated.inverse_temperature, radius, regularization)
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
        torch.save(content, path)

    def load_checkpoint(self, *, path: str | os.PathLike[str], module: nn.Module) -> dict[str, Any]:
        """Load weights into ``module`` and the ledger into this engine; no code in the file is run.

        Returns:
            The user's own entries.

        Raises:
            ValueError: the file is no such checkpoint; module and ledger are unchanged.
        """
        if not isinstance(module, nn.Module):
            raise TypeError(f"module must be a torch.nn.Module, got {type(module).__name__}")
        try:
            content = torch.load(path, map_location="cpu", weights_only=True)
        except OSError:
            raise
        except Exception as error:  # torch's reader fails in many ways on bytes that are no checkpoint
            raise ValueError(f"{os.fspath(path)!r} is not a checkpoint that can be loaded safely") from error
        needed = ("module_state_dict", "privacy_accountant_state_dict")
        if not isinstance(content, dict) or any(not isinstance(content.get(key), dict) for key in needed):
            raise ValueError(
                f"{os.fspath(path)!r} is not a checkpoint of ExpMQuadEngine: it needs {' and '.join(needed)}"
            )
        before = copy.deepcopy(module.state_dict())
        try:
            module.load_state_dict(content.pop("module_state_dict"))
            self.accountant.load_state_dict(content.pop("privacy_accountant_state_dict"))
        except Exception as error:  # likewise torch, on weights that are none
            module.load_state_dict(before)
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
            data.check_loader(data_loader, "data_loader")

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

    def _check_release(
        self,
        epsilon: float,
        delta: float,
        radius: float,
        regularization: float,
        adjacency: str,
        calibration: str,
    ) -> None:
        """Everything about a release that can be refused before any data is touched."""
        check_request(epsilon, delta, radius, regularization, calibration)
        _check.one_of("adjacency", adjacency, ADJACENCIES)
        self.accountant.check_adjacency(adjacency)

    def _check_budget(
        self, epsilon: float, delta: float, regularization: float, calibration: str, prices: list[float]
    ) -> None:
        """Refuse a request that cannot fit the budget, however it will be calibrated, before any data is touched."""
        if calibration == "paper":  # which spends less than it asks for; it is checked when it is charged
            return
        left = _left_of(epsilon, math.fsum(prices))
        failure = FAILURE_PROBABILITY if self.secure_mode else 0.0
        draws = [PlannedEvent(curves.bounded_range_for(left, delta), math.inf, failure)]
        if delta > 0 and regularization > 0:
            draws.append(PlannedEvent(math.inf, curves.gaussian_mu(left, delta), failure))
        plans = [[*map(PlannedEvent, prices), draw] for draw in draws]
        # Bounds are charged before it is known which calibration the draw will have, so that either must fit.
        for admissible in [[plan] for plan in plans] if prices else [plans]:
            self.accountant.check_budget(admissible, epsilon, delta)

    def _sampler(self, sampler: str | Sampler, *, simulated: bool = False) -> Sampler:
        """A sampler by name, or as configured by the user."""
        if isinstance(sampler, str):
            sampler = SAMPLERS[_check.one_of("sampler", sampler, tuple(SAMPLERS))]
        if not callable(getattr(sampler, "sample", None)):
            raise TypeError(f"sampler must be one of {tuple(SAMPLERS)} or an object with .sample, got {sampler!r}")
        if self.secure_mode and not simulated and not isinstance(sampler, Exact):
            raise ValueError("secure_mode draws exactly, with fixed work; leave sampler='exact'")
        return sampler

    def _calibrate(
        self,
        statistics: Statistics,
        epsilon: float,
        delta: float,
        radius: float,
        regularization: float,
        adjacency: str,
        calibration: str,
    ) -> Calibration:
        """The temperature for these statistics."""
        if not isinstance(statistics, Statistics):
            raise TypeError(f"statistics must come from gather(), got {type(statistics).__name__}")
        return calibrate(
            statistics.sums.sensitivity(adjacency),
            epsilon=epsilon,
            delta=delta,
            radius=radius,
            regularization=regularization,
            nominal_size=statistics.nominal_size,
            calibration=calibration,
        )


def _checked_bounds(max_grad_norm: float | None, max_curvature: float | None) -> Bounds:
    """The bounds as given, by name."""
    return {
        "max_grad_norm": None if max_grad_norm is None else _check.positive("max_grad_norm", max_grad_norm),
        "max_curvature": None if max_curvature is None else _check.non_negative("max_curvature", max_curvature),
    }


def _prices(given: Bounds, epsilon: float, nominal_size: int) -> dict[str, float]:
    """ε₁ of each bound that is missing."""
    return {
        name: quantile_epsilon(epsilon, nominal_size, QUANTILES[name]) for name, value in given.items() if value is None
    }


def _public_bounds(bench: Workbench, public_loader: DataLoader[Any], given: Bounds) -> Bounds:
    """The bounds, those that are missing measured on public data."""
    measured = bench.public_bounds(public_loader, curvature=given["max_curvature"] != 0)
    found: Bounds = {}
    for (name, value), quantile in zip(given.items(), measured, strict=True):
        found[name] = quantile if value is None else value
        if value is None and quantile == 0:
            raise ValueError(
                f"public_loader gives a zero bound for {name}: gradients or curvatures vanish there at the pretrained "
                "weights; pass max_grad_norm= and max_curvature="
            )
    return found


def _left_of(epsilon: float, spent: float) -> float:
    """ε minus what was spent, rounded so that the two do not add up to more than ε."""
    left = epsilon - spent
    while math.fsum((left, spent)) > epsilon:
        left = math.nextafter(left, 0.0)
    return left


def make_private_expm(
    model: nn.Module,
    loader: DataLoader[Any],
    epsilon: float,
    radius: float,
    proj_dim: int | None,
    *,
    delta: float = 0.0,
    criterion: Callable[[Tensor, Tensor], Tensor] | None = None,
    max_grad_norm: float | None = None,
    max_curvature: float | None = None,
    public_loader: DataLoader[Any] | None = None,
    regularization: float = 0.0,
    adjacency: str = "add_remove",
    calibration: str = "auto",
    sampler: str | Sampler = "exact",
    projection: str = "stiefel",
    projection_seed: int | None = None,
    nominal_size: int | None = None,
    grad_sample_mode: str | None = None,
    curvature_samples: int | None = None,
    max_physical_batch_size: int | None = None,
    noise_generator: torch.Generator | np.random.Generator | None = None,
    progress: bool | None = None,
) -> nn.Module:
    """Fine-tune ``model`` privately in one call, for a single release.

    Arguments, result and guarantee are those of ``ExpMQuadEngine.make_private_expm``; the ledger of the engine
    behind it ends with the call, so use an engine where more than one release is made from the same data.
    """
    return ExpMQuadEngine().make_private_expm(
        model,
        loader,
        epsilon,
        radius,
        proj_dim,
        delta=delta,
        criterion=criterion,
        max_grad_norm=max_grad_norm,
        max_curvature=max_curvature,
        public_loader=public_loader,
        regularization=regularization,
        adjacency=adjacency,
        calibration=calibration,
        sampler=sampler,
        projection=projection,
        projection_seed=projection_seed,
        nominal_size=nominal_size,
        grad_sample_mode=grad_sample_mode,
        curvature_samples=curvature_samples,
        max_physical_batch_size=max_physical_batch_size,
        noise_generator=noise_generator,
        progress=progress,
    )
