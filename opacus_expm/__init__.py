"""One-shot private fine-tuning for Opacus users: the exponential mechanism on a quadratic model of the loss."""

from opacus_expm.accountant import BudgetExceeded, ExpMAccountant, Purchase, Release
from opacus_expm.engine import ExpMQuadEngine, make_private_expm
from opacus_expm.statistics import Statistics

__all__ = [
    "BudgetExceeded",
    "ExpMAccountant",
    "ExpMQuadEngine",
    "Purchase",
    "Release",
    "Statistics",
    "make_private_expm",
]
__version__ = "0.1.0"
