"""Pure rounds: the public rule, the ledger at δ = 0, refusals, and the exact privacy of every part."""

import copy
import math
import random

import numpy as np
import pytest
import torch
from odd_records import ODD, neighbours, tensors
from scipy import stats
from small_problem import Stream, Untouchable, same
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from opacus_expm import BudgetExceeded, ExpMQuadEngine, pure
from opacus_expm.accounting.events import Query
from opacus_expm.books import Books
from opacus_expm.gathering import looks
from opacus_expm.gathering.clipping import ClippedAdder, RecordQuadratics
from opacus_expm.gathering.measurement import Measurement
from opacus_expm.gathering.passes import Workbench
from opacus_expm.mechanism import secure
from opacus_expm.mechanism.calibration import ROUNDING_MARGIN
from opacus_expm.mechanism.quantiles import GRID, grid_counts, quantile_scores, score_width
from opacus_expm.mechanism.secure import FAILURE_PROBABILITY
from opacus_expm.noise import Noise
from opacus_expm.pure import PureRounds, PureRule
from opacus_expm.subspaces.sparse import Sparse

EPSILON, RECORDS = 4.0, 400


def _model(outputs=1):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, outputs)).double()


def _loader(records=RECORDS, **options):
    return DataLoader(TensorDataset(*tensors(records)), batch_size=64, **options)


def _released(model, loader=None, engine=None, epsilon=EPSILON, **options):
    engine = ExpMQuadEngine() if engine is None else engine
    settings = {"criterion": nn.MSELoss(), "progress": False, **options}
    return engine.make_private_expm(model, _loader() if loader is None else loader, epsilon, **settings)


# --- the rule --------------------------------------------------------------------------------------------------------


def _plan(epsilon, n, p, bounded):
    """What has to be in the ledger, written down a second time from the formula: (what, ε_range, pure)."""
    bound = min(100 / n, 0.1 * epsilon)
    left = 0.75 * epsilon - bound * (1 if bounded else 2)
    rounds = max(1, min(4, int(0.1 * n * left / (0.8 * p)), int(n * epsilon / 1000)))
    before = [("bound", bound, None)] + ([] if bounded else [("loss", bound, None)])
    each = [("direction", 2 * left / rounds, left / rounds), ("length", epsilon / 4 / rounds, None)]
    return before + each * rounds


def _close(held, expected):
    assert [what for what, *_ in held] == [what for what, *_ in expected]
    for (_, *costs), (_, *planned) in zip(held, expected, strict=True):
        assert costs == [None if cost is None else pytest.approx(cost, rel=1e-12) for cost in planned]


@pytest.mark.parametrize(("epsilon", "records"), [(4.0, 400), (20.0, 400)])
def test_the_ledger_holds_what_the_public_formula_says(epsilon, records):
    engine = ExpMQuadEngine()
    _released(_model(), _loader(records), engine, epsilon)
    held = engine.accountant.releases
    _close([(q.what, q.epsilon_range, q.pure) for q in held], _plan(epsilon, records, 21, bounded=False))
    assert len(held) == (4 if epsilon == 4.0 else 10)
    assert all((q.epsilon, q.delta, q.nominal_size) == (epsilon, 0.0, records) for q in held)
    assert engine.get_epsilon(0.0) == pytest.approx(epsilon, rel=1e-12)


@pytest.mark.parametrize("bounded", [False, True])
@pytest.mark.parametrize("parameters", [1, 22, 10**6])
@pytest.mark.parametrize("records", [1, 2000, 10**7])
@pytest.mark.parametrize("epsilon", [0.01, 1.0, 30.0])
def test_the_parts_add_up_to_epsilon(epsilon, records, parameters, bounded):
    rule = PureRule(epsilon, records, parameters, bounded)
    assert math.fsum(event.epsilon_pure for event in rule.charges()) == pytest.approx(epsilon, rel=1e-12)
    assert 1 <= rule.dim <= parameters
    assert 1 <= rule.rounds <= 4
    assert rule.rounds == 1 or rule.dim == parameters
    assert rule.directions_epsilon >= 0.55 * epsilon * (1 - 1e-12)
    named = [(what, event.epsilon_range, event.pure) for what, event in rule.queries()]
    _close(named, _plan(epsilon, records, parameters, bounded))


def test_the_dimension_is_the_best_for_the_signal():
    """cos² = k/p · a²/(a² + k²) over all k: the formula of the module docstring."""
    rule = PureRule(1.0, 2000, 770, True)
    k = np.arange(1, 771)
    assert rule.dim == k[np.argmax(k * rule.signal**2 / (rule.signal**2 + k**2))]
    assert 1 < rule.dim < 770


# --- what is released ------------------------------------------------------------------------------------------------


def test_the_model_that_came_is_untouched_and_a_plain_one_comes_back():
    model = _model()
    before = copy.deepcopy(model)
    found = _released(model, epsilon=20.0)
    assert same(model, before)
    assert type(found) is nn.Sequential
    assert not any(m._forward_hooks for m in found.modules())


def test_it_improves_on_the_start():
    model, (x, y) = _model(), tensors(2000)

    def loss(module):
        return float((module(x) - y).square().mean().detach())

    engine = ExpMQuadEngine(noise_generator=np.random.default_rng(0))
    found = _released(model, _loader(2000), engine, epsilon=3.0)
    assert loss(found) < 0.7 * loss(model)


def test_it_improves_on_classes_in_a_subspace():
    """300 parameters and εn too small for all of them: the direction is drawn in a random subspace."""
    x = torch.randn(1500, 99, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    x[:, 0] *= 5
    y = (x[:, 0] > 0).long() + (x[:, 0] > 5).long()
    model = nn.Linear(99, 3).double()
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    engine = ExpMQuadEngine(noise_generator=np.random.default_rng(0))
    loader = DataLoader(TensorDataset(x, y), batch_size=500)
    found = _released(model, loader, engine, epsilon=1.0, criterion=nn.CrossEntropyLoss())
    assert PureRule(1.0, 1500, 300, True).dim == 102
    assert float((model(x).argmax(1) == y).double().mean()) < 0.55
    assert float((found(x).argmax(1) == y).double().mean()) > 0.6
    assert [q.what for q in engine.accountant.releases] == ["bound", "direction", "length"]


def test_given_noise_reproduces_a_run():
    found = [
        _released(_model(), epsilon=20.0, engine=ExpMQuadEngine(noise_generator=np.random.default_rng(s)))
        for s in (3, 3, 4)
    ]
    assert same(found[0], found[1])
    assert not same(found[0], found[2])


def test_a_seed_of_torch_does_not_fix_the_noise():
    found = []
    for _ in range(2):
        torch.manual_seed(0)
        np.random.seed(0)
        found.append(_released(_model(), epsilon=20.0))
    assert not same(*found)


# --- budgets and failures --------------------------------------------------------------------------------------------


def test_a_budget_refuses_before_any_data_is_touched():
    engine = ExpMQuadEngine(budget=(0.9 * EPSILON, 0.0))
    with pytest.raises(BudgetExceeded):
        _released(_model(), DataLoader(Untouchable(RECORDS), batch_size=64), engine)
    assert engine.accountant.releases == []


def test_a_pure_budget_is_spent_to_the_last_bit():
    engine = ExpMQuadEngine(budget=(EPSILON, 0.0))
    _released(_model(), engine=engine)
    with pytest.raises(BudgetExceeded):
        engine.accountant.record(Query("other", EPSILON, 0.0, RECORDS, epsilon_range=1e-6))
    assert engine.get_epsilon(0.0) == pytest.approx(EPSILON, rel=1e-12)


def test_every_part_is_charged_before_it_is_drawn(monkeypatch):
    engine = ExpMQuadEngine(noise_generator=np.random.default_rng(0))
    seen, right = [], Books.drawn

    def spy(self, event, admission, draw, like):
        def checked():
            assert self.accountant.releases[-1] is event
            seen.append(event.what)
            return draw()

        return right(self, event, admission, checked, like)

    monkeypatch.setattr(Books, "drawn", spy)
    _released(_model(), engine=engine)
    assert seen == ["bound", "loss", "direction", "length"] == [q.what for q in engine.accountant.releases]


def test_a_direction_that_fails_leaves_what_was_charged(monkeypatch):
    engine, model = ExpMQuadEngine(budget=(EPSILON, 0.0)), _model()
    before = copy.deepcopy(model)
    monkeypatch.setattr(pure, "isotropic_noise", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        _released(model, engine=engine)
    assert [q.what for q in engine.accountant.releases] == ["bound", "loss", "direction"]
    assert same(model, before)
    engine.accountant.record(Query("other", EPSILON, 0.0, RECORDS, epsilon_range=EPSILON / 4))  # what the length had


def test_secure_rounds_carry_their_failures():
    """So no pure total is left; at a δ as small as 1e-9 it is the ε that was asked for, and a pure budget refuses."""
    engine = ExpMQuadEngine(secure_mode=True, budget=(EPSILON, 1e-9))
    _released(_model(), engine=engine)
    held = engine.accountant.releases
    failing = [FAILURE_PROBABILITY if q.what == "direction" else 0.0 for q in held]
    assert [q.failure_probability for q in held] == failing
    assert any(failing)
    assert engine.get_epsilon(0.0) == math.inf
    assert 0.999 * EPSILON < engine.get_epsilon(1e-9) <= EPSILON
    refused = ExpMQuadEngine(secure_mode=True, budget=(EPSILON, 0.0))
    with pytest.raises(BudgetExceeded):
        _released(_model(), DataLoader(Untouchable(RECORDS), batch_size=64), refused)


def test_a_secure_direction_has_its_noise(monkeypatch):
    """The length of the noise, C/ε_d times a number of the law Gamma(k), and the public grid."""
    monkeypatch.setattr(secure.os, "urandom", random.Random(5).randbytes)
    parts, lengths = Parts(*tensors(6)), []
    total = _without_noise(parts)
    object.__setattr__(parts.rounds._questions.books, "noise", Noise(secure=True))
    unit = BOUND / parts.rule.direction_epsilon
    for _ in range(150):
        parts.rounds._direction(parts.bench, parts.rule, BOUND)
        answer = parts.answers[-1][1]
        lengths.append(float((answer - total).norm()) / unit)
        steps = answer / (unit * secure.SUM_GRID)
        torch.testing.assert_close(steps, steps.round(), rtol=0, atol=1e-6)
    for scale, fits in ((1.0, True), (0.5, False), (1.2, False)):
        assert (stats.kstest(lengths, stats.gamma(21, scale=scale).cdf).pvalue > 1e-3) == fits


def _without_noise(parts):
    """The clipped sum of a direction."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pure, "isotropic_noise", lambda dim, _: np.zeros(dim))
        parts.rounds._direction(parts.bench, parts.rule, BOUND)
    return parts.answers[-1][1]


# --- refusals --------------------------------------------------------------------------------------------------------

REFUSED = [
    ({}, {"epsilon": 0.0}, "epsilon must be greater than 0"),
    ({}, {"delta": -0.1}, "delta must be in"),
    ({"adjacency": "replace_one"}, {}, r"has adjacency='replace_one': use adjacency='add_remove'.*or pass radius="),
    ({}, {"proj_dim": 3}, "proj_dim has no meaning without radius="),
    ({}, {"rounds": 2}, "rounds has no meaning"),
    ({}, {"loader": DataLoader(Stream(), batch_size=4), "nominal_size": 40}, "iterable data set: pass a data set"),
    ({}, {"loader": _loader(40), "criterion": nn.CrossEntropyLoss()}, "needs at least 2 outputs|target has"),
]


@pytest.mark.parametrize(("engine", "options", "message"), REFUSED, ids=lambda v: v[:25] if isinstance(v, str) else "")
def test_refused(engine, options, message):
    engine = ExpMQuadEngine(**engine)
    loader = DataLoader(Untouchable(40), batch_size=4)
    with pytest.raises(ValueError, match=message):
        _released(_model(), **{"loader": loader, "engine": engine, **options})
    assert engine.accountant.releases == []


def test_a_faint_signal_is_said_in_public_numbers():
    said = []
    for scale in (1, 9):
        data = DataLoader(TensorDataset(*(scale * t for t in tensors(40))), batch_size=64)
        with pytest.warns(
            UserWarning, match=r"with 40 records and epsilon=0.5 .*n·ε = 20, reliable from 500"
        ) as caught:
            _released(_model(), data, epsilon=0.5)
        said.append({str(w.message) for w in caught if "told from noise" in str(w.message)})
    assert said[0] == said[1]


# --- exact privacy of the parts --------------------------------------------------------------------------------------

BOUND, GUESS = 0.7, 0.4


class Parts:
    """What pure rounds ask of a loader, with given noise."""

    def __init__(self, x, y, views=None):
        self.loader = DataLoader(TensorDataset(x, y), batch_size=16)
        engine = ExpMQuadEngine(noise_generator=np.random.default_rng(0))
        measurement = Measurement(Sparse(seed=0), None, nn.MSELoss(), views=views, nominal_size=10, progress=False)
        self.rounds = PureRounds(self.loader, measurement, EPSILON, engine.books())
        self.bench = Workbench(_model(), measurement)
        looks.prepare(self.bench, self.loader)
        self.rule = PureRule(EPSILON, 10, 21, bounded=False)
        self.answers = []
        right = self.rounds._questions.ask

        def spy(*arguments, **costs):
            self.answers.append((costs, right(*arguments, **costs)))
            return self.answers[-1][1]

        self.rounds._questions.ask = spy


@pytest.mark.parametrize("views", [None, lambda x: [x, x + 0.5, -4 * x]], ids=["plain", "views"])
@pytest.mark.parametrize("name", ODD)
def test_a_direction_is_shifted_by_at_most_its_bound(name, views, monkeypatch):
    monkeypatch.setattr(pure, "isotropic_noise", lambda dim, _: np.zeros(dim))
    sums = []
    for data in neighbours(name):
        parts = Parts(*data, views)
        parts.rounds._direction(parts.bench, parts.rule, BOUND)
        ((costs, answer),) = parts.answers
        sums.append(answer)
    shift = float((sums[1] - sums[0]).norm())
    assert shift <= BOUND
    assert name != "far" or shift > 0.999 * BOUND
    assert costs == {"epsilon_range": 2 * parts.rule.direction_epsilon, "pure": parts.rule.direction_epsilon}


def test_the_noise_of_a_direction_is_what_its_cost_says(monkeypatch):
    found = []
    for level in (0.0, 1.0):
        monkeypatch.setattr(pure, "isotropic_noise", lambda dim, _, level=level: np.full(dim, level))
        parts = Parts(*tensors(6))
        unit = parts.rounds._direction(parts.bench, parts.rule, BOUND)
        ((_, answer),) = parts.answers
        assert torch.allclose(unit, answer / answer.norm(), rtol=1e-12)
        found.append(answer)
    expected = torch.full_like(found[0], BOUND / parts.rule.direction_epsilon)
    assert torch.allclose(found[1] - found[0], expected, rtol=1e-9)


@pytest.mark.parametrize("name", ODD)
def test_choices_have_their_ranges(name, monkeypatch):
    """By enumeration of what can be chosen: the changes of all log probabilities lie in an interval of length ε₁."""
    logits = {"length": [], "bound": []}

    def choose(self, found):
        logits["bound" if len(found) == len(GRID) else "length"].append(found)
        return 0

    monkeypatch.setattr(Noise, "choose", choose)
    for data in neighbours(name):
        parts = Parts(*data)
        direction = torch.linspace(-1, 1, parts.bench.map.dim, dtype=torch.float64)
        places = [t * direction for t in (0.0, -8.0, -0.5, 0.5, 8.0)]
        parts.rounds._length(parts.bench, parts.rule, places, GUESS)
        norms = looks.gradient_norms(parts.bench, parts.loader)
        parts.rounds._questions.quantile("bound", norms, pure._QUANTILE, parts.rule.bound_epsilon, pure._UNITS)
    assert [costs["epsilon_range"] for costs, _ in parts.answers] == [
        parts.rule.length_epsilon,
        parts.rule.bound_epsilon,
    ]
    for (one, other), epsilon in zip(
        logits.values(), (parts.rule.length_epsilon, parts.rule.bound_epsilon), strict=True
    ):
        law = [v - np.logaddexp.reduce(v) for v in (one, other)]
        assert np.isfinite(law).all()
        assert np.ptp(law[1] - law[0]) <= epsilon * (1 + 1e-9)


def _worst(values, more, epsilon_bound, epsilon_direction, *, noise=1.0, margin=ROUNDING_MARGIN):
    """The largest |log ratio| of the joint densities of a bound and of a direction in one dimension, on two data sets.

    The direction's log density at x is −(ε/C)|x − G| up to a constant; the ratio is monotone in x and extreme at both ends.
    """
    laws, sums = [], []
    for data in (np.array(values), np.array([*values, more])):
        scores = quantile_scores(grid_counts(np.abs(data)), pure._QUANTILE)
        logits = epsilon_bound * scores / score_width(pure._QUANTILE, "add_remove") + pure._UNITS
        laws.append(logits - np.logaddexp.reduce(logits))
        means = []
        for bound in pure._FACTOR * GRID:
            g = torch.from_numpy(data)[:, None]
            total = ClippedAdder(bound * (1 - margin), 0.0)
            total.add(RecordQuadratics(g, None, g.norm(dim=1), torch.zeros(len(g)), parallel=True))
            means.append(float(total.result().gradient[0]))
        sums.append(np.array(means))
    shift = epsilon_direction * np.abs(sums[1] - sums[0]) / (noise * pure._FACTOR * GRID)
    return float((np.abs(laws[1] - laws[0]) + shift).max())


def test_a_bound_and_then_a_direction_by_enumeration():
    """Adaptive composition: the direction is clipped by the bound that was chosen before."""
    found = _worst([0.2, -0.5, 1.0], 6.0, 0.5, 2.0)
    assert 2.0 < found <= 2.5
    assert _worst([0.2, -0.5, 1.0], 6.0, 0.5, 2.0, noise=0.5) > 2.5
    assert _worst([0.2, -0.5, 1.0], 6.0, 0.5, 2.0, margin=-1.0) > 2.5


def test_several_ranks_are_refused():
    class Ranks:
        count = 2

    books = Books(ExpMQuadEngine().accountant, "add_remove", Noise(), Ranks())
    with pytest.raises(ValueError, match=r"run in one process.*distributed=False.*or pass radius="):
        PureRounds(_loader(), Measurement(Sparse(seed=0), None), EPSILON, books)
