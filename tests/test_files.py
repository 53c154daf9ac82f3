"""Files that are written as a whole: what a killed write leaves behind goes at the next start, and nothing else goes."""

import os
import signal

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from opacus_expm import ExpMQuadEngine, Sparse, _files
from opacus_expm.gathering.files import PassFile

fcntl = pytest.importorskip("fcntl")


def left_behind(path):
    """A part as a killed process leaves it."""
    part = path.with_name(f"{path.name}.0123456789abcdef.part")
    part.write_bytes(b"private")
    return part


def write(path):
    with _files.replacing(path) as file:
        file.write(b"new")


def resume(path):
    PassFile(path, {})


def save(path):
    with pytest.warns(UserWarning, match="does not have the weights of a release"):
        ExpMQuadEngine().save_checkpoint(path=path, module=nn.Linear(1, 1))


def gather(path):
    data = TensorDataset(torch.ones(8, 2), torch.ones(8, 1))
    with pytest.warns(UserWarning, match="PRIVATE"):
        ExpMQuadEngine().gather(
            *(nn.Linear(2, 1), DataLoader(data, batch_size=4), 2),
            criterion=nn.MSELoss(),
            max_grad_norm=1.0,
            max_curvature=1.0,
            projection=Sparse(seed=0),
            private_checkpoint=path,
        )


@pytest.mark.parametrize("start", [write, resume, save, gather])
def test_the_part_of_a_killed_write_goes_at_the_next_start(tmp_path, start):
    path = tmp_path / "file"
    part = left_behind(path)
    start(path)
    assert not part.exists()


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork")
def test_a_write_that_was_really_killed(tmp_path):
    path = tmp_path / "file"
    write(path)
    child = os.fork()
    if child == 0:
        with _files.replacing(path) as file:
            file.write(b"half of it")
            file.flush()
            os.kill(os.getpid(), signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert path.read_bytes() == b"new"
    assert len(list(tmp_path.iterdir())) == 2
    write(path)
    assert list(tmp_path.iterdir()) == [path]


def test_what_another_process_is_writing_stays(tmp_path):
    """Two writers of one file at a time: both come to their end, and the later one decides."""
    path = tmp_path / "file"
    with _files.replacing(path) as first:
        first.write(b"first")
        with _files.replacing(path) as second:
            second.write(b"second")
            assert len(list(tmp_path.iterdir())) == 2
        assert path.read_bytes() == b"second"
        resume(tmp_path / "fil")  # another file's parts are not touched
    assert path.read_bytes() == b"first"
    assert list(tmp_path.iterdir()) == [path]


def test_files_with_similar_names_stay(tmp_path):
    path = tmp_path / "file"
    names = ["file.part", "file.0123.part", "file.0123456789abcdeF.part", "file2.0123456789abcdef.part", "file.lock"]
    for name in names:
        (tmp_path / name).write_bytes(b"mine")
    write(path)
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(["file", *names])


def test_a_part_that_is_removed_before_it_is_locked_is_begun_again(tmp_path, monkeypatch):
    """A second process that looks in the moment between creation and lock takes the part for one left behind."""
    path, lock, parts = tmp_path / "file", fcntl.flock, []

    def late(file, operation):
        parts.append(file.name)
        if len(parts) == 1:
            os.unlink(file.name)
        lock(file, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    write(path)
    assert len(set(parts)) == 2
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]


def test_an_exception_leaves_what_was_there(tmp_path):
    path = tmp_path / "file"
    write(path)

    def fail():
        with _files.replacing(path) as file:
            file.write(b"half of it")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]


def test_a_directory_that_is_missing_is_told(tmp_path):
    with pytest.raises(FileNotFoundError):
        write(tmp_path / "nowhere" / "file")
