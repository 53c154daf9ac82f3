"""The ledger's file: append-only, flushed before each draw, shared safely between processes.

One JSON object a line; each carries the SHA-256 of the line before it, so that a lost or altered entry is noticed when
the file is opened. An entry is written and synced to disk, under a lock, before the draw it pays for, and nothing is
ever truncated: killing the process at any moment cannot lose a charge. A line torn by a crash was never synced, so
its draw was never made; it stays in the file, is closed by a line that says so, and costs nothing.
"""

from __future__ import annotations

import hashlib
import json
import os
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from filelock import FileLock

_HEADER = {"format": "opacus-expm ledger", "version": 1}
_TORN = {"torn": "the line above was never synced; its draw was not made"}


class LedgerError(ValueError):
    """The file is not a sound ledger."""


class LedgerFile:
    """Entries on disk, and how many of them this process has seen.

    Args:
        path: the file; created, with its header, if it does not exist.

    Raises:
        LedgerError: the file exists and is not a sound ledger.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)
        self._lock = FileLock(f"{self.path}.lock")
        with self._lock:
            content = self.path.read_bytes() if self.path.exists() else b""
            if not content:
                self._append(_HEADER)
            elif b"\n" not in content and _line(_HEADER, b"").startswith(content):  # torn while it was created
                self._close_torn(content)
                self._append(_HEADER)

    def locked(self) -> FileLock:
        """The lock between processes; to be held from ``entries`` to ``append``."""
        return self._lock

    def entries(self) -> list[dict[str, Any]]:
        """Every entry, verified.

        Raises:
            LedgerError: a line that is not JSON, not linked to the one before it, or a foreign header.
        """
        content = self.path.read_bytes()
        lines = content.split(b"\n")
        tail = lines.pop()
        found: list[dict[str, Any]] = []
        previous = b""
        broken: int | None = None
        for number, line in enumerate(lines, start=1):
            entry = _parse(line)
            if entry == {**_TORN, "previous": _digest(previous)} and broken == number - 1:
                broken = None
            elif broken is not None:
                break
            elif entry is None or entry.get("previous") != _digest(previous):
                broken = number
            else:
                found.append(entry)
            previous = line
        if broken is not None:
            raise LedgerError(f"{self.path}: line {broken} is damaged or does not follow the line before it")
        if not found or {k: found[0].get(k) for k in _HEADER} != _HEADER:
            raise LedgerError(f"{self.path} is not an opacus-expm ledger (version 1)")
        if tail:  # torn by a crash before it was synced
            self._close_torn(tail)
        return found[1:]

    def append(self, entry: dict[str, Any]) -> None:
        """Write one entry and wait until it is on disk."""
        with self._lock:
            self._append({**entry, "time": datetime.now(timezone.utc).isoformat(timespec="seconds")})

    def _append(self, entry: dict[str, Any]) -> None:
        """Link to the last line, write, sync."""
        content = self.path.read_bytes() if self.path.exists() else b""
        self._write(_line(entry, content.removesuffix(b"\n").split(b"\n")[-1]))

    def _close_torn(self, tail: bytes) -> None:
        """End a torn line, and say so in the next."""
        with self._lock:
            self._write(b"\n" + _line(_TORN, tail))

    def _write(self, content: bytes) -> None:
        """Append and wait until it is on disk."""
        with self.path.open("ab", buffering=0) as file:
            file.write(content)
            os.fsync(file.fileno())


def _line(entry: dict[str, Any], last: bytes) -> bytes:
    """One entry, linked to the line before it."""
    return json.dumps({**entry, "previous": _digest(last)}, allow_nan=False).encode() + b"\n"


def _digest(line: bytes) -> str:
    return hashlib.sha256(line).hexdigest()


def _parse(line: bytes) -> dict[str, Any] | None:
    """One JSON object, or None."""
    try:
        entry = json.loads(line)
    except ValueError:
        return None
    return entry if isinstance(entry, dict) else None
