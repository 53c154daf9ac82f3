"""What a ledger had cost after each of its charges, and the figure of it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import TYPE_CHECKING, Any

from opacus_expm.accounting.composition import total_epsilon
from opacus_expm.accounting.contents import Contents, with_step
from opacus_expm.accounting.events import Event, Steps, check_guarantee, event_from_dict
from opacus_expm.accounting.ledger import LedgerFile
from opacus_expm.experiments.plots import new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Kinds of charges differ in their markers, so that they can be told apart in grey.
_STYLES: Mapping[str, Mapping[str, Any]] = {
    "release": {"marker": "o", "color": "black"},
    "purchase": {"marker": "^", "color": "black", "markerfacecolor": "white"},
    "query": {"marker": "s", "color": "black", "markerfacecolor": "white"},
    "DP-SGD": {"marker": "D", "color": "black", "markerfacecolor": "0.6"},
}


@dataclass(frozen=True)
class Spent:
    """The total after one charge, or after DP-SGD steps that follow each other.

    Attributes:
        kind: ``"release"``, ``"purchase"``, ``"query"`` or ``"DP-SGD"``.
        epsilon: ε of everything up to here, possibly infinite.
    """

    kind: str
    epsilon: float


def totals(entries: Sequence[dict[str, Any]], delta: float) -> list[Spent]:
    """The total at δ after every charge of a ledger, in order.

    Raises:
        NoGuarantee: ε covers one of the charges not at all.
    """
    found: list[Spent] = []
    releases: list[Event] = []
    history: list[Steps] = []
    charges = [entry for entry in entries if "budget" not in entry]
    for number, entry in enumerate(charges, 1):
        if "step" in entry:
            history = with_step(history, entry["step"]["noise_multiplier"], entry["step"]["sample_rate"])
            if number < len(charges) and "step" in charges[number]:
                continue
        else:
            releases.append(event_from_dict(entry["release"]))
        check_guarantee(releases)
        kind = "DP-SGD" if "step" in entry else releases[-1].kind
        found.append(Spent(kind, total_epsilon(releases, history, delta).epsilon))
    return found


def plot(ledger: str | PathLike[str], delta: float, where: str | PathLike[str]) -> Axes:
    """Draw what a ledger had cost at δ after each of its charges, as steps, and its budget where it has one.

    Args:
        ledger: file given to an engine as ``ledger_path``.
        delta: δ of the statement.
        where: a file to write.

    Returns:
        The axes.

    Raises:
        ImportError: matplotlib is missing.
        ValueError: nothing was charged, or the total is not finite at this δ.

    **Privacy:** a ledger holds public facts only, and so does the figure.
    """
    file = LedgerFile(ledger)
    spent = totals(file.entries(), delta)
    if not spent:
        raise ValueError(f"ledger {str(ledger)!r} holds no charge: there is nothing to draw")
    if not all(math.isfinite(point.epsilon) for point in spent):
        raise ValueError(f"there is no finite epsilon at delta={delta:g} to draw: pass a larger delta, such as 1e-5")
    figure = new_figure()
    axes = figure.add_subplot()
    axes.step(range(len(spent) + 1), [0.0, *(point.epsilon for point in spent)], where="post", color="0.35", zorder=2)
    for kind in dict.fromkeys(point.kind for point in spent):
        own = [(number, point.epsilon) for number, point in enumerate(spent, 1) if point.kind == kind]
        axes.plot(*zip(*own, strict=True), linestyle="", label=f"{kind}: {len(own)}", zorder=3, **_STYLES[kind])
    budget = Contents.from_file(file).budget
    if budget is not None:
        label = f"budget: ε = {budget.epsilon:g}, δ = {budget.delta:g}"
        axes.axhline(budget.epsilon, color="black", linestyle="--", linewidth=1.0, label=label)
    axes.set_xlabel("charge")
    axes.set_ylabel(f"ε spent, at δ = {delta:g}")
    axes.locator_params(axis="x", integer=True)
    axes.set_ylim(bottom=0.0)
    axes.grid(True, color="0.9", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=3, fontsize="small", frameon=False)
    figure.savefig(where, dpi=200)
    return axes
