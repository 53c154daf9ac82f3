"""The ledger's file: sound after every crash, shared between processes, and never a charge short of what was drawn."""

import hashlib
import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import quick
import torch
from filelock import FileLock
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from opacus_expm import ExpMAccountant, ExpMQuadEngine, Release, Sparse
from opacus_expm.accounting import ledger
from opacus_expm.accounting.filters import BudgetExceeded
from opacus_expm.accounting.ledger import LedgerError, LedgerFile
from opacus_expm.mechanism.sampling import Exact

EVERY_BYTE_OR_SOME = pytest.mark.parametrize("every", quick.only([13], [1, 13]))
HEADER = b'{"format": "opacus-expm ledger", "version": 1, '


def release(epsilon=1.0, **changes):
    facts = {
        "epsilon_range": epsilon,
        "mu": math.inf,
        "adjacency": "add_remove",
        "epsilon": epsilon,
        "delta": 0.0,
        "calibration": "range",
        "radius": 0.5,
        "regularization": 0.0,
        "nominal_size": 40,
        "max_grad_norm": 1.0,
        "max_curvature": 1.0,
        "projection": "stiefel",
        "proj_dim": 5,
        "seed": 1,
    }
    return Release(**(facts | changes))


def charged(path):
    """What the file says was charged."""
    accountant = ExpMAccountant(ledger_path=path)
    return accountant.releases, accountant.history


def verify_chain(path):
    """Every line is a JSON object that carries the digest of the line before it; written without the package."""
    lines = path.read_bytes().split(b"\n")
    assert lines.pop() == b""
    for line, before in zip(lines, [b"", *lines], strict=False):
        assert json.loads(line)["previous"] == hashlib.sha256(before).hexdigest()
    return lines


@pytest.fixture
def path(tmp_path):
    return tmp_path / "ledger.jsonl"


@pytest.fixture(scope="module")
def complete(tmp_path_factory):
    """Content of a file with two releases, three steps and a last release, and what it charges."""
    path = tmp_path_factory.mktemp("complete") / "ledger.jsonl"
    accountant = ExpMAccountant(ledger_path=path)
    accountant.record(release(1.0))
    accountant.record(release(2.0, mu=0.25, delta=1e-6))
    for noise_multiplier in (1.0, 1.0, 2.0):
        accountant.step(noise_multiplier=noise_multiplier, sample_rate=0.25)
    accountant.record(release(0.5))
    return path.read_bytes(), (accountant.releases, accountant.history)


# --- What is in the file ---------------------------------------------------------------------------------------------


def test_format(path, complete):
    path.write_bytes(complete[0])
    lines = verify_chain(path)
    assert lines[0].startswith(HEADER)
    kinds = [set(json.loads(line)) & {"format", "version", "release", "step"} for line in lines]
    assert kinds == [{"format", "version"}, {"release"}, {"release"}, {"step"}, {"step"}, {"step"}, {"release"}]
    assert all("time" in json.loads(line) for line in lines[1:])
    assert json.loads(lines[2])["release"] == release(2.0, mu=0.25, delta=1e-6).to_dict()
    assert json.loads(lines[5])["step"] == {"noise_multiplier": 2.0, "sample_rate": 0.25}


@pytest.mark.parametrize("clipping", ["separate", "joint"])
def test_ledgers_of_earlier_versions_are_read(path, clipping):
    """As they were written before they held budgets, and while there were two ways to clip."""
    bought = {
        "epsilon_range": 0.05,
        "adjacency": "add_remove",
        "bound": "max_grad_norm",
        "quantile": 0.8,
        "nominal_size": 40,
    }
    drawn = {
        "epsilon_range": 0.5,
        "mu": None,
        "adjacency": "add_remove",
        "epsilon": 0.55,
        "delta": 0.0,
        "calibration": "range",
        "radius": 0.5,
        "regularization": 0.0,
        "nominal_size": 40,
        "max_grad_norm": 1.0,
        "max_curvature": 1.0,
        "projection": "stiefel",
        "proj_dim": 5,
        "seed": 1,
        "sampler": "exact",
        "failure_probability": 0.0,
        "bounds": "bought",
        "clipping": clipping,
        "round": 1,
        "rounds": 1,
    }
    stamp = {"time": "2025-01-01T00:00:00+00:00"}
    lines = [b""]
    for entry in (
        {"format": "opacus-expm ledger", "version": 1},
        {"release": bought, **stamp},
        {"release": drawn, **stamp},
        {"step": {"noise_multiplier": 2.0, "sample_rate": 0.25}, **stamp},
    ):
        linked = {**entry, "previous": hashlib.sha256(lines[-1]).hexdigest()}
        seal = hashlib.sha256(json.dumps(linked).encode()).hexdigest()
        lines.append(json.dumps({**linked, "sha256": seal}).encode())
    path.write_bytes(b"\n".join(lines[1:]) + b"\n")
    accountant = ExpMAccountant(ledger_path=path)
    assert accountant.budget is None
    assert [event.epsilon_range for event in accountant.releases] == [0.05, 0.5]
    assert accountant.history == [(2.0, 0.25, 1)]
    accountant.record(release(0.25))
    assert [event.epsilon_range for event in charged(path)[0]] == [0.05, 0.5, 0.25]


def test_reopening_gives_the_same_totals(path):
    first = ExpMAccountant(ledger_path=path)
    first.record(release(0.7))
    first.record(release(20.0, mu=0.3, delta=1e-5))
    totals = [first.get_epsilon(delta) for delta in (0.0, 1e-5)]
    again = ExpMAccountant(ledger_path=path)
    assert again.releases == first.releases
    assert [again.get_epsilon(delta) for delta in (0.0, 1e-5)] == totals
    first.step(noise_multiplier=1.5, sample_rate=0.1)
    first.step(noise_multiplier=1.5, sample_rate=0.1)
    again = ExpMAccountant(ledger_path=path)
    assert again.history == first.history == [(1.5, 0.1, 2)]
    assert len(again) == 4
    assert again.get_epsilon(0.0) == math.inf


def test_reopening_writes_nothing(path, complete):
    path.write_bytes(complete[0])
    assert charged(path) == complete[1]
    assert path.read_bytes() == complete[0]


def test_what_others_charged_counts(path):
    """Two accountants on one file: what one charges, the other reports, and neither loses anything."""
    one, other = ExpMAccountant(ledger_path=path), ExpMAccountant(ledger_path=path)
    one.record(release(1.0))
    other.record(release(0.5))
    assert [r.epsilon for r in other.releases] == [1.0, 0.5]
    one.step(noise_multiplier=1.0, sample_rate=0.5)
    assert [r.epsilon for r in one.releases] == [1.0, 0.5]
    with pytest.raises(ValueError, match="replace_one"):
        other.record(release(1.0, adjacency="replace_one"))


@pytest.mark.parametrize("ask", ["get_epsilon", "remaining", "check", "check_adjacency"])
def test_questions_are_answered_from_the_file(path, ask):
    """ε spent, ε left and what may be charged are those of the ledger, not of what this process happened to see."""
    one, other = (ExpMAccountant(ledger_path=path, budget=(1.5, 0.0)) for _ in range(2))
    one.record(release(1.0))
    if ask == "get_epsilon":
        assert other.get_epsilon() == 1.0
    elif ask == "remaining":
        assert other.remaining() == 0.5
    elif ask == "check":
        with pytest.raises(BudgetExceeded):
            other.check(release(1.0))
    else:
        with pytest.raises(ValueError, match="replace_one"):
            other.check_adjacency("replace_one")


def test_the_file_is_read_under_the_lock(path, monkeypatch):
    """A line that another process is writing would look torn to a reader without the lock, and be closed as such."""
    locks, held, read = [], [], Path.read_bytes

    class Watched(FileLock):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            locks.append(self)

    def watched(self):
        if self == path:
            held.append(any(lock.is_locked for lock in locks))
        return read(self)

    monkeypatch.setattr(ledger, "FileLock", Watched)
    monkeypatch.setattr(Path, "read_bytes", watched)
    accountant = ExpMAccountant(ledger_path=path)
    accountant.record(release())
    accountant.step(noise_multiplier=1.0, sample_rate=0.5)
    assert len(held) >= 3
    assert all(held)


@pytest.mark.parametrize(
    "step",
    [
        {"noise_multiplier": 0.0, "sample_rate": 0.5},
        {"noise_multiplier": 1.0, "sample_rate": 1.5},
        {"noise_multiplier": math.nan, "sample_rate": 0.5},
        {"noise_multiplier": math.inf, "sample_rate": 0.5},
    ],
)
def test_nothing_is_written_that_cannot_be_read(path, step):
    """A step without a finite cost is either refused, or still there, and costly, after reopening."""
    accountant = ExpMAccountant(ledger_path=path)
    accountant.record(release())
    before = path.read_bytes()
    try:
        accountant.step(**step)
    except ValueError:
        assert path.read_bytes() == before
        assert charged(path) == ([release()], [])
        return
    assert len(ExpMAccountant(ledger_path=path)) == 2
    assert ExpMAccountant(ledger_path=path).get_epsilon(1e-5) == math.inf


def test_a_ledger_in_a_file_is_not_replaced(path):
    accountant = ExpMAccountant(ledger_path=path)
    accountant.record(release())
    with pytest.raises(ValueError, match="ledger_path"):
        accountant.load_state_dict(ExpMAccountant().state_dict())
    assert charged(path) == ([release()], [])


# --- Foreign and altered files ---------------------------------------------------------------------------------------

FOREIGN = {
    "text": b"dear diary\n",
    "text without an end": b"dear diary",
    "json": b'{"a": 1}\n',
    "list": b"[1, 2]\n",
    "binary": bytes(range(256)),
    "blank line": b"\n",
    "almost a header": HEADER.replace(b"opacus", b"Opacus"),
    "almost a ledger": HEADER + b'"previous": "' + b"0" * 64 + b'"}\n',
    "a later version": HEADER.replace(b"1", b"2")
    + b'"previous": "'
    + hashlib.sha256(b"").hexdigest().encode()
    + b'"}\n',
    "a ledger's middle": b'{"release": {}, "previous": "' + hashlib.sha256(b"").hexdigest().encode() + b'"}\n',
}


@pytest.mark.parametrize("name", FOREIGN)
def test_foreign_files_are_refused_and_left_alone(path, name):
    path.write_bytes(FOREIGN[name])
    with pytest.raises(LedgerError, match="ledger"):
        ExpMAccountant(ledger_path=path)
    assert path.read_bytes() == FOREIGN[name]


@pytest.mark.parametrize(
    "entry",
    [
        {"release": {**release().to_dict(), "epsilon_range": -1.0}},
        {"release": {**release().to_dict(), "epsilon_range": 10**400}},
        {"release": {**release().to_dict(), "mu": 10**400}},
        {"release": {**release().to_dict(), "surprise": 1}},
        {"release": {"epsilon": 1.0}},
        {"release": None},
        {"step": {"noise_multiplier": "1", "sample_rate": 0.5}},
        {"step": {"noise_multiplier": 1.0, "sample_rate": 2.0}},
        {"step": {"noise_multiplier": 1.0}},
        {"step": 3},
        {"something": "else"},
        {},
    ],
    ids=lambda entry: str(entry)[:80],
)
def test_entries_that_no_event_left_are_refused(path, entry):
    """Even when they are well linked."""
    ExpMAccountant(ledger_path=path).record(release())
    LedgerFile(path).append(entry)
    content = path.read_bytes()
    with pytest.raises(LedgerError):
        ExpMAccountant(ledger_path=path)
    assert path.read_bytes() == content


def test_two_adjacencies_in_one_file_are_refused(path):
    ExpMAccountant(ledger_path=path).record(release())
    LedgerFile(path).append({"release": release(adjacency="replace_one").to_dict()})
    with pytest.raises(LedgerError):
        ExpMAccountant(ledger_path=path)


def altered(content, position, byte):
    """The content with another byte at the position."""
    changed = bytearray(content)
    changed[position] = byte if byte != changed[position] else byte ^ 1
    return bytes(changed)


@settings(max_examples=300)
@given(st.data(), st.one_of(st.integers(0, 255), st.sampled_from(b'0123456789 \n".')))
def test_an_altered_byte_is_noticed(tmp_path_factory, complete, data, byte):
    """Anywhere but in the last line: the next line's digest no longer fits."""
    content, _ = complete
    last = content.rindex(b"\n", 0, -1)
    position = data.draw(st.integers(0, last))
    path = tmp_path_factory.getbasetemp() / "altered.jsonl"
    path.write_bytes(altered(content, position, byte))
    with pytest.raises(LedgerError):
        ExpMAccountant(ledger_path=path)


@EVERY_BYTE_OR_SOME
def test_an_altered_last_line_is_noticed(path, complete, every):
    """Every byte of it, its end of line included: an alteration is refused, or it changes no charge."""
    content, expected = complete
    passed = []
    for position in sorted({*range(content.rindex(b"\n", 0, -1) + 1, len(content), every), len(content) - 1}):
        for byte in b'09 x"':
            path.write_bytes(altered(content, position, byte))
            try:
                found = charged(path)
            except LedgerError:
                continue
            if found != expected:
                passed.append((position, bytes([byte])))
    assert passed == []


@pytest.mark.parametrize("change", ["drop", "swap", "repeat", "blank"])
def test_lost_and_moved_lines_are_noticed(path, complete, change):
    content, _ = complete
    lines = content.splitlines(keepends=True)
    for i in range(len(lines) - 1):
        changed = list(lines)
        if change == "drop":
            del changed[i]
        elif change == "swap":
            changed[i], changed[i + 1] = changed[i + 1], changed[i]
        elif change == "repeat":
            changed.insert(i, lines[i])
        else:
            changed.insert(i + 1, b"\n")
        path.write_bytes(b"".join(changed))
        with pytest.raises(LedgerError):
            ExpMAccountant(ledger_path=path)


# --- A file that changes under a live process ------------------------------------------------------------------------


def deleted(path, earlier):
    path.unlink()


def cut(path, earlier):
    path.write_bytes(earlier)


def emptied(path, earlier):
    path.write_bytes(b"")


def replaced(path, earlier):
    """By a sound ledger that is as long and holds other charges."""
    path.unlink()
    ExpMAccountant(ledger_path=path).record(release(0.25))


def restarted(path, earlier):
    """Deleted, and begun again by another process."""
    path.unlink()
    ExpMAccountant(ledger_path=path)


@pytest.mark.parametrize("change", [deleted, cut, emptied, replaced, restarted])
@pytest.mark.parametrize("ask", ["record", "step", "get_epsilon", "remaining", "check"])
def test_a_file_that_loses_charges_is_noticed(path, change, ask):
    """What this process has seen must be there: nothing is charged, and nothing stated, before it is."""
    accountant = ExpMAccountant(ledger_path=path)
    accountant.record(release(0.5))
    earlier = path.read_bytes()
    accountant.record(release(1.0))
    known, whole = accountant.state_dict(), path.read_bytes()
    change(path, earlier)
    calls = {
        "record": lambda: accountant.record(release(2.0)),
        "step": lambda: accountant.step(noise_multiplier=1.0, sample_rate=0.5),
        "get_epsilon": accountant.get_epsilon,
        "remaining": accountant.remaining,
        "check": lambda: accountant.check(release(2.0)),
    }
    left = path.read_bytes() if path.exists() else None
    for _ in range(2):  # asking does not make it good
        with pytest.raises(LedgerError, match=r"deleted, cut or replaced .* Put back the file"):
            calls[ask]()
    assert (path.read_bytes() if path.exists() else None) == left
    assert accountant.state_dict() == known
    path.write_bytes(whole)
    accountant.record(release(2.0))
    assert accountant.get_epsilon() == 3.5


def test_a_deleted_file_stops_the_draw(path, monkeypatch):
    engine, statistics = ExpMQuadEngine(ledger_path=path), gathered()
    engine.release(statistics, 0.5, 0.5)
    path.unlink()

    def drawn(self, *arguments):
        raise AssertionError("drawn without a charge")

    monkeypatch.setattr(Exact, "sample", drawn)
    with pytest.raises(LedgerError, match="deleted"):
        engine.release(statistics, 0.5, 0.5)


def test_a_torn_line_does_not_look_like_a_lost_one(path):
    """Another process was killed in the middle of a line: the file has grown, and goes on."""
    accountant = ExpMAccountant(ledger_path=path)
    accountant.record(release(0.5))
    for torn in (b'{"release": {"eps', b'{"rel'):
        with path.open("ab") as file:
            file.write(torn)
        accountant.record(release(0.5))
    assert accountant.get_epsilon() == 1.5
    assert charged(path)[0] == [release(0.5)] * 3


def test_two_paths_to_one_file_share_lock_and_ledger(path, tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    link = tmp_path / "elsewhere" / "link.jsonl"
    link.symlink_to(path)  # before there is a file, too
    (tmp_path / "directory").symlink_to(tmp_path, target_is_directory=True)
    monkeypatch.chdir(tmp_path)
    paths = [path, link, tmp_path / "directory" / path.name, path.name]
    accountants = [ExpMAccountant(ledger_path=p) for p in paths]
    monkeypatch.chdir(tmp_path / "elsewhere")
    for accountant in accountants:
        accountant.record(release(0.5))
    assert len({LedgerFile(p).locked().lock_file for p in paths[:3]}) == 1
    assert len({accountant._file.locked().lock_file for accountant in accountants}) == 1
    assert [accountant.get_epsilon() for accountant in accountants] == [2.0] * 4
    assert link.is_symlink()
    verify_chain(path)


# --- Crashes ---------------------------------------------------------------------------------------------------------


def survives(path, torn, sure):
    """Reopen a torn file again and again, with a charge between: nothing is lost, and the file never shrinks.

    Args:
        path: where to put it.
        torn: content that a crash left.
        sure: charges in its whole lines.
    """
    path.write_bytes(torn)
    first = charged(path)[0]
    assert first[: len(sure)] == sure
    assert len(first) <= len(sure) + 1  # a whole entry that lacks its end of line may count
    content = path.read_bytes()
    assert content.startswith(torn)
    assert charged(path)[0] == first
    assert path.read_bytes() == content
    accountant = ExpMAccountant(ledger_path=path)
    accountant.record(release(3.0))
    assert path.read_bytes().startswith(content)
    assert charged(path)[0] == [*first, release(3.0)]


def failing_cuts(path, content, start, stop, sure, every):
    """Cuts of the content in [start, stop), the last included, that the ledger does not survive."""
    failed = {}
    for cut in sorted({*range(start, stop, every), stop - 1}):
        try:
            survives(path, content[:cut], sure)
        except (AssertionError, LedgerError) as error:
            failed[cut] = str(error)
    return failed


@pytest.fixture
def two_releases(path):
    """Content with a header and two releases, and where its lines end."""
    accountant = ExpMAccountant(ledger_path=path)
    accountant.record(release(1.0))
    accountant.record(release(2.0))
    content = path.read_bytes()
    path.unlink()
    return content, [i + 1 for i, byte in enumerate(content) if byte == 10]


@EVERY_BYTE_OR_SOME
def test_a_last_line_torn_anywhere(path, two_releases, every):
    content, ends = two_releases
    assert failing_cuts(path, content, ends[1], len(content) + 1, [release(1.0)], every) == {}


@EVERY_BYTE_OR_SOME
def test_a_header_torn_anywhere(path, two_releases, every):
    content, ends = two_releases
    assert failing_cuts(path, content, 0, ends[0] + 1, [], every) == {}


@EVERY_BYTE_OR_SOME
def test_a_second_crash_while_a_torn_line_is_closed(path, two_releases, every):
    content, ends = two_releases
    path.write_bytes(content[: ends[1] + 30])
    charged(path)
    closed = path.read_bytes()
    assert len(closed) > ends[1] + 30
    assert failing_cuts(path, closed, ends[1] + 30, len(closed) + 1, [release(1.0)], every) == {}


@EVERY_BYTE_OR_SOME
def test_a_second_crash_while_a_torn_header_is_closed(path, two_releases, every):
    content, _ = two_releases
    path.write_bytes(content[:30])
    charged(path)
    closed = path.read_bytes()
    assert failing_cuts(path, closed, 30, len(closed) + 1, [], every) == {}


def test_a_torn_line_in_the_middle_is_not_excused(path, two_releases):
    """Only the last line can be torn by a crash; the words that close one cannot be put in later."""
    content, ends = two_releases
    path.write_bytes(content[: ends[1] - 9] + b"\n" + content[ends[1] :])
    with pytest.raises(LedgerError, match="line 2"):
        ExpMAccountant(ledger_path=path)
    path.write_bytes(content[: ends[1] - 9])
    charged(path)
    closed = path.read_bytes()
    position = closed.index(b'"epsilon_range": 1.0') + len(b'"epsilon_range": ')
    path.write_bytes(altered(closed, position, ord("2")))
    with pytest.raises(LedgerError):
        ExpMAccountant(ledger_path=path)


# --- The draw comes last ---------------------------------------------------------------------------------------------


def gathered():
    x = torch.randn(8, 3, generator=torch.Generator().manual_seed(0))
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Linear(3, 1)
    return ExpMQuadEngine().gather(
        model, loader, 2, criterion=nn.MSELoss(), max_grad_norm=1.0, max_curvature=1.0, projection=Sparse(seed=0)
    )


def test_a_charge_is_on_disk_before_the_draw(path, monkeypatch):
    """Written, synced, then drawn: in that order, and the sync is of the ledger's file."""
    seen, sync, draw = [], os.fsync, Exact.sample

    def watched_sync(descriptor):
        if os.fstat(descriptor).st_ino == path.stat().st_ino:
            seen.append(("sync", path.read_bytes().count(b'"release"')))
        sync(descriptor)

    def watched_draw(self, *arguments):
        seen.append(("draw", path.read_bytes().count(b'"release"')))
        return draw(self, *arguments)

    engine, statistics = ExpMQuadEngine(ledger_path=path), gathered()
    monkeypatch.setattr(os, "fsync", watched_sync)
    monkeypatch.setattr(Exact, "sample", watched_draw)
    for _ in range(2):
        engine.release(statistics, 0.5, 0.5)
    assert seen == [("sync", 1), ("draw", 1), ("sync", 2), ("draw", 2)]


def test_a_charge_that_cannot_be_written_stops_the_draw(path, monkeypatch):
    engine, statistics = ExpMQuadEngine(ledger_path=path), gathered()
    engine.release(statistics, 0.5, 0.5)

    def full(descriptor):
        raise OSError(28, "No space left on device")

    def drawn(self, *arguments):
        raise AssertionError("drawn without a charge on disk")

    monkeypatch.setattr(os, "fsync", full)
    monkeypatch.setattr(Exact, "sample", drawn)
    with pytest.raises(OSError, match="No space left"):
        engine.release(statistics, 0.5, 0.5)


# --- Several processes -----------------------------------------------------------------------------------------------

NURSERY = """
import json, os, resource, signal, sys, time, traceback

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from opacus_expm import ExpMAccountant, ExpMQuadEngine, Release, Statistics
from opacus_expm.accounting.filters import BudgetExceeded
from opacus_expm.mechanism.sampling import Exact

torch.set_num_threads(1)
x = torch.randn(8, 3)
statistics = ExpMQuadEngine().gather(
    nn.Linear(3, 1), DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8), 2,
    criterion=nn.MSELoss(), max_grad_norm=1.0, max_curvature=1.0,
)


def record(path, facts, count, go, budget=None):
    "Charge many releases; the exit code is how many were refused."
    accountant = ExpMAccountant(ledger_path=path, budget=None if budget is None else tuple(budget))
    while not os.path.exists(go):
        time.sleep(1e-3)
    refused = 0
    for _ in range(count):
        try:
            accountant.record(Release.from_dict(facts))
        except BudgetExceeded:
            refused += 1
    return refused


def draw(path, released):
    "Release for ever, and tell of each release once it is made."
    engine = ExpMQuadEngine(ledger_path=path)
    with open(released, "ab", buffering=0) as file:
        while True:
            engine.release(statistics, 0.01, 0.5)
            file.write(b"released\\n")


def die(path, late):
    "Be killed in the middle of a draw, with the charge made before it or, wrongly, after."
    engine = ExpMQuadEngine(ledger_path=path)
    if late:
        charge, build, owed = ExpMAccountant.record, Statistics.module_at, []
        ExpMAccountant.record = lambda self, release, **_: owed.append((self, release))

        def pay(self, coordinates):
            charge(*owed.pop())
            return build(self, coordinates)

        Statistics.module_at = pay
    engine.release(statistics, 0.25, 0.5)
    Exact.sample = lambda *arguments: os.kill(os.getpid(), signal.SIGKILL)
    engine.release(statistics, 0.5, 0.5)


def fill(path, facts, room):
    "Charge where the disk has room for part of the line only; 7 if that was said."
    accountant = ExpMAccountant(ledger_path=path)
    limit = os.path.getsize(path) + room
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    try:
        accountant.record(Release.from_dict(facts))
    except OSError:
        return 7
    return 0


for line in sys.stdin:
    task, arguments = json.loads(line)
    if task == "wait":
        answer = os.waitstatus_to_exitcode(os.waitpid(arguments["pid"], 0)[1])
    else:
        answer = os.fork()
        if answer == 0:
            code = 255
            try:
                code = globals()[task](**arguments)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
    print(answer, flush=True)
"""


class Nursery:
    """A process that has the package loaded and forks workers; each worker opens the ledger itself."""

    def __init__(self):
        self.process = subprocess.Popen(
            [sys.executable, "-c", NURSERY],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    def ask(self, task, **arguments):
        print(json.dumps([task, arguments]), file=self.process.stdin, flush=True)
        answer = self.process.stdout.readline()
        assert answer, "the nursery died"
        return int(answer)

    def run(self, task, **arguments):
        """Exit code of a worker, negative if a signal ended it."""
        return self.ask("wait", pid=self.ask(task, **arguments))

    def close(self):
        self.process.stdin.close()
        self.process.stdout.close()
        assert self.process.wait(20) == 0


@pytest.fixture(scope="module")
def nursery():
    if not hasattr(os, "fork"):
        pytest.skip("needs fork")
    started = Nursery()
    yield started
    started.close()


@pytest.mark.slow
def test_two_processes_lose_nothing(path, tmp_path, nursery):
    go = tmp_path / "go"
    pids = [
        nursery.ask("record", path=str(path), facts=release(e).to_dict(), count=25, go=str(go)) for e in (0.25, 0.5)
    ]
    go.touch()
    assert [nursery.ask("wait", pid=pid) for pid in pids] == [0, 0]
    assert len(verify_chain(path)) == 51
    releases, _ = charged(path)
    assert sorted(r.epsilon for r in releases) == [0.25] * 25 + [0.5] * 25
    assert ExpMAccountant(ledger_path=path).get_epsilon() == 25 * 0.75


@pytest.mark.slow
def test_two_processes_keep_one_budget(path, tmp_path, nursery):
    """Thirty releases of 0.125 fit into 3.75, whoever makes them; both go on trying."""
    go = tmp_path / "go"
    facts = release(0.125).to_dict()
    options = {"path": str(path), "facts": facts, "count": 25, "go": str(go), "budget": [3.75, 0.0]}
    pids = [nursery.ask("record", **options) for _ in range(2)]
    go.touch()
    refused = [nursery.ask("wait", pid=pid) for pid in pids]
    assert sum(refused) == 20
    assert max(refused) <= 25
    assert ExpMAccountant(ledger_path=path).get_epsilon() == 3.75
    assert len(verify_chain(path)) == 32  # a header, the budget, and thirty charges


@pytest.mark.slow
def test_a_process_killed_at_any_moment_has_charged_what_it_released(path, tmp_path, nursery):
    """Killed after a random number of releases and a random moment more; every model that left is in the ledger."""
    source, released = random.Random(0), tmp_path / "released"
    released.touch()

    def left():
        return released.read_bytes().count(b"\n")

    kills, give_up = 12, time.monotonic() + 25
    for _ in range(kills):
        enough = left() + source.randrange(4)
        pid = nursery.ask("draw", path=str(path), released=str(released))
        while left() < enough and time.monotonic() < give_up:
            time.sleep(1e-3)
        time.sleep(source.uniform(0, 0.02))
        os.kill(pid, signal.SIGKILL)
        assert nursery.ask("wait", pid=pid) == -signal.SIGKILL
        charges = len(charged(path)[0]) if path.exists() else 0
        assert charges >= left()
    assert left() >= 5
    # Each kill can have cost one charge whose draw did not leave, and no more.
    assert left() <= charges <= left() + kills
    assert ExpMAccountant(ledger_path=path).get_epsilon() == pytest.approx(0.01 * charges, rel=1e-12)


@pytest.mark.slow
def test_a_process_killed_in_the_draw_has_charged_it(path, tmp_path, nursery):
    """The same without chance; an engine that charges after the draw does not pass."""
    assert nursery.run("die", path=str(path), late=False) == -signal.SIGKILL
    assert [r.epsilon for r in charged(path)[0]] == [0.25, 0.5]
    verify_chain(path)
    late = tmp_path / "late.jsonl"
    assert nursery.run("die", path=str(late), late=True) == -signal.SIGKILL
    assert [r.epsilon for r in charged(late)[0]] == [0.25]


@pytest.mark.slow
@pytest.mark.parametrize("room", [0, 1, 100])
def test_a_full_disk_is_noticed(path, nursery, room):
    """Writing part of a line is not a charge: the release must fail, and the ledger go on."""
    ExpMAccountant(ledger_path=path).record(release(1.0))
    before = path.stat().st_size
    assert nursery.run("fill", path=str(path), facts=release(2.0).to_dict(), room=room) == 7
    assert path.stat().st_size == before + room
    assert charged(path)[0] == [release(1.0)]
