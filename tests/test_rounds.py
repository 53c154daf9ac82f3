"""Several rounds through the engine: the same as one after the other by hand, the budget split in advance, no leaks."""

import copy
import dataclasses
import math
import warnings

import numpy as np
import pytest
import quick
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from opacus_expm import (
    BudgetExceeded,
    ExpMAccountant,
    ExpMQuadEngine,
    Purchase,
    Release,
    Sparse,
    Stiefel,
)
from opacus_expm.accounting import composition
from opacus_expm.bounds import Bounds
from opacus_expm.gathering.measurement import Measurement
from opacus_expm.mechanism import curves
from opacus_expm.mechanism.calibration import allowances
from opacus_expm.rounds import Budget, Plan, Rounds

FEATURES, RECORDS, DIM = 3, 40, 4
GIVEN = {"max_grad_norm": 1.0, "max_curvature": 0.5}
OPTIONS = {"criterion": nn.MSELoss(), "projection": Sparse(seed=7)}


def make_model():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(FEATURES, 4), nn.Tanh(), nn.Linear(4, 1)).double()


def make_tensors(seed=0, records=RECORDS):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(records, FEATURES, generator=generator, dtype=torch.float64)
    return x, x.sum(1, keepdim=True) + 0.1 * torch.randn(records, 1, generator=generator, dtype=torch.float64)


def make_loader(seed=0):
    return DataLoader(TensorDataset(*make_tensors(seed)), batch_size=16)


def flat(module):
    return torch.cat([p.detach().flatten() for p in module.parameters()])


def draws(engine):
    return [event for event in engine.accountant.releases if isinstance(event, Release)]


def closed_total(events, delta):
    """The total without numerical composition, which would only make it less."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(composition, "_prv_epsilon", lambda *_: math.inf)
        return composition.total_epsilon(events, [], delta).epsilon


# --- The same as by hand ---------------------------------------------------------------------------------------------


def by_hand(epsilon, radii, *, fresh_subspace=True, go_on=True, delta=0.0, **options):
    """Gather, release, gather at the release, release, …: the results of all rounds."""
    engine, module, found = ExpMQuadEngine(noise_generator=np.random.default_rng(5)), make_model(), []
    recipe = options.get("projection", Sparse())
    for number, radius in enumerate(radii):
        gathering = {key: options[key] for key in ("max_grad_norm", "max_curvature") if key in options}
        statistics = engine.gather(
            module,
            make_loader(),
            DIM,
            criterion=nn.MSELoss(),
            projection=recipe.seeded(7 + number if fresh_subspace else 7),
            **gathering,
        )
        released = engine.release(
            statistics, epsilon, radius, delta=delta, regularization=options.get("regularization")
        )
        found.append(released)
        module = released if go_on else module
    return found


def in_one_call(epsilon, radii, **options):
    engine = ExpMQuadEngine(noise_generator=np.random.default_rng(5))
    found = engine.make_private_expm(
        make_model(),
        make_loader(),
        epsilon,
        radii,
        DIM,
        rounds=len(radii) if isinstance(radii, list) else 3,
        **OPTIONS | options,
    )
    return found, engine


@pytest.mark.parametrize("epsilon", quick.only([3.0], [3.0, 3e9]))
@pytest.mark.parametrize(
    "options",
    [
        GIVEN,
        {"max_grad_norm": 1.0, "max_curvature": 0.0},
        GIVEN | {"regularization": 0.0},
        GIVEN | {"projection": Stiefel(seed=7)},
    ],
    ids=["default", "gradient", "no ridge", "stiefel"],
)
def test_rounds_are_what_gather_and_release_make_one_after_the_other(epsilon, options):
    """Bit by bit: each from the last release, on a fresh subspace, with its own radius and a third of ε."""
    radii = [0.5, 0.3, 0.1]
    found, engine = in_one_call(epsilon, radii, **options)
    assert torch.equal(flat(found), flat(by_hand(epsilon / 3, radii, **options)[-1]))
    # The comparison can tell: one subspace for all, every round from the start, or the radii in another order.
    for wrong in (
        by_hand(epsilon / 3, radii, fresh_subspace=False, **options),
        by_hand(epsilon / 3, radii, go_on=False, **options),
        by_hand(epsilon / 3, radii[::-1], **options),
    ):
        assert float((flat(found) - flat(wrong[-1])).norm()) > 1e-3
    assert engine.get_epsilon() == pytest.approx(epsilon, rel=1e-15)


def test_gaussian_rounds_are_those_of_the_smaller_budget():
    """μ/√T each: as a release whose (ε′, δ) has that μ."""
    options = GIVEN | {"regularization": 50.0}
    delta, radii = 1e-5, [0.5, 0.3, 0.1]
    smaller = curves.gaussian_epsilon(curves.gaussian_mu(1.0, delta) / math.sqrt(3), delta)
    found, engine = in_one_call(1.0, radii, delta=delta, **options)
    assert [r.calibration for r in draws(engine)] == ["gaussian"] * 3
    expected = by_hand(smaller, radii, delta=delta, **options)[-1]
    torch.testing.assert_close(flat(found), flat(expected), rtol=0, atol=1e-7)
    third = by_hand(1.0 / 3, radii, delta=delta, **options)[-1]
    assert float((flat(found) - flat(third)).norm()) > 1e-3


def test_rounds_go_further_than_one():
    """Without noise to speak of, three rounds with a small radius leave the ball of a single one, and the loss falls."""
    x, y = make_tensors()
    losses = []
    for rounds in (1, 3):
        private = ExpMQuadEngine().make_private_expm(
            make_model(), make_loader(), 1e9, 0.3, None, rounds=rounds, **OPTIONS, **GIVEN
        )
        losses.append(float(nn.functional.mse_loss(private(x), y).detach()))
        distance = float((flat(private) - flat(make_model())).norm())
        assert (distance > 0.3) is (rounds == 3)
    start = float(nn.functional.mse_loss(make_model()(x), y).detach())
    assert losses[1] < losses[0] < start


# --- What is charged -------------------------------------------------------------------------------------------------


def test_every_round_is_an_event_of_its_own():
    radii = (0.5, 0.25, 0.125)
    model = make_model()
    before = copy.deepcopy(model.state_dict())
    engine = ExpMQuadEngine()
    private = engine.make_private_expm(model, make_loader(), 0.9, radii, DIM, rounds=3, **OPTIONS, **GIVEN)
    found = engine.accountant.releases
    assert len(engine.accountant) == len(found) == 3
    assert [r.round for r in found] == [1, 2, 3]
    assert {r.rounds for r in found} == {3}
    assert [r.seed for r in found] == [7, 8, 9]
    assert tuple(r.radius for r in found) == radii
    assert {(r.epsilon, r.delta, r.bounds) for r in found} == {(0.9, 0.0, "given")}
    assert [r.epsilon_range for r in found] == [0.9 / 3] * 3
    # The model that came is untouched, and the one that goes is a plain one.
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert type(private) is type(model)
    assert not any(len(m._forward_hooks) for m in private.modules())


def test_one_radius_serves_all_rounds():
    same, _ = in_one_call(3.0, 0.3, **GIVEN)
    assert torch.equal(flat(same), flat(in_one_call(3.0, [0.3, 0.3, 0.3], **GIVEN)[0]))


def test_subspaces_are_fresh_without_a_seed():
    engine = ExpMQuadEngine()
    engine.make_private_expm(make_model(), make_loader(), 1.0, 0.3, DIM, rounds=4, criterion=nn.MSELoss(), **GIVEN)
    assert len({r.seed for r in engine.accountant.releases}) == 4


@pytest.mark.parametrize("radii", [[0.1, 0.2], [], (0.1, 0.2, 0.3, 0.4)])
def test_radii_are_one_or_one_a_round(radii):
    engine = ExpMQuadEngine()
    message = rf"radius must be one number, or one for each of rounds=3, got {len(radii)} of them"
    with pytest.raises(ValueError, match=message):
        engine.make_private_expm(make_model(), untouchable(), 1.0, radii, DIM, rounds=3, **OPTIONS, **GIVEN)
    assert len(engine.accountant) == 0


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, "0.1", None])
def test_every_radius_is_checked(bad):
    engine = ExpMQuadEngine()
    with pytest.raises((TypeError, ValueError), match="radius must be"):
        engine.make_private_expm(make_model(), untouchable(), 1.0, [0.1, bad, 0.1], DIM, rounds=3, **OPTIONS, **GIVEN)
    assert len(engine.accountant) == 0


@settings(max_examples=500)
@example(0.0625, 1e-8, 2, [])
@given(
    st.floats(-4, 1.5).map(lambda x: 10**x),
    st.floats(-12, -1).map(lambda x: 10**x),
    st.integers(2, 16),
    st.lists(st.floats(1e-3, 0.05), max_size=2),
)
def test_a_gaussian_split_adds_up_to_its_budget_and_no_more(epsilon, delta, rounds, shares):
    """Not even by the rounding of a root: a declared budget admits a plan that has just its size."""
    prices = [share * epsilon for share in shares]
    way = allowances(epsilon, delta, prices=prices, rounds=rounds)[-1]
    total = math.hypot(*[way.mu] * rounds, *map(curves.bounded_range_mu, prices))
    assume(way.mu > 0)
    assert curves.gaussian_epsilon(total, delta) <= epsilon
    assert curves.gaussian_epsilon(total * (1 + 1e-6), delta) > epsilon


@pytest.mark.slow
@settings(max_examples=60)
@given(
    st.floats(1e-2, 20.0),
    st.sampled_from([0.0, 1e-8, 1e-5, 1e-2]),
    st.integers(1, 5),
    st.sampled_from([GIVEN, {"max_grad_norm": 1.0}, {}, {"max_curvature": 0.0}]),
    st.sampled_from(["add_remove", "replace_one"]),
    st.sampled_from([0.0, 1e-3, 10.0, None]),
    st.floats(-2, 1),
    st.floats(-2, 1),
)
def test_the_total_of_all_rounds_is_what_was_asked_for(
    epsilon, delta, rounds, known, adjacency, regularization, first, last
):
    """Purchases included, by range or by μ, and with a budget of just that declared."""
    radii = list(np.logspace(first, last, rounds))
    engine = ExpMQuadEngine(budget=(epsilon, delta), adjacency=adjacency)
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("ignore", UserWarning)  # so few records make purchases unreliable
        patch.setattr(composition, "_prv_epsilon", lambda *_: math.inf)  # a plan must fit without it
        engine.make_private_expm(
            make_model(),
            make_loader(),
            epsilon,
            radii,
            DIM,
            delta=delta,
            rounds=rounds,
            regularization=regularization,
            **OPTIONS | known,
        )
    events = engine.accountant.releases
    bought = [event for event in events if isinstance(event, Purchase)]
    missing = {(): 2, ("max_grad_norm",): 1, ("max_curvature",): 1}
    assert len(bought) == missing.get(tuple(known), 0)
    assert len(events) == len(bought) + rounds
    assert {draw.bounds for draw in events[len(bought) :]} == {"bought" if bought else "given"}
    total = closed_total(events, delta)
    assert total <= epsilon * (1 + 1e-12)
    pure = math.fsum(event.epsilon_range for event in events)
    if delta == 0:
        assert pure == pytest.approx(epsilon, rel=1e-12)
    methods = {draw.calibration for draw in draws(engine)}
    if rounds > 1 and methods == {"gaussian"}:
        mus = [draw.mu for draw in draws(engine)] + [curves.bounded_range_mu(p.epsilon_range) for p in bought]
        assert curves.gaussian_epsilon(math.hypot(*mus), delta) == pytest.approx(epsilon, rel=1e-9)


@pytest.mark.parametrize("radii", [[10.0, 1e-3], [10.0, 1e-3, 10.0], [1e-3, 10.0]])
@pytest.mark.parametrize("known", [GIVEN, {}], ids=["given", "bought"])
def test_rounds_by_range_and_by_mu_share_one_budget(radii, known):
    """λ being fixed, a small radius is served better by range and a large one by μ; the plan holds for both in turn."""
    engine = ExpMQuadEngine(budget=(1.0, 1e-5))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        engine.make_private_expm(
            make_model(),
            make_loader(),
            1.0,
            radii,
            DIM,
            rounds=len(radii),
            delta=1e-5,
            regularization=1.0,
            nominal_size=1000,
            **OPTIONS | known,
        )
    assert len(draws(engine)) == len(radii)
    if radii[0] == 10.0 and known:
        assert [r.calibration for r in draws(engine)] == ["gaussian" if r == 10.0 else "range" for r in radii]
    assert closed_total(engine.accountant.releases, 1e-5) <= 1.0


def test_nothing_is_left_after_all_rounds():
    engine = ExpMQuadEngine(budget=(1.0, 1e-5))
    options = OPTIONS | GIVEN | {"regularization": 50.0}
    engine.make_private_expm(make_model(), make_loader(), 1.0, 0.3, DIM, rounds=4, delta=1e-5, **options)
    assert len(engine.accountant) == 4
    assert engine.remaining() == 0.0
    with pytest.raises(BudgetExceeded):
        engine.make_private_expm(make_model(), untouchable(), 1e-3, 0.3, DIM, rounds=2, **options)
    assert len(engine.accountant) == 4


def test_all_rounds_are_refused_together():
    engine = ExpMQuadEngine(budget=(1.0, 0.0))
    with pytest.raises(BudgetExceeded, match=r"epsilon=1\.1, delta=0 would exceed .* epsilon=1 still fits"):
        engine.make_private_expm(make_model(), untouchable(), 1.1, 0.3, DIM, rounds=11, **OPTIONS, **GIVEN)
    assert len(engine.accountant) == 0


def test_purchases_that_leave_no_room_by_mu_leave_the_draws_to_the_range():
    """At a tiny δ two purchases are worth more than μ(ε, δ), so that no draw by μ is left."""
    engine = ExpMQuadEngine(budget=(1.0, 1e-300))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        engine.make_private_expm(make_model(), make_loader(), 1.0, 0.3, DIM, rounds=2, delta=1e-300, **OPTIONS)
    assert [draw.calibration for draw in draws(engine)] == ["range", "range"]
    assert closed_total(engine.accountant.releases, 1e-300) <= 1.0


# --- Passes over the data --------------------------------------------------------------------------------------------


class Watched(Dataset):
    """Counts reads, and fails from a given one on."""

    def __init__(self, fail_after=None, seed=0):
        self.tensors, self.reads, self.fail_after = make_tensors(seed), 0, fail_after

    def __len__(self):
        return RECORDS

    def __getitem__(self, index):
        if self.fail_after is not None and self.reads >= self.fail_after:
            raise KeyboardInterrupt
        self.reads += 1
        return tuple(t[index] for t in self.tensors)


def untouchable():
    return DataLoader(Watched(fail_after=0), batch_size=16)


def test_one_pass_a_round():
    records, public = Watched(), Watched(seed=1)
    engine = ExpMQuadEngine()
    engine.make_private_expm(
        make_model(),
        DataLoader(records, batch_size=16),
        1.0,
        0.3,
        DIM,
        rounds=3,
        public_loader=DataLoader(public, batch_size=16),
        **OPTIONS,
    )
    assert records.reads == 3 * RECORDS
    assert public.reads == RECORDS  # bounds are those of the first round
    found = engine.accountant.releases
    assert {r.bounds for r in found} == {"public"}
    assert len({(r.max_grad_norm, r.max_curvature) for r in found}) == 1


@pytest.mark.filterwarnings("ignore:a private bound")
@pytest.mark.parametrize("known", [GIVEN, {}], ids=["given", "bought"])
@pytest.mark.parametrize("where", [RECORDS, RECORDS + 20])
def test_an_interrupted_round_leaves_those_before_charged(known, where):
    """The second round's pass fails: one draw (and its purchases) in the ledger, and no plan left behind."""
    records, engine = Watched(fail_after=where), ExpMQuadEngine(budget=(1.0, 0.0))
    model = make_model()
    with pytest.raises(KeyboardInterrupt):
        engine.make_private_expm(model, DataLoader(records, batch_size=16), 1.0, 0.3, DIM, rounds=2, **OPTIONS | known)
    events = engine.accountant.releases
    assert [type(event) for event in events] == [Purchase] * (0 if known else 2) + [Release]
    assert events[-1].round == 1
    spent = math.fsum(event.epsilon_range for event in events)
    assert spent == pytest.approx(0.5 if known else 0.55, rel=1e-12)
    assert engine.accountant._running() is None
    assert torch.equal(flat(model), flat(make_model()))
    # A later request is judged on its own: what is left fits, more does not, whatever the plan would have allowed.
    with pytest.raises(BudgetExceeded):
        engine.make_private_expm(make_model(), untouchable(), 1.05 - spent, 0.3, DIM, **OPTIONS, **GIVEN)
    engine.make_private_expm(make_model(), make_loader(), engine.remaining(), 0.3, DIM, **OPTIONS, **GIVEN)
    assert engine.get_epsilon() <= 1.0


@settings(max_examples=40)
@given(
    st.floats(0.05, 20.0),
    st.sampled_from([0.0, 1e-8, 1e-5]),
    st.integers(1, 5),
    st.sampled_from(["add_remove", "replace_one"]),
    st.sampled_from([0.0, 1.0, None]),
)
def test_one_theorem_covers_all_that_may_follow_what_was_bought(epsilon, delta, rounds, adjacency, regularization):
    """Which list of a plan is charged depends on the bought bounds, so it must not matter: see ``accountant.admit``.

    Position by position, the worst of all lists: basic composition with one draw, or Gaussian composition.
    """
    admitted = []

    class Seen(Exception):
        pass

    def admit(self, alternatives, *_, **__):
        admitted.extend(alternatives)
        raise Seen

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ExpMAccountant, "admit", admit)
        with pytest.raises(Seen):
            ExpMQuadEngine(adjacency=adjacency).make_private_expm(
                *(make_model(), untouchable(), epsilon, 0.3, DIM),
                delta=delta,
                rounds=rounds,
                regularization=regularization,
                nominal_size=20_000,
                **OPTIONS,
            )
    assert len({tuple(plan[:2]) for plan in admitted}) == 1  # the same two purchases
    bought, draws = admitted[0][:2], [set(column) for column in zip(*(plan[2:] for plan in admitted), strict=True)]
    assert len(draws) == rounds
    pure = math.fsum(event.epsilon_range for event in bought)
    alone = [max(composition._single_epsilon(event, delta) for event in events) for events in draws]
    ranges = [max(event.epsilon_range for event in events) for events in draws]
    mus = [
        max(min(event.mu, curves.bounded_range_mu(event.epsilon_range)) for event in events)
        for events in [*([event] for event in bought), *draws]
    ]
    covers = {
        "pure": math.fsum([pure, *ranges]),
        "basic": pure + alone[0] if rounds == 1 else math.inf,
        "gaussian": curves.gaussian_epsilon(math.hypot(*mus), delta),
    }
    assert min(covers.values()) <= epsilon * (1 + 1e-9), covers


def test_an_interrupted_gaussian_plan_is_not_taken_up_again():
    """What passed as part of a plan for the whole (ε, δ) does not pass again by itself."""
    records, engine = Watched(fail_after=2 * RECORDS + 1), ExpMQuadEngine(budget=(1.0, 1e-5))
    options = OPTIONS | GIVEN | {"delta": 1e-5, "regularization": 50.0}
    with pytest.raises(KeyboardInterrupt):
        engine.make_private_expm(make_model(), DataLoader(records, batch_size=16), 1.0, 0.3, DIM, rounds=3, **options)
    assert [r.round for r in engine.accountant.releases] == [1, 2]
    last = dataclasses.replace(engine.accountant.releases[-1], round=3)
    with pytest.raises(BudgetExceeded):
        engine.accountant.record(last)
    with pytest.raises(BudgetExceeded):
        engine.make_private_expm(make_model(), untouchable(), 1.0, 0.3, DIM, rounds=3, **options)
    assert len(engine.accountant) == 2


def test_a_draw_that_fails_is_charged_and_ends_the_run():
    class Broken(np.random.Generator):
        calls = 0

        def standard_normal(self, *arguments, **options):
            Broken.calls += 1
            if len(engine.accountant) == 2:
                raise KeyboardInterrupt
            return super().standard_normal(*arguments, **options)

    engine = ExpMQuadEngine(noise_generator=Broken(np.random.PCG64(0)))
    with pytest.raises(KeyboardInterrupt):
        engine.make_private_expm(make_model(), make_loader(), 0.9, 0.3, DIM, rounds=3, **OPTIONS, **GIVEN)
    assert Broken.calls > 1
    assert engine.get_epsilon() == pytest.approx(0.6, rel=1e-15)


def test_another_process_between_rounds_has_the_rest_judged(tmp_path):
    """While the second round gathers, another engine charges the same ledger: the second draw no longer fits."""
    path = tmp_path / "ledger.jsonl"

    class Meddling(Watched):
        def __getitem__(self, index):
            if self.reads == RECORDS:
                other.record(Release(**taken.to_dict() | {"mu": math.inf}))
            return super().__getitem__(index)

    draft = ExpMQuadEngine()
    draft.make_private_expm(make_model(), make_loader(), 0.2, 0.3, DIM, regularization=0.0, **OPTIONS, **GIVEN)
    taken = draft.accountant.releases[0]
    other = ExpMAccountant(ledger_path=path)
    engine = ExpMQuadEngine(budget=(1.0, 0.0), ledger_path=path)
    with pytest.raises(BudgetExceeded, match=r"a pure release of at most epsilon=0\.3 still fits"):
        engine.make_private_expm(
            make_model(), DataLoader(Meddling(), batch_size=16), 1.0, 0.3, DIM, rounds=2, **OPTIONS, **GIVEN
        )
    assert [r.epsilon_range for r in engine.accountant.releases] == [0.5, 0.2]
    assert engine.get_epsilon() == pytest.approx(0.7, rel=1e-15)


def test_secure_rounds_carry_their_failures():
    engine = ExpMQuadEngine(secure_mode=True, budget=(1.0, 1e-5))
    engine.make_private_expm(make_model(), make_loader(), 1.0, 0.3, DIM, rounds=3, **OPTIONS, **GIVEN)
    found = engine.accountant.releases
    assert [r.sampler for r in found] == ["secure"] * 3
    assert all(r.failure_probability > 0 for r in found)
    assert engine.get_epsilon(0.0) == math.inf
    assert engine.get_epsilon(1e-5) <= 1.0


# --- What was asked --------------------------------------------------------------------------------------------------


def make_plan(rounds=3, **changes):
    """A plan as ``make_private_expm`` makes it."""
    asked = {
        "budget": Budget.of(1.0, 1e-5, 0.3, None, rounds),
        "bounds": Bounds(),
        "measurement": Measurement(Sparse(seed=7), DIM, criterion=nn.MSELoss(), nominal_size=20_000),
    }
    return Plan(**asked | changes)


def test_a_budget_is_one_radius_or_one_for_each_round():
    assert Budget.of(1.0, 0.0, 0.3, None, 3).radii == (0.3, 0.3, 0.3)
    assert Budget.of(1.0, 0.0, [0.3, 0.1], None, 2).radii == (0.3, 0.1)


@pytest.mark.parametrize(
    ("values", "word"),
    [
        ((0.0, 0.0, (0.1,)), "epsilon"),
        ((1.0, 1.0, (0.1,)), "delta"),
        ((1.0, 0.0, (0.1, -0.1)), "radius"),
        ((1.0, 0.0, (0.1,), -1.0), "regularization"),
    ],
)
def test_a_budget_is_checked_when_it_is_made(values, word):
    with pytest.raises(ValueError, match=f"{word} must be"):
        Budget(*values)


def test_a_plan_lists_every_way_in_which_it_may_be_charged():
    """Two purchases, then three draws: by range, and by μ where there is a ridge and a δ."""
    plan, books = make_plan(), ExpMQuadEngine().books()
    prices = plan.prices(make_loader())
    found = plan.charges(prices, books)
    assert {len(way) for way in found} == {2 + 3}
    assert {tuple(event.epsilon_range for event in way[:2]) for way in found} == {tuple(prices.values())}
    assert any(math.isfinite(way[-1].mu) for way in found)
    assert any(math.isfinite(way[-1].epsilon_range) for way in found)
    flat_plan = make_plan(budget=Budget.of(1.0, 1e-5, 0.3, 0.0, 3))
    assert not any(math.isfinite(way[-1].mu) for way in flat_plan.charges(prices, books))
    pure = make_plan(budget=Budget.of(1.0, 0.0, 0.3, None, 3))
    assert not any(math.isfinite(way[-1].mu) for way in pure.charges(prices, books))


def test_a_plan_buys_nothing_where_bounds_are_known_or_public():
    assert make_plan(bounds=Bounds(1.0, 1.0)).prices(make_loader()) == {}
    assert make_plan(public_loader=make_loader(1)).prices(make_loader()) == {}
    assert list(make_plan().prices(make_loader())) == ["max_grad_norm", "max_curvature"]


def test_secure_plans_count_their_failures():
    plan, books = make_plan(), ExpMQuadEngine(secure_mode=True).books()
    for way in plan.charges(plan.prices(make_loader()), books):
        assert [event.failure_probability > 0 for event in way] == [False, False, True, True, True]


def test_a_given_up_plan_reserves_nothing():
    """Rounds are admitted when they are made, and nothing else takes their place until they are given up."""
    engine = ExpMQuadEngine(budget=(0.9, 0.0))
    plan = make_plan(budget=Budget.of(0.9, 0.0, 0.3, None, 3), bounds=Bounds(1.0, 0.5))
    rounds = Rounds(plan, make_loader(), engine.books())
    assert rounds.count == 3
    statistics = rounds.begin(make_model(), 0).over(make_loader())
    assert len(engine.accountant) == 0
    rounds.draw(statistics, 0)
    assert engine.get_epsilon() == pytest.approx(0.3, rel=1e-15)
    assert engine.remaining() == 0.0
    rounds.end()
    assert engine.accountant._running() is None
    assert engine.remaining() == pytest.approx(0.6, rel=1e-5)
    with pytest.raises(BudgetExceeded):
        Rounds(plan, make_loader(), engine.books())
