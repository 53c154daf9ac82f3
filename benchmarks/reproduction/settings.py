"""What the source paper fixes for each experiment, and how much is computed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from opacus_expm.experiments.methods import Grid
from opacus_expm.paper import Gibbs

EPSILONS = (0.1, 1.0, 2.0, 5.0, 10.0, 50.0)
RADII = (0.01, 0.1, 0.15, 0.5)
RADIUS = 0.1  # of the figures with varied k
MODERATE = (0.1, 0.15)
METHODS = {
    "paper_not_private": "the paper's calibration, Gibbs sampler",
    "ours": "ours: range calibration, exact sampler",
}
FIGURES = ("radius", "dimension")


@dataclass(frozen=True)
class Setting:
    """What the paper fixes for a task, and what it says of its figures.

    Attributes:
        proj_dim: k of the figure with varied R.
        dims: k of the figure with varied k.
        regularization: the paper's λ.
        learning_rate: of the paper's training; DP-SGD is also run at it, since the paper gives no other.
        crossing: the ε from which ExpM-Quad is said to beat the pretrained model.
        flat_from: the ε from which DP-SGD is said to be flat.
        enough: a k beyond which little is said to be gained, if any.
    """

    proj_dim: int
    dims: tuple[int, ...]
    regularization: float
    learning_rate: float
    crossing: float
    flat_from: float
    enough: int | None = None


@dataclass(frozen=True)
class Effort:
    """How much is computed; what it says goes into the result.

    Attributes:
        draws: candidates for each point of a curve.
        gibbs: the paper's sampler.
        seeds: runs of the reference methods.
        non_private: grid of non-private fine-tuning.
        dp_sgd: grid of DP-SGD.
    """

    draws: int
    gibbs: Gibbs
    seeds: int
    non_private: Grid
    dp_sgd: Grid


def _grids(*, rates: Sequence[float], epochs: int, non_private: tuple[float, int, int]) -> tuple[Grid, Grid]:
    """One setting for non-private training, several rates for DP-SGD."""
    names = ("learning_rate", "batch_size", "epochs")
    return (
        {name: (value,) for name, value in zip(names, non_private, strict=True)},
        {"learning_rate": rates, "max_grad_norm": (1.0,), "sample_rate": (0.05,), "epochs": (epochs,)},
    )


EXPERIMENTS: Mapping[str, tuple[Setting, Effort]] = {
    # The paper's clinical model has k in {20, 40, 200}; that of the open data has 22 parameters. No λ is given for it.
    "sine": (
        Setting(20, (5, 10, 20, 40), 0.0, 1e-2, crossing=1.0, flat_from=0.1, enough=20),
        Effort(500, Gibbs(), 3, *_grids(rates=(0.003, 0.01, 0.03, 0.1), epochs=10, non_private=(1e-2, 256, 60))),
    ),
    "mnist": (
        Setting(400, (50, 100, 200, 400), 1.0, 1e-3, crossing=1.0, flat_from=1.0),
        Effort(500, Gibbs(), 1, *_grids(rates=(0.01, 0.1, 0.3), epochs=5, non_private=(2e-3, 256, 10))),
    ),
    "icu": (
        Setting(20, (5, 10, 20, 22), 0.0, 5e-2, crossing=5.0, flat_from=0.1, enough=20),
        Effort(500, Gibbs(), 3, *_grids(rates=(0.01, 0.03, 0.1, 0.3), epochs=10, non_private=(1e-2, 256, 30))),
    ),
}
TASKS = tuple(EXPERIMENTS)
