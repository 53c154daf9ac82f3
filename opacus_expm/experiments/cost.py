"""Time and peak memory of a run."""

from __future__ import annotations

import ctypes
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass
class Cost:
    """Seconds and MiB of a run, known when it has ended."""

    seconds: float = math.nan
    memory: float | None = None


@contextmanager
def metered(device: torch.device) -> Iterator[Cost]:
    """Measure the time and the peak memory of the code inside."""
    cost = Cost()
    before = _reset_peak(device)
    start = time.perf_counter()
    yield cost
    cost.seconds = time.perf_counter() - start
    peak = _peak(device)
    cost.memory = None if before is None or peak is None else max(0.0, peak - before)


def _reset_peak(device: torch.device) -> float | None:
    """Start a new measurement. Returns the MiB held now, or None where this cannot be measured."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device) / 2**20
    try:
        ctypes.CDLL(None).malloc_trim(0)  # freed memory goes back to the system, or a later run would hide in it
        Path("/proc/self/clear_refs").write_text("5")  # Linux: the high-water mark starts again from here
    except (AttributeError, OSError, TypeError):
        return None
    return _peak(device)


def _peak(device: torch.device) -> float | None:
    """The largest memory in MiB since the measurement began."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return float(line.split()[1]) / 2**10
    except OSError:
        pass
    return None
