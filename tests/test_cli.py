"""The command line, on a small stand-in for the sine regression."""

import json
import math
import re
import runpy
import sys

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from opacus_expm import ExpMQuadEngine, cli, tasks


@pytest.fixture(autouse=True)
def small_task(monkeypatch):
    """A linear regression with a shift, in place of the paper's pretraining."""

    def build(seed=0, records=200):
        generator = torch.Generator().manual_seed(seed)

        def draw(slope):
            x = torch.randn(records, 5, generator=generator)
            return TensorDataset(x, slope * x[:, :1] + 0.1 * torch.randn(records, 1, generator=generator))

        model = nn.Linear(5, 1)
        with torch.no_grad():
            model.weight.copy_(torch.eye(1, 5))
            model.bias.zero_()
        return tasks.Task(model, draw(1.0), draw(1.4), draw(1.4), nn.MSELoss())

    monkeypatch.setattr(tasks, "sine", build)
    return build


NUMBER = r"(\d+\.\d{4})"
OUTPUT = re.compile(
    r"test loss \(mean squared error\) of the sine regression\n"
    rf"  zero-shot    {NUMBER}\n"
    rf"  private      {NUMBER}\n"
    rf"  non-private  {NUMBER}\n"
    r"spent: epsilon = (\S+) at delta = 0\n"
)


def run(capsys, *arguments):
    """Zero-shot, private and non-private loss, and ε, as printed."""
    assert cli.main(["demo", "--proj-dim", "4", *arguments]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    printed = OUTPUT.fullmatch(captured.out)
    assert printed, captured.out
    return [float(group) for group in printed.groups()]


def test_demo_prints_three_losses_and_the_budget(capsys, small_task):
    zero_shot, private, unprotected, epsilon = run(capsys)
    task = small_task(0)
    assert zero_shot == pytest.approx(tasks.loss(task.model, task.test, task.criterion), abs=5e-5)
    assert unprotected < 0.5 * zero_shot
    assert 0 < private < 10
    assert epsilon == 1.0


@pytest.mark.parametrize("epsilon", ["0.25", "2.5", "10"])
def test_demo_spends_what_was_asked_for(capsys, epsilon):
    assert run(capsys, "--epsilon", epsilon)[3] == float(epsilon)


def test_seed_fixes_the_data_but_not_the_noise(capsys):
    runs = [run(capsys, "--seed", "3", "--radius", "2", "--epsilon", "0.01") for _ in range(3)]
    assert runs[0][0] == runs[1][0] == runs[2][0]
    assert runs[0][2] == runs[1][2] == runs[2][2]
    assert len({private for _, private, _, _ in runs}) > 1
    assert run(capsys, "--seed", "4")[0] != runs[0][0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--epsilon", "0"], "epsilon must be greater than 0, got 0.0"),
        (["--epsilon", "-1"], "epsilon must be greater than 0, got -1.0"),
        (["--epsilon", "nan"], "epsilon must be a number greater than 0, got nan"),
        (["--epsilon", "inf"], "epsilon must be a number greater than 0, got inf"),
        (["--epsilon", "much"], "argument --epsilon: invalid float value: 'much'"),
        (["--radius", "-0.1"], "radius must be greater than 0, got -0.1"),
        (["--proj-dim", "0"], "proj_dim must be a positive integer, got 0"),
        (["--proj-dim", "7"], "proj_dim must be at most the number of trainable parameters, 6, got 7"),
        (["--proj-dim", "2.5"], "argument --proj-dim: invalid int value: '2.5'"),
        (["--seed", "-1"], "seed must be a non-negative integer or None, got -1"),
        (["--delta", "1"], "unrecognized arguments: --delta 1"),
    ],
)
def test_bad_options_are_explained(capsys, arguments, message):
    with pytest.raises(SystemExit) as raised:
        cli.main(["demo", *arguments])
    assert raised.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err
    assert "Traceback" not in captured.err


@pytest.mark.parametrize("arguments", [[], ["compare-nothing"]])
def test_a_command_is_needed(capsys, arguments):
    with pytest.raises(SystemExit) as raised:
        cli.main(arguments)
    assert raised.value.code == 2
    assert "demo" in capsys.readouterr().err or not arguments


def test_help_lists_the_options(capsys):
    with pytest.raises(SystemExit) as raised:
        cli.main(["demo", "--help"])
    assert raised.value.code == 0
    shown = capsys.readouterr().out
    assert all(option in shown for option in ("--epsilon", "--radius", "--proj-dim", "--seed"))


def test_package_runs_as_a_module(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["opacus-expm", "demo", "--proj-dim", "4", "--epsilon", "3"])
    with pytest.raises(SystemExit) as raised:
        runpy.run_module("opacus_expm", run_name="__main__")
    assert raised.value.code == 0
    printed = OUTPUT.fullmatch(capsys.readouterr().out)
    assert printed
    assert float(printed.group(4)) == 3.0


def test_training_as_in_the_demo_finds_the_slope(small_task):
    """``tasks.fit`` and ``tasks.loss``, which the demo's table rests on."""
    task = small_task(0)
    task.model.train()
    before = tasks.loss(task.model, task.private, task.criterion)
    tasks.fit(task.model, task.private, task.criterion, epochs=200, batch_size=50, learning_rate=1e-2)
    after = tasks.loss(task.model, task.private, task.criterion)
    assert task.model.training
    assert after == pytest.approx(0.01, rel=0.3)  # the noise's variance
    assert before > 10 * after
    assert task.model.weight[0, 0].item() == pytest.approx(1.4, abs=0.05)
    assert math.isfinite(task.model.bias.item())


# --- epsilon ---------------------------------------------------------------------------------------------------------


def _ledger(path):
    """A ledger with two releases and one DP-SGD step."""
    torch.manual_seed(0)
    x = torch.randn(20, 3)
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=5)
    engine = ExpMQuadEngine(ledger_path=path)
    options = {"criterion": torch.nn.MSELoss(), "max_grad_norm": 1.0, "max_curvature": 1.0}
    engine.make_private_expm(torch.nn.Linear(3, 1), loader, 0.25, 0.5, 2, **options)
    engine.make_private_expm(torch.nn.Linear(3, 1), loader, 0.5, 0.5, 2, delta=1e-5, regularization=1.0, **options)
    return engine


def test_epsilon_tells_what_a_ledger_cost(tmp_path, capsys):
    path = tmp_path / "ledger.jsonl"
    engine = _ledger(path)
    assert cli.main(["epsilon", str(path), "--delta", "1e-5"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert len(out) == 3
    assert "release: epsilon 0.25, delta 0 (range, range 0.25" in out[0]
    assert "release: epsilon 0.5, delta 1e-05" in out[1]
    epsilon, bound = engine.accountant.get_epsilon(1e-5, return_method=True)
    assert out[2] == f"total: epsilon = {epsilon:.6g} at delta = 1e-05 (bound: {bound})"

    assert cli.main(["epsilon", str(path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["epsilon"] == engine.get_epsilon(0.0)
    assert [e["release"]["epsilon"] for e in found["events"]] == [0.25, 0.5]


def test_epsilon_counts_dp_sgd_steps(tmp_path, capsys):
    path = tmp_path / "ledger.jsonl"
    _ledger(path).accountant.step(noise_multiplier=1.0, sample_rate=0.1)
    assert cli.main(["epsilon", str(path)]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[2] == "1 DP-SGD steps"
    assert out[3].startswith("total: no finite epsilon at delta = 0")


@pytest.mark.parametrize("content", [None, "not a ledger\n"])
def test_epsilon_refuses_what_is_no_ledger(tmp_path, capsys, content):
    path = tmp_path / "file"
    if content is not None:
        path.write_text(content)
    with pytest.raises(SystemExit) as stop:
        cli.main(["epsilon", str(path)])
    assert stop.value.code == 2
    assert str(path) in capsys.readouterr().err
    assert path.exists() == (content is not None)
    if content is not None:
        assert path.read_text() == content
