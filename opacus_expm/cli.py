"""What the command line does: ``opacus-expm compare``, ``audit`` and ``epsilon``; each loads what it needs and no more."""

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
from opacus_expm_command import main

if TYPE_CHECKING:
    from opacus_expm.experiments.results import Comparison

__all__ = ["audited", "compared", "main", "run", "spent"]


def compared(
    name: str,
    epsilons: Sequence[float] | None,
    delta: float,
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
        if "budget" in event:
            late = f", declared after {number} charges" if number else ""
            lines.append("{time}  budget: epsilon {budget[epsilon]:g}, delta {budget[delta]:g}".format(**event) + late)
        elif "release" in event:
            lines.append(f"{event['time']}  {_charge_text(event['release'])}")
        else:
            steps += 1
    if steps:
        lines.append(f"{steps} DP-SGD steps")
    epsilon = "no finite epsilon" if found["epsilon"] is None else f"epsilon = {found['epsilon']:.6g}"
    lines.append(f"total: {epsilon} at delta = {found['delta']:g} (bound: {found['bound']})")
    if not found["guaranteed"]:
        lines.append("NOT guaranteed: stated as if nobody could know the noise that came from a given generator")
    return "\n".join(lines)


def _charge_text(facts: dict[str, Any]) -> str:
    """One charge that is no DP-SGD step of a training loop, in words."""
    given = ", noise from a given generator" if facts.get("noise") == "given" else ""
    kept = f"{facts['adjacency']}{given}"
    if "bound" in facts:
        return f"purchase: {facts['bound']}, epsilon {facts['epsilon_range']:.4g} ({kept})"
    costs = {"epsilon": facts.get("pure"), "range": facts["epsilon_range"], "mu": facts["mu"]}
    told = ", ".join(f"{name} {cost:.4g}" for name, cost in costs.items() if cost is not None)
    if facts.get("kind") == "query":
        if facts["run"] is not None:
            told = "noise {:.4g} at sample rate {:.4g}, {} steps".format(*facts["run"])
        return f"query: {facts['what']} {facts['number']} ({told}, {kept})"
    asked = f"epsilon {facts['epsilon']:g}, delta {facts['delta']:g}"
    return f"release: {asked} ({facts['calibration']}, {told}, {kept})"


def run(options: argparse.Namespace) -> int:
    """Do what the options of the console script ask for; 0 if all is well."""
    if options.command == "compare":
        out = options.out or Path(f"comparison-{options.task}")
        result = compared(
            options.task,
            options.epsilon,
            options.delta,
            options.seeds,
            options.trials,
            out,
            options.quick,
            options.data_dir,
        )
        print(result.table())
        print(f"\nwritten to {out}: " + ", ".join(sorted(p.name for p in out.iterdir())))
        return 0
    if options.command == "audit":
        return 0 if audited(options.epsilon, options.delta, options.releases, options.draws, options.seed) else 1
    found = spent(options.ledger, options.delta)
    print(json.dumps(found, indent=1) if options.json else _spent_text(found))
    if options.plot:
        from opacus_expm.experiments import spending

        picture = options.ledger.with_name(f"{options.ledger.name}.png")
        spending.plot(options.ledger, options.delta, picture)
        print(f"drawn to {picture}", file=sys.stderr)
    return 0
