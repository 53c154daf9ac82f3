"""The comparison: every budget, the search that never sees the test data, resumption, and what is written and drawn."""

import csv
import dataclasses
import functools
import inspect
import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from test_baselines import linear, regression
from torch import nn
from torch.utils.data import DataLoader, Dataset, SubsetRandomSampler

from opacus_expm import ExpMQuadEngine, tasks
from opacus_expm.baselines import dp_sgd
from opacus_expm.experiments import cells, cost, methods
from opacus_expm.experiments.compare import compare
from opacus_expm.experiments.results import Candidate, Comparison, Row
from opacus_expm.experiments.task import in_memory
from opacus_expm.experiments.tasks import Task
from opacus_expm.mechanism import curves

DELTA = 1e-5
# Whole batches need no search for the noise.
DP_SGD = {"learning_rate": (0.1,), "max_grad_norm": (1.0,), "sample_rate": (1.0,), "epochs": (5,)}
NON_PRIVATE = {"learning_rate": (0.1,), "batch_size": (50,), "epochs": (5,)}
GRIDS = {"non-private": NON_PRIVATE, "dp-sgd": DP_SGD}


@pytest.fixture
def task():
    """A regression whose slope moves from 1 to 1.6."""
    return Task(
        linear(), regression(1.0, seed=1), regression(1.6, 300, seed=2), regression(1.6, seed=3), nn.MSELoss(), "toy"
    )


def run(task, epsilons=(1.0,), **options):
    return compare(
        task, epsilons, **{"delta": DELTA, "seeds": 2, "trials": 1, "grids": GRIDS, "progress": False, **options}
    )


# --- compare ---------------------------------------------------------------------------------------------------------


def test_compare_runs_every_method_at_every_budget(task):
    found = run(task, (5.0, 1.0))
    assert [(r.method, r.epsilon, r.delta) for r in found.rows] == [
        ("zero-shot", None, None),
        ("non-private", None, None),
        ("dp-sgd", 1.0, DELTA),
        ("dp-sgd", 5.0, DELTA),
        ("expm", 1.0, 0.0),
        ("expm", 5.0, 0.0),
        ("expm-delta", 1.0, DELTA),
        ("expm-delta", 5.0, DELTA),
    ]
    assert found.epsilons == (1.0, 5.0)
    assert (found.task, found.metric, found.seeds) == ("toy", "loss", (0, 1))
    zero_shot, best = found.row("zero-shot").mean, found.row("non-private").mean
    assert found.row("zero-shot").values == (task.score(task.model),)
    assert best < 0.2 * zero_shot
    for method in ("dp-sgd", "expm", "expm-delta"):
        row = found.row(method, 5.0)
        assert len(row.values) == 2
        assert row.std > 0
        assert best < row.mean < zero_shot
        assert row.seconds > 0
    assert found.row("dp-sgd", 1.0).settings == {k: v[0] for k, v in DP_SGD.items()}
    assert found.row("expm", 1.0).settings == found.row("expm-delta", 1.0).settings == {}
    assert found.search == ()  # nothing to choose
    with pytest.raises(KeyError, match="no row"):
        found.row("dp-sgd", 2.0)


@pytest.mark.parametrize("shuffle", [False, True])
def test_compare_takes_a_model_and_its_loaders(task, shuffle):
    """The same as a task of tensors, whatever the order in which a loader gives its records."""
    data = {name: DataLoader(getattr(task, name), batch_size=7, shuffle=shuffle) for name in ("private", "test")}
    options = {"seeds": 1, "methods": ["zero-shot", "dp-sgd", "expm"]}
    found = run(task.model, **data, **options)
    assert [row.values for row in found.rows] == [row.values for row in run(task, **options).rows]
    assert found.metric == "loss"


class Pairs(Dataset):
    """Records that are made when they are asked for, by their own names."""

    def __init__(self, number):
        self.number = number

    def __len__(self):
        return self.number

    def __getitem__(self, index):
        return {"input": torch.tensor([float(index), 1.0]), "target": index % 2}


def collate(records):
    return torch.stack([r["input"] for r in records]), torch.tensor([r["target"] for r in records])


def test_the_records_of_a_loader_are_read_once_in_their_order():
    sampler = SubsetRandomSampler([5, 3, 400])
    held = in_memory("private", DataLoader(Pairs(600), batch_size=2, sampler=sampler, collate_fn=collate))
    assert held.tensors[0][:, 0].tolist() == [3.0, 5.0, 400.0]
    assert held.tensors[1].tolist() == [1, 1, 0]
    assert in_memory("private", held) is held
    whole = in_memory("private", DataLoader(Pairs(600), batch_size=32, shuffle=True, collate_fn=collate))
    assert whole.tensors[0][:, 0].tolist() == list(range(600))


def test_whole_number_targets_are_classes():
    data = DataLoader(Pairs(40), batch_size=8, collate_fn=collate)
    model = nn.Linear(2, 2)
    found = run(model, private=data, test=data, methods=["zero-shot"])
    assert found.metric == "accuracy"
    assert found.row("zero-shot").values == (tasks.accuracy(model, in_memory("test", data)),)


def test_inputs_that_are_no_tensor_are_refused():
    loader = DataLoader(Pairs(4), collate_fn=lambda records: {"a": collate(records)[0], "labels": collate(records)[1]})
    with pytest.raises(ValueError, match=r"private must yield at least one pair of tensors"):
        in_memory("private", loader)


def test_compare_is_fixed_by_its_seeds(task):
    first, again, other = (run(task, seeds=seeds, methods=["dp-sgd", "expm"]) for seeds in ([3, 4], [3, 4], [5]))
    assert [r.values for r in first.rows] == [r.values for r in again.rows]
    assert not {v for r in first.rows for v in r.values} & {v for r in other.rows for v in r.values}


@pytest.fixture
def calls(monkeypatch):
    """What our engine was asked, and what its ledger said afterwards."""
    found = []
    original = ExpMQuadEngine.make_private_expm

    @functools.wraps(original)
    def spy(self, *arguments, **options):
        model = original(self, *arguments, **options)
        found.append((self, inspect.signature(original).bind(self, *arguments, **options).arguments))
        return model

    monkeypatch.setattr(ExpMQuadEngine, "make_private_expm", spy)
    return found


def test_runs_spend_the_same_budget(task, engines, calls):
    """ε of DP-SGD by Opacus's ledger, of ours by the engine's."""
    run(task, (2.0,), seeds=1)
    ((sigma, rate, steps),) = engines[0].accountant.history
    assert rate == 1.0
    assert curves.gaussian_epsilon(math.sqrt(steps) / sigma, DELTA) == pytest.approx(2.0)
    (pure, _), (approximate, _) = calls
    assert pure.get_epsilon(0.0) == pytest.approx(2.0)
    assert 1.95 < approximate.get_epsilon(DELTA) <= 2.0
    for engine in (pure, approximate):
        assert {event.adjacency for event in engine.accountant.releases} == {"add_remove"}


def test_our_method_is_the_call_with_a_budget_and_nothing_else(task, calls):
    run(task, (1.0, 2.0), seeds=1, methods=["expm", "expm-delta"])
    assert [(asked["epsilon"], asked["delta"]) for _, asked in calls] == [
        (1.0, 0.0),
        (2.0, 0.0),
        (1.0, DELTA),
        (2.0, DELTA),
    ]
    for _, asked in calls:
        assert set(asked) == {"self", "model", "loader", "epsilon", "delta", "criterion", "progress"}
        assert asked["model"] is task.model
        assert asked["criterion"] is task.criterion
        records = torch.cat([x for x, _ in asked["loader"]])
        assert torch.equal(records, task.private.tensors[0])  # all of them: none is held out for a search


def test_public_data_are_not_needed(task):
    options = {"seeds": 1, "methods": ["dp-sgd", "expm-delta"]}
    without = run(dataclasses.replace(task, public=None), **options)
    assert [row.values for row in without.rows] == [row.values for row in run(task, **options).rows]


# --- the search ------------------------------------------------------------------------------------------------------


def test_the_search_never_sees_the_test_data(task):
    """On the poisoned test data not to learn is best; the search must choose to learn all the same."""
    still, learning = 1e-6, 0.1
    poisoned = dataclasses.replace(task, test=regression(1.0, seed=9))
    grids = {
        "non-private": {**NON_PRIVATE, "learning_rate": (still, learning)},
        "dp-sgd": {**DP_SGD, "learning_rate": (still, learning)},
    }
    methods = list(grids)
    found = run(poisoned, (20.0,), methods=methods, grids=grids)
    for method in methods:
        epsilon = None if method == "non-private" else 20.0
        chosen = found.row(method, epsilon)
        assert chosen.settings["learning_rate"] == learning
        unmoved = {method: {**grids[method], "learning_rate": (still,)}}
        on_test = run(poisoned, (20.0,), methods=[method], grids=unmoved)
        assert on_test.row(method, epsilon).mean < chosen.mean  # the test data would have chosen otherwise
    assert found.search == run(task, (20.0,), methods=methods, grids=grids).search


def test_the_search_trains_on_other_records_than_it_scores_on(task, monkeypatch):
    seen = []
    original = dp_sgd

    def spy(model, dataset, criterion, **options):
        seen.append((options["seed"], dataset.tensors[0]))
        return original(model, dataset, criterion, **options)

    scored = []
    monkeypatch.setattr(cells, "dp_sgd", spy)
    monkeypatch.setattr(Task, "score", lambda self, model: scored.append(self.test.tensors[0]) or 0.0)
    run(task, methods=["dp-sgd"], grids={"dp-sgd": {**DP_SGD, "epochs": (1, 2)}}, seeds=1, trials=2, validation=0.25)
    assert [(seed, len(x)) for seed, x in seen] == [
        *((seed, 225) for seed in (1_000_000, 1_000_001) * 2),
        (0, 300),
    ]
    everything = task.private.tensors[0]
    for (_, train), held in zip(seen[:-1], scored[:-1], strict=True):
        assert len(held) == 75
        joined = torch.cat([train, held])
        assert torch.equal(joined[joined[:, 0].argsort()], everything[everything[:, 0].argsort()])
    assert scored[-1] is task.test.tensors[0]


@pytest.mark.parametrize(
    ("metric", "scores", "chosen"),
    [
        ("loss", [3.0, 1.0, 2.0], 2),
        ("accuracy", [3.0, 1.0, 2.0], 1),
        ("loss", [math.nan, math.inf, 7.0], 3),
        ("accuracy", [math.nan, 2.0, math.inf], 2),
        ("loss", [1.0, 1.0, 2.0], 1),
        ("loss", [math.nan, math.nan, math.nan], 1),
    ],
)
def test_the_best_score_wins_and_what_diverged_does_not(task, monkeypatch, metric, scores, chosen):
    monkeypatch.setattr(cells, "dp_sgd", lambda *parts, epochs, **options: epochs)
    monkeypatch.setattr(Task, "score", lambda self, epochs: scores[epochs - 1])
    found = run(
        dataclasses.replace(task, metric=metric), methods=["dp-sgd"], grids={"dp-sgd": {**DP_SGD, "epochs": (1, 2, 3)}}
    )
    assert found.row("dp-sgd", 1.0).settings["epochs"] == chosen
    assert [c.score for c in found.search] == pytest.approx(scores, nan_ok=True)


# --- resumption ------------------------------------------------------------------------------------------------------


@pytest.fixture
def count(monkeypatch):
    """How often a cell was computed."""
    calls = []
    original = cells.Bench.run

    def counted(self, cell):
        calls.append((cell.method, cell.epsilon, cell.seed))
        return original(self, cell)

    monkeypatch.setattr(cells.Bench, "run", counted)
    return calls


def test_finished_cells_are_not_computed_again(task, tmp_path, count):
    first = run(task, (1.0, 2.0), out=tmp_path / "new" / "directory")
    assert len(count) == 1 + 2 + 2 * 2 * 3
    count.clear()
    assert run(task, (1.0, 2.0), out=tmp_path / "new" / "directory") == first
    assert count == []
    more = run(task, (2.0, 3.0), seeds=3, methods=["dp-sgd"], out=tmp_path / "new" / "directory")
    assert sorted(count) == [("dp-sgd", 2.0, 2), *(("dp-sgd", 3.0, seed) for seed in range(3))]
    assert more.row("dp-sgd", 2.0).values[:2] == first.row("dp-sgd", 2.0).values


def test_an_interrupted_run_goes_on(task, tmp_path, count, monkeypatch):
    whole = run(task, out=None, methods=["dp-sgd", "expm"])
    count.clear()

    def interrupted(*arguments, **options):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(ExpMQuadEngine, "make_private_expm", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run(task, out=tmp_path, methods=["dp-sgd", "expm"])
    with open(tmp_path / "cells.jsonl", "a", encoding="utf-8") as file:
        file.write('{"configuration": "torn')
    assert count == [("dp-sgd", 1.0, 0), ("dp-sgd", 1.0, 1), ("expm", 1.0, 0)]
    count.clear()
    resumed = run(task, out=tmp_path, methods=["dp-sgd", "expm"])
    assert count == [("expm", 1.0, 0), ("expm", 1.0, 1)]
    assert [r.values for r in resumed.rows] == [r.values for r in whole.rows]
    count.clear()
    run(task, out=tmp_path, methods=["dp-sgd", "expm"])
    assert count == []


@pytest.mark.parametrize("changed", ["delta", "test", "model", "criterion", "validation"])
def test_another_configuration_is_computed_anew(task, tmp_path, count, changed):
    run(task, out=tmp_path, methods=["expm"], seeds=1)
    count.clear()
    options = {"delta": 1e-6, "validation": 0.3}
    model = linear()
    with torch.no_grad():
        model.bias.fill_(0.1)
    fields = {"test": regression(1.6, seed=8), "model": model, "criterion": nn.HuberLoss()}
    other = dataclasses.replace(task, **{changed: fields[changed]}) if changed in fields else task
    run(other, out=tmp_path, methods=["expm"], seeds=1, **{changed: options[changed]} if changed in options else {})
    assert count == [("expm", 1.0, 0)]


def test_diverged_runs_are_remembered(task, tmp_path, monkeypatch, count):
    monkeypatch.setattr(Task, "score", lambda self, model: math.inf)
    for _ in range(2):
        found = run(task, methods=["dp-sgd"], out=tmp_path)
        assert not np.isfinite(found.row("dp-sgd", 1.0).mean)
        assert "± nan" in found.table()
    assert len(count) == 2
    found.to_json(tmp_path / "c.json")
    assert "NaN" not in (tmp_path / "c.json").read_text()
    assert math.isnan(Comparison.from_json(tmp_path / "c.json").row("dp-sgd", 1.0).mean)


# --- results ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def found():
    """A result by hand."""
    grids = {
        "dp-sgd": ({"learning_rate": (0.1, 0.3, 1.0), "sample_rate": (0.1,)},),
        "non-private": ({"epochs": (5,)},),
    }
    rows = [
        Row("zero-shot", None, None, (80.0,), 0.0, None, {}),
        Row("non-private", None, None, (95.0, 96.0), 3.0, 20.0, {"epochs": 5}),
    ]
    for epsilon, better in ((0.1, 0.0), (1.0, 5.0), (10.0, 8.0)):
        rate = {0.1: 0.1, 1.0: 0.3, 10.0: 1.0}[epsilon]
        settings = {"learning_rate": rate, "sample_rate": 0.1}
        rows.append(Row("dp-sgd", epsilon, 1e-5, (81.0 + better, 83.0 + better), 2.0, 30.0, settings))
    for epsilon in (0.1, 1.0, 10.0):
        rows.append(Row("expm", epsilon, 0.0, (85.0, 87.0), 1.0, None, {}))
    search = (
        Candidate("dp-sgd", 0.1, {"learning_rate": 0.1, "sample_rate": 0.1}, 81.5),
        Candidate("dp-sgd", 0.1, {"learning_rate": 0.3, "sample_rate": 0.1}, 80.0),
    )
    return Comparison("toy", "accuracy", 1e-5, (0, 1), 1, 0.2, grids, tuple(rows), search)


def test_table(found):
    lines = found.table().split("\n")
    assert [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[:6] if "---" not in line] == [
        ["test accuracy (%)", "ε = 0.1", "ε = 1", "ε = 10"],
        ["zero-shot", "80.0", "80.0", "80.0"],
        ["non-private", *["95.5 ± 0.7"] * 3],
        ["Opacus DP-SGD, (ε, δ)", "82.0 ± 1.4", "87.0 ± 1.4", "90.0 ± 1.4"],
        ["ExpM-Quad, (ε, 0), untuned", *["86.0 ± 1.4"] * 3],
    ]
    assert len({len(line) for line in lines[:6]}) == 1  # aligned
    text = found.table()
    assert "learning_rate=0.1*, sample_rate=0.1 " in text
    assert "learning_rate=0.3, sample_rate" in text
    assert "learning_rate=1*, sample_rate" in text
    ours = [line for line in lines if line.startswith("| ExpM-Quad")]
    assert [line.split("|")[-2].strip() for line in ours[1:]] == ["none"] * 3
    assert "over 2 seeds; add/remove adjacency; δ = 1e-05" in text
    assert "(Opacus DP-SGD, (ε, δ): 2; 1 run each) on 20% of the private records" in text
    assert "This choice is NOT charged." in text
    assert "untuned; whatever it takes from the private records is charged" in text


def test_csv(found, tmp_path):
    found.to_csv(tmp_path / "c.csv")
    with open(tmp_path / "c.csv", newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(found.rows)
    for line, row in zip(rows, found.rows, strict=True):
        assert line["method"] == row.method
        assert line["epsilon"] == ("" if row.epsilon is None else str(row.epsilon))
        assert float(line["mean"]) == row.mean
        assert float(line["std"]) == row.std
        assert int(line["runs"]) == len(row.values)
        assert json.loads(line["settings"]) == row.settings


def test_json_round_trip(found, task, tmp_path):
    for result in (found, run(task, grids={**GRIDS, "dp-sgd": {**DP_SGD, "epochs": (1, 2)}})):
        result.to_json(tmp_path / "c.json")
        again = Comparison.from_json(tmp_path / "c.json")
        assert again == result
        assert again.table() == result.table()


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"format": 2}', '{"format": 1, "rows": 3}', "not json"])
def test_other_files_are_no_comparisons(tmp_path, content):
    (tmp_path / "c.json").write_text(content)
    with pytest.raises(ValueError, match="holds no comparison"):
        Comparison.from_json(tmp_path / "c.json")


def test_repr_shows_no_values(found):
    assert repr(found) == (
        "Comparison('toy', methods=(zero-shot, non-private, dp-sgd, expm), epsilons=(0.1, 1.0, 10.0), seeds=2)"
    )


def test_results_are_frozen(found):
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.delta = 0.5
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.rows[0].values = ()


def test_plot(found, tmp_path):
    pytest.importorskip("matplotlib")
    axes = found.plot(tmp_path / "c.png")
    assert (tmp_path / "c.png").read_bytes()[:4] == b"\x89PNG"
    assert axes.get_xscale() == "log"
    assert axes.get_xlabel() == "privacy budget ε"
    assert axes.get_ylabel() == "test accuracy (%)"
    lines = {line.get_label(): line for line in axes.get_lines()}
    assert list(lines) == ["zero-shot", "non-private", "Opacus DP-SGD, (ε, δ)", "ExpM-Quad, (ε, 0), untuned"]
    assert list(lines["zero-shot"].get_ydata()) == [80.0, 80.0]
    assert list(lines["Opacus DP-SGD, (ε, δ)"].get_xdata()) == [0.1, 1.0, 10.0]
    assert list(lines["Opacus DP-SGD, (ε, δ)"].get_ydata()) == [82.0, 87.0, 90.0]
    assert [t.get_text() for t in axes.get_legend().get_texts()] == list(lines)
    assert len({(line.get_linestyle(), line.get_marker()) for line in lines.values()}) == 4
    bands = [c.get_paths()[0].vertices[:, 1] for c in axes.collections]
    assert len(bands) == 2
    assert (min(bands[1]), max(bands[1])) == pytest.approx((86 - math.sqrt(2), 86 + math.sqrt(2)))
    assert [t.get_text() for t in axes.get_xticklabels()] == ["0.1", "1", "10"]


def test_plot_into_given_axes(found):
    figure = pytest.importorskip("matplotlib.figure").Figure()
    axes = figure.add_subplot()
    assert found.plot(axes) is axes
    assert len(axes.get_lines()) == 4
    assert found.plot().figure is not figure
    with pytest.raises(TypeError, match="where must be a path"):
        found.plot(3)


def test_plot_says_what_to_install(found, monkeypatch):
    for name in ("matplotlib", "matplotlib.axes", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=r'pip install "opacus-expm\[plots\]"'):
        found.plot()


# --- input and costs -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"task": "sine"}, TypeError, "model must be a module with private= and test=, or a Task, got str"),
        ({"test": regression(1.0)}, ValueError, "model is a Task, which has its data already: leave out test"),
        ({"task": linear(), "test": regression(1.0)}, ValueError, "model needs its data: pass private="),
        ({"epsilons": ()}, TypeError, "epsilons must be a list of numbers"),
        ({"epsilons": "1"}, TypeError, "epsilons must be a list of numbers"),
        ({"epsilons": (1.0, -1.0)}, ValueError, "epsilons must be greater than 0"),
        ({"delta": 1.0}, ValueError, "delta must be in"),
        ({"delta": 0.0, "methods": ["dp-sgd"]}, ValueError, "delta must be greater than 0 for the method 'dp-sgd'"),
        ({"seeds": 0}, ValueError, "seeds must be a positive integer"),
        ({"seeds": [1, 1]}, ValueError, "seeds must hold at least one number, each once"),
        ({"seeds": [-1]}, ValueError, "seeds must be a non-negative integer"),
        ({"methods": "expm"}, TypeError, "methods must be a list of names"),
        ({"methods": ["sgd"]}, ValueError, "methods must be one of"),
        ({"trials": 1.5}, TypeError, "trials must be a positive integer"),
        ({"validation": 0.0}, ValueError, "validation must be greater than 0"),
        ({"validation": 1e-6}, ValueError, "leaves nothing to hold out"),
        ({"grids": {"sgd": DP_SGD}}, ValueError, "grids: a method must be one of"),
        ({"grids": {"dp-sgd": ()}}, ValueError, "must hold at least one grid"),
        ({"grids": {"dp-sgd": [3]}}, TypeError, "must be a mapping from settings to values"),
        ({"grids": {"dp-sgd": {"epochs": (1,)}}}, ValueError, "learning_rate, max_grad_norm, sample_rate"),
        ({"grids": {"dp-sgd": {**DP_SGD, "epochs": 3}}}, ValueError, r"\['epochs'\] must be a list of values, got 3"),
        ({"grids": {"dp-sgd": {**DP_SGD, "sample_rate": (0.0,)}}}, ValueError, r"numbers in \(0, 1\]"),
        ({"grids": {"dp-sgd": {**DP_SGD, "epsilon": (1.0,)}}}, ValueError, "a setting must be one of"),
        ({"grids": {"dp-sgd": {**DP_SGD, "momentum": ("high",)}}}, TypeError, "must hold numbers, got"),
        ({"grids": {"expm": {"radius": (0.1,)}}}, ValueError, r"grids\['expm'\] must be left out: .* nothing to tune"),
        ({"grids": {"expm-delta": {}}}, ValueError, r"grids\['expm-delta'\] must be left out"),
    ],
)
def test_compare_names_what_is_wrong_before_it_runs(task, change, error, message, count):
    arguments = {"task": task, "epsilons": (1.0,), **change}
    with pytest.raises(error, match=message):
        run(arguments.pop("task"), arguments.pop("epsilons"), **arguments)
    assert count == []


def test_methods_without_a_budget_need_none_in_the_table(task):
    assert "| zero-shot | 0." in run(task, methods=["zero-shot"]).table()


def test_without_delta_the_methods_that_need_one_are_left_out(task):
    found = run(task, delta=0.0, seeds=1)
    assert {row.method for row in found.rows} == {"zero-shot", "non-private", "expm"}


@pytest.mark.parametrize("grids", [methods.GRIDS, methods.QUICK_GRIDS])
def test_grids_hold_what_they_may(grids):
    assert not set(grids) & set(methods.OURS)
    for method, grid in grids.items():
        for part in grid:
            methods.check_grid(method, part)


def test_peak_memory_is_that_of_the_run():
    device = torch.device("cpu")
    if cost._reset_peak(device) is None:
        pytest.skip("this system does not tell")
    with cost.metered(device) as large:
        np.ones(2**23)  # 64 MiB
    with cost.metered(device) as small:
        np.ones(2**10)
    assert 60 < large.memory < 80
    assert small.memory < 10


@pytest.mark.parametrize("name", ["icu", "sine"])
def test_what_the_docs_show_is_what_was_found(name):
    root = Path(__file__).parents[2]
    found = Comparison.from_json(root / "benchmarks" / "comparison" / f"{name}.json")
    assert found.table().split("\n\n")[0] in (root / "docs" / "pages" / "results.md").read_text(encoding="utf-8")
