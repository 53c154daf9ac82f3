"""One-shot private fine-tuning for Opacus users: the exponential mechanism on a quadratic model of the loss."""

from opacus_expm.accountant import ExpMAccountant, Release
from opacus_expm.engine import ExpMQuadEngine, Statistics, make_private_expm

__all__ = ["ExpMAccountant", "ExpMQuadEngine", "Release", "Statistics", "make_private_expm"]
__version__ = "0.1.0"
