"""The ledger: what was released, and what it cost.

A ``Release`` is an immutable record of public facts; ``ExpMAccountant`` keeps the list and turns it into ε(δ). It is
registered with Opacus as ``"expm"`` and goes on accepting DP-SGD steps, so that both kinds of training on the same
data share one total.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from opacus.accountants import IAccountant, RDPAccountant, register_accountant
from opacus.accountants.registry import _ACCOUNTANTS

from opacus_expm import _check, curves
from opacus_expm.sums import ADJACENCIES


@dataclass(frozen=True)
class Release:
    """One draw that left, or was about to leave: public facts only.

    Attributes:
        epsilon_range: length of the interval that contains the privacy loss: the release is ε_range-DP.
        mu: parameter of Gaussian differential privacy, possibly infinite.
        adjacency: ``"add_remove"`` or ``"replace_one"``.
        epsilon: budget that was asked for.
        delta: budget that was asked for.
        calibration: which calibration was used.
        radius: R.
        regularization: λ.
        nominal_size: N.
        max_grad_norm: C_g.
        max_curvature: C_H.
        projection: kind of projection.
        proj_dim: k.
        seed: public seed of the projection, None where nothing is random.
    """

    epsilon_range: float
    mu: float
    adjacency: str
    epsilon: float
    delta: float
    calibration: str
    radius: float
    regularization: float
    nominal_size: int
    max_grad_norm: float
    max_curvature: float
    projection: str
    proj_dim: int
    seed: int | None

    def __post_init__(self) -> None:
        _check.positive("epsilon_range", self.epsilon_range)
        if not self.mu > 0:
            raise ValueError(f"mu must be greater than 0 (infinite where there is none), got {self.mu!r}")
        _check.one_of("adjacency", self.adjacency, ADJACENCIES)


class ExpMAccountant(IAccountant):
    """Privacy accountant for ExpM-Quad releases and DP-SGD steps on the same data.

    ``history`` holds DP-SGD steps as Opacus's (noise_multiplier, sample_rate, steps) triples, so that Opacus's helpers
    work unchanged; ``releases`` holds the exponential-mechanism releases.

    **Privacy:** the total at δ is valid for releases whose budgets were fixed in advance of the first.
    """

    def __init__(self) -> None:
        super().__init__()
        self.releases: list[Release] = []

    def record(self, release: Release) -> None:
        """Charge one release; called before the draw, so that a crash cannot give a free one.

        Raises:
            TypeError: not a ``Release``.
            ValueError: its adjacency differs from what is already in the ledger.
        """
        if not isinstance(release, Release):
            raise TypeError(f"release must be a Release, got {release!r}")
        self.check_adjacency(release.adjacency)
        self.releases.append(release)

    def check_adjacency(self, adjacency: str) -> None:
        """Raise if an event under this adjacency cannot share the ledger with what it holds."""
        held = {r.adjacency for r in self.releases} | ({"add_remove"} if self.history else set())
        if held - {adjacency}:
            raise ValueError(
                f"adjacency={adjacency!r} cannot be added to a ledger that counts {held.pop()!r}: the two notions "
                "of a neighbour do not compose; use a ledger (engine) of its own"
            )

    def step(self, *, noise_multiplier: float, sample_rate: float) -> None:
        """Charge one DP-SGD step, as Opacus's optimizer does."""
        self.check_adjacency("add_remove")
        if self.history and self.history[-1][:2] == (noise_multiplier, sample_rate):
            self.history[-1] = (noise_multiplier, sample_rate, self.history[-1][2] + 1)
        else:
            self.history.append((noise_multiplier, sample_rate, 1))

    def get_epsilon(self, delta: float = 0.0) -> float:
        """ε spent so far at the given δ, by the least of the valid bounds.

        Releases alone: Σ ε_range (also at δ = 0); for a single release also its exact (ε, δ) curve; and Gaussian
        composition √Σμ² where every μ is finite. DP-SGD steps add what Opacus's Rényi accountant gives at δ (basic
        composition), and have no finite ε at δ = 0.

        Args:
            delta: δ in [0, 1).
        """
        _check.fraction("delta", delta)
        steps = self._steps_epsilon(delta)
        if not self.releases:
            return steps
        pure = math.fsum(r.epsilon_range for r in self.releases)
        if self.history:
            return pure + steps
        candidates = [pure, curves.gaussian_epsilon(math.hypot(*(r.mu for r in self.releases)), delta)]
        if len(self.releases) == 1:
            candidates.append(curves.bounded_range_epsilon(pure, delta))
        return min(candidates)

    def _steps_epsilon(self, delta: float) -> float:
        """ε of the DP-SGD steps alone."""
        if not self.history:
            return 0.0
        if delta == 0:
            return math.inf
        accountant = RDPAccountant()
        accountant.history = list(self.history)
        return float(accountant.get_epsilon(delta))

    def __len__(self) -> int:
        return len(self.releases) + sum(int(steps) for _, _, steps in self.history)

    @classmethod
    def mechanism(cls) -> str:
        """Name under which the accountant is registered with Opacus."""
        return "expm"

    def state_dict(self, destination: dict[str, Any] | None = None) -> dict[str, Any]:
        """The ledger as plain numbers and strings."""
        state: dict[str, Any] = super().state_dict(OrderedDict() if destination is None else destination)
        state["releases"] = [asdict(r) for r in self.releases]
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Replace the ledger by a saved one, after checking every entry.

        Raises:
            ValueError: a state of another accountant, or an entry that is not a release.
        """
        releases = []
        for entry in (state_dict or {}).get("releases", []):
            names = {f.name for f in fields(Release)}
            if not isinstance(entry, Mapping) or set(entry) != names:
                raise ValueError(f"state_dict holds a release with other fields than {sorted(names)}")
            releases.append(Release(**entry))
        super().load_state_dict(state_dict)
        self.releases = releases

    def __repr__(self) -> str:
        steps = sum(steps for _, _, steps in self.history)
        return f"ExpMAccountant(releases={len(self.releases)}, dp_sgd_steps={steps})"


if _ACCOUNTANTS.get("expm") is None:  # importing twice must not raise
    register_accountant("expm", ExpMAccountant)
