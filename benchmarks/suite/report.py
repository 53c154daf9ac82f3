"""The suite's table and figure, from the tasks' JSON files alone."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opacus_expm._tables import markdown
from opacus_expm.experiments.journal import Facts, read_result

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ORDER = ("zero-shot", "non-private", "ours", "plain", "public", "pure", "free", "cited", "metric", "charged", "untuned")
TASKS = ("sine", "mnist", "mnist_far", "icu", "sms_head", "sms_lora", "cifar10_head")
LEVEL = 0.3  # points of accuracy within which two methods are called level, if their standard error is not larger

HEADINGS = (
    *("task", "ε", "seeds", "zero-shot", "non-private", "ours, untuned", "ours, δ = 0", "DP-SGD, tuned for free"),
    *("DP-SGD, tuning charged", "DP-SGD, untuned", "ours − tuned", "ours is", "passes", "seconds"),
)

GEOMETRY_HEADINGS = (
    *("task", "ε", "seeds", "DP-SGD, tuned for free", "DP-SGD in the metric, tuned for free", "ours, untuned"),
    *("metric − own units", "ours − metric"),
)

METRIC_HEADINGS = (
    *("task", "ε", "seeds", "no metric", "ours, untuned", "with public records", "ours − no metric"),
    "public − ours",
)

# Lines differ in dashes and marker, and their colours in lightness, so that they can be told apart in grey.
STYLES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "zero-shot": ("zero-shot", {"color": "0.45", "linestyle": ":", "linewidth": 1.3}),
    "non-private": ("non-private", {"color": "0.15", "linestyle": (0, (8, 3)), "linewidth": 1.1}),
    "ours": ("ours, untuned", {"color": "#0b3c6f", "linestyle": "-", "marker": "o", "linewidth": 1.9}),
    "pure": ("ours, δ = 0", {"color": "#4f8fc0", "linestyle": (0, (3, 1)), "marker": "D"}),
    "free": ("DP-SGD, tuned for free", {"color": "#e69f00", "linestyle": "--", "marker": "^"}),
    "charged": ("DP-SGD, tuning charged", {"color": "#b04a5a", "linestyle": "-.", "marker": "s"}),
    "untuned": ("DP-SGD, untuned", {"color": "0.55", "linestyle": (0, (6, 1, 1, 1, 1, 1)), "marker": "x"}),
}


@dataclass(frozen=True)
class Mean:
    """A mean over seeds; its standard error is NaN where there is one seed only."""

    value: float
    error: float

    def text(self, digits: int, sign: str = "") -> str:
        """Such as ``76.4 ± 0.2``."""
        spread = "" if math.isnan(self.error) else f" ± {self.error:.{digits}f}"
        return f"{self.value:{sign}.{digits}f}{spread}"


def mean_of(values: Sequence[float]) -> Mean:
    """Mean and standard error."""
    center, count = statistics.fmean(values), len(values)
    squares = math.fsum((value - center) ** 2 for value in values)  # NaN, as it should be, where something diverged
    return Mean(center, math.sqrt(squares / (count - 1) / count) if count > 1 else math.nan)


def by_seed(found: Facts, method: str, epsilon: float | None, fact: str = "score") -> dict[int, float]:
    """A fact of every seed that a method ran with; what is null, as the score of what diverged is, becomes NaN."""
    for row in found["rows"]:
        if row["method"] == method and row["epsilon"] == epsilon:
            return {run["seed"]: math.nan if run[fact] is None else run[fact] for run in row["runs"]}
    return {}


def tuned(found: Facts, epsilon: float) -> str:
    """Which row stands for tuned DP-SGD: the suite's own, or else what is cited."""
    return "free" if by_seed(found, "free", epsilon) else "cited"


def difference(found: Facts, epsilon: float) -> Mean | None:
    """Ours − tuned DP-SGD over the seeds that both have; None where there are none."""
    return paired_difference(found, epsilon, "ours", tuned(found, epsilon))


def paired_difference(found: Facts, epsilon: float, first: str, second: str) -> Mean | None:
    """One method − another over the seeds that both have; None where there are none."""
    scores, others = (by_seed(found, method, epsilon) for method in (first, second))
    paired = [scores[seed] - others[seed] for seed in sorted(scores.keys() & others.keys())]
    return mean_of(paired) if paired else None


def verdict(found: Facts, epsilon: float) -> str:
    """Ahead, level or behind: level within one standard error of the paired difference, or 0.3 points of accuracy."""
    paired = difference(found, epsilon)
    if paired is None:
        return "–"
    accuracy = found["metric"] == "accuracy"
    gain = paired.value if accuracy else -paired.value
    margin = max(LEVEL if accuracy else 0.0, 0.0 if math.isnan(paired.error) else paired.error)
    return "level" if abs(gain) <= margin else "ahead" if gain > 0 else "behind"


def budgets(found: Facts) -> list[float]:
    """Every ε at which something ran."""
    return sorted({row["epsilon"] for row in found["rows"] if row["epsilon"] is not None})


def line(found: Facts, epsilon: float) -> list[str]:
    """One line of the table."""
    digits = 1 if found["metric"] == "accuracy" else 4
    best = tuned(found, epsilon)

    def score(method: str) -> str:
        values = by_seed(found, method, None if method in ORDER[:2] else epsilon)
        return mean_of(list(values.values())).text(digits) + "†" * (method == "cited") if values else "–"

    def costs(fact: str) -> str:
        parts = []
        for method in ("ours", "pure", best, "charged", "untuned"):
            values = list(by_seed(found, method, epsilon, fact).values())
            mean = statistics.fmean(values) if values else math.nan
            parts.append("–" if math.isnan(mean) else f"{mean:.1f}" if mean < 9.95 else f"{mean:.0f}")
        return " / ".join(parts)

    paired = difference(found, epsilon)
    return [
        found["task"].replace("_", " "),
        f"{epsilon:g}",
        str(len(by_seed(found, "ours", epsilon))),
        *(score(method) for method in ("zero-shot", "non-private", "ours", "pure", best, "charged", "untuned")),
        "–" if paired is None else paired.text(digits + 1, "+"),
        verdict(found, epsilon),
        costs("passes"),
        costs("seconds"),
    ]


def table(results: Sequence[Facts]) -> str:
    """All tasks and budgets in Markdown: mean ± standard error over the seeds."""
    return markdown(HEADINGS, [line(found, epsilon) for found in results for epsilon in budgets(found)])


def brief(results: Sequence[Facts]) -> str:
    """One line a task: at each ε the mean scores of ours, and of DP-SGD tuned for free, with tuning charged, and untuned."""
    every = sorted({epsilon for found in results for epsilon in budgets(found)})
    rows = []
    for found in results:
        digits = 1 if found["metric"] == "accuracy" else 4

        def score(method: str, epsilon: float | None, found: Facts = found, digits: int = digits) -> str:
            values = by_seed(found, method, epsilon)
            return f"{statistics.fmean(values.values()):.{digits}f}" if values else "–"

        cells = [
            " / ".join([f"**{score('ours', e)}**", *(score(m, e) for m in (tuned(found, e), "charged", "untuned"))])
            for e in every
        ]
        rows.append([found["task"].replace("_", " "), score("zero-shot", None), *cells])
    return markdown(["task", "zero-shot", *(f"ε = {epsilon:g}" for epsilon in every)], rows)


def geometry(results: Sequence[Facts]) -> str:
    """Geometry and mechanism: DP-SGD, DP-SGD in the metric of ours, and ours, over the seeds that the second has."""
    lines = [
        side_by_side(
            found, e, (own := tuned(found, e), "metric", "ours"), (("metric", own), ("ours", "metric")), "metric"
        )
        for found in results
        for e in budgets(found)
        if by_seed(found, "metric", e)
    ]
    return markdown(GEOMETRY_HEADINGS, lines)


def metrics(results: Sequence[Facts]) -> str:
    """Where the metric comes from: nowhere, the private records, or public ones, over the seeds of the last."""
    order = ("plain", "ours", "public")
    lines = [
        side_by_side(found, e, order, (("ours", "plain"), ("public", "ours")), "public")
        for found in results
        for e in budgets(found)
        if by_seed(found, "public", e)
    ]
    return markdown(METRIC_HEADINGS, lines)


def side_by_side(
    found: Facts, epsilon: float, methods: Sequence[str], pairs: Sequence[tuple[str, str]], seeds_of: str
) -> list[str]:
    """One line of such a table: means of methods and of paired differences, over the seeds that one of them has."""
    digits = 1 if found["metric"] == "accuracy" else 4
    seeds = by_seed(found, seeds_of, epsilon).keys()

    def score(method: str) -> str:
        values = [value for seed, value in by_seed(found, method, epsilon).items() if seed in seeds]
        return mean_of(values).text(digits) + "†" * (method == "cited") if values else "–"

    def less(first: str, second: str) -> str:
        paired = paired_difference(found, epsilon, first, second)
        return "–" if paired is None else paired.text(digits + 1, "+")

    return [
        found["task"].replace("_", " "),
        f"{epsilon:g}",
        str(len(seeds)),
        *map(score, methods),
        *(less(first, second) for first, second in pairs),
    ]


def plot(results: Sequence[Facts], path: Path) -> None:
    """One panel a task, score against ε with bars of one standard error.

    Raises:
        ImportError: matplotlib is missing.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError('plot() needs matplotlib: pip install "opacus-expm[plots]"') from error
    columns = min(4, max(1, len(results)))
    rows = math.ceil(len(results) / columns)
    figure = Figure(figsize=(max(7.0, 2.9 * columns), 2.7 * rows + 0.7), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False).flatten()
    labels: dict[str, Any] = {}
    for axes, found in zip(panels, results, strict=False):
        _panel(axes, found)
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            labels.setdefault(label, handle)
    for axes in panels[len(results) :]:
        axes.set_axis_off()
    figure.legend(
        labels.values(),
        labels.keys(),
        loc="outside lower center",
        ncols=3,
        fontsize="small",
        frameon=False,
        handlelength=3.4,
    )
    figure.savefig(path, dpi=160)


def _panel(axes: Axes, found: Facts) -> None:
    """One task; methods at one ε stand side by side, so that their bars do not hide each other."""
    every = budgets(found)
    for number, (method, (label, style)) in enumerate(STYLES.items()):
        if method in ORDER[:2]:
            if values := by_seed(found, method, None):
                axes.axhline(statistics.fmean(values.values()), label=label, zorder=1.5, **style)
            continue
        points = [(e, by_seed(found, method if method != "free" else tuned(found, e), e)) for e in every]
        means = [(e, mean_of(list(values.values()))) for e, values in points if values]
        if means:
            axes.errorbar(
                [e * 1.07 ** (number - 4) for e, _ in means],
                [mean.value for _, mean in means],
                [0.0 if math.isnan(mean.error) else mean.error for _, mean in means],
                **{"label": label, "markersize": 5, "elinewidth": 0.8, "capsize": 2, "zorder": 3, **style},
            )
    axes.set_xscale("log")
    axes.set_xticks(every, [f"{e:g}" for e in every])
    axes.set_xticks([], minor=True)
    axes.set_xlim(min(every) / 1.6, max(every) * 1.6)
    axes.set_xlabel("privacy budget ε")
    if found["metric"] == "accuracy":
        axes.set_ylabel("test accuracy (%)")
    else:  # what diverges multiplies a loss, and would hide everything else
        axes.set_yscale("log")
        ticks = [tick for tick in (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0) if axes.get_ylim()[0] < tick]
        axes.set_yticks([tick for tick in ticks if tick < axes.get_ylim()[1]])
        axes.yaxis.set_major_formatter("{x:g}")
        axes.set_yticks([], minor=True)
        axes.set_ylabel("test loss, less is better")
    axes.set_title(found["task"].replace("_", " "), fontsize="medium")
    axes.grid(True, color="0.92", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)


def read(directory: Path) -> list[Facts]:
    """The results of all tasks in which a private method ran, in a fixed order."""
    found = [read_result(path) for name in TASKS if (path := directory / f"{name}.json").exists()]
    return [task for task in found if budgets(task)]


def write(directory: Path) -> str:
    """Make ``table.md``, ``brief.md``, ``geometry.md``, ``metrics.md`` and ``suite.png``; returns the table.

    Raises:
        FileNotFoundError: no task has results.
    """
    results = read(directory)
    if not results:
        raise FileNotFoundError(f"{directory} has no results; run python -m benchmarks.suite first")
    text = table(results)
    (directory / "table.md").write_text(text + "\n", encoding="utf-8")
    (directory / "brief.md").write_text(brief(results) + "\n", encoding="utf-8")
    (directory / "geometry.md").write_text(geometry(results) + "\n", encoding="utf-8")
    (directory / "metrics.md").write_text(metrics(results) + "\n", encoding="utf-8")
    plot(results, directory / "suite.png")
    return text
