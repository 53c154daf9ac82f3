"""Progress bars: by default on a terminal and in a notebook, and nowhere else."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable
from typing import Any

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of missing ipywidgets: a notebook then has a bar of text
    from tqdm.auto import tqdm


def bar(progress: bool | None, iterable: Iterable[Any] | None = None, **options: Any) -> tqdm[Any]:
    """A bar of ``tqdm``: shown or hidden, or with None shown where somebody looks on.

    Args:
        progress: True or False shows or hides it; None shows it on a terminal and in a notebook, where the environment
            variable ``TQDM_DISABLE=1`` hides it.
        iterable: what to go through, if anything.
        options: of ``tqdm``.
    """
    if progress is not None:
        return tqdm(iterable, disable=not progress, **options)
    return tqdm(iterable, **options) if in_notebook() else tqdm(iterable, disable=None, **options)


def in_notebook() -> bool:
    """Whether this is the kernel of a notebook, whose output is no terminal though somebody looks on."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return "IPKernelApp" in getattr(shell, "config", {})
