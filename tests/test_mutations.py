"""Mutation proof: the mechanism is broken in many ways, and a named check catches each of them.

A check is a function without arguments that raises ``AssertionError`` if it finds something wrong: an audit of the engine,
or one property of it. The sound engine passes every check; with a defect put into the package, its check must fail, by that
assertion and nothing else. ``python tests/test_mutations.py`` prints the table.
"""

import contextlib
import copy
import dataclasses
import functools
import math
import random
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from records_of_all_kinds import Fetched
from scipy import integrate, stats
from torch import nn
from torch.utils.data import DataLoader, Dataset, RandomSampler, Subset, TensorDataset, default_collate

from opacus_expm import ExpMQuadEngine, _files, audit, bounds, geometry, learned, paper, rounds
from opacus_expm._tables import markdown
from opacus_expm.accounting import accountant, filters, ledger
from opacus_expm.accounting.accountant import ExpMAccountant
from opacus_expm.accounting.admission import Admission
from opacus_expm.accounting.events import NoGuarantee, NotGuaranteed, PlannedEvent, Purchase, Release
from opacus_expm.accounting.filters import BudgetExceeded
from opacus_expm.audit import Pair, Record, Setting, adaptive
from opacus_expm.audit.findings import synthetic_data
from opacus_expm.books import Books
from opacus_expm.gathering import clipping, collating, files, hooks, loaders, looks, passes
from opacus_expm.gathering import records as named
from opacus_expm.gathering.independence import State
from opacus_expm.gathering.measurement import Measurement
from opacus_expm.gathering.randomness import Generators, freshly
from opacus_expm.gathering.views import with_own_views, with_views
from opacus_expm.mechanism import curves, sampling, secure
from opacus_expm.mechanism.choices import isotropic_noise
from opacus_expm.mechanism.density import BallGaussian
from opacus_expm.mechanism.quantiles import GRID, grid_counts, private_quantile
from opacus_expm.mechanism.sensitivity import Sensitivity
from opacus_expm.noise import Noise
from opacus_expm.questions import Questions
from opacus_expm.rule import Rule
from opacus_expm.subspaces.sparse import Sparse

# --- data ----------------------------------------------------------------------------------------------------------------

# What audit.worst_pair finds; kept as constants, so that a check is one audit and no search.
EXTREMAL = Pair(Setting(), 1000, 0.5382, 0, Record(1.0, 0.0, "line", 2.3588))
EXTREMAL_REPLACED = Pair(
    Setting(adjacency="replace_one"),
    *(1000, 3.6803, 0, Record(1.0, 0.0, "line", 0.7907)),
    Record(1.0, math.pi, "line", 2.3615),
)
GAUSSIAN = Pair(
    Setting(delta=1e-5, regularization=10.0, proj_dim=1),
    *(512, math.pi, 0, Record(1.0, 0.0, "line")),
)
# A record against the pull of a thousand others, in one dimension.
AGAINST = Pair(
    Setting(radius=1.0, max_grad_norm=1.0, max_curvature=0.0, proj_dim=1), 1000, 0.0, 0, Record(1.0, math.pi, "none")
)
# With a ridge of three per record, were it one per record.
RIDGE = Pair(
    Setting(radius=1.0, max_grad_norm=1.0, max_curvature=1.0, regularization=3.0, proj_dim=1),
    *(1000, math.pi, 0, Record(1.0, 0.0, "line")),
)
# Records of curvature one, as many as bfloat16, in batches of 256, rounds down to 512; one more, and it rounds up to 516.
STIFF = Pair(
    Setting(radius=1.0, max_grad_norm=0.1, max_curvature=1.0, proj_dim=1), 0, 0.0, 513, Record(0.0, 0.0, "full")
)


def _holds(model, loader, neighbour, arguments):
    with synthetic_data():
        report = audit.audit_pair(model, loader, neighbour, arguments, draws=2)
    exact = [f for f in report.findings if f.method != "draws"]
    assert all(f.holds for f in exact), report.table()


def _pair_holds(pair):
    _holds(*pair.data(), pair.setting.arguments())


def _line(x, y):
    """A model with one parameter at zero, and a loader."""
    model = nn.Linear(1, 1, bias=False).double()
    nn.init.zeros_(model.weight)
    x, y = (torch.as_tensor(v, dtype=torch.float64).reshape(-1, 1) for v in (x, y))
    return model, DataLoader(TensorDataset(x, y), batch_size=32)


LINE = {
    "epsilon": 1.0,
    "radius": 1.0,
    "proj_dim": None,
    "criterion": nn.MSELoss(),
    "max_grad_norm": 1.0,
    "max_curvature": 0.0,
    "regularization": 0.0,
}

# --- checks --------------------------------------------------------------------------------------------------------------


def audit_of_the_extremal_pair():
    _pair_holds(EXTREMAL)


def audit_of_the_extremal_pair_replace_one():
    _pair_holds(EXTREMAL_REPLACED)


def audit_of_the_gaussian_claim():
    _pair_holds(GAUSSIAN)


def audit_of_a_record_against_the_others():
    _pair_holds(AGAINST)


def audit_with_a_ridge():
    _pair_holds(RIDGE)


def audit_under_autocast():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        _pair_holds(STIFF)


def audit_of_large_inputs():
    """A small residual and a large Jacobian."""
    model, with_it = _line([1.0] * 5 + [100.0], [1.0] * 5 + [-0.4])
    _, without = _line([1.0] * 5, [1.0] * 5)
    _holds(model, without, with_it, LINE)


def audit_of_a_model_with_batchnorm():
    """Inputs that are normalised by their batch would all move with one of them."""
    norm = nn.BatchNorm1d(1).double().requires_grad_(False)
    line, with_it = _line([1.0, -1.0] * 10 + [1e4], [1.0, -1.0] * 10 + [1.0])
    _, without = _line([1.0, -1.0] * 10, [1.0, -1.0] * 10)
    _holds(nn.Sequential(norm, line), without, with_it, LINE)


def silence_about_records_that_are_not_finite():
    model, with_it = _line([1.0] * 5 + [math.nan], [1.0] * 6)
    _, without = _line([1.0] * 5, [1.0] * 5)
    try:
        loss, _ = audit.observed_loss(model, without, with_it, {**LINE, "nominal_size": 5})
    except (ArithmeticError, RuntimeError, ValueError) as error:
        raise AssertionError("one record made the engine fail") from error
    assert loss.largest() < 1e-9


def law_of_the_draws():
    """Kolmogorov-Smirnov against the density, flat and peaked, for both proposals."""
    for w, b in ((0.0, 0.0), (3.0, 2.0), (5.0, 300.0)):
        density = BallGaussian(np.array([w]), np.array([b]), 1.0)
        grid = np.concatenate([np.linspace(-1, 0.9, 2000), np.linspace(0.9, 1.0, 8000)])[:, None]
        mass = np.exp(density.log_density(grid))
        cdf = np.concatenate([[0.0], np.cumsum((mass[1:] + mass[:-1]) / 2 * np.diff(grid[:, 0]))])
        draws = sampling.Exact().sample(density, np.random.default_rng(0), 20_000)[:, 0]
        assert stats.kstest(draws, lambda x, g=grid[:, 0], c=cdf: np.interp(x, g, c)).pvalue > 1e-3


def law_of_draws_on_a_stiff_edge():
    """The distance to the edge of draws that are pulled along it, against quadrature."""
    w, b = np.array([0.0, 1e5]), np.array([200.0, 9.9e4])
    stiff = np.linspace(0.9, 1.0, 2001)[:, None]
    distance = np.linspace(0.0, 0.2, 2001)
    soft = np.sqrt(1 - stiff**2) - distance
    mass = np.exp(b[0] * soft - 0.5 * w[1] * (stiff - b[1] / w[1]) ** 2) * (np.abs(soft) <= np.sqrt(1 - stiff**2))
    cdf = integrate.cumulative_trapezoid(mass.sum(0), distance, initial=0.0)
    draws = sampling.Exact().sample(BallGaussian(w, b, 1.0), np.random.default_rng(0), 20_000)
    found = np.sqrt(1 - draws[:, 1] ** 2) - draws[:, 0]
    assert stats.kstest(found, lambda x: np.interp(x, distance, cdf / cdf[-1])).pvalue > 1e-3


def draws_end_soon():
    """Fifty draws from a density that is singular and stiff, of which most proposals should serve."""
    made = 0
    with pytest.MonkeyPatch.context() as patch:
        for kind in (sampling._Tilted, sampling._Conditional):

            def counting(self, generator, rows, original=kind.accepted):
                nonlocal made
                made += rows
                assert made <= 1000, "the draw does not end"
                return original(self, generator, rows)

            patch.setattr(kind, "accepted", counting)
        density = BallGaussian(np.array([0.0, 1e8]), np.array([6000.0, 2.8e7]), 1.0)
        sampling.Exact().sample(density, np.random.default_rng(0), 50)


def secure_normals_leave_no_gaps():
    """Eight standard deviations out normals still differ where U does by a share of 2⁻³⁴, and by less than the grid."""
    low = np.arange(64, dtype=np.uint64) << np.uint64(44)
    found = secure.normals(np.stack([np.full_like(low, 2**14), low], axis=1))
    steps = np.diff(np.sort(found))
    assert np.all(steps > 0)
    assert np.all(steps < secure.GRID)


def secure_draws_succeed_for_any_number_of_records():
    """Far more records than the nominal size, with one pull: a draw that finds nothing, and is 0, is not covered."""
    model, loader = _line([1.0] * 20_000, [10.0] * 20_000)
    loader = DataLoader(loader.dataset, batch_size=5000)
    bounds = {name: LINE[name] for name in ("criterion", "max_grad_norm", "max_curvature")}
    private = ExpMQuadEngine(secure_mode=True)
    gathered = private.gather(model, loader, None, nominal_size=1, **bounds)
    drawn = [private.release(gathered, 10.0, 1.0, regularization=0.0).weight.item() for _ in range(40)]
    assert all(drawn), "no proposal was accepted"


def releases_stay_in_the_ball():
    model, loader = _line([1.0], [0.0])
    for _ in range(40):
        released = ExpMQuadEngine().make_private_expm(model, loader, **LINE)
        assert abs(float(released.weight.detach())) <= 1.0 + 1e-12


def noise_of_the_operating_system():
    model, loader = _line([1.0], [0.0])
    found = set()
    for _ in range(3):
        torch.manual_seed(0)
        np.random.seed(0)
        found.add(float(ExpMQuadEngine().make_private_expm(model, loader, **LINE).weight.detach()))
    assert len(found) == 3, "the global seeds fix the noise"


def charged_before_the_draw():
    class Crash(Exception):
        pass

    def draw(*_):
        raise Crash

    model, loader = _line([1.0], [0.0])
    private = ExpMQuadEngine()
    with pytest.MonkeyPatch.context() as patch, contextlib.suppress(Crash):
        patch.setattr(Noise, "draw", draw)
        private.make_private_expm(model, loader, **LINE)
    assert [event.epsilon_range for event in private.accountant.releases] == [1.0], "a draw that crashed was free"


def uncovered_draws_are_said():
    """A seed that may be known, and a sampler that may draw anything."""

    class Anything:
        def sample(self, density, generator, draws=1):
            return np.zeros((draws, density.dim))

    model, loader = _line([1.0], [0.0])
    seeded, free = ExpMQuadEngine(noise_generator=np.random.default_rng(0)), ExpMQuadEngine()
    seeded.make_private_expm(model, loader, **LINE)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        seeded.get_epsilon(0.0)
    assert [w.category for w in said] == [NotGuaranteed], "seeded noise is stated like any other"
    bounds = {name: LINE[name] for name in ("criterion", "max_grad_norm", "max_curvature")}
    gathered = free.gather(model, loader, None, **bounds)
    paper.release(free.books(), gathered, 1.0, 1.0, regularization=0.0, sampler=Anything())
    refused = False
    try:
        free.get_epsilon(0.0)
    except NoGuarantee:
        refused = True
    assert refused, "an epsilon for a sampler that may draw anything"


def rounds_cost_what_was_asked():
    model, loader = _line([1.0], [0.0])
    private = ExpMQuadEngine()
    private.make_private_expm(model, loader, rounds=3, **LINE)
    assert private.get_epsilon(0.0) <= 1.0


def bought_bounds_are_in_the_ledger():
    model, loader = _line([1.0] * 1000, [0.5] * 1000)
    private = ExpMQuadEngine()
    arguments = {**LINE, "max_grad_norm": None, "epsilon": 20.0}
    private.make_private_expm(model, loader, **arguments)
    kinds = [type(event).__name__ for event in private.accountant.releases]
    assert kinds == ["Purchase", "Release"], kinds
    assert private.get_epsilon(0.0) == pytest.approx(20.0, rel=1e-9)


def no_pure_epsilon_by_mu_with_bought_bounds():
    """c·W is a function of what was bought: with another bound it is another number."""
    model, loader = _line([1.0] * 1000, np.linspace(0.05, 1.0, 1000))  # norms of which the quantile is one number
    private = ExpMQuadEngine()
    arguments = {**LINE, "max_grad_norm": None, "epsilon": 5.0, "delta": 1e-5, "regularization": 1.0}
    private.make_private_expm(model, loader, **arguments)
    assert private.accountant.releases[-1].calibration == "gaussian"
    assert private.get_epsilon(1e-5) <= 5.0
    assert private.get_epsilon(0.0) == math.inf


PLANNED = Release(
    *(math.inf, curves.gaussian_mu(1.0, 1e-5) / math.sqrt(3) * (1 - 1e-9), "add_remove", 1.0, 1e-5, "gaussian"),
    *(1.0, 1.0, 40, 1.0, 0.0, "stiefel", 1, 0),
)  # a third of (1, 1e-5)
PURE = dataclasses.replace(PLANNED, epsilon_range=0.6, mu=math.inf, epsilon=0.6, delta=0.0, calibration="range")


def _is_refused(charge, error=BudgetExceeded):
    try:
        charge()
    except error:
        return True
    return False


def threads_share_one_budget():
    """The first is judged for as long as the second may need to be judged as well, were there no lock."""
    accountant, together, admits = ExpMAccountant(budget=(1.0, 0.0)), threading.Barrier(2), filters.Filter.admits
    refused = []

    def slow(self, *args):
        with contextlib.suppress(threading.BrokenBarrierError):
            together.wait(0.1)
        return admits(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(filters.Filter, "admits", slow)
        patch.setattr(filters.Room, "remaining", lambda *_: 0.0)  # for the message
        work = lambda: refused.append(_is_refused(lambda: accountant.record(PURE)))  # noqa: E731
        threads = [threading.Thread(target=work) for _ in range(2)]
        for step in (threading.Thread.start, threading.Thread.join):
            for thread in threads:
                step(thread)
    assert sorted(refused) == [False, True]


def copies_are_refused():
    for thing in (ExpMAccountant(budget=(1.0, 0.0)), ExpMQuadEngine(budget=(1.0, 0.0))):
        assert _is_refused(lambda thing=thing: copy.copy(thing), TypeError), "a second budget"


def loading_forgets_nothing():
    accountant = ExpMAccountant(budget=(1.0, 0.0))
    early = accountant.state_dict()
    accountant.record(PURE)
    with contextlib.suppress(ValueError):
        accountant.load_state_dict(early)
    assert accountant.remaining() == 0.4


def deleted_ledgers_are_noticed():
    with tempfile.TemporaryDirectory() as directory:
        accountant = ExpMAccountant(budget=(1.0, 0.0), ledger_path=Path(directory) / "ledger")
        accountant.record(PURE)
        (Path(directory) / "ledger").unlink()
        assert _is_refused(lambda: accountant.record(PURE), ledger.LedgerError)


def links_share_one_lock():
    with tempfile.TemporaryDirectory() as directory:
        path, link = Path(directory) / "ledger", Path(directory) / "link"
        link.symlink_to(path)
        locks = [ledger.LedgerFile(p).locked().lock_file for p in (path, link)]
        assert locks[0] == locks[1]


def budgets_stay_with_their_ledgers():
    with tempfile.TemporaryDirectory() as directory:
        ExpMAccountant(budget=(1.0, 0.0), ledger_path=Path(directory) / "ledger").record(PURE)
        assert ExpMAccountant(ledger_path=Path(directory) / "ledger").remaining() == 0.4


def bought_bounds_are_paid_where_they_are_used():
    model, loader = _line([1.0] * 1000, [0.5] * 1000)
    arguments = {"criterion": nn.MSELoss(), "max_curvature": 0.0, "epsilon": 20.0}
    found = ExpMQuadEngine().gather(model, loader, None, **arguments)
    other = ExpMQuadEngine()
    assert _is_refused(lambda: other.release(found, 1.0, 1.0), ValueError), "a purchase that is in no total"


def nothing_uses_the_delta_of_a_plan():
    accountant = ExpMAccountant(budget=(1.0, 1e-5))
    admission = accountant.admit([[PlannedEvent(math.inf, PLANNED.mu)] * 3], 1.0, 1e-5)
    accountant.record(PLANNED, admission=admission)
    assert _is_refused(lambda: accountant.record(PLANNED)), "while it is under way"
    admission.end()
    assert _is_refused(lambda: accountant.record(PLANNED)), "after it was given up"


def rounds_keep_what_they_reserved():
    accountant = ExpMAccountant(budget=(1.0, 0.0))
    admission = accountant.admit([[PlannedEvent(0.3)] * 3], 0.9, 0.0)
    third = dataclasses.replace(PURE, epsilon_range=0.3)
    accountant.record(third, admission=admission)
    with contextlib.suppress(BudgetExceeded):
        accountant.record(PURE)
    for _ in range(2):
        assert not _is_refused(lambda: accountant.record(third, admission=admission))


def nothing_is_left_of_killed_writes():
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "file"
        path.with_name("file.0123456789abcdef.part").write_bytes(b"sums over private records")
        files.PassFile(path, {})
        assert list(Path(directory).iterdir()) == []


def law_of_bought_bounds():
    """How often each grid point is chosen, on two data sets: the ratio may be e^ε at the most."""
    norms = np.array([1.0, 2.0, 3.0, 4.0, 5.0])
    levels = (np.arange(4000) + 0.5) / 4000
    chosen = []
    for records in (norms, np.append(norms, 1e6)):
        uniforms = [SimpleNamespace(random=lambda count, u=u: np.array([u])) for u in levels]
        chosen.append([bounds.private_quantile(grid_counts(records), 0.8, 1.0, "add_remove", u) for u in uniforms])
    points = sorted({*chosen[0], *chosen[1]})
    counts = np.array([[np.sum(np.isclose(c, p)) for p in points] for c in map(np.array, chosen)])
    # a count of levels is off by one at each end of a point's interval
    assert np.all(counts[0] <= math.e * (counts[1] + 2) + 2)
    assert np.all(counts[1] <= math.e * (counts[0] + 2) + 2)


def loaders_that_repeat_are_refused():
    model, loader = _line([1.0] * 4, [0.5] * 4)
    repeats = DataLoader(loader.dataset, sampler=RandomSampler(loader.dataset, replacement=True), batch_size=2)
    refused = False
    try:
        ExpMQuadEngine().make_private_expm(model, repeats, **LINE)
    except ValueError as error:
        refused = "replacement" in str(error)
    assert refused


class Flipped(Dataset):
    """Records (±1, y) with a sign that is drawn when they are read."""

    def __init__(self, y):
        self.y = y

    def __len__(self):
        return len(self.y)

    def __getitem__(self, index):
        return torch.rand(1, dtype=torch.float64).sub(0.5).sign(), self.y[index]


def _pull_of_the_signs(read, **options):
    """Σ over 40 records whose targets are the signs that the script's seed gives to whoever reads them: ±40 if it does."""
    nothing = torch.zeros(40, 1, dtype=torch.float64)
    torch.manual_seed(0)
    signs = torch.cat([x for x, _ in DataLoader(Flipped(nothing), batch_size=32, **options)])
    torch.manual_seed(0)
    return abs(float(read(DataLoader(Flipped(signs), batch_size=32, **options))))


def _gathered(loader):
    model, _ = _line([1.0], [0.0])
    torch.manual_seed(0)
    options = {name: LINE[name] for name in ("criterion", "max_grad_norm", "max_curvature")}
    return ExpMQuadEngine().gather(model, loader, None, **options).sums.gradient


def _read_in_a_loop(loader):
    model, _ = _line([1.0], [0.0])
    *_, private = ExpMQuadEngine().make_private_with_epsilon(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=loader,
        target_epsilon=1.0,
        target_delta=0.0,
        epochs=1,
        **{name: value for name, value in LINE.items() if name != "epsilon"},
    )
    torch.manual_seed(0)
    return sum(x @ y for batch in private for x, y in zip(*batch, strict=True))


def _constant(worker_id):
    torch.manual_seed(0)


def a_seed_does_not_tell_what_is_drawn_for_the_records():
    assert _pull_of_the_signs(_gathered) < 40, "one more record would move them all"


def a_seed_does_not_tell_what_is_drawn_in_workers():
    assert _pull_of_the_signs(_gathered, num_workers=1, worker_init_fn=_constant) < 40


def a_seed_does_not_tell_what_is_drawn_in_a_loop():
    assert _pull_of_the_signs(_read_in_a_loop) < 40


def _stretched_together(x):
    return [x * torch.rand(())]


def records_do_not_share_what_is_drawn():
    """Each batch adds up to nothing unless its records are stretched by numbers of their own."""
    model, loader = _line([1.0] * 64, [0.1, -0.1] * 32)
    options = {name: LINE[name] for name in ("criterion", "max_grad_norm", "max_curvature")}
    found = ExpMQuadEngine().gather(model, loader, None, views=_stretched_together, **options)
    assert abs(float(found.sums.gradient)) > 1e-9, "one more record would move the borders of all batches"


def the_widest_batch_decides():
    """A batch of two rows a record, and then one of a single row: the range is that of two rows."""
    rows = torch.eye(2, dtype=torch.float64)
    adder = clipping.ClippedAdder(1.0, 1.0)
    for count in (2, 1):
        adder.add(clipping._finite_only(rows[:1], rows[None, :count], parallel=count == 1))
    assert not adder.result().parallel


class _Doing(nn.Module):
    """A linear model that does something to its batch first."""

    def __init__(self, first):
        super().__init__()
        self.line, self.first = nn.Linear(1, 1, bias=False).double(), first
        nn.init.zeros_(self.line.weight)
        self.register_buffer("seen", torch.zeros((), dtype=torch.float64))

    def forward(self, x):
        return self.line(self.first(self, x))


def _audit_of_a_model_that(first, record):
    """A hundred records at one, and one more that comes first and does something to the others."""
    model = _Doing(first)
    x, y = torch.ones(101, 1, dtype=torch.float64), torch.ones(101, 1, dtype=torch.float64)
    x[0] = record
    loader, neighbour = (DataLoader(TensorDataset(x[i:], y[i:]), batch_size=128) for i in (0, 1))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that records run alone, or that state is put back
        _holds(model, loader, neighbour, LINE)


def audit_of_a_model_that_mixes_records():
    _audit_of_a_model_that(lambda _, x: x - 1e-2 * x.sum(0), -1e6)


def audit_of_a_model_that_branches():
    _audit_of_a_model_that(lambda _, x: -x if (x == 3.14).any() else x, 3.14)


def audit_of_a_model_with_a_memory():
    def first(model, x):
        model.seen += (x.detach() > 10).sum()
        return x * torch.where(model.seen > 0, -1.0, 1.0)

    _audit_of_a_model_that(first, 1e3)


def _unless_refused(words, model, with_it, without):
    """The audit holds, or the loader is refused with these words."""
    refusal = ""
    try:
        _holds(model, without, with_it, LINE)
    except ValueError as error:
        refusal = str(error)
    assert not refusal or words in refusal, refusal


class LastAgain(DataLoader):
    """The last batch in the place of every other."""

    def __iter__(self):
        batches = list(super().__iter__())
        return iter([batches[-1]] * len(batches))


ALTERNATING = [1.0, -1.0] * 10


def _with_an_outlier(make):
    """A model, and loaders of twenty records with and without one more, made from inputs and targets."""
    model, with_it = _line([*ALTERNATING, 1e4], [*ALTERNATING, -1.0])
    _, without = _line(ALTERNATING, ALTERNATING)
    return model, *(make(*loader.dataset.tensors) for loader in (with_it, without))


def audit_of_a_collate_function_that_standardises_by_the_batch():
    def collate(records):
        x, y = default_collate(records)
        return (x - x.mean(0)) / x.std(0), y

    def make(x, y):
        return DataLoader(TensorDataset(x, y), batch_size=32, collate_fn=collate)

    _unless_refused("as a mean over the batch does", *_with_an_outlier(make))


def audit_of_a_collate_function_that_cannot_be_tried():
    """It fails on all records but these, and is shown one at a time."""

    def collate(records):
        x, y = default_collate(records)
        assert set(x.abs().flatten().tolist()) <= {1.0, 1e4}
        return x / x.abs().max(), y

    def make(x, y):
        return DataLoader(TensorDataset(x, y), batch_size=32, collate_fn=collate)

    model, with_it, without = _with_an_outlier(make)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*collate function cannot be tried")
        _holds(model, without, with_it, LINE)


def audit_of_records_that_are_fetched_together():
    model, with_it, without = _with_an_outlier(lambda x, y: DataLoader(Fetched(x, y), batch_size=32))
    _holds(model, without, with_it, LINE)


def audit_of_a_loader_that_repeats_a_batch():
    make = functools.partial(LastAgain, batch_size=1)
    _unless_refused("its own __iter__", *_with_an_outlier(lambda x, y: make(TensorDataset(x, y))))


def audit_of_a_record_named_twice():
    """Without the last record, which is named twice, two rows are missing."""
    model, loader = _line([1.0] * 10, [1.0] * 10)
    named = [DataLoader(Subset(loader.dataset, range(n)), batch_size=32) for n in (10, 9)]
    twice = [DataLoader(d.dataset + Subset(d.dataset, range(9, len(d.dataset))), batch_size=32) for d in named]
    try:
        loss = audit.observed_loss(model, *twice, {**LINE, "nominal_size": 10})[0].largest()
    except ValueError as error:
        loss = 0.0 if "names a record twice" in str(error) else math.inf
    assert loss <= LINE["epsilon"]


def public_data_is_not_private():
    model, loader = _line([1.0] * 4, [0.5] * 4)
    refused = False
    try:
        ExpMQuadEngine().make_private_expm(
            model, loader, public_loader=DataLoader(loader.dataset), **{**LINE, "max_grad_norm": None}
        )
    except ValueError as error:
        refused = "no private record may be in it" in str(error)
    assert refused


# --- defects -------------------------------------------------------------------------------------------------------------


# --- learned rounds ------------------------------------------------------------------------------------------------------


class _Learned:
    """Learned rounds over a few records and what is given them further, ready to be asked for one part."""

    def __init__(self, more=(), seed=0, rule=None, engine=None):
        x = torch.tensor([0.3, -0.2, 0.5, *more], dtype=torch.float64).reshape(-1, 1)
        self.loader = DataLoader(TensorDataset(x, x + 1), batch_size=16)
        measurement = Measurement(Sparse(seed=0), None, nn.MSELoss(), nominal_size=10, progress=False)
        engine = ExpMQuadEngine(noise_generator=np.random.default_rng(seed)) if engine is None else engine
        books = engine.books()
        self.rounds = learned.LearnedRounds(self.loader, measurement, 1.0, 1e-5, books)
        self.rule = Rule(1.0, 1e-5, 10, 2, False) if rule is None else rule
        self.questions = self.rounds._questions
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(1, 2), nn.Linear(2, 1)).double()
        self.bench = passes.Workbench(model, measurement)
        looks.prepare(self.bench, self.loader)
        self.answers = []
        right = self.questions.ask

        def spy(what, draw, like, **costs):
            self.answers.append(right(what, draw, like, **costs))
            return self.answers[-1]

        self.questions.ask = spy

    def walk(self, bound=0.1, guess=0.1):
        return learned.Walk(self.bench, self.loader, self.questions, self.rule, bound, guess, rate=10.0)


def secure_directions_have_their_noise():
    """From the operating system's source, which is a seeded one here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(secure.os, "urandom", random.Random(4).randbytes)
        directions_have_their_noise(ExpMQuadEngine(secure_mode=True))


def secure_answers_lie_on_the_grid():
    found = _Learned(engine=ExpMQuadEngine(secure_mode=True))
    sums = torch.tensor([0.1, 0.2, 0.3])
    _, deviation = found.questions.clipped_sum("loss", sums, 1.0, 0.5)
    steps = found.answers[-1] / (deviation * secure.SUM_GRID)
    assert abs(float(steps - steps.round())) < 1e-6
    assert deviation == 2.0


def secure_answers_are_charged_with_their_failures():
    engine = ExpMQuadEngine(secure_mode=True)
    _Learned(engine=engine).questions.clipped_sum("loss", torch.tensor([0.1]), 1.0, 0.5)
    assert engine.accountant.releases[-1].failure_probability == secure.FAILURE_PROBABILITY


def secure_isotropic_noise_has_its_length():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(secure.os, "urandom", random.Random(4).randbytes)
        lengths = [np.linalg.norm(isotropic_noise(3, secure.SystemNoise())) for _ in range(2000)]
    assert stats.kstest(lengths, stats.gamma(3).cdf).pvalue > 1e-3


def directions_have_their_noise(engine=None):
    """A step's deviation is Cσ in every coordinate, over and over."""
    full = SimpleNamespace(sample_rate=1.0, noise_multiplier=3.0, steps=1)
    found = _Learned(rule=full, engine=engine)
    steps = []
    for _ in range(200):
        walk = found.walk()
        walk.step(found.loader)
        steps.append(walk.place)
    assert abs(float(torch.stack(steps).var(0).mean()) / 0.09 - 1) < 0.2


def views_of_a_record_are_clipped_together():
    """Five views that agree, of one record: a direction as long as the bound, and no longer."""
    x = torch.ones(1, 1, dtype=torch.float64)
    model, bound = nn.Linear(1, 1).double(), 0.05
    measurement = Measurement(Sparse(seed=0), None, nn.MSELoss(), views=lambda x: [x] * 5, progress=False)
    bench, loader = passes.Workbench(model, measurement), DataLoader(TensorDataset(x, x + 9), batch_size=4)
    books = ExpMQuadEngine(noise_generator=np.random.default_rng(0)).books()
    walk = learned.Walk(bench, loader, Questions(books, 1.0, 1e-5, 1), Rule(1.0, 1e-5, 1, 1, True), bound, 1.0, 1.0)
    total = walk.open(None)
    total.add(x, x + 9)
    assert float(total.sums().gradient.norm()) <= bound


def bounds_with_views_are_of_what_is_clipped():
    """Views that cancel each other: the mean's gradient is small, and so is its norm."""
    x = torch.ones(1, 1, dtype=torch.float64)
    model = nn.Linear(1, 1, bias=False).double()
    nn.init.zeros_(model.weight)
    measurement = Measurement(Sparse(seed=0), None, nn.MSELoss(), views=lambda x: [x, -x], progress=False)
    loader = DataLoader(TensorDataset(x, 9 * x), batch_size=4)
    assert looks.gradient_norms(passes.Workbench(model, measurement), loader)[0] < 1e-9


def losses_are_clipped():
    """A record of enormous loss moves the sum by no more than its μ."""
    sums = []
    for more in ((), (1e4,)):
        found = _Learned(more)
        found.questions.quantile = lambda *_: 0.1
        found.rounds.losses(found.bench, found.rule, None)
        sums.append(found.answers[-1])
    deviation = 0.2 / found.rule.loss_mu
    assert float((sums[1] - sums[0]).norm()) / deviation <= found.rule.loss_mu * (1 + 1e-9)


def the_metric_has_its_noise():
    """Away from its sums by as much as μ says: the squares of standard normal numbers."""
    squares = []
    for seed in range(20):
        found = _Learned(seed=seed)
        found.questions.quantile = lambda *_: 1.0
        found.rounds.geometry(found.bench, found.rule, looks.blocks(found.bench))
        first = found.answers[0][:4].view(2, 2)  # A of the first layer: inputs and the constant
        sums = looks.factors(found.bench, found.loader, np.random.default_rng(0)).inputs[0]
        squares.append(float((first - sums).square().sum()) * found.rule.factor_mu**2)
    assert stats.kstest(squares, stats.chi2(3).cdf).pvalue > 1e-3


def audit_of_a_metric_and_a_scale():
    assert_sound(adaptive.metric)


def assert_sound(parts):
    """At the δ of the plan, no more is found than the ledger states."""
    findings = parts(1.0, 1e-5).findings((1e-5,))
    assert all(f.holds for f in findings)


def bounds_are_drawn():
    """With little to spend, the same norms give other bounds: what is bought is no function of the data."""
    norms = np.array([1.0, 2.0, 3.0])
    found = {_Learned(seed=seed).questions.quantile("bound", norms, 0.75, 0.01) for seed in range(8)}
    assert len(found) > 1


def the_run_is_in_the_ledger():
    """The whole of it, before the first sample is taken."""
    engine, taken = ExpMQuadEngine(noise_generator=np.random.default_rng(0)), []
    right = learned.sampled

    def spy(*arguments, **options):
        taken.append([q.run for q in engine.accountant.releases if q.run])
        return right(*arguments, **options)

    x = torch.linspace(-1, 1, 40, dtype=torch.float64)[:, None]
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.setattr(learned, "sampled", spy)
        loader = DataLoader(TensorDataset(x, x), batch_size=16)
        engine.make_private_expm(
            nn.Linear(1, 1).double(), loader, 1.0, delta=1e-5, criterion=nn.MSELoss(), progress=False
        )
    assert len(taken) > 1
    assert all(runs == taken[-1] and runs and runs[0][2] == len(taken) for runs in taken)


def _without_noise(patch):
    right = learned.Walk.advance

    def wrong(self, total):
        self._random = SimpleNamespace(standard_normal=np.zeros)
        return right(self, total)

    patch.setattr(learned.Walk, "advance", wrong)


def _less_noise(patch):
    right = learned.Walk.advance

    def wrong(self, total):
        rule = self.rule
        self.rule = copy.copy(rule)
        self.rule.__dict__["noise_multiplier"] = rule.noise_multiplier / 2
        right(self, total)
        self.rule = rule

    patch.setattr(learned.Walk, "advance", wrong)


def _half_of_secure_normals(patch):
    right = secure.normals
    patch.setattr(secure, "normals", lambda *words: right(*words) / 2)


def _half_of_secure_gammas(patch):
    right = secure.SystemNoise.standard_gamma
    patch.setattr(secure.SystemNoise, "standard_gamma", lambda *shape: right(*shape) / 2)


def _no_grid(patch):
    right = Noise.added
    patch.setattr(Noise, "added", lambda self, *sum_: right(Noise(), *sum_))


def _no_failures(patch):
    patch.setattr(Noise, "failure_probability", 0.0)


def _each_view_clipped(patch):
    """Views as records of their own, each of which is clipped and added."""
    right = passes.Workbench.seen

    def seen(self, stream):
        for inputs, targets in right(self, stream):
            yield inputs.flatten(0, 1), targets.flatten(0, 1)

    patch.setattr(passes.Workbench, "seen", seen)
    patch.setattr(passes, "EachView", lambda source: source)


def _norms_of_plain_records(patch):
    right = looks.gradient_norms
    patch.setattr(looks, "gradient_norms", lambda bench, loader: right(_prepared(bench, loader).plain(), loader))


def _prepared(bench, loader):
    looks.prepare(bench, loader)
    return bench


def _unclipped_losses(patch):
    patch.setattr(torch.Tensor, "clamp", lambda self, *_, **__: self)


def _half_symmetric(patch):
    right = geometry.symmetric_noise
    patch.setattr(geometry, "symmetric_noise", lambda *a: right(*a) / 2)


def _bound_off_the_data(patch):
    def wrong(self, what, norms, quantile, mu, base=None):
        return float(np.quantile(norms, quantile))

    patch.setattr(Questions, "quantile", wrong)


def _run_not_charged(patch):
    right = Questions.ask

    def wrong(self, what, draw, like, **costs):
        return draw() if what == "directions" else right(self, what, draw, like, **costs)

    patch.setattr(Questions, "ask", wrong)


@dataclass(frozen=True)
class Defect:
    """What is wrong, how to put it into the package, and the check that must notice."""

    name: str
    put: Callable[[pytest.MonkeyPatch], None]
    check: Callable[[], None]


def everywhere(patch, right, wrong):
    """Put something else in the place of a function or a class, in every module of the package that uses it."""
    names = [name for name in sys.modules if name.split(".")[0] == "opacus_expm"]
    users = [sys.modules[name] for name in names if vars(sys.modules[name]).get(right.__name__) is right]
    assert len(users) > 1, f"nothing uses {right.__name__}"
    for module in users:
        patch.setattr(module, right.__name__, wrong)


def _at_the_outputs(patch):
    original = clipping.record_gradients

    def wrong(source, criterion, inputs, targets, pad_to):
        found = original(source, criterion, inputs, targets, pad_to)
        gradient, _ = clipping.at_outputs(criterion, source.outputs_and_pullback(inputs)[0], targets)
        found.__dict__["norms"] = gradient.norm(dim=1)
        return found

    everywhere(patch, original, wrong)


def _gradients_unclipped(patch):
    def add(self, records):
        self._g = torch.zeros(records.size, dtype=torch.float64) if self._g is None else self._g
        records.add(self._g, torch.ones_like)
        self._parallel = False

    patch.setattr(clipping.ClippedAdder, "add_gradients", add)


def _curvature_unclipped(patch):
    original = clipping.ClippedAdder.add

    def add(self, records):
        original(self, dataclasses.replace(records, curvature_norms=torch.zeros_like(records.curvature_norms)))

    patch.setattr(clipping.ClippedAdder, "add", add)


def _narrow_width(patch):
    original = clipping.ClippedAdder.result
    patch.setattr(clipping.ClippedAdder, "result", lambda self: dataclasses.replace(original(self), parallel=True))


def _width_of_the_last_batch(patch):
    original = clipping.ClippedAdder.add

    def add(self, records):
        original(self, records)
        self._parallel = records.parallel

    patch.setattr(clipping.ClippedAdder, "add", add)


def _one_records_worth(patch):
    patch.setattr(Sensitivity, "_records", lambda self: 1)


def _no_curvature_in_lipschitz(patch):
    patch.setattr(Sensitivity, "lipschitz", lambda self, radius: self.max_grad_norm)


def _no_tilt_in_acceptance(patch):
    def accepted(self, generator, rows):
        z = self._mean + self._scale * generator.standard_normal((rows, self._scale.size))
        return z[np.einsum("ij,ij->i", z, z) <= 1.0]

    patch.setattr(sampling._Tilted, "accepted", accepted)


def _no_truncation(patch):
    def accepted(self, generator, rows):
        return self._mean + self._scale * generator.standard_normal((rows, self._scale.size))

    patch.setattr(sampling._Tilted, "accepted", accepted)


def _second_tilt_forgotten(patch):
    of = sampling._Conditional.of
    patch.setattr(sampling._Conditional, "of", lambda density: dataclasses.replace(of(density), extra_tilt=0.0))


def _no_second_tilt(patch):
    patch.setattr(sampling, "_extra_tilt", lambda *_: 0.0)


def _uniforms_of_53_bits(patch):
    patch.setattr(secure, "uniforms", lambda words, bits=64: ((words[:, 0] >> np.uint64(11)) + 0.5) * 2.0**-53)


def _any_reach(patch):
    everywhere(patch, secure.within_reach, lambda density, bound: density)


def _likelier_of_two(patch):
    original = sampling.Exact.sample

    def sample(self, density, generator, draws=1):
        pairs = original(self, density, generator, 2 * draws).reshape(draws, 2, -1)
        likelier = np.argmax([density.exponent(pairs[:, i]) for i in (0, 1)], axis=0)
        return pairs[np.arange(draws), likelier]

    patch.setattr(sampling.Exact, "sample", sample)


def _last_batch_twice(patch):
    original = loaders.batches

    def batches(*args, **kwargs):
        for batch in original(*args, **kwargs):
            yield batch
        yield batch

    patch.setattr(loaders, "batches", batches)


def _fill_is_counted(patch):
    original = clipping.record_gradients

    def wrong(source, criterion, inputs, targets, pad_to):
        fill = torch.arange(pad_to) % len(targets)
        return original(source, criterion, inputs[fill], targets[fill], pad_to)

    everywhere(patch, original, wrong)


def _size_follows_the_data(patch):
    patch.setattr(passes.Measurement, "size_of", lambda _, loader: loaders.dataset_size(loader))


def _mean_for_sum(patch):
    add, result = clipping.ClippedAdder.add_gradients, clipping.ClippedAdder.result

    def counted(self, records):
        self.count = getattr(self, "count", 0) + records.count
        add(self, records)

    def mean(self):
        found = result(self)
        return dataclasses.replace(found, gradient=found.gradient * (1000 / self.count))

    patch.setattr(clipping.ClippedAdder, "add_gradients", counted)
    patch.setattr(clipping.ClippedAdder, "result", mean)


def _training_mode(patch):
    original = passes.working_copy
    patch.setattr(passes, "working_copy", lambda module: original(module).train())
    patch.setattr(hooks, "_probe", lambda *_: None)  # which would refuse
    _nothing_put_back(patch)  # and so would the other checks


def _float32_sums_under_autocast(patch):
    class Float32Sum:
        def __init__(self, dim, device):
            self._total = torch.zeros(dim, dim, device=device)

        def add(self, rows):
            product = rows.float().T @ rows.float()
            self._total = self._total.to(product.dtype) + product

        def result(self):
            return self._total.double()

    patch.setattr(passes, "exact_arithmetic", contextlib.nullcontext)
    patch.setattr(clipping, "SymmetricSum", Float32Sum)


def _global_seed(patch):
    patch.setattr(Noise, "ordinary", lambda _: np.random.default_rng(torch.initial_seed()))


def _charge_after_the_draw(patch):
    def late(self, event, admission, draw, like):
        found = draw()
        self.accountant.record(event, admission=admission)
        return found

    patch.setattr(Books, "drawn", late)


def _noise_not_recorded(patch):
    patch.setattr(Noise, "origin", "system")


def _sampler_not_recorded(patch):
    original = paper.release_event
    patch.setattr(paper, "release_event", lambda *facts, sampler: original(*facts))


def _half_a_charge(patch):
    original = rounds.Release
    patch.setattr(rounds, "Release", lambda **facts: original(**{**facts, "epsilon_range": facts["epsilon_range"] / 2}))


def _range_from_bought_bounds(patch):
    original = rounds.Budget.calibrate
    found = []

    def calibrate(*args, **kwargs):
        found.append(original(*args, **kwargs))
        return found[-1]

    patch.setattr(rounds.Budget, "calibrate", calibrate)
    patch.setattr(rounds.Plan, "charges", lambda *_: [])
    patch.setattr(rounds, "cost_whatever_the_bounds", lambda *_: (found[-1].epsilon_range, found[-1].mu))


def _free_purchases(patch):
    original = ExpMAccountant.record

    def record(self, event, **options):
        if not isinstance(event, Purchase):
            original(self, event, **options)

    patch.setattr(ExpMAccountant, "record", record)
    _paid_anywhere(patch)  # the draw would be refused


def _no_lock_for_threads(patch):
    patch.setattr(accountant, "threading", SimpleNamespace(RLock=contextlib.nullcontext))


def _copies(patch):
    patch.delattr(accountant.NotCopied, "__reduce__")


def _any_ledger_is_loaded(patch):
    def load(self, state):
        self.releases = [Release.from_dict(facts) for facts in state["releases"]]

    patch.setattr(ExpMAccountant, "load_state_dict", load)


def _new_file_for_a_deleted_one(patch):
    patch.setattr(ledger.LedgerFile, "_content", lambda self: self.path.read_bytes() if self.path.exists() else b"")


def _lock_of_the_link(patch):
    def init(self, path):
        self.path, self._seen = Path(path), b""
        self._lock = ledger.FileLock(f"{path}.lock")

    patch.setattr(ledger.LedgerFile, "__init__", init)


def _budget_of_the_object(patch):
    original = ledger.LedgerFile.entries
    patch.setattr(ledger.LedgerFile, "entries", lambda self: [e for e in original(self) if "budget" not in e])


def _paid_anywhere(patch):
    patch.setattr(ExpMAccountant, "check_paid", lambda *_: None)


def _shares_beside_a_plan(patch):
    patch.setattr(filters.Filter, "admits_pure", filters.Filter.admits)


def _nothing_reserved(patch):
    patch.setattr(Admission, "rest", property(lambda self: []))


def _parts_stay(patch):
    patch.setattr(_files, "remove_parts", lambda path: None)


def _plain_quantile(patch):
    def plain(counts, quantile, *_):
        return float(GRID[np.searchsorted(counts[:-1], quantile * counts[-1])])

    everywhere(patch, private_quantile, plain)


def _full_budget_every_round(patch):
    original = rounds.allowances
    patch.setattr(rounds, "allowances", lambda epsilon, delta, **options: original(epsilon, delta))


def _error_for_a_record(patch):
    original = clipping.record_gradients

    def strict(*arguments):
        found = original(*arguments)
        parts = [part.squared_norms() for part in found.factored] + ([] if found.rows is None else [found.rows])
        if not all(bool(part.isfinite().all()) for part in parts):
            raise ValueError("a record is not finite")
        return found

    everywhere(patch, original, strict)


def _seeded_records(patch):
    patch.setattr(Generators, "refreshed", lambda self, *_: contextlib.nullcontext())


def _seeded_workers(patch):
    patch.setattr(loaders, "FreshWorker", lambda own, collate_fn: own)


def _seeded_loop(patch):
    everywhere(patch, freshly, iter)


def _shared_draws(patch):
    def together(views, generators, inputs, targets):
        return with_views(views, inputs, targets)

    everywhere(patch, with_own_views, together)


def _any_loader(patch):
    patch.setattr(loaders, "check_loader", lambda loader, name="loader": loader)


def _no_look_at_mixing(patch):
    patch.setattr(hooks, "check_mixing", lambda *_, **__: None)


def _no_look_at_branches(patch):
    patch.setattr(hooks, "may_branch", lambda *_: False)


def _nothing_put_back(patch):
    everywhere(patch, State, lambda *_: SimpleNamespace(changed=[], restore=lambda: None))
    patch.setattr(hooks, "check_mixing", lambda *_, **__: None)


def _collated_at_once(patch):
    patch.setattr(collating.Alone, "__call__", lambda self, records: self._collate(records))


def _collated_at_once_if_accepted(patch):
    def call(self, records):
        if self._untried:
            collating.try_on_made_up_records(self._collate, records[0], self._name)
        return self._collate(records)

    patch.setattr(collating.Alone, "__call__", call)


def _fetched_at_once(patch):
    patch.setattr(loaders, "_fetches_batches", lambda dataset: False)


def _any_subclass(patch):
    patch.setattr(loaders, "_own_iteration", lambda loader: [])
    patch.setattr(loaders, "each_alone", lambda loader, name="loader": loader)


def _only_subsets_are_looked_into(patch):
    def repeated(dataset, visited):
        return isinstance(dataset, Subset) and named.repeat(dataset.indices, len(dataset.dataset))

    patch.setattr(named, "named_twice", repeated)


def _any_public_data(patch):
    patch.setattr(loaders, "check_public", lambda public, loader, name="loader": loaders.check_loader(public))


DEFECTS = (
    Defect("gradients clipped at the outputs, not after projection", _at_the_outputs, audit_of_large_inputs),
    Defect("gradients not clipped", _gradients_unclipped, audit_of_large_inputs),
    Defect("curvature not clipped", _curvature_unclipped, audit_of_the_extremal_pair),
    Defect("the narrow width W₁ where W* is due", _narrow_width, audit_of_the_extremal_pair),
    Defect("the width of the last batch for all", _width_of_the_last_batch, the_widest_batch_decides),
    Defect("no factor two for replace-one", _one_records_worth, audit_of_the_extremal_pair_replace_one),
    Defect("Lipschitz constant without R·C_H", _no_curvature_in_lipschitz, audit_of_the_gaussian_claim),
    Defect("sampler accepts without the tilt", _no_tilt_in_acceptance, law_of_the_draws),
    Defect("no truncation to the ball", _no_truncation, releases_stay_in_the_ball),
    Defect("a second tilt that is not taken back", _second_tilt_forgotten, law_of_draws_on_a_stiff_edge),
    Defect("a proposal that accepts hardly anything", _no_second_tilt, draws_end_soon),
    Defect("secure normals from uniforms of 53 bits", _uniforms_of_53_bits, secure_normals_leave_no_gaps),
    Defect("secure work for N records with n of them", _any_reach, secure_draws_succeed_for_any_number_of_records),
    Defect("the likelier of two draws is released", _likelier_of_two, law_of_the_draws),
    Defect("a batch counted twice", _last_batch_twice, audit_of_a_record_against_the_others),
    Defect("copies that fill up a batch are counted", _fill_is_counted, audit_of_a_record_against_the_others),
    Defect("n in place of N", _size_follows_the_data, audit_with_a_ridge),
    Defect("mean over the records in place of the sum", _mean_for_sum, audit_of_a_record_against_the_others),
    Defect("BatchNorm in training mode", _training_mode, audit_of_a_model_with_batchnorm),
    Defect("float32 sums under autocast", _float32_sums_under_autocast, audit_under_autocast),
    Defect("noise from the global seed", _global_seed, noise_of_the_operating_system),
    Defect("records drawn by the script's seed", _seeded_records, a_seed_does_not_tell_what_is_drawn_for_the_records),
    Defect("workers keep the script's seed", _seeded_workers, a_seed_does_not_tell_what_is_drawn_in_workers),
    Defect("a loop's records drawn by its seed", _seeded_loop, a_seed_does_not_tell_what_is_drawn_in_a_loop),
    Defect("one draw for the views of a batch", _shared_draws, records_do_not_share_what_is_drawn),
    Defect("charged after the draw", _charge_after_the_draw, charged_before_the_draw),
    Defect("seeded noise recorded as the system's", _noise_not_recorded, uncovered_draws_are_said),
    Defect("any sampler recorded as exact", _sampler_not_recorded, uncovered_draws_are_said),
    Defect("ledger charged with half the range", _half_a_charge, audit_of_the_extremal_pair),
    Defect("every round has the whole budget", _full_budget_every_round, rounds_cost_what_was_asked),
    Defect("bounds from private data, not charged", _free_purchases, bought_bounds_are_in_the_ledger),
    Defect(
        "a range that follows from bought bounds is charged",
        _range_from_bought_bounds,
        no_pure_epsilon_by_mu_with_bought_bounds,
    ),
    Defect("threads are judged at the same time", _no_lock_for_threads, threads_share_one_budget),
    Defect("a copy of an engine has a budget of its own", _copies, copies_are_refused),
    Defect("an early checkpoint forgets later charges", _any_ledger_is_loaded, loading_forgets_nothing),
    Defect("a deleted ledger file begins anew", _new_file_for_a_deleted_one, deleted_ledgers_are_noticed),
    Defect("a link to a ledger has a lock of its own", _lock_of_the_link, links_share_one_lock),
    Defect("a ledger file without its budget", _budget_of_the_object, budgets_stay_with_their_ledgers),
    Defect("bounds paid by another ledger", _paid_anywhere, bought_bounds_are_paid_where_they_are_used),
    Defect("δ used by a plan and by others", _shares_beside_a_plan, nothing_uses_the_delta_of_a_plan),
    Defect("rounds of a plan are not reserved", _nothing_reserved, rounds_keep_what_they_reserved),
    Defect("the part of a killed write stays", _parts_stay, nothing_is_left_of_killed_writes),
    Defect("bounds are plain quantiles of private norms", _plain_quantile, law_of_bought_bounds),
    Defect("an error for a record that is not finite", _error_for_a_record, silence_about_records_that_are_not_finite),
    Defect("sampling with replacement let through", _any_loader, loaders_that_repeat_are_refused),
    Defect("records that see each other", _no_look_at_mixing, audit_of_a_model_that_mixes_records),
    Defect("a branch on the values of a batch", _no_look_at_branches, audit_of_a_model_that_branches),
    Defect("state that goes from record to record", _nothing_put_back, audit_of_a_model_with_a_memory),
    Defect(
        "a collate function is shown whole batches",
        _collated_at_once,
        audit_of_a_collate_function_that_standardises_by_the_batch,
    ),
    Defect(
        "one that cannot be tried is shown whole batches",
        _collated_at_once_if_accepted,
        audit_of_a_collate_function_that_cannot_be_tried,
    ),
    Defect("records are fetched together", _fetched_at_once, audit_of_records_that_are_fetched_together),
    Defect("a subclass of DataLoader iterates in its own way", _any_subclass, audit_of_a_loader_that_repeats_a_batch),
    Defect("a record reached by two paths", _only_subsets_are_looked_into, audit_of_a_record_named_twice),
    Defect("private records as public data", _any_public_data, public_data_is_not_private),
)
DEFECTS += (
    Defect("the span of a direction without noise", _without_noise, directions_have_their_noise),
    Defect("losses not clipped", _unclipped_losses, losses_are_clipped),
    Defect("half of secure mode's noise", _half_of_secure_normals, secure_directions_have_their_noise),
    Defect(
        "half the length of secure K-norm noise",
        _half_of_secure_gammas,
        secure_isotropic_noise_has_its_length,
    ),
    Defect("secure sums in all their bits", _no_grid, secure_answers_lie_on_the_grid),
    Defect("secure sums that never fail", _no_failures, secure_answers_are_charged_with_their_failures),
    Defect("each view of a record clipped by itself", _each_view_clipped, views_of_a_record_are_clipped_together),
    Defect("norms without views", _norms_of_plain_records, bounds_with_views_are_of_what_is_clipped),
    Defect("half of the symmetric noise", _half_symmetric, the_metric_has_its_noise),
    Defect("a bound read off the data", _bound_off_the_data, bounds_are_drawn),
    Defect("sampled sums that are not charged", _run_not_charged, the_run_is_in_the_ledger),
    Defect("half of the symmetric noise, by the joint law", _half_symmetric, audit_of_a_metric_and_a_scale),
    Defect("a scale read off the data", _bound_off_the_data, audit_of_a_metric_and_a_scale),
    Defect("half of the noise of directions", _less_noise, directions_have_their_noise),
)
CHECKS = tuple({defect.check.__name__: defect.check for defect in DEFECTS}.values())


def caught(defect):
    """Whether the defect's check fails with it, by its own assertion."""
    with pytest.MonkeyPatch.context() as patch:
        defect.put(patch)
        try:
            defect.check()
        except AssertionError:
            return True
    return False


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_sound_engine_passes(check):
    check()


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: defect.name.replace(" ", "-"))
def test_a_defect_is_caught(defect):
    assert caught(defect), f"{defect.check.__name__} does not notice: {defect.name}"


def test_the_audits_notice_a_good_part():
    """Not only single properties: the audit of the whole engine is what most defects run into."""
    assert len(DEFECTS) >= 20
    assert sum(defect.check.__name__.startswith("audit") for defect in DEFECTS) >= 10


def table():
    """Each defect, and whether and by what it is caught."""
    rows = [
        (defect.name, defect.check.__name__.replace("_", " "), "caught" if caught(defect) else "MISSED")
        for defect in DEFECTS
    ]
    return markdown(("defect", "check", ""), rows)


if __name__ == "__main__":
    print(table())
