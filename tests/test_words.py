"""Words about a release: what they say, when something looks wrong, and that every number in them is public."""

import copy
import logging
import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from opacus_expm import ExpMQuadEngine, audit, words
from opacus_expm.pure import PureRule
from opacus_expm.rule import Rule
from tests.small_problem import GOOD, PARAMETERS, flat, make_loader, make_model

FAINT = "ignore:.* can hardly be told from noise"
pytestmark = pytest.mark.usefixtures("seeded_noise")


@pytest.fixture
def said(caplog):
    """What the logger was told, by level."""
    caplog.set_level(logging.INFO, "opacus_expm")

    def texts(level=logging.INFO):
        return [r.getMessage() for r in caplog.records if r.name == "opacus_expm" and r.levelno == level]

    return texts


def classes(records=300, seed=0, shift=0.0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(records, 4, generator=generator) + shift
    return DataLoader(TensorDataset(x, (x.sum(1) > 0).long()), batch_size=100)


def moved_by(start, released):
    """How words end, from public and released weights alone."""
    before, after = flat(start).double(), flat(released).double()
    return f"the parameters moved by {float((after - before).norm()):.3g} (their norm was {float(before.norm()):.3g})"


def test_a_draw_is_told_by_the_ledger_and_the_weights_alone(said):
    engine, model = ExpMQuadEngine(), make_model()
    released = engine.make_private_expm(model, make_loader(), 1.0, 0.5, PARAMETERS, **GOOD)
    (event,) = engine.accountant.releases
    width = engine.gather(model, make_loader(), PARAMETERS, **GOOD).sums.sensitivity("add_remove").width(0.5)
    precision = event.epsilon_range / width * event.regularization * event.nominal_size
    reach = min(1.0, math.sqrt(PARAMETERS / precision) / 0.5)
    share = float((flat(released) - flat(model)).norm()) / 0.5  # a sparse map of all dimensions keeps lengths
    assert said() == [
        f"round 1 of 1: one pass, one draw in {PARAMETERS} dimensions; bounds 1 and 1 (given); noise alone would go "
        f"{reach:.0%} of the radius 0.5, and the step went {share:.0%}; {moved_by(model, released)}"
    ]


@pytest.mark.filterwarnings(FAINT)
def test_rounds_without_a_radius_are_told_by_the_rule_and_the_weights_alone(said):
    engine, model = ExpMQuadEngine(), make_model()
    released = engine.make_private_expm(model, make_loader(), 4.0, delta=1e-5, criterion=nn.MSELoss())
    ((noise, rate, steps),) = [event.run for event in engine.accountant.releases if event.run is not None]
    rule = Rule(4.0, 1e-5, 40, 2, False)
    assert said() == [
        f"{steps} steps on samples of {rate:.2g} of the records, with noise of {noise:.3g} times the bound; "
        f"{rule.passes:.3g} passes over the data; bounds bought; {moved_by(model, released)}"
    ]


@pytest.mark.filterwarnings(FAINT)
def test_pure_rounds_are_told_by_the_rule_and_the_weights_alone(said):
    engine, model = ExpMQuadEngine(), make_model()
    released = engine.make_private_expm(model, make_loader(), 4.0, criterion=nn.MSELoss())
    rule = PureRule(4.0, 40, PARAMETERS, False)
    assert said()[0] == (
        f"{rule.rounds} direction(s) in {rule.dim} dimensions, with noise of {rule.dim / rule.direction_epsilon:.3g} times "
        f"the bound; {rule.passes:.3g} passes over the data; bounds bought; {moved_by(model, released)}"
    )


def test_what_is_said_of_the_start_does_not_depend_on_the_records(said):
    head = nn.Linear(4, 2)
    nn.init.eye_(head.weight)
    with torch.no_grad():
        head.weight.mul_(5)
    for seed, shift in ((0, 0.0), (1, 100.0)):
        ExpMQuadEngine().make_private_expm(
            head, classes(seed=seed, shift=shift), 1.0, 0.01, 3, max_grad_norm=1.0, max_curvature=1.0,
            criterion=nn.CrossEntropyLoss(), projection=GOOD["projection"],
        )  # fmt: skip
    starts = [text for text in said() if not text.startswith("round")]
    assert starts == ["labels are 0 to 1; a record with another one counts nothing"] * 2


def untrained(model, said):
    """The levels at which a release says that a model looks untrained."""
    ExpMQuadEngine().make_private_expm(
        model, classes(), 1.0, 0.01, 3, max_grad_norm=1.0, max_curvature=1.0, criterion=nn.CrossEntropyLoss(),
        projection=GOOD["projection"],
    )  # fmt: skip
    return [
        level
        for level in (logging.INFO, logging.WARNING)
        for text in said(level)
        if text.startswith("the model looks untrained")
    ]


@pytest.mark.parametrize(("weight", "levels"), [(0.0, [logging.INFO]), (0.001, [logging.INFO]), (5.0, [])])
def test_a_head_that_looks_untrained_is_mentioned(weight, levels, said):
    model = nn.Linear(4, 2)
    nn.init.constant_(model.weight[0], weight)
    nn.init.constant_(model.weight[1], -weight)
    assert untrained(model, said) == levels


def test_a_network_that_looks_untrained_is_a_warning(said):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 2))
    assert untrained(model, said) == [logging.WARNING]
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(4)  # as sure as a network that was trained
    assert untrained(model, said) == [logging.WARNING]  # nothing new


def test_outputs_in_units_of_their_own_count_only_if_they_are_equal(said):
    model = make_model()
    with torch.no_grad():
        model[2].weight.mul_(1e-3)
    ExpMQuadEngine().make_private_expm(model, make_loader(), 1.0, 0.5, 5, **GOOD)
    assert len(said()) == 1
    nn.init.zeros_(model[2].weight)
    ExpMQuadEngine().make_private_expm(model, make_loader(), 1.0, 0.5, 5, **GOOD)
    assert sum("looks untrained" in text for text in said(logging.WARNING)) == 1


EDGE, NOISE, FAR = (
    "ends at the edge of the ball",
    "outweighs what the records usually say",
    "further than their own norm",
)


@pytest.mark.parametrize(
    ("epsilon", "radius", "texts"),
    [(1000.0, 1e-3, [EDGE]), (1000.0, 2.0, []), (1e-3, 0.1, [NOISE]), (1e-3, 100.0, [NOISE, FAR])],
)
def test_what_looks_wrong_is_a_warning(epsilon, radius, texts, said):
    ExpMQuadEngine().make_private_expm(make_model(), make_loader(), epsilon, radius, 5, **GOOD)
    told = said(logging.WARNING)
    assert len(told) == len(texts)
    assert all(text in one for text, one in zip(texts, told, strict=True))


def test_with_a_given_generator_nothing_is_a_warning(said):
    engine = ExpMQuadEngine(noise_generator=np.random.default_rng(0))
    engine.make_private_expm(make_model(), make_loader(), 1000.0, 1e-3, 5, **GOOD)
    assert said(logging.WARNING) == []
    assert EDGE in said()[-1]


def test_an_audit_says_nothing(said):
    arguments = {"epsilon": 1000.0, "radius": 1e-3, "proj_dim": 5, **GOOD}
    with pytest.warns(UserWarning, match="NOT private"):
        audit.black_box(make_model(), make_loader(), make_loader(records=39), arguments, lambda module: 0.0, releases=4)
    assert said() + said(logging.WARNING) == []
    ExpMQuadEngine().make_private_expm(make_model(), make_loader(), **arguments)
    assert len(said(logging.WARNING)) == 1


def test_a_model_that_comes_back_as_it_was(said):
    model, books = make_model(), ExpMQuadEngine().books()
    words.of_walk(books, "steps", 3.0, model, copy.deepcopy(model))
    (text,) = said(logging.WARNING)
    assert text.startswith("the model is released as it came")
    with torch.no_grad():
        other = copy.deepcopy(model)
        other[0].bias += 1e-3
    words.of_walk(books, "steps", 3.0, model, other)
    assert len(said(logging.WARNING)) == 1
