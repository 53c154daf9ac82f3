"""Calibration: closed forms, the better of the valid ones, splits of a budget, and the density ratio by quadrature."""

import math

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from opacus_expm import ExpMQuadEngine, paper
from opacus_expm.accounting import composition
from opacus_expm.accounting.events import PlannedEvent
from opacus_expm.mechanism import curves
from opacus_expm.mechanism.calibration import (
    Allowance,
    allowances,
    calibrate,
    calibrate_within,
    default_regularization,
    remainder,
)
from opacus_expm.mechanism.sensitivity import Sensitivity

MARGIN = 1 - 1e-6


def _calibrate(sensitivity, **changes):
    options = {"epsilon": 1.0, "delta": 0.0, "radius": 0.7, "regularization": 0.0, "nominal_size": 1000}
    return calibrate(sensitivity, **{**options, **changes})


def test_range_is_epsilon_over_width():
    sensitivity = Sensitivity(1.3, 2.0, False, "add_remove")
    found = _calibrate(sensitivity, epsilon=2.5)
    assert found.inverse_temperature == pytest.approx(2.5 / sensitivity.width(0.7) * MARGIN, rel=1e-12)
    assert (found.epsilon_range, found.mu, found.method) == (2.5, math.inf, "range")


def test_replace_one_halves_the_temperature():
    add = _calibrate(Sensitivity(1.3, 2.0, False, "add_remove"))
    replace = _calibrate(Sensitivity(1.3, 2.0, False, "replace_one"))
    assert add.inverse_temperature == pytest.approx(2 * replace.inverse_temperature, rel=1e-12)


def test_gaussian_formula():
    sensitivity = Sensitivity(1.3, 2.0, False, "add_remove")
    found = _calibrate(sensitivity, delta=1e-5, regularization=3.0, calibration="gaussian")
    mu = curves.gaussian_mu(1.0, 1e-5)
    assert found.inverse_temperature == pytest.approx(3000 * (mu / (1.3 + 0.7 * 2.0)) ** 2 * MARGIN, rel=1e-9)
    assert found.mu == mu


def test_paper_formula_and_what_it_really_spends():
    sensitivity = Sensitivity(1.3, 2.0, False, "add_remove")
    found = paper.calibrate(sensitivity, 1.0, 0.7)
    c = 1.0 / (2 * (2 * 0.7 * 1.3 + 0.7**2 * 2.0))
    assert found.inverse_temperature == pytest.approx(c * MARGIN, rel=1e-12)
    assert found.epsilon_range == pytest.approx(c * sensitivity.width(0.7), rel=1e-12)
    assert found.epsilon_range < 0.5
    assert (found.mu, found.method) == (math.inf, "paper")


@pytest.mark.parametrize("adjacency", ["add_remove", "replace_one"])
@given(st.floats(1e-3, 1e3), st.floats(0, 1e3), st.floats(1e-3, 1e3))
def test_the_papers_calibration_costs_no_more_than_is_charged_whatever_the_bounds(adjacency, c_g, c_h, radius):
    found = paper.calibrate(Sensitivity(c_g, c_h, False, adjacency), 1.0, radius)
    most = paper.cost_whatever_the_bounds(1.0, adjacency)
    assert found.epsilon_range <= most * (1 + 1e-12)
    if c_h == 0:  # reached
        assert found.epsilon_range == pytest.approx(most)


@pytest.mark.parametrize("adjacency", ["add_remove", "replace_one"])
def test_a_draw_by_the_papers_calibration_is_not_charged_by_what_was_bought(adjacency):
    """A cost that followed from the bound that happened to come out would bound nothing where another one comes out."""
    x = torch.randn(3000, 3, generator=torch.Generator().manual_seed(0))
    bought, charged = set(), set()
    for seed in range(4):
        loader = DataLoader(TensorDataset(x, (1 + seed) * x.sum(1, keepdim=True)), batch_size=1000)
        engine = ExpMQuadEngine(adjacency=adjacency, noise_generator=np.random.default_rng(seed))
        statistics = engine.gather(nn.Linear(3, 1), loader, 3, criterion=nn.MSELoss(), epsilon=1.0)
        paper.release(engine.books(), statistics, 1.0, 0.3)
        draw = engine.accountant.releases[-1]
        bought.add((draw.max_grad_norm, draw.max_curvature))
        charged.add(draw.epsilon_range)
    assert len(bought) > 1
    assert charged == {1.0 if adjacency == "replace_one" else 0.5}


@given(st.floats(0.01, 20), st.floats(1e-9, 0.1), st.floats(0.0, 10.0), st.floats(0.01, 3.0), st.floats(0.0, 5.0))
def test_auto_takes_the_larger_valid_temperature(epsilon, delta, ridge, radius, curvature):
    sensitivity = Sensitivity(1.0, curvature, False, "add_remove")
    options = {"epsilon": epsilon, "delta": delta, "regularization": ridge, "radius": radius}
    auto = _calibrate(sensitivity, **options)
    others = [_calibrate(sensitivity, **options, calibration="range")]
    if ridge > 0:
        others.append(_calibrate(sensitivity, **options, calibration="gaussian"))
    assert auto.inverse_temperature == max(o.inverse_temperature for o in others)
    # Whatever was chosen is (ε, δ)-DP by one of the two curves.
    spent = min(curves.bounded_range_epsilon(auto.epsilon_range, delta), curves.gaussian_epsilon(auto.mu, delta))
    assert spent <= epsilon * (1 + 1e-12)
    assert spent == pytest.approx(epsilon, rel=1e-6, abs=1e-6)


@pytest.mark.parametrize(("delta", "ridge"), [(0.0, 1.0), (1e-5, 0.0)])
def test_gaussian_needs_delta_and_ridge(delta, ridge):
    with pytest.raises(ValueError, match="calibration='gaussian' needs delta > 0 and regularization > 0"):
        _calibrate(Sensitivity(1, 1, False, "add_remove"), delta=delta, regularization=ridge, calibration="gaussian")


# --- several draws from one budget ----------------------------------------------------------------------------------

BUDGETS = st.floats(1e-2, 50.0)
DELTAS = st.one_of(st.just(0.0), st.floats(1e-10, 0.1))
SHARES = st.lists(st.floats(1e-4, 0.05), max_size=2)  # of a budget that purchases of bounds take
ROUNDS = st.integers(1, 30)


def closed_total(events, delta):
    """The total without numerical composition, which would only make it less."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(composition, "_prv_epsilon", lambda *_: math.inf)
        return composition.total_epsilon(events, [], delta).epsilon


def plans(way: Allowance, prices, rounds, *, ridge=True):
    """What a way may come to cost: every draw by range, every draw by μ, or some by the one and some by the other."""
    purchases = [PlannedEvent(price) for price in prices]
    by_range = PlannedEvent(way.epsilon_range)
    found = [[*purchases, *[by_range] * rounds]]
    if way.mu > 0 and ridge:
        by_mu = PlannedEvent(math.inf, way.mu)
        found.append([*purchases, *[by_mu] * rounds])
        if rounds > 1:
            found.append([*purchases, *[by_range, by_mu] * (rounds // 2), *[by_mu] * (rounds % 2)])
    return found


def within(way, epsilon, delta, prices, rounds, *, ridge=True):
    """Whether a way keeps everything within the budget."""
    return all(closed_total(p, delta) <= epsilon * (1 + 1e-9) for p in plans(way, prices, rounds, ridge=ridge))


@settings(max_examples=150)
@given(BUDGETS, DELTAS, SHARES, ROUNDS, st.booleans())
@example(50.0, 1e-10, [0.05, 0.05], 30, True)
@example(1e-2, 0.1, [0.05, 0.05], 1, True)
def test_every_way_to_split_a_budget_stays_within_it(epsilon, delta, shares, rounds, ridge):
    prices = [share * epsilon for share in shares]
    ways = allowances(epsilon, delta, prices=prices, rounds=rounds, ridge=ridge)
    assert ways
    for way in ways:
        assert way.epsilon_range > 0
        assert within(way, epsilon, delta, prices, rounds, ridge=ridge)
        assert math.fsum([*prices, *[way.epsilon] * rounds]) <= epsilon * (1 + 1e-12)


@settings(max_examples=100)
@given(BUDGETS, DELTAS, ROUNDS)
def test_without_purchases_a_budget_is_spent_exactly(epsilon, delta, rounds):
    pure, *others = allowances(epsilon, delta, rounds=rounds)
    if delta == 0 or rounds > 1:
        assert pure.epsilon_range * rounds == pytest.approx(epsilon, rel=1e-12)
        assert pure.mu == 0
    if delta == 0:
        assert others == []
        return
    (gaussian,) = others or [pure]
    drawn = [PlannedEvent(math.inf, gaussian.mu)] * rounds
    assert closed_total(drawn, delta) == pytest.approx(epsilon, rel=1e-9)
    if rounds > 1:  # a draw by range is as hard to tell apart as one by μ
        by_range = curves.bounded_range_mu(gaussian.epsilon_range)
        assert by_range == pytest.approx(gaussian.mu, rel=1e-10)
    else:
        assert closed_total([PlannedEvent(gaussian.epsilon_range)], delta) == pytest.approx(epsilon, rel=1e-9)


@settings(max_examples=100)
@given(BUDGETS, DELTAS, st.lists(st.floats(1e-3, 0.05), min_size=1, max_size=2), ROUNDS)
def test_purchases_and_draws_together_spend_the_budget(epsilon, delta, shares, rounds):
    """By basic composition for one draw or a pure budget; by μ for several."""
    prices = [share * epsilon for share in shares]
    (way,) = allowances(epsilon, delta, prices=prices, rounds=rounds)
    if delta == 0:
        assert math.fsum([*prices, *[way.epsilon_range] * rounds]) == pytest.approx(epsilon, rel=1e-12)
    elif rounds == 1:
        by_range = curves.bounded_range_epsilon(way.epsilon_range, delta)
        by_mu = curves.gaussian_epsilon(way.mu, delta)
        assert math.fsum([*prices, by_range]) == pytest.approx(epsilon, rel=1e-9)
        assert math.fsum([*prices, by_mu]) == pytest.approx(epsilon, rel=1e-9)
    else:
        mu = math.hypot(*map(curves.bounded_range_mu, prices), math.sqrt(rounds) * way.mu)
        assert curves.gaussian_epsilon(mu, delta) == pytest.approx(epsilon, rel=1e-8)


def test_wrong_splits_are_noticed():
    """The check of the first test above, on splits that spend too much."""
    epsilon, delta, rounds, prices = 2.0, 1e-5, 8, [0.1, 0.05]
    mu = curves.gaussian_mu(epsilon, delta)
    right = mu / math.sqrt(rounds)
    assert within(Allowance(1.0, curves.bounded_range_within(right), right), epsilon, delta, [], rounds)
    grown = mu / rounds**0.4
    assert not within(Allowance(1.0, curves.bounded_range_within(grown), grown), epsilon, delta, [], rounds)
    # By μ right, by range not: Rényi composition has room for a range somewhat above that of μ, not for this one.
    assert not within(Allowance(1.0, 1.6 * curves.bounded_range_within(right), right), epsilon, delta, [], rounds)
    # Purchases not taken out.
    assert not within(Allowance(1.0, curves.bounded_range_within(right), right), epsilon, delta, prices, rounds)
    assert not within(Allowance(epsilon / rounds, epsilon / rounds, 0.0), epsilon, 0.0, prices, rounds)
    assert within(Allowance(1.85 / rounds, 1.85 / rounds, 0.0), epsilon, 0.0, prices, rounds)
    # The (ε, δ) of one draw for each of two.
    (alone,) = allowances(epsilon / 2, delta)
    assert not within(alone, epsilon / 2, delta, [], 2)


def test_bought_bounds_leave_no_choice_between_ways():
    """Which split is taken must not depend on what was bought, so there is only one."""
    for delta in (0.0, 1e-5):
        for rounds in (1, 4):
            for ridge in (False, True):
                ways = allowances(1.0, delta, prices=[0.05], rounds=rounds, ridge=ridge)
                assert len(ways) == 1
                if rounds > 1:
                    assert (ways[0].mu > 0) is (delta > 0 and ridge)
    assert len(allowances(1.0, 1e-5, rounds=4)) == 2


def test_purchases_beyond_the_gaussian_budget_leave_the_pure_split():
    """At a tiny δ, μ(ε, δ) is less than what the purchases are worth."""
    prices = [0.05, 0.05]
    assert math.hypot(*map(curves.bounded_range_mu, prices)) > curves.gaussian_mu(1.0, 1e-300)
    (way,) = allowances(1.0, 1e-300, prices=prices, rounds=3)
    assert (way.mu, way.epsilon_range) == (0.0, pytest.approx(0.3, rel=1e-12))


@given(st.floats(1e-6, 1e6), st.lists(st.floats(1e-9, 0.2), min_size=1, max_size=4))
def test_what_remains_never_adds_up_to_more(epsilon, shares):
    spent = math.fsum(share * epsilon for share in shares)
    left = remainder(epsilon, spent)
    assert math.fsum((left, spent)) <= epsilon
    assert left == pytest.approx(epsilon - spent, rel=1e-12)


@given(BUDGETS, DELTAS, ROUNDS, st.floats(0.0, 5.0), st.floats(0.01, 3.0), st.integers(1, 10**5))
def test_a_draw_costs_no_more_than_allowed(epsilon, delta, rounds, curvature, radius, size):
    """By its range or by its μ, whichever gave the temperature."""
    sensitivity = Sensitivity(1.0, curvature, False, "add_remove")
    for way in allowances(epsilon, delta, rounds=rounds):
        found = calibrate_within(way, sensitivity, radius=radius, regularization=0.5, nominal_size=size)
        cost = {"range": (found.epsilon_range, way.epsilon_range), "gaussian": (found.mu, way.mu)}[found.method]
        assert cost[0] == cost[1]
        # And these are the cost of the temperature that was chosen.
        c = found.inverse_temperature / MARGIN
        assert found.epsilon_range == pytest.approx(c * sensitivity.width(radius), rel=1e-9)
        assert found.mu == pytest.approx(sensitivity.lipschitz(radius) * math.sqrt(c / (0.5 * size)), rel=1e-9)


# --- the default ridge ----------------------------------------------------------------------------------------------


@given(
    st.integers(1, 40),
    st.integers(1, 6),
    st.floats(1e-3, 1e3),
    st.floats(1e-3, 1e3),
    st.integers(0, 2**32 - 1),
    st.booleans(),
)
def test_the_default_ridge_keeps_the_step_in_the_ball(size, dim, bound, radius, seed, aligned):
    """Without private curvature, |G|/(λN) ≤ R for any N records that were clipped; reached when all point one way."""
    ridge = default_regularization(bound, 0.0, radius=radius, proj_dim=dim, rank=0)
    random = np.random.default_rng(seed)
    records = np.tile(random.standard_normal(dim), (size, 1)) if aligned else random.standard_normal((size, dim))
    records *= bound * random.uniform(1, 3) / np.linalg.norm(records, axis=1, keepdims=True)
    clipped = records * np.minimum(1, bound / np.linalg.norm(records, axis=1, keepdims=True))
    step = np.linalg.norm(clipped.sum(0)) / (ridge * size)
    assert step <= radius * (1 + 1e-12)
    # Public curvature in the metric or any S ⪰ 0 only shortens it.
    root = random.standard_normal((dim, dim))
    shorter = np.linalg.solve(root @ root.T + ridge * size * np.eye(dim), clipped.sum(0))
    assert np.linalg.norm(shorter) <= step * (1 + 1e-9)
    if aligned:
        assert step == pytest.approx(radius, rel=1e-9)
        assert np.linalg.norm(clipped.sum(0)) / (0.999 * ridge * size) > radius  # a smaller ridge would not do


@given(st.integers(1, 8), st.integers(1, 8), st.floats(1e-3, 1e3), st.integers(0, 2**32 - 1))
def test_with_private_curvature_the_default_ridge_is_what_one_record_can_have(dim, rows, bound, seed):
    """The trace of λ·I is the largest trace that one clipped record of that rank can have."""
    rank = min(dim, rows)
    ridge = default_regularization(1.0, bound, radius=0.1, proj_dim=dim, rank=rank)
    factor = np.random.default_rng(seed).standard_normal((rows, dim))
    curvature = factor.T @ factor
    curvature *= bound / np.linalg.norm(curvature, 2)
    assert np.trace(curvature) <= dim * ridge * (1 + 1e-12)
    flat = np.linalg.qr(factor.T)[0] if rows < dim else np.eye(dim)  # all eigenvalues at the bound
    assert np.trace(bound * flat @ flat.T) == pytest.approx(dim * ridge, rel=1e-12)


# --- the density ratio itself ---------------------------------------------------------------------------------------


def _log_density(c, gradient, curvature, ridge, grid, radius):
    """Normalised log density on the points of a square grid that lie in the ball, and the mask."""
    inside = (grid**2).sum(-1) <= radius**2
    quadratic = grid @ gradient + 0.5 * np.einsum("...i,ij,...j", grid, curvature + ridge * np.eye(2), grid)
    log_p = np.where(inside, -c * quadratic, -np.inf)
    top = log_p.max()
    return log_p - top - np.log(np.exp(log_p - top).sum()), inside


def _largest_loss(sensitivity, *, epsilon, radius, base_g, base_s, g, h, c_factor=1.0, points=801):
    """max |ln p_D − ln p_D′| over the ball, D′ = D plus one record (g, h)."""
    c = c_factor * _calibrate(sensitivity, epsilon=epsilon, radius=radius).inverse_temperature
    axis = np.linspace(-radius, radius, points)
    grid = np.stack(np.meshgrid(axis, axis, indexing="ij"), -1)
    before, inside = _log_density(c, base_g, base_s, 0.0, grid, radius)
    after, _ = _log_density(c, base_g + g, base_s + h, 0.0, grid, radius)
    return np.abs(after[inside] - before[inside]).max()


@pytest.mark.parametrize("epsilon", [0.5, 2.0])
@pytest.mark.parametrize("seed", range(4))
def test_privacy_loss_never_exceeds_epsilon(epsilon, seed):
    random = np.random.default_rng(seed)
    sensitivity = Sensitivity(1.3, 2.0, False, "add_remove")
    direction = random.standard_normal(2)
    root = random.standard_normal((2, 2))
    h = root @ root.T
    loss = _largest_loss(
        sensitivity,
        epsilon=epsilon,
        radius=0.7,
        base_g=random.standard_normal(2) * 20,
        base_s=np.diag(random.uniform(0, 30, 2)),
        g=1.3 * direction / np.linalg.norm(direction),
        h=2.0 * h / np.linalg.norm(h, 2),
    )
    assert loss <= epsilon


def _extremal_pair(radius, c_g, c_h):
    """Gradient, curvature, and the two points of the ball between which the utility changes by W*."""
    r = radius * c_h / c_g
    x = r / (1 + math.sqrt(1 + 2 * r * r))
    d = 2 * radius * math.sqrt(1 - x * x) * np.array([1.0, 0.0])
    s = 2 * radius * x * np.array([0.0, 1.0])
    # −½dᵀHs is largest, ¼C_H|d||s|, for the projector on d − s in the plane of unit vectors.
    v = np.array([1.0, -1.0]) / math.sqrt(2)
    return -c_g * np.array([1.0, 0.0]), c_h * np.outer(v, v), (s + d) / 2, (s - d) / 2


@pytest.mark.parametrize("epsilon", [0.5, 2.0])
def test_extremal_pair_almost_reaches_epsilon_and_a_larger_temperature_breaks_it(epsilon):
    """Under a strongly tilted base the normalising constants stop helping, and the loss comes close to ε."""
    radius, c_g, c_h = 0.7, 1.3, 4.0
    sensitivity = Sensitivity(c_g, c_h, False, "add_remove")
    g, h, best, worst = _extremal_pair(radius, c_g, c_h)
    reached = (-best @ g - 0.5 * best @ h @ best) - (-worst @ g - 0.5 * worst @ h @ worst)
    assert reached == pytest.approx(sensitivity.width(radius), rel=1e-9)
    tilted = {"epsilon": epsilon, "radius": radius, "base_s": np.zeros((2, 2)), "g": g, "h": h}
    # All the mass of the base at one of the two points: the other one then shows the whole range.
    loss = _largest_loss(sensitivity, **tilted, base_g=-4000.0 * worst)
    assert 0.99 * epsilon < loss <= epsilon
    assert _largest_loss(sensitivity, **tilted, base_g=-4000.0 * worst, c_factor=1.02) > epsilon


def test_size_that_follows_the_data_breaks_the_claim():
    """With λN tracking n, one record also changes the ridge: the true width at R=C_g=C_H=1, λ=3 is 3.125 > 2.5."""
    simple_bound = 2 * 1 * 1 + 0.5 * 1 * 1
    points = np.linspace(-1, 1, 200_001)
    utility = -points - 0.5 * points**2 - 0.5 * 3 * points**2
    assert Sensitivity(1.0, 1.0, False, "add_remove").width(1.0) <= simple_bound
    assert utility.max() - utility.min() == pytest.approx(3.125, abs=1e-6)
