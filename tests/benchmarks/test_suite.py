"""The suite: what is run, resumed and kept; the table against the JSON; the plans of stored results against the formula."""

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from benchmarks.suite import __main__ as suite
from benchmarks.suite import ours, report, rivals
from opacus_expm import tasks
from opacus_expm.accounting.events import Query
from opacus_expm.experiments.journal import read_result, write_result
from opacus_expm.pure import PureRule
from opacus_expm.rule import Rule

ROOT = Path(__file__).parents[2]
STORED = ROOT / "benchmarks" / "suite"
SETTINGS = {"learning_rate": (0.1, 0.3), "max_grad_norm": (1.0,), "sample_rate": (0.2,), "epochs": (2,)}

# --- a run -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def tiny(monkeypatch):
    """Two made-up tasks, 300 records and one layer each; returns the arguments of every call of the engine."""

    def task(name, seed):
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(300, 3, generator=generator)
        data = TensorDataset(x, (x[:, 0] > 0).long())
        start = nn.Linear(3, 2)
        nn.init.zeros_(start.weight)
        nn.init.zeros_(start.bias)
        public = TensorDataset(x + 1, data.tensors[1])
        return tasks.Task(start, public, data, data, nn.CrossEntropyLoss(), name=name, metric="accuracy")

    for module in (rivals, ours):
        monkeypatch.setattr(module, "task_of", task)
    monkeypatch.setattr(rivals, "GRIDS", dict.fromkeys(("icu", "sine"), (SETTINGS,)))
    calls = []

    class Engine(ours.ExpMQuadEngine):
        def make_private_expm(self, *arguments, **options):
            calls.append((arguments, options))
            return super().make_private_expm(*arguments, **options)

    monkeypatch.setattr(ours, "ExpMQuadEngine", Engine)
    return calls


def arguments(directory, *more):
    return ["icu", "--seeds", "2", "--epsilons", "1", "10", "--out", str(directory), *more]


@pytest.mark.filterwarnings("ignore")  # Opacus's own
@pytest.mark.slow
def test_every_method_runs_once_and_is_kept(tiny, tmp_path, capsys):
    suite.main(arguments(tmp_path))
    found = read_result(tmp_path / "icu.json")
    assert (found["task"], found["metric"], found["delta"]) == ("icu", "accuracy", 1e-5)
    kept = {(row["method"], row["epsilon"]): row["runs"] for row in found["rows"]}
    both = [(method, epsilon) for method in ("ours", "pure", "free", "charged", "untuned") for epsilon in (1.0, 10.0)]
    assert list(kept) == [("zero-shot", None), ("non-private", None), *both]
    assert all([run["seed"] for run in runs] == [0, 1] for runs in kept.values())
    assert all(run["score"] > 85 for method in ("ours", "pure") for run in kept[method, 10.0])
    assert all(run["score"] > 90 for run in kept["non-private", None])
    assert all(0.9 * epsilon < run["charged"] <= epsilon for epsilon in (1.0, 10.0) for run in kept["ours", epsilon])
    assert all(run["charged"] == pytest.approx(epsilon) for epsilon in (1.0, 10.0) for run in kept["pure", epsilon])
    for epsilon in (1.0, 10.0):
        check_pure_plan(epsilon, kept["pure", epsilon][0])
    assert report.table([found]) in capsys.readouterr().out
    assert (tmp_path / "suite.png").stat().st_size > 10_000

    # The call has a budget and a criterion, and nothing else.
    assert len(tiny) == 8
    assert {epsilon for (_, _, epsilon), _ in tiny} == {1.0, 10.0}
    assert all(set(options) == {"delta", "criterion"} for _, options in tiny)
    assert sorted(options["delta"] for _, options in tiny) == [0.0] * 4 + [1e-5] * 4

    # Another process finds everything in the log, even where the results are gone.
    tiny.clear()
    before = (tmp_path / "icu.json").read_text(), (tmp_path / "log.jsonl").read_text()
    (tmp_path / "icu.json").unlink()
    suite.main(arguments(tmp_path))
    assert tiny == []
    assert ((tmp_path / "icu.json").read_text(), (tmp_path / "log.jsonl").read_text()) == before

    # A later run with less leaves the other rows as they are.
    suite.main(["icu", "--seeds", "1", "--epsilons", "1", "--methods", "ours", "--out", str(tmp_path)])
    later = {(row["method"], row["epsilon"]): row["runs"] for row in read_result(tmp_path / "icu.json")["rows"]}
    assert list(later) == list(kept)
    assert later.pop(("ours", 1.0)) == kept["ours", 1.0][:1]
    assert all(later[key] == kept[key] for key in later)


def test_unknown_tasks_are_named(tmp_path, capsys):
    with pytest.raises(SystemExit):
        suite.main(["icu", "weather", "--out", str(tmp_path)])
    assert "got weather" in capsys.readouterr().err
    with pytest.raises(FileNotFoundError, match=r"python -m benchmarks\.suite"):
        suite.main(["--report", "--out", str(tmp_path)])


def test_passes_are_counted_from_the_formula():
    """Written out: a metric, a bound, losses at the start, a choice between two places, and directions."""
    assert Rule(1.0, 1e-5, 2000, 1, True, head=True).looking == pytest.approx(2 + 2 / 3)
    assert Rule(1.0, 1e-5, 2000, 1, False, head=True).looking == pytest.approx(2 + 2 / 3 + 1 / 3)
    assert Rule(1.0, 1e-5, 2000, 3, True).looking == pytest.approx(2 + 2 / 3 + 1 / 3)
    assert all(Rule(1.0, 1e-5, 2000, layers, False).passes == pytest.approx(10) for layers in range(6))
    assert Rule(0.1, 1e-5, 2000, 1, True, head=True).passes == pytest.approx(2 + 2 / 3 + 5)


def test_passes_of_pure_rounds_are_counted_from_the_formula():
    """Written out: a bound, and a direction with ten steps and the start a round; four steps and the start in later ones."""
    assert PureRule(0.1, 2000, 770, True).passes == pytest.approx(1 + 1 + 11 / 3)
    assert PureRule(1.0, 2000, 22, False).passes == pytest.approx(1 + 1 / 3 + 2 + (11 + 5) / 3)
    assert PureRule(10.0, 2000, 22, True).passes == pytest.approx(1 + 4 + (11 + 3 * 5) / 3)


def test_a_plan_with_two_prices_for_one_question_is_refused():
    run = Query("directions", 1.0, 1e-5, 100, run=(2.0, 0.5, 10))
    lengths = [Query("length", 1.0, 1e-5, 100, mu=mu) for mu in (0.1, 0.1, 0.2)]
    assert ours.plan([run, *lengths[:2]])["shares"] == {"length": {"count": 2, "mu": 0.1}}
    with pytest.raises(ValueError, match="'length' has several prices"):
        ours.plan([run, *lengths])


def test_what_is_cited_is_what_the_accuracy_benchmark_found():
    found = read_result(ROOT / "benchmarks" / "accuracy" / "mnist.json")
    [row] = [row for row in found["rows"] if (row["method"], row["epsilon"]) == ("dp-sgd", 1.0)]
    assert [ours.cited("mnist", 1.0, seed)["score"] for seed in range(5)] == row["scores"]
    assert ours.cited("mnist", 1.0, 0)["source"] == "benchmarks/accuracy/mnist.json"
    with pytest.raises(ValueError, match="seed 5"):
        ours.cited("mnist", 1.0, 5)
    with pytest.raises(ValueError, match="'free'"):
        ours.cited("sms_head", 1.0, 0)


# --- the report ------------------------------------------------------------------------------------------------------


def made_up(metric="accuracy", first=(70.0, 72.0, 77.0), second=(71.0, 71.5, 74.0), **more):
    """Results of one task at ε = 1; the tuned rival has its seeds in another order, and one more."""

    def row(method, scores, epsilon=1.0):
        runs = [{"seed": seed, "score": s, "seconds": 2.0 + seed, "passes": 10} for seed, s in enumerate(scores)]
        return {"method": method, "epsilon": epsilon, "runs": runs}

    rival = row("free", [*second, 99.0])
    rival["runs"].reverse()
    rows = [row("zero-shot", first[:1], None), row("ours", first), rival]
    return {"task": "icu", "metric": metric, "rows": rows, **more}


def test_the_difference_is_paired_by_seed():
    found = report.difference(made_up(), 1.0)
    differences = np.array([-1.0, 0.5, 3.0])
    assert found.value == pytest.approx(differences.mean())
    assert found.error == pytest.approx(differences.std(ddof=1) / math.sqrt(3))
    assert report.difference(made_up(), 10.0) is None


@pytest.mark.parametrize(
    ("metric", "first", "second", "said"),
    [
        ("accuracy", (75.0, 76.0), (74.0, 75.1), "ahead"),
        ("accuracy", (75.0, 76.0), (76.0, 76.9), "behind"),
        ("accuracy", (75.0, 76.0), (75.2, 76.2), "level"),  # within 0.3 points
        ("accuracy", (75.0, 79.0), (76.0, 76.0), "level"),  # within a standard error
        ("loss", (0.050, 0.060), (0.052, 0.063), "ahead"),
        ("loss", (0.052, 0.063), (0.050, 0.060), "behind"),
        ("loss", (0.050, 0.060), (0.040, 0.071), "level"),
    ],
)
def test_the_verdict(metric, first, second, said):
    found = made_up(metric, first, second)
    assert report.verdict(found, 1.0) == said
    assert report.line(found, 1.0)[report.HEADINGS.index("ours is")] == said


def test_what_diverged_is_shown_and_not_left_out():
    found = made_up()
    found["rows"][1]["runs"][0]["score"] = None
    assert report.line(found, 1.0)[report.HEADINGS.index("ours, untuned")].startswith("nan")


def test_a_cited_rival_is_marked():
    found = made_up()
    found["rows"][2]["method"] = "cited"
    assert report.line(found, 1.0)[report.HEADINGS.index("DP-SGD, tuned for free")].endswith("†")


def parsed(text):
    """The cells of a Markdown table, by heading."""
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]
    return [dict(zip(lines[0], cells, strict=True)) for cells in lines[2:]]


def compared(row, heading, values, digits):
    """Mean and standard error in a cell are those of the values."""
    numbers = [float(number) for number in re.findall(r"[-+]?\d+\.\d+", row[heading])]
    expected = [np.mean(values)] + ([np.std(values, ddof=1) / math.sqrt(len(values))] if len(values) > 1 else [])
    assert numbers == pytest.approx(expected, abs=0.50001 * 10**-digits), (row["task"], row["ε"], heading)


def check_table(text, directory):
    """Every number of a table, from the JSON files without the report's own functions."""
    columns = {"zero-shot": "zero-shot", "non-private": "non-private", "ours": "ours, untuned", "pure": "ours, δ = 0"}
    columns |= {"free": "DP-SGD, tuned for free", "charged": "DP-SGD, tuning charged", "untuned": "DP-SGD, untuned"}
    count = 0
    for row in parsed(text):
        found = json.loads((directory / f"{row['task'].replace(' ', '_')}.json").read_text(encoding="utf-8"))
        digits = 1 if found["metric"] == "accuracy" else 4
        runs = {r["method"]: r["runs"] for r in found["rows"] if r["epsilon"] in (None, float(row["ε"]))}
        runs.setdefault("free", runs.get("cited", []))
        for method, heading in columns.items():
            scores = [run["score"] for run in runs.get(method, [])]
            if not scores:
                assert row[heading] == "–"
                continue
            compared(row, heading, scores, digits)
            count += 1
        rival = {run["seed"]: run["score"] for run in runs["free"]}
        paired = [run["score"] - rival[run["seed"]] for run in runs["ours"] if run["seed"] in rival]
        if paired:
            compared(row, "ours − tuned", paired, digits + 1)
        for fact in ("passes", "seconds"):
            shown = float(row[fact].split(" / ")[0])
            assert shown == pytest.approx(
                np.mean([run[fact] for run in runs["ours"]]), abs=0.51 if shown >= 10 else 0.051
            )
    return count


def test_the_numbers_of_the_table_are_those_of_the_json(tmp_path):
    write_result(tmp_path / "icu.json", made_up())
    write_result(tmp_path / "sine.json", made_up("loss", (0.05, 0.0612), (0.052, 0.063), task="sine"))
    unfinished = made_up(task="mnist")
    unfinished["rows"] = unfinished["rows"][:1]  # no private method yet
    write_result(tmp_path / "mnist.json", unfinished)
    text = report.write(tmp_path)
    assert "mnist" not in text
    assert text + "\n" == (tmp_path / "table.md").read_text(encoding="utf-8")
    assert check_table(text, tmp_path) == 6
    with pytest.raises(AssertionError):
        check_table(text.replace("73.0 ± 2.1", "73.1 ± 2.1"), tmp_path)


# --- what is stored --------------------------------------------------------------------------------------------------

RESULTS = report.read(STORED)


def test_the_stored_table_is_that_of_the_stored_results_and_of_the_docs():
    text = (STORED / "table.md").read_text(encoding="utf-8").strip()
    assert text == report.table(RESULTS)
    assert check_table(text, STORED) > 40
    assert text in (ROOT / "docs" / "pages" / "results.md").read_text(encoding="utf-8")
    short = (STORED / "brief.md").read_text(encoding="utf-8").strip()
    assert short == report.brief(RESULTS)
    assert short in (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_brief_table_has_the_means_of_the_table(tmp_path):
    write_result(tmp_path / "icu.json", made_up())
    report.write(tmp_path)
    (row,) = (tmp_path / "brief.md").read_text(encoding="utf-8").splitlines()[2:]
    whole = report.table(report.read(tmp_path)).splitlines()[2:]
    for cell, line in zip([c.strip() for c in row.strip("|").split("|")][2:], whole, strict=True):
        columns = [c.strip() for c in line.strip("|").split("|")]
        means = [columns[i].split(" ±")[0].rstrip("†") for i in (5, 7, 8, 9)]
        assert cell.replace("*", "").split(" / ") == means


def check_plan(epsilon, delta, run):
    """What a ledger recorded is what the public formula says: T, rate, σ, and the price of every question."""
    rule = Rule(epsilon, delta, **run["public"])
    found = run["plan"]
    assert (found["steps"], found["sample_rate"]) == (rule.steps, rule.sample_rate)
    assert found["noise_multiplier"] == pytest.approx(rule.noise_multiplier, rel=1e-9)
    expected = {}
    for what, event in rule.queries():
        by_range = event.epsilon_range < event.mu
        price = {"epsilon_range": event.epsilon_range} if by_range else {"mu": event.mu}
        expected[what] = {"count": expected.get(what, {"count": 0})["count"] + 1, **price}
    assert {what: sorted(share) for what, share in found["shares"].items()} == {
        w: sorted(s) for w, s in expected.items()
    }
    for what, share in expected.items():
        assert found["shares"][what] == pytest.approx(share, rel=1e-9), what
    assert run["passes"] == pytest.approx(rule.passes)


def check_pure_plan(epsilon, run):
    """The same at δ = 0: the price of every question from records, parameters and ε."""
    rule, expected = PureRule(epsilon, **run["public"]), {}
    for what, event in rule.queries():
        price = {"epsilon_range": event.epsilon_range} if event.pure is None else {"pure": event.pure}
        expected[what] = {"count": expected.get(what, {"count": 0})["count"] + 1, **price}
    assert run["plan"].keys() == {"shares"}
    assert run["plan"]["shares"].keys() == expected.keys()
    for what, share in expected.items():
        assert run["plan"]["shares"][what] == pytest.approx(share, rel=1e-9), what
    assert run["passes"] == pytest.approx(rule.passes)


@pytest.mark.parametrize("found", RESULTS, ids=[found["task"] for found in RESULTS])
def test_every_stored_plan_is_the_public_formula(found):
    """The same in every cell, from the number of records and layers, ε and δ alone; and no more than ε is charged."""
    methods = ("ours", "plain", "public")
    runs = [(row["epsilon"], run) for row in found["rows"] if row["method"] in methods for run in row["runs"]]
    assert runs
    for epsilon, run in runs:
        check_plan(epsilon, found["delta"], run)
        assert 0.97 * epsilon < run["charged"] <= epsilon
    epsilon, run = runs[0]
    with pytest.raises(AssertionError):  # another budget has another plan
        check_plan(2 * epsilon, found["delta"], run)


@pytest.mark.parametrize("found", RESULTS, ids=[found["task"] for found in RESULTS])
def test_every_stored_pure_plan_is_the_public_formula(found):
    runs = [(row["epsilon"], run) for row in found["rows"] if row["method"] == "pure" for run in row["runs"]]
    for epsilon, run in runs:
        check_pure_plan(epsilon, run)
        assert run["charged"] == pytest.approx(epsilon, rel=1e-12)
        with pytest.raises(AssertionError):
            check_pure_plan(2 * epsilon, run)


@pytest.mark.filterwarnings("ignore:with 300 records")  # n·ε is small
def test_the_metric_comes_from_where_it_is_asked_to(tiny):
    """Without one nothing is asked for it; public records tell how much a head curves, and spare its scale."""
    asked = {"ours": {"metric", "scale"}, "plain": {"scale"}, "public": {"metric"}}
    for source, questions in asked.items():
        run = ours.ours("icu", 1.0, 0, source)
        check_plan(1.0, 1e-5, run)
        assert {"metric", "scale"} & run["plan"]["shares"].keys() == questions
    options = [set(options) - {"delta", "criterion"} for _, options in tiny]
    assert options == [set(), {"grad_sample_mode"}, {"public_loader"}]


@pytest.mark.filterwarnings("ignore:with 300 records")  # n·ε is small
def test_a_pure_run_of_the_suite_keeps_its_plan(tiny):
    run = ours.pure("icu", 1.0, 0)
    check_pure_plan(1.0, run)
    assert run["charged"] == pytest.approx(1.0, rel=1e-12)
    ((_, options),) = tiny
    assert options.keys() == {"delta", "criterion"}
    assert options["delta"] == 0.0
    with pytest.raises(AssertionError):
        check_pure_plan(2.0, run)
