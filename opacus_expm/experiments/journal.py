"""Finished cells of a long experiment, one JSON line each, so that a run that was interrupted can go on; and its result.

**Privacy:** none. What an experiment finds on private data is private; see ``compare``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from os import PathLike
from pathlib import Path
from typing import Any

Facts = dict[str, Any]
_FORMAT = 1  # of results


class Journal:
    """Outcomes by cell, under a configuration's digest; in memory only without a path.

    Args:
        path: the file; its directory is made, and lines of other configurations or of none are passed over.
        configuration: what all cells depend on, such as ``compare.task_digest``.
        check: is given each outcome that is read; where it raises, the line is damaged, and its cell runs again.
    """

    def __init__(self, path: Path | None, configuration: str, check: Callable[[Facts], object] = dict):
        self._path, self._configuration = path, configuration
        self._found: dict[str, Facts] = {}
        self._torn = False
        if path is None:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n") if path.exists() else [""]
        self._torn = lines[-1] != ""  # an interrupted write; what follows starts on a line of its own
        for line in lines:
            try:
                entry = json.loads(line)
                if entry["configuration"] == configuration:
                    check(entry["outcome"])
                    self._found[canonical(entry["cell"])] = dict(entry["outcome"])
            except (KeyError, OverflowError, RecursionError, TypeError, ValueError):  # damaged: the cell runs again
                continue

    def get(self, cell: Facts) -> Facts | None:
        """The outcome of a finished cell."""
        return self._found.get(canonical(cell))

    def put(self, cell: Facts, outcome: Facts) -> Facts:
        """Keep an outcome; what is not finite is null in the file."""
        self._found[canonical(cell)] = outcome
        if self._path is not None:
            entry = {"configuration": self._configuration, "cell": cell, "outcome": outcome}
            with open(self._path, "a", encoding="utf-8") as file:
                file.write("\n" * self._torn + json.dumps(finite(entry)) + "\n")
            self._torn = False
        return outcome


def write_result(path: str | PathLike[str], content: Facts) -> None:
    """A result as JSON for people, too; what is not finite is null."""
    text = json.dumps(finite({"format": _FORMAT, **content}), indent=1, ensure_ascii=False)
    Path(path).write_text(text + "\n", encoding="utf-8")


def read_result(path: str | PathLike[str]) -> Facts:
    """What ``write_result`` was given; no more is known of it than its format.

    Raises:
        AttributeError, KeyError, RecursionError, TypeError, ValueError: the file holds something else.
    """
    content: Facts = json.loads(Path(path).read_text(encoding="utf-8"))
    if content.pop("format") != _FORMAT:
        raise ValueError("unknown format")
    return content


def canonical(value: object) -> str:
    """JSON in one spelling."""
    return json.dumps(value, sort_keys=True, ensure_ascii=False)


def finite(value: Any) -> Any:
    """The same with null in place of numbers that JSON does not have."""
    if isinstance(value, dict):
        return {key: finite(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
