"""``python -m benchmarks.reproduction``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.reproduction import claims, pictures
from benchmarks.reproduction.results import Reproduction
from benchmarks.reproduction.settings import TASKS
from benchmarks.reproduction.simulation import reproduce_task


def reproduced(name: str, options: argparse.Namespace) -> Reproduction:
    """The paper's figures of a task, with their data as JSON and the table of claims, in a directory."""
    found = reproduce_task(
        name,
        draws=options.draws,
        test_records=options.test_records,
        seed=options.seed,
        quick=options.quick,
        data_dir=options.data_dir,
        out=options.out,
    )
    claims.to_json(found, options.out / f"{name}.json")
    (options.out / f"{name}.md").write_text(claims.table(found) + "\n", encoding="utf-8")
    try:
        pictures.plot(found, options.out)
    except ImportError as error:  # the numbers are there without it
        print(f"no figures: {error}", file=sys.stderr)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.reproduction",
        description="The source paper's figures, with its calibration and with ours.",
    )
    parser.add_argument("task", choices=TASKS, nargs="+", help="sine is synthetic; the others need data")
    parser.add_argument("--draws", type=int, help="simulated candidates a point (default: 500; quick: 20)")
    parser.add_argument(
        "--test-records", type=int, help="test records that score them (default: all; mnist: 500; quick mnist: 200)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of data, subspaces and noise (default: %(default)s)")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("reproduction"),
        help="directory for results; a run goes on there (default: %(default)s)",
    )
    parser.add_argument("--quick", action="store_true", help="few draws and records: about a minute")
    parser.add_argument("--data-dir", type=Path, help="where the data is, if not in OPACUS_EXPM_DATA or the cache")
    options = parser.parse_args(arguments)
    found = []
    try:
        for name in options.task:
            found.append(reproduced(name, options))
            print(claims.table(found[-1]) + "\n")
    except (FileNotFoundError, TypeError, ValueError) as error:
        parser.error(str(error))
    if len(found) > 1:
        print(claims.summary(found) + "\n")
    print(f"written to {options.out}: " + ", ".join(sorted(p.name for p in options.out.iterdir())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
