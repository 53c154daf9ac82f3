"""Hypothesis over what can be passed in and what can be in a file.

Few examples, the same in every run; with HYPOTHESIS_PROFILE=fuzz many new ones (see CONTRIBUTING).
"""

import copy
import json
import math
import os
import pickle
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from opacus_expm import ExpMQuadEngine, GradSampling, Sparse, Stiefel, cli
from opacus_expm.accounting.accountant import ExpMAccountant
from opacus_expm.accounting.events import Purchase, Release
from opacus_expm.accounting.ledger import LedgerFile
from opacus_expm.experiments.cells import Outcome
from opacus_expm.experiments.journal import Journal
from opacus_expm.experiments.results import Comparison, Row
from opacus_expm.experiments.task import train_once

pytestmark = pytest.mark.slow
FUZZ = settings.get_current_profile_name() == "fuzz"


def examples(default, fuzz=2000):
    return settings(max_examples=fuzz if FUZZ else default)


def outcome_of(call):
    """What a call gives, or the words with which it refuses; any other exception is a finding."""
    try:
        return call(), None
    except ValueError as error:
        return None, str(error)


# --- passes and draws -----------------------------------------------------------------------------------------------

FEATURES = 3


class Tied(nn.Module):
    """The same weights twice, and a parameter outside any layer: hooks cannot serve it."""

    def __init__(self, outputs):
        super().__init__()
        self.layer, self.head = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, outputs)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x):
        return self.head(self.layer(torch.tanh(self.layer(x)))) * self.scale


MODELS = {
    "linear": lambda m: nn.Linear(FEATURES, m),
    "relu": lambda m: nn.Sequential(nn.Linear(FEATURES, 4), nn.ReLU(inplace=True), nn.Linear(4, m)),
    "norms": lambda m: nn.Sequential(
        nn.Linear(FEATURES, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Dropout(0.5), nn.LayerNorm(4), nn.Linear(4, m)
    ),
    "convolution": lambda m: nn.Sequential(
        nn.Unflatten(1, (1, FEATURES)), nn.Conv1d(1, 2, 2), nn.SiLU(), nn.Flatten(), nn.Linear(4, m)
    ),
    "frozen": lambda m: nn.Sequential(nn.Linear(FEATURES, 4).requires_grad_(False), nn.Tanh(), nn.Linear(4, m)),
    "tied": Tied,
}
CRITERIA = {
    "mse": (nn.MSELoss(), lambda y, m: y[:, :m]),
    "ce": (nn.CrossEntropyLoss(), lambda y, m: (y[:, 0].abs().nan_to_num(0, 0, 0) * 7 % m).long()),
    "ce, smooth": (
        nn.CrossEntropyLoss(label_smoothing=0.1),
        lambda y, m: (y[:, 0].abs().nan_to_num(0, 0, 0) * 7).long(),
    ),
    "bce": (nn.BCEWithLogitsLoss(), lambda y, m: (y[:, :m] > 0).to(y)),
    "huber": (nn.HuberLoss(), lambda y, m: y[:, :m]),
}
STRANGE = [math.nan, math.inf, -math.inf, 0.0, 1e30, -1e30, 1e-40]
BOUNDS = st.floats(1e-6, 1e6)


@st.composite
def cases(draw):
    outputs, count = draw(st.integers(1, 4)), draw(st.integers(1, 40))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    x, y = torch.randn(count, FEATURES, generator=generator), torch.randn(count, 4, generator=generator)
    for _ in range(draw(st.integers(0, 3))):
        where = x if draw(st.booleans()) else y
        where[draw(st.integers(0, count - 1)), draw(st.integers(0, where.shape[1] - 1))] = draw(
            st.sampled_from(STRANGE)
        )
    dtype = draw(st.sampled_from([torch.float32, torch.float64, torch.bfloat16]))
    torch.manual_seed(draw(st.integers(0, 2**32)))
    model = MODELS[draw(st.sampled_from(sorted(MODELS)))](outputs)
    if draw(st.booleans()):
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(draw(st.sampled_from([1e-6, 1e3, 1e8])))
    criterion, targets_of = CRITERIA[draw(st.sampled_from(sorted(CRITERIA)))]
    targets = targets_of(y, outputs)
    data = TensorDataset(x.to(dtype), targets.to(dtype) if targets.is_floating_point() else targets)
    delta = draw(st.sampled_from([0.0, 1e-6]))
    options = {
        "criterion": criterion,
        "max_grad_norm": draw(BOUNDS),
        "max_curvature": draw(st.one_of(st.just(0.0), BOUNDS)),
        "grad_sample_mode": GradSampling(
            draw(st.sampled_from([None, "hooks", "functorch"])), draw(st.sampled_from([None, None, 2]))
        ),
        "projection": draw(st.sampled_from([Stiefel, Sparse]))(seed=draw(st.integers(0, 2**31))),
        "max_physical_batch_size": draw(st.sampled_from([None, 1, 5, 16])),
        "nominal_size": draw(st.sampled_from([None, 1, 50])),
    }
    budget = {
        "epsilon": draw(st.floats(1e-3, 1e3)),
        "radius": draw(st.floats(1e-4, 1e3)),
        "delta": delta,
        "regularization": draw(st.sampled_from([None, None, 0.0, 1e-6, 1e3])),
    }
    dim = draw(st.sampled_from([None, 1, 2, 4]))
    adjacency = draw(st.sampled_from(["add_remove", "replace_one"]))
    return model.to(dtype), data, draw(st.integers(1, 40)), dim, adjacency, options, budget


REFUSED = "regularization|cross-entropy needs at least 2 outputs|radius=|proj_dim|cannot serve"


@examples(40, 1000)
@given(cases())
def test_any_pass_is_refused_in_words_or_gives_a_private_model(case):
    """The release is in the ball and costs what was asked for; one record moves the sums by no more than its bounds."""
    model, data, batch_size, dim, adjacency, options, budget = case
    engine, before = ExpMQuadEngine(adjacency=adjacency), copy.deepcopy(model.state_dict())

    def sums_of(dataset):
        loader = DataLoader(dataset, batch_size=batch_size)
        size = options["nominal_size"] or len(data)
        return engine.gather(model, loader, dim, **options | {"nominal_size": size}).sums

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loader = DataLoader(data, batch_size=batch_size)
        private, refused = outcome_of(
            lambda: engine.make_private_expm(model, loader, proj_dim=dim, **options, **budget)
        )
        if refused:
            assert any(word in refused for word in REFUSED.split("|")), refused
            assert len(engine.accountant) == 0
            return
        whole = sums_of(data)
        less = sums_of(TensorDataset(*(t[1:] for t in data.tensors))) if len(data) > 1 else None
    assert {n: t.tolist() for n, t in model.state_dict().items()} == {n: t.tolist() for n, t in before.items()}
    assert len(engine.accountant.releases) == 1
    assert engine.get_epsilon(budget["delta"]) <= budget["epsilon"] * (1 + 1e-9)
    moved = [
        (b.double() - a.double()).flatten()
        for (_, a), (_, b) in zip(model.named_parameters(), private.named_parameters(), strict=True)
        if a.requires_grad
    ]
    largest = max(float(p.detach().double().abs().max()) for p in model.parameters())
    rounding = largest * torch.finfo(next(model.parameters()).dtype).eps * math.sqrt(sum(map(len, moved)))
    assert torch.isfinite(torch.cat(moved)).all()
    assert float(torch.cat(moved).detach().norm()) <= budget["radius"] * (1 + 1e-6) + rounding
    bound_g, bound_h = options["max_grad_norm"] * (1 + 1e-6), options["max_curvature"] * (1 + 1e-6)
    assert float(whole.gradient.norm()) <= len(data) * bound_g
    if less is None:
        return
    assert float((whole.gradient - less.gradient).norm()) <= bound_g * (1 + 1e-6 * len(data))
    # With probes of the curvature each pass has fresh signs.
    if whole.curvature is not None and options["grad_sample_mode"].probes is None:
        change = np.linalg.eigvalsh((whole.curvature - less.curvature).numpy())
        slack = 1e-6 * bound_h * len(data)
        assert -slack <= change[0]
        assert change[-1] <= bound_h + slack


# --- files ----------------------------------------------------------------------------------------------------------

# What may stand anywhere in JSON.
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just(10**400),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
FACTS = {
    "epsilon_range": 0.5,
    "mu": None,
    "adjacency": "add_remove",
    "epsilon": 0.5,
    "delta": 0.0,
    "calibration": "range",
    "radius": 0.1,
    "regularization": 0.0,
    "nominal_size": 50,
    "max_grad_norm": 1.0,
    "max_curvature": 1.0,
    "projection": "stiefel",
    "proj_dim": 5,
    "seed": 3,
    "sampler": "exact",
    "failure_probability": 0.0,
    "bounds": "given",
    "round": 1,
    "rounds": 1,
    "noise": "system",
}
PURCHASE = {
    "epsilon_range": 0.05,
    "adjacency": "add_remove",
    "bound": "max_grad_norm",
    "quantile": 0.8,
    "nominal_size": 50,
    "receipt": "0123456789abcdef",
    "noise": "system",
}


@st.composite
def damage(draw):
    """A function from bytes to damaged bytes."""
    kind = draw(st.sampled_from(["flip", "cut", "insert", "delete", "repeat", "swap", "replace"]))
    where, length = draw(st.floats(0, 1)), draw(st.integers(1, 80))
    some = draw(st.binary(min_size=1, max_size=20))
    bit = 1 << draw(st.integers(0, 7))

    def apply(content):
        at = min(int(where * len(content)), max(len(content) - 1, 0))
        head, tail = content[:at], content[at:]
        if kind == "flip":
            return head + bytes([tail[0] ^ bit]) + tail[1:]
        if kind == "cut":
            return head
        if kind == "insert":
            return head + some + tail
        if kind == "delete":
            return head + tail[length:]
        if kind == "repeat":
            return head + tail[:length] + tail
        if kind == "swap":
            return tail + head
        return some

    return apply


@pytest.fixture(scope="module")
def ledger(tmp_path_factory):
    """A sound ledger file and its entries."""
    path = tmp_path_factory.mktemp("sound") / "ledger.jsonl"
    accountant = ExpMAccountant(ledger_path=path)
    accountant.record(Purchase(**PURCHASE))
    for epsilon in (0.5, 0.25):
        accountant.record(Release(**FACTS | {"epsilon": epsilon, "epsilon_range": epsilon, "mu": math.inf}))
    accountant.step(noise_multiplier=1.0, sample_rate=0.1)
    return path.read_bytes(), LedgerFile(path).entries()


@examples(100)
@given(changes=st.lists(damage(), min_size=1, max_size=3))
def test_a_damaged_ledger_is_refused_or_an_older_one(ledger, tmp_path_factory, changes):
    content, entries = ledger
    for change in changes:
        content = change(content) if content else content
    path = tmp_path_factory.getbasetemp() / "damaged.jsonl"
    path.write_bytes(content)
    accountant, refused = outcome_of(lambda: ExpMAccountant(ledger_path=path))
    if refused:
        assert "damaged.jsonl" in refused
        assert path.read_bytes() == content  # evidence is left as it is
        with pytest.raises(SystemExit) as ended:
            cli.main(["epsilon", str(path)])
        assert ended.value.code == 2
        return
    # Cut off after a whole line, perhaps with a torn one behind it: it cannot be told from an older ledger.
    found = LedgerFile(path).entries()
    assert found == entries[: len(found)]
    accountant.record(Release(**FACTS | {"mu": math.inf}))
    assert len(LedgerFile(path).entries()) == len(found) + 1


@examples(40)
@given(
    changes=st.dictionaries(st.sampled_from(sorted(FACTS)), JSON, max_size=3),
    purchase=st.booleans(),
    gone=st.booleans(),
)
def test_a_release_record_is_sound_or_refused(changes, purchase, gone):
    facts = {**(PURCHASE if purchase else FACTS), **changes}
    if gone:
        facts.pop(next(iter(facts)))
    accountant = ExpMAccountant()
    state = {"mechanism": "expm", "history": [], "releases": [facts]}
    _, refused = outcome_of(lambda: accountant.load_state_dict(state))
    if refused:
        assert len(accountant) == 0
        return
    assert not gone
    assert accountant.state_dict()["releases"] == [facts]
    if facts.get("bounds") != "paper" and facts.get("sampler", "exact") in ("exact", "secure"):
        pure = facts["epsilon_range"] is not None and not facts.get("failure_probability", 0) > 0
        assert accountant.get_epsilon() > 0
        assert (accountant.get_epsilon() < math.inf) == pure


@examples(60)
@given(state=JSON | st.fixed_dictionaries({"mechanism": st.just("expm"), "history": JSON, "releases": JSON}))
def test_any_state_of_a_ledger_is_sound_or_refused(state):
    accountant = ExpMAccountant()
    _, refused = outcome_of(lambda: accountant.load_state_dict(state))
    if refused:
        assert len(accountant) == 0
    else:
        assert accountant.state_dict()["releases"] == state["releases"]
        assert [list(run) for run in accountant.history] == [list(run) for run in state["history"]]


def make_model():
    torch.manual_seed(0)
    return nn.Linear(FEATURES, 2)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path, engine = tmp_path_factory.mktemp("checkpoint") / "model.pt", ExpMQuadEngine()
    engine.accountant.record(Release(**FACTS | {"mu": math.inf}))
    engine.save_checkpoint(path=path, module=make_model(), checkpoint_dict={"note": [1, 2.5, "x"]})
    return path.read_bytes()


@examples(100)
@given(changes=st.lists(damage(), min_size=1, max_size=2))
def test_a_damaged_checkpoint_is_refused_or_the_same(checkpoint, tmp_path_factory, changes):
    content = checkpoint
    for change in changes:
        content = change(content) if content else content
    path = tmp_path_factory.getbasetemp() / "damaged.pt"
    path.write_bytes(content)
    engine, module = ExpMQuadEngine(), nn.Linear(FEATURES, 2)
    before = copy.deepcopy(module.state_dict())
    extra, refused = outcome_of(lambda: engine.load_checkpoint(path=path, module=module))
    if refused:
        assert "damaged.pt" in refused
        assert all(torch.equal(t, before[n]) for n, t in module.state_dict().items())
        assert len(engine.accountant) == 0
        return
    assert extra == {"note": [1, 2.5, "x"]}
    assert all(torch.equal(t, make_model().state_dict()[n]) for n, t in module.state_dict().items())
    assert [r.to_dict() for r in engine.accountant.releases] == [FACTS]


def test_a_flipped_bit_in_the_weights_is_noticed(checkpoint, tmp_path):
    """Which torch itself does not notice."""
    weights = make_model().weight.detach().numpy().tobytes()
    at = checkpoint.index(weights)
    path = tmp_path / "flipped.pt"
    path.write_bytes(checkpoint[:at] + bytes([checkpoint[at] ^ 1]) + checkpoint[at + 1 :])
    with pytest.raises(ValueError, match="cannot be loaded safely"):
        ExpMQuadEngine().load_checkpoint(path=path, module=make_model())


def comparison():
    row = Row("dp-sgd", 1.0, 1e-5, (1.0, 2.0), 0.5, None, {"learning_rate": 0.1})
    return Comparison(
        task="sine",
        metric="loss",
        delta=1e-5,
        seeds=(0, 1),
        trials=1,
        validation=0.2,
        grids={"dp-sgd": ({"learning_rate": (0.1, 0.2)},)},
        rows=(row,),
        search=(),
    )


@st.composite
def places_and_values(draw):
    """A path into a nested value, and what to put there."""
    return draw(st.lists(st.integers(0, 20), min_size=1, max_size=4)), draw(JSON)


def replaced(value, path, new):
    if not path or not isinstance(value, dict | list) or not value:
        return new
    if isinstance(value, dict):
        key = sorted(value)[path[0] % len(value)]
        return {**value, key: replaced(value[key], path[1:], new)}
    at = path[0] % len(value)
    return [*value[:at], replaced(value[at], path[1:], new), *value[at + 1 :]]


@examples(100)
@given(change=places_and_values() | damage())
def test_a_damaged_comparison_is_refused_or_shown(tmp_path_factory, change):
    path = tmp_path_factory.getbasetemp() / "comparison.json"
    comparison().to_json(path)
    if callable(change):
        path.write_bytes(change(path.read_bytes()))
    else:
        path.write_text(json.dumps(replaced(json.loads(path.read_text()), *change)))
    found, refused = outcome_of(lambda: Comparison.from_json(path))
    if refused:
        assert "comparison.json" in refused
        return
    assert found.table()
    found.to_json(path)
    assert Comparison.from_json(path).table() == found.table()


@examples(100)
@given(change=places_and_values() | damage(), deep=st.booleans())
def test_a_damaged_journal_is_passed_over(tmp_path_factory, change, deep):
    """A finished cell is found as it was, or not at all."""
    path = tmp_path_factory.getbasetemp() / "cells.jsonl"
    entry = {
        "configuration": "this",
        "cell": {"method": "expm", "seed": 1},
        "outcome": {"score": 1.5, "seconds": 0.25, "memory": None},
    }
    line = json.dumps(entry).encode()
    changed = change(line) if callable(change) else json.dumps(replaced(entry, *change)).encode()
    path.write_bytes(b"[" * 100_000 * deep + b"\n" + changed + b"\n" + line + b"\n")
    found = [Outcome.from_facts(f) for _, f in Journal(path, "this", Outcome.from_facts).entries()]
    assert Outcome(1.5, 0.25, None) in found
    for outcome in found:
        assert isinstance(outcome.seconds, int | float)
        assert isinstance(outcome.score, float)


class Payload:
    """Code that runs when it is unpickled."""

    def __init__(self, marker):
        self.marker = str(marker)

    def __reduce__(self):
        return os.mkdir, (self.marker,)


@examples(30, 300)
@given(changes=st.lists(damage(), min_size=1, max_size=2), malicious=st.sampled_from([None, "pickle", "archive"]))
def test_damaged_weights_in_the_cache_are_found_again(tmp_path_factory, changes, malicious):
    """Kept weights that are not sound are trained anew, and nothing in the file is run."""
    directory = tmp_path_factory.mktemp("cache")
    trained = []

    def train():
        trained.append(True)
        nn.init.constant_(model.weight, 0.5)

    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("OPACUS_EXPM_CACHE", str(directory))
        data, facts = TensorDataset(torch.zeros(2, FEATURES)), {"task": "fuzz"}
        model = make_model()
        train_once(model, train, data, facts)
        (kept,) = (directory / "weights").iterdir()
        content = kept.read_bytes()
        for change in changes:
            content = change(content) if content else content
        if malicious == "archive":
            torch.save(Payload(directory / "ran"), kept)
        else:
            kept.write_bytes(pickle.dumps(Payload(directory / "ran")) if malicious else content)
        expected = copy.deepcopy(model.state_dict())
        model = make_model()
        train_once(model, train, data, facts)
    assert not (directory / "ran").exists()
    assert len(trained) == 2 or not malicious
    assert all(torch.equal(t, expected[n]) for n, t in model.state_dict().items())
