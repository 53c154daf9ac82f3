"""One-shot private fine-tuning for Opacus users: the exponential mechanism on a quadratic model of the loss."""

from opacus_expm.accountant import BudgetExceeded, ExpMAccountant, NoGuarantee, NotGuaranteed, Purchase, Release
from opacus_expm.comparison import Comparison, compare
from opacus_expm.engine import ExpMQuadEngine, make_private_expm
from opacus_expm.ranks import RankFailed
from opacus_expm.statistics import Statistics
from opacus_expm.suggestion import Candidate, Suggestion, suggest

__all__ = [
    "BudgetExceeded",
    "Candidate",
    "Comparison",
    "ExpMAccountant",
    "ExpMQuadEngine",
    "NoGuarantee",
    "NotGuaranteed",
    "Purchase",
    "RankFailed",
    "Release",
    "Statistics",
    "Suggestion",
    "compare",
    "make_private_expm",
    "suggest",
]
__version__ = "0.1.0"
