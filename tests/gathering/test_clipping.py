"""The privacy property of the clipped sums: one record, whatever it holds, moves them by one record's worth."""

import itertools
import math
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import quick
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import CPU, random_map, sums_of
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from opacus_expm.gathering import clipping, loaders
from opacus_expm.gathering.clipping import RecordQuadratics
from opacus_expm.gathering.criteria import BinaryCrossEntropy, CrossEntropy, MeanSquaredError
from opacus_expm.gathering.functional import FunctionalRows
from opacus_expm.gathering.hooks import hooks_for
from opacus_expm.gathering.model import working_copy
from opacus_expm.subspaces.layout import Layout
from opacus_expm.subspaces.stiefel import Columns

FEATURES = 4
C_G, C_H = 0.3, 0.2

# How far the change of G and S may exceed the bounds, and how negative the change of S may be, relative to them.
# float32 kernels round a record differently when the batch around it changes; clipping and adding are in float64.
SLACK = 1e-6
SEMIDEFINITE = {torch.float64: 1e-10, torch.float32: 2e-6}


# --- Models, data and one pass ---------------------------------------------------------------------------------------


def _network(outputs, activation):
    return nn.Sequential(nn.Linear(FEATURES, 6), activation, nn.Linear(6, outputs))


CASES = {
    "linear-mse": (lambda: nn.Linear(FEATURES, 2), MeanSquaredError(), 2),
    "mlp-ce": (lambda: _network(3, nn.Tanh()), CrossEntropy(), 3),
    "mlp-bce": (lambda: _network(1, nn.ReLU()), BinaryCrossEntropy(), 1),
}


@cache
def rows_of(case, dtype, mode="hooks", dim=5, orthonormal=False):
    """A gatherer for one of the models; by default its projection is stretched, because privacy must not need A's."""
    torch.manual_seed(11)
    module = working_copy(CASES[case][0]().to(dtype))
    layout = Layout.of(module)
    projection = random_map("stiefel", layout.size, dim, 3, dtype)
    if not orthonormal:
        projection = Columns(projection.matrix * torch.linspace(0.5, 4.0, dim, dtype=dtype), 3)
    if mode == "functorch":
        return FunctionalRows(module, layout, projection)
    return hooks_for(module, layout, projection, torch.zeros(1, FEATURES, dtype=dtype))


def make_data(case, dtype, n, seed, scale=1.0):
    """Ordinary inputs and targets."""
    generator = torch.Generator().manual_seed(seed)
    outputs = CASES[case][2]
    x = scale * torch.randn(n, FEATURES, generator=generator, dtype=torch.float64)
    if case == "mlp-ce":
        y = torch.randint(outputs, (n,), generator=generator)
    elif case == "mlp-bce":
        y = torch.randint(2, (n, 1), generator=generator).to(dtype)
    else:
        y = torch.randn(n, outputs, generator=generator, dtype=torch.float64).to(dtype)
    return x.to(dtype), y


def one_pass(source, criterion, x, y, *, batch_size=4, physical=None, max_grad_norm=C_G, max_curvature=C_H):
    """Clipped sums over a loader, through the same batching as the engine's."""
    stream = loaders.batches(
        DataLoader(TensorDataset(x, y), batch_size=batch_size),
        device=CPU,
        dtype=x.dtype,
        max_physical_batch_size=physical,
        progress=False,
    )
    return sums_of(
        source,
        criterion,
        stream,
        max_grad_norm=max_grad_norm,
        max_curvature=max_curvature,
    )


def check_one_record(larger, smaller, dtype, max_grad_norm=C_G, max_curvature=C_H):
    """The property the guarantee rests on, for sums with and without one record."""
    change_g = (larger.gradient - smaller.gradient).numpy()
    change_s = (larger.curvature - smaller.curvature).numpy()
    assert np.linalg.norm(change_g) <= max_grad_norm * (1 + SLACK), "G moves too far"
    values = np.linalg.eigvalsh((change_s + change_s.T) / 2)
    scale = max(max_curvature, float(np.linalg.norm(larger.curvature.numpy(), 2)))
    assert values[-1] <= max_curvature * (1 + SLACK), "S moves too far"
    assert values[0] >= -SEMIDEFINITE[dtype] * scale, "S does not grow with a record"
    np.testing.assert_allclose(change_s, change_s.T, atol=1e-12 * scale)


def check_neighbours(source, criterion, x, y, position, dtype, **options):
    """Compare the sums of all records with those of all but one."""
    kept = torch.arange(len(x)) != position
    larger = one_pass(source, criterion, x, y, **options)
    smaller = one_pass(source, criterion, x[kept], y[kept], **options)
    check_one_record(larger, smaller, dtype)


INPUTS = {
    "ordinary": None,
    "zero": 0.0,
    "huge": 1e30,
    "huge-negative": -1e30,
    "nan": math.nan,
    "inf": math.inf,
    "-inf": -math.inf,
    "one-nan": (0.3, math.nan, -1.0, 2.0),
    "one-huge": (0.3, 1e30, -1.0, 2.0),
    "inf-and-minus-inf": (math.inf, -math.inf, 0.0, 1.0),
    "tiny": 1e-30,
}
TARGETS = (None, 0.0, 1e30, -1e30, math.nan, math.inf, -math.inf)
CLASSES = (None, 0, -1, 3, -100, 2**40)


def plant(x, y, position, input_name, target):
    """Put a record of the given kind at a position."""
    x, y = x.clone(), y.clone()
    if INPUTS[input_name] is not None:
        x[position] = torch.tensor(INPUTS[input_name], dtype=x.dtype)
    if target is not None:
        y[position] = target
    return x, y


@st.composite
def neighbours(draw):
    """Sizes, batching, place and content of the record that comes and goes."""
    n = draw(st.integers(2, 24))
    return {
        "n": n,
        "position": draw(st.integers(0, n - 1)),
        "seed": draw(st.integers(0, 2**31)),
        "batch_size": draw(st.sampled_from([1, 2, 3, 5, 8, 32])),
        "physical": draw(st.sampled_from([None, 1, 2, 3])),
        "input": draw(st.sampled_from(sorted(INPUTS))),
        "target": draw(st.integers(0, 41)),
        "scale": draw(st.sampled_from([0.1, 1.0, 3.0])),
    }


# --- One record ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "mode"),
    quick.only(
        [(torch.float64, "functorch"), (torch.float32, "hooks")],
        itertools.product([torch.float64, torch.float32], ["hooks", "functorch"]),
    ),
    ids=["float64-hooks", "float64-functorch", "float32-hooks", "float32-functorch"],
)
@pytest.mark.parametrize("case", CASES)
@settings(max_examples=40, deadline=None, derandomize=True)
@given(drawn=neighbours())
def test_one_record_moves_the_sums_by_one_records_worth(case, dtype, mode, drawn):
    x, y = make_data(case, dtype, drawn["n"], drawn["seed"], drawn["scale"])
    contents = CLASSES if case == "mlp-ce" else TARGETS
    x, y = plant(x, y, drawn["position"], drawn["input"], contents[drawn["target"] % len(contents)])
    check_neighbours(
        rows_of(case, dtype, mode),
        CASES[case][1],
        x,
        y,
        drawn["position"],
        dtype,
        batch_size=drawn["batch_size"],
        physical=drawn["physical"],
    )


@pytest.mark.parametrize(
    "dtype", quick.only([torch.float32], [torch.float64, torch.float32]), ids=["float64", "float32"]
)
@pytest.mark.parametrize("case", CASES)
def test_every_kind_of_record_next_to_every_other(case, dtype):
    """Every content of one record, in a data set whose other records are just as bad."""
    contents = CLASSES if case == "mlp-ce" else TARGETS
    source, criterion = rows_of(case, dtype), CASES[case][1]
    x, y = make_data(case, dtype, 8, seed=5)
    for position, name in ((1, "huge"), (3, "nan"), (4, "inf")):
        x, y = plant(x, y, position, name, contents[position])
    for name in INPUTS:
        for target in contents:
            for position in (0, 6):
                bad_x, bad_y = plant(x, y, position, name, target)
                check_neighbours(source, criterion, bad_x, bad_y, position, dtype, batch_size=3)


@pytest.mark.parametrize("case", CASES)
def test_a_record_that_needs_clipping_reaches_the_bounds(case):
    """Otherwise the bounds could hold because everything is dropped."""
    dtype = torch.float64
    source, criterion = rows_of(case, dtype), CASES[case][1]
    x, y = make_data(case, dtype, 9, seed=2, scale=2.0)
    larger = one_pass(source, criterion, x, y, max_grad_norm=1e-3, max_curvature=1e-4)
    smaller = one_pass(source, criterion, x[1:], y[1:], max_grad_norm=1e-3, max_curvature=1e-4)
    norm = float(torch.linalg.vector_norm(larger.gradient - smaller.gradient))
    curvature = float(torch.linalg.matrix_norm(larger.curvature - smaller.curvature, 2))
    assert norm == pytest.approx(1e-3, rel=1e-9)
    assert curvature == pytest.approx(1e-4, rel=1e-9)


@pytest.mark.parametrize("case", CASES)
def test_records_within_the_bounds_are_not_changed(case):
    """With bounds that nothing reaches, G and S are the plain sums of autograd's gradients and of JᵀLJ."""
    dtype = torch.float64
    criterion = CASES[case][1]
    x, y = make_data(case, dtype, 7, seed=4)
    torch.manual_seed(11)
    module = CASES[case][0]().to(dtype)
    layout = Layout.of(module)
    matrix = rows_of(case, dtype, "functorch")._projection.matrix
    losses = {"linear-mse": nn.MSELoss(), "mlp-ce": nn.CrossEntropyLoss(), "mlp-bce": nn.BCEWithLogitsLoss()}
    gradient, curvature = torch.zeros(5, dtype=dtype), torch.zeros(5, 5, dtype=dtype)
    for record in range(len(x)):
        output = module(x[record : record + 1])
        loss = losses[case](output, y[record : record + 1])
        full = torch.autograd.grad(loss, list(module.parameters()), retain_graph=True)
        gradient += torch.cat([g.flatten() for g in full]) @ matrix
        rows = [
            torch.cat([g.flatten() for g in torch.autograd.grad(o, list(module.parameters()), retain_graph=True)])
            for o in output[0]
        ]
        target = y[record : record + 1]
        hessian = torch.autograd.functional.hessian(lambda f, t=target: losses[case](f[None], t), output[0].detach())
        jacobian = torch.stack(rows) @ matrix
        curvature += jacobian.T @ hessian @ jacobian
    assert layout.size == matrix.shape[0]
    found = one_pass(rows_of(case, dtype), criterion, x, y, max_grad_norm=1e6, max_curvature=1e6)
    torch.testing.assert_close(found.gradient, gradient, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(found.curvature, curvature, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("where", ["inputs", "targets"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("case", ["linear-mse", "mlp-bce"])
def test_records_that_are_not_finite_contribute_nothing(case, dtype, where):
    x, y = make_data(case, dtype, 5, seed=1)
    (x if where == "inputs" else y)[:] = math.nan
    found = one_pass(rows_of(case, dtype), CASES[case][1], x, y, batch_size=2)
    assert torch.equal(found.gradient, torch.zeros(5, dtype=torch.float64))
    assert torch.equal(found.curvature, torch.zeros(5, 5, dtype=torch.float64))


@pytest.mark.parametrize("target", [-1, 3, -100, 2**40])
def test_records_without_a_class_contribute_nothing(target):
    x, y = make_data("mlp-ce", torch.float64, 5, seed=1)
    y[:] = target
    found = one_pass(rows_of("mlp-ce", torch.float64), CrossEntropy(), x, y, batch_size=2)
    assert torch.equal(found.gradient, torch.zeros(5, dtype=torch.float64))
    assert torch.equal(found.curvature, torch.zeros(5, 5, dtype=torch.float64))


def test_a_record_with_a_finite_gradient_and_infinite_curvature_contributes_nothing():
    """A coordinate that the model ignores: the residual stays small however large the input, J does not."""
    module = nn.Linear(FEATURES, 2).double()
    with torch.no_grad():
        module.weight[:, 0] = 0.0
        module.weight[:, 1:] = 0.5
        module.bias[:] = 0.25
    layout = Layout.of(module)
    projection = random_map("stiefel", layout.size, 5, 3)
    source = FunctionalRows(working_copy(module), layout, projection)
    x, y = make_data("linear-mse", torch.float64, 5, seed=1)
    x[0] = torch.tensor([1e160, 0.0, 0.0, 0.0], dtype=torch.float64)
    y[0] = 0.25 - 1e-8
    alone = one_pass(source, MeanSquaredError(), x[:1], y[:1], max_curvature=0.0)
    assert float(torch.linalg.vector_norm(alone.gradient)) == pytest.approx(C_G, rel=1e-9)
    found = one_pass(source, MeanSquaredError(), x, y)
    without = one_pass(source, MeanSquaredError(), x[1:], y[1:])
    torch.testing.assert_close(found.gradient, without.gradient, rtol=1e-12, atol=1e-15)
    torch.testing.assert_close(found.curvature, without.curvature, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("curvature", [C_H, 0.0])
@pytest.mark.parametrize("case", CASES)
def test_one_bad_record_leaves_the_others_alone(case, curvature):
    dtype = torch.float64
    source, criterion = rows_of(case, dtype), CASES[case][1]
    x, y = make_data(case, dtype, 6, seed=8)
    without = one_pass(source, criterion, x[1:], y[1:], batch_size=6, max_curvature=curvature)
    x[0] = math.nan
    found = one_pass(source, criterion, x, y, batch_size=6, max_curvature=curvature)
    torch.testing.assert_close(found.gradient, without.gradient, rtol=1e-12, atol=1e-15)
    assert float(torch.linalg.vector_norm(found.gradient)) > 0.05
    if curvature:
        torch.testing.assert_close(found.curvature, without.curvature, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("mode", ["hooks", "functorch"])
@pytest.mark.parametrize("case", CASES)
def test_gradient_only_pass_gives_the_same_gradient(case, mode):
    x, y = make_data(case, torch.float64, 13, seed=6)
    source, criterion = rows_of(case, torch.float64, mode), CASES[case][1]
    exact = one_pass(source, criterion, x, y)
    short = one_pass(source, criterion, x, y, max_curvature=0.0)
    assert short.curvature is None
    torch.testing.assert_close(short.gradient, exact.gradient, rtol=1e-12, atol=1e-14)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(drawn=neighbours())
def test_gradient_only_pass_is_clipped_too(drawn):
    x, y = make_data("linear-mse", torch.float64, drawn["n"], drawn["seed"], drawn["scale"])
    x, y = plant(x, y, drawn["position"], drawn["input"], None)
    kept = torch.arange(drawn["n"]) != drawn["position"]
    options = {"batch_size": drawn["batch_size"], "physical": drawn["physical"], "max_curvature": 0.0}
    source = rows_of("linear-mse", torch.float64)
    larger = one_pass(source, MeanSquaredError(), x, y, **options)
    smaller = one_pass(source, MeanSquaredError(), x[kept], y[kept], **options)
    assert float(torch.linalg.vector_norm(larger.gradient - smaller.gradient)) <= C_G * (1 + SLACK)


def test_the_way_batches_are_cut_does_not_matter():
    x, y = make_data("mlp-ce", torch.float64, 17, seed=9)
    source = rows_of("mlp-ce", torch.float64)
    whole = one_pass(source, CrossEntropy(), x, y, batch_size=17)
    for batch_size, physical in ((1, None), (4, None), (17, 5), (6, 4)):
        cut = one_pass(source, CrossEntropy(), x, y, batch_size=batch_size, physical=physical)
        torch.testing.assert_close(cut.gradient, whole.gradient, rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(cut.curvature, whole.curvature, rtol=1e-12, atol=1e-14)


def test_an_empty_pass_is_refused():
    with pytest.raises(ValueError, match="empty"):
        sums_of(rows_of("mlp-ce", torch.float64), CrossEntropy(), [], max_grad_norm=1.0, max_curvature=1.0)


# --- Wrong ways to clip must be noticed ------------------------------------------------------------------------------


def _per_coordinate(records: RecordQuadratics) -> RecordQuadratics:
    g = records.gradients.clamp(-C_G, C_G)
    return replace(records, gradients=g, gradient_norms=torch.zeros(len(g), dtype=g.dtype))


def _mean_eigenvalue(records: RecordQuadratics) -> RecordQuadratics:
    mean = records.factors.square().sum((1, 2)) / records.factors.shape[2]
    return replace(records, curvature_norms=mean)


def _norm_of_the_factor(records: RecordQuadratics) -> RecordQuadratics:
    return replace(records, curvature_norms=records.curvature_norms.sqrt())


def _tied_to_the_batch(records: RecordQuadratics) -> RecordQuadratics:
    """Curvature divided by the number of records in the batch, as batch statistics would."""
    return replace(records, factors=records.factors / len(records.factors) ** 0.5)


WRONG_RECORDS = {
    "per-coordinate gradient clip": _per_coordinate,
    "curvature norm too small": _mean_eigenvalue,
    "norm of the factor instead of the matrix": _norm_of_the_factor,
    "records tied to their batch": _tied_to_the_batch,
}
WRONG_CLIPS = {
    "no clip": lambda norms, bound: torch.ones_like(norms),
    "clip to the batch's mean norm": lambda norms, bound: (bound / norms.mean()).clamp(max=1.0).expand_as(norms),
    "normalise by the square root": lambda norms, bound: (bound / norms).clamp(max=1.0).sqrt(),
}


def _worst_cases(source, dtype=torch.float64):
    """Data on which a wrong clip shows: large records of different sizes."""
    x, y = make_data("linear-mse", dtype, 12, seed=3, scale=2.0)
    x[::3] *= 20
    for position in (0, 5, 11):
        for batch_size in (1, 4, 12):
            check_neighbours(source, MeanSquaredError(), x, y, position, dtype, batch_size=batch_size)


def test_the_right_clip_passes_the_worst_cases():
    _worst_cases(rows_of("linear-mse", torch.float64))


@pytest.mark.parametrize("wrong", WRONG_CLIPS)
def test_a_wrong_clip_is_noticed(wrong, monkeypatch):
    monkeypatch.setattr(clipping, "_clip", WRONG_CLIPS[wrong])
    with pytest.raises(AssertionError, match=r"moves too far|does not grow"):
        _worst_cases(rows_of("linear-mse", torch.float64))


@pytest.mark.parametrize("wrong", WRONG_RECORDS)
def test_wrong_norms_are_noticed(wrong, monkeypatch):
    right = clipping.record_quadratics
    monkeypatch.setattr(clipping, "record_quadratics", lambda *a, **k: WRONG_RECORDS[wrong](right(*a, **k)))
    with pytest.raises(AssertionError, match=r"moves too far|does not grow"):
        _worst_cases(rows_of("linear-mse", torch.float64))


def test_clipping_before_the_projection_is_noticed(monkeypatch):
    """With columns that are not orthonormal, a record clipped in R^p may be long in R^k."""
    right, full = clipping.record_quadratics, FunctionalRows(*_parts_without_projection())

    def unprojected(source, *arguments, **options):
        records = right(source, *arguments, **options)
        whole = right(full, *arguments, **options)
        return replace(records, gradient_norms=whole.gradient_norms, curvature_norms=whole.curvature_norms)

    monkeypatch.setattr(clipping, "record_quadratics", unprojected)
    with pytest.raises(AssertionError, match="moves too far"):
        _worst_cases(rows_of("linear-mse", torch.float64))


def _parts_without_projection():
    torch.manual_seed(11)
    module = working_copy(CASES["linear-mse"][0]().double())
    layout = Layout.of(module)
    return module, layout, random_map("full", layout.size, None)


def test_a_record_that_is_not_masked_is_noticed(monkeypatch):
    right = clipping.record_quadratics

    def unmasked(source, criterion, inputs, targets, **options):
        records = right(source, criterion, inputs, targets, **options)
        bad = ~inputs.isfinite().all(1)
        return replace(records, gradients=torch.where(bad[:, None], math.nan, records.gradients))

    monkeypatch.setattr(clipping, "record_quadratics", unmasked)
    x, y = make_data("linear-mse", torch.float64, 6, seed=3)
    x[2] = math.nan
    with pytest.raises(AssertionError, match="G moves too far"):
        check_neighbours(rows_of("linear-mse", torch.float64), MeanSquaredError(), x, y, 2, torch.float64)


def _records(gradients, factors, *, parallel=False):
    """A batch of records as a pass makes them, from g (B, k) and B (B, q, k)."""
    return clipping._finite_only(torch.as_tensor(gradients), torch.as_tensor(factors), parallel=parallel)
