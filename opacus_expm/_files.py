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
def replacing(path: str | os.PathLike[str], *, mode: int = 0o666) -> Iterator[IO[bytes]]:
    """A file to write, which takes the place of ``path`` at the end; an exception leaves what was there."""
    target = Path(path)
    part = target.with_name(f"{target.name}.{secrets.token_hex(8)}.part")
    try:
        with open(part, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            yield file
        os.replace(part, target)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


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
