"""Parameters in units of their own: the same as a model written in those units; and where units come from."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from reference import dense, looked_up, projected, random_map
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from opacus_expm import ExpMQuadEngine, Preconditioned
from opacus_expm.subspaces.full import FullSpace
from opacus_expm.subspaces.layout import Layout
from opacus_expm.subspaces.preconditioned import PreconditionedMap, Scaled
from opacus_expm.subspaces.scales import measured_scales
from opacus_expm.subspaces.stiefel import Columns
from opacus_expm.suggestion import Candidate, default_candidates, suggest

UNITS = {"0.weight": 0.3, "0.bias": 4.0, "2.bias": 7.0}  # the last weight is left at 1
CRITERION = nn.MSELoss()


def make_model():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()


class InUnits(nn.Module):
    """The same function of parameters that are measured in units: θ = s·φ."""

    def __init__(self, model, units):
        super().__init__()
        self.layers, self.units = nn.Sequential(*model), units
        with torch.no_grad():
            for name, parameter in self.layers.named_parameters():
                parameter.div_(units.get(name, 1.0))

    def forward(self, x):
        own = {name: self.units.get(name, 1.0) * p for name, p in self.layers.named_parameters()}
        return torch.func.functional_call(self.layers, own, (x,))


def records(seed, count=40):
    x = torch.randn(count, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return TensorDataset(x, x.sum(1, keepdim=True))


def loader(dataset):
    return DataLoader(dataset, batch_size=16)


def flat(module):
    return torch.cat([p.detach().flatten() for p in module.parameters()])


OPTIONS = {
    "criterion": CRITERION, "max_grad_norm": 0.4, "max_curvature": 0.2, "progress": False,
}  # fmt: skip


def metric(scales=None, **settings):
    return Preconditioned(**{"rank": 5, "damping": 0.1, "seed": 1, "scales": scales, **settings})


# --- What units do ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["hooks", "functorch"])
@pytest.mark.parametrize("dim", [3, 9, None])
def test_scales_are_a_model_written_in_their_units(dim, mode):
    """Statistics, clipping included, and releases with the same noise."""
    private, public = loader(records(0)), loader(records(7))
    options = {**OPTIONS, "public_loader": public}
    model, twin = make_model(), InUnits(make_model(), UNITS)
    engine = ExpMQuadEngine()
    found = engine.gather(model, private, dim, projection=metric(UNITS), grad_sample_mode=mode, **options)
    plain = engine.gather(model, private, dim, projection=metric(), grad_sample_mode=mode, **options)
    expected = engine.gather(twin, private, dim, projection=metric(), grad_sample_mode="functorch", **options)
    assert found.projection.dim == expected.projection.dim
    assert found.projection.seed == expected.projection.seed
    # Eigenvectors have signs of their own.
    signs = (dense(found.projection) * dense(expected.projection)).sum(0).sign()
    if dim != 3:
        assert (signs == 1).all()
    assert torch.allclose(found.sums.gradient * signs, expected.sums.gradient, rtol=0, atol=1e-6)
    assert torch.allclose(found.sums.curvature * signs[:, None] * signs, expected.sums.curvature, rtol=0, atol=1e-6)
    assert not torch.allclose(plain.sums.gradient.abs(), expected.sums.gradient.abs(), rtol=0, atol=1e-2)
    units = Layout.of(model).spread("scales", UNITS)
    here, there = (
        found.module_at(np.full(found.projection.dim, 0.5) * signs.numpy()),
        expected.module_at(np.full(found.projection.dim, 0.5)),
    )
    assert torch.allclose(flat(here), units * flat(there), rtol=0, atol=1e-6)


def test_a_release_moves_parameters_by_their_units():
    """Round after round, as the model in those units does; hooks and loops included."""
    private, public = loader(records(0)), loader(records(7))
    options = {
        **OPTIONS, "max_curvature": 0.0, "public_loader": public, "rounds": 3, "delta": 1e-5,
    }  # fmt: skip

    def engine():
        return ExpMQuadEngine(noise_generator=np.random.default_rng(0))

    def release(model, scales=None, **more):
        return engine().make_private_expm(model, private, 5.0, 0.5, None, projection=metric(scales), **options, **more)

    units = Layout.of(make_model()).spread("scales", UNITS)
    found, plain = release(make_model(), UNITS), release(make_model())
    expected = release(InUnits(make_model(), UNITS), grad_sample_mode="functorch")
    assert torch.allclose(flat(found), units * flat(expected), rtol=0, atol=1e-6)
    assert (flat(plain) - flat(found)).abs().max() > 0.1
    module = make_model()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    module, optimizer, criterion, batches = engine().make_private_with_epsilon(
        grad_sample_mode="ghost",
        module=module, optimizer=optimizer, criterion=CRITERION, data_loader=private, target_epsilon=5.0,
        target_delta=1e-5, epochs=3, max_grad_norm=0.4, radius=0.5, proj_dim=None,
        projection=metric(UNITS), public_loader=public, progress=False,
    )  # fmt: skip
    for _ in range(3):
        for x, y in batches:
            optimizer.zero_grad()
            criterion(module(x), y).backward()
            optimizer.step()
    assert torch.allclose(flat(module), flat(found), rtol=0, atol=1e-6)


def test_one_record_stays_within_its_bound():
    """Clipped after the units, however large: what a record can change is what is paid for."""
    huge = dict.fromkeys(dict(make_model().named_parameters()), 1e6)
    options = {**OPTIONS, "projection": metric(huge, damping=1e9), "public_loader": loader(records(7))}
    found = ExpMQuadEngine().gather(make_model(), loader(records(0, 1)), None, **options)
    assert float(found.sums.gradient.norm()) == pytest.approx(0.4, rel=1e-9)  # it is clipped
    assert float(torch.linalg.matrix_norm(found.sums.curvature, 2)) == pytest.approx(0.2, rel=1e-9)


@pytest.mark.filterwarnings("ignore:using grad_sample_mode='functorch'")  # of the model in units
def test_the_public_metric_is_that_of_the_units():
    public = loader(records(7))
    options = {"damping_share": 0.25, "quantile": 0.6, "criterion": CRITERION}
    engine = ExpMQuadEngine()
    found = engine.public_metric(make_model(), public, projection=metric(UNITS), **options)
    expected = engine.public_metric(InUnits(make_model(), UNITS), public, projection=metric(), **options)
    plain = engine.public_metric(make_model(), public, projection=metric(), **options)
    assert found["projection"].scales == UNITS
    for read in (lambda m: m["projection"].damping, lambda m: m["max_grad_norm"]):
        assert read(found) == pytest.approx(read(expected), rel=1e-6)
        assert read(plain) != pytest.approx(read(found), rel=0.1)
    assert {m["max_curvature"] for m in (found, expected, plain)} == {0.0}


@st.composite
def scaled(draw):
    """Any base, with or without curvature, and any units."""
    size = draw(st.integers(1, 30))
    kind, dim = draw(st.sampled_from(["stiefel", "sparse", "full"])), draw(st.integers(1, size))
    inner = random_map(kind, size, dim, 5)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    if draw(st.booleans()):
        vectors = torch.linalg.qr(torch.randn(size, min(3, size), generator=generator, dtype=torch.float64))[0]
        inner = PreconditionedMap.through(inner, vectors, torch.ones(vectors.shape[1], dtype=torch.float64), 0.3)
    return Scaled(inner, torch.rand(size, generator=generator, dtype=torch.float64) + 0.1)


@given(scaled(), st.data())
def test_scaled_is_the_dense_map_from_all_sides(projection, data):
    a = projection.scales[:, None] * dense(projection.inner)
    assert (projection.kind, projection.seed) == (projection.inner.kind, projection.inner.seed)
    assert torch.allclose(dense(projection), a, rtol=0, atol=1e-12)
    rows = torch.randn(4, projection.size, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    cut = data.draw(st.integers(0, projection.size))
    assert torch.allclose(projected(projection, rows, [cut]), rows @ a, rtol=0, atol=1e-12)
    # A table of ``count`` rows at ``start``, of which some are looked up.
    start = data.draw(st.integers(0, projection.size - 1))
    width = data.draw(st.integers(1, projection.size - start))
    count = data.draw(st.integers(1, (projection.size - start) // width))
    index = torch.tensor([[data.draw(st.integers(0, count - 1)) for _ in range(3)]])
    values = torch.randn(1, 3, width, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    table = looked_up(values, index, start, projection.size)
    out = torch.zeros(1, projection.width, dtype=torch.float64)
    projection.add_looked_up(out, values, index, count, start)
    assert torch.allclose(projection.finish(out), table @ a, rtol=0, atol=1e-12)


def test_statistics_in_other_units_are_not_added_up():
    options = {**OPTIONS, "public_loader": loader(records(7))}
    parts = [
        ExpMQuadEngine().gather(make_model(), loader(records(seed)), None, projection=metric(units), **options)
        for seed, units in enumerate((UNITS, UNITS, UNITS | {"2.weight": 1.5}))
    ]
    assert parts[0].merge(parts[1]).nominal_size == 80
    with pytest.raises(ValueError, match="statistics with another projection's settings cannot be merged"):
        parts[0].merge(parts[2])


def test_noise_is_taken_out_in_the_draws_own_coordinates():
    """Where it is the same in all of them, whatever the units."""
    layout = Layout.of(make_model())
    draw = np.random.default_rng(0).standard_normal(layout.size)
    inner = FullSpace(layout.size)
    units = layout.spread("scales", UNITS)
    found, expected = (projection.shrunk(draw, 0.5, layout) for projection in (Scaled(inner, units), inner))
    assert np.array_equal(found, expected)
    assert np.abs(found - draw).max() > 0.1


# --- What is refused -------------------------------------------------------------------------------------------------


class Untouchable(Dataset):
    """Records that must not be read."""

    def __len__(self):
        return 40

    def __getitem__(self, index):
        raise AssertionError("data was touched")


@pytest.mark.parametrize(
    ("scales", "message"),
    [
        ({"0.weigth": 2.0}, r"scales names '0.weigth', .* it has 0.weight, 0.bias, 2.weight"),
        ({"0.bias": 0.0}, r"scales\['0.bias'\] must be greater than 0, got 0.0"),
    ],
)
def test_bad_scales_cost_nothing(scales, message):
    """What else can be wrong with them is in the tests of the layout and of the recipe."""
    engine, data = ExpMQuadEngine(), loader(Untouchable())
    options = {**OPTIONS, "projection": metric(scales), "public_loader": loader(Untouchable())}
    for call in (
        lambda: engine.make_private_expm(make_model(), data, 1.0, 0.5, 3, **options),
        lambda: engine.gather(make_model(), data, 3, **options),
        lambda: engine.public_metric(
            make_model(), data, damping_share=0.1, projection=metric(scales), criterion=CRITERION
        ),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    assert len(engine.accountant) == 0


# --- Where they come from --------------------------------------------------------------------------------------------


def wide_layout():
    """Tensors so large that sixty-four draws tell their share of the noise to a few parts in a thousand."""
    return Layout.of(nn.Sequential(nn.Linear(60, 40, bias=False), nn.Linear(40, 80, bias=False)))  # 2,400 and 3,200


@pytest.mark.parametrize("ratio", [0.25, 1.0, 9.0])
def test_units_are_signal_over_noise(ratio):
    """With ``ratio`` times as much signal a coordinate in the first tensor: s² has that ratio, Σ s²d = Σ d."""
    layout = wide_layout()
    first, _ = (place for _, _, place in layout.slices())
    gradient = torch.ones(layout.size, dtype=torch.float64)
    gradient[first] = math.sqrt(ratio)
    found = measured_scales(layout, FullSpace(layout.size), 3 * gradient, 5 * gradient)
    one, other = found["0.weight"] ** 2, found["1.weight"] ** 2
    assert one / other == pytest.approx(ratio, rel=0.02)
    assert one * 2400 + other * 3200 == pytest.approx(5600, rel=0.02)
    # Through a map that makes the first tensor's noise four times as large, signal being given by the same map.
    louder = torch.ones(layout.size, dtype=torch.float64)
    louder[first] = 2.0
    found = measured_scales(layout, Scaled(FullSpace(layout.size), louder), gradient, gradient)
    assert (found["0.weight"] / found["1.weight"]) ** 2 == pytest.approx(ratio, rel=0.02)
    found = measured_scales(layout, Scaled(FullSpace(layout.size), louder), gradient / louder, gradient / louder)
    assert (found["0.weight"] / found["1.weight"]) ** 2 == pytest.approx(ratio / 4, rel=0.02)


def test_what_records_differ_by_is_no_signal():
    """Noise that is not the same in either half: the square of a sum would take it for signal, their product does not."""
    layout = wide_layout()
    first, _ = (place for _, _, place in layout.slices())
    halves = []
    for seed in (0, 1):
        gradient = torch.ones(layout.size, dtype=torch.float64)
        noise = torch.randn(layout.size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        gradient[first] += 3 * noise[first]
        halves.append(gradient)
    found = measured_scales(layout, FullSpace(layout.size), *halves)
    assert (found["0.weight"] / found["1.weight"]) ** 2 == pytest.approx(1, abs=0.55)  # its deviation is 0.19
    twice = measured_scales(layout, FullSpace(layout.size), halves[0], halves[0])
    assert (twice["0.weight"] / twice["1.weight"]) ** 2 > 9


def test_without_signal_units_are_one_and_no_tensor_stands_still():
    layout = wide_layout()
    zero = torch.zeros(layout.size, dtype=torch.float64)
    assert measured_scales(layout, FullSpace(layout.size), zero, zero) == {"0.weight": 1.0, "1.weight": 1.0}
    _, second = (place for _, _, place in layout.slices())
    only = zero.clone()
    only[second] = 1.0
    found = measured_scales(layout, FullSpace(layout.size), only, only)
    assert found["0.weight"] == 0.1
    assert found["1.weight"] == pytest.approx(math.sqrt(5600 / 3200), rel=0.01)
    # A tensor that the map leaves alone has neither.
    vectors = torch.zeros(layout.size, 2, dtype=torch.float64)
    vectors[second.start, 0] = vectors[second.start + 1, 1] = 1.0
    found = measured_scales(layout, Columns(vectors, None), torch.ones(2).double(), torch.ones(2).double())
    assert found == {"0.weight": 1.0, "1.weight": pytest.approx(1.0)}


# --- In a rehearsal --------------------------------------------------------------------------------------------------

SHIFTED = Candidate("preconditioned", None, 2, 1.0, damping_share=0.1, public_rank=5, shifted=False, scaled=True)


def rehearsed(*candidates, **changes):
    public = loader(records(7, 400))
    arguments = {"criterion": CRITERION, "candidates": candidates, "shift": lambda x: x + 1.0}
    return suggest(make_model(), public, 1.0, 1e-5, 2000, **{**arguments, **changes})


def test_a_rehearsal_measures_units_and_passes_them_on():
    found = rehearsed(SHIFTED)
    assert "bound at 0.8 of the norms, scaled, bounds from records as they are" in str(found)
    units = found.arguments()["projection"].scales
    assert set(units) == set(Layout.of(make_model()).names)
    assert max(units.values()) > 1.2  # the shift is not the same to all tensors
    assert min(units.values()) < 0.9
    assert rehearsed(SHIFTED, seed=0).arguments()["projection"].scales == units
    engine = ExpMQuadEngine()
    arguments = found.arguments() | {"delta": 1e-5, "criterion": CRITERION, "progress": False}
    engine.make_private_expm(make_model(), loader(records(0)), 1.0, **arguments)
    assert engine.get_epsilon(1e-5) == pytest.approx(1.0, rel=1e-9)
    plain = rehearsed(dataclasses.replace(SHIFTED, scaled=False))
    assert plain.arguments()["projection"].scales is None
    assert plain.tried[0][1] != found.tried[0][1]


def test_units_need_a_metric():
    with pytest.raises(ValueError, match="damping_share must be given for candidates with scaled=True"):
        rehearsed(Candidate("stiefel", 3, 1, 0.5, scaled=True))


@pytest.mark.parametrize("views", [False, True])
def test_units_are_tried_where_noise_decides(views):
    tried = default_candidates(10_000, 1e-5, views=views)
    [scaled] = [candidate for candidate in tried if candidate.scaled]
    assert (scaled.seen, scaled.proj_dim) == (views, 800)
    assert dataclasses.replace(scaled, scaled=False) in tried
    assert not any(c.scaled for size, delta in ((10_000, 0.0), (500, 1e-5)) for c in default_candidates(size, delta))
