"""The models of a newcomer: what DP-SGD is given is the same function, and the docs show what was found."""

import json
from pathlib import Path

import torch
from torch import nn

from benchmarks import newcomers

ROOT = Path(__file__).parents[2]


def test_batch_norm_is_folded_into_the_same_function():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(108, 2))
    model[1].running_mean.normal_()
    model[1].running_var.uniform_(0.5, 2.0)
    x = torch.randn(5, 1, 8, 8)
    folded = newcomers.folded(model.eval())
    assert not any(isinstance(layer, nn.BatchNorm2d) for layer in folded.modules())
    torch.testing.assert_close(folded(x), model(x))
    assert newcomers.folded(folded) is folded


def test_a_log_becomes_means_over_runs(tmp_path):
    log = tmp_path / "log.jsonl"
    runs = [
        {"task": "t", "epsilon": 1.0, "method": m, "seed": s, "before": 10.0, "after": a, "seconds": 2.0}
        for m, s, a in (("ours", 0, 70.0), ("dp-sgd", 0, 60.0), ("ours", 1, 71.0))
    ]
    log.write_text("".join(json.dumps(run) + "\n" for run in runs))
    lines = newcomers.table(log).splitlines()
    assert [line.split("|")[3:] for line in lines[2:]] == [
        [" ours   ", " 10.0   ", " 70.5  ", " 2       ", " 2    ", ""],
        [" dp-sgd ", " 10.0   ", " 60.0  ", " 2       ", " 1    ", ""],
    ]


def test_the_docs_have_the_table_and_the_patch():
    page = (ROOT / "docs" / "pages" / "newcomers.md").read_text(encoding="utf-8")
    assert newcomers.table(ROOT / "benchmarks" / "newcomers.jsonl") in page
    patch = (ROOT / "benchmarks" / "examples" / "engine.patch").read_text(encoding="utf-8")
    assert patch.partition("\n\n")[2] in page
