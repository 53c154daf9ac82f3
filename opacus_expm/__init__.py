"""One-shot private fine-tuning for Opacus users: the exponential mechanism on a quadratic model of the loss.

What belongs to experiments (``compare``, ``Comparison``, ``datasets`` and ``tasks``) is loaded when it is first asked for.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from opacus_expm.accounting.accountant import ExpMAccountant
from opacus_expm.accounting.events import NoGuarantee, NotGuaranteed, Purchase, Release
from opacus_expm.accounting.filters import BudgetExceeded
from opacus_expm.engine import ExpMQuadEngine, make_private_expm
from opacus_expm.gathering.ranks import RankFailed
from opacus_expm.gathering.rows import GradSampling
from opacus_expm.gathering.statistics import Statistics
from opacus_expm.subspaces import Sparse, Stiefel, Structured

if TYPE_CHECKING:
    from opacus_expm.experiments import datasets, tasks
    from opacus_expm.experiments.compare import compare
    from opacus_expm.experiments.results import Comparison

__all__ = [
    "BudgetExceeded",
    "Comparison",
    "ExpMAccountant",
    "ExpMQuadEngine",
    "GradSampling",
    "NoGuarantee",
    "NotGuaranteed",
    "Purchase",
    "RankFailed",
    "Release",
    "Sparse",
    "Statistics",
    "Stiefel",
    "Structured",
    "compare",
    "datasets",
    "make_private_expm",
    "tasks",
]
__version__ = "0.1.0"

# A public name → where it is: a module and a name in it, or a module alone.
_LAZY = {
    "Comparison": ("opacus_expm.experiments.results", "Comparison"),
    "compare": ("opacus_expm.experiments.compare", "compare"),
    "datasets": ("opacus_expm.experiments.datasets", None),
    "tasks": ("opacus_expm.experiments.tasks", None),
}


def __getattr__(name: str) -> Any:
    """A public name of the experiments, which ``import opacus_expm`` alone does not load."""
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, inside = _LAZY[name]
    found = import_module(module)
    return found if inside is None else getattr(found, inside)


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
