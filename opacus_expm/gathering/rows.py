"""Which gatherer finds the rows of a model: hooks where they can serve, else each record run alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

from torch import nn

from opacus_expm import _check
from opacus_expm._warnings import warn
from opacus_expm.gathering.clipping import RowSource
from opacus_expm.gathering.functional import check_forward, functional_for
from opacus_expm.gathering.hooks import HooksCannotServe, hooks_for
from opacus_expm.gathering.independence import State
from opacus_expm.gathering.model import draws_at_random
from opacus_expm.subspaces import Projection
from opacus_expm.subspaces.layout import Layout

GradSampleMode = Literal["hooks", "functorch"]


@dataclass(frozen=True)
class GradSampling:
    """How a record's rows are found; ``grad_sample_mode=`` takes one, or the mode's name.

    Args:
        mode: ``"hooks"``, ``"functorch"``, or None for hooks where they can serve.
        probes: random probes s of each record's curvature instead of its m exact rows: 1 + s backward passes. None is
            exact up to 64 outputs, and takes 8 probes beyond, for sequences and with ``views``.
    """

    mode: str | None = None
    probes: int | None = None

    def __post_init__(self) -> None:
        if self.mode is not None:
            _check.one_of("grad_sample_mode", self.mode, get_args(GradSampleMode))
        if self.probes is not None:
            _check.positive_int("probes", self.probes)

    @classmethod
    def named(cls, grad_sample_mode: str | GradSampling | None) -> GradSampling:
        """The object itself, or the object for a mode that is given by its name."""
        return grad_sample_mode if isinstance(grad_sample_mode, GradSampling) else cls(grad_sample_mode)

    def source(self, module: nn.Module, layout: Layout, projection: Projection, example: Any) -> RowSource:
        """The way to find rows that serves this model. It warns where hooks cannot, and where state has to be put back."""
        state = State(module, example)
        if state.changed:
            warn(
                f"model changes {', '.join(state.changed)} in its forward pass, also in evaluation mode; this is put back "
                "before every piece of the pass, so that no record sees another one's traces",
            )
        if self.mode == "functorch":
            return functional_for(module, layout, projection, example, restore=state.restore)
        try:
            if draws_at_random(module, example):
                raise HooksCannotServe("the model draws random numbers, and every record needs numbers of its own")
            return hooks_for(module, layout, projection, example, restore=state.restore)
        except HooksCannotServe as reason:
            check_forward(module, example)
            if self.mode == "hooks":
                raise ValueError(
                    f"grad_sample_mode='hooks' cannot serve this model: {reason}; use 'functorch'"
                ) from reason
            warn(f"using grad_sample_mode='functorch', because {reason}")
            return functional_for(module, layout, projection, example, restore=state.restore)
