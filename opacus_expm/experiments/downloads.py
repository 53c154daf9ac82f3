"""Files of experiments: where they are looked for, how they are downloaded, and what is kept in the cache.

A file is looked for in the directory given by the caller, in the one named by ``OPACUS_EXPM_DATA`` and in the cache
(``OPACUS_EXPM_CACHE``, else ``~/.cache/opacus_expm``); if it is in none of them it is downloaded to the cache and its
SHA-256 is checked. Files that are already there are read as they are.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import http.client
import io
import os
import urllib.request
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path

from opacus_expm import _files

AnyPath = str | os.PathLike[str]


@dataclass(frozen=True)
class File:
    """A file that can be downloaded.

    Attributes:
        name: path inside a data directory, without ``.gz``.
        urls: where to get it, in order of preference.
        sha256: digest of the content, decompressed if the file is gzip.
        packed: the digest is of the file as it is downloaded, compressed.
        member: what is downloaded is a zip archive, and the file is this member of it.
    """

    name: str
    urls: tuple[str, ...]
    sha256: str
    packed: bool = False
    member: str | None = None


def cache_dir() -> Path:
    """Where downloads, parsed tables and pretrained weights are kept."""
    return Path(os.environ.get("OPACUS_EXPM_CACHE") or Path.home() / ".cache" / "opacus_expm")


def write(path: Path, content: bytes) -> None:
    """Write a file as a whole or not at all; its directory is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with _files.replacing(path) as file:
        file.write(content)


def remember(path: Path, content: bytes) -> None:
    """Write to the cache, if it can be written to: what is kept there can be computed again."""
    with contextlib.suppress(OSError):
        write(path, content)


def find(file: File, data_dir: AnyPath | None = None) -> Path:
    """The path of a file, downloaded to the cache if it is nowhere else.

    Args:
        file: what to find.
        data_dir: looked into first, before ``OPACUS_EXPM_DATA`` and the cache.

    Raises:
        ValueError: ``data_dir`` is not a directory.
        FileNotFoundError: the file is not there, and a download failed or had the wrong digest.
    """
    found = present(file.name, data_dir)
    if found is not None:
        return found
    failures = []
    for url in file.urls:
        target = cache_dir() / file.name
        if url.endswith(".gz"):
            target = target.with_name(target.name + ".gz")
        try:
            download(url, target, file.sha256, packed=file.packed, member=file.member)
        except (OSError, ValueError, http.client.HTTPException) as error:
            failures.append(f"{url}: {error}")
        else:
            return target
    raise FileNotFoundError(
        f"{file.name} (or {file.name}.gz) is not in {', '.join(map(str, _places(data_dir)))} and could not be downloaded "
        f"({'; '.join(failures)}). Get it from {' or '.join(file.urls)}, put it into a directory under that name, and "
        "pass the directory as data_dir or in OPACUS_EXPM_DATA"
    )


def present(name: str, data_dir: AnyPath | None = None) -> Path | None:
    """The path of a file that is there already, gzip or not; None if it is nowhere.

    Args:
        name: path inside a data directory, without ``.gz``.
        data_dir: looked into first, before ``OPACUS_EXPM_DATA`` and the cache.

    Raises:
        ValueError: ``data_dir`` is not a directory.
    """
    if data_dir is not None and not Path(data_dir).is_dir():
        raise ValueError(f"data_dir must be a directory, got {str(data_dir)!r}")
    paths = (directory / (name + suffix) for directory in _places(data_dir) for suffix in (".gz", ""))
    return next((path for path in paths if path.is_file()), None)


def _places(data_dir: AnyPath | None) -> list[Path]:
    """The directories that are looked into, in their order."""
    named = os.environ.get("OPACUS_EXPM_DATA")
    return [Path(place) for place in (data_dir, named) if place] + [cache_dir()]


def download(url: str, path: Path, sha256: str, *, packed: bool = False, member: str | None = None) -> None:
    """Download to ``path``, unless the SHA-256 is another one: then nothing is left behind.

    Args:
        url: what to read.
        path: what to write; its directory is made.
        sha256: the digest, in hexadecimal.
        packed: of the bytes as they come; by default a gzip file is decompressed first.
        member: take this member out of the zip archive that comes; digest and ``path`` are the member's.

    Raises:
        OSError: the download failed or ended early.
        ValueError: the digest does not match, or the archive is not one with that member.
    """
    request = urllib.request.Request(url, headers={"User-Agent": "opacus-expm"})
    with urllib.request.urlopen(request, timeout=60) as response:
        content = response.read()
    if member is not None:
        content = _member(content, member)
    found = hashlib.sha256(content if packed else _decompressed(content, url)).hexdigest()
    if found != sha256:
        raise ValueError(f"SHA-256 must be {sha256}, got {found}")
    write(path, content)


def _decompressed(content: bytes, name: object) -> bytes:
    """The content of a gzip file, or of one that is not compressed."""
    if not content.startswith(b"\x1f\x8b"):
        return content
    try:
        return gzip.decompress(content)
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{name} is no sound gzip file: {error}") from error


def _member(archive: bytes, name: str) -> bytes:
    """One file of a zip archive."""
    try:
        with zipfile.ZipFile(io.BytesIO(archive)) as members:
            return members.read(name)
    except (zipfile.BadZipFile, KeyError, zlib.error) as error:
        raise ValueError(f"what came is no sound zip archive with {name!r} inside: {error}") from error


def read(path: Path) -> bytes:
    """The content of a file, decompressed if it is gzip."""
    return _decompressed(path.read_bytes(), path)
