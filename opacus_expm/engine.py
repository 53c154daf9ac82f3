"""``ExpMQuadEngine``: the order of the steps, from a model and its private data to a private model.

    DataLoader → projected per-sample rows → clipped sums → calibrated temperature
      ════ everything above holds private data; only a draw, already in the ledger, crosses this line ════
      → ξ from the truncated Gaussian → θ* + Aξ → a plain nn.Module

One pass over the data serves every ε and, the bounds being fixed, every radius.
"""

from __future__ import annotations

import copy
import itertools
import os
import pickle
import secrets
import warnings
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn, optim
from torch.utils.data import DataLoader

from opacus_expm import _check, data
from opacus_expm.accountant import ExpMAccountant, Release
from opacus_expm.bounds import public_bounds
from opacus_expm.calibration import CALIBRATIONS, Calibration, calibrate
from opacus_expm.criteria import Criterion, make_criterion
from opacus_expm.density import BallGaussian
from opacus_expm.functional import FunctionalRows
from opacus_expm.grad_sample import HooksCannotServe, hooks_for
from opacus_expm.model import (
    Layout,
    check_module,
    check_resolution,
    compute_dtype,
    exact_arithmetic,
    moved,
    working_copy,
)
from opacus_expm.projection import KINDS, Projection, make_projection
from opacus_expm.sampling import Exact, Gibbs, PlainRejection, Sampler, noise_source
from opacus_expm.secure import FAILURE_PROBABILITY, FixedWork, SystemNoise, proposals_needed
from opacus_expm.sums import ADJACENCIES, ClippedSums, RowSource, clipped_sums

GRAD_SAMPLE_MODES = ("hooks", "functorch")
SAMPLERS: dict[str, Sampler] = {"exact": Exact(), "gibbs": Gibbs(), "rejection": PlainRejection()}


@dataclass(frozen=True, repr=False, eq=False)
class Statistics:
    """What one pass over the private data left behind: enough to release models at any ε and radius.

    **Privacy:** private data. ``repr`` shows shapes and bounds only, and pickling is refused.
    """

    module: nn.Module
    layout: Layout
    projection: Projection
    sums: ClippedSums
    nominal_size: int

    @cached_property
    def _spectrum(self) -> tuple[NDArray[np.float64], NDArray[np.float64] | None, NDArray[np.float64]]:
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

    def module_at(self, coordinates: NDArray[np.float64]) -> nn.Module:
        """The plain module with parameters θ* + Aξ."""
        return moved(self.module, self.layout, self.projection.lift(torch.from_numpy(coordinates)))

    def __repr__(self) -> str:
        return (
            f"Statistics(parameters={self.layout.size}, projection={self.projection.kind!r}, "
            f"nominal_size={self.nominal_size}, sums={self.sums!r})"
        )

    def __reduce__(self) -> NoReturn:
        raise TypeError("Statistics hold private data and are not pickled; release a model instead")


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
            public_loader: public data on which the bounds that are not given are measured.
            regularization: λ ≥ 0, ridge per record on |ξ|².
            adjacency: ``"add_remove"`` (as Opacus's accountants) or ``"replace_one"``.
            calibration: ``"auto"``, ``"range"``, ``"gaussian"`` or ``"paper"`` (see ``opacus_expm.calibration``).
            sampler: ``"exact"``; or the source paper's ``"gibbs"`` and ``"rejection"``, or a configured sampler of
                ``opacus_expm.sampling``, which ε does not fully cover and which warn or may give up.
            projection: ``"stiefel"`` or ``"sparse"``.
            projection_seed: public seed of the subspace; drawn afresh by default, and recorded.
            nominal_size: public N; ``len(dataset)`` by default, which publishes the size, as Opacus does.
            grad_sample_mode: ``"hooks"``, ``"functorch"``, or None for hooks where they can serve.
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
        noise_source(noise_generator)  # a wrong type must not cost a pass
        self._sampler(sampler)
        statistics = self.gather(
            model,
            loader,
            proj_dim,
            criterion=criterion,
            max_grad_norm=max_grad_norm,
            max_curvature=max_curvature,
            public_loader=public_loader,
            projection=projection,
            projection_seed=projection_seed,
            nominal_size=nominal_size,
            grad_sample_mode=grad_sample_mode,
            max_physical_batch_size=max_physical_batch_size,
            progress=progress,
        )
        return self.release(
            statistics,
            epsilon,
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
        projection: str = "stiefel",
        projection_seed: int | None = None,
        nominal_size: int | None = None,
        grad_sample_mode: str | None = None,
        max_physical_batch_size: int | None = None,
        progress: bool | None = None,
    ) -> Statistics:
        """One pass over the private data. Arguments as in ``make_private_expm``.

        **Privacy:** the result is private data; nothing is charged until something is released from it.
        """
        module = check_module(model)
        data.check_loader(loader)
        if public_loader is not None:
            data.check_loader(public_loader, "public_loader")
        if max_grad_norm is not None:
            _check.positive("max_grad_norm", max_grad_norm)
        if max_curvature is not None:
            _check.non_negative("max_curvature", max_curvature)
        if (max_grad_norm is None or max_curvature is None) and public_loader is None:
            missing = "max_grad_norm" if max_grad_norm is None else "max_curvature"
            raise ValueError(
                f"{missing} is not given: pass max_grad_norm= and max_curvature= as public constants, or "
                "public_loader= to measure them on public data; they must not be read off the private data"
            )
        if grad_sample_mode is not None:
            _check.one_of("grad_sample_mode", grad_sample_mode, GRAD_SAMPLE_MODES)
        _check.one_of("projection", projection, KINDS)
        size = _nominal_size(loader, nominal_size)
        seed = secrets.randbits(63) if projection_seed is None else _seed(projection_seed)

        working = working_copy(module)
        layout = Layout.of(working)
        device, dtype = next(working.parameters()).device, compute_dtype(working)
        subspace = make_projection(projection, layout.size, proj_dim, seed, device=device, dtype=dtype)

        def one_pass(of: DataLoader[Any], name: str) -> Iterator[tuple[Any, Tensor]]:
            return data.batches(
                of,
                device=device,
                dtype=dtype,
                max_physical_batch_size=max_physical_batch_size,
                progress=progress,
                name=name,
            )

        with exact_arithmetic():
            source: RowSource | None = None
            loss: Criterion | None = None
            if public_loader is not None and (max_grad_norm is None or max_curvature is None):
                first, stream = _peek(one_pass(public_loader, "public_loader"))
                loss = make_criterion(criterion, first[1])
                source = _row_source(working, layout, subspace, first[0], grad_sample_mode)
                gradient, curvature = public_bounds(source, loss, stream, curvature=max_curvature != 0)
                max_grad_norm = gradient if max_grad_norm is None else max_grad_norm
                max_curvature = curvature if max_curvature is None else max_curvature
            first, stream = _peek(one_pass(loader, "loader"))
            loss = make_criterion(criterion, first[1]) if loss is None else loss
            source = _row_source(working, layout, subspace, first[0], grad_sample_mode) if source is None else source
            assert max_grad_norm is not None
            assert max_curvature is not None
            sums = clipped_sums(
                source, loss, stream, max_grad_norm=float(max_grad_norm), max_curvature=float(max_curvature)
            )
        return Statistics(copy.deepcopy(module), layout, subspace, sums, size)

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
        except (pickle.UnpicklingError, RuntimeError, EOFError, zipfile.BadZipFile) as error:
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
        except (RuntimeError, TypeError, ValueError) as error:
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
        _check.positive("epsilon", epsilon)
        _check.fraction("delta", delta)
        _check.positive("radius", radius)
        _check.non_negative("regularization", regularization)
        _check.one_of("adjacency", adjacency, ADJACENCIES)
        _check.one_of("calibration", calibration, CALIBRATIONS)
        self.accountant.check_adjacency(adjacency)
        if calibration == "gaussian" and (delta == 0 or regularization == 0):
            raise ValueError(
                f"calibration='gaussian' needs delta > 0 and regularization > 0, got delta={delta!r} and "
                f"regularization={regularization!r}; use calibration='range', or set both"
            )

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


def _nominal_size(loader: DataLoader[Any], nominal_size: int | None) -> int:
    """The public N."""
    if nominal_size is not None:
        return _check.positive_int("nominal_size", nominal_size)
    size = data.dataset_size(loader)
    if size is None:
        raise ValueError("nominal_size must be given for an iterable data set: a public, rounded number of records")
    return size


def _seed(projection_seed: object) -> int:
    """A public seed."""
    if isinstance(projection_seed, bool) or not isinstance(projection_seed, int) or projection_seed < 0:
        raise ValueError(f"projection_seed must be a non-negative integer or None, got {projection_seed!r}")
    return projection_seed


def _peek(stream: Iterator[tuple[Any, Tensor]]) -> tuple[tuple[Any, Tensor], Iterator[tuple[Any, Tensor]]]:
    """The first item, and the whole stream."""
    first = next(stream)
    return first, itertools.chain([first], stream)


def _row_source(
    module: nn.Module, layout: Layout, projection: Projection, inputs: Any, grad_sample_mode: str | None
) -> RowSource:
    """Hooks where they can serve, else functorch; a fallback is said."""
    example = data.take(inputs, slice(0, 1))
    if grad_sample_mode == "functorch":
        return FunctionalRows(module, layout, projection)
    try:
        return hooks_for(module, layout, projection, example)
    except HooksCannotServe as reason:
        if grad_sample_mode == "hooks":
            raise ValueError(f"grad_sample_mode='hooks' cannot serve this model: {reason}; use 'functorch'") from reason
        warnings.warn(f"using grad_sample_mode='functorch', because {reason}", UserWarning, stacklevel=3)
        return FunctionalRows(module, layout, projection)


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
        max_physical_batch_size=max_physical_batch_size,
        noise_generator=noise_generator,
        progress=progress,
    )
