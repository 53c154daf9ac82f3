"""The cells of a comparison, each one run of one method, and the bench on which they run."""

from __future__ import annotations

import dataclasses
import math
import warnings
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import nn

from opacus_expm.baselines import calibrated_noise, dp_sgd, non_private, tensors
from opacus_expm.engine import ExpMQuadEngine
from opacus_expm.experiments.cost import metered
from opacus_expm.experiments.journal import canonical
from opacus_expm.experiments.methods import OURS, Settings
from opacus_expm.experiments.results import check_cost, check_scores, numbers
from opacus_expm.experiments.task import Task
from opacus_expm.gathering.loaders import rows_loader

_BATCH = 500  # records at a time in a pass


@dataclass(frozen=True)
class Outcome:
    """What one cell gave."""

    score: float
    seconds: float
    memory: float | None

    def __post_init__(self) -> None:
        check_scores((self.score,))
        check_cost(self.seconds, self.memory)

    @classmethod
    def from_facts(cls, facts: dict[str, Any]) -> Outcome:
        """The outcome that a journal's entry describes."""
        return cls(**{**facts, "score": numbers([facts["score"]])[0]})


@dataclass(frozen=True)
class Cell:
    """One run of one method."""

    stage: str
    method: str
    epsilon: float | None
    seed: int
    settings: Settings

    def key(self) -> str:
        """One line that names the cell in the journal."""
        return canonical(dataclasses.asdict(self))


class Bench:
    """Runs cells on one task."""

    def __init__(self, task: Task, delta: float):
        self.task, self.delta = task, delta
        self.device = next(task.model.parameters()).device

    def run(self, cell: Cell) -> Outcome:
        """Run a cell, and measure the result on the task's test data."""
        if cell.method == "zero-shot":
            return Outcome(self.task.score(self.task.model), 0.0, None)
        return self._released(cell) if cell.method in OURS else self._trained(cell)

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
        with metered(self.device) as cost:
            model = train(task.model, task.private, task.criterion, seed=cell.seed, **settings)
        return Outcome(task.score(model), cost.seconds, cost.memory)

    def _released(self, cell: Cell) -> Outcome:
        """Run our method: the engine's call with a budget and nothing else."""
        task = self.task
        noise = np.random.default_rng([cell.seed, zlib.crc32(cell.key().encode())])
        engine = ExpMQuadEngine(distributed=False, noise_generator=noise)  # its ledger is not looked at
        loader = rows_loader(*tensors("private", task.private), _BATCH)
        budget: Settings = {"epsilon": cell.epsilon, "delta": 0.0 if cell.method == "expm" else self.delta}
        with metered(self.device) as cost, warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=r"with \d+ records.* told from noise")  # the score says so
            model = engine.make_private_expm(task.model, loader, **budget, criterion=task.criterion, progress=False)
        return Outcome(task.score(model), cost.seconds, cost.memory)
