"""The examples for clusters run on existing engines, torchrun and Ray, and release one model each."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

TUTORIALS = Path(__file__).parent.parent / "tutorials"


def run(*command):
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "default"}
    done = subprocess.run([sys.executable, *map(str, command)], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_torchrun(tmp_path):
    out, ledger = tmp_path / "private.pt", tmp_path / "ledger.jsonl"
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2)
    printed = run(*launch, TUTORIALS / "torchrun_release.py", "--out", out, "--ledger", ledger, "--epsilon", 0.5)
    assert "released with epsilon=0.5 by 2 process(es)" in printed
    _, *entries = map(json.loads, ledger.read_text().splitlines())
    assert [entry["release"]["epsilon_range"] for entry in entries] == [0.5]
    assert entries[0]["release"]["nominal_size"] == 2001
    weights = torch.load(out, weights_only=True)
    assert list(weights) == ["0.weight", "0.bias", "2.weight", "2.bias"]  # of the plain module


@pytest.mark.slow
def test_ray(tmp_path):
    pytest.importorskip("ray")
    out = tmp_path / "private.pt"
    printed = run(TUTORIALS / "ray_shards.py", "--shards", 3, "--cpus", 1, "--out", out)
    assert "released with epsilon=1.0 from 3 shards" in printed
    assert list(torch.load(out, weights_only=True)) == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert [path.name for path in tmp_path.iterdir()] == ["private.pt"]
