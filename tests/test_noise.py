"""Noise: the operating system's unless a generator is given, which the ledger records and a budget refuses."""

import random
import warnings

import numpy as np
import pytest
import torch
from scipy import stats
from small_problem import GOOD, Untouchable, gathered, make_loader, make_model, same
from torch.utils.data import DataLoader, TensorDataset

from opacus_expm import ExpMAccountant, ExpMQuadEngine, NoGuarantee, NotGuaranteed, Sparse, Stiefel
from opacus_expm.gathering.samples import sampled
from opacus_expm.mechanism import secure
from opacus_expm.mechanism.choices import isotropic_noise
from opacus_expm.mechanism.secure import FAILURE_PROBABILITY, SystemNoise
from opacus_expm.noise import Noise


def _seed_everything():
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)


def test_global_seeds_do_not_fix_the_noise():
    statistics = gathered()
    results = []
    for _ in range(2):
        _seed_everything()
        results.append(ExpMQuadEngine().release(statistics, 1.0, 0.5))
    assert not same(*results)


def test_global_seeds_fix_neither_noise_nor_subspace_of_a_whole_call():
    engines = [ExpMQuadEngine(), ExpMQuadEngine()]
    results = []
    for used in engines:
        _seed_everything()
        options = GOOD | {"projection": "sparse"}
        results.append(used.make_private_expm(make_model(), make_loader(), 1.0, 0.5, 5, **options))
    assert not same(*results)
    first, second = (used.accountant.releases[0].seed for used in engines)
    assert first != second


def test_noise_does_not_advance_the_global_generators():
    statistics = gathered()
    _seed_everything()
    before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    ExpMQuadEngine().release(statistics, 1.0, 0.5)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.random.get_state()[1].tolist() == before[1]
    assert random.getstate() == before[2]


@pytest.mark.parametrize("make", [lambda: torch.Generator().manual_seed(5), lambda: np.random.default_rng(5)])
def test_an_explicit_generator_fixes_the_noise(make):
    statistics, used = gathered(), ExpMQuadEngine(noise_generator=make())
    first, second = (used.release(statistics, 1.0, 0.5) for _ in range(2))
    again = ExpMQuadEngine(noise_generator=make()).release(statistics, 1.0, 0.5)
    assert not same(first, second)
    assert same(first, again)
    assert used.get_epsilon() == 2.0


def test_a_given_generator_is_recorded_and_said():
    used = ExpMQuadEngine(noise_generator=np.random.default_rng(0))
    options = {name: value for name, value in GOOD.items() if name != "max_grad_norm"}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="a private bound for epsilon")
        used.make_private_expm(make_model(), make_loader(), 1.0, 0.5, 5, **options)
    assert [(type(e).__name__, e.noise) for e in used.accountant.releases] == [
        ("Purchase", "given"),
        ("Release", "given"),
    ]
    with pytest.warns(NotGuaranteed, match=r"^2 of 2 draws in this ledger took their noise from a given") as said:
        used.get_epsilon()
    assert said[0].filename == __file__
    other = ExpMQuadEngine()
    other.make_private_expm(make_model(), make_loader(), 1.0, 0.5, 5, **GOOD)
    assert [e.noise for e in other.accountant.releases] == ["system"]


def test_secure_mode_has_no_use_for_a_generator():
    drawn = []
    for _ in range(2):
        used = ExpMQuadEngine(secure_mode=True, noise_generator=np.random.default_rng(0))
        drawn.append(used.release(gathered(), 1.0, 0.5))
        assert [e.noise for e in used.accountant.releases] == ["system"]
    assert not same(*drawn)


def test_a_budget_refuses_a_generator_before_any_data_is_touched():
    ledger = ExpMAccountant(budget=(5.0, 0.0))
    used = ExpMQuadEngine(accountant=ledger, noise_generator=np.random.default_rng(0))
    loader = DataLoader(Untouchable(), batch_size=8)
    with pytest.raises(NoGuarantee, match="noise_generator cannot be used with a budget"):
        used.make_private_expm(make_model(), loader, 1.0, 0.5, 5, **GOOD)
    with pytest.raises(NoGuarantee, match="noise_generator cannot be used with a budget"):
        used.release(gathered(), 1.0, 0.5)
    with pytest.raises(NoGuarantee, match="noise_generator cannot be used with a budget"):
        used.gather(make_model(), loader, 5, criterion=GOOD["criterion"], epsilon=1.0)
    assert len(ledger) == 0
    other = ExpMQuadEngine(accountant=ledger)
    other.release(gathered(), 1.0, 0.5)
    assert other.remaining() == 4.0


@pytest.mark.parametrize("make", [lambda: torch.Generator().manual_seed(5), lambda: np.random.default_rng(5)])
def test_one_call_and_two_steps_draw_the_same(make):
    model, loader = make_model(torch.float64), make_loader(torch.float64)
    whole = ExpMQuadEngine(noise_generator=make()).make_private_expm(model, loader, 1.0, 0.5, 5, **GOOD)
    steps = ExpMQuadEngine(noise_generator=make()).release(gathered(model, loader), 1.0, 0.5)
    assert same(whole, steps)


@pytest.mark.parametrize("recipe", [Sparse, Stiefel])
def test_a_seed_fixes_the_subspace(recipe):
    whole = torch.arange(1.0, 6.0, dtype=torch.float64)
    first, again, other = (gathered(projection=recipe(seed=seed)).projection.lift(whole) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.allclose(first, other)


# --- The object ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value", [0, "seed", random.Random(0), np.random.RandomState(0)], ids=lambda v: type(v).__name__
)
def test_what_is_no_generator_is_refused(value):
    for make in (Noise, lambda generator: ExpMQuadEngine(noise_generator=generator)):
        with pytest.raises(
            TypeError, match=r"noise_generator must be a torch\.Generator, a numpy\.random\.Generator"
        ) as said:
            make(value)
        assert repr(value) in str(said.value)


def test_where_noise_comes_from_is_said():
    given = np.random.default_rng(0)
    assert [(n.origin, n.sampler) for n in (Noise(), Noise(given), Noise(secure=True), Noise(given, True))] == [
        ("system", "exact"),
        ("given", "exact"),
        ("system", "secure"),
        ("system", "secure"),
    ]
    assert Noise().failure_probability == 0.0
    assert Noise(secure=True).failure_probability == FAILURE_PROBABILITY > 0


def test_a_torch_generator_is_advanced_and_seeds_a_numpy_one():
    generator = torch.Generator().manual_seed(5)
    noise, before = Noise(generator), generator.get_state()
    first, second = noise.source().random(3), noise.source().random(3)
    assert not torch.equal(generator.get_state(), before)
    assert not np.array_equal(first, second)
    assert np.array_equal(first, Noise(torch.Generator().manual_seed(5)).source().random(3))


def test_secure_uniforms_are_the_systems():
    """Neither the global seeds nor a generator that was given play a part."""
    found = []
    for _ in range(2):
        _seed_everything()
        found.append(Noise(np.random.default_rng(0), True).source().random(4))
    assert not np.array_equal(*found)
    assert isinstance(Noise(secure=True).source(), SystemNoise)


def _seeded_system(monkeypatch, seed=4):
    """The operating system's noise, replaced by a seeded stream."""
    monkeypatch.setattr(secure.os, "urandom", random.Random(seed).randbytes)


def test_secure_sums_have_their_noise_and_lie_on_the_grid(monkeypatch):
    _seeded_system(monkeypatch)
    noise, total = Noise(secure=True), torch.linspace(-1e4, 1e4, 20_000, dtype=torch.float64)
    found = (noise.added(total, noise.source().standard_normal(len(total)), 3.0) - total).numpy() / 3.0
    for scale, fits in ((1.0, True), (0.9, False), (0.5, False)):
        assert (stats.kstest(found / scale, "norm").pvalue > 1e-3) == fits
    on_grid = (found * 3.0 + total.numpy()) / (3.0 * secure.SUM_GRID)
    np.testing.assert_allclose(on_grid, np.round(on_grid), atol=1e-6)
    plain = Noise(np.random.default_rng(0))
    off = plain.added(total, plain.source().standard_normal(len(total)), 3.0).numpy() / (3.0 * secure.SUM_GRID)
    assert np.abs(off - np.round(off)).max() > 0.4


def test_sums_that_differ_by_less_than_the_grid_lie_on_the_same_one(monkeypatch):
    """The last bits of an answer say nothing: both data sets have the same possible answers."""
    numbers = []
    for total in (0.1, 0.1 + 1e-7):
        _seeded_system(monkeypatch)
        noise = Noise(secure=True)
        z = noise.source().standard_normal(2000)
        numbers.append(noise.added(torch.full((2000,), total, dtype=torch.float64), z, 1.0).numpy())
    assert np.mean(numbers[0] == numbers[1]) > 0.999  # all but those next to a step
    assert np.mean(numbers[0] == (0.1 + 1e-7 + z)) < 0.01  # without the grid every one of them would tell


def test_gamma_numbers_have_their_law(monkeypatch):
    _seeded_system(monkeypatch)
    for shape in (1, 3, 40):
        found = [SystemNoise().standard_gamma(shape) for _ in range(4000)]
        assert stats.kstest(found, stats.gamma(shape).cdf).pvalue > 1e-3
        for wrong in (stats.gamma(shape + 1), stats.gamma(shape, scale=0.9)):
            assert stats.kstest(found, wrong.cdf).pvalue < 1e-3


def _isotropic(monkeypatch, k, seed, change):
    """Isotropic noise of secure mode from the same random bits, with its uniform numbers changed."""
    right = secure.uniforms
    with monkeypatch.context() as patch:
        _seeded_system(patch, seed)
        patch.setattr(secure, "uniforms", lambda words, bits=64: change(right(words, bits)))
        return isotropic_noise(k, SystemNoise())


@pytest.mark.parametrize("k", [1, 2, 3, 50, 3000])
def test_isotropic_noise_is_moved_by_less_than_a_sixteenth_of_the_grid(k, monkeypatch):
    """By the bits that are not drawn, as far as they could move a uniform number; after 12 bits they would be too many."""

    def moved(change):
        pairs = ((_isotropic(monkeypatch, k, seed, c) for c in (lambda u: u, change)) for seed in range(60))
        return max(np.abs(one - other).max() for one, other in pairs)

    assert 0 < moved(lambda u: u * (1 + 2.0**-51) + 2.0**-128) < secure.SUM_GRID / 16
    assert moved(lambda u: u * (1 + 2.0**-12 * np.arange(1, len(u) + 1) / len(u))) > secure.SUM_GRID / 16


def test_spawned_generators_are_ordinary_and_the_systems():
    found = []
    for _ in range(2):
        _seed_everything()
        found += [g.random(3) for g in Noise(np.random.default_rng(0), True).source().spawn(2)]
    assert len({tuple(f) for f in found}) == 4


def test_a_secure_poisson_sample_has_its_rate(monkeypatch):
    _seeded_system(monkeypatch)
    data = torch.arange(4000.0)[:, None]
    loader = DataLoader(TensorDataset(data, data), batch_size=64)
    taken = [len(sampled(loader, 0.3, Noise(secure=True).source()).dataset) for _ in range(20)]
    for rate, fits in ((0.3, True), (0.32, False)):
        assert (stats.binomtest(sum(taken), 80_000, rate).pvalue > 1e-3) == fits


def test_a_generators_state_is_not_shown():
    """A seed that is printed makes the noise predictable."""
    assert repr(Noise(np.random.default_rng(0))) == "Noise(secure=False)"


def test_numbers_that_are_drawn_ahead_change_no_others():
    """With a numpy generator, which is one stream for everything else; the others have a stream for each."""
    for generator in (np.random.default_rng(0), torch.Generator().manual_seed(0), None):
        noise = Noise(generator)
        apart, source = noise.apart(), noise.source()
        before = source.bit_generator.state
        assert len(set(apart.integers(2**62, size=10))) == 10
        assert source.bit_generator.state == before
    first, second = (Noise(np.random.default_rng(0)).apart().standard_normal(3) for _ in range(2))
    assert np.array_equal(first, second)
    assert not np.array_equal(first, np.random.default_rng(0).standard_normal(3))
