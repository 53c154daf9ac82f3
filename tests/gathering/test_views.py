"""Views of a record: the mean over them, clipped as one."""

import copy
import math

import pytest
import torch
from reference import dense, gradient_and_hessian, output_and_jacobian_of_each, perceptron
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from opacus_expm import ExpMQuadEngine, GradSampling, Stiefel, audit
from opacus_expm.gathering.randomness import Generators
from opacus_expm.gathering.views import EachView, pixel_shifts, with_own_views, with_views

RECORDS, FEATURES, OUTPUTS, DIM = 9, 4, 3, 5
LOSSES = {"cross-entropy": nn.CrossEntropyLoss(), "mse": nn.MSELoss()}


def three(x):
    """A record, turned round and stretched."""
    return [x, -0.5 * x, 2 * x + 1]


def problem(loss="cross-entropy", records=RECORDS):
    generator = torch.Generator().manual_seed(1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = perceptron(FEATURES, 6, OUTPUTS).double()
    x = torch.randn(records, FEATURES, generator=generator, dtype=torch.float64)
    y = torch.randint(OUTPUTS, (records,), generator=generator)
    if loss == "mse":
        y = torch.randn(records, OUTPUTS, generator=generator, dtype=torch.float64)
    return model, x, y


def gather(model, x, y, views=three, loss="cross-entropy", **changes):
    options = {"max_grad_norm": 1e6, "max_curvature": 0.0, "projection": Stiefel(seed=0), **changes}
    loader = DataLoader(TensorDataset(x, y), batch_size=4)
    return ExpMQuadEngine().gather(model, loader, DIM, criterion=LOSSES[loss], views=views, **options)


def by_hand(statistics, model, x, y, views, loss):
    """g_i (k,) and H_i (k, k) of every record: means over the views, one view at a time."""
    a, found = dense(statistics.projection), []
    seen = [output_and_jacobian_of_each(model, view, len(x)) for view in views(x)]
    for i, target in enumerate(y):
        g, h = torch.zeros(DIM, dtype=torch.float64), torch.zeros(DIM, DIM, dtype=torch.float64)
        for view in seen:
            outputs, jacobian = view[i]
            gradient, hessian = gradient_and_hessian(LOSSES[loss], outputs, target)
            j = jacobian @ a
            g, h = g + j.T @ gradient / len(seen), h + j.T @ hessian @ j / len(seen)
        found.append((g, h))
    return found


@pytest.mark.parametrize("mode", ["hooks", "functorch"])
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("bound", [1e6, 0.3])
def test_the_sum_is_that_of_clipped_means(mode, loss, bound):
    model, x, y = problem(loss)
    found = gather(model, x, y, loss=loss, grad_sample_mode=mode, max_grad_norm=bound)
    records = by_hand(found, model, x, y, three, loss)
    expected = sum(g * min(1.0, bound / float(g.norm())) for g, _ in records)
    assert any(float(g.norm()) > 0.3 for g, _ in records)
    torch.testing.assert_close(found.sums.gradient, expected, rtol=1e-6, atol=1e-7)
    plain = gather(model, x, y, views=None, loss=loss, grad_sample_mode=mode, max_grad_norm=bound).sums.gradient
    assert (plain - expected).norm() > 0.05 * expected.norm()


def test_views_that_draw_are_called_for_one_record_after_the_other():
    """Of a batch as they come and then record by record, each with numbers of its own; others once for a batch."""
    sizes = []

    def shifted(inputs):
        sizes.append(len(inputs))
        return [inputs, inputs + torch.rand(())]

    x, y = torch.zeros(5, 2), torch.zeros(5)
    seen, repeated = with_own_views(shifted, Generators.of(), x, y)
    assert sizes == [5, 1, 1, 1, 1, 1]
    assert seen.shape == (5, 2, 2)
    assert repeated.shape == (5, 2)
    assert torch.equal(seen[:, 0], x)
    assert len(seen[:, 1].unique()) == 5
    calls = []
    seen, _ = with_own_views(lambda inputs: calls.append(1) or [inputs, -inputs], Generators.of(), x, y)
    assert len(calls) == 1


def test_views_of_a_random_size_are_refused():
    def cropped(inputs):
        return [inputs[:, : int(next(sizes))] * torch.rand(())]

    sizes = iter((2, 1, 2))
    with pytest.raises(ValueError, match="views must give tensors of one shape for every record, got several"):
        with_own_views(cropped, Generators.of(), torch.zeros(2, 2), torch.zeros(2))


def test_random_views_of_mappings_keep_what_is_no_tensor():
    inputs = {"a": torch.zeros(3, 2), "flag": True}
    seen, _ = with_own_views(
        lambda i: [i, {**i, "a": i["a"] + torch.rand(())}], Generators.of(), inputs, torch.zeros(3)
    )
    assert seen["flag"] is True
    assert seen["a"].shape == (3, 2, 2)
    assert len(seen["a"][:, 1].unique()) == 3


def test_one_view_is_the_record_itself():
    model, x, y = problem()
    alone = gather(model, x, y, views=lambda inputs: [inputs], max_grad_norm=0.3)
    torch.testing.assert_close(alone.sums.gradient, gather(model, x, y, None, max_grad_norm=0.3).sums.gradient)


def test_the_mean_is_clipped_and_not_each_view():
    """Five views that agree: clipped one by one and added, they would move the sums by five times the bound."""
    model, x, y = problem(records=1)
    bound = 0.05
    moved = gather(model, x, y, views=lambda inputs: [inputs] * 5, max_grad_norm=bound).sums.gradient
    assert float(moved.norm()) == pytest.approx(bound, rel=1e-9)


@pytest.mark.parametrize("huge", [1e3, 1e150, float("nan"), float("inf")])
def test_one_record_moves_the_sums_by_one_records_worth_whatever_its_views(huge):
    model, x, y = problem()

    def views(inputs):
        other = torch.where((inputs == x[-1]).all(1, keepdim=True), huge * inputs, inputs)
        return [inputs, other, -other]

    with_it = gather(model, x, y, views, max_grad_norm=0.05, max_curvature=0.1)
    without = gather(model, x[:-1], y[:-1], views, max_grad_norm=0.05, max_curvature=0.0)
    moved = float((with_it.sums.gradient - without.sums.gradient).norm())
    if math.isfinite(huge):
        assert 0.01 < moved <= 0.05 * (1 + 1e-9)
    else:  # not finite in one view: nothing at all
        assert moved < 1e-12
    values = torch.linalg.eigvalsh(with_it.sums.curvature)
    assert values.min() > -1e-12
    assert values.max() <= 0.1 * RECORDS * (1 + 1e-9)


@pytest.mark.slow
def test_curvature_is_the_mean_over_views_on_average():
    """Probed, as for sequences: the mean over many passes is JᵀLJ, averaged over the views; its sum is something else."""
    model, x, y = problem()
    sums = [gather(model, x, y, max_curvature=1e6, grad_sample_mode=GradSampling(probes=64)) for _ in range(40)]
    expected = sum(h for _, h in by_hand(sums[0], model, x, y, three, "cross-entropy"))
    found = torch.stack([s.sums.curvature for s in sums]).mean(0)
    assert (found - expected).norm() < 0.05 * expected.norm()
    plain = gather(model, x, y, views=None, max_curvature=1e6).sums.curvature
    assert (plain - expected).norm() > 0.2 * expected.norm()


def test_a_release_costs_what_it_costs_without_views():
    model, x, y = problem()
    engine = ExpMQuadEngine()
    loader = DataLoader(TensorDataset(x, y), batch_size=4)
    private = engine.make_private_expm(
        model, loader, 1.0, 0.1, DIM, delta=1e-5, rounds=2, max_grad_norm=1.0, max_curvature=0.0, views=three,
        criterion=nn.CrossEntropyLoss(),
    )  # fmt: skip
    assert engine.get_epsilon(1e-5) == pytest.approx(1.0, abs=1e-6)
    assert any(not torch.equal(a, b) for a, b in zip(private.parameters(), model.parameters(), strict=True))


@pytest.mark.filterwarnings("ignore:audit_pair")
def test_the_exact_loss_of_a_neighbour_is_within_epsilon():
    model, x, y = problem()
    with_it, without = (DataLoader(TensorDataset(x[:n], y[:n]), batch_size=4) for n in (RECORDS, RECORDS - 1))
    arguments = {
        "epsilon": 1.0, "radius": 0.5, "proj_dim": 2, "max_grad_norm": 0.05, "max_curvature": 0.0, "views": three,
        "criterion": nn.CrossEntropyLoss(),
    }  # fmt: skip
    findings = audit.audit_pair(model, with_it, without, arguments).findings
    assert all(0.1 < f.found <= 1.0 for f in findings)
    with pytest.raises(ValueError, match="views have it probed"):
        audit.audit_pair(model, with_it, without, {**arguments, "max_curvature": 1.0})


def test_bounds_are_measured_on_public_views_and_bought_from_private_ones():
    """The bound is a quantile of the norms of means over views, where there are views."""
    model, x, y = problem(records=64)
    loader = DataLoader(TensorDataset(x, y), batch_size=16)
    others = DataLoader(TensorDataset(x.clone(), y.clone()), batch_size=16)
    public = {"criterion": nn.CrossEntropyLoss(), "max_curvature": 0.0, "public_loader": others}
    plain, seen = (ExpMQuadEngine().gather(model, loader, None, views=v, **public) for v in (None, three))
    assert plain.sums.max_grad_norm != seen.sums.max_grad_norm
    quiet = {"criterion": nn.CrossEntropyLoss(), "epsilon": 1e4, "projection": Stiefel(seed=0), "max_curvature": 0.0}
    bought = [ExpMQuadEngine().gather(model, loader, DIM, views=v, **quiet).sums.max_grad_norm for v in (None, three)]
    norms = [
        torch.tensor([
            float(g.norm()) for g, _ in by_hand(gather(model, x, y, v), model, x, y, v or (lambda i: [i]), "cross-entropy")
        ])
        for v in (None, three)
    ]  # fmt: skip
    for bound, values in zip(bought, norms, strict=True):
        assert bound == pytest.approx(float(values.quantile(0.8)), rel=0.15)


def test_a_training_loop_takes_views():
    model, x, y = problem()
    engine, trained = ExpMQuadEngine(), copy.deepcopy(model)
    seen = []

    def views(inputs):
        seen.append(inputs)
        return three(inputs)

    module, optimizer, criterion, loader = engine.make_private_with_epsilon(
        grad_sample_mode="ghost",
        module=trained, optimizer=torch.optim.SGD(trained.parameters(), lr=0.1), criterion=nn.CrossEntropyLoss(),
        data_loader=DataLoader(TensorDataset(x, y), batch_size=4), target_epsilon=1.0, target_delta=0.0, epochs=1,
        max_grad_norm=1.0, radius=0.1, proj_dim=DIM, views=views,
    )  # fmt: skip
    for inputs, targets in loader:
        optimizer.zero_grad()
        criterion(module(inputs), targets).backward()
        optimizer.step()
    given = torch.cat([t for t in seen if not torch._C._functorch.is_batchedtensor(t)])
    assert int(torch.isin(given, x).all(1).sum()) == RECORDS  # the others are synthetic
    assert engine.get_epsilon() == 1.0


def test_parts_with_other_views_are_not_merged(tmp_path):
    model, x, y = problem()
    first, second = gather(model, x, y), gather(model, x, y, views=None)
    with pytest.raises(ValueError, match="with another views"):
        first.merge(second)
    with pytest.warns(UserWarning, match="PRIVATE"):
        first.save_private(tmp_path / "part")
    loaded = type(first).load_private(tmp_path / "part", model)
    assert loaded.views == first.views == "three"


@pytest.mark.parametrize(
    ("views", "error", "message"),
    [
        (3, TypeError, "views must be a function"),
        (lambda x: x, ValueError, "views must give a list .* got Tensor"),
        (lambda x: [], ValueError, "views must give a list"),
        (lambda x: [x, x[:-1]], ValueError, "another length"),
        (lambda x: [x, x[:, :2]], ValueError, "several shapes"),
        (lambda x: [x, (x, x)], ValueError, "another structure"),
    ],
)
def test_bad_views_are_refused_and_nothing_is_charged(views, error, message):
    model, x, y = problem()
    engine = ExpMQuadEngine()
    loader = DataLoader(TensorDataset(x, y), batch_size=4)
    options = {"max_grad_norm": 1.0, "max_curvature": 0.0, "criterion": nn.CrossEntropyLoss(), "views": views}
    with pytest.raises(error, match=message):
        engine.make_private_expm(model, loader, 1.0, 0.1, DIM, **options)
    assert len(engine.accountant) == 0


def test_what_is_no_function_is_refused_before_public_curvature_is_computed():
    model, x, y = problem()

    class Untouchable(TensorDataset):
        def __getitem__(self, index):
            raise AssertionError("the public data was read")

    public = DataLoader(Untouchable(x, y), batch_size=4)
    engine, private = ExpMQuadEngine(), DataLoader(TensorDataset(x, y), batch_size=4)
    for views, error, message in ((3, TypeError, "views must be a function"), (three, AssertionError, "was read")):
        with pytest.raises(error, match=message):
            engine.make_private_expm(
                model, private, 1.0, 0.1, None, max_curvature=0.0, public_loader=public, views=views
            )


def test_views_have_no_part_in_sequences():
    _, x, y = problem()
    sequence = nn.Sequential(nn.Linear(FEATURES, OUTPUTS), nn.Unflatten(1, (1, OUTPUTS))).double()
    with pytest.raises(ValueError, match="views need a model with outputs"):
        gather(sequence, x, y[:, None])


def test_named_and_constant_inputs_are_stacked():
    inputs = {"a": torch.arange(6.0).view(3, 2), "scale": 2.0}
    targets = torch.arange(3)
    seen, repeated = with_views(lambda i: [i, {**i, "a": -i["a"]}], inputs, targets)
    assert seen["scale"] == 2.0
    torch.testing.assert_close(seen["a"][:, 1], -inputs["a"])
    assert repeated.tolist() == [[0, 0], [1, 1], [2, 2]]


def test_rows_add_up_over_views():
    class Source:
        def outputs_and_pullback(self, inputs):
            return inputs, lambda cotangents: cotangents * inputs[:, None]

    x = torch.arange(12.0).view(2, 3, 2)
    outputs, pullback = EachView(Source()).outputs_and_pullback(x)
    assert torch.equal(outputs, x)
    cotangents = torch.randn(2, 4, 3, 2, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(pullback(cotangents), (cotangents * x[:, None]).sum(2))


def test_pixel_shifts():
    image = torch.arange(12.0).view(1, 1, 3, 4)
    same, down, up, right, left = pixel_shifts(image)
    assert torch.equal(same, image)
    for moved, offset in ((down, 4), (up, -4)):  # what was a row above, or below
        inside = slice(1, None) if offset > 0 else slice(None, -1)
        assert torch.equal(moved[..., inside, :], image[..., inside, :] - offset)
    assert torch.equal(right[..., 1:], image[..., :-1])
    assert torch.equal(left[..., :-1], image[..., 1:])
    assert torch.equal(down[..., 0, :], image[..., 0, :])  # the edge, repeated
    assert all(v.shape == (2, 3, 5, 6) for v in pixel_shifts(torch.randn(2, 3, 5, 6)))
