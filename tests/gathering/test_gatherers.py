"""Both gatherers of Jacobian rows against the slow twin, and what they do to the user's module: nothing."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from itertools import product
from typing import Any

import pytest
import reference
import torch
from reference import (
    CASE,
    CASES,
    LOSSES,
    Case,
    Quadratic,
    dense,
    error,
    random_map,
    sums_of,
    targets_for,
)
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, Dataset

from opacus_expm import ExpMQuadEngine, Statistics, Stiefel
from opacus_expm.gathering import functional
from opacus_expm.gathering.clipping import RowSource, record_quadratics
from opacus_expm.gathering.criteria import make_criterion
from opacus_expm.gathering.functional import FunctionalRows
from opacus_expm.gathering.hooks import HooksCannotServe, hooks_for
from opacus_expm.gathering.model import working_copy
from opacus_expm.subspaces import Projection
from opacus_expm.subspaces.layout import Layout

COUNT = 5
KINDS = ("stiefel", "sparse", "structured", "full")
TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-4}
SLOW_RULES = ("ignore:There is a performance drop", "ignore:An output with one or more elements was resized")


def served() -> list[Any]:
    """Every case with every gatherer that can serve it."""
    return [
        pytest.param(case, gatherer, id=f"{case.name}-{gatherer}", marks=quiet(case, gatherer))
        for case, gatherer in product(CASES, ("hooks", "functorch"))
        if gatherer == "functorch" or case.hooks
    ]


def refused() -> list[Any]:
    """Every case that hooks cannot serve."""
    return [pytest.param(case, id=case.name, marks=quiet(case, "functorch")) for case in CASES if not case.hooks]


def quiet(case: Case, gatherer: str) -> list[Any]:
    """Torch warns where vmap is slow, which is not this package's concern."""
    slow = gatherer == "functorch" and not case.batching_rules
    return [pytest.mark.filterwarnings(rule) for rule in SLOW_RULES] if slow else []


def some(inputs: Any, piece: slice) -> Any:
    return pytree.tree_map(lambda t: t[piece], inputs)


def project(module: nn.Module, kind: str, dtype: torch.dtype = torch.float64) -> Projection:
    shapes, size = Layout.of(module).shapes, Layout.of(module).size
    return random_map(kind, shapes, min(13 if kind == "structured" else 7, size), 1, dtype)


def row_source(gatherer: str, module: nn.Module, projection: Projection, inputs: Any) -> RowSource:
    working = working_copy(module)
    layout = Layout.of(working)
    if gatherer == "functorch":
        return FunctionalRows(working, layout, projection)
    return hooks_for(working, layout, projection, some(inputs, slice(0, 1)))


@cache
def twin_pass(name: str, dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
    """Outputs and Jacobians of a case, which serve every loss and projection."""
    case = CASE[name]
    return reference.output_and_jacobian_of_each(case.model(dtype), case.batch(COUNT, dtype), COUNT)


@cache
def twin_loss(name: str, dtype: torch.dtype, loss: str) -> list[tuple[Tensor, Tensor]]:
    """Output gradients and Hessians of a case, which serve every projection."""
    targets = targets_for(loss, COUNT, CASE[name].outputs)
    outputs = [f for f, _ in twin_pass(name, dtype)]
    return [reference.gradient_and_hessian(LOSSES[loss], f, y) for f, y in zip(outputs, targets, strict=True)]


@cache
def projection_of(name: str, dtype: torch.dtype, kind: str) -> tuple[Projection, Tensor]:
    """A projection for a case, and its matrix."""
    projection = project(CASE[name].model(dtype), kind, dtype)
    return projection, dense(projection)


@cache
def twin(name: str, dtype: torch.dtype, loss: str, kind: str) -> tuple[list[Quadratic], float, float]:
    """Quadratics of a case, and bounds in the midst of their norms: some records are clipped and some are not."""
    a = projection_of(name, dtype, kind)[1]
    passed = zip(twin_pass(name, dtype), twin_loss(name, dtype, loss), strict=True)
    records = [reference.quadratic(j, gradient, hessian, a) for (_, j), (gradient, hessian) in passed]
    return records, *bounds(records)


def bounds(records: list[Quadratic]) -> tuple[float, float]:
    middle = len(records) // 2
    return sorted(r.g_norm for r in records)[middle], sorted(r.h_norm for r in records)[middle]


def vector(numbers: Iterable[float]) -> Tensor:
    return torch.tensor(list(numbers), dtype=torch.float64)


def in_two_batches(inputs: Any, targets: Tensor) -> list[tuple[Any, Tensor]]:
    return [(some(inputs, piece), targets[piece]) for piece in (slice(0, 2), slice(2, None))]


class Records(Dataset[Any]):
    """A data set of pairs, which may be interrupted."""

    def __init__(self, inputs: Any, targets: Tensor, stop_at: int | None = None):
        self.inputs, self.targets, self.stop_at = inputs, targets, stop_at

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> Any:
        if index == self.stop_at:
            raise KeyboardInterrupt
        return pytree.tree_map(lambda t: t[index], self.inputs), self.targets[index]


def loader(inputs: Any, targets: Tensor, stop_at: int | None = None) -> DataLoader[Any]:
    return DataLoader(Records(inputs, targets, stop_at), batch_size=2)


def gather(module: nn.Module, data: DataLoader[Any], loss: str = "mse", **options: Any) -> Statistics:
    chosen: dict[str, Any] = {"max_grad_norm": 0.5, "max_curvature": 0.5, "projection": Stiefel(seed=1), **options}
    return ExpMQuadEngine().gather(module, data, min(7, Layout.of(module).size), criterion=LOSSES[loss], **chosen)


def assert_right(statistics: Statistics, module: nn.Module, data: DataLoader[Any], loss: str, tolerance: float) -> None:
    """The statistics of a pass are the twin's."""
    records, sums = data.dataset, statistics.sums
    assert isinstance(records, Records)
    a = dense(statistics.projection)
    g, s = reference.clipped_sums(
        module, LOSSES[loss], records.inputs, records.targets, a, sums.max_grad_norm, sums.max_curvature
    )
    assert sums.curvature is not None
    assert error(sums.gradient, g) < tolerance
    assert error(sums.curvature, s) < tolerance


# ------------------------------------------------------------------------------------------ against the slow twin


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize(("case", "gatherer"), served())
def test_gatherer_agrees_with_the_twin(case: Case, gatherer: str, dtype: torch.dtype) -> None:
    module, inputs = case.model(dtype), case.batch(COUNT, dtype)
    for kind in KINDS:
        source = row_source(gatherer, module, projection_of(case.name, dtype, kind)[0], inputs)
        for loss in case.losses:
            label, tolerance = f"{loss}, {kind}", TOLERANCE[dtype]
            expected, max_grad_norm, max_curvature = twin(case.name, dtype, loss, kind)
            targets = targets_for(loss, COUNT, case.outputs)
            criterion = make_criterion(LOSSES[loss], targets)

            found = record_quadratics(source, criterion, inputs, targets, curvature=True)
            assert found.factors is not None
            h = found.factors.transpose(1, 2) @ found.factors
            assert error(found.gradients, torch.stack([r.g for r in expected])) < tolerance, label
            assert error(h, torch.stack([r.h for r in expected])) < tolerance, label
            assert error(found.gradient_norms, vector(r.g_norm for r in expected)) < tolerance, label
            assert error(found.curvature_norms, vector(r.h_norm for r in expected)) < tolerance, label

            g, s = reference.add_clipped(expected, max_grad_norm, max_curvature)
            batches = in_two_batches(inputs, targets) if kind == "stiefel" else [(inputs, targets)]
            sums = sums_of(source, criterion, batches, max_grad_norm=max_grad_norm, max_curvature=max_curvature)
            assert sums.curvature is not None
            assert error(sums.gradient, g) < tolerance, label
            assert error(sums.curvature, s) < tolerance, label


@pytest.mark.parametrize(("case", "gatherer"), served())
def test_without_curvature_the_gradient_is_the_same(case: Case, gatherer: str) -> None:
    # One backward pass instead of m.
    module, inputs, loss = case.model(), case.batch(COUNT), case.losses[-1]
    targets = targets_for(loss, COUNT, case.outputs)
    expected, max_grad_norm, _ = twin(case.name, torch.float64, loss, "stiefel")
    source = row_source(gatherer, module, project(module, "stiefel"), inputs)
    sums = sums_of(
        source,
        make_criterion(LOSSES[loss], targets),
        [(inputs, targets)],
        max_grad_norm=max_grad_norm,
        max_curvature=0.0,
    )
    assert sums.curvature is None
    assert error(sums.gradient, reference.add_clipped(expected, max_grad_norm, 1.0)[0]) < 1e-8


class Forgetful:
    """A projection that loses the rows of one parameter."""

    def __init__(self, projection: Projection, forgotten: int):
        self._projection, self._forgotten = projection, forgotten
        self.dim, self.width = projection.dim, projection.width

    def add_projected(self, out: Tensor, rows: Tensor, start: int) -> None:
        if start != self._forgotten:
            self._projection.add_projected(out, rows, start)

    def finish(self, out: Tensor) -> Tensor:
        return self._projection.finish(out)


@pytest.mark.parametrize("name", ["mlp", "cnn", "dp-lstm"])
def test_a_forgotten_parameter_is_noticed(name: str) -> None:
    # A wrong variant must be rejected by the comparison above, whichever parameter it loses.
    case, loss = CASE[name], "ce"
    module, inputs = case.model(), case.batch(COUNT)
    targets = targets_for(loss, COUNT, case.outputs)
    expected, max_grad_norm, max_curvature = twin(name, torch.float64, loss, "stiefel")
    g, s = reference.add_clipped(expected, max_grad_norm, max_curvature)
    for start in Layout.of(module).offsets:
        source = row_source("functorch", module, Forgetful(project(module, "stiefel"), start), inputs)
        sums = sums_of(
            source,
            make_criterion(LOSSES[loss], targets),
            [(inputs, targets)],
            max_grad_norm=max_grad_norm,
            max_curvature=max_curvature,
        )
        assert sums.curvature is not None
        assert error(sums.gradient, g) > TOLERANCE[torch.float32]
        assert error(sums.curvature, s) > TOLERANCE[torch.float32]


@pytest.mark.parametrize("gatherer", ["hooks", "functorch"])
def test_a_wrong_projection_or_bound_is_noticed(gatherer: str) -> None:
    case, loss = CASE["mlp"], "ce"
    module, inputs = case.model(), case.batch(COUNT)
    projection = project(module, "stiefel")
    targets = targets_for(loss, COUNT, case.outputs)
    _, max_grad_norm, max_curvature = twin(case.name, torch.float64, loss, "stiefel")
    source = row_source(gatherer, module, projection, inputs)
    sums = sums_of(
        source,
        make_criterion(LOSSES[loss], targets),
        [(inputs, targets)],
        max_grad_norm=max_grad_norm,
        max_curvature=max_curvature,
    )
    assert sums.curvature is not None
    a = dense(projection)
    perturbed = a + 1e-3 * torch.randn(a.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for wrong, c_g, c_h in [
        (perturbed, max_grad_norm, max_curvature),
        (a, 1.01 * max_grad_norm, 1.01 * max_curvature),
        (a, float("inf"), float("inf")),
    ]:
        g, s = reference.clipped_sums(module, LOSSES[loss], inputs, targets, wrong, c_g, c_h)
        assert error(sums.gradient, g) > TOLERANCE[torch.float32]
        assert error(sums.curvature, s) > TOLERANCE[torch.float32]


@pytest.mark.parametrize("elements", [1, 500])
def test_functorch_in_small_pieces_is_the_same(elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASE["mlp"]
    module, inputs = case.model(), case.batch(COUNT)
    source = row_source("functorch", module, project(module, "stiefel"), inputs)
    cotangents = torch.randn(COUNT, 2, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    whole = source.outputs_and_pullback(inputs)[1](cotangents)
    monkeypatch.setattr(functional, "_MAX_ELEMENTS", elements)
    assert error(source.outputs_and_pullback(inputs)[1](cotangents), whole) < 1e-12


@pytest.mark.parametrize("gatherer", ["hooks", "functorch"])
def test_rows_carry_no_graph(gatherer: str) -> None:
    # A graph behind the sums would keep every batch in memory.
    case = CASE["root-parameter"]
    module, inputs = case.model(), case.batch(COUNT)
    for kind in KINDS:
        source = row_source(gatherer, module, project(module, kind), inputs)
        outputs, pullback = source.outputs_and_pullback(inputs)
        rows = pullback(torch.ones(COUNT, 1, 3, dtype=torch.float64))
        assert not outputs.requires_grad
        assert not rows.requires_grad


# ------------------------------------------------------------------------------------- records that are not finite


@pytest.mark.parametrize("gatherer", ["hooks", "functorch"])
@pytest.mark.parametrize("loss", LOSSES)
def test_records_that_are_not_finite_add_nothing(gatherer: str, loss: str) -> None:
    case = CASE["linear"]
    module, inputs = case.model(), case.batch(9)
    targets = targets_for(loss, 9, case.outputs)
    inputs[1, 2], inputs[3, 0], inputs[4, 1] = torch.nan, torch.inf, 1e300
    if loss == "ce":
        targets[6], targets[7] = 3, -100  # no such class; ignored
    else:
        targets[6, 1], targets[7, 0] = torch.nan, -torch.inf
    sound = [0, 2, 5, 8]
    projection = project(module, "stiefel")
    source = row_source(gatherer, module, projection, inputs)
    criterion = make_criterion(LOSSES[loss], targets)

    sums = sums_of(source, criterion, in_two_batches(inputs, targets), max_grad_norm=0.4, max_curvature=0.3)
    g, s = reference.clipped_sums(module, LOSSES[loss], inputs, targets, dense(projection), 0.4, 0.3)
    only, curvature_only = reference.clipped_sums(
        module, LOSSES[loss], inputs[sound], targets[sound], dense(projection), 0.4, 0.3
    )
    assert sums.curvature is not None
    assert error(sums.gradient, g) < 1e-8
    assert error(sums.curvature, s) < 1e-8
    assert error(sums.gradient, only) < 1e-8
    assert error(sums.curvature, curvature_only) < 1e-8

    gradient_only = sums_of(source, criterion, [(inputs, targets)], max_grad_norm=0.4, max_curvature=0.0)
    assert error(gradient_only.gradient, only) < 1e-8


@pytest.mark.parametrize("gatherer", ["hooks", "functorch"])
def test_a_huge_record_is_clipped(gatherer: str) -> None:
    case = CASE["linear"]
    module, inputs = case.model(torch.float32), case.batch(COUNT, torch.float32)
    inputs[2] *= 1e30  # |g|² overflows float32, not float64
    targets = targets_for("mse", COUNT, case.outputs)
    projection = project(module, "stiefel", torch.float32)
    source = row_source(gatherer, module, projection, inputs)
    sums = sums_of(
        source, make_criterion(LOSSES["mse"], targets), [(inputs, targets)], max_grad_norm=0.4, max_curvature=0.3
    )
    g, s = reference.clipped_sums(module, LOSSES["mse"], inputs, targets, dense(projection), 0.4, 0.3)
    assert sums.curvature is not None
    assert error(sums.gradient, g) < 1e-4
    assert error(sums.curvature, s) < 1e-4


# --------------------------------------------------------------------------------------- what hooks cannot serve


@pytest.mark.parametrize("case", refused())
def test_hooks_say_what_they_cannot_serve(case: Case) -> None:
    module, inputs = case.model(), case.batch(COUNT)
    before = snapshot(module)
    with pytest.raises(HooksCannotServe):
        hooks_for(module, Layout.of(module), project(module, "stiefel"), some(inputs, slice(0, 1)))
    assert snapshot(module) == before  # cleaned up, so that functorch can go on with it


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("sequence-first", r"'layer' \(Linear\) does not have the batch as its first dimension"),
        ("minus-batch-mean", "depend on the other records"),
        ("tokens-minus-batch-mean", "depend on the other records"),
        ("behind-the-back", "outside the hooked layers"),
        ("lstm", r"'recurrent' \(LSTM\)"),
        ("in-place-input", r"'shift' \(Shift\) is changed in place"),
    ],
)
def test_hooks_name_the_reason(name: str, reason: str) -> None:
    case = CASE[name]
    module, inputs = case.model(), case.batch(COUNT)
    with pytest.raises(HooksCannotServe, match=reason):
        hooks_for(module, Layout.of(module), project(module, "stiefel"), some(inputs, slice(0, 1)))


@pytest.mark.parametrize("case", refused())
def test_the_engine_falls_back_to_functorch(case: Case) -> None:
    module = case.model()
    data = loader(case.batch(COUNT), targets_for("mse", COUNT, case.outputs))
    with pytest.warns(UserWarning, match="using grad_sample_mode='functorch', because"):
        statistics = gather(module, data)
    assert_right(statistics, module, data, "mse", 1e-8)


@pytest.mark.parametrize("mode", ["hooks", "functorch", None])
@pytest.mark.parametrize("name", ["two-inputs", "named-inputs", "embedding", "one-output"])
def test_the_engine_calls_the_model_as_its_batches_suggest(name: str, mode: str | None) -> None:
    case = CASE[name]
    module = case.model()
    data = loader(case.batch(COUNT), targets_for("bce", COUNT, case.outputs))
    statistics = gather(module, data, "bce", grad_sample_mode=mode, max_physical_batch_size=1)
    assert_right(statistics, module, data, "bce", 1e-8)


def test_hooks_alone_are_an_error_where_they_cannot_serve() -> None:
    case = CASE["behind-the-back"]
    data = loader(case.batch(COUNT), targets_for("mse", COUNT, case.outputs))
    with pytest.raises(ValueError, match="grad_sample_mode='hooks' cannot serve this model"):
        gather(case.model(), data, grad_sample_mode="hooks")


def test_the_choice_does_not_depend_on_a_records_content() -> None:
    # A fallback is said aloud, so it must not tell what the first record holds.
    case = CASE["embedding-padded"]
    module = case.model()
    for token in range(6):
        source = hooks_for(
            working_copy(module), Layout.of(module), project(module, "stiefel"), torch.full((1, 5), token)
        )
        assert source.outputs_and_pullback(case.batch(COUNT))[0].shape == (COUNT, 3)


# --------------------------------------------------------------------------------------- the user's module, and modes


def snapshot(module: nn.Module) -> dict[str, Any]:
    """Everything about a module that a pass could leave changed."""

    def tensor(t: Tensor | None) -> Any:
        return t if t is None else (id(t), t.dtype, t._version, t.requires_grad, sorted(vars(t)), t.tolist())

    def layer(m: nn.Module) -> Any:
        hooks = {name: list(value.items()) for name, value in vars(m).items() if name.endswith("_hooks") and value}
        return id(m), type(m), m.training, sorted(vars(m)), hooks

    return {
        "layers": {name: layer(m) for name, m in module.named_modules()},
        "parameters": {name: (tensor(p), tensor(p.grad)) for name, p in module.named_parameters()},
        "buffers": {name: tensor(b) for name, b in module.named_buffers()},
    }


def trained(training: bool) -> nn.Module:
    """A network with running statistics, dropout, a frozen layer, gradients, and a hook of the user's own."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        module = nn.Sequential(
            reference.frozen(reference.used_batch_norm(), "1.weight", "1.bias"), nn.Dropout(0.5), nn.Linear(3, 3)
        ).double()
    module[2].register_forward_hook(lambda *_: None)
    for p in module.parameters():
        p.grad = torch.ones_like(p)
    return module.train(training)


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("mode", ["hooks", "functorch"])
def test_a_pass_leaves_the_module_as_it_was(mode: str, training: bool) -> None:
    module = trained(training)
    data = loader(CASE["batch-norm"].batch(COUNT), targets_for("mse", COUNT, 3))
    before = snapshot(module)
    statistics = gather(module, data, grad_sample_mode=mode)
    assert snapshot(module) == before
    # And the pass was in evaluation mode: dropout and batch statistics played no part.
    assert_right(statistics, module, data, "mse", 1e-8)


@pytest.mark.parametrize("mode", ["hooks", "functorch"])
def test_an_interrupted_pass_leaves_the_module_as_it_was(mode: str) -> None:
    module = trained(True)
    data = loader(CASE["batch-norm"].batch(COUNT), targets_for("mse", COUNT, 3), stop_at=3)
    before = snapshot(module)
    flags = torch.backends.cudnn.allow_tf32, torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")
    with pytest.raises(KeyboardInterrupt):
        gather(module, data, grad_sample_mode=mode)
    assert snapshot(module) == before
    assert (torch.backends.cudnn.allow_tf32, torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")) == flags


def test_a_fallback_leaves_the_module_as_it_was() -> None:
    module = CASE["behind-the-back"].model().train()
    data = loader(CASE["behind-the-back"].batch(COUNT), targets_for("mse", COUNT, 3))
    before = snapshot(module)
    with pytest.warns(UserWarning, match="functorch"):
        gather(module, data)
    assert snapshot(module) == before


def test_running_statistics_do_not_move() -> None:
    module = CASE["batch-norm"].model().train()
    norm = module[1]
    mean, var, seen = norm.running_mean.clone(), norm.running_var.clone(), int(norm.num_batches_tracked)
    data = loader(CASE["batch-norm"].batch(COUNT), targets_for("mse", COUNT, 3))
    statistics = gather(module, data, grad_sample_mode="functorch")
    released = statistics.module_at(torch.zeros(7, dtype=torch.float64).numpy())
    for layer in (norm, released[1]):
        assert torch.equal(layer.running_mean, mean)
        assert torch.equal(layer.running_var, var)
        assert int(layer.num_batches_tracked) == seen
        assert layer.training


@pytest.mark.parametrize("name", ["mlp", "transformer"])
@pytest.mark.parametrize(
    "context", [torch.no_grad, lambda: torch.autocast("cpu", torch.bfloat16)], ids=["no_grad", "autocast"]
)
def test_the_callers_context_plays_no_part(name: str, context: Any) -> None:
    case = CASE[name]
    module = case.model(torch.float32)
    data = loader(case.batch(COUNT, torch.float32), targets_for("mse", COUNT, 3))
    for mode in ("hooks", "functorch") if case.hooks else ("functorch",):
        with context():
            statistics = gather(module, data, grad_sample_mode=mode)
        assert_right(statistics, module, data, "mse", 1e-4)


# ------------------------------------------------------------------------------------------------- low precision


@pytest.mark.parametrize("inputs_too", [True, False], ids=["low-inputs", "float32-inputs"])
@pytest.mark.parametrize("mode", ["hooks", "functorch"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["mlp", "cnn", "partly-frozen"])
def test_low_precision_models_are_computed_in_float32(
    name: str, dtype: torch.dtype, mode: str, inputs_too: bool
) -> None:
    case = CASE[name]
    module = case.model(dtype)
    data = loader(case.batch(COUNT, dtype if inputs_too else torch.float32), targets_for("ce", COUNT, 3))
    before = snapshot(module)
    statistics = gather(module, data, "ce", grad_sample_mode=mode)
    assert snapshot(module) == before
    assert_right(statistics, module, data, "ce", 1e-4)
    released = statistics.module_at(torch.ones(7, dtype=torch.float64).numpy())
    assert {p.dtype for p in released.parameters()} == {dtype}


def test_the_statistics_see_the_rounded_weights() -> None:
    # Those of the low-precision model, not of the float64 model it came from: the comparison can tell.
    case = CASE["mlp"]
    data = loader(case.batch(COUNT, torch.bfloat16), targets_for("ce", COUNT, 3))
    statistics = gather(case.model(torch.bfloat16), data, "ce")
    with pytest.raises(AssertionError):
        assert_right(statistics, case.model(), data, "ce", 1e-4)
