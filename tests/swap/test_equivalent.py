"""A call of Opacus's ``make_private`` is answered with the call that asks for as much privacy."""

import opacus
import pytest
import torch
from loops import make_loader, make_model

from opacus_expm import ExpMQuadEngine
from opacus_expm.swap.equivalent import epsilon_of


def arguments(**changes):
    """What Opacus's examples pass."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = {"module": model, "optimizer": optimizer, "data_loader": make_loader(), "noise_multiplier": 5.0}
    return found | {"max_grad_norm": 1.5, "poisson_sampling": True, "clipping": "flat"} | changes


def told(engine, **changes):
    with pytest.raises(NotImplementedError) as caught:
        engine.make_private(**arguments(**changes))
    return str(caught.value)


@pytest.mark.filterwarnings("ignore:Secure RNG turned off")
def test_epsilon_is_what_opacus_says_after_as_many_epochs():
    privacy = opacus.PrivacyEngine()
    options = arguments()
    privacy.make_private(**options)
    batches = len(options["data_loader"])
    for _ in range(2 * batches):
        privacy.accountant.step(noise_multiplier=5.0, sample_rate=1 / batches)
    expected = privacy.get_epsilon(1e-5)
    assert epsilon_of(5.0, 1 / batches, 2, 1e-5) == pytest.approx(expected, rel=1e-12)
    text = told(ExpMQuadEngine(), epochs=2)
    assert f"target_epsilon={expected:.3g}," in text
    assert "sample rate 1/3, delta=1e-05" in text
    assert "max_grad_norm=1.5" in text


@pytest.mark.filterwarnings("ignore:with 20 records")
def test_the_call_that_is_told_runs():
    engine = ExpMQuadEngine()
    text = told(engine)
    assert engine.accountant.releases == []
    for words in ("in 1 epoch,", "in 20 epochs.", "epochs=10,", "make_private(..., epochs=E, target_delta=1e-05)"):
        assert words in text
    names = arguments() | {"engine": engine}
    exec(text.split("\n\n")[1], names)
    x, y = next(iterator := iter(names["data_loader"]))
    torch.nn.functional.cross_entropy(names["module"](x), y).backward()
    names["optimizer"].step()
    with pytest.warns(UserWarning, match="left before its end"):
        iterator.close()
    assert engine.accountant.releases


def test_four_values_in_ghost_mode():
    call = told(ExpMQuadEngine(), grad_sample_mode="ghost", epochs=1).split("\n\n")[1]
    assert call.startswith("module, optimizer, criterion, data_loader = ")
    assert "    grad_sample_mode='ghost',\n)" in call


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"noise_multiplier": 0.0}, ValueError, "noise_multiplier must be greater than 0"),
        ({"data_loader": [1]}, TypeError, "data_loader must be a torch.utils.data.DataLoader"),
        ({"epochs": 0}, ValueError, "epochs must be a positive integer"),
        ({"target_delta": 0.0}, ValueError, "target_delta must be greater than 0"),
    ],
)
def test_bad_numbers_are_named(changes, error, words):
    with pytest.raises(error, match=words):
        ExpMQuadEngine().make_private(**arguments(**changes))
