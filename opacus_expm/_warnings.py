"""Warnings that point to the line of the user's that caused them, however deep in the package they arise."""

from __future__ import annotations

import contextlib
import sys
import warnings
from pathlib import Path

import torch

# What stands between the user's line and ours: this package, and the frames of decorators and context managers.
_BETWEEN = (str(Path(__file__).parent), str(Path(torch.__file__).parent), contextlib.__file__)


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the nearest caller outside the package."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_BETWEEN):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)
