"""The accuracy benchmark's table, and that the docs and the README show what it found."""

from pathlib import Path

import pytest

from benchmarks import accuracy
from opacus_expm.experiments.journal import Journal, read_result

ROOT = Path(__file__).parents[2]


def test_a_log_becomes_means_and_deviations_over_seeds(tmp_path):
    log = Journal(tmp_path / "log.jsonl", "accuracy")

    def add(method, epsilon, delta, seed, task="icu", **outcome):
        cell = {"task": task, "method": method, "epsilon": epsilon, "delta": delta, "seed": seed}
        accuracy.keep(log, cell, outcome)

    add("zero-shot", None, None, 0, score=60.0)
    for seed, score in ((1, 72.0), (0, 70.0)):
        add("dp-sgd", 1.0, 0.0, seed, score=score, settings={"learning_rate": 0.3})
    add("factor", 1.0, 0.0, 0, factor=2.1)
    add("rounds", 1.0, 0.0, 0, task="sine", score=1.0)
    found = accuracy.summary(log, "icu")
    assert [row["scores"] for row in found["rows"]] == [[60.0], [70.0, 72.0]]
    assert found["settings"] == [
        {"method": "dp-sgd", "delta": 0.0, "epsilon": 1.0, "chosen": {"learning_rate": 0.3}},
    ]
    text = accuracy.table(found)
    assert "| dp-sgd, δ = 0 (2 seeds) | 71.0 ± 1.4 |" in text
    assert "| zero-shot (1 seeds)     | 60.0       |" in text
    assert "over ours at δ = 0: 2.1 (ε = 1)" in text


@pytest.mark.parametrize("task", ["mnist", "sine", "icu"])
def test_what_the_docs_show_is_what_was_found(task):
    found = read_result(ROOT / "benchmarks" / "accuracy" / f"{task}.json")
    assert found["task"] == task
    assert accuracy.table(found) in (ROOT / "docs" / "pages" / "results.md").read_text(encoding="utf-8")
