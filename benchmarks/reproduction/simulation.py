"""The curves of the figures, from one pass for each subspace, and the methods beside them.

**Privacy:** none; see the package.
"""

from __future__ import annotations

import dataclasses
import math
import time
import warnings
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.reproduction.results import Cost, Curve, Reference, Reproduction
from benchmarks.reproduction.settings import EPSILONS, EXPERIMENTS, METHODS, RADII, RADIUS, TASKS, Effort, Setting
from opacus_expm import _check, paper
from opacus_expm._bars import bar as progress_bar
from opacus_expm.accounting.events import NoGuarantee
from opacus_expm.baselines import tensors
from opacus_expm.engine import ExpMQuadEngine
from opacus_expm.experiments import tasks
from opacus_expm.experiments.compare import compare, task_digest
from opacus_expm.experiments.downloads import AnyPath
from opacus_expm.experiments.journal import Journal
from opacus_expm.experiments.methods import Grid, Method
from opacus_expm.experiments.tasks import Task
from opacus_expm.gathering.statistics import Statistics
from opacus_expm.paper import Gibbs
from opacus_expm.subspaces import Stiefel

_PUBLIC_RECORDS = 5000  # at the most, for our bounds
_BATCH = 500
_FILE = "simulations.jsonl"


def reproduce_task(
    name: str,
    *,
    draws: int | None = None,
    test_records: int | None = None,
    seed: int = 0,
    quick: bool = False,
    data_dir: AnyPath | None = None,
    out: str | PathLike[str] | None = None,
    progress: bool | None = None,
) -> Reproduction:
    """The paper's two figures of one of its experiments; see ``reproduce``.

    Args:
        name: ``"sine"``, ``"mnist"`` or ``"icu"`` (with open data in place of the credentialed; see ``tasks.icu``). All are
            trained with mean squared error, as in the paper; ``"mnist"`` has a curve with cross-entropy beside.
        draws: candidates for each point; 500 by default, 20 in a quick run.
        test_records: the first so many records of the test data score everything; by default 500 of MNIST, of which there
            are 10,000, and all of the others.
        seed: of data, pretraining, subspaces and noise.
        quick: few draws, records and sweeps, and a smaller subspace for MNIST: about a minute.
        data_dir: where the data is.
        out: directory for finished points.
        progress: show a bar.
    """
    _check.one_of("name", name, TASKS)
    _check.seed("seed", seed)  # before anything is trained with it
    for label, value in (("draws", draws), ("test_records", test_records)):
        if value is not None:
            _check.positive_int(label, value)
    setting, effort = EXPERIMENTS[name]
    if quick:
        one = {key: (values[len(values) // 2],) for key, values in effort.dp_sgd.items()}
        effort = Effort(20, Gibbs(burn_in=20), 1, {**effort.non_private, "epochs": (5,)}, {**one, "epochs": (2,)})
        if name == "mnist":
            setting = dataclasses.replace(setting, proj_dim=40, dims=(5, 10, 20, 40))
    losses: dict[str, Task]
    if name == "sine":
        losses = {"mse": tasks.sine(seed)}
    elif name == "icu":
        losses = {"mse": tasks.icu(seed, data_dir=data_dir, loss="mse")}
    else:
        records = 2000 if quick else 20_000
        losses = {
            loss: tasks.mnist(seed, data_dir=data_dir, records=records, loss=loss) for loss in ("mse", "cross_entropy")
        }
        test_records = test_records or (200 if quick else 500)
    return reproduce(
        {loss: _with_test_records(task, test_records) for loss, task in losses.items()},
        setting,
        dataclasses.replace(effort, draws=draws or effort.draws),
        seed=seed,
        quick=quick,
        out=out,
        progress=progress,
    )


def _with_test_records(task: Task, count: int | None) -> Task:
    """The task with the first of its test records only."""
    return dataclasses.replace(task, test=TensorDataset(*(t[:count] for t in task.test.tensors)))


def reproduce(
    losses: Mapping[str, Task],
    setting: Setting,
    effort: Effort,
    *,
    delta: float = 1e-5,
    seed: int = 0,
    quick: bool = False,
    out: str | PathLike[str] | None = None,
    progress: bool | None = None,
) -> Reproduction:
    """The paper's two figures of a task, with both methods.

    Args:
        losses: the task, by loss; the first is that of the figures. With a second one, the curves at the figures' fixed k
            and R are drawn for it too.
        setting: what the paper fixes.
        effort: how much is computed.
        delta: δ of DP-SGD.
        seed: of subspaces and noise.
        quick: what the result says of itself.
        out: directory for finished points; a run that was interrupted goes on from there.
        progress: show a bar; None shows it on a terminal.

    Raises:
        TypeError, ValueError: bad input, before anything runs.

    **Privacy:** none, and a warning says so; see the top of the module.
    """
    if not losses or not all(isinstance(task, Task) for task in losses.values()):
        raise TypeError(f"losses must map the name of a loss to its Task, got {losses!r}")
    _check.positive_int("draws", effort.draws)
    _check.seed("seed", seed)
    main = next(iter(losses))
    task = losses[main]
    parameters = sum(p.numel() for p in task.model.parameters() if p.requires_grad)
    if max(*setting.dims, setting.proj_dim) > parameters:
        raise ValueError(f"setting has dimensions above the model's {parameters} parameters: {setting.dims}")
    warnings.warn(
        "reproduce() simulates, and reads the paper's bounds off the private data: nothing here is differentially private",
        UserWarning,
        stacklevel=2,
    )
    points = _points(tuple(losses), setting)
    with progress_bar(progress, total=len(points), desc=task.name) as bar:
        simulations = {
            name: _Simulations(own, name, setting, effort, seed, None if out is None else Path(out) / _FILE)
            for name, own in losses.items()
        }
        curves, outcomes = [], []
        for loss, method, dim, radius in points:
            found = [simulations[loss].point(method, dim, radius, epsilon) for epsilon in EPSILONS]
            outcomes += found
            means, stds = (tuple(math.nan if f[n] is None else f[n] for f in found) for n in ("mean", "std"))
            curves.append(Curve(method, loss, dim, radius, EPSILONS, means, stds, tuple(f["stated"] for f in found)))
            bar.update()
    return Reproduction(
        task=task.name,
        metric=task.metric,
        loss=main,
        parameters=parameters,
        records=len(task.private),
        test_records=len(task.test),
        draws=effort.draws,
        seed=seed,
        delta=delta,
        setting=setting,
        curves=tuple(curves),
        references=tuple(
            line
            for name, own in losses.items()
            for line in _references(own, name, setting, effort, delta, out, progress, complete=name == main)
        ),
        cost=_cost(simulations.values(), outcomes, effort.draws),
        quick=quick,
    )


def _cost(simulations: Iterable[_Simulations], outcomes: Sequence[Mapping[str, Any]], draws: int) -> Cost:
    """What the curves took, of all tasks together."""
    passed = [seconds for s in simulations for seconds in s.pass_seconds()]
    return Cost(
        passes=len(passed),
        pass_seconds=float(np.mean(passed)),
        candidates=draws * len(outcomes),
        draw_seconds=float(np.mean([o["draw_seconds"] for o in outcomes])),
        score_seconds=float(np.mean([o["score_seconds"] for o in outcomes])),
    )


def _points(losses: Sequence[str], setting: Setting) -> list[tuple[str, str, int, float]]:
    """(loss, method, k, R) of every curve; those of one subspace are neighbours."""
    pairs = {(setting.proj_dim, r) for r in RADII} | {(k, RADIUS) for k in setting.dims}
    found = [(losses[0], method, *pair) for method in METHODS for pair in sorted(pairs)]
    return found + [(loss, method, setting.proj_dim, RADIUS) for loss in losses[1:] for method in METHODS]


class _Simulations:
    """Points of the curves of one task, from the statistics of the last pass."""

    def __init__(self, task: Task, loss: str, setting: Setting, effort: Effort, seed: int, path: Path | None):
        self._task, self._setting, self._effort, self._seed = task, setting, effort, seed
        self._engine = ExpMQuadEngine(distributed=False)  # simulates only; its ledger stays empty
        self._pass: tuple[str, int, Statistics] | None = None
        self._passes: dict[tuple[str, int], float] = {}
        facts = [loss, setting.regularization, seed, effort.draws, repr(effort.gibbs)]
        self._journal = Journal(path, task_digest(task, *facts))

    def pass_seconds(self) -> list[float]:
        """How long each pass took, also those of an earlier run."""
        return list(self._passes.values())

    def point(self, method: str, dim: int, radius: float, epsilon: float) -> dict[str, Any]:
        """Mean, deviation and cost of many candidates, and what the ledger states for one."""
        cell = {"method": method, "proj_dim": dim, "radius": radius, "epsilon": epsilon}
        found = self._journal.get(cell)
        if found is None:
            self._gather(method, dim)
            found = self._journal.put(cell, self._simulate(cell) | {"pass_seconds": self._passes[method, dim]})
        self._passes.setdefault((method, dim), found["pass_seconds"])
        return found

    def _gather(self, method: str, dim: int) -> None:
        """One pass for a subspace; both methods have the same one."""
        if self._pass is not None and self._pass[:2] == (method, dim):
            return
        self._pass = None  # before the next statistics are there
        x, y = tensors("public", self._task.public)
        some = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))[:_PUBLIC_RECORDS]
        loader = DataLoader(self._task.private, batch_size=_BATCH)
        source: dict[str, Any] = {}
        start = time.perf_counter()
        with _said_already():
            if method == "ours":
                source["public_loader"] = DataLoader(TensorDataset(x[some], y[some]), batch_size=_BATCH)
            else:
                found = paper.bounds_read_off(self._task.model, loader, self._task.criterion)
                source |= {"max_grad_norm": found.gradient, "max_curvature": found.curvature}
            statistics = self._engine.gather(
                self._task.model,
                loader,
                dim,
                criterion=self._task.criterion,
                projection=Stiefel(seed=self._seed),
                progress=False,
                **source,
            )
        if method != "ours":
            statistics = paper.read_off(statistics)
        self._passes[method, dim] = time.perf_counter() - start
        self._pass = (method, dim, statistics)

    def _simulate(self, cell: Mapping[str, Any]) -> dict[str, Any]:
        """Draw, build and score candidates."""
        assert self._pass is not None
        scoring = 0.0

        def evaluate(module: nn.Module) -> float:
            nonlocal scoring
            start = time.perf_counter()
            value = self._task.score(module)
            scoring += time.perf_counter() - start
            return value

        draws, statistics = self._effort.draws, self._pass[2]
        noise = np.random.default_rng([self._seed, zlib.crc32(repr(sorted(cell.items())).encode())])
        point = statistics, cell["epsilon"], cell["radius"], evaluate
        options: dict[str, Any] = {"draws": draws, "regularization": self._setting.regularization}
        start = time.perf_counter()
        with _said_already():
            if cell["method"] == "ours":
                values = ExpMQuadEngine(distributed=False, noise_generator=noise).simulate(*point, **options)
            else:
                values = paper.simulate(*point, noise, sampler=self._effort.gibbs, **options)
        seconds = time.perf_counter() - start
        return {
            "mean": float(values.mean()),
            "std": float(values.std(ddof=1)) if draws > 1 else 0.0,
            "stated": stated_epsilon(
                statistics, cell["method"], cell["epsilon"], cell["radius"], self._setting.regularization
            ),
            "draw_seconds": (seconds - scoring) / draws,
            "score_seconds": scoring / draws,
        }


def stated_epsilon(
    statistics: Statistics, method: str, epsilon: float, radius: float, regularization: float
) -> float | None:
    """The pure ε in a new ledger after one exact release at ε; None where it refuses to state any.

    Args:
        statistics: of one pass.
        method: a key of ``METHODS``.
        epsilon: ε.
        radius: R.
        regularization: the paper's λ, for both.
    """
    engine = ExpMQuadEngine(distributed=False)
    if _check.one_of("method", method, tuple(METHODS)) == "ours":
        engine.release(statistics, epsilon, radius, regularization=regularization)
    else:
        paper.release(engine.books(), statistics, epsilon, radius, regularization=regularization)
    try:
        return engine.get_epsilon(0.0)
    except NoGuarantee:
        return None


@contextmanager
def _said_already() -> Iterator[None]:
    """Without the warnings that ``reproduce`` gave once for all."""
    with warnings.catch_warnings():
        for message in (r"simulate\(\) draws models", r"bounds_read_off\(\) reads", "Gibbs is only"):
            warnings.filterwarnings("ignore", message=message)
        yield


def _references(
    task: Task,
    loss: str,
    setting: Setting,
    effort: Effort,
    delta: float,
    out: str | PathLike[str] | None,
    progress: bool | None,
    *,
    complete: bool,
) -> list[Reference]:
    """Zero-shot, non-private and, for the loss of the figures, DP-SGD: tuned, and at the paper's learning rate."""
    untuned: Grid = {**effort.dp_sgd, "learning_rate": (setting.learning_rate,), "momentum": (0.0,)}
    runs: list[tuple[str, tuple[Method, ...], Grid]] = [("dp-sgd", ("zero-shot", "non-private"), effort.dp_sgd)]
    if complete:
        runs = [
            ("dp-sgd", ("zero-shot", "non-private", "dp-sgd"), effort.dp_sgd),
            ("dp-sgd-paper-rate", ("dp-sgd",), untuned),
        ]
    found = []
    for name, methods, grid in runs:
        compared = compare(
            task,
            EPSILONS,
            delta=delta,
            seeds=effort.seeds,
            methods=methods,
            trials=1,
            grids={m: g for m, g in (("non-private", effort.non_private), ("dp-sgd", grid)) if m in methods},
            out=out,
            progress=progress,
        )
        for method in methods:
            rows = [row for row in compared.rows if row.method == method]
            budgets = tuple(row.epsilon for row in rows if row.epsilon is not None)
            values = tuple(row.mean for row in rows), tuple(row.std for row in rows)
            found.append(Reference(name if method == "dp-sgd" else method, loss, budgets, *values))
    return found
