"""Accuracy at equal privacy: every way to run the engine, Opacus DP-SGD tuned, and non-private fine-tuning.

    python -m benchmarks.accuracy mnist --log mnist.jsonl [--epsilon 0.1 1 10] [--seeds 5] [--methods dp-sgd rounds ...]
    python -m benchmarks.accuracy mnist --log mnist.jsonl --report [--out accuracy.json] [--plot accuracy.png]

A seed fixes the data, the pretraining, and DP-SGD's sampling and noise; our subspaces and noise are drawn afresh, as in
any release. Every run is appended to the log as one line and not made again, so that a run can be interrupted, resumed,
and shared between processes. ``--report`` prints mean ± standard deviation over the seeds, and writes the JSON file and
the plot.

All budgets include what bounds cost. How settings are chosen:

* our methods: those stated below, fixed;
* DP-SGD: at each ε the best of ``GRID``, by accuracy on a fifth of the *private* records of seed 0, held out; that choice is
  charged to nobody and favours DP-SGD.

``factor`` is how much more ε the source paper's calibration needs for the very same density as ours, on the same statistics:
c = ε/(2ΔU) there, ε/W or λN(μ/ℓ)² here, so that it is the ratio of the two c, exactly.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import os
import warnings
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import DataLoader, Subset

from benchmarks import timing
from opacus_expm import ExpMQuadEngine, Stiefel, paper, tasks
from opacus_expm._tables import markdown
from opacus_expm.baselines import non_private
from opacus_expm.experiments.compare import compare
from opacus_expm.experiments.journal import Facts, Journal, write_result
from opacus_expm.experiments.methods import DP_SGD_GRID
from opacus_expm.mechanism.calibration import calibrate

EPSILONS = (0.1, 0.5, 1.0, 2.0, 5.0, 10.0)
DELTA = 1e-5
PUBLIC_RECORDS = 5000  # at the most
BATCH = 64  # records at a time in our passes; a processor's caches hold no more
TASKS = {  # no run changes a task
    name: functools.lru_cache(2)(make)
    for name, make in (("sine", tasks.sine), ("mnist", tasks.mnist), ("icu", tasks.icu))
}

# The paper's k and R for each task.
PAPER = {
    "sine": {"radius": 0.1, "proj_dim": 20, "regularization": 0.0},
    "mnist": {"radius": 0.1, "proj_dim": 400, "regularization": 1.0},
    "icu": {"radius": 0.1, "proj_dim": 20, "regularization": 0.0},
}
ONE_SHOT = {"sine": (0.1, 20), "mnist": (0.3, 400), "icu": (0.3, 20)}  # radius and proj_dim of the five arguments

GRID = {
    "sine": DP_SGD_GRID[:2],
    "mnist": tuple(
        {"learning_rate": rates, "max_grad_norm": (norm,), "sample_rate": (share,), "epochs": (epochs,)}
        for rates, norm, share, epochs in (
            ((0.003, 0.01, 0.03, 0.1, 0.3), 1.0, 0.05, 10),
            ((0.1, 0.3, 1.0), 0.1, 0.05, 10),
            ((0.003, 0.01, 0.03), 1.0, 1.0, 20),
        )
    ),
    "icu": DP_SGD_GRID,
}
NON_PRIVATE = {
    "sine": {"learning_rate": 1e-2, "batch_size": 500, "epochs": 100},
    "mnist": {"learning_rate": 1e-3, "batch_size": 256, "epochs": 10},
    "icu": {"learning_rate": 1e-2, "batch_size": 256, "epochs": 30},
}


def keep(log: Journal, cell: Facts, outcome: Facts) -> Facts:
    """Log a finished run, and show it."""
    print(cell | outcome, flush=True)
    return log.put(cell, outcome)


def loaders(task):
    """Private records, and public ones for bounds."""
    few = Subset(task.public, range(min(len(task.public), PUBLIC_RECORDS)))
    return DataLoader(task.private, batch_size=BATCH), DataLoader(few, batch_size=BATCH)


@functools.lru_cache(2)
def prepared(name: str, seed: int):
    """A task and its loaders."""
    task = TASKS[name](seed)
    return task, *loaders(task)


def one_pass(name: str, method: str, seed: int):
    """Statistics of one pass, and the function from them and a budget to a score: one pass serves every budget."""
    squared = method == "paper" and name == "icu"  # whose bounds the paper has for no logistic loss
    task = tasks.icu(seed, loss="mse") if squared else TASKS[name](seed)
    private, public = loaders(task)
    gathering = {"criterion": task.criterion, "projection": "stiefel", "progress": False}
    if method == "paper":
        return papers_pass(task, private, gathering, **PAPER[name])
    radius, k = ONE_SHOT[name]
    statistics = ExpMQuadEngine().gather(task.model, private, k, public_loader=public, **gathering)

    def release(epsilon: float, delta: float) -> dict:
        engine = ExpMQuadEngine()
        module = engine.release(statistics, epsilon, radius, delta=delta)
        return {"score": task.score(module), "spent": engine.get_epsilon(delta)}

    return release


def papers_pass(task, private, gathering: dict, *, radius: float, proj_dim: int, regularization: float):
    """The same for the source paper's practice, for which no ε can be stated."""
    found = paper.bounds_read_off(task.model, private, task.criterion)
    gathering |= {"max_grad_norm": found.gradient, "max_curvature": found.curvature}
    statistics = paper.read_off(ExpMQuadEngine().gather(task.model, private, proj_dim, **gathering))

    def release(epsilon: float, delta: float) -> dict:
        books = ExpMQuadEngine().books()
        module = paper.release(books, statistics, epsilon, radius, regularization=regularization)
        return {"score": task.score(module), "spent": None}

    return release


def passes(name: str, method: str, epsilon: float, delta: float, seed: int) -> dict:
    """One release by a method whose bounds or rounds depend on the budget; its score and what the ledger says."""
    task, private, public = prepared(name, seed)
    engine = ExpMQuadEngine()  # each release is the only one
    radius, k = ONE_SHOT[name]
    common = {"delta": delta, "criterion": task.criterion, "progress": False}
    if method == "five arguments":
        module = engine.make_private_expm(task.model, private, epsilon, radius, k, **common)
    else:  # rounds
        module = engine.make_private_expm(
            task.model, private, epsilon, radius, k, rounds=4, public_loader=public, **common
        )
    return {"score": task.score(module), "spent": engine.get_epsilon(delta)}


def tuned_dp_sgd(name: str, epsilon: float, seed: int, log: Journal) -> dict:
    """One run of Opacus with the best settings of the grid at this ε, found at seed 0."""
    common = {"methods": ["dp-sgd"], "trials": 1, "delta": DELTA, "out": f"{log.path}.cells", "progress": False}
    [row] = compare(TASKS[name](0), [epsilon], seeds=[0], grids={"dp-sgd": GRID[name]}, **common).rows
    if seed > 0:
        only = {key: (value,) for key, value in row.settings.items()}
        [row] = compare(TASKS[name](seed), [epsilon], seeds=[seed], grids={"dp-sgd": only}, **common).rows
    return {"score": row.values[0], "seconds": row.seconds, "settings": row.settings}


@functools.cache
def paper_statistics(name: str):
    """Of one pass with the paper's k and bounds on public data: what an ε buys from them is arithmetic."""
    task = TASKS[name](0)
    private, public = loaders(task)
    return ExpMQuadEngine().gather(
        task.model, private, PAPER[name]["proj_dim"], criterion=task.criterion, public_loader=public,
        projection=Stiefel(seed=0), progress=False,
    )  # fmt: skip


def factor(name: str, epsilon: float, delta: float) -> dict:
    """How much more ε the paper's calibration needs for the same density, at the paper's k, R and λ."""
    statistics = paper_statistics(name)
    sensitivity = statistics.sums.sensitivity("add_remove")
    common = {key: PAPER[name][key] for key in ("radius", "regularization")}
    common["nominal_size"] = statistics.nominal_size
    ours = calibrate(sensitivity, epsilon=epsilon, delta=delta, **common)
    theirs = paper.calibrate(sensitivity, epsilon, common["radius"])
    return {"factor": ours.inverse_temperature / theirs.inverse_temperature}


ONE_PASS = ("paper", "one-shot")  # whose statistics serve every budget
OURS = ("paper", "five arguments", "one-shot", "rounds")


def run(options, log: Journal) -> None:
    """Every cell that is not in the log yet."""
    for seed in range(options.seeds):
        run_others(options, seed, log)
        for method in (m for m in OURS if m in options.methods):
            run_ours(options, method, seed, log)


def run_others(options, seed: int, log: Journal) -> None:
    """The methods beside ours, and what the paper's calibration would cost."""
    name = options.task
    for method in ("zero-shot", "non-private"):
        cell = {"task": name, "method": method, "epsilon": None, "delta": None, "seed": seed}
        if method in options.methods and log.get(cell) is None:
            task = TASKS[name](seed)
            module = task.model
            if method == "non-private":
                module = non_private(task.model, task.private, task.criterion, seed=seed, **NON_PRIVATE[name])
            keep(log, cell, {"score": task.score(module)})
    for epsilon in options.epsilon:
        cell = {"task": name, "method": "dp-sgd", "epsilon": epsilon, "delta": DELTA, "seed": seed}
        if "dp-sgd" in options.methods and log.get(cell) is None:
            keep(log, cell, tuned_dp_sgd(name, epsilon, seed, log))
        for delta in options.delta:
            cell = {"task": name, "method": "factor", "epsilon": epsilon, "delta": delta, "seed": 0}
            if "factor" in options.methods and log.get(cell) is None:
                keep(log, cell, factor(name, epsilon, delta))


def run_ours(options, method: str, seed: int, log: Journal) -> None:
    """One of our methods at every budget; the first of those that share a pass has its time."""
    name, release = options.task, None
    for epsilon, delta in itertools.product(options.epsilon, options.delta):
        cell = {"task": name, "method": method, "epsilon": epsilon, "delta": delta, "seed": seed}
        if log.get(cell) is not None or (method == "paper" and delta > 0):
            continue

        def once(epsilon=epsilon, delta=delta) -> Facts:
            nonlocal release
            if method not in ONE_PASS:
                return passes(name, method, epsilon, delta, seed)
            release = one_pass(name, method, seed) if release is None else release
            return release(epsilon, delta)

        result, seconds = timing.seconds(once)
        keep(log, cell, result | {"seconds": seconds})


def summary(log: Journal, task: str) -> dict:
    """All that was found for a task: the scores of every method and budget, the paper's factors, DP-SGD's settings."""
    runs = [cell | outcome for cell, outcome in log.entries() if cell["task"] == task]
    scores: dict[tuple, dict[int, float]] = {}
    settings: dict[tuple, dict] = {}
    for r in runs:
        key = (r["method"], r["delta"], r["epsilon"])
        if "score" in r:
            scores.setdefault(key, {})[r["seed"]] = r["score"]
        if "settings" in r:
            settings[key] = r["settings"]
    order = ("zero-shot", "non-private", "dp-sgd", *OURS)
    names = ("method", "delta", "epsilon")
    rows = [
        {**dict(zip(names, key, strict=True)), "scores": [found[seed] for seed in sorted(found)]}
        for key, found in sorted(
            scores.items(), key=lambda item: (order.index(item[0][0]), item[0][1] or 0, item[0][2] or 0)
        )
    ]
    return {
        "task": task,
        "grid": GRID[task],
        "rows": rows,
        "settings": [{**dict(zip(names, key, strict=True)), "chosen": found} for key, found in settings.items()],
        "factors": [{key: r[key] for key in ("delta", "epsilon", "factor")} for r in runs if r["method"] == "factor"],
    }


def table(found: dict) -> str:
    """Mean ± standard deviation over the seeds in Markdown, with the number of seeds; and the factors."""
    digits = 4 if found["task"] == "sine" else 1
    epsilons = sorted({r["epsilon"] for r in found["rows"] if r["epsilon"] is not None})
    cells: dict[str, dict[float | None, str]] = {}
    for r in found["rows"]:
        label = r["method"] if r["delta"] is None else f"{r['method']}, δ = {r['delta']:g}"
        text = f"{np.mean(r['scores']):.{digits}f}"
        if len(r["scores"]) > 1:
            text += f" ± {np.std(r['scores'], ddof=1):.{digits}f}"
        cells.setdefault(f"{label} ({len(r['scores'])} seeds)", {})[r["epsilon"]] = text
    lines = [
        [label, *(by_epsilon.get(e, by_epsilon.get(None, "–")) for e in epsilons)]
        for label, by_epsilon in cells.items()
    ]
    metric = "test loss" if found["task"] == "sine" else "test accuracy (%)"
    parts = [markdown([metric, *(f"ε = {e:g}" for e in epsilons)], lines)]
    for delta in sorted({f["delta"] for f in found["factors"]}):
        chosen = {f["epsilon"]: f"{f['factor']:.3g}" for f in found["factors"] if f["delta"] == delta}
        label = f"ε of the paper's calibration for the same density, over ours at δ = {delta:g}"
        parts.append(label + ": " + ", ".join(f"{chosen[e]} (ε = {e:g})" for e in sorted(chosen)))
    return "\n\n".join(parts)


def plot(found: dict, path: str) -> None:
    """Mean against ε, with bars of one standard deviation: pure guarantees to the left, (ε, δ) to the right."""
    import matplotlib.pyplot as plt

    deltas = sorted({r["delta"] for r in found["rows"] if r["delta"] is not None})
    figure, panels = plt.subplots(
        1, len(deltas), figsize=(5.5 * len(deltas), 4.8), layout="constrained", sharey=True, squeeze=False
    )
    names = dict.fromkeys(r["method"] for r in found["rows"] if r["delta"] is not None)
    style = {name: (f"C{i}", "os^dvP*X<"[i]) for i, name in enumerate(names)}
    drawn = {}
    for axes, delta in zip(panels[0], deltas, strict=True):
        for r in (r for r in found["rows"] if r["delta"] is None):
            place = (0.99, np.mean(r["scores"]))
            axes.axhline(place[1], color="0.6", linewidth=1)
            axes.annotate(r["method"], place, xycoords=("axes fraction", "data"), ha="right", va="bottom", fontsize=8)
        for name, (color, marker) in style.items():
            chosen = [r for r in found["rows"] if (r["method"], r["delta"]) == (name, delta)]
            if chosen:
                mean = [np.mean(r["scores"]) for r in chosen]
                std = [np.std(r["scores"], ddof=1) if len(r["scores"]) > 1 else 0.0 for r in chosen]
                epsilons = [r["epsilon"] for r in chosen]
                drawn[name] = axes.errorbar(
                    epsilons, mean, std, color=color, marker=marker, markersize=5, elinewidth=0.7, capsize=2
                )
        axes.set_xscale("log")
        axes.set_xlabel("ε")
        axes.set_title(f"{found['task']}, δ = {delta:g}")
    panels[0, 0].set_ylabel("test loss" if found["task"] == "sine" else "test accuracy, %")
    figure.legend(drawn.values(), drawn.keys(), loc="outside right center", fontsize=8)
    figure.savefig(path, dpi=130)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("--log", type=Path, required=True, help="file of finished runs, resumed")
    parser.add_argument("--epsilon", type=float, nargs="+", default=EPSILONS)
    parser.add_argument("--delta", type=float, nargs="+", default=(0.0, DELTA))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--methods", nargs="+", default=("zero-shot", "non-private", "dp-sgd", "factor", *OURS))
    parser.add_argument("--report", action="store_true", help="print the table instead of running")
    parser.add_argument("--out", help="JSON file for the table")
    parser.add_argument("--plot", help="PNG file")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    log = Journal(options.log, "accuracy")
    if not options.report:
        run(options, log)
    found = summary(log, options.task)
    print(table(found))
    if options.out:
        write_result(options.out, found)
    if options.plot:
        plot(found, options.plot)


if __name__ == "__main__":
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "2")))
    main()
