"""Lower bounds on ε from released models alone.

These audits see nothing of the code, so their bounds are valid whatever the code does: if the true ε were smaller, a bound
this large would have had a probability below 1 − confidence.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from scipy.stats import beta
from torch import nn
from torch.utils.data import DataLoader, Dataset

from opacus_expm import _check, subspaces, words
from opacus_expm.audit.exact import Arguments, bounds_of, call_arguments, claim, engine_for
from opacus_expm.audit.findings import Finding, Report, warn_not_private
from opacus_expm.baselines import dp_sgd
from opacus_expm.gathering import loaders
from opacus_expm.mechanism.density import Array

Score = Callable[[nn.Module], float]

_DRAWING = ("epsilon", "delta", "radius", "regularization")  # arguments of a draw, not of a pass
_CHOICE = 1e-2  # of the error probability, where an event is chosen


def lower_bound(first: Array, second: Array, *, delta: float = 0.0, confidence: float = 0.95) -> float:
    """A lower bound on ε from scores of releases on two neighbouring data sets.

    For any event E, (ε, δ)-DP says P(E) ≤ e^ε·Q(E) + δ, so ε ≥ ln((P(E) − δ)/Q(E)). The event is a score below or
    above a threshold, under either of the two data sets. It is chosen on the first half of each sample. On the other half
    Clopper-Pearson bounds replace both probabilities, each with half of the error probability.

    Args:
        first: independent scores of releases on the one data set.
        second: independent scores of releases on the other.
        delta: δ of the statement.
        confidence: probability, at least, that the true ε is not below the bound.

    Returns:
        The bound; 0 where the scores tell nothing.
    """
    samples = [np.asarray(sample, dtype=np.float64) for sample in (first, second)]
    if any(sample.ndim != 1 or sample.size < 4 for sample in samples):
        raise ValueError("first and second must each hold at least 4 scores, in one dimension")
    if not all(np.isfinite(sample).all() for sample in samples):
        raise ValueError("first and second must hold finite scores: let the score of a useless model be a number, too")
    _check.fraction("delta", delta)
    error = (1 - _check.fraction("confidence", confidence)) / 2
    chosen, judged = zip(*((s[: s.size // 2], s[s.size // 2 :]) for s in samples), strict=True)

    def bounds(parts: Sequence[Array], thresholds: Array, error: float) -> Array:
        """Lower bounds on ε by (orientation, role, threshold)."""
        sizes = [part.size for part in parts]
        below = [np.searchsorted(np.sort(part), thresholds, side="right") for part in parts]
        found = []
        for counts in (below, [n - b for n, b in zip(sizes, below, strict=True)]):
            for one, other in ((0, 1), (1, 0)):
                hits, misses = counts[one], counts[other]
                with np.errstate(invalid="ignore"):  # the quantiles of degenerate laws
                    low = np.where(hits > 0, beta.ppf(error, hits, sizes[one] - hits + 1), 0.0)
                    high = np.where(misses < sizes[other], beta.ppf(1 - error, misses + 1, sizes[other] - misses), 1.0)
                found.append(np.log(np.maximum(low - delta, 1e-300) / high))
        return np.array(found)

    thresholds = np.unique(np.quantile(np.concatenate(chosen), np.linspace(0.002, 0.998, 499)))
    # Far stricter bounds for the choice: the best of many noisy ones would be an event too rare to be judged.
    merits = bounds(chosen, thresholds, _CHOICE * error)
    event, place = np.unravel_index(np.argmax(merits), merits.shape)
    return max(0.0, float(bounds(judged, thresholds[place : place + 1], error)[event, 0]))


@words.unsaid()
def black_box(
    model: nn.Module,
    loader: DataLoader[Any],
    neighbour: DataLoader[Any],
    arguments: Arguments,
    score: Score,
    *,
    releases: int = 1000,
    draws_per_pass: int = 1,
    delta: float | None = None,
    confidence: float = 0.95,
    subject: str = "engine",
) -> Report:
    """Tell two neighbouring data sets apart by released models alone: a lower bound on ε, beside the claim.

    Args:
        model: as for ``make_private_expm``.
        loader: the one data set.
        neighbour: the other one.
        arguments: what ``make_private_expm`` would be called with beside model and loader, and the engine's ``adjacency``
            and ``noise_generator``.
        score: a number for a released model; the loss of the record that makes the difference is a good one.
        releases: how many models are released from each data set.
        draws_per_pass: 1 makes every release a call of its own, from loader to model; more takes that many simulated
            draws from each pass, which have the law of a release and are much faster. They are independent only if a pass
            has no randomness of its own, so bounds and projection must be given then, and records must not be random.
        delta: δ of the comparison; that of the arguments by default.
        confidence: probability, at least, that the true ε is not below the bound.
        subject: a name for the report.

    **Privacy:** the report is NOT private, and says so in a warning.
    """
    warn_not_private("black_box()")
    _check.positive_int("releases", releases)
    _check.positive_int("draws_per_pass", draws_per_pass)
    settled = {"progress": False, "adjacency": "add_remove", "delta": 0.0, **arguments}
    if settled.get("nominal_size") is None:
        settled["nominal_size"] = loaders.dataset_size(loaders.check_loader(loader))
    if draws_per_pass > 1:
        seed = subspaces.named(settled.get("projection", "sparse")).seed
        fixed = settled.get("proj_dim") is None or seed is not None
        if not fixed or bounds_of(settled).missing or settled.get("rounds", 1) != 1:
            raise ValueError(
                "draws_per_pass > 1 needs passes without randomness: give max_grad_norm, max_curvature and a projection "
                "with a seed and leave rounds out, or use draws_per_pass=1"
            )
    at = settled["delta"] if delta is None else _check.fraction("delta", delta)
    engine = engine_for(settled)
    engine.make_private_expm(model, loader, **call_arguments(settled))
    claimed = claim(engine, at)
    scores = []
    for records in (loader, neighbour):
        if draws_per_pass == 1:
            calls = (
                engine_for(settled).make_private_expm(model, records, **call_arguments(settled))
                for _ in range(releases)
            )
            scores.append(np.array([float(score(module)) for module in calls]))
        else:
            passes = math.ceil(releases / draws_per_pass)
            found = [_simulated(model, records, settled, score, draws_per_pass) for _ in range(passes)]
            scores.append(np.concatenate(found)[:releases])
    bound = lower_bound(scores[0], scores[1], delta=at, confidence=confidence)
    return Report((Finding(subject, "black box", settled["adjacency"], float(settled["epsilon"]), at, claimed, bound),))


def _simulated(model: nn.Module, loader: DataLoader[Any], arguments: dict[str, Any], score: Score, draws: int) -> Array:
    """The scores of many draws from one pass."""
    engine = engine_for(arguments)
    drawing = {name: arguments[name] for name in _DRAWING if name in arguments}
    gathering = {n: v for n, v in call_arguments(arguments).items() if n not in _DRAWING and n != "rounds"}
    statistics = engine.gather(model, loader, **gathering)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"simulate\(\) draws models that are NOT releases")
        return engine.simulate(statistics, evaluate=score, draws=draws, **drawing)


def black_box_dp_sgd(
    model: nn.Module,
    dataset: Dataset[Any],
    neighbour: Dataset[Any],
    criterion: nn.Module,
    arguments: Arguments,
    score: Score,
    *,
    releases: int = 1000,
    confidence: float = 0.95,
    seed: int | None = None,
    subject: str = "Opacus DP-SGD",
) -> Report:
    """Tell two neighbouring data sets apart by models that Opacus DP-SGD has trained: a lower bound on ε, beside the claim.

    Opacus divides by the number of records, so both data sets must have the same number. Let a record without a gradient
    take the place of the record that is missing.

    Args:
        model: as for ``dp_sgd``.
        dataset: the one data set.
        neighbour: the other one.
        criterion: the loss.
        arguments: what ``dp_sgd`` would be called with beside these; at least ``epsilon`` and ``delta``.
        score: a number for a trained model.
        releases: how many models are trained on each data set.
        confidence: probability, at least, that the true ε is not below the bound.
        seed: of the training runs; None for fresh noise.
        subject: a name for the report.

    **Privacy:** the report is NOT private, and says so in a warning.
    """
    warn_not_private("black_box_dp_sgd()")
    _check.positive_int("releases", releases)
    if len(dataset) != len(neighbour):  # type: ignore[arg-type]
        raise ValueError("dataset and neighbour must have the same number of records: Opacus divides by it")
    epsilon, delta = float(arguments["epsilon"]), float(arguments["delta"])
    scores = []
    for number, records in enumerate((dataset, neighbour)):
        seeds = [None if seed is None else seed + 2 * i + number for i in range(releases)]
        runs = (dp_sgd(model, records, criterion, seed=own, **arguments) for own in seeds)
        scores.append(np.array([float(score(module)) for module in runs]))
    bound = lower_bound(scores[0], scores[1], delta=delta, confidence=confidence)
    return Report((Finding(subject, "black box", "add_remove", epsilon, delta, epsilon, bound),))
