"""The command line, on a small stand-in for the sine regression."""

import dataclasses
import json
import math
import runpy
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import opacus_expm
from opacus_expm import Comparison, ExpMAccountant, ExpMQuadEngine, cli, paper, tasks
from opacus_expm.accounting.events import Query
from opacus_expm.experiments import spending

ROOT = Path(__file__).parents[1]


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
        return tasks.Task(model, draw(1.0), draw(1.4), draw(1.4), nn.MSELoss(), name="sine", metric="loss")

    monkeypatch.setattr(tasks, "sine", build)
    return build


# --- compare ---------------------------------------------------------------------------------------------------------

SMALL = ["compare", "sine", "--quick", "--epsilon", "2", "--seeds", "1", "--trials", "1"]


def test_compare_prints_a_table_and_writes_three_files(capsys, tmp_path, small_task):
    assert cli.main([*SMALL, "--out", str(tmp_path)]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    task = small_task(0)
    zero_shot = tasks.loss(task.model, task.test, task.criterion)
    assert f"{zero_shot:.3g}"[:4] in captured.out
    for label in ("zero-shot", "non-private", "Opacus DP-SGD", "ExpM-Quad"):
        assert label in captured.out
    assert {p.name for p in tmp_path.iterdir()} >= {"sine.csv", "sine.json", "sine.png", "cells.jsonl"}
    assert (tmp_path / "sine.png").read_bytes().startswith(b"\x89PNG")
    found = Comparison.from_json(tmp_path / "sine.json")
    assert found.epsilons == (2.0,)
    assert found.row("zero-shot").mean == pytest.approx(zero_shot, rel=1e-6)
    assert found.row("non-private").mean < 0.9 * zero_shot


@pytest.mark.slow
def test_compare_goes_on_where_it_was(capsys, tmp_path, monkeypatch):
    assert cli.main([*SMALL, "--out", str(tmp_path)]) == 0
    first = capsys.readouterr().out
    monkeypatch.setattr("opacus_expm.experiments.cells.dp_sgd", None)  # would fail if it were called again
    assert cli.main([*SMALL, "--out", str(tmp_path)]) == 0
    assert capsys.readouterr().out == first


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["sine", "--epsilon", "0"], "greater than 0, got 0.0"),
        (["sine", "--epsilon", "nan"], "got nan"),
        (["sine", "--epsilon", "much"], "argument --epsilon: invalid float value: 'much'"),
        (["sine", "--delta", "1"], "delta must be in [0, 1), got 1.0"),
        (["sine", "--trials", "0"], "trials must be a positive integer, got 0"),
        (["nothing"], "invalid choice: 'nothing'"),
    ],
)
def test_bad_options_are_explained(capsys, tmp_path, arguments, message):
    with pytest.raises(SystemExit) as raised:
        cli.main(["compare", *arguments, "--quick", "--out", str(tmp_path / "out")])
    assert raised.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err
    assert "Traceback" not in captured.err


def test_missing_data_is_explained(capsys, tmp_path, monkeypatch):
    def absent(data_dir=None):
        raise FileNotFoundError(f"mnist is not in {data_dir}; get it from its publisher")

    monkeypatch.setattr(tasks, "mnist", absent)
    with pytest.raises(SystemExit) as raised:
        cli.main(["compare", "mnist", "--data-dir", str(tmp_path), "--out", str(tmp_path / "out")])
    assert raised.value.code == 2
    assert "get it from its publisher" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("arguments", [[], ["demo"]])
def test_a_command_is_needed(capsys, arguments):
    with pytest.raises(SystemExit) as raised:
        cli.main(arguments)
    assert raised.value.code == 2
    assert "compare" in capsys.readouterr().err or not arguments


def test_help_lists_the_options(capsys):
    with pytest.raises(SystemExit) as raised:
        cli.main(["compare", "--help"])
    assert raised.value.code == 0
    shown = capsys.readouterr().out
    assert all(option in shown for option in ("--epsilon", "--delta", "--trials", "--seeds", "--out", "--quick"))


LOADED = """
import json, sys
import opacus_expm_command
try:
    opacus_expm_command.main(sys.argv[1:])
except SystemExit:
    print(json.dumps(sorted(sys.modules)))
"""


@pytest.mark.parametrize("option", ["--help", "--version", "epsilon --help"])
def test_help_and_version_load_nothing_heavy(option):
    script = [sys.executable, "-c", LOADED, *option.split()]
    done = subprocess.run(script, capture_output=True, text=True, check=True, cwd=ROOT)
    text, _, loaded = done.stdout.strip().rpartition("\n")
    assert "opacus-expm" in text
    roots = {name.partition(".")[0] for name in json.loads(loaded)}
    assert "argparse" in roots
    assert not roots & {"torch", "numpy", "scipy", "matplotlib", "opacus", "opacus_expm"}


def test_the_version_is_that_of_the_package(capsys):
    with pytest.raises(SystemExit) as raised:
        cli.main(["--version"])
    assert raised.value.code == 0
    assert capsys.readouterr().out == f"opacus-expm {opacus_expm.__version__}\n"


def test_package_runs_as_a_module(capsys, monkeypatch, tmp_path):
    engine = _ledger(tmp_path / "ledger.jsonl")
    monkeypatch.setattr(sys, "argv", ["opacus-expm", "epsilon", str(tmp_path / "ledger.jsonl")])
    with pytest.raises(SystemExit) as raised:
        runpy.run_module("opacus_expm", run_name="__main__")
    assert raised.value.code == 0
    assert f"total: epsilon = {engine.get_epsilon():.6g} at delta = 0" in capsys.readouterr().out


def test_training_finds_the_slope(small_task):
    """``tasks.fit`` and ``tasks.loss``."""
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
    assert found["guaranteed"] is True


def test_epsilon_says_what_is_not_guaranteed(tmp_path, capsys):
    path = tmp_path / "ledger.jsonl"
    ledger = _ledger(path).accountant
    engine = ExpMQuadEngine(accountant=ledger, noise_generator=np.random.default_rng(0))
    x = torch.ones(20, 3)
    loader = DataLoader(TensorDataset(x, x[:, :1]), batch_size=5)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="a private bound for epsilon")
        engine.make_private_expm(
            torch.nn.Linear(3, 1), loader, 0.5, 0.5, 2, criterion=torch.nn.MSELoss(), max_curvature=0.0
        )
    assert cli.main(["epsilon", str(path)]) == 0
    captured = capsys.readouterr()
    out = captured.out.splitlines()
    assert ["noise from a given generator" in line for line in out[:4]] == [False, False, True, True]
    assert out[4] == f"total: epsilon = {engine.get_epsilon():.6g} at delta = 0 (bound: pure)"
    assert out[5].startswith("NOT guaranteed: ")
    assert captured.err == ""
    assert cli.main(["epsilon", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["guaranteed"] is False


def test_epsilon_tells_the_budget(tmp_path, capsys):
    path = tmp_path / "ledger.jsonl"
    ExpMAccountant(budget=(2.0, 1e-6), ledger_path=path)
    assert cli.main(["epsilon", str(path)]) == 0
    assert capsys.readouterr().out.splitlines()[0].endswith("  budget: epsilon 2, delta 1e-06")
    late = tmp_path / "late.jsonl"
    _ledger(late)
    with pytest.warns(UserWarning, match="already"):
        ExpMAccountant(budget=(2.0, 1e-6), ledger_path=late)
    assert cli.main(["epsilon", str(late)]) == 0
    assert (
        capsys.readouterr().out.splitlines()[2].endswith("  budget: epsilon 2, delta 1e-06, declared after 2 charges")
    )
    assert cli.main(["epsilon", str(late), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["budget"] == {"epsilon": 2.0, "delta": 1e-6}


def test_epsilon_of_a_draw_whose_range_is_not_known(tmp_path, capsys):
    path = tmp_path / "ledger.jsonl"
    drawn = _ledger(tmp_path / "another.jsonl").accountant.releases[1]
    costs = {"epsilon_range": math.inf, "mu": 0.25, "calibration": "gaussian"}
    ExpMAccountant(ledger_path=path).record(dataclasses.replace(drawn, **costs))
    assert cli.main(["epsilon", str(path), "--delta", "1e-5"]) == 0
    assert "(gaussian, mu 0.25, add_remove)" in capsys.readouterr().out
    assert cli.main(["epsilon", str(path)]) == 0
    assert "total: no finite epsilon at delta = 0" in capsys.readouterr().out


def test_epsilon_counts_dp_sgd_steps(tmp_path, capsys):
    path = tmp_path / "ledger.jsonl"
    _ledger(path).accountant.step(noise_multiplier=1.0, sample_rate=0.1)
    assert cli.main(["epsilon", str(path)]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[2] == "1 DP-SGD steps"
    assert out[3].startswith("total: no finite epsilon at delta = 0")


def _queries(path):
    """A ledger with the kinds of charges that rounds without a radius leave."""
    accountant = ExpMAccountant(ledger_path=path, budget=(2.0, 1e-5))
    asked = {"epsilon": 1.0, "delta": 1e-5, "nominal_size": 100}
    accountant.record(Query("metric", **asked, mu=0.1))
    accountant.record(Query("directions", **asked, run=(4.0, 0.1, 20)))
    accountant.record(Query("direction", **asked, epsilon_range=0.02, pure=0.01))
    return accountant


def test_epsilon_tells_queries(tmp_path, capsys):
    path = tmp_path / "ledger.jsonl"
    accountant = _queries(path)
    assert cli.main(["epsilon", str(path), "--delta", "1e-5"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[1].endswith("  query: metric 1 (mu 0.1, add_remove)")
    assert out[2].endswith("  query: directions 1 (noise 4 at sample rate 0.1, 20 steps, add_remove)")
    assert out[3].endswith("  query: direction 1 (epsilon 0.01, range 0.02, add_remove)")
    assert out[4].startswith(f"total: epsilon = {accountant.get_epsilon(1e-5):.6g} at delta = 1e-05")


def test_epsilon_draws_what_was_spent(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    path = tmp_path / "ledger.jsonl"
    accountant = _queries(path)
    totals = [ExpMAccountant()]
    for release in accountant.releases:
        totals.append(ExpMAccountant())
        for event in (*totals[-2].releases, release):
            totals[-1].record(event)
    for _ in range(3):
        accountant.step(noise_multiplier=2.0, sample_rate=0.1)  # one point for all three
    assert cli.main(["epsilon", str(path), "--delta", "1e-5", "--plot"]) == 0
    told = capsys.readouterr()
    assert "total: epsilon" in told.out
    assert told.err == f"drawn to {tmp_path / 'ledger.jsonl.png'}\n"
    assert (tmp_path / "ledger.jsonl.png").read_bytes().startswith(b"\x89PNG")
    axes = spending.plot(path, 1e-5, tmp_path / "again.png")
    line, *_ = axes.get_lines()
    expected = [*(one.get_epsilon(1e-5) for one in totals), accountant.get_epsilon(1e-5)]
    assert list(line.get_ydata()) == pytest.approx(expected, rel=1e-9)
    assert [text.get_text() for text in axes.get_legend().get_texts()] == [
        "query: 3",
        "DP-SGD: 1",
        "budget: ε = 2, δ = 1e-05",
    ]
    drawn = axes.get_lines()[1:]
    assert len({(one.get_linestyle(), one.get_marker()) for one in drawn}) == 3  # told apart without colour


@pytest.mark.parametrize(("charged", "message"), [(False, "holds no charge"), (True, "pass a larger delta")])
def test_epsilon_says_why_it_draws_nothing(tmp_path, capsys, charged, message):
    path = tmp_path / "ledger.jsonl"
    _queries(path) if charged else ExpMAccountant(ledger_path=path)
    with pytest.raises(SystemExit):
        cli.main(["epsilon", str(path), "--plot"])
    assert message in capsys.readouterr().err
    assert not (tmp_path / "ledger.jsonl.png").exists()


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


@pytest.mark.parametrize("options", [[], ["--json"], ["--delta", "1e-5"]])
def test_epsilon_states_nothing_for_bounds_that_were_read_off_the_private_data(tmp_path, capsys, options):
    """A message and a status, neither a number nor a traceback; what a ledger held before does not help."""
    path = tmp_path / "ledger.jsonl"
    engine = _ledger(path)
    x = torch.randn(20, 3, generator=torch.Generator().manual_seed(1))
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=5)
    model, criterion = torch.nn.Linear(3, 1), torch.nn.MSELoss()
    with pytest.warns(UserWarning, match="NOT differentially private"):
        found = paper.bounds_read_off(model, loader, criterion)
    given = {"max_grad_norm": found.gradient, "max_curvature": found.curvature}
    statistics = engine.gather(model, loader, 2, criterion=criterion, **given)
    paper.release(engine.books(), paper.read_off(statistics), 0.5, 0.5)
    with pytest.raises(SystemExit) as stop:
        cli.main(["epsilon", str(path), *options])
    assert stop.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "not differentially private, and no epsilon can be stated for this ledger" in captured.err
    assert "Traceback" not in captured.err
