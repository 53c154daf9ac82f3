"""A word about a release, on the logger ``opacus_expm``: what was done at INFO, and what looks wrong at WARNING.

Python shows a logger's warnings unless told otherwise, and the rest after
``logging.getLogger("opacus_expm").setLevel(logging.INFO)``: Opacus has set up where loggers write.
With a ``noise_generator`` nothing is released but only tried, and what looks wrong is at INFO too.

**Privacy:** every number is public. It is an argument, a part of the public plan, in the ledger, or follows from the weights
before and after, of which the first are public and the second released. Whether a model looks untrained is seen on synthetic
records.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor, nn

from opacus_expm.accounting.events import Release
from opacus_expm.books import Books
from opacus_expm.gathering.criteria import BinaryCrossEntropy, Criterion, CrossEntropy
from opacus_expm.gathering.passes import Workbench

_logger = logging.getLogger("opacus_expm")
_silent = ContextVar("_silent", default=False)
_ALIKE = 0.01  # outputs of classes that differ by less say nothing of the inputs
_GUESSING = 0.95  # of the loss of guessing
_EDGE = 0.99  # of the radius
_SIGNAL = 0.1  # ρ: the norm of the mean of clipped gradients, in units of C_g
_BOUNDS = {"given": "given", "public": "from public data", "bought": "bought", "paper": "read off the private data"}


@contextmanager
def unsaid() -> Iterator[None]:
    """Nothing is said inside: an audit draws thousands of times what is not released."""
    before = _silent.set(True)
    try:
        yield
    finally:
        _silent.reset(before)


def of_start(books: Books, bench: Workbench) -> None:
    """What can be seen of a model and its loss before a release, by shapes and synthetic records."""
    outputs, loss = bench.on_synthetic, bench.prepared[1]
    if outputs is None:
        return
    if isinstance(loss, CrossEntropy):
        _tell(books, f"labels are 0 to {outputs.shape[-1] - 1}; a record with another one counts nothing")
    if _guesses(outputs, loss):
        _tell(
            books,
            "the model looks untrained, because its outputs on synthetic records are those of guessing: from a new head on "
            "pretrained layers that is expected, and a whole network that was never trained will learn little",
            wrong=not bench.moves_head_alone(),
        )


def _guesses(outputs: Tensor, loss: Criterion) -> bool:
    """Whether a model knows nothing, by its outputs for synthetic records.

    Outputs of classes are logarithms of odds, from which its own expected loss follows. Those of other losses have units of
    their own, and have to be equal.
    """
    apart = float((outputs[0] - outputs[1]).abs().max())
    if not isinstance(loss, CrossEntropy | BinaryCrossEntropy):
        return apart == 0
    classes = outputs if isinstance(loss, CrossEntropy) else torch.stack([torch.zeros_like(outputs), outputs], -1)
    logs = classes.log_softmax(-1)
    unsure = -float((logs.exp() * logs).sum(-1).mean())
    return apart <= _ALIKE or unsure >= _GUESSING * math.log(classes.shape[-1])


def of_draw(
    books: Books, event: Release, inverse_temperature: float, share: float, start: nn.Module, released: nn.Module
) -> None:
    """What one draw with a radius did.

    Where the records say nothing, the density has deviation 1/√(cλN) in every direction, or fills the ball; r is how far
    that reaches in all k. Gradients whose mean has norm ρC_g, ρ near 0.1, tilt it by ρcNC_g·r, which should be more than k.

    Args:
        books: of the draw.
        event: what the ledger says of it.
        inverse_temperature: c.
        share: |ξ|/R.
        start: where it started.
        released: what was drawn.
    """
    c, dim, radius = inverse_temperature, event.proj_dim, event.radius
    precision = c * event.regularization * event.nominal_size
    reach = min(radius, math.sqrt(dim / precision) if precision else math.inf)
    moved, norm = distance(start, released)
    _tell(
        books,
        f"round {event.round} of {event.rounds}: one pass, one draw in {dim} dimensions; bounds {event.max_grad_norm:.3g} "
        f"and {event.max_curvature:.3g} ({_BOUNDS[event.bounds]}); noise alone would go {reach / radius:.0%} of the radius "
        f"{radius:g}, and the step went {share:.0%}; {_displacement(moved, norm)}",
    )
    if _SIGNAL * c * event.nominal_size * event.max_grad_norm * reach < dim:
        _tell(
            books,
            f"in {dim} dimensions and radius {radius:g} the noise of round {event.round} outweighs what the records usually "
            "say, so that the step is hardly more than a random one: take less of either or a larger epsilon, or leave "
            "radius out",
            wrong=True,
        )
    elif share >= _EDGE:
        _tell(
            books,
            f"the step of round {event.round} ends at the edge of the ball: the records ask for a longer one than "
            f"radius={radius:g} allows; take more rounds, or leave radius out (every radius that is tried on these records "
            "costs a release)",
            wrong=True,
        )
    if moved > norm > 0:
        _tell(
            books,
            f"round {event.round} moved the parameters by {moved:.3g}, further than their own norm, {norm:.3g}: unless they "
            f"started near zero, little of what was trained before is left; radius={radius:g} is large for this model",
            wrong=True,
        )


def of_walk(books: Books, what: str, passes: float, start: nn.Module, released: nn.Module) -> None:
    """What rounds without a radius did.

    Args:
        books: of the rounds.
        what: they consist of.
        passes: over the data, as the rule counts them.
        start: where they started.
        released: what was chosen.
    """
    moved, norm = distance(start, released)
    _tell(books, f"{what}; {passes:.3g} passes over the data; bounds bought; {_displacement(moved, norm)}")
    if moved == 0:
        _tell(
            books,
            "the model is released as it came, because no step was found to be better than none: more records, a larger "
            "epsilon or fewer trainable parameters are needed",
            wrong=True,
        )


def distance(start: nn.Module, released: nn.Module) -> tuple[float, float]:
    """How far the trainable parameters moved, in Euclidean norm, and their norm before."""
    found = dict(released.named_parameters())
    pairs = [
        (p.detach().double(), found[name].detach().double()) for name, p in start.named_parameters() if p.requires_grad
    ]
    return math.hypot(*(float((b - a).norm()) for a, b in pairs)), math.hypot(*(float(a.norm()) for a, _ in pairs))


def _displacement(moved: float, norm: float) -> str:
    return f"the parameters moved by {moved:.3g} (their norm was {norm:.3g})"


def _tell(books: Books, text: str, *, wrong: bool = False) -> None:
    """On the leading rank; as a warning where it is about a release."""
    if books.ranks.leads and not _silent.get():
        _logger.log(logging.WARNING if wrong and books.noise.origin == "system" else logging.INFO, text)
