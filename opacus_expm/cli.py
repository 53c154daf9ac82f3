"""The command line: ``opacus-expm demo``."""

from __future__ import annotations

import argparse
import copy
from collections.abc import Sequence

import torch
from torch.utils.data import DataLoader

from opacus_expm import _check, tasks
from opacus_expm.engine import ExpMQuadEngine


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


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of the console script."""
    parser = argparse.ArgumentParser(prog="opacus-expm", description="One-shot private fine-tuning.")
    commands = parser.add_subparsers(dest="command", required=True)
    show = commands.add_parser("demo", help="fine-tune the paper's sine regression (synthetic, no download)")
    show.add_argument("--epsilon", type=float, default=1.0, help="privacy budget (default: %(default)s)")
    show.add_argument("--radius", type=float, default=0.1, help="how far the weights may move (default: %(default)s)")
    show.add_argument("--proj-dim", type=int, default=20, help="dimension of the subspace (default: %(default)s)")
    show.add_argument("--seed", type=int, default=0, help="of data and subspace, not of noise (default: %(default)s)")
    options = parser.parse_args(arguments)
    try:
        print(demo(options.epsilon, options.radius, options.proj_dim, options.seed))
    except (TypeError, ValueError) as error:
        parser.error(str(error))
    return 0
