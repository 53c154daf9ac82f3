"""A wiretap on the whole interface: no private value in logs, warnings, output, exceptions, reprs, pickles or files.

Spies inside the package take down what is private while the interface is driven: sums, norms, counts, scores of bought
bounds, densities, acceptance. Everything that comes out is then searched for these numbers, in text in any rounding to
four digits or more, in pickles and files also as the bytes of a float.
"""

import bisect
import contextlib
import logging
import math
import pickle
import re
import struct
import traceback
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import opacus_expm
from opacus_expm import ExpMQuadEngine, Sparse, compare, paper
from opacus_expm._private import PrivateValues
from opacus_expm.experiments.results import Comparison
from opacus_expm.experiments.tasks import Task
from opacus_expm.gathering.clipping import ClippedAdder
from opacus_expm.mechanism.quantiles import quantile_scores
from opacus_expm.mechanism.sampling import Exact, _Conditional, _Tilted

RECORDS, NOMINAL, FEATURES, CLASSES, DIM = 1237, 1000, 4, 3, 4
LOSS = nn.CrossEntropyLoss()
GIVEN = {"max_grad_norm": 0.5, "max_curvature": 0.28}  # so that the ridge, 3/4 of it, has few digits too
COARSE, FINE = 4, 7  # digits from which a number of a sum, and of a single record, is recognised
pytestmark = pytest.mark.usefixtures("seeded_noise")


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, 5), nn.Tanh(), nn.Linear(5, CLASSES))


def make_data(seed, count=RECORDS):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, FEATURES, generator=generator)
    return TensorDataset(x, torch.randint(CLASSES, (count,), generator=generator))


def make_loader(dataset=None):
    return DataLoader(dataset or make_data(1), batch_size=256)


# --- what is private ------------------------------------------------------------------------------------------------


class Secrets:
    """Private numbers, by the number of digits from which they are recognised."""

    def __init__(self):
        self.values = {COARSE: set(), FINE: set()}
        self.rows = []  # bytes of whole records and of whole sums
        self.parts = set()  # of these sums

    def add(self, digits, *numbers):
        found = np.concatenate([np.abs(np.asarray(n, dtype=np.float64)).ravel() for n in numbers])
        # Round numbers (0, 1, 0.5) are everywhere and tell nothing.
        self.values[digits].update(v for v in found.tolist() if math.isfinite(v) and float(f"{v:.3g}") != v)

    def spy(self, patch):
        """Take down private numbers wherever the package computes them."""

        def after(target, name, note):
            original = getattr(target, name)

            def call(*arguments, **options):
                result = original(*arguments, **options)
                note(result, *arguments)
                return result

            patch.setattr(target, name, call)

        def norms(found, *_):
            sizes = found.gradient_norms.numpy(), found.curvature_norms.numpy()
            self.add(FINE, *sizes, found.gradients.numpy())
            self.add(COARSE, *[f(size) for size in sizes for f in (np.sum, np.max, np.mean, np.median)])

        def sums(found, *_):
            self.add(COARSE, found.gradient.numpy(), found.gradient.norm().numpy())
            self.parts.update(np.abs(found.gradient.numpy()).tolist())
            if found.gradient.any():
                self.rows += [found.gradient.numpy().astype(form).tobytes() for form in ("<f4", ">f4")]
            if found.curvature is not None:
                self.add(COARSE, found.curvature.numpy(), np.linalg.eigvalsh(found.curvature.numpy()))

        def quantiles(_, norms):
            self.add(COARSE, *[np.quantile(norms, quantile) for quantile in opacus_expm.bounds.QUANTILES.values()])

        def scores(_, counts, quantile, *__):
            self.add(COARSE, quantile_scores(counts, quantile))

        def density(_, self_, found, *__):
            self.add(COARSE, found.precision, found.linear, found.tilt(), found.log_normalizer())

        def acceptance(found, _, __, rows):
            self.add(COARSE, len(found) / rows)

        after(opacus_expm.gathering.clipping, "_finite_only", norms)
        after(ClippedAdder, "result", sums)
        after(opacus_expm.bounds, "grid_counts", quantiles)
        after(opacus_expm.bounds, "private_quantile", scores)
        after(opacus_expm.gathering.looks, "gradient_norms", lambda found, *_: self.add(FINE, found))
        after(opacus_expm.gathering.looks, "gains", lambda found, *_: self.add(COARSE, found))
        after(Exact, "sample", density)
        after(_Tilted, "accepted", acceptance)
        after(_Conditional, "accepted", acceptance)

    def in_text(self, text):
        """Tokens that are a private number, rounded or cut off."""
        text = re.sub(r"0x[0-9a-f]+|\b[0-9a-f]{16,}\b", " ", text)  # addresses and digests
        text = re.sub(r"\d{4}-\d\d-\d\dT\S+|\d\d:\d\d<\S+ +\S+(record/s|s/record|it/s|s/it)", " ", text)  # times
        text = re.sub(r"^\d\d/\d\d/\d{4} [\d:]+:", " ", text, flags=re.MULTILINE)  # Opacus's handler of logs
        text = re.sub(r"(seconds|memory|peak_mib)\W+[\d.e+-]+", " ", text)  # measured by compare
        ordered = {digits: sorted(values) for digits, values in self.values.items()}
        found = []
        for token in set(re.findall(r"(?<![\w.])\d+(?:\.\d+)?(?:[eE][-+]?\d+)?", text)):
            mantissa, _, exponent = token.lower().partition("e")
            digits = len(mantissa.replace(".", "").lstrip("0"))
            unit = 10.0 ** (int(exponent or 0) - len(mantissa.partition(".")[2]))
            value = float(token)
            for least, values in ordered.items():
                at = bisect.bisect_left(values, value - unit)
                if digits >= least and at < len(values) and values[at] <= value + unit:
                    found.append(token)
        return found

    def in_bytes(self, content):
        """The same for floats in memory, at any place and of either sign, and for text in files."""
        found = self.in_text(content.decode("utf-8", errors="ignore")) if content[:1] == b"{" else []
        every = np.array([v for v in sorted(set().union(*self.values.values())) if not _is_short(v)])
        # Among float32 numbers, single values of records and of sums would be found by chance; whole ones are not.
        single = sorted(self.values[COARSE] - self.parts)
        coarse = np.array([v for v in single if not _is_short(v)], dtype=np.float32)
        for form, secret in (("<f8", every), (">f8", every), ("<f4", coarse), (">f4", coarse)):
            size = int(form[-1])
            for start in range(min(size, len(content) - size + 1)):
                count = (len(content) - start) // size
                seen = np.abs(np.frombuffer(content, form, count, start).astype(form[1:]))
                found += seen[np.isin(seen, secret)].tolist()
        return found + [row for row in self.rows if row in content]


def _is_short(value):
    """Whether two bytes say it all, as of 29/128 draws accepted: with zeros around them they are found by chance."""
    short = np.float32(value)
    return float(short) == value and not short.view(np.uint32) & 0xFFFF


# --- what comes out -------------------------------------------------------------------------------------------------


class Wiretap(logging.Handler):
    """Everything that left: pieces of text, and bytes."""

    def __init__(self):
        super().__init__(logging.DEBUG)
        self.texts, self.blobs = [], []

    def emit(self, record):
        self.texts += [record.getMessage(), repr(record.args)]

    @contextlib.contextmanager
    def listening(self):
        root = logging.getLogger()
        level = root.level
        root.setLevel(logging.DEBUG)
        root.addHandler(self)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            try:
                yield
            finally:
                root.removeHandler(self)
                root.setLevel(level)
        self.texts += [str(w.message) for w in said]

    def returned(self, thing, depth=3):
        """An object that the user is given: how it shows, what it is made of, and how it is saved."""
        self.texts += [repr(thing), str(thing), f"{thing}"]
        if isinstance(thing, PrivateValues):  # its attributes are private data, and it refuses to be saved
            with pytest.raises(TypeError, match="private data"):
                pickle.dumps(thing)
            return
        with contextlib.suppress(AttributeError, TypeError, pickle.PicklingError):  # locks and the like
            self.blobs.append(pickle.dumps(thing))
        if isinstance(thing, nn.Module):
            self.blobs += [t.detach().numpy().tobytes() for t in thing.state_dict().values()]
            return
        members = thing if isinstance(thing, list | tuple) else getattr(thing, "__dict__", {}).values()
        for member in members if depth else ():
            if not isinstance(member, DataLoader | type) and not callable(member):
                self.returned(member, depth - 1)

    @contextlib.contextmanager
    def refused(self, *kinds):
        """A call that must fail."""
        with pytest.raises(kinds) as caught:
            yield
        self.texts += ["".join(traceback.format_exception(caught.value)), repr(caught.value)]

    def files(self, directory):
        self.blobs += [path.read_bytes() for path in directory.rglob("*") if path.is_file()]
        self.texts += [path.read_text() for path in directory.rglob("*.[cj]s*") if path.is_file()]

    def leaks(self, secrets):
        found = secrets.in_text("\n".join(self.texts)) + secrets.in_bytes(b" " + bytes(8).join(self.blobs))
        return found + [v for blob in self.blobs if blob[:1] == b"{" for v in secrets.in_bytes(blob)]


# --- the whole interface --------------------------------------------------------------------------------------------


def options_of(seed=3, **more):
    fixed = {"criterion": LOSS, "nominal_size": NOMINAL, "progress": True}
    return fixed | {"projection": Sparse(seed=seed)} | more


def passes_and_draws(tap, directory):
    engine = ExpMQuadEngine(budget=(9.0, 1e-5), ledger_path=directory / "ledger.jsonl")
    model, loader = make_model(), make_loader()
    for mode in ("hooks", "functorch"):
        statistics = engine.gather(model, loader, DIM, grad_sample_mode=mode, **options_of(**GIVEN))
        tap.returned(statistics)
        tap.returned(statistics.sums)
        tap.returned(statistics.sums.sensitivity("add_remove"))
    tap.returned(statistics.density(1.0, 0.1, 0.0))
    tap.returned(engine.release(statistics, 0.5, 0.1))
    tap.returned(engine.release(statistics, 0.5, 0.1, delta=1e-6, regularization=100.0))
    tap.returned([engine.books(), engine.noise])
    with tap.refused(ValueError):
        ExpMQuadEngine(accountant=engine.accountant, noise_generator=np.random.default_rng(8)).release(
            statistics, 0.5, 0.1
        )
    with tap.refused(ValueError):
        paper.release(engine.books(), statistics, 0.5, 0.1, sampler=paper.PlainRejection())
    with tap.refused(ValueError):
        paper.release(engine.books(), paper.read_off(statistics), 0.5, 0.1)
    tap.returned(paper.release(engine.books(), statistics, 0.5, 0.1))
    engine.simulate(statistics, 0.5, 0.1, lambda module: 0.0, draws=3)
    tap.returned(engine.make_private_expm(model, loader, 1.0, 0.1, DIM, rounds=2, **options_of(**GIVEN)))
    gradients = {"projection": Sparse(seed=3), "max_grad_norm": 0.5, "max_curvature": 0.0}
    tap.returned(engine.make_private_expm(model, loader, 0.5, 0.1, DIM, **options_of(**gradients)))
    tap.returned(
        ExpMQuadEngine(secure_mode=True).make_private_expm(model, loader, 1.0, 0.1, DIM, **options_of(**GIVEN))
    )
    engine.save_checkpoint(path=directory / "model.pt", module=model)
    other = ExpMQuadEngine()
    tap.returned(other.load_checkpoint(path=directory / "model.pt", module=make_model()))
    tap.returned([engine, engine.accountant.state_dict(), engine.get_epsilon(1e-5), engine.remaining(), other])
    with tap.refused(ValueError):
        ExpMQuadEngine(budget=(0.1, 0.0)).release(statistics, 0.5, 0.1)
    with tap.refused(ValueError):
        engine.release(statistics, 0.5, -0.1)
    with tap.refused(ValueError):
        engine.gather(model, loader, 10**6, **options_of(**GIVEN))
    return engine


def bought_bounds(tap, directory):
    engine = ExpMQuadEngine(ledger_path=directory / "bought.jsonl")
    tap.returned(engine.make_private_expm(make_model(), make_loader(), 4.0, 0.1, DIM, **options_of()))
    with tap.refused(ValueError):
        engine.gather(make_model(), make_loader(), DIM, **options_of())
    tap.returned(engine)


def broken_data(tap, directory):
    """Records without a number, a model that raises, and a target that does not fit."""
    data = make_data(2)
    data.tensors[0][::7] = math.nan
    engine = ExpMQuadEngine()
    tap.returned(engine.make_private_expm(make_model(), make_loader(data), 1.0, 0.1, DIM, **options_of(**GIVEN)))

    class Raises(nn.Linear):
        def forward(self, x):
            if x.shape[0] > 8:  # more than the synthetic batches have
                raise RuntimeError("the user's own words")
            return super().forward(x)

    with tap.refused(RuntimeError):
        engine.make_private_expm(Raises(4, 3), make_loader(), 1.0, 0.1, DIM, **options_of(**GIVEN))
    wrong = TensorDataset(make_data(2).tensors[0], torch.rand(RECORDS, 2))
    with tap.refused(ValueError):
        engine.make_private_expm(make_model(), make_loader(wrong), 1.0, 0.1, DIM, **options_of(**GIVEN))


def training_loop(tap, directory):
    engine, model = ExpMQuadEngine(ledger_path=directory / "loop.jsonl"), make_model()
    things = engine.make_private_with_epsilon(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=make_loader(),
        target_epsilon=1.0,
        target_delta=0.0,
        epochs=1,
        radius=0.1,
        proj_dim=DIM,
        **options_of(**GIVEN),
    )
    tap.returned(things)
    module, optimizer, loader = things
    criterion, total = nn.CrossEntropyLoss(), 0
    for x, y in loader:
        loss = criterion(module(x), y)
        total = total + loss.item()
        tap.returned(loss)
        tap.texts += [f"{loss} {loss.item():.4f} {total} {loss!r}"]
        with tap.refused(TypeError):
            int(loss)
        loss.backward()
        optimizer.step()
    with tap.refused(RuntimeError):
        loss.backward()
    tap.returned(module)
    tap.returned(engine)


def without_a_radius(tap, directory):
    engine = ExpMQuadEngine(ledger_path=directory / "learned.jsonl")
    for delta in (1e-5, 0.0):
        options = {"criterion": LOSS, "nominal_size": NOMINAL, "progress": True, "delta": delta}
        tap.returned(engine.make_private_expm(make_model(), make_loader(), 1.0, **options))
    tap.returned(engine)


def side_by_side(tap, directory):
    task = Task(make_model(), make_data(5, 200), make_data(1), make_data(6, 200), LOSS, "tiny", "accuracy")
    found = compare(task, [1.0], seeds=1, methods=["zero-shot", "expm", "expm-delta"], out=directory)
    assert isinstance(found, Comparison)
    found.to_json(directory / "comparison.json")
    found.to_csv(directory / "comparison.csv")
    tap.texts.append(found.table())


def test_nothing_private_comes_out(tmp_path, monkeypatch, capfd):
    secrets, tap = Secrets(), Wiretap()
    secrets.spy(monkeypatch)
    x, y = make_data(1).tensors
    secrets.add(FINE, x.numpy())
    secrets.rows = [row.numpy().tobytes() for row in x]
    with tap.listening():
        with torch.no_grad():
            losses = F.cross_entropy(make_model()(x), y, reduction="none").double()
        secrets.add(FINE, losses.numpy())
        secrets.add(COARSE, losses.mean().numpy(), losses.sum().numpy(), RECORDS)
        secrets.values[COARSE].add(float(RECORDS))
        for drive in (passes_and_draws, bought_bounds, broken_data, training_loop, without_a_radius):
            drive(tap, tmp_path)
        side_by_side(tap, tmp_path / "comparison")
    shown = capfd.readouterr()
    assert "loader" not in shown.err  # a bar would show a size that nominal_size hides; test_engine reads the others
    tap.texts += [shown.out, shown.err]
    tap.files(tmp_path)
    assert len(secrets.values[COARSE]) > 300
    assert len(tap.texts) > 200
    assert len(tap.blobs) > 20
    assert tap.leaks(secrets) == []


# --- the wiretap works ----------------------------------------------------------------------------------------------


def log(total):
    logging.getLogger("opacus_expm.gathering.clipping").debug("norm of the sum %.4g", total.gradient.norm())


def warn(total):
    warnings.warn(f"largest entry {total.gradient.abs().max().item():.5f}", UserWarning, stacklevel=2)


def show(total):
    print(f"G = {total.gradient}")


def raise_it(total):
    raise ValueError(f"{total.gradient[0].item():.6e} is strange")


def keep_it(total):
    object.__setattr__(total, "max_grad_norm", total.gradient[0].abs().item())


def count_it(total):
    print(f"{RECORDS} records")


@pytest.mark.parametrize("leak", [log, warn, show, raise_it, keep_it, count_it])
def test_a_leak_is_found(leak, tmp_path, monkeypatch, capfd):
    """A test of the test: one private number let out on each way."""
    secrets, tap, result = Secrets(), Wiretap(), ClippedAdder.result
    engine = ExpMQuadEngine(ledger_path=tmp_path / "ledger.jsonl")

    def leaky(self):
        total = result(self)
        secrets.add(COARSE, total.gradient.numpy(), total.gradient.norm().numpy())
        leak(total)
        return total

    secrets.values[COARSE].add(float(RECORDS))
    monkeypatch.setattr(ClippedAdder, "result", leaky)
    with tap.listening():
        try:
            tap.returned(engine.make_private_expm(make_model(), make_loader(), 1.0, 0.1, DIM, **options_of(**GIVEN)))
        except ValueError as error:
            tap.texts.append(str(error))
    shown = capfd.readouterr()
    tap.texts += [shown.out, shown.err]
    tap.files(tmp_path)
    assert tap.leaks(secrets)


def test_a_number_in_memory_is_found():
    secrets = Secrets()
    secrets.add(COARSE, -0.123456789)
    for form in ("<d", ">d", "<f", ">f"):
        for value in (0.123456789, -0.123456789):
            assert secrets.in_bytes(b"some" + struct.pack(form, value) + b"more")
    assert not secrets.in_bytes(b"some" + struct.pack("<d", 0.12345) + b"more")
    secrets.rows = [make_data(1).tensors[0][3].numpy().tobytes()]
    assert secrets.in_bytes(pickle.dumps(make_data(1).tensors[0].numpy()))
    assert not secrets.in_bytes(pickle.dumps(make_data(2).tensors[0].numpy()))
    for text in ("0.1235", "-0.12345", "1.235e-01", "0.123456789", "[0.1234, 1]"):
        assert secrets.in_text(text), text
    for text in ("0.123", "0.1236", "1.235", "10.1235", "0.12355"):
        assert not secrets.in_text(text), text
