"""Curves of a metric against ε, one for each method of a comparison."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import TYPE_CHECKING, Any

import numpy as np

from opacus_expm.experiments.methods import LABELS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Lines differ in style and marker, and their colours in lightness, so that they can be told apart in grey.
_STYLES: Mapping[str, Mapping[str, Any]] = {
    "zero-shot": {"color": "0.45", "linestyle": ":", "linewidth": 1.3},
    "non-private": {"color": "0.15", "linestyle": (0, (8, 3)), "linewidth": 1.1},
    "dp-sgd": {"color": "#e69f00", "linestyle": "--", "marker": "^", "markersize": 5.5},
    "expm": {"color": "#0b3c6f", "linestyle": "-", "marker": "o", "markersize": 5},
    "expm-delta": {"color": "#00796b", "linestyle": "-.", "marker": "s", "markersize": 4.5},
}


def new_figure() -> Figure:
    """An empty figure, of no window.

    Raises:
        ImportError: matplotlib is missing.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError('a figure needs matplotlib: pip install "opacus-expm[plots]"') from error
    return Figure(figsize=(5.6, 4.0), layout="constrained")


@dataclass(frozen=True)
class Line:
    """The values of one method.

    Attributes:
        method: one of ``METHODS``.
        epsilons: ascending; empty for a method without a budget, which has one mean.
        means: of the metric.
        stds: its standard deviations.
    """

    method: str
    epsilons: tuple[float, ...]
    means: tuple[float, ...]
    stds: tuple[float, ...]


def plot(
    lines: Sequence[Line], where: str | PathLike[str] | Axes | None, *, ticks: Sequence[float], metric: str, title: str
) -> Axes:
    """Draw lines with bands of one standard deviation.

    Args:
        lines: one for each method.
        where: a file to write, axes to draw into, or None for a figure of its own.
        ticks: the values of ε to mark.
        metric: what the vertical axis shows, in words.
        title: of the axes; may be empty.

    Returns:
        The axes.

    Raises:
        ImportError: matplotlib is missing.
    """
    figure = new_figure()
    from matplotlib.axes import Axes

    if isinstance(where, Axes):
        _draw(lines, where, ticks, metric, title)
        return where
    if where is not None and not isinstance(where, str | PathLike):
        raise TypeError(f"where must be a path, matplotlib axes or None, got {type(where).__name__}")
    axes = figure.add_subplot()
    _draw(lines, axes, ticks, metric, title)
    if where is not None:
        figure.savefig(where, dpi=200)
    return axes


def _draw(lines: Sequence[Line], axes: Axes, ticks: Sequence[float], metric: str, title: str) -> None:
    """Draw the lines, their bands and the labels."""
    for line in lines:
        mean, std = np.array(line.means), np.array(line.stds)
        style = _STYLES[line.method]
        if not line.epsilons:
            axes.axhline(mean[0], label=LABELS[line.method], zorder=1.5, **style)
            continue
        x = np.array(line.epsilons, dtype=float)
        axes.plot(x, mean, label=LABELS[line.method], zorder=3, markeredgecolor="white", markeredgewidth=0.6, **style)
        axes.fill_between(x, mean - std, mean + std, color=style["color"], alpha=0.18, linewidth=0, zorder=2)
    axes.set_xscale("log")
    axes.set_xticks(ticks, [f"{e:g}" for e in ticks])
    axes.set_xticks([], minor=True)
    axes.set_xlabel("privacy budget ε")
    axes.set_ylabel(metric)
    if title:
        axes.set_title(title, fontsize="medium")
    axes.grid(True, color="0.9", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    # Below the axes, where it hides no line.
    axes.legend(
        loc="upper center",
        bbox_to_anchor=(0.5, -0.16),
        ncols=2,
        fontsize="small",
        frameon=False,
        columnspacing=1.2,
        handlelength=3.2,
    )
