"""Finished cells of a long experiment, one JSON line each, so that a run that was interrupted can go on; and its result.

**Privacy:** none. What an experiment finds on private data is private; see ``compare``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from os import SEEK_END, PathLike
from pathlib import Path
from typing import Any

Facts = dict[str, Any]
_FORMAT = 1  # of results


class Journal:
    """Outcomes by cell, under a configuration's digest; in memory only without a path.

    Several processes may share a file: what one of them has finished, the others find.

    Args:
        path: the file; its directory is made, and lines of other configurations or of none are passed over.
        configuration: what all cells depend on, such as ``compare.task_digest``.
        check: is given each outcome that is read; where it raises, the line is damaged, and its cell runs again.
    """

    def __init__(self, path: Path | None, configuration: str, check: Callable[[Facts], object] = dict):
        self.path, self._configuration, self._check = path, configuration, check
        self._found: dict[str, tuple[Facts, Facts]] = {}
        self._end = 0  # of the lines that were read
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._read()

    def get(self, cell: Facts) -> Facts | None:
        """The outcome of a finished cell."""
        key = canonical(cell)
        if key not in self._found:
            self._read()
        return self._found[key][1] if key in self._found else None

    def put(self, cell: Facts, outcome: Facts) -> Facts:
        """Keep an outcome; what is not finite is null in the file."""
        self._found[canonical(cell)] = (cell, outcome)
        if self.path is not None:
            entry = {"configuration": self._configuration, "cell": cell, "outcome": outcome}
            torn = _is_torn(self.path)  # by an interrupted write; this line starts on its own
            with open(self.path, "ab") as file:
                file.write(b"\n" * torn + json.dumps(finite(entry)).encode() + b"\n")
        return outcome

    def entries(self) -> list[tuple[Facts, Facts]]:
        """Every finished cell with its outcome."""
        self._read()
        return list(self._found.values())

    def _read(self) -> None:
        """Take in the lines that were added to the file, by whatever process."""
        if self.path is None or not self.path.exists():
            return
        with open(self.path, "rb") as file:
            file.seek(self._end)
            content = file.read()
        self._end += content.rfind(b"\n") + 1
        for line in content.decode("utf-8", errors="replace").split("\n"):
            try:
                entry = json.loads(line)
                if entry["configuration"] == self._configuration:
                    self._check(entry["outcome"])
                    self._found[canonical(entry["cell"])] = (dict(entry["cell"]), dict(entry["outcome"]))
            except (KeyError, OverflowError, RecursionError, TypeError, ValueError):  # damaged: the cell runs again
                continue


def _is_torn(path: Path) -> bool:
    """Whether a file ends in the middle of a line."""
    if not path.exists() or path.stat().st_size == 0:
        return False
    with open(path, "rb") as file:
        file.seek(-1, SEEK_END)
        return file.read() != b"\n"


def write_result(path: str | PathLike[str], content: Facts) -> None:
    """Write a result as JSON that people can read too. Numbers that are not finite become null."""
    text = json.dumps(finite({"format": _FORMAT, **content}), indent=1, ensure_ascii=False)
    Path(path).write_text(text + "\n", encoding="utf-8")


def read_result(path: str | PathLike[str]) -> Facts:
    """Read what ``write_result`` wrote; only its format is checked.

    Raises:
        AttributeError, KeyError, RecursionError, TypeError, ValueError: the file holds something else.
    """
    content: Facts = json.loads(Path(path).read_text(encoding="utf-8"))
    if content.pop("format") != _FORMAT:
        raise ValueError("unknown format")
    return content


def canonical(value: object) -> str:
    """JSON that is written in one way only, so that equal facts give equal text."""
    return json.dumps(value, sort_keys=True, ensure_ascii=False)


def finite(value: Any) -> Any:
    """The same values, with null in place of numbers that JSON does not have."""
    if isinstance(value, dict):
        return {key: finite(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
