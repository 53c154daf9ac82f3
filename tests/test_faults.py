"""Interruptions at any point of a pass or a draw, memory that runs out, and models that give no number.

After any of them the user's module is as it was, nothing has left, nothing is charged whose draw cannot have been made,
and the same call, made again, gives what it gives without the fault.
"""

import contextlib
import copy
import gc
import inspect
import itertools
import math
import os
import random
import re
import signal
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import quick
import torch
from hypothesis import settings
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import opacus_expm
from opacus_expm import ExpMQuadEngine, Sparse, paper
from opacus_expm.accounting.accountant import ExpMAccountant
from opacus_expm.accounting.events import Purchase, Release
from opacus_expm.accounting.ledger import LedgerFile
from opacus_expm.gathering import randomness
from opacus_expm.gathering.criteria import CrossEntropy
from opacus_expm.learned import Walk
from opacus_expm.mechanism.sampling import Exact

RECORDS, FEATURES, CLASSES = 24, 4, 3
PACKAGE = str(Path(opacus_expm.__file__).parent)
GIVEN = {"max_grad_norm": 0.5, "max_curvature": 0.3}
MODES = ("hooks", "functorch")
pytestmark = pytest.mark.usefixtures("seeded_noise")


def make_model():
    """Every kind of state: buffers, a frozen parameter, submodules in different modes, gradients, hooks, attributes."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(FEATURES, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Dropout(0.5), nn.Linear(6, CLASSES))
    model[0].bias.requires_grad_(False)
    model[4].weight.grad = torch.ones_like(model[4].weight)
    model.train()
    model[3].eval()
    model[2].register_forward_hook(lambda *_: None)
    model.note = ["the user's own"]
    return model


def make_tensors(count=RECORDS):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(count, FEATURES, generator=generator), torch.randint(CLASSES, (count,), generator=generator)


def make_loader(batch_size=16, dataset=None):
    return DataLoader(dataset or TensorDataset(*make_tensors()), batch_size=batch_size)


def state_of(module):
    """Everything about a module that a fault might change."""
    tensors = [*module.named_parameters(), *module.named_buffers()]
    return (
        [(n, t.data_ptr(), t._version, t.requires_grad, t.detach().clone().numpy().tobytes()) for n, t in tensors],
        [
            (n, None if p.grad is None else (p.grad.data_ptr(), p.grad.sum().item()))
            for n, p in module.named_parameters()
        ],
        [(n, m.training, [len(v or ()) for k, v in vars(m).items() if "hook" in k]) for n, m in module.named_modules()],
        [(n, sorted(k for k in vars(m) if k != "forward")) for n, m in module.named_modules()],
        list(getattr(module, "note", [])),
    )


def global_state():
    """What the package sets for a while and has to set back, and the generators it must not use."""
    return (
        torch.backends.cuda.matmul.allow_tf32,
        torch.backends.cudnn.allow_tf32,
        torch.backends.mha.get_fastpath_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.is_grad_enabled(),
        torch.get_rng_state().numpy().tobytes(),
        np.random.get_state()[1].tobytes(),
        random.getstate(),
    )


def weights(module):
    return torch.cat([p.detach().flatten() for p in module.parameters()])


# --- interruptions, line by line ------------------------------------------------------------------------------------


class Interruption:
    """Raises at the n-th line that the package executes, or counts the lines and says where they are."""

    def __init__(self, at=None):
        self.at, self.passed, self.where = at, [], None

    def __call__(self, frame, event, _):
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        if event == "line":
            self.passed.append((frame.f_code.co_filename, frame.f_lineno))
            if len(self.passed) - 1 == self.at:
                self.where = self.places()[-1]
                raise KeyboardInterrupt
        return self

    def places(self):
        """The lines that were passed, with their files as the package knows them."""
        names = {file: str(Path(file).relative_to(PACKAGE)) for file, _ in self.passed}
        return [(names[file], number) for file, number in self.passed]

    @contextlib.contextmanager
    def watching(self):
        before = sys.gettrace()
        sys.settrace(self)
        try:
            yield
        finally:
            sys.settrace(before)


def one_call(engine, model, **options):
    """Two rounds in one call."""
    return engine.make_private_expm(model, make_loader(), 1.0, 0.3, 5, rounds=2, **options)


def in_two_steps(engine, model, **options):
    """A pass, and a draw from what it left."""
    statistics = engine.gather(model, make_loader(), 5, epsilon=1.0, **options)
    return engine.release(statistics, 1.0, 0.3)


def training_loop(engine, model, **options):
    """An Opacus loop trains its module in place: here a copy, so that faults start from the same."""
    return loop_in_place(engine, copy.deepcopy(model), **options)


def loop_in_place(engine, model, **options):
    """Two epochs of an Opacus loop, with the criterion that it is given or, where there is none, its own."""
    module, optimizer, *given, loader = engine.make_private_with_epsilon(
        module=model,
        optimizer=torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1),
        data_loader=make_loader(),
        target_epsilon=1.0,
        target_delta=0.0,
        epochs=2,
        radius=0.3,
        proj_dim=5,
        **{"grad_sample_mode": "ghost", **options},
    )
    [criterion] = given or [nn.CrossEntropyLoss()]
    for _ in range(2):
        for x, y in loader:
            optimizer.zero_grad()
            criterion(module(x), y).backward()
            optimizer.step()
    return module


def options_of(**more):
    return {"criterion": nn.CrossEntropyLoss(), "projection": Sparse(seed=3)} | more


# What is run, and with what; "bought" bounds are charged like draws.
CALLS = {
    "hooks": (one_call, GIVEN | {"grad_sample_mode": "hooks"}),
    "functorch": (one_call, GIVEN | {"grad_sample_mode": "functorch"}),
    "bought": (one_call, {}),
    "two steps": (in_two_steps, {}),
    "loop": (training_loop, GIVEN),
    "loop, functorch": (training_loop, GIVEN | {"grad_sample_mode": "functorch"}),
}


class Draws:
    """Counts draws and purchases that were begun."""

    def __init__(self, monkeypatch):
        self.count = 0
        sample, quantile = Exact.sample, opacus_expm.bounds.private_quantile

        def counted(function):
            def call(*arguments, **options):
                self.count += 1
                return function(*arguments, **options)

            return call

        monkeypatch.setattr(Exact, "sample", counted(sample))
        monkeypatch.setattr(opacus_expm.bounds, "private_quantile", counted(quantile))


@contextlib.contextmanager
def quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def check_fault(call, options, fault, directory, draws, expected, error=KeyboardInterrupt):
    """One fault: what must hold after it, and after the same call made again."""
    path = directory / "ledger.jsonl"
    for old in directory.iterdir():
        old.unlink()
    engine, model = ExpMQuadEngine(budget=(3.0, 0.0), ledger_path=path), make_model()
    before, around, draws.count = state_of(model), global_state(), 0
    with pytest.raises(error), quiet(), fault:
        call(engine, model, **options_of(**options))
    assert state_of(model) == before
    assert global_state() == around
    gc.collect()  # a loop holds on to itself
    assert engine.accountant._running() is None
    assert not engine.accountant._file._lock.is_locked
    entries = [entry["release"] for entry in LedgerFile(path).entries() if "release" in entry]
    charged = [Purchase if "bound" in facts else Release for facts in entries]
    assert draws.count <= len(charged) <= draws.count + 1
    engine.get_epsilon()  # reads the file
    assert [type(e) for e in engine.accountant.releases] == charged
    again = call(engine, model, **options_of(**options))
    assert torch.equal(weights(again), expected)
    assert state_of(model) == before
    return len(charged)


def undisturbed(call, options, path, watch=None):
    """The weights that a call gives, whose lines may be watched."""
    engine, model = ExpMQuadEngine(budget=(3.0, 0.0), ledger_path=path), make_model()
    with watch.watching() if watch else contextlib.nullcontext():
        return weights(call(engine, model, **options_of(**options)))


def watched(call, options, path):
    """The weights that a call gives, and the places in the package that it passes once its caches are filled."""
    undisturbed(call, options, path.with_name("first.jsonl"))
    watch = Interruption()
    return undisturbed(call, options, path, watch), watch.places()


def some_of(places, points):
    """When to interrupt: at the first and the last time that each place is reached, or at as many of these as asked for."""
    first, last = {}, {}
    for number, place in enumerate(places):
        first.setdefault(place, number)
        last[place] = number
    numbers = sorted({*first.values(), *last.values()})
    return numbers if points is None else [numbers[int(i)] for i in np.linspace(0, len(numbers) - 1, points)]


# What a context manager does on its way out cannot be made safe from an interrupt in these very lines. They only set back
# torch's flags and the states of generators, and give up what is left of a plan. A "with" is passed twice when traced, the
# second time before its exit, where no signal can come.
CLEANUP = ("torch.backends", "_set_states(", "plan.end()", "self._admission.end()", "self._open = []", "with ")
SET_BACK, _START = inspect.getsourcelines(randomness._set_states)


def is_cleanup(place):
    file, number = place
    if file == "gathering/randomness.py" and _START <= number < _START + len(SET_BACK):
        return True
    line = (Path(PACKAGE) / file).read_text().splitlines()[number - 1].strip()
    return line.startswith(CLEANUP) or line in ("yield", "finally:")


@pytest.mark.filterwarnings("ignore:a private bound")
@pytest.mark.parametrize("name", quick.only(["functorch"], CALLS))
def test_an_interrupt_at_any_line(name, tmp_path, monkeypatch):
    """At every line that the call passes where there is time (HYPOTHESIS_PROFILE=fuzz), else at some."""
    gc.collect()  # what other tests left would end, line by line, in the middle of a call
    call, options = CALLS[name]
    (tmp_path / "before").mkdir()
    expected, places = watched(call, options, tmp_path / "before" / "ledger.jsonl")
    directory, draws = tmp_path / "ledger", Draws(monkeypatch)
    directory.mkdir()
    seen = set()
    for number in some_of(places, None if settings.get_current_profile_name() == "fuzz" else 9):
        if not is_cleanup(places[number]):
            fault = Interruption(number)
            seen.add(check_fault(call, options, fault.watching(), directory, draws, expected))
            assert fault.where == places[number]
    assert 0 in seen
    assert max(seen) > 0


def test_a_fault_that_leaves_something_behind_is_noticed(tmp_path, monkeypatch):
    """The check itself can fail: a pass that works on the user's own module, and a draw before its charge."""
    call, options = CALLS["hooks"]
    (tmp_path / "before").mkdir()
    expected, places = watched(call, options, tmp_path / "before" / "ledger.jsonl")
    directory, draws = tmp_path / "ledger", Draws(monkeypatch)
    directory.mkdir()
    middle = next(n for n, (file, _) in enumerate(places) if file == "gathering/layers.py")
    with monkeypatch.context() as patched:
        patched.setattr(opacus_expm.gathering.passes, "working_copy", lambda module: module.eval())
        with pytest.raises(AssertionError):
            check_fault(call, options, Interruption(middle).watching(), directory, draws, expected)
    with monkeypatch.context() as patched:
        patched.setattr(ExpMAccountant, "record", lambda *_, **__: None)
        with pytest.raises(AssertionError):
            check_fault(
                call, options, failing(opacus_expm.gathering.statistics, "moved", 1), directory, draws, expected, Fault
            )


# --- faults of the user's own parts ---------------------------------------------------------------------------------


class Fault(Exception):
    """What the user's code raises."""


@contextlib.contextmanager
def failing(target, name, number):
    """The number-th call of ``target.name`` raises."""
    original, calls = getattr(target, name), itertools.count(1)

    def call(*arguments, **options):
        if next(calls) == number:
            raise Fault
        return original(*arguments, **options)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(target, name, call)
        yield


FAULTS = {
    "data set": (TensorDataset, "__getitem__", (1, 20, 47)),
    "collate": (torch.utils.data._utils.fetch._MapDatasetFetcher, "fetch", (2,)),
    "model": (nn.Tanh, "forward", (1, 5)),
    "model, backward": (torch.autograd, "grad", (1, 8)),
    "criterion": (CrossEntropy, "gradient_and_factor", (1, 3)),
    "eigenvalues": (np.linalg, "eigh", (1, 2)),
    "sampler": (Exact, "sample", (1, 2)),
    "ledger": (LedgerFile, "append", (1, 2)),
    "disk": (os, "fsync", (1, 2)),
    "new module": (opacus_expm.gathering.statistics, "moved", (1, 2)),
}


@pytest.mark.parametrize(
    ("stage", "name"),
    quick.only(
        [
            ("ledger", "hooks"),
            ("sampler", "loop"),
            *((stage, "functorch") for stage in ("model", "disk", "new module")),
        ],
        itertools.product(FAULTS, ["hooks", "functorch", "loop"]),
    ),
)
def test_an_exception_at_any_stage(stage, name, tmp_path, monkeypatch):
    call, options = CALLS[name]
    target, attribute, numbers = FAULTS[stage]
    if stage == "model, backward" and name == "functorch":
        pytest.skip("functorch has no such call")
    (tmp_path / "before").mkdir()
    expected = undisturbed(call, options, tmp_path / "before" / "ledger.jsonl")
    directory, draws = tmp_path / "ledger", Draws(monkeypatch)
    directory.mkdir()
    for number in numbers:
        fault = failing(target, attribute, number)
        charged = check_fault(call, options, fault, directory, draws, expected, error=Fault)
        if stage in ("sampler", "new module", "disk"):  # what may be on disk is charged
            assert charged == number
        if stage in ("ledger", "eigenvalues"):
            assert charged == number - 1


class Ill(Dataset):
    """Raises in the worker that reads one of its records."""

    def __init__(self, ill):
        self.tensors, self.ill = make_tensors(), ill

    def __len__(self):
        return RECORDS

    def __getitem__(self, index):
        if self.ill and index == 17:
            raise Fault
        return tuple(t[index] for t in self.tensors)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork")
def test_an_exception_in_a_worker():
    engine, model = ExpMQuadEngine(), make_model()
    before = state_of(model)
    with pytest.raises(Fault):
        engine.make_private_expm(
            model, DataLoader(Ill(True), batch_size=8, num_workers=1), 1.0, 0.3, 5, **options_of(**GIVEN)
        )
    assert state_of(model) == before
    assert len(engine.accountant) == 0
    found, expected = (
        engine.make_private_expm(
            model, DataLoader(Ill(False), batch_size=8, num_workers=workers), 1.0, 0.3, 5, **options_of(**GIVEN)
        )
        for workers in (1, 0)
    )
    assert torch.equal(weights(found), weights(expected))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["hooks", "loop"])
def test_a_polite_request_to_stop(name, tmp_path, monkeypatch):
    """SIGTERM, with the handler that turns it into SystemExit, in the pass and in the draw."""
    call, options = CALLS[name]
    (tmp_path / "before").mkdir()
    expected = undisturbed(call, options, tmp_path / "before" / "ledger.jsonl")
    directory, draws = tmp_path / "ledger", Draws(monkeypatch)
    directory.mkdir()

    @contextlib.contextmanager
    def terminated(target, attribute):
        def stop(*_):
            raise SystemExit(143)

        def call(*arguments, **options):
            os.kill(os.getpid(), signal.SIGTERM)
            return original(*arguments, **options)

        handler, original = signal.signal(signal.SIGTERM, stop), getattr(target, attribute)
        try:
            with pytest.MonkeyPatch.context() as patched:
                patched.setattr(target, attribute, call)
                yield
        finally:
            signal.signal(signal.SIGTERM, handler)

    for target, attribute, charges in ((nn.Tanh, "forward", 0), (Exact, "sample", 1)):
        fault = terminated(target, attribute)
        assert check_fault(call, options, fault, directory, draws, expected, error=SystemExit) == charges


def test_a_loop_interrupted_while_weights_move_has_its_old_ones(monkeypatch):
    """Half a release is none: the module is put back, the charge stays, and the run is over."""
    engine, model = ExpMQuadEngine(), make_model()
    moved, copy_into = [], opacus_expm.swap.training._copy_into

    def interrupted(parameters, values):
        moved.append(next(iter(parameters)))
        copy_into({moved[-1]: parameters[moved[-1]]}, values)
        if len(moved) == 1:
            raise KeyboardInterrupt
        copy_into(parameters, values)

    monkeypatch.setattr(opacus_expm.swap.training, "_copy_into", interrupted)
    before = weights(model)
    with pytest.raises(KeyboardInterrupt):
        loop_in_place(engine, model, **options_of(**GIVEN))
    assert len(moved) == 2
    assert torch.equal(weights(model), before)
    assert "forward" not in vars(model)
    assert engine.get_epsilon() == 0.5
    loop_in_place(engine, model, **options_of(**GIVEN))
    assert not torch.equal(weights(model), before)


def test_an_interrupted_checkpoint_changes_nothing(tmp_path, monkeypatch):
    engine, path = ExpMQuadEngine(), tmp_path / "model.pt"
    private = one_call(engine, make_model(), **options_of(**GIVEN))
    engine.save_checkpoint(path=path, module=private)
    saved = path.read_bytes()

    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(torch.serialization, "_save", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.save_checkpoint(path=path, module=private)
    assert path.read_bytes() == saved
    assert list(tmp_path.iterdir()) == [path]
    other, module = ExpMQuadEngine(), make_model()
    before = weights(module)
    with monkeypatch.context() as patched:
        patched.setattr(ExpMAccountant, "load_state_dict", interrupted)
        with pytest.raises(KeyboardInterrupt):
            other.load_checkpoint(path=path, module=module)
    assert torch.equal(weights(module), before)
    assert len(other.accountant) == 0
    other.load_checkpoint(path=path, module=module)
    assert torch.equal(weights(module), weights(private))
    assert other.accountant.releases == engine.accountant.releases


# --- models that give no number -------------------------------------------------------------------------------------


class NoNumber(nn.Module):
    """NaN for every record; on the synthetic records of the checks too, or only on inputs as large as the private ones."""

    def __init__(self, always):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.always = nn.Linear(FEATURES, CLASSES), always

    def forward(self, x):
        outputs = self.layer(x)
        return outputs * (math.nan if self.always else torch.where(x.abs().amax(1, keepdim=True) > 50, math.nan, 1.0))


@pytest.mark.filterwarnings("ignore:a private bound", "ignore:using grad_sample_mode='functorch', because")
@pytest.mark.parametrize("bounds", [GIVEN, {}], ids=["given", "bought"])
@pytest.mark.parametrize(
    ("mode", "always"), [("hooks", False), ("functorch", False), ("functorch", True), (None, True)]
)
def test_a_model_that_gives_no_number_is_released_all_the_same(mode, always, bounds):
    """Every record counts as zero, so the draw is that of no data at all: useless, private, and charged."""
    x, y = make_tensors()
    loader = make_loader(dataset=TensorDataset(100 + x, y))
    engine, model = ExpMQuadEngine(), NoNumber(always)
    sums = ExpMQuadEngine().gather(model, loader, 5, grad_sample_mode=mode, **options_of(**GIVEN)).sums
    assert sums.gradient.abs().max() == 0
    assert sums.curvature.abs().max() == 0
    private = engine.make_private_expm(model, loader, 1.0, 0.3, 5, grad_sample_mode=mode, **options_of(**bounds))
    assert engine.get_epsilon() == pytest.approx(1.0, rel=1e-12)
    moved = weights(private) - weights(model)
    assert torch.isfinite(moved).all()
    assert 0 < moved.norm() <= 0.3 * (1 + 1e-6)


# --- memory that runs out -------------------------------------------------------------------------------------------

OUT_OF_MEMORY = {
    "cuda": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    "mps": RuntimeError("MPS backend out of memory (MPS allocated: 8.0 GiB)"),
    "linux": RuntimeError(
        "[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory: you tried to"
    ),
    "windows": RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 8589934592 bytes."),
    "cublas": RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    "python": MemoryError(),
}


SYNTHETIC = 8  # records at a time at the most, in the checks on synthetic records


class Shared(list):
    """A list that copies of a module have in common."""

    def __deepcopy__(self, memo):
        return self


class Limit(nn.Module):
    """Passes its input on, unless a graph is built for more records than fit; after so many calls, if they are given."""

    def __init__(self, limit, error, after):
        super().__init__()
        self.limit, self.error, self.after, self.sizes = limit, error, after, Shared()

    def forward(self, x):
        if torch.is_grad_enabled():
            self.sizes.append(len(x))
            late = self.after == 0 or sum(size > SYNTHETIC for size in self.sizes) > self.after
            if len(x) > self.limit and late:
                raise self.error
        return x


def small(limit, error=OUT_OF_MEMORY["cuda"], after=0):
    torch.manual_seed(0)
    return nn.Sequential(Limit(limit, error, after), nn.Linear(FEATURES, CLASSES))


def seen_by(model):
    """Sizes of the batches that the model saw, without those of the checks on synthetic records."""
    return [size for size in model[0].sizes if size > SYNTHETIC]


def gathered(model, batch_size=64, count=150, loader=None, engine=None, **options):
    if loader is None:
        loader = DataLoader(TensorDataset(*make_tensors(count)), batch_size=batch_size)
    options = (
        {"projection": Sparse(seed=3), "criterion": nn.CrossEntropyLoss(), "grad_sample_mode": "hooks"}
        | GIVEN
        | options
    )
    return (engine or ExpMQuadEngine()).gather(model, loader, 5, **options).sums


def assert_same_sums(found, expected):
    torch.testing.assert_close(found.gradient, expected.gradient, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.curvature, expected.curvature, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("error", OUT_OF_MEMORY.values(), ids=OUT_OF_MEMORY)
@pytest.mark.parametrize("after", [0, 2])
def test_memory_that_runs_out_halves_the_pieces(error, after):
    """The pass starts again: in the end every record was seen once, and all in pieces of the same size."""
    model = small(20, error, after)
    with pytest.warns(UserWarning, match="ran out of memory with .* records at a time and starts again with") as said:
        found = gathered(model)
    said = [str(w.message) for w in said]
    assert [re.findall(r"with (\d+)", words) for words in said] == [["64", "32"], ["32", "16"]]
    assert_same_sums(found, gathered(small(math.inf)))
    last_large = max(i for i, size in enumerate(seen_by(model)) if size > 16)
    assert seen_by(model)[last_large + 1 :] == [16] * 10  # 64 + 64 + 22 records, sixteen at a time


def test_single_records_are_the_last_resort():
    model = small(3)
    with pytest.warns(UserWarning, match="starts again with 1; pass"):
        found = gathered(model, batch_size=10, count=23)
    assert_same_sums(found, gathered(small(math.inf), batch_size=10, count=23))
    assert seen_by(model) == [16]
    assert model[0].sizes[-24:] == [16] + [1] * 23


@pytest.mark.filterwarnings("ignore:the pass over loader ran out of memory")
@pytest.mark.parametrize("mode", MODES)
def test_too_little_memory_for_one_record_is_refused(mode):
    model, engine = small(0), ExpMQuadEngine()
    before = state_of(model)
    options = {"criterion": nn.CrossEntropyLoss(), "grad_sample_mode": mode} | GIVEN
    with pytest.raises(
        RuntimeError, match="with the fewest records at a time; less is needed with projection='sparse'"
    ):
        engine.make_private_expm(model, make_loader(), 1.0, 0.3, 5, **options)
    assert state_of(model) == before
    assert len(engine.accountant) == 0
    model[0].limit = math.inf
    engine.make_private_expm(model, make_loader(), 1.0, 0.3, 5, **options)
    assert engine.get_epsilon() == 1.0


def test_other_errors_are_not_taken_for_memory():
    model = small(20, RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        gathered(model)
    assert seen_by(model) == [64]


def test_a_stream_is_not_started_again():
    """Of an iterable data set it is not known whether a second pass would give the same records."""

    class Stream(IterableDataset):
        def __iter__(self):
            return zip(*make_tensors(50), strict=True)

    model = small(20)
    with pytest.raises(RuntimeError, match=r"with 32 records at a time and cannot .*; pass max_physical_batch_size=16"):
        gathered(model, loader=DataLoader(Stream(), batch_size=32), nominal_size=50)
    found = gathered(model, loader=DataLoader(Stream(), batch_size=32), nominal_size=50, max_physical_batch_size=16)
    assert_same_sums(found, gathered(small(math.inf), count=50))


@pytest.mark.filterwarnings("ignore:the pass over .* ran out of memory", "ignore:a private bound")
@pytest.mark.parametrize("how", ["bought", "public"])
def test_memory_that_runs_out_where_bounds_come_from(how):
    """The first pass meets the fault, and later ones go on with what fits."""
    found = []
    for limit in (20, math.inf):
        model = small(limit)
        options = {
            "bought": {"epsilon": 1.0, "engine": ExpMQuadEngine(noise_generator=np.random.default_rng(0))},
            "public": {"public_loader": make_loader(64)},
        }[how]
        found.append(gathered(model, max_grad_norm=None, max_curvature=None, **options))
        failed = [size for size in seen_by(model) if size > limit]
        assert failed == ([] if limit > 20 else [64, 32])
    assert found[0].max_grad_norm == pytest.approx(found[1].max_grad_norm, rel=1e-5)
    assert_same_sums(*found)


@pytest.mark.filterwarnings("ignore:the pass over .* ran out of memory", "ignore:bounds_read_off")
def test_memory_that_runs_out_where_bounds_are_read_off():
    loader = DataLoader(TensorDataset(*make_tensors(150)), batch_size=64)
    found = [paper.bounds_read_off(small(limit), loader, nn.CrossEntropyLoss()) for limit in (20, math.inf)]
    assert found[0].gradient == pytest.approx(found[1].gradient, rel=1e-5)
    assert found[0].curvature == pytest.approx(found[1].curvature, rel=1e-5)


def test_later_rounds_go_on_with_what_fits():
    model = small(20)
    with pytest.warns(UserWarning, match="ran out of memory") as said:
        ExpMQuadEngine().make_private_expm(model, make_loader(64), 1.0, 0.3, 5, rounds=3, **options_of(**GIVEN))
    assert len(said) == 2  # 64 → 32 → 16, once


class LateLimit(Limit):
    """Has too little memory from the second piece of a step on, once it is told so."""

    told = Shared()

    @property
    def limit(self):
        self.told and self.told.append(1)
        return 20 if len(self.told) > 2 else math.inf

    @limit.setter
    def limit(self, value):
        pass


def _begun_once(self, sample):
    """A step that goes on with the sum of the attempt that failed."""
    bench = self._bench
    one = self.open(None)

    def once():
        one.add_pieces(bench.begin(sample, "loader"))
        return one.sums().gradient

    self.advance(bench.in_memory(once, sample, "loader"))


def _last_place(monkeypatch, step, short_from):
    """Where learned rounds are after their last step; memory is short from this step on."""
    torch.manual_seed(0)
    model = nn.Sequential(LateLimit(20, OUT_OF_MEMORY["cuda"], 0), nn.Linear(FEATURES, CLASSES)).double()
    records = TensorDataset(*(t.double() if t.is_floating_point() else t for t in make_tensors(150)))
    LateLimit.told.clear()
    places = []

    def watched(self, sample):
        if len(places) == short_from:
            LateLimit.told.append(0)
        step(self, sample)
        places.append(self.place)

    with monkeypatch.context() as patch:
        patch.setattr(Walk, "step", watched)
        engine = ExpMQuadEngine(noise_generator=np.random.default_rng(0))
        engine.make_private_expm(
            model, make_loader(64, records), 1.0, delta=1e-5, criterion=nn.CrossEntropyLoss(), progress=False
        )
    return places[-1], engine.accountant.releases


@pytest.mark.filterwarnings("ignore:the pass over loader ran out of memory")
@pytest.mark.parametrize("short_from", [0, 2])
def test_memory_that_runs_out_in_a_step_of_learned_rounds(short_from, monkeypatch):
    """The step's sample starts again: each of its records is in the sum once, and the noise is the one that was due."""
    right, ledger = _last_place(monkeypatch, Walk.step, None)
    found, again = _last_place(monkeypatch, Walk.step, short_from)
    assert len(LateLimit.told) > 2
    assert again == ledger
    torch.testing.assert_close(found, right)
    twice, _ = _last_place(monkeypatch, _begun_once, short_from)
    assert not torch.allclose(twice, right)


def test_memory_that_runs_out_in_a_training_loop():
    """On the first batch of an epoch the loop goes on; later, the epoch starts again in smaller pieces."""

    def loop_of(model):
        engine = ExpMQuadEngine()
        module, optimizer, criterion, loader = engine.make_private_with_epsilon(
            grad_sample_mode="ghost",
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data_loader=DataLoader(TensorDataset(*make_tensors(96)), batch_size=32),
            target_epsilon=1.0,
            target_delta=0.0,
            epochs=1,
            radius=0.3,
            proj_dim=5,
            **options_of(**GIVEN),
        )

        def epoch():
            for inputs, targets in loader:
                criterion(module(inputs), targets).backward()
                optimizer.step()

        return engine, epoch

    models = small(math.inf), small(20), small(20, after=1)
    loops = [loop_of(model) for model in models]
    loops[0][1]()
    with pytest.warns(UserWarning, match="with 32 records at a time and starts again with 16"):
        loops[1][1]()
    with pytest.raises(
        RuntimeError, match="ran out of memory with 32 records at a time and cannot start again by itself"
    ):
        loops[2][1]()
    assert len(loops[2][0].accountant) == 0
    loops[2][1]()
    assert seen_by(models[2])[-6:] == [16] * 6
    for (engine, _), model in zip(loops, models, strict=True):
        torch.testing.assert_close(weights(model), weights(models[0]), rtol=1e-5, atol=1e-6)
        assert len(engine.accountant.releases) == 1
