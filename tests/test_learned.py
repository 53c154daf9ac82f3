"""Learned rounds: the public rule, the ledger, refusals, and the exact privacy of every part."""

import copy
import itertools
import math
import warnings
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import quick
import torch
from odd_records import ODD, neighbours, tensors
from opacus.layers import DPLSTM
from scipy import stats
from small_problem import Squared, Stream, Untouchable, flat, same
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from opacus_expm import BudgetExceeded, ExpMQuadEngine, audit, learned
from opacus_expm.accounting.composition import exact_total, gaussian_total, least_noise
from opacus_expm.accounting.events import PlannedEvent, Query
from opacus_expm.books import Books
from opacus_expm.gathering import hooks, looks
from opacus_expm.gathering.clipping import ClippedAdder, RecordQuadratics
from opacus_expm.gathering.measurement import Measurement
from opacus_expm.gathering.passes import Workbench
from opacus_expm.geometry import Geometry, Known
from opacus_expm.learned import LearnedRounds, Walk
from opacus_expm.mechanism import curves
from opacus_expm.mechanism.quantiles import GRID, grid_counts, quantile_scores, score_width
from opacus_expm.mechanism.secure import FAILURE_PROBABILITY, SUM_GRID, SystemNoise
from opacus_expm.noise import Noise
from opacus_expm.questions import Questions
from opacus_expm.rule import Rule
from opacus_expm.subspaces.sparse import Sparse

EPSILON, DELTA, RECORDS = 1.0, 1e-5, 200
UNITS = -np.abs(np.log2(GRID))  # public weights of a bound


def _line():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Linear(3, 1).double()


def _deep():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()


def _loader(records=RECORDS, **options):
    return DataLoader(TensorDataset(*tensors(records)), batch_size=64, **options)


def _released(model, loader=None, engine=None, epsilon=EPSILON, **options):
    engine = ExpMQuadEngine() if engine is None else engine
    settings = {"delta": DELTA, "criterion": nn.MSELoss(), "progress": False, **options}
    return engine.make_private_expm(model, _loader() if loader is None else loader, epsilon, **settings)


# --- the rule --------------------------------------------------------------------------------------------------------


def _plan(epsilon, delta, n, layers, bounded, head):
    """What has to be in the ledger, written down a second time from the formula: (what, ε_range, μ, run)."""
    mu = curves.gaussian_mu(epsilon, delta)
    steps = min(100, 14 * (2 * layers - 1)) if layers else 100
    steps = max(5, min(14, round(n * mu / 30))) if head else steps
    rate = min(1.0, (10 - (8 / 3 if head and bounded else 3)) / steps)

    def choice(what, cost):
        return (what, curves.bounded_range_within(cost), math.inf, None)

    before = [("metric", math.inf, mu * math.sqrt(0.08), None)] if layers else []
    before += [choice("scale", min(30 / n, 0.17 * mu)), choice("bound", min((60 if head else 120) / n, 0.25 * mu))]
    before += [] if bounded else [choice("loss bound", min(50 / n, 0.15 * mu))]
    before += [] if head else [("loss", math.inf, min(50 / n, 0.15 * mu), None)]
    after = [choice("choice", mu * math.sqrt(0.02))]
    others = gaussian_total([PlannedEvent(e, m) for _, e, m, _ in [*before, *after]])
    run = ("directions", math.inf, math.inf, (least_noise(epsilon, delta, others, rate, steps), rate, steps))
    return [*before, run, *after]


def _early():
    deep = _deep()
    deep[2].requires_grad_(False)
    return deep


@pytest.mark.parametrize(("make", "layers"), [(_line, 1), (_deep, 2), (_early, 1)])
def test_the_ledger_holds_what_the_public_formula_says(make, layers):
    engine = ExpMQuadEngine()
    _released(make(), engine=engine)
    held = engine.accountant.releases
    expected = _plan(EPSILON, DELTA, RECORDS, layers, bounded=False, head=make is _line)
    assert [(q.what, q.epsilon_range, q.mu, q.run) for q in held] == expected
    assert all((q.epsilon, q.delta, q.nominal_size) == (EPSILON, DELTA, RECORDS) for q in held)
    rule = Rule(EPSILON, DELTA, RECORDS, layers, bounded=False, head=make is _line)
    assert [(c.epsilon_range, c.mu, c.runs) for c in rule.charges()] == [(q.epsilon_range, q.mu, q.runs) for q in held]
    assert 0.95 * EPSILON < engine.get_epsilon(DELTA) <= EPSILON
    assert engine.get_epsilon(0.0) == math.inf


def test_the_rule_is_a_function_of_public_numbers_alone():
    rules = [Rule(EPSILON, DELTA, 500, 2, bounded=True) for _ in range(2)]
    assert rules[0].charges() == rules[1].charges()
    other = DataLoader(TensorDataset(*(100 * t for t in tensors(RECORDS))), batch_size=64)
    engines = [ExpMQuadEngine(), ExpMQuadEngine()]
    for engine, loader in zip(engines, (_loader(), other), strict=True):
        _released(_line(), loader, engine)
    assert engines[0].accountant.releases == engines[1].accountant.releases


@pytest.mark.parametrize("n", [20, 1000, 10**6])
@pytest.mark.parametrize("layers", [0, 1, 4])
def test_the_parts_leave_most_for_the_directions(n, layers):
    rule = Rule(EPSILON, DELTA, n, layers, bounded=False)
    spent = sum(min(e.mu, curves.bounded_range_mu(e.epsilon_range)) ** 2 for _, e in rule.queries())
    assert spent < 0.27 * rule.mu**2
    assert rule.passes <= 10 + 1e-9
    assert 5 <= rule.steps <= 100


def test_a_head_is_the_last_layer_and_nothing_else():
    """An early layer alone, or a head beside other parameters, has short steps by its loss and not those of a head."""

    def moves_head(model):
        return Workbench(model, Measurement(Sparse(seed=0), None)).moves_head_alone()

    late = _deep()
    late[0].requires_grad_(False)
    scaled = nn.Sequential(nn.LayerNorm(3), nn.Linear(3, 1)).double()
    assert [moves_head(model) for model in (_line(), late, _deep(), _early(), scaled)] == [
        True,
        True,
        False,
        False,
        False,
    ]
    head, other = (Rule(EPSILON, DELTA, 1000, 1, bounded=True, head=h) for h in (True, False))
    assert (head.steps, head.head_time) == (9, 18.0)
    assert other.steps == 14


def test_a_recurrent_layer_of_opacus_has_factors():
    """Its parameters are named twice, by the layers that use them and by the module around these."""
    model = nn.Sequential(DPLSTM(3, 4, batch_first=True))
    assert len(Workbench(model, Measurement(Sparse(seed=0), None)).blocks()) == 2


def test_the_noise_of_the_steps_raises_the_loss_by_a_known_part():
    """½·d·(τC/(nμ))² = 3/8 of ℓ²/B, from the docstring; and never longer than the longest."""
    rule = Rule(EPSILON, DELTA, 1000, 2, bounded=True)
    bound, loss, guess, dimensions = 3.0, 0.7, 2.0, 40.0
    time = rule.time(bound, loss, guess, dimensions)
    assert 0.5 * dimensions * (time * bound / (1000 * rule.mu)) ** 2 == pytest.approx(0.375 * loss**2 / guess)
    assert rule.time(bound / 100, loss, guess, dimensions) == 12


def test_a_step_is_as_long_as_bound_loss_and_dimensions_say(monkeypatch):
    """Told units: h₀ = 4, 5 dimensions, and C = 3; the steps' lengths add up to τ/h₀ with C in units of √h₀."""
    found = []
    monkeypatch.setattr(LearnedRounds, "geometry", lambda *_: Geometry(None, 4.0, 5.0))
    monkeypatch.setattr(LearnedRounds, "bound", lambda _, bench, rule, unit: found.append(unit) or 3.0)
    monkeypatch.setattr(LearnedRounds, "losses", lambda *_: (1.0, 0.01))
    rounds = Parts(*tensors(6)).rounds
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # few records
        walk = rounds.begin(rounds.plan(_deep()))
    assert found == [2.0]
    assert walk._rate * walk.rule.steps * 4.0 == pytest.approx(walk.rule.time(1.5, 0.01, 1.0, 5.0))


# --- with public data ------------------------------------------------------------------------------------------------


def _public(seed=9):
    x = torch.randn(50, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=25)


@pytest.mark.parametrize(("make", "layers"), [(_line, 1), (_deep, 2)])
def test_public_records_cost_nothing_and_tell_how_much_a_head_curves(make, layers):
    engine, head = ExpMQuadEngine(), make is _line
    _released(make(), engine=engine, public_loader=_public())
    held = engine.accountant.releases
    rule = Rule(EPSILON, DELTA, RECORDS, layers, bounded=False, head=head, public=True)
    asked = [q.what for q in held]
    assert ("metric" in asked, "scale" in asked) == (True, not head)
    assert [(c.epsilon_range, c.mu, c.runs) for c in rule.charges()] == [(q.epsilon_range, q.mu, q.runs) for q in held]
    assert 0.95 * EPSILON < engine.get_epsilon(DELTA) <= EPSILON


@pytest.mark.parametrize("make", [_line, _deep])
def test_where_noise_hides_the_records_the_metric_is_that_of_public_ones(make, monkeypatch):
    """The same map whatever the private records are, and another one with other public records."""
    monkeypatch.setattr(Questions, "quantile", lambda *_: 1.0)
    maps = []
    for scale, seed in ((1, 9), (100, 9), (1, 8)):
        rounds = LearnedRounds(
            DataLoader(TensorDataset(*(scale * t for t in tensors(RECORDS))), batch_size=64),
            Measurement(Sparse(seed=0), None, criterion=nn.MSELoss(), progress=False),
            0.01,
            DELTA,
            ExpMQuadEngine(noise_generator=np.random.default_rng(3)).books(),
            public_loader=_public(seed),
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # few records
            planned = rounds.plan(make())
        found = rounds.geometry(planned.bench, planned.rule, planned.blocks, planned.known)
        maps.append(torch.cat([root.dense().flatten() for roots in found.subspace.roots for root in roots]))
    assert torch.equal(maps[0], maps[1])
    assert not torch.allclose(maps[0], maps[2], rtol=0, atol=1e-4)


def test_public_records_that_are_unlike_the_private_ones_hardly_matter(monkeypatch):
    """Without noise the metric is that of the private records, whatever the public ones show."""
    monkeypatch.setattr(Questions, "quantile", lambda *_: 1.0)
    parts = Parts(*tensors(10))
    object.__setattr__(parts.questions.books, "noise", SilentNoise())
    factors = looks.factors
    monkeypatch.setattr(looks, "factors", lambda b, data, _: factors(b, data, np.random.default_rng(7)))
    blocks = looks.blocks(parts.bench)
    rule = replace(parts.rule, epsilon=1e6)  # the edge of the noise is nearly 0
    sizes = [d for block in blocks for d in (block.width, block.outputs)]
    unlike = [torch.diag(torch.linspace(1, 0, d, dtype=torch.float64)) / max(1, d / 2) for d in sizes]
    known = Known(unlike, torch.tensor([0.01, 0.99], dtype=torch.float64), 1.0)
    alone, beside = (parts.rounds.geometry(parts.bench, rule, blocks, given) for given in (None, known))
    assert beside.damping == pytest.approx(alone.damping, rel=1e-3)
    for mine, other in zip(alone.subspace.roots, beside.subspace.roots, strict=True):
        for first, second in zip(mine, other, strict=True):
            torch.testing.assert_close(first.dense(), second.dense(), rtol=0, atol=1e-3)


@pytest.mark.parametrize("epsilon", [EPSILON, 50.0])
def test_a_layer_without_gradients_takes_its_units_from_nowhere(epsilon, monkeypatch):
    """As that of a LoRA adapter at the start: its factor is zero, both in public records and in private ones."""
    model = _deep()
    with torch.no_grad():
        model[2].weight.zero_()
    found = []
    right = Workbench.within
    monkeypatch.setattr(Workbench, "within", lambda self, metric: found.append(metric) or right(self, metric))
    released = _released(model, epsilon=epsilon, public_loader=_public())
    assert all(root.dense().isfinite().all() for roots in found[0].roots for root in roots)
    assert flat(released).isfinite().all()
    assert not same(released, model)


def test_public_curvature_is_that_of_a_model_that_knows_nothing(monkeypatch):
    """A model that is sure of the public records has the curvature of one that knows nothing, not a thousandth of it."""
    curvatures = []
    right = LearnedRounds.begin

    def spy(self, planned):
        curvatures.append(planned.known.trace)
        return right(self, planned)

    monkeypatch.setattr(LearnedRounds, "begin", spy)
    x = torch.randn(50, 3, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    public = DataLoader(TensorDataset(x, (x[:, 0] > 0).long()), batch_size=25)
    for size in (0.0, 100.0):
        model = nn.Sequential(nn.Linear(3, 2)).double()
        with torch.no_grad():
            model[0].weight.fill_(size)
            model[0].weight[0].neg_()
        private = DataLoader(TensorDataset(x + 1.0, (x[:, 1] > 0).long()), batch_size=25)
        _released(model, private, criterion=nn.CrossEntropyLoss(), public_loader=public)
    assert curvatures[0] > 0
    assert curvatures[1] == pytest.approx(curvatures[0], rel=1e-9)


def test_public_data_that_cannot_serve_are_refused_and_nothing_is_charged():
    engine, loader = ExpMQuadEngine(), _loader()
    with pytest.raises(ValueError, match="public_loader names records of loader"):
        _released(_line(), loader, engine, public_loader=DataLoader(loader.dataset, batch_size=10))
    with pytest.raises(ValueError, match="public_loader has no meaning without radius="):
        _released(_line(), loader, engine, public_loader=_public(), delta=0.0)
    still = DataLoader(TensorDataset(torch.zeros(20, 3).double(), torch.zeros(20, 1).double()), batch_size=10)
    with pytest.raises(ValueError, match="public_loader gives a metric by layers, and hooks serve no layer"):
        _released(_deep(), loader, engine, public_loader=_public(), grad_sample_mode="functorch")
    constant = nn.Sequential(nn.Linear(3, 1, bias=False)).double()
    with pytest.raises(ValueError, match="public_loader's records have no curvature: leave public_loader out"):
        _released(constant, loader, engine, public_loader=still)
    assert len(engine.accountant) == 0


# --- what is released ------------------------------------------------------------------------------------------------


def test_the_model_that_came_is_untouched_and_a_plain_one_comes_back():
    model = _deep()
    before = copy.deepcopy(model)
    found = _released(model)
    assert same(model, before)
    assert type(found) is nn.Sequential
    assert not same(found, model)
    assert all(p.grad is None for p in found.parameters())
    assert not any(m._forward_hooks for m in found.modules())


WAYS = {
    "its own metric": {},
    "a public metric": {"public_loader": DataLoader(TensorDataset(*tensors(40)), batch_size=20)},
    "rows one by one": {"grad_sample_mode": "functorch"},
    "pure": {"delta": 0.0},
    "one draw": {"radius": 0.5, "max_grad_norm": 1.0, "max_curvature": 1.0},
}


@pytest.mark.filterwarnings("ignore:with 200 records")
@pytest.mark.parametrize("way", quick.only(set(WAYS) - {"rows one by one"}, WAYS))
def test_a_released_model_shares_no_memory_with_the_model_that_came(way):
    """Also not what is frozen, which passes share with it, and which does not move."""
    model = _deep()
    model[0].requires_grad_(False)
    model.register_buffer("mean", torch.zeros(3))
    found = _released(model, **WAYS[way])
    places = [{t.untyped_storage().data_ptr() for t in m.state_dict().values()} for m in (model, found)]
    assert len(places[0]) == len(places[1]) == 5
    assert not places[0] & places[1]
    assert torch.equal(model[0].weight, found[0].weight)
    with torch.no_grad():
        model[0].weight += 1  # whoever trains on changes one of them alone
    assert not torch.equal(model[0].weight, found[0].weight)


def test_it_improves_on_the_start_where_much_may_be_spent():
    model, (x, y) = _line(), tensors(1000)

    def loss(module):
        return float((module(x) - y).square().mean().detach())

    engine = ExpMQuadEngine(noise_generator=np.random.default_rng(0))
    found = _released(model, _loader(1000), engine, epsilon=10.0)
    assert loss(found) < 0.5 * loss(model)


def test_a_model_that_hooks_cannot_serve_has_no_metric():
    engine, model = ExpMQuadEngine(), Squared().double()
    with pytest.warns(UserWarning, match="using grad_sample_mode='functorch'"):
        found = _released(model, engine=engine)
    asked = [q.what for q in engine.accountant.releases]
    assert asked == ["scale", "bound", "loss bound", "loss", "directions", "choice"]
    assert type(found) is Squared


def test_a_seed_of_torch_does_not_fix_the_noise():
    found = []
    for _ in range(2):
        torch.manual_seed(0)
        np.random.seed(0)
        found.append(_released(_line()))
    assert not same(*found)


def test_given_noise_reproduces_a_run():
    found = [_released(_deep(), engine=ExpMQuadEngine(noise_generator=np.random.default_rng(s))) for s in (3, 3, 4)]
    assert same(found[0], found[1])
    assert not same(found[0], found[2])


# --- budgets and failures --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [(0.9, DELTA), (EPSILON, 1e-6)])
def test_a_budget_refuses_before_any_data_is_touched(budget):
    engine = ExpMQuadEngine(budget=budget)
    with pytest.raises(BudgetExceeded):
        _released(_deep(), DataLoader(Untouchable(RECORDS), batch_size=64), engine)
    assert engine.accountant.releases == []


def test_a_plan_that_was_only_likely_to_fit_charges_nothing(monkeypatch):
    """What is known before any data is a guess at the plan; the plan itself is judged again before the first charge."""
    engine, cheap = ExpMQuadEngine(budget=(0.5, DELTA)), Rule(0.1, DELTA, RECORDS, 1, bounded=False)
    monkeypatch.setattr(LearnedRounds, "_likely", lambda *_: cheap)
    read = []
    right = looks.prepare
    monkeypatch.setattr(looks, "prepare", lambda *a: read.append(1) or right(*a))
    with pytest.raises(BudgetExceeded):
        _released(_line(), engine=engine)
    assert read == [1]  # the guess had passed
    assert engine.accountant.releases == []
    _released(_line(), engine=engine, epsilon=0.5)  # and nothing is reserved any more
    assert engine.get_epsilon(DELTA) <= 0.5


def test_an_inferred_criterion_is_said_once():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _released(_deep(), criterion=None)
    assert sum("criterion=None" in str(w.message) for w in caught) == 1


def test_nothing_else_is_charged_in_between(monkeypatch):
    engine, tried = ExpMQuadEngine(budget=(EPSILON, DELTA)), []
    right = looks.gradient_norms

    def spy(*arguments):
        with pytest.raises(BudgetExceeded):
            engine.accountant.record(Query("other", EPSILON, DELTA, RECORDS, mu=0.1))
        tried.append(1)
        return right(*arguments)

    monkeypatch.setattr(looks, "gradient_norms", spy)
    _released(_line(), engine=engine)
    assert tried == [1]
    assert engine.get_epsilon(DELTA) <= EPSILON


def test_a_step_that_fails_leaves_what_was_charged(monkeypatch):
    engine, right, calls = ExpMQuadEngine(budget=(EPSILON, DELTA)), Walk.step, []

    def failing(self, *arguments):
        calls.append([q.what for q in engine.accountant.releases])
        if len(calls) == 3:
            raise KeyboardInterrupt
        return right(self, *arguments)

    monkeypatch.setattr(Walk, "step", failing)
    model = _line()
    before = copy.deepcopy(model)
    with pytest.raises(KeyboardInterrupt):
        _released(model, engine=engine)
    assert (
        calls[0] == calls[2] == ["metric", "scale", "bound", "loss bound", "directions"]
    )  # once, before the first step
    assert [q.what for q in engine.accountant.releases] == calls[0]
    assert same(model, before)


def test_every_part_is_charged_before_it_is_drawn(monkeypatch):
    """Whatever is drawn from the noise finds its charge in the ledger."""
    engine = ExpMQuadEngine(noise_generator=np.random.default_rng(0))
    seen = []
    right = Books.drawn

    def spy(self, event, admission, draw, like):
        def checked():
            assert self.accountant.releases[-1] is event
            seen.append(event.what)
            return draw()

        return right(self, event, admission, checked, like)

    monkeypatch.setattr(Books, "drawn", spy)
    _released(_line(), engine=engine)
    assert seen == [q.what for q in engine.accountant.releases]


# --- secure mode -----------------------------------------------------------------------------------------------------


def test_secure_rounds_carry_their_failures_and_stay_within_the_budget():
    engine = ExpMQuadEngine(secure_mode=True, budget=(EPSILON, DELTA))
    _released(_deep(), engine=engine)
    held = engine.accountant.releases
    sums = {"metric", "loss", "directions"}
    assert {q.what for q in held} - sums == {"scale", "bound", "loss bound", "choice"}
    assert [q.failure_probability for q in held] == [FAILURE_PROBABILITY if q.what in sums else 0.0 for q in held]
    assert 0.95 * EPSILON < engine.get_epsilon(DELTA) <= EPSILON
    assert engine.get_epsilon(0.0) == math.inf


def test_the_noise_of_secure_rounds_makes_room_for_their_failures(monkeypatch):
    """With failures that count, the rule has so much less of δ; and none of it outside secure mode."""
    monkeypatch.setattr("opacus_expm.noise.FAILURE_PROBABILITY", 5e-8)
    engines = [ExpMQuadEngine(secure_mode=s, budget=(EPSILON, DELTA)) for s in (False, True)]
    noise = []
    for engine in engines:
        _released(_line(), engine=engine)
        assert engine.get_epsilon(DELTA) <= EPSILON
        noise.append(next(q.run[0] for q in engine.accountant.releases if q.run))
    assert noise[1] > 1.005 * noise[0]
    held = engines[1].accountant.releases
    assert exact_total(held, [], DELTA).epsilon < 0.99 * EPSILON
    assert exact_total(held, [], DELTA - 1e-7 * (1 + math.exp(EPSILON))).epsilon <= EPSILON


def test_secure_rounds_use_the_systems_noise_alone(monkeypatch):
    def refused(*_):
        raise AssertionError("an ordinary generator")

    monkeypatch.setattr(Noise, "ordinary", refused)
    found = []
    for _ in range(2):
        torch.manual_seed(0)
        np.random.seed(0)
        engine = ExpMQuadEngine(secure_mode=True, noise_generator=np.random.default_rng(0))
        found.append(_released(_deep(), engine=engine))
        assert {q.noise for q in engine.accountant.releases} == {"system"}
    assert not same(*found)


def test_the_work_of_secure_noise_does_not_depend_on_the_data(monkeypatch):
    """So many variates for as many records, whatever these are."""
    taken = []

    class Counting(SystemNoise):
        def __init__(self):
            super().__init__()
            taken[-1].append(self)

    monkeypatch.setattr("opacus_expm.noise.SystemNoise", Counting)
    far = DataLoader(TensorDataset(*(100 * t for t in tensors(RECORDS))), batch_size=64)
    for loader in (_loader(), far):
        taken.append([])
        _released(_deep(), loader, ExpMQuadEngine(secure_mode=True))
    counts = [[noise.consumed for noise in run] for run in taken]
    assert counts[0] == counts[1]
    assert sum(counts[0]) > 42 * 21


def test_answers_of_secure_rounds_lie_on_the_grid(monkeypatch):
    monkeypatch.setattr(Questions, "quantile", lambda *_: 1.0)
    parts = Parts(*tensors(6))
    object.__setattr__(parts.questions.books, "noise", Noise(secure=True))
    parts.rounds.geometry(parts.bench, parts.rule, looks.blocks(parts.bench))
    parts.rounds.losses(parts.bench, parts.rule, None)
    walk = parts.walk(rule=Full(parts.rule), bound=0.7)
    walk.step(parts.loader)
    found = {
        "metric": (parts.asked["metric"][0][1], 1 / parts.rule.factor_mu),
        "loss": (parts.asked["loss"][0][1], 2.0 / parts.rule.loss_mu),
        "direction": (walk.place / walk._rate * 10, 0.7 * parts.rule.noise_multiplier),
    }
    for answer, scale in found.values():
        steps = answer / (scale * SUM_GRID)
        torch.testing.assert_close(steps, steps.round(), rtol=0, atol=1e-6)
        assert len(steps.unique()) == len(steps) or len(steps) > 20  # symmetric matrices hold numbers twice


# --- refusals --------------------------------------------------------------------------------------------------------

REFUSED = [
    ({}, {"epsilon": 0.0}, "epsilon must be greater than 0"),
    ({}, {"views": lambda x: [x - x.mean(0)], "loader": _loader(40)}, "views must treat every record alone"),
    ({}, {"views": lambda x: [], "loader": _loader(40)}, "views must give a list"),
    ({"adjacency": "replace_one"}, {}, r"has adjacency='replace_one': use adjacency='add_remove'.*or pass radius="),
    ({"secure_mode": True}, {"epsilon": 25.0, "loader": _loader(40)}, "delta must be greater than .* in secure_mode"),
    ({}, {"proj_dim": 3}, "proj_dim has no meaning without radius="),
    ({}, {"max_grad_norm": 1.0}, "max_grad_norm has no meaning"),
    ({}, {"max_curvature": 0.0}, "max_curvature has no meaning"),
    ({}, {"regularization": 1.0}, "regularization has no meaning"),
    ({}, {"rounds": 2}, "rounds has no meaning"),
    ({}, {"projection": "stiefel"}, "projection has no meaning"),
    ({}, {"loader": DataLoader(Stream(), batch_size=4), "nominal_size": 40}, "iterable data set: pass a data set"),
    ({}, {"loader": DataLoader(Untouchable(40), batch_size=4, drop_last=True, sampler=range(9))}, "sampler of type"),
    ({}, {"loader": _loader(40), "criterion": nn.CrossEntropyLoss()}, "needs at least 2 outputs|target has"),
]


@pytest.mark.parametrize(("engine", "options", "message"), REFUSED, ids=lambda v: v[:25] if isinstance(v, str) else "")
def test_refused(engine, options, message):
    engine = ExpMQuadEngine(**engine)
    loader = DataLoader(Untouchable(40), batch_size=4)
    with pytest.raises(ValueError, match=message):
        _released(_line(), **{"loader": loader, "engine": engine, **options})
    assert engine.accountant.releases == []


def test_they_need_a_delta():
    books = ExpMQuadEngine().books()
    with pytest.raises(ValueError, match="delta must be greater than 0 for learned rounds"):
        LearnedRounds(_loader(), Measurement(Sparse(seed=0), None), EPSILON, 0.0, books)


def test_several_ranks_are_refused():
    class Ranks:
        count = 2

    books = Books(ExpMQuadEngine().accountant, "add_remove", Noise(), Ranks())
    with pytest.raises(ValueError, match=r"run in one process.*distributed=False.*or pass radius="):
        LearnedRounds(_loader(), Measurement(Sparse(seed=0), None), EPSILON, DELTA, books)


def test_a_faint_signal_is_said_in_public_numbers():
    with pytest.warns(UserWarning, match=r"with 40 records, 4 parameters and epsilon=0.1 .*n·μ/√p = 0\.") as caught:
        _released(_line(), _loader(40), epsilon=0.1)
    found = {str(w.message) for w in caught if "told from noise" in str(w.message)}
    other = DataLoader(TensorDataset(*(9 * t for t in tensors(40))), batch_size=64)
    with pytest.warns(UserWarning, match="told from noise") as again:
        _released(_line(), other, epsilon=0.1)
    assert found == {str(w.message) for w in again if "told from noise" in str(w.message)}


# --- exact privacy of the parts --------------------------------------------------------------------------------------


class Silent:
    """No noise; every record is in every sample; choices are the likeliest."""

    def __init__(self, level=0.0):
        self.level = level

    def standard_normal(self, shape):
        return np.full(shape, self.level)

    def random(self, count):
        return np.full(count, 0.999999)


class SilentNoise(Noise):
    def source(self):
        return Silent()


class Parts:
    """What learned rounds ask of a loader, without the noise."""

    def __init__(self, x, y, model=None, views=None):
        self.model = _deep() if model is None else model
        self.loader = DataLoader(TensorDataset(x, y), batch_size=16)
        books = Books(ExpMQuadEngine().accountant, "add_remove", SilentNoise(), ExpMQuadEngine().books().ranks)
        self.measurement = Measurement(Sparse(seed=0), None, nn.MSELoss(), views=views, nominal_size=10, progress=False)
        self.rounds = LearnedRounds(self.loader, self.measurement, EPSILON, DELTA, books)
        self.bench = Workbench(self.model, self.measurement)
        looks.prepare(self.bench, self.loader)
        self.rule = Rule(EPSILON, DELTA, 10, 2, bounded=False)
        self.asked = {}
        self.questions = self.rounds._questions
        right = self.questions.ask

        def spy(what, draw, like, **costs):
            answer = right(what, draw, like, **costs)
            self.asked.setdefault(what, []).append((costs.get("mu"), answer))
            return answer

        self.questions.ask = spy

    def walk(self, place=None, *, rule=None, bound=1.0, guess=0.1):
        """A walk that has come to a place."""
        walk = Walk(self.bench, self.loader, self.questions, self.rule if rule is None else rule, bound, guess, 0.5)
        if place is not None:
            walk._place = walk._total = place
            walk._count = 1
        return walk


@pytest.mark.parametrize("name", ODD)
def test_the_metric_is_shifted_by_at_most_mu(name, monkeypatch):
    monkeypatch.setattr(Questions, "quantile", lambda *_: 1.0)
    shifts = []
    for data in neighbours(name):
        parts = Parts(*data)
        factors = looks.factors
        with monkeypatch.context() as patch:  # the same z for the records that both have
            patch.setattr(looks, "factors", lambda b, data, _: factors(b, data, np.random.default_rng(7)))  # noqa: B023
            parts.rounds.geometry(parts.bench, parts.rule, looks.blocks(parts.bench))
        ((mu, answer),) = parts.asked["metric"]
        shifts.append(answer)
    moved = float((shifts[1] - shifts[0]).norm()) * parts.rule.factor_mu
    assert moved <= mu == parts.rule.metric_mu
    assert name != "plain" or moved > 0.3 * mu


class LoudNoise(SilentNoise):
    def source(self):
        return Silent(1.0)


def _answers(what, ask, monkeypatch):
    """What a part answers without noise, and with every normal number 1; everything else is the same."""
    monkeypatch.setattr(Questions, "quantile", lambda *_: 1.0)
    found = []
    for noise in (SilentNoise(), LoudNoise()):
        parts = Parts(*tensors(6))
        object.__setattr__(parts.questions.books, "noise", noise)
        factors = looks.factors
        with monkeypatch.context() as patch:
            patch.setattr(looks, "factors", lambda b, data, _: factors(b, data, np.random.default_rng(7)))  # noqa: B023
            ask(parts)
        ((mu, answer),) = parts.asked[what]
        found.append(answer)
    return parts.rule, mu, found[1] - found[0]


def test_the_metric_has_the_noise_that_its_cost_says(monkeypatch):
    """Each factor, and the shares, move by 1 at most: noise of deviation 1/μ in the isometric coordinates of each."""
    rule, mu, noise = _answers(
        "metric", lambda parts: parts.rounds.geometry(parts.bench, parts.rule, looks.blocks(parts.bench)), monkeypatch
    )
    sizes = [d for block in looks.blocks(Parts(*tensors(6)).bench) for d in (block.width, block.outputs)]
    expected = math.sqrt(sum(d + d * (d - 1) / 2 for d in sizes) + 2) / rule.factor_mu  # and two layers' shares
    assert float(noise.norm()) == pytest.approx(expected, rel=1e-9)
    assert mu == pytest.approx(rule.factor_mu * math.sqrt(len(sizes) + 1))


def test_the_loss_has_the_noise_that_its_cost_says(monkeypatch):
    """It is clipped at twice the quantile, which is 1 here."""
    rule, mu, noise = _answers("loss", lambda parts: parts.rounds.losses(parts.bench, parts.rule, None), monkeypatch)
    assert noise.tolist() == pytest.approx([2.0 / rule.loss_mu])
    assert mu == rule.loss_mu


@pytest.mark.parametrize("name", ODD)
def test_a_direction_is_shifted_by_at_most_its_bound(name):
    bound, sums = 0.05, []
    for data in neighbours(name):
        parts = Parts(*data)
        one = []
        for level in (0.0, 1.0):
            walk = parts.walk(rule=Full(parts.rule), bound=bound)
            walk._random = Silent(level)
            walk.step(parts.loader)
            one.append(-walk._place / walk._rate)
        assert (one[1] - one[0]).numpy() * 10 == pytest.approx(bound * parts.rule.noise_multiplier)
        sums.append(one[0] * 10)
    moved = float((sums[1] - sums[0]).norm())
    assert moved <= bound
    assert name != "far" or moved > 0.99 * bound


class Full:
    """The rule of steps in which every record takes part."""

    sample_rate = 1.0

    def __init__(self, rule):
        self.noise_multiplier, self.steps = rule.noise_multiplier, rule.steps


# --- views -----------------------------------------------------------------------------------------------------------


def _views(x):
    """Three of them, of which one differs much."""
    return [x, x + 0.5, -4 * x]


def _mean_gradients(bench, x, y):
    """∇ of the mean loss over a record's views, one view at a time: (n, p)."""
    found = []
    for i in range(len(x)):
        losses = [nn.MSELoss()(bench.model(view[i : i + 1]), y[i : i + 1]) for view in _views(x)]
        grads = torch.autograd.grad(sum(losses) / len(losses), list(bench.model.parameters()))
        found.append(torch.cat([g.flatten() for g in grads]))
    return torch.stack(found)


def test_the_bound_is_that_of_the_gradients_of_means_over_views():
    x, y = tensors(6)
    parts = Parts(x, y, views=_views)
    expected = _mean_gradients(parts, x, y).norm(dim=1).numpy()
    found = looks.gradient_norms(parts.bench, parts.loader)
    assert found == pytest.approx(expected, rel=1e-9)
    assert np.abs(found / looks.gradient_norms(Parts(x, y).bench, parts.loader) - 1).max() > 0.1


@pytest.mark.parametrize("metric", [False, True])
@pytest.mark.parametrize("name", ODD)
def test_with_views_a_direction_is_shifted_by_at_most_its_bound(name, metric, monkeypatch):
    """In the parameters' own units also against the sum of clipped means, by hand; whatever the views of a record are."""
    monkeypatch.setattr(Questions, "quantile", lambda *_: 1.0)
    bound, sums, units = 0.5, [], None
    for x, y in neighbours(name):
        parts, factors = Parts(x, y, views=_views), looks.factors
        if metric and units is None:  # a metric that was released, and is the same for both
            with monkeypatch.context() as patch:
                patch.setattr(looks, "factors", lambda b, data, _: factors(b, data, np.random.default_rng(7)))  # noqa: B023
                units = parts.rounds.geometry(parts.bench, parts.rule, looks.blocks(parts.bench))
        if metric:
            parts.bench = parts.bench.within(units.subspace)
        walk = parts.walk(rule=Full(parts.rule), bound=bound)
        walk.step(parts.loader)
        sums.append(-walk.place / walk._rate * 10)
        if not metric:
            gradients = _mean_gradients(parts, x, y)
            weights = (bound / gradients.norm(dim=1)).clamp(max=1.0)
            each = (weights[:, None] * gradients)[gradients.isfinite().all(1)]
            torch.testing.assert_close(sums[-1], each.sum(0), rtol=1e-5, atol=1e-6)
    assert float((sums[1] - sums[0]).norm()) <= bound


def test_views_that_agree_count_once():
    """Clipped one by one and added, three of them would move a direction by three times the bound."""
    (x, y), bound = tensors(1), 0.05
    parts = Parts(x, y, views=lambda x: [x] * 3)
    walk = parts.walk(rule=Full(parts.rule), bound=bound)
    walk.step(parts.loader)
    assert float(walk.place.norm() / walk._rate * 10) == pytest.approx(bound, rel=1e-5)


@pytest.mark.filterwarnings("ignore:using grad_sample_mode='functorch'")
@pytest.mark.parametrize("make", [_deep, Squared])
def test_curvature_and_losses_are_those_of_records_as_they_are(make):
    """With views or without, the metric, the scale and the losses at two places are the same."""
    found = []
    for views in (None, _views):
        model = make().double()
        bench = Parts(*tensors(6), model=model, views=views).bench
        loader, places = _loader(6), [torch.full((bench.map.dim,), t, dtype=torch.float64) for t in (0.0, 0.1)]
        curved = looks.traces(bench, loader, np.random.default_rng(7))
        sums = looks.factors(bench, loader, np.random.default_rng(7)).factors if looks.blocks(bench) else []
        found.append([torch.from_numpy(curved), *sums, looks.losses(bench, loader, places)])
    assert len(found[0]) == (6 if make is _deep else 2)
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def test_views_are_drawn_afresh_in_every_run():
    """Under a seed that is known; the noise is the same in all runs."""

    def shifted(x):
        return [x, x + torch.randn(())]

    found = []
    for views in (None, _views, shifted, shifted):
        torch.manual_seed(0)
        engine = ExpMQuadEngine(noise_generator=np.random.default_rng(3))
        found.append(_released(_deep(), engine=engine, views=views, epsilon=10.0))
    assert not any(same(*pair) for pair in itertools.combinations(found, 2))


@pytest.mark.parametrize("name", ODD)
def test_the_loss_is_shifted_by_at_most_mu(name, monkeypatch):
    monkeypatch.setattr(Questions, "quantile", lambda *_: 0.3)
    sums = []
    for data in neighbours(name):
        parts = Parts(*data)
        parts.rounds.losses(parts.bench, parts.rule, None)
        ((mu, answer),) = parts.asked["loss"]
        sums.append(answer)
    moved = float((sums[1] - sums[0]).norm()) / (0.6 / parts.rule.loss_mu)
    assert moved <= mu * (1 + 1e-12)
    assert name != "far" or moved > 0.99 * mu


@pytest.mark.parametrize("name", ODD)
def test_the_choice_and_the_quantiles_have_their_ranges(name, monkeypatch):
    """By enumeration of what can be chosen: the changes of all log probabilities lie in an interval of length ε_range."""
    logits = {"choice": [], "quantile": []}

    def choose(self, found):
        logits["quantile" if len(found) == len(GRID) else "choice"].append(found)
        return 0

    monkeypatch.setattr(Noise, "choose", choose)
    for data in neighbours(name):
        parts = Parts(*data)
        mean = torch.linspace(-1, 1, parts.bench.map.dim, dtype=torch.float64)
        parts.walk(mean).module()
        norms = looks.gradient_norms(parts.bench, parts.loader)
        parts.questions.quantile("bound", norms, 0.75, curves.bounded_range_within(parts.rule.bound_mu), UNITS)
    for kind, mu in (("choice", parts.rule.choice_mu), ("quantile", parts.rule.bound_mu)):
        one, other = logits[kind]
        law = [v - np.logaddexp.reduce(v) for v in (one, other)]
        assert np.isfinite(law).all()
        assert np.ptp(law[1] - law[0]) <= curves.bounded_range_within(mu) * (1 + 1e-9)


def _two_parts(values, epsilon_range, noise, rate, *, read_off=False):
    """The joint density of a bound and of a direction in one dimension: (bound, direction) on fixed grids."""
    values = np.asarray(values)
    scores = epsilon_range * quantile_scores(grid_counts(np.abs(values)), 0.75) / score_width(0.75, "add_remove")
    logits = scores + 3 * UNITS
    if read_off:
        logits = np.where(np.arange(len(GRID)) == np.searchsorted(GRID, np.abs(values).max()), 0.0, -80.0)
    law = np.exp(logits - np.logaddexp.reduce(logits))
    y = np.linspace(-1, 1, 801)
    found = np.zeros((len(GRID), len(y)))
    for j in np.flatnonzero(law > 1e-12):
        bound = 0.5 * GRID[j]
        places = y * bound * (10 * noise + 5)
        for taken in itertools.product([False, True], repeat=len(values)):
            g = torch.from_numpy(values[list(taken)])[:, None]
            total = ClippedAdder(bound * learned._MARGIN, 0.0)
            total.add(RecordQuadratics(g, None, g.norm(dim=1), torch.zeros(len(g)), parallel=True))
            weight = rate ** sum(taken) * (1 - rate) ** (len(values) - sum(taken))
            mean = float(total.result().gradient[0]) if sum(taken) else 0.0
            found[j] += law[j] * weight * stats.norm.pdf(places, mean, bound * noise) * (places[1] - places[0])
    return found


def _delta(p, q, epsilon):
    return max(np.maximum(p - math.exp(epsilon) * q, 0).sum(), np.maximum(q - math.exp(epsilon) * p, 0).sum())


VALUES, MORE = [0.2, -0.5, 1.0], 6.0
TWO = {"epsilon_range": 0.5, "noise": 1.0, "rate": 0.5}


def _claim(epsilon):
    """The least δ on a grid at which the ledger claims this ε."""
    events, steps = [PlannedEvent(TWO["epsilon_range"])], [(TWO["noise"], TWO["rate"], 1)]
    for delta in np.logspace(-6, -0.3, 40):
        if exact_total(events, steps, delta).epsilon <= epsilon:
            return delta
    return 1.0


@pytest.mark.parametrize(
    "epsilon", [pytest.param(0.3, marks=pytest.mark.slow), 0.8, pytest.param(1.3, marks=pytest.mark.slow)]
)
def test_a_bound_and_then_a_direction_by_quadrature(epsilon):
    """Adaptive composition: the direction is clipped by the bound that was chosen before."""
    laws = [_two_parts(v, **TWO) for v in (VALUES, [*VALUES, MORE])]
    found = _delta(*laws, epsilon)
    assert 0 < found <= _claim(epsilon)


@pytest.mark.slow
def test_defects_of_the_two_parts_would_be_noticed():
    """Half of the noise, or a bound that is read off the data."""
    for change in ({"noise": 0.5}, {"read_off": True}):
        laws = [_two_parts(v, **(TWO | change)) for v in (VALUES, [*VALUES, MORE])]
        assert _delta(*laws, 1.3) > _claim(1.3), change


# --- from outside ----------------------------------------------------------------------------------------------------


def _found_from_outside(monkeypatch, steps, noise):
    """A canary beside records without effect: rounds of so many steps, with a part of their noise."""
    monkeypatch.setattr(
        hooks, "check_mixing", lambda *_, **__: None
    )  # takes most of the time; the model is a single layer
    monkeypatch.setattr(Rule, "steps", property(lambda _: steps))
    monkeypatch.setattr(learned, "_LOST", 0.0)  # so that what is drawn is given
    right = Walk.advance

    def advance(self, total):
        full = self._random
        self._random = SimpleNamespace(standard_normal=lambda shape: noise * full.standard_normal(shape))
        right(self, total)
        self._random = full

    monkeypatch.setattr(Walk, "advance", advance)
    model = nn.Linear(1, 1, bias=False).double()
    nn.init.zeros_(model.weight)
    silent, one = torch.zeros(3, 1, dtype=torch.float64), torch.ones(1, 1, dtype=torch.float64)
    without = DataLoader(TensorDataset(silent, silent), batch_size=16)
    with_it = DataLoader(TensorDataset(torch.cat([silent, one]), torch.cat([silent, 50 * one])), batch_size=16)
    arguments = {"epsilon": 0.5, "delta": 1e-3, "criterion": nn.MSELoss(), "nominal_size": 3}
    arguments["noise_generator"] = np.random.default_rng(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        report = audit.black_box(model, without, with_it, arguments, lambda m: float(flat(m)[0]), releases=160)
    return report.findings[0]


@pytest.mark.slow
@pytest.mark.parametrize("steps", [2, 3])
def test_a_black_box_finds_no_more_than_is_claimed(steps, monkeypatch):
    finding = _found_from_outside(monkeypatch, steps, 1.0)
    assert finding.holds
    assert 0.45 < finding.claimed <= 0.5


@pytest.mark.slow
@pytest.mark.parametrize("steps", [2, 3])
def test_a_black_box_notices_too_little_noise(steps, monkeypatch):
    finding = _found_from_outside(monkeypatch, steps, 0.01)
    assert finding.found > 1.2 * finding.claimed
