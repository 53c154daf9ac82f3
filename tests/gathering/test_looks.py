"""Losses of single records against torch's own, and quadratics in a span against dense Jacobians."""

import copy
import math
from typing import ClassVar

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


# --- quadratics in a span --------------------------------------------------------------------------------------------


def _expected(model, criterion, x, y, a):
    gradients, curvatures = [], []
    for i in range(len(x)):
        f, jacobian = output_and_jacobian(model, x[i : i + 1])
        gradient, hessian = gradient_and_hessian(criterion, f, y[i])
        j = jacobian @ a
        gradients.append(j.T @ gradient)
        curvatures.append(j.T @ hessian @ j)
    return torch.stack(gradients), torch.stack(curvatures)


SPANS = (
    {k: CASES[k] for k in ("mse", "ce", "bce, weights", "autodiff")}
    | {
        "two classes": (nn.CrossEntropyLoss(), CLASSES % 2),  # of which one combination of the outputs says all
        "one number": (nn.MSELoss(), NUMBERS[:, :1]),
    }
)


@pytest.mark.parametrize("mode", [None, "functorch"])
@pytest.mark.parametrize("name", SPANS)
def test_quadratics_in_a_span(name, mode):
    criterion, targets = SPANS[name]
    model, x = _model({"two classes": 2, "one number": 1}.get(name, M)), _inputs(4)
    bench = _bench(model, criterion, mode)
    generator = torch.Generator().manual_seed(5)
    place, a = (torch.randn(bench.map.dim, s, generator=generator, dtype=torch.float64) / 5 for s in (1, 2))
    found = looks.span_quadratics(bench, _loader(x, targets), place[:, 0], a)
    wide = copy.deepcopy(criterion).double() if isinstance(criterion, nn.Module) else criterion
    gradients, curvatures = _expected(bench.module_at(place[:, 0]), wide, x, targets, a)
    assert error(found.gradients, gradients) < 1e-8
    assert error(found.curvatures, curvatures) < 1e-8
    elsewhere, _ = _expected(model, wide, x, targets, a)
    assert error(found.gradients, elsewhere) > 1e-3


class _Cube(torch.autograd.Function):
    """An operation without forward mode."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, gradient):
        return 3 * ctx.saved_tensors[0] ** 2 * gradient


class _Cubes(nn.Module):
    def forward(self, x):
        return _Cube.apply(x)


def test_an_operation_without_forward_mode():
    model = nn.Sequential(*_model()[:2], _Cubes(), _model()[2])
    plain = nn.Sequential(*_model()[:2], nn.Identity(), _model()[2])
    plain[2].forward = lambda x: x**3
    bench = _bench(model, nn.MSELoss(), "hooks")
    a = torch.randn(bench.map.dim, 1, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    start = torch.zeros(bench.map.dim, dtype=torch.float64)
    found = looks.span_quadratics(bench, _loader(_inputs(4), NUMBERS), start, a)
    gradients, curvatures = _expected(plain, nn.MSELoss(), _inputs(4), NUMBERS, a)
    assert error(found.gradients, gradients) < 1e-8
    assert error(found.curvatures, curvatures) < 1e-8


class _Single(torch.autograd.Function):
    """x³ with a forward mode for one direction at a time."""

    @staticmethod
    def forward(x):
        return x**3

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx, gradient):
        return 3 * ctx.saved_tensors[0] ** 2 * gradient

    @staticmethod
    def jvp(ctx, tangent):
        return 3 * ctx.saved_tensors[0] ** 2 * tangent


class _Singles(nn.Module):
    calls: ClassVar[list[int]] = []

    def forward(self, x):
        self.calls.append(len(x))
        return _Single.apply(x)


@pytest.mark.parametrize(("layer", "calls"), [(_Singles(), 4), (nn.Identity(), None)])
def test_directions_together_are_those_one_by_one(layer, calls):
    model = nn.Sequential(*_model()[:2], layer, _model()[2])
    bench, loader = _bench(model, nn.MSELoss(), "hooks"), DataLoader(TensorDataset(_inputs(4), NUMBERS), batch_size=16)
    a = torch.randn(bench.map.dim, 3, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    start = torch.zeros(bench.map.dim, dtype=torch.float64)
    looks.prepare(bench, loader)
    _Singles.calls.clear()
    together = looks.span_quadratics(bench, loader, start, a).gradients
    assert calls in (None, len(_Singles.calls))  # all at once, which failed, then one after the other
    apart = [looks.span_quadratics(bench, loader, start, a[:, i : i + 1]).gradients for i in range(3)]
    assert error(together, torch.cat(apart, dim=1)) < 1e-12


@pytest.mark.parametrize("outputs", [M, 1])
def test_a_record_that_is_not_finite_has_zeros_in_both(outputs):
    x, y = _inputs(4), NUMBERS[:, :outputs].clone()
    x[2], y[6] = 1e300, math.nan
    bench = _bench(_model(outputs), nn.MSELoss())
    a = torch.ones(bench.map.dim, 1, dtype=torch.float64)
    found = looks.span_quadratics(bench, _loader(x, y), torch.zeros(bench.map.dim, dtype=torch.float64), a)
    gone = torch.tensor([6])
    assert float(found.gradients[gone].abs().sum() + found.curvatures[gone].abs().sum()) == 0.0
    assert found.gradients.isfinite().all()
    assert found.curvatures.isfinite().all()
    assert float(found.curvatures[0]) > 0


def test_gradient_norms():
    model, x = _model(), _inputs(4)
    x[4] = math.inf
    bench = _bench(model, nn.MSELoss())
    found = looks.gradient_norms(bench, _loader(x, NUMBERS))
    gradients, _ = _expected(model, nn.MSELoss(), x, NUMBERS, torch.eye(bench.map.dim, dtype=torch.float64))
    assert found == pytest.approx(gradients.norm(dim=1).nan_to_num(0.0).numpy(), rel=1e-9)
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


def test_private_values_are_not_shown():
    bench = _bench(_model(), nn.MSELoss())
    start = torch.zeros(bench.map.dim, dtype=torch.float64)
    found = looks.span_quadratics(bench, _loader(_inputs(4), NUMBERS), start, start[:, None] + 1)
    assert "tensor" not in repr(found)
    with pytest.raises(TypeError, match="holds private data"):
        found.__reduce__()


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
