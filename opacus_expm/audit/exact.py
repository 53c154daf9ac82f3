"""The exact privacy loss between two data sets, from the densities that the engine draws from.

The audit gives the engine noise that keeps the density it is asked to draw from. Everything before the draw (loader,
gradients, projection, clipping, sums, calibration) is what a release would have done, and the claim is what the ledger then
says.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import nn
from torch.utils.data import DataLoader

from opacus_expm import _check, subspaces, words
from opacus_expm.accounting.composition import total_epsilon
from opacus_expm.audit.findings import Finding, Report, warn_not_private
from opacus_expm.audit.streams import is_random, with_own_streams
from opacus_expm.bounds import Bounds
from opacus_expm.engine import ExpMQuadEngine
from opacus_expm.gathering import loaders
from opacus_expm.gathering.rows import GradSampling
from opacus_expm.mechanism.density import Array, BallGaussian
from opacus_expm.mechanism.privacy_loss import QUADRATURE_DIM, PrivacyLoss, Quadrature, Sampled
from opacus_expm.noise import Noise

Arguments = Mapping[str, Any]  # of the engine (``ENGINE``), and of ``make_private_expm`` without model and loader
ENGINE = ("adjacency", "noise_generator")

DRAWS = 20_000


@dataclass(frozen=True)
class _Window(Noise):
    """Noise of exact draws that keeps the densities it was given."""

    densities: list[BallGaussian] = field(default_factory=list, repr=False)

    def draw(self, density: BallGaussian, reach: float) -> Array:
        """One draw ξ."""
        self.densities.append(density)
        return super().draw(density, reach)


def audit_pair(
    model: nn.Module,
    loader: DataLoader[Any],
    neighbour: DataLoader[Any],
    arguments: Arguments,
    *,
    subject: str = "engine",
    draws: int = DRAWS,
    seed: int = 0,
) -> Report:
    """The exact privacy loss of one release between two neighbouring data sets, beside what the ledger claims.

    There are up to three findings: the exact maximum of the loss (for δ = 0), quadrature (up to three dimensions), and a
    lower bound from the loss at draws.

    Args:
        model: as for ``make_private_expm``.
        loader: the one data set.
        neighbour: the other one, with one record more or less, or with one record replaced.
        arguments: what ``make_private_expm`` would be called with beside model and loader; at least ``epsilon``,
            ``radius`` and ``proj_dim``; and the engine's ``adjacency``, if it is not ``"add_remove"``. The projection's
            seed is 0 and N the size of ``loader`` unless they are given.
        subject: a name for the report.
        draws: how many are taken from each density.
        seed: of these draws.

    Raises:
        TypeError, ValueError: bad input, data sets that cannot be neighbours under the adjacency, or a release that is not
            one draw from one density given public numbers: several rounds, bought bounds or sampled curvature. Those
            are for ``black_box``.

    The curvature must be exact: for sequences and for more than 64 outputs, whose curvature is probed at random, pass
    ``max_curvature=0``. Secure mode draws from the same density; its own failures are in the ledger, not here.

    Where records are random themselves (augmentation, views, dropout in a functional call), the claim is about any fixed
    randomness of the records that both data sets have (``gathering.randomness``). That is what is compared then, one
    record at a time, for one draw of this randomness; generators that the model holds as attributes cannot be fixed.

    **Privacy:** the report is NOT private, and says so in a warning.
    """
    warn_not_private("audit_pair()")
    _check.positive_int("draws", draws)
    settled = settled_arguments(loader, neighbour, arguments)
    loss, claimed = observed_loss(model, loader, neighbour, settled)
    delta = float(settled.get("delta", 0.0))
    found = {}
    if delta == 0:
        found["exact"] = loss.largest()
    if loss.before.dim <= QUADRATURE_DIM:
        found["quadrature"] = Quadrature(loss).epsilon(delta)
    found["draws"] = Sampled(loss, draws, np.random.default_rng(_check.seed("seed", seed))).epsilon(delta)
    facts = (settled["adjacency"], float(settled["epsilon"]), delta, claimed)
    return Report(tuple(Finding(subject, method, *facts, epsilon) for method, epsilon in found.items()))


@words.unsaid()
def observed_loss(
    model: nn.Module, loader: DataLoader[Any], neighbour: DataLoader[Any], arguments: Arguments
) -> tuple[PrivacyLoss, float]:
    """The privacy loss between the densities of two releases, and the ε that the ledger states for one release.

    **Privacy:** not private. Each release is charged to a ledger that is thrown away.
    """
    before, claimed = _observed(model, loader, arguments)
    if is_random(model, loader, arguments.get("views")):
        loader, neighbour = with_own_streams(loader, neighbour, arguments.get("views"))
        before, claimed = _observed(model, loader, arguments)
    after, other = _observed(model, neighbour, arguments)
    return PrivacyLoss(before, after), min(claimed, other)


def _observed(model: nn.Module, loader: DataLoader[Any], arguments: Arguments) -> tuple[BallGaussian, float]:
    """The density of one release, and the ε that the ledger states for it."""
    engine, window = engine_for(arguments), _Window()
    engine.noise = window
    engine.make_private_expm(model, loader, **call_arguments(arguments))
    return window.densities[-1], claim(engine, float(arguments.get("delta", 0.0)))


def engine_for(arguments: Arguments) -> ExpMQuadEngine:
    """An engine whose ledger is thrown away, with those of the arguments that are the engine's."""
    own = {name: arguments[name] for name in ENGINE if name in arguments}
    return ExpMQuadEngine(distributed=False, **own)


def call_arguments(arguments: Arguments) -> dict[str, Any]:
    """Those of the arguments that are the call's."""
    return {name: value for name, value in arguments.items() if name not in ENGINE}


def claim(engine: ExpMQuadEngine, delta: float) -> float:
    """The ε that the ledger states at δ for exact draws with unknown noise."""
    return total_epsilon(engine.accountant.releases, engine.accountant.history, delta).epsilon


def settled_arguments(loader: DataLoader[Any], neighbour: DataLoader[Any], arguments: Arguments) -> dict[str, Any]:
    """Check the arguments of an exact audit and complete them, so that two releases differ by their data alone."""
    for name in ("epsilon", "radius", "proj_dim"):
        if name not in arguments:
            raise ValueError(f"arguments must hold {name!r}, as make_private_expm needs it")
    for name in ("model", "loader", "noise_generator"):
        if name in arguments:
            raise ValueError(f"arguments must not hold {name!r}: an audit chooses it; leave it out")
    settled = {"adjacency": "add_remove", "progress": False, **arguments}
    recipe = subspaces.named(settled.get("projection", "sparse"))
    settled["projection"] = recipe.seeded(0) if recipe.seed is None else recipe
    size = loaders.dataset_size(loaders.check_loader(loader))
    other_size = loaders.dataset_size(loaders.check_loader(neighbour, "neighbour"))
    if size is None or other_size is None:
        raise ValueError("loader and neighbour must have data sets of known size: iterable ones cannot be compared")
    if abs(size - other_size) != (0 if settled["adjacency"] == "replace_one" else 1):
        raise ValueError(
            f"loader and neighbour cannot be neighbours under adjacency={settled['adjacency']!r}: their sizes must "
            f"{'agree' if settled['adjacency'] == 'replace_one' else 'differ by one'}"
        )
    if settled.get("nominal_size") is None:
        settled["nominal_size"] = size
    if settled.get("rounds", 1) != 1:
        raise ValueError("an exact audit is of one draw: rounds must be 1; audit rounds with black_box")
    if GradSampling.named(settled.get("grad_sample_mode")).probes is not None:
        raise ValueError("an exact audit needs exact curvature: leave probes out, or use black_box")
    if settled.get("views") is not None and bounds_of(settled).curvature:
        raise ValueError(
            "an exact audit needs exact curvature, and views have it probed: pass max_curvature=0, leave views out, or use "
            "black_box"
        )
    if settled.get("public_loader") is None and bounds_of(settled).missing:
        raise ValueError(
            "an exact audit needs public bounds: pass max_grad_norm and max_curvature or a public_loader in arguments; "
            "bought bounds are random, and are for black_box"
        )
    return settled


def bounds_of(arguments: Arguments) -> Bounds:
    """The clipping bounds as the engine reads them; None for one that has to be measured or bought."""
    return Bounds(arguments.get("max_grad_norm"), arguments.get("max_curvature"))
