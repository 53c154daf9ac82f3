"""Where files are found, how they are downloaded and checked, and what is left of a download that went wrong."""

import gzip
import hashlib
import http.server
import io
import os
import threading
import urllib.request
import zipfile
from pathlib import Path

import pytest

from opacus_expm.experiments import datasets, downloads
from opacus_expm.experiments.downloads import File

CONTENT = b"twelve bytes"
DIGEST = hashlib.sha256(CONTENT).hexdigest()


pytestmark = pytest.mark.usefixtures("cache")


def put(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def files_in(directory):
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file())


# --- finding ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_the_argument_comes_before_the_variable_and_that_before_the_cache(tmp_path, cache, monkeypatch, suffix):
    file = File("kind/name.txt", ("https://example.org/name.txt.gz",), DIGEST)
    monkeypatch.setenv("OPACUS_EXPM_DATA", str(tmp_path / "variable"))
    given_directory = tmp_path / "argument"
    given_directory.mkdir()
    for directory in (cache, tmp_path / "variable", given_directory):
        path = put(directory / f"kind/name.txt{suffix}", b"")
        assert downloads.find(file, given_directory) == path


def test_what_is_nowhere_is_asked_for(tmp_path, cache, monkeypatch):
    monkeypatch.setenv("OPACUS_EXPM_DATA", str(tmp_path / "variable"))
    with pytest.raises(FileNotFoundError) as raised:
        datasets.mnist(tmp_path)
    message = str(raised.value)
    for part in (tmp_path, tmp_path / "variable", cache, "mnist/train-images-idx3-ubyte", "OPACUS_EXPM_DATA"):
        assert str(part) in message
    assert message.count("https://ossci-datasets.s3.amazonaws.com/mnist/train-images-idx3-ubyte.gz") == 2
    assert message.count("no network in tests") == 2  # both mirrors were tried
    assert not cache.exists()


def test_a_mistyped_directory_does_not_start_a_download(tmp_path):
    with pytest.raises(ValueError, match=r"data_dir must be a directory, got '.*absent'"):
        datasets.mnist(tmp_path / "absent")


def test_the_cache_is_in_the_home_directory_unless_told(monkeypatch):
    monkeypatch.delenv("OPACUS_EXPM_CACHE")
    assert downloads.cache_dir() == Path.home() / ".cache" / "opacus_expm"


# --- downloading -----------------------------------------------------------------------------------------------------


@pytest.fixture
def server(monkeypatch):
    """An HTTP server on this machine: ``served[path] = (content, length that it claims)``."""
    served = {}

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            if self.path not in served:
                self.send_error(404)
                return
            content, length = served[self.path]
            self.send_response(200)
            self.send_header("Content-Length", str(length))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *arguments):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        thread = threading.Thread(target=running.serve_forever, args=(0.01,))
        thread.start()
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        monkeypatch.setattr(urllib.request, "urlopen", opener.open)
        yield f"http://127.0.0.1:{running.server_port}/", served
        running.shutdown()
        thread.join()


@pytest.mark.parametrize("compress", [False, True])
def test_a_download_is_kept_and_not_repeated(cache, server, compress):
    url, served = server
    name = "name.txt.gz" if compress else "name.txt"
    content = gzip.compress(CONTENT, mtime=0) if compress else CONTENT
    served[f"/{name}"] = content, len(content)
    file = File("kind/name.txt", (url + name,), DIGEST)
    path = downloads.find(file)
    assert path == cache / "kind" / name
    assert path.read_bytes() == content
    assert downloads.read(path) == CONTENT
    served.clear()
    assert downloads.find(file) == path
    assert files_in(cache) == [f"kind/{name}"]


def test_a_digest_can_be_of_the_packed_file(cache, server):
    url, served = server
    content = gzip.compress(CONTENT, mtime=0)
    served["/name.tar.gz"] = content, len(content)
    with pytest.raises(ValueError, match=f"SHA-256 must be {DIGEST}, got"):
        downloads.download(url + "name.tar.gz", cache / "name", DIGEST, packed=True)
    downloads.download(url + "name.tar.gz", cache / "name", hashlib.sha256(content).hexdigest(), packed=True)
    assert (cache / "name").read_bytes() == content


def zipped(**members):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return buffer.getvalue()


def test_a_member_of_a_zip_archive_is_kept_alone(cache, server):
    url, served = server
    content = zipped(readme=b"about", wanted=CONTENT)
    served["/all.zip"] = content, len(content)
    path = downloads.find(File("kind/name.txt", (url + "all.zip",), DIGEST, member="wanted"))
    assert path.read_bytes() == CONTENT
    assert files_in(cache) == ["kind/name.txt"]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (zipped(wanted=b"other"), f"SHA-256 must be {DIGEST}, got"),
        (zipped(readme=CONTENT), "no sound zip archive with 'wanted' inside"),
        (zipped(wanted=CONTENT)[:40], "no sound zip archive with 'wanted' inside"),
    ],
)
def test_a_zip_archive_that_came_wrong_leaves_nothing(cache, server, content, reason):
    url, served = server
    served["/all.zip"] = content, len(content)
    with pytest.raises(FileNotFoundError, match=reason):
        downloads.find(File("kind/name.txt", (url + "all.zip",), DIGEST, member="wanted"))
    assert not cache.exists()


@pytest.mark.parametrize(
    ("content", "missing", "reason"),
    [
        (b"thirteen bytes", 0, f"SHA-256 must be {DIGEST}, got {hashlib.sha256(b'thirteen bytes').hexdigest()}"),
        (CONTENT[:5], 7, "IncompleteRead(5 bytes read, 7 more expected)"),
        (gzip.compress(CONTENT, mtime=0)[:-6], 0, "is no sound gzip file"),
        (gzip.compress(CONTENT, mtime=0)[:-6], 6, "IncompleteRead"),
        (b"", 0, "SHA-256 must be"),
    ],
)
def test_what_came_wrong_is_refused_and_the_next_mirror_tried(cache, server, content, missing, reason):
    url, served = server
    served["/bad.txt"] = content, len(content) + missing
    with pytest.raises(FileNotFoundError) as raised:
        downloads.find(File("kind/name.txt", (url + "bad.txt", url + "absent.txt"), DIGEST))
    assert reason in str(raised.value)
    assert f"{url}absent.txt: HTTP Error 404" in str(raised.value)
    assert not cache.exists()  # nothing is left behind

    served["/good.txt"] = CONTENT, len(CONTENT)
    path = downloads.find(File("kind/name.txt", (url + "bad.txt", url + "good.txt"), DIGEST))
    assert path.read_bytes() == CONTENT


def test_an_interrupted_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = put(tmp_path / "file", b"old")

    def interrupt(source, target):
        assert Path(source).read_bytes() == b"new"
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", interrupt)
        with pytest.raises(KeyboardInterrupt):
            downloads.write(path, b"new")
    assert files_in(tmp_path) == ["file"]
    assert path.read_bytes() == b"old"
    downloads.write(path, b"new")
    assert path.read_bytes() == b"new"


def test_a_cache_that_cannot_be_written_to_is_done_without(tmp_path):
    obstacle = put(tmp_path / "file", b"")
    downloads.remember(obstacle / "inside", b"content")
    assert files_in(tmp_path) == ["file"]
