"""Files that are written as a whole or not at all, and read without running what is in them."""

from __future__ import annotations

import os
import re
import secrets
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import torch

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]


_PART = re.compile(r"\.[0-9a-f]{16}\.part")  # what follows the name of the file that is being written


@contextmanager
def replacing(path: str | os.PathLike[str], *, mode: int = 0o666) -> Iterator[IO[bytes]]:
    """A file to write, which takes the place of ``path`` at the end; an exception leaves what was there.

    What is written so far is in a file beside it, ``path`` with ``.part`` at the end, which a killed process leaves behind:
    the next one removes it.
    """
    target = Path(path)
    remove_parts(target)
    part, file = _new_part(target, mode)
    try:
        with file:
            yield file
            if fcntl is not None:  # under the lock, or another process would take the part for one left behind
                file.flush()
                os.replace(part, target)
        if fcntl is None:
            os.replace(part, target)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def remove_parts(path: str | os.PathLike[str]) -> None:
    """Remove what killed processes have left of their attempts to write ``path``.

    A part that is still being written is locked by its writer and stays. Where files cannot be locked, all of them stay.
    """
    target, beside = Path(path), []
    if fcntl is None:
        return
    with suppress(OSError):  # a directory that is missing, or may not be listed
        beside = list(target.parent.iterdir())
    for part in beside:
        if not part.name.startswith(target.name) or not _PART.fullmatch(part.name[len(target.name) :]):
            continue
        with suppress(OSError), open(part, "rb") as file:  # locked, gone by now, or not ours to read
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            part.unlink()


def _new_part(target: Path, mode: int) -> tuple[Path, IO[bytes]]:
    """A new file beside the target, locked for as long as it is open."""
    while True:
        part = target.with_name(f"{target.name}.{secrets.token_hex(8)}.part")
        file = open(part, "xb", opener=lambda name, flags: os.open(name, flags, mode))  # noqa: SIM115  # the caller's
        try:
            if fcntl is None:
                return part, file
            with suppress(OSError):  # a file system without locks
                fcntl.flock(file, fcntl.LOCK_EX)
            if part.exists():  # it was not removed between its creation and the lock
                return part, file
        except BaseException:
            file.close()
            part.unlink(missing_ok=True)
            raise
        file.close()


def load_tensors(path: str | os.PathLike[str]) -> Any:
    """What ``torch.save`` wrote, if it is tensors and plain values; no code in the file is run.

    torch reads past the check sums of its archives, so a flipped bit would become another weight: they are checked here.

    Raises:
        OSError: the file cannot be opened.
        ValueError: it is damaged, or holds something else.
    """
    with open(path, "rb") as file:
        try:
            with zipfile.ZipFile(file) as archive:
                damaged = archive.testzip()
            if damaged is not None:
                raise ValueError(f"{damaged!r} is damaged")
            file.seek(0)
            return torch.load(file, map_location="cpu", weights_only=True)
        except Exception as error:  # both readers fail in many ways on bytes that are no such archive
            raise ValueError(
                f"{os.fspath(path)!r} cannot be loaded safely: it is damaged, or no file of tensors"
            ) from error
