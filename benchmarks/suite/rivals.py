"""Opacus DP-SGD in three ways: tuned for free, with its tuning charged, and untuned.

    python -m benchmarks.suite.rivals icu sms_head --log rivals.jsonl [--epsilon 0.1 1 10] [--seeds 5] [--rivals untuned ...]

* ``free``: the settings with the best mean *test* score among all of ``GRIDS``, over the first ``--searched`` seeds. Nobody
  can do this in practice, and the search costs nothing here: it is an oracle in DP-SGD's favour.
* ``charged``: random search in the same grid. The number of trials is drawn from ``TRIALS``, each trial has settings drawn
  from the grid, and the best by its test score is kept. Every trial runs at a smaller ε₁, the same for all of them, so that
  the trial which is kept is (ε, δ)-DP: see :func:`charged_epsilon`. The test data are taken as public there, so that
  scores cost nothing, again in DP-SGD's favour.
* ``untuned``: ``TUTORIAL``, whatever the task.

A seed fixes the data, the start, and DP-SGD's sampling and noise. Every run is a line in the log and is not made again, so
that a benchmark can be interrupted and resumed, and rivals share the runs that they have in common.
"""

from __future__ import annotations

import argparse
import functools
import math
import statistics
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from benchmarks.suite.selection import Array, Trials, dp_sgd_rdp, epsilon_of
from opacus_expm._tables import markdown
from opacus_expm.baselines import calibrated_noise, dp_sgd
from opacus_expm.experiments import tasks
from opacus_expm.experiments.journal import Facts, Journal, canonical
from opacus_expm.experiments.methods import DP_SGD_GRID, Grid, Settings, combinations
from opacus_expm.experiments.tasks import Task

DELTA = 1e-5
EPSILONS = (0.1, 1.0, 10.0)
RIVALS = ("free", "charged", "untuned")

# The defaults of Opacus's own example for MNIST, examples/mnist.py at v1.5.4: SGD without momentum. Its tutorial on advanced
# features has the same learning rate and clipping norm; the others train with RMSprop or AdamW.
TUTORIAL: Settings = {"learning_rate": 0.1, "max_grad_norm": 1.0, "batch_size": 64, "epochs": 10, "momentum": 0.0}

# The law that is kindest to DP-SGD, by the mean score of what is kept (``benchmarks.suite.trials``, three seeds):
#
#   |                      | icu: ε = 0.1 | 1     | 10    | sms_head: ε = 0.1 | 1     | 10    | σ at ε = 1 |
#   |----------------------|--------------|-------|-------|-------------------|-------|-------|------------|
#   | Poisson, mean 10     | 72.77        | 75.83 | 76.45 | 92.10             | 94.05 | 96.30 | 6.65       |
#   | Poisson, mean 5      | 72.87        | 75.46 | 75.97 | 91.24             | 93.96 | 95.67 | 4.94       |
#   | geometric, mean 10   | 72.18        | 75.42 | 76.00 | 90.70             | 93.71 | 95.76 | 6.27       |
#   | logarithmic, mean 10 | 72.18        | 74.96 | 75.48 | 89.72             | 93.53 | 95.16 | 5.18       |
#
# σ is that of twenty steps an epoch for ten epochs. The Poisson law with mean 10 needs the most noise, and still keeps the
# best model in five of six cells, because it rarely gives few trials; in the sixth it is 0.1 points behind. Geometric and
# logarithmic laws with mean 5 were behind both Poisson laws in every cell. Means above 10 were not compared.
TRIALS = Trials(mean=10.0, shape=math.inf)


def _small_batches(*rates: float) -> tuple[Grid, ...]:
    """Learning rates for twenty steps an epoch."""
    return ({"learning_rate": rates, "max_grad_norm": (1.0,), "sample_rate": (0.05,), "epochs": (10,)},)


GRIDS: Mapping[str, Sequence[Grid]] = {
    "sine": DP_SGD_GRID,
    "mnist": DP_SGD_GRID[:1],
    "mnist_far": _small_batches(0.01, 0.03, 0.1, 0.3),
    "icu": DP_SGD_GRID,
    "sms_head": DP_SGD_GRID,
    "sms_lora": _small_batches(0.01, 0.03, 0.1, 0.3),
    "cifar10_head": _small_batches(0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0),
}


@functools.lru_cache(2)
def task_of(name: str, seed: int) -> Task:
    """A task; no run changes it."""
    made: Task = getattr(tasks, name)(seed)
    return made


def candidates(name: str) -> list[Settings]:
    """All settings of a task's grid."""
    return combinations(GRIDS[name])


def schedule(settings: Settings, records: int) -> tuple[int, int]:
    """Steps in an epoch, and epochs."""
    return math.ceil(records / batch_size(settings, records)), settings["epochs"]


def batch_size(settings: Settings, records: int) -> int:
    """Expected size of a batch."""
    return int(settings["batch_size"] if "batch_size" in settings else math.ceil(records * settings["sample_rate"]))


def run(name: str, settings: Settings, epsilon: float, seed: int, log: Journal, *, trial: int = 0) -> Facts:
    """One run of DP-SGD at (ε, δ), from the log or made now: test score, seconds, and passes over the data.

    Args:
        name: of the task.
        settings: of DP-SGD.
        epsilon: what this run may cost.
        seed: of the task.
        log: finished runs.
        trial: tells runs of equal settings from each other; each has its own sampling and noise.
    """
    cell = {"task": name, "settings": settings, "epsilon": epsilon, "delta": DELTA, "seed": seed, "trial": trial}
    if (found := log.get(cell)) is not None:
        return found
    task = task_of(name, seed)
    calibrated_noise(epsilon, DELTA, *schedule(settings, len(task.private)))  # cached, so that it is in no run's time
    begin = time.process_time()
    model = dp_sgd(
        task.model,
        task.private,
        task.criterion,
        epsilon=epsilon,
        delta=DELTA,
        learning_rate=settings["learning_rate"],
        max_grad_norm=settings["max_grad_norm"],
        batch_size=batch_size(settings, len(task.private)),
        epochs=settings["epochs"],
        momentum=settings.get("momentum", 0.9),
        max_physical_batch_size=256,
        seed=zlib.crc32(canonical([seed, trial]).encode()),
    )
    seconds = time.process_time() - begin
    found = {"score": task.score(model), "seconds": seconds, "passes": settings["epochs"], "metric": task.metric}
    print({**cell, **found}, flush=True)
    return log.put(cell, found)


def merit(found: Facts) -> float:
    """Larger is better; what diverged, and is null in the log, is worst."""
    score = found["score"]
    if score is None or not math.isfinite(score):
        return -math.inf
    return float(score if found["metric"] == "accuracy" else -score)


def free(name: str, epsilon: float, seed: int, log: Journal, *, searched: Sequence[int]) -> Facts:
    """The run with the best settings of the task's grid; the search is not charged."""
    return best_of(candidates(name), lambda settings, one: run(name, settings, epsilon, one, log), seed, searched)


def best_of(
    listed: Sequence[Settings], once: Callable[[Settings, int], Facts], seed: int, searched: Sequence[int]
) -> Facts:
    """The run of a seed with the settings whose mean test score over the searched seeds is best.

    Args:
        listed: settings to choose from.
        once: the run with these settings and this seed.
        seed: of the run that is returned.
        searched: seeds whose test scores choose.
    """
    # A seed at a time, so that its task is made once.
    merits = [[merit(once(settings, other)) for settings in listed] for other in searched]
    means = [statistics.fmean(column) for column in zip(*merits, strict=True)]
    best = listed[max(range(len(listed)), key=means.__getitem__)]
    return {**once(best, seed), "settings": best}


def charged(name: str, epsilon: float, seed: int, log: Journal, *, trials: Trials = TRIALS) -> Facts:
    """The best of a random number of trials with random settings, all of them charged.

    No trial at all, which the Poisson distribution allows, leaves the model as it is.
    """
    task, listed = task_of(name, seed), candidates(name)
    generator = np.random.default_rng([seed, zlib.crc32(canonical([name, epsilon]).encode())])
    drawn = [listed[generator.integers(len(listed))] for _ in range(trials.draw(generator))]
    schedules = tuple(sorted({schedule(settings, len(task.private)) for settings in listed}))
    each = charged_epsilon(epsilon, DELTA, schedules, trials)
    runs = [run(name, settings, each, seed, log, trial=number) for number, settings in enumerate(drawn)]
    if not runs:
        return {"score": task.score(task.model), "seconds": 0.0, "passes": 0, "metric": task.metric, "trials": 0}
    best = max(range(len(runs)), key=lambda number: merit(runs[number]))
    return {
        **runs[best],
        "settings": drawn[best],
        "seconds": sum(found["seconds"] for found in runs),
        "passes": sum(found["passes"] for found in runs),
        "trials": len(runs),
        "epsilon of a trial": each,
    }


def untuned(name: str, epsilon: float, seed: int, log: Journal) -> Facts:
    """The run with Opacus's own settings."""
    return {**run(name, TUTORIAL, epsilon, seed, log), "settings": TUTORIAL}


@functools.cache
def charged_epsilon(epsilon: float, delta: float, schedules: tuple[tuple[int, int], ...], trials: Trials) -> float:
    """The largest ε₁, to within 2 %, at which trials may run so that the best of them is (ε, δ)-DP.

    A trial with schedule s (steps in an epoch, epochs) adds the noise at which it is (ε₁, δ)-DP by Opacus's numerical
    accountant. Its Rényi DP follows from that noise; the largest over all schedules bounds a trial with random settings,
    which are public; ``trials`` turns this into the Rényi DP of the best one, and that into ε at δ.

    **Privacy:** what is returned has been checked: its cost is at most ε, not only near it.
    """

    def cost(each: float) -> float:
        return epsilon_of(trials.rdp(_largest(each, delta, schedules)), delta)

    low, high = epsilon / 2, epsilon
    while cost(low) > epsilon:
        low, high = low / 2, low
    while high / low > 1.02:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if cost(middle) <= epsilon else (low, middle)
    return low


def _largest(each: float, delta: float, schedules: Sequence[tuple[int, int]]) -> Array:
    """Rényi DP of a run with whichever of the schedules."""
    curves = [dp_sgd_rdp(calibrated_noise(each, delta, *schedule), *schedule) for schedule in schedules]
    largest: Array = np.max(curves, axis=0)
    return largest


def table(names: Sequence[str], found: Mapping[tuple[str, str, float], Sequence[Facts]]) -> str:
    """Mean ± standard deviation over the seeds; passes and seconds in the mean."""
    rows = []
    for name in names:
        for (task, rival, epsilon), runs in found.items():
            if task == name:
                scores = [math.nan if run["score"] is None else run["score"] for run in runs]
                digits = 1 if runs[0]["metric"] == "accuracy" else 4
                spread = f" ± {statistics.stdev(scores):.{digits}f}" if len(scores) > 1 else ""
                means = [f"{statistics.fmean(run[fact] for run in runs):.0f}" for fact in ("passes", "seconds")]
                rows.append([name, rival, f"{epsilon:g}", f"{statistics.fmean(scores):.{digits}f}{spread}", *means])
    return markdown(["task", "DP-SGD", "ε", "score", "passes", "seconds"], rows)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("tasks", nargs="+", choices=list(GRIDS))
    parser.add_argument("--log", type=Path, required=True, help="finished runs, one line of JSON each")
    parser.add_argument("--epsilon", type=float, nargs="+", default=EPSILONS)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--searched", type=int, default=1, help="seeds whose test scores choose the settings of 'free'")
    parser.add_argument("--rivals", nargs="+", choices=RIVALS, default=RIVALS)
    options = parser.parse_args()
    log = Journal(options.log, "suite")
    found: dict[tuple[str, str, float], list[Facts]] = {}
    for name in options.tasks:
        for rival in options.rivals:
            for epsilon in options.epsilon:
                for seed in range(options.seeds):
                    if rival == "free":
                        facts = free(name, epsilon, seed, log, searched=range(options.searched))
                    else:
                        facts = (charged if rival == "charged" else untuned)(name, epsilon, seed, log)
                    found.setdefault((name, rival, epsilon), []).append(facts)
    print(table(options.tasks, found))


if __name__ == "__main__":
    main()
