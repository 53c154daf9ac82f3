"""Settings rehearsed on public data."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from opacus_expm import Candidate, ExpMQuadEngine, Preconditioned, suggest
from opacus_expm.mechanism import curves
from opacus_expm.suggestion import default_candidates

NOISE = 1.0  # of the targets
CANDIDATES = [Candidate("stiefel", 3, 1, radius) for radius in (1e-3, 0.5, 50.0)]


def _task(records=400):
    """A regression whose pretrained slope is off by 0.3 where the inputs are noisy."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(records, 4, generator=generator)
    y = x.sum(1, keepdim=True) + NOISE * torch.randn(records, 1, generator=generator)
    model = nn.Linear(4, 1)
    with torch.no_grad():
        model.weight.fill_(1.0)
        model.bias.zero_()
    return model, DataLoader(TensorDataset(x, y), batch_size=64)


def _suggest(**changes):
    model, loader = _task()
    options = {"criterion": nn.MSELoss(), "candidates": CANDIDATES, **changes}
    return suggest(
        model, loader, options.pop("epsilon", 2.0), options.pop("delta", 0.0), options.pop("n", 2000), **options
    )


def test_the_best_of_the_rehearsal_is_chosen():
    """The default shift makes the input's variance five times as large, so that the best slope is one fifth."""
    found = _suggest()
    losses = [loss for _, loss in found.tried]
    assert losses == sorted(losses)
    assert found.candidate == found.tried[0][0] != CANDIDATES[0]
    assert losses[0] < 0.9 * found.zero_shot
    # The variance of the noise, summed over four inputs, and that of the targets.
    assert found.zero_shot == pytest.approx(4 * 4.0 + NOISE**2, rel=0.35)


def test_a_suggestion_is_found_again_whatever_the_global_seed():
    torch.manual_seed(1)
    first = _suggest()
    torch.manual_seed(2)
    second = _suggest()
    assert first.tried == second.tried
    assert str(first) == str(second)
    assert [loss for _, loss in _suggest(seed=1).tried] != [loss for _, loss in first.tried]


def test_the_best_three_are_rehearsed_again_among_themselves(monkeypatch):
    """As if they had been rehearsed so often from the beginning; the others keep their places behind."""
    candidates = [Candidate("stiefel", 3, 1, radius) for radius in (0.3, 0.4, 0.5, 50.0, 100.0)]
    asked = []
    original = ExpMQuadEngine.make_private_expm

    def spy(self, model, loader, epsilon, radius, *arguments, **options):
        asked.append((radius, options["projection"].seed))
        return original(self, model, loader, epsilon, radius, *arguments, **options)

    monkeypatch.setattr(ExpMQuadEngine, "make_private_expm", spy)
    options = {"candidates": candidates, "epsilon": 0.05, "n": 300}
    once = _suggest(repeats=1, **options)
    asked.clear()
    found = _suggest(repeats=1, finals=2, **options)
    best = {c for c, _ in once.tried[:3]}
    assert len(asked) == len(set(asked)) == 5 + 3 * 2
    assert {c for c, _ in found.tried[:3]} == best
    assert found.tried[3:] == once.tried[3:]
    often = dict(_suggest(repeats=3, **options).tried)
    assert dict(found.tried[:3]) == {c: often[c] for c in best} != dict(once.tried[:3])
    assert found.tried[0][1] == min(often[c] for c in best)


def test_more_records_mean_less_noise():
    """With few private records the large ball is drowned in noise; with many it is the quadratic that decides."""
    few = dict(_suggest(n=300, epsilon=0.05).tried)
    many = dict(_suggest(n=3_000_000, epsilon=0.05).tried)
    assert few[CANDIDATES[2]] > 3 * many[CANDIDATES[2]]


@pytest.mark.parametrize("delta", [0.0, 1e-5])
def test_the_rehearsals_budget_has_the_real_runs_noise(monkeypatch, delta):
    """Relative to the sums of n₀ records, the noise is that of n: ε, or μ, is larger by n/n₀."""
    asked = []
    original = ExpMQuadEngine.make_private_expm

    def spy(self, model, loader, epsilon, *arguments, **options):
        asked.append((epsilon, options["delta"], len(loader.dataset)))
        return original(self, model, loader, epsilon, *arguments, **options)

    monkeypatch.setattr(ExpMQuadEngine, "make_private_expm", spy)
    _suggest(delta=delta, epsilon=0.5, n=6000, candidates=CANDIDATES[:1], repeats=1)
    [(epsilon, used, records)] = asked
    assert (used, records) == (delta, 300)
    if delta == 0:
        assert epsilon == pytest.approx(20 * 0.5, rel=1e-12)
    else:
        ratio = curves.gaussian_mu(epsilon, delta) / curves.gaussian_mu(0.5, delta)
        assert ratio == pytest.approx(20, rel=1e-6)


def test_arguments_run():
    found = _suggest()
    model, loader = _task()
    engine = ExpMQuadEngine()
    private = engine.make_private_expm(model, loader, 1.0, **found.arguments(), criterion=nn.MSELoss())
    [release] = engine.accountant.releases
    assert release.radius == found.candidate.radius
    assert release.max_grad_norm == found.max_grad_norm
    assert release.regularization == found.regularization
    assert engine.get_epsilon() == 1.0
    assert any(not torch.equal(a, b) for a, b in zip(private.parameters(), model.parameters(), strict=True))


@pytest.mark.parametrize("shifted", [True, False])
def test_bounds_come_from_shifted_records_or_from_those_as_they_are(shifted):
    """The shift makes errors, and so gradients, larger."""
    candidates = [dataclasses.replace(CANDIDATES[1], shifted=shifted)]
    near, far = (_suggest(candidates=candidates, shift=lambda x, by=by: x + by) for by in (0, 10))
    if shifted:
        assert far.max_grad_norm > 10 * near.max_grad_norm
    else:
        assert far.max_grad_norm == near.max_grad_norm
    _, loader = _task()
    records = torch.cat([x for x, _ in loader]) + (10 if shifted else 0)
    assert all((records == row).all(1).any() for x, _ in far.public_loader for row in x)
    assert ("shifted\n" if shifted else "as they are\n") in str(far).splitlines(keepends=True)[1]


def test_the_metric_is_measured_on_the_candidates_public_records():
    candidate = Candidate(
        "preconditioned", None, 1, 0.5, damping_share=0.25, quantile=0.5, public_temperature=math.inf, denoise=True
    )
    found = _suggest(candidates=[candidate], delta=1e-5)
    inputs = torch.cat([x for x, _ in found.public_loader]).double()
    rows = torch.cat(
        [inputs, torch.ones(len(inputs), 1)], 1
    )  # of weight and bias; the loss has the second derivative 2
    largest = 2 * torch.linalg.eigvalsh(rows.T @ rows / len(rows))[-1]
    assert found.projection.damping == pytest.approx(0.25 * float(largest), rel=1e-4)
    model, _ = _task()
    measured = ExpMQuadEngine().public_metric(
        model,
        found.public_loader,
        damping_share=0.25,
        quantile=0.5,
        projection=Preconditioned(temperature=math.inf, denoise=True),
        criterion=nn.MSELoss(),
    )
    assert found.max_grad_norm == pytest.approx(measured["max_grad_norm"])
    arguments = found.arguments()
    assert set(measured) == {"projection", "max_grad_norm", "max_curvature"} <= set(arguments)
    assert (arguments["max_grad_norm"], arguments["max_curvature"]) == (pytest.approx(measured["max_grad_norm"]), 0.0)
    for recipe in (arguments["projection"], measured["projection"]):
        assert (recipe.temperature, recipe.denoise, recipe.needs_public_data) == (math.inf, True, False)
    torch.testing.assert_close(
        arguments["projection"].curvature.eigenvalues, measured["projection"].curvature.eigenvalues
    )
    assert "damping 0.25 of the largest eigenvalue at temperature inf, bound at 0.5 of the norms, denoised" in str(
        found
    )


def test_the_explanation_names_what_was_chosen_and_tried():
    text = str(_suggest())
    assert "rehearsed on shifted public records" in text
    assert text.count("stiefel") == 1 + len(CANDIDATES)
    assert "held-out loss" in text


def test_own_shift_and_held_out_records():
    """A shift of every input by 10 leaves the pretrained model 40 off, apart from noise, on any held-out record."""
    found = _suggest(shift=lambda x: x + 10)
    assert found.zero_shot == pytest.approx(1600, rel=0.01)
    assert all(loss >= 0 and math.isfinite(loss) for _, loss in found.tried)


def test_classes_are_judged_by_errors():
    """Inputs that are turned round are all classified wrongly, however large the loss."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(400, 4, generator=generator)
    model = nn.Linear(4, 2)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[1.0, 0, 0, 0], [-1.0, 0, 0, 0]]))
        model.bias.zero_()
    loader = DataLoader(TensorDataset(x, (x[:, 0] < 0).long()), batch_size=64)
    found = suggest(
        model, loader, 1.0, 0.0, 1000, criterion=nn.CrossEntropyLoss(), candidates=CANDIDATES, shift=lambda x: -x
    )
    assert (found.zero_shot, found.judged_by) == (1.0, "error")
    assert "held-out error in the rehearsal: 1 before" in str(found)
    assert all(0 <= value <= 1 for _, value in found.tried)
    assert _suggest().judged_by == "loss"


def test_default_candidates_fit_the_model():
    for size, delta in ((5, 0.0), (150, 0.0), (10_000, 0.0), (10_000, 1e-5)):
        tried = default_candidates(size, delta)
        assert all(c.proj_dim is None or c.proj_dim <= size for c in tried)
        assert len(set(tried)) == len(tried) >= 3
    assert {c.rounds for c in default_candidates(10_000, 0.0)} == {1}
    assert {c.projection for c in default_candidates(10_000, 1e-5)} == {"preconditioned"}
    for delta in (0.0, 1e-5):  # every one of them can be made
        assert {c.recipe().kind for c in default_candidates(10_000, delta)} <= {"sparse", "preconditioned"}


def test_default_candidates_run_for_a_pure_budget():
    """By public curvature, and in a random subspace."""
    found = _suggest(candidates=None, repeats=1)
    assert {c.projection for c, _ in found.tried} == {"sparse", "preconditioned"}
    model, loader = _task()
    engine = ExpMQuadEngine()
    engine.make_private_expm(model, loader, 1.0, **found.arguments(), criterion=nn.MSELoss())
    assert engine.get_epsilon() == 1.0


def test_an_unknown_projection_is_refused():
    with pytest.raises(ValueError, match="projection must be one of 'sparse', 'stiefel'"):
        _suggest(candidates=[Candidate("public", 3, 1, 0.5)])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"epsilon": 0.0}, "epsilon must be greater than 0"),
        ({"delta": 1.0}, "delta must be in"),
        ({"n": 0}, "n must be a positive integer"),
        ({"repeats": 0}, "repeats must be a positive integer"),
        ({"finals": -1}, "finals must be a non-negative integer, got -1"),
        ({"seed": -1}, "seed must be a non-negative integer"),
        ({"candidates": []}, "candidates must not be empty"),
    ],
)
def test_bad_input(changes, message):
    with pytest.raises(ValueError, match=message):
        _suggest(**changes)


def test_inputs_that_cannot_be_shifted_are_refused():
    dataset = TensorDataset(torch.randint(5, (40, 3)), torch.zeros(40, 1))
    with pytest.raises(ValueError, match="one floating tensor"):
        suggest(nn.Linear(3, 1), DataLoader(dataset, batch_size=8), 1.0, 0.0, 100, criterion=nn.MSELoss())
    few = TensorDataset(torch.randn(5, 3), torch.zeros(5, 1))
    with pytest.raises(ValueError, match="at least 8 records"):
        suggest(nn.Linear(3, 1), DataLoader(few, batch_size=8), 1.0, 0.0, 100, criterion=nn.MSELoss())


def test_nothing_private_is_needed_or_charged():
    """Twice as many repeats change the average, not any ledger of the caller."""
    engine = ExpMQuadEngine()
    assert np.isfinite([loss for _, loss in _suggest(repeats=1).tried]).all()
    assert len(engine.accountant) == 0
