"""What a user sees of the engine without reading about it: representations, help, and where warnings point."""

import pydoc
import re
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import opacus_expm
from opacus_expm import ExpMAccountant, ExpMQuadEngine
from opacus_expm.accounting.events import Query

BOUNDS = {"max_grad_norm": 1.0, "max_curvature": 1.0}


def data(records=60):
    x = torch.randn(records, 3, generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(x, (x[:, 0] > 0).long()), batch_size=20)


# --- representations -------------------------------------------------------------------------------------------------


def test_the_engine_shows_its_ledger_and_what_was_set():
    assert repr(ExpMQuadEngine()) == (
        "ExpMQuadEngine(adjacency='add_remove', accountant=ExpMAccountant(releases=0, dp_sgd_steps=0))"
    )
    set_up = ExpMQuadEngine(adjacency="replace_one", secure_mode=True, budget=(2.0, 1e-5))
    assert repr(set_up) == (
        "ExpMQuadEngine(adjacency='replace_one', secure_mode=True, "
        "accountant=ExpMAccountant(releases=0, dp_sgd_steps=0, budget=(2, 1e-05)))"
    )


@pytest.mark.filterwarnings("ignore:a private bound")
def test_only_releases_are_counted_as_releases():
    engine = ExpMQuadEngine()
    engine.make_private_expm(nn.Linear(3, 2), data(), 0.5, 0.1, 2, criterion=nn.CrossEntropyLoss())
    engine.accountant.record(Query("metric", 1.0, 1e-5, 60, mu=0.1))
    assert repr(engine.accountant) == "ExpMAccountant(releases=1, purchases=2, queries=1, dp_sgd_steps=0)"
    assert len(engine.accountant) == 4
    engine = ExpMQuadEngine()  # a model that is released by queries alone is not said to be none
    engine.accountant.record(Query("metric", 1.0, 1e-5, 60, mu=0.1))
    assert repr(engine.accountant) == "ExpMAccountant(queries=1, dp_sgd_steps=0)"


def test_statistics_show_what_is_public_and_no_value():
    statistics = ExpMQuadEngine().gather(nn.Linear(3, 2), data(), 2, criterion=nn.CrossEntropyLoss(), **BOUNDS)
    assert repr(statistics) == (
        "Statistics(parameters=8, projection='sparse', nominal_size=60, "
        "sums=ClippedSums(dim=2, max_grad_norm=1.0, max_curvature=1.0, private values hidden))"
    )


# --- help ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("function", [opacus_expm.make_private_expm, ExpMQuadEngine.make_private_expm])
def test_help_explains_every_argument_on_two_screens(function):
    text = pydoc.plain(pydoc.render_doc(function))
    assert len(text.splitlines()) <= 100
    arguments = set(re.findall(r"^ {8}(\w+): ", text, re.MULTILINE))
    assert arguments >= set(function.__annotations__) - {"return"}


# --- warnings --------------------------------------------------------------------------------------------------------


class Jittered(nn.Module):
    """Draws random numbers in evaluation mode too, so that each record is run alone."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x):
        return self.layer(x + 0.01 * torch.randn_like(x))


def released(model=None, **options):
    return ExpMQuadEngine().make_private_expm(model or nn.Linear(3, 2), data(), 0.5, 0.1, 2, **options)


def simulated():
    engine = ExpMQuadEngine()
    statistics = engine.gather(nn.Linear(3, 2), data(), 2, criterion=nn.CrossEntropyLoss(), **BOUNDS)
    return engine.simulate(statistics, 0.5, 0.1, lambda module: 0.0, draws=2)


def stated():
    engine = ExpMQuadEngine(noise_generator=np.random.default_rng(0))
    engine.make_private_expm(nn.Linear(3, 2), data(), 0.5, 0.1, 2, criterion=nn.CrossEntropyLoss(), **BOUNDS)
    return engine.get_epsilon()


def late():
    accountant = ExpMAccountant()
    accountant.record(Query("metric", 1.0, 1e-5, 60, mu=0.1))
    return ExpMAccountant(budget=(2.0, 1e-5)).load_state_dict(accountant.state_dict())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: released(**BOUNDS), "criterion=None"),
        (lambda: released(criterion=nn.CrossEntropyLoss()), "a private bound for epsilon"),
        (lambda: released(Jittered(), criterion=nn.CrossEntropyLoss(), **BOUNDS), "using grad_sample_mode='functorch'"),
        (simulated, "simulate"),
        (stated, "took their noise from a given"),
        (late, "is declared for a ledger that holds 1 charges already"),
    ],
    ids=["criterion", "bound", "rows", "simulate", "noise", "budget"],
)
def test_warnings_point_to_the_callers_line(call, message):
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        call()
    assert any(message in str(one.message) for one in said)
    assert {one.filename for one in said} == {__file__}
