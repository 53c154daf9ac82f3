"""The cells of a comparison, each one run of one method, and the bench on which they run."""

from __future__ import annotations

import dataclasses
import math
import time
import warnings
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from opacus_expm.baselines import calibrated_noise, dp_sgd, non_private, tensors
from opacus_expm.engine import ExpMQuadEngine
from opacus_expm.experiments.cost import Cost, metered
from opacus_expm.experiments.journal import canonical
from opacus_expm.experiments.methods import DRAW_SETTINGS, METHODS, Settings, gathering
from opacus_expm.experiments.results import check_measured, numbers
from opacus_expm.experiments.tasks import Task
from opacus_expm.gathering.loaders import rows_loader
from opacus_expm.gathering.statistics import Statistics
from opacus_expm.subspaces.projection import PUBLIC_KINDS

_PUBLIC_RECORDS = 5000  # of the public data at the most, for bounds and public subspaces
_BATCH = 500  # records at a time in a pass


@dataclass(frozen=True)
class Outcome:
    """What one cell gave."""

    values: tuple[float, ...]
    seconds: float
    memory: float | None
    simulated: bool = False

    def __post_init__(self) -> None:
        check_measured(self)

    @classmethod
    def from_facts(cls, facts: dict[str, Any]) -> Outcome:
        """As the journal has it."""
        return cls(**{**facts, "values": numbers(facts["values"])})


@dataclass(frozen=True)
class Cell:
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
        return canonical([self.seed, gathering(self.settings)])

    def order(self) -> tuple[int, str]:
        """Sorts cells so that those of one pass are neighbours."""
        return (METHODS.index("expm") if self.method.startswith("expm") else METHODS.index(self.method), self.shared())


class Lab:
    """What the search and the runs share: an engine, and what it has learnt from the public data."""

    def __init__(self, task: Task):
        x, y = tensors("public", task.public)
        some = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))[:_PUBLIC_RECORDS]
        self.engine = ExpMQuadEngine(distributed=False)  # its ledger is not looked at: see the top of the module
        self.public_loader = rows_loader(x[some], y[some], _BATCH)
        self.device = next(task.model.parameters()).device
        self._prepared: dict[str, Cost] = {}

    def prepared(self, data: Settings, settings: Settings) -> Cost:
        """What the public curvature costs, where the settings need it; the engine computes it once and keeps it."""
        if settings.get("projection") not in PUBLIC_KINDS:
            return Cost(0.0)
        key = canonical([settings.get(name) for name in ("projection", "proj_dim", "public_rank")])
        if key not in self._prepared:
            options = {**gathering(settings), **data, "max_grad_norm": 1.0, "max_curvature": 0.0}
            x, y = next(iter(self.public_loader))
            options["loader"] = rows_loader(x[:1], y[:1], 1)  # nothing but the curvature
            with metered(self.device) as cost:
                self.engine.gather(**options)
            self._prepared[key] = cost
        return self._prepared[key]


class Bench:
    """Runs cells on one task; keeps the statistics of the last pass."""

    def __init__(self, task: Task, lab: Lab, delta: float):
        self.task, self.lab, self.delta = task, lab, delta
        self._pass: tuple[str, Statistics, Cost] | None = None

    def run(self, cell: Cell) -> Outcome:
        """The metric on the task's test data."""
        if cell.method == "zero-shot":
            return Outcome((self.task.score(self.task.model),), 0.0, None)
        return self._expm(cell) if cell.method.startswith("expm") else self._trained(cell)

    def _trained(self, cell: Cell) -> Outcome:
        """The methods that are not ours."""
        task, settings = self.task, dict(cell.settings)
        train: Callable[..., nn.Module] = non_private
        if cell.method == "dp-sgd":
            train = dp_sgd
            settings["batch_size"] = math.ceil(len(task.private) * settings.pop("sample_rate"))
            settings.update(epsilon=cell.epsilon, delta=self.delta)
            # Cached, so that the search for the noise is in no run's time.
            calibrated_noise(
                settings["epsilon"],
                self.delta,
                math.ceil(len(task.private) / settings["batch_size"]),
                settings["epochs"],
            )
        with metered(self.lab.device) as cost:
            model = train(task.model, task.private, task.criterion, seed=cell.seed, **settings)
        return Outcome((task.score(model),), cost.seconds, cost.memory)

    def _expm(self, cell: Cell) -> Outcome:
        """One release, or many simulated ones."""
        engine, task = self.lab.engine, self.task
        data: Settings = {
            "model": task.model,
            "loader": rows_loader(*tensors("private", task.private), _BATCH),
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
            with metered(self.lab.device) as cost:
                model = engine.make_private_expm(**data, **budget, **cell.settings)
            cost += prepared
            return Outcome((task.score(model),), cost.seconds, cost.memory)
        if self._pass is None or self._pass[0] != cell.shared():
            self._pass = None  # before the next statistics are there
            with metered(self.lab.device) as cost:
                gathered = engine.gather(**data, **gathering(cell.settings))
            self._pass = (cell.shared(), gathered, cost)
        _, statistics, passed = self._pass
        settings = {**budget, **{name: value for name, value in cell.settings.items() if name in DRAW_SETTINGS}}
        if cell.draws == 1:
            with metered(self.lab.device) as cost:
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

            with metered(self.lab.device) as cost, warnings.catch_warnings():
                warnings.filterwarnings("ignore", message=r"simulate\(\) draws models")  # the result says so
                simulated = engine.simulate(statistics, evaluate=score, draws=cell.draws, **settings)
            cost.seconds = (cost.seconds - scoring) / cell.draws
            values = tuple(map(float, simulated))
        cost += prepared + passed
        return Outcome(values, cost.seconds, cost.memory, cell.draws > 1)
