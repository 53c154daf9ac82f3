"""The console script ``opacus-expm``: its options, read before anything heavy is loaded.

It stands beside the package because importing the package loads torch and registers the accountant with Opacus, which takes
seconds. ``opacus_expm.cli`` does the work.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path


def parser() -> argparse.ArgumentParser:
    """The commands and their options."""
    found = argparse.ArgumentParser(prog="opacus-expm", description="Private fine-tuning for Opacus users.")
    found.add_argument("--version", action="version", version=f"%(prog)s {version('opacus-expm')}")
    commands = found.add_subparsers(dest="command", required=True)
    side = commands.add_parser(
        "compare", help="zero-shot, non-private, Opacus DP-SGD (tuned) and ExpM-Quad (untuned) side by side"
    )
    side.add_argument("task", choices=("sine", "mnist", "icu"), help="sine is synthetic; the others need data")
    side.add_argument("--epsilon", type=float, nargs="+", help="budgets (default: 0.1 0.3 1 3 10; quick: 0.1 1 10)")
    side.add_argument(
        "--delta", type=float, default=1e-5, help="of DP-SGD and of ExpM-Quad (ε, δ) (default: %(default)s)"
    )
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
    cost.add_argument(
        "--plot", action="store_true", help="also draw the spent epsilon, charge by charge, to LEDGER.png"
    )
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Read the options, and only then load what does the work."""
    reader = parser()
    options = reader.parse_args(arguments)
    from opacus_expm import cli

    try:
        return cli.run(options)
    except (FileNotFoundError, ImportError, TypeError, ValueError) as error:
        reader.error(str(error))
