"""A private choice among released models: exact range, failure probability, refusals, and the ledger."""

import itertools
import math

import numpy as np
import pytest
import torch
from opacus import GradSampleModule
from small_problem import Untouchable, gathered
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from opacus_expm import BudgetExceeded, ExpMQuadEngine, choosing
from opacus_expm.books import Books
from opacus_expm.noise import Noise


def _line(slope):
    model = nn.Linear(1, 1, bias=False).double()
    nn.init.constant_(model.weight, slope)
    return model


CANDIDATES = [_line(0.0), _line(0.5), _line(1.0)]
MSE = {"criterion": nn.MSELoss(), "max_loss": 2.0}


def _loader(x, y, batch_size=4):
    x, y = (torch.tensor(v, dtype=torch.float64).reshape(-1, 1) for v in (x, y))
    return DataLoader(TensorDataset(x, y), batch_size=batch_size)


GOOD = _loader([1.0, 2.0, -1.0], [1.0, 2.0, -1.0])


def _law(monkeypatch, loader, epsilon=1.0, adjacency="add_remove", candidates=None, **options):
    """The log probabilities of the candidates."""
    seen = []
    with monkeypatch.context() as patch:
        patch.setattr(Noise, "choose", lambda _, logits: seen.append(logits) or 0)
        models = CANDIDATES if candidates is None else candidates
        ExpMQuadEngine(adjacency=adjacency).choose(models, loader, epsilon, **(options or MSE))
    return seen[0] - np.logaddexp.reduce(seen[0])


RECORDS = [(1.0, 1.0), (1.0, -50.0), (3.0, 1.5), (0.0, 0.0), (math.inf, 1.0), (1.0, math.nan), (1e200, 1.0)]


@pytest.mark.parametrize("epsilon", [0.1, 2.0])
def test_one_record_more_keeps_the_loss_in_an_interval_of_length_epsilon(monkeypatch, epsilon):
    reached = 0.0
    before = _law(monkeypatch, GOOD, epsilon)
    for x, y in RECORDS:
        loss = _law(monkeypatch, _loader([1.0, 2.0, -1.0, x], [1.0, 2.0, -1.0, y]), epsilon) - before
        assert np.ptp(loss) <= epsilon * (1 + 1e-9)
        reached = max(reached, float(np.ptp(loss)))
    loss = _law(monkeypatch, _loader([1.0, 2.0, -1.0, 9.0], [1.0, 2.0, -1.0, 9.0]), epsilon) - before
    assert np.ptp(loss) == pytest.approx(epsilon)  # reached, so that half of the width would be wrong


def test_replacing_a_record(monkeypatch):
    laws = [
        _law(monkeypatch, _loader([1.0, x], [1.0, y]), 1.0, "replace_one")
        for x, y in [*RECORDS, (9.0, 9.0), (9.0, 0.0)]
    ]
    ranges = [np.ptp(a - b) for a, b in itertools.combinations(laws, 2)]
    assert max(ranges) <= 1 + 1e-9
    assert max(ranges) > 0.99


def test_errors_count_one_or_nothing(monkeypatch):
    x, y = torch.tensor([[1.0], [-1.0], [2.0]]).double(), torch.tensor([1, 1, 1])
    loader = DataLoader(TensorDataset(x, y), batch_size=2)
    law = _law(monkeypatch, loader, candidates=[_line(1.0), _line(-1.0)], criterion="error")
    assert law[0] - law[1] == pytest.approx(1.0)  # one error against two, at ε = 1


@pytest.mark.slow
def test_the_failure_probability_is_that_of_the_closed_form(monkeypatch):
    """Two candidates whose total losses differ by nt: the worse one is chosen with probability 1/(1 + e^{εnt/B})."""
    loader = _loader([1.0] * 6, [1.0] * 6)
    law = _law(monkeypatch, loader, 0.5, candidates=[_line(1.0), _line(0.0)])
    gap = 6 * 1.0 / 2.0
    assert math.exp(law[1]) == pytest.approx(1 / (1 + math.exp(0.5 * gap)))
    three = _law(monkeypatch, loader, 0.5)
    assert np.exp(three[:1]).sum() <= 2 * math.exp(-0.5 * gap)
    random = np.random.default_rng(0)
    engine = ExpMQuadEngine(noise_generator=random)
    models = [_line(1.0), _line(0.0)]
    worse = np.mean([engine.choose(models, loader, 0.5, **MSE) is models[1] for _ in range(300)])
    expected = math.exp(law[1])
    assert abs(worse - expected) < 4 * math.sqrt(expected * (1 - expected) / 300)


def test_the_ledger_and_what_comes_back():
    engine = ExpMQuadEngine()
    assert engine.choose(CANDIDATES, GOOD, 0.5, **MSE) in CANDIDATES
    (entry,) = engine.accountant.releases
    assert (entry.what, entry.epsilon_range, entry.nominal_size) == ("choice", 0.5, 3)
    assert engine.get_epsilon(0.0) == 0.5


def test_charged_before_the_draw(monkeypatch):
    engine = ExpMQuadEngine()

    def failing(*_):
        assert len(engine.accountant.releases) == 1
        raise KeyboardInterrupt

    monkeypatch.setattr(Noise, "choose", failing)
    with pytest.raises(KeyboardInterrupt):
        engine.choose(CANDIDATES, GOOD, 0.5, **MSE)
    assert engine.get_epsilon(0.0) == 0.5


def test_a_budget_refuses_before_any_data_is_touched():
    engine = ExpMQuadEngine(budget=(0.4, 0.0))
    with pytest.raises(BudgetExceeded):
        engine.choose(CANDIDATES, DataLoader(Untouchable(8), batch_size=4), 0.5, **MSE)
    assert engine.accountant.releases == []


def test_secure_mode_and_frozen_candidates():
    frozen = [_line(s).requires_grad_(False) for s in (0.0, 1.0)]
    found = ExpMQuadEngine(secure_mode=True).choose(frozen, GOOD, 50.0, **MSE)
    assert found is frozen[1]
    assert not any(p.requires_grad for m in frozen for p in m.parameters())


def _with(attribute):
    model = _line(1.0)
    setattr(model.weight, attribute, torch.ones_like(model.weight))
    return model


def _with_statistics():
    model = _line(1.0)
    model.kept = gathered()
    return model


def _in_a_loop():
    model = _line(1.0)
    ExpMQuadEngine().make_private_with_epsilon(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), criterion=nn.MSELoss(), data_loader=GOOD,
        target_epsilon=1.0, target_delta=0.0, epochs=1, max_grad_norm=1.0, radius=1.0, proj_dim=None,
    )  # fmt: skip
    return model


REFUSED = [
    (lambda: [_line(0.0)], {}, "two released modules or more, got 1 of them"),
    (lambda: _line(0.0), {}, "got Linear"),
    (lambda: [_line(0.0), gathered()], {}, r"candidates\[1\] must be a released torch.nn.Module, got Statistics"),
    (lambda: [_line(0.0), GradSampleModule(_line(1.0))], {}, "still wrapped by Opacus"),
    (lambda: [_line(0.0), _with("grad")], {}, "carries gradients at 'weight'"),
    (lambda: [_line(0.0), _with("grad_sample")], {}, "carries gradients at 'weight'"),
    (lambda: [_line(0.0), _with("summed_grad")], {}, "carries gradients at 'weight'"),
    (lambda: [_line(0.0), _with_statistics()], {}, "carries statistics of private records"),
    (lambda: [_line(0.0), _in_a_loop()], {}, "training loop that is not finished"),
    (lambda: [_line(0.0), nn.Linear(1, 2).double()], {"criterion": lambda o, t: o.sum()}, "same number of outputs"),
    (lambda: CANDIDATES, {"max_loss": None}, "max_loss must be given"),
    (lambda: CANDIDATES, {"max_loss": 0.0}, "max_loss must be greater than 0"),
    (lambda: CANDIDATES, {"criterion": "error"}, "max_loss has no meaning"),
    (lambda: CANDIDATES, {"criterion": "loss"}, "criterion must be one of"),
    (lambda: CANDIDATES, {"criterion": nn.CrossEntropyLoss(), "max_loss": None}, "at least 2 outputs|target has"),
    (lambda: CANDIDATES, {"epsilon": 0.0}, "epsilon must be greater than 0"),
]


@pytest.mark.parametrize(("candidates", "options", "message"), REFUSED, ids=lambda v: v[:30] if type(v) is str else "")
def test_refused(candidates, options, message):
    engine = ExpMQuadEngine()
    with pytest.raises((TypeError, ValueError), match=message):
        engine.choose(candidates(), GOOD, **({"epsilon": 1.0} | MSE | options))
    assert engine.accountant.releases == []


def test_several_ranks_are_refused():
    class Ranks:
        count = 2

    engine = ExpMQuadEngine()
    books = Books(engine.accountant, "add_remove", engine.noise, Ranks())
    with pytest.raises(ValueError, match="runs in one process"):
        choosing.choose(CANDIDATES, GOOD, 1.0, books, criterion=nn.MSELoss(), max_loss=1.0, nominal_size=None)
