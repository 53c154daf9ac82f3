"""The two figures of a task, each with a panel for either method."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.reproduction.results import Curve, Reproduction
from benchmarks.reproduction.settings import EPSILONS, FIGURES, METHODS, RADIUS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Curves differ in marker and lightness, lines in dashes, so that they can be told apart in grey.
_CURVES = (
    {"color": "#c9a227", "marker": "v"},
    {"color": "#00796b", "marker": "o"},
    {"color": "#0b3c6f", "marker": "s"},
    {"color": "#b04a5a", "marker": "D"},
)
_OTHER_LOSS = {"color": "#7b3fa0", "marker": "*", "linestyle": (0, (3, 1.2)), "markersize": 7}
_LINES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "zero-shot": ("zero-shot", {"color": "0.45", "linestyle": ":", "linewidth": 1.4}),
    "non-private": ("non-private", {"color": "0.1", "linestyle": (0, (8, 3)), "linewidth": 1.1}),
    "dp-sgd": ("DP-SGD, tuned, (ε, δ)", {"color": "0.3", "linestyle": "--", "marker": "^", "markersize": 4.5}),
    "dp-sgd-paper-rate": (
        "DP-SGD, paper's rate",
        {"color": "0.6", "linestyle": "-.", "marker": "x", "markersize": 4.5},
    ),
}
_TITLES = {
    "paper_not_private": "the paper's calibration and Gibbs sampler: NOT PRIVATE\n(bounds read off the private data)",
    "ours": "ours, range calibration and exact sampler: ε-DP a candidate\n(bounds from the public data)",
}


def plot(found: Reproduction, directory: str | PathLike[str]) -> tuple[Path, Path]:
    """Draw both figures, two panels each on the same axes, as ``TASK-radius.png`` and ``TASK-dimension.png``.

    Raises:
        ImportError: matplotlib is missing.
    """
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import LogLocator, NullLocator
    except ImportError as error:
        raise ImportError('plot() needs matplotlib: pip install "opacus-expm[plots]"') from error
    Path(directory).mkdir(parents=True, exist_ok=True)
    paths = []
    for kind in FIGURES:
        figure = Figure(figsize=(9.0, 4.3), layout="constrained")
        panels = figure.subplots(1, 2, sharex=True, sharey=True)
        for axes, method in zip(panels, METHODS, strict=True):
            _draw(found, kind, method, axes)
        if found.metric == "accuracy":
            panels[0].set_ylabel("test accuracy (%)")
        else:  # noise in a large ball multiplies a loss, and would hide everything else
            panels[0].set_yscale("log")
            panels[0].yaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7)))
            panels[0].yaxis.set_minor_locator(NullLocator())
            panels[0].yaxis.set_major_formatter("{x:g}")
            panels[0].set_ylabel("test loss (logarithmic)")
        fixed = f"k = {found.setting.proj_dim}, varied R" if kind == "radius" else f"R = {RADIUS:g}, varied k"
        figure.suptitle(f"{found.task}: {fixed}; mean ± std of {found.draws} simulated candidates", fontsize="medium")
        figure.legend(
            *panels[0].get_legend_handles_labels(),
            loc="outside lower center",
            ncols=5,
            fontsize="small",
            frameon=False,
            handlelength=3.4,
            columnspacing=1.4,
        )
        paths.append(Path(directory) / f"{found.task}-{kind}.png")
        figure.savefig(paths[-1], dpi=110)
    return paths[0], paths[1]


def _draw(found: Reproduction, kind: str, method: str, axes: Axes) -> None:
    """One panel."""
    shown: list[tuple[Curve, str, Mapping[str, Any]]] = [
        (c, f"R = {c.radius:g}" if kind == "radius" else f"k = {c.proj_dim}", style)
        for c, style in zip(found.figure(kind, method), _CURVES, strict=True)
    ]
    if kind == "radius":
        other = [c for c in found.curves if c.method == method and c.loss != found.loss]
        shown += [(c, f"R = {c.radius:g}, cross-entropy", _OTHER_LOSS) for c in other]
    for curve, label, style in shown:
        mean, std = np.array(curve.means), np.array(curve.stds)
        axes.plot(
            curve.epsilons, mean, label=label, **{"markersize": 4.5, "zorder": 3, "markeredgecolor": "white", **style}
        )
        axes.fill_between(curve.epsilons, mean - std, mean + std, color=style["color"], alpha=0.16, linewidth=0)
    for line in found.references:
        label, lined = _LINES[line.method]
        if line.loss != found.loss:
            if kind != "radius":
                continue
            label, lined = f"{label}, cross-entropy", {**lined, "color": _OTHER_LOSS["color"]}
        if line.epsilons:
            axes.plot(line.epsilons, line.means, label=label, zorder=2.5, **lined)
        else:
            axes.axhline(line.means[0], label=label, zorder=1.5, **lined)
    axes.set_xscale("log")
    axes.set_xticks(EPSILONS, [f"{e:g}" for e in EPSILONS])
    axes.set_xticks([], minor=True)
    axes.set_xlabel("privacy budget ε")
    axes.set_title(_TITLES[method], fontsize="small")
    axes.grid(True, color="0.92", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
