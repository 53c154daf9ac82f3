"""Side by side with Opacus DP-SGD, at the same budget and under the same adjacency.

``compare`` runs up to five methods on one task:

| method | guarantee | what runs |
|---|---|---|
| ``"zero-shot"`` | nothing private is used | the pretrained model |
| ``"non-private"`` | none | Adam on the private data |
| ``"dp-sgd"`` | (ε, δ) | Opacus: Poisson sampling, hooks, noise calibrated by its PRV accountant |
| ``"expm"`` | (ε, 0) | ``ExpMQuadEngine``, pure |
| ``"expm-delta"`` | (ε, δ) | ``ExpMQuadEngine`` at the same δ as DP-SGD |

Every method that has settings has a grid of them, and all grids are searched in the same way. A part of the *private*
records is held out; candidates are trained on the rest and scored on that part; the best is then trained on all private
records, once a seed, and scored on the test data. The test data takes no part in any choice. Nor is it public data
that decides, since the point of fine-tuning is that the private data differ. What the choice costs is not charged, to no
method: the figures compare methods at their best, and are not those of a deployment, which must choose on public data.

**Privacy:** a comparison is an experiment, not a release. It trains without privacy, tunes without charge and releases many
times; its numbers, and the files it writes, are for data on which that is allowed.
"""

from __future__ import annotations

import copy
import csv
import ctypes
import dataclasses
import hashlib
import inspect
import itertools
import math
import statistics as moments
import time
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from opacus import PrivacyEngine
from opacus.accountants import PRVAccountant
from scipy.optimize import brentq
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset, default_collate
from tqdm.auto import tqdm

from opacus_expm import _check, curves
from opacus_expm.data import rows_loader
from opacus_expm.engine import ExpMQuadEngine
from opacus_expm.journal import Journal, canonical, read_result, write_result
from opacus_expm.model import check_module, tensor_digest
from opacus_expm.projection import PUBLIC_KINDS
from opacus_expm.statistics import Statistics
from opacus_expm.tasks import Task

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Settings = dict[str, Any]
Grid = Mapping[str, Sequence[Any]]  # a name → the values to try; all combinations are tried

LABELS = {
    "zero-shot": "zero-shot",
    "non-private": "non-private",
    "dp-sgd": "Opacus DP-SGD, (ε, δ)",
    "expm": "ExpM-Quad, (ε, 0)",
    "expm-delta": "ExpM-Quad, (ε, δ)",
}
METHODS = tuple(LABELS)

NON_PRIVATE_GRID: Grid = {"learning_rate": (1e-3, 3e-3, 1e-2), "batch_size": (256,), "epochs": (5, 20)}
# Five sizes of the largest step (learning rate × norm) under two clipping norms; many small batches, or all data at once.
DP_SGD_GRID: tuple[Grid, ...] = tuple(
    {"learning_rate": rates, "max_grad_norm": norm, "sample_rate": share, "epochs": epochs}
    for rates, norm in (((0.003, 0.01, 0.03, 0.1, 0.3), (1.0,)), ((0.03, 0.1, 0.3, 1.0, 3.0), (0.1,)))
    for share, epochs in (((0.05,), (10,)), ((1.0,), (20,)))
)
_NEWTON: Grid = {"projection": ("preconditioned",), "proj_dim": (None,), "damping": (1.0,)}
_RANDOM: Grid = {"projection": ("sparse",), "proj_dim": (50, 400), "radius": (0.01, 0.03, 0.1, 0.3, 1.0)}
EXPM_GRID: tuple[Grid, ...] = (
    {**_NEWTON, "radius": (0.03, 0.1, 0.3, 1.0, 3.0), "regularization": (0.0, None)},
    {**_RANDOM, "regularization": (0.0,)},
)
EXPM_DELTA_GRID: tuple[Grid, ...] = (
    {**_NEWTON, "damping": (None, 1.0), "radius": (1.0, 2.0, 4.0, 8.0), "rounds": (4, 8)},
    {**_RANDOM, "proj_dim": (400,), "radius": (0.3, 1.0), "rounds": (4, 8)},
)
GRIDS: Mapping[str, Sequence[Grid]] = {
    "non-private": (NON_PRIVATE_GRID,),
    "dp-sgd": DP_SGD_GRID,
    "expm": EXPM_GRID,
    "expm-delta": EXPM_DELTA_GRID,
}
QUICK_GRIDS: Mapping[str, Sequence[Grid]] = {  # six candidates for each private method
    "non-private": ({"learning_rate": (1e-2,), "batch_size": (256,), "epochs": (10,)},),
    "dp-sgd": tuple({**grid, "learning_rate": (0.003, 0.01, 0.03)} for grid in DP_SGD_GRID[:2]),
    "expm": (
        {**_NEWTON, "radius": (0.03, 0.1, 0.3), "regularization": (0.0,)},
        {**_RANDOM, "proj_dim": (400,), "radius": (0.1, 0.3, 1.0), "regularization": (None,)},
    ),
    "expm-delta": (
        {**_NEWTON, "radius": (1.0, 2.0, 4.0), "rounds": (8,)},
        {**_NEWTON, "radius": (1.0,), "rounds": (4,)},
        {**_NEWTON, "damping": (None,), "radius": (3.0, 6.0), "rounds": (8,)},
    ),
}

_TOLERANCE = 1e-3  # relative: how far above the least the noise of DP-SGD may end
_PUBLIC_RECORDS = 5000  # of the public data at the most, for bounds and public subspaces
_BATCH = 500  # records at a time in a pass
_TUNING_SEED = 1_000_000  # trials have seeds of their own, from here
_FILE = "cells.jsonl"
_COLUMNS = (
    *("task", "method", "epsilon", "delta", "metric", "mean", "std"),
    *("runs", "simulated", "seconds", "peak_mib", "settings"),
)


def dp_sgd(
    model: nn.Module,
    dataset: Dataset[Any],
    criterion: nn.Module,
    *,
    epsilon: float,
    delta: float,
    learning_rate: float,
    max_grad_norm: float,
    batch_size: int,
    epochs: int,
    momentum: float = 0.9,
    max_physical_batch_size: int = 1024,
    seed: int | None = None,
) -> nn.Module:
    """Fine-tune with Opacus DP-SGD: Poisson sampling, per-sample clipping through hooks, noise for exactly (ε, δ).

    The noise is calibrated with Opacus's numerical (PRV) accountant, to within 0.1 % below ε; where a batch is the whole
    data set, by the Gaussian mechanism's exact curve.

    Args:
        model: pretrained module without BatchNorm in training mode; it is not modified.
        dataset: private records, pairs (input, target).
        criterion: a loss that averages over the batch.
        epsilon: ε > 0.
        delta: δ in (0, 1): DP-SGD has no pure guarantee.
        learning_rate: of SGD.
        max_grad_norm: clipping norm of one record's gradient.
        batch_size: expected size of a Poisson batch; at the data set's size or above, every step uses all of it.
        epochs: passes over the data, in expectation.
        momentum: of SGD.
        max_physical_batch_size: records processed at a time, to cap memory; the result is that of the whole batch.
        seed: of sampling, noise and dropout, for experiments; None takes fresh entropy. The caller's global generators
            are left as they were.

    Returns:
        A plain module of ``model``'s own class, in ``model``'s training or evaluation mode.

    Raises:
        TypeError, ValueError: bad input.
        opacus.validators.errors.UnsupportedModuleError: a layer that Opacus cannot serve.

    **Privacy:** (ε, δ)-DP under adding or removing one record, as Opacus accounts for it (without its secure mode).
    """
    check_module(model)
    _check.positive("learning_rate", learning_rate)
    _check.positive("max_grad_norm", max_grad_norm)
    _check.positive_int("batch_size", batch_size)
    _check.positive_int("epochs", epochs)
    _check.fraction("momentum", momentum)
    _check.positive_int("max_physical_batch_size", max_physical_batch_size)
    _check_criterion(criterion)
    loader = rows_loader(*_tensors("dataset", dataset), batch_size)
    steps_per_epoch = len(loader)
    noise_multiplier = _noise_multiplier(epsilon, delta, steps_per_epoch, epochs)
    trained = copy.deepcopy(model).train()
    with _own_generators(seed), _quiet_opacus():
        module, optimizer, sampled = PrivacyEngine(accountant="prv").make_private(
            module=trained,
            optimizer=torch.optim.SGD(
                [p for p in trained.parameters() if p.requires_grad], lr=learning_rate, momentum=momentum
            ),
            data_loader=loader,
            noise_multiplier=noise_multiplier,
            max_grad_norm=max_grad_norm,
        )
        device = next(trained.parameters()).device
        for _ in range(epochs):
            for x, y in sampled:
                pieces = range(0, max(len(x), 1), max_physical_batch_size)
                for start in pieces:
                    piece = slice(start, start + max_physical_batch_size)
                    optimizer.zero_grad(set_to_none=True)
                    if len(x):
                        criterion(module(x[piece].to(device)), y[piece].to(device)).backward()
                    else:  # an empty Poisson batch: noise alone
                        for p in optimizer.params:
                            p.grad_sample = p.new_zeros(0, *p.shape)
                    optimizer.signal_skip_step(do_skip=start != pieces[-1])
                    optimizer.step()
    return _with_weights_of(model, trained)


def non_private(
    model: nn.Module,
    dataset: Dataset[Any],
    criterion: nn.Module,
    *,
    learning_rate: float,
    batch_size: int,
    epochs: int,
    seed: int | None = None,
) -> nn.Module:
    """Fine-tune with Adam and a one-cycle learning rate, without privacy. Arguments as in ``dp_sgd``.

    **Privacy:** none.
    """
    check_module(model)
    _check.positive("learning_rate", learning_rate)
    _check.positive_int("batch_size", batch_size)
    _check.positive_int("epochs", epochs)
    _check_criterion(criterion)
    x, y = _tensors("dataset", dataset)
    trained = copy.deepcopy(model).train()
    device = next(trained.parameters()).device
    with _own_generators(seed):
        optimizer = torch.optim.Adam([p for p in trained.parameters() if p.requires_grad], lr=learning_rate)
        steps = epochs * math.ceil(len(x) / batch_size)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=learning_rate, total_steps=max(steps, 2))
        for _ in range(epochs):
            for index in torch.split(torch.randperm(len(x)), batch_size):
                optimizer.zero_grad()
                criterion(trained(x[index].to(device)), y[index].to(device)).backward()
                optimizer.step()
                schedule.step()
    return _with_weights_of(model, trained)


def compare(
    task: Task,
    epsilons: Sequence[float],
    *,
    delta: float = 1e-5,
    seeds: int | Sequence[int] = 5,
    methods: Sequence[str] | None = None,
    draws: int = 1,
    trials: int = 2,
    validation: float = 0.2,
    grids: Mapping[str, Grid | Sequence[Grid]] | None = None,
    quick: bool = False,
    out: str | PathLike[str] | None = None,
    progress: bool | None = None,
) -> Comparison:
    """Zero-shot, non-private, DP-SGD and ExpM-Quad on one task, at the same budgets under add/remove adjacency.

    How settings are chosen, and that this is not charged, is said at the top of the module.

    Args:
        task: model, data and metric; for a model of your own, ``Task(model, public, private, test, criterion, ...)``.
        epsilons: budgets, in any order.
        delta: δ of DP-SGD and of ``"expm-delta"``; 0 leaves both out.
        seeds: how many runs of each method, or their seeds. A seed fixes everything that is random: the subspace, the noise,
            the sampling.
        methods: some of ``METHODS``; all of them by default.
        draws: with 1, a value of ExpM-Quad is that of one release. With more, ``ExpMQuadEngine.simulate`` gives this many
            values a seed from one pass, and the result says that they are a simulation.
        trials: runs of each candidate in the search, the same number for every method; one alone often picks a lucky one.
        validation: share of the private records that is held out in the search.
        grids: settings to search, by method, in place of the default ones (``GRIDS``): a mapping from names to values, of
            which all combinations are tried, or several such mappings. ``sample_rate`` of DP-SGD is a batch's share
            of the records; those of ExpM-Quad are arguments of ``ExpMQuadEngine.make_private_expm``.
        quick: use ``QUICK_GRIDS`` where none is given.
        out: directory for finished cells. A run that was interrupted, or one with more seeds, budgets or candidates, goes on
            from there; cells of another configuration (data, model, δ, version) are ignored.
        progress: show a bar; None shows it on a terminal.

    Returns:
        Means, deviations, costs and the search, in a fixed order.

    Raises:
        TypeError, ValueError: bad input, before anything runs (values in a grid: when their turn comes).

    **Privacy:** none; see the top of the module.
    """
    if not isinstance(task, Task):
        raise TypeError(f"task must be a Task with model, data and metric, got {type(task).__name__}")
    check_module(task.model)
    _check_criterion(task.criterion)
    budgets = _checked_epsilons(epsilons)
    delta = _check.fraction("delta", delta)
    chosen = _checked_methods(methods, delta)
    seeds = _checked_seeds(seeds)
    _check.positive_int("draws", draws)
    _check.positive_int("trials", trials)
    if _check.fraction("validation", validation) == 0:
        raise ValueError(f"validation must be greater than 0, got {validation!r}")
    parameters = sum(p.numel() for p in task.model.parameters() if p.requires_grad)
    searched = _checked_grids(grids, QUICK_GRIDS if quick else GRIDS, chosen)
    candidates = {method: _candidates(searched[method], parameters) for method in searched}
    lab = _Lab(task)
    search, full = _Bench(_held_out(task, validation), lab, delta), _Bench(task, lab, delta)
    journal = Journal(
        None if out is None else Path(out) / _FILE, task_digest(task, delta, validation), _Outcome.from_facts
    )

    tuned = [
        _Cell("trial", method, epsilon, _TUNING_SEED + trial, settings)
        for method in candidates
        if len(candidates[method]) > 1
        for epsilon in _budgets_of(method, budgets)
        for settings in candidates[method]
        for trial in range(trials)
    ]
    columns = [(method, epsilon) for method in chosen for epsilon in _budgets_of(method, budgets)]
    total = len(tuned) + sum(1 if method == "zero-shot" else len(seeds) for method, _ in columns)
    with tqdm(total=total, desc=task.name or "compare", disable=None if progress is None else not progress) as bar:

        def run(bench: _Bench, cells: list[_Cell]) -> dict[str, _Outcome]:
            found = {}
            for cell in sorted(cells, key=_Cell.order):  # cells that share a pass come together; otherwise as listed
                facts = dataclasses.asdict(cell)
                kept = journal.get(facts) or journal.put(facts, dataclasses.asdict(bench.run(cell)))
                found[cell.key()] = _Outcome.from_facts(kept)
                bar.update()
            return found

        scores = run(search, tuned)
        search_results, best = _best(candidates, budgets, tuned, scores, task.metric)
        cells = [
            _Cell("run", method, epsilon, seed, best.get((method, epsilon), {}), draws if "expm" in method else 1)
            for method, epsilon in columns
            for seed in (seeds[:1] if method == "zero-shot" else seeds)
        ]
        outcomes = run(full, cells)
    rows = []
    for method, epsilon in columns:
        own = [outcomes[c.key()] for c in cells if (c.method, c.epsilon) == (method, epsilon)]
        measured = [o.memory for o in own if o.memory is not None]
        rows.append(
            Row(
                method=method,
                epsilon=epsilon,
                delta=None if epsilon is None else 0.0 if method == "expm" else delta,
                values=tuple(v for o in own for v in o.values),
                simulated=any(o.simulated for o in own),
                seconds=moments.fmean(o.seconds for o in own),
                memory=max(measured) if measured else None,
                settings=best.get((method, epsilon), {}),
            )
        )
    return Comparison(
        task=task.name,
        metric=task.metric,
        delta=delta,
        seeds=seeds,
        trials=trials,
        validation=validation,
        grids={method: tuple(dict(g) for g in grid) for method, grid in searched.items()},
        rows=tuple(rows),
        search=search_results,
    )


@dataclass(frozen=True)
class Row:
    """One method at one budget.

    Attributes:
        method: one of ``METHODS``.
        epsilon: ε, or None where the method has no budget.
        delta: δ of the guarantee, or None.
        values: the metric on the test data, one value a run (or a simulated draw).
        simulated: whether the values are those of simulated draws instead of releases.
        seconds: mean time of a run: training, or the passes over the data, public ones included, and the draw, as if nothing
            were shared between runs. Finding settings, calibrating DP-SGD's noise and scoring are not in it.
        memory: largest peak of a run in MiB above what the process held at its start (or of the graphics card, where the
            model is there); None where the system does not tell.
        settings: what the search chose.
    """

    method: str
    epsilon: float | None
    delta: float | None
    values: tuple[float, ...]
    simulated: bool
    seconds: float
    memory: float | None
    settings: Settings

    def __post_init__(self) -> None:
        _check.one_of("method", self.method, METHODS)
        _check_budget(self.epsilon, self.delta)
        _check_measured(self)
        _check_settings(self.settings)

    @property
    def mean(self) -> float:
        """Mean of the values."""
        return moments.fmean(self.values)

    @property
    def std(self) -> float:
        """Sample standard deviation of the values; 0 for one value, NaN where a run diverged."""
        if not all(map(math.isfinite, self.values)):
            return math.nan
        return float(np.std(self.values, ddof=1)) if len(self.values) > 1 else 0.0


@dataclass(frozen=True)
class Candidate:
    """One point of the search: the mean of its trials' metric on the held-out private records."""

    method: str
    epsilon: float | None
    settings: Settings
    score: float

    def __post_init__(self) -> None:
        _check.one_of("method", self.method, METHODS)
        _check_budget(self.epsilon, None)
        _check_settings(self.settings)


@dataclass(frozen=True, repr=False)
class Comparison:
    """What ``compare`` found.

    Attributes:
        task: name.
        metric: ``"accuracy"`` (in percent) or ``"loss"``.
        delta: δ of the methods that have one.
        seeds: of the runs.
        trials: runs of each candidate in the search.
        validation: share of the private records that was held out in the search.
        grids: what was searched, by method.
        rows: the results, methods in the order of ``METHODS`` and ε ascending.
        search: every candidate and its score.
    """

    task: str
    metric: str
    delta: float
    seeds: tuple[int, ...]
    trials: int
    validation: float
    grids: Mapping[str, tuple[dict[str, Any], ...]]
    rows: tuple[Row, ...]
    search: tuple[Candidate, ...]

    def __repr__(self) -> str:
        methods = ", ".join(dict.fromkeys(row.method for row in self.rows))
        return f"Comparison({self.task!r}, methods=({methods}), epsilons={self.epsilons}, seeds={len(self.seeds)})"

    @property
    def epsilons(self) -> tuple[float, ...]:
        """The budgets, ascending."""
        return tuple(sorted({row.epsilon for row in self.rows if row.epsilon is not None}))

    def row(self, method: str, epsilon: float | None = None) -> Row:
        """The row of a method at a budget (None for methods without one).

        Raises:
            KeyError: there is none.
        """
        for row in self.rows:
            if (row.method, row.epsilon) == (method, epsilon):
                return row
        raise KeyError(f"no row for method {method!r} at epsilon {epsilon!r}")

    def table(self) -> str:
        """Two tables in Markdown, of results and of costs and settings, and the conditions they hold under."""
        digits = 1 if self.metric == "accuracy" else 4
        budgets = [f"ε = {e:g}" for e in self.epsilons] or ["any ε"]
        results = []
        for method in dict.fromkeys(row.method for row in self.rows):
            cells = [f"{r.mean:.{digits}f} ± {r.std:.{digits}f}" for r in self.rows if r.method == method]
            if method == "zero-shot":
                cells = [c.split(" ±")[0] for c in cells]
            if method in ("zero-shot", "non-private"):
                cells = cells * len(budgets)
            results.append([LABELS[method], *cells])
        costs = [
            [
                LABELS[r.method],
                "–" if r.epsilon is None else f"{r.epsilon:g}",
                f"{r.seconds:.2f}",
                "–" if r.memory is None else f"{r.memory:.0f}",
                ", ".join(f"{name}={_short(v)}{self._edge(r, name)}" for name, v in r.settings.items()),
            ]
            for r in self.rows
            if r.method != "zero-shot"
        ]
        parts = [
            markdown([self._metric_name(), *budgets], results),
            markdown(["method", "ε", "seconds", "peak MiB", "settings chosen"], costs),
            "\n".join(self._conditions()),
        ]
        return "\n\n".join(parts)

    def _metric_name(self) -> str:
        """The metric in words."""
        return "test accuracy (%)" if self.metric == "accuracy" else "test loss"

    def _edge(self, row: Row, name: str) -> str:
        """A star where the search might have gone on: at an end of three or more numbers."""
        for grid in self.grids[row.method]:
            fits = set(grid) == set(row.settings) and all(
                value in grid[n] or n == "proj_dim" for n, value in row.settings.items()
            )
            tried = [v for v in grid[name] if isinstance(v, int | float)] if fits else []
            if len(tried) > 2 and row.settings[name] in (min(tried), max(tried)):
                return "*"
        return ""

    def _conditions(self) -> list[str]:
        """What the numbers mean, for people."""
        lines = [
            f"Mean ± one standard deviation over {len(self.seeds)} seeds; add/remove adjacency; δ = {self.delta:g} where "
            "there is one. Seconds and peak memory above the start of a run, of one run."
        ]
        ours = [row for row in self.rows if row.method.startswith("expm")]
        simulated = [row for row in ours if row.simulated]
        if simulated:
            lines.append(
                f"ExpM-Quad: a SIMULATION of {len(simulated[0].values) // len(self.seeds)} draws a seed from the same "
                "statistics; together they are not private, and none is a release."
            )
        if len(simulated) < len(ours):
            lines.append(f"ExpM-Quad{' in several rounds' if simulated else ''}: one release a seed.")
        if ours:
            lines.append(
                "ExpM-Quad takes its bounds, and its preconditioner if any, from the public data, which DP-SGD has seen in "
                "the pretraining only."
            )
        if self.search:
            tried = {m: len({canonical(c.settings) for c in self.search if c.method == m}) for m in LABELS}
            counts = ", ".join(f"{LABELS[m]}: {count}" for m, count in tried.items() if count)
            runs = "1 run each" if self.trials == 1 else f"{self.trials} runs each"
            lines.append(
                f"Settings are the best of a grid ({counts}; {runs}) on {self.validation:.0%} of the private records, held "
                "out for that and given back for the runs above. This choice is NOT charged, for any method. A star marks "
                "an end of the values that were tried."
            )
        return lines

    def to_csv(self, path: str | PathLike[str]) -> None:
        """Write the rows, one line each."""
        with open(path, "w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(_COLUMNS)
            for r in self.rows:
                numbers = [r.mean, r.std, len(r.values), int(r.simulated), r.seconds, r.memory]
                writer.writerow([self.task, r.method, r.epsilon, r.delta, self.metric, *numbers, canonical(r.settings)])

    def to_json(self, path: str | PathLike[str]) -> None:
        """Write everything."""
        write_result(path, dataclasses.asdict(self))

    @classmethod
    def from_json(cls, path: str | PathLike[str]) -> Comparison:
        """Read what ``to_json`` wrote.

        Raises:
            ValueError: the file holds something else.
        """
        try:
            content = read_result(path)
            content["seeds"] = tuple(content["seeds"])
            content["grids"] = {
                method: tuple({name: tuple(values) for name, values in grid.items()} for grid in grids)
                for method, grids in content["grids"].items()
            }
            content["rows"] = tuple(Row(**{**row, "values": _numbers(row["values"])}) for row in content["rows"])
            content["search"] = tuple(Candidate(**{**c, "score": _numbers([c["score"]])[0]}) for c in content["search"])
            found = cls(**content)
            found.table()  # which needs all of it
            return found
        except (AttributeError, KeyError, OverflowError, RecursionError, TypeError, ValueError) as error:
            raise ValueError(f"path {str(path)!r} holds no comparison written by to_json: {error}") from error

    def plot(self, where: str | PathLike[str] | Axes | None = None) -> Axes:
        """The metric against ε, with bands of one standard deviation.

        Args:
            where: a file to write, axes to draw into, or None for a figure of its own.

        Returns:
            The axes.

        Raises:
            ImportError: matplotlib is missing.
        """
        try:
            from matplotlib.axes import Axes
            from matplotlib.figure import Figure
        except ImportError as error:
            raise ImportError('plot() needs matplotlib: pip install "opacus-expm[plots]"') from error
        if isinstance(where, Axes):
            _draw(self, where)
            return where
        if where is not None and not isinstance(where, str | PathLike):
            raise TypeError(f"where must be a path, matplotlib axes or None, got {type(where).__name__}")
        figure = Figure(figsize=(5.6, 4.0), layout="constrained")
        axes = figure.add_subplot()
        _draw(self, axes)
        if where is not None:
            figure.savefig(where, dpi=200)
        return axes


# Lines differ in style and marker, and their colours in lightness, so that they can be told apart in grey.
_STYLES: Mapping[str, Mapping[str, Any]] = {
    "zero-shot": {"color": "0.45", "linestyle": ":", "linewidth": 1.3},
    "non-private": {"color": "0.15", "linestyle": (0, (8, 3)), "linewidth": 1.1},
    "dp-sgd": {"color": "#e69f00", "linestyle": "--", "marker": "^", "markersize": 5.5},
    "expm": {"color": "#0b3c6f", "linestyle": "-", "marker": "o", "markersize": 5},
    "expm-delta": {"color": "#00796b", "linestyle": "-.", "marker": "s", "markersize": 4.5},
}


def _draw(comparison: Comparison, axes: Axes) -> None:
    """Lines, bands, labels."""
    epsilons = comparison.epsilons
    for method in dict.fromkeys(row.method for row in comparison.rows):
        rows = [row for row in comparison.rows if row.method == method]
        mean, std = np.array([r.mean for r in rows]), np.array([r.std for r in rows])
        style = _STYLES[method]
        if rows[0].epsilon is None:
            axes.axhline(mean[0], label=LABELS[method], zorder=1.5, **style)
            continue
        x = np.array([row.epsilon for row in rows], dtype=float)
        axes.plot(x, mean, label=LABELS[method], zorder=3, markeredgecolor="white", markeredgewidth=0.6, **style)
        axes.fill_between(x, mean - std, mean + std, color=style["color"], alpha=0.18, linewidth=0, zorder=2)
    axes.set_xscale("log")
    axes.set_xticks(epsilons, [f"{e:g}" for e in epsilons])
    axes.set_xticks([], minor=True)
    axes.set_xlabel("privacy budget ε")
    axes.set_ylabel(comparison._metric_name())
    if comparison.task:
        axes.set_title(comparison.task, fontsize="medium")
    axes.grid(True, color="0.9", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    # Below the axes, where it hides no line.
    axes.legend(
        loc="upper center",
        bbox_to_anchor=(0.5, -0.16),
        ncols=3,
        fontsize="small",
        frameon=False,
        columnspacing=1.2,
        handlelength=3.2,
    )


@dataclass(frozen=True)
class _Outcome:
    """What one cell gave."""

    values: tuple[float, ...]
    seconds: float
    memory: float | None
    simulated: bool = False

    def __post_init__(self) -> None:
        _check_measured(self)

    @classmethod
    def from_facts(cls, facts: dict[str, Any]) -> _Outcome:
        """As the journal has it."""
        return cls(**{**facts, "values": _numbers(facts["values"])})


@dataclass(frozen=True)
class _Cell:
    """One run of one method."""

    stage: str
    method: str
    epsilon: float | None
    seed: int
    settings: Settings
    draws: int = 1

    def key(self) -> str:
        """The cell in one line."""
        return canonical(dataclasses.asdict(self))

    def shared(self) -> str:
        """The pass over the data that the cell draws from, empty where it has none to share."""
        if not self.method.startswith("expm") or self.settings.get("rounds", 1) != 1:
            return ""
        return canonical([self.seed, _gathering(self.settings)])

    def order(self) -> tuple[int, str]:
        """Sorts cells so that those of one pass are neighbours."""
        return (METHODS.index("expm") if self.method.startswith("expm") else METHODS.index(self.method), self.shared())


class _Lab:
    """What the search and the runs share: an engine, and what it has learnt from the public data."""

    def __init__(self, task: Task):
        x, y = _tensors("public", task.public)
        some = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))[:_PUBLIC_RECORDS]
        self.engine = ExpMQuadEngine(distributed=False)  # its ledger is not looked at: see the top of the module
        self.public_loader = rows_loader(x[some], y[some], _BATCH)
        self.device = next(task.model.parameters()).device
        self._prepared: dict[str, _Cost] = {}

    def prepared(self, data: Settings, settings: Settings) -> _Cost:
        """What the public curvature costs, where the settings need it; the engine computes it once and keeps it."""
        if settings.get("projection") not in PUBLIC_KINDS:
            return _Cost(0.0)
        key = canonical([settings.get(name) for name in ("projection", "proj_dim", "public_rank")])
        if key not in self._prepared:
            options = {**_gathering(settings), **data, "max_grad_norm": 1.0, "max_curvature": 0.0}
            x, y = next(iter(self.public_loader))
            options["loader"] = rows_loader(x[:1], y[:1], 1)  # nothing but the curvature
            with _metered(self.device) as cost:
                self.engine.gather(**options)
            self._prepared[key] = cost
        return self._prepared[key]


class _Bench:
    """Runs cells on one task; keeps the statistics of the last pass."""

    def __init__(self, task: Task, lab: _Lab, delta: float):
        self.task, self.lab, self.delta = task, lab, delta
        self._pass: tuple[str, Statistics, _Cost] | None = None

    def run(self, cell: _Cell) -> _Outcome:
        """The metric on the task's test data."""
        if cell.method == "zero-shot":
            return _Outcome((self.task.score(self.task.model),), 0.0, None)
        return self._expm(cell) if cell.method.startswith("expm") else self._trained(cell)

    def _trained(self, cell: _Cell) -> _Outcome:
        """The methods that are not ours."""
        task, settings = self.task, dict(cell.settings)
        train: Callable[..., nn.Module] = non_private
        if cell.method == "dp-sgd":
            train = dp_sgd
            settings["batch_size"] = math.ceil(len(task.private) * settings.pop("sample_rate"))
            settings.update(epsilon=cell.epsilon, delta=self.delta)
            # Cached, so that the search for the noise is in no run's time.
            _noise_multiplier(
                settings["epsilon"],
                self.delta,
                math.ceil(len(task.private) / settings["batch_size"]),
                settings["epochs"],
            )
        with _metered(self.lab.device) as cost:
            model = train(task.model, task.private, task.criterion, seed=cell.seed, **settings)
        return _Outcome((task.score(model),), cost.seconds, cost.memory)

    def _expm(self, cell: _Cell) -> _Outcome:
        """One release, or many simulated ones."""
        engine, task = self.lab.engine, self.task
        data: Settings = {
            "model": task.model,
            "loader": rows_loader(*_tensors("private", task.private), _BATCH),
            "criterion": task.criterion,
            "public_loader": self.lab.public_loader,
            "projection_seed": cell.seed,
            "progress": False,
        }
        budget: Settings = {
            "epsilon": cell.epsilon,
            "delta": 0.0 if cell.method == "expm" else self.delta,
            "noise_generator": np.random.default_rng([cell.seed, zlib.crc32(cell.key().encode())]),
        }
        prepared = self.lab.prepared(data, cell.settings)
        if not cell.shared():
            with _metered(self.lab.device) as cost:
                model = engine.make_private_expm(**data, **budget, **cell.settings)
            cost += prepared
            return _Outcome((task.score(model),), cost.seconds, cost.memory)
        if self._pass is None or self._pass[0] != cell.shared():
            self._pass = None  # before the next statistics are there
            with _metered(self.lab.device) as cost:
                gathered = engine.gather(**data, **_gathering(cell.settings))
            self._pass = (cell.shared(), gathered, cost)
        _, statistics, passed = self._pass
        settings = {**budget, **{name: value for name, value in cell.settings.items() if name in _DRAW}}
        if cell.draws == 1:
            with _metered(self.lab.device) as cost:
                model = engine.release(statistics, **settings)
            values: tuple[float, ...] = (task.score(model),)
        else:
            scoring = 0.0

            def score(module: nn.Module) -> float:
                nonlocal scoring
                start = time.perf_counter()
                value = task.score(module)
                scoring += time.perf_counter() - start
                return value

            with _metered(self.lab.device) as cost, warnings.catch_warnings():
                warnings.filterwarnings("ignore", message=r"simulate\(\) draws models")  # the result says so
                simulated = engine.simulate(statistics, evaluate=score, draws=cell.draws, **settings)
            cost.seconds = (cost.seconds - scoring) / cell.draws
            values = tuple(map(float, simulated))
        cost += prepared + passed
        return _Outcome(values, cost.seconds, cost.memory, cell.draws > 1)


def task_digest(task: Task, *facts: object) -> str:
    """Of the version, a task's data and model, and whatever else the cells depend on."""
    digest = hashlib.sha256()
    named = [version("opacus-expm"), task.name, task.metric, *facts]
    digest.update(canonical([*named, repr(task.model), repr(task.criterion)]).encode())
    tensors = {**task.model.state_dict(), **{f"criterion.{k}": v for k, v in task.criterion.state_dict().items()}}
    for name in ("public", "private", "test"):
        tensors.update({f"{name}.{i}": t for i, t in enumerate(_tensors(name, getattr(task, name)))})
    for name, tensor in tensors.items():
        digest.update(f"{name} {tensor_digest(tensor)}".encode())
    return digest.hexdigest()


def _held_out(task: Task, validation: float) -> Task:
    """The task of the search: a part of the private records is the test data, and the task's own is out of reach."""
    x, y = _tensors("private", task.private)
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
    cells: list[_Cell],
    outcomes: Mapping[str, _Outcome],
    metric: str,
) -> tuple[tuple[Candidate, ...], dict[tuple[str, float | None], Settings]]:
    """Every candidate's score, and the settings with the best one; of equal ones the first."""
    search, best = [], {}
    for method, listed in candidates.items():
        for epsilon in _budgets_of(method, budgets):
            scored = []
            for settings in listed if len(listed) > 1 else ():
                own = [c for c in cells if (c.method, c.epsilon, c.settings) == (method, epsilon, settings)]
                score = moments.fmean(v for c in own for v in outcomes[c.key()].values)
                scored.append(Candidate(method, epsilon, settings, score))
            search += scored
            best[method, epsilon] = max(scored, key=lambda c: _merit(c.score, metric)).settings if scored else listed[0]
    return tuple(search), best


def _merit(score: float, metric: str) -> float:
    """Larger is better; what diverged is worst."""
    if not math.isfinite(score):
        return -math.inf
    return score if metric == "accuracy" else -score


def _budgets_of(method: str, budgets: Sequence[float]) -> Sequence[float | None]:
    """The budgets at which a method runs."""
    return (None,) if method in ("zero-shot", "non-private") else budgets


def _candidates(grids: Sequence[Grid], parameters: int) -> list[Settings]:
    """All combinations, in order, each once; a subspace as large as the model is the full space."""
    found: dict[str, Settings] = {}
    for grid in grids:
        for values in itertools.product(*grid.values()):
            settings = dict(zip(grid, values, strict=True))
            if settings.get("proj_dim") is not None and settings["proj_dim"] >= parameters:
                settings["proj_dim"] = None
            found.setdefault(canonical(settings), settings)
    return list(found.values())


_PASS = frozenset(inspect.signature(ExpMQuadEngine.gather).parameters)
_DRAW = frozenset(inspect.signature(ExpMQuadEngine.release).parameters)
# What compare() passes on itself, or what has no part in a comparison at one budget: a grid cannot hold it.
_TAKEN = {
    *("self", "model", "loader", "dataset", "criterion", "epsilon", "delta", "seed", "batch_size", "public_loader"),
    *("projection_seed", "noise_generator", "progress", "adjacency", "nominal_size", "bounds", "sampler"),
}
_OURS = frozenset(inspect.signature(ExpMQuadEngine.make_private_expm).parameters) - _TAKEN
# By method: the settings a grid may hold, and those it must.
_SETTINGS: Mapping[str, tuple[frozenset[str], frozenset[str]]] = {
    "non-private": (frozenset(NON_PRIVATE_GRID), frozenset(NON_PRIVATE_GRID)),
    "dp-sgd": (
        (frozenset(inspect.signature(dp_sgd).parameters) | {"sample_rate"}) - _TAKEN,
        frozenset(DP_SGD_GRID[0]),
    ),
    "expm": (_OURS, frozenset({"radius", "proj_dim"})),
    "expm-delta": (_OURS, frozenset({"radius", "proj_dim"})),
}


def _gathering(settings: Settings) -> Settings:
    """Those settings that the pass depends on: the radius only where records are clipped by it."""
    joint = settings.get("clipping") == "joint"
    return {name: v for name, v in settings.items() if name in _PASS and (joint or name != "radius")}


def _checked_grids(
    given: Mapping[str, Grid | Sequence[Grid]] | None, default: Mapping[str, Sequence[Grid]], methods: Sequence[str]
) -> dict[str, tuple[Grid, ...]]:
    """The grid of every method that has one."""
    for method in given or {}:
        _check.one_of("grids: a method", method, tuple(default))
    found = {}
    for method in methods:
        if method not in default:
            continue
        own = (given or {}).get(method, default[method])
        found[method] = (own,) if isinstance(own, Mapping) else tuple(own)
        for grid in found[method]:
            _check_grid(method, grid)
        if not found[method]:
            raise ValueError(f"grids[{method!r}] must hold at least one grid")
    return found


def _check_grid(method: str, grid: object) -> None:
    """A mapping from the method's settings to values to try."""
    allowed, needed = _SETTINGS[method]
    if not isinstance(grid, Mapping):
        raise TypeError(f"grids[{method!r}] must be a mapping from settings to values, got {type(grid).__name__}")
    for name in grid:
        _check.one_of(f"grids[{method!r}]: a setting", name, sorted(allowed))
    if missing := sorted(needed - set(grid)):
        raise ValueError(f"grids[{method!r}] must name values for {', '.join(missing)}")
    for name, values in grid.items():
        if not isinstance(values, list | tuple) or not values:
            raise ValueError(f"grids[{method!r}][{name!r}] must be a list of values, got {values!r}")
        if not all(value is None or isinstance(value, bool | int | float | str) for value in values):
            raise TypeError(f"grids[{method!r}][{name!r}] must hold numbers, names or None, got {values!r}")
        if name == "sample_rate" and not all(0 < _number(value) <= 1 for value in values):
            raise ValueError(f"grids[{method!r}]['sample_rate'] must hold numbers in (0, 1], got {values!r}")


def _number(value: object) -> float:
    """A number, or NaN."""
    return float(value) if isinstance(value, int | float) else math.nan


def _checked_epsilons(epsilons: object) -> tuple[float, ...]:
    """Budgets, ascending, each once."""
    if isinstance(epsilons, int | float):
        epsilons = (epsilons,)
    if isinstance(epsilons, str) or not isinstance(epsilons, Sequence | np.ndarray) or not len(epsilons):
        raise TypeError(f"epsilons must be a list of numbers greater than 0, got {epsilons!r}")
    return tuple(sorted({_check.positive("epsilons", e) for e in epsilons}))


def _checked_methods(methods: object, delta: float) -> tuple[str, ...]:
    """Methods in their order."""
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
    """The seeds, or as many from 0."""
    if isinstance(seeds, Sequence) and not isinstance(seeds, str):
        found = tuple(_check.seed("seeds", s) for s in seeds)
        if not found or len(set(found)) < len(found):
            raise ValueError(f"seeds must hold at least one number, each once, got {seeds!r}")
        return found
    return tuple(range(_check.positive_int("seeds", seeds)))


def _numbers(values: Sequence[float | None]) -> tuple[float, ...]:
    """Numbers as they were before ``_finite``; what was not finite is NaN."""
    if not isinstance(values, list | tuple) or not all(v is None or _is_number(v) for v in values):
        raise ValueError(f"values must be a list of numbers, got {values!r}")
    return tuple(math.nan if v is None else float(v) for v in values)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _check_measured(found: Row | _Outcome) -> None:
    """What a run can have given."""
    if not isinstance(found.values, tuple) or not found.values or not all(map(_is_number, found.values)):
        raise ValueError(f"values must be one number a run, got {found.values!r}")
    _check.non_negative("seconds", found.seconds)
    if found.memory is not None:
        _check.non_negative("memory", found.memory)
    if not isinstance(found.simulated, bool):
        raise TypeError(f"simulated must be True or False, got {found.simulated!r}")


def _check_budget(epsilon: float | None, delta: float | None) -> None:
    """ε and δ, None where there is none."""
    if epsilon is not None:
        _check.positive("epsilon", epsilon)
    if delta is not None:
        _check.fraction("delta", delta)


def _check_settings(settings: Settings) -> None:
    if not isinstance(settings, dict):
        raise TypeError(f"settings must be a mapping of names, got {settings!r}")


def _short(value: object) -> str:
    """A setting for people."""
    return f"{value:g}" if isinstance(value, float) else str(value)


def markdown(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table whose source is aligned, too."""
    lines = [list(headings), *map(list, rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(headings))]
    text = ["| " + " | ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)) + " |" for line in lines]
    text.insert(1, "|" + "|".join("-" * (w + 2) for w in widths) + "|")
    return "\n".join(text)


@dataclass
class _Cost:
    """Seconds and MiB of a run, known when it has ended."""

    seconds: float = math.nan
    memory: float | None = None

    def __add__(self, other: _Cost) -> _Cost:
        """One after the other: times add up, peaks do not."""
        peaks = [m for m in (self.memory, other.memory) if m is not None]
        return _Cost(self.seconds + other.seconds, max(peaks, default=None))


@contextmanager
def _metered(device: torch.device) -> Iterator[_Cost]:
    """Time and peak memory of what runs inside."""
    cost = _Cost()
    before = _reset_peak(device)
    start = time.perf_counter()
    yield cost
    cost.seconds = time.perf_counter() - start
    peak = _peak(device)
    cost.memory = None if before is None or peak is None else max(0.0, peak - before)


def _reset_peak(device: torch.device) -> float | None:
    """Start a new measurement; MiB held now, None where it cannot be measured."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device) / 2**20
    try:
        ctypes.CDLL(None).malloc_trim(0)  # freed memory goes back to the system, or a later run would hide in it
        Path("/proc/self/clear_refs").write_text("5")  # Linux: the high-water mark starts again from here
    except (AttributeError, OSError, TypeError):
        return None
    return _peak(device)


def _peak(device: torch.device) -> float | None:
    """MiB held at the most since the measurement began."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return float(line.split()[1]) / 2**10
    except OSError:
        pass
    return None


def _tensors(name: str, dataset: object) -> tuple[Tensor, Tensor]:
    """A data set of pairs as (inputs, targets), in memory."""
    if isinstance(dataset, TensorDataset):
        pair: Any = dataset.tensors
    elif hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__"):
        pair = default_collate([dataset[i] for i in range(len(dataset))]) if len(dataset) else ()
    else:
        raise TypeError(f"{name} must be a data set of pairs (input, target), got {type(dataset).__name__}")
    if len(pair) != 2 or not all(isinstance(t, Tensor) and t.dim() and len(t) for t in pair):
        raise ValueError(f"{name} must hold at least one pair of tensors (input, target)")
    return pair[0], pair[1]


def _check_criterion(criterion: object) -> None:
    """A loss that averages: Opacus scales gradients by what it is told, and is told the mean."""
    if not callable(criterion):
        raise TypeError(f"criterion must be a loss function, got {criterion!r}")
    if getattr(criterion, "reduction", "mean") != "mean":
        raise ValueError(f"criterion must average over the batch, got reduction={criterion.reduction!r}")  # type: ignore[attr-defined]


@cache
def _noise_multiplier(epsilon: float, delta: float, steps_per_epoch: int, epochs: int) -> float:
    """The least noise, to within the tolerance, at which the steps together are (ε, δ)-DP."""
    epsilon = _check.positive("epsilon", epsilon)
    if _check.fraction("delta", delta) == 0:
        raise ValueError("delta must be greater than 0 for DP-SGD, got 0: its Gaussian noise has no pure guarantee")
    steps = steps_per_epoch * epochs
    if steps_per_epoch == 1:  # no sampling, so that the composition is one Gaussian mechanism
        return math.sqrt(steps) / curves.gaussian_mu(epsilon, delta)
    rate = 1 / steps_per_epoch
    accountant = PRVAccountant()

    @cache
    def excess(log_sigma: float) -> float:
        accountant.history = [(math.exp(log_sigma), rate, steps)]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the Rényi bound that the accountant starts from
            return math.log(accountant.get_epsilon(delta, eps_error=min(0.01, 0.01 * epsilon)) / epsilon)

    # The central limit theorem of Gaussian DP, μ = q√(T(e^{1/σ²} − 1)), is close: a narrow bracket around it.
    mu = curves.gaussian_mu(epsilon, delta)
    low = high = -0.5 * math.log(math.log1p((mu / rate) ** 2 / steps))
    while excess(high) > 0:
        low, high = high, high + 0.1
    while excess(low) <= 0:
        low, high = low - 0.1, low
    root = float(brentq(excess, low, high, xtol=_TOLERANCE / 4))
    while excess(root) > 0:
        root += _TOLERANCE / 4
    return math.exp(root)


@contextmanager
def _own_generators(seed: int | None) -> Iterator[None]:
    """Seeded global generators inside, the caller's again afterwards."""
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        if seed is None:
            torch.seed()
        else:
            torch.manual_seed(_check.seed("seed", seed))
        yield


@contextmanager
def _quiet_opacus() -> Iterator[None]:
    """Without the warnings that every run of Opacus gives."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Secure RNG turned off")
        warnings.filterwarnings("ignore", message="Full backward hook is firing when gradients are computed")
        yield


def _with_weights_of(model: nn.Module, trained: nn.Module) -> nn.Module:
    """A copy of the model, never touched by hooks, with the trained weights."""
    result = copy.deepcopy(model)
    result.load_state_dict(trained.state_dict())
    return result
