"""Which law of the number of trials is kindest to DP-SGD with its tuning charged: the mean of the score that is kept.

    python -m benchmarks.suite.trials icu sms_head --log trials.jsonl [--epsilons 0.1 1 10] [--seeds 3]

The law decides both how many settings are tried and how much noise each trial needs, and the two pull against each other. So
every setting of the grid runs once at the law's own ε₁. K settings drawn from m with replacement are all among the j worst
with probability (j/m)^K, whose mean over K is the law's generating function at j/m: the mean of the best score follows.
"""

from __future__ import annotations

import argparse
import math
import statistics
import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.suite import rivals
from benchmarks.suite.selection import Array, Trials
from opacus_expm._tables import markdown
from opacus_expm.experiments.journal import Journal

LAWS = {
    "Poisson, mean 10": Trials(10.0, math.inf),
    "Poisson, mean 5": Trials(5.0, math.inf),
    "geometric, mean 10": Trials(10.0, 1.0),
    "geometric, mean 5": Trials(5.0, 1.0),
    "logarithmic, mean 10": Trials(10.0, 0.0),
    "logarithmic, mean 5": Trials(5.0, 0.0),
}


def generating(trials: Trials, x: Array) -> Array:
    """E[x^K] of the Poisson, the geometric and the logarithmic distribution."""
    if trials.shape == math.inf:
        found: Array = np.exp(trials.mean * (x - 1))
    elif trials.shape == 0:
        found = np.log1p(-(1 - trials.gamma) * x) / math.log(trials.gamma)
    elif trials.shape == 1:
        found = trials.gamma * x / (1 - (1 - trials.gamma) * x)
    else:
        raise ValueError(f"shape must be 0, 1 or math.inf, got {trials.shape!r}")
    return found


def expected_best(trials: Trials, merits: Sequence[float], start: float) -> float:
    """The mean of the best among K merits drawn from a list with replacement; the start's where K is 0."""
    below = generating(trials, np.arange(len(merits) + 1) / len(merits))
    return float(np.diff(below) @ np.sort(merits) + below[0] * start)


def kept(name: str, epsilon: float, seed: int, trials: Trials, log: Journal) -> float:
    """The mean merit of what charged tuning keeps, from one run of every setting at ε₁."""
    task, listed = rivals.task_of(name, seed), rivals.candidates(name)
    schedules = tuple(sorted({rivals.schedule(settings, len(task.private)) for settings in listed}))
    each = rivals.charged_epsilon(epsilon, rivals.DELTA, schedules, trials)
    merits = [rivals.merit(rivals.run(name, settings, each, seed, log)) for settings in listed]
    start = rivals.merit({"score": task.score(task.model), "metric": task.metric})
    return expected_best(trials, merits, start)


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("tasks", nargs="+", choices=list(rivals.GRIDS))
    parser.add_argument("--log", type=Path, required=True, help="finished runs, one line of JSON each")
    parser.add_argument("--epsilons", type=float, nargs="+", default=rivals.EPSILONS)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args(arguments)
    log = Journal(options.log, "suite")
    rows = []
    for name in options.tasks:
        for law, trials in LAWS.items():
            means = [
                statistics.fmean(kept(name, epsilon, seed, trials, log) for seed in range(options.seeds))
                for epsilon in options.epsilons
            ]
            rows.append([name, law, *(f"{mean:.4g}" for mean in means)])
    print(markdown(["task", "trials", *(f"ε = {epsilon:g}" for epsilon in options.epsilons)], rows))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main()
