"""A private choice among models that were released already: honest model selection.

The exponential mechanism over finitely many candidates θ_1, …, θ_J, with a record's clipped loss as its share of the score:

    P(j) ∝ exp(−(ε/B) Σ_i min(max(ℓ_i(θ_j), 0), B)).

One record more changes the scores by amounts that lie in [0, B], so that the choice is ε-bounded-range, hence ε-DP
(replacing a record changes them by amounts in [−B, B], and ε/(2B) takes the place of ε/B). With n records the chosen
candidate's mean clipped loss exceeds the best one's by more than t with probability at most (J − 1)·e^{−εnt/B}.

**Privacy:** covers the choice alone. What the candidates cost when they were made is theirs: charge it where they were
made, or make them with an engine that shares this ledger.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from opacus.grad_sample import AbstractGradSampleModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

from opacus_expm import _check, swap
from opacus_expm._private import PrivateValues
from opacus_expm.accounting.events import PlannedEvent, Query
from opacus_expm.books import Books
from opacus_expm.gathering import loaders, looks
from opacus_expm.gathering.measurement import Measurement
from opacus_expm.gathering.passes import Workbench
from opacus_expm.subspaces.sparse import Sparse

ERROR = "error"
_GRADIENTS = ("grad", "grad_sample", "summed_grad")  # what torch and Opacus leave at a parameter


def choose(
    candidates: Sequence[nn.Module],
    loader: DataLoader[Any],
    epsilon: float,
    books: Books,
    *,
    criterion: Callable[[Tensor, Tensor], Tensor] | str | None,
    max_loss: float | None,
    nominal_size: int | None,
) -> nn.Module:
    """One of the candidates; see ``ExpMQuadEngine.choose``."""
    _check.positive("epsilon", epsilon)
    if books.ranks.count > 1:
        raise ValueError(
            "choose() runs in one process, and torch.distributed has several; use distributed=False in one"
        )
    models = _checked(candidates)
    by_error = isinstance(criterion, str)
    if by_error:
        _check.one_of("criterion", criterion, (ERROR,))
    if max_loss is not None:
        _check.positive("max_loss", max_loss)
        if by_error:
            raise ValueError(
                "max_loss has no meaning with criterion='error', where a record counts 0 or 1; leave it out"
            )
    books.check()
    size = Measurement(Sparse(seed=0), None, nominal_size=nominal_size).size_of(loaders.check_loader(loader))
    # What can fail does so before anything is charged, and a budget refuses before any data is touched.
    admission = books.accountant.admit([[PlannedEvent(epsilon)]], epsilon, 0.0)
    loss = F.cross_entropy if isinstance(criterion, str) else criterion  # of errors, no loss is taken
    measurement = Measurement(Sparse(seed=0), None, criterion=loss, progress=False)
    benches = [Workbench(_trainable(m), measurement) for m in models]
    outputs = {looks.prepare(bench, loader, looks.wrong if by_error else None) for bench in benches}
    if len(outputs) > 1:
        raise ValueError("candidates must have the same number of outputs, to be judged by one loss")
    bound = 1.0 if by_error else max_loss or benches[0].prepared[1].guessing(outputs.pop())
    if bound is None:
        raise ValueError(
            "max_loss must be given for this criterion: the largest loss that a record may count with, from public knowledge"
        )
    measured = looks.errors if by_error else looks.losses_here
    totals = [measured(bench, loader).nan_to_num(bound, bound, 0.0).clamp(0.0, bound).sum().item() for bench in benches]
    width = bound * (2 if books.adjacency == "replace_one" else 1)
    logits = -epsilon / width * torch.tensor(totals, dtype=torch.float64).numpy()
    event = Query(
        "choice", epsilon, 0.0, size, epsilon_range=epsilon, adjacency=books.adjacency, noise=books.noise.origin
    )
    like = torch.zeros(1, dtype=torch.long)
    number = books.drawn(event, admission, lambda: torch.tensor([books.noise.choose(logits)]), like)
    return models[int(number)]


def _checked(candidates: object) -> list[nn.Module]:
    """Modules that were released: nothing that still holds private data."""
    if not isinstance(candidates, Sequence) or len(candidates) < 2:
        found = f"{len(candidates)} of them" if isinstance(candidates, Sequence) else type(candidates).__name__
        raise ValueError(f"candidates must be a list of two released modules or more, got {found}")
    for number, model in enumerate(candidates):
        name = f"candidates[{number}]"
        if not isinstance(model, nn.Module):
            raise TypeError(f"{name} must be a released torch.nn.Module, got {type(model).__name__}")
        if isinstance(model, AbstractGradSampleModule):
            raise ValueError(f"{name} is still wrapped by Opacus; pass the module inside it, model._module")
        if swap.unfinished(model) is not None:
            raise ValueError(f"{name} is in a training loop that is not finished, and was not released yet")
        for part in model.modules():
            if any(isinstance(value, PrivateValues) for value in vars(part).values()):
                raise ValueError(
                    f"{name} carries statistics of private records, which were not released; take them off"
                )
        for parameter, p in model.named_parameters():
            if any(getattr(p, kept, None) is not None for kept in _GRADIENTS):
                raise ValueError(
                    f"{name} carries gradients at {parameter!r}, which may be those of private records without noise; call "
                    "zero_grad(set_to_none=True) once the module is final, and drop grad_sample and summed_grad"
                )
    return list(candidates)


def _trainable(model: nn.Module) -> nn.Module:
    """A copy of which every parameter may move, so that a frozen model can be judged too."""
    duplicate = copy.deepcopy(model)
    for parameter in duplicate.parameters():
        if parameter.is_floating_point():
            parameter.requires_grad_(True)
    return duplicate
