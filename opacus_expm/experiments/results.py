"""What a comparison found: its rows, tables, files and figure."""

from __future__ import annotations

import csv
import dataclasses
import math
import statistics as moments
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import TYPE_CHECKING, Any

import numpy as np

from opacus_expm import _check
from opacus_expm._tables import markdown
from opacus_expm.experiments import plots
from opacus_expm.experiments.journal import canonical, read_result, write_result
from opacus_expm.experiments.methods import LABELS, METHODS, OURS, Settings

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLUMNS = (
    *("task", "method", "epsilon", "delta", "metric", "mean", "std"),
    *("runs", "seconds", "peak_mib", "settings"),
)


@dataclass(frozen=True)
class Row:
    """One method at one budget.

    Attributes:
        method: one of ``METHODS``.
        epsilon: ε, or None where the method has no budget.
        delta: δ of the guarantee, or None.
        values: the metric on the test data, one value a run.
        seconds: mean time of a run: training, or the engine's call. Finding settings, calibrating DP-SGD's noise and scoring
            are not in it. The first call at a budget also finds the engine's noise, which takes about a second.
        memory: largest peak of a run in MiB above what the process held at its start (or of the graphics card, where the
            model is there); None where the system does not tell.
        settings: what the search chose; empty where there is nothing to choose.
    """

    method: str
    epsilon: float | None
    delta: float | None
    values: tuple[float, ...]
    seconds: float
    memory: float | None
    settings: Settings

    def __post_init__(self) -> None:
        _check.one_of("method", self.method, METHODS)
        _check_budget(self.epsilon, self.delta)
        check_scores(self.values)
        check_cost(self.seconds, self.memory)
        _check_settings(self.settings)

    @property
    def mean(self) -> float:
        """Mean of the values."""
        return moments.fmean(self.values)

    @property
    def std(self) -> float:
        """Sample standard deviation of the values; 0 for one value, NaN where a run diverged."""
        if not all(map(math.isfinite, self.values)):
            return math.nan
        return float(np.std(self.values, ddof=1)) if len(self.values) > 1 else 0.0


@dataclass(frozen=True)
class Candidate:
    """One point of the search: the mean of its trials' metric on the held-out private records."""

    method: str
    epsilon: float | None
    settings: Settings
    score: float

    def __post_init__(self) -> None:
        _check.one_of("method", self.method, METHODS)
        _check_budget(self.epsilon, None)
        _check_settings(self.settings)


@dataclass(frozen=True, repr=False)
class Comparison:
    """What ``compare`` found.

    Attributes:
        task: name.
        metric: ``"accuracy"`` (in percent) or ``"loss"``.
        delta: δ of the methods that have one.
        seeds: of the runs.
        trials: runs of each candidate in the search.
        validation: share of the private records that was held out in the search.
        grids: what was searched, by method.
        rows: the results, methods in the order of ``METHODS`` and ε ascending.
        search: every candidate and its score.
    """

    task: str
    metric: str
    delta: float
    seeds: tuple[int, ...]
    trials: int
    validation: float
    grids: Mapping[str, tuple[dict[str, Any], ...]]
    rows: tuple[Row, ...]
    search: tuple[Candidate, ...]

    def __repr__(self) -> str:
        methods = ", ".join(dict.fromkeys(row.method for row in self.rows))
        return f"Comparison({self.task!r}, methods=({methods}), epsilons={self.epsilons}, seeds={len(self.seeds)})"

    @property
    def epsilons(self) -> tuple[float, ...]:
        """The budgets in ascending order."""
        return tuple(sorted({row.epsilon for row in self.rows if row.epsilon is not None}))

    def row(self, method: str, epsilon: float | None = None) -> Row:
        """The row of a method at a budget (None for methods without one).

        Raises:
            KeyError: there is none.
        """
        for row in self.rows:
            if (row.method, row.epsilon) == (method, epsilon):
                return row
        raise KeyError(f"no row for method {method!r} at epsilon {epsilon!r}")

    def table(self) -> str:
        """Two tables in Markdown, of results and of costs and settings, and the conditions they hold under."""
        digits = 1 if self.metric == "accuracy" else 4
        budgets = [f"ε = {e:g}" for e in self.epsilons] or ["any ε"]
        results = []
        for method in dict.fromkeys(row.method for row in self.rows):
            cells = [f"{r.mean:.{digits}f} ± {r.std:.{digits}f}" for r in self.rows if r.method == method]
            if method == "zero-shot":
                cells = [c.split(" ±")[0] for c in cells]
            if method in ("zero-shot", "non-private"):
                cells = cells * len(budgets)
            results.append([LABELS[method], *cells])
        costs = [
            [
                LABELS[r.method],
                "–" if r.epsilon is None else f"{r.epsilon:g}",
                f"{r.seconds:.2f}",
                "–" if r.memory is None else f"{r.memory:.0f}",
                ", ".join(f"{name}={_short(v)}{self._edge(r, name)}" for name, v in r.settings.items()) or "none",
            ]
            for r in self.rows
            if r.method != "zero-shot"
        ]
        parts = [
            markdown([self._metric_name(), *budgets], results),
            markdown(["method", "ε", "seconds", "peak MiB", "settings chosen"], costs),
            "\n".join(self._conditions()),
        ]
        return "\n\n".join(parts)

    def _metric_name(self) -> str:
        """The metric in words."""
        return "test accuracy (%)" if self.metric == "accuracy" else "test loss"

    def _edge(self, row: Row, name: str) -> str:
        """A star where the search might have gone on: at an end of three or more numbers."""
        for grid in self.grids[row.method]:
            fits = set(grid) == set(row.settings) and all(value in grid[n] for n, value in row.settings.items())
            tried = [v for v in grid[name] if isinstance(v, int | float)] if fits else []
            if len(tried) > 2 and row.settings[name] in (min(tried), max(tried)):
                return "*"
        return ""

    def _conditions(self) -> list[str]:
        """The conditions under which the numbers hold, in words."""
        lines = [
            f"Mean ± one standard deviation over {len(self.seeds)} seeds; add/remove adjacency; δ = {self.delta:g} where "
            "there is one. Seconds and peak memory above the start of a run, of one run."
        ]
        if any(row.method in OURS for row in self.rows):
            lines.append(
                "ExpM-Quad: make_private_expm(model, loader, epsilon, delta=δ), untuned; whatever it takes from the private "
                "records is charged."
            )
        if self.search:
            tried = {m: len({canonical(c.settings) for c in self.search if c.method == m}) for m in LABELS}
            counts = ", ".join(f"{LABELS[m]}: {count}" for m, count in tried.items() if count)
            runs = "1 run each" if self.trials == 1 else f"{self.trials} runs each"
            lines.append(
                f"Settings are the best of a grid ({counts}; {runs}) on {self.validation:.0%} of the private records, held "
                "out for that and given back for the runs above. This choice is NOT charged. A star marks an end of the "
                "values that were tried."
            )
        return lines

    def to_csv(self, path: str | PathLike[str]) -> None:
        """Write the rows, one line each."""
        with open(path, "w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(_COLUMNS)
            for r in self.rows:
                numbers = [r.mean, r.std, len(r.values), r.seconds, r.memory]
                writer.writerow([self.task, r.method, r.epsilon, r.delta, self.metric, *numbers, canonical(r.settings)])

    def to_json(self, path: str | PathLike[str]) -> None:
        """Write everything to a JSON file."""
        write_result(path, dataclasses.asdict(self))

    @classmethod
    def from_json(cls, path: str | PathLike[str]) -> Comparison:
        """Read what ``to_json`` wrote.

        Raises:
            ValueError: the file holds something else.
        """
        try:
            content = read_result(path)
            content["seeds"] = tuple(content["seeds"])
            content["grids"] = {
                method: tuple({name: tuple(values) for name, values in grid.items()} for grid in grids)
                for method, grids in content["grids"].items()
            }
            content["rows"] = tuple(Row(**{**row, "values": numbers(row["values"])}) for row in content["rows"])
            content["search"] = tuple(Candidate(**{**c, "score": numbers([c["score"]])[0]}) for c in content["search"])
            found = cls(**content)
            found.table()  # which needs all of it
            return found
        except (AttributeError, KeyError, OverflowError, RecursionError, TypeError, ValueError) as error:
            raise ValueError(f"path {str(path)!r} holds no comparison written by to_json: {error}") from error

    def plot(self, where: str | PathLike[str] | Axes | None = None) -> Axes:
        """The metric against ε, with bands of one standard deviation.

        Args:
            where: a file to write, axes to draw into, or None for a figure of its own.

        Returns:
            The axes.

        Raises:
            ImportError: matplotlib is missing.
        """
        lines = []
        for method in dict.fromkeys(row.method for row in self.rows):
            rows = [row for row in self.rows if row.method == method]
            budgets = tuple(row.epsilon for row in rows if row.epsilon is not None)
            lines.append(plots.Line(method, budgets, tuple(r.mean for r in rows), tuple(r.std for r in rows)))
        return plots.plot(lines, where, ticks=self.epsilons, metric=self._metric_name(), title=self.task)


def numbers(values: Sequence[float | None]) -> tuple[float, ...]:
    """Numbers as they were before ``_finite``; what was not finite is NaN."""
    if not isinstance(values, list | tuple) or not all(v is None or _is_number(v) for v in values):
        raise ValueError(f"values must be a list of numbers, got {values!r}")
    return tuple(math.nan if v is None else float(v) for v in values)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def check_scores(values: object) -> None:
    """Raise unless these are scores of runs."""
    if not isinstance(values, tuple) or not values or not all(map(_is_number, values)):
        raise ValueError(f"values must be one number a run, got {values!r}")


def check_cost(seconds: float, memory: float | None) -> None:
    """Raise unless a run can have cost this."""
    _check.non_negative("seconds", seconds)
    if memory is not None:
        _check.non_negative("memory", memory)


def _check_budget(epsilon: float | None, delta: float | None) -> None:
    """Check ε and δ of a row, which are None for a method without a budget."""
    if epsilon is not None:
        _check.positive("epsilon", epsilon)
    if delta is not None:
        _check.fraction("delta", delta)


def _check_settings(settings: Settings) -> None:
    if not isinstance(settings, dict):
        raise TypeError(f"settings must be a mapping of names, got {settings!r}")


def _short(value: object) -> str:
    """A setting as short text."""
    return f"{value:g}" if isinstance(value, float) else str(value)
