"""What an audit reports: the ε that was found beside the ε that is claimed.

**Privacy:** a report is NOT private. Audits of data that are not their own warn of it.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from opacus_expm._tables import markdown
from opacus_expm._warnings import warn

_NOT_PRIVATE = "looks at the private densities or draws from them without charge: its report is NOT private"


@dataclass(frozen=True)
class Finding:
    """One line of a report.

    Attributes:
        subject: what was audited.
        method: how: ``"exact"``, ``"quadrature"``, ``"draws"`` or ``"black box"``.
        adjacency: ``"add_remove"`` or ``"replace_one"``.
        asked: ε that was asked for.
        delta: δ at which the two ε's below are compared.
        claimed: ε at δ that the ledger states.
        found: ε at δ that the audit found; a lower bound where the method is ``"draws"`` or ``"black box"``.
    """

    subject: str
    method: str
    adjacency: str
    asked: float
    delta: float
    claimed: float
    found: float

    @property
    def ratio(self) -> float:
        """The ε that was found over the ε that is claimed."""
        if self.claimed == 0:
            return 1.0 if self.found == 0 else math.inf
        return self.found / self.claimed

    @property
    def holds(self) -> bool:
        """Whether the claim stands."""
        return self.found <= self.claimed


@dataclass(frozen=True)
class Report:
    """What an audit found."""

    findings: tuple[Finding, ...]

    @property
    def holds(self) -> bool:
        """Whether every claim stands."""
        return all(f.holds for f in self.findings)

    def table(self) -> str:
        """All findings, in Markdown."""
        headings = ("audited", "adjacency", "by", "asked ε", "at δ", "claimed ε", "found ε", "ratio", "")
        rows = [
            (
                *(f.subject, f.adjacency, f.method, f"{f.asked:g}", f"{f.delta:g}"),
                *(f"{f.claimed:.4f}", f"{f.found:.4f}", f"{f.ratio:.3f}", "holds" if f.holds else "BROKEN"),
            )
            for f in self.findings
        ]
        return markdown(headings, rows)

    def __str__(self) -> str:
        return self.table()


def warn_not_private(name: str) -> None:
    """Warn that the report of a function with this name is not private."""
    warn(f"{name} {_NOT_PRIVATE}; use it on data that you may look at")


@contextmanager
def synthetic_data() -> Iterator[None]:
    """Leave out the warnings that are meant for real data, because the audit has made its own."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=rf"\w+\(\) {_NOT_PRIVATE}")
        warnings.filterwarnings("ignore", message=r"bounds_read_off\(\) reads the clipping bounds off")
        yield
