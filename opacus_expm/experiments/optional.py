"""Packages that a few experiments need and nothing else does: the extra ``suite``."""

from __future__ import annotations

import importlib
from typing import Any


def load(module: str, package: str | None = None) -> Any:
    """An optional module.

    Args:
        module: its name.
        package: what to install; by default the module's name with hyphens.

    Raises:
        ImportError: it is not installed; the message says what to install.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        name = package or module.partition(".")[0].replace("_", "-")
        raise ImportError(
            f"this experiment needs the package {name}: pip install {name}, or all that the experiments need with "
            "pip install 'opacus-expm[suite]'"
        ) from error
