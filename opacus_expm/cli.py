"""The command line: ``opacus-expm compare``, ``audit`` and ``epsilon``; each loads what it needs and no more."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opacus_expm.accounting.accountant import ExpMAccountant
from opacus_expm.accounting.events import NotGuaranteed
from opacus_expm.accounting.ledger import LedgerFile

if TYPE_CHECKING:
    from opacus_expm.experiments.results import Comparison


def compared(
    name: str,
    epsilons: Sequence[float] | None,
    delta: float,
    draws: int,
    seeds: int | None,
    trials: int,
    out: Path,
    quick: bool,
    data_dir: Path | None,
) -> Comparison:
    """A task's comparison, with its table, CSV, JSON and figure in ``out``."""
    from opacus_expm.experiments import tasks
    from opacus_expm.experiments.compare import compare

    task = tasks.sine() if name == "sine" else getattr(tasks, name)(data_dir=data_dir)
    found = compare(
        task,
        epsilons or ((0.1, 1.0, 10.0) if quick else (0.1, 0.3, 1.0, 3.0, 10.0)),
        delta=delta,
        draws=draws,
        trials=trials,
        seeds=seeds or (3 if quick else 5),
        quick=quick,
        out=out,
    )
    found.to_csv(out / f"{name}.csv")
    found.to_json(out / f"{name}.json")
    try:
        found.plot(out / f"{name}.png")
    except ImportError as error:  # the numbers are there without it
        print(f"no figure: {error}", file=sys.stderr)
    return found


def audited(epsilon: float, delta: float, releases: int, draws: int, seed: int | None) -> bool:
    """Print an audit's tables, each as soon as it is there; whether all claims held that are made."""
    from opacus_expm import audit

    print("Worst neighbouring data sets within the clipping bounds, exactly:\n")
    exact = audit.audit_exact(epsilon, delta)
    print(exact, "\n\nLearned rounds, the joint law of parts that follow one another, exactly:\n", sep="", flush=True)
    learned = audit.audit_learned(epsilon, delta)
    print(
        learned, "\n\nA canary, told from released models alone (lower bounds, 95 % confidence):\n", sep="", flush=True
    )
    box = audit.audit_black_box(epsilon, delta, releases=releases, draws=draws, seed=seed)
    print(
        box,
        "\n\nThe source paper's practice, bounds read off the private data (no guarantee is stated for it):\n",
        sep="",
    )
    print(audit.paper_practice(epsilon))
    return exact.holds and learned.holds and box.holds


def spent(ledger: Path, delta: float) -> dict[str, Any]:
    """What a ledger file holds and what it cost at δ, as plain JSON values."""
    if not ledger.exists():
        raise ValueError(f"ledger {str(ledger)!r} does not exist; pass the file given to an engine as ledger_path")
    accountant = ExpMAccountant(ledger_path=ledger)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NotGuaranteed)  # said below
        epsilon, method = accountant.get_epsilon(delta, return_method=True)
    return {
        "ledger": str(ledger),
        "delta": delta,
        "epsilon": None if math.isinf(epsilon) else epsilon,
        "bound": method,
        "guaranteed": accountant.guaranteed,
        "budget": None if accountant.budget is None else dataclasses.asdict(accountant.budget),
        "events": LedgerFile(ledger).entries(),
    }


def _spent_text(found: dict[str, Any]) -> str:
    """The same for people."""
    lines, steps = [], 0
    for number, event in enumerate(found["events"]):
        facts = event.get("release")
        if "budget" in event:
            late = f", declared after {number} charges" if number else ""
            lines.append("{time}  budget: epsilon {budget[epsilon]:g}, delta {budget[delta]:g}".format(**event) + late)
            continue
        if facts is None:
            steps += 1
            continue
        given = ", noise from a given generator" if facts.get("noise") == "given" else ""
        if "bound" in facts:
            lines.append(
                f"{event['time']}  purchase: {facts['bound']}, epsilon {facts['epsilon_range']:.4g} "
                f"({facts['adjacency']}{given})"
            )
            continue
        costs = {"range": facts["epsilon_range"], "mu": facts["mu"]}
        told = ", ".join(f"{name} {cost:.4g}" for name, cost in costs.items() if cost is not None)
        lines.append(
            f"{event['time']}  release: epsilon {facts['epsilon']:g}, delta {facts['delta']:g} ({facts['calibration']}, "
            f"{told}, {facts['adjacency']}{given})"
        )
    if steps:
        lines.append(f"{steps} DP-SGD steps")
    epsilon = "no finite epsilon" if found["epsilon"] is None else f"epsilon = {found['epsilon']:.6g}"
    lines.append(f"total: {epsilon} at delta = {found['delta']:g} (bound: {found['bound']})")
    if not found["guaranteed"]:
        lines.append("NOT guaranteed: stated as if nobody could know the noise that came from a given generator")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of the console script."""
    parser = argparse.ArgumentParser(prog="opacus-expm", description="One-shot private fine-tuning.")
    commands = parser.add_subparsers(dest="command", required=True)
    side = commands.add_parser("compare", help="zero-shot, non-private, Opacus DP-SGD and ExpM-Quad side by side")
    side.add_argument("task", choices=("sine", "mnist", "icu"), help="sine is synthetic; the others need data")
    side.add_argument("--epsilon", type=float, nargs="+", help="budgets (default: 0.1 0.3 1 3 10; quick: 0.1 1 10)")
    side.add_argument(
        "--delta", type=float, default=1e-5, help="of DP-SGD and of ExpM-Quad (ε, δ) (default: %(default)s)"
    )
    side.add_argument("--draws", type=int, default=1, help="above 1: simulated draws a seed instead of one release")
    side.add_argument("--seeds", type=int, help="runs of each method (default: 5; quick: 3)")
    side.add_argument("--trials", type=int, default=2, help="runs of each candidate in tuning (default: %(default)s)")
    side.add_argument("--out", type=Path, help="directory for results; a run goes on there (default: comparison-TASK)")
    side.add_argument("--quick", action="store_true", help="small grids: sine in about a minute")
    side.add_argument("--data-dir", type=Path, help="where the data is, if not in OPACUS_EXPM_DATA or the cache")
    check = commands.add_parser(
        "audit", help="what the mechanism reveals, found on synthetic data, beside what it claims"
    )
    check.add_argument("--epsilon", type=float, default=1.0, help="budget (default: %(default)s)")
    check.add_argument("--delta", type=float, default=1e-5, help="of 'gaussian' and DP-SGD (default: %(default)s)")
    check.add_argument(
        "--releases", type=int, default=1000, help="whole releases of each engine (default: %(default)s)"
    )
    check.add_argument("--draws", type=int, default=80_000, help="draws from one pass (default: %(default)s)")
    check.add_argument("--seed", type=int, help="of the black boxes' noise (default: fresh)")
    cost = commands.add_parser("epsilon", help="what a ledger file holds and what it cost in total")
    cost.add_argument("ledger", type=Path, help="file given to an engine as ledger_path")
    cost.add_argument(
        "--delta", type=float, default=0.0, help="delta of the statement (default: 0, the pure guarantee)"
    )
    cost.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(arguments)
    try:
        if options.command == "compare":
            out = options.out or Path(f"comparison-{options.task}")
            result = compared(
                options.task,
                options.epsilon,
                options.delta,
                options.draws,
                options.seeds,
                options.trials,
                out,
                options.quick,
                options.data_dir,
            )
            print(result.table())
            print(f"\nwritten to {out}: " + ", ".join(sorted(p.name for p in out.iterdir())))
        elif options.command == "audit":
            return 0 if audited(options.epsilon, options.delta, options.releases, options.draws, options.seed) else 1
        else:
            found = spent(options.ledger, options.delta)
            print(json.dumps(found, indent=1) if options.json else _spent_text(found))
    except (FileNotFoundError, TypeError, ValueError) as error:
        parser.error(str(error))
    return 0
