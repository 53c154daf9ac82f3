"""Every criterion's gradient and Gauss-Newton factor against torch's own losses, one record at a time."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from reference import error, gradient_and_hessian
from torch import Tensor, nn

from opacus_expm.gathering.criteria import (
    AutodiffCriterion,
    BinaryCrossEntropy,
    Criterion,
    CrossEntropy,
    MeanSquaredError,
    Undecided,
    make_criterion,
    undecided,
)

M, COUNT = 4, 6
WEIGHT = torch.tensor([0.5, 2.0, 1.0, 3.0])
SMALL_INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32]


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def logits(count: int = COUNT, outputs: int = M, scale: float = 2.0) -> Tensor:
    return scale * torch.randn(count, outputs, generator=generator(), dtype=torch.float64)


def classes(outputs: int = M) -> Tensor:
    return torch.randint(outputs, (COUNT,), generator=generator(1))


def probabilities() -> Tensor:
    return torch.rand(COUNT, M, generator=generator(2), dtype=torch.float64)


def numbers() -> Tensor:
    return torch.randn(COUNT, M, generator=generator(3), dtype=torch.float64)


def labels() -> Tensor:
    return torch.randint(2, (COUNT, M), generator=generator(4)).double()


def wide(loss: nn.Module) -> nn.Module:
    """The loss with its own tensors in float64, as torch wants them for float64 outputs."""
    return copy.deepcopy(loss).double()


def assert_agrees(
    criterion: Criterion, loss: Callable[[Tensor, Tensor], Tensor], outputs: Tensor, targets: Tensor
) -> None:
    """Gradient and MMᵀ are those of torch; the basis is orthonormal and spans them."""
    criterion.check(outputs, targets)
    gradient, factor = criterion.gradient_and_factor(outputs, targets)
    expected = [gradient_and_hessian(loss, f, y) for f, y in zip(outputs, targets, strict=True)]
    assert gradient.dtype == factor.dtype == torch.float64
    assert error(gradient, torch.stack([g for g, _ in expected])) < 1e-10
    assert error(factor @ factor.transpose(1, 2), torch.stack([h for _, h in expected])) < 1e-10

    basis = criterion.basis(outputs.shape[1])
    assert error(basis @ basis.T, torch.eye(len(basis), dtype=torch.float64)) < 1e-12
    outside = torch.eye(outputs.shape[1], dtype=torch.float64) - basis.T @ basis
    assert float((gradient @ outside).abs().max()) < 1e-12 * (1 + float(gradient.abs().max()))
    assert float((outside @ factor).abs().max()) < 1e-12 * (1 + float(factor.abs().max()))


# ------------------------------------------------------------------------------------------------- closed forms


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("outputs", [1, M])
def test_mean_squared_error(reduction: str, outputs: int) -> None:
    loss = nn.MSELoss(reduction=reduction)
    criterion = make_criterion(loss, numbers())
    assert isinstance(criterion, MeanSquaredError)
    assert criterion.basis(outputs).shape == (outputs, outputs)
    assert_agrees(criterion, loss, logits(outputs=outputs), numbers()[:, :outputs])


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("weight", [None, WEIGHT], ids=["plain", "weighted"])
@pytest.mark.parametrize("targets", [classes(), probabilities()], ids=["classes", "probabilities"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_cross_entropy(smoothing: float, weight: Tensor | None, targets: Tensor, reduction: str) -> None:
    criterion = make_criterion(nn.CrossEntropyLoss(weight, label_smoothing=smoothing, reduction=reduction), targets)
    assert isinstance(criterion, CrossEntropy)
    assert criterion.basis(M).shape == (M - 1, M)
    # Of one record: the sum. Torch's weighted mean divides by the record's own weight, which would undo it.
    wanted = None if weight is None else weight.double()
    assert_agrees(criterion, nn.CrossEntropyLoss(wanted, label_smoothing=smoothing, reduction="sum"), logits(), targets)


def test_cross_entropy_of_two_classes_has_one_row() -> None:
    targets = classes(2)
    assert CrossEntropy().basis(2).shape == (1, 2)
    assert_agrees(CrossEntropy(), nn.CrossEntropyLoss(), logits(outputs=2), targets)


@pytest.mark.parametrize("dtype", SMALL_INTEGERS)
@pytest.mark.parametrize("outputs", [M, 120, 300])
def test_classes_of_any_integer_type(dtype: torch.dtype, outputs: int) -> None:
    # m and ignore_index need not fit the type; class 156 is what −100 wraps to in a byte.
    top = min(outputs, torch.iinfo(dtype).max + 1)
    targets = torch.tensor([0, 1, top // 2, min(156, top - 1), top - 2, top - 1])
    wanted = CrossEntropy().gradient_and_factor(logits(outputs=outputs), targets)
    found = CrossEntropy().gradient_and_factor(logits(outputs=outputs), targets.to(dtype))
    assert torch.equal(found[0], wanted[0])
    assert torch.equal(found[1], wanted[1])
    assert (wanted[0].abs().sum(1) > 0).all()


@pytest.mark.parametrize("ignored", [-100, 2])
def test_an_ignored_class_adds_nothing(ignored: int) -> None:
    targets = classes()
    targets[1] = targets[4] = ignored
    kept = targets != ignored
    gradient, factor = make_criterion(nn.CrossEntropyLoss(ignore_index=ignored), targets).gradient_and_factor(
        logits(), targets
    )
    assert not gradient[~kept].any()
    assert not factor[~kept].any()
    assert_agrees(CrossEntropy(ignore_index=ignored), nn.CrossEntropyLoss(), logits()[kept], targets[kept])


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize(
    "weight", [None, torch.tensor(0.7), WEIGHT, WEIGHT[None]], ids=["none", "scalar", "row", "1×m"]
)
@pytest.mark.parametrize("pos_weight", [None, torch.tensor([3.0]), WEIGHT.flip(0)], ids=["none", "one", "each"])
@pytest.mark.parametrize("targets", [labels(), probabilities()], ids=["labels", "probabilities"])
def test_binary_cross_entropy(
    reduction: str, weight: Tensor | None, pos_weight: Tensor | None, targets: Tensor
) -> None:
    loss = nn.BCEWithLogitsLoss(weight, reduction=reduction, pos_weight=pos_weight)
    criterion = make_criterion(loss, targets)
    assert isinstance(criterion, BinaryCrossEntropy)
    assert_agrees(criterion, wide(loss), logits(), targets)


def test_binary_cross_entropy_of_one_output_takes_flat_targets() -> None:
    flat = labels()[:, 0]
    found = BinaryCrossEntropy().gradient_and_factor(logits(outputs=1), flat)
    wanted = BinaryCrossEntropy().gradient_and_factor(logits(outputs=1), flat[:, None])
    assert torch.equal(found[0], wanted[0])
    assert torch.equal(found[1], wanted[1])
    assert_agrees(BinaryCrossEntropy(), nn.BCEWithLogitsLoss(), logits(outputs=1), flat[:, None])


@pytest.mark.parametrize(
    ("function", "targets", "kind"),
    [
        (F.mse_loss, numbers(), MeanSquaredError),
        (F.cross_entropy, classes(), CrossEntropy),
        (F.binary_cross_entropy_with_logits, labels(), BinaryCrossEntropy),
    ],
)
def test_functions_have_closed_forms_too(function: Any, targets: Tensor, kind: type) -> None:
    criterion = make_criterion(function, targets)
    assert isinstance(criterion, kind)
    assert_agrees(criterion, function, logits(), targets)


@given(
    outputs=st.integers(2, 7),
    scale=st.sampled_from([0.0, 1e-6, 1.0, 30.0]),
    smoothing=st.floats(0, 1),
    label=st.integers(0, 6),
    seed=st.integers(0, 99),
)
def test_cross_entropy_whatever_the_logits(outputs: int, scale: float, smoothing: float, label: int, seed: int) -> None:
    f = scale * torch.randn(1, outputs, generator=generator(seed), dtype=torch.float64)
    y = torch.tensor([label % outputs])
    gradient, factor = CrossEntropy(label_smoothing=smoothing).gradient_and_factor(f, y)
    wanted, hessian = gradient_and_hessian(nn.CrossEntropyLoss(label_smoothing=smoothing), f[0], y[0])
    # Entries of σ are at most 1, so absolute errors are what counts.
    assert float((gradient[0] - wanted).abs().max()) < 1e-12
    assert float((factor[0] @ factor[0].T - hessian).abs().max()) < 1e-12


@pytest.mark.parametrize("criterion", [CrossEntropy(), BinaryCrossEntropy()])
def test_extreme_logits_give_finite_values(criterion: Criterion) -> None:
    f = torch.tensor([[1e4, -1e4, 0.0], [-1e4, -1e4, -1e4], [700.0, 0.0, 0.0]], dtype=torch.float64)
    y = torch.tensor([1, 0, 0]) if isinstance(criterion, CrossEntropy) else F.one_hot(torch.tensor([1, 0, 0]), 3)
    gradient, factor = criterion.gradient_and_factor(f, y)
    assert gradient.isfinite().all()
    assert factor.isfinite().all()
    # Confidently wrong: the softmax gradient is σ − y, the mean sigmoid's a third of it.
    wanted = [1.0, -1.0, 0.0] if isinstance(criterion, CrossEntropy) else [1 / 3, -1 / 3, 1 / 6]
    assert error(gradient[0], torch.tensor(wanted, dtype=torch.float64)) < 1e-12


def test_undecided_curvature_is_that_of_a_model_that_knows_nothing() -> None:
    outputs, targets = logits(scale=6.0), classes()
    criterion = Undecided(CrossEntropy())
    gradient, factor = criterion.gradient_and_factor(outputs, targets)
    for g, target, m in zip(gradient, targets, factor, strict=True):
        expected = gradient_and_hessian(nn.CrossEntropyLoss(), torch.zeros(M, dtype=torch.float64), target)
        torch.testing.assert_close((g, m @ m.T), expected, rtol=0, atol=1e-12)
        torch.testing.assert_close(m @ m.T, (torch.eye(M) - 1 / M).double() / M, rtol=0, atol=1e-12)
    torch.testing.assert_close(criterion.basis(M), CrossEntropy().basis(M))


def test_only_losses_of_classes_have_a_model_that_knows_nothing() -> None:
    assert isinstance(undecided(CrossEntropy()), Undecided)
    assert isinstance(undecided(BinaryCrossEntropy()), Undecided)
    huber = AutodiffCriterion(F.huber_loss)
    assert undecided(huber) is huber


def test_squared_errors_curve_alike_whatever_a_model_knows() -> None:
    _, factor = Undecided(MeanSquaredError()).gradient_and_factor(logits(), numbers())
    torch.testing.assert_close(factor, MeanSquaredError().gradient_and_factor(logits(), numbers())[1])


def test_a_wrong_factor_is_noticed() -> None:
    # diag √σ alone forgets −σσᵀ: the comparison must tell.
    class Wrong(CrossEntropy):
        def gradient_and_factor(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
            return super().gradient_and_factor(outputs, targets)[0], torch.diag_embed(F.softmax(outputs, 1).sqrt())

    with pytest.raises(AssertionError):
        assert_agrees(Wrong(), nn.CrossEntropyLoss(), logits(), classes())


# ---------------------------------------------------------------------------------------- automatic differentiation


@pytest.mark.parametrize(
    ("loss", "targets"),
    [
        (nn.MSELoss(), numbers()),
        (nn.MSELoss(reduction="sum"), numbers()),
        (nn.CrossEntropyLoss(), classes()),
        (nn.CrossEntropyLoss(WEIGHT.double(), label_smoothing=0.2, reduction="sum"), classes()),
        (nn.CrossEntropyLoss(label_smoothing=0.2), probabilities()),
        (nn.BCEWithLogitsLoss(WEIGHT.double(), pos_weight=WEIGHT.double()), labels()),
    ],
)
def test_automatic_differentiation_equals_the_closed_forms(loss: nn.Module, targets: Tensor) -> None:
    generic = make_criterion(lambda f, y: loss(f, y), targets)
    assert isinstance(generic, AutodiffCriterion)
    assert_agrees(generic, loss, logits(), targets)
    closed = make_criterion(loss, targets).gradient_and_factor(logits(), targets)
    found = generic.gradient_and_factor(logits(), targets)
    assert error(found[0], closed[0]) < 1e-10
    assert error(found[1] @ found[1].transpose(1, 2), closed[1] @ closed[1].transpose(1, 2)) < 1e-10


@pytest.mark.parametrize(
    ("loss", "targets"),
    [
        (nn.HuberLoss(delta=0.7), numbers()),
        (nn.HuberLoss(reduction="sum"), numbers()),
        (nn.SmoothL1Loss(), numbers()),
        (nn.PoissonNLLLoss(), probabilities()),
        (nn.KLDivLoss(reduction="sum"), probabilities()),
        (nn.MultiLabelSoftMarginLoss(), labels()),
        (nn.NLLLoss(), classes()),
        (lambda f, y: F.nll_loss(F.log_softmax(f, 1), y), classes()),
        (lambda f, y: (f.sin() * y).sum(), numbers()),
    ],
)
def test_other_losses(loss: Any, targets: Tensor) -> None:
    criterion = make_criterion(loss, targets)
    assert isinstance(criterion, AutodiffCriterion)
    assert_agrees(criterion, loss, logits(), targets)


def test_a_loss_with_float32_weights_serves_float64_outputs() -> None:
    loss = nn.NLLLoss(WEIGHT, reduction="sum")
    assert_agrees(make_criterion(loss, classes()), wide(loss), logits(), classes())
    assert loss.weight.dtype == torch.float32  # the user's loss is not touched


def test_an_ignored_class_of_another_loss_adds_nothing() -> None:
    targets = classes()
    targets[2] = 1
    targets[3] = 0
    criterion = make_criterion(nn.NLLLoss(ignore_index=1), targets)
    gradient, factor = criterion.gradient_and_factor(logits(), targets)
    # 0/0 in torch's mean: not finite or zero, and either adds nothing.
    assert not torch.nan_to_num(gradient[targets == 1]).any()
    assert not torch.nan_to_num(factor[targets == 1]).any()
    assert error(gradient[3], -F.one_hot(torch.tensor(0), M).double()) < 1e-12


def test_negative_eigenvalues_are_set_to_zero() -> None:
    concave = make_criterion(lambda f, y: -(f**2).sum(), numbers())
    gradient, factor = concave.gradient_and_factor(logits(), numbers())
    assert error(gradient, -2 * logits()) < 1e-12
    assert not factor.any()

    saddle = make_criterion(lambda f, y: f[0, 0] ** 2 - f[0, 1] ** 2 + 4 * f[0, 2] * f[0, 3], numbers())
    _, factor = saddle.gradient_and_factor(logits(), numbers())
    # Eigenvalues 2, −2, 4, −4: what remains is 2 e₀e₀ᵀ + 4 vvᵀ, v = (e₂+e₃)/√2.
    wanted = torch.zeros(M, M, dtype=torch.float64)
    wanted[0, 0], wanted[2:, 2:] = 2, 2
    assert error(factor @ factor.transpose(1, 2), wanted.expand(COUNT, M, M)) < 1e-12


# --------------------------------------------------------------------------------------- nothing raises for a record

BAD_NUMBERS = [torch.nan, torch.inf, -torch.inf]


@pytest.mark.parametrize("bad", BAD_NUMBERS)
@pytest.mark.parametrize(
    ("loss", "targets"),
    [
        (nn.MSELoss(), numbers()),
        (nn.CrossEntropyLoss(), probabilities()),
        (nn.BCEWithLogitsLoss(), labels()),
        (nn.HuberLoss(), numbers()),
        (nn.PoissonNLLLoss(), numbers()),
        (lambda f, y: F.mse_loss(f, y), numbers()),
    ],
)
def test_a_target_that_is_not_finite_touches_its_record_only(loss: Any, targets: Tensor, bad: float) -> None:
    targets = targets.clone()
    criterion = make_criterion(loss, targets)
    wanted = criterion.gradient_and_factor(logits(), targets)
    targets[2, 1] = bad
    criterion.check(logits(), targets)
    gradient, factor = criterion.gradient_and_factor(logits(), targets)
    others = torch.arange(COUNT) != 2
    assert torch.equal(gradient[others], wanted[0][others])
    assert torch.equal(factor[others], wanted[1][others])
    if not isinstance(loss, nn.HuberLoss):  # an infinite residual has a bounded Huber gradient
        assert not gradient[2].isfinite().all()


@pytest.mark.parametrize("bad", [-1, M, 10**9, -(2**63), 2**63 - 1])
def test_a_class_that_does_not_exist_adds_nothing(bad: int) -> None:
    targets = classes()
    wanted = CrossEntropy(WEIGHT, 0.1).gradient_and_factor(logits(), targets)
    targets[2] = bad
    CrossEntropy().check(logits(), targets)
    gradient, factor = CrossEntropy(WEIGHT, 0.1).gradient_and_factor(logits(), targets)
    others = torch.arange(COUNT) != 2
    assert not gradient[2].any()
    assert not factor[2].any()
    assert torch.equal(gradient[others], wanted[0][others])
    assert torch.equal(factor[others], wanted[1][others])


@pytest.mark.parametrize("bad", [-1, M, 10**9])
@pytest.mark.parametrize(
    "loss", [nn.NLLLoss(), nn.NLLLoss(reduction="sum"), lambda f, y: F.cross_entropy(f, y)], ids=["mean", "sum", "own"]
)
def test_a_class_that_does_not_exist_adds_nothing_in_another_loss(loss: Any, bad: int) -> None:
    # Torch raises here, and an exception would reveal the record.
    targets = classes()
    criterion = make_criterion(loss, targets)
    wanted = criterion.gradient_and_factor(logits(), targets)
    targets[2] = bad
    criterion.check(logits(), targets)
    gradient, factor = criterion.gradient_and_factor(logits(), targets)
    others = torch.arange(COUNT) != 2
    assert not torch.nan_to_num(gradient[2]).any()
    assert not torch.nan_to_num(factor[2]).any()
    assert error(gradient[others], wanted[0][others]) < 1e-12
    assert error(factor[others], wanted[1][others]) < 1e-12


@pytest.mark.parametrize("bad", BAD_NUMBERS)
@pytest.mark.parametrize(
    ("loss", "targets"),
    [(nn.MSELoss(), numbers()), (nn.CrossEntropyLoss(), classes()), (nn.HuberLoss(), numbers())],
)
def test_outputs_that_are_not_finite_touch_their_record_only(loss: Any, targets: Tensor, bad: float) -> None:
    criterion = make_criterion(loss, targets)
    wanted = criterion.gradient_and_factor(logits(), targets)
    outputs = logits()
    outputs[2, 1] = bad
    gradient, factor = criterion.gradient_and_factor(outputs, targets)
    others = torch.arange(COUNT) != 2
    assert torch.equal(gradient[others], wanted[0][others])
    assert torch.equal(factor[others], wanted[1][others])


# --------------------------------------------------------------------------------------- inference and refusals


@pytest.mark.parametrize(
    ("targets", "kind", "name"),
    [
        (classes(), CrossEntropy, "cross-entropy"),
        (classes().to(torch.uint8), CrossEntropy, "cross-entropy"),
        (numbers(), MeanSquaredError, "mean squared error"),
        (numbers().float(), MeanSquaredError, "mean squared error"),
    ],
)
def test_a_criterion_is_inferred_aloud(targets: Tensor, kind: type, name: str) -> None:
    with pytest.warns(UserWarning, match=f"criterion=None.*{name} is used; pass criterion="):
        assert make_criterion(None, targets) == kind()


@pytest.mark.parametrize("loss", [nn.MSELoss(reduction="none"), nn.KLDivLoss(reduction="batchmean")])
def test_other_reductions_are_refused(loss: nn.Module) -> None:
    with pytest.raises(ValueError, match=f"reduction='{loss.reduction}'.*use 'mean' or 'sum'"):
        make_criterion(loss, numbers())


@pytest.mark.parametrize("criterion", ["mse", 3, torch.zeros(2)])
def test_what_cannot_be_called_is_refused(criterion: object) -> None:
    with pytest.raises(TypeError, match=r"criterion must be a loss such as nn\.CrossEntropyLoss\(\), got"):
        make_criterion(criterion, numbers())


def test_cross_entropy_of_one_output_is_refused() -> None:
    with pytest.raises(ValueError, match=r"at least 2 outputs, the model has 1; use nn\.BCEWithLogitsLoss"):
        CrossEntropy().basis(1)


@pytest.mark.parametrize(
    ("criterion", "targets", "message"),
    [
        (MeanSquaredError(), numbers()[:, :2], r"shape \(6, 2\) where mean squared error needs \(6, 4\)"),
        (MeanSquaredError(), numbers()[:, 0], r"shape \(6,\) where mean squared error needs \(6, 4\)"),
        (MeanSquaredError(), numbers()[:3], r"shape \(3, 4\) where mean squared error needs \(6, 4\)"),
        (MeanSquaredError(), numbers().to(torch.complex128), "does not suit mean squared error"),
        (BinaryCrossEntropy(), labels()[:, :1], r"shape \(6, 1\) where binary cross-entropy needs \(6, 4\)"),
        (BinaryCrossEntropy(weight=torch.ones(6, 1)), labels(), "weight has shape"),
        (BinaryCrossEntropy(pos_weight=torch.ones(3)), labels(), "pos_weight has shape"),
        (CrossEntropy(), numbers()[:, :2], r"probabilities needs \(6, 4\)"),
        (CrossEntropy(), labels().long(), r"integer classes of shape \(6,\)"),
        (CrossEntropy(), classes()[:2], r"integer classes of shape \(6,\)"),
        (CrossEntropy(), classes().to(torch.complex64), "dtype torch.complex64"),
        (CrossEntropy(torch.ones(3)), classes(), r"weight has shape \(3,\), the model has 4 outputs"),
        (AutodiffCriterion(lambda f, y: (f - y) ** 2), numbers(), "one number for one record"),
        (AutodiffCriterion(lambda f, y: 1.0), numbers(), "one number for one record"),
        (AutodiffCriterion(F.mse_loss), numbers()[:3], "first"),
    ],
)
def test_targets_that_cannot_be_right_are_refused(criterion: Criterion, targets: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        criterion.check(logits(), targets)


@pytest.mark.parametrize(
    ("criterion", "targets"),
    [
        (MeanSquaredError(), numbers()),
        (CrossEntropy(), probabilities()),
        (BinaryCrossEntropy(), labels()),
        (AutodiffCriterion(F.l1_loss), numbers()),
        (AutodiffCriterion(lambda f, y: F.nll_loss(f, y.long()[:, 0])), numbers()),
    ],
)
def test_a_check_does_not_depend_on_values(criterion: Criterion, targets: Tensor) -> None:
    # Only shapes and types: a message about a value would reveal it.
    for value in (0.0, 1e300, torch.nan):
        assert criterion.check(torch.full_like(logits(), value), torch.full_like(targets, value)) is None


# --- values and guessing ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mse", "ce", "bce"])
def test_the_gradient_of_the_values_is_the_gradient(name: str) -> None:
    criterion, targets = {
        "mse": (MeanSquaredError(), numbers()),
        "ce": (CrossEntropy(WEIGHT.double(), 0.1), classes()),
        "bce": (BinaryCrossEntropy(pos_weight=WEIGHT.double()), labels()),
    }[name]
    outputs = logits().requires_grad_()
    (found,) = torch.autograd.grad(criterion.values(outputs, targets).sum(), outputs)
    assert error(found, criterion.gradient_and_factor(outputs.detach(), targets)[0]) < 1e-10
    undecided = Undecided(criterion).values(outputs.detach(), targets)
    assert torch.equal(undecided, criterion.values(torch.zeros_like(outputs), targets))


def test_a_target_that_is_no_class_has_no_loss() -> None:
    targets = torch.tensor([0, -100, M, 2, -1, 3])
    found = CrossEntropy().values(logits(), targets)
    assert (found == 0).tolist() == [False, True, True, False, True, False]


@pytest.mark.parametrize(
    ("criterion", "expected"),
    [
        (CrossEntropy(), math.log(M)),
        (CrossEntropy(weight=WEIGHT), 3.0 * math.log(M)),
        (CrossEntropy(weight=torch.zeros(M)), None),
        (BinaryCrossEntropy(), math.log(2)),
        (BinaryCrossEntropy(sum_over_outputs=True), M * math.log(2)),
        (MeanSquaredError(), None),
        (AutodiffCriterion(F.huber_loss), None),
        (Undecided(CrossEntropy()), math.log(M)),
    ],
)
def test_the_loss_of_guessing(criterion: Criterion, expected: float | None) -> None:
    assert criterion.guessing(M) == (None if expected is None else pytest.approx(expected))


def test_guessing_is_the_loss_of_equal_outputs() -> None:
    zeros = torch.zeros(COUNT, M, dtype=torch.float64)
    for criterion, targets in ((CrossEntropy(), classes()), (BinaryCrossEntropy(), labels())):
        assert criterion.values(zeros, targets).tolist() == pytest.approx([criterion.guessing(M)] * COUNT)


def test_one_class_is_nothing_to_guess() -> None:
    """Scores are divided by this loss."""
    assert CrossEntropy().guessing(1) is None
