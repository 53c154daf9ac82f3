"""The privacy property of the clipped sums: one record, whatever it holds, moves them by one record's worth."""

import copy
import io
import math
import pickle
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from opacus_expm.gathering import clipping, loaders
from opacus_expm.gathering.clipping import (
    ClippedAdder,
    ClippedSums,
    RecordQuadratics,
    Sensitivity,
    clipped_sums,
    utility_width,
)
from opacus_expm.gathering.criteria import BinaryCrossEntropy, CrossEntropy, MeanSquaredError, make_criterion
from opacus_expm.gathering.functional import FunctionalRows
from opacus_expm.gathering.hooks import hooks_for
from opacus_expm.gathering.model import Layout, working_copy
from opacus_expm.subspaces.projection import Stiefel, make_projection

CPU = torch.device("cpu")
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
    projection = make_projection("stiefel", layout.size, dim, 3, device=CPU, dtype=dtype)
    if not orthonormal:
        projection = Stiefel(projection.matrix * torch.linspace(0.5, 4.0, dim, dtype=dtype), 3)
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


def one_pass(
    source, criterion, x, y, *, batch_size=4, physical=None, max_grad_norm=C_G, max_curvature=C_H, joint_radius=None
):
    """Clipped sums over a loader, through the same batching as the engine's."""
    stream = loaders.batches(
        DataLoader(TensorDataset(x, y), batch_size=batch_size),
        device=CPU,
        dtype=x.dtype,
        max_physical_batch_size=physical,
        progress=False,
    )
    return clipped_sums(
        source,
        criterion,
        stream,
        max_grad_norm=max_grad_norm,
        max_curvature=max_curvature,
        joint_radius=joint_radius,
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


@pytest.mark.parametrize("mode", ["hooks", "functorch"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
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


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
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
    projection = make_projection("stiefel", layout.size, 5, 3, device=CPU, dtype=torch.float64)
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
        clipped_sums(rows_of("mlp-ce", torch.float64), CrossEntropy(), [], max_grad_norm=1.0, max_curvature=1.0)


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
    return module, layout, make_projection("stiefel", layout.size, None, 0, device=CPU, dtype=torch.float64)


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


# --- Sensitivity -----------------------------------------------------------------------------------------------------

R, G = 0.7, 1.3
GENERAL = {0.3: 1.83993, 1.0: 2.00367, 2.0: 2.36425, 5.0: 3.64162}
PARALLEL = {0.3: 1.82, 1.0: 1.82, 2.0: 2.0475, 5.0: 3.276}


def sensitivity(ratio, *, parallel=False, adjacency="add_remove"):
    """Bounds with R·C_H/C_g equal to ``ratio``."""
    return Sensitivity(G, ratio * G / R, parallel, adjacency)


@pytest.mark.parametrize("ratio", GENERAL)
def test_width_in_closed_form(ratio):
    assert sensitivity(ratio).width(R) == pytest.approx(GENERAL[ratio], abs=5.1e-6)
    assert sensitivity(ratio, parallel=True).width(R) == pytest.approx(PARALLEL[ratio], abs=1e-12)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    radius=st.floats(1e-3, 1e3),
    max_grad_norm=st.floats(1e-3, 1e3),
    max_curvature=st.floats(0, 1e3),
)
def test_widths_are_in_order(radius, max_grad_norm, max_curvature):
    """2RC_g ≤ W₁ ≤ W* ≤ 2RC_g + ½R²C_H."""
    floor = 2 * radius * max_grad_norm
    ceiling = floor + 0.5 * radius**2 * max_curvature
    narrow, wide = (Sensitivity(max_grad_norm, max_curvature, p, "add_remove").width(radius) for p in (True, False))
    assert floor * (1 - 1e-12) <= narrow <= wide * (1 + 1e-12)
    assert wide <= ceiling * (1 + 1e-12)


def test_width_without_curvature_is_that_of_the_gradient():
    for parallel in (True, False):
        assert Sensitivity(G, 0.0, parallel, "add_remove").width(R) == pytest.approx(2 * R * G, rel=1e-15)


def _unit(v):
    return v / max(np.linalg.norm(v), 1e-12)


def _inside(v, radius):
    return radius * v / max(1.0, np.linalg.norm(v))


def _gain_general(v, k, max_curvature):
    """u(ξ) − u(η) for g, H, ξ, η read off a vector of free numbers, all within the bounds."""
    g = _inside(v[:k], G)
    factor = v[k : k + k * k].reshape(k, k)
    h = factor @ factor.T
    h = h * max_curvature / max(np.linalg.norm(h, 2), 1.0)
    xi, eta = _inside(v[-2 * k : -k], R), _inside(v[-k:], R)
    return (-xi @ g - 0.5 * xi @ h @ xi) - (-eta @ g - 0.5 * eta @ h @ eta)


def _gain_parallel(v, k, max_curvature):
    """The same where g is parallel to the only row of B."""
    direction = _unit(v[:k])
    g = G * math.tanh(v[k]) * direction
    h = max_curvature * math.tanh(v[k + 1]) ** 2 * np.outer(direction, direction)
    xi, eta = _inside(v[-2 * k : -k], R), _inside(v[-k:], R)
    return (-xi @ g - 0.5 * xi @ h @ xi) - (-eta @ g - 0.5 * eta @ h @ eta)


def _greatest(gain, size, k, max_curvature, seed):
    """Greatest gain over random points and local searches."""
    random = np.random.default_rng(seed)
    starts = 2.0 * random.standard_normal((4000, size))
    values = np.array([gain(v, k, max_curvature) for v in starts])
    best = values.max()
    for start in starts[np.argsort(values)[-6:]]:
        found = minimize(lambda v: -gain(v, k, max_curvature), start, method="Powell", options={"maxiter": 200})
        best = max(best, -found.fun)
    return best


@pytest.mark.parametrize("k", [2, 3])
@pytest.mark.parametrize("ratio", GENERAL)
def test_width_is_the_least_upper_bound(ratio, k):
    bounds = sensitivity(ratio)
    best = _greatest(_gain_general, 3 * k + k * k, k, bounds.max_curvature, seed=k)
    assert 0.999 * bounds.width(R) < best <= bounds.width(R) * (1 + 1e-9)


@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("ratio", PARALLEL)
def test_parallel_width_is_the_least_upper_bound(ratio, k):
    bounds = sensitivity(ratio, parallel=True)
    best = _greatest(_gain_parallel, 3 * k + 2, k, bounds.max_curvature, seed=k)
    assert 0.999 * bounds.width(R) < best <= bounds.width(R) * (1 + 1e-9)


def test_the_parallel_width_would_be_too_small_in_general():
    """The search must be able to tell the two widths apart."""
    best = _greatest(_gain_general, 10, 2, sensitivity(2.0).max_curvature, seed=0)
    assert best > 1.1 * sensitivity(2.0, parallel=True).width(R)


@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize("ratio", GENERAL)
def test_replacing_a_record_costs_twice(ratio, parallel):
    once = sensitivity(ratio, parallel=parallel).width(R)
    assert sensitivity(ratio, parallel=parallel, adjacency="replace_one").width(R) == pytest.approx(2 * once, rel=1e-15)


def test_lipschitz_constants():
    assert sensitivity(2.0).lipschitz(R) == pytest.approx(G + 2.0 * G, rel=1e-14)
    assert sensitivity(2.0, adjacency="replace_one").lipschitz(R) == pytest.approx(2 * G + 2.0 * G, rel=1e-14)
    assert Sensitivity(G, 0.0, False, "add_remove").lipschitz(R) == G


@pytest.mark.parametrize("adjacency", ["add_remove", "replace_one"])
def test_lipschitz_constant_bounds_every_slope(adjacency):
    """|∇(change of Σu)| = |g + Hξ| on the ball, for one record or for the difference of two."""
    random = np.random.default_rng(0)
    bounds = sensitivity(2.0, adjacency=adjacency)
    worst = 0.0
    for _ in range(3000):
        slope = np.zeros(3)
        xi = _inside(random.standard_normal(3) * 3, R)
        for sign in (1, -1) if adjacency == "replace_one" else (1,):
            factor = random.standard_normal((3, random.integers(1, 4)))
            h = factor @ factor.T
            # Half of the time the record that pushes hardest along ξ.
            g = G * sign * _unit(xi) if random.random() < 0.5 else _inside(random.standard_normal(3) * 3, G)
            h = np.outer(xi, xi) if sign > 0 and random.random() < 0.5 else h
            slope += sign * (g + bounds.max_curvature * h / np.linalg.norm(h, 2) @ xi * (sign > 0))
        worst = max(worst, float(np.linalg.norm(slope)))
    assert 0.99 * bounds.lipschitz(R) < worst <= bounds.lipschitz(R) * (1 + 1e-12)


# --- Joint clipping --------------------------------------------------------------------------------------------------


def _records(gradients, factors, *, parallel=False):
    """A batch of records as a pass makes them, from g (B, k) and B (B, q, k)."""
    return clipping._finite_only(torch.as_tensor(gradients), torch.as_tensor(factors), parallel=parallel)


def _jointly_clipped(g, b, bound, radius, *, parallel=False):
    """One record's g and H as they enter the sums."""
    adder = ClippedAdder(bound, 4 * bound / radius, radius)
    adder.add(_records(g[None], b[None], parallel=parallel))
    found = adder.result()
    return found.gradient.numpy(), found.curvature.numpy()


def _utility(points, g, h):
    """u(ξ) = −ξᵀg − ½ξᵀHξ of one record at rows ξ."""
    return -points @ g - 0.5 * np.einsum("ni,ij,nj->n", points, h, points)


def _ball(random, count, dim, radius):
    """Points of the ball, half of them on the sphere."""
    points = random.standard_normal((count, dim))
    points /= np.linalg.norm(points, axis=1, keepdims=True)
    points[: count // 2] *= random.uniform(0, 1, (count // 2, 1)) ** (1 / dim)
    return radius * points


RECORD = st.tuples(
    st.integers(1, 4),  # k
    st.integers(1, 3),  # rows of B
    st.floats(-8, 8),  # the gradient's order of magnitude
    st.floats(-8, 8),  # that of B
    st.integers(0, 2**32 - 1),
)
SCALES = st.floats(1e-3, 1e3)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(RECORD, SCALES, SCALES, st.booleans())
def test_a_jointly_clipped_record_moves_the_utility_by_its_bound(record, bound, radius, parallel):
    """max u − min u ≤ 2RC_g over the ball, whatever the record; and its slope is at most 4C_g."""
    k, rows, order_g, order_b, seed = record
    random = np.random.default_rng(seed)
    if parallel:
        b = 10.0**order_b * random.standard_normal((1, k))
        g = 10.0**order_g * random.standard_normal() * b[0] / np.linalg.norm(b)
    else:
        g, b = 10.0**order_g * random.standard_normal(k), 10.0**order_b * random.standard_normal((rows, k))
    g, h = _jointly_clipped(g, b, bound, radius, parallel=parallel)
    values, vectors = np.linalg.eigh(h)
    assert values[0] >= -1e-12 * max(values[-1], 1e-300)
    # Besides points at random those at which g and the eigenvectors are steepest.
    steep = np.concatenate([vectors.T, [g / max(np.linalg.norm(g), 1e-300)]]) * radius
    points = np.concatenate([_ball(random, 2000, k, radius), steep, -steep, np.zeros((1, k))])
    utility = _utility(points, g, h)
    assert np.ptp(utility) <= 2 * radius * bound * (1 + 1e-9)
    slopes = np.linalg.norm(g + points @ h, axis=1)
    assert slopes.max() <= 4 * bound * (1 + 1e-9)
    assert np.linalg.norm(h, 2) <= 4 * bound / radius * (1 + 1e-9)


@pytest.mark.parametrize("scale", [0.5, 1.0, 1e6])
@pytest.mark.parametrize("ratio", [0.0, 0.3, 1.0, 2.0, 5.0, 100.0])
def test_joint_clipping_reaches_its_bound(ratio, scale):
    """The record and the two points between which the utility changes most: W is 2RC_g, unless it was less before."""
    c_h = ratio * G / R
    x = ratio / (1 + math.sqrt(1 + 2 * ratio**2))
    d, s = 2 * R * math.sqrt(1 - x * x) * np.array([1.0, 0.0]), 2 * R * x * np.array([0.0, 1.0])
    v = np.array([[1.0, -1.0]]) / math.sqrt(2)
    raw = float(utility_width(*torch.tensor([G, c_h], dtype=torch.float64), R, parallel=False))
    factor = scale * 2 * R * G / raw  # 1: just within the bound
    g, h = _jointly_clipped(-factor * G * np.array([1.0, 0.0]), math.sqrt(factor * c_h) * v, G, R)
    best, worst = (s + d) / 2, (s - d) / 2
    gain = np.subtract(*_utility(np.stack([best, worst]), g, h))
    assert gain == pytest.approx(2 * R * G * min(1.0, scale), rel=1e-9)


@pytest.mark.parametrize("ratio", [0.0, 0.5, 1.0, 3.0, 100.0])
def test_joint_clipping_reaches_its_bound_where_only_one_row_matters(ratio):
    direction = np.array([0.6, -0.8])
    b = math.sqrt(1e3 * ratio * G / R) * direction[None]
    g, h = _jointly_clipped(1e3 * G * direction, b, G, R, parallel=True)
    line = np.linspace(-R, R, 200_001)[:, None] * direction
    assert np.ptp(_utility(line, g, h)) == pytest.approx(2 * R * G, rel=1e-8)
    # The general width would have clipped harder than needed.
    if ratio > 0:
        tighter = _jointly_clipped(1e3 * G * direction, b, G, R)[0]
        assert np.linalg.norm(tighter) < np.linalg.norm(g) * (1 - 1e-3)


def test_the_slope_after_joint_clipping_has_no_smaller_bound():
    """Largest for a record without gradient; 3.5C_g would be too little, 4C_g never is."""
    steepest = []
    for ratio in [0.0, *np.logspace(-3, 6, 200)]:
        for general in (True, False):
            b = np.array([[math.sqrt(1e3 * ratio), 0.0]])
            g, h = _jointly_clipped(1e3 * np.array([1.0, 0.0]), b, G, R, parallel=not general)
            steepest.append(np.linalg.norm(g) + R * np.linalg.norm(h, 2))
    bounds = Sensitivity(G, 4 * G / R, False, "add_remove", joint_radius=R)
    assert bounds.lipschitz(R) == 4 * G
    assert max(steepest) <= bounds.lipschitz(R) * (1 + 1e-12)
    assert max(steepest) > 3.999 * G
    assert sum(slope > 3.5 * G for slope in steepest) > 20
    g, h = _jointly_clipped(np.zeros(2), np.array([[1e3, 0.0]]), G, R)
    assert np.linalg.norm(h @ np.array([R, 0.0])) == pytest.approx(4 * G, rel=1e-12)


def test_joint_sensitivity():
    once, twice = (Sensitivity(G, 4 * G / R, False, adjacency, joint_radius=R) for adjacency in clipping.ADJACENCIES)
    assert (once.width(R), twice.width(R)) == (2 * R * G, 4 * R * G)
    assert (once.lipschitz(R), twice.lipschitz(R)) == (4 * G, 8 * G)
    for bounds in (once, twice):
        for measure in (bounds.width, bounds.lipschitz):
            with pytest.raises(
                ValueError, match=rf"radius=0\.6 is not the {R} for which these statistics were clipped"
            ):
                measure(0.6)
    # Separate bounds as large would be wider by far.
    assert Sensitivity(G, 4 * G / R, False, "add_remove").width(R) > 1.5 * once.width(R)


@pytest.mark.parametrize("case", CASES)
@settings(max_examples=25, deadline=None, derandomize=True)
@given(drawn=neighbours())
def test_one_record_moves_jointly_clipped_sums_by_one_records_worth(case, drawn):
    """Through the network: the change of the sums is a record's quadratic no wider than 2RC_g."""
    dtype, criterion = torch.float64, CASES[case][1]
    x, y = make_data(case, dtype, drawn["n"], drawn["seed"], drawn["scale"])
    contents = CLASSES if case == "mlp-ce" else TARGETS
    x, y = plant(x, y, drawn["position"], drawn["input"], contents[drawn["target"] % len(contents)])
    kept = torch.arange(drawn["n"]) != drawn["position"]
    options = {"batch_size": drawn["batch_size"], "physical": drawn["physical"], "joint_radius": R}
    options |= {"max_curvature": 4 * C_G / R}
    larger = one_pass(rows_of(case, dtype), criterion, x, y, **options)
    smaller = one_pass(rows_of(case, dtype), criterion, x[kept], y[kept], **options)
    assert larger.joint_radius == R
    change_g, change_h = (larger.gradient - smaller.gradient).numpy(), (larger.curvature - smaller.curvature).numpy()
    points = _ball(np.random.default_rng(drawn["seed"]), 2000, 5, R)
    assert np.ptp(_utility(points, change_g, change_h)) <= 2 * R * C_G * (1 + SLACK)
    assert np.linalg.norm(change_g + points @ change_h, axis=1).max() <= 4 * C_G * (1 + SLACK)
    assert np.linalg.eigvalsh(change_h)[0] >= -1e-9 * 4 * C_G / R


def test_joint_clipping_that_forgets_the_curvature_is_noticed(monkeypatch):
    """Scaling by the gradient alone leaves records whose curvature moves the utility further."""
    monkeypatch.setattr(RecordQuadratics, "joint_norms", lambda self, radius: self.gradient_norms)
    g, h = _jointly_clipped(np.array([1e-3, 0.0]), np.array([[0.0, 1e3]]), G, R)
    points = _ball(np.random.default_rng(0), 2000, 2, R)
    assert np.ptp(_utility(points, g, h)) > 2 * R * G


def test_records_within_the_joint_bound_are_not_changed():
    x, y = make_data("mlp-ce", torch.float64, 7, seed=4)
    source = rows_of("mlp-ce", torch.float64)
    plain = one_pass(source, CrossEntropy(), x, y, max_grad_norm=1e6, max_curvature=1e6)
    joint = one_pass(source, CrossEntropy(), x, y, max_grad_norm=1e6, max_curvature=1e6, joint_radius=R)
    assert torch.equal(joint.gradient, plain.gradient)
    assert torch.equal(joint.curvature, plain.curvature)


def test_the_rank_of_one_records_curvature_is_public():
    """At most the number of outputs, and k; none without curvature."""
    for case, dim, rank in (("linear-mse", 5, 2), ("mlp-ce", 5, 3), ("mlp-bce", 5, 1), ("mlp-ce", 1, 1)):
        x, y = make_data(case, torch.float64, 9, seed=1)
        source = rows_of(case, torch.float64, dim=dim)
        found = one_pass(source, CASES[case][1], x, y)
        assert found.rank == rank
        assert int(torch.linalg.matrix_rank(one_pass(source, CASES[case][1], x[:1], y[:1]).curvature)) <= rank
        # Whatever the records hold.
        assert one_pass(source, CASES[case][1], torch.full_like(x, math.nan), y).rank == rank
        assert one_pass(source, CASES[case][1], x, y, max_curvature=0.0).rank == 0


# --- Shapes ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shape:
    """A model's outputs, its criterion, the subspace, and whether the narrow width is right."""

    outputs: int
    criterion: object
    dim: int | None
    parallel: bool


SHAPES = {
    "one output": Shape(1, nn.MSELoss(), 5, True),
    "one logit": Shape(1, nn.BCEWithLogitsLoss(), 5, True),
    "one output, any loss": Shape(1, nn.HuberLoss(delta=100.0), 5, True),
    "two classes": Shape(2, nn.CrossEntropyLoss(), 5, True),
    "k = 1": Shape(2, nn.MSELoss(), 1, True),
    "k = 1, three classes": Shape(3, nn.CrossEntropyLoss(), 1, True),
    "two outputs": Shape(2, nn.MSELoss(), 5, False),
    "two logits": Shape(2, nn.BCEWithLogitsLoss(), 5, False),
    "three classes": Shape(3, nn.CrossEntropyLoss(), 5, False),
    "two outputs, any loss": Shape(2, nn.HuberLoss(delta=100.0), 5, False),
    "two outputs, full space": Shape(2, nn.MSELoss(), None, False),
}


@pytest.mark.parametrize("name", SHAPES)
def test_which_shapes_have_the_narrow_width(name):
    shape = SHAPES[name]
    torch.manual_seed(0)
    module = working_copy(nn.Linear(FEATURES, shape.outputs).double())
    layout = Layout.of(module)
    projection = make_projection("stiefel", layout.size, shape.dim, 1, device=CPU, dtype=torch.float64)
    source = hooks_for(module, layout, projection, torch.zeros(1, FEATURES, dtype=torch.float64))
    x = torch.randn(6, FEATURES, dtype=torch.float64)
    integer = isinstance(shape.criterion, nn.CrossEntropyLoss)
    y = torch.arange(6) % shape.outputs if integer else torch.rand(6, shape.outputs, dtype=torch.float64)
    criterion = make_criterion(shape.criterion, y)
    found = one_pass(source, criterion, x, y)
    assert found.parallel is shape.parallel
    assert found.sensitivity("add_remove") == Sensitivity(C_G, C_H, shape.parallel, "add_remove")
    # The claim itself: every record's curvature is a multiple of ggᵀ, or not.
    records = clipping.record_quadratics(source, criterion, x, y, curvature=True)
    for g, b in zip(records.gradients, records.factors, strict=True):
        h, unit = b.T @ b, g / torch.linalg.vector_norm(g)
        along = torch.outer(unit, unit) * torch.linalg.matrix_norm(h, 2)
        assert bool(torch.allclose(h, along, rtol=1e-9, atol=1e-12)) is shape.parallel


def _one_row(parallel):
    """A batch of one record: its only row along the gradient, or two rows."""
    rows = 3.0 * np.eye(2)[None, : 1 if parallel else 2]
    return _records(rows[:, 0], rows, parallel=parallel)


def _added(kinds, start=None):
    adder = ClippedAdder(C_G, C_H, start=start)
    for parallel in kinds:
        adder.add(_one_row(parallel))
    return adder.result()


@pytest.mark.parametrize("kinds", [(True, True), (True, False), (False, True), (False, False)])
def test_one_batch_without_the_narrow_width_is_enough(kinds):
    """The narrow width is right only if it is for every record, in whatever batch and part of the pass it is."""
    first, second = kinds
    parts = _added([first]), _added([second])
    for found in (_added(kinds), _added([second], start=parts[0]), parts[0].plus(parts[1])):
        assert found.parallel is (first and second)
        assert found.rank == (1 if first and second else 2)
        assert found.sensitivity("add_remove") == Sensitivity(C_G, C_H, first and second, "add_remove")
    narrow, wide = (Sensitivity(C_G, C_H, parallel, "add_remove").width(10.0) for parallel in (True, False))
    assert narrow < wide
    assert _added([], start=parts[0]).parallel is first


def test_a_model_whose_later_batches_have_more_outputs_has_the_wide_range():
    """The same through a whole pass, whose batches have one output, two, and one again."""
    narrow, wide = (rows_of(case, torch.float64) for case in ("mlp-bce", "linear-mse"))

    class Both:
        def __init__(self):
            self.sources = iter((narrow, wide, narrow))

        def outputs_and_pullback(self, inputs):
            return next(self.sources).outputs_and_pullback(inputs)

    x = make_data("linear-mse", torch.float64, 4, seed=1)[0]
    batches = [(x, torch.zeros(4, outputs, dtype=torch.float64)) for outputs in (1, 2, 1)]
    found = clipped_sums(Both(), MeanSquaredError(), batches, max_grad_norm=C_G, max_curvature=C_H)
    assert found.parallel is False
    assert found.rank == 2


def test_sensitivity_wants_a_known_adjacency():
    held = ClippedSums(torch.zeros(2), None, 1.0, 0.0, False)
    with pytest.raises(ValueError, match="adjacency must be one of 'add_remove', 'replace_one', got 'add'"):
        held.sensitivity("add")


# --- The sums are not shown ------------------------------------------------------------------------------------------


@pytest.fixture
def private_sums():
    """Sums whose every number is recognisable."""
    return ClippedSums(torch.full((3,), 0.123456), torch.full((3, 3), 0.654321), 1.0, 2.0, False)


def test_repr_holds_no_private_value(private_sums):
    assert repr(private_sums) == "ClippedSums(dim=3, max_grad_norm=1.0, max_curvature=2.0, private values hidden)"
    assert str(private_sums) == repr(private_sums)
    assert "123" not in f"{private_sums}"


def test_record_quadratics_hold_no_private_value_in_repr():
    held = RecordQuadratics(*(torch.full((2, 2), 0.123456) for _ in range(4)), parallel=False)
    assert "123" not in repr(held)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_pickling_is_refused(private_sums, protocol):
    with pytest.raises(TypeError, match="private data"):
        pickle.dumps(private_sums, protocol)


@pytest.mark.parametrize("save", [copy.copy, copy.deepcopy, lambda s: torch.save(s, io.BytesIO())])
def test_copying_and_saving_are_refused(private_sums, save):
    with pytest.raises(TypeError, match="private data"):
        save(private_sums)


def test_sums_compare_by_identity(private_sums):
    """Comparing values would answer questions about the data."""
    twin = ClippedSums(private_sums.gradient, private_sums.curvature, 1.0, 2.0, False)
    assert private_sums != twin
