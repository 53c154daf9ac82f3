"""Command line of the suite: every cell that is not in the log yet, then the results, the table and the figure."""

from __future__ import annotations

import argparse
import math
import os
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch

import benchmarks.suite
from benchmarks.suite import metric, ours, report, rivals
from opacus_expm.experiments.journal import Facts, Journal, read_result, write_result

METHODS = ("zero-shot", "non-private", "ours", "pure", "free", "charged", "untuned")
WITHOUT_BUDGET = METHODS[:2]
ASKED_FOR = ("cited", "metric", "plain", "public")  # no part of a run unless they are named
SEARCHED = ("free", "metric")
HERE = Path(__file__).parent


def one(name: str, method: str, epsilon: float | None, seed: int, log: Journal, searched: int) -> Facts:
    """One run of a method, from the log or made now.

    DP-SGD's own runs are in the log one by one; which of them is the tuned one is found again each time.
    """
    if epsilon is not None and method in SEARCHED:
        return (rivals.free if method == "free" else metric.tuned)(name, epsilon, seed, log, searched=range(searched))
    if epsilon is not None and method in ("charged", "untuned"):
        return (rivals.charged if method == "charged" else rivals.untuned)(name, epsilon, seed, log)
    if epsilon is not None and method == "cited":
        return ours.cited(name, epsilon, seed)
    delta = 0.0 if method == "pure" else rivals.DELTA
    cell = {"task": name, "method": method, "epsilon": epsilon, "delta": delta, "seed": seed}
    if (found := log.get(cell)) is None:
        if epsilon is not None:
            made = (
                ours.pure(name, epsilon, seed) if method == "pure" else ours.ours(name, epsilon, seed, _source(method))
            )
        else:
            made = (ours.zero_shot if method == "zero-shot" else ours.without_privacy)(name, seed)
        found = log.put(cell, made)
        print({**cell, **{key: found[key] for key in ("score", "seconds", "passes")}}, flush=True)
    return found


def _source(method: str) -> ours.Source:
    """Where the metric of one of this engine's rows comes from."""
    return "plain" if method == "plain" else "public" if method == "public" else "ours"


def run(
    names: Sequence[str],
    methods: Sequence[str],
    epsilons: Sequence[float],
    seeds: int,
    out: Path,
    *,
    searched: int | None = None,
) -> None:
    """Every task with every method at every budget; a task's file is written whenever one of its rows is complete.

    Args:
        names: of tasks.
        methods: those of ``METHODS`` or of ``ASKED_FOR``.
        epsilons: budgets.
        seeds: how many; they are 0, 1, ...
        out: directory of the log and the results.
        searched: seeds whose test scores choose the settings of ``SEARCHED``; all of them by default.
    """
    log = Journal(out / "log.jsonl", "suite")
    searched = seeds if searched is None else searched
    for name in names:
        for method in methods:
            for epsilon in (None,) if method in WITHOUT_BUDGET else epsilons:
                runs = [{"seed": seed, **one(name, method, epsilon, seed, log, searched)} for seed in range(seeds)]
                row: Facts = {"method": method, "epsilon": epsilon, "runs": runs}
                keep(out / f"{name}.json", name, row | ({"searched": searched} if method in SEARCHED else {}))


def keep(path: Path, name: str, row: Facts) -> None:
    """Put a row into a task's file, in the place of the one with the same method and budget."""
    rows = read_result(path)["rows"] if path.exists() else []
    rows = [old for old in rows if (old["method"], old["epsilon"]) != (row["method"], row["epsilon"])] + [row]
    law = {0.0: "logarithmic", 1.0: "geometric", math.inf: "Poisson"}
    write_result(
        path,
        {
            "task": name,
            "metric": rivals.task_of(name, 0).metric,
            "delta": rivals.DELTA,
            "grid": rivals.GRIDS[name],
            "grid of metric": metric.grid(name),
            "trials": {"mean": rivals.TRIALS.mean, "law": law[rivals.TRIALS.shape]},
            "rows": sorted(rows, key=lambda row: (report.ORDER.index(row["method"]), row["epsilon"] or 0.0)),
        },
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.suite", description=(benchmarks.suite.__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("tasks", nargs="*", help=f"all by default: {', '.join(rivals.GRIDS)}")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epsilons", type=float, nargs="+", default=rivals.EPSILONS)
    parser.add_argument("--methods", nargs="+", choices=(*METHODS, *ASKED_FOR), default=METHODS)
    parser.add_argument(
        "--searched", type=int, help="seeds whose test scores choose the settings of 'free' and 'metric'; default: all"
    )
    parser.add_argument("--out", type=Path, default=HERE, help="directory of the log and the results")
    parser.add_argument("--report", action="store_true", help="run nothing; make the table and the figure")
    options = parser.parse_args(arguments)
    if unknown := sorted(set(options.tasks) - set(rivals.GRIDS)):
        parser.error(f"tasks must be among {', '.join(rivals.GRIDS)}, got {', '.join(unknown)}")
    if options.seeds < 1 or (options.searched is not None and options.searched < 1):
        parser.error("--seeds and --searched must be 1 or greater")
    if not options.report:
        names = options.tasks or list(rivals.GRIDS)
        run(names, options.methods, options.epsilons, options.seeds, options.out, searched=options.searched)
    print(report.write(options.out))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "2")))
    main()
