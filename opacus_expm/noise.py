"""Where the noise of draws and purchases comes from."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from opacus_expm.mechanism.choices import Source, chosen
from opacus_expm.mechanism.density import Array, BallGaussian
from opacus_expm.mechanism.sampling import Exact
from opacus_expm.mechanism.secure import (
    FAILURE_PROBABILITY,
    SUM_GRID,
    FixedWork,
    SystemNoise,
    proposals_needed,
    within_reach,
)


@dataclass(frozen=True)
class Noise:
    """The noise of an engine: the operating system's entropy, unless a generator is given.

    The global seeds of torch, numpy and random play no part: ``torch.manual_seed(0)`` in a training script must not make
    the noise predictable.

    Args:
        generator: for tests and simulations only. The ledger records that one was given. A torch generator is advanced and
            seeds a numpy one.
        secure: draw with the operating system's cryptographic noise and work that does not depend on the data
            (``mechanism.secure``); a generator then plays no part.
    """

    generator: torch.Generator | np.random.Generator | None = field(default=None, repr=False)
    secure: bool = False

    def __post_init__(self) -> None:
        if self.generator is not None and not isinstance(self.generator, torch.Generator | np.random.Generator):
            raise TypeError(
                f"noise_generator must be a torch.Generator, a numpy.random.Generator or None, got {self.generator!r}"
            )

    @property
    def origin(self) -> str:
        """What the ledger says of it: ``"system"`` or ``"given"``."""
        return "system" if self.generator is None or self.secure else "given"

    @property
    def sampler(self) -> str:
        """What the ledger says of how a draw is made."""
        return "secure" if self.secure else "exact"

    @property
    def failure_probability(self) -> float:
        """Total variation between a draw, or an answer, and the exact mechanism."""
        return FAILURE_PROBABILITY if self.secure else 0.0

    def source(self) -> Source:
        """Where numbers come from that a release rests on."""
        return SystemNoise() if self.secure else self.ordinary()

    def ordinary(self) -> np.random.Generator:
        """An ordinary generator, also in secure mode: for simulations and public seeds."""
        if isinstance(self.generator, torch.Generator):
            words = torch.randint(2**62, (4,), generator=self.generator, device=self.generator.device)
            return np.random.default_rng(words.tolist())
        return np.random.default_rng() if self.generator is None else self.generator

    def apart(self) -> Source:
        """A source of numbers for work that is done ahead: when they are drawn changes no other numbers."""
        random = self.source()
        if isinstance(random, np.random.Generator) and random is self.generator:
            return np.random.default_rng(random.integers(2**62, size=4))
        return random

    def choose(self, logits: Array) -> int:
        """A candidate j with probability proportional to exp(logits[j])."""
        return chosen(logits, self.source())

    def added(self, total: Tensor, noise: Array, scale: float) -> Tensor:
        """The total with so many times a standard noise; in secure mode on the public grid of spacing scale·2⁻¹⁰.

        **Privacy:** that of the noise: rounding to a public grid is post-processing.
        """
        found = total + scale * torch.from_numpy(noise)
        if not self.secure:
            return found
        return torch.round(found / (scale * SUM_GRID)) * (scale * SUM_GRID)

    def draw(self, density: BallGaussian, reach: float) -> Array:
        """One draw ξ from a density.

        Args:
            density: the mechanism's.
            reach: public bound on R|b| where no more than N records take part, for secure mode's fixed work.
        """
        if not self.secure:
            found: Array = Exact().sample(density, self.ordinary())[0]
            return found
        fixed = FixedWork(proposals_needed(density.dim, reach))
        return fixed.sample(within_reach(density, reach), SystemNoise())
