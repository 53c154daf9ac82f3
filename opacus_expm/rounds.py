"""``Plan``, what was asked, checked once; and ``Rounds``, the order of the steps from a model to its release.

pass ─▶ Statistics
════ everything above holds private data; only a draw, already in the ledger, crosses this line ════
─▶ calibrate ─▶ charge ─▶ draw ─▶ θ + Aξ ─▶ a plain nn.Module          (a round; the next one starts there)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from opacus_expm import _check, words
from opacus_expm.accounting.admission import Admission
from opacus_expm.accounting.events import PlannedEvent, Release
from opacus_expm.books import Books
from opacus_expm.bounds import Bounds
from opacus_expm.gathering import loaders
from opacus_expm.gathering.clipping import ClippingBounds
from opacus_expm.gathering.measurement import Measurement
from opacus_expm.gathering.model import check_resolution
from opacus_expm.gathering.ranks import described
from opacus_expm.gathering.statistics import Statistics
from opacus_expm.gatherings import Gathering, ready
from opacus_expm.mechanism.calibration import (
    Allowance,
    Calibration,
    allowances,
    calibrate_within,
    check_request,
    cost_whatever_the_bounds,
    default_regularization,
)
from opacus_expm.mechanism.density import Array, BallGaussian


@dataclass(frozen=True)
class Budget:
    """What a draw, or several together, may cost, and the ball in which they are made.

    Args:
        epsilon: ε > 0.
        delta: δ in [0, 1); 0 gives pure ε-DP.
        radii: R > 0 of each round.
        regularization: λ ≥ 0, or None for ``mechanism.calibration.default_regularization``.
    """

    epsilon: float
    delta: float
    radii: tuple[float, ...]
    regularization: float | None = None

    def __post_init__(self) -> None:
        for radius in self.radii:
            check_request(self.epsilon, self.delta, radius, self.regularization)

    @classmethod
    def of(
        cls,
        epsilon: float,
        delta: float,
        radius: float | Sequence[float],
        regularization: float | None,
        rounds: int = 1,
    ) -> Budget:
        """One radius for all rounds, or one for each."""
        _check.positive_int("rounds", rounds)
        if isinstance(radius, Real) or not isinstance(radius, Sequence) or isinstance(radius, str):
            radii: Any = [radius] * rounds  # what is no number is refused by the request's check
        elif len(radius) != rounds:
            raise ValueError(
                f"radius must be one number, or one for each of rounds={rounds}, got {len(radius)} of them"
            )
        else:
            radii = radius
        return cls(epsilon, delta, tuple(radii), regularization)

    def ridge(self, statistics: Statistics, number: int = 0) -> float:
        """λ as given, or the default for these statistics."""
        if self.regularization is not None:
            return float(self.regularization)
        sums = statistics.sums
        return default_regularization(
            sums.max_grad_norm,
            sums.max_curvature,
            radius=self.radii[number],
            proj_dim=statistics.projection.dim,
            rank=sums.rank,
        )

    def calibrate(self, statistics: Statistics, allowance: Allowance, books: Books, number: int = 0) -> Calibration:
        """The temperature of a draw from these statistics that costs no more than allowed."""
        if not isinstance(statistics, Statistics):
            raise TypeError(f"statistics must come from gather(), got {type(statistics).__name__}")
        return calibrate_within(
            allowance,
            statistics.sums.sensitivity(books.adjacency, projected=books.noise.secure),
            radius=self.radii[number],
            regularization=self.ridge(statistics, number),
            nominal_size=statistics.nominal_size,
        )

    def facts(self) -> dict[str, object]:
        """What has to be the same on every rank, by the name of the argument."""
        return {
            "epsilon": self.epsilon,
            "delta": self.delta,
            "radius": self.radii,
            "regularization": self.regularization,
        }


@dataclass(frozen=True, eq=False)
class Plan:
    """Several rounds as they were asked for; public, and checked once.

    Attributes:
        budget: what all rounds together may cost.
        bounds: C_g and C_H, as far as they are given.
        measurement: what each pass computes.
        public_loader: public data for bounds, or None.
    """

    budget: Budget
    bounds: Bounds
    measurement: Measurement
    public_loader: DataLoader[Any] | None = None

    @property
    def rounds(self) -> int:
        """The number of rounds, T."""
        return len(self.budget.radii)

    def facts(self, model: nn.Module, loader: DataLoader[Any]) -> dict[str, object]:
        """What has to be the same on every rank, by the name of the argument."""
        return {
            "model": described(model),
            "loader": described(loader),
            **self.budget.facts(),
            **vars(self.bounds),
            **self.measurement.facts(),
            "public_loader": described(self.public_loader),
        }

    def prices(self, loader: DataLoader[Any]) -> dict[str, float]:
        """ε₁ of each bound that is to be bought."""
        if self.public_loader is not None:
            return {}
        return self.bounds.prices(self.budget.epsilon, self.measurement.size_of(loader))

    def ways(self, prices: dict[str, float]) -> list[Allowance]:
        """The ways to split the budget over purchases and draws."""
        ridge = self.budget.regularization != 0
        return allowances(
            self.budget.epsilon, self.budget.delta, prices=list(prices.values()), rounds=self.rounds, ridge=ridge
        )

    def charges(self, prices: dict[str, float], books: Books) -> list[list[PlannedEvent]]:
        """What may come to be charged: by range or by μ, for every way to split the budget."""
        draws = []
        for way in self.ways(prices):
            for method in ("range", "gaussian"):
                if method == "range" or (way.mu > 0 and self.budget.regularization != 0):
                    cost = cost_whatever_the_bounds(way, method)
                    draws.append(PlannedEvent(*cost, books.noise.failure_probability))
        return [[*map(PlannedEvent, prices.values()), *[draw] * self.rounds] for draw in draws]


class Rounds:
    """T rounds that were checked and admitted to the budget: what each gathers, from which weights, and what it draws.

    Whatever later rounds take over from the first (bounds, the way to split the budget) is kept here.

    Args:
        plan: what was asked.
        loader: the private data.
        books: that charges are written into.
        pieces: records at a time.
        instead_of: what unfinished rounds of the same module have reserved, which these put an end to.
    """

    def __init__(
        self,
        plan: Plan,
        loader: DataLoader[Any],
        books: Books,
        *,
        pieces: loaders.Pieces | None = None,
        instead_of: Admission | None = None,
    ):
        books.check()
        loaders.check_loader(loader)
        if plan.public_loader is not None:
            loaders.check_public(plan.public_loader, loader)
        self._plan, self._loader, self._books = plan, loader, books
        self._pieces = loaders.Pieces(plan.measurement.max_physical_batch_size) if pieces is None else pieces
        prices = plan.prices(loader)
        self._ways = plan.ways(prices)
        self._way: Allowance | None = None
        self._bounds: Bounds | ClippingBounds = plan.bounds
        # Admitted here, and named wherever a round charges: a training loop's rounds outlive the call.
        self._admission: Admission = books.accountant.admit(
            plan.charges(prices, books), plan.budget.epsilon, plan.budget.delta, instead_of=instead_of
        )

    @property
    def count(self) -> int:
        """The number of rounds, T."""
        return self._plan.rounds

    @property
    def admission(self) -> Admission:
        """What of the budget is reserved."""
        return self._admission

    def end(self) -> None:
        """No further round is going to be drawn: nothing of the budget stays reserved."""
        self._admission.end()

    def run(self, model: nn.Module) -> nn.Module:
        """All rounds, one after the other."""
        module = model
        try:
            for number in range(self.count):
                gathering = self.begin(module, number)
                statistics = gathering.over(self._loader)
                if number == 0:
                    words.of_start(self._books, gathering.bench)
                module = self.draw(statistics, number)
        finally:
            self.end()
        return module

    def begin(self, module: nn.Module, number: int) -> Gathering:
        """A round that starts from ``module``."""
        plan = self._plan
        return ready(
            module,
            self._loader,
            plan.measurement,
            self._bounds,
            self._books,
            public_loader=plan.public_loader,
            epsilon=plan.budget.epsilon,
            admission=self._admission,
            pieces=self._pieces,
            number=number,
        )

    def draw(self, statistics: Statistics, number: int) -> nn.Module:
        """Charge, then draw."""
        budget, books = self._plan.budget, self._books
        if self._way is None:
            self._way = max(self._ways, key=lambda way: budget.calibrate(statistics, way, books).inverse_temperature)
            sums = statistics.sums
            self._bounds = ClippingBounds(
                sums.max_grad_norm, sums.max_curvature, statistics.bounds, statistics.receipts
            )
        return release(statistics, budget, self._way, books, number=number, admission=self._admission)


def release(
    statistics: Statistics,
    budget: Budget,
    allowance: Allowance,
    books: Books,
    *,
    number: int = 0,
    admission: Admission | None = None,
) -> nn.Module:
    """Charge, then draw, both on the leading rank; the model on every rank.

    **Privacy:** the release costs no more than allowed; every call is a release of its own.
    """
    calibrated = budget.calibrate(statistics, allowance, books, number)
    radius = budget.radii[number]
    epsilon_range, mu = calibrated.epsilon_range, calibrated.mu
    if statistics.bounds == "bought":  # what follows from the bounds was not fixed in advance, and may not count
        epsilon_range, mu = cost_whatever_the_bounds(allowance, calibrated.method)
    c, reach = calibrated.inverse_temperature, statistics.nominal_size * statistics.sums.max_grad_norm * radius
    event = release_event(
        statistics, budget, replace(calibrated, epsilon_range=epsilon_range, mu=mu), books, number=number
    )
    coordinates = drawn(statistics, event, books, c, lambda density: books.noise.draw(density, c * reach), admission)
    share = float(np.linalg.norm(coordinates)) / radius
    module = statistics.module_at(coordinates)
    books.ranks.adopt([p for p in module.parameters() if p.requires_grad])
    words.of_draw(books, event, c, share, statistics.module, module)
    return module


def release_event(
    statistics: Statistics,
    budget: Budget,
    calibrated: Calibration,
    books: Books,
    *,
    number: int = 0,
    sampler: str | None = None,
) -> Release:
    """What the ledger says of a draw."""
    sums, subspace = statistics.sums, statistics.projection
    return Release(
        epsilon_range=calibrated.epsilon_range,
        mu=calibrated.mu,
        adjacency=books.adjacency,
        epsilon=float(budget.epsilon),
        delta=float(budget.delta),
        calibration=calibrated.method,
        radius=float(budget.radii[number]),
        regularization=budget.ridge(statistics, number),
        nominal_size=statistics.nominal_size,
        max_grad_norm=sums.max_grad_norm,
        max_curvature=sums.max_curvature,
        projection=subspace.kind,
        proj_dim=subspace.dim,
        seed=subspace.seed,
        sampler=sampler or books.noise.sampler,
        failure_probability=books.noise.failure_probability,
        bounds=statistics.bounds,
        round=number + 1,
        rounds=len(budget.radii),
        noise=books.noise.origin,
    )


def drawn(
    statistics: Statistics,
    event: Release,
    books: Books,
    inverse_temperature: float,
    sample: Callable[[BallGaussian], Array],
    admission: Admission | None = None,
) -> Array:
    """The coordinates ξ of a draw that is charged first; everything that can fail does so before."""
    books.accountant.check_paid(statistics.receipts)
    check_resolution(statistics.module, event.radius, statistics.layout.size)
    density: BallGaussian | None = None
    if books.ranks.leads:
        density = statistics.density(inverse_temperature, event.radius, event.regularization)
    books.ranks.ready()  # every rank got this far: only now is it charged

    def draw() -> Tensor:
        assert density is not None
        return torch.from_numpy(sample(density))

    zeros = torch.zeros(statistics.projection.dim, dtype=torch.float64)
    return books.drawn(event, admission, draw, zeros).numpy()
