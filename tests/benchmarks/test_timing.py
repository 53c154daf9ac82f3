"""The timer of the benchmarks: the order of runs, what is not run again, medians and ratios, and processes."""

import importlib.util
import json
import pkgutil
import subprocess

import pytest

import benchmarks
from benchmarks import timing
from benchmarks.timing import Timings, interleaved
from opacus_expm.experiments.journal import Journal


def runs(found):
    """Whether ``python -m`` runs this module: any file, and a folder that has a ``__main__``."""
    return not found.ispkg or importlib.util.find_spec(f"benchmarks.{found.name}.__main__") is not None


@pytest.mark.parametrize("name", [found.name for found in pkgutil.iter_modules(benchmarks.__path__) if runs(found)])
def test_every_benchmark_can_be_imported_and_says_how_to_run_it(name):
    module = importlib.import_module(f"benchmarks.{name}")
    assert name == "timing" or f"    python -m benchmarks.{name} " in module.__doc__


def test_rounds_are_interleaved_and_what_is_there_is_not_measured_again(tmp_path):
    order = []

    def run(item):
        order.append(item)
        return {"seconds": float(len(order))}

    def measure(rounds, **common):
        return interleaved(("a", "b"), run, Journal(tmp_path / "log.jsonl", "test"), rounds=rounds, common=common)

    assert measure(2).runs == {"a": [{"seconds": 1.0}, {"seconds": 3.0}], "b": [{"seconds": 2.0}, {"seconds": 4.0}]}
    assert order == ["a", "b", "a", "b"]
    assert measure(3).runs["b"] == [{"seconds": 2.0}, {"seconds": 4.0}, {"seconds": 6.0}]
    assert order[4:] == ["a", "b"]
    assert measure(1, records=7).runs == {"a": [{"seconds": 7.0}], "b": [{"seconds": 8.0}]}


def test_what_cannot_be_measured_is_left_out_and_tried_again():
    journal = Journal(None, "test")
    found = interleaved(("a", "b"), lambda item: None if item == "a" else {"seconds": 1.0}, journal)
    assert list(found.runs) == ["b"]
    assert list(interleaved(("a", "b"), lambda item: {"seconds": 2.0}, journal).runs) == ["a", "b"]


def test_medians_and_ratios():
    found = Timings({"a": [{"s": 9.0}, {"s": 2.0}, {"s": 4.0}], "b": [{"s": 1.0}, {"s": 2.0}]})
    assert found.median("a", "s") == 4.0
    assert found.median("b", "s") == 2.0
    assert found.ratio("a", "b", "s") == 2.0
    assert found.medians("s") == {"a": {"s": 4.0}, "b": {"s": 2.0}}


def test_a_process_reports_its_last_line(tmp_path):
    path = tmp_path / "report.json"
    path.write_text(json.dumps({"seconds": 1.5}))
    assert timing.report(timing.start("json.tool", "--compact", str(path))) == {"seconds": 1.5}
    with pytest.raises(RuntimeError, match="absent"):
        timing.report(timing.start("json.tool", str(tmp_path / "absent")))


@pytest.mark.parametrize("one_thread", [True, False])
def test_a_process_has_one_thread_if_told(monkeypatch, one_thread):
    started = []
    monkeypatch.setattr(subprocess, "Popen", lambda command, env, **options: started.append((command[1:], env)))
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    timing.start("benchmarks.scale", "--one", "item", one_thread=one_thread)
    ((command, environment),) = started
    assert command == ["-m", "benchmarks.scale", "--one", "item"]
    assert environment["OMP_NUM_THREADS"] == ("1" if one_thread else "7")


def test_actions_are_timed_and_their_results_kept():
    calls = []
    assert timing.seconds(lambda: "done")[0] == timing.cpu_seconds(lambda: "done")[0] == "done"
    assert timing.median_seconds(lambda: calls.append(None), repeats=5) >= 0
    assert len(calls) == 5
    assert timing.peak_mb() > 1
