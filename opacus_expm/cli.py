"""The command line: ``opacus-expm demo`` and ``opacus-expm epsilon``."""

from __future__ import annotations

import argparse
import copy
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from opacus_expm import _check, tasks
from opacus_expm.accountant import ExpMAccountant
from opacus_expm.engine import ExpMQuadEngine
from opacus_expm.ledger import LedgerFile


def demo(epsilon: float, radius: float, proj_dim: int, seed: int) -> str:
    """Fine-tune the sine regression privately; a table of losses and the ε spent.

    The noise is fresh in every run; ``seed`` fixes the data, the pretraining and the subspace only.
    """
    _check.positive("epsilon", epsilon)
    _check.positive("radius", radius)
    _check.positive_int("proj_dim", proj_dim)
    task = tasks.sine(_check.seed("seed", seed))
    engine = ExpMQuadEngine()
    private = engine.make_private_expm(
        task.model,
        DataLoader(task.private, batch_size=500),
        epsilon,
        radius,
        proj_dim,
        criterion=task.criterion,
        public_loader=DataLoader(task.public, batch_size=500),
        projection_seed=seed,
    )
    unprotected = copy.deepcopy(task.model)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        tasks.fit(unprotected, task.private, task.criterion, epochs=100, batch_size=500, learning_rate=1e-2)
    rows = [("zero-shot", task.model), ("private", private), ("non-private", unprotected)]
    lines = ["test loss (mean squared error) of the sine regression"]
    lines += [f"  {name:12s} {tasks.loss(model, task.test, task.criterion):.4f}" for name, model in rows]
    lines.append(f"spent: epsilon = {engine.get_epsilon(delta=0.0):g} at delta = 0")
    return "\n".join(lines)


def spent(ledger: Path, delta: float) -> dict[str, Any]:
    """What a ledger file holds and what it cost at δ, as plain JSON values."""
    if not ledger.exists():
        raise ValueError(f"ledger {str(ledger)!r} does not exist; pass the file given to an engine as ledger_path")
    accountant = ExpMAccountant(ledger_path=ledger)
    epsilon, method = accountant.get_epsilon(delta, return_method=True)
    return {
        "ledger": str(ledger),
        "delta": delta,
        "epsilon": None if math.isinf(epsilon) else epsilon,
        "bound": method,
        "events": LedgerFile(ledger).entries(),
    }


def _spent_text(found: dict[str, Any]) -> str:
    """The same for people."""
    lines, steps = [], 0
    for event in found["events"]:
        facts = event.get("release")
        if facts is None:
            steps += 1
            continue
        if "bound" in facts:
            lines.append(
                f"{event['time']}  purchase: {facts['bound']}, epsilon {facts['epsilon_range']:.4g} ({facts['adjacency']})"
            )
            continue
        mu = "" if facts["mu"] is None else f", mu {facts['mu']:.4g}"
        lines.append(
            f"{event['time']}  release: epsilon {facts['epsilon']:g}, delta {facts['delta']:g} ({facts['calibration']}, "
            f"range {facts['epsilon_range']:.4g}{mu}, {facts['adjacency']})"
        )
    if steps:
        lines.append(f"{steps} DP-SGD steps")
    epsilon = "no finite epsilon" if found["epsilon"] is None else f"epsilon = {found['epsilon']:.6g}"
    lines.append(f"total: {epsilon} at delta = {found['delta']:g} (bound: {found['bound']})")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of the console script."""
    parser = argparse.ArgumentParser(prog="opacus-expm", description="One-shot private fine-tuning.")
    commands = parser.add_subparsers(dest="command", required=True)
    show = commands.add_parser("demo", help="fine-tune the paper's sine regression (synthetic, no download)")
    show.add_argument("--epsilon", type=float, default=1.0, help="privacy budget (default: %(default)s)")
    show.add_argument("--radius", type=float, default=0.1, help="how far the weights may move (default: %(default)s)")
    show.add_argument("--proj-dim", type=int, default=20, help="dimension of the subspace (default: %(default)s)")
    show.add_argument("--seed", type=int, default=0, help="of data and subspace, not of noise (default: %(default)s)")
    cost = commands.add_parser("epsilon", help="what a ledger file holds and what it cost in total")
    cost.add_argument("ledger", type=Path, help="file given to an engine as ledger_path")
    cost.add_argument(
        "--delta", type=float, default=0.0, help="delta of the statement (default: 0, the pure guarantee)"
    )
    cost.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(arguments)
    try:
        if options.command == "demo":
            print(demo(options.epsilon, options.radius, options.proj_dim, options.seed))
        else:
            found = spent(options.ledger, options.delta)
            print(json.dumps(found, indent=1) if options.json else _spent_text(found))
    except (TypeError, ValueError) as error:
        parser.error(str(error))
    return 0
