"""Checkpoints: weights and ledger together, read without running code, and loaded as a whole or not at all."""

import copy
import os
import pickle
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ledger_cases import FACTS, FEATURES, GOOD, flat, held, make_loader, make_model
from opacus.accountants import RDPAccountant

from opacus_expm import ExpMAccountant, ExpMQuadEngine


@pytest.fixture
def engine():
    used = ExpMQuadEngine()
    used.private = used.make_private_expm(make_model(), make_loader(), 1.0, 0.5, 4, **GOOD)
    return used


@pytest.fixture
def path(tmp_path):
    return tmp_path / "checkpoint.pt"


def refused(path, match=None):
    """Loading fails with a ValueError, and neither the module nor the ledger has changed, which is empty and takes any."""
    other, module = ExpMQuadEngine(), make_model()
    before, ledger = flat(module), held(other.accountant)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch, about protocols
        with pytest.raises(ValueError, match=match):
            other.load_checkpoint(path=path, module=module)
    assert torch.equal(flat(module), before)
    assert held(other.accountant) == ledger


def test_checkpoints_round_trip(engine, path):
    engine.save_checkpoint(path=path, module=engine.private, checkpoint_dict={"epoch": 3})
    there, module = ExpMQuadEngine(), make_model()
    assert not torch.equal(flat(module), flat(engine.private))
    assert there.load_checkpoint(path=path, module=module) == {"epoch": 3}
    assert torch.equal(flat(module), flat(engine.private))
    assert held(there.accountant) == held(engine.accountant)
    assert there.get_epsilon() == 1.0


def test_a_module_that_was_not_released_is_said_to_be_none(engine, path):
    """A copy of a released one is as good as itself; another one is saved, and a warning says what it is not."""
    engine.save_checkpoint(path=path, module=copy.deepcopy(engine.private).requires_grad_(False))
    for module in (make_model(), torch.nn.Linear(2, 1)):
        with pytest.warns(UserWarning, match="module does not have the weights of a release of this engine") as said:
            engine.save_checkpoint(path=path, module=module)
        assert said[0].filename == __file__
    released = engine.release(
        engine.gather(make_model(), make_loader(), 4, **GOOD), 1.0, 0.5
    )  # the second of two that the engine knows
    engine.save_checkpoint(path=path, module=released)
    engine.save_checkpoint(path=path, module=engine.private)


def test_of_a_module_that_others_trained_nothing_is_said(engine, path):
    """With charges that are not for the engine's own models, a module may be what they paid for."""
    engine.accountant.step(noise_multiplier=1.0, sample_rate=0.1)
    engine.save_checkpoint(path=path, module=make_model())
    assert path.exists()


def test_a_loaded_module_may_be_saved_again(engine, path):
    engine.save_checkpoint(path=path, module=engine.private)
    there, module = ExpMQuadEngine(), make_model()
    there.load_checkpoint(path=path, module=module)
    there.save_checkpoint(path=path, module=module)
    assert torch.equal(flat(module), flat(engine.private))


def test_the_budget_is_in_the_checkpoint(path):
    engine = ExpMQuadEngine(budget=(2.0, 1e-5))
    private = engine.make_private_expm(make_model(), make_loader(), 1.0, 0.5, 4, **GOOD)
    engine.save_checkpoint(path=path, module=private)
    there = ExpMQuadEngine()
    there.load_checkpoint(path=path, module=make_model())
    assert there.accountant.budget == engine.accountant.budget
    assert there.remaining() == engine.remaining() < 2.0


def test_checkpoints_hold_no_statistics(engine, path):
    """Weights under the module's own names, and the ledger's public facts; nothing else."""
    engine.save_checkpoint(path=path, module=engine.private)
    content = torch.load(path, weights_only=True)
    assert set(content) == {"module_state_dict", "privacy_accountant_state_dict"}
    assert set(content["module_state_dict"]) == set(make_model().state_dict())
    assert {k: v.shape for k, v in content["module_state_dict"].items()} == {
        k: v.shape for k, v in make_model().state_dict().items()
    }
    ledger = content["privacy_accountant_state_dict"]
    assert set(ledger) == {"history", "mechanism", "releases", "budget"}
    assert [set(facts) for facts in ledger["releases"]] == [set(FACTS)]
    assert all(value is None or isinstance(value, int | float | str) for value in ledger["releases"][0].values())


def test_statistics_are_not_saved_even_on_request(engine, path):
    statistics = engine.gather(make_model(), make_loader(), 4, **GOOD)
    with pytest.raises(TypeError, match="not pickled"):
        engine.save_checkpoint(path=path, module=engine.private, checkpoint_dict={"statistics": statistics})


def test_the_users_entries_cannot_replace_the_ledger(engine, path):
    forged = {"privacy_accountant_state_dict": ExpMAccountant().state_dict()}
    engine.save_checkpoint(path=path, module=engine.private, checkpoint_dict=forged)
    there = ExpMQuadEngine()
    there.load_checkpoint(path=path, module=make_model())
    assert there.get_epsilon() == 1.0


@pytest.mark.parametrize("module", [None, {}, "model"])
def test_checkpoints_are_of_modules(engine, path, module):
    for call in (engine.save_checkpoint, engine.load_checkpoint):
        with pytest.raises(TypeError, match=r"module must be a torch\.nn\.Module"):
            call(path=path, module=module)
    assert not path.exists()


class Payload:
    """Code that runs when it is unpickled: makes a directory."""

    def __init__(self, marker):
        self.marker = str(marker)

    def __reduce__(self):
        return os.mkdir, (self.marker,)


def test_code_in_a_file_is_not_run(engine, path, tmp_path):
    marker = tmp_path / "ran"
    good = {
        "module_state_dict": engine.private.state_dict(),
        "privacy_accountant_state_dict": engine.accountant.state_dict(),
    }
    for content in (good | {"extra": Payload(marker)}, good | {"module_state_dict": Payload(marker)}, Payload(marker)):
        torch.save(content, path)
        refused(path, "cannot be loaded safely|not a checkpoint")
        assert not marker.exists()
        path.write_bytes(pickle.dumps(content, protocol=2))
        refused(path)
        assert not marker.exists()
    # The payload is a live one.
    pickle.loads(path.read_bytes())
    assert marker.exists()


def test_truncated_files_are_refused(engine, path):
    engine.save_checkpoint(path=path, module=engine.private)
    whole = path.read_bytes()
    for cut in [*range(0, len(whole), 97), len(whole) - 1]:
        path.write_bytes(whole[:cut])
        refused(path)


FOREIGN = {
    "text": b"dear diary\n",
    "json": b'{"module_state_dict": {}}',
    "zeros": bytes(100),
    "zip": b"PK\x03\x04" + bytes(100),
    "pickle of a list": pickle.dumps([1, 2], protocol=2),
    "pickle, newest": pickle.dumps({"a": 1}, protocol=5),
    "opcodes": b"\x80\x02}q\x00(X\x01\x00",
    "unknown opcode": b"\x80\x02\xff.",
    "not unicode": b"\x80\x02X\x02\x00\x00\x00\xff\xfe.",
    "stack underflow": b"\x80\x02R.",
}


@pytest.mark.parametrize("name", FOREIGN)
def test_foreign_bytes_are_refused(path, name):
    path.write_bytes(FOREIGN[name])
    refused(path)


@settings(max_examples=100)
@given(st.binary(max_size=40), st.sampled_from([b"", b"\x80\x02", b"\x80\x02}(", b"PK\x03\x04"]))
def test_any_bytes_are_refused(tmp_path_factory, content, start):
    path = tmp_path_factory.getbasetemp() / "any.pt"
    path.write_bytes(start + content)
    refused(path)


def test_other_checkpoints_are_refused(engine, path):
    state, ledger = engine.private.state_dict(), engine.accountant.state_dict()
    elsewhere = RDPAccountant()
    elsewhere.step(noise_multiplier=1.0, sample_rate=0.1)
    for content in (
        state,
        torch.ones(3),
        [state, ledger],
        {"module_state_dict": state},
        {"privacy_accountant_state_dict": ledger},
        {"module_state_dict": None, "privacy_accountant_state_dict": ledger},
        {"module_state_dict": state, "privacy_accountant_state_dict": []},
    ):
        torch.save(content, path)
        refused(path, "needs module_state_dict and privacy_accountant_state_dict")
    torch.save({"module_state_dict": state, "privacy_accountant_state_dict": elsewhere.state_dict()}, path)
    refused(path, "rdp")


BROKEN_LEDGERS = {
    "nothing": {},
    "no releases": {"mechanism": "expm", "history": []},
    "number": {"mechanism": "expm", "history": [], "releases": 5},
    "history of text": {"mechanism": "expm", "history": [("a", "b", "c")], "releases": []},
    "history of nothing": {"mechanism": "expm", "history": None, "releases": []},
    "free release": {"mechanism": "expm", "history": [], "releases": [FACTS | {"epsilon_range": 0.0}]},
    "huge release": {"mechanism": "expm", "history": [], "releases": [FACTS | {"epsilon_range": 10**400}]},
    "huge noise": {"mechanism": "expm", "history": [(10**400, 0.1, 1)], "releases": []},
}


@pytest.mark.parametrize("name", BROKEN_LEDGERS)
def test_a_broken_ledger_leaves_the_module_alone(engine, path, name):
    torch.save(
        {"module_state_dict": engine.private.state_dict(), "privacy_accountant_state_dict": BROKEN_LEDGERS[name]}, path
    )
    refused(path)


def _changed(change):
    state = make_model().double().state_dict()
    change(state)
    return dict(state)


BROKEN_WEIGHTS = {
    "nothing": {},
    "one missing": _changed(lambda s: s.pop("2.bias")),
    "one more": _changed(lambda s: s.update(surprise=torch.ones(1))),
    "wrong shape": _changed(lambda s: s.update({"2.bias": torch.ones(7)})),
    "no tensor": _changed(lambda s: s.update({"2.bias": "weights"})),
    "number for a name": _changed(lambda s: s.update({3: torch.ones(1)})),
    "wrong last": _changed(lambda s: s.update({"0.weight": torch.zeros(4, FEATURES), "2.bias": None})),
}


@pytest.mark.parametrize("name", BROKEN_WEIGHTS)
def test_broken_weights_leave_everything_alone(engine, path, name):
    torch.save(
        {
            "module_state_dict": BROKEN_WEIGHTS[name],
            "privacy_accountant_state_dict": engine.accountant.state_dict(),
        },
        path,
    )
    refused(path)


def test_a_missing_file_is_missing(path):
    with pytest.raises(FileNotFoundError):
        ExpMQuadEngine().load_checkpoint(path=path, module=make_model())
