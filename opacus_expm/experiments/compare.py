"""Side by side with Opacus DP-SGD, at the same budget and under the same adjacency.

``compare`` runs up to five methods on one task:

| method | guarantee | what runs |
|---|---|---|
| ``"zero-shot"`` | nothing private is used | the pretrained model |
| ``"non-private"`` | none | Adam on the private data |
| ``"dp-sgd"`` | (ε, δ) | Opacus: Poisson sampling, hooks, noise calibrated by its PRV accountant |
| ``"expm"`` | (ε, 0) | ``make_private_expm(model, loader, epsilon)`` |
| ``"expm-delta"`` | (ε, δ) | ``make_private_expm(model, loader, epsilon, delta=delta)``, at the same δ as DP-SGD |

Ours has a budget and nothing to tune. The others have a grid of settings. A part of the *private* records is held out;
candidates are trained on the rest and scored on that part; the best is then trained on all private records, once a seed, and
scored on the test data, which takes no part in any choice. What the choice costs is not charged: the figures show DP-SGD at
its best, and ours as it would be deployed.

**Privacy:** a comparison is an experiment, not a release. It trains without privacy, tunes without charge and releases many
times; its numbers, and the files it writes, are for data on which that is allowed.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import statistics as moments
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from os import PathLike
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from opacus_expm import _check
from opacus_expm._bars import bar as progress_bar
from opacus_expm.baselines import check_criterion, tensors
from opacus_expm.experiments.cells import Bench, Cell, Outcome
from opacus_expm.experiments.journal import Journal, canonical
from opacus_expm.experiments.methods import (
    GRIDS,
    METHODS,
    QUICK_GRIDS,
    Grid,
    Method,
    Settings,
    budgets_of,
    checked_grids,
    combinations,
)
from opacus_expm.experiments.results import Candidate, Comparison, Row
from opacus_expm.experiments.task import Task, in_memory
from opacus_expm.gathering.model import check_module, tensor_digest

_TUNING_SEED = 1_000_000  # trials have seeds of their own, from here
_FILE = "cells.jsonl"


def compare(
    model: nn.Module | Task,
    epsilons: Sequence[float],
    *,
    private: DataLoader[Any] | Dataset[Any] | None = None,
    test: DataLoader[Any] | Dataset[Any] | None = None,
    delta: float = 1e-5,
    seeds: int | Sequence[int] = 5,
    methods: Sequence[Method] | None = None,
    trials: int = 2,
    validation: float = 0.2,
    grids: Mapping[str, Grid | Sequence[Grid]] | None = None,
    quick: bool = False,
    out: str | PathLike[str] | None = None,
    progress: bool | None = None,
) -> Comparison:
    """Zero-shot, non-private, DP-SGD and ExpM-Quad on one model, at the same budgets under add/remove adjacency.

    How settings are chosen, and that this is not charged, is said at the top of the module.

    Args:
        model: pretrained module, with the two data sets below; or a ``Task``, which has them already, for another loss or
            metric than those that are inferred.
        epsilons: budgets, in any order.
        private: data to fine-tune on: a loader or data set of pairs (input, target), read into memory. Targets that are
            whole numbers are classes (cross-entropy, accuracy), others numbers (mean squared error).
        test: data to score on, like the private ones and none of them.
        delta: δ of DP-SGD and of ``"expm-delta"``; 0 leaves both out.
        seeds: how many runs of each method, or their seeds. A seed fixes everything that is random: the noise, the sampling.
        methods: some of ``METHODS``; all of them by default.
        trials: runs of each candidate in the search; one alone often picks a lucky one.
        validation: share of the private records that is held out in the search.
        grids: settings to search for ``"non-private"`` and ``"dp-sgd"``, in place of the default ones (``GRIDS``): a
            mapping from names to values, of which all combinations are tried, or several such mappings. ``sample_rate`` of
            DP-SGD is a batch's share of the records.
        quick: use ``QUICK_GRIDS`` where none is given.
        out: directory for finished cells. A run that was interrupted, or one with more seeds, budgets or candidates, goes on
            from there; cells of another configuration (data, model, δ, version) are ignored.
        progress: show a bar; None shows it on a terminal and in a notebook.

    Returns:
        Means, deviations, costs and the search, in a fixed order.

    Raises:
        TypeError, ValueError: bad input, before anything runs (values in a grid: when their turn comes).

    **Privacy:** none; see the top of the module.
    """
    task = _task(model, {"private": private, "test": test})
    check_module(task.model)
    check_criterion(task.criterion)
    budgets = _checked_epsilons(epsilons)
    delta = _check.fraction("delta", delta)
    chosen = _checked_methods(methods, delta)
    seeds = _checked_seeds(seeds)
    _check.positive_int("trials", trials)
    if _check.fraction("validation", validation) == 0:
        raise ValueError(f"validation must be greater than 0, got {validation!r}")
    searched = checked_grids(grids, QUICK_GRIDS if quick else GRIDS, chosen)
    candidates = {method: combinations(searched[method]) for method in searched}
    search, full = Bench(_held_out(task, validation), delta), Bench(task, delta)
    path = None if out is None else Path(out) / _FILE
    journal = Journal(path, task_digest(task, delta, validation), Outcome.from_facts)
    tuned = _trials(candidates, budgets, trials)
    columns = [(method, epsilon) for method in chosen for epsilon in budgets_of(method, budgets)]
    total = len(tuned) + sum(1 if method == "zero-shot" else len(seeds) for method, _ in columns)
    with progress_bar(progress, total=total, desc=task.name or "compare") as bar:
        scores = _run(search, tuned, journal, bar)
        search_results, best = _best(candidates, budgets, tuned, scores, task.metric)
        cells = [
            Cell("run", method, epsilon, seed, best.get((method, epsilon), {}))
            for method, epsilon in columns
            for seed in (seeds[:1] if method == "zero-shot" else seeds)
        ]
        outcomes = _run(full, cells, journal, bar)
    own = {column: [outcomes[c.key()] for c in cells if (c.method, c.epsilon) == column] for column in columns}
    return Comparison(
        task=task.name,
        metric=task.metric,
        delta=delta,
        seeds=seeds,
        trials=trials,
        validation=validation,
        grids={method: tuple(dict(g) for g in grid) for method, grid in searched.items()},
        rows=tuple(_row(*column, delta, own[column], best.get(column, {})) for column in columns),
        search=search_results,
    )


def _task(model: object, data: Mapping[str, Any]) -> Task:
    """The task that was given, or that of a module and its data."""
    given = [name for name in data if data[name] is not None]
    if isinstance(model, Task):
        if given:
            raise ValueError(f"model is a Task, which has its data already: leave out {', '.join(given)}")
        return model
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a module with private= and test=, or a Task, got {type(model).__name__}")
    if len(given) < len(data):
        raise ValueError(f"model needs its data: pass {', '.join(f'{name}=' for name in data if data[name] is None)}")
    held = {name: in_memory(name, one) for name, one in data.items()}
    classes = not held["private"].tensors[1].is_floating_point()
    criterion = nn.CrossEntropyLoss() if classes else nn.MSELoss()
    metric: Literal["accuracy", "loss"] = "accuracy" if classes else "loss"
    return Task(model, None, held["private"], held["test"], criterion, metric=metric)


def _trials(candidates: Mapping[str, list[Settings]], budgets: Sequence[float], trials: int) -> list[Cell]:
    """The cells of the search; a method with one candidate has none."""
    return [
        Cell("trial", method, epsilon, _TUNING_SEED + trial, settings)
        for method in candidates
        if len(candidates[method]) > 1
        for epsilon in budgets_of(method, budgets)
        for settings in candidates[method]
        for trial in range(trials)
    ]


def _run(bench: Bench, cells: list[Cell], journal: Journal, bar: Any) -> dict[str, Outcome]:
    """The outcome of every cell, by its key: from the journal, or run now."""
    found = {}
    for cell in cells:
        facts = dataclasses.asdict(cell)
        kept = journal.get(facts) or journal.put(facts, dataclasses.asdict(bench.run(cell)))
        found[cell.key()] = Outcome.from_facts(kept)
        bar.update()
    return found


def _row(method: str, epsilon: float | None, delta: float, outcomes: Sequence[Outcome], settings: Settings) -> Row:
    """One method at one budget, from its runs; ``delta`` is that of the methods that have one."""
    measured = [o.memory for o in outcomes if o.memory is not None]
    return Row(
        method=method,
        epsilon=epsilon,
        delta=None if epsilon is None else 0.0 if method == "expm" else delta,
        values=tuple(o.score for o in outcomes),
        seconds=moments.fmean(o.seconds for o in outcomes),
        memory=max(measured) if measured else None,
        settings=settings,
    )


def task_digest(task: Task, *facts: object) -> str:
    """A digest of the version, of a task's data and model, and of whatever else the cells depend on."""
    digest = hashlib.sha256()
    named = [version("opacus-expm"), task.name, task.metric, *facts]
    digest.update(canonical([*named, repr(task.model), repr(task.criterion)]).encode())
    found = {**task.model.state_dict(), **{f"criterion.{k}": v for k, v in task.criterion.state_dict().items()}}
    held = {"public": task.public, "private": task.private, "test": task.test}
    for name, data in held.items():
        if data is not None:
            found.update({f"{name}.{i}": t for i, t in enumerate(tensors(name, data))})
    for name, tensor in found.items():
        digest.update(f"{name} {tensor_digest(tensor)}".encode())
    return digest.hexdigest()


def _held_out(task: Task, validation: float) -> Task:
    """The task of the search: a part of the private records is the test data, and the task's own is out of reach."""
    x, y = tensors("private", task.private)
    held = round(validation * len(x))
    if not 0 < held < len(x):
        raise ValueError(
            f"validation={validation!r} of {len(x)} private records leaves nothing to hold out or to train on"
        )
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(_TUNING_SEED))
    parts = TensorDataset(x[order[held:]], y[order[held:]]), TensorDataset(x[order[:held]], y[order[:held]])
    return dataclasses.replace(task, private=parts[0], test=parts[1])


def _best(
    candidates: Mapping[str, list[Settings]],
    budgets: Sequence[float],
    cells: list[Cell],
    outcomes: Mapping[str, Outcome],
    metric: str,
) -> tuple[tuple[Candidate, ...], dict[tuple[str, float | None], Settings]]:
    """Every candidate's score, and the settings with the best one; of equal ones the first."""
    search, best = [], {}
    for method, listed in candidates.items():
        for epsilon in budgets_of(method, budgets):
            scored = []
            for settings in listed if len(listed) > 1 else ():
                own = [c for c in cells if (c.method, c.epsilon, c.settings) == (method, epsilon, settings)]
                score = moments.fmean(outcomes[c.key()].score for c in own)
                scored.append(Candidate(method, epsilon, settings, score))
            search += scored
            best[method, epsilon] = max(scored, key=lambda c: _merit(c.score, metric)).settings if scored else listed[0]
    return tuple(search), best


def _merit(score: float, metric: str) -> float:
    """A score for which larger is better; a run that diverged has the lowest."""
    if not math.isfinite(score):
        return -math.inf
    return score if metric == "accuracy" else -score


def _checked_epsilons(epsilons: object) -> tuple[float, ...]:
    """The budgets in ascending order, without repetition, or an error."""
    if isinstance(epsilons, int | float):
        epsilons = (epsilons,)
    if isinstance(epsilons, str) or not isinstance(epsilons, Sequence | np.ndarray) or not len(epsilons):
        raise TypeError(f"epsilons must be a list of numbers greater than 0, got {epsilons!r}")
    return tuple(sorted({_check.positive("epsilons", e) for e in epsilons}))


def _checked_methods(methods: object, delta: float) -> tuple[str, ...]:
    """The methods in the order of the tables, or an error."""
    if methods is None:
        return tuple(m for m in METHODS if delta > 0 or m not in ("dp-sgd", "expm-delta"))
    if isinstance(methods, str) or not isinstance(methods, Sequence) or not methods:
        raise TypeError(f"methods must be a list of names from {METHODS}, got {methods!r}")
    for method in methods:
        _check.one_of("methods", method, METHODS)
        if delta == 0 and method in ("dp-sgd", "expm-delta"):
            raise ValueError(f"delta must be greater than 0 for the method {method!r}, got 0")
    return tuple(m for m in METHODS if m in methods)


def _checked_seeds(seeds: object) -> tuple[int, ...]:
    """The seeds that were given, or the first so many numbers from 0."""
    if isinstance(seeds, Sequence) and not isinstance(seeds, str):
        found = tuple(_check.seed("seeds", s) for s in seeds)
        if not found or len(set(found)) < len(found):
            raise ValueError(f"seeds must hold at least one number, each once, got {seeds!r}")
        return found
    return tuple(range(_check.positive_int("seeds", seeds)))
