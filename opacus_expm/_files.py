"""Files that are written as a whole or not at all, and read without running what is in them."""

from __future__ import annotations

import os
import secrets
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import torch


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[IO[bytes]]:
    """A file to write, which takes the place of ``path`` at the end; an exception leaves what was there."""
    target = Path(path)
    part = target.with_name(f"{target.name}.{secrets.token_hex(8)}.part")
    try:
        with open(part, "xb") as file:
            yield file
        os.replace(part, target)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def load_tensors(path: str | os.PathLike[str]) -> Any:
    """What ``torch.save`` wrote, if it is tensors and plain values; no code in the file is run.

    torch reads past the check sums of its archives, so a flipped bit would become another weight: they are checked here.

    Raises:
        ValueError: a member of the archive is damaged; torch and zipfile raise much else on bytes that are no archive.
    """
    with zipfile.ZipFile(path) as archive:
        damaged = archive.testzip()
    if damaged is not None:
        raise ValueError(f"{os.fspath(path)!r} is damaged in {damaged!r}")
    return torch.load(path, map_location="cpu", weights_only=True)
