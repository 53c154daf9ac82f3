"""The ledger's file: append-only, flushed before each draw, shared safely between processes.

One JSON object a line; each carries the SHA-256 of the line before it and of itself, so that an altered entry, or one
lost from before another, is noticed when the file is opened. (The hashes have no key: they guard against accidents, and
a file cut off after a whole line cannot be told from an older one.) An entry is written and synced to disk, under a
lock, before the draw it pays for, and nothing is ever truncated: killing the process at any moment cannot lose a charge.
A line torn by a crash was never synced, so its draw was never made; it stays in the file, is ended by words that say so,
and costs nothing. A crash while they are written only leaves a longer torn line.

The file only grows, so what a process has once read from it or written to it must be its beginning for ever. A process
that finds another beginning, or no file, refuses to go on: the file was deleted, cut or replaced, and with it charges would
be lost. (A process that starts afterwards cannot know.) The lock and the file are those of the path without symbolic links,
whatever the path by which a process opened them, and wherever its working directory goes.
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
_TORN = b'{"torn": "never synced; its draw was not made", "sha256": "'


class LedgerError(ValueError):
    """The file is not a sound ledger."""


class LedgerFile:
    """Entries on disk.

    Args:
        path: the file; created, with its header, if it does not exist.

    Raises:
        LedgerError: the file exists and is not a sound ledger.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(os.path.realpath(path))
        self._lock = FileLock(f"{self.path}.lock")
        self._seen = b""  # what the file began with when it was last read or written

    def locked(self) -> FileLock:
        """The lock between processes; to be held from ``entries`` to ``append``."""
        return self._lock

    def entries(self) -> list[dict[str, Any]]:
        """Every entry, verified; a torn last line is ended, and a missing header written.

        Raises:
            LedgerError: a line that is not JSON, not linked to the one before it, or a foreign header; or a file that no
                longer begins with what was seen of it before.
        """
        with self._lock:
            content = self._content()
            *lines, tail = content.split(b"\n")
            found: list[dict[str, Any]] = []
            previous = b""
            for number, line in enumerate(lines, start=1):
                if not _is_torn(line):
                    entry = _parse(line, previous)
                    if entry is None:
                        raise LedgerError(
                            f"{self.path}: line {number} of the ledger is damaged or does not follow the line before it"
                        )
                    found.append(entry)
                previous = line
            if tail:
                whole = _parse(tail, previous)
                if whole is not None:  # only its end of line is missing; a charge too many is safe
                    found.append(whole)
                    self._check_header(found)
                    content = self._write(content, b"\n")
                elif _starts_with_entry(tail, previous) or not (found or _starts_header(tail, previous)):
                    raise LedgerError(f"{self.path}: the last line of the ledger is damaged, or it is no ledger")
                else:
                    tail += _TORN + _digest(tail).encode() + b'"}'
                    content = self._write(content, tail[-len(_TORN) - 66 :] + b"\n")
                previous = tail
            if found:
                self._check_header(found)
            else:  # a new file, or one whose header was torn
                content = self._write(content, _line(_HEADER, previous))
            self._seen = content
            return found[1:]

    def append(self, entry: dict[str, Any]) -> None:
        """Write one entry and wait until it is on disk."""
        with self._lock:
            content = self._content()
            last = content.removesuffix(b"\n").split(b"\n")[-1]
            line = _line({**entry, "time": datetime.now(timezone.utc).isoformat(timespec="seconds")}, last)
            self._seen = self._write(content, line)

    def _content(self) -> bytes:
        """The file as it is, which must begin with what was seen of it before."""
        content = self.path.read_bytes() if self.path.exists() else b""
        if not content.startswith(self._seen):
            raise LedgerError(
                f"{self.path} was deleted, cut or replaced while it was in use, so that charges would be lost: it no longer "
                "begins with what this process has seen of it. Put back the file as it was; until then nothing is charged. "
                "What it held is in accountant.state_dict()"
            )
        return content

    def _check_header(self, found: list[dict[str, Any]]) -> None:
        """Raise if the first line is not that of a ledger."""
        if {k: found[0].get(k) for k in _HEADER} != _HEADER:
            raise LedgerError(f"{self.path} is not an opacus-expm ledger (version 1)")

    def _write(self, content: bytes, more: bytes) -> bytes:
        """Append to the file, wait until all of it is on disk, and return the content that it then has."""
        new = not self.path.exists()
        with self.path.open("ab") as file:  # buffered: a raw file may write a part and say nothing
            file.write(more)
            file.flush()
            os.fsync(file.fileno())
        if new and os.name == "posix":  # the name, too, must survive a loss of power
            directory = os.open(self.path.parent, os.O_RDONLY)
            try:
                os.fsync(directory)
            finally:
                os.close(directory)
        return content + more


def _line(entry: dict[str, Any], last: bytes) -> bytes:
    """One entry, linked to the line before it and sealed."""
    linked = {**entry, "previous": _digest(last)}
    return _dump({**linked, "sha256": _digest(_dump(linked))}) + b"\n"


def _dump(entry: dict[str, Any]) -> bytes:
    """One entry as JSON on one line."""
    return json.dumps(entry, allow_nan=False).encode()


def _digest(line: bytes) -> str:
    """The SHA-256 of a line, in hexadecimal."""
    return hashlib.sha256(line).hexdigest()


def _parse(line: bytes, last: bytes) -> dict[str, Any] | None:
    """A sound entry that follows the last line, or None."""
    try:
        entry = json.loads(line)
        seal = entry.pop("sha256")
        sound = entry["previous"] == _digest(last) and seal == _digest(_dump(entry))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return entry if sound else None


def _is_torn(line: bytes) -> bool:
    """Whether a line was torn by a crash and ended as such."""
    torn = line[: -len(_TORN) - 66]
    return bool(torn) and line == torn + _TORN + _digest(torn).encode() + b'"}'


def _starts_with_entry(tail: bytes, last: bytes) -> bool:
    """Whether a sound entry is followed by something else on its line, which no crash leaves behind."""
    return any(byte == ord("}") and _parse(tail[: i + 1], last) is not None for i, byte in enumerate(tail))


def _starts_header(tail: bytes, last: bytes) -> bool:
    """Whether a tail can be a torn header, perhaps with the beginning of the words that end it."""
    header = _line(_HEADER, last)
    rest = tail[next((i for i, (a, b) in enumerate(zip(tail, header, strict=False)) if a != b), len(header)) :]
    return rest.startswith(_TORN[: len(rest)])
