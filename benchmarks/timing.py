"""How benchmarks measure: items run in processes of their own, in interleaved rounds, and medians and ratios are reported.

Interleaving spreads whatever else the machine does over all items alike, so that their ratios hold even where the times
themselves do not. Every single run is kept in a journal, and not made again.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from opacus_expm.experiments.journal import Facts, Journal

Result = TypeVar("Result")


@dataclass(frozen=True)
class Timings:
    """What the runs of several items reported.

    Attributes:
        runs: by item, one report a round; items that could not be measured are left out.
    """

    runs: Mapping[str, Sequence[Facts]]

    def median(self, item: str, fact: str) -> float:
        """The median of one fact over the rounds; of an even number of runs the larger of the two in the middle."""
        return float(statistics.median_high(run[fact] for run in self.runs[item]))

    def medians(self, *facts: str) -> dict[str, dict[str, float]]:
        """The medians of these facts, by item."""
        return {item: {fact: self.median(item, fact) for fact in facts} for item in self.runs}

    def ratio(self, item: str, base: str, fact: str) -> float:
        """How many times the median of ``base`` that of ``item`` is."""
        return self.median(item, fact) / self.median(base, fact)


def interleaved(
    items: Sequence[str],
    run: Callable[[str], Facts | None],
    journal: Journal,
    *,
    rounds: int = 1,
    common: Mapping[str, object] | None = None,
) -> Timings:
    """Measure every item once, then every item again, and so on; what the journal has is not measured again.

    Args:
        items: their names.
        run: measures an item; None where it cannot be measured.
        journal: finished runs.
        rounds: how often each item is measured.
        common: further facts that tell these runs from others of the same item.
    """
    found: dict[str, list[Facts]] = {}
    for number in range(rounds):
        for item in items:
            cell = {"item": item, "round": number, **(common or {})}
            outcome = journal.get(cell)
            if outcome is None:
                outcome = run(item)
                if outcome is None:
                    continue
                journal.put(cell, outcome)
            found.setdefault(item, []).append(outcome)
    return Timings({item: found[item] for item in items if item in found})


def start(module: str, *arguments: str, one_thread: bool = False) -> subprocess.Popen[str]:
    """Start ``python -m module``, whose output ``report`` reads."""
    environment = os.environ | ({"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"} if one_thread else {})
    command = [sys.executable, "-m", module, *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def report(process: subprocess.Popen[str]) -> Facts:
    """The last line that a process prints, which is JSON.

    Raises:
        RuntimeError: the process failed; the message is what it said.
    """
    printed, errors = process.communicate()
    if process.returncode:
        raise RuntimeError(errors.strip() or f"exit code {process.returncode}")
    found: Facts = json.loads(printed.strip().splitlines()[-1])
    return found


def peak_mb() -> float:
    """Peak resident set of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def cpu_seconds(action: Callable[[], Result]) -> tuple[Result, float]:
    """What an action returns, and its CPU seconds."""
    begin = time.process_time()
    result = action()
    return result, time.process_time() - begin


def seconds(action: Callable[[], Result]) -> tuple[Result, float]:
    """What an action returns, and its seconds."""
    begin = time.perf_counter()
    result = action()
    return result, time.perf_counter() - begin


def median_seconds(action: Callable[[], object], repeats: int = 3) -> float:
    """The median of several runs in this process."""
    return statistics.median_high(seconds(action)[1] for _ in range(repeats))
