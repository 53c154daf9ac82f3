"""Losses of single records against torch's own, and their curvature and norms against dense Jacobians."""

import math

import numpy as np
import pytest
import torch
from reference import error, gradient_and_hessian, output_and_jacobian
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from opacus_expm import GradSampling
from opacus_expm.gathering import looks
from opacus_expm.gathering.measurement import Measurement
from opacus_expm.gathering.passes import Workbench
from opacus_expm.gathering.samples import sampled
from opacus_expm.subspaces.sparse import Sparse

COUNT, M = 11, 3
WEIGHT = torch.tensor([0.5, 2.0, 1.0], dtype=torch.float64)


def _model(outputs=M):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, outputs)).double()


def _inputs(*shape):
    return torch.randn(COUNT, *shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def _loader(x, y, **options):
    return DataLoader(TensorDataset(x, y), batch_size=4, **options)


def _bench(model, criterion, mode=None):
    sampling = GradSampling(mode)
    return Workbench(model, Measurement(Sparse(seed=0), None, criterion, grad_sampling=sampling, progress=False))


CLASSES = torch.randint(M, (COUNT,), generator=torch.Generator().manual_seed(2))
SOME = CLASSES.masked_fill(torch.arange(COUNT) % 4 == 0, 1)
NUMBERS = torch.randn(COUNT, M, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
LABELS = (NUMBERS > 0).double()


def _huber(outputs, targets):
    return nn.functional.huber_loss(outputs, targets)


CASES = {
    "mse": (nn.MSELoss(), NUMBERS),
    "mse, summed": (nn.MSELoss(reduction="sum"), NUMBERS),
    "ce": (nn.CrossEntropyLoss(), CLASSES),
    "ce, weights": (nn.CrossEntropyLoss(weight=WEIGHT, reduction="sum"), CLASSES),
    "ce, smoothing": (nn.CrossEntropyLoss(label_smoothing=0.2), CLASSES),
    "ce, all": (nn.CrossEntropyLoss(weight=WEIGHT, label_smoothing=0.2, ignore_index=1, reduction="sum"), SOME),
    "ce, probabilities": (nn.CrossEntropyLoss(), NUMBERS.softmax(1)),
    "bce": (nn.BCEWithLogitsLoss(), LABELS),
    "bce, weights": (nn.BCEWithLogitsLoss(weight=WEIGHT, pos_weight=2 * WEIGHT), LABELS),
    "bce, summed": (nn.BCEWithLogitsLoss(pos_weight=WEIGHT, reduction="sum"), LABELS),
    "autodiff": (_huber, NUMBERS),
    "autodiff module": (nn.SmoothL1Loss(beta=0.5), NUMBERS),
}


@pytest.mark.parametrize("name", CASES)
def test_losses_are_those_of_torch(name):
    criterion, targets = CASES[name]
    model, x = _model(), _inputs(4)
    found = looks.losses_here(_bench(model, criterion), _loader(x, targets))
    expected = torch.stack([criterion(model(x[i : i + 1]), targets[i : i + 1]) for i in range(COUNT)]).detach()
    assert error(found, expected) < 1e-9
    assert error(found, expected.roll(1)) > 1e-3  # each record has its own


def test_losses_of_sequences_are_means_over_counted_positions():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Linear(4, M).double()
    x = _inputs(6, 4)
    y = torch.randint(M, (COUNT, 6), generator=torch.Generator().manual_seed(4))
    y[0], y[1, 2:] = -100, -100
    criterion = nn.CrossEntropyLoss()
    found = looks.losses_here(_bench(model, criterion), _loader(x, y))
    expected = torch.stack([criterion(model(x[i]), y[i]) for i in range(COUNT)]).detach().nan_to_num(0.0)
    assert error(found, expected) < 1e-9


def test_losses_at_several_places():
    model, x = _model(), _inputs(4)
    bench = _bench(model, nn.MSELoss())
    places = [scale * torch.ones(bench.map.dim, dtype=torch.float64) for scale in (0.0, 0.3, -0.2)]
    found = looks.losses(bench, _loader(x, NUMBERS), places)
    for column, place in zip(found.T, places, strict=True):
        there = bench.module_at(place)
        expected = (there(x) - NUMBERS).square().mean(1).detach()
        assert error(column, expected) < 1e-9


def test_a_row_is_of_one_record_also_where_the_loader_shuffles():
    """The gain of a record is clipped by itself; rows of several records would let one move two of them."""
    torch.manual_seed(0)
    bench = _bench(_model(), nn.MSELoss())
    start = torch.zeros(bench.map.dim, dtype=torch.float64)
    found = looks.losses(bench, _loader(_inputs(4), NUMBERS, shuffle=True), [start, start])
    assert torch.equal(found[:, 0], found[:, 1])
    assert len(found[:, 0].unique()) == COUNT
    apart = [looks.losses_here(bench, _loader(_inputs(4), NUMBERS, shuffle=True)) for _ in range(2)]
    assert not torch.equal(*apart)


def test_a_record_that_is_not_finite_or_refused_has_no_finite_loss():
    x, y = _inputs(4), CLASSES.clone()
    x[3], y[5] = math.nan, 77

    def strict(outputs, targets):  # an exception would reveal the record
        return nn.functional.nll_loss(outputs.log_softmax(1), targets)

    with pytest.raises(IndexError):
        strict(NUMBERS[5:6], y[5:6])
    found = looks.losses_here(_bench(_model(), strict), _loader(x, y))
    assert found.isfinite().tolist() == [i not in (3, 5) for i in range(COUNT)]


# --- errors ----------------------------------------------------------------------------------------------------------


def test_errors():
    model, x = _model(), _inputs(4)
    expected = (model(x).argmax(1) != CLASSES).double()
    assert 0 < expected.sum() < COUNT
    for targets in (CLASSES, torch.nn.functional.one_hot(CLASSES, M).double()):
        assert torch.equal(looks.errors(_bench(model, nn.MSELoss()), _loader(x, targets)), expected)


@pytest.mark.parametrize("column", [True, False])
def test_errors_of_a_single_output(column):
    model, x = _model(1), _inputs(4)
    targets = LABELS[:, :1] if column else LABELS[:, 0]
    expected = ((model(x)[:, 0] > 0) != (LABELS[:, 0] > 0.5)).double()
    assert torch.equal(looks.errors(_bench(model, nn.MSELoss()), _loader(x, targets)), expected)


@pytest.mark.parametrize("targets", [CLASSES[:, None], torch.zeros(COUNT, 2)])
def test_errors_of_other_shapes_are_refused(targets):
    """A column of classes would be compared with every record of the batch."""
    with pytest.raises(ValueError, match="need classes of shape"):
        looks.errors(_bench(_model(), nn.MSELoss()), _loader(_inputs(4), targets))


# --- curvature and norms ---------------------------------------------------------------------------------------------


def _rows(model, x):
    return [output_and_jacobian(model, x[i : i + 1])[1] for i in range(len(x))]


@pytest.mark.parametrize("mode", ["hooks", "functorch"])
def test_traces_are_squares_along_random_cotangents(mode):
    """With mean squared error MMᵀ = 2/m·I, so that |JᵀMz|² = 2/m·|Jᵀz|², whose mean is the trace of the curvature."""
    model, x = _model(), _inputs(4)
    x[4] = math.inf
    found = looks.traces(_bench(model, nn.MSELoss(), mode), _loader(x, NUMBERS), np.random.default_rng(3))
    z = torch.from_numpy(np.random.default_rng(3).standard_normal((COUNT, M)))
    expected = [2 / M * float((v @ j).square().sum()) for v, j in zip(z, _rows(model, x), strict=True)]
    assert found == pytest.approx(np.nan_to_num(expected), rel=1e-9)
    assert found[4] == 0.0


def test_gradient_norms():
    model, x = _model(), _inputs(4)
    x[4] = math.inf
    bench = _bench(model, nn.MSELoss())
    found = looks.gradient_norms(bench, _loader(x, NUMBERS))
    pulls = [
        gradient_and_hessian(nn.MSELoss(), model(v[None])[0].detach(), y)[0] for v, y in zip(x, NUMBERS, strict=True)
    ]
    expected = torch.stack([g @ j for g, j in zip(pulls, _rows(model, x), strict=True)]).norm(dim=1)
    assert found == pytest.approx(expected.nan_to_num(0.0).numpy(), rel=1e-9)
    assert found[4] == 0.0


@pytest.mark.parametrize(
    ("model", "criterion", "targets", "message"),
    [
        (_model(), nn.CrossEntropyLoss(), NUMBERS[:, :2], "target has shape"),
        (_model(), nn.MSELoss(), CLASSES.double(), "target has shape"),
        (_model(1), nn.CrossEntropyLoss(), CLASSES * 0, "cross-entropy needs at least 2 outputs"),
        (_model(), nn.CrossEntropyLoss(weight=torch.ones(5)), CLASSES, "criterion weight has shape"),
    ],
)
def test_what_cannot_be_right_is_said_before_anything_else(model, criterion, targets, message):
    with pytest.raises(ValueError, match=message):
        looks.prepare(_bench(model, criterion), _loader(_inputs(4), targets))


# --- samples ---------------------------------------------------------------------------------------------------------


def test_a_poisson_sample_takes_each_record_by_itself():
    """Sizes are binomial, and two records come together as often as independent ones do."""
    loader, random = _loader(torch.arange(float(COUNT))[:, None], NUMBERS, shuffle=True), np.random.default_rng(0)
    taken = np.zeros((3000, COUNT))
    for row in taken:
        part = sampled(loader, 0.3, random)
        if part is not None:
            names = torch.cat([x for x, _ in part]).flatten().long().numpy()
            assert len(set(names)) == len(names)
            row[names] = 1
    assert np.abs(taken.mean(0) - 0.3).max() < 0.04
    assert np.abs(np.cov(taken.T) - 0.21 * np.eye(COUNT)).max() < 0.03
    assert taken.sum(1).var() == pytest.approx(COUNT * 0.21, rel=0.15)  # a sample of fixed size would have 0


def test_a_full_sample_has_every_record_and_an_empty_one_is_none():
    loader = _loader(_inputs(4), NUMBERS)
    assert len(sampled(loader, 1.0, np.random.default_rng(0)).dataset) == COUNT
    assert sampled(loader, 1e-9, np.random.default_rng(0)) is None
