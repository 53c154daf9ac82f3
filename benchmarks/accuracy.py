"""Accuracy at equal privacy: every way to run the engine, Opacus DP-SGD tuned, and non-private fine-tuning.

    python benchmarks/accuracy.py mnist --log mnist.jsonl [--epsilon 0.1 1 10] [--seeds 5] [--methods dp-sgd one-shot ...]
    python benchmarks/accuracy.py mnist --log mnist.jsonl --report [--out accuracy.json] [--plot accuracy.png]

Every run is appended to the log as one line and not made again, so that a run can be interrupted, resumed, and shared
between processes. ``--report`` prints mean ± standard deviation over the seeds, and writes the JSON file and the plot.

All budgets include what bounds cost. The settings of our methods are stated below or chosen by ``suggest``, which sees
public data alone. DP-SGD is given the best of ``GRID`` for its task at each ε, judged by the test data of seed 0, which
favours it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import time
import warnings

sys.path = [p for p in sys.path if p != os.path.dirname(os.path.abspath(__file__))]

import numpy as np  # noqa: E402
import torch  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402

from opacus_expm import ExpMQuadEngine, tasks  # noqa: E402
from opacus_expm.comparison import dp_sgd, non_private  # noqa: E402
from opacus_expm.suggestion import Candidate, shifted_records, suggest  # noqa: E402

EPSILONS = (0.1, 0.5, 1.0, 2.0, 5.0, 10.0)
DELTA = 1e-5
TASKS = {"sine": tasks.sine, "mnist": tasks.mnist, "icu": tasks.icu}

# The paper's k and R for each task, and the sizes of the public subspace.
PAPER = {
    "sine": {"radius": 0.1, "proj_dim": 20, "regularization": 0.0},
    "mnist": {"radius": 0.1, "proj_dim": 400, "regularization": 1.0},
    "icu": {"radius": 0.1, "proj_dim": 20, "regularization": 0.0},
}
ONE_SHOT = {"sine": (0.1, 20), "mnist": (0.3, 400), "icu": (0.3, 20)}  # radius and proj_dim of the five arguments

GRID = {  # learning rate and clipping norm; batch size and epochs
    "sine": ([(0.003, 1.0), (0.01, 1.0), (0.03, 1.0), (0.3, 0.1)], [(250, 10), (1000, 30)]),
    "mnist": ([(0.01, 1.0), (0.03, 1.0), (0.1, 1.0)], [(1024, 10), (4096, 20)]),
    "icu": ([(0.03, 1.0), (0.1, 1.0), (0.3, 1.0), (1.0, 0.3)], [(128, 10), (512, 30)]),
}
NON_PRIVATE = {
    "sine": {"learning_rate": 1e-2, "batch_size": 500, "epochs": 100},
    "mnist": {"learning_rate": 1e-3, "batch_size": 256, "epochs": 10},
    "icu": {"learning_rate": 1e-2, "batch_size": 256, "epochs": 30},
}
# What ``suggest`` chooses from.
CANDIDATES = {
    "preconditioned": [Candidate("preconditioned", None, t, r) for t, r in itertools.product((4, 8), (1.0, 2.0, 4.0))],
    "pure": [
        Candidate(kind, k, 1, r)
        for (kind, k), r in itertools.product(
            (("public", 100), ("public", 400), ("preconditioned", None)), (0.1, 0.3, 1.0)
        )
    ],
}


class Log:
    """Finished runs, one line of JSON each."""

    def __init__(self, path: str):
        self.path = path

    def runs(self) -> list[dict]:
        """All runs so far, also those of other processes."""
        if not os.path.exists(self.path):
            return []
        with open(self.path) as file:
            return [json.loads(line) for line in file]

    def find(self, **wanted) -> dict | None:
        """The run with these facts."""
        return next((r for r in self.runs() if all(r.get(k) == v for k, v in wanted.items())), None)

    def add(self, **facts) -> None:
        """Append one line."""
        with open(self.path, "a") as file:
            file.write(json.dumps(facts) + "\n")
        print({k: v for k, v in facts.items() if k != "explanation"}, flush=True)


def loaders(task):
    """Private and public loaders."""
    return DataLoader(task.private, batch_size=512), DataLoader(task.public, batch_size=512)


def ours(name: str, method: str, epsilon: float, delta: float, seed: int, log: Log) -> dict:
    """One release by one of our methods; its score and what the ledger says."""
    task = TASKS[name](seed)
    private, public = loaders(task)
    engine = ExpMQuadEngine()
    radius, k = ONE_SHOT[name]
    common = {"delta": delta, "criterion": task.criterion, "progress": False}
    if method == "paper":
        paper = PAPER[name]
        module = engine.make_private_expm(
            task.model, private, epsilon, paper["radius"], paper["proj_dim"], regularization=paper["regularization"],
            bounds="paper", calibration="paper", **common,
        )  # fmt: skip
        return {"score": task.score(module), "spent": None}
    if method == "five arguments":
        module = engine.make_private_expm(task.model, private, epsilon, radius, k, **common)
    elif method == "one-shot":
        module = engine.make_private_expm(task.model, private, epsilon, radius, k, public_loader=public, **common)
    elif method == "joint":
        module = engine.make_private_expm(task.model, private, epsilon, radius, k, clipping="joint", **common)
    elif method == "rounds":
        module = engine.make_private_expm(
            task.model, private, epsilon, radius, k, rounds=4, projection="sparse", public_loader=public, **common
        )
    elif method == "public":
        module = engine.make_private_expm(
            task.model, private, epsilon, radius, k, projection="public", public_loader=public, **common
        )
    else:  # suggested
        settings = suggested(name, epsilon, delta, log)
        found = settings["arguments"]
        found = {**found, "public_loader": DataLoader(shifted_records(public), batch_size=512)}
        module = engine.make_private_expm(task.model, private, epsilon, **found, **common)
    return {"score": task.score(module), "spent": engine.get_epsilon(delta)}


def suggested(name: str, epsilon: float, delta: float, log: Log) -> dict:
    """Settings chosen on the public data of seed 0, once for a budget."""
    wanted = {"task": name, "method": "suggestion", "epsilon": epsilon, "delta": delta}
    if (found := log.find(**wanted)) is None:
        task = TASKS[name](0)
        choice = suggest(
            task.model, loaders(task)[1], epsilon, delta, len(task.private), criterion=task.criterion,
            candidates=CANDIDATES["preconditioned" if delta > 0 else "pure"],
        )  # fmt: skip
        arguments = {k: v for k, v in choice.arguments().items() if k != "public_loader"}
        log.add(**wanted, seed=-1, arguments=arguments, explanation=str(choice))
        found = log.find(**wanted)
    return found


def tuned(name: str, epsilon: float, log: Log) -> tuple:
    """The best of the grid at this ε, at seed 0."""
    task = None
    for (rate, norm), (batch, epochs) in itertools.product(*GRID[name]):
        facts = {"task": name, "method": "dp-sgd grid", "epsilon": epsilon, "delta": DELTA, "seed": 0}
        facts["settings"] = [rate, norm, batch, epochs]
        if log.find(**facts) is None:
            task = task or TASKS[name](0)
            log.add(**facts, **one_dp_sgd(task, epsilon, rate, norm, batch, epochs, seed=0))
    runs = [r for r in log.runs() if r["method"] == "dp-sgd grid" and r["task"] == name and r["epsilon"] == epsilon]
    sign = 1 if name == "sine" else -1
    return min(runs, key=lambda r: sign * r["score"])["settings"]


def one_dp_sgd(task, epsilon: float, rate: float, norm: float, batch: int, epochs: int, seed: int) -> dict:
    """One run of Opacus."""
    start = time.perf_counter()
    module = dp_sgd(
        task.model, task.private, task.criterion, epsilon=epsilon, delta=DELTA, learning_rate=rate, max_grad_norm=norm,
        batch_size=batch, epochs=epochs, seed=seed,
    )  # fmt: skip
    return {"score": task.score(module), "seconds": time.perf_counter() - start}


OURS = ("paper", "five arguments", "one-shot", "joint", "rounds", "public", "suggested")


def run(options, log: Log) -> None:
    """Every cell that is not in the log yet."""
    name = options.task
    for seed in range(options.seeds):
        for method in ("zero-shot", "non-private"):
            facts = {"task": name, "method": method, "epsilon": None, "delta": None, "seed": seed}
            if method in options.methods and log.find(**facts) is None:
                task = TASKS[name](seed)
                module = task.model
                if method == "non-private":
                    module = non_private(task.model, task.private, task.criterion, seed=seed, **NON_PRIVATE[name])
                log.add(**facts, score=task.score(module))
        for epsilon in options.epsilon:
            if "dp-sgd" in options.methods:
                facts = {"task": name, "method": "dp-sgd", "epsilon": epsilon, "delta": DELTA, "seed": seed}
                settings = tuned(name, epsilon, log)
                if log.find(**facts) is None:
                    done = log.find(**{**facts, "method": "dp-sgd grid", "settings": settings})  # seed 0
                    result = done or one_dp_sgd(TASKS[name](seed), epsilon, *settings, seed=seed)
                    log.add(**{**result, **facts, "settings": settings})
            for method, delta in itertools.product(OURS, options.delta):
                facts = {"task": name, "method": method, "epsilon": epsilon, "delta": delta, "seed": seed}
                wanted = method in options.methods and not (method == "paper" and delta > 0)
                if wanted and log.find(**facts) is None:
                    start = time.perf_counter()
                    result = ours(name, method, epsilon, delta, seed, log)
                    log.add(**facts, **result, seconds=time.perf_counter() - start)


def report(options, log: Log) -> list[dict]:
    """Mean ± standard deviation over the seeds, as a table."""
    cells: dict[tuple, list[float]] = {}
    for r in log.runs():
        if r["task"] == options.task and "score" in r and r["method"] != "dp-sgd grid":
            cells.setdefault((r["method"], r["delta"], r["epsilon"]), []).append(r["score"])
    rows = []
    for (method, delta, epsilon), scores in cells.items():
        std = float(np.std(scores, ddof=1)) if len(scores) > 1 else None
        mean = float(np.mean(scores))
        rows.append(
            {"method": method, "delta": delta, "epsilon": epsilon, "mean": mean, "std": std, "seeds": len(scores)}
        )
    epsilons = sorted({r["epsilon"] for r in rows if r["epsilon"] is not None})
    print(f"{options.task}: mean ± standard deviation over seeds (number of seeds)")
    print(f"{'':24}" + "".join(f"{f'eps {e:g}':>20}" for e in epsilons))
    for method, delta in sorted({(r["method"], r["delta"]) for r in rows}, key=str):
        label = method if delta is None else f"{method}, delta {delta:g}"
        line = f"{label:24}"
        for e in epsilons if delta is not None else [None]:
            found = next((r for r in rows if (r["method"], r["delta"], r["epsilon"]) == (method, delta, e)), None)
            if found is None:
                line += f"{'-':>20}"
                continue
            std = "" if found["std"] is None else f" ± {found['std']:.3g}"
            text = f"{found['mean']:.4g}{std} ({found['seeds']})"
            line += f"{text:>20}"
        print(line)
    return rows


def plot(rows: list[dict], task: str, path: str) -> None:
    """Mean against ε, with bands of one standard deviation."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.5))
    styles = itertools.cycle(itertools.product(("-", "--", ":", "-."), ("o", "s", "^", "d")))
    for method, delta in sorted({(r["method"], r["delta"]) for r in rows}, key=str):
        line, marker = next(styles)
        chosen = sorted(
            (r for r in rows if (r["method"], r["delta"]) == (method, delta)), key=lambda r: r["epsilon"] or 0
        )
        mean, std = np.array([r["mean"] for r in chosen]), np.array([r["std"] or 0.0 for r in chosen])
        if delta is None:
            axes.axhline(mean[0], color="0.6", linestyle=line, linewidth=1)
            axes.annotate(
                method, (0.99, mean[0]), xycoords=("axes fraction", "data"), ha="right", va="bottom", fontsize=8
            )
            continue
        epsilons = [r["epsilon"] for r in chosen]
        (drawn,) = axes.plot(epsilons, mean, line, marker=marker, markersize=4, label=f"{method}, δ = {delta:g}")
        axes.fill_between(epsilons, mean - std, mean + std, alpha=0.15, color=drawn.get_color())
    axes.set_xscale("log")
    axes.set_xlabel("ε")
    axes.set_ylabel("test loss" if task == "sine" else "test accuracy, %")
    axes.set_title(f"{task}: fine-tuning at equal privacy")
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=130)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("--log", required=True, help="file of finished runs, resumed")
    parser.add_argument("--epsilon", type=float, nargs="+", default=EPSILONS)
    parser.add_argument("--delta", type=float, nargs="+", default=(0.0, DELTA))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--methods", nargs="+", default=("zero-shot", "non-private", "dp-sgd", *OURS))
    parser.add_argument("--report", action="store_true", help="print the table instead of running")
    parser.add_argument("--out", help="JSON file for the table")
    parser.add_argument("--plot", help="PNG file")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    log = Log(options.log)
    if not options.report:
        run(options, log)
    rows = report(options, log)
    if options.out:
        with open(options.out, "w") as file:
            json.dump({"task": options.task, "grid": GRID[options.task], "rows": rows}, file, indent=1)
    if options.plot:
        plot(rows, options.task, options.plot)


if __name__ == "__main__":
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "2")))
    main()
