"""One run of this engine with nothing but a budget, and what it is compared with beside DP-SGD."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Literal

from torch.utils.data import DataLoader

from benchmarks.suite.rivals import DELTA, task_of
from opacus_expm import ExpMQuadEngine
from opacus_expm.accounting.events import Query
from opacus_expm.baselines import non_private
from opacus_expm.experiments.journal import Facts, read_result
from opacus_expm.experiments.methods import Settings
from opacus_expm.experiments.tasks import Task
from opacus_expm.gathering import looks
from opacus_expm.gathering.measurement import Measurement
from opacus_expm.gathering.passes import Workbench
from opacus_expm.pure import PureRule
from opacus_expm.rule import Rule
from opacus_expm.subspaces.sparse import Sparse

Source = Literal["ours", "plain", "public"]
BATCH = 64  # records that are in memory at a time; no result depends on it
ACCURACY = Path(__file__).parents[1] / "accuracy"

# Adam with a one-cycle learning rate. Without privacy little depends on these.
NON_PRIVATE: Mapping[str, Settings] = {
    "sine": {"learning_rate": 1e-2, "batch_size": 500, "epochs": 100},
    "mnist": {"learning_rate": 1e-3, "batch_size": 256, "epochs": 10},
    "mnist_far": {"learning_rate": 1e-3, "batch_size": 256, "epochs": 20},
    "icu": {"learning_rate": 1e-2, "batch_size": 256, "epochs": 30},
    "sms_head": {"learning_rate": 1e-2, "batch_size": 256, "epochs": 30},
    "sms_lora": {"learning_rate": 1e-3, "batch_size": 64, "epochs": 5},
    "cifar10_head": {"learning_rate": 1e-3, "batch_size": 256, "epochs": 20},
}


def zero_shot(name: str, seed: int) -> Facts:
    """The model as it comes."""
    task = task_of(name, seed)
    return {"score": task.score(task.model), "seconds": 0.0, "passes": 0}


def without_privacy(name: str, seed: int) -> Facts:
    """The model fine-tuned without privacy."""
    task, settings = task_of(name, seed), NON_PRIVATE[name]
    begin = time.process_time()
    model = non_private(task.model, task.private, task.criterion, seed=seed, **settings)
    seconds = time.process_time() - begin
    return {"score": task.score(model), "seconds": seconds, "passes": settings["epochs"], "settings": settings}


def ours(name: str, epsilon: float, seed: int, metric: Source = "ours") -> Facts:
    """The engine's call with nothing but a budget: score, what the ledger says was charged, seconds, passes, and its plan.

    Where the metric comes from can be varied: ``"public"`` passes the task's public records, and ``"plain"`` has no metric,
    by the mode of per-sample gradients that knows no layers.

    The search for the noise of the directions, about a second for each budget, is made before the clock starts, as that of
    DP-SGD is: both depend on public numbers alone.
    """
    task = task_of(name, seed)
    loader = DataLoader(task.private, batch_size=BATCH)
    rule = rule_of(task, epsilon, metric)
    assert rule.noise_multiplier > 0  # found here, and remembered
    engine = ExpMQuadEngine()
    call = partial(engine.make_private_expm, task.model, loader, epsilon, delta=DELTA, criterion=task.criterion)
    if metric == "public":
        assert task.public is not None
        call = partial(call, public_loader=DataLoader(task.public, batch_size=BATCH))
    elif metric == "plain":
        call = partial(call, grad_sample_mode="functorch")
    begin = time.process_time()
    model = call()
    seconds = time.process_time() - begin
    return {
        "score": task.score(model),
        "seconds": seconds,
        "passes": rule.passes,
        "charged": engine.get_epsilon(DELTA),
        "public": {key: getattr(rule, key) for key in ("records", "layers", "bounded", "head", "public")},
        "plan": plan([event for event in engine.accountant.releases if isinstance(event, Query)]),
    }


def pure(name: str, epsilon: float, seed: int) -> Facts:
    """The same call with δ = 0."""
    task = task_of(name, seed)
    bench, bounded = _prepared(task)
    rule = PureRule(epsilon, len(task.private), bench.layout.size, bounded)
    engine = ExpMQuadEngine()
    begin = time.process_time()
    loader = DataLoader(task.private, batch_size=BATCH)
    model = engine.make_private_expm(task.model, loader, epsilon, delta=0.0, criterion=task.criterion)
    seconds = time.process_time() - begin
    return {
        "score": task.score(model),
        "seconds": seconds,
        "passes": rule.passes,
        "charged": engine.get_epsilon(0.0),
        "public": {"records": rule.records, "parameters": rule.parameters, "bounded": rule.bounded},
        "plan": {"shares": shares([event for event in engine.accountant.releases if isinstance(event, Query)])},
    }


def rule_of(task: Task, epsilon: float, metric: Source = "ours") -> Rule:
    """The public formula, for the public numbers of a task."""
    bench, bounded = _prepared(task)
    layers = 0 if metric == "plain" else len(looks.blocks(bench))
    head = layers == 1 and bench.moves_head_alone()
    return Rule(epsilon, DELTA, len(task.private), layers, bounded, head, public=metric == "public")


def _prepared(task: Task) -> tuple[Workbench, bool]:
    """A workbench that has seen a batch, and whether the loss of guessing is known."""
    loader = DataLoader(task.private, batch_size=BATCH)
    bench = Workbench(task.model, Measurement(Sparse(seed=0), None, criterion=task.criterion, progress=False))
    outputs = looks.prepare(bench, loader)
    return bench, bench.prepared[1].guessing(outputs) is not None


def plan(asked: list[Query]) -> Facts:
    """T, rate and σ of the directions and what every other question cost, as the ledger has it, not as the formula says."""
    [run] = [event.run for event in asked if event.run is not None]
    others = [event for event in asked if event.run is None]
    return {"steps": run[2], "sample_rate": run[1], "noise_multiplier": run[0], "shares": shares(others)}


def shares(asked: list[Query]) -> Facts:
    """How often every kind of question was asked, and its price, as the ledger has it."""
    found: Facts = {}
    for (what, facts), count in Counter(_share(event) for event in asked).items():
        if what in found:
            raise ValueError(f"questions of one kind must cost the same, and {what!r} has several prices")
        found[what] = {"count": count, **json.loads(facts)}
    return found


def _share(event: Query) -> tuple[str, str]:
    """What was asked, and its price: ε of a pure draw, the range of a choice, or μ of a sum."""
    if event.pure is not None:
        return event.what, json.dumps({"pure": event.pure})
    by_range = event.epsilon_range < event.mu
    return event.what, json.dumps({"epsilon_range": event.epsilon_range} if by_range else {"mu": event.mu})


def cited(name: str, epsilon: float, seed: int) -> Facts:
    """Tuned DP-SGD from ``benchmarks.accuracy``, whose settings were chosen on held-out private records of seed 0.

    Raises:
        ValueError: there is nothing to cite.
    """
    path = ACCURACY / f"{name}.json"
    if not path.exists():
        raise ValueError(f"{name} must be a task of benchmarks.accuracy to be cited; run the method 'free' instead")
    found, key = read_result(path), ("dp-sgd", epsilon)
    rows = {(row["method"], row["epsilon"]): row for row in found["rows"]}
    chosen = {(row["method"], row["epsilon"]): row["chosen"] for row in found["settings"]}
    if key not in rows or seed >= len(rows[key]["scores"]):
        raise ValueError(f"benchmarks/accuracy/{name}.json has no DP-SGD at ε = {epsilon:g} with seed {seed}")
    settings = chosen[key]
    return {
        "score": rows[key]["scores"][seed],
        "seconds": None,
        "passes": settings["epochs"],
        "settings": settings,
        "source": f"benchmarks/accuracy/{name}.json",
    }
