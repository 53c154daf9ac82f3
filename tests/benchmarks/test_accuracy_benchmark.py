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
        add("suggested", 1.0, 0.0, seed, score=score)
    choice = {"arguments": {"radius": 0.3}, "metric": {"quantile": "0.5"}, "views": True}
    add("suggestion", 1.0, 0.0, -1, **choice)
    add("factor", 1.0, 0.0, 0, factor=2.1)
    add("suggested", 1.0, 0.0, 0, task="sine", score=1.0)
    found = accuracy.summary(log, "icu")
    assert [row["scores"] for row in found["rows"]] == [[60.0], [70.0, 72.0]]
    assert found["settings"] == [
        {
            "method": "suggestion",
            "delta": 0.0,
            "epsilon": 1.0,
            "chosen": {"radius": 0.3, "quantile": "0.5", "views": True},
        },
    ]
    text = accuracy.table(found)
    assert "| suggested, δ = 0 (2 seeds) | 71.0 ± 1.4 |" in text
    assert "| zero-shot (1 seeds)        | 60.0       |" in text
    assert "over ours at δ = 0: 2.1 (ε = 1)" in text


@pytest.mark.parametrize("task", ["mnist", "sine", "icu"])
def test_what_the_docs_show_is_what_was_found(task):
    found = read_result(ROOT / "benchmarks" / "accuracy" / f"{task}.json")
    assert found["task"] == task
    found["rows"] = [row for row in found["rows"] if row["method"] not in accuracy.EARLIER]  # no command makes them
    assert accuracy.table(found) in (ROOT / "docs" / "pages" / "results.md").read_text(encoding="utf-8")
