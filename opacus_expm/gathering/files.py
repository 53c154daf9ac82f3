"""Files that hold private data: written by an explicit call, readable by their owner only, and marked as what they are.

Two kinds exist: statistics that are to be merged with others, and the state of an unfinished pass. Tensors and plain values
are stored in torch's format and read without running any code from the file.

**Privacy:** such a file is as private as the data it came from. Keep it where the data is kept, and delete it when it has
served.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from opacus_expm import _files
from opacus_expm.gathering.clipping import ClippedAdder, ClippedSums

MARK = "PRIVATE DATA of opacus-expm: sums over private records, without any noise; not to be published"
VERSION = 1
SECONDS = 60.0  # between two states of an unfinished pass


def write_private(path: str | os.PathLike[str], kind: str, content: Mapping[str, Any]) -> None:
    """Write a file that only its owner may read, all of it or nothing."""
    with _files.replacing(path, mode=0o600) as file:
        torch.save({"mark": MARK, "kind": kind, "version": VERSION, **content}, file)
        file.flush()
        os.fsync(file.fileno())


def read_private(path: str | os.PathLike[str], kind: str) -> dict[str, Any]:
    """The content of a file that ``write_private`` wrote; no code in it is run.

    Raises:
        OSError: the file cannot be opened.
        ValueError: not a file of this kind and version, or a damaged one.
    """
    content = _files.load_tensors(path)
    facts = {"mark": MARK, "kind": kind, "version": VERSION}
    if not isinstance(content, dict) or any(content.get(name) != fact for name, fact in facts.items()):
        raise ValueError(f"{os.fspath(path)!r} does not hold {kind} of opacus-expm, version {VERSION}")
    return content


class PassFile:
    """The state of a pass over the private data, from which it can go on after an interruption.

    Args:
        path: the file; it need not exist.
        facts: what has to be the same when the pass goes on, by name; compared by digests of their ``repr``.

    Raises:
        ValueError: the file belongs to another pass.
    """

    KIND = "the state of a pass"

    def __init__(self, path: str | os.PathLike[str], facts: Mapping[str, object]):
        self._path = Path(path)
        self._facts = {name: hashlib.sha256(repr(fact).encode()).hexdigest() for name, fact in facts.items()}
        self.sums: ClippedSums | None = None
        self.records = 0  # visited so far
        self._written = time.monotonic()
        _files.remove_parts(self._path)  # sums over private records, which a killed process has left
        if not self._path.exists():
            return
        content = read_private(self._path, self.KIND)
        found = content.get("facts")
        if not isinstance(found, dict) or found != self._facts:
            differing = [n for n in self._facts if not isinstance(found, dict) or found.get(n) != self._facts[n]]
            raise ValueError(
                f"private_checkpoint={os.fspath(self._path)!r} belongs to another pass: {', '.join(differing)} differs; "
                "pass what it was begun with, another path, or delete the file to begin again"
            )
        self.sums, self.records = ClippedSums.from_dict(content["sums"]), int(content["records"])

    def add(self, total: ClippedAdder, records: int) -> None:
        """Note how many records were added. The file is written at most once a minute."""
        self.records += records
        if time.monotonic() - self._written >= SECONDS:
            self.write(total.result())

    def write(self, sums: ClippedSums) -> None:
        """Write the sums so far to the file."""
        write_private(self._path, self.KIND, {"facts": self._facts, "records": self.records, "sums": sums.to_dict()})
        self._written = time.monotonic()

    def remove(self) -> None:
        """Remove the file, because the pass is complete."""
        self._path.unlink(missing_ok=True)
