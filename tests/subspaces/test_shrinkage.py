"""Post-processing of a draw: the estimate, its groups, and that it uses nothing private."""

import dataclasses

import numpy as np
import pytest
import torch
from reference import CPU, dense, random_map
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from opacus_expm import ExpMQuadEngine, Preconditioned, Sparse
from opacus_expm.mechanism.sampling import Exact
from opacus_expm.subspaces.layout import Layout
from opacus_expm.subspaces.preconditioned import PublicCurvature
from opacus_expm.subspaces.shrinkage import public_variance
from opacus_expm.subspaces.stiefel import Columns

MODEL = nn.Sequential(nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 3))
LAYOUT = Layout.of(MODEL)
P = LAYOUT.size


def eigenvectors(rank=20):
    """Orthonormal columns, and falling eigenvalues."""
    q, _ = np.linalg.qr(np.random.default_rng(3).standard_normal((P, rank)))
    return PublicCurvature(torch.logspace(2, -1, rank, dtype=torch.float64), torch.from_numpy(q))


def preconditioned(dim):
    return Preconditioned(seed=0, curvature=eigenvectors()).build(P, dim, CPU, torch.float64)


def leading(dim):
    """Eigenvectors alone, in their order."""
    return Columns(eigenvectors().vectors[:, :dim], None)


SPACES = {
    "full": random_map("full", P, None),
    "preconditioned": preconditioned(None),
    "leading": preconditioned(12),
    "eigenvectors": leading(12),
    "stiefel": random_map("stiefel", P, 14),
    "sparse": random_map("sparse", P, 14),
}


def test_one_group_is_the_formula_by_hand():
    xi = np.array([3.0, 0.0, 4.0, 0.0])  # |ξ|² = 25
    four = random_map("stiefel", P, 4)
    assert four.shrunk(xi, 2.0, LAYOUT) == pytest.approx((1 - 2 * 2 / 25) * xi, rel=1e-14)
    assert np.array_equal(four.shrunk(xi, 13.0, LAYOUT), np.zeros(4))  # the positive part


@pytest.mark.parametrize("dim", [1, 2])
def test_fewer_than_three_coordinates_stay(dim):
    xi = np.full(dim, 0.1)
    subspace = random_map("stiefel", P, dim)
    assert np.array_equal(subspace.shrunk(xi, 100.0, LAYOUT), xi)


@pytest.mark.parametrize("space", SPACES)
def test_without_noise_nothing_changes(space):
    xi = np.random.default_rng(0).standard_normal(SPACES[space].dim)
    assert SPACES[space].shrunk(xi, 0.0, LAYOUT) == pytest.approx(xi, rel=1e-12, abs=1e-14)


@pytest.mark.parametrize("space", SPACES)
def test_nothing_but_much_noise_goes_back_to_the_start(space):
    xi = 0.5 * np.random.default_rng(0).standard_normal(SPACES[space].dim)
    kept = SPACES[space].shrunk(xi, 1.0, LAYOUT)
    assert np.linalg.norm(kept) < 0.2 * np.linalg.norm(xi)


def test_groups_of_the_full_space_are_outputs_and_biases():
    """A far-moved output is left alone while its neighbours, of the same weight, are taken back."""
    xi = np.full(P, 0.1)
    moved = slice(12, 24)  # the second output of the first layer
    xi[moved] = 10.0
    kept = SPACES["full"].shrunk(xi, 1.0, LAYOUT)
    assert kept[moved] == pytest.approx((1 - 10 / 1200) * xi[moved], rel=1e-12)
    others = np.ones(P, dtype=bool)
    others[moved] = False
    assert not kept[others].any()


def test_bands_along_eigenvectors_have_4_8_16_coordinates():
    xi = np.full(14, 0.1)
    xi[4:12] = 10.0
    kept = leading(14).shrunk(xi, 1.0, LAYOUT)
    assert not kept[:4].any()
    assert kept[4:12] == pytest.approx((1 - 6 / 800) * xi[4:12], rel=1e-12)
    assert np.array_equal(kept[12:], xi[12:])  # two are too few


def test_the_full_space_is_split_along_and_across_eigenvectors():
    """What lies along a band far moved stays, also where the outputs that it is made of have nothing but noise."""
    vectors = eigenvectors().vectors.numpy()
    along = vectors[:, 4:12] @ np.full(8, 50.0)
    across = np.random.default_rng(1).standard_normal(P) * 0.1
    across -= vectors @ (vectors.T @ across)
    kept = SPACES["preconditioned"].shrunk(along + across, 1.0, LAYOUT)
    assert kept == pytest.approx((1 - 6 / (8 * 2500)) * along, rel=1e-9, abs=1e-9)


def test_what_lies_across_eigenvectors_has_fewer_degrees_of_freedom():
    """An output of d parameters keeps d − |V_g|² of them; the noise along the eigenvectors is not its own."""
    vectors = eigenvectors().vectors.numpy()
    across = 10 * np.random.default_rng(2).standard_normal(P)
    across -= vectors @ (vectors.T @ across)
    kept = SPACES["preconditioned"].shrunk(across, 1.0, LAYOUT)
    group = slice(12, 24)
    freedom = 12 - np.square(vectors[group]).sum()
    assert freedom < 11.5
    expected = 1 - (freedom - 2) / np.square(across[group]).sum()
    assert kept[group] == pytest.approx(expected * across[group], rel=1e-9)


@pytest.mark.parametrize("space", ["full", "preconditioned", "eigenvectors", "sparse"])
@pytest.mark.parametrize("signal", [0.0, 0.3, 1.0, 5.0])
def test_nearer_to_the_mean_than_the_draw(space, signal):
    """The mean squared error falls for every mean; with ten times the variance it would not."""
    subspace = SPACES[space]
    rng = np.random.default_rng([7, int(10 * signal)])
    mean = signal * rng.standard_normal(subspace.dim)
    draws = mean + rng.standard_normal((400, subspace.dim))

    def error(variance):
        return np.array([np.sum((subspace.shrunk(x, variance, LAYOUT) - mean) ** 2) for x in draws])

    gain = np.sum((draws - mean) ** 2, axis=1) - error(1.0)
    assert gain.mean() > 3 * gain.std(ddof=1) / 20
    if signal >= 1.0:
        too_much = np.sum((draws - mean) ** 2, axis=1) - error(10.0)
        assert too_much.mean() < 0


def test_variance_is_that_of_the_draws():
    """Against draws of the engine's own sampler, inside the ball and cut off by it."""
    engine = ExpMQuadEngine()
    x = torch.zeros(50, 12)  # gradients of the first layer's weights vanish
    loader = DataLoader(TensorDataset(x, torch.arange(50) % 3), batch_size=25)
    statistics = engine.gather(
        MODEL, loader, 30, max_grad_norm=1e-6, max_curvature=0.0, criterion=nn.CrossEntropyLoss()
    )
    for c, ridge, radius in [(4.0, 0.5, 100.0), (1e-3, 0.5, 1.0)]:
        density = statistics.density(c, radius, ridge)
        found = Exact().sample(density, np.random.default_rng(0), 20_000)
        allowed = public_variance(c, ridge, 50, radius, 30)
        assert found.var() == pytest.approx(allowed, rel=0.01)
    assert public_variance(0.0, 0.5, 50, 1.0, 30) == 1 / 32


# ---------------------------------------------------------------- in the engine


def loaders(seed, count=64):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 12, generator=generator)
    y = torch.randint(0, 3, (count,), generator=generator)
    return DataLoader(TensorDataset(x, y), batch_size=16)


def seeded():
    return ExpMQuadEngine(noise_generator=np.random.default_rng(5))


def metric(denoise, **settings):
    return Preconditioned(20, damping=1.0, seed=0, denoise=denoise, **settings)


def release(loader, denoise, *, engine=None, **changes):
    arguments = {
        "delta": 1e-5, "criterion": nn.CrossEntropyLoss(), "max_grad_norm": 1.0, "max_curvature": 0.0, "progress": False,
        "projection": metric(denoise), "public_loader": loaders(9),
    }  # fmt: skip
    return (engine or seeded()).make_private_expm(MODEL, loader, 1.0, 2.0, None, **{**arguments, **changes})


def flat(module):
    return nn.utils.parameters_to_vector(module.parameters()).detach().double().numpy()


@pytest.mark.parametrize("seed", [1, 2])
def test_a_denoised_release_is_a_function_of_the_plain_one_and_public_numbers(seed):
    """For two data sets the same public recipe leads from the draw to the module: nothing else of the data enters."""
    engine = seeded()
    plain, denoised = release(loaders(seed), False, engine=engine), release(loaders(seed), True)
    public = {"criterion": nn.CrossEntropyLoss(), "damping_share": 1.0}
    learned = ExpMQuadEngine().public_metric(MODEL, loaders(9), projection=metric(False), **public)["projection"]
    subspace = dataclasses.replace(learned, damping=1.0).build(P, None, CPU, torch.float64)
    inverse = torch.linalg.inv(dense(subspace))
    xi = (inverse @ torch.from_numpy(flat(plain) - flat(MODEL))).numpy()
    record = engine.accountant.releases[-1]
    c = record.regularization * record.nominal_size * (record.mu / record.max_grad_norm) ** 2
    variance = public_variance(c, record.regularization, record.nominal_size, record.radius, P)
    expected = flat(MODEL) + subspace.lift(torch.from_numpy(subspace.shrunk(xi, variance, LAYOUT))).numpy()
    assert flat(denoised) == pytest.approx(expected, abs=2e-5)
    assert np.abs(flat(denoised) - flat(plain)).max() > 1e-2


def test_the_same_is_charged_with_and_without():
    engines = [seeded(), seeded()]
    for engine, denoise in zip(engines, [False, True], strict=True):
        release(loaders(1), denoise, engine=engine, rounds=3)
    first, second = (engine.accountant.releases for engine in engines)
    assert len(first) == 3
    assert first == second
    assert engines[0].get_epsilon(1e-5) == engines[1].get_epsilon(1e-5)


def test_release_from_statistics_denoises_too():
    """As the recipe says with which they were gathered."""
    arguments = {"max_grad_norm": 1.0, "max_curvature": 0.0, "criterion": nn.CrossEntropyLoss()}
    plain, denoised = (
        flat(
            seeded().release(ExpMQuadEngine().gather(MODEL, loaders(1), None, projection=recipe, **arguments), 0.1, 1.0)
        )
        - flat(MODEL)
        for recipe in (Sparse(), Sparse(denoise=True))
    )
    assert np.linalg.norm(denoised) < 0.7 * np.linalg.norm(plain)


def test_a_training_loop_denoises_as_one_call_does():
    loader = loaders(1)
    expected = release(loader, True, rounds=2)
    module = nn.Sequential(nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 3))
    module.load_state_dict(MODEL.state_dict())
    module, optimizer, criterion, batches = seeded().make_private_with_epsilon(
        grad_sample_mode="ghost",
        module=module, optimizer=torch.optim.SGD(module.parameters(), lr=0.1), criterion=nn.CrossEntropyLoss(),
        data_loader=loader, target_epsilon=1.0, target_delta=1e-5, epochs=2, max_grad_norm=1.0, radius=2.0, proj_dim=None,
        projection=metric(True), public_loader=loaders(9), progress=False,
    )  # fmt: skip
    for _ in range(2):
        for x, y in batches:
            optimizer.zero_grad()
            criterion(module(x), y).backward()
            optimizer.step()
    assert flat(module) == pytest.approx(flat(expected), abs=1e-6)


@pytest.mark.parametrize(
    "changes", [{"max_curvature": 1.0}, {"max_curvature": None, "projection": Sparse(denoise=True)}]
)
def test_private_curvature_is_refused_before_anything_is_charged(changes):
    engine = ExpMQuadEngine()
    with pytest.raises(ValueError, match=r"denoise=True needs .* max_curvature=0"):
        release(loaders(1), True, engine=engine, **changes)
    assert not engine.accountant.releases


def test_private_curvature_in_statistics_is_refused():
    """Where they are gathered, and where they were changed since, where they are released."""
    engine = ExpMQuadEngine()
    arguments = {"max_grad_norm": 1.0, "max_curvature": 1.0, "criterion": nn.CrossEntropyLoss()}
    with pytest.raises(ValueError, match="denoise=True"):
        engine.gather(MODEL, loaders(1), 5, projection=Sparse(denoise=True), **arguments)
    statistics = engine.gather(MODEL, loaders(1), 5, projection=Sparse(seed=0), **arguments)
    with pytest.raises(ValueError, match="denoise=True"):
        engine.release(dataclasses.replace(statistics, subspace=Sparse(0, denoise=True)), 1.0, 1.0)
    assert not engine.accountant.releases
