"""Public curvature through the engine: what is computed, how often, what it may cost, and what is refused."""

import copy
import re

import numpy as np
import pytest
import torch
from reference import dense, gradient_and_hessian, output_and_jacobian_of_each
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from opacus_expm import ExpMQuadEngine, GradSampling, Preconditioned
from opacus_expm.gathering.passes import MAX_CURVATURE_DIM
from opacus_expm.subspaces.preconditioned import PreconditionedMap

FEATURES, RECORDS = 3, 40
PARAMETERS = (FEATURES + 1) * 4 + 5
CRITERION = nn.MSELoss()
LOGISTIC = nn.BCEWithLogitsLoss()


def make_model(dtype=torch.float64):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(FEATURES, 4), nn.Tanh(), nn.Linear(4, 1)).to(dtype)


def make_tensors(seed, records=RECORDS, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(records, FEATURES, generator=generator, dtype=torch.float64)
    return x.to(dtype), x.sum(1, keepdim=True).to(dtype)


class Watched(Dataset):
    """Counts how often records are read."""

    def __init__(self, seed, records=RECORDS, dtype=torch.float64):
        self.tensors, self.reads = make_tensors(seed, records, dtype), 0

    def __len__(self):
        return len(self.tensors[0])

    def __getitem__(self, index):
        self.reads += 1
        return tuple(t[index] for t in self.tensors)


class Untouchable(Watched):
    """Records that must not be read."""

    def __getitem__(self, index):
        raise AssertionError("the private data was touched")


def loader(dataset):
    return DataLoader(dataset, batch_size=16)


def flat(module):
    return torch.cat([p.detach().flatten() for p in module.parameters()])


def metric(**settings):
    return Preconditioned(**{"rank": 5, "seed": 1, **settings})


def options(public, **changes):
    chosen = {
        "criterion": CRITERION,
        "max_grad_norm": 1.0,
        "max_curvature": 0.5,
        "public_loader": loader(public) if isinstance(public, Dataset) else public,
        "projection": metric(),
    }
    return chosen | changes


def dense_curvature(model, dataset, criterion=CRITERION, share=0.0):
    """Σ_i J_iᵀL_iJ_i/n, one record at a time, L at a share of the outputs."""
    x, y = dataset.tensors
    total = torch.zeros(PARAMETERS, PARAMETERS, dtype=torch.float64)
    for (f, jacobian), target in zip(output_and_jacobian_of_each(model, x, len(x)), y, strict=True):
        total += jacobian.T @ gradient_and_hessian(criterion, share * f, target)[1] @ jacobian
    return total / len(x)


# --- What is computed ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["hooks", "functorch"])
@pytest.mark.parametrize("dim", [None, 3, 5, 9])
def test_the_map_is_made_of_the_public_records_curvature(dim, mode):
    model, public = make_model(), Watched(7)
    engine = ExpMQuadEngine()
    found = engine.gather(model, loader(Watched(0)), dim, grad_sample_mode=mode, **options(public))
    values, vectors = torch.linalg.eigh(dense_curvature(model, public))
    values, vectors = values.flip(0)[:5], vectors.flip(1)[:, :5]
    assert isinstance(found.projection, PreconditionedMap)
    p = dense(found.projection.base)
    expected = p - vectors @ torch.diag(1 - (1 + 160 * values / values[0]) ** -0.5) @ vectors.T @ p
    torch.testing.assert_close(dense(found.projection), expected, rtol=0, atol=1e-6)
    if dim is not None and dim <= 5:
        torch.testing.assert_close((p * vectors[:, :dim]).sum(0).abs(), torch.ones(dim).double(), rtol=0, atol=1e-6)


def sure_model():
    """Whose outputs are large, so that a logistic loss hardly curves."""
    model = make_model()
    with torch.no_grad():
        model[2].weight.mul_(8)
    return model


def test_only_public_curvature_is_that_of_a_model_that_knows_nothing():
    """Not the private statistics: with the map of that curvature, they are those of the loss as it is."""
    model, public, private = sure_model(), Watched(7), Watched(0)
    engine = ExpMQuadEngine()
    chosen = options(public, max_grad_norm=1e6, max_curvature=0.0, criterion=LOGISTIC)
    found = engine.gather(model, loader(private), None, **chosen)
    values, vectors = torch.linalg.eigh(dense_curvature(model, public, LOGISTIC))
    values, vectors = values.flip(0)[:5], vectors.flip(1)[:, :5]
    expected = torch.eye(PARAMETERS) - vectors @ torch.diag(1 - (1 + 160 * values / values[0]) ** -0.5) @ vectors.T
    torch.testing.assert_close(dense(found.projection), expected, rtol=0, atol=1e-6)
    plain = dense_curvature(model, public, LOGISTIC, share=1.0)
    assert (plain - dense_curvature(model, public, LOGISTIC)).norm() > 0.1 * plain.norm()
    x, y = private.tensors
    gradient = torch.zeros(PARAMETERS, dtype=torch.float64)
    for (f, jacobian), target in zip(output_and_jacobian_of_each(model, x, len(x)), y, strict=True):
        gradient += jacobian.T @ gradient_and_hessian(LOGISTIC, f, target)[0]
    torch.testing.assert_close(found.sums.gradient.cpu().double(), expected.T @ gradient, rtol=0, atol=1e-5)


def test_the_private_data_play_no_part_in_the_map():
    maps = [
        dense(ExpMQuadEngine().gather(make_model(), loader(Watched(seed)), 9, **options(Watched(7))).projection)
        for seed in (0, 1)
    ]
    assert torch.equal(*maps)
    other = ExpMQuadEngine().gather(make_model(), loader(Watched(0)), 9, **options(Watched(8)))
    assert not torch.allclose(maps[0], dense(other.projection), atol=1e-3)


def test_a_release_says_how_its_map_was_made():
    for dim, found_dim, seed in ((4, 4, None), (9, 9, 1), (None, PARAMETERS, None)):
        engine = ExpMQuadEngine()
        engine.make_private_expm(make_model(), loader(Watched(0)), 1.0, 0.5, dim, **options(Watched(7)))
        release = engine.accountant.releases[0]
        assert (release.projection, release.proj_dim, release.seed) == ("preconditioned", found_dim, seed)


def test_updates_stay_in_the_ball_of_the_metric():
    """|ξ| ≤ R, so |A⁻¹Δ| ≤ R in the full space; in plain norm Δ is no longer than that, along curved directions less."""
    model, engine = make_model(), ExpMQuadEngine()
    statistics = engine.gather(model, loader(Watched(0)), None, **options(Watched(7)))
    a = dense(statistics.projection)
    for seed in range(5):
        engine = ExpMQuadEngine(noise_generator=np.random.default_rng(seed))
        result = engine.release(statistics, 100.0, 0.3)
        update = flat(result) - flat(model)
        assert float(torch.linalg.solve(a, update).norm()) <= 0.3 * (1 + 1e-9)
        assert 0 < float(update.norm()) <= 0.3 * (1 + 1e-9)
    assert float(torch.linalg.svdvals(a)[-1]) < 0.5


def test_private_curvature_is_not_the_default_beside_public_curvature():
    engine = ExpMQuadEngine()
    chosen = {key: value for key, value in options(Watched(7)).items() if key != "max_curvature"}
    engine.make_private_expm(make_model(), loader(Watched(0)), 1.0, 0.5, None, **chosen)
    assert engine.accountant.releases[0].max_curvature == 0.0
    engine.make_private_expm(make_model(), loader(Watched(0)), 1.0, 0.5, 4, **chosen | {"projection": "sparse"})
    assert engine.accountant.releases[1].max_curvature > 0.0


def test_public_bounds_are_measured_through_the_map():
    """Clipping happens after the map, and so do the measurements on public records."""
    public = Watched(7)
    found = ExpMQuadEngine().gather(
        make_model(),
        loader(Watched(0)),
        None,
        **options(public, max_grad_norm=None, max_curvature=0.0),
    )
    a, (x, y) = dense(found.projection), public.tensors
    norms = []
    for (f, jacobian), target in zip(output_and_jacobian_of_each(make_model(), x, len(x)), y, strict=True):
        norms.append(float((a.T @ jacobian.T @ gradient_and_hessian(CRITERION, f, target)[0]).norm()))
    assert found.bounds == "public"
    assert found.sums.max_grad_norm == pytest.approx(np.quantile(norms, 0.95), rel=1e-9)


def test_the_global_generator_is_left_alone():
    """Neither the passes nor the eigenpairs take numbers from it, and the eigenpairs do not depend on it."""
    maps, model = [], make_model()
    for seed in (0, 1):
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        found = ExpMQuadEngine().gather(model, loader(Watched(0)), 9, **options(Watched(7)))
        maps.append(dense(found.projection))
        assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(*maps)


# --- How often -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kept", [True, False])
def test_a_recipe_that_has_learned_reads_no_public_records_again(kept):
    """Whoever keeps it decides that its curvature still fits; a plain one learns anew in every call."""
    engine, model, public = ExpMQuadEngine(), make_model(), Watched(7)
    recipe = metric()
    if kept:
        recipe = engine.gather(model, loader(Watched(0)), 9, **options(public)).subspace
        assert not recipe.needs_public_data
    public.reads = 0
    for number, dim in enumerate((9, 4, None), start=1):
        found = engine.gather(model, loader(Watched(0)), dim, **options(public, projection=recipe))
        assert public.reads == (0 if kept else number * RECORDS)
        assert (found.subspace.curvature is recipe.curvature) is kept
    if kept:  # nor does it need the loader
        again = engine.gather(model, loader(Watched(0)), None, **options(None, projection=recipe))
        assert torch.equal(dense(again.projection), dense(found.projection))
    # What a recipe asks for is what it gets.
    few, many = (
        engine.gather(model, loader(Watched(0)), None, **options(public, projection=metric(rank=rank)))
        for rank in (4, 5)
    )
    assert not torch.allclose(dense(few.projection), dense(many.projection), rtol=0, atol=1e-4)


def test_probes_serve_public_curvature_too():
    public = Watched(7)
    found = ExpMQuadEngine().gather(
        make_model(), loader(Watched(0)), 9, **options(public, grad_sample_mode=GradSampling(probes=1))
    )
    assert found.projection.vectors.shape == (PARAMETERS, 5)
    assert found.probes == 1


def test_freezing_a_layer_makes_another_map():
    """As if it had been frozen from the start, and nothing else moves; curvature that was kept is refused."""
    engine, public_loader, model = ExpMQuadEngine(), loader(Watched(7)), make_model()
    kept = engine.gather(model, loader(Watched(0)), 3, **options(public_loader)).subspace
    model[0].requires_grad_(False)
    found = engine.gather(model, loader(Watched(0)), 3, **options(public_loader))
    fresh = ExpMQuadEngine().gather(model, loader(Watched(0)), 3, **options(public_loader))
    assert found.projection.size == 5
    assert torch.equal(dense(found.projection), dense(fresh.projection))
    result = engine.release(found, 1e6, 0.5)
    assert torch.equal(result[0].weight, model[0].weight)
    assert not torch.equal(result[2].weight, model[2].weight)
    with pytest.raises(ValueError, match=f"public curvature of {PARAMETERS} parameters, and the model has 5"):
        engine.gather(model, loader(Untouchable(0)), 3, **options(public_loader, projection=kept))


def test_another_criterion_gives_another_map():
    engine, public_loader = ExpMQuadEngine(), loader(Watched(7))
    found = [
        dense(
            engine.gather(
                make_model(), loader(Watched(0)), None, **options(public_loader, criterion=criterion)
            ).projection
        )
        for criterion in (nn.MSELoss(), nn.HuberLoss(delta=1.0))
    ]
    assert not torch.allclose(*found, atol=1e-3)


def test_rounds_share_the_eigenpairs_of_the_first():
    public, private = Watched(7), Watched(0)
    engine = ExpMQuadEngine()
    engine.make_private_expm(
        make_model(), loader(private), 1.0, 0.3, None, rounds=3, **options(public, max_curvature=0.0)
    )
    assert public.reads == RECORDS
    assert private.reads == 3 * RECORDS
    assert len(engine.accountant) == 3


def test_only_as_many_public_records_as_fit_are_used(monkeypatch):
    public = Watched(7, records=100)
    monkeypatch.setattr("opacus_expm.subspaces.preconditioned.PUBLIC_BYTES", 2 * 16 * PARAMETERS * 8)
    monkeypatch.setattr("opacus_expm.gathering.passes._WIDE_BYTES", 1)  # 16 records at a time
    found = ExpMQuadEngine().gather(make_model(), loader(Watched(0)), 4, **options(public))
    few = TensorDataset(*(t[:32] for t in public.tensors))
    vectors = torch.linalg.eigh(dense_curvature(make_model(), few))[1].flip(1)[:, :4]
    torch.testing.assert_close(
        (found.projection.base.matrix * vectors).sum(0).abs(), torch.ones(4).double(), rtol=0, atol=1e-6
    )
    assert public.reads <= 64


# --- What is large, and what is refused ------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_full_space_of_a_large_model():
    """More than 100,000 parameters, no k × k matrix: gradients alone, in the metric of public curvature."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Linear(400, 300)
        public, private = (TensorDataset(torch.randn(8, 400), torch.randint(300, (8,))) for _ in range(2))
    assert sum(p.numel() for p in model.parameters()) > 100_000 > MAX_CURVATURE_DIM
    engine = ExpMQuadEngine()
    chosen = {"criterion": nn.CrossEntropyLoss(), "max_grad_norm": 1.0}
    result = engine.make_private_expm(
        model,
        loader(private),
        1.0,
        0.5,
        None,
        projection=Preconditioned(rank=6),
        public_loader=loader(public),
        **chosen,
    )
    update = flat(result) - flat(model)
    assert 0 < float(update.norm()) <= 0.5 * (1 + 1e-5)
    release = engine.accountant.releases[0]
    assert (release.proj_dim, release.max_curvature) == (120_300, 0.0)
    # A matrix of that size is refused, before the data is touched and whatever the projection.
    untouchable = loader(Untouchable(0))
    message = re.escape(f"proj_dim must be at most {MAX_CURVATURE_DIM} where private curvature is gathered")
    for wrong in (
        {"max_curvature": 1.0},
        {"max_curvature": None},
        {"max_curvature": 1.0, "projection": Preconditioned(rank=6), "public_loader": loader(public)},
    ):
        with pytest.raises(ValueError, match=message + r".*120300; pass max_curvature=0, or a smaller proj_dim"):
            engine.make_private_expm(model, untouchable, 1.0, 0.5, None, **chosen | wrong)
    with pytest.raises(ValueError, match=message):
        engine.make_private_expm(model, untouchable, 1.0, 0.5, 20_000, projection="sparse", **chosen, max_curvature=1.0)
    assert len(engine.accountant) == 1


@pytest.mark.parametrize("projection", ["preconditioned", metric()], ids=str)
def test_public_data_are_needed(projection):
    engine = ExpMQuadEngine()
    for call in (
        lambda **o: engine.make_private_expm(make_model(), loader(Untouchable(0)), 1.0, 0.5, 4, **o),
        lambda **o: engine.gather(make_model(), loader(Untouchable(0)), 4, **o),
    ):
        message = r"public_loader must be given with projection='preconditioned': .* or use projection='sparse'"
        with pytest.raises(ValueError, match=message):
            call(**options(None, projection=projection))
    assert len(engine.accountant) == 0


def test_maps_that_cannot_be_made_are_refused_before_the_private_data_is_touched():
    engine, private = ExpMQuadEngine(), loader(Untouchable(0))
    for dim, message in (
        (0, "proj_dim must be a positive integer, got 0"),
        (PARAMETERS + 1, f"proj_dim must be at most the number of trainable parameters, {PARAMETERS}"),
    ):
        with pytest.raises(ValueError, match=message):
            engine.make_private_expm(make_model(), private, 1.0, 0.5, dim, **options(Watched(7)))
    assert len(engine.accountant) == 0


def test_the_model_that_came_is_untouched():
    model = make_model()
    before = copy.deepcopy(model.state_dict())
    ExpMQuadEngine().make_private_expm(model, loader(Watched(0)), 1.0, 0.5, None, **options(Watched(7)))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
