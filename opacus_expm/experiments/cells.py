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
from opacus_expm.experiments.methods import DRAW_SETTINGS, METHODS, Settings, arguments, gathering, subspace
from opacus_expm.experiments.results import check_measured, numbers
from opacus_expm.experiments.tasks import Task
from opacus_expm.gathering.loaders import rows_loader
from opacus_expm.gathering.measurement import Measurement
from opacus_expm.gathering.ranks import Ranks
from opacus_expm.gathering.statistics import Statistics
from opacus_expm.public import taught
from opacus_expm.subspaces import Subspace

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
        """The outcome that a journal's entry describes."""
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
        """One line that names the cell in the journal."""
        return canonical(dataclasses.asdict(self))

    def shared(self) -> str:
        """The pass over the data that the cell draws from, empty where it has none to share."""
        if not self.method.startswith("expm") or self.settings.get("rounds", 1) != 1:
            return ""
        return canonical([self.seed, gathering(self.settings)])

    def order(self) -> tuple[int, str]:
        """A key for sorting, by which cells that share a pass come one after the other."""
        return (METHODS.index("expm") if self.method.startswith("expm") else METHODS.index(self.method), self.shared())


class Lab:
    """What the search and the runs share: public records, and what was learnt from them."""

    def __init__(self, task: Task):
        x, y = tensors("public", task.public)
        some = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))[:_PUBLIC_RECORDS]
        self._task = task
        self.public_loader = rows_loader(x[some], y[some], _BATCH)
        self.device = next(task.model.parameters()).device
        self._learned: dict[str, tuple[Subspace, Cost]] = {}

    def learned(self, settings: Settings) -> tuple[Subspace, Cost]:
        """The subspace with what it learns from public records, and what that costs; computed once."""
        key = canonical({name: value for name, value in gathering(settings).items() if not name.startswith("max_")})
        if key not in self._learned:
            measurement = Measurement(
                subspace(settings), settings.get("proj_dim"), criterion=self._task.criterion, progress=False
            )
            with metered(self.device) as cost:
                found = taught(self._task.model, measurement, self.public_loader, Ranks())
            self._learned[key] = found, cost if measurement.subspace.needs_public_data else Cost(0.0)
        return self._learned[key]


class Bench:
    """Runs cells on one task; keeps the statistics of the last pass."""

    def __init__(self, task: Task, lab: Lab, delta: float):
        self.task, self.lab, self.delta = task, lab, delta
        self._pass: tuple[str, Statistics, Cost] | None = None

    def run(self, cell: Cell) -> Outcome:
        """Run a cell, and measure the result on the task's test data."""
        if cell.method == "zero-shot":
            return Outcome((self.task.score(self.task.model),), 0.0, None)
        return self._expm(cell) if cell.method.startswith("expm") else self._trained(cell)

    def _trained(self, cell: Cell) -> Outcome:
        """Run one of the methods that are not ours."""
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
        """Run our method: one release, or many simulated ones."""
        task = self.task
        engine = ExpMQuadEngine(  # its ledger is not looked at: see the top of the module
            distributed=False, noise_generator=np.random.default_rng([cell.seed, zlib.crc32(cell.key().encode())])
        )
        data: Settings = {
            "model": task.model,
            "loader": rows_loader(*tensors("private", task.private), _BATCH),
            "criterion": task.criterion,
            "public_loader": self.lab.public_loader,
            "progress": False,
        }
        budget: Settings = {"epsilon": cell.epsilon, "delta": 0.0 if cell.method == "expm" else self.delta}
        recipe, prepared = self.lab.learned(cell.settings)
        recipe = recipe.seeded(cell.seed)
        if not cell.shared():
            with metered(self.lab.device) as cost:
                model = engine.make_private_expm(**data, **budget, **arguments(cell.settings, recipe))
            cost += prepared
            return Outcome((task.score(model),), cost.seconds, cost.memory)
        if self._pass is None or self._pass[0] != cell.shared():
            self._pass = None  # before the next statistics are there
            with metered(self.lab.device) as cost:
                gathered = engine.gather(**data, **arguments(gathering(cell.settings), recipe))
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
